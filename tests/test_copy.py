"""`copy_cache` and `copy_blocks`: which bytes move, and which do not."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from llm_datadist import CacheDesc, DataType, LLMException, Placement
from memory import INT64_MAX, LE, TE, UINT64_MAX, contents, desc, fill, refused, same


@pytest.mark.contract("19.copy-cache")
@pytest.mark.parametrize("to", list(Placement))
@pytest.mark.parametrize("source", list(Placement))
def test_whole_slot_between_all_placements(manager: Any, source: Placement, to: Placement) -> None:
    src = manager.allocate_cache(desc(4, 700, 3, source))
    dst = manager.allocate_cache(desc(4, 700, 3, to))
    expected, from_ = fill(dst, 1), fill(src, 2)
    assert manager.copy_cache(dst, src, 3, 1) is None
    for target, origin in zip(expected, from_):
        target[3] = origin[1]
    assert same(contents(dst), expected)
    assert same(contents(src), from_)


def test_keywords_have_their_names(manager: Any) -> None:
    src, dst = manager.allocate_cache(desc()), manager.allocate_cache(desc())
    expected, from_ = fill(dst, 1), fill(src, 2)
    manager.copy_cache(dst=dst, src=src, dst_batch_index=2, src_batch_index=3, offset=10, size=20, req_id=UINT64_MAX)
    for target, origin in zip(expected, from_):
        target[2, 10:30] = origin[3, 10:30]
    assert same(contents(dst), expected)


@pytest.mark.contract("19.copy-cache-range")
@pytest.mark.parametrize(
    ("offset", "size"),
    [(0, 1), (0, 256), (0, 255), (1, 255), (255, 1), (7, 100), (0, -1), (1, -1), (255, -1), (128, 128)],
)
def test_offset_and_size(manager: Any, offset: int, size: int) -> None:
    src, dst = manager.allocate_cache(desc()), manager.allocate_cache(desc())
    expected, from_ = fill(dst, 3), fill(src, 4)
    manager.copy_cache(dst, src, 1, 2, offset, size)
    stop = 256 if size == -1 else offset + size
    for target, origin in zip(expected, from_):
        target[1, offset:stop] = origin[2, offset:stop]
    assert same(contents(dst), expected)


@pytest.mark.contract("19.copy-cache-range")
def test_strides_may_differ_when_the_range_fits(manager: Any) -> None:
    small, large = manager.allocate_cache(desc(4, 100)), manager.allocate_cache(desc(2, 300))
    small_bytes, large_bytes = fill(small, 1), fill(large, 2)
    manager.copy_cache(large, small, 1, 3)
    for target, origin in zip(large_bytes, small_bytes):
        target[1, :100] = origin[3]
    assert same(contents(large), large_bytes)
    manager.copy_cache(small, large, 0, 1, 40, 60)
    for target, origin in zip(small_bytes, large_bytes):
        target[0, 40:100] = origin[1, 40:100]
    assert same(contents(small), small_bytes)
    for bad in ((0, 1, 0, -1), (0, 1, 99, -1), (0, 1, 40, 61), (0, 1, 100, 1), (0, 1, 100, -1)):
        with refused(manager, LE, [small, large]):
            manager.copy_cache(small, large, *bad)


@pytest.mark.contract("19.copy-cache-range", "20.8")
@pytest.mark.parametrize(
    "args",
    [
        *[(4, 0), (0, 4), (2**32 - 1, 0), (0, 2**32 - 1)],
        *[(0, 0, offset) for offset in (256, 257, 2**63, UINT64_MAX)],
        *[(0, 0, 0, size) for size in (0, -2, -(2**63), 257, INT64_MAX)],
        *[(0, 0, 1, 256), (0, 0, 255, 2), (0, 0, UINT64_MAX, INT64_MAX), (3, 3, 2**64 - 3 * 256, 256)],
    ],
)
def test_out_of_range(manager: Any, args: tuple[int, ...]) -> None:
    src, dst = manager.allocate_cache(desc()), manager.allocate_cache(desc())
    fill(src, 1), fill(dst, 2)
    with refused(manager, LE, [src, dst]):
        manager.copy_cache(dst, src, *args)
    with refused(manager, LE, [src, dst]):
        manager.copy_cache(src, src, *args)


def twin(before: list[np.ndarray], pairs: list[tuple[int, int]]) -> list[np.ndarray]:
    """The pairs copied one after the other."""
    after = [tensor.copy() for tensor in before]
    for source, target in pairs:
        for tensor in after:
            tensor[target] = tensor[source].copy()
    return after


MAPPINGS: list[dict[int, list[int]]] = [
    {},
    {0: [], 1: [2]},
    {7: [7, 6, 7]},
    {0: [1], 1: [2], 2: [3], 3: [4]},
    {0: [1], 1: [0]},
    {1: [2], 0: [2]},
    {0: [4, 4, 4], 5: [4, 0], 4: [5]},
    {7: [0], 0: [7, 1], 1: [2], 2: [1, 0]},
]


def pairs_of(mapping: dict[int, list[int]]) -> list[tuple[int, int]]:
    """The pairs in dictionary and list order."""
    return [(source, target) for source, targets in mapping.items() for target in targets]


@pytest.mark.contract("19.copy-blocks")
@pytest.mark.parametrize("placement", list(Placement))
@pytest.mark.parametrize("mapping", MAPPINGS, ids=str)
def test_blocks_are_copied_in_the_order_given(
    manager: Any, mapping: dict[int, list[int]], placement: Placement
) -> None:
    cache = manager.allocate_blocks_cache(desc(8, 100, 3, placement))
    expected = twin(fill(cache, 1), pairs_of(mapping))
    assert manager.copy_blocks(cache, mapping) is None
    assert same(contents(cache), expected)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.int32, np.uint32, np.int64, np.uint64])
def test_pairs_as_an_array(manager: Any, dtype: type) -> None:
    cache = manager.allocate_blocks_cache(desc(8, 100, 3))
    for mapping in MAPPINGS:
        pairs = pairs_of(mapping)
        expected = twin(fill(cache, 1), pairs)
        manager.copy_blocks(cache, np.array(pairs, dtype=dtype).reshape(-1, 2))
        assert same(contents(cache), expected)


def test_array_layouts(manager: Any) -> None:
    cache = manager.allocate_blocks_cache(desc(8, 100, 3))
    pairs = [(0, 1), (1, 2), (5, 0), (2, 7)]
    plain = np.array(pairs, dtype=np.int64)
    wide = np.zeros((8, 4), dtype=np.int64)
    wide[::2, ::2] = plain
    frozen = plain.copy()
    frozen.flags.writeable = False
    layouts = {
        "fortran": np.asfortranarray(plain),
        "strided": wide[::2, ::2],
        "reversed": plain[::-1].copy()[::-1],
        "read only": frozen,
        "big endian": plain.astype(">i8"),
    }
    for name, array in layouts.items():
        expected = twin(fill(cache, 1), pairs)
        manager.copy_blocks(cache, array)
        assert same(contents(cache), expected), name


@pytest.mark.contract("19.copy-blocks")
@pytest.mark.parametrize("bad", [4, -1, 2**31, 2**32, 2**32 + 1, INT64_MAX, -(2**63)])
def test_a_bad_last_block_means_nothing_was_copied(manager: Any, bad: int) -> None:
    cache = manager.allocate_blocks_cache(desc(4, 100, 2))
    neighbour = manager.allocate_blocks_cache(desc(4, 100, 2))
    fill(cache, 1), fill(neighbour, 2)
    for mapping in (
        {0: [1, 2, bad]},
        {0: [1], bad: [2]},
        np.array([(0, 1), (1, 2), (3, bad)], dtype=np.int64),
        np.array([(0, 1), (bad, 2)], dtype=np.int64),
    ):
        with refused(manager, LE, [cache, neighbour]):
            manager.copy_blocks(cache, mapping)


class Tensor:
    """What torch's tensors have in common with arrays: a `dtype` without a `kind`, and `__array__`."""

    dtype = object()

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        self.shape = array.shape

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.asarray(self._array, dtype=dtype)


class Interface:
    """Memory that only describes itself."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        self.__array_interface__ = array.__array_interface__


@pytest.mark.parametrize("kind", [Tensor, Interface])
def test_pairs_in_the_arrays_of_others(manager: Any, kind: type) -> None:
    cache = manager.allocate_blocks_cache(desc(8, 100, 3))
    pairs = [(0, 1), (1, 2), (5, 0)]
    expected = twin(fill(cache, 1), pairs)
    manager.copy_blocks(cache, kind(np.array(pairs, dtype=np.int32)))
    assert same(contents(cache), expected)
    manager.copy_blocks(cache, kind(np.zeros((0, 2), dtype=np.int64)))
    for bad in (np.ones((2, 2)), np.ones((2, 2), dtype=bool), np.ones((2, 3), dtype=int), np.ones(2, dtype=int)):
        with refused(manager, TE, [cache]):
            manager.copy_blocks(cache, kind(bad))


class Lying:
    """Looks like an array to a careless reader, and is none."""

    class dtype:  # noqa: N801
        """With the kind of one."""

        kind = "i"

    shape = (5, 2)

    def astype(self, *_: object) -> Lying:
        return self

    def tobytes(self) -> bytes:
        return bytes(32)


@pytest.mark.parametrize(
    "bad", [Lying(), [(0, 1)], ((0, 1),), "ab", 5, object(), memoryview(b"ab"), np.int64(3)], ids=repr
)
def test_what_is_no_array_of_pairs(manager: Any, bad: Any) -> None:
    cache = manager.allocate_blocks_cache(desc(8, 100, 3))
    with pytest.raises(TypeError, match="only support"):
        manager.copy_blocks(cache, bad)


@pytest.mark.parametrize("wrapped", [2**63, 2**64 - 1])
@pytest.mark.parametrize("column", [0, 1])
def test_an_unsigned_pair_is_never_wrapped(manager: Any, wrapped: int, column: int) -> None:
    cache = manager.allocate_blocks_cache(desc(8, 100, 3))
    pairs = np.array([[0, 1], [2, 3]], dtype=np.uint64)
    pairs[1, column] = wrapped
    with pytest.raises(LLMException, match=str(wrapped)):
        manager.copy_blocks(cache, pairs)


def test_another_dimension_of_slots_is_looked_at_after_the_kinds(manager: Any) -> None:
    turned = manager.allocate_cache(CacheDesc(1, [4, 4], DataType.DT_INT8, batch_dim_index=1))
    blocks = manager.allocate_blocks_cache(CacheDesc(1, [4, 4], DataType.DT_INT8))
    with pytest.raises(LLMException, match=r"^dst "):
        manager.copy_cache(blocks, turned)
    with pytest.raises(LLMException, match="batch_dim_index"):
        manager.copy_cache(turned, turned)
