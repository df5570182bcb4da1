"""Two hosts: peers in separate network namespaces, with a virtual cable between them that can be disconnected.

Needs root and the programs `ip`, `unshare` and `nsenter`; without them, the tests are skipped. Not for: behaviour that
can be tested on one host.
"""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING, Any

import pytest

from network_namespaces import ADDRESSES, Hosts, possible
from peers import (
    GRACE,
    LINK_FAILED,
    OK,
    TIMEOUT,
    UNLINKED,
    Ends,
    by_blocks,
    check_pull,
    equal,
    eventually,
    free_ports,
    pattern,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

TOKEN = "a shared token of some length"  # noqa: S105
FURTHER = ("10.231.8.1", "10.231.8.2")


pytestmark = [pytest.mark.root, pytest.mark.skipif(not possible(), reason="this machine allows no network namespaces")]


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Ends() as ends:
        yield Hosts(ends)


@pytest.mark.parametrize(
    ("local_has", "remote_has", "expected"),
    [
        ({}, {}, LINK_FAILED),
        ({"llm__LinkToken": TOKEN}, {"llm__LinkToken": TOKEN[::-1]}, LINK_FAILED),
        ({"llm__LinkToken": TOKEN, "llm__LinkTransport": "shm"},) * 2 + (LINK_FAILED,),
        ({"llm__LinkAcceptRemote": 1},) * 2 + (OK,),
        ({"llm__LinkToken": TOKEN},) * 2 + (OK,),
        ({"llm__LinkToken": TOKEN, "llm__LinkTransport": "tcp", "accessible": True},) * 2 + (OK,),
    ],
    ids=["no token", "another token", "shared memory", "accepts other hosts", "token", "one-sided"],
)
def test_who_is_linked_and_over_what(
    hosts: Hosts, local_has: dict[str, Any], remote_has: dict[str, Any], expected: str
) -> None:
    local, remote = hosts.open(local_has, remote_has)
    assert local.link_clusters([remote.at])[1] == [expected]
    if expected != OK:
        assert local.links() == remote.links() == []
        assert local_has or "token" in local.said(), "the log names the reason"
        return
    check_pull(local, remote)
    check_pull(remote, local, 1, seed=2)
    assert [link["transport"] for link in local.links() + remote.links()] == ["tcp", "tcp"]
    if "accessible" in local_has:
        remote.allocate("f", 2, 64, 2, blocks=True, keys=[by_blocks(0)])
        local.allocate("n", 2, 64, 2, blocks=True, seed=3)
        local.push_blocks(by_blocks(2), "n", [0, 1], [0, 1])
        assert equal(remote.read("f"), pattern(3, 2, 2, 64))
    assert local.unlink_clusters([remote.at])[0] == OK
    assert remote.links() == []


def test_a_pulled_cable(hosts: Hosts) -> None:
    given = {
        "llm__LinkToken": TOKEN,
        "llm__LinkHeartbeat": 100,
        "llm__LinkSilence": 4000,
        "llm__SyncKvCacheWaitTime": 3000,
    }
    local, remote = hosts.open(given, given)
    assert local.link_clusters([remote.at])[1] == [OK]
    check_pull(local, remote)
    remote.allocate("f", 8, 30_000, 2, blocks=True, keys=[by_blocks(0)], seed=5)
    local.allocate("n", 8, 30_000, 2, blocks=True)
    hosts.plug(up=False)
    status, seconds, _ = local.timed("pull_blocks", by_blocks(2), "n", range(8), range(8))
    assert status in {TIMEOUT, UNLINKED}
    assert seconds < 3 + GRACE
    for end in (local, remote):
        eventually(lambda end=end: end.links() == [], what="the end of the link")  # type: ignore[misc]
    began = time.monotonic()
    assert local.link_clusters([remote.at], 300)[1][0] in {TIMEOUT, LINK_FAILED}
    assert time.monotonic() - began < 0.3 + GRACE
    hosts.plug(up=True)
    eventually(lambda: local.link_clusters([remote.at], 1000)[1] == [OK], what="the link")
    local.pull_blocks(by_blocks(2), "n", range(8), range(8))
    assert equal(local.read("n"), pattern(5, 2, 8, 30_000))


def test_two_networks_of_which_one_is_cut(hosts: Hosts) -> None:
    hosts.lay("second", FURTHER)
    given = {"llm__LinkToken": TOKEN, "llm__SyncKvCacheWaitTime": 3000, "pool": 32 << 20}
    local, remote = hosts.open(given, {**given, "llm__LinkAddresses": FURTHER[1]})
    assert local.link_clusters([remote.at])[1] == [OK]
    blocks, elements = 8, 1 << 20
    remote.allocate("f", blocks, elements, 2, blocks=True, keys=[by_blocks(0)], seed=5)
    local.allocate("n", blocks, elements, 2, blocks=True)
    pull = ("pull_blocks", by_blocks(2), "n", range(blocks), range(blocks))
    local.pull_blocks(*pull[1:])
    assert equal(local.read("n"), pattern(5, 2, blocks, elements))
    assert hosts.connected(1) == {ADDRESSES[1], FURTHER[1]}
    hosts.plug(up=False, cable="second")
    status, seconds, _ = local.timed(*pull)
    assert status == TIMEOUT
    assert seconds < 3 + GRACE
    local.pull_blocks(*pull[1:])
    assert equal(local.read("n"), pattern(5, 2, blocks, elements))
    assert hosts.connected(0) == {ADDRESSES[0]}


@pytest.mark.parametrize("numbered", [False, True])
def test_a_rank_table_of_two_servers(hosts: Hosts, numbered: bool) -> None:
    """Servers have addresses, or, in containers, numbers that `llm.RankHosts` maps to addresses."""
    ports = free_ports()
    given = {"llm__LinkToken": TOKEN, "llm__RankPort": ports}
    if numbered:
        given["llm__RankHosts"] = json.dumps({"1": f"{ADDRESSES[0]}:{ports}", "2": f"{ADDRESSES[1]}:{ports}"})
    local, remote = hosts.open(given, given)
    servers = [
        {"server_id": str(number) if numbered else address, "device": [{"device_id": "0", "rank_id": str(number)}]}
        for number, address in enumerate(ADDRESSES)
    ]
    table = json.dumps({"version": "1.0", "server_count": "2", "status": "completed", "server_list": servers})
    comms = local.link("pair", {1: 0, 2: 1}, table), remote.link("pair", {1: 0, 2: 1}, table)
    assert (local.final_state(comms[0]), remote.final_state(comms[1])) == ("OK", "OK")
    check_pull(local, remote)
    assert local.links()[0]["transport"] == "tcp"
