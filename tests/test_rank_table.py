"""Links by rank table between processes: order of the calls, tables of clients, and peers that return.

Not for: links by address (`test_links.py`), wrong arguments (`test_link_arguments.py`), or what a table may contain
(`crates/core/tests/integration/rank_table.rs`).
"""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from peers import (
    INVALID,
    LIMIT,
    OK,
    THOROUGH,
    UNLINKED,
    Ends,
    Peer,
    Stranger,
    by_blocks,
    by_request,
    by_slot,
    code,
    equal,
    eventually,
    free_ports,
    one_server,
    options,
    outcome,
    pattern,
)

PAUSE = 3.0 if THOROUGH else 0.6  # seconds by which one side is later


@pytest.fixture
def port() -> int:
    """The port of device 0, for every end of one test."""
    return free_ports()


def given(port: int, **extra: Any) -> dict[str, str]:
    """Options of an end of a rank-table link."""
    return options(**{"llm__RankPort": port, "llm__LinkTotalTime": 60, **extra})


def opened(ends: Ends, port: int, **extra: Any) -> tuple[Peer, Any]:
    """Open the remote and the local end of a rank-table link, with the same options."""
    return ends.peer(given(port, **extra)), ends.local(given(port, **extra))


PLAIN = one_server()
RANKS = {1: 0, 2: 1}
either_rank = pytest.mark.parametrize("ranks", [RANKS, {2: 0, 1: 1}])


def both(local: Any, remote: Any, text: str = PLAIN, ranks: dict[int, int] = RANKS) -> tuple[int, int]:
    """Let both ends enter a communicator, and wait until it is OK."""
    comms = local.link("pair", ranks, text), remote.link("pair", ranks, text)
    assert local.final_state(comms[0]) == remote.final_state(comms[1]) == "OK"
    return comms


def moves(local: Any, remote: Peer, seed: int = 1) -> None:
    """Check that bytes are transferred in both directions."""
    for owner, puller, cluster in ((remote, local, 2), (local, remote, 1)):
        owner.allocate(f"o{seed}", 2, 64, 2, keys=[by_request(cluster, seed)], seed=seed)
        puller.allocate(f"p{seed}", 1, 64, 2)
        puller.pull_cache(by_request(cluster, seed), f"p{seed}")
        assert equal(puller.read(f"p{seed}"), [tensor[:1] for tensor in pattern(seed, 2, 2, 64)])


# -- order and time --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("local_first", [True, False])
@either_rank
def test_either_side_comes_seconds_later(ends: Ends, port: int, local_first: bool, ranks: dict[int, int]) -> None:
    remote, local = opened(ends, port)
    first, second = (local, remote) if local_first else (remote, local)
    comm = first.link("pair", ranks, PLAIN)
    time.sleep(PAUSE)
    assert first.status(comm) == "PREPARING"
    other = second.link("pair", ranks, PLAIN)
    assert first.final_state(comm) == second.final_state(other) == "OK"
    assert [first.status(comm) for _ in range(3)] == ["OK"] * 3
    moves(local, remote)


@either_rank
def test_pulls_wait_for_their_link_and_do_not_disturb_it(ends: Ends, port: int, ranks: dict[int, int]) -> None:
    remote, local = opened(ends, port, llm__SyncKvCacheWaitTime=8000)
    remote.allocate("f", 1, 64, 2, blocks=True, keys=[by_blocks(2)], seed=1)
    local.allocate("n", 1, 64, 2, blocks=True)
    with ThreadPoolExecutor() as pool:
        for number in range(3):
            comm = local.link(f"pair {number}", ranks, PLAIN)
            pulls = [pool.submit(code, local.pull_blocks, by_blocks(2), "n", [0], [0]) for _ in range(4)]
            other = remote.link(f"pair {number}", ranks, PLAIN)
            assert [pull.result(LIMIT) for pull in pulls] == [OK] * 4
            assert [link["transport"] for link in local.links()] == ["shm"]
            local.unlink(comm)
            remote.unlink(other)


def test_three_clusters_in_one_communicator(ends: Ends, port: int) -> None:
    peers = [ends.peer(given(port), cluster=cluster) for cluster in (2, 3)]
    local = ends.local(given(port))
    ranks, text = {1: 0, 2: 1, 3: 2}, one_server(members=3)
    comms = [(end, end.link("three", ranks, text)) for end in (peers[1], local, peers[0])]
    assert [end.final_state(comm) for end, comm in comms] == ["OK"] * 3
    peers[1].allocate("f", 1, 64, 2, keys=[by_request(3, 1)], seed=1)
    for end in (local, peers[0]):
        end.allocate("n", 1, 64, 2)
    local.pull_cache(by_request(3, 1), "n")
    assert code(peers[0].pull_cache, by_request(3, 1), "n") == "LLM_KV_CACHE_NOT_EXIST"


def test_without_a_peer_the_link_fails_and_can_be_left(ends: Ends, port: int) -> None:
    local = ends.local(given(port, llm__LinkTotalTime=5, llm__LinkRetryCount=3, llm__SyncKvCacheWaitTime=300))
    local.allocate("n")
    comm = local.link("alone", RANKS, PLAIN)
    assert local.status(comm) == "PREPARING", "link returns before its search ends"
    assert code(local.pull_cache, by_request(2, 1), "n") == UNLINKED
    assert local.status(comm) == "PREPARING", "the pull waits for its own limit only"
    assert local.final_state(comm) == "FAILED"
    told, text = outcome(lambda: local.pull_cache(by_request(2, 1), "n"))
    assert told == UNLINKED
    assert text
    local.unlink(comm)
    assert code(local.status, comm) == UNLINKED


def test_members_with_other_maps_do_not_meet(ends: Ends, port: int) -> None:
    remote, local = opened(ends, port, llm__LinkTotalTime=4)
    comm, other = local.link("map", RANKS, PLAIN), remote.link("map", {2: 0, 1: 1}, PLAIN)
    assert local.final_state(comm) == remote.final_state(other) == "FAILED"
    both(local, remote)


# -- peers that come back --------------------------------------------------------------------------------------------


@either_rank
@pytest.mark.parametrize("killed", [False, True])
def test_a_restarted_decoder_links_again_and_the_prefill_process_need_not(
    ends: Ends, port: int, ranks: dict[int, int], killed: bool
) -> None:
    remote, local = opened(ends, port)
    comm, _ = both(local, remote, ranks=ranks)
    moves(local, remote)
    for round_ in range(2):
        if killed:
            remote.kill()
            remote = ends.peer(given(port))
        else:
            remote.finalize()
            remote.open(given(port))
        eventually(lambda: local.links() == [], what="the end of the old link")
        other = remote.link("pair", ranks, PLAIN)
        assert remote.final_state(other) == "OK"
        assert local.status(comm) == "OK"
        eventually(lambda: len(local.links()) == 1)
        moves(local, remote, 30 + round_)


# -- addresses -------------------------------------------------------------------------------------------------------


def test_members_of_one_host_need_no_address_of_it(ends: Ends, port: int) -> None:
    remote, local = opened(ends, port)
    both(local, remote, one_server("192.0.2.77"))
    moves(local, remote)
    assert local.links()[0]["transport"] == "shm"


def test_rank_hosts_outrank_the_table(ends: Ends, port: int) -> None:
    hosts = json.dumps({str(cluster): f"127.0.0.1:{free_ports(1)}" for cluster in RANKS})
    remote, local = opened(ends, port, llm__LinkTransport="tcp", llm__RankHosts=hosts)
    both(local, remote, one_server("203.0.113.1"))
    moves(local, remote)


@pytest.mark.parametrize("words", [None, b"", b"220 another service\r\n"])
def test_ports_of_other_services_are_passed_over(ends: Ends, port: int, words: bytes | None) -> None:
    with Stranger(words, port), Stranger(words, port + 1):
        remote, local = opened(ends, port, llm__LinkTransport="tcp")
        both(local, remote)
        moves(local, remote)


# -- arguments and modes ---------------------------------------------------------------------------------------------


def test_registering_after_link(ends: Ends, port: int) -> None:
    remote, local = opened(ends, port, accessible=True)
    remote.register("before", 1, 64, 2, seed=1)
    both(local, remote)
    for blocks in (False, True):
        assert code(remote.register, "x", 1, 64, 2, blocks=blocks, accessible=True) == INVALID
        assert code(remote.register, f"private {blocks}", 1, 64, 2, blocks=blocks, accessible=False) == OK
    late = remote.register("late", 1, 64, 2)
    made = remote.allocate("made", 1, 64, 2)
    local.allocate("n", 1, 64, 2)
    local.pull_cache(by_slot(2, 1), "n")
    assert equal(local.read("n"), pattern(1, 2, 1, 64))
    assert code(local.pull_cache, by_slot(2, late), "n") == INVALID
    assert code(local.pull_cache, by_slot(2, made), "n") == OK


def test_many_communicators_wait_at_once(ends: Ends, port: int) -> None:
    local = ends.local(given(port))
    comms = [local.link(f"comm {number}", RANKS, PLAIN) for number in range(512)]
    assert code(local.link, "one more", RANKS, PLAIN) == INVALID
    for comm in comms:
        local.unlink(comm)
    local.link("one more", RANKS, PLAIN)
