"""The pulls and pushes of ``CacheManager``.

Every method is one call into the engine, which checks the arguments in the order of the contract.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional, Union

from llm_datadist import _core
from llm_datadist.original.caches import EngineCaches
from llm_datadist.original.logged_calls import logged
from llm_datadist.original.spelling import check_keywords

if TYPE_CHECKING:
    from llm_datadist.original.types import BlocksCacheKey, Cache, CacheKey, CacheKeyByIdAndIndex

__all__ = ["PullPushCalls"]


class PullPushCalls(EngineCaches[_core.CacheCalls]):
    """The base of ``CacheManager`` with its pulls and pushes (contract §7.12 to §7.15)."""

    @logged
    def pull_cache(
        self,
        cache_key: Union[CacheKey, CacheKeyByIdAndIndex],
        cache: Cache,
        batch_index: int = 0,
        size: int = -1,
        *,
        src_layer_range: Optional[range] = None,
        dst_layer_range: Optional[range] = None,
        tensor_num_per_layer: int = 2,
        **kwargs: Any,
    ) -> None:
        """Read a batch slot of a linked cluster into a local slot (contract §7.12).

        Outside remote-accessible mode, a successful pull of every tensor uses the key up, and the owner drops that
        reference (contract §12.3).

        Args:
            cache_key: the remote slot, by its key, or by cache id and slot. In remote-accessible mode only the latter.
            cache: continuous cache that is written.
            batch_index: batch slot that is written (uint32).
            size: bytes of each tensor, from the start of the slot, or -1 for the size of the local slot (int64).
            src_layer_range: remote layers; ``None`` or an empty range means all.
            dst_layer_range: local layers; ``None`` or an empty range means all.
            tensor_num_per_layer: tensors of one layer (uint32, above 0).
            **kwargs: ignored, as in the original. Each name is logged once at ERROR.

        Raises:
            TypeError: an argument has the wrong type, or a keyword argument asks for what only ``LLMDataDist.engine``
                has, such as ``grant``.
            ValueError: an integer is outside its width.
            AttributeError: ``cache_key`` or ``cache`` is ``None``.
            LLMException: ``LLM_PARAM_INVALID``: the engine's own cluster, a blocks cache, a range outside a slot,
                different numbers of tensors, layers outside a cache, or a cache that is not accessible;
                ``LLM_KV_CACHE_NOT_EXIST``: the local cache, or the remote key or slot, does not exist;
                ``LLM_NOT_YET_LINK``: there is no link, or it broke; ``LLM_TIMEOUT``: ``sync_kv_timeout`` passed;
                ``LLM_VERIFY_FAILED``: bytes differ from those of the owner; the key is not released, and ``arrived`` is
                empty. For the other codes, the attribute ``arrived`` lists the rows that were written.
        """
        if kwargs:
            check_keywords(PullPushCalls.pull_cache, kwargs)
        self._engine.pull_cache(
            cache_key,
            cache,
            batch_index,
            size,
            src_layer_range,
            dst_layer_range,
            tensor_num_per_layer,
        )

    @logged
    def pull_blocks(
        self,
        src_cache_key: Union[CacheKey, CacheKeyByIdAndIndex, BlocksCacheKey],
        dst_cache: Cache,
        src_blocks: Union[list[int], tuple[int, ...], Any] = (),
        dst_blocks: Union[list[int], tuple[int, ...], Any] = (),
        *,
        src_layer_range: Optional[range] = None,
        dst_layer_range: Optional[range] = None,
        tensor_num_per_layer: int = 2,
        **kwargs: Any,
    ) -> None:
        """Read blocks of a linked cluster, or a slot that is split into blocks, into local blocks (contract §7.13).

        A pull of a slot uses up its key, as in ``pull_cache``. A pull of blocks does not.

        Args:
            src_cache_key: the remote blocks cache by its ``BlocksCacheKey``, or a remote slot by another key.
            dst_cache: blocks cache that is written.
            src_blocks: remote block for each entry of ``dst_blocks``; empty for a slot, which is split into pieces of
                the local block size.
            dst_blocks: local blocks that are written, at least one.
            src_layer_range: as for ``pull_cache``.
            dst_layer_range: as for ``pull_cache``.
            tensor_num_per_layer: as for ``pull_cache``.
            **kwargs: as for ``pull_cache``.

        Raises:
            TypeError: as for ``pull_cache``.
            ValueError: an integer is outside its width.
            AttributeError: ``src_cache_key`` or ``dst_cache`` is ``None``.
            LLMException: as for ``pull_cache``; ``LLM_PARAM_INVALID`` also for a continuous ``dst_cache``, lists of
                different lengths, an index outside a cache, different block sizes, or more blocks than the slot fills.
        """
        if kwargs:
            check_keywords(PullPushCalls.pull_blocks, kwargs)
        self._engine.pull_blocks(
            src_cache_key, dst_cache, src_blocks, dst_blocks, src_layer_range, dst_layer_range, tensor_num_per_layer
        )

    @logged
    def push_cache(
        self,
        dst_cache_key: CacheKeyByIdAndIndex,
        src_cache: Cache,
        src_batch_index: int = 0,
        src_layer_range: Optional[range] = None,
        dst_layer_range: Optional[range] = None,
        size: int = -1,
        tensor_num_per_layer: int = 2,
    ) -> None:
        """Write a local batch slot into a slot of a linked cluster (contract §7.14), in remote-accessible mode.

        A push of all layers releases the key of the local slot, if it has one (contract §12.3). After a failure, part
        of the remote slot may be written.

        Args:
            dst_cache_key: the remote slot, by cache id and slot.
            src_cache: continuous cache that is read.
            src_batch_index: batch slot that is read (uint32).
            src_layer_range: local layers; ``None`` for all, and then ``dst_layer_range`` is ``None`` too.
            dst_layer_range: remote layers, as many as ``src_layer_range`` has.
            size: must be -1, which means the whole local slot (int64).
            tensor_num_per_layer: tensors of one layer (uint32, above 0). A cache with fewer tensors has no layer:
                without ranges nothing is sent, and that is not an error. Use 1 for a cache of one tensor.

        Raises:
            TypeError: an argument has the wrong type; a key or a cache that is ``None`` too.
            ValueError: an integer is outside its width.
            LLMException: ``LLM_PARAM_INVALID``: another mode, the engine's own cluster, a blocks cache, layers or slots
                outside a cache, a slot larger than the remote one, or a cache that is not accessible;
                ``LLM_KV_CACHE_NOT_EXIST``: the local or the remote cache does not exist; ``LLM_NOT_YET_LINK``: there is
                no link, or it broke; ``LLM_TIMEOUT``: ``sync_kv_timeout`` passed; ``LLM_VERIFY_FAILED``: as for
                ``pull_cache``. For the other codes, the attribute ``arrived`` lists the rows that were written.
        """
        self._engine.push_cache(
            dst_cache_key,
            src_cache,
            src_batch_index,
            src_layer_range,
            dst_layer_range,
            size,
            tensor_num_per_layer,
        )

    @logged
    def push_blocks(
        self,
        dst_cache_key: BlocksCacheKey,
        src_cache: Cache,
        src_blocks: Union[list[int], tuple[int, ...], Any] = (),
        dst_blocks: Union[list[int], tuple[int, ...], Any] = (),
        src_layer_range: Optional[range] = None,
        dst_layer_range: Optional[range] = None,
        tensor_num_per_layer: int = 2,
    ) -> None:
        """Write local blocks into blocks of a linked cluster (contract §7.15), in remote-accessible mode.

        Args:
            dst_cache_key: the remote blocks cache.
            src_cache: blocks cache that is read.
            src_blocks: local block for each entry of ``dst_blocks``.
            dst_blocks: remote blocks that are written, at least one.
            src_layer_range: as for ``push_cache``.
            dst_layer_range: as for ``push_cache``.
            tensor_num_per_layer: as for ``push_cache``.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: an integer is outside its width.
            AttributeError: ``dst_cache_key`` or ``src_cache`` is ``None``.
            LLMException: as for ``push_cache``; ``LLM_PARAM_INVALID`` also for a continuous cache, lists of
                different lengths, an index outside a cache, or different block sizes.
        """
        self._engine.push_blocks(
            dst_cache_key, src_cache, src_blocks, dst_blocks, src_layer_range, dst_layer_range, tensor_num_per_layer
        )
