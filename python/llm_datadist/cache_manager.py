"""``CacheManager``: allocate, register, copy, swap, pull, push and transfer caches (contract §7, §8).

Signatures, defaults and docstrings; every method is one call into the engine. Not for: checks, which are made there in
the order of the contract.

Errors of every method: ``TypeError`` for an argument of the wrong type, ``ValueError`` for an integer outside its
width, ``AttributeError`` where ``None`` is given for a cache or descriptor, and ``LLMException`` for the rest, with
``LLM_ENGINE_FINALIZED`` before anything else once the engine is finalized.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional, Union, cast

from llm_datadist import _core, layerwise
from llm_datadist.log import logged, shown
from llm_datadist.status import LLMException, LLMStatusCode, raise_if_false
from llm_datadist.types import MemInfo, Memtype, made_cache

if TYPE_CHECKING:
    from llm_datadist.layerwise import CacheTask, LayerSynchronizer, TransferConfig, TransferWithCacheKeyConfig
    from llm_datadist.stats import Stats
    from llm_datadist.types import BlocksCacheKey, Cache, CacheDesc, CacheKey, CacheKeyByIdAndIndex

__all__ = ["CacheManager"]


class _Finalized:
    """Stands where the engine was: every call of it is refused."""

    def __getattr__(self, name: str) -> Any:
        raise LLMException("the engine was finalized", status_code=LLMStatusCode.LLM_ENGINE_FINALIZED)


_FINALIZED = _Finalized()


class CacheManager:
    """The caches of one engine. Obtained from ``LLMDataDist.cache_manager``; usable from any number of threads.

    Args:
        native: the engine.
        options: what it was opened with.
    """

    # What every call goes to: the engine, or what refuses every call once it is finalized. An attribute of the instance
    # and not a property, whose call would take as long as finding a cache.
    _engine: _core.DataDist

    def __init__(self, native: _core.DataDist, options: dict[str, str]) -> None:
        self._native = native
        self._enable_remote_cache_accessible = options.get("llm.EnableRemoteCacheAccessible") == "1"
        self._is_call_linked = False
        self._initialized = True

    @property
    def _initialized(self) -> bool:
        return self._engine is self._native

    @_initialized.setter
    def _initialized(self, initialized: bool) -> None:
        self._engine = self._native if initialized else cast("_core.DataDist", _FINALIZED)

    def set_is_call_linked(self) -> None:
        """Note that ``LLMDataDist.link`` was called (contract §7.18).

        The engine knows by itself, and changes the default of ``remote_accessible``; this is for those who ask here.
        """
        self._is_call_linked = True

    @staticmethod
    def check_cache_key(cache_key: CacheKey) -> None:
        """Raise ``LLMException(LLM_PARAM_INVALID)`` unless exactly one of ``req_id`` and ``prefix_id`` is given."""
        _core.check_cache_key(cache_key)

    @logged
    def allocate_cache(
        self, cache_desc: CacheDesc, cache_keys: Union[tuple[CacheKey, ...], list[CacheKey]] = ()
    ) -> Cache:
        """Allocate a continuous cache from the pool of its placement (seed ``deprecated.md``, allocate_cache).

        The memory is held by the cache's id and by each of its keys, and returns to the pool when all are gone.

        Args:
            cache_desc: what to allocate; dimension 0 counts batch slots.
            cache_keys: key *i* names batch slot *i*. A placeholder (``req_id = 2**64 - 1``) leaves its slot without a
                key, trailing slots may be left out, and of equal keys the last takes effect.

        Returns:
            The cache: ``num_tensors`` page-aligned addresses, contents undefined.

        Raises:
            LLMException: ``LLM_PARAM_INVALID``, no pool, a shape without meaning, more keys than slots, or a key that
                already names a live cache; ``LLM_OUT_OF_MEMORY``, and nothing stays allocated.
        """
        handle = self._engine.allocate_cache(cache_desc, cache_keys)
        return made_cache(handle, cache_desc, self)

    @logged
    def deallocate_cache(self, cache: Cache) -> None:
        """Let go of a continuous cache by id (seed ``deprecated.md``, deallocate_cache).

        Its memory is released once its keys are gone too. A cache that is not there, or a registered one: no effect.

        Args:
            cache: a continuous cache; its ``tensor_addrs`` become empty.

        Raises:
            LLMException: ``LLM_PARAM_INVALID``, a blocks cache.
        """
        self._engine.deallocate_cache(cache)
        _invalidate(cache)

    @logged
    def remove_cache_key(self, cache_key: CacheKey) -> None:
        """Unbind a key, releasing its cache if that was the last reference (seed ``deprecated.md``, remove_cache_key).

        A key that is not there, or that names a registered cache: no effect.

        Args:
            cache_key: the key; its cluster id is ignored.
        """
        self._engine.remove_cache_key(cache_key)

    @logged
    def allocate_blocks_cache(self, cache_desc: CacheDesc, blocks_cache_key: Optional[BlocksCacheKey] = None) -> Cache:
        """Allocate a blocks cache from the pool of its placement (seed ``deprecated.md``, allocate_blocks_cache).

        Args:
            cache_desc: what to allocate; dimension 0 counts blocks.
            blocks_cache_key: its key, one per model; the cluster id is ignored.

        Returns:
            The cache: ``num_tensors`` page-aligned addresses, contents undefined.

        Raises:
            LLMException: ``LLM_PARAM_INVALID``, no pool, a shape without meaning, or a model that has a blocks cache;
                ``LLM_OUT_OF_MEMORY``, and nothing stays allocated.
        """
        handle = self._engine.allocate_blocks_cache(cache_desc, blocks_cache_key)
        return made_cache(handle, cache_desc, self, blocks=True)

    @logged
    def deallocate_blocks_cache(self, cache: Cache) -> None:
        """Release a blocks cache and its key at once (seed ``deprecated.md``, deallocate_blocks_cache).

        A cache that is not there, a CPU cache or a registered one: no effect.

        Args:
            cache: a blocks cache; its ``tensor_addrs`` become empty.

        Raises:
            LLMException: ``LLM_PARAM_INVALID``, a continuous cache.
        """
        self._engine.deallocate_blocks_cache(cache)
        _invalidate(cache)

    @logged
    def register_cache(
        self,
        cache_desc: CacheDesc,
        addrs: list[int],
        cache_keys: Union[tuple[CacheKey, ...], list[CacheKey]] = (),
        remote_accessible: Optional[bool] = None,
    ) -> Cache:
        """Enter memory of the caller as a continuous cache (contract §7.6).

        The memory must stay valid, readable and writable until :meth:`unregister_cache` and the end of the last copy.

        Args:
            cache_desc: what the memory holds.
            addrs: address of every tensor, none 0.
            cache_keys: key *i* names batch slot *i*; a key that names another cache names this one from now on.
            remote_accessible: whether peers may reach it one-sidedly; by default in ``DEVICE`` memory, unless
                ``LLMDataDist.link`` was called.

        Returns:
            The cache; its ``tensor_addrs`` equal ``addrs``.

        Raises:
            LLMException: ``LLM_PARAM_INVALID``, not one address per tensor, an address of 0, a shape without meaning,
                or ``remote_accessible=True`` after ``link``.
        """
        handle = self._engine.register_cache(cache_desc, addrs, cache_keys, remote_accessible)
        return made_cache(handle, cache_desc, self, registered=True)

    @logged
    def register_blocks_cache(
        self,
        cache_desc: CacheDesc,
        addrs: list[int],
        blocks_cache_key: Optional[BlocksCacheKey] = None,
        remote_accessible: Optional[bool] = None,
    ) -> Cache:
        """Enter memory of the caller as a blocks cache (contract §7.7).

        As :meth:`register_cache`, but dimension 0 counts blocks and one key names the whole; a second registration for
        one model takes its key over.
        """
        handle = self._engine.register_blocks_cache(cache_desc, addrs, blocks_cache_key, remote_accessible)
        return made_cache(handle, cache_desc, self, registered=True, blocks=True)

    @logged
    def unregister_cache(self, cache_id: int) -> None:
        """Remove a registered cache and its keys (contract §7.8); an unknown id has no effect.

        Args:
            cache_id: its id (int64).
        """
        self._engine.unregister_cache(cache_id)

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
        """Copy one range of one batch slot, the same in every tensor (seed ``copy_cache.md``).

        The bytes are there on return. Any pair of placements is accepted, and overlap is harmless.

        Args:
            dst: continuous cache that is written.
            src: continuous cache that is read.
            dst_batch_index: batch slot written (uint32).
            src_batch_index: batch slot read (uint32).
            offset: bytes skipped at the start of both slots (uint64).
            size: bytes copied in each tensor, or -1 for the rest of the source slot (int64).
            req_id: request the call belongs to (uint64); shown in its log lines.

        Raises:
            LLMException: ``LLM_PARAM_INVALID``, a blocks cache, unlike numbers of tensors, or a range outside a slot;
                ``LLM_KV_CACHE_NOT_EXIST``; ``LLM_TIMEOUT``, the limit ``sync_kv_timeout`` passed.
        """
        self._engine.copy_cache(dst, src, dst_batch_index, src_batch_index, offset, size, req_id)

    @logged
    def copy_blocks(self, cache: Cache, copy_block_info: Union[dict[int, list[int]], Any]) -> None:
        """Copy blocks inside one cache, in every tensor (seed ``deprecated.md``, copy_blocks).

        The result is that of copying the pairs in the order given. An index out of range is found before any copy.

        Args:
            cache: a blocks cache.
            copy_block_info: source block → list of destination blocks; or an integer array of shape ``(n, 2)`` with
                rows ``(source, destination)``.

        Raises:
            LLMException: ``LLM_PARAM_INVALID``, a continuous cache, or an index outside the blocks;
                ``LLM_KV_CACHE_NOT_EXIST``; ``LLM_TIMEOUT``, the limit ``sync_kv_timeout`` passed.
        """
        self._engine.copy_blocks(cache, copy_block_info)

    @logged
    def swap_blocks(self, src_cache: Cache, dst_cache: Cache, src_to_dst: Union[dict[int, int], Any]) -> None:
        """Copy blocks between a host and a device cache, in every tensor (seed ``deprecated.md``, swap_blocks).

        The placements give the direction. The bytes are there on return.

        Args:
            src_cache: blocks cache that is read.
            dst_cache: blocks cache that is written.
            src_to_dst: source block → destination block; or an integer array of shape ``(n, 2)`` with rows
                ``(source, destination)``.

        Raises:
            LLMException: ``LLM_PARAM_INVALID``, as a ``ValueError`` too: a continuous cache, an index outside the
                blocks, unlike block sizes or numbers of tensors, or placements that are not one ``HOST`` and one
                ``DEVICE``; ``LLM_KV_CACHE_NOT_EXIST``; ``LLM_TIMEOUT``, the limit ``sync_kv_timeout`` passed.
        """
        self._engine.swap_blocks(src_cache, dst_cache, src_to_dst)

    @logged
    def pull_cache(
        self,
        cache_key: Union[CacheKey, CacheKeyByIdAndIndex],
        cache: Cache,
        batch_index: int = 0,
        size: int = -1,
        **kwargs: Any,
    ) -> None:
        """Bring a batch slot of a linked cluster's cache here (contract §7.12).

        The bytes are there on return. Unless transfers are one-sided (``llm.EnableRemoteCacheAccessible``), a pull
        of every tensor uses the key up, and its owner lets go of the slot (seed ``deprecated.md``, allocate_cache).

        Args:
            cache_key: the far slot: by its key, or by cache id and slot; one-sided, only the latter.
            cache: continuous cache that is written.
            batch_index: batch slot written (uint32).
            size: bytes of each tensor from the start of the slot, or -1 for the size of the slot here (int64).
            **kwargs: ``src_layer_range`` and ``dst_layer_range``, a ``range`` of layers there and here, ``None`` or an
                empty one for all; ``tensor_num_per_layer``, tensors of one layer (uint32, above 0; 2 by default).
                Others are ignored.

        Raises:
            LLMException: ``LLM_PARAM_INVALID``, the own cluster, a blocks cache, a range outside a slot, unlike numbers
                of tensors, layers outside a cache; ``LLM_KV_CACHE_NOT_EXIST``, no such cache here or key there;
                ``LLM_NOT_YET_LINK``, no link, or one that broke; ``LLM_TIMEOUT``, the limit ``sync_kv_timeout`` passed.
                ``arrived`` says which rows are in place all the same.
        """
        self._engine.pull_cache(cache_key, cache, batch_index, size, kwargs)

    @logged
    def pull_blocks(
        self,
        src_cache_key: Union[CacheKey, CacheKeyByIdAndIndex, BlocksCacheKey],
        dst_cache: Cache,
        src_blocks: Union[list[int], tuple[int, ...]] = (),
        dst_blocks: Union[list[int], tuple[int, ...]] = (),
        **kwargs: Any,
    ) -> None:
        """Bring blocks, or a batch slot cut into blocks, of a linked cluster's cache here (contract §7.13).

        The bytes are there on return. A slot pulled by its key uses the key up, as in :meth:`pull_cache`.

        Args:
            src_cache_key: the far blocks cache by its ``BlocksCacheKey``, or a far slot by one of the other keys.
            dst_cache: blocks cache that is written.
            src_blocks: blocks read, one for each written; empty for a slot, whose bytes fill the blocks in order.
            dst_blocks: blocks written, at least one.
            **kwargs: as for :meth:`pull_cache`.

        Raises:
            LLMException: as for :meth:`pull_cache`; ``LLM_PARAM_INVALID`` also for a continuous ``dst_cache``, lists of
                unlike length, an index outside a cache, unlike block sizes, or more blocks than a slot fills.
        """
        self._engine.pull_blocks(src_cache_key, dst_cache, src_blocks, dst_blocks, kwargs)

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
        """Send a batch slot into a linked cluster's cache (contract §7.14); only one-sided.

        The bytes are there on return. A push of every layer unbinds the key of the slot that was read, if it has one.

        Args:
            dst_cache_key: the far slot, by cache id and slot.
            src_cache: continuous cache that is read.
            src_batch_index: batch slot read (uint32).
            src_layer_range: layers read; ``None`` for all whole ones, then ``dst_layer_range`` too.
            dst_layer_range: layers written, as many.
            size: -1, the whole slot.
            tensor_num_per_layer: tensors of one layer (uint32, above 0). A cache with fewer tensors has no layer:
                without ranges nothing is sent, and that is no error (contract §7.14); say 1 for one tensor.

        Raises:
            LLMException: ``LLM_PARAM_INVALID``, without ``llm.EnableRemoteCacheAccessible``, a blocks cache, layers or
                slots outside a cache, a slot larger than the far one, a cache registered as not accessible;
                ``LLM_KV_CACHE_NOT_EXIST``, no such cache here or there; ``LLM_NOT_YET_LINK``; ``LLM_TIMEOUT``.
                ``arrived`` says which rows are in place there all the same.
        """
        self._engine.push_cache(
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
        """Send blocks into a linked cluster's cache (contract §7.15); only one-sided.

        Args:
            dst_cache_key: the far blocks cache.
            src_cache: blocks cache that is read.
            src_blocks: blocks read, one for each written.
            dst_blocks: blocks written, at least one.
            src_layer_range: as for :meth:`push_cache`.
            dst_layer_range: as for :meth:`push_cache`.
            tensor_num_per_layer: as for :meth:`push_cache`: with the default nothing of a cache of one tensor is sent.

        Raises:
            LLMException: as for :meth:`push_cache`; ``LLM_PARAM_INVALID`` also for a continuous cache, lists of unlike
                length, an index outside a cache, or unlike block sizes.
        """
        self._engine.push_blocks(
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
        """Send the layers of a cache, each as soon as it is ready (seed ``transfer_cache_async.md``).

        Returns at once. A thread asks ``layer_synchronizer`` for one layer after the other, in ascending order, and
        only for those that a config needs. A layer that is ready goes to all of them at once; a config that is slow or
        fails holds back no other. A pull, a copy or another transfer of rows that move waits for its turn, and a cache
        that is deallocated meanwhile stays until the transfer has ended.

        Args:
            src_cache: the cache that is read, in ``DEVICE`` memory.
            layer_synchronizer: says when a layer is ready.
            transfer_configs: the destinations: ``TransferConfig``, or ``TransferWithCacheKeyConfig`` if transfers are
                one-sided (``llm.EnableRemoteCacheAccessible``). A ``src_layer_range`` of ``None`` is set to all layers.
            src_block_indices: blocks read (uint64), of a blocks cache.
            dst_block_indices: blocks written (uint64): one for each read, or those that the slot read is cut into.
            dst_block_memory_size: bytes of a block that is written, in one tensor (uint64). Needed for a slot that is
                cut into blocks; else ``None``, 0 or the size of a block here.

        Returns:
            The transfer. What becomes of each config is known by its code: ``LLM_SUCCESS``; ``LLM_PARAM_INVALID``, a
            layer that the synchronizer said is not ready, or that does not fit what is there at the destination;
            ``LLM_TIMEOUT``, a synchronizer that raised or took longer than its ``timeout_in_millis``, or a layer that
            took longer than ``sync_kv_timeout``; ``LLM_KV_CACHE_NOT_EXIST``, no such cache here or there;
            ``LLM_NOT_YET_LINK``; ``LLM_ENGINE_FINALIZED``; ``LLM_FAILED``, cancelled; ``None``, no layer of it came to
            be ready, because another config's did not.

        Raises:
            LLMException: ``LLM_PARAM_INVALID``, a cache in ``HOST`` memory, blocks into a slot, lists of unlike length,
                a block size that is missing or does not fit, tensors that are no whole layers, and in a config layers
                or a slot outside the cache, or not one address per tensor; ``LLM_FAILED``, no thread for the layers.
        """
        return layerwise.start(
            self._engine,
            src_cache,
            layer_synchronizer,
            transfer_configs,
            src_block_indices,
            dst_block_indices,
            dst_block_memory_size,
        )

    @logged
    def remap_registered_memory(self, mem_infos: Union[MemInfo, list[MemInfo]]) -> None:
        """Tell peers that registered memory has moved to other pages (contract §7.17).

        Nothing has to be done here: peers look up addresses anew with every transfer.

        Args:
            mem_infos: pieces of ``DEVICE`` memory, at least one.

        Raises:
            LLMException: ``LLM_PARAM_INVALID`` for every wrong argument, wrong types included; ``LLM_NOT_YET_LINK``,
                no link.
        """
        remap = self._engine.remap
        infos = [mem_infos] if isinstance(mem_infos, MemInfo) else mem_infos
        raise_if_false(isinstance(infos, list), "mem_infos = {} is not allowed: a MemInfo or a list", shown(infos))
        for info in infos:
            _check_mem_info(info)
        raise_if_false(infos, "mem_infos = [] is not allowed: at least one MemInfo")
        remap()

    @logged
    def tensor_views(self, cache: Cache) -> list[_core.TensorView]:
        """Return a view of every tensor without a copy, for numpy (``view.numpy()``) and ``from_dlpack``.

        Memory of a pool stays as long as a view, or an array made from one, lives, even when the cache is deallocated.
        Memory of a registered or CPU cache is the caller's: no view keeps it alive, and one that is used after the
        caller unmapped it ends the process.

        Args:
            cache: a cache of this engine, or a CPU cache.

        Raises:
            LLMException: ``LLM_KV_CACHE_NOT_EXIST``; ``LLM_PARAM_INVALID``, memory of the caller's that is not mapped
                readable and writable; ``LLM_FEATURE_NOT_ENABLED``, memory the CPU cannot address.
        """
        return self._engine.tensor_views(cache)

    def stats(self) -> Stats:
        """Return the engine's counters, as plain dicts: :class:`llm_datadist.stats.Stats` documents every field."""
        return self._engine.stats()

    def huge_page_bytes(self) -> dict[str, int]:
        """Return how many bytes of each pool, ``"device"`` and ``"host"``, lie in huge pages now.

        Asks the kernel about the whole process, which takes milliseconds or more: for a report, not for a loop.
        """
        return self._engine.huge_page_bytes()


def _check_mem_info(info: object) -> None:
    raise_if_false(isinstance(info, MemInfo), "mem_infos: {} is no MemInfo", shown(info))
    if isinstance(info, MemInfo):
        device = info.mem_type == Memtype.MEM_TYPE_DEVICE
        raise_if_false(device, "mem_type = {} is not allowed: Memtype.MEM_TYPE_DEVICE", info.mem_type)
        # An address or a size may be None.
        raise_if_false(info.addr, "addr = {} is not allowed: not 0", info.addr)
        raise_if_false((info.size or 0) > 0, "size = {} is not allowed: above 0", info.size)


def _invalidate(cache: Cache) -> None:
    cache._valid = False  # noqa: SLF001  (the handle's state is the manager's to change)
    cache._tensor_addrs = []  # noqa: SLF001
