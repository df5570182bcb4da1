"""The parts of the replay command: traces, block table, contents."""

import itertools
import json
import math
from pathlib import Path

import numpy as np
import pytest

from llm_datadist.commands.replay.content import Pattern
from llm_datadist.commands.replay.node import Node
from llm_datadist.commands.replay.serve import Server
from llm_datadist.commands.replay.table import BlockTable
from llm_datadist.commands.replay.trace import Request, TraceError, describe, make_trace, read_trace

PUBLIC_TRACE = Path(__file__).resolve().parents[2] / "shared" / "data" / "conversation_trace.jsonl"
public_trace = pytest.mark.shared_documents


def test_made_trace_has_the_shape_of_the_public_one():
    made = make_trace(6000, seed=1)
    found = describe(made)
    lengths = sorted(request.input_tokens for request in made)
    assert 22 < found["block_references"] / len(made) < 27
    assert 0.32 < 1 - found["distinct_blocks"] / found["block_references"] < 0.42
    assert 200 < found["most_blocks_in_a_request"] <= 247
    assert sum(request.input_tokens % 512 != 0 for request in made) / len(made) > 0.99
    assert 5000 < lengths[3000] < 8500
    assert 24000 < lengths[5400] < 32000
    assert min(request.output_tokens for request in made) >= 1


@public_trace
def test_public_trace_is_read_whole_and_the_made_one_is_near_it():
    public, made = (describe(trace) for trace in (read_trace(str(PUBLIC_TRACE)), make_trace(12_031, seed=3)))
    assert (public["requests"], public["block_references"], public["distinct_blocks"]) == (12_031, 288_500, 182_790)
    for name in ("block_references", "distinct_blocks", "most_blocks_in_a_request", "span_s"):
        assert math.isclose(public[name], made[name], rel_tol=0.06), name


@pytest.mark.parametrize("tokens", [16, 512, 4096])
def test_made_requests_are_well_formed(tokens):
    made = make_trace(400, seed=5, block_tokens=tokens)
    before = {}
    for request in made:
        assert len(request.blocks) == -(-request.input_tokens // tokens)
        assert len(set(request.blocks)) == len(request.blocks)
        for previous, block in zip((None, *request.blocks), request.blocks):
            assert before.setdefault(block, previous) == previous, "an id names one prefix"
    assert [request.arrival_ms for request in made] == sorted(request.arrival_ms for request in made)
    assert make_trace(50, seed=5, block_tokens=tokens) == made[:50] != make_trace(50, seed=2, block_tokens=tokens)


GOOD = {"timestamp": 3000, "input_length": 600, "output_length": 7, "hash_ids": [4, 9]}


def write_trace(folder, *lines):
    path = folder / "trace.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def test_trace_file_is_read(tmp_path):
    path = write_trace(tmp_path, GOOD, "", {**GOOD, "hash_ids": [4, 10], "extra": 1})
    assert read_trace(path) == [Request(3000, 600, 7, (4, 9)), Request(3000, 600, 7, (4, 10))]
    assert len(read_trace(path, limit=1)) == 1


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not"),
        ("[1]", "an object was expected, not list"),
        ({"timestamp": 1, "hash_ids": []}, "missing input_length, output_length"),
        *[({**GOOD, "timestamp": bad}, "timestamp") for bad in (-1, True, float("nan"))],
        ({**GOOD, "timestamp": 2999}, "before the request above"),
        *[({**GOOD, "input_length": bad}, "input_length") for bad in (0, 600.0)],
        ({**GOOD, "output_length": -1}, "output_length"),
        ({**GOOD, "hash_ids": [4]}, "1 hash_ids, but input_length 600 takes 2"),
        ({**GOOD, "hash_ids": [4, 5, 6]}, "3 hash_ids, but input_length 600 takes 2"),
        ({**GOOD, "hash_ids": {"4": 5}}, "hash_ids must be a list"),
        *[({**GOOD, "hash_ids": [4, bad]}, "a hash id must be an integer") for bad in ("5", 2**62)],
        ({**GOOD, "hash_ids": [4, 4]}, "contains an id twice"),
    ],
)
def test_trace_error_names_file_line_and_reason(tmp_path, line, reason):
    path = write_trace(tmp_path, GOOD, line)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert reason in str(caught.value)


def test_unreadable_traces_are_refused(tmp_path):
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    for path in (write_trace(tmp_path), str(tmp_path / "absent"), str(tmp_path), str(binary)):
        with pytest.raises(TraceError, match=r"no request|absent|directory|codec"):
            read_trace(path)


def test_oldest_blocks_leave_first_and_prefixes_last():
    table = BlockTable(4, 2)
    for blocks in ([1, 2], [3, 4]):
        table.plan(blocks, 0)
        table.release(blocks, [])
    plan = table.plan([5], 0)
    assert [move[0] for move in plan.swap_out] == [2], "the end of the oldest chain goes first"
    plan = table.plan([6, 7], 0)
    assert {move[0] for move in plan.swap_out} == {1, 4}
    assert plan.evicted == [2]
    assert table.plan([1, 2, 3], 0) is None, "only the block 3 is idle"


def flip(rows, slot, tensor, offset):
    """Change one byte of a slot."""
    rows[tensor][slot].view(np.uint8)[offset] ^= 0x40


def corrupt(monkeypatch, *, hit=0, pulled=0):
    """Have replays flip a byte of one hit, or of one pulled block, both counted from 1, before it is compared."""
    run_plan, pull = Server._run_plan, Node.pull

    def flip_one(rows_and_slots, index):
        if 0 <= index < len(rows_and_slots):
            flip(*rows_and_slots[index], tensor=1, offset=4099)

    def with_wrong_hit(self, number, plan):
        node, blocks = self._node, self.outcome.blocks
        rows_and_slots = [(node.device_rows, slot) for _, slot in plan.hits]
        rows_and_slots += [(node.host_rows, slot) for _, slot, _ in plan.swap_in]
        flip_one(rows_and_slots, hit - 1 - blocks["device_hits"] - blocks["host_hits"])
        run_plan(self, number, plan)

    def with_wrong_pull(self, peer, targets, *given, **more):
        before = self.calls["pull blocks"].blocks
        pull(self, peer, targets, *given, **more)
        flip_one([(self.device_rows, slot) for slot in targets], pulled - 1 - before)

    monkeypatch.setattr(Server, "_run_plan", with_wrong_hit)
    monkeypatch.setattr(Node, "pull", with_wrong_pull)


def zeros(tensors, rows):
    return [np.zeros((rows, 8), dtype=np.uint64) for _ in range(tensors)]


def test_every_wrong_byte_is_found():
    pattern, rows = Pattern(tensors=3, row_bytes=64, seed=1), zeros(3, 4)
    pattern.fill(rows, 2, 77)
    for tensor, offset in itertools.product(range(3), range(64)):
        assert pattern.mismatch(rows, 2, 77) is None
        flip(rows, 2, tensor, offset)
        wrong = pattern.mismatch(rows, 2, 77)
        assert (wrong.tensor, wrong.offset, wrong.expected ^ wrong.got) == (tensor, offset, 0x40)
        flip(rows, 2, tensor, offset)
    assert pattern.mismatch(rows, 2, 78) is not None
    rows[0], rows[1] = rows[1], rows[0]
    assert pattern.mismatch(rows, 2, 77) is not None
