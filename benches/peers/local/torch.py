"""torch, as a user would write it: by index, block by block, and with all views in one call.

Not for: devices. All memory is host memory.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from comparison import Entry
from local.bed import THREADS, reordered

if TYPE_CHECKING:
    from collections.abc import Iterator

    from local.bed import Bed


def entries(bed: Bed) -> Iterator[Entry]:  # noqa: C901  (one variant after another)
    """The usual ways to write this with torch, over the tensors of the caches."""
    within_budget()
    words = list(zip(map(torch.from_numpy, bed.src_words), map(torch.from_numpy, bed.dst_words)))
    halves = [(src.view(torch.bfloat16), dst.view(torch.bfloat16)) for src, dst in words]
    sources, targets = torch.from_numpy(bed.src_rows), torch.from_numpy(bed.dst_rows)
    pairs = list(zip(sources.tolist(), targets.tolist()))

    def by_row() -> None:
        for src, dst in halves:
            for at, to in pairs:
                dst[to].copy_(src[at])

    def by_index() -> None:
        for src, dst in words:
            dst[targets] = src[sources]

    def select_bf16() -> None:
        for src, dst in halves:
            dst.index_copy_(0, targets, src.index_select(0, sources))

    def select_int64() -> None:
        for src, dst in words:
            dst.index_copy_(0, targets, src.index_select(0, sources))

    from_views = [src[at] for src, _ in halves for at, _ in pairs]
    to_views = [dst[to] for _, dst in halves for _, to in pairs]
    yield Entry("torch", by_row, "copy_ row by row, bfloat16", THREADS)
    yield Entry("torch", by_index, "dst[di] = src[si], int64", THREADS)
    yield Entry("torch", select_bf16, "index_copy_(index_select), bfloat16", THREADS)
    yield Entry("torch", select_int64, "index_copy_(index_select), int64", THREADS)
    yield Entry(
        "torch",
        lambda: torch._foreach_copy_(to_views, from_views),
        "_foreach_copy_ of views, bfloat16",
        THREADS,
        note="the views are made before the clock starts",
    )
    if bed.op == "copy_blocks":
        return
    order = torch.from_numpy(reordered(bed))

    def straight() -> None:
        for src, dst in words:
            torch.index_select(src, 0, order, out=dst)

    yield Entry("torch", straight, "index_select(out=dst), int64", THREADS, note=WHOLE)


def within_budget() -> None:
    """Set the same number of threads as for all systems. The inter-op threads can be set only once in a process."""
    torch.set_num_threads(THREADS)
    if torch.get_num_interop_threads() != THREADS:
        torch.set_num_interop_threads(THREADS)


WHOLE = (
    "only where, as here, a whole tensor is written; the list is put in the destination's order before the clock starts"
)
