"""Where the names of the original's API are, and what else the native module uses of that API.

``llm_datadist.__all__`` lists the names. ``CacheManager`` is importable, but not in that list (contract §1.1).
"""

# ruff: noqa: PLC0414  (type checkers export a name of an import only if it is repeated)
from __future__ import annotations

from llm_datadist.engine_log import drain as drain_log
from llm_datadist.log import error as log_error
from llm_datadist.original.cache_manager import CacheManager as CacheManager
from llm_datadist.original.configs import LLMClusterInfo as LLMClusterInfo
from llm_datadist.original.configs import LLMConfig as LLMConfig
from llm_datadist.original.configs import LlmConfig as LlmConfig
from llm_datadist.original.configs import LLMRole as LLMRole
from llm_datadist.original.data_type import DataType as DataType
from llm_datadist.original.datadist import LLMDataDist as LLMDataDist
from llm_datadist.original.kv_cache_manager import KvCache as KvCache
from llm_datadist.original.kv_cache_manager import KvCacheManager as KvCacheManager
from llm_datadist.original.layerwise import CacheTask as CacheTask
from llm_datadist.original.layerwise import LayerSynchronizer as LayerSynchronizer
from llm_datadist.original.layerwise import TransferConfig as TransferConfig
from llm_datadist.original.layerwise import TransferWithCacheKeyConfig as TransferWithCacheKeyConfig
from llm_datadist.original.status import LLMException as LLMException
from llm_datadist.original.status import LLMMismatchException as LLMMismatchException
from llm_datadist.original.status import LLMStatusCode as LLMStatusCode
from llm_datadist.original.status import Status as Status
from llm_datadist.original.tensors import Tensor as Tensor
from llm_datadist.original.tensors import TensorDesc as TensorDesc
from llm_datadist.original.types import BlocksCacheKey as BlocksCacheKey
from llm_datadist.original.types import Cache as Cache
from llm_datadist.original.types import CacheDesc as CacheDesc
from llm_datadist.original.types import CacheKey as CacheKey
from llm_datadist.original.types import CacheKeyByIdAndIndex as CacheKeyByIdAndIndex
from llm_datadist.original.types import MemInfo as MemInfo
from llm_datadist.original.types import Memtype as Memtype
from llm_datadist.original.types import Placement as Placement
from llm_datadist.original.types import RegisterMemStatus as RegisterMemStatus
