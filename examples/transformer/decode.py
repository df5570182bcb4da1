"""The decode process: receives the KV of each group and continues from it. Groups take turns.

With blocks, the device cache holds two groups: the current one and the next one. The others are swapped out to the host
cache, and are later swapped in to other blocks. Not for: prompts (`prefill`).
"""

from __future__ import annotations

from collections import deque
from typing import TYPE_CHECKING, Any, NamedTuple

from generation import Generation
from layouts import Rows
from llm_datadist import LLMClusterInfo, LLMRole, LLMStatusCode
from node import LIMIT_S, PREFILL, Node, Setup

if TYPE_CHECKING:
    from collections.abc import Sequence
    from multiprocessing.connection import Connection

TURN = 6
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
        self._paged = setup.layout == "paged"
        _, device_rows, host_rows = setup.rows
        self._node = Node(setup, LLMRole.DECODER, device_rows, host_rows if self._paged else 0, pipe)
        if self._paged:
            self._host, self._host_rows = self._node.host_cache(host_rows), Rows(host_rows, seed=3)
        self._made = Generation(setup.work.requests)
        self._out = self._in = 0

    def run(self) -> Served:
        """Serve every group to its end."""
        try:
            self._link(self._node.receive())
            self._serve()
        finally:
            self._node.close()
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
        """Reserve rows for a group, and send their block indices or slot addresses to prefill."""
        layout, node = self._node.layout, self._node
        places: dict[int, Any] = {}
        for number in group:
            request = self._work.requests[number]
            rows = layout.rows.reserve(number, layout.rows_for(request.tokens))
            if self._paged:
                places[number] = rows[: layout.rows_for(len(request.prompt))]
            else:
                places[number] = [address + rows[0] * node.row_bytes for address in node.cache.tensor_addrs]
        node.send(places)

    def _arrive(self) -> None:
        """Wait until prefill reports that a group has arrived, and take its first tokens and logits."""
        for number, (tokens, logits) in self._node.receive().items():
            self._made.tokens[number] += tokens
            self._made.logits[number] += logits

    def _generate(self, group: Sequence[int]) -> None:
        """Generate the tokens of one turn, and release the rows of requests that are done."""
        for _ in range(TURN):
            batch = self._made.step(group)
            if not batch:
                break
            self._made.take([chunk.request for chunk in batch], self._model.forward(batch, self._node.layout))
        rows, running = self._node.layout.rows, {chunk.request for chunk in self._made.step(group)}
        for number in set(group) & rows.of.keys() - running:
            rows.release(number)

    def _swap_out(self, group: Sequence[int]) -> None:
        """Move the unfinished requests of a group to the host, and free their device blocks."""
        device = self._node.layout.rows
        for number in [number for number in group if self._paged and number in device.of]:
            blocks = device.of[number]
            to = self._host_rows.reserve(number, len(blocks))
            self._node.manager.swap_blocks(self._node.cache, self._host, dict(zip(blocks, to)))
            device.release(number)
            self._out += 1

    def _swap_in(self, group: Sequence[int]) -> None:
        """Move the unfinished requests of a group from the host to free device blocks."""
        device = self._node.layout.rows
        for number in [number for number in group if self._paged and number in self._host_rows.of]:
            blocks = self._host_rows.of[number]
            to = device.reserve(number, len(blocks))
            self._node.manager.swap_blocks(self._host, self._node.cache, dict(zip(blocks, to)))
            self._host_rows.release(number)
            self._in += 1

    def _link(self, address: str) -> None:
        ip, _, port = address.rpartition(":")
        peer = LLMClusterInfo()
        peer.remote_cluster_id = PREFILL
        peer.append_local_ip_info("127.0.0.1", 0)
        peer.append_remote_ip_info(ip, int(port))
        code, _ = self._node.dist.link_clusters([peer], int(LIMIT_S * 1000))
        if code != LLMStatusCode.LLM_SUCCESS:
            raise RuntimeError(f"linking to prefill at {address} gave {code.name}")


def run(setup: Setup, pipe: Connection, result: Connection) -> None:
    """Run the process."""
    result.send(Decode(setup, pipe).run())
