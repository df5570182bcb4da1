"""Layouts of keys and values: whole sequences in batch slots, blocks scattered over a cache, or plain arrays.

Each layout reads and writes tensors `[rows, tokens of a row, kv_heads, head_dim]`, with the keys of a layer followed by
its values. The tensors are views of caches of the engine, which moves rows between processes and memories. Not for:
moving rows (`prefill`, `decode`).
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from model import Array, Shape


class Rows:
    """The rows of a cache that each request has. They are assigned in random order, so that they are not adjacent."""

    def __init__(self, count: int, seed: int) -> None:
        self.of: dict[int, list[int]] = {}
        self._free = list(range(count))
        self._dice = random.Random(seed)  # noqa: S311  (not for secrets)

    def reserve(self, request: int, count: int) -> list[int]:
        """Reserve that many rows for a request, and return them."""
        self._dice.shuffle(self._free)
        if len(self._free) < count:
            raise MemoryError(f"request {request} needs {count} rows, {len(self._free)} are free")
        self.of[request] = [self._free.pop() for _ in range(count)]
        return self.of[request]

    def release(self, request: int) -> None:
        """Free the rows of a request."""
        self._free += self.of.pop(request)


class Contiguous:
    """A row is a batch slot, which holds a whole sequence."""

    def __init__(self, tensors: Sequence[Array], seed: int) -> None:
        self.rows = Rows(len(tensors[0]), seed)
        self._tensors = tensors

    def rows_for(self, tokens: int) -> int:
        """Return how many rows that many tokens take."""
        if tokens > self._tensors[0].shape[1]:
            raise MemoryError(f"{tokens} tokens are more than a slot holds")
        return 1

    def write(self, layer: int, request: int, start: int, keys: Array, values: Array) -> None:
        """Store keys and values of tokens from position `start` on."""
        (slot,) = self.rows.of[request]
        for tensor, new in zip(self._tensors[2 * layer :], (keys, values)):
            tensor[slot, start : start + len(new)] = new

    def read(self, layer: int, request: int, tokens: int) -> tuple[Array, Array]:
        """Return keys and values of the first `tokens` positions, which are contiguous."""
        (slot,) = self.rows.of[request]
        keys, values = self._tensors[2 * layer : 2 * layer + 2]
        return keys[slot, :tokens], values[slot, :tokens]


class Paged:
    """A row is a block of tokens. The block table of a request lists its blocks in order."""

    def __init__(self, tensors: Sequence[Array], seed: int) -> None:
        self.rows = Rows(len(tensors[0]), seed)
        self._tensors = tensors
        self._block_tokens: int = tensors[0].shape[1]

    def rows_for(self, tokens: int) -> int:
        """Return how many rows that many tokens take."""
        return -(-tokens // self._block_tokens)

    def write(self, layer: int, request: int, start: int, keys: Array, values: Array) -> None:
        """Store keys and values of tokens from position `start` on."""
        table = np.array(self.rows.of[request])
        position = np.arange(start, start + len(keys))
        position_in_block = table[position // self._block_tokens], position % self._block_tokens
        for tensor, new in zip(self._tensors[2 * layer :], (keys, values)):
            tensor[position_in_block] = new

    def read(self, layer: int, request: int, tokens: int) -> tuple[Array, Array]:
        """Return keys and values of the first `tokens` positions, gathered block by block."""
        table = self.rows.of[request][: self.rows_for(tokens)]
        keys, values = (tensor[table] for tensor in self._tensors[2 * layer : 2 * layer + 2])
        return keys.reshape(-1, *keys.shape[2:])[:tokens], values.reshape(-1, *values.shape[2:])[:tokens]


class Plain:
    """Arrays of this process, one for each request and layer, for the one-process run without an engine."""

    def __init__(self, shape: Shape) -> None:
        self._shape = shape
        self._of: dict[tuple[int, int], Array] = {}

    def write(self, layer: int, request: int, start: int, keys: Array, values: Array) -> None:
        """Store keys and values of tokens from position `start` on."""
        if (layer, request) not in self._of:
            room = (2, self._shape.tokens, self._shape.kv_heads, self._shape.head_dim)
            self._of[layer, request] = np.full(room, np.nan, np.float32)
        self._of[layer, request][:, start : start + len(keys)] = keys, values

    def read(self, layer: int, request: int, tokens: int) -> tuple[Array, Array]:
        """Return keys and values of the first `tokens` positions."""
        keys, values = self._of[layer, request]
        return keys[:tokens], values[:tokens]
