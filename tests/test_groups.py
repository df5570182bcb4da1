"""Groups of pulls and pushes: the bytes of all parts or a failure, and keys that are released last."""

from __future__ import annotations

import time
from typing import Any

import pytest

from layers import FINALIZED
from llm_datadist import LLMException
from llm_datadist.events import Completed
from peers import GONE, INVALID, LIMIT, OK, End, Ends, Peer, by_blocks, by_request, equal, outcome, together
from peers.values import cache_key as key

LIMIT_MS = int(LIMIT * 1000)
SIZES = {"full": (8, 640), "window": (4, 96), "state": (2, 4000)}


def both(pair: tuple[End, Peer]) -> tuple[End, Peer]:
    """Three caches with other sizes and numbers of tensors at each end."""
    near, far = pair
    for number, (name, (blocks, size)) in enumerate(SIZES.items()):
        near.allocate(name, blocks, size, number + 1, blocks=True, seed=number)
        far.allocate(name, blocks, size, number + 1, blocks=True, keys=[by_blocks(0, number)], seed=10 + number)
    return near, far


def parts(near: End, *lists: tuple[list[int], list[int]]) -> list[Any]:
    names = enumerate(zip(SIZES, lists))
    return [(key(by_blocks(2, number)), near.held[name].handle, src, dst) for number, (name, (src, dst)) in names]


THREE = (([5, 1], [0, 7]), ([3], [2]), ([0, 1], [1, 0]))


def test_all_parts_arrive(served: tuple[End, Peer]) -> None:
    near, far = both(served)
    expected = {name: near.read(name) for name in SIZES}
    for name, (src, dst) in zip(SIZES, THREE):
        for ours, theirs in zip(expected[name], far.read(name)):
            ours[dst] = theirs[src]
    transfer = near.manager.pull_group_async(parts(near, *THREE))
    assert transfer.result(LIMIT_MS) is None
    for name in SIZES:
        assert equal(near.read(name), expected[name]), name
    moved = sum((number + 1) * len(src) * SIZES[name][1] for number, (name, (src, _)) in enumerate(zip(SIZES, THREE)))
    assert (transfer.bytes, transfer.progress()) == (moved, (moved, moved))


def test_pushes_arrive(one_sided: tuple[End, Peer]) -> None:
    near, far = both(one_sided)
    expected = {name: far.read(name) for name in SIZES}
    for name, (src, dst) in zip(SIZES, THREE):
        for theirs, ours in zip(expected[name], near.read(name)):
            theirs[dst] = ours[src]
    near.manager.push_group(parts(near, *THREE))
    for name in SIZES:
        assert equal(far.read(name), expected[name]), name


def test_one_cache_in_several_parts(served: tuple[End, Peer]) -> None:
    near, far = both(served)
    full = near.held["full"].handle
    source = far.read("full")
    near.manager.pull_group(((key(by_blocks(2, 0)), full, [1], [0]), (key(by_blocks(2, 0)), full, (2, 3), (5, 0))))
    for ours, theirs in zip(near.read("full"), source):
        assert (ours[5] == theirs[2]).all()
        assert (ours[0] == theirs[3]).all(), "parts run in their order"


def test_a_failure_is_that_of_the_whole(served: tuple[End, Peer]) -> None:
    near, far = both(served)
    far.allocate("slots", 1, 640, 1, keys=[by_request(2, 5)], seed=3)
    handle = near.held["full"].handle
    slot = (key(by_request(2, 5)), handle, [], [3])
    missing = (key(by_blocks(2, 9)), handle, [0], [0])
    before = near.read("window")
    with pytest.raises(LLMException) as caught:
        near.manager.pull_group([slot, missing])
    assert (caught.value.status_code.name, "part=1" in str(caught.value)) == (GONE, True)
    assert equal(near.read("window"), before)
    # The key of the first part was not released, so the same pull succeeds without the second part, once.
    near.manager.pull_group([slot])
    assert (near.read("full")[0][3] == far.read("slots")[0][0]).all()
    with pytest.raises(LLMException) as caught:
        near.manager.pull_group([slot])
    assert caught.value.status_code.name == GONE


def test_one_event_for_the_group(served: tuple[End, Peer]) -> None:
    near, _ = both(served)
    started = [near.manager.pull_group_async(parts(near, *THREE)) for _ in range(20)]
    assert near.dist.drain(LIMIT_MS)
    events = near.dist.poll()
    assert all(isinstance(event, Completed) for event in events)
    # A call releases its rows before it reports its end, so the events of two calls that meet may change places.
    assert len(events) == 20
    assert {event.transfer for event in events} == set(started)
    assert all(transfer.exception(0) is None for transfer in started)


def test_what_is_refused(served: tuple[End, Peer]) -> None:
    near, _ = both(served)
    good = parts(near, *THREE)
    pull = near.manager.pull_group_async
    for wrong in (None, {}, "ab", 7, iter(good)):
        with pytest.raises(TypeError, match="parts"):
            pull(wrong)  # type: ignore[arg-type]
    with pytest.raises(TypeError, match=r"parts\[1\]"):
        pull([good[0], list(good[1])])  # type: ignore[list-item]
    for wrong_part in (good[0][:3], (*good[0], None, None, None)):
        with pytest.raises(LLMException, match=r"len\(parts\[0\]\)"):
            pull([wrong_part])
    with pytest.raises(LLMException) as caught:
        pull([])
    assert caught.value.status_code.name == INVALID
    with pytest.raises(LLMException, match="part=2"):
        pull([good[0], good[1], (good[2][0], good[2][1], [0], [2])])
    with pytest.raises(TypeError, match="grant"):
        pull([(*good[0], 1)])
    with pytest.raises(TypeError, match="src_blocks"):
        pull([(good[0][0], good[0][1], "x", [0])])  # type: ignore[list-item]
    with pytest.raises(LLMException, match="timeout_ms"):
        pull(good, timeout_ms=0)
    assert near.dist.poll() == []


def test_a_peer_that_dies(served: tuple[End, Peer]) -> None:
    near, far = both(served)
    far.stop()
    started = [near.manager.pull_group_async(parts(near, *THREE), timeout_ms=LIMIT_MS) for _ in range(40)]
    far.kill()
    assert near.dist.drain(LIMIT_MS)
    assert len(near.dist.poll()) == len(started)
    near.manager.copy_blocks(near.held["full"].handle, {0: list(range(1, 8))})


def test_finalize_ends_a_group_that_waits(ends: Ends) -> None:
    """The waiting thread does not keep the engine, so its links end, and with them a push that a stopped peer reads."""
    silent = {"llm__LinkHeartbeat": 20_000, "llm__LinkSilence": LIMIT_MS}
    near, far = both(ends.pair(accessible=True, llm__SyncKvCacheWaitTime=str(LIMIT_MS), **silent))
    pushed = parts(near, *THREE)
    assert outcome(lambda: near.manager.push_group(pushed))[0] == OK

    def end(number: int) -> Any:
        if number == 0:
            return outcome(lambda: near.manager.push_group(pushed))
        time.sleep(0.5)  # the push waits for the peer by then
        return near.finalize()

    with far.stopped():
        began = time.monotonic()
        waited, _ = together(2, end)
        assert time.monotonic() - began < LIMIT / 3
    assert waited[0] == FINALIZED
