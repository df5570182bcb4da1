"""`stats()`: every field of a real result is documented and typed, and the numbers of one kind of call are consistent.

Not for: the page of the documentation (`tools/docs/stats.py`).
"""

from __future__ import annotations

import inspect
import re
from typing import TYPE_CHECKING, Any, Callable, get_args, get_origin, get_type_hints

from llm_datadist.stats import (
    FabricStats,
    LinkStats,
    OpStats,
    PathStats,
    PoolStats,
    Stats,
    SwapInStats,
    TableStats,
    VerifyStats,
)
from memory import desc
from peers import Ends

if TYPE_CHECKING:
    from llm_datadist import LLMDataDist

CLASSES = [Stats, PoolStats, TableStats, OpStats, SwapInStats, VerifyStats, FabricStats, LinkStats, PathStats]


def compare(value: Any, kind: Any, place: str, seen: set[str]) -> None:
    """Check that `value` has the type `kind`, field by field."""
    if kind in CLASSES:
        assert sorted(value) == sorted(kind.__annotations__), place
        seen.add(kind.__name__)
        for name, of in get_type_hints(kind).items():
            compare(value[name], of, f"{place}.{name}", seen)
    elif get_origin(kind) is dict:
        assert isinstance(value, dict), place
        for name, item in value.items():
            assert isinstance(name, str), place
            compare(item, get_args(kind)[1], f"{place}[{name!r}]", seen)
    elif get_origin(kind) is list:
        assert isinstance(value, list), place
        for item in value:
            compare(item, get_args(kind)[0], f"{place}[]", seen)
    else:
        allowed = get_args(kind) or (kind,)
        assert type(value) in allowed, f"{place}: {value!r} is no {kind}"


def test_every_field_of_a_real_answer_is_documented_and_no_other() -> None:
    seen: set[str] = set()
    with Ends() as ends:
        near, _ = ends.pair()
        stats = near.dist.stats()
        compare(stats, Stats, "stats", seen)
        assert near.dist.cache_manager.stats().keys() == stats.keys()
        assert set(stats["pools"]) == {"device", "host"}
        told = re.findall(r"``(\w+)``", inspect.getsource(Stats).split("Calls by kind")[1].split('"""')[0])
        assert list(stats["ops"]) == told
    assert seen == {kind.__name__ for kind in CLASSES}


def test_percentiles_are_never_above_the_longest_call(dist: LLMDataDist) -> None:
    manager = dist.cache_manager
    blocks = manager.allocate_blocks_cache(desc())
    for _ in range(200):
        manager.copy_blocks(blocks, {0: [1]})
    stats = dist.stats()
    called = [name for name, op in stats["ops"].items() if op["calls"]]
    assert {"allocate", "copy_blocks"} <= set(called)
    for name, op in stats["ops"].items():
        assert op["p50_nanos"] <= op["p99_nanos"] <= op["max_nanos"] <= op["total_nanos"], name
        assert len(op["buckets"]) == 40
        assert sum(op["buckets"]) == op["calls"], name
        if op["calls"]:
            # The longest call is in the last bucket that is not empty.
            last = max(at for at, count in enumerate(op["buckets"]) if count)
            assert op["max_nanos"].bit_length() == last, name
    # With one call, each percentile is the time of that call.
    assert stats["ops"]["allocate"]["p50_nanos"] == stats["ops"]["allocate"]["max_nanos"]


def test_a_pool_that_was_not_configured_is_absent(start: Callable[..., LLMDataDist]) -> None:
    assert start({"llm.EnableCacheManager": "1"}).stats()["pools"] == {}
