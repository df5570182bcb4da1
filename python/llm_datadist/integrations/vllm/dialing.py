"""Decode: the link calls to the ranks of prefill. Each rank has one at a time, however many requests wait for it."""

from __future__ import annotations

import errno
from typing import TYPE_CHECKING

from llm_datadist import Error, Timeout

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any, Optional, Union

    from llm_datadist.native import Engine, Peer, Transfer

    # Takes the linked rank of prefill, or why there is no link.
    Linked = Callable[[Union[Peer, Error]], None]

__all__ = ["Dialing"]

# How long the first attempt to link takes, in seconds. If the host of prefill refuses the connection until then,
# prefill has ended. Otherwise a second attempt takes the time limit.
_FIRST_LINK_S = 0.5


class Dialing:
    """The link calls that run, and what waits for each. Only the transfer thread uses it.

    A rank is named by its address and the name of its engine.

    Args:
        engine: the engine.
        limit_s: time limit of the second attempt, in seconds.
    """

    def __init__(self, engine: Engine, limit_s: float) -> None:
        self._engine = engine
        self._limit_s = limit_s
        self._waiting: dict[tuple[str, str], list[Linked]] = {}
        # The calls, with their ranks and time limits.
        self._calls: dict[Transfer[Peer], tuple[tuple[str, str], float]] = {}

    def link(self, rank: tuple[str, str], linked: Linked) -> None:
        """Have ``linked`` called when a rank is linked. That is soon if there is a link.

        Raises:
            Error: the engine does not begin the call. ``linked`` is not called then.
            ValueError: the address or the name is invalid.
        """
        if rank not in self._waiting:
            self._dial(rank, min(_FIRST_LINK_S, self._limit_s))
        self._waiting.setdefault(rank, []).append(linked)

    def completed(self, transfer: Transfer[Any], error: Optional[Error]) -> bool:
        """Take the end of a call. Return whether it is a link call."""
        if transfer not in self._calls:
            return False
        rank, limit_s = self._calls.pop(transfer)
        if isinstance(error, Timeout) and error.errno != errno.ECONNREFUSED and limit_s < self._limit_s:
            try:
                self._dial(rank, self._limit_s)
            except Error as refused:
                error = refused
            else:
                return True
        for linked in self._waiting.pop(rank):
            linked(transfer.result() if error is None else error)
        return True

    def _dial(self, rank: tuple[str, str], limit_s: float) -> None:
        transfer = self._engine.link(rank[0], name=rank[1], timeout=limit_s)
        self._calls[transfer] = rank, limit_s
