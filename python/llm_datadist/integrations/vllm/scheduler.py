"""The half of the connector in vLLM's scheduler: it decides what to hand over, and moves nothing."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from llm_datadist.integrations.vllm.handover import Handover, digest_of, own_ticket, ticket_of
from llm_datadist.integrations.vllm.prompts import Prompts, prompt_of, whole
from llm_datadist.integrations.vllm.step import Receive, Send, Step, Withdraw

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["SchedulerSide"]

logger = logging.getLogger("vllm.llm_datadist")


class SchedulerSide:
    """The state of the scheduler's half: the work that was decided since the last step.

    Args:
        engine_id: the engine id of this vLLM.
        block_sizes: tokens in a block, for each KV cache group.
        producer: whether this vLLM hands requests over.
        consumer: whether this vLLM receives requests.
        layerwise: whether blocks may be lent while their request is computed. vLLM must keep them until it ends.
    """

    def __init__(
        self, engine_id: str, block_sizes: list[int], *, producer: bool, consumer: bool, layerwise: bool
    ) -> None:
        self._engine_id = engine_id
        self._block_sizes = block_sizes
        self._producer = producer
        self._consumer = consumer
        self._layerwise = layerwise
        self._addresses: list[str] = []
        self._step = Step()
        self._prompts = Prompts(block_sizes[0])
        # The tickets of requests that have not finished, by the id of the request.
        self._tickets: dict[str, str] = {}
        # The tickets of finished requests that are lent, by the id of the request.
        self._lent: dict[str, str] = {}
        # The tickets of both.
        self._taken: set[str] = set()
        # The parsed kv_transfer_params of requests that wait here, or None if they are invalid.
        self._handovers: dict[str, Handover | None] = {}

    def set_addresses(self, addresses: dict[int, str]) -> None:
        """Take the addresses of the workers, by rank."""
        self._addresses = [addresses[rank] for rank in sorted(addresses)]

    def arrived(self, request: Any) -> None:
        """Take a new request. If the proxy has given it a ticket, its blocks are lent while they are computed."""
        params = request.kv_transfer_params or {}
        if not self._producer or not params.get("do_remote_decode"):
            return
        try:
            given = ticket_of(params)
        except ValueError as error:
            logger.error("request %s is not handed over: %s", request.request_id, error)  # noqa: TRY400 - says all
            return
        ticket = given or own_ticket(request.request_id)
        if ticket in self._taken:
            logger.error("request %s is not handed over: another one has the ticket %r", request.request_id, ticket)
            return
        self._tickets[request.request_id] = ticket
        self._taken.add(ticket)
        if given is not None and self._layerwise:
            self._prompts.begin(request, ticket)

    def tokens_to_load(self, request: Any, computed: int) -> int:
        """Return how many tokens of the prompt come from prefill, after those that are computed already."""
        params = request.kv_transfer_params or {}
        if not self._consumer or not params.get("do_remote_prefill") or self._handover(request) is None:
            return 0
        return max(0, int(request.num_prompt_tokens) - computed)

    def allocated(self, request: Any, groups: Sequence[Sequence[Any]], external: int) -> None:
        """Take the blocks that vLLM has allocated for a request, and receive into those that need content.

        ``external`` tokens come from prefill. If there are none, prefill may free its blocks.
        """
        params = request.kv_transfer_params or {}
        if not self._consumer or not params.get("do_remote_prefill"):
            return
        handover = self._handover(request)
        params["do_remote_prefill"] = False  # vLLM calls again for this request
        self._handovers.pop(request.request_id, None)
        if handover is None:
            return
        total = request.num_prompt_tokens
        # Null blocks have no content, and blocks with a hash are in the prefix cache.
        blocks = [
            [0 if block.is_null or block.block_hash is not None else block.block_id for block in group]
            for group in groups
        ]
        self._receive(request, handover, blocks if external else [], total - external)

    def finished(self, request: Any, groups: Sequence[Sequence[int]], complete: bool) -> dict[str, Any] | None:
        """Decide what becomes of the blocks of a finished request, which ``groups`` has for each KV cache group.

        If it is not ``complete``, the request has not finished normally, and the KV of its prompt may lack something.

        Returns:
            The ``kv_transfer_params`` of the response, if the blocks must be kept for decode; ``None`` otherwise.
        """
        params = request.kv_transfer_params or {}
        if self._consumer and params.get("do_remote_prefill"):
            # It ends before it was scheduled here. Prefill may free its blocks.
            params["do_remote_prefill"] = False
            handover = self._handover(request)
            if handover is not None:
                self._receive(request, handover, [], request.num_prompt_tokens)
        self._handovers.pop(request.request_id, None)
        if not self._producer or not params.get("do_remote_decode"):
            return None
        ticket = self._tickets.pop(request.request_id, None)
        return None if ticket is None else self._handed_over(request, ticket, groups, complete)

    def _handed_over(
        self, request: Any, ticket: str, groups: Sequence[Sequence[int]], complete: bool
    ) -> dict[str, Any] | None:
        name = request.request_id
        begun = self._prompts.end(name)
        if complete and not self._addresses:
            logger.error("request %s is not handed over: vLLM has not passed on the addresses of the workers", name)
        elif complete:
            prompt = begun or prompt_of(request, ticket)
            in_parts = prompt.lent > 0
            parts = whole(prompt, groups, self._block_sizes)
            if in_parts or any(block for part in parts for group in part.blocks for block in group):
                self._step.parts += parts
                self._step.sends.append(Send(name, ticket))
                self._lent[name] = ticket
                place = (self._engine_id, self._addresses, prompt.digest, self._block_sizes)
                return Handover(ticket, *place).params()
        self._taken.discard(ticket)
        if begun is not None or ticket != own_ticket(name):
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
        withdrawn, parts = self._prompts.scheduled(output)
        step.withdrawn += withdrawn
        step.parts += parts
        return step

    def _handover(self, request: Any) -> Handover | None:
        name = request.request_id
        if name not in self._handovers:
            given = request.kv_transfer_params
            try:
                self._handovers[name] = Handover.parse(given, self._block_sizes, digest_of(request))
            except ValueError as error:
                # vLLM computes the prompt itself then.
                logger.warning("request %s is not received from prefill: %s", name, error)
                self._handovers[name] = None
        return self._handovers[name]

    def _receive(self, request: Any, handover: Handover, blocks: list[list[int]], first_token: int) -> None:
        total = request.num_prompt_tokens
        self._step.receives.append(Receive(request.request_id, handover, blocks, first_token, total))
