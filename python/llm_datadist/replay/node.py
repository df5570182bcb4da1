"""The decode node: an engine with two pools, a blocks cache in each, staging caches, and pulls from prefill.

This module makes and times every call of the engine.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheKey,
    LLMClusterInfo,
    LLMException,
    LLMRole,
    LLMStatusCode,
    Placement,
)
from llm_datadist.replay import plain_copy
from llm_datadist.replay.engine import Engine
from llm_datadist.replay.geometry import STAGING_TOKENS

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

    from llm_datadist.replay.content import Words
    from llm_datadist.replay.geometry import Geometry
    from llm_datadist.replay.plain_copy import PlainCopy

PREFILL, DECODE = 1, 2
"""Cluster ids of the two processes."""

BLOCKS_MODEL, STAGING_MODEL = 0, 1
"""Model ids in the keys of prefill: of its blocks cache, and of the staging cache of each request."""

LINK_LIMIT_MS = 10_000

_HOST_MODEL = 1
_STAGING_MODEL = 0
_BLOCKS_KEY = BlocksCacheKey(PREFILL, BLOCKS_MODEL)


class Calls:
    """The cost of one kind of engine call: nanoseconds of each call, and all blocks and bytes that were moved."""

    def __init__(self) -> None:
        self.nanoseconds: list[int] = []
        self.total_ns = 0
        self.blocks = 0
        self.bytes = 0

    def add(self, nanoseconds: int, blocks: int, size: int) -> None:
        """Record one call that took `nanoseconds` and moved `blocks` blocks with `size` bytes in total."""
        self.nanoseconds.append(nanoseconds)
        self.total_ns += nanoseconds
        self.blocks += blocks
        self.bytes += size


class Node:
    """An initialized engine with its two blocks caches. Close it after use."""

    def __init__(
        self, geometry: Geometry, blocks: tuple[int, int], pools: tuple[int, int], extra: Mapping[str, str]
    ) -> None:
        """Start the engine. `blocks` and `pools` (bytes) are for device and host; `extra` has further options."""
        self.geometry = geometry
        self._address = ""
        names = ("pull blocks", "pull granted", "pull cache", "swap out", "swap in", "copy blocks", "copy cache")
        self.calls = {name: Calls() for name in ("allocate cache", "free cache", *names)}
        self._staging_bytes = geometry.tensors * STAGING_TOKENS * geometry.token_bytes
        self._engine = Engine(LLMRole.DECODER, DECODE, geometry, pools, extra)
        self._manager = self._engine.manager
        try:
            self._device, self.device_rows = self._engine.blocks_cache(blocks[0], Placement.DEVICE, BLOCKS_MODEL)
            self._host, self.host_rows = self._engine.blocks_cache(blocks[1], Placement.HOST, _HOST_MODEL)
        except BaseException:
            self._engine.close()
            raise

    def copy_plainly(self, amount: int) -> PlainCopy:
        """Measure a plain copy of `amount` bytes at a time from host to device, with as many threads as the engine has.

        This overwrites the device cache.
        """
        return plain_copy.measure(self.host_rows, self.device_rows, self.stats()["copy_workers"], amount)

    def link(self, address: str) -> None:
        """Link to the prefill process that listens at ``ip:port``. Raises LLMException."""
        self._address = address
        self._succeeded("the link", self._engine.dist.link_clusters([self._peer()], LINK_LIMIT_MS)[0])

    def unlink(self, *, force: bool) -> None:
        """End the link on both sides, or with `force` on this side only. Raises LLMException."""
        if self._address:
            ended = self._engine.dist.unlink_clusters([self._peer()], LINK_LIMIT_MS, force)
            self._succeeded("the end of the link", ended[0])

    def pull_blocks(self, sources: Sequence[int], targets: Sequence[int]) -> None:
        """Pull blocks from slots of prefill into device slots of this node."""
        with self._timed("pull blocks", len(targets), len(targets) * self.geometry.block_bytes):
            self._manager.pull_blocks(_BLOCKS_KEY, self._device, list(sources), list(targets))

    def pull_granted(self, source: int, target: int, token: bytes) -> None:
        """Pull one block under the grant with this token."""
        with self._timed("pull granted", 1, self.geometry.block_bytes):
            self._manager.pull_blocks(_BLOCKS_KEY, self._device, [source], [target], grant=token, grant_done=True)

    def pull_staging(self, request: int, staging: Staging) -> None:
        """Pull the request's staging cache into row 0 of the local one. The pull releases the cache of prefill."""
        key = CacheKey(PREFILL, request, model_id=STAGING_MODEL)
        with self._timed("pull cache", 0, self._staging_bytes):
            self._manager.pull_cache(key, staging.cache)

    def swap_out(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Copy blocks from device to host slots. `moves` has (block id, source slot, destination slot)."""
        self._swap("swap out", self._device, self._host, moves)

    def swap_in(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Copy blocks from host to device slots. `moves` has (block id, source slot, destination slot)."""
        self._swap("swap in", self._host, self._device, moves)

    def copy_block(self, source: int, target: int) -> None:
        """Copy one device block to another device slot."""
        with self._timed("copy blocks", 1, self.geometry.block_bytes):
            self._manager.copy_blocks(self._device, {source: [target]})

    def open_staging(self, request: int) -> Staging:
        """Allocate the two-row staging cache of a request on the device, and bind the request's key to it."""
        description, key = self._engine.staging(), CacheKey(DECODE, request, model_id=_STAGING_MODEL)
        with self._timed("allocate cache", 0, 0):
            cache = self._manager.allocate_cache(description, [key])
        return Staging(cache, key, self._engine.rows(cache))

    def turn_staging(self, staging: Staging) -> None:
        """Copy row 0 of a staging cache to row 1."""
        with self._timed("copy cache", 0, self._staging_bytes):
            self._manager.copy_cache(staging.cache, staging.cache, 1, 0)

    def close_staging(self, staging: Staging) -> None:
        """Drop both references to a staging cache, its id and its key, which frees its memory."""
        staging.rows.clear()
        with self._timed("free cache", 0, 0):
            self._manager.deallocate_cache(staging.cache)
            self._manager.remove_cache_key(staging.key)

    def stats(self) -> dict[str, Any]:
        """Return the engine's counters."""
        return self._engine.stats()

    def close(self) -> int:
        """Free both caches and stop the engine. Return the bytes that the pools still count as used."""
        self.device_rows.clear()
        self.host_rows.clear()
        try:
            self._manager.deallocate_blocks_cache(self._device)
            self._manager.deallocate_blocks_cache(self._host)
            return self._engine.used_bytes()
        finally:
            self._engine.close()

    def _peer(self) -> LLMClusterInfo:
        info = LLMClusterInfo()
        info.remote_cluster_id = PREFILL
        info.append_local_ip_info("127.0.0.1", 0)
        ip, _, port = self._address.rpartition(":")
        info.append_remote_ip_info(ip, int(port))
        return info

    def _succeeded(self, name: str, code: LLMStatusCode) -> None:
        if code != LLMStatusCode.LLM_SUCCESS:
            raise LLMException(f"{name} with prefill at {self._address} failed", status_code=code)

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
        with self._timed(name, len(moves), len(moves) * self.geometry.block_bytes):
            self._manager.swap_blocks(source, target, pairs)

    @contextmanager
    def _timed(self, name: str, blocks: int, size: int) -> Iterator[None]:
        """Time the block, and record the call if it succeeds."""
        start = time.perf_counter_ns()
        yield
        self.calls[name].add(time.perf_counter_ns() - start, blocks, size)


class Staging(NamedTuple):
    """A request's staging cache: handle, key, and a (2, words) view of each tensor."""

    cache: Cache
    key: CacheKey
    rows: list[Words]
