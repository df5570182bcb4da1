"""Prefill: the prompts that are computed for decode, and which of their blocks are lent when.

If `lent_while_computed` allows it, requests are lent in parts, each in the step that computes it: those to which the
proxy has given a ticket, so that decode reads the layers of a part while the next ones are computed, and all others if
blocks are copied to host memory first, so that little is left to copy at the end. Any other request is lent as a whole
when it has finished. So are all requests once another connector loads blocks within the step that needs them: vLLM
learns only after such a step whether they are valid, and decode could have read what was computed with them.
"""

from __future__ import annotations

import logging
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llm_datadist.integrations.vllm.handover import digest_of
from llm_datadist.integrations.vllm.step import Part, Withdraw

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Prompt", "Prompts", "lent_while_computed"]

logger = logging.getLogger("vllm.llm_datadist")

# The KV caches in which vLLM keeps all blocks of a request until it ends.
_KEPT = ("FullAttentionSpec", "MLAAttentionSpec")
# A part is one message to decode, with the numbers of its blocks. A message has at most 64 KiB.
MAX_BLOCKS = 4096


@dataclass
class Prompt:
    """A prompt, and how much of it is lent."""

    ticket: str  # the name under which it is lent
    digest: str  # the digest of the prompt
    num_tokens: int
    blocks: list[int] = field(default_factory=list)  # those of its only KV cache group that are allocated so far
    lent: int = 0  # how many of its blocks are lent
    parts: int = 0  # how many parts it has had

    def lend(self, groups: list[list[int]], end: int, *, computed: bool) -> list[Part]:
        """Lend the blocks of each KV cache group that are not lent yet, up to index ``end``. A group may have fewer."""
        parts = []
        size = max(1, MAX_BLOCKS // len(groups))
        while self.lent < end:
            until = min(end, self.lent + size)
            blocks = [group[self.lent : until] for group in groups]
            last = all(len(group) <= until for group in groups)
            parts.append(Part(self.ticket, self.digest, self.parts, self.lent, blocks, computed, last))
            self.lent, self.parts = until, self.parts + 1
        return parts


class Prompts:
    """The prompts that are lent while vLLM computes them, by the id of the request. They have one KV cache group."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._prompts: dict[str, Prompt] = {}
        self._only_finished = False  # whether a step has loaded blocks that it needs itself

    def begin(self, request: Any, ticket: str) -> None:
        """Take a request that vLLM will compute."""
        self._prompts[request.request_id] = prompt_of(request, ticket)

    def end(self, request_id: str) -> Prompt | None:
        """Forget a request that has ended, and return it."""
        return self._prompts.pop(request_id, None)

    def scheduled(self, output: Any) -> tuple[list[Withdraw], list[Part]]:
        """Return what a step does with the prompts: those whose parts are withdrawn, and the parts that it computes."""
        withdrawn: list[Withdraw] = []
        parts: list[Part] = []
        # This holds beyond the step. With asynchronous scheduling, later ones begin before vLLM learns how it went.
        if output.has_sync_kv_loads and not self._only_finished:
            self._only_finished = True
            logger.info(
                "another connector loads KV within the step that needs it, so llm_datadist hands over prompts only "
                "when they have finished, and not layer by layer, and copies no blocks ahead"
            )
        if not self._prompts:
            return withdrawn, parts
        for name in output.preempted_req_ids or ():
            if name in self._prompts:
                self._prompts[name].blocks = []
                withdrawn.append(self._withdraw(name))
        for name, count in self._take_blocks(output).items():
            prompt = self._prompts[name]
            # If vLLM takes tokens back without a preemption, it computes them again in the same place.
            if count < min(prompt.lent * self._block_size, prompt.num_tokens):
                withdrawn.append(self._withdraw(name))
            if not self._only_finished:
                parts += self._computed_in(prompt, count + output.num_scheduled_tokens[name])
        return withdrawn, parts

    def _take_blocks(self, output: Any) -> dict[str, int]:
        """Take the blocks of the prompts in a step. Return how many tokens of each are in place before the step."""
        computed: dict[str, int] = {}
        for new in output.scheduled_new_reqs:
            if new.req_id in self._prompts:
                self._prompts[new.req_id].blocks = list(new.block_ids[0])
                computed[new.req_id] = new.num_computed_tokens
        cached = output.scheduled_cached_reqs
        for name, blocks, count in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens):
            if name in self._prompts:
                more = [] if blocks is None else list(blocks[0])
                if name in cached.resumed_req_ids:
                    self._prompts[name].blocks = more
                else:
                    self._prompts[name].blocks += more
                computed[name] = count
        return computed

    def _withdraw(self, name: str) -> Withdraw:
        prompt = self._prompts[name]
        prompt.lent = 0
        return Withdraw(prompt.ticket, ended=False)

    def _computed_in(self, prompt: Prompt, end: int) -> list[Part]:
        """Return the parts of a prompt of which ``end`` tokens are in place after the step."""
        size = self._block_size
        count = -(-prompt.num_tokens // size)
        full = count if end >= prompt.num_tokens else end // size
        prompt.blocks = prompt.blocks[:count]
        groups = [[*prompt.blocks, *[0] * (count - len(prompt.blocks))]]
        # This includes blocks of the prefix cache: another request may compute them in this very step.
        return prompt.lend(groups, full, computed=False)


def lent_while_computed(config: Any, specs: Sequence[Any]) -> bool:
    """Return whether prompts may be lent while they are computed, with a configuration and KV cache specs of vLLM."""
    if len(specs) != 1 or type(specs[0]).__name__ not in _KEPT:
        return False
    # Microbatches run side by side, and each reports a layer when it has computed its own tokens. With speculative
    # decoding, a step may leave out the layers of the draft model. The whole request would fail then.
    return not config.parallel_config.use_ubatching and config.speculative_config is None


def prompt_of(request: Any, ticket: str) -> Prompt:
    """Return the prompt of a request of vLLM."""
    return Prompt(ticket, digest_of(request), request.num_prompt_tokens)


def whole(prompt: Prompt, groups: Sequence[Sequence[int]], block_sizes: list[int]) -> list[Part]:
    """Lend what is left of a prompt that has finished, with its blocks and block sizes of each KV cache group."""
    counts = [-(-prompt.num_tokens // size) for size in block_sizes]
    blocks = [list(group[:count]) for group, count in zip(groups, counts)]
    return prompt.lend(blocks, max(counts), computed=True)
