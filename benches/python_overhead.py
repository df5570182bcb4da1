"""The overhead of a call from Python: `make bench`, or `.venv/bin/python benches/python_overhead.py [--rounds 15]`.

Each line is a median over rounds, in microseconds, with the fastest and the slowest round. The copy itself is measured
in the same run with numpy over the same memory, with many blocks in one call, so that the overhead of numpy does not
count. Not for: large copies, whose speed `cargo bench --bench copy` compares with the machine's limit.
"""

from __future__ import annotations

import argparse
import statistics
import threading
import time
from typing import Any, Callable

import numpy as np

from llm_datadist import BlocksCacheKey, CacheDesc, CacheKey, DataType, LLMConfig, LLMDataDist, LLMRole, Placement

BLOCK = 16 << 10
CALLS = 5000


def measure(rounds: int, call: Callable[[], Any], calls: int = CALLS, per: int = 1) -> list[float]:
    """Return the microseconds of one call, or of one of its `per` parts, for each round after a warm-up round."""
    figures = []
    for _ in range(rounds + 1):
        started = time.perf_counter()
        for _ in range(calls):
            call()
        figures.append((time.perf_counter() - started) / calls / per * 1e6)
    return sorted(figures[1:])


def show(name: str, figures: list[float]) -> float:
    """Print one line and return its median."""
    median = statistics.median(figures)
    print(f"{name:52} {median:8.2f}  ({figures[0]:.2f}-{figures[-1]:.2f})")
    return median


def idle_thread(stop: threading.Event) -> None:
    """Take the GIL from time to time, as other threads of a server do."""
    while not stop.wait(0.0005):
        sum(range(100))


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="what a call costs from Python")
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    config = LLMConfig()
    config.enable_cache_manager = True
    config.mem_pool_cfg = config.host_mem_pool_cfg = '{"memory_size": 268435456}'
    dist = LLMDataDist(LLMRole.PROMPT, 1)
    dist.init(config.generate_options())
    manager = dist.cache_manager
    shape = [1024, BLOCK // 2]
    device = manager.allocate_blocks_cache(CacheDesc(1, shape, DataType.DT_FLOAT16), BlocksCacheKey(1, 0))
    host = manager.allocate_blocks_cache(CacheDesc(1, shape, DataType.DT_FLOAT16, Placement.HOST))
    src, dst = (manager.tensor_views(cache)[0].numpy() for cache in (device, host))
    src[:] = np.arange(src.size, dtype=np.uint16).view(np.float16).reshape(shape)

    print(f"{rounds} rounds of {CALLS} calls; microseconds, median (fastest-slowest round)")
    itself = show(
        "the copy itself: 16 KiB, numpy, 8 blocks a call", measure(rounds, lambda: np.copyto(dst[:8], src[:8]), per=8)
    )
    one = {3: 5}
    swap = show(
        "swap_blocks, 1 block of 16 KiB, 1 tensor, out", measure(rounds, lambda: manager.swap_blocks(device, host, one))
    )
    assert np.array_equal(dst[5].view(np.uint16), src[3].view(np.uint16)), "the block arrived wrong"
    print(f"{'  more than the copy itself':52} {swap - itself:8.2f}")
    show("swap_blocks, the same, in", measure(rounds, lambda: manager.swap_blocks(host, device, one)))
    show("copy_blocks, 1 block of 16 KiB, 1 tensor", measure(rounds, lambda: manager.copy_blocks(device, {3: [6]})))
    empty: dict[int, int] = {}
    show("swap_blocks, nothing to do", measure(rounds, lambda: manager.swap_blocks(device, host, empty)))
    pairs = {block: 1023 - block for block in range(1024)}
    array = np.array(list(pairs.items()), dtype=np.int64)
    many = 50
    show(
        "swap_blocks, 1,024 blocks of 16 KiB, dict",
        measure(rounds, lambda: manager.swap_blocks(device, host, pairs), many),
    )
    show("swap_blocks, the same, (n, 2) array", measure(rounds, lambda: manager.swap_blocks(device, host, array), many))
    desc = CacheDesc(80, [4, 4096], DataType.DT_FLOAT16)
    keys = [CacheKey(1, req_id=number) for number in range(4)]

    def with_keys() -> None:
        manager.deallocate_cache(manager.allocate_cache(desc, keys))
        for key in keys:
            manager.remove_cache_key(key)

    show(
        "allocate_cache + deallocate_cache, 80 tensors",
        measure(rounds, lambda: manager.deallocate_cache(manager.allocate_cache(desc))),
    )
    show("the same with 4 keys, removed one by one", measure(rounds, with_keys))
    a, b = (manager.allocate_cache(CacheDesc(2, [4, 4096], DataType.DT_FLOAT16)) for _ in range(2))
    show("copy_cache, 8 KiB slot, 2 tensors", measure(rounds, lambda: manager.copy_cache(a, b, 1, 2)))
    stop = threading.Event()
    thread = threading.Thread(target=idle_thread, args=(stop,))
    thread.start()
    show(
        "swap_blocks, 1 block, another thread wants the GIL",
        measure(rounds, lambda: manager.swap_blocks(device, host, one)),
    )
    stop.set()
    thread.join()
    dist.finalize()


if __name__ == "__main__":
    main()
