"""A load of chunks from the primary tier of another scheduler: ``LlmDatadistP2PTier`` beside vLLM's own tier (NIXL).

    .venv-vllm/bin/python benches/vllm/p2p_tier.py [--rounds 3] [--loads 5] [--chunks 256] [--size 1048576]

Two processes on this host, vLLM's real manager and protocol, no model. A load begins with its lookup and ends when the
tier reports it. Each row is the median of all loads; the systems take turns, and each round starts both sides anew. The
bytes of each load are compared afterwards. Not for: correctness (integration-tests/vllm).
"""

from __future__ import annotations

import argparse
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "integration-tests/vllm"))

from p2p_scheduler import Other, Scheduler  # noqa: E402

from llm_datadist import Engine  # noqa: E402

TIER = "LlmDatadistP2PTier"
SYSTEMS: dict[str, dict[str, Any]] = {
    "llm_datadist": {"type": TIER},
    "llm_datadist, tcp": {"type": TIER, "engine_options": {"transport": "tcp"}},
    "NIXL": {"type": "p2p"},
}
PULL = "plain pull, one process"
STEP_S = 0.0002  # of the scheduler that loads. It must leave the core to whoever moves bytes


def loads(tier: dict[str, Any], count: int, chunks: int, size: int) -> list[float]:
    """Return the seconds of some loads."""
    requests = {f"r{number}": chunks for number in range(count)}
    room = chunks * count + 8
    owner = Other(tier, requests, room, size)
    reader = Scheduler(tier, room, size)
    reader.rows[:] = 1  # no page is touched for the first time in a load
    seconds = []
    try:
        for name in requests:
            wanted = reader.fetch(name, owner.address)
            while not reader.tier._sessions[owner.address].ready:  # noqa: SLF001 - only the load is measured
                reader.step()
            begin = time.perf_counter()
            reader.found(wanted, chunks)
            reader.step()
            while reader.manager.has_pending_work() and not reader.reported:
                reader.step()
                time.sleep(STEP_S)
            seconds.append(time.perf_counter() - begin)
            if not reader.reported.pop().success or not reader.equal(wanted, chunks):
                raise RuntimeError(f"load {name} of {tier} has failed")
            reader.finish(wanted)
    finally:
        reader.close()
        owner.kill()
    return seconds


def pulls(count: int, chunks: int, size: int) -> list[float]:
    """Return the seconds of pulls of as many bytes."""
    with Engine(listen="127.0.0.1:0") as owner, Engine() as reader:
        arrays = [np.full((chunks, size), number, np.int8) for number in range(2)]
        owner.register("rows", arrays[:1])
        to = reader.register("rows", arrays[1:])
        rows = reader.link(owner.address or "").result()["rows"][range(chunks)]
        seconds = []
        for _ in range(count):
            begin = time.perf_counter()
            reader.pull(to[:], rows).result()
            seconds.append(time.perf_counter() - begin)
    return seconds


def main() -> None:
    """Print a row for each system."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, default in (("rounds", 3), ("loads", 5), ("chunks", 256), ("size", 1 << 20)):
        parser.add_argument(f"--{name}", type=int, default=default)
    given = parser.parse_args()
    sizes = (given.loads, given.chunks, given.size)
    found: dict[str, list[float]] = {name: [] for name in (*SYSTEMS, PULL)}
    for _ in range(given.rounds):
        for name, tier in SYSTEMS.items():
            found[name] += loads(tier, *sizes)
        found[PULL] += pulls(*sizes)
    base = statistics.median(found["llm_datadist"])
    for name, seconds in found.items():
        middle = statistics.median(seconds)
        rate = given.chunks * given.size / middle / 1e9
        print(f"{name:26} {middle * 1e3:8.1f} ms {rate:6.2f} GB/s  {middle / base:5.2f} times llm_datadist's time")


if __name__ == "__main__":
    main()
