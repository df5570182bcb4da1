"""`stats()`: every field is documented, typed and there, and the numbers of one kind of call fit each other."""

from __future__ import annotations

import ast
import inspect
import os
import re
from pathlib import Path
from typing import Any, Callable, get_args, get_origin, get_type_hints

import pytest

import llm_datadist.stats
from llm_datadist import LLMDataDist
from llm_datadist.stats import LinkStats, OpStats, PoolStats, Stats, SwapInStats, TableStats
from memory import desc
from peers import Ends

PAGE = Path(__file__).resolve().parents[1] / "docs" / "stats.md"
CLASSES = [Stats, PoolStats, TableStats, OpStats, SwapInStats, LinkStats]
HEAD = """# Statistics

This page lists every counter of an engine. Use it to write a health check, to export metrics, or to find out where
time and memory go. `LLMDataDist.stats()` and the method `stats()` of both managers return the same plain dicts.
`llm_datadist.stats` has a type for each dict. Counters start at 0 when `init` opens the engine. Reading them does not
interrupt other calls.

```python
from llm_datadist import CacheDesc, DataType, LLMConfig, LLMDataDist, LLMRole

config = LLMConfig()
config.enable_cache_manager = True
config.mem_pool_cfg = '{"memory_size": 67108864}'  # 64 MiB
engine = LLMDataDist(LLMRole.PROMPT, cluster_id=1)
engine.init(config.generate_options())
cache = engine.cache_manager.allocate_blocks_cache(CacheDesc(2, [8, 65536], DataType.DT_INT8))
engine.cache_manager.copy_blocks(cache, {0: [1, 2]})

stats = engine.stats()
print(stats["pools"]["device"]["used_bytes"], stats["table"]["caches"], stats["links"])  # 1048576 1 []
print(stats["ops"]["copy_blocks"]["calls"], stats["ops"]["copy_blocks"]["bytes"])  # 1 262144
engine.finalize()
```

Each entry of `ops` has a histogram of call times, `buckets`. For percentiles over several engines, add their
histograms. For percentiles over an interval, subtract the histogram at its start from the one at its end
([example](tuning.md#stats)). `p50_nanos` and `p99_nanos` cannot be combined in this way.

This page is generated from `python/llm_datadist/stats.py` by `LLM_DATADIST_WRITE_STATS=1 pytest tests/test_stats.py`.
"""


def documented() -> dict[str, dict[str, tuple[str, str]]]:
    """Class → field → its type, and the text below it on one line, both from the source."""
    tree = ast.parse(inspect.getsource(llm_datadist.stats))
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            fields = found.setdefault(node.name, {})
            for field, text in zip(node.body, node.body[1:]):
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    assert isinstance(text, ast.Expr), f"{node.name}.{field.target.id} has no text"
                    assert isinstance(text.value, ast.Constant)
                    fields[field.target.id] = (ast.unparse(field.annotation), " ".join(str(text.value.value).split()))
    return found


def page() -> str:
    text = HEAD
    for kind in CLASSES:
        text += f"\n## `{kind.__name__}`\n\n{' '.join((kind.__doc__ or '').split())}\n\n"
        text += "| field | type | meaning |\n| --- | --- | --- |\n"
        for name, (shown, meaning) in documented()[kind.__name__].items():
            text += f"| `{name}` | `{shown}` | {meaning.replace('``', '`')} |\n"
    return text


def test_the_page_says_what_the_types_say() -> None:
    if os.environ.get("LLM_DATADIST_WRITE_STATS"):
        PAGE.write_text(page(), encoding="utf-8")
    assert PAGE.read_text(encoding="utf-8") == page(), "LLM_DATADIST_WRITE_STATS=1 writes it anew"


def compare(value: Any, kind: Any, place: str, seen: set[str]) -> None:
    """`value` is what `kind` says, field for field and in the documented order."""
    if kind in CLASSES:
        fields = list(documented()[kind.__name__])
        assert fields == list(kind.__annotations__)
        assert sorted(value) == sorted(fields), place
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
            # The longest call lies in the last bucket that has one.
            last = max(at for at, count in enumerate(op["buckets"]) if count)
            assert op["max_nanos"].bit_length() == last, name
    # One call alone: each percentile is that call.
    assert stats["ops"]["allocate"]["p50_nanos"] == stats["ops"]["allocate"]["max_nanos"]


def test_a_pool_that_was_not_configured_is_absent(start: Callable[..., LLMDataDist]) -> None:
    assert start({"llm.EnableCacheManager": "1"}).stats()["pools"] == {}


@pytest.mark.parametrize("kind", CLASSES, ids=lambda kind: kind.__name__)
def test_every_field_has_a_sentence(kind: Any) -> None:
    for name, (_, text) in documented()[kind.__name__].items():
        assert len(text) > 10, name
        assert text.endswith("."), name
