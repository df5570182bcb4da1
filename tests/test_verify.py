"""Verified pulls and pushes over real links: a bit that changes on the way is found, in every kind of call.

The core's `verification` tests cover the moments between the move and the comparison, and every kind of memory.
"""

from __future__ import annotations

from typing import Any, Callable

import pytest

from llm_datadist import LLMException, events
from peers import (
    INVALID,
    LIMIT,
    OK,
    End,
    Ends,
    Peer,
    Proxy,
    by_blocks,
    by_request,
    by_slot,
    equal,
    kv_options,
    options,
    pattern,
)
from peers.values import cache_key as key
from peers.values import code

FAILED = "LLM_VERIFY_FAILED"
ROWS, ROW_BYTES = 64, 4096
BYTES = 2 * ROWS * ROW_BYTES


def verified(end: Any) -> tuple[int, int]:
    counted = end.stats()["verify"]
    return counted["blocks"], counted["mismatches"]


def test_every_call_can_verify(pair: tuple[End, Peer], way: dict[str, Any]) -> None:
    near, far = pair
    accessible = way["accessible"]
    far.allocate("f", ROWS, ROW_BYTES, 2, blocks=True, keys=[by_blocks(0)], seed=1)
    near.allocate("n", ROWS, ROW_BYTES, 2, blocks=True)
    near.allocate("s", 3, 70_000, 2)
    handle, slots, manager = near.held["n"].handle, near.held["s"].handle, near.manager
    far_blocks = key(by_blocks(2))

    def counts(count: int, call: Callable[[], Any]) -> None:
        before = verified(near)
        call()
        assert verified(near) == (before[0] + count, 0)

    rows = list(range(10))
    limit = int(1000 * LIMIT)
    counts(10, lambda: manager.pull_blocks(far_blocks, handle, rows, rows, verify="full"))
    counts(1, lambda: manager.pull_blocks(far_blocks, handle, rows, rows, verify="sample"))
    counts(0, lambda: manager.pull_blocks(far_blocks, handle, rows, rows, verify="off"))
    counts(0, lambda: manager.pull_blocks(far_blocks, handle, rows, rows, verify=None))
    counts(10, lambda: manager.pull_blocks_async(far_blocks, handle, rows, rows, verify="full").result(limit))
    part = (far_blocks, handle, rows, rows)
    counts(20, lambda: manager.pull_group([part, part], verify="full"))
    counts(2, lambda: manager.pull_group_async([part, part], verify="sample").result(limit))

    def slot(number: int) -> Any:
        cache = far.allocate(f"s{number}", 1, 70_000, 2, keys=[by_request(0, number)], seed=number)
        return key(by_slot(2, cache) if accessible else by_request(2, number))

    counts(2, lambda: manager.pull_cache(slot(1), slots, 2, verify="full"))
    counts(2, lambda: manager.pull_cache_async(slot(2), slots, 1, verify="full").result(limit))
    assert equal([rows[2:] for rows in near.read("s")], pattern(1, 2, 1, 70_000))
    if not accessible:
        return
    counts(10, lambda: manager.push_blocks(far_blocks, handle, rows, rows, verify="full"))
    counts(10, lambda: manager.push_blocks_async(far_blocks, handle, rows, rows, verify="full").result(limit))
    counts(20, lambda: manager.push_group([part, part], verify="full"))
    counts(20, lambda: manager.push_group_async([part, part], verify="full").result(limit))
    to = key(by_slot(2, far.allocate("t", 3, 70_000, 2), 1))
    counts(2, lambda: manager.push_cache(to, slots, 2, verify="full"))
    counts(2, lambda: manager.push_cache_async(to, slots, 2, verify="full").result(limit))


def test_copies_and_swaps_follow_the_option_of_the_engine(ends: Ends) -> None:
    near = ends.near(options(llm__Verify="full"))
    near.allocate("d", 8, 5000, 3, blocks=True, seed=1)
    near.allocate("h", 8, 5000, 3, blocks=True, host=True)
    near.allocate("s", 3, 70_000, 2, seed=2)
    near.swap_blocks("d", "h", [(0, 1), (1, 2), (7, 0)])
    assert verified(near) == (3, 0)
    near.swap_blocks("h", "d", [(1, 4)])
    assert verified(near) == (4, 0)
    near.copy_blocks("d", [(1, 2), (2, 3), (5, 5)])
    assert verified(near) == (6, 0)
    near.copy_cache("s", "s", 1, 2)  # two pieces of each slot
    assert verified(near) == (8, 0)
    assert (near.read("s")[1][1] == near.read("s")[1][2]).all()


@pytest.mark.parametrize("given", ["Full", "", "on", "full "])
def test_other_words_are_refused(served: tuple[End, Peer], given: str) -> None:
    near, far = served
    far.allocate("f", 4, 64, 2, blocks=True, keys=[by_blocks(0)])
    near.allocate("n", 4, 64, 2, blocks=True)
    assert code(near.pull_blocks, by_blocks(2), "n", [1], [1], verify=given) == INVALID
    assert code(near.push_blocks, by_blocks(2), "n", [1], [1], verify=given) == INVALID
    for wrong in (1, b"full", True):
        with pytest.raises(TypeError, match="verify"):
            near.pull_blocks(by_blocks(2), "n", [1], [1], verify=wrong)


def test_a_mismatch_is_the_outcome_of_an_asynchronous_call(ends: Ends) -> None:
    settings = options(llm__LinkTransport="tcp", llm__SyncKvCacheWaitTime=5000)
    far, near = ends.peer(settings), ends.near(settings)
    far.allocate("f", ROWS, ROW_BYTES, 2, blocks=True, keys=[by_blocks(0)], seed=1)
    near.allocate("n", ROWS, ROW_BYTES, 2, blocks=True)
    assert far.polled() == []
    rows = list(range(ROWS))
    with Proxy(far.address) as wire:
        assert near.link_clusters([(2, wire.at)])[0] == OK
        near.pull_blocks(by_blocks(2), "n", rows, rows)
        wire.flip("down", 4 * BYTES)
        call = near.manager.pull_blocks_async(
            key(by_blocks(2)), near.held["n"].handle, rows, rows, verify="full", notify=b"done"
        )
        failure = call.exception(int(1000 * LIMIT))
        assert isinstance(failure, LLMException)
        assert failure.status_code.name == FAILED
        assert "different=1" in str(failure)
        assert "cluster=2" in str(failure)
        assert isinstance(call, events.Transfer)
        assert verified(near) == (ROWS, 1)
        assert far.polled() == [], "the notification was not delivered"


def test_layers_at_different_places(pair: tuple[End, Peer], way: dict[str, Any]) -> None:
    """Each side hashes its own layers, not those of the same number."""
    near, far = pair
    far.allocate("f", 8, 4096, 6, blocks=True, keys=[by_blocks(0)], seed=1)
    near.allocate("n", 8, 4096, 6, blocks=True, seed=2)
    before = near.read("n")
    layers = {"src_layers": (2, 4), "dst_layers": (0, 2), "n": 1}
    near.pull_blocks(by_blocks(2), "n", [1, 2], [3, 4], verify="full", **layers)
    assert verified(near) == (2, 0)
    source = pattern(1, 6, 8, 4096)
    for tensor in range(2):
        assert (near.read("n")[tensor][3:5] == source[tensor + 2][1:3]).all()
        assert (near.read("n")[tensor + 2] == before[tensor + 2]).all()
    if way["accessible"]:
        layers = {"src_layers": (3, 5), "dst_layers": (1, 3), "n": 1}
        near.push_blocks(by_blocks(2), "n", [5, 6], [0, 7], verify="full", **layers)
        assert verified(near) == (4, 0)
        assert (far.read("f")[1][0] == near.read("n")[3][5]).all()


def test_the_kv_cache_manager_follows_the_option_of_the_engine(ends: Ends) -> None:
    far = ends.peer(kv_options(), 0)
    near = ends.near(kv_options(llm__Verify="full"), 0)
    assert near.link_clusters([far.at], 20000) == (OK, [OK])
    far.allocate("f", 1, 70_000, 2, keys=[by_request(0, 7)], seed=3)
    near.allocate("n", 2, 70_000, 2)
    near.pull_cache(by_request(0, 7), "n", 1)
    assert equal([rows[1:] for rows in near.read("n")], pattern(3, 2, 1, 70_000))
    assert verified(near) == (2, 0)
