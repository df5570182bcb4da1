"""``KvCacheManager`` and its handle ``KvCache``: the caches of an engine in KvCacheManager mode.

The manager checks the role. The engine makes all other checks, in the order of the contract.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional, Union

from llm_datadist import _core
from llm_datadist.original import layerwise
from llm_datadist.original.arguments import refuse_none
from llm_datadist.original.caches import CacheHandle, EngineCaches
from llm_datadist.original.cluster_info import LLMRole
from llm_datadist.original.logged_calls import logged
from llm_datadist.original.spelling import check_keywords
from llm_datadist.original.status import LLMException, LLMStatusCode, raise_if_false, raise_if_true
from llm_datadist.original.tensors import Tensor
from llm_datadist.original.types import CacheDesc, Placement

if TYPE_CHECKING:
    from llm_datadist.original.layerwise import CacheTask, LayerSynchronizer, TransferConfig
    from llm_datadist.original.types import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex

__all__ = ["KvCache", "KvCacheManager"]

_UINT64_MAX = 2**64 - 1


class KvCache(CacheHandle):
    """The handle of a cache in KvCacheManager mode.

    A ``KvCacheManager`` or ``create_cpu_cache`` makes it. Dropping the last handle deallocates the cache, unless the
    cache was deallocated or its manager is finalized. Its keys still hold the memory. ``with
    manager.allocate_cache(...) as cache:`` deallocates the cache at the end of the block.

    Args:
        cache_id: 1 or more for a cache of an engine, -1 for a CPU cache (int64).
        cache_desc: the descriptor.
        per_device_tensor_addrs: for each device, the address of each tensor.
        kv_cache_manager: the manager that made it, or ``None``.

    Raises:
        TypeError: ``cache_id`` is not an ``int``.
        ValueError: ``cache_id`` is outside int64.
    """

    _cache_manager: Optional[KvCacheManager] = None

    def __init__(
        self,
        cache_id: int,
        cache_desc: CacheDesc,
        per_device_tensor_addrs: list[list[int]],
        kv_cache_manager: Optional[KvCacheManager],
    ) -> None:
        _core.check_int64("cache_id", cache_id)
        self._cache_id = cache_id
        self._cache_desc = cache_desc
        self._per_device_tensor_addrs = per_device_tensor_addrs
        self._num_devices = len(per_device_tensor_addrs)
        self._cache_manager = kv_cache_manager
        self._valid = True

    @classmethod
    def create_cpu_cache(cls, cache_desc: CacheDesc, addrs: Union[list[int], list[list[int]]]) -> KvCache:
        """Make a blocks cache over host memory of the caller, for ``KvCacheManager.swap_blocks``.

        The memory must stay valid, readable and writable while the handle is used.

        Args:
            cache_desc: tensors of shape ``[blocks, ...]`` with the placement ``HOST``.
            addrs: address of each tensor (uint64), none 0; or one such list for each device. An engine has one device,
                so calls refuse a cache with several devices.

        Raises:
            TypeError: an argument has the wrong type.
            AttributeError: ``cache_desc`` is ``None``.
            ValueError: an address is outside uint64.
            LLMException: ``LLM_PARAM_INVALID``: another placement, no addresses, not one address for each tensor, an
                address of 0, a mix of addresses and lists, or an invalid shape.
        """
        refuse_none("cache_desc", cache_desc)
        _core.check_isinstance("cache_desc", cache_desc, CacheDesc)
        placement = cache_desc.placement
        raise_if_false(placement == Placement.HOST, "placement={} is not Placement.HOST", placement)
        per_device = _per_device(addrs, cache_desc.num_tensors)
        handles = [_core.LooseCache(cache_desc, device) for device in per_device]
        cache = cls(-1, cache_desc, per_device, None)
        cache._handle = handles[0]
        cache._is_blocks_cache = True
        return cache

    @property
    def per_device_tensor_addrs(self) -> list[list[int]]:
        """For each device, the address of each tensor; empty after a deallocation."""
        return self._per_device_tensor_addrs

    def _invalidate(self) -> None:
        """Note that the cache was deallocated."""
        self._valid = False
        self._per_device_tensor_addrs = []

    def _release(self) -> None:
        if self._cache_manager is not None and self._valid:
            self._cache_manager.deallocate_cache(self)

    def __repr__(self) -> str:
        return f"KvCache(cache_id = {self._cache_id}, num_devices = {len(self._per_device_tensor_addrs)})"

    def __del__(self) -> None:
        # This may run on any thread, inside any call, in a forked child and while the interpreter exits. It therefore
        # writes no log, takes no Python lock and raises nothing (tests: `tests/test_kv_cache_manager.py`).
        try:
            manager = self._cache_manager
            if self._valid and manager is not None and manager.is_initialized():
                self._valid = False
                manager._calls.release(self)  # noqa: SLF001  (without the log of the public method)
        except Exception:  # noqa: BLE001, S110  (a finalizer cannot report a failure)
            pass


def _per_device(addrs: Union[list[int], list[list[int]]], num_tensors: int) -> list[list[int]]:
    """Return the addresses as one list for each device."""
    _core.check_isinstance("addrs", addrs, list, allow_none=False)
    raise_if_false(addrs, "addrs=[] is empty; give one address for each of {} tensors", num_tensors)
    flat: list[int] = []
    nested: list[list[int]] = []
    for element in addrs:
        _core.check_isinstance("addrs element", element, [list, int], allow_none=False)
        if isinstance(element, list):
            _core.check_isinstance("addrs element", element, list, int)
            _one_per_tensor(element, num_tensors)
            nested.append(list(element))
        else:
            flat.append(element)
        mixed = bool(flat and nested)
        raise_if_true(
            mixed,
            "addrs mixes int and list; entries should be consistent (an address per tensor, or a list per device)",
        )
    if flat:
        _one_per_tensor(flat, num_tensors)
    return nested or [flat]


def _one_per_tensor(addrs: list[int], num_tensors: int) -> None:
    raise_if_false(
        len(addrs) == num_tensors, "len(addrs)={} differs from the number of tensors ({})", len(addrs), num_tensors
    )


class KvCacheManager(EngineCaches["_core.KvCaches"]):
    """The caches of an engine in KvCacheManager mode. ``LLMDataDist.kv_cache_manager`` returns it.

    Any number of threads may use a manager, which the original does not allow. All calls are
    synchronous except ``transfer_cache_async``: when a call returns, the bytes are in place. ``sync_kv_timeout`` is the
    time limit of a call in milliseconds (1000 by default).

    Args:
        native: the engine.
        role: the role of the cluster. It decides which calls are allowed.

    Raises:
        TypeError: ``role`` is not an ``LLMRole``, or ``native`` is not an engine.
        LLMException: every method except ``is_initialized`` and ``check_cache_key`` raises ``LLM_ENGINE_FINALIZED``,
            before any other check, once the engine is finalized. ``LLM_FAILED`` is a failure that no other code names.
    """

    def __init__(self, native: _core.DataDist, role: LLMRole) -> None:
        _core.check_isinstance("role", role, LLMRole, allow_none=False)
        super().__init__(native, _core.KvCaches(native))
        self._role = role

    def __repr__(self) -> str:
        return f"KvCacheManager(initialized={self._initialized}, role={self._role})"

    def _check_role(self, role: LLMRole, call: str) -> None:
        """Raise unless the engine is open and has the role that may make the call."""
        self._check_open()
        raise_if_false(self._role == role, "{} needs {}, and the role is {}", call, role, self._role)

    def _switch_role(self, role: LLMRole) -> None:
        """Set the role after ``LLMDataDist.switch_role``."""
        self._role = role

    def _made(self, handle: _core.ManagedCache, cache_desc: CacheDesc) -> KvCache:
        cache = KvCache(handle.cache_id, cache_desc, [handle.tensor_addrs()], self)
        cache._handle = handle  # noqa: SLF001  (the engine's reference to the cache)
        return cache

    def is_initialized(self) -> bool:
        """Return whether the engine is open: ``True`` until ``finalize``."""
        return self._initialized

    @logged
    def allocate_cache(
        self, cache_desc: CacheDesc, cache_keys: Union[tuple[CacheKey, ...], list[CacheKey]] = ()
    ) -> KvCache:
        """Allocate a continuous cache in device memory.

        The id of the cache and each of its keys hold the memory. It is released when all of these references are gone:
        a cache that was deallocated can still be pulled by its keys.

        Args:
            cache_desc: tensors of shape ``[batch slots, ...]`` with the placement ``DEVICE``.
            cache_keys: key *i* names batch slot *i*; for ``LLMRole.PROMPT`` only. A placeholder (``req_id = 2**64 -
                1``) names nothing, trailing slots may be left out, and of equal keys the last one counts.

        Returns:
            The cache: ``num_tensors`` page-aligned addresses. The contents are undefined.

        Raises:
            TypeError: an argument has the wrong type.
            AttributeError: ``cache_desc`` is ``None``.
            LLMException: ``LLM_PARAM_INVALID``: another placement, keys with another role, more keys than slots, an
                invalid shape, or a key that names a live cache; ``LLM_DEVICE_OUT_OF_MEMORY``: the pool is full. Nothing
                stays allocated.
        """
        may_name = self._role == LLMRole.PROMPT
        return self._made(self._open_calls.allocate_cache(cache_desc, cache_keys, may_name), cache_desc)

    @logged
    def allocate_blocks_cache(
        self, cache_desc: CacheDesc, blocks_cache_key: Optional[BlocksCacheKey] = None
    ) -> KvCache:
        """Allocate a blocks cache in device memory.

        Args:
            cache_desc: tensors of shape ``[blocks, ...]`` with the placement ``DEVICE``.
            blocks_cache_key: key of the whole cache, one for each model; not for ``LLMRole.DECODER``.

        Returns:
            The cache: ``num_tensors`` page-aligned addresses. The contents are undefined.

        Raises:
            TypeError: an argument has the wrong type.
            AttributeError: ``cache_desc`` is ``None``.
            LLMException: ``LLM_PARAM_INVALID``: another placement, a key with ``LLMRole.DECODER``, an invalid shape, or
                a key whose model has a blocks cache already; ``LLM_DEVICE_OUT_OF_MEMORY``: the pool is full. Nothing
                stays allocated.
        """
        may_name = self._role != LLMRole.DECODER
        return self._made(self._open_calls.allocate_blocks_cache(cache_desc, blocks_cache_key, may_name), cache_desc)

    @logged
    def deallocate_cache(self, cache: KvCache) -> None:
        """Drop the reference that the id of a continuous cache holds, or release a blocks cache.

        A continuous cache is released when no key holds it either. A blocks cache and its key are released at once. A
        cache that does not exist is not an error.

        Args:
            cache: a cache in ``DEVICE`` memory. Its ``per_device_tensor_addrs`` become empty.

        Raises:
            TypeError: ``cache`` is not a ``KvCache``.
            AttributeError: ``cache`` is ``None``.
            LLMException: ``LLM_PARAM_INVALID``: a cache in ``HOST`` memory.
        """
        self._open_calls.deallocate_cache(cache)
        cache._invalidate()  # noqa: SLF001  (the manager changes the state of the handle)

    @logged
    def remove_cache_key(self, cache_key: CacheKey) -> None:
        """Unbind a key, and release its cache if that was the last reference.

        The call is for ``LLMRole.PROMPT``. A key that does not exist is not an error.

        Args:
            cache_key: the key. Its cluster id is ignored.

        Raises:
            TypeError: ``cache_key`` is not a ``CacheKey``.
            AttributeError: ``cache_key`` is ``None``.
            LLMException: ``LLM_PARAM_INVALID``: another role.
        """
        self._check_role(LLMRole.PROMPT, "remove_cache_key")
        self._datadist.remove_cache_key(cache_key)

    @logged
    def pull_cache(
        self,
        cache_key: Union[CacheKey, CacheKeyByIdAndIndex],
        kv_cache: KvCache,
        batch_index: int = 0,
        size: int = -1,
        *,
        src_layer_range: Optional[range] = None,
        dst_layer_range: Optional[range] = None,
        tensor_num_per_layer: int = 2,
        src_cache_offset: Optional[int] = None,
        dst_cache_offset: Optional[int] = None,
        **kwargs: Any,
    ) -> None:
        """Read a batch slot of a linked prompt cluster into a local slot.

        The call is for ``LLMRole.DECODER``. A successful pull of every tensor uses up the key: the owner drops that
        reference. Pulls of a part of the layers use up the key once every tensor was pulled.

        Args:
            cache_key: the remote slot, by its key, or by cache id and slot.
            kv_cache: continuous cache that is written.
            batch_index: batch slot that is written (uint32).
            size: bytes of each tensor, or -1 for the rest of the local slot (int64).
            src_layer_range: remote layers; ``None`` or an empty range means all.
            dst_layer_range: local layers; ``None`` or an empty range means all.
            tensor_num_per_layer: tensors of one layer (uint32, above 0).
            src_cache_offset: bytes to skip at the start of the remote slot (int64, 0 or above); ``None`` for 0.
            dst_cache_offset: bytes to skip at the start of the local slot (int64, 0 or above); ``None`` for 0.
            **kwargs: ignored, as in the original. Each name is logged once at ERROR.

        Raises:
            TypeError: an argument has the wrong type, or a keyword argument asks for what only the native API has, such
                as ``grant``.
            ValueError: an integer is outside its width, or an offset is below 0.
            AttributeError: ``cache_key`` or ``kv_cache`` is ``None``.
            LLMException: ``LLM_PARAM_INVALID``: another role, a cache in ``HOST`` memory, a blocks cache, a range
                outside a slot, different numbers of tensors, or layers outside a cache; ``LLM_KV_CACHE_NOT_EXIST``: the
                local cache, or the remote key or slot, does not exist; ``LLM_NOT_YET_LINK``: there is no link, or it
                broke; ``LLM_WAIT_PROCESS_TIMEOUT``: ``sync_kv_timeout`` passed. The attribute ``arrived`` lists the
                rows that were written.
        """
        self._check_role(LLMRole.DECODER, "pull_cache")
        if kwargs:
            check_keywords(KvCacheManager.pull_cache, kwargs)
        layers = (src_layer_range, dst_layer_range, tensor_num_per_layer)
        offsets = (src_cache_offset, dst_cache_offset)
        self._open_calls.pull_cache(cache_key, kv_cache, batch_index, size, *layers, *offsets)

    @logged
    def pull_blocks(
        self,
        prompt_cache_key: BlocksCacheKey,
        decoder_kv_cache: KvCache,
        prompt_blocks: list[int],
        decoder_blocks: list[int],
        *,
        src_layer_range: Optional[range] = None,
        dst_layer_range: Optional[range] = None,
        tensor_num_per_layer: int = 2,
        **kwargs: Any,
    ) -> None:
        """Read blocks of a linked prompt cluster into local blocks.

        The call is for ``LLMRole.DECODER``.

        Args:
            prompt_cache_key: the remote blocks cache.
            decoder_kv_cache: blocks cache that is written.
            prompt_blocks: remote blocks that are read, at least one. Each list of blocks must not be a tuple.
            decoder_blocks: local block for each entry of ``prompt_blocks``.
            src_layer_range: as for ``pull_cache``.
            dst_layer_range: as for ``pull_cache``.
            tensor_num_per_layer: as for ``pull_cache``.
            **kwargs: as for ``pull_cache``.

        Raises:
            TypeError: as for ``pull_cache``.
            ValueError: an integer is outside its width.
            AttributeError: ``prompt_cache_key`` or ``decoder_kv_cache`` is ``None``.
            LLMException: as for ``pull_cache``; ``LLM_PARAM_INVALID`` also for an empty list, lists of different
                lengths, an index outside a cache, or different block sizes.
        """
        self._check_role(LLMRole.DECODER, "pull_blocks")
        if kwargs:
            check_keywords(KvCacheManager.pull_blocks, kwargs)
        layers = (src_layer_range, dst_layer_range, tensor_num_per_layer)
        self._open_calls.pull_blocks(prompt_cache_key, decoder_kv_cache, prompt_blocks, decoder_blocks, *layers)

    @logged
    def copy_cache(
        self,
        dst: KvCache,
        src: KvCache,
        dst_batch_index: int = 0,
        src_batch_index: int = 0,
        offset: int = 0,
        size: int = -1,
        req_id: Optional[int] = None,
    ) -> None:
        """Copy one range of a batch slot to the same range of another, in every tensor.

        Both caches are in device memory. The ranges may overlap.

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
            LLMException: ``LLM_PARAM_INVALID``: a cache in ``HOST`` memory, a blocks cache, or a range outside a slot;
                ``LLM_FAILED``: different numbers of tensors; ``LLM_KV_CACHE_NOT_EXIST``: a cache was released;
                ``LLM_WAIT_PROCESS_TIMEOUT``: other calls used the rows for longer than ``sync_kv_timeout``.
        """
        self._open_calls.copy_cache(dst, src, dst_batch_index, src_batch_index, offset, size, req_id)

    @logged
    def copy_blocks(self, cache: KvCache, copy_block_info: dict[int, list[int]]) -> None:
        """Copy blocks inside one cache in device memory, in every tensor.

        The result is the same as if the pairs were copied one after the other, in the order given. All indices are
        checked before any byte is copied.

        Args:
            cache: a blocks cache, or a continuous one, whose slots count as blocks.
            copy_block_info: the destination blocks of each source block.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: an index is outside uint64.
            AttributeError: ``cache`` or ``copy_block_info`` is ``None``.
            LLMException: ``LLM_PARAM_INVALID``: a cache in ``HOST`` memory, or an index outside the blocks;
                ``LLM_KV_CACHE_NOT_EXIST``: the cache was released; ``LLM_WAIT_PROCESS_TIMEOUT``: other calls used the
                rows for longer than ``sync_kv_timeout``.
        """
        try:
            self._open_calls.copy_blocks(cache, copy_block_info)
        except LLMException as error:
            # The engine takes int64 indices, and refuses a larger index with the code for one outside the cache.
            # The contract asks for ValueError if the index is outside uint64.
            if error.status_code == LLMStatusCode.LLM_PARAM_INVALID and cache.cache_desc.placement == Placement.DEVICE:
                _check_uint64_blocks(copy_block_info)
            raise

    @logged
    def swap_blocks(self, src: KvCache, dst: KvCache, src_to_dst: dict[int, int]) -> None:
        """Copy blocks between a host and a device cache, in every tensor.

        The placements give the direction. The two caches may have different numbers of blocks.

        Args:
            src: cache that is read. The slots of a continuous cache count as blocks.
            dst: cache that is written.
            src_to_dst: the destination block of each source block.

        Raises:
            TypeError: an argument has the wrong type.
            AttributeError: an argument is ``None``.
            LLMMismatchException: an ``LLMException`` with ``LLM_PARAM_INVALID`` that is a ``ValueError`` as well: an
                index outside the blocks, different block sizes or numbers of tensors, placements that are not one
                ``HOST`` and one ``DEVICE``, or a CPU cache with several devices.
            LLMException: ``LLM_KV_CACHE_NOT_EXIST``: a cache was released; ``LLM_WAIT_PROCESS_TIMEOUT``: other calls
                used the rows for longer than ``sync_kv_timeout``.
        """
        self._open_calls.swap_blocks(src, dst, src_to_dst)

    @logged
    def transfer_cache_async(
        self,
        src_cache: KvCache,
        layer_synchronizer: LayerSynchronizer,
        transfer_configs: Union[list[TransferConfig], tuple[TransferConfig, ...]],
        src_block_indices: Optional[Union[list[int], tuple[int, ...]]] = None,
        dst_block_indices: Optional[Union[list[int], tuple[int, ...]]] = None,
        dst_block_memory_size: Optional[int] = None,
    ) -> CacheTask:
        """Send the layers of a cache, each as soon as it is ready.

        The call is for ``LLMRole.PROMPT``. It works as ``CacheManager.transfer_cache_async``.

        Args:
            src_cache: cache that is read, in ``DEVICE`` memory.
            layer_synchronizer: reports when a layer is ready.
            transfer_configs: the destinations, by address. A ``src_layer_range`` of ``None`` is replaced by all layers
                in the config object.
            src_block_indices: blocks of a blocks cache that are read (uint64).
            dst_block_indices: blocks that are written (uint64): one for each block that is read, or one for each piece
                of a slot that is split into blocks.
            dst_block_memory_size: bytes of a destination block in one tensor (uint64). Needed for a slot that is split
                into blocks; else ``None``, 0 or the local block size.

        Returns:
            The transfer. Its results are those of ``CacheManager.transfer_cache_async``, with
            ``LLM_WAIT_PROCESS_TIMEOUT`` in place of ``LLM_TIMEOUT``.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: an integer is outside its width.
            LLMException: ``LLM_PARAM_INVALID``: another role, or for example a cache in ``HOST`` memory, blocks into a
                slot, or layers outside the cache; ``LLM_FAILED``: no thread could be started.
        """
        self._check_role(LLMRole.PROMPT, "transfer_cache_async")
        blocks = (src_block_indices, dst_block_indices, dst_block_memory_size)
        return layerwise.start(self._datadist, src_cache, layer_synchronizer, transfer_configs, *blocks)

    @logged
    def get_cache_tensors(self, cache: KvCache, tensor_index: int = 0) -> list[Tensor]:
        """Return one tensor of a cache without a copy.

        Pool memory stays mapped as long as the tensor exists. Memory of a CPU cache belongs to the caller.

        Args:
            cache: a cache of this engine, or a CPU cache.
            tensor_index: index of the tensor (int32), 0 to ``num_tensors - 1``.

        Returns:
            A list with one ``Tensor`` for each device; an engine has one device.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: ``tensor_index`` is outside int32.
            AttributeError: ``cache`` is ``None``.
            LLMException: ``LLM_PARAM_INVALID``: there is no such tensor; ``LLM_KV_CACHE_NOT_EXIST``: the cache was
                released.
        """
        view = self._open_calls.tensor_view(cache, tensor_index)
        return [Tensor._of_view(view, cache.cache_desc.data_type)]  # noqa: SLF001  (made here only)


def _check_uint64_blocks(copy_block_info: dict[int, list[int]]) -> None:
    """Raise ``ValueError`` for an index outside uint64."""
    for source, destinations in copy_block_info.items():
        for index in (source, *destinations):
            if index > _UINT64_MAX:
                _core.check_uint64("copy_block_info", index)
