"""The thread of a worker that talks to the engine, so that vLLM's model never waits for a peer.

The model's thread hands over the work of a step, counts computed layers, and takes what has ended, under a lock that
is held for an instant. It waits for the transfer thread only to revoke grants before a step overwrites their blocks,
and never for a peer. Each worker has one transfer thread, whatever the number of requests and peers.
"""

from __future__ import annotations

import ctypes
import logging
import os
import selectors
import threading
import time
from collections import deque
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Union

from llm_datadist import Completed, Error, Message, PeerDown
from llm_datadist.integrations.vllm import messages
from llm_datadist.integrations.vllm.lending import Lending
from llm_datadist.integrations.vllm.observations import Observations
from llm_datadist.integrations.vllm.receiving import Receiving
from llm_datadist.integrations.vllm.step import Part, Receive, Send, Withdraw

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llm_datadist.integrations.opentelemetry import TransferSpans
    from llm_datadist.integrations.vllm.group_caches import GroupCaches
    from llm_datadist.integrations.vllm.ranks import Shard
    from llm_datadist.integrations.vllm.receiving import Outcome
    from llm_datadist.integrations.vllm.settings import Settings
    from llm_datadist.integrations.vllm.step import Step
    from llm_datadist.native import Engine, Event, Peer

__all__ = ["Ended", "TransferThread"]

logger = logging.getLogger("vllm.llm_datadist")


# os.eventfd_write releases the GIL. The woken thread then takes it, and the model's thread has to wait for it. A call
# through PyDLL keeps the GIL.
_eventfd_write = ctypes.PyDLL(None).eventfd_write
_eventfd_write.argtypes = (ctypes.c_int, ctypes.c_uint64)
# How long the model's thread waits for the transfer thread to revoke grants, in seconds. If it takes longer, the
# transfer thread is stuck.
_WITHDRAW_S = 60.0
# How long the transfer thread waits before it takes events again, if there was no memory for them, in seconds.
_AGAIN_S = 0.1
# The timeout of epoll is limited to about 24 days.
_LONGEST_SLEEP_S = 3600.0


@dataclass
class Ended:
    """What has ended since the last step: the ids of requests."""

    sent: set[str] = field(default_factory=set)
    received: set[str] = field(default_factory=set)
    failed: set[str] = field(default_factory=set)


@dataclass
class _Computing:
    """The parts that a step computes. The model's thread notes layers, and the transfer thread reports them."""

    parts: list[tuple[str, int]]  # tickets and numbers
    saved: list[str] = field(default_factory=list)  # the layers that are computed, in the order in which they were
    ended: bool = False  # whether the model has run
    reported: int = 0  # how many layers were reported to decode, from the first one on


@dataclass
class _Withdrawal:
    orders: list[Withdraw]
    done: threading.Event = field(default_factory=threading.Event)


_Work = Union[Part, Send, Receive, _Computing, _Withdrawal]


class TransferThread:
    """The transfers of one worker.

    Args:
        engine: the engine of the worker.
        groups: the caches of its KV cache groups.
        shard: the part of the KV cache that it holds.
        settings: the options of the connector.
        layers: the names of the layers of the first group, in order.
    """

    def __init__(
        self, engine: Engine, groups: list[GroupCaches], shard: Shard, settings: Settings, layers: list[str]
    ) -> None:
        limit_s = settings.timeout_ms / 1000
        self._engine = engine
        self._lending = Lending(groups, settings.lease_ms / 1000, limit_s, self._send, self._freed)
        self._receiving = Receiving(engine, groups, shard, limit_s, self._send, self._received)
        self._lock = threading.Lock()
        self._work: deque[_Work] = deque()
        self._layers = layers
        self._layers_per_read = settings.layers_per_read
        # Only the model's thread uses these two.
        self._model_seconds = 0.0
        self._computing: _Computing | None = None
        # Only the transfer thread uses this.
        self._unreported: deque[_Computing] = deque()
        self._ended = Ended()
        self._observed = Observations()
        self._spans = _spans() if settings.spans else None
        self._closing = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="llm_datadist-vllm", daemon=True)
        self._thread.start()

    def begin(self, step: Step) -> None:
        """Withdraw parts, and lend others, before the step writes to blocks. The model's thread calls this.

        Raises:
            RuntimeError: the transfer thread has ended, or does not respond, so the parts are not withdrawn. Nothing
                may be computed then, because decode could read bytes of another request.
        """
        begin = time.perf_counter()
        # End the previous step first. Otherwise its layers could count for a part of this step with the same ticket.
        self._saved()
        if step.withdrawn:
            self._withdraw(step.withdrawn)
        computed = [(part.ticket, part.number) for part in step.parts if not part.computed]
        if computed:
            # The transfer thread need not know before the first layers are in place.
            self._computing = _Computing(computed)
            with self._lock:
                self._work.extend([*step.parts, self._computing])
        else:
            self._submit(step.parts)
        self._took(begin)

    def submit(self, step: Step) -> None:
        """Keep requests that have finished, and receive others. The model's thread calls this."""
        begin = time.perf_counter()
        work: list[_Work] = [*step.sends, *step.receives]
        # In a step that computes, `step_saved` wakes the transfer thread.
        self._submit(work, rouse=self._computing is None)
        self._took(begin)

    def layer_saved(self, name: str) -> None:
        """Note that a layer is computed. The model's thread calls this.

        Layers that are computed in another order become ready together, at the end of the step.
        """
        computing = self._computing
        if computing is None:
            return
        # vLLM calls this for each layer of each step, so it only takes a note.
        computing.saved.append(name)
        count = len(computing.saved)
        if count % self._layers_per_read == 0 and count < len(self._layers):
            begin = time.perf_counter()
            self._rouse()
            self._took(begin)

    def step_saved(self) -> None:
        """Note that the model has run. vLLM calls this in the model's thread, also if the model has failed."""
        begin = time.perf_counter()
        self._saved()
        self._took(begin)

    def take(self) -> Ended:
        """Return what has ended since the last call. The model's thread calls this."""
        begin = time.perf_counter()
        with self._lock:
            ended, self._ended = self._ended, Ended()
        self._took(begin)
        return ended

    def take_observations(self) -> dict[str, Any] | None:
        """Return the observations since the last call, or ``None`` if there are none. The model's thread calls this."""
        seconds, self._model_seconds = self._model_seconds, 0.0
        with self._lock:
            self._observed.count("model_thread_seconds", seconds)
            return self._observed.take()

    def close(self) -> None:
        """Stop the thread. Receives that run are cancelled when the engine is closed."""
        self._closing = True
        self._rouse()
        self._thread.join()
        os.close(self._wake)

    def _submit(self, work: Sequence[_Work], *, rouse: bool = True) -> None:
        if work:
            with self._lock:
                self._work.extend(work)
            if rouse:
                self._rouse()

    def _withdraw(self, orders: list[Withdraw]) -> None:
        withdrawal = _Withdrawal(orders)
        self._submit([withdrawal])
        if not withdrawal.done.wait(_WITHDRAW_S):
            tickets = ", ".join(order.ticket for order in orders)
            raise RuntimeError(f"the transfer thread has not revoked the grants of {tickets} within {_WITHDRAW_S:g} s")

    def _saved(self) -> None:
        computing, self._computing = self._computing, None
        if computing is not None:
            computing.ended = True
            self._rouse()

    def _rouse(self) -> None:
        _eventfd_write(self._wake, 1)

    def _took(self, begin: float) -> None:
        self._model_seconds += time.perf_counter() - begin

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
        return min(max(0.0, min(times) - time.monotonic()), _LONGEST_SLEEP_S) if times else None

    def _turn(self) -> None:
        """Do the work that was handed over, and take what has happened in the engine."""
        with self._lock:
            work, self._work = self._work, deque()
        for item in work:
            self._guarded(self._begin, item)
        self._guarded(self._report_layers, self._unreported)
        for event in self._events():
            self._guarded(self._happened, event)
        now = time.monotonic()
        self._guarded(self._lending.due, now)
        self._guarded(self._receiving.due, now)

    def _events(self) -> list[Event]:
        try:
            return self._engine.events()
        except Error:
            # The events stay in the engine.
            logger.exception("cannot take the events of the engine; retrying in %g s", _AGAIN_S)
            time.sleep(_AGAIN_S)
            return []

    def _guarded(self, action: Any, item: Any) -> None:
        """Run an action. A failure concerns one request, so the thread goes on."""
        try:
            action(item)
        except Exception:
            logger.exception("the transfer thread could not process %r", item)

    def _begin(self, item: _Work) -> None:
        if isinstance(item, Part):
            self._lending.lend(item, time.monotonic())
        elif isinstance(item, Send):
            self._lending.finish(item, time.monotonic())
        elif isinstance(item, Receive):
            self._receiving.begin(item, time.monotonic())
        elif isinstance(item, _Computing):
            self._unreported.append(item)
        else:
            for order in item.orders:
                self._lending.withdraw(order)
            item.done.set()

    def _report_layers(self, unreported: deque[_Computing]) -> None:
        """Report to decode the layers that were computed since the last turn."""
        for computing in list(unreported):
            if not computing.ended:
                count = _in_order(computing.saved, self._layers)
                if count > computing.reported:
                    computing.reported = count
                    self._lending.ready(computing.parts, count)
                continue
            unreported.remove(computing)
            missing = set(self._layers).difference(computing.saved)
            if not missing:
                self._lending.ready(computing.parts, None)
                continue
            reason = f"the model has computed {len(self._layers) - len(missing)} of {len(self._layers)} layers"
            tickets = ", ".join(sorted({ticket for ticket, _ in computing.parts}))
            logger.error("tickets %s are not handed over: %s", tickets, reason)
            self._lending.fail(computing.parts, reason)

    def _happened(self, event: Event) -> None:
        if isinstance(event, Completed):
            self._receiving.completed(event.transfer, event.error)
        elif isinstance(event, Message):
            self._heard(event)
        elif isinstance(event, PeerDown):
            self._receiving.unlinked(event.peer, event.reason)

    def _heard(self, event: Message) -> None:
        try:
            message = messages.decode(event.data)
        except ValueError:
            logger.warning("%s has sent an invalid message of %d bytes", event.peer, len(event.data))
            return
        if isinstance(message, (messages.Ask, messages.Done)):
            self._lending.heard(event.peer, message, time.monotonic())
        else:
            self._receiving.heard(event.peer, message)

    def _send(self, peer: Peer, message: messages.Message) -> None:
        try:
            peer.send(messages.encode(message))
        except Error as error:
            if isinstance(message, (messages.Ask, messages.Done)):
                raise
            # The receive fails by its broken link or its own time limit.
            about = getattr(message, "ticket", "several tickets")
            logger.warning("cannot send %s of %s to %s: %s", type(message).__name__, about, peer, error)

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
                "llm_datadist.bytes": outcome.bytes,
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
                self._observed.received(outcome)


def _in_order(saved: list[str], layers: list[str]) -> int:
    """Return how many layers are computed from the first one on."""
    for count, (computed, layer) in enumerate(zip(saved, layers)):
        if computed != layer:
            return count
    return min(len(saved), len(layers))


def _spans() -> TransferSpans:
    from llm_datadist.integrations.opentelemetry import TransferSpans  # noqa: PLC0415 - only if it is asked for

    return TransferSpans()
