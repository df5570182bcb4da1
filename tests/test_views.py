"""`tensor_views`: cache memory as arrays, without a copy and safe to keep."""

from __future__ import annotations

import ctypes
import gc
import mmap
from typing import Any, Callable

import numpy as np
import pytest

from conftest import PAGE, POOL, options, pool
from llm_datadist import Cache, CacheDesc, DataType, LLMDataDist, LLMException, LLMStatusCode, Placement
from memory import GONE, LE, OOM, UserTensors, at, desc, fill, pool_facts, raising, tensors, used
from peers import another_thread_runs

SPECIAL = {DataType.DT_FLOAT: "float32", DataType.DT_BF16: "uint16", DataType.DT_DOUBLE: "float64"}
NUMPY = {
    kind: SPECIAL.get(kind, kind.name[len("DT_") :].lower()) for kind in DataType if kind is not DataType.DT_STRING
}


@pytest.mark.parametrize("data_type", list(NUMPY))
@pytest.mark.parametrize("placement", list(Placement))
@pytest.mark.parametrize("through", ["numpy", "dlpack"])
def test_array_over_the_cache_memory(manager: Any, data_type: DataType, placement: Placement, through: str) -> None:
    cache = manager.allocate_cache(CacheDesc(3, (4, 3, 5), data_type, placement))
    views = manager.tensor_views(cache)
    assert isinstance(views, list)
    assert len(views) == 3
    if through == "dlpack" and data_type is DataType.DT_BF16:  # which numpy does not know
        assert type(views[0].__dlpack__()).__name__ == "PyCapsule"
        return
    for view, address, raw in zip(views, cache.tensor_addrs, tensors(cache)):
        assert tuple(int(part) for part in view.__dlpack_device__()) == (1, 0)
        raw[:] = 1
        array = hold(view, through)
        assert isinstance(array, np.ndarray)
        assert array.shape == view.shape == (4, 3, 5)
        assert type(view.shape) is tuple
        assert array.dtype == np.dtype(NUMPY[data_type])
        assert array.ctypes.data == address
        assert array.flags.c_contiguous
        assert (array.view(np.uint8) == 1).all()
        raw[:] = 0
        assert (array.view(np.uint8) == 0).all()
        if through == "numpy":
            assert array.flags.writeable
            array.view(np.uint8)[:] = 1
            assert (raw == 1).all()


def hold(view: Any, through: str) -> Any:
    """Something that looks at the view's memory, without the view unless that is asked for."""
    if through == "view":
        return view
    if through == "numpy":
        return view.numpy()
    if through == "slice":
        return view.numpy()[1:, 5:]
    return np.from_dlpack(view) if through == "dlpack" else view.__dlpack__()


@pytest.mark.parametrize("through", ["view", "numpy", "slice", "dlpack", "capsule"])
def test_memory_stays_while_anything_looks_at_it(manager: Any, through: str) -> None:
    cache = manager.allocate_cache(desc(4, POOL // 16, 2))
    address, size = cache.tensor_addrs[0], cache.cache_desc.size
    written = fill(cache, 1)[0].reshape(-1)
    held = hold(manager.tensor_views(cache)[0], through)
    gc.collect()
    manager.deallocate_cache(cache)
    heirs = [manager.allocate_cache(desc(1, PAGE, 1)) for _ in range(pool_facts(manager)["free_bytes"] // PAGE)]
    for heir in heirs:
        tensors(heir)[0][:] = 0xEE
    with raising(OOM):
        manager.allocate_cache(desc(1, 1, 1))
    assert np.array_equal(at(address, size), written)
    for heir in heirs:
        manager.deallocate_cache(heir)
    del held, heirs
    gc.collect()
    assert used(manager)["device"] == 0


def test_a_full_pool_names_the_memory_of_released_caches(manager: Any, dist: LLMDataDist) -> None:
    def released() -> int:
        return dist.stats()["pools"]["device"]["released_bytes"]

    caches = [manager.allocate_cache(desc(1, POOL // 4, 1)) for _ in range(3)]
    views = [manager.tensor_views(cache)[0] for cache in caches]
    arrays = [views[0].numpy(), np.from_dlpack(views[1])]
    del views
    assert released() == 0, "the caches are not released yet"
    for cache in caches:
        manager.deallocate_cache(cache)
    gc.collect()
    assert released() == POOL // 2, "nothing uses the third cache"
    with pytest.raises(LLMException) as caught:
        manager.allocate_cache(desc(1, POOL, 1))
    assert caught.value.status_code == LLMStatusCode.LLM_OUT_OF_MEMORY
    text = str(caught.value)
    assert "released caches are still used by arrays, views or running calls" in text, text
    assert f"released_bytes={POOL // 2}, released_caches=2" in text, text
    del arrays
    gc.collect()
    assert released() == 0
    manager.allocate_cache(desc(1, POOL, 1))
    with pytest.raises(LLMException) as caught:
        manager.allocate_cache(desc(1, POOL, 1))
    assert "released" not in str(caught.value)


def test_memory_stays_after_finalize_and_a_new_engine(start: Callable[..., Any]) -> None:
    dist = start()
    cache = dist.cache_manager.allocate_cache(desc(4, 50_000, 2))
    written = fill(cache, 1)
    views = dist.cache_manager.tensor_views(cache)
    arrays = [view.numpy() for view in views]
    dist.finalize()
    dist.init(options())
    other = dist.cache_manager.allocate_cache(desc(1, POOL, 1))
    tensors(other)[0][:] = 0xEE
    for array, view, bytes_ in zip(arrays, views, written):
        assert np.array_equal(array.view(np.uint8), bytes_)
        assert np.array_equal(view.numpy().view(np.uint8), bytes_)
        array[:] = 7
    dist.finalize()
    assert all((array == 7).all() for array in arrays)
    del arrays, views
    gc.collect()


def test_views_do_not_keep_the_cache_itself(manager: Any) -> None:
    cache = manager.allocate_cache(desc())
    views = manager.tensor_views(cache)
    manager.deallocate_cache(cache)
    with raising(GONE):
        manager.tensor_views(cache)
    assert len(views) == 2


def test_a_view_cannot_be_made_by_hand(manager: Any) -> None:
    kind = type(manager.tensor_views(manager.allocate_cache(desc()))[0])
    assert kind.__name__ == "TensorView"
    with pytest.raises(TypeError):
        kind()


@pytest.mark.parametrize("blocks", [False, True])
@pytest.mark.parametrize("protection", [None, 0, 1], ids=["unmapped", "unreadable", "read only"])
def test_memory_of_the_caller_that_is_not_there_has_no_view(manager: Any, protection: int | None, blocks: bool) -> None:
    address = PAGE
    if protection is not None:
        libc = ctypes.CDLL(None)
        mapped = mmap.mmap(-1, PAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(mapped))
        assert libc.mprotect(ctypes.c_void_p(address), PAGE, protection) == 0
    register = manager.register_blocks_cache if blocks else manager.register_cache
    cache = register(desc(1, PAGE, 1), [address])
    with raising(LE):
        manager.tensor_views(cache)
    cpu = Cache.create_cpu_cache(desc(1, PAGE, 1, Placement.HOST), [address])
    with raising(LE):
        manager.tensor_views(cpu)


def test_views_of_the_callers_memory(manager: Any) -> None:
    user = UserTensors()
    for cache in (user.cpu_cache(), manager.register_cache(user.describe(), user.addrs)):
        for view, array in zip(manager.tensor_views(cache), user.arrays):
            assert np.array_equal(view.numpy().view(np.uint8), array)
            assert view.numpy().ctypes.data == array.ctypes.data


@pytest.mark.parametrize("version", [None, (0, 8), (1, 0), (-1, 0), (2**40, -(2**40))])
def test_any_version_may_be_asked_for(manager: Any, version: tuple[int, int] | None) -> None:
    view = manager.tensor_views(manager.allocate_cache(desc()))[0]
    capsule = view.__dlpack__(max_version=version)
    wanted = "dltensor_versioned" if version is not None and version[0] >= 1 else "dltensor"
    assert f'"{wanted}"' in repr(capsule)


@pytest.mark.parametrize("through", ["view", "numpy", "dlpack", "capsule"])
def test_the_last_view_unmaps_its_pool_without_the_gil(start: Callable[..., Any], through: str) -> None:
    def last_view() -> Callable[[], None]:
        size = 64 << 20
        dist = start(options(pool(size), None))
        manager = dist.cache_manager
        held = [hold(manager.tensor_views(manager.allocate_cache(desc(1, size, 1)))[0], through)]
        at(address_of(held[0]), size)[::PAGE] = 1
        dist.finalize()
        return held.clear

    assert another_thread_runs(last_view), "the GIL is never released"


def test_the_deleter_of_a_capsule_may_run_without_the_interpreter(manager: Any) -> None:
    cache = manager.allocate_cache(desc(4, PAGE, 1))
    capsule = manager.tensor_views(cache)[0].__dlpack__()
    manager.deallocate_cache(cache)
    assert used(manager)["device"] == 4 * PAGE
    managed = managed_tensor(capsule)
    rename = ctypes.pythonapi.PyCapsule_SetName
    rename.argtypes = [ctypes.py_object, ctypes.c_char_p]
    taken = ctypes.create_string_buffer(b"used_dltensor")
    assert rename(capsule, ctypes.cast(taken, ctypes.c_char_p)) == 0
    # DLManagedTensor: the 48 bytes of the tensor, a context, the deleter. ctypes calls the deleter without the GIL.
    deleter = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(ctypes.c_uint64.from_address(managed + 56).value)
    deleter(managed)
    assert used(manager)["device"] == 0
    del capsule


def managed_tensor(capsule: Any) -> int:
    """Address of the `DLManagedTensor` of a capsule; it starts with the tensor's address."""
    pointer = ctypes.pythonapi.PyCapsule_GetPointer
    pointer.restype, pointer.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return int(pointer(capsule, b"dltensor"))


def address_of(held: Any) -> int:
    """First address of what `hold` returned."""
    if isinstance(held, np.ndarray):
        return int(held.ctypes.data)
    if hasattr(held, "address"):
        return int(held.address)
    return ctypes.c_uint64.from_address(managed_tensor(held)).value
