"""`swap_blocks`: host to device and back, by the direct path and through the ring."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Callable

import numpy as np
import pytest

from conftest import PAGE, POOL, options
from llm_datadist import BlocksCacheKey, Cache, CacheDesc, DataType, Placement
from memory import (
    MISMATCH,
    UserTensors,
    contents,
    desc,
    fill,
    pool_facts,
    raising,
    refused,
    run_fresh,
    same,
    swaps_in,
    tensors,
)

SEED = {1: 2, 3: 4}
MIXED = {2: 3, 3: 4, 4: 5, 8: 0, 9: 1, 1: 9, 6: 6}
PATHS = ["auto", "direct", "ring"]
MAPPINGS: list[Any] = [
    {},
    SEED,
    MIXED,
    {number: 9 - number for number in range(10)},
    {9: 0, 8: 1, 7: 2, 0: 9},
    {2: 5, 1: 5, 0: 5},
]


def swapped(to: list[np.ndarray], source: list[np.ndarray], moves: Any) -> list[np.ndarray]:
    """Copy the pairs one after the other with numpy."""
    after = [tensor.copy() for tensor in to]
    for left, right in moves:
        for target, origin in zip(after, source):
            target[right] = origin[left]
    return after


@pytest.fixture(params=PATHS)
def forced(request: pytest.FixtureRequest, start: Callable[..., Any]) -> Any:
    """A manager whose swap-ins use the named path."""
    return start(options(llm__SwapInPath=request.param)).cache_manager


@pytest.mark.contract("19.swap-blocks", "20.18")
@pytest.mark.parametrize("row_bytes", [1, 100, PAGE, 20_000])
def test_in_and_out_between_user_memory_and_device(forced: Any, row_bytes: int) -> None:
    user = UserTensors(10, row_bytes, 3, seed=1)
    cpu = user.cpu_cache()
    npu = forced.allocate_blocks_cache(desc(20, row_bytes, 3), BlocksCacheKey(1, 0))
    for number, mapping in enumerate(MAPPINGS):
        expected = swapped(fill(npu, number), user.arrays, list(mapping.items()))
        user_before = user.snapshot()
        assert forced.swap_blocks(cpu, npu, mapping) is None
        assert same(contents(npu), expected)
        assert same(user.snapshot(), user_before)
        expected = swapped(user.snapshot(), fill(npu, number + 100), list(mapping.items()))
        assert forced.swap_blocks(npu, cpu, mapping) is None
        assert same(user.snapshot(), expected)


@pytest.mark.parametrize("path", PATHS)
def test_the_forced_path_is_the_one_taken(start: Callable[..., Any], path: str) -> None:
    manager = start(options(llm__SwapInPath=path)).cache_manager
    user = UserTensors(10, 256, 2)
    npu = manager.allocate_blocks_cache(desc(10, 256, 2))
    manager.swap_blocks(npu, user.cpu_cache(), SEED)
    with raising(MISMATCH):
        manager.swap_blocks(user.cpu_cache(), npu, {0: 10})
    assert swaps_in(manager) == {"direct": 0, "ring": 0}, "a swap out or a refused swap was counted"
    manager.swap_blocks(user.cpu_cache(), npu, MIXED)
    once = swaps_in(manager)
    assert sum(once.values()) > 0
    if path != "auto":
        assert once[path] == sum(once.values())
        manager.swap_blocks(user.cpu_cache(), npu, MIXED)
        assert swaps_in(manager) == {way: 2 * count for way, count in once.items()}


def test_a_full_device_pool_can_still_swap_in(start: Callable[..., Any]) -> None:
    for path in PATHS:
        dist = start(options(llm__SwapInPath=path))
        manager = dist.cache_manager
        npu = manager.allocate_blocks_cache(desc(10, POOL // 10 // 2 // PAGE * PAGE, 2))
        rest = pool_facts(manager)["free_bytes"]
        while rest:
            manager.allocate_cache(desc(1, min(rest, PAGE), 1))
            rest = pool_facts(manager)["free_bytes"]
        user = UserTensors(10, POOL // 10 // 2 // PAGE * PAGE, 2)
        expected = swapped(fill(npu, 1), user.arrays, list(MIXED.items()))
        manager.swap_blocks(user.cpu_cache(), npu, MIXED)
        assert same(contents(npu), expected), path
        dist.finalize()


BLOCKS_IN_HOST, BLOCKS_IN_DEVICE = 8, 10


@dataclass
class Ends:
    """A manager, user memory of 8 blocks and a device cache of 10."""

    manager: Any
    user: UserTensors
    npu: Cache

    @property
    def cpu(self) -> Cache:
        return self.user.cpu_cache()


UNEQUAL: dict[str, Callable[[Ends], tuple[Any, Any, Any]]] = {
    "host to host": lambda e: (e.cpu, UserTensors(10, 256, 2).cpu_cache(), SEED),
    "device to device": lambda e: (e.npu, e.manager.allocate_blocks_cache(desc(10, 256, 2)), SEED),
    "batch cache": lambda e: (e.cpu, e.manager.allocate_cache(desc(10, 256, 2)), SEED),
    "more tensors": lambda e: (UserTensors(10, 256, 3).cpu_cache(), e.npu, SEED),
    "fewer tensors": lambda e: (e.npu, UserTensors(10, 256, 1).cpu_cache(), SEED),
    "empty mapping, host to host": lambda e: (e.cpu, e.cpu, {}),
    "empty mapping, sizes differ": lambda e: (UserTensors(10, 255, 2).cpu_cache(), e.npu, {}),
    "source of swap-in": lambda e: (e.cpu, e.npu, {0: 0, BLOCKS_IN_HOST: 1}),
    "target of swap-in": lambda e: (e.cpu, e.npu, {0: 0, 1: BLOCKS_IN_DEVICE}),
    "source of swap-out": lambda e: (e.npu, e.cpu, {0: 0, BLOCKS_IN_DEVICE: 1}),
    "target of swap-out": lambda e: (e.npu, e.cpu, {0: 0, 1: BLOCKS_IN_HOST}),
    "negative": lambda e: (e.cpu, e.npu, {0: 0, 1: -1}),
    "wide": lambda e: (e.cpu, e.npu, {0: 0, 1: 2**64 - 1}),
}


@pytest.mark.contract("19.swap-blocks")
@pytest.mark.parametrize("name", UNEQUAL)
def test_mismatch_is_both_exceptions_and_moves_nothing(manager: Any, name: str) -> None:
    user = UserTensors(BLOCKS_IN_HOST, 256, 2, seed=9)
    npu = manager.allocate_blocks_cache(desc(BLOCKS_IN_DEVICE, 256, 2))
    fill(npu, 8)
    source, target, mapping = UNEQUAL[name](Ends(manager, user, npu))
    with refused(manager, MISMATCH, [npu], [user]):
        manager.swap_blocks(source, target, mapping)


def test_block_size_is_what_must_match_not_the_shape(manager: Any) -> None:
    array = np.random.default_rng(1).integers(0, 256, (4, 512), dtype=np.uint8)
    cpu = Cache.create_cpu_cache(CacheDesc(1, [4, 8, 16], DataType.DT_FLOAT, Placement.HOST), [int(array.ctypes.data)])
    npu = manager.allocate_blocks_cache(CacheDesc(1, (6, 512), DataType.DT_INT8))
    manager.swap_blocks(cpu, npu, {3: 5})
    assert np.array_equal(tensors(npu)[0][5], array[3])


@pytest.mark.parametrize("address", ["0", "2**64 - 4096", "2**64", "-4096", "2**64 - 1"])
def test_impossible_user_addresses_never_crash(address: str) -> None:
    out = run_fresh(
        f"""
        from llm_datadist import Cache, CacheDesc, DataType, LLMDataDist, LLMException, LLMRole, Placement
        dist = LLMDataDist(LLMRole.MIX, 1)
        dist.init({{"llm.EnableCacheManager": "1", "llm.MemPoolConfig": '{{"memory_size": 1048576}}'}})
        npu = dist.cache_manager.allocate_blocks_cache(CacheDesc(1, [4, 4096], DataType.DT_INT8))
        for inward in (True, False):
            try:
                cpu = Cache.create_cpu_cache(CacheDesc(1, [4, 4096], DataType.DT_INT8, Placement.HOST), [{address}])
                dist.cache_manager.swap_blocks(*([cpu, npu] if inward else [npu, cpu]), {{0: 0, 3: 3}})
            except (LLMException, ValueError):
                print("refused")
        dist.finalize()
        """
    )
    assert out.splitlines().count("refused") == 2, out
