"""Results of layer-wise transfers in both modes: while the transfer waits for a layer, and after a layer failed."""

from __future__ import annotations

import numpy as np
import pytest

from llm_datadist import LLMStatusCode
from peers import Ends, equal, eventually, pattern
from two_modes import MODES, SUCCESS, Gate, Pair, config, sent, synchronizer

INVALID = LLMStatusCode.LLM_PARAM_INVALID


@pytest.fixture(params=MODES)
def pair(ends: Ends, request: pytest.FixtureRequest) -> Pair:
    """Two linked ends in each mode."""
    return Pair(request.param, ends)


@pytest.mark.contract("20.7", "19.transfer-cache-async", "19.cache-task", "19.layer-synchronizer")
def test_polling_and_waiting_with_limits(pair: Pair) -> None:
    src, addrs = pair.caches()
    gate = Gate(2)
    configs = [config(2, addrs, None, 1), config(2, addrs[:2], range(1), 2), config(2, addrs[2:], range(1, 2), 2)]
    task = pair.send(src, synchronizer(gate), configs)
    late = pair.late
    for limit in (0, 1, 50):
        assert task.synchronize(limit) is task.synchronize(timeout_in_millis=limit) is late
        assert task.get_results(limit) == task.get_results(timeout_in_millis=limit) == [late] * 3
    eventually(lambda: gate.asked == [0], what="the question for the first layer")
    gate.open()
    for limits in ((), (0,), ()):
        assert task.synchronize(*limits) is SUCCESS
        assert task.get_results(*limits) == [SUCCESS] * 3
        assert type(task.get_results()) is list
    assert gate.asked == [0, 1], "every layer is asked for once"
    # The first config sends slot 1 to the start of each tensor; the others send slot 2. All are independent.
    one, two = sent({0: 1}), sent({0: 2})
    for read, first, second in zip(pair.remote.read("f"), one, two):
        assert np.array_equal(read, first) or np.array_equal(read, second)


def raises(_: int) -> bool:
    """A synchronizer that raises."""
    raise ZeroDivisionError("the model broke")


@pytest.mark.contract("20.7", "19.cache-task")
@pytest.mark.parametrize("how", ["False", "raises"])
def test_what_was_complete_stays_a_success(pair: Pair, how: str) -> None:
    src, addrs = pair.caches(rows=1)

    def second_fails(layer: int) -> bool:
        return layer == 0 or (how == "raises" and raises(layer))

    configs = [config(2, addrs[:2], range(1)), config(2, addrs, range(2)), config(2, addrs[2:], range(1, 2))]
    task = pair.send(src, synchronizer(second_fails), configs)
    failed = pair.late if how == "raises" else INVALID
    assert task.synchronize() is failed, "the first that is neither success nor None"
    assert task.get_results() == [SUCCESS, failed, failed]
    assert equal(pair.remote.read("f"), [*pattern(1, 4, 1, 256)[:2], *pattern(2, 4, 1, 256)[2:]]), "layer 0 alone"
