"""Caches of the `KvCacheManager`: descriptors, CPU caches, and what the engine holds."""

from __future__ import annotations

from llm_datadist import CacheDesc, DataType, KvCache, KvCacheManager, Placement
from memory import UserTensors, pool_facts, stats


def desc(rows: int = 4, row_bytes: int = 64, tensors: int = 2, placement: Placement = Placement.DEVICE) -> CacheDesc:
    return CacheDesc(tensors, (rows, row_bytes), DataType.DT_UINT8, placement)


def table(manager: KvCacheManager) -> tuple[int, int, int]:
    """Return the number of caches and of keys, and the used bytes of the pool."""
    counted = stats(manager)
    return counted["table"]["caches"], counted["table"]["keys"], pool_facts(manager)["used_bytes"]


def cpu(rows: int = 4, row_bytes: int = 64, count: int = 2) -> tuple[KvCache, UserTensors]:
    own = UserTensors(rows, row_bytes, count)
    return KvCache.create_cpu_cache(own.describe(), own.addrs), own
