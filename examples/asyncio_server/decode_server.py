"""The decode process: an asyncio server that has requests computed by prefill, pulls their KV, and checks every byte.

It has one event loop and no threads of its own. A request whose pull fails, or whose prefill process dies, is computed
again (the recompute policy), until its time limit has passed.
"""

from __future__ import annotations

import asyncio
import json
import secrets
import sys
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple, Optional

from blocks import DECODE, MOST_BLOCKS, PREFILL, Blocks, blocks_needed
from messages import HOST, received, send, serve_until_parent_ends

from llm_datadist import BlocksCacheKey, LLMClusterInfo, LLMException, LLMRole, LLMStatusCode
from llm_datadist.events import LinkDown, Notification

if TYPE_CHECKING:
    from llm_datadist.events import Transfer

REQUEST_LIMIT_S = 20.0
"""Time limit of a request, with all attempts to serve it."""

ATTEMPT_LIMIT_S = 5.0
"""Time limit of one attempt: waiting for prefill, and the pull."""

HELLO_LIMIT_S = 1.0
LINK_LIMIT_MS = 500
PAUSE_S = 0.02
"""Pause before something that has failed is tried again."""

BUSY_PAUSES_S = 0.001, 0.05
"""Shortest and longest pause before a call that was refused with LLM_LINK_BUSY is repeated."""

MAX_TRANSFERS = 8
"""Pulls at a time. Much less than the requests in flight, so that the engine refuses some pulls in this example."""


class Decode:
    """A decode server with one engine and one event loop, for at most `in_flight` requests at a time."""

    def __init__(self, in_flight: int) -> None:
        count = in_flight * MOST_BLOCKS
        self._blocks = Blocks(LLMRole.DECODER, DECODE, count, max_transfers=MAX_TRANSFERS)
        self._slots = asyncio.Semaphore(in_flight)
        self._requests: set[asyncio.Task[None]] = set()
        self._announced: dict[str, asyncio.Future[list[int]]] = {}
        self._prefill_port: Optional[int] = None
        self._prefill: Optional[asyncio.StreamWriter] = None
        self._linked = asyncio.Event()
        self._link_number = 0
        self._failures: Counter[str] = Counter()
        self._busy = 0
        self._stopping = False

    async def run(self) -> None:
        """Serve until the parent process ends."""
        loop, events = asyncio.get_running_loop(), self._blocks.engine.fileno()
        loop.add_reader(events, self._take_events)
        try:
            await serve_until_parent_ends(self._serve, self._keep_linked())
        finally:
            self._stopping = True
            for request in self._requests:
                request.cancel()
            await asyncio.gather(*self._requests, return_exceptions=True)
            loop.remove_reader(events)
            self._blocks.close()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Handle the messages of one connection of the front end."""
        async for message in received(reader):
            if message["do"] == "serve":
                request = asyncio.ensure_future(self._answer(message["request"], writer))
                self._requests.add(request)
                request.add_done_callback(self._requests.discard)
            elif message["do"] == "use_prefill":
                self._prefill_port = message["port"]
            elif message["do"] == "cut":
                self._end_link()
            else:  # "report"
                report = {"links": self._link_number, "busy": self._busy, "failures": self._failures}
                send(writer, free=self._blocks.free, blocks=self._blocks.count, **report)

    # ------------------------------------------------------------------------------------------------- one request

    async def _answer(self, request: int, front_end: asyncio.StreamWriter) -> None:
        """Serve a request within its time limit, and report the outcome."""
        async with self._slots:
            blocks = self._blocks.take(blocks_needed(request))
            try:
                await asyncio.wait_for(self._fetch(request, blocks), REQUEST_LIMIT_S)
                right = self._blocks.match(request, blocks)  # where a model generates tokens
                outcome = "right" if right else "wrong"
            except asyncio.TimeoutError:
                outcome = "late"
            finally:
                self._blocks.give_back(blocks)
        send(front_end, request=request, outcome=outcome)

    async def _fetch(self, request: int, blocks: list[int]) -> None:
        """Have a request computed and pull its KV. If that fails, have it computed again."""
        while True:
            await self._linked.wait()
            try:
                await self._attempt(request, blocks)
            except (LLMException, OSError, asyncio.TimeoutError) as error:
                if self._stopping:  # before Python 3.12, `wait_for` may raise a failure in place of a cancellation
                    raise asyncio.CancelledError from error
                reason = error.status_code.name if isinstance(error, LLMException) else type(error).__name__
                self._failures[reason] += 1
                await asyncio.sleep(PAUSE_S)
            else:
                return

    async def _attempt(self, request: int, blocks: list[int]) -> None:
        """Ask prefill for a request, wait for its announcement, and pull. Raises if that fails or takes too long."""
        loop = asyncio.get_running_loop()
        attempt = Attempt(secrets.token_hex(8), self._link_number, loop.time() + ATTEMPT_LIMIT_S)
        announced = self._announced[attempt.ticket] = loop.create_future()
        try:
            self._ask(attempt.ticket, request)
            await self._pull(attempt, await asyncio.wait_for(announced, ATTEMPT_LIMIT_S), blocks)
        except BaseException:
            self._drop(attempt.ticket)  # no pull of this attempt runs any more
            raise
        finally:
            del self._announced[attempt.ticket]

    async def _pull(self, attempt: Attempt, theirs: list[int], ours: list[int]) -> None:
        """Pull blocks of prefill. Prefill gets the ticket as a notification when all bytes are in place."""
        manager, cache, ticket = self._blocks.manager, self._blocks.cache, attempt.ticket.encode()
        pause, longest = BUSY_PAUSES_S
        while True:
            if attempt.link_number != self._link_number or not self._linked.is_set():
                raise ConnectionError("the link over which the blocks were announced has ended")
            left_ms = int((attempt.until - asyncio.get_running_loop().time()) * 1000)
            if left_ms <= 0:
                raise asyncio.TimeoutError
            try:
                await ended(
                    manager.pull_blocks_async(
                        BlocksCacheKey(PREFILL), cache, theirs, ours, timeout_ms=left_ms, notify=ticket
                    )
                )
            except LLMException as error:
                if error.status_code != LLMStatusCode.LLM_LINK_BUSY:
                    raise
                # Too many transfers here, or too many notifications that prefill has not polled. Nothing has moved.
                self._busy += 1
                await asyncio.sleep(pause)
                pause = min(2 * pause, longest)
            else:
                return

    # ---------------------------------------------------------------------------------------------------- the link

    def _take_events(self) -> None:
        """Handle what has happened. The event loop calls it when the descriptor of the engine is readable."""
        for event in self._blocks.engine.poll():
            if isinstance(event, Notification):
                self._take_announcement(**json.loads(event.payload))
            elif isinstance(event, LinkDown):
                self._lose_prefill(event.reason)

    def _take_announcement(self, ticket: str, blocks: list[int]) -> None:
        """Pass the blocks of prefill to the attempt that waits for them."""
        announced = self._announced.get(ticket)
        if announced is None or announced.done():
            self._drop(ticket)  # the attempt has ended
        else:
            announced.set_result(blocks)

    def _lose_prefill(self, reason: str) -> None:
        """Fail the attempts that wait for prefill. Those that pull get the failure from the engine."""
        self._linked.clear()
        if self._prefill is not None:
            self._prefill.close()  # `_keep_linked` notices
            self._prefill = None
        for announced in self._announced.values():
            if not announced.done():
                announced.set_exception(ConnectionError(reason))

    def _ask(self, ticket: str, request: int) -> None:
        """Have prefill compute a request. Raises if prefill is not linked."""
        if self._prefill is None:
            raise ConnectionError("prefill is not linked")
        send(self._prefill, do="compute", ticket=ticket, request=request, cluster_id=DECODE)

    def _drop(self, ticket: str) -> None:
        """Have prefill free the blocks of a ticket. If the link has ended, prefill does so anyway."""
        if self._prefill is not None:
            send(self._prefill, do="drop", ticket=ticket)

    async def _keep_linked(self) -> None:
        """Link to prefill, and link again after the link has ended."""
        while True:
            if self._prefill_port is not None:
                with suppress(OSError, asyncio.TimeoutError):
                    await self._connect(self._prefill_port)
            await asyncio.sleep(PAUSE_S)

    async def _connect(self, port: int) -> None:
        """Connect and link to prefill, and return when the link has ended. Raises if prefill cannot be reached."""
        reader, writer = await asyncio.open_connection(HOST, port)
        try:
            send(writer, do="hello")
            hello = await asyncio.wait_for(reader.readline(), HELLO_LIMIT_S)
            if hello and self._link(json.loads(hello)["link"]):
                self._prefill = writer
                self._linked.set()
                await reader.read()  # until prefill dies, or `_lose_prefill` closes the connection
        finally:
            self._end_link()
            writer.close()

    def _link(self, address: str) -> bool:
        """Link to prefill, and return whether that succeeded.

        This call blocks the event loop. Prefill has just answered, so it takes milliseconds.
        """
        ip, _, port = address.rpartition(":")
        peer = prefill_cluster()
        peer.append_local_ip_info(HOST, 0)
        peer.append_remote_ip_info(ip, int(port))
        code, _ = self._blocks.engine.link_clusters([peer], LINK_LIMIT_MS)
        if code != LLMStatusCode.LLM_SUCCESS:
            return False  # the log has the reason
        self._link_number += 1
        return True

    def _end_link(self) -> None:
        """End the link, if it has not ended yet, and handle its end before another one is made."""
        self._blocks.engine.unlink_clusters([prefill_cluster()], force=True)
        self._take_events()


class Attempt(NamedTuple):
    """One attempt to serve a request: its ticket, the link that it uses, and its time limit on the loop's clock."""

    ticket: str
    link_number: int
    until: float


def prefill_cluster() -> LLMClusterInfo:
    """Name the prefill cluster in calls about links."""
    cluster = LLMClusterInfo()
    cluster.remote_cluster_id = PREFILL
    return cluster


async def ended(transfer: Transfer) -> None:
    """Await a transfer. If the coroutine is cancelled, first cancel the transfer, and wait until it uses no block."""
    try:
        await transfer
    finally:
        while not transfer.done():
            transfer.cancel()
            with suppress(LLMException, asyncio.CancelledError):
                await transfer


async def main() -> None:
    """Run the process. Its argument is the number of requests in flight."""
    await Decode(int(sys.argv[1])).run()


if __name__ == "__main__":
    asyncio.run(main())
