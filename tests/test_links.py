"""Links by address: results, peers and time limits of `link_clusters` and `unlink_clusters` (contract §6.8, §6.9).

The peers are real processes. Not for: transfers over a link (`test_pull.py`, `test_push.py`), links by rank table
(`test_rank_table.py`), admission (`test_link_security.py`), and peers that fail (`test_peer_faults.py`).
"""

from __future__ import annotations

import socket
import time

import pytest

from peers import (
    GRACE,
    INVALID,
    LINK_FAILED,
    OK,
    TIMEOUT,
    UNLINKED,
    Ends,
    Peer,
    Stranger,
    by_request,
    check_pull,
    code,
    eventually,
    linked,
    no_link,
    options,
    refusing_port,
    split,
    together,
)

ALREADY = "LLM_ALREADY_LINK"
EXISTS = "LLM_EXIST_LINK"


def dead(cluster: int) -> tuple[int, str]:
    return cluster, f"127.0.0.1:{refusing_port()}"


def answers(at: str) -> bool:
    try:
        socket.create_connection(split(at), timeout=2).close()
    except ConnectionRefusedError:
        return False
    return True


def test_one_code_for_each_and_the_last_failing_overall(ends: Ends) -> None:
    first, second = ends.peer(cluster=11), ends.peer(cluster=12)
    local = ends.local()
    twice = (5, [second.address, second.address])
    result = local.link_clusters([first.at, dead(3), twice, second.at])
    assert result == (INVALID, [OK, LINK_FAILED, INVALID, OK])
    assert sorted(link["cluster"] for link in local.links()) == [11, 12]
    assert local.link_clusters([twice, (6, None), dead(4), first.at]) == (
        ALREADY,
        [INVALID, INVALID, LINK_FAILED, ALREADY],
    )
    assert local.link_clusters([twice, dead(4)])[0] == LINK_FAILED
    assert local.unlink_clusters([first.at, (6, None), second.at]) == (INVALID, [OK, INVALID, OK])
    assert local.links() == []


def test_codes_of_links_with_the_backend_hixl(ends: Ends) -> None:
    backend = {"llm__TransferBackend": "hixl", "llm__EnableRemoteCacheAccessible": "1"}
    remote, local = ends.peer(options(**backend)), ends.local(options(llm__listenIpInfo="127.0.0.1:0", **backend))
    assert local.link_clusters([remote.at]) == (OK, [OK])
    assert local.link_clusters([remote.at]) == (ALREADY, [ALREADY])
    assert local.link_clusters([dead(3)]) == (LINK_FAILED, [LINK_FAILED])
    assert local.link_clusters([(3, remote.address)])[1] == [LINK_FAILED]


def test_another_engine_with_the_own_cluster_id_is_refused(ends: Ends) -> None:
    """No transfer could name that engine. A process may link to itself, as the contract has it."""
    remote, local = ends.peer(cluster=1), ends.peer(cluster=1)
    local.spoiled = True
    assert local.link_clusters([remote.at]) == (LINK_FAILED, [LINK_FAILED])
    assert local.links() == remote.links() == []
    assert "two engines cannot share an id" in local.said()
    assert local.link_clusters([local.at]) == (OK, [OK])


def test_twenty_clusters_in_one_call_with_dead_ones_among_them(ends: Ends) -> None:
    live = [ends.peer(cluster=101), ends.peer(cluster=120)]
    local = ends.local()
    with Stranger() as door:
        clusters = [(cluster, door.at) if cluster % 2 else dead(cluster) for cluster in range(102, 120)]
        began = time.monotonic()
        overall, codes = local.link_clusters([live[0].at, *clusters, live[1].at], 5000)
        assert time.monotonic() - began < 5 + GRACE, "dead peers waited for one after the other"
    expected = [OK, *(TIMEOUT if cluster % 2 else LINK_FAILED for cluster, _ in clusters), OK]
    assert codes == expected
    assert overall == expected[-2]
    assert sorted(link["cluster"] for link in local.links()) == [101, 120]


def test_a_cluster_linked_several_times_at_once_makes_one_link(ends: Ends) -> None:
    # So long that no answer to the question whether a link lives is late.
    patient = options(llm__LinkHeartbeat=5000, llm__LinkSilence=60_000)
    remote, local = ends.peer(patient), ends.local(patient)
    for _ in range(10):
        codes = local.link_clusters([remote.at, remote.at, remote.at])[1]
        assert codes.count(OK) == 1, codes
        assert set(codes) <= {OK, ALREADY, "LLM_PROCESSING_LINK", "LLM_REPEAT_REQUEST"}, codes
        assert len(local.links()) == len(remote.links()) == 1
        assert local.unlink_clusters([remote.at])[0] == OK
    codes = together(8, lambda _: local.link_clusters([remote.at])[1][0])
    assert codes.count(OK) == 1, codes
    assert len(local.links()) == len(remote.links()) == 1
    check_pull(local, remote)


def test_finalize_and_init_on_one_object_with_links_both_ways(ends: Ends) -> None:
    listening = options(listen="127.0.0.1:0")
    remote, other, local = ends.peer(), ends.peer(cluster=3), ends.local(listening)
    before = local.dist
    for _ in range(3):
        linked(local, remote)
        assert other.link_clusters([(1, local.listening())])[0] == OK
        check_pull(local, remote)
        local.finalize()
        no_link(remote)
        no_link(other)
        local.init(listening)
        assert local.dist is before
        assert local.links() == []
        assert local.allocate("first") == 1
        assert code(local.pull_cache, by_request(2, 1), "first") == UNLINKED


def test_switching_a_role_needs_no_links(ends: Ends) -> None:
    local, remote = ends.pair()
    assert code(local.switch_role, "PROMPT") == EXISTS
    assert code(remote.switch_role, "DECODER") == EXISTS
    assert answers(remote.address), "a refused switch stopped the listener"
    assert local.unlink_clusters([remote.at])[0] == OK
    no_link(remote)
    local.switch_role("PROMPT", {"llm.listenIpInfo": "127.0.0.1:0"})
    remote.switch_role("DECODER")
    assert remote.listening() is None
    assert not answers(remote.address)
    assert remote.link_clusters([(1, local.listening())])[0] == OK
    check_pull(remote, local, 1)


def test_ipv6(ends: Ends) -> None:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        pytest.skip("no IPv6 on this machine")
    remote, local = ends.peer(options(listen="[::1]:0")), ends.local()
    assert remote.address.startswith("[::1]:")
    linked(local, remote)
    check_pull(local, remote)
    assert local.unlink_clusters([remote.at])[0] == OK


@pytest.mark.parametrize(("asked", "named"), [("auto", "shm"), ("shm", "shm"), ("tcp", "tcp")])
def test_statistics_and_the_log_name_the_transport(ends: Ends, asked: str, named: str) -> None:
    remote = ends.peer(options(llm__LinkTransport=asked))
    local = ends.adopt(Peer(environment={"ASCEND_GLOBAL_LOG_LEVEL": "1"}))
    local.open(options(llm__LinkTransport=asked), cluster=3)
    linked(local, remote)
    (link,) = local.links()
    assert (link["cluster"], link["transport"], link["outgoing"]) == (2, named, True)
    assert link["address"]
    eventually(lambda: [link["transport"] for link in remote.links()] == [named])
    eventually(lambda: any(named in line and "2" in line for line in local.said().splitlines() if "INFO" in line))
