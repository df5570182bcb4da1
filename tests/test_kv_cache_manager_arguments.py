"""Wrong arguments of the `KvCacheManager`: the error of each, and which of several is reported (contract §9.1)."""

from __future__ import annotations

from typing import Callable

import numpy as np
import pytest

from kv_caches import cpu, desc, table
from llm_datadist import (
    BlocksCacheKey,
    CacheKey,
    CacheKeyByIdAndIndex,
    KvCache,
    KvCacheManager,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    Placement,
)
from memory import AE, GONE, LE, MISMATCH, TE, VE, UserTensors, raising
from mistakes import coded, fails
from two_modes import KV_OPTIONS

FAILED, UNLINKED = coded(LLMStatusCode.LLM_FAILED), coded(LLMStatusCode.LLM_NOT_YET_LINK)


@pytest.fixture
def prompt(start: Callable[..., LLMDataDist]) -> KvCacheManager:
    return start(dict(KV_OPTIONS), 0).kv_cache_manager


@pytest.fixture
def decoder(start: Callable[..., LLMDataDist]) -> KvCacheManager:
    return start(dict(KV_OPTIONS), 0, LLMRole.DECODER).kv_cache_manager


def test_allocations_check_in_order(decoder: KvCacheManager) -> None:
    none, host, keys, key = desc(tensors=0), desc(placement=Placement.HOST), [CacheKey(0, 1)], BlocksCacheKey(0, 1)
    nothing_host = desc(tensors=0, placement=Placement.HOST)
    batch, blocks = decoder.allocate_cache, decoder.allocate_blocks_cache
    for allocate, args, expected, text in [
        (batch, (1, 1), TE, "cache_desc"),
        (batch, (none, [CacheKey(0, 1), 2]), TE, "inner type"),
        (batch, (None, []), AE, ""),
        (blocks, (1, 1), TE, "cache_desc"),
        (blocks, (None, CacheKey(0, 1)), TE, "blocks_cache_key"),
        (blocks, (None, None), AE, ""),
        *[(call, (nothing_host, given), LE, "num_tensors") for call, given in ((batch, keys), (blocks, key))],
        *[(call, (host, given), LE, "host memory") for call, given in ((batch, keys), (blocks, key))],
        (batch, (desc(), keys), LE, "PROMPT"),
        (blocks, (desc(), key), LE, "DECODER"),
    ]:
        fails(lambda allocate=allocate, args=args: allocate(*args), expected, text, args)
    assert table(decoder) == (0, 0, 0)


def test_pull_cache_checks_in_order(decoder: KvCacheManager) -> None:
    cache, blocks, host = decoder.allocate_cache(desc()), decoder.allocate_blocks_cache(desc()), cpu()[0]
    key, both = CacheKey(1, 1), CacheKey(1, 1, prefix_id=1)
    row = CacheKeyByIdAndIndex(1, 1)
    wrong = {"src_cache_offset": -1, "dst_cache_offset": -1, "tensor_num_per_layer": 0, "src_layer_range": 1}
    for args, more, expected, text in [
        ((BlocksCacheKey(1), 1, "x", "x"), wrong, TE, "cache_key"),
        ((key, 1, "x", "x"), wrong, TE, "kv_cache"),
        ((None, None, "x", "x"), wrong, AE, ""),
        ((both, host, "x", "x"), wrong, LE, "host memory"),
        ((both, cache, "x", "x"), wrong, TE, "size"),
        ((both, cache, "x", 0), wrong, TE, "batch_index"),
        ((both, cache, -1, 0), wrong, VE, "batch_index"),
        ((both, cache, 0, -2), wrong, LE, "size=-2"),
        ((both, cache, 0, 1), wrong, VE, "src_cache_offset"),
        ((both, cache, 0, 1), {**wrong, "src_cache_offset": None, "dst_cache_offset": 1.0}, TE, "dst_cache_offset"),
        ((both, cache), {"tensor_num_per_layer": 0}, LE, "exactly one"),
        ((key, cache), {"tensor_num_per_layer": 0, "src_layer_range": 1}, LE, "tensor_num_per_layer"),
        ((row, cache), {"tensor_num_per_layer": -1}, VE, "tensor_num_per_layer"),
        ((row, cache), {"src_layer_range": [0]}, TE, "src_layer_range"),
        ((row, cache), {"dst_layer_range": range(0, 2, 2)}, LE, "dst_layer_range"),
        ((key, blocks), {}, LE, "blocks cache"),
        ((row, cache, 4), {}, LE, "batch_index=4"),
        ((row, cache, 0, 65), {}, LE, "size=65"),
        ((row, cache, 0, 64), {"src_cache_offset": 1, "unknown": object()}, UNLINKED, "cluster=1"),
        ((CacheKey(0, 1), cache), {}, UNLINKED, "cluster=0"),
    ]:
        fails(lambda args=args, more=more: decoder.pull_cache(*args, **more), expected, text, args)
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
        ((key, host, [], (0,)), {}, TE, "decoder_blocks"),
        ((key, host, np.array([0]), [0]), {}, TE, "prompt_blocks"),
        ((key, host, None, []), {}, TE, "prompt_blocks"),
        ((key, None, [], []), {}, AE, ""),
        ((key, host, [], []), {}, LE, "host memory"),
        ((key, cache, [], []), {}, LE, "prompt_blocks"),
        ((key, cache, [0, 1], [0]), {"tensor_num_per_layer": 0}, LE, "2 entries, and decoder_blocks has 1"),
        ((key, cache, [0], [0]), {"tensor_num_per_layer": 0, "src_layer_range": 1}, LE, "tensor_num_per_layer"),
        ((key, cache, [0], [0]), {"src_layer_range": range(1, 0, -1)}, LE, "src_layer_range"),
        ((key, plain, [0], [0]), {}, LE, "continuous"),
        ((key, cache, [0], [4]), {}, LE, "4"),
        ((key, cache, [0], [3]), {}, UNLINKED, ""),
    ]:
        fails(lambda args=args, more=more: decoder.pull_blocks(*args, **more), expected, text, args)


def test_copy_cache_checks_in_order(prompt: KvCacheManager) -> None:
    cache, blocks, host = prompt.allocate_cache(desc()), prompt.allocate_blocks_cache(desc()), cpu()[0]
    more = prompt.allocate_cache(desc(tensors=3))
    for args, expected, text in [
        ((1, 1, "x"), TE, "dst"),
        ((None, 1, "x"), AE, ""),
        ((host, 1, "x"), LE, "dst is in host"),
        ((cache, 1, "x"), TE, "src"),
        ((cache, host, "x"), LE, "src is in host"),
        ((cache, cache, -1, "x"), VE, "dst_batch_index"),
        ((cache, cache, 0, 2**32, "x"), VE, "src_batch_index"),
        ((cache, cache, 0, 0, -1, "x"), VE, "offset"),
        ((cache, cache, 0, 0, 0, "x", "x"), TE, "size"),
        ((cache, cache, 0, 0, 0, 0, "x"), LE, "size=0"),
        ((cache, cache, 0, 0, 0, 1, -1), VE, "req_id"),
        ((cache, blocks), LE, "src is a blocks cache"),
        ((blocks, cache), LE, "dst is a blocks cache"),
        ((more, cache), FAILED, "2 tensors"),
        ((cache, cache, 4), LE, "dst_batch_index=4"),
        ((cache, KvCache(99, desc(), [[1, 2]], None)), GONE, "99"),
    ]:
        fails(lambda args=args: prompt.copy_cache(*args), expected, text, args)


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
        ((host, {-1: [0]}), LE, "host memory"),
        ((cache, {-1: [0]}), VE, "-1"),
        ((cache, {0: [2**64]}), VE, "copy_block_info"),
        ((cache, {0: [2**64 - 1]}), LE, ""),
        ((host, {0: [2**64]}), LE, ""),
        ((cache, {0: [4]}), LE, "4"),
        ((KvCache(99, desc(), [[1, 2]], None), {}), GONE, "99"),
    ]:
        fails(lambda args=args: prompt.copy_blocks(*args), expected, text, args)


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
        ((host, device, {0: "1"}), TE, "dict value"),
        ((wider, device, {0: 9}), MISMATCH, "block sizes"),
        ((more, device, {0: 9}), MISMATCH, "num_tensors"),
        ((host, device, {0: 4}), MISMATCH, "destination block=4"),
        ((device, device, {0: 1}), MISMATCH, "placements"),
        ((two, device, {0: 1}), MISMATCH, "devices"),
        ((KvCache(99, desc(), [[1, 2]], None), host, {}), GONE, "99"),
    ]:
        fails(lambda args=args: prompt.swap_blocks(*args), expected, text, args)


@pytest.mark.contract("19.kv-cache")
def test_create_cpu_cache_checks_in_order() -> None:
    own, host = UserTensors(4, 64, 4), desc(placement=Placement.HOST)
    a, b, c, d = own.addrs
    for args, expected, text in [
        ((1, 1), TE, "cache_desc"),
        ((None, 1), AE, ""),
        ((desc(), 1), LE, "placement"),
        ((host, (a, b)), TE, "addrs"),
        ((host, []), LE, "addrs"),
        ((host, [a, "x"]), TE, "only support"),
        ((host, [[a, "x"], 1]), TE, "inner type"),
        ((host, [[a, b, c], a]), LE, "len(addrs)=3"),
        ((host, [[a, b], a]), LE, "should be consistent"),
        ((host, [[a, b], [c]]), LE, "len(addrs)=1"),
        ((host, [a, 0]), LE, "addrs[1]=0"),
        ((host, [a, -1]), VE, "-1"),
    ]:
        fails(lambda args=args: KvCache.create_cpu_cache(*args), expected, text, args)
    flat, nested = KvCache.create_cpu_cache(host, [a, b]), KvCache.create_cpu_cache(host, [[a, b], [c, d]])
    assert (flat.cache_id, flat.per_device_tensor_addrs) == (-1, [[a, b]])
    assert (nested.cache_id, nested.per_device_tensor_addrs) == (-1, [[a, b], [c, d]])
    assert str(nested) == "KvCache(cache_id = -1, num_devices = 2)"
