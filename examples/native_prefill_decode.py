"""Prefill and decode in two processes. A grant expires, prefill is killed in the middle, and no request is lost.

Decode keeps 32 requests in flight. Prefill computes each request into blocks of its cache and lends them. Decode pulls
them under the grant and compares every byte. The first grant is so short that it expires before the pull. When half of
the requests are done, decode kills prefill with SIGKILL, starts another one at the same address, links to it, and asks
again for what was not pulled. Run it: `python examples/native_prefill_decode.py`. It exits with 1 if a byte is wrong,
a request is lost, or a block is not free at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import selectors
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

from llm_datadist.native import (
    Cache,
    Engine,
    Error,
    Grant,
    GrantClosed,
    KvLayout,
    Message,
    Peer,
    PeerDown,
    PeerLost,
)

REQUESTS, IN_FLIGHT, MAX_BLOCKS = 400, 32, 6
LIMIT_S, START_LIMIT_S, TTL_S = 60.0, 10.0, 5.0
LAYOUT = KvLayout(layers=4, block_tokens=16, heads=2, head_dim=64, dtype="uint8", model="example")


def content(request: int, position: int, tensor: int) -> bytes:
    """Return the bytes of one block, which stand for what a model computes."""
    seed = random.Random(f"{request}/{position}/{tensor}")  # noqa: S311  (not a secret)
    return seed.randbytes(LAYOUT.block_tokens * len(LAYOUT.heads) * LAYOUT.head_dim)


def views(cache: Cache) -> list[list[memoryview]]:
    """Return the memory of each block of each tensor of a contiguous cache."""
    flat, size = memoryview(cache.buffer), cache.block_bytes // LAYOUT.tensors
    rows = [flat[start : start + size] for start in range(0, len(flat), size)]
    return [rows[first : first + cache.blocks] for first in range(0, len(rows), cache.blocks)]


class Prefill:
    """The prefill process: serves the requests that arrive as messages, until its standard input is closed."""

    def __init__(self, address: str) -> None:
        # Twice the blocks that decode can ask for, because blocks come back a little later than decode asks again.
        blocks = 2 * IN_FLIGHT * MAX_BLOCKS
        self.engine = Engine(pool="64MiB", listen=address, name="prefill")
        self.cache = self.engine.allocate("kv", LAYOUT, blocks=blocks, contiguous=True)
        self.tensors = views(self.cache)
        self.free = list(range(blocks))
        self.lent: dict[Grant, list[int]] = {}

    def run(self) -> None:
        """Serve until the other process has closed the pipe, and every grant has ended."""
        print(self.engine.address, flush=True)
        with self.engine, selectors.DefaultSelector() as selector:
            selector.register(self.engine, selectors.EVENT_READ)
            selector.register(sys.stdin, selectors.EVENT_READ)
            serve = True
            while serve or self.lent:
                if any(key.fileobj is sys.stdin for key, _ in selector.select()):
                    selector.unregister(sys.stdin)
                    serve = False
                for event in self.engine.events():
                    if isinstance(event, Message):
                        self.compute(event.peer, json.loads(event.data))
                    elif isinstance(event, GrantClosed):
                        self.free += self.lent.pop(event.grant)
        print(f"prefill: {len(self.free)} of {self.cache.blocks} blocks are free")

    def compute(self, peer: Peer, request: dict[str, Any]) -> None:
        """Compute a request, lend its blocks and send their numbers and the token."""
        blocks = [self.free.pop() for _ in range(request["blocks"])]
        for number, tensor in enumerate(self.tensors):
            for position, block in enumerate(blocks):
                tensor[block][:] = content(request["id"], position, number)
        grant = self.engine.lend(self.cache[blocks], ttl=request["ttl"])
        self.lent[grant] = blocks
        answer = {"id": request["id"], "blocks": blocks, "token": grant.token.hex()}
        try:
            peer.send(json.dumps(answer).encode())
        except PeerLost:  # decode has ended and will not pull
            grant.revoke()


class Decode:
    """The decode process: asks for requests, pulls their blocks, and recovers when prefill dies."""

    def __init__(self) -> None:
        self.engine = Engine(pool="64MiB", name="decode")
        self.cache = self.engine.allocate("kv", LAYOUT, blocks=IN_FLIGHT * MAX_BLOCKS, contiguous=True)
        self.tensors = views(self.cache)
        self.free = list(range(self.cache.blocks))
        self.answers: dict[int, asyncio.Future[dict[str, Any]]] = {}
        self.failures: Counter[str] = Counter()
        self.linked = asyncio.Event()
        self.process: subprocess.Popen[str] | None = None
        self.peer: Peer | None = None
        self.address = "127.0.0.1:0"
        self.done = self.kills = self.bytes = 0

    async def start_prefill(self) -> None:
        """Start a prefill process at the address of the one before it, and link to it."""
        command = [sys.executable, str(Path(__file__)), "prefill", self.address]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # noqa: ASYNC220, S603
        assert self.process.stdout is not None
        line = await asyncio.wait_for(asyncio.to_thread(self.process.stdout.readline), START_LIMIT_S)
        self.address = line.strip()
        self.peer = await self.engine.link(self.address, name="prefill", timeout=START_LIMIT_S)
        self.linked.set()

    def kill_prefill(self) -> None:
        """Kill the prefill process. The engine notices by itself."""
        assert self.process is not None
        self.process.kill()
        self.process.communicate()
        self.kills += 1

    async def watch(self) -> None:
        """Take the events: answers of prefill, and its death."""
        async for event in self.engine:
            if isinstance(event, Message):
                answer = json.loads(event.data)
                waiting = self.answers.pop(answer["id"], None)
                if waiting is not None and not waiting.done() and event.peer == self.peer:
                    waiting.set_result(answer)
            elif isinstance(event, PeerDown) and event.peer == self.peer:
                self.linked.clear()
                for waiting in self.answers.values():
                    if not waiting.done():
                        waiting.set_exception(ConnectionResetError(event.reason))
                self.answers.clear()
                await self.start_prefill()

    async def attempt(self, request: int, blocks: list[int]) -> None:
        """Have a request computed, and pull its blocks."""
        peer = self.peer
        assert peer is not None
        answered = self.answers[request] = asyncio.get_running_loop().create_future()
        late = request == 0 and not self.failures  # for this example: the first grant expires before the pull
        ttl = 0.1 if late else TTL_S
        peer.send(json.dumps({"id": request, "blocks": len(blocks), "ttl": ttl}).encode())
        answer = await answered
        if late:
            await asyncio.sleep(3 * ttl)
        grant = bytes.fromhex(answer["token"])
        await self.engine.pull(self.cache[blocks], peer["kv"][answer["blocks"]], grant=grant)

    async def again(self, request: int, error: Exception) -> None:
        """Count a failure. If the link has ended, wait until `watch` has made another one."""
        self.failures[type(error).__name__] += 1
        self.answers.pop(request, None)
        if self.peer is not None and not self.peer.alive:
            self.linked.clear()
        await asyncio.sleep(0)
        await self.linked.wait()

    async def serve(self, request: int, slots: asyncio.Semaphore) -> None:
        """Serve a request: repeat until its blocks are in place, and compare them."""
        async with slots:
            blocks = [self.free.pop() for _ in range(1 + request % MAX_BLOCKS)]
            while True:
                try:
                    await self.attempt(request, blocks)
                    break
                except (Error, ConnectionError) as error:  # PeerLost, GrantEnded, Timeout: ask again
                    await self.again(request, error)
            for number, tensor in enumerate(self.tensors):
                for position, block in enumerate(blocks):
                    if tensor[block] != content(request, position, number):
                        raise AssertionError(f"request {request}: block {block} of tensor {number} has wrong bytes")
            self.bytes += len(blocks) * self.cache.block_bytes
            self.free += blocks
            self.done += 1
            if self.done == REQUESTS // 2:
                self.kill_prefill()

    async def serve_all(self) -> None:
        """Serve the first request, whose grant expires, before prefill can be killed. Then serve the others."""
        slots = asyncio.Semaphore(IN_FLIGHT)
        await self.serve(0, slots)
        await asyncio.gather(*(self.serve(request, slots) for request in range(1, REQUESTS)))

    async def run(self) -> None:
        """Serve all requests, and stop the prefill process."""
        started = time.monotonic()
        await self.start_prefill()
        watching, serving = asyncio.create_task(self.watch()), asyncio.create_task(self.serve_all())
        both: set[asyncio.Future[Any]] = {watching, serving}
        ended, _ = await asyncio.wait(both, timeout=LIMIT_S, return_when=asyncio.FIRST_COMPLETED)
        if not ended:
            raise TimeoutError(f"only {self.done} of {REQUESTS} requests were done after {LIMIT_S} s")
        for task in ended:
            task.result()  # raises what went wrong
        watching.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watching
        assert self.process is not None
        output, _ = self.process.communicate(timeout=START_LIMIT_S)  # closes its standard input, so it ends
        print(output, end="")
        self.engine.close()
        assert self.done == REQUESTS
        assert sorted(self.free) == list(range(IN_FLIGHT * MAX_BLOCKS)), "a block was lost"
        again = ", ".join(f"{count} {name}" for name, count in sorted(self.failures.items())) or "none"
        print(
            f"{self.done} requests, {self.bytes} bytes compared, 0 wrong, {self.kills} kill survived, "
            f"repeated: {again}, {time.monotonic() - started:.1f} s"
        )


async def main() -> None:
    """Run the decode process."""
    await Decode().run()


if __name__ == "__main__":
    if sys.argv[1:2] == ["prefill"]:
        Prefill(sys.argv[2]).run()
    else:
        asyncio.run(main())
