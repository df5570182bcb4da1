"""Layer-wise transfers whose layers the caller reports: bytes at the destinations, outcomes and events, and their ends.

The Rust tests compare every order of reports, failures and cancellations with a model (`layer_task.rs`).
"""

from __future__ import annotations

import array
import asyncio
import gc
import os
import random
import time
from typing import TYPE_CHECKING, Any, Optional

import numpy as np
import pytest

from layers import FAILED, FINALIZED, Transfer, layer_threads, names
from llm_datadist import (
    CacheDesc,
    CacheKeyByIdAndIndex,
    DataType,
    LayerDestination,
    LLMException,
    LLMStatusCode,
    Placement,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from llm_datadist.events import Completed
from peers import GONE, INVALID, LIMIT, OK, TIMEOUT, UNLINKED, Ends, eventually, linked, options, outcome, together

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llm_datadist.layer_tasks import LayerTask

LIMIT_MS = int(LIMIT * 1000)
BUSY = "LLM_LINK_BUSY"


def begin(transfer: Transfer, to: Optional[Sequence[Any]] = None, **given: Any) -> LayerTask:
    """Start to send cache "n". Destinations may be configs; by default, all layers go to every peer."""
    every: Sequence[Any] = [far.to(range(transfer.layers)) for far in transfer.all] if to is None else to
    made = [one if isinstance(one, LayerDestination) else LayerDestination(one) for one in every]
    return transfer.near.dist.cache_manager.begin_layers(transfer.near.held["n"].handle, made, **given)


def ended(transfer: Any, limit: float = LIMIT) -> str:
    """The code of a transfer, once it has ended."""
    failure = transfer.exception(int(limit * 1000))
    return OK if failure is None else failure.status_code.name


def at_cluster(sent: Transfer, cluster: int) -> Any:
    """A config for two layers of a cache of another cluster."""
    if sent.accessible:
        return TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(cluster, 1, 0), range(2), range(2))
    return TransferConfig(cluster, sent.to.bases[:4], range(2))


def completed(dist: Any) -> list[Any]:
    return [event.transfer for event in dist.poll() if isinstance(event, Completed)]


@pytest.fixture
def sent(ends: Ends, way: dict[str, Any]) -> Transfer:
    """Cache "n" with a slot of 4 layers, and a peer, in every mode, over every transport."""
    return Transfer(ends, way)


def test_layers_in_any_order(sent: Transfer) -> None:
    task = begin(sent)
    (transfer,) = task.transfers
    eventually(lambda: transfer.progress()[1] > 0, what="the destination to be found")
    assert transfer.progress() == (0, 4 * 2 * 64)
    for count, layer in enumerate((2, 0, 3, 1), 1):
        assert not transfer.done()
        task.ready(layer)
        eventually(lambda count=count: transfer.progress()[0] == count * 2 * 64, what="the layer")
    assert transfer.result(LIMIT_MS) is None
    assert transfer.bytes == 4 * 2 * 64
    assert transfer.nanos > 0
    assert sent.near.dist.poll() == [], "the outcome was taken"
    sent.arrived()
    assert repr(task) == "LayerTask(layers=4, transfers=1, done=1)"
    assert not layer_threads(), "a thread of Python"


def test_only_layers_that_are_ready_are_sent(sent: Transfer) -> None:
    task = begin(sent)
    task.ready(1)
    eventually(lambda: task.transfers[0].bytes == 2 * 64, what="layer 1")
    sent.to.twin[2:4] = sent.source[2:4]
    sent.to.check()
    assert task.transfers[0].cancel()
    assert ended(task.transfers[0]) == FAILED


def test_each_destination_has_its_own_blocks(ends: Ends, way: dict[str, Any]) -> None:
    """Forty requests in one task, to two peers, with lists, tuples, buffers and arrays; every byte is compared."""
    transfer = Transfer(ends, way, 64, 96, 3, blocks=True, peers=2)
    chance = random.Random(3)  # noqa: S311
    kinds = [list, tuple, lambda given: array.array("i", given), lambda given: np.array(given, np.uint64)]
    free = {far.peer.cluster: chance.sample(range(64), 64) for far in transfer.all}
    to = []
    for number in range(40):
        far = transfer.all[number % 2]
        first = chance.randrange(3)
        layers = range(first, chance.randrange(first + 1, 4))
        count = chance.randrange(1, 4)
        src, dst = chance.sample(range(64), count), [free[far.peer.cluster].pop() for _ in range(count)]
        kind = chance.choice(kinds)
        to.append(LayerDestination(far.to(layers), kind(src), kind(dst)))  # type: ignore[operator]
        far.blocks(transfer.source, layers, 0, list(zip(src, dst)))
    task = begin(transfer, to)
    assert len(task.transfers) == 40
    for layer in chance.sample(range(3), 3):
        task.ready(layer)
    seen: list[Any] = []
    eventually(lambda: seen.extend(completed(transfer.near.dist)) or len(seen) == 40, what="forty events")
    assert {one.number for one in seen} == {one.number for one in task.transfers}
    assert set(seen) == set(task.transfers), "an event has the object of the task"
    assert all(ended(one) == OK for one in task.transfers)
    for far in transfer.all:
        far.check()


def test_a_slot_may_be_split_into_blocks(ends: Ends) -> None:
    transfer = Transfer(ends, {"accessible": False}, 2, 64, 2)
    far = transfer.far("b", shape=(8, 16, 2), blocks=True)
    config = far.to(range(2), row=1)
    task = begin(transfer, [LayerDestination(config, dst_blocks=[6, 0, 3], dst_block_memory_size=16)])
    for layer in (1, 0):
        task.ready(layer)
    assert ended(task.transfers[0]) == OK
    far.pieces(transfer.source, range(2), 0, 1, [6, 0, 3])
    far.check()


def test_a_layer_may_have_any_number_of_tensors(ends: Ends) -> None:
    transfer = Transfer(ends, {"accessible": False}, 1, 64, 2)
    far = transfer.far("o", shape=(1, 64, 4), per=1)  # four tensors, as layers of one
    task = begin(transfer, [far.to(range(4))], tensor_num_per_layer=1)
    for layer in (3, 0, 1, 2):
        task.ready(layer)
    assert ended(task.transfers[0]) == OK
    far.slot(transfer.source, range(4))
    far.check()
    code, text = outcome(lambda: begin(transfer, [far.to(range(1))], tensor_num_per_layer=3))
    assert code == INVALID
    assert "tensor_num_per_layer=3" in text


def test_wrong_layers_change_nothing(sent: Transfer) -> None:
    task = begin(sent, [sent.to.to(range(1, 3))])
    task.ready(0)  # nobody needs it
    task.ready(1)
    for wrong in (0, 1, 4, -1, 2**32, 2**70):
        for report in (lambda wrong=wrong: task.ready(wrong), lambda wrong=wrong: task.fail(wrong, "x")):
            code, text = outcome(report)
            assert code == INVALID, wrong
            assert f"layer={wrong}" in text
            assert wrong == 2**70 or "0 to 3" in text
    for kind in ("1", 1.0, None, True):
        assert outcome(lambda kind=kind: task.ready(kind))[0] == "TypeError"
        assert outcome(lambda kind=kind: task.fail(kind, "x"))[0] == "TypeError"
    assert outcome(lambda: task.fail(2, b"x"))[0] == "TypeError"  # type: ignore[arg-type]
    assert not task.transfers[0].done()
    task.ready(2)
    assert ended(task.transfers[0]) == OK
    sent.to.slot(sent.source, range(1, 3))
    sent.to.check()


def test_a_failed_layer_ends_the_destinations_that_need_it(ends: Ends) -> None:
    transfer = Transfer(ends, {"accessible": True}, 4, peers=2)
    near, to = transfer.near, transfer.to
    task = begin(transfer, [to.to(range(4)), to.to(range(2), slot=1), to.to(range(2, 4), slot=2)])
    task.ready(0)
    task.fail(3, "the GPU is out of memory")
    eventually(lambda: task.transfers[0].done() and task.transfers[2].done(), what="two failures")
    for at in (0, 2):
        failure = task.transfers[at].exception(0)
        assert failure is not None
        assert failure.status_code is LLMStatusCode.LLM_PARAM_INVALID
        assert "layer 3 will not be ready: the GPU is out of memory" in str(failure)
        assert names(failure, cluster=2, layer=3)
        assert f"peer={transfer.peer.address}" in str(failure)
        assert not task.transfers[at].cancelled()
    assert not task.transfers[1].done()
    task.ready(1)
    assert ended(task.transfers[1]) == OK
    to.slot(transfer.source, range(2), slot=1)
    for mine, theirs in zip(to.twin[:2], transfer.peer.read("f")):
        mine[0] = theirs[0]  # layer 0 of the first destination may have arrived
    to.check()
    assert near.dist.poll() == []


def test_cancelled_destinations_do_not_stop_others(sent: Transfer) -> None:
    second = sent.far("g")
    task = begin(sent, [sent.to.to(range(4)), second.to(range(4))])
    first, other = task.transfers
    assert first.cancel()
    assert first.cancelled()
    assert ended(first) == FAILED
    assert not first.cancel()
    for layer in range(4):
        task.ready(layer)
    assert ended(other) == OK
    second.slot(sent.source, range(4))
    second.check()
    sent.to.check("nothing of a cancelled transfer arrives")


def test_a_destination_without_layers_is_late(sent: Transfer) -> None:
    second = sent.far("g")
    task = begin(sent, [sent.to.to(range(4)), second.to(range(1))], layer_timeout_ms=1500)
    task.ready(0)
    assert ended(task.transfers[1]) == OK
    failure = task.transfers[0].exception(LIMIT_MS)
    assert failure is not None
    assert failure.status_code is LLMStatusCode.LLM_TIMEOUT
    assert "layer_timeout_ms passed while waiting for layer 1" in str(failure)
    assert names(failure, cluster=2, layer=1, limit_ms=1500)
    task.ready(1)
    sent.to.slot(sent.source, range(1))
    sent.to.check("nothing is sent after the end")


def test_a_layer_is_late_at_a_stopped_peer(ends: Ends) -> None:
    """The other destination gets its layers meanwhile."""
    limits = {"llm__SyncKvCacheWaitTime": 1500, "llm__LinkSilence": 30000}
    transfer = Transfer(ends, {"accessible": True}, peers=2, **limits)
    task = begin(transfer)
    eventually(lambda: all(one.progress()[1] for one in task.transfers), what="both destinations")
    with transfer.peer.stopped():
        for layer in range(4):
            task.ready(layer)
        assert ended(task.transfers[1]) == OK
        transfer.arrived(at=transfer.all[1:])
        time.sleep(3)
    failure = task.transfers[0].exception(LIMIT_MS)
    assert failure is not None
    assert failure.status_code is LLMStatusCode.LLM_TIMEOUT
    assert names(failure, cluster=2, layer=0)


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_a_killed_peer_ends_its_own_destinations(ends: Ends, transport: str) -> None:
    way = {"accessible": True, "llm__LinkTransport": transport}
    transfer = Transfer(ends, way, peers=2)
    task = begin(transfer, [far.to(range(4)) for far in (*transfer.all, *transfer.all)])
    task.ready(0)
    eventually(lambda: all(one.bytes == 2 * 64 for one in task.transfers), what="the first layer")
    transfer.peer.kill()
    for layer in (3, 1, 2):
        task.ready(layer)
    assert [ended(one) for one in task.transfers] == [UNLINKED, OK, UNLINKED, OK]
    failure = task.transfers[0].exception(0)
    assert names(failure, cluster=2, layer=3)
    assert f"peer={transfer.peer.address}" in str(failure)
    transfer.arrived(at=transfer.all[1:])


def test_a_missing_destination_or_link(sent: Transfer) -> None:
    gone = sent.far("g")
    config = gone.to(range(2))
    sent.peer.deallocate("g")
    elsewhere = at_cluster(sent, 77)
    task = begin(sent, [config, elsewhere, sent.to.to(range(2))])
    codes = [ended(one) for one in task.transfers[:2]]
    assert codes == [GONE if sent.accessible else codes[0], UNLINKED]
    assert codes[0] in (GONE, INVALID)
    assert names(task.transfers[1].exception(0), cluster=77)
    for layer in range(2):
        task.ready(layer)
    assert ended(task.transfers[2]) == OK


def test_finalize_ends_every_transfer(ends: Ends, way: dict[str, Any]) -> None:
    transfer = Transfer(ends, way, 8)
    manager, cache = transfer.near.dist.cache_manager, transfer.near.held["n"].handle
    task = begin(transfer, [transfer.to.to(range(4), slot=slot) for slot in range(8)])
    task.ready(0)
    eventually(lambda: task.transfers[0].bytes > 0, what="a layer")
    waited, _ = together(2, lambda number: transfer.near.finalize() if number else outcome(task.transfers[3].result))
    assert waited[0] == FINALIZED
    assert [ended(one) for one in task.transfers] == [FINALIZED] * 8
    task.ready(1)  # has no effect
    task.fail(2, "too late")
    assert outcome(lambda: task.ready(1))[0] == INVALID
    assert outcome(lambda: manager.begin_layers(cache, [LayerDestination(transfer.to.to(range(4)))]))[0] == FINALIZED
    transfer.near.init(options(**way))
    linked(transfer.near, transfer.peer)
    transfer.near.allocate("n", 8, 64, 8, seed=1)
    again = begin(transfer)
    for layer in range(4):
        again.ready(layer)
    assert ended(again.transfers[0]) == OK


def test_finalize_under_load(ends: Ends) -> None:
    """Threads report layers while the engine ends. Each transfer ends, with success only if all its layers arrived."""
    transfer = Transfer(ends, {"accessible": True}, 32, 4096, 8, pool=16 << 20)
    tasks = [begin(transfer, [transfer.to.to(range(8), slot=slot) for slot in range(32)]) for _ in range(4)]

    def report(number: int) -> None:
        if number == 4:
            time.sleep(0.005)
            transfer.near.finalize()
            return
        for layer in range(8):
            tasks[number].ready(layer)
            time.sleep(0.001)

    together(5, report)
    for task in tasks:
        for one in task.transfers:
            assert ended(one) in (OK, FINALIZED)
            assert ended(one) == FINALIZED or one.bytes == 8 * 2 * 4096


def test_a_task_that_is_dropped(sent: Transfer) -> None:
    """Nobody can report further layers. What has all its layers goes on."""
    second = sent.far("g")
    task = begin(sent, [sent.to.to(range(4)), second.to(range(2))])
    whole, part = task.transfers[1], task.transfers[0]
    task.ready(0)
    task.ready(1)
    del task
    gc.collect()
    assert ended(whole) == OK
    failure = part.exception(LIMIT_MS)
    assert failure is not None
    assert failure.status_code is LLMStatusCode.LLM_FAILED
    assert "the task was dropped before layer 2 was ready" in str(failure)
    assert part.cancelled()
    second.slot(sent.source, range(2))
    second.check()


def test_the_source_may_be_released(sent: Transfer) -> None:
    """As with `transfer_cache_async`: a deallocated cache stays until the end."""
    near = sent.near
    task = begin(sent)
    task.ready(0)
    near.deallocate("n")
    assert near.used() > 0
    for layer in (1, 2, 3):
        task.ready(layer)
    assert ended(task.transfers[0]) == OK
    eventually(lambda: near.used() == 0, what="the release of the source")
    sent.arrived()


def test_await_and_poll(sent: Transfer) -> None:
    async def send() -> None:
        task = begin(sent, [sent.to.to(range(4)), sent.to.to(range(4))])
        first, other = task.transfers
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(first, 0.01)
        assert not first.done(), "the transfer goes on"
        loop = asyncio.get_running_loop()
        for layer in (1, 3, 0, 2):
            loop.call_later(0.01 * layer, task.ready, layer)
        await first
        task = begin(sent)
        task.fail(0, "because")
        with pytest.raises(LLMException, match="because"):
            await task.transfers[0]
        eventually(other.done, what="the other one")
        assert completed(sent.near.dist) == [other]

    asyncio.run(asyncio.wait_for(send(), LIMIT))


def test_arguments(sent: Transfer) -> None:
    """Nothing starts if an argument is wrong. The codes are those of `transfer_cache_async`."""
    near, to = sent.near, sent.to
    manager, cache = near.dist.cache_manager, near.held["n"].handle
    good = LayerDestination(to.to(range(4)))
    host = manager.allocate_cache(CacheDesc(8, [1, 64], DataType.DT_UINT8, Placement.HOST))
    other = TransferConfig(2, [1] * 8) if sent.accessible else object()
    cases: list[tuple[str, Any, Any, dict[str, Any]]] = [
        ("TypeError", None, [good], {}),
        (INVALID, host, [good], {}),
        (INVALID, cache, [], {}),
        (INVALID, cache, (), {}),
        ("TypeError", cache, None, {}),
        ("TypeError", cache, good, {}),
        ("TypeError", cache, [to.to(range(4))], {}),
        ("TypeError", cache, [good, None], {}),
        ("TypeError", cache, [LayerDestination(None)], {}),  # type: ignore[arg-type]
        ("TypeError", cache, [LayerDestination(other)], {}),  # type: ignore[arg-type]
        (INVALID, cache, [good, LayerDestination(to.to(range(4)), [0], [])], {}),
        (INVALID, cache, [good, LayerDestination(to.to(range(4)), [0], [1, 2])], {}),
        (INVALID, cache, [good, LayerDestination(to.to(range(4)), None, [1])], {}),
        (INVALID, cache, [good, LayerDestination(to.to(range(4)), dst_block_memory_size=5)], {}),
        ("TypeError", cache, [good, LayerDestination(to.to(range(4)), b"1", [1])], {}),
        ("TypeError", cache, [good, LayerDestination(to.to(range(4)), range(1), [1])], {}),
        (INVALID, cache, [good, LayerDestination(to.to(range(4)), np.array([-1]), [1])], {}),
        ("ValueError", cache, [good, LayerDestination(to.to(range(4)), [-1], [1])], {}),
        (INVALID, cache, [good, LayerDestination(to.to(range(4), row=1))], {}),
        (INVALID, cache, [good], {"layer_timeout_ms": 0}),
        ("TypeError", cache, [good], {"layer_timeout_ms": 1.5}),
        ("ValueError", cache, [good], {"layer_timeout_ms": 2**32}),
        ("ValueError", cache, [good], {"layer_timeout_ms": -1}),
        (INVALID, cache, [good], {"tensor_num_per_layer": 0}),
        (INVALID, cache, [good], {"tensor_num_per_layer": 3}),
        ("TypeError", cache, [good], {"tensor_num_per_layer": True}),
    ]
    for expected, source, destinations, given in cases:
        code, text = outcome(lambda: manager.begin_layers(source, destinations, **given))  # noqa: B023
        matches = code == expected or (expected == "ValueError" and "Mismatch" in code)
        assert matches, (expected, code, text, destinations, given)
    assert outcome(lambda: manager.begin_layers(cache, [good], 100))[0] == "TypeError"
    assert outcome(lambda: begin(sent, [at_cluster(sent, 1)]))[0] == INVALID, "its own cluster"
    time.sleep(0.02)
    assert near.dist.poll() == []
    assert near.dist.drain(0)
    to.check("nothing was sent")
    if hasattr(BaseException, "add_note"):
        with pytest.raises(LLMException) as caught:
            begin(sent, [good, LayerDestination(to.to(range(4)), [0], [])])
        assert caught.value.__notes__ == ["in destinations[1]"]


def test_a_source_that_was_released(sent: Transfer) -> None:
    cache = sent.near.held["n"].handle
    config = LayerDestination(sent.to.to(range(4)))
    manager = sent.near.dist.cache_manager
    second = manager.allocate_cache(CacheDesc(8, [1, 64], DataType.DT_UINT8))
    handle = second._handle
    manager.deallocate_cache(second)
    second._handle = handle
    assert outcome(lambda: manager.begin_layers(second, [config]))[0] in (GONE, INVALID)
    assert manager.begin_layers(cache, [config]).transfers


def test_a_none_range_becomes_all_layers(sent: Transfer) -> None:
    config = sent.to.to(range(4))
    config.src_layer_range = None
    task = begin(sent, [config])
    assert config.src_layer_range == range(4)
    for layer in range(4):
        task.ready(layer)
    assert ended(task.transfers[0]) == OK
    sent.arrived()


def test_places_for_all_or_none(ends: Ends) -> None:
    transfer = Transfer(ends, {"accessible": True}, llm__MaxTransfers=4)
    task = begin(transfer, [transfer.to.to(range(4))] * 3)
    code, text = outcome(lambda: begin(transfer, [transfer.to.to(range(4))] * 2))
    assert code == BUSY
    assert "open_transfers=3" in text
    more = begin(transfer, [transfer.to.to(range(4))])
    for layer in range(4):
        task.ready(layer)
        more.ready(layer)
    assert [ended(one) for one in (*task.transfers, *more.transfers)] == [OK] * 4
    assert begin(transfer, [transfer.to.to(range(4))] * 4).transfers


def test_layers_from_many_threads(ends: Ends) -> None:
    """Every layer is accepted from exactly one thread."""
    transfer = Transfer(ends, {"accessible": True}, 1, 64, 64)
    task = begin(transfer)

    def report(number: int) -> int:
        layers = random.Random(number).sample(range(64), 64)  # noqa: S311
        return sum(outcome(lambda layer=layer: task.ready(layer))[0] == OK for layer in layers)

    assert sum(together(4, report)) == 64
    assert ended(task.transfers[0]) == OK
    transfer.arrived()


def test_a_forked_child_cannot_use_the_task(sent: Transfer) -> None:
    task = begin(sent)
    child = os.fork()
    if child == 0:
        calls = (lambda: task.ready(0), lambda: task.fail(0, "x"), task.transfers[0].done)
        codes = [outcome(call)[0] for call in calls]
        del task
        gc.collect()
        os._exit(0 if codes == [FAILED] * 3 else 1)
    assert os.waitpid(child, 0)[1] == 0
    for layer in range(4):
        task.ready(layer)
    assert ended(task.transfers[0]) == OK
    sent.arrived()


def test_the_end_of_a_transfer_frees_its_source(ends: Ends) -> None:
    """The task may be kept; the cache is released when its transfers have ended."""
    transfer = Transfer(ends, {"accessible": True})
    task = begin(transfer)
    assert task.transfers[0].cancel()
    transfer.near.deallocate("n")
    eventually(lambda: transfer.near.used() == 0, what="the release")
    assert task.transfers[0].cancelled()


def test_late_layer_of_a_busy_destination_names_the_option(ends: Ends) -> None:
    """The peer's rows are free only after the limit of the layer."""
    transfer = Transfer(ends, {"accessible": True}, llm__SyncKvCacheWaitTime=1500, llm__LinkSilence=30000)
    task = begin(transfer)
    eventually(lambda: task.transfers[0].progress()[1], what="the destination")
    with transfer.peer.stopped():
        task.ready(3)
        time.sleep(3)
    failure = task.transfers[0].exception(LIMIT_MS)
    assert failure is not None
    assert failure.status_code.name == TIMEOUT
    assert names(failure, layer=3)
