"""The latency of one small pull or push from Python: `make bench`, or `.venv/bin/python benches/transfer_latency.py`.

`--block-kib` sets the size of the block, and `--only registered` measures nothing but registered memory.

The owner is a separate process. The table has the median, the 99th percentile and the maximum in microseconds: first
back to back, then with one millisecond between the calls, so that both sides have gone to sleep. Not for: throughput,
which `cargo bench --bench transfer` compares with the machine's limit.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from typing import Callable

import numpy as np

from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    DataType,
    LLMClusterInfo,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
)

BLOCKS = 1024
WARM = 100
FIRST = 1 << 32  # the first request id of slots whose pages are new


def opened(cluster: int, accessible: bool, transport: str, pool: int) -> LLMDataDist:
    """An engine that listens at a free port."""
    dist = LLMDataDist(LLMRole.PROMPT, cluster)
    dist.init(
        {
            "llm.EnableCacheManager": "1",
            "ge.exec.deviceId": "0",
            "llm.MemPoolConfig": f'{{"memory_size": {pool}, "page_shift": 12}}',
            "llm.EnableRemoteCacheAccessible": "1" if accessible else "0",
            "llm.listenIpInfo": "127.0.0.1:0",
            "llm.LinkTransport": transport,
        }
    )
    return dist


def blocks_cache(
    dist: LLMDataDist, size: int, registered: bool, key: BlocksCacheKey | None
) -> tuple[Cache, np.ndarray]:
    """A cache of one tensor of blocks in a pool or in registered memory, and its bytes."""
    manager, desc = dist.cache_manager, CacheDesc(1, [BLOCKS, size], DataType.DT_UINT8)
    if registered:
        view = np.zeros((BLOCKS, size), np.uint8)
        return manager.register_blocks_cache(desc, [view.ctypes.data], key), view
    cache = manager.allocate_blocks_cache(desc, key)
    return cache, manager.tensor_views(cache)[0].numpy()


def prefill(accessible: bool, transport: str, requests: int, size: int, registered: bool) -> None:
    """Run the other process: hold blocks, and slots with request keys, until the end of its input.

    Slots with request keys are held twice: first in one cache, whose pages nobody has touched when they are pulled, and
    after a line of input in a cache for each key.
    """
    dist = opened(2, accessible, transport, (BLOCKS + requests + 64) * size)
    _, view = blocks_cache(dist, size, registered, BlocksCacheKey(2, 0))
    view[:] = np.arange(BLOCKS, dtype=np.uint64).astype(np.uint8)[:, None]
    if requests:
        keys = [CacheKey(2, req_id=FIRST + number) for number in range(requests)]
        whole = dist.cache_manager.allocate_cache(CacheDesc(1, [requests, size], DataType.DT_UINT8), keys)
    print(dist.listen_ip_info, flush=True)
    if requests:
        sys.stdin.readline()
        dist.cache_manager.deallocate_cache(whole)
        slot = CacheDesc(1, [1, size], DataType.DT_UINT8)
        for number in range(requests):
            dist.cache_manager.allocate_cache(slot, [CacheKey(2, req_id=number)])
        print("ready", flush=True)
    sys.stdin.read()
    dist.finalize()


def show(name: str, calls: int, pause: float, call: Callable[[int], None]) -> None:
    """Time every call and print one line."""
    clock, times = time.perf_counter_ns, []
    for number in range(WARM + calls):
        if pause:
            time.sleep(pause)
        started = clock()
        call(number)
        times.append(clock() - started)
    times = sorted(times[WARM:])
    shown = [times[len(times) // 2], times[len(times) * 99 // 100], times[-1]]
    print(f"{name:60}" + "".join(f" {nanos / 1e3:9.2f}" for nanos in shown), flush=True)


def measure(transport: str, accessible: bool, calls: int, size: int, registered: bool = False) -> None:
    """Measure one pair of processes in one mode, with blocks of `size` bytes."""
    per = WARM + calls
    requests = 0 if accessible else per * 2
    order = [sys.executable, __file__, "--prefill", str(int(accessible)), transport, str(requests), str(size)]
    order += ["registered"] * registered
    with subprocess.Popen(order, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:  # noqa: S603
        assert other.stdout is not None
        port = int(other.stdout.readline().rsplit(":", 1)[1])
        dist = opened(1, accessible, transport, 2 * BLOCKS * size)
        peer = LLMClusterInfo()
        peer.remote_cluster_id = 2
        peer.append_local_ip_info("127.0.0.1", 0)
        peer.append_remote_ip_info("127.0.0.1", port)
        assert dist.link_clusters([peer])[0] == LLMStatusCode.LLM_SUCCESS
        if accessible:
            one_sided(dist, transport, calls, size, registered)
        else:
            released(dist, transport, calls, size, other)
        dist.unlink_clusters([peer])
        dist.finalize()


def one_sided(dist: LLMDataDist, transport: str, calls: int, size: int, registered: bool) -> None:
    """Measure pulls and pushes of blocks. The program of the owner takes no part."""
    manager, key = dist.cache_manager, BlocksCacheKey(2, 0)
    near, view = blocks_cache(dist, size, registered, None)
    memory = "registered" if registered else "pool"
    rows = [(number * 37 % BLOCKS, (number * 37 + 5) % BLOCKS) for number in range(WARM + calls)]

    def pull(number: int) -> None:
        src, dst = rows[number]
        manager.pull_blocks(key, near, [src], [dst])

    def push(number: int) -> None:
        src = rows[number][0]
        # A cache of one tensor has no layer of two tensors, so that nothing would be pushed without this.
        manager.push_blocks(key, near, [src], [src], tensor_num_per_layer=1)

    for pause, between in PAUSES:
        view[:] = 0xEE
        show(f"{transport}, pull_blocks, {memory}{between}", calls, pause, pull)
        for src, dst in rows:
            assert (view[dst] == src % 256).all(), "a block arrived wrong"
        pushed = view.copy()
        show(f"{transport}, push_blocks, {memory}{between}", calls, pause, push)
        everything = list(range(BLOCKS))
        manager.pull_blocks(key, near, everything, everything)
        for src, _ in rows:
            assert (view[src] == pushed[src]).all(), "a block was pushed wrong"
        # What was pushed moved the other side's blocks: put them back.
        view[:] = np.arange(BLOCKS, dtype=np.uint64).astype(np.uint8)[:, None]
        manager.push_blocks(key, near, everything, everything, tensor_num_per_layer=1)


def released(dist: LLMDataDist, transport: str, calls: int, size: int, other: subprocess.Popen[str]) -> None:
    """Measure pulls of slots by request keys. Each pull uses up its key.

    The first pulls touch each page of the owner for the first time, the later ones read pages that were read before.
    """
    manager = dist.cache_manager
    near = manager.allocate_cache(CacheDesc(1, [1, size], DataType.DT_UINT8))
    name = f"{transport}, pull_cache, the key is released"
    rest = 2 * (WARM + calls) - WARM
    show(f"{name}, new pages", rest, 0, lambda number: manager.pull_cache(CacheKey(2, req_id=FIRST + number), near))
    assert other.stdin is not None
    assert other.stdout is not None
    other.stdin.write("\n")
    other.stdin.flush()
    assert other.stdout.readline() == "ready\n"
    for turn, (pause, between) in enumerate(PAUSES):
        keys = [CacheKey(2, req_id=turn * (WARM + calls) + number) for number in range(WARM + calls)]

        def pull(number: int, keys: list[CacheKey] = keys) -> None:
            manager.pull_cache(keys[number], near)

        show(f"{name}{between}", calls, pause, pull)
        status = None
        try:
            manager.pull_cache(keys[0], near)
        except LLMException as gone:
            status = gone.status_code
        assert status == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, "the key was not released"


PAUSES = ((0.0, ""), (0.001, ", 1 ms between calls"))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="what one small transfer costs from Python")
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--block-kib", type=int, default=16)
    parser.add_argument("--only", choices=("pool", "registered"), help="pulls and pushes within one host alone")
    options = parser.parse_args()
    calls, size = options.calls, options.block_kib << 10
    print(f"one call of {options.block_kib} KiB, {calls:,} calls each, microseconds")
    print(f"{'':60} {'p50':>9} {'p99':>9} {'max':>9}")
    for registered in (False, True):
        if options.only in (None, "registered" if registered else "pool"):
            measure("shm", True, calls, size, registered)
    if options.only is None:
        measure("shm", False, calls, size)
        for accessible in (True, False):
            measure("tcp", accessible, calls, size)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--prefill"]:
        prefill(sys.argv[2] == "1", sys.argv[3], int(sys.argv[4]), int(sys.argv[5]), sys.argv[6:] == ["registered"])
    else:
        main()
