"""The rows that are lent to peers: what vLLM calls writes to them.

A write has ended when its peer has pulled the rows, refuses them, or lets the grants expire. A grant that has ended
makes later pulls fail, so vLLM may then use the rows for something else.
"""

from __future__ import annotations

import itertools
import logging
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llm_datadist import Error
from llm_datadist.integrations.vllm.messages import printable
from llm_datadist.integrations.vllm.p2p_messages import MAX_ROWS, Offer

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from llm_datadist.native import Cache, Engine, Grant

__all__ = ["Writes"]

logger = logging.getLogger("vllm.llm_datadist")


@dataclass(eq=False)
class _Write:
    number: int
    peer_id: str
    grants: set[Grant] = field(default_factory=set)  # those that have not ended


class Writes:
    """The writes of one tier. Its owner calls all methods one at a time.

    The engine bounds the grants, and so the writes: 65,536.

    Args:
        engine: the engine of the tier.
        cache: the primary tier.
        timeout_s: time limit of a write in seconds.
    """

    def __init__(self, engine: Engine, cache: Cache, timeout_s: float) -> None:
        self._engine = engine
        self._cache = cache
        self._timeout_s = timeout_s
        self._numbers = itertools.count()
        self._writes: dict[int, _Write] = {}
        self._write_of: dict[Grant, _Write] = {}
        self._done: list[_Write] = []
        self._failed: list[_Write] = []

    def begin(self, peer_id: str, local: Sequence[int], remote: Sequence[int]) -> tuple[int, list[Offer]]:
        """Lend rows to a peer.

        Returns:
            The number of the write, and the offers to send.

        Raises:
            ValueError: the numbers of rows differ, or are 0.
            Error: the rows cannot be lent.
        """
        if not local or len(local) != len(remote):
            raise ValueError(f"{len(local)} local rows for {len(remote)} rows of the peer")
        write = _Write(next(self._numbers), peer_id)
        self._writes[write.number] = write
        offers = []
        try:
            for first in range(0, len(local), MAX_ROWS):
                src, dst = (list(rows[first : first + MAX_ROWS]) for rows in (local, remote))
                grant = self._engine.lend(self._cache[src], ttl=self._timeout_s)
                write.grants.add(grant)
                self._write_of[grant] = write
                offers.append(Offer.of(write.number, src, dst, grant.token))
        except BaseException:
            self._end(write)
            raise
        return write.number, offers

    def grant_closed(self, grant: Grant, reason: str) -> None:
        """Note the end of a grant. Grants of no write are ignored."""
        write = self._write_of.pop(grant, None)
        if write is None:
            return
        write.grants.discard(grant)
        if reason != "done":
            self._fail(write, f"the grant has ended: {reason}; its time limit is {self._timeout_s:g} s")
        elif not write.grants:
            self._end(write)
            self._done.append(write)

    def refused(self, peer_id: str, number: int, reason: str) -> None:
        """Fail a write whose rows the peer does not read."""
        write = self._writes.get(number)
        if write is not None and write.peer_id == peer_id:
            self._fail(write, printable(reason))

    def lost(self, peer_id: str, reason: str) -> None:
        """Fail all writes to a peer."""
        for write in [write for write in self._writes.values() if write.peer_id == peer_id]:
            self._fail(write, reason)

    def cancel(self, numbers: Iterable[int]) -> None:
        """End writes without reporting them."""
        for number in numbers:
            write = self._writes.get(number)
            if write is not None:
                self._end(write)

    def forget(self, peer_id: str) -> None:
        """End the writes to a peer without reporting them, also those that have ended before."""
        self.cancel([write.number for write in self._writes.values() if write.peer_id == peer_id])
        self.take(peer_id)

    def take(self, peer_id: str | None) -> tuple[list[int], list[int]]:
        """Return the writes to a peer, or to all of them, that have succeeded and failed since the last call."""
        taken = []
        for ended in (self._done, self._failed):
            taken.append([write.number for write in ended if peer_id in {None, write.peer_id}])
            ended[:] = [write for write in ended if peer_id not in {None, write.peer_id}]
        return taken[0], taken[1]

    def _fail(self, write: _Write, reason: str) -> None:
        logger.warning("rows were not read by %s: %s", write.peer_id, reason)
        self._end(write)
        self._failed.append(write)

    def _end(self, write: _Write) -> None:
        """Forget a write, and let no pull of it succeed any more."""
        self._writes.pop(write.number, None)
        for grant in write.grants:
            self._write_of.pop(grant, None)
            with suppress(Error):  # the grant has ended, even if the call reports that something else did not fit
                grant.revoke()
        write.grants.clear()
