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
    near, far = ends.pair(**way, llm__Verify="full")
    accessible, rows = way["accessible"], list(range(10))
    far.allocate("f", ROWS, ROW_BYTES, 2, blocks=True, keys=[by_blocks(0)], seed=1)
    near.allocate("n", ROWS, ROW_BYTES, 2, blocks=True)
    near.allocate("s", 3, 70_000, 2)

    def counts(count: int, call: Callable[[], Any]) -> None:
        before = verified(near)
        call()
        assert verified(near) == (before[0] + count, 0)

    counts(10, lambda: near.pull_blocks(by_blocks(2), "n", rows, rows))
    cache = far.allocate("t", 1, 70_000, 2, keys=[by_request(0, 1)], seed=1)
    counts(2, lambda: near.pull_cache(by_slot(2, cache) if accessible else by_request(2, 1), "s", 2))
    assert equal([rows[2:] for rows in near.read("s")], pattern(1, 2, 1, 70_000))
    if accessible:
        counts(10, lambda: near.push_blocks(by_blocks(2), "n", rows, rows))
        to = by_slot(2, far.allocate("u", 3, 70_000, 2), 1)
        counts(2, lambda: near.push_cache(to, "s", 2))


def test_copies_and_swaps_follow_the_option_of_the_engine(ends: Ends) -> None:
    near = ends.near(options(llm__Verify="full"))
    near.allocate("d", 8, 5000, 3, blocks=True, seed=1)
    near.allocate("h", 8, 5000, 3, blocks=True, host=True)
    near.allocate("s", 3, 70_000, 2, seed=2)
    near.swap_blocks("d", "h", [(0, 1), (1, 2), (7, 0)])
    assert verified(near) == (3, 0)
    near.swap_blocks("h", "d", [(1, 4)])
    assert verified(near) == (4, 0)
    near.copy_blocks("d", [(1, 2), (2, 3), (5, 5)])
    assert verified(near) == (6, 0)
    near.copy_cache("s", "s", 1, 2)  # two pieces of each slot
    assert verified(near) == (8, 0)
    assert (near.read("s")[1][1] == near.read("s")[1][2]).all()


def test_a_mismatch_fails_the_call(ends: Ends) -> None:
    settings = options(llm__LinkTransport="tcp", llm__Verify="full")
    far, near = ends.peer(settings), ends.near(settings)
    far.allocate("f", ROWS, ROW_BYTES, 2, blocks=True, keys=[by_blocks(0)], seed=1)
    near.allocate("n", ROWS, ROW_BYTES, 2, blocks=True)
    rows = list(range(ROWS))
    with Proxy(far.address) as wire:
        assert near.link_clusters([(2, wire.at)])[0] == OK
        near.pull_blocks(by_blocks(2), "n", rows, rows)
        wire.flip("down", 4 * BYTES)
        status, said = outcome(lambda: near.pull_blocks(by_blocks(2), "n", rows, rows))
        assert (status, "different=1" in said, "cluster=2" in said) == (FAILED, True, True), said
        assert verified(near) == (2 * ROWS, 1)


def test_layers_at_different_places(ends: Ends, way: dict[str, Any]) -> None:
    """Each side hashes its own layers, not those of the same number."""
    near, far = ends.pair(**way, llm__Verify="full")
    far.allocate("f", 8, 4096, 6, blocks=True, keys=[by_blocks(0)], seed=1)
    near.allocate("n", 8, 4096, 6, blocks=True, seed=2)
    before = near.read("n")
    layers = {"src_layers": (2, 4), "dst_layers": (0, 2), "n": 1}
    near.pull_blocks(by_blocks(2), "n", [1, 2], [3, 4], **layers)
    assert verified(near) == (2, 0)
    source = pattern(1, 6, 8, 4096)
    for tensor in range(2):
        assert (near.read("n")[tensor][3:5] == source[tensor + 2][1:3]).all()
        assert (near.read("n")[tensor + 2] == before[tensor + 2]).all()
    if way["accessible"]:
        layers = {"src_layers": (3, 5), "dst_layers": (1, 3), "n": 1}
        near.push_blocks(by_blocks(2), "n", [5, 6], [0, 7], **layers)
        assert verified(near) == (4, 0)
        assert (far.read("f")[1][0] == near.read("n")[3][5]).all()


def test_the_kv_cache_manager_follows_the_option_of_the_engine(ends: Ends) -> None:
    far = ends.peer(kv_options(), 0)
    near = ends.near(kv_options(llm__Verify="full"), 0)
    assert near.link_clusters([far.at], 20000) == (OK, [OK])
    far.allocate("f", 1, 70_000, 2, keys=[by_request(0, 7)], seed=3)
    near.allocate("n", 2, 70_000, 2)
    near.pull_cache(by_request(0, 7), "n", 1)
    assert equal([rows[1:] for rows in near.read("n")], pattern(3, 2, 1, 70_000))
    assert verified(near) == (2, 0)
