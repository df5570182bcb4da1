"""The collectors for Prometheus have the values of `stats()`, and the dashboard for Grafana has names that exist."""

from __future__ import annotations

import json
import re
from contextlib import ExitStack
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Callable

import pytest
from prometheus_client import CollectorRegistry, generate_latest

from keeper_process import serving, stopped
from llm_datadist import Engine, Keeper, Store
from llm_datadist.integrations.prometheus import EngineCollector, KeeperCollector, StoreCollector
from llm_datadist.native import KeeperObserver
from peers import LIMIT, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

DASHBOARD = Path(__file__).parents[1] / "docs" / "monitoring" / "dashboard.json"
# Names of `integrations/vllm/metrics.py`. Prometheus adds the endings.
VLLM = {
    "vllm:llm_datadist_receive_seconds": "histogram",
    "vllm:llm_datadist_transfer_seconds": "histogram",
    "vllm:llm_datadist_receive_bytes": "histogram",
    "vllm:llm_datadist_receive_blocks": "histogram",
    "vllm:llm_datadist_failed_receives": "counter",
    "vllm:llm_datadist_expired_leases": "counter",
    "vllm:llm_datadist_model_thread_seconds": "counter",
}


Open = Callable[..., Engine]
IDLE = {"transport": "shm", "pools": "stream", "registered": "stream", "silent_ms": 1}


@pytest.fixture
def start() -> Iterator[Open]:
    """A function that opens an engine with a cache, of which a block was copied twice."""
    with ExitStack() as held:

        def begin(name: str = "local", **given: Any) -> Engine:
            engine = held.enter_context(Engine(pool="16MiB", host_pool="16MiB", name=name, **given))
            cache = engine.allocate("kv", blocks=8, tensors=2, shape=(4096,), dtype="uint8")
            engine.copy(cache[[1, 2]], cache[[0, 0]]).result(LIMIT)
            return engine

        yield begin


def linked(start: Open, *names: str) -> Engine:
    """Return an engine `local` that is linked with one engine for each name."""
    local = start()
    for name in names:
        local.link(str(start(name, listen="127.0.0.1:0").address)).result(LIMIT)
    return local


def registry_of(*collectors: Any) -> CollectorRegistry:
    registry = CollectorRegistry()
    for collector in collectors:
        registry.register(collector)
    return registry


def reporting(engine: Engine, **changes: Any) -> Any:
    """Return a stand-in for an engine, whose counters are those of `engine` with some changed."""
    return SimpleNamespace(peers=engine.peers, stats=lambda: {**engine.stats(), **changes})


def test_the_values_are_those_of_stats(start: Open) -> None:
    engine = start()
    value = registry_of(EngineCollector(engine)).get_sample_value
    stats = engine.stats()
    for op, counted in stats["ops"].items():
        labels = {"engine": "local", "op": op}
        assert value("llm_datadist_call_seconds_count", labels) == counted["calls"]
        assert value("llm_datadist_call_seconds_sum", labels) == counted["total_nanos"] / 1e9
        assert value("llm_datadist_call_failures_total", labels) == counted["failures"]
        assert value("llm_datadist_moved_bytes_total", labels) == counted["bytes"]
        for power in range(10, 37, 2):
            shorter = sum(count for index, count in enumerate(counted["buckets"]) if index <= power)
            bound = str(2**power / 1e9)
            assert value("llm_datadist_call_seconds_bucket", {**labels, "le": bound}) == shorter
    assert stats["ops"]["copy_blocks"]["calls"] == 1
    for pool, state in stats["pools"].items():
        labels = {"engine": "local", "pool": pool}
        assert value("llm_datadist_pool_used_bytes", labels) == state["used_bytes"]
        assert value("llm_datadist_pool_failures_total", labels) == state["failures"]
    assert value("llm_datadist_caches", {"engine": "local"}) == 1


def test_several_engines_are_told_apart_by_name(start: Open) -> None:
    one, two = start("one"), start("two")
    registry = registry_of(EngineCollector(one, two))
    two.allocate("more", blocks=1, tensors=1, shape=(), dtype="uint8")
    lines = generate_latest(registry).decode().splitlines()
    assert len([line for line in lines if line.startswith("# TYPE llm_datadist_caches ")]) == 1
    values = [registry.get_sample_value("llm_datadist_caches", {"engine": name}) for name in ("one", "two")]
    assert values == [1, 2]
    two.close()
    values = [registry.get_sample_value("llm_datadist_caches", {"engine": name}) for name in ("one", "two")]
    assert values == [1, None]


def test_links_have_the_names_of_their_peers(start: Open) -> None:
    text = generate_latest(registry_of(EngineCollector(linked(start, "prefill")))).decode()
    assert re.search(r'^llm_datadist_link\{engine="local",.*peer="prefill",.*\} 1.0$', text, re.MULTILINE)
    assert 'llm_datadist_link_silent_seconds{engine="local",peer="prefill"}' in text
    moved = r'^llm_datadist_link_moved_bytes_total\{engine="local",path="(\w+)",peer="prefill"\} \d'
    assert sorted(re.findall(moved, text, re.MULTILINE)) == ["fabric", "mapped", "process", "rings", "sockets"]


def test_two_peers_of_one_name_are_one_series_each(start: Open) -> None:
    """Prometheus drops series with equal labels, so the links to peers of one name are combined."""
    local = linked(start, "prefill", "prefill")
    links = local.stats()["links"]
    assert {link["cluster"] for link in links} == {peer.incarnation for peer in local.peers}
    assert len(links) == 2
    families = list(EngineCollector(local).collect())
    series = [(sample.name, *sample.labels.items()) for family in families for sample in family.samples]
    assert len(series) == len(set(series))
    ages = iter([2500, 700])
    counted = [{**link, "silent_ms": next(ages), "paths": {"rings": {"transfers": 1, "bytes": 30}}} for link in links]
    value = registry_of(EngineCollector(reporting(local, links=counted))).get_sample_value
    peer = {"engine": "local", "peer": "prefill"}
    kind = {name: str(links[0][name]) for name in ("transport", "pools", "registered")}  # type: ignore[literal-required]
    assert value("llm_datadist_link", {**peer, **kind}) == 2
    assert value("llm_datadist_link_silent_seconds", peer) == 2.5
    assert value("llm_datadist_link_moved_bytes_total", {**peer, "path": "rings"}) == 60


def test_a_link_of_a_cluster_has_the_name_of_its_peer(start: Open) -> None:
    """As an engine that a `LLMDataDist` opened: its links are counted by cluster id."""
    links = [{**IDLE, "cluster": 7, "paths": {}}]
    value = registry_of(EngineCollector(reporting(start(), links=links))).get_sample_value
    assert value("llm_datadist_link_silent_seconds", {"engine": "local", "peer": "cluster 7"}) == 0.001


def test_a_counter_does_not_fall_when_one_of_two_links_ends(start: Open) -> None:
    """`rate()` takes a counter that falls for a new one, and would count the other link twice."""
    links: list[dict[str, Any]] = []
    registry = registry_of(EngineCollector(reporting(start(), links=links)))

    def moved(*given: tuple[int, dict[str, int]]) -> list[float | None]:
        """Return the counters of peer 2, rings and sockets, for links with a peer and the bytes of each path."""
        links[:] = [
            {**IDLE, "cluster": peer, "paths": {path: {"bytes": moved} for path, moved in paths.items()}}
            for peer, paths in given
        ]
        samples = {
            (sample.labels["peer"], sample.labels["path"]): sample.value
            for family in registry.collect()
            for sample in family.samples
            if sample.name == "llm_datadist_link_moved_bytes_total"
        }
        return [samples.get(("cluster 2", path)) for path in ("rings", "sockets")]

    assert moved((2, {"rings": 30}), (2, {"rings": 100, "sockets": 5})) == [130, 5]
    assert moved((2, {"rings": 30}), (3, {"rings": 7})) == [130, 5]
    assert moved((2, {"rings": 50})) == [150, 5]
    assert moved((2, {"rings": 50}), (2, {"sockets": 1})) == [150, 6]
    assert moved((3, {"rings": 8})) == [None, None]
    assert moved((2, {"rings": 4})) == [4, None]


def test_ucx_has_metrics_if_it_is_used(start: Open) -> None:
    engine = start()
    ucx = engine.stats()["ucx"]
    assert not any("ucx" in family.name for family in EngineCollector(engine).collect())
    used = {**ucx, "version": "1.22.0", "forced_closes": 7}
    value = registry_of(EngineCollector(reporting(engine, ucx=used))).get_sample_value
    assert value("llm_datadist_ucx_forced_closes_total", {"engine": "local"}) == 7
    for name in ("reads", "failures", "renewals"):
        assert value(f"llm_datadist_ucx_{name}_total", {"engine": "local"}) == ucx[name]  # type: ignore[literal-required]


def test_a_closed_engine_has_no_metrics(start: Open) -> None:
    engine = start()
    registry = registry_of(EngineCollector(engine))
    engine.close()
    assert generate_latest(registry) == b""


def stored(folder: Path) -> tuple[Keeper, Store]:
    """Return a keeper, and a store that has put two values and looked for three."""
    keeper = Keeper(memory="1MiB", socket=folder / "keeper", value=64)
    store = Store(folder / "keeper", namespace="a model", value=64)
    keys = [bytes([number]) * 28 for number in range(3)]
    assert store.put([*keys[:2], keys[0]], [bytes(64)] * 3) == [True] * 3
    assert store.get(keys, [bytearray(64) for _ in keys]) == [True, True, False]
    return keeper, store


def down(registry: CollectorRegistry, socket: Path) -> list[str]:
    """Return why the keeper has given no counters."""
    samples = [
        one for family in registry.collect() for one in family.samples if one.labels.get("keeper") == str(socket)
    ]
    flags = {one.labels["reason"]: one.value for one in samples if one.name == "llm_datadist_keeper_down"}
    assert sorted(flags) == ["away", "refused", "timeout"]
    assert set(flags.values()) <= {0, 1}
    reasons = [reason for reason, flag in flags.items() if flag]
    up = [one.value for one in samples if one.name == "llm_datadist_keeper_up"]
    assert (up, len(reasons)) in (([1], 0), ([0], 1))
    return reasons


def test_stores_and_keepers_have_the_values_of_stats(tmp_path: Path) -> None:
    keeper, store = stored(tmp_path)
    registry = registry_of(StoreCollector({"small": store}), KeeperCollector(tmp_path / "keeper", tmp_path / "nobody"))
    value = registry.get_sample_value
    stats = store.stats()
    of, at = {"store": "small"}, {"keeper": str(tmp_path / "keeper")}
    assert value("llm_datadist_store_hits_total", of) == stats["hits"] == 2
    assert value("llm_datadist_store_hit_bytes_total", of) == 128
    assert value("llm_datadist_store_get_seconds_total", of) == stats["get_nanos"] / 1e9 > 0
    misses = {reason: value("llm_datadist_store_misses_total", {**of, "reason": reason}) for reason in REASONS}
    assert misses == {"absent": 1, "changed": 0, "corrupt": 0, "away": 0}
    results = {result: value("llm_datadist_store_put_values_total", {**of, "result": result}) for result in RESULTS}
    assert results == {"stored": 2, "present": 1, "no_room": 0, "away": 0}
    counted = stats["keeper"]
    assert counted is not None
    assert value("llm_datadist_keeper_observers", at) == 1, "the collector itself"
    for name in ("slots", "values", "clients", "namespaces", "leased"):
        assert value(f"llm_datadist_keeper_{name}", at) == counted[name]  # type: ignore[literal-required]
    for name in ("stored", "stored_bytes", "present", "evicted", "puts"):
        assert value(f"llm_datadist_keeper_{name}_total", at) == counted[name]  # type: ignore[literal-required]
    assert value("llm_datadist_keeper_up", at) == 1
    assert down(registry, tmp_path / "keeper") == []
    assert down(registry, tmp_path / "nobody") == ["away"]
    keeper.close()
    assert down(registry, tmp_path / "keeper") == ["away"]
    assert value("llm_datadist_keeper_slots", at) is None
    store.close()
    assert value("llm_datadist_store_hits_total", of) is None


def test_a_store_without_a_name_is_refused(tmp_path: Path) -> None:
    keeper, store = stored(tmp_path)
    with keeper, store, pytest.raises(TypeError, match="stores must be a mapping of names to stores, not 'Store'"):
        StoreCollector(store)  # type: ignore[arg-type]


def test_a_keeper_that_refuses_is_not_away(tmp_path: Path) -> None:
    keeper, store = stored(tmp_path)
    registry = registry_of(KeeperCollector(tmp_path / "keeper"))
    with keeper, store:
        with ExitStack() as observers:
            for _ in range(8):
                observers.enter_context(KeeperObserver(tmp_path / "keeper"))
            assert down(registry, tmp_path / "keeper") == ["refused"]
        assert (store.stats()["keeper"] or {})["refused"] == 1
        eventually(lambda: down(registry, tmp_path / "keeper") == [], what="the end of the others")


def test_a_keeper_that_hangs_costs_no_hits(tmp_path: Path) -> None:
    socket = tmp_path / "keeper"
    with serving(socket) as keeper, Store(socket, namespace="a model", value=1024, timeout=LIMIT) as store:
        assert store.put([bytes(28)], [bytes(1024)]) == [True]
        registry = registry_of(StoreCollector({"small": store}))
        with stopped(keeper):
            hits = "llm_datadist_store_hits_total"
            assert registry.get_sample_value(hits, {"store": "small"}) == 0
            assert store.get([bytes(28)], [bytearray(1024)]) == [True]
            assert registry.get_sample_value(hits, {"store": "small"}) == 1
            registry.register(KeeperCollector(socket))
            assert down(registry, socket) == ["timeout"]
            assert store.get([bytes(28)], [bytearray(1024)]) == [True]
            assert store.stats(keeper=False)["misses_away"] == 0


REASONS = ("absent", "changed", "corrupt", "away")
RESULTS = ("stored", "present", "no_room", "away")


def endings(kind: str) -> list[str]:
    return {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "gauge": [""]}[kind]


def test_the_dashboard_has_names_that_exist(start: Open, tmp_path: Path) -> None:
    keeper, store = stored(tmp_path)
    with keeper, store:
        collectors = (
            EngineCollector(linked(start, "prefill")),
            StoreCollector({"a model": store}),
            KeeperCollector(tmp_path / "keeper"),
        )
        kinds = {family.name: family.type for collector in collectors for family in collector.collect()}
    names = {name + end for name, kind in {**kinds, **VLLM}.items() for end in endings(kind)}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    used = {name for panel in panels for target in panel["targets"] for name in NAME.findall(target["expr"])}
    assert len(used) > 15
    assert used <= names
    unused = {name for name in {**kinds, **VLLM} if not any(one.startswith(name) for one in used)}
    assert unused == {
        "llm_datadist_caches",
        "llm_datadist_keeper_dropped",
        "llm_datadist_keeper_leases",
        "llm_datadist_keeper_leases_refused",
        "llm_datadist_keeper_namespaces",
        "llm_datadist_keeper_observers",
        "llm_datadist_keeper_present",
        "llm_datadist_keeper_slot_bytes",
        "llm_datadist_keeper_stored_bytes",
        "llm_datadist_keys",
        "llm_datadist_pool_failures",
        "llm_datadist_pool_peak_used_bytes",
        "llm_datadist_pool_released_bytes",
        "llm_datadist_store_attached",
        "vllm:llm_datadist_receive_blocks",
    }


NAME = re.compile(r"(?:vllm:)?llm_datadist_\w+")


def test_the_names_of_vllm_are_those_of_the_connector() -> None:
    source = Path(__file__).parents[1] / "python/llm_datadist/integrations/vllm/metrics.py"
    made = re.findall(r'make\((histogram|counter), "(\w+)"', source.read_text())
    assert {f"vllm:llm_datadist_{name}": kind for kind, name in made} == VLLM
