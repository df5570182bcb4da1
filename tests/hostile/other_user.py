"""An attack by another user of the host: this program, run as root, changes to that user and runs one command.

``python other_user.py UID COMMAND ARGUMENTS`` prints JSON lines. ``greet`` greets an engine at ``tcp ADDRESS`` or
``local NAME`` and prints the outcome. ``forward`` forwards TCP from a free port of the loopback to an address.
All modules are imported before the change of user, because the user may not be able to read them. Not for:
engines, which change the user with `peers.End.become`.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401  (sockets import it late)
import json
import os
import socket
import sys
import threading
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, Callable

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hostile import messages as m
from hostile.client import Peer, dial_local, dial_tcp


def tell(what: Any) -> None:
    print(json.dumps(what), flush=True)  # noqa: T201


def in_thread(work: Callable[..., None], *args: Any) -> None:
    threading.Thread(target=work, args=args, daemon=True).start()


def greet(way: str, at: str) -> dict[str, Any]:
    try:
        with closing(dial_local(at) if way == "local" else dial_tcp(at)) as wire:
            return {"welcome": Peer(66, None).greet(wire, m.purpose_link(1))["proved"]}
    except (OSError, AssertionError) as error:
        return {"refused": str(error)}


def _forward(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def forward(address: str) -> None:
    host, port = address.rsplit(":", 1)
    door = socket.create_server(("127.0.0.1", 0))
    tell(f"127.0.0.1:{door.getsockname()[1]}")

    def accept() -> None:
        while True:
            caller = door.accept()[0]
            callee = socket.create_connection((host, int(port)))
            in_thread(_forward, caller, callee)
            in_thread(_forward, callee, caller)

    in_thread(accept)
    sys.stdin.read()


if __name__ == "__main__":
    user, command, *arguments = sys.argv[1:]
    os.setgroups([])
    os.setgid(int(user))
    os.setuid(int(user))
    tell({"greet": greet, "forward": forward}[command](*arguments))
