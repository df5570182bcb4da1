"""``CacheManager``: allocate, register, copy and swap caches (python-api.md §7).

Signatures, defaults and docstrings; every method is one call into the engine. Not for: checks, which are made there in
the order of the contract.

Errors of every method: ``TypeError`` for an argument of the wrong type, ``ValueError`` for an integer outside its
width, ``AttributeError`` where ``None`` is given for a cache or descriptor, and ``LLMException`` for the rest, with
``LLM_ENGINE_FINALIZED`` before anything else once the engine is finalized.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional, Union

from llm_datadist.log import logged
from llm_datadist.status import LLMException, LLMStatusCode, raise_if_false
from llm_datadist.types import Cache

if TYPE_CHECKING:
    from llm_datadist import _core
    from llm_datadist.types import BlocksCacheKey, CacheDesc, CacheKey

__all__ = ["CacheManager"]

_UINT64_MAX = 2**64 - 1


class CacheManager:
    """The caches of one engine. Obtained from ``LLMDataDist.cache_manager``; usable from any number of threads.

    Args:
        native: the engine.
        options: what it was opened with.
    """

    def __init__(self, native: _core.DataDist, options: dict[str, str]) -> None:
        self._native = native
        self._enable_remote_cache_accessible = options.get("llm.EnableRemoteCacheAccessible") == "1"
        self._is_call_linked = False
        self._initialized = True

    @property
    def _engine(self) -> _core.DataDist:
        if self._initialized:
            return self._native
        raise LLMException("the engine was finalized", status_code=LLMStatusCode.LLM_ENGINE_FINALIZED)

    def set_is_call_linked(self) -> None:
        """Note that a rank-table link exists, which changes the default of ``remote_accessible``."""
        self._is_call_linked = True

    @staticmethod
    def check_cache_key(cache_key: CacheKey) -> None:
        """Raise ``LLMException(LLM_PARAM_INVALID)`` unless exactly one of ``req_id`` and ``prefix_id`` is given."""
        given = [cache_key.req_id != _UINT64_MAX, cache_key.prefix_id != _UINT64_MAX]
        raise_if_false(given.count(True) == 1, "exactly one of req_id and prefix_id must be given: {}", cache_key)

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
        cache_id, addrs = self._engine.allocate_cache(cache_desc, cache_keys)
        return Cache(cache_id, cache_desc, addrs, self, is_registered=False, is_blocks_cache=False)

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
        cache_id, addrs = self._engine.allocate_blocks_cache(cache_desc, blocks_cache_key)
        return Cache(cache_id, cache_desc, addrs, self, is_registered=False, is_blocks_cache=True)

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
        """Enter memory of the caller as a continuous cache (python-api.md §7.6).

        The memory must stay valid, readable and writable until :meth:`unregister_cache` and the end of the last copy.

        Args:
            cache_desc: what the memory holds.
            addrs: address of every tensor, none 0.
            cache_keys: key *i* names batch slot *i*; a key that names another cache names this one from now on.
            remote_accessible: whether peers may reach it; by default in ``DEVICE`` memory, unless ``link`` was called.

        Returns:
            The cache; its ``tensor_addrs`` equal ``addrs``.

        Raises:
            LLMException: ``LLM_PARAM_INVALID``, not one address per tensor, an address of 0, a shape without meaning,
                or ``remote_accessible=True`` after ``link``.
        """
        linked = self._is_call_linked
        cache_id, kept = self._engine.register_cache(cache_desc, addrs, cache_keys, remote_accessible, linked)
        return Cache(cache_id, cache_desc, kept, self, is_registered=True, is_blocks_cache=False)

    @logged
    def register_blocks_cache(
        self,
        cache_desc: CacheDesc,
        addrs: list[int],
        blocks_cache_key: Optional[BlocksCacheKey] = None,
        remote_accessible: Optional[bool] = None,
    ) -> Cache:
        """Enter memory of the caller as a blocks cache (python-api.md §7.7).

        As :meth:`register_cache`, but dimension 0 counts blocks and one key names the whole; a second registration for
        one model takes its key over.
        """
        linked = self._is_call_linked
        cache_id, kept = self._engine.register_blocks_cache(
            cache_desc, addrs, blocks_cache_key, remote_accessible, linked
        )
        return Cache(cache_id, cache_desc, kept, self, is_registered=True, is_blocks_cache=True)

    @logged
    def unregister_cache(self, cache_id: int) -> None:
        """Remove a registered cache and its keys (python-api.md §7.8); an unknown id has no effect.

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

    def stats(self) -> dict[str, Any]:
        """Return the engine's counters: pools, table, calls with their times in nanoseconds, bytes moved."""
        return self._engine.stats()

    def huge_page_bytes(self) -> dict[str, int]:
        """Return how many bytes of each pool, ``"device"`` and ``"host"``, lie in huge pages now.

        Asks the kernel about the whole process, which takes milliseconds or more: for a report, not for a loop.
        """
        return self._engine.huge_page_bytes()


def _invalidate(cache: Cache) -> None:
    cache._valid = False  # noqa: SLF001  (the handle's state is the manager's to change)
    cache._tensor_addrs = []  # noqa: SLF001
