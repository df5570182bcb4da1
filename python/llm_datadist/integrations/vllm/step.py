"""What the scheduler of vLLM tells the workers in one step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llm_datadist.integrations.vllm.handover import Handover

__all__ = ["Receive", "Send", "Step"]


@dataclass
class Receive:
    """Have a worker of decode receive the blocks of a request.

    Attributes:
        request: the id of the request here.
        handover: where prefill has the blocks.
        blocks: the blocks here, for each KV cache group, in the order of tokens; 0 for blocks that need no content.
            Empty if nothing is to be read, but prefill may free its blocks.
        first_token: the first token that is read. The earlier ones are in the prefix cache.
        num_tokens: number of tokens of the prompt.
    """

    request: str
    handover: Handover
    blocks: list[list[int]]
    first_token: int
    num_tokens: int


@dataclass
class Send:
    """Have a worker of prefill lend the blocks of a finished request.

    Attributes:
        request: the id of the request.
        blocks: the blocks with content, for each KV cache group.
    """

    request: str
    blocks: list[list[int]]


@dataclass
class Step:
    """The work of one step."""

    receives: list[Receive] = field(default_factory=list)
    sends: list[Send] = field(default_factory=list)
