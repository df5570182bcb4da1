"""Calls about links without a peer: wrong arguments, roles, listeners, signals and forks.

Not for: wrong arguments of clusters and roles (`test_engine_calls.py`), links that come about (`test_links.py`).
"""

from __future__ import annotations

import logging
import socket
import time
from typing import Any, Callable

import pytest

from conftest import options
from llm_datadist import LLMClusterInfo, LLMDataDist, LLMRole, LLMStatusCode, RegisterMemStatus
from llm_datadist.native import InvalidArgument
from memory import AE, LE, TE, UINT32_MAX, UINT64_MAX, VE, Expected, raising, run_engine
from mistakes import Row, check, coded, fails, info
from peers import free_ports, one_server, refusing_port

SUCCESS, INVALID = LLMStatusCode.LLM_SUCCESS, LLMStatusCode.LLM_PARAM_INVALID
LINK_FAILED, NOT_LINKED = LLMStatusCode.LLM_LINK_FAILED, LLMStatusCode.LLM_NOT_YET_LINK
UNKNOWN = coded(NOT_LINKED)
NOT_ENABLED = coded(LLMStatusCode.LLM_FEATURE_NOT_ENABLED)
FAILED = coded(LLMStatusCode.LLM_FAILED)

V1 = {"ge.exec.deviceId": "0"}


@pytest.fixture
def begin(start: Callable[..., LLMDataDist]) -> Callable[..., LLMDataDist]:
    def with_role(role: LLMRole = LLMRole.PROMPT, settings: dict[str, str] | None = None, **extra: str) -> LLMDataDist:
        return start(options(None, None, **extra) if settings is None else settings, 1, role)

    return with_role


RANK_TABLE_CALLS: dict[str, Callable[[Any], Any]] = {
    "link": lambda dist: dist.link("name", {1: 0, 2: 1}, "{}"),
    "unlink": lambda dist: dist.unlink(1),
    "query_register_mem_status": lambda dist: dist.query_register_mem_status(1),
}


@pytest.mark.parametrize("name", RANK_TABLE_CALLS)
def test_rank_tables_need_the_cache_manager(name: str, begin: Callable[..., LLMDataDist]) -> None:
    dist = begin(settings=V1)
    fails(lambda: RANK_TABLE_CALLS[name](dist), LE, "EnableCacheManager")
    fails(lambda: getattr(dist, name)(*[None] * (3 if name == "link" else 1)), LE, "EnableCacheManager")


@pytest.mark.contract("20.11")
def test_link_arguments(begin: Callable[..., LLMDataDist]) -> None:
    link, members = begin().link, "cluster_rank_info"
    good = {"comm_name": "name", members: {1: 0, 2: 1}, "rank_table": "no json"}
    rows = [
        *[Row({"comm_name": bad}, TE, "comm_name") for bad in (["name"], True, None, b"name")],
        *[Row({"comm_name": bad}, LE, "comm_name") for bad in ("", "x" * 128)],
        Row({members: None}, AE),
        *[Row({members: bad}, TE, members) for bad in (1, "x", {1: None, 2: 1}, {True: 0, 2: 1}, {1: True, 2: 1})],
        *[Row({members: bad}, TE, members) for bad in ({-1: "0"}, [(1, 0), (2, 1)])],
        Row({members: {-number: number for number in range(1, 6)}}, LE, members),
        *[Row({members: bad}, VE, "uint64") for bad in ({-1: 0, 2: 1}, {1: 0, UINT64_MAX + 1: 1}, {-1: 0})],
        *[Row({members: bad}, VE, "uint32") for bad in ({1: -1, 2: 1}, {1: 0, 2: UINT32_MAX + 1})],
        *[Row({"rank_table": bad}, TE, "rank_table") for bad in (True, b"{}", {})],
        *[Row({members: bad}, LE, members) for bad in ({}, {1: 0})],
        *[Row({members: bad}, LE, "ascending") for bad in ({1: 1, 2: 0}, {1: 0, 2: 0}, {1: 0, 3: 2, 2: 1})],
        Row({members: {3: 0, 2: 1}}, LE, "must include this one"),
        Row({"rank_table": None}, TE, "rank_table"),
        *[Row({"rank_table": bad}, LE, "rank_table") for bad in ("", "{", "[]", '{"server_list": 5}')],
    ]
    check(link, good, rows)
    # Names and numbers at their limits are accepted, so that only the table is refused.
    for name in ("x", "x" * 127):
        fails(lambda name=name: link(name, {1: 0, 2: UINT32_MAX}, "no json"), LE, "rank_table")


def test_a_communicator_without_its_peer_is_preparing_and_can_be_left(begin: Callable[..., LLMDataDist]) -> None:
    dist = begin(llm__RankPort=str(free_ports()))
    manager = dist.cache_manager
    assert manager._is_call_linked is False
    first = dist.link("first", {1: 0, 2: 1}, one_server())
    assert manager._is_call_linked is True
    second = dist.link(comm_name="second", cluster_rank_info={1: 0, 2: 1}, rank_table=one_server())
    assert second == first + 1 > 1
    assert not {first, second} & {int(code) for code in LLMStatusCode}
    assert dist.query_register_mem_status(comm_id=first) is RegisterMemStatus.PREPARING
    dist.unlink(first)
    fails(lambda: dist.query_register_mem_status(first), UNKNOWN)
    fails(lambda: dist.unlink(comm_id=first), UNKNOWN)
    dist.unlink(second)


def test_addresses_put_into_the_lists_by_hand_are_judged_when_linking(begin: Callable[..., LLMDataDist]) -> None:
    dist = begin()
    entries: list[tuple[Any, Expected]] = [
        *[(bad, TE) for bad in (5, (1,), ("127.0.0.1", 1, 1), (None, 1), (1.0, 1), (1, "1"))],
        *[(bad, VE) for bad in ((2**32, 1), (-1, 1), (1, 2**16))],
        (("no address", 1), Expected("RuntimeError", (RuntimeError,))),
    ]
    for entry, expected in entries:
        peer = info(remote=0)
        peer.remote_ip_info_list.append(entry)
        with raising(expected):
            dist.link_clusters([peer])


def test_a_link_that_fails_raises_nothing_and_says_why(
    begin: Callable[..., LLMDataDist], caplog: pytest.LogCaptureFixture
) -> None:
    dist, port = begin(), refusing_port()
    caplog.set_level(logging.ERROR, logger="LLM_DATADIST")
    before = time.monotonic()
    overall, each = dist.link_clusters([info(UINT64_MAX, port=port)], 5000)
    assert (overall, each) == (LINK_FAILED, [LINK_FAILED])
    assert (type(overall), type(each)) == (LLMStatusCode, list)
    assert time.monotonic() - before < 4.5, "a refused connection is no reason to wait"
    (record,) = caplog.records
    assert all(text in record.getMessage() for text in (f"127.0.0.1:{port}", str(UINT64_MAX)))
    counted = dist.stats()["ops"]["link"]
    assert (counted["calls"], counted["failures"], dist.stats()["links"]) == (1, 1, [])


def test_how_many_own_addresses_a_link_takes(begin: Callable[..., LLMDataDist]) -> None:
    dist, port = begin(), refusing_port()
    assert dist.link_clusters([info(local=2), info(port=port)], timeout=2000) == (LINK_FAILED, [INVALID, LINK_FAILED])
    assert dist.link_clusters([info(3, port=port)] * 20)[1] == [LINK_FAILED] * 20, "more than 16 wait their turn"
    dist.finalize()
    # With communication resources, no local address is needed. An empty text counts as no resources.
    dist.init(options(None, None, llm__LocalCommRes='{"version": "1.3"}'))
    for local in (0, 1, 2):
        assert dist.link_clusters([info(local=local, port=port)]) == (LINK_FAILED, [LINK_FAILED])
    dist.finalize()
    dist.init(options(None, None, llm__LocalCommRes=""))
    fails(lambda: dist.link_clusters([info(local=0)]), LE, "local_ip_info_list is empty")


def test_unlinking_what_is_not_linked(begin: Callable[..., LLMDataDist]) -> None:
    dist = begin()
    for force in (True, None, False):
        assert dist.unlink_clusters([info(port=refusing_port())], 1000, force) == (SUCCESS, [SUCCESS])
    assert dist.unlink_clusters([info(remote=0, local=0)], force=True) == (SUCCESS, [SUCCESS])
    assert dist.unlink_clusters(clusters=(info(0), info(3)), timeout=1, force=True) == (SUCCESS, [SUCCESS] * 2)


def test_without_the_cache_manager_only_the_decoder_links(begin: Callable[..., LLMDataDist]) -> None:
    for role in (LLMRole.PROMPT, LLMRole.MIX):
        dist = begin(role, V1)
        assert dist.link_clusters([info()]) == (INVALID, [])
        dist.finalize()
    dist = begin(LLMRole.DECODER, V1)
    port = refusing_port()
    assert dist.link_clusters([info(port=port)], 2000) == (LINK_FAILED, [LINK_FAILED])
    assert dist.link_clusters([info(local=0, port=port)]) == (INVALID, [INVALID])
    exceeded = LLMStatusCode.LLM_CLUSTER_NUM_EXCEED_LIMIT
    assert dist.link_clusters([info(port=port)] * 17) == (exceeded, [])
    assert dist.unlink_clusters([info(port=port)] * 17) == (exceeded, [])
    assert dist.link_clusters([info(port=port)] * 16) == (LINK_FAILED, [LINK_FAILED] * 16)
    for call in (dist.link_clusters, dist.unlink_clusters):
        fails(lambda call=call: call([info(None)]), TE)
    assert dist.unlink_clusters([info(), info(3)]) == (SUCCESS, [NOT_LINKED] * 2)


@pytest.mark.parametrize("name", ["check_link_status", "unlink", "query_register_mem_status"])
def test_numbers_of_clusters_and_communicators(begin: Callable[..., LLMDataDist], name: str) -> None:
    dist = begin(LLMRole.DECODER, V1 if name == "check_link_status" else None)
    rows = [*[(bad, TE) for bad in (None, "1", 1.0, True)], (-1, VE), (UINT64_MAX + 1, VE)]
    for bad, expected in [*rows, *[(unknown, UNKNOWN) for unknown in (0, 1, 2, UINT64_MAX)]]:
        fails(lambda bad=bad: getattr(dist, name)(bad), expected)


def test_check_link_status_is_for_decoders_without_the_cache_manager(begin: Callable[..., LLMDataDist]) -> None:
    for settings in (None, V1):
        dist = begin(LLMRole.PROMPT, settings)
        fails(lambda dist=dist: dist.check_link_status(1), LE)
        dist.finalize()
    fails(lambda: begin(LLMRole.DECODER, V1).check_link_status(remote_cluster_id=2), UNKNOWN)


def listening(port: int = 0) -> dict[str, str]:
    return {"llm.listenIpInfo": f"127.0.0.1:{port}"}


def test_listen_ip_info_names_the_port_that_was_taken(begin: Callable[..., LLMDataDist]) -> None:
    dist = begin()
    assert dist.listen_ip_info is None
    dist.finalize()
    dist = begin(llm__listenIpInfo="127.0.0.1:0")
    host, _, port = dist.listen_ip_info.rpartition(":")
    assert host == "127.0.0.1"
    with socket.create_connection((host, int(port)), timeout=5):
        pass
    with pytest.raises(AttributeError):
        dist.listen_ip_info = "x"


def test_an_address_that_is_taken_fails_init_and_a_switch_changes_nothing(begin: Callable[..., LLMDataDist]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        settings = listening(taken.getsockname()[1])
        fails(lambda: begin(settings={**options(), **settings}), FAILED, settings["llm.listenIpInfo"])
        assert LLMDataDist.llm_engine_instance is None
        dist = begin(llm__listenIpInfo="127.0.0.1:0")
        before = dist.listen_ip_info
        fails(lambda: dist.switch_role(LLMRole.DECODER, settings), FAILED)
    assert dist.listen_ip_info == before
    assert dist._role is LLMRole.PROMPT


def test_without_the_cache_manager_switching_has_rules(begin: Callable[..., LLMDataDist]) -> None:
    dist = begin(LLMRole.DECODER, V1)
    rows = [((LLMRole.DECODER,), LE), ((LLMRole.PROMPT,), LE), ((LLMRole.PROMPT, listening()), NOT_ENABLED), ((2,), TE)]
    for given, expected in rows:
        fails(lambda given=given: dist.switch_role(*given), expected)
    dist.finalize()
    dist = begin(LLMRole.DECODER, {**V1, "llm.EnableSwitchRole": "1"})
    for given in ((LLMRole.PROMPT,), (LLMRole.PROMPT, None)):
        fails(lambda given=given: dist.switch_role(*given), LE)
        assert dist._role is LLMRole.DECODER
    dist.switch_role(LLMRole.PROMPT, listening())
    assert dist.listen_ip_info is not None
    dist.switch_role(LLMRole.DECODER)
    assert (dist.listen_ip_info, dist._role) == (None, LLMRole.DECODER)


def test_the_hixl_backend_has_no_rank_tables_and_keeps_its_address(begin: Callable[..., LLMDataDist]) -> None:
    dist = begin(llm__TransferBackend="hixl", llm__listenIpInfo="127.0.0.1:0")
    now = dist.listen_ip_info
    for call in RANK_TABLE_CALLS.values():
        fails(lambda call=call: call(dist), NOT_ENABLED)
    fails(lambda: dist.unlink("1"), TE)
    fails(lambda: dist.switch_role(LLMRole.DECODER, listening(free_ports(1))), NOT_ENABLED)
    assert dist._role is LLMRole.PROMPT
    for given in (None, {"llm.listenIpInfo": now}, listening()):
        dist.switch_role(LLMRole.DECODER, given)
        assert dist.listen_ip_info == now
    assert dist.unlink_clusters([info(remote=0)]) == (SUCCESS, [SUCCESS]), "always local"


def test_a_listener_without_a_token_is_noted(
    begin: Callable[..., LLMDataDist], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, logger="LLM_DATADIST")
    begin(llm__listenIpInfo="0.0.0.0:0")
    assert any("without a token" in record.getMessage() for record in caplog.records)


def unlogged(out: str) -> list[str]:
    return [line for line in out.splitlines() if not line.startswith("[ERROR]")]


def test_a_call_that_waits_is_ended_by_signals_and_lets_other_threads_run() -> None:
    """The handler raises an exception of its own. `test_peer_faults.py` has SIGINT without a handler."""
    out = run_engine(
        """
        import socket
        from concurrent.futures import ThreadPoolExecutor
        silent = socket.socket()
        silent.bind(("127.0.0.1", 0))
        silent.listen()
        dist, _ = engine()
        peer = LLMClusterInfo()
        peer.remote_cluster_id = 2
        peer.append_local_ip_info("127.0.0.1", 0)
        peer.append_remote_ip_info("127.0.0.1", silent.getsockname()[1])

        class Mine(Exception):
            pass

        def handler(*_):
            raise Mine

        signal.signal(signal.SIGALRM, handler)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.3)
            print(dist.link_clusters([peer], 30000))
        except Mine:
            print("mine")
        with ThreadPoolExecutor() as pool:
            waiting = pool.submit(dist.link_clusters, [peer], 5000)
            print(dist.stats()["table"]["caches"], waiting.done())
        print(waiting.result()[0])
        silent.close()
        dist.finalize()
        """
    )
    assert unlogged(out) == ["mine", "1 False", "LLMStatusCode.LLM_TIMEOUT"]


def test_a_signal_handler_may_use_the_engine_while_a_call_waits() -> None:
    out = run_engine(
        """
        import faulthandler
        faulthandler.dump_traceback_later(20, exit=True)
        dist, cache = engine()
        dist.link("name", {1: 0, 2: 1}, os.environ["TABLE"])
        seen = []

        def pull(cluster):
            try:
                dist.cache_manager.pull_cache(CacheKeyByIdAndIndex(cluster, 1), cache)
            except LLMException as error:
                seen.append(error.status_code.name)

        def handler(*_):
            seen.append(len(dist.stats()["links"]))
            pull(3)

        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        pull(2)
        print(*seen)
        dist.finalize()
        """,
        TABLE=one_server(),
        LLM_DATADIST_RANK_PORT=str(free_ports()),
    )
    assert unlogged(out) == ["0 LLM_NOT_YET_LINK LLM_NOT_YET_LINK"]


PORTS = "ip:port or [ipv6]:port with a port of {} to 65535"
WRONG_ADDRESSES = {
    "::1:26000": "; write an IPv6 address in brackets, such as [::1]:26000",
    "fe80::1": "; write an IPv6 address in brackets, such as [::1]:26000",
    "[::1]": "",
    "[fe80::1%eth0]:26000": "; zones such as %eth0 are not supported, so give an address that is not link-local",
    "localhost:26000": ", not a host name; names are not resolved, so give the IP address",
    "127.0.0.1:65536": "",
    "127.0.0.1:1;127.0.0.1:2": "",
    "127.0.0.1": "",
}


@pytest.mark.parametrize("address", [*WRONG_ADDRESSES, "127.0.0.1:0", "[::1]:0"])
def test_address_to_dial_says_what_is_wrong_with_it(begin: Callable[..., LLMDataDist], address: str) -> None:
    text = f'address="{address}" must be {PORTS.format(1)}{WRONG_ADDRESSES.get(address, "")}'
    with pytest.raises(InvalidArgument) as caught:
        begin().engine.link(address)
    assert (str(caught.value), caught.value.argument) == (text, "address")


FORM = "ip:port or [ipv6]:port, such as 127.0.0.1:26000 or [::1]:26000"
ONE_DEVICE = "must be one device number: an engine has one device, so set device_id to one number"
BACKENDS = "must be hixl or auto or sockets or ucx"


@pytest.mark.parametrize(
    ("key", "value", "text"),
    [
        *[("llm__listenIpInfo", wrong, FORM) for wrong in ("::1:26000", "[::1]")],
        *[
            ("llm__listenIpInfo", wrong, f'llm.listenIpInfo="{wrong}" must be an IP address{WRONG_ADDRESSES[wrong]}')
            for wrong in ("[fe80::1%eth0]:26000", "localhost:26000")
        ],
        ("llm__TransferBackend", "rdma", f'needs llm.listenIpInfo; besides, llm.TransferBackend="rdma" {BACKENDS}'),
        ("llm__TransferBackend", "sockets", "needs llm.listenIpInfo"),
        ("ge__exec__deviceId", "0;1", f'ge.exec.deviceId="0;1" {ONE_DEVICE}'),
    ],
)
def test_init_says_what_is_wrong_with_an_option(
    start: Callable[..., LLMDataDist], key: str, value: str, text: str
) -> None:
    fails(lambda: start(options(**{key: value})), LE, text)


def test_port_0_of_a_peer_is_an_argument_error(
    begin: Callable[..., LLMDataDist], caplog: pytest.LogCaptureFixture
) -> None:
    """Nobody listens at port 0, so the call does not dial it."""
    dist = begin()
    with caplog.at_level(logging.ERROR, logger="LLM_DATADIST"):
        assert dist.link_clusters([info(2, port=0)]) == (INVALID, [INVALID])
    assert "port=0 is out of range (1 to 65535)" in caplog.text
    assert "cluster=2" in caplog.text


@pytest.mark.parametrize(
    ("ip", "text"),
    [
        ("localhost", "host names are not resolved"),
        ("[::1]", "without brackets"),
        ("::1:26000:x", "without brackets, port and zone"),
        ("fe80::1%eth0", "zone"),
    ],
)
def test_ip_of_a_cluster_says_what_is_wrong_with_it(ip: str, text: str) -> None:
    with pytest.raises(RuntimeError, match=text):
        LLMClusterInfo().append_remote_ip_info(ip, 26000)
