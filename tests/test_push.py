"""Pushes to a peer in another process: which bytes arrive, which stay as they were, and what is refused.

Remote-accessible mode only (contract §7.14, §7.15). Not for: effects on keys (`test_keys_remote.py`), arguments that
are refused before the peer is asked (`test_transfer_arguments.py`), or long lists (`transfer.rs` of the core's tests).
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from peers import GONE, INVALID, OK, UNLINKED, End, Peer, by_blocks, by_request, by_slot, code, equal, pattern
from peers.values import cache_key

if TYPE_CHECKING:
    import pytest


def test_what_was_pushed_is_the_peers_own(one_sided: tuple[End, Peer]) -> None:
    local, remote = one_sided
    for registered in (False, True):
        cache = remote.make(f"f{registered}", 1, 5000, 2, registered=registered)
        local.make(f"n{registered}", 1, 5000, 2, registered=registered, seed=1)
        local.push_cache(by_slot(2, cache), f"n{registered}")
        local.paint(f"n{registered}", 0)  # the source may be changed at once
        assert equal(remote.read(f"f{registered}"), pattern(1, 2, 1, 5000)), "visible when the push returns"
        remote.fill(f"f{registered}", 2)
        remote.rest(0.1)
        assert equal(remote.read(f"f{registered}"), pattern(2, 2, 1, 5000)), "something wrote after the push had ended"


def test_one_tensor_and_the_default_of_two_a_layer_is_no_layer(
    one_sided: tuple[End, Peer], caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing moves, which is no error. A WARNING says so."""
    local, remote = one_sided
    caplog.set_level(logging.WARNING, logger="LLM_DATADIST")
    cache = remote.allocate("f", 1, 64, 1, seed=1)
    remote.allocate("fb", 2, 64, 1, blocks=True, keys=[by_blocks(0)], seed=1)
    local.allocate("n", 1, 64, 1, seed=2)
    local.allocate("b", 2, 64, 1, blocks=True, seed=2)

    def warnings() -> list[str]:
        local.dist.stats()  # passes the lines of the engine on
        lines = [record.getMessage() for record in caplog.records if "moved nothing" in record.getMessage()]
        caplog.clear()
        return lines

    handles, mine = cache_key(by_slot(2, cache)), local.held["b"].handle
    assert code(local.manager.push_cache, handles, local.held["n"].handle) == OK
    (line,) = warnings()
    assert "cluster 2 " in line, line
    assert "num_tensors=1, tensor_num_per_layer=2); pass tensor_num_per_layer=1" in line, line
    assert code(local.manager.push_blocks, cache_key(by_blocks(2)), mine, [0], [0]) == OK
    assert len(warnings()) == 1
    assert equal(remote.read("f"), pattern(1, 1, 1, 64)), "no layer, but bytes"
    assert equal(remote.read("fb"), pattern(1, 1, 2, 64)), "no layer, but bytes"
    local.manager.push_cache(handles, local.held["n"].handle, tensor_num_per_layer=1)
    assert equal(remote.read("f"), pattern(2, 1, 1, 64))
    assert warnings() == []


def test_what_is_refused_moves_nothing(one_sided: tuple[End, Peer]) -> None:
    """Only errors that depend on the cache of the peer; `test_transfer_arguments.py` has all others."""
    local, remote = one_sided
    cache = remote.allocate("f", 2, 64, 4, seed=1)
    narrow = remote.allocate("narrow", 2, 63, 4, seed=1)
    remote.allocate("fb", 4, 64, 4, blocks=True, keys=[by_blocks(2)], seed=1)
    remote.allocate("other", 4, 65, 4, blocks=True, keys=[by_blocks(2, 1)], seed=1)
    closed = remote.register("closed", 2, 64, 4, accessible=False, seed=1)
    remote.register("closed blocks", 4, 64, 4, blocks=True, keys=[by_blocks(2, 2)], accessible=False, seed=1)
    local.allocate("n", 2, 64, 4, seed=2)
    local.allocate("b", 4, 64, 4, blocks=True, seed=2)
    local.register("private", 2, 64, 4, accessible=False)
    for expected, key, name in (
        (GONE, by_slot(2, 10**9), "n"),
        (UNLINKED, by_slot(3, cache), "n"),
        (INVALID, by_slot(2, closed), "n"),
        (INVALID, by_slot(2, cache), "private"),
        (INVALID, by_slot(2, narrow), "n"),
    ):
        assert code(local.push_cache, key, name) == expected, (key, name)
    beyond = {"src_layers": (0, 2), "dst_layers": (1, 3)}
    assert code(local.push_cache, by_slot(2, cache), "n", **beyond) == INVALID
    for expected, key, src, dst, kwargs in (
        (GONE, by_blocks(2, 77), [0], [0], {}),
        (INVALID, by_blocks(2, 1), [0], [0], {}),
        (INVALID, by_blocks(2, 2), [0], [0], {}),
        (INVALID, by_blocks(2), [0, 4], [0, 1], {}),
        (INVALID, by_blocks(2), [0, 1], [0, 2**40], {}),
        (INVALID, by_blocks(2), [0], [0], beyond),
    ):
        assert code(local.push_blocks, key, "b", src, dst, **kwargs) == expected, (key, src, dst, kwargs)
    for name, rows, row in (("f", 2, 64), ("narrow", 2, 63), ("closed", 2, 64)):
        assert equal(remote.read(name), pattern(1, 4, rows, row)), name
    for name, row in (("fb", 64), ("other", 65), ("closed blocks", 64)):
        assert equal(remote.read(name), pattern(1, 4, 4, row)), name


def test_an_id_of_0_or_less_is_the_key_of_request_0(one_sided: tuple[End, Peer]) -> None:
    local, remote = one_sided
    local.allocate("n", 1, 64, 2, seed=2)
    assert code(local.push_cache, by_slot(2, 0), "n") == GONE
    remote.allocate("f", 1, 64, 2, keys=[by_request(2, 0)], seed=1)
    for id_, seed in ((0, 2), (-5, 3)):
        local.fill("n", seed)
        local.push_cache(by_slot(2, id_), "n")
        assert equal(remote.read("f"), pattern(seed, 2, 1, 64))
    remote.fill("f", 4)
    local.pull_cache(by_slot(2, 0), "n")
    assert equal(local.read("n"), pattern(4, 2, 1, 64))
