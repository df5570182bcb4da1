"""The costs of an idle linked pair: CPU, start-up time, and peak memory of both sides.

Every memory figure includes Python, numpy, 64 MiB of the pair's own memory and 64 MiB of the benchmark. No time
includes touching this memory. Not for: transfers (``between``, ``small``).
"""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import TYPE_CHECKING

from between import case_of
from between.adapter import LOCAL, PULL
from between.pair import Pair, Pattern
from between.systems import HIXL, HIXL_TCP, PEERS, Peer
from comparison import reason
from rows import LIMIT, OURS, Row, measured

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ask import Ask

MEMORY = 64 << 20
IDLE_S, QUICK_IDLE_S = 5.0, 1.0
# Settings of the limit, as one row for Python alone is enough, and the module hixl, which is not a system of its own.
SKIPPED = ("process_vm", "stream", HIXL, HIXL_TCP)
UNITS = {
    "import": "ms",
    "open, memory registered": "ms",
    "link": "ms",
    "import, open and link": "ms",
    "idle CPU of both, linked": "cores",
    "peak memory, local": "MiB",
    "peak memory, remote": "MiB",
    "memory of both, shared pages once": "MiB",
}
NOTES = {
    OURS: "a link says every second that it is alive; with a pool the remote memory is mapped, and counts for both",
    LIMIT: "no system at all: Python, numpy and the memory",
    "ucxx": "nobody drives it while it is idle, so it would not notice a message either",
    "mooncake store": "its master is a third process that is not counted; the remote side lends three times the memory",
}


def parts(ask: Ask) -> list[str]:  # noqa: ARG001  (every group has this signature)
    """One part for all pairs, because idle pairs do not disturb each other."""
    return ["all"]


def run(ask: Ask, part: str) -> Iterator[Row]:  # noqa: ARG001
    """Start every pair in turn, in each round. Measure the idle CPU of the pairs of the last round."""
    pattern = Pattern(MEMORY)
    wanted = [peer for peer in PEERS.values() if ask.wants(peer.asked_as) and peer.setting not in SKIPPED]
    failed: dict[str, str] = {}
    rounds = 1 if ask.quick else 3
    standing: dict[str, Pair] = {}
    peers = {name(peer): peer for peer in wanted}
    figures: dict[str, dict[str, list[float]]] = {key: {} for key in peers}
    try:
        for round_ in range(rounds):
            for key, peer in peers.items():
                if key in failed:
                    continue
                try:
                    pair = Pair(peer, pattern, ask.folder, apart=ask.apart)
                    note_all(figures[key], started(pair))
                except Exception as failure:  # noqa: BLE001  (a peer that fails is a row with its reason)
                    failed[key] = reason(failure)
                    continue
                if round_ == rounds - 1:
                    standing[key] = pair
                else:
                    pair.end()
        for key, cores in idle(standing, QUICK_IDLE_S if ask.quick else IDLE_S).items():
            note_all(figures[key], {"idle CPU of both, linked": cores})
    finally:
        for pair in standing.values():
            pair.end()
    yield from judged(peers, figures, failed)


def name(peer: Peer) -> str:
    """The name of a peer and its setting."""
    return f"{peer.system}/{peer.setting}"


def note_all(into: dict[str, list[float]], figures: dict[str, float]) -> None:
    """Add the figures of one round."""
    for figure, value in figures.items():
        into.setdefault(figure, []).append(value)


def started(pair: Pair) -> dict[str, float]:
    """Start-up times, and the peak after one transfer of everything."""
    case = case_of(PULL, 1 << 20, MEMORY >> 20, MEMORY)
    variant = pair.lay(case)[0][0]
    pair.timed("go", variant, times=1)
    wrong = pair.destination(PULL).do("wrong")
    assert not wrong, f"wrong bytes: {wrong}"
    remote, local = pair.both
    local_took = pair.took[LOCAL]
    return {
        "import": local_took["import"] * 1e3,
        "open, memory registered": local_took["ready"] * 1e3,
        "link": pair.took["link"] * 1e3,
        "import, open and link": (local_took["import"] + local_took["ready"] + pair.took["link"]) * 1e3,
        "peak memory, local": peak(local.pid),
        "peak memory, remote": peak(remote.pid),
        "memory of both, shared pages once": proportional(local.pid) + proportional(remote.pid),
    }


def peak(pid: int) -> float:
    """The peak resident memory in MiB, including shared memory."""
    for line in Path(f"/proc/{pid}/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) / 1024
    return 0.0


def proportional(pid: int) -> float:
    """The proportional set size in MiB: memory that n processes share counts 1/n."""
    for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if line.startswith("Pss:"):
            return int(line.split()[1]) / 1024
    return 0.0


def idle(pairs: dict[str, Pair], seconds: float) -> dict[str, float]:
    """The number of cores that both sides of each pair use while idle, to three decimals."""
    time.sleep(0.5)
    before = {key: spent(pair) for key, pair in pairs.items()}
    began = time.monotonic()
    time.sleep(seconds)
    took = time.monotonic() - began
    return {key: round((spent(pair) - before[key]) / took, 3) for key, pair in pairs.items()}


def spent(pair: Pair) -> float:
    """CPU seconds of both sides so far, from the scheduler's statistics, which are finer than ticks."""
    total = 0
    for side in pair.both:
        for task in Path(f"/proc/{side.pid}/task").iterdir():
            total += int((task / "schedstat").read_text().split()[0])
    return total / 1e9


def judged(peers: dict[str, Peer], figures: dict[str, dict[str, list[float]]], failed: dict[str, str]) -> Iterator[Row]:
    """Yield a row for each figure, with its ratio to ours with a pool."""
    ours = figures.get(f"{OURS}/pool", {})
    for figure, unit in UNITS.items():
        for key, peer in peers.items():
            row = Row("standing", figure, peer.system, peer.setting, unit=unit, note=NOTES.get(peer.system, ""))
            if key in failed:
                yield dataclasses.replace(row, note=failed[key])
                continue
            if figure not in figures[key]:
                continue
            beside = ours.get(figure) if peer.system not in (OURS, LIMIT) else None
            yield measured(row, figures[key][figure], beside)
