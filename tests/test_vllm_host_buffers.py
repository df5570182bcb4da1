"""Prefill and decode with KV caches on a device, which goes through host buffers. The device does everything late.

The tests of the transfers run again here. A copy that does not wait for what comes before it moves other bytes.
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock, call

import numpy as np
import pytest

import test_vllm_transfers
from llm_datadist.integrations.vllm import host_buffers
from llm_datadist.integrations.vllm.host_buffers import Copy, HostBuffers
from llm_datadist.integrations.vllm.host_saves import HostSaves
from llm_datadist.integrations.vllm.step import Cancel, Part, Withdraw
from peers import LIMIT, eventually
from test_vllm_layerwise import (  # noqa: F401 - they run here again
    test_a_request_that_prefill_aborts_fails_the_receive,
    test_decode_reads_while_prefill_computes,
    test_late_decode_reads_computed_layers,
    test_model_failure_fails_receive,
    test_only_what_is_missing_is_read,
    test_preempted_request_is_read_again,
    test_preemption_during_pull_never_delivers_wrong_bytes,
    test_several_receives_with_one_ticket,
    test_step_without_end_does_not_complete_the_next_request,
)
from test_vllm_transfers import CASES, PROMPT, sides, whole
from vllm_device import FakeDevice

if TYPE_CHECKING:
    from collections.abc import Iterator

    from test_vllm_transfers import Side


@pytest.fixture(autouse=True)
def _host_buffers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(test_vllm_transfers.DEFAULTS, "host_buffers", True)


@pytest.mark.parametrize("case", CASES)
def test_decode_has_the_tokens_of_prefill(case: str) -> None:
    test_vllm_transfers.test_decode_has_the_tokens_of_prefill(case, "amx", 96)


TOKENS = 60
BLOCKS = [4, 5]


def computed(prefill: Side, ticket: str = "there", blocks: list[int] = BLOCKS) -> np.ndarray:
    """Compute a prompt of two blocks, and hand it over."""
    sequence = whole(2, TOKENS)
    for _ in range(20):  # the device has other things to do
        prefill.workers[0].write([3], range(1), sequence)
    prefill.workers[0].write(blocks, range(TOKENS), sequence)
    prefill.send(ticket, blocks)
    return sequence


@pytest.mark.parametrize("ranks", [(1, 1), (1, 2), (4, 1), (8, 2)])
def test_pages_with_the_heads_of_a_token_together(ranks: tuple[int, int]) -> None:
    """Ranks read the heads that they need, token by token."""
    sequence, blocks = whole(4, TOKENS), [6, 2]
    with sides({"ranks": ranks[0]}, {"ranks": ranks[1]}, heads=4, isa="NHD") as (prefill, decode):
        for worker in prefill.workers:
            worker.write(BLOCKS, range(TOKENS), sequence)
        prefill.send("there", BLOCKS)
        decode.receive(prefill.handover("there"), TOKENS, blocks=blocks)
        decode.received(sequence, blocks=blocks)


REFUSED: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "orders differ": ({"isa": "NHD"}, {"isa": "vec"}),
    "slots, other heads": ({"isa": "slots"}, {"isa": "slots", "ranks": 2}),
    "slots in other orders": ({"isa": "slots"}, {"isa": "slots NHD"}),
    "slots and heads": ({"isa": "slots"}, {"isa": "HND"}),
    "block sizes differ": ({"isa": "NHD"}, {"isa": "NHD", "block_size": 64}),
}


@pytest.mark.parametrize("case", REFUSED)
def test_pages_that_do_not_fit_are_refused(case: str) -> None:
    with sides(*REFUSED[case]) as (prefill, decode):
        prefill.send("there", BLOCKS)
        decode.receive(prefill.handover("there"), TOKENS)
        eventually(lambda: decode.all_ended("here", "failed"))
        assert all(worker.untouched(list(range(24))) for worker in decode.workers)


@pytest.mark.parametrize("isa", ["slots", "slots NHD"])
def test_pages_of_slots_are_read_whole(isa: str) -> None:
    with sides(isa=isa) as (prefill, decode):
        sequence = computed(prefill)
        decode.receive(prefill.handover("there"), TOKENS, blocks=[7, 8])
        decode.received(sequence, blocks=[7, 8])


@pytest.mark.parametrize("layers_per_read", [1, 8])
def test_layers_of_a_finished_prompt_are_copied_in_groups(layers_per_read: int) -> None:
    """Decode reads the first layers while the next ones are copied to host memory."""
    with sides(layers_per_read=layers_per_read) as (prefill, decode):
        prefill.workers[0].hold_copies("d2h")
        sequence = computed(prefill)
        decode.receive(prefill.handover("there"), TOKENS, blocks=[7, 8])
        time.sleep(0.1)
        assert not decode.workers[0].look().received
        prefill.workers[0].hold_copies("d2h", False)
        decode.received(sequence, blocks=[7, 8])
        prefill.frees()
        groups = [("layer 0",), ("layer 1",)] if layers_per_read == 1 else [("layer 0", "layer 1")]
        assert [copy[:2] for copy in prefill.workers[0].copies()] == [("d2h", group) for group in groups]
        assert {copy[0] for copy in decode.workers[0].copies()} == {"h2d"}


@pytest.mark.parametrize("layers_per_read", [1, 8])
def test_layers_of_a_copied_prompt_are_pulled_in_groups(layers_per_read: int) -> None:
    """The first layers go to the device of decode while the next ones are pulled."""
    with sides(layers_per_read=layers_per_read) as (prefill, decode):
        sequence = computed(prefill)
        groups = [("layer 0",), ("layer 1",)] if layers_per_read == 1 else [("layer 0", "layer 1")]
        eventually(lambda: len(prefill.workers[0].copies()) == len(groups) and not prefill.workers[0].saves())
        decode.receive(prefill.handover("there"), TOKENS, blocks=[7, 8])
        decode.received(sequence, blocks=[7, 8])
        assert [copy[:2] for copy in decode.workers[0].copies()] == [("h2d", group) for group in groups]


def test_save_that_takes_too_long_fails_the_receive() -> None:
    with sides({"timeout_ms": 300}) as (prefill, decode):
        prefill.workers[0].hold_copies("d2h")
        computed(prefill)
        decode.receive(prefill.handover("there"), TOKENS)
        decode.fails("its blocks were not copied to host memory within 0.3 s")
        prefill.frees()
        # The copy ends after another request has the same ticket.
        sequence = computed(prefill, blocks=[9, 10])
        prefill.workers[0].hold_copies("d2h", False)
        decode.receive(prefill.handover("there"), TOKENS, blocks=[7, 8], name="again")
        decode.received(sequence, name="again", blocks=[7, 8])
        assert decode.workers[0].look().failed == {"here"}


@pytest.mark.parametrize(
    ("side", "reason"),
    [(0, "its blocks were not copied to host memory"), (1, "it was not copied to the device")],
    ids=["save", "load"],
)
def test_failed_copy_fails_the_receive(side: int, reason: str) -> None:
    with sides() as (prefill, decode):
        (prefill, decode)[side].workers[0].fail_copies(RuntimeError("the device is broken"))
        computed(prefill)
        decode.receive(prefill.handover("there"), TOKENS)
        decode.fails(f"{reason}: the device is broken")
        prefill.frees()


@pytest.mark.parametrize("how", ["aborted", "late"])
def test_receive_that_has_failed_ends_when_no_copy_runs(how: str) -> None:
    """Another request may get the blocks then, so nothing may write to them."""
    with sides({}, {"timeout_ms": 300} if how == "late" else {}) as (prefill, decode):
        worker = decode.workers[0]
        worker.hold_copies("h2d")
        computed(prefill)
        decode.receive(prefill.handover("there"), TOKENS)
        eventually(worker.copies)
        if how == "aborted":
            decode.do(cancelled=[Cancel("here")])
        time.sleep(0.6)
        assert not worker.look().received
        worker.hold_copies("h2d", False)
        eventually(lambda: decode.all_ended("here", "received"))
        assert bool(worker.look().failed) == (how == "late")
        prefill.frees()


def test_receives_of_a_thread_that_has_ended_wait_for_its_copies() -> None:
    with sides() as (prefill, decode):
        worker = decode.workers[0]
        worker.hold_copies("h2d")
        computed(prefill)
        decode.receive(prefill.handover("there"), TOKENS)
        eventually(worker.copies)
        worker.break_thread()
        assert not worker.look().received
        worker.hold_copies("h2d", False)
        decode.fails("the transfer thread has ended")


def test_blocks_in_use_are_written_later() -> None:
    """The device still writes to the blocks for the request that had them before."""
    with sides() as (prefill, decode):
        sequence = computed(prefill)
        for _ in range(40):
            decode.workers[0].write([7, 8], range(TOKENS), np.zeros_like(sequence))
        decode.receive(prefill.handover("there"), TOKENS, blocks=[7, 8])
        decode.received(sequence, blocks=[7, 8])


def test_layers_in_another_order_are_saved_after_the_last_one() -> None:
    with sides(layers_per_read=1) as (prefill, decode):
        sequence = whole(2, TOKENS)
        decode.receive(prefill.handover("there"), TOKENS, blocks=[7, 8])
        prefill.do(parts=[Part("there", PROMPT, 0, 0, [BLOCKS], False, True)])
        for layer in (1, 0):
            prefill.workers[0].write(BLOCKS, range(TOKENS), sequence, range(layer, layer + 1))
            prefill.workers[0].layer_saved(layer)
        prefill.workers[0].step_saved()
        decode.received(sequence, blocks=[7, 8])


def test_withdrawn_prompt_is_not_copied_any_more() -> None:
    with sides() as (prefill, decode):
        worker = prefill.workers[0]
        worker.hold_copies("d2h")
        computed(prefill, "running", [1, 2])
        eventually(worker.copies)
        lent = Part("there", PROMPT, 0, 0, [BLOCKS], False, True)
        prefill.do(parts=[lent])
        worker.layer_saved(0)
        worker.layer_saved(1)
        worker.step_saved()
        eventually(lambda: worker.saves() == 2)
        prefill.do(withdrawn=[Withdraw("there", ended=True)])
        worker.hold_copies("d2h", False)
        sequence = computed(prefill, blocks=[9, 10])
        decode.receive(prefill.handover("there"), TOKENS, blocks=[7, 8])
        decode.received(sequence, blocks=[7, 8])
        assert not any(set(BLOCKS) & set(copy[2]) for copy in worker.copies())


@pytest.mark.parametrize("side", ["prefill", "decode"])
def test_worker_goes_on_when_its_copies_have_ended(side: str) -> None:
    """As when the transfer thread has ended: everything that was begun ends, and vLLM goes on."""
    with sides() as (prefill, decode):
        broken = (prefill if side == "prefill" else decode).workers[0]
        broken.fail_copies(SystemExit())
        computed(prefill)
        decode.receive(prefill.handover("there"), TOKENS)
        # The model's thread notices it, so both sides must ask.
        ends = (prefill, "there", "sent"), (decode, "here", "failed")
        eventually(lambda: all([side.all_ended(*what) for side, *what in ends]))  # noqa: C419 - each of them
        assert "a thread that copies between host memory and device has ended" in broken.lines()


def test_each_end_is_reported_once_when_copies_have_ended() -> None:
    """The transfer thread still runs a turn, in which it ends what the model's thread has reported."""
    with sides(test_vllm_transfers.LONG, test_vllm_transfers.LONG) as (prefill, decode):
        computed(prefill)
        decode.receive(prefill.handover("nobody"), TOKENS)
        eventually(prefill.workers[0].peers)
        eventually(lambda: len(prefill.workers[0].copies()) == 1)
        for worker in (prefill.workers[0], decode.workers[0]):
            worker.pause(True)
        prefill.workers[0].free("there")
        decode.do(cancelled=[Cancel("here")])
        for worker in (prefill.workers[0], decode.workers[0]):
            worker.break_copies()
        prefill.frees()
        eventually(lambda: decode.all_ended("here", "failed"))
        for worker in (prefill.workers[0], decode.workers[0]):
            worker.pause(False)
            assert worker.ends()
            worker.look()
        assert [side.workers[0].reported_twice() for side in (prefill, decode)] == [[], []]


def test_an_old_save_does_not_write_to_rows_of_a_receive() -> None:
    """A worker with both roles: a block that was lent belongs to a request that it receives."""
    with sides() as (prefill, both):
        worker = both.workers[0]
        worker.hold_copies("d2h")
        worker.hold_copies("h2d")
        worker.write([7, 8], range(TOKENS), np.full_like(whole(2, TOKENS), 3))
        both.do(parts=[Part("old", PROMPT, 0, 0, [[7, 8]], True, True)])
        eventually(worker.copies)
        both.do(withdrawn=[Withdraw("old", ended=True)])
        sequence = computed(prefill)
        both.receive(prefill.handover("there"), TOKENS, blocks=[7, 8])
        time.sleep(0.2)  # prefill lends its blocks
        worker.hold_copies("d2h", False)
        eventually(lambda: any(copy[0] == "h2d" for copy in worker.copies()))
        time.sleep(0.1)
        worker.hold_copies("h2d", False)
        both.received(sequence, blocks=[7, 8])


class Layers:
    """Host buffers of two layers of six blocks, whose bytes are numbers of the block, and copies that have ended."""

    def __init__(self) -> None:
        self.device = FakeDevice()
        shape = (6, 4)
        self.blocks = {name: np.zeros(shape, np.int16) for name in ("first", "second")}
        self.rows = {name: np.full(shape, 9, np.int16) for name in self.blocks}
        self.released = 0
        self.buffers = HostBuffers(self.device, self.blocks, self.rows, self._release)
        self.ended: list[tuple[str, str]] = []

    def _release(self) -> None:
        self.released += 1

    def model_writes(self, block: int, value: int) -> None:
        def write() -> None:
            for layer in self.blocks.values():
                layer[block] = value

        self.device.model.put(write)

    def done(self, name: str) -> Any:
        return lambda _, error: self.ended.append((name, str(error or "")))

    def save(self, name: str, *pairs: tuple[int, int], mark: Any = None) -> Copy:
        return self.buffers.save(list(self.blocks), list(pairs), mark, self.done(name))

    def load(self, name: str, *pairs: tuple[int, int], mark: Any = None) -> Copy:
        return self.buffers.load(list(self.blocks), list(pairs), mark, self.done(name))

    def wait_for(self, *names: str) -> None:
        eventually(lambda: len(self.ended) >= len(names))
        assert [name for name, _ in self.ended] == list(names)


@pytest.fixture
def layers() -> Iterator[Layers]:
    one = Layers()
    yield one
    assert one.buffers.close(LIMIT)


def test_save_waits_for_the_model_and_ends_with_the_last_byte(layers: Layers) -> None:
    for block in range(6):
        layers.model_writes(block, 10 + block)
    layers.save("saved", (4, 0), (1, 5), mark=layers.buffers.mark())
    layers.wait_for("saved")
    for rows in layers.rows.values():
        assert rows[:, 0].tolist() == [14, 9, 9, 9, 9, 11]


def test_load_waits_for_the_model_and_ends_with_the_last_byte(layers: Layers) -> None:
    """The model still writes to a block for the request that had it before."""
    layers.model_writes(2, 7)
    layers.load("loaded", (2, 3), mark=layers.buffers.mark())
    layers.wait_for("loaded")
    assert [blocks[:, 0].tolist() for blocks in layers.blocks.values()] == [[0, 0, 9, 0, 0, 0]] * 2


def test_copies_of_a_direction_keep_their_order(layers: Layers) -> None:
    """A row has the bytes of the last save, also if several run as one."""
    names = [f"{value}" for value in range(20)]
    for value, name in enumerate(names):
        layers.model_writes(value % 6, value)
        layers.save(name, (value % 6, 0), mark=layers.buffers.mark())
        if value % 7 == 6:
            time.sleep(0.02)
    layers.wait_for(*names)
    assert layers.rows["second"][:, 0].tolist() == [19, 9, 9, 9, 9, 9]


def test_waiting_copies_of_the_same_layers_run_as_one(layers: Layers) -> None:
    held = threading.Event()
    layers.save("first", (0, 0), mark=held)
    eventually(lambda: len(layers.device.copies) == 1)
    for block in range(1, 4):
        layers.save(f"{block}", (block, block))
    layers.buffers.save(["first"], [(4, 4)], None, layers.done("one layer"))
    time.sleep(0.1)  # nothing else begins meanwhile
    assert (len(layers.device.copies), layers.ended) == (1, [])
    held.set()
    layers.wait_for("first", "1", "2", "3", "one layer")
    both = ("first", "second")
    assert layers.device.copies == [
        ("d2h", both, [0], [0]),
        ("d2h", both, [1, 2, 3], [1, 2, 3]),
        ("d2h", ("first",), [4], [4]),
    ]


@pytest.mark.parametrize("direction", ["d2h", "h2d"])
def test_many_blocks_are_copied_in_several_calls(direction: str) -> None:
    device, numbers = FakeDevice(), np.arange(1200, dtype=np.int16)
    blocks, rows = numbers.reshape(-1, 1).copy(), 2000 + numbers.reshape(-1, 1)
    buffers, ended = HostBuffers(device, {"layer": blocks}, {"layer": rows}), threading.Event()
    move = buffers.save if direction == "d2h" else buffers.load
    expected = (blocks if direction == "d2h" else rows)[:1100, 0].tolist()
    move(["layer"], [(number, number) for number in range(1100)], None, lambda *_: ended.set())
    assert ended.wait(LIMIT)
    assert [len(copy[2]) for copy in device.copies] == [512, 512, 76]
    assert (rows if direction == "d2h" else blocks)[:1100, 0].tolist() == expected
    assert buffers.close(LIMIT)


@pytest.mark.parametrize("pipelines", [False, True])
def test_functions_of_vllm_are_used_by_devices_that_do_not_pipeline(layers: Layers, pipelines: bool) -> None:
    layers.device.pipelines = pipelines
    given = Mock()
    assert layers.buffers.use_copy_blocks(given) == (not pipelines)
    layers.save("saved", (1, 2))
    layers.wait_for("saved")
    assert (given.call_count, len(layers.device.copies)) == ((0, 1) if pipelines else (1, 0))


def test_last_of_several_copies_to_one_place_counts(layers: Layers) -> None:
    held = threading.Event()
    for number, blocks in enumerate(layers.blocks.values()):
        blocks[:, 0] = range(number, number + 6)
    layers.save("first", (5, 5), mark=held)
    layers.load("other", (4, 4), mark=held)
    eventually(lambda: not layers.buffers._saves._waiting and not layers.buffers._loads._waiting)
    layers.rows["first"][1:3, 0] = 40, 50
    for name, number in (("second", 1), ("third", 2)):
        layers.save(name, (number, 0))
        layers.load(name, (0, number))
    held.set()
    eventually(lambda: len(layers.ended) == 6)
    assert len(layers.device.copies) == 4
    assert layers.rows["second"][0, 0] == 3
    assert layers.blocks["first"][0, 0] == 50


def test_directions_do_not_wait_for_each_other(layers: Layers) -> None:
    held = threading.Event()
    layers.save("saved", (0, 0), mark=held)
    layers.load("loaded", (1, 1))
    layers.wait_for("loaded")
    assert layers.buffers.saving
    held.set()
    layers.wait_for("loaded", "saved")
    eventually(lambda: not layers.buffers.saving)


def test_cancelled_copy_does_not_run_unless_it_has_begun(layers: Layers) -> None:
    held = threading.Event()
    running = layers.load("running", (1, 1), mark=held)
    eventually(lambda: not layers.buffers._loads._waiting)
    layers.load("dropped", (2, 2)).cancel()
    running.cancel()
    layers.wait_for("dropped")
    held.set()
    layers.wait_for("dropped", "running")
    assert [error for _, error in layers.ended] == ["the copy was cancelled", ""]
    assert layers.blocks["first"][:, 0].tolist() == [0, 9, 0, 0, 0, 0]


def test_failed_copy_fails_alone(layers: Layers) -> None:
    layers.device.failure = RuntimeError("the device is broken")
    layers.save("failed", (0, 0))
    layers.wait_for("failed")
    layers.device.failure = None
    layers.save("saved", (0, 0))
    layers.wait_for("failed", "saved")
    assert [error for _, error in layers.ended] == ["the device is broken", ""]
    assert layers.buffers.alive


def test_saves_behind_one_that_hangs_fail_with_it(layers: Layers, caplog: pytest.LogCaptureFixture) -> None:
    """Each of them would wait for the time limit again."""
    lending, held, calls = Mock(), threading.Event(), []
    saves = HostSaves(layers.buffers, [list(layers.blocks)], 2, 5.0, lending, calls.append)
    parts = [Part(f"ticket {number}", PROMPT, 0, 0, [[number]], True, True) for number in range(1, 4)]
    saves.begin(parts[:1], range(2), held)
    eventually(lambda: layers.device.copies)
    for part in parts[1:]:
        saves.begin([part], range(2), held)
    due = saves.next_due()
    saves.due(due - 0.1)
    lending.fail.assert_not_called()
    saves.due(due)
    assert saves.next_due() is None
    assert lending.fail.mock_calls == [call(parts, "its blocks were not copied to host memory within 5 s")]
    assert "tickets ticket 1, ticket 2, ticket 3 are not handed over" in caplog.text
    held.set()
    eventually(lambda: not layers.buffers.saving)
    assert len(layers.device.copies) == 1  # the others have not begun
    for late in calls:
        late()
    lending.ready.assert_not_called()


def test_queue_that_has_died_is_noticed(layers: Layers, caplog: pytest.LogCaptureFixture) -> None:
    layers.device.failure = SystemExit()
    layers.save("lost", (0, 0))
    eventually(lambda: not layers.buffers.alive)
    with pytest.raises(RuntimeError, match=r"\(d2h\) have ended"):
        layers.save("refused", (0, 0))
    assert layers.ended == []
    eventually(lambda: "(d2h) end" in caplog.text)
    assert layers.buffers.stop()


def test_waiting_copies_are_bounded(layers: Layers, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_buffers, "MAX_QUEUED", 2)
    held = threading.Event()
    layers.save("running", (0, 0), mark=held)
    eventually(lambda: not layers.buffers._saves._waiting)
    layers.save("first", (0, 0))
    layers.save("second", (0, 0))
    with pytest.raises(RuntimeError, match=r"2 copies .* \(d2h\) wait"):
        layers.save("refused", (0, 0))
    held.set()
    layers.wait_for("running", "first", "second")


def test_memory_is_released_when_nothing_runs() -> None:
    layers, held = Layers(), threading.Event()
    layers.load("running", (0, 0), mark=held)
    eventually(lambda: not layers.buffers._loads._waiting)
    layers.load("dropped", (1, 1))
    assert not layers.buffers.stop()
    assert not layers.buffers.close(0.05)
    assert layers.released == 0
    held.set()
    assert layers.buffers.close(LIMIT)
    assert layers.released == 1
    assert [name for name, _ in layers.ended] == ["running"]
    assert layers.buffers.stop()
