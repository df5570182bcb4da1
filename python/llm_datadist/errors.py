"""The errors of the native API.

Every failure of an engine raises a subclass of ``Error``. If Python has an exception with the same meaning, the
subclass derives from it too. A wrong type of an argument and an unknown keyword are ``TypeError``.
"""

from __future__ import annotations

__all__ = [
    "Busy",
    "Cancelled",
    "Closed",
    "Error",
    "GrantEnded",
    "InvalidArgument",
    "NotFound",
    "OutOfMemory",
    "PeerLost",
    "Timeout",
    "VerifyFailed",
]


class Error(Exception):
    """The base of all errors of the engine. Its text says what failed, with the facts. Its class says what to do next.

    A call raises an error at once, or it is the outcome of a transfer. The subclass says what kind of failure it is.

    Attributes:
        code: the kind of failure as a word, such as ``"not_linked"``, for logs and metrics. A class may have several.
        reason: what failed, without the facts.
        argument: the name of the argument that was refused, or ``None``.
        errno: the number of the system error that caused the failure, as ``OSError.errno``, or ``None``. That of a link
            call whose time limit has passed is from its last attempt: ``errno.ECONNREFUSED`` if nobody listens there.
        facts: what is known about the failure: texts by name, such as ``part``. ``peer_name``, ``peer`` (its
            address) and ``incarnation`` say which peer it is about, and ``option`` which option can change it.
        arrived: what a failed pull has written, as ``[(tensor, [(first block, block after the last), ...]), ...]``. All
            bytes of these blocks of the destination are in place. Other blocks of the destination are undefined. Empty
            for every other failure.
    """

    def __init__(
        self,
        text: str = "",
        *,
        code: str = "failed",
        reason: str | None = None,
        argument: str | None = None,
        errno: int | None = None,
        facts: dict[str, str] | None = None,
        arrived: list[tuple[int, list[tuple[int, int]]]] | None = None,
    ) -> None:
        super().__init__(text)
        self.code = code
        self.reason = text if reason is None else reason
        self.argument = argument
        self.errno = errno
        self.facts = {} if facts is None else facts
        self.arrived = [] if arrived is None else arrived

    def __reduce__(self) -> tuple[object, ...]:
        """Keep the attributes in a pickle and a copy."""
        # A subclass of OSError keeps `errno` outside of its dictionary.
        return (type(self), self.args, {**self.__dict__, "errno": self.errno})


class InvalidArgument(Error, ValueError):  # noqa: N818
    """An argument has a value that is not allowed. ``argument`` has its name. Nothing has moved."""


class Timeout(Error, TimeoutError):  # noqa: N818
    """The time limit of the operation has passed. The peer may be slow. The operation may be repeated."""


class PeerLost(Error, ConnectionError):  # noqa: N818
    """There is no link to the peer, it broke, or it could not be made. Link again, and ask the new peer."""


class NotFound(Error, LookupError):  # noqa: N818
    """The cache does not exist, or its owner does not share it. A pull or push has moved nothing."""


class OutOfMemory(Error, MemoryError):  # noqa: N818
    """A pool has no room, or the process no memory. Free caches, or open the engine with a larger pool."""


class Busy(Error):  # noqa: N818
    """A limit is reached. Take events or outcomes, or wait until the peer takes its messages. Then repeat the call."""


class GrantEnded(Error):  # noqa: N818
    """The grant has ended. Use none of the destination blocks. Ask the owner for another grant, or recompute."""


class VerifyFailed(Error):  # noqa: N818
    """Bytes at the destination differ from those of the source. Use none of the destination blocks."""


class Closed(Error):  # noqa: N818
    """The engine was closed, or this process is a forked child of the one that opened it."""


class Cancelled(Error):  # noqa: N818
    """``Transfer.cancel`` has ended the transfer. Use none of the destination blocks."""
