"""The acceptance checklist (python-api.md §20), lines 6 to 9: layer-wise transfers and sizes."""

from __future__ import annotations

import threading
import time
from typing import Any, Callable

import numpy as np
import pytest

import llm_datadist
from conftest import options
from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheKey,
    CacheKeyByIdAndIndex,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
)
from memory import (
    LE,
    TE,
    UINT64_MAX,
    VE,
    Expected,
    UserTensors,
    contents,
    desc,
    fill,
    raising,
)
from memory import same as same_bytes
from mistakes import Row, check, coded
from peers import OK, Ends, code, equal, pattern
from two_modes import (
    KV_CACHE_MANAGER,
    KV_OPTIONS,
    MODES,
    SUCCESS,
    Gate,
    Pair,
    config,
    sent,
    synchronizer,
)

INVALID = LLMStatusCode.LLM_PARAM_INVALID
NO_LINK = coded(LLMStatusCode.LLM_NOT_YET_LINK)


@pytest.fixture(params=MODES)
def pair(ends: Ends, request: pytest.FixtureRequest) -> Pair:
    """Two linked ends in each mode."""
    return Pair(request.param, ends)


# -- 6 ---------------------------------------------------------------------------------------------------------------


class Sender:
    """One engine without links, with everything a layer-wise transfer may be given."""

    def __init__(self, mode: str, dist: LLMDataDist) -> None:
        self.kv = mode == KV_CACHE_MANAGER
        self.manager = dist.kv_cache_manager if self.kv else dist.cache_manager
        self.batch = self.manager.allocate_cache(desc(4, 256, 4))
        self.odd = self.manager.allocate_cache(desc(4, 256, 3))
        self.blocks = self.manager.allocate_blocks_cache(desc(4, 256, 4))
        self.user = UserTensors(4, 256, 4)
        handle = llm_datadist.KvCache if self.kv else Cache
        self.host = handle.create_cpu_cache(self.user.describe(), self.user.addrs)
        self.foreign = (
            Cache(1, desc(4, 256, 4), [1] * 4, None, False, False)
            if self.kv
            else llm_datadist.KvCache(1, desc(4, 256, 4), [[1] * 4], None)
        )
        self.asked: list[int] = []
        self.good: dict[str, Any] = {
            "src_cache": self.batch,
            # A false answer would end the transfer too, and which of the two is first would be chance.
            "layer_synchronizer": synchronizer(lambda layer: self.asked.append(layer) is None),
            "transfer_configs": [config(2, [1, 2, 3, 4])],
            "src_block_indices": None,
            "dst_block_indices": None,
            "dst_block_memory_size": None,
        }

    def __call__(self, **given: Any) -> Any:
        return self.manager.transfer_cache_async(**{**self.good, **given})

    def rows(self) -> list[Row]:
        """One mistake a row, in the order of §8.1."""
        lists = (5, "01", {0}, range(2), [0, "1"], (0, None), [0.0], [True])
        src, dst, size = "src_block_indices", "dst_block_indices", "dst_block_memory_size"
        addrs = [1, 2, 3, 4]
        blocks = {"src_cache": self.blocks, src: [0], dst: [1]}
        with_key = llm_datadist.TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(2, 1), range(2), range(2))
        return [
            *[Row({"src_cache": bad}, TE) for bad in (None, "cache", 5, desc(), [self.batch], self.foreign)],
            Row({"src_cache": self.host}, LE),
            *[Row({dst: bad, size: None}, TE) for bad in lists],
            *[Row({dst: bad, size: None}, VE) for bad in ([-1], (0, UINT64_MAX + 1))],
            *[Row({src: bad}, TE) for bad in lists],
            *[Row({src: bad}, VE) for bad in ([-1], (0, UINT64_MAX + 1))],
            *[Row({size: bad}, TE) for bad in ("0", 1.0, True, [1])],
            *[Row({size: bad}, VE) for bad in (-1, UINT64_MAX + 1)],
            *[
                Row({src: bad, dst: none, size: None}, LE, "transfer from blocks to cache is not supported")
                for bad in ([1, 2], (0,))
                for none in (None, [], ())
            ],
            *[Row({src: a, dst: b, size: None}, LE) for a, b in (([0, 1], [0]), ([0], (0, 1)))],
            *[Row({src: none, dst: [0], size: None}, LE) for none in (None, [], ())],
            *[Row({"layer_synchronizer": bad}, TE) for bad in (None, 5, "x", lambda *_: True)],
            *[
                Row({"transfer_configs": bad}, TE)
                for bad in (None, 5, "x", config(2, addrs), {2: config(2, addrs)}, [5], [config(2, addrs), None])
            ],
            Row({"transfer_configs": [with_key]}, TE),
            *[Row({src: none, dst: none, size: 1}, LE) for none in (None, [], ())],
            Row({"src_cache": self.odd}, LE),
            Row({**blocks, "transfer_configs": [config(2, addrs, None, 1)]}, LE, "!= 0 while src is blocks"),
            *[Row({"transfer_configs": [config(2, [1] * 6, bad)]}, LE) for bad in (range(3), range(2, 5))],
            *[Row({"transfer_configs": [config(2, bad)]}, LE) for bad in ([], [1], [1, 2, 3], [1] * 5)],
            Row({"transfer_configs": (config(2, addrs), config(2, addrs, range(1)))}, LE),
            *[Row({"transfer_configs": [config(2, addrs, None, bad)]}, LE, "out of range: [0, 4)") for bad in (4, 99)],
        ]


@pytest.fixture(params=MODES)
def sender(request: pytest.FixtureRequest, start: Callable[..., LLMDataDist]) -> Sender:
    """In each mode."""
    return Sender(request.param, start(KV_OPTIONS if request.param == KV_CACHE_MANAGER else None))


@pytest.mark.contract("20.6", "19.transfer-cache-async")
def test_20_06_every_check_in_its_order(sender: Sender) -> None:
    check(sender, {}, sender.rows())
    assert sender.asked == [], "a refused call asked for a layer"
    # Its layers are ready, so that what fails is the link and not a layer.
    task = sender(layer_synchronizer=synchronizer())
    assert isinstance(task, llm_datadist.CacheTask)
    assert task.synchronize(60000) is LLMStatusCode.LLM_NOT_YET_LINK
    assert task.get_results() == [LLMStatusCode.LLM_NOT_YET_LINK]


@pytest.mark.contract("20.6", "19.transfer-blocks")
@pytest.mark.parametrize(
    ("lists", "expected"),
    [
        (([0, 1], [0, "1"]), TE),
        (([0, "1"], [0, 1]), TE),
        (([-1, 1], [0, 1]), VE),
        (([0, 1], [-1, 1]), VE),
        (([0, 1], [0]), LE),
        (([], [], 1), LE),
        ((None, None, 1), LE),
        (([0, 1], [0, 1], -1), VE),
        (([1, 2],), LE),
        (([1, 2], None), LE),
        ((None, [1, 2]), LE),
    ],
    ids=str,
)
def test_20_06_block_indices(sender: Sender, lists: tuple[Any, ...], expected: Expected) -> None:
    good = [sender.blocks, sender.good["layer_synchronizer"], [config(2, [1, 2, 3, 4])]]
    with pytest.raises(Exception) as caught:  # noqa: PT011  (judged below)
        sender.manager.transfer_cache_async(*good, *lists)
    expected.judge(caught.value)
    if lists[0] == [1, 2]:
        assert "transfer from blocks to cache is not supported" in str(caught.value)
    assert sender.asked == []


@pytest.mark.contract("20.6")
def test_20_06_source_and_synchronizer(sender: Sender) -> None:
    to = [config(2, [1, 2, 3, 4])]
    wait = sender.good["layer_synchronizer"]
    for bad in (None, "cache"):
        with raising(TE):
            sender.manager.transfer_cache_async(bad, wait, to)
    for arguments in ((sender.batch,), (sender.batch, wait), (sender.batch, None, to), ()):
        with raising(TE):
            sender.manager.transfer_cache_async(*arguments)
    assert sender.asked == []


@pytest.mark.contract("20.6")
def test_20_06_a_missing_range_is_filled_in_and_no_configs_are_success(sender: Sender) -> None:
    to = config(2, [1, 2, 3, 4])
    sender(transfer_configs=(to,)).synchronize(5000)
    assert to.src_layer_range == range(2)
    for none in ([], ()):
        task = sender(transfer_configs=none)
        assert task.synchronize(5000) is SUCCESS
        assert task.get_results() == []


@pytest.mark.contract("20.6")
def test_20_06_kinds_of_configs_with_remote_access(ends: Ends) -> None:
    near, far = ends.pair(accessible=True)
    near.allocate("n", 4, 256, 4, blocks=True, seed=1)
    far.allocate("f", 6, 256, 4, blocks=True, keys=[("blocks", 2, 5)], seed=2)
    manager, src, make = near.dist.cache_manager, near.held["n"].handle, llm_datadist.TransferWithCacheKeyConfig
    by_key = make(BlocksCacheKey(2, 5), range(2), range(2))
    for bad in ([config(2, far.addresses("f"))], [by_key, config(2, far.addresses("f"))]):
        with raising(TE):
            manager.transfer_cache_async(src, synchronizer(), bad, [3, 0], [5, 1])
    unknown = make(BlocksCacheKey(2, 6), range(2), range(2))
    beyond = make(BlocksCacheKey(2, 5), range(2), range(1, 3))
    task = manager.transfer_cache_async(src, synchronizer(), [unknown, beyond, by_key], [3, 0], [5, 1])
    assert task.synchronize() is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    assert task.get_results() == [LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, INVALID, SUCCESS]
    expected = pattern(2, 4, 6, 256)
    for left, right in zip(expected, pattern(1, 4, 4, 256)):
        left[5], left[1] = right[3], right[0]
    read = far.read("f")
    assert equal(read, expected)


@pytest.mark.contract("20.6")
def test_20_06_roles_of_the_kv_cache_manager(start: Callable[..., LLMDataDist]) -> None:
    manager = start(KV_OPTIONS, role=LLMRole.DECODER).kv_cache_manager
    for arguments in ((None, None, None), ("cache", None, None)):
        with raising(LE):
            manager.transfer_cache_async(*arguments)
    cache = manager.allocate_cache(desc(4, 256, 2))
    with raising(LE):
        manager.transfer_cache_async(cache, synchronizer(), [config(2, [1, 2])])


# -- 7 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.contract("20.7", "19.transfer-cache-async", "19.cache-task", "19.layer-synchronizer")
def test_20_07_polling_and_waiting_with_limits(pair: Pair) -> None:
    src, addrs = pair.caches()
    gate = Gate(2)
    configs = [config(2, addrs, None, 1), config(2, addrs[:2], range(1), 2), config(2, addrs[2:], range(1, 2), 2)]
    task = pair.send(src, synchronizer(gate), configs)
    late = pair.late
    for limit in (0, 1, 50):
        assert task.synchronize(limit) is late
        assert task.synchronize(timeout_in_millis=limit) is late
        assert task.get_results(limit) == [late] * 3
        assert task.get_results(timeout_in_millis=limit) == [late] * 3
    assert gate.asked == [0]
    gate.open()
    for _ in range(2):
        assert task.synchronize() is SUCCESS
        assert task.get_results() == [SUCCESS] * 3
        assert task.synchronize(0) is SUCCESS
        assert task.get_results(0) == [SUCCESS] * 3
        assert type(task.get_results()) is list
    assert gate.asked == [0, 1], "every layer is asked for once"
    # The first writes its slot 1 to the start of each tensor, the others their slot 2, each in its own time.
    one, two = sent({0: 1}), sent({0: 2})
    for read, first, second in zip(pair.far.read("f"), one, two):
        assert np.array_equal(read, first) or np.array_equal(read, second)


@pytest.mark.contract("20.7")
def test_20_07_a_layer_that_blocks_for_300_milliseconds(pair: Pair) -> None:
    src, addrs = pair.caches(rows=1)

    def slow(layer: int) -> bool:
        time.sleep(0.0 if layer else 0.3)
        return True

    task = pair.send(src, synchronizer(slow), [config(2, addrs), config(2, addrs)])
    assert task.synchronize(0) is pair.late
    assert task.get_results(0) == [pair.late] * 2
    assert task.synchronize() is SUCCESS
    assert task.get_results() == [SUCCESS] * 2
    assert equal(pair.far.read("f"), pattern(1, 4, 1, 256))


@pytest.mark.contract("20.7")
@pytest.mark.parametrize("bad", [("0", TE), (1.0, TE), (True, TE), (-1, VE), (2**32, VE)])
def test_20_07_limits_are_uint32(pair: Pair, bad: tuple[Any, Expected]) -> None:
    value, expected = bad
    src, addrs = pair.caches()
    task = pair.send(src, synchronizer(), [config(2, addrs)])
    for call in (task.synchronize, task.get_results):
        with raising(expected):
            call(value)
        with raising(expected):
            call(timeout_in_millis=value)
    assert task.synchronize(2**32 - 1) is SUCCESS


def raises(_: int) -> bool:
    """A synchronizer with a mistake."""
    raise ZeroDivisionError("the model broke")


@pytest.mark.contract("20.7", "19.cache-task")
@pytest.mark.parametrize("answer", [False, None, 0, ""])
def test_20_07_a_synchronizer_that_says_no(pair: Pair, answer: Any) -> None:
    src, addrs = pair.caches()
    asked: list[int] = []

    def refuse(layer: int) -> Any:
        asked.append(layer)
        return answer

    task = pair.send(src, synchronizer(refuse), [config(2, addrs[:2], range(1)), config(2, addrs[2:], range(1, 2))])
    assert task.synchronize() is INVALID
    assert task.get_results() == [INVALID, None]
    assert asked == [0], "the layers after it are never reached"
    assert equal(pair.far.read("f"), pattern(2, 4, 4, 256)), "nothing was sent"


@pytest.mark.contract("20.7")
def test_20_07_a_synchronizer_that_raises(pair: Pair) -> None:
    src, addrs = pair.caches()
    task = pair.send(src, synchronizer(raises), [config(2, addrs[:2], range(1)), config(2, addrs[2:], range(1, 2))])
    assert task.synchronize() is pair.late
    assert task.get_results() == [pair.late, None]
    assert equal(pair.far.read("f"), pattern(2, 4, 4, 256))


@pytest.mark.contract("20.7", "19.cache-task")
@pytest.mark.parametrize("how", ["False", "raises"])
def test_20_07_what_was_complete_stays_a_success(pair: Pair, how: str) -> None:
    src, addrs = pair.caches(rows=1)
    first = threading.Event()

    def second_fails(layer: int) -> bool:
        if layer == 0:
            return True
        assert first.wait(20)
        return raises(layer) if how == "raises" else False

    configs = [
        config(2, addrs[:2], range(1)),
        config(2, addrs, range(2)),
        config(2, addrs[2:], range(1, 2)),
    ]
    task = pair.send(src, synchronizer(second_fails), configs)
    # Layer 0 is asked for, sent, and done before layer 1 is answered.
    far = pair.far
    expected = [*pattern(1, 4, 1, 256)[:2], *pattern(2, 4, 1, 256)[2:]]
    until = time.monotonic() + 60
    while not equal(far.read("f"), expected):
        assert time.monotonic() < until
        time.sleep(0.01)
    first.set()
    failed = pair.late if how == "raises" else INVALID
    assert task.synchronize() is failed, "the first that is neither success nor None"
    assert task.get_results() == [SUCCESS, failed, failed]


@pytest.mark.contract("20.7", "19.transfer-config")
def test_20_07_layers_arrive_where_they_belong(pair: Pair) -> None:
    src, addrs = pair.caches(tensors=8)
    # Addresses are relative to the start of the range: source layers 2 and 3 go to far layers 0 and 1, slot 3.
    asked: list[int] = []

    def note(layer: int) -> bool:
        asked.append(layer)
        return True

    task = pair.send(src, synchronizer(note), [config(2, [a + 3 * 256 for a in addrs[:4]], range(2, 4), 1)])
    assert task.synchronize() is SUCCESS
    assert asked == [2, 3], "a layer that nobody needs is not asked for"
    expected = pattern(2, 8, 4, 256)
    for tensor in range(4):
        expected[tensor][3] = pattern(1, 8, 4, 256)[4 + tensor][1]
    assert equal(pair.far.read("f"), expected)


@pytest.mark.contract("20.7")
def test_20_07_an_unlinked_destination_ends_alone(pair: Pair) -> None:
    src, addrs = pair.caches(rows=1)
    task = pair.send(src, synchronizer(), [config(3, addrs), config(2, addrs)])
    assert task.synchronize() is LLMStatusCode.LLM_NOT_YET_LINK
    assert task.get_results() == [LLMStatusCode.LLM_NOT_YET_LINK, SUCCESS]
    assert equal(pair.far.read("f"), pattern(1, 4, 1, 256))


# -- 8 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.contract("20.8")
def test_20_08_sizes(manager: Any) -> None:
    src, dst = manager.allocate_cache(desc()), manager.allocate_cache(desc())
    before, from_ = fill(dst, 1), fill(src, 2)
    for size in (-2, 0, -(2**63)):
        with raising(LE):
            manager.copy_cache(dst, src, size=size)
        with raising(LE):
            manager.copy_cache(dst, src, 0, 0, 0, size)
        for key in (CacheKey(2, 1), CacheKeyByIdAndIndex(2, 1)):
            with raising(LE):
                manager.pull_cache(key, dst, size=size)
            with raising(LE):
                manager.pull_cache(key, dst, 0, size)
    assert same_bytes(contents(dst), before)
    for size in (-1, 1):
        manager.copy_cache(dst, src, size=size)
        with raising(NO_LINK):
            manager.pull_cache(CacheKey(2, 1), dst, size=size)
    assert [tensor[0].tobytes() for tensor in contents(dst)] == [tensor[0].tobytes() for tensor in from_]


@pytest.mark.contract("20.8")
def test_20_08_sizes_with_the_kv_cache_manager(start: Callable[..., LLMDataDist]) -> None:
    manager = start(KV_OPTIONS, role=LLMRole.DECODER).kv_cache_manager
    src, dst = manager.allocate_cache(desc()), manager.allocate_cache(desc())
    for size in (-2, 0):
        with raising(LE):
            manager.copy_cache(dst, src, size=size)
        with raising(LE):
            manager.pull_cache(CacheKey(2, 1), dst, size=size)
    manager.copy_cache(dst, src, size=-1)


# -- 9 ---------------------------------------------------------------------------------------------------------------

PER_LAYER = [(-1, VE), (2**32, VE), (0, LE), (1.0, TE), (2.0, TE), ("x", TE), (None, TE), (True, TE)]


@pytest.mark.contract("20.9")
@pytest.mark.parametrize(("bad", "expected"), PER_LAYER, ids=str)
@pytest.mark.parametrize("ranges", [{}, {"src_layer_range": range(1), "dst_layer_range": range(1)}], ids=["all", "one"])
def test_20_09_tensors_of_a_layer(
    start: Callable[..., LLMDataDist], bad: Any, expected: Expected, ranges: dict[str, Any]
) -> None:
    manager = start(options(llm__EnableRemoteCacheAccessible="1")).cache_manager
    batch, blocks = manager.allocate_cache(desc(tensors=10)), manager.allocate_blocks_cache(desc(tensors=10))
    slot, of_blocks = CacheKeyByIdAndIndex(2, 1), BlocksCacheKey(2)
    for call in (
        lambda n: manager.pull_cache(slot, batch, tensor_num_per_layer=n, **ranges),
        lambda n: manager.pull_blocks(of_blocks, blocks, [0], [1], tensor_num_per_layer=n, **ranges),
        lambda n: manager.push_cache(slot, batch, tensor_num_per_layer=n, **ranges),
        lambda n: manager.push_blocks(of_blocks, blocks, [0], [1], tensor_num_per_layer=n, **ranges),
    ):
        with raising(expected):
            call(bad)
        for good in (1, 2, 5, 10):
            with raising(NO_LINK):
                call(good)


@pytest.mark.contract("20.9")
def test_20_09_three_tensors_a_layer_do_not_divide_ten(ends: Ends) -> None:
    near, far = ends.pair(accessible=True)
    near.allocate("n", 4, 64, 10, seed=1)
    near.allocate("nb", 4, 64, 10, blocks=True, seed=1)
    cache = far.allocate("f", 4, 64, 10, seed=2)
    far.allocate("fb", 4, 64, 10, blocks=True, keys=[("blocks", 2, 0)], seed=2)
    slot, blocks = ("slot", 2, cache, 0), ("blocks", 2, 0)
    one = (0, 1)
    invalid = "LLM_PARAM_INVALID"
    assert code(near.push_cache, slot, "n", src_layers=one, dst_layers=one, n=3) == invalid
    assert code(near.push_blocks, blocks, "nb", [0], [1], src_layers=one, dst_layers=one, n=3) == invalid
    assert code(near.pull_cache, slot, "n", src_layers=one, dst_layers=one, n=3) == invalid
    assert code(near.pull_blocks, blocks, "nb", [0], [1], src_layers=one, dst_layers=one, n=3) == invalid
    assert equal(far.read("f"), pattern(2, 10, 4, 64))
    assert equal(far.read("fb"), pattern(2, 10, 4, 64))
    assert code(near.push_cache, slot, "n", src_layers=one, dst_layers=one, n=5) == OK
    expected = pattern(2, 10, 4, 64)
    for left, right in list(zip(expected, pattern(1, 10, 4, 64)))[:5]:
        left[0] = right[0]
    assert equal(far.read("f"), expected)
