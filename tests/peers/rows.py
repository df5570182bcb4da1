"""Caches whose rows have gaps between them: memory with poison in every gap, and whether it is still there."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from llm_datadist import CacheDesc, DataType, Placement

from .process import _over

POISON = 0xA5


@dataclass
class Poisoned:
    """Memory around and between rows."""

    memory: np.ndarray
    #: Whether a byte belongs to a row.
    in_row: np.ndarray


def strided(memory: np.ndarray, first: int, rows: int, row_bytes: int, stride: int) -> np.ndarray:
    """The rows of one tensor in flat memory, as an array of shape (rows, row_bytes)."""
    return np.lib.stride_tricks.as_strided(memory[first:], (rows, row_bytes), (stride, 1))


def described(rows: int, row_bytes: int, tensors: int, stride: int, host: bool) -> CacheDesc:
    placement = Placement.HOST if host else Placement.DEVICE
    return CacheDesc(tensors, [rows, row_bytes], DataType.DT_UINT8, placement, row_stride=stride)


def packed(rows: int, row_bytes: int, tensors: int, stride: int) -> tuple[Poisoned, list[np.ndarray]]:
    """All tensors in one range of memory, their rows in turn, with poison before, between and after them."""
    memory = np.full(64 + rows * stride + 64, POISON, np.uint8)
    in_row = np.zeros(memory.shape, bool)
    for tensor in range(tensors):
        strided(in_row, 64 + tensor * row_bytes, rows, row_bytes, stride)[:] = True
    arrays = [strided(memory, 64 + tensor * row_bytes, rows, row_bytes, stride) for tensor in range(tensors)]
    return Poisoned(memory, in_row), arrays


def padded(memory: np.ndarray, rows: int, row_bytes: int, stride: int) -> tuple[Poisoned, np.ndarray]:
    """One tensor in memory of its own, with poison between its rows."""
    memory[:] = POISON
    in_row = np.zeros(memory.shape, bool)
    strided(in_row, 0, rows, row_bytes, stride)[:] = True
    return Poisoned(memory, in_row), strided(memory, 0, rows, row_bytes, stride)


class RowsWithGaps:
    """The base of `End` that makes such caches."""

    def __init__(self) -> None:
        super().__init__()
        self.poisoned: dict[str, list[Poisoned]] = {}

    def make_rows(
        self, name: str, rows: int, row_bytes: int, stride: int, tensors: int, *,
        how: str, host: bool = False, blocks: bool = True, keys: Any = (), seed: int = 0,
    ) -> list[int]:  # fmt: skip
        """Make a cache and return the addresses of its tensors. `how` is where its memory is.

        `"pool"` and `"contiguous"`: in a pool; `"padded"`: registered, each tensor for itself; `"packed"`: registered,
        the rows of all tensors in turn.
        """
        end: Any = self
        desc = described(rows, row_bytes, tensors, stride, host)
        given = [end.key_of(key) for key in keys]
        if how in {"pool", "contiguous"}:
            options = {"contiguous": True} if how == "contiguous" else {}
            if blocks:
                handle = end.manager.allocate_blocks_cache(desc, *given, **options)
            else:
                handle = end.manager.allocate_cache(desc, given, **options)
            extent = (rows - 1) * stride + row_bytes
            made = [padded(_over(at, 1, extent)[0], rows, row_bytes, stride) for at in handle.tensor_addrs]
            poisoned, arrays = [each[0] for each in made], [each[1] for each in made]
        else:
            if how == "packed":
                one, arrays = packed(rows, row_bytes, tensors, stride)
                poisoned = [one]
            else:
                made = [padded(np.empty(rows * stride, np.uint8), rows, row_bytes, stride) for _ in range(tensors)]
                poisoned, arrays = [each[0] for each in made], [each[1] for each in made]
            addresses = [int(array.ctypes.data) for array in arrays]
            if blocks:
                handle = end.manager.register_blocks_cache(desc, addresses, *(given or [None]), remote_accessible=True)
            else:
                handle = end.manager.register_cache(desc, addresses, given, remote_accessible=True)
        self.poisoned[name] = poisoned
        end._hold(name, handle, arrays, seed)
        return list(handle.tensor_addrs)

    def drop_rows(self, name: str) -> None:
        """Release a cache. Raises if a byte of a gap has changed."""
        end: Any = self
        self.check_gaps(name)
        end.release(name)
        del self.poisoned[name]

    def check_gaps(self, name: str) -> None:
        """Raise if a byte of a gap has changed."""
        for number, each in enumerate(self.poisoned[name]):
            wrong = np.flatnonzero((each.memory != POISON) & ~each.in_row)
            assert not len(wrong), f"{name}, memory {number}: bytes {wrong[:8]} of {len(each.memory)} changed"
