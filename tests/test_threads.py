"""Calls from many threads of a program on one engine. Not for: the threads of the engine (`test_engine_threads.py`)."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, Callable

import numpy as np
import pytest

from conftest import THOROUGH, options, pool
from llm_datadist import BlocksCacheKey, CacheKey, LLMDataDist, LLMException, LLMRole, LLMStatusCode, Placement
from memory import UserTensors, contents, desc, fill, same, tensors, used
from peers import LIMIT, another_thread_runs, by_blocks, together

if TYPE_CHECKING:
    from peers import End, Peer

THREADS = 16
ROUNDS = 200 if THOROUGH else 15
REFUSED = object()
GONE = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


def at_once(*works: Callable[[], Any]) -> list[Any]:
    """Run every function in its own thread, all at once, and return the results."""
    return together(len(works), lambda number: works[number]())


def attempt(call: Callable[[], Any], allowed: LLMStatusCode) -> Any:
    """The result of a call, or `REFUSED` if it fails with the code that is allowed."""
    try:
        return call()
    except LLMException as error:
        if error.status_code is not allowed:
            raise
        return REFUSED


@pytest.fixture(params=["auto", "direct", "ring"])
def manager(request: pytest.FixtureRequest, start: Callable[..., Any]) -> Any:
    """A manager with 8 MiB pools, for each path of swap-ins."""
    # The default limit of 1 s is short for many threads on a busy machine.
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

    together(THREADS, work)
    assert used(manager) == {"device": 0, "host": 0}


def test_one_key_is_bound_by_one_thread(start: Callable[..., Any]) -> None:
    manager = start().cache_manager

    def bind(_: int) -> Any:
        make = lambda: manager.allocate_cache(desc(1, 64, 1), [CacheKey(1, 5)])  # noqa: E731
        return attempt(make, LLMStatusCode.LLM_PARAM_INVALID)

    assert together(THREADS, bind).count(REFUSED) == THREADS - 1
    assert used(manager)["device"] == 4096


def test_release_races_free_once(start: Callable[..., Any]) -> None:
    manager = start().cache_manager
    for number in range(ROUNDS):
        keys = [CacheKey(1, number), CacheKey(1, number, 1)]
        cache = manager.allocate_cache(desc(2), keys)
        frees: list[Callable[[], None]] = [lambda cache=cache: manager.deallocate_cache(cache)] * 2
        at_once(*frees, *[lambda key=key: manager.remove_cache_key(key) for key in keys * 2])
        assert used(manager) == {"device": 0, "host": 0}


def test_deallocation_during_copies_and_swaps(manager: Any) -> None:
    """Calls succeed or fail with one code, and never write to a later cache at the same memory."""
    user = UserTensors(32, 20_000, 2, 1)
    original = user.snapshot()
    everything = {block: block for block in range(32)}
    for number in range(ROUNDS):
        blocks = manager.allocate_blocks_cache(desc(32, 20_000))
        cache = manager.allocate_cache(desc(2, 200_000))
        target = manager.allocate_cache(desc(1, 200_000))

        def repeat(call: Callable[[], Any]) -> None:
            while attempt(call, GONE) is not REFUSED:
                pass

        def free(cache: Any = cache, blocks: Any = blocks, number: int = number) -> None:
            manager.deallocate_cache(cache)
            manager.deallocate_blocks_cache(blocks)
            heir = manager.allocate_cache(desc(32, 20_000))
            wrote = fill(heir, number)
            time.sleep(0.001)
            assert same(contents(heir), wrote)
            manager.deallocate_cache(heir)

        at_once(
            free,
            lambda cache=cache, target=target: repeat(lambda: manager.copy_cache(target, cache, 0, 1)),
            lambda blocks=blocks: repeat(lambda: manager.copy_blocks(blocks, {0: [1, 2]})),
            *[lambda blocks=blocks: repeat(lambda: manager.swap_blocks(user.cpu_cache(), blocks, everything))] * 2,
        )
        manager.deallocate_cache(target)
    assert same(user.snapshot(), original)
    assert used(manager) == {"device": 0, "host": 0}


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
    assert another_thread_runs(lambda: call, 5000), "the GIL is never released"


@pytest.mark.parametrize("operation", ["pull_blocks", "push_blocks"])
def test_another_thread_runs_during_a_transfer(one_sided: tuple[End, Peer], operation: str) -> None:
    local, remote = one_sided
    numbers = list(range(8))
    remote.allocate("remote", 8, 1 << 17, 1, blocks=True, keys=[by_blocks(2)])
    local.allocate("local", 8, 1 << 17, 1, blocks=True)
    transfer = getattr(local, operation)
    call = lambda: transfer(by_blocks(2), "local", numbers, numbers)  # noqa: E731
    assert another_thread_runs(lambda: call, 5000), "the GIL is never released"


def test_finalize_during_swaps(start: Callable[..., Any]) -> None:
    user = UserTensors(16, 20_000, 2, 1)
    given = user.snapshot()
    everything = {block: block for block in range(16)}
    for _ in range(ROUNDS):
        dist = start(options(pool(8 << 20), None, llm__SyncKvCacheWaitTime="60000"))
        manager = dist.cache_manager
        blocks = manager.allocate_blocks_cache(desc(16, 20_000))
        swapped = threading.Event()

        def swap(manager: Any = manager, blocks: Any = blocks, swapped: threading.Event = swapped) -> None:
            call = lambda: manager.swap_blocks(user.cpu_cache(), blocks, everything)  # noqa: E731
            while attempt(call, LLMStatusCode.LLM_ENGINE_FINALIZED) is not REFUSED:
                swapped.set()

        def finalize(dist: Any = dist, swapped: threading.Event = swapped) -> None:
            assert swapped.wait(LIMIT)
            dist.finalize()

        at_once(swap, swap, swap, finalize)
    assert same(user.snapshot(), given)


def test_init_from_many_threads_lets_one_through() -> None:
    many = [LLMDataDist(LLMRole.PROMPT, number) for number in range(THREADS)]
    try:
        tried = together(
            THREADS, lambda number: attempt(lambda: many[number].init(options()), LLMStatusCode.LLM_FAILED)
        )
        (won,) = [dist for dist, outcome in zip(many, tried) if outcome is not REFUSED]
        assert LLMDataDist.llm_engine_instance is won
    finally:
        for dist in many:
            dist.finalize()
    assert LLMDataDist.llm_engine_instance is None
