"""`contiguous=True` and `Cache.buffer`: one range of pool memory, as one flat view, safe to keep.

Not for: views of single tensors (`test_views.py`).
"""

from __future__ import annotations

import ctypes
import gc
import io
import os
import struct
import sys
from typing import Any, Callable

import numpy as np
import pytest

from conftest import PAGE, POOL, options
from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    DataType,
    LLMDataDist,
    LLMStatusCode,
    Placement,
    _core,
)
from memory import (
    GONE,
    LE,
    OOM,
    TE,
    UserTensors,
    at,
    desc,
    fill,
    pool_facts,
    raising,
    refused,
    tensors,
    used,
)
from mistakes import coded, fails
from peers import End, Peer, by_blocks, equal, pattern

FINALIZED = coded(LLMStatusCode.LLM_ENGINE_FINALIZED)
SHAPES = [(1, 1, 1), (2, 4, 256), (3, 5, 7), (4, 1, PAGE), (2, 3, PAGE + 1), (61, 2, 33)]


def addresses_of(cache: Cache) -> list[int]:
    return list(cache.tensor_addrs)


@pytest.mark.parametrize("placement", list(Placement))
@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize(("count", "rows", "row_bytes"), SHAPES)
def test_tensors_follow_one_another(
    manager: Any, placement: Placement, blocks: bool, count: int, rows: int, row_bytes: int
) -> None:
    allocate = manager.allocate_blocks_cache if blocks else manager.allocate_cache
    made_of = desc(rows, row_bytes, count, placement)
    cache = allocate(made_of, contiguous=True)
    first = cache.tensor_addrs[0]
    assert first % PAGE == 0
    assert addresses_of(cache) == [first + number * made_of.size for number in range(count)]
    where = "device" if placement is Placement.DEVICE else "host"
    whole = count * made_of.size
    assert used(manager)[where] == -(-whole // PAGE) * PAGE
    written = fill(cache, 1)
    view = cache.buffer()
    assert (view.address, view.nbytes) == (first, whole)
    assert np.array_equal(np.frombuffer(view, np.uint8), np.concatenate([tensor.reshape(-1) for tensor in written]))
    (manager.deallocate_blocks_cache if blocks else manager.deallocate_cache)(cache)
    del view
    gc.collect()
    assert used(manager) == {"device": 0, "host": 0}


@pytest.mark.parametrize("bad", [None, 0, 1, "True", 1.0, [], np.True_])
def test_contiguous_is_a_bool(manager: Any, bad: Any) -> None:
    for allocate in (manager.allocate_cache, manager.allocate_blocks_cache):
        with refused(manager, TE):
            allocate(desc(), contiguous=bad)
    with refused(manager, TE):
        manager.allocate_cache(desc(), 5, contiguous=bad)  # the keys come first
    fails(lambda: manager.allocate_cache(CacheDesc(0, [1], DataType.DT_INT8), contiguous=1), TE, "contiguous")


def test_the_other_rules_of_an_allocation_hold(manager: Any) -> None:
    manager.allocate_blocks_cache(desc(), BlocksCacheKey(1, 7), contiguous=True)
    with refused(manager, LE):
        manager.allocate_blocks_cache(desc(), BlocksCacheKey(1, 7), contiguous=True)
    for bad in (
        CacheDesc(0, [1], DataType.DT_INT8),
        CacheDesc(1, [0], DataType.DT_INT8),
        CacheDesc(4, [2**61], DataType.DT_INT8),
    ):
        with refused(manager, LE):
            manager.allocate_cache(bad, contiguous=True)
    with refused(manager, OOM):
        manager.allocate_cache(CacheDesc(1, [2**62], DataType.DT_INT8), contiguous=True)


def whole(cache: Cache) -> np.ndarray:
    return at(cache.tensor_addrs[0], cache.cache_desc.num_tensors * cache.cache_desc.size)


WAYS: dict[str, Callable[[Any], Any]] = {
    "memoryview": memoryview,
    "slice": lambda view: memoryview(view)[10:],
    "cast": lambda view: memoryview(view).cast("b"),
    "frombuffer": lambda view: np.frombuffer(view, np.uint8),
    "asarray": np.asarray,
    "numpy": lambda view: view.numpy(),
    "dlpack": np.from_dlpack,
    "capsule": lambda view: view.__dlpack__(),
    "versioned capsule": lambda view: view.__dlpack__(max_version=(1, 0)),
    "__buffer__": lambda view: view.__buffer__(0),
    "view": lambda view: view,
}


@pytest.mark.parametrize("way", [name for name in WAYS if "capsule" not in name and name != "view"])
def test_one_flat_view_of_bytes(manager: Any, way: str) -> None:
    cache = manager.allocate_blocks_cache(CacheDesc(3, [5, 7], DataType.DT_INT16), contiguous=True)
    fill(cache, 3)
    view = cache.buffer()
    held = WAYS[way](view)
    array = np.asarray(held)
    skipped = 10 if way == "slice" else 0
    assert array.ctypes.data == cache.tensor_addrs[0] + skipped
    assert (array.shape, array.itemsize) == ((3 * 70 - skipped,), 1)
    assert np.array_equal(array.view(np.uint8), whole(cache)[skipped:])
    whole(cache)[100] ^= 255
    assert np.array_equal(array.view(np.uint8), whole(cache)[skipped:])
    if way != "dlpack" or np.lib.NumpyVersion(np.__version__) >= "2.1.0":
        assert array.flags.writeable
        array.view(np.uint8)[:] = 7
        assert (whole(cache)[skipped:] == 7).all()
        assert (tensors(cache)[2] == 7).all()


def test_facts_of_the_buffer(manager: Any) -> None:
    cache = manager.allocate_cache(desc(2, 3, 5), contiguous=True)
    view = cache.buffer()
    memory = memoryview(view)
    assert (memory.format, memory.itemsize, memory.ndim, memory.shape, memory.strides) == ("B", 1, 1, (30,), (1,))
    assert (memory.readonly, memory.contiguous, memory.nbytes, memory.obj) == (False, True, 30, view)
    assert tuple(map(int, view.__dlpack_device__())) == (1, 0)
    assert (view.numpy().dtype, view.numpy().shape) == (np.dtype(np.uint8), (30,))
    assert repr(view) == f"CacheBuffer(nbytes=30, address={cache.tensor_addrs[0]:#x})"
    assert type(view).__name__ == "CacheBuffer"
    for version, name in ((None, "dltensor"), ((0, 8), "dltensor"), ((1, 0), "dltensor_versioned")):
        assert f'"{name}"' in repr(view.__dlpack__(max_version=version))
    for wrong in ({"stream": 1}, {"dl_device": (2, 0)}, {"copy": True}):
        with pytest.raises(BufferError):
            view.__dlpack__(**wrong)
    memory[29] = 5
    assert tensors(cache)[4][1, 2] == 5
    with pytest.raises(IndexError):
        memory[30]


def test_other_users_of_the_buffer_protocol(manager: Any) -> None:
    cache = manager.allocate_cache(desc(2, 8, 2), contiguous=True)
    view = cache.buffer()
    assert io.BytesIO(bytes(range(32))).readinto(view) == 32
    assert whole(cache).tolist() == list(range(32))
    struct.pack_into("<Q", view, 24, 2**64 - 1)
    assert bytes(view) == bytes(range(24)) + b"\xff" * 8
    assert bytearray(view)[:3] == bytearray(range(3))
    read, write = os.pipe()
    os.write(write, view)
    assert os.read(read, 100) == bytes(view)
    os.close(read)
    os.close(write)
    typed = (ctypes.c_uint16 * 16).from_buffer(view)
    typed[0] = 0x0102
    assert whole(cache)[:2].tolist() == [2, 1]


@pytest.mark.parametrize("way", list(WAYS))
def test_memory_stays_while_anything_looks_at_it(manager: Any, way: str) -> None:
    cache = manager.allocate_blocks_cache(desc(4, POOL // 16, 2), contiguous=True)
    memory, written = whole(cache), fill(cache, 1)
    held = WAYS[way](cache.buffer())
    gc.collect()
    manager.deallocate_blocks_cache(cache)
    heirs = [manager.allocate_cache(desc(1, PAGE, 1)) for _ in range(pool_facts(manager)["free_bytes"] // PAGE)]
    for heir in heirs:
        tensors(heir)[0][:] = 0xEE
    with raising(OOM):
        manager.allocate_cache(desc(1, 1, 1))
    assert np.array_equal(memory, np.concatenate([tensor.reshape(-1) for tensor in written]))
    for heir in heirs:
        manager.deallocate_cache(heir)
    del held
    gc.collect()
    assert used(manager)["device"] == 0


@pytest.mark.parametrize("way", list(WAYS))
def test_memory_stays_after_finalize(start: Callable[..., LLMDataDist], way: str) -> None:
    dist = start()
    cache = dist.cache_manager.allocate_cache(desc(4, 50_000, 2), contiguous=True)
    memory, written = whole(cache), fill(cache, 1)
    held = WAYS[way](cache.buffer())
    dist.finalize()
    dist.init(options())
    other = dist.cache_manager.allocate_cache(desc(1, POOL, 1))
    tensors(other)[0][:] = 0xEE
    assert np.array_equal(memory, np.concatenate([tensor.reshape(-1) for tensor in written]))
    memory[:] = 7
    dist.finalize()
    assert (memory == 7).all()
    del held
    gc.collect()


def test_references_are_counted(manager: Any) -> None:
    cache = manager.allocate_cache(desc(), contiguous=True)
    view = cache.buffer()
    before = sys.getrefcount(view), sys.getrefcount(type(view))
    for _ in range(100):
        cache.buffer()
    for make in WAYS.values():
        for _ in range(100):
            made = make(view)
    del made
    gc.collect()
    assert (sys.getrefcount(view), sys.getrefcount(type(view))) == before


def test_a_cache_that_is_not_contiguous(manager: Any) -> None:
    apart, single = manager.allocate_blocks_cache(desc(4, 256, 2)), manager.allocate_blocks_cache(desc(4, 256, 1))
    # Tensors of whole pages usually follow one another, but nothing promises that.
    by_chance = manager.allocate_cache(desc(1, PAGE, 2))
    user = UserTensors(4, 64, 2)
    strangers = [user.cpu_cache(), manager.register_cache(user.describe(), user.addrs)]
    for cache in (apart, by_chance, *strangers):
        fails(cache.buffer, LE, "contiguous=True", cache)
    assert single.buffer().nbytes == 1024


def test_memory_of_the_caller_of_one_tensor(manager: Any) -> None:
    user = UserTensors(4, 64, 1)
    for cache in (user.cpu_cache(), manager.register_blocks_cache(user.describe(), user.addrs)):
        array = np.frombuffer(cache.buffer(), np.uint8)
        assert array.ctypes.data == user.addrs[0]
        assert np.array_equal(array, user.arrays[0].reshape(-1))
    missing = manager.register_cache(desc(1, PAGE, 1), [PAGE])
    with raising(LE):
        missing.buffer()
    with raising(LE):
        Cache.create_cpu_cache(desc(1, PAGE, 1, Placement.HOST), [PAGE]).buffer()


def test_released_caches_have_no_buffer(start: Callable[..., LLMDataDist]) -> None:
    dist = start()
    manager = dist.cache_manager
    cache, blocks = (
        manager.allocate_cache(desc(), contiguous=True),
        manager.allocate_blocks_cache(desc(), contiguous=True),
    )
    kept = manager.allocate_cache(desc(), [CacheKey(1, 1)], contiguous=True)
    for _ in range(2):
        manager.deallocate_cache(cache)
        manager.deallocate_blocks_cache(blocks)
        for gone in (cache, blocks):
            with raising(GONE):
                gone.buffer()
    manager.deallocate_cache(kept)
    assert kept.buffer().nbytes == 2048, "a key holds it"
    manager.remove_cache_key(CacheKey(1, 1))
    with raising(GONE):
        kept.buffer()
    left = manager.allocate_cache(desc(), contiguous=True)
    dist.finalize()
    with raising(FINALIZED):
        left.buffer()


def test_handles_made_by_hand(manager: Any) -> None:
    real = manager.allocate_blocks_cache(desc(), contiguous=True)
    mine = Cache(real.cache_id, desc(), [], manager, False, True)
    assert mine.buffer().address == real.tensor_addrs[0]
    for number, owner in ((-1, None), (real.cache_id, None), (99, manager)):
        with raising(GONE):
            Cache(number, desc(), [1, 2], owner, False, True).buffer()


def test_a_buffer_is_made_from_a_view_only(manager: Any) -> None:
    cache = manager.allocate_cache(desc(), contiguous=True)
    view = manager.tensor_views(cache)[1]
    assert _core.CacheBuffer(view).address == cache.tensor_addrs[0]
    for wrong in ((), (1,), (None,), (cache,), (cache.buffer(),), (view, view)):
        with pytest.raises(TypeError):
            _core.CacheBuffer(*wrong)
    with pytest.raises(TypeError):
        type("Mine", (_core.CacheBuffer,), {})
    with raising(LE):
        _core.CacheBuffer(manager.tensor_views(manager.allocate_cache(desc()))[0])


def test_peers_read_and_write_it(pair: tuple[End, Peer], way: dict[str, Any]) -> None:
    near, far = pair
    near.allocate("near", 6, 33, 5, blocks=True, seed=1, contiguous=True)
    far.allocate("far", 6, 33, 5, blocks=True, keys=[by_blocks(0)], seed=2, contiguous=True)
    addresses = far.addresses("far")
    assert addresses == [addresses[0] + number * 6 * 33 for number in range(5)]
    expected, theirs = near.read("near"), pattern(2, 5, 6, 33)
    near.pull_blocks(by_blocks(2), "near", [5, 0, 3], [0, 5, 1])
    for target, source in zip(expected, theirs):
        target[[0, 5, 1]] = source[[5, 0, 3]]
    assert equal(near.read("near"), expected)
    assert np.array_equal(
        near.held["near"].handle.buffer().numpy(), np.concatenate([one.reshape(-1) for one in expected])
    )
    assert equal(far.read("far"), theirs)
    if way["accessible"]:
        near.push_blocks(by_blocks(2), "near", [0, 1], [4, 2], n=1)
        for target, source in zip(theirs, expected):
            target[[4, 2]] = source[[0, 1]]
        assert equal(far.read("far"), theirs)
        assert equal(near.read("near"), expected)
