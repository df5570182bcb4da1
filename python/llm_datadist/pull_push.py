"""The pulls and pushes of ``CacheManager``.

Every method is one call into the engine, which checks the arguments in the order of the contract.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional, Union

from llm_datadist.layer_tasks import LayerCalls
from llm_datadist.log import logged
from llm_datadist.spelling import check_keywords

if TYPE_CHECKING:
    from llm_datadist.groups import Tokens
    from llm_datadist.types import BlocksCacheKey, Cache, CacheKey, CacheKeyByIdAndIndex

    AnyKey = Union[CacheKey, CacheKeyByIdAndIndex, BlocksCacheKey]

__all__ = ["PullPushCalls"]


class PullPushCalls(LayerCalls):
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
        notify: Optional[bytes] = None,
        verify: Optional[str] = None,
        layout: Optional[str] = None,
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
            notify: notification for the owner, at most 64 KiB (``LLMDataDist.notify``), delivered when the bytes are in
                place and the key is released, before the call returns; ``None`` for none. The original has none of
                ``notify``, ``verify`` and ``layout``.
            verify: how thoroughly the bytes are compared with those of the owner, before the key is released and the
                notification delivered: ``"off"``, ``"sample"`` (one block in 64), ``"full"``, or ``None`` for the
                option ``verify`` of the engine.
            layout: ``"raw"`` moves rows as they are, whatever ``KvLayout`` the two caches have; ``None`` converts.
            **kwargs: ignored, as in the original. Each name is logged once at ERROR. A name that resembles a keyword
                argument which only this package has raises ``TypeError``.

        Raises:
            TypeError: an argument has the wrong type, or a keyword argument is unknown and looks like ``notify``,
                ``verify``, ``grant`` or another addition of this package.
            ValueError: an integer is outside its width.
            AttributeError: ``cache_key`` or ``cache`` is ``None``.
            LLMException: ``LLM_PARAM_INVALID``: the engine's own cluster, a blocks cache, a range outside a slot,
                different numbers of tensors, layers outside a cache, a cache that is not accessible, layouts that do
                not fit, or an unknown ``verify`` or ``layout``;
                ``LLM_KV_CACHE_NOT_EXIST``: the local cache, or the remote key or slot, does not exist;
                ``LLM_NOT_YET_LINK``: there is no link, or it broke; ``LLM_TIMEOUT``: ``sync_kv_timeout`` passed;
                ``LLM_LINK_BUSY``: with ``notify``, the peer has not polled its notifications, and nothing has moved;
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
            notify,
            verify,
            layout,
            None,
        )

    @logged
    def pull_blocks(
        self,
        src_cache_key: Union[AnyKey, list[Any], tuple[AnyKey, ...]],
        dst_cache: Cache,
        src_blocks: Union[list[int], tuple[int, ...], Any] = (),
        dst_blocks: Union[list[int], tuple[int, ...], Any] = (),
        *,
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
        **kwargs: Any,
    ) -> None:
        """Read blocks of a linked cluster, or a slot that is split into blocks, into local blocks (contract §7.13).

        A pull of a slot uses up its key, as in ``pull_cache``. A pull of blocks does not.

        If both caches have a ``KvLayout``, each list of blocks is one sequence in the order of its tokens, and the
        lists may differ in length. The tokens are converted to the layout of ``dst_cache``. The original does not have
        this, nor several keys.

        Args:
            src_cache_key: the remote blocks cache by its ``BlocksCacheKey``, or a remote slot by another key. A list or
                tuple of keys names several owners, such as tensor-parallel ranks. Each layer and head of ``dst_cache``
                is then read from one of them, in one transfer with one time limit, and ``src_blocks`` has one list for
                each key. All caches have layouts then, and there are no layer ranges.
            dst_cache: blocks cache that is written.
            src_blocks: remote block for each entry of ``dst_blocks``; empty for a slot, which is split into pieces of
                the local block size.
            dst_blocks: local blocks that are written, at least one.
            src_layer_range: as for ``pull_cache``.
            dst_layer_range: as for ``pull_cache``.
            tensor_num_per_layer: as for ``pull_cache``.
            notify: as for ``pull_cache``. The original has none of the arguments from here on.
            verify: as for ``pull_cache``.
            layout: as for ``pull_cache``.
            grant: token of a grant (``CacheManager.grant``) of the source blocks; the pull fails if it has ended. With
                several keys, a list that has a token or ``None`` for each. ``None`` for a pull without a grant.
            grant_done: whether this pull is the last one under its grant, which the owner may then end.
            src_tokens: tokens of the remote sequence that are read: a ``range`` of step 1 or a pair ``(first, end)``.
                Both ranges have the same length. Without one, as many tokens move as the other has, from the first
                token on. Without both, as many as both lists hold. A range needs layouts.
            dst_tokens: tokens of the local sequence that are written.
            src_offset: bytes to skip at the start of each block that is read, as for ``push_blocks``. It needs a
                ``BlocksCacheKey`` and equal layouts, and so do ``dst_offset`` and ``length``.
            dst_offset: bytes to skip at the start of each block that is written, as for ``push_blocks``.
            length: bytes of each block that move in each tensor, as for ``push_blocks``.
            **kwargs: as for ``pull_cache``.

        Raises:
            TypeError: as for ``pull_cache``.
            ValueError: an integer is outside its width.
            AttributeError: ``src_cache_key`` or ``dst_cache`` is ``None``.
            LLMException: as for ``pull_cache``; ``LLM_PARAM_INVALID`` also for a continuous ``dst_cache``, lists of
                different lengths, an index outside a cache, different block sizes, a part that exceeds a block, more
                blocks than the slot fills, or a grant of other blocks; ``LLM_GRANT_ENDED``: the grant ended before all
                bytes were read; ``LLM_LINK_BUSY`` also for several keys, if ``max_transfers`` asynchronous calls run or
                have an outcome that was not taken.
        """
        if kwargs:
            check_keywords(PullPushCalls.pull_blocks, kwargs)
        part = (src_offset, dst_offset, length)
        if isinstance(src_cache_key, (list, tuple)):
            layers: Any = (src_layer_range, dst_layer_range, tensor_num_per_layer)
            rest: Any = (notify, verify, layout, grant, grant_done, src_tokens, dst_tokens, part, None)
            self._engine.pull_owners(src_cache_key, dst_cache, src_blocks, dst_blocks, *layers, *rest)
            return
        # Unpacking tuples here would double the time of the Python part of a pull.
        self._engine.pull_blocks(
            src_cache_key,
            dst_cache,
            src_blocks,
            dst_blocks,
            src_layer_range,
            dst_layer_range,
            tensor_num_per_layer,
            notify,
            verify,
            layout,
            grant,
            grant_done,
            src_tokens,
            dst_tokens,
            part,
            None,
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
        *,
        notify: Optional[bytes] = None,
        verify: Optional[str] = None,
        layout: Optional[str] = None,
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
                without ranges nothing is sent, and that is not an error. Use 1 for a cache of one tensor. Without
                ranges, all tensors of a cache with a ``KvLayout`` are sent, whatever this number is.
            notify: notification for the owner of the remote cache, at most 64 KiB (``LLMDataDist.notify``), delivered
                when the bytes are in place, before the call returns; ``None`` for none. The original does not have this
                argument.
            verify: how the bytes at the owner are compared with the local ones, before the key is released and the
                notification delivered: ``"off"``, ``"sample"`` (one block in 64), ``"full"``, or ``None`` for the
                option ``verify`` of the engine. The original does not have this argument.
            layout: ``"raw"`` moves rows as they are, whatever ``KvLayout`` the two caches have; ``None`` converts. The
                original does not have this argument.

        Raises:
            TypeError: an argument has the wrong type; a key or a cache that is ``None`` too.
            ValueError: an integer is outside its width.
            LLMException: ``LLM_PARAM_INVALID``: another mode, the engine's own cluster, a blocks cache, layers or slots
                outside a cache, a slot larger than the remote one, layouts that do not fit, or a cache that is not
                accessible;
                ``LLM_KV_CACHE_NOT_EXIST``: the local or the remote cache does not exist; ``LLM_NOT_YET_LINK``: there is
                no link, or it broke; ``LLM_TIMEOUT``: ``sync_kv_timeout`` passed; ``LLM_LINK_BUSY`` and
                ``LLM_VERIFY_FAILED``: as for ``pull_cache``. For the other codes, the attribute ``arrived`` lists the
                rows that were written.
        """
        self._engine.push_cache(
            dst_cache_key,
            src_cache,
            src_batch_index,
            src_layer_range,
            dst_layer_range,
            size,
            tensor_num_per_layer,
            notify,
            verify,
            layout,
            None,
        )

    @logged
    def push_blocks(
        self,
        dst_cache_key: Union[BlocksCacheKey, list[BlocksCacheKey], tuple[BlocksCacheKey, ...]],
        src_cache: Cache,
        src_blocks: Union[list[int], tuple[int, ...], Any] = (),
        dst_blocks: Union[list[int], tuple[int, ...], Any] = (),
        src_layer_range: Optional[range] = None,
        dst_layer_range: Optional[range] = None,
        tensor_num_per_layer: int = 2,
        *,
        notify: Optional[bytes] = None,
        verify: Optional[str] = None,
        src_tokens: Optional[Tokens] = None,
        dst_tokens: Optional[Tokens] = None,
        layout: Optional[str] = None,
        src_offset: int = 0,
        dst_offset: int = 0,
        length: Optional[int] = None,
    ) -> None:
        """Write local blocks into blocks of a linked cluster (contract §7.15), in remote-accessible mode.

        If both caches have a ``KvLayout``, the layers and heads that both hold are converted to the layout of the
        remote cache, and the lists of blocks may differ in length, as for ``pull_blocks``. The original does not have
        this, nor several keys.

        Args:
            dst_cache_key: the remote blocks cache. A list or tuple of keys names several, which are written in one
                transfer with one time limit. ``dst_blocks`` then has one list for each key, and there are no layer
                ranges.
            src_cache: blocks cache that is read.
            src_blocks: local block for each entry of ``dst_blocks``.
            dst_blocks: remote blocks that are written, at least one.
            src_layer_range: as for ``push_cache``.
            dst_layer_range: as for ``push_cache``.
            tensor_num_per_layer: as for ``push_cache``.
            notify: as for ``push_cache``. Several keys must name one cluster then.
            verify: as for ``push_cache``.
            src_tokens: tokens of the local sequence that are read, as for ``pull_blocks``.
            dst_tokens: tokens of the remote sequence that are written, as for ``pull_blocks``.
            layout: as for ``push_cache``.
            src_offset: bytes to skip at the start of each block that is read (uint64, below the bytes of a block). The
                original has none of ``src_offset``, ``dst_offset`` and ``length``.
            dst_offset: bytes to skip at the start of each block that is written (uint64, below the bytes of a block).
            length: bytes that move of each block in each tensor (uint64, above 0, at most the bytes after the offset in
                either block); ``None`` for the rest of the block with fewer bytes left. If any of the three is given,
                the blocks of both caches may have different sizes.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: an integer is outside its width.
            AttributeError: ``dst_cache_key`` or ``src_cache`` is ``None``.
            LLMException: as for ``push_cache``; ``LLM_PARAM_INVALID`` also for a continuous cache, lists of
                different lengths, an index outside a cache, different block sizes, or a part that exceeds a block;
                ``LLM_LINK_BUSY`` also for several keys, as for ``pull_blocks``.
        """
        part = (src_offset, dst_offset, length)
        if isinstance(dst_cache_key, (list, tuple)):
            ranges: Any = (src_layer_range, dst_layer_range, tensor_num_per_layer)
            rest: Any = (notify, verify, src_tokens, dst_tokens, layout, part, None)
            self._engine.push_owners(dst_cache_key, src_cache, src_blocks, dst_blocks, *ranges, *rest)
            return
        # Unpacking tuples here would double the time of the Python part of a push.
        self._engine.push_blocks(
            dst_cache_key,
            src_cache,
            src_blocks,
            dst_blocks,
            src_layer_range,
            dst_layer_range,
            tensor_num_per_layer,
            notify,
            verify,
            src_tokens,
            dst_tokens,
            layout,
            part,
            None,
        )
