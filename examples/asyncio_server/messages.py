"""Messages between the front end and a server: JSON lines through pipes. They stand for the RPC of a real server."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from contextlib import suppress
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import AsyncIterator, Coroutine


def send(**message: Any) -> None:
    """Send a message to the front end. It is dropped if the front end has ended."""
    with suppress(BrokenPipeError):
        os.write(sys.stdout.fileno(), json.dumps(message).encode() + b"\n")


async def received() -> AsyncIterator[dict[str, Any]]:
    """Iterate over the messages of the front end, until it closes the pipe or ends."""
    reader = asyncio.StreamReader()
    transport, _ = await asyncio.get_running_loop().connect_read_pipe(
        lambda: asyncio.StreamReaderProtocol(reader), sys.stdin
    )
    try:
        async for line in reader:
            yield json.loads(line)
    finally:
        transport.close()


async def until_first_ends(*coroutines: Coroutine[Any, Any, None]) -> None:
    """Run coroutines until one of them ends, and then cancel the others. Raises what a coroutine has raised."""
    tasks = [asyncio.ensure_future(coroutine) for coroutine in coroutines]
    try:
        await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    for task in tasks:
        if not task.cancelled():
            task.result()
