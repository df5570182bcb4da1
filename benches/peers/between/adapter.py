"""What a system brings to be measured between two processes: one adapter a system, used on both sides.

The near side asks for every transfer and is clocked; the far side owns what is pulled from and pushed to. Not for:
processes and messages (``side``, ``pair``), or who is compared with whom (``systems``).
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
NEAR, FAR = "near", "far"
THREADS = 2
HUGE_PAGE = 2 << 20
TRIES = 5
PRIVATE, MAP_FIXED, NO_ACCESS = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, 0x10, 0
PAGES = "LLM_DATADIST_BENCH_PAGES"  # of the memory that is moved: small ones unless it says otherwise
HUGE, AUTO = "huge", "auto"  # all of it in huge pages; as the system leaves what the process gives it
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
        """How many blocks."""
        return len(self.src)

    @property
    def total(self) -> int:
        """Bytes moved."""
        return self.count * self.block

    def moves(self, source: int, target: int) -> np.ndarray:
        """(from, to) addresses, as the limit's loops take them."""
        pairs = np.stack([self.src * self.block + source, self.dst * self.block + target], axis=1)
        return np.ascontiguousarray(pairs.astype(np.uint64))

    @property
    def near_rows(self) -> np.ndarray:
        """Rows of the near memory."""
        return self.dst if self.op == PULL else self.src

    @property
    def far_rows(self) -> np.ndarray:
        """Rows of the far memory."""
        return self.src if self.op == PULL else self.dst


class Adapter(ABC):
    """One side of one system. A subclass fills in what its system needs; the rest is the same for all."""

    verifies_near = False  # whether the near side can tell what arrived at the far one

    def __init__(self, setting: str, role: str, size: int, limit: Limit, pattern: np.ndarray) -> None:
        self.setting, self.role, self.size = setting, role, size
        self.limit, self.pattern = limit, pattern
        self.memory = np.zeros(0, dtype=np.int64)
        self.pages = os.environ.get(PAGES, "")
        self.touching_s = 0.0  # part of ``open`` that is no work of the system
        self.open()

    def plain(self, size: int) -> np.ndarray:
        """Touched memory of the process."""
        began = time.perf_counter()
        words = plain(size)
        if self.pages == HUGE:
            self.collapse(words)
        self.touching_s += time.perf_counter() - began
        return words

    def collapse(self, words: np.ndarray, tries: int = TRIES) -> None:
        """Put memory into huge pages; the kernel may have to be asked again while it has none or pages are in use."""
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
        """Start the system, with memory that it can move."""

    @abstractmethod
    def hello(self) -> Any:
        """What the far side tells the near one, by any way that is not measured."""

    @abstractmethod
    def link(self, hello: Any) -> None:
        """The near side reaches the far one."""

    def relink(self, hello: Any) -> None:
        """The near side reaches a far one that was started again."""
        self.link(hello)

    def prepared(self, blocks: int, block: int) -> dict[str, float]:  # noqa: ARG002  (those that prepare use them)
        """Seconds of each step that comes before the first transfer of so many blocks; nothing is moved."""
        raise Missing("it prepares nothing before a transfer")

    def lay(self, case: Case) -> None:  # noqa: B027  (not every system needs it)
        """Both sides, the far one first: cut the memory into blocks, where a system cuts it at all."""

    @abstractmethod
    def request(self, case: Case) -> Run:
        """The transfer, with everything prepared that the system lets one prepare."""

    def fresh(self, case: Case) -> Run:
        """The transfer of rows that nobody saw before.

        The lists and names that it takes are made here; what the system makes of them is made within the clock.
        """
        return self.request(case)

    def variants(self, case: Case) -> list[tuple[str, int, Run]]:
        """Setting, threads and transfer: one, except for the limit."""
        return [("", 0, self.request(case))]

    def attend(self, case: Optional[Case], times: int, over: Callable[[], bool]) -> None:  # noqa: B027  (not every system needs it)
        """The far side, until the near one is through with so many transfers, or it is over."""

    # --- outside the clock ---

    def is_destination(self, op: str) -> bool:
        """Whether this side is the one to poison and check."""
        return self.verifies_near == (self.role == NEAR) if op == PUSH else self.role == NEAR

    def fill(self, op: str) -> None:
        """The bytes that are moved."""
        if not self.is_destination(op) and len(self.memory):
            self.memory[:] = self.pattern

    def poison_all(self) -> None:
        """Before a case: every byte that could be written."""
        self.memory[:] = POISON

    def poison(self, case: Case) -> None:
        """Before a turn: what is about to be written."""
        self.limit.poison(self.checked(case), case.block)

    def wrong(self, case: Case) -> str:
        """After a turn: what is wrong with what was written."""
        at = self.limit.differs(self.checked(case), case.block)
        return "" if at < 0 else f"block {at} of {case.count}"

    def strays(self, case: Case) -> str:
        """After a case: what was written that nobody asked for."""
        step, changed = 4 << 20, 0
        for at in range(0, len(self.memory), step):
            changed += int(np.count_nonzero(self.memory[at : at + step] != POISON))
        allowed = case.total // 8
        return "" if changed <= allowed else f"{changed - allowed} words written that nobody asked for"

    def checked(self, case: Case) -> np.ndarray:
        """(where the bytes should come from, where they should be)."""
        return case.moves(address(self.pattern), address(self.memory))

    def settle(self) -> None:  # noqa: B027  (not every system needs it)
        """Wait, within bounds, for what the system does in the background once it was used."""

    def close(self) -> None:  # noqa: B027  (not every system needs it)
        """Stop, in order."""


def address(words: np.ndarray) -> int:
    """Where an array begins."""
    return int(words.ctypes.data)


def plain(size: int) -> np.ndarray:
    """Memory of the process as ``malloc`` gives it: 4 KiB pages, unless the kernel hands out huge ones unasked."""
    area = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    words = np.frombuffer(area, dtype=np.int64)
    words[:: mmap.PAGESIZE // 8] = 0
    return words


def shared(descriptor: int, size: int) -> np.ndarray:
    """The memory behind a descriptor, mapped by both, where huge pages can serve it; it stays mapped."""
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
    """A descriptor of memory that other processes can map."""
    descriptor = os.memfd_create(name, 0)
    os.ftruncate(descriptor, size)
    return descriptor


def die_with_parent() -> None:
    """Linux ends this process when the one that started it is gone."""
    ctypes.CDLL(None).prctl(1, 9)  # PR_SET_PDEATHSIG, SIGKILL
