"""Re-exports of :mod:`llm_datadist.types` under the path that existing clients import."""

from llm_datadist.data_type import DataType
from llm_datadist.kv_cache_manager import KvCache
from llm_datadist.types import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    MemInfo,
    Memtype,
    Placement,
    PushType,
    RegisterMemStatus,
    check_layer_range,
    int_to_mem_status_dict,
)

__all__ = [
    "BlocksCacheKey",
    "Cache",
    "CacheDesc",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "DataType",
    "KvCache",
    "MemInfo",
    "Memtype",
    "Placement",
    "PushType",
    "RegisterMemStatus",
    "check_layer_range",
    "int_to_mem_status_dict",
]
