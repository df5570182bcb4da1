"""Connections of the module `hixl`: direction, codes, asynchronous ones, automatic ones, dead and restarted peers."""

from __future__ import annotations

import json
import os
import socket
import threading
from typing import TYPE_CHECKING, Any

import pytest

import hixl
from hixl_ends import LIMIT, Child, End, Pair, connected, ends, listener, paired, pattern, ready
from llm_datadist.native import Engine
from peers import eventually, together

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

every_way = pytest.mark.usefixtures("hixl_way")
READ, WRITE = 0, 1
AUTO = {hixl.OPTION_AUTO_CONNECT: "1"}


@pytest.fixture
def end() -> Iterator[End]:
    """A client with one registered page."""
    with ends(End) as (one,):
        ready(one)
        yield one


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A client and a target in another process, which are not connected."""
    with ends(End, Child) as both:
        yield paired(*both)


@pytest.fixture
def silent() -> Iterator[str]:
    """The address of a listener that never answers."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield f"127.0.0.1:{server.getsockname()[1]}"


def test_nobody_listens(end: End) -> None:
    assert end.call("connect", listener(), 5000) == hixl.FAILED
    assert end.call("connect", "127.0.0.1:0") == hixl.PARAM_INVALID
    assert end.call("disconnect", "127.0.0.1:9") == hixl.NOT_CONNECTED


def test_silent_listener_is_a_timeout(end: End, silent: str) -> None:
    assert end.call("connect", silent, 300) == hixl.TIMEOUT


def test_own_address_is_refused() -> None:
    with ends(End) as (end,):
        address = listener()
        ready(end, address)
        assert end.call("connect", address) == hixl.PARAM_INVALID
        assert end.call("disconnect", address) == hixl.NOT_CONNECTED


def test_engine_of_the_native_api_is_refused(end: End) -> None:
    with Engine(listen="127.0.0.1:0") as other:
        assert end.call("connect", other.address) == hixl.FAILED
        assert end.call("disconnect", other.address) == hixl.NOT_CONNECTED
        assert eventually(lambda: other.peers == [])


def test_limits(end: End) -> None:
    op = [hixl.TransferOpDesc(1, 1, 1)]
    for limit in (0, -1, -(2**31)):
        for method in ("connect", "disconnect", "connect_async", "disconnect_async"):
            assert end.call(method, "127.0.0.1:1", limit) == hixl.PARAM_INVALID
        assert end.call("transfer_sync", "127.0.0.1:1", hixl.READ, op, limit) == hixl.PARAM_INVALID
        assert end.call("send_notify", "127.0.0.1:1", hixl.NotifyDesc("", ""), limit) == hixl.PARAM_INVALID


def test_connect_twice_and_eight_at_once(pair: Pair) -> None:
    assert pair.connect() == hixl.SUCCESS
    assert pair.connect() == hixl.ALREADY_CONNECTED
    assert pair.disconnect() == hixl.SUCCESS
    assert pair.disconnect() == hixl.NOT_CONNECTED
    codes = together(8, lambda _: pair.connect())
    assert sorted(codes) == [hixl.SUCCESS] + [hixl.ALREADY_CONNECTED] * 7


def both_ways(a: Any, b: Any) -> tuple[Pair, Pair]:
    """Initialize two ends that listen, each a client of the other."""
    at_a, at_b = listener(), listener()
    memory_a, memory_b = ready(a, at_a, 1), ready(b, at_b, 2)
    return Pair(a, memory_a, b, memory_b, at_b), Pair(b, memory_b, a, memory_a, at_a)


@every_way
def test_connection_belongs_to_the_end_that_made_it() -> None:
    with ends(End, Child) as both:
        there, back = both_ways(*both)
        assert there.connect() == hixl.SUCCESS
        assert back.move(READ, (0, 0, 10)) == hixl.NOT_CONNECTED
        assert back.local.notify(back.address, "x", "y") == hixl.NOT_CONNECTED
        assert back.disconnect() == hixl.NOT_CONNECTED
        assert back.connect() == hixl.SUCCESS
        # Each ends only its own direction, several times and in both orders.
        for first, second in [(there, back), (back, there)] * 3:
            assert first.disconnect() == hixl.SUCCESS
            assert second.move(READ, (0, 0, 10)) == hixl.SUCCESS
            assert first.move(READ, (0, 0, 10)) == hixl.NOT_CONNECTED
            assert first.connect() == hixl.SUCCESS
            assert first.move(WRITE, (0, 0, 10)) == hixl.SUCCESS


@every_way
def test_both_connect_and_disconnect_at_once() -> None:
    """Whatever both ends do at the same time, a connection that was made works until it is ended."""
    with ends(End, End) as both:
        ways = both_ways(*both)
        codes = together(
            2,
            lambda number: {
                (ways[number].connect(), ways[number].move(READ, (0, 100, 10)), ways[number].disconnect())
                for _ in range(40)
            },
        )
        assert codes == [{(hixl.SUCCESS, hixl.SUCCESS, hixl.SUCCESS)}] * 2


@every_way
def test_restarted_target() -> None:
    with connected(End, Child) as pair, ends(Child) as (other,):
        address = listener()
        to_other = Pair(pair.local, pair.local_address, other, ready(other, address, 3), address)
        assert to_other.connect() == hixl.SUCCESS
        pair.remote.kill()
        with ends(Child) as (again,):
            pair.remote_address = ready(again, pair.address, 5)
            assert pair.disconnect() in (hixl.SUCCESS, hixl.NOT_CONNECTED)
            assert pair.connect() == hixl.SUCCESS
            assert pair.move(WRITE, (0, 0, 100)) == hixl.SUCCESS
            assert again.bytes("m")[:100] == bytes(100)
            assert to_other.move(READ) == hixl.SUCCESS
            assert pair.local.bytes("m") == pattern(3, 4096)


@every_way
def test_restarted_client() -> None:
    with ends(Child, Child, Child) as (target, client, other):
        address, mine = listener(), listener()
        pair = Pair(client, 0, target, ready(target, address, 1), address)
        for _ in range(4):
            pair.local_address = ready(client, mine)
            assert pair.connect() == hixl.SUCCESS
            assert pair.move(READ) == hixl.SUCCESS
            client.finalize()
        ready(client, mine)
        assert pair.connect() == hixl.SUCCESS
        client.kill()
        pair.local, pair.local_address = other, ready(other, mine)
        assert pair.connect() == hixl.SUCCESS
        assert pair.move(READ) == hixl.SUCCESS


@every_way
def test_asynchronous_connections(pair: Pair) -> None:
    end, address, dead = pair.local, pair.address, listener()
    state = end.engine.get_async_connect_status
    assert state(address) == (hixl.SUCCESS, hixl.NOT_CONNECT)
    for one in (address, dead):
        assert end.call("connect_async", one, LIMIT) == hixl.SUCCESS
    running = {hixl.CONNECT_PENDING, hixl.CONNECTING}
    assert eventually(lambda: state(address)[1] not in running)
    assert eventually(lambda: state(dead)[1] not in running)
    expected = {address: hixl.CONNECTED, dead: hixl.CONNECT_FAILED}
    assert end.engine.get_all_async_connect_status() == (hixl.SUCCESS, expected)
    assert pair.move(READ) == hixl.SUCCESS
    assert pair.connect() == hixl.ALREADY_CONNECTED
    assert end.call("connect_async", address) == hixl.SUCCESS
    assert eventually(lambda: state(address) == (hixl.SUCCESS, hixl.CONNECTED))
    for one in (address, dead):
        assert end.call("disconnect_async", one) == hixl.SUCCESS
    assert eventually(lambda: end.engine.get_all_async_connect_status() == (hixl.SUCCESS, {}))
    assert state(address) == (hixl.SUCCESS, hixl.NOT_CONNECT)
    assert pair.disconnect() == hixl.NOT_CONNECTED


def test_tasks_for_one_engine_run_in_order(pair: Pair) -> None:
    for method in ["connect_async", "disconnect_async"] * 20 + ["connect_async"]:
        assert pair.local.call(method, pair.address, LIMIT) == hixl.SUCCESS
    state = pair.local.engine.get_async_connect_status
    assert eventually(lambda: state(pair.address) == (hixl.SUCCESS, hixl.CONNECTED))
    assert pair.connect() == hixl.ALREADY_CONNECTED


@pytest.mark.parametrize("threads", [1, 2])
def test_states_of_asynchronous_connections(threads: int, silent: str) -> None:
    config = {hixl.OPTION_GLOBAL_RESOURCE_CONFIG: json.dumps({"connect_pool.thread_num": threads})}
    with ends(End, Child) as both:
        pair = paired(*both, options=config)
        end, address = pair.local, pair.address
        state = end.engine.get_async_connect_status
        assert end.call("connect_async", silent, 300_000) == hixl.SUCCESS
        assert eventually(lambda: state(silent) == (hixl.SUCCESS, hixl.CONNECTING))
        assert end.call("connect_async", address, LIMIT) == hixl.SUCCESS
        if threads == 1:
            assert state(address) == (hixl.SUCCESS, hixl.CONNECT_PENDING)
            assert end.call("disconnect_async", address, LIMIT) == hixl.SUCCESS
            expected = {silent: hixl.CONNECTING, address: hixl.DISCONNECT_PENDING}
            assert end.engine.get_all_async_connect_status() == (hixl.SUCCESS, expected)
            return
        assert eventually(lambda: state(address) == (hixl.SUCCESS, hixl.CONNECTED))
        assert state(silent) == (hixl.SUCCESS, hixl.CONNECTING)
        assert pair.move(WRITE, (0, 0, 1)) == hixl.SUCCESS  # so that the region is known here
        with pair.remote.stopped():
            pair.submit(WRITE, (0, 0, 8))  # a disconnection waits for transfers
            assert end.call("disconnect_async", address, 300_000) == hixl.SUCCESS
            assert eventually(lambda: state(address) == (hixl.SUCCESS, hixl.DISCONNECTING))
        assert eventually(lambda: state(address) == (hixl.SUCCESS, hixl.NOT_CONNECT))


def test_states_of_other_connections(pair: Pair) -> None:
    end, state = pair.local, pair.local.engine.get_async_connect_status
    assert pair.connect() == hixl.SUCCESS
    assert state(pair.address) == (hixl.SUCCESS, hixl.CONNECTED)
    assert end.engine.get_all_async_connect_status() == (hixl.SUCCESS, {})
    assert pair.disconnect() == hixl.SUCCESS
    assert state(pair.address) == (hixl.SUCCESS, hixl.NOT_CONNECT)
    for wrong in ("nowhere", "a\0b", ""):
        assert end.call("connect_async", wrong) == hixl.PARAM_INVALID
        assert state(wrong) == (hixl.SUCCESS, hixl.NOT_CONNECT)
    # No engine can listen at port 0.
    assert end.call("connect_async", "127.0.0.1:0") == hixl.SUCCESS
    assert eventually(lambda: state("127.0.0.1:0") == (hixl.SUCCESS, hixl.CONNECT_FAILED))


@every_way
def test_limits_of_one_millisecond(pair: Pair) -> None:
    """Each call ends with a result, and the next one with more time succeeds."""
    made, ended, queued = set(), set(), set()
    for _ in range(30):
        made.add(pair.connect(1))
        ended.add(pair.disconnect(1))
        queued |= {pair.local.call(method, pair.address, 1) for method in ("connect_async", "disconnect_async")}
    assert made <= {hixl.SUCCESS, hixl.TIMEOUT, hixl.ALREADY_CONNECTED}
    assert ended <= {hixl.SUCCESS, hixl.TIMEOUT, hixl.NOT_CONNECTED}
    assert queued == {hixl.SUCCESS}
    assert eventually(lambda: pair.local.engine.get_all_async_connect_status() == (hixl.SUCCESS, {}))
    assert pair.connect() in (hixl.SUCCESS, hixl.ALREADY_CONNECTED)
    assert pair.move(READ, limit=2**31 - 1) == hixl.SUCCESS
    assert pair.local.bytes("m") == pattern(1, 4096)


@pytest.mark.parametrize("nested", [False, True])
def test_full_queue_of_tasks(nested: bool, silent: str) -> None:
    fields = {"thread_num": 1, "task_queue_capacity": "1"}
    config = {"connect_pool": fields} if nested else {f"connect_pool.{name}": value for name, value in fields.items()}
    with ends(End) as (end,):
        ready(end, options={hixl.OPTION_GLOBAL_RESOURCE_CONFIG: json.dumps(config)})
        codes = [end.call("connect_async", silent, 300_000) for _ in range(10)]
        assert set(codes) == {hixl.SUCCESS, hixl.RESOURCE_EXHAUSTED}
        assert codes.count(hixl.SUCCESS) <= 2
        # The end does not wait for the limit of the task.
        closing = threading.Thread(target=end.finalize)
        closing.start()
        closing.join(60)
        assert not closing.is_alive()


@every_way
def test_auto_connect() -> None:
    with ends(End, Child, Child) as (end, target, again):
        address = listener()
        pair = Pair(end, ready(end, options=AUTO), target, 8, address)
        dead = pair.move(READ, (0, 0, 8), limit=500)
        assert dead in (hixl.NOT_CONNECTED, hixl.FAILED, hixl.TIMEOUT, hixl.PARAM_INVALID)
        status, request = end.submit(address, READ, pair.at((0, 0, 8)))
        assert status != hixl.SUCCESS
        assert request == 0
        pair.remote_address = ready(target, address, 1)
        assert end.notify(address, "a", "b") == hixl.NOT_CONNECTED
        assert pair.move(READ) == hixl.SUCCESS
        assert end.bytes("m") == pattern(1, 4096)
        assert pair.connect() == hixl.ALREADY_CONNECTED
        assert end.move(address, READ, [(pair.local_address, 8, 8)]) == hixl.PARAM_INVALID
        assert pair.connect() == hixl.ALREADY_CONNECTED
        target.kill()
        assert pair.move(READ, (0, 0, 8), limit=1000) != hixl.SUCCESS
        assert pair.disconnect() == hixl.NOT_CONNECTED
        pair.remote_address = ready(again, address, 7)
        assert eventually(lambda: pair.move(READ, limit=1000) == hixl.SUCCESS, 5)
        assert end.bytes("m") == pattern(7, 4096)


WATERLINES = {"GlobalResourceConfig": '{"channel_pool": {"high_waterline": 0.5, "low_waterline": "0.25"}}'}


@pytest.mark.parametrize("options", [AUTO, WATERLINES], ids=["auto", "waterlines"])
def test_lost_connections_of_transfers_that_connect_by_themselves(options: dict[str, str]) -> None:
    """An explicit connection is one, too. The engine removes it when the peer dies, without a transfer."""
    with ends(End, Child) as both:
        pair = paired(*both, options=options)
        assert pair.move(READ, (0, 0, 8)) == hixl.SUCCESS
        pair.reconnect()
        pair.submit(READ, (0, 0, 8))
        pair.remote.kill()
        state = pair.local.engine.get_async_connect_status
        assert eventually(lambda: state(pair.address) == (hixl.SUCCESS, hixl.NOT_CONNECT))
        assert pair.disconnect() == hixl.NOT_CONNECTED


def accepts(options: dict[str, str]) -> bool:
    """Whether an engine can be initialized with these options."""
    engine = hixl.Hixl()
    code = engine.initialize("127.0.0.1:0", options)
    engine.finalize()
    assert code in (hixl.SUCCESS, hixl.PARAM_INVALID)
    return code == hixl.SUCCESS


def with_file(path: Any) -> dict[str, str]:
    return {"GlobalResourceConfig": json.dumps({"local_comm_res_path": str(path)})}


# Each option takes a text of any length and content, and refuses it unless the text is a value.
TEXTS = ["", "\0", "0\0", "1\0", " ", "x", "-", ":", "{", "\ud800", "9" * (1 << 20), "{}" + "\0", "\0" * (1 << 20)]


@pytest.mark.parametrize("key", [getattr(hixl, name) for name in hixl.__all__ if name.startswith("OPTION_")])
def test_texts_that_are_no_values_of_options(key: str) -> None:
    for text in TEXTS:
        is_absent = key == hixl.OPTION_LOCAL_COMM_RES and not text
        assert accepts({key: text}) == is_absent, text[:9]
    for other in (key + "\0", "\0" + key, key.lower(), key * 10_000):
        assert not accepts({other: "1"})
    # An object that has refused options can still be initialized.
    with ends(End) as (end,):
        assert end.initialize("127.0.0.1:0", {key: "x"}) == hixl.PARAM_INVALID
        assert end.initialize("127.0.0.1:0") == hixl.SUCCESS


@pytest.mark.parametrize("key", [hixl.OPTION_LOCAL_COMM_RES, hixl.OPTION_GLOBAL_RESOURCE_CONFIG])
def test_options_of_a_mebibyte(key: str) -> None:
    longest = json.dumps({"unknown": "x" * ((1 << 20) - len(json.dumps({"unknown": ""})))})
    assert not accepts({key: longest + " "})
    assert accepts({key: longest})


def test_options() -> None:
    for options in ({"x": "1"}, {"AutoConnect": ""}, {"AutoConnect": "true"}, {"GlobalResourceConfig": "[]"}):
        assert not accepts(options), options
    every = {
        "EnableUseFabricMem": "0", "RdmaTrafficClass": "132", "RdmaServiceLevel": "4", "BufferPool": "0:0",
        "AutoConnect": "1", "LocalCommRes": '{"version": "1.3"}',
        "GlobalResourceConfig": '{"comm_resource_config.protocol_desc": "roce:host"}',
    }  # fmt: skip
    assert accepts(every)


@pytest.mark.parametrize(
    ("content", "accepted"),
    [
        (b'{"version": "1.3"}', True),
        (b"", False),
        (b"\xff", False),
        (b"1", False),
        (b"{}\0", False),
        (b"[]", False),
        (b" " * (1 << 20) + b"{", False),
        (b"{}" + b" " * ((1 << 20) - 2), True),
        (b"{}" + b" " * ((1 << 20) - 1), False),
    ],
    ids=lambda value: None if isinstance(value, bool) else str(len(value)),
)
def test_file_of_local_comm_res(tmp_path: Path, content: bytes, accepted: bool) -> None:
    path = tmp_path / "res.json"
    path.write_bytes(content)
    assert accepts(with_file(path)) == accepted
    assert accepts({**with_file(path), "LocalCommRes": ""}) == accepted, "an empty text is no value"
    assert accepts({**with_file(path), "LocalCommRes": "{}"}), "a value wins over the file"


def test_path_of_local_comm_res_is_relative_to_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "res.json").write_text("{}", encoding="utf-8")
    assert not accepts(with_file("res.json"))
    monkeypatch.chdir(tmp_path)
    assert accepts(with_file("res.json"))


def test_fifo_as_file_of_local_comm_res(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path, tmp_path / "missing"):
        assert not accepts(with_file(path))
