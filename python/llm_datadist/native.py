"""The native API: an engine for KV caches, its caches, and the transfers between engines.

``llm_datadist`` has these names too, except those that the original's API also has.
"""

from __future__ import annotations

from llm_datadist import _core
from llm_datadist.errors import (
    Busy,
    Cancelled,
    Closed,
    Error,
    GrantEnded,
    InvalidArgument,
    NotFound,
    OutOfMemory,
    PeerLost,
    Timeout,
    VerifyFailed,
)

__all__ = [
    "Busy",
    "Cache",
    "CacheBuffer",
    "Cancelled",
    "Closed",
    "Completed",
    "Engine",
    "Error",
    "Event",  # noqa: F822  (`__getattr__` makes it)
    "Grant",
    "GrantClosed",
    "GrantEnded",
    "InvalidArgument",
    "Keeper",
    "KeeperObserver",
    "KvLayout",
    "Message",
    "NotFound",
    "OutOfMemory",
    "Peer",
    "PeerDown",
    "PeerLost",
    "PeerUp",
    "RemoteCache",
    "Rows",
    "Store",
    "StoreView",
    "TensorView",
    "Timeout",
    "Transfer",
    "VerifyFailed",
]

_native = _core.native

Cache = _native.Cache
CacheBuffer = _native.CacheBuffer
Completed = _native.Completed
Engine = _native.Engine
Grant = _native.Grant
GrantClosed = _native.GrantClosed
Keeper = _native.Keeper
_Holder = _native.Holder  # of `llm-datadist serve`
KeeperObserver = _native.KeeperObserver
KvLayout = _native.KvLayout
Message = _native.Message
Peer = _native.Peer
PeerDown = _native.PeerDown
PeerUp = _native.PeerUp
RemoteCache = _native.RemoteCache
Rows = _native.Rows
Store = _native.Store
StoreView = _native.StoreView
TensorView = _native.TensorView
Transfer = _native.Transfer


def __getattr__(name: str) -> object:
    if name != "Event":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from typing import Union  # noqa: PLC0415  (takes longer to import than this package)

    globals()[name] = Union[Completed, Message, PeerUp, PeerDown, GrantClosed]
    return globals()[name]
