"""Two hosts: peers in separate network namespaces, with virtual cables between them.

Needs root and the programs `ip`, `tc`, `unshare` and `nsenter`.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

from peers import Ends, Peer, options

ADDRESSES = ("10.231.7.1", "10.231.7.2")
MOUNT = ("--mount", "sh", "-c", 'mount -t sysfs sysfs /sys && exec "$@"', "sh")


def _run(*command: str) -> bool:
    return subprocess.run(command, check=False, capture_output=True, timeout=10).returncode == 0  # noqa: S603


def possible() -> bool:
    """Whether this machine allows network namespaces."""
    return (
        os.geteuid() == 0
        and all(map(shutil.which, ("ip", "tc", "unshare", "nsenter")))
        and _run("unshare", "--net", "ip", "link", "add", "v0", "type", "veth", "peer", "name", "v1")
    )


class Hosts:
    """Two processes, each in its own network namespace, and a virtual cable.

    Args:
        ends: owns the processes.
        environment: further environment variables of both.
    """

    def __init__(self, ends: Ends, environment: dict[str, str] | None = None) -> None:
        # With a `/sys` of their own, the processes find the interfaces of their namespace there.
        prefix = ("unshare", "--net", *(MOUNT if environment else ()))
        self.ends = [ends.adopt(Peer(*prefix, environment=environment)) for _ in ADDRESSES]
        for end in self.ends:
            end.pid()  # waits until it runs in its namespace
        self.lay("cable", ADDRESSES)
        for number in range(2):
            self._in(number, "link", "set", "lo", "up")

    def _in(self, number: int, *command: str, program: str = "ip") -> None:
        assert _run("nsenter", "-t", str(self.ends[number].process.pid), "-n", program, *command), command

    def lay(self, name: str, addresses: tuple[str, str]) -> None:
        """Lay a cable between these addresses."""
        self._in(0, "link", "add", name, "type", "veth", "peer", "name", f"{name}-peer")
        self._in(0, "link", "set", f"{name}-peer", "netns", str(self.ends[1].process.pid))
        for number, end in enumerate((name, f"{name}-peer")):
            self._in(number, "addr", "add", f"{addresses[number]}/30", "dev", end)
            self._in(number, "link", "set", end, "up")

    def plug(self, up: bool, cable: str = "cable") -> None:
        """Connect or disconnect a cable."""
        self._in(0, "link", "set", cable, "up" if up else "down")

    def throttle(self, mbit: int, cable: str = "cable") -> None:
        """Limit what the second end sends to a rate in Mbit/s."""
        shape = ("rate", f"{mbit}mbit", "burst", "64k", "latency", "50ms")
        self._in(1, "qdisc", "replace", "dev", f"{cable}-peer", "root", "tbf", *shape, program="tc")

    def connected(self, number: int) -> set[str]:
        """The local addresses of the established connections of one end."""
        table = Path(f"/proc/{self.ends[number].process.pid}/net/tcp").read_text().splitlines()[1:]
        rows = [line.split() for line in table]
        local = [row[1].split(":")[0] for row in rows if row[3] == "01"]
        return {".".join(str(byte) for byte in reversed(bytes.fromhex(ip))) for ip in local}

    def open(self, *given: dict[str, Any]) -> tuple[Peer, Peer]:
        """Clusters 1 and 2 with these options; both listen."""
        for number, (end, extra) in enumerate(zip(self.ends, given)):
            end.open(options(**{"listen": f"{ADDRESSES[number]}:0", **extra}), cluster=number + 1)
        return self.ends[0], self.ends[1]
