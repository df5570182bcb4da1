"""Blocks with gaps between them, and parts of blocks: every call and transport, compared with numpy, with poison in
every gap.

The Rust tests compare the plans and their bounds with a model (`transfer.rs`, `row_strides.rs` of the core).
"""

from __future__ import annotations

import ctypes
import mmap
import random
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist.native import Cache, Engine, Error, InvalidArgument, Rows

from .helpers import LIMIT, THOROUGH, refused

if TYPE_CHECKING:
    from .conftest import Open, Pair

TRANSPORTS = ["auto", "tcp"]
HOW = ("pool", "contiguous", "padded", "packed")
ROUNDS = 60 if THOROUGH else 14
POISON = 0xA5


def strided(memory: np.ndarray, first: int, rows: int, size: int, stride: int) -> np.ndarray:
    """The rows of one tensor in flat memory."""
    return np.lib.stride_tricks.as_strided(memory[first:], (rows, size), (stride, 1))


class Strided:
    """A cache of random sizes, and a plain copy of its bytes. `padded`: each tensor is registered with gaps of its own.
    `packed`: the blocks of all tensors in turn.
    """

    def __init__(self, chance: random.Random, engine: Engine, name: str, tensors: int, size: int, **given: Any) -> None:
        self.rows, self.size, self.how = chance.randint(1, 90), size, chance.choice(HOW)
        least = size * tensors if self.how == "packed" else size
        stride = least + chance.choice((0, 0, 1, 60, 5000))
        self.memory: list[np.ndarray] = []
        if self.how in ("pool", "contiguous"):
            shape = {"tensors": tensors, "shape": (size,), "dtype": "uint8", "contiguous": self.how == "contiguous"}
            self.cache: Cache = engine.allocate(name, blocks=self.rows, **shape, **given)
            self.arrays = [tensor.numpy() for tensor in self.cache.tensors]
        else:
            whole = 64 + self.rows * stride + 64
            firsts = range(64, 64 + tensors * size, size) if self.how == "packed" else [64] * tensors
            self.memory = [np.full(whole, POISON, np.uint8) for _ in range(1 if self.how == "packed" else tensors)]
            self.arrays = [strided(self.memory[n % len(self.memory)], at, self.rows, size, stride)
                           for n, at in enumerate(firsts)]  # fmt: skip
            self.cache = engine.register(name, self.arrays, **given)
        for array in self.arrays:
            array[:] = np.frombuffer(chance.randbytes(array.size), np.uint8).reshape(array.shape)
        self.twin = [array.copy() for array in self.arrays]
        self.around = self.gaps()

    def gaps(self) -> list[int]:
        """How many bytes of the memory are in no block."""
        kept = [array.copy() for array in self.arrays]
        for array in self.arrays:
            array[:] = POISON
        wrong = [int((memory != POISON).sum()) for memory in self.memory]
        for array, was in zip(self.arrays, kept):
            array[:] = was
        return wrong

    def check(self, what: Any = "") -> None:
        for number, (array, twin) in enumerate(zip(self.arrays, self.twin)):
            assert (array == twin).all(), f"{what}: tensor {number} of {self}"
        assert self.gaps() == self.around == [0] * len(self.memory), f"{what}: a gap of {self}"

    def free(self) -> None:
        """End the cache. Its memory in the pool is free only when no array of it is left."""
        self.arrays.clear()
        self.cache.free().result(LIMIT)

    def __repr__(self) -> str:
        return f"{self.how}, {len(self.arrays)} tensors of {self.rows} blocks of {self.size}"


def two(chance: random.Random, local: Engine, remote: Engine, number: int, **given: Any) -> tuple[Strided, Strided]:
    """Caches with the same number of tensors, of which most have blocks of equal size."""
    sizes = (1, 3, 64, 100, 777, 5000)
    tensors, size = chance.randint(1, 4), chance.choice(sizes)
    other = size if chance.random() < 0.7 else chance.choice(sizes)
    first = Strided(chance, local, f"a{number}", tensors, size)
    return first, Strided(chance, remote, f"b{number}", tensors, other, **given)


def drawn(chance: random.Random, src: Strided, dst: Strided) -> tuple[list[int], list[int], int, int, int]:
    """Blocks that are read and written, offsets in both, and a length. Destinations do not repeat."""
    count = chance.randint(1, min(dst.rows, 80))
    written = chance.sample(range(dst.rows), count)
    if chance.random() < 0.3:
        written.sort()
    read = [chance.randrange(src.rows) for _ in written]
    if src.size == dst.size and chance.random() < 0.4:
        return read, written, 0, 0, src.size
    at, to = chance.randrange(src.size), chance.randrange(dst.size)
    return read, written, at, to, chance.randint(1, min(src.size - at, dst.size - to))


def move(src: Strided, dst: Strided, given: tuple[list[int], list[int], int, int, int]) -> None:
    """What a call must do to the copies."""
    read, written, at, to, length = given
    for source, target in zip(src.twin, dst.twin):
        target[written, to : to + length] = source[read, at : at + length]


def rows_of(cache: Any, blocks: list[int], first: int, length: int, *, whole: bool) -> Rows:
    rows: Rows = cache[blocks]
    return rows if whole else rows.part(bytes=(first, first + length))


@pytest.mark.parametrize("verify", ["off", "full"])
@pytest.mark.parametrize("verb", ["pull", "push"])
def test_pulls_and_pushes_agree_with_numpy(pair: Pair, verb: str, verify: Any) -> None:
    chance = random.Random(verb)  # noqa: S311
    for number in range(ROUNDS):
        here, there = two(chance, pair.local, pair.remote, number)
        src, dst = (there, here) if verb == "pull" else (here, there)
        read, written, at, to, length = given = drawn(chance, src, dst)
        ours, theirs = here.cache, pair.peer[there.cache.name]
        into, out_of = (ours, theirs) if verb == "pull" else (theirs, ours)
        whole = src.size == dst.size == length
        pairs = rows_of(into, written, to, length, whole=whole), rows_of(out_of, read, at, length, whole=whole)
        call = pair.local.pull if verb == "pull" else pair.local.push
        (call([pairs], verify=verify) if chance.random() < 0.3 else call(*pairs, verify=verify)).result(LIMIT)
        move(src, dst, given)
        here.check(number)
        there.check(number)
        here.free()
        there.free()


def test_copies_agree_with_numpy(start: Open) -> None:
    engine, chance = start(pool="64MiB", host_pool="64MiB", verify="full"), random.Random(11)  # noqa: S311
    for number in range(4 * ROUNDS):
        src, dst = two(chance, engine, engine, number, pool="host")
        read, written, at, to, length = given = drawn(chance, src, dst)
        whole = src.size == dst.size == length
        into = rows_of(dst.cache, written, to, length, whole=whole)
        engine.copy(into, rows_of(src.cache, read, at, length, whole=whole)).result(LIMIT)
        move(src, dst, given)
        src.check(number)
        dst.check(number)
        # Within one cache, in the order of the list.
        pairs = [(chance.randrange(dst.rows), chance.randrange(dst.rows)) for _ in range(20)]
        engine.copy([(dst.cache[[to]], dst.cache[[at]]) for at, to in pairs]).result(LIMIT)
        for at, to in pairs:
            for twin in dst.twin:
                twin[to] = twin[at]
        dst.check(number)
        src.free()
        dst.free()


def test_views_have_the_stride(engine: Engine) -> None:
    types: list[Any] = [np.float16, np.int64, np.uint8]
    for kind in types:
        size = np.dtype(kind).itemsize
        memory = np.zeros((5, 20), kind)
        arrays = [np.lib.stride_tricks.as_strided(memory, (5, 2, 7), (20 * size, 7 * size, size))]
        with engine.register("kv", arrays) as cache:
            view = cache.tensors[0]
            for array in (view.numpy(), np.asarray(view), np.from_dlpack(view)):
                assert (array.shape, array.strides) == ((5, 2, 7), (20 * size, 7 * size, size))
                assert (array.dtype, array.ctypes.data) == (kind, memory.ctypes.data)
            assert (view.nbytes, cache.nbytes) == (5 * 2 * 7 * size, 5 * 2 * 7 * size)
            refused("contiguous", lambda: cache.buffer)


def test_gaps_need_not_be_mapped(engine: Engine) -> None:
    """Blocks of a page each, every second page without access."""
    page = mmap.PAGESIZE
    area = mmap.mmap(-1, 8 * page, mmap.MAP_PRIVATE)
    memory = np.frombuffer(area, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    for at in range(1, 8, 2):
        assert libc.mprotect(ctypes.c_void_p(memory.ctypes.data + at * page), ctypes.c_size_t(page), 0) == 0
    shape: Any = {"shape": (page,), "dtype": "uint8"}
    with engine.register("kv", [memory.ctypes.data], blocks=4, stride=2 * page, **shape) as cache:
        rows = strided(memory, 0, 4, page, 2 * page)
        rows[:] = np.arange(4, dtype=np.uint8)[:, None]
        engine.copy(cache[[3, 1]], cache[[0, 2]]).result(LIMIT)
        assert rows[:, 0].tolist() == rows[:, -1].tolist() == [0, 2, 2, 0]
    dense = engine.register("dense", [memory.ctypes.data], blocks=8, **shape)
    with pytest.raises(Error, match="not mapped"):
        engine.copy(dense[[3]], dense[[0]]).result(LIMIT)
    dense.free().result(LIMIT)


@pytest.mark.parametrize("stride", [63, 0, 65, 2**63 - 4, -1, 2**64])
def test_wrong_strides(engine: Engine, stride: int) -> None:
    memory = np.zeros(1024, np.float32)
    with pytest.raises(InvalidArgument, match="stride"):
        engine.register("kv", [memory.ctypes.data], blocks=4, shape=(16,), dtype="float32", stride=stride)


def test_parts_of_many_blocks_may_go_to_one_block(pair: Pair) -> None:
    """The last one wins."""
    shape: dict[str, Any] = {"blocks": 300, "tensors": 2, "shape": (256,), "dtype": "uint8"}
    mine, theirs = pair.local.allocate("kv", **shape), pair.remote.allocate("kv", **shape)
    for tensor in mine.tensors:
        tensor.numpy()[:] = np.arange(300)[:, None] % 251
    before = theirs.tensors[0].numpy()[7].copy()
    pair.local.push(pair.peer["kv"][[7] * 300].part(bytes=(0, 96)), mine[:].part(bytes=(0, 96))).result(LIMIT)
    for tensor in theirs.tensors:
        assert set(tensor.numpy()[7][:96]) == {299 % 251}
    assert (theirs.tensors[0].numpy()[7][96:] == before[96:]).all()
