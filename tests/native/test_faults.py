"""Transfers while their peers are killed, stopped and resumed: each ends once, and then nothing touches its memory.

The proof is independent of the engine: as soon as the event of a pull arrives, the test writes a mark into its
destination blocks, and at the end every mark must still be there. LLM_DATADIST_SOAK is the number of rounds.
"""

from __future__ import annotations

import random
import select
import time
from contextlib import ExitStack
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist.native import Cache, Cancelled, Completed, Engine, Message, NotFound, PeerLost, Timeout, Transfer
from peers import eventually
from peers.values import SOAK

from .helpers import LIMIT, accepted, allocate, gather, of

if TYPE_CHECKING:
    from collections.abc import Callable

    from .conftest import Open
    from .helpers import Remote

TRANSPORTS = ["auto", "tcp"]
BLOCKS, SIZE, SHARED = 2048, 16384, 64
MARK = 0xA5
SHAPE: dict[str, Any] = {"tensors": 2, "shape": (SIZE,), "dtype": "uint8"}
OPTIONS: dict[str, Any] = {"heartbeat": 0.1, "silence": 1.5}
ENDS = (Timeout, PeerLost, Cancelled, NotFound)


class Flight:
    """Transfers of one engine into blocks of one cache, each block used by one transfer at most."""

    def __init__(self, local: Engine, cache: Cache, remote_kv: Any) -> None:
        self.local, self.cache, self.remote_kv = local, cache, remote_kv
        self.arrays = [tensor.numpy() for tensor in cache.tensors]
        self.running: dict[Transfer[None], tuple[str, int]] = {}
        self.ended: dict[Transfer[None], tuple[str, int, Any]] = {}

    def start(self, kind: str, block: int, other: int) -> None:
        shared = self.remote_kv[[block % SHARED]]
        if kind == "pull":
            transfer = self.local.pull(self.cache[[block]], shared)
        elif kind == "push":
            transfer = self.local.push(shared, self.cache[[block]])
        else:
            transfer = self.local.copy(self.cache[[block]], self.cache[[other]])
        self.running[transfer] = kind, block

    def step(self) -> None:
        """Take events, and mark the blocks that no transfer may touch any more."""
        for event in self.local.events(100):
            if isinstance(event, Completed):
                kind, block = self.running.pop(event.transfer)  # an event that comes twice is a KeyError
                self.ended[event.transfer] = kind, block, event.error
                if kind != "push":
                    for array in self.arrays:
                        array[block] = MARK

    def land(self) -> None:
        """Wait until all transfers have ended."""
        until = time.monotonic() + 2 * LIMIT
        while self.running:
            assert time.monotonic() < until, f"{len(self.running)} transfers do not end"
            select.select([self.local], [], [], 0.1)
            self.step()
        self.step()

    def check(self) -> None:
        """Every mark is still there, and a lost peer explains every failure."""
        written = [block for kind, block, _ in self.ended.values() if kind != "push"]
        for array in self.arrays:
            assert (array[written] == MARK).all(), "something wrote after the event"
        wrong = [error for _, _, error in self.ended.values() if error is not None and not isinstance(error, ENDS)]
        assert wrong == []


def test_transfers_end_once_and_leave_memory_alone(
    start: Open, begin_remote: Callable[..., Remote], carried_by: str
) -> None:
    local = start(pool="80MiB", transport=carried_by, timeout=3.0, max_transfers=8192, **OPTIONS)
    cache, chance = local.allocate("n", blocks=BLOCKS, **SHAPE), random.Random(7)  # noqa: S311
    for round_ in range(SOAK or 3):
        moment = ("kill", "stop", "finish")[round_ % 3]
        remote = begin_remote(pool="4MiB", transport=carried_by, **OPTIONS)
        remote.do(f"kv = allocate(engine, seed=2, blocks={SHARED}, **{SHAPE!r})")
        flight = Flight(local, cache, local.link(remote.address, timeout=LIMIT).result(LIMIT)["kv"])
        blocks = list(range(SHARED, BLOCKS))
        chance.shuffle(blocks)
        strike = chance.randrange(len(blocks))
        with ExitStack() as stopped:
            for number, block in enumerate(blocks):
                if number == strike and moment == "kill":
                    remote.process.kill()
                elif number == strike and moment == "stop":
                    stopped.enter_context(remote.stopped())
                kind = chance.choices(("pull", "push", "copy"), (14, 3, 3))[0]
                flight.start(kind, block, chance.randrange(SHARED))
                if chance.random() < 0.02 and flight.running:
                    chance.choice(list(flight.running)).cancel()
                if chance.random() < 0.05:
                    flight.step()
            flight.land()
        # Whatever a resumed peer still does must not reach the blocks of transfers that have ended.
        local.copy(cache[[1]], cache[[0]]).result(LIMIT)
        time.sleep(0.05)
        flight.check()
        assert len(flight.ended) == len(blocks)
        remote.kill()
        eventually(lambda: local.peers == [])
        local.events(10_000)


def test_bytes_are_right_where_a_transfer_succeeds(
    start: Open, begin_remote: Callable[..., Remote], carried_by: str
) -> None:
    """A peer dies under 1,984 pulls: those that report success have the bytes, whatever became of the others."""
    local = start(pool="80MiB", transport=carried_by, timeout=3.0, max_transfers=8192, **OPTIONS)
    cache = local.allocate("n", blocks=BLOCKS, **SHAPE)
    arrays = [tensor.numpy() for tensor in cache.tensors]
    for delay in (0.0, 0.02):
        remote = begin_remote(pool="4MiB", transport=carried_by, **OPTIONS)
        remote.do(f"kv = allocate(engine, seed=2, blocks={SHARED}, **{SHAPE!r})")
        expected = [np.frombuffer(tensor, np.uint8).reshape(SHARED, SIZE) for tensor in remote.do("contents(kv)")]
        remote_kv = local.link(remote.address, timeout=LIMIT).result(LIMIT)["kv"]
        for array in arrays:
            array[:] = 0
        pulls = {local.pull(cache[[block]], remote_kv[[block % SHARED]]): block for block in range(SHARED, BLOCKS)}
        time.sleep(delay)
        remote.kill()
        seen = of(Completed, gather(local, lambda seen: len(of(Completed, seen)) == BLOCKS - SHARED))
        assert {event.transfer for event in seen} == set(pulls)
        for event in seen:
            block = pulls[event.transfer]
            if event.error is None:
                assert all((array[block] == row[block % SHARED]).all() for array, row in zip(arrays, expected)), block
        eventually(lambda: local.peers == [])
        local.events(10_000)


@pytest.mark.parametrize("delay", [None, 0.0005, 0.002, 0.005])
def test_push_to_a_peer_that_stops_ends_once_and_never_passes_for_a_success(
    start: Open, begin_remote: Callable[..., Remote], carried_by: str, delay: float | None
) -> None:
    """The peer stops before or under a push, and continues when the source has other bytes.

    The push ends once, with `Timeout`. If the peer reads the source, the push ends only when the link has broken, so
    that nobody waits for the answer any more. When the peer continues, it may read the other bytes, but only into the
    blocks that the push names, which are undefined after the failure. Its program gets the message of the push only if
    it has the bytes of the push.
    """
    rows, named, size = 20, 16, 1 << 20
    options: dict[str, Any] = {"pool": "96MiB", "transport": carried_by, "heartbeat": 0.1, "silence": 6.0}
    remote, local = begin_remote(**options), start(**options)
    shape = {"blocks": rows, "tensors": 2, "shape": (size,), "dtype": "uint8"}
    remote.do(f"""
kv = allocate(engine, seed=2, **{shape!r})
before, told = contents(kv), []
def take():
    told.extend(event.data for event in engine.events() if isinstance(event, Message))
    return told
def rows(data, first, end):
    return [tensor[first * {size} : end * {size}] for tensor in data]
ours = Model(kv, {size})
""")
    cache = allocate(local, "n", seed=1, **shape)
    remote_kv = local.link(remote.address).result(LIMIT)["kv"]
    blocks = list(range(named))
    local.push(remote_kv[[named]], cache[[named]]).result(LIMIT)  # later, the peer is only asked to read
    local.events()
    with ExitStack() as stopped:
        if delay is None:
            stopped.enter_context(remote.stopped())
        push = local.push(remote_kv[blocks], cache[blocks], timeout=1.5, notify=b"pushed")
        if delay is not None:
            time.sleep(delay)
            stopped.enter_context(remote.stopped())
        (event,) = of(Completed, gather(local, lambda seen: bool(of(Completed, seen))))
        assert event.transfer is push
        assert event.error is None or type(event.error) is Timeout, event.error
        reading = event.error is not None and push.bytes > 0 and "may have been" not in str(event.error)
        if reading and carried_by == "auto":
            assert local.peers == [], "the answer of the peer would still count"
        for tensor in cache.tensors:
            tensor.numpy()[:] = 0xEE
    remote.do(
        f"engine.copy(kv[[{rows - 1}]], kv[[0]]).result(LIMIT)"
    )  # waits until no request of the push uses its blocks
    remote.do("held = contents(kv)")
    sources = allocate(local, "again", seed=1, **shape)

    def pushed_again() -> bool:
        peer = local.link(remote.address, timeout=LIMIT).result(LIMIT)
        return accepted(lambda: local.push(peer["kv"][blocks], sources[blocks], notify=b"again"), PeerLost)

    remote_told = remote.do("take().count(b'pushed')")
    eventually(pushed_again)
    eventually(lambda: b"again" in remote.do("take()"))
    told = remote.do("told.count(b'pushed')")
    assert told in ({1} if event.error is None else {0, 1})
    assert told >= remote_told
    if told:
        assert remote.do(f"rows(held, 0, {named}) == rows(contents(kv), 0, {named})"), "a message without the bytes"
    assert remote.do(f"rows(held, {named + 1}, {rows - 1}) == rows(before, {named + 1}, {rows - 1})"), (
        "blocks not named"
    )
    assert of(Completed, local.events()) == [], "the push has ended once"
    assert of(Message, local.events()) == []
