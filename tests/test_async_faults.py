"""Thousands of asynchronous calls while their peers are killed, stopped and resumed: each ends once, and then nothing
touches its memory.

The proof is independent of the engine: as soon as the event of a pull arrives, the test writes a mark into its
destination blocks, and at the end every mark must still be there. LLM_DATADIST_SOAK is the number of rounds.
"""

from __future__ import annotations

import os
import random
import select
import signal
import time
from contextlib import ExitStack

import pytest

from llm_datadist import LLMException
from llm_datadist.events import Completed, Transfer
from peers import LIMIT, OK, SOAK, End, Ends, by_blocks, eventually, options, pattern, stop_process
from peers.values import cache_key as key

BLOCKS, BLOCK_BYTES, TENSORS = 2048, 16384, 2
MARK = 0xA5
ENDINGS = {"LLM_TIMEOUT", "LLM_NOT_YET_LINK", "LLM_FAILED", "LLM_KV_CACHE_NOT_EXIST"}


class Flight:
    """Calls of one engine into blocks of one cache, each block used by one call at most."""

    def __init__(self, near: End, name: str) -> None:
        self.near, self.handle = near, near.held[name].handle
        self.arrays = [view.numpy() for view in near.manager.tensor_views(self.handle)]
        self.running: dict[Transfer, tuple[str, int]] = {}
        self.ended: dict[Transfer, tuple[str, int]] = {}

    def pull(self, block: int) -> None:
        transfer = self.near.manager.pull_blocks_async(key(by_blocks(2)), self.handle, [block % 64], [block])
        self.running[transfer] = ("pull", block)

    def push(self, block: int) -> None:
        transfer = self.near.manager.push_blocks_async(key(by_blocks(2)), self.handle, [block], [block % 64])
        self.running[transfer] = ("push", block)

    def copy(self, source: int, block: int) -> None:
        self.running[self.near.manager.copy_blocks_async(self.handle, {source: [block]})] = ("copy", block)

    def step(self) -> None:
        """Take events, and mark the blocks that no call may touch any more."""
        for event in self.near.dist.poll(100):
            if not isinstance(event, Completed):
                continue  # news about the link
            kind, block = self.ended[event.transfer] = self.running.pop(event.transfer)
            if kind != "push":
                for array in self.arrays:
                    array[block] = MARK

    def land(self) -> None:
        """Wait until all calls have ended."""
        poller = select.poll()
        poller.register(self.near.dist.fileno(), select.POLLIN)
        until = time.monotonic() + 2 * LIMIT
        while self.running:
            assert time.monotonic() < until, f"{len(self.running)} calls do not end"
            poller.poll(100)
            self.step()
        self.step()  # an event that comes twice is a KeyError

    def check(self) -> None:
        """Every mark is still there, and every failure has a code that a lost peer explains."""
        written = [block for kind, block in self.ended.values() if kind != "push"]
        for array in self.arrays:
            assert (array[written] == MARK).all(), "something wrote after the event"
        for transfer, (kind, _) in self.ended.items():
            failure = transfer.exception(0)
            if failure is not None:
                assert isinstance(failure, LLMException)
                assert failure.status_code.name in ENDINGS, (kind, failure)


def disturb(child: int, moment: str) -> None:
    """Do to a peer what the round is about."""
    if moment == "kill":
        os.kill(child, signal.SIGKILL)
    elif moment == "stop":
        stop_process(child)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_calls_end_once_and_leave_memory_alone(ends: Ends, transport: str) -> None:
    settings = options(pool=256 << 20, llm__LinkTransport=transport, llm__LinkHeartbeat=100, llm__LinkSilence=1500)
    settings["llm.EnableRemoteCacheAccessible"] = "1"
    nursery = ends.spare()
    near = ends.near({**settings, "llm.SyncKvCacheWaitTime": "3000", "llm.MaxTransfers": "8192"})
    near.allocate("n", BLOCKS, BLOCK_BYTES, TENSORS, blocks=True)
    chance = random.Random(7)  # noqa: S311
    ended = 0
    for round_ in range(SOAK or 6):
        moment = ("kill", "stop", "finish")[round_ % 3]
        child, address = nursery.hatch({**settings, "llm.listenIpInfo": "127.0.0.1:0"}, 2, 64, BLOCK_BYTES)
        assert near.link_clusters([(2, address)], 3000) == (OK, [OK]), round_
        flight = Flight(near, "n")
        blocks = list(range(64, BLOCKS))
        chance.shuffle(blocks)
        strike = chance.randrange(len(blocks))
        for number, block in enumerate(blocks):
            if number == strike:
                disturb(child, moment)
            kind = chance.random()
            if kind < 0.7:
                flight.pull(block)
            elif kind < 0.85:
                flight.push(block)
            else:
                flight.copy(chance.randrange(64), block)
            if chance.random() < 0.02 and flight.running:
                chance.choice(list(flight.running)).cancel()
            if chance.random() < 0.05:
                flight.step()
        flight.land()
        if moment == "stop":
            os.kill(child, signal.SIGCONT)
        # Whatever a resumed peer still does must not reach the blocks of calls that have ended.
        near.manager.copy_blocks(flight.handle, {0: [1]})
        time.sleep(0.05)
        flight.check()
        assert len(flight.ended) == len(blocks)
        ended += len(flight.ended)
        near.unlink_clusters([(2, address)], 1000, force=True)
        if moment != "kill":
            os.kill(child, signal.SIGKILL)
    assert ended == (SOAK or 6) * (BLOCKS - 64)


def test_bytes_are_right_where_a_call_succeeds(ends: Ends) -> None:
    """A peer dies under 1,984 pulls: those that report success have the bytes, whatever became of the others."""
    settings = options(pool=256 << 20, llm__LinkHeartbeat=100, llm__LinkSilence=1500)
    settings["llm.EnableRemoteCacheAccessible"] = "1"
    nursery = ends.spare()
    near = ends.near({**settings, "llm.SyncKvCacheWaitTime": "3000"})
    near.allocate("n", BLOCKS, BLOCK_BYTES, TENSORS, blocks=True)
    expected = pattern(2, TENSORS, 64, BLOCK_BYTES)
    for delay in (0.0, 0.01, 0.03):
        child, address = nursery.hatch({**settings, "llm.listenIpInfo": "127.0.0.1:0"}, 2, 64, BLOCK_BYTES)
        assert near.link_clusters([(2, address)], 3000) == (OK, [OK])
        flight = Flight(near, "n")
        for array in flight.arrays:
            array[:] = 0
        for block in range(64, BLOCKS):
            flight.pull(block)
        time.sleep(delay)
        os.kill(child, signal.SIGKILL)
        transfers = dict(flight.running)
        assert near.dist.drain(int(2 * LIMIT * 1000))
        for transfer, (_, block) in transfers.items():
            if transfer.exception(0) is None:
                for array, row in zip(flight.arrays, expected):
                    assert (array[block] == row[block % 64]).all(), block
        assert not any(isinstance(event, Completed) for event in near.dist.poll()), "all outcomes were taken"
        near.unlink_clusters([(2, address)], 1000, force=True)


def completed(near: End) -> list[Transfer]:
    return [event.transfer for event in near.dist.poll() if isinstance(event, Completed)]


def seen_to_end(near: End) -> list[Transfer]:
    """Wait for the end of a transfer."""
    ended: list[Transfer] = []

    def one() -> bool:
        ended.extend(completed(near))
        return bool(ended)

    eventually(one)
    return ended


@pytest.mark.parametrize("delay", [None, 0.0005, 0.002, 0.005])
def test_a_push_to_a_peer_that_stops_ends_once_and_never_passes_for_a_success(
    ends: Ends, transport: str, delay: float | None
) -> None:
    """The peer stops before or under a push, and continues when the source has other bytes.

    The push ends once, with LLM_TIMEOUT. If the peer reads the source, the push ends only when the link has broken, so
    that nobody waits for the answer any more. When the peer continues, it may read the other bytes, but only into the
    blocks that the push names, which are undefined after the failure. Its program gets the message of the push only if
    it has the bytes of the push.
    """
    rows, named, row_bytes = 20, 16, 1 << 20
    settings = {"llm__LinkTransport": transport, "llm__LinkHeartbeat": 100, "llm__LinkSilence": 6000}
    near, far = ends.pair(accessible=True, pool=48 << 20, **settings)
    far.allocate("f", rows, row_bytes, TENSORS, blocks=True, keys=[by_blocks(0)], seed=2)
    near.allocate("n", rows, row_bytes, TENSORS, blocks=True, seed=1)
    handle, blocks = near.held["n"].handle, list(range(named))
    near.manager.push_blocks(key(by_blocks(2)), handle, [named], [named])  # later, the peer is only asked to read
    with ExitStack() as stopped:
        if delay is None:
            stopped.enter_context(far.stopped())
        transfer = near.manager.push_blocks_async(
            key(by_blocks(2)), handle, blocks, blocks, timeout_ms=1500, notify=b"pushed"
        )
        if delay is not None:
            time.sleep(delay)
            stopped.enter_context(far.stopped())
        assert seen_to_end(near) == [transfer]
        failure = transfer.exception(0)
        assert failure is None or failure.status_code.name == "LLM_TIMEOUT", failure
        reading = failure is not None and transfer.progress() != (0, 0) and "may have been" not in str(failure)
        assert reading or delay is not None
        if reading and transport == "auto":
            assert near.dist.peers() == [], "the answer of the peer would still count"
        near.paint("n", 0xEE)
    far.copy_blocks("f", [(0, rows - 1)])  # waits until no request of the push uses its blocks
    held = far.read("f")

    def pushed_again() -> bool:
        near.link_clusters([far.at])
        near.fill("n", 3)
        return near.timed("push_blocks", by_blocks(2), "n", blocks, blocks, notify=b"again")[0] == OK

    eventually(pushed_again)
    told = [message for _, message in far.polled()].count(b"pushed")
    assert told in ({1} if failure is None else {0, 1})
    for array, ours, theirs in zip(held, *(pattern(seed, TENSORS, rows, row_bytes) for seed in (1, 2))):
        assert not told or (array[:named] == ours[:named]).all(), "the message came without the bytes"
        assert (array[named] == ours[named]).all()
        assert (array[named + 1 : -1] == theirs[named + 1 : -1]).all(), "blocks that the push does not name"
    for array, ours in zip(far.read("f"), pattern(3, TENSORS, rows, row_bytes)):
        assert (array[:named] == ours[:named]).all()
    assert completed(near) == [], "the push has ended once"
