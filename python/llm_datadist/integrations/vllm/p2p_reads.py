"""The rows that loads wait for, and the pulls into them.

Only this engine writes into these rows: it pulls what a peer offers, and only into rows for which a load from this peer
runs. So a load is over when its own pulls are, whatever the peer does.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llm_datadist import Busy

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from llm_datadist import Error
    from llm_datadist.integrations.vllm.p2p_messages import Offer
    from llm_datadist.native import Cache, Engine, Peer, Transfer

__all__ = ["Reads"]

logger = logging.getLogger("vllm.llm_datadist")


@dataclass(eq=False)
class _Load:
    """One load of vLLM."""

    peer_id: str
    rows: frozenset[int]
    wanted: set[int] = field(default_factory=set)  # the rows that the peer has not offered yet
    running: set[Transfer[None]] = field(default_factory=set)
    failed: bool = False  # whether rows were offered and did not arrive
    closed: bool = False  # whether vLLM has ended it, so that no pull may begin


@dataclass(eq=False)
class _Read:
    """One offer, and the load that it is for."""

    load: _Load
    peer: Peer
    offer: Offer
    src: list[int]
    dst: list[int]
    deadline: float


class Reads:
    """The loads of one tier. Its owner calls all methods one at a time.

    Args:
        engine: the engine of the tier.
        cache: the primary tier. The one of the peer has the same name.
        timeout_s: time limit of a pull in seconds, and of the wait until the engine has room for it.
        refuse: sends a peer the reason why the rows of a write do not arrive.
    """

    def __init__(
        self, engine: Engine, cache: Cache, timeout_s: float, refuse: Callable[[Peer, int, str], None]
    ) -> None:
        self._engine = engine
        self._cache = cache
        self._timeout_s = timeout_s
        self._refuse = refuse
        self._loads: dict[int, _Load] = {}  # by the number of vLLM's job
        self._load_of: dict[int, _Load] = {}  # by row: vLLM gives a row to one job at a time
        self._running: dict[Transfer[None], _Read] = {}
        # Offers for which the engine has no room (``max_transfers``). Each has rows of its own, so they are no more
        # than the rows.
        self._waiting: deque[_Read] = deque()

    def expect(self, job: int, peer_id: str, rows: Iterable[int]) -> None:
        """Let a peer offer rows for a load, until ``finish``."""
        load = _Load(peer_id, frozenset(rows))
        load.wanted.update(load.rows)
        self._loads[job] = load
        self._load_of.update(dict.fromkeys(load.rows, load))

    def offered(self, peer_id: str, peer: Peer, offer: Offer) -> None:
        """Pull rows that a peer offers, or refuse them."""
        try:
            src, dst = offer.rows()
        except ValueError as error:
            self._refuse(peer, offer.write, str(error))
            return
        load, rows = self._load_of.get(dst[0]), set(dst)
        if load is None or load.peer_id != peer_id or len(rows) < len(dst) or not rows <= load.wanted:
            logger.warning("%s offers %d rows that no load from it waits for", peer_id, len(dst))
            self._refuse(peer, offer.write, "no load from this peer waits for these rows")
            return
        load.wanted -= rows
        self._start(_Read(load, peer, offer, src, dst, time.monotonic() + self._timeout_s))

    def resume(self) -> None:
        """Start the pulls for which the engine had no room, or give them up."""
        for _ in range(len(self._waiting)):
            read = self._waiting.popleft()
            if read.load.closed:
                self._fail(read, "the load has ended")
            elif time.monotonic() > read.deadline:
                self._fail(read, f"max_transfers of the reader left no room within {self._timeout_s:g} s")
            else:
                self._start(read)

    def completed(self, transfer: Transfer[None], error: Error | None) -> None:
        """Note the end of a pull. Other transfers are ignored."""
        read = self._running.pop(transfer, None)
        if read is None:
            return
        read.load.running.discard(transfer)
        if error is not None:
            self._fail(read, str(error))

    def finish(self, job: int, success: bool) -> bool | None:
        """End a load: nothing begins to write into its rows any more.

        Args:
            job: the number of vLLM's job.
            success: what vLLM would report. If the load has failed, its pulls are cancelled.

        Returns:
            Whether all rows are in place, or ``None`` if a pull still writes, so that the caller must ask again. For a
            job that is no load, ``success``.
        """
        load = self._loads.get(job)
        if load is None:
            return success
        if not load.closed:
            load.closed = True
            for row in load.rows:
                del self._load_of[row]
        if load.running:
            if not success:
                for transfer in load.running:
                    transfer.cancel()
            return None
        del self._loads[job]
        return success and not load.failed and not load.wanted

    def _start(self, read: _Read) -> None:
        try:
            src = read.peer[self._cache.name][read.src]
            transfer = self._engine.pull(self._cache[read.dst], src, grant=read.offer.token, timeout=self._timeout_s)
        except Busy:
            self._waiting.append(read)
        except Exception as error:  # noqa: BLE001 - it concerns this read only, and its owner waits for an answer
            self._fail(read, str(error) or repr(error))
        else:
            read.load.running.add(transfer)
            self._running[transfer] = read

    def _fail(self, read: _Read, reason: str) -> None:
        read.load.failed = True
        if not read.load.closed:
            logger.warning("%d rows of %s did not arrive: %s", len(read.dst), read.load.peer_id, reason)
        self._refuse(read.peer, read.offer.write, reason)
