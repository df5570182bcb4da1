"""An asyncio prefill server that sends each layer to two decode processes while the next layer is computed.

Run it: `python examples/guide_layerwise_asyncio.py`.
"""

from __future__ import annotations

import asyncio
import json
import select
import subprocess
import sys
import time
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING

from llm_datadist import Engine, KvLayout, Message

if TYPE_CHECKING:
    from llm_datadist import Peer, Transfer

LAYERS = 4
LAYOUT = KvLayout(layers=LAYERS, block_tokens=16, heads=2, head_dim=64, dtype="float16")
LIMIT_S = 30.0


class Server:
    """A prefill server with one engine."""

    def __init__(self) -> None:
        self.engine = Engine(pool="64MiB", name="prefill")
        self.cache = self.engine.allocate("kv", LAYOUT, blocks=128)
        self.tensors = [tensor.numpy() for tensor in self.cache.tensors]

    def compute(self, request: int, blocks: list[int], pushes: list[Transfer[None]], seconds: list[float]) -> None:
        """Compute the layers of one request, on a worker thread, as long as a push waits for them."""
        for layer in range(LAYERS):
            time.sleep(seconds[layer])  # where a model computes
            if all(push.done() for push in pushes):
                return
            for tensor in self.tensors[2 * layer : 2 * layer + 2]:
                tensor[blocks] = request
            for push in pushes:
                push.ready(layer)

    async def serve(self, request: int, blocks: list[int], to: dict[Peer, list[int]], seconds: list[float]) -> None:
        """Compute a request and send it to decode processes, each of which has chosen blocks of its own."""
        pushes = []
        for peer, there in to.items():
            notify = json.dumps({"request": request, "blocks": there}).encode()  # arrives after the last layer
            pushes.append(self.engine.push(peer["kv"][there], self.cache[blocks], layerwise=True, notify=notify))
        computing = asyncio.ensure_future(asyncio.to_thread(self.compute, request, blocks, pushes, seconds))
        sending = [asyncio.ensure_future(push) for push in pushes]
        try:
            await asyncio.shield(computing)  # raises what `compute` raises
            await asyncio.wait(sending)
        finally:
            for push in pushes:
                push.cancel()  # no effect on those that have ended
            await asyncio.wait([computing, *sending])  # only now may `blocks` be written
            for peer, push, sent in zip(to, pushes, sending):
                outcome = type(sent.exception()).__name__ if sent.exception() else "in place"
                print(f"request {request} to {peer.name}: {outcome}, {push.bytes:,} bytes")

    async def confirmations(self, count: int) -> None:
        """Wait until decode processes have confirmed that the bytes are right."""
        async for event in self.engine:
            if isinstance(event, Message):
                assert event.data == b"right"
                count -= 1
                if count == 0:
                    return


async def serve_all(addresses: list[str], victim: subprocess.Popen[str]) -> None:
    """Serve requests that succeed, take too long, and lose a destination."""
    server = Server()
    to = {await server.engine.link(address): [7, 8] for address in addresses}
    await server.serve(1, [3, 4], to, [0.01, 0.01, 0.01, 0.01])
    await asyncio.wait_for(server.confirmations(len(to)), LIMIT_S)
    try:
        await asyncio.wait_for(server.serve(2, [3, 4], to, [0.01, 0.5, 0.01, 0.01]), 0.3)
    except asyncio.TimeoutError:
        print("request 2: too late")
    victim.kill()
    await server.serve(3, [3, 4], to, [0.2, 0.01, 0.01, 0.01])
    server.engine.close()


def decode(name: str) -> None:
    """Run a decode process: offer a cache, and check what arrives, until the other process closes the pipe."""
    with Engine(pool="64MiB", listen="127.0.0.1:0", name=name) as engine:
        tensors = [tensor.numpy() for tensor in engine.allocate("kv", LAYOUT, blocks=128).tensors]
        print(engine.address, flush=True)
        while sys.stdin not in select.select([engine, sys.stdin], [], [])[0]:
            for event in engine.events():
                if isinstance(event, Message):
                    done = json.loads(event.data)
                    right = all((tensor[done["blocks"]] == done["request"]).all() for tensor in tensors)
                    event.peer.send(b"right" if right else b"wrong")


def main() -> None:
    """Start the decode processes and serve."""
    with ExitStack() as stack:
        processes = []
        for name in ("decode 1", "decode 2"):
            command = [sys.executable, str(Path(__file__)), name]
            pipe = subprocess.PIPE
            processes.append(stack.enter_context(subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True)))  # noqa: S603
        addresses = [process.stdout.readline().strip() for process in processes if process.stdout is not None]
        asyncio.run(asyncio.wait_for(serve_all(addresses, processes[1]), LIMIT_S))


if __name__ == "__main__":
    if sys.argv[1:]:
        decode(sys.argv[1])
    else:
        main()
