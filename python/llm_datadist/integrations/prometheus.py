"""The counters of an engine for Prometheus: a collector for ``prometheus_client``.

    from prometheus_client import REGISTRY, start_http_server
    REGISTRY.register(EngineCollector(engine))
    start_http_server(9400)

The collector reads ``stats()`` when Prometheus asks, and nothing in between. After ``finalize`` it has no metrics. The
how-to page "Monitoring" lists them, and ``docs/monitoring/dashboard.json`` is a dashboard for Grafana.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.registry import Collector

from llm_datadist import LLMException

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import Metric

    from llm_datadist import LLMDataDist
    from llm_datadist.stats import OpStats, PoolStats, Stats

__all__ = ["EngineCollector"]

# Powers of two of nanoseconds that bound the buckets of the histogram: 1 us to 69 s.
_FIRST, _LAST, _STEP = 10, 36, 2
_NANOS = 1e9


class EngineCollector(Collector):
    """Makes the counters of one engine available to a registry of ``prometheus_client``.

    Args:
        engine: the engine. It may be initialized later.
    """

    def __init__(self, engine: LLMDataDist) -> None:
        self._engine = engine
        self._moved = _Growing()

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of this moment."""
        try:
            stats = self._engine.stats()
        except (LLMException, RuntimeError):  # not initialized, or finalized
            return
        # Before the first metric, because the caller may stop in between.
        moved = self._moved.grown(_moved_by(stats), {str(link["cluster"]) for link in stats["links"]})
        yield from _calls(stats)
        yield from _pools(stats)
        yield from _tables(stats)
        yield from _links(stats, moved)
        yield from _ucx(stats)


def _calls(stats: Stats) -> Iterator[Metric]:
    seconds = HistogramMetricFamily("llm_datadist_call_seconds", "Duration of the calls of a kind.", labels=["op"])
    failures = CounterMetricFamily("llm_datadist_call_failures", "Calls of a kind that failed.", labels=["op"])
    moved = CounterMetricFamily("llm_datadist_moved_bytes", "Bytes moved by calls that succeeded.", labels=["op"])
    for op, counted in stats["ops"].items():
        seconds.add_metric([op], _buckets(counted), counted["total_nanos"] / _NANOS)
        failures.add_metric([op], counted["failures"])
        moved.add_metric([op], counted["bytes"])
    yield from (seconds, failures, moved)


def _buckets(counted: OpStats) -> list[tuple[str, float]]:
    """Return cumulative counts by upper bound in seconds."""
    counts = counted["buckets"]
    bounds = range(_FIRST, _LAST + 1, _STEP)
    # Entry i counts calls of less than 2**i nanoseconds.
    cumulative = [(str(2**bound / _NANOS), float(sum(counts[: bound + 1]))) for bound in bounds]
    return [*cumulative, ("+Inf", float(sum(counts)))]


_POOLS: dict[str, tuple[str, Any]] = {
    "capacity_bytes": ("Bytes that can be allocated.", GaugeMetricFamily),
    "used_bytes": ("Allocated bytes.", GaugeMetricFamily),
    "peak_used_bytes": ("Largest number of allocated bytes so far.", GaugeMetricFamily),
    "largest_free_run_bytes": ("Bytes of the largest request that would succeed now.", GaugeMetricFamily),
    "released_bytes": ("Bytes of released caches that are still in use.", GaugeMetricFamily),
    "failures": ("Requests refused for lack of free pages.", CounterMetricFamily),
}


def _pools(stats: Stats) -> Iterator[Metric]:
    for name, (text, kind) in _POOLS.items():
        family = kind(f"llm_datadist_pool_{name}", text, labels=["pool"])
        for pool, counted in stats["pools"].items():
            family.add_metric([pool], _of(counted, name))
        yield family


def _of(counted: PoolStats, name: str) -> float:
    values: dict[str, Any] = {**counted}
    return float(values[name])


def _tables(stats: Stats) -> Iterator[Metric]:
    yield GaugeMetricFamily("llm_datadist_caches", "Caches.", stats["table"]["caches"])
    yield GaugeMetricFamily("llm_datadist_keys", "Keys that are bound to a cache.", stats["table"]["keys"])
    verify = stats["verify"]
    yield CounterMetricFamily("llm_datadist_verified_blocks", "Blocks that were compared.", verify["blocks"])
    yield CounterMetricFamily("llm_datadist_mismatched_blocks", "Blocks that differed.", verify["mismatches"])


def _ucx(stats: Stats) -> Iterator[Metric]:
    ucx = stats["ucx"]
    if ucx["version"] is not None:
        yield CounterMetricFamily("llm_datadist_ucx_reads", "Reads by UCX that succeeded.", ucx["reads"])
        failures = "Reads by UCX that failed or were given up."
        yield CounterMetricFamily("llm_datadist_ucx_failures", failures, ucx["failures"])
        closes = "Connections of UCX that were closed by force, to end a read."
        yield CounterMetricFamily("llm_datadist_ucx_forced_closes", closes, ucx["forced_closes"])
        yield CounterMetricFamily("llm_datadist_ucx_renewals", "Workers of UCX that were replaced.", ucx["renewals"])


class _Growing:
    """Keeps sums over the links of a cluster from falling when one of its links ends.

    Prometheus takes a counter that falls for one that began again at 0, and would count the other links twice.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[tuple[str, str], int] = {}
        self._ended: dict[tuple[str, str], int] = {}

    def grown(self, sums: dict[tuple[str, str], int], clusters: set[str]) -> dict[tuple[str, str], int]:
        """Return sums by cluster and path, each with what has ended while the cluster was listed.

        Args:
            sums: the sums of the current links.
            clusters: the clusters with a link. The others are forgotten, so they begin again at 0.
        """
        with self._lock:
            last = {key: sum_ for key, sum_ in self._last.items() if key[0] in clusters}
            self._last = {key: sums.get(key, 0) for key in {**last, **sums}}
            ended = {key: self._ended.get(key, 0) + max(last.get(key, 0) - now, 0) for key, now in self._last.items()}
            self._ended = ended
            return {key: now + ended[key] for key, now in self._last.items()}


def _moved_by(stats: Stats) -> dict[tuple[str, str], int]:
    """Return the bytes of the current links by cluster and path."""
    moved: Counter[tuple[str, str]] = Counter()
    for link in stats["links"]:
        for path, carried in link["paths"].items():
            moved[str(link["cluster"]), path] += carried["bytes"]
    return moved


def _links(stats: Stats, moved: dict[tuple[str, str], int]) -> Iterator[Metric]:
    """Yield the metrics of the links. A cluster may have several links, so values with equal labels are combined."""
    kinds: Counter[tuple[str, ...]] = Counter()
    silence: dict[tuple[str, ...], float] = {}
    for link in stats["links"]:
        cluster = str(link["cluster"])
        kinds[cluster, link["transport"], link["pools"], link["registered"]] += 1
        silence[cluster,] = max(silence.get((cluster,), 0.0), link["silent_ms"] / 1000)
    labels = ["cluster", "transport", "pools", "registered"]
    links = GaugeMetricFamily("llm_datadist_link", "Current links, by how bytes travel.", labels=labels)
    text = "Time since the peer's last control message, of its most silent link."
    silent = GaugeMetricFamily("llm_datadist_link_silent_seconds", text, labels=["cluster"])
    text = "Bytes of pulls and pushes over the links of a cluster since it was linked, by path."
    paths = CounterMetricFamily("llm_datadist_link_moved_bytes", text, labels=["cluster", "path"])
    for family, values in ((links, kinds), (silent, silence), (paths, moved)):
        for key, value in values.items():
            family.add_metric(key, value)
        yield family
