"""Memory that the module `hixl` no longer uses: nothing touches it after `deregister_mem`, `finalize` or `TIMEOUT`."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any, Callable

import pytest

import hixl
from aarch64.probe import reads_other_process
from emulation import lacks
from hixl_ends import LIMIT, Child, End, ends, listener, pattern
from peers import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.usefixtures("hixl_way"), pytest.mark.parametrize("op", [0, 1], ids=["read", "write"])]

READ, WRITE = 0, 1
SIZE = 1 << 20
MARKER = b"\xff"  # a byte that no pattern has


class Pair:
    """A connected client here and a target in another process, each with one registered range."""

    def __init__(self, local: End, remote: Any, size: int) -> None:
        self.local, self.remote, self.address, self.size = local, remote, listener(), size
        self.local_address, self.remote_address = local.add("local", size, 2), remote.add("remote", size, 1)
        self.local_handle = opened(local, "local", "127.0.0.1:0")
        self.remote_handle = opened(remote, "remote", self.address)
        assert local.call("connect", self.address, LIMIT) == hixl.SUCCESS
        assert self.move(READ, size=8) == hixl.SUCCESS  # so that the range is known here
        local.write("local", 0, pattern(2, 8))

    def move(self, op: int, limit: int = LIMIT, size: int | None = None) -> int:
        """Move the whole range, or `size` bytes of it."""
        return self.local.move(self.address, op, [(self.local_address, self.remote_address, size or self.size)], limit)

    def destination(self, op: int) -> tuple[Any, str]:
        return (self.local, "local") if op == READ else (self.remote, "remote")

    def mark(self, end: Any, name: str) -> None:
        end.write(name, 0, MARKER * self.size)


def opened(end: Any, name: str, address: str) -> int:
    assert end.initialize(address) == hixl.SUCCESS
    status, handle = end.register(name)
    assert status == hixl.SUCCESS
    return handle


@pytest.fixture
def pair(hixl_way: str) -> Iterator[Pair]:
    with ends(End, Child) as (local, remote):
        yield Pair(local, remote, SIZE if hixl_way == "rings" else 8 * SIZE)


class Repeated(threading.Thread):
    """Repeats a call until its status is not SUCCESS."""

    def __init__(self, call: Callable[[], int]) -> None:
        super().__init__()
        self.call, self.succeeded, self.status = call, 0, hixl.SUCCESS
        self.start()

    def run(self) -> None:
        while self.status == hixl.SUCCESS:
            self.status = self.call()
            self.succeeded += self.status == hixl.SUCCESS

    def runs(self) -> bool:
        """Wait until a few calls have succeeded."""
        return bool(eventually(lambda: self.succeeded > 3 or not self.is_alive())) and self.is_alive()

    def end(self) -> int:
        self.join(60)
        assert not self.is_alive()
        return self.status


def test_target_deregisters_while_transfers_run(pair: Pair, op: int) -> None:
    def move() -> int:
        status = pair.move(op)
        if status == hixl.SUCCESS and op == READ:
            assert MARKER not in pair.local.bytes("local")
        return status

    transfers = Repeated(move)
    assert transfers.runs()
    assert pair.remote.call("deregister_mem", pair.remote_handle) == hixl.SUCCESS
    pair.mark(pair.remote, "remote")
    assert transfers.end() in (hixl.PARAM_INVALID, hixl.FAILED)
    assert pair.move(op) == hixl.PARAM_INVALID
    assert pair.remote.samples("remote") == set(MARKER)
    # The connection stays.
    assert pair.remote.register("remote")[0] == hixl.SUCCESS
    assert pair.move(op) == hixl.SUCCESS


def test_client_deregisters_while_its_transfers_run(pair: Pair, op: int) -> None:
    transfers = Repeated(lambda: pair.move(op))
    assert transfers.runs()
    assert pair.local.call("deregister_mem", pair.local_handle) == hixl.SUCCESS
    pair.mark(pair.local, "local")
    assert transfers.end() in (hixl.PARAM_INVALID, hixl.FAILED)
    assert pair.move(op) == hixl.PARAM_INVALID
    assert pair.local.samples("local") == set(MARKER)
    assert set(MARKER).isdisjoint(pair.remote.samples("remote"))
    assert pair.local.register("local")[0] == hixl.SUCCESS
    assert pair.move(op) == hixl.SUCCESS


def test_finalize_waits_for_a_transfer_that_runs(pair: Pair, op: int) -> None:
    size = 64 * SIZE
    local_address, remote_address = pair.local.add("local2", size, 4), pair.remote.add("remote2", size, 3)
    for end, name in ((pair.local, "local2"), (pair.remote, "remote2")):
        assert end.register(name)[0] == hixl.SUCCESS
    where, name = (pair.local, "local2") if op == READ else (pair.remote, "remote2")
    before = where.samples(name)
    statuses: list[int] = []
    ops = [(local_address, remote_address, size)]
    transfer = threading.Thread(target=lambda: statuses.append(pair.local.move(pair.address, op, ops)))
    transfer.start()
    assert eventually(lambda: where.samples(name) != before)
    pair.local.finalize()
    pair.local.write("local2", 0, MARKER * size)
    transfer.join(60)
    assert statuses == [hixl.SUCCESS]
    assert pair.move(op) == hixl.FAILED
    assert pair.local.samples("local2") == set(MARKER)
    assert set(MARKER).isdisjoint(pair.remote.samples("remote2"))


def test_target_finalizes_while_transfers_run(pair: Pair, op: int) -> None:
    transfers = Repeated(lambda: pair.move(op))
    assert transfers.runs()
    assert pair.remote.finalize() is None
    pair.mark(pair.remote, "remote")
    assert transfers.end() != hixl.SUCCESS
    assert pair.remote.samples("remote") == set(MARKER)
    assert pair.move(op, 1000) != hixl.SUCCESS
    assert pair.local.notify(pair.address, "a", "b", 1000) != hixl.SUCCESS
    assert pair.local.call("disconnect", pair.address) in (hixl.SUCCESS, hixl.NOT_CONNECTED)
    assert pair.local.call("connect", pair.address) in (hixl.FAILED, hixl.TIMEOUT)
    opened(pair.remote, "remote", pair.address)
    assert pair.local.call("connect", pair.address, LIMIT) == hixl.SUCCESS
    assert pair.move(op) == hixl.SUCCESS


def test_finalize_cancels_a_request_to_a_stopped_target(pair: Pair, op: int) -> None:
    before = pair.remote.bytes("remote")
    pair.remote.signal(signal.SIGSTOP)
    try:
        status, _ = pair.local.submit(pair.address, op, [(pair.local_address, pair.remote_address, pair.size)])
        assert status == hixl.SUCCESS
        pair.local.finalize()
        pair.mark(pair.local, "local")
    finally:
        pair.remote.signal(signal.SIGCONT)
    # The target works through what it has received before it serves another client.
    with ends(End) as (other,):
        buffer = other.add("other", 8)
        opened(other, "other", "127.0.0.1:0")
        assert other.call("connect", pair.address, LIMIT) == hixl.SUCCESS
        assert other.move(pair.address, READ, [(buffer, pair.remote_address, 8)]) == hixl.SUCCESS
    assert pair.remote.bytes("remote") == before
    assert pair.local.samples("local") == set(MARKER)


def test_timed_out_transfers_touch_nothing_of_the_caller(pair: Pair, op: int) -> None:
    """After `TIMEOUT`, the caller may use its memory for something else. The limit is the shortest that there is."""
    statuses = set()
    for _ in range(20):
        pair.local.write("local", 0, pattern(2, pair.size))
        statuses.add(status := pair.move(op, 1))
        assert status in (hixl.SUCCESS, hixl.TIMEOUT)
        if status == hixl.TIMEOUT:
            pair.mark(pair.local, "local")
            # A round trip, in which a copy that has not ended would go on.
            assert pair.local.notify(pair.address, "a", "b") == hixl.SUCCESS
            assert pair.local.samples("local") == set(MARKER)
            assert set(MARKER).isdisjoint(pair.remote.samples("remote"))
    pair.local.write("local", 0, pattern(2, pair.size))
    assert pair.move(op) == hixl.SUCCESS
    end, name = pair.destination(op)
    assert end.bytes(name) == pattern(1 if op == READ else 2, pair.size)


def test_target_that_was_stopped_does_not_begin_a_transfer_that_has_timed_out(
    pair: Pair, op: int, hixl_way: str
) -> None:
    before = pair.remote.bytes("remote")
    # A READ by process id needs no answer of the target. Where emulation lacks such reads, the target answers.
    alone = (hixl_way, op) == ("process", READ) and not lacks(reads_other_process)
    expected = hixl.SUCCESS if alone else hixl.TIMEOUT
    pair.remote.signal(signal.SIGSTOP)
    try:
        assert pair.move(op, LIMIT if expected == hixl.SUCCESS else 200) == expected
        pair.mark(pair.local, "local")
    finally:
        pair.remote.signal(signal.SIGCONT)
    pair.local.call("disconnect", pair.address, LIMIT)
    assert pair.local.call("connect", pair.address, LIMIT) == hixl.SUCCESS
    assert pair.local.notify(pair.address, "a", "b") == hixl.SUCCESS
    assert pair.remote.bytes("remote") == before
    assert pair.local.samples("local") == set(MARKER)
