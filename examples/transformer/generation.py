"""Requests, groups of requests, greedy generation, its results, and the run in one process.

Not for: where keys and values lie (`layouts`), or two processes (`prefill`, `decode`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from layouts import Plain
from model import Chunk, Model, Shape

if TYPE_CHECKING:
    from collections.abc import Sequence

    from model import Array


class Request(NamedTuple):
    """A prompt, and how many tokens to generate after it."""

    prompt: list[int]
    new_tokens: int

    @property
    def tokens(self) -> int:
        """Positions that the request takes in a cache. The last token takes none: nothing is computed from it."""
        return len(self.prompt) + self.new_tokens - 1


class Workload(NamedTuple):
    """A model and its requests. The requests of a group are computed together, both prompts and new tokens."""

    shape: Shape
    seed: int
    requests: list[Request]
    groups: list[list[int]]
    block_tokens: int = 16

    @classmethod
    def make(cls, shape: Shape, groups: int, seed: int = 7) -> Workload:
        """Draw three requests for each group. Prompts differ in length, from a fifth of the longest sequence up."""
        dice = np.random.default_rng(seed)
        longest = shape.tokens * 5 // 6
        lengths = dice.choice(np.arange(shape.tokens // 5, longest), 3 * groups, replace=False)
        requests = [
            Request(
                dice.integers(shape.vocabulary, size=length).tolist(), int(dice.integers(8, shape.tokens - longest))
            )
            for length in lengths
        ]
        return cls(shape, seed, requests, [[3 * group, 3 * group + 1, 3 * group + 2] for group in range(groups)])

    def model(self) -> Model:
        """Return the model; the same weights in every process."""
        return Model(self.shape, self.seed)


class Generation:
    """The tokens and logits of every request so far."""

    def __init__(self, requests: Sequence[Request]) -> None:
        self.tokens: list[list[int]] = [[] for _ in requests]
        self.logits: list[list[Array]] = [[] for _ in requests]
        self._requests = requests

    def prompts(self, group: Sequence[int]) -> list[Chunk]:
        """Return the batch that computes the prompts of a group."""
        return [Chunk(number, 0, self._requests[number].prompt) for number in group]

    def step(self, group: Sequence[int]) -> list[Chunk]:
        """Return the batch that computes one more token of each request of a group that is not done."""
        return [
            Chunk(number, len(self._requests[number].prompt) + len(self.tokens[number]) - 1, self.tokens[number][-1:])
            for number in group
            if len(self.tokens[number]) < self._requests[number].new_tokens
        ]

    def take(self, group: Sequence[int], logits: Array) -> None:
        """Choose the next token of each request of a batch, and keep its logits."""
        for number, row in zip(group, logits):
            self.tokens[number].append(int(row.argmax()))
            self.logits[number].append(row.copy())


def in_one_process(work: Workload) -> Generation:
    """Run everything in this process, on plain arrays, in the same batches as the two processes."""
    model, cache, made = work.model(), Plain(work.shape), Generation(work.requests)
    for group in work.groups:
        made.take(group, model.forward(made.prompts(group), cache))
        while batch := made.step(group):
            made.take([chunk.request for chunk in batch], model.forward(batch, cache))
    return made


def differences(work: Workload, left: Generation, right: Generation) -> list[str]:
    """Compare tokens and logits bit for bit. Return the first difference of each request that differs."""
    found = []
    for number, request in enumerate(work.requests):
        lengths = [len(part[number]) for run in (left, right) for part in (run.tokens, run.logits)]
        if lengths != [request.new_tokens] * 4:
            found.append(f"request {number}: {request.new_tokens} tokens were asked for, {lengths} are there")
        elif left.tokens[number] != right.tokens[number]:
            found.append(f"request {number}: tokens {left.tokens[number]} and {right.tokens[number]}")
        else:
            wrong = (a.tobytes() != b.tobytes() for a, b in zip(left.logits[number], right.logits[number]))
            found += [f"request {number}: logits of new token {index}" for index, bad in enumerate(wrong) if bad][:1]
    return found
