"""A serving node's memory: the engine with two pools, a blocks cache in each, staging for each request.

Every call into the engine is made and timed here. What to move is decided elsewhere.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    DataType,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    Placement,
)

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llm_datadist.replay.content import Words

POOLS = ("device", "host")
"""Names of the two pools, in the order of every pair of sizes."""

PAGE_SHIFT = 12
"""Page size of both pools: 4 KiB, so that the small staging caches waste little."""

STAGING_TOKENS = 16
"""Tokens in one of the two rows of a request's staging cache: one row fills while the other drains."""

RING_BLOCKS = 4
"""Blocks of device memory left spare for the staging ring of a swap-in."""

DTYPES = {
    "float16": (DataType.DT_FLOAT16, 2),
    "bfloat16": (DataType.DT_BF16, 2),
    "float32": (DataType.DT_FLOAT, 4),
    "int8": (DataType.DT_INT8, 1),
    "uint8": (DataType.DT_UINT8, 1),
}
"""Element types by their name on the command line: type of the engine, bytes."""

_CLUSTER = 1


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
        """Bytes of device pool that one request's staging cache takes, whole pages."""
        return self.tensors * _pages(2 * STAGING_TOKENS * self.token_bytes)

    def device_blocks(self, pool_bytes: int, staging_caches: int) -> int:
        """Return how many blocks a device pool holds beside the staging caches and the swap-in ring."""
        spare = staging_caches * self.staging_bytes + RING_BLOCKS * self.tensors * _pages(self.row_bytes)
        return self._blocks(pool_bytes - spare)

    def host_blocks(self, pool_bytes: int) -> int:
        """Return how many blocks a host pool holds."""
        return self._blocks(pool_bytes)

    def _blocks(self, pool_bytes: int) -> int:
        each = pool_bytes // self.tensors >> PAGE_SHIFT << PAGE_SHIFT
        return max(each // self.row_bytes, 0)


def _pages(size: int) -> int:
    return -(-size >> PAGE_SHIFT) << PAGE_SHIFT


class Calls:
    """What one kind of engine call cost: nanoseconds of each call, blocks and bytes moved in all."""

    def __init__(self) -> None:
        self.nanoseconds: list[int] = []
        self.blocks = 0
        self.bytes = 0

    def add(self, nanoseconds: int, blocks: int, size: int) -> None:
        """Record one call that took `nanoseconds` and moved `blocks` blocks of `size` bytes together."""
        self.nanoseconds.append(nanoseconds)
        self.blocks += blocks
        self.bytes += size


class Node:
    """An initialised engine with its two blocks caches. Close it after use."""

    def __init__(
        self, geometry: Geometry, blocks: tuple[int, int], pools: tuple[int, int], extra: Mapping[str, str]
    ) -> None:
        """Start the engine: `blocks` and `pools` (bytes) for device and host; `extra`: init options."""
        self.geometry = geometry
        self.calls = {
            name: Calls()
            for name in ("allocate cache", "free cache", "swap out", "swap in", "copy blocks", "copy cache")
        }
        config = LLMConfig()
        config.device_id = 0
        config.enable_cache_manager = True
        config.mem_pool_cfg = json.dumps({"memory_size": pools[0], "page_shift": PAGE_SHIFT})
        config.host_mem_pool_cfg = json.dumps({"memory_size": pools[1], "page_shift": PAGE_SHIFT})
        self._engine = LLMDataDist(LLMRole.PROMPT, _CLUSTER)
        self._engine.init({**config.generate_options(), **extra})
        try:
            self._manager = self._engine.cache_manager
            self._device = self._blocks_cache(blocks[0], Placement.DEVICE, 0)
            self._host = self._blocks_cache(blocks[1], Placement.HOST, 1)
            self.device_rows = self._rows(self._device)
            self.host_rows = self._rows(self._host)
            # A serving node pins its memory at the start; else the first pass through the pools times page faults.
            for rows in (*self.device_rows, *self.host_rows):
                rows.fill(0)
        except BaseException:
            self._engine.finalize()
            raise

    def swap_out(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Copy blocks from device to host slots; `moves` holds (block id, source slot, destination slot)."""
        self._swap("swap out", self._device, self._host, moves)

    def swap_in(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Copy blocks from host to device slots; `moves` holds (block id, source slot, destination slot)."""
        self._swap("swap in", self._host, self._device, moves)

    def copy_block(self, source: int, target: int) -> None:
        """Copy one device block to another device slot."""
        start = time.perf_counter_ns()
        self._manager.copy_blocks(self._device, {source: [target]})
        self.calls["copy blocks"].add(time.perf_counter_ns() - start, 1, self.geometry.block_bytes)

    def open_staging(self, request: int) -> Staging:
        """Allocate a request's two-row staging cache on the device, bound to the request by key."""
        shape = self.geometry
        description = CacheDesc(
            shape.tensors,
            [2, STAGING_TOKENS, shape.heads, shape.head_dim],
            DTYPES[shape.dtype][0],
            Placement.DEVICE,
        )
        key = CacheKey(_CLUSTER, request)
        start = time.perf_counter_ns()
        cache = self._manager.allocate_cache(description, [key])
        self.calls["allocate cache"].add(time.perf_counter_ns() - start, 0, 0)
        return Staging(cache, key, self._rows(cache))

    def turn_staging(self, staging: Staging) -> None:
        """Copy row 0 of a staging cache to row 1."""
        start = time.perf_counter_ns()
        self._manager.copy_cache(staging.cache, staging.cache, 1, 0)
        took = time.perf_counter_ns() - start
        self.calls["copy cache"].add(took, 0, self.geometry.tensors * STAGING_TOKENS * self.geometry.token_bytes)

    def close_staging(self, staging: Staging) -> None:
        """Drop both references of a staging cache, by id and by key, which frees its memory."""
        staging.rows.clear()
        start = time.perf_counter_ns()
        self._manager.deallocate_cache(staging.cache)
        self._manager.remove_cache_key(staging.key)
        self.calls["free cache"].add(time.perf_counter_ns() - start, 0, 0)

    def stats(self) -> dict[str, Any]:
        """Return the engine's counters."""
        return dict(self._manager.stats())

    def close(self) -> int:
        """Free both caches and stop the engine. Return the bytes that the pools still count as used."""
        self.device_rows.clear()
        self.host_rows.clear()
        try:
            self._manager.deallocate_blocks_cache(self._device)
            self._manager.deallocate_blocks_cache(self._host)
            pools = self.stats()["pools"]
            return sum(int(pools[name]["used_bytes"]) for name in POOLS)
        finally:
            self._engine.finalize()

    def _blocks_cache(self, blocks: int, placement: Placement, model: int) -> Cache:
        shape = self.geometry
        dims = [blocks, shape.tokens, shape.heads, shape.head_dim]
        description = CacheDesc(shape.tensors, dims, DTYPES[shape.dtype][0], placement)
        return self._manager.allocate_blocks_cache(description, BlocksCacheKey(_CLUSTER, model))

    def _rows(self, cache: Cache) -> list[Words]:
        views = [np.asarray(view.numpy()) for view in self._manager.tensor_views(cache)]
        return [view.reshape(view.shape[0], -1).view(np.uint64) for view in views]

    def _swap(
        self,
        name: str,
        source: Cache,
        target: Cache,
        moves: Sequence[tuple[int, int, int]],
    ) -> None:
        if not moves:
            return
        pairs = np.array([move[1:] for move in moves], dtype=np.int64)
        start = time.perf_counter_ns()
        self._manager.swap_blocks(source, target, pairs)
        took = time.perf_counter_ns() - start
        self.calls[name].add(took, len(moves), len(moves) * self.geometry.block_bytes)


class Staging(NamedTuple):
    """A request's staging cache: handle, key, and a (2, words) view of each tensor."""

    cache: Cache
    key: CacheKey
    rows: list[Words]
