"""What the scheduler of vLLM tells the workers in one step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llm_datadist.integrations.vllm.handover import Handover

__all__ = ["Part", "Receive", "Send", "Step", "Withdraw"]


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
class Part:
    """Have a worker of prefill lend some blocks of a prompt, one after another in the order of tokens.

    Attributes:
        ticket: the name under which the request is lent.
        prompt: the digest of the prompt.
        number: the number of the part. Parts of one request that follow have larger ones.
        first: the index of the first block in the prompt, the same for each KV cache group.
        blocks: the blocks, for each KV cache group. 0 is a block without content, outside the window of a
            sliding-window group.
        computed: whether the blocks have their content. Otherwise this step computes it, layer after layer.
        last: whether the part reaches the end of the prompt.
    """

    ticket: str
    prompt: str
    number: int
    first: int
    blocks: list[list[int]]
    computed: bool
    last: bool


@dataclass
class Send:
    """Have a worker of prefill keep a request that has finished until decode has read it, or its lease ends.

    Attributes:
        request: the id of the request.
        ticket: the name under which it is lent.
    """

    request: str
    ticket: str


@dataclass
class Withdraw:
    """Have a worker of prefill withdraw all parts of a request before the blocks are used for something else.

    Attributes:
        ticket: the name under which the request is lent.
        ended: whether the request has ended. Otherwise it was preempted, and its blocks are lent again later.
    """

    ticket: str
    ended: bool


@dataclass
class Step:
    """The work of one step, in the order in which it must be done. The first two belong before the model runs."""

    withdrawn: list[Withdraw] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    sends: list[Send] = field(default_factory=list)
    receives: list[Receive] = field(default_factory=list)
