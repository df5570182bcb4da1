"""Grants: blocks that are lent to readers for a limited time.

A server must not reuse blocks while a reader pulls them, and a reader must not accept blocks that were reused. A grant
serves both: it ends at a known time or on request, and a pull that names it fails once it has
ended, however late the bytes were read. The original does not have these calls.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Union

from llm_datadist import _core
from llm_datadist.caches import EngineCaches
from llm_datadist.log import logged

if TYPE_CHECKING:
    from llm_datadist.types import Cache

__all__ = ["GrantCalls"]


class GrantCalls(EngineCaches["_core.CacheCalls[None]"]):
    """The base of ``CacheManager`` that lends blocks."""

    @logged
    def grant(
        self, cache: Cache, blocks: Union[list[int], tuple[int, ...], Any], ttl_ms: int = 30_000, readers: int = 1
    ) -> _core.Grant:
        """Lend blocks of a cache to readers for a limited time.

        A grant adds a check to pulls and changes nothing else: it neither locks the blocks nor gives access to a cache
        that is not accessible. ``Grant.token`` travels to the readers by any channel, and they pass it to
        ``pull_blocks(..., grant=token)``. Such a pull fails with ``LLM_GRANT_ENDED`` if the grant ended before all
        bytes were read, whatever the path over which they were read.

        The grant ends when ``ttl_ms`` has passed by this engine's clock, when ``readers`` readers have reported that
        they are done, by ``Grant.revoke``, or with the release of its cache. ``LLMDataDist.poll`` then returns
        ``GrantEnded``. Reuse the blocks after that event or after ``revoke``, not by a clock of your own. At most
        65,536 grants of an engine have not ended, or wait to be polled as ``GrantEnded``. The original does not have
        this method.

        Args:
            cache: blocks cache of this engine.
            blocks: the blocks that are lent, at least one. Their order does not matter, and they may repeat.
            ttl_ms: how long the grant lasts, in milliseconds (uint32, above 0).
            readers: number of readers that must report before the grant ends early, 1 to 4,096. A reader is one
                incarnation of a linked engine.

        Raises:
            TypeError: an argument has the wrong type.
            ValueError: an integer is outside its width.
            AttributeError: ``cache`` is ``None``.
            LLMException: ``LLM_PARAM_INVALID``: a number out of range, a block outside the cache, or a cache that has
                no blocks; ``LLM_KV_CACHE_NOT_EXIST``: the cache does not exist; ``LLM_LINK_BUSY``: too many grants;
                ``LLM_OUT_OF_MEMORY``: no memory for the list; ``LLM_FAILED``: no thread could be started.
        """
        self._check_open()
        return _core.Grants(self._native).grant(cache, blocks, ttl_ms, readers)
