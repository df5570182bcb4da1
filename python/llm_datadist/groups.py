"""Groups of pulls or pushes: one call for several caches, which succeeds or fails as a whole.

Hybrid models keep the state of one request in several caches (full attention, sliding window, state space). A group
moves all of them with one time limit and one outcome. The original does not have these calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional, Union

from llm_datadist.async_calls import AsyncCalls
from llm_datadist.log import logged

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llm_datadist import _core
    from llm_datadist.types import BlocksCacheKey, Cache, CacheKey, CacheKeyByIdAndIndex

__all__ = ["GroupCalls", "GroupPart"]

Blocks = Union[list[int], tuple[int, ...]]
PullKey = Union["BlocksCacheKey", "CacheKey", "CacheKeyByIdAndIndex"]
PullPart = Union[
    tuple[PullKey, "Cache", Blocks, Blocks], tuple[PullKey, "Cache", Blocks, Blocks, Optional[bytes]], "GroupPart"
]
PushPart = Union[tuple["BlocksCacheKey", "Cache", Blocks, Blocks], "GroupPart"]
Tokens = Union[range, tuple[int, int]]


class GroupPart:
    """A part of a group, where a tuple is not enough: it moves a range of tokens, or a byte range of every block.

    The constructor checks nothing; the call checks all values. The original does not have this class.

    Args:
        key: the remote cache, as for ``pull_blocks`` or ``push_blocks``.
        cache: the local blocks cache.
        src_blocks: blocks that are read.
        dst_blocks: blocks that are written.
        grant: token of a grant of the source blocks, or ``None``. A push takes none.
        src_tokens: tokens of the source that are read, as for ``pull_blocks``.
        dst_tokens: tokens of the destination that are written, as for ``pull_blocks``.
        src_offset: bytes to skip at the start of each block that is read, as for ``push_blocks``.
        dst_offset: bytes to skip at the start of each block that is written, as for ``push_blocks``.
        length: bytes of each block that move in each tensor, as for ``push_blocks``.
    """

    __slots__ = (
        "cache",
        "dst_blocks",
        "dst_offset",
        "dst_tokens",
        "grant",
        "key",
        "length",
        "src_blocks",
        "src_offset",
        "src_tokens",
    )

    def __init__(
        self,
        key: PullKey,
        cache: Cache,
        src_blocks: Union[Blocks, Any] = (),
        dst_blocks: Union[Blocks, Any] = (),
        *,
        grant: Optional[bytes] = None,
        src_tokens: Optional[Tokens] = None,
        dst_tokens: Optional[Tokens] = None,
        src_offset: int = 0,
        dst_offset: int = 0,
        length: Optional[int] = None,
    ) -> None:
        self.key = key
        self.cache = cache
        self.src_blocks = src_blocks
        self.dst_blocks = dst_blocks
        self.grant = grant
        self.src_tokens = src_tokens
        self.dst_tokens = dst_tokens
        self.src_offset = src_offset
        self.dst_offset = dst_offset
        self.length = length

    def __repr__(self) -> str:
        # Not the grant, because its token is a secret.
        return (
            f"GroupPart({self.key!r}, {self.cache!r}, src_blocks={self.src_blocks!r}, dst_blocks={self.dst_blocks!r}, "
            f"src_tokens={self.src_tokens!r}, dst_tokens={self.dst_tokens!r}, "
            f"src_offset={self.src_offset!r}, dst_offset={self.dst_offset!r}, length={self.length!r})"
        )


class GroupCalls(AsyncCalls):
    """The base of ``CacheManager`` with its group calls."""

    @logged
    def pull_group_async(
        self,
        parts: Sequence[PullPart],
        *,
        timeout_ms: Optional[int] = None,
        notify: Optional[bytes] = None,
        grants_done: bool = False,
        verify: Optional[str] = None,
        layout: Optional[str] = None,
    ) -> _core.Transfer:
        """Start a pull of several caches.

        The transfer succeeds only if the bytes of every part are in place. Keys are released after that. After a
        failure, all destination blocks are undefined and no key is released, unless the failure is that of a release:
        then the keys of earlier parts may be released. The error of the transfer names the part, counted from 0.

        Args:
            parts: list or tuple of at least one ``(key, cache, src_blocks, dst_blocks)`` or ``(key, cache, src_blocks,
                dst_blocks, grant)``, or ``GroupPart`` for a range of tokens or a byte range of every block. Each
                obeys the rules of ``pull_blocks`` with one key (contract §7.13), and moves all tensors; ``grant`` is
                the token of a grant, or ``None``. Parts may name several clusters, and a cache may occur in several
                parts.
            timeout_ms: time limit of the whole group in milliseconds (uint32, above 0; ``sync_kv_timeout`` by default).
            notify: notification for the peer, at most 64 KiB, delivered when all parts are in place and all keys are
                released. All parts must name one cluster then.
            grants_done: whether the owners may end the grants of the parts once all parts are in place.
            verify: how the bytes of each part are compared with those of its owner before keys are released:
                ``"off"``, ``"sample"`` (one block in 64), ``"full"``, or ``None`` for the option of the engine.
            layout: ``"raw"`` moves rows as they are, whatever ``KvLayout`` the caches have; ``None`` converts.

        Raises:
            TypeError: ``parts`` is no list or tuple, or a part is neither a tuple nor a ``GroupPart``.
            TypeError, ValueError, AttributeError, LLMException: as for ``pull_blocks_async``. Python 3.11 and later
                note the part in the exception.
        """
        return self._calls_async().pull_group(parts, notify, verify, grants_done, layout, timeout_ms)

    @logged
    def push_group_async(
        self,
        parts: Sequence[PushPart],
        *,
        timeout_ms: Optional[int] = None,
        notify: Optional[bytes] = None,
        verify: Optional[str] = None,
        layout: Optional[str] = None,
    ) -> _core.Transfer:
        """Start a push of several caches.

        The transfer succeeds only if the bytes of every part are in place at their owners. After a failure, all
        destination blocks are undefined. The error of the transfer names the part, counted from 0.

        Args:
            parts: list or tuple of at least one ``(key, cache, src_blocks, dst_blocks)``, or ``GroupPart`` for a range
                of tokens or a byte range of every block. Each obeys the rules of ``push_blocks`` (contract §7.15), and
                moves all tensors.
            timeout_ms: time limit of the whole group in milliseconds (uint32, above 0; ``sync_kv_timeout`` by default).
            notify: notification for the peer, at most 64 KiB, delivered when all parts are in place. All parts must
                name one cluster then.
            verify: how thoroughly the bytes at the owner of each part are compared with the local ones, before the
                group succeeds: ``"off"``, ``"sample"`` (one block in 64), ``"full"``, or ``None`` for the option
                ``verify`` of the engine.
            layout: as for ``pull_group_async``.

        Raises:
            TypeError: ``parts`` is no list or tuple, or a part is neither a tuple nor a ``GroupPart``.
            TypeError, ValueError, AttributeError, LLMException: as for ``push_blocks_async``. Python 3.11 and later
                note the part in the exception.
        """
        return self._calls_async().push_group(parts, notify, verify, layout, timeout_ms)

    @logged
    def pull_group(
        self,
        parts: Sequence[PullPart],
        *,
        timeout_ms: Optional[int] = None,
        notify: Optional[bytes] = None,
        grants_done: bool = False,
        verify: Optional[str] = None,
        layout: Optional[str] = None,
    ) -> None:
        """Pull several caches, and wait for the outcome. Ctrl-C cancels the group.

        Args:
            parts: as for ``pull_group_async``.
            timeout_ms: as for ``pull_group_async``.
            notify: as for ``pull_group_async``.
            grants_done: as for ``pull_group_async``.
            verify: as for ``pull_group_async``.
            layout: as for ``pull_group_async``.

        Raises:
            TypeError, ValueError, AttributeError: as for ``pull_group_async``.
            LLMException: as for ``pull_group_async``, or the outcome of the transfer.
        """
        self._engine.pull_group(parts, notify, verify, grants_done, layout, timeout_ms)

    @logged
    def push_group(
        self,
        parts: Sequence[PushPart],
        *,
        timeout_ms: Optional[int] = None,
        notify: Optional[bytes] = None,
        verify: Optional[str] = None,
        layout: Optional[str] = None,
    ) -> None:
        """Push several caches, and wait for the outcome. Ctrl-C cancels the group.

        Args:
            parts: as for ``push_group_async``.
            timeout_ms: as for ``push_group_async``.
            notify: as for ``push_group_async``.
            verify: as for ``push_group_async``.
            layout: as for ``push_group_async``.

        Raises:
            TypeError, ValueError, AttributeError: as for ``push_group_async``.
            LLMException: as for ``push_group_async``, or the outcome of the transfer.
        """
        self._engine.push_group(parts, notify, verify, layout, timeout_ms)
