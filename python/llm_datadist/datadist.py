"""``LLMDataDist``: one engine, its life and its manager (python-api.md §6).

Not for: operations on caches (``cache_manager``) or reading option texts (the engine).
"""

from __future__ import annotations

import atexit
import threading
from typing import Any, ClassVar, Optional

from llm_datadist import _core, log
from llm_datadist.cache_manager import CacheManager
from llm_datadist.configs import LLMRole
from llm_datadist.status import LLMException, LLMStatusCode, raise_if_false

__all__ = ["LLMDataDist"]

_ROLE_NAMES = {LLMRole.PROMPT: "Prompt", LLMRole.DECODER: "Decoder", LLMRole.MIX: "Mix"}

_CACHE_MANAGER = "llm.EnableCacheManager"
_REMOTE_ACCESS = "llm.EnableRemoteCacheAccessible"
_LISTEN = "llm.listenIpInfo"


class LLMDataDist:
    """An engine for the KV cache. One per process can be initialised at a time.

    Args:
        role: what the cluster does for others.
        cluster_id: its name among its peers (uint64).

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: ``cluster_id`` outside uint64.
    """

    llm_engine_instance: ClassVar[Optional[LLMDataDist]] = None
    """The initialised instance."""

    # Held while an engine is opened and while one is taken out of use, so that two threads cannot both become the
    # instance. Re-entrant: a signal handler may call finalize in the middle of either.
    _life: ClassVar[threading.RLock] = threading.RLock()

    def __init__(self, role: LLMRole, cluster_id: int) -> None:
        _core.check_isinstance("role", role, LLMRole)
        _core.check_uint64("cluster_id", cluster_id)
        self._role = role
        self._cluster_id = cluster_id
        self._is_initialized = False
        self._enable_cache_mgr = False
        self._enable_local_comm_res = False
        self._engine_options: dict[str, str] = {}
        self._llm_datadist: Optional[_core.DataDist] = None
        self._cache_manager: Optional[CacheManager] = None

    @property
    def cluster_id(self) -> int:
        """Its name among its peers; readable in any state."""
        return self._cluster_id

    def init(self, options: dict[str, str]) -> None:
        """Open the engine. Without effect when already initialised; may be repeated after a failure.

        Args:
            options: option texts, usually from ``LLMConfig.generate_options``; copied.

        Raises:
            TypeError: ``options`` is no dict, or an option no text.
            AttributeError: ``options`` is ``None``.
            ValueError: the port of ``llm.listenIpInfo`` is no uint16.
            LLMException: ``LLM_FAILED``, another instance is initialised; ``LLM_PARAM_INVALID``, an option without
                meaning; ``LLM_OUT_OF_MEMORY``, no memory for a pool.
        """
        if self._is_initialized:
            return
        with LLMDataDist._life:
            if self._is_initialized:
                return  # by another thread, meanwhile
            raise_if_false(
                LLMDataDist.llm_engine_instance is None,
                "another LLMDataDist is initialized in this process",
                status_code=LLMStatusCode.LLM_FAILED,
            )
            _core.check_dict("options", options, str, object)
            _check_graph_memory(options.get("ge.flowGraphMemMaxSize"))
            resolved = self._resolved(options)
            self._llm_datadist = _core.DataDist(self._role, self._cluster_id, resolved)
            self._engine_options = resolved
            self._enable_cache_mgr = resolved.get(_CACHE_MANAGER) == "1"
            self._enable_local_comm_res = "llm.LocalCommRes" in resolved
            if self._enable_cache_mgr:
                self._cache_manager = CacheManager(self._llm_datadist, resolved)
            LLMDataDist.llm_engine_instance = self
            self._is_initialized = True

    def _resolved(self, options: dict[str, str]) -> dict[str, str]:
        """Return a copy of ``options`` with everything that follows from them (python-api.md §6.2, steps 5 to 10)."""
        resolved = {**options, "llm.Role": self._role_to_str(self._role)}
        if "llm.ListenIpInfo" in resolved:
            resolved.setdefault(_LISTEN, resolved["llm.ListenIpInfo"])
        if "llm.LocalCommRes" in resolved:
            resolved.setdefault(_CACHE_MANAGER, "1")
            resolved.setdefault(_REMOTE_ACCESS, "1")
        cache_manager = resolved.get(_CACHE_MANAGER) == "1"
        if "llm.LocalCommRes" in resolved:
            raise_if_false(cache_manager, "llm.LocalCommRes needs {} = 1", _CACHE_MANAGER)
        if "llm.TransferBackend" in resolved:
            raise_if_false(cache_manager, "llm.TransferBackend needs {} = 1", _CACHE_MANAGER)
            resolved.setdefault(_REMOTE_ACCESS, "1")
            raise_if_false(resolved[_REMOTE_ACCESS] != "0", "llm.TransferBackend needs {} = 1", _REMOTE_ACCESS)
            raise_if_false(_LISTEN in resolved, "llm.TransferBackend needs {}", _LISTEN)
        if cache_manager and _LISTEN in resolved:
            resolved["llm.ListenIp"], resolved["llm.ListenPort"] = _listen_address(resolved[_LISTEN])
        return resolved

    def finalize(self) -> None:
        """Close the engine and release its pools. Without effect when not initialised.

        Ids, managers and caches of the engine are void afterwards; memory that views still show stays until they go.
        Must not run concurrently with other calls.
        """
        with LLMDataDist._life:
            if not self._is_initialized:
                return
            self._is_initialized = False
            manager, self._cache_manager = self._cache_manager, None
            native, self._llm_datadist = self._llm_datadist, None
            if manager is not None:
                manager._initialized = False  # noqa: SLF001  (an expired manager never reaches a later engine)
            LLMDataDist.llm_engine_instance = (
                None  # last: only now may another be initialised, also by a signal handler
            )
        if native is not None:
            native.close()  # outside of the lock: it unmaps the pools

    @property
    def cache_manager(self) -> CacheManager:
        """The manager of the caches: the same object until ``finalize``.

        Raises:
            RuntimeError: not initialised.
            LLMException: ``LLM_PARAM_INVALID``, initialised without ``llm.EnableCacheManager``.
        """
        self._check_initialized()
        raise_if_false(self._enable_cache_mgr, "cache_manager needs {} = 1", _CACHE_MANAGER)
        if self._cache_manager is None:
            raise RuntimeError("llm datadist is not initialized")
        return self._cache_manager

    def stats(self) -> dict[str, Any]:
        """Return the engine's counters: pools, table, calls with their times in nanoseconds, bytes moved.

        Raises:
            RuntimeError: not initialised.
        """
        return self._check_initialized().stats()

    def _check_initialized(self) -> _core.DataDist:
        if not self._is_initialized or self._llm_datadist is None:
            raise RuntimeError("llm datadist is not initialized")
        return self._llm_datadist

    @staticmethod
    def _role_to_str(role: LLMRole) -> str:
        raise_if_false(role in _ROLE_NAMES, "role = {} is not allowed: a member of LLMRole", role)
        return _ROLE_NAMES[role]


def _check_graph_memory(size: object) -> None:
    """Check ``ge.flowGraphMemMaxSize``: one entry of decimal digits, without effect here."""
    _core.check_isinstance("ge.flowGraphMemMaxSize", size, str)
    if isinstance(size, str):
        text = log.shown(size)
        raise_if_false("," not in size, "ge.flowGraphMemMaxSize = {} is not allowed: one entry", text)
        digits = size.isascii() and size.isdigit()
        raise_if_false(digits, "ge.flowGraphMemMaxSize = {} is not allowed: decimal digits", text)


def _listen_address(info: str) -> tuple[str, str]:
    """Split ``ip:port`` or ``[ipv6]:port``."""
    _core.check_isinstance(_LISTEN, info, str, allow_none=False)
    ip, colon, port = info.rpartition(":")
    plain = bool(ip) and not set(ip) & set(":[]")
    bracketed = ip.startswith("[") and ip.endswith("]") and ip != "[]"
    raise_if_false(colon and (plain or bracketed), "{} = {} is not allowed: ip:port", _LISTEN, log.shown(info))
    if not (port.isascii() and port.isdigit()):
        raise ValueError(f"{_LISTEN} = {log.shown(info)}: the port is not decimal digits")
    _core.check_uint16("listen port", int(port))
    return ip, port


def _shutdown_handler() -> None:
    """Finalize the active instance, whatever happens: the interpreter is going down."""
    instance = LLMDataDist.llm_engine_instance
    if instance is None:
        return
    try:
        instance.finalize()
    except LLMException as error:
        log.warn("finalize at exit failed: %s", error)
    finally:
        LLMDataDist.llm_engine_instance = None


atexit.register(_shutdown_handler)
