"""The transfers of the vLLM integration between two engines, without vLLM.

Every conversion is compared with an independent model of vLLM's pages (`vllm_pages.py`). That the model agrees with
vLLM's kernels, and the whole with vLLM's scheduler, is proved in `integration-tests/vllm`.
"""

from __future__ import annotations

import time
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist.integrations.vllm.handover import Handover
from llm_datadist.integrations.vllm.identity import PROTOCOL
from llm_datadist.integrations.vllm.messages import Hold, encode
from llm_datadist.integrations.vllm.step import Await, Cancel, Part, Receive, Send, Step, Withdraw
from peers import eventually
from vllm_pages import DIM, LAYERS
from vllm_workers import BLOCKS, Worker

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import AbstractContextManager

TOKENS = 150
PROMPT = "150:digest"
# Options of all workers.
DEFAULTS: dict[str, Any] = {}
LONG = {"timeout_ms": 3_600_000}


class Side:
    """All workers of prefill or of decode."""

    def __init__(self, name: str, ranks: int, heads: int, **given: Any) -> None:
        self.name = name
        self.block_size = given.get("block_size", 32)
        self.stages = given.get("stages", 1)
        workers = range(self.stages * ranks)
        self.workers = [Worker(name, worker, ranks, heads, dict(given)) for worker in workers]

    def handover(self, ticket: str, prompt: str = PROMPT, **given: Any) -> Handover:
        addresses = [worker.address() for worker in self.workers]
        return Handover(ticket, self.name, addresses, prompt, [self.block_size], self.stages, **given)

    def do(self, **work: Any) -> None:
        for worker in self.workers:
            worker.submit(Step(**work))

    def receive(
        self,
        handover: Handover,
        tokens: int,
        first: int = 0,
        *,
        name: str = "here",
        blocks: list[int] | None = None,
    ) -> None:
        """Hold a request, and receive its tokens from `first` on."""
        if blocks is None:
            ours = enumerate(blocks_of(self, tokens), 1)
            blocks = [block if index * self.block_size > first else 0 for index, block in ours]
        self.do(awaited=[Await(name, handover)], receives=[Receive(name, [blocks], first, tokens)])

    def compute(self, heads: int = 2) -> np.ndarray:
        """Write a sequence to its blocks, and return it."""
        sequence = whole(heads, TOKENS)
        for worker in self.workers:
            worker.write(blocks_of(self, TOKENS), range(TOKENS), sequence)
        return sequence

    def release(self, handover: Handover) -> None:
        """Hold a request of which nothing is needed."""
        self.do(awaited=[Await("here", handover)], cancelled=[Cancel("here")])

    def send(self, ticket: str, blocks: list[int]) -> None:
        """Lend a prompt that is computed, as vLLM does when the request has finished."""
        self.do(parts=[Part(ticket, PROMPT, 0, 0, [blocks], True, True)], sends=[Send(ticket, ticket)])

    def all_ended(self, request: str, what: str) -> bool:
        return all(request in getattr(worker.look(), what) for worker in self.workers)

    def received(
        self, sequence: np.ndarray | None = None, *, name: str = "here", blocks: list[int] | None = None, first: int = 0
    ) -> None:
        """Wait until a request is received, and check that it has not failed, and its tokens from `first` on."""
        eventually(lambda: self.all_ended(name, "received"))
        assert not any(name in worker.look().failed for worker in self.workers)
        if sequence is not None:
            tokens = sequence.shape[2]
            ours = blocks_of(self, tokens) if blocks is None else blocks
            wrong = [worker.wrong(ours, range(first, tokens), sequence) for worker in self.workers]
            assert wrong == [[]] * len(wrong)

    def fails(self, reason: str, name: str = "here") -> None:
        """Wait until all workers have failed to receive a request, and check what the first one logs."""
        eventually(lambda: self.all_ended(name, "failed"))
        assert self.all_ended(name, "received")
        assert reason in self.workers[0].lines()

    def frees(self, ticket: str = "there") -> None:
        """Wait until all workers have freed a request."""
        eventually(lambda: self.all_ended(ticket, "sent"))


@contextmanager
def started(*made: Side) -> Iterator[tuple[Side, ...]]:
    """Wait until the workers of all sides are ready, and close them afterwards."""
    workers = [worker for side in made for worker in side.workers]
    with ExitStack() as stack:
        for worker in workers:
            stack.callback(worker.close)
        for worker in workers:
            worker.ready()
        yield made


def sides(prefill: Any = (), decode: Any = (), **both: Any) -> AbstractContextManager[tuple[Side, ...]]:
    given = {"ranks": 1, "heads": 2, **DEFAULTS, **both}
    return started(Side("prefill", **{**given, **dict(prefill)}), Side("decode", **{**given, **dict(decode)}))


def whole(heads: int, tokens: int) -> np.ndarray:
    """Keys and values of a sequence: `[layer, plane, token, head, element]`."""
    shape = (LAYERS, 2, tokens, heads, DIM)
    return np.random.default_rng(3).integers(1, 1 << 16, shape, dtype=np.uint16)


def blocks_of(side: Side, tokens: int) -> list[int]:
    """The blocks of a sequence, in no order; 0 is vLLM's null block."""
    count = -(-tokens // side.block_size)
    return [1 + (7 * index + 3) % (BLOCKS - 1) for index in range(count)]


def hand_over(prefill: Side, decode: Side, name: str = "there") -> None:
    """Have decode receive a request of its own, and check its bytes and that prefill frees it."""
    sequence = prefill.compute()
    prefill.send(name, blocks_of(prefill, TOKENS))
    decode.receive(prefill.handover(name), TOKENS, name=name)
    decode.received(sequence, name=name)
    prefill.frees(name)


CASES = {
    "equal": ({}, {}),
    "heads split": ({"ranks": 1}, {"ranks": 2}),
    "heads joined": ({"ranks": 4}, {"ranks": 1}),
    "neither divides the other": ({"ranks": 2, "heads": 12}, {"ranks": 3, "heads": 12}),
    "more ranks of prefill than heads": ({"ranks": 8}, {"ranks": 2}),
    "more ranks of decode than heads": ({"ranks": 1}, {"ranks": 8}),
    "larger blocks": ({"block_size": 32}, {"block_size": 64}),
    "smaller blocks, heads split": ({"block_size": 96}, {"block_size": 32, "ranks": 2}),
    "larger blocks, heads joined": ({"block_size": 32, "ranks": 2}, {"block_size": 96}),
}


@pytest.mark.parametrize("first", [0, 96])
@pytest.mark.parametrize("isa", ["vec", "amx"])
@pytest.mark.parametrize("case", CASES)
def test_decode_has_the_tokens_of_prefill(case: str, isa: str, first: int) -> None:
    """All tokens from `first` on arrive, whatever the ranks and block sizes; both sides end, and nothing is left."""
    given = [{"heads": 4, **one} for one in CASES[case]]
    with sides(*given, isa=isa) as (prefill, decode):
        sequence = prefill.compute(given[0]["heads"])
        prefill.send("there", blocks_of(prefill, TOKENS))
        decode.receive(prefill.handover("there"), TOKENS, first)
        decode.received(sequence, first=first)
        prefill.frees()
        assert all(worker.observed() is None for worker in prefill.workers)


def test_maximum_timeout_and_lease_are_accepted() -> None:
    """Decode asks before prefill has finished."""
    with sides(lease_ms=4_294_967_000, timeout_ms=4_294_967_000) as (prefill, decode):
        decode.receive(prefill.handover("there"), 30)
        prefill.send("other", [5])
        time.sleep(0.1)
        prefill.send("there", [4])
        decode.received()


@pytest.mark.parametrize("ranks", [(1, 1), (2, 1), (1, 2), (8, 2)])
def test_prefill_frees_what_decode_does_not_need(ranks: tuple[int, int]) -> None:
    """A request whose prompt is in the prefix cache of decode, or was aborted there, has no blocks to receive."""
    with sides({"ranks": ranks[0]}, {"ranks": ranks[1]}) as (prefill, decode):
        prefill.send("there", [4, 5])
        decode.release(prefill.handover("there"))
        prefill.frees()
        assert not any(worker.look().received for worker in decode.workers)


def failed_receive(prefill: Side, decode: Side) -> None:
    """Receive blocks 4 and 5 of a request, which fails."""
    decode.receive(prefill.handover("there"), 60)
    eventually(lambda: decode.all_ended("here", "received"))
    assert decode.workers[0].look().failed == {"here"}
    observed = decode.workers[0].observed()
    assert observed is not None
    assert (observed["failed_receives"], observed["bytes"]) == (1, [])


def test_a_request_that_nobody_lends_fails() -> None:
    with sides(timeout_ms=300) as (prefill, decode):
        failed_receive(prefill, decode)


def test_a_lease_that_has_expired_fails_the_receive() -> None:
    with sides({"lease_ms": 100}) as (prefill, decode):
        prefill.send("there", [4, 5])
        prefill.frees()
        observed = prefill.workers[0].observed()
        assert observed is not None
        assert observed["expired_leases"] == 1
        failed_receive(prefill, decode)
        assert "its lease has ended" in decode.workers[0].lines()


@pytest.mark.parametrize(
    ("addresses", "reason"),
    [
        (["127.0.0.1:1"], "127.0.0.1:1"),
        (["127.0.0.1:1"] * 3, "2 KV heads cannot be split over 3 ranks"),
        (["nonsense"], "nonsense"),
        (["127.0.0.1:1", ""], "address"),
    ],
)
def test_addresses_that_make_no_sense_fail_the_receive(addresses: list[str], reason: str) -> None:
    with sides(timeout_ms=500) as (prefill, decode):
        handover = prefill.handover("there")
        handover.addresses[:] = addresses
        decode.receive(handover, 60, blocks=[4, 5])
        decode.fails(reason)


def test_a_prefill_that_ends_fails_the_receives_that_wait_for_it() -> None:
    with sides() as (prefill, decode):
        decode.receive(prefill.handover("there"), 60)
        eventually(decode.workers[0].peers)
        time.sleep(0.1)
        prefill.workers[0].kill()
        decode.fails("broke")


def test_an_aborted_receive_is_cancelled() -> None:
    """A cancelled receive counts neither as received nor as failed."""
    with sides(LONG, LONG) as (prefill, decode):
        decode.receive(prefill.handover("there"), 30)
        eventually(prefill.workers[0].held)
        decode.do(cancelled=[Cancel("here")])
        decode.received()
        assert decode.workers[0].observed() is None
        prefill.send("there", [4])
        prefill.frees()


def test_messages_that_a_peer_has_no_room_for_wait() -> None:
    """Decode does not take its messages for a while, and prefill answers more requests than the engine queues."""
    names = [f"request {number}" for number in range(1500)]
    with sides(LONG, LONG) as (prefill, decode):
        decode.do(awaited=[Await(name, prefill.handover(name)) for name in names])
        decode.do(receives=[Receive(name, [[4]], 0, 30) for name in names])
        eventually(lambda: prefill.workers[0].held(True) == len(names))
        decode.workers[0].pause(True)
        parts = [Part(name, PROMPT, 0, 0, [[4]], computed=True, last=True) for name in names]
        prefill.do(parts=parts, sends=[Send(name, name) for name in names])
        eventually(lambda: prefill.workers[0].waiting() > 0)
        decode.workers[0].pause(False)
        eventually(lambda: len(decode.workers[0].look().received) == len(names))
        assert not decode.workers[0].look().failed
        eventually(lambda: len(prefill.workers[0].look().sent) == len(names))


def test_events_that_cannot_be_taken_are_taken_later() -> None:
    with sides(LONG, LONG) as (prefill, decode):
        for worker in (*prefill.workers, *decode.workers):
            worker.fail_events()
        hand_over(prefill, decode)
        assert all("cannot take the events" in side.workers[0].lines() for side in (prefill, decode))


def test_a_dead_transfer_thread_is_noticed() -> None:
    """Receives fail, lent blocks are free, and both sides go on alone."""
    with sides(LONG, LONG) as (prefill, decode):
        prefill.send("there", [4])
        decode.receive(prefill.handover("nobody"), 30)
        eventually(prefill.workers[0].peers)
        for worker in (*prefill.workers, *decode.workers):
            worker.break_thread()
        assert prefill.all_ended("there", "sent")
        assert decode.all_ended("here", "failed")
        work = prefill.workers[0].work()
        prefill.send("later", [4])
        prefill.do(parts=[Part("computed later", PROMPT, 0, 0, [[4]], computed=False, last=True)])
        assert prefill.workers[0].work() == work
        prefill.do(withdrawn=[Withdraw("later", ended=True)])
        decode.receive(prefill.handover("later"), 30, name="later")
        assert prefill.all_ended("later", "sent")
        assert decode.all_ended("later", "failed")
        assert "the transfer thread has ended" in decode.workers[0].lines()


@pytest.mark.parametrize("versions", [(PROTOCOL, PROTOCOL + 1), (PROTOCOL + 1, PROTOCOL)])
def test_neighbours_of_one_version_work_together(versions: tuple[int, int]) -> None:
    """The later one sends fields and facts that the earlier one does not know."""
    with sides({"protocol": versions[0]}, {"protocol": versions[1]}) as (prefill, decode):
        hand_over(prefill, decode)


@pytest.mark.parametrize("ranks", [(1, 1), (1, 2), (2, 1)])
@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"model": "another"}, "model is 'model' in prefill, 'another' here"),
        ({"tag": "another"}, "model differs"),
        ({"protocol": PROTOCOL + 2}, f"version {PROTOCOL} of the protocol in prefill, {PROTOCOL + 2} in decode"),
    ],
)
def test_a_prefill_that_does_not_fit_is_refused(ranks: tuple[int, int], other: dict[str, Any], text: str) -> None:
    """Decode then tells all ranks of prefill that it needs nothing, long before the lease ends."""
    with sides({"lease_ms": 3_600_000, "ranks": ranks[0]}, {"ranks": ranks[1], **other}) as (prefill, decode):
        prefill.send("there", [4, 5])
        failed_receive(prefill, decode)
        prefill.frees()
        assert text in decode.workers[0].lines()


def test_the_comparison_can_be_left_out() -> None:
    with sides({"model": "one"}, {"model": "another", "check_compatibility": False}) as (prefill, decode):
        hand_over(prefill, decode)


def test_receives_are_spans() -> None:
    pytest.importorskip("opentelemetry.sdk", reason="opentelemetry-sdk needs Python 3.10")
    with sides({}, {"spans": True, "timeout_ms": 5000}) as (prefill, decode):
        prefill.send("there", [4, 5])
        decode.receive(prefill.handover("there"), 60)
        decode.received()
        decode.receive(prefill.handover("nobody"), 30, name="gone")
        eventually(lambda: decode.all_ended("gone", "failed"))
        (good, bad) = decode.workers[0].spans()
        assert (good[0], good[2], bad[2]) == ("llm_datadist.receive", "UNSET", "ERROR")
        assert good[1].pop("llm_datadist.pull_seconds") > 0
        size = LAYERS * 2 * 32 * 2 * DIM * 2 * 2
        assert good[1] == {"llm_datadist.request": "here", "llm_datadist.bytes": size, "llm_datadist.blocks": 2}


def test_messages_that_cannot_be_read_are_dropped() -> None:
    with sides() as (prefill, decode):
        bad = [b"", b"\xff", b"\x90", b"\x80", encode(Hold("r", 1)).replace(b"\x01", b"\x00")]
        decode.workers[0].tell(prefill.workers[0].address(), bad)
        hand_over(prefill, decode)


def test_a_failure_of_a_message_logs_none_of_its_bytes() -> None:
    """They may be tokens of grants."""
    with sides() as (prefill, decode):
        prefill.workers[0].fail_messages()
        decode.workers[0].tell(prefill.workers[0].address(), [b"secret"])
        eventually(lambda: "could not do" in prefill.workers[0].lines())
        lines = prefill.workers[0].lines()
        assert "Message of " in lines
        assert "secret" not in lines


def test_requests_start_no_threads() -> None:
    """Neither one that waits, nor one that is received, on either side."""
    with sides() as (prefill, decode):
        (one,), (other,) = prefill.workers, decode.workers
        hand_over(prefill, decode, "first")
        before = one.threads(), other.threads()
        names = [f"request {number}" for number in range(100)]
        for name in names:
            decode.receive(prefill.handover(name), 30, name=name)
        time.sleep(0.1)
        waiting = one.threads(), other.threads()
        for name in names:
            prefill.send(name, [4])
        eventually(lambda: all(decode.all_ended(name, "received") for name in names))
        assert not other.look().failed
        # The engine may start more of its own threads, of which it has a fixed number. Its workers pull and end grants:
        # at most 32 for one peer, and a few that wait for the reads of ended grants. They end after 30 s without work.
        for during, after, usual in zip(waiting, (one.threads(), other.threads()), before):
            assert len(during) <= len(usual) + 4
            assert sum(name != "llm-worker" for name in after) <= len(usual) + 4
            assert len(after) <= len(usual) + 4 + 32 + 16
