"""Ours between two processes: pools, registered memory and TCP, all one-sided.

Not for: keys that are used up by their pull (``benches/transfer_latency.py``).
"""

from __future__ import annotations

import ctypes
import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from between.adapter import AUTO, FAR, HUGE, PULL, THREADS, Adapter, Case, Run, address
from between.sequence import HEAD_DIM, TOTAL_HEADS, Rank, Sequence

if TYPE_CHECKING:
    from llm_datadist import Cache

CLUSTERS = {"near": 1, FAR: 2}
SLACK = 64 << 20


class Ours(Adapter):
    """One engine of the pair."""

    @classmethod
    def load(cls) -> None:
        """Import it."""
        import llm_datadist  # noqa: F401, PLC0415  (timed)

    def open(self) -> None:
        """Open an engine that listens. The memory is that of its pool, or of the process."""
        from llm_datadist import LLMDataDist, LLMRole  # noqa: PLC0415  (timed by load)

        role = LLMRole.PROMPT if self.role == FAR else LLMRole.DECODER
        self.dist = LLMDataDist(role, CLUSTERS[self.role])
        registered = self.setting == "registered"
        pool = SLACK if registered else self.size + SLACK
        options = {
            "llm.EnableCacheManager": "1",
            "ge.exec.deviceId": "0",
            "llm.MemPoolConfig": f'{{"memory_size": {pool}, "page_shift": 12}}',
            "llm.EnableRemoteCacheAccessible": "1",
            "llm.listenIpInfo": "127.0.0.1:0",
            "llm.SyncKvCacheWaitTime": "20000",
            "llm.CopyWorkers": str(THREADS),
            "llm.LinkTransport": "tcp" if self.setting == "tcp" else "shm",
            # In a series of small pages, the hint about them has no use.
            "llm.HugePages": {HUGE: "eager", AUTO: "auto"}.get(self.pages, "off"),
        }
        self.dist.init(options)
        self.own = self.plain(self.size) if registered else None
        self.cache: Cache
        self.caches: list[Cache] = []
        self.parts: list[np.ndarray] = []  # the bytes of the caches of a sequence
        self.cut(1 << 20)

    def cut(self, block: int) -> None:
        """Make one tensor of blocks over the memory."""
        from llm_datadist import BlocksCacheKey, CacheDesc, DataType  # noqa: PLC0415

        self.free()
        manager, key = self.dist.cache_manager, BlocksCacheKey(CLUSTERS[self.role], 0)
        desc = CacheDesc(1, [self.size // block, block // 2], DataType.DT_BF16)
        if self.own is not None:
            self.cache = manager.register_blocks_cache(desc, [address(self.own)], key)
            self.memory = self.own
        else:
            self.cache = manager.allocate_blocks_cache(desc, key)
            self.memory = manager.tensor_views(self.cache)[0].numpy().reshape(-1).view(np.int64)
        self.caches = [self.cache]
        self.block = block

    def free(self) -> None:
        """Give back the caches, but not memory of the process."""
        self.memory, self.parts = np.zeros(0, dtype=np.int64), []
        for cache in self.caches:
            if self.own is not None:
                self.dist.cache_manager.unregister_cache(cache.cache_id)
            else:
                self.dist.cache_manager.deallocate_blocks_cache(cache)
        self.caches = []

    def cut_by_layout(self, case: Sequence) -> None:
        """Make the caches of a sequence: one for each owner on the far side, one on the near side."""
        self.free()
        self.block = 0
        ranks = case.move.owners if self.role == FAR else (case.move.near,)
        at = 0
        for index, rank in enumerate(ranks):
            size = case.tensors * case.rows * rank.block_bytes
            self.parts.append(self.of_rank(case, rank, index, at, size))
            at += size
        self.cache = self.caches[0]
        if self.role != FAR:
            self.memory = self.parts[0]

    def of_rank(self, case: Sequence, rank: Rank, index: int, at: int, size: int) -> np.ndarray:
        """Make the cache of one rank, in memory of the process at byte `at` or in the pool, and return its bytes."""
        from llm_datadist import BlocksCacheKey, CacheDesc, DataType  # noqa: PLC0415
        from llm_datadist.kv_layout import KvLayout  # noqa: PLC0415

        layout = KvLayout(
            rank.tokens,
            head_dim=HEAD_DIM,
            layers=range(case.tensors // 2),
            total_kv_heads=TOTAL_HEADS,
            kv_heads=range(rank.first, rank.end),
            order=rank.order,
        )
        manager, key = self.dist.cache_manager, BlocksCacheKey(CLUSTERS[self.role], number_of(case, index))
        desc = CacheDesc.of_layout(layout, case.rows, DataType.DT_BF16)
        if self.own is not None:
            base = address(self.own) + at
            places = [base + tensor * (size // case.tensors) for tensor in range(case.tensors)]
            self.caches.append(manager.register_blocks_cache(desc, places, key))
            return self.own[at // 8 : (at + size) // 8]
        self.caches.append(manager.allocate_blocks_cache(desc, key, contiguous=True))
        words = manager.tensor_views(self.caches[-1])[0].numpy().reshape(-1).view(np.int64)
        return np.ctypeslib.as_array((ctypes.c_int64 * (size // 8)).from_address(address(words)))

    def fill(self, op: str) -> None:
        """The caches of a sequence have the bytes of the pattern one after another."""
        if not self.parts:
            super().fill(op)
        elif not self.is_destination(op):
            at = 0
            for words in self.parts:
                words[:] = self.pattern[at : at + len(words)]
                at += len(words)

    def hello(self) -> Any:
        """The listen address."""
        return self.dist.listen_ip_info

    def link(self, hello: Any) -> None:
        """Link the clusters."""
        from llm_datadist import LLMClusterInfo, LLMStatusCode  # noqa: PLC0415

        self.info = info = LLMClusterInfo()
        info.remote_cluster_id = CLUSTERS[FAR]
        ip, port = hello.rsplit(":", 1)
        info.append_local_ip_info("127.0.0.1", 0)
        info.append_remote_ip_info(ip, int(port))
        status, each = self.dist.link_clusters([info], 5000)
        assert status == LLMStatusCode.LLM_SUCCESS, (status, each)

    def relink(self, hello: Any) -> None:
        """Drop the old link, and link again."""
        self.dist.unlink_clusters([self.info], 2000)
        self.link(hello)

    def lay(self, case: Case) -> None:
        """Blocks of the size that is moved, or caches with the layouts between which a sequence moves."""
        if isinstance(case, Sequence):
            self.cut_by_layout(case)
        elif self.block != case.block:
            self.cut(case.block)

    def request(self, case: Case) -> Run:
        """One call. Only the lists can be prepared."""
        from llm_datadist import BlocksCacheKey  # noqa: PLC0415

        if isinstance(case, Sequence):
            return partial(self.pull_sequence, case)
        manager, key, cache = self.dist.cache_manager, BlocksCacheKey(CLUSTERS[FAR], 0), self.cache
        src, dst = case.src.tolist(), case.dst.tolist()
        if case.op == PULL:
            return lambda: manager.pull_blocks(key, cache, src, dst)
        return lambda: manager.push_blocks(key, cache, src, dst, tensor_num_per_layer=1)

    def pull_sequence(self, case: Sequence) -> None:
        """One call for new lists of blocks, from one owner or from several."""
        from llm_datadist import BlocksCacheKey  # noqa: PLC0415

        keys = [BlocksCacheKey(CLUSTERS[FAR], number_of(case, index)) for index in range(len(case.move.owners))]
        src, dst = case.src_blocks.tolist(), case.dst_blocks.tolist()
        if len(keys) == 1:
            self.dist.cache_manager.pull_blocks(keys[0], self.cache, src, dst)
        else:
            self.dist.cache_manager.pull_blocks(keys, self.cache, [src] * len(keys), dst)

    def prepared(self, blocks: int, block: int) -> dict[str, float]:
        """Register a cache of this many blocks with a key, which is all that a call needs."""
        from llm_datadist import BlocksCacheKey, CacheDesc, DataType  # noqa: PLC0415

        manager, memory = self.dist.cache_manager, self.plain(blocks * block)
        began = time.perf_counter()
        desc = CacheDesc(1, [blocks, block // 2], DataType.DT_BF16)
        cache = manager.register_blocks_cache(desc, [address(memory)], BlocksCacheKey(CLUSTERS[self.role], 1))
        took = time.perf_counter() - began
        manager.unregister_cache(cache.cache_id)
        return {"prepare": took}

    def close(self) -> None:
        """In order."""
        self.memory, self.parts = np.zeros(0, dtype=np.int64), []
        self.dist.finalize()


def number_of(case: Sequence, index: int) -> int:
    """The number of an owner's key. It differs between layouts, because a peer may keep the description of a key."""
    return case.block + index
