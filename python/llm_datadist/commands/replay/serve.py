"""The life of requests on the decode node: admit, pull, verify, diverge, finish. `table` plans, `node` moves bytes.

The prefill process computes one request while the decode process works on the previous one.
"""

from __future__ import annotations

import heapq
import time
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

from llm_datadist.commands.replay.content import Pattern, Tail, salt
from llm_datadist.commands.replay.trace import MAX_ID, Request

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from llm_datadist.commands.replay.node import Node
    from llm_datadist.commands.replay.prefill import Prefill, Restart
    from llm_datadist.commands.replay.table import BlockTable, Plan

MS_PER_TOKEN = 25.0
"""Simulated milliseconds that a request takes for each token it generates."""


class WrongByteError(Exception):
    """A block has bytes that were not written to it. The text names the place."""


class Own(NamedTuple):
    """A private block of a running request: device slot, block id of its content, and the tail that was appended."""

    slot: int
    content: int
    tail: Tail | None


class Live(NamedTuple):
    """A running request: its position in the trace, the request, its plan and its private blocks."""

    number: int
    request: Request
    plan: Plan
    own: list[Own]


BLOCKS = (
    "device_hits", "host_hits", "computed", "evicted", "dropped", "diverged", "private", "verified", "wrong",
)  # fmt: skip
"""What `Outcome` counts of blocks."""


@dataclass
class Outcome:
    """The counters of a replay.

    `largest_blocks` is the size of the largest request that was `too_large`. `seconds` is by activity.
    """

    requests: int = 0
    too_large: int = 0
    largest_blocks: int = 0
    finished_early: int = 0
    most_running: int = 0
    blocks: dict[str, int] = field(default_factory=lambda: dict.fromkeys(BLOCKS, 0))
    restarts: list[Restart] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=lambda: {"plan": 0.0, "write": 0.0, "verify": 0.0})


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
        self._running: list[tuple[float, int, Live]] = []
        self._admitted: Live | None = None
        self._next_private = MAX_ID + 1

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
        """Plan a request and request its blocks from prefill. Meanwhile, work on the previous request."""
        self.outcome.requests += 1
        private = _private_blocks(request, self._node.geometry.tokens)
        plan = self._plan(request, private)
        while plan is None and self._running:
            self._finish_first()
            self.outcome.finished_early += 1
            plan = self._plan(request, private)
        if plan is None:
            self.outcome.too_large += 1
            self.outcome.largest_blocks = max(self.outcome.largest_blocks, len(request.blocks) + private)
            return
        self._prefill.compute(number, [block for block, _ in plan.writes])
        self._serve_admitted()
        self._admitted = live = Live(number, request, plan, [])
        ends = request.arrival_ms + MS_PER_TOKEN * request.output_tokens
        heapq.heappush(self._running, (ends, number, live))
        self.outcome.most_running = max(self.outcome.most_running, len(self._running))

    def _serve_admitted(self) -> None:
        """Carry out the latest plan. Plans are carried out in the order in which they are made."""
        if self._admitted is not None:
            live, self._admitted = self._admitted, None
            self._carry_out(live.number, live.plan)
            self._generate(live)

    def _plan(self, request: Request, private: int) -> Plan | None:
        with self._timed("plan"):
            return self._table.plan(request.blocks, private)

    def _carry_out(self, number: int, plan: Plan) -> None:
        self._node.swap_out(plan.swap_out)
        self._node.swap_in(plan.swap_in)
        self._prefill.bring(number, [slot for _, slot in plan.writes])
        with self._timed("verify"):
            for block, slot in plan.hits:
                self.verify(number, block, slot, "device")
            for block, _, slot in plan.swap_in:
                self.verify(number, block, slot, "host")
            for block, slot in plan.writes:
                self.verify(number, block, slot, "pulled")
        counts = [len(plan.hits), len(plan.swap_in), len(plan.writes), len(plan.evicted), len(plan.dropped)]
        for name, count in zip(BLOCKS, counts):
            self.outcome.blocks[name] += count
        self.outcome.blocks["private"] += len(plan.private)

    def _generate(self, live: Live) -> None:
        """Write the generated tokens of a request: into its copy of a partial last block, then into new blocks."""
        node, request = self._node, live.request
        slots = list(live.plan.private)
        filled = request.input_tokens % node.geometry.tokens
        if filled and request.output_tokens:
            shared, copy = request.blocks[-1], slots.pop(0)
            source = self._table.device_slot(shared)
            node.copy_block(source, copy)
            stop = min(filled + request.output_tokens, node.geometry.tokens)
            tail = Tail(filled * node.geometry.token_bytes, stop * node.geometry.token_bytes, salt(live.number))
            with self._timed("write"):
                self._pattern.append(node.device_rows, copy, tail)
            with self._timed("verify"):
                self.verify(live.number, shared, source, "device, shared, after divergence")
                self.verify(live.number, shared, copy, "device, private copy", tail=tail)
            live.own.append(Own(copy, shared, tail))
            self.outcome.blocks["diverged"] += 1
        with self._timed("write"):
            for slot in slots:
                self._pattern.fill(node.device_rows, slot, self._next_private)
                live.own.append(Own(slot, self._next_private, None))
                self._next_private += 1

    def _finish_first(self) -> None:
        """End the running request that is due first: verify its private blocks, and release all of its slots."""
        _, number, live = heapq.heappop(self._running)
        if self._admitted is live:
            self._serve_admitted()
        with self._timed("verify"):
            for own in live.own:
                self.verify(number, own.content, own.slot, "device, private", tail=own.tail)
        with self._timed("plan"):
            self._table.release(live.request.blocks, [own.slot for own in live.own])

    def _check_cached(self, number: int) -> None:
        device, host = self._table.cached()
        with self._timed("verify"):
            for block, slot in device.items():
                self.verify(number, block, slot, "device, last check")
            for block, slot in host.items():
                self.verify(number, block, slot, "host, last check", on_host=True)

    def verify(
        self, number: int, block: int, slot: int, tier: str, *, tail: Tail | None = None, on_host: bool = False
    ) -> None:
        """Compare every byte of a block with what was written to it. Raises WrongByteError."""
        rows = self._node.host_rows if on_host else self._node.device_rows
        wrong = self._pattern.mismatch(rows, slot, block, tail)
        self.outcome.blocks["verified"] += 1
        if wrong is not None:
            self.outcome.blocks["wrong"] += 1
            raise WrongByteError(
                f"request {number}: block {block} ({tier}, slot {slot}): tensor {wrong.tensor}, first wrong byte at "
                f"offset {wrong.offset}: expected 0x{wrong.expected:02x}, got 0x{wrong.got:02x}"
            )

    def verify_granted(self, block: int, slot: int) -> None:
        """Compare a block that was pulled after all requests. Raises WrongByteError."""
        self.verify(self.outcome.requests, block, slot, "granted")

    @contextmanager
    def _timed(self, activity: str) -> Iterator[None]:
        start = time.perf_counter()
        try:
            yield
        finally:
            self.outcome.seconds[activity] += time.perf_counter() - start


def _private_blocks(request: Request, tokens: int) -> int:
    """Return how many private blocks a request needs for the tokens that it generates."""
    filled = request.input_tokens % tokens
    if not filled:
        return -(-request.output_tokens // tokens)
    if not request.output_tokens:
        return 0
    beyond = max(request.output_tokens - (tokens - filled), 0)
    return 1 + -(-beyond // tokens)
