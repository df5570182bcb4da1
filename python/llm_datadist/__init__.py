"""An engine for the KV cache of large language models: the native API, and the API of LLM-DataDist (contract §1.1).

The package allocates caches in memory pools, copies and swaps their blocks, and moves them between processes and hosts.
An import opens no device and no socket, starts no thread, and does not import numpy. This module defines the public
names and registers their classes with the native module. ``__all__`` has the names of the original.
"""

from __future__ import annotations

import atexit
import os

from llm_datadist import _core
from llm_datadist._await import await_transfer as _await_transfer
from llm_datadist._core import __version__ as __version__
from llm_datadist._core import register_types as _register_types
from llm_datadist.cache_manager import CacheManager as CacheManager  # importable, but not in __all__ (contract §1.1)
from llm_datadist.configs import LLMClusterInfo, LLMConfig, LlmConfig, LLMRole
from llm_datadist.data_type import DataType
from llm_datadist.datadist import LLMDataDist
from llm_datadist.engine_log import drain as _drain_log
from llm_datadist.groups import GroupPart as GroupPart  # not in __all__: not in the original
from llm_datadist.kv_cache_manager import KvCache, KvCacheManager
from llm_datadist.kv_layout import KvLayout as _KvLayout
from llm_datadist.layer_tasks import LayerDestination as LayerDestination  # not in __all__: not in the original
from llm_datadist.layerwise import CacheTask, LayerSynchronizer, TransferConfig, TransferWithCacheKeyConfig
from llm_datadist.log import error as _log_error
from llm_datadist.native import Busy as Busy
from llm_datadist.native import Cancelled as Cancelled
from llm_datadist.native import Closed as Closed
from llm_datadist.native import Completed as Completed
from llm_datadist.native import Engine as Engine
from llm_datadist.native import Error as Error
from llm_datadist.native import Grant as Grant
from llm_datadist.native import GrantClosed as GrantClosed
from llm_datadist.native import GrantEnded as GrantEnded
from llm_datadist.native import InvalidArgument as InvalidArgument
from llm_datadist.native import KvLayout as KvLayout
from llm_datadist.native import Message as Message
from llm_datadist.native import NotFound as NotFound
from llm_datadist.native import OutOfMemory as OutOfMemory
from llm_datadist.native import Peer as Peer
from llm_datadist.native import PeerDown as PeerDown
from llm_datadist.native import PeerLost as PeerLost
from llm_datadist.native import PeerUp as PeerUp
from llm_datadist.native import RemoteCache as RemoteCache
from llm_datadist.native import Rows as Rows
from llm_datadist.native import Timeout as Timeout
from llm_datadist.native import Transfer as Transfer
from llm_datadist.native import VerifyFailed as VerifyFailed
from llm_datadist.status import LLMException, LLMMismatchException, LLMStatusCode, Status
from llm_datadist.tensors import Tensor, TensorDesc
from llm_datadist.types import (
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

v2_list = [
    "LLMClusterInfo",
    "LLMStatusCode",
    "LLMException",
    "LLMRole",
    "LlmConfig",
    "LLMConfig",
    "DataType",
    "Status",
    "CacheDesc",
    "CacheKey",
    "CacheKeyByIdAndIndex",
    "KvCache",
    "Cache",
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

__all__ = [
    "BlocksCacheKey",
    "Cache",
    "CacheDesc",
    "CacheKey",
    "CacheKeyByIdAndIndex",
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

# Programs of the original read this variable after importing the package (contract §1.1).
os.environ.setdefault("AUTO_USE_UC_MEMORY", "0")

atexit.register(_core.native.close_all)

_register_types(
    LLMException=LLMException,
    LLMMismatchException=LLMMismatchException,
    LLMStatusCode=LLMStatusCode,
    LLMRole=LLMRole,
    DataType=DataType,
    Placement=Placement,
    CacheDesc=CacheDesc,
    CacheKey=CacheKey,
    CacheKeyByIdAndIndex=CacheKeyByIdAndIndex,
    BlocksCacheKey=BlocksCacheKey,
    Cache=Cache,
    KvCache=KvCache,
    LayerSynchronizer=LayerSynchronizer,
    TransferConfig=TransferConfig,
    TransferWithCacheKeyConfig=TransferWithCacheKeyConfig,
    LayerDestination=LayerDestination,
    KvLayout=_KvLayout,
    GroupPart=GroupPart,
    LLMClusterInfo=LLMClusterInfo,
    log_error=_log_error,
    drain_log=_drain_log,
    await_transfer=_await_transfer,
)
