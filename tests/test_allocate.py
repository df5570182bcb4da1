"""Allocation and release of caches, their keys, and the counters of the pools.

Not for: which reference or key releases a cache, and keys of refused allocations (`test_properties.py`).
"""

from __future__ import annotations

import re
from typing import Any, Callable

import pytest

from conftest import PAGE, POOL, options, pool
from llm_datadist import CacheDesc, CacheKey, DataType, LLMException, Placement
from memory import (
    GONE,
    LE,
    OOM,
    UINT64_MAX,
    UserTensors,
    contents,
    desc,
    fill,
    pool_facts,
    raising,
    refused,
    run_fresh,
    same,
    used,
)


def pages(cache_desc: CacheDesc, page: int = PAGE) -> int:
    """Bytes of whole pages that all tensors of a cache take."""
    return cache_desc.num_tensors * -(-cache_desc.size // page) * page


def live(manager: Any, cache: Any) -> bool:
    """Whether the engine still knows the id of a batch cache."""
    try:
        manager.copy_cache(cache, cache, 0, 0, 0, 1)
    except LLMException as error:
        GONE.judge(error)
        return False
    return True


@pytest.mark.contract("19.allocate-cache")
@pytest.mark.parametrize("placement", list(Placement))
@pytest.mark.parametrize("blocks", [False, True])
def test_allocated_cache(manager: Any, placement: Placement, blocks: bool) -> None:
    made_of = desc(3, 700, 4, placement)
    allocate = manager.allocate_blocks_cache if blocks else manager.allocate_cache
    cache = allocate(made_of)
    assert cache.cache_id == 1
    assert cache.cache_desc is made_of
    assert cache.is_blocks_cache is blocks
    assert isinstance(cache.tensor_addrs, list)
    assert len(set(cache.tensor_addrs)) == 4
    assert all(type(address) is int and address % PAGE == 0 and address > 0 for address in cache.tensor_addrs)
    assert repr(cache) == f"Cache(cache_id = 1, device_tensor_addrs = 4, is_blocks_cache = {blocks})"
    ends = sorted(cache.tensor_addrs)
    assert all(right - left >= made_of.size for left, right in zip(ends, ends[1:]))
    where = "device" if placement is Placement.DEVICE else "host"
    expected = {"device": 0, "host": 0, where: pages(made_of)}
    assert used(manager) == expected
    written = fill(cache, 1)
    assert same(contents(cache), written)
    (manager.deallocate_blocks_cache if blocks else manager.deallocate_cache)(cache)
    assert cache.tensor_addrs == []
    assert used(manager) == {"device": 0, "host": 0}


@pytest.mark.contract("19.mem-pool-cfg", "19.host-mem-pool-cfg")
@pytest.mark.parametrize("shift", [10, 12, 16, 20])
@pytest.mark.parametrize("extra", [-1, 0, 1])
def test_tensors_take_whole_aligned_pages(start: Callable[..., Any], shift: int, extra: int) -> None:
    page = 1 << shift
    manager = start(options(pool(8 * page, shift), None)).cache_manager
    cache = manager.allocate_cache(CacheDesc(2, [page + extra] + [1] * 30, DataType.DT_INT8))  # the highest rank
    assert used(manager) == {"device": 2 * page * (2 if extra > 0 else 1), "host": None}
    assert all(address % page == 0 for address in cache.tensor_addrs)


def test_pool_statistics(manager: Any) -> None:
    """The bytes used and free, and the largest run, are compared in `test_properties.py`."""
    names = ("capacity_bytes", "page_bytes", "free_bytes", "peak_used_bytes")
    assert [pool_facts(manager)[name] for name in names] == [POOL, PAGE, POOL, 0]
    manager.deallocate_cache(manager.allocate_cache(desc(1, 8 * PAGE, 1)))
    manager.allocate_cache(desc(1, 4 * PAGE, 1))  # dropping the handle frees nothing
    assert [pool_facts(manager)[name] for name in names] == [POOL, PAGE, POOL - 4 * PAGE, 8 * PAGE]
    assert pool_facts(manager, "host")["peak_used_bytes"] == 0


def test_exhaustion_says_what_was_asked_and_what_is_free(manager: Any) -> None:
    caches = [manager.allocate_cache(desc(1, 32 * PAGE, 1)) for _ in range(POOL // PAGE // 32)]
    for cache in (caches[1], caches[3], caches[4]):
        manager.deallocate_cache(cache)
    now = pool_facts(manager)
    asked = 65 * PAGE
    assert now["free_bytes"] == 96 * PAGE
    with pytest.raises(LLMException) as caught:
        manager.allocate_cache(desc(1, asked, 1))
    OOM.judge(caught.value)
    numbers = set(re.findall(r"\d+", str(caught.value).replace(",", "").replace("_", "")))
    assert {str(asked), str(now["free_bytes"]), str(now["largest_free_run_bytes"])} <= numbers, caught.value


@pytest.mark.contract("19.pool-first", "20.15")
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("placement", list(Placement))
def test_a_pool_serves_its_own_placement_only(start: Callable[..., Any], placement: Placement, blocks: bool) -> None:
    only = options(pool(), None) if placement is Placement.DEVICE else options(None, pool())
    manager = start(only).cache_manager
    allocate = manager.allocate_blocks_cache if blocks else manager.allocate_cache
    allocate(desc(placement=placement))
    other = Placement.HOST if placement is Placement.DEVICE else Placement.DEVICE
    with refused(manager, LE):
        allocate(desc(placement=other))
    assert list(used(manager).values()).count(None) == 1


@pytest.mark.contract("19.pool-first")
def test_without_any_pool_releasing_is_still_no_operation(start: Callable[..., Any]) -> None:
    manager = start(options(None, None)).cache_manager
    assert used(manager) == {"device": None, "host": None}
    for placement in Placement:
        with raising(LE):
            manager.allocate_cache(desc(placement=placement))
        with raising(LE):
            manager.allocate_blocks_cache(desc(placement=placement))
    user = UserTensors()
    registered = manager.register_cache(user.describe(Placement.DEVICE), user.addrs)
    manager.deallocate_cache(registered)
    manager.remove_cache_key(CacheKey(1, 1))
    manager.deallocate_blocks_cache(user.cpu_cache())


@pytest.mark.contract("19.deallocate-cache", "19.remove-cache-key")
def test_releasing_twice_or_something_unknown_is_no_operation(manager: Any) -> None:
    key = CacheKey(1, 1)
    other = manager.allocate_cache(desc(), [CacheKey(1, 2)])
    bytes_before = fill(other, 1)
    cache = manager.allocate_cache(desc(), [key])
    for _ in range(3):
        manager.deallocate_cache(cache)
    for _ in range(3):
        manager.remove_cache_key(key)
        manager.remove_cache_key(CacheKey(9, 999, 5))
    manager.deallocate_cache(cache)
    blocks = manager.allocate_blocks_cache(desc())
    for _ in range(3):
        manager.deallocate_blocks_cache(blocks)
    assert used(manager)["device"] == pages(desc())
    assert live(manager, other)
    assert same(contents(other), bytes_before)


@pytest.mark.contract("19.bound-key")
@pytest.mark.parametrize("released_by", ["removal", "last reference"])
def test_a_bound_key_cannot_be_bound_again_before_its_release(manager: Any, released_by: str) -> None:
    key = CacheKey(1, 5, 2)
    cache = manager.allocate_cache(desc(2), [CacheKey(1, 4, 2), key])
    with refused(manager, LE, [cache]):
        manager.allocate_cache(desc(2), [CacheKey(1, 6, 2), CacheKey(2, 5, 2)])
    manager.allocate_cache(desc(2), [CacheKey(1, 6, 2), CacheKey(1, 5, 3)])
    if released_by == "last reference":
        manager.deallocate_cache(cache)
        with refused(manager, LE):
            manager.allocate_cache(desc(2), [key])
    manager.remove_cache_key(key)
    manager.allocate_cache(desc(2), [key])
    with refused(manager, LE):
        manager.allocate_cache(desc(2), [CacheKey(1, 4, 2)])


@pytest.mark.contract("19.key-per-slot", "20.17")
def test_placeholders_bind_nothing(manager: Any) -> None:
    idle = CacheKey(1, UINT64_MAX)
    one = manager.allocate_cache(desc(4), (idle, idle, CacheKey(1, 1), idle))
    two = manager.allocate_cache(desc(3), [idle, idle, CacheKey(1, UINT64_MAX, 1)])
    manager.deallocate_cache(two)
    assert used(manager)["device"] == pages(desc(4))
    manager.deallocate_cache(one)
    manager.remove_cache_key(idle)
    assert used(manager)["device"] == pages(desc(4))
    manager.remove_cache_key(CacheKey(1, 1))
    assert used(manager)["device"] == 0


@pytest.mark.contract("20.20")
def test_the_callers_descriptor_is_never_changed_and_may_change(manager: Any) -> None:
    made_of = desc(4, 256, 1)
    text = repr(made_of)
    blocks = manager.allocate_blocks_cache(made_of)
    batch = manager.allocate_cache(made_of)
    assert blocks.is_blocks_cache is True
    assert batch.is_blocks_cache is False
    assert made_of._is_blocks is False
    assert repr(made_of) == text
    manager.allocate_cache(desc(4, 256, 1))
    made_of.update_dim(0, 1 << 40)
    with raising(LE):
        manager.copy_blocks(blocks, {0: [4]})
    with raising(LE):
        manager.copy_cache(batch, batch, 4, 0, 0, 1)
    made_of.update_dim(0, 4)
    made_of.update_dim(1, 1 << 40)
    with raising(LE):
        manager.copy_cache(batch, batch, 0, 0, 0, 257)


def test_more_tensors_than_the_process_may_describe_do_not_end_it() -> None:
    out = run_fresh(
        """
        import json, resource
        from llm_datadist import CacheDesc, DataType, LLMDataDist, LLMException, LLMRole, LLMStatusCode
        dist = LLMDataDist(LLMRole.MIX, 1)
        cfg = json.dumps({"memory_size": 4390000000000, "page_shift": 10})
        dist.init({"llm.EnableCacheManager": "1", "llm.MemPoolConfig": cfg})
        resource.setrlimit(resource.RLIMIT_DATA, (2 << 30, 2 << 30))
        for tensors, dim in ((2**24 + 1, 1), (300_000_000, 1), *((2**32 - 1, dim) for dim in (1, 2**40, 2**62))):
            try:
                dist.cache_manager.allocate_cache(CacheDesc(tensors, [dim], DataType.DT_INT8))
            except LLMException as error:
                assert error.status_code == LLMStatusCode.LLM_PARAM_INVALID, error
                print("refused")
        dist.cache_manager.allocate_cache(CacheDesc(2**24, [1], DataType.DT_INT8))
        dist.finalize()
        """
    )
    assert out.splitlines().count("refused") == 5, out
