"""``TransferEngine``: the calls of Mooncake's class of that name."""

from __future__ import annotations

import enum
import itertools
import logging
import secrets
import threading
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    DataType,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
)
from llm_datadist.groups import GroupPart
from llm_datadist.integrations.addresses import engine_address, host_and_port, listen_address
from llm_datadist.integrations.engine_options import apply_engine_options
from llm_datadist.integrations.interrupts import cancelled_if_interrupted
from llm_datadist.integrations.transfer_engine.peers import Peers
from llm_datadist.integrations.transfer_engine.regions import MAX_ADDRESS, Region, Regions, pieces

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from llm_datadist import Cache
    from llm_datadist.events import Transfer
    from llm_datadist.integrations.transfer_engine.regions import Piece

__all__ = ["TransferEngine", "TransferNotify", "TransferOpcode"]

logger = logging.getLogger("llm_datadist.transfer_engine")

DONE, PENDING, FAILED = 1, 0, -1
_TIMEOUT_MS = 30_000
_LINK_MS = 5_000
_MAX_BATCHES = 65_536
# Calls besides batches: synchronous transfers and links. The engine refuses more calls than all of them together.
_OTHER_CALLS = 4_096


class TransferOpcode(enum.Enum):
    """The direction of a transfer, seen from this side."""

    Read = 0
    Write = 1


@dataclass(frozen=True)
class TransferNotify:
    """A message to the peer of a transfer: a name and a text."""

    name: str
    msg: str


class TransferEngine:
    """Reads and writes registered memory of peers, which are named by their session ids ``host:port``.

    A process has one engine of llm_datadist, so it has one ``TransferEngine``, and none beside a ``LLMDataDist``.

    Args:
        engine_options: attributes of ``LLMConfig`` for the engine, for example ``{"link_token_file": "/path"}``. The
            original does not have this argument.
    """

    def __init__(self, engine_options: Mapping[str, Any] | None = None) -> None:
        self._options = dict(engine_options or {})
        self._engine: LLMDataDist | None = None
        self._peers: Peers | None = None
        self._host = ""
        self._lock = threading.Lock()
        self._regions = Regions()
        self._caches: dict[int, Cache] = {}
        self._clusters: dict[str, int] = {}
        self._batches: dict[int, tuple[str, Transfer]] = {}
        self._numbers = itertools.count(1)

    def initialize(self, local_hostname: str, metadata_server: str, protocol: str, device_name: str) -> int:  # noqa: ARG002
        """Open the engine.

        Args:
            local_hostname: address at which peers reach this process: ``host``, ``host:port``, ``ipv6``, ``[ipv6]`` or
                ``[ipv6]:port``, where ``host`` is an IPv4 address or a host name. Without a port, a free one is taken;
                ``get_rpc_port`` returns it.
            metadata_server: ignored; peers ask each other, as with ``"P2PHANDSHAKE"``.
            protocol: ``"tcp"`` for TCP inside a host too; any other text leaves the choice to the engine.
            device_name: ignored.

        Returns:
            0, or -1 if the engine cannot be opened.
        """
        return self._outcome("initialize", lambda: self._open(local_hostname, protocol))

    def get_rpc_port(self) -> int:
        """Return the port at which the engine listens, or -1 before ``initialize``."""
        return int(str(self._engine.listen_ip_info).rsplit(":", 1)[1]) if self._engine is not None else FAILED

    def get_session_id(self) -> str:
        """Return the session id of this process, ``host:port`` or ``[ipv6]:port``.

        The host is that of ``initialize``. The original does not have this method.
        """
        host = f"[{self._host}]" if ":" in self._host else self._host
        return f"{host}:{self.get_rpc_port()}"

    def register_memory(self, buffer_addr: int, capacity: int, location: str = "*") -> int:  # noqa: ARG002
        """Register memory of this process, so that transfers may use it on both sides.

        Args:
            buffer_addr: the first address.
            capacity: bytes, above 0.
            location: ignored.

        Returns:
            0, or -1 if the range is invalid or meets a registered one.
        """
        return self.batch_register_memory([buffer_addr], [capacity])

    def batch_register_memory(
        self,
        buffer_addresses: Sequence[int],
        capacities: Sequence[int],
        location: str = "*",  # noqa: ARG002
    ) -> int:
        """Register several ranges, all or none.

        Args:
            buffer_addresses: the first address of each range.
            capacities: the bytes of each range.
            location: ignored.

        Returns:
            0, or -1 if a range is invalid or meets a registered one.
        """
        return self._outcome("register memory", lambda: self._register(buffer_addresses, capacities))

    def unregister_memory(self, buffer_addr: int) -> int:
        """Take a range back. Transfers that use it have ended when the call returns 0.

        Returns:
            0, or -1 if no registered range starts at the address, or a transfer used the range for longer than 30 s.
            The range then stays registered, and its memory must stay valid. Call again.
        """
        return self._outcome("unregister memory", lambda: self._unregister(buffer_addr))

    def batch_unregister_memory(self, buffer_addresses: Sequence[int]) -> int:
        """Take several ranges back.

        Returns:
            0, or -1 if one of them fails. The others are taken back all the same.
        """
        return min((self.unregister_memory(address) for address in buffer_addresses), default=0)

    def transfer_sync_read(self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int) -> int:
        """Read from a peer, as ``batch_transfer_sync`` with one range."""
        return self.batch_transfer_sync_read(target_hostname, [buffer], [peer_buffer_address], [length])

    def transfer_sync_write(self, target_hostname: str, buffer: int, peer_buffer_address: int, length: int) -> int:
        """Write to a peer, as ``batch_transfer_sync`` with one range."""
        return self.batch_transfer_sync_write(target_hostname, [buffer], [peer_buffer_address], [length])

    def batch_transfer_sync_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
    ) -> int:
        """Read from a peer, as ``batch_transfer_sync``."""
        ranges = (buffers, peer_buffer_addresses, lengths)
        return self.batch_transfer_sync(target_hostname, *ranges, TransferOpcode.Read)

    def batch_transfer_sync_write(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
    ) -> int:
        """Write to a peer, as ``batch_transfer_sync``."""
        ranges = (buffers, peer_buffer_addresses, lengths)
        return self.batch_transfer_sync(target_hostname, *ranges, TransferOpcode.Write)

    def batch_transfer_sync(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: TransferOpcode,
        notify: TransferNotify | None = None,
    ) -> int:
        """Move ranges between this process and a peer, and wait until all bytes are in place.

        Ctrl-C cancels the transfer. ``KeyboardInterrupt`` is raised when nothing touches the ranges any more.

        Args:
            target_hostname: the session id of the peer, ``host:port`` or ``[ipv6]:port``.
            buffers: the first address of each range here. Each range lies in one registered range.
            peer_buffer_addresses: the first address of each range at the peer.
            lengths: the bytes of each range.
            opcode: whether to read from the peer or to write to it.
            notify: a message for the peer, sent when the bytes are in place.

        Returns:
            0, or -1 if anything failed. The contents of the destination are undefined then.
        """

        def moved() -> None:
            ranges = (buffers, peer_buffer_addresses, lengths)
            try:
                _finish(self._start(target_hostname, ranges, opcode))
            except LLMException as error:
                if not self._forgotten(target_hostname, error):
                    raise
                _finish(self._start(target_hostname, ranges, opcode))
            if notify is not None:
                self._opened().notify(self._clusters[target_hostname], notify.name, notify.msg)

        return self._outcome(f"{opcode.name.lower()} at {target_hostname}", moved)

    def batch_transfer_async_read(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
    ) -> int:
        """Start to read from a peer, as ``batch_transfer_async``."""
        ranges = (buffers, peer_buffer_addresses, lengths)
        return self.batch_transfer_async(target_hostname, *ranges, TransferOpcode.Read)

    def batch_transfer_async_write(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
    ) -> int:
        """Start to write to a peer, as ``batch_transfer_async``."""
        ranges = (buffers, peer_buffer_addresses, lengths)
        return self.batch_transfer_async(target_hostname, *ranges, TransferOpcode.Write)

    def batch_transfer_async(
        self,
        target_hostname: str,
        buffers: Sequence[int],
        peer_buffer_addresses: Sequence[int],
        lengths: Sequence[int],
        opcode: TransferOpcode,
    ) -> int:
        """Start to move ranges between this process and a peer.

        The first transfer with a peer links to it and asks for its regions before the call returns.

        Args:
            target_hostname: the session id of the peer.
            buffers: as for ``batch_transfer_sync``.
            peer_buffer_addresses: as for ``batch_transfer_sync``.
            lengths: as for ``batch_transfer_sync``.
            opcode: as for ``batch_transfer_sync``.

        Returns:
            The number of the batch, above 0, for ``transfer_check_status``; or -1 if it was not started. At most 65,536
            batches run or have a status that nobody has asked for.
        """
        started: list[int] = []

        def start() -> None:
            if len(self._batches) >= _MAX_BATCHES:
                raise RuntimeError(
                    f"{_MAX_BATCHES} batches run or have a status that nobody has asked for, which is the limit; "
                    "get_batch_transfer_status and transfer_check_status forget those that have ended"
                )
            transfer = self._start(target_hostname, (buffers, peer_buffer_addresses, lengths), opcode)
            with cancelled_if_interrupted([transfer], logger), self._lock:
                started.append(next(self._numbers))
                self._batches[started[0]] = (target_hostname, transfer)

        outcome = self._outcome(f"{opcode.name.lower()} at {target_hostname}", start)
        return started[0] if outcome == 0 else FAILED

    def transfer_check_status(self, batch_id: int) -> int:
        """Ask whether a batch has ended. Its number is forgotten once it has.

        Returns:
            1 if all bytes are in place, 0 while it runs, or -1 if it failed or there is no such batch.
        """
        with self._lock:
            batch = self._batches.get(batch_id)
            if batch is not None and not batch[1].done():
                return PENDING
        return FAILED if self.get_batch_transfer_status([batch_id]) else DONE

    def get_batch_transfer_status(self, batch_ids: Sequence[int]) -> int:
        """Wait until all batches have ended. Their numbers are forgotten.

        Ctrl-C cancels all of these batches. ``KeyboardInterrupt`` is raised when nothing touches their ranges any more.

        Returns:
            0, or -1 if one of them failed or does not exist.
        """
        numbers = list(batch_ids)
        with self._lock:
            transfers = [batch[1] for batch in map(self._batches.get, numbers) if batch is not None]
        with cancelled_if_interrupted(transfers, logger):
            outcomes = [self._outcome(f"batch {number}", partial(self._ended, number)) for number in numbers]
        return min(outcomes, default=0)

    def send_probe(self, peer_server_name: str) -> int:
        """Return 0 if a peer can be reached, and -1 otherwise."""
        return self._outcome(
            f"probe of {peer_server_name}", lambda: self._cluster_of(peer_server_name, "peer_server_name")
        )

    def get_notifies(self) -> list[TransferNotify]:
        """Return the messages that peers have sent with their transfers, and forget them. At most 65,536 are kept."""
        peers = self._peers
        return [] if peers is None else [TransferNotify(*pair) for pair in peers.take_notifies()]

    def close(self) -> None:
        """Close the engine. Running transfers fail, and no memory is registered any more.

        The original closes with the object.
        """
        engine, peers, self._engine, self._peers = self._engine, self._peers, None, None
        try:
            if peers is not None:
                peers.close()
        finally:
            if engine is not None:
                engine.finalize()
            with self._lock:
                self._regions, self._caches, self._clusters = Regions(), {}, {}

    def _open(self, local_hostname: str, protocol: str) -> None:
        if self._engine is not None:
            raise ValueError("initialize was called before: call close first")
        host, port = host_and_port("local_hostname", local_hostname)
        config = LLMConfig()
        config.enable_cache_manager = True
        config.enable_remote_cache_accessible = True  # peers write
        config.listen_ip_info = listen_address("local_hostname", host, port or 0, logger)
        config.sync_kv_timeout = _TIMEOUT_MS
        config.max_transfers = _MAX_BATCHES + _OTHER_CALLS
        if protocol == "tcp":
            config.link_transport = "tcp"
        apply_engine_options(config, self._options)
        engine = LLMDataDist(LLMRole.MIX, secrets.randbits(63))
        try:
            engine.init(config.generate_options())
            peers = Peers(engine, lambda: self._regions)
        except BaseException:
            engine.finalize()  # an engine that stays open would make every later attempt fail
            raise
        self._engine, self._peers, self._host = engine, peers, host

    def _register(self, addresses: Sequence[int], lengths: Sequence[int]) -> None:
        if len(addresses) != len(lengths):
            raise ValueError(f"{len(addresses)} addresses and {len(lengths)} lengths")
        _check_numbers("buffer_addresses", addresses, least=1)
        _check_numbers("capacities", lengths, least=1, limit=63)
        for at, (address, length) in enumerate(zip(addresses, lengths)):
            if address + length > MAX_ADDRESS:
                raise ValueError(f"buffer_addresses[{at}]={address} and capacities[{at}]={length} end above 2^64")
        with self._lock:
            engine, regions = self._opened_engine(), self._regions
            made: list[tuple[Region, Cache]] = []
            try:
                for address, length in zip(addresses, lengths):
                    made.append(self._register_one(engine, regions, address, length))
                    regions = regions.with_region(made[-1][0])
            except BaseException:
                for region, cache in made:
                    self._take_back(engine, region, cache)
                raise
            self._caches.update((region.number, cache) for region, cache in made)
            self._regions = regions

    def _register_one(self, engine: LLMDataDist, regions: Regions, address: int, length: int) -> tuple[Region, Cache]:
        if regions.meets(address, length):
            raise ValueError(f"{length} bytes at {address:#x} meet a registered range")
        region = Region(address, length, next(self._numbers))
        key = BlocksCacheKey(engine.cluster_id, region.number)
        desc = CacheDesc(1, [1, length], DataType.DT_UINT8)
        return region, engine.cache_manager.register_blocks_cache(desc, [address], key, True)

    def _take_back(self, engine: LLMDataDist, region: Region, cache: Cache) -> None:
        """Unregister a range of a list that was refused. If that fails, the range is known, so it can be repeated."""
        try:
            engine.cache_manager.unregister_cache(cache.cache_id)
        except LLMException as error:
            logger.error("%d bytes at %#x stay registered: %s", region.length, region.address, error)  # noqa: TRY400
            self._caches[region.number] = cache
            self._regions = self._regions.with_region(region)

    def _unregister(self, address: int) -> None:
        with self._lock:
            engine, region = self._opened_engine(), self._regions.holding(address, 1)
            if region is None or region.address != address:
                raise LookupError(f"no registered range starts at {address:#x}")
            cache = self._caches[region.number]
        # Without the lock, because this waits for transfers. If it fails, the range stays known, for the next attempt.
        engine.cache_manager.unregister_cache(cache.cache_id)
        with self._lock:
            if self._caches.pop(region.number, None) is None:
                raise LookupError(f"another thread has unregistered the range at {address:#x}")
            self._regions = self._regions.without(region.number)

    def _ended(self, number: int) -> None:
        """Wait for a batch, and forget its number."""
        with self._lock:
            batch = self._batches.get(number)
        if batch is None:
            raise LookupError("there is no such batch")
        session, transfer = batch
        failure = transfer.exception()
        with self._lock:
            if self._batches.pop(number, None) is None:
                raise LookupError("another thread has read the status of this batch, which forgets it")
        self._forgotten(session, failure)
        if failure is not None:
            raise failure

    def _start(
        self,
        session: str,
        ranges: tuple[Sequence[int], Sequence[int], Sequence[int]],
        opcode: TransferOpcode,
    ) -> Transfer:
        for name, numbers, least in zip(("buffers", "peer_buffer_addresses", "lengths"), ranges, (0, 0, 1)):
            _check_numbers(name, numbers, least=least)
        cluster = self._cluster_of(session)
        parts = [self._part(cluster, piece, opcode) for piece in self._pieces(cluster, ranges)]
        if not parts:
            raise ValueError("no ranges")
        manager = self._opened_engine().cache_manager
        start = manager.pull_group_async if opcode is TransferOpcode.Read else manager.push_group_async
        return start(parts)

    def _pieces(self, cluster: int, ranges: tuple[Sequence[int], Sequence[int], Sequence[int]]) -> list[Piece]:
        peers, limit_s = self._opened(), _TIMEOUT_MS / 1000
        try:
            return pieces(self._regions, peers.regions(cluster, limit_s), *ranges)
        except LookupError:
            # The peer may have registered the memory since it was asked.
            return pieces(self._regions, peers.regions(cluster, limit_s, anew=True), *ranges)

    def _forgotten(self, session: str, error: BaseException | None) -> bool:
        """If a transfer failed because the peer has taken a region back, forget its regions, and return ``True``."""
        gone = isinstance(error, LLMException) and error.status_code == LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
        if gone and session in self._clusters:
            self._opened().forget(self._clusters[session])
        return gone

    def _part(self, cluster: int, piece: Piece, opcode: TransferOpcode) -> GroupPart:
        offsets = (piece.remote_offset, piece.local_offset)
        src, dst = offsets if opcode is TransferOpcode.Read else reversed(offsets)
        key = BlocksCacheKey(cluster, piece.remote.number)
        cache = self._caches[piece.local.number]
        return GroupPart(key, cache, [0], [0], src_offset=src, dst_offset=dst, length=piece.length)

    def _cluster_of(self, session: str, name: str = "target_hostname") -> int:
        """Return the cluster of a peer, and link to it unless there is a link."""
        engine, known = self._opened_engine(), self._clusters.get(session)
        if known is not None and any(peer.cluster_id == known for peer in engine.peers()):
            return known
        host, port = host_and_port(name, session)
        if port is None:
            raise ValueError(f"{name}={session!r} has no port: give host:port or [ipv6]:port")
        found = engine.ensure_link(engine_address(name, host, port), timeout_ms=_LINK_MS).result()
        if found is None:
            raise RuntimeError(f"no peer at {session}")
        self._clusters[session] = found.cluster_id
        return found.cluster_id

    def _opened_engine(self) -> LLMDataDist:
        if self._engine is None:
            raise ValueError("call initialize first")
        return self._engine

    def _opened(self) -> Peers:
        if self._peers is None:
            raise ValueError("call initialize first")
        return self._peers

    def _outcome(self, what: str, action: Callable[[], Any]) -> int:
        """Run an action, and return 0, or -1 with a line in the log."""
        try:
            action()
        except (LLMException, LookupError, OSError, RuntimeError, TypeError, ValueError) as error:
            logger.error("%s: %s", what, error)  # noqa: TRY400 - the caller's mistakes need no traceback
            return FAILED
        return 0


def _check_numbers(name: str, numbers: Sequence[int], *, least: int, limit: int = 64) -> None:
    """Refuse entries that are no integers from ``least`` (0 or 1) to ``2**limit - 1``, by the name of the argument."""
    for at, number in enumerate(numbers):
        if not isinstance(number, int) or isinstance(number, bool):
            kind = type(number)
            named = kind.__qualname__ if kind.__module__ == "builtins" else f"{kind.__module__}.{kind.__qualname__}"
            advice = "; convert it with int()" if hasattr(kind, "__index__") and kind is not bool else ""
            raise TypeError(f"{name}[{at}] is {named}, not int{advice}")
        if number < least:
            raise ValueError(f"{name}[{at}]={number} must be {'above 0' if least else '0 or above'}")
        if number >= 1 << limit:
            raise ValueError(f"{name}[{at}]={number} must be below 2^{limit}")


def _finish(transfer: Transfer) -> None:
    """Wait for a transfer, and raise its failure."""
    with cancelled_if_interrupted([transfer], logger):
        transfer.result()
