"""`KvCacheManager` and `KvCache` in one process: the table of python-api.md §9.1, roles, codes, lifetimes, the pool.

Not for: what needs a second process (`test_kv_mode_peers.py`).
"""

from __future__ import annotations

import copy
import gc
import json
import threading
from typing import TYPE_CHECKING, Any, Callable

import numpy as np
import pytest

from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    KvCache,
    KvCacheManager,
    LayerSynchronizer,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    Placement,
    Tensor,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from memory import AE, GONE, LE, MISMATCH, TE, VE, Expected, UserTensors, at, in_fresh_process, raising, run_fresh

if TYPE_CHECKING:
    from collections.abc import Iterator

UINT64_MAX = 2**64 - 1
POOL = 2 << 20
PAGE = 1 << 16
FAILED = Expected("LLMException(FAILED)", (LLMException,), (LLMStatusCode.LLM_FAILED,))
DEVICE_OOM = Expected("LLMException(DEVICE_OOM)", (LLMException,), (LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY,))
FINALIZED = Expected("LLMException(FINALIZED)", (LLMException,), (LLMStatusCode.LLM_ENGINE_FINALIZED,))
UNLINKED = Expected("LLMException(NOT_YET_LINK)", (LLMException,), (LLMStatusCode.LLM_NOT_YET_LINK,))
ROLES = list(LLMRole)


def options(pool: int | None = POOL, **extra: str) -> dict[str, str]:
    made = {"ge.exec.deviceId": "0"}
    if pool is not None:
        made["ge.flowGraphMemMaxSize"] = str(pool)
    made.update({key.replace("__", "."): value for key, value in extra.items()})
    return made


@pytest.fixture
def begin() -> Iterator[Callable[..., LLMDataDist]]:
    """A function that initialises an engine without the cache manager."""
    opened: list[LLMDataDist] = []

    def start(role: LLMRole = LLMRole.PROMPT, settings: dict[str, str] | None = None, cluster: int = 0) -> LLMDataDist:
        dist = LLMDataDist(role, cluster)
        opened.append(dist)
        dist.init(options() if settings is None else settings)
        return dist

    assert LLMDataDist.llm_engine_instance is None
    yield start
    for dist in opened:
        dist.finalize()
    assert LLMDataDist.llm_engine_instance is None


@pytest.fixture
def prompt(begin: Callable[..., LLMDataDist]) -> KvCacheManager:
    return begin().kv_cache_manager


@pytest.fixture
def decoder(begin: Callable[..., LLMDataDist]) -> KvCacheManager:
    return begin(LLMRole.DECODER).kv_cache_manager


def desc(rows: int = 4, row_bytes: int = 64, tensors: int = 2, placement: Placement = Placement.DEVICE) -> CacheDesc:
    return CacheDesc(tensors, (rows, row_bytes), DataType.DT_UINT8, placement)


def arrays(cache: KvCache) -> list[np.ndarray]:
    """The tensors of a cache, through their addresses."""
    (addrs,) = cache.per_device_tensor_addrs
    return [at(addr, cache.cache_desc.size).reshape(cache.cache_desc.shape) for addr in addrs]


def fill(cache: KvCache, seed: int) -> list[np.ndarray]:
    generator = np.random.default_rng(seed)
    for array in arrays(cache):
        array[:] = generator.integers(0, 256, array.shape, dtype=np.uint8)
    return [array.copy() for array in arrays(cache)]


def table(manager: KvCacheManager) -> tuple[int, int, int]:
    """Caches, keys, and bytes of the pool that are used."""
    stats = manager.stats()
    return stats["table"]["caches"], stats["table"]["keys"], stats["pools"]["device"]["used_bytes"]


def cpu(rows: int = 4, row_bytes: int = 64, count: int = 2) -> tuple[KvCache, UserTensors]:
    own = UserTensors(rows, row_bytes, count)
    return KvCache.create_cpu_cache(own.describe(), own.addrs), own


# -- where it comes from -------------------------------------------------------------------------------------------


def test_the_property_follows_the_mode(begin: Callable[..., LLMDataDist]) -> None:
    dist = LLMDataDist(LLMRole.PROMPT, 1)
    with pytest.raises(RuntimeError, match="not initialized"):
        _ = dist.kv_cache_manager
    dist = begin()
    manager = dist.kv_cache_manager
    assert manager is dist.kv_cache_manager
    assert manager is dist._kv_cache_manager
    assert isinstance(manager, KvCacheManager)
    assert manager.is_initialized()
    with pytest.raises(LLMException, match="EnableCacheManager") as caught:
        _ = dist.cache_manager
    assert caught.value.status_code == LLMStatusCode.LLM_PARAM_INVALID
    dist.finalize()
    assert not manager.is_initialized()
    with pytest.raises(RuntimeError):
        _ = dist.kv_cache_manager
    dist.init(options())
    assert dist.kv_cache_manager is not manager
    assert not manager.is_initialized()
    dist.finalize()
    dist.init({"llm.EnableCacheManager": "1"})
    with raising(LE):
        _ = dist.kv_cache_manager


def test_the_constructor_takes_an_engine_and_a_role(begin: Callable[..., LLMDataDist]) -> None:
    native = begin()._llm_datadist
    for wrong in (None, 1, "PROMPT"):
        with raising(TE):
            KvCacheManager(native, wrong)  # type: ignore[arg-type]
    with raising(TE):
        KvCacheManager(object(), LLMRole.PROMPT)  # type: ignore[arg-type]
    assert KvCacheManager(native, LLMRole.MIX).is_initialized()


def calls_of(manager: KvCacheManager) -> dict[str, Callable[[], Any]]:
    """Every method, with arguments that are all wrong."""
    return {
        "allocate_cache": lambda: manager.allocate_cache(1, 1),
        "allocate_blocks_cache": lambda: manager.allocate_blocks_cache(1, 1),
        "deallocate_cache": lambda: manager.deallocate_cache(1),
        "remove_cache_key": lambda: manager.remove_cache_key(1),
        "pull_cache": lambda: manager.pull_cache(1, 1),
        "pull_blocks": lambda: manager.pull_blocks(1, 1, 1, 1),
        "copy_cache": lambda: manager.copy_cache(1, 1),
        "copy_blocks": lambda: manager.copy_blocks(1, 1),
        "swap_blocks": lambda: manager.swap_blocks(1, 1, 1),
        "get_cache_tensors": lambda: manager.get_cache_tensors(1, "x"),
        "transfer_cache_async": lambda: manager.transfer_cache_async(1, 1, 1),
    }  # type: ignore[arg-type]


def test_an_expired_manager_says_so_first(begin: Callable[..., LLMDataDist]) -> None:
    dist = begin(LLMRole.MIX)
    manager = dist.kv_cache_manager
    for call in calls_of(manager).values():
        with pytest.raises((TypeError, LLMException)):
            call()
    dist.finalize()
    for name, call in calls_of(manager).items():
        with raising(FINALIZED):
            call()
        assert name
    with raising(FINALIZED):
        manager.stats()
    # A later engine is out of its reach.
    begin()
    for call in calls_of(manager).values():
        with raising(FINALIZED):
            call()


# -- roles ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("role", ROLES)
def test_who_may_call_what(begin: Callable[..., LLMDataDist], role: LLMRole) -> None:
    manager = begin(role).kv_cache_manager
    # The role is looked at before any argument.
    only = {
        "remove_cache_key": LLMRole.PROMPT,
        "transfer_cache_async": LLMRole.PROMPT,
        "pull_cache": LLMRole.DECODER,
        "pull_blocks": LLMRole.DECODER,
    }
    for name, call in calls_of(manager).items():
        with raising(LE if only.get(name, role) != role else TE):
            call()
    named, key = [CacheKey(0, 1)], BlocksCacheKey(0, 1)
    if role == LLMRole.PROMPT:
        manager.allocate_cache(desc(), named)
    else:
        with raising(LE):
            manager.allocate_cache(desc(), named)
        with raising(LE):
            manager.allocate_cache(desc(), [CacheKey(0, UINT64_MAX)])
    if role == LLMRole.DECODER:
        with raising(LE):
            manager.allocate_blocks_cache(desc(), key)
    else:
        assert manager.allocate_blocks_cache(desc(), key).cache_id > 0
    assert manager.allocate_cache(desc()).cache_id > 0
    assert manager.allocate_blocks_cache(desc()).cache_id > 0


def test_roles_follow_switch_role(begin: Callable[..., LLMDataDist]) -> None:
    dist = begin(LLMRole.DECODER, options(llm__EnableSwitchRole="1"))
    manager = dist.kv_cache_manager
    with raising(LE):
        manager.remove_cache_key(CacheKey(0, 1))
    dist.switch_role(LLMRole.PROMPT, {"llm.listenIpInfo": "127.0.0.1:0"})
    manager.remove_cache_key(CacheKey(0, 1))
    manager.allocate_cache(desc(), [CacheKey(0, 1)])
    with raising(LE):
        manager.pull_cache(CacheKey(0, 1), manager.allocate_cache(desc()))


# -- the table -----------------------------------------------------------------------------------------------------


def test_allocate_cache_checks_in_order(begin: Callable[..., LLMDataDist]) -> None:
    dist = begin(LLMRole.DECODER)
    manager = dist.kv_cache_manager
    none, host = desc(tensors=0), desc(placement=Placement.HOST)
    nothing_host = desc(tensors=0, placement=Placement.HOST)
    for cache_desc, keys, expected, text in [
        (1, 1, TE, "cache_desc"),
        (None, [1], TE, "cache_keys"),
        (none, {CacheKey(0, 1)}, TE, "cache_keys"),
        (none, [CacheKey(0, 1), 2], TE, "inner type"),
        (none, None, TE, "cache_keys"),
        (None, [], AE, ""),
        (nothing_host, [CacheKey(0, 1)], LE, "num_tensors"),
        (host, [CacheKey(0, 1)], LE, "HOST"),
        (desc(), [CacheKey(0, 1)], LE, "PROMPT"),
        (desc(), (CacheKey(0, 1),), LE, "PROMPT"),
        (CacheDesc(1, (4, 0), DataType.DT_INT8), [], LE, "shape"),
    ]:
        with pytest.raises(Exception) as caught:  # noqa: PT011
            manager.allocate_cache(cache_desc, keys)  # type: ignore[arg-type]
        expected.judge(caught.value)
        assert text in str(caught.value)
    assert table(manager) == (0, 0, 0)


def test_allocate_blocks_cache_checks_in_order(begin: Callable[..., LLMDataDist]) -> None:
    manager = begin(LLMRole.DECODER).kv_cache_manager
    key = BlocksCacheKey(0, 1)
    for cache_desc, given, expected, text in [
        (1, 1, TE, "cache_desc"),
        (None, CacheKey(0, 1), TE, "blocks_cache_key"),
        (None, None, AE, ""),
        (desc(tensors=0, placement=Placement.HOST), key, LE, "num_tensors"),
        (desc(placement=Placement.HOST), key, LE, "HOST"),
        (desc(), key, LE, "DECODER"),
    ]:
        with pytest.raises(Exception) as caught:  # noqa: PT011
            manager.allocate_blocks_cache(cache_desc, given)  # type: ignore[arg-type]
        expected.judge(caught.value)
        assert text in str(caught.value)
    assert table(manager) == (0, 0, 0)


def test_allocation(prompt: KvCacheManager) -> None:
    one = prompt.allocate_cache(desc(), [CacheKey(0, UINT64_MAX), CacheKey(0, 7)])
    two = prompt.allocate_blocks_cache(desc(8, 32, 3), BlocksCacheKey(0, 1))
    three = prompt.allocate_cache(desc())
    assert [cache.cache_id for cache in (one, two, three)] == [1, 2, 3]
    assert [len(addrs) for cache in (one, two) for addrs in cache.per_device_tensor_addrs] == [2, 3]
    assert all(addr % PAGE == 0 for addr in one.per_device_tensor_addrs[0])
    assert repr(two) == str(two) == "KvCache(cache_id = 2, num_devices = 1)"
    assert one.cache_desc.num_tensors == 2
    assert not one.cache_desc._is_blocks
    filled = [fill(cache, seed) for seed, cache in enumerate((one, two, three))]
    for cache, bytes_ in zip((one, two, three), filled):
        assert all(np.array_equal(a, b) for a, b in zip(arrays(cache), bytes_))
    with raising(TE):
        KvCache("1", desc(), [[1, 2]], None)  # type: ignore[arg-type]
    with raising(VE):
        KvCache(2**63, desc(), [[1, 2]], None)


def test_keys_and_codes(prompt: KvCacheManager) -> None:
    key = CacheKey(0, 5, 1)
    # Of equal keys the last takes effect; placeholders are skipped, any number of them.
    placeholder = CacheKey(0, UINT64_MAX)
    one = prompt.allocate_cache(desc(), [key, placeholder, placeholder, key])
    assert table(prompt)[:2] == (1, 1)
    before = table(prompt)
    with raising(LE):  # §17.3, the same in both modes
        prompt.allocate_cache(desc(), [CacheKey(9, 5, 1)])
    blocks = prompt.allocate_blocks_cache(desc(), BlocksCacheKey(0, 3))
    with raising(LE):
        prompt.allocate_blocks_cache(desc(), BlocksCacheKey(1, 3))
    with raising(LE):  # python-api.md §17.7
        prompt.allocate_cache(desc(rows=1), [CacheKey(0, 6), CacheKey(0, 7)])
    prompt.deallocate_cache(blocks)
    assert table(prompt) == before
    prompt.deallocate_cache(one)
    # After its key is gone the name is free again.
    assert table(prompt) == before
    prompt.remove_cache_key(key)
    assert table(prompt) == (0, 0, 0)
    prompt.allocate_cache(desc(), [key])


def test_deallocate_serves_both_kinds_and_what_is_missing(prompt: KvCacheManager) -> None:
    one, two = prompt.allocate_cache(desc()), prompt.allocate_blocks_cache(desc(), BlocksCacheKey(0))
    stranger = KvCache(77, desc(), [[1, 2]], prompt)
    for cache in (one, two, one, two, stranger):
        prompt.deallocate_cache(cache)
        assert cache.per_device_tensor_addrs == []
        assert str(cache).endswith("num_devices = 0)")
    assert table(prompt) == (0, 0, 0)
    for wrong, expected in [(1, TE), (None, AE), (Cache(1, desc(), [1, 2], None, False, False), TE), (cpu()[0], LE)]:
        with raising(expected):
            prompt.deallocate_cache(wrong)  # type: ignore[arg-type]


def test_remove_cache_key(prompt: KvCacheManager) -> None:
    cache = prompt.allocate_cache(desc(), [CacheKey(0, 1), CacheKey(0, 2, prefix_id=4)])
    prompt.deallocate_cache(cache)
    prompt.remove_cache_key(CacheKey(5, 1))
    prompt.remove_cache_key(CacheKey(5, 1))
    assert table(prompt)[:2] == (1, 1)
    for wrong, expected in [(BlocksCacheKey(0), TE), (1, TE), (None, AE)]:
        with raising(expected):
            prompt.remove_cache_key(wrong)  # type: ignore[arg-type]
    prompt.remove_cache_key(CacheKey(0, 9, prefix_id=4))
    assert table(prompt) == (0, 0, 0)


def test_pull_cache_checks_in_order(decoder: KvCacheManager) -> None:
    cache, blocks, host = decoder.allocate_cache(desc()), decoder.allocate_blocks_cache(desc()), cpu()[0]
    key, both = CacheKey(1, 1), CacheKey(1, 1, prefix_id=1)
    row = CacheKeyByIdAndIndex(1, 1)
    wrong = {"src_cache_offset": -1, "dst_cache_offset": -1, "tensor_num_per_layer": 0, "src_layer_range": 1}
    for args, more, expected, text in [
        ((BlocksCacheKey(1), 1, "x", "x"), wrong, TE, "cache_key"),
        ((key, 1, "x", "x"), wrong, TE, "kv_cache"),
        ((None, None, "x", "x"), wrong, AE, ""),
        ((both, host, "x", "x"), wrong, LE, "HOST"),
        ((both, cache, "x", "x"), wrong, TE, "size"),
        ((both, cache, "x", 2**63), wrong, VE, "size"),
        ((both, cache, "x", 0), wrong, TE, "batch_index"),
        ((both, cache, -1, 0), wrong, VE, "batch_index"),
        ((both, cache, 0, 0), wrong, LE, "size = 0"),
        ((both, cache, 0, -2), wrong, LE, "size = -2"),
        ((both, cache, 0, 1), {**wrong, "src_cache_offset": "1"}, TE, "src_cache_offset"),
        ((both, cache, 0, 1), wrong, VE, "src_cache_offset"),
        ((both, cache, 0, 1), {**wrong, "src_cache_offset": 2**63}, VE, "src_cache_offset"),
        ((both, cache, 0, 1), {**wrong, "src_cache_offset": True}, TE, "src_cache_offset"),
        ((both, cache, 0, 1), {**wrong, "src_cache_offset": 0}, VE, "dst_cache_offset"),
        ((both, cache, 0, 1), {**wrong, "src_cache_offset": None, "dst_cache_offset": 1.0}, TE, "dst_cache_offset"),
        ((both, cache), {"tensor_num_per_layer": 0}, LE, "exactly one"),
        ((CacheKey(1, UINT64_MAX), cache), {"tensor_num_per_layer": 0}, LE, "exactly one"),
        ((key, cache), {"tensor_num_per_layer": 0, "src_layer_range": 1}, LE, "tensor_num_per_layer"),
        ((key, cache), {"tensor_num_per_layer": 1.0, "src_layer_range": 1}, TE, "tensor_num_per_layer"),
        ((row, cache), {"tensor_num_per_layer": -1}, VE, "tensor_num_per_layer"),
        ((row, cache), {"src_layer_range": [0]}, TE, "src_layer_range"),
        ((row, cache), {"dst_layer_range": range(0, 2, 2)}, LE, "dst_layer_range"),
        ((None, cache), {}, AE, ""),
        ((key, blocks), {}, LE, "blocks cache"),
        ((row, cache, 4), {}, LE, "batch_index = 4"),
        ((row, cache, 0, 65), {}, LE, "size = 65"),
        ((row, cache, 0, 10), {"dst_cache_offset": 55}, LE, "size = 10"),
        ((row, cache, 0, -1), {"dst_cache_offset": 64}, LE, "dst_cache_offset = 64"),
        ((row, cache, 0, 64), {"src_cache_offset": 1, "unknown": object()}, UNLINKED, "cluster 1"),
        ((CacheKey(0, 1), cache), {}, UNLINKED, "cluster 0"),
    ]:
        with pytest.raises(Exception) as caught:  # noqa: PT011
            decoder.pull_cache(*args, **more)  # type: ignore[arg-type]
        expected.judge(caught.value)
        assert text in str(caught.value), caught.value
    decoder.deallocate_cache(cache)
    with raising(GONE):
        decoder.pull_cache(row, cache)


def test_pull_blocks_checks_in_order(decoder: KvCacheManager) -> None:
    cache, plain, host = decoder.allocate_blocks_cache(desc()), decoder.allocate_cache(desc()), cpu()[0]
    key = BlocksCacheKey(1)
    for args, more, expected, text in [
        ((CacheKey(1, 1), 1, 1, 1), {}, TE, "prompt_cache_key"),
        ((key, 1, 1, 1), {}, TE, "decoder_kv_cache"),
        ((key, host, (0,), 1), {}, TE, "prompt_blocks"),
        ((key, host, ["x"], 1), {}, TE, "prompt_blocks inner type"),
        ((key, host, [], (0,)), {}, TE, "decoder_blocks"),
        ((key, host, None, []), {}, TE, "prompt_blocks"),
        ((key, host, [], [True]), {}, TE, "decoder_blocks inner type"),
        ((key, None, [], []), {}, AE, ""),
        ((key, host, [], []), {}, LE, "HOST"),
        ((key, cache, [], []), {}, LE, "prompt_blocks"),
        ((key, cache, [0], []), {}, LE, "decoder_blocks"),
        ((key, cache, [0, 1], [0]), {"tensor_num_per_layer": 0}, LE, "2 entries and decoder_blocks 1"),
        ((key, cache, [0], [0]), {"tensor_num_per_layer": 0, "src_layer_range": 1}, LE, "tensor_num_per_layer"),
        ((key, cache, [0], [0]), {"src_layer_range": range(1, 0, -1)}, LE, "src_layer_range"),
        ((None, cache, [0], [0]), {}, AE, ""),
        ((key, plain, [0], [0]), {}, LE, "continuous"),
        ((key, cache, [0], [4]), {}, LE, "4"),
        ((key, cache, [0], [-1]), {}, LE, "-1"),
        ((key, cache, [0], [3]), {}, UNLINKED, ""),
    ]:
        with pytest.raises(Exception) as caught:  # noqa: PT011
            decoder.pull_blocks(*args, **more)  # type: ignore[arg-type]
        expected.judge(caught.value)
        assert text in str(caught.value), caught.value


def test_copy_cache_checks_in_order(prompt: KvCacheManager) -> None:
    cache, blocks, host = prompt.allocate_cache(desc()), prompt.allocate_blocks_cache(desc()), cpu()[0]
    more = prompt.allocate_cache(desc(tensors=3))
    for args, expected, text in [
        ((1, 1, "x"), TE, "dst"),
        ((None, 1, "x"), AE, ""),
        ((host, 1, "x"), LE, "dst is in HOST"),
        ((cache, 1, "x"), TE, "src"),
        ((cache, None, "x"), AE, ""),
        ((cache, host, "x"), LE, "src is in HOST"),
        ((cache, cache, "x", "x"), TE, "dst_batch_index"),
        ((cache, cache, -1, "x"), VE, "dst_batch_index"),
        ((cache, cache, 0, 2**32, "x"), VE, "src_batch_index"),
        ((cache, cache, 0, 0, -1, "x"), VE, "offset"),
        ((cache, cache, 0, 0, 0, "x", "x"), TE, "size"),
        ((cache, cache, 0, 0, 0, 0, "x"), LE, "size = 0"),
        ((cache, cache, 0, 0, 0, -2, "x"), LE, "size = -2"),
        ((cache, cache, 0, 0, 0, 1, "x"), TE, "req_id"),
        ((cache, cache, 0, 0, 0, 1, -1), VE, "req_id"),
        ((cache, blocks), LE, "src is a blocks cache"),
        ((blocks, cache), LE, "dst is a blocks cache"),
        ((more, cache), FAILED, "2 tensors"),
        ((cache, cache, 4), LE, "dst_batch_index = 4"),
        ((cache, cache, 0, 0, 64, 1), LE, "offset = 64"),
        ((cache, KvCache(99, desc(), [[1, 2]], None)), GONE, "99"),
    ]:
        with pytest.raises(Exception) as caught:  # noqa: PT011
            prompt.copy_cache(*args)
        expected.judge(caught.value)
        assert text in str(caught.value), caught.value


def test_copies(prompt: KvCacheManager) -> None:
    one, two = prompt.allocate_cache(desc()), prompt.allocate_cache(desc(3, 64))
    expected, source = fill(two, 1), fill(one, 2)
    prompt.copy_cache(two, one, 2, 1, 10, 20, req_id=5)
    prompt.copy_cache(dst=two, src=one, src_batch_index=3, offset=60)
    for to, from_ in zip(expected, source):
        to[2, 10:30] = from_[1, 10:30]
        to[0, 60:] = from_[3, 60:]
    assert all(np.array_equal(a, b) for a, b in zip(arrays(two), expected))
    # Slots of a continuous cache count as blocks, one pair after the other.
    for cache in (one, prompt.allocate_blocks_cache(desc())):
        expected = fill(cache, 3)
        prompt.copy_blocks(cache, {0: [1, 2], 1: [3]})
        for array in expected:
            array[1] = array[2] = array[0]
            array[3] = array[1]
        assert all(np.array_equal(a, b) for a, b in zip(arrays(cache), expected))
        prompt.copy_blocks(cache, {})


def test_copy_blocks_checks_in_order(prompt: KvCacheManager) -> None:
    cache, host = prompt.allocate_blocks_cache(desc()), cpu()[0]
    for args, expected, text in [
        ((1, 1), TE, "cache"),
        ((host, [1]), TE, "copy_block_info"),
        ((host, None), AE, ""),
        ((host, {"0": [1]}), TE, "dict key"),
        ((host, {0: (1,)}), TE, "only support"),
        ((host, {0: ["1"]}), TE, "inner type only support"),
        ((None, {-1: [0]}), AE, ""),
        ((host, {-1: [0]}), LE, "HOST"),
        ((cache, {-1: [0]}), VE, "-1"),
        ((cache, {0: [1, -1]}), VE, "-1"),
        ((cache, {0: [4]}), LE, "4"),
        ((cache, {4: [0]}), LE, "4"),
        ((KvCache(99, desc(), [[1, 2]], None), {}), GONE, "99"),
    ]:
        with pytest.raises(Exception) as caught:  # noqa: PT011
            prompt.copy_blocks(*args)  # type: ignore[arg-type]
        expected.judge(caught.value)
        assert text in str(caught.value), caught.value


def test_swaps(prompt: KvCacheManager) -> None:
    """python-api.md §20, line 18, with a cache of either kind on the device."""
    mapping = {2: 3, 3: 4, 4: 5, 8: 0, 9: 1, 1: 9, 6: 6}
    for make in (prompt.allocate_cache, prompt.allocate_blocks_cache):
        device = make(desc(20))
        handle, own = cpu(10)
        there, here = fill(device, 4), own.snapshot()
        prompt.swap_blocks(handle, device, mapping)
        for array, source in zip(there, here):
            for src, dst in mapping.items():
                array[dst] = source[src]
        assert all(np.array_equal(a, b) for a, b in zip(arrays(device), there))
        prompt.swap_blocks(src=device, dst=handle, src_to_dst={10: 0, 4: 9})
        for array, source in zip(here, there):
            array[0], array[9] = source[10], source[4]
        assert all(np.array_equal(a, b) for a, b in zip(own.arrays, here))


def test_swap_blocks_checks_in_order(prompt: KvCacheManager) -> None:
    device, (host, _) = prompt.allocate_cache(desc()), cpu()
    wider, more = cpu(4, 128)[0], cpu(4, 64, 3)[0]
    own = UserTensors(4, 64, 4)
    two = KvCache.create_cpu_cache(desc(placement=Placement.HOST), [own.addrs[:2], own.addrs[2:]])
    for args, expected, text in [
        ((1, 1, 1), TE, "src"),
        ((host, 1, 1), TE, "dst"),
        ((host, device, 1), TE, "src_to_dst"),
        ((host, device, None), AE, ""),
        ((None, device, {}), AE, ""),
        ((device, None, {}), AE, ""),
        ((host, device, {0: "1"}), TE, "dict value"),
        ((wider, device, {0: 9}), MISMATCH, "block sizes"),
        ((more, device, {0: 9}), MISMATCH, "num_tensors"),
        ((host, device, {0: 4}), MISMATCH, "destination block = 4"),
        ((host, device, {-1: 0}), MISMATCH, "source block = -1"),
        ((device, device, {0: 1}), MISMATCH, "placements"),
        ((host, host, {0: 1}), MISMATCH, "placements"),
        ((two, device, {0: 1}), MISMATCH, "devices"),
        ((KvCache(99, desc(), [[1, 2]], None), host, {}), GONE, "99"),
    ]:
        with pytest.raises(Exception) as caught:  # noqa: PT011
            prompt.swap_blocks(*args)  # type: ignore[arg-type]
        expected.judge(caught.value)
        assert text in str(caught.value), caught.value


def test_get_cache_tensors(prompt: KvCacheManager) -> None:
    cache = prompt.allocate_cache(CacheDesc(3, (2, 5), DataType.DT_FLOAT))
    for index in range(3):
        (tensor,) = prompt.get_cache_tensors(cache, index)
        assert isinstance(tensor, Tensor)
        assert (tensor.tensor_desc.dtype, tensor.tensor_desc.shape) == (DataType.DT_FLOAT, [2, 5])
        tensor.numpy()[:] = index + 0.5
        held = at(cache.per_device_tensor_addrs[0][index], 40).view(np.float32)
        assert held.tolist() == [index + 0.5] * 10
        copied = tensor.numpy(copy=True)
        copied[:] = 0
        assert held.tolist() == [index + 0.5] * 10
    for args, expected in [
        ((1, "x"), TE),
        ((cache, "x"), TE),
        ((cache, 2**31), VE),
        ((cache, -1), LE),
        ((cache, 3), LE),
        ((None, 0), AE),
    ]:
        with raising(expected):
            prompt.get_cache_tensors(*args)  # type: ignore[arg-type]
    (first,) = prompt.get_cache_tensors(cache)
    prompt.deallocate_cache(cache)
    with raising(GONE):
        prompt.get_cache_tensors(cache)
    # A tensor keeps its memory.
    assert table(prompt)[2] > 0
    assert first.numpy().tolist() == [[0.5] * 5] * 2
    del first, tensor
    gc.collect()
    assert table(prompt)[2] == 0
    handle, own = cpu()
    assert np.array_equal(prompt.get_cache_tensors(handle, 1)[0].numpy().view(np.uint8), own.arrays[1])


class Ready(LayerSynchronizer):
    """Every layer is ready."""

    def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
        return layer_index >= 0 and timeout_in_millis is None


def test_transfer_cache_async_checks_in_order(prompt: KvCacheManager) -> None:
    cache, host = prompt.allocate_cache(desc()), cpu()[0]
    old = Cache(1, desc(), [1, 2], None, is_registered=False, is_blocks_cache=False)
    to = TransferConfig(1, [1, 2])
    by_key = TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(1, 1), range(1), range(1))
    for args, expected, text in [
        ((None, 1, 1, "x"), TE, "KvCache"),
        ((old, 1, 1, "x"), TE, "KvCache"),
        ((host, 1, 1, "x"), LE, "HOST"),
        ((cache, 1, 1, "x", "x"), TE, "dst_block_indices"),
        ((cache, 1, 1, "x", [-1]), VE, "dst_block_indices"),
        ((cache, 1, 1, [-1], [0]), VE, "src_block_indices"),
        ((cache, 1, 1, [0], [0], -1), VE, "dst_block_memory_size"),
        ((cache, 1, 1, [1, 2]), LE, "transfer from blocks to cache is not supported"),
        ((cache, 1, 1, [0, 1], [0]), LE, ""),
        ((cache, 1, 1, None, [0]), LE, "dst_block_memory_size"),
        ((cache, 1, 1), TE, "layer_synchronizer"),
        ((cache, Ready(), 1), TE, "transfer_configs"),
        ((cache, Ready(), [by_key]), TE, "TransferConfig"),
        ((cache, Ready(), [to], None, None, 1), LE, "dst_block_memory_size"),
        ((prompt.allocate_cache(desc(tensors=3)), Ready(), [to]), LE, "3"),
        ((cache, Ready(), [TransferConfig(1, [1, 2, 3])]), LE, "dst_addrs"),
        ((cache, Ready(), [TransferConfig(1, [1, 2], src_batch_index=4)]), LE, "src_batch_index"),
    ]:
        with pytest.raises(Exception) as caught:  # noqa: PT011
            prompt.transfer_cache_async(*args)  # type: ignore[arg-type]
        expected.judge(caught.value)
        assert text.lower() in str(caught.value).lower(), caught.value
    assert prompt.transfer_cache_async(cache, Ready(), []).synchronize() == LLMStatusCode.LLM_SUCCESS
    blocks = prompt.allocate_blocks_cache(desc())
    assert prompt.transfer_cache_async(blocks, Ready(), [to]).get_results() == [LLMStatusCode.LLM_NOT_YET_LINK]
    unlinked = prompt.transfer_cache_async(cache, Ready(), [to])
    assert unlinked.get_results() == [LLMStatusCode.LLM_NOT_YET_LINK]


def test_check_cache_key() -> None:
    KvCacheManager.check_cache_key(CacheKey(0, 1))
    KvCacheManager.check_cache_key(CacheKey(0, UINT64_MAX, prefix_id=1))
    for wrong in (CacheKey(0, UINT64_MAX), CacheKey(0, 1, prefix_id=1)):
        with raising(LE):
            KvCacheManager.check_cache_key(wrong)


# -- CPU caches ----------------------------------------------------------------------------------------------------


def test_create_cpu_cache_checks_in_order() -> None:
    own, host = UserTensors(4, 64, 4), desc(placement=Placement.HOST)
    a, b, c, d = own.addrs
    for cache_desc, addrs, expected, text in [
        (1, 1, TE, "cache_desc"),
        (None, 1, AE, ""),
        (desc(), 1, LE, "placement"),
        (host, (a, b), TE, "addrs"),
        (host, None, TE, "addrs"),
        (host, [], LE, "addrs"),
        (host, [a, "x"], TE, "only support"),
        (host, [(a, b)], TE, "only support"),
        (host, [[a, "x"], 1], TE, "inner type"),
        (host, [[a, b, c], a], LE, "len(addrs)=3"),
        (host, [[a, b], a], LE, "should be consistent"),
        (host, [a, [a, b]], LE, "should be consistent"),
        (host, [a, b, c], LE, "len(addrs)=3"),
        (host, [[a, b], [c]], LE, "len(addrs)=1"),
        (host, [a, True], TE, "only support"),
        (host, [a, 0], LE, "addrs[1] = 0"),
        (host, [a, -1], VE, "-1"),
    ]:
        with pytest.raises(Exception) as caught:  # noqa: PT011
            KvCache.create_cpu_cache(cache_desc, addrs)  # type: ignore[arg-type]
        expected.judge(caught.value)
        assert text in str(caught.value), caught.value
    flat, nested = KvCache.create_cpu_cache(host, [a, b]), KvCache.create_cpu_cache(host, [[a, b], [c, d]])
    assert (flat.cache_id, flat.per_device_tensor_addrs) == (-1, [[a, b]])
    assert (nested.cache_id, nested.per_device_tensor_addrs) == (-1, [[a, b], [c, d]])
    assert str(nested) == "KvCache(cache_id = -1, num_devices = 2)"


# -- lifetimes -----------------------------------------------------------------------------------------------------


def test_a_handle_that_is_dropped_deallocates(prompt: KvCacheManager) -> None:
    cache = prompt.allocate_cache(desc(), [CacheKey(0, 1)])
    kept = prompt.allocate_blocks_cache(desc())
    again = cache
    del cache
    assert table(prompt)[:2] == (2, 1)
    assert again.cache_id == 1
    del again
    # By id it is gone; its key holds it until it is pulled or removed.
    assert table(prompt)[:2] == (2, 1)
    prompt.remove_cache_key(CacheKey(0, 1))
    assert table(prompt)[:2] == (1, 0)
    del kept
    assert table(prompt) == (0, 0, 0)
    for _ in range(200):
        prompt.allocate_cache(desc())
    assert table(prompt) == (0, 0, 0)
    # In a cycle, from the collector, on another thread.
    cycle: list[Any] = [prompt.allocate_cache(desc())]
    cycle.append(cycle)
    del cycle
    assert table(prompt)[0] == 1
    collector = threading.Thread(target=gc.collect)
    collector.start()
    collector.join()
    assert table(prompt) == (0, 0, 0)


def test_a_handle_outlives_its_engine(begin: Callable[..., LLMDataDist]) -> None:
    dist = begin()
    old = dist.kv_cache_manager.allocate_cache(desc())
    dist.finalize()
    dist.init(options())
    new = dist.kv_cache_manager.allocate_cache(desc())
    assert old.cache_id == new.cache_id == 1
    with raising(GONE):
        dist.kv_cache_manager.copy_cache(old, new)
    del old
    gc.collect()
    assert table(dist.kv_cache_manager)[0] == 1
    # One that a call of the new manager invalidates is not the new one either.
    stale = KvCache(1, desc(), [[1, 2]], None)
    with pytest.raises(TypeError):
        copy.deepcopy(new)
    del stale
    assert table(dist.kv_cache_manager)[0] == 1


def test_a_handle_that_was_never_made_is_dropped_in_peace() -> None:
    broken = KvCache.__new__(KvCache)
    del broken
    gc.collect()


EXIT = """
import os, sys
from llm_datadist import *
dist = LLMDataDist(LLMRole.PROMPT, 0)
dist.init({"ge.exec.deviceId": "0", "ge.flowGraphMemMaxSize": "2097152"})
manager = dist.kv_cache_manager
desc = CacheDesc(2, (4, 64), DataType.DT_UINT8)
cache = manager.allocate_cache(desc, [CacheKey(0, 1)])
"""


@pytest.mark.parametrize(
    "end",
    [
        "",
        "dist.finalize()",
        "cache.me = cache",
        "import builtins; builtins.kept = cache",
        "import atexit, llm_datadist.datadist as d; atexit.unregister(d._shutdown_handler)",
        "LLMDataDist.llm_engine_instance = None; sys.modules.clear()",
        "del dist, manager",
        "sys.exit(0)",
    ],
)
@pytest.mark.parametrize("log", ["1", "3"])
def test_a_handle_at_the_end_of_the_interpreter(end: str, log: str) -> None:
    done = in_fresh_process(EXIT + end, ASCEND_GLOBAL_LOG_LEVEL=log)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_handle_in_a_forked_child() -> None:
    told = run_fresh(
        EXIT
        + """
import gc
child = os.fork()
if child == 0:
    del cache
    gc.collect()
    os._exit(5)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
child = os.fork()
if child == 0:
    sys.exit(6)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 6
# The parent's cache is as it was.
stats = manager.stats()["table"]
print(stats["caches"], stats["keys"], len(manager.get_cache_tensors(cache)))
"""
    )
    assert told.split() == ["1", "1", "1"]


def test_threads_allocate_and_drop(prompt: KvCacheManager) -> None:
    failures: list[BaseException] = []

    def work(number: int) -> None:
        try:
            for turn in range(100):
                cache = prompt.allocate_cache(desc(), [CacheKey(0, number * 1000 + turn)])
                prompt.copy_cache(cache, cache, 1, 0)
                if turn % 2:
                    prompt.deallocate_cache(cache)
                del cache
                prompt.remove_cache_key(CacheKey(0, number * 1000 + turn))
        except BaseException as error:  # noqa: BLE001
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    assert not failures
    assert table(prompt) == (0, 0, 0)


# -- the pool ------------------------------------------------------------------------------------------------------


def capacity(dist: LLMDataDist) -> int:
    pools = dist.stats()["pools"]
    assert set(pools) == {"device"}
    return pools["device"]["capacity_bytes"]


def test_the_pool_that_is_there_unasked(begin: Callable[..., LLMDataDist]) -> None:
    dist = begin(settings=options(pool=None))
    whole = capacity(dist)
    assert whole > 64 << 20
    cache = dist.kv_cache_manager.allocate_cache(desc())
    fill(cache, 1)
    facts = dist.stats()["pools"]["device"]
    if facts["huge_pages"] != "reserved":
        assert facts["committed_bytes"] <= 4 << 20, "address space until it is touched"
    dist.finalize()
    half = begin(settings=options(pool=None, llm__MemoryUtilization="0.1"))
    # A ninth, if nothing else on the machine used or freed memory meanwhile.
    assert PAGE < capacity(half) < whole // 2
    half.finalize()
    config = LLMConfig()
    config.mem_utilization = 0.25
    config.device_id = 0
    quarter = begin(settings=config.generate_options())
    assert PAGE < capacity(quarter) < whole


@pytest.mark.parametrize(
    ("settings", "bytes_"),
    [
        ({"ge.flowGraphMemMaxSize": "1000000"}, 15 * PAGE),
        ({"ge.flowGraphMemMaxSize": "1"}, PAGE),
        ({"llm.MemoryUtilization": "0.0"}, PAGE),
        ({"ge.flowGraphMemMaxSize": "131072", "llm.MemPoolConfig": '{"memory_size": 8192, "page_shift": 12}'}, 8192),
    ],
)
def test_how_large_the_pool_is(begin: Callable[..., LLMDataDist], settings: dict[str, str], bytes_: int) -> None:
    assert capacity(begin(settings={**options(pool=None), **settings})) == bytes_


@pytest.mark.parametrize(
    "settings",
    [
        {"ge.flowGraphMemMaxSize": "18446744073709551616"},
        {"ge.flowGraphMemMaxSize": "1,2"},
        {"ge.flowGraphMemMaxSize": "1k"},
        {"llm.MemoryUtilization": "1.5"},
        {"llm.MemoryUtilization": "all"},
        {"ge.exec.deviceId": "0;1"},
        {"ge.exec.deviceId": "x"},
        {"ge.exec.deviceId": ""},
        {"llm.ClusterInfo": "no JSON"},
        {"llm.ClusterInfo": '{"listen_ip_info": [{"ip": 16777343}]}'},
        {"llm.listenIpInfo": "127.0.0.1:1;127.0.0.1:2"},
        {"llm.listenIpInfo": "127.0.0.1"},
    ],
)
def test_options_without_meaning(begin: Callable[..., LLMDataDist], settings: dict[str, str]) -> None:
    given = {**options(pool=None), **settings}
    before = dict(given)
    with raising(LE):
        begin(settings=given)
    assert given == before, "an init that failed leaves the caller's dict alone"


def test_missing_device_id_says_what_to_set(begin: Callable[..., LLMDataDist]) -> None:
    given = options(pool=None)
    del given["ge.exec.deviceId"]
    with pytest.raises(LLMException, match=r"deviceId is missing: set LLMConfig\.device_id.*enable_cache_manager"):
        begin(settings=given)


def test_an_exhausted_pool_is_waited_for(prompt: KvCacheManager) -> None:
    """clients.md §1.2, client 11 tries again for as long as it gets this code."""
    large = CacheDesc(2, (4, PAGE * 3), DataType.DT_UINT8)
    one = prompt.allocate_cache(large, [CacheKey(0, 1)])
    before = table(prompt)
    with raising(DEVICE_OOM):
        prompt.allocate_cache(large)
    assert table(prompt) == before
    prompt.deallocate_cache(one)
    with raising(DEVICE_OOM):
        prompt.allocate_cache(large)
    prompt.remove_cache_key(CacheKey(0, 1))
    assert prompt.allocate_cache(large).cache_id > 1


def test_a_limited_address_space_bounds_the_pool() -> None:
    told = run_fresh(
        """
import resource
from llm_datadist import *
from pathlib import Path
taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (512 << 20), resource.RLIM_INFINITY))
dist = LLMDataDist(LLMRole.PROMPT, 0)
dist.init({"ge.exec.deviceId": "0"})
print(dist.stats()["pools"]["device"]["capacity_bytes"])
dist.finalize()
resource.setrlimit(resource.RLIMIT_FSIZE, (200 << 20, resource.RLIM_INFINITY))
dist.init({"ge.exec.deviceId": "0"})
print(dist.stats()["pools"]["device"]["capacity_bytes"])
"""
    )
    by_space, by_size = map(int, told.split())
    assert PAGE < by_space <= 256 << 20
    assert PAGE < by_size <= 100 << 20


# -- options that are worked out -----------------------------------------------------------------------------------


def test_cluster_info_is_stored_back(begin: Callable[..., LLMDataDist]) -> None:
    given = options(llm__listenIpInfo="127.0.0.1:0")
    before = dict(given)
    dist = begin(settings=given, cluster=UINT64_MAX)
    info = json.loads(given.pop("llm.ClusterInfo"))
    assert given == before
    assert info["cluster_id"] == UINT64_MAX
    assert info["listen_ip_info"] == [{"ip": 16777343, "port": 0}]
    assert len(info["logic_device_id"]) == 1
    assert dist._cluster_config().rank_id_to_device_id == {0: 0}
    dist.finalize()
    decoder = begin(LLMRole.DECODER, given, 2)
    assert "listen_ip_info" not in json.loads(given["llm.ClusterInfo"])
    text = given["llm.ClusterInfo"]
    decoder.finalize()
    # The same dict again (python-api.md §20, line 19); what is there stays as it is, and ids start over.
    decoder.init(given)
    assert given["llm.ClusterInfo"] == text
    assert decoder.kv_cache_manager.allocate_cache(desc()).cache_id == 1
    decoder.finalize()
    with_manager = {"llm.EnableCacheManager": "1", "ge.exec.deviceId": "0"}
    decoder.init(with_manager)
    assert set(with_manager) == {"llm.EnableCacheManager", "ge.exec.deviceId"}


def test_cluster_info_says_where_to_listen(begin: Callable[..., LLMDataDist]) -> None:
    config = LLMConfig()
    config.device_id = 0
    config.cluster_info = json.dumps({"cluster_id": 0, "listen_ip_info": [{"ip": "127.0.0.1", "port": 0}]})
    prompt = begin(settings=config.generate_options())
    assert (prompt.listen_ip_info or "").startswith("127.0.0.1:")
    prompt.finalize()
    decoder = begin(LLMRole.DECODER, config.generate_options())
    assert decoder.listen_ip_info is None


def test_a_device_is_needed(begin: Callable[..., LLMDataDist]) -> None:
    with raising(LE):
        begin(settings={})


def test_copy_blocks_refuses_indices_outside_of_uint64(prompt: Any) -> None:
    manager = prompt
    cache = manager.allocate_blocks_cache(desc())
    host = KvCache.create_cpu_cache(desc(placement=Placement.HOST), [4096, 8192])
    for wide in ({0: [2**64]}, {2**64: [0]}, {0: [1], 1: [9, 2**70]}, {0: [-1]}):
        with pytest.raises(ValueError, match="copy_block_info") as caught:
            manager.copy_blocks(cache, wide)
        assert not isinstance(caught.value, LLMException)
    for outside in ({0: [2**64 - 1]}, {2**63: [0]}, {0: [4]}):
        with raising(LE):
            manager.copy_blocks(cache, outside)
    with raising(LE):
        manager.copy_blocks(host, {0: [2**64]})
    with pytest.raises(AttributeError, match=r"^cache must not be None$"):
        manager.copy_blocks(None, {0: [1]})
