"""The machine's limit: the copy loops of ``limit.c``, built with ``cc`` and called with the same list of blocks.

Not for: choosing the loop that is the limit of a cell (``comparison`` takes the one with the best median).
"""

from __future__ import annotations

import ctypes
import errno
import os
import shutil
import subprocess
import tempfile
from pathlib import Path
from typing import TYPE_CHECKING, Callable

import numpy as np

from comparison import Entry
from rows import LIMIT, Missing

if TYPE_CHECKING:
    from collections.abc import Iterator

KERNELS = ("memcpy", "stream", "stream4", "stream ahead", "stream4 ahead")
THREADS = 2
MANY_BYTES = 32 << 20  # from this size on, one thread was never the fastest
POISON = 0xEE


class Limit:
    """The built loops. A list of blocks is an array of (source, destination) addresses, ``uint64``, shape (n, 2)."""

    def __init__(self) -> None:
        self._call = loaded()
        self._call.limit_differs.restype = ctypes.c_int64

    def copy(self, moves: np.ndarray, length: int, kernel: int, threads: int) -> None:
        """Copy every block with one kernel."""
        code = self._call.limit_copy(*listed(moves), ctypes.c_size_t(length), kernel, threads)
        assert code == 0, os.strerror(code)

    def differs(self, moves: np.ndarray, length: int) -> int:
        """The index of the first block that differs between source and destination; -1 if none does."""
        return int(self._call.limit_differs(*listed(moves), ctypes.c_size_t(length), THREADS))

    def poison(self, moves: np.ndarray, length: int) -> None:
        """Overwrite every destination, so that a block that is not copied is detected."""
        code = self._call.limit_poison(*listed(moves), ctypes.c_size_t(length), POISON, THREADS)
        assert code == 0, os.strerror(code)

    def vm(
        self, pid: int, moves: np.ndarray, length: int, a_call: int = 64, write: bool = False, threads: int = 1
    ) -> None:
        """Copy with ``process_vm_readv`` or ``process_vm_writev``, with `a_call` blocks per system call."""
        size, most = ctypes.c_size_t(length), ctypes.c_size_t(a_call)
        code = self._call.limit_vm(pid, *listed(moves), size, most, int(write), threads)
        if code:
            raise OSError(code, os.strerror(code))

    def collapse(self, address: int, size: int) -> None:
        """Merge a range of touched memory into huge pages."""
        code = self._call.limit_collapse(ctypes.c_void_p(address), ctypes.c_size_t(size))
        if code:
            raise Missing(f"no huge pages: MADV_COLLAPSE says {errno.errorcode.get(code, code)}")

    def entries(self, moves: np.ndarray, length: int) -> Iterator[Entry]:
        """Every loop: each kernel, two threads (for few bytes also one), the list unsorted and sorted by source."""
        ordered = np.ascontiguousarray(moves[np.argsort(moves[:, 0], kind="stable")])
        fewest = THREADS if len(moves) * length >= MANY_BYTES else 1
        lists = [("", moves), (" sorted", ordered)][: 2 if len(moves) > 1 else 1]
        for kernel, name in enumerate(KERNELS):
            for threads in range(fewest, THREADS + 1):
                for which, blocks in lists:
                    yield Entry(
                        LIMIT, self._loop(blocks, length, kernel, threads), f"{name}{which} x{threads}", threads
                    )

    def _loop(self, moves: np.ndarray, length: int, kernel: int, threads: int) -> Callable[[], None]:
        return lambda: self.copy(moves, length, kernel, threads)


def listed(moves: np.ndarray) -> tuple[ctypes.c_void_p, ctypes.c_size_t]:
    """The list as arguments for C."""
    assert moves.dtype == np.uint64, moves.dtype
    assert moves.ndim == 2, moves.shape
    assert moves.shape[1] == 2, moves.shape
    assert moves.flags.c_contiguous, "a list of blocks lies in one piece"
    return ctypes.c_void_p(moves.ctypes.data), ctypes.c_size_t(len(moves))


def loaded() -> ctypes.CDLL:
    """Build and load the library. Each process builds it, in a fraction of a second."""
    compiler = shutil.which("cc")
    if compiler is None:
        raise Missing("no C compiler (cc) for the limit's loops")
    with tempfile.TemporaryDirectory(prefix="limit-") as folder:
        source, library = Path(__file__).with_suffix(".c"), Path(folder) / "limit.so"
        command = [compiler, "-O3", "-shared", "-fPIC", "-pthread", "-o", str(library), str(source)]
        subprocess.run(command, check=True, timeout=60)  # noqa: S603  (the compiler of this machine)
        return ctypes.CDLL(str(library))  # the mapping stays valid after the file is removed
