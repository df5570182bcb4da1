"""Connections that break or fall silent during a pull or a push."""

from __future__ import annotations

import numpy as np
import pytest

from llm_datadist import LLMException
from peers import (
    OK,
    TIMEOUT,
    UNLINKED,
    Ends,
    Proxy,
    by_blocks,
    eventually,
    options,
    pattern,
)

ROWS, ROW_BYTES = 200, 10_000


def tcp(accessible: bool, **extra: object) -> dict[str, str]:
    return options(accessible=accessible, pool=8 << 20, llm__LinkTransport="tcp", **extra)


@pytest.mark.parametrize("cut", [True, False])
@pytest.mark.parametrize("accessible", [False, True])
def test_a_pull_that_breaks_says_what_arrived(ends: Ends, accessible: bool, cut: bool) -> None:
    settings = tcp(accessible, llm__SyncKvCacheWaitTime=60_000 if cut else 3000)
    remote, local = ends.peer(settings), ends.local(settings)
    remote.allocate("f", ROWS, ROW_BYTES, 2, blocks=True, keys=[by_blocks(0)], seed=1)
    local.allocate("n", ROWS, ROW_BYTES, 2, blocks=True)
    source, order = pattern(1, 2, ROWS, ROW_BYTES), np.random.default_rng(1).permutation(ROWS)
    with Proxy(remote.address) as wire:
        assert local.link_clusters([(2, wire.at)])[0] == OK
        wire.allow("down", 2_500_000, cut=cut)
        with pytest.raises(LLMException) as caught:
            local.pull_blocks(by_blocks(2), "n", range(ROWS), order.tolist())
    assert caught.value.status_code.name == (UNLINKED if cut else TIMEOUT), str(caught.value)
    got, arrived = local.read("n"), 0
    for tensor, ranges in caught.value.arrived:  # type: ignore[attr-defined]
        wanted = np.empty_like(source[tensor])
        wanted[order] = source[tensor]
        for first, end in ranges:
            assert np.array_equal(got[tensor][first:end], wanted[first:end]), f"tensor {tensor}, rows {first} to {end}"
            arrived += end - first
    assert 100 < arrived < 2 * ROWS, "most of what passed has arrived"


@pytest.mark.parametrize("cut", [True, False])
def test_a_push_that_breaks_ends_in_time(ends: Ends, cut: bool) -> None:
    settings = tcp(accessible=True, llm__SyncKvCacheWaitTime=60_000 if cut else 700)
    remote, local = ends.peer(settings), ends.local(settings)
    remote.allocate("f", ROWS, ROW_BYTES, 2, blocks=True, keys=[by_blocks(0)])
    local.allocate("n", ROWS, ROW_BYTES, 2, blocks=True, seed=1)
    with Proxy(remote.address) as wire:
        assert local.link_clusters([(2, wire.at)])[0] == OK
        wire.allow("up", 1_500_000, cut=cut)
        told, text = local.within(0.7, "push_blocks", by_blocks(2), "n", range(ROWS), range(ROWS))
        assert told == (UNLINKED if cut else TIMEOUT), text
    eventually(lambda: local.link_clusters([remote.at])[1][0] in {OK, "LLM_ALREADY_LINK"}, what="the link")
