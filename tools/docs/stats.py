"""Writes docs/stats.md from the types of the statistics: stats.py [--check].

With `--check` it compares instead, and exits with 1 if the page is out of date.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
from pathlib import Path

import llm_datadist.stats
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

PAGE = Path(__file__).resolve().parents[2] / "docs" / "stats.md"
CLASSES = (
    *(EngineStats, Stats, PoolStats, TableStats, OpStats, SwapInStats, VerifyStats, FabricStats, LinkStats, PathStats),
    *(StoreStats, KeeperStats, StoredNamespace, StoredValue, StoredChanges, StoredChange),
)
HEAD = """# Statistics

This page lists every counter of an engine. Use it to write a health check, to export metrics, or to find out where
time and memory go. `Engine.stats()` returns plain dicts and lists. `LLMDataDist.stats()` returns the
same, without the name of the engine. `llm_datadist.stats` has a type for each dict. Counters start at 0 when the
engine opens. Reading them does not interrupt transfers. The `cluster` of a link is the incarnation of a native peer.

```python
from llm_datadist import Engine

with Engine(pool="64MiB", name="prefill") as engine:
    cache = engine.allocate("kv", blocks=8, tensors=2, shape=(65536,), dtype="uint8")
    engine.copy(cache[[1, 2]], cache[[0, 0]]).result()
    stats = engine.stats()

print(stats["engine"], stats["pools"]["device"]["used_bytes"], stats["links"])  # prefill 1048576 []
print(stats["ops"]["copy_blocks"]["calls"], stats["ops"]["copy_blocks"]["bytes"])  # 1 262144
```

Each entry of `ops` has a histogram of call times, `buckets`. For percentiles over several engines, add their
histograms. For percentiles over an interval, subtract the histogram at its start from the one at its end
([example](tuning.md#stats)). `p50_nanos` and `p99_nanos` cannot be combined in this way.

`Store.stats()` returns the counters of a [store and its keeper](#storestats), and `KeeperObserver` what a
[keeper](#keeperstats) has ([a cache that survives restarts](how-to/store.md)).

This page is generated from `python/llm_datadist/stats.py` by `make docs-stats`.
"""


def documented() -> dict[str, dict[str, tuple[str, str]]]:
    """Returns class -> field -> (type, docstring on one line), read from the source."""
    tree = ast.parse(inspect.getsource(llm_datadist.stats))
    found: dict[str, dict[str, tuple[str, str]]] = {}
    for node in tree.body:
        if isinstance(node, ast.ClassDef):
            fields = found.setdefault(node.name, {})
            for field, text in zip(node.body, node.body[1:]):
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    meaning = ast.literal_eval(text.value) if isinstance(text, ast.Expr) else ""
                    if not meaning.rstrip().endswith("."):
                        raise ValueError(f"{node.name}.{field.target.id} has no sentence below it")
                    fields[field.target.id] = (ast.unparse(field.annotation), " ".join(meaning.split()))
    return found


def page() -> str:
    """Returns the whole page."""
    text, classes = "", documented()
    for kind in CLASSES:
        text += f"\n## `{kind.__name__}`\n\n{' '.join((kind.__doc__ or '').split())}\n\n"
        text += "| field | type | meaning |\n| --- | --- | --- |\n"
        for name, (shown, meaning) in classes[kind.__name__].items():
            text += f"| `{name}` | `{shown}` | {meaning} |\n"
    return HEAD + text.replace("``", "`")


def main() -> int:
    """Writes or compares the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if PAGE.read_text(encoding="utf-8") == page():
        return 0
    print("docs/stats.md is out of date; run `make docs-stats`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
