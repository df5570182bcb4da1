"""Code that both processes share: open an engine, allocate the cache of a layout, exchange messages.

The paged layout uses remote-accessible mode, where prefill names the destination by key. The contiguous layout uses the
other mode, where prefill names it by address. Not for: computing and moving KV (`prefill`, `decode`).
"""

from __future__ import annotations

import json
from multiprocessing import connection, parent_process
from typing import TYPE_CHECKING, Any, NamedTuple, Union

import numpy as np

from layouts import Contiguous, Paged
from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMConfig, LLMDataDist, LLMRole, Placement

if TYPE_CHECKING:
    from generation import Workload
    from llm_datadist import Cache
    from model import Array

PREFILL, DECODE = 1, 2
"""Cluster ids."""

LIMIT_S = 20.0
"""Time limit of every wait for the other process, for a layer or for a transfer, in seconds."""

PAGE = 1 << 12


class Setup(NamedTuple):
    """The arguments of a process. `rows`: of the prefill cache, and of the device and host cache of decode."""

    work: Workload
    layout: str
    rows: tuple[int, int, int]
    prove: bool
    transport: str


class Node:
    """An engine, its device cache as arrays, and the pipe to the other process. Close it after use."""

    def __init__(self, setup: Setup, role: LLMRole, rows: int, host_rows: int, pipe: connection.Connection) -> None:
        self._work, self._paged, self._pipe = setup.work, setup.layout == "paged", pipe
        cluster = PREFILL if role == LLMRole.PROMPT else DECODE
        config = LLMConfig()
        config.enable_cache_manager = True
        config.enable_remote_cache_accessible = self._paged
        config.link_transport = setup.transport
        config.sync_kv_timeout = int(LIMIT_S * 1000)
        config.mem_pool_cfg = self._pool(rows)
        if host_rows:
            config.host_mem_pool_cfg = self._pool(host_rows)
        if role == LLMRole.PROMPT:
            config.listen_ip_info = "127.0.0.1:0"
        self.dist = LLMDataDist(role, cluster)
        self.dist.init(config.generate_options())
        self.manager = self.dist.cache_manager
        key = BlocksCacheKey(cluster)
        if self._paged:
            self.cache = self.manager.allocate_blocks_cache(self._description(rows, Placement.DEVICE), key)
        else:
            self.cache = self.manager.allocate_cache(self._description(rows, Placement.DEVICE))
        tensors: list[Array] = [view.numpy() for view in self.manager.tensor_views(self.cache)]
        for tensor in tensors:
            tensor.fill(np.nan)  # a read of a row that was never written gives NaN
        self.layout: Union[Paged, Contiguous] = (Paged if self._paged else Contiguous)(tensors, seed=cluster)

    def host_cache(self, rows: int) -> Cache:
        """Allocate a blocks cache of that many rows in the host pool."""
        return self.manager.allocate_blocks_cache(self._description(rows, Placement.HOST))

    @property
    def row_bytes(self) -> int:
        """Bytes of one row in one tensor."""
        return self.cache.cache_desc.size // self.cache.cache_desc.batch_size

    def send(self, message: Any) -> None:
        """Send a message to the other process."""
        self._pipe.send(message)

    def receive(self) -> Any:
        """Wait for the next message of the other process, at most `LIMIT_S`, or until the command ends."""
        parent = parent_process()
        alive = [parent.sentinel] if parent else []
        ready = connection.wait([self._pipe, *alive], LIMIT_S)
        if not ready:
            raise TimeoutError(f"no message within {LIMIT_S:g} s")
        if self._pipe not in ready:
            raise EOFError("the command has ended")
        return self._pipe.recv()

    def close(self) -> None:
        """Stop the engine."""
        self.dist.finalize()

    def _description(self, rows: int, placement: Placement) -> CacheDesc:
        shape = self._work.shape
        tokens = self._work.block_tokens if self._paged else shape.tokens
        dims = [rows, tokens, shape.kv_heads, shape.head_dim]
        return CacheDesc(2 * shape.layers, dims, DataType.DT_FLOAT, placement)

    def _pool(self, rows: int) -> str:
        description = self._description(rows, Placement.DEVICE)
        pages = -(-description.size // PAGE) + 1
        return json.dumps({"memory_size": description.num_tensors * pages * PAGE, "page_shift": 12})
