"""The benchmarks of two processes: they compare every byte, and name a peer that is missing or dies.

Not for: figures, which no test asserts.
"""

from __future__ import annotations

import json
import shutil
import signal
import subprocess
import sys
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
PEERS = ROOT / "benches" / "peers"
LIMIT_S = 300
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


def measured(tmp_path: Path, group: str) -> list[dict[str, Any]]:
    """The rows of one group, with one peer that may be missing."""
    words = ["--quick", "--only", group, "--systems", "ucxx", "--rounds", "1", "--mib", "4", "--out", str(tmp_path)]
    subprocess.run([sys.executable, str(PEERS), *words], check=True, timeout=LIMIT_S)  # noqa: S603  (this benchmark)
    rows: list[dict[str, Any]] = json.loads((tmp_path / "peers.json").read_text())["rows"]
    assert [row for row in rows if row["system"] == "ours" and "median" not in row] == []
    return rows


def test_pulls_and_pushes_end_to_end(tmp_path: Path) -> None:
    rows = measured(tmp_path, "between")
    ours = [row for row in rows if row["system"] == "ours"]
    cells = {(row["op"], row["block_bytes"], row["blocks"]) for row in ours}
    lists = [(16 << 10, 64), (16 << 10, 256), (256 << 10, 16)]
    assert cells == {(op, *which) for op in ("pull pool", "push pool", "pull registered") for which in lists}
    # Beside the limit in every one of them, and compared.
    assert all(row["limit_ratio"] > 0 and row["verified"] for row in ours)
    absent = [row for row in rows if row["system"] == "ucxx"]
    assert absent, "a peer that was asked for has a row"
    assert all("median" in row or row["note"] for row in absent)


def test_small_requests_end_to_end(tmp_path: Path) -> None:
    rows = measured(tmp_path, "small")
    calls = [row for row in rows if row["op"].startswith("pull pool ") and "median" in row]
    for system in ("ours", "limit"):
        found = sorted(row["op"] for row in calls if row["system"] == system)
        assert found == [f"pull pool {figure}" for figure in ("p50", "p99", "slowest")]
    assert all(row["limit_ratio"] > 0 and row["verified"] for row in calls)
    # The limit is named by its loop, which is the same for all three.
    (loop,) = {row["setting"] for row in calls if row["system"] == "limit"}
    assert loop.startswith("mapped ")
    assert loop.split(" x")[-1] in ("1", "2")
    steps = {row["op"]: row for row in rows if row["system"] == "ours" and row["unit"] == "ms"}
    assert steps["prepare 15,000 segments"]["note"]
    assert "ratio" not in steps["prepare 15,000 segments"]
    assert steps["ask for and move them"]["verified"]


def test_standing_costs_end_to_end(tmp_path: Path) -> None:
    rows = [row for row in measured(tmp_path, "standing") if row["system"] == "ours"]
    assert {"import", "link", "idle CPU of both, linked", "peak memory, near"} <= {row["op"] for row in rows}
    # Nothing is moved that could be compared.
    assert not any(row.get("verified") for row in rows)


def test_faults_end_to_end(tmp_path: Path) -> None:
    rows = [row for row in measured(tmp_path, "faults") if row["system"] == "ours"]
    faults = {row["op"]: row["note"] for row in rows}
    assert len(faults) == 4
    assert all(row["verified"] for row in rows)
    assert all("a pull is right again" in note for note in faults.values()), faults
    assert ["clocked beside another pair" in note for op, note in faults.items() if "stopped" in op] == [True, True]
    assert not any("clocked beside" in note for op, note in faults.items() if "killed" in op)


def test_a_wrong_byte_and_a_stray_one_are_found(between: Any, case: Any) -> None:
    class Tampered(between.adapter.Adapter):
        def open(self) -> None:
            self.memory = self.plain(self.size)

        def hello(self) -> Any:
            raise AssertionError("nobody is linked with")

        link = request = hello

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


@pytest.mark.parametrize("op", ["pull", "push"])
def test_a_transfer_is_checked_where_it_arrives(between: Any, pair: Any, op: str) -> None:
    pair.lay(between.case_of(op, 64 << 10, 8, MEMORY))
    target = pair.destination(op)
    assert op == "pull" or target.role == "far"
    target.do("poison")
    assert target.do("wrong") == "block 0 of 8"
    assert pair.timed("go", "", times=1) > 0
    assert target.do("wrong") == ""
    assert target.do("strays") == ""


def test_a_side_that_dies_is_said(between: Any, pair: Any, case: Any) -> None:
    far, _ = pair.both
    far.signal(signal.SIGKILL)
    with pytest.raises(between.pair.Failed, match="the far side ended by SIGKILL"):
        pair.lay(case)


def test_a_late_answer_is_not_taken_for_another_one(between: Any, pair: Any, case: Any) -> None:
    far, _ = pair.both
    far.signal(signal.SIGSTOP)
    far.tell("hello")
    with pytest.raises(between.pair.Failed, match="still at it after 0 s"):
        far.answer(0.1)
    far.signal(signal.SIGCONT)
    with pytest.raises(between.pair.Failed, match="the far side is still at something else"):
        pair.lay(case)
