"""The asynchronous calls of ``CacheManager``.

Each has the arguments, checks and results of the call without ``_async`` in its name, and returns a
``llm_datadist.events.Transfer`` instead of waiting. Argument errors raise at once; every other failure is the outcome of
the transfer. The original does not have these calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional, Union

from llm_datadist import _core
from llm_datadist.caches import PULL_KEYWORDS, EngineCaches
from llm_datadist.log import logged
from llm_datadist.spelling import warn_of_misspelt

if TYPE_CHECKING:
    from llm_datadist.types import BlocksCacheKey, Cache, CacheKey, CacheKeyByIdAndIndex

__all__ = ["AsyncCalls"]


class AsyncCalls(EngineCaches["_core.DataDist"]):
    """The base of ``CacheManager`` with its asynchronous calls.

    Calls that meet in a row, synchronous or not, take turns in the order in which they were started. Each call has a time
    limit of its own, ``timeout_ms`` (uint32, above 0; ``sync_kv_timeout`` by default), which counts from the call.

    Raises:
        LLMException: every method raises ``LLM_LINK_BUSY``, and changes nothing, while ``max_transfers`` calls run or
            have an outcome that was not taken.

    Args:
        native: the engine.
    """

    def __init__(self, native: _core.DataDist) -> None:
        super().__init__(native, native)
        self._asynchronous = _core.AsyncCalls(native)

    def _calls_async(self) -> _core.AsyncCalls:
        self._check_open()
        return self._asynchronous

    @logged
    def pull_cache_async(
        self,
        cache_key: Union[CacheKey, CacheKeyByIdAndIndex],
        cache: Cache,
        batch_index: int = 0,
        size: int = -1,
        timeout_ms: Optional[int] = None,
        **kwargs: Any,
    ) -> _core.Transfer:
        """Start ``pull_cache`` (contract §7.12).

        Args:
            cache_key: as for ``pull_cache``.
            cache: as for ``pull_cache``.
            batch_index: as for ``pull_cache``.
            size: as for ``pull_cache``.
            timeout_ms: time limit in milliseconds.
            **kwargs: as for ``pull_cache``.

        Raises:
            TypeError, ValueError, AttributeError: as for ``pull_cache``.
            LLMException: what the arguments and the local cache decide; the rest is the outcome of the transfer.
        """
        if kwargs:
            warn_of_misspelt("keyword argument of pull_cache_async", kwargs, PULL_KEYWORDS, once=True)
        return self._calls_async().pull_cache(cache_key, cache, batch_index, size, timeout_ms, kwargs)

    @logged
    def pull_blocks_async(
        self,
        src_cache_key: Union[CacheKey, CacheKeyByIdAndIndex, BlocksCacheKey],
        dst_cache: Cache,
        src_blocks: Union[list[int], tuple[int, ...]] = (),
        dst_blocks: Union[list[int], tuple[int, ...]] = (),
        timeout_ms: Optional[int] = None,
        **kwargs: Any,
    ) -> _core.Transfer:
        """Start ``pull_blocks`` (contract §7.13).

        Args:
            src_cache_key: as for ``pull_blocks``.
            dst_cache: as for ``pull_blocks``.
            src_blocks: as for ``pull_blocks``.
            dst_blocks: as for ``pull_blocks``.
            timeout_ms: time limit in milliseconds.
            **kwargs: as for ``pull_cache``.

        Raises:
            TypeError, ValueError, AttributeError: as for ``pull_blocks``.
            LLMException: what the arguments and the local cache decide; the rest is the outcome of the transfer.
        """
        if kwargs:
            warn_of_misspelt("keyword argument of pull_blocks_async", kwargs, PULL_KEYWORDS, once=True)
        return self._calls_async().pull_blocks(src_cache_key, dst_cache, src_blocks, dst_blocks, timeout_ms, kwargs)

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
        timeout_ms: Optional[int] = None,
    ) -> _core.Transfer:
        """Start ``push_cache`` (contract §7.14).

        Args:
            dst_cache_key: as for ``push_cache``.
            src_cache: as for ``push_cache``.
            src_batch_index: as for ``push_cache``.
            src_layer_range: as for ``push_cache``.
            dst_layer_range: as for ``push_cache``.
            size: as for ``push_cache``.
            tensor_num_per_layer: as for ``push_cache``.
            timeout_ms: time limit in milliseconds.

        Raises:
            TypeError, ValueError: as for ``push_cache``.
            LLMException: what the arguments and the local cache decide; the rest is the outcome of the transfer.
        """
        layers = (src_layer_range, dst_layer_range)
        return self._calls_async().push_cache(
            dst_cache_key, src_cache, src_batch_index, *layers, size, tensor_num_per_layer, timeout_ms
        )

    @logged
    def push_blocks_async(
        self,
        dst_cache_key: BlocksCacheKey,
        src_cache: Cache,
        src_blocks: Union[list[int], tuple[int, ...]] = (),
        dst_blocks: Union[list[int], tuple[int, ...]] = (),
        src_layer_range: Optional[range] = None,
        dst_layer_range: Optional[range] = None,
        tensor_num_per_layer: int = 2,
        timeout_ms: Optional[int] = None,
    ) -> _core.Transfer:
        """Start ``push_blocks`` (contract §7.15).

        Args:
            dst_cache_key: as for ``push_blocks``.
            src_cache: as for ``push_blocks``.
            src_blocks: as for ``push_blocks``.
            dst_blocks: as for ``push_blocks``.
            src_layer_range: as for ``push_cache``.
            dst_layer_range: as for ``push_cache``.
            tensor_num_per_layer: as for ``push_cache``.
            timeout_ms: time limit in milliseconds.

        Raises:
            TypeError, ValueError, AttributeError: as for ``push_blocks``.
            LLMException: what the arguments and the local cache decide; the rest is the outcome of the transfer.
        """
        layers = (src_layer_range, dst_layer_range)
        return self._calls_async().push_blocks(
            dst_cache_key, src_cache, src_blocks, dst_blocks, *layers, tensor_num_per_layer, timeout_ms
        )

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
        timeout_ms: Optional[int] = None,
    ) -> _core.Transfer:
        """Start ``copy_cache`` (contract §7.9).

        Args:
            dst: as for ``copy_cache``.
            src: as for ``copy_cache``.
            dst_batch_index: as for ``copy_cache``.
            src_batch_index: as for ``copy_cache``.
            offset: as for ``copy_cache``.
            size: as for ``copy_cache``.
            req_id: as for ``copy_cache``.
            timeout_ms: time limit in milliseconds of the wait before the first byte.

        Raises:
            TypeError, ValueError, AttributeError, LLMException: as for ``copy_cache``.
        """
        numbers = (dst_batch_index, src_batch_index, offset, size)
        return self._calls_async().copy_cache(dst, src, *numbers, req_id, timeout_ms)

    @logged
    def copy_blocks_async(
        self, cache: Cache, copy_block_info: Union[dict[int, list[int]], Any], timeout_ms: Optional[int] = None
    ) -> _core.Transfer:
        """Start ``copy_blocks`` (contract §7.10).

        Args:
            cache: as for ``copy_blocks``.
            copy_block_info: as for ``copy_blocks``.
            timeout_ms: time limit in milliseconds of the wait before the first byte.

        Raises:
            TypeError, ValueError, AttributeError, LLMException: as for ``copy_blocks``.
        """
        return self._calls_async().copy_blocks(cache, copy_block_info, timeout_ms)

    @logged
    def swap_blocks_async(
        self,
        src_cache: Cache,
        dst_cache: Cache,
        src_to_dst: Union[dict[int, int], Any],
        timeout_ms: Optional[int] = None,
    ) -> _core.Transfer:
        """Start ``swap_blocks`` (contract §7.11).

        Args:
            src_cache: as for ``swap_blocks``.
            dst_cache: as for ``swap_blocks``.
            src_to_dst: as for ``swap_blocks``.
            timeout_ms: time limit in milliseconds of the wait before the first byte.

        Raises:
            TypeError, ValueError, AttributeError, LLMException: as for ``swap_blocks``.
        """
        return self._calls_async().swap_blocks(src_cache, dst_cache, src_to_dst, timeout_ms)
