"""One memory arena that peers read by offsets, and readers of the arenas of peers. Nothing here needs LMCache."""

from __future__ import annotations

import itertools
import logging
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

from llm_datadist.integrations.addresses import engine_address, host_and_port, listen_address
from llm_datadist.native import Engine, Error

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llm_datadist.native import Peer, Transfer

__all__ = ["Arena", "ArenaReader", "address_of"]

logger = logging.getLogger("llm_datadist.lmcache")

_CACHE = "l1"
_MAX_TASKS = 65_536
# Transfers besides reads: links. The engine refuses more transfers than all of them together.
_OTHER_TRANSFERS = 4_096
_RELINK_S = 1.0
_CLOSE_S = 30.0
# At most one line about failed reads of a peer in this time, because every read of a dead peer fails.
_QUIET_S = 1.0
Range = tuple[int, int]


def address_of(url: str) -> str:
    """Return the address for the engine of a URL with or without a scheme. A host name is looked up.

    Raises:
        ValueError: the URL is invalid, or the host cannot be looked up.
    """
    return engine_address("url", *_host_and_port(url))


def _host_and_port(url: str) -> tuple[str, int]:
    return host_and_port("url", url.split("://", 1)[-1])


class Arena:
    """The memory of this process that peers read, and the engine that serves them.

    Args:
        listen_url: where peers reach this process, ``host:port`` or ``[ipv6]:port``; port 0 takes a free one.
        pointer: the first address of the arena.
        size: its bytes.
        engine_options: keyword arguments of ``Engine``, except ``listen``.

    Raises:
        TypeError: an option that does not exist.
        ValueError: an invalid URL, or an invalid value of an option.
        Error: the engine cannot be opened, for example because the address is in use.
    """

    def __init__(self, listen_url: str, pointer: int, size: int, engine_options: Mapping[str, Any]) -> None:
        listen = listen_address("url", *_host_and_port(listen_url), logger)
        self.size = size
        self._engine = Engine(listen=listen, **{"max_transfers": _MAX_TASKS + _OTHER_TRANSFERS, **engine_options})
        try:
            self._cache = self._engine.register(_CACHE, [pointer], blocks=1, shape=(size,), dtype="uint8")
        except BaseException:
            self._engine.close()  # otherwise it would keep the port
            raise

    @property
    def address(self) -> str:
        """Where the engine listens, ``ip:port``."""
        return str(self._engine.address)

    def link(self, url: str, timeout: float) -> Peer:
        """Link to the arena of a peer within ``timeout`` seconds, unless there is a link.

        Raises:
            Error: as the outcome of ``Engine.link``.
        """
        return self._engine.link(address_of(url), timeout=timeout).result()

    def read(self, peer: Peer, local: Sequence[Range], remote: Sequence[Range], timeout: float) -> Transfer[None]:
        """Start to read ranges of a peer's arena into ranges of this one. A range is ``(offset, size)``.

        Raises:
            ValueError: the lists differ in length, or a pair in size, or a range leaves the arena.
            Error: as for ``Engine.pull``.
        """
        if len(local) != len(remote) or not local:
            raise ValueError(
                f"{len(local)} local and {len(remote)} remote ranges must be equally many, and at least one"
            )
        here, there = self._cache[0], peer[_CACHE][0]
        pairs = []
        for (offset, size), (peer_offset, peer_size) in zip(local, remote):
            if size != peer_size or not 0 <= offset <= offset + size <= self.size or size <= 0 or peer_offset < 0:
                raise ValueError(f"ranges {(offset, size)} and {(peer_offset, peer_size)} do not fit {self.size} bytes")
            to, of = (offset, offset + size), (peer_offset, peer_offset + size)
            pairs.append((here.part(bytes=to), there.part(bytes=of)))
        return self._engine.pull(pairs, timeout=timeout)

    def close(self) -> None:
        """Close the engine. Reads that run fail."""
        self._engine.close()


class ArenaReader:
    """Reads the arena of one peer. The log (logger ``llm_datadist.lmcache``) says why a read failed.

    Args:
        arena: the arena of this process.
        url: where the peer listens.
        timeout: time limit of linking and of each read, in seconds.

    Raises:
        Error: as for ``Arena.link``.
    """

    def __init__(self, arena: Arena, url: str, timeout: float) -> None:
        self._arena = arena
        self._url = url
        self._timeout = timeout
        self._lock = threading.Lock()
        self._numbers = itertools.count(1)
        self._tasks: dict[int, tuple[Transfer[None] | None, Sequence[Range]]] = {}
        self._quiet_until = 0.0
        self._left_out = 0
        self._peer = arena.link(url, timeout)

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
            if not self._peer.alive:
                self._peer = self._arena.link(self._url, _RELINK_S)
            transfer: Transfer[None] | None = self._arena.read(self._peer, local, remote, self._timeout)
        except Error as error:
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
        arrived = False
        if transfer is not None:
            try:
                transfer.result()
                arrived = True
            except Error as error:
                self._log(remote, error)
        # After a failure, no range of the read is known to be complete.
        return [arrived] * len(remote)

    def close(self) -> None:
        """Cancel the reads that run, and wait until nothing of them writes to the arena any more, at most 30 s.

        Ctrl-C does not shorten the wait: ``KeyboardInterrupt`` is raised after it. A second one ends it.
        """
        with self._lock:
            tasks, self._tasks = self._tasks, {}
            left_out, self._left_out = self._left_out, 0
        if left_out:
            logger.warning("%d more reads of the peer at %s failed", left_out, self._url)
        transfers = [transfer for transfer, _ in tasks.values() if transfer is not None]
        for transfer in transfers:
            transfer.cancel()
        end = time.monotonic() + _CLOSE_S
        try:
            _wait(transfers, end)
        except BaseException:
            _wait(transfers, end)
            raise
        finally:
            running = sum(not transfer.done() for transfer in transfers)
            if running:
                text = "%d cancelled reads still use their memory: close the engine before you free it"
                logger.error(text, running)

    def _log(self, remote: Sequence[Range], reason: Error) -> None:
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


def _wait(transfers: Sequence[Transfer[None]], end: float) -> None:
    """Wait until transfers have ended, whatever their outcome, at most until a time of ``time.monotonic``."""
    for transfer in transfers:
        with suppress(Error, TimeoutError):
            transfer.result(max(0.0, end - time.monotonic()))
