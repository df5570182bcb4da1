"""Base classes of the handles ``Cache`` and ``KvCache`` and of the managers of both modes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Generic, Optional, TypeVar, Union, cast

from llm_datadist import _core, log
from llm_datadist.original.arguments import refuse_none
from llm_datadist.original.status import LLMException, LLMStatusCode

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from llm_datadist.original.types import CacheDesc, CacheKey

__all__ = [
    "CacheHandle",
    "EngineCaches",
    "release_on_exit",
]

_Calls = TypeVar("_Calls")


def _finalized() -> LLMException:
    return LLMException("the engine was finalized", status_code=LLMStatusCode.LLM_ENGINE_FINALIZED)


class _Finalized:
    """Takes the place of a finalized engine: every call raises ``LLM_ENGINE_FINALIZED``."""

    def __getattr__(self, name: str) -> Any:
        raise _finalized()


_FINALIZED = _Finalized()


class EngineCaches(Generic[_Calls]):
    """The base of both managers: holds the engine until it is finalized, and has the calls that both modes share.

    Args:
        datadist: the engine.
        calls: the object of the native module that implements the calls of this mode.
    """

    # The receiver of every call: `calls`, or `_FINALIZED` once the engine is finalized. It is an attribute and not a
    # property, because a property would take as long as the lookup of a cache.
    _open_calls: _Calls

    def __init__(self, datadist: _core.DataDist, calls: _Calls) -> None:
        self._datadist = datadist
        self._calls = calls
        self._initialized = True

    @property
    def _initialized(self) -> bool:
        return self._open_calls is not _FINALIZED

    @_initialized.setter
    def _initialized(self, initialized: bool) -> None:
        self._open_calls = self._calls if initialized else cast("_Calls", _FINALIZED)

    def _check_open(self) -> None:
        """Raise ``LLM_ENGINE_FINALIZED`` once the engine is finalized."""
        if not self._initialized:
            raise _finalized()

    @staticmethod
    def check_cache_key(cache_key: CacheKey) -> None:
        """Check that exactly one of ``req_id`` and ``prefix_id`` differs from ``2**64 - 1``.

        Args:
            cache_key: the key to check.

        Raises:
            AttributeError: ``cache_key`` is ``None``.
            LLMException: ``LLM_PARAM_INVALID``: neither or both are given.
        """
        refuse_none("cache_key", cache_key)
        _core.check_cache_key(cache_key)


class CacheHandle:
    """The base of the cache handles ``Cache`` and ``KvCache``.

    A handle is a context manager: ``with manager.allocate_cache(...) as cache:`` releases the cache at the end of the
    block, as described at ``__exit__``.
    """

    # The engine's reference to the cache. `None` for a handle that a program built; the engine looks it up by id.
    _handle: Union[_core.LooseCache, _core.ManagedCache, None] = None
    # False after a deallocation, and for a handle whose constructor failed.
    _valid = False
    _is_blocks_cache = False
    _cache_id: int
    _cache_desc: CacheDesc

    @property
    def cache_id(self) -> int:
        """Id in its engine, 1 or more; -1 for a CPU cache."""
        return self._cache_id

    @property
    def cache_desc(self) -> CacheDesc:
        """The descriptor of the cache."""
        return self._cache_desc

    def __enter__(self) -> Self:
        """Return the handle."""
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        """Release the cache: deallocate an allocated one, unregister a registered one.

        A cache that was released already, a cache of a finalized engine and a CPU cache are not an error: nothing is
        done. Keys of a continuous cache hold its memory beyond the block.

        If the block raised, its exception propagates, and a failure of the release is only logged at ERROR. Otherwise
        that failure is raised. The memory of a registered cache must then stay valid until a further call of
        ``CacheManager.unregister_cache`` succeeds.

        Raises:
            LLMException: ``LLM_TIMEOUT``: peers used registered memory for longer than ``sync_kv_timeout``;
                ``LLM_FAILED``: this process was forked after the engine was opened.
        """
        release_on_exit(self._release_unless_finalized, error, self)

    def _release_unless_finalized(self) -> None:
        try:
            self._release()
        except LLMException as error:
            if error.status_code != LLMStatusCode.LLM_ENGINE_FINALIZED:
                raise

    def _release(self) -> None:
        """Release the cache through its manager, if the handle has one and was not released already."""
        raise NotImplementedError


def release_on_exit(release: Any, error: Optional[BaseException], of: object) -> None:
    """Call ``release`` at the end of the ``with`` block of an object.

    If the block raised ``error``, a failure is only logged at ERROR, so that it does not hide that exception.
    """
    try:
        release()
    except Exception as failure:
        if error is None:
            raise
        log.error("failed to release %s after its with block raised: %s", of, failure)
