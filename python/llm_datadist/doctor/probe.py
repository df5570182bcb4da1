"""The engine with a small cache at either end of a link that is measured."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    DataType,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMRole,
    LLMStatusCode,
    Placement,
)

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["BLOCKS", "BLOCK_BYTES", "OWNER", "Probe"]

OWNER = 990_001
"""Cluster id of the side that serves."""
BLOCKS, BLOCK_BYTES = 4096, 16 << 10
"""The cache: 64 MiB, of which a transfer moves one block or all of them."""
_POOL_BYTES = 2 * BLOCKS * BLOCK_BYTES
LIMIT_MS = 5_000


class Probe:
    """An initialized engine with a blocks cache. Close it after use.

    Args:
        cluster: its cluster id.
        listen: the address at which it listens, ``"ip:port"``.
        extra: further options, by the names of ``LLMConfig``.

    Raises:
        LLMException: an option is wrong, or the address is in use.
    """

    def __init__(self, cluster: int, listen: str, extra: Mapping[str, Any]) -> None:
        config = LLMConfig()
        config.enable_cache_manager = True
        config.enable_remote_cache_accessible = True
        config.mem_pool_cfg = json.dumps({"memory_size": _POOL_BYTES})
        config.sync_kv_timeout = LIMIT_MS
        config.listen_ip_info = listen
        for name, value in extra.items():
            setattr(config, name, value)
        self._engine = LLMDataDist(LLMRole.MIX, cluster)
        self._engine.init(config.generate_options())
        try:
            shape = CacheDesc(1, [BLOCKS, BLOCK_BYTES], DataType.DT_UINT8, Placement.DEVICE)
            self._manager = self._engine.cache_manager
            self._cache = self._manager.allocate_blocks_cache(shape, BlocksCacheKey(cluster))
        except BaseException:
            self._engine.finalize()
            raise

    def link(self, host: str, port: int) -> None:
        """Link to the probe that serves there.

        Raises:
            ConnectionError: it cannot be reached, or refuses. The log has the reason.
        """
        info = LLMClusterInfo()
        info.remote_cluster_id = OWNER
        info.append_local_ip_info("127.0.0.1", 0)
        info.append_remote_ip_info(host, port)
        _, [code] = self._engine.link_clusters([info], LIMIT_MS)
        if code != LLMStatusCode.LLM_SUCCESS:
            raise ConnectionError(f"cannot link to {host}:{port}: {code.name}")

    def pull(self, blocks: list[int]) -> None:
        """Pull blocks of the other side into the same blocks. Raises LLMException."""
        self._manager.pull_blocks(BlocksCacheKey(OWNER), self._cache, blocks, blocks, tensor_num_per_layer=1)

    def push(self, blocks: list[int]) -> None:
        """Push blocks into the same blocks of the other side. Raises LLMException."""
        self._manager.push_blocks(BlocksCacheKey(OWNER), self._cache, blocks, blocks, tensor_num_per_layer=1)

    def link_stats(self) -> dict[str, Any]:
        """Return the statistics of the only link."""
        [link] = self._engine.stats()["links"]
        return {**link}

    def close(self) -> None:
        """End the link, and close the engine."""
        self._engine.finalize()
