"""An engine for the KV cache of large language models: the native API, and the API of LLM-DataDist.

``help(llm_datadist.native)`` describes the native API. The help of this package describes the API of LLM-DataDist.

The package allocates caches in memory pools, copies and swaps their blocks, and moves them between processes and hosts.
An import opens no device and no socket, starts no thread, and does not import numpy. ``__all__`` has the names of the
original, so import those of the native API by name. The first use of a name of the original imports
``llm_datadist.original``, so native programs do not pay for it.
"""

from __future__ import annotations

import atexit
import os
import sys

from llm_datadist import _core
from llm_datadist._core import __version__ as __version__
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
from llm_datadist.native import Keeper as Keeper
from llm_datadist.native import KeeperObserver as KeeperObserver
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
from llm_datadist.native import Store as Store
from llm_datadist.native import StoreView as StoreView
from llm_datadist.native import Timeout as Timeout
from llm_datadist.native import Transfer as Transfer
from llm_datadist.native import VerifyFailed as VerifyFailed

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

# Further names of `original.names` (contract §1.1), and modules that the original's import loads.
_FURTHER = ("CacheManager",)
_MODULES = ("configs", "data_type", "status")


def _original() -> object:
    from llm_datadist.original import names  # noqa: PLC0415  (imported when it is needed)

    return names


TYPE_CHECKING = False  # importing `typing` would take longer than this package
if TYPE_CHECKING:
    from llm_datadist.original.names import *
else:

    def __getattr__(name: str) -> object:
        if name in _MODULES:
            __import__(f"{__name__}.{name}")
        elif name in __all__ or name in _FURTHER:
            globals()[name] = getattr(_original(), name)
        else:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        return globals()[name]

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__, *_FURTHER, *_MODULES})


# Programs of the original read this variable after importing the package (contract §1.1).
os.environ.setdefault("AUTO_USE_UC_MEMORY", "0")


def _run_if_loaded(hook: str) -> None:
    """Call a function of ``original.datadist`` if that module is loaded: only then can there be an ``LLMDataDist``."""
    call = getattr(sys.modules.get(f"{__name__}.original.datadist"), hook, None)
    if call is not None:
        call()


_core.register_types(_original)
atexit.register(_core.native.close_all)
# Registered here, so that what the program registers after the import runs first, with an engine that is still open.
atexit.register(_run_if_loaded, "_shutdown_handler")
# A forked child closes its copies of the parent's sockets, so that peers notice at once when the parent dies.
os.register_at_fork(after_in_child=_core.abandon_sockets)
os.register_at_fork(after_in_child=lambda: _run_if_loaded("_forget_parent"))
