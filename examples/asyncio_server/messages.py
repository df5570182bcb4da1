"""Messages between the processes of this example: one JSON object a line. They stand for the RPC of a real server."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any, Callable

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine

    Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Coroutine[Any, Any, None]]

HOST = "127.0.0.1"


def send(writer: asyncio.StreamWriter, **message: Any) -> None:
    """Send a message without waiting. A message to a peer that has gone is dropped."""
    if not writer.is_closing():
        writer.write(json.dumps(message).encode() + b"\n")


async def received(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """Iterate over the messages of a connection, until it ends."""
    try:
        async for line in reader:
            yield json.loads(line)
    except ConnectionError:
        pass  # the peer was killed


async def serve_until_parent_ends(serve: Serve, background: Coroutine[Any, Any, None]) -> None:
    """Serve connections to a free port, and run `background`, until the parent process ends. Prints the port.

    The parent process ends this one by closing the pipe to its standard input. If the parent dies, the kernel does so.
    """
    tasks = {asyncio.ensure_future(_parent_ends()), asyncio.ensure_future(background)}
    connections: set[asyncio.Task[None]] = set()

    async def handle(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await serve(reader, writer)
        finally:
            writer.close()

    def accept(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        connection = asyncio.ensure_future(handle(reader, writer))
        connections.add(connection)
        connection.add_done_callback(connections.discard)

    server = await asyncio.start_server(accept, HOST, 0)
    print(json.dumps({"port": server.sockets[0].getsockname()[1]}), flush=True)
    try:
        done, _ = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        for task in done:
            task.result()  # raises what `background` has raised
    finally:
        server.close()
        running = tasks | connections
        for task in running:
            task.cancel()
        await asyncio.wait(running)


async def _parent_ends() -> None:
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(sys.stdin.fileno())
