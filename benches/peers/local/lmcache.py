"""LMCache: the transfer of its CPU backend between a paged cache and its chunks.

LMCache stores chunks, which are runs of tokens of all layers. Here, the chunks are in our tensors, so that all systems
write the same bytes to the same place. LMCache has no copy inside a cache. Not for: its servers and remote stores.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import torch

from comparison import Entry
from local.bed import THREADS, reordered
from local.torch import within_budget
from rows import Missing

if TYPE_CHECKING:
    from collections.abc import Iterator

    from local.bed import Bed

TOKENS = 16  # tokens of a block, as in serving engines
CHUNK = 256  # tokens of a chunk, by default
NOTE = (
    "a paged cache to chunks in order (swap out) or back; the chunks and the list in their order are made before the "
    "clock starts; its allocator and index are not in the figure"
)


def entries(bed: Bed) -> Iterator[Entry]:
    """Two entries: chunks of the default size, and one chunk for everything."""
    import lmcache  # noqa: PLC0415  (named like this file)
    from lmcache.lmcache_native import EngineKVFormat, PageBufferShapeDesc, TransferDirection  # noqa: PLC0415

    if bed.op == "copy_blocks":
        raise Missing("has no copy inside a cache")
    if not hasattr(lmcache, "device_ops"):
        raise Missing("its transfer needs torch and numba")
    within_budget()
    out = bed.op == "swap_out"
    paged_words, kept_words = (bed.src_words, bed.dst_words) if out else (bed.dst_words, bed.src_words)
    kept_rows = len(kept_words[0])
    gap = {int(b.ctypes.data - a.ctypes.data) for a, b in zip(kept_words, kept_words[1:])}
    if gap not in (set(), {kept_words[0].nbytes}):
        raise Missing("the tensors of the cache do not lie side by side, as a chunk needs them")
    hidden = bed.block // 2 // TOKENS
    paged = [torch.from_numpy(words).view(torch.bfloat16).view(-1, TOKENS, hidden) for words in paged_words]
    whole = (ctypes.c_uint8 * (kept_words[0].nbytes * bed.num_tensors)).from_address(kept_words[0].ctypes.data)
    kept = torch.frombuffer(whole, dtype=torch.bfloat16).view(bed.num_tensors, kept_rows * TOKENS, hidden)
    order = torch.from_numpy(reordered(bed) if out else reordered(bed, backwards=True))
    shape = PageBufferShapeDesc()
    shape.kv_size, shape.nl, shape.nb, shape.bs = 1, bed.num_tensors, len(paged_words[0]), TOKENS
    shape.nh, shape.hs, shape.element_size, shape.block_stride_elems = 1, hidden, 2, 0

    def call(chunks: list[torch.Tensor], tokens: int) -> None:
        lmcache.device_ops.multi_layer_block_kv_transfer(
            paged,
            chunks,
            order,
            "cpu",
            TransferDirection.D2H if out else TransferDirection.H2D,
            shape,
            tokens,
            EngineKVFormat.NL_X_NB_BS_HS,
            0,
        )

    chunks, whole_chunk = list(kept.split(CHUNK, dim=1)), [kept]
    yield Entry("lmcache", lambda: call(chunks, CHUNK), f"chunks of {CHUNK} tokens", THREADS, note=NOTE)
    if kept_rows * TOKENS > CHUNK:
        yield Entry("lmcache", lambda: call(whole_chunk, kept_rows * TOKENS), "one chunk", THREADS, note=NOTE)
