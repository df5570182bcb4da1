"""Re-exports of ``types`` and ``layerwise`` under the path that existing clients import."""

from llm_datadist.original.data_type import DataType
from llm_datadist.original.kv_cache_manager import KvCache
from llm_datadist.original.layerwise import CacheTask, LayerSynchronizer, TransferConfig, TransferWithCacheKeyConfig
from llm_datadist.original.types import (
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
    "CacheTask",
    "DataType",
    "KvCache",
    "LayerSynchronizer",
    "MemInfo",
    "Memtype",
    "Placement",
    "PushType",
    "RegisterMemStatus",
    "TransferConfig",
    "TransferWithCacheKeyConfig",
    "check_layer_range",
    "int_to_mem_status_dict",
]
