"""The counters of engines, stores and keepers for Prometheus: collectors for ``prometheus_client``.

    from prometheus_client import REGISTRY, start_http_server
    REGISTRY.register(EngineCollector(engine))
    start_http_server(9400)

The collectors read ``Engine.stats``, ``Store.stats`` or the counters of a keeper when Prometheus asks, and nothing in
between. `StoreCollector` asks no keeper, so it does not wait for one. What is closed has no metrics. The how-to page
"Monitoring" lists them, and ``docs/monitoring/dashboard.json`` is a dashboard for Grafana.
"""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING, Any, Callable

from prometheus_client.core import CounterMetricFamily as Count
from prometheus_client.core import GaugeMetricFamily as Gauge
from prometheus_client.core import HistogramMetricFamily as Histogram
from prometheus_client.registry import Collector

from llm_datadist.native import Closed, Error, KeeperObserver, PeerLost, Timeout

if TYPE_CHECKING:
    from collections.abc import Iterator
    from os import PathLike

    from prometheus_client import Metric

    from llm_datadist.native import Engine, Store
    from llm_datadist.stats import EngineStats, KeeperStats, OpStats

__all__ = ["EngineCollector", "KeeperCollector", "StoreCollector"]

# Powers of two of nanoseconds that bound the buckets of the histogram: 1 us to 69 s.
_FIRST, _LAST, _STEP = 10, 36, 2
_NANOS = 1e9
_KEEPER_SECONDS = 1.0
"""How long `KeeperCollector` waits for a keeper."""


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


class StoreCollector(Collector):
    """Makes the counters of stores available to a registry of ``prometheus_client``.

    Args:
        stores: the stores by a name, such as that of the model. The label ``store`` of every metric has the name.

    Raises:
        TypeError: ``stores`` is not a mapping, such as a ``dict``.
    """

    def __init__(self, stores: Mapping[str, Store]) -> None:
        if not isinstance(stores, Mapping):
            raise TypeError(f"stores must be a mapping of names to stores, not {type(stores).__name__!r}")
        self._stores = dict(stores)

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of this moment."""
        found = _Families()
        for name, store in self._stores.items():
            try:
                # A question without an answer would end the connection to the keeper, and make every key a miss.
                stats = store.stats(keeper=False)
            except Closed:
                continue
            found.add_all("store", _STORE, {"store": name}, stats)
            for label, rows in _STORE_REASONS.items():
                metric, text, counts = rows
                for reason, field in counts.items():
                    found.add(Count, f"store_{metric}", text, {"store": name, label: reason}, stats[field])  # type: ignore[literal-required]
        yield from found.families.values()


class KeeperCollector(Collector):
    """Makes the counters of keepers of this host available to a registry of ``prometheus_client``.

    It is a `KeeperObserver` while Prometheus asks. A keeper has at most 8 observers, and refuses further ones.

    Args:
        sockets: the paths at which they listen. The label ``keeper`` of every metric has the path.
        token_file: path of a file with a token of the keepers, which needs the role ``read``. ``None``: the keepers are
            those of this user.
        keeper_user: number of the user whose keepers are meant. ``None``: this user.
    """

    def __init__(
        self,
        *sockets: str | PathLike[str],
        token_file: str | PathLike[str] | None = None,
        keeper_user: int | None = None,
    ) -> None:
        self._sockets = sockets
        self._observer = partial(
            KeeperObserver, timeout=_KEEPER_SECONDS, token_file=token_file, keeper_user=keeper_user
        )

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of this moment. Without counters, these are ``keeper_up`` and ``keeper_down`` alone."""
        found = _Families()
        for socket in self._sockets:
            of = {"keeper": str(socket)}
            counted = _counted(partial(self._observer, socket))
            up = not isinstance(counted, str)
            found.add(Gauge, "keeper_up", "Whether the keeper has given its counters.", of, int(up))
            for reason in _DOWN:
                text = "Whether the keeper has not given its counters, by reason."
                found.add(Gauge, "keeper_down", text, {**of, "reason": reason}, int(counted == reason))
            if not isinstance(counted, str):
                found.add_all("keeper", _KEEPER, of, counted)
        yield from found.families.values()


_DOWN = ("away", "timeout", "refused")
"""Why a keeper gives no counters: none listens, it does not answer in time, or it or the system refuses."""


def _counted(observer: Callable[[], KeeperObserver]) -> KeeperStats | str:
    """Return the counters of a keeper, or why it gives none."""
    try:
        with observer() as opened:
            return opened.stats()
    except PeerLost:
        return "away"
    except Timeout:
        return "timeout"
    except Error:
        return "refused"


class _Families:
    """Metrics by name, each with the samples of all engines."""

    def __init__(self) -> None:
        self.families: dict[str, Any] = {}

    def add(self, kind: Any, name: str, text: str, labels: dict[str, str], *value: Any) -> None:
        """Add a sample to a metric, and the metric if it is the first one."""
        if name not in self.families:
            self.families[name] = kind(f"llm_datadist_{name}", text, labels=list(labels))
        self.families[name].add_metric(list(labels.values()), *value)

    def add_all(self, prefix: str, rows: _Rows, labels: dict[str, str], stats: Mapping[str, Any]) -> None:
        """Add a sample to the metric of each row. Prometheus counts time in seconds."""
        for field, (kind, text) in rows.items():
            seconds = field.endswith("_nanos")
            name = f"{prefix}_{field.replace('_nanos', '_seconds')}"
            self.add(kind, name, text, labels, stats[field] / _NANOS if seconds else stats[field])


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


_Rows = dict[str, tuple[Any, str]]
"""The kind and the meaning of the metrics of counters, by field."""

_STORE: _Rows = {
    "hits": (Count, "Values that get has copied or a view has confirmed."),
    "hit_bytes": (Count, "Bytes of these values."),
    "gets": (Count, "Calls of get."),
    "get_nanos": (Count, "Total time of these calls."),
    "put_bytes": (Count, "Bytes of values that the keeper has copied."),
    "puts": (Count, "Calls of put."),
    "put_nanos": (Count, "Total time of these calls."),
    "attached": (Count, "How often the store has attached to a keeper."),
}

_STORE_REASONS: dict[str, tuple[str, str, dict[str, str]]] = {
    "reason": (
        "misses",
        "Keys of get and of views without a value.",
        {
            "absent": "misses_absent",
            "changed": "misses_changed",
            "corrupt": "misses_corrupt",
            "away": "misses_away",
        },
    ),
    "result": (
        "put_values",
        "Values of put, by what became of them.",
        {"stored": "puts_stored", "present": "puts_present", "no_room": "puts_no_room", "away": "puts_away"},
    ),
}
"""Metrics with a label: the name of the metric, its meaning, and the counter of each value of the label."""

_KEEPER: _Rows = {
    "slots": (Gauge, "Slots of the memory."),
    "slot_bytes": (Gauge, "Bytes of a slot."),
    "values": (Gauge, "Values that it has."),
    "leased": (Gauge, "Values that leases hold."),
    "clients": (Gauge, "Stores that are attached."),
    "observers": (Gauge, "Connections of observers, with that of the collector."),
    "namespaces": (Gauge, "Namespaces that it knows."),
    "stored": (Count, "Values that it has copied."),
    "stored_bytes": (Count, "Bytes of these values."),
    "present": (Count, "Values that it did not copy, because their keys had one."),
    "no_room": (Count, "Values that it had no room for."),
    "evicted": (Count, "Values that were replaced because all slots were in use."),
    "dropped": (Count, "Values that stores have dropped."),
    "corrupt": (Count, "Values that it has dropped because their bytes did not have their checksum."),
    "wrong_reports": (Count, "Values that were reported as wrong and match their checksums."),
    "touched": (Count, "Values that stores have read or put again."),
    "leases": (Count, "Leases that it has granted or renewed."),
    "leases_refused": (Count, "Keys that were not leased."),
    "puts": (Count, "Requests to copy values."),
    "put_nanos": (Count, "Total time of these requests."),
    "refused": (Count, "Clients that it has refused: what they sent, a limit, or the system."),
    "forbidden": (Count, "Requests that the role of a client does not allow."),
}

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
