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
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

from llm_datadist import Closed, Completed, Error, Message, PeerDown, PeerLost
from llm_datadist.integrations.vllm import messages
from llm_datadist.integrations.vllm.computed_layers import ComputedLayers, Computing
from llm_datadist.integrations.vllm.host_loads import HostLoads
from llm_datadist.integrations.vllm.host_saves import HostSaves
from llm_datadist.integrations.vllm.lending import Lending
from llm_datadist.integrations.vllm.observations import LISTS, empty, is_empty
from llm_datadist.integrations.vllm.outbox import Outbox
from llm_datadist.integrations.vllm.receiving import Receiving

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llm_datadist.integrations.vllm.group_caches import GroupCaches
    from llm_datadist.integrations.vllm.host_buffers import HostBuffers
    from llm_datadist.integrations.vllm.identity import Identity
    from llm_datadist.integrations.vllm.ranks import Shard
    from llm_datadist.integrations.vllm.receiving import Outcome
    from llm_datadist.integrations.vllm.settings import Settings
    from llm_datadist.integrations.vllm.step import Step, Withdraw
    from llm_datadist.native import Engine, Event, Peer

__all__ = ["Ended", "TransferThread"]

logger = logging.getLogger("vllm.llm_datadist")


# os.eventfd_write releases the GIL. The woken thread then takes it, and the model's thread has to wait for it. A call
# through PyDLL keeps the GIL.
_eventfd_write = ctypes.PyDLL(None).eventfd_write
_eventfd_write.argtypes = (ctypes.c_int, ctypes.c_uint64)
# How long the model's thread waits for the transfer thread to revoke grants, in seconds. If it takes longer, the
# transfer thread is stuck. It asks in between whether the thread has ended.
_WITHDRAW_S = 60.0
_ASK_S = 0.05
# How long ``close`` waits for copies that run, in seconds.
_COPIES_S = 60.0
# Time between two attempts to take events, in seconds.
_AGAIN_S = 0.05
# The timeout of epoll is limited to about 24 days.
_LONGEST_SLEEP_S = 3600.0


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
        identity: what prefill must have in common with this vLLM, or ``None``.
        settings: the options of the connector.
        layers: the names of the layers of each group, in order.
        host: the host buffers, or ``None`` if the engine reaches the KV cache itself.
    """

    def __init__(
        self,
        engine: Engine,
        groups: list[GroupCaches],
        shard: Shard,
        identity: Identity | None,
        settings: Settings,
        layers: list[list[str]],
        host: HostBuffers | None = None,
    ) -> None:
        limit_s = settings.timeout_ms / 1000
        self._engine = engine
        self._outbox = Outbox()
        self._lending = Lending(groups, settings.lease_ms / 1000, self._reply, self._freed)
        self._host = host
        loads = None if host is None else HostLoads(host, layers, settings.layers_per_read, self._call)
        self._receiving = Receiving(engine, groups, shard, identity, limit_s, self._outbox.send, self._received, loads)
        self._saves: HostSaves | None = None
        if host is not None:
            self._saves = HostSaves(host, layers, settings.layers_per_read, limit_s, self._lending, self._call)
        self._computed = ComputedLayers(layers[0], self._lending, self._saves)
        self._lock = threading.Lock()
        self._work: deque[Callable[[], None]] = deque()
        self._layers = layers[0]
        self._layers_per_read = settings.layers_per_read
        # Only the model's thread uses these.
        self._model_seconds = 0.0
        self._computing: Computing | None = None
        self._sends: set[str] = set()  # the requests that it has not reported as sent
        self._receives: set[str] = set()
        self._abandoned = False  # whether the transfer thread has ended, and everything with it
        self._ended = Ended()
        self._observed = empty()  # since it was last taken
        self._spans: TransferSpans | None = None
        if settings.spans:
            from llm_datadist.integrations.opentelemetry import TransferSpans  # noqa: PLC0415 - only if it is asked for

            self._spans = TransferSpans()
        self._closing = False
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._thread = threading.Thread(target=self._run, name="llm_datadist-vllm", daemon=True)
        self._thread.start()

    def begin(self, step: Step) -> None:
        """Withdraw parts, and lend others, before the step writes to blocks. The model's thread calls this.

        Raises:
            RuntimeError: the transfer thread does not respond, so the parts are not withdrawn. Nothing may be computed
                then, because decode could read bytes of another request.
        """
        begin = time.perf_counter()
        # End the previous step first. Otherwise its layers could count for a part of this step with the same ticket.
        self._saved()
        if step.withdrawn:
            self._withdraw(step.withdrawn)
        parts, finished = step.parts, None
        if self._host is not None:
            # Blocks that are computed have to be copied before decode can read them.
            parts = [replace(part, computed=False) for part in step.parts]
            copied = [part for part, given in zip(parts, step.parts) if given.computed]
            if copied:
                finished = Computing(copied, self._layers, [(len(self._layers), self._host.mark())], ended=True)
        work: list[Callable[[], None]] = [partial(self._lending.lend, part) for part in parts]
        if finished is not None:
            work.append(partial(self._computed.add, finished))
        computed = [part for part, given in zip(parts, step.parts) if not given.computed]
        if computed:
            # The transfer thread need not know before the first layers are in place.
            self._computing = Computing(computed)
            work.append(partial(self._computed.add, self._computing))
        self._submit(work, rouse=not computed or finished is not None)
        self._took(begin)

    def submit(self, step: Step) -> None:
        """Keep requests that have finished, and hold, receive or release others. The model's thread calls this."""
        begin = time.perf_counter()
        self._sends.update(send.request for send in step.sends)
        self._receives.update(receive.request for receive in step.receives)
        now = time.monotonic()
        work = [partial(self._lending.finish, send, now) for send in step.sends]
        work += [partial(self._receiving.hold, order) for order in step.awaited]
        # The device may still use the blocks for the requests that had them before.
        mark = self._host.mark() if self._host is not None and step.receives else None
        work += [partial(self._receiving.begin, order, now, mark) for order in step.receives]
        work += [partial(self._receiving.cancel, order.request) for order in step.cancelled]
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
            if self._host is not None:
                computing.marks.append((count, self._host.mark()))
            self._rouse()
            self._took(begin)

    def step_saved(self) -> None:
        """Note that the model has run. vLLM calls this in the model's thread, also if the model has failed."""
        begin = time.perf_counter()
        self._saved()
        self._took(begin)

    def take(self) -> Ended:
        """Return what has ended since the last call. The model's thread calls this.

        If the transfer thread has ended, everything has: receives have failed, and nothing is lent any more.
        """
        begin = time.perf_counter()
        with self._lock:
            ended, self._ended = self._ended, Ended()
        # The device may write to the blocks of a receive as long as a copy runs.
        if self._has_died() and (self._host is None or self._host.stop()):
            ended.sent |= self._sends
            ended.failed |= self._receives - ended.received
            ended.received |= self._receives
        # If only a thread that copies has ended, the transfer thread finishes its turn, and may end the same requests.
        # vLLM takes the end of a request once.
        ended.sent &= self._sends
        ended.received &= self._receives
        ended.failed &= ended.received
        self._sends -= ended.sent
        self._receives -= ended.received
        self._took(begin)
        return ended

    def take_observations(self) -> dict[str, Any] | None:
        """Return the observations since the last call, or ``None`` if there are none. The model's thread calls this."""
        seconds, self._model_seconds = self._model_seconds, 0.0
        with self._lock:
            self._observed["model_thread_seconds"] += seconds
            if is_empty(self._observed):
                return None
            observed, self._observed = self._observed, empty()
        return observed

    def close(self) -> None:
        """Stop the thread. Receives that run are cancelled when the engine is closed."""
        self._closing = True
        self._rouse()
        self._thread.join()
        if self._host is not None and not self._host.close(_COPIES_S):
            # Its end will be reported, so the descriptor stays open.
            logger.error("a copy between host memory and device still runs after %g s", _COPIES_S)
            return
        os.close(self._wake)

    def _has_died(self) -> bool:
        """Whether the transfer thread, or one that copies, has ended by an error. The first call then ends all.

        vLLM goes on without it: closing the engine ends grants, so that blocks can be used for something else, and
        transfers, so that nothing writes to blocks any more.
        """
        copies = self._host is None or self._host.alive
        if not self._abandoned and not (self._thread.is_alive() and copies) and not self._closing:
            which = "the transfer thread" if copies else "a thread that copies between host memory and device"
            logger.error("%s has ended, so this worker hands over and receives no requests any more", which)
            self._abandoned = True
            self._engine.close()
        return self._abandoned

    def _submit(self, work: Sequence[Callable[[], None]], *, rouse: bool = True) -> None:
        if work and not self._abandoned:
            with self._lock:
                self._work.extend(work)
            if rouse:
                self._rouse()

    def _withdraw(self, orders: list[Withdraw]) -> None:
        done = threading.Event()

        def withdraw() -> None:
            for order in orders:
                self._lending.withdraw(order)
            if self._saves is not None:
                self._saves.drop()
            done.set()

        self._submit([withdraw])
        end = time.monotonic() + _WITHDRAW_S
        while not self._has_died() and not done.wait(_ASK_S):
            if time.monotonic() > end:
                tickets = ", ".join(order.ticket for order in orders)
                text = f"the transfer thread has not revoked the grants of {tickets} within {_WITHDRAW_S:g} s"
                raise RuntimeError(text)

    def _saved(self) -> None:
        computing, self._computing = self._computing, None
        if computing is not None:
            if self._host is not None:
                computing.marks.append((len(self._layers), self._host.mark()))
            computing.ended = True
            self._rouse()

    def _rouse(self) -> None:
        _eventfd_write(self._wake, 1)

    def _took(self, begin: float) -> None:
        self._model_seconds += time.perf_counter() - begin

    def _run(self) -> None:
        try:
            self._loop()
        except BaseException:
            # `_has_died` ends what it has begun.
            logger.exception("the transfer thread ends")

    def _loop(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._engine, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            while not self._closing:
                selector.select(self._until_due())
                with suppress(BlockingIOError):
                    os.eventfd_read(self._wake)
                self._run_once()

    def _until_due(self) -> float | None:
        now = time.monotonic()
        dues = [self._lending.next_due(), self._receiving.next_due(), self._outbox.next_due(now)]
        if self._saves is not None:
            dues.append(self._saves.next_due())
        times = [due for due in dues if due is not None]
        return min(max(0.0, min(times) - now), _LONGEST_SLEEP_S) if times else None

    def _run_once(self) -> None:
        """Do the work that was handed over, and take what has happened in the engine."""
        with self._lock:
            work, self._work = self._work, deque()
        for action in work:
            self._guarded(action)
        self._guarded(self._computed.report)
        for event in self._events():
            self._guarded(self._happened, event)
        now = time.monotonic()
        self._guarded(self._lending.due, now)
        self._guarded(self._receiving.due, now)
        if self._saves is not None:
            self._guarded(self._saves.due, now)
        self._guarded(self._outbox.resend)

    def _events(self) -> list[Event]:
        """Take the events of the engine, which keeps them if the call fails."""
        try:
            return self._engine.events()
        except Closed:
            raise
        except (Error, MemoryError):
            logger.exception("cannot take the events of the engine; retrying in %g s", _AGAIN_S)
            time.sleep(_AGAIN_S)
            return []

    def _guarded(self, action: Callable[..., None], *given: object) -> None:
        """Run an action. A failure concerns one request, so the thread goes on."""
        try:
            action(*given)
        except Exception:
            # The bytes of a message may be tokens of grants, which a log must not show.
            shown = [f"Message of {one.peer}" if isinstance(one, Message) else one for one in given]
            logger.exception("the transfer thread could not do %r of %r", action, shown)

    def _call(self, action: Callable[[], None]) -> None:
        """Run a function in the transfer thread. Threads that copy call this."""
        self._submit([action])

    def _happened(self, event: Event) -> None:
        if isinstance(event, Completed):
            self._receiving.completed(event.transfer, event.error)
        elif isinstance(event, Message):
            self._heard(event)
        elif isinstance(event, PeerDown):
            self._lending.unlinked(event.peer)
            self._receiving.unlinked(event.peer, event.reason)

    def _heard(self, event: Message) -> None:
        try:
            message = messages.decode(event.data)
        except ValueError:
            logger.warning("%s has sent an invalid message of %d bytes", event.peer, len(event.data))
            return
        if isinstance(message, (messages.Hold, messages.Ask, messages.Done)):
            self._lending.heard(event.peer, message, time.monotonic())
        else:
            self._receiving.heard(event.peer, message)

    def _reply(self, peer: Peer, message: messages.Message) -> None:
        with suppress(PeerLost):  # nobody waits for the message
            self._outbox.send(peer, message)

    def _freed(self, request: str, unread: bool) -> None:
        with self._lock:
            self._ended.sent.add(request)
            self._observed["expired_leases"] += unread
        if unread:
            logger.warning("request %s was not read by decode before its lease or the link of decode ended", request)

    def _received(self, outcome: Outcome) -> None:
        if self._spans is not None and not outcome.cancelled:
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
                self._observed["failed_receives"] += 1
            elif not outcome.cancelled:
                for name in LISTS:
                    self._observed[name].append(getattr(outcome, name))
