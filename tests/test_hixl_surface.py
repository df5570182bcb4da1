"""The names, values and data classes of the module `hixl`, and the state of its object."""

from __future__ import annotations

import ctypes
import inspect
import os
import socket
import threading
from collections import UserList, deque
from typing import Any, Callable

import pytest

import hixl
from hixl_ends import Child, End, Pair, connected, ends, listener, paired
from peers import eventually, meanwhile, together

NAMES = {
    "SUCCESS", "PARAM_INVALID", "TIMEOUT", "NOT_CONNECTED", "ALREADY_CONNECTED", "NOTIFY_FAILED", "UNSUPPORTED",
    "FAILED", "RESOURCE_EXHAUSTED", "OPTION_ENABLE_USE_FABRIC_MEM", "OPTION_RDMA_TRAFFIC_CLASS",
    "OPTION_RDMA_SERVICE_LEVEL",
    "OPTION_BUFFER_POOL", "OPTION_GLOBAL_RESOURCE_CONFIG", "OPTION_AUTO_CONNECT", "OPTION_LOCAL_COMM_RES",
    "FEATURE_SUPPORTED", "FEATURE_NOT_SUPPORTED", "FeatureType", "AUTO_CONNECT", "CLIENT_SERVER_COMM", "get_capability",
    "MemType", "MEM_DEVICE", "MEM_HOST", "MemDesc", "TransferOp", "READ", "WRITE", "TransferOpDesc", "TransferArgs",
    "TransferStatus", "GetTransferStatusArgs", "TransferResult", "AsyncConnectStatus", "NOT_CONNECT", "CONNECT_PENDING",
    "CONNECTING", "CONNECTED", "CONNECT_FAILED", "DISCONNECT_PENDING", "DISCONNECTING", "NotifyDesc", "Hixl",
}  # fmt: skip


def test_names_are_the_documented_ones() -> None:
    assert set(hixl.__all__) == NAMES
    assert len(hixl.__all__) == 44
    assert all(hasattr(hixl, name) for name in NAMES)


def test_numbers_and_keys() -> None:
    numbers = {
        "SUCCESS": 0, "PARAM_INVALID": 103900, "TIMEOUT": 103901, "NOT_CONNECTED": 103902, "ALREADY_CONNECTED": 103903,
        "NOTIFY_FAILED": 103904, "UNSUPPORTED": 103905, "RESOURCE_EXHAUSTED": 203900, "FAILED": 503900,
        "FEATURE_SUPPORTED": 1, "FEATURE_NOT_SUPPORTED": 0,
    }  # fmt: skip
    for name, number in numbers.items():
        assert type(getattr(hixl, name)) is int
        assert getattr(hixl, name) == number
    keys = {
        "OPTION_ENABLE_USE_FABRIC_MEM": "EnableUseFabricMem", "OPTION_RDMA_TRAFFIC_CLASS": "RdmaTrafficClass",
        "OPTION_RDMA_SERVICE_LEVEL": "RdmaServiceLevel", "OPTION_BUFFER_POOL": "BufferPool",
        "OPTION_GLOBAL_RESOURCE_CONFIG": "GlobalResourceConfig", "OPTION_AUTO_CONNECT": "AutoConnect",
        "OPTION_LOCAL_COMM_RES": "LocalCommRes",
    }  # fmt: skip
    assert {name: getattr(hixl, name) for name in keys} == keys


def test_enumerations() -> None:
    members = {
        hixl.MemType: ["MEM_DEVICE", "MEM_HOST"],
        hixl.TransferOp: ["READ", "WRITE"],
        hixl.FeatureType: ["AUTO_CONNECT", "CLIENT_SERVER_COMM"],
        hixl.TransferStatus: ["WAITING", "COMPLETED", "TIMEOUT", "FAILED"],
        hixl.AsyncConnectStatus: [
            "NOT_CONNECT", "CONNECT_PENDING", "CONNECTING", "CONNECTED", "CONNECT_FAILED", "DISCONNECT_PENDING",
            "DISCONNECTING",
        ],
    }  # fmt: skip
    for kind, names in members.items():
        assert [(member.name, member.value, int(member)) for member in kind] == [(n, i, i) for i, n in enumerate(names)]
        assert len({*kind}) == len(names)
        assert all((member == member.value) == issubclass(kind, int) for member in kind)
        if kind is not hixl.TransferStatus:
            assert all(getattr(hixl, name) is kind[name] for name in names)


def test_data_classes() -> None:
    desc = hixl.MemDesc(len=2, addr=2**64 - 1)
    assert (desc.addr, desc.len, desc.local_only) == (2**64 - 1, 2, False)
    desc.addr, desc.len, desc.local_only = 3, 4, True
    assert (desc.addr, desc.len, desc.local_only) == (3, 4, True)
    op = hixl.TransferOpDesc(1, remote_addr=2, len=3)
    op.local_addr += 10
    assert (op.local_addr, op.remote_addr, op.len) == (11, 2, 3)
    args = hixl.TransferArgs()
    assert args.user_data == 0
    args.user_data = 2**64 - 1
    assert args.user_data == 2**64 - 1
    query = hixl.GetTransferStatusArgs()
    assert (query.max_query_count, query.skip_waiting) == (4294967295, False)
    query = hixl.GetTransferStatusArgs(3, skip_waiting=True)
    query.max_query_count += 1
    assert (query.max_query_count, query.skip_waiting) == (4, True)
    result = hixl.TransferResult()
    assert (result.req, result.user_data, result.status) == (0, 0, hixl.TransferStatus.WAITING)
    assert repr(result) == "<TransferResult: req 0, user_data 0, WAITING>"
    for name in ("req", "user_data", "status", "other"):
        with pytest.raises(AttributeError):
            setattr(result, name, 1)
    notify = hixl.NotifyDesc("a", notify_msg="b")
    notify.name = "ä\0"
    assert (notify.name, notify.notify_msg) == ("ä\0", "b")
    assert repr(notify) == "NotifyDesc(name='ä\\x00', notify_msg='b')"


@pytest.mark.parametrize(
    "call",
    [
        lambda: hixl.MemDesc(-1, 1),
        lambda: hixl.MemDesc(2**64, 1),
        lambda: hixl.MemDesc(1.0, 1),
        lambda: hixl.MemDesc("1", 1),
        lambda: hixl.MemDesc(1),
        lambda: hixl.MemDesc(1, 1, True),
        lambda: hixl.MemDesc(1, 1, local_only=True),
        lambda: hixl.MemDesc(1, 2**64),
        lambda: setattr(hixl.MemDesc(1, 1), "len", -1),
        lambda: setattr(hixl.MemDesc(1, 1), "local_only", 1),
        lambda: hixl.TransferOpDesc(1, 2, -3),
        lambda: hixl.TransferOpDesc(1, 2, None),
        lambda: hixl.TransferOpDesc(2**64, 2, 3),
        lambda: hixl.TransferOpDesc(1, 2**64, 3),
        lambda: setattr(hixl.TransferArgs(), "user_data", 2**64),
        lambda: setattr(hixl.TransferArgs(), "user_data", -1),
        lambda: hixl.TransferArgs(1),
        lambda: hixl.GetTransferStatusArgs(2**32),
        lambda: hixl.GetTransferStatusArgs(-1),
        lambda: hixl.TransferResult(1),
        lambda: hixl.GetTransferStatusArgs(1, 2),
        lambda: hixl.NotifyDesc("a", b"b"),
        lambda: hixl.NotifyDesc("a"),
        lambda: hixl.get_capability("1"),
        lambda: hixl.get_capability(2**31),
        lambda: hixl.Hixl(1),
        lambda: hixl.Hixl().initialize("127.0.0.1:0", None),
        lambda: hixl.Hixl().initialize("127.0.0.1:0", {"AutoConnect": 1}),
        lambda: hixl.Hixl().initialize("127.0.0.1:0", {1: "1"}),
        lambda: hixl.Hixl().initialize(7),
        lambda: hixl.Hixl().connect(5),
        *[
            lambda method=method, limit=limit: getattr(hixl.Hixl(), method)("a", timeout_in_millis=limit)
            for method in ("connect", "disconnect", "connect_async", "disconnect_async")
            for limit in (2**31, -(2**31) - 1, 1.5, "1", None)
        ],
        *[
            lambda limit=limit: hixl.Hixl().transfer_sync("a", hixl.READ, [], timeout_in_millis=limit)
            for limit in (2**31, -(2**31) - 1, 1.5)
        ],
        *[
            lambda limit=limit: hixl.Hixl().send_notify("a", hixl.NotifyDesc("", ""), timeout_in_millis=limit)
            for limit in (2**31, -(2**31) - 1, 1.5)
        ],
        lambda: hixl.Hixl().register_mem((1, 2), hixl.MEM_HOST),
        lambda: hixl.Hixl().register_mem(hixl.MemDesc(1, 2), "host"),
        lambda: hixl.Hixl().deregister_mem(-1),
        lambda: hixl.Hixl().deregister_mem(2**64),
        lambda: hixl.Hixl().get_transfer_status(-1),
        lambda: hixl.Hixl().get_transfer_status(2**64),
        lambda: hixl.Hixl().get_async_connect_status(None),
        lambda: hixl.Hixl().transfer_sync("a", hixl.READ, [(1, 2, 3)]),
        lambda: hixl.Hixl().transfer_sync("a", hixl.READ, hixl.TransferOpDesc(1, 2, 3)),
        lambda: hixl.Hixl().transfer_sync("a", hixl.READ, "ab"),
        lambda: hixl.Hixl().transfer_sync("a", None, []),
        lambda: hixl.Hixl().transfer_async("a", hixl.READ, [], None),
        lambda: hixl.Hixl().get_transfer_status("1"),
        lambda: hixl.Hixl().get_all_transfer_status(3),
        lambda: hixl.Hixl().send_notify("a", ("b", "c")),
    ],
)
def test_wrong_types_raise_type_error(call: object) -> None:
    with pytest.raises(TypeError):
        call()  # type: ignore[operator]


# Of `Hixl`: the names and the defaults of the arguments, which programs pass by position or by name.
SIGNATURES = {
    "initialize": "(self, local_engine, options={})",
    "finalize": "(self)",
    "register_mem": "(self, mem_desc, mem_type)",
    "deregister_mem": "(self, mem_handle)",
    "connect": "(self, remote_engine, timeout_in_millis=1000)",
    "disconnect": "(self, remote_engine, timeout_in_millis=1000)",
    "connect_async": "(self, remote_engine, timeout_in_millis=1000)",
    "disconnect_async": "(self, remote_engine, timeout_in_millis=1000)",
    "get_async_connect_status": "(self, remote_engine)",
    "get_all_async_connect_status": "(self)",
    "transfer_sync": "(self, remote_engine, op, op_descs, timeout_in_millis=1000)",
    "transfer_async": "(self, remote_engine, op, op_descs, args=<TransferArgs: user_data 0>)",
    "get_transfer_status": "(self, req_id)",
    "get_all_transfer_status": "(self, args=GetTransferStatusArgs(max_query_count=4294967295, skip_waiting=False))",
    "send_notify": "(self, remote_engine, notify, timeout_in_millis=1000)",
    "get_notifies": "(self)",
}


def test_signatures() -> None:
    def plain(function: Any) -> str:
        signature = inspect.signature(function)
        parameters = [one.replace(annotation=one.empty) for one in signature.parameters.values()]
        return str(inspect.Signature(parameters))

    public = [name for name in vars(hixl.Hixl) if not name.startswith("_")]
    assert {name: plain(getattr(hixl.Hixl, name)) for name in public} == SIGNATURES
    assert plain(hixl.get_capability) == "(feature_type)"


def test_operations_are_any_sequence() -> None:
    with connected(End, End) as pair:
        engine, address = pair.local.engine, pair.address
        op = hixl.TransferOpDesc(len=1, remote_addr=pair.remote_address, local_addr=pair.local_address)
        for descs in ([op], (op,), deque([op]), UserList([op])):
            assert engine.transfer_sync(address, 0, descs) == hixl.SUCCESS
            assert engine.transfer_async(remote_engine=address, op=1, op_descs=descs)[0] == hixl.SUCCESS


def test_capability_needs_no_object() -> None:
    assert hixl.get_capability(hixl.AUTO_CONNECT) == (hixl.SUCCESS, hixl.FEATURE_SUPPORTED)
    assert hixl.get_capability(hixl.CLIENT_SERVER_COMM) == (hixl.SUCCESS, 1)
    assert hixl.get_capability(2) == (hixl.SUCCESS, hixl.FEATURE_NOT_SUPPORTED)
    assert hixl.get_capability(-1) == (hixl.PARAM_INVALID, 0)


def assert_not_initialized(engine: hixl.Hixl) -> None:
    """Check that each method fails with its neutral value, also with wrong values."""
    assert engine.register_mem(hixl.MemDesc(0, 0), hixl.MEM_HOST) == (hixl.FAILED, 0)
    assert engine.deregister_mem(0) == hixl.FAILED
    for method in (engine.connect, engine.disconnect, engine.connect_async, engine.disconnect_async):
        assert method("nowhere", 0) == hixl.FAILED
    assert engine.get_async_connect_status("") == (hixl.FAILED, hixl.NOT_CONNECT)
    assert engine.get_all_async_connect_status() == (hixl.FAILED, {})
    assert engine.transfer_sync("", 7, [], -1) == hixl.FAILED
    assert engine.transfer_async("", hixl.READ, []) == (hixl.FAILED, 0)
    for request in (0, 1):
        assert engine.get_transfer_status(request) == (hixl.FAILED, hixl.TransferStatus.FAILED)
    assert engine.get_all_transfer_status() == (hixl.FAILED, [])
    assert engine.send_notify("", hixl.NotifyDesc("x" * 2000, ""), 0) == hixl.FAILED
    assert engine.get_notifies() == (hixl.FAILED, [])
    assert engine.finalize() is None


def test_object_that_is_not_initialized() -> None:
    engine = hixl.Hixl()
    assert_not_initialized(engine)
    assert engine.initialize("nowhere") == hixl.PARAM_INVALID
    assert_not_initialized(engine)
    assert engine.initialize("127.0.0.1:0", {"AutoConnect": "2"}) == hixl.PARAM_INVALID
    assert engine.initialize("127.0.0.1:0") == hixl.SUCCESS
    assert engine.initialize("nowhere", {"x": "y"}) == hixl.SUCCESS
    assert engine.get_all_transfer_status() == (hixl.SUCCESS, [])
    engine.finalize()
    assert_not_initialized(engine)


def test_object_that_is_initialized_again_has_nothing_of_before() -> None:
    with ends(End, End) as (client, target):
        pair = paired(client, target)
        address, ended = pair.address, [end.register("m")[1] for end in (client, target)]
        assert client.call("connect_async", address, 10_000) == hixl.SUCCESS
        assert eventually(lambda: client.engine.get_async_connect_status(address)[1] == hixl.CONNECTED)
        assert client.notify(address, "a", "b") == hixl.SUCCESS
        request = pair.submit(1, (0, 0, 8))
        for end, text in ((client, "127.0.0.1"), (target, address)):
            end.finalize()
            assert_not_initialized(end.engine)
            assert end.initialize(text) == hixl.SUCCESS
        assert target.notifies() == (hixl.SUCCESS, [])
        assert client.engine.get_transfer_status(request) == (hixl.PARAM_INVALID, hixl.TransferStatus.FAILED)
        assert client.engine.get_all_transfer_status() == (hixl.SUCCESS, [])
        assert client.engine.get_all_async_connect_status() == (hixl.SUCCESS, {})
        assert pair.move(0, (0, 0, 8)) == hixl.NOT_CONNECTED
        assert pair.disconnect() == hixl.NOT_CONNECTED
        assert pair.connect() == hixl.SUCCESS
        assert pair.move(0, (0, 0, 8)) == hixl.PARAM_INVALID
        # A part of the range that was registered is a new range, and the handles of before have ended.
        for end, handle in zip((client, target), ended):
            assert end.register("m", 1, 62)[0] == hixl.SUCCESS
            assert end.call("deregister_mem", handle) == hixl.SUCCESS
        assert pair.move(0, (1, 1, 8)) == hixl.SUCCESS


def test_same_address_is_usable_after_finalize() -> None:
    address = listener()
    with ends(End, Child) as (a, b):
        for _ in range(3):
            assert a.initialize(address) == hixl.SUCCESS
            assert hixl.Hixl().initialize(address) == hixl.FAILED
            assert b.initialize("127.0.0.1:0") == hixl.SUCCESS
            assert b.call("connect", address, 5000) == hixl.SUCCESS
            assert b.call("disconnect", address, 5000) == hixl.SUCCESS
            b.finalize()
            a.finalize()


@pytest.mark.parametrize("address", ["", "localhost:1", "1.2.3", "ad.0.0.1:26200", "1.2.3.4:65536", "::1", "\ud800"])
def test_wrong_addresses(address: str) -> None:
    engine = hixl.Hixl()
    assert engine.initialize(address) == hixl.PARAM_INVALID
    assert engine.initialize("127.0.0.1") == hixl.SUCCESS
    assert engine.connect(address, 1000) == hixl.PARAM_INVALID
    assert engine.disconnect(address) == hixl.NOT_CONNECTED


def test_address_of_another_host() -> None:
    engine = hixl.Hixl()
    assert engine.initialize("192.0.2.1:26000") == hixl.FAILED
    assert engine.initialize("127.0.0.1:0") == hixl.SUCCESS


def test_texts_longer_than_any_allowed() -> None:
    for address, options in [("127.0.0.1:" + "0" * 60, {}), ("127.0.0.1", {"LocalCommRes": "{}" + " " * (1 << 20)})]:
        assert hixl.Hixl().initialize(address, options) == hixl.PARAM_INVALID
    with ends(End) as (end,):
        end.initialize("127.0.0.1:0")
        for text in ("x" * (1 << 21), "127.0.0.1:" + "0" * 60, "no address"):
            assert end.call("connect_async", text) == hixl.PARAM_INVALID
            assert end.call("disconnect_async", text) == hixl.PARAM_INVALID
            assert end.call("disconnect", text) == hixl.NOT_CONNECTED
        assert end.engine.get_all_async_connect_status() == (hixl.SUCCESS, {})


def test_dropped_object_is_finalized() -> None:
    address = listener()
    engine = hixl.Hixl()
    assert engine.initialize(address) == hixl.SUCCESS
    del engine
    engine = hixl.Hixl()
    assert engine.initialize(address) == hixl.SUCCESS


def test_registration_table() -> None:
    memory = ctypes.create_string_buffer(4096)
    at = ctypes.addressof(memory)
    with ends(End) as (end,):
        end.initialize("127.0.0.1:0")
        status, first = end.register_range(at + 1000, 1000)
        assert status == hixl.SUCCESS
        assert first != 0
        assert end.register_range(at + 1000, 1000) == (hixl.SUCCESS, first)
        refused = [(1500, 1000), (500, 1000), (1100, 10), (500, 2000), (1000, 999), (1000, 1001), (1999, 1), (999, 2)]
        for start, size in refused:
            assert end.register_range(at + start, size) == (hixl.PARAM_INVALID, 0), (start, size)
        touching = [end.register_range(at, 1000), end.register_range(at + 2000, 96)]
        assert [status for status, _ in touching] == [hixl.SUCCESS, hixl.SUCCESS]
        assert len({first, *(handle for _, handle in touching)}) == 3
        for address, size in [(2**64 - 10, 11), (0, 10), (at, 0), (1, 2**64 - 1), (2**64 - 1, 2**64 - 1), (8, 2**63)]:
            assert end.register_range(address, size) == (hixl.PARAM_INVALID, 0), (address, size)
        assert end.call("register_mem", hixl.MemDesc(at + 3000, 1), 2) == (hixl.PARAM_INVALID, 0)
        # A range of the other kind is another table.
        status, device = end.register_range(at + 1500, 1000, 0)
        assert status == hixl.SUCCESS
        # The same range with the other visibility is refused.
        assert end.register_range(at + 1000, 1000, 1, True) == (hixl.PARAM_INVALID, 0)
        assert end.call("deregister_mem", 0) == hixl.PARAM_INVALID
        # One call ends a range that was registered several times.
        assert end.call("deregister_mem", first) == hixl.SUCCESS
        status, again = end.register_range(at + 1100, 100, 1, True)
        assert status == hixl.SUCCESS
        assert again != first
        assert end.register_range(at + 1100, 100, 1, True) == (hixl.SUCCESS, again)
        for handle in (first, 2**64 - 1, device):
            assert end.call("deregister_mem", handle) == hixl.SUCCESS
        assert end.register_range(at + 1100, 100, 1, True) == (hixl.SUCCESS, again)


def test_4096_ranges() -> None:
    with ends(End) as (end,):
        end.initialize("127.0.0.1:0")
        at = end.add("m", 4096)
        registered = [end.register_range(at + k, 1) for k in range(4096)]
        assert {status for status, _ in registered} == {hixl.SUCCESS}
        assert len({handle for _, handle in registered} - {0}) == 4096


# Each call waits for a peer that is stopped.
WAITING_CALLS: dict[str, Callable[[Pair], int]] = {
    "connect": lambda pair: pair.connect(60_000),
    "transfer_sync": lambda pair: pair.move(1, limit=60_000),
    "send_notify": lambda pair: pair.local.notify(pair.address, "a", "b", 60_000),
    "disconnect": lambda pair: pair.disconnect(60_000),
    "deregister_mem": lambda pair: pair.local.call("deregister_mem", pair.local.register("m")[1]),
    "finalize": lambda pair: pair.local.finalize() or hixl.SUCCESS,
}


@pytest.mark.parametrize("name", WAITING_CALLS)
def test_calls_that_wait_let_other_threads_run(name: str) -> None:
    """The target continues only if this thread runs meanwhile."""
    begun, statuses = threading.Event(), []
    with ends(End, Child) as both:
        pair = paired(*both)
        if name != "connect":
            assert pair.connect() == hixl.SUCCESS
            assert pair.move(1) == hixl.SUCCESS
        with pair.remote.stopped():
            if name in ("disconnect", "deregister_mem", "finalize"):
                pair.submit(1)

            def run() -> None:
                begun.set()
                statuses.append(WAITING_CALLS[name](pair))

            call = threading.Thread(target=run)
            call.start()
            assert begun.wait(60)
            call.join(0.1)  # so that the call has begun
        call.join(60)
        assert statuses == [hixl.SUCCESS]


def test_one_range_registered_by_several_threads() -> None:
    with ends(End) as (end,):
        end.initialize("127.0.0.1:0")
        address = end.add("m", 4096)
        for _ in range(20):
            ((status, handle),) = {*together(4, lambda _: end.register("m"))}
            assert status == hixl.SUCCESS
            assert end.call("deregister_mem", handle) == hixl.SUCCESS
            # None of the calls has left the range registered.
            status, handle = end.register_range(address + 1, 10)
            assert status == hixl.SUCCESS
            assert end.call("deregister_mem", handle) == hixl.SUCCESS


def test_calls_of_several_threads_and_finalize() -> None:
    """Threads that use an object while it is finalized and initialized again get codes, and do not hang."""
    codes, moved = set(), set()
    with ends(End, End) as both:
        pair = paired(*both)

        def work() -> None:
            pair.local.register("m")
            codes.add(pair.connect(1000))
            moved.add(pair.move(0, limit=1000))
            codes.add(pair.disconnect(1000))

        with meanwhile(*[work] * 4):
            for _ in range(20):
                pair.local.finalize()
                pair.local.initialize("127.0.0.1:0")
            assert eventually(lambda: hixl.SUCCESS in moved)
    known = {hixl.SUCCESS, hixl.FAILED, hixl.ALREADY_CONNECTED, hixl.NOT_CONNECTED, hixl.PARAM_INVALID, hixl.TIMEOUT}
    assert codes | moved <= known


def test_finalize_waits_for_calls_and_refuses_later_ones() -> None:
    engine, codes = hixl.Hixl(), []
    assert engine.initialize("127.0.0.1:0") == hixl.SUCCESS
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        call = threading.Thread(target=lambda: codes.append(engine.connect(address, 2000)))
        call.start()
        begun = silent.accept()[0]
        end = threading.Thread(target=engine.finalize)
        end.start()
        assert eventually(lambda: engine.get_notifies() == (hixl.FAILED, []))
        assert codes == []
        end.join(30)
        call.join(30)
        begun.close()
    assert codes == [hixl.TIMEOUT]  # it was not ended early
    assert_not_initialized(engine)


def test_forked_child_gets_codes_and_may_initialize_anew() -> None:
    engine = hixl.Hixl()
    assert engine.initialize(listener()) == hixl.SUCCESS
    child = os.fork()
    if child == 0:
        code = 1
        try:
            assert_not_initialized(engine)
            assert engine.initialize("127.0.0.1:0") == hixl.SUCCESS
            assert engine.get_notifies() == (hixl.SUCCESS, [])
            engine.finalize()
            code = 0
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    assert engine.get_notifies() == (hixl.SUCCESS, [])
