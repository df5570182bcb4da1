"""Addresses and free ports, listeners without an engine, and a proxy between two ends that can be slow or cut."""

from __future__ import annotations

import socket
import struct
import threading
from contextlib import ExitStack, suppress

from .values import LIMIT


def split(address: str) -> tuple[str, int]:
    """Host and port of `"1.2.3.4:5"` or `"[::1]:5"`."""
    host, port = address.rsplit(":", 1)
    return host.strip("[]"), int(port)


PORTS = range(12_000, 32_000, 16)  # first ports of what `free_ports` returns, below the ephemeral ports
_claims: list[socket.socket] = []
_refusing: list[socket.socket] = []


def free_ports(count: int = 12) -> int:
    """Return the first of `count` consecutive free ports, which no other caller gets while this process runs.

    A name in the abstract namespace of Unix sockets claims them, so tests in other processes choose others.
    """
    assert count <= PORTS.step
    for first in PORTS:
        claim = socket.socket(socket.AF_UNIX)
        try:
            claim.bind(f"\0llm_datadist tests: ports from {first}")
        except OSError:
            claim.close()
            continue
        _claims.append(claim)  # also if another program uses one of the ports: then nobody need try again
        with ExitStack() as doors, suppress(OSError):
            for port in range(first, first + count):
                doors.enter_context(socket.create_server(("127.0.0.1", port)))
            return first
    raise AssertionError("no free ports")


def lingering_socket(seconds: int) -> tuple[socket.socket, socket.socket]:
    """Return a socket whose last descriptor takes this long to close, and its peer, which never reads what was sent."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        made = socket.create_connection(server.getsockname())
        other, _ = server.accept()
    made.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, seconds))
    made.setblocking(False)
    with suppress(BlockingIOError):
        while True:
            made.send(bytes(1 << 16))
    return made, other


def refusing_port() -> int:
    """Return a port at which every connection is refused while this process runs: it is bound, and nobody listens."""
    door = socket.socket()
    door.bind(("127.0.0.1", 0))
    _refusing.append(door)
    return int(door.getsockname()[1])


class _Door:
    """A listener on the loopback; `accepted` is called with every connection, in one thread."""

    def __init__(self, port: int = 0) -> None:
        self.door = socket.create_server(("127.0.0.1", port))
        self.at = f"127.0.0.1:{self.door.getsockname()[1]}"
        self.sockets: list[socket.socket] = []
        self.threads: list[threading.Thread] = []
        self.spawn(self._accept)

    def spawn(self, work: object, *args: object) -> None:
        self.threads.append(threading.Thread(target=work, args=args, daemon=True))
        self.threads[-1].start()

    def _accept(self) -> None:
        with suppress(OSError):
            while True:
                caller, _ = self.door.accept()
                self.sockets.append(caller)
                self.accepted(caller)

    def __enter__(self) -> _Door:  # noqa: PYI034
        return self

    def __exit__(self, *_: object) -> None:
        for each in [self.door, *self.sockets]:
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)
        for thread in self.threads:
            thread.join(5)
        for each in [self.door, *self.sockets]:
            each.close()


class Stranger(_Door):
    """A listener without an engine: it accepts and sends nothing, or sends `words` and closes."""

    def __init__(self, words: bytes | None = None, port: int = 0) -> None:
        self.words = words
        super().__init__(port)

    def accepted(self, caller: socket.socket) -> None:
        if self.words is not None:
            with suppress(OSError):
                caller.sendall(self.words)
            caller.close()


class Proxy(_Door):
    """A proxy between two ends that can delay, stop, cut or change the stream. Only for links over sockets."""

    def __init__(self, to: str) -> None:
        self.to = to
        self.left: dict[str, float] = {"up": float("inf"), "down": float("inf")}  # bytes that still pass
        self.cut = False  # whether to close the stream then, or only to stop forwarding
        self.flips: dict[str, int] = {}  # bits that still pass before one that is changed
        super().__init__()

    def allow(self, way: str, count: float, *, cut: bool = False) -> None:
        """Let `count` more bytes pass `"up"` to the listener, or `"down"` from it."""
        self.cut, self.left[way] = cut, count

    def flip(self, way: str, after: int) -> None:
        """Change one bit in this direction, after `after` further bits."""
        self.flips[way] = after

    def _flipped(self, way: str, data: bytes) -> bytes:
        after = self.flips.pop(way, None)
        if after is None:
            return data
        if after >= 8 * len(data):
            self.flips[way] = after - 8 * len(data)
            return data
        changed = bytearray(data)
        changed[after // 8] ^= 1 << after % 8
        return bytes(changed)

    def accepted(self, caller: socket.socket) -> None:
        callee = socket.create_connection(split(self.to), timeout=LIMIT)
        callee.settimeout(None)
        self.sockets.append(callee)
        self.spawn(self._forward, "up", caller, callee)
        self.spawn(self._forward, "down", callee, caller)

    def _forward(self, way: str, source: socket.socket, target: socket.socket) -> None:
        with suppress(OSError):
            while data := source.recv(1 << 16):
                passed = self._flipped(way, data[: int(min(self.left[way], len(data)))])
                self.left[way] -= len(passed)
                target.sendall(passed)
                if len(passed) < len(data) and self.cut:
                    break
            for end in (source, target):
                end.shutdown(socket.SHUT_RDWR)
