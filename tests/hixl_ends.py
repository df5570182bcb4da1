"""Engines of the module `hixl` with their memory, in this process or in one of their own.

Calls take and return plain values. The fixture `hixl_way` chooses how the bytes of all transfers travel.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import mmap
import multiprocessing
import os
import platform
import signal
import socket
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

import hixl
from peers import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from multiprocessing.connection import Connection

LIMIT = 10_000  # milliseconds of calls that succeed
WAYS = ("rings", "process", "tcp")
# Rings carry the bytes of a call up to 2 MiB, and longer calls are read by process id.
_LONG = (2 << 20) + 1
_ANSWER = 60.0  # seconds within which another process answers


def free_port(family: int = socket.AF_INET) -> int:
    """Return a port of the loopback interface at which nobody listens now."""
    with socket.socket(family, socket.SOCK_STREAM) as server:
        server.bind(("::1" if family == socket.AF_INET6 else "127.0.0.1", 0))
        return server.getsockname()[1]


def listener() -> str:
    """Return the address of an engine that can listen."""
    return f"127.0.0.1:{free_port()}"


class Padding:
    """Memory that is moved together with every operation, so that calls are long enough for reads by process id."""

    def __init__(self) -> None:
        self.is_on = False
        self._of: dict[str, int] = {}

    def register(self, end: End | Child, address: str) -> None:
        """Give an engine that was initialized its memory."""
        if self.is_on:
            self._of[address] = end.add("padding", _LONG)
            assert end.register("padding")[0] == hixl.SUCCESS
            end.padding = self._of[address]

    def added(self, end: End | Child, peer: str, ops: list[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
        """Return the operations of a call together with one that moves the memory."""
        remote = self._of.get(peer)
        return [*ops, (end.padding, remote, _LONG)] if self.is_on and ops and remote and end.padding else ops


padding = Padding()


class End:
    """One engine and its memory."""

    padding = 0

    def __init__(self) -> None:
        self.engine = hixl.Hixl()
        self.memory: dict[str, Any] = {}

    def initialize(self, address: str, options: dict[str, str] | None = None) -> int:
        status = self.engine.initialize(address, options or {})
        if status == hixl.SUCCESS:
            padding.register(self, address)
        return status

    def finalize(self) -> None:
        return self.engine.finalize()

    def add(self, name: str, size: int, seed: int | None = None) -> int:
        """Allocate memory, zeros or `pattern(seed)`, and return its address."""
        self.memory[name] = ctypes.create_string_buffer(b"" if seed is None else pattern(seed, size), size)
        return ctypes.addressof(self.memory[name])

    def add_silent(self, name: str, size: int) -> int:
        """Map memory that does not answer: the kernel waits for pages that never come. Needs root."""
        memory = mmap.mmap(-1, size)
        address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
        number = {"x86_64": 323, "aarch64": 282}[platform.machine()]  # userfaultfd
        faults = ctypes.CDLL(None, use_errno=True).syscall(number, os.O_CLOEXEC | os.O_NONBLOCK)
        assert faults >= 0, os.strerror(ctypes.get_errno())
        fcntl.ioctl(faults, 0xC018AA3F, struct.pack("QQQ", 0xAA, 0, 0))  # UFFDIO_API
        fcntl.ioctl(faults, 0xC020AA00, struct.pack("QQQQ", address, size, 1, 0))  # UFFDIO_REGISTER, for missing pages
        self.memory[name] = memory
        return address

    def address(self, name: str) -> int:
        return ctypes.addressof(self.memory[name])

    def bytes(self, name: str) -> bytes:
        return bytes(self.memory[name].raw)

    def samples(self, name: str) -> set[int]:
        """Return the values of the first byte of each page."""
        return set(bytes(memoryview(self.memory[name]).cast("B")[::4096]))

    def write(self, name: str, at: int, data: bytes) -> None:
        ctypes.memmove(self.address(name) + at, data, len(data))

    def fill(self, name: str, byte: bytes) -> None:
        ctypes.memset(self.address(name), byte[0], len(self.memory[name]))

    def register(
        self, name: str, start: int = 0, size: int | None = None, kind: int = 1, local_only: bool = False
    ) -> tuple[int, int]:
        size = len(self.memory[name]) - start if size is None else size
        return self.register_range(self.address(name) + start, size, kind, local_only)

    def register_range(self, address: int, size: int, kind: int = 1, local_only: bool = False) -> tuple[int, int]:
        desc = hixl.MemDesc(address, size)
        desc.local_only = local_only
        return self.engine.register_mem(desc, hixl.MemType(kind))

    def move(self, peer: str, op: int, ops: list[tuple[int, int, int]], limit: int = LIMIT) -> int:
        descs = _descs(padding.added(self, peer, ops))
        return self.engine.transfer_sync(peer, hixl.TransferOp(op), descs, limit)

    def submit(self, peer: str, op: int, ops: list[tuple[int, int, int]], user_data: int = 0) -> tuple[int, int]:
        args = hixl.TransferArgs()
        args.user_data = user_data
        descs = _descs(padding.added(self, peer, ops))
        return self.engine.transfer_async(peer, hixl.TransferOp(op), descs, args)

    def notify(self, peer: str, name: str, text: str, limit: int = LIMIT) -> int:
        return self.engine.send_notify(peer, hixl.NotifyDesc(name, text), limit)

    def notifies(self) -> tuple[int, list[tuple[str, str]]]:
        status, notifies = self.engine.get_notifies()
        return status, [(notify.name, notify.notify_msg) for notify in notifies]

    def call(self, method: str, *args: Any) -> Any:
        """Call a method with plain values."""
        return getattr(self.engine, method)(*args)


class Child:
    """An `End` in a process of its own."""

    padding = 0

    def __init__(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._ours, theirs = context.Pipe()
        self.process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self.process.start()
        theirs.close()

    def __getattr__(self, name: str) -> Callable[..., Any]:
        def call(*args: Any, **keywords: Any) -> Any:
            self._ours.send((name, args, keywords))
            if not self._ours.poll(_ANSWER):
                raise TimeoutError(f"{name} did not end")
            ok, result = self._ours.recv()
            if not ok:
                raise RuntimeError(result)
            return result

        return call

    def initialize(self, address: str, options: dict[str, str] | None = None) -> int:
        status: int = self.__getattr__("initialize")(address, options)
        if status == hixl.SUCCESS:
            padding.register(self, address)
        return status

    def move(self, peer: str, op: int, ops: list[tuple[int, int, int]], limit: int = LIMIT) -> Any:
        return self.__getattr__("move")(peer, op, padding.added(self, peer, ops), limit)

    def submit(self, peer: str, op: int, ops: list[tuple[int, int, int]], user_data: int = 0) -> Any:
        return self.__getattr__("submit")(peer, op, padding.added(self, peer, ops), user_data)

    @contextlib.contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the process, and let it go on afterwards unless it was killed."""
        self.signal(signal.SIGSTOP)
        try:
            yield
        finally:
            if self.process.is_alive():
                self.signal(signal.SIGCONT)

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)  # type: ignore[arg-type]
        if number == signal.SIGSTOP:
            # The signal stops the threads one after another.
            threads = Path(f"/proc/{self.process.pid}/task")
            assert eventually(lambda: all(is_stopped(thread) for thread in threads.iterdir()))

    def kill(self) -> None:
        self.process.kill()
        self.process.join(10)

    def close(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.signal(signal.SIGCONT)
        with contextlib.suppress(OSError):
            self._ours.send(None)
        self.process.join(10)
        self.kill()
        self._ours.close()


def _serve(pipe: Connection) -> None:
    end = End()
    while True:
        try:
            asked = pipe.recv()
        except EOFError:
            asked = None
        if asked is None:
            end.finalize()
            return
        name, args, keywords = asked
        try:
            answer = (True, getattr(end, name)(*args, **keywords))
        except Exception as error:  # noqa: BLE001 - the test shows it
            answer = (False, repr(error))
        pipe.send(answer)


def _descs(ops: list[tuple[int, int, int]]) -> list[hixl.TransferOpDesc]:
    return [hixl.TransferOpDesc(*op) for op in ops]


def pattern(seed: int, size: int) -> bytes:
    """Return bytes that differ between seeds and positions."""
    block = bytes((seed * 31 + i * 7 + i // 256 * 13) % 251 for i in range(min(size, 1 << 16)))
    return (block * (size // len(block) + 1))[:size] if size else b""


def is_stopped(thread: Path) -> bool:
    return (thread / "stat").read_text().rpartition(")")[2].split()[0] == "T"


def ready(
    end: Any, address: str = "127.0.0.1:0", seed: int | None = None, options: dict[str, str] | None = None, *,
    size: int = 4096,
) -> int:  # fmt: skip
    """Initialize an end with one registered range `m`, and return its address."""
    at: int = end.add("m", size, seed)
    assert end.initialize(address, options) == hixl.SUCCESS
    assert end.register("m")[0] == hixl.SUCCESS
    return at


@dataclass
class Pair:
    """A client and a target, each with one registered range of `size` bytes."""

    local: Any
    local_address: int
    remote: Any
    remote_address: int
    address: str  # of the target
    size: int = 4096

    def connect(self, limit: int = LIMIT) -> Any:
        return self.local.call("connect", self.address, limit)

    def disconnect(self, limit: int = LIMIT) -> Any:
        return self.local.call("disconnect", self.address, limit)

    def reconnect(self) -> None:
        assert self.disconnect() == hixl.SUCCESS
        assert self.connect() == hixl.SUCCESS

    def at(self, *ops: tuple[int, int, int]) -> list[tuple[int, int, int]]:
        """Return ranges that are given by their offsets in both memories. Without any, return the whole one."""
        given = ops or [(0, 0, self.size)]
        return [(self.local_address + here, self.remote_address + there, size) for here, there, size in given]

    def move(self, op: int, *ops: tuple[int, int, int], limit: int = LIMIT) -> Any:
        return self.local.move(self.address, op, self.at(*ops), limit)

    def submit(self, op: int, *ops: tuple[int, int, int], user_data: int = 0) -> int:
        """Start a transfer, and return its request."""
        status, request = self.local.submit(self.address, op, self.at(*ops), user_data)
        assert (status, request > 0) == (hixl.SUCCESS, True)
        return int(request)


def paired(
    local: Any, remote: Any, *, size: int = 4096, seed: int | None = None, options: dict[str, str] | None = None
) -> Pair:
    """Initialize a client and a target, whose range has the bytes of `pattern(1)`. They are not connected."""
    address, here = listener(), ready(local, seed=seed, options=options, size=size)
    return Pair(local, here, remote, ready(remote, address, 1, size=size), address, size)


@contextlib.contextmanager
def connected(local: type[End | Child], remote: type[End | Child], **given: Any) -> Iterator[Pair]:
    """Open a pair whose ends are connected."""
    with ends(local, remote) as both:
        pair = paired(*both, **given)
        assert pair.connect() == hixl.SUCCESS
        yield pair


@contextlib.contextmanager
def ends(*kinds: type[End | Child]) -> Iterator[list[Any]]:
    """Open ends of these kinds, and close them afterwards."""
    opened: list[Any] = []
    try:
        opened.extend(kind() for kind in kinds)
        yield opened
    finally:
        for end in reversed(opened):
            end.close() if isinstance(end, Child) else end.finalize()
