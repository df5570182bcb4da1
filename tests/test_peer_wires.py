"""Wires that break or fall silent during a pull, a push and a greeting."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest

from llm_datadist import LLMException
from peers import (
    GRACE,
    OK,
    THOROUGH,
    TIMEOUT,
    UNLINKED,
    End,
    Ends,
    Peer,
    Proxy,
    by_blocks,
    code,
    eventually,
    linked,
    options,
    pattern,
)

QUICK = {"llm__LinkHeartbeat": 100, "llm__LinkSilence": 1500}


def owned(far: Peer, seed: int = 1, name: str = "f") -> None:
    """A blocks cache of the peer."""
    far.allocate(name, 4, 5000, 2, blocks=True, keys=[by_blocks(0)], seed=seed)


def pulls(near: End, name: str = "n", cluster: int = 2) -> str:
    """Pull the blocks cache of the peer; the code."""
    return code(near.pull_blocks, by_blocks(cluster), name, range(4), range(4))


def target(near: Any, name: str = "n") -> None:
    """Where pulls go to."""
    near.allocate(name, 4, 5000, 2, blocks=True)


TCP = {"llm__LinkTransport": "tcp"}


@pytest.mark.parametrize("accessible", [False, True])
def test_a_half_open_connection_is_noticed_by_both(ends: Ends, accessible: bool) -> None:
    settings = options(accessible=accessible, **TCP, **QUICK, llm__SyncKvCacheWaitTime=400)
    far, near = ends.peer(settings), ends.near(settings)
    owned(far)
    target(near)
    with Proxy(far.address) as wire:
        assert near.link_clusters([(2, wire.at)])[0] == OK
        assert pulls(near) == OK
        wire.deafen()
        told, seconds, _ = near.timed("pull_blocks", by_blocks(2), "n", [0], [0])
        assert told in {TIMEOUT, UNLINKED}
        assert seconds < 0.4 + GRACE
        eventually(lambda: near.links() == [], what="the end of the link here")
        eventually(lambda: far.links() == [], what="the end of the link there")
    linked(near, far)
    assert pulls(near) == OK


def _arrived(near: End, name: str, before: list[np.ndarray], after: list[np.ndarray], error: LLMException) -> int:
    """Every row said to have arrived has; returns how many."""
    rows = 0
    for tensor, ranges in error.arrived:  # type: ignore[attr-defined]
        for first, end in ranges:
            got = near.read(name)[tensor][first:end]
            assert np.array_equal(got, after[tensor][first:end]), f"tensor {tensor}, rows {first} to {end}"
            rows += end - first
    assert rows < sum(len(tensor) for tensor in before)
    return rows


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("accessible", [False, True])
def test_a_pull_that_breaks_says_what_arrived(ends: Ends, accessible: bool, cut: bool) -> None:
    settings = options(accessible=accessible, pool=8 << 20, **TCP, llm__SyncKvCacheWaitTime=700)
    far, near = ends.peer(settings), ends.near(settings)
    rows, row_bytes = 200, 10_000
    far.allocate("f", rows, row_bytes, 2, blocks=True, keys=[by_blocks(0)], seed=1)
    near.allocate("n", rows, row_bytes, 2, blocks=True)
    source, order = pattern(1, 2, rows, row_bytes), np.random.default_rng(1).permutation(rows)
    wanted = [np.empty_like(tensor) for tensor in source]
    for tensor in range(2):
        wanted[tensor][order] = source[tensor]
    with Proxy(far.address) as wire:
        assert near.link_clusters([(2, wire.at)])[0] == OK
        wire.allow("down", 2_500_000, cut=cut)
        began = time.monotonic()
        with pytest.raises(LLMException) as caught:
            near.pull_blocks(by_blocks(2), "n", range(rows), order.tolist())
        assert time.monotonic() - began < 0.7 + GRACE
        assert caught.value.status_code.name == (UNLINKED if cut else TIMEOUT), str(caught.value)
        arrived = _arrived(near, "n", source, wanted, caught.value)
        assert arrived > 100, "most of what passed has arrived"


@pytest.mark.parametrize("cut", [True, False])
def test_a_push_that_breaks_ends_in_time(ends: Ends, cut: bool) -> None:
    settings = options(accessible=True, pool=8 << 20, **TCP, llm__SyncKvCacheWaitTime=700)
    far, near = ends.peer(settings), ends.near(settings)
    rows, row_bytes = 200, 10_000
    far.allocate("f", rows, row_bytes, 2, blocks=True, keys=[by_blocks(0)])
    near.allocate("n", rows, row_bytes, 2, blocks=True, seed=1)
    with Proxy(far.address) as wire:
        assert near.link_clusters([(2, wire.at)])[0] == OK
        wire.allow("up", 1_500_000, cut=cut)
        told, seconds, text = near.timed("push_blocks", by_blocks(2), "n", range(rows), range(rows))
        assert told == (UNLINKED if cut else TIMEOUT), text
        assert seconds < 0.7 + GRACE
    linked_again = eventually(lambda: near.link_clusters([far.at])[1][0] in {OK, "LLM_ALREADY_LINK"})
    assert linked_again


@pytest.mark.parametrize("passing", [0, 1, 9, 40, 100, 150, 200, 300] if THOROUGH else [0, 9, 100, 150])
@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_greeting_that_breaks_is_no_link(ends: Ends, passing: int, cut: bool, direction: str) -> None:
    settings = options(**TCP)
    far, near = ends.peer(settings), ends.near(settings)
    with Proxy(far.address) as wire:
        wire.allow(direction, passing, cut=cut)
        (told,) = near.link_clusters([(2, wire.at)], 300)[1]
        if told == OK:
            assert passing >= 100
        else:
            assert told in {TIMEOUT, "LLM_LINK_FAILED"}
            assert near.links() == []
            eventually(lambda: far.links() == [], what="the end of half a link")
    near.unlink_clusters([(2, None)], 300, force=True)
    linked(near, far)
