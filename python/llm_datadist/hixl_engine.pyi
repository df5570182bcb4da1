"""The engine of the module ``hixl``, which is a distribution of its own: ``llm-datadist-hixl``. Use that module.

Numbers stand for the values of its enumerations. Calls raise ``TypeError`` for an argument of a wrong type, and nothing
else.
"""

from collections.abc import Sequence
from typing import SupportsIndex, final

from typing_extensions import Self

__all__ = [
    "OPTIONS",
    "STATUS",
    "Engine",
    "GetTransferStatusArgs",
    "MemDesc",
    "NotifyDesc",
    "TransferArgs",
    "TransferOpDesc",
    "capability",
]

OPTIONS: dict[str, str]
"""The keys of the options of ``Engine.initialize``, by the name of their constant."""
STATUS: dict[str, int]
"""The status numbers, by name."""

@final
class MemDesc:
    """A range of memory to register."""

    addr: int
    """Address of the first byte."""
    len: int
    """Number of bytes."""
    local_only: bool
    """Whether peers are denied access to the range."""

    def __new__(cls, addr: SupportsIndex, len: SupportsIndex) -> Self: ...  # noqa: A002

@final
class TransferOpDesc:
    """One operation of a transfer."""

    local_addr: int
    """Address in this process."""
    remote_addr: int
    """Address at the other engine."""
    len: int
    """Number of bytes."""

    def __new__(cls, local_addr: SupportsIndex, remote_addr: SupportsIndex, len: SupportsIndex) -> Self: ...  # noqa: A002

@final
class TransferArgs:
    """Arguments of an asynchronous transfer."""

    user_data: int
    """A number of the program, which the results of the transfer contain."""

    def __new__(cls) -> Self: ...

@final
class GetTransferStatusArgs:
    """Which transfers ``get_all_transfer_status`` returns."""

    max_query_count: int
    """Maximum number of results."""
    skip_waiting: bool
    """Whether to leave out transfers that are still running."""

    def __new__(cls, max_query_count: SupportsIndex = 4294967295, skip_waiting: bool = False) -> Self: ...

@final
class NotifyDesc:
    """A notification."""

    name: str
    """The name, of at most 1,024 bytes of UTF-8."""
    notify_msg: str
    """The message, of at most 1,024 bytes of UTF-8."""

    def __new__(cls, name: str, notify_msg: str) -> Self: ...

@final
class Engine:
    """An engine of the module ``hixl``. Its methods return numbers; ``hixl.Hixl`` makes the public values of them."""

    def __new__(cls) -> Self: ...
    def initialize(self, local_engine: str, options: dict[str, str]) -> int: ...
    def finalize(self) -> None: ...
    def register_mem(self, mem_desc: MemDesc, mem_type: int) -> tuple[int, int]: ...
    def deregister_mem(self, mem_handle: int) -> int: ...
    def connect(self, remote_engine: str, timeout_in_millis: int) -> int: ...
    def disconnect(self, remote_engine: str, timeout_in_millis: int) -> int: ...
    def connect_async(self, remote_engine: str, timeout_in_millis: int) -> int: ...
    def disconnect_async(self, remote_engine: str, timeout_in_millis: int) -> int: ...
    def connect_state(self, remote_engine: str) -> tuple[int, int]: ...
    def connect_states(self) -> tuple[int, list[tuple[str, int]]]: ...
    def transfer_sync(
        self, remote_engine: str, op: int, op_descs: Sequence[TransferOpDesc], timeout_in_millis: int
    ) -> int: ...
    def transfer_async(
        self, remote_engine: str, op: int, op_descs: Sequence[TransferOpDesc], args: TransferArgs
    ) -> tuple[int, int]: ...
    def transfer_state(self, req_id: int) -> tuple[int, int]: ...
    def transfer_states(self, args: GetTransferStatusArgs) -> tuple[int, list[tuple[int, int, int]]]: ...
    def send_notify(self, remote_engine: str, notify: NotifyDesc, timeout_in_millis: int) -> int: ...
    def notifies(self) -> tuple[int, list[NotifyDesc]]: ...

def capability(feature_type: int) -> tuple[int, int]:
    """Return a status, and whether a feature is supported: 1 or 0."""
