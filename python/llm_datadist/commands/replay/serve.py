"""The life of requests on the decode node: admit, pull, verify, finish. `table` plans, `node` moves bytes."""

from __future__ import annotations

import heapq
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llm_datadist.commands.replay.content import Pattern

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llm_datadist.commands.replay.node import Node
    from llm_datadist.commands.replay.prefill import Prefill, Restart
    from llm_datadist.commands.replay.table import BlockTable, Plan
    from llm_datadist.commands.replay.trace import Request

MS_PER_TOKEN = 25.0
"""Simulated milliseconds that a request takes for each token it generates."""


class WrongByteError(Exception):
    """A block has bytes that were not written to it. The text names the place."""


BLOCKS = ("device_hits", "host_hits", "computed", "evicted", "dropped", "private", "verified", "wrong")
"""What `Outcome` counts of blocks."""


@dataclass
class Outcome:
    """The counters of a replay. `largest_blocks` is the size of the largest request that was `too_large`."""

    requests: int = 0
    too_large: int = 0
    largest_blocks: int = 0
    finished_early: int = 0
    most_running: int = 0
    blocks: dict[str, int] = field(default_factory=lambda: dict.fromkeys(BLOCKS, 0))
    restarts: list[Restart] = field(default_factory=list)


class Server:
    """Serves requests on a node, at most `concurrency` at a time, with blocks that a prefill process computes.

    `outcome` is updated while requests are served, so that it is also right when the replay fails.
    """

    def __init__(
        self, node: Node, prefill: Prefill, table: BlockTable, concurrency: int, seed: int, outcome: Outcome
    ) -> None:
        self.outcome = outcome
        self._node, self._prefill, self._table, self._concurrency = node, prefill, table, concurrency
        self._pattern = Pattern(node.geometry.tensors, node.geometry.row_bytes, seed)
        self._running: list[tuple[float, int, Request, Plan]] = []  # by the time at which each ends

    def run(self, requests: Sequence[Request], progress: Callable[[Outcome], None]) -> None:
        """Serve all requests in order, then check every block that is still cached. Raises WrongByteError."""
        for number, request in enumerate(requests):
            while self._running and self._running[0][0] <= request.arrival_ms:
                self._finish_first()
            while len(self._running) >= self._concurrency:
                self._finish_first()
                self.outcome.finished_early += 1
            self._admit(number, request)
            progress(self.outcome)
        while self._running:
            self._finish_first()
        self._check_cached(len(requests))

    def _admit(self, number: int, request: Request) -> None:
        """Plan a request and carry out the plan. It then runs, with private blocks for what it generates."""
        self.outcome.requests += 1
        private = _private_blocks(request, self._node.geometry.tokens)
        plan = self._table.plan(request.blocks, private)
        while plan is None and self._running:
            self._finish_first()
            self.outcome.finished_early += 1
            plan = self._table.plan(request.blocks, private)
        if plan is None:
            self.outcome.too_large += 1
            self.outcome.largest_blocks = max(self.outcome.largest_blocks, len(request.blocks) + private)
            return
        self._run_plan(number, plan)
        ends = request.arrival_ms + MS_PER_TOKEN * request.output_tokens
        heapq.heappush(self._running, (ends, number, request, plan))
        self.outcome.most_running = max(self.outcome.most_running, len(self._running))

    def _run_plan(self, number: int, plan: Plan) -> None:
        self._node.swap_out(plan.swap_out)
        self._node.swap_in(plan.swap_in)
        self._prefill.bring(number, [block for block, _ in plan.writes], [slot for _, slot in plan.writes])
        for block, slot in plan.hits:
            self._verify(number, block, slot, "device")
        for block, _, slot in plan.swap_in:
            self._verify(number, block, slot, "host")
        for block, slot in plan.writes:
            self._verify(number, block, slot, "pulled")
        counts = [len(plan.hits), len(plan.swap_in), len(plan.writes), len(plan.evicted), len(plan.dropped)]
        for name, count in zip(BLOCKS, counts):
            self.outcome.blocks[name] += count
        self.outcome.blocks["private"] += len(plan.private)

    def _finish_first(self) -> None:
        """End the running request that is due first, and release all of its slots."""
        _, _, request, plan = heapq.heappop(self._running)
        self._table.release(request.blocks, plan.private)

    def _check_cached(self, number: int) -> None:
        device, host = self._table.cached()
        for block, slot in device.items():
            self._verify(number, block, slot, "device, last check")
        for block, slot in host.items():
            self._verify(number, block, slot, "host, last check", on_host=True)

    def _verify(self, number: int, block: int, slot: int, tier: str, *, on_host: bool = False) -> None:
        """Compare every byte of a block with what was written to it. Raises WrongByteError."""
        rows = self._node.host_rows if on_host else self._node.device_rows
        wrong = self._pattern.mismatch(rows, slot, block)
        self.outcome.blocks["verified"] += 1
        if wrong is not None:
            self.outcome.blocks["wrong"] += 1
            raise WrongByteError(
                f"request {number}: block {block} ({tier}, slot {slot}): tensor {wrong.tensor}, first wrong byte at "
                f"offset {wrong.offset}: expected 0x{wrong.expected:02x}, got 0x{wrong.got:02x}"
            )


def _private_blocks(request: Request, tokens: int) -> int:
    """Return how many private blocks a request needs for the tokens that it generates."""
    filled = request.input_tokens % tokens
    if not filled:
        return -(-request.output_tokens // tokens)
    if not request.output_tokens:
        return 0
    beyond = max(request.output_tokens - (tokens - filled), 0)
    return 1 + -(-beyond // tokens)
