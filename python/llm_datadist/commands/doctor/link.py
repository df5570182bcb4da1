"""Measures the link to another machine, one path after the other, and serves such measurements on that machine.

Each choice of options opens an engine, links, measures and closes it. Pulls write into the pool of this engine, and
pushes into that of the peer: registered memory is only read.
"""

from __future__ import annotations

import ctypes
import mmap
import os
import select
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Optional

from llm_datadist.commands.doctor import devices
from llm_datadist.commands.output import percentiles, write
from llm_datadist.native import Engine, Error, InvalidArgument, PeerDown, PeerLost, PeerUp

if TYPE_CHECKING:
    from collections.abc import Iterable

    from llm_datadist.native import Cache, Event, Peer

BLOCK_BYTES, BLOCKS = 16 * 1024, 1024
CACHE_BYTES = BLOCK_BYTES * BLOCKS
POOL, REGISTERED = "pool", "registered"
"""Names of the two caches of each end, and of their memory."""
DEFAULT, DEFAULT_REGISTERED, TCP, UCX = "default", "default, registered memory", "TCP", "UCX"
LINK_LIMIT_S, CALL_LIMIT_S = 3.0, 10.0

METADATA = b"llm-datadist doctor 1"
"""What an engine of this command says to its peers; the number changes with the caches."""

_START = "start `llm-datadist doctor --serve` there, and give its address"
_FILL = 0x5A
_LONGEST_WAIT_S = 1.0
_MAX_SAMPLES = 20_000
_FIRST_BLOCKS, _GROWTH = 4, 4
_ROWS = 4


class MeasureError(Exception):
    """The peer cannot be measured. `invalid` says whether an option of the command is wrong."""

    def __init__(self, text: str, *, invalid: bool = False) -> None:
        super().__init__(text)
        self.invalid = invalid


@dataclass
class Row:
    """What was measured on one path. Times are in microseconds, and a GB has 10^9 bytes."""

    name: str  # the choice of options, and the memory that was read
    transport: str = ""  # how the link carries messages, as `stats()` names it
    moved_by: dict[str, list[str]] = field(default_factory=dict)  # paths of the bytes, and their rules, as in `stats()`
    pull_us: Optional[tuple[float, float]] = None  # median and 99th percentile of pulls of one block of 16 KiB
    pull_gb_s: Optional[float] = None  # rate of large pulls
    push_gb_s: Optional[float] = None  # rate of large pushes
    call_bytes: Optional[tuple[int, int]] = None  # bytes of one large pull and of one large push
    unusable: Optional[str] = None  # why the path cannot be used
    not_faster: Optional[str] = None  # why no faster path was used


def serve(options: dict[str, Any], seconds: float | None) -> None:
    """Serve measurements for this time, or until KeyboardInterrupt. Raises Error if the engine fails."""
    until = time.monotonic() + (float("inf") if seconds is None else seconds)
    with _opened(options) as engine:
        _allocate(engine)
        write(f"doctor: serving at {engine.address}; measure from the other machine with")
        write(f"doctor:   llm-datadist doctor --to HOST:{str(engine.address).rpartition(':')[2]}")
        while (left := until - time.monotonic()) > 0:
            for event in _events(engine, min(left, _LONGEST_WAIT_S)):
                if isinstance(event, (PeerUp, PeerDown)):
                    write(f"doctor: {event.peer.address}: {'linked' if isinstance(event, PeerUp) else 'ended'}")


def measure(address: str, seconds: float, given: dict[str, Any]) -> list[Row]:
    """Measure all paths to the peer.

    Args:
        address: ``ip:port`` of the peer.
        seconds: time for all paths together, without the time to open engines and to link.
        given: options of every engine.

    Raises:
        MeasureError: the default path cannot be used.
    """
    limit_s = seconds / _ROWS
    rows = _measured(address, given, {DEFAULT: POOL, DEFAULT_REGISTERED: REGISTERED}, limit_s)
    # UCX is not used with peers that share memory, so these links must not look for shared memory. A backend needs a
    # listener.
    over = {**given, "transport": "tcp", "listen": "127.0.0.1:0"}
    if (rows[0].transport, list(rows[0].moved_by)) != ("tcp", ["sockets"]):  # otherwise it would be measured twice
        rows += _optional(address, {**over, "backend": "sockets"}, TCP, limit_s)
    reason = None if "UCX_TLS" in os.environ else devices.no_rdma(Path("/"))  # the variable may allow other transports
    if reason is not None:
        return [*rows, Row(UCX, unusable=reason)]
    return rows + _optional(address, {**over, "backend": "ucx"}, UCX, limit_s)


def _opened(options: dict[str, Any]) -> Engine:
    return Engine(pool=2 * CACHE_BYTES, metadata=METADATA, timeout=CALL_LIMIT_S, **options)


def _allocate(engine: Engine) -> dict[str, Cache]:
    """Make two caches of the same shape: one in the pool, one in memory that this process registers."""
    memory = memoryview(mmap.mmap(-1, CACHE_BYTES)).cast("B", (BLOCKS, BLOCK_BYTES))
    pooled = engine.allocate(POOL, blocks=BLOCKS, tensors=1, shape=(BLOCK_BYTES,), dtype="uint8")
    caches = {POOL: pooled, REGISTERED: engine.register(REGISTERED, [memory])}
    for cache in caches.values():
        # Untouched memory has no pages, and would be measured as faster than it is.
        ctypes.memset(cache.tensors[0].address, _FILL, CACHE_BYTES)
    return caches


def _events(engine: Engine, limit_s: float) -> Iterable[Event]:
    select.select([engine], [], [], limit_s)
    return engine.events()


def _optional(address: str, options: dict[str, Any], name: str, limit_s: float) -> list[Row]:
    """Measure a path that may be unusable."""
    try:
        return _measured(address, options, {name: POOL}, limit_s)
    except MeasureError as error:
        return [Row(name, unusable=str(error))]


def _measured(address: str, options: dict[str, Any], parts: dict[str, str], limit_s: float) -> list[Row]:
    """Open an engine, link, and measure these parts: the name of a row, and the cache that it reads."""
    try:
        opened = _opened(options)
    except Error as error:
        invalid = isinstance(error, InvalidArgument)
        raise MeasureError(f"this engine cannot be opened: {shown(error)}", invalid=invalid) from error
    with opened as engine:
        try:
            peer = engine.link(address, timeout=LINK_LIMIT_S).result()
        except Error as error:
            # The peer refuses engines like this one: it is an ``LLMDataDist`` that is not remote-accessible.
            refused = isinstance(error, InvalidArgument)
            hint = f"; {_START}" if refused and error.argument is None else ""
            invalid = refused and error.argument is not None
            raise MeasureError(f"cannot link to {address}: {shown(error)}{hint}", invalid=invalid) from error
        if peer.metadata != METADATA:
            raise MeasureError(f"cannot measure {address}: another program, or another version of this one; {_START}")
        try:
            caches = _allocate(engine)
            return [Measurement(engine, peer, caches, memory).row(name, limit_s) for name, memory in parts.items()]
        except Error as error:
            raise MeasureError(f"the measurement of {address} failed: {shown(error)}") from error


def shown(error: Error) -> str:
    """Return an error of the engine as text."""
    return f"{type(error).__name__}: {error}"


class Measurement:
    """Measures one link with the caches of one kind of memory."""

    def __init__(self, engine: Engine, peer: Peer, caches: dict[str, Cache], memory: str) -> None:
        self._engine, self._peer, self._caches, self._memory = engine, peer, caches, memory

    def row(self, name: str, limit_s: float) -> Row:
        """Measure for this time."""
        before = self._link()["paths"]
        self._pull(_FIRST_BLOCKS, verify="full")
        phase_s = limit_s / 3
        pull_bytes, pull_gb_s = rate(self._pull, phase_s)
        push_bytes, push_gb_s = rate(self._push, phase_s)
        pull_us = percentiles(samples_us(lambda: self._pull(1), phase_s))
        link = self._link()
        rules = ((path, now["rules"].items() - before[path]["rules"].items()) for path, now in link["paths"].items())
        moved_by = {path: sorted(rule for rule, _ in applied) for path, applied in rules if applied}
        not_faster = _not_faster(moved_by, link) if name in (DEFAULT, DEFAULT_REGISTERED) else None
        call_bytes = (pull_bytes, push_bytes)
        return Row(name, link["transport"], moved_by, pull_us, pull_gb_s, push_gb_s, call_bytes, not_faster=not_faster)

    def _link(self) -> Any:
        for link in self._engine.stats()["links"]:
            if link["cluster"] == self._peer.incarnation:
                return link
        raise PeerLost("the link has ended", code="not_linked")

    def _pull(self, blocks: int, verify: Any = None) -> None:
        remote = self._peer[self._memory]
        self._engine.pull(self._caches[POOL][:blocks], remote[:blocks], verify=verify).result()

    def _push(self, blocks: int) -> None:
        self._engine.push(self._peer[POOL][:blocks], self._caches[self._memory][:blocks]).result()


def _not_faster(moved_by: Iterable[str], link: Any) -> str | None:
    if {"mapped", "fabric"} & set(moved_by):
        return None
    return link["refusal"] or link["sockets_reason"] or "only pools can be mapped: allocate caches from a pool"


def samples_us(call: Callable[[], None], limit_s: float) -> list[float]:
    """Repeat a call until the time has passed, at least once, and return how long each took, in microseconds."""
    until = time.monotonic() + limit_s
    samples = []
    while True:
        start = time.perf_counter_ns()
        call()
        samples.append((time.perf_counter_ns() - start) / 1e3)
        if time.monotonic() >= until or len(samples) >= _MAX_SAMPLES:
            return samples


def rate(move: Callable[[int], None], limit_s: float) -> tuple[int, float]:
    """Repeat moves of many blocks until the time has passed. Return the bytes of one move, and GB/s.

    The number of blocks grows while a larger move fits into half of the time, so that a slow network is measured too.
    """
    until = time.monotonic() + limit_s
    blocks = _FIRST_BLOCKS
    while True:
        seconds = samples_us(partial(move, blocks), 0)[0] / 1e6
        if blocks >= BLOCKS or seconds * _GROWTH > limit_s / 2:
            break
        blocks = min(blocks * _GROWTH, BLOCKS)
    # The first move of this size touched its memory, so it does not count unless there is no time for another one.
    counted = samples_us(partial(move, blocks), left) if (left := until - time.monotonic()) > 0 else [seconds * 1e6]
    count = blocks * BLOCK_BYTES
    return count, count * len(counted) / (sum(counted) / 1e6) / 1e9
