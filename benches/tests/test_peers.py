"""The benchmark beside the peers: its harness, its arithmetic, its limit loops and the committed report.

Not for: speed, which no test asserts, or the groups of two processes (`test_peers_between_processes.py`).
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import os
import re
import shutil
import statistics
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

import numpy as np
import pytest

if TYPE_CHECKING:
    from collections.abc import Iterator

ROOT = Path(__file__).resolve().parents[2]
BENCH = ROOT / "benches" / "peers"
REPORT = ROOT / "benches" / "results"
PICTURES = ROOT / "docs" / "performance"

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler for the limit's loops")


class Bench:
    """The modules of the benchmark, which is a program and no package."""

    def __init__(self) -> None:
        self.before = set(sys.modules)

    def __getattr__(self, name: str) -> Any:
        return importlib.import_module(name)

    def program(self) -> Any:
        spec = importlib.util.spec_from_file_location("bench_peers_program", BENCH / "__main__.py")
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
        return module


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Iterator[Bench]:
    monkeypatch.syspath_prepend(str(BENCH))
    found = Bench()
    yield found
    for name in set(sys.modules) - found.before:
        if str(getattr(sys.modules[name], "__file__", None) or "").startswith(str(BENCH)):
            del sys.modules[name]


def run(out: Path, *words: str, stand_ins: Path | None = None) -> tuple[dict[str, Any], str]:
    """Run the program; the file it wrote, and what it printed."""
    paths = filter(None, [str(stand_ins or ""), os.environ.get("PYTHONPATH")])
    done = subprocess.run(  # noqa: S603  (this program)
        [sys.executable, str(BENCH), "--quick", "--rounds", "2", "--mib", "4", "--out", str(out), *words],
        check=True,
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "PYTHONPATH": ":".join(paths)},
    )
    return json.loads((out / "peers.json").read_text()), done.stdout + done.stderr


def stand_in(folder: Path, name: str, body: str) -> Path:
    """A package of this name that does ``body`` when it is imported."""
    (folder / name).mkdir(parents=True)
    (folder / name / "__init__.py").write_text(body)
    return folder


def test_ours_the_limit_and_numpy_are_measured_compared_and_reported(tmp_path: Path) -> None:
    document, _ = run(tmp_path, "--only", "local", "--systems", "numpy")
    rows = document["rows"]
    ops = {"swap_out", "swap_in", "copy_blocks"}
    sizes = {16 << 10, 256 << 10}
    for system in ("ours", "limit", "numpy"):
        mine = [row for row in rows if row["system"] == system]
        assert {(row["op"], row["block_bytes"]) for row in mine} == {(op, size) for op in ops for size in sizes}
        assert all(row["verified"] and row["median"] > 0 and len(row["samples"]) in (1, 2) for row in mine), mine
    for row in rows:
        assert row["block_bytes"] * row["blocks"] * row["tensors"] == 4 << 20
        beside = {it["system"]: it for it in rows if (it["op"], it["block_bytes"]) == (row["op"], row["block_bytes"])}
        ours, limit = beside["ours"]["samples"], beside["limit"]["samples"]
        assert row["limit_ratio"] == pytest.approx(
            statistics.median(mine / best for mine, best in zip(row["samples"], limit)), rel=0.002
        )
        if row["system"] == "numpy":
            assert row["ratio"] == pytest.approx(
                statistics.median(own / mine for own, mine in zip(ours, row["samples"])), rel=0.002
            )
    group = document["groups"]["local"]
    assert group["quick"] is True
    assert re.fullmatch(r"[0-9a-f]{7,40}\+?|unknown", group["commit"])
    assert document["environment"]["versions"]["numpy"] == np.__version__
    assert document["environment"]["telemetry"]["LMCACHE_TRACK_USAGE"] == "false"
    page = (tmp_path / "peers.md").read_text()
    for text in ("| numpy, row by row |", "### swap_out, GB/s, 2 tensors", "| | 16 KiB | 256 KiB |"):
        assert text in page
    # A run of one group keeps the rows of the others.
    kept, _ = run(tmp_path, "--only", "many", "--systems", "numpy")
    assert [row for row in kept["rows"] if row["group"] == "local"] == rows
    many = {row["op"] for row in kept["rows"] if row["group"] == "many" and row["system"] == "ours"}
    assert many == {
        "allocate + free", "allocate + free, 256 live", "reachable, each", "put, each", "put, one call", "get, each",
        "reachable in one call, as one cache or as pieces", "get in one call, by number or by name",
    }  # fmt: skip
    moved = [row for row in kept["rows"] if row["system"] == "ours" and row["op"].startswith(("put", "get"))]
    assert len(moved) == 4
    assert all(row["verified"] for row in moved)
    assert all(row["median"] is not None for row in kept["rows"] if row["system"] in ("ours", "numpy"))


def test_a_peer_that_is_not_here_is_a_row_with_its_reason(tmp_path: Path) -> None:
    ins = stand_in(tmp_path / "in", "nixl_cu12", "raise ImportError('libibverbs1 missing')")
    document, _ = run(tmp_path / "out", "--only", "local", "--systems", "nixl", stand_ins=ins)
    rows = [row for row in document["rows"] if row["system"] == "nixl"]
    assert rows
    for row in rows:
        assert "median" not in row
        assert row["note"] == "ImportError: libibverbs1 missing"
    assert "| nixl | ImportError: libibverbs1 missing |" in (tmp_path / "out" / "peers.md").read_text()


def test_a_peer_that_ends_the_process_is_named_and_the_others_are_measured(tmp_path: Path) -> None:
    ins = stand_in(tmp_path / "in", "nixl_cu12", "import os\nos.kill(os.getpid(), 11)")
    document, said = run(tmp_path / "out", "--only", "local", "--systems", "nixl,numpy", stand_ins=ins)
    fallen = [row for row in document["rows"] if row["system"] == "nixl"]
    assert len(fallen) == 3  # one for each part, which was run again without it
    assert all("took the process down: ended by SIGSEGV" in row["note"] for row in fallen)
    assert sum(row["system"] == "numpy" and row.get("median", 0) > 0 for row in document["rows"]) >= 6
    assert "nixl was at it" in said


def test_a_part_that_hangs_is_cut_off_with_all_it_started(tmp_path: Path, bench: Bench) -> None:
    body = "import subprocess, sys, time\nprint(subprocess.Popen(['sleep', '600']).pid, flush=True)\ntime.sleep(600)"
    ins = stand_in(tmp_path / "in", "nixl_cu12", body)
    program, record = bench.program(), tmp_path / "record"
    record.touch()
    ask = bench.ask.Ask(quick=True, rounds=1, systems=("nixl",), folder=str(tmp_path), mib=1)
    group = bench.groups.Group("local", "local", 20, 20)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", ":".join(filter(None, [str(ins), os.environ.get("PYTHONPATH")])))
        ended = program.in_process(group, "swap_out 2 4K", record, ask)
    assert ended == "cut off after 20 s"
    assert program.crumb(tmp_path) == "nixl"
    child = int((tmp_path / "log").read_text().split()[-1])
    state = Path(f"/proc/{child}/stat")
    assert not state.exists() or state.read_text().rsplit(")", 1)[1].split()[0] == "Z"


def test_parts_that_were_asked_for_are_of_a_full_run(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    program, ran = bench.program(), []
    monkeypatch.setattr(program, "whole_part", lambda _, part, ask: ran.append((part, ask.quick)) or ())
    group, ask = bench.groups.GROUPS[0], bench.ask.Ask(quick=True)
    for words in ([], ["huge"], ["in 1", "out 80"], ["nobody"]):
        assert list(program.whole_group(group, ask, words)) == []
    ops = ("swap_out", "swap_in", "copy_blocks")
    assert ran[:6] == [(f"{op} 2 {pages}", True) for pages in ("4K", "huge") for op in ops]
    assert ran[6:] == [("swap_in 1 4K", True), ("swap_out 80 4K", True)]


@pytest.fixture
def ground(bench: Bench) -> Any:
    row = bench.rows.Row("group", "op", "")
    return bench.turns.Ground(row, 1.0, wrong=lambda: None)


def contest(bench: Bench, ground: Any, entries: list[Any], rounds: int = 4) -> dict[str, Any]:
    rows = bench.turns.contest(bench.ask.Ask(rounds=rounds), ground, entries)
    return {f"{row.system} {row.setting}".strip(): row for row in rows}


def clock(monkeypatch: pytest.MonkeyPatch, bench: Bench) -> Callable[[float], Callable[[], None]]:
    """A clock that only the systems move: ``clock(...)(2.0)`` takes two seconds."""
    now = [0.0]
    monkeypatch.setattr(bench.turns.time, "perf_counter", lambda: now[0])

    def takes(seconds: float) -> Callable[[], None]:
        def run() -> None:
            now[0] += seconds

        return run

    return takes


def test_who_begins_changes_and_every_turn_is_poisoned_and_compared(bench: Bench, ground: Any) -> None:
    happened: list[str] = []

    def does(word: str) -> Callable[[], None]:
        return lambda: happened.append(word)

    entries = [bench.turns.Entry(name, does(name), before=does("("), after=does(")")) for name in ("ours", "b", "c")]
    contest(bench, dataclasses.replace(ground, poison=does("poison"), wrong=does("compare")), entries, rounds=2)
    turn = ["(", "poison", "?", ")", "compare"]
    order = ["ours", "b", "c", "b", "c", "ours", "c", "ours", "b"]
    assert happened == [name if word == "?" else word for name in order for word in turn]


def test_figures_of_a_contest(bench: Bench, ground: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    takes = clock(monkeypatch, bench)
    entries = [
        bench.turns.Entry("ours", takes(0.5), threads=2),
        bench.turns.Entry("limit", takes(0.25), "fast"),
        *(bench.turns.Entry("limit", takes(0.25 + 0.1 * more), f"slower {more}") for more in range(1, 7)),
        bench.turns.Entry("peer", takes(1.0), note="said"),
        bench.turns.Entry("far", takes(4.0)),
    ]
    rows = contest(bench, ground, entries)
    assert set(rows) == {"ours", "limit fast", "peer", "far"}
    assert (rows["ours"].median, rows["ours"].limit_ratio, rows["ours"].threads) == (2.0, 0.5, 2)
    assert (rows["peer"].median, rows["peer"].ratio, rows["peer"].limit_ratio) == (1.0, 2.0, 0.25)
    assert rows["peer"].note == "said"
    assert rows["peer"].verified
    assert len(rows["peer"].samples) == 4
    # Who is far behind costs no more than two rounds.
    assert rows["far"].samples == [0.25, 0.25]
    assert rows["limit fast"].ratio is None
    unlike = contest(bench, dataclasses.replace(ground, alike=False), entries)
    assert (unlike["ours"].median, unlike["peer"].median) == (2.0, 1.0)
    assert (unlike["ours"].ratio, unlike["peer"].ratio) == (None, None)


def test_the_limits_loops_have_two_turns_before_only_the_fastest_go_on(
    bench: Bench, ground: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    takes, turns = clock(monkeypatch, bench), Counter()

    def runs(name: str, first: float, later: float) -> Callable[[], None]:
        def run() -> None:
            turns[name] += 1
            takes(first if turns[name] == 1 else later)()

        return run

    # The fastest of all was disturbed in its first turn.
    entries = [bench.turns.Entry("limit", runs("fast", 9.0, 0.25), "fast")]
    entries += [bench.turns.Entry("limit", runs(f"{at}", 0.5 + at / 10, 0.5 + at / 10), f"{at}") for at in range(6)]
    rows = contest(bench, ground, [*entries, bench.turns.Entry("ours", runs("ours", 0.5, 0.5))], rounds=3)
    assert (rows["ours"].limit_ratio, rows["limit fast"].median) == (0.5, 4.0)
    assert turns == {"fast": 5, "0": 5, "1": 5, "2": 5, "3": 2, "4": 2, "5": 2, "ours": 4}


def test_only_seconds_take_the_place_of_the_clock(bench: Bench, ground: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    waits = clock(monkeypatch, bench)(0.5)
    for answer, rate in ((None, 2.0), (0.25, 4.0), ([1, 2], 2.0), (7, 2.0)):
        rows = contest(bench, ground, [bench.turns.Entry("ours", lambda answer=answer: (waits(), answer)[1])])
        assert rows["ours"].median == rate


def test_a_cost_is_better_when_it_is_less(bench: Bench) -> None:
    row = bench.rows.Row("group", "op", "peer", unit="us")
    done = bench.rows.measured(row, [4.0, 6.0, 8.0], [1.0, 2.0, 4.0])
    assert (done.median, done.low, done.high, done.ratio) == (6.0, 4.0, 8.0, 3.0)
    assert bench.rows.measured(dataclasses.replace(row, unit="GB/s"), [1.0], [2.0]).ratio == 2.0


def test_wrong_bytes_and_failures_have_a_reason_and_no_figure(bench: Bench, ground: Any) -> None:
    turn = []

    def fails() -> None:
        raise RuntimeError("no route\n  to the peer")

    entries = [bench.turns.Entry(name, lambda name=name: turn.append(name)) for name in ("ours", "liar")]
    entries += [bench.turns.Entry("broken", fails, note="said")]
    entries += [bench.turns.Entry("limit", fails, name) for name in ("8 a call", "64 a call")]
    ground = dataclasses.replace(ground, wrong=lambda: "block 3 of the list" if turn[-1] == "liar" else None)
    rows = contest(bench, ground, entries)
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


def test_what_is_written_is_read_again(bench: Bench, tmp_path: Path) -> None:
    rows = [
        bench.rows.measured(bench.rows.Row("g", "op", "peer", "s", 4096, 7, 2, "huge", 2), [1.0, 2.0], [3.0, 3.0]),
        bench.rows.Row("g", "op", "other", note="not here"),
    ]
    (tmp_path / "f").write_text(bench.rows.written({"groups": {}}, rows))
    assert bench.rows.read(tmp_path / "f") == ({"groups": {}}, rows)


@pytest.mark.parametrize("threads", [1, 2, 3, 5])
@pytest.mark.parametrize(
    ("rows", "length"), [(13, 512), (13, 4096), (13, 12288), (13, 16384), (400, 2048), (1, 1536 << 10), (4, 1536 << 10)]
)
def test_the_loops_copy_the_list_and_nothing_else(bench: Bench, rows: int, length: int, threads: int) -> None:
    limit = bench.limit.Limit()
    chance = np.random.default_rng(length + threads)
    source = chance.integers(0, 256, (rows, length), dtype=np.uint8)
    listed = (3 * rows + 3) // 4
    for kernel in range(len(bench.limit.KERNELS)):
        base = np.full((rows + 1) * length + 64, 0x11, dtype=np.uint8)
        skip = -base.ctypes.data % 64
        place = base[skip : skip + rows * length].reshape(rows, length)
        near, far = chance.permutation(rows)[:listed], chance.permutation(rows)[:listed]
        expected = base.copy()
        expected[skip : skip + rows * length].reshape(rows, length)[far] = source[near]
        moves = np.stack([source.ctypes.data + near * length, place.ctypes.data + far * length], axis=1)
        moves = np.ascontiguousarray(moves.astype(np.uint64))
        limit.copy(moves, length, kernel, threads)
        assert (base == expected).all(), bench.limit.KERNELS[kernel]
        assert limit.differs(moves, length) == -1
        place[far[-1], length - 1] ^= 1
        assert limit.differs(moves, length) == listed - 1
        limit.poison(moves, length)
        assert (place[far] == bench.limit.POISON).all()
        assert (np.delete(place, far, axis=0) == 0x11).all()
    with pytest.raises(AssertionError, match="Invalid argument"):
        limit.copy(np.zeros((0, 2), dtype=np.uint64), 100, 0, 1)


@pytest.mark.parametrize("write", [False, True])
@pytest.mark.parametrize("threads", [1, 2, 20])
def test_the_kernels_own_copy_moves_the_list(bench: Bench, write: bool, threads: int) -> None:
    limit = bench.limit.Limit()
    source = np.random.default_rng(3).integers(0, 256, (10, 4096), dtype=np.uint8)
    place = np.zeros_like(source)
    at = np.arange(10, dtype=np.uint64) * np.uint64(4096)
    moves = np.stack([at + np.uint64(source.ctypes.data), (at + np.uint64(place.ctypes.data))[::-1]], axis=1)
    limit.vm(os.getpid(), np.ascontiguousarray(moves), 4096, a_call=3, write=write, threads=threads)
    assert (place == source[::-1]).all()
    moves[4, 0] = 8
    with pytest.raises(OSError, match="Bad address"):
        limit.vm(os.getpid(), np.ascontiguousarray(moves), 4096, a_call=1, write=write, threads=threads)


def test_the_committed_page_says_what_the_committed_file_says(tmp_path: Path) -> None:
    out = tmp_path / "new" / "benches" / "results"
    pictures = out / os.path.relpath(PICTURES, REPORT)
    words = ["--render", "--source", REPORT / "peers.json", "--out", out, "--pictures", pictures]
    subprocess.run([sys.executable, BENCH, *words], check=True, capture_output=True, timeout=120)  # noqa: S603
    assert (out / "peers.md").read_text() == (REPORT / "peers.md").read_text()


def test_the_page_names_where_we_are_behind_and_why_and_who_is_not_here(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    row = bench.rows.Row("local", "swap_out", "ours", "", 16 << 10, 8, 2, verified=True)
    beside = dataclasses.replace(row, system="peer", setting="tuned", note="polls")
    rows = [
        bench.rows.measured(row, [9.0], [9.0], [10.0]),
        bench.rows.measured(beside, [12.0], [9.0], [10.0]),
        dataclasses.replace(beside, system="gone", setting="", note="not here: libfabric"),
        bench.rows.measured(dataclasses.replace(row, system="limit", setting="stream x2"), [10.0], [9.0], [10.0]),
        bench.rows.measured(dataclasses.replace(row, block_bytes=4096), [10.3], [10.3], [10.0]),
        bench.rows.measured(dataclasses.replace(row, block_bytes=8192), [9.6], [9.6], [10.0]),
    ]
    presumed = bench.reasons.PRESUMED + "it polls"
    reasons = (("local swap_in*", "another"), ("local swap_out, 8 x 16 KiB, 2 tensors: peer, *", presumed))
    monkeypatch.setattr(bench.reasons, "REASONS", (*reasons, ("*peer*", "too late")))
    facts = json.loads((REPORT / "peers.json").read_text())["environment"]
    page = bench.report.markdown({"environment": facts, "groups": {}, "extra": {}}, rows)
    for text in [
        "2 rows, 1 of them without a reason so far",
        "1 with one that is presumed and not profiled",
        "| local | swap_out | 8 x 16 KiB, 2 tensors | peer, tuned | 0.75 | presumed, not profiled: it polls |",
        "| local | swap_out | 8 x 16 KiB, 2 tensors | limit | 0.90 | **no reason yet** |",
        "more than 2%",
        "| local swap_out, 8 x 4 KiB, 2 tensors | 10.3 GB/s | 1.03 |",
        "| local swap_out | gone | not here: libfabric |",
        "| ours | 10.3 (limit 1.03) | 9.6 (limit 0.96) | 9 (limit 0.90) |",
        "| peer, tuned | - | - | **12 (0.75)** |",
        "- peer, tuned: polls",
        "Not measured yet: local, between, small, many, standing, faults.",
    ]:
        assert text in page
    assert page.index("## Where we are behind") < page.index("## Inside one process")


@pytest.mark.parametrize("op", ["swap_out", "get, each", "pull pool p99", "allocate + free"])
def test_what_moved_bytes_unseen_is_marked(bench: Bench, op: str) -> None:
    unit = "GB/s" if op == "swap_out" else "us"
    row = bench.rows.measured(bench.rows.Row("g", op, "peer", unit=unit), [2.0])
    assert bench.report.cell(dataclasses.replace(row, verified=True)) == "2"
    # An allocation moves nothing to compare.
    assert bench.report.cell(dataclasses.replace(row, verified=False)) == ("2" if op == "allocate + free" else "2?")


def test_every_committed_row_behind_has_its_reason(bench: Bench) -> None:
    """Of groups that were measured in full: what a quick run says is looked at again before anybody explains it."""
    document, rows = bench.rows.read(REPORT / "peers.json")
    bare = [it for it in bench.report.behind(rows) if it.reason is None]
    lack = [f"{bench.report.at(it.row)}: {it.who}: {it.ratio:.2f}" for it in bare]
    listed = (REPORT / "peers.md").read_text()
    assert listed.count(bench.report.NO_REASON) == len(lack)
    full = {name for name, moment in document["groups"].items() if not moment["quick"]}
    assert [text for text, it in zip(lack, bare) if it.row.group in full] == []


def test_a_full_run_takes_fifty_minutes_at_most(bench: Bench) -> None:
    groups, quick = bench.groups.GROUPS, bench.groups.QUICK_ROUNDS
    assert sum(group.about_s(False, group.rounds) for group in groups) <= 50 * 60
    assert sum(group.about_s(True, quick) for group in groups) <= 5 * 60


@pytest.mark.parametrize("name", ["requirements-peers.txt", "requirements-peers-nodeps.txt"])
def test_the_peers_are_pinned(name: str) -> None:
    lines = [line for line in (ROOT / name).read_text().splitlines() if not line.startswith("#")]
    assert lines
    assert all(re.fullmatch(r"[a-z0-9_.-]+==[0-9][0-9a-z.]*", line) for line in lines), lines
