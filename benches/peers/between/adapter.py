"""The interface through which a system is measured between two processes. Both sides use the adapter of the system.

The local side makes and times every transfer. The remote side owns the memory that is pulled from and pushed to. Not
for: processes and messages (``side``, ``pair``), or the choice of systems (``systems``).
"""

from __future__ import annotations

import ctypes
import mmap
import os
import time
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable, Optional

import numpy as np

from rows import Missing

if TYPE_CHECKING:
    from limit import Limit

PULL, PUSH = "pull", "push"
LOCAL, REMOTE = "local", "remote"
THREADS = 2
HUGE_PAGE = 2 << 20
TRIES = 5
PRIVATE, MAP_FIXED, NO_ACCESS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 0x10, 0
PAGES = "LLM_DATADIST_BENCH_PAGES"  # environment variable for the pages of the memory; small pages by default
HUGE, AUTO = "huge", "auto"  # all memory in huge pages; or the default of the system
POISON = np.int64(np.uint64(0xEEEEEEEEEEEEEEEE).astype(np.int64))

Run = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """One list of blocks: rows of the source, rows of the destination, in units of a block."""

    op: str
    block: int
    src: np.ndarray
    dst: np.ndarray

    @property
    def count(self) -> int:
        """Number of blocks."""
        return len(self.src)

    @property
    def total(self) -> int:
        """Number of bytes that are moved."""
        return self.count * self.block

    def moves(self, source: int, target: int) -> np.ndarray:
        """(source, destination) addresses, in the format of the limit's loops."""
        pairs = np.stack([self.src * self.block + source, self.dst * self.block + target], axis=1)
        return np.ascontiguousarray(pairs.astype(np.uint64))

    @property
    def local_rows(self) -> np.ndarray:
        """Rows of the local memory."""
        return self.dst if self.op == PULL else self.src

    @property
    def remote_rows(self) -> np.ndarray:
        """Rows of the remote memory."""
        return self.src if self.op == PULL else self.dst


class Adapter(ABC):
    """One side of one system. Subclasses implement the calls of their system."""

    verifies_local = False  # whether the local side verifies the bytes at the remote side

    def __init__(self, setting: str, role: str, size: int, limit: Limit, pattern: np.ndarray) -> None:
        self.setting, self.role, self.size = setting, role, size
        self.limit, self.pattern = limit, pattern
        self.memory = np.zeros(0, dtype=np.int64)
        self.pages = os.environ.get(PAGES, "")
        self.touching_s = 0.0  # seconds of ``open`` that were spent on touching memory, not by the system
        self.open()

    def plain(self, size: int) -> np.ndarray:
        """Allocate and touch memory of the process."""
        began = time.perf_counter()
        words = plain(size)
        if self.pages == HUGE:
            self.collapse(words)
        self.touching_s += time.perf_counter() - began
        return words

    def collapse(self, words: np.ndarray, tries: int = TRIES) -> None:
        """Merge memory into huge pages. Retries while the kernel has no huge page or pages are in use."""
        try:
            self.limit.collapse(address(words), words.nbytes)
        except Missing:
            if tries <= 1:
                raise
            time.sleep(0.1)
            self.collapse(words, tries - 1)

    @classmethod  # noqa: B027  (not every system needs it)
    def load(cls) -> None:
        """Import the system."""

    @abstractmethod
    def open(self) -> None:
        """Start the system, and allocate the memory that it moves."""

    @abstractmethod
    def hello(self) -> Any:
        """The data that the remote side sends to the local side to link. Not timed."""

    @abstractmethod
    def link(self, hello: Any) -> None:
        """Link the local side to the remote side."""

    def relink(self, hello: Any) -> None:
        """Link the local side to a remote side that was restarted."""
        self.link(hello)

    def prepared(self, blocks: int, block: int) -> dict[str, float]:  # noqa: ARG002  (some systems use them)
        """The seconds of each step that prepares the first transfer of this many blocks. No byte is moved."""
        raise Missing("it prepares nothing before a transfer")

    def lay(self, case: Case) -> None:  # noqa: B027  (not every system needs it)
        """Divide the memory into blocks, if the system does so. The remote side is called first."""

    @abstractmethod
    def request(self, case: Case) -> Run:
        """The transfer as a callable, with everything prepared that the system can prepare."""

    def fresh(self, case: Case) -> Run:
        """The transfer of new rows as a callable.

        The lists and names of its arguments are made here. The objects that the system makes of them are timed.
        """
        return self.request(case)

    def variants(self, case: Case) -> list[tuple[str, int, Run]]:
        """(setting, threads, transfer) of each variant: the loops of the limit, or ways to make a request."""
        return [("", 0, self.request(case))]

    def attend(self, case: Optional[Case], times: int, over: Callable[[], bool]) -> None:  # noqa: B027  (not every system needs it)
        """Drive the remote side until the local side has made this many transfers, or until `over()`."""

    # --- not timed ---

    def is_destination(self, op: str) -> bool:
        """Whether this side poisons and verifies the destination."""
        return self.verifies_local == (self.role == LOCAL) if op == PUSH else self.role == LOCAL

    def fill(self, op: str) -> None:
        """Write the bytes that are moved, if this side is the source."""
        if not self.is_destination(op) and len(self.memory):
            self.memory[:] = self.pattern

    def poison_all(self) -> None:
        """Poison the whole memory before a case."""
        self.memory[:] = POISON

    def poison(self, case: Case) -> None:
        """Poison the destination blocks before a turn."""
        self.limit.poison(self.checked(case), case.block)

    def wrong(self, case: Case) -> str:
        """Verify the destination blocks after a turn. Return the first wrong block as text, else an empty text."""
        at = self.limit.differs(self.checked(case), case.block)
        return "" if at < 0 else f"block {at} of {case.count}"

    def strays(self, case: Case) -> str:
        """Check after a case that nothing outside the destination blocks was written. Return a text if so."""
        step, changed = 4 << 20, 0
        for at in range(0, len(self.memory), step):
            changed += int(np.count_nonzero(self.memory[at : at + step] != POISON))
        allowed = case.total // 8
        return "" if changed <= allowed else f"{changed - allowed} words written that nobody asked for"

    def checked(self, case: Case) -> np.ndarray:
        """(expected bytes, destination) addresses."""
        return case.moves(address(self.pattern), address(self.memory))

    def close(self) -> None:  # noqa: B027  (not every system needs it)
        """Stop the system."""


def address(words: np.ndarray) -> int:
    """The address of an array."""
    return int(words.ctypes.data)


def plain(size: int) -> np.ndarray:
    """Memory of the process as from ``malloc``: 4 KiB pages, unless the kernel uses huge pages by default."""
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    words = np.frombuffer(area, dtype=np.int64)
    words[:: mmap.PAGESIZE // 8] = 0
    return words


def shared(descriptor: int, size: int) -> np.ndarray:
    """Map the memory of a descriptor, aligned for huge pages. It stays mapped until the process ends."""
    call = ctypes.CDLL(None, use_errno=True).mmap
    call.restype = ctypes.c_void_p
    call.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    room = call(None, size + HUGE_PAGE, NO_ACCESS, PRIVATE, -1, 0)
    at = (room + HUGE_PAGE - 1) // HUGE_PAGE * HUGE_PAGE
    found = call(at, size, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | MAP_FIXED, descriptor, 0)
    if found != at:
        raise OSError(ctypes.get_errno(), "mmap")
    return np.ctypeslib.as_array((ctypes.c_int64 * (size // 8)).from_address(at))


def memory_file(name: str, size: int) -> int:
    """Create memory that other processes can map, and return its descriptor."""
    descriptor = os.memfd_create(name, 0)
    os.ftruncate(descriptor, size)
    return descriptor


def die_with_parent() -> None:
    """Let the kernel kill this process when its parent ends."""
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
