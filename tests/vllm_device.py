"""A device that works later than it is asked to: its streams are threads, and each thing that they do takes a while.

Not for: the streams of torch (`integration-tests/vllm/test_device_copies.py`).
"""

from __future__ import annotations

import queue
import threading
import time
from functools import partial
from typing import TYPE_CHECKING, Any

from peers import LIMIT

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

# Longer than anything that could hide a missing wait.
DELAY = 0.005


class Later:
    """A stream: it does one thing after another, each after a delay."""

    def __init__(self, delay: float) -> None:
        self._delay = delay
        self._things: queue.Queue[Callable[[], object]] = queue.Queue()
        threading.Thread(target=self._run, daemon=True).start()

    def put(self, thing: Callable[[], object]) -> None:
        self._things.put(thing)

    def _run(self) -> None:
        while True:
            thing = self._things.get()
            time.sleep(self._delay)
            thing()


class FakeDevice:
    """Implements ``Device`` for numpy arrays."""

    def __init__(self, delay: float = DELAY) -> None:
        self.pipelines = False
        self.model = Later(delay)  # the stream of the model
        self.copies: list[tuple[str, tuple[str, ...], list[int], list[int]]] = []
        self.failure: BaseException | None = None
        # Copies wait for these.
        self.gates = {direction: threading.Event() for direction in ("d2h", "h2d")}
        for gate in self.gates.values():
            gate.set()
        self._delay = delay
        self._current = threading.local()

    def mark(self) -> threading.Event:
        reached = threading.Event()
        getattr(self._current, "stream", self.model).put(reached.set)
        return reached

    def stream(self) -> FakeStream:
        return FakeStream(self, Later(self._delay))

    def copy_blocks(self, src: Any, dst: Any, src_blocks: list[int], dst_blocks: list[int], direction: str) -> None:
        self.copies.append((direction, tuple(src), src_blocks, dst_blocks))
        assert self.gates[direction].wait(LIMIT)
        if self.failure is not None:
            raise self.failure
        for name in src:
            self._current.stream.put(partial(_copy, src[name], dst[name], src_blocks, dst_blocks))

    def within(self, stream: Later, work: Callable[[], None]) -> None:
        self._current.stream = stream
        try:
            work()
        finally:
            end = self.mark()
            del self._current.stream
            assert end.wait(LIMIT), "the stream does not end"


class FakeStream:
    """Implements ``Stream``."""

    def __init__(self, device: FakeDevice, later: Later) -> None:
        self._device = device
        self._later = later

    def run(self, after: Sequence[Any], work: Callable[[], None]) -> None:
        for mark in after:
            self._later.put(mark.wait)
        self._device.within(self._later, work)


def _copy(src: Any, dst: Any, src_blocks: list[int], dst_blocks: list[int]) -> None:
    dst[dst_blocks] = src[src_blocks]
