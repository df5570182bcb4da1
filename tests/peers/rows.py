"""A cache whose rows have gaps between them: memory with poison in every gap, and whether it is still there."""

from __future__ import annotations

from typing import Any

import numpy as np

POISON = 0xA5


class RowsWithGaps:
    """The base of `End` that makes such caches."""

    def __init__(self) -> None:
        super().__init__()
        self.poisoned: dict[str, tuple[np.ndarray, np.ndarray]] = {}

    def native_register(
        self, name: str, rows: int, row_bytes: int, stride: int, tensors: int, *, seed: int
    ) -> list[int]:
        """Register tensors whose rows alternate in one range of memory, with poison before, between and after them.

        Return the address of each tensor.
        """
        end: Any = self
        memory, in_row = np.full(128 + rows * stride, POISON, np.uint8), np.zeros(128 + rows * stride, bool)
        firsts = range(64, 64 + tensors * row_bytes, row_bytes)
        arrays = [np.lib.stride_tricks.as_strided(memory[at:], (rows, row_bytes), (stride, 1)) for at in firsts]
        for at in firsts:
            np.lib.stride_tricks.as_strided(in_row[at:], (rows, row_bytes), (stride, 1))[:] = True
        self.poisoned[name] = memory, in_row
        end._hold(name, end.engine.register(name, arrays), arrays, seed)
        return [int(array.ctypes.data) for array in arrays]

    def check_gaps(self, name: str) -> None:
        """Raise if a byte of a gap has changed."""
        memory, in_row = self.poisoned[name]
        wrong = np.flatnonzero((memory != POISON) & ~in_row)
        assert not len(wrong), f"{name}: bytes {wrong[:8]} of {len(memory)} changed"
