"""numpy, as a user would write it: by index, block by block, and with memmove of the C library.

Not for: elements other than 64-bit words, which are the fastest for this.
"""

from __future__ import annotations

import ctypes
from concurrent.futures import ThreadPoolExecutor
from typing import TYPE_CHECKING

import numpy as np

from comparison import Entry
from local.bed import reordered

if TYPE_CHECKING:
    from collections.abc import Iterator

    from local.bed import Bed


def entries(bed: Bed) -> Iterator[Entry]:  # noqa: C901  (one variant after another)
    """Entries: by index (which makes a temporary array), row by row, and memmove with one and two threads."""
    tensors = list(zip(bed.src_words, bed.dst_words))
    sources, targets = bed.src_rows, bed.dst_rows
    pairs = list(zip(sources.tolist(), targets.tolist()))
    blocks = bed.moves.tolist()
    copy = ctypes.CDLL(None).memmove
    copy.argtypes, copy.restype = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t], None

    def by_index() -> None:
        for src, dst in tensors:
            dst[targets] = src[sources]

    def by_row() -> None:
        for src, dst in tensors:
            for at, to in pairs:
                dst[to] = src[at]

    def by_memmove(mine: list[list[int]]) -> None:
        for src, dst in mine:
            copy(dst, src, bed.block)

    if bed.op != "copy_blocks":
        order = reordered(bed)

        def straight() -> None:
            for src, dst in tensors:
                np.take(src, order, axis=0, out=dst, mode="clip")

        yield Entry("numpy", straight, "take(out=dst)", note=WHOLE)
    yield Entry("numpy", by_index, "dst[di] = src[si]")
    yield Entry("numpy", by_row, "row by row")
    yield Entry("numpy", lambda: by_memmove(blocks), "memmove")
    halves = [blocks[: len(blocks) // 2], blocks[len(blocks) // 2 :]]
    pool = ThreadPoolExecutor(1)

    def by_two() -> None:
        other = pool.submit(by_memmove, halves[1])
        by_memmove(halves[0])
        other.result()

    yield Entry("numpy", by_two, "memmove x2", threads=2)


WHOLE = (
    "only where, as here, a whole tensor is written; the list is put in the destination's order before the clock starts"
)
