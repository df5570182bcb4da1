"""``await`` for asynchronous calls: one descriptor wakes an event loop for all calls that it awaits."""

from __future__ import annotations

from typing import TYPE_CHECKING
from weakref import WeakKeyDictionary

from llm_datadist import _core

if TYPE_CHECKING:
    from asyncio import AbstractEventLoop, Future

__all__ = ["await_transfer"]


class _Loop:
    """The calls that one event loop awaits. Its reader is installed only while there are any."""

    def __init__(self) -> None:
        self._queue = _core.LoopQueue()
        self._awaited: dict[int, list[Future[None]]] = {}

    def ended(self, loop: AbstractEventLoop, transfer: _core.Transfer) -> Future[None]:
        """Return a future that is done once the transfer has ended."""
        future = loop.create_future()
        number = transfer.number
        waiting = self._awaited.get(number)
        if waiting is not None:
            waiting.append(future)
        elif self._queue.add(transfer):
            if not self._awaited:
                loop.add_reader(self._queue.fileno(), self._wake, loop)
            self._awaited[number] = [future]
        else:
            future.set_result(None)
        return future

    def _wake(self, loop: AbstractEventLoop) -> None:
        for number in self._queue.take():
            for future in self._awaited.pop(number, ()):
                if not future.done():  # the coroutine may have been cancelled
                    future.set_result(None)
        if not self._awaited:
            loop.remove_reader(self._queue.fileno())


_loops: WeakKeyDictionary[AbstractEventLoop, _Loop] = WeakKeyDictionary()


async def await_transfer(transfer: _core.Transfer) -> None:
    """Wait until a transfer has ended, and raise its failure. Cancelling the coroutine leaves the transfer running."""
    import asyncio  # noqa: PLC0415  (only coroutines need it)

    if not transfer.done():
        loop = asyncio.get_running_loop()
        awaits = _loops.get(loop)
        if awaits is None:
            awaits = _loops[loop] = _Loop()
        await awaits.ended(loop, transfer)
    transfer.result(0)
