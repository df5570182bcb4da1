"""Links by rank table: either side first, any shape of table, a status that settles, and peers that come back.

By the rules of clients.md §3 and python-api.md §6.5 to §6.7. Not for: links by address (`test_links.py`).
"""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

from llm_datadist import LLMException, LLMStatusCode, RegisterMemStatus
from memory import AE, LE, TE, VE, Expected, raising
from peers import (
    GRACE,
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
    free_port,
    free_ports,
    linked,
    options,
    outcome,
    pattern,
)

PAUSE = 3.0 if THOROUGH else 0.6  # seconds that one side comes later
FEATURE = "LLM_FEATURE_NOT_ENABLED"


@pytest.fixture
def port() -> int:
    """The port of device 0, for every end of one test."""
    return free_ports()


def given(port: int, **extra: Any) -> dict[str, str]:
    """Options of an end of a rank-table link."""
    return options(**{"llm__RankPort": port, "llm__LinkTotalTime": 6, **extra})


def device(number: int, rank: int, **extra: str) -> dict[str, str]:
    """A device as clients write it; its address is nobody's."""
    return {"device_id": str(number), "device_ip": f"10.231.99.{number + 1}", "rank_id": str(rank), **extra}


def table(*devices: dict[str, str], server: str = "127.0.0.1", version: str = "1.2", **extra: Any) -> str:
    """The table of devices of one server."""
    servers = [{"server_id": server, "device": list(devices)}]
    return json.dumps({"version": version, "server_count": "1", "status": "completed", "server_list": servers, **extra})


PLAIN = table(device(0, 0), device(1, 1))
RANKS = {1: 0, 2: 1}


def both(near: Any, far: Any, name: str = "pair", text: str = PLAIN) -> tuple[int, int]:
    """Both ends enter a communicator, and it becomes OK."""
    comms = near.link(name, RANKS, text), far.link(name, RANKS, text)
    assert near.settled(comms[0]) == "OK"
    assert far.settled(comms[1]) == "OK"
    return comms


def moves(near: Any, far: Peer, seed: int = 1) -> None:
    """Bytes get across, in both directions."""
    for owner, puller, cluster in ((far, near, 2), (near, far, 1)):
        owner.allocate(f"o{seed}", 2, 64, 2, keys=[by_request(cluster, seed)], seed=seed)
        puller.allocate(f"p{seed}", 1, 64, 2)
        puller.pull_cache(by_request(cluster, seed), f"p{seed}")
        assert equal(puller.read(f"p{seed}"), [tensor[:1] for tensor in pattern(seed, 2, 2, 64)])


# -- order and time --------------------------------------------------------------------------------------------------


def test_preparing_until_the_other_comes_then_ok_for_ever(ends: Ends, port: int) -> None:
    far, near = ends.peer(given(port)), ends.near(given(port))
    comm = near.link("pair", RANKS, PLAIN)
    for _ in range(5):
        assert near.status(comm) == "PREPARING"
        time.sleep(0.02)
    assert near.dist.query_register_mem_status(comm) is RegisterMemStatus.PREPARING
    other = far.link("pair", RANKS, PLAIN)
    assert near.settled(comm) == "OK"
    assert far.settled(other) == "OK"
    assert [near.status(comm) for _ in range(3)] == ["OK"] * 3
    moves(near, far)


@pytest.mark.parametrize("near_first", [True, False])
@pytest.mark.parametrize("near_rank", [0, 1])
def test_either_side_comes_seconds_later(ends: Ends, port: int, near_first: bool, near_rank: int) -> None:
    ranks = {1: 0, 2: 1} if near_rank == 0 else {2: 0, 1: 1}
    far, near = ends.peer(given(port)), ends.near(given(port))
    comms: dict[bool, int] = {}
    for mine in (near_first, not near_first):
        comms[mine] = (near if mine else far).link("pair", ranks, PLAIN)
        if len(comms) == 1:
            time.sleep(PAUSE)
    assert near.settled(comms[True]) == far.settled(comms[False]) == "OK"
    moves(near, far)


def test_a_decoder_links_before_the_prefill_process_is_there(ends: Ends, port: int) -> None:
    near = ends.near(given(port))
    comm = near.link("pair", RANKS, PLAIN)
    time.sleep(PAUSE / 2)
    far = ends.peer(given(port))
    other = far.link("pair", RANKS, PLAIN)
    assert near.settled(comm) == far.settled(other) == "OK"
    moves(near, far)


def test_several_threads_link_at_once(ends: Ends, port: int) -> None:
    peers = {cluster: ends.peer(given(port), cluster=cluster) for cluster in (2, 3, 4)}
    near = ends.near(given(port))
    status: dict[int, str] = {}

    def link(cluster: int) -> None:
        ranks, text = {1: 0, cluster: 1}, table(device(0, 0), device(cluster, 1))
        away = peers[cluster].begin("link", f"pair {cluster}", ranks, text)
        if cluster == 3:
            time.sleep(0.2)
        comm = near.link(f"pair {cluster}", ranks, text)
        other = away.result()
        status[cluster] = near.settled(comm) + peers[cluster].settled(other)

    crew = [threading.Thread(target=link, args=(cluster,)) for cluster in peers]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join(LIMIT)
    assert status == dict.fromkeys(peers, "OKOK")
    near.allocate("n", 1, 64, 2)
    for cluster, peer in peers.items():
        peer.allocate("f", 1, 64, 2, keys=[by_request(cluster, 1)], seed=cluster)
        near.pull_cache(by_request(cluster, 1), "n")
        assert equal(near.read("n"), pattern(cluster, 2, 1, 64))


def test_three_clusters_in_one_communicator(ends: Ends, port: int) -> None:
    peers = [ends.peer(given(port), cluster=cluster) for cluster in (2, 3)]
    near = ends.near(given(port))
    ranks, text = {1: 0, 2: 1, 3: 2}, table(device(0, 0), device(1, 1), device(2, 2))
    comms = [(end, end.link("three", ranks, text)) for end in (peers[1], near, peers[0])]
    assert [end.settled(comm) for end, comm in comms] == ["OK"] * 3
    peers[1].allocate("f", 1, 64, 2, keys=[by_request(3, 1)], seed=1)
    for end in (near, peers[0]):
        end.allocate("n", 1, 64, 2)
    near.pull_cache(by_request(3, 1), "n")
    assert code(peers[0].pull_cache, by_request(3, 1), "n") == "LLM_KV_CACHE_NOT_EXIST"


def test_failed_in_bounded_time_without_a_peer(ends: Ends, port: int) -> None:
    near = ends.near(given(port, llm__LinkTotalTime=2, llm__LinkRetryCount=3))
    began = time.monotonic()
    comm = near.link("alone", RANKS, PLAIN)
    assert near.status(comm) == "PREPARING", "link returns before its search ends"
    assert near.settled(comm) == "FAILED"
    assert 1.5 < time.monotonic() - began < 2 + GRACE
    assert near.status(comm) == "FAILED", "for ever"
    near.allocate("n")
    told, text = outcome(lambda: near.pull_cache(by_request(2, 1), "n"))
    assert told == UNLINKED
    assert text
    near.unlink(comm)
    assert code(near.status, comm) == UNLINKED


def test_other_maps_or_names_do_not_meet(ends: Ends, port: int) -> None:
    limits = {"llm__LinkTotalTime": 1}
    far, near = ends.peer(given(port, **limits)), ends.near(given(port, **limits))
    comm, other = near.link("one name", RANKS, PLAIN), far.link("another", RANKS, PLAIN)
    assert near.settled(comm) == far.settled(other) == "FAILED"
    comm, other = near.link("map", RANKS, PLAIN), far.link("map", {2: 0, 1: 1}, PLAIN)
    assert near.settled(comm) == far.settled(other) == "FAILED"
    both(near, far)


def test_a_pull_while_preparing_waits(ends: Ends, port: int) -> None:
    limits = {"llm__SyncKvCacheWaitTime": 8000}
    far, near = ends.peer(given(port, **limits)), ends.near(given(port, **limits))
    far.allocate("f", 1, 64, 2, keys=[by_request(2, 1)], seed=1)
    near.allocate("n", 1, 64, 2)
    comm = near.link("pair", RANKS, PLAIN)
    late = threading.Timer(0.5, lambda: far.link("pair", RANKS, PLAIN))
    late.start()
    assert near.status(comm) == "PREPARING"
    near.pull_cache(by_request(2, 1), "n")
    late.join(LIMIT)
    assert equal(near.read("n"), pattern(1, 2, 1, 64))


@pytest.mark.parametrize("near_rank", [0, 1])
def test_pulls_that_wait_do_not_disturb_the_link_they_wait_for(ends: Ends, port: int, near_rank: int) -> None:
    ranks = {1: 0, 2: 1} if near_rank == 0 else {2: 0, 1: 1}
    limits = {"llm__SyncKvCacheWaitTime": 8000}
    far, near = ends.peer(given(port, **limits)), ends.near(given(port, **limits))
    key = [by_blocks(2)]
    far.allocate("f", 1, 64, 2, blocks=True, keys=key, seed=1)
    for number in range(4):
        near.allocate(f"n{number}", 1, 64, 2, blocks=True)
    calls = [["pull_blocks", [by_blocks(2), f"n{number}", [0], [0]], {}] for number in range(4)]
    for round_ in range(10):
        comm = near.link(f"pair {round_}", ranks, PLAIN)
        codes: list[str] = []
        waiting = threading.Thread(target=lambda codes=codes: codes.extend(near.at_once(calls)))
        waiting.start()
        time.sleep(0.02)
        other = far.link(f"pair {round_}", ranks, PLAIN)
        waiting.join(LIMIT)
        assert codes == [OK] * 4
        assert [link["transport"] for link in near.links()] == ["shm"]
        near.unlink(comm)
        far.unlink(other)


def test_a_pull_while_preparing_waits_no_longer_than_its_limit(ends: Ends, port: int) -> None:
    near = ends.near(given(port, llm__SyncKvCacheWaitTime=300))
    near.allocate("n", 1, 64, 2)
    near.link("alone", RANKS, PLAIN)
    told, seconds, text = near.timed("pull_cache", by_request(2, 1), "n")
    assert told == UNLINKED
    assert 0.25 < seconds < 0.3 + GRACE
    assert "2" in text


# -- numbers and unlinking -------------------------------------------------------------------------------------------


def test_comm_ids_count_up_and_are_no_status_code(ends: Ends, port: int) -> None:
    near = ends.near(given(port))
    comms = [near.link(f"comm {number}", RANKS, PLAIN) for number in range(20)]
    assert len(set(comms)) == 20
    assert comms == sorted(comms)
    assert not set(comms) & {int(status) for status in LLMStatusCode}
    assert all(type(comm) is int and comm > 0 for comm in comms)
    for comm in comms:
        near.unlink(comm)
        assert code(near.unlink, comm) == UNLINKED
        assert code(near.status, comm) == UNLINKED


def test_unlink_in_any_order(ends: Ends, port: int) -> None:
    far, near = ends.peer(given(port)), ends.near(given(port))
    near.allocate("n")
    for round_ in range(4):
        comms = both(near, far)
        moves(near, far, 10 + round_)
        for end, comm in ((near, comms[0]), (far, comms[1]))[:: 1 if round_ % 2 else -1]:
            end.unlink(comm)
        assert near.links() == far.links() == []
        assert code(near.pull_cache, by_request(2, 1), "n") == UNLINKED


def test_unlink_while_preparing(ends: Ends, port: int) -> None:
    far, near = ends.peer(given(port)), ends.near(given(port))
    comm = near.link("pair", RANKS, PLAIN)
    assert near.status(comm) == "PREPARING"
    began = time.monotonic()
    near.unlink(comm)
    assert time.monotonic() - began < GRACE
    assert code(near.status, comm) == UNLINKED
    both(near, far)
    moves(near, far)


def test_unlink_of_what_never_was(ends: Ends) -> None:
    near = ends.near()
    for comm in (0, 1, 2**64 - 1):
        assert code(near.unlink, comm) == UNLINKED
        assert code(near.status, comm) == UNLINKED


def test_two_communicators_between_one_pair(ends: Ends, port: int) -> None:
    far, near = ends.peer(given(port)), ends.near(given(port))
    first, second = both(near, far, "first"), both(near, far, "second")
    moves(near, far, 1)
    near.unlink(second[0])
    far.unlink(second[1])
    moves(near, far, 2)
    near.unlink(first[0])
    far.unlink(first[1])
    near.allocate("n")
    assert code(near.pull_cache, by_request(2, 9), "n") == UNLINKED


def test_finalize_leaves_communicators(ends: Ends, port: int) -> None:
    far, near = ends.peer(given(port)), ends.near(given(port))
    both(near, far)
    near.link("never", RANKS, PLAIN)
    near.finalize()
    eventually(lambda: far.links() == [])
    near.init(given(port))
    near.allocate("n")
    assert code(near.pull_cache, by_request(2, 1), "n") == UNLINKED


# -- peers that come back --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("near_rank", [0, 1])
@pytest.mark.parametrize("killed", [False, True])
def test_a_restarted_decoder_links_again_and_the_prefill_process_need_not(
    ends: Ends, port: int, near_rank: int, killed: bool
) -> None:
    ranks = {1: 0, 2: 1} if near_rank == 0 else {2: 0, 1: 1}
    near, far = ends.near(given(port)), ends.peer(given(port))
    comm, other = near.link("pair", ranks, PLAIN), far.link("pair", ranks, PLAIN)
    assert near.settled(comm) == far.settled(other) == "OK"
    moves(near, far)
    for round_ in range(2):
        if killed:
            far.kill()
            far = ends.peer(given(port))
        else:
            far.finalize()
            far.open(given(port))
        eventually(lambda: near.links() == [], what="the end of the old link")
        other = far.link("pair", ranks, PLAIN)
        assert far.settled(other) == "OK"
        assert near.status(comm) == "OK"
        eventually(lambda: len(near.links()) == 1)
        moves(near, far, 30 + round_)


# -- tables ----------------------------------------------------------------------------------------------------------


def _server(server: str, *devices: dict[str, str], **extra: str) -> dict[str, Any]:
    return {"server_id": server, "device": list(devices), **extra}


SHAPES = {
    "vllm-ascend": {
        "version": "1.2",
        "server_count": "1",
        "status": "completed",
        "server_list": [
            _server("192.0.2.77", device(0, 0, super_device_id="1"), device(1, 1, super_device_id="1")),
        ],
        "super_pod_list": [{"super_pod_id": "0", "server_list": [{"server_id": "192.0.2.77"}]}],
    },
    "MindIE, local device first": {
        "version": "1.0",
        "server_count": "1",
        "status": "completed",
        "server_list": [_server("1", device(1, 1), device(0, 0))],
    },
    "Mooncake": {
        "version": "1.0",
        "server_count": "1",
        "status": "completed",
        "server_list": [_server("127.0.0.1", device(4, 0, device_ip=""), device(5, 1, device_ip=""))],
    },
    "two entries of one server": {
        "version": "1.2",
        "server_count": "2",
        "status": "completed",
        "server_list": [_server("192.0.2.77", device(1, 1)), _server("192.0.2.77", device(0, 0))],
    },
    "two numbered servers with host_ip": {
        "version": "1.2",
        "server_count": "2",
        "status": "completed",
        "server_list": [
            _server("0", device(0, 0), host_ip="127.0.0.1"),
            _server("1", device(1, 1), host_ip="127.0.0.1"),
        ],
    },
    "nothing but ranks": {"server_list": [{"device": [{"rank_id": "0"}, {"rank_id": "1"}]}], "server_count": "1"},
    "unknown fields": {
        "version": "9",
        "server_count": "1",
        "colour": {"of": ["nothing"]},
        "server_list": [_server("127.0.0.1", device(0, 0, shape="round"), device(1, 1, eid="5"), extra="x")],
    },
    "the same device number": {
        "version": "1.2",
        "server_count": "1",
        "server_list": [_server("127.0.0.1", device(0, 0), device(0, 1))],
    },
}


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_shapes_of_tables(ends: Ends, port: int, shape: str, transport: str) -> None:
    chosen = given(port, llm__LinkTransport=transport)
    far, near = ends.peer(chosen), ends.near(chosen)
    text = json.dumps(SHAPES[shape])
    if transport == "tcp":
        text = text.replace("192.0.2.77", "127.0.0.1")  # no address of this host
    both(near, far, "pair", text)
    moves(near, far)
    assert near.links()[0]["transport"] == ("shm" if transport == "auto" else "tcp")


def test_device_ports(ends: Ends, port: int) -> None:
    far, near = ends.peer(given(port, llm__LinkTransport="tcp")), ends.near(given(port, llm__LinkTransport="tcp"))
    text = table(device(0, 0, device_port=str(free_port())), device(1, 1, device_port=str(free_port())))
    both(near, far, "pair", text)
    moves(near, far)


def test_hosts_by_option(ends: Ends, port: int) -> None:
    ports = free_port(), free_port()
    hosts = json.dumps({"1": f"127.0.0.1:{ports[0]}", "2": f"127.0.0.1:{ports[1]}"})
    chosen = given(port, llm__LinkTransport="tcp", llm__RankHosts=hosts)
    far, near = ends.peer(chosen), ends.near(chosen)
    text = json.dumps(
        {
            "server_count": "2",
            "server_list": [_server("203.0.113.1", device(0, 0)), _server("203.0.113.2", device(1, 1))],
        }
    )
    both(near, far, "pair", text)
    moves(near, far)


@pytest.mark.parametrize("words", [None, b"", b"220 another service\r\n"])
def test_ports_that_others_listen_at_are_got_round(ends: Ends, port: int, words: bytes | None) -> None:
    with Stranger(words, port), Stranger(words, port + 1):
        chosen = given(port, llm__LinkTransport="tcp")
        far, near = ends.peer(chosen), ends.near(chosen)
        both(near, far)
        moves(near, far)


# -- arguments and modes ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "expected"),
    [
        ((None, RANKS, PLAIN), TE),
        ((1, RANKS, PLAIN), TE),
        (("", RANKS, PLAIN), LE),
        (("x" * 128, RANKS, PLAIN), LE),
        (("x", None, PLAIN), AE),
        (("x", [1, 2], PLAIN), TE),
        (("x", {"1": 0, 2: 1}, PLAIN), TE),
        (("x", {1: "0", 2: 1}, PLAIN), TE),
        (("x", {True: 0, 2: 1}, PLAIN), TE),
        (("x", dict(zip(range(1, 6), range(5))), PLAIN), LE),
        (("x", {-1: 0, 1: 1}, PLAIN), VE),
        (("x", {2**64: 0, 1: 1}, PLAIN), VE),
        (("x", {1: -1, 2: 1}, PLAIN), VE),
        (("x", {1: 2**32, 2: 1}, PLAIN), VE),
        (("x", RANKS, 1), TE),
        (("x", RANKS, b"{}"), TE),
        (("x", {1: 0}, PLAIN), LE),
        (("x", {}, PLAIN), LE),
        (("x", {1: 1, 2: 0}, PLAIN), LE),
        (("x", {1: 0, 2: 0}, PLAIN), LE),
        (("x", {3: 0, 2: 1}, PLAIN), LE),
        (("x", RANKS, "no JSON"), LE),
        (("x", RANKS, "[]"), LE),
    ],
    ids=lambda value: str(value)[:60],
)
def test_arguments_of_link(ends: Ends, args: Any, expected: Expected) -> None:
    near = ends.near()
    with raising(expected):
        near.dist.link(*args)


@pytest.mark.parametrize("call", ["unlink", "query_register_mem_status"])
def test_arguments_of_a_comm_id(ends: Ends, call: str) -> None:
    near = ends.near()
    for wrong, expected in ((None, TE), ("1", TE), (1.0, TE), (True, TE), (-1, VE), (2**64, VE)):
        with raising(expected):
            getattr(near.dist, call)(wrong)


def test_registering_after_link(ends: Ends, port: int) -> None:
    chosen = given(port, accessible=True)
    far, near = ends.peer(chosen), ends.near(chosen)
    far.register("before", 1, 64, 2, seed=1)
    both(near, far)
    assert code(far.register, "x", 1, 64, 2, accessible=True) == INVALID
    late = far.register("late", 1, 64, 2)
    made = far.allocate("made", 1, 64, 2)
    near.allocate("n", 1, 64, 2)
    near.pull_cache(by_slot(2, 1), "n")
    assert equal(near.read("n"), pattern(1, 2, 1, 64))
    assert code(near.pull_cache, by_slot(2, late), "n") == INVALID
    assert code(near.pull_cache, by_slot(2, made), "n") == OK


def test_registering_explicitly_after_link_clusters_is_allowed(ends: Ends) -> None:
    near, far = ends.pair(accessible=True)
    far.register("f", 2, 64, 2, blocks=True, keys=[by_blocks(2)], accessible=True, seed=1)
    near.register("n", 2, 64, 2, blocks=True, accessible=True)
    near.pull_blocks(by_blocks(2), "n", [0, 1], [1, 0])
    assert equal(near.read("n"), [tensor[::-1] for tensor in pattern(1, 2, 2, 64)])


def test_link_and_link_clusters_side_by_side(ends: Ends, port: int) -> None:
    far, near = ends.peer(given(port)), ends.near(given(port))
    third = ends.peer(given(port), cluster=3)
    both(near, far)
    linked(near, third)
    moves(near, far)
    third.allocate("f", 1, 64, 2, keys=[by_request(3, 1)], seed=5)
    near.allocate("n3", 1, 64, 2)
    near.pull_cache(by_request(3, 1), "n3")
    assert equal(near.read("n3"), pattern(5, 2, 1, 64))


def test_the_pluggable_backend_has_no_rank_tables(ends: Ends) -> None:
    near = ends.near(options(accessible=True, listen="127.0.0.1:0", llm__TransferBackend="hixl"))
    assert code(near.link, "x", RANKS, PLAIN) == FEATURE
    assert code(near.unlink, 1) == FEATURE
    assert code(near.status, 1) == FEATURE


def test_modes_must_agree(ends: Ends, port: int) -> None:
    limits = {"llm__LinkTotalTime": 1}
    far, near = ends.peer(given(port, accessible=True, **limits)), ends.near(given(port, **limits))
    comm, other = near.link("pair", RANKS, PLAIN), far.link("pair", RANKS, PLAIN)
    assert near.settled(comm) == far.settled(other) == "FAILED"


def test_many_communicators_wait_at_once(ends: Ends, port: int) -> None:
    near = ends.near(given(port))
    comms = [near.link(f"comm {number}", RANKS, PLAIN) for number in range(512)]
    with pytest.raises(LLMException) as caught:
        near.link("one more", RANKS, PLAIN)
    assert caught.value.status_code == LLMStatusCode.LLM_PARAM_INVALID
    for comm in comms:
        near.unlink(comm)
    near.link("one more", RANKS, PLAIN)
