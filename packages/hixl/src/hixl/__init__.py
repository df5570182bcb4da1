"""One-sided reads and writes by address, between engines of several processes or hosts.

An engine (``Hixl``) registers memory and connects to other engines. It then reads and writes their registered memory by
address; the program at the other end calls nothing. All memory is host memory, whatever its ``MemType``.

Every method except ``finalize`` returns a status number, alone or first in a tuple. Methods raise only ``TypeError``,
for an argument of a wrong type. The status numbers:

- ``SUCCESS``: the call has done its work.
- ``PARAM_INVALID``: an invalid value, address, range or option, or an unknown request.
- ``TIMEOUT``: the time limit has passed.
- ``NOT_CONNECTED``, ``ALREADY_CONNECTED``: the connection to the other engine does not exist, or exists already.
- ``RESOURCE_EXHAUSTED``: a queue is full, or memory could not be allocated.
- ``FAILED``: any other failure, and every call on an object that is not initialized.
- ``NOTIFY_FAILED``, ``UNSUPPORTED``: reserved. No call returns them.
"""

from __future__ import annotations

from hixl._enums import (
    AUTO_CONNECT,
    CLIENT_SERVER_COMM,
    CONNECT_FAILED,
    CONNECT_PENDING,
    CONNECTED,
    CONNECTING,
    DISCONNECT_PENDING,
    DISCONNECTING,
    MEM_DEVICE,
    MEM_HOST,
    NOT_CONNECT,
    READ,
    WRITE,
    AsyncConnectStatus,
    FeatureType,
    MemType,
    TransferOp,
    TransferStatus,
)
from hixl._hixl import (
    FEATURE_NOT_SUPPORTED,
    FEATURE_SUPPORTED,
    GetTransferStatusArgs,
    Hixl,
    MemDesc,
    NotifyDesc,
    TransferArgs,
    TransferOpDesc,
    TransferResult,
    get_capability,
)
from hixl._numbers import (
    ALREADY_CONNECTED,
    FAILED,
    NOT_CONNECTED,
    NOTIFY_FAILED,
    OPTION_AUTO_CONNECT,
    OPTION_BUFFER_POOL,
    OPTION_ENABLE_USE_FABRIC_MEM,
    OPTION_GLOBAL_RESOURCE_CONFIG,
    OPTION_LOCAL_COMM_RES,
    OPTION_RDMA_SERVICE_LEVEL,
    OPTION_RDMA_TRAFFIC_CLASS,
    PARAM_INVALID,
    RESOURCE_EXHAUSTED,
    SUCCESS,
    TIMEOUT,
    UNSUPPORTED,
)

__all__ = [
    "ALREADY_CONNECTED",
    "AUTO_CONNECT",
    "CLIENT_SERVER_COMM",
    "CONNECTED",
    "CONNECTING",
    "CONNECT_FAILED",
    "CONNECT_PENDING",
    "DISCONNECTING",
    "DISCONNECT_PENDING",
    "FAILED",
    "FEATURE_NOT_SUPPORTED",
    "FEATURE_SUPPORTED",
    "MEM_DEVICE",
    "MEM_HOST",
    "NOTIFY_FAILED",
    "NOT_CONNECT",
    "NOT_CONNECTED",
    "OPTION_AUTO_CONNECT",
    "OPTION_BUFFER_POOL",
    "OPTION_ENABLE_USE_FABRIC_MEM",
    "OPTION_GLOBAL_RESOURCE_CONFIG",
    "OPTION_LOCAL_COMM_RES",
    "OPTION_RDMA_SERVICE_LEVEL",
    "OPTION_RDMA_TRAFFIC_CLASS",
    "PARAM_INVALID",
    "READ",
    "RESOURCE_EXHAUSTED",
    "SUCCESS",
    "TIMEOUT",
    "UNSUPPORTED",
    "WRITE",
    "AsyncConnectStatus",
    "FeatureType",
    "GetTransferStatusArgs",
    "Hixl",
    "MemDesc",
    "MemType",
    "NotifyDesc",
    "TransferArgs",
    "TransferOp",
    "TransferOpDesc",
    "TransferResult",
    "TransferStatus",
    "get_capability",
]
