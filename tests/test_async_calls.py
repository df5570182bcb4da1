"""Asynchronous calls: the same bytes, checks and codes as the synchronous ones, one event each, limits and `await`.

The Rust tests cover order, limits, cancellation and events (`async_copies.rs`), and calls over links
(`links/asynchronous.rs`).
"""

from __future__ import annotations

import asyncio
import os
import select
import signal
import threading
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Callable

import numpy as np
import pytest

from conftest import options
from llm_datadist import CacheDesc, DataType, LLMDataDist, LLMException, LLMStatusCode, Placement
from llm_datadist.events import Completed, Transfer
from llm_datadist.status import LLMMismatchException
from peers import GONE, INVALID, LIMIT, UNLINKED, End, Peer, by_blocks, by_slot, equal, eventually
from peers import options as peer_options
from peers.values import cache_key as key

if TYPE_CHECKING:
    from collections.abc import Iterator

LIMIT_MS = int(LIMIT * 1000)


@contextmanager
def code(expected: str) -> Iterator[None]:
    with pytest.raises(LLMException) as caught:
        yield
    assert caught.value.status_code.name == expected


def refused(call: Callable[[], Any]) -> bool:
    try:
        call()
    except LLMException as error:
        return error.status_code == LLMStatusCode.LLM_FAILED and "forked" in str(error)
    return False


def pull(near: End, far_key: Any, src: list[int], dst: list[int], **kwargs: Any) -> Transfer:
    return near.manager.pull_blocks_async(key(far_key), near.held["near"].handle, src, dst, **kwargs)


def blocks_at_both_ends(pair: tuple[End, Peer]) -> tuple[End, Peer]:
    near, far = pair
    near.allocate("near", 64, 96, blocks=True, seed=1)
    far.allocate("far", 64, 96, blocks=True, keys=[by_blocks(0)], seed=2)
    return near, far


def test_pulls_and_pushes_move_the_same_bytes(one_sided: tuple[End, Peer]) -> None:
    near, far = blocks_at_both_ends(one_sided)
    source, expected = far.read("far"), near.read("near")
    transfer = pull(near, by_blocks(2), [3, 4], [0, 1])
    assert transfer.result(LIMIT_MS) is None
    for target, theirs in zip(expected, source):
        target[:2] = theirs[3:5]
    assert equal(near.read("near"), expected)
    assert (transfer.bytes, transfer.progress(), transfer.done()) == (2 * 2 * 96, (384, 384), True)
    assert transfer.nanos > 0
    assert transfer.exception(0) is None
    pushed = near.manager.push_blocks_async(key(by_blocks(2)), near.held["near"].handle, [5], [9])
    assert pushed.exception(LIMIT_MS) is None
    for target, ours in zip(source, expected):
        target[9] = ours[5]
    assert equal(far.read("far"), source)
    assert near.dist.poll() == [], "both outcomes were taken"


def test_slots_are_pulled_and_pushed(one_sided: tuple[End, Peer]) -> None:
    near, far = one_sided
    near.allocate("near", 4, 64, seed=1)
    cache = far.allocate("far", 4, 64, seed=2)
    near.manager.pull_cache_async(key(by_slot(2, cache, 3)), near.held["near"].handle, 1).result(LIMIT_MS)
    near.manager.push_cache_async(key(by_slot(2, cache, 0)), near.held["near"].handle, 1).result(LIMIT_MS)
    for ours, theirs in zip(near.read("near"), far.read("far")):
        assert (ours[1] == theirs[3]).all()
        assert (theirs[0] == theirs[3]).all()


def test_every_transfer_has_one_event(served: tuple[End, Peer]) -> None:
    near, far = blocks_at_both_ends(served)
    started = {pull(near, by_blocks(2), [block], [63 - block]) for block in range(64)}
    ended: list[Transfer] = []
    poller = select.poll()
    poller.register(near.dist.fileno(), select.POLLIN)
    while len(ended) < 64:
        assert poller.poll(LIMIT_MS), "an outcome makes the descriptor readable"
        for event in near.dist.poll(7):
            assert isinstance(event, Completed)
            ended.append(event.transfer)
    assert not poller.poll(0), "nothing is left"
    assert near.dist.poll() == []
    assert len(set(ended)) == 64
    assert set(ended) == started
    assert all(transfer.exception(0) is None for transfer in ended)
    assert all((ours == theirs[::-1]).all() for ours, theirs in zip(near.read("near"), far.read("far")))


def test_local_copies_and_swaps(start: Callable[..., LLMDataDist]) -> None:
    dist = start()
    manager = dist.cache_manager
    desc = CacheDesc(2, [8, 64], DataType.DT_UINT8)
    device = manager.allocate_blocks_cache(desc)
    host = manager.allocate_blocks_cache(CacheDesc(2, [8, 64], DataType.DT_UINT8, Placement.HOST))
    arrays = [view.numpy() for view in manager.tensor_views(device)]
    for number, array in enumerate(arrays):
        array[:] = np.arange(8)[:, None] * 10 + number
    # Each call reads what the one before wrote, so the result shows their order.
    transfers = [
        manager.copy_blocks_async(device, {0: [1]}),
        manager.swap_blocks_async(device, host, {1: 5}),
        manager.swap_blocks_async(host, device, {5: 7}),
        manager.copy_blocks_async(device, np.array([[7, 6], [6, 2]])),
    ]
    manager.copy_blocks(device, {2: [3]})
    # A synchronous call takes its turn behind them, as the rows show. The events of their ends may come a moment later.
    assert all(transfer.exception(LIMIT_MS) is None for transfer in transfers)
    for number, array in enumerate(arrays):
        assert [int(row[0]) for row in array] == [
            number if row in (0, 1, 2, 3, 6, 7) else row * 10 + number for row in range(8)
        ]
    slots = manager.allocate_cache(CacheDesc(1, [2, 64], DataType.DT_UINT8))
    view = manager.tensor_views(slots)[0].numpy()
    view[0], view[1] = 1, 2
    copied = manager.copy_cache_async(slots, slots, dst_batch_index=1, src_batch_index=0, offset=8, size=16)
    copied.result(LIMIT_MS)
    assert view[1].tolist() == [2] * 8 + [1] * 16 + [2] * 40


def test_arguments_are_refused_at_once(served: tuple[End, Peer]) -> None:
    near, _ = blocks_at_both_ends(served)
    handle, manager = near.held["near"].handle, near.manager
    with code(INVALID):
        pull(near, by_blocks(2), [0], [64])
    with pytest.raises(TypeError, match="src_blocks"):
        pull(near, by_blocks(2), range(1), [0])  # type: ignore[arg-type]
    with pytest.raises(AttributeError, match="dst_cache"):
        manager.pull_blocks_async(key(by_blocks(2)), None, [0], [0])
    with pytest.raises(LLMMismatchException):
        manager.swap_blocks_async(handle, handle, {0: 1})
    for value, error in (("1", TypeError), (True, TypeError), (-1, ValueError), (2**32, ValueError)):
        with pytest.raises(error, match="timeout_ms"):
            pull(near, by_blocks(2), [0], [0], timeout_ms=value)
    with code(INVALID):
        pull(near, by_blocks(2), [0], [0], timeout_ms=0)
    with pytest.raises(ValueError, match="max_events"):
        near.dist.poll(-1)
    assert near.dist.poll(0) == []


def test_failures_are_outcomes(served: tuple[End, Peer]) -> None:
    near, _ = blocks_at_both_ends(served)
    for far_key, expected in ((by_blocks(2, 9), GONE), (by_blocks(7), UNLINKED)):
        transfer = pull(near, far_key, [0], [0])
        with code(expected):
            transfer.result(LIMIT_MS)
        failure = transfer.exception(0)
        assert isinstance(failure, LLMException)
        assert "failed" in repr(transfer)


class TestAStoppedPeer:
    """A peer that does not answer holds its transfers, until they are cancelled or late, and no others."""

    @pytest.fixture
    def stopped(self, ends: Any) -> Any:
        near, far = ends.pair(llm__LinkTransport="tcp", llm__SyncKvCacheWaitTime=str(LIMIT_MS))
        blocks_at_both_ends((near, far))
        pull(near, by_blocks(2), [0], [0]).result(LIMIT_MS)
        far.stop()
        yield near
        os.kill(far.process.pid, signal.SIGCONT)

    def test_a_limit_of_its_own(self, stopped: End) -> None:
        transfer = pull(stopped, by_blocks(2), [0], [1], timeout_ms=50)
        with code("LLM_TIMEOUT"):
            transfer.result(LIMIT_MS)

    def test_result_does_not_wait_longer_than_told(self, stopped: End) -> None:
        transfer = pull(stopped, by_blocks(2), [0], [1])
        with pytest.raises(TimeoutError):
            transfer.result(20)
        with pytest.raises(TimeoutError):
            transfer.exception(timeout_ms=0)
        assert not transfer.done()
        assert not stopped.dist.drain(20)
        assert transfer.cancel()
        with code("LLM_FAILED"):
            transfer.result(LIMIT_MS)
        assert transfer.cancelled()
        assert not transfer.cancel()

    def test_other_calls_go_on(self, stopped: End) -> None:
        waiting = [pull(stopped, by_blocks(2), [0], [block]) for block in range(60)]
        copied = stopped.manager.copy_blocks_async(stopped.held["near"].handle, {62: [63]})
        copied.result(LIMIT_MS)
        assert all(transfer.cancel() for transfer in waiting)
        assert stopped.dist.drain(LIMIT_MS)
        stopped.manager.copy_blocks(stopped.held["near"].handle, {62: [0]})

    def test_finalize_ends_them(self, stopped: End) -> None:
        waiting = [pull(stopped, by_blocks(2), [0], [block]) for block in range(60)]
        descriptor = stopped.dist.fileno()
        stopped.finalize()
        for transfer in waiting:
            with code("LLM_ENGINE_FINALIZED"):
                transfer.result(0)
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
        with pytest.raises(RuntimeError):
            stopped.dist.poll()

    def test_cancelling_the_coroutine_leaves_the_transfer(self, stopped: End) -> None:
        transfer = pull(stopped, by_blocks(2), [0], [1])

        async def give_up() -> None:
            with pytest.raises(asyncio.TimeoutError):
                await asyncio.wait_for(transfer, 0.05)

        asyncio.run(give_up())
        assert not transfer.done()
        assert transfer.cancel()


def test_a_call_uses_only_the_link_over_which_it_was_started(ends: Any) -> None:
    """A pull waits for its rows while the peer is killed and another process takes its place."""
    settings = peer_options(pool=64 << 20)
    far, near = ends.peer(settings), ends.near(settings)
    assert near.link_clusters([far.at], 3000)[0] == "LLM_SUCCESS"
    near.allocate("near", 4, 8 << 20, 1, blocks=True)
    far.allocate("far", 4, 8 << 20, 1, blocks=True, keys=[by_blocks(0)])
    handle = near.held["near"].handle
    far.stop()  # so that it answers nothing, even if the copies end early
    copies = [near.manager.copy_blocks_async(handle, {0: [1]}, timeout_ms=LIMIT_MS) for _ in range(40)]
    waiting = pull(near, by_blocks(2), [0], [1], timeout_ms=LIMIT_MS)
    far.kill()
    other = ends.peer(settings)
    other.allocate("far", 4, 8 << 20, 1, blocks=True, keys=[by_blocks(0)])
    near.link_clusters([other.at], 3000)
    assert near.dist.peers()
    assert all(copy.exception(LIMIT_MS) is None for copy in copies)
    with code(UNLINKED):
        waiting.result(LIMIT_MS)
    assert pull(near, by_blocks(2), [0], [1], timeout_ms=LIMIT_MS).exception(LIMIT_MS) is None


def test_await_many(served: tuple[End, Peer]) -> None:
    near, far = blocks_at_both_ends(served)

    async def all_of_them() -> list[Any]:
        transfers = [pull(near, by_blocks(2), [block], [block]) for block in range(64)]
        twice = [transfer for transfer in transfers for _ in range(2)]
        refused = pull(near, by_blocks(7), [0], [0])
        return await asyncio.gather(*twice, refused, return_exceptions=True)

    for _ in range(3):
        *arrived, refused = asyncio.run(all_of_them())
        assert arrived == [None] * 128
        assert isinstance(refused, LLMException)
    assert equal(near.read("near"), far.read("far"))
    assert near.dist.poll() == [], "await has taken the outcomes"


def test_loops_of_several_threads(served: tuple[End, Peer]) -> None:
    near, _ = blocks_at_both_ends(served)
    done = []

    async def some(base: int) -> None:
        for block in range(base, base + 16):
            await pull(near, by_blocks(2), [block], [block])
        done.append(base)

    threads = [threading.Thread(target=lambda base=base: asyncio.run(some(base))) for base in (0, 16, 32, 48)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(LIMIT)
    assert sorted(done) == [0, 16, 32, 48]


def test_a_forked_child_is_refused(served: tuple[End, Peer]) -> None:
    near, far = blocks_at_both_ends(served)
    transfer = pull(near, by_blocks(2), [0], [0])
    transfer.result(LIMIT_MS)
    dist, descriptor = near.dist, near.dist.fileno()
    calls = (
        transfer.done,
        lambda: dist.notify(2, b"of the child"),
        dist.peers,
        dist.poll,
        dist.fileno,
        dist.drain,
        lambda: pull(near, by_blocks(2), [0], [0]),
    )
    child = os.fork()
    if child == 0:
        os._exit(sum(map(refused, calls)))
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == len(calls)
    # The parent goes on, with the same descriptor.
    assert dist.fileno() == descriptor
    assert [peer.cluster_id for peer in dist.peers()] == [2]
    dist.notify(2, b"of the parent")
    transfer = pull(near, by_blocks(2), [1], [1], notify=b"of the call")
    assert select.select([dist], [], [], LIMIT)[0]
    assert [event.transfer for event in dist.poll()] == [transfer]
    transfer.result(0)
    assert far.polled() == [(1, b"of the parent"), (1, b"of the call")]


def test_handles_and_events() -> None:
    with pytest.raises(TypeError):
        Transfer()
    assert Completed.__match_args__ == ("transfer",)


def test_only_the_cache_manager_has_them(start: Callable[..., LLMDataDist]) -> None:
    dist = start({**options(), "llm.EnableCacheManager": "0"})
    for call in (dist.poll, dist.fileno, dist.drain):
        with code(INVALID):
            call()


def test_a_transfer_outlives_its_engine(start: Callable[..., LLMDataDist]) -> None:
    dist = start()
    manager = dist.cache_manager
    cache = manager.allocate_blocks_cache(CacheDesc(1, [8, 64], DataType.DT_UINT8))
    transfer = manager.copy_blocks_async(cache, {0: [1]})
    eventually(transfer.done)
    dist.finalize()
    assert transfer.result(0) is None
    with code("LLM_ENGINE_FINALIZED"):
        manager.copy_blocks_async(cache, {0: [1]})
