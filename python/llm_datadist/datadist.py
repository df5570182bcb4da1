"""``LLMDataDist``: one engine, its life, its links and its managers (contract §6).

Not for: operations on caches (``cache_manager``) or reading option texts (the engine).
"""

from __future__ import annotations

import atexit
import os
import threading
from typing import TYPE_CHECKING, ClassVar, Optional, Union

from llm_datadist import _core, engine_log, layerwise, log
from llm_datadist.cache_manager import CacheManager
from llm_datadist.configs import LLMRole
from llm_datadist.engine_config import ClusterConfig, EngineConfig, listens_at
from llm_datadist.kv_cache_manager import KvCacheManager
from llm_datadist.log import logged
from llm_datadist.status import LLMException, LLMStatusCode, raise_if_false, raise_if_true
from llm_datadist.types import RegisterMemStatus, int_to_mem_status_dict

if TYPE_CHECKING:
    from llm_datadist.configs import LLMClusterInfo
    from llm_datadist.stats import Stats

__all__ = ["LLMDataDist"]

_ROLE_NAMES = {LLMRole.PROMPT: "Prompt", LLMRole.DECODER: "Decoder", LLMRole.MIX: "Mix"}

_CACHE_MANAGER = "llm.EnableCacheManager"
_REMOTE_ACCESS = "llm.EnableRemoteCacheAccessible"
_LISTEN = "llm.listenIpInfo"
_LISTEN_TOO = "llm.ListenIpInfo"
_LOCAL_RESOURCES = "llm.LocalCommRes"
_BACKEND = "llm.TransferBackend"
_CLUSTER_INFO = "llm.ClusterInfo"
_TOKEN = "llm.LinkToken"  # noqa: S105  (the name of the option)
# The token's own variables: no more than one of them counts, and none where an option gives the token.
_TOKEN_VARIABLES = {"llm.LinkTokenFile": "LLM_DATADIST_TOKEN_FILE", _TOKEN: "LLM_DATADIST_TOKEN"}

# Options that the environment gives where the caller does not.
_ENVIRONMENT = {
    "env.HCCL_CONNECT_TIMEOUT": "HCCL_CONNECT_TIMEOUT",
    "llm.LinkAcceptRemote": "LLM_DATADIST_ACCEPT_REMOTE",
    "llm.RankHosts": "LLM_DATADIST_RANK_HOSTS",
    "llm.RankPort": "LLM_DATADIST_RANK_PORT",
}

_NOT_OPEN = "this LLMDataDist is not initialized; call init first"

# Clusters of one call without the cache manager (contract §9.3).
_MOST_CLUSTERS = 16


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
        self._kv_cache_manager: Optional[KvCacheManager] = None

    @property
    def cluster_id(self) -> int:
        """Its name among its peers; readable in any state."""
        return self._cluster_id

    def init(self, options: dict[str, str]) -> None:
        """Open the engine. Without effect when already initialised; may be repeated after a failure.

        Args:
            options: option texts, usually from ``LLMConfig.generate_options``; copied. Without the cache manager
                ``llm.ClusterInfo`` is stored back (contract §17.48). Where one is absent, the
                environment is asked: ``LLM_DATADIST_TOKEN_FILE`` or ``LLM_DATADIST_TOKEN``,
                ``LLM_DATADIST_ACCEPT_REMOTE``, ``LLM_DATADIST_RANK_HOSTS``, ``LLM_DATADIST_RANK_PORT``. Where
                ``link_total_time`` is 0, ``HCCL_CONNECT_TIMEOUT`` (seconds) counts.

        Raises:
            TypeError: ``options`` is no dict, or an option no text.
            AttributeError: ``options`` is ``None``.
            ValueError: the port of ``llm.listenIpInfo`` is no uint16.
            LLMException: ``LLM_FAILED``, another instance is initialised; ``LLM_PARAM_INVALID``, an option without
                meaning; ``LLM_OUT_OF_MEMORY``, no memory for a pool; ``LLM_FAILED``, an address that cannot be
                listened at.
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
            cache_manager = resolved.get(_CACHE_MANAGER) == "1"
            if not cache_manager:
                self._describe_cluster(resolved)
            self._llm_datadist = _core.DataDist(self._role, self._cluster_id, resolved)
            resolved.pop(_TOKEN, None)  # only the engine needs it
            self._engine_options = resolved
            self._enable_cache_mgr = cache_manager
            self._enable_local_comm_res = _LOCAL_RESOURCES in resolved
            if cache_manager:
                self._cache_manager = CacheManager(self._llm_datadist, resolved)
            else:
                self._kv_cache_manager = KvCacheManager(self._llm_datadist, self._role)
                options[_CLUSTER_INFO] = resolved[_CLUSTER_INFO]
            engine_log.start()
            LLMDataDist.llm_engine_instance = self
            self._is_initialized = True

    def _resolved(self, options: dict[str, str]) -> dict[str, str]:
        """Return a copy of ``options`` with everything that follows from them (contract §6.2, steps 5 to 10)."""
        resolved = {**options, "llm.Role": self._role_to_str(self._role)}
        for option, variable in _ENVIRONMENT.items():
            if os.environ.get(variable):
                resolved.setdefault(option, os.environ[variable])
        if not resolved.keys() & _TOKEN_VARIABLES.keys():
            resolved.update(_token_of_the_environment())
        if _LISTEN_TOO in resolved:
            resolved.setdefault(_LISTEN, resolved[_LISTEN_TOO])
        if _LOCAL_RESOURCES in resolved:
            resolved.setdefault(_CACHE_MANAGER, "1")
            resolved.setdefault(_REMOTE_ACCESS, "1")
        cache_manager = resolved.get(_CACHE_MANAGER) == "1"
        if _LOCAL_RESOURCES in resolved:
            raise_if_false(cache_manager, "llm.LocalCommRes needs {} = 1", _CACHE_MANAGER)
        if _BACKEND in resolved:
            raise_if_false(cache_manager, "llm.TransferBackend needs {} = 1", _CACHE_MANAGER)
            resolved.setdefault(_REMOTE_ACCESS, "1")
            raise_if_false(resolved[_REMOTE_ACCESS] != "0", "llm.TransferBackend needs {} = 1", _REMOTE_ACCESS)
            raise_if_false(_LISTEN in resolved, "llm.TransferBackend needs {}", _LISTEN)
        if cache_manager and _LISTEN in resolved:
            resolved["llm.ListenIp"], resolved["llm.ListenPort"] = _listen_address(resolved[_LISTEN])
        return resolved

    def _describe_cluster(self, resolved: dict[str, str]) -> None:
        """Fill in ``llm.ClusterInfo``, or take from one that was given where to listen (contract §9.7)."""
        if _CLUSTER_INFO in resolved:
            listen = listens_at(resolved[_CLUSTER_INFO]) if self._role == LLMRole.PROMPT else None
            if listen is not None:
                resolved.setdefault(_LISTEN, listen)
        EngineConfig.gen_cluster_info_if_not_exist(self._cluster_id, self._role, resolved)

    def _cluster_config(self) -> ClusterConfig:
        """Return the devices of the cluster and where it listens."""
        return EngineConfig.from_engine_options(self._role == LLMRole.PROMPT, self._engine_options).cluster_config

    def finalize(self) -> None:
        """Close the engine and release its pools. Without effect when not initialised.

        Layer-wise transfers under way may end first, as long as one of their layers comes within ``sync_kv_timeout``;
        what then remains of them gets ``LLM_ENGINE_FINALIZED``.
        Ids, managers and caches of the engine are void afterwards; memory that views still show stays until they go.
        Must not run concurrently with other calls.
        """
        with LLMDataDist._life:
            if not self._is_initialized:
                return
            self._is_initialized = False
            managers = (self._cache_manager, self._kv_cache_manager)
            self._cache_manager = self._kv_cache_manager = None
            native, self._llm_datadist = self._llm_datadist, None
            for manager in managers:
                if manager is not None:
                    manager._initialized = False  # noqa: SLF001  (an expired manager never reaches a later engine)
            LLMDataDist.llm_engine_instance = (
                None  # last: only now may another be initialised, also by a signal handler
            )
        if native is not None:
            try:
                layerwise.drain(native)
            finally:
                native.close()  # outside of the lock: it unmaps the pools
                engine_log.stop()

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
            raise RuntimeError(_NOT_OPEN)
        return self._cache_manager

    @property
    def kv_cache_manager(self) -> KvCacheManager:
        """The manager of the caches of an engine without the cache manager: the same object until ``finalize``.

        Raises:
            RuntimeError: not initialised.
            LLMException: ``LLM_PARAM_INVALID``, initialised with ``llm.EnableCacheManager``.
        """
        self._check_initialized()
        raise_if_true(self._enable_cache_mgr, "kv_cache_manager needs an engine without {} = 1", _CACHE_MANAGER)
        if self._kv_cache_manager is None:
            raise RuntimeError(_NOT_OPEN)
        return self._kv_cache_manager

    @property
    def listen_ip_info(self) -> Optional[str]:
        """Where peers are listened for, ``"ip:port"`` with the port that was really taken; ``None`` without a listener.

        Own addition: with port 0 in ``llm.listenIpInfo`` this is what peers need.

        Raises:
            RuntimeError: not initialised.
        """
        return self._check_initialized().listening()

    @logged
    def link(self, comm_name: str, cluster_rank_info: dict[int, int], rank_table: str) -> int:
        """Enter a communicator of 2 to 4 clusters, all of which make this call (contract §6.5).

        Returns at once; links come about in the background, see :meth:`query_register_mem_status`. From now on
        registered memory can be reached by peers only where ``register_*`` said so before.

        Args:
            comm_name: its name, 1 to 127 characters, the same at every member.
            cluster_rank_info: cluster id (uint64) → rank (uint32), ranks ascending, this cluster among them.
            rank_table: where the ranks are, as JSON.

        Returns:
            The number of the communicator, for :meth:`query_register_mem_status` and :meth:`unlink`.

        Raises:
            RuntimeError: not initialised.
            TypeError: an argument of the wrong type; ValueError: a number outside its width; AttributeError:
                ``cluster_rank_info`` is ``None``.
            LLMException: ``LLM_PARAM_INVALID``, without the cache manager, or arguments without meaning;
                ``LLM_FEATURE_NOT_ENABLED``, transfer backend ``hixl``; ``LLM_LINK_FAILED``.
        """
        comm_id = self._by_rank("link").link(comm_name, cluster_rank_info, rank_table)
        manager = self._cache_manager
        if manager is not None:
            manager.set_is_call_linked()
        return comm_id

    @logged
    def unlink(self, comm_id: int) -> None:
        """Leave a communicator and end its links (contract §6.6).

        Args:
            comm_id: what :meth:`link` returned (uint64).

        Raises:
            RuntimeError: not initialised.
            TypeError: no ``int``; ValueError: outside uint64.
            LLMException: ``LLM_NOT_YET_LINK``, no such communicator; ``LLM_UNLINK_FAILED``; and as for :meth:`link`.
        """
        self._by_rank("unlink").unlink(comm_id)

    @logged
    def query_register_mem_status(self, comm_id: int) -> RegisterMemStatus:
        """Return how far a communicator is: ``PREPARING``, then for ever ``OK`` or ``FAILED`` (contract §6.7).

        Arguments and errors as for :meth:`unlink`.
        """
        number = self._by_rank("query_register_mem_status").comm_status(comm_id)
        return int_to_mem_status_dict.get(number, RegisterMemStatus.FAILED)

    @logged
    def link_clusters(
        self, clusters: Union[list[LLMClusterInfo], tuple[LLMClusterInfo, ...]], timeout: int = 3000
    ) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        """Link to peers that listen, in parallel (contract §6.8). A link that fails raises nothing.

        Args:
            clusters: the peers, each with its cluster id, one address of its own and one of this side (which
                ``llm.LocalCommRes`` replaces).
            timeout: limit in milliseconds (int32, above 0).

        Returns:
            The code of the last that failed, or ``LLM_SUCCESS``; and the code of each, in order. Reasons are logged.
            No clusters: ``(LLM_PARAM_INVALID, [])``.

        Raises:
            RuntimeError: not initialised.
            TypeError: an argument of the wrong type, or a peer without ``remote_cluster_id``.
            ValueError: a number outside its width.
            LLMException: ``LLM_PARAM_INVALID``, a ``timeout`` of 0 or less, or a peer without an own address.
        """
        native = self._check_initialized()
        refused = self._refused(clusters, links=True)
        if refused is not None:
            return refused, []
        one_local = not self._engine_options.get(_LOCAL_RESOURCES)
        codes = native.link_clusters(clusters, timeout, self._enable_cache_mgr and one_local, one_local)
        return _last_failing(codes), codes

    @logged
    def unlink_clusters(
        self,
        clusters: Union[list[LLMClusterInfo], tuple[LLMClusterInfo, ...]],
        timeout: int = 3000,
        force: bool = False,
    ) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        """End links, whichever side made them (contract §6.8).

        Args:
            clusters: the peers. With ``force`` a cluster id is enough.
            timeout: limit in milliseconds (int32, above 0).
            force: end only this side's half and tell the peer nothing.

        Returns:
            As for :meth:`link_clusters`. Unlinking a cluster that is not linked succeeds; without the cache manager its
            code is ``LLM_NOT_YET_LINK``, which does not count in the first.

        Raises:
            RuntimeError: not initialised.
            TypeError: an argument of the wrong type, or a peer without ``remote_cluster_id``.
            ValueError: a number outside its width.
            LLMException: ``LLM_PARAM_INVALID``, a ``timeout`` of 0 or less.
        """
        native = self._check_initialized()
        refused = self._refused(clusters, links=False)
        if refused is not None:
            return refused, []
        one_sided = _BACKEND in self._engine_options
        codes = native.unlink_clusters(clusters, timeout, force, one_sided, not self._enable_cache_mgr)
        if self._enable_cache_mgr:
            return _last_failing(codes), codes
        return _last_failing(codes, LLMStatusCode.LLM_NOT_YET_LINK), codes

    @logged
    def switch_role(self, role: LLMRole, switch_options: Optional[dict[str, str]] = None) -> None:
        """Take another role, and listen elsewhere or nowhere (contract §6.9).

        Args:
            role: the new role; without the cache manager another than now.
            switch_options: ``llm.listenIpInfo`` says where to listen from now on; without it a listener is stopped.

        Raises:
            RuntimeError: not initialised.
            TypeError: an argument of the wrong type; ValueError: a port outside uint16.
            LLMException: ``LLM_EXIST_LINK``, links remain; ``LLM_PARAM_INVALID``, an address without meaning, and
                without the cache manager the same role or a prompt role without an address;
                ``LLM_FEATURE_NOT_ENABLED``, another address with transfer backend ``hixl``, and without the cache
                manager ``llm.EnableSwitchRole`` missing at init; ``LLM_FAILED``, an address that cannot be listened at.
        """
        native = self._check_initialized()
        _core.check_isinstance("role", role, LLMRole, allow_none=False)
        _core.check_isinstance("switch_options", switch_options, dict)
        options = switch_options or {}
        listen = options.get(_LISTEN, options.get(_LISTEN_TOO))
        if listen is not None:
            _listen_address(listen)
        if not self._enable_cache_mgr:
            self._check_switch(role, listen)
        elif _BACKEND in self._engine_options:
            now = native.listening()
            raise_if_false(
                listen in (None, now, self._engine_options[_LISTEN]),
                "{} = {} is another address than {}, which {} does not allow",
                *(_LISTEN, log.shown(listen), now, _BACKEND),
                status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
            )
            listen = now
        native.switch_role(role, listen)
        self._role = role
        if self._kv_cache_manager is not None:
            self._kv_cache_manager._switch_role(role)  # noqa: SLF001  (its rules follow the role)

    @logged
    def check_link_status(self, remote_cluster_id: int) -> None:
        """Ask a linked peer for a sign of life, within ``sync_kv_timeout`` (contract §6.11).

        Only without the cache manager, and for ``LLMRole.DECODER``.

        Args:
            remote_cluster_id: the peer (uint64).

        Raises:
            RuntimeError: not initialised.
            TypeError: no ``int``; ValueError: outside uint64.
            LLMException: ``LLM_PARAM_INVALID``, with the cache manager, or another role; ``LLM_NOT_YET_LINK``, not
                linked or broken; ``LLM_WAIT_PROCESS_TIMEOUT``, no answer in time.
        """
        native = self._check_initialized()
        raise_if_true(self._enable_cache_mgr, "check_link_status needs an engine without {} = 1", _CACHE_MANAGER)
        _core.check_uint64("remote_cluster_id", remote_cluster_id)
        raise_if_false(self._role == LLMRole.DECODER, "check_link_status is for the decoder, not for {}", self._role)
        native.check_link(remote_cluster_id)

    def stats(self) -> Stats:
        """Return the engine's counters, as plain dicts: :class:`llm_datadist.stats.Stats` documents every field.

        Raises:
            RuntimeError: not initialised.
        """
        return self._check_initialized().stats()

    def _by_rank(self, call: str) -> _core.DataDist:
        native = self._check_initialized()
        raise_if_false(self._enable_cache_mgr, "{} needs {} = 1", call, _CACHE_MANAGER)
        return native

    def _refused(self, clusters: object, *, links: bool) -> Optional[LLMStatusCode]:
        """Return why a link call is refused without the cache manager, if it is (contract §9.3)."""
        if self._enable_cache_mgr:
            return None
        if links and self._role != LLMRole.DECODER:
            log.error("link_clusters is for the decoder, not for %s", self._role)
            return LLMStatusCode.LLM_PARAM_INVALID
        if isinstance(clusters, (list, tuple)) and len(clusters) > _MOST_CLUSTERS:
            log.error("%s clusters in one call, more than %s", len(clusters), _MOST_CLUSTERS)
            return LLMStatusCode.LLM_CLUSTER_NUM_EXCEED_LIMIT
        return None

    def _check_switch(self, role: LLMRole, listen: Optional[str]) -> None:
        """Raise where the role cannot be switched without the cache manager (contract §6.9)."""
        raise_if_false(role != self._role, "the role is {} already", role)
        prompt = role == LLMRole.PROMPT
        raise_if_true(prompt and listen is None, "{} needs {} in switch_options", role, _LISTEN)
        raise_if_false(
            self._engine_options.get("llm.EnableSwitchRole") == "1",
            "switch_role needs llm.EnableSwitchRole = 1 at init",
            status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
        )

    def _check_initialized(self) -> _core.DataDist:
        if not self._is_initialized or self._llm_datadist is None:
            raise RuntimeError(_NOT_OPEN)
        return self._llm_datadist

    @staticmethod
    def _role_to_str(role: LLMRole) -> str:
        raise_if_false(role in _ROLE_NAMES, "role = {} is not allowed: a member of LLMRole", role)
        return _ROLE_NAMES[role]


def _token_of_the_environment() -> dict[str, str]:
    """Return the option that ``LLM_DATADIST_TOKEN_FILE`` or ``LLM_DATADIST_TOKEN`` stands for, if one is set."""
    given = {option: os.environ[name] for option, name in _TOKEN_VARIABLES.items() if os.environ.get(name)}
    for name in _TOKEN_VARIABLES.values():
        # A secret that a deployment forgot to fill in is not taken for the wish to have none.
        empty = not given and name in os.environ
        raise_if_true(empty, "{} is set, but empty; unset it, or give it a value", name)
    raise_if_true(len(given) > 1, "{} and {} are both set; unset one of them", *_TOKEN_VARIABLES.values())
    return given


def _check_graph_memory(size: object) -> None:
    """Check ``ge.flowGraphMemMaxSize``: one entry of decimal digits. It has an effect without the cache manager."""
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


def _last_failing(codes: list[LLMStatusCode], harmless: LLMStatusCode = LLMStatusCode.LLM_SUCCESS) -> LLMStatusCode:
    """Return the code of a whole call: the last that failed (contract §6.8)."""
    if not codes:
        log.error("clusters is empty")
        return LLMStatusCode.LLM_PARAM_INVALID
    failing = [code for code in codes if code not in (LLMStatusCode.LLM_SUCCESS, harmless)]
    return failing[-1] if failing else LLMStatusCode.LLM_SUCCESS


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
# A forked child keeps no socket of its parent's open: peers of a parent that dies are to notice at once.
os.register_at_fork(after_in_child=_core.abandon_sockets)
