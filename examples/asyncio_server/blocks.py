"""An engine with one cache, the list of its free blocks, and the KV of each request. Both processes use it.

No model runs here. The KV of a request is a function of its number, so decode checks every byte without prefill.
"""

from __future__ import annotations

import asyncio
import math
from typing import Any, Callable, TypeVar

import numpy as np

from llm_datadist import Busy, Engine, KvLayout

Result = TypeVar("Result")

LAYOUT = KvLayout(layers=4, block_tokens=16, heads=4, head_dim=128, dtype="float16")
BLOCK_BYTES = math.prod(LAYOUT.shape(1)) * 2
"""Bytes of one block of one tensor."""

MAX_BLOCKS = 16
"""Blocks of the longest request."""

BUSY_PAUSES_S = 0.001, 0.05
"""Shortest and longest pause before a call that was refused with `Busy` is repeated."""


def blocks_needed(request: int) -> int:
    """Return the number of blocks of a request, between 4 and `MAX_BLOCKS`."""
    return 4 + request * 7 % (MAX_BLOCKS - 3)


def kv_of(request: int) -> Any:
    """Return the KV of a request, as 64-bit words: an array of tensors, blocks and words of a block.

    No two words are equal, within a request and between requests.
    """
    shape = (LAYOUT.tensors, blocks_needed(request), BLOCK_BYTES // 8)
    words = np.arange(math.prod(shape), dtype=np.uint64) + np.uint64(request << 32)
    words *= np.uint64(0x9E3779B97F4A7C15)
    words ^= words >> np.uint64(29)
    return words.reshape(shape)


class Blocks:
    """An engine, its cache, and the blocks that are free."""

    def __init__(self, name: str, count: int, **options: Any) -> None:
        self.engine = Engine(pool=(count + 4) * BLOCK_BYTES * LAYOUT.tensors, name=name, **options)
        self.cache = self.engine.allocate("kv", LAYOUT, blocks=count)
        self._tensors = [tensor.numpy().reshape(count, -1).view(np.uint64) for tensor in self.cache.tensors]
        self._free = list(range(count))
        self.busy = 0

    @property
    def free(self) -> int:
        """Number of free blocks."""
        return len(self._free)

    def take(self, count: int) -> list[int]:
        """Return blocks that were free. There must be that many."""
        assert count <= self.free
        taken, self._free = self._free[:count], self._free[count:]
        return taken

    def give_back(self, blocks: list[int]) -> None:
        """Free blocks, and overwrite them, so that a reader that comes too late gets wrong bytes."""
        assert not set(blocks) & set(self._free)
        for tensor in self._tensors:
            tensor[blocks] = 0
        self._free += blocks

    def write(self, request: int, blocks: list[int]) -> None:
        """Write the KV of a request."""
        for tensor, words in zip(self._tensors, kv_of(request)):
            tensor[blocks] = words

    def match(self, request: int, blocks: list[int]) -> bool:
        """Return whether the blocks have the KV of a request."""
        return all((tensor[blocks] == words).all() for tensor, words in zip(self._tensors, kv_of(request)))

    async def unless_busy(self, call: Callable[[], Result]) -> Result:
        """Call the engine, and repeat the call as long as the engine refuses it. A refused call has done nothing."""
        pause, longest = BUSY_PAUSES_S
        while True:
            try:
                return call()
            except Busy:  # noqa: PERF203  (few calls need a second iteration)
                self.busy += 1
                await asyncio.sleep(pause)
                pause = min(2 * pause, longest)
