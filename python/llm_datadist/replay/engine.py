"""The engine of one process: its pools, its blocks caches and their bytes.

Both processes of a replay use this module, so that their shapes are equal.
"""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

import numpy as np

from llm_datadist import BlocksCacheKey, CacheDesc, LLMConfig, LLMDataDist, Placement
from llm_datadist.replay.geometry import DTYPES, PAGE_SHIFT, STAGING_TOKENS

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llm_datadist import Cache, LLMRole
    from llm_datadist.cache_manager import CacheManager
    from llm_datadist.replay.content import Words
    from llm_datadist.replay.geometry import Geometry

TRANSFER_LIMIT_MS = 10_000
"""Time limit of a copy or a pull; long enough for a machine under load."""


class Engine:
    """An initialized engine. Close it after use.

    Args:
        role: the role of the process.
        cluster: its cluster id.
        geometry: the shape of every block.
        pools: bytes of the device pool and of the host pool, 0 for none.
        extra: further options.
    """

    def __init__(
        self, role: LLMRole, cluster: int, geometry: Geometry, pools: tuple[int, int], extra: Mapping[str, str]
    ) -> None:
        config = LLMConfig()
        config.device_id = 0
        config.enable_cache_manager = True
        config.sync_kv_timeout = TRANSFER_LIMIT_MS
        if pools[0]:
            config.mem_pool_cfg = json.dumps({"memory_size": pools[0], "page_shift": PAGE_SHIFT})
        if pools[1]:
            config.host_mem_pool_cfg = json.dumps({"memory_size": pools[1], "page_shift": PAGE_SHIFT})
        self.cluster = cluster
        self.geometry = geometry
        self.dist = LLMDataDist(role, cluster)
        self.dist.init({**config.generate_options(), **extra})
        self.manager: CacheManager = self.dist.cache_manager

    def blocks_cache(self, blocks: int, placement: Placement, model: int) -> tuple[Cache, list[Words]]:
        """Allocate a blocks cache with its key, touch all of its memory, and return it with its views.

        Without the touch, the first pass through a pool would include the time of page faults.
        """
        shape = self.geometry
        dims = [blocks, shape.tokens, shape.heads, shape.head_dim]
        description = CacheDesc(shape.tensors, dims, DTYPES[shape.dtype][0], placement)
        cache = self.manager.allocate_blocks_cache(description, BlocksCacheKey(self.cluster, model))
        rows = self.rows(cache)
        for tensor in rows:
            tensor.fill(0)
        return cache, rows

    def staging(self) -> CacheDesc:
        """Return the descriptor of a request's staging cache: two rows of device memory."""
        shape = self.geometry
        dims = [2, STAGING_TOKENS, shape.heads, shape.head_dim]
        return CacheDesc(shape.tensors, dims, DTYPES[shape.dtype][0], Placement.DEVICE)

    def rows(self, cache: Cache) -> list[Words]:
        """Return a (rows, words) view of each tensor of a cache."""
        views = [np.asarray(view.numpy()) for view in self.manager.tensor_views(cache)]
        return [view.reshape(view.shape[0], -1).view(np.uint64) for view in views]

    def stats(self) -> dict[str, Any]:
        """Return the engine's counters."""
        return dict(self.manager.stats())

    def used_bytes(self) -> int:
        """Return the used bytes of all pools."""
        return sum(int(pool["used_bytes"]) for pool in self.stats()["pools"].values())

    def close(self) -> None:
        """Stop the engine."""
        self.dist.finalize()
