"""One memory arena that peers read by offsets, and readers of the arenas of peers. Nothing here needs LMCache."""

from __future__ import annotations

import itertools
import logging
import secrets
import threading
import time
from typing import TYPE_CHECKING, Any

from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMConfig, LLMDataDist, LLMException, LLMRole
from llm_datadist.groups import GroupPart
from llm_datadist.integrations.addresses import engine_address, host_and_port, listen_address
from llm_datadist.integrations.engine_options import apply_engine_options
from llm_datadist.integrations.interrupts import cancelled_if_interrupted

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llm_datadist.events import Transfer

__all__ = ["Arena", "ArenaReader", "address_of"]

logger = logging.getLogger("llm_datadist.lmcache")

_MODEL = 0
_MAX_TASKS = 65_536
# Calls besides reads: links. The engine refuses more calls than all of them together.
_OTHER_CALLS = 4_096
_RELINK_MS = 1000
# At most one line about failed reads of a peer in this time, because every read of a dead peer fails.
_QUIET_S = 1.0
Range = tuple[int, int]


def address_of(url: str) -> str:
    """Return the address for the engine of a URL with or without a scheme. A host name is looked up.

    Raises:
        ValueError: there is no port, or the host cannot be looked up.
    """
    return engine_address("url", *_host_and_port(url))


def _host_and_port(url: str) -> tuple[str, int]:
    host, port = host_and_port("url", url.split("://", 1)[-1])
    if port is None:
        raise ValueError(f"url={url!r} has no port: give host:port or [ipv6]:port")
    return host, port


class Arena:
    """The memory of this process that peers read, and the engine that serves them.

    Args:
        listen_url: where peers reach this process, ``host:port`` or ``[ipv6]:port``; port 0 takes a free one.
        pointer: the first address of the arena.
        size: its bytes.
        engine_options: attributes of ``LLMConfig`` for the engine.

    Raises:
        ValueError: an invalid URL, or an option that does not exist.
        LLMException: the engine cannot be opened; for example, the process has one already.
    """

    def __init__(self, listen_url: str, pointer: int, size: int, engine_options: Mapping[str, Any]) -> None:
        config = LLMConfig()
        config.enable_cache_manager = True
        config.listen_ip_info = listen_address("url", *_host_and_port(listen_url), logger)
        config.max_transfers = _MAX_TASKS + _OTHER_CALLS
        apply_engine_options(config, engine_options)
        self.size = size
        self._engine = LLMDataDist(LLMRole.MIX, secrets.randbits(63))
        try:
            self._engine.init(config.generate_options())
            desc = CacheDesc(1, [1, size], DataType.DT_UINT8)
            key = BlocksCacheKey(self._engine.cluster_id, _MODEL)
            self._cache = self._engine.cache_manager.register_blocks_cache(desc, [pointer], key, True)
        except BaseException:
            self._engine.finalize()  # an engine that stays open would make every later attempt fail
            raise

    @property
    def address(self) -> str:
        """Where the engine listens, ``ip:port``."""
        return str(self._engine.listen_ip_info)

    def link(self, url: str, timeout_ms: int) -> int:
        """Link to the arena of a peer, and return its cluster.

        Raises:
            LLMException: as for ``ensure_link``.
        """
        peer = self._engine.ensure_link(address_of(url), timeout_ms=timeout_ms).result()
        if peer is None:
            raise RuntimeError(f"no peer at {url}")
        return peer.cluster_id

    def is_linked(self, cluster: int) -> bool:
        """Whether there is a link to a cluster."""
        return any(peer.cluster_id == cluster for peer in self._engine.peers())

    def read(self, cluster: int, local: Sequence[Range], remote: Sequence[Range], timeout_ms: int) -> Transfer:
        """Start to read ranges of a peer's arena into ranges of this one. A range is ``(offset, size)``.

        Raises:
            ValueError: the lists differ in length, or a pair in size, or a range leaves the arena.
            LLMException: as for ``pull_group_async``.
        """
        if len(local) != len(remote) or not local:
            raise ValueError(
                f"{len(local)} local and {len(remote)} remote ranges must be equally many, and at least one"
            )
        key = BlocksCacheKey(cluster, _MODEL)
        parts = []
        for (offset, size), (peer_offset, peer_size) in zip(local, remote):
            if size != peer_size or not 0 <= offset <= offset + size <= self.size or size <= 0:
                raise ValueError(f"ranges {(offset, size)} and {(peer_offset, peer_size)} do not fit {self.size} bytes")
            parts.append(GroupPart(key, self._cache, [0], [0], src_offset=peer_offset, dst_offset=offset, length=size))
        return self._engine.cache_manager.pull_group_async(parts, timeout_ms=timeout_ms)

    def close(self) -> None:
        """Close the engine. Reads that run fail."""
        self._engine.finalize()


class ArenaReader:
    """Reads the arena of one peer. The log (logger ``llm_datadist.lmcache``) says why a read failed.

    Args:
        arena: the arena of this process.
        url: where the peer listens.
        timeout_ms: time limit of linking and of each read, in milliseconds.

    Raises:
        LLMException: as for ``ensure_link``.
    """

    def __init__(self, arena: Arena, url: str, timeout_ms: int) -> None:
        self._arena = arena
        self._url = url
        self._timeout_ms = timeout_ms
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._tasks: dict[int, tuple[Transfer | None, Sequence[Range]]] = {}
        self._quiet_until = 0.0
        self._left_out = 0
        self._cluster = arena.link(url, timeout_ms)

    def submit(self, local: Sequence[Range], remote: Sequence[Range]) -> int:
        """Start a read, and return its number. A peer that cannot be reached is the outcome of the read, and logged.

        If the link has broken, for example because the peer was restarted, the call first links again, within 1 s.

        Raises:
            ValueError: as for ``Arena.read``, or too many reads whose outcome nobody has asked for.
        """
        with self._lock:
            if len(self._tasks) >= _MAX_TASKS:
                raise ValueError(f"{_MAX_TASKS} reads whose outcome nobody has asked for")
        try:
            if not self._arena.is_linked(self._cluster):
                self._cluster = self._arena.link(self._url, _RELINK_MS)
            transfer: Transfer | None = self._arena.read(self._cluster, local, remote, self._timeout_ms)
        except LLMException as error:
            transfer = None
            self._log(remote, error)
        with self._lock:
            number = next(self._numbers)
            self._tasks[number] = (transfer, remote)
        return number

    def outcome(self, number: int) -> list[bool] | None:
        """Return which ranges of a read are in place, or ``None`` while it runs. Ended reads are forgotten.

        Why a read failed is in the log.

        Raises:
            KeyError: there is no such read.
        """
        with self._lock:
            transfer, remote = self._tasks[number]
            if transfer is not None and not transfer.done():
                return None
            del self._tasks[number]
        failure = None if transfer is None else transfer.exception()
        if failure is not None:
            self._log(remote, failure)
        # After a failure, no range of the group is known to be complete.
        return [transfer is not None and failure is None] * len(remote)

    def close(self) -> None:
        """Cancel the reads that run, and wait until nothing of them writes to the arena any more."""
        with self._lock:
            tasks, self._tasks = self._tasks, {}
            left_out, self._left_out = self._left_out, 0
        if left_out:
            logger.warning("%d more reads of the peer at %s failed", left_out, self._url)
        transfers = [transfer for transfer, _ in tasks.values() if transfer is not None]
        for transfer in transfers:
            transfer.cancel()
        with cancelled_if_interrupted(transfers, logger):
            for transfer in transfers:
                transfer.exception()

    def _log(self, remote: Sequence[Range], reason: LLMException) -> None:
        """Log that a read failed, unless another line about this peer is less than a second old."""
        now = time.monotonic()
        with self._lock:
            if now < self._quiet_until:
                self._left_out += 1
                return
            self._quiet_until = now + _QUIET_S
            left_out, self._left_out = self._left_out, 0
        earlier = f" ({left_out} more reads failed since the last such line)" if left_out else ""
        what = f"{len(remote)} ranges, {sum(size for _, size in remote)} bytes"
        if remote:
            what += f", the first at offset {remote[0][0]}"
        logger.warning("a read of the peer at %s failed: %s: %s%s", self._url, what, reason, earlier)
