"""Pushes to a peer in another process: what arrives, what stays as it was, and what is refused.

Remote-accessible mode only (python-api.md §7.14, §7.15, `PushKvCache`). Not for: what a push does to keys
(`test_keys_remote.py`), or arguments that are refused before the peer is asked (`test_transfer_arguments.py`).
"""

from __future__ import annotations

import itertools
import random
import threading

import numpy as np
import pytest

from peers import (
    GONE,
    INVALID,
    LIMIT,
    OK,
    UNLINKED,
    End,
    Ends,
    Peer,
    by_blocks,
    by_request,
    by_slot,
    code,
    equal,
    linked,
    options,
    pattern,
)

TRANSPORTS = ["auto", "tcp"]
WAYS = list(itertools.product([False, True], repeat=4))


@pytest.fixture(params=TRANSPORTS)
def pair(ends: Ends, request: pytest.FixtureRequest) -> tuple[End, Peer]:
    """Two linked ends."""
    return ends.pair(accessible=True, llm__LinkTransport=request.param)


def test_slots_between_all_placements_and_origins(pair: tuple[End, Peer]) -> None:
    near, far = pair
    for number, way in enumerate(WAYS):
        near_host, near_registered, far_host, far_registered = way
        cache = far.make(f"f{number}", 4, 130, 4, host=far_host, registered=far_registered, seed=number)
        near.make(f"n{number}", 3, 100, 4, host=near_host, registered=near_registered, seed=1000 + number)
        expected, source = pattern(number, 4, 4, 130), pattern(1000 + number, 4, 3, 100)
        for near_row, far_row in ((2, 3), (0, 0)):
            near.push_cache(by_slot(2, cache, far_row), f"n{number}", near_row)
            for tensor in range(4):
                expected[tensor][far_row, :100] = source[tensor][near_row]
        near.push_cache(by_slot(2, cache, 1), f"n{number}", 1, src_layers=(1, 2), dst_layers=(0, 1))
        for tensor in range(2):
            expected[tensor][1, :100] = source[2 + tensor][1]
        near.push_cache(by_slot(2, cache, 2), f"n{number}", 1, src_layers=(3, 4), dst_layers=(1, 2), n=1)
        expected[1][2, :100] = source[3][1]
        assert equal(far.read(f"f{number}"), expected), way
        assert equal(near.read(f"n{number}"), source), "a push changed its source"


def test_blocks_between_all_placements_and_origins(pair: tuple[End, Peer]) -> None:
    near, far = pair
    chance = random.Random(3)  # noqa: S311
    for number, way in enumerate(WAYS):
        near_host, near_registered, far_host, far_registered = way
        key = [by_blocks(0, number)]
        far.make(f"f{number}", 12, 70, 4, host=far_host, registered=far_registered, blocks=True, keys=key, seed=number)
        near.make(f"n{number}", 9, 70, 4, host=near_host, registered=near_registered, blocks=True, seed=1000 + number)
        expected, source = pattern(number, 4, 12, 70), pattern(1000 + number, 4, 9, 70)
        for layers in (None, (0, 1), (1, 2)):
            dst = chance.sample(range(12), 6)
            src = [chance.randrange(9) for _ in dst]
            kwargs = {} if layers is None else {"src_layers": layers, "dst_layers": (0, 1)}
            near.push_blocks(by_blocks(2, number), f"n{number}", src, dst, **kwargs)
            first = 0 if layers is None else layers[0] * 2
            for tensor, (left, right) in itertools.product(range(4 if layers is None else 2), zip(src, dst)):
                expected[tensor][right] = source[first + tensor][left]
        assert equal(far.read(f"f{number}"), expected), way


def test_what_was_pushed_is_the_peers_own(pair: tuple[End, Peer]) -> None:
    near, far = pair
    for registered in (False, True):
        cache = far.make(f"f{registered}", 1, 5000, 2, registered=registered)
        near.make(f"n{registered}", 1, 5000, 2, registered=registered, seed=1)
        near.push_cache(by_slot(2, cache), f"n{registered}")
        near.paint(f"n{registered}", 0)  # the source may be used again at once
        assert equal(far.read(f"f{registered}"), pattern(1, 2, 1, 5000)), "visible when the push returns"
        far.fill(f"f{registered}", 2)
        far.rest(0.1)
        assert equal(far.read(f"f{registered}"), pattern(2, 2, 1, 5000)), "something wrote after the push had ended"


def test_pushes_in_turn_with_the_peer_overwriting(pair: tuple[End, Peer]) -> None:
    near, far = pair
    far.allocate("f", 8, 3000, 2, blocks=True, keys=[by_blocks(2)])
    near.allocate("n", 8, 3000, 2, blocks=True)
    for number in range(10):
        near.fill("n", number)
        near.push_blocks(by_blocks(2), "n", range(8), range(8))
        assert equal(far.read("f"), pattern(number, 2, 8, 3000))
        far.fill("f", 500 + number)
    far.rest(0.1)
    assert equal(far.read("f"), pattern(509, 2, 8, 3000))


def test_one_tensor_and_the_default_of_two_a_layer_is_no_layer(pair: tuple[End, Peer]) -> None:
    near, far = pair
    cache = far.allocate("f", 1, 64, 1, seed=1)
    near.allocate("n", 1, 64, 1, seed=2)
    assert code(near.push_cache, by_slot(2, cache), "n") == OK
    assert equal(far.read("f"), pattern(1, 1, 1, 64)), "no layer, but bytes"
    near.push_cache(by_slot(2, cache), "n", n=1)
    assert equal(far.read("f"), pattern(2, 1, 1, 64))


def test_tensors_of_a_layer_must_divide_the_tensors(pair: tuple[End, Peer]) -> None:
    near, far = pair
    cache = far.allocate("f", 1, 64, 10, seed=1)
    near.allocate("n", 1, 64, 10, seed=2)
    assert code(near.push_cache, by_slot(2, cache), "n", src_layers=(0, 3), dst_layers=(0, 3), n=3) == INVALID
    assert equal(far.read("f"), pattern(1, 10, 1, 64))
    near.push_cache(by_slot(2, cache), "n", src_layers=(0, 2), dst_layers=(0, 2), n=5)
    assert equal(far.read("f"), pattern(2, 10, 1, 64))


def test_what_is_refused_moves_nothing(pair: tuple[End, Peer]) -> None:
    near, far = pair
    cache = far.allocate("f", 2, 64, 4, seed=1)
    narrow = far.allocate("narrow", 2, 63, 4, seed=1)
    blocks = far.allocate("fb", 4, 64, 4, blocks=True, keys=[by_blocks(2)], seed=1)
    far.allocate("other", 4, 65, 4, blocks=True, keys=[by_blocks(2, 1)], seed=1)
    closed = far.register("closed", 2, 64, 4, accessible=False, seed=1)
    far.register("closed blocks", 4, 64, 4, blocks=True, keys=[by_blocks(2, 2)], accessible=False, seed=1)
    gone = far.allocate("gone", 2, 64, 4)
    far.deallocate("gone")
    near.allocate("n", 2, 64, 4, seed=2)
    near.allocate("b", 4, 64, 4, blocks=True, seed=2)
    near.register("private", 2, 64, 4, accessible=False)
    near.allocate("freed", 2, 64, 4)
    near.deallocate("freed")
    whole = {"src_layers": (0, 2), "dst_layers": (0, 2)}
    for expected, call, args, kwargs in (
        (GONE, near.push_cache, (by_slot(2, gone), "n"), {}),
        (GONE, near.push_cache, (by_slot(2, 10**9), "n"), {}),
        (GONE, near.push_cache, (by_slot(2, cache), "freed"), {}),
        (GONE, near.push_blocks, (by_blocks(2, 77), "b", [0], [0]), {}),
        (UNLINKED, near.push_cache, (by_slot(3, cache), "n"), {}),
        (UNLINKED, near.push_blocks, (by_blocks(3), "b", [0], [0]), {}),
        (INVALID, near.push_cache, (by_slot(1, cache), "n"), {}),
        (INVALID, near.push_cache, (by_slot(2, closed), "n"), {}),
        (INVALID, near.push_cache, (by_slot(2, cache), "private"), {}),
        (INVALID, near.push_cache, (by_slot(2, narrow), "n"), {}),
        (INVALID, near.push_cache, (by_slot(2, cache, 2), "n"), {}),
        (INVALID, near.push_cache, (by_slot(2, cache), "n", 2), {}),
        (INVALID, near.push_cache, (by_slot(2, blocks), "n"), {}),
        (INVALID, near.push_cache, (by_slot(2, cache), "b"), {}),
        (INVALID, near.push_cache, (by_slot(2, cache), "n"), {"src_layers": (1, 3), "dst_layers": (0, 2)}),
        (INVALID, near.push_cache, (by_slot(2, cache), "n"), {"src_layers": (0, 2), "dst_layers": (1, 3)}),
        (INVALID, near.push_cache, (by_slot(2, cache), "n"), {"src_layers": (0, 1), "dst_layers": (0, 2)}),
        (INVALID, near.push_blocks, (by_blocks(2, 1), "b", [0], [0]), {}),
        (INVALID, near.push_blocks, (by_blocks(2, 2), "b", [0], [0]), {}),
        (INVALID, near.push_blocks, (by_blocks(2), "b", [0, 1], [0]), {}),
        (INVALID, near.push_blocks, (by_blocks(2), "b", [], [0]), {}),
        (INVALID, near.push_blocks, (by_blocks(2), "b", [0, 4], [0, 1]), {}),
        (INVALID, near.push_blocks, (by_blocks(2), "b", [0, 1], [0, 4]), {}),
        (INVALID, near.push_blocks, (by_blocks(2), "b", [0, 1], [0, 2**40]), whole),
        (INVALID, near.push_blocks, (by_blocks(2), "b", [0], [0]), {"src_layers": (0, 1), "dst_layers": (2, 3)}),
        (INVALID, near.push_blocks, (by_blocks(2), "n", [0], [0]), {}),
    ):
        assert code(call, *args, **kwargs) == expected, (args, kwargs)
    for name, row in (("f", 64), ("narrow", 63), ("closed", 64)):
        assert equal(far.read(name), pattern(1, 4, 2, row)), name
    for name, row in (("fb", 64), ("other", 65), ("closed blocks", 64)):
        assert equal(far.read(name), pattern(1, 4, 4, row)), name


def test_an_id_of_0_or_less_is_the_key_of_request_0(pair: tuple[End, Peer]) -> None:
    near, far = pair
    near.allocate("n", 2, 64, 2, seed=2)
    assert code(near.push_cache, by_slot(2, 0, 0), "n") == GONE
    far.allocate("f", 2, 64, 2, keys=[by_request(2, 0)], seed=1)
    near.push_cache(by_slot(2, 0, 0), "n", 1)
    expected, source = pattern(1, 2, 2, 64), pattern(2, 2, 2, 64)
    for tensor in range(2):
        expected[tensor][0] = source[tensor][1]
    assert equal(far.read("f"), expected)


def test_caches_that_come_and_go(pair: tuple[End, Peer]) -> None:
    near, far = pair
    near.allocate("n", 1, 4096, 2, seed=7)
    old: list[int] = []
    for number in range(6):
        old.append(far.make("f", 1, 4096, 2, registered=bool(number % 2), seed=number))
        near.push_cache(by_slot(2, old[-1]), "n")
        assert equal(far.read("f"), pattern(7, 2, 1, 4096))
        far.fill("f", number)
        for cache in old[:-1]:
            assert code(near.push_cache, by_slot(2, cache), "n") == GONE
        assert equal(far.read("f"), pattern(number, 2, 1, 4096)), "a push to a freed cache reached its successor"
        (far.unregister if number % 2 else far.deallocate)("f")


def test_both_sides_push_and_pull_at_once(pair: tuple[End, Peer]) -> None:
    near, far = pair
    far.allocate("f", 16, 2000, 2, blocks=True, keys=[by_blocks(2)])
    near.allocate("n", 16, 2000, 2, blocks=True, keys=[by_blocks(1)], seed=3)
    far.allocate("g", 16, 2000, 2, blocks=True, seed=4)
    there = far.begin("at_once", [["push_blocks", [by_blocks(1), "g", list(range(8)), list(range(8, 16))], {}]] * 4, 20)
    here = near.at_once([["push_blocks", [by_blocks(2), "n", list(range(8)), list(range(8))], {}]] * 4, 20)
    assert here == there.result() == [OK] * 4
    assert equal([tensor[:8] for tensor in far.read("f")], [tensor[:8] for tensor in pattern(3, 2, 16, 2000)])
    assert equal([tensor[8:] for tensor in near.read("n")], [tensor[:8] for tensor in pattern(4, 2, 16, 2000)])


def test_a_pull_beside_a_push_into_the_same_slot_is_whole(ends: Ends) -> None:
    near, far = ends.pair(accessible=True, pool=8 << 20)
    rows, row_bytes, tensors = 2, 64 << 10, 8
    for name, seed in (("old", 1), ("new", 3), ("in", 4)):
        near.allocate(name, rows, row_bytes, tensors, seed=seed)
    slot = by_slot(2, far.allocate("f", rows, row_bytes, tensors, seed=2))
    versions = [pattern(seed, tensors, rows, row_bytes) for seed in (1, 2, 3)]
    over = threading.Event()

    def push() -> None:
        for number in range(300):
            near.push_cache(slot, ("old", "new")[number % 2])
        over.set()

    thread = threading.Thread(target=push)
    thread.start()
    mixtures = 0
    while not over.is_set():
        near.pull_cache(slot, "in", 1)
        for number, tensor in enumerate(near.read("in")):
            mixtures += not any((tensor[1] == version[number][0]).all() for version in versions)
    thread.join(LIMIT)
    assert mixtures == 0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_sixty_thousand_blocks_and_a_small_call_after(ends: Ends, transport: str) -> None:
    near, far = ends.pair(accessible=True, pool=4 << 20, llm__LinkTransport=transport, llm__SyncKvCacheWaitTime=9999)
    count, size = 60_000, 24
    far.allocate("f", count, size, 1, blocks=True, keys=[by_blocks(2)])
    near.allocate("n", count, size, 1, blocks=True, seed=1)
    order = np.random.default_rng(5)
    src, dst = order.permutation(count), order.permutation(count)
    near.push_blocks(by_blocks(2), "n", src.tolist(), dst.tolist(), n=1)
    expected = np.zeros((count, size), dtype=np.uint8)
    expected[dst] = pattern(1, 1, count, size)[0][src]
    assert np.array_equal(far.read("f")[0], expected)
    near.push_blocks(by_blocks(2), "n", [7], [11], n=1)
    expected[11] = pattern(1, 1, count, size)[0][7]
    assert np.array_equal(far.read("f")[0], expected)


def test_a_block_named_twice_as_a_destination_gets_the_last(pair: tuple[End, Peer]) -> None:
    near, far = pair
    far.allocate("f", 6, 64, 2, blocks=True, keys=[by_blocks(2)], seed=1)
    near.allocate("n", 40, 64, 2, blocks=True, seed=2)
    expected, source = pattern(1, 2, 6, 64), pattern(2, 2, 40, 64)
    src, dst = list(range(40)), [number % 6 for number in range(40)]
    near.push_blocks(by_blocks(2), "n", src, dst)
    for tensor, (left, right) in itertools.product(range(2), zip(src, dst)):
        expected[tensor][right] = source[tensor][left]
    assert equal(far.read("f"), expected)


def test_twelve_threads_push_to_two_peers(ends: Ends) -> None:
    settings = options(accessible=True, llm__SyncKvCacheWaitTime=9999)
    far = [ends.peer(settings, cluster=2), ends.peer(settings, cluster=3)]
    near = ends.near(settings)
    linked(near, *far)
    for peer in far:
        peer.allocate("f", 60, 500, 2, blocks=True, keys=[by_blocks(0)])
    for number in range(12):
        near.allocate(f"n{number}", 10, 500, 2, blocks=True, seed=number)
    failed: list[str] = []

    def work(number: int) -> None:
        for _ in range(10):
            first = number // 2 * 10
            told = code(near.push_blocks, by_blocks(2 + number % 2), f"n{number}", range(10), range(first, first + 10))
            if told != OK:
                failed.append(told)

    crew = [threading.Thread(target=work, args=(number,)) for number in range(12)]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join(LIMIT)
    assert failed == []
    for number, peer in enumerate(far):
        expected = [np.concatenate(rows) for rows in zip(*(pattern(each, 2, 10, 500) for each in range(number, 12, 2)))]
        assert equal(peer.read("f"), expected)
