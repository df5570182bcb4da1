"""Decode: the requests that come from prefill, each from its arrival in the queue to the last byte.

As soon as a request arrives, the worker links to each rank of prefill that it reads, and holds the request there, so
that prefill keeps the blocks. When vLLM has blocks for the request, the receive begins: it asks for the blocks of
prefill. Prefill lends them in parts, and each part is pulled as its layers become ready. A receive ends when all of its
pulls have ended, so nothing writes to vLLM's blocks after that.
"""

from __future__ import annotations

import itertools
import logging
import time
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING

from llm_datadist import Error, GrantEnded
from llm_datadist.integrations.vllm.dialing import Dialing
from llm_datadist.integrations.vllm.group_caches import HEADS, PAGES, Owner
from llm_datadist.integrations.vllm.incoming import Incoming
from llm_datadist.integrations.vllm.messages import MAX_NUMBER, Ask, Done, Gone, Hold, Lent, printable
from llm_datadist.integrations.vllm.ranks import heads_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from llm_datadist.integrations.vllm.group_caches import GroupCaches
    from llm_datadist.integrations.vllm.handover import Handover
    from llm_datadist.integrations.vllm.host_buffers import Copy
    from llm_datadist.integrations.vllm.host_loads import HostLoads
    from llm_datadist.integrations.vllm.identity import Identity
    from llm_datadist.integrations.vllm.incoming import LentPart, Pull
    from llm_datadist.integrations.vllm.messages import Message, Ready
    from llm_datadist.integrations.vllm.ranks import Shard, Source
    from llm_datadist.integrations.vllm.step import Await, Receive
    from llm_datadist.native import Engine, Peer, Transfer

__all__ = ["Outcome", "Receiving"]

logger = logging.getLogger("vllm.llm_datadist")


@dataclass(frozen=True)
class Outcome:
    """How a receive has ended."""

    request: str  # the id of the request
    failure: str  # why it failed, or an empty text
    cancelled: bool  # whether vLLM has aborted the request
    receive_seconds: float  # time since the receive began
    transfer_seconds: float  # sum of the durations of the pulls, also of those that overlap
    bytes: int  # those that were pulled, also of parts that were withdrawn in the meantime
    blocks: int  # number of blocks


def _nothing() -> Incoming:
    return Incoming([], 0, set(), PAGES, 0, by_layers=False)


@dataclass(eq=False)
class _Ongoing:
    """A request that this worker holds. Nothing is missing until vLLM has blocks for it."""

    request: str
    handover: Handover
    number: int
    ranks_of_prefill: list[tuple[str, str]]  # the address and the name of the engine of each rank of prefill
    order: Receive | None = None  # the blocks that vLLM has for it
    view: str = PAGES
    incoming: Incoming = field(default_factory=_nothing)
    peers: dict[Peer, Source] = field(default_factory=dict)  # those that are linked
    links: set[Source] = field(default_factory=set)  # those that are being linked
    # Also the copies to the device, if there are host buffers.
    pulls: dict[Transfer[None] | Copy, Pull] = field(default_factory=dict)
    mark: Any = None  # the mark after which the device may write to the blocks
    rows_in_use: bool = False  # whether older saves may still write to the rows of the blocks
    begin: float = 0.0
    deadline: float = 0.0
    blocks: int = 0
    moved: int = 0
    nanos: int = 0
    failure: str = ""
    cancelled: bool = False  # whether decode needs nothing of it any more

    def rank_of_prefill(self, source: Source) -> tuple[str, str]:
        """Return the address and the name of the engine of a rank of prefill."""
        return self.ranks_of_prefill[source.rank]


class Receiving:
    """The requests that this worker holds and receives. Only the transfer thread uses it.

    Args:
        engine: the engine.
        groups: the caches of the KV cache groups.
        shard: the part of the KV cache that this worker holds.
        identity: what prefill must have in common with this vLLM, or ``None``.
        limit_s: how long a receive may take between two signs of progress, in seconds.
        notify: sends a message to a peer. It raises ``Error`` if there is no link.
        ended: takes the outcome of each receive that has begun.
        loads: copies what is pulled to the device, or ``None`` if the engine reaches the KV cache itself.
    """

    def __init__(
        self,
        engine: Engine,
        groups: list[GroupCaches],
        shard: Shard,
        identity: Identity | None,
        limit_s: float,
        notify: Callable[[Peer, Message], None],
        ended: Callable[[Outcome], None],
        loads: HostLoads | None = None,
    ) -> None:
        self._groups = groups
        self._shard = shard
        self._identity = identity
        self._limit_s = limit_s
        self._notify = notify
        self._ended = ended
        self._loads = loads
        self._ongoing: dict[str, _Ongoing] = {}
        self._by_ticket: dict[str, list[_Ongoing]] = {}
        self._pulls: dict[Transfer[None] | Copy, _Ongoing] = {}
        # The receives that have begun and have not failed, by request, the earliest deadline first.
        self._deadlines: OrderedDict[str, _Ongoing] = OrderedDict()
        # Each rank has one link call, so that many requests do not reach the maximum number of transfers.
        self._dialing = Dialing(engine, limit_s)
        self._numbers = itertools.count()

    def hold(self, order: Await) -> None:
        """Hold a request that has arrived. A failure becomes the outcome of its receive."""
        number = next(self._numbers) % MAX_NUMBER
        ongoing = _Ongoing(order.request, order.handover, number, order.handover.workers(self._shard.stage))
        self._ongoing[order.request] = ongoing
        self._by_ticket.setdefault(order.handover.ticket, []).append(ongoing)
        try:
            sources = self._shard.sources(len(ongoing.ranks_of_prefill))
        except ValueError as error:
            self._fail(ongoing, str(error))
            return
        for source in sources:  # also after a failure: each rank learns that nothing is read
            self._link(ongoing, source)

    def begin(self, order: Receive, now: float, mark: Any = None) -> None:
        """Begin to receive a request. A failure becomes the outcome of the receive.

        With host buffers, ``mark`` is what the device does before it may write to the blocks.
        """
        ongoing = self._ongoing[order.request]
        ongoing.order, ongoing.begin, ongoing.mark = order, now, mark
        try:
            if not ongoing.failure:
                if self._loads is not None:
                    ongoing.rows_in_use = not self._loads.after_saves(partial(self._rows_free, ongoing))
                self._begin(ongoing, order)
                self._progressed(ongoing)
                for peer in list(ongoing.peers):
                    self._ask(ongoing, peer)
        except Exception as error:  # noqa: BLE001 - one request fails, not the thread
            self._fail(ongoing, str(error))
        self._proceed(ongoing)

    def cancel(self, request: str) -> None:
        """Release a request. A receive that runs ends when its pulls have ended."""
        ongoing = self._ongoing.get(request)
        if ongoing is not None:
            ongoing.cancelled = True
            if ongoing.order is not None:
                self._fail(ongoing, "vLLM has aborted the request")
            self._proceed(ongoing)

    def unlinked(self, peer: Peer, reason: str) -> None:
        """Fail the receives that wait for a peer. Pulls that run end by themselves."""
        for ongoing in list(self._ongoing.values()):
            if peer in ongoing.peers and (ongoing.order is None or ongoing.incoming.waits):
                self._fail(ongoing, f"the link to {peer.name} broke: {reason}")

    def heard(self, peer: Peer, message: Lent | Ready | Gone) -> None:
        """Take news from prefill."""
        if isinstance(message, (Lent, Gone)):
            asking = [one for one in self._asking(peer, message.ticket) if one.number == message.receive]
            for ongoing in asking:
                if isinstance(message, Lent):
                    self._lent(ongoing, peer, message)
                else:
                    self._fail(ongoing, f"prefill does not lend it: {printable(message.reason)}")
            return
        for ticket, number in message.parts:
            for ongoing in self._asking(peer, ticket):
                if ongoing.incoming.ready(ongoing.peers[peer].rank, number, message.layers):
                    self._progressed(ongoing)
                    self._proceed(ongoing)

    def completed(self, transfer: Transfer[Any], error: Error | None) -> None:
        """Take the end of a link call or a pull."""
        if not self._dialing.completed(transfer, error) and transfer in self._pulls:
            ongoing = self._pulls.pop(transfer)
            self._pulled(ongoing, transfer, error)
            self._proceed(ongoing)

    def _loaded(self, copy: Copy, error: Exception | None) -> None:
        """Take the end of a copy to the device."""
        ongoing = self._pulls.pop(copy)
        pull = ongoing.pulls.pop(copy)
        pull.loads -= 1
        if error is not None:
            self._fail(ongoing, f"it was not copied to the device: {error}")
        elif not pull.loads and not ongoing.failure:
            if self._is_last(pull):
                self._done(ongoing, pull)
            self._progressed(ongoing)
        self._proceed(ongoing)

    def _rows_free(self, ongoing: _Ongoing) -> None:
        """Go on with a receive whose rows no save writes to any more."""
        ongoing.rows_in_use = False
        if self._ongoing.get(ongoing.request) is ongoing:
            self._proceed(ongoing)

    def due(self, now: float) -> None:
        """Fail the receives whose time limit has passed."""
        while self._deadlines and next(iter(self._deadlines.values())).deadline <= now:
            ongoing = next(iter(self._deadlines.values()))
            text = "" if ongoing.incoming.begun else "; prefill has lent no blocks of it, and may have it in its queue"
            self._fail(ongoing, f"no progress within {self._limit_s:g} s{text}")

    def next_due(self) -> float | None:
        """Return when ``due`` has something to do, or ``None``."""
        return next((ongoing.deadline for ongoing in self._deadlines.values()), None)

    def _begin(self, ongoing: _Ongoing, order: Receive) -> None:
        handover = ongoing.handover
        ranks = len(ongoing.ranks_of_prefill)
        view = PAGES if handover.block_sizes == [group.form.block_size for group in self._groups] else HEADS
        reads = {source.rank for source in self._shard.sources(ranks) if source.reads}
        # If the heads differ, the engine converts all layers of a part in one transfer.
        by_layers = (
            view == PAGES
            and len(self._groups) == 1
            and [heads_of(rank, ranks, self._shard.total_heads) for rank in reads] == [self._shard.heads]
        )
        layers = max(group.form.layers for group in self._groups)
        blocks = max(-(-order.num_tokens // size) for size in handover.block_sizes)
        missing = _missing(order, handover.block_sizes, view)
        ongoing.view = view
        # With host buffers, some layers go to the device while the next ones are pulled.
        most = 0 if self._loads is None else self._loads.layers_per_copy
        given = (missing, blocks, reads, view, layers)
        ongoing.incoming = Incoming(*given, by_layers=by_layers, layers_per_pull=most)

    def _link(self, ongoing: _Ongoing, source: Source) -> None:
        """Hold a request at a rank of prefill, as soon as it is linked. A request that has failed does not wait."""
        try:
            self._dialing.link(ongoing.rank_of_prefill(source), partial(self._linked, ongoing, source))
        except Exception as error:  # noqa: BLE001 - one request fails, not the thread
            self._fail(ongoing, str(error))
            return
        if not ongoing.failure:
            ongoing.links.add(source)

    def _linked(self, ongoing: _Ongoing, source: Source, found: Peer | Error) -> None:
        """Take the link to a rank of prefill, or why there is none."""
        waits = source in ongoing.links  # it has not failed in the meantime
        ongoing.links.discard(source)
        if not isinstance(found, Error):
            self._connected(ongoing, source, found)
        elif waits:
            self._fail(ongoing, str(found))
        if waits:
            self._progressed(ongoing)
            self._proceed(ongoing)

    def _connected(self, ongoing: _Ongoing, source: Source, peer: Peer) -> None:
        """Hold a request at a rank of prefill that is linked, and ask for its blocks if there is room for them."""
        # Also if it has failed or does not fit: prefill then learns at once that nothing is read.
        hold = Hold(ongoing.handover.ticket, source.readers, ongoing.handover.decodes)
        if ongoing.failure:
            self._release(ongoing, peer, source, hold)
            return
        ongoing.peers[peer] = source
        if not self._told(ongoing, peer, hold):
            return
        try:
            if self._identity is not None:
                self._identity.check(peer.metadata)
        except ValueError as error:
            self._fail(ongoing, f"prefill does not fit to decode: {printable(str(error))}")
        self._ask(ongoing, peer)

    def _ask(self, ongoing: _Ongoing, peer: Peer) -> None:
        """Ask a rank of prefill for the request, if it is read."""
        if not ongoing.failure and ongoing.peers[peer].reads and not ongoing.incoming.complete:
            handover = ongoing.handover
            self._told(ongoing, peer, Ask(handover.ticket, ongoing.number, ongoing.view, handover.prompt))

    def _told(self, ongoing: _Ongoing, peer: Peer, message: Message) -> bool:
        """Send a message to prefill. Without a link, the receive fails."""
        try:
            self._notify(peer, message)
        except Error as error:
            self._fail(ongoing, str(error))
            return False
        return True

    def _asking(self, peer: Peer, ticket: str) -> list[_Ongoing]:
        of_ticket = self._by_ticket.get(ticket, ())
        return [ongoing for ongoing in of_ticket if peer in ongoing.peers and not ongoing.failure]

    def _lent(self, ongoing: _Ongoing, peer: Peer, message: Lent) -> None:
        try:
            wanted = ongoing.incoming.lent(ongoing.peers[peer].rank, message)
        except ValueError as error:
            self._fail(ongoing, str(error))
            return
        if wanted:
            self._progressed(ongoing)
            self._proceed(ongoing)

    def _pulled(self, ongoing: _Ongoing, transfer: Transfer[None], error: Error | None) -> None:
        """Take the end of one transfer of a pull."""
        pull = ongoing.pulls.pop(transfer)
        pull.transfers -= 1
        pull.nanos = max(pull.nanos, transfer.nanos)
        ongoing.moved += transfer.bytes
        if isinstance(error, GrantEnded):
            pull.lost = True
        elif error is not None:
            self._fail(ongoing, str(error))
        if pull.transfers:
            return
        ongoing.nanos += pull.nanos
        if pull.lost:
            # If prefill has preempted the request, it lends the blocks again.
            ongoing.incoming.lost(pull)
        elif not ongoing.failure:
            if self._loads is None or not self._is_last(pull):
                # With host buffers, the next layers are pulled while these go to the device.
                self._done(ongoing, pull)
            self._progressed(ongoing)
            if self._loads is not None:
                self._load(ongoing, ongoing.order, pull, self._loads)

    def _is_last(self, pull: Pull) -> bool:
        """Whether the blocks of a pull are complete after it. Its load ends after those of the layers before."""
        return pull.layers.stop == max(group.form.layers for group in self._groups)

    def _done(self, ongoing: _Ongoing, pull: Pull) -> None:
        ongoing.blocks += ongoing.incoming.done(pull)

    def _load(self, ongoing: _Ongoing, order: Any, pull: Pull, loads: HostLoads) -> None:
        """Copy the blocks of a pull to the device. ``order`` is that of the receive."""
        some = pull.layers if len(self._groups) == 1 else None
        for number, wanted in enumerate(pull.part.wanted):
            if not wanted:
                continue
            if ongoing.view == HEADS:
                blocks = self._blocks_and_offsets(number, order, ongoing.handover, pull.part)[0][1]
            else:
                blocks = [order.blocks[number][index] for index in wanted]
            try:
                copy = loads.begin(number, some, blocks, ongoing.mark, self._loaded)
            except RuntimeError as error:
                self._fail(ongoing, str(error))
                return
            pull.loads += 1
            ongoing.pulls[copy] = pull
            self._pulls[copy] = ongoing

    def _progressed(self, ongoing: _Ongoing) -> None:
        if not ongoing.failure and ongoing.order is not None:
            ongoing.deadline = time.monotonic() + self._limit_s
            self._deadlines[ongoing.request] = ongoing
            self._deadlines.move_to_end(ongoing.request)

    def _left(self, ongoing: _Ongoing) -> float:
        return max(0.001, ongoing.deadline - time.monotonic())

    def _proceed(self, ongoing: _Ongoing) -> None:
        """Start the pulls that can run. End the receive when no pull runs, and it is complete or has failed."""
        if ongoing.request not in self._ongoing or ongoing.links:
            return
        order = ongoing.order
        if order is not None and not ongoing.failure and not ongoing.rows_in_use:
            try:
                for pull in ongoing.incoming.start():
                    self._pull(ongoing, order, pull)
            except Exception as error:  # noqa: BLE001 - one request fails, not the thread
                self._fail(ongoing, str(error))
                return
        decided = order is not None or ongoing.cancelled
        if decided and not ongoing.pulls and (ongoing.incoming.complete or ongoing.failure):
            self._end(ongoing)

    def _pull(self, ongoing: _Ongoing, order: Receive, pull: Pull) -> None:
        part, layers = pull.part, self._groups[0].form.layers
        ranks = len(ongoing.ranks_of_prefill)
        owners = [
            Owner(peer, heads_of(source.rank, ranks, self._shard.total_heads), part.grants[source.rank])
            for peer, source in ongoing.peers.items()
            if source.rank in part.grants
        ]
        for number, (group, wanted) in enumerate(zip(self._groups, part.wanted)):
            if not wanted:
                continue
            if ongoing.view == HEADS:
                blocks = self._blocks_and_offsets(number, order, ongoing.handover, part)
                transfer = group.pull_heads(owners, *blocks, self._left(ongoing))
            else:
                theirs, ours = part.blocks[number], order.blocks[number]
                pairs = [(theirs[index - part.first], ours[index]) for index in wanted]
                some = None if len(pull.layers) == layers or len(self._groups) > 1 else pull.layers
                transfer = group.pull_pages(owners, pairs, self._left(ongoing), some)
            pull.transfers += 1
            ongoing.pulls[transfer] = pull
            self._pulls[transfer] = ongoing

    def _blocks_and_offsets(
        self, number: int, order: Receive, handover: Handover, part: LentPart
    ) -> tuple[tuple[list[int], list[int]], range, int]:
        """Return the blocks on both sides, the tokens and the block size of a pull between different block sizes."""
        size, theirs = self._groups[number].form.block_size, handover.block_sizes[number]
        first = max(order.first_token, part.first * theirs)
        end = min(order.num_tokens, part.end * theirs)
        src = part.blocks[number][first // theirs - part.first :]
        dst = order.blocks[number][first // size : -(-end // size)]
        if not all(src) or not all(dst):
            raise ValueError(f"models with a sliding window need equal block sizes (prefill: {theirs}, decode: {size})")
        return (src, dst), range(first, end), theirs

    def _fail(self, ongoing: _Ongoing, failure: str) -> None:
        ongoing.failure = ongoing.failure or failure
        self._deadlines.pop(ongoing.request, None)
        ongoing.links.clear()
        for transfer in list(ongoing.pulls):
            transfer.cancel()
        if not ongoing.pulls:
            self._release_all(ongoing)
        self._proceed(ongoing)

    def _end(self, ongoing: _Ongoing) -> None:
        self._release_all(ongoing)
        ticket = ongoing.handover.ticket
        del self._ongoing[ongoing.request]
        self._deadlines.pop(ongoing.request, None)
        self._by_ticket[ticket].remove(ongoing)
        if not self._by_ticket[ticket]:
            del self._by_ticket[ticket]
        if ongoing.order is not None:
            self._report(ongoing)

    def _release_all(self, ongoing: _Ongoing) -> None:
        """Report to the linked ranks of prefill that this request needs nothing more of them."""
        for peer, source in ongoing.peers.items():
            self._release(ongoing, peer, source)
        ongoing.peers.clear()

    def _release(self, ongoing: _Ongoing, peer: Peer, source: Source, *before: Message) -> None:
        """Send messages and ``Done`` to a rank of prefill, unless another request here reads it.

        A request for several completions (n > 1) is several requests here, with one ticket.
        """
        ticket, rank = ongoing.handover.ticket, ongoing.rank_of_prefill(source)
        for other in self._by_ticket.get(ticket, ()):
            if other is not ongoing and rank in map(other.rank_of_prefill, (*other.peers.values(), *other.links)):
                return
        with suppress(Error):  # without a link, prefill frees the blocks
            for message in (*before, Done(ticket)):
                self._notify(peer, message)

    def _report(self, ongoing: _Ongoing) -> None:
        failure = "" if ongoing.cancelled else ongoing.failure
        if failure:
            addresses = ", ".join(ongoing.handover.addresses)
            logger.error("request %s was not received from prefill at %s: %s", ongoing.request, addresses, failure)
        took = time.monotonic() - ongoing.begin
        figures = (took, ongoing.nanos / 1e9, ongoing.moved, ongoing.blocks)
        self._ended(Outcome(ongoing.request, failure, ongoing.cancelled, *figures))


def _missing(order: Receive, sizes: list[int], view: str) -> list[set[int]]:
    """Return the indexes of the blocks that are needed, in blocks of prefill, for each KV cache group."""
    if view == PAGES:
        return [{index for index, block in enumerate(blocks) if block} for blocks in order.blocks]
    return [set(range(order.first_token // size, -(-order.num_tokens // size))) for size in sizes]
