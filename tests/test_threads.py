"""Many threads on one engine. Nothing here measures time; a hang ends in the joins' limit."""

from __future__ import annotations

import json
import sys
import threading
import time
from typing import TYPE_CHECKING, Any, Callable

import numpy as np
import pytest

from conftest import THOROUGH, options, pool
from llm_datadist import BlocksCacheKey, CacheKey, LLMDataDist, LLMException, LLMRole, LLMStatusCode, Placement
from memory import UserTensors, contents, desc, fill, pool_facts, run_fresh, same, tensors, used

if TYPE_CHECKING:
    from collections.abc import Iterator

THREADS = 16
ROUNDS = 200 if THOROUGH else 15
HANG = 120.0
REFUSED = object()


def together(works: list[Callable[[], None]]) -> None:
    """Run every work in its own thread, all starting at once; re-raise the first failure."""
    barrier = threading.Barrier(len(works))
    failures: list[BaseException] = []

    def go(work: Callable[[], None]) -> None:
        try:
            barrier.wait(HANG)
            work()
        except BaseException as error:  # noqa: BLE001  (carried to the test's thread)
            failures.append(error)

    threads = [threading.Thread(target=go, args=(work,), daemon=True) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(HANG)
        assert not thread.is_alive(), "a thread hangs"
    if failures:
        raise failures[0]


def attempt(call: Callable[[], Any], allowed: LLMStatusCode) -> Any:
    """The call's result; REFUSED when it failed in the one way that is allowed."""
    try:
        return call()
    except LLMException as error:
        if error.status_code is not allowed:
            raise
        return REFUSED


@pytest.fixture(params=["auto", "direct", "ring"])
def manager(request: pytest.FixtureRequest, start: Callable[..., Any]) -> Any:
    """A manager with 8 MiB pools, for each way of swapping in."""
    # Nothing here is about the limit of a call, and the default of 1 s is short for many threads on a busy machine.
    given = {"llm__SwapInPath": request.param, "llm__SyncKvCacheWaitTime": "60000"}
    return start(options(pool(8 << 20), pool(8 << 20), **given)).cache_manager


def test_own_caches_from_allocation_to_release(manager: Any) -> None:
    def work(number: int) -> None:
        generator = np.random.default_rng(number)
        user = UserTensors(4, 700, 2, number)
        for round_ in range(ROUNDS):
            key = CacheKey(1, 1000 * number + round_)
            batch = manager.allocate_cache(desc(4, 700), [key])
            copy = manager.allocate_cache(desc(4, 700, placement=Placement.HOST))
            blocks = manager.allocate_blocks_cache(desc(4, 700), BlocksCacheKey(1, number))
            wrote, into = fill(batch, 7 * round_ + number), fill(copy, round_)
            row, to = (int(value) for value in generator.integers(0, 4, 2))
            manager.copy_cache(copy, batch, to, row)
            for target, origin in zip(into, wrote):
                target[to] = origin[row]
            assert same(contents(copy), into)
            manager.swap_blocks(user.cpu_cache(), blocks, {0: 3, 1: 2, 2: 1, 3: 0})
            assert same([tensor[::-1] for tensor in contents(blocks)], user.arrays)
            manager.copy_blocks(blocks, {0: [1], 1: [2, 3]})
            assert all((tensor == tensor[0]).all() for tensor in tensors(blocks))
            manager.swap_blocks(blocks, user.cpu_cache(), {0: 0, 3: 1})
            manager.deallocate_blocks_cache(blocks)
            manager.deallocate_cache(batch)
            manager.deallocate_cache(copy)
            manager.remove_cache_key(key)

    together([lambda number=number: work(number) for number in range(THREADS)])
    assert used(manager) == {"device": 0, "host": 0}


def test_disjoint_blocks_of_shared_caches(manager: Any) -> None:
    each = 4
    rows = THREADS * each
    user = UserTensors(rows, 1500, 2, 1)
    npu = manager.allocate_blocks_cache(desc(rows, 1500))
    fill(npu, 2)
    original = user.snapshot()

    def work(number: int) -> None:
        first = number * each
        own = {first + block: first + each - 1 - block for block in range(each)}
        for _ in range(ROUNDS):
            manager.swap_blocks(user.cpu_cache(), npu, own)
            manager.copy_blocks(npu, {first: [first]})
            manager.swap_blocks(npu, user.cpu_cache(), own)
            manager.swap_blocks(user.cpu_cache(), npu, {block: block for block in own})

    together([lambda number=number: work(number) for number in range(THREADS)])
    assert same(contents(npu), user.arrays)
    assert same(user.snapshot(), original)


def test_all_read_one_cache(manager: Any) -> None:
    source = manager.allocate_cache(desc(4, 20_000, 2))
    wrote = fill(source, 1)
    targets = [manager.allocate_cache(desc(1, 20_000, 2)) for _ in range(THREADS)]

    def work(number: int) -> None:
        for round_ in range(ROUNDS):
            manager.copy_cache(targets[number], source, 0, (number + round_) % 4)

    together([lambda number=number: work(number) for number in range(THREADS)])
    for number, target in enumerate(targets):
        for got, origin in zip(contents(target), wrote):
            assert np.array_equal(got[0], origin[(number + ROUNDS - 1) % 4])


def test_allocation_races_give_every_page_to_one_cache(start: Callable[..., Any]) -> None:
    manager = start(options(pool(1 << 18), None)).cache_manager
    size = 4096
    held: list[Any] = []
    refused: list[int] = []
    lock = threading.Lock()

    def work(number: int) -> None:
        for _ in range(8):
            cache = attempt(lambda: manager.allocate_cache(desc(1, size, 2)), LLMStatusCode.LLM_OUT_OF_MEMORY)
            if cache is REFUSED:
                with lock:
                    refused.append(number)
                continue
            for tensor in tensors(cache):
                tensor[:] = number
            with lock:
                held.append((number, cache))

    together([lambda number=number: work(number) for number in range(THREADS)])
    addresses = [address for _, cache in held for address in cache.tensor_addrs]
    assert len(addresses) == len(set(addresses)) == (1 << 18) // size
    assert len(held) + len(refused) == THREADS * 8
    assert len({cache.cache_id for _, cache in held}) == len(held)
    for number, cache in held:
        assert all((tensor == number).all() for tensor in tensors(cache))
    assert used(manager)["device"] == 1 << 18


def test_one_key_is_bound_by_one_thread(start: Callable[..., Any]) -> None:
    manager = start().cache_manager
    winners: list[Any] = []

    def work() -> None:
        call = lambda: manager.allocate_cache(desc(1, 64, 1), [CacheKey(1, 5)])  # noqa: E731
        winners.append(attempt(call, LLMStatusCode.LLM_PARAM_INVALID))

    together([work] * THREADS)
    assert len(winners) == THREADS
    assert winners.count(REFUSED) == THREADS - 1
    assert used(manager)["device"] == 4096


def test_release_races_free_once(start: Callable[..., Any]) -> None:
    manager = start().cache_manager
    for number in range(ROUNDS):
        keys = [CacheKey(1, number), CacheKey(1, number, 1)]
        cache = manager.allocate_cache(desc(2), keys)
        works: list[Callable[[], None]] = [lambda cache=cache: manager.deallocate_cache(cache)] * 2
        works += [lambda key=key: manager.remove_cache_key(key) for key in keys * 2]
        together(works)
        assert used(manager) == {"device": 0, "host": 0}


def test_deallocation_during_a_copy_is_safe(manager: Any) -> None:
    gone = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST

    def copier(cache: Any, target: Any, stop: threading.Event) -> None:
        while not stop.is_set():
            if attempt(lambda: manager.copy_cache(target, cache, 0, 1), gone) is REFUSED:
                return

    for number in range(ROUNDS):
        cache = manager.allocate_cache(desc(2, 200_000, 2))
        fill(cache, number)
        targets = [manager.allocate_cache(desc(1, 200_000, 2)) for _ in range(3)]
        stop = threading.Event()

        def free(cache: Any = cache) -> None:
            manager.deallocate_cache(cache)
            heir = manager.allocate_cache(desc(2, 200_000, 2))
            fill(heir, 5)
            manager.deallocate_cache(heir)

        together([*[lambda t=target, c=cache, s=stop: copier(c, t, s) for target in targets], free])
        for target in targets:
            manager.deallocate_cache(target)
    assert used(manager) == {"device": 0, "host": 0}


def test_deallocation_during_a_swap_is_safe(manager: Any) -> None:
    user = UserTensors(64, 4096, 2, 1)
    original = user.snapshot()
    everything = {block: block for block in range(64)}
    gone = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST

    def swapper(cache: Any) -> None:
        for _ in range(5):
            if attempt(lambda: manager.swap_blocks(user.cpu_cache(), cache, everything), gone) is REFUSED:
                return
            if attempt(lambda: manager.copy_blocks(cache, {0: [0]}), gone) is REFUSED:
                return

    for number in range(ROUNDS):
        cache = manager.allocate_blocks_cache(desc(64, 4096))

        def free(cache: Any = cache) -> None:
            manager.deallocate_blocks_cache(cache)

        together([*[lambda cache=cache: swapper(cache)] * 3, free])
        heir = manager.allocate_blocks_cache(desc(64, 4096))
        wrote = fill(heir, number)
        assert same(contents(heir), wrote)
        manager.deallocate_blocks_cache(heir)
    assert same(user.snapshot(), original)
    assert used(manager) == {"device": 0, "host": 0}


def test_opposite_directions_do_not_wait_for_each_other_for_ever(manager: Any) -> None:
    rows = 8
    host = manager.allocate_blocks_cache(desc(rows, 30_000, 2, Placement.HOST))
    device = manager.allocate_blocks_cache(desc(rows, 30_000, 2))
    one, two = manager.allocate_cache(desc(2, 30_000)), manager.allocate_cache(desc(2, 30_000))
    for number, cache in enumerate((host, device, one, two)):
        for tensor in tensors(cache):
            tensor[:] = number
    there, back = {row: row for row in range(rows)}, {row: row for row in reversed(range(rows))}
    calls: list[Callable[[], None]] = [
        lambda: manager.swap_blocks(host, device, there),
        lambda: manager.swap_blocks(device, host, back),
        lambda: manager.copy_blocks(device, {0: [1, 2, 3], 7: [6, 5]}),
        lambda: manager.copy_blocks(host, {7: [6, 5], 0: [1, 2, 3]}),
        lambda: manager.copy_cache(one, two, 0, 0),
        lambda: manager.copy_cache(two, one, 0, 0),
        lambda: manager.copy_cache(one, one, 0, 1),
        lambda: manager.copy_cache(one, one, 1, 0),
    ]

    def work(call: Callable[[], None]) -> None:
        for _ in range(ROUNDS):
            call()

    together([lambda call=call: work(call) for call in calls * 2])
    for cache, values in ((host, {0, 1}), (device, {0, 1}), (one, {2, 3}), (two, {2, 3})):
        for tensor in tensors(cache):
            for row in tensor:
                assert row.min() == row.max(), "two copies met in one row"
                assert int(row[0]) in values


def test_two_writers_never_meet_in_one_row(start: Callable[..., Any]) -> None:
    manager = start(options(pool(16 << 20), None, llm__CopyWorkers="1")).cache_manager
    size = 1 << 20
    sources = [manager.allocate_cache(desc(1, size, 2)) for _ in range(2)]
    target = manager.allocate_cache(desc(2, size, 2))
    for number, source in enumerate(sources):
        for tensor in tensors(source):
            tensor[:] = number
    for _ in range(4 * ROUNDS):
        together([lambda source=source: manager.copy_cache(target, source, 1, 0) for source in sources])
        seen = {int(value) for tensor in tensors(target) for value in (tensor[1].min(), tensor[1].max())}
        assert len(seen) == 1, "one row holds bytes of two copies"


@pytest.fixture
def no_forced_switches() -> Iterator[None]:
    """From here on a thread loses the interpreter only when it gives it up itself."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1000.0)
    yield
    sys.setswitchinterval(before)


@pytest.mark.usefixtures("no_forced_switches")
@pytest.mark.parametrize("operation", ["copy_cache", "copy_blocks", "swap in", "swap out"])
def test_another_thread_runs_during_a_copy(start: Callable[..., Any], operation: str) -> None:
    manager = start(options(pool(16 << 20), None)).cache_manager
    rows, row_bytes = 8, 1 << 19
    user = UserTensors(rows, row_bytes, 1)
    batch = manager.allocate_cache(desc(rows, row_bytes, 1))
    blocks = manager.allocate_blocks_cache(desc(rows, row_bytes, 1))
    cpu = user.cpu_cache()
    mapping = {number: number for number in range(rows)}
    call = {
        "copy_cache": lambda: manager.copy_cache(batch, batch, 1, 0),
        "copy_blocks": lambda: manager.copy_blocks(blocks, {0: [1, 2, 3, 4, 5, 6, 7]}),
        "swap in": lambda: manager.swap_blocks(cpu, blocks, mapping),
        "swap out": lambda: manager.swap_blocks(blocks, cpu, mapping),
    }[operation]
    stop, ready, turns = threading.Event(), threading.Event(), [0]

    def other() -> None:
        ready.set()
        while not stop.is_set():
            turns[0] += 1
            stop.wait(0.0005)

    thread = threading.Thread(target=other, daemon=True)
    thread.start()
    try:
        assert ready.wait(HANG)
        progressed = False
        for _ in range(5000):
            before = turns[0]
            call()
            if turns[0] != before:
                progressed = True
                break
        assert progressed, "no other thread ran during 5000 copies: the interpreter was never let go"
    finally:
        stop.set()
        thread.join(HANG)


def test_statistics_may_be_read_meanwhile(start: Callable[..., Any]) -> None:
    manager = start().cache_manager
    stop = threading.Event()
    size = 2 * 4096

    def reader() -> None:
        while not stop.is_set():
            facts = pool_facts(manager)
            assert facts["used_bytes"] + facts["free_bytes"] == facts["capacity_bytes"]
            assert facts["used_bytes"] <= facts["peak_used_bytes"]
            assert facts["largest_free_run_bytes"] <= facts["free_bytes"]
            assert facts["used_bytes"] % size == 0

    def writer() -> None:
        for _ in range(20 * ROUNDS):
            manager.deallocate_cache(manager.allocate_cache(desc(1, 4096, 2)))

    def writers() -> None:
        try:
            writer()
        finally:
            stop.set()

    together([reader, reader, writers, writer, writer])
    assert used(manager)["device"] == 0


def test_finalize_during_copies_crashes_nothing(start: Callable[..., Any]) -> None:
    user = UserTensors(16, 20_000, 2, 1)
    given = user.snapshot()

    def race() -> None:
        dist = start(options(pool(8 << 20), None))
        manager = dist.cache_manager
        blocks = manager.allocate_blocks_cache(desc(16, 20_000))
        everything = {block: block for block in range(16)}
        done: list[int] = []

        def work() -> None:
            over = LLMStatusCode.LLM_ENGINE_FINALIZED
            while attempt(lambda: manager.swap_blocks(user.cpu_cache(), blocks, everything), over) is not REFUSED:
                done.append(1)

        def close() -> None:
            while not done:
                time.sleep(0.0005)
            dist.finalize()

        together([work, work, work, close])

    for _ in range(ROUNDS):
        race()
    assert same(user.snapshot(), given)


@pytest.mark.skipif(not THOROUGH, reason="the Rust tests show it in a moment; set LLM_DATADIST_THOROUGH=1")
def test_a_writer_is_not_starved_by_readers(start: Callable[..., Any]) -> None:
    manager = start(options(pool(160 << 20), None, llm__CopyWorkers="1")).cache_manager
    size = 8 << 20
    source, other = manager.allocate_cache(desc(1, size, 1)), manager.allocate_cache(desc(1, size, 1))
    stop = threading.Event()

    def reader() -> None:
        mine = manager.allocate_cache(desc(1, size, 1))
        while not stop.is_set():
            manager.copy_cache(mine, source)

    def writer() -> None:
        try:
            for _ in range(100):
                manager.copy_cache(source, other)
        finally:
            stop.set()

    together([*[reader] * (THREADS - 1), writer])


def test_second_init_from_many_threads_lets_one_through() -> None:
    many = [LLMDataDist(LLMRole.PROMPT, number) for number in range(THREADS)]
    won: list[int] = []

    def work(number: int) -> None:
        if attempt(lambda: many[number].init(options()), LLMStatusCode.LLM_FAILED) is not REFUSED:
            won.append(number)

    try:
        together([lambda number=number: work(number) for number in range(THREADS)])
        assert len(won) == 1
        assert LLMDataDist.llm_engine_instance is many[won[0]]
    finally:
        for dist in many:
            dist.finalize()
    assert LLMDataDist.llm_engine_instance is None


# Says which threads an engine started, and which of them ran while it was idle.
IDLE = """
import json, time
from pathlib import Path
from llm_datadist import CacheDesc, DataType, LLMDataDist, LLMRole, Placement

def threads():
    # Name, and how often each thread gave its core away or lost it: a thread that sleeps does neither.
    found = {}
    for task in Path("/proc/self/task").iterdir():
        facts = dict(line.split(":", 1) for line in (task / "status").read_text().splitlines())
        switches = sum(int(facts[name]) for name in ("voluntary_ctxt_switches", "nonvoluntary_ctxt_switches"))
        found[task.name] = (facts["Name"].strip(), switches)
    return found

before = set(threads())
pool = json.dumps({"memory_size": 64 << 20, "page_shift": 16})
dist = LLMDataDist(LLMRole.PROMPT, 1)
options = {"llm.EnableCacheManager": "1", "llm.MemPoolConfig": pool, "llm.HostMemPoolConfig": pool}
dist.init({**options, "llm.CopyWorkers": "4", "llm.SyncKvCacheWaitTime": "60000"})
manager = dist.cache_manager
made = [
    manager.allocate_blocks_cache(CacheDesc(1, [48, 1 << 20], DataType.DT_UINT8, where))
    for where in (Placement.DEVICE, Placement.HOST)
]
for _ in range(4):
    manager.swap_blocks(made[0], made[1], {block: 47 - block for block in range(48)})
until = time.monotonic() + 60
while True:
    first = threads()
    time.sleep(0.3)
    now = threads()
    ran = [name for task, (name, switches) in now.items() if task not in before and first.get(task) != (name, switches)]
    if not ran or time.monotonic() > until:
        break
print(json.dumps([sorted(name for task, (name, _) in now.items() if task not in before), ran]))
dist.finalize()
"""


def test_workers_are_named_and_sleep_while_an_engine_is_idle() -> None:
    names, ran = json.loads(run_fresh(IDLE))
    workers = [name for name in names if name.startswith("llm-copy-")]
    assert workers == ["llm-copy-0", "llm-copy-1", "llm-copy-2"]
    assert all(name.startswith("llm-") for name in names), names
    assert ran == [], "a thread of an idle engine ran in each of many moments"
