"""Decode reads the blocks of a request while prefill computes it: the transfers between two engines, without vLLM.

`integration-tests/vllm` checks that vLLM's scheduler and model make the same calls.
"""

from __future__ import annotations

import time
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist.integrations.vllm.step import Part, Send, Step, Withdraw
from peers import eventually
from test_vllm_transfers import PROMPT, TOKENS, blocks_of, sides, whole
from vllm_pages import DIM, LAYERS
from vllm_workers import BLOCKS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from test_vllm_transfers import Side

LAYERWISE = {"layers_per_read": 1}
TCP = {"engine_options": {"transport": "tcp"}}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any], bool]] = {
    # Options of prefill and of decode, and whether layers are read one by one.
    "equal": ({}, {}, True),
    "tcp": (TCP, TCP, True),
    "two ranks": ({"ranks": 2}, {"ranks": 2}, True),
    "heads split": ({}, {"ranks": 2}, False),
    "heads joined": ({"ranks": 2}, {}, False),
    "larger blocks": ({}, {"block_size": 64}, False),
    "smaller blocks": ({"block_size": 64}, {}, False),
}


class Prefill:
    """Computes the prompt of one request, as vLLM's model would."""

    def __init__(self, side: Side, ticket: str = "there") -> None:
        self.side = side
        self.ticket = ticket
        self.blocks = blocks_of(side, TOKENS)
        self.sequence = whole(2, TOKENS)
        self._parts = 0

    def schedule(self, first: int, end: int) -> None:
        """Begin a step that computes the blocks from `first` to `end`."""
        last = end == len(self.blocks)
        blocks = self.blocks[first:end]
        self.side.do(parts=[Part(self.ticket, PROMPT, self._parts, first, [blocks], False, last)])
        self._parts += 1

    def compute(self, first: int, end: int, layer: int) -> None:
        """Write a layer of the tokens in these blocks."""
        size = self.side.block_size
        tokens = range(first * size, min(end * size, TOKENS))
        for worker in self.side.workers:
            worker.write(self.blocks, tokens, self.sequence, range(layer, layer + 1))
            worker.layer_saved(layer)

    def save(self) -> None:
        """End the step."""
        for worker in self.side.workers:
            worker.step_saved()

    def step(self, first: int, end: int) -> None:
        self.schedule(first, end)
        for layer in range(LAYERS):
            self.compute(first, end, layer)
        self.save()

    def withdraw(self, *, ended: bool) -> None:
        """Preempt or abort the request: other requests get its blocks."""
        for worker in self.side.workers:
            worker.submit(Step(withdrawn=[Withdraw(self.ticket, ended)]))
            worker.write(self.blocks, range(TOKENS), np.full_like(self.sequence, 7))

    def finish(self) -> None:
        self.side.do(sends=[Send("request", self.ticket)])


@contextmanager
def computing_for(prefill: Any = (), decode: Any = (), *, asks: bool = True) -> Iterator[tuple[Prefill, Side]]:
    """Prefill, which will compute a request, and decode, which has asked for it."""
    with sides(prefill, decode, **LAYERWISE) as (one, other):
        if asks:
            other.receive(one.handover("there"), TOKENS)
        yield Prefill(one), other


def in_place(decode: Side, sequence: np.ndarray, tokens: range, layers: range) -> bool:
    """Whether decode has these tokens in these layers."""
    blocks = blocks_of(decode, TOKENS)
    return all(worker.wrong(blocks, tokens, sequence, layers) == [] for worker in decode.workers)


def check_received(computing: Prefill, decode: Side) -> None:
    """The receive has succeeded with the right bytes, and prefill may free its blocks."""
    decode.received(computing.sequence)
    computing.side.frees("request")
    assert all(worker.observed() is None for worker in computing.side.workers)


@pytest.mark.parametrize("case", CASES)
def test_decode_reads_while_prefill_computes(case: str) -> None:
    """Layers are in place while later ones are not computed, or parts, if the two sides differ."""
    prefill_options, decode_options, by_layers = CASES[case]
    with computing_for(prefill_options, decode_options) as (computing, decode):
        half = len(computing.blocks) // 2
        early = range(half * computing.side.block_size)
        computing.schedule(0, half)
        computing.compute(0, half, 0)
        if by_layers:
            eventually(lambda: in_place(decode, computing.sequence, early, range(1)))
        computing.compute(0, half, 1)
        computing.save()
        eventually(lambda: in_place(decode, computing.sequence, early, range(LAYERS)))
        assert not decode.workers[0].look().received
        computing.step(half, len(computing.blocks))
        computing.finish()
        check_received(computing, decode)
        if by_layers:
            # No layer was read twice.
            moved = [sum((worker.observed() or {}).get("bytes", ())) for worker in decode.workers]
            assert sum(moved) == 5 * LAYERS * 2 * (2 * 32 * DIM * 2)


@pytest.mark.parametrize("when", ["while it is computed", "when it has finished"])
def test_late_decode_reads_computed_layers(when: str) -> None:
    with computing_for(asks=False) as (computing, decode):
        computing.step(0, 2)
        computing.schedule(2, 5)
        computing.compute(2, 5, 0)
        if when == "while it is computed":
            decode.receive(computing.side.handover("there"), TOKENS)
            eventually(lambda: in_place(decode, computing.sequence, range(64), range(LAYERS)))
        computing.compute(2, 5, 1)
        computing.save()
        computing.finish()
        if when == "when it has finished":
            decode.receive(computing.side.handover("there"), TOKENS)
        check_received(computing, decode)


def test_only_what_is_missing_is_read() -> None:
    """Decode has the first 96 tokens in its prefix cache: blocks that it shares with other requests."""
    with computing_for(asks=False) as (computing, decode):
        decode.receive(computing.side.handover("there"), TOKENS, 96)
        computing.step(0, 2)
        computing.step(2, 5)
        computing.finish()
        decode.received(computing.sequence, first=96)
        assert decode.workers[0].untouched(blocks_of(decode, TOKENS)[:3])
        observed = decode.workers[0].observed()
        assert observed is not None
        assert observed["blocks"] == [2]


@pytest.mark.parametrize("asks", ["before", "after"])
def test_preempted_request_is_read_again(asks: str) -> None:
    """Its blocks have other bytes in the meantime. Decode discards the parts that it has not read completely."""
    with computing_for(asks=False) as (computing, decode):
        if asks == "before":
            decode.receive(computing.side.handover("there"), TOKENS)
        computing.schedule(0, 3)
        computing.compute(0, 3, 0)
        if asks == "before":
            eventually(lambda: in_place(decode, computing.sequence, range(96), range(1)))
        computing.compute(0, 3, 1)
        computing.save()
        computing.withdraw(ended=False)
        if asks == "after":
            decode.receive(computing.side.handover("there"), TOKENS)
        computing.blocks = computing.blocks[::-1]
        computing.step(0, 4)
        computing.step(4, 5)
        computing.finish()
        check_received(computing, decode)


@pytest.mark.parametrize("case", ["equal", "tcp", "two ranks", "larger blocks", "smaller blocks"])
def test_preemption_during_pull_never_delivers_wrong_bytes(case: str) -> None:
    """Prefill preempts at any time, also in the middle of a pull, and overwrites the blocks at once."""
    prefill_options, decode_options, _ = CASES[case]
    with sides(prefill_options, decode_options, **LAYERWISE) as (prefill, decode):
        count = len(blocks_of(prefill, TOKENS))
        for number in range(30):
            name = f"here {number}"
            computing = Prefill(prefill, f"there {number}")
            decode.receive(prefill.handover(computing.ticket), TOKENS, name=name)
            for round_ in range(3):
                if round_ == 0:
                    # Complete in decode before the next parts have the same blocks.
                    computing.step(0, 1)
                    time.sleep(0.001 * (number % 3))
                computing.step(1 if round_ == 0 else 0, max(2, count - 1))
                time.sleep(0.0004 * (number % 5))
                computing.withdraw(ended=False)
                computing.blocks = computing.blocks[::-1] if round_ else computing.blocks
            computing.step(0, count)
            computing.finish()
            decode.received(computing.sequence, name=name)
            for worker in decode.workers:
                worker.write(blocks_of(decode, TOKENS), range(TOKENS), np.zeros_like(computing.sequence))


@pytest.mark.parametrize("when", ["before it is computed", "while it is computed"])
def test_a_request_that_prefill_aborts_fails_the_receive(when: str) -> None:
    with computing_for() as (computing, decode):
        if when == "while it is computed":
            computing.step(0, 2)
            eventually(lambda: in_place(decode, computing.sequence, range(64), range(LAYERS)))
        else:
            eventually(decode.workers[0].peers)
            time.sleep(0.1)
        computing.withdraw(ended=True)
        decode.fails("ended without a result")


def test_a_decode_that_is_killed_while_it_reads_gives_the_blocks_back() -> None:
    """Prefill frees the blocks when the link breaks, although the lease lasts an hour."""
    with computing_for({"lease_ms": 3_600_000}) as (computing, decode):
        computing.step(0, 2)
        eventually(lambda: in_place(decode, computing.sequence, range(64), range(LAYERS)))
        decode.workers[0].kill()
        computing.step(2, 5)
        computing.finish()
        computing.side.frees("request")


@pytest.mark.parametrize("computed", [0, 1])
def test_model_failure_fails_receive(computed: int) -> None:
    """vLLM ends the step in the same way, but not all layers have their content."""
    with computing_for() as (computing, decode):
        computing.step(0, 2)
        computing.schedule(2, 5)
        for layer in range(computed):
            computing.compute(2, 5, layer)
        computing.save()
        computing.finish()
        decode.fails(f"prefill does not lend it: the model has computed {computed} of 2 layers")
        assert not in_place(decode, computing.sequence, range(64, TOKENS), range(LAYERS))
        computing.side.frees("request")


def test_step_without_wait_for_save_fails_receive() -> None:
    """The next step begins, and vLLM has not called `wait_for_save`."""
    with computing_for() as (computing, decode):
        computing.schedule(0, 4)
        computing.step(4, 5)
        decode.fails("the model has computed 0 of 2 layers")


def test_step_without_end_does_not_complete_the_next_request() -> None:
    """The next step withdraws the request, and lends another one with the same ticket and part."""
    with computing_for(asks=False) as (computing, decode):
        computing.schedule(0, 5)
        for layer in range(LAYERS):
            computing.compute(0, 5, layer)
        part = Part("there", PROMPT, 0, 0, [computing.blocks], False, True)
        computing.side.do(withdrawn=[Withdraw("there", ended=True)], parts=[part])
        computing.side.workers[0].write(computing.blocks, range(TOKENS), np.zeros_like(computing.sequence))
        decode.receive(computing.side.handover("there"), TOKENS)
        time.sleep(0.2)
        assert not decode.workers[0].look().received
        for layer in range(LAYERS):
            computing.compute(0, 5, layer)
        computing.save()
        computing.finish()
        check_received(computing, decode)


@pytest.mark.parametrize("case", ["equal", "larger blocks"])
def test_several_receives_with_one_ticket(case: str) -> None:
    """A request for two completions is two requests in decode. Both read all blocks."""
    prefill_options, decode_options, _ = CASES[case]
    with computing_for(prefill_options, decode_options) as (computing, decode):
        used = blocks_of(decode, TOKENS)
        count = len(used)
        unused = [block for block in range(1, BLOCKS) if block not in used]
        decode.receive(computing.side.handover("there"), TOKENS, name="other", blocks=unused[:count])
        computing.step(0, 3)
        computing.step(3, 5)
        computing.finish()
        check_received(computing, decode)
        decode.received(computing.sequence, name="other", blocks=unused[:count])


def test_a_receive_with_another_prompt_fails_alone() -> None:
    """Another receive of the same worker has the same ticket."""
    with computing_for() as (computing, decode):
        decode.receive(computing.side.handover("there", "150:other"), TOKENS, name="bad", blocks=[20] * 5)
        computing.step(0, 3)
        eventually(lambda: decode.all_ended("bad", "failed"))
        computing.step(3, 5)
        computing.finish()
        decode.received(computing.sequence)
        assert decode.workers[0].look().failed == {"bad"}
        assert decode.workers[0].untouched([20])
