"""The names of :mod:`llm_datadist` under the import path of the first generation (python-api.md §1.3).

The very same objects, so that either spelling catches and compares. The original's native module ``llm_wrapper`` is not
reproduced.
"""

from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    KvCache,
    KvCacheManager,
    LLMClusterInfo,
    LLMConfig,
    LlmConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    MemInfo,
    Memtype,
    Placement,
    RegisterMemStatus,
    Status,
    Tensor,
    TensorDesc,
)

__all__ = [  # noqa: RUF022  (the order of the contract)
    "LLMClusterInfo",
    "LLMStatusCode",
    "LLMException",
    "LLMRole",
    "LlmConfig",
    "LLMConfig",
    "TensorDesc",
    "Tensor",
    "DataType",
    "Status",
    "KvCacheManager",
    "CacheDesc",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "KvCache",
    "BlocksCacheKey",
    "LLMDataDist",
    "Placement",
    "RegisterMemStatus",
    "Memtype",
    "MemInfo",
]
