"""Measures a link: latency of one block, and throughput of many, on each path that works."""

from __future__ import annotations

import secrets
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Optional

from llm_datadist.doctor.probe import BLOCK_BYTES, BLOCKS, OWNER, Probe

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping

__all__ = ["Row", "measure"]

# Options of a row, over those of the user.
_ROWS: dict[str, dict[str, Any]] = {
    "default options": {},
    "sockets only": {"link_transport": "tcp", "transfer_backend": "sockets"},
}
_PARTS = 4
_FEWEST = 5


@dataclass(frozen=True)
class Row:
    """What was measured with some options. Times in microseconds, throughput in GB/s (10^9 bytes a second).

    Attributes:
        options: the options.
        path: the path on which the bytes moved, as ``stats()["links"]`` names it.
        pull_us: median and 99th percentile of a pull of one block of 16 KiB.
        push_us: the same of a push.
        pull_gbs: median throughput of a pull of 64 MiB.
        push_gbs: the same of a push.
        reason: why the bytes took no faster path.
    """

    options: str
    path: str
    pull_us: tuple[float, float]
    push_us: tuple[float, float]
    pull_gbs: float
    push_gbs: float
    reason: str


def measure(host: str, port: int, seconds: float, extra: Mapping[str, Any]) -> list[Row]:
    """Measure the link to the probe at this address in about ``seconds``.

    Raises:
        ConnectionError: it cannot be reached, or refuses.
        LLMException: a transfer failed, or an option is wrong.
    """
    rows: list[Row] = []
    for name, options in _ROWS.items():
        row = _row(name, host, port, seconds / len(_ROWS), {**extra, **options})
        if not rows or row.path != rows[0].path:
            rows.append(row)
    return rows


def _row(name: str, host: str, port: int, seconds: float, options: Mapping[str, Any]) -> Row:
    cluster = OWNER + 1 + secrets.randbelow(2**40)
    probe = Probe(cluster, "127.0.0.1:0", options)
    try:
        probe.link(host, port)
        one, all_of_them = [0], list(range(BLOCKS))
        # The first transfers open streams and fill page tables.
        for warm_up in (probe.pull, probe.push):
            warm_up(one)
            warm_up(all_of_them)
        part = seconds / _PARTS
        pulls, pushes = _times(probe.pull, one, part), _times(probe.push, one, part)
        large = _times(probe.pull, all_of_them, part), _times(probe.push, all_of_them, part)
        link = probe.link_stats()
    finally:
        probe.close()
    pull_gbs, push_gbs = (BLOCKS * BLOCK_BYTES / statistics.median(times) / 1e9 for times in large)
    path = max(link["paths"], key=lambda path: link["paths"][path]["bytes"])
    return Row(name, path, _latency(pulls), _latency(pushes), pull_gbs, push_gbs, link["sockets_reason"] or "")


def _times(move: Callable[[list[int]], None], blocks: list[int], limit: float) -> list[float]:
    """Repeat a transfer for ``limit`` seconds, at least a few times, and return the seconds of each."""
    times: list[float] = []
    end = time.perf_counter() + limit
    now: Optional[float] = None
    while now is None or now < end or len(times) < _FEWEST:
        begin = time.perf_counter()
        move(blocks)
        now = time.perf_counter()
        times.append(now - begin)
    return times


def _latency(times: list[float]) -> tuple[float, float]:
    ordered = sorted(times)
    return statistics.median(ordered) * 1e6, ordered[min(len(ordered) - 1, len(ordered) * 99 // 100)] * 1e6
