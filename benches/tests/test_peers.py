"""The benchmark of other systems: its harness, its arithmetic, its limit loops and the committed report.

Not for: speed, which no test asserts, or the groups of two processes (`test_peers_between_processes.py`).
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from functools import partial
from pathlib import Path

import numpy as np
import pytest

import comparison
import report
from ask import Ask
from comparison import Entry
from limit import KERNELS, POISON, Limit
from rows import Row, read

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "benches" / "peers"
REPORT = ROOT / "benches" / "results"
PICTURES = ROOT / "docs" / "performance"

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler for the limit's loops")


@pytest.fixture
def program():
    """The module of the program itself."""
    spec = importlib.util.spec_from_file_location("bench_peers_program", BENCH / "__main__.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def python_path(stand_ins=""):
    return ":".join(filter(None, [str(stand_ins), os.environ.get("PYTHONPATH")]))


def run(out, *words, stand_ins=""):
    """Run the program. Return the file that it wrote, and its output."""
    command = [sys.executable, BENCH, "--quick", "--rounds", "2", "--mib", "4", "--out", out, *words]
    environment = {**os.environ, "PYTHONPATH": python_path(stand_ins)}
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=300, env=environment)  # noqa: S603
    return json.loads((out / "peers.json").read_text()), done.stdout + done.stderr


def stand_in(folder, name, body):
    """A package of this name that does `body` when it is imported."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(body)
    return folder


def of(rows, **fields):
    """The rows with these fields."""
    return [row for row in rows if fields.items() <= row.items()]


def middle(above, below):
    """The median of the ratios of two systems, round by round."""
    return pytest.approx(statistics.median(a / b for a, b in zip(above, below)), rel=0.002)


def test_ours_the_limit_and_numpy_are_measured_compared_and_reported(tmp_path):
    document, _ = run(tmp_path, "--only", "local", "--systems", "numpy")
    rows = document["rows"]
    cells = {(op, size) for op in ("swap_out", "swap_in", "copy_blocks") for size in (16 << 10, 256 << 10)}
    for system in ("ours", "limit", "numpy"):
        mine = of(rows, system=system)
        assert {(row["op"], row["block_bytes"]) for row in mine} == cells
        assert all(row["verified"] and row["median"] > 0 and len(row["samples"]) in (1, 2) for row in mine), mine
    for row in rows:
        assert row["block_bytes"] * row["blocks"] * row["tensors"] == 4 << 20
        samples = {it["system"]: it["samples"] for it in of(rows, op=row["op"], block_bytes=row["block_bytes"])}
        assert row["limit_ratio"] == middle(row["samples"], samples["limit"])
        if row["system"] == "numpy":
            assert row["ratio"] == middle(samples["ours"], row["samples"])
    group = document["groups"]["local"]
    assert group["quick"] is True
    assert re.fullmatch(r"[0-9a-f]{7,40}\+?|unknown", group["commit"])
    assert document["environment"]["versions"]["numpy"] == np.__version__
    assert document["environment"]["telemetry"]["LMCACHE_TRACK_USAGE"] == "false"
    page = (tmp_path / "peers.md").read_text()
    for text in ("| numpy, row by row |", "### swap_out, GB/s, 2 tensors", "| | 16 KiB | 256 KiB |"):
        assert text in page
    # A run of one group keeps the rows of the others.
    kept = run(tmp_path, "--only", "many", "--systems", "numpy")[0]["rows"]
    assert of(kept, group="local") == rows
    assert {row["op"] for row in of(kept, group="many", system="ours")} == {
        "allocate + free", "allocate + free, 256 live", "reachable, each", "put, each", "put, one call", "get, each",
        "reachable in one call, as one cache or as pieces", "get in one call, by number or by name",
    }  # fmt: skip
    moved = [row for row in of(kept, system="ours") if row["op"].startswith(("put", "get"))]
    assert [row["verified"] for row in moved] == [True] * 4
    assert all(row["median"] is not None for row in kept if row["system"] in ("ours", "numpy"))


def test_peers_that_are_not_here_or_end_the_process_are_named_and_the_others_are_measured(tmp_path):
    stand_in(tmp_path / "in", "torch", "raise ImportError('libibverbs1 missing')")
    ins = stand_in(tmp_path / "in", "nixl_cu12", "import os\nos.kill(os.getpid(), 11)")
    document, said = run(tmp_path / "out", "--only", "local", "--systems", "torch,nixl,numpy", stand_ins=ins)
    absent, fallen = (of(document["rows"], system=name) for name in ("torch", "nixl"))
    assert absent
    assert all(row["note"] == "ImportError: libibverbs1 missing" and "median" not in row for row in absent)
    assert "| torch | ImportError: libibverbs1 missing |" in (tmp_path / "out" / "peers.md").read_text()
    assert len(fallen) == 3  # one for each part; each part ran again without the peer
    assert all("took the process down: ended by SIGSEGV" in row["note"] for row in fallen)
    assert sum(row.get("median", 0) > 0 for row in of(document["rows"], system="numpy")) >= 6
    assert "nixl was running" in said


def contest(entries, rounds=4, **ground):
    """Rows of a contest by system and setting."""
    target = comparison.Ground(Row("group", "op", ""), 1.0, **{"wrong": lambda: None, **ground})
    return {
        f"{row.system} {row.setting}".strip(): row for row in comparison.contest(Ask(rounds=rounds), target, entries)
    }


@pytest.fixture
def takes(monkeypatch):
    """A fake clock that only the systems advance: `takes(2.0)` advances it by two seconds."""
    now = [0.0]
    monkeypatch.setattr(comparison.time, "perf_counter", lambda: now[0])

    def pass_by(seconds):
        now[0] += seconds

    return pass_by


def test_who_begins_changes_and_every_turn_is_poisoned_and_compared():
    happened = []

    def does(word):
        return lambda: happened.append(word)

    entries = [Entry(name, does(name), before=does("("), after=does(")")) for name in ("ours", "b", "c")]
    contest(entries, rounds=2, poison=does("poison"), wrong=does("compare"))
    order = ["ours", "b", "c", "b", "c", "ours", "c", "ours", "b"]
    assert happened == [word for name in order for word in ("(", "poison", name, ")", "compare")]


def test_wrong_bytes_and_failures_have_a_reason_and_no_figure():
    called = []

    def fails():
        raise RuntimeError("no route\n  to the peer")

    entries = [Entry(name, partial(called.append, name)) for name in ("ours", "liar")]
    entries += [Entry("broken", fails, note="said"), *(Entry("limit", fails, f"{many} a call") for many in (8, 64))]
    rows = contest(entries, wrong=lambda: "block 3 of the list" if called[-1] == "liar" else None)
    assert set(rows) == {"ours", "liar", "broken", "limit 8 a call"}
    for name, note in [
        ("liar", "wrong bytes: block 3 of the list"),
        ("broken", "RuntimeError: no route to the peer; said"),
        ("limit 8 a call", "RuntimeError: no route to the peer"),
    ]:
        assert (rows[name].median, rows[name].verified) == (None, False)
        assert note in rows[name].note
    assert rows["ours"].median > 0
    assert rows["ours"].limit_ratio is None


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("rows", "length"), [(13, 512), (13, 4096), (13, 12288), (13, 16384), (400, 2048), (1, 1536 << 10), (4, 1536 << 10)]
)
def test_the_loops_copy_the_list_and_nothing_else(rows, length, threads):
    limit = Limit()
    chance = np.random.default_rng(length + threads)
    source = chance.integers(0, 256, (rows, length), dtype=np.uint8)
    listed = (3 * rows + 3) // 4
    for kernel in range(len(KERNELS)):
        base = np.full((rows + 1) * length + 64, 0x11, dtype=np.uint8)
        skip = -base.ctypes.data % 64
        target = base[skip : skip + rows * length].reshape(rows, length)
        local, remote = chance.permutation(rows)[:listed], chance.permutation(rows)[:listed]
        expected = base.copy()
        expected[skip : skip + rows * length].reshape(rows, length)[remote] = source[local]
        moves = np.stack([source.ctypes.data + local * length, target.ctypes.data + remote * length], axis=1)
        moves = np.ascontiguousarray(moves.astype(np.uint64))
        limit.copy(moves, length, kernel, threads)
        assert (base == expected).all(), KERNELS[kernel]
        assert limit.differs(moves, length) == -1
        target[remote[-1], length - 1] ^= 1
        assert limit.differs(moves, length) == listed - 1
        limit.poison(moves, length)
        assert (target[remote] == POISON).all()
        assert (np.delete(target, remote, axis=0) == 0x11).all()
    with pytest.raises(AssertionError, match="Invalid argument"):
        limit.copy(np.zeros((0, 2), dtype=np.uint64), 100, 0, 1)


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 20])
def test_the_kernels_own_copy_moves_the_list(write, threads):
    limit = Limit()
    source = np.random.default_rng(3).integers(0, 256, (10, 4096), dtype=np.uint8)
    target = np.zeros_like(source)
    at = np.arange(10, dtype=np.uint64) * np.uint64(4096)
    moves = np.stack([at + np.uint64(source.ctypes.data), (at + np.uint64(target.ctypes.data))[::-1]], axis=1)
    limit.vm(os.getpid(), np.ascontiguousarray(moves), 4096, a_call=3, write=write, threads=threads)
    assert (target == source[::-1]).all()
    moves[4, 0] = 8
    with pytest.raises(OSError, match="Bad address"):
        limit.vm(os.getpid(), np.ascontiguousarray(moves), 4096, a_call=1, write=write, threads=threads)


def test_the_committed_page_says_what_the_committed_file_says(tmp_path):
    out = tmp_path / "new" / "benches" / "results"
    pictures = out / os.path.relpath(PICTURES, REPORT)
    words = ["--render", "--source", REPORT / "peers.json", "--out", out, "--pictures", pictures]
    subprocess.run([sys.executable, BENCH, *words], check=True, capture_output=True, timeout=120)  # noqa: S603
    assert (out / "peers.md").read_text() == (REPORT / "peers.md").read_text()


def test_every_committed_row_behind_has_its_reason():
    """Only for groups that were measured in full, because results of quick runs are not explained."""
    document, rows = read(REPORT / "peers.json")
    bare = [it for it in report.behind(rows) if it.reason is None]
    lack = [f"{report.at(it.row)}: {it.who}: {it.ratio:.2f}" for it in bare]
    listed = (REPORT / "peers.md").read_text()
    assert listed.count(report.NO_REASON) == len(lack)
    full = {name for name, moment in document["groups"].items() if not moment["quick"]}
    assert [text for text, it in zip(lack, bare) if it.row.group in full] == []
