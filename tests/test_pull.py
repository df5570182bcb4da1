"""Pulls from a peer in another process: every layout, placement, origin, mode and transport, against numpy.

What must arrive is computed from the rules of python-api.md §7.12, §7.13 and the rulings of §17; what must not change
is looked at as well. Not for: what a pull does to keys (`test_keys_remote.py`), or arguments that are refused before
the peer is asked (`test_transfer_arguments.py`).
"""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from peers import (
    GONE,
    INVALID,
    OK,
    THOROUGH,
    UINT64_MAX,
    UNLINKED,
    End,
    Ends,
    Peer,
    by_blocks,
    by_request,
    by_slot,
    code,
    equal,
    outcome,
    pattern,
)

if TYPE_CHECKING:
    from collections.abc import Sequence


TRANSPORTS = ["auto", "tcp"]
MODES = [False, True]
WAYS = list(itertools.product([False, True], repeat=4))


@pytest.fixture(params=MODES, ids=["served", "one-sided"])
def accessible(request: pytest.FixtureRequest) -> bool:
    """The mode of both ends."""
    return bool(request.param)


@pytest.fixture(params=TRANSPORTS)
def pair(ends: Ends, accessible: bool, request: pytest.FixtureRequest) -> tuple[End, Peer]:
    """Two linked ends, in every mode, over every transport."""
    return ends.pair(accessible=accessible, llm__LinkTransport=request.param)


class Twin:
    """What a near cache must hold: its bytes before, and what naive pulls write over them."""

    def __init__(self, near: End, name: str, far: Sequence[np.ndarray]) -> None:
        self.near, self.name, self.far = near, name, far
        self.expected = near.read(name)

    def slot(
        self,
        far_row: int,
        near_row: int,
        size: int = -1,
        tensors: Sequence[tuple[int, int]] | None = None,
    ) -> None:
        """A slot of the peer to a slot here; `tensors`: which of the peer's goes to which here."""
        for source, target in tensors or [(number, number) for number in range(len(self.expected))]:
            length = self.expected[target].shape[1] if size == -1 else size
            self.expected[target][near_row, :length] = self.far[source][far_row, :length]

    def blocks(self, src: Sequence[int], dst: Sequence[int], tensors: Sequence[tuple[int, int]] | None = None) -> None:
        """Blocks of the peer to blocks here, one by one."""
        for source, target in tensors or [(number, number) for number in range(len(self.expected))]:
            for left, right in zip(src, dst):
                self.expected[target][right] = self.far[source][left]

    def pieces(self, far_row: int, dst: Sequence[int], tensors: Sequence[tuple[int, int]] | None = None) -> None:
        """A slot of the peer, cut into blocks here; the last may be short."""
        for source, target in tensors or [(number, number) for number in range(len(self.expected))]:
            block = self.expected[target].shape[1]
            for number, right in enumerate(dst):
                piece = self.far[source][far_row, number * block : (number + 1) * block]
                assert piece.size, "a block the slot does not need"
                self.expected[target][right, : piece.size] = piece

    def check(self) -> None:
        """Compare every byte."""
        for number, (got, wanted) in enumerate(zip(self.near.read(self.name), self.expected)):
            assert np.array_equal(got, wanted), f"tensor {number} of {self.name}: {_differences(got, wanted)}"


def _differences(got: np.ndarray, wanted: np.ndarray) -> str:
    where = np.argwhere(got != wanted)
    return f"{len(where)} bytes differ, the first at row {where[0][0]}, byte {where[0][1]}"


def _way(way: Sequence[bool]) -> str:
    words = zip(way, ("near host", "near registered", "far host", "far registered"))
    return ", ".join(word for chosen, word in words if chosen)


# -- bytes -----------------------------------------------------------------------------------------------------------


def test_slots_between_all_placements_and_origins(pair: tuple[End, Peer]) -> None:
    near, far = pair
    for number, way in enumerate(WAYS):
        near_host, near_registered, far_host, far_registered = way
        cache = far.make(f"f{number}", 5, 300, 3, host=far_host, registered=far_registered, seed=number)
        near.make(f"n{number}", 2, 257, 3, host=near_host, registered=near_registered, seed=1000 + number)
        twin = Twin(near, f"n{number}", pattern(number, 3, 5, 300))
        for far_row, near_row, size in ((4, 1, -1), (0, 0, 1), (2, 0, 257), (3, 1, 100)):
            near.pull_cache(by_slot(2, cache, far_row), f"n{number}", near_row, size)
            twin.slot(far_row, near_row, size)
        try:
            twin.check()
        except AssertionError as failure:
            raise AssertionError(_way(way)) from failure
        assert equal(far.read(f"f{number}"), twin.far), "a pull changed its source"


def test_blocks_between_all_placements_and_origins(pair: tuple[End, Peer]) -> None:
    near, far = pair
    chance = random.Random(1)  # noqa: S311
    for number, way in enumerate(WAYS):
        near_host, near_registered, far_host, far_registered = way
        far.make(
            f"f{number}",
            *(12, 100, 2),
            host=far_host,
            registered=far_registered,
            blocks=True,
            keys=[by_blocks(0, number)],
            seed=number,
        )
        near.make(f"n{number}", 9, 100, 2, host=near_host, registered=near_registered, blocks=True, seed=1000 + number)
        twin = Twin(near, f"n{number}", pattern(number, 2, 12, 100))
        for _ in range(3):
            dst = chance.sample(range(9), chance.randint(1, 9))
            src = [chance.randrange(12) for _ in dst]
            near.pull_blocks(by_blocks(2, number), f"n{number}", src, dst)
            twin.blocks(src, dst)
        near.pull_blocks(by_blocks(2, number), f"n{number}", range(8), range(8))
        twin.blocks(range(8), range(8))
        try:
            twin.check()
        except AssertionError as failure:
            raise AssertionError(_way(way)) from failure


def test_slots_to_blocks_between_all_placements_and_origins(pair: tuple[End, Peer]) -> None:
    near, far = pair
    for number, way in enumerate(WAYS):
        near_host, near_registered, far_host, far_registered = way
        cache = far.make(f"f{number}", 3, 250, 2, host=far_host, registered=far_registered, seed=number)
        near.make(f"n{number}", 6, 100, 2, host=near_host, registered=near_registered, blocks=True, seed=1000 + number)
        twin = Twin(near, f"n{number}", pattern(number, 2, 3, 250))
        for far_row, dst in ((2, [5, 0, 3]), (1, [4]), (0, [1, 2]), (2, [2, 3, 4])):
            near.pull_blocks(by_slot(2, cache, far_row), f"n{number}", dst=dst)
            twin.pieces(far_row, dst)
        try:
            twin.check()
        except AssertionError as failure:
            raise AssertionError(_way(way)) from failure
        for dst in ([0, 1, 2, 3], [0, 1, 2, 3, 4]):
            assert code(near.pull_blocks, by_slot(2, cache, 2), f"n{number}", dst=dst) == INVALID
        twin.check()


def test_layer_ranges(pair: tuple[End, Peer]) -> None:
    near, far = pair
    cache = far.allocate("f", 2, 64, 6, seed=1)
    near.allocate("n", 2, 64, 6, seed=2)
    twin = Twin(near, "n", pattern(1, 6, 2, 64))
    for n in (1, 2, 3, 6):
        layers = 6 // n
        for src, dst in itertools.product(itertools.combinations(range(layers + 1), 2), repeat=2):
            call = (by_slot(2, cache, 1), "n", 0)
            told = code(near.pull_cache, *call, src_layers=src, dst_layers=dst, n=n)
            if src[1] - src[0] != dst[1] - dst[0]:
                assert told == INVALID, (n, src, dst)
                continue
            assert told == OK, (n, src, dst)
            twin.slot(1, 0, tensors=list(zip(range(src[0] * n, src[1] * n), range(dst[0] * n, dst[1] * n))))
            twin.check()


def test_one_layer_range_alone(pair: tuple[End, Peer]) -> None:
    near, far = pair
    big, small = far.allocate("big", 2, 64, 6, seed=1), far.allocate("small", 2, 64, 2, seed=3)
    near.allocate("n", 2, 64, 6, seed=2)
    near.allocate("few", 2, 64, 2, seed=4)
    few = Twin(near, "few", pattern(1, 6, 2, 64))
    near.pull_cache(by_slot(2, big, 1), "few", src_layers=(1, 2))
    few.slot(1, 0, tensors=[(2, 0), (3, 1)])
    few.check()
    assert code(near.pull_cache, by_slot(2, big, 1), "n", src_layers=(1, 2)) == INVALID
    many = Twin(near, "n", pattern(3, 2, 2, 64))
    near.pull_cache(by_slot(2, small, 1), "n", dst_layers=(2, 3))
    many.slot(1, 0, tensors=[(0, 4), (1, 5)])
    many.check()
    assert code(near.pull_cache, by_slot(2, big, 1), "n", dst_layers=(2, 3)) == INVALID
    assert code(near.pull_cache, by_slot(2, small, 1), "n") == INVALID, "other numbers of tensors"
    assert code(near.pull_cache, by_slot(2, big, 1), "few") == INVALID
    many.check()
    few.check()


def test_layer_ranges_of_blocks(pair: tuple[End, Peer]) -> None:
    near, far = pair
    far.allocate("f", 4, 64, 4, blocks=True, keys=[by_blocks(2)], seed=1)
    slots = far.allocate("s", 2, 150, 4, seed=5)
    near.allocate("n", 4, 64, 4, blocks=True, seed=2)
    twin = Twin(near, "n", pattern(1, 4, 4, 64))
    near.pull_blocks(by_blocks(2), "n", [3, 0], [1, 2], src_layers=(0, 1), dst_layers=(1, 2))
    twin.blocks([3, 0], [1, 2], [(0, 2), (1, 3)])
    twin.check()
    near.pull_blocks(by_blocks(2), "n", [2], [0], src_layers=(3, 4), dst_layers=(0, 1), n=1)
    twin.blocks([2], [0], [(3, 0)])
    twin.check()
    twin.far = pattern(5, 4, 2, 150)
    near.pull_blocks(by_slot(2, slots, 1), "n", dst=[3, 1, 0], src_layers=(1, 2), dst_layers=(0, 1))
    twin.pieces(1, [3, 1, 0], [(2, 0), (3, 1)])
    twin.check()


def test_one_tensor_and_the_default_of_two_a_layer(pair: tuple[End, Peer]) -> None:
    near, far = pair
    cache = far.allocate("f", 2, 64, 1, seed=1)
    near.allocate("n", 2, 64, 1)
    assert code(near.pull_cache, by_slot(2, cache), "n", src_layers=(0, 1), dst_layers=(0, 1)) == INVALID
    assert code(near.pull_cache, by_slot(2, cache), "n") == OK
    assert code(near.pull_cache, by_slot(2, cache), "n", src_layers=(0, 1), dst_layers=(0, 1), n=1) == OK
    assert code(near.pull_cache, by_slot(2, cache), "n", n=3) == OK, "without ranges it means nothing"


def test_a_source_row_may_go_to_several_blocks(pair: tuple[End, Peer]) -> None:
    near, far = pair
    far.allocate("f", 4, 64, 2, blocks=True, keys=[by_blocks(2)], seed=1)
    near.allocate("n", 6, 64, 2, blocks=True, seed=2)
    twin = Twin(near, "n", pattern(1, 2, 4, 64))
    near.pull_blocks(by_blocks(2), "n", [1, 1, 1, 0, 1], [5, 3, 4, 0, 1])
    twin.blocks([1, 1, 1, 0, 1], [5, 3, 4, 0, 1])
    twin.check()


def test_a_block_named_twice_as_a_destination_gets_the_last(pair: tuple[End, Peer]) -> None:
    near, far = pair
    far.allocate("f", 40, 64, 2, blocks=True, keys=[by_blocks(2)], seed=1)
    near.allocate("n", 6, 64, 2, blocks=True, seed=2)
    twin = Twin(near, "n", pattern(1, 2, 40, 64))
    src, dst = list(range(40)), [number % 6 for number in range(40)]
    near.pull_blocks(by_blocks(2), "n", src, dst)
    twin.blocks(src, dst)
    twin.check()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_sixty_thousand_blocks_and_a_small_call_after(ends: Ends, accessible: bool, transport: str) -> None:
    near, far = ends.pair(
        accessible=accessible, pool=4 << 20, llm__LinkTransport=transport, llm__SyncKvCacheWaitTime=9999
    )
    count, size = 60_000, 24
    far.allocate("f", count, size, 1, blocks=True, keys=[by_blocks(2)])
    far.fill("f", 1)
    near.allocate("n", count, size, 1, blocks=True)
    order = np.random.default_rng(5)
    src, dst = order.permutation(count), order.permutation(count)
    near.pull_blocks(by_blocks(2), "n", src.tolist(), dst.tolist())
    expected = np.zeros((count, size), dtype=np.uint8)
    expected[dst] = pattern(1, 1, count, size)[0][src]
    assert np.array_equal(near.read("n")[0], expected)
    near.pull_blocks(by_blocks(2), "n", [7], [11])
    expected[11] = pattern(1, 1, count, size)[0][7]
    assert np.array_equal(near.read("n")[0], expected)
    src_2, dst_2 = src[:-1], dst[1:]
    near.pull_blocks(by_blocks(2), "n", src_2[::2].tolist(), dst_2[::2].tolist())
    expected[dst_2[::2]] = pattern(1, 1, count, size)[0][src_2[::2]]
    assert np.array_equal(near.read("n")[0], expected)


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_large_tensors(ends: Ends, accessible: bool, transport: str) -> None:
    size = 24 << 20
    near, far = ends.pair(
        accessible=accessible, pool=64 << 20, llm__LinkTransport=transport, llm__SyncKvCacheWaitTime=9999
    )
    cache = far.allocate("f", 1, size, 2, seed=1)
    near.allocate("n", 1, size, 2)
    near.pull_cache(by_slot(2, cache), "n")
    assert equal(near.read("n"), pattern(1, 2, 1, size))
    near.paint("n", 0)
    near.register("r", 1, size, 2, accessible=True)
    near.pull_cache(by_slot(2, cache), "r")
    assert equal(near.read("r"), pattern(1, 2, 1, size))


def test_random_geometries(pair: tuple[End, Peer]) -> None:
    near, far = pair
    chance = random.Random(7)  # noqa: S311
    for number in range(300 if THOROUGH else 40):
        n, layers = chance.choice([1, 2, 3]), chance.randint(1, 4)
        tensors, rows, row = n * layers, chance.randint(1, 9), chance.randint(1, 400)
        way = [chance.random() < 0.5 for _ in range(4)]
        near_row = chance.randint(1, row)
        blocks = chance.random() < 0.5
        cache = far.make(f"f{number}", rows, row, tensors, host=way[0], registered=way[1], seed=number)
        need = -(-row // near_row)
        near_rows = need + chance.randint(0, 3) if blocks else chance.randint(1, 5)
        near.make("n", near_rows, near_row, tensors, host=way[2], registered=way[3], blocks=blocks, seed=number + 1)
        twin = Twin(near, "n", pattern(number, tensors, rows, row))
        far_row, which = chance.randrange(rows), None
        kwargs: dict[str, Any] = {}
        if chance.random() < 0.5:
            span = chance.randint(1, layers)
            src, dst = chance.randint(0, layers - span), chance.randint(0, layers - span)
            kwargs = {"src_layers": (src, src + span), "dst_layers": (dst, dst + span), "n": n}
            which = [(src * n + each, dst * n + each) for each in range(span * n)]
        if blocks:
            dst_blocks = chance.sample(range(near_rows), chance.randint(1, need))
            near.pull_blocks(by_slot(2, cache, far_row), "n", dst=dst_blocks, **kwargs)
            twin.pieces(far_row, dst_blocks, which)
        else:
            target, size = chance.randrange(near_rows), chance.choice([-1, chance.randint(1, near_row)])
            near.pull_cache(by_slot(2, cache, far_row), "n", target, size, **kwargs)
            twin.slot(far_row, target, size, which)
        twin.check()
        (near.unregister if way[3] else near.deallocate)("n")
        (far.unregister if way[1] else far.deallocate)(f"f{number}")


# -- what there is to pull -------------------------------------------------------------------------------------------


def test_unknown_things_do_not_exist(pair: tuple[End, Peer], accessible: bool) -> None:
    near, far = pair
    cache = far.allocate("f", 3, 64, 2, keys=[by_request(0, 1)])
    near.allocate("n", 1, 64, 2)
    near.allocate("b", 4, 64, 2, blocks=True)
    assert code(near.pull_cache, by_slot(2, cache + 1), "n") == GONE
    assert code(near.pull_cache, by_slot(2, cache, 3), "n") == GONE
    assert code(near.pull_cache, by_slot(2, cache, 2**32 - 1), "n") == GONE
    assert code(near.pull_cache, by_slot(2, 2**62), "n") == GONE
    assert code(near.pull_cache, by_slot(2, -5), "n") == GONE
    assert code(near.pull_blocks, by_blocks(2, 9), "b", [0], [0]) == GONE
    assert code(near.pull_blocks, by_request(2, 9), "b", dst=[0]) == GONE
    assert code(near.pull_blocks, by_request(2, 1, 9), "b", dst=[0]) == GONE
    assert code(near.pull_blocks, by_request(2, UINT64_MAX, 0, 1), "b", dst=[0]) == GONE
    if not accessible:
        assert code(near.pull_cache, by_request(2, 9), "n") == GONE
        assert code(near.pull_cache, by_request(2, UINT64_MAX, 0, 1), "n") == GONE
    assert code(near.pull_cache, by_slot(2, cache, 2), "n") == OK


def test_a_near_cache_that_is_gone_does_not_exist(pair: tuple[End, Peer]) -> None:
    near, far = pair
    cache = far.allocate("f", 1, 64, 2)
    near.allocate("n", 1, 64, 2)
    near.deallocate("n")
    assert code(near.pull_cache, by_slot(2, cache), "n") == GONE


def test_an_unlinked_cluster_is_not_linked(pair: tuple[End, Peer]) -> None:
    near, _ = pair
    near.allocate("n", 1, 64, 2)
    assert code(near.pull_cache, by_slot(3, 1), "n") == UNLINKED
    told, text = outcome(lambda: near.pull_cache(by_slot(3, 1), "n"))
    assert (told, "3" in text) == (UNLINKED, True)


def test_sizes_beyond_either_slot(pair: tuple[End, Peer]) -> None:
    near, far = pair
    narrow, wide = far.allocate("narrow", 2, 60, 2, seed=1), far.allocate("wide", 2, 100, 2, seed=2)
    near.allocate("n", 2, 80, 2, seed=3)
    twin = Twin(near, "n", pattern(1, 2, 2, 60))
    assert code(near.pull_cache, by_slot(2, narrow), "n") == INVALID, "-1 is the size of the near slot"
    assert code(near.pull_cache, by_slot(2, narrow), "n", 0, 61) == INVALID
    assert code(near.pull_cache, by_slot(2, wide), "n", 0, 81) == INVALID
    assert code(near.pull_cache, by_slot(2, wide), "n", 0, 2**62) == INVALID
    twin.check()
    near.pull_cache(by_slot(2, narrow, 1), "n", 1, 60)
    twin.slot(1, 1, 60)
    twin.check()


def test_kinds_must_fit(pair: tuple[End, Peer]) -> None:
    near, far = pair
    blocks = far.allocate("fb", 4, 64, 2, blocks=True, keys=[by_blocks(2)])
    slots = far.allocate("fs", 4, 64, 2)
    near.allocate("ns", 4, 64, 2)
    near.allocate("nb", 4, 64, 2, blocks=True)
    assert code(near.pull_cache, by_slot(2, blocks), "ns") == INVALID, "blocks to a slot"
    assert code(near.pull_cache, by_slot(2, slots), "nb") == INVALID
    assert code(near.pull_blocks, by_blocks(2), "ns", [0], [0]) == INVALID


def test_a_blocks_cache_by_id(pair: tuple[End, Peer], accessible: bool) -> None:
    near, far = pair
    blocks = far.allocate("fb", 4, 64, 2, blocks=True, keys=[by_blocks(2)])
    near.allocate("nb", 4, 64, 2, blocks=True)
    if not accessible:
        assert code(near.pull_blocks, by_slot(2, blocks), "nb", dst=[0]) == INVALID


def test_blocks_out_of_range(pair: tuple[End, Peer]) -> None:
    near, far = pair
    far.allocate("f", 4, 64, 2, blocks=True, keys=[by_blocks(2)], seed=1)
    far.allocate("other", 4, 65, 2, blocks=True, keys=[by_blocks(2, 1)])
    far.allocate("more", 4, 64, 4, blocks=True, keys=[by_blocks(2, 2)])
    near.allocate("n", 6, 64, 2, blocks=True, seed=2)
    twin = Twin(near, "n", pattern(1, 2, 4, 64))
    for src, dst in (([4], [0]), ([0], [6]), ([0, 4], [0, 1]), ([3, 2**40], [0, 1]), ([0, 1], [0]), ([0], [1, 2])):
        assert code(near.pull_blocks, by_blocks(2), "n", src, dst) == INVALID, (src, dst)
    for src, dst in (([-1], [0]), ([0], [-1])):
        assert code(near.pull_blocks, by_blocks(2), "n", src, dst) in {INVALID, "ValueError"}, (src, dst)
    assert code(near.pull_blocks, by_blocks(2, 1), "n", [0], [0]) == INVALID, "other block sizes"
    assert code(near.pull_blocks, by_blocks(2, 2), "n", [0], [0]) == INVALID, "other numbers of tensors"
    twin.check()
    near.pull_blocks(by_blocks(2), "n", [3], [5])
    twin.blocks([3], [5])
    twin.check()


def test_layers_out_of_range(pair: tuple[End, Peer]) -> None:
    near, far = pair
    cache = far.allocate("f", 1, 64, 4, seed=1)
    near.allocate("n", 1, 64, 4, seed=2)
    twin = Twin(near, "n", [])
    for kwargs in (
        {"src_layers": (1, 3), "dst_layers": (0, 2)},
        {"src_layers": (0, 2), "dst_layers": (1, 3)},
        {"src_layers": (0, 1), "dst_layers": (0, 1), "n": 3},
        {"src_layers": (0, 1), "dst_layers": (0, 1), "n": 2**32 - 1},
        {"src_layers": (2**31, 2**31 + 1), "dst_layers": (0, 1)},
        {"src_layers": (0, 2**31), "dst_layers": (0, 2**31)},
    ):
        assert code(near.pull_cache, by_slot(2, cache), "n", **kwargs) == INVALID, kwargs
    twin.check()


def test_memory_that_is_not_remote_accessible_cannot_be_pulled(pair: tuple[End, Peer], accessible: bool) -> None:
    near, far = pair
    closed = far.register("closed", 1, 64, 2, accessible=False)
    default_host = far.register("host", 1, 64, 2, host=True)
    default_device = far.register("device", 1, 64, 2)
    near.allocate("n", 1, 64, 2)
    assert code(near.pull_cache, by_slot(2, closed), "n") == INVALID
    assert code(near.pull_cache, by_slot(2, default_host), "n") == (INVALID if accessible else OK)
    assert code(near.pull_cache, by_slot(2, default_device), "n") == OK


def test_a_near_cache_that_is_not_remote_accessible(pair: tuple[End, Peer], accessible: bool) -> None:
    near, far = pair
    cache = far.allocate("f", 1, 64, 2, seed=1)
    near.register("n", 1, 64, 2, accessible=False)
    assert code(near.pull_cache, by_slot(2, cache), "n") == (INVALID if accessible else OK)
