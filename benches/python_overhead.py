"""The native calls beside those of LLM-DataDist's API: `make bench`, or `.venv/bin/python benches/python_overhead.py`.

Each row has the microseconds of one call through either API and the ratio of the two: medians over rounds, in which
both take turns in one process. The parentheses have the lowest and the highest ratio. One other process owns the remote
caches of both. A call that LLM-DataDist does not have has no ratio. Not for: large copies, whose speed `cargo bench
--bench copy` compares with the machine's limit.
"""

from __future__ import annotations

import argparse
import ctypes
import socket
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Callable, Optional

import numpy as np

from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    DataType,
    LayerSynchronizer,
    LLMClusterInfo,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    Placement,
    TransferWithCacheKeyConfig,
)
from llm_datadist import Cache as OriginalCache
from llm_datadist.native import Cache, Engine

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCK, BLOCKS = 16 << 10, 1040
LAYERS = 40
# Name: tensors, blocks, bytes of a block.
CACHES = {"kv": (1, BLOCKS, BLOCK), "host": (1, BLOCKS, BLOCK), "layers": (2 * LAYERS, 16, 4 << 10)}
POOL = 32 << 20
LOCAL, OWNER = 1, 2  # the clusters of LLM-DataDist's API
SRC, DST = list(range(512)), list(range(BLOCKS - 1, BLOCKS - 513, -1))
Call = Callable[[], object]


class Native:
    """An engine of the native API, with its caches."""

    def __init__(self) -> None:
        self.engine = Engine(pool=POOL, host_pool=POOL, page="4KiB", listen="127.0.0.1:0")
        self.caches = {name: self.allocated(name, *form) for name, form in CACHES.items()}

    def allocated(self, name: str, tensors: int, blocks: int, size: int) -> Cache:
        """Allocate one cache."""
        return self.engine.allocate(
            name,
            blocks=blocks,
            tensors=tensors,
            shape=(size,),
            dtype="uint8",
            pool="host" if name == "host" else "device",
            tensors_per_layer=min(2, tensors),
        )

    def views(self, name: str) -> list[np.ndarray]:
        """The tensors of a cache."""
        return [tensor.numpy() for tensor in self.caches[name].tensors]


class Original:
    """An engine of LLM-DataDist's API, with the same caches."""

    def __init__(self, cluster: int) -> None:
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        pool = f'{{"memory_size": {POOL}, "page_shift": 12}}'
        self.cluster, self.dist = cluster, LLMDataDist(LLMRole.MIX, cluster)
        self.dist.init(
            {
                "llm.EnableCacheManager": "1",
                "llm.EnableRemoteCacheAccessible": "1",
                "llm.MemPoolConfig": pool,
                "llm.HostMemPoolConfig": pool,
                "llm.listenIpInfo": f"127.0.0.1:{self.port}",
                "llm.SyncKvCacheWaitTime": "10000",
            }
        )
        self.manager = self.dist.cache_manager
        self.caches = {name: self.allocated(name, *form) for name, form in CACHES.items()}

    def allocated(self, name: str, tensors: int, blocks: int, size: int) -> OriginalCache:
        """Allocate one cache."""
        placement = Placement.HOST if name == "host" else Placement.DEVICE
        desc = CacheDesc(tensors, [blocks, size], DataType.DT_UINT8, placement)
        key = None if name == "host" else key_of(name, self.cluster)
        return self.manager.allocate_blocks_cache(desc, key)

    def link(self, port: int) -> None:
        """Link to the owner."""
        info = LLMClusterInfo()
        info.remote_cluster_id = OWNER
        info.append_local_ip_info("127.0.0.1", 0)
        info.append_remote_ip_info("127.0.0.1", port)
        status, each = self.dist.link_clusters([info], 10_000)
        assert status == LLMStatusCode.LLM_SUCCESS, each

    def views(self, name: str) -> list[np.ndarray]:
        """The tensors of a cache."""
        cache = self.caches[name]
        shape = cache.cache_desc.shape
        tensors = [(ctypes.c_uint8 * (shape[0] * shape[1])).from_address(at) for at in cache.tensor_addrs]
        return [np.ctypeslib.as_array(tensor).reshape(shape) for tensor in tensors]


def key_of(name: str, cluster: int = OWNER) -> BlocksCacheKey:
    """The key of a cache in LLM-DataDist's API."""
    return BlocksCacheKey(cluster, list(CACHES).index(name))


class Ready(LayerSynchronizer):
    """Every layer is ready when it is asked for."""

    def synchronize_layer(self, layer_index: int, timeout_in_millis: Optional[int]) -> bool:
        """Return True at once."""
        return layer_index >= 0 and timeout_in_millis is None


@dataclass(frozen=True)
class Row:
    """One row: a call through both APIs, and what follows each call without being timed."""

    name: str
    native: Call
    original: Optional[Call] = None
    share: float = 1.0  # of the calls of a round
    after: Optional[Call] = None

    def line(self, rounds: int, calls: int) -> str:
        """Measure both in turn, and return the text of the row."""
        calls, both = max(1, int(calls * self.share)), [self.native, *filter(None, [self.original])]
        figures: list[list[float]] = [[] for _ in both]
        for number in range(rounds + 1):  # the first one warms up
            for which in sorted(range(len(both)), reverse=number % 2 == 1):
                took = timed(both[which], calls, self.after)
                figures[which] += [took] if number else []
        cells = "".join(f" {statistics.median(column):9.2f}" for column in figures)
        if self.original is None:
            return f"{self.name:50}{cells}"
        ratios = [native / original for native, original in zip(*figures)]
        return f"{self.name:50}{cells} {statistics.median(ratios):9.2f}  ({min(ratios):.2f}-{max(ratios):.2f})"


def timed(call: Call, calls: int, after: Optional[Call]) -> float:
    """The microseconds of one call."""
    clock, nanos = time.perf_counter_ns, 0
    if after is None:
        started = clock()
        for _ in range(calls):
            call()
        return (clock() - started) / calls / 1e3
    for _ in range(calls):
        started = clock()
        call()
        nanos += clock() - started
        after()
    return nanos / calls / 1e3


def rows(native: Native, original: Original, address: str) -> Iterator[Row]:
    """The rows of the table. At its end, checks that the bytes of both are in place."""
    engine, (kv, host, layers) = native.engine, native.caches.values()
    manager, (device, swapped, layered) = original.manager, original.caches.values()
    peer, key = engine.link(address).result(), key_of("kv")
    remote, remote_layers = peer["kv"], peer["layers"]
    config = TransferWithCacheKeyConfig(key_of("layers"), range(LAYERS), range(LAYERS))
    desc = CacheDesc(2 * LAYERS, [4, 4096], DataType.DT_UINT8)
    pairs, running = dict(zip(SRC, DST)), []

    def push() -> None:
        transfer = engine.push(remote_layers[3], layers[3], layerwise=True)
        for layer in range(LAYERS):
            transfer.ready(layer)
        transfer.result()

    def push_task() -> None:
        task = manager.transfer_cache_async(layered, Ready(), [config], [3], [3])
        assert task.synchronize() == LLMStatusCode.LLM_SUCCESS, task.errors()

    yield Row(
        "copy of one 16 KiB block",
        lambda: engine.copy(kv[520], kv[3]).result(),
        lambda: manager.copy_blocks(device, {3: [520]}),
    )
    yield Row(
        "swap of one 16 KiB block",
        lambda: engine.copy(host[520], kv[3]).result(),
        lambda: manager.swap_blocks(device, swapped, {3: 520}),
    )
    yield Row(
        "swap of 512 blocks of 16 KiB",
        lambda: engine.copy(host[DST], kv[SRC]).result(),
        lambda: manager.swap_blocks(device, swapped, pairs),
        share=0.02,
    )
    yield Row(
        "pull of one 16 KiB block from a pool",
        lambda: engine.pull(kv[521], remote[3]).result(),
        lambda: manager.pull_blocks(key, device, [3], [521]),
    )
    yield Row(
        "pull of 512 blocks of 16 KiB from a pool",
        lambda: engine.pull(kv[DST], remote[SRC]).result(),
        lambda: manager.pull_blocks(key, device, SRC, DST),
        share=0.02,
    )
    yield Row(
        "start of a pull of 512 blocks",
        lambda: running.append(engine.pull(kv[DST], remote[SRC])),
        share=0.02,
        after=lambda: running.pop().result(),
    )
    yield Row("layer-wise push of 40 layers, one 4 KiB block", push, push_task, share=0.1)
    yield Row(
        "allocate and free a cache of 80 tensors",
        lambda: engine.allocate("new", blocks=4, tensors=2 * LAYERS, shape=(4096,), dtype="uint8").free().result(),
        lambda: manager.deallocate_cache(manager.allocate_cache(desc)),
    )
    engine.pull(layers[5], remote_layers[3]).result()
    manager.pull_blocks(key_of("layers"), layered, [3], [5])
    for side in (native, original):
        check(side)


@contextmanager
def opened(cluster: int) -> Iterator[tuple[Native, Original]]:
    """Both engines of one process. Every block of every tensor has its own byte."""
    native, original = Native(), Original(cluster)
    for side in (native, original):
        for name, (_, blocks, _) in CACHES.items():
            for number, view in enumerate(side.views(name)):
                view[:] = byte(np.arange(blocks), number, cluster)[:, None]
    yield native, original
    native.engine.close()
    original.dist.finalize()


def byte(block: np.ndarray, tensor: int, cluster: int) -> np.ndarray:
    """The byte that fills a block at the start."""
    return ((block + tensor + cluster) % 251).astype(np.uint8)


def check(side: Native | Original) -> None:
    """Check the bytes that the calls have moved."""
    (kv,), (host,), layers = side.views("kv"), side.views("host"), side.views("layers")
    assert (kv[520] == kv[3]).all(), "the copied block is wrong"
    assert (host[[520, *DST]] == byte(np.array([3, *SRC]), 0, LOCAL)[:, None]).all(), "a swapped block is wrong"
    assert (kv[[521, *DST]] == byte(np.array([3, *SRC]), 0, OWNER)[:, None]).all(), "a pulled block is wrong"
    assert all((tensor[5] == tensor[3]).all() for tensor in layers), "a layer was pushed wrong"


def main() -> None:
    """Print the table, or run the owner."""
    parser = argparse.ArgumentParser(description="the native calls beside the same calls of LLM-DataDist's API")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--calls", type=int, default=5000, help="calls of a round; fewer of those that move much")
    parser.add_argument("--owner", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.owner:
        with opened(OWNER) as (native, original):
            print(native.engine.address, original.port, flush=True)
            sys.stdin.read()
        return
    order = [sys.executable, __file__, "--owner"]
    with subprocess.Popen(order, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:  # noqa: S603
        assert owner.stdout is not None
        address, port = owner.stdout.readline().split()
        with opened(LOCAL) as (native, original):
            original.link(int(port))
            print(f"{options.rounds} rounds of up to {options.calls} calls; microseconds, medians")
            print(f"{'':50} {'native':>9} {'original':>9} {'ratio':>9}  (lowest-highest)")
            for row in rows(native, original, address):
                print(row.line(options.rounds, options.calls), flush=True)


if __name__ == "__main__":
    main()
