"""`copy_cache` and `copy_blocks`: which bytes are copied, and that all others stay as they were."""

from __future__ import annotations

from typing import Any, Callable

import numpy as np
import pytest

from conftest import options
from ids import short
from llm_datadist import CacheDesc, DataType, LLMDataDist, LLMException, LLMStatusCode, Placement
from memory import INT64_MAX, LE, TE, UINT64_MAX, contents, desc, fill, refused, same


@pytest.mark.contract("19.copy-cache", "19.copy-cache-range")
@pytest.mark.parametrize("to", list(Placement))
@pytest.mark.parametrize("source", list(Placement))
@pytest.mark.parametrize(("offset", "size"), [(0, 256), (0, 255), (1, 255), (7, 100), (0, -1), (1, -1), (255, -1)])
def test_offset_and_size(manager: Any, offset: int, size: int, source: Placement, to: Placement) -> None:
    src, dst = manager.allocate_cache(desc(4, 256, 3, source)), manager.allocate_cache(desc(2, 300, 3, to))
    expected, from_ = fill(dst, 3), fill(src, 4)
    where = {"dst_batch_index": 1, "src_batch_index": 2, "offset": offset, "size": size, "req_id": UINT64_MAX}
    assert manager.copy_cache(dst=dst, src=src, **where) is None
    stop = 256 if size == -1 else offset + size
    for target, origin in zip(expected, from_):
        target[1, offset:stop] = origin[2, offset:stop]
    assert same(contents(dst), expected)
    assert same(contents(src), from_)


@pytest.mark.contract("19.copy-cache-range", "20.8")
@pytest.mark.parametrize("args", [(4, 0), (0, 4), (0, 0, 256), (0, 0, 1, 256), (3, 3, 2**64 - 3 * 256, 256)])
def test_out_of_range(manager: Any, args: tuple[int, ...]) -> None:
    """For more numbers see `test_bad_input.py`."""
    src, dst = manager.allocate_cache(desc()), manager.allocate_cache(desc())
    small, large = manager.allocate_cache(desc(4, 100)), manager.allocate_cache(desc(4, 300))
    for number, cache in enumerate((src, dst, small, large)):
        fill(cache, number)
    for to, from_, where in (
        (dst, src, args),
        (src, src, args),
        (small, large, (0, 1)),
        (small, large, (0, 1, 40, 61)),
    ):
        with refused(manager, LE, [src, dst, small, large]):
            manager.copy_cache(to, from_, *where)


def twin(before: list[np.ndarray], pairs: list[tuple[int, int]]) -> list[np.ndarray]:
    """Copy the pairs one after the other with numpy."""
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


class Tensor:
    """An array-like object such as a torch tensor: it has a `dtype` without a `kind`, and `__array__`."""

    dtype = object()

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        self.shape = array.shape

    def __array__(self, dtype: Any = None, copy: Any = None) -> np.ndarray:
        return np.asarray(self._array, dtype=dtype)


class Interface:
    """An object that only has `__array_interface__`."""

    def __init__(self, array: np.ndarray) -> None:
        self._array = array
        self.__array_interface__ = array.__array_interface__


FORMS: dict[str, Callable[[np.ndarray], Any]] = {
    **{kind: lambda pairs, kind=kind: pairs.astype(kind) for kind in ("i1", "u1", "i2", "i4", "u4", "u8", ">i8")},
    "fortran": np.asfortranarray,
    "strided": lambda pairs: pairs.repeat(2, axis=0).repeat(2, axis=1)[::2, ::2],
    "reversed": lambda pairs: pairs[::-1].copy()[::-1],
    "read only": lambda pairs: np.broadcast_to(pairs, pairs.shape),
    "tensor": Tensor,
    "interface": Interface,
}


@pytest.mark.contract("19.copy-blocks")
@pytest.mark.parametrize("placement", list(Placement))
@pytest.mark.parametrize("form", ["dictionary", *FORMS])
def test_blocks_are_copied_in_the_order_given(manager: Any, form: str, placement: Placement) -> None:
    cache = manager.allocate_blocks_cache(desc(8, 100, 3, placement))
    for mapping in MAPPINGS:
        pairs = pairs_of(mapping)
        expected = twin(fill(cache, 1), pairs)
        array = np.array(pairs, dtype=np.int64).reshape(-1, 2)
        assert manager.copy_blocks(cache, mapping if form == "dictionary" else FORMS[form](array)) is None
        assert same(contents(cache), expected)


def test_a_time_limit_that_passes_while_a_copy_is_planned_says_so(start: Callable[..., LLMDataDist]) -> None:
    """Planning half a million pairs takes more than a millisecond on every machine."""
    manager = start(options(llm__SyncKvCacheWaitTime="1")).cache_manager
    cache = manager.allocate_blocks_cache(desc(8, 100, 1))
    before = fill(cache, 1)
    pairs = np.array([(step % 7, 7) for step in range(500_000)])
    with pytest.raises(LLMException, match="sync_kv_timeout passed while planning the copy") as caught:
        manager.copy_blocks(cache, pairs)
    assert caught.value.status_code == LLMStatusCode.LLM_TIMEOUT
    assert same(contents(cache), before), "nothing was copied"


@pytest.mark.parametrize("kind", [Tensor, Interface])
@pytest.mark.parametrize(
    "bad", [np.ones((2, 2)), np.ones((2, 2), dtype=bool), np.ones((2, 3), dtype=int), np.ones(2, dtype=int)], ids=short
)
def test_other_arrays_of_no_pairs(manager: Any, kind: type, bad: np.ndarray) -> None:
    cache = manager.allocate_blocks_cache(desc(8, 100, 3))
    with refused(manager, TE, [cache]):
        manager.copy_blocks(cache, kind(bad))


@pytest.mark.contract("19.copy-blocks")
@pytest.mark.parametrize("bad", [4, -1, 2**32, INT64_MAX])
def test_a_bad_last_block_means_nothing_was_copied(manager: Any, bad: int) -> None:
    """For mappings see `test_bad_input.py`."""
    cache = manager.allocate_blocks_cache(desc(4, 100, 2))
    neighbour = manager.allocate_blocks_cache(desc(4, 100, 2))
    fill(cache, 1), fill(neighbour, 2)
    for pairs in ([(0, 1), (1, 2), (3, bad)], [(0, 1), (bad, 2)]):
        with refused(manager, LE, [cache, neighbour]):
            manager.copy_blocks(cache, np.array(pairs, dtype=np.int64))


class Lying:
    """An object that has attributes of an array but is not one."""

    class dtype:  # noqa: N801
        """A dtype with a `kind`."""

        kind = "i"

    shape = (5, 2)

    def astype(self, *_: object) -> Lying:
        return self

    def tobytes(self) -> bytes:
        return bytes(32)


@pytest.mark.parametrize("bad", [Lying(), object(), memoryview(b"ab"), np.int64(3)], ids=short)
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
