"""``KvCacheManager`` and its handle ``KvCache``: the caches of an engine without the cache manager (contract §9).

Signatures, defaults, docstrings and who may call what; every method is one call into the engine. Not for: other checks,
which are made there in the order of the contract.

Errors of every method: ``TypeError`` for an argument of the wrong type, ``ValueError`` for an integer outside its
width, ``AttributeError`` where ``None`` is given for a cache or descriptor, and ``LLMException`` for the rest:
``LLM_ENGINE_FINALIZED`` before anything else once the engine is finalized, then ``LLM_PARAM_INVALID`` for a role that
may not make the call.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional, Union

from llm_datadist import _core, layerwise
from llm_datadist.configs import LLMRole
from llm_datadist.log import logged
from llm_datadist.status import LLMException, LLMStatusCode, raise_if_false, raise_if_true
from llm_datadist.tensors import Tensor
from llm_datadist.types import CacheDesc, Placement

if TYPE_CHECKING:
    from llm_datadist.layerwise import CacheTask, LayerSynchronizer, TransferConfig
    from llm_datadist.stats import Stats
    from llm_datadist.types import BlocksCacheKey, CacheKey, CacheKeyByIdAndIndex

__all__ = ["KvCache", "KvCacheManager"]


class KvCache:
    """A handle on a cache; made by a ``KvCacheManager`` or :meth:`create_cpu_cache`.

    Dropping the last handle of a cache deallocates it, as a safety net: what its keys name lives on until it is pulled.

    Args:
        cache_id: 1 or above for a cache of an engine, -1 for a CPU cache (int64).
        cache_desc: what it looks like.
        per_device_tensor_addrs: for each device the address of every tensor.
        kv_cache_manager: the manager that made it.
    """

    # What the engine knows it by; none of a cache put together by hand, which is found by its id.
    _handle: Union[_core.LooseCache, _core.ManagedCache, None] = None
    _is_blocks_cache = False
    # For a handle whose constructor failed: there is nothing to let go of.
    _valid = False

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
        """Make a cache over host memory of the caller, for ``KvCacheManager.swap_blocks``.

        The memory must stay valid, readable and writable while the handle lives.

        Args:
            cache_desc: what the memory holds; its placement must be ``HOST``.
            addrs: address of every tensor, or one such list for each device. An engine here has one device: a cache of
                more can be made and looked at, and nothing takes it.

        Raises:
            TypeError: an argument of the wrong type.
            AttributeError: ``cache_desc`` is ``None``.
            LLMException: ``LLM_PARAM_INVALID``, not ``HOST``, no addresses, not one for each tensor, lists and
                addresses mixed, or sizes without meaning.
        """
        _core.check_isinstance("cache_desc", cache_desc, CacheDesc)
        placement = cache_desc.placement
        raise_if_false(placement == Placement.HOST, "placement = {} is not allowed: Placement.HOST", placement)
        per_device = _per_device(addrs, cache_desc.num_tensors)
        handles = [_core.LooseCache(cache_desc, device) for device in per_device]
        cache = cls(-1, cache_desc, per_device, None)
        cache._handle = handles[0]
        cache._is_blocks_cache = True
        return cache

    @property
    def cache_id(self) -> int:
        """Id in its engine, or -1 for a CPU cache."""
        return self._cache_id

    @property
    def cache_desc(self) -> CacheDesc:
        """What it looks like."""
        return self._cache_desc

    @property
    def per_device_tensor_addrs(self) -> list[list[int]]:
        """For each device the address of every tensor; empty once deallocated."""
        return self._per_device_tensor_addrs

    def __repr__(self) -> str:
        return f"KvCache(cache_id = {self._cache_id}, num_devices = {len(self._per_device_tensor_addrs)})"

    def __del__(self) -> None:
        # May run in any thread, inside any call, in a forked child and while the interpreter ends: no log, no lock of
        # Python, and whatever goes wrong stays here (tests: `tests/test_kv_cache_manager.py`).
        try:
            manager = self._cache_manager
            if self._valid and manager is not None and manager.is_initialized():
                self._valid = False
                manager._caches.release(self)  # noqa: SLF001  (the manager's own handle)
        except Exception:  # noqa: BLE001, S110  (a finalizer has nobody to tell)
            pass


def _per_device(addrs: Union[list[int], list[list[int]]], num_tensors: int) -> list[list[int]]:
    """Return the addresses as one list for each device."""
    _core.check_isinstance("addrs", addrs, list, allow_none=False)
    raise_if_false(addrs, "addrs = [] is not allowed: one address per tensor")
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
        len(addrs) == num_tensors, "len(addrs) = {} is not allowed: num_tensors = {}", len(addrs), num_tensors
    )


class KvCacheManager:
    """The caches of one engine without the cache manager. Obtained from ``LLMDataDist.kv_cache_manager``.

    Usable from any number of threads, which the original's is not (contract §9.4).

    Args:
        native: the engine.
        role: what the cluster does for others; it decides who may name caches, pull and transfer.
    """

    def __init__(self, native: _core.DataDist, role: LLMRole) -> None:
        _core.check_isinstance("role", role, LLMRole, allow_none=False)
        self._native = native
        self._caches = _core.KvCaches(native)
        self._role = role
        self._initialized = True

    @property
    def _engine(self) -> _core.KvCaches:
        if self._initialized:
            return self._caches
        raise LLMException("the engine was finalized", status_code=LLMStatusCode.LLM_ENGINE_FINALIZED)

    def _engine_of(self, role: LLMRole, call: str) -> _core.KvCaches:
        """Return the engine, for a call that only ``role`` may make."""
        engine = self._engine
        raise_if_false(self._role == role, "{} is for {}, not for {}", call, role, self._role)
        return engine

    def _switch_role(self, role: LLMRole) -> None:
        """Follow ``LLMDataDist.switch_role``."""
        self._role = role

    def _made(self, handle: _core.ManagedCache, cache_desc: CacheDesc) -> KvCache:
        cache = KvCache(handle.cache_id, cache_desc, [handle.tensor_addrs()], self)
        cache._handle = handle  # noqa: SLF001  (what the engine knows the handle by)
        return cache

    def is_initialized(self) -> bool:
        """Whether the engine is open: false once it is finalized."""
        return self._initialized

    @staticmethod
    def check_cache_key(cache_key: CacheKey) -> None:
        """Raise ``LLMException(LLM_PARAM_INVALID)`` unless exactly one of ``req_id`` and ``prefix_id`` is given."""
        _core.check_cache_key(cache_key)

    @logged
    def allocate_cache(
        self, cache_desc: CacheDesc, cache_keys: Union[tuple[CacheKey, ...], list[CacheKey]] = ()
    ) -> KvCache:
        """Allocate a continuous cache in device memory.

        The memory is held by the cache's id and by each of its keys, and returns to the pool when all are gone: a
        cache that is deallocated at once still waits to be pulled.

        Args:
            cache_desc: what to allocate, in ``DEVICE`` memory; dimension 0 counts batch slots.
            cache_keys: key *i* names batch slot *i*; only ``LLMRole.PROMPT``. A placeholder (``req_id = 2**64 - 1``)
                leaves its slot without a key, trailing slots may be left out, of equal keys the last takes effect.

        Returns:
            The cache: ``num_tensors`` page-aligned addresses, contents undefined.

        Raises:
            LLMException: ``LLM_PARAM_INVALID``, another placement, keys of another role, more keys than slots, or a
                shape without meaning; ``LLM_FAILED``, a key that already names a live cache;
                ``LLM_DEVICE_OUT_OF_MEMORY``, and nothing stays allocated: it may be tried again once caches are gone.
        """
        may_name = self._role == LLMRole.PROMPT
        return self._made(self._engine.allocate_cache(cache_desc, cache_keys, may_name), cache_desc)

    @logged
    def allocate_blocks_cache(
        self, cache_desc: CacheDesc, blocks_cache_key: Optional[BlocksCacheKey] = None
    ) -> KvCache:
        """Allocate a blocks cache in device memory.

        Args:
            cache_desc: what to allocate, in ``DEVICE`` memory; dimension 0 counts blocks.
            blocks_cache_key: its key, one per model; not for ``LLMRole.DECODER``.

        Returns:
            The cache: ``num_tensors`` page-aligned addresses, contents undefined.

        Raises:
            LLMException: as for :meth:`allocate_cache`; ``LLM_FAILED`` for a model that has a blocks cache.
        """
        may_name = self._role != LLMRole.DECODER
        return self._made(self._engine.allocate_blocks_cache(cache_desc, blocks_cache_key, may_name), cache_desc)

    @logged
    def deallocate_cache(self, cache: KvCache) -> None:
        """Let go of a cache by id, continuous or of blocks.

        A continuous cache is released once its keys are gone too, a blocks cache at once. One that is not there: no
        effect (contract §17.5).

        Args:
            cache: a cache in device memory; its ``per_device_tensor_addrs`` become empty.

        Raises:
            LLMException: ``LLM_PARAM_INVALID``, a cache in ``HOST`` memory.
        """
        self._engine.deallocate_cache(cache)
        cache._valid = False  # noqa: SLF001  (the handle's state is the manager's to change)
        cache._per_device_tensor_addrs = []  # noqa: SLF001

    @logged
    def remove_cache_key(self, cache_key: CacheKey) -> None:
        """Unbind a key, releasing its cache if that was the last reference; only ``LLMRole.PROMPT``.

        A key that is not there: no effect.

        Args:
            cache_key: the key; its cluster id is ignored.
        """
        self._engine_of(LLMRole.PROMPT, "remove_cache_key")
        self._native.remove_cache_key(cache_key)

    @logged
    def pull_cache(
        self,
        cache_key: Union[CacheKey, CacheKeyByIdAndIndex],
        kv_cache: KvCache,
        batch_index: int = 0,
        size: int = -1,
        **kwargs: Any,
    ) -> None:
        """Bring a batch slot of a linked prompt cluster's cache here; only ``LLMRole.DECODER``.

        The bytes are there on return. A pull of every tensor uses the key up, and its owner lets go of the slot; pulls
        of some layers do once they were of every tensor.

        Args:
            cache_key: the far slot: by its key, or by cache id and slot.
            kv_cache: continuous cache that is written.
            batch_index: batch slot written (uint32).
            size: bytes of each tensor, or -1 for the rest of the slot here (int64).
            **kwargs: ``src_layer_range`` and ``dst_layer_range``, a ``range`` of layers there and here, ``None`` or an
                empty one for all; ``tensor_num_per_layer``, tensors of one layer (uint32, above 0; 2 by default);
                ``src_cache_offset`` and ``dst_cache_offset``, bytes skipped at the start of the far slot and of the
                slot here (int64, 0 or above; 0 by default). Others are ignored.

        Raises:
            ValueError: an offset below 0.
            LLMException: ``LLM_PARAM_INVALID``, another role, a cache in ``HOST`` memory, a range outside a slot,
                unlike numbers of tensors, layers outside a cache; ``LLM_KV_CACHE_NOT_EXIST``, no such cache here or
                key there; ``LLM_NOT_YET_LINK``, no link, or one that broke; ``LLM_WAIT_PROCESS_TIMEOUT``, the limit
                ``sync_kv_timeout`` passed. ``arrived`` says which slots are in place all the same.
        """
        engine = self._engine_of(LLMRole.DECODER, "pull_cache")
        engine.pull_cache(cache_key, kv_cache, batch_index, size, kwargs)

    @logged
    def pull_blocks(
        self,
        prompt_cache_key: BlocksCacheKey,
        decoder_kv_cache: KvCache,
        prompt_blocks: list[int],
        decoder_blocks: list[int],
        **kwargs: Any,
    ) -> None:
        """Bring blocks of a linked prompt cluster's cache here; only ``LLMRole.DECODER``.

        Args:
            prompt_cache_key: the far blocks cache.
            decoder_kv_cache: blocks cache that is written.
            prompt_blocks: blocks read, at least one.
            decoder_blocks: blocks written, one for each that is read.
            **kwargs: ``src_layer_range``, ``dst_layer_range`` and ``tensor_num_per_layer`` as for :meth:`pull_cache`.

        Raises:
            LLMException: as for :meth:`pull_cache`; ``LLM_PARAM_INVALID`` also for an empty list, lists of unlike
                length, an index outside a cache, or unlike block sizes.
        """
        engine = self._engine_of(LLMRole.DECODER, "pull_blocks")
        engine.pull_blocks(prompt_cache_key, decoder_kv_cache, prompt_blocks, decoder_blocks, kwargs)

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
        """Copy one range of one batch slot, the same in every tensor, from device memory to device memory.

        The bytes are there on return, and overlap is harmless.

        Args:
            dst: continuous cache that is written.
            src: continuous cache that is read.
            dst_batch_index: batch slot written (uint32).
            src_batch_index: batch slot read (uint32).
            offset: bytes skipped at the start of both slots (uint64).
            size: bytes copied in each tensor, or -1 for the rest of the source slot (int64).
            req_id: request the call belongs to (uint64); shown in its log lines.

        Raises:
            LLMException: ``LLM_PARAM_INVALID``, a cache in ``HOST`` memory, a blocks cache, or a range outside a slot;
                ``LLM_FAILED``, unlike numbers of tensors; ``LLM_KV_CACHE_NOT_EXIST``; ``LLM_WAIT_PROCESS_TIMEOUT``.
        """
        self._engine.copy_cache(dst, src, dst_batch_index, src_batch_index, offset, size, req_id)

    @logged
    def copy_blocks(self, cache: KvCache, copy_block_info: Union[dict[int, list[int]], Any]) -> None:
        """Copy blocks inside one cache in device memory, in every tensor.

        The result is that of copying the pairs in the order given. An index out of range is found before any copy.

        Args:
            cache: a blocks cache, or a continuous one, whose slots count as blocks.
            copy_block_info: source block → list of destination blocks; or an integer array of shape ``(n, 2)`` with
                rows ``(source, destination)``.

        Raises:
            ValueError: an index below 0.
            LLMException: ``LLM_PARAM_INVALID``, a cache in ``HOST`` memory, or an index outside the blocks;
                ``LLM_KV_CACHE_NOT_EXIST``; ``LLM_WAIT_PROCESS_TIMEOUT``.
        """
        self._engine.copy_blocks(cache, copy_block_info)

    @logged
    def swap_blocks(self, src: KvCache, dst: KvCache, src_to_dst: Union[dict[int, int], Any]) -> None:
        """Copy blocks between a host and a device cache, in every tensor; the placements give the direction.

        Args:
            src: cache that is read; the slots of a continuous one count as blocks.
            dst: cache that is written.
            src_to_dst: source block → destination block; or an integer array of shape ``(n, 2)`` with rows
                ``(source, destination)``.

        Raises:
            LLMException: ``LLM_PARAM_INVALID``, as a ``ValueError`` too: an index outside the blocks, unlike block
                sizes or numbers of tensors, placements that are not one ``HOST`` and one ``DEVICE``, or a CPU cache of
                several devices; ``LLM_KV_CACHE_NOT_EXIST``; ``LLM_WAIT_PROCESS_TIMEOUT``.
        """
        self._engine.swap_blocks(src, dst, src_to_dst)

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
        """Send the layers of a cache, each as soon as it is ready; only ``LLMRole.PROMPT``.

        As ``CacheManager.transfer_cache_async`` (seed ``transfer_cache_async.md``), with ``LLM_WAIT_PROCESS_TIMEOUT``
        for what took too long.

        Args:
            src_cache: the cache that is read.
            layer_synchronizer: says when a layer is ready.
            transfer_configs: the destinations, by address. A ``src_layer_range`` of ``None`` is set to all layers.
            src_block_indices: blocks read (uint64), of a blocks cache.
            dst_block_indices: blocks written (uint64): one for each read, or those that the slot read is cut into.
            dst_block_memory_size: bytes of a block that is written, in one tensor (uint64). Needed for a slot that is
                cut into blocks; else ``None``, 0 or the size of a block here.

        Returns:
            The transfer.

        Raises:
            LLMException: ``LLM_PARAM_INVALID``, another role, or arguments without meaning.
        """
        self._engine_of(LLMRole.PROMPT, "transfer_cache_async")
        blocks = (src_block_indices, dst_block_indices, dst_block_memory_size)
        return layerwise.start(self._native, src_cache, layer_synchronizer, transfer_configs, *blocks)

    @logged
    def get_cache_tensors(self, cache: KvCache, tensor_index: int = 0) -> list[Tensor]:
        """Return one tensor of a cache, as a list with a :class:`Tensor` for each device (here one).

        It shows the cache's own memory, without a copy, and keeps that memory while it lives.

        Args:
            cache: a cache of this engine, or a CPU cache, whose memory is the caller's to keep.
            tensor_index: which tensor (int32).

        Raises:
            LLMException: ``LLM_PARAM_INVALID``, no such tensor; ``LLM_KV_CACHE_NOT_EXIST``.
        """
        view = self._engine.tensor_view(cache, tensor_index)
        return [Tensor._of_view(view, cache.cache_desc.data_type)]  # noqa: SLF001  (made here only)

    def stats(self) -> Stats:
        """Return the engine's counters, as plain dicts: :class:`llm_datadist.stats.Stats` documents every field."""
        if not self._initialized:
            raise LLMException("the engine was finalized", status_code=LLMStatusCode.LLM_ENGINE_FINALIZED)
        return self._native.stats()
