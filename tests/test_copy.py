"""`copy_cache` and `copy_blocks`: which bytes are copied, and that all others stay as they were."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable

import pytest

from conftest import options
from llm_datadist import CacheDesc, DataType, LLMDataDist, LLMException, LLMStatusCode, Placement
from memory import LE, UINT64_MAX, contents, desc, fill, refused, same

if TYPE_CHECKING:
    import numpy as np


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


@pytest.mark.contract("19.copy-blocks")
@pytest.mark.parametrize("placement", list(Placement))
def test_blocks_are_copied_in_the_order_given(manager: Any, placement: Placement) -> None:
    cache = manager.allocate_blocks_cache(desc(8, 100, 3, placement))
    for mapping in MAPPINGS:
        expected = twin(fill(cache, 1), pairs_of(mapping))
        assert manager.copy_blocks(cache, mapping) is None
        assert same(contents(cache), expected)


def test_a_time_limit_that_passes_while_a_copy_is_planned_says_so(start: Callable[..., LLMDataDist]) -> None:
    """Planning half a million pairs takes more than a millisecond on every machine."""
    manager = start(options(llm__SyncKvCacheWaitTime="1")).cache_manager
    cache = manager.allocate_blocks_cache(desc(8, 100, 1))
    before = fill(cache, 1)
    pairs = {source: [7] * 70_000 for source in range(7)}
    with pytest.raises(LLMException, match="sync_kv_timeout passed while planning the copy") as caught:
        manager.copy_blocks(cache, pairs)
    assert caught.value.status_code == LLMStatusCode.LLM_TIMEOUT
    assert same(contents(cache), before), "nothing was copied"


def test_another_dimension_of_slots_is_looked_at_after_the_kinds(manager: Any) -> None:
    turned = manager.allocate_cache(CacheDesc(1, [4, 4], DataType.DT_INT8, batch_dim_index=1))
    blocks = manager.allocate_blocks_cache(CacheDesc(1, [4, 4], DataType.DT_INT8))
    with pytest.raises(LLMException, match=r"^dst "):
        manager.copy_cache(blocks, turned)
    with pytest.raises(LLMException, match="batch_dim_index"):
        manager.copy_cache(turned, turned)
