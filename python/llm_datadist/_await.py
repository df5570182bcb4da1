"""``await`` for transfers, and ``async for`` and ``async with`` for engines.

One descriptor wakes an event loop for all transfers that it awaits. The native module imports this one when it is
first used.
"""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from llm_datadist import _core
from llm_datadist.errors import Closed

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, Future
    from collections.abc import AsyncIterator

__all__ = ["await_transfer", "enter", "events", "leave", "wait_for_end"]


class _Loop:
    """The transfers that one event loop awaits. Its reader is installed only while there are any."""

    def __init__(self) -> None:
        self._queue = _core.native.LoopQueue()
        self._awaited: dict[int, list[Future[None]]] = {}

    async def wait(self, loop: AbstractEventLoop, transfer: Any) -> None:
        """Return once the transfer has ended."""
        number = self._queue.add(transfer)
        if number is None:
            return  # it has ended
        if not self._awaited:
            loop.add_reader(self._queue.fileno(), self._wake, loop)
        future: Future[None] = loop.create_future()
        self._awaited.setdefault(number, []).append(future)
        try:
            await future
        finally:
            self._forget(loop, number, future)

    def _wake(self, loop: AbstractEventLoop) -> None:
        for number in self._queue.take():
            for future in self._awaited.pop(number, ()):
                if not future.done():  # a coroutine may have been cancelled in the same step
                    future.set_result(None)
        self._rest(loop)

    def _forget(self, loop: AbstractEventLoop, number: int, future: Future[None]) -> None:
        futures = self._awaited.get(number, [])
        if future in futures:  # a coroutine that was cancelled
            futures.remove(future)
            if not futures:
                del self._awaited[number]
                self._rest(loop)

    def _rest(self, loop: AbstractEventLoop) -> None:
        if not self._awaited and not loop.is_closed():
            loop.remove_reader(self._queue.fileno())


_loops: WeakKeyDictionary[AbstractEventLoop, _Loop] = WeakKeyDictionary()
_lock = threading.Lock()


def _of(loop: AbstractEventLoop) -> _Loop:
    with _lock:
        if loop in _loops:
            return _loops[loop]
        # The futures of a loop that was closed while it awaited would keep it for ever. They are dropped without the
        # lock, because that may run code of coroutines.
        closed = [_loops.pop(known, None) for known in list(_loops) if known.is_closed()]
        made = _loops[loop] = _Loop()
    del closed
    return made


def _after_fork() -> None:
    global _lock  # noqa: PLW0603  (another thread may hold the lock of the parent for ever)
    _lock = threading.Lock()
    _loops.clear()


os.register_at_fork(after_in_child=_after_fork)


async def wait_for_end(transfer: Any) -> None:
    """Wait until a transfer has ended. Cancelling the coroutine leaves the transfer running."""
    import asyncio  # noqa: PLC0415  (only coroutines need it)

    if not transfer.done():
        loop = asyncio.get_running_loop()
        await _of(loop).wait(loop, transfer)


async def await_transfer(transfer: Any) -> Any:
    """Wait as ``wait_for_end`` does, and return the result of the transfer or raise its failure."""
    await wait_for_end(transfer)
    return transfer.result(0)


async def events(engine: Any) -> AsyncIterator[Any]:
    """Yield the events of an engine until it is closed.

    Each step takes one event, so that none is lost when the iteration ends early.
    """
    import asyncio  # noqa: PLC0415  (only coroutines need it)

    loop = asyncio.get_running_loop()
    try:
        # A copy of the descriptor, so that several iterations have one each. It outlives the engine, which signals its
        # end.
        descriptor = os.dup(engine.fileno())
    except Closed:
        return
    try:
        while not engine.closed:
            try:
                taken = engine.events(1)
            except Closed:
                return  # closed meanwhile
            if taken:
                yield taken[0]
            else:
                await _readable(loop, descriptor)
    finally:
        os.close(descriptor)


async def _readable(loop: AbstractEventLoop, descriptor: int) -> None:
    """Wait until a descriptor is readable."""
    future: Future[None] = loop.create_future()

    def wake() -> None:
        if not future.done():
            future.set_result(None)

    loop.add_reader(descriptor, wake)
    try:
        await future
    finally:
        if not loop.is_closed():
            loop.remove_reader(descriptor)


async def enter(engine: Any) -> Any:
    """Begin ``async with engine``."""
    return engine


async def leave(engine: Any) -> None:
    """End ``async with engine``. The loop runs meanwhile, because closing an engine may take long."""
    import asyncio  # noqa: PLC0415  (only coroutines need it)

    await asyncio.get_running_loop().run_in_executor(None, engine.close)
