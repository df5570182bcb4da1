"""`Cache.buffer`: one range of pool memory, as one flat view, safe to keep.

Not for: views of single tensors (`test_caches.py`).
"""

from __future__ import annotations

import ctypes
import gc
import io
import os
import struct
import sys
from typing import TYPE_CHECKING, Any, Callable

import numpy as np
import pytest

from llm_datadist.native import Cache, CacheBuffer, Closed, Engine, NotFound, OutOfMemory

from .helpers import allocate, contents, refused

if TYPE_CHECKING:
    from .conftest import Open

PAGE, POOL = 4096, 2 << 20
SHAPES = [(1, 1, 1), (2, 4, 256), (3, 5, 7), (4, 1, PAGE), (2, 3, PAGE + 1), (61, 2, 33)]


def used(engine: Engine) -> dict[str, int]:
    return {name: pool["used_bytes"] for name, pool in engine.stats()["pools"].items() if pool is not None}


def whole(cache: Cache) -> np.ndarray:
    """The memory of a contiguous cache, through its address."""
    memory: Any = (ctypes.c_ubyte * cache.nbytes).from_address(cache.tensors[0].address)
    return np.frombuffer(memory, np.uint8)


@pytest.mark.parametrize("pool", ["device", "host"])
@pytest.mark.parametrize(("tensors", "blocks", "size"), SHAPES)
def test_tensors_follow_one_another(engine: Engine, pool: Any, tensors: int, blocks: int, size: int) -> None:
    shape: Any = {"blocks": blocks, "tensors": tensors, "shape": (size,), "dtype": "uint8"}
    cache = engine.allocate("kv", pool=pool, contiguous=True, **shape)
    first = cache.tensors[0].address
    assert first % PAGE == 0
    assert [tensor.address for tensor in cache.tensors] == [first + n * blocks * size for n in range(tensors)]
    assert used(engine)[pool] == -(-tensors * blocks * size // PAGE) * PAGE
    assert (cache.buffer.address, cache.buffer.nbytes) == (first, cache.nbytes)
    cache.free()
    gc.collect()
    assert used(engine) == {"device": 0, "host": 0}


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
def test_one_flat_view_of_bytes(engine: Engine, way: str) -> None:
    cache = engine.allocate("kv", blocks=5, tensors=3, shape=(7,), dtype="int16", contiguous=True)
    whole(cache)[:] = np.arange(cache.nbytes) % 251
    array = np.asarray(WAYS[way](cache.buffer))
    skipped = 10 if way == "slice" else 0
    assert array.ctypes.data == cache.tensors[0].address + skipped
    assert (array.shape, array.itemsize) == ((3 * 70 - skipped,), 1)
    whole(cache)[100] ^= 255
    assert np.array_equal(array.view(np.uint8), whole(cache)[skipped:])
    if way != "dlpack" or np.lib.NumpyVersion(np.__version__) >= "2.1.0":
        assert array.flags.writeable
        array.view(np.uint8)[:] = 7
        assert (whole(cache)[skipped:] == 7).all()
        assert set(cache.tensors[2].numpy().view(np.uint8).flat) == {7}


def test_facts_of_the_buffer(engine: Engine) -> None:
    cache = engine.allocate("kv", blocks=2, tensors=5, shape=(3,), dtype="uint8", contiguous=True)
    view = cache.buffer
    memory = memoryview(view)  # type: ignore[arg-type]  # mypy knows the protocol from Python 3.12 on
    assert (memory.format, memory.itemsize, memory.ndim, memory.shape, memory.strides) == ("B", 1, 1, (30,), (1,))
    assert (memory.readonly, memory.contiguous, memory.nbytes, memory.obj) == (False, True, 30, view)
    assert tuple(map(int, view.__dlpack_device__())) == (1, 0)
    assert (view.numpy().dtype, view.numpy().shape) == (np.dtype(np.uint8), (30,))
    assert repr(view) == f"CacheBuffer(nbytes=30, address={cache.tensors[0].address:#x})"
    for version, name in ((None, "dltensor"), ((0, 8), "dltensor"), ((1, 0), "dltensor_versioned")):
        assert f'"{name}"' in repr(view.__dlpack__(max_version=version))
    wrong: list[Any] = [{"stream": 1}, {"dl_device": (2, 0)}, {"copy": True}]
    for given in wrong:
        with pytest.raises(BufferError):
            view.__dlpack__(**given)
    memory[29] = 5
    assert cache.tensors[4].numpy()[1, 2] == 5
    with pytest.raises(IndexError):
        memory[30]


def test_other_users_of_the_buffer_protocol(engine: Engine) -> None:
    cache = engine.allocate("kv", blocks=2, tensors=2, shape=(8,), dtype="uint8", contiguous=True)
    view: Any = cache.buffer
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
def test_memory_stays_while_anything_looks_at_it(start: Open, way: str) -> None:
    engine = start()
    cache = allocate(engine, seed=1, blocks=4, tensors=2, shape=(POOL // 16,), contiguous=True)
    memory, written = whole(cache), b"".join(contents(cache))
    held = WAYS[way](cache.buffer)
    cache.free()
    gc.collect()
    heir = allocate(engine, "heir", blocks=1, tensors=1, shape=(POOL // 2,))
    heir.tensors[0].numpy()[:] = 0xEE
    with pytest.raises(OutOfMemory):
        allocate(engine, "more", blocks=1, tensors=1, shape=(1,))
    assert memory.tobytes() == written
    heir.free()
    engine.close()
    assert memory.tobytes() == written
    memory[:] = 7
    assert (memory == 7).all()
    del held
    gc.collect()


def test_references_are_counted(engine: Engine) -> None:
    cache = allocate(engine, contiguous=True)
    view = cache.buffer
    before = sys.getrefcount(view), sys.getrefcount(type(view))
    for make in (lambda _: cache.buffer, *WAYS.values()):
        for _ in range(100):
            made = make(view)
    del made
    gc.collect()
    assert (sys.getrefcount(view), sys.getrefcount(type(view))) == before


def test_caches_without_a_buffer(start: Open) -> None:
    engine = start()
    # Tensors of whole pages usually follow one another, but nothing promises that.
    by_chance = allocate(engine, "by chance", blocks=1, tensors=2, shape=(PAGE,))
    user = [np.zeros((4, 64), np.uint8) for _ in range(2)]
    for cache in (by_chance, engine.register("of the program", user)):
        refused("contiguous", lambda cache=cache: cache.buffer)  # type: ignore[misc]
    assert np.asarray(engine.register("one", user[:1]).buffer).ctypes.data == user[0].ctypes.data
    freed, left = allocate(engine, "freed", contiguous=True), allocate(engine, "left", contiguous=True)
    freed.free()
    with pytest.raises(NotFound):
        _ = freed.buffer
    engine.close()
    with pytest.raises(Closed):
        _ = left.buffer


def test_class_of_buffers_is_closed(engine: Engine) -> None:
    closed: Any = CacheBuffer
    for wrong in ((), (1,), (None,), (allocate(engine, contiguous=True).buffer,)):
        with pytest.raises(TypeError):
            closed(*wrong)
    with pytest.raises(TypeError):
        type("Mine", (closed,), {})
