"""Memory that the module `hixl` no longer uses: nothing touches it after `deregister_mem`, `finalize` or `TIMEOUT`."""

from __future__ import annotations

import signal
import threading
from typing import TYPE_CHECKING, Any, Callable

import pytest

import hixl
from hixl_ends import LIMIT, Child, End, ends, eventually, listener, pattern

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.usefixtures("hixl_way"), pytest.mark.parametrize("op", [0, 1], ids=["read", "write"])]

READ, WRITE = 0, 1
SIZE = 1 << 20
MARKER = b"\xff"  # a byte that no pattern has


class Pair:
    """A connected client here and a target in another process, each with one registered range."""

    def __init__(self, near: End, far: Any, size: int) -> None:
        self.near, self.far, self.address, self.size = near, far, listener(), size
        self.local, self.remote = near.add("near", size, 2), far.add("far", size, 1)
        self.near_handle = opened(near, "near", "127.0.0.1:0")
        self.far_handle = opened(far, "far", self.address)
        assert near.call("connect", self.address, LIMIT) == hixl.SUCCESS
        assert self.move(READ, size=8) == hixl.SUCCESS  # so that the range is known here
        near.write("near", 0, pattern(2, 8))

    def move(self, op: int, limit: int = LIMIT, size: int | None = None) -> int:
        """Move the whole range, or `size` bytes of it."""
        return self.near.move(self.address, op, [(self.local, self.remote, size or self.size)], limit)

    def destination(self, op: int) -> tuple[Any, str]:
        return (self.near, "near") if op == READ else (self.far, "far")

    def mark(self, end: Any, name: str) -> None:
        end.write(name, 0, MARKER * self.size)


def opened(end: Any, name: str, address: str) -> int:
    assert end.initialize(address) == hixl.SUCCESS
    status, handle = end.register(name)
    assert status == hixl.SUCCESS
    return handle


@pytest.fixture
def pair(hixl_way: str) -> Iterator[Pair]:
    with ends(End, Child) as (near, far):
        yield Pair(near, far, SIZE if hixl_way == "rings" else 8 * SIZE)


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
            assert MARKER not in pair.near.bytes("near")
        return status

    transfers = Repeated(move)
    assert transfers.runs()
    assert pair.far.call("deregister_mem", pair.far_handle) == hixl.SUCCESS
    pair.mark(pair.far, "far")
    assert transfers.end() in (hixl.PARAM_INVALID, hixl.FAILED)
    assert pair.move(op) == hixl.PARAM_INVALID
    assert pair.far.samples("far") == set(MARKER)
    # The connection stays.
    assert pair.far.register("far")[0] == hixl.SUCCESS
    assert pair.move(op) == hixl.SUCCESS


def test_client_deregisters_while_its_transfers_run(pair: Pair, op: int) -> None:
    transfers = Repeated(lambda: pair.move(op))
    assert transfers.runs()
    assert pair.near.call("deregister_mem", pair.near_handle) == hixl.SUCCESS
    pair.mark(pair.near, "near")
    assert transfers.end() in (hixl.PARAM_INVALID, hixl.FAILED)
    assert pair.move(op) == hixl.PARAM_INVALID
    assert pair.near.samples("near") == set(MARKER)
    assert set(MARKER).isdisjoint(pair.far.samples("far"))
    assert pair.near.register("near")[0] == hixl.SUCCESS
    assert pair.move(op) == hixl.SUCCESS


def test_finalize_waits_for_a_transfer_that_runs(pair: Pair, op: int) -> None:
    size = 64 * SIZE
    local, remote = pair.near.add("near2", size, 4), pair.far.add("far2", size, 3)
    for end, name in ((pair.near, "near2"), (pair.far, "far2")):
        assert end.register(name)[0] == hixl.SUCCESS
    where, name = (pair.near, "near2") if op == READ else (pair.far, "far2")
    before = where.samples(name)
    statuses: list[int] = []
    ops = [(local, remote, size)]
    transfer = threading.Thread(target=lambda: statuses.append(pair.near.move(pair.address, op, ops)))
    transfer.start()
    assert eventually(lambda: where.samples(name) != before)
    pair.near.finalize()
    pair.near.write("near2", 0, MARKER * size)
    transfer.join(60)
    assert statuses == [hixl.SUCCESS]
    assert pair.move(op) == hixl.FAILED
    assert pair.near.samples("near2") == set(MARKER)
    assert set(MARKER).isdisjoint(pair.far.samples("far2"))


def test_target_finalizes_while_transfers_run(pair: Pair, op: int) -> None:
    transfers = Repeated(lambda: pair.move(op))
    assert transfers.runs()
    assert pair.far.finalize() is None
    pair.mark(pair.far, "far")
    assert transfers.end() != hixl.SUCCESS
    assert pair.far.samples("far") == set(MARKER)
    assert pair.move(op, 1000) != hixl.SUCCESS
    assert pair.near.notify(pair.address, "a", "b", 1000) != hixl.SUCCESS
    assert pair.near.call("disconnect", pair.address) in (hixl.SUCCESS, hixl.NOT_CONNECTED)
    assert pair.near.call("connect", pair.address) in (hixl.FAILED, hixl.TIMEOUT)
    opened(pair.far, "far", pair.address)
    assert pair.near.call("connect", pair.address, LIMIT) == hixl.SUCCESS
    assert pair.move(op) == hixl.SUCCESS


def test_finalize_cancels_a_request_to_a_stopped_target(pair: Pair, op: int) -> None:
    before = pair.far.bytes("far")
    pair.far.signal(signal.SIGSTOP)
    try:
        status, _ = pair.near.submit(pair.address, op, [(pair.local, pair.remote, pair.size)])
        assert status == hixl.SUCCESS
        pair.near.finalize()
        pair.mark(pair.near, "near")
    finally:
        pair.far.signal(signal.SIGCONT)
    # The target works through what it has received before it serves another client.
    with ends(End) as (other,):
        buffer = other.add("other", 8)
        opened(other, "other", "127.0.0.1:0")
        assert other.call("connect", pair.address, LIMIT) == hixl.SUCCESS
        assert other.move(pair.address, READ, [(buffer, pair.remote, 8)]) == hixl.SUCCESS
    assert pair.far.bytes("far") == before
    assert pair.near.samples("near") == set(MARKER)


def test_timed_out_transfers_touch_nothing_of_the_caller(pair: Pair, op: int) -> None:
    """After `TIMEOUT`, the caller may use its memory for something else. The limit is the shortest that there is."""
    statuses = set()
    for _ in range(20):
        pair.near.write("near", 0, pattern(2, pair.size))
        statuses.add(status := pair.move(op, 1))
        assert status in (hixl.SUCCESS, hixl.TIMEOUT)
        if status == hixl.TIMEOUT:
            pair.mark(pair.near, "near")
            # A round trip, in which a copy that has not ended would go on.
            assert pair.near.notify(pair.address, "a", "b") == hixl.SUCCESS
            assert pair.near.samples("near") == set(MARKER)
            assert set(MARKER).isdisjoint(pair.far.samples("far"))
    pair.near.write("near", 0, pattern(2, pair.size))
    assert pair.move(op) == hixl.SUCCESS
    end, name = pair.destination(op)
    assert end.bytes(name) == pattern(1 if op == READ else 2, pair.size)


def test_target_that_was_stopped_does_not_begin_a_transfer_that_has_timed_out(
    pair: Pair, op: int, hixl_way: str
) -> None:
    before = pair.far.bytes("far")
    # A READ by process id needs no answer of the target.
    expected = hixl.SUCCESS if (hixl_way, op) == ("process", READ) else hixl.TIMEOUT
    pair.far.signal(signal.SIGSTOP)
    try:
        assert pair.move(op, LIMIT if expected == hixl.SUCCESS else 200) == expected
        pair.mark(pair.near, "near")
    finally:
        pair.far.signal(signal.SIGCONT)
    pair.near.call("disconnect", pair.address, LIMIT)
    assert pair.near.call("connect", pair.address, LIMIT) == hixl.SUCCESS
    assert pair.near.notify(pair.address, "a", "b") == hixl.SUCCESS
    assert pair.far.bytes("far") == before
    assert pair.near.samples("near") == set(MARKER)
