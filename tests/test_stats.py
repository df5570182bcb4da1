"""`stats()`: every field of a real result is documented and typed, and the numbers of one kind of call are consistent.

Not for: the page of the documentation (`tools/docs/stats.py`).
"""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any, get_args, get_origin, get_type_hints

from llm_datadist import Engine, Keeper, Store
from llm_datadist.native import KeeperObserver
from llm_datadist.stats import (
    EngineStats,
    FabricStats,
    KeeperStats,
    LinkStats,
    OpStats,
    PathStats,
    PoolStats,
    Stats,
    StoredChange,
    StoredChanges,
    StoredNamespace,
    StoredValue,
    StoreStats,
    SwapInStats,
    TableStats,
    VerifyStats,
)

if TYPE_CHECKING:
    from pathlib import Path

    from llm_datadist import LLMDataDist

CLASSES = [
    *(EngineStats, Stats, PoolStats, TableStats, OpStats, SwapInStats, VerifyStats, FabricStats, LinkStats, PathStats)
]
KEEPER_CLASSES = [StoreStats, KeeperStats, StoredNamespace, StoredValue, StoredChanges, StoredChange]
LIMIT = 60.0


def compare(value: Any, kind: Any, where: str, seen: set[str]) -> None:
    """Check that `value` has the type `kind`, field by field."""
    if kind in CLASSES + KEEPER_CLASSES:
        assert sorted(value) == sorted(kind.__annotations__), where
        seen.add(kind.__name__)
        for name, of in get_type_hints(kind).items():
            compare(value[name], of, f"{where}.{name}", seen)
    elif get_origin(kind) is dict:
        assert isinstance(value, dict), where
        for name, item in value.items():
            assert isinstance(name, str), where
            compare(item, get_args(kind)[1], f"{where}[{name!r}]", seen)
    elif get_origin(kind) is list:
        assert isinstance(value, list), where
        for item in value:
            compare(item, get_args(kind)[0], f"{where}[]", seen)
    elif value is not None and get_args(kind)[:1] == (KeeperStats,):  # `Optional`
        compare(value, KeeperStats, where, seen)
    else:
        allowed = get_args(kind) or (kind,)
        assert type(value) in allowed, f"{where}: {value!r} is no {kind}"


def test_every_field_of_a_real_answer_is_documented_and_no_other() -> None:
    seen: set[str] = set()
    pools = {"pool": "1MiB", "host_pool": "1MiB"}
    with Engine(name="local", **pools) as local, Engine(listen="127.0.0.1:0", **pools) as remote:
        local.link(str(remote.address)).result(LIMIT)
        stats = local.stats()
    compare(stats, EngineStats, "stats", seen)
    assert stats["engine"] == "local"
    assert set(stats["pools"]) == {"device", "host"}
    assert len(stats["links"]) == 1
    told = re.findall(r"``(\w+)``", inspect.getsource(Stats).split("Calls by kind")[1].split(".")[0])
    assert list(stats["ops"]) == told
    assert seen == {kind.__name__ for kind in CLASSES} - {"Stats"}


def test_the_original_api_has_the_same_fields(dist: LLMDataDist) -> None:
    compare(dist.stats(), Stats, "stats", set())


def test_every_field_of_a_store_and_a_keeper_is_documented_and_no_other(tmp_path: Path) -> None:
    seen: set[str] = set()
    socket = tmp_path / "keeper"
    with Keeper(memory="1MiB", socket=socket) as keeper, Store(socket, namespace="a model") as store:
        observer = KeeperObserver(socket)
        assert observer.changes() == {"changes": [], "missed": 0}
        store.put([bytes(28)], [bytes(65536)])
        compare(store.stats(), StoreStats, "stats", seen)
        with observer:
            compare(observer.changes(), StoredChanges, "changes", seen)
            for listed, kind in ((observer.namespaces(), StoredNamespace), (observer.values(), StoredValue)):
                compare(listed, list[kind], "listed", seen)  # type: ignore[valid-type]
        keeper.close()
        compare(store.stats(), StoreStats, "stats", seen)
    assert seen == {kind.__name__ for kind in KEEPER_CLASSES}


def test_percentiles_are_never_above_the_longest_call() -> None:
    with Engine(pool="1MiB") as engine:
        cache = engine.allocate("kv", blocks=4, tensors=2, shape=(256,), dtype="uint8")
        for _ in range(200):
            engine.copy(cache[1], cache[0]).result(LIMIT)
        ops = engine.stats()["ops"]
    assert {"allocate", "copy_blocks"} <= {name for name, op in ops.items() if op["calls"]}
    for name, op in ops.items():
        assert op["p50_nanos"] <= op["p99_nanos"] <= op["max_nanos"] <= op["total_nanos"], name
        assert len(op["buckets"]) == 40
        assert sum(op["buckets"]) == op["calls"], name
        if op["calls"]:
            # The longest call is in the last bucket that is not empty.
            last = max(at for at, count in enumerate(op["buckets"]) if count)
            assert op["max_nanos"].bit_length() == last, name
    # With one call, each percentile is the time of that call.
    assert ops["allocate"]["p50_nanos"] == ops["allocate"]["max_nanos"]
