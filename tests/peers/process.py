"""Operations on the process of an `End`: count and limit its resources, and fork it."""

from __future__ import annotations

import atexit
import ctypes
import os
import pickle
import resource
import signal
import subprocess
import time
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np

from .values import LIMIT, by_blocks, by_request, outcome, pattern


def _over(address: int, rows: int, row_bytes: int) -> np.ndarray:
    """An array over the memory at `address`."""
    raw: Any = (ctypes.c_ubyte * (rows * row_bytes)).from_address(address)
    return np.frombuffer(raw, dtype=np.uint8).reshape(rows, row_bytes)


class Process:
    """The base of `End`."""

    def __init__(self) -> None:
        self.spare: list[int] = []  # descriptors that `limit_descriptors` holds
        self.open_files_limit = 0

    def pid(self) -> int:
        return os.getpid()

    def open_files(self, count: int) -> str:
        """Open that many files at once, as an application would. Return the error as text, or an empty text."""
        with ExitStack() as held:
            try:
                for _ in range(count):
                    held.enter_context(Path("/dev/null").open("rb"))
            except OSError as error:
                return str(error)
        return ""

    def limit_descriptors(self, free: int | None) -> None:
        """Open files until only `free` descriptors are left below RLIMIT_NOFILE, which is lowered. None undoes this."""
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        while self.spare:
            os.close(self.spare.pop())
        self.open_files_limit = self.open_files_limit or soft
        if free is None:
            resource.setrlimit(resource.RLIMIT_NOFILE, (self.open_files_limit, hard))
            return
        highest = max(int(descriptor.name) for descriptor in Path("/proc/self/fd").iterdir())
        resource.setrlimit(resource.RLIMIT_NOFILE, (highest + 1 + free, hard))
        with suppress(OSError):
            while True:
                self.spare.append(os.open("/dev/null", os.O_RDONLY))
        for _ in range(free):
            os.close(self.spare.pop())

    def close_standard_streams(self) -> None:
        """Close the descriptors 0 to 2, as some daemons start."""
        for descriptor in range(3):
            with suppress(OSError):
                os.close(descriptor)

    def standard_streams(self) -> list[str]:
        """What the descriptors 0 to 2 refer to, of those that are open."""
        found = []
        for descriptor in range(3):
            with suppress(FileNotFoundError):
                found.append(str(Path(f"/proc/self/fd/{descriptor}").readlink()))
        return found

    def open_standard_streams(self) -> None:
        """Open the null device as the descriptors 0 to 2, in place of what they refer to."""
        null = os.open("/dev/null", os.O_RDWR)
        for descriptor in range(3):
            if descriptor != null:
                os.dup2(null, descriptor)

    def limit_files(self, size: int | None) -> None:
        """Limit the size of files (RLIMIT_FSIZE). None removes the limit."""
        _, most = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (most if size is None else size, most))

    def sockets(self) -> list[str]:
        """The sockets that the process has open."""
        seen = []
        for descriptor in Path("/proc/self/fd").iterdir():
            with suppress(OSError):  # the descriptor of this listing is closed by now
                seen.append(str(descriptor.readlink()))
        return sorted(name for name in seen if name.startswith("socket:"))

    def become(self, user: int) -> None:
        """Change to another user, and stay dumpable, so that the process may read its own files in /proc."""
        import encodings.idna  # noqa: F401, PLC0415

        # numpy imports some modules late, from files that the other user may not be able to read.
        pickle.dumps(pattern(0, 1, 1, 1))
        os.setgroups([])
        os.setgid(user)
        os.setuid(user)
        assert ctypes.CDLL(None).prctl(4, 1, 0, 0, 0) == 0  # PR_SET_DUMPABLE

    def rest(self, seconds: float) -> float:
        """Sleep, and return the CPU seconds that the process used meanwhile."""
        before = time.process_time()
        time.sleep(seconds)
        return time.process_time() - before

    def limit_memory(self, more: int | None) -> None:
        """Limit the address space (RLIMIT_AS) to `more` bytes above its present size. None removes the limit."""
        _, most = resource.getrlimit(resource.RLIMIT_AS)
        limit = most if more is None else self._pages(0) + more
        resource.setrlimit(resource.RLIMIT_AS, (limit, most))

    def _pages(self, column: int) -> int:
        """Bytes of address space (0) or resident bytes (1)."""
        with Path("/proc/self/statm").open() as statm:
            return int(statm.read().split()[column]) * resource.getpagesize()

    def resources(self) -> dict[str, int]:
        """Threads, descriptors, mappings and resident bytes of the process."""
        return {
            "threads": len(list(Path("/proc/self/task").iterdir())),
            "descriptors": len(list(Path("/proc/self/fd").iterdir())),
            "mappings": Path("/proc/self/maps").read_text().count("\n"),
            "resident": self._pages(1),
        }

    def hatch(self, settings: dict[str, str], cluster: int, rows: int, row_bytes: int) -> tuple[int, str]:
        """Fork a process without an engine and open one there, with caches 1 (batch) and 2 (blocks) of pattern 1.

        Returns its process id and where it listens. It only waits to be killed.
        """
        assert self.dist is None, "a process with an engine is no parent"
        signal.signal(signal.SIGCHLD, signal.SIG_IGN)
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            with suppress(BaseException):
                address = self.init(settings, cluster)
                key = by_request(cluster, 1)
                self.allocate("batch", rows, row_bytes, 2, keys=[key], seed=1)
                self.allocate("blocks", rows, row_bytes, 2, blocks=True, keys=[by_blocks(cluster)], seed=2)
                os.write(writing, str(address).encode())
                os.close(writing)
                while True:
                    signal.pause()
            os._exit(1)
        os.close(writing)
        with os.fdopen(reading) as told:
            address = told.read()
        assert address, "the hatched process died"
        return child, address

    def linger(self, fork: bool) -> int:
        """Start a child that outlives this process: a fork, or a program that inherits descriptors. Return its id."""
        if not fork:
            return subprocess.Popen(["sleep", "30"], close_fds=False).pid  # noqa: S607
        child = os.fork()
        if child == 0:
            time.sleep(30)
            os._exit(0)
        return child

    def fork_and_try(self, call: str, *args: Any) -> tuple[int, str]:
        """Fork with the engine open. The child makes the call and ends like `sys.exit`.

        Returns the exit status of the child, or -1 if it had to be killed, and the outcome of the call.
        """
        reading, writing = os.pipe()
        child = os.fork()
        if child == 0:
            signal.alarm(int(LIMIT))
            name, text = outcome(lambda: getattr(self, call)(*args))
            os.write(writing, f"{name}: {text}".encode()[:4000])
            os.close(writing)
            atexit._run_exitfuncs()
            os._exit(7)
        os.close(writing)
        with os.fdopen(reading) as told:
            text = told.read()
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), text
