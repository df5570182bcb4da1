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
import sys
from contextlib import closing
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from hostile import messages as m
from hostile.client import Peer, dial_local, dial_tcp
from peers import Proxy


def tell(what: Any) -> None:
    print(json.dumps(what), flush=True)  # noqa: T201


def greet(way: str, at: str) -> dict[str, Any]:
    try:
        with closing(dial_local(at) if way == "local" else dial_tcp(at)) as wire:
            return {"welcome": Peer(66, None).greet(wire, m.purpose_link(1))["proved"]}
    except (OSError, AssertionError) as error:
        return {"refused": str(error)}


def forward(address: str) -> None:
    with Proxy(address) as proxy:
        tell(proxy.at)
        sys.stdin.read()


if __name__ == "__main__":
    user, command, *arguments = sys.argv[1:]
    os.setgroups([])
    os.setgid(int(user))
    os.setuid(int(user))
    tell({"greet": greet, "forward": forward}[command](*arguments))
