"""`KeeperL2` over a real keeper and objects in plain memory, without LMCache.

`integration-tests/store` runs it inside the real package.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import select
import sys
import threading
import time
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pytest

from keeper_process import serving, stopped
from llm_datadist import Closed, Keeper, Store
from llm_datadist.integrations import store_settings
from peers import eventually
from stand_ins import put

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.skipif(sys.version_info < (3, 10), reason="os.eventfd is there from Python 3.10 on")

LIMIT = 30.0
NAME = "llm_datadist.integrations.lmcache_l2"
SHAPE = (2, 3, 16)


class Bitmap(set):  # type: ignore[type-arg]
    """LMCache's bitmap, as a set of its bits."""

    def __init__(self, size: int) -> None:
        self.size = size

    set = set.add  # type: ignore[assignment]


class L2StoreResult(NamedTuple):
    ok: bool
    bytes: int


class L2AdapterInterface:
    def __init__(self, max_capacity_bytes: int = 0) -> None:
        self.capacity = max_capacity_bytes


@dataclass(frozen=True)
class Key:
    chunk_hash: bytes
    model_name: str = "m"
    kv_rank: int = 1 << 24
    object_group_id: int = 0
    cache_salt: str = ""


@dataclass(frozen=True)
class Dtype:
    name: str
    itemsize: int

    def __str__(self) -> str:
        return self.name


BF16, FP16 = Dtype("torch.bfloat16", 2), Dtype("torch.float16", 2)


@dataclass
class Layout:
    """The description of objects that LMCache gives to lookups."""

    shapes: list[tuple[int, ...]] = field(default_factory=lambda: [SHAPE])
    dtypes: list[Dtype] = field(default_factory=lambda: [BF16])

    @property
    def size(self) -> int:
        return sum(int(np.prod(shape)) * dtype.itemsize for shape, dtype in zip(self.shapes, self.dtypes))


LAYOUT = Layout()


class Object:
    def __init__(self, seed: int | None = None, layout: Layout = LAYOUT, *, simple: bool = False) -> None:
        self.layout, self.simple = layout, simple
        self.memory = np.zeros(layout.size, np.uint8)
        if seed is not None:
            self.memory[:] = np.frombuffer(hashlib.shake_128(b"%d" % seed).digest(layout.size), np.uint8)

    def get_size(self) -> int:
        return self.layout.size

    @property
    def meta(self) -> Any:
        """As LMCache has it. Objects of its benchmark have one shape, and no lists."""
        (shape, *more), (dtype, *_) = self.layout.shapes, self.layout.dtypes
        lists = (self.layout.shapes, self.layout.dtypes) if more or not self.simple else (None, None)
        return SimpleNamespace(shape=shape, dtype=dtype, shapes=lists[0], dtypes=lists[1])

    @property
    def data_ptr(self) -> int:
        return int(self.memory.ctypes.data)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Object) and np.array_equal(self.memory, other.memory)

    __hash__ = None  # type: ignore[assignment]


KEYS = [Key(hashlib.sha256(b"%d" % number).digest()) for number in range(6)]


@pytest.fixture(scope="module")
def module() -> Iterator[Any]:
    """The adapter, imported over stand-ins of LMCache: all that it needs, so not the transfer channel."""
    names = ("lmcache", "v1", "distributed", "l2_adapters")
    parts: dict[str, dict[str, Any]] = {
        **{".".join(names[: end + 1]): {} for end in range(len(names))},
        "lmcache.lmcache_native": {"Bitmap": Bitmap},
        "lmcache.v1.distributed.internal_api": {"L2StoreResult": L2StoreResult},
        "lmcache.v1.distributed.l2_adapters.base": {"L2AdapterInterface": L2AdapterInterface},
    }
    with pytest.MonkeyPatch.context() as patch:
        put(patch, parts)
        patch.setattr(store_settings, "version", lambda _: "0.5.6")
        yield importlib.import_module(NAME)
        del sys.modules[NAME]


class Server:
    """An adapter, and what LMCache does with it: submit, wait for the signal, ask for the result."""

    def __init__(self, module: Any, options: dict[str, Any]) -> None:
        self.adapter = module.KeeperL2(options, l1_memory_desc=None)
        self.stored: dict[int, L2StoreResult] = {}

    def _wait(self, fd: int) -> None:
        assert select.select([fd], [], [], LIMIT)[0]
        os.eventfd_read(fd)

    def stored_by(self, task: int) -> L2StoreResult:
        while task not in self.stored:
            self._wait(self.adapter.get_store_event_fd())
            self.stored.update(self.adapter.pop_completed_store_tasks())
        return self.stored.pop(task)

    def _bits(self, fd: int, query: Any, task: int) -> list[bool]:
        end = time.monotonic() + LIMIT
        while True:
            self._wait(fd)
            found = query(task)
            if found is not None:
                assert query(task) is None  # a result is given out once
                return [at in found for at in range(found.size)]
            assert time.monotonic() < end

    def store(self, keys: list[Key], objects: list[Object]) -> L2StoreResult:
        return self.stored_by(self.adapter.submit_store_task(keys, objects))

    def lookup(self, keys: list[Key], layout: Layout = LAYOUT) -> list[bool]:
        task = self.adapter.submit_lookup_and_lock_task(keys, {0: layout})
        return self._bits(self.adapter.get_lookup_and_lock_event_fd(), self.adapter.query_lookup_and_lock_result, task)

    def load(self, keys: list[Key], objects: list[Object]) -> list[bool]:
        task = self.adapter.submit_load_task(keys, objects)
        return self._bits(self.adapter.get_load_event_fd(), self.adapter.query_load_result, task)


class Opener:
    def __init__(self, module: Any, socket: Path) -> None:
        self._module, self._socket = module, socket
        self.opened: list[Server] = []

    def __call__(self, **options: Any) -> Server:
        given = {"socket": str(self._socket), "revision": "r", "timeout_ms": 2000, **options}
        self.opened.append(Server(self._module, {name: value for name, value in given.items() if value is not None}))
        return self.opened[-1]


@pytest.fixture
def without_keeper(module: Any, socket: Path) -> Iterator[Opener]:
    """Opens servers or tiers. No keeper runs unless the test starts one."""
    opener = Opener(module, socket)
    yield opener
    for each in opener.opened:
        each.adapter.close()


@pytest.fixture
def server(keeper: Keeper, without_keeper: Opener) -> Opener:
    """The same while a keeper runs."""
    assert keeper.slots
    return without_keeper


@pytest.fixture
def one(server: Opener) -> Server:
    return server()


def leased(server: Server) -> int:
    store = server.adapter._stores._all()[0]
    return int(store.stats()["keeper"]["leased"])


def test_objects_are_found_by_another_server(server: Opener) -> None:
    objects = [Object(seed) for seed in range(4)]
    first = server()
    assert first.lookup(KEYS) == [False] * 6
    assert first.store(KEYS[:4], objects) == L2StoreResult(ok=True, bytes=4 * LAYOUT.size)
    first.adapter.close()
    second = server()
    assert second.lookup(KEYS) == [True] * 4 + [False] * 2
    into = [Object() for _ in KEYS]
    assert second.load(KEYS, into) == [True] * 4 + [False] * 2
    assert into[:4] == objects


def test_a_lookup_leases_objects_until_they_are_unlocked(one: Server) -> None:
    one.store(KEYS[:3], [Object(seed) for seed in range(3)])
    assert leased(one) == 0
    one.lookup(KEYS)
    assert leased(one) == 3
    one.adapter.submit_unlock(KEYS)
    eventually(lambda: one.adapter._looking._waiting == 0)
    assert leased(one) == 0
    assert one.lookup(KEYS[:1]) == [True]


def test_deleted_objects_are_gone(one: Server) -> None:
    one.adapter.delete(KEYS)  # there is no store yet
    one.store(KEYS[:3], [Object(seed) for seed in range(3)])
    one.adapter.delete(KEYS[1:])
    assert one.lookup(KEYS[:3]) == [True, False, False]


@pytest.mark.parametrize("name", ["chunk_hash", "model_name", "kv_rank", "object_group_id", "cache_salt"])
def test_objects_with_other_keys_are_others(one: Server, name: str) -> None:
    one.store(KEYS[:1], [Object(0)])
    other: Any = {"chunk_hash": b"1", "kv_rank": 2, "object_group_id": 1}.get(name, "x")
    assert one.lookup([KEYS[0], replace(KEYS[0], **{name: other})]) == [True, False]


OTHERS = [
    Layout(dtypes=[FP16]),
    Layout(shapes=[(3, 2, 16)]),
    Layout(shapes=[(2, 3, 8), (2, 3, 8)], dtypes=[BF16, BF16]),
    Layout(shapes=[(2, 3, 17)]),
]


@pytest.mark.parametrize("layout", OTHERS, ids=str)
def test_objects_of_another_layout_are_never_loaded(server: Opener, layout: Layout) -> None:
    server().store(KEYS[:1], [Object(0)])
    other = server()
    assert other.lookup(KEYS[:1], layout) == [False]
    into = [Object(layout=layout)]
    assert other.load(KEYS[:1], into) == [False]
    assert not into[0].memory.any()
    assert other.store(KEYS[:1], [Object(1, layout)]) == L2StoreResult(ok=True, bytes=layout.size)
    mixed = [Object(), Object(layout=layout)]
    assert other.load([KEYS[0], KEYS[0]], mixed) == [True, True]
    assert mixed == [Object(0), Object(1, layout)]


def test_servers_with_other_revisions_or_versions_share_nothing(
    server: Opener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server().store(KEYS[:1], [Object(0)])
    assert server(revision="s").lookup(KEYS[:1]) == [False]
    assert caplog.records == []
    monkeypatch.setattr(store_settings, "version", lambda _: "0.5.7")
    assert server().lookup(KEYS[:1]) == [False]
    assert "was not tested with lmcache 0.5.7; tested: 0.5.6" in caplog.text


def test_an_object_with_one_shape_is_one_with_a_list_of_one(one: Server) -> None:
    one.store(KEYS[:1], [Object(0, simple=True)])
    into = [Object()]
    assert one.load(KEYS[:1], into) == [True]
    assert into == [Object(0)]


def test_a_lookup_without_a_layout_finds_what_this_server_knows(one: Server) -> None:
    """As LMCache's benchmark looks up."""
    nothing = Layout(shapes=[], dtypes=[])
    assert one.lookup(KEYS[:1], nothing) == [False]
    one.store(KEYS[:1], [Object(0)])
    assert one.lookup(KEYS[:2], nothing) == [True, False]


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            {"socket": None},
            "options of KeeperL2: .*missing required field `socket`; allowed: socket, revision, timeout_ms",
        ),
        ({"revision": None}, "missing required field `revision`"),
        ({"revision": ""}, "revision"),
        ({"sockets": "k"}, "contains unknown field `sockets`"),
        ({"timeout_ms": 60_001}, "Expected `int` <= 60000"),
    ],
)
def test_bad_options_are_refused(without_keeper: Opener, options: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        without_keeper(**options)


def test_a_keeper_with_smaller_values_stores_nothing_and_the_log_says_so_once(
    socket: Path, without_keeper: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    large = Layout(shapes=[(4097,)])
    with Keeper(memory="1MiB", socket=socket, value=4096):
        one = without_keeper()
        for _ in range(2):
            assert one.lookup(KEYS[:1], large) == [False]
            assert not one.store(KEYS[:1], [Object(0, large)]).ok
            assert one.load(KEYS[:1], [Object(0, large)]) == [False]
        assert one.store(KEYS[:1], [Object(0)]).ok
    assert len(caplog.messages) == 1
    assert f"a call to the keeper at {socket} has failed: InvalidArgument: value=8194" in caplog.text


def test_without_a_keeper_every_task_ends_and_the_log_says_so_once(
    socket: Path, without_keeper: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    one = without_keeper()
    for _ in range(2):
        assert one.lookup(KEYS) == [False] * 6
        assert one.store(KEYS[:2], [Object(0), Object(1)]) == L2StoreResult(ok=False, bytes=0)
        assert one.load(KEYS[:2], [Object(), Object()]) == [False] * 2
        one.adapter.submit_unlock(KEYS)
        one.adapter.delete(KEYS)
    assert one.adapter.report_status()["is_healthy"] is False
    assert [record.levelno for record in caplog.records if "is away, so" in record.getMessage()] == [logging.WARNING]
    assert f"the keeper at {socket} is away" in caplog.text


def test_a_keeper_that_has_come_back_is_used_again(socket: Path, without_keeper: Opener) -> None:
    one = without_keeper()
    assert not one.store(KEYS[:1], [Object(0)]).ok
    with Keeper(memory="1MiB", socket=socket, value="4KiB"):
        eventually(lambda: one.store(KEYS[:1], [Object(0)]).ok)
        assert one.lookup(KEYS[:1]) == [True]
    assert one.lookup(KEYS[:1]) == [False]


def test_the_status_has_the_counts_of_all_layouts(one: Server, socket: Path) -> None:
    assert one.adapter.report_status()["is_healthy"] is True
    one.store(KEYS[:1], [Object(0)])
    one.load(KEYS[:2], [Object(), Object()])
    one.load(KEYS[:1], [Object(layout=OTHERS[0])])
    status = one.adapter.report_status()
    assert (status["type"], status["socket"], status["is_healthy"]) == ("KeeperL2", str(socket), True)
    assert (status["layouts"], status["hits"], status["misses_absent"]) == (2, 1, 2)


class Blocked:
    """Lets no store task go on until it is released."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any) -> None:
        self.entered, self.released = threading.Event(), threading.Event()
        self.calls = 0
        stores = module._Stores.move

        def move(*given: Any) -> list[bool]:
            self.calls += 1
            self.entered.set()
            assert self.released.wait(LIMIT)
            return stores(*given)

        monkeypatch.setattr(module._Stores, "move", move)


@pytest.fixture
def blocked(monkeypatch: pytest.MonkeyPatch, module: Any) -> Blocked:
    return Blocked(monkeypatch, module)


def overdue(blocked: Blocked) -> None:
    """Let the tasks of a server with a time limit of 50 ms go on when it is over."""
    deadline = time.monotonic() + 0.05
    eventually(lambda: time.monotonic() > deadline)
    blocked.released.set()


def test_a_task_that_waits_for_too_long_fails_without_a_copy(server: Opener, blocked: Blocked) -> None:
    one = server(timeout_ms=50)
    first = one.adapter.submit_store_task(KEYS[:1], [Object(0)])
    assert blocked.entered.wait(LIMIT)
    second = one.adapter.submit_store_task(KEYS[1:2], [Object(1)])
    overdue(blocked)
    assert not one.stored_by(first).ok  # its time is over before the keeper is asked
    assert one.stored_by(second) == L2StoreResult(ok=False, bytes=0)
    assert one.lookup(KEYS[:2]) == [False, False]


def test_a_load_that_waits_for_too_long_finds_nothing(
    server: Opener, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    server().store(KEYS[:1], [Object(0)])
    blocked, one = Blocked(monkeypatch, module), server(timeout_ms=50)
    into = Object()
    one.adapter.submit_load_task(KEYS[:1], [Object()])
    assert blocked.entered.wait(LIMIT)
    second = one.adapter.submit_load_task(KEYS[:1], [into])
    overdue(blocked)
    eventually(lambda: one.adapter._loading._waiting == 0)
    assert one.adapter.query_load_result(second) == set()
    assert not into.memory.any()


def test_a_store_without_one_of_its_objects_has_failed(
    server: Opener, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module._Stores, "move", lambda *_: [True, False])
    assert not server().store(KEYS[:2], [Object(0), Object(1)]).ok


def test_tasks_above_the_bound_fail_at_once(
    server: Opener, blocked: Blocked, module: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "_MAX_WAITING", 3)
    one = server()
    tasks = [one.adapter.submit_store_task(KEYS[:1], [Object(0)]) for _ in range(3)]
    over = [one.adapter.submit_store_task(KEYS[:1], [Object(0)]) for _ in range(2)]
    assert [one.stored_by(task).ok for task in over] == [False, False]
    assert sum("3 tasks wait already" in record.getMessage() for record in caplog.records) == 1
    blocked.released.set()
    assert [one.stored_by(task).ok for task in tasks] == [True] * 3
    assert len({*tasks, *over}) == 5
    assert blocked.calls == 3
    assert one.store(KEYS[:1], [Object(0)]).ok


def test_threads_start_with_the_adapter(one: Server, server: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """A task must not be reported as failed because its thread did not start, and then run all the same."""
    before = len(list(Path("/proc/self/fd").iterdir()))

    start, left = threading.Thread.start, iter(range(2, -10, -1))

    def refuse(thread: threading.Thread) -> None:
        if next(left) <= 0:
            raise RuntimeError("can't start new thread")
        start(thread)

    monkeypatch.setattr(threading.Thread, "start", refuse)
    with pytest.raises(RuntimeError, match="can't start new thread"):
        server()  # two of its three threads start
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    assert one.store(KEYS[:1], [Object(0)]).ok
    assert one.lookup(KEYS[:1]) == [True]
    assert one.load(KEYS[:1], [Object()]) == [True]


def test_a_store_that_is_opened_keeps_nobody_waiting(
    server: Opener, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two threads open the store of a layout at once, and one of the two is closed."""
    both, released = threading.Barrier(3), threading.Event()
    made: list[Store] = []

    def slow(*given: Any, **named: Any) -> Store:
        both.wait(LIMIT)
        assert released.wait(LIMIT)
        made.append(Store(*given, **named))
        return made[-1]

    monkeypatch.setattr(module, "Store", slow)
    one = server()
    task = one.adapter.submit_store_task(KEYS[:1], [Object(0)])
    one.adapter.submit_lookup_and_lock_task(KEYS[:1], {0: LAYOUT})
    both.wait(LIMIT)
    assert one.adapter.report_status()["layouts"] == 0
    released.set()
    assert one.stored_by(task).ok
    eventually(lambda: one.adapter._looking._waiting == 0)
    assert len(made) == 2
    (kept,) = one.adapter._stores._all()
    for store in made:
        if store is kept:
            assert store.exists([bytes(28)]) == [False]
        else:
            with pytest.raises(Closed):
                store.exists([bytes(28)])


def test_a_store_that_is_opened_while_the_adapter_closes_is_closed(
    server: Opener, module: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    made: list[Store] = []

    def slow(*given: Any, **named: Any) -> Store:
        one.adapter._stores.close()
        made.append(Store(*given, **named))
        return made[-1]

    monkeypatch.setattr(module, "Store", slow)
    one = server()
    assert one.lookup(KEYS[:1]) == [False]
    with pytest.raises(Closed):
        made[0].exists([bytes(28)])


def test_a_lookup_at_a_stopped_keeper_finds_what_a_load_finds(socket: Path, without_keeper: Opener) -> None:
    """The keeper does not answer the lease, which ends the connection. So nothing can be loaded."""
    with serving(socket) as keeper:
        one = without_keeper()
        one.store(KEYS[:1], [Object(0)])
        assert one.lookup(KEYS[:1]) == [True]
        with stopped(keeper):
            found = one.lookup(KEYS[:1])
            assert found == one.load(KEYS[:1], [Object()]) == [False]
        eventually(lambda: one.lookup(KEYS[:1]) == [True])
        assert one.load(KEYS[:1], [Object()]) == [True]


def test_the_status_does_not_end_connections(socket: Path, without_keeper: Opener) -> None:
    """The keeper is stopped. Loads go on, because they read its memory."""
    with serving(socket) as keeper:
        one = without_keeper()
        one.store(KEYS[:1], [Object(0)])
        with stopped(keeper):
            assert one.adapter.report_status()["is_healthy"] is False
            assert one.load(KEYS[:2], [Object(), Object()]) == [True, False]
            assert one.load(KEYS[:1], [Object()]) == [True]
        eventually(lambda: one.adapter.report_status()["is_healthy"])


def test_lookups_do_not_wait_for_copies(one: Server, blocked: Blocked) -> None:
    task = one.adapter.submit_store_task(KEYS[:1], [Object(0)])
    assert blocked.entered.wait(LIMIT)
    assert one.lookup(KEYS[:1]) == [False]
    blocked.released.set()
    assert one.stored_by(task).ok


def test_results_that_nobody_asks_for_are_bounded(server: Opener, module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "_MAX_RESULTS", 4)
    one = server()
    tasks = [one.adapter.submit_lookup_and_lock_task(KEYS, {0: LAYOUT}) for _ in range(10)]
    eventually(lambda: one.adapter._looking._waiting == 0)
    results = [one.adapter.query_lookup_and_lock_result(task) for task in tasks]
    assert [result is not None for result in results] == [False] * 6 + [True] * 4


def test_a_signal_comes_after_its_result(one: Server) -> None:
    fd = one.adapter.get_lookup_and_lock_event_fd()
    for _ in range(200):
        task = one.adapter.submit_lookup_and_lock_task(KEYS, {0: LAYOUT})
        assert select.select([fd], [], [], LIMIT)[0]
        assert os.eventfd_read(fd) == 1
        assert one.adapter.query_lookup_and_lock_result(task) is not None


def test_the_three_descriptors_differ_and_do_not_block(without_keeper: Opener) -> None:
    adapter = without_keeper().adapter
    fds = {adapter.get_store_event_fd(), adapter.get_lookup_and_lock_event_fd(), adapter.get_load_event_fd()}
    assert len(fds) == 3
    for fd in fds:
        with pytest.raises(BlockingIOError):
            os.eventfd_read(fd)


def test_the_number_of_layouts_is_bounded(
    server: Opener, module: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As with compressed objects, each of which has another size."""
    monkeypatch.setattr(module, "_MAX_LAYOUTS", 2)
    one = server()
    results = [one.store(KEYS[:1], [Object(0, Layout(shapes=[(size,)]))]).ok for size in range(1, 5)]
    assert results == [True, True, False, False]
    assert "has 2 other layouts" in caplog.text
    assert one.store(KEYS[1:2], [Object(0, Layout(shapes=[(1,)]))]).ok


def test_tasks_may_have_more_keys_than_a_call_of_the_store(socket: Path, without_keeper: Opener) -> None:
    small = Layout(shapes=[(4,)])
    keys = [Key(b"%d" % number) for number in range(5000)]
    with Keeper(memory=5000 * 4096, socket=socket, value=4096):
        one = without_keeper(timeout_ms=60_000)
        objects = [Object(number, small) for number in range(5000)]
        assert one.store(keys, objects) == L2StoreResult(ok=True, bytes=5000 * 8)
        assert one.lookup(keys, small) == [True] * 5000
        into = [Object(layout=small) for _ in keys]
        assert one.load(keys, into) == [True] * 5000
        assert into == objects


def test_an_exception_ends_its_task(
    one: Server, module: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:

    def fails(*_: object) -> list[bool]:
        raise OSError("no")

    for name in ("move", "lookup", "drop"):
        monkeypatch.setattr(module._Stores, name, fails)
    assert one.store(KEYS[:1], [Object(0)]) == L2StoreResult(ok=False, bytes=0)
    assert one.load(KEYS[:1], [Object(0)]) == [False]
    assert one.lookup(KEYS[:1]) == [False]
    one.adapter.delete(KEYS[:1])
    assert len(caplog.messages) == 1
    assert "OSError: no" in caplog.text


def test_close_waits_for_the_task_that_runs_and_ends_those_that_wait(
    one: Server, blocked: Blocked, caplog: pytest.LogCaptureFixture
) -> None:
    fds = [one.adapter.get_store_event_fd(), one.adapter.get_load_event_fd()]
    for _ in range(3):
        one.adapter.submit_load_task(KEYS[:1], [Object()])
    assert blocked.entered.wait(LIMIT)
    closing = threading.Thread(target=one.adapter.close)
    closing.start()
    eventually(lambda: one.adapter._stores._closed)
    assert closing.is_alive()
    blocked.released.set()
    closing.join(LIMIT)
    assert not closing.is_alive()
    for fd in fds:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(fd)
    one.adapter.close()
    one.adapter.submit_unlock(KEYS)
    assert one.adapter.query_load_result(one.adapter.submit_load_task(KEYS[:1], [Object()])) is None
    assert one.adapter.report_status()["is_healthy"] is False
    assert caplog.records == []


def test_values_are_those_that_the_store_of_the_namespace_has(one: Server, socket: Path) -> None:
    """Nothing is added to the bytes of an object."""
    one.store(KEYS[:1], [Object(7)])
    layout = next(iter(one.adapter._stores._opened))
    facts = {"lmcache": "0.5.6", "layout": '[192, [[2, 3, 16]], ["torch.bfloat16"]]'}
    assert layout.bytes == 192
    text = sys.modules[NAME].namespace("lmcache", "any", "r", facts)
    with Store(socket, namespace=text, value=192) as store:
        into = bytearray(192)
        key = hashlib.sha224(b"m@16777216@0@@" + KEYS[0].chunk_hash).digest()
        assert store.get([key], [into]) == [True]
        assert into == Object(7).memory.tobytes()
