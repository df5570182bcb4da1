"""Measures a link to another machine, one path after the other.

A process can have one engine at a time, so each choice of options opens an engine, links, measures and closes it.
Pulls write into the pool of this engine, and pushes into that of the peer: registered memory is only read.
"""

from __future__ import annotations

import math
import os
import select
import time
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

from llm_datadist import BlocksCacheKey, LLMException, LLMStatusCode
from llm_datadist.doctor import devices, paths, probe
from llm_datadist.doctor.probe import BLOCK_BYTES, BLOCKS, POOL_MODEL, REGISTERED_MODEL, Choice, ProbeEngine
from llm_datadist.events import LinkDown, Notification

if TYPE_CHECKING:
    from llm_datadist.events import Peer

LINK_LIMIT_MS = 3000
_MESSAGE_LIMIT_S = 5.0
_MOST_SAMPLES = 20_000
_FIRST_BLOCKS, _GROWTH = 4, 4
_ROWS = 4
DEFAULT, DEFAULT_REGISTERED, TCP, UCX = "default", "default, registered memory", "TCP", "UCX"


class MeasureError(Exception):
    """The peer cannot be measured.

    Args:
        text: the reason.
        invalid: whether an option of the command is wrong.
    """

    def __init__(self, text: str, *, invalid: bool = False) -> None:
        super().__init__(text)
        self.invalid = invalid


@dataclass
class Row:
    """What was measured on one path. Times are in microseconds, and a GB has 10^9 bytes.

    Args:
        name: the choice of options, and the memory that was read.
        transport: how the link carries messages, as ``stats()`` names it.
        moved_by: the paths that moved the bytes, as ``stats()`` names them.
        pull_us: the median and the 99th percentile of pulls of one block of 16 KiB.
        message_us: the same of a message to the program of the peer and back.
        pull_gb_s: rate of large pulls.
        push_gb_s: rate of large pushes.
        call_bytes: bytes of one large pull and of one large push.
        unusable: why the path cannot be used, or ``None``.
        not_faster: why no faster path was used, or ``None``.
    """

    name: str
    transport: str = ""
    moved_by: list[str] = field(default_factory=list)
    pull_us: tuple[float, float] | None = None
    message_us: tuple[float, float] | None = None
    pull_gb_s: float | None = None
    push_gb_s: float | None = None
    call_bytes: tuple[int, int] | None = None
    unusable: str | None = None
    not_faster: str | None = None


@dataclass(frozen=True)
class Target:
    """Where to measure, and for how long.

    Args:
        address: ``ip:port`` of the peer.
        seconds: time for all paths together, without the time to open engines and to link.
        token_file: the option ``link_token_file``, or ``None``.
        ucx_library: the option ``ucx_library``, or ``None``.
    """

    address: str
    seconds: float
    token_file: str | None = None
    ucx_library: str | None = None


def measure(target: Target) -> list[Row]:
    """Measure all paths to the peer. Raises MeasureError if the default path cannot be used."""
    limit_s = target.seconds / _ROWS
    given = {name: getattr(target, name) for name in ("token_file", "ucx_library")}
    rows = _measured(target, Choice(**given), [(DEFAULT, POOL_MODEL), (DEFAULT_REGISTERED, REGISTERED_MODEL)], limit_s)
    # UCX is not used with peers that share memory, so these links must not look for shared memory. A
    # transfer backend needs a listener.
    over = {"transport": "tcp", "listen": "127.0.0.1:0"}
    if (rows[0].transport, rows[0].moved_by) != ("tcp", [paths.SOCKETS]):  # otherwise it would be measured twice
        rows += _optional(target, Choice(**given, **over, backend="sockets"), TCP, limit_s)
    reason = None if "UCX_TLS" in os.environ else devices.no_rdma(Path("/"))  # the variable may allow other transports
    if reason is not None:
        return [*rows, Row(UCX, unusable=reason)]
    return rows + _optional(target, Choice(**given, **over, backend="ucx"), UCX, limit_s)


def _optional(target: Target, choice: Choice, name: str, limit_s: float) -> list[Row]:
    """Measure a path that may be unusable."""
    try:
        return _measured(target, choice, [(name, POOL_MODEL)], limit_s)
    except MeasureError as error:
        return [Row(name, unusable=str(error))]


def _measured(target: Target, choice: Choice, parts: list[tuple[str, int]], limit_s: float) -> list[Row]:
    """Open an engine, link, and measure these parts."""
    try:
        opened = ProbeEngine(choice)
    except LLMException as error:
        invalid = error.status_code == LLMStatusCode.LLM_PARAM_INVALID
        raise MeasureError(f"this engine cannot be opened: {_shown(error)}", invalid=invalid) from error
    with opened as engine:
        engine.dist.poll()  # from now on, the engine keeps news about links
        try:
            peer = engine.dist.ensure_link(target.address, timeout_ms=LINK_LIMIT_MS).result()
        except LLMException as error:
            hint = f"; {probe.START}" if error.status_code == LLMStatusCode.LLM_PARAM_INVALID else ""
            raise MeasureError(f"cannot link to {target.address}: {_shown(error)}{hint}") from error
        reason = probe.refusal(b"" if peer is None else peer.metadata)
        if peer is None or reason is not None:
            raise MeasureError(f"cannot measure {target.address}: {reason}")
        try:
            return [_Measurement(engine, peer, model).row(name, limit_s) for name, model in parts]
        except LLMException as error:
            raise MeasureError(f"the measurement of {target.address} failed: {_shown(error)}") from error


def _shown(error: LLMException) -> str:
    return f"{error.status_code.name}: {error}"


def percentiles(samples: list[float]) -> tuple[float, float]:
    """Return the median and the 99th percentile of samples (the smallest sample that at least that share reaches)."""
    ordered = sorted(samples)
    half, most = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.99))
    return half, most


class _Measurement:
    """Measures one link with one pair of caches."""

    def __init__(self, engine: ProbeEngine, peer: Peer, model: int) -> None:
        self._engine = engine
        self._peer = peer
        self._model = model
        self._pool = engine.caches[POOL_MODEL]
        self._messages = 0

    def row(self, name: str, limit_s: float) -> Row:
        before = self._link()["paths"]
        self._pull(_FIRST_BLOCKS, verify="full")
        phase_s = limit_s / 4
        pull_bytes, pull_gb_s = rate(self._pull, phase_s)
        push_bytes, push_gb_s = rate(self._push, phase_s)
        pull_us = percentiles(samples_us(lambda: self._pull(1), phase_s))
        message_us = percentiles(samples_us(self._message, phase_s))
        link = self._link()
        moved = [path for path, now in link["paths"].items() if now["transfers"] > before[path]["transfers"]]
        return Row(
            name,
            link["transport"],
            moved,
            pull_us,
            message_us,
            pull_gb_s,
            push_gb_s,
            (pull_bytes, push_bytes),
            not_faster=_not_faster(moved, link) if name in (DEFAULT, DEFAULT_REGISTERED) else None,
        )

    def _link(self) -> Any:
        links = self._engine.dist.stats()["links"]
        found = [link for link in links if link["cluster"] == self._peer.cluster_id]
        if not found:
            raise LLMException("the link has ended", status_code=LLMStatusCode.LLM_NOT_YET_LINK)
        return found[0]

    def _pull(self, blocks: int, verify: str | None = None) -> None:
        moved = list(range(blocks))
        key = BlocksCacheKey(self._peer.cluster_id, self._model)
        self._engine.manager.pull_blocks(key, self._pool, moved, moved, verify=verify)

    def _push(self, blocks: int) -> None:
        moved = list(range(blocks))
        key = BlocksCacheKey(self._peer.cluster_id, POOL_MODEL)
        source = self._engine.caches[self._model]
        self._engine.manager.push_blocks(key, source, moved, moved, tensor_num_per_layer=1)

    def _message(self) -> None:
        """Send a message, and wait until the program of the peer has returned it."""
        self._messages += 1
        payload = b"%d" % self._messages
        self._engine.dist.notify(self._peer.cluster_id, payload)
        until = time.monotonic() + _MESSAGE_LIMIT_S
        while (left := until - time.monotonic()) > 0:
            select.select([self._engine.dist], [], [], left)
            for event in self._engine.dist.poll():
                if isinstance(event, Notification) and event.payload == payload:
                    return
                if isinstance(event, LinkDown):
                    raise LLMException(
                        f"the link has ended: {event.reason}", status_code=LLMStatusCode.LLM_NOT_YET_LINK
                    )
        raise LLMException("the peer did not return a message", status_code=LLMStatusCode.LLM_TIMEOUT)


def _not_faster(moved: list[str], link: Any) -> str | None:
    reason: str | None = link["refusal"] or link["sockets_reason"]
    if paths.SOCKETS in moved:
        return reason
    only_pools = "only pools can be mapped: allocate caches from mem_pool_cfg"
    if paths.RINGS in moved:
        # Rings also carry short transfers of registered memory that could be read by process id.
        return reason if "stream" in (link["pools"], link["registered"]) else only_pools
    return only_pools if paths.PROCESS in moved else None


def samples_us(call: Callable[[], None], limit_s: float) -> list[float]:
    """Repeat a call until the time has passed, at least once, and return how long each took, in microseconds."""
    until = time.monotonic() + limit_s
    samples = []
    while True:
        start = time.perf_counter_ns()
        call()
        samples.append((time.perf_counter_ns() - start) / 1e3)
        if time.monotonic() >= until or len(samples) >= _MOST_SAMPLES:
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
    left_s = until - time.monotonic()
    counted = samples_us(partial(move, blocks), left_s) if left_s > 0 else [seconds * 1e6]
    count = blocks * BLOCK_BYTES
    return count, count * len(counted) / (sum(counted) / 1e6) / 1e9
