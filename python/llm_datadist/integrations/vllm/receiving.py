"""Decode: the requests that are being received from prefill, each from the link to the last byte.

For each rank of prefill that it reads, a receive ensures a link, and asks for the blocks. Prefill lends them in
parts, and each part is pulled as its layers become ready. A receive ends when all of its pulls have ended, so nothing
writes to vLLM's blocks after that.
"""

from __future__ import annotations

import itertools
import logging
import time
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llm_datadist import Error, GrantEnded
from llm_datadist.integrations.vllm.group_caches import HEADS, PAGES, Owner
from llm_datadist.integrations.vllm.incoming import Incoming
from llm_datadist.integrations.vllm.messages import MAX_NUMBER, Ask, Done, Gone, Lent
from llm_datadist.integrations.vllm.ranks import engine_name, heads_of

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from llm_datadist.integrations.vllm.group_caches import GroupCaches
    from llm_datadist.integrations.vllm.incoming import LentPart, Pull
    from llm_datadist.integrations.vllm.messages import Message, Ready
    from llm_datadist.integrations.vllm.ranks import Shard, Source
    from llm_datadist.integrations.vllm.step import Receive
    from llm_datadist.native import Engine, Peer, Transfer

__all__ = ["Outcome", "Receiving"]

logger = logging.getLogger("vllm.llm_datadist")

# Maximum number of characters of a reason from prefill that are kept.
MAX_REASON = 1000


@dataclass(frozen=True)
class Outcome:
    """How a receive has ended."""

    request: str  # the id of the request
    failure: str  # why it failed, or an empty text
    receive_seconds: float  # time since the receive began
    transfer_seconds: float  # sum of the durations of the pulls, also of those that overlap
    bytes: int  # those that were pulled, also of parts that were withdrawn in the meantime
    blocks: int  # number of blocks


@dataclass
class _Ongoing:
    receive: Receive
    number: int
    view: str
    incoming: Incoming
    begin: float
    deadline: float
    peers: dict[Peer, Source] = field(default_factory=dict)  # those that are linked
    links: dict[Transfer[Peer], Source] = field(default_factory=dict)
    pulls: dict[Transfer[None], Pull] = field(default_factory=dict)
    blocks: int = 0
    moved: int = 0
    nanos: int = 0
    failure: str = ""

    def place(self, source: Source) -> tuple[str, str]:
        """Return the address and the name of the engine of a rank of prefill."""
        handover = self.receive.handover
        return handover.addresses[source.rank], engine_name(handover.engine_id, source.rank)


class Receiving:
    """The receives of this worker. Only the transfer thread uses it.

    Args:
        engine: the engine.
        groups: the caches of the KV cache groups.
        shard: the part of the KV cache that this worker holds.
        limit_s: how long a receive may take between two signs of progress, in seconds.
        notify: sends a message to a peer.
        ended: takes the outcome of each receive that has blocks.
    """

    def __init__(
        self,
        engine: Engine,
        groups: list[GroupCaches],
        shard: Shard,
        limit_s: float,
        notify: Callable[[Peer, Message], None],
        ended: Callable[[Outcome], None],
    ) -> None:
        self._engine = engine
        self._groups = groups
        self._shard = shard
        self._limit_s = limit_s
        self._notify = notify
        self._ended = ended
        self._ongoing: dict[str, _Ongoing] = {}
        self._by_ticket: dict[str, list[_Ongoing]] = {}
        self._transfers: dict[Transfer[Any], _Ongoing] = {}
        # The linked ranks of prefill, by address and name.
        self._linked: dict[tuple[str, str], Peer] = {}
        self._numbers = itertools.count()

    def begin(self, receive: Receive, now: float) -> None:
        """Begin to receive a request. A failure becomes the outcome of the receive."""
        try:
            self._begin(receive, now)
        except Exception as error:  # noqa: BLE001 - one request fails, not the thread
            if receive.request in self._ongoing:
                self._fail(self._ongoing[receive.request], str(error))
            else:
                self._report(receive, str(error), (0, 0, 0, 0))

    def _begin(self, receive: Receive, now: float) -> None:
        handover = receive.handover
        ranks = len(handover.addresses)
        sources = self._shard.sources(ranks)
        view = PAGES if handover.block_sizes == [group.form.block_size for group in self._groups] else HEADS
        reads = {source.rank for source in sources if source.reads}
        # If the heads differ, the engine converts all layers of a part in one transfer.
        by_layers = (
            view == PAGES
            and len(self._groups) == 1
            and [heads_of(rank, ranks, self._shard.total_heads) for rank in reads] == [self._shard.heads]
        )
        layers = max(group.form.layers for group in self._groups)
        blocks = max(-(-receive.num_tokens // size) for size in handover.block_sizes)
        incoming = Incoming(self._missing(receive, view), blocks, reads, view, layers, by_layers=by_layers)
        number = next(self._numbers) % MAX_NUMBER
        ongoing = _Ongoing(receive, number, view, incoming, now, now + self._limit_s)
        self._ongoing[receive.request] = ongoing
        self._by_ticket.setdefault(handover.ticket, []).append(ongoing)
        # The linked ranks first: they get ``Done`` even if a link call to another one fails at once.
        linked = {source: self._linked.get(ongoing.place(source)) for source in sources}
        ongoing.peers.update({peer: source for source, peer in linked.items() if peer is not None})
        for source, peer in linked.items():
            if peer is None:
                self._link(ongoing, source)
        for peer in list(ongoing.peers):
            self._ask(ongoing, peer)
        self._proceed(ongoing)

    def unlinked(self, peer: Peer, reason: str) -> None:
        """Fail the receives that wait for a peer. Pulls that run end by themselves."""
        self._forget(peer)
        for ongoing in list(self._ongoing.values()):
            if peer in ongoing.peers and ongoing.incoming.waits:
                self._fail(ongoing, f"the link to {peer.name} broke: {reason}")

    def heard(self, peer: Peer, message: Lent | Ready | Gone) -> None:
        """Take news from prefill."""
        if isinstance(message, (Lent, Gone)):
            asking = [one for one in self._asking(peer, message.ticket) if one.number == message.receive]
            for ongoing in asking:
                if isinstance(message, Lent):
                    self._lent(ongoing, peer, message)
                else:
                    self._fail(ongoing, f"prefill does not lend it: {_printable(message.reason)}")
            return
        for ticket, number in message.parts:
            for ongoing in self._asking(peer, ticket):
                if ongoing.incoming.ready(ongoing.peers[peer].rank, number, message.layers):
                    self._progressed(ongoing)
                    self._proceed(ongoing)

    def completed(self, transfer: Transfer[Any], error: Error | None) -> None:
        """Take the end of a link call or a pull."""
        ongoing = self._transfers.pop(transfer, None)
        if ongoing is None:
            return
        if transfer in ongoing.pulls:
            self._pulled(ongoing, transfer, error)
        elif error is not None:
            source = ongoing.links.pop(transfer)
            peer = self._linked.get(ongoing.place(source))
            if peer is not None:
                # Another receive has linked to the rank. If it has ended, this one sends ``Done``.
                ongoing.peers[peer] = source
            self._fail(ongoing, str(error))
        else:
            source, peer = ongoing.links.pop(transfer), transfer.result()
            ongoing.peers[peer] = source
            if peer.alive:
                self._linked[ongoing.place(source)] = peer
            self._progressed(ongoing)
            self._ask(ongoing, peer)
        self._proceed(ongoing)

    def due(self, now: float) -> None:
        """Fail the receives whose time limit has passed."""
        for ongoing in [ongoing for ongoing in self._waiting() if ongoing.deadline <= now]:
            self._fail(ongoing, f"no progress within {self._limit_s:g} s")

    def next_due(self) -> float | None:
        """Return when ``due`` has something to do, or ``None``."""
        return min((ongoing.deadline for ongoing in self._waiting()), default=None)

    def _waiting(self) -> list[_Ongoing]:
        """Return the receives that have not failed. A failed one ends when its last pull ends."""
        return [ongoing for ongoing in self._ongoing.values() if not ongoing.failure]

    def _missing(self, receive: Receive, view: str) -> list[set[int]]:
        """Return the indexes of the blocks that are needed, in blocks of prefill, for each KV cache group."""
        if view == PAGES or not receive.blocks:
            return [{index for index, block in enumerate(blocks) if block} for blocks in receive.blocks]
        sizes = receive.handover.block_sizes
        return [set(range(receive.first_token // size, -(-receive.num_tokens // size))) for size in sizes]

    def _link(self, ongoing: _Ongoing, source: Source) -> None:
        address, name = ongoing.place(source)
        transfer = self._engine.link(address, name=name, timeout=self._left(ongoing))
        ongoing.links[transfer] = source
        self._transfers[transfer] = ongoing

    def _forget(self, peer: Peer) -> None:
        self._linked = {place: other for place, other in self._linked.items() if other != peer}

    def _ask(self, ongoing: _Ongoing, peer: Peer) -> None:
        """Ask a rank of prefill for the request, if it is read."""
        if ongoing.failure or not ongoing.peers[peer].reads or ongoing.incoming.complete:
            return
        handover = ongoing.receive.handover
        try:
            self._notify(peer, Ask(handover.ticket, ongoing.number, ongoing.view, handover.prompt))
        except Error as error:
            # Its link has ended. The next receive links again.
            self._forget(peer)
            self._fail(ongoing, str(error))

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
            # If prefill has preempted the request, it lends the blocks again. If only the grants have expired, it makes
            # new ones when decode asks again.
            ongoing.incoming.lost(pull)
            for peer in list(ongoing.peers):
                self._ask(ongoing, peer)
        elif not ongoing.failure:
            ongoing.blocks += ongoing.incoming.done(pull)
            self._progressed(ongoing)

    def _progressed(self, ongoing: _Ongoing) -> None:
        if not ongoing.failure:
            ongoing.deadline = time.monotonic() + self._limit_s

    def _left(self, ongoing: _Ongoing) -> float:
        return max(0.001, ongoing.deadline - time.monotonic())

    def _proceed(self, ongoing: _Ongoing) -> None:
        """Start the pulls that can run. End the receive when no pull runs, and it is complete or has failed."""
        if ongoing.receive.request not in self._ongoing or ongoing.links:
            return
        if not ongoing.failure:
            try:
                for pull in ongoing.incoming.start():
                    self._pull(ongoing, pull)
            except Exception as error:  # noqa: BLE001 - one request fails, not the thread
                self._fail(ongoing, str(error))
                return
        if not ongoing.pulls and (ongoing.incoming.complete or ongoing.failure):
            self._end(ongoing)

    def _pull(self, ongoing: _Ongoing, pull: Pull) -> None:
        part, layers = pull.part, self._groups[0].form.layers
        ranks = len(ongoing.receive.handover.addresses)
        owners = [
            Owner(peer, heads_of(source.rank, ranks, self._shard.total_heads), part.grants[source.rank])
            for peer, source in ongoing.peers.items()
            if source.rank in part.grants
        ]
        for number, (group, wanted) in enumerate(zip(self._groups, part.wanted)):
            if not wanted:
                continue
            if ongoing.view == HEADS:
                transfer = self._pull_heads(group, number, owners, ongoing, part)
            else:
                theirs, ours = part.blocks[number], ongoing.receive.blocks[number]
                pairs = [(theirs[index - part.first], ours[index]) for index in wanted]
                some = None if len(pull.layers) == layers or len(self._groups) > 1 else pull.layers
                transfer = group.pull_pages(owners, pairs, self._left(ongoing), some)
            pull.transfers += 1
            ongoing.pulls[transfer] = pull
            self._transfers[transfer] = ongoing

    def _pull_heads(
        self, group: GroupCaches, number: int, owners: list[Owner], ongoing: _Ongoing, part: LentPart
    ) -> Transfer[None]:
        """Start to pull the tokens of a part between different block sizes."""
        receive = ongoing.receive
        size, theirs = group.form.block_size, receive.handover.block_sizes[number]
        first = max(receive.first_token, part.first * theirs)
        end = min(receive.num_tokens, part.end * theirs)
        src = part.blocks[number][first // theirs - part.first :]
        dst = receive.blocks[number][first // size : -(-end // size)]
        if not all(src) or not all(dst):
            raise ValueError(f"models with a sliding window need equal block sizes (prefill: {theirs}, decode: {size})")
        return group.pull_heads(owners, (src, dst), range(first, end), theirs, self._left(ongoing))

    def _fail(self, ongoing: _Ongoing, failure: str) -> None:
        ongoing.failure = ongoing.failure or failure
        for transfer in [*ongoing.links, *ongoing.pulls]:
            transfer.cancel()
        self._proceed(ongoing)

    def _end(self, ongoing: _Ongoing) -> None:
        ticket = ongoing.receive.handover.ticket
        del self._ongoing[ongoing.receive.request]
        # A request for several completions (n > 1) is several requests here, with one ticket.
        others = [other for other in self._by_ticket.pop(ticket) if other is not ongoing]
        if others:
            self._by_ticket[ticket] = others
        read = [(other, source) for other in others for source in (*other.peers.values(), *other.links.values())]
        self._report_done(ongoing, {other.place(source) for other, source in read})
        took = time.monotonic() - ongoing.begin
        figures = (took, ongoing.nanos / 1e9, ongoing.moved, ongoing.blocks)
        self._report(ongoing.receive, ongoing.failure, figures)

    def _report_done(self, ongoing: _Ongoing, still_read: set[tuple[str, str]]) -> None:
        """Send ``Done`` to the ranks that no other receive reads or dials. Without a link, the lease ends the loan."""
        ticket = ongoing.receive.handover.ticket
        for peer, source in ongoing.peers.items():
            if peer.alive and ongoing.place(source) not in still_read:
                try:
                    self._notify(peer, Done(ticket, source.readers))
                except Error as error:
                    text = "cannot send Done of %s to %s, so its blocks wait for the end of the lease: %s"
                    logger.warning(text, ticket, peer.name, error)

    def _report(self, receive: Receive, failure: str, figures: tuple[float, float, int, int]) -> None:
        if failure:
            addresses = ", ".join(receive.handover.addresses)
            logger.error("request %s was not received from prefill at %s: %s", receive.request, addresses, failure)
        if receive.blocks:
            self._ended(Outcome(receive.request, failure, *figures))


def _printable(reason: str) -> str:
    """Return a reason that a peer has given, fit for the log."""
    return "".join(letter if letter.isprintable() else "?" for letter in reason[:MAX_REASON])
