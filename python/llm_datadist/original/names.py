"""The names of the original's API, which ``llm_datadist`` has too, and what else the native module uses of that API."""

from __future__ import annotations

from llm_datadist.engine_log import drain as drain_log
from llm_datadist.log import error as log_error
from llm_datadist.original.cache_manager import CacheManager
from llm_datadist.original.configs import LLMClusterInfo, LLMConfig, LlmConfig, LLMRole
from llm_datadist.original.data_type import DataType
from llm_datadist.original.datadist import LLMDataDist
from llm_datadist.original.kv_cache_manager import KvCache, KvCacheManager
from llm_datadist.original.layerwise import CacheTask, LayerSynchronizer, TransferConfig, TransferWithCacheKeyConfig
from llm_datadist.original.status import LLMException, LLMMismatchException, LLMStatusCode, Status
from llm_datadist.original.tensors import Tensor, TensorDesc
from llm_datadist.original.types import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    MemInfo,
    Memtype,
    Placement,
    RegisterMemStatus,
)

# `CacheManager` is importable, but not in the original's `__all__` (contract §1.1).
__all__ = [
    "BlocksCacheKey",
    "Cache",
    "CacheDesc",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "CacheManager",
    "CacheTask",
    "DataType",
    "KvCache",
    "KvCacheManager",
    "LLMClusterInfo",
    "LLMConfig",
    "LLMDataDist",
    "LLMException",
    "LLMRole",
    "LLMStatusCode",
    "LayerSynchronizer",
    "LlmConfig",
    "MemInfo",
    "Memtype",
    "Placement",
    "RegisterMemStatus",
    "Status",
    "Tensor",
    "TensorDesc",
    "TransferConfig",
    "TransferWithCacheKeyConfig",
]
