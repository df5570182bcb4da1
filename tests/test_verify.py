"""The option `verify` of an engine: every call compares bytes, and finds a bit that changes on the way.

The core's `verification` tests cover the moments between the move and the comparison, and every kind of memory.
"""

from __future__ import annotations

from typing import Any, Callable

from peers import (
    OK,
    Ends,
    Proxy,
    by_blocks,
    by_request,
    by_slot,
    equal,
    kv_options,
    options,
    outcome,
    pattern,
)

FAILED = "LLM_VERIFY_FAILED"
ROWS, ROW_BYTES = 64, 4096
BYTES = 2 * ROWS * ROW_BYTES


def verified(end: Any) -> tuple[int, int]:
    counted = end.stats()["verify"]
    return counted["blocks"], counted["mismatches"]


def test_every_call_follows_the_option(ends: Ends, way: dict[str, Any]) -> None:
    local, remote = ends.pair(**way, llm__Verify="full")
    accessible, rows = way["accessible"], list(range(10))
    remote.allocate("f", ROWS, ROW_BYTES, 2, blocks=True, keys=[by_blocks(0)], seed=1)
    local.allocate("n", ROWS, ROW_BYTES, 2, blocks=True)
    local.allocate("s", 3, 70_000, 2)

    def counts(count: int, call: Callable[[], Any]) -> None:
        before = verified(local)
        call()
        assert verified(local) == (before[0] + count, 0)

    counts(10, lambda: local.pull_blocks(by_blocks(2), "n", rows, rows))
    cache = remote.allocate("t", 1, 70_000, 2, keys=[by_request(0, 1)], seed=1)
    counts(2, lambda: local.pull_cache(by_slot(2, cache) if accessible else by_request(2, 1), "s", 2))
    assert equal([rows[2:] for rows in local.read("s")], pattern(1, 2, 1, 70_000))
    if accessible:
        counts(10, lambda: local.push_blocks(by_blocks(2), "n", rows, rows))
        to = by_slot(2, remote.allocate("u", 3, 70_000, 2), 1)
        counts(2, lambda: local.push_cache(to, "s", 2))


def test_a_mismatch_fails_the_call(ends: Ends) -> None:
    settings = options(llm__LinkTransport="tcp", llm__Verify="full")
    remote, local = ends.peer(settings), ends.local(settings)
    remote.allocate("f", ROWS, ROW_BYTES, 2, blocks=True, keys=[by_blocks(0)], seed=1)
    local.allocate("n", ROWS, ROW_BYTES, 2, blocks=True)
    rows = list(range(ROWS))
    with Proxy(remote.address) as wire:
        assert local.link_clusters([(2, wire.at)])[0] == OK
        local.pull_blocks(by_blocks(2), "n", rows, rows)
        wire.flip("down", 4 * BYTES)
        status, said = outcome(lambda: local.pull_blocks(by_blocks(2), "n", rows, rows))
        assert (status, "different=1" in said, "cluster=2" in said) == (FAILED, True, True), said
        assert verified(local) == (2 * ROWS, 1)


def test_layers_at_different_places(ends: Ends, way: dict[str, Any]) -> None:
    """Each side hashes its own layers, not those of the same number."""
    local, remote = ends.pair(**way, llm__Verify="full")
    remote.allocate("f", 8, 4096, 6, blocks=True, keys=[by_blocks(0)], seed=1)
    local.allocate("n", 8, 4096, 6, blocks=True, seed=2)
    before = local.read("n")
    layers = {"src_layers": (2, 4), "dst_layers": (0, 2), "n": 1}
    local.pull_blocks(by_blocks(2), "n", [1, 2], [3, 4], **layers)
    assert verified(local) == (2, 0)
    source = pattern(1, 6, 8, 4096)
    for tensor in range(2):
        assert (local.read("n")[tensor][3:5] == source[tensor + 2][1:3]).all()
        assert (local.read("n")[tensor + 2] == before[tensor + 2]).all()
    if way["accessible"]:
        layers = {"src_layers": (3, 5), "dst_layers": (1, 3), "n": 1}
        local.push_blocks(by_blocks(2), "n", [5, 6], [0, 7], **layers)
        assert verified(local) == (4, 0)
        assert (remote.read("f")[1][0] == local.read("n")[3][5]).all()


def test_the_kv_cache_manager_follows_the_option_of_the_engine(ends: Ends) -> None:
    remote = ends.peer(kv_options(), 0)
    local = ends.local(kv_options(llm__Verify="full"), 0)
    assert local.link_clusters([remote.at], 20000) == (OK, [OK])
    remote.allocate("f", 1, 70_000, 2, keys=[by_request(0, 7)], seed=3)
    local.allocate("n", 2, 70_000, 2)
    local.pull_cache(by_request(0, 7), "n", 1)
    assert equal([rows[1:] for rows in local.read("n")], pattern(3, 2, 1, 70_000))
    assert verified(local) == (2, 0)
