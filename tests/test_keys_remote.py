"""What a pull or push by a peer does to keys and to the memory they hold (python-api.md §12.3 and the rulings of §17).

The owner is the peer process; its pools and its table say what was released. Not for: which bytes arrive.
"""

from __future__ import annotations

import threading

import pytest

from peers import (
    GONE,
    INVALID,
    LIMIT,
    OK,
    THOROUGH,
    UINT64_MAX,
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

PAGE = 4096


@pytest.fixture(params=["auto", "tcp"])
def served(ends: Ends, request: pytest.FixtureRequest) -> tuple[End, Peer]:
    """Two linked ends where the owner serves."""
    return ends.pair(llm__LinkTransport=request.param)


@pytest.fixture(params=["auto", "tcp"])
def one_sided(ends: Ends, request: pytest.FixtureRequest) -> tuple[End, Peer]:
    """Two linked ends in remote-accessible mode."""
    return ends.pair(accessible=True, llm__LinkTransport=request.param)


def prefix(number: int) -> tuple[object, ...]:
    """A prefix key."""
    return by_request(2, UINT64_MAX, 0, number)


@pytest.mark.contract("19.double-reference", "20.16", "19.pulls-and-keys")
def test_a_pull_consumes_its_key_exactly_once(served: tuple[End, Peer]) -> None:
    near, far = served
    far.allocate("f", 4, 64, 2, keys=[by_request(9, 1), by_request(9, 2)], seed=1)
    near.allocate("n", 1, 64, 2)
    near.pull_cache(by_request(2, 1), "n")
    assert equal(near.read("n"), [tensor[:1] for tensor in pattern(1, 2, 4, 64)])
    assert code(near.pull_cache, by_request(2, 1), "n") == GONE
    assert equal(near.read("n"), [tensor[:1] for tensor in pattern(1, 2, 4, 64)]), "a refused pull wrote"
    far.remove_key(by_request(9, 1))  # no key any more: nothing happens
    near.pull_cache(by_request(2, 2), "n")
    assert equal(near.read("n"), [tensor[1:2] for tensor in pattern(1, 2, 4, 64)])
    assert code(near.pull_cache, by_request(2, 2), "n") == GONE
    assert far.stats()["table"] == {"caches": 1, "keys": 0}


@pytest.mark.contract("19.double-reference")
def test_memory_is_back_at_the_owner_when_the_pull_returns(served: tuple[End, Peer]) -> None:
    near, far = served
    near.allocate("n", 1, PAGE, 2)
    for number in range(20):
        far.allocate("f", 2, PAGE, 2, keys=[by_request(2, number), by_request(2, 100 + number)], seed=number)
        far.deallocate("f")
        assert far.used() == 4 * PAGE, "the keys hold it"
        near.pull_cache(by_request(2, 100 + number), "n")
        assert far.used() == 4 * PAGE, "a key holds it"
        near.pull_cache(by_request(2, number), "n")
        assert far.used() == 0
        assert equal(near.read("n"), [tensor[:1] for tensor in pattern(number, 2, 2, PAGE)])


def test_the_id_holds_what_the_keys_let_go(served: tuple[End, Peer]) -> None:
    near, far = served
    cache = far.allocate("f", 1, 64, 2, keys=[by_request(2, 1)])
    near.allocate("n", 1, 64, 2)
    near.pull_cache(by_request(2, 1), "n")
    assert far.used() == 2 * PAGE
    assert code(near.pull_cache, by_slot(2, cache), "n") == OK
    far.deallocate("f")
    assert far.used() == 0
    assert code(near.pull_cache, by_slot(2, cache), "n") == GONE


def test_a_deallocated_cache_is_pulled_by_id_while_a_key_holds_it(served: tuple[End, Peer]) -> None:
    near, far = served
    cache = far.allocate("f", 2, 64, 2, keys=[by_request(2, 1)], seed=1)
    far.deallocate("f")
    near.allocate("n", 1, 64, 2)
    near.pull_cache(by_slot(2, cache, 1), "n")  # slot 1 has no key
    assert equal(near.read("n"), [tensor[1:] for tensor in pattern(1, 2, 2, 64)])
    near.pull_cache(by_slot(2, cache, 0), "n")  # the key of slot 0 goes, and with it the memory
    assert far.used() == 0
    assert code(near.pull_cache, by_slot(2, cache, 1), "n") == GONE


def test_a_pull_by_id_and_slot_consumes_the_key_of_that_slot_alone(served: tuple[End, Peer]) -> None:
    near, far = served
    cache = far.allocate("f", 3, 64, 2, keys=[by_request(2, number) for number in (1, 2, 3)])
    near.allocate("n", 1, 64, 2)
    near.pull_cache(by_slot(2, cache, 1), "n")
    assert code(near.pull_cache, by_request(2, 2), "n") == GONE
    assert code(near.pull_cache, by_slot(2, cache, 1), "n") == OK, "the id is still there, only the key went"
    assert code(near.pull_cache, by_request(2, 1), "n") == OK
    assert code(near.pull_cache, by_request(2, 3), "n") == OK


def test_a_failed_pull_keeps_the_key(served: tuple[End, Peer]) -> None:
    near, far = served
    far.allocate("f", 1, 64, 2, keys=[by_request(2, 1)], seed=4)
    near.allocate("wide", 1, 65, 2)
    near.allocate("more", 1, 64, 3)
    near.allocate("blocks", 4, 32, 2, blocks=True)
    near.allocate("n", 1, 64, 2)
    for _ in range(2):
        assert code(near.pull_cache, by_request(2, 1), "wide") == INVALID
        assert code(near.pull_cache, by_request(2, 1), "more") == INVALID
        assert code(near.pull_cache, by_request(2, 1), "n", 1) == INVALID
        assert code(near.pull_cache, by_request(2, 1), "n", src_layers=(0, 1), dst_layers=(1, 2)) == INVALID
        assert code(near.pull_blocks, by_request(2, 1), "blocks", dst=[0, 1, 2]) == INVALID
        assert code(near.pull_blocks, by_request(2, 1), "blocks", dst=[0, 4]) == INVALID
    near.pull_cache(by_request(2, 1), "n")
    assert equal(near.read("n"), pattern(4, 2, 1, 64))


def test_prefix_keys_are_never_consumed(served: tuple[End, Peer]) -> None:
    near, far = served
    cache = far.allocate("f", 2, 64, 2, keys=[prefix(5), prefix(6)], seed=1)
    near.allocate("n", 1, 64, 2)
    near.allocate("b", 2, 64, 2, blocks=True)
    for _ in range(3):
        near.pull_cache(prefix(6), "n")
        assert equal(near.read("n"), [tensor[1:] for tensor in pattern(1, 2, 2, 64)])
        near.pull_blocks(prefix(5), "b", dst=[0])
        assert code(near.pull_cache, by_slot(2, cache, 1), "n") == OK
    far.deallocate("f")
    assert code(near.pull_cache, prefix(5), "n") == OK
    assert far.used() == 2 * PAGE
    far.remove_key(prefix(5))
    far.remove_key(prefix(6))
    assert far.used() == 0
    assert code(near.pull_cache, prefix(5), "n") == GONE


def test_a_request_and_a_prefix_of_one_number_are_two_keys(served: tuple[End, Peer]) -> None:
    near, far = served
    far.allocate("f", 2, 64, 2, keys=[by_request(2, 7), prefix(7)], seed=1)
    far.allocate("g", 1, 64, 2, keys=[by_request(2, 7, 3)], seed=2)
    near.allocate("n", 1, 64, 2)
    near.pull_cache(by_request(2, 7), "n")
    assert equal(near.read("n"), [tensor[:1] for tensor in pattern(1, 2, 2, 64)])
    near.pull_cache(prefix(7), "n")
    assert equal(near.read("n"), [tensor[1:] for tensor in pattern(1, 2, 2, 64)])
    near.pull_cache(by_request(2, 7, 3), "n")
    assert equal(near.read("n"), pattern(2, 2, 1, 64))
    assert code(near.pull_cache, by_request(2, 7), "n") == GONE
    assert code(near.pull_cache, by_request(2, 7, 3), "n") == GONE
    assert code(near.pull_cache, prefix(7), "n") == OK


def test_a_slot_pulled_into_blocks_consumes_blocks_do_not(served: tuple[End, Peer]) -> None:
    near, far = served
    far.allocate("s", 1, 64, 2, keys=[by_request(2, 1)])
    far.allocate("b", 4, 64, 2, blocks=True, keys=[by_blocks(2)])
    near.allocate("n", 4, 64, 2, blocks=True)
    assert code(near.pull_blocks, by_request(2, 1), "n", dst=[2]) == OK
    assert code(near.pull_blocks, by_request(2, 1), "n", dst=[2]) == GONE
    for _ in range(3):
        assert code(near.pull_blocks, by_blocks(2), "n", [1], [2]) == OK


def test_keys_of_registered_caches_stay(served: tuple[End, Peer]) -> None:
    near, far = served
    cache = far.register("f", 2, 64, 2, keys=[by_request(2, 1)], accessible=True, seed=1)
    near.allocate("n", 1, 64, 2)
    for key in (by_request(2, 1), by_slot(2, cache), by_request(2, 1)):
        assert code(near.pull_cache, key, "n") == OK
    far.remove_key(by_request(2, 1))
    assert code(near.pull_cache, by_request(2, 1), "n") == OK
    far.unregister("f")
    assert code(near.pull_cache, by_request(2, 1), "n") == GONE


def test_a_smaller_size_is_a_pull(served: tuple[End, Peer]) -> None:
    near, far = served
    far.allocate("f", 1, 64, 2, keys=[by_request(2, 1)])
    near.allocate("n", 1, 64, 2)
    near.pull_cache(by_request(2, 1), "n", 0, 1)
    assert code(near.pull_cache, by_request(2, 1), "n") == GONE


def test_parts_are_counted_for_each_key(served: tuple[End, Peer]) -> None:
    near, far = served
    cache = far.allocate("f", 2, 64, 6, keys=[by_request(2, 1), by_request(2, 2)])
    near.allocate("n", 1, 64, 6)
    near.allocate("b", 1, 64, 6, blocks=True)

    def part(key: tuple[object, ...], first: int, end: int) -> str:
        return code(near.pull_cache, key, "n", src_layers=(first, end), dst_layers=(first, end), n=1)

    first, second = by_request(2, 1), by_request(2, 2)
    assert part(first, 0, 2) == OK
    assert part(first, 0, 2) == OK, "the same part again completes nothing"
    assert part(second, 2, 6) == OK
    assert part(first, 1, 4) == OK
    assert part(second, 1, 4) == OK
    assert part(by_slot(2, cache, 0), 4, 5) == OK, "a part by slot counts for the key of the slot"
    assert code(near.pull_blocks, first, "b", dst=[0], src_layers=(5, 6), dst_layers=(0, 1), n=1) == OK
    assert part(first, 0, 1) == GONE
    assert part(second, 2, 6) == OK, "one tensor is still missing"
    assert part(second, 0, 1) == OK
    assert part(second, 0, 1) == GONE
    assert far.stats()["table"] == {"caches": 1, "keys": 0}


def test_a_whole_pull_after_parts_consumes(served: tuple[End, Peer]) -> None:
    near, far = served
    far.allocate("f", 1, 64, 4, keys=[by_request(2, 1)])
    far.deallocate("f")
    near.allocate("n", 1, 64, 4)
    assert code(near.pull_cache, by_request(2, 1), "n", src_layers=(0, 1), dst_layers=(0, 1)) == OK
    assert code(near.pull_cache, by_request(2, 1), "n") == OK
    assert far.used() == 0


def test_parts_of_an_earlier_bearer_of_a_key_do_not_count(served: tuple[End, Peer]) -> None:
    near, far = served
    near.allocate("n", 1, 64, 4)

    def part(layer: int) -> str:
        layers = (layer, layer + 1)
        return code(near.pull_cache, by_request(2, 1), "n", src_layers=layers, dst_layers=layers)

    far.allocate("f", 1, 64, 4, keys=[by_request(2, 1)])
    assert part(0) == OK
    far.remove_key(by_request(2, 1))
    far.allocate("g", 1, 64, 4, keys=[by_request(2, 1)])
    assert part(1) == OK
    assert part(0) == OK
    assert part(0) == GONE


def test_a_released_key_may_be_bound_again(served: tuple[End, Peer]) -> None:
    near, far = served
    near.allocate("n", 1, 64, 2)
    for number in range(5):
        far.allocate(f"f{number}", 1, 64, 2, keys=[by_request(2, 1)], seed=number)
        assert code(far.allocate, "x", 1, 64, 2, keys=[by_request(2, 1)]) == INVALID
        near.pull_cache(by_request(2, 1), "n")
        assert equal(near.read("n"), pattern(number, 2, 1, 64))
        assert code(near.pull_cache, by_request(2, 1), "n") == GONE


def test_of_pullers_that_race_for_a_key_one_wins(ends: Ends) -> None:
    far, other = ends.peer(cluster=2), ends.peer(cluster=3)
    near = ends.near()
    linked(near, far)
    linked(other, far)
    near.allocate("n0", 1, 64, 2)
    near.allocate("n1", 1, 64, 2)
    other.allocate("n0", 1, 64, 2)
    other.allocate("n1", 1, 64, 2)
    rounds = 500 if THOROUGH else 60
    for number in range(rounds):
        far.allocate("f", 1, 64, 2, keys=[by_request(2, number)], seed=number)
        far.deallocate("f")
        calls = [["pull_cache", [by_request(2, number), f"n{each}"], {}] for each in range(2)]
        away = other.begin("at_once", calls)
        here = near.at_once(calls)
        codes = here + away.result()
        assert sorted(codes) == [GONE, GONE, GONE, OK], (number, codes)
        winner = (near, other)[codes.index(OK) // 2].read(f"n{codes.index(OK) % 2}")
        assert equal(winner, pattern(number, 2, 1, 64))
        assert far.used() == 0


def test_threads_that_race_for_many_keys_share_them_out(served: tuple[End, Peer]) -> None:
    near, far = served
    count, threads = 60, 6
    far.allocate("f", count, 32, 1, keys=[by_request(2, number) for number in range(count)], seed=1)
    far.deallocate("f")
    won: list[list[int]] = [[] for _ in range(threads)]
    gate = threading.Barrier(threads)

    def work(number: int) -> None:
        gate.wait(LIMIT)
        for key in range(count):
            told = code(near.pull_cache, by_request(2, key), f"n{number}")
            assert told in {OK, GONE}
            if told == OK:
                won[number].append(key)

    for number in range(threads):
        near.allocate(f"n{number}", 1, 32, 1)
    crew = [threading.Thread(target=work, args=(number,)) for number in range(threads)]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join(LIMIT)
    assert sorted(key for keys in won for key in keys) == list(range(count))
    assert far.used() == 0


def test_remote_access_consumes_nothing(one_sided: tuple[End, Peer]) -> None:
    near, far = one_sided
    cache = far.allocate("f", 1, 64, 2, keys=[by_request(2, 1)], seed=1)
    near.allocate("n", 1, 64, 2)
    near.allocate("b", 1, 64, 2, blocks=True)
    for _ in range(3):
        assert code(near.pull_cache, by_slot(2, cache), "n") == OK
        assert code(near.pull_blocks, by_slot(2, cache), "b", dst=[0]) == OK
        assert code(near.pull_blocks, by_request(2, 1), "b", dst=[0]) == OK
        assert code(near.push_cache, by_slot(2, cache), "n") == OK
    far.deallocate("f")
    assert code(near.pull_blocks, by_request(2, 1), "b", dst=[0]) == OK, "the key holds it"
    assert far.used() == 2 * PAGE
    far.remove_key(by_request(2, 1))
    assert far.used() == 0
    assert code(near.pull_blocks, by_request(2, 1), "b", dst=[0]) == GONE


def test_a_prefix_is_pulled_with_remote_access_too(one_sided: tuple[End, Peer]) -> None:
    near, far = one_sided
    far.allocate("f", 2, 64, 2, keys=[by_request(2, UINT64_MAX), prefix(3)], seed=1)
    near.allocate("b", 1, 64, 2, blocks=True)
    near.pull_blocks(prefix(3), "b", dst=[0])
    assert equal(near.read("b"), [tensor[1:] for tensor in pattern(1, 2, 2, 64)])


# -- pushes: the key of the local slot --------------------------------------------------------------------------------


@pytest.mark.contract("19.double-reference", "19.pulls-and-keys")
def test_a_push_of_all_layers_releases_the_key_of_the_local_slot(one_sided: tuple[End, Peer]) -> None:
    near, far = one_sided
    cache = far.allocate("f", 2, 64, 4, seed=1)
    keys = [by_request(1, 1), by_request(1, 2), by_request(1, UINT64_MAX, 0, 9)]
    near.allocate("n", 3, 64, 4, keys=keys, seed=2)
    near.deallocate("n")
    held = near.used()
    assert held == 4 * PAGE
    assert code(near.push_cache, by_slot(2, cache), "n", 0, src_layers=(0, 1), dst_layers=(0, 1)) == OK
    assert near.stats()["table"] == {"caches": 1, "keys": 3}, "a part releases nothing"
    assert code(near.push_cache, by_slot(2, cache), "n", 0) == OK
    assert near.stats()["table"] == {"caches": 1, "keys": 2}
    assert code(near.push_cache, by_slot(2, cache), "n", 1, src_layers=(0, 2), dst_layers=(0, 2)) == OK
    assert near.stats()["table"] == {"caches": 1, "keys": 1}, "a range of all layers is all layers"


def test_a_failed_push_keeps_the_key(one_sided: tuple[End, Peer]) -> None:
    near, far = one_sided
    narrow, gone = far.allocate("narrow", 1, 63, 2), far.allocate("gone", 1, 64, 2)
    far.deallocate("gone")
    near.allocate("n", 1, 64, 2, keys=[by_request(1, 1)])
    assert code(near.push_cache, by_slot(2, narrow), "n") == INVALID
    assert code(near.push_cache, by_slot(2, gone), "n") == GONE
    assert near.stats()["table"] == {"caches": 1, "keys": 1}


def test_a_push_leaves_the_keys_of_the_peer_and_of_registered_memory(one_sided: tuple[End, Peer]) -> None:
    near, far = one_sided
    cache = far.allocate("f", 1, 64, 2, keys=[by_request(2, 1)])
    near.register("n", 1, 64, 2, keys=[by_request(1, 1)], accessible=True)
    assert code(near.push_cache, by_slot(2, cache), "n") == OK
    assert near.stats()["table"]["keys"] == 1
    assert far.stats()["table"]["keys"] == 1


def test_the_mode_of_both_ends_is_what_counts(ends: Ends) -> None:
    far = ends.peer(options())
    near = ends.near(options())
    linked(near, far)
    cache = far.allocate("f", 1, 64, 2, keys=[by_request(2, 1)])
    near.allocate("n", 1, 64, 2, keys=[by_request(1, 1)])
    assert code(near.push_cache, by_slot(2, cache), "n") == INVALID
    assert near.stats()["table"]["keys"] == far.stats()["table"]["keys"] == 1
