"""The latency of one small pull or push from Python: `make bench`, or `.venv/bin/python benches/transfer_latency.py`.

`--block-kib` sets the size of the block, and `--only registered` measures nothing but registered memory.

The owner is a separate process (`serving_peer.py`). The table has the median, the 99th percentile and the maximum in
microseconds: first back to back, then with one millisecond between the calls, so that both sides have gone to sleep.
Not for: throughput, which `cargo bench --bench transfer` compares with the machine's limit.
"""

from __future__ import annotations

import argparse
import time
from typing import Callable

from serving_peer import Setting, linked, row_values

BLOCKS = 1024
WARM = 100
SETTINGS = {"pool": ("shm", False), "registered": ("shm", True), "tcp": ("tcp", False)}
PAUSES = ((0.0, ""), (0.001, ", 1 ms between calls"))


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


def measure(name: str, calls: int, size: int) -> None:
    """Measure pulls and pushes of blocks of `size` bytes in one setting. The program of the owner takes no part."""
    transport, registered = SETTINGS[name]
    rows = [(number * 37 % BLOCKS, (number * 37 + 5) % BLOCKS) for number in range(WARM + calls)]
    contents = row_values(BLOCKS)
    with linked(Setting(transport, size, BLOCKS, registered=registered), BLOCKS) as local:
        engine, kv, cache, view = local.engine, local.kv, local.cache, local.view

        def pull(number: int) -> None:
            src, dst = rows[number]
            engine.pull(cache[dst], kv[src]).result()

        def push(number: int) -> None:
            src, _ = rows[number]
            engine.push(kv[src], cache[src]).result()

        for pause, between in PAUSES:
            view[:] = 0xEE
            show(f"{name}, pull{between}", calls, pause, pull)
            assert all((view[dst] == contents[src]).all() for src, dst in rows), "a block arrived wrong"
            pushed = view.copy()
            show(f"{name}, push{between}", calls, pause, push)
            engine.pull(cache[:], kv[:BLOCKS]).result()
            assert all((view[src] == pushed[src]).all() for src, _ in rows), "a block was pushed wrong"
            view[:] = contents[:, None]  # the pushes have moved the blocks of the owner: put them back
            engine.push(kv[:BLOCKS], cache[:]).result()


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description="what one small transfer costs from Python")
    parser.add_argument("--calls", type=int, default=10_000)
    parser.add_argument("--block-kib", type=int, default=16)
    parser.add_argument("--only", choices=SETTINGS, help="pools or registered memory of one host, or TCP")
    options = parser.parse_args()
    print(f"one call of {options.block_kib} KiB, {options.calls:,} calls each, microseconds")
    print(f"{'':60} {'p50':>9} {'p99':>9} {'max':>9}")
    for name in [options.only] if options.only else SETTINGS:
        measure(name, options.calls, options.block_kib << 10)


if __name__ == "__main__":
    main()
