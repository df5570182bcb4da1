"""READ and WRITE of the module `hixl`, synchronous and asynchronous."""

from __future__ import annotations

import ctypes
import random
import socket
import threading
import time
from typing import TYPE_CHECKING, Any

import pytest

import hixl
from aarch64.probe import reads_other_process
from emulation import lacks
from hixl_ends import Child, End, Pair, connected, ends, free_port, listener, paired, pattern, ready
from llm_datadist.native import Engine
from peers import eventually, together

if TYPE_CHECKING:
    from collections.abc import Iterator

# Over every way: through rings in shared memory, by reads by process id, and over TCP.
pytestmark = pytest.mark.usefixtures("hixl_way")

READ, WRITE = 0, 1
SIZE = 1 << 20
WAITING, COMPLETED, FAILED = hixl.TransferStatus.WAITING, hixl.TransferStatus.COMPLETED, hixl.TransferStatus.FAILED


@pytest.fixture
def pair() -> Iterator[Pair]:
    """A connected client here and a target in another process, each with one registered megabyte."""
    with connected(End, Child, size=SIZE) as made:
        yield made


def registered(end: Any, name: str, *given: Any) -> int:
    """Register memory, and return its handle."""
    status, handle = end.register(name, *given)
    assert status == hixl.SUCCESS
    return int(handle)


def test_bytes_take_the_way_of_the_test(hixl_way: str) -> None:
    """A native engine reads a region as engines of the module do, and its statistics name the way."""
    size = 1 << 20 if hixl_way != "process" else (2 << 20) + 1
    with ends(Child) as (target,), Engine(metadata=b"hixl 1") as reader:
        address = listener()
        ready(target, address, 1, size=size)
        handle = registered(target, "m")  # that of the range
        peer = reader.link(address).result(10)
        memory = ctypes.create_string_buffer(size)
        own = reader.register("own", [ctypes.addressof(memory)], blocks=1, shape=[size], dtype="uint8")
        reader.pull(own[[0]], peer[f"hixl/{handle}"][[0]]).result(10)
        assert memory.raw == pattern(1, size)
        paths = reader.stats()["links"][0]["paths"]
        moved = {path for path, count in paths.items() if count["bytes"] >= size}
        # Where emulation lacks reads by process id, rings carry all calls.
        by_process = "rings" if lacks(reads_other_process) else "process"
        assert moved == {{"rings": "rings", "process": by_process, "tcp": "sockets"}[hixl_way]}


def test_random_operations_move_the_bytes_of_a_model(pair: Pair) -> None:
    """Lists of 1 to 300 ranges, which may overlap where they are read."""
    there, here = bytearray(pattern(1, SIZE)), bytearray(SIZE)
    draw = random.Random(3)  # noqa: S311
    for _ in range(30):
        op, count = draw.choice([READ, WRITE]), draw.choice([1, 2, 7, 300])
        room = SIZE // count
        size = draw.choice([1, 3, 100, 1000, 3000])
        slots = draw.sample(range(count), count)
        ops = []
        for slot in slots:
            length = draw.randint(1, min(size, room))
            written = slot * room + draw.randint(0, room - length)
            read = draw.randint(0, SIZE - length)
            ops.append((written, read, length) if op == READ else (read, written, length))
        if op == WRITE:  # also over TCP and rings, all sources differ
            pair.local.write("m", 0, pattern(draw.randint(2, 99), SIZE))
            here[:] = pair.local.bytes("m")
        assert pair.move(op, *ops) == hixl.SUCCESS
        for local, remote, length in ops:
            if op == READ:
                here[local : local + length] = there[remote : remote + length]
            else:
                there[remote : remote + length] = here[local : local + length]
        assert pair.local.bytes("m") == here
        assert pair.remote.bytes("m") == there


@pytest.mark.parametrize("op", [READ, WRITE])
def test_last_of_32000_operations_between_two_ranges_wins(pair: Pair, op: int) -> None:
    draw = random.Random(7)  # noqa: S311
    source, expected = pattern(1, SIZE), bytearray(SIZE)
    if op == WRITE:
        source, expected = pattern(4, SIZE), bytearray(pattern(1, SIZE))
        pair.local.write("m", 0, source)
    ops = []
    for _ in range(32_000):
        length = draw.randint(1, 200)
        read, written = draw.randrange(SIZE - length), draw.randrange(SIZE // 16)
        ops.append((written, read, length) if op == READ else (read, written, length))
        expected[written : written + length] = source[read : read + length]
    assert pair.move(op, *ops) == hixl.SUCCESS
    assert (pair.local.bytes("m") if op == READ else pair.remote.bytes("m")) == expected
    # Beyond that number, the order of operations on the same bytes is undefined.
    assert pair.move(op, *ops, ops[0]) == hixl.SUCCESS


def ended(end: Any, request: int) -> tuple[int, hixl.TransferStatus]:
    """Return what is reported about the end of a request."""
    found: list[tuple[int, hixl.TransferStatus]] = []

    def has_ended() -> bool:
        found.append(end.call("get_transfer_status", request))
        return found[-1][1] != WAITING

    assert eventually(has_ended, 30)
    return found[-1]


def test_many_operations_of_one_call(pair: Pair) -> None:
    """More runs of bytes than one message carries."""
    count = 70_000
    ops = [(14 * k, 14 * (count - k), 5) for k in range(count)]
    there, here = pattern(1, SIZE), bytearray(SIZE)
    assert pair.move(READ, *ops) == hixl.SUCCESS
    for local, remote, size in ops:
        here[local : local + size] = there[remote : remote + size]
    assert pair.local.bytes("m") == here
    here = pattern(5, SIZE)
    pair.local.write("m", 0, here)
    assert pair.move(WRITE, *ops) == hixl.SUCCESS
    remote_bytes = bytearray(there)
    for local, remote, size in ops:
        remote_bytes[remote : remote + size] = here[local : local + size]
    assert pair.remote.bytes("m") == remote_bytes


def test_both_sides_read_each_other_at_once() -> None:
    """Neither waits for the other, although each reads what the other one writes."""
    addresses, half = [listener(), listener()], SIZE // 2
    with ends(End, End) as both:
        bases = [ready(end, address, 1, size=SIZE) for end, address in zip(both, addresses)]
        ways = [Pair(both[me], bases[me], both[1 - me], bases[1 - me], addresses[1 - me]) for me in range(2)]
        for way in ways:
            assert way.connect() == hixl.SUCCESS
        codes = together(2, lambda me: [ways[me].move(op, (half, 0, half), limit=5000) for op in [READ, WRITE] * 50])
        assert codes == [[hixl.SUCCESS] * 100] * 2


@pytest.mark.parametrize("op", [READ, WRITE])
def test_bad_ranges_change_nothing(pair: Pair, op: int) -> None:
    before = pair.local.bytes("m"), pair.remote.bytes("m")
    local_address, remote_address = pair.local_address, pair.remote_address
    wrong = [
        (local_address, remote_address + SIZE, 1),
        (local_address, remote_address - 1, 1),
        (local_address, remote_address + SIZE - 1, 2),
        (local_address, remote_address, SIZE + 1),
        (local_address + SIZE, remote_address, 1),
        (local_address - 1, remote_address, 2),
        (local_address, 8, 8),
        (local_address, remote_address, 0),
        (local_address, 2**64 - 1, 1),
        (local_address, 2**64 - 1, 2),
        (2**64 - 1, remote_address, 2**64 - 1),
        (0, remote_address, 1),
        (local_address, remote_address, 2**63),
    ]
    good = (local_address + 5, remote_address + 9, 3)
    for bad in wrong:
        for ops in ([bad], [good, bad], [bad, good]):
            assert pair.local.move(pair.address, op, ops) == hixl.PARAM_INVALID, ops
            assert pair.local.submit(pair.address, op, ops) == (hixl.PARAM_INVALID, 0), ops
    assert pair.local.move(pair.address, op, []) == hixl.PARAM_INVALID
    assert pair.local.submit(pair.address, op, []) == (hixl.PARAM_INVALID, 0)
    assert pair.local.engine.transfer_sync(pair.address, 2, [hixl.TransferOpDesc(*good)]) == hixl.PARAM_INVALID
    assert pair.local.engine.transfer_async(pair.address, -1, [hixl.TransferOpDesc(*good)]) == (hixl.PARAM_INVALID, 0)
    for limit in (0, -1, -(2**31)):
        assert pair.local.move(pair.address, op, [good], limit) == hixl.PARAM_INVALID
    assert (pair.local.bytes("m"), pair.remote.bytes("m")) == before
    assert pair.local.move(pair.address, op, [good]) == hixl.SUCCESS


def test_range_over_two_touching_regions_is_refused() -> None:
    with connected(End, End) as pair:
        pair.remote_address = pair.remote.add("touching", 2000, 1)
        for start in (0, 1000):
            registered(pair.remote, "touching", start, 1000)
        assert pair.move(READ, (0, 900, 200)) == hixl.PARAM_INVALID
        assert pair.move(READ, (0, 900, 100), (100, 1000, 100)) == hixl.SUCCESS
        assert pair.local.bytes("m")[:200] == pattern(1, 2000)[900:1100]


def test_several_regions_in_one_call() -> None:
    with ends(End, Child) as (local, remote):
        pair, count = paired(local, remote), 300
        there = [remote.add(f"remote{k}", 64, k) for k in range(count)]
        here = [local.add(f"local{k}", 64) for k in range(count)]
        assert {remote.register(f"remote{k}")[0] for k in range(count)} == {hixl.SUCCESS}
        assert {local.register(f"local{k}", kind=k % 2)[0] for k in range(count)} == {hixl.SUCCESS}
        assert pair.connect() == hixl.SUCCESS
        ops = [(here[k] + 3, there[count - 1 - k] + 5, 50) for k in range(count)]
        assert local.move(pair.address, READ, ops) == hixl.SUCCESS
        for k in range(count):
            assert local.bytes(f"local{k}")[3:53] == pattern(count - 1 - k, 64)[5:55]
        assert local.move(pair.address, WRITE, [(here[0], one, 64) for one in there]) == hixl.SUCCESS
        assert {remote.bytes(f"remote{k}") for k in range(count)} == {local.bytes("local0")}


@pytest.mark.parametrize("asynchronous", [False, True])
@pytest.mark.parametrize("op", [READ, WRITE])
def test_regions_that_end_and_begin_while_connected(pair: Pair, op: int, asynchronous: bool) -> None:
    """A region that has ended is never reached again, and one that has begun is reached at once."""

    def move(*ops: tuple[int, int, int]) -> int:
        if not asynchronous:
            return pair.local.move(pair.address, op, list(ops))
        status, request = pair.local.submit(pair.address, op, list(ops))
        if status != hixl.SUCCESS:
            return status
        outcome = ended(pair.local, request)
        return hixl.SUCCESS if outcome == (hixl.SUCCESS, COMPLETED) else hixl.PARAM_INVALID

    other = pair.remote.add("other", 4096, 9)
    handle = registered(pair.remote, "other", 0, 1000)
    assert move((pair.local_address, other, 1000)) == hixl.SUCCESS
    assert move((pair.local_address, other, 1001)) == hixl.PARAM_INVALID
    assert pair.remote.call("deregister_mem", handle) == hixl.SUCCESS
    pair.remote.write("other", 0, b"\x55" * 4096)
    before = pair.local.bytes("m"), pair.remote.bytes("other")
    assert move((pair.local_address, other, 1000)) == hixl.PARAM_INVALID
    assert (pair.local.bytes("m"), pair.remote.bytes("other")) == before
    assert pair.remote.call("deregister_mem", handle) == hixl.SUCCESS
    assert move((pair.local_address, pair.remote_address, 10)) == hixl.SUCCESS
    handle = registered(pair.remote, "other", 500, 3000)
    assert move((pair.local_address, other, 600)) == hixl.PARAM_INVALID
    assert move((pair.local_address, other + 500, 3000)) == hixl.SUCCESS
    # The same range again, which is another region.
    assert pair.remote.call("deregister_mem", handle) == hixl.SUCCESS
    registered(pair.remote, "other", 500, 3000)
    assert move((pair.local_address, other + 500, 3000)) == hixl.SUCCESS
    # A local region that ends.
    local = pair.local.add("local2", 100)
    handle = registered(pair.local, "local2")
    assert move((local, pair.remote_address, 100)) == hixl.SUCCESS
    assert pair.local.call("deregister_mem", handle) == hixl.SUCCESS
    assert move((local, pair.remote_address, 100)) == hixl.PARAM_INVALID


def test_ranges_of_both_kinds_overlap(pair: Pair) -> None:
    """An operation is right if one range holds it, whatever its kind."""
    other = pair.remote.add("other", 4000, 7)
    for start, size, kind in [(0, 1000, 1), (500, 1000, 0), (1600, 1000, 1), (2000, 50, 0)]:
        registered(pair.remote, "other", start, size, kind)
    ops = [(100, 300), (1200, 200), (600, 350), (2000, 600), (1700, 100)]
    for group in ([op] for op in ops), [ops], [ops[::-1]]:
        for some in group:
            pair.local.write("m", 0, bytes(4000))
            moves = [(pair.local_address + at, other + at, size) for at, size in some]
            assert pair.local.move(pair.address, READ, moves) == hixl.SUCCESS
            for at, size in some:
                assert pair.local.bytes("m")[at : at + size] == pattern(7, 4000)[at : at + size]
    assert pair.local.move(pair.address, READ, [(pair.local_address, other + 1400, 200)]) == hixl.PARAM_INVALID


def test_disconnect_while_the_target_reads_memory(pair: Pair) -> None:
    """A range can be reused once `deregister_mem` has returned, and the next connection writes last."""
    size = 192 << 20
    pair.local_address, pair.remote_address = pair.local.add("source", size), pair.remote.add("target", size)
    registered(pair.remote, "target")
    for limit in (1, 5, 10, 20):
        pair.local.write("source", 0, b"\x11" * size)
        handle = registered(pair.local, "source")
        request = pair.submit(WRITE, (0, 0, size))
        assert pair.disconnect(limit) == hixl.SUCCESS
        assert pair.local.call("deregister_mem", handle) == hixl.SUCCESS
        assert ended(pair.local, request)[1] in (COMPLETED, FAILED)
        # The program uses the memory for something else.
        pair.local.write("source", 0, b"\x77" * size)
        assert pair.connect() == hixl.SUCCESS
        assert pair.remote.samples("target") <= {0x00, 0x11, 0x22}
        pair.local.write("source", 0, b"\x22" * size)
        handle = registered(pair.local, "source")
        assert pair.move(WRITE, (0, 0, size)) == hixl.SUCCESS
        assert pair.local.call("deregister_mem", handle) == hixl.SUCCESS
        time.sleep(0.2)
        assert pair.remote.samples("target") == {0x22}


def test_calls_that_disconnect_ends_touch_nothing_afterwards(pair: Pair) -> None:
    marker, begun, going = b"\xff" * SIZE, threading.Event(), threading.Event()

    def disconnect() -> None:
        while not going.is_set():
            # Without a pause, the transfers would only ever find that nothing is connected.
            begun.wait(10)
            begun.clear()
            pair.disconnect()
            pair.connect()

    thread = threading.Thread(target=disconnect)
    thread.start()
    codes = set()
    try:
        for _ in range(100):
            begun.set()
            codes.add(code := pair.move(READ, (0, 0, SIZE)))
            if code != hixl.SUCCESS:
                pair.local.write("m", 0, marker)
                time.sleep(0.002)
                assert pair.local.bytes("m") == marker
    finally:
        going.set()
        begun.set()
        thread.join(60)
    assert codes <= {hixl.SUCCESS, hixl.NOT_CONNECTED, hixl.FAILED}


def test_local_only_range_is_hidden(pair: Pair) -> None:
    hidden = pair.remote.add("hidden", 100, 3)
    assert pair.remote.register("hidden", 0, 100, 1, True)[0] == hixl.SUCCESS
    for op in (READ, WRITE):
        assert pair.local.move(pair.address, op, [(pair.local_address, hidden, 10)]) == hixl.PARAM_INVALID
    own = pair.local.add("own", 100)
    assert pair.local.register("own", 0, 100, 1, True)[0] == hixl.SUCCESS
    assert pair.local.move(pair.address, READ, [(own, pair.remote_address, 100)]) == hixl.SUCCESS
    assert pair.local.bytes("own") == pattern(1, SIZE)[:100]
    pair.local.write("own", 0, b"\x77" * 100)
    assert pair.local.move(pair.address, WRITE, [(own, pair.remote_address, 100)]) == hixl.SUCCESS
    assert pair.remote.bytes("m")[:100] == b"\x77" * 100


def test_write_that_has_timed_out_does_not_arrive_on_a_new_connection(pair: Pair) -> None:
    pair.local.write("m", 0, b"\x11" * SIZE)
    assert pair.move(WRITE, (0, 0, 8)) == hixl.SUCCESS  # so that the region is known here
    limit = 600
    for size in (100, SIZE):
        pair.local.write("m", 0, b"\x22" * SIZE)
        with pair.remote.stopped():
            assert pair.move(WRITE, (0, 0, size), limit=limit) == hixl.TIMEOUT
        pair.reconnect()
        pair.local.write("m", 0, b"\x33" * SIZE)
        assert pair.move(WRITE, (0, 0, SIZE)) == hixl.SUCCESS
        # The limit of the first WRITE passes at the target.
        time.sleep(limit / 1000)
        assert pair.remote.bytes("m") == b"\x33" * SIZE


def test_write_of_a_stopped_caller_ends_before_later_writes() -> None:
    """The target ends it by its own clock, and another client writes last."""
    size = 2 * SIZE - 1  # through rings, unless memory is added
    with ends(End, Child, Child) as (other, target, caller):
        last = paired(other, target, size=size, seed=5)
        first = Pair(caller, ready(caller, seed=3, size=size), target, last.remote_address, last.address, size)
        assert last.connect() == hixl.SUCCESS
        for round_ in range(6):
            assert first.connect() in (hixl.SUCCESS, hixl.ALREADY_CONNECTED)
            statuses: list[int] = []

            def write(statuses: list[int] = statuses) -> None:
                statuses.append(first.move(WRITE, limit=300))

            call = threading.Thread(target=write)
            call.start()
            call.join(0.0005 * round_)  # it is stopped at different moments
            with caller.stopped():
                assert last.move(WRITE) == hixl.SUCCESS
            call.join(60)
            assert statuses[0] in (hixl.SUCCESS, hixl.TIMEOUT, hixl.FAILED)
            assert last.move(WRITE) == hixl.SUCCESS
            time.sleep(0.5)  # longer than the limit, in which a transfer that has not ended would go on
            assert target.bytes("m") == pattern(5, size)


def test_stopped_target_is_a_timeout_and_works_again(pair: Pair, hixl_way: str) -> None:
    other = Pair(pair.local, pair.local_address, pair.remote, pair.remote.add("other", 100, 2), pair.address, 100)
    registered(pair.remote, "other")
    with pair.remote.stopped():
        # The region is not known here, so the target is asked.
        assert other.move(READ, limit=200) == hixl.TIMEOUT
        assert pair.move(WRITE, (0, 0, 100), limit=200) == hixl.TIMEOUT
        # More than the window of the link has. By process id, the WRITE has waited until the link has ended.
        for k in range(1100 if hixl_way != "process" else 0):
            assert pair.local.notify(pair.address, "a", str(k), 1) == hixl.TIMEOUT
    if hixl_way != "process":
        assert pair.local.notify(pair.address, "a", "last") == hixl.SUCCESS
        assert pair.remote.notifies() == (hixl.SUCCESS, [("a", "last")])
    pair.disconnect()
    assert pair.connect() == hixl.SUCCESS
    assert other.move(READ) == hixl.SUCCESS
    assert pair.remote.notifies() == (hixl.SUCCESS, [])


UNKNOWN = (hixl.PARAM_INVALID, FAILED)  # the status of a request that was reported, or never existed


def test_asynchronous_requests(pair: Pair) -> None:
    requests = {}
    for k in range(64):
        op = (k * 1000, SIZE // 2 + k * 1000, 1000) if k % 2 else (SIZE // 2 + k * 1000, k * 1000, 1000)
        requests[pair.submit(READ if k % 2 else WRITE, op, user_data=2**64 - 1 - k)] = 2**64 - 1 - k
    assert len(requests) == 64
    first = next(iter(requests))
    assert ended(pair.local, first) == (hixl.SUCCESS, COMPLETED)
    del requests[first]
    for _ in range(2):
        assert pair.local.call("get_transfer_status", first) == UNKNOWN
    seen: dict[int, int] = {}
    query = hixl.GetTransferStatusArgs(3, skip_waiting=True)
    while len(seen) < 63:
        status, results = pair.local.engine.get_all_transfer_status(query)
        assert status == hixl.SUCCESS
        assert len(results) <= 3
        for result in results:
            assert result.status == COMPLETED
            assert result.req not in seen
            assert pair.local.call("get_transfer_status", result.req) == UNKNOWN
            seen[result.req] = result.user_data
    assert seen == requests
    assert pair.local.engine.get_all_transfer_status() == (hixl.SUCCESS, [])
    status, state = pair.local.call("get_transfer_status", 0)
    assert status != hixl.SUCCESS
    assert state == FAILED
    assert pair.local.call("get_transfer_status", 2**64 - 1) == UNKNOWN
    there, here = pair.remote.bytes("m"), pair.local.bytes("m")
    for k in range(1, 64, 2):
        assert here[k * 1000 : k * 1000 + 1000] == there[SIZE // 2 + k * 1000 :][:1000]


@pytest.mark.parametrize("end", ["continue", "kill", "disconnect"])
def test_all_requests_are_reported_in_the_order_of_their_start(pair: Pair, end: str) -> None:
    assert pair.move(WRITE, (0, 0, 1)) == hixl.SUCCESS  # so that the region is known here
    every = pair.local.engine.get_all_transfer_status
    with pair.remote.stopped():
        submitted = [pair.submit(WRITE, (k, k, 1), user_data=90 - k) for k in range(6)]
        expected = [(request, 90 - k, WAITING) for k, request in enumerate(submitted)]
        for most in (0, 2, 6, 2**32 - 1):
            status, results = every(hixl.GetTransferStatusArgs(most))
            assert status == hixl.SUCCESS
            assert [(one.req, one.user_data, one.status) for one in results] == expected[:most]
        assert every(hixl.GetTransferStatusArgs(skip_waiting=True)) == (hixl.SUCCESS, [])
        if end == "kill":
            pair.remote.kill()
        if end == "disconnect":
            assert pair.disconnect(500) == hixl.SUCCESS
    ends_of: list[tuple[int, int]] = []

    def all_have_ended() -> bool:
        status, results = every()
        order = [one.req for one in results]
        assert status == hixl.SUCCESS
        assert order == sorted(order, key=submitted.index)
        ended = [one for one in results if one.status != WAITING]
        assert {one.status for one in ended} <= {COMPLETED if end == "continue" else FAILED}
        ends_of.extend((one.req, one.user_data) for one in ended)
        return len(ends_of) >= 6

    assert eventually(all_have_ended)
    assert sorted(ends_of) == sorted((request, data) for request, data, _ in expected)
    assert every() == (hixl.SUCCESS, [])
    for request in submitted:
        assert pair.local.call("get_transfer_status", request) == UNKNOWN


@pytest.mark.parametrize("hixl_way", ["rings"], indirect=True)
def test_65536_requests_may_wait_for_their_report(pair: Pair) -> None:
    ops = [hixl.TransferOpDesc(*op) for op in pair.at((0, 0, 1))]

    def submit() -> tuple[int, int]:
        return pair.local.engine.transfer_async(pair.address, hixl.READ, ops)

    requests = [submit() for _ in range(1 << 16)]
    assert {status for status, _ in requests} == {hixl.SUCCESS}
    assert submit() == (hixl.RESOURCE_EXHAUSTED, 0)
    assert ended(pair.local, requests[9][1]) == (hixl.SUCCESS, COMPLETED)
    assert submit()[0] == hixl.SUCCESS
    assert submit() == (hixl.RESOURCE_EXHAUSTED, 0)
    # Those that `disconnect` has ended make room.
    pair.reconnect()
    assert submit()[0] == hixl.SUCCESS
    assert pair.local.call("get_transfer_status", requests[0][1]) == UNKNOWN
    status, results = pair.local.engine.get_all_transfer_status()
    assert (status, len(results)) == (hixl.SUCCESS, 1 << 16)


def test_twenty_threads_submit(pair: Pair) -> None:
    def work(thread: int) -> list[int]:
        starts = [thread * 20_000 + k * 1000 for k in range(20)]
        return [pair.submit(READ, (start, start, 1000)) for start in starts]

    requests = {request for found in together(20, work) for request in found}
    assert len(requests) == 400
    done: set[int] = set()

    def all_ended() -> bool:
        status, results = pair.local.engine.get_all_transfer_status()
        done.update(one.req for one in results if one.status == COMPLETED)
        return status == hixl.SUCCESS and done == requests

    assert eventually(all_ended)
    assert pair.local.bytes("m")[:400_000] == pattern(1, SIZE)[:400_000]


def test_disconnect_ends_requests(pair: Pair) -> None:
    assert pair.move(READ, (0, 0, 1)) == hixl.SUCCESS  # so that the region is known here
    with pair.remote.stopped():
        requests = [pair.submit(WRITE, (k, k, 1)) for k in range(5)]
        assert pair.local.call("get_transfer_status", requests[0]) == (hixl.SUCCESS, WAITING)
        assert pair.disconnect(500) == hixl.SUCCESS
    for request in requests:
        assert ended(pair.local, request) == (hixl.NOT_CONNECTED, FAILED)
        assert pair.local.call("get_transfer_status", request) == UNKNOWN
    assert pair.move(READ, (0, 0, 1)) == hixl.NOT_CONNECTED
    assert pair.connect() == hixl.SUCCESS
    assert pair.move(READ, (0, 0, 1)) == hixl.SUCCESS


def test_bytes_of_a_write_are_read_by_any_other_engine(pair: Pair) -> None:
    with ends(End) as (reader,):
        other = Pair(reader, ready(reader, size=SIZE), pair.remote, pair.remote_address, pair.address, SIZE)
        assert other.connect() == hixl.SUCCESS
        for seed in range(20, 26):
            pair.local.write("m", 0, pattern(seed, SIZE))
            if seed % 2:
                assert pair.move(WRITE) == hixl.SUCCESS
            else:
                assert ended(pair.local, pair.submit(WRITE)) == (hixl.SUCCESS, COMPLETED)
            assert other.move(READ) == hixl.SUCCESS
            assert reader.bytes("m") == pattern(seed, SIZE)


def test_killed_target_fails_requests(pair: Pair) -> None:
    assert pair.move(READ, (0, 0, 1)) == hixl.SUCCESS
    with pair.remote.stopped():
        request = pair.submit(WRITE, (0, 0, 8))
        pair.remote.kill()
    assert ended(pair.local, request)[1] == FAILED
    assert pair.move(READ, (0, 0, 8)) == hixl.FAILED
    assert pair.local.notify(pair.address, "a", "b", 2000) in (hixl.FAILED, hixl.TIMEOUT)
    assert pair.disconnect() in (hixl.SUCCESS, hixl.NOT_CONNECTED)
    assert pair.connect() == hixl.FAILED


def test_ipv6() -> None:
    with ends(End, Child) as (local, remote):
        address = f"[::1]:{free_port(socket.AF_INET6)}"
        pair = Pair(local, ready(local, "[::1]"), remote, ready(remote, address, 1), address)
        assert pair.connect() == hixl.SUCCESS
        assert pair.move(READ) == hixl.SUCCESS
        assert local.bytes("m") == pattern(1, 4096)
