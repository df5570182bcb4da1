"""Rows with a stride, and parts of rows: every call and transport, compared with numpy, with poison in every gap.

The Rust tests compare the plans and their bounds with a model (`transfer.rs`, `row_strides.rs` of the core).
"""

from __future__ import annotations

import random
import re
from typing import Any

import numpy as np
import pytest

from ids import short
from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    CacheKeyByIdAndIndex,
    DataType,
    GroupPart,
    LayerDestination,
    LLMException,
    Placement,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from memory import INT64_MAX
from peers import GRACE, INVALID, LIMIT, End, Ends, Peer, by_blocks, by_request, equal, options
from peers.values import THOROUGH, cache_key

LIMIT_MS = int((LIMIT + GRACE) * 1000)
HOW = ("pool", "contiguous", "padded", "packed")
ROUNDS = 60 if THOROUGH else 14
POOL = 64 << 20


@pytest.fixture
def served(ends: Ends, transport: str) -> tuple[End, Peer]:
    """Two linked ends with room for every shape, not in remote-accessible mode."""
    return ends.pair(llm__LinkTransport=transport, pool=POOL)


@pytest.fixture
def one_sided(ends: Ends, transport: str) -> tuple[End, Peer]:
    """Two linked ends with room for every shape, in remote-accessible mode."""
    return ends.pair(accessible=True, llm__LinkTransport=transport, pool=POOL)


class Shape:
    """A cache of random sizes. In packed memory, the stride has room for all tensors."""

    def __init__(self, chance: random.Random, tensors: int, row_bytes: int | None = None) -> None:
        self.rows, self.tensors = chance.randint(1, 90), tensors
        self.row_bytes = row_bytes or chance.choice((1, 3, 64, 100, 777, 5000))
        self.how = chance.choice(HOW)
        least = self.row_bytes * tensors if self.how == "packed" else self.row_bytes
        self.stride = least + chance.choice((0, 0, 1, 60, 5000))

    def make(self, end: Any, name: str, seed: int, **given: Any) -> list[int]:
        sizes = (self.rows, self.row_bytes, self.stride, self.tensors)
        return end.make_rows(name, *sizes, how=self.how, seed=seed, **given)

    def __repr__(self) -> str:
        return f"{self.how}, {self.tensors} tensors of {self.rows} rows of {self.row_bytes} at {self.stride}"


def drawn_part(chance: random.Random, src: Shape, dst: Shape) -> dict[str, int]:
    """`src_offset`, `dst_offset` and `length`, or some of them, or nothing if rows have equal sizes."""
    if src.row_bytes == dst.row_bytes and chance.random() < 0.4:
        return {}
    part = {"src_offset": chance.randrange(src.row_bytes), "dst_offset": chance.randrange(dst.row_bytes)}
    room = min(src.row_bytes - part["src_offset"], dst.row_bytes - part["dst_offset"])
    if chance.random() < 0.7 or not any(part.values()):
        part["length"] = chance.randint(1, room)
    return part


def copied(src: list[np.ndarray], dst: list[np.ndarray], pairs: list[tuple[int, int]], part: dict[str, int]) -> None:
    """What a call must do: copy part of each row, in the order of the pairs."""
    at, to = part.get("src_offset", 0), part.get("dst_offset", 0)
    for source, target in zip(src, dst):
        length = part.get("length", min(source.shape[1] - at, target.shape[1] - to))
        for read, written in pairs:
            target[written, to : to + length] = source[read, at : at + length].copy()


def drawn_pairs(chance: random.Random, src: Shape, dst: Shape, *, repeats: bool = False) -> list[tuple[int, int]]:
    count = chance.randint(1, min(dst.rows, 80))
    targets = [chance.randrange(dst.rows) for _ in range(count)] if repeats else chance.sample(range(dst.rows), count)
    if chance.random() < 0.3:
        targets.sort()
    return [(chance.randrange(src.rows), target) for target in targets]


def shapes(chance: random.Random) -> tuple[Shape, Shape]:
    """Two shapes with the same number of tensors, of which most have equal row sizes."""
    tensors = chance.randint(1, 4)
    first = Shape(chance, tensors)
    return first, Shape(chance, tensors, first.row_bytes if chance.random() < 0.7 else None)


@pytest.mark.parametrize("verify", ["off", "full"])
@pytest.mark.parametrize("call", ["pull", "push"])
def test_pulls_and_pushes_agree_with_numpy(ends: Ends, transport: str, call: str, verify: str) -> None:
    pulls = call == "pull"
    near, far = ends.pair(accessible=not pulls, llm__LinkTransport=transport, pool=POOL)
    chance = random.Random(7 if pulls else 8)  # noqa: S311
    for number in range(ROUNDS):
        src, dst = shapes(chance)
        there, here = (src, dst) if pulls else (dst, src)
        pairs, part = drawn_pairs(chance, src, dst, repeats=chance.random() < 0.3), drawn_part(chance, src, dst)
        there.make(far, "far", number, keys=[by_blocks(0, 9)])
        here.make(near, "near", 1000 + number)
        theirs, ours = far.read("far"), near.read("near")
        copied(theirs if pulls else ours, ours if pulls else theirs, pairs, part)
        read, written = [list(blocks) for blocks in zip(*pairs)]
        manager, handle, key = near.manager, near.held["near"].handle, BlocksCacheKey(2, 9)
        given = {"verify": verify, "tensor_num_per_layer": 1, **part}
        way = chance.choice(("plain", "async", "group"))
        if way == "async":
            getattr(manager, f"{call}_blocks_async")(key, handle, read, written, **given).result(LIMIT_MS)
        elif way == "group" and (pulls or here.tensors % 2 == 0):
            getattr(manager, f"{call}_group")([GroupPart(key, handle, read, written, **part)], verify=verify)
        else:
            getattr(manager, f"{call}_blocks")(key, handle, read, written, **given)
        assert equal([*near.read("near"), *far.read("far")], [*ours, *theirs]), f"{number}: {src} to {dst}, {part}"
        near.drop_rows("near")
        far.drop_rows("far")


def test_copies_and_swaps_agree_with_numpy(ends: Ends) -> None:
    near = ends.near(options(llm__Verify="full", pool=POOL))
    chance = random.Random(11)  # noqa: S311
    for number in range(4 * ROUNDS):
        src, dst = shapes(chance)
        src.make(near, "src", number, host=True)
        dst.make(near, "dst", 1000 + number)
        manager, handles = near.manager, [near.held[name].handle for name in ("src", "dst")]
        expected, back = near.read("dst"), near.read("src")
        pairs, part = drawn_pairs(chance, src, dst, repeats=True), drawn_part(chance, src, dst)
        copied(back, expected, list(dict(pairs).items()), part)
        if chance.random() < 0.5:
            manager.swap_blocks(*handles, dict(pairs), **part)
        else:
            manager.swap_blocks_async(*handles, dict(pairs), **part).result(LIMIT_MS)
        assert equal(near.read("dst"), expected), f"{number}: {src} to {dst}, {part}"

        within = drawn_part(chance, dst, dst)
        if within:
            room = (dst.row_bytes - max(within["src_offset"], within["dst_offset"])) or 1
            apart = abs(within["src_offset"] - within["dst_offset"])
            within["length"] = chance.randint(1, min(room, apart or room))
        pairs = drawn_pairs(chance, dst, dst, repeats=True)
        copied(expected, expected, pairs, within)
        array = np.array(pairs)
        if chance.random() < 0.5:
            manager.copy_blocks(handles[1], array, **within)
        else:
            manager.copy_blocks_async(handles[1], array, **within).result(LIMIT_MS)
        assert equal(near.read("dst"), expected), f"{number}: {dst}, {pairs}, {within}"
        assert equal(near.read("src"), back)
        near.drop_rows("src")
        near.drop_rows("dst")


def test_copied_slots_agree_with_numpy(ends: Ends) -> None:
    near = ends.near(options(pool=POOL))
    chance = random.Random(12)  # noqa: S311
    for number in range(ROUNDS):
        src, dst = shapes(chance)
        src.make(near, "src", number, blocks=False)
        dst.make(near, "dst", 1000 + number, blocks=False)
        room = min(src.row_bytes, dst.row_bytes)
        offset = chance.randrange(room)
        size = chance.randint(1, room - offset)
        read, written = chance.randrange(src.rows), chance.randrange(dst.rows)
        expected = near.read("dst")
        for target, source in zip(expected, near.read("src")):
            target[written, offset : offset + size] = source[read, offset : offset + size]
        near.manager.copy_cache(near.held["dst"].handle, near.held["src"].handle, written, read, offset, size)
        assert equal(near.read("dst"), expected), f"{number}: {src} to {dst}"
        near.drop_rows("src")
        near.drop_rows("dst")


def test_layers_agree_with_numpy(ends: Ends, way: dict[str, Any]) -> None:
    """Blocks into blocks and slots into slots, by address and by cache; addresses of packed layers are between rows."""
    near, far = ends.pair(pool=POOL, **way)
    chance = random.Random(13)  # noqa: S311
    for number in range(ROUNDS):
        here = Shape(chance, 4)
        there = Shape(chance, 4, here.row_bytes)
        blocks = chance.random() < 0.5
        bases = there.make(far, "far", number, blocks=blocks)
        here.make(near, "near", 1000 + number, blocks=blocks)
        expected, ours = far.read("far"), near.read("near")
        layers = range(chance.randint(0, 1), 2)
        read, written = chance.randrange(here.rows), chance.randrange(there.rows)
        pairs = drawn_pairs(chance, here, there) if blocks else [(read, written)]
        copied(ours[2 * layers.start :], expected[2 * layers.start :], pairs, {})
        lists: list[Any] = [list(side) for side in zip(*pairs)] if blocks else [None, None]
        row = 0 if blocks else read
        to: Any
        if way["accessible"]:
            key = BlocksCacheKey(2, 0) if blocks else CacheKeyByIdAndIndex(2, far.held_id("far"), written)
            if blocks:
                key = CacheKeyByIdAndIndex(2, far.held_id("far"), 0)
            to = TransferWithCacheKeyConfig(key, layers, layers, row)
        else:
            first = 0 if blocks else written * there.stride
            to = TransferConfig(2, [base + first for base in bases[2 * layers.start :]], layers, row)
        task = near.manager.begin_layers(near.held["near"].handle, [LayerDestination(to, *lists)])
        for layer in layers:
            task.ready(layer)
        task.transfers[0].result(LIMIT_MS)
        assert equal(far.read("far"), expected), f"{number}: {here} to {there}, {blocks}"
        near.drop_rows("near")
        far.drop_rows("far")


def test_addresses_in_gaps_are_refused(served: tuple[End, Peer]) -> None:
    near, far = served
    bases = far.make_rows("far", 8, 100, 640, 4, how="padded", seed=1)
    near.make_rows("near", 8, 100, 100, 4, how="pool", seed=2)
    before = far.read("far")
    for offset, blocks, text in (
        (100, [0], "lies in no cache"),  # the first byte of a gap
        (639, [0], "lies in no cache"),
        (1, [0], "exceeds the row"),
        (640, [7], r"dst_block_indices\[0\]=7"),  # one row after the last one
    ):
        to = TransferConfig(2, [base + offset for base in bases], range(2), 0)
        task = near.manager.begin_layers(near.held["near"].handle, [LayerDestination(to, [3], blocks)])
        failure = task.transfers[0].exception(LIMIT_MS)
        assert isinstance(failure, LLMException)
        assert failure.status_code.name == INVALID
        assert re.search(text, str(failure)), failure
    assert equal(far.read("far"), before)
    far.check_gaps("far")


def test_rows_under_a_grant(served: tuple[End, Peer]) -> None:
    near, far = served
    far.make_rows("far", 8, 100, 640, 3, how="packed", keys=[by_blocks(0, 9)], seed=1)
    near.make_rows("near", 8, 100, 100, 3, how="pool", seed=2)
    token = far.grant("far", [2, 5])
    expected = near.read("near")
    copied(far.read("far"), expected, [(5, 0), (2, 7)], {})
    near.pull_blocks(by_blocks(2, 9), "near", [5, 2], [0, 7], grant=token)
    assert equal(near.read("near"), expected)
    with pytest.raises(LLMException, match="grant"):
        near.pull_blocks(by_blocks(2, 9), "near", [4], [0], grant=token)


def test_views_have_the_stride(ends: Ends) -> None:
    manager = ends.near().manager
    types: dict[DataType, Any] = {
        DataType.DT_FLOAT16: np.float16,
        DataType.DT_INT64: np.int64,
        DataType.DT_UINT8: np.uint8,
    }
    for dtype, name in types.items():
        size = np.dtype(name).itemsize
        desc = CacheDesc(3, [5, 2, 7], dtype, row_stride=20 * size)
        for contiguous in (False, True):
            cache = manager.allocate_blocks_cache(desc, contiguous=contiguous)
            for number, view in enumerate(manager.tensor_views(cache)):
                for array in (view.numpy(), np.asarray(view), np.from_dlpack(view)):
                    assert (array.shape, array.strides) == ((5, 2, 7), (20 * size, 7 * size, size))
                    assert (array.dtype, array.ctypes.data) == (name, cache.tensor_addrs[number])
                assert view.nbytes == 5 * 2 * 7 * size
            manager.deallocate_blocks_cache(cache)


def test_buffers_of_rows_with_gaps(ends: Ends) -> None:
    """Pool memory has one buffer with its gaps; gaps of registered memory are not the cache's."""
    manager = ends.near().manager
    desc = CacheDesc(2, [5, 64], DataType.DT_UINT8, row_stride=100)
    cache = manager.allocate_blocks_cache(desc, contiguous=True)
    extent = 4 * 100 + 64
    assert cache.tensor_addrs[1] - cache.tensor_addrs[0] == extent
    assert cache.buffer().nbytes == 2 * extent
    memory = np.zeros(extent, np.uint8)
    one = CacheDesc(1, [5, 64], DataType.DT_UINT8, row_stride=100)
    registered = manager.register_blocks_cache(one, [int(memory.ctypes.data)])
    with pytest.raises(LLMException, match="row_stride=100") as caught:
        registered.buffer()
    assert caught.value.status_code.name == INVALID
    manager.unregister_cache(registered.cache_id)


def test_gaps_need_not_be_mapped(ends: Ends) -> None:
    """Rows of a page each, every second page without access."""
    import ctypes  # noqa: PLC0415
    import mmap  # noqa: PLC0415

    near, page = ends.near(), mmap.PAGESIZE
    area = mmap.mmap(-1, 8 * page, mmap.MAP_PRIVATE)
    memory = np.frombuffer(area, np.uint8)
    libc = ctypes.CDLL(None, use_errno=True)
    for at in range(1, 8, 2):
        assert libc.mprotect(ctypes.c_void_p(memory.ctypes.data + at * page), ctypes.c_size_t(page), 0) == 0
    desc = CacheDesc(1, [4, page], DataType.DT_UINT8, row_stride=2 * page)
    cache = near.manager.register_blocks_cache(desc, [int(memory.ctypes.data)])
    rows = np.lib.stride_tricks.as_strided(memory, (4, page), (2 * page, 1))
    rows[:] = np.arange(4, dtype=np.uint8)[:, None]
    near.manager.copy_blocks(cache, {0: [3], 2: [1]})
    assert rows[:, 0].tolist() == rows[:, -1].tolist() == [0, 2, 2, 0]
    near.manager.unregister_cache(cache.cache_id)
    dense = near.manager.register_blocks_cache(CacheDesc(1, [8, page], DataType.DT_UINT8), [int(memory.ctypes.data)])
    with pytest.raises(LLMException, match="not mapped"):
        near.manager.copy_blocks(dense, {0: [3]})
    near.manager.unregister_cache(dense.cache_id)


BAD_STRIDES: dict[Any, tuple[type[Exception], str]] = {
    63: (LLMException, "row_stride=63 .*at least the 64 bytes"),
    0: (LLMException, "row_stride=0 "),
    65: (LLMException, "row_stride=65 .*multiple of the 4 bytes"),
    INT64_MAX - 3: (LLMException, f"row_stride={INT64_MAX - 3}"),
    -1: (ValueError, "row_stride"),
    2**64: (ValueError, "row_stride"),
    1.5: (TypeError, "row_stride"),
    True: (TypeError, "row_stride"),
    "64": (TypeError, "row_stride"),
}


@pytest.mark.parametrize("stride", BAD_STRIDES, ids=short)
def test_invalid_strides(ends: Ends, stride: Any) -> None:
    kind, text = BAD_STRIDES[stride]
    manager = ends.near().manager
    for use in (manager.allocate_blocks_cache, lambda desc: manager.register_blocks_cache(desc, [4096] * 2)):
        with pytest.raises(kind, match=text) as caught:
            use(CacheDesc(2, [4, 16], DataType.DT_INT32, row_stride=stride))
        if isinstance(caught.value, LLMException):
            assert caught.value.status_code.name == INVALID


def test_descriptor_shows_its_stride() -> None:
    desc = CacheDesc(2, [4, 16], DataType.DT_INT32, Placement.HOST, row_stride=80)
    assert (desc.row_stride, desc.size) == (80, 256)
    assert "row_stride=80" in repr(desc)
    assert CacheDesc(2, [4, 16], DataType.DT_INT32).row_stride is None


BAD_PARTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"src_offset": 64}, LLMException, "src_offset=64 .*0 to 63"),
    ({"dst_offset": 64}, LLMException, "dst_offset=64 .*0 to 63"),
    ({"length": 0}, LLMException, "length=0 .*1 to 64"),
    ({"length": 65}, LLMException, "length=65 .*1 to 64"),
    ({"src_offset": 60, "length": 5}, LLMException, "length=5 .*1 to 4"),
    ({"dst_offset": 60, "length": 5}, LLMException, "length=5 .*1 to 4"),
    ({"dst_offset": 2**64 - 1}, LLMException, "dst_offset=18446744073709551615 "),
    ({"src_offset": 63, "length": 2**64 - 1}, LLMException, "length=18446744073709551615 "),
    ({"src_offset": -1}, ValueError, "src_offset"),
    ({"length": 2**64}, ValueError, "length"),
    ({"dst_offset": "1"}, TypeError, "dst_offset"),
    ({"length": 1.0}, TypeError, "length"),
]


@pytest.mark.parametrize("bad", BAD_PARTS, ids=short)
def test_invalid_parts(one_sided: tuple[End, Peer], bad: tuple[dict[str, Any], type[Exception], str]) -> None:
    part, kind, text = bad
    near, far = one_sided
    far.make_rows("far", 4, 64, 80, 2, how="padded", keys=[by_blocks(0, 9)], seed=1)
    near.make_rows("near", 4, 64, 100, 2, how="pool", seed=2)
    near.make_rows("host", 4, 64, 64, 2, how="pool", host=True, seed=3)
    before, key = near.read("near"), cache_key(by_blocks(2, 9))
    manager, handle, host = near.manager, near.held["near"].handle, near.held["host"].handle
    in_group = GroupPart(key, handle, [1], [2], **part)
    for call in (
        lambda: manager.pull_blocks(key, handle, [1], [2], **part),
        lambda: manager.pull_blocks_async(key, handle, [1], [2], **part).result(LIMIT_MS),
        lambda: manager.pull_group([in_group]),
        lambda: manager.push_blocks(key, handle, [1], [2], **part),
        lambda: manager.push_blocks_async(key, handle, [1], [2], **part).result(LIMIT_MS),
        lambda: manager.push_group([in_group]),
        lambda: manager.copy_blocks(handle, {1: [2]}, **part),
        lambda: manager.copy_blocks_async(handle, {1: [2]}, **part),
        lambda: manager.swap_blocks(handle, host, {1: 2}, **part),
        lambda: manager.swap_blocks_async(handle, host, {1: 2}, **part),
    ):
        with pytest.raises(kind, match=text) as caught:
            call()
        if isinstance(caught.value, LLMException):
            assert caught.value.status_code.name == INVALID
    assert equal(near.read("near"), before)
    near.check_gaps("near")
    far.check_gaps("far")


def test_parts_that_do_not_fit_the_call(served: tuple[End, Peer]) -> None:
    near, far = served
    far.make_rows("far", 4, 64, 80, 2, how="padded", keys=[by_blocks(0, 9)], seed=1)
    far.make_rows("slot", 4, 64, 80, 2, how="pool", blocks=False, keys=[by_request(2, 5)], seed=1)
    near.make_rows("near", 4, 32, 100, 2, how="pool", seed=2)
    handle, key = near.held["near"].handle, cache_key(by_blocks(2, 9))
    refused: list[tuple[Any, str]] = [
        (lambda: near.manager.pull_blocks(key, handle, [1], [2]), "32 bytes in the local cache and 64"),
        (lambda: near.manager.pull_blocks(key, handle, [1, 2], [2], length=8), "src_blocks has 2"),
        (lambda: near.manager.pull_blocks(cache_key(by_request(2, 5)), handle, [], [2], length=8), "BlocksCacheKey"),
        (lambda: near.manager.copy_blocks(handle, {1: [2]}, dst_offset=8, length=16), "dst_offset=8 "),
    ]
    for call, text in refused:
        with pytest.raises(LLMException, match=text) as caught:
            call()
        assert caught.value.status_code.name == INVALID
