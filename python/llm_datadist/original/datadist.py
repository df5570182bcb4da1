"""``LLMDataDist``: the life cycle of an engine, its links and its managers."""

from __future__ import annotations

import os
import threading
from typing import TYPE_CHECKING, ClassVar, Optional, Union

from llm_datadist import _core, engine_log, log
from llm_datadist.original import init_options, layerwise
from llm_datadist.original.arguments import check_dict
from llm_datadist.original.cache_manager import CacheManager
from llm_datadist.original.caches import release_on_exit
from llm_datadist.original.cluster_info import LLMRole
from llm_datadist.original.engine_config import ClusterConfig, EngineConfig, listens_at
from llm_datadist.original.init_options import (
    BACKEND,
    CACHE_MANAGER,
    LISTEN,
    LISTEN_TOO,
    LOCAL_RESOURCES,
)
from llm_datadist.original.kv_cache_manager import KvCacheManager
from llm_datadist.original.logged_calls import logged, shown
from llm_datadist.original.spelling import report_unknown_pool_keys
from llm_datadist.original.status import LLMException, LLMStatusCode, raise_if_false, raise_if_true
from llm_datadist.original.types import RegisterMemStatus, int_to_mem_status_dict

if TYPE_CHECKING:
    from types import TracebackType

    from typing_extensions import Self

    from llm_datadist.native import Engine
    from llm_datadist.original.cluster_info import LLMClusterInfo
    from llm_datadist.stats import Stats

__all__ = ["LLMDataDist"]

_ROLE_NAMES = {LLMRole.PROMPT: "Prompt", LLMRole.DECODER: "Decoder", LLMRole.MIX: "Mix"}

_CLUSTER_INFO = "llm.ClusterInfo"
_TOKEN = "llm.LinkToken"  # noqa: S105  (the name of the option)

_NOT_OPEN = "this LLMDataDist is not initialized; call init first"

# Clusters of one call in KvCacheManager mode (contract §9.3).
_MAX_CLUSTERS = 16


class LLMDataDist:
    """An engine for KV caches. At most one instance of a process is initialized at a time.

    An instance is a context manager. ``with LLMDataDist(role, cluster_id) as dist:`` calls ``finalize`` at the end
    of the block, as described at ``__exit__``; ``init`` is called inside the block.

    Args:
        role: the role of the cluster. In CacheManager mode it is a label; in KvCacheManager mode it decides which calls
            are allowed.
        cluster_id: id of the cluster, unique among the engines that link to each other (uint64).

    Raises:
        TypeError: ``role`` is not an ``LLMRole``, or ``cluster_id`` is not an ``int``.
        ValueError: ``cluster_id`` is outside uint64.
        LLMException: calls in a process that was forked after ``init`` raise ``LLM_FAILED``.
    """

    llm_engine_instance: ClassVar[Optional[LLMDataDist]] = None
    """The initialized instance of the process, or ``None``. A forked child begins with ``None``."""

    # The process to which `llm_engine_instance` and `_life` belong.
    _process: ClassVar[int] = os.getpid()
    # Held while `init` opens an engine and while `finalize` unsets `llm_engine_instance`, so that at most one instance
    # is initialized. Re-entrant, because a signal handler may call `finalize` meanwhile.
    _life: ClassVar[threading.RLock] = threading.RLock()

    def __init__(self, role: LLMRole, cluster_id: int) -> None:
        _core.check_isinstance("role", role, LLMRole)
        _core.check_uint64("cluster_id", cluster_id)
        log.get_logger()  # sets the level that the logged calls follow
        self._role = role
        self._cluster_id = cluster_id
        self._is_initialized = False
        self._opened_by = 0
        self._enable_cache_mgr = False
        self._enable_local_comm_res = False
        self._engine_options: dict[str, str] = {}
        self._llm_datadist: Optional[_core.DataDist] = None
        self._cache_manager: Optional[CacheManager] = None
        self._kv_cache_manager: Optional[KvCacheManager] = None

    @property
    def cluster_id(self) -> int:
        """Id of the cluster (uint64). The property works in any state."""
        return self._cluster_id

    def __repr__(self) -> str:
        state = f"initialized={self._is_initialized}"
        native = self._llm_datadist
        if native is not None:
            mode = CacheManager if self._enable_cache_mgr else KvCacheManager
            try:
                listens = native.listening()
            except LLMException:  # finalized meanwhile, or opened before this process was forked
                listens = None
            state += f", mode={mode.__name__}, listen_ip_info={listens!r}"
        return f"LLMDataDist(role={self._role}, cluster_id={self._cluster_id}, {state})"

    def __enter__(self) -> Self:
        """Return the instance, which need not be initialized yet."""
        return self

    def __exit__(
        self,
        kind: Optional[type[BaseException]],
        error: Optional[BaseException],
        trace: Optional[TracebackType],
    ) -> None:
        """Call ``finalize``, also if the block raised.

        An instance that was never initialized, or was finalized already, is not an error. If the block
        raised, its exception propagates, and a failure of ``finalize`` is only logged at ERROR. Otherwise that failure
        is raised.
        """
        release_on_exit(self.finalize, error, self)

    def init(self, options: dict[str, str]) -> None:
        """Open the engine.

        The call has no effect on an initialized object, and may be repeated after a failure. In a forked child it opens
        an engine of the child's own, also on an object that the parent initialized. Unknown keys are
        ignored, and each is logged at ERROR with the nearest known key. Keys that start with ``ge.`` are not. A key
        that resembles an option which the original does not have is an error.

        Args:
            options: keys and texts, usually from ``LLMConfig.generate_options``. The dict is copied; in KvCacheManager
                mode ``llm.ClusterInfo`` is stored in it after a success. Environment variables are
                read for options that are absent: ``LLM_DATADIST_TOKEN_FILE`` or ``LLM_DATADIST_TOKEN``,
                ``LLM_DATADIST_ACCEPT_REMOTE``, ``LLM_DATADIST_TRANSPORT``, ``LLM_DATADIST_RANK_HOSTS``,
                ``LLM_DATADIST_RANK_PORT``, and ``HCCL_CONNECT_TIMEOUT`` (seconds) if ``llm.LinkTotalTime`` is absent
                or 0.

        Raises:
            AttributeError: ``options`` is ``None``.
            TypeError: ``options`` is not a dict, or a key or value is not a ``str``.
            ValueError: the port of ``llm.listenIpInfo`` is not a uint16.
            RuntimeError: in KvCacheManager mode with ``LLMRole.PROMPT``, the address in ``llm.listenIpInfo`` is not an
                IPv4 address.
            LLMException: ``LLM_FAILED``: another object of the process is initialized, or the address cannot be
                bound; ``LLM_PARAM_INVALID``: an option, the role or the token is invalid or missing;
                ``LLM_OUT_OF_MEMORY``, or ``LLM_DEVICE_OUT_OF_MEMORY`` in KvCacheManager mode: the system has no memory
                for a pool.
        """
        _forget_parent()  # the C library's `fork` runs no hooks of Python
        if self._is_initialized and self._opened_by == os.getpid():
            return
        with LLMDataDist._life:
            if self._is_initialized and self._opened_by == os.getpid():
                return  # another thread called init first
            raise_if_false(
                LLMDataDist.llm_engine_instance is None,
                "another LLMDataDist is initialized in this process; finalize it first ({})",
                LLMDataDist.llm_engine_instance,
                status_code=LLMStatusCode.LLM_FAILED,
            )
            check_dict("options", options, str, object)
            init_options.check_names(options)
            report_unknown_pool_keys(options)
            init_options.check_graph_memory(options.get("ge.flowGraphMemMaxSize"))
            resolved = init_options.resolve(options, self._role_to_str(self._role))
            cache_manager = resolved.get(CACHE_MANAGER) == "1"
            if not cache_manager:
                self._describe_cluster(resolved)
            native = _core.DataDist(self._role, self._cluster_id, resolved)
            try:
                resolved.pop(_TOKEN, None)  # only the engine needs it
                self._llm_datadist, self._engine_options = native, resolved
                engine_log.start()
                self._enable_cache_mgr = cache_manager
                self._enable_local_comm_res = LOCAL_RESOURCES in resolved
                self._cache_manager = self._kv_cache_manager = None  # those of the parent, in a forked child
                if cache_manager:
                    self._cache_manager = CacheManager(native, resolved)
                else:
                    self._kv_cache_manager = KvCacheManager(native, self._role)
                if not cache_manager:
                    options[_CLUSTER_INFO] = resolved[_CLUSTER_INFO]
                LLMDataDist.llm_engine_instance = self
                self._opened_by = os.getpid()
                self._is_initialized = True
            except BaseException:
                self._close_half_opened(native)
                raise

    def _close_half_opened(self, native: _core.DataDist) -> None:
        """Close an engine whose ``init`` was interrupted, so that the next ``init`` finds its address free."""
        self._is_initialized = False
        self._llm_datadist = self._cache_manager = self._kv_cache_manager = None
        self._engine_options = {}
        if LLMDataDist.llm_engine_instance is self:
            LLMDataDist.llm_engine_instance = None
        try:
            native.close()
        finally:
            engine_log.stop()

    def _describe_cluster(self, resolved: dict[str, str]) -> None:
        """Add ``llm.ClusterInfo``. If it is given, take the listen address from it."""
        if _CLUSTER_INFO in resolved:
            listen = listens_at(resolved[_CLUSTER_INFO]) if self._role == LLMRole.PROMPT else None
            if listen is not None:
                resolved.setdefault(LISTEN, listen)
        EngineConfig.gen_cluster_info_if_not_exist(self._cluster_id, self._role, resolved)

    def _cluster_config(self) -> ClusterConfig:
        """Return the devices of the cluster and the address at which it listens."""
        return EngineConfig.from_engine_options(self._role == LLMRole.PROMPT, self._engine_options).cluster_config

    def finalize(self) -> None:
        """Close the engine: end all links, and release pools and registrations.

        The call has no effect if the object is not initialized. It waits for layer-wise transfers as long as at least
        one of their layers arrives within each ``sync_kv_timeout``. Unfinished configs then get
        ``LLM_ENGINE_FINALIZED``. Transfers of ``engine`` end at once, and its events are dropped. Managers, caches and
        cache ids of the engine are invalid afterwards. Memory stays mapped as long as a view of it exists.
        ``finalize`` must not run at the same time as other calls. In a forked child, the engine of the parent stays as
        it is.
        """
        _forget_parent()
        with LLMDataDist._life:
            if not self._is_initialized:
                return
            self._is_initialized = False
            forked = self._opened_by != os.getpid()
            managers = (self._cache_manager, self._kv_cache_manager)
            self._cache_manager = self._kv_cache_manager = None
            native, self._llm_datadist = self._llm_datadist, None
            for manager in managers:
                if manager is not None:
                    manager._initialized = False  # noqa: SLF001  (an old manager never reaches a later engine)
            # This must be the last step, because another object, or a signal handler, may call `init` from here on.
            if LLMDataDist.llm_engine_instance is self:
                LLMDataDist.llm_engine_instance = None
        # The log thread of a forked child, if there is one, belongs to another engine.
        if native is not None and not forked:
            try:
                layerwise.drain(native)
            finally:
                native.close()  # without the lock, because unmapping pools takes long
                engine_log.stop()

    @property
    def cache_manager(self) -> CacheManager:
        """The manager in CacheManager mode: the same object until ``finalize``.

        Raises:
            RuntimeError: not initialized.
            LLMException: ``LLM_PARAM_INVALID``: the engine is in KvCacheManager mode.
        """
        self._check_initialized()
        raise_if_false(self._enable_cache_mgr, "cache_manager needs {}=1", CACHE_MANAGER)
        if self._cache_manager is None:
            raise RuntimeError(_NOT_OPEN)
        return self._cache_manager

    @property
    def kv_cache_manager(self) -> KvCacheManager:
        """The manager in KvCacheManager mode: the same object until ``finalize``.

        Raises:
            RuntimeError: not initialized.
            LLMException: ``LLM_PARAM_INVALID``: the engine is in CacheManager mode.
        """
        self._check_initialized()
        raise_if_true(self._enable_cache_mgr, "kv_cache_manager needs an engine without {}=1", CACHE_MANAGER)
        if self._kv_cache_manager is None:
            raise RuntimeError(_NOT_OPEN)
        return self._kv_cache_manager

    @property
    def engine(self) -> Engine:
        """The native ``llm_datadist.Engine`` over the same engine: the same object until ``finalize``.

        The two share pools, links, statistics and threads, so everything that the original lacks is here: transfers
        that are started, groups, grants, layouts, links on demand and messages. Its calls raise the exceptions of the
        native API. ``Cache.native`` names a cache of the cache manager in them. ``events`` returns news about links and
        grants from the first use of this property on. The original does not have this property.

        Its name, which its peers see, is ``"cluster <id>"``. A peer that is an ``LLMDataDist`` keeps its cluster id
        when it restarts, so a ``Peer`` of it then stands for the new process. A native engine links only to one with
        ``llm.EnableRemoteCacheAccessible``. ``Engine.close`` closes both; call ``finalize`` in its place.

        Raises:
            RuntimeError: not initialized.
            LLMException: ``LLM_PARAM_INVALID``: KvCacheManager mode; ``LLM_FAILED``: forked after ``init``.
        """
        native = self._check_initialized()
        raise_if_false(self._enable_cache_mgr, "engine needs {}=1", CACHE_MANAGER)
        return native.native_engine()

    @property
    def listen_ip_info(self) -> Optional[str]:
        """Address at which the engine listens, as ``"ip:port"`` with the bound port.

        ``None`` without a listener. Use it to tell peers the port if ``llm.listenIpInfo`` has port 0. The original does
        not have this property.

        Raises:
            RuntimeError: not initialized.
        """
        return self._check_initialized().listening()

    @logged
    def link(self, comm_name: str, cluster_rank_info: dict[int, int], rank_table: str) -> int:
        """Enter a communicator of 2 to 4 clusters; each member makes this call.

        The call returns at once. Links are made in the background (``query_register_mem_status``). Afterwards, the
        default of ``remote_accessible`` is ``False``.

        Args:
            comm_name: name of the communicator, 1 to 127 characters, the same at every member.
            cluster_rank_info: cluster id (uint64) to rank (uint32). Ranks ascend, and this cluster is one of the keys.
            rank_table: JSON text with an address for each rank.

        Returns:
            The number of the communicator, for ``query_register_mem_status`` and ``unlink``; 1 or more.

        Raises:
            RuntimeError: not initialized.
            AttributeError: ``cluster_rank_info`` is ``None``.
            TypeError: an argument has the wrong type.
            ValueError: a cluster id or a rank is outside its width.
            LLMException: ``LLM_PARAM_INVALID``: KvCacheManager mode, an argument that is not allowed, or 512
                communicators exist; ``LLM_FEATURE_NOT_ENABLED``: transfer backend ``hixl``; ``LLM_LINK_FAILED``: a
                failure that is known at once.
        """
        comm_id = self._by_rank("link").link(comm_name, cluster_rank_info, rank_table)
        manager = self._cache_manager
        if manager is not None:
            manager.set_is_call_linked()
        return comm_id

    @logged
    def unlink(self, comm_id: int) -> None:
        """Leave a communicator and end its links.

        Args:
            comm_id: the result of ``link`` (uint64).

        Raises:
            RuntimeError: not initialized.
            TypeError: ``comm_id`` is not an ``int``.
            ValueError: ``comm_id`` is outside uint64.
            LLMException: ``LLM_NOT_YET_LINK``: there is no such communicator; ``LLM_UNLINK_FAILED``: its links could
                not be ended; ``LLM_PARAM_INVALID``: KvCacheManager mode; ``LLM_FEATURE_NOT_ENABLED``: transfer backend
                ``hixl``.
        """
        self._by_rank("unlink").unlink(comm_id)

    @logged
    def query_register_mem_status(self, comm_id: int) -> RegisterMemStatus:
        """Return the state of a communicator.

        Args:
            comm_id: the result of ``link`` (uint64).

        Returns:
            ``PREPARING`` until all members are linked or ``link_total_time`` seconds have passed, then ``OK`` or
            ``FAILED``, which is final.

        Raises:
            RuntimeError: not initialized.
            TypeError: ``comm_id`` is not an ``int``.
            ValueError: ``comm_id`` is outside uint64.
            LLMException: ``LLM_NOT_YET_LINK``: there is no such communicator; ``LLM_PARAM_INVALID``: KvCacheManager
                mode; ``LLM_FEATURE_NOT_ENABLED``: transfer backend ``hixl``.
        """
        number = self._by_rank("query_register_mem_status").comm_status(comm_id)
        return int_to_mem_status_dict.get(number, RegisterMemStatus.FAILED)

    @logged
    def link_clusters(
        self, clusters: Union[list[LLMClusterInfo], tuple[LLMClusterInfo, ...]], timeout: int = 3000
    ) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        """Link to listening peers, in parallel. A link that fails does not raise an exception.

        Args:
            clusters: the peers. Each has a cluster id, one remote address and one local address; the local one is not
                needed if ``llm.LocalCommRes`` is not empty.
            timeout: time limit of the whole call in milliseconds (int32, above 0).

        Returns:
            ``(code, codes)``: ``codes`` has the code of each cluster, in order, and ``code`` is the last one that is
            not ``LLM_SUCCESS``. The log has the reasons. An empty ``clusters`` gives ``(LLM_PARAM_INVALID, [])``. In
            KvCacheManager mode, so does a role other than ``LLMRole.DECODER``, and more than 16 clusters give
            ``(LLM_CLUSTER_NUM_EXCEED_LIMIT, [])``.

        Raises:
            RuntimeError: not initialized.
            TypeError: an argument has the wrong type, or a peer has no ``remote_cluster_id``.
            ValueError: ``timeout`` or an address that was given as an integer is outside its width.
            LLMException: ``LLM_PARAM_INVALID``: ``timeout`` is 0 or less, or, in CacheManager mode, a peer has no local
                address.
        """
        native = self._check_initialized()
        refused = self._refused(clusters, links=True)
        if refused is not None:
            return refused, []
        one_local = not self._engine_options.get(LOCAL_RESOURCES)
        codes = native.link_clusters(clusters, timeout, self._enable_cache_mgr and one_local, one_local)
        return _last_failing(codes), codes

    @logged
    def unlink_clusters(
        self,
        clusters: Union[list[LLMClusterInfo], tuple[LLMClusterInfo, ...]],
        timeout: int = 3000,
        force: bool = False,
    ) -> tuple[LLMStatusCode, list[LLMStatusCode]]:
        """End links, whichever side made them, but not those of a communicator.

        Args:
            clusters: the peers. Each has a cluster id and one remote address. With ``force``, and with the transfer
                backend ``hixl``, no address is needed.
            timeout: time limit of the whole call in milliseconds (int32, above 0).
            force: whether only this side drops the links, without notifying the peers. They must do the same.

        Returns:
            ``(code, codes)`` as for ``link_clusters``. With ``force=False``, the entry of a peer that cannot be
            notified is ``LLM_UNLINK_FAILED`` (``LLM_NOTIFY_PROMPT_UNLINK_FAILED`` in KvCacheManager mode), and that of
            a peer that does not answer is ``LLM_TIMEOUT``. This side has then dropped the link. The entry of a cluster
            that is not linked is ``LLM_SUCCESS``. In KvCacheManager mode it is ``LLM_NOT_YET_LINK``, which does not
            count in ``code``, and more than 16 clusters give ``(LLM_CLUSTER_NUM_EXCEED_LIMIT, [])``.

        Raises:
            RuntimeError: not initialized.
            TypeError: an argument has the wrong type, or a peer has no ``remote_cluster_id``.
            ValueError: ``timeout`` or an address that was given as an integer is outside its width.
            LLMException: ``LLM_PARAM_INVALID``: ``timeout`` is 0 or less.
        """
        native = self._check_initialized()
        refused = self._refused(clusters, links=False)
        if refused is not None:
            return refused, []
        one_sided = BACKEND in self._engine_options
        codes = native.unlink_clusters(clusters, timeout, force, one_sided, not self._enable_cache_mgr)
        if self._enable_cache_mgr:
            return _last_failing(codes), codes
        return _last_failing(codes, LLMStatusCode.LLM_NOT_YET_LINK), codes

    @logged
    def switch_role(self, role: LLMRole, switch_options: Optional[dict[str, str]] = None) -> None:
        """Change the role and the address at which the engine listens.

        Args:
            role: the new role. In KvCacheManager mode it must differ from the current one.
            switch_options: ``llm.listenIpInfo`` is the address from now on. Without it the listener stops, except with
                the transfer backend ``hixl``.

        Raises:
            RuntimeError: not initialized.
            TypeError: an argument has the wrong type.
            ValueError: the port is not a uint16.
            LLMException: ``LLM_EXIST_LINK``: a link exists, or a communicator is ``PREPARING``;
                ``LLM_PARAM_INVALID``: the address is not of the form ``ip:port``, a key resembles an option which the
                original does not have, or, in KvCacheManager mode, the role is the current one, or
                ``PROMPT`` has no address;
                ``LLM_FEATURE_NOT_ENABLED``: another address with transfer backend ``hixl``, or, in KvCacheManager
                mode, ``init`` had no ``llm.EnableSwitchRole``; ``LLM_FAILED``: the address cannot be bound.
        """
        native = self._check_initialized()
        _core.check_isinstance("role", role, LLMRole, allow_none=False)
        _core.check_isinstance("switch_options", switch_options, dict)
        options = switch_options or {}
        init_options.check_names(options)
        listen = options.get(LISTEN, options.get(LISTEN_TOO))
        if listen is not None:
            init_options.listen_address(listen)
        if not self._enable_cache_mgr:
            self._check_switch(role, listen)
        elif BACKEND in self._engine_options:
            now = native.listening()
            raise_if_false(
                listen in (None, now, self._engine_options[LISTEN]),
                "{}={} differs from {}; {} does not allow another address",
                *(LISTEN, shown(listen), now, BACKEND),
                status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
            )
            listen = now
        native.switch_role(role, listen)
        self._role = role
        if self._kv_cache_manager is not None:
            self._kv_cache_manager._switch_role(role)  # noqa: SLF001  (its checks depend on the role)

    @logged
    def check_link_status(self, remote_cluster_id: int) -> None:
        """Check that a linked peer answers within ``sync_kv_timeout``.

        The call exists in KvCacheManager mode only, for ``LLMRole.DECODER``.

        Args:
            remote_cluster_id: cluster id of the peer (uint64).

        Raises:
            RuntimeError: not initialized.
            TypeError: ``remote_cluster_id`` is not an ``int``.
            ValueError: ``remote_cluster_id`` is outside uint64.
            LLMException: ``LLM_PARAM_INVALID``: CacheManager mode, or another role; ``LLM_NOT_YET_LINK``: there is no
                link, or it is broken; ``LLM_WAIT_PROCESS_TIMEOUT``: no answer in time.
        """
        native = self._check_initialized()
        raise_if_true(self._enable_cache_mgr, "check_link_status needs an engine without {}=1", CACHE_MANAGER)
        _core.check_uint64("remote_cluster_id", remote_cluster_id)
        raise_if_false(
            self._role == LLMRole.DECODER, "check_link_status needs {}, and the role is {}", LLMRole.DECODER, self._role
        )
        native.check_link(remote_cluster_id)

    def stats(self) -> Stats:
        """Return the counters of the engine as plain dicts.

        ``llm_datadist.stats.Stats`` documents every field. The original does not have this method.

        Raises:
            RuntimeError: not initialized.
        """
        return self._check_initialized().stats()

    def _by_rank(self, call: str) -> _core.DataDist:
        native = self._check_initialized()
        raise_if_false(self._enable_cache_mgr, "{} needs {}=1", call, CACHE_MANAGER)
        return native

    def _refused(self, clusters: object, *, links: bool) -> Optional[LLMStatusCode]:
        """Return the code of a link call that KvCacheManager mode refuses, else ``None``."""
        if self._enable_cache_mgr:
            return None
        if links and self._role != LLMRole.DECODER:
            log.error("link_clusters needs %s, and the role is %s", LLMRole.DECODER, self._role)
            return LLMStatusCode.LLM_PARAM_INVALID
        if isinstance(clusters, (list, tuple)) and len(clusters) > _MAX_CLUSTERS:
            log.error("clusters has %s entries; one call takes at most %s", len(clusters), _MAX_CLUSTERS)
            return LLMStatusCode.LLM_CLUSTER_NUM_EXCEED_LIMIT
        return None

    def _check_switch(self, role: LLMRole, listen: Optional[str]) -> None:
        """Raise if the role cannot be switched in KvCacheManager mode."""
        raise_if_false(role != self._role, "role={} is the current role", role)
        prompt = role == LLMRole.PROMPT
        raise_if_true(prompt and listen is None, "{} needs {} in switch_options", role, LISTEN)
        raise_if_false(
            self._engine_options.get("llm.EnableSwitchRole") == "1",
            "switch_role needs llm.EnableSwitchRole=1 in the options of init",
            status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED,
        )

    def _check_initialized(self) -> _core.DataDist:
        if not self._is_initialized or self._llm_datadist is None:
            raise RuntimeError(_NOT_OPEN)
        return self._llm_datadist

    @staticmethod
    def _role_to_str(role: LLMRole) -> str:
        raise_if_false(role in _ROLE_NAMES, "role={} is not a member of LLMRole", role)
        return _ROLE_NAMES[role]


def _last_failing(codes: list[LLMStatusCode], harmless: LLMStatusCode = LLMStatusCode.LLM_SUCCESS) -> LLMStatusCode:
    """Return the code of a whole call: that of the last cluster that failed."""
    if not codes:
        log.error("clusters is empty; give at least one LLMClusterInfo")
        return LLMStatusCode.LLM_PARAM_INVALID
    failing = [code for code in codes if code not in (LLMStatusCode.LLM_SUCCESS, harmless)]
    return failing[-1] if failing else LLMStatusCode.LLM_SUCCESS


def _shutdown_handler() -> None:
    """Finalize the active instance when the interpreter exits; an ``LLMException`` is only logged."""
    instance = LLMDataDist.llm_engine_instance
    if instance is None:
        return
    try:
        instance.finalize()
    except LLMException as error:
        log.warn("finalize at exit failed: %s", error)
    finally:
        LLMDataDist.llm_engine_instance = None


def _forget_parent() -> None:
    """Let a forked child begin without an initialized instance. A thread of the parent may hold the old lock."""
    process = os.getpid()
    if LLMDataDist._process != process:  # noqa: SLF001  (the state of the class)
        LLMDataDist._life = threading.RLock()  # noqa: SLF001
        LLMDataDist.llm_engine_instance = None
        LLMDataDist._process = process  # noqa: SLF001
