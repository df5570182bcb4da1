"""Layer-wise transfers whose layers the caller reports: no thread, any order of layers, many requests in one task.

``CacheManager.begin_layers`` starts such a transfer. ``transfer_cache_async`` is the call of the original, whose thread
asks a ``LayerSynchronizer``. The original does not have the classes and the call of this module.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional, Union

from llm_datadist._core import LayerTask
from llm_datadist.groups import GroupCalls
from llm_datadist.log import logged

if TYPE_CHECKING:
    from llm_datadist.layerwise import TransferConfig, TransferWithCacheKeyConfig
    from llm_datadist.types import Cache

__all__ = ["LayerCalls", "LayerDestination", "LayerTask"]


class LayerDestination:
    """A destination of ``CacheManager.begin_layers``, with its own blocks. The original does not have this class.

    The constructor checks nothing; ``begin_layers`` checks all values.

    Args:
        config: the memory of the peer, and the layers: a ``TransferConfig``, or a ``TransferWithCacheKeyConfig`` in
            remote-accessible mode.
        src_blocks: blocks of the source cache that are read: a list or tuple of integers (uint64), or an array of shape
            ``(n,)`` as for the other calls of ``CacheManager``. ``None`` for a slot.
        dst_blocks: blocks that are written, of the same kinds: one for each block that is read, or one for each piece
            of a slot that is split into blocks.
        dst_block_memory_size: bytes of a destination block in one tensor (uint64), as for ``transfer_cache_async``.
    """

    __slots__ = ("config", "dst_block_memory_size", "dst_blocks", "src_blocks")

    def __init__(
        self,
        config: Union[TransferConfig, TransferWithCacheKeyConfig],
        src_blocks: Optional[Union[list[int], tuple[int, ...], Any]] = None,
        dst_blocks: Optional[Union[list[int], tuple[int, ...], Any]] = None,
        *,
        dst_block_memory_size: Optional[int] = None,
    ) -> None:
        self.config = config
        self.src_blocks = src_blocks
        self.dst_blocks = dst_blocks
        self.dst_block_memory_size = dst_block_memory_size

    def __repr__(self) -> str:
        return (
            f"LayerDestination({self.config!r}, src_blocks={self.src_blocks!r}, dst_blocks={self.dst_blocks!r}, "
            f"dst_block_memory_size={self.dst_block_memory_size!r})"
        )


class LayerCalls(GroupCalls):
    """The base of ``CacheManager`` with ``begin_layers``."""

    @logged
    def begin_layers(
        self,
        cache: Cache,
        destinations: Union[list[LayerDestination], tuple[LayerDestination, ...]],
        *,
        layer_timeout_ms: Optional[int] = None,
        tensor_num_per_layer: int = 2,
    ) -> LayerTask:
        """Start to send the layers of a cache, each as soon as ``LayerTask.ready`` reports it.

        The original does not have this call. It takes no thread, and neither it nor the methods of the task wait. Each
        destination is sent every layer of its config, like a destination of ``transfer_cache_async`` (contract §8.1,
        §8.2), and has a transfer with a time limit, an outcome and an event of its own. A slow or failed destination
        does not delay others. The destinations may be those of many requests, and several may name one cluster. A cache
        that is deallocated during the transfer stays allocated until all transfers have ended.

        Each layer must be in place within ``sync_kv_timeout`` after ``ready`` reported it; otherwise the transfer ends
        with ``LLM_TIMEOUT``.

        Args:
            cache: cache that is read, in ``DEVICE`` memory.
            destinations: at least one destination. A ``src_layer_range`` of ``None`` is replaced by all layers in the
                config object.
            layer_timeout_ms: time limit for the wait of a destination in milliseconds (uint32, above 0): if no layer
                that it needs becomes ready for so long, its transfer ends with ``LLM_TIMEOUT``. ``None`` is no limit.
            tensor_num_per_layer: number of tensors of one layer (uint32, above 0).

        Returns:
            The task. The outcome of each of its transfers is one of: success; ``LLM_PARAM_INVALID``:
            ``LayerTask.fail`` reported a layer, or the layers do not fit the remote cache; ``LLM_TIMEOUT``;
            ``LLM_KV_CACHE_NOT_EXIST``: a cache does not exist; ``LLM_NOT_YET_LINK``; ``LLM_ENGINE_FINALIZED``;
            ``LLM_FAILED``: cancelled, the task was dropped, or another failure.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: an integer is outside its width.
            LLMException: nothing has started then. ``LLM_PARAM_INVALID``: no destinations, a ``layer_timeout_ms`` of 0,
                or a check of contract §8.1 failed; ``LLM_KV_CACHE_NOT_EXIST``: the source cache was released;
                ``LLM_LINK_BUSY``: the transfers would exceed ``max_transfers``.
        """
        self._check_open()
        return self._native.begin_layers(cache, destinations, layer_timeout_ms, tensor_num_per_layer)
