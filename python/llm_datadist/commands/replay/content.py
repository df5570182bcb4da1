"""The bytes of a block as a function of its id, written and compared through numpy views.

Each 64-bit word is the sum of a random word, which depends on seed, tensor and position, and of a multiple of the block
id. A block in a wrong slot, tensor or position therefore differs in its first word.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Words = NDArray[np.uint64]

_ODD = 0x9E3779B97F4A7C15
_WORD = 8


class Mismatch(NamedTuple):
    """First wrong byte of a block: tensor, byte offset in the block's row of that tensor, expected and actual value."""

    tensor: int
    offset: int
    expected: int
    got: int


class Pattern:
    """The expected bytes of blocks. A block has one row of `row_bytes` bytes (a multiple of 8) in each tensor."""

    def __init__(self, tensors: int, row_bytes: int, seed: int) -> None:
        dice = np.random.default_rng(seed)
        self._template = dice.integers(0, 2**64, size=(tensors, row_bytes // _WORD), dtype=np.uint64)
        self._expected = np.empty_like(self._template)
        self._differs = np.empty(row_bytes // _WORD, dtype=np.bool_)

    def fill(self, rows: Sequence[Words], slot: int, block: int) -> None:
        """Write the bytes of a block into a slot of every tensor. `rows` has a (slots, words) view of each tensor."""
        key = _key(block)
        for template, tensor in zip(self._template, rows):
            np.add(template, key, out=tensor[slot])

    def mismatch(self, rows: Sequence[Words], slot: int, block: int) -> Mismatch | None:
        """Compare every byte of the slot with the block. Return the first wrong byte, or None."""
        np.add(self._template, _key(block), out=self._expected)
        for index, tensor in enumerate(rows):
            np.not_equal(tensor[slot], self._expected[index], out=self._differs)
            if self._differs.any():
                return _first_wrong(index, self._expected[index], tensor[slot])
        return None


def _key(block: int) -> np.uint64:
    key: np.uint64 = np.uint64((block + 1) * _ODD % 2**64)
    return key


def _first_wrong(tensor: int, expected: Words, got: Words) -> Mismatch:
    wanted, found = expected.view(np.uint8), got.view(np.uint8)
    offset = int(np.argmax(wanted != found))
    return Mismatch(tensor, offset, int(wanted[offset]), int(found[offset]))
