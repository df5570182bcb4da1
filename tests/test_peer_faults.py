"""Peers that die, stop or fall silent: calls end in time with a code and a reason, and linking again works.

The tests use real processes and signals. LLM_DATADIST_SOAK is the number of rounds of the random kills. Not for: broken
connections (`test_peer_wires.py`), unauthenticated peers (`test_link_security.py`).
"""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import Any

import pytest

from peers import (
    GRACE,
    LIMIT,
    OK,
    SOAK,
    THOROUGH,
    TIMEOUT,
    UNLINKED,
    End,
    Ends,
    Peer,
    Refused,
    Stranger,
    by_blocks,
    by_request,
    by_slot,
    equal,
    eventually,
    free_ports,
    linked,
    no_link,
    one_server,
    options,
    pattern,
)

QUICK = {"llm__LinkHeartbeat": 100, "llm__LinkSilence": 4000}


def caches(local: Any, remote: Any) -> None:
    """Make a blocks cache of the peer, and the local cache that pulls write."""
    remote.allocate("f", 4, 5000, 2, blocks=True, keys=[by_blocks(0)], seed=1)
    local.allocate("n", 4, 5000, 2, blocks=True)


def works(local: Any) -> None:
    """Pull the blocks cache of the peer; its bytes must arrive."""
    local.pull_blocks(by_blocks(2), "n", range(4), range(4))
    assert equal(local.read("n"), pattern(1, 2, 4, 5000))


def test_kills_at_random_points_of_a_pull(ends: Ends, way: dict[str, Any]) -> None:
    """50 rounds, or LLM_DATADIST_SOAK, in each mode. Each round links to a new process with the same cluster id."""
    nursery = ends.spare()
    settings = options(pool=4 << 20, **way)
    local = ends.local({**settings, "llm.SyncKvCacheWaitTime": "3000"})
    rows, row_bytes = 8, 100_000
    local.allocate("batch", 1, row_bytes, 2)
    local.allocate("blocks", rows, row_bytes, 2, blocks=True)
    batch, blocks = pattern(1, 2, rows, row_bytes), pattern(2, 2, rows, row_bytes)
    chance = random.Random(4)  # noqa: S311
    before: dict[str, int] = {}
    for round_ in range(SOAK or 50):
        child, address = nursery.hatch({**settings, "llm.listenIpInfo": "127.0.0.1:0"}, 2, rows, row_bytes)
        assert local.link_clusters([(2, address)], 3000) == (OK, [OK]), round_
        delay = chance.choice([0, chance.random() * 0.002, chance.random() * 0.01])
        killer = threading.Timer(delay, os.kill, (child, signal.SIGKILL))
        killer.start()
        until = time.monotonic() + LIMIT
        told = OK
        while told == OK:
            assert time.monotonic() < until, "pulls go on from the dead"
            if chance.random() < 0.5:
                told, _ = local.within(3, "pull_blocks", by_blocks(2), "blocks", range(rows), range(rows))
                assert told != OK or equal(local.read("blocks"), blocks)
            else:
                told, _ = local.within(3, "pull_cache", by_slot(2, 1, 3), "batch")
                assert told != OK or equal(local.read("batch"), [tensor[3:4] for tensor in batch])
        killer.join()
        assert told == UNLINKED, round_
        no_link(local)
        told, text = local.within(0, "pull_blocks", by_blocks(2), "blocks", [0], [0])
        assert told == UNLINKED
        assert "cluster 2" in text
        assert "clos" in text or "broke" in text or "died" in text, text
        if round_ == 5:
            before = local.resources()

    def given_back() -> bool:
        return all(local.resources()[name] <= before[name] for name in ("threads", "descriptors"))

    eventually(given_back, what=f"at most {before}")
    assert local.resources()["mappings"] <= before["mappings"] + 20
    assert local.resources()["resident"] < before["resident"] + (16 << 20)


def test_a_child_of_a_dead_peer_does_not_keep_its_links_alive(ends: Ends) -> None:
    local = ends.local()
    for fork in (True, False):
        remote = ends.peer()
        linked(local, remote)
        child = remote.linger(fork)
        try:
            remote.kill()
            no_link(local)
        finally:
            os.kill(child, signal.SIGKILL)


def test_a_puller_that_dies_holds_no_memory_and_takes_no_key(ends: Ends, way: dict[str, Any]) -> None:
    local = ends.local(options(pool=8 << 20, listen="127.0.0.1:0", **way))
    size = 400_000
    for round_ in range(20 if THOROUGH else 3):
        keys = [by_request(1, number) for number in range(4)]
        cache = local.allocate("f", 4, size, 2, keys=keys, seed=round_)
        remote = ends.peer(options(pool=8 << 20, **way))
        assert remote.link_clusters([(1, local.listening())])[0] == OK
        remote.allocate("n", 1, size, 2)
        remote.begin("pull_cache", by_slot(1, cache, 3) if way["accessible"] else by_request(1, 3), "n")
        time.sleep(random.random() * 0.002)  # noqa: S311
        remote.kill()
        no_link(local)
        local.deallocate("f")
        assert local.used() > 0, "keys nobody pulled hold it"
        for key in keys:
            local.remove_key(key)
        eventually(lambda: local.used() == 0, what="the memory")


@pytest.mark.contract("19.sync-kv-timeout")
def test_a_served_pull_from_a_stopped_peer_times_out_and_keeps_the_key(ends: Ends, transport: str) -> None:
    local, remote = ends.pair(llm__LinkTransport=transport, llm__SyncKvCacheWaitTime=2000)
    remote.allocate("f", 1, 64, 2, keys=[by_request(2, 1)], seed=1)
    local.allocate("n", 1, 64, 2, seed=2)
    with remote.stopped():
        told, seconds, text = local.timed("pull_cache", by_request(2, 1), "n")
        assert told == TIMEOUT
        assert 1.95 < seconds < 2 + GRACE
        assert "2" in text
        began = time.monotonic()
        assert local.at_once([["pull_cache", [by_request(2, 1), "n"], {}]] * 16) == [TIMEOUT] * 16
        assert time.monotonic() - began < 2 + 2 * GRACE, "one waited for the other"
    assert equal(local.read("n"), pattern(2, 2, 1, 64))
    time.sleep(0.1)
    local.unlink_clusters([remote.at], 2000, force=True)
    remote.unlink_clusters([(1, None)], 2000, force=True)
    linked(local, remote)
    local.pull_cache(by_request(2, 1), "n")  # the pulls that failed have not released the key
    assert equal(local.read("n"), pattern(1, 2, 1, 64))


def test_one_sided_calls_to_a_stopped_peer_end(ends: Ends, transport: str) -> None:
    limits = {"llm__SyncKvCacheWaitTime": 2000, "llm__LinkSilence": 60_000}
    local, remote = ends.pair(accessible=True, llm__LinkTransport=transport, **limits)
    caches(local, remote)
    cold = remote.allocate("cold", 1, 64, 2)
    local.allocate("n1", 1, 64, 2)
    works(local)
    with remote.stopped():
        told, _ = local.within(2, "pull_blocks", by_blocks(2), "n", [0], [0])
        assert told in ({OK} if transport == "auto" else {OK, TIMEOUT}), "it takes no part in it"
        assert local.within(2, "pull_cache", by_slot(2, cold), "n1")[0] == TIMEOUT, "nobody tells where it lies"
        assert local.within(2, "push_blocks", by_blocks(2), "n", [0], [0])[0] == TIMEOUT, "a push needs the peer"
        began = time.monotonic()
        (told,) = local.unlink_clusters([remote.at], 400)[1]
        assert time.monotonic() - began < 0.4 + GRACE
        assert told in {TIMEOUT, "LLM_UNLINK_FAILED"}
        assert local.unlink_clusters([remote.at], 400, force=True)[1] == [OK]
    eventually(lambda: local.link_clusters([remote.at])[1][0] == OK, what="the link")


@pytest.mark.parametrize("rows", [4, 40], ids=["40 KB", "400 KB"])
def test_a_push_that_timed_out_is_not_carried_out_when_the_peer_goes_on(ends: Ends, transport: str, rows: int) -> None:
    """Also if the socket of the stopped peer already has the request and all bytes."""
    local, remote = ends.pair(accessible=True, llm__LinkTransport=transport, llm__SyncKvCacheWaitTime=2000)
    remote.allocate("f", rows, 5000, 2, blocks=True, keys=[by_blocks(0)], seed=1)
    local.allocate("n", rows, 5000, 2, blocks=True, seed=2)
    local.allocate("again", rows, 5000, 2, blocks=True)
    local.pull_blocks(by_blocks(2), "again", range(rows), range(rows))
    with remote.stopped():
        assert local.within(2, "push_blocks", by_blocks(2), "n", range(rows), range(rows))[0] == TIMEOUT
    time.sleep(0.2)
    assert equal(remote.read("f"), pattern(1, 2, rows, 5000)), "a push of which nobody waited for the end"
    eventually(lambda: local.link_clusters([remote.at])[1][0] in {OK, "LLM_ALREADY_LINK"}, what="the link")
    local.push_blocks(by_blocks(2), "n", range(rows), range(rows))
    assert equal(remote.read("f"), pattern(2, 2, rows, 5000))


@pytest.mark.parametrize(("accessible", "transport"), [(False, "auto"), (True, "tcp")])
def test_a_silent_peer_breaks_the_link_and_comes_back(ends: Ends, accessible: bool, transport: str) -> None:
    local, remote = ends.pair(accessible=accessible, llm__LinkTransport=transport, **QUICK)
    caches(local, remote)
    works(local)
    time.sleep(4.5)  # longer than the silence that breaks a link
    assert len(local.links()) == len(remote.links()) == 1, "a living peer is not silent"
    with remote.stopped():
        began = time.monotonic()
        no_link(local)
        assert time.monotonic() - began > 0.2
        told, text = local.within(0, "pull_blocks", by_blocks(2), "n", [0], [0])
        assert told == UNLINKED
        assert "cluster 2" in text
        assert "ms" in text or "silen" in text, text
        assert local.link_clusters([remote.at], 300)[1] == [TIMEOUT]
    eventually(lambda: local.link_clusters([remote.at])[1][0] == OK, what="the link")
    works(local)
    eventually(lambda: len(remote.links()) == 1)


def test_finalize_with_a_stopped_peer_ends(pair: tuple[End, Peer]) -> None:
    caches(*pair)
    works(pair[0])
    with pair[1].stopped():
        assert pair[0].within(3, "finalize")[0] == OK


def interrupted(user: Peer, *call: Any) -> None:
    """Send SIGINT while a call waits. The call must end with `KeyboardInterrupt`."""
    answer = user.begin(*call)
    time.sleep(1.5)  # a signal before the call would end the wait for the command
    user.signal(signal.SIGINT)
    with pytest.raises(Refused) as caught:
        answer.result(GRACE)
    assert caught.value.kind == "KeyboardInterrupt", str(caught.value)


def test_ctrl_c_ends_calls_that_wait(ends: Ends) -> None:
    """Covers a pull from a stopped peer, `link_clusters`, and a pull that waits for a link of a communicator."""
    settings = options(llm__SyncKvCacheWaitTime=60000, llm__RankPort=free_ports())
    remote, user = ends.peer(settings), ends.peer(settings, cluster=3)
    linked(user, remote)
    caches(user, remote)
    with remote.stopped():
        interrupted(user, "pull_blocks", by_blocks(2), "n", [0], [0])
    user.unlink_clusters([remote.at], 2000, force=True)
    with Stranger() as door:
        interrupted(user, "link_clusters", [(9, door.at)], 60000)
    comm = user.link("alone", {3: 0, 4: 1}, one_server())
    interrupted(user, "pull_blocks", by_blocks(4), "n", [0], [0])
    assert user.status(comm) == "PREPARING"
    user.unlink(comm)
    linked(user, remote)
    works(user)
