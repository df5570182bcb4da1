"""Pulls and pushes between engines: bytes, outcomes, events, groups, layers, and waiting for them.

Not for: caches with different layouts (`test_layouts.py`).
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist.native import (
    Cancelled,
    Closed,
    Completed,
    Error,
    InvalidArgument,
    Message,
    NotFound,
    PeerLost,
    Timeout,
    Transfer,
)
from peers import eventually, together

from .helpers import (
    BLOCKS,
    LIMIT,
    ROW,
    TENSORS,
    Model,
    accepted,
    address,
    allocate,
    blocks_of,
    check_times,
    fails,
    fill,
    gather,
    layout,
    messages,
    next_of,
    of,
    refused,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from .conftest import Open, Pair
    from .helpers import Remote


TRANSPORTS = ["auto", "tcp"]
NAMES = itertools.count()


def running(pair: Pair) -> Transfer[None]:
    """A transfer that does not end by itself: a push to block 0 of `kv` that waits for its four layers."""
    cache = allocate(pair.local, f"running {next(NAMES)}")
    return pair.local.push(pair.peer["kv"][[0]], cache[[0]], layerwise=True)


@pytest.fixture
def push(pair: Pair) -> Transfer[None]:
    """The same, to a cache of its own."""
    pair.caches()
    return running(pair)


def report_layers(push: Transfer[None], *layers: int) -> None:
    """Report layers as ready: all of them, unless some are named."""
    for layer in layers or range(TENSORS):
        push.ready(layer)


@pytest.mark.parametrize("verify", ["off", "sample", "full"])
@pytest.mark.parametrize("verb", ["pull", "push"])
def test_pull_and_push(pair: Pair, verb: str, verify: Any) -> None:
    mine, theirs = pair.caches()
    target, source = (mine, theirs) if verb == "pull" else (theirs, mine)
    model, before, remote_kv = Model(target), Model(source), pair.peer["kv"]
    if verb == "pull":
        transfer = pair.local.pull(mine[[3, 9, 4]], remote_kv[[0, 0, 15]], verify=verify)
    else:
        transfer = pair.local.push(remote_kv[[3, 9, 4]], mine[[0, 0, 15]], verify=verify)
    assert transfer.result(LIMIT) is None
    model.write([3, 9, 4], before, [0, 0, 15]).check(target)
    before.check(source)
    assert (transfer.done(), transfer.bytes, transfer.total) == (True, 3 * 4 * 96, 3 * 4 * 96)
    assert transfer.nanos > 0
    assert (pair.local.stats()["verify"]["blocks"] > 0) == (verify != "off")


def test_another_process(start: Open, begin_remote: Callable[..., Remote], carried_by: str) -> None:
    remote, local = begin_remote(transport=carried_by), start(transport=carried_by)
    mine = allocate(local, seed=1)
    remote.do("kv = allocate(engine, seed=2)")
    peer = local.link(remote.address).result(LIMIT)
    assert peer.transport == ("tcp" if carried_by == "tcp" else "shm")
    model, theirs = Model(mine), Model(remote.do("contents(kv)"))
    local.pull(mine[[3, 9]], peer["kv"][[5, 6]], verify="full").result(LIMIT)
    model.write([3, 9], theirs, [5, 6]).check(mine)
    local.push(peer["kv"][[1]], mine[[9]], verify="full").result(LIMIT)
    theirs.write([1], model, [9])
    assert remote.do("contents(kv)") == [bytes(tensor) for tensor in theirs.tensors]


def test_last_of_repeated_destinations_counts(pair: Pair) -> None:
    mine, theirs = pair.caches()
    model = Model(mine)
    pair.local.pull(mine[[3, 3, 4, 3]], pair.peer["kv"][[1, 2, 3, 4]]).result(LIMIT)
    model.write([3, 4], Model(theirs), [4, 3]).check(mine)


def test_thirty_two_at_once(pair: Pair) -> None:
    """Each transfer has one `Completed` with the handle that the call returned, and nothing else comes."""
    mine, theirs = pair.caches(blocks=64)
    model = Model(mine)
    started = {pair.local.pull(mine[[32 + n]], pair.peer["kv"][[n]]): n for n in range(32)}
    seen = gather(pair.local, lambda seen: len(of(Completed, seen)) >= 32)
    done = of(Completed, seen)
    assert len(done) == 32
    assert {event.transfer for event in done} == set(started)
    assert [event.error for event in done] == [None] * 32
    model.write(range(32, 64), Model(theirs), range(32)).check(mine)
    assert pair.local.events() == []
    assert all(transfer.result(0) is None for transfer in started), "the outcome stays after its event"


def test_dropped_handle(pair: Pair) -> None:
    """The transfer goes on, and its event has a handle."""
    mine, theirs = pair.caches()
    model = Model(mine)
    pair.local.pull(mine[[1]], pair.peer["kv"][[2]])
    gc.collect()
    event = next_of(pair.local, Completed)
    assert event.error is None
    assert event.transfer.result(0) is None
    model.write([1], Model(theirs), [2]).check(mine)


def test_dropped_layerwise_push_is_cancelled(pair: Pair) -> None:
    pair.caches()
    push = running(pair)
    push.ready(0)
    del push
    gc.collect()
    assert type(next_of(pair.local, Completed).error) is Cancelled


def test_events_as_patterns(pair: Pair) -> None:
    mine, _ = pair.caches()
    pair.local.pull(mine[[1]], pair.peer["kv"][[2]])
    event = next_of(pair.local, Completed)
    assert type(event).__match_args__ == ("transfer", "error")
    assert type(event).__module__.startswith("llm_datadist")
    assert "Completed" in repr(event)


# Failures


def test_cache_that_the_peer_does_not_have(pair: Pair) -> None:
    mine, _ = pair.caches()
    model = Model(mine)
    error = fails(NotFound, lambda: pair.local.pull(mine[[1]], pair.peer["absent"][[2]]))
    assert error.code == "not_found"
    assert "absent" in str(error)
    assert error.facts["incarnation"] == str(pair.peer.incarnation)
    assert error.arrived == []
    assert isinstance(error, LookupError)
    fails(NotFound, lambda: pair.local.push(pair.peer["absent"][[2]], mine[[1]]))
    model.check(mine)


def test_wrong_arguments(pair: Pair, start: Open) -> None:
    local, remote_kv = pair.local, pair.peer["kv"][[1]]
    kv, _ = pair.caches()
    model, rows, stranger = Model(kv), kv[[1]], start(name="stranger", listen="127.0.0.1:0")
    other = allocate(stranger)[[1]]
    of_other = stranger.link(address(pair.remote)).result(LIMIT)["kv"][[1]]
    for call in (local.pull, local.push):
        good = (rows, remote_kv) if call == local.pull else (remote_kv, rows)
        local_name, remote_name = ("dst", "src") if call == local.pull else ("src", "dst")
        swap = (lambda a, b: (a, b)) if call == local.pull else (lambda a, b: (b, a))  # (local, remote) to (dst, src)
        wrong: list[tuple[Any, ...]] = [
            (), good[:1], (None, good[1]), (good[0], None), (good[0], kv), ([good], good[1]), ([good[:1]],),
            ([(*good, None)],), ([(*good, None, None)],), (list(good),), ("ab",), ({good[0]: good[1]},),
        ]  # fmt: skip
        for arguments in wrong:
            with pytest.raises(TypeError):
                call(*arguments)  # type: ignore[arg-type]
        refused("dst", lambda call=call: call([]))  # type: ignore[misc]
        refused(remote_name, lambda call=call, swap=swap: call(*swap(rows, rows)))  # type: ignore[misc]
        refused(local_name, lambda call=call, swap=swap: call(*swap(remote_kv, remote_kv)))  # type: ignore[misc]
        refused(local_name, lambda call=call, swap=swap: call(*swap(other, remote_kv)), "stranger")  # type: ignore[misc]
        refused(remote_name, lambda call=call, swap=swap: call(*swap(rows, of_other)), "stranger")  # type: ignore[misc]
        refused("verify", lambda call=call, good=good: call(*good, verify="most"))  # type: ignore[misc]
        refused("notify", lambda call=call, good=good: call(*good, notify=bytes(65537)))  # type: ignore[misc]
        check_times(lambda time, call=call, good=good: call(*good, timeout=time))  # type: ignore[misc]
        for keywords in (
            {"grnt": b""}, {"timeout_ms": 5}, {"notify": "text"}, {"notify": 5}, {"verify": 1}, {"verify": True},
            {"grant": "text"} if call == local.pull else {"grant": b""}, {"last": 1}, {"layerwise": 1},
        ):  # fmt: skip
            with pytest.raises(TypeError):
                call(*good, **keywords)  # type: ignore[arg-type]
        fails(InvalidArgument, lambda call=call, swap=swap: call(*swap(kv[[1, 2]], remote_kv)))  # type: ignore[misc]
    model.check(kv)
    assert of(Completed, local.events()) == []


def test_other_transfers_go_on_while_a_peer_is_stopped(start: Open, remote: Remote) -> None:
    """Sixty pulls wait for the peer. A copy of other blocks does not, and a cancelled pull frees its blocks at once.

    Others end after their own time, and the link works afterwards.
    """
    local = start(transport="tcp", silence=600.0)
    mine = allocate(local, seed=1, blocks=64)
    peer = local.link(remote.address).result(LIMIT)
    local.pull(mine[[0]], peer["kv"][[0]]).result(LIMIT)
    late = local.push(peer["kv"][[3]], mine[[61]], layerwise=True, timeout=0.2)
    eventually(lambda: late.total > 0)
    with remote.stopped():
        waiting = [local.pull(mine[[block]], peer["kv"][[0]]) for block in range(60)]
        local.copy(mine[[63]], mine[[62]]).result(LIMIT)
        assert all(pull.cancel() for pull in waiting)
        for pull in waiting:
            fails(Cancelled, lambda pull=pull: pull)  # type: ignore[misc]
        local.copy(mine[[0]], mine[[62]]).result(LIMIT)
        fails(Timeout, lambda: local.pull(mine[[1]], peer["kv"][[2]], timeout=0.2))
        fails(Timeout, lambda: local.push(peer["kv"][[2]], mine[[1]], timeout=0.2))
        report_layers(late)
        assert "layer" in fails(Timeout, lambda: late).facts
    local.pull(mine[[1]], peer["kv"][[2]]).result(LIMIT)


# Waiting and cancelling


def test_result_of_a_running_transfer(push: Transfer[None]) -> None:
    assert not push.done()
    for time in (0, 0.0, 0.01):
        with pytest.raises(TimeoutError) as caught:
            push.result(time)
        assert not isinstance(caught.value, Error), "the outcome would be a Timeout"
    check_times(push.result, zero=True)
    assert not push.done()


def test_cancel(pair: Pair, push: Transfer[None]) -> None:
    assert push.cancel()
    error = fails(Cancelled, lambda: push)
    assert error.code == "cancelled"
    assert push.done()
    kv = allocate(pair.local, "plain")
    done = pair.local.copy(kv[[1]], kv[[2]])
    done.result(LIMIT)
    assert not done.cancel()
    assert done.result(0) is None


def test_threads_wait_for_one_transfer(pair: Pair, push: Transfer[None]) -> None:
    got: list[None] = []
    threads = [
        threading.Thread(target=lambda: got.append(push.result(LIMIT)))  # type: ignore[func-returns-value]
        for _ in range(8)
    ]
    for thread in threads:
        thread.start()
    report_layers(push)
    for thread in threads:
        thread.join(LIMIT)
    assert got == [None] * 8
    assert of(Completed, pair.local.events()) == []


def test_await(pair: Pair) -> None:
    mine, theirs = pair.caches(blocks=64)
    model = Model(mine)

    async def main() -> None:
        peer = await pair.local.link(address(pair.remote))
        assert peer == pair.peer
        pulls = [pair.local.pull(mine[[32 + n]], peer["kv"][[n]]) for n in range(32)]
        assert await asyncio.wait_for(asyncio.gather(*pulls), LIMIT) == [None] * 32
        with pytest.raises(NotFound):
            await pair.local.pull(mine[[1]], peer["absent"][[1]])
        await pulls[0]  # a second await has the same outcome

    asyncio.run(main())
    model.write(range(32, 64), Model(theirs), range(32)).check(mine)
    assert of(Completed, pair.local.events()) == [], "await takes the outcome"


def test_await_in_two_loops(push: Transfer[None]) -> None:
    waiting = threading.Barrier(3)
    got: list[None] = []

    async def one() -> None:
        async def arrive() -> None:
            await asyncio.get_running_loop().run_in_executor(None, waiting.wait, LIMIT)

        task = asyncio.ensure_future(push)
        await arrive()
        got.append(await asyncio.wait_for(task, LIMIT))

    threads = [threading.Thread(target=lambda: asyncio.run(one())) for _ in range(2)]
    for thread in threads:
        thread.start()
    waiting.wait(LIMIT)
    report_layers(push)
    for thread in threads:
        thread.join(LIMIT)
    assert got == [None, None]


def test_loop_that_was_closed_while_it_waited(push: Transfer[None]) -> None:
    loop = asyncio.new_event_loop()
    task = loop.create_task(asyncio.wait_for(push, None))
    loop.run_until_complete(asyncio.sleep(0))
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        loop.run_until_complete(task)
    loop.close()
    report_layers(push)
    assert push.result(LIMIT) is None, "cancelling the task has not cancelled the transfer"

    async def again() -> None:
        await push

    asyncio.run(again())


def test_async_for(pair: Pair) -> None:
    mine, _ = pair.caches()

    async def main() -> list[Any]:
        started = {pair.local.pull(mine[[n]], pair.peer["kv"][[n]]) for n in range(8)}
        pair.back.send(b"hello")
        seen: list[Any] = []
        async for event in pair.local:
            seen.append(event)
            if len(seen) == 9:
                break
        assert {event.transfer for event in of(Completed, seen)} == started
        return seen

    seen = asyncio.run(asyncio.wait_for(main(), LIMIT))
    assert [event.data for event in of(Message, seen)] == [b"hello"]


def test_async_for_ends_when_the_engine_is_closed(start: Open) -> None:
    async def main() -> None:
        async with start() as engine:

            async def all_events() -> list[Any]:
                return [event async for event in engine]

            task = asyncio.ensure_future(all_events())
            await asyncio.sleep(0)
            await asyncio.get_running_loop().run_in_executor(None, engine.close)
            assert await task == []
        assert engine.closed

    asyncio.run(asyncio.wait_for(main(), LIMIT))


# Messages with transfers


def test_message_comes_with_the_bytes(pair: Pair) -> None:
    mine, theirs = pair.caches()
    pair.local.push(pair.peer["kv"][[3]], mine[[4]], notify=b"pushed").result(LIMIT)
    assert messages(pair.remote, 1) == [b"pushed"]
    Model(theirs).write([3], Model(mine), [4]).check(theirs)
    pair.local.pull(mine[[5]], pair.peer["kv"][[6]], notify=b"pulled").result(LIMIT)
    event = next_of(pair.remote, Message)
    assert (event.data, event.peer) == (b"pulled", pair.back)


# Lists of pairs


def test_pairs_of_several_caches(pair: Pair) -> None:
    mine, theirs = pair.caches()
    index = allocate(pair.local, "index", 3, tensors=1, shape=(8,))
    remote_index = allocate(pair.remote, "index", 4, tensors=1, shape=(8,))
    models = Model(mine), Model(index)
    pairs = [(mine[[1, 2]], pair.peer["kv"][[3, 4]]), (index[[5]], pair.peer["index"][[6]])]
    transfer = pair.local.pull(pairs, notify=b"both")
    assert transfer.result(LIMIT) is None
    models[0].write([1, 2], Model(theirs), [3, 4]).check(mine)
    models[1].write([5], Model(remote_index), [6]).check(index)
    assert messages(pair.remote, 1) == [b"both"]
    assert transfer.bytes == 2 * 4 * 96 + 8
    models = Model(theirs), Model(remote_index)
    pair.local.push([(src, dst) for dst, src in pairs], verify="full").result(LIMIT)
    models[0].write([3, 4], Model(mine), [1, 2]).check(theirs)
    models[1].write([6], Model(index), [5]).check(remote_index)


def test_pairs_fail_together(pair: Pair) -> None:
    mine, _ = pair.caches()
    good, bad = (mine[[1]], pair.peer["kv"][[2]]), (mine[[3]], pair.peer["absent"][[4]])
    transfer = pair.local.pull([good, good, bad], notify=b"no")
    error = fails(NotFound, lambda: transfer)
    assert (error.facts["part"], error.arrived) == ("2", [])
    assert of(Completed, pair.local.events()) == [], "the outcome was taken"
    pair.local.pull([good], notify=b"yes").result(LIMIT)
    assert messages(pair.remote, 1) == [b"yes"]


def test_pairs_of_several_peers(pair: Pair, start: Open) -> None:
    mine, theirs = pair.caches()
    third = start(name="third", listen="127.0.0.1:0")
    others = allocate(third, seed=3)
    peer = pair.local.link(address(third)).result(LIMIT)
    model = Model(mine)
    pairs = [(mine[[1]], pair.peer["kv"][[2]]), (mine[[3]], peer["kv"][[4]])]
    pair.local.pull(pairs).result(LIMIT)
    model.write([1], Model(theirs), [2]).write([3], Model(others), [4]).check(mine)
    refused("notify", lambda: pair.local.pull(pairs, notify=b"to whom"))
    third.close()
    fails(PeerLost, lambda: pair.local.pull(pairs))


# Layers


def test_layers_are_sent_when_they_are_ready(pair: Pair) -> None:
    """The source has wrong bytes until each layer is reported, so a layer that is sent early is found."""
    mine, theirs = pair.caches()
    model, views = Model(theirs), [tensor.numpy() for tensor in mine.tensors]
    push = pair.local.push(pair.peer["kv"][[1, 2]], mine[[3, 4]], layerwise=True, notify=b"all")
    for layer in (2, 0, 3, 1):
        assert not push.done()
        views[layer][[3, 4]] = layer + 100
        push.ready(layer)
    assert push.result(LIMIT) is None
    model.write([1, 2], Model(mine), [3, 4]).check(theirs)
    assert messages(pair.remote, 1) == [b"all"]
    assert push.bytes == push.total == 2 * 4 * 96


def test_layers_to_several_destinations(pair: Pair) -> None:
    mine, theirs = pair.caches()
    model, remote_kv = Model(theirs), pair.peer["kv"]
    push = pair.local.push([(remote_kv[[1]], mine[[2]]), (remote_kv[[3, 4]], mine[[5, 6]])], layerwise=True)
    report_layers(push)
    push.result(LIMIT)
    model.write([1, 3, 4], Model(mine), [2, 5, 6]).check(theirs)
    assert len(of(Completed, pair.local.events())) == 0


def test_layers_in_both_directions(pair: Pair) -> None:
    """Each push reads the blocks that the other one writes.

    Both end and release their blocks. No block has bytes of both pushes.
    """
    caches = pair.caches()
    models, blocks = [Model(cache) for cache in caches], list(range(BLOCKS))
    pushes = [
        pair.local.push(pair.peer["kv"][blocks], caches[0][blocks], layerwise=True, timeout=0.7),
        pair.remote.push(pair.back["kv"][blocks], caches[1][blocks], layerwise=True, timeout=0.7),
    ]
    for layer in range(TENSORS):
        for push in pushes:
            push.ready(layer)
    for push in pushes:
        accepted(lambda push=push: push, Timeout)  # type: ignore[misc]
    for cache in caches:
        for tensor, got in enumerate(blocks_of(cache, blocks)):
            for block, row in zip(blocks, got):
                assert row in [bytes(model.tensors[tensor][block * ROW :][:ROW]) for model in models]
    pair.local.push(pair.peer["kv"][blocks], caches[0][blocks]).result(LIMIT)
    assert blocks_of(caches[1], blocks) == blocks_of(caches[0], blocks)


def test_only_some_layers(pair: Pair) -> None:
    """Layers outside the range of the rows are reported as well, and move nothing."""
    mine, theirs = pair.caches()
    model = Model(theirs)
    push = pair.local.push(pair.peer["kv"][[1]].part(layers=(1, 3)), mine[[2]].part(layers=(1, 3)), layerwise=True)
    push.ready(0)
    push.ready(1)
    assert not push.done()
    push.ready(2)
    push.result(LIMIT)
    model.write([1], Model(mine), [2], tensors=range(1, 3)).check(theirs)


def test_layers_of_a_pipeline_stage(pair: Pair) -> None:
    """A push layer by layer writes the layers of the model that the source holds, as other transfers do."""
    stage, whole = layout(layers=range(2, 4)), layout(layers=4)
    mine, theirs = pair.local.allocate("stage", stage, blocks=4), pair.remote.allocate("whole", whole, blocks=4)
    fill(mine, 1)
    fill(theirs, 2)
    before = blocks_of(theirs, [3])
    push = pair.local.push(pair.peer["whole"][[3]], mine[[0]], layerwise=True)
    push.ready(1)
    push.ready(0)
    push.result(LIMIT)
    assert blocks_of(theirs, [3])[4:] == blocks_of(mine, [0])
    assert blocks_of(theirs, [3])[:4] == before[:4]
    back = pair.remote.push(pair.back["stage"][[1]], theirs[[0]], layerwise=True)
    assert fails(InvalidArgument, lambda: back).code == "invalid_argument"


def test_wrong_rows_of_layerwise_pushes(pair: Pair) -> None:
    mine, theirs = pair.caches()
    push, remote_kv, model = pair.local.push, pair.peer["kv"], Model(theirs)
    refused("dst", lambda: push(remote_kv[[]], mine[[]], layerwise=True))
    refused("dst", lambda: push([(remote_kv[[1]], mine[[1]]), (remote_kv[[]], mine[[]])], layerwise=True))
    with pytest.raises(InvalidArgument):
        push(remote_kv[[1, 2]], mine[[1]], layerwise=True)
    refused("src", lambda: push(remote_kv[[1]], mine[[16]], layerwise=True))
    refused("dst", lambda: push(remote_kv[[1]], mine[[1]].part(layers=(2, 4)), layerwise=True))
    refused("dst", lambda: push(remote_kv[[1]].part(layers=(2, 4)), mine[[1]], layerwise=True))
    model.check(theirs)


def test_layers_out_of_the_host_pool(pair: Pair) -> None:
    mine, (_, theirs) = allocate(pair.local, "host", seed=3, pool="host"), pair.caches()
    push = pair.local.push(pair.peer["kv"][[5]], mine[[6]], layerwise=True)
    report_layers(push)
    push.result(LIMIT)
    assert blocks_of(theirs, [5]) == blocks_of(mine, [6])


def test_push_of_some_layers_to_replicas(pair: Pair, start: Open) -> None:
    """Pairs with equal local rows are shares of several owners only if they name no layers."""
    other = start(listen="127.0.0.1:0")
    mine = pair.local.allocate("laid out", layout(), blocks=4)
    fill(mine, 1)
    copies = [engine.allocate("copy", layout(), blocks=4) for engine in (pair.remote, other)]
    peers = [pair.peer, pair.local.link(address(other)).result(LIMIT)]
    some = {"layers": (1, 2)}
    pair.local.push([(peer["copy"][[2]].part(**some), mine[[3]].part(**some)) for peer in peers]).result(LIMIT)
    for copy in copies:
        assert blocks_of(copy, [2])[2:] == blocks_of(mine, [3])[2:]


def test_free_while_the_engine_closes(start: Open) -> None:
    """Transfers may still use the memory, so the end of the cache waits for them."""
    local, remote = start(), start(listen="127.0.0.1:0")
    mine = local.register("mine", [np.zeros((BLOCKS, ROW), np.uint8) for _ in range(TENSORS)])
    allocate(remote)
    push = local.push(local.link(address(remote)).result(LIMIT)["kv"][[0]], mine[[0]], layerwise=True)
    closing = threading.Thread(target=local.close, args=(LIMIT,))
    closing.start()
    eventually(lambda: local.closed)
    freed = mine.free()
    # On a slow machine, the engine may have ended the push already.
    ended = freed.done()
    assert push.done() or not ended
    push.cancel()
    freed.result(LIMIT)
    closing.join(LIMIT)
    assert not closing.is_alive()


def test_wrong_layers(pair: Pair, push: Transfer[None]) -> None:
    push.ready(1)
    for layer in (4, -1, 2**32):
        refused("layer", lambda layer=layer: push.ready(layer))  # type: ignore[misc]
    refused("layer", lambda: push.ready(1))
    for wrong in (True, 1.0, "1", None):
        with pytest.raises(TypeError):
            push.ready(wrong)  # type: ignore[arg-type]
    report_layers(push, 0, 2, 3)
    assert push.result(LIMIT) is None
    kv = allocate(pair.local, "plain")
    copy = pair.local.copy(kv[[1]], kv[[2]])
    fails(InvalidArgument, lambda: copy.ready(0))
    copy.result(LIMIT)


def test_ready_after_a_failure_does_nothing(pair: Pair, push: Transfer[None]) -> None:
    push.ready(0)
    push.cancel()
    push.ready(1)
    fails(Cancelled, lambda: push)
    push.ready(2)
    push = running(pair)
    pair.local.close()
    push.ready(0)
    fails(Closed, lambda: push)


def test_engine_closes_while_threads_report_layers(start: Open) -> None:
    """Each push ends, with success only if all its layers arrived."""
    local, remote = start(), start(listen="127.0.0.1:0")
    mine, _ = allocate(local, blocks=32), allocate(remote, blocks=32)
    remote_kv = local.link(address(remote)).result(LIMIT)["kv"]
    pushes = [local.push(remote_kv[[n]], mine[[n]], layerwise=True) for n in range(32)]

    def work(number: int) -> None:
        if number == 4:
            local.close()
            return
        for layer in range(TENSORS):
            for push in pushes[number::4]:
                push.ready(layer)

    together(5, work)
    for push in pushes:
        assert not accepted(lambda push=push: push, Closed) or push.bytes == TENSORS * ROW  # type: ignore[misc]


def test_layers_wait_as_long_as_the_program_computes(pair: Pair) -> None:
    """`timeout` counts from `ready`, so a push that nobody reports outlives it."""
    mine, _ = pair.caches()
    push = pair.local.push(pair.peer["kv"][[1]], mine[[2]], layerwise=True, timeout=0.05)
    with pytest.raises(TimeoutError) as caught:
        push.result(0.3)
    assert not isinstance(caught.value, Timeout)
    push.cancel()


def test_source_of_layers_may_be_freed(pair: Pair) -> None:
    """Its memory stays until the push has ended, though the handle is kept."""
    pair.caches()
    used = lambda: pair.local.stats()["pools"]["device"]["used_bytes"]  # noqa: E731
    before = used()
    for end in ("ready", "cancel"):
        source = allocate(pair.local, "source", seed=5)
        push = pair.local.push(pair.peer["kv"][[1]], source[[2]], layerwise=True)
        push.ready(0)
        source.free().result(LIMIT)
        assert used() > before
        if end == "cancel":
            push.cancel()
            fails(Cancelled, lambda: push)  # noqa: B023
        else:
            report_layers(push, 1, 2, 3)
            push.result(LIMIT)
        eventually(lambda: used() == before)
