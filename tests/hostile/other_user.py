"""What another user of the host may try: run as root, this program becomes that user and does one thing.

``python other_user.py UID COMMAND ARGUMENTS`` prints JSON lines. ``greet`` greets an engine at ``tcp ADDRESS`` or
``local NAME`` and says what came of it. ``squat`` listens at abstract names, says "ready", and when its input ends says
how many connections came and how many bytes they brought. ``forward`` pipes TCP from a free port of the loopback to an
address. It imports all it needs before it changes the user, because that user may not be able to read it. Not for:
engines, which become another user by `peers.End.become`.
"""

from __future__ import annotations

import encodings.idna  # noqa: F401  (sockets import it late)
import json
import os
import selectors
import socket
import sys
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hostile import messages as m
from hostile.client import Peer, dial_local, dial_tcp


def tell(what: Any) -> None:
    """One line for the test."""
    print(json.dumps(what), flush=True)  # noqa: T201


def greet(way: str, at: str) -> dict[str, Any]:
    """Greet as a peer without a token; what the engine answered."""
    peer = Peer(66, None)
    wire = None
    try:
        wire = dial_local(at) if way == "local" else dial_tcp(at)
        told = peer.greet(wire, m.purpose_link(1))
        return {"welcome": told["proved"]}
    except (OSError, AssertionError) as error:
        return {"refused": str(error)}
    finally:
        if wire is not None:
            wire.close()


def squat(names: list[str]) -> dict[str, int]:
    """Listen at these names until the input ends; what came."""
    told = {"connections": 0, "bytes": 0}
    with selectors.DefaultSelector() as selector:
        for name in names:
            door = socket.socket(socket.AF_UNIX)
            door.bind(b"\0" + name.encode())
            door.listen()
            selector.register(door, selectors.EVENT_READ, "door")
        selector.register(sys.stdin, selectors.EVENT_READ, "end")
        tell("ready")
        while True:
            for key, _ in selector.select():
                if key.data == "end":
                    return told
                if key.data == "door":
                    caller = key.fileobj.accept()[0]  # type: ignore[union-attr]
                    selector.register(caller, selectors.EVENT_READ, "caller")
                    told["connections"] += 1
                else:
                    count = len(key.fileobj.recv(1 << 16))  # type: ignore[union-attr]
                    told["bytes"] += count
                    if not count:
                        selector.unregister(key.fileobj)


def _carry(source: socket.socket, target: socket.socket) -> None:
    with suppress(OSError):
        while data := source.recv(1 << 16):
            target.sendall(data)
        target.shutdown(socket.SHUT_WR)


def forward(address: str) -> None:
    """Pipe every connection to `address` until the input ends."""
    host, port = address.rsplit(":", 1)
    door = socket.create_server(("127.0.0.1", 0))
    tell(f"127.0.0.1:{door.getsockname()[1]}")

    def accept() -> None:
        while True:
            caller = door.accept()[0]
            callee = socket.create_connection((host, int(port)))
            for ends in ((caller, callee), (callee, caller)):
                threading.Thread(target=_carry, args=ends, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    sys.stdin.read()


def main() -> None:
    """Become the user and do the one thing."""
    user, command, *arguments = sys.argv[1:]
    os.setgroups([])
    os.setgid(int(user))
    os.setuid(int(user))
    if command == "greet":
        tell(greet(*arguments))
    elif command == "squat":
        tell(squat(arguments))
    elif command == "forward":
        forward(*arguments)
    else:
        raise SystemExit(f"unknown command {command}")


if __name__ == "__main__":
    main()
