"""The replay command: trace reader and maker, block table against a naive twin, contents, the channel between its two
processes, whole replays, and what becomes of them when the prefill process dies, hangs, lies or leaks.

Tests marked with `public_trace` read ../shared/data/conversation_trace.jsonl beside the checkout and are
skipped, and counted as skipped, where it is absent.
"""

from __future__ import annotations

import json
import math
import os
import random
import re
import subprocess
import sys
import textwrap
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist.replay import prefill, report
from llm_datadist.replay.channel import Channel, ChannelError
from llm_datadist.replay.cli import main
from llm_datadist.replay.content import Pattern, Tail, flip
from llm_datadist.replay.geometry import Geometry
from llm_datadist.replay.node import Node
from llm_datadist.replay.table import BlockTable, Plan
from llm_datadist.replay.trace import Request, TraceError, describe, make_trace, read_trace
from llm_datadist.replay.worker import Setup

if TYPE_CHECKING:
    from collections.abc import Iterator

PUBLIC_TRACE = Path(__file__).resolve().parents[2] / "shared" / "data" / "conversation_trace.jsonl"
public_trace = pytest.mark.skipif(not PUBLIC_TRACE.exists(), reason="needs ../shared/data/conversation_trace.jsonl")

# 16 KiB a block, pools under pressure.
SMALL = ["--layers", "1", "--head-dim", "8", "--device-pool", "8MiB", "--host-pool", "20MiB", "--quiet"]


# -- made traces ---------------------------------------------------------------------------------------------


def test_made_trace_has_the_shape_of_the_public_one() -> None:
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
def test_public_trace_is_read_whole_and_the_made_one_is_near_it() -> None:
    public, made = (describe(trace) for trace in (read_trace(str(PUBLIC_TRACE)), make_trace(12_031, seed=3)))
    assert (public["requests"], public["block_references"], public["distinct_blocks"]) == (12_031, 288_500, 182_790)
    for name in ("block_references", "distinct_blocks", "most_blocks_in_a_request", "span_s"):
        assert math.isclose(public[name], made[name], rel_tol=0.06), name


@pytest.mark.parametrize("tokens", [16, 512, 4096])
def test_made_requests_are_well_formed(tokens: int) -> None:
    made = make_trace(400, seed=5, block_tokens=tokens)
    before: dict[int, int | None] = {}
    for request in made:
        assert len(request.blocks) == -(-request.input_tokens // tokens)
        assert len(set(request.blocks)) == len(request.blocks)
        for previous, block in zip((None, *request.blocks), request.blocks):
            assert before.setdefault(block, previous) == previous, "an id names one prefix"
    assert [request.arrival_ms for request in made] == sorted(request.arrival_ms for request in made)


def test_made_trace_depends_on_its_seed_alone() -> None:
    assert make_trace(50, seed=1) == make_trace(50, seed=1)
    assert make_trace(50, seed=1) != make_trace(50, seed=2)
    assert make_trace(50, seed=1) == make_trace(90, seed=1)[:50]


# -- trace files ---------------------------------------------------------------------------------------------

GOOD = {"timestamp": 3000, "input_length": 600, "output_length": 7, "hash_ids": [4, 9]}


def _write(folder: Path, *lines: object) -> str:
    path = folder / "trace.jsonl"
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return str(path)


def test_trace_file_is_read(tmp_path: Path) -> None:
    path = _write(tmp_path, GOOD, "", {**GOOD, "hash_ids": [4, 10], "extra": 1})
    assert read_trace(path) == [Request(3000, 600, 7, (4, 9)), Request(3000, 600, 7, (4, 10))]
    assert len(read_trace(path, limit=1)) == 1


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "not JSON"),
        ("[" * 100_000, "not"),
        ("[1]", "an object was expected, not list"),
        ({"timestamp": 1, "hash_ids": []}, "missing input_length, output_length"),
        ({**GOOD, "timestamp": -1}, "timestamp"),
        ({**GOOD, "timestamp": True}, "timestamp"),
        ({**GOOD, "timestamp": float("nan")}, "timestamp"),
        ({**GOOD, "timestamp": 2999}, "before the request above"),
        ({**GOOD, "input_length": 0}, "input_length"),
        ({**GOOD, "input_length": 600.0}, "input_length"),
        ({**GOOD, "output_length": -1}, "output_length"),
        ({**GOOD, "hash_ids": [4]}, "1 hash_ids, but input_length 600 takes 2"),
        ({**GOOD, "hash_ids": [4, 5, 6]}, "3 hash_ids, but input_length 600 takes 2"),
        ({**GOOD, "hash_ids": {"4": 5}}, "hash_ids must be a list"),
        ({**GOOD, "hash_ids": [4, "5"]}, "a hash id must be an integer"),
        ({**GOOD, "hash_ids": [4, 2**62]}, "a hash id must be an integer"),
        ({**GOOD, "hash_ids": [4, 4]}, "stands twice"),
    ],
)
def test_trace_error_names_file_line_and_reason(tmp_path: Path, line: object, reason: str) -> None:
    path = _write(tmp_path, GOOD, line)
    with pytest.raises(TraceError) as caught:
        read_trace(path)
    assert str(caught.value).startswith(f"{path}:2: ")
    assert reason in str(caught.value)


def test_unreadable_traces_are_refused(tmp_path: Path) -> None:
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff\xfe")
    for path in (_write(tmp_path), str(tmp_path / "absent"), str(tmp_path), str(binary)):
        with pytest.raises(TraceError, match=r"no request|absent|directory|codec"):
            read_trace(path)


# -- block table against a naive twin ------------------------------------------------------------------------


class Twin:
    """The same policy one block at a time, by scanning: ids and time stamps, no slots."""

    def __init__(self, device_slots: int, host_slots: int) -> None:
        self.device_slots, self.host_slots = device_slots, host_slots
        self.device: dict[int, int] = {}  # id -> time it became idle, 0 while referenced
        self.references: dict[int, int] = {}
        self.host: dict[int, int] = {}  # id -> time it came
        self.private = 0
        self.clock = 0

    def tick(self) -> int:
        self.clock += 1
        return self.clock

    def admit(self, blocks: list[int], private: int) -> tuple[set[int], set[int], set[int]] | None:
        """Return the ids swapped in, computed and gone; None when it does not fit."""
        pinned = {block for block in self.device if self.references.get(block)} | {
            b for b in blocks if b in self.device
        }
        new = [block for block in blocks if block not in self.device]
        if len(pinned) + len(new) + private + self.private > self.device_slots:
            return None
        for block in blocks:
            self.references[block] = self.references.get(block, 0) + 1
        swapped_in = {block for block in new if block in self.host}
        gone: set[int] = set()
        for _ in range(len(new) + private):
            used = len(self.device) + self.private
            if used == self.device_slots:
                gone |= self._swap_one_out(swapped_in)
            self.private += 1  # the slot just taken; shared ones are named below
        self.private -= len(new)
        for block in new:
            self.device[block] = 0
            self.host.pop(block, None)
        return swapped_in, set(new) - swapped_in, gone

    def _swap_one_out(self, kept: set[int]) -> set[int]:
        idle = [block for block in self.device if not self.references.get(block)]
        victim = min(idle, key=self.device.__getitem__)
        del self.device[victim]
        if len(self.host) < self.host_slots:
            self.host[victim] = self.tick()
            return set()
        candidates = [block for block in self.host if block not in kept]
        if not candidates:
            return {victim}
        oldest = min(candidates, key=self.host.__getitem__)
        del self.host[oldest]
        self.host[victim] = self.tick()
        return {oldest}

    def finish(self, blocks: list[int], private: int) -> None:
        for block in reversed(blocks):
            self.references[block] -= 1
            if not self.references[block]:
                self.device[block] = self.tick()
        self.private -= private


class Memory:
    """Slots that hold ids: carries plans out, so that a slot used too early shows as a wrong id."""

    def __init__(self, device_slots: int, host_slots: int) -> None:
        self.device: list[int | None] = [None] * device_slots
        self.host: list[int | None] = [None] * host_slots

    def carry_out(self, plan: Plan) -> None:
        for block, source, target in plan.swap_out:
            assert self.device[source] == block
            self.host[target] = block
        for block, source, target in plan.swap_in:
            assert self.host[source] == block
            self.device[target] = block
        for block, slot in plan.writes:
            self.device[slot] = block
        for slot in plan.private:
            self.device[slot] = None
        for block, slot in plan.hits:
            assert self.device[slot] == block


def _check_places(table: BlockTable, twin: Twin, memory: Memory, private: list[int]) -> None:
    device, host = table.cached()
    assert set(device) == set(twin.device)
    assert set(host) == set(twin.host)
    assert not set(device) & set(host), "a block lies in one place"
    slots = [*device.values(), *private]
    assert len(set(slots)) == len(slots) <= twin.device_slots, "a slot has one use"
    assert len(set(host.values())) == len(host) <= twin.host_slots
    for block, slot in device.items():
        assert memory.device[slot] == block
    for block, slot in host.items():
        assert memory.host[slot] == block


@pytest.mark.parametrize("seed", range(30))
def test_block_table_agrees_with_the_twin(seed: int) -> None:
    dice = random.Random(seed)  # noqa: S311
    device_slots, host_slots = dice.randint(4, 40), dice.randint(1, 60)
    ids = dice.choice([30, 80, 300])
    table, twin, memory = (
        BlockTable(device_slots, host_slots),
        Twin(device_slots, host_slots),
        Memory(device_slots, host_slots),
    )
    running: list[tuple[list[int], list[int]]] = []
    refused = gone_in_all = 0
    for _ in range(300):
        if running and dice.random() < 0.45:
            blocks, own = running.pop(dice.randrange(len(running)))
            table.release(blocks, own)
            twin.finish(blocks, len(own))
        else:
            start = dice.randrange(ids)
            blocks = [(start + step) % ids for step in range(dice.randint(1, min(12, ids)))]
            private = dice.randint(0, 3)
            plan, expected = table.plan(blocks, private), twin.admit(blocks, private)
            assert (plan is None) == (expected is None)
            if plan is None or expected is None:
                refused += 1
            else:
                memory.carry_out(plan)
                assert {move[0] for move in plan.swap_in} == expected[0]
                assert {move[0] for move in plan.writes} == expected[1]
                assert {*plan.evicted, *plan.dropped} == expected[2]
                assert len(plan.private) == private
                assert sorted(b for b, *_ in (*plan.hits, *plan.swap_in, *plan.writes)) == sorted(blocks)
                running.append((blocks, plan.private))
                gone_in_all += len(expected[2])
        _check_places(table, twin, memory, [slot for _, own in running for slot in own])
    assert refused or gone_in_all, "the pools must have been under pressure"


def test_oldest_blocks_leave_first_and_prefixes_last() -> None:
    table = BlockTable(4, 2)
    for blocks in ([1, 2], [3, 4]):
        assert table.plan(blocks, 0) is not None
        table.release(blocks, [])
    plan = table.plan([5], 0)
    assert plan is not None
    assert [move[0] for move in plan.swap_out] == [2], "the end of the oldest chain goes first"
    plan = table.plan([6, 7], 0)
    assert plan is not None
    assert {move[0] for move in plan.swap_out} == {1, 4}
    assert plan.evicted == [2]
    assert table.plan([1, 2, 3], 0) is None, "only the block 3 is idle"


# -- contents ------------------------------------------------------------------------------------------------


def test_every_wrong_byte_is_found() -> None:
    pattern = Pattern(tensors=3, row_bytes=64, seed=1)
    rows = [np.zeros((4, 8), dtype=np.uint64) for _ in range(3)]
    pattern.fill(rows, 2, 77)
    assert pattern.mismatch(rows, 2, 77) is None
    for tensor in range(3):
        for offset in range(64):
            flip(rows, 2, tensor, offset)
            wrong = pattern.mismatch(rows, 2, 77)
            assert wrong is not None
            assert (wrong.tensor, wrong.offset, wrong.expected ^ wrong.got) == (tensor, offset, 0x40)
            flip(rows, 2, tensor, offset)
    assert pattern.mismatch(rows, 2, 77) is None
    assert pattern.mismatch(rows, 2, 78) is not None
    rows[0], rows[1] = rows[1], rows[0]
    assert pattern.mismatch(rows, 2, 77) is not None


def test_tail_changes_its_bytes_and_no_other() -> None:
    pattern = Pattern(tensors=2, row_bytes=64, seed=1)
    rows = [np.zeros((1, 8), dtype=np.uint64) for _ in range(2)]
    pattern.fill(rows, 0, 5)
    before = [tensor.view(np.uint8).copy() for tensor in rows]
    tail = Tail(10, 30, salt=200)
    pattern.append(rows, 0, tail)
    for old, tensor in zip(before, rows):
        changed = np.flatnonzero(old[0] != tensor.view(np.uint8)[0])
        assert list(changed) == list(range(10, 30))
    assert pattern.mismatch(rows, 0, 5, tail) is None
    wrong = pattern.mismatch(rows, 0, 5)
    assert wrong is not None
    assert (wrong.tensor, wrong.offset) == (0, 10)


# -- the channel ---------------------------------------------------------------------------------------------


@pytest.fixture
def pipes() -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Two pipes: (reading, writing) descriptors of each."""
    both = os.pipe(), os.pipe()
    yield both
    for descriptor in (*both[0], *both[1]):
        try:
            os.close(descriptor)
        except OSError:  # noqa: PERF203  (a test closed it)
            assert descriptor >= 0


Pipes = tuple[tuple[int, int], tuple[int, int]]


def test_two_ends_that_both_write_do_not_wait_for_each_other(pipes: Pipes) -> None:
    (to_left, from_right), (to_right, from_left) = pipes
    left, right = Channel(to_left, from_left), Channel(to_right, from_right)
    large = {"text": "x" * 2**20}
    received: list[object] = []

    def exchange(channel: Channel) -> None:
        channel.send(large, 20.0)
        received.append(channel.receive(20.0))

    other = threading.Thread(target=exchange, args=(left,))
    other.start()
    exchange(right)
    other.join()
    assert received == [large, large]


def test_messages_are_taken_apart(pipes: Pipes) -> None:
    (reading, writing), (_, other) = pipes
    channel = Channel(reading, other)
    os.write(writing, b'{"a":1}\n{"b":2}\n{"c"')
    assert [channel.receive(5.0), channel.receive(5.0)] == [{"a": 1}, {"b": 2}]
    os.write(writing, b":3}\n")
    assert channel.receive(5.0) == {"c": 3}


def test_waits_for_the_other_process_are_bounded(pipes: Pipes) -> None:
    (reading, _), (_, writing) = pipes
    channel = Channel(reading, writing)
    with pytest.raises(ChannelError, match=r"did not answer within 0.05 s"):
        channel.receive(0.05)
    with pytest.raises(ChannelError, match=r"took no message within 0.05 s"):
        channel.send({"text": "x" * 2**20}, 0.05)


@pytest.mark.parametrize("line", [b"[1]\n", b"{\n", b"\xff\n", b"\n"])
def test_what_is_no_message_is_refused(pipes: Pipes, line: bytes) -> None:
    (reading, writing), (_, other) = pipes
    os.write(writing, line)
    with pytest.raises(ChannelError, match="sent an invalid message"):
        Channel(reading, other).receive(5.0)


def test_end_of_the_other_process_is_seen(pipes: Pipes) -> None:
    (reading, writing), (to_other, from_here) = pipes
    channel = Channel(reading, from_here)
    os.write(writing, b'{"half')
    os.close(writing)
    os.close(to_other)
    with pytest.raises(ChannelError, match="closed the channel"):
        channel.receive(5.0)
    with pytest.raises(ChannelError, match=r"closed the channel \(Broken pipe\)"):
        channel.send({}, 5.0)


# -- whole replays -------------------------------------------------------------------------------------------


def _replay(tmp_path: Path, *options: str) -> dict[str, Any]:
    path = tmp_path / "results.json"
    status = main([*SMALL, "--json", str(path), *options])
    assert status in (0, 3)
    found: dict[str, Any] = json.loads(path.read_text())
    assert status == (3 if found["requests_too_large"] else 0)
    return found


@pytest.mark.parametrize(
    "options",
    [
        [],
        ["--device-pool", "6MiB", "--host-pool", "9MiB"],
        ["--device-pool", "6MiB", "--host-pool", "16KiB"],
        ["--dtype", "bfloat16", "--swap-in", "direct", "--workers", "1"],
        ["--dtype", "float32", "--swap-in", "ring", "--workers", "2", "--device-pool", "14MiB"],
        ["--dtype", "int8", "--layers", "3", "--heads", "2", "--head-dim", "3", "--concurrency", "1"],
        ["--dtype", "int8", "--block-tokens", "24", "--head-dim", "7", "--requests", "80", "--device-pool", "2MiB"],
        ["--transport", "tcp"],
        ["--block-tokens", "128", "--concurrency", "64", "--seed", "9"],
    ],
)
def test_replay_ends_with_every_byte_right(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], options: list[str]
) -> None:
    found = _replay(tmp_path, "--requests", "150", *options)
    blocks, calls, other = found["blocks"], found["calls"], found["prefill"]
    setting, requests = found["setting"], found["requests"]
    assert found["leaked_bytes"] == other["leaked_bytes"] == other["keys"] == 0
    assert requests == (80 if "--requests" in options else 150)
    assert blocks["device_hits"] > 0
    assert blocks["diverged"] > 0
    assert calls["swap out"]["blocks"] > 0
    assert calls["swap in"]["blocks"] == blocks["host_hits"]
    engine = found["engine"]
    for ours, its in (("swap in", "swap_in"), ("swap out", "swap_out"), ("copy blocks", "copy_blocks")):
        assert calls[ours]["bytes"] == engine["ops"][its]["bytes"], "counted on both sides"
    assert calls["pull blocks"]["blocks"] == other["computed"] == blocks["computed"] > 0
    pulled = calls["pull blocks"]["bytes"] + calls["pull cache"]["bytes"]
    assert pulled == engine["ops"]["pull"]["bytes"] == other["link"]["transfers"]["bytes"]
    served = {calls[name]["calls"] for name in ("allocate cache", "free cache", "pull cache")}
    assert served == {requests - found["requests_too_large"]}
    assert other["link"]["transport"] == ("tcp" if "tcp" in options else "shm")
    assert other["restarts"] == []
    if not found["requests_too_large"]:
        total = blocks["device_hits"] + blocks["host_hits"] + blocks["computed"]
        assert total == setting["block_references"]
    text = capsys.readouterr().out
    for shown in (
        "bytes are scaled 1 : ",
        "swapped in from host",
        "pulled from prefill",
        "\npull blocks ",
        "\ntransport ",
    ):
        assert shown in text


def test_blocks_come_back_from_the_host(tmp_path: Path) -> None:
    found = _replay(tmp_path, "--host-pool", "60MiB", "--requests", "300")
    blocks = found["blocks"]
    assert blocks["host_hits"] > 500


def test_requests_larger_than_the_device_are_counted(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = _replay(tmp_path, "--device-pool", "1MiB", "--requests", "100")
    too_large = found["requests_too_large"]
    assert 0 < too_large < 100
    said = capsys.readouterr()
    assert f"{too_large} NOT SERVED: larger than the device pool" in said.out
    needed, size = found["largest_request_blocks"], re.search(r"use --device-pool (\d+MiB) or more", said.err)
    assert f"NOT SERVED: {too_large} of 100 requests, because the device pool is too small" in said.err
    assert f"needs {needed} blocks, and the pool has {found['setting']['device_blocks']};" in said.err
    assert size
    assert _replay(tmp_path, "--device-pool", size[1], "--requests", "100")["requests_too_large"] == 0


@pytest.mark.parametrize("pool", range(600_000, 700_000, 7001))
def test_device_bytes_is_the_inverse_of_device_blocks(pool: int) -> None:
    shape = Geometry(layers=2, heads=1, head_dim=8, dtype="float16", tokens=24)
    blocks = shape.device_blocks(pool, 4)
    assert blocks > 0
    smallest = shape.device_bytes(blocks, 4)
    assert smallest <= pool
    assert shape.device_blocks(smallest, 4) >= blocks
    assert shape.device_blocks(shape.device_bytes(blocks + 1, 4), 4) >= blocks + 1


def test_json_goes_to_standard_output_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*SMALL, "--requests", "20", "--json", "-"]) == 0
    said = capsys.readouterr()
    assert json.loads(said.out)["requests"] == 20
    assert "pulled from prefill" in said.err


@pytest.mark.parametrize(
    ("hit", "pools"), [(1, []), (700, ["--device-pool", "6MiB"]), (701, ["--device-pool", "6MiB"])]
)
def test_one_wrong_byte_ends_the_replay(capsys: pytest.CaptureFixture[str], hit: int, pools: list[str]) -> None:
    assert main([*SMALL, "--requests", "200", *pools, "--corrupt-at", str(hit)]) == 1
    said = capsys.readouterr()
    assert "WRONG BYTE: request " in said.err
    assert "tensor 1, first wrong byte at offset 4099: expected 0x" in said.err
    assert said.out == ""


@pytest.mark.parametrize("pulled", [1, 900])
def test_one_wrong_byte_in_a_pulled_block_ends_the_replay(capsys: pytest.CaptureFixture[str], pulled: int) -> None:
    assert main([*SMALL, "--requests", "100", "--corrupt-pulled-at", str(pulled)]) == 1
    said = capsys.readouterr()
    assert "WRONG BYTE: request " in said.err
    assert "(pulled, slot " in said.err
    assert "tensor 1, first wrong byte at offset 4099: expected 0x" in said.err


def test_wrong_byte_on_the_host_is_found_after_the_swap(capsys: pytest.CaptureFixture[str]) -> None:
    tiers = set()
    for hit in range(600, 800, 20):
        assert main([*SMALL, "--requests", "300", "--device-pool", "6MiB", "--corrupt-at", str(hit)]) == 1
        tiers.add(capsys.readouterr().err.split("(")[1].split(",")[0])
    assert tiers == {"device", "host"}


def test_trace_file_is_replayed_by_the_command(tmp_path: Path) -> None:
    path = _write(tmp_path, GOOD, {**GOOD, "timestamp": 9000, "hash_ids": [4, 11]})
    command = [sys.executable, "-m", "llm_datadist", "replay", path, "--layers", "1", "--host-pool", "8MiB"]
    done = subprocess.run(  # noqa: S603
        command, capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    assert "hit on device                 1" in done.stdout
    done = subprocess.run(  # noqa: S603
        [*command, "--corrupt-at", "1"], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 1
    assert "request 1: block 4 (device" in done.stderr


# -- a prefill process that fails ----------------------------------------------------------------------------


def _faulty(monkeypatch: pytest.MonkeyPatch, fault: str) -> None:
    """Start prefill processes whose `compute(self, number, blocks)` is the one in `fault`; `real` is the right one."""
    start = "import os, signal, sys, time; from pathlib import Path; from llm_datadist.replay import content, worker"
    script = [start, "real, stage = worker.Worker._compute, worker.Worker._stage", textwrap.dedent(fault)]
    script += ["worker.Worker._compute = compute", "sys.exit(worker.main())"]
    monkeypatch.setattr(prefill, "COMMAND", [sys.executable, "-c", "\n".join(script)])


@pytest.mark.parametrize(("at", "options"), [("1", []), ("half", []), ("100", ["--transport", "tcp"])])
def test_killed_prefill_is_replaced_in_the_middle_of_a_pull(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], at: str, options: list[str]
) -> None:
    found = _replay(tmp_path, "--requests", "120", "--kill-prefill-at", at, *options)
    request = {"1": 1, "half": 60, "100": 100}[at]
    said = capsys.readouterr()
    (restart,) = found["prefill"]["restarts"]
    assert restart["request"] == request
    assert restart["ended"] == "it was killed by signal 9 (SIGKILL), exit status -9"
    assert restart["code"] == "LLM_NOT_YET_LINK"
    assert restart["gap_ms"] > 0
    assert found["leaked_bytes"] == found["prefill"]["leaked_bytes"] == found["prefill"]["keys"] == 0
    assert found["calls"]["pull blocks"]["blocks"] >= found["blocks"]["computed"]
    assert found["prefill"]["computed"] >= found["blocks"]["computed"]
    assert f"prefill: lost at request {request}: it was killed by signal 9" in said.err
    assert "LLM_NOT_YET_LINK: " in said.err
    assert "restart 1 of at most 3" in said.err
    assert f"prefill: is back: request {request} computed again and pulled " in said.err
    assert f"at request {request}: it was killed by signal 9" in said.out


def test_prefill_that_ends_by_itself_is_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ONCE", str(tmp_path / "once"))
    _faulty(
        monkeypatch,
        """
        def compute(self, number, blocks):
            once = Path(os.environ["ONCE"])
            if number == 50 and not once.exists():
                once.touch()
                os._exit(3)
            return real(self, number, blocks)
        """,
    )
    found = _replay(tmp_path, "--requests", "100")
    (restart,) = found["prefill"]["restarts"]
    assert restart["ended"] == "it ended with exit status 3"
    # The loss is seen while request 51 is waited for, or by the pull of the one before.
    assert restart["request"] in (50, 51)
    assert "closed the channel" in restart["reason"] or restart["code"] is not None
    assert found["prefill"]["leaked_bytes"] == 0
    assert "exit status 3; " in capsys.readouterr().err


@pytest.mark.parametrize("hang", ["os.kill(os.getpid(), signal.SIGSTOP)", "time.sleep(1000)"])
def test_prefill_that_hangs_is_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, hang: str) -> None:
    monkeypatch.setenv("ONCE", str(tmp_path / "once"))
    monkeypatch.setenv("HANG", hang)
    monkeypatch.setattr(prefill, "_GRACE_S", 0.1)
    _faulty(
        monkeypatch,
        """
        def compute(self, number, blocks):
            once = Path(os.environ["ONCE"])
            if number == 50 and not once.exists():
                once.touch()
                exec(os.environ["HANG"])
            return real(self, number, blocks)
        """,
    )
    found = _replay(tmp_path, "--requests", "100", "--prefill-limit", "2")
    restart = found["prefill"]["restarts"][0]
    assert restart["ended"] == "it did not end within 0.1 s and was killed by decode"
    # A stopped process may be missed first by the pull of the request before, which its engine cannot answer either.
    unanswered = "did not answer within 2 s" in restart["reason"]
    assert unanswered or ("SIGSTOP" in hang and restart["code"] is not None)
    assert found["prefill"]["leaked_bytes"] == 0


def test_prefill_that_always_dies_is_given_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    _faulty(
        monkeypatch,
        """
        def compute(self, number, blocks):
            if number == 20:
                os._exit(7)
            return real(self, number, blocks)
        """,
    )
    assert main([*SMALL, "--requests", "100"]) == 1
    said = capsys.readouterr().err
    assert said.count("; restart ") == 3
    assert "replay: the prefill process failed: lost at request " in said
    assert said.rstrip().endswith("given up after 3 restarts")


@pytest.mark.parametrize(
    ("script", "reason"),
    [
        ("import time; time.sleep(60)", "it did not answer within 0.5 s; it did not end within 0.1 s and was killed"),
        ("raise SystemExit(5)", "it closed the channel; it ended with exit status 5"),
        ("print('{}', flush=True); input()", "it sent an invalid message: b'{}'"),
        ("print('hello', flush=True); input()", "it sent an invalid message: b'hello'; it ended with exit status"),
    ],
)
def test_prefill_that_does_not_start_ends_the_replay(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], script: str, reason: str
) -> None:
    monkeypatch.setattr(prefill, "COMMAND", [sys.executable, "-c", script])
    if "sleep" in script:
        monkeypatch.setattr(prefill, "START_LIMIT_S", 0.5)
        monkeypatch.setattr(prefill, "_GRACE_S", 0.1)
    assert main([*SMALL, "--requests", "20", "--prefill-limit", "0.5"]) == 1
    said = capsys.readouterr().err
    assert f"replay: the prefill process failed: it did not start: {reason}" in said


@pytest.mark.parametrize(
    ("fault", "reason"),
    [
        (
            """
            def compute(self, number, blocks):
                slots = real(self, number, blocks)
                if slots and number >= 30:
                    content.flip(self._rows, slots[-1], 1, 77)
                return slots
            """,
            "(pulled, slot ",
        ),
        (
            """
            def compute(self, number, blocks):
                return [slot + 1 if number == 30 else slot for slot in real(self, number, blocks)]
            """,
            "(pulled, slot ",
        ),
        (
            """
            def compute(self, number, blocks):
                self._staging_pattern = content.Pattern(2, 256, 99)
                return real(self, number, blocks)
            """,
            "staging cache: ",
        ),
    ],
)
def test_wrong_bytes_of_prefill_are_found(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], fault: str, reason: str
) -> None:
    _faulty(monkeypatch, fault)
    assert main([*SMALL, "--requests", "100"]) == 1
    said = capsys.readouterr()
    assert "replay: WRONG BYTE: request " in said.err
    assert reason in said.err
    assert said.out == ""


def test_leak_of_prefill_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    _faulty(
        monkeypatch,
        """
        def compute(self, number, blocks):
            if number == 7:
                stage(self, 10_000)  # under a key that nobody pulls
            return real(self, number, blocks)
        """,
    )
    assert main([*SMALL, "--requests", "30"]) == 1
    assert "replay: LEAK: prefill: 8,192 bytes in use after all was freed" in capsys.readouterr().err


def test_leak_of_decode_is_found(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(Node, "close_staging", lambda _node, staging: staging.rows.clear())
    assert main([*SMALL, "--requests", "5"]) == 1
    assert "replay: LEAK: decode: 40,960 bytes in use after all was freed" in capsys.readouterr().err


def test_prefill_ends_with_its_input() -> None:
    shape = Geometry(layers=1, heads=1, head_dim=8, dtype="int8", tokens=512)
    setup = Setup(shape, 1, 4, shape.prefill_bytes(4), {"llm.LinkToken": "0123456789abcdef"})
    lines = json.dumps(setup.message()) + "\n" + json.dumps({"compute": 0, "blocks": [5, 6], "free": []}) + "\n"
    for given, answers in (("", 0), (lines, 2)):
        done = subprocess.run(  # noqa: S603
            prefill.COMMAND, input=given, capture_output=True, text=True, timeout=300, check=False
        )
        assert done.returncode == 1
        said = [json.loads(line) for line in done.stdout.splitlines()]
        assert len(said) == answers
    assert said[0]["address"].startswith("127.0.0.1:")
    assert said[1] == {"computed": 0, "slots": [0, 1], "total": 2}


@public_trace
def test_start_of_the_public_trace_is_replayed(tmp_path: Path) -> None:
    found = _replay(tmp_path, str(PUBLIC_TRACE), "--requests", "400", "--device-pool", "16MiB", "--host-pool", "80MiB")
    assert (found["requests"], found["requests_too_large"], found["leaked_bytes"]) == (400, 0, 0)


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        (["--device-pool", "12parsecs"], "'12parsecs' is not a size in bytes"),
        (["--device-pool", "0"], "is not a size in bytes"),
        (["--host-pool", "21GiB"], "of at most 20 GB"),
        (["--device-pool", "64KiB"], "--device-pool: 65,536 bytes do not hold one block"),
        (["--host-pool", "4KiB"], "--host-pool: 4,096 bytes do not hold one block"),
        (["--layers", "0"], "'0' is not a whole number from 1 to 1,024"),
        (["--layers", "-1"], "--layers"),
        (["--heads", "2.5"], "'2.5' is not a whole number"),
        (["--head-dim", ""], "'' is not a whole number"),
        (["--requests", "0"], "'0' is not a whole number"),
        (["--workers", "257"], "'257' is not a whole number from 1 to 256"),
        (["--workers", "0"], "'0' is not a whole number from 1 to 256"),
        (["--dtype", "float8"], "invalid choice"),
        (["--swap-in", "fast"], "invalid choice"),
        (["--dtype", "int8", "--block-tokens", "1", "--head-dim", "1"], "must be a multiple of 8"),
        (["no-such-file.jsonl"], "no-such-file.jsonl"),
        (["any.jsonl", "--block-tokens", "16"], "a trace file has blocks of 512 tokens"),
        (["--json", "no-such-folder/results"], "--json: "),
        (["--kill-prefill-at", "0"], "'0' is not a whole number"),
        (["--kill-prefill-at", "21", "--requests", "20"], "--kill-prefill-at: the trace has only 20 requests"),
        (["--prefill-limit", "0"], "'0' is not a number of seconds"),
        (["--transport", "pigeon"], "invalid choice"),
        (["--no-such-option"], "unrecognized arguments"),
    ],
)
def test_unusable_options_exit_2(capsys: pytest.CaptureFixture[str], options: list[str], reason: str) -> None:
    with pytest.raises(SystemExit) as caught:
        main(options)
    assert caught.value.code == 2
    assert reason in capsys.readouterr().err


# -- report --------------------------------------------------------------------------------------------------


def test_scale_is_that_of_the_real_model() -> None:
    assert report.REAL_BYTES_PER_TOKEN == 327_680
    shape = Geometry(layers=4, heads=1, head_dim=16, dtype="float16", tokens=512)
    assert shape.block_bytes == 128 * 1024
    assert report.scale(shape) == 1280
    assert report.scale(Geometry(80, 8, 128, "bfloat16", 512)) == 1


def test_default_pool_holds_the_largest_request_of_the_public_trace() -> None:
    shape = Geometry(layers=4, heads=1, head_dim=16, dtype="float16", tokens=512)
    assert shape.device_blocks(160 * 2**20, staging_caches=16) > 247 + 5


class Screen:
    """A stream that keeps what was written."""

    def __init__(self, terminal: bool) -> None:
        self.terminal = terminal
        self.text: list[str] = []

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> None:
        self.text.append(text)

    def flush(self) -> None:
        pass


@pytest.mark.parametrize("columns", [20, 80, 300])
def test_bar_fits_the_terminal(monkeypatch: pytest.MonkeyPatch, columns: int) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    now = [100.0]
    monkeypatch.setattr("llm_datadist.replay.report.time.monotonic", lambda: now[0])
    screen = Screen(terminal=True)
    progress = report.Progress(12_000, screen, False)  # type: ignore[arg-type]
    now[0] += 1
    progress(6_000, 120_000)
    (text,) = screen.text
    line = text[1:].removesuffix("\x1b[K")
    assert len(line) < columns
    assert line.startswith(("[#", "decode: 6,000/"))
    assert ("[##########..........] decode: 6,000/12,000" in line) == (columns == 300)


@pytest.mark.parametrize(("terminal", "quiet", "most"), [(True, False, 12), (False, False, 1), (True, True, 0)])
def test_progress_is_rare(monkeypatch: pytest.MonkeyPatch, terminal: bool, quiet: bool, most: int) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    now = [100.0]
    monkeypatch.setattr("llm_datadist.replay.report.time.monotonic", lambda: now[0])
    screen = Screen(terminal)
    progress = report.Progress(1000, screen, quiet)  # type: ignore[arg-type]
    for done in range(1, 1001):
        now[0] += 0.001 if terminal else 0.006
        progress(done, done * 20)
    progress.close()
    assert len(screen.text) <= most
    assert bool(screen.text) == (most > 0)
    for text in screen.text[:-1] if terminal else screen.text:
        assert "decode: " in text
        assert " requests, " in text
        assert "prefill: " in text
        assert " blocks computed" in text


def test_news_are_shown_even_when_quiet() -> None:
    screen = Screen(terminal=True)
    report.Progress(10, screen, True).tell("prefill is gone")  # type: ignore[arg-type]
    assert "".join(screen.text) == "replay: prefill is gone\n"
