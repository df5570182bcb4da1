"""The caches of a process of a replay, and the calls of decode's engine, each of which is timed."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from llm_datadist.commands.replay.geometry import PAGE_BYTES, Geometry
from llm_datadist.native import Engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Mapping, Sequence

    from llm_datadist.commands.replay.content import Words
    from llm_datadist.native import Cache, Peer

CACHE = "blocks"
"""Name of the cache of the prefill process, and of decode's cache on the device."""

LIMIT_S = 10.0
"""Time limit of a copy, a pull or a link; long enough for a machine under load."""

_ROUNDS = 60
_ROUND_S, _PAUSE_S = 0.01, 0.005  # other processes interrupt most longer rounds, even with pauses between them
_WORD = 8
_SETTLE_S = 1.0


def allocate(
    engine: Engine, name: str, geometry: Geometry, blocks: int, pool: Any = "device"
) -> tuple[Cache, list[Words]]:
    """Allocate a cache, and return it with a (blocks, words) view of each tensor.

    All of its memory is touched. Otherwise, the first pass through a pool would include the time of page faults.
    """
    cache = engine.allocate(name, geometry.layout, blocks=blocks, pool=pool)
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
    until = time.monotonic() + _SETTLE_S
    while (used := sum(pool["used_bytes"] for pool in engine.stats()["pools"].values())) and time.monotonic() < until:
        time.sleep(_PAUSE_S)
    return used


class Calls:
    """The cost of one kind of engine call: nanoseconds of each call, and all blocks and bytes that were moved."""

    def __init__(self) -> None:
        self.nanoseconds: list[int] = []
        self.total_ns = self.blocks = self.bytes = 0

    def add(self, nanoseconds: int, blocks: int, size: int) -> None:
        """Record one call that took `nanoseconds` and moved `blocks` blocks with `size` bytes in total."""
        self.nanoseconds.append(nanoseconds)
        self.total_ns += nanoseconds
        self.blocks += blocks
        self.bytes += size


class Node:
    """Decode's engine, with a cache in each of its two pools. Close it after use.

    Args:
        geometry: the shape of a block.
        blocks: blocks of the device cache and of the host cache.
        pools: bytes of the pools.
        options: further options of the engine.
    """

    def __init__(
        self, geometry: Geometry, blocks: tuple[int, int], pools: tuple[int, int], options: Mapping[str, Any]
    ) -> None:
        self.geometry = geometry
        self.calls = {name: Calls() for name in ("pull blocks", "pull granted", "swap out", "swap in", "copy blocks")}
        device, host = pools
        self.engine = Engine(
            pool=device,
            host_pool=host,
            page=PAGE_BYTES,
            listen="127.0.0.1:0",
            name="decode",
            timeout=LIMIT_S,
            **options,
        )
        try:
            self._device, self.device_rows = allocate(self.engine, CACHE, geometry, blocks[0])
            self._host, self.host_rows = allocate(self.engine, "host blocks", geometry, blocks[1], "host")
        except BaseException:
            self.engine.close()
            raise

    def pull(
        self,
        peer: Peer,
        sources: Sequence[int],
        targets: Sequence[int],
        token: bytes | None = None,
        started: Callable[[], None] = lambda: None,
    ) -> None:
        """Pull blocks of prefill into device slots, with the token of a grant or without one.

        `started` is called while the pull is running.
        """
        with self._timed("pull blocks" if token is None else "pull granted", len(sources)):
            transfer = self.engine.pull(self._device[targets], peer[CACHE][sources], grant=token)
            started()
            transfer.result()

    def swap_out(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Copy blocks from device to host slots. `moves` has (block id, source slot, destination slot)."""
        self._copy("swap out", self._host, self._device, moves)

    def swap_in(self, moves: Sequence[tuple[int, int, int]]) -> None:
        """Copy blocks from host to device slots. `moves` has (block id, source slot, destination slot)."""
        self._copy("swap in", self._device, self._host, moves)

    def copy_block(self, source: int, target: int) -> None:
        """Copy one device block to another device slot."""
        self._copy("copy blocks", self._device, self._device, [(0, source, target)])

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
        """Time the block, and record the call if it succeeds."""
        start = time.perf_counter_ns()
        yield
        self.calls[name].add(time.perf_counter_ns() - start, blocks, blocks * self.geometry.block_bytes)


class PlainCopy(NamedTuple):
    """The rate of `threads` threads that copied `bytes_at_a_time` at a time: the fastest of many rounds."""

    threads: int
    bytes_at_a_time: int
    bytes_per_s: float


def copy_plainly(sources: Sequence[Words], targets: Sequence[Words], threads: int, amount: int) -> PlainCopy:
    """Copy from some tensors to others for about a second. This overwrites the targets.

    Args:
        sources: a (blocks, words) view of each tensor.
        targets: as many tensors.
        threads: number of threads, each of which copies its share without waiting for the others.
        amount: bytes that all threads together copy at a time, as one pull would.
    """
    pairs = [(source.reshape(-1), target.reshape(-1)) for source, target in zip(sources, targets)]
    share = max(amount // threads // _WORD, 1)

    def copy(thread: int) -> int:
        until, copied, step = time.perf_counter() + _ROUND_S, 0, thread
        while not copied or time.perf_counter() < until:
            source, target = pairs[step % len(pairs)]
            words = min(share, len(source), len(target))
            start, place = (step * share % (len(side) - words + 1) for side in (source, target))
            np.copyto(target[place : place + words], source[start : start + words])
            copied += words * _WORD
            step += threads
        return copied

    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(_ROUNDS):
            start = time.perf_counter()
            copied = sum(pool.map(copy, range(threads)))
            best = max(best, copied / (time.perf_counter() - start))
            time.sleep(_PAUSE_S)
    return PlainCopy(threads, share * threads * _WORD, best)
