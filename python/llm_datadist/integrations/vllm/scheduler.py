"""The half of the connector in vLLM's scheduler: it decides what to hand over, and moves nothing."""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llm_datadist.integrations.vllm.handover import Handover, digest_of, names_prefill, new_ticket, ticket_of
from llm_datadist.integrations.vllm.prompts import Prompts, prompt_of, whole
from llm_datadist.integrations.vllm.step import Await, Cancel, Receive, Send, Step, Withdraw

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llm_datadist.integrations.vllm.allowed_peers import AllowedPeers

__all__ = ["SchedulerSide"]

logger = logging.getLogger("vllm.llm_datadist")


@dataclass
class _Ticket:
    """The ticket of a request of prefill that has not finished."""

    name: str
    given: bool  # whether the proxy has given it
    request: Any
    # The invalid blocks of each report that came after vLLM had computed tokens, and how many it had computed then.
    invalid: list[tuple[frozenset[int], int]] = field(default_factory=list)

    def used_invalid(self, blocks: Sequence[int], block_size: int) -> bool:
        """Return whether one of the ``blocks`` of the request was invalid, and vLLM did not compute it again."""
        return any(block in invalid for invalid, tokens in self.invalid for block in blocks[: -(-tokens // block_size)])


class SchedulerSide:
    """The state of the scheduler's half: the work that was decided since the last step.

    Args:
        engine_id: the engine id of this vLLM.
        block_sizes: tokens in a block, for each KV cache group.
        producer: whether this vLLM hands requests over.
        consumer: whether this vLLM receives requests.
        allowed: the peers from which requests may be received.
        layerwise: whether blocks may be lent while their request is computed. vLLM must keep them until it ends.
        copied: whether the workers copy blocks to host memory before they lend them. Requests without a ticket of the
            proxy are then lent while they are computed, too, so that little is left to copy when they have finished.
        stages: the pipeline-parallel size.
    """

    def __init__(
        self,
        engine_id: str,
        block_sizes: list[int],
        allowed: AllowedPeers,
        *,
        producer: bool,
        consumer: bool,
        layerwise: bool,
        copied: bool = False,
        stages: int = 1,
    ) -> None:
        self._engine_id = engine_id
        self._block_sizes = block_sizes
        self._allowed = allowed
        self._producer = producer
        self._consumer = consumer
        self._layerwise = layerwise and producer
        self._copied = copied
        self._stages = stages
        # The addresses of the workers, in order.
        self._addresses: list[str] = []
        # The lists in the responses of the first step, to be filled: vLLM ends the requests of a step before it passes
        # on what the workers have reported, and they report their addresses in the first step.
        self._unfilled: list[list[str]] = []
        self._step = Step()
        self._prompts = Prompts(block_sizes[0])
        # Prefill: the tickets of requests that have not finished, by the id of the request.
        self._tickets: dict[str, _Ticket] = {}
        # The tickets of finished requests that are lent, by the id of the request.
        self._lent: dict[str, str] = {}
        # The tickets of both.
        self._taken: set[str] = set()
        # Decode: the requests that wait here for blocks.
        self._waiting: set[str] = set()
        # The requests that the workers hold.
        self._held: set[str] = set()

    def set_addresses(self, addresses: dict[int, str]) -> None:
        """Take the addresses of the workers, by their numbers."""
        self._addresses = [addresses[worker] for worker in sorted(addresses)]
        for response in self._unfilled:
            response[:] = self._addresses
        self._unfilled.clear()

    def arrived(self, request: Any) -> None:
        """Take a new request.

        Prefill keeps the blocks of a request for decode from now on. If the proxy has given a ticket to a request of
        prefill, or if blocks are copied first, its blocks are lent while they are computed.
        """
        params = request.kv_transfer_params or {}
        if self._consumer and names_prefill(params):
            self._await(request)
        if not self._producer or not params.get("do_remote_decode"):
            return
        try:
            given = ticket_of(params)
        except ValueError as error:
            logger.error("request %s is not handed over: %s", request.request_id, error)  # noqa: TRY400 - says all
            return
        ticket = given or new_ticket()
        if ticket in self._taken:
            logger.error("request %s is not handed over: another one has the ticket %r", request.request_id, ticket)
            return
        self._tickets[request.request_id] = _Ticket(ticket, given is not None, request)
        self._taken.add(ticket)
        if self._layerwise and (given is not None or self._copied):
            self._prompts.begin(request, ticket)

    def tokens_to_load(self, request: Any, computed: int) -> int:
        """Return how many tokens of the prompt come from prefill, after those that are computed already."""
        return max(0, int(request.num_prompt_tokens) - computed) if request.request_id in self._waiting else 0

    def allocated(self, request: Any, groups: Sequence[Sequence[Any]], external: int) -> None:
        """Take the blocks that vLLM has allocated for a request, and receive into those that need content.

        ``external`` tokens come from prefill. If there are none, because the prompt is in the prefix cache or another
        connector loads it, prefill may free its blocks.
        """
        name = request.request_id
        if name not in self._waiting:
            return
        self._waiting.discard(name)  # vLLM calls again for this request
        if not external:
            self._cancel(name)
            return
        # Null blocks have no content, and blocks with a hash are in the prefix cache.
        blocks = [
            [0 if block.is_null or block.block_hash is not None else block.block_id for block in group]
            for group in groups
        ]
        total = request.num_prompt_tokens
        self._step.receives.append(Receive(name, blocks, total - external, total))

    def received(self, requests: set[str]) -> None:
        """Note that the receives of requests have ended in all workers."""
        self._held -= requests

    def invalid(self, blocks: set[int]) -> None:
        """Note that other connectors have failed to load blocks, after vLLM has taken tokens back because of that.

        vLLM takes the computed tokens of one request back, which computes the blocks again. It keeps those that other
        requests have computed from the same blocks in the meantime.
        """
        shared = frozenset(blocks)
        for ticket in self._tickets.values() if shared else ():
            if ticket.request.num_computed_tokens:
                ticket.invalid.append((shared, ticket.request.num_computed_tokens))

    def finished(self, request: Any, groups: Sequence[Sequence[int]], complete: bool) -> dict[str, Any] | None:
        """Decide what becomes of the blocks of a finished request, which ``groups`` has for each KV cache group.

        If it is not ``complete``, the request has not finished normally, and the KV of its prompt may lack something.
        A request is not handed over either if it ends before vLLM has computed again what it took back, or if it may
        have been computed from blocks that another connector failed to load.

        Returns:
            The ``kv_transfer_params`` of the response, if the blocks must be kept for decode; ``None`` otherwise.
        """
        name = request.request_id
        self._waiting.discard(name)
        if name in self._held:
            # It ends before it was received. Prefill may free its blocks.
            self._cancel(name)
        ticket = self._tickets.pop(name, None)
        if ticket is None:
            return None
        if complete and (
            request.num_computed_tokens < request.num_prompt_tokens
            or ticket.used_invalid(groups[0], self._block_sizes[0])
        ):
            logger.warning("request %s is not handed over, because another connector failed to load its blocks", name)
            complete = False
        return self._handed_over(request, ticket.name, ticket.given, groups, complete)

    def _handed_over(
        self, request: Any, ticket: str, given: bool, groups: Sequence[Sequence[int]], complete: bool
    ) -> dict[str, Any] | None:
        name = request.request_id
        begun = self._prompts.end(name)
        # A preempted prompt has had parts, although none of them is lent now. The workers still know its ticket.
        known = begun is not None and begun.parts > 0
        if complete:
            prompt = begun or prompt_of(request, ticket)
            in_parts = prompt.lent > 0
            parts = whole(prompt, groups, self._block_sizes)
            if in_parts or any(block for part in parts for group in part.blocks for block in group):
                self._step.parts += parts
                self._step.sends.append(Send(name, ticket))
                self._lent[name] = ticket
                addresses = self._addresses.copy()  # the program may change its response
                if not addresses:
                    self._unfilled.append(addresses)
                common = (self._engine_id, addresses, prompt.digest, self._block_sizes, self._stages)
                return Handover(ticket, *common).params()
        self._taken.discard(ticket)
        if given or known:
            # Decode may have asked for it, or read it.
            self._step.withdrawn.append(Withdraw(ticket, ended=True))
        return None

    def freed(self, requests: set[str]) -> None:
        """Note that all workers have ended the lending of requests, so that their tickets can be used again."""
        for name in requests:
            self._taken.discard(self._lent.pop(name, ""))

    def take_step(self, output: Any) -> Step:
        """Return the work of the step of a ``SchedulerOutput``, and begin to collect that of the next one."""
        step, self._step = self._step, Step()
        if self._layerwise:
            withdrawn, parts = self._prompts.scheduled(output)
            step.withdrawn += withdrawn
            step.parts += parts
        return step

    def _cancel(self, name: str) -> None:
        self._held.discard(name)
        self._step.cancelled.append(Cancel(name))

    def _await(self, request: Any) -> None:
        """Take where prefill has a request. The workers begin to hold it."""
        name, given = request.request_id, request.kv_transfer_params
        try:
            digest = digest_of(request)
            handover = Handover.parse(given, self._block_sizes, digest, self._allowed, self._stages)
        except ValueError as error:
            # vLLM computes the prompt itself then.
            logger.warning("request %s is not received from prefill: %s", name, error)
            return
        self._waiting.add(name)
        self._held.add(name)
        self._step.awaited.append(Await(name, handover))
