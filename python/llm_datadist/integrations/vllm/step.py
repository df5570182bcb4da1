"""What the scheduler of vLLM tells the workers in one step."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llm_datadist.integrations.vllm.handover import Handover

__all__ = ["Await", "Cancel", "Part", "Receive", "Send", "Step", "Withdraw"]


@dataclass
class Await:
    """Have a worker of decode hold a request that has arrived in the queue, so that prefill keeps its blocks."""

    request: str  # the id of the request here
    handover: Handover  # where prefill has the blocks


@dataclass
class Receive:
    """Have a worker of decode receive the blocks of a request that it holds."""

    request: str  # the id of the request here
    # The blocks here, for each KV cache group, in the order of tokens; 0 for blocks that need no content.
    blocks: list[list[int]]
    first_token: int  # the first token that is read; the earlier ones are in the prefix cache
    num_tokens: int  # number of tokens of the prompt


@dataclass
class Cancel:
    """Have a worker of decode release a request that it holds, because nothing of it is needed any more.

    A receive that runs is cancelled, and reported when nothing writes to its blocks any more.
    """

    request: str


@dataclass
class Part:
    """Have a worker of prefill lend some blocks of a prompt, one after another in the order of tokens."""

    ticket: str  # the name under which the request is lent
    prompt: str  # the digest of the prompt
    number: int  # the number of the part; parts of one request that follow have larger ones
    first: int  # the index of the first block in the prompt, the same for each KV cache group
    # For each KV cache group. 0 is a block without content, outside the window of a sliding-window group.
    blocks: list[list[int]]
    computed: bool  # whether the blocks have their content; otherwise this step computes it, layer after layer
    last: bool  # whether the part reaches the end of the prompt


@dataclass
class Send:
    """Have a worker of prefill keep a request that has finished until decode has read it, or its lease ends."""

    request: str  # the id of the request
    ticket: str


@dataclass
class Withdraw:
    """Have a worker of prefill withdraw all parts of a request before the blocks are used for something else."""

    ticket: str
    ended: bool  # whether the request has ended; otherwise it was preempted, and its blocks are lent again later


@dataclass
class Step:
    """The work of one step, in the order in which it must be done. The first two belong before the model runs."""

    withdrawn: list[Withdraw] = field(default_factory=list)
    parts: list[Part] = field(default_factory=list)
    sends: list[Send] = field(default_factory=list)
    awaited: list[Await] = field(default_factory=list)
    receives: list[Receive] = field(default_factory=list)
    cancelled: list[Cancel] = field(default_factory=list)
