"""The asynchronous calls of ``CacheManager``.

Each has the arguments, checks and results of the call without ``_async`` in its name, and returns a
``llm_datadist.events.Transfer`` instead of waiting. Argument errors raise at once; every other failure is the outcome
of the transfer. The original does not have these calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional, Union

from llm_datadist import _core
from llm_datadist.grants import GrantCalls
from llm_datadist.log import logged

if TYPE_CHECKING:
    from llm_datadist.types import BlocksCacheKey, Cache, CacheKey, CacheKeyByIdAndIndex

    Tokens = Union[range, tuple[int, int]]
    AnyKey = Union[CacheKey, CacheKeyByIdAndIndex, BlocksCacheKey]

__all__ = ["AsyncCalls"]


class AsyncCalls(GrantCalls):
    """The base of ``CacheManager`` with its asynchronous calls. The original does not have them.

    Calls that meet in a row of this engine, synchronous or not, take turns in the order in which they were started.
    They meet if at least one of them writes the row. Each call has a time limit of its own, ``timeout_ms``, in
    milliseconds (uint32, above 0). It counts from the call, and ``None`` means ``sync_kv_timeout``.

    Raises:
        TypeError: ``timeout_ms`` is not an ``int`` or ``None``.
        ValueError: ``timeout_ms`` is outside uint32.
        LLMException: ``LLM_PARAM_INVALID``: ``timeout_ms`` is 0; ``LLM_LINK_BUSY``: ``max_transfers`` calls run or have
            an outcome that was not taken, and nothing has changed; ``LLM_OUT_OF_MEMORY``: no memory for the lists of
            the call; ``LLM_ENGINE_FINALIZED``: the engine was finalized; ``LLM_FAILED``: no thread could be started, or
            a forked child (contract §0.3, §16). With ``notify``, ``LLM_LINK_BUSY`` may also be the outcome of the
            transfer: the peer has not polled its notifications, and nothing has moved.

    Args:
        native: the engine.
    """

    def __init__(self, native: _core.DataDist) -> None:
        super().__init__(native, _core.CacheCalls(native, False))
        self._starting: _core.CacheCalls[_core.Transfer] = _core.CacheCalls(native, True)
        self._events = _core.Events(native)

    def _calls_async(self) -> _core.CacheCalls[_core.Transfer]:
        """Return the native object whose calls start and return a ``Transfer``."""
        self._check_open()
        return self._starting

    def _open_events(self) -> _core.Events:
        self._check_open()
        return self._events

    @logged
    def pull_cache_async(
        self,
        cache_key: Union[CacheKey, CacheKeyByIdAndIndex],
        cache: Cache,
        batch_index: int = 0,
        size: int = -1,
        *,
        timeout_ms: Optional[int] = None,
        src_layer_range: Optional[range] = None,
        dst_layer_range: Optional[range] = None,
        tensor_num_per_layer: int = 2,
        notify: Optional[bytes] = None,
        verify: Optional[str] = None,
        layout: Optional[str] = None,
    ) -> _core.Transfer:
        """Start ``pull_cache``: read a remote batch slot into a local one (contract §7.12).

        Args:
            cache_key: the remote slot, as for ``pull_cache``.
            cache: continuous cache that is written.
            batch_index: batch slot that is written (uint32).
            size: bytes of each tensor, from the start of the slot, or -1 for the size of the local slot (int64).
            timeout_ms: time limit of the whole call in milliseconds, or ``None``.
            src_layer_range: remote layers, as for ``pull_cache``.
            dst_layer_range: local layers, as for ``pull_cache``.
            tensor_num_per_layer: tensors of one layer (uint32, above 0).
            notify: notification for the owner, at most 64 KiB (``LLMDataDist.notify``), delivered when the bytes are in
                place and the key is released, before the transfer succeeds.
            verify: as for the call without ``_async``.
            layout: as for the call without ``_async``.

        Returns:
            The call that was started.

        Raises:
            TypeError, ValueError, AttributeError: as for ``pull_cache``; ``TypeError`` also for every unknown argument.
            LLMException: what the arguments and the local cache decide (``LLM_PARAM_INVALID``,
                ``LLM_KV_CACHE_NOT_EXIST``), and ``LLM_LINK_BUSY``. Other failures are the outcome of the transfer.
        """
        layers = (src_layer_range, dst_layer_range, tensor_num_per_layer)
        rest = (*layers, notify, verify, layout, timeout_ms)
        return self._calls_async().pull_cache(cache_key, cache, batch_index, size, *rest)

    @logged
    def pull_blocks_async(
        self,
        src_cache_key: Union[AnyKey, list[Any], tuple[AnyKey, ...]],
        dst_cache: Cache,
        src_blocks: Union[list[int], tuple[int, ...], Any] = (),
        dst_blocks: Union[list[int], tuple[int, ...], Any] = (),
        *,
        timeout_ms: Optional[int] = None,
        src_layer_range: Optional[range] = None,
        dst_layer_range: Optional[range] = None,
        tensor_num_per_layer: int = 2,
        notify: Optional[bytes] = None,
        verify: Optional[str] = None,
        layout: Optional[str] = None,
        grant: Optional[Union[bytes, list[Optional[bytes]], tuple[Optional[bytes], ...]]] = None,
        grant_done: bool = False,
        src_tokens: Optional[Tokens] = None,
        dst_tokens: Optional[Tokens] = None,
        src_offset: int = 0,
        dst_offset: int = 0,
        length: Optional[int] = None,
    ) -> _core.Transfer:
        """Start ``pull_blocks``: read remote blocks, or a slot, into local blocks (contract §7.13).

        Args:
            src_cache_key: the remote blocks cache or slot, or several keys, as for ``pull_blocks``.
            dst_cache: blocks cache that is written.
            src_blocks: remote block for each entry of ``dst_blocks``; empty for a slot.
            dst_blocks: local blocks that are written, at least one.
            timeout_ms: time limit of the whole call in milliseconds, or ``None``.
            src_layer_range: remote layers, as for ``pull_cache``.
            dst_layer_range: local layers, as for ``pull_cache``.
            tensor_num_per_layer: tensors of one layer (uint32, above 0).
            notify: notification for the owner, at most 64 KiB (``LLMDataDist.notify``), delivered when the bytes are in
                place and the key is released, before the transfer succeeds.
            verify: as for the call without ``_async``.
            layout: as for the call without ``_async``.
            grant: token of a grant of the source blocks, or a list for several keys, as for ``pull_blocks``.
            grant_done: whether this pull is the last one under its grant.
            src_tokens: tokens of the remote sequence that are read, as for ``pull_blocks``.
            dst_tokens: tokens of the local sequence that are written, as for ``pull_blocks``.
            src_offset: which part of every block moves, in bytes (uint64), as for the call without ``_async``.
            dst_offset: as for the call without ``_async``.
            length: as for the call without ``_async``.

        Returns:
            The call that was started.

        Raises:
            TypeError, ValueError, AttributeError: as for ``pull_blocks``; ``TypeError`` also for every unknown
                argument.
            LLMException: what the arguments and the local cache decide (``LLM_PARAM_INVALID``,
                ``LLM_KV_CACHE_NOT_EXIST``), and ``LLM_LINK_BUSY``. Other failures are the outcome of the transfer.
        """
        calls, moved = self._calls_async(), (dst_cache, src_blocks, dst_blocks)
        layers = (src_layer_range, dst_layer_range, tensor_num_per_layer)
        grants: Any = (grant, grant_done)
        part: Any = (src_offset, dst_offset, length)
        rest: Any = (notify, verify, layout, *grants, src_tokens, dst_tokens, part, timeout_ms)
        if isinstance(src_cache_key, (list, tuple)):
            return calls.pull_owners(src_cache_key, *moved, *layers, *rest)
        return calls.pull_blocks(src_cache_key, *moved, *layers, *rest)

    @logged
    def push_cache_async(
        self,
        dst_cache_key: CacheKeyByIdAndIndex,
        src_cache: Cache,
        src_batch_index: int = 0,
        src_layer_range: Optional[range] = None,
        dst_layer_range: Optional[range] = None,
        size: int = -1,
        tensor_num_per_layer: int = 2,
        *,
        timeout_ms: Optional[int] = None,
        notify: Optional[bytes] = None,
        verify: Optional[str] = None,
        layout: Optional[str] = None,
    ) -> _core.Transfer:
        """Start ``push_cache``: write a local batch slot into a remote one (contract §7.14).

        Args:
            dst_cache_key: the remote slot, by cache id and slot.
            src_cache: continuous cache that is read.
            src_batch_index: batch slot that is read (uint32).
            src_layer_range: local layers, as for ``push_cache``.
            dst_layer_range: remote layers, as for ``push_cache``.
            size: must be -1, which means the whole local slot (int64).
            tensor_num_per_layer: tensors of one layer (uint32, above 0), as for ``push_cache``.
            timeout_ms: time limit of the whole call in milliseconds, or ``None``.
            notify: notification for the owner of the remote cache, at most 64 KiB (``LLMDataDist.notify``), delivered
                when the bytes are in place, before the transfer succeeds.
            verify: as for the call without ``_async``.
            layout: as for the call without ``_async``.

        Returns:
            The call that was started.

        Raises:
            TypeError, ValueError: as for ``push_cache``.
            LLMException: what the arguments and the local cache decide (``LLM_PARAM_INVALID``,
                ``LLM_KV_CACHE_NOT_EXIST``), and ``LLM_LINK_BUSY``. Other failures are the outcome of the transfer.
        """
        layers = (src_layer_range, dst_layer_range, size, tensor_num_per_layer)
        rest = (notify, verify, layout, timeout_ms)
        return self._calls_async().push_cache(dst_cache_key, src_cache, src_batch_index, *layers, *rest)

    @logged
    def push_blocks_async(
        self,
        dst_cache_key: Union[BlocksCacheKey, list[BlocksCacheKey], tuple[BlocksCacheKey, ...]],
        src_cache: Cache,
        src_blocks: Union[list[int], tuple[int, ...], Any] = (),
        dst_blocks: Union[list[int], tuple[int, ...], Any] = (),
        src_layer_range: Optional[range] = None,
        dst_layer_range: Optional[range] = None,
        tensor_num_per_layer: int = 2,
        *,
        timeout_ms: Optional[int] = None,
        notify: Optional[bytes] = None,
        verify: Optional[str] = None,
        src_tokens: Optional[Tokens] = None,
        dst_tokens: Optional[Tokens] = None,
        layout: Optional[str] = None,
        src_offset: int = 0,
        dst_offset: int = 0,
        length: Optional[int] = None,
    ) -> _core.Transfer:
        """Start ``push_blocks``: write local blocks into remote blocks (contract §7.15).

        Args:
            dst_cache_key: the remote blocks cache, or several keys, as for ``push_blocks``.
            src_cache: blocks cache that is read.
            src_blocks: local block for each entry of ``dst_blocks``.
            dst_blocks: remote blocks that are written, at least one.
            src_layer_range: local layers, as for ``push_cache``.
            dst_layer_range: remote layers, as for ``push_cache``.
            tensor_num_per_layer: tensors of one layer (uint32, above 0), as for ``push_cache``.
            timeout_ms: time limit of the whole call in milliseconds, or ``None``.
            notify: notification for the owner of the remote cache, at most 64 KiB (``LLMDataDist.notify``), delivered
                when the bytes are in place, before the transfer succeeds.
            verify: as for the call without ``_async``.
            src_tokens: as for the call without ``_async``.
            dst_tokens: as for the call without ``_async``.
            layout: as for the call without ``_async``.
            src_offset: which part of every block moves, in bytes (uint64), as for the call without ``_async``.
            dst_offset: as for the call without ``_async``.
            length: as for the call without ``_async``.

        Returns:
            The call that was started.

        Raises:
            TypeError, ValueError, AttributeError: as for ``push_blocks``.
            LLMException: what the arguments and the local cache decide (``LLM_PARAM_INVALID``,
                ``LLM_KV_CACHE_NOT_EXIST``), and ``LLM_LINK_BUSY``. Other failures are the outcome of the transfer.
        """
        calls, moved = self._calls_async(), (src_cache, src_blocks, dst_blocks)
        layers = (src_layer_range, dst_layer_range, tensor_num_per_layer)
        part = (src_offset, dst_offset, length)
        rest: Any = (notify, verify, src_tokens, dst_tokens, layout, part, timeout_ms)
        if isinstance(dst_cache_key, (list, tuple)):
            return calls.push_owners(dst_cache_key, *moved, *layers, *rest)
        return calls.push_blocks(dst_cache_key, *moved, *layers, *rest)

    @logged
    def copy_cache_async(
        self,
        dst: Cache,
        src: Cache,
        dst_batch_index: int = 0,
        src_batch_index: int = 0,
        offset: int = 0,
        size: int = -1,
        req_id: Optional[int] = None,
        *,
        timeout_ms: Optional[int] = None,
    ) -> _core.Transfer:
        """Start ``copy_cache``: copy a range of a batch slot (contract §7.9).

        Args:
            dst: continuous cache that is written.
            src: continuous cache that is read.
            dst_batch_index: batch slot that is written (uint32).
            src_batch_index: batch slot that is read (uint32).
            offset: bytes that are skipped at the start of both slots (uint64).
            size: bytes that are copied in each tensor, or -1 for the rest of the source slot (int64).
            req_id: id of the request, shown in the log lines of the call (uint64), or ``None``.
            timeout_ms: time limit of the wait before the first byte, in milliseconds, or ``None``.

        Returns:
            The call that was started.

        Raises:
            TypeError, ValueError, AttributeError: as for ``copy_cache``.
            LLMException: what the arguments and the caches decide (``LLM_PARAM_INVALID``, ``LLM_KV_CACHE_NOT_EXIST``),
                and ``LLM_LINK_BUSY``. Other failures, such as ``LLM_TIMEOUT``, are the outcome of the transfer.
        """
        numbers = (dst_batch_index, src_batch_index, offset, size)
        return self._calls_async().copy_cache(dst, src, *numbers, req_id, timeout_ms)

    @logged
    def copy_blocks_async(
        self,
        cache: Cache,
        copy_block_info: Union[dict[int, list[int]], Any],
        *,
        timeout_ms: Optional[int] = None,
        src_offset: int = 0,
        dst_offset: int = 0,
        length: Optional[int] = None,
    ) -> _core.Transfer:
        """Start ``copy_blocks``: copy blocks inside one cache (contract §7.10).

        Args:
            cache: a blocks cache.
            copy_block_info: the destination blocks of each source block, or an integer array of shape ``(n, 2)`` with
                rows ``(source, destination)``.
            timeout_ms: time limit of the wait before the first byte, in milliseconds, or ``None``.
            src_offset: which part of every block moves, in bytes (uint64), as for the call without ``_async``.
            dst_offset: as for the call without ``_async``.
            length: as for the call without ``_async``.

        Returns:
            The call that was started.

        Raises:
            TypeError, ValueError, AttributeError: as for ``copy_blocks``.
            LLMException: what the arguments and the caches decide (``LLM_PARAM_INVALID``, ``LLM_KV_CACHE_NOT_EXIST``),
                and ``LLM_LINK_BUSY``. Other failures, such as ``LLM_TIMEOUT``, are the outcome of the transfer.
        """
        part = (src_offset, dst_offset, length)
        return self._calls_async().copy_blocks(cache, copy_block_info, part, timeout_ms)

    @logged
    def swap_blocks_async(
        self,
        src_cache: Cache,
        dst_cache: Cache,
        src_to_dst: Union[dict[int, int], Any],
        *,
        timeout_ms: Optional[int] = None,
        src_offset: int = 0,
        dst_offset: int = 0,
        length: Optional[int] = None,
    ) -> _core.Transfer:
        """Start ``swap_blocks``: copy blocks between a host and a device cache (contract §7.11).

        Args:
            src_cache: blocks cache that is read.
            dst_cache: blocks cache that is written.
            src_to_dst: the destination block of each source block, or an integer array of shape ``(n, 2)`` with rows
                ``(source, destination)``.
            timeout_ms: time limit of the wait before the first byte, in milliseconds, or ``None``.
            src_offset: which part of every block moves, in bytes (uint64), as for the call without ``_async``.
            dst_offset: as for the call without ``_async``.
            length: as for the call without ``_async``.

        Returns:
            The call that was started.

        Raises:
            TypeError, ValueError, AttributeError: as for ``swap_blocks``.
            LLMMismatchException: as for ``swap_blocks``.
            LLMException: what the arguments and the caches decide (``LLM_PARAM_INVALID``, ``LLM_KV_CACHE_NOT_EXIST``),
                and ``LLM_LINK_BUSY``. Other failures, such as ``LLM_TIMEOUT``, are the outcome of the transfer.
        """
        part = (src_offset, dst_offset, length)
        return self._calls_async().swap_blocks(src_cache, dst_cache, src_to_dst, part, timeout_ms)
