"""Pulls from a peer in another process: which bytes arrive in every layout and mode, what is refused, and lifetimes.

`Twin` computes the expected bytes (contract §7.12, §7.13, §17). The tests also check the bytes that must not change.
Not for: effects on keys (`test_keys_remote.py`), or arguments that are refused before the peer is asked
(`test_transfer_arguments.py`).
"""

from __future__ import annotations

import itertools
import random
from typing import TYPE_CHECKING, Any

import pytest

from peers import (
    GONE,
    INVALID,
    OK,
    THOROUGH,
    UINT64_MAX,
    UNLINKED,
    End,
    Peer,
    by_blocks,
    by_request,
    by_slot,
    code,
    equal,
    pattern,
)

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

    Tensors = Sequence[tuple[int, int]] | None  # (tensor of the peer, local tensor)

# Whether each end has host memory and registered memory: local host, local registered, remote host, remote registered.
WAYS = list(itertools.product([False, True], repeat=4))


class Twin:
    """The expected bytes of a local cache: its bytes before, and the bytes that naive pulls write."""

    def __init__(self, local: End, name: str, remote: Sequence[np.ndarray]) -> None:
        self.local, self.name, self.remote = local, name, remote
        self.expected = local.read(name)

    def _pairs(self, tensors: Tensors) -> list[tuple[np.ndarray, np.ndarray]]:
        numbers = tensors or [(number, number) for number in range(len(self.expected))]
        return [(self.remote[source], self.expected[target]) for source, target in numbers]

    def slot(self, remote_row: int, local_row: int, size: int = -1, tensors: Tensors = None) -> None:
        """Copy a slot of the peer to a local slot."""
        for source, target in self._pairs(tensors):
            length = target.shape[1] if size == -1 else size
            target[local_row, :length] = source[remote_row, :length]

    def blocks(self, src: Sequence[int], dst: Sequence[int], tensors: Tensors = None) -> None:
        """Copy blocks of the peer to local blocks, one by one."""
        for source, target in self._pairs(tensors):
            for left, right in zip(src, dst):
                target[right] = source[left]

    def pieces(self, remote_row: int, dst: Sequence[int], tensors: Tensors = None) -> None:
        """Copy a slot of the peer to local blocks, in pieces; the last one may be short."""
        for source, target in self._pairs(tensors):
            block = target.shape[1]
            for number, right in enumerate(dst):
                piece = source[remote_row, number * block : (number + 1) * block]
                assert piece.size, "a block the slot does not need"
                target[right, : piece.size] = piece

    def check(self, what: object = "") -> None:
        """Compare every byte."""
        assert equal(self.local.read(self.name), self.expected), what


@pytest.mark.parametrize("layout", ["slots", "pieces", "blocks"])
def test_random_geometries_between_all_placements_and_origins(pair: tuple[End, Peer], layout: str) -> None:
    local, remote = pair
    chance = random.Random(7)  # noqa: S311
    for number in range(160 if THOROUGH else 16):
        local_host, local_registered, remote_host, remote_registered = WAYS[number % 16]
        n, layers = chance.choice([1, 2, 3]), chance.randint(1, 4)
        tensors, remote_rows, remote_row_bytes = n * layers, chance.randint(1, 9), chance.randint(1, 400)
        local_row_bytes = remote_row_bytes if layout == "blocks" else chance.randint(1, remote_row_bytes)
        need = -(-remote_row_bytes // local_row_bytes)
        local_rows = chance.randint(1, 5) + (need if layout == "pieces" else 0)
        remote_key: dict[str, Any] = {"blocks": True, "keys": [by_blocks(0)]} if layout == "blocks" else {}
        shape = (remote_rows, remote_row_bytes, tensors)
        cache = remote.make("f", *shape, host=remote_host, registered=remote_registered, seed=number, **remote_key)
        into_blocks, shape = layout != "slots", (local_rows, local_row_bytes, tensors)
        local.make("n", *shape, host=local_host, registered=local_registered, blocks=into_blocks, seed=number + 1)
        twin = Twin(local, "n", pattern(number, tensors, remote_rows, remote_row_bytes))
        for ranges in (False, True):
            kwargs: dict[str, Any] = {}
            which: Tensors = None
            if ranges:
                span = chance.randint(1, layers)
                src, dst = chance.randint(0, layers - span), chance.randint(0, layers - span)
                kwargs = {"src_layers": (src, src + span), "dst_layers": (dst, dst + span), "n": n}
                which = [(src * n + each, dst * n + each) for each in range(span * n)]
            remote_row, local_row = chance.randrange(remote_rows), chance.randrange(local_rows)
            if layout == "slots":
                size = chance.choice([-1, chance.randint(1, local_row_bytes)])
                local.pull_cache(by_slot(2, cache, remote_row), "n", local_row, size, **kwargs)
                twin.slot(remote_row, local_row, size, which)
            elif layout == "pieces":
                into = chance.sample(range(local_rows), chance.randint(1, need))
                local.pull_blocks(by_slot(2, cache, remote_row), "n", dst=into, **kwargs)
                twin.pieces(remote_row, into, which)
            else:  # a row may go to several blocks, and of several rows for one block the last counts
                from_, into = (chance.choices(range(rows), k=12) for rows in (remote_rows, local_rows))
                local.pull_blocks(by_blocks(2), "n", from_, into, **kwargs)
                twin.blocks(from_, into, which)
            twin.check((WAYS[number % 16], shape, kwargs))
        assert equal(remote.read("f"), twin.remote), "a pull changed its source"
        local.release("n")
        remote.release("f")


def test_what_is_refused_moves_nothing(pair: tuple[End, Peer], way: dict[str, Any]) -> None:
    """Only errors that depend on the cache of the peer; `test_transfer_arguments.py` has all others."""
    local, remote = pair
    one_sided = way["accessible"]
    cache = remote.allocate("f", 3, 64, 4, keys=[by_request(0, 1)], seed=1)
    narrow = remote.allocate("narrow", 2, 60, 4)
    blocks = remote.allocate("blocks", 4, 64, 4, blocks=True, keys=[by_blocks(2)], seed=1)
    remote.allocate("other", 4, 65, 4, blocks=True, keys=[by_blocks(2, 1)])
    closed = remote.register("closed", 1, 64, 4, accessible=False)
    host, device = remote.register("host", 1, 64, 4, host=True), remote.register("device", 1, 64, 4)
    local.allocate("n", 2, 64, 4, seed=2)
    local.allocate("nb", 6, 64, 4, blocks=True, seed=3)
    local.register("private", 2, 64, 4, accessible=False)
    slots, into = Twin(local, "n", []), Twin(local, "nb", pattern(1, 4, 4, 64))
    unknown = [by_request(2, 9), by_request(2, 1, 9), by_request(2, UINT64_MAX, 0, 1)]
    for expected, key, size in (
        *[(GONE, by_slot(2, id_), -1) for id_ in (10**6, 2**62, -5)],
        *[(GONE, by_slot(2, cache, row), -1) for row in (3, 2**32 - 1)],
        *[(GONE, key, -1) for key in unknown if not one_sided],
        (UNLINKED, by_slot(3, 1), -1),
        (INVALID, by_slot(2, narrow), -1),  # -1 is the size of the local slot
        (INVALID, by_slot(2, closed), -1),
    ):
        assert code(local.pull_cache, key, "n", 0, size) == expected, (key, size)
    for src, dst in (((1, 3), (0, 2)), ((0, 1), (0, 2)), ((2**31, 2**31 + 1), (0, 1))):
        assert code(local.pull_cache, by_slot(2, cache), "n", src_layers=src, dst_layers=dst) == INVALID, (src, dst)
    for expected, key, src, dst in (
        (GONE, by_blocks(2, 9), [0], [0]),
        *[(GONE, key, [], [0]) for key in unknown],
        (INVALID, by_blocks(2, 1), [0], [0]),  # blocks of another size
        *[(INVALID, by_blocks(2), [0, block], [0, 1]) for block in (4, 2**40)],
        (INVALID, by_slot(2, cache), [], [0, 1]),  # more blocks than the slot fills
        *[(INVALID, by_slot(2, blocks), [], [0]) for _ in range(not one_sided)],
    ):
        assert code(local.pull_blocks, key, "nb", src, dst) == expected, (key, src, dst)
    slots.check()
    into.check()
    # Registered device memory is accessible by default. At the local end, this matters to one-sided pulls only.
    assert code(local.pull_cache, by_slot(2, host), "n") == (INVALID if one_sided else OK)
    assert code(local.pull_cache, by_slot(2, device), "n") == OK
    assert code(local.pull_cache, by_slot(2, cache, 2), "private") == (INVALID if one_sided else OK)
    assert code(local.pull_cache, by_slot(2, narrow, 1), "n", 1, 60) == OK
    local.pull_blocks(by_blocks(2), "nb", [3], [5])
    into.blocks([3], [5])
    into.check()
