"""The benchmarks of two processes: they compare every byte, and name a peer that is missing or dies.

Not for: figures, which no test asserts.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from between import case_of
from between.adapter import POISON, Adapter
from between.pair import Failed, Pair, Pattern
from between.sequence import HEAD, sequence_of
from between.systems import PEERS
from layouts import MOVES
from limit import Limit

MEMORY = 4 << 20
HIXL = Path(__file__).resolve().parents[2] / "packages" / "hixl" / "src"
CASE = case_of("pull", 64 << 10, 8, MEMORY)

pytestmark = pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler for the limit's loops")


@pytest.fixture(params=["pool"])
def pair(request, tmp_path, monkeypatch):
    path = os.pathsep.join([str(HIXL), *filter(None, [os.environ.get("PYTHONPATH")])])
    monkeypatch.setenv("PYTHONPATH", path)
    made = Pair(PEERS["ours", request.param], Pattern(MEMORY), str(tmp_path))
    yield made
    made.end()


def measured(tmp_path, group):
    """Measure one group with ours and one peer, which may be missing. Return all rows, and those of ours."""
    program = Path(__file__).resolve().parents[2] / "benches" / "peers"
    words = ["--quick", "--only", group, "--systems", "ucxx", "--rounds", "1", "--mib", "4", "--out", str(tmp_path)]
    subprocess.run([sys.executable, str(program), *words], check=True, timeout=300)  # noqa: S603  (this benchmark)
    rows = json.loads((tmp_path / "peers.json").read_text())["rows"]
    ours = [row for row in rows if row["system"] == "ours"]
    assert all("median" in row for row in ours)
    return rows, ours


def test_pulls_and_pushes_end_to_end(tmp_path):
    rows, ours = measured(tmp_path, "between")
    cells = {(row["op"], row["block_bytes"], row["blocks"]) for row in ours}
    lists = [(16 << 10, 64), (16 << 10, 256), (256 << 10, 16)]
    assert cells == {(op, *which) for op in ("pull pool", "push pool", "pull registered") for which in lists}
    # Every row has a ratio to the limit, and its bytes were verified.
    assert all(row["limit_ratio"] > 0 and row["verified"] for row in ours)
    absent = [row for row in rows if row["system"] == "ucxx"]
    assert absent, "a peer that was asked for has a row"
    assert all("median" in row or row["note"] for row in absent)


def test_pulls_between_layouts_end_to_end(tmp_path):
    _, ours = measured(tmp_path, "layouts")
    assert {row["op"] for row in ours} == {f"pull pool, {its[0].name}" for its in MOVES.values()}
    assert {row["block_bytes"] for row in ours} == {256, 4 << 10, 16 << 10}
    assert all(row["verified"] for row in ours)


@pytest.mark.parametrize(
    "move", [move for its in MOVES.values() for move in its], ids=lambda it: f"{it.name} {it.piece}"
)
def test_the_pieces_of_a_sequence_put_every_head_where_its_layout_has_it(move):
    """The model: each rank is an array [tensor, block, token, head], stored as its layout says."""
    case = sequence_of(move, 2, 8 << 20, 2 << 20)
    heads = max(move.local.end, *(owner.end for owner in move.owners))
    model = np.arange(2 * case.rows * move.local.tokens * heads).reshape(2, case.rows, move.local.tokens, heads)

    def stored(rank, values):
        mine = values[..., rank.first : rank.end]
        return (mine if rank.order == "NHD" else mine.swapaxes(2, 3)).ravel()

    remote = np.concatenate([stored(owner, model) for owner in move.owners]).reshape(-1, move.piece // HEAD)
    local = np.full(2 * case.rows * move.local.block_bytes // HEAD, -1).reshape(-1, move.piece // HEAD)
    local[case.dst] = remote[case.src]
    expected = np.full_like(model, -1)
    expected[:, case.dst_blocks] = model[:, case.src_blocks]
    assert len(case.src_blocks) > 0
    assert np.array_equal(local.ravel(), stored(move.local, expected))
    again = case.anew()
    assert np.array_equal(again.src, case.src)
    assert np.array_equal(again.dst, case.dst)


def test_small_requests_end_to_end(tmp_path):
    rows, ours = measured(tmp_path, "small")
    calls = [row for row in rows if row["op"].startswith("pull pool ") and "median" in row]
    for system in ("ours", "limit"):
        found = sorted(row["op"] for row in calls if row["system"] == system)
        assert found == [f"pull pool {figure}" for figure in ("p50", "p99", "slowest")]
    assert all(row["limit_ratio"] > 0 and row["verified"] for row in calls)
    # The limit is named by its loop, which is the same for all three.
    (loop,) = {row["setting"] for row in calls if row["system"] == "limit"}
    assert loop.startswith("mapped ")
    assert loop.split(" x")[-1] in ("1", "2")
    steps = {row["op"]: row for row in ours if row["unit"] == "ms"}
    assert steps["prepare 15,000 segments"]["note"]
    assert "ratio" not in steps["prepare 15,000 segments"]
    assert steps["ask for and move them"]["verified"]


def test_standing_costs_end_to_end(tmp_path):
    _, ours = measured(tmp_path, "standing")
    assert {"import", "link", "idle CPU of both, linked", "peak memory, local"} <= {row["op"] for row in ours}
    # No bytes are moved that could be verified.
    assert not any(row.get("verified") for row in ours)


def test_faults_end_to_end(tmp_path):
    _, ours = measured(tmp_path, "faults")
    faults = {row["op"]: row["note"] for row in ours}
    assert len(faults) == 4
    assert all(row["verified"] for row in ours)
    assert all("a pull is right again" in note for note in faults.values()), faults
    assert ["clocked beside another pair" in note for op, note in faults.items() if "stopped" in op] == [True, True]
    assert not any("clocked beside" in note for op, note in faults.items() if "killed" in op)


def test_a_wrong_byte_and_a_stray_one_are_found():
    class Unlinked(Adapter):
        def open(self):
            self.memory = self.plain(self.size)

        hello = link = request = None

    pattern = np.arange(MEMORY // 8, dtype=np.int64)
    side = Unlinked("", "local", MEMORY, Limit(), pattern)
    side.poison_all()
    words, rows = side.memory.reshape(-1, CASE.block // 8), pattern.reshape(-1, CASE.block // 8)
    for src, dst in zip(CASE.src, CASE.dst):
        words[dst] = rows[src]
    assert (side.wrong(CASE), side.strays(CASE)) == ("", "")
    words[CASE.dst[3], 77] ^= 1
    assert side.wrong(CASE) == "block 3 of 8"
    words[CASE.dst[3], 77] ^= 1
    other = next(row for row in range(len(words)) if row not in CASE.dst)
    words[other, 5] = 0
    assert (side.wrong(CASE), side.strays(CASE)) == ("", "1 words written that nobody asked for")
    side.poison(CASE)
    assert (words[CASE.dst] == POISON).all()
    assert side.wrong(CASE) == "block 0 of 8"


@pytest.mark.parametrize("pair", ["pool", "registered", "hixl", "hixl-tcp"], indirect=True)
@pytest.mark.parametrize("op", ["pull", "push"])
def test_a_transfer_is_checked_where_it_arrives(pair, op):
    pair.lay(case_of(op, 64 << 10, 8, MEMORY))
    target = pair.destination(op)
    assert op == "pull" or target.role == "remote"
    target.do("poison")
    assert target.do("wrong") == "block 0 of 8"
    assert pair.timed("go", "", times=1) > 0
    assert (target.do("wrong"), target.do("strays")) == ("", "")


def test_a_side_that_dies_is_said(pair):
    remote, _ = pair.both
    remote.signal(signal.SIGKILL)
    with pytest.raises(Failed, match="the remote side ended by SIGKILL"):
        pair.lay(CASE)
