"""``CacheManager``: allocate, register, copy, swap, pull, push and transfer caches.

Every method is one call into the engine, which checks the arguments in the order of the contract.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional, Union

from llm_datadist import _core
from llm_datadist.original import layerwise
from llm_datadist.original.caches import EngineCaches
from llm_datadist.original.logged_calls import logged, shown
from llm_datadist.original.spelling import check_keywords
from llm_datadist.original.status import raise_if_false
from llm_datadist.original.types import MemInfo, Memtype, made_cache

if TYPE_CHECKING:
    from llm_datadist.original.layerwise import CacheTask, LayerSynchronizer, TransferConfig, TransferWithCacheKeyConfig
    from llm_datadist.original.types import BlocksCacheKey, Cache, CacheDesc, CacheKey, CacheKeyByIdAndIndex

__all__ = ["CacheManager"]


class CacheManager(EngineCaches[_core.CacheCalls]):
    """The caches of an engine in CacheManager mode. ``LLMDataDist.cache_manager`` returns it.

    Any number of threads may use a manager. ``transfer_cache_async`` starts a transfer and returns at once. When any
    other call returns, the bytes are in place. ``LLMDataDist.engine`` and ``Cache.native`` have what the original
    lacks. "Remote-accessible mode" is the option ``llm.EnableRemoteCacheAccessible``. ``sync_kv_timeout`` is the time
    limit of a call in milliseconds (1000 by default).

    Args:
        native: the engine.
        options: the options with which it was opened.

    Raises:
        LLMException: every method except ``check_cache_key`` and ``set_is_call_linked`` raises
            ``LLM_ENGINE_FINALIZED``, before any other check, once the engine is finalized. ``LLM_FAILED`` is a failure
            that no other code names.
    """

    def __init__(self, native: _core.DataDist, options: dict[str, str]) -> None:
        super().__init__(native, _core.CacheCalls(native))
        self._enable_remote_cache_accessible = options.get("llm.EnableRemoteCacheAccessible") == "1"
        self._is_call_linked = False

    def __repr__(self) -> str:
        return (
            f"CacheManager(initialized={self._initialized}, "
            f"enable_remote_cache_accessible={self._enable_remote_cache_accessible})"
        )

    @logged
    def allocate_cache(
        self,
        cache_desc: CacheDesc,
        cache_keys: Union[tuple[CacheKey, ...], list[CacheKey]] = (),
    ) -> Cache:
        """Allocate a continuous cache from the pool of its placement.

        The id of the cache and each of its keys hold the memory. It is released when all of these references are gone.
        ``with manager.allocate_cache(...) as cache:`` deallocates the cache at the end of the block.

        Args:
            cache_desc: tensors of shape ``[batch slots, ...]``, together fewer than 2^63 bytes.
            cache_keys: key *i* names batch slot *i*. A placeholder (``req_id = 2**64 - 1``) names nothing, trailing
                slots may be left out, and of equal keys the last one counts.

        Returns:
            The cache: ``num_tensors`` page-aligned addresses. The contents are undefined.

        Raises:
            TypeError: an argument has the wrong type.
            AttributeError: ``cache_desc`` is ``None``.
            LLMException: ``LLM_PARAM_INVALID``: no pool for the placement, an invalid shape, more keys than slots, or a
                key that names a live cache; ``LLM_OUT_OF_MEMORY``: the pool is full. Nothing stays allocated.
        """
        handle = self._open_calls.allocate_cache(cache_desc, cache_keys)
        return made_cache(handle, cache_desc, self)

    @logged
    def deallocate_cache(self, cache: Cache) -> None:
        """Drop the reference that the id of a continuous cache holds.

        The memory is released when no key holds it either. A cache that does not exist, a cache that was released, and
        a registered cache are not an error: nothing is released.

        Args:
            cache: a continuous cache. Its ``tensor_addrs`` become empty.

        Raises:
            TypeError: ``cache`` is not a ``Cache``.
            AttributeError: ``cache`` is ``None``.
            LLMException: ``LLM_PARAM_INVALID``: a blocks cache.
        """
        self._open_calls.deallocate_cache(cache)
        cache._invalidate()  # noqa: SLF001  (the manager changes the state of the handle)

    @logged
    def remove_cache_key(self, cache_key: CacheKey) -> None:
        """Unbind a key, and release its cache if that was the last reference.

        A key that does not exist is not an error. Keys of registered caches stay.

        Args:
            cache_key: the key. Its cluster id is ignored.

        Raises:
            TypeError: ``cache_key`` is not a ``CacheKey``.
            AttributeError: ``cache_key`` is ``None``.
        """
        self._check_open()
        self._datadist.remove_cache_key(cache_key)

    @logged
    def allocate_blocks_cache(self, cache_desc: CacheDesc, blocks_cache_key: Optional[BlocksCacheKey] = None) -> Cache:
        """Allocate a blocks cache from the pool of its placement.

        ``with manager.allocate_blocks_cache(...) as cache:`` deallocates the cache at the end of the block.

        Args:
            cache_desc: tensors of shape ``[blocks, ...]``.
            blocks_cache_key: key of the whole cache, one for each model. Its cluster id is ignored.

        Returns:
            The cache: ``num_tensors`` page-aligned addresses. The contents are undefined.

        Raises:
            TypeError: an argument has the wrong type.
            AttributeError: ``cache_desc`` is ``None``.
            LLMException: ``LLM_PARAM_INVALID``: no pool for the placement, an invalid shape, or a key whose model has a
                blocks cache already; ``LLM_OUT_OF_MEMORY``: as for ``allocate_cache``. Nothing stays allocated.
        """
        handle = self._open_calls.allocate_blocks_cache(cache_desc, blocks_cache_key)
        return made_cache(handle, cache_desc, self, blocks=True)

    @logged
    def deallocate_blocks_cache(self, cache: Cache) -> None:
        """Release a blocks cache and its key at once.

        A cache that does not exist, a CPU cache and a registered cache are not an error: nothing is released.

        Args:
            cache: a blocks cache. Its ``tensor_addrs`` become empty.

        Raises:
            TypeError: ``cache`` is not a ``Cache``.
            AttributeError: ``cache`` is ``None``.
            LLMException: ``LLM_PARAM_INVALID``: a continuous cache.
        """
        self._open_calls.deallocate_blocks_cache(cache)
        cache._invalidate()  # noqa: SLF001  (the manager changes the state of the handle)

    @logged
    def register_cache(
        self,
        cache_desc: CacheDesc,
        addrs: list[int],
        cache_keys: Union[tuple[CacheKey, ...], list[CacheKey]] = (),
        remote_accessible: Optional[bool] = None,
    ) -> Cache:
        """Register memory of the caller as a continuous cache.

        The memory must be valid, readable and writable until ``unregister_cache`` has returned.
        ``with manager.register_cache(...) as cache:`` unregisters the cache at the end of the block.

        Args:
            cache_desc: tensors of shape ``[batch slots, ...]``.
            addrs: address of each tensor (uint64), none 0.
            cache_keys: key *i* names batch slot *i*. A key that names another cache names this one from now on.
            remote_accessible: whether peers may reach the cache. In remote-accessible mode, ``None`` means ``True`` for
                ``DEVICE`` and ``False`` for ``HOST`` memory, and always ``False`` after ``LLMDataDist.link``. In the
                other mode, peers may reach it unless this is ``False``.

        Returns:
            The cache. Its ``tensor_addrs`` equal ``addrs``.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: an address is outside uint64.
            AttributeError: ``cache_desc`` is ``None``.
            LLMException: ``LLM_PARAM_INVALID``: not one address for each tensor, an address of 0, an invalid shape, or
                ``remote_accessible=True`` after ``LLMDataDist.link``.
        """
        handle = self._open_calls.register_cache(cache_desc, addrs, cache_keys, remote_accessible)
        return made_cache(handle, cache_desc, self, registered=True)

    @logged
    def register_blocks_cache(
        self,
        cache_desc: CacheDesc,
        addrs: list[int],
        blocks_cache_key: Optional[BlocksCacheKey] = None,
        remote_accessible: Optional[bool] = None,
    ) -> Cache:
        """Register memory of the caller as a blocks cache.

        The rules for the memory are those of ``register_cache``.

        Args:
            cache_desc: tensors of shape ``[blocks, ...]``.
            addrs: address of each tensor (uint64), none 0.
            blocks_cache_key: key of the whole cache. A later registration with the same model id takes the key over.
            remote_accessible: as for ``register_cache``.

        Returns:
            The cache. Its ``tensor_addrs`` equal ``addrs``.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: an address is outside uint64.
            AttributeError: ``cache_desc`` is ``None``.
            LLMException: as for ``register_cache``.
        """
        handle = self._open_calls.register_blocks_cache(cache_desc, addrs, blocks_cache_key, remote_accessible)
        return made_cache(handle, cache_desc, self, registered=True, blocks=True)

    @logged
    def unregister_cache(self, cache_id: int) -> None:
        """Remove a registration and its keys.

        An unknown id and the id of an allocated cache are not an error: nothing is removed. The call is allowed at any
        time. It waits for transfers that use the memory, up to ``sync_kv_timeout``.

        Args:
            cache_id: id of a registered cache (int64).

        Raises:
            TypeError: ``cache_id`` is not an ``int``.
            ValueError: ``cache_id`` is outside int64.
            LLMException: ``LLM_TIMEOUT``: a transfer still uses the memory, which must stay valid. Call again.
        """
        self._open_calls.unregister_cache(cache_id)

    @logged
    def copy_cache(
        self,
        dst: Cache,
        src: Cache,
        dst_batch_index: int = 0,
        src_batch_index: int = 0,
        offset: int = 0,
        size: int = -1,
        req_id: Optional[int] = None,
    ) -> None:
        """Copy one range of a batch slot to the same range of another, in every tensor.

        Every pair of placements is accepted. The ranges may overlap.

        Args:
            dst: continuous cache that is written.
            src: continuous cache that is read.
            dst_batch_index: batch slot that is written (uint32).
            src_batch_index: batch slot that is read (uint32).
            offset: bytes that are skipped at the start of both slots (uint64).
            size: bytes that are copied in each tensor, or -1 for the rest of the source slot (int64).
            req_id: id of the request, shown in the log lines of the call (uint64), or ``None``.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: an integer is outside its width.
            AttributeError: ``dst`` or ``src`` is ``None``.
            LLMException: ``LLM_PARAM_INVALID``: a blocks cache, different numbers of tensors, or a range outside a
                slot; ``LLM_KV_CACHE_NOT_EXIST``: a cache was released; ``LLM_TIMEOUT``: other calls used the rows for
                longer than ``sync_kv_timeout``.
        """
        self._open_calls.copy_cache(dst, src, dst_batch_index, src_batch_index, offset, size, req_id)

    @logged
    def copy_blocks(self, cache: Cache, copy_block_info: dict[int, list[int]]) -> None:
        """Copy blocks inside one cache, in every tensor.

        The result is the same as if the pairs were copied one after the other, in the order given. All indices are
        checked before any byte is copied.

        Args:
            cache: a blocks cache.
            copy_block_info: the destination blocks of each source block.

        Raises:
            TypeError: an argument has the wrong type.
            AttributeError: ``cache`` or ``copy_block_info`` is ``None``.
            LLMException: ``LLM_PARAM_INVALID``: a continuous cache, or an index outside the blocks;
                ``LLM_KV_CACHE_NOT_EXIST``: the cache was released; ``LLM_TIMEOUT``: other calls used the rows for
                longer than ``sync_kv_timeout``.
        """
        self._open_calls.copy_blocks(cache, copy_block_info)

    @logged
    def swap_blocks(self, src_cache: Cache, dst_cache: Cache, src_to_dst: dict[int, int]) -> None:
        """Copy blocks between a host and a device cache, in every tensor.

        The placements give the direction. The two caches may have different numbers of blocks.

        Args:
            src_cache: blocks cache that is read.
            dst_cache: blocks cache that is written.
            src_to_dst: the destination block of each source block.

        Raises:
            TypeError: an argument has the wrong type.
            AttributeError: an argument is ``None``.
            LLMMismatchException: an ``LLMException`` with ``LLM_PARAM_INVALID`` that is a ``ValueError`` as well: a
                continuous cache, an index outside the blocks, different block sizes or numbers of tensors, or
                placements that are not one ``HOST`` and one ``DEVICE``.
            LLMException: ``LLM_KV_CACHE_NOT_EXIST``: a cache was released; ``LLM_TIMEOUT``: other calls used the rows
                for longer than ``sync_kv_timeout``.
        """
        self._open_calls.swap_blocks(src_cache, dst_cache, src_to_dst)

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
        """Read a batch slot of a linked cluster into a local slot.

        Outside remote-accessible mode, a successful pull of every tensor uses the key up, and the owner drops that
        reference.

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
            check_keywords(CacheManager.pull_cache, kwargs)
        self._open_calls.pull_cache(
            cache_key, cache, batch_index, size, src_layer_range, dst_layer_range, tensor_num_per_layer
        )

    @logged
    def pull_blocks(
        self,
        src_cache_key: Union[CacheKey, CacheKeyByIdAndIndex, BlocksCacheKey],
        dst_cache: Cache,
        src_blocks: Union[list[int], tuple[int, ...]] = (),
        dst_blocks: Union[list[int], tuple[int, ...]] = (),
        *,
        src_layer_range: Optional[range] = None,
        dst_layer_range: Optional[range] = None,
        tensor_num_per_layer: int = 2,
        **kwargs: Any,
    ) -> None:
        """Read blocks of a linked cluster, or a slot that is split into blocks, into local blocks.

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
            check_keywords(CacheManager.pull_blocks, kwargs)
        self._open_calls.pull_blocks(
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
        """Write a local batch slot into a slot of a linked cluster, in remote-accessible mode.

        A push of all layers releases the key of the local slot, if it has one. After a failure, part
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
        self._open_calls.push_cache(
            dst_cache_key, src_cache, src_batch_index, src_layer_range, dst_layer_range, size, tensor_num_per_layer
        )

    @logged
    def push_blocks(
        self,
        dst_cache_key: BlocksCacheKey,
        src_cache: Cache,
        src_blocks: Union[list[int], tuple[int, ...]] = (),
        dst_blocks: Union[list[int], tuple[int, ...]] = (),
        src_layer_range: Optional[range] = None,
        dst_layer_range: Optional[range] = None,
        tensor_num_per_layer: int = 2,
    ) -> None:
        """Write local blocks into blocks of a linked cluster, in remote-accessible mode.

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
            LLMException: as for ``push_cache``; ``LLM_PARAM_INVALID`` also for a continuous cache, lists of different
                lengths, an index outside a cache, or different block sizes.
        """
        self._open_calls.push_blocks(
            dst_cache_key, src_cache, src_blocks, dst_blocks, src_layer_range, dst_layer_range, tensor_num_per_layer
        )

    @logged
    def transfer_cache_async(
        self,
        src_cache: Cache,
        layer_synchronizer: LayerSynchronizer,
        transfer_configs: Union[
            list[TransferConfig],
            tuple[TransferConfig, ...],
            list[TransferWithCacheKeyConfig],
            tuple[TransferWithCacheKeyConfig, ...],
        ],
        src_block_indices: Optional[Union[list[int], tuple[int, ...]]] = None,
        dst_block_indices: Optional[Union[list[int], tuple[int, ...]]] = None,
        dst_block_memory_size: Optional[int] = None,
    ) -> CacheTask:
        """Send the layers of a cache, each as soon as it is ready.

        The call returns at once. A thread calls ``layer_synchronizer`` for each layer that a config needs, in ascending
        order. A layer that is ready is sent to every config that needs it. A slow or failed config delays no others.
        Other calls that use the same rows take turns with the transfer. A cache that is deallocated during the
        transfer stays allocated until the transfer ends.

        Args:
            src_cache: cache that is read, in ``DEVICE`` memory.
            layer_synchronizer: reports when a layer is ready.
            transfer_configs: the destinations; ``TransferConfig``, or ``TransferWithCacheKeyConfig`` in
                remote-accessible mode. A ``src_layer_range`` of ``None`` is replaced by all layers in the config
                object.
            src_block_indices: blocks of a blocks cache that are read (uint64).
            dst_block_indices: blocks that are written (uint64): one for each block that is read, or one for each piece
                of a slot that is split into blocks.
            dst_block_memory_size: bytes of a destination block in one tensor (uint64). Needed for a slot that is split
                into blocks; else ``None``, 0 or the local block size.

        Returns:
            The transfer. The result of a config is one of: ``LLM_SUCCESS``; ``LLM_PARAM_INVALID``: the synchronizer
            reported a layer as not ready, or the layer does not fit the destination; ``LLM_TIMEOUT``: the synchronizer
            raised or exceeded its ``timeout_in_millis``, or sending a layer took longer than ``sync_kv_timeout``;
            ``LLM_KV_CACHE_NOT_EXIST``: a cache does not exist; ``LLM_NOT_YET_LINK``; ``LLM_ENGINE_FINALIZED``;
            ``LLM_FAILED``: cancelled, or another failure; ``None``: the transfer stopped before any of its layers
            became ready.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: an integer is outside its width.
            LLMException: ``LLM_PARAM_INVALID``: for example a cache in ``HOST`` memory, blocks into a slot, or layers
                outside the cache; ``LLM_FAILED``: no thread could be started.
        """
        self._check_open()
        return layerwise.start(
            self._datadist,
            src_cache,
            layer_synchronizer,
            transfer_configs,
            src_block_indices,
            dst_block_indices,
            dst_block_memory_size,
        )

    @logged
    def remap_registered_memory(self, mem_infos: Union[MemInfo, list[MemInfo]]) -> None:
        """Accept that registered memory has moved to other pages.

        It does nothing, because peers look up addresses with every transfer.

        Args:
            mem_infos: ranges of ``DEVICE`` memory, at least one.

        Raises:
            LLMException: ``LLM_PARAM_INVALID`` for every wrong argument, also for a wrong type; ``LLM_NOT_YET_LINK``:
                there is no link, and no communicator is ``PREPARING``.
        """
        self._check_open()
        infos = [mem_infos] if isinstance(mem_infos, MemInfo) else mem_infos
        raise_if_false(isinstance(infos, list), "mem_infos={} is not a MemInfo or a list", shown(infos))
        for info in infos:
            _check_mem_info(info)
        raise_if_false(infos, "mem_infos=[] is empty; give at least one MemInfo")
        self._datadist.remap()

    @logged
    def tensor_views(self, cache: Cache) -> list[_core.TensorView]:
        """Return a view of every tensor, without a copy, for numpy and ``from_dlpack``.

        ``view.numpy()`` returns an array. Pool memory stays mapped as long as a view of it, or an array made from one,
        exists, even after a deallocation. Memory of a registered or CPU cache belongs to the caller, and no view keeps
        it alive: access after the caller unmapped it ends the process. The original does not have this method.

        Args:
            cache: a cache of this engine, or a CPU cache.

        Returns:
            A view of the shape and data type of the descriptor for each tensor.

        Raises:
            TypeError: ``cache`` is not a ``Cache``.
            AttributeError: ``cache`` is ``None``.
            LLMException: ``LLM_KV_CACHE_NOT_EXIST``: the cache was released; ``LLM_PARAM_INVALID``: memory of the
                caller is not mapped readable and writable; ``LLM_FEATURE_NOT_ENABLED``: the CPU cannot address the
                memory.
        """
        self._check_open()
        return self._datadist.tensor_views(cache)

    def set_is_call_linked(self) -> None:
        """Note that ``LLMDataDist.link`` was called. It has no other effect."""
        self._is_call_linked = True


def _check_mem_info(info: object) -> None:
    raise_if_false(isinstance(info, MemInfo), "mem_infos contains {}, which is not a MemInfo", shown(info))
    if isinstance(info, MemInfo):
        device = info.mem_type == Memtype.MEM_TYPE_DEVICE
        raise_if_false(device, "mem_type={} is not {}", info.mem_type, Memtype.MEM_TYPE_DEVICE)
        # An address or a size may be None.
        raise_if_false(info.addr, "addr={} is not an address", info.addr)
        raise_if_false((info.size or 0) > 0, "size={} is not above 0", info.size)
