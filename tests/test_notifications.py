"""Notifications between peers, alone and attached to calls, and the events of links.

The hostile side is in `test_hostile_requests.py`; the C++ interface has tests of its own.
"""

from __future__ import annotations

import time
from typing import Any, Callable

import pytest

from llm_datadist import LLMException
from llm_datadist.events import Completed, LinkDown, LinkUp, Notification
from llm_datadist.events import Peer as PeerHandle
from peers import GONE, INVALID, LIMIT, OK, UNLINKED, End, Peer, by_blocks, by_request, by_slot, eventually
from peers.values import cache_key as key

BUSY = "LLM_LINK_BUSY"
LIMIT_MS = int(LIMIT * 1000)


def refused(expected: str, call: Callable[[], Any]) -> LLMException:
    with pytest.raises(LLMException) as caught:
        call()
    assert caught.value.status_code.name == expected, caught.value
    return caught.value


def accepted(near: End, message: bytes) -> bool:
    try:
        near.dist.notify(2, message)
    except LLMException as error:
        return error.status_code.name != BUSY
    return True


def received(far: End | Peer, count: int) -> list[tuple[int, bytes]]:
    """Wait until an engine has polled `count` notifications. Return them with their clusters."""
    got: list[tuple[int, bytes]] = []

    def enough() -> bool:
        got.extend(far.polled())
        return len(got) >= count

    eventually(enough)
    return got


def test_messages_arrive_in_order(served: tuple[End, Peer]) -> None:
    near, far = served
    sent = [f"message {number}".encode() * (number % 7) for number in range(1000)]
    for message in sent:
        near.dist.notify(2, message)
    assert received(far, 1000) == [(1, message) for message in sent]
    assert far.polled() == []
    far.notify(1, b"back")
    events: list[Any] = []

    def there() -> bool:
        events.extend(event for event in near.dist.poll() if isinstance(event, Notification))
        return bool(events)

    eventually(there)
    assert [(event.cluster_id, event.payload) for event in events] == [(2, b"back")]


def test_the_window_is_bounded_and_polling_makes_room(served: tuple[End, Peer]) -> None:
    near, far = served
    for number in range(1024):
        near.dist.notify(2, bytes([number % 256]))
    error = refused(BUSY, lambda: near.dist.notify(2, b"one more"))
    assert "1024" in str(error)
    near.allocate("near", 4, 96, blocks=True)
    far.allocate("far", 4, 96, blocks=True, keys=[by_blocks(0)], seed=2)
    before = near.read("near")
    handle = near.held["near"].handle
    refused(BUSY, lambda: near.manager.pull_blocks(key(by_blocks(2)), handle, [1], [0], notify=b"x"))
    assert (near.read("near")[0] == before[0]).all(), "nothing has moved"
    near.manager.pull_blocks(key(by_blocks(2)), handle, [1], [0])
    assert len(received(far, 1024)) == 1024
    eventually(lambda: accepted(near, b"again"))
    assert received(far, 1) == [(1, b"again")]


def test_the_bytes_of_the_window_are_bounded(served: tuple[End, Peer]) -> None:
    near, far = served
    large = bytes(65536)
    for _ in range(64):
        near.dist.notify(2, large)
    refused(BUSY, lambda: near.dist.notify(2, b"x"))
    near_messages = received(far, 64)
    assert near_messages == [(1, large)] * 64


def test_the_window_does_not_shrink(served: tuple[End, Peer]) -> None:
    """Thousands of messages, some with calls, are polled while they arrive. The window is as large as before."""
    near, far = served
    near.allocate("near", 64, 96, blocks=True)
    far.allocate("far", 64, 96, blocks=True, keys=[by_blocks(0)], seed=2)
    handle, got, sent = near.held["near"].handle, 0, 0
    transfers = []
    while sent < 6000:
        if not accepted(near, b"x"):
            got += len(far.polled())
            continue
        sent += 1
        if sent % 10 == 0:
            block = sent // 10 % 64
            transfers.append(near.manager.pull_blocks_async(key(by_blocks(2)), handle, [0], [block], notify=b"y"))
            sent += 1
    failures = [transfer.exception(LIMIT_MS) for transfer in transfers]
    sent -= sum(failure is not None for failure in failures)

    def all_there() -> bool:
        nonlocal got
        got += len(far.polled())
        return got == sent

    eventually(all_there)
    for _ in range(1024 - 127):
        # The last report of what was polled may still be on its way. Nobody polls now, so a smaller window stays full.
        eventually(lambda: accepted(near, b"x"))


def test_calls_do_not_wait_for_a_worker_of_messages(served: tuple[End, Peer]) -> None:
    """More calls with messages than workers, and a plain message between them."""
    near, far = served
    near.allocate("near", 64, 4096, 4, blocks=True)
    far.allocate("far", 64, 4096, 4, blocks=True, keys=[by_blocks(0)], seed=2)
    handle = near.held["near"].handle
    transfers = []
    for block in range(64):
        transfers.append(near.manager.pull_blocks_async(key(by_blocks(2)), handle, [block], [block], notify=b"call"))
        near.dist.notify(2, b"plain")
    assert [transfer.exception(LIMIT_MS) for transfer in transfers] == [None] * 64
    assert sorted(received(far, 128)) == [(1, b"call")] * 64 + [(1, b"plain")] * 64


def test_one_comes_with_a_pull(served: tuple[End, Peer]) -> None:
    """Earlier messages come first. The key of a slot is released when the message is there."""
    near, far = served
    near.allocate("near", 4, 96, blocks=True)
    near.allocate("slots", 1, 96)
    far.allocate("far", 4, 96, blocks=True, keys=[by_blocks(0)], seed=2)
    far.allocate("slot", 1, 96, keys=[by_request(2, 5)], seed=3)
    handle, slots = near.held["near"].handle, near.held["slots"].handle
    near.dist.notify(2, b"first")
    near.manager.pull_blocks(key(by_blocks(2)), handle, [1], [0], notify=b"second")
    near.manager.pull_blocks_async(key(by_blocks(2)), handle, [2], [1], notify=b"third").result(LIMIT_MS)
    near.manager.pull_cache(key(by_request(2, 5)), slots, notify=bytearray(b"fourth"))
    assert received(far, 4) == [(1, word) for word in (b"first", b"second", b"third", b"fourth")]
    refused(GONE, lambda: near.manager.pull_cache(key(by_request(2, 5)), slots, notify=b"never"))
    group = [(key(by_blocks(2)), handle, [1], [2]), (key(by_blocks(2)), handle, [2], [3])]
    near.manager.pull_group(group, notify=b"group")
    assert received(far, 1) == [(1, b"group")]
    assert far.polled() == []


def test_one_comes_with_a_push(one_sided: tuple[End, Peer]) -> None:
    near, far = one_sided
    near.allocate("near", 4, 96, seed=1)
    cache = far.allocate("far", 4, 96, seed=2)
    far.allocate("blocks", 4, 96, blocks=True, keys=[by_blocks(0)], seed=3)
    near.allocate("mine", 4, 96, blocks=True, seed=4)
    near.manager.push_cache(key(by_slot(2, cache, 1)), near.held["near"].handle, 2, notify=b"slot")
    mine = near.held["mine"].handle
    near.manager.push_blocks(key(by_blocks(2)), mine, [0], [3], notify=b"blocks")
    near.manager.push_blocks_async(key(by_blocks(2)), mine, [1], [2], notify=b"later").result(LIMIT_MS)
    assert received(far, 3) == [(1, b"slot"), (1, b"blocks"), (1, b"later")]
    assert (far.read("far")[0][1] == near.read("near")[0][2]).all()


def test_bad_arguments(served: tuple[End, Peer]) -> None:
    near, far = served
    near.allocate("near", 4, 96, blocks=True)
    far.allocate("far", 4, 96, blocks=True, keys=[by_blocks(0)])
    handle = near.held["near"].handle
    for wrong in ("text", None, 7, [1], memoryview(b"x")):
        with pytest.raises(TypeError, match="payload"):
            near.dist.notify(2, wrong)  # type: ignore[arg-type]
    for wrong in ("text", 7):
        with pytest.raises(TypeError, match="notify"):
            near.manager.pull_blocks(key(by_blocks(2)), handle, [0], [0], notify=wrong)
    with pytest.raises(TypeError, match="cluster_id"):
        near.dist.notify("2", b"x")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="cluster_id"):
        near.dist.notify(-1, b"x")
    refused(INVALID, lambda: near.dist.notify(2, bytes(65537)))
    refused(INVALID, lambda: near.manager.pull_blocks(key(by_blocks(2)), handle, [0], [0], notify=bytes(65537)))
    refused(INVALID, lambda: near.dist.notify(1, b"x"))
    refused(UNLINKED, lambda: near.dist.notify(9, b"x"))
    near.dist.notify(2, b"")
    near.dist.notify(2, bytes(65536))
    assert received(far, 2) == [(1, b""), (1, bytes(65536))]
    two = [(key(by_blocks(2)), handle, [0], [0]), (key(by_blocks(3)), handle, [0], [1])]
    refused(INVALID, lambda: near.manager.pull_group(two, notify=b"x"))


def test_links_come_and_go(served: tuple[End, Peer]) -> None:
    near, far = served
    assert near.dist.poll() == [], "news are kept from the first poll on"
    peer = near.dist.peers()[0]
    assert (peer.cluster_id, peer.transport in ("shm", "tcp"), ":" in peer.address) == (2, True, True)
    far.stop()
    for number in range(5):
        near.dist.notify(2, bytes([number]))
    far.kill()
    events: list[Any] = []

    def down() -> bool:
        events.extend(near.dist.poll())
        return any(isinstance(event, LinkDown) for event in events)

    eventually(down)
    (event,) = events
    assert isinstance(event, LinkDown)
    assert isinstance(event.peer, PeerHandle)
    assert (event.peer, event.unacknowledged) == (peer, 5)
    assert event.reason
    assert near.dist.peers() == []
    refused(UNLINKED, lambda: near.dist.notify(2, b"x"))


def test_the_other_side_learns_of_an_unlink(served: tuple[End, Peer]) -> None:
    near, far = served
    assert far.downs() == []
    assert near.unlink_clusters([far.at], 3000) == (OK, [OK])
    downs: list[tuple[int, str]] = []

    def told() -> bool:
        downs.extend(far.downs())
        return bool(downs)

    eventually(told)
    assert downs == [(1, "the peer unlinked")]


def test_events_of_all_kinds_in_one_queue(served: tuple[End, Peer]) -> None:
    near, far = served
    near.allocate("near", 4, 96, blocks=True)
    fileno = near.dist.fileno()
    far.notify(1, b"hello")
    near.manager.copy_blocks_async(near.held["near"].handle, {0: [1]})
    seen: list[Any] = []

    def both() -> bool:
        seen.extend(near.dist.poll(1))
        return len(seen) == 2

    eventually(both)
    assert {type(event) for event in seen} == {Notification, Completed}
    match_args = [event.__match_args__ for event in (Notification, LinkUp, LinkDown)]
    assert match_args == [("cluster_id", "payload"), ("peer",), ("peer", "reason", "unacknowledged")]
    assert near.dist.fileno() == fileno


def test_messages_of_a_link_that_broke_are_still_there(served: tuple[End, Peer]) -> None:
    near, far = served
    near.allocate("mine", 4, 96, blocks=True, keys=[by_blocks(0)])
    far.allocate("theirs", 4, 96, blocks=True)
    for number in range(19):
        far.notify(1, bytes([number]))
    # It comes behind the others, so they have all arrived when the call returns.
    far.pull_blocks(by_blocks(1), "theirs", [0], [0], notify=bytes([19]))
    far.kill()
    time.sleep(0.1)
    payloads = []

    def all_of_them() -> bool:
        payloads.extend(event.payload for event in near.dist.poll() if isinstance(event, Notification))
        return len(payloads) == 20

    eventually(all_of_them)
    assert payloads == [bytes([number]) for number in range(20)]
