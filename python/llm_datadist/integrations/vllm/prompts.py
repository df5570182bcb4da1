"""Prefill: the prompts that are computed for decode, and which of their blocks are lent when.

A request to which the proxy has given a ticket is lent in parts, each in the step that computes it, if the model has
one KV cache group whose blocks vLLM keeps until the request ends. Decode reads the layers of a part while the next
ones are computed. Any other request is lent as a whole when it has finished.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llm_datadist.integrations.vllm.handover import digest_of
from llm_datadist.integrations.vllm.step import Part, Withdraw

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Prompt", "Prompts"]

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
    """The prompts with a ticket that vLLM computes, by the id of the request. They have one KV cache group."""

    def __init__(self, block_size: int) -> None:
        self._block_size = block_size
        self._prompts: dict[str, Prompt] = {}

    def begin(self, request: Any, ticket: str) -> None:
        """Take a request that vLLM will compute."""
        self._prompts[request.request_id] = prompt_of(request, ticket)

    def end(self, request_id: str) -> Prompt | None:
        """Forget a request that has ended, and return it."""
        return self._prompts.pop(request_id, None)

    def scheduled(self, output: Any) -> tuple[list[Withdraw], list[Part]]:
        """Return what becomes of the prompts in a step: those that are preempted, and the parts that it computes."""
        if not self._prompts:
            return [], []
        withdrawn = [self._preempted(name) for name in output.preempted_req_ids or () if name in self._prompts]
        parts: list[Part] = []
        for new in output.scheduled_new_reqs:
            if new.req_id in self._prompts:
                self._prompts[new.req_id].blocks = list(new.block_ids[0])
                parts += self._computed_in(new.req_id, new.num_computed_tokens, output)
        cached = output.scheduled_cached_reqs
        for name, blocks, computed in zip(cached.req_ids, cached.new_block_ids, cached.num_computed_tokens):
            if name in self._prompts:
                more = [] if blocks is None else list(blocks[0])
                if name in cached.resumed_req_ids:
                    self._prompts[name].blocks = more
                else:
                    self._prompts[name].blocks += more
                parts += self._computed_in(name, computed, output)
        return withdrawn, parts

    def _preempted(self, name: str) -> Withdraw:
        prompt = self._prompts[name]
        prompt.blocks, prompt.lent = [], 0
        return Withdraw(prompt.ticket, ended=False)

    def _computed_in(self, name: str, computed: int, output: Any) -> list[Part]:
        """Return the parts of a prompt of which ``computed`` tokens are in place before the step."""
        prompt, size = self._prompts[name], self._block_size
        count = -(-prompt.num_tokens // size)
        end = min(computed + output.num_scheduled_tokens[name], prompt.num_tokens)
        full = count if end == prompt.num_tokens else end // size
        prompt.blocks = prompt.blocks[:count]
        groups = [[*prompt.blocks, *[0] * (count - len(prompt.blocks))]]
        # This includes blocks of the prefix cache: another request may compute them in this very step.
        return prompt.lend(groups, full, computed=False)


def prompt_of(request: Any, ticket: str) -> Prompt:
    """Return the prompt of a request of vLLM."""
    return Prompt(ticket, digest_of(request), request.num_prompt_tokens)


def whole(prompt: Prompt, groups: Sequence[Sequence[int]], block_sizes: list[int]) -> list[Part]:
    """Lend what is left of a prompt that has finished, with its blocks and block sizes of each KV cache group."""
    counts = [-(-prompt.num_tokens // size) for size in block_sizes]
    blocks = [list(group[:count]) for group, count in zip(groups, counts)]
    return prompt.lend(blocks, max(counts), computed=True)
