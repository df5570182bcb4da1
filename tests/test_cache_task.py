"""`CacheTask`: results, waits, cancellation, `await`, and the thread that calls the synchronizer (contract §4.13, §8).

Not for: bytes that arrive (`test_layerwise.py`), peers that fail (`test_layerwise_faults.py`).
"""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import threading
import time
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Optional
from unittest.mock import Mock, patch

import numpy as np
import pytest

from ids import short
from layers import FAILED, WAIT, Steps, Transfer, layer_threads, layers_done, names, results
from llm_datadist import CacheTask, LLMException, LLMStatusCode
from llm_datadist.original import layerwise
from memory import UINT32_MAX
from peers import INVALID, LIMIT, OK, TIMEOUT, Ends, eventually

SUCCESS = LLMStatusCode.LLM_SUCCESS
LATE = LLMStatusCode.LLM_TIMEOUT
UNLINKED, REFUSED, LOST = LLMStatusCode.LLM_NOT_YET_LINK, LLMStatusCode.LLM_PARAM_INVALID, LLMStatusCode.LLM_FAILED


@pytest.fixture
def transfer(ends: Ends) -> Transfer:
    """Four layers of five slots, to slots at one peer."""
    return Transfer(ends, None, 5, 64)


async def wait(task: Any) -> Any:
    return await task


# -- the synchronizer and its thread ---------------------------------------------------------------------------------


class NoTruth:
    def __bool__(self) -> bool:
        raise ArithmeticError("neither")


class NoText(Exception):  # noqa: N818
    def __str__(self) -> str:
        raise ValueError("no text")


def test_what_is_true_is_ready(transfer: Transfer) -> None:
    assert transfer.send(Steps(answers={0: 1, 1: "yes", 2: np.bool_(True), 3: object()})) == [OK]
    transfer.arrived()


@pytest.mark.parametrize(
    ("answer", "expected", "text"),
    [
        *[(answer, INVALID, "") for answer in (False, None, "", np.bool_(False))],
        (ValueError("the reason"), TIMEOUT, "raised ValueError: the reason"),
        (ValueError("long " * 1000), TIMEOUT, "raised ValueError: long long"),
        (NoText(), TIMEOUT, "NoText"),
        (NoTruth(), TIMEOUT, "raised ArithmeticError: neither"),
        (LLMException("x", status_code=SUCCESS), TIMEOUT, "LLMException: x"),
        (SystemExit(3), TIMEOUT, "raised SystemExit: 3"),
        (KeyboardInterrupt(), TIMEOUT, "raised KeyboardInterrupt"),
    ],
    ids=lambda value: repr(value)[:20],
)
def test_a_layer_that_does_not_get_ready(
    transfer: Transfer, answer: Any, expected: str, text: str, caplog: pytest.LogCaptureFixture
) -> None:
    to, source, steps = transfer.to, transfer.source, Steps(answers={2: answer})
    ranges = [range(2), range(4), range(2, 3), range(3, 4), range(1, 4)]
    task = transfer.start(steps, [to.to(src, src.start, slot=slot) for slot, src in enumerate(ranges)])
    ended = [OK, expected, expected, None, expected]
    assert results(task) == ended
    assert task.synchronize().name == task.synchronize(0).name == expected, "never success"
    assert steps.layers == [0, 1, 2], "a later layer was asked for"
    assert task.done()
    assert not task.cancel(), "it had ended"
    assert results(task, 0) == ended
    assert layers_done(task)[0] == 2, "layers that were ready reach a config that needs no others"
    for slot, (src, done) in enumerate(zip(ranges, layers_done(task))):
        to.slot(source, range(src.start, src.start + done), src.start, slot=slot)
    to.check()
    errors = task.errors()
    assert [at for at, error in enumerate(errors) if error] == [1, 2, 4]
    for error in (errors[1], errors[2], errors[4]):
        assert error.status_code.name == expected
        assert names(error, cluster=2, layer=2), error
        assert text in str(error)
        assert len(str(error)) < 700
    eventually(lambda: not layer_threads(), what="the end of the thread")
    logged = [record for record in caplog.records if "synchronize_layer raised" in record.getMessage()]
    assert [bool(record.exc_info) for record in logged] == [True] * (expected == TIMEOUT), "once, with its traceback"
    transfer.again()


def test_the_time_that_one_layer_may_take(transfer: Transfer) -> None:
    to, steps = transfer.to, Steps(allowed=2, timeout_in_millis=2000)
    task = transfer.start(steps, [to.to(range(2)), to.to(range(4), slot=1), to.to(range(3, 4), slot=2)])
    assert results(task) == [OK, TIMEOUT, None], "while the synchronizer waits"
    assert layer_threads()
    assert task.done()
    assert "timeout_in_millis" in str(task.errors()[1])
    assert names(task.errors()[1], layer=2)
    steps.allow()
    eventually(lambda: not layer_threads(), what="the end of the thread")
    assert steps.asked == [(0, 2000), (1, 2000), (2, 2000)]
    for slot in range(2):
        to.slot(transfer.source, range(2), slot=slot)
    transfer.peer.rest(0.1)
    to.check("something arrived after the end")
    transfer.again()


@pytest.mark.parametrize(("first", "then"), [(WAIT, 1), (WAIT, "no limit"), (None, 1)])
def test_the_limit_of_a_layer_is_fixed_when_the_transfer_starts(transfer: Transfer, first: Any, then: Any) -> None:
    steps = Steps(allowed=0, timeout_in_millis=first)
    task = transfer.start(steps)
    steps.reached(0)
    steps.timeout_in_millis = then
    steps.allow(2)
    steps.reached(2)
    time.sleep(0.02)  # longer than the new limit
    steps.allow()
    assert results(task) == [OK]
    assert steps.asked == [(layer, first) for layer in range(4)]


def source_is_released(transfer: Transfer) -> None:
    """Deallocate the source, and wait until nothing else holds it."""
    transfer.local.deallocate("n")
    eventually(lambda: transfer.local.used() == 0, what="the release of the source")


@pytest.mark.parametrize("error", [RuntimeError("no more threads"), KeyboardInterrupt()], ids=short)
def test_a_thread_that_does_not_start(
    transfer: Transfer, error: BaseException, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps = Steps()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", Mock(side_effect=error))
        with pytest.raises((LLMException, KeyboardInterrupt)) as caught:
            transfer.start(steps)
    if isinstance(error, RuntimeError):
        assert isinstance(caught.value, LLMException)
        assert "cannot start the thread that waits for the layers: no more threads" in str(caught.value)
        assert caught.value.status_code is LOST
        assert caught.value.__cause__ is error
    else:
        assert caught.value is error
    assert not steps.asked
    source_is_released(transfer)


def test_a_thread_that_ends_early_fails_the_transfer(transfer: Transfer, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = Mock()
    monkeypatch.setattr(threading, "excepthook", seen)
    monkeypatch.setattr(layerwise, "_arrives", Mock(side_effect=MemoryError))
    task = transfer.start(to=[transfer.to.to(range(1, 4)), transfer.to.to(range(2, 4), slot=1)])
    assert results(task) == [TIMEOUT, None]
    assert "layer 1 will not be ready: the thread that waits for it ended" in str(task.errors()[0])
    eventually(lambda: seen.called, what="the report")
    assert seen.call_args.args[0].exc_type is MemoryError


def test_a_task_that_has_ended_keeps_no_synchronizer(transfer: Transfer) -> None:
    """A program may keep the task for its results, and the synchronizer may hold a model."""
    for answers in ({}, {1: False}):
        steps = Steps(answers=answers)
        watched = weakref.ref(steps)
        task = transfer.start(steps)
        results(task)
        del steps
        eventually(lambda watched=watched: gc.collect() >= 0 and watched() is None, what="the end of the synchronizer")


# -- waiting, results and cancellation -------------------------------------------------------------------------------


def test_limits_of_waits_from_several_threads(transfer: Transfer) -> None:
    steps = Steps(allowed=0)
    task = transfer.start(steps, [transfer.to.to(range(4)), transfer.to.to(range(1), slot=1)])
    steps.reached(0)
    assert task.synchronize(0) is LATE
    for error in task.errors():
        assert error.status_code is LATE
        assert "waiting for the layer (cluster=" in str(error)
        assert names(error, cluster=2, layer=0)
    with ThreadPoolExecutor(8) as crew:
        codes = [crew.submit(task.synchronize, *limit) for limit in ((), (None,), (UINT32_MAX,))]
        lists = [crew.submit(task.get_results, *limit) for limit in ((), (None,), (UINT32_MAX,))]
        assert task.synchronize(50) is LATE
        assert not any(waiting.done() for waiting in codes + lists)
        steps.allow()
        assert [waiting.result(LIMIT) for waiting in codes] == [SUCCESS] * 3
        assert [waiting.result(LIMIT) for waiting in lists] == [[SUCCESS, SUCCESS]] * 3
    assert task.synchronize(0) is SUCCESS
    assert task.get_results(0) == [SUCCESS, SUCCESS]
    for call in (task.synchronize, task.get_results):
        for wrong, kind in ((-1, ValueError), (2**32, ValueError), ("1", TypeError), (1.0, TypeError)):
            with pytest.raises(kind):
                call(wrong)


@pytest.mark.parametrize("late", [LATE, LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT])
@pytest.mark.parametrize(
    ("codes", "first"),
    [
        *[([], SUCCESS), ([SUCCESS, SUCCESS], SUCCESS)],
        *[([None, UNLINKED], UNLINKED), ([SUCCESS, LOST, None, REFUSED], LOST)],
        *[(codes, None) for codes in ([None], [SUCCESS, None], [None, SUCCESS], [None, None])],
    ],
)
def test_the_first_failure_counts_and_no_result_is_never_success(
    codes: list[Optional[LLMStatusCode]], first: Optional[LLMStatusCode], late: LLMStatusCode
) -> None:
    native = Mock(timeout_code=late, **{"wait.return_value": True, "transfers.return_value": []})
    native.results.return_value = codes
    task = CacheTask(native)

    expected = late if first is None else first
    assert [task.synchronize(), task.synchronize(0), asyncio.run(wait(task))] == [expected] * 3
    assert task.get_results() == codes


def test_a_task_has_no_events(transfer: Transfer) -> None:
    engine = transfer.local.engine
    assert engine.events() == []
    assert transfer.send() == [OK]
    assert engine.events() == []


def test_cancel_between_layers(ends: Ends, way: dict[str, Any]) -> None:
    transfer = Transfer(ends, way, 3)
    to, steps = transfer.to, Steps(allowed=1)
    task = transfer.start(steps, [to.to(range(4)), to.to(range(1), slot=1), to.to(range(2, 4), slot=2)])
    eventually(lambda: layers_done(task) == [1, 1, 0], what="layer 0")
    steps.reached(1)
    assert task.cancel()
    assert not task.cancel(), "it had ended"
    assert task.synchronize().name == FAILED
    assert results(task) == [FAILED, OK, FAILED]
    assert task.done()
    assert task.errors()[1] is None
    assert "cancelled" in str(task.errors()[0])
    steps.allow()
    eventually(lambda: not layer_threads(), what="the end of the thread")
    assert steps.layers == [0, 1]
    for slot in range(2):
        to.slot(transfer.source, range(1), slot=slot)
    transfer.peer.rest(0.1)
    to.check("something arrived after the end")
    transfer.again()


@pytest.mark.parametrize("call", ["synchronize", "get_results"])
def test_ctrl_c_interrupts_a_wait_and_not_the_transfer(transfer: Transfer, call: str) -> None:
    steps = Steps(allowed=0)
    task = transfer.start(steps)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    with pytest.raises(KeyboardInterrupt):  # noqa: PT012  (the signal must not come before)
        timer.start()
        getattr(task, call)(WAIT)
    timer.join()
    assert not task.done()
    steps.allow()
    assert results(task) == [OK]


# -- await -----------------------------------------------------------------------------------------------------------


def descriptors(transfer: Transfer) -> int:
    """The number of descriptors. An event loop that was closed has one until it is collected."""
    gc.collect()
    return transfer.local.resources()["descriptors"]


def test_await_leaves_the_loop_the_transfer_and_the_descriptors_alone(transfer: Transfer) -> None:
    assert transfer.send() == [OK]  # opens the streams of the link
    steps = Steps(allowed=0)
    task = transfer.start(steps)
    before, threads = transfer.local.resources()["descriptors"], threading.active_count()

    async def main() -> None:
        loop = asyncio.get_running_loop()
        with patch.object(loop, "add_reader", wraps=loop.add_reader) as added, pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(wait(task), 0.05)
        readers = [call.args[0] for call in added.call_args_list]
        assert readers
        assert not any(loop.remove_reader(reader) for reader in readers), "a reader is left"
        some = [asyncio.ensure_future(wait(task)) for _ in range(3)]
        await asyncio.sleep(0.05)
        assert not any(one.done() for one in some)
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(wait(task), 0.05)
        some[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await some[0]
        assert not task.done()
        assert not some[1].done(), "a cancelled wait ended another"
        steps.allow()
        assert await asyncio.wait_for(asyncio.gather(*some[1:]), LIMIT) == [SUCCESS, SUCCESS]
        assert await task is SUCCESS, "a task that has ended"

    asyncio.run(main())
    assert threading.active_count() <= threads, "a thread waited"
    eventually(lambda: descriptors(transfer) <= before, what="the end of the descriptors")
    transfer.arrived()


def test_cancelling_a_task_ends_every_await(transfer: Transfer) -> None:
    steps = Steps(allowed=0)

    async def main() -> Any:
        task = transfer.start(steps)
        waiting = [asyncio.ensure_future(wait(task)) for _ in range(3)]
        await asyncio.sleep(0.02)
        assert task.cancel()
        return await asyncio.wait_for(asyncio.gather(*waiting), LIMIT)

    assert asyncio.run(main()) == [LOST] * 3
    steps.allow()


def test_loops_in_several_threads_and_a_loop_that_is_closed(transfer: Transfer) -> None:
    steps = Steps(allowed=0)
    task = transfer.start(steps)
    before = transfer.local.resources()["descriptors"]

    async def abandon() -> None:
        asyncio.ensure_future(wait(task))  # noqa: RUF006
        await asyncio.sleep(0.01)

    for _ in range(5):
        asyncio.run(abandon())
    # A call stream that is being opened has up to three more.
    eventually(lambda: descriptors(transfer) <= before + 1, what="the descriptors")
    with ThreadPoolExecutor(3) as crew:
        waiting = [crew.submit(lambda: asyncio.run(asyncio.wait_for(wait(task), LIMIT))) for _ in range(3)]
        assert task.synchronize(50) is LATE
        steps.allow()
        assert [one.result(LIMIT) for one in waiting] == [SUCCESS] * 3


# -- what is left ----------------------------------------------------------------------------------------------------


def test_what_tasks_leave_behind(transfer: Transfer) -> None:
    local, peer, to = transfer.local, transfer.peer, transfer.to

    def some(count: int) -> None:
        for number in range(count):
            task = transfer.start(Steps(answers={1: False} if number % 4 == 1 else {}))
            if number % 4 == 3:
                task.cancel()
            if number % 5 == 0:
                asyncio.run(wait(task))
            task.get_results(WAIT)
            task.errors()
            with pytest.raises(LLMException):
                transfer.start(to=[to.to(range(4), row=5)])

    some(8)
    used, before = (local.used(), peer.used()), (local.resources(), peer.resources())
    some(80)
    gc.collect()

    def as_before() -> bool:
        pairs = zip((local.resources(), peer.resources()), before)
        grown = [now[what] - then[what] for now, then in pairs for what in ("threads", "descriptors")]
        return max(grown) <= 4 and not layer_threads()  # the engine keeps a few threads for the next tasks

    eventually(as_before, what="threads and descriptors as before")
    assert (local.used(), peer.used()) == used
    transfer.again()
    assert len(layerwise._under_way) == 1
    source_is_released(transfer)
