"""The half of the connector in vLLM's scheduler: it decides what to hand over, and moves nothing."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

from llm_datadist.integrations.vllm.handover import Handover, digest
from llm_datadist.integrations.vllm.step import Receive, Send, Step

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
    """

    def __init__(self, engine_id: str, block_sizes: list[int], *, producer: bool, consumer: bool) -> None:
        self._engine_id = engine_id
        self._block_sizes = block_sizes
        self._producer = producer
        self._consumer = consumer
        self._addresses: list[str] = []
        self._step = Step()
        # What prefill has said of the requests that wait here, or None if it cannot be used.
        self._handovers: dict[str, Handover | None] = {}

    def set_addresses(self, addresses: dict[int, str]) -> None:
        """Take the addresses of the workers, by rank."""
        self._addresses = [addresses[rank] for rank in sorted(addresses)]

    def tokens_to_load(self, request: Any, computed: int) -> int:
        """Return how many tokens of the prompt come from prefill, after those that are computed already."""
        params = request.kv_transfer_params or {}
        if not self._consumer or not params.get("do_remote_prefill") or self._handover(request) is None:
            return 0
        return max(0, int(request.num_prompt_tokens) - computed)

    def allocated(self, request: Any, groups: Sequence[Sequence[Any]], external: int) -> None:
        """Take the blocks that vLLM has allocated for a request, and receive into those that need content.

        Args:
            request: the request.
            groups: vLLM's blocks of each KV cache group, in the order of tokens.
            external: number of tokens that come from prefill. If it is 0, prefill may free its blocks.
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
        """Decide what becomes of the blocks of a finished request.

        Args:
            request: the request.
            groups: the numbers of its blocks in each KV cache group.
            complete: whether the request has finished normally, so that the KV of its prompt is complete.

        Returns:
            The ``kv_transfer_params`` of the answer, if the blocks must be kept for decode; ``None`` otherwise.
        """
        params = request.kv_transfer_params or {}
        if self._consumer and params.get("do_remote_prefill"):
            # It ends before it was scheduled here. Prefill may free its blocks.
            params["do_remote_prefill"] = False
            handover = self._handover(request)
            if handover is not None:
                self._receive(request, handover, [], request.num_prompt_tokens)
        self._handovers.pop(request.request_id, None)
        if not self._producer or not params.get("do_remote_decode") or not complete:
            return None
        if not self._addresses:
            logger.error(
                "request %s is not handed over: the workers have not said where they listen", request.request_id
            )
            return None
        counts = [-(-request.num_prompt_tokens // size) for size in self._block_sizes]
        blocks = [list(group[:count]) for group, count in zip(groups, counts)]
        if not any(any(group) for group in blocks):
            return None
        self._step.sends.append(Send(request.request_id, [[block for block in group if block] for group in blocks]))
        prompt = (request.num_prompt_tokens, digest(request.prompt_token_ids))
        names = (request.request_id, self._engine_id, self._addresses)
        return Handover(*names, *prompt, self._block_sizes, blocks).params()

    def take_step(self) -> Step:
        """Return the work for the workers, and begin to collect that of the next step."""
        step, self._step = self._step, Step()
        return step

    def _handover(self, request: Any) -> Handover | None:
        name = request.request_id
        if name not in self._handovers:
            self._handovers[name] = self._parsed(request)
        return self._handovers[name]

    def _parsed(self, request: Any) -> Handover | None:
        try:
            handover = Handover.parse(request.kv_transfer_params, len(self._block_sizes))
            handover.check_prompt(request.num_prompt_tokens, request.prompt_token_ids)
        except ValueError as error:
            # vLLM computes the prompt itself then.
            logger.warning("request %s is not received from prefill: %s", request.request_id, error)
            return None
        return handover

    def _receive(self, request: Any, handover: Handover, blocks: list[list[int]], first_token: int) -> None:
        total = request.num_prompt_tokens
        self._step.receives.append(Receive(request.request_id, handover, blocks, first_token, total))
