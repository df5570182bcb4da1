"""Enumerations. Members of the first three equal plain integers; the two kinds of states equal only their own type."""

from __future__ import annotations

import enum


class MemType(enum.IntEnum):
    """The type of the memory of a range. All memory is host memory, so both types are treated alike."""

    MEM_DEVICE = 0
    MEM_HOST = 1


class TransferOp(enum.IntEnum):
    """The direction of a transfer: ``READ`` copies from the other engine to the caller, ``WRITE`` the other way."""

    READ = 0
    WRITE = 1


class FeatureType(enum.IntEnum):
    """What ``get_capability`` is asked for."""

    AUTO_CONNECT = 0
    CLIENT_SERVER_COMM = 1


class TransferStatus(enum.Enum):
    """The state of an asynchronous transfer. No call returns ``TIMEOUT``."""

    WAITING = 0
    COMPLETED = 1
    TIMEOUT = 2
    FAILED = 3

    def __int__(self) -> int:
        return self.value


class AsyncConnectStatus(enum.Enum):
    """The state of an asynchronous connection."""

    NOT_CONNECT = 0
    CONNECT_PENDING = 1
    CONNECTING = 2
    CONNECTED = 3
    CONNECT_FAILED = 4
    DISCONNECT_PENDING = 5
    DISCONNECTING = 6

    def __int__(self) -> int:
        return self.value


MEM_DEVICE = MemType.MEM_DEVICE
MEM_HOST = MemType.MEM_HOST
READ = TransferOp.READ
WRITE = TransferOp.WRITE
AUTO_CONNECT = FeatureType.AUTO_CONNECT
CLIENT_SERVER_COMM = FeatureType.CLIENT_SERVER_COMM
NOT_CONNECT = AsyncConnectStatus.NOT_CONNECT
CONNECT_PENDING = AsyncConnectStatus.CONNECT_PENDING
CONNECTING = AsyncConnectStatus.CONNECTING
CONNECTED = AsyncConnectStatus.CONNECTED
CONNECT_FAILED = AsyncConnectStatus.CONNECT_FAILED
DISCONNECT_PENDING = AsyncConnectStatus.DISCONNECT_PENDING
DISCONNECTING = AsyncConnectStatus.DISCONNECTING
