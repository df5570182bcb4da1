"""An engine with one blocks cache, the list of its free blocks, and the KV of each request. Both processes use it.

No model runs here. The KV of a request is a function of its number, so decode checks every byte without prefill.
"""

from __future__ import annotations

import json
import math
from typing import Any, Optional

import numpy as np

from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMConfig, LLMDataDist, LLMRole

PREFILL, DECODE = 1, 2
"""Cluster ids."""

TENSORS = 8
"""K and V of four layers."""

BLOCK_SHAPE = [16, 4, 128]
"""One block of one tensor: tokens, heads, dimension."""

BLOCK_BYTES = math.prod(BLOCK_SHAPE) * 2
MOST_BLOCKS = 16
"""Blocks of the longest request."""

PAGE = 1 << 16
"""Pool memory is allocated in pages, 64 KiB by default."""


def blocks_needed(request: int) -> int:
    """Return the number of blocks of a request, between 4 and `MOST_BLOCKS`."""
    return 4 + request * 7 % (MOST_BLOCKS - 3)


def kv_of(request: int) -> Any:
    """Return the KV of a request, as 64-bit words: an array of tensors, blocks and words of a block.

    No two words are equal, within a request and between requests.
    """
    shape = (TENSORS, blocks_needed(request), BLOCK_BYTES // 8)
    words = np.arange(math.prod(shape), dtype=np.uint64) + np.uint64(request << 32)
    words *= np.uint64(0x9E3779B97F4A7C15)
    words ^= words >> np.uint64(29)
    return words.reshape(shape)


def pool_bytes(blocks: int) -> int:
    """Return the size of a pool for a cache of that many blocks."""
    return TENSORS * -(-blocks * BLOCK_BYTES // PAGE) * PAGE


class Blocks:
    """An engine, its cache, and the blocks that are free. Close it after use."""

    def __init__(
        self,
        role: LLMRole,
        cluster_id: int,
        count: int,
        key: Optional[BlocksCacheKey] = None,
        listen: str = "",
        max_transfers: int = 4096,
    ) -> None:
        config = LLMConfig()
        config.enable_cache_manager = True
        config.mem_pool_cfg = json.dumps({"memory_size": pool_bytes(count)})
        config.listen_ip_info = listen
        config.max_transfers = max_transfers
        self.engine = LLMDataDist(role, cluster_id)
        self.engine.init(config.generate_options())
        self.manager = self.engine.cache_manager
        desc = CacheDesc(TENSORS, [count, *BLOCK_SHAPE], DataType.DT_FLOAT16)
        self.cache = self.manager.allocate_blocks_cache(desc, key)
        views = [view.numpy() for view in self.manager.tensor_views(self.cache)]
        self._tensors = [view.reshape(count, -1).view(np.uint64) for view in views]
        self.count = count
        self._free = list(range(count))

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

    def close(self) -> None:
        """Stop the engine. Remove `engine.fileno()` from the event loop before."""
        self.engine.finalize()
