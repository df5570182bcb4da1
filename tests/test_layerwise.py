"""Layer-wise transfers between real processes: what arrives.

Every layout, both modes (destinations by address, by key), both transports; bytes are judged by numpy twins. Not for:
arguments that are refused (`test_layerwise_arguments.py`), what is asked and told (`test_layerwise_tasks.py`), peers
that die, calls at once and the end of processes (`test_layerwise_faults.py`).
"""

from __future__ import annotations

import itertools
import random
from typing import Any

import numpy as np
import pytest

from layers import Far, Steps, launch, names, refused, results, send
from llm_datadist import (
    BlocksCacheKey,
    CacheKeyByIdAndIndex,
    LLMException,
    LLMStatusCode,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from peers import (
    GONE,
    INVALID,
    OK,
    UNLINKED,
    End,
    Ends,
    Peer,
    equal,
    linked,
    options,
    pattern,
)

PLACES = list(itertools.product([False, True], repeat=3))  # source registered, destination on the host, registered


@pytest.fixture
def pair(ends: Ends, way: dict[str, Any]) -> tuple[End, Peer, bool]:
    """Two linked ends, and whether caches are named by key."""
    return (*ends.pair(pool=16 << 20, **way), way["accessible"])


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
