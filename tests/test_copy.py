"""`copy_cache` and `copy_blocks`. Not for: which bytes are copied (`test_properties.py`)."""

from __future__ import annotations

from typing import Any, Callable

import pytest

from conftest import options
from llm_datadist import CacheDesc, DataType, LLMDataDist, LLMException, LLMStatusCode
from memory import contents, desc, fill, same


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
