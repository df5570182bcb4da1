"""Effects of a pull or push on keys and on the memory that they hold (contract §12.3 and the rulings of §17).

The owner is the peer process. The counters of its pools and its table show what was released. Not for: the bytes, or
pulls of parts (`remote_table.rs` and `links/races.rs` of the core's tests).
"""

from __future__ import annotations

import pytest

from peers import (
    GONE,
    INVALID,
    OK,
    UINT64_MAX,
    End,
    Key,
    Peer,
    by_blocks,
    by_request,
    by_slot,
    code,
    equal,
    eventually,
    pattern,
)

PAGE = 4096


def prefix(number: int) -> Key:
    """A prefix key."""
    return by_request(2, UINT64_MAX, 0, number)


def slot(seed: int, row: int, rows: int = 2) -> list[object]:
    """The bytes of row `row` after `allocate("f", rows, 64, 2, seed=seed)`."""
    return [tensor[row : row + 1] for tensor in pattern(seed, 2, rows, 64)]


@pytest.mark.contract("19.double-reference", "20.16", "19.pulls-and-keys")
def test_a_pull_consumes_its_key_exactly_once(served: tuple[End, Peer]) -> None:
    local, remote = served
    remote.allocate("f", 4, 64, 2, keys=[by_request(9, 1), by_request(9, 2)], seed=1)
    local.allocate("n", 1, 64, 2)
    local.pull_cache(by_request(2, 1), "n")
    assert code(local.pull_cache, by_request(2, 1), "n") == GONE
    assert equal(local.read("n"), slot(1, 0, 4)), "a refused pull wrote"
    remote.remove_key(by_request(9, 1))  # no key any more: nothing happens
    local.pull_cache(by_request(2, 2), "n", 0, 1)  # a part of a slot counts as a pull
    assert code(local.pull_cache, by_request(2, 2), "n") == GONE
    assert remote.stats()["table"] == {"caches": 1, "keys": 0}


def test_a_pull_by_id_and_slot_consumes_the_key_of_that_slot_alone(served: tuple[End, Peer]) -> None:
    local, remote = served
    cache = remote.allocate("f", 3, 64, 2, keys=[by_request(2, 1), by_request(2, 2)], seed=1)
    local.allocate("n", 1, 64, 2)
    local.pull_cache(by_slot(2, cache, 1), "n")
    assert code(local.pull_cache, by_request(2, 2), "n") == GONE
    assert code(local.pull_cache, by_slot(2, cache, 1), "n") == OK, "the id is still there, only the key went"
    remote.deallocate("f")
    local.pull_cache(by_slot(2, cache, 2), "n")  # a key holds the cache, and its id still names it
    assert equal(local.read("n"), slot(1, 2, 3))
    local.pull_cache(by_slot(2, cache, 0), "n")  # the last key goes, and with it the memory
    assert remote.used() == 0
    assert code(local.pull_cache, by_slot(2, cache, 2), "n") == GONE


def test_a_failed_pull_keeps_the_key(served: tuple[End, Peer]) -> None:
    local, remote = served
    key = by_request(2, 1)
    remote.allocate("f", 1, 64, 2, keys=[key], seed=4)
    local.allocate("wide", 1, 65, 2)
    local.allocate("blocks", 4, 32, 2, blocks=True)
    local.allocate("n", 1, 64, 2)
    for _ in range(2):
        assert code(local.pull_cache, key, "wide") == INVALID
        assert code(local.pull_cache, key, "n", src_layers=(0, 1), dst_layers=(1, 2)) == INVALID
        assert code(local.pull_blocks, key, "blocks", dst=[0, 1, 2]) == INVALID
    local.pull_cache(key, "n")
    assert equal(local.read("n"), pattern(4, 2, 1, 64))


def test_keys_of_prefixes_blocks_and_registered_caches_stay(served: tuple[End, Peer]) -> None:
    local, remote = served
    local.allocate("n", 1, 64, 2)
    local.allocate("b", 2, 64, 2, blocks=True)
    registered = remote.register("r", 2, 64, 2, keys=[by_request(2, 1)], accessible=True)
    remote.allocate("blocks", 4, 64, 2, blocks=True, keys=[by_blocks(2)])
    # A request and a prefix with the same number are two keys.
    cache = remote.allocate("f", 2, 64, 2, keys=[by_request(2, 7), prefix(7)], seed=1)
    for _ in range(3):
        local.pull_cache(prefix(7), "n")
        assert equal(local.read("n"), slot(1, 1))
        local.pull_blocks(prefix(7), "b", dst=[0])
        local.pull_cache(by_slot(2, cache, 1), "n")
        local.pull_blocks(by_blocks(2), "b", [1], [1])
        for key in (by_request(2, 1), by_slot(2, registered)):
            local.pull_cache(key, "n")
    local.pull_blocks(by_request(2, 7), "b", dst=[1])
    assert equal([tensor[1:] for tensor in local.read("b")], slot(1, 0))
    assert code(local.pull_cache, by_request(2, 7), "n") == GONE
    for name in ("blocks", "f"):
        remote.deallocate(name)
    assert remote.used() == 2 * PAGE, "the prefix holds it"
    remote.remove_key(prefix(7))
    assert remote.used() == 0
    assert code(local.pull_cache, prefix(7), "n") == GONE
    remote.remove_key(by_request(2, 1))  # of a registered cache: nothing happens
    local.pull_cache(by_request(2, 1), "n")
    remote.unregister("r")
    assert code(local.pull_cache, by_request(2, 1), "n") == GONE


def test_remote_access_consumes_nothing(one_sided: tuple[End, Peer]) -> None:
    local, remote = one_sided
    cache = remote.allocate("f", 2, 64, 2, keys=[by_request(2, 1), prefix(3)], seed=1)
    local.allocate("n", 1, 64, 2)
    local.allocate("b", 1, 64, 2, blocks=True)
    for _ in range(3):
        local.pull_cache(by_slot(2, cache), "n")
        local.pull_blocks(by_slot(2, cache), "b", dst=[0])
        local.pull_blocks(by_request(2, 1), "b", dst=[0])
        local.push_cache(by_slot(2, cache), "n")
    local.pull_blocks(prefix(3), "b", dst=[0])
    assert equal(local.read("b"), slot(1, 1))
    remote.deallocate("f")
    remote.remove_key(prefix(3))
    assert code(local.pull_blocks, by_request(2, 1), "b", dst=[0]) == OK, "the key holds it"
    assert remote.used() == 2 * PAGE
    remote.remove_key(by_request(2, 1))
    # Over sockets, the thread that has sent the bytes releases the cache a moment later.
    eventually(lambda: remote.used() == 0)
    assert code(local.pull_blocks, by_request(2, 1), "b", dst=[0]) == GONE


@pytest.mark.contract("19.double-reference", "19.pulls-and-keys")
def test_a_push_releases_the_key_of_its_local_slot_alone(one_sided: tuple[End, Peer]) -> None:
    """A push of a part or by a range of all layers: `links/push.rs`."""
    local, remote = one_sided
    cache, narrow = remote.allocate("f", 1, 64, 2, keys=[by_request(2, 1)]), remote.allocate("narrow", 1, 63, 2)
    local.register("r", 1, 64, 2, keys=[by_request(1, 1)], accessible=True)
    local.allocate("n", 2, 64, 2, keys=[by_request(1, 2), by_request(1, 3)])
    assert code(local.push_cache, by_slot(2, cache), "r") == OK
    assert code(local.push_cache, by_slot(2, narrow), "n") == INVALID
    assert code(local.push_cache, by_slot(2, 10**6), "n") == GONE
    assert local.stats()["table"]["keys"] == 3, "registered memory and failures keep their keys"
    local.deallocate("n")
    assert code(local.push_cache, by_slot(2, cache), "n") == OK
    assert local.stats()["table"] == {"caches": 2, "keys": 2}
    assert remote.stats()["table"]["keys"] == 1, "the peer keeps its key"


@pytest.mark.contract("20.17", "19.last-key-wins", "19.key-per-slot")
def test_the_last_of_equal_keys_names_its_slot(served: tuple[End, Peer]) -> None:
    local, remote = served
    idle = by_request(2, UINT64_MAX)
    remote.allocate("b", 2, 64, 2, blocks=True, keys=[("blocks", 2, 0)])
    remote.allocate("f", 5, 64, 2, keys=[by_request(2, 7), idle, by_request(9, 7), idle], seed=1)
    local.allocate("n", 1, 64, 2)
    assert code(local.pull_cache, idle, "n") == INVALID
    local.pull_cache(by_request(2, 7), "n")
    assert equal(local.read("n"), slot(1, 2, 5)), "the last slot with the key"
    assert code(local.pull_cache, by_request(2, 7), "n") == GONE, "the earlier slot has no key"
    remote.remove_key(idle)
    remote.deallocate("f")
    assert remote.used() == 2 * PAGE, "only the blocks cache is left"
    remote.allocate("g", 5, 64, 2, keys=[idle, idle, by_request(2, 8), idle, idle], seed=3)
    local.pull_cache(by_request(2, 8), "n")
    assert equal(local.read("n"), slot(3, 2, 5))
