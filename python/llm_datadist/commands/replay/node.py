"""The shape of a block, the caches of a process of a replay, and decode's calls of the engine, each timed."""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from llm_datadist.native import Engine, KvLayout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from llm_datadist.commands.replay.content import Words
    from llm_datadist.native import Cache, Peer

CACHE = "blocks"
"""Name of the cache of the prefill process, and of decode's cache on the device."""

POOLS = ("device", "host")
"""Names of decode's two pools, in the order of every pair of sizes."""

PAGE_BYTES = 4096
"""Size of a page of every pool."""

LIMIT_S = 10.0
"""Time limit of a copy, a pull or a link; long enough for a machine under load."""

_ELEMENT_BYTES = 2
_RING_BLOCKS = 4  # blocks of device memory that are kept free for the staging ring of a swap-in
_QUIET_S, _PAUSE_S = 1.0, 0.005


class Geometry(NamedTuple):
    """The shape of a block: K and V of `layers` layers, `tokens` tokens of `heads` x `head_dim` elements (float16)."""

    layers: int
    heads: int
    head_dim: int
    tokens: int

    @property
    def tensors(self) -> int:
        """Number of tensors."""
        return 2 * self.layers

    @property
    def row_bytes(self) -> int:
        """Bytes of one block in one tensor."""
        return self.tokens * self.heads * self.head_dim * _ELEMENT_BYTES

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


def allocate(
    engine: Engine, name: str, geometry: Geometry, blocks: int, pool: Any = "device"
) -> tuple[Cache, list[Words]]:
    """Allocate a cache, and return it with a (blocks, words) view of each tensor.

    All of its memory is touched. Otherwise, the first pass through a pool would include the time of page faults.
    """
    layers, heads, head_dim, tokens = geometry
    layout = KvLayout(layers=layers, block_tokens=tokens, heads=heads, head_dim=head_dim, dtype="float16")
    cache = engine.allocate(name, layout, blocks=blocks, pool=pool)
    views = [np.asarray(tensor.numpy()).reshape(blocks, -1).view(np.uint64) for tensor in cache.tensors]
    for view in views:
        view.fill(0)
    return cache, views


def leaked_bytes(engine: Engine, *caches: Cache) -> int:
    """Free caches, and return the bytes that the pools still count as used.

    Threads of the engine may hold the memory of a transfer for a moment longer than its program sees it.
    """
    for cache in caches:
        cache.free().result()
    until = time.monotonic() + _QUIET_S
    while (used := sum(pool["used_bytes"] for pool in engine.stats()["pools"].values())) and time.monotonic() < until:
        time.sleep(_PAUSE_S)
    return used


class Calls:
    """The cost of one kind of engine call: nanoseconds of each call, and all blocks and bytes that were moved."""

    def __init__(self) -> None:
        self.nanoseconds: list[int] = []
        self.blocks = self.bytes = 0


class Node:
    """Decode's engine, with a cache in each of its two pools. Close it after use.

    Args:
        geometry: the shape of a block.
        blocks: blocks of the device cache and of the host cache.
        pools: bytes of the pools.
        transport: the option ``transport`` of the engine.
    """

    def __init__(self, geometry: Geometry, blocks: tuple[int, int], pools: tuple[int, int], transport: str) -> None:
        self.geometry = geometry
        self.calls = {name: Calls() for name in ("pull blocks", "swap out", "swap in")}
        shared: dict[str, Any] = {"page": PAGE_BYTES, "timeout": LIMIT_S, "transport": transport}
        self.engine = Engine(pool=pools[0], host_pool=pools[1], listen="127.0.0.1:0", name="decode", **shared)
        try:
            self._device, self.device_rows = allocate(self.engine, CACHE, geometry, blocks[0])
            self._host, self.host_rows = allocate(self.engine, "host blocks", geometry, blocks[1], "host")
        except BaseException:
            self.engine.close()
            raise

    def pull(self, peer: Peer, targets: Sequence[int], started: Callable[[], None] = lambda: None) -> None:
        """Pull the first blocks of prefill into device slots. `started` is called while the pull is running."""
        with self._timed("pull blocks", len(targets)):
            transfer = self.engine.pull(self._device[targets], peer[CACHE][: len(targets)])
            started()
            transfer.result()

    def swap_out(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Copy blocks from device to host slots. `moves` has (block id, source slot, destination slot)."""
        self._copy("swap out", self._host, self._device, moves)

    def swap_in(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Copy blocks from host to device slots. `moves` has (block id, source slot, destination slot)."""
        self._copy("swap in", self._device, self._host, moves)

    def close(self) -> int:
        """Free both caches and close the engine. Return the bytes that the pools still count as used."""
        self.device_rows.clear()
        self.host_rows.clear()
        try:
            return leaked_bytes(self.engine, self._device, self._host)
        finally:
            self.engine.close()

    def _copy(self, name: str, target: Cache, source: Cache, moves: Sequence[tuple[int, int, int]]) -> None:
        if moves:
            with self._timed(name, len(moves)):
                self.engine.copy(target[[move[2] for move in moves]], source[[move[1] for move in moves]]).result()

    @contextmanager
    def _timed(self, name: str, blocks: int) -> Iterator[None]:
        """Time a call, and record it if it succeeds."""
        start = time.perf_counter_ns()
        yield
        call = self.calls[name]
        call.nanoseconds.append(time.perf_counter_ns() - start)
        call.blocks += blocks
        call.bytes += blocks * self.geometry.block_bytes
