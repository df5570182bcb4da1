"""The decode process: an asyncio server that has requests computed by prefill, pulls their KV, and checks every byte.

It has one event loop and no threads of its own. A request whose pull fails, or whose prefill process dies, is computed
again (the recompute policy), until its time limit has passed.
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections import Counter
from contextlib import suppress
from typing import TYPE_CHECKING, Optional

from blocks import MAX_BLOCKS, Blocks, blocks_needed
from messages import received, send, until_first_ends

from llm_datadist import Error, Message, PeerDown

if TYPE_CHECKING:
    from llm_datadist import Peer, Rows, Transfer

REQUEST_LIMIT_S = 20.0
"""Time limit of a request, with all attempts to serve it."""

ATTEMPT_LIMIT_S = 5.0
"""Time limit of one attempt: waiting for prefill, and the pull."""

LINK_LIMIT_S = 0.5
PAUSE_S = 0.02
"""Pause before something that has failed is tried again."""

MAX_TRANSFERS = 8
"""Pulls at a time. Much less than the requests in flight, so that the engine refuses some pulls in this example."""


class Decode:
    """A decode server with one engine and one event loop, for at most `in_flight` requests at a time."""

    def __init__(self, in_flight: int) -> None:
        self._blocks = Blocks("decode", in_flight * MAX_BLOCKS, max_transfers=MAX_TRANSFERS)
        self._slots = asyncio.Semaphore(in_flight)
        self._requests: set[asyncio.Task[None]] = set()
        self._answers: dict[int, asyncio.Future[Optional[tuple[Rows, bytes]]]] = {}
        self._address = ""
        self._prefill: Optional[Peer] = None
        self._linked = asyncio.Event()
        self._links = 0
        self._failures: Counter[str] = Counter()
        self._stopping = False

    async def run(self) -> None:
        """Serve until the front end closes the pipe."""
        with self._blocks.engine:
            try:
                await until_first_ends(self._front_end(), self._take_events(), self._keep_linked())
            finally:
                self._stopping = True
                for request in self._requests:
                    request.cancel()
                await asyncio.gather(*self._requests, return_exceptions=True)
            counts = {"links": self._links, "busy": self._blocks.busy, "failures": self._failures}
            send(free=self._blocks.free, blocks=self._blocks.cache.blocks, **counts)

    async def _front_end(self) -> None:
        """Handle the messages of the front end."""
        async for message in received():
            if message["do"] == "serve":
                request = asyncio.ensure_future(self._serve(message["request"]))
                self._requests.add(request)
                request.add_done_callback(self._requests.discard)
            elif message["do"] == "use_prefill":
                self._address = message["address"]
            elif self._prefill is not None:  # "cut"
                await self._blocks.unless_busy(self._prefill.close)

    # ------------------------------------------------------------------------------------------------- one request

    async def _serve(self, request: int) -> None:
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
        send(request=request, outcome=outcome)

    async def _fetch(self, request: int, blocks: list[int]) -> None:
        """Have a request computed and pull its KV. If that fails, have it computed again."""
        while True:
            await self._linked.wait()
            try:
                await asyncio.wait_for(self._attempt(request, blocks), ATTEMPT_LIMIT_S)
            except (Error, OSError, asyncio.TimeoutError) as error:
                if self._stopping:  # before Python 3.12, `wait_for` may raise a failure in place of a cancellation
                    raise asyncio.CancelledError from error
                self._failures[type(error).__name__] += 1
                await asyncio.sleep(PAUSE_S)
            else:
                return

    async def _attempt(self, request: int, blocks: list[int]) -> None:
        """Ask prefill for a request, wait for its answer, and pull. Raises if that fails."""
        prefill, question = self._prefill, json.dumps({"request": request}).encode()
        if prefill is None:
            raise ConnectionError("prefill is not linked")
        answer = self._answers[request] = asyncio.get_running_loop().create_future()
        try:
            await self._blocks.unless_busy(lambda: prefill.send(question))
            computed = await answer
        finally:
            del self._answers[request]
        if computed is None:
            raise ConnectionError("the link has ended")
        rows, token = computed
        engine, to = self._blocks.engine, self._blocks.cache[blocks]
        await ended(await self._blocks.unless_busy(lambda: engine.pull(to, rows, grant=token)))

    # ---------------------------------------------------------------------------------------------------- the link

    async def _take_events(self) -> None:
        """Handle what happens."""
        async for event in self._blocks.engine:
            if isinstance(event, Message):  # prefill has computed a request
                computed = json.loads(event.data)
                answer = self._answers.get(computed["request"])
                if answer is not None and not answer.done():  # otherwise, the attempt has ended, and the grant expires
                    answer.set_result((event.peer["kv"][computed["blocks"]], bytes.fromhex(computed["token"])))
            elif isinstance(event, PeerDown) and event.peer == self._prefill:
                self._prefill = None  # `_keep_linked` notices
                self._linked.clear()
                for answer in self._answers.values():  # attempts that pull get the failure from the engine
                    if not answer.done():
                        answer.set_result(None)

    async def _keep_linked(self) -> None:
        """Link to prefill, and link again after the link has ended."""
        while True:
            if self._address and self._prefill is None:
                with suppress(Error):  # for example, nobody listens there yet
                    await self._link()
            await asyncio.sleep(PAUSE_S)

    async def _link(self) -> None:
        link = self._blocks.engine.link
        peer = await (await self._blocks.unless_busy(lambda: link(self._address, name="prefill", timeout=LINK_LIMIT_S)))
        if peer.alive:  # otherwise, it has died meanwhile, and its `PeerDown` was taken
            self._prefill = peer
            self._linked.set()
            self._links += 1


async def ended(transfer: Transfer[None]) -> None:
    """Await a transfer. If the coroutine is cancelled, first cancel the transfer, and wait until it uses no block."""
    try:
        await transfer
    finally:
        while not transfer.done():
            transfer.cancel()
            with suppress(Error, asyncio.CancelledError):
                await transfer


async def main() -> None:
    """Run the process. Its argument is the number of requests in flight."""
    await Decode(int(sys.argv[1])).run()


if __name__ == "__main__":
    asyncio.run(main())
