"""The class ``Hixl``. The rules are in the engine; this file makes public values of its numbers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from hixl._enums import AsyncConnectStatus, TransferStatus
from llm_datadist import hixl_engine as _engine
from llm_datadist.hixl_engine import GetTransferStatusArgs, MemDesc, NotifyDesc, TransferArgs, TransferOpDesc

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = [
    "FEATURE_NOT_SUPPORTED",
    "FEATURE_SUPPORTED",
    "GetTransferStatusArgs",
    "Hixl",
    "MemDesc",
    "NotifyDesc",
    "TransferArgs",
    "TransferOpDesc",
    "TransferResult",
    "get_capability",
]

FEATURE_SUPPORTED = 1
FEATURE_NOT_SUPPORTED = 0

# The defaults of arguments.
_NO_ARGS = TransferArgs()
_ALL = GetTransferStatusArgs()
# By number.
_CONNECT_STATES = tuple(AsyncConnectStatus)
_TRANSFER_STATES = tuple(TransferStatus)


class TransferResult:
    """The state of one asynchronous transfer. It cannot be changed."""

    __slots__ = ("_req", "_status", "_user_data")

    _req: int
    _user_data: int
    _status: TransferStatus

    def __init__(self) -> None:
        self._req, self._user_data, self._status = 0, 0, TransferStatus.WAITING

    @property
    def req(self) -> int:
        """The number of the request."""
        return self._req

    @property
    def user_data(self) -> int:
        """The ``user_data`` of its ``TransferArgs``."""
        return self._user_data

    @property
    def status(self) -> TransferStatus:
        """Its state."""
        return self._status

    def __repr__(self) -> str:
        return f"<TransferResult: req {self._req}, user_data {self._user_data}, {self._status.name}>"


def _result(req: int, user_data: int, status: int) -> TransferResult:
    result = TransferResult()
    result._req, result._user_data = req, user_data  # noqa: SLF001
    result._status = _TRANSFER_STATES[status]  # noqa: SLF001
    return result


def get_capability(feature_type: int) -> tuple[int, int]:
    """Return a status, and ``FEATURE_SUPPORTED`` or ``FEATURE_NOT_SUPPORTED`` for a ``FeatureType``.

    An unknown feature is not supported. The status is ``PARAM_INVALID`` for a negative number.

    Raises:
        TypeError: ``feature_type`` is not an integer.
    """
    return _engine.capability(feature_type)


class Hixl:
    """An engine: registers memory, connects to other engines, and reads and writes their memory by address.

    Any number of threads may use an object, and a process may have several objects. Time limits are in milliseconds and
    cover the whole call; a limit below 1 is ``PARAM_INVALID``. ``finalize`` or the destruction of the object
    closes the engine.
    """

    __slots__ = ("__weakref__", "_engine")

    def __init__(self) -> None:
        self._engine = _engine.Engine()

    def initialize(self, local_engine: str, options: dict[str, str] = {}) -> int:  # noqa: B006
        """Open the engine. Has no effect on an object that is initialized, and returns ``SUCCESS``.

        Args:
            local_engine: address and identity: ``"ip:port"``, ``"ip"``, ``"[ip6]:port"`` or ``"[ip6]"``. With a port
                above 0, others can connect to the engine.
            options: values by key, such as ``{OPTION_AUTO_CONNECT: "1"}``, with which transfers connect by themselves.
                The keys are the ``OPTION_*`` constants; an unknown key is ``PARAM_INVALID``.

        Returns:
            ``SUCCESS``; ``PARAM_INVALID`` for an invalid address or option; ``FAILED`` if the address is in use or
            belongs to another host; ``RESOURCE_EXHAUSTED``.
        """
        return self._engine.initialize(local_engine, options)

    def finalize(self) -> None:
        """Close the engine. The object can be initialized again.

        Waits for the calls that are running, at most until their time limits, and cancels asynchronous transfers and
        connections. Afterwards this process no longer reads or writes memory for the engine.
        """
        self._engine.finalize()

    def register_mem(self, mem_desc: MemDesc, mem_type: int) -> tuple[int, int]:
        """Register memory, which must stay valid until ``deregister_mem`` or ``finalize``.

        Returns:
            A status, and the handle of the range, or 0 after a failure. Registering the same range again returns the
            same handle. The status is ``PARAM_INVALID`` for an empty range, for address 0, and for a range that
            overlaps another one of the same ``mem_type``.
        """
        return self._engine.register_mem(mem_desc, mem_type)

    def deregister_mem(self, mem_handle: int) -> int:
        """End the registration of a range, and wait until no transfer uses it, about 10 s at most.

        Returns:
            ``SUCCESS``, also for an unknown handle; ``PARAM_INVALID`` for handle 0; ``TIMEOUT`` while transfers still
            use the memory, which must stay valid: call again with the same handle; ``FAILED``.
        """
        return self._engine.deregister_mem(mem_handle)

    def connect(self, remote_engine: str, timeout_in_millis: int = 1000) -> int:
        """Connect to another engine, whose program need not call anything.

        Returns:
            ``SUCCESS``; ``ALREADY_CONNECTED``; ``FAILED`` if no engine listens at the address or if it refuses;
            ``TIMEOUT``; ``PARAM_INVALID`` for an invalid address, or that of this engine.
        """
        return self._engine.connect(remote_engine, timeout_in_millis)

    def disconnect(self, remote_engine: str, timeout_in_millis: int = 1000) -> int:
        """End the connection to another engine, and cancel all transfers over it.

        Returns:
            ``SUCCESS``; ``NOT_CONNECTED`` if there is no connection; ``TIMEOUT`` while another call is connecting or
            disconnecting; ``PARAM_INVALID``; ``FAILED``.
        """
        return self._engine.disconnect(remote_engine, timeout_in_millis)

    def connect_async(self, remote_engine: str, timeout_in_millis: int = 1000) -> int:
        """Queue a connection for a thread of the engine; ``get_async_connect_status`` returns its state.

        Returns:
            ``SUCCESS`` when the call is queued; ``RESOURCE_EXHAUSTED`` if the queue is full; ``PARAM_INVALID``;
            ``FAILED``.
        """
        return self._engine.connect_async(remote_engine, timeout_in_millis)

    def disconnect_async(self, remote_engine: str, timeout_in_millis: int = 1000) -> int:
        """Queue a disconnection for a thread of the engine; ``get_async_connect_status`` returns its state.

        Returns:
            ``SUCCESS`` when the call is queued; ``RESOURCE_EXHAUSTED`` if the queue is full; ``PARAM_INVALID``;
            ``FAILED``.
        """
        return self._engine.disconnect_async(remote_engine, timeout_in_millis)

    def get_async_connect_status(self, remote_engine: str) -> tuple[int, AsyncConnectStatus]:
        """Return a status, and the state of the latest asynchronous connection or disconnection of an engine.

        Without one, the state is ``CONNECTED`` or ``NOT_CONNECT``.
        """
        status, state = self._engine.connect_state(remote_engine)
        return status, _CONNECT_STATES[state]

    def get_all_async_connect_status(self) -> tuple[int, dict[str, AsyncConnectStatus]]:
        """Return a status, and the state of each engine that has asynchronous connections, by its address."""
        status, states = self._engine.connect_states()
        return status, {engine: _CONNECT_STATES[state] for engine, state in states}

    def transfer_sync(
        self, remote_engine: str, op: int, op_descs: Sequence[TransferOpDesc], timeout_in_millis: int = 1000
    ) -> int:
        """Read memory of another engine, or write it.

        Args:
            remote_engine: the address of the other engine, as passed to ``connect``.
            op: ``READ`` or ``WRITE``.
            op_descs: at least one operation. Each lies inside one registered range at both ends.
            timeout_in_millis: time limit in milliseconds, including the time to connect if the transfer connects by
                itself. A ``WRITE`` above 2 MiB to a process that is stopped may take 5 s longer, until no process
                reads the memory of the caller.

        Returns:
            ``SUCCESS`` when all bytes are in place; ``NOT_CONNECTED``; ``PARAM_INVALID`` for a range that is not
            registered; ``TIMEOUT``; ``FAILED``. After a failure, the destination is undefined.
        """
        return self._engine.transfer_sync(remote_engine, op, op_descs, timeout_in_millis)

    def transfer_async(
        self, remote_engine: str, op: int, op_descs: Sequence[TransferOpDesc], args: TransferArgs = _NO_ARGS
    ) -> tuple[int, int]:
        """Start a transfer, and return the number of its request for ``get_transfer_status``.

        The call waits only to connect, or to ask for a range that was not used before. After 1 s it returns
        ``TIMEOUT``. ``disconnect`` cancels the request. The request fails when the other engine gives up, after 600 s.

        Returns:
            A status as that of ``transfer_sync``, or ``RESOURCE_EXHAUSTED`` if the ends of 65,536 requests have
            not been reported; and the number of the request, or 0 after a failure.
        """
        return self._engine.transfer_async(remote_engine, op, op_descs, args)

    def get_transfer_status(self, req_id: int) -> tuple[int, TransferStatus]:
        """Return a status, and the state of a request.

        The final state (``COMPLETED`` or ``FAILED``) is returned once. Later calls return ``PARAM_INVALID``, as for an
        unknown number. The status is ``NOT_CONNECTED`` if ``disconnect`` has cancelled the request.
        """
        status, state = self._engine.transfer_state(req_id)
        return status, _TRANSFER_STATES[state]

    def get_all_transfer_status(self, args: GetTransferStatusArgs = _ALL) -> tuple[int, list[TransferResult]]:
        """Return a status, and the states of requests in the order of their start.

        Each final state is returned once.
        """
        status, states = self._engine.transfer_states(args)
        return status, [_result(*state) for state in states]

    def send_notify(self, remote_engine: str, notify: NotifyDesc, timeout_in_millis: int = 1000) -> int:
        """Send a notification to the program of another engine.

        Returns:
            ``SUCCESS`` when the other engine has received it; ``PARAM_INVALID`` for a name or message above 1,024 bytes
            of UTF-8; ``NOT_CONNECTED``; ``RESOURCE_EXHAUSTED`` while the other program has 4,096 unread notifications
            of this engine; ``TIMEOUT``; ``FAILED``.
        """
        return self._engine.send_notify(remote_engine, notify, timeout_in_millis)

    def get_notifies(self) -> tuple[int, list[NotifyDesc]]:
        """Return a status, and all unread notifications in the order of their arrival. They then count as read."""
        return self._engine.notifies()
