"""The collector for Prometheus has the values of `stats()`, and the dashboard for Grafana has names that exist."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, generate_latest

from llm_datadist import CacheDesc, DataType, LLMConfig, LLMDataDist, LLMRole
from llm_datadist.integrations.prometheus import EngineCollector
from peers import free_ports, one_server, options

if TYPE_CHECKING:
    from peers import End, Ends, Peer

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


def engine_with_a_cache() -> LLMDataDist:
    config = LLMConfig()
    config.enable_cache_manager = True
    config.mem_pool_cfg = config.host_mem_pool_cfg = '{"memory_size": "16MiB"}'
    engine = LLMDataDist(LLMRole.PROMPT, 1)
    engine.init(config.generate_options())
    cache = engine.cache_manager.allocate_blocks_cache(CacheDesc(2, [8, 4096], DataType.DT_INT8))
    engine.cache_manager.copy_blocks(cache, {0: [1, 2]})
    return engine


def test_the_values_are_those_of_stats() -> None:
    engine = engine_with_a_cache()
    registry = CollectorRegistry()
    registry.register(EngineCollector(engine))
    try:
        stats = engine.stats()
        value = registry.get_sample_value
        for op, counted in stats["ops"].items():
            labels = {"op": op}
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
            assert value("llm_datadist_pool_used_bytes", {"pool": pool}) == state["used_bytes"]
            assert value("llm_datadist_pool_failures_total", {"pool": pool}) == state["failures"]
        assert value("llm_datadist_caches") == 1
    finally:
        engine.finalize()


def test_links_are_named(served: tuple[End, Peer]) -> None:
    near, _ = served
    text = generate_latest(EngineCollector(near.dist)).decode()
    assert re.search(r'^llm_datadist_link\{cluster="2",.*\} 1.0$', text, re.MULTILINE)
    assert 'llm_datadist_link_silent_seconds{cluster="2"}' in text
    moved = re.findall(r'^llm_datadist_link_moved_bytes_total\{cluster="2",path="(\w+)"\} (\d)', text, re.MULTILINE)
    assert sorted(path for path, _ in moved) == ["fabric", "mapped", "process", "rings", "sockets"]


def test_two_links_to_one_cluster_are_one_series_each(ends: Ends) -> None:
    """Prometheus drops series with equal labels, so the links of a cluster are combined."""
    given = options(llm__RankPort=free_ports())
    far, near = ends.peer(given), ends.near(given)
    for name in ("one", "two"):  # each communicator has a link of its own
        comms = near.link(name, {1: 0, 2: 1}, one_server()), far.link(name, {1: 0, 2: 1}, one_server())
        assert near.settled(comms[0]) == far.settled(comms[1]) == "OK"
    links = near.dist.stats()["links"]
    assert [link["cluster"] for link in links] == [2, 2]
    families = list(EngineCollector(near.dist).collect())
    series = [(sample.name, *sample.labels.items()) for family in families for sample in family.samples]
    assert len(series) == len(set(series))
    registry = CollectorRegistry()
    ages = iter([2500, 700])
    counted = [{**link, "silent_ms": next(ages), "paths": {"rings": {"transfers": 1, "bytes": 30}}} for link in links]
    registry.register(EngineCollector(SimpleNamespace(stats=lambda: {**near.dist.stats(), "links": counted})))  # type: ignore[arg-type]
    kind = {name: str(links[0][name]) for name in ("cluster", "transport", "pools", "registered")}  # type: ignore[literal-required]
    assert registry.get_sample_value("llm_datadist_link", kind) == 2
    assert registry.get_sample_value("llm_datadist_link_silent_seconds", {"cluster": "2"}) == 2.5
    moved = {"cluster": "2", "path": "rings"}
    assert registry.get_sample_value("llm_datadist_link_moved_bytes_total", moved) == 60


def test_a_counter_does_not_fall_when_one_of_two_links_ends(dist: LLMDataDist) -> None:
    """`rate()` takes a counter that falls for a new one, and would count the other link twice."""
    stats = dist.stats()
    links: list[dict[str, object]] = []
    registry = CollectorRegistry()
    registry.register(EngineCollector(SimpleNamespace(stats=lambda: {**stats, "links": links})))  # type: ignore[arg-type]

    def moved(*given: tuple[int, dict[str, int]]) -> list[float | None]:
        """Return the counters of cluster 2, rings and sockets, for links with a cluster and the bytes of each path."""
        kind = {"transport": "shm", "pools": "stream", "registered": "stream", "silent_ms": 1}
        links[:] = [
            {"cluster": cluster, **kind, "paths": {path: {"bytes": moved} for path, moved in paths.items()}}
            for cluster, paths in given
        ]
        samples = {
            (sample.labels["cluster"], sample.labels["path"]): sample.value
            for family in registry.collect()
            for sample in family.samples
            if sample.name == "llm_datadist_link_moved_bytes_total"
        }
        return [samples.get(("2", path)) for path in ("rings", "sockets")]

    assert moved((2, {"rings": 30}), (2, {"rings": 100, "sockets": 5})) == [130, 5]
    assert moved((2, {"rings": 30}), (3, {"rings": 7})) == [130, 5]
    assert moved((2, {"rings": 50})) == [150, 5]
    assert moved((2, {"rings": 50}), (2, {"sockets": 1})) == [150, 6]
    assert moved((3, {"rings": 8})) == [None, None]
    assert moved((2, {"rings": 4})) == [4, None]


def test_ucx_has_metrics_if_it_is_used(served: tuple[End, Peer]) -> None:
    near, _ = served
    stats = near.dist.stats()
    assert not any("ucx" in family.name for family in EngineCollector(near.dist).collect())
    state = {**stats["ucx"], "version": "1.22.0", "forced_closes": 7}
    used = SimpleNamespace(stats=lambda: {**stats, "ucx": state})
    registry = CollectorRegistry()
    registry.register(EngineCollector(used))  # type: ignore[arg-type]
    assert registry.get_sample_value("llm_datadist_ucx_forced_closes_total") == 7
    for name in ("reads", "failures", "renewals"):
        assert registry.get_sample_value(f"llm_datadist_ucx_{name}_total") == stats["ucx"][name]  # type: ignore[literal-required]


def test_an_engine_that_is_not_open_has_no_metrics() -> None:
    registry = CollectorRegistry()
    registry.register(EngineCollector(LLMDataDist(LLMRole.PROMPT, 1)))
    assert generate_latest(registry) == b""


def endings(kind: str) -> list[str]:
    return {"counter": ["_total"], "histogram": ["_bucket", "_sum", "_count"], "gauge": [""]}[kind]


def test_the_dashboard_has_names_that_exist() -> None:
    engine = engine_with_a_cache()
    try:
        kinds = {family.name: family.type for family in EngineCollector(engine).collect()}
    finally:
        engine.finalize()
    names = {name + end for name, kind in {**kinds, **VLLM}.items() for end in endings(kind)}
    panels = json.loads(DASHBOARD.read_text())["panels"]
    used = {name for panel in panels for target in panel["targets"] for name in NAME.findall(target["expr"])}
    assert len(used) > 15
    assert used <= names
    unused = {name for name in {**kinds, **VLLM} if not any(one.startswith(name) for one in used)}
    assert unused == {
        "llm_datadist_caches",
        "llm_datadist_keys",
        "llm_datadist_pool_failures",
        "llm_datadist_pool_peak_used_bytes",
        "llm_datadist_pool_released_bytes",
        "vllm:llm_datadist_receive_blocks",
    }


NAME = re.compile(r"(?:vllm:)?llm_datadist_\w+")


def test_the_names_of_vllm_are_those_of_the_connector() -> None:
    source = Path(__file__).parents[1] / "python/llm_datadist/integrations/vllm/metrics.py"
    made = re.findall(r'make\((histogram|counter), "(\w+)"', source.read_text())
    assert {f"vllm:llm_datadist_{name}": kind for kind, name in made} == VLLM
