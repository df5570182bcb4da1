"""The prefill process: computes the prompts of each group, and sends the KV of a layer while it computes the next ones.

For each group, it receives the destination rows from decode, starts a transfer that waits for the layers, computes, and
reports when everything has arrived. Not for: new tokens (`decode`).
"""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING, Any, NamedTuple, Optional

from generation import Generation
from llm_datadist import (
    BlocksCacheKey,
    LayerSynchronizer,
    LLMRole,
    LLMStatusCode,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from node import DECODE, LIMIT_S, Node, Setup

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

    from llm_datadist import CacheTask

REPEATS = 3


class ComputedLayers(LayerSynchronizer):
    """Tells the transfer which layers are computed. The compute loop sets one event for each layer."""

    def __init__(self, layers: int, done: bool = False) -> None:
        self._events = [threading.Event() for _ in range(layers)]
        for event in self._events if done else ():
            event.set()

    def computed(self, layer: int) -> None:
        """Report that a layer is computed."""
        self._events[layer].set()

    def synchronize_layer(self, layer_index: int, timeout_in_millis: Optional[int]) -> bool:
        """Wait until a layer is computed. The transfer calls this on its own thread."""
        return self._events[layer_index].wait(LIMIT_S if timeout_in_millis is None else timeout_in_millis / 1000)


class Timing(NamedTuple):
    """The times of one group in seconds, and the bytes that were moved.

    `exposed_s` is the time from the end of compute to the arrival of the last layer. `alone_s` is the shortest of
    `REPEATS` transfers without compute, because decode computes meanwhile.
    `in_place[i]` is how many layers had arrived when layer `i` was computed, before it was reported.
    """

    bytes: int
    compute_s: float
    exposed_s: float
    alone_s: float
    in_place: list[int]


class Prefill:
    """Computes groups and sends their KV."""

    def __init__(self, setup: Setup, pipe: Connection) -> None:
        self._work, self._prove = setup.work, setup.prove
        self._model = setup.work.model()
        self._paged = setup.layout == "paged"
        self._node = Node(setup, LLMRole.PROMPT, setup.rows[0], 0, pipe)
        self._made = Generation(setup.work.requests)

    def run(self) -> list[Timing]:
        """Serve every group in order."""
        self._node.send(self._node.dist.listen_ip_info)
        try:
            return [self._group(group, self._node.receive()) for group in self._work.groups]
        finally:
            self._node.close()

    def _group(self, group: Sequence[int], places: dict[int, Any]) -> Timing:
        """Compute the prompts of a group and send them to the places that decode named for each request."""
        layers, rows = self._work.shape.layers, self._node.layout.rows
        for number in group:
            rows.reserve(number, self._node.layout.rows_for(len(self._work.requests[number].prompt)))
        alone = [self._alone(group, places) for _ in range(REPEATS)]  # before compute, so that it sends wrong data
        synchronizer, in_place = ComputedLayers(layers), []
        task = self._transfer(group, places, synchronizer)

        def computed(layer: int) -> None:
            if self._prove and layer == layers - 1:
                _wait_for_a_layer(task)
            in_place.append(min(part.layers_done for part in task.progress()))
            synchronizer.computed(layer)

        start = time.perf_counter()
        logits = self._model.forward(self._made.prompts(group), self._node.layout, computed)
        end = time.perf_counter()
        _succeed(task)
        exposed = time.perf_counter() - end
        moved = sum(part.bytes_done for part in task.progress())
        self._made.take(group, logits)
        self._node.send({number: (self._made.tokens[number], self._made.logits[number]) for number in group})
        for number in group:
            rows.release(number)
        return Timing(moved, end - start, exposed, min(alone), in_place)

    def _alone(self, group: Sequence[int], places: dict[int, Any]) -> float:
        """Send the same rows with their old contents, without waiting for layers. Return the seconds that this took."""
        start = time.perf_counter()
        _succeed(self._transfer(group, places, ComputedLayers(self._work.shape.layers, done=True)))
        return time.perf_counter() - start

    def _transfer(self, group: Sequence[int], places: dict[int, Any], synchronizer: ComputedLayers) -> CacheTask:
        """Start the transfer of a group: by key from blocks to blocks, or by address from slot to slot."""
        manager, cache, rows = self._node.manager, self._node.cache, self._node.layout.rows
        every = range(self._work.shape.layers)
        if self._paged:
            there = [TransferWithCacheKeyConfig(BlocksCacheKey(DECODE), every, every)]
            near = [row for number in group for row in rows.of[number]]
            far = [row for number in group for row in places[number]]
            return manager.transfer_cache_async(cache, synchronizer, there, near, far)
        slots = [TransferConfig(DECODE, places[number], every, rows.of[number][0]) for number in group]
        return manager.transfer_cache_async(cache, synchronizer, slots)


def _succeed(task: CacheTask) -> None:
    """Wait until the transfer has ended, and raise if it did not succeed."""
    if task.synchronize(int(LIMIT_S * 1000)) != LLMStatusCode.LLM_SUCCESS:
        task.cancel()
        raise RuntimeError(f"the transfer gave {task.get_results()}: {task.errors()}")


def _wait_for_a_layer(task: CacheTask) -> None:
    """Wait until a layer has arrived. The example fails if none arrives before compute ends."""
    until = time.monotonic() + LIMIT_S
    while not all(part.layers_done for part in task.progress()):
        if time.monotonic() > until:
            raise TimeoutError("no layer arrives before all are computed")
        time.sleep(0.001)


def run(setup: Setup, pipe: Connection, result: Connection) -> None:
    """Run the process."""
    result.send(Prefill(setup, pipe).run())
