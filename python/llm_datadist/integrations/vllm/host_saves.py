"""Prefill with host buffers: the parts of requests that are copied to host memory before decode may read them."""

from __future__ import annotations

import logging
import time
from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from llm_datadist.integrations.vllm.host_buffers import Copy, HostBuffers
    from llm_datadist.integrations.vllm.lending import Lending
    from llm_datadist.integrations.vllm.step import Part

__all__ = ["HostSaves"]

logger = logging.getLogger("vllm.llm_datadist")


class HostSaves:
    """The saves that wait or run, and the parts that decode may read after each. Only the transfer thread uses it.

    Layers are copied in groups, so that decode reads the first ones while the next ones are copied.

    Args:
        host: the host buffers.
        layers: the names of the layers of each KV cache group, in order.
        layers_per_copy: number of layers in a copy.
        limit_s: how long the oldest save may take after the one before, in seconds. If it takes longer, all saves fail.
        lending: is notified which layers are in host memory.
        call: runs a function in the transfer thread. Any thread may call it.
    """

    def __init__(
        self,
        host: HostBuffers,
        layers: list[list[str]],
        layers_per_copy: int,
        limit_s: float,
        lending: Lending,
        call: Callable[[Callable[[], None]], None],
    ) -> None:
        self._host = host
        self._layers = layers
        self._layers_per_copy = layers_per_copy
        self._limit_s = limit_s
        self._lending = lending
        self._call = call
        # The parts of each save, and how many of their layers are in host memory after it. The oldest one is first.
        self._saves: dict[Copy, tuple[list[Part], int | None]] = {}
        self._deadline = 0.0

    def begin(self, parts: list[Part], layers: range, mark: Any) -> None:
        """Copy layers of parts after a mark. Then report to decode that they are in place."""
        parts = list(filter(self._lending.lends, parts))
        if not parts:
            return
        single = len(self._layers) == 1
        # Models with several KV cache groups are read when all layers are in place.
        step = self._layers_per_copy if single else len(layers)
        for first in range(layers.start, layers.stop, step):
            end = min(first + step, layers.stop)
            count = None if not single or end == len(self._layers[0]) else end
            for group, names in enumerate(self._layers):
                last = group == len(self._layers) - 1
                blocks = sorted({block for part in parts for block in part.blocks[group] if block})
                some = names[first:end] if single else names
                self._save(parts, some, blocks, mark, count if last else 0)

    def drop(self) -> None:
        """Drop the saves whose parts are not lent any more. One that runs goes on, and its end is not reported."""
        for copy, (parts, _) in list(self._saves.items()):
            if not any(map(self._lending.lends, parts)):
                del self._saves[copy]
                copy.cancel()

    def due(self, now: float) -> None:
        """Fail all parts if the oldest save takes too long. The saves behind it would each take as long again."""
        if self._saves and self._deadline <= now:
            copies = list(self._saves)
            self._failed(copies, f"its blocks were not copied to host memory within {self._limit_s:g} s", now)
            for copy in reversed(copies):  # the oldest one last, so that none of them begins
                copy.cancel()

    def next_due(self) -> float | None:
        """Return when ``due`` has something to do, or ``None``."""
        return self._deadline if self._saves else None

    def _save(self, parts: list[Part], names: list[str], blocks: list[int], mark: Any, count: int | None) -> None:
        done = lambda copy, error: self._call(partial(self._done, copy, error))  # noqa: E731
        try:
            copy = self._host.save(names, [(block, block) for block in blocks], mark, done)
        except RuntimeError as error:
            self._lending.fail(parts, str(error))
            return
        if not self._saves:
            self._deadline = time.monotonic() + self._limit_s
        self._saves[copy] = parts, count

    def _done(self, copy: Copy, error: Exception | None) -> None:
        if copy not in self._saves:
            return  # dropped, or too late
        now = time.monotonic()
        if error is not None:
            self._failed([copy], f"its blocks were not copied to host memory: {error}", now)
            return
        parts, count = self._saves.pop(copy)
        self._deadline = now + self._limit_s
        if count != 0:
            self._lending.ready(parts, count)

    def _failed(self, copies: list[Copy], reason: str, now: float) -> None:
        parts = [part for copy in copies for part in self._saves.pop(copy)[0]]
        self._deadline = now + self._limit_s
        logger.error("tickets %s are not handed over: %s", ", ".join(sorted({one.ticket for one in parts})), reason)
        self._lending.fail(parts, reason)
