"""Pulls of caches that come and go, and pulls by many threads."""

from __future__ import annotations

import random
import threading
from typing import Any

import numpy as np
import pytest

from peers import (
    GONE,
    LIMIT,
    OK,
    End,
    Ends,
    Peer,
    by_blocks,
    by_slot,
    code,
    equal,
    eventually,
    linked,
    options,
    pattern,
)

TRANSPORTS = ["auto", "tcp"]
MODES = [False, True]


@pytest.fixture(params=MODES, ids=["served", "one-sided"])
def accessible(request: pytest.FixtureRequest) -> bool:
    """The mode of both ends."""
    return bool(request.param)


@pytest.fixture(params=TRANSPORTS)
def pair(ends: Ends, accessible: bool, request: pytest.FixtureRequest) -> tuple[End, Peer]:
    """Two linked ends, in every mode, over every transport."""
    return ends.pair(accessible=accessible, llm__LinkTransport=request.param)


# -- caches that come and go -----------------------------------------------------------------------------------------


def test_caches_made_after_linking_are_found(pair: tuple[End, Peer]) -> None:
    near, far = pair
    near.allocate("n", 1, 64, 2)
    for number in range(20):
        cache = far.make(f"f{number}", 1, 64, 2, registered=bool(number % 2), host=number % 3 == 0, seed=number)
        near.pull_cache(by_slot(2, cache), "n")
        assert equal(near.read("n"), pattern(number, 2, 1, 64))


def test_freed_caches_are_refused_also_after_they_were_pulled(pair: tuple[End, Peer]) -> None:
    near, far = pair
    near.allocate("n", 1, 64, 2, seed=99)
    near.allocate("b", 1, 64, 2, blocks=True, seed=98)
    for number in range(6):
        registered = bool(number % 2)
        cache = far.make("f", 1, 64, 2, registered=registered, seed=number)
        far.make("g", 1, 64, 2, registered=registered, blocks=True, keys=[by_blocks(2)], seed=number + 50)
        near.pull_cache(by_slot(2, cache), "n")
        near.pull_blocks(by_blocks(2), "b", [0], [0])
        assert equal(near.read("n"), pattern(number, 2, 1, 64))
        assert equal(near.read("b"), pattern(number + 50, 2, 1, 64))
        for name in ("f", "g"):
            (far.unregister if registered else far.deallocate)(name)
        assert code(near.pull_cache, by_slot(2, cache), "n") == GONE
        assert code(near.pull_blocks, by_blocks(2), "b", [0], [0]) == GONE
        assert equal(near.read("n"), pattern(number, 2, 1, 64)), "a refused pull changed its destination"


def test_a_freed_cache_is_never_read_in_the_place_of_its_successor(pair: tuple[End, Peer]) -> None:
    near, far = pair
    near.allocate("n", 1, 4096, 1)
    old: list[int] = []
    for number in range(10):
        old.append(far.allocate("f", 1, 4096, 1, seed=number))
        near.pull_cache(by_slot(2, old[-1]), "n")
        assert equal(near.read("n"), pattern(number, 1, 1, 4096))
        for cache in old[:-1]:
            assert code(near.pull_cache, by_slot(2, cache), "n") == GONE
        far.deallocate("f")


def test_a_blocks_key_that_moves_to_another_cache_is_followed(pair: tuple[End, Peer]) -> None:
    near, far = pair
    near.allocate("n", 2, 64, 2, blocks=True)
    for number in range(5):
        far.register(f"f{number}", 2, 64, 2, blocks=True, keys=[by_blocks(2)], accessible=True, seed=number)
        near.pull_blocks(by_blocks(2), "n", [0, 1], [0, 1])
        assert equal(near.read("n"), pattern(number, 2, 2, 64)), "the last registration of a key wins"


def test_a_pull_sees_the_present_bytes(pair: tuple[End, Peer]) -> None:
    near, far = pair
    near.allocate("n", 1, 64, 2)
    for registered in (False, True):
        cache = far.make(f"f{registered}", 1, 64, 2, registered=registered)
        for number in range(5):
            far.fill(f"f{registered}", number)
            near.pull_cache(by_slot(2, cache), "n")
            assert equal(near.read("n"), pattern(number, 2, 1, 64))


# -- many threads ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("transport", TRANSPORTS)
@pytest.mark.parametrize(("threads", "peers"), [(32, 1), (16, 3)])
def test_many_threads_pull_at_once(ends: Ends, accessible: bool, transport: str, threads: int, peers: int) -> None:
    settings: dict[str, Any] = {
        "accessible": accessible,
        "llm__LinkTransport": transport,
        "llm__SyncKvCacheWaitTime": 9999,
    }
    near, first = ends.pair(**settings)
    far = [first, *(ends.peer(options(**settings), cluster=3 + number) for number in range(peers - 1))]
    for peer in far[1:]:
        linked(near, peer)
    for peer in far:
        peer.allocate("f", 64, 1000, 2, blocks=True, keys=[by_blocks(0)], seed=peer.cluster)
    wrong: list[str] = []
    gate = threading.Barrier(threads)

    def work(number: int) -> None:
        chance = random.Random(number)  # noqa: S311
        peer = far[number % peers]
        source = pattern(peer.cluster, 2, 64, 1000)
        gate.wait(LIMIT)
        for _ in range(10):
            src = [chance.randrange(64) for _ in range(20)]
            near.pull_blocks(by_blocks(peer.cluster), f"n{number}", src, range(20))
            if not equal(near.read(f"n{number}"), [tensor[src] for tensor in source]):
                wrong.append(f"thread {number}")

    for number in range(threads):
        near.allocate(f"n{number}", 20, 1000, 2, blocks=True)
    crew = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join(LIMIT)
    assert not any(thread.is_alive() for thread in crew)
    assert wrong == []
    assert near.stats()["ops"]["pull"]["calls"] == threads * 10
    assert near.stats()["ops"]["pull"]["failures"] == 0


def test_pulls_while_the_owner_makes_and_frees(pair: tuple[End, Peer]) -> None:
    near, far = pair
    caches = [far.allocate("f0", 1, 4096, 1), far.allocate("f1", 1, 4096, 1)]
    for number in range(2):
        far.paint(f"f{number}", 100 + number)
    near.allocate("n", 1, 4096, 1)
    stop = threading.Event()
    seen: set[str] = set()
    mixed: list[int] = []

    def pull() -> None:
        while not stop.is_set():
            seen.add(code(near.pull_cache, by_slot(2, caches[0]), "n"))
            values = np.unique(near.read("n")[0])
            if len(values) > 1 or values[0] not in (0, 100):
                mixed.extend(values.tolist())

    thread = threading.Thread(target=pull)
    thread.start()
    try:
        eventually(lambda: OK in seen)
        far.deallocate("f0")
        for number in range(30):
            far.allocate("again", 1, 4096, 1)
            far.paint("again", 1 + number % 50)
            far.deallocate("again")
    finally:
        stop.set()
        thread.join(LIMIT)
    assert OK in seen
    assert seen <= {OK, GONE}
    assert mixed == [], "bytes of another cache"


def test_statistics_count_pulls_on_both_sides(pair: tuple[End, Peer]) -> None:
    near, far = pair
    cache = far.allocate("f", 2, 128, 2, seed=1)
    near.allocate("n", 2, 128, 2)
    for _ in range(5):
        near.pull_cache(by_slot(2, cache), "n")
    assert code(near.pull_cache, by_slot(2, cache + 1), "n") == GONE
    (link,) = near.links()
    assert link["transfers"]["calls"] == 6
    assert link["transfers"]["failures"] == 1
    assert link["transfers"]["bytes"] == 5 * 128 * 2
    pull = near.stats()["ops"]["pull"]
    assert (pull["calls"], pull["failures"], pull["bytes"]) == (6, 1, 5 * 128 * 2)
    eventually(lambda: far.links() != [])
