"""Layer-wise transfers between real processes: when layers are asked for, and what a task says.

Order is judged by events and never by a clock. Not for: what arrives (`test_layerwise.py`), `await`
(`test_layerwise_asyncio.py`).
"""

from __future__ import annotations

import gc
import itertools
import os
import random
import signal
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from layers import FAILED, Far, Steps, launch, names, results, send
from llm_datadist import (
    LayerSynchronizer,
    LLMException,
    LLMStatusCode,
)
from peers import (
    INVALID,
    LIMIT,
    OK,
    THOROUGH,
    TIMEOUT,
    End,
    Ends,
    Peer,
    equal,
    eventually,
    pattern,
)


@pytest.fixture
def pair(ends: Ends, way: dict[str, Any]) -> tuple[End, Peer, bool]:
    """Two linked ends, and whether caches are named by key."""
    return (*ends.pair(pool=16 << 20, **way), way["accessible"])


# -- the synchronizer ------------------------------------------------------------------------------------------------


def test_layers_are_asked_for_once_in_order_and_only_if_needed(pair: tuple[End, Peer, bool]) -> None:
    near, far, accessible = pair
    near.allocate("n", 2, 64, 20, seed=1)
    to = Far(far, accessible, "f", 2, 64, 10, seed=2)
    steps = Steps()
    configs = [to.to(range(7, 9)), to.to(range(2, 4), 2), to.to(range(3, 5), 5, slot=1), to.to(range(7, 8), 9)]
    assert send(near, "n", configs, steps) == [OK] * 4
    assert steps.asked == [(2, None), (3, None), (4, None), (7, None), (8, None)]
    assert threading.get_ident() not in steps.threads


def test_a_layer_is_read_when_it_is_ready_and_not_before(pair: tuple[End, Peer, bool]) -> None:
    near, far, accessible = pair
    near.allocate("n", 1, 5000, 6)
    to = Far(far, accessible, "f", 1, 5000, 3, seed=2)
    good = pattern(5, 6, 1, 5000)
    arrays = near.held["n"].arrays
    before = to.twin
    near.paint("n", 0xEE)
    to.twin = [tensor.copy() for tensor in before]

    class Model(LayerSynchronizer):
        """Computes a layer while it is waited for."""

        def synchronize_layer(self, layer_index: int, timeout_in_millis: Any) -> bool:  # noqa: ARG002
            for tensor in (2 * layer_index, 2 * layer_index + 1):
                arrays[tensor][:] = good[tensor]
            return True

    assert send(near, "n", [to.to(range(3))], Model()) == [OK]
    to.slot(good, range(3))
    to.check()


def test_layers_arrive_while_later_ones_are_waited_for(pair: tuple[End, Peer, bool]) -> None:
    near, far, accessible = pair
    near.allocate("n", 1, 700, 8, seed=1)
    source = pattern(1, 8, 1, 700)
    to = Far(far, accessible, "f", 1, 700, 4, seed=2)
    steps = Steps(allowed=0)
    task = launch(near, "n", [to.to(range(4))], steps)
    for layer in range(4):
        steps.reached(layer)
        assert task.get_results(0) == [LLMStatusCode.LLM_TIMEOUT]
        assert not task.done()
        eventually(lambda layer=layer: task.progress()[0].layers_done == layer, what="the layer before")
        assert task.progress()[0].bytes_done == 1400 * layer
        to.check(f"before layer {layer}")
        to.slot(source, range(layer, layer + 1), layer)
        steps.allow(layer + 1)
    assert results(task) == [OK]
    to.check()


def test_the_next_layer_is_waited_for_while_one_is_on_the_wire(ends: Ends, way: dict[str, Any]) -> None:
    """The peer is stopped, so that layer 0 cannot end; layer 1 is asked for all the same, and all arrives later."""
    near, far = ends.pair(pool=32 << 20, llm__SyncKvCacheWaitTime=15000, llm__LinkSilence=60000, **way)
    rows, row_bytes = 4, 100_000
    near.allocate("n", rows, row_bytes, 6, blocks=True, seed=1)
    to = Far(far, way["accessible"], "f", rows, row_bytes, 3, blocks=True, model=1, seed=2)
    assert send(near, "n", [to.to(range(1))], src=[0], dst=[0]) == [OK]
    steps = Steps(allowed=1)
    far.stop()
    try:
        task = launch(near, "n", [to.to(range(3))], steps, src=list(range(rows)), dst=list(range(rows)))
        steps.reached(1)
        assert task.progress()[0].layers_done == 0, "a stopped peer took a layer"
        assert steps.layers == [0, 1]
        steps.allow()
        steps.reached(2)
        assert task.progress()[0].layers_done == 0
        assert task.synchronize(0) == LLMStatusCode.LLM_TIMEOUT
    finally:
        far.go_on()
        far.spoiled = False
    assert results(task) == [OK]
    to.blocks(pattern(1, 6, rows, row_bytes), range(3), 0, [(row, row) for row in range(rows)])
    to.check()


def test_sync_kv_timeout_is_for_layers_and_not_for_the_model(ends: Ends, way: dict[str, Any]) -> None:
    near, far = ends.pair(llm__SyncKvCacheWaitTime=150, **way)
    near.allocate("n", 1, 64, 4, seed=1)
    to = Far(far, way["accessible"], "f", 1, 64, 2, seed=2)
    steps = Steps(allowed=0)
    task = launch(near, "n", [to.to(range(2))], steps)
    steps.reached(0)
    assert task.synchronize(400) == LLMStatusCode.LLM_TIMEOUT
    steps.allow(1)
    steps.reached(1)
    assert task.synchronize(400) == LLMStatusCode.LLM_TIMEOUT
    steps.allow()
    assert results(task) == [OK]
    to.slot(pattern(1, 4, 1, 64), range(2))
    to.check()


def test_reasons_name_the_cluster_and_the_layer(pair: tuple[End, Peer, bool]) -> None:
    near, far, accessible = pair
    near.allocate("n", 1, 80, 8, seed=1)
    good = Far(far, accessible, "good", 1, 80, 4, seed=1)
    short = Far(far, accessible, "short", 1, 79, 4, seed=2)
    task = launch(near, "n", [good.to(range(1, 4)), short.to(range(2))], Steps(answers={2: False}))
    assert results(task) == [INVALID, INVALID]
    first, second = task.errors()
    assert names(first, cluster=2, layer=2), first
    assert names(second, cluster=2, layer=0), second


@pytest.mark.parametrize("answer", [False, ValueError()], ids=["false", "raises"])
def test_what_has_ended_cannot_be_cancelled(ends: Ends, answer: Any) -> None:
    near, far = ends.pair()
    near.allocate("n", 1, 80, 8, seed=1)
    to = Far(far, False, "f", 1, 80, 4, seed=1)
    task = launch(near, "n", [to.to(range(1, 4)), to.to(range(3, 4))], Steps(answers={2: answer}))
    told = results(task)
    assert told[1] is None, "never begun"
    assert task.done()
    assert not task.cancel(), "it had ended"
    assert results(task, 0) == told, "what is over does not change"


class Spiteful:
    """Has no truth."""

    def __bool__(self) -> bool:
        msg = "no truth in it"
        raise ArithmeticError(msg)


@pytest.mark.parametrize("truth", [1, "yes", [0], np.bool_(True), object()], ids=repr)
def test_what_is_true_is_ready(ends: Ends, truth: Any) -> None:
    near, far = ends.pair()
    near.allocate("n", 1, 64, 4, seed=1)
    to = Far(far, False, "f", 1, 64, 2, seed=2)
    assert send(near, "n", [to.to(range(2))], Steps(answers={0: truth})) == [OK]
    to.slot(pattern(1, 4, 1, 64), range(2))
    to.check()


@pytest.mark.parametrize(
    ("answer", "expected"),
    [
        (False, INVALID),
        (0, INVALID),
        (None, INVALID),
        ("", INVALID),
        (np.bool_(False), INVALID),
        (ValueError("the model broke"), TIMEOUT),
        (LLMException("x", LLMStatusCode.LLM_OUT_OF_MEMORY), TIMEOUT),
        (SystemExit(3), TIMEOUT),
        (KeyboardInterrupt(), TIMEOUT),
        (GeneratorExit(), TIMEOUT),
        (Spiteful(), TIMEOUT),
    ],
    ids=lambda value: type(value).__name__ + repr(value)[:12],
)
@pytest.mark.filterwarnings("ignore::pytest.PytestUnhandledThreadExceptionWarning")
def test_a_layer_that_never_gets_ready(ends: Ends, answer: Any, expected: str) -> None:
    for accessible in (False, True):
        near, far = ends.pair(accessible=accessible)
        near.allocate("n", 1, 64, 10, seed=1)
        source = pattern(1, 10, 1, 64)
        made = [Far(far, accessible, f"f{number}", 1, 64, 5, seed=number) for number in range(5)]
        ranges = [range(2), range(5), range(2, 3), range(3, 5), range(1, 4)]
        steps = Steps(answers={2: answer})
        task = launch(near, "n", [to.to(src, src.start) for to, src in zip(made, ranges)], steps)
        told = results(task)
        assert told == [OK, expected, expected, None, expected], told
        assert task.synchronize().name == expected
        assert task.synchronize(0).name == expected, "as often as one likes"
        assert results(task, 0) == told
        assert task.done()
        assert steps.layers == [0, 1, 2], "no later layer"
        done = [progress.layers_done for progress in task.progress()]
        assert done[0] == 2, "layers that were ready still reach who needs no other"
        assert done[1] <= 2
        assert done[4] <= 1
        for number, (to, src) in enumerate(zip(made, ranges)):
            if done[number]:
                to.slot(source, range(src.start, src.start + done[number]), src.start)
            to.check(number)
        errors = task.errors()
        assert [error is None for error in errors] == [True, False, False, True, False]
        for number in (1, 2, 4):
            assert errors[number].status_code.name == expected
            assert "layer 2" in str(errors[number])
        if isinstance(answer, ValueError):
            assert "the model broke" in str(errors[1])
        # the engine goes on
        assert send(near, "n", [made[3].to(range(5))]) == [OK]
        made[3].slot(source, range(5))
        made[3].check()
        near.finalize()
        far.reset()


def test_the_time_one_layer_may_take(ends: Ends, way: dict[str, Any]) -> None:
    near, far = ends.pair(**way)
    near.allocate("n", 1, 64, 8, seed=1)
    source = pattern(1, 8, 1, 64)
    early = Far(far, way["accessible"], "early", 1, 64, 4, seed=2)
    late = Far(far, way["accessible"], "late", 1, 64, 4, seed=3)
    never = Far(far, way["accessible"], "never", 1, 64, 4, seed=4)
    steps = Steps(allowed=2, timeout_in_millis=200)
    configs = [early.to(range(2)), late.to(range(4)), never.to(range(3, 4))]
    task = launch(near, "n", configs, steps)
    told = results(task)  # ends though the method has not returned
    assert told[:2] == [OK, TIMEOUT]
    assert told[2] in (None, TIMEOUT)
    assert task.done()
    assert steps.asked == [(0, 200), (1, 200), (2, 200)]
    assert "layer 2" in str(task.errors()[1])
    steps.allow()
    early.slot(source, range(2))
    late.slot(source, range(2))
    far.rest(0.1)
    for to in (early, late, never):
        to.check("nothing comes after the end")
    assert send(near, "n", [late.to(range(4))]) == [OK]
    late.slot(source, range(4))
    late.check()


# -- the task --------------------------------------------------------------------------------------------------------


def test_limits_and_calls_from_several_threads(ends: Ends) -> None:
    near, far = ends.pair()
    near.allocate("n", 1, 64, 4, seed=1)
    to = Far(far, False, "f", 1, 64, 2, seed=2)
    steps = Steps(allowed=0)
    task = launch(near, "n", [to.to(range(2)), to.to(range(1))], steps)
    late = LLMStatusCode.LLM_TIMEOUT
    assert task.synchronize(0) == late
    assert task.get_results(0) == [late, late]
    assert task.synchronize(30) == late
    assert task.get_results(timeout_in_millis=30) == [late, late]
    told: list[Any] = []
    calls = [task.synchronize, task.get_results, lambda: task.synchronize(2**32 - 1), lambda: task.get_results(20_000)]
    crew = [threading.Thread(target=lambda call=call: told.append(call()), daemon=True) for call in calls * 2]
    for thread in crew:
        thread.start()
    assert task.synchronize(50) == late
    assert told == []
    steps.allow()
    for thread in crew:
        thread.join(LIMIT)
    good = LLMStatusCode.LLM_SUCCESS
    assert sorted(map(str, told)) == sorted(map(str, [good, [good, good]] * 4))
    assert task.synchronize(0) == good
    assert task.get_results(0) == [good, good]
    for call in (task.synchronize, task.get_results):
        for wrong, kind in ((-1, ValueError), (2**32, ValueError), ("1", TypeError), (1.0, TypeError)):
            with pytest.raises(kind):
                call(wrong)


def test_cancel_between_layers(ends: Ends, way: dict[str, Any]) -> None:
    near, far = ends.pair(**way)
    near.allocate("n", 1, 64, 6, seed=1)
    source = pattern(1, 6, 1, 64)
    to = Far(far, way["accessible"], "f", 1, 64, 3, seed=2)
    other = Far(far, way["accessible"], "g", 1, 64, 3, seed=3)
    last = Far(far, way["accessible"], "h", 1, 64, 3, seed=4)
    steps = Steps(allowed=1)
    task = launch(near, "n", [to.to(range(3)), other.to(range(1)), last.to(range(2, 3))], steps)
    steps.reached(1)
    eventually(lambda: [one.layers_done for one in task.progress()] == [1, 1, 0], what="layer 0")
    assert task.cancel()
    assert not task.cancel(), "it has ended"
    assert task.synchronize().name == FAILED
    assert results(task) == [FAILED, OK, FAILED]
    assert task.done()
    assert task.errors()[1] is None
    assert "cancel" in str(task.errors()[0]).lower()
    steps.allow()
    to.slot(source, range(1))
    other.slot(source, range(1))
    far.rest(0.1)
    for each in (to, other, last):
        each.check("nothing comes after the cancelling")
    assert steps.layers == [0, 1]
    assert send(near, "n", [to.to(range(3))]) == [OK]


def test_cancel_at_any_moment_leaves_whole_rows(pair: tuple[End, Peer, bool]) -> None:
    near, far, accessible = pair
    rows, row_bytes, layers = 8, 20_000, 6
    near.allocate("n", rows, row_bytes, 2 * layers, blocks=True, seed=1)
    source = pattern(1, 2 * layers, rows, row_bytes)
    to = Far(far, accessible, "f", rows, row_bytes, layers, blocks=True, model=1)
    chance = random.Random(3)  # noqa: S311
    all_rows = list(range(rows))
    for number in range(20 if THOROUGH else 4):
        far.fill("f", 50 + number)
        old = pattern(50 + number, 2 * layers, rows, row_bytes)
        task = launch(near, "n", [to.to(range(layers))], src=all_rows, dst=all_rows)
        waited = threading.Event()
        waited.wait(chance.random() * 0.003)
        ended = not task.cancel()
        (told,) = results(task)
        assert told in ((OK,) if ended else (OK, FAILED)), told
        got = far.read("f")
        done = task.progress()[0].layers_done
        for tensor, row in itertools.product(range(2 * layers), all_rows):
            new = np.array_equal(got[tensor][row], source[tensor][row])
            assert new or np.array_equal(got[tensor][row], old[tensor][row]), "a row of both"
            assert new or tensor >= 2 * done, "a layer that was counted is not there"
        far.rest(0.05)
        assert equal(far.read("f"), got), "something came after the end"


def test_dropping_the_task_leaves_the_transfer_alone(pair: tuple[End, Peer, bool]) -> None:
    near, far, accessible = pair
    near.allocate("n", 1, 640, 6, seed=1)
    to = Far(far, accessible, "f", 1, 640, 3, seed=2)
    steps = Steps(allowed=0)
    launch(near, "n", [to.to(range(3))], steps)
    steps.reached(0)
    steps.allow()
    to.slot(pattern(1, 6, 1, 640), range(3))
    eventually(lambda: equal(far.read("f"), to.twin), what="the bytes")


def test_ctrl_c_interrupts_synchronize(ends: Ends) -> None:
    near, far = ends.pair()
    near.allocate("n", 1, 64, 2, seed=1)
    to = Far(far, False, "f", 1, 64, 1, seed=2)
    for call in ("synchronize", "get_results"):
        steps = Steps(allowed=0)
        task = launch(near, "n", [to.to(range(1))], steps)
        steps.reached(0)
        timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        with pytest.raises(KeyboardInterrupt):
            getattr(task, call)(int(LIMIT * 1000))
        timer.join()
        assert not task.done()
        steps.allow()
        assert results(task) == [OK], "an interrupted wait leaves the transfer alone"


def test_cancelled_from_many_threads_it_is_cancelled_once(ends: Ends) -> None:
    near, far = ends.pair()
    near.allocate("n", 1, 64, 4, seed=1)
    to = Far(far, False, "f", 1, 64, 2, seed=2)
    for _ in range(10):
        steps = Steps(allowed=0)
        task = launch(near, "n", [to.to(range(2)), to.to(range(1))], steps)
        told: list[bool] = []
        crew = [threading.Thread(target=lambda task=task, told=told: told.append(task.cancel())) for _ in range(6)]
        for thread in crew:
            thread.start()
        for thread in crew:
            thread.join(LIMIT)
        assert sorted(told) == [False] * 5 + [True]
        assert results(task) == [FAILED, FAILED]
        steps.allow()


def test_cancel_with_a_layer_on_the_wire(ends: Ends, way: dict[str, Any]) -> None:
    near, far = ends.pair(pool=8 << 20, llm__SyncKvCacheWaitTime=15000, llm__LinkSilence=60000, **way)
    near.allocate("n", 1, 400_000, 6, seed=1)
    to = Far(far, way["accessible"], "f", 1, 400_000, 3, seed=2)
    assert send(near, "n", [to.to(range(1))]) == [OK]
    steps = Steps(allowed=1)
    far.stop()
    try:
        task = launch(near, "n", [to.to(range(3))], steps)
        steps.reached(1)
        assert task.cancel()
        assert task.synchronize(20).name in (FAILED, TIMEOUT)
    finally:
        far.go_on()
        far.spoiled = False
    assert results(task) == [FAILED]
    steps.allow()
    got = far.read("f")
    far.rest(0.1)
    assert equal(far.read("f"), got), "something came after the end"
    assert equal(got[2:], to.twin[2:]), "a layer that was never begun"
    assert send(near, "n", [to.to(range(3))]) == [OK], "the link is as good as before"
    to.slot(pattern(1, 6, 1, 400_000), range(3))
    to.check()


def test_what_has_ended_keeps_no_synchronizer(ends: Ends) -> None:
    """It may hold a model; the task itself may be kept for its results."""
    near, far = ends.pair()
    near.allocate("n", 1, 64, 4, seed=1)
    to = Far(far, False, "f", 1, 64, 2, seed=2)
    for answers in ({}, {1: False}):
        steps = Steps(answers=answers)
        watched = weakref.ref(steps)
        task = launch(near, "n", [to.to(range(2))], steps)
        results(task)
        del steps
        eventually(lambda watched=watched: gc.collect() >= 0 and watched() is None, what="the end of the synchronizer")
