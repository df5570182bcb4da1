"""Memory that the module `hixl` no longer uses: nothing touches it after `deregister_mem`, `finalize` or `TIMEOUT`."""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Callable

import pytest

import hixl
from aarch64.probe import reads_other_process
from emulation import lacks
from hixl_ends import LIMIT, Child, End, Pair, connected, ends, pattern, ready
from peers import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = [pytest.mark.usefixtures("hixl_way"), pytest.mark.parametrize("op", [0, 1], ids=["read", "write"])]

READ, WRITE = 0, 1
SIZE = 1 << 20
MARKER = b"\xff"  # a byte that no pattern has


@pytest.fixture
def pair(hixl_way: str) -> Iterator[Pair]:
    with connected(End, Child, size=SIZE if hixl_way == "rings" else 8 * SIZE, seed=2) as made:
        assert made.move(READ, (0, 0, 8)) == hixl.SUCCESS  # so that the range is known here
        made.local.write("m", 0, pattern(2, 8))
        yield made


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
            assert MARKER not in pair.local.bytes("m")
        return status

    transfers = Repeated(move)
    assert transfers.runs()
    assert pair.remote.call("deregister_mem", pair.remote.register("m")[1]) == hixl.SUCCESS
    pair.remote.fill("m", MARKER)
    assert transfers.end() in (hixl.PARAM_INVALID, hixl.FAILED)
    assert pair.move(op) == hixl.PARAM_INVALID
    assert pair.remote.samples("m") == set(MARKER)
    # The connection stays.
    assert pair.remote.register("m")[0] == hixl.SUCCESS
    assert pair.move(op) == hixl.SUCCESS


def test_client_deregisters_while_its_transfers_run(pair: Pair, op: int) -> None:
    transfers = Repeated(lambda: pair.move(op))
    assert transfers.runs()
    assert pair.local.call("deregister_mem", pair.local.register("m")[1]) == hixl.SUCCESS
    pair.local.fill("m", MARKER)
    assert transfers.end() in (hixl.PARAM_INVALID, hixl.FAILED)
    assert pair.move(op) == hixl.PARAM_INVALID
    assert pair.local.samples("m") == set(MARKER)
    assert set(MARKER).isdisjoint(pair.remote.samples("m"))
    assert pair.local.register("m")[0] == hixl.SUCCESS
    assert pair.move(op) == hixl.SUCCESS


def test_finalize_waits_for_a_transfer_that_runs(pair: Pair, op: int) -> None:
    size = 64 * SIZE
    pair.local_address, pair.remote_address = pair.local.add("large", size, 4), pair.remote.add("large", size, 3)
    for end in (pair.local, pair.remote):
        assert end.register("large")[0] == hixl.SUCCESS
    where = pair.local if op == READ else pair.remote
    before = where.samples("large")
    statuses: list[int] = []
    transfer = threading.Thread(target=lambda: statuses.append(pair.move(op, (0, 0, size))))
    transfer.start()
    assert eventually(lambda: where.samples("large") != before)
    pair.local.finalize()
    pair.local.fill("large", MARKER)
    transfer.join(60)
    assert statuses == [hixl.SUCCESS]
    assert pair.move(op) == hixl.FAILED
    assert pair.local.samples("large") == set(MARKER)
    assert set(MARKER).isdisjoint(pair.remote.samples("large"))


def test_target_finalizes_while_transfers_run(pair: Pair, op: int) -> None:
    transfers = Repeated(lambda: pair.move(op))
    assert transfers.runs()
    assert pair.remote.finalize() is None
    pair.remote.fill("m", MARKER)
    assert transfers.end() != hixl.SUCCESS
    assert pair.remote.samples("m") == set(MARKER)
    assert pair.move(op, limit=1000) != hixl.SUCCESS
    assert pair.local.notify(pair.address, "a", "b", 1000) != hixl.SUCCESS
    assert pair.disconnect() in (hixl.SUCCESS, hixl.NOT_CONNECTED)
    assert pair.connect(1000) in (hixl.FAILED, hixl.TIMEOUT)
    pair.remote_address = ready(pair.remote, pair.address, size=pair.size)
    assert pair.connect() == hixl.SUCCESS
    assert pair.move(op) == hixl.SUCCESS


def test_finalize_cancels_a_request_to_a_stopped_target(pair: Pair, op: int) -> None:
    before = pair.remote.bytes("m")
    with pair.remote.stopped():
        pair.submit(op)
        pair.local.finalize()
        pair.local.fill("m", MARKER)
    # The target works through what it has received before it serves another client.
    with ends(End) as (end,):
        other = Pair(end, ready(end), pair.remote, pair.remote_address, pair.address)
        assert other.connect() == hixl.SUCCESS
        assert other.move(READ, (0, 0, 8)) == hixl.SUCCESS
    assert pair.remote.bytes("m") == before
    assert pair.local.samples("m") == set(MARKER)


def test_timed_out_transfers_touch_nothing_of_the_caller(pair: Pair, op: int) -> None:
    """After `TIMEOUT`, the caller may use its memory for something else. The limit is the shortest that there is."""
    statuses = set()
    for _ in range(20):
        pair.local.write("m", 0, pattern(2, pair.size))
        statuses.add(status := pair.move(op, limit=1))
        assert status in (hixl.SUCCESS, hixl.TIMEOUT)
        if status == hixl.TIMEOUT:
            pair.local.fill("m", MARKER)
            # A round trip, in which a copy that has not ended would go on.
            assert pair.local.notify(pair.address, "a", "b") == hixl.SUCCESS
            assert pair.local.samples("m") == set(MARKER)
            assert set(MARKER).isdisjoint(pair.remote.samples("m"))
    pair.local.write("m", 0, pattern(2, pair.size))
    assert pair.move(op) == hixl.SUCCESS
    assert (pair.local if op == READ else pair.remote).bytes("m") == pattern(1 if op == READ else 2, pair.size)


def test_target_that_was_stopped_does_not_begin_a_transfer_that_has_timed_out(
    pair: Pair, op: int, hixl_way: str
) -> None:
    before = pair.remote.bytes("m")
    # A READ by process id needs no answer of the target. Where emulation lacks such reads, the target answers.
    alone = (hixl_way, op) == ("process", READ) and not lacks(reads_other_process)
    expected = hixl.SUCCESS if alone else hixl.TIMEOUT
    with pair.remote.stopped():
        assert pair.move(op, limit=LIMIT if expected == hixl.SUCCESS else 200) == expected
        pair.local.fill("m", MARKER)
    pair.disconnect()
    assert pair.connect() == hixl.SUCCESS
    assert pair.local.notify(pair.address, "a", "b") == hixl.SUCCESS
    assert pair.remote.bytes("m") == before
    assert pair.local.samples("m") == set(MARKER)
