"""The prefill process: computes the prompts of each group, and sends the KV of a layer while it computes the next ones.

For each group, it receives the destination rows from decode, starts a layer-wise push, computes, and reports when
everything has arrived. Not for: new tokens (`decode`).
"""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, NamedTuple

from generation import Generation
from node import Node, Setup

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

    from llm_datadist import Transfer

REPEATS = 3


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
        self._node = Node(setup, "prefill", setup.rows[0], 0, pipe)
        self._made = Generation(setup.work.requests)

    def run(self) -> list[Timing]:
        """Serve every group in order."""
        with self._node.engine as engine:
            self._decode = engine.link(self._node.receive(), name="decode").result()
            return [self._group(group, self._node.receive()) for group in self._work.groups]

    def _group(self, group: Sequence[int], rows_of: dict[int, list[int]]) -> Timing:
        """Compute the prompts of a group and send them to the rows that decode named for each request."""
        layers, rows = self._work.shape.layers, self._node.layout.rows
        for number in group:
            rows.reserve(number, self._node.layout.rows_for(len(self._work.requests[number].prompt)))
        alone = [self._alone(group, rows_of) for _ in range(REPEATS)]  # before compute, so that it sends wrong data
        push, in_place = self._push(group, rows_of), []

        def computed(layer: int) -> None:
            if self._prove and layer == layers - 1:
                _wait_for_a_layer(push, layers, self._node.limit_s)
            in_place.append(_arrived(push, layers))
            push.ready(layer)

        start = time.perf_counter()
        logits = self._model.forward(self._made.prompts(group), self._node.layout, computed)
        end = time.perf_counter()
        push.result(self._node.limit_s)
        exposed = time.perf_counter() - end
        self._made.take(group, logits)
        self._node.send({number: (self._made.tokens[number], self._made.logits[number]) for number in group})
        for number in group:
            rows.release(number)
        return Timing(push.bytes, end - start, exposed, min(alone), in_place)

    def _alone(self, group: Sequence[int], rows_of: dict[int, list[int]]) -> float:
        """Send the same rows with their old contents, without waiting for layers. Return the seconds that this took."""
        start = time.perf_counter()
        push = self._push(group, rows_of)
        for layer in range(self._work.shape.layers):
            push.ready(layer)
        push.result(self._node.limit_s)
        return time.perf_counter() - start

    def _push(self, group: Sequence[int], rows_of: dict[int, list[int]]) -> Transfer[None]:
        """Start to send the rows of a group, layer by layer."""
        local = [row for number in group for row in self._node.layout.rows.of[number]]
        remote = [row for number in group for row in rows_of[number]]
        return self._node.engine.push(self._decode["kv"][remote], self._node.cache[local], layerwise=True)


def _arrived(push: Transfer[None], layers: int) -> int:
    """Return how many layers have arrived. All layers have as many bytes."""
    return push.bytes * layers // push.total if push.total else 0


def _wait_for_a_layer(push: Transfer[None], layers: int, limit_s: float) -> None:
    """Wait until a layer has arrived. The example fails if none arrives before compute ends."""
    until = time.monotonic() + limit_s
    while not _arrived(push, layers):
        if time.monotonic() > until:
            raise TimeoutError("no layer arrives before all are computed")
        time.sleep(0.001)


def run(setup: Setup, pipe: Connection, result: Connection) -> None:
    """Run the process."""
    result.send(Prefill(setup, pipe).run())
