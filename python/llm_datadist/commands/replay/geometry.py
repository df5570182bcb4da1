"""The shape of a block, and the sizes of pools that follow from it. This module makes no engine calls."""

from __future__ import annotations

from typing import NamedTuple

from llm_datadist.native import KvLayout

POOLS = ("device", "host")
"""Names of decode's two pools, in the order of every pair of sizes."""

PAGE_BYTES = 4096
"""Size of a page of every pool."""

PREFILL_REQUESTS = 2
"""Requests that the prefill process holds at a time: one is pulled while the next is computed."""

DTYPES = {"float16": 2, "bfloat16": 2, "float32": 4, "int8": 1, "uint8": 1}
"""Element type → bytes of an element."""

_RING_BLOCKS = 4
"""Blocks of device memory that are kept free for the staging ring of a swap-in."""


class Geometry(NamedTuple):
    """The shape of a block: K and V of `layers` layers, `tokens` tokens of `heads` x `head_dim` elements."""

    layers: int
    heads: int
    head_dim: int
    dtype: str
    tokens: int

    @property
    def layout(self) -> KvLayout:
        """The layout of the caches."""
        return KvLayout(
            layers=self.layers, block_tokens=self.tokens, heads=self.heads, head_dim=self.head_dim, dtype=self.dtype
        )

    @property
    def tensors(self) -> int:
        """Number of tensors."""
        return 2 * self.layers

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one tensor."""
        return self.heads * self.head_dim * DTYPES[self.dtype]

    @property
    def row_bytes(self) -> int:
        """Bytes of one block in one tensor."""
        return self.tokens * self.token_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all tensors."""
        return self.tensors * self.row_bytes

    @property
    def ring_bytes(self) -> int:
        """Bytes of a device pool that the staging ring of a swap-in takes."""
        return _RING_BLOCKS * self.pool_bytes(1)

    def pool_bytes(self, blocks: int) -> int:
        """Return the bytes of the smallest pool for a cache of that many blocks."""
        return self.tensors * (-(-blocks * self.row_bytes // PAGE_BYTES) * PAGE_BYTES)

    def blocks(self, pool_bytes: int) -> int:
        """Return how many blocks the largest cache in a pool has."""
        return max(pool_bytes // self.tensors // PAGE_BYTES * PAGE_BYTES // self.row_bytes, 0)
