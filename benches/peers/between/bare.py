"""The limit between two processes: copy loops over a shared mapping, plain system calls, and a plain TCP stream.

Not for: copies inside one process (``local``), which use the same loops.
"""

from __future__ import annotations

import os
import socket
import struct
from functools import partial
from typing import Any, Callable, Optional

import numpy as np

from between.adapter import HUGE, PULL, REMOTE, THREADS, Adapter, Case, Run, address, memory_file, shared

A_CALL = (8, 64, 512)
PIECES = (256 << 10, 1 << 20, 4 << 20)
HEAD = struct.Struct("<QQQ")  # pull or not, bytes, bytes a call


class Bare(Adapter):
    """The loops of ``limit.c``, and sockets, without any system."""

    def open(self) -> None:
        """Allocate memory that the other side can map, or of the process. For a stream, the remote side listens."""
        if self.setting == "mapped":
            self.descriptor = memory_file("remote", self.size)
            self.memory = shared(self.descriptor, self.size)
            self.memory[:: 4096 // 8] = 0
            if self.pages == HUGE:
                self.collapse(self.memory)
        else:
            self.memory = self.plain(self.size)
        self.stream: Optional[socket.socket] = None
        if self.setting == "stream" and self.role == REMOTE:
            self.door = socket.create_server(("127.0.0.1", 0))

    def hello(self) -> Any:
        """The data with which the local side accesses the memory."""
        door = self.door.getsockname() if self.setting == "stream" else None
        return os.getpid(), getattr(self, "descriptor", -1), address(self.memory), door

    def link(self, hello: Any) -> None:
        """Map the memory, store its address, or connect."""
        self.pid, descriptor, self.there, door = hello
        if self.setting == "mapped":
            opened = os.open(f"/proc/{self.pid}/fd/{descriptor}", os.O_RDWR)
            self.theirs = shared(opened, self.size)
            os.close(opened)
            self.there = address(self.theirs)
        elif self.setting == "stream":
            self.stream = socket.create_connection(door, timeout=20)
            self.stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

    def request(self, case: Case) -> Run:
        """The first of the loops."""
        return self.variants(case)[0][2]

    def variants(self, case: Case) -> list[tuple[str, int, Run]]:
        """Every loop. The measuring side chooses the limit."""
        local = address(self.memory)
        moves = case.moves(self.there, local) if case.op == PULL else case.moves(local, self.there)
        if self.setting == "mapped":
            return [(entry.setting, entry.threads, entry.run) for entry in self.limit.entries(moves, case.block)]
        if self.setting == "stream":
            return [(f"{piece >> 10} KiB a call", 1, partial(self.asked, case, piece)) for piece in PIECES]
        return [
            (f"{a_call} a call x{threads}", threads, partial(self.vm, moves, case, a_call, threads))
            for a_call in A_CALL
            for threads in range(1, THREADS + 1)
        ]

    def vm(self, moves: np.ndarray, case: Case, a_call: int, threads: int) -> None:
        """Copy with system calls of `a_call` blocks. Each thread takes the next call when it has finished one."""
        self.limit.vm(self.pid, moves, case.block, a_call, case.op != PULL, threads)

    # --- the plain stream: the same number of bytes, in one piece, from the start of the memory ---

    def asked(self, case: Case, piece: int) -> None:
        """Local side: send the header, then receive or send the bytes."""
        assert self.stream is not None, "not linked"
        self.stream.sendall(HEAD.pack(case.op == PULL, case.total, piece))
        if case.op == PULL:
            received(self.stream, self.part(case.total), piece)
        else:
            sent(self.stream, self.part(case.total), piece)
            received(self.stream, memoryview(bytearray(1)), 1)

    def attend(self, case: Optional[Case], times: int, over: Callable[[], bool]) -> None:  # noqa: ARG002
        """Remote side: serve the other end of the stream."""
        if self.stream is None:
            self.stream, _ = self.door.accept()
            self.stream.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.stream.settimeout(0.02)
        while not over():
            head = bytearray(HEAD.size)
            try:
                got = self.stream.recv_into(head)
            except TimeoutError:
                continue
            self.stream.settimeout(20)
            received(self.stream, memoryview(head)[got:], HEAD.size)
            pull, total, piece = HEAD.unpack(head)
            if pull:
                sent(self.stream, self.part(total), piece)
            else:
                received(self.stream, self.part(total), piece)
                self.stream.sendall(b"!")
            self.stream.settimeout(0.02)

    def part(self, total: int) -> memoryview:
        """The start of the memory."""
        return self.memory.data.cast("B")[:total]

    def poison(self, case: Case) -> None:
        """A stream writes the beginning."""
        if self.setting == "stream":
            self.memory[: case.total // 8] = 0
        else:
            super().poison(case)

    def wrong(self, case: Case) -> str:
        """A stream writes the beginning."""
        if self.setting == "stream":
            end = case.total // 8
            return "" if np.array_equal(self.memory[:end], self.pattern[:end]) else "other bytes"
        return super().wrong(case)


def sent(stream: socket.socket, part: memoryview, piece: int) -> None:
    """Send everything, with `piece` bytes per call."""
    for at in range(0, len(part), piece):
        stream.sendall(part[at : at + piece])


def received(stream: socket.socket, part: memoryview, piece: int) -> None:
    """Receive everything, with at most `piece` bytes per call."""
    at = 0
    while at < len(part):
        got = stream.recv_into(part[at : at + piece])
        if got == 0:
            raise ConnectionError("the stream ended")
        at += got
