"""The decode process: receives the KV of each group and continues from it. Groups take turns.

With blocks, the device cache holds two groups: the current one and the next one. The others are swapped out to the host
cache, and are later swapped in to other blocks. Not for: prompts (`prefill`).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, NamedTuple

from generation import Generation
from layouts import Rows
from node import Node, Setup

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

TOKENS_PER_ROUND = 6
"""New tokens that a group generates in one turn."""


class Served(NamedTuple):
    """The generated tokens and logits, and how many requests were swapped out and in."""

    made: Generation
    swapped_out: int
    swapped_in: int


class Decode:
    """Generates tokens from KV that another process computed."""

    def __init__(self, setup: Setup, pipe: Connection) -> None:
        self._work = setup.work
        self._model = setup.work.model()
        _, device_rows, host_rows = setup.rows
        self._node = Node(setup, "decode", device_rows, host_rows, pipe)
        self._host_rows = Rows(host_rows, seed=3)
        self._made = Generation(setup.work.requests)
        self._out = self._in = 0

    def run(self) -> Served:
        """Serve every group to its end."""
        with self._node.engine as engine:
            self._node.send(engine.address)
            self._serve()
        return Served(self._made, self._out, self._in)

    def _serve(self) -> None:
        """Let the groups take turns. While one generates, prefill computes a new group, which has the next turn."""
        coming, waiting = deque(self._work.groups), deque([self._work.groups[0]])
        self._grant(coming.popleft())
        self._arrive()
        while waiting:
            group = waiting.popleft()
            self._swap_in(group)
            if coming:
                self._grant(coming[0])
            self._generate(group)
            if waiting or coming:
                self._swap_out(group)
            if self._made.step(group):
                waiting.append(group)
            if coming:
                waiting.appendleft(coming.popleft())
                self._arrive()

    def _grant(self, group: Sequence[int]) -> None:
        """Reserve rows for a group, and send those of the prompts to prefill."""
        layout, rows_of = self._node.layout, {}
        for number in group:
            request = self._work.requests[number]
            rows = layout.rows.reserve(number, layout.rows_for(request.tokens))
            rows_of[number] = rows[: layout.rows_for(len(request.prompt))]
        self._node.send(rows_of)

    def _arrive(self) -> None:
        """Wait until prefill reports that a group has arrived, and take its first tokens and logits."""
        for number, (tokens, logits) in self._node.receive().items():
            self._made.tokens[number] += tokens
            self._made.logits[number] += logits

    def _generate(self, group: Sequence[int]) -> None:
        """Generate the tokens of one turn, and release the rows of requests that are done."""
        for _ in range(TOKENS_PER_ROUND):
            batch = self._made.step(group)
            if not batch:
                break
            self._made.take([chunk.request for chunk in batch], self._model.forward(batch, self._node.layout))
        rows, running = self._node.layout.rows, {chunk.request for chunk in self._made.step(group)}
        for number in set(group) & rows.of.keys() - running:
            rows.release(number)

    def _swap_out(self, group: Sequence[int]) -> None:
        """Move the unfinished requests of a group to the host, and free their device blocks."""
        device, host = self._node.layout.rows, self._node.host
        if host is None:
            return  # the contiguous layout keeps every request on the device
        for number in [number for number in group if number in device.of]:
            blocks = device.of[number]
            to = self._host_rows.reserve(number, len(blocks))
            self._node.engine.copy(host[to], self._node.cache[blocks]).result()
            device.release(number)
            self._out += 1

    def _swap_in(self, group: Sequence[int]) -> None:
        """Move the unfinished requests of a group from the host to free device blocks."""
        device, host = self._node.layout.rows, self._node.host
        if host is None:
            return
        for number in [number for number in group if number in self._host_rows.of]:
            blocks = self._host_rows.of[number]
            to = device.reserve(number, len(blocks))
            self._node.engine.copy(self._node.cache[to], host[blocks]).result()
            self._host_rows.release(number)
            self._in += 1


def run(setup: Setup, pipe: Connection, result: Connection) -> None:
    """Run the process."""
    result.send(Decode(setup, pipe).run())
