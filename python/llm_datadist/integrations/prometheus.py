"""The counters of engines for Prometheus: a collector for ``prometheus_client``.

    from prometheus_client import REGISTRY, start_http_server
    REGISTRY.register(EngineCollector(engine))
    start_http_server(9400)

The collector reads ``Engine.stats`` when Prometheus asks, and nothing in between. A closed engine has no metrics. The
how-to page "Monitoring" lists them, and ``docs/monitoring/dashboard.json`` is a dashboard for Grafana.
"""

from __future__ import annotations

import threading
from collections import Counter
from typing import TYPE_CHECKING, Any

from prometheus_client.core import CounterMetricFamily as Count
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import HistogramMetricFamily as Histogram
from prometheus_client.registry import Collector

from llm_datadist.native import Closed

if TYPE_CHECKING:
    from collections.abc import Iterator

    from prometheus_client import Metric

    from llm_datadist.native import Engine
    from llm_datadist.stats import EngineStats, OpStats

__all__ = ["EngineCollector"]

# Powers of two of nanoseconds that bound the buckets of the histogram: 1 us to 69 s.
_FIRST, _LAST, _STEP = 10, 36, 2
_NANOS = 1e9


class EngineCollector(Collector):
    """Makes the counters of engines available to a registry of ``prometheus_client``.

    Args:
        engines: the engines, which should have different names. The label ``engine`` of every metric has the name.
    """

    def __init__(self, *engines: Engine) -> None:
        self._engines = [(engine, _Growing()) for engine in engines]

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of this moment."""
        found = _Families()
        for engine, growing in self._engines:
            try:
                peers = engine.peers
                stats = engine.stats()
                peers += engine.peers  # a link may have ended or begun in between
            except Closed:
                continue
            names = {peer.incarnation: peer.name for peer in peers}
            of = {"engine": stats["engine"]}
            _calls(found, of, stats)
            _pools(found, of, stats)
            _tables(found, of, stats)
            _links(found, of, stats, names, growing)
            _ucx(found, of, stats)
        yield from found.families.values()


class _Families:
    """Metrics by name, each with the samples of all engines."""

    def __init__(self) -> None:
        self.families: dict[str, Any] = {}

    def add(self, kind: Any, name: str, text: str, labels: dict[str, str], *value: Any) -> None:
        """Add a sample to a metric, and the metric if it is the first one."""
        if name not in self.families:
            self.families[name] = kind(f"llm_datadist_{name}", text, labels=list(labels))
        self.families[name].add_metric(list(labels.values()), *value)


def _calls(found: _Families, engine: dict[str, str], stats: EngineStats) -> None:
    for op, counted in stats["ops"].items():
        of = {**engine, "op": op}
        seconds = (_buckets(counted), counted["total_nanos"] / _NANOS)
        found.add(Histogram, "call_seconds", "Duration of the calls of a kind.", of, *seconds)
        found.add(Count, "call_failures", "Calls of a kind that failed.", of, counted["failures"])
        found.add(Count, "moved_bytes", "Bytes moved by calls that succeeded.", of, counted["bytes"])


def _buckets(counted: OpStats) -> list[tuple[str, float]]:
    """Return cumulative counts by upper bound in seconds."""
    counts = counted["buckets"]
    bounds = range(_FIRST, _LAST + 1, _STEP)
    # Entry i counts calls of less than 2**i nanoseconds.
    cumulative = [(str(2**bound / _NANOS), float(sum(counts[: bound + 1]))) for bound in bounds]
    return [*cumulative, ("+Inf", float(sum(counts)))]


_POOLS: dict[str, tuple[str, Any]] = {
    "capacity_bytes": ("Bytes that can be allocated.", Gauge),
    "used_bytes": ("Allocated bytes.", Gauge),
    "peak_used_bytes": ("Largest number of allocated bytes so far.", Gauge),
    "largest_free_run_bytes": ("Bytes of the largest request that would succeed now.", Gauge),
    "released_bytes": ("Bytes of released caches that are still in use.", Gauge),
    "failures": ("Requests refused for lack of free pages.", Count),
}


def _pools(found: _Families, engine: dict[str, str], stats: EngineStats) -> None:
    for pool, counted in stats["pools"].items():
        for name, (text, kind) in _POOLS.items():
            found.add(kind, f"pool_{name}", text, {**engine, "pool": pool}, counted[name])  # type: ignore[literal-required]


def _tables(found: _Families, engine: dict[str, str], stats: EngineStats) -> None:
    found.add(Gauge, "caches", "Caches.", engine, stats["table"]["caches"])
    found.add(Gauge, "keys", "Keys that are bound to a cache.", engine, stats["table"]["keys"])
    verify = stats["verify"]
    found.add(Count, "verified_blocks", "Blocks that were compared.", engine, verify["blocks"])
    found.add(Count, "mismatched_blocks", "Blocks that differed.", engine, verify["mismatches"])


def _ucx(found: _Families, engine: dict[str, str], stats: EngineStats) -> None:
    ucx = stats["ucx"]
    if ucx["version"] is not None:
        found.add(Count, "ucx_reads", "Reads by UCX that succeeded.", engine, ucx["reads"])
        found.add(Count, "ucx_failures", "Reads by UCX that failed or were given up.", engine, ucx["failures"])
        text = "Connections of UCX that were closed by force, to end a read."
        found.add(Count, "ucx_forced_closes", text, engine, ucx["forced_closes"])
        found.add(Count, "ucx_renewals", "Workers of UCX that were replaced.", engine, ucx["renewals"])


class _Growing:
    """Keeps sums over the links to the peers of a name from falling when one of these links ends.

    Prometheus takes a counter that falls for one that began again at 0, and would count the other links twice.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._last: dict[tuple[str, str], int] = {}
        self._ended: dict[tuple[str, str], int] = {}

    def grown(self, sums: dict[tuple[str, str], int], peers: set[str]) -> dict[tuple[str, str], int]:
        """Return sums by peer and path, each with what has ended while the peer was listed.

        Args:
            sums: the sums of the current links.
            peers: the peers with a link. The others are forgotten, so they begin again at 0.
        """
        with self._lock:
            last = {key: sum_ for key, sum_ in self._last.items() if key[0] in peers}
            self._last = {key: sums.get(key, 0) for key in {**last, **sums}}
            ended = {key: self._ended.get(key, 0) + max(last.get(key, 0) - now, 0) for key, now in self._last.items()}
            self._ended = ended
            return {key: now + ended[key] for key, now in self._last.items()}


def _links(
    found: _Families, engine: dict[str, str], stats: EngineStats, names: dict[int, str], growing: _Growing
) -> None:
    """Add the metrics of the links. Peers may have equal names, so values with equal labels are combined."""
    kinds: Counter[tuple[str, ...]] = Counter()
    silence: dict[str, float] = {}
    moved: Counter[tuple[str, str]] = Counter()
    for link in stats["links"]:
        peer = names.get(link["cluster"], f"cluster {link['cluster']}")
        kinds[peer, link["transport"], link["pools"], link["registered"]] += 1
        silence[peer] = max(silence.get(peer, 0.0), link["silent_ms"] / 1000)
        for path, carried in link["paths"].items():
            moved[peer, path] += carried["bytes"]
    for key, number in kinds.items():
        of = dict(zip(("peer", "transport", "pools", "registered"), key))
        found.add(Gauge, "link", "Current links, by how bytes travel.", {**engine, **of}, number)
    for peer, seconds in silence.items():
        text = "Time since the peer's last control message, of its most silent link."
        found.add(Gauge, "link_silent_seconds", text, {**engine, "peer": peer}, seconds)
    for (peer, path), sum_ in growing.grown(moved, set(silence)).items():
        text = "Bytes of pulls and pushes over the links to a peer since it was linked, by path."
        found.add(Count, "link_moved_bytes", text, {**engine, "peer": peer, "path": path}, sum_)
