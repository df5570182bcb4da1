"""Layer-wise transfers between real processes: what arrives, when layers are asked for, what a task says.

Every layout, both modes (destinations by address, by key), both transports; bytes are judged by numpy twins, order by
events and never by a clock. Not for: arguments that are refused (`test_layerwise_arguments.py`), peers that die, calls
at once and the end of processes (`test_layerwise_faults.py`).
"""

from __future__ import annotations

import asyncio
import gc
import itertools
import os
import random
import re
import signal
import threading
import weakref
from typing import Any

import numpy as np
import pytest

from layers import FAILED, Far, Steps, launch, results, send
from llm_datadist import (
    BlocksCacheKey,
    CacheKeyByIdAndIndex,
    LayerSynchronizer,
    LLMException,
    LLMStatusCode,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from peers import (
    GONE,
    INVALID,
    LIMIT,
    OK,
    THOROUGH,
    TIMEOUT,
    UNLINKED,
    End,
    Ends,
    Peer,
    equal,
    eventually,
    linked,
    options,
    pattern,
)

KEPT = 8  # threads that the engine may keep for the next tasks, few beside the tasks there were
PLACES = list(itertools.product([False, True], repeat=3))  # source registered, destination on the host, registered


@pytest.fixture
def pair(ends: Ends, way: dict[str, Any]) -> tuple[End, Peer, bool]:
    """Two linked ends, and whether caches are named by key."""
    return (*ends.pair(pool=16 << 20, **way), way["accessible"])


def refused(near: End, name: str, to: list[Any], **kwargs: Any) -> bool:
    """Whether a transfer is PARAM_INVALID, at once or as the result of every config: the contract allows both."""
    try:
        task = launch(near, name, to, **kwargs)
    except LLMException as error:
        return error.status_code.name == INVALID
    return results(task) == [INVALID] * len(to)


def names(error: Any, **facts: int) -> bool:
    """Whether the text of an error says `fact 7` or `fact=7` for every fact."""
    return all(re.search(rf"{what}[ =]{value}\b", str(error)) for what, value in facts.items())


# -- what arrives --------------------------------------------------------------------------------------------------


def test_slot_to_slot_between_all_placements_and_origins(pair: tuple[End, Peer, bool]) -> None:
    near, far, accessible = pair
    for number, (mine, host, registered) in enumerate(PLACES):
        near.make(f"n{number}", 3, 100, 8, registered=mine, seed=1000 + number)
        source = pattern(1000 + number, 8, 3, 100)
        to = Far(far, accessible, f"f{number}", 4, 130, 5, host=host, registered=registered, seed=number)
        for src, dst, row, slot in (
            (range(4), 0, 0, 0),
            (range(1, 3), 0, 2, 1),
            (range(1, 4), 2, 1, 3),
            (range(3, 4), 4, 2, 3),
            (range(1), 3, 0, 2),
        ):
            to.slot(source, src, dst, row=row, slot=slot)
            assert send(near, f"n{number}", [to.to(src, dst, row=row, slot=slot)]) == [OK]
            to.check((number, src, dst, row, slot))
        assert equal(near.read(f"n{number}"), source), "a transfer changed its source"


def test_blocks_to_blocks_between_all_placements_and_origins(pair: tuple[End, Peer, bool]) -> None:
    near, far, accessible = pair
    chance = random.Random(7)  # noqa: S311
    for number, (mine, host, registered) in enumerate(PLACES):
        near.make(f"n{number}", 9, 70, 8, blocks=True, registered=mine, seed=1000 + number)
        source = pattern(1000 + number, 8, 9, 70)
        how = {"host": host, "registered": registered, "seed": number}
        to = Far(far, accessible, f"f{number}", 12, 70, 5, blocks=True, model=number, **how)
        for src, dst, size in (
            (range(4), 1, {}),
            (range(2, 4), 0, {"size": None}),
            (range(1, 3), 3, {"size": 0}),
            (range(3, 4), 0, {"size": 70}),
        ):
            right = chance.sample(range(12), 6)
            left = [chance.randrange(9) for _ in right]
            to.blocks(source, src, dst, list(zip(left, right)))
            config = to.to(src, dst, by_id=bool(number % 2))
            assert send(near, f"n{number}", [config], src=left, dst=tuple(right), **size) == [OK], (number, src, size)
            to.check((number, src, dst))


def test_slot_to_blocks_with_a_short_last_piece(pair: tuple[End, Peer, bool]) -> None:
    near, far, accessible = pair
    for number, (mine, host, registered) in enumerate(PLACES):
        near.make(f"n{number}", 3, 100, 6, registered=mine, seed=1000 + number)
        source = pattern(1000 + number, 6, 3, 100)
        how = {"host": host, "registered": registered, "seed": number}
        to = Far(far, accessible, f"f{number}", 9, 32, 4, blocks=True, model=number, **how)
        for src, dst, row, blocks in (
            (range(3), 1, 0, [5, 2, 7, 0]),  # the last piece has 4 bytes
            (range(1, 3), 0, 1, [8, 1, 3]),  # the head of a slot, in whole pieces
            (range(2, 3), 3, 2, [4]),
            (range(1, 2), 0, 2, [3, 2, 1, 0]),
        ):
            to.pieces(source, src, dst, row, blocks)
            config = to.to(src, dst, row=row, by_id=row > 0)
            assert send(near, f"n{number}", [config], dst=blocks, size=32) == [OK], (number, src, row)
            to.check((number, src, row))


def test_pieces_are_counted_over_the_slot(pair: tuple[End, Peer, bool]) -> None:
    near, far, accessible = pair
    near.allocate("n", 3, 100, 2, seed=5)
    source = pattern(5, 2, 3, 100)
    whole = Far(far, accessible, "whole", 4, 100, 1, blocks=True, model=1, seed=1)
    assert send(near, "n", [whole.to(range(1), row=1, by_id=True)], dst=[2], size=100) == [OK]
    whole.pieces(source, range(1), 0, 1, [2])
    whole.check("one piece that is the slot")
    wide = Far(far, accessible, "wide", 4, 150, 1, blocks=True, model=2, seed=2)
    assert send(near, "n", [wide.to(range(1), row=2, by_id=True)], dst=[3], size=150) == [OK]
    wide.pieces(source, range(1), 0, 2, [3])
    wide.check("a piece longer than the slot, and shorter than the tensor: never another slot's bytes")
    small = Far(far, accessible, "small", 8, 32, 1, blocks=True, model=3, seed=3)
    for config, blocks, size in (
        (small.to(range(1)), [0, 1, 2, 3, 4], 32),  # 100 bytes are 4 pieces
        (wide.to(range(1)), [0, 1], 150),
        (small.to(range(1)), [0], 300),  # the tensor itself
        (small.to(range(1)), [0], 10_000),
        (small.to(range(1)), [0], 0),
    ):
        assert refused(near, "n", [config], dst=blocks, size=size), (blocks, size)
    for to in (whole, wide, small):
        to.check("what is refused moves nothing")


@pytest.mark.parametrize("lists", [{}, {"src": None, "dst": None}, {"src": [], "dst": []}], ids=str)
def test_a_blocks_cache_without_lists_sends_its_first_block(
    pair: tuple[End, Peer, bool], lists: dict[str, Any]
) -> None:
    """One slot of one block: block 0 goes to block 0, or to slot 0, of each tensor, and nothing else moves."""
    near, far, accessible = pair
    near.allocate("b", 6, 32, 8, blocks=True, seed=6)
    source = pattern(6, 8, 6, 32)
    blocks = Far(far, accessible, "blocks", 4, 32, 5, blocks=True, model=1, seed=2)
    slots = Far(far, accessible, "slots", 3, 40, 4, seed=3)
    for to, src, dst, by_id in (
        (blocks, range(4), 0, False),
        (blocks, range(1, 3), 3, True),
        (slots, range(4), 0, True),
    ):
        to.slot(source, src, dst)
        assert send(near, "b", [to.to(src, dst, by_id=by_id)], **lists) == [OK]
        to.check((src, dst))
    assert refused(near, "b", [blocks.to(range(2), row=1, by_id=True)], **lists), "a slot of a blocks cache"
    if accessible:
        assert refused(near, "b", [blocks.to(range(2), slot=1, by_id=True)], **lists), "another block there"
        assert refused(near, "b", [slots.to(range(2), slot=1)], **lists), "another slot there"
        wide = Far(far, accessible, "wide", 4, 33, 2, blocks=True, model=2, seed=4)
        assert refused(near, "b", [wide.to(range(2))], **lists), "blocks of another size"
        wide.check()
    assert refused(near, "b", [blocks.to(range(2))], dst=[0], size=16), "only the blocks written are given"
    blocks.check()
    slots.check()
    assert equal(near.read("b"), source), "a transfer changed its source"


def test_layouts_and_sizes_that_do_not_fit_are_refused_with_nothing_moved(pair: tuple[End, Peer, bool]) -> None:
    near, far, accessible = pair
    near.allocate("n", 3, 100, 4, seed=5)
    near.allocate("b", 6, 32, 4, blocks=True, seed=6)
    slots = Far(far, accessible, "slots", 2, 99, 2, seed=1)
    blocks = Far(far, accessible, "blocks", 4, 32, 2, blocks=True, model=1, seed=2)
    with pytest.raises(LLMException, match="transfer from blocks to cache is not supported") as caught:
        launch(near, "b", [slots.to(range(2))], src=[0, 1])
    assert caught.value.status_code.name == INVALID
    for size in (31, 33, 64):
        assert refused(near, "b", [blocks.to(range(2))], src=[0], dst=[0], size=size), size
    assert refused(near, "b", [blocks.to(range(2))], src=[0, 6], dst=[0, 1]), "a source block too high"
    assert send(near, "b", [blocks.to(range(2))], src=[0, 1], dst=[0, 2**50]) == [INVALID], "no such block"
    assert send(near, "b", [blocks.to(range(2))], src=[0, 1], dst=[0, 2**64 - 1]) == [INVALID], "no such block"
    if accessible:
        assert send(near, "b", [blocks.to(range(2))], src=[0, 1], dst=[0, 4]) == [INVALID], "one block too high"
        assert send(near, "n", [slots.to(range(2))]) == [INVALID], "the slot there is a byte short"
        assert send(near, "n", [slots.to(range(2), slot=2)]) == [INVALID], "no such slot"
        assert send(near, "n", [blocks.to(range(2))], dst=[0, 1], size=16) == [INVALID], "not the size of its blocks"
        key = CacheKeyByIdAndIndex(2, slots.cache, 0)
        low = TransferWithCacheKeyConfig(key, range(2), range(1, 3))
        assert send(near, "n", [low]) == [INVALID], "no such layer there"
        assert send(near, "n", [TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(2, 10**9), range(2), range(2))]) == [
            GONE
        ]
        assert send(
            near, "b", [TransferWithCacheKeyConfig(BlocksCacheKey(2, 77), range(2), range(2))], src=[0], dst=[0]
        ) == [GONE]
    else:
        last = slots.bases[3]
        bases = slots.bases[:3]
        for wrong in (last + 99, last + 99 + 1, last + 2 * 99, last - 2**30, 1, 0, 2**64 - 1):
            told = send(near, "n", [TransferConfig(2, [*bases, wrong])])
            assert told == [INVALID], (hex(wrong), told)
    slots.check()
    blocks.check()


def test_addresses_in_any_order_of_a_decoder_with_a_cache_per_layer(ends: Ends) -> None:
    for transport in ("auto", "tcp"):
        near, far = ends.pair(llm__LinkTransport=transport)
        layers = 6
        near.allocate("n", 2, 200, 2 * layers, seed=9)
        source = pattern(9, 2 * layers, 2, 200)
        places: list[tuple[str, int, int]] = []  # name, tensor, address of slot 1
        twins = {}
        for layer in range(layers):
            name = f"l{layer}"
            if layer % 2:
                far.register(name, 3, 200, 2, host=layer == 1, seed=layer)  # open or not as by default
                if layer == 1:  # memory on the host is not open by default
                    far.unregister(name)
                    far.register(name, 3, 200, 2, host=True, accessible=True, seed=layer)
            else:
                far.allocate(name, 3, 200, 2, host=layer == 2, seed=layer)
            twins[name] = pattern(layer, 2, 3, 200)
            places += [(name, tensor, base + 200) for tensor, base in enumerate(far.addresses(name))]
        for seed in range(3):
            random.Random(seed).shuffle(places)  # noqa: S311
            src = range(seed, layers)
            config = TransferConfig(2, tuple(place[2] for place in places[: 2 * len(src)]), src, 1)
            assert send(near, "n", [config]) == [OK]
            for tensor, (name, mine, _) in zip(source[2 * seed :], places):
                twins[name][mine][1] = tensor[1]
            for name, twin in twins.items():
                assert equal(far.read(name), twin), (seed, name)
        near.finalize()
        far.reset()


def test_an_address_between_two_slots_is_just_an_address(ends: Ends) -> None:
    """The caller adds the offset; whatever lies within one tensor is memory of that cache."""
    near, far = ends.pair()
    near.allocate("n", 1, 64, 2, seed=1)
    far.allocate("f", 4, 100, 2, seed=2)
    twin = pattern(2, 2, 4, 100)
    first, second = far.addresses("f")
    assert send(near, "n", [TransferConfig(2, [first + 170, second + 336])]) == [OK]
    twin[0].reshape(-1)[170:234] = pattern(1, 2, 1, 64)[0][0]
    twin[1].reshape(-1)[336:400] = pattern(1, 2, 1, 64)[1][0]
    assert equal(far.read("f"), twin)
    assert send(near, "n", [TransferConfig(2, [first, second + 337])]) == [INVALID], "a byte beyond the tensor"
    assert np.array_equal(far.read("f")[1], twin[1])


@pytest.mark.parametrize("per", [1, 3, 4])
def test_layers_of_other_than_two_tensors(ends: Ends, per: int) -> None:
    for accessible in (False, True):
        near, far = ends.pair(accessible=accessible)
        near.allocate("n", 2, 50, 4 * per, seed=1)
        source = pattern(1, 4 * per, 2, 50)
        to = Far(far, accessible, "f", 2, 50, 4, per=per, seed=2)
        steps = Steps(tensor_num_per_layer=per)
        assert send(near, "n", [to.to(range(1, 4), 0, row=1, slot=1)], steps) == [OK]
        assert steps.layers == [1, 2, 3]
        to.slot(source, range(1, 4), 0, row=1, slot=1)
        to.check()

        class Mine(Steps):
            tensor_num_per_layer = per

        assert send(near, "n", [to.to(range(4))], Mine()) == [OK]
        to.slot(source, range(4))
        to.check()
        near.finalize()
        far.reset()


@pytest.mark.parametrize("row_bytes", [1, 4095, 65_537, 500_001])
def test_sizes(pair: tuple[End, Peer, bool], row_bytes: int) -> None:
    near, far, accessible = pair
    near.allocate("n", 2, row_bytes, 4, seed=3)
    to = Far(far, accessible, "f", 2, row_bytes, 2, seed=4)
    task = launch(near, "n", [to.to(range(2), row=1)])
    assert task.synchronize() == LLMStatusCode.LLM_SUCCESS
    near.paint("n", 0)  # the source is the caller's again
    to.slot(pattern(3, 4, 2, row_bytes), range(2), row=1)
    to.check()
    (progress,) = task.progress()
    assert tuple(progress) == (2, 2, 4 * row_bytes)
    assert (progress.layers_done, progress.num_layers, progress.bytes_done) == (2, 2, 4 * row_bytes)


def test_forty_layers_and_many_blocks(pair: tuple[End, Peer, bool]) -> None:
    near, far, accessible = pair
    rows = 200
    near.allocate("n", rows, 96, 80, blocks=True, seed=1)
    to = Far(far, accessible, "f", rows, 96, 40, blocks=True, model=3, seed=2)
    order = np.random.default_rng(1)
    src, dst = order.permutation(rows)[:150].tolist(), order.permutation(rows)[:150].tolist()
    steps = Steps()
    assert send(near, "n", [to.to(range(40))], steps, src=src, dst=dst) == [OK]
    to.blocks(pattern(1, 80, rows, 96), range(40), 0, list(zip(src, dst)))
    to.check()
    assert steps.asked == [(layer, None) for layer in range(40)]


def test_a_range_that_is_not_given_is_filled_in(ends: Ends) -> None:
    near, far = ends.pair()
    near.allocate("n", 1, 64, 6, seed=1)
    far.allocate("f", 1, 64, 6, seed=2)
    config = TransferConfig(2, far.addresses("f"))
    assert send(near, "n", [config]) == [OK]
    assert config.src_layer_range == range(3)
    assert equal(far.read("f"), pattern(1, 6, 1, 64))


def test_several_configs_for_one_cluster_have_results_of_their_own(pair: tuple[End, Peer, bool]) -> None:
    near, far, accessible = pair
    near.allocate("n", 3, 80, 8, seed=1)
    source = pattern(1, 8, 3, 80)
    one = Far(far, accessible, "one", 3, 80, 4, seed=2)
    two = Far(far, accessible, "two", 3, 80, 4, seed=3)
    blocked = Far(far, accessible, "blocked", 3, 81, 4, blocks=True, model=9, seed=4)
    short = Far(far, accessible, "short", 1, 79, 4, seed=5)
    same = one.to(range(1, 3), row=2, slot=2)
    bad = short.to(range(4))
    steps = Steps()
    task = launch(near, "n", [one.to(range(4)), bad, two.to(range(2, 4), row=1, slot=2), same, same], steps)
    assert results(task) == [OK, INVALID, OK, OK, OK], "a bad one ends nobody else"
    assert task.synchronize() == LLMStatusCode.LLM_PARAM_INVALID
    one.slot(source, range(4))
    one.slot(source, range(1, 3), row=2, slot=2)
    two.slot(source, range(2, 4), row=1, slot=2)
    for to in (one, two, blocked, short):
        to.check()
    assert steps.layers == [0, 1, 2, 3], "once per layer, whoever needs it"
    errors = task.errors()
    assert [error is None for error in errors] == [True, False, True, True, True]


def test_four_decoders(ends: Ends, way: dict[str, Any]) -> None:
    settings = options(**way)
    far = [ends.peer(settings, cluster=cluster) for cluster in (2, 3, 4, 5)]
    near = ends.near(settings)
    linked(near, *far)
    near.allocate("n", 4, 3000, 8, seed=1)
    source = pattern(1, 8, 4, 3000)
    made = [Far(peer, way["accessible"], "f", 2, 3000, 4, seed=peer.cluster) for peer in far]
    # tensor parallel: every decoder has layers and a slot of its own
    ranges = [range(4), range(1, 4), range(2), range(2, 3)]
    configs = [to.to(src, row=row, slot=1) for row, (to, src) in enumerate(zip(made, ranges))]
    task = launch(near, "n", configs)
    assert results(task) == [OK] * 4
    for row, (to, src) in enumerate(zip(made, ranges)):
        to.slot(source, src, row=row, slot=1)
        to.check()
    assert [progress.layers_done for progress in task.progress()] == [4, 3, 2, 1]


def test_nothing_to_send_is_success_and_asks_nobody(ends: Ends) -> None:
    near, _ = ends.pair()
    near.allocate("n", 1, 64, 2)
    for empty in ([], ()):
        steps = Steps()
        task = launch(near, "n", empty, steps)
        assert task.synchronize() == LLMStatusCode.LLM_SUCCESS
        assert task.get_results() == []
        assert task.done()
        assert steps.asked == []
        assert task.progress() == []
        assert task.errors() == []


def test_a_cluster_without_a_link_fails_alone(pair: tuple[End, Peer, bool]) -> None:
    near, far, accessible = pair
    near.allocate("n", 1, 64, 4, seed=1)
    to = Far(far, accessible, "f", 1, 64, 2, seed=2)
    far.cluster = 7  # nobody
    stranger = to.to(range(2))
    far.cluster = 1  # this very engine
    own = to.to(range(2))
    far.cluster = 2
    task = launch(near, "n", [stranger, to.to(range(2)), own])
    told = results(task)
    assert told == [UNLINKED, OK, INVALID], told
    assert task.synchronize() == LLMStatusCode.LLM_NOT_YET_LINK
    to.slot(pattern(1, 4, 1, 64), range(2))
    to.check()
    assert names(task.errors()[0], cluster=7)
    assert task.errors()[0].status_code == LLMStatusCode.LLM_NOT_YET_LINK


# -- the synchronizer ----------------------------------------------------------------------------------------------


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


# -- the task ------------------------------------------------------------------------------------------------------


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


# -- asyncio -------------------------------------------------------------------------------------------------------


def test_await_one_and_many(pair: tuple[End, Peer, bool]) -> None:
    near, far, accessible = pair
    near.allocate("n", 16, 64, 4, seed=1)
    source = pattern(1, 4, 16, 64)
    to = Far(far, accessible, "f", 20, 64, 2, seed=2)

    async def main() -> Any:
        task = launch(near, "n", [to.to(range(2), row=0, slot=3)])
        first = await task
        assert await task == first, "again, when it is over"
        many = [launch(near, "n", [to.to(range(2), row=row, slot=row + 4)]) for row in range(16)]
        return [first, *await asyncio.gather(*many)]

    assert asyncio.run(main()) == [LLMStatusCode.LLM_SUCCESS] * 17
    to.slot(source, range(2), row=0, slot=3)
    for row in range(16):
        to.slot(source, range(2), row=row, slot=row + 4)
    to.check()


def test_the_loop_runs_while_a_task_is_awaited(ends: Ends) -> None:
    near, far = ends.pair()
    near.allocate("n", 1, 64, 4, seed=1)
    to = Far(far, False, "f", 1, 64, 2, seed=2)
    steps = Steps(allowed=0)

    async def model() -> None:
        for layer in range(2):
            while layer not in steps.layers:  # noqa: ASYNC110
                await asyncio.sleep(0.001)
            steps.allow(layer + 1)

    async def main() -> Any:
        task = launch(near, "n", [to.to(range(2))], steps)
        return await asyncio.wait_for(asyncio.gather(task, task, model()), LIMIT)

    assert asyncio.run(main()) == [LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_SUCCESS, None]


def test_awaiting_a_failure_gives_its_code(ends: Ends) -> None:
    near, far = ends.pair()
    near.allocate("n", 1, 64, 4, seed=1)
    to = Far(far, False, "f", 1, 64, 2, seed=2)

    async def main() -> Any:
        return await launch(near, "n", [to.to(range(2))], Steps(answers={1: False}))

    assert asyncio.run(main()) == LLMStatusCode.LLM_PARAM_INVALID


def test_cancelling_coroutines_and_wait_for_leave_the_transfer_alone(ends: Ends) -> None:
    near, far = ends.pair()
    near.allocate("n", 1, 64, 4, seed=1)
    to = Far(far, False, "f", 1, 64, 2, seed=2)
    steps = Steps(allowed=0)
    task = launch(near, "n", [to.to(range(2))], steps)

    async def wait() -> Any:
        return await task

    async def main() -> Any:
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(wait(), 0.05)
        stays, goes = asyncio.ensure_future(wait()), asyncio.ensure_future(wait())
        await asyncio.sleep(0.01)
        goes.cancel()
        with pytest.raises(asyncio.CancelledError):
            await goes
        assert not task.done()
        assert not stays.done(), "one who stopped waiting took the other with it"
        steps.allow()
        return await asyncio.wait_for(stays, LIMIT)

    assert asyncio.run(main()) == LLMStatusCode.LLM_SUCCESS
    to.slot(pattern(1, 4, 1, 64), range(2))
    to.check()


def test_cancelling_the_task_wakes_who_awaits_it(ends: Ends) -> None:
    near, far = ends.pair()
    near.allocate("n", 1, 64, 4, seed=1)
    to = Far(far, False, "f", 1, 64, 2, seed=2)

    async def main() -> Any:
        steps = Steps(allowed=0)
        task = launch(near, "n", [to.to(range(2))], steps)

        async def wait() -> Any:
            return await task

        waiting = [asyncio.ensure_future(wait()) for _ in range(3)]
        await asyncio.sleep(0.02)
        assert task.cancel()
        told = await asyncio.wait_for(asyncio.gather(*waiting), LIMIT)
        steps.allow()
        return told

    assert asyncio.run(main()) == [LLMStatusCode.LLM_FAILED] * 3


def test_two_loops_in_two_threads(ends: Ends) -> None:
    near, far = ends.pair()
    near.allocate("n", 1, 64, 4, seed=1)
    to = Far(far, False, "f", 1, 64, 2, seed=2)
    steps = Steps(allowed=0)
    task = launch(near, "n", [to.to(range(2))], steps)
    told: list[Any] = []

    async def wait() -> Any:
        return await asyncio.wait_for(asyncio.gather(task, task), LIMIT)

    crew = [threading.Thread(target=lambda: told.append(asyncio.run(wait()))) for _ in range(3)]
    for thread in crew:
        thread.start()
    assert task.synchronize(50) == LLMStatusCode.LLM_TIMEOUT
    steps.allow()
    for thread in crew:
        thread.join(LIMIT)
    assert told == [[LLMStatusCode.LLM_SUCCESS] * 2] * 3


def test_a_loop_that_is_closed_while_a_task_is_awaited(ends: Ends) -> None:
    near, far = ends.pair()
    near.allocate("n", 1, 64, 2, seed=1)
    to = Far(far, False, "f", 1, 64, 1, seed=2)
    steps = Steps(allowed=0)
    task = launch(near, "n", [to.to(range(1))], steps)

    async def abandon() -> None:
        async def wait() -> Any:
            return await task

        asyncio.ensure_future(wait())  # noqa: RUF006
        await asyncio.sleep(0.01)

    before = near.resources()["descriptors"]
    for _ in range(5):
        asyncio.run(abandon())
    assert near.resources()["descriptors"] <= before + 1
    steps.allow()
    assert results(task) == [OK]


# -- what is left behind -------------------------------------------------------------------------------------------


def test_two_hundred_tasks_leave_nothing_behind(ends: Ends) -> None:
    near, far = ends.pair()
    near.allocate("n", 2, 640, 6, seed=1)
    to = Far(far, False, "f", 2, 640, 3, seed=2)

    async def wait(task: Any) -> Any:
        return await task

    def some(count: int) -> None:
        for number in range(count):
            answers = {1: False} if number % 4 == 1 else {1: ValueError("x")} if number % 40 == 2 else {}
            task = launch(near, "n", [to.to(range(3), row=number % 2)], Steps(answers=answers))
            if number % 4 == 3:
                task.cancel()
            if number % 5 == 0:
                asyncio.run(wait(task))
            task.get_results(int(LIMIT * 1000))
            task.progress()
            task.errors()

    some(10)
    used = near.used()
    there = far.used()
    before, far_before = near.resources(), far.resources()
    some(200)
    task = launch(near, "n", [to.to(range(3))])
    assert results(task) == [OK]

    def settled() -> bool:
        pairs = ((near.resources(), before), (far.resources(), far_before))
        grown = [now[what] - then[what] for now, then in pairs for what in ("threads", "descriptors")]
        return max(grown) <= KEPT

    eventually(settled, what="threads and descriptors as before")
    assert near.used() == used
    assert far.used() == there
    assert near.resources()["resident"] < before["resident"] + (16 << 20)
    near.deallocate("n")
    eventually(lambda: near.used() == 0, what="the memory of the source")
    far.deallocate("f")
    eventually(lambda: far.used() == 0, what="the memory of the destination")


def test_a_hundred_random_transfers(pair: tuple[End, Peer, bool]) -> None:
    near, far, accessible = pair
    chance = random.Random(11)  # noqa: S311
    for number in range(100):
        layers, rows, row_bytes = chance.randint(1, 8), chance.randint(1, 6), chance.randint(1, 9000)
        mine, host, registered = (chance.random() < 0.5 for _ in range(3))
        how = {"host": host, "registered": registered, "seed": number}
        layout = chance.choice(["slots", "blocks", "pieces"])
        near.make("n", rows, row_bytes, 2 * layers, blocks=layout == "blocks", registered=mine, seed=5000 + number)
        source = pattern(5000 + number, 2 * layers, rows, row_bytes)
        first = chance.randrange(layers)
        src = range(first, chance.randint(first + 1, layers))
        dst = chance.randint(0, 2)
        there = dst + len(src)
        if layout == "slots":
            to = Far(far, accessible, "f", rows, row_bytes + chance.randint(0, 3), there, **how)
            row, slot = chance.randrange(rows), chance.randrange(rows)
            to.slot(source, src, dst, row=row, slot=slot)
            told = send(near, "n", [to.to(src, dst, row=row, slot=slot)])
        elif layout == "blocks":
            to = Far(far, accessible, "f", rows + 2, row_bytes, there, blocks=True, model=number, **how)
            right = chance.sample(range(rows + 2), chance.randint(1, rows))
            left = [chance.randrange(rows) for _ in right]
            to.blocks(source, src, dst, list(zip(left, right)))
            told = send(near, "n", [to.to(src, dst)], src=left, dst=right)
        else:
            size = chance.randint(max(1, row_bytes // 20), max(1, row_bytes - 1))
            pieces = -(-row_bytes // size)
            to = Far(far, accessible, "f", pieces + 1, size, there, blocks=True, model=number, **how)
            right = chance.sample(range(pieces + 1), chance.randint(1, pieces))
            row = chance.randrange(rows)
            if size >= rows * row_bytes:
                continue
            to.pieces(source, src, dst, row, right)
            told = send(near, "n", [to.to(src, dst, row=row, by_id=True)], dst=right, size=size)
        assert told == [OK], (number, layout)
        to.check((number, layout))
        (near.unregister if mine else near.deallocate)("n")
        (far.unregister if registered else far.deallocate)("f")
