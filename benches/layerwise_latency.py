"""The cost of one layer from Python: `make bench`, or `.venv/bin/python benches/layerwise_latency.py`.

The destination is a separate process. A task has forty layers whose synchronizer returns at once. The table has the
time of the whole task, including its start, divided by forty, in microseconds; the time in which the other side pulls
the same layer; and the difference. Not for: throughput, layers after a pause, and overlap with compute (`cargo bench
--bench layerwise`).
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import time
from typing import Optional

import numpy as np

from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    DataType,
    LayerSynchronizer,
    LLMClusterInfo,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    TransferWithCacheKeyConfig,
)

LAYERS = 40
BLOCK = 16 << 10
ROWS = 64
KEY = BlocksCacheKey(2, 0)


class Ready(LayerSynchronizer):
    """Every layer is ready when it is asked for."""

    def synchronize_layer(self, layer_index: int, timeout_in_millis: Optional[int]) -> bool:
        """Return True at once."""
        return layer_index >= 0 and timeout_in_millis is None


def opened(cluster: int) -> tuple[LLMDataDist, Cache]:
    """Open an engine that listens at a free port, and allocate its blocks cache."""
    dist = LLMDataDist(LLMRole.MIX, cluster)
    dist.init(
        {
            "llm.EnableCacheManager": "1",
            "llm.MemPoolConfig": f'{{"memory_size": {LAYERS * 2 * ROWS * BLOCK + (1 << 20)}, "page_shift": 12}}',
            "llm.EnableRemoteCacheAccessible": "1",
            "llm.listenIpInfo": "127.0.0.1:0",
        }
    )
    desc = CacheDesc(LAYERS * 2, [ROWS, BLOCK], DataType.DT_UINT8)
    return dist, dist.cache_manager.allocate_blocks_cache(desc, BlocksCacheKey(cluster, 0))


def decode() -> None:
    """Run the other process: answer each line with the microseconds per layer of a pull of that many blocks."""
    dist, cache = opened(2)
    views = [view.numpy() for view in dist.cache_manager.tensor_views(cache)]
    print(dist.listen_ip_info, flush=True)
    for line in sys.stdin:
        blocks = list(range(int(line)))
        wrong = [number for number, view in enumerate(views) if not (view[blocks] == number).all()]
        assert not wrong, f"tensors {wrong} arrived wrong"
        times = []
        for layer in range(LAYERS):
            one = range(layer, layer + 1)
            started = time.perf_counter()
            dist.cache_manager.pull_blocks(
                BlocksCacheKey(1, 0), cache, blocks, blocks, src_layer_range=one, dst_layer_range=one
            )
            times.append((time.perf_counter() - started) * 1e6)
        for view in views:
            view[:] = 0xEE
        print(statistics.median(times), flush=True)
    dist.finalize()


def task_time(dist: LLMDataDist, cache: Cache, blocks: list[int]) -> float:
    """Seconds of a whole task."""
    layers = range(LAYERS)
    config = TransferWithCacheKeyConfig(KEY, layers, layers)
    started = time.perf_counter()
    task = dist.cache_manager.transfer_cache_async(cache, Ready(), [config], blocks, blocks)
    assert task.synchronize() == LLMStatusCode.LLM_SUCCESS, task.errors()
    return time.perf_counter() - started


def main() -> None:
    """Parse the options and measure."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--decode", action="store_true")
    options = parser.parse_args()
    if options.decode:
        return decode()
    order = [sys.executable, __file__, "--decode"]
    with subprocess.Popen(order, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:  # noqa: S603
        assert other.stdin is not None
        assert other.stdout is not None
        port = int(other.stdout.readline().rsplit(":", 1)[1])
        dist, cache = opened(1)
        for number, view in enumerate(dist.cache_manager.tensor_views(cache)):
            view.numpy()[:] = np.uint8(number)
        peer = LLMClusterInfo()
        peer.remote_cluster_id = 2
        peer.append_local_ip_info("127.0.0.1", 0)
        peer.append_remote_ip_info("127.0.0.1", port)
        assert dist.link_clusters([peer])[0] == LLMStatusCode.LLM_SUCCESS
        print(f"{'microseconds per layer of two tensors':40} {'task':>9} {'pull':>9} {'difference':>11}")
        for count in (1, 8, ROWS):
            blocks = list(range(count))
            tasks, pulls = [], []
            for _ in range(options.rounds):
                tasks.append(task_time(dist, cache, blocks) / LAYERS * 1e6)
                other.stdin.write(f"{count}\n")
                other.stdin.flush()
                pulls.append(float(other.stdout.readline()))
            task, pull = statistics.median(tasks), statistics.median(pulls)
            print(f"{count:4} blocks of 16 KiB{'':20} {task:9.1f} {pull:9.1f} {task - pull:11.1f}", flush=True)
        dist.unlink_clusters([peer])
        dist.finalize()
    return None


if __name__ == "__main__":
    main()
