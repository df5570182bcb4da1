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
from llm_datadist import (
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    RegisterMemStatus,
)
from llm_datadist.native import InvalidArgument
from memory import AE, LE, TE, UINT32_MAX, UINT64_MAX, VE, Expected, raising, run_fresh
from mistakes import Row, check, coded, fails, info
from peers import free_ports, refusing_port

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


TABLE = """{"version": "1.0", "server_count": "1", "status": "completed", "server_list": [{"server_id": "127.0.0.1",
 "device": [{"device_id": "0", "rank_id": "0"}, {"device_id": "1", "rank_id": "1"}]}]}"""


def test_a_communicator_without_its_peer_is_preparing_and_can_be_left(begin: Callable[..., LLMDataDist]) -> None:
    dist = begin(llm__RankPort=str(free_ports()))
    manager = dist.cache_manager
    assert manager._is_call_linked is False
    first = dist.link("first", {1: 0, 2: 1}, TABLE)
    assert manager._is_call_linked is True
    second = dist.link(comm_name="second", cluster_rank_info={1: 0, 2: 1}, rank_table=TABLE)
    assert second == first + 1 > 1
    assert not {first, second} & {int(code) for code in LLMStatusCode}
    assert dist.query_register_mem_status(comm_id=first) is RegisterMemStatus.PREPARING
    dist.unlink(first)
    with raising(UNKNOWN):
        dist.query_register_mem_status(first)
    with raising(UNKNOWN):
        dist.unlink(comm_id=first)
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
    with pytest.raises(LLMException, match="local_ip_info_list is empty"):
        dist.link_clusters([info(local=0)])


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
        with raising(TE):
            call([info(None)])
    assert dist.unlink_clusters([info(), info(3)]) == (SUCCESS, [NOT_LINKED] * 2)


def test_check_link_status(begin: Callable[..., LLMDataDist]) -> None:
    for settings in (None, V1):
        dist = begin(LLMRole.PROMPT, settings)
        fails(lambda dist=dist: dist.check_link_status(1), LE)
        dist.finalize()
    decoder = begin(LLMRole.DECODER, V1)
    rows = [*[(bad, TE) for bad in (None, "1", 1.0, True)], (-1, VE), (UINT64_MAX + 1, VE), (2, UNKNOWN)]
    for bad, expected in rows:
        fails(lambda bad=bad: decoder.check_link_status(remote_cluster_id=bad), expected)


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
        with pytest.raises(LLMException, match=settings["llm.listenIpInfo"]) as caught:
            begin(settings={**options(), **settings})
        FAILED.judge(caught.value)
        assert LLMDataDist.llm_engine_instance is None
        dist = begin(llm__listenIpInfo="127.0.0.1:0")
        before = dist.listen_ip_info
        with raising(FAILED):
            dist.switch_role(LLMRole.DECODER, settings)
    assert dist.listen_ip_info == before
    assert dist._role is LLMRole.PROMPT


def test_without_the_cache_manager_switching_has_rules(begin: Callable[..., LLMDataDist]) -> None:
    dist = begin(LLMRole.DECODER, V1)
    rows = [((LLMRole.DECODER,), LE), ((LLMRole.PROMPT,), LE), ((LLMRole.PROMPT, listening()), NOT_ENABLED), ((2,), TE)]
    for given, expected in rows:
        with raising(expected):
            dist.switch_role(*given)
    dist.finalize()
    dist = begin(LLMRole.DECODER, {**V1, "llm.EnableSwitchRole": "1"})
    for given in ((LLMRole.PROMPT,), (LLMRole.PROMPT, None)):
        with raising(LE):
            dist.switch_role(*given)
        assert dist._role is LLMRole.DECODER
    dist.switch_role(LLMRole.PROMPT, listening())
    assert dist.listen_ip_info is not None
    dist.switch_role(LLMRole.DECODER)
    assert (dist.listen_ip_info, dist._role) == (None, LLMRole.DECODER)


def test_the_hixl_backend_has_no_rank_tables_and_keeps_its_address(begin: Callable[..., LLMDataDist]) -> None:
    dist = begin(llm__TransferBackend="hixl", llm__listenIpInfo="127.0.0.1:0")
    now = dist.listen_ip_info
    for call in RANK_TABLE_CALLS.values():
        with raising(NOT_ENABLED):
            call(dist)
    with raising(TE):
        dist.unlink("1")
    with raising(NOT_ENABLED):
        dist.switch_role(LLMRole.DECODER, listening(free_ports(1)))
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
    out = run_fresh(
        """
import os, signal, socket, threading, time
from concurrent.futures import ThreadPoolExecutor
from llm_datadist import LLMClusterInfo, LLMDataDist, LLMRole
silent = socket.socket()
silent.bind(("127.0.0.1", 0))
silent.listen()
dist = LLMDataDist(LLMRole.PROMPT, 1)
dist.init({"llm.EnableCacheManager": "1"})
peer = LLMClusterInfo()
peer.remote_cluster_id = 2
peer.append_local_ip_info("127.0.0.1", 0)
peer.append_remote_ip_info("127.0.0.1", silent.getsockname()[1])
before = time.monotonic()
try:
    threading.Timer(0.5, os.kill, (os.getpid(), signal.SIGINT)).start()
    print(dist.link_clusters([peer], 30000))
except KeyboardInterrupt:
    print("interrupted")
assert time.monotonic() - before < 15

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
    assert unlogged(out) == ["interrupted", "mine", "0 False", "LLMStatusCode.LLM_TIMEOUT"]


def test_a_signal_handler_may_use_the_engine_while_a_call_waits() -> None:
    out = run_fresh(
        """
        import faulthandler, os, signal
        from llm_datadist import CacheDesc, CacheKeyByIdAndIndex, DataType, LLMDataDist, LLMException, LLMRole
        faulthandler.dump_traceback_later(20, exit=True)
        dist = LLMDataDist(LLMRole.PROMPT, 1)
        dist.init({"llm.EnableCacheManager": "1", "llm.MemPoolConfig": '{"memory_size": 1048576}'})
        manager = dist.cache_manager
        cache = manager.allocate_cache(CacheDesc(1, [4, 100], DataType.DT_INT8))
        dist.link("name", {1: 0, 2: 1}, os.environ["TABLE"])
        seen = []

        def handler(*_):
            seen.append(len(dist.stats()["links"]))
            try:
                manager.pull_cache(CacheKeyByIdAndIndex(3, 1), cache)
            except LLMException as error:
                seen.append(error.status_code.name)

        signal.signal(signal.SIGALRM, handler)
        signal.setitimer(signal.ITIMER_REAL, 0.3)
        try:
            manager.pull_cache(CacheKeyByIdAndIndex(2, 1), cache)
        except LLMException as error:
            seen.append(error.status_code.name)
        print(*seen)
        dist.finalize()
        """,
        TABLE=TABLE,
        LLM_DATADIST_RANK_PORT=str(free_ports()),
    )
    assert unlogged(out) == ["0 LLM_NOT_YET_LINK LLM_NOT_YET_LINK"]


def test_a_forked_child_is_told_and_holds_no_socket_of_its_parent() -> None:
    out = run_fresh(
        """
        import os, sys, warnings
        warnings.simplefilter("ignore", DeprecationWarning)
        from llm_datadist import BlocksCacheKey, CacheDesc, CacheKeyByIdAndIndex, DataType, LLMClusterInfo
        from llm_datadist import LLMDataDist, LLMException, LLMRole, LLMStatusCode

        def sockets():
            paths = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
            return {os.readlink(path) for path in paths if os.path.islink(path) and "socket:" in os.readlink(path)}

        dist = LLMDataDist(LLMRole.PROMPT, 1)
        before = sockets()
        options = {"llm.EnableCacheManager": "1", "llm.MemPoolConfig": '{"memory_size": 1048576}'}
        dist.init({**options, "llm.EnableRemoteCacheAccessible": "1", "llm.listenIpInfo": "127.0.0.1:0"})
        manager = dist.cache_manager
        desc = CacheDesc(1, [4, 100], DataType.DT_INT8)
        batch, blocks = manager.allocate_cache(desc), manager.allocate_blocks_cache(desc)
        peer = LLMClusterInfo()
        peer.remote_cluster_id = 2
        peer.append_local_ip_info("127.0.0.1", 0)
        peer.append_remote_ip_info("127.0.0.1", 1)
        assert sockets() - before
        child = os.fork()
        if child == 0:
            seen = [f"inherited {one}" for one in sockets() - before]
            for call in (
                lambda: dist.link("name", {1: 0, 2: 1}, "{}"),
                lambda: dist.unlink(1),
                lambda: dist.query_register_mem_status(1),
                lambda: dist.link_clusters([peer]),
                lambda: dist.unlink_clusters([peer]),
                lambda: dist.switch_role(LLMRole.DECODER),
                lambda: dist.listen_ip_info,
                lambda: dist.stats(),
                lambda: manager.pull_cache(CacheKeyByIdAndIndex(2, 1), batch),
                lambda: manager.pull_blocks(BlocksCacheKey(2), blocks, [0], [0]),
                lambda: manager.push_cache(CacheKeyByIdAndIndex(2, 1), batch, tensor_num_per_layer=1),
                lambda: manager.push_blocks(BlocksCacheKey(2), blocks, [0], [0], tensor_num_per_layer=1),
            ):
                try:
                    seen.append(f"accepted {call()}")
                except LLMException as error:
                    if error.status_code is not LLMStatusCode.LLM_FAILED or "forked" not in str(error):
                        seen.append(repr(error))
            dist.finalize()
            print(*seen, end="", flush=True)
            os._exit(len(seen))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        import socket
        host, _, port = dist.listen_ip_info.rpartition(":")
        socket.create_connection((host, int(port)), timeout=5).close()
        dist.finalize()
        print("parent")
        """
    )
    assert out.strip() == "parent"


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


@pytest.mark.parametrize("address", ["[fe80::1%eth0]:26000", "localhost:26000"])
def test_address_to_listen_at_says_what_is_wrong_with_it(start: Callable[..., LLMDataDist], address: str) -> None:
    with pytest.raises(LLMException) as caught:
        start(options(llm__listenIpInfo=address))
    assert WRONG_ADDRESSES[address] in str(caught.value)
    assert f'llm.listenIpInfo="{address}"' in str(caught.value)


@pytest.mark.parametrize("address", ["::1:26000", "[::1]"])
def test_form_of_an_ipv6_listener_is_shown(start: Callable[..., LLMDataDist], address: str) -> None:
    fails(
        lambda: start(options(llm__listenIpInfo=address)),
        LE,
        "ip:port or [ipv6]:port, such as 127.0.0.1:26000 or [::1]:26000",
    )


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


def test_unknown_transfer_backend_is_named_beside_the_listener_that_it_would_need(
    start: Callable[..., LLMDataDist],
) -> None:
    fails(
        lambda: start(options(llm__TransferBackend="rdma")),
        LE,
        'needs llm.listenIpInfo; besides, llm.TransferBackend="rdma" must be hixl or auto or sockets or ucx',
    )
    fails(lambda: start(options(llm__TransferBackend="sockets")), LE, "needs llm.listenIpInfo")


def test_several_devices_are_refused_with_the_reason(start: Callable[..., LLMDataDist]) -> None:
    config = LLMConfig()
    config.enable_cache_manager = True
    config.device_id = [0, 1]
    fails(
        lambda: start(config.generate_options()),
        LE,
        'ge.exec.deviceId="0;1" must be one device number: an engine has one device, so set device_id to one number',
    )
