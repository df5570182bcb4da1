"""Connections of the module `hixl`: direction, codes, asynchronous ones, automatic ones, dead and restarted peers."""

from __future__ import annotations

import json
import os
import signal
import socket
import threading
from typing import Any

import pytest

import hixl
from hixl_ends import LIMIT, Child, End, ends, free_port, listener, pattern
from llm_datadist.native import Engine
from peers import eventually, together

every_way = pytest.mark.usefixtures("hixl_way")
AUTO = {hixl.OPTION_AUTO_CONNECT: "1"}


def ready(end: Any, address: str, seed: int | None = None, options: dict[str, str] | None = None) -> int:
    """Initialize an end with one registered page, and return its address."""
    address_of = end.add("m", 4096, seed)
    assert end.initialize(address, options) == hixl.SUCCESS
    assert end.register("m")[0] == hixl.SUCCESS
    return address_of


def test_nobody_listens() -> None:
    with ends(End) as (end,):
        ready(end, "127.0.0.1:0")
        assert end.call("connect", listener(), 5000) == hixl.FAILED
        assert end.call("connect", "127.0.0.1:0") == hixl.PARAM_INVALID
        assert end.call("disconnect", "127.0.0.1:9") == hixl.NOT_CONNECTED


def test_silent_listener_is_a_timeout() -> None:
    with ends(End) as (end,), socket.create_server(("127.0.0.1", 0)) as silent:
        ready(end, "127.0.0.1:0")
        assert end.call("connect", f"127.0.0.1:{silent.getsockname()[1]}", 300) == hixl.TIMEOUT


def test_own_address_is_refused() -> None:
    with ends(End) as (end,):
        address = listener()
        ready(end, address)
        assert end.call("connect", address) == hixl.PARAM_INVALID
        assert end.call("disconnect", address) == hixl.NOT_CONNECTED


def test_engine_of_the_native_api_is_refused() -> None:
    with ends(End) as (end,), Engine(listen="127.0.0.1:0") as other:
        ready(end, "127.0.0.1:0")
        assert end.call("connect", other.address) == hixl.FAILED
        assert end.call("disconnect", other.address) == hixl.NOT_CONNECTED
        assert eventually(lambda: other.peers == [])


def test_limits() -> None:
    with ends(End) as (end,):
        ready(end, "127.0.0.1:0")
        op = [hixl.TransferOpDesc(1, 1, 1)]
        for limit in (0, -1, -(2**31)):
            for method in ("connect", "disconnect", "connect_async", "disconnect_async"):
                assert end.call(method, "127.0.0.1:1", limit) == hixl.PARAM_INVALID
            assert end.call("transfer_sync", "127.0.0.1:1", hixl.READ, op, limit) == hixl.PARAM_INVALID
            assert end.call("send_notify", "127.0.0.1:1", hixl.NotifyDesc("", ""), limit) == hixl.PARAM_INVALID


def test_connect_twice_and_eight_at_once() -> None:
    with ends(End, Child) as (end, target):
        address = listener()
        ready(end, "127.0.0.1:0")
        ready(target, address)
        assert end.call("connect", address) == hixl.SUCCESS
        assert end.call("connect", address) == hixl.ALREADY_CONNECTED
        assert end.call("disconnect", address) == hixl.SUCCESS
        assert end.call("disconnect", address) == hixl.NOT_CONNECTED
        codes = together(8, lambda _: end.call("connect", address, LIMIT))
        assert sorted(codes) == [hixl.SUCCESS] + [hixl.ALREADY_CONNECTED] * 7


@every_way
def test_connection_belongs_to_the_end_that_made_it() -> None:
    with ends(End, Child) as (a, b):
        at_a, at_b = listener(), listener()
        memory_a, memory_b = ready(a, at_a, 1), ready(b, at_b, 2)
        assert a.call("connect", at_b) == hixl.SUCCESS
        assert b.move(at_a, 0, [(memory_b, memory_a, 10)]) == hixl.NOT_CONNECTED
        assert b.notify(at_a, "x", "y") == hixl.NOT_CONNECTED
        assert b.call("disconnect", at_a) == hixl.NOT_CONNECTED
        assert b.call("connect", at_a) == hixl.SUCCESS
        # Each ends only its own direction, several times and in both orders.
        for first, second in [((a, at_b), (b, at_a)), ((b, at_a), (a, at_b))] * 3:
            memory = {id(a): (memory_a, memory_b), id(b): (memory_b, memory_a)}
            assert first[0].call("disconnect", first[1]) == hixl.SUCCESS
            here, there = memory[id(second[0])]
            assert second[0].move(second[1], 0, [(here, there, 10)]) == hixl.SUCCESS
            here, there = memory[id(first[0])]
            assert first[0].move(first[1], 0, [(here, there, 10)]) == hixl.NOT_CONNECTED
            assert first[0].call("connect", first[1]) == hixl.SUCCESS
            assert first[0].move(first[1], 1, [(here, there, 10)]) == hixl.SUCCESS


@every_way
def test_both_connect_and_disconnect_at_once() -> None:
    """Whatever both ends do at the same time, a connection that was made works until it is ended."""
    with ends(End, End) as (a, b):
        at = {id(a): listener(), id(b): listener()}
        address_of = {id(a): ready(a, at[id(a)], 1), id(b): ready(b, at[id(b)], 2)}
        codes: list[tuple[int, int, int]] = []

        def work(number: int) -> None:
            me, other = ((a, b), (b, a))[number]
            for _ in range(40):
                made = me.call("connect", at[id(other)], LIMIT)
                moved = me.move(at[id(other)], 0, [(address_of[id(me)], address_of[id(other)] + 100, 10)])
                codes.append((made, moved, me.call("disconnect", at[id(other)], LIMIT)))

        together(2, work)
        assert set(codes) == {(hixl.SUCCESS, hixl.SUCCESS, hixl.SUCCESS)}


@every_way
def test_restarted_target() -> None:
    with ends(End, Child, Child) as (end, target, other):
        address, other_address = listener(), listener()
        address_of = ready(end, "127.0.0.1:0")
        ready(target, address, 1)
        remote = ready(other, other_address, 3)
        for one in (address, other_address):
            assert end.call("connect", one) == hixl.SUCCESS
        target.kill()
        with ends(Child) as (again,):
            remote_address = ready(again, address, 5)
            assert end.call("disconnect", address) in (hixl.SUCCESS, hixl.NOT_CONNECTED)
            assert end.call("connect", address, LIMIT) == hixl.SUCCESS
            assert end.move(address, 1, [(address_of, remote_address, 100)]) == hixl.SUCCESS
            assert again.bytes("m")[:100] == bytes(100)
            assert end.move(other_address, 0, [(address_of, remote, 4096)]) == hixl.SUCCESS
            assert end.bytes("m") == pattern(3, 4096)


@every_way
def test_restarted_client() -> None:
    with ends(Child, Child) as (target, client):
        address, mine = listener(), listener()
        address_of = ready(target, address, 1)
        for _ in range(3):
            local_address = ready(client, mine)
            assert client.call("connect", address, LIMIT) == hixl.SUCCESS
            assert client.move(address, 0, [(local_address, address_of, 4096)]) == hixl.SUCCESS
            client.finalize()
        ready(client, mine)
        assert client.call("connect", address, LIMIT) == hixl.SUCCESS
        client.kill()
        with ends(Child) as (other,):
            local_address = ready(other, mine)
            assert other.call("connect", address, LIMIT) == hixl.SUCCESS
            assert other.move(address, 0, [(local_address, address_of, 4096)]) == hixl.SUCCESS


@every_way
def test_many_writes_over_one_connection() -> None:
    with ends(End, Child) as (end, target):
        address = listener()
        local_address, remote_address = ready(end, "127.0.0.1:0", 1), ready(target, address)
        assert end.call("connect", address) == hixl.SUCCESS
        for k in range(250):
            assert end.move(address, 1, [(local_address + k, remote_address + k, 1)]) == hixl.SUCCESS
        assert target.bytes("m")[:250] == pattern(1, 4096)[:250]


@every_way
def test_asynchronous_connections() -> None:
    with ends(End, Child) as (end, target):
        address, dead = listener(), listener()
        local_address, remote_address = ready(end, "127.0.0.1:0"), ready(target, address, 1)
        state = end.engine.get_async_connect_status
        assert state(address) == (hixl.SUCCESS, hixl.NOT_CONNECT)
        for one in (address, dead):
            assert end.call("connect_async", one, LIMIT) == hixl.SUCCESS
        running = {hixl.CONNECT_PENDING, hixl.CONNECTING}
        assert eventually(lambda: state(address)[1] not in running)
        assert eventually(lambda: state(dead)[1] not in running)
        expected = {address: hixl.CONNECTED, dead: hixl.CONNECT_FAILED}
        assert end.engine.get_all_async_connect_status() == (hixl.SUCCESS, expected)
        assert end.move(address, 0, [(local_address, remote_address, 4096)]) == hixl.SUCCESS
        assert end.call("connect", address) == hixl.ALREADY_CONNECTED
        assert end.call("connect_async", address) == hixl.SUCCESS
        assert eventually(lambda: state(address) == (hixl.SUCCESS, hixl.CONNECTED))
        for one in (address, dead):
            assert end.call("disconnect_async", one) == hixl.SUCCESS
        assert eventually(lambda: end.engine.get_all_async_connect_status() == (hixl.SUCCESS, {}))
        assert state(address) == (hixl.SUCCESS, hixl.NOT_CONNECT)
        assert end.call("disconnect", address) == hixl.NOT_CONNECTED


def test_tasks_for_one_engine_run_in_order() -> None:
    with ends(End, Child) as (end, target):
        address = listener()
        ready(end, "127.0.0.1:0")
        ready(target, address)
        for _ in range(20):
            assert end.call("connect_async", address, LIMIT) == hixl.SUCCESS
            assert end.call("disconnect_async", address, LIMIT) == hixl.SUCCESS
        assert end.call("connect_async", address, LIMIT) == hixl.SUCCESS
        assert eventually(lambda: end.engine.get_async_connect_status(address) == (hixl.SUCCESS, hixl.CONNECTED))
        assert end.call("connect", address) == hixl.ALREADY_CONNECTED


@pytest.mark.parametrize("threads", [1, 2])
def test_states_of_asynchronous_connections(threads: int) -> None:
    config = {hixl.OPTION_GLOBAL_RESOURCE_CONFIG: json.dumps({"connect_pool.thread_num": threads})}
    with ends(End, Child) as (end, target), socket.create_server(("127.0.0.1", 0)) as silent:
        address, never = listener(), f"127.0.0.1:{silent.getsockname()[1]}"
        local_address, remote_address = ready(end, "127.0.0.1:0", None, config), ready(target, address)
        state = end.engine.get_async_connect_status
        assert end.call("connect_async", never, 300_000) == hixl.SUCCESS
        assert eventually(lambda: state(never) == (hixl.SUCCESS, hixl.CONNECTING))
        assert end.call("connect_async", address, LIMIT) == hixl.SUCCESS
        if threads == 1:
            assert state(address) == (hixl.SUCCESS, hixl.CONNECT_PENDING)
            assert end.call("disconnect_async", address, LIMIT) == hixl.SUCCESS
            expected = {never: hixl.CONNECTING, address: hixl.DISCONNECT_PENDING}
            assert end.engine.get_all_async_connect_status() == (hixl.SUCCESS, expected)
            return
        assert eventually(lambda: state(address) == (hixl.SUCCESS, hixl.CONNECTED))
        assert state(never) == (hixl.SUCCESS, hixl.CONNECTING)
        assert (
            end.move(address, 1, [(local_address, remote_address, 1)]) == hixl.SUCCESS
        )  # so that the region is known here
        target.signal(signal.SIGSTOP)
        try:
            # A disconnection waits for transfers.
            assert end.submit(address, 1, [(local_address, remote_address, 8)])[0] == hixl.SUCCESS
            assert end.call("disconnect_async", address, 300_000) == hixl.SUCCESS
            assert eventually(lambda: state(address) == (hixl.SUCCESS, hixl.DISCONNECTING))
        finally:
            target.signal(signal.SIGCONT)
        assert eventually(lambda: state(address) == (hixl.SUCCESS, hixl.NOT_CONNECT))


def test_states_of_other_connections() -> None:
    with ends(End, Child) as (end, target):
        address = listener()
        ready(end, "127.0.0.1:0")
        ready(target, address)
        state = end.engine.get_async_connect_status
        assert end.call("connect", address) == hixl.SUCCESS
        assert state(address) == (hixl.SUCCESS, hixl.CONNECTED)
        assert end.engine.get_all_async_connect_status() == (hixl.SUCCESS, {})
        assert end.call("disconnect", address) == hixl.SUCCESS
        assert state(address) == (hixl.SUCCESS, hixl.NOT_CONNECT)
        for wrong in ("nowhere", "a\0b", ""):
            assert end.call("connect_async", wrong) == hixl.PARAM_INVALID
            assert state(wrong) == (hixl.SUCCESS, hixl.NOT_CONNECT)
        # Nobody can listen there.
        assert end.call("connect_async", "127.0.0.1:0") == hixl.SUCCESS
        assert eventually(lambda: state("127.0.0.1:0") == (hixl.SUCCESS, hixl.CONNECT_FAILED))


@every_way
def test_limits_of_one_millisecond() -> None:
    """Each call ends with a result, and the next one with more time succeeds."""
    with ends(End, Child) as (end, target):
        address = listener()
        local_address, remote_address = ready(end, "127.0.0.1:0"), ready(target, address, 1)
        made, ended, queued = set(), set(), set()
        for _ in range(30):
            made.add(end.call("connect", address, 1))
            ended.add(end.call("disconnect", address, 1))
            queued |= {end.call(method, address, 1) for method in ("connect_async", "disconnect_async")}
        assert made <= {hixl.SUCCESS, hixl.TIMEOUT, hixl.ALREADY_CONNECTED}
        assert ended <= {hixl.SUCCESS, hixl.TIMEOUT, hixl.NOT_CONNECTED}
        assert queued == {hixl.SUCCESS}
        assert eventually(lambda: end.engine.get_all_async_connect_status() == (hixl.SUCCESS, {}))
        assert end.call("connect", address, LIMIT) in (hixl.SUCCESS, hixl.ALREADY_CONNECTED)
        assert end.move(address, 0, [(local_address, remote_address, 4096)], 2**31 - 1) == hixl.SUCCESS
        assert end.bytes("m") == pattern(1, 4096)


@pytest.mark.parametrize("nested", [False, True])
def test_full_queue_of_tasks(nested: bool) -> None:
    fields = {"thread_num": 1, "task_queue_capacity": "1"}
    config = {"connect_pool": fields} if nested else {f"connect_pool.{name}": value for name, value in fields.items()}
    with ends(End) as (end,), socket.create_server(("127.0.0.1", 0)) as silent:
        ready(end, "127.0.0.1:0", None, {hixl.OPTION_GLOBAL_RESOURCE_CONFIG: json.dumps(config)})
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        codes = [end.call("connect_async", address, 300_000) for _ in range(10)]
        assert set(codes) == {hixl.SUCCESS, hixl.RESOURCE_EXHAUSTED}
        assert codes.count(hixl.SUCCESS) <= 2
        # The end does not wait for the limit of the task.
        closing = threading.Thread(target=end.finalize)
        closing.start()
        closing.join(60)
        assert not closing.is_alive()


@every_way
def test_auto_connect() -> None:
    with ends(End, Child) as (end, target):
        address = listener()
        local_address = ready(end, "127.0.0.1:0", None, AUTO)
        dead = end.move(address, 0, [(local_address, 8, 8)], 500)
        assert dead in (hixl.NOT_CONNECTED, hixl.FAILED, hixl.TIMEOUT, hixl.PARAM_INVALID)
        status, request = end.submit(address, 0, [(local_address, 8, 8)])
        assert status != hixl.SUCCESS
        assert request == 0
        remote_address = ready(target, address, 1)
        assert end.notify(address, "a", "b") == hixl.NOT_CONNECTED
        assert end.move(address, 0, [(local_address, remote_address, 4096)]) == hixl.SUCCESS
        assert end.bytes("m") == pattern(1, 4096)
        assert end.call("connect", address) == hixl.ALREADY_CONNECTED
        assert end.move(address, 0, [(local_address, 8, 8)]) == hixl.PARAM_INVALID
        assert end.call("connect", address) == hixl.ALREADY_CONNECTED
        target.kill()
        assert end.move(address, 0, [(local_address, remote_address, 8)], 1000) != hixl.SUCCESS
        assert end.call("disconnect", address) == hixl.NOT_CONNECTED
        with ends(Child) as (again,):
            remote_address = ready(again, address, 7)
            assert eventually(
                lambda: end.move(address, 0, [(local_address, remote_address, 4096)], 1000) == hixl.SUCCESS, 5
            )
            assert end.bytes("m") == pattern(7, 4096)


WATERLINES = {"GlobalResourceConfig": '{"channel_pool": {"high_waterline": 0.5, "low_waterline": "0.25"}}'}


@pytest.mark.parametrize("options", [AUTO, WATERLINES], ids=["auto", "waterlines"])
def test_lost_connections_of_transfers_that_connect_by_themselves(options: dict[str, str]) -> None:
    """An explicit connection is one, too. The engine removes it when the peer dies, without a transfer."""
    with ends(End, Child) as (end, target):
        address = listener()
        local_address, remote_address = ready(end, "127.0.0.1:0", None, options), ready(target, address, 1)
        assert end.move(address, 0, [(local_address, remote_address, 8)]) == hixl.SUCCESS
        assert end.call("disconnect", address) == hixl.SUCCESS
        assert end.call("connect", address) == hixl.SUCCESS
        status, request = end.submit(address, 0, [(local_address, remote_address, 8)])
        assert (status, request > 0) == (hixl.SUCCESS, True)
        target.kill()
        assert eventually(lambda: end.engine.get_async_connect_status(address) == (hixl.SUCCESS, hixl.NOT_CONNECT))
        assert end.call("disconnect", address) == hixl.NOT_CONNECTED


# Each option takes a text of any length and content, and refuses it unless the text is a value.
TEXTS = ["", "\0", "0\0", "1\0", " ", "x", "-", ":", "{", "\ud800", "9" * (1 << 20), "{}" + "\0", "\0" * (1 << 20)]


@pytest.mark.parametrize("key", [getattr(hixl, name) for name in hixl.__all__ if name.startswith("OPTION_")])
def test_texts_that_are_no_values_of_options(key: str) -> None:
    with ends(End) as (end,):
        for text in TEXTS:
            is_absent = key == hixl.OPTION_LOCAL_COMM_RES and not text
            expected = hixl.SUCCESS if is_absent else hixl.PARAM_INVALID
            assert end.initialize("127.0.0.1:0", {key: text}) == expected, text[:9]
            end.finalize()
        for other in (key + "\0", "\0" + key, key.lower(), key * 10_000):
            assert end.initialize("127.0.0.1:0", {other: "1"}) == hixl.PARAM_INVALID
        assert end.initialize("127.0.0.1:0") == hixl.SUCCESS


@pytest.mark.parametrize("key", [hixl.OPTION_LOCAL_COMM_RES, hixl.OPTION_GLOBAL_RESOURCE_CONFIG])
def test_options_of_a_mebibyte(key: str) -> None:
    with ends(End) as (end,):
        longest = json.dumps({"unknown": ""})
        longest = json.dumps({"unknown": "x" * ((1 << 20) - len(longest))})
        assert end.initialize("127.0.0.1:0", {key: longest + " "}) == hixl.PARAM_INVALID
        assert end.initialize("127.0.0.1:0", {key: longest}) == hixl.SUCCESS


def test_options() -> None:
    with ends(End) as (end,):
        for options in ({"x": "1"}, {"AutoConnect": ""}, {"AutoConnect": "true"}, {"GlobalResourceConfig": "[]"}):
            assert end.initialize("127.0.0.1:0", options) == hixl.PARAM_INVALID, options
        every = {
            "EnableUseFabricMem": "0", "RdmaTrafficClass": "132", "RdmaServiceLevel": "4", "BufferPool": "0:0",
            "AutoConnect": "1", "LocalCommRes": '{"version": "1.3"}',
            "GlobalResourceConfig": '{"comm_resource_config.protocol_desc": "roce:host"}',

        }  # fmt: skip
        assert end.initialize("127.0.0.1:0", every) == hixl.SUCCESS


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
def test_file_of_local_comm_res(tmp_path: Any, content: bytes, accepted: bool) -> None:
    path = tmp_path / "res.json"
    path.write_bytes(content)
    config = {"GlobalResourceConfig": json.dumps({"local_comm_res_path": str(path)})}
    with ends(End) as (end,):
        assert end.initialize("127.0.0.1:0", config) == (hixl.SUCCESS if accepted else hixl.PARAM_INVALID)
        end.finalize()
        # An empty text is no value.
        empty = end.initialize("127.0.0.1:0", {**config, "LocalCommRes": ""})
        assert empty == (hixl.SUCCESS if accepted else hixl.PARAM_INVALID)
        end.finalize()
        # A value wins over the file.
        assert end.initialize("127.0.0.1:0", {**config, "LocalCommRes": "{}"}) == hixl.SUCCESS


def test_path_of_local_comm_res_is_relative_to_the_working_directory(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "res.json").write_text("{}", encoding="utf-8")
    config = {"GlobalResourceConfig": json.dumps({"local_comm_res_path": "res.json"})}
    with ends(End) as (end,):
        assert end.initialize("127.0.0.1:0", config) == hixl.PARAM_INVALID
        monkeypatch.chdir(tmp_path)
        assert end.initialize("127.0.0.1:0", config) == hixl.SUCCESS


def test_fifo_as_file_of_local_comm_res(tmp_path: Any) -> None:
    os.mkfifo(tmp_path / "fifo")
    for path in (tmp_path / "fifo", tmp_path, tmp_path / "missing"):
        config = {"GlobalResourceConfig": json.dumps({"local_comm_res_path": str(path)})}
        with ends(End) as (end,):
            assert end.initialize("127.0.0.1:0", config) == hixl.PARAM_INVALID


@every_way
def test_engines_of_one_process() -> None:
    """Ten engines, each connected to each other one."""
    with ends(*[End] * 10) as all_ends:
        addresses = [f"127.0.0.1:{free_port()}" for _ in all_ends]
        memory = [ready(end, address, seed) for seed, (end, address) in enumerate(zip(all_ends, addresses))]
        for me, end in enumerate(all_ends):
            for other, address in enumerate(addresses):
                if other != me:
                    assert end.call("connect", address, LIMIT) == hixl.SUCCESS
                    assert end.move(address, 1, [(memory[me], memory[other] + 16 * (me + 1), 8)]) == hixl.SUCCESS
        for other, end in enumerate(all_ends):
            for me in range(10):
                if other != me:
                    assert end.bytes("m")[16 * (me + 1) :][:8] == pattern(me, 8)
