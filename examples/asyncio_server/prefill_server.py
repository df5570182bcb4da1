"""The prefill process: computes requests into blocks, tells decode which blocks, and frees them when decode has pulled.

A ticket names one attempt to serve a request. Blocks are held for a ticket, from the batch that computes it until

- the notification of decode's pull arrives: all bytes are in place there,
- decode drops the ticket, or
- the link to decode ends.

Nothing else frees them. In particular, the end of a connection for requests does not: a pull may be running.
"""

from __future__ import annotations

import asyncio
import json
from collections import deque
from typing import NamedTuple

from blocks import PREFILL, Blocks, blocks_needed
from messages import HOST, received, send, serve_until_parent_ends

from llm_datadist import BlocksCacheKey, LLMException, LLMRole, LLMStatusCode
from llm_datadist.events import LinkDown, Notification

BLOCKS = 384
"""Blocks of the cache: 48 MiB, which is less than 64 requests need. The others wait."""

BATCH = 16
"""Maximum number of requests that are computed together."""

BUSY_PAUSE_S = 0.005


class Job(NamedTuple):
    """One attempt to serve a request."""

    ticket: str
    request: int
    cluster_id: int


class Prefill:
    """A prefill server with one engine and one event loop."""

    def __init__(self) -> None:
        self._blocks = Blocks(LLMRole.PROMPT, PREFILL, BLOCKS, BlocksCacheKey(PREFILL), listen=f"{HOST}:0")
        self._waiting: deque[Job] = deque()
        self._held: dict[str, tuple[Job, list[int]]] = {}
        self._work = asyncio.Event()

    async def run(self) -> None:
        """Serve until the parent process ends."""
        loop, events = asyncio.get_running_loop(), self._blocks.engine.fileno()
        loop.add_reader(events, self._take_events)
        try:
            await serve_until_parent_ends(self._serve, self._compute())
        finally:
            loop.remove_reader(events)
            self._blocks.close()

    def _take_events(self) -> None:
        """Handle what has happened. The event loop calls it when the descriptor of the engine is readable."""
        for event in self._blocks.engine.poll():
            if isinstance(event, Notification):  # a pull of decode has succeeded
                self._release(event.payload.decode())
            elif isinstance(event, LinkDown):
                self._release_all(event.peer.cluster_id)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle the messages of one connection."""
        async for message in received(reader):
            # A client that has linked again sends new tickets. The end of its earlier link must be handled before.
            self._take_events()
            if message["do"] == "hello":
                send(writer, link=self._blocks.engine.listen_ip_info)
            elif message["do"] == "compute":
                self._waiting.append(Job(message["ticket"], message["request"], message["cluster_id"]))
                self._work.set()
            elif message["do"] == "drop":
                self._release(message["ticket"])
            else:  # "report"
                send(writer, free=self._blocks.free, blocks=self._blocks.count, waiting=len(self._waiting))

    def _release(self, ticket: str) -> None:
        """Free the blocks of a ticket. A ticket that is not known was released before."""
        if ticket in self._held:
            _, blocks = self._held.pop(ticket)
            self._blocks.give_back(blocks)
            self._work.set()
        else:
            self._waiting = deque(job for job in self._waiting if job.ticket != ticket)

    def _release_all(self, cluster_id: int) -> None:
        """Free the blocks of all tickets of a decode process."""
        for job in [*self._waiting, *(job for job, _ in self._held.values())]:
            if job.cluster_id == cluster_id:
                self._release(job.ticket)

    async def _compute(self) -> None:
        """Compute the requests that wait, in batches, whenever there are free blocks."""
        while True:
            await self._work.wait()
            self._work.clear()
            while batch := self._next_batch():
                for job, blocks in batch:
                    self._blocks.write(job.request, blocks)  # where a model computes, in a thread or on a device
                for job, blocks in batch:
                    await self._announce(job, blocks)
                await asyncio.sleep(0)  # other coroutines and events have their turn

    def _next_batch(self) -> list[tuple[Job, list[int]]]:
        """Take the next requests and blocks for them. A request that finds too few free blocks waits."""
        batch: list[tuple[Job, list[int]]] = []
        while self._waiting and len(batch) < BATCH and blocks_needed(self._waiting[0].request) <= self._blocks.free:
            job = self._waiting.popleft()
            self._held[job.ticket] = job, self._blocks.take(blocks_needed(job.request))
            batch.append(self._held[job.ticket])
        return batch

    async def _announce(self, job: Job, blocks: list[int]) -> None:
        """Tell decode which blocks hold a request. If decode is slow to poll, wait until its queue has room."""
        message = json.dumps({"ticket": job.ticket, "blocks": blocks}).encode()
        while job.ticket in self._held:  # otherwise, it was released meanwhile
            try:
                self._blocks.engine.notify(job.cluster_id, message)
            except LLMException as error:  # noqa: PERF203  (few requests need a second iteration)
                if error.status_code != LLMStatusCode.LLM_LINK_BUSY:
                    self._release(job.ticket)  # the link has ended; decode asks again
                    return
                await asyncio.sleep(BUSY_PAUSE_S)
            else:
                return


async def main() -> None:
    """Run the process."""
    await Prefill().run()


if __name__ == "__main__":
    asyncio.run(main())
