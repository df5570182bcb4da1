"""Messages between the processes of this example: one JSON object a line. They stand for the RPC of a real server."""

from __future__ import annotations

import asyncio
import json
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator

HOST = "127.0.0.1"


def send(writer: asyncio.StreamWriter, **message: Any) -> None:
    """Send a message. It returns at once; a message to a peer that has gone is dropped."""
    if not writer.is_closing():
        writer.write(json.dumps(message).encode() + b"\n")


async def received(reader: asyncio.StreamReader) -> AsyncIterator[dict[str, Any]]:
    """Iterate over the messages of a connection, until it ends."""
    try:
        async for line in reader:
            yield json.loads(line)
    except ConnectionError:
        pass  # the peer was killed


async def listen(serve: Any) -> asyncio.base_events.Server:
    """Call `serve(reader, writer)` for each connection to a free port, which `port_of` returns."""
    return await asyncio.start_server(serve, HOST, 0)


def port_of(server: asyncio.base_events.Server) -> int:
    """Return the port of a server."""
    return int(server.sockets[0].getsockname()[1])


def tell_parent(**message: Any) -> None:
    """Print where this process can be reached, for the process that has started it."""
    print(json.dumps(message), flush=True)


async def parent_ends() -> None:
    """Wait until the process that has started this one closes the pipe to it, or dies."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()
    loop.add_reader(sys.stdin.fileno(), ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(sys.stdin.fileno())
