"""The names of ``llm_datadist`` under the import path of the first generation.

Every name is the same object as in ``llm_datadist``, so that exceptions and codes of both import paths are equal. The
native module ``llm_wrapper`` of the original does not exist here.
"""

# ruff: noqa: F405  (every name of `__all__` is one of `llm_datadist`)
from llm_datadist import *  # noqa: F403

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
    "LayerSynchronizer",
    "TransferConfig",
    "CacheTask",
    "TransferWithCacheKeyConfig",
    "Memtype",
    "MemInfo",
]
