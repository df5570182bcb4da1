"""`Store.start_get` and `Store.start_put`: transfers of a store, their events, and what they hold.

Not for: threads inside the store (`crates/keeper/src/started.rs`).
"""

from __future__ import annotations

import asyncio
import os
import random
import select
import time
import weakref
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from keeper_process import serving, stopped
from llm_datadist import Busy, Cancelled, Closed, Completed, InvalidArgument, Keeper, Store, Timeout, Transfer
from peers import eventually

from .stores import LIMIT, key

if TYPE_CHECKING:
    from collections.abc import Iterator

SIZE = 4096


@pytest.fixture
def keeper(socket: Path) -> Iterator[Keeper]:
    with Keeper(memory="4MiB", value=SIZE, socket=socket) as opened:
        yield opened


def opened(socket: Path, **options: Any) -> Store:
    return Store(socket, **{"namespace": "a model", "value": SIZE, "timeout": LIMIT, **options})


def value(number: int) -> bytes:
    return key(number).ljust(SIZE, b"-")


def ended(store: Store, count: int) -> list[Completed]:
    """Wait by the descriptor until as many transfers have ended, and take them."""
    events: list[Any] = []
    while len(events) < count:
        assert select.select([store], [], [], LIMIT)[0], events
        events += store.events()
    assert not select.select([store], [], [], 0)[0]
    assert store.events() == []
    return events


@pytest.mark.usefixtures("keeper")
def test_ended_transfers_are_events(socket: Path) -> None:
    with opened(socket) as store:
        assert store.events() == []
        assert not select.select([store], [], [], 0)[0]
        puts = [store.start_put([key(at), key(at + 1)], [value(at), value(at + 1)]) for at in (0, 2, 4)]
        events = ended(store, 3)
        assert [event.transfer for event in events] == puts, "puts run one after the other"
        assert [event.error for event in events] == [None] * 3
        assert [put.result(0) for put in puts] == [[True, True]] * 3
        buffers = [bytearray(SIZE) for _ in range(3)]
        get = store.start_get([key(5), key(9), key(0)], buffers)
        assert isinstance(get, Transfer)
        assert get.result() == [True, False, True]
        assert (get.bytes, get.done(), get.cancel()) == (2 * SIZE, True, False)
        assert [bytes(buffers[0]), bytes(buffers[2])] == [value(5), value(0)]
        assert store.events() == [], "its outcome was taken"
        assert [store.start_get([key(0)], [bytearray(SIZE)]).result() for _ in range(3)] == [[True]] * 3
        assert "done" in repr(get)


@pytest.mark.usefixtures("keeper")
def test_transfers_are_awaited(socket: Path) -> None:
    async def both(store: Store) -> list[list[bool]]:
        put = await store.start_put([key(1)], [value(1)])
        return [put, *await asyncio.gather(*(store.start_get([key(n)], [bytearray(SIZE)]) for n in (1, 2)))]

    with opened(socket) as store:
        assert asyncio.run(both(store)) == [[True], [True], [False]]
        assert store.events() == []


@pytest.mark.usefixtures("keeper")
def test_rows_of_one_buffer(socket: Path) -> None:
    numpy = pytest.importorskip("numpy")
    with opened(socket) as store:
        memory = bytearray(b"".join(value(number) for number in range(4)))
        assert store.start_put([key(2), key(0)], memory, rows=[2, 0]).result() == [True, True]
        assert store.put([key(3)], memoryview(memory), rows=(3,)) == [True]
        into = numpy.zeros((6, SIZE), numpy.uint8)
        rows = numpy.array([5, 1, 3, 0], numpy.int32)
        assert store.start_get([key(0), key(2), key(1), key(3)], into, rows=rows).result() == [True, True, False, True]
        assert store.get([key(0)], into, rows=[4]) == [True]
        assert [bytes(into[at]) for at in (5, 4, 1, 0)] == [value(0), value(0), value(2), value(3)]
        assert not into[2].any()
        for wrong, text in [
            ([6], r"rows\[0\]=6 .*0 to 5"),
            ([-1], r"rows\[0\]=-1"),
            ([1, 2], r"len\(rows\)=2 .*1, one for each key"),
            ([None] * 3, r"len\(rows\)=3 .*1, one for each key"),
            ([2**70], r"rows\[0\]=1180591620717411303424 .*0 to 5"),
            ((-(2**70),), r"rows\[0\]=-1180591620717411303424"),
            (numpy.array([7], numpy.uint64), r"rows\[0\]=7"),
        ]:
            with pytest.raises(InvalidArgument, match=text):
                store.start_get([key(0)], into, rows=wrong)
        assert store.get([key(0), key(2)], into, rows=[numpy.int64(2), 4]) == [True, True]
        assert [bytes(into[at]) for at in (2, 4)] == [value(0), value(2)]
        for bad in (b"\0", bytearray(1), "a", 1):
            with pytest.raises(TypeError, match="rows must be a list or an array of integers"):
                store.get([key(0)], into, rows=bad)  # type: ignore[arg-type]
        for unfit in ([1.5], [None], (True,), [False]):
            with pytest.raises(TypeError, match=r"rows\[0\] must be an int"):
                store.get([key(0)], into, rows=unfit)  # type: ignore[arg-type]
        with pytest.raises(InvalidArgument, match=r"into\[1\]=memory that overlaps into\[0\]"):
            store.start_get([key(0), key(1)], into, rows=[3, 3])
        with pytest.raises(InvalidArgument, match="into=5000 bytes must be a multiple of 4096 bytes"):
            store.start_get([key(0)], bytearray(5000), rows=[0])
        with pytest.raises(InvalidArgument, match="read-only"):
            store.start_get([key(0)], bytes(SIZE), rows=[0])
        assert store.events() == []


def test_transfers_end_in_time_although_others_wait_for_the_keeper(socket: Path) -> None:
    with serving(socket) as process, opened(socket) as store:
        assert store.start_put([key(0)], [value(0)]).result() == [True]
        with stopped(process):
            first = store.start_put([key(1)], [value(1)])
            late = store.start_put([key(2)], [value(2)], timeout=0.02)
            cancelled = store.start_put([key(3)], [value(3)])
            buffer = bytearray(SIZE)
            assert store.start_get([key(0), key(1)], [buffer, bytearray(SIZE)]).result(LIMIT) == [True, False]
            assert bytes(buffer) == value(0)
            with pytest.raises(Timeout, match="timeout passed while waiting for a thread"):
                late.result(LIMIT)
            assert late.nanos == 0, "it has not begun"
            assert cancelled.cancel()
            with pytest.raises(Cancelled):
                cancelled.result(LIMIT)
            with pytest.raises(TimeoutError):
                first.result(0.01)
            assert not first.done()
            assert first.cancel()
            with pytest.raises(Cancelled):
                first.result(LIMIT)
        eventually(lambda: store.put([key(5)], [value(5)]) == [True])
        assert store.exists([key(2), key(3)]) == [False, False], "they had not begun"


def test_waiting_transfers_use_a_bounded_number_of_bytes(socket: Path) -> None:
    with serving(socket) as process, opened(socket, queue=3 * SIZE) as store:
        with stopped(process):
            first = store.start_put([key(1), key(2)], [value(1), value(2)])
            with pytest.raises(Busy, match=r"use too many bytes.*bytes=8192.*in_use=8192.*queue=12288"):
                store.start_get([key(1), key(2)], [bytearray(SIZE), bytearray(SIZE)])
            assert store.start_get([key(1)], [bytearray(SIZE)]).result() == [False]
        assert first.result() == [True, True]
        assert store.start_get([key(1), key(2)], [bytearray(SIZE), bytearray(SIZE)]).result() == [True, True]
        with pytest.raises(InvalidArgument, match="queue=12288 must be at least 16384, the bytes of the values"):
            store.start_put([key(n) for n in range(4)], [value(n) for n in range(4)])
    with pytest.raises(InvalidArgument, match="queue"):
        opened(socket, queue=0)


@pytest.mark.usefixtures("keeper")
def test_outcomes_that_nobody_takes_are_bounded(socket: Path) -> None:
    with opened(socket) as store:
        for _ in range(4096):
            store.start_get([], [])
        with pytest.raises(Busy, match="limit=4096"):
            store.start_get([], [])
        assert len(ended(store, 4096)) == 4096
        assert store.start_get([], []).result() == []


class Buffer(bytearray):
    """One that weak references may refer to."""


def test_buffers_are_held_until_their_transfer_has_ended(socket: Path) -> None:
    with serving(socket) as process, opened(socket) as store:
        with stopped(process):
            buffer = Buffer(value(1))
            gone = weakref.ref(buffer)
            put = store.start_put([key(1)], [buffer])
            with pytest.raises(BufferError):
                buffer.append(0)
            del buffer
            assert gone() is not None
        eventually(put.done)
        assert gone() is None
        assert put.result() == [True]
        buffer = Buffer(SIZE)
        gone = weakref.ref(buffer)
        assert store.start_get([key(1)], [buffer])
        del buffer
        (event,) = ended(store, 1)
        assert (gone(), event.transfer.result()) == (None, [True])


@pytest.mark.usefixtures("keeper")
def test_buffers_of_ended_transfers_go_with_the_next_call(socket: Path) -> None:
    """Also if nobody asks for the outcome."""
    with opened(socket) as store:
        buffer = Buffer(SIZE)
        gone = weakref.ref(buffer)
        kept = store.start_get([key(1)], [buffer])
        del buffer
        assert select.select([store], [], [], LIMIT)[0]
        assert gone() is not None
        store.start_get([], [])
        assert gone() is None
        assert kept.result() == [False]


def test_close_ends_transfers_and_lets_go_of_their_buffers(socket: Path) -> None:
    with serving(socket) as process:
        store = opened(socket)
        with stopped(process):
            buffers = [bytearray(SIZE) for _ in range(20)]
            puts = [store.start_put([key(number)], [buffer]) for number, buffer in enumerate(buffers)]
            began = time.monotonic()
            store.close()
            assert time.monotonic() - began < LIMIT / 2
        for put in puts:
            assert put.done()
            with pytest.raises(Closed, match="the store was closed"):
                put.result()
        for buffer in buffers:
            buffer.append(0)
        for call in (store.events, store.fileno, lambda: store.start_get([], [])):
            with pytest.raises(Closed, match="the store was closed"):
                call()
        store.close()


@pytest.mark.usefixtures("keeper")
def test_forked_child_refuses_calls(socket: Path) -> None:
    store = opened(socket)
    put = store.start_put([key(1)], [value(1)])
    eventually(put.done)
    forked = os.fork()
    if forked == 0:
        status = 1
        try:
            for call in (store.events, store.fileno, lambda: store.start_get([], []), put.done, put.result):
                with pytest.raises(Closed, match="forked"):
                    call()
            store.close()
            del store, put
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(forked, 0)[1]) == 0
    (event,) = ended(store, 1)
    assert event.transfer is put
    store.close()


def test_stores_share_few_threads_which_start_on_demand(socket: Path) -> None:
    def threads() -> int:
        return sum(name.startswith(("llm-worker", "llm-clock")) for name in names())

    def names() -> list[str]:
        found = []
        for task in Path("/proc/self/task").iterdir():
            with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
                found.append((task / "comm").read_text())
        return found

    with serving(socket) as process:
        before = threads()
        stores = [opened(socket) for _ in range(8)]
        assert threads() == before
        with stopped(process):
            puts = [store.start_put([key(n)], [value(n)]) for n, store in enumerate(stores * 20)]
            gets = [store.start_get([key(999)], [bytearray(SIZE)]) for store in stores * 20]
            assert [get.result() for get in gets] == [[False]] * 160
            assert threads() - before <= 8 * 3 + 1, "one put and two gets of a store"
        assert [put.result() for put in puts] == [[True]] * 160
        for store in stores:
            store.close()


class Model:
    """A store with random calls, and what a dict would have."""

    def __init__(self, socket: Path, seed: int) -> None:
        self.socket, self.choose = socket, random.Random(seed)  # noqa: S311
        self.store = opened(socket)
        self.certain: set[int] = set()  # numbers of values whose puts have ended
        self.possible: set[int] = set()  # those whose puts were started
        self.running: dict[Transfer[list[bool]], tuple[list[int], list[bytearray] | None, set[int]]] = {}
        self.started = self.results = 0

    def put(self, numbers: list[int]) -> None:
        put = self.store.start_put([key(n) for n in numbers], [value(n) for n in numbers])
        self.running[put] = numbers, None, set()
        self.possible.update(numbers)
        self.started += 1

    def get(self, numbers: list[int]) -> None:
        buffers = [bytearray(SIZE) for _ in numbers]
        get = self.store.start_get([key(n) for n in numbers], buffers)
        self.running[get] = numbers, buffers, set(self.certain)
        self.started += 1

    def take(self, transfer: Transfer[list[bool]], closed: bool = False) -> None:
        numbers, buffers, must = self.running.pop(transfer)
        self.results += 1
        assert transfer.done()
        try:
            done = transfer.result(0)
        except Closed:
            assert closed
            return
        assert len(done) == len(numbers)
        if buffers is None:
            assert all(done)
            self.certain.update(numbers)
            return
        for number, buffer, found in zip(numbers, buffers, done):
            assert found or number not in must
            assert not found or (number in self.possible and bytes(buffer) == value(number))

    def reopen(self) -> None:
        self.store.close()
        for transfer in list(self.running):
            self.take(transfer, closed=True)
        self.store = opened(self.socket)

    def step(self) -> None:
        kind = self.choose.random()
        if kind < 0.8:
            call = self.put if kind < 0.4 else self.get
            call(self.choose.sample(range(200), self.choose.randint(0, 20)))
        elif kind < 0.9:
            for event in self.store.events(self.choose.randint(1, 10)):
                self.take(event.transfer)
        elif kind < 0.98 and self.running:
            transfer = self.choose.choice(list(self.running))
            assert transfer.result(LIMIT) is not None
            self.take(transfer)
        elif kind >= 0.98:
            self.reopen()


@pytest.mark.usefixtures("keeper")
@pytest.mark.parametrize("seed", range(4))
def test_random_calls_have_the_results_of_a_dict(socket: Path, seed: int) -> None:
    """Starts, takes and closes in random order. The keeper has room for all keys, so nothing is replaced."""
    model = Model(socket, seed)
    for _ in range(400):
        model.step()
    for event in ended(model.store, len(model.running)):
        model.take(event.transfer)
    assert (model.running, model.results) == ({}, model.started)
    assert model.certain
    assert all(model.store.exists([key(n) for n in sorted(model.certain)]))
    model.store.close()


def test_a_store_that_is_dropped_ends_its_transfers(socket: Path) -> None:
    with serving(socket) as process, stopped(process):
        store = opened(socket, timeout=0.2)
        put = store.start_put([key(1)], [value(1)], timeout=LIMIT)
        del store
        with pytest.raises(Closed):
            put.result(0)
