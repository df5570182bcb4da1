"""The prefill process: computes requests into blocks, lends the blocks to decode, and frees them when the grant ends.

A grant ends when decode has pulled the blocks, when its time is over, or when prefill revokes it because the link has
ended. Nothing else frees blocks, so no pull succeeds with the bytes of another request.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from blocks import Blocks, blocks_needed
from messages import received, send, until_first_ends

from llm_datadist import GrantClosed, Message, PeerDown, PeerLost

if TYPE_CHECKING:
    from llm_datadist import Grant, Peer

BLOCKS = 384
"""Blocks of the cache: 48 MiB, which is less than 64 requests need. The others wait."""

BATCH = 16
"""Maximum number of requests that are computed together."""

TTL_S = 6.0
"""How long blocks are lent: longer than an attempt of decode takes."""


class Job(NamedTuple):
    """A request that a peer asks for."""

    peer: Peer
    request: int


class Prefill:
    """A prefill server with one engine and one event loop."""

    def __init__(self) -> None:
        self._blocks = Blocks("prefill", BLOCKS, listen="127.0.0.1:0")
        self._waiting: deque[Job] = deque()
        self._lent: dict[Grant, tuple[Job, list[int]]] = {}
        self._work, self._all_free = asyncio.Event(), asyncio.Event()
        self._all_free.set()

    async def run(self) -> None:
        """Serve until the front end closes the pipe, and all grants have ended."""
        with self._blocks.engine as engine:
            send(address=engine.address)
            await until_first_ends(self._front_end(), self._take_events(), self._compute())
            send(free=self._blocks.free, blocks=self._blocks.cache.blocks)

    async def _front_end(self) -> None:
        """Wait until the front end closes the pipe, and then until all grants have ended."""
        async for _ in received():
            pass
        await self._all_free.wait()  # at most `TTL_S`

    async def _take_events(self) -> None:
        """Handle what happens."""
        async for event in self._blocks.engine:
            if isinstance(event, Message):  # decode asks for a request
                self._waiting.append(Job(event.peer, json.loads(event.data)["request"]))
            elif isinstance(event, GrantClosed):
                _, blocks = self._lent.pop(event.grant)
                self._blocks.give_back(blocks)
                if not self._lent:
                    self._all_free.set()
            elif isinstance(event, PeerDown):
                self._waiting = deque(job for job in self._waiting if job.peer != event.peer)
                for grant, (job, _) in self._lent.items():
                    if job.peer == event.peer:
                        grant.revoke()  # `GrantClosed` follows
            self._work.set()

    async def _compute(self) -> None:
        """Compute the requests that wait, in batches, whenever there are free blocks."""
        while True:
            await self._work.wait()
            self._work.clear()
            while batch := self._next_batch():
                for job, blocks in batch:
                    self._blocks.write(job.request, blocks)  # where a model computes, in a thread or on a device
                for job, blocks in batch:
                    await self._lend(job, blocks)
                await asyncio.sleep(0)  # other coroutines have their turn

    def _next_batch(self) -> list[tuple[Job, list[int]]]:
        """Take the next requests and blocks for them. A request that finds too few free blocks waits."""
        batch: list[tuple[Job, list[int]]] = []
        while self._waiting and len(batch) < BATCH and blocks_needed(self._waiting[0].request) <= self._blocks.free:
            job = self._waiting.popleft()
            batch.append((job, self._blocks.take(blocks_needed(job.request))))
        return batch

    async def _lend(self, job: Job, blocks: list[int]) -> None:
        """Lend the blocks of a request, and tell decode which they are."""
        grant = self._blocks.engine.lend(self._blocks.cache[blocks], ttl=TTL_S)
        self._lent[grant] = job, blocks
        self._all_free.clear()
        answer = json.dumps({"request": job.request, "blocks": blocks, "token": grant.token.hex()}).encode()
        try:
            await self._blocks.unless_busy(lambda: job.peer.send(answer))
        except PeerLost:  # decode is gone, and does not pull
            grant.revoke()


async def main() -> None:
    """Run the process."""
    await Prefill().run()


if __name__ == "__main__":
    asyncio.run(main())
