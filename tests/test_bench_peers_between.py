"""The two-process benchmarks: every byte is looked at, a peer that is missing or dies is a row that says why.

Not for: figures, which no test asserts.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).parents[1]
PEERS = ROOT / "benches" / "peers"
LIMIT_S = 110
MEMORY = 4 << 20

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler for the limit's loops")


@pytest.fixture
def between(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The modules of the benchmark, which is a program and no package."""
    monkeypatch.syspath_prepend(str(PEERS))
    before = set(sys.modules)
    names = {"adapter": "between.adapter", "pair": "between.pair", "systems": "between.systems"}
    parts = {name: import_module(path) for name, path in {**names, "limit": "limit", "rows": "rows"}.items()}
    yield SimpleNamespace(case_of=import_module("between").case_of, **parts)
    for name in set(sys.modules) - before:
        del sys.modules[name]


@pytest.fixture
def case(between: Any) -> Any:
    return between.case_of("pull", 64 << 10, 8, MEMORY)


@pytest.fixture
def pair(between: Any, tmp_path: Path) -> Any:
    made = between.pair.Pair(between.systems.PEERS["ours", "pool"], between.pair.Pattern(MEMORY), str(tmp_path))
    yield made
    made.end()


def test_groups_end_to_end(tmp_path: Path) -> None:
    words = ["--quick", "--only", "between,small,standing,faults", "--systems", "ucxx", "--rounds", "1", "--mib", "4"]
    subprocess.run(  # noqa: S603  (this benchmark)
        [sys.executable, str(PEERS), *words, "--out", str(tmp_path)], check=True, timeout=LIMIT_S
    )
    rows = json.loads((tmp_path / "peers.json").read_text())["rows"]
    ours = [row for row in rows if row["system"] == "ours"]
    assert [row for row in ours if "median" not in row] == []
    assert all(row["verified"] for row in ours if row["group"] in ("between", "faults"))
    cells = {(row["op"], row["block_bytes"], row["blocks"]) for row in ours if row["group"] == "between"}
    lists = [(16 << 10, 64), (16 << 10, 256), (256 << 10, 16)]
    assert cells == {(op, *which) for op in ("pull pool", "push pool", "pull registered") for which in lists}
    # Beside the limit in every one of them.
    assert all(row["limit_ratio"] > 0 for row in ours if row["group"] == "between")
    absent = [row for row in rows if row["system"] == "ucxx" and row["group"] == "between"]
    assert absent, "a peer that was asked for has a row"
    assert all("median" in row or row["note"] for row in absent)
    faults = {row["op"]: row["note"] for row in ours if row["group"] == "faults"}
    assert len(faults) == 4
    assert all("a pull is right again" in note for note in faults.values()), faults


def test_a_wrong_byte_and_a_stray_one_are_found(between: Any, case: Any) -> None:
    class Tampered(between.adapter.Adapter):
        def open(self) -> None:
            self.memory = self.plain(self.size)

    pattern = np.arange(MEMORY // 8, dtype=np.int64)
    side = Tampered("", "near", MEMORY, between.limit.Limit(), pattern)
    side.poison_all()
    words, rows = side.memory.reshape(-1, case.block // 8), pattern.reshape(-1, case.block // 8)
    for src, dst in zip(case.src, case.dst):
        words[dst] = rows[src]
    assert side.wrong(case) == ""
    assert side.strays(case) == ""
    words[case.dst[3], 77] ^= 1
    assert side.wrong(case) == "block 3 of 8"
    words[case.dst[3], 77] ^= 1
    other = next(row for row in range(len(words)) if row not in case.dst)
    words[other, 5] = 0
    assert side.wrong(case) == ""
    assert side.strays(case) == "1 words written that nobody asked for"
    side.poison(case)
    assert (words[case.dst] == between.adapter.POISON).all()
    assert side.wrong(case) == "block 0 of 8"


def test_a_pair_moves_what_it_says(pair: Any, case: Any) -> None:
    pair.lay(case)
    target = pair.destination("pull")
    target.do("poison")
    assert target.do("wrong") == "block 0 of 8"
    assert pair.timed("go", "", times=1) > 0
    assert target.do("wrong") == ""
    assert target.do("strays") == ""


def test_a_push_is_checked_where_it_arrives(between: Any, pair: Any) -> None:
    case = between.case_of("push", 64 << 10, 8, MEMORY)
    pair.lay(case)
    target = pair.destination("push")
    assert target.role == "far"
    target.do("poison")
    assert target.do("wrong") == "block 0 of 8"
    pair.timed("go", "", times=1)
    assert target.do("wrong") == ""


def test_a_side_that_dies_is_said(between: Any, pair: Any, case: Any) -> None:
    far, _ = pair.both
    far.signal(signal.SIGKILL)
    with pytest.raises(between.pair.Failed, match="the far side ended by SIGKILL"):
        pair.lay(case)


def test_a_missing_system_is_said(between: Any, tmp_path: Path) -> None:
    if find_spec("ucxx") is not None:
        pytest.skip("ucxx is here")
    with pytest.raises(between.rows.Missing, match="ucxx"):
        between.pair.Pair(between.systems.PEERS["ucxx", "tcp"], between.pair.Pattern(MEMORY), str(tmp_path))


def test_a_late_answer_is_not_taken_for_another_one(between: Any, pair: Any, case: Any) -> None:
    far, _ = pair.both
    far.signal(signal.SIGSTOP)
    far.tell("hello")
    with pytest.raises(between.pair.Failed, match="still at it after 0 s"):
        far.answer(0.1)
    far.signal(signal.SIGCONT)
    with pytest.raises(between.pair.Failed, match="the far side is still at something else"):
        pair.lay(case)
