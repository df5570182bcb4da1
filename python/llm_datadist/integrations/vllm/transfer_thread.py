"""The thread of a worker that talks to the engine, so that vLLM's model never waits for a peer.

The model's thread hands over the work of a step and takes what has ended, both under a lock that is held for an
instant. Everything else happens here: one thread for each worker, whatever the number of requests and peers.
"""

from __future__ import annotations

import logging
import os
import selectors
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from llm_datadist import LLMException
from llm_datadist.events import Completed, GrantEnded, LinkDown, LinkUp, Notification
from llm_datadist.integrations.vllm import messages
from llm_datadist.integrations.vllm.lending import Lending
from llm_datadist.integrations.vllm.observations import Observations
from llm_datadist.integrations.vllm.receiving import Receiving
from llm_datadist.integrations.vllm.step import Receive, Send

if TYPE_CHECKING:
    from llm_datadist import LLMDataDist
    from llm_datadist.integrations.opentelemetry import TransferSpans
    from llm_datadist.integrations.vllm.group_caches import GroupCaches
    from llm_datadist.integrations.vllm.ranks import Shard
    from llm_datadist.integrations.vllm.receiving import Outcome
    from llm_datadist.integrations.vllm.settings import Settings
    from llm_datadist.integrations.vllm.step import Step

__all__ = ["Ended", "TransferThread"]

logger = logging.getLogger("vllm.llm_datadist")


@dataclass
class Ended:
    """What has ended since the last step: the ids of requests."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


class TransferThread:
    """The transfers of one worker.

    Args:
        engine: the engine of the worker.
        groups: the caches of its KV cache groups.
        shard: the part of the KV cache that it holds.
        settings: the options of the connector.
    """

    def __init__(
        self,
        engine: LLMDataDist,
        groups: list[GroupCaches],
        shard: Shard,
        settings: Settings,
    ) -> None:
        limit_s = settings.timeout_ms / 1000
        self._engine = engine
        self._lending = Lending(groups, settings.lease_ms / 1000, limit_s, self._notify, self._freed)
        self._receiving = Receiving(engine, groups, shard, limit_s, self._notify, self._received)
        self._lock = threading.Lock()
        self._work: deque[Receive | Send] = deque()
        self._ended = Ended()
        self._observed = Observations()
        self._spans = _spans() if settings.spans else None
        self._closing = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        engine.poll()  # from now on, the engine keeps news about links and grants
        self._thread = threading.Thread(target=self._run, name="llm_datadist-vllm", daemon=True)
        self._thread.start()

    def submit(self, step: Step) -> None:
        """Hand over the work of a step. The model's thread calls this."""
        begin = time.perf_counter()
        if step.sends or step.receives:
            with self._lock:
                self._work.extend(step.sends)
                self._work.extend(step.receives)
            os.eventfd_write(self._wake, 1)
        self._took(begin)

    def take(self) -> Ended:
        """Return what has ended since the last call. The model's thread calls this."""
        begin = time.perf_counter()
        with self._lock:
            ended, self._ended = self._ended, Ended()
        self._took(begin)
        return ended

    def take_observations(self) -> dict[str, Any] | None:
        """Return the observations since the last call, or ``None`` if there are none."""
        with self._lock:
            return self._observed.take()

    def close(self) -> None:
        """Stop the thread. Receives that run are cancelled when the engine is finalized."""
        self._closing = True
        os.eventfd_write(self._wake, 1)
        self._thread.join()
        os.close(self._wake)

    def _took(self, begin: float) -> None:
        took = time.perf_counter() - begin
        with self._lock:
            self._observed.count("model_thread_seconds", took)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._engine, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            while not self._closing:
                selector.select(self._until_due())
                with suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
                self._turn()

    def _until_due(self) -> float | None:
        times = [due for due in (self._lending.next_due(), self._receiving.next_due()) if due is not None]
        return max(0.0, min(times) - time.monotonic()) if times else None

    def _turn(self) -> None:
        """Do the work that was handed over, and take what has happened in the engine."""
        with self._lock:
            work, self._work = self._work, deque()
        for item in work:
            self._guarded(self._begin, item)
        for event in self._engine.poll():
            self._guarded(self._happened, event)
        now = time.monotonic()
        self._guarded(self._lending.due, now)
        self._guarded(self._receiving.due, now)

    def _guarded(self, action: Any, item: Any) -> None:
        """Run an action. A failure concerns one request, so the thread goes on."""
        try:
            action(item)
        except Exception:
            logger.exception("llm_datadist: %s failed", action.__name__)

    def _begin(self, item: Receive | Send) -> None:
        if isinstance(item, Send):
            self._lending.lend(item, time.monotonic())
        else:
            self._receiving.begin(item, time.monotonic())

    def _happened(self, event: Any) -> None:
        if isinstance(event, Completed):
            self._receiving.completed(event.transfer)
        elif isinstance(event, Notification):
            self._heard(event)
        elif isinstance(event, GrantEnded):
            self._lending.grant_ended(event)
        elif isinstance(event, LinkUp):
            self._receiving.linked(event.peer.cluster_id)
        elif isinstance(event, LinkDown):
            self._receiving.unlinked(event.peer.cluster_id)

    def _heard(self, event: Notification) -> None:
        try:
            message = messages.decode(event.payload)
        except ValueError:
            logger.warning("cluster %d sent what is not a message of the connector", event.cluster_id)
            return
        if isinstance(message, (messages.Ask, messages.Done)):
            self._lending.heard(event.cluster_id, message, time.monotonic())
        else:
            self._receiving.heard(event.cluster_id, message)

    def _notify(self, cluster: int, message: messages.Message) -> None:
        payload = messages.encode(message)
        if isinstance(message, (messages.Ask, messages.Done)):
            self._engine.notify(cluster, payload)
            return
        with suppress(LLMException):  # the reader is gone, and learns of it by its own time limit
            self._engine.notify(cluster, payload)

    def _freed(self, request: str, expired: bool) -> None:
        with self._lock:
            self._ended.sent.add(request)
            if expired:
                self._observed.count("expired_leases")
        if expired:
            logger.warning("request %s was not read by decode before its lease ended", request)

    def _received(self, outcome: Outcome) -> None:
        if self._spans is not None:
            attributes = {
                "llm_datadist.request": outcome.request,
                "llm_datadist.bytes": outcome.moved,
                "llm_datadist.blocks": outcome.blocks,
                "llm_datadist.pull_seconds": outcome.transfer_seconds,
            }
            self._spans.add("receive", outcome.receive_seconds, attributes, outcome.failure)
        with self._lock:
            self._ended.received.add(outcome.request)
            if outcome.failure:
                self._ended.failed.add(outcome.request)
                self._observed.count("failed_receives")
            else:
                figures = (outcome.receive_seconds, outcome.transfer_seconds, outcome.moved, outcome.blocks)
                self._observed.received(*figures)


def _spans() -> TransferSpans:
    from llm_datadist.integrations.opentelemetry import TransferSpans  # noqa: PLC0415 - only if it is asked for

    return TransferSpans()
