"""Single calls of LLM-DataDist's API on this tree beside another commit: `make bench-calls BASE=commit`.

The trees take turns: each runs a slice of calls, then the other one does. A row has p50 and p99 of one call in
microseconds on either tree, and the ratio of the two p50, all as medians over the slices. Each tree has a process that
calls and one that owns the remote caches. The bytes that calls move are checked. Not for: the native API, which
`python_overhead.py` compares with this one.
"""

from __future__ import annotations

import argparse
import ctypes
import random
import socket
import statistics
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Callable

from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    DataType,
    LLMClusterInfo,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    Placement,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[1]
BLOCK, BLOCKS, POOL = 16 << 10, 64, 128 << 20
SMALL, MANY = 1 << 10, 32768  # the bytes of a block, and the blocks, of the call that swaps many
LOCAL, OWNER = 1, 2  # the clusters
POOLED, REGISTERED = 0, 1  # the models of the caches in the pool and in memory of the program
SHAPE = [BLOCKS, BLOCK]


class Side:
    """An engine with a cache in the pool, one in host memory, and one in memory of the program."""

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
        manager = self.manager = self.dist.cache_manager
        self.memory = (ctypes.c_uint8 * (BLOCK * BLOCKS))()
        desc, host = CacheDesc(1, SHAPE, DataType.DT_UINT8), CacheDesc(1, SHAPE, DataType.DT_UINT8, Placement.HOST)
        self.pooled = manager.allocate_blocks_cache(desc, BlocksCacheKey(cluster, POOLED))
        self.host = manager.allocate_blocks_cache(host)
        addrs = [ctypes.addressof(self.memory)]
        self.registered = manager.register_blocks_cache(desc, addrs, BlocksCacheKey(cluster, REGISTERED))
        many = [CacheDesc(1, [MANY, SMALL], DataType.DT_UINT8, where) for where in (Placement.DEVICE, Placement.HOST)]
        self.many, self.swapped = (manager.allocate_blocks_cache(desc) for desc in many)
        chance = random.Random(cluster)  # noqa: S311
        self.pairs = dict(zip(chance.sample(range(MANY), MANY), chance.sample(range(MANY), MANY)))
        ctypes.memmove(self.many.tensor_addrs[0], chance.randbytes(MANY * SMALL), MANY * SMALL)
        for cache in (self.pooled, self.host, self.registered):
            for block in range(BLOCKS):
                ctypes.memset(cache.tensor_addrs[0] + block * BLOCK, byte(cluster, block), BLOCK)

    def link(self, port: int) -> None:
        """Link to the owner."""
        info = LLMClusterInfo()
        info.remote_cluster_id = OWNER
        info.append_local_ip_info("127.0.0.1", 0)
        info.append_remote_ip_info("127.0.0.1", port)
        status, each = self.dist.link_clusters([info], 10_000)
        assert status == LLMStatusCode.LLM_SUCCESS, each

    def calls(self) -> dict[str, Callable[[], object]]:
        """The measured calls. The last block of a cache is the destination."""
        manager, last = self.manager, BLOCKS - 1
        eighty = CacheDesc(80, [4, 4096], DataType.DT_UINT8)
        pooled, registered = BlocksCacheKey(OWNER, POOLED), BlocksCacheKey(OWNER, REGISTERED)
        return {
            "swap_blocks": lambda: manager.swap_blocks(self.pooled, self.host, {3: last}),
            "copy_blocks": lambda: manager.copy_blocks(self.pooled, {3: [last]}),
            "allocate, deallocate": lambda: manager.deallocate_cache(manager.allocate_cache(eighty)),
            "pull, pools": lambda: manager.pull_blocks(pooled, self.pooled, [5], [last - 1]),
            "push, pools": lambda: manager.push_blocks(pooled, self.pooled, [7], [last], tensor_num_per_layer=1),
            "pull, registered": lambda: manager.pull_blocks(registered, self.registered, [5], [last - 1]),
            "push, registered": lambda: manager.push_blocks(
                registered, self.registered, [7], [last], tensor_num_per_layer=1
            ),
            "swap, 32,768 blocks": lambda: manager.swap_blocks(self.many, self.swapped, self.pairs),
        }

    def check(self) -> None:
        """Check the blocks that the calls have written."""
        last, pulled = BLOCKS - 1, byte(OWNER, 5)
        if self.cluster == OWNER:
            written = [(self.pooled, last, byte(LOCAL, 7)), (self.registered, last, byte(LOCAL, 7))]
        else:
            written = [(self.host, last, byte(LOCAL, 3)), (self.pooled, last, byte(LOCAL, 3))]
            written += [(self.pooled, last - 1, pulled), (self.registered, last - 1, pulled)]
        for cache, block, expected in written:
            found = ctypes.string_at(cache.tensor_addrs[0] + block * BLOCK, BLOCK)
            assert found == bytes([expected]) * BLOCK, f"block {block} of cache {cache.cache_id} is wrong"
        if self.cluster == LOCAL:
            src, dst = (ctypes.string_at(cache.tensor_addrs[0], MANY * SMALL) for cache in (self.many, self.swapped))
            for read, into in self.pairs.items():
                found = dst[into * SMALL : (into + 1) * SMALL]
                assert found == src[read * SMALL : (read + 1) * SMALL], (
                    f"block {into} of the swap of many blocks is wrong"
                )


def byte(cluster: int, block: int) -> int:
    """The byte that fills a block at the start."""
    return cluster * BLOCKS + block


def serve(cluster: int) -> None:
    """Be one process of a tree: answer `row calls` with the nanoseconds of one call, until the input ends."""
    side = Side(cluster)
    print(side.port, flush=True)
    if cluster == OWNER:
        sys.stdin.read()
    else:
        side.link(int(input()))
        calls, clock = side.calls(), time.perf_counter_ns
        for line in sys.stdin:
            name, count = line.rsplit(" ", 1)
            call, took = calls[name], []
            for _ in range(int(count)):
                started = clock()
                call()
                took.append(clock() - started)
            took.sort()
            print(took[len(took) // 2], took[len(took) * 99 // 100], flush=True)
    side.check()
    side.dist.finalize()


class Tree:
    """The two processes of a tree."""

    def __init__(self, owner: subprocess.Popen[str], caller: subprocess.Popen[str]) -> None:
        self.caller = caller
        self.ask(port_of(owner))
        port_of(caller)

    def ask(self, line: str) -> None:
        """Send a line to the process that calls."""
        assert self.caller.stdin is not None
        self.caller.stdin.write(f"{line}\n")
        self.caller.stdin.flush()

    def slice(self, name: str, calls: int) -> tuple[float, float]:
        """Return the microseconds of one call, as p50 and p99 of a slice of calls."""
        self.ask(f"{name} {calls}")
        assert self.caller.stdout is not None
        half, most = self.caller.stdout.readline().split()
        return int(half) / 1e3, int(most) / 1e3


def port_of(process: subprocess.Popen[str]) -> str:
    """Return the first line that a process prints."""
    assert process.stdout is not None
    return process.stdout.readline().strip()


@contextmanager
def tree(python: str) -> Iterator[Tree]:
    """Start the two processes of a tree, and check at the end that both have ended well."""

    def started(cluster: int) -> subprocess.Popen[str]:
        order = [python, __file__, "--serve", str(cluster)]
        return subprocess.Popen(order, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: S603

    with started(OWNER) as owner:
        with started(LOCAL) as caller:
            yield Tree(owner, caller)
        assert caller.returncode == 0, "the calling process has failed"
    assert owner.returncode == 0, "the owner has failed"


def main() -> None:
    """Print the table, or be one process of a tree."""
    parser = argparse.ArgumentParser(description="single calls on this tree beside another commit")
    parser.add_argument("--base", help="the commit, which is built in target/differential")
    parser.add_argument("--slices", type=int, default=100)
    parser.add_argument("--calls", type=int, default=1000, help="calls of a slice")
    parser.add_argument("--serve", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve is not None:
        serve(options.serve)
        return
    sys.path.insert(0, str(ROOT / "tools"))
    from differential.base import python_of  # noqa: PLC0415  (only this process needs it)

    base = python_of(options.base, ROOT / "target" / "differential") if options.base else sys.executable
    with tree(str(base)) as then, tree(sys.executable) as now:
        print(f"{options.slices} slices of {options.calls} calls; microseconds, medians")
        print(f"{'':24}{'p50 then':>9} {'now':>9} {'ratio':>6}  {'p99 then':>9} {'now':>9}")
        for name, share in ROWS.items():
            count = max(options.calls // share, 1)
            slices = [(then.slice(name, count), now.slice(name, count)) for _ in range(options.slices)]
            (then50, then99), (now50, now99) = ([statistics.median(c) for c in zip(*side)] for side in zip(*slices))
            ratio = statistics.median(new[0] / old[0] for old, new in slices)
            print(f"{name:24}{then50:9.2f} {now50:9.2f} {ratio:6.2f}  {then99:9.2f} {now99:9.2f}", flush=True)


# Each row, and the number by which its calls of a slice are divided, because one call takes long.
ROWS = {
    "swap_blocks": 1,
    "copy_blocks": 1,
    "allocate, deallocate": 1,
    "pull, pools": 1,
    "push, pools": 1,
    "pull, registered": 1,
    "push, registered": 1,
    "swap, 32,768 blocks": 50,
}


if __name__ == "__main__":
    main()
