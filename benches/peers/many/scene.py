"""The workload of one part, which is the same for all systems: number, sizes and order.

Not for: the calls of a system.
"""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

import numpy as np

from rows import Row

if TYPE_CHECKING:
    from collections.abc import Iterable

ALLOCATE, CHURN = "allocate + free", "allocate + free, 256 live"
REACH, REACH_ALL = "reachable, each", "reachable in one call, as one cache or as pieces"
PUT, PUT_ALL = "put, each", "put, one call"
GET, GET_ALL = "get, each", "get in one call, by number or by name"
UNLIKE = (REACH_ALL, GET_ALL)  # systems do different work in these operations, so there is no ratio
SIZE = 16 << 10
SMALL = 1 << 10  # bytes of a tensor if there are many tensors
OBJECT = 4 << 10
LIVE = 256
SIZES = [size << 10 for size in (4, 16, 64, 256)]
TOLD_S = 60


class Scene:
    """One part: ``count`` caches with ``size`` bytes in each of ``tensors`` tensors, and ``turns`` turns per system."""

    def __init__(self, op: str, tensors: int, count: int, repeats: int) -> None:
        self.op, self.tensors, self.count, self.repeats = op, tensors, count, repeats
        self.size = OBJECT if op in (PUT, PUT_ALL, GET, GET_ALL) else SIZE if tensors == 1 else SMALL
        chance = random.Random(1)  # noqa: S311  (the same order in every run)
        self.sizes = [chance.choice(SIZES) for _ in range(count)]
        self.indices = [chance.randrange(LIVE) for _ in range(count)]
        self.ends: list[Callable[[], object]] = []
        self.objects = np.random.default_rng(1).integers(0, 2**63, size=(count, OBJECT // 8), dtype=np.int64)

    def row(self) -> Row:
        """The fields that the rows of all systems have."""
        size = 0 if self.op == CHURN else self.size
        return Row("many", self.op, "", "", size, self.count, self.tensors, unit="us")

    def pieces(self) -> np.ndarray:
        """Memory of the caller, with one piece for each cache."""
        return np.ones((self.count, self.size // 8), dtype=np.int64)

    def other(self, system: str) -> tuple[subprocess.Popen[str], str]:
        """Start a second process of a system. Return it and its ready line. It ends with the part."""
        words = [
            sys.executable,
            str(Path(__file__).with_name("owner.py")),
            system,
            self.op,
            str(self.count),
            str(self.repeats),
        ]
        process = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603
        self.ends.append(lambda: ended(process))
        assert process.stdout is not None
        for line in process.stdout:  # ends with the process; the part has a time limit
            if line.startswith(READY):
                return process, line[len(READY) :].strip()
        raise RuntimeError(f"the other process of {system} ended with {process.wait(TOLD_S)}")

    def close(self) -> None:
        """End the started processes, and release the memory."""
        for end in reversed(self.ends):
            end()


def arrived(found: Iterable[np.ndarray], objects: np.ndarray) -> None:
    """Verify all bytes of the objects. Not timed."""
    for number, (one, right) in enumerate(zip(found, objects)):
        if not np.array_equal(one, right):
            raise ValueError(f"object {number} arrived wrong")


def ended(process: subprocess.Popen[Any]) -> None:
    """End a process of a part."""
    process.kill()
    process.wait(20)


READY = "ready "
