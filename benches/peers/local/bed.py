"""The memory of one cell: two filled caches of one of our engines, and the list of blocks that every system copies.

All systems read and write the same tensors. Not for: the copies of a system.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal, Optional

import numpy as np

from llm_datadist.native import Cache, Engine
from rows import Row

if TYPE_CHECKING:
    from limit import Limit

THREADS = 2
FEWEST_ROWS = 4
POOL_PAGE = 64 << 10
WORD = 8


class Bed:
    """Caches of bfloat16 with enough rows for the bytes of a round, and a shuffled mapping between their rows."""

    def __init__(self, op: str, tensors: int, block: int, size: int) -> None:
        self.op, self.block, self.num_tensors = op, block, tensors
        # Tensors of whole pool pages are adjacent, which the chunks of LMCache need.
        whole = max(POOL_PAGE // block, 1)
        rows = max(size // (tensors * block) // whole * whole, whole, FEWEST_ROWS)
        self.bytes = rows * block * tensors
        inside = op == "copy_blocks"  # from one half of a cache to the other
        held = rows * 2 if inside else rows
        pool = held * block * tensors + (tensors << 16)
        # The engine must not merge pages: for a series of huge pages, `collapse` merges them for all systems.
        self.engine = Engine(pool=pool, host_pool=None if inside else pool, copy_workers=THREADS, huge_pages="off")
        device = self._cache(held, "device")
        host = device if inside else self._cache(held, "host")
        self.src, self.dst = (host, device) if op == "swap_in" else (device, host)
        order = np.random.default_rng(held)
        if inside:
            both = order.permutation(held)
            self.src_rows, self.dst_rows = both[:rows], both[rows:]
        else:
            self.src_rows, self.dst_rows = order.permutation(rows), order.permutation(rows)
        self.src_words, self.dst_words = self._words(self.src), self._words(self.dst)
        for words in self.src_words:
            fill(words, order)
        if not inside:
            for words in self.dst_words:
                words[:] = -1  # touched before the measurement
        self.moves = self._moves()
        self.contents = self._contents()

    def _cache(self, rows: int, pool: Literal["device", "host"]) -> Cache:
        shape = (self.block // 2,)
        return self.engine.allocate(
            pool, blocks=rows, tensors=self.num_tensors, shape=shape, dtype="bfloat16", pool=pool
        )

    def _words(self, cache: Cache) -> list[np.ndarray]:
        """Each tensor as rows of 64-bit words, over the same memory."""
        shape = (-1, self.block // WORD)
        return [view.numpy().view(np.int64).reshape(shape) for view in cache.tensors]

    def _contents(self) -> list[int]:
        """The sums of the first words of the source blocks, to detect writes to a source."""
        return [int(words[self.src_rows, 0].sum()) for words in self.src_words]

    def _moves(self) -> np.ndarray:
        """(source, destination) addresses of every block, tensor after tensor."""
        pairs = [(src.address, dst.address) for src, dst in zip(self.src.tensors, self.dst.tensors)]
        bases = np.array(pairs, dtype=np.uint64)
        rows = np.stack([self.src_rows, self.dst_rows], axis=1).astype(np.uint64) * np.uint64(self.block)
        return np.ascontiguousarray((bases[:, None, :] + rows[None, :, :]).reshape(-1, 2))

    def row(self, pages: str) -> Row:
        """The fields that the rows of all systems have in this cell."""
        return Row(
            "local", self.op, "", "", self.block, len(self.moves) // self.num_tensors, self.num_tensors, pages=pages
        )

    def collapse(self, limit: Limit) -> None:
        """Merge all tensors into huge pages, for all systems."""
        for words in (*self.src_words, *self.dst_words):
            limit.collapse(words.ctypes.data, words.nbytes)

    def wrong(self, limit: Limit) -> Optional[str]:
        """Verify the destination and the source. Return the error as text, or None."""
        at = limit.differs(self.moves, self.block)
        if at >= 0:
            return f"block {at} of the list"
        if self._contents() != self.contents:
            return "the source has changed"
        return None

    def close(self) -> None:
        """Release the memory."""
        self.src_words, self.dst_words = [], []
        self.engine.close()


def reordered(bed: Bed, backwards: bool = False) -> np.ndarray:
    """Return the source row of each destination row; backwards, the destination row of each source row."""
    order = np.empty(len(bed.src_rows), dtype=np.int64)
    if backwards:
        order[bed.src_rows] = bed.dst_rows
    else:
        order[bed.dst_rows] = bed.src_rows
    return order


def fill(words: np.ndarray, order: np.random.Generator) -> None:
    """Fill with random words."""
    words[:] = order.integers(0, 2**63, size=words.shape, dtype=np.int64)
