"""Two linked ends, with the cache manager or with the KvCacheManager, and layer-wise transfers between them.

The local end (cluster 1, this process) sends. The remote end (cluster 2, its own process) receives. Not for: checking
results (the tests do that).
"""

from __future__ import annotations

import threading
from typing import TYPE_CHECKING, Any, Callable

import llm_datadist
from llm_datadist import LLMStatusCode
from peers import LIMIT, OK, End, Ends, Peer, eventually, pattern

if TYPE_CHECKING:
    import numpy as np

CACHE_MANAGER, KV_CACHE_MANAGER = "CacheManager", "KvCacheManager"
MODES = (CACHE_MANAGER, KV_CACHE_MANAGER)
KV_OPTIONS = {
    "ge.exec.deviceId": "0",
    "ge.flowGraphMemMaxSize": str(64 << 20),
    "llm.SyncKvCacheWaitTime": "5000",
}
SUCCESS = LLMStatusCode.LLM_SUCCESS


class Pair:
    def __init__(self, mode: str, ends: Ends, **extra: Any) -> None:
        self.mode, self.ends = mode, ends
        self.local: End
        self.remote: Peer
        if mode == CACHE_MANAGER:
            self.local, self.remote = ends.pair(**extra)
            return
        settings = {**KV_OPTIONS, **{key.replace("__", "."): str(value) for key, value in extra.items()}}
        self.local = ends.local({**settings, "llm.listenIpInfo": "127.0.0.1:0"}, 1, "PROMPT")
        self.remote = self.receiver(2, settings)

    def receiver(self, cluster: int, settings: dict[str, str] | None = None) -> Peer:
        """Start and link another remote end. In KvCacheManager mode, the decoder makes the link."""
        if self.mode == CACHE_MANAGER:
            remote = self.ends.peer(cluster=cluster)
            result = self.local.link_clusters([remote.at])
        else:
            remote = self.ends.peer(KV_OPTIONS if settings is None else settings, cluster, "DECODER")
            result = remote.link_clusters([(1, self.local.listening())])
        assert result == (OK, [OK]), result
        eventually(lambda: any(link["cluster"] == cluster for link in self.local.links()), what="the link")
        return remote

    @property
    def manager(self) -> Any:
        dist = self.local.dist
        return dist.cache_manager if self.mode == CACHE_MANAGER else dist.kv_cache_manager

    @property
    def late(self) -> LLMStatusCode:
        if self.mode == CACHE_MANAGER:
            return LLMStatusCode.LLM_TIMEOUT
        return LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT

    def allocate(self, end: Any, name: str, *args: Any, **kwargs: Any) -> Any:
        """Allocate a cache at either end. Return its handle if it is the local end."""
        end.allocate(name, *args, **kwargs)
        return end.held[name].handle if end is self.local else None

    def caches(self, rows: int = 4, row_bytes: int = 256, tensors: int = 4, **kwargs: Any) -> tuple[Any, list[int]]:
        """Make caches: `n` here (pattern 1), `f` there (pattern 2). Return the handle and the addresses of `f`."""
        handle = self.allocate(self.local, "n", rows, row_bytes, tensors, seed=1, **kwargs)
        self.allocate(self.remote, "f", rows, row_bytes, tensors, seed=2, **kwargs)
        return handle, self.remote.addresses("f")

    def send(self, src: Any, synchronizer: Any, configs: Any, *blocks: Any, **more: Any) -> Any:
        return self.manager.transfer_cache_async(src, synchronizer, configs, *blocks, **more)


def config(*args: Any, **kwargs: Any) -> Any:
    return llm_datadist.TransferConfig(*args, **kwargs)


def synchronizer(call: Callable[[int], Any] = lambda _: True) -> Any:
    """A `LayerSynchronizer` that returns `call(layer_index)`."""

    class Asking(llm_datadist.LayerSynchronizer):
        def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
            assert timeout_in_millis is None
            return call(layer_index)

    return Asking()


class Gate:
    """Records the layers that were asked for, and makes each call wait until its layer is opened."""

    def __init__(self, layers: int) -> None:
        self.asked: list[int] = []
        self._open = [threading.Event() for _ in range(layers)]

    def __call__(self, layer: int) -> bool:
        self.asked.append(layer)
        return self._open[layer].wait(LIMIT)

    def open(self, *layers: int) -> None:
        """Open these layers; without arguments, all layers."""
        for layer in layers or range(len(self._open)):
            self._open[layer].set()


def sent(rows: dict[int, int], tensors: int = 4, count: int = 4, row_bytes: int = 256) -> list[np.ndarray]:
    """Return the bytes of `f` after row `source` of `n` was sent to row `target`, for every `target: source`."""
    source, target = pattern(1, tensors, count, row_bytes), pattern(2, tensors, count, row_bytes)
    for to, origin in rows.items():
        for left, right in zip(target, source):
            left[to] = right[origin]
    return target
