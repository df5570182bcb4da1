"""The shape of a block, and the pool sizes that follow from it. This module makes no engine calls."""

from __future__ import annotations

from typing import NamedTuple

from llm_datadist import DataType

POOLS = ("device", "host")
"""Names of the decode node's two pools, in the order of every pair of sizes."""

PAGE_SHIFT = 12
"""Page size of every pool: 4 KiB, so that small staging caches waste little memory."""

STAGING_TOKENS = 16
"""Tokens in one of the two rows of a request's staging cache: one row is written while the other is read."""

RING_BLOCKS = 4
"""Blocks of device memory that are kept free for the staging ring of a swap-in."""

PREFILL_REQUESTS = 2
"""Requests that the prefill process holds at a time: one is pulled while the next is computed."""

DTYPES = {
    "float16": (DataType.DT_FLOAT16, 2),
    "bfloat16": (DataType.DT_BF16, 2),
    "float32": (DataType.DT_FLOAT, 4),
    "int8": (DataType.DT_INT8, 1),
    "uint8": (DataType.DT_UINT8, 1),
}
"""Name on the command line → element type of the engine, and bytes of an element."""


class Geometry(NamedTuple):
    """The shape of a block: K and V of `layers` layers, `tokens` tokens of `heads` x `head_dim` elements."""

    layers: int
    heads: int
    head_dim: int
    dtype: str
    tokens: int

    @property
    def tensors(self) -> int:
        """Number of tensors."""
        return 2 * self.layers

    @property
    def token_bytes(self) -> int:
        """Bytes of one token in one tensor."""
        return self.heads * self.head_dim * DTYPES[self.dtype][1]

    @property
    def row_bytes(self) -> int:
        """Bytes of one block in one tensor."""
        return self.tokens * self.token_bytes

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all tensors."""
        return self.tensors * self.row_bytes

    @property
    def staging_bytes(self) -> int:
        """Bytes of the device pool that the staging cache of one request takes, in whole pages."""
        return self.tensors * _pages(2 * STAGING_TOKENS * self.token_bytes)

    def prefill_bytes(self, blocks: int) -> int:
        """Return the bytes of a prefill pool for that many blocks and for staging caches.

        The pool also has room for a few leaked staging caches. A leak is then reported at the end, instead of causing a
        full pool.
        """
        return self.tensors * _pages(blocks * self.row_bytes) + 8 * PREFILL_REQUESTS * self.staging_bytes

    def device_blocks(self, pool_bytes: int, staging_caches: int) -> int:
        """Return how many blocks a device pool holds beside the staging caches and the swap-in ring."""
        return self._blocks(pool_bytes - self._spare_bytes(staging_caches))

    def device_bytes(self, blocks: int, staging_caches: int) -> int:
        """Return the bytes of the smallest device pool for which `device_blocks` returns at least that many blocks."""
        return self._spare_bytes(staging_caches) + self.tensors * _pages(blocks * self.row_bytes)

    def _spare_bytes(self, staging_caches: int) -> int:
        """Return the bytes of a device pool that staging caches and the swap-in ring take."""
        return staging_caches * self.staging_bytes + RING_BLOCKS * self.tensors * _pages(self.row_bytes)

    def host_blocks(self, pool_bytes: int) -> int:
        """Return how many blocks a host pool holds."""
        return self._blocks(pool_bytes)

    def _blocks(self, pool_bytes: int) -> int:
        each = pool_bytes // self.tensors >> PAGE_SHIFT << PAGE_SHIFT
        return max(each // self.row_bytes, 0)


def _pages(size: int) -> int:
    return -(-size >> PAGE_SHIFT) << PAGE_SHIFT
