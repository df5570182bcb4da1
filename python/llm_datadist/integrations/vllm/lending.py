"""Prefill: which requests are lent to decode, and until when.

A request is lent in parts. Each part has grants, which are made when decode asks, because only decode knows through
which view it reads. A request that has finished is kept until every rank of decode has reported, or its lease has
ended.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llm_datadist import GrantEnded
from llm_datadist.integrations.vllm.group_caches import revoke_all
from llm_datadist.integrations.vllm.messages import Ask, Done, Gone, Lent, Ready

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist.integrations.vllm.group_caches import GroupCaches
    from llm_datadist.integrations.vllm.messages import Message
    from llm_datadist.integrations.vllm.step import Part, Send, Withdraw
    from llm_datadist.native import Grant, Peer

__all__ = ["Lending"]

logger = logging.getLogger("vllm.llm_datadist")

# Maximum number of ended tickets that are remembered.
MAX_PAST = 4096
# Maximum number of messages of one peer that wait for tickets which this worker does not know.
MAX_EARLY = 1024
# Maximum number of receives of one peer that read a request at a time.
MAX_RECEIVES = 1024
# Maximum number of parts in a ``Ready``, so that the message fits into 64 KiB with the longest tickets.
MAX_READY = 24


@dataclass
class _LentPart:
    part: Part
    layers: int
    # For each KV cache group, one grant for each cache of the view.
    grants: list[list[Grant]] = field(default_factory=list)

    def all_grants(self) -> list[Grant]:
        return [grant for grants in self.grants for grant in grants]

    def revoke(self) -> None:
        """End the grants. This does not wait for the reads that run, which fail."""
        revoke_all(self.all_grants())
        self.grants = []


@dataclass
class _Loan:
    prompt: str
    parts: dict[int, _LentPart] = field(default_factory=dict)
    view: str = ""
    # The receives that read it, as peer and number, in the order in which they have asked.
    receives: dict[tuple[Peer, int], None] = field(default_factory=dict)
    # The names of the peers that have sent ``Done``. A rank of decode that was restarted counts once.
    done: set[str] = field(default_factory=set)
    # The reason why nothing is lent any more. The loan then waits until vLLM has finished the request.
    ended: str = ""
    # Set when the request has finished: its id, and the time at which its lease ends.
    request: str = ""
    lease_end: float | None = None

    def withdraw(self) -> None:
        for lent in self.parts.values():
            lent.revoke()
        self.parts.clear()


@dataclass
class _EarlyMessage:
    peer: Peer
    message: Ask | Done
    end: float


class Lending:
    """The requests that this worker lends. Only the transfer thread uses it.

    Args:
        groups: the caches of the KV cache groups.
        lease_s: how long a request is kept, in seconds.
        early_s: how long a message with a ticket that is not known here waits, in seconds.
        notify: sends a message to a peer.
        freed: takes a request whose blocks vLLM may free, and whether its lease has expired.
    """

    def __init__(
        self,
        groups: list[GroupCaches],
        lease_s: float,
        early_s: float,
        notify: Callable[[Peer, Message], None],
        freed: Callable[[str, bool], None],
    ) -> None:
        self._groups = groups
        self._layers = max(group.form.layers for group in groups)
        self._lease_s = lease_s
        self._early_s = early_s
        self._notify = notify
        self._freed = freed
        self._loans: dict[str, _Loan] = {}
        self._early: list[_EarlyMessage] = []  # the oldest first
        # Tickets that are not lent any more, and the reasons.
        self._past: OrderedDict[str, str] = OrderedDict()

    def lend(self, part: Part, now: float) -> None:
        """Lend a part of a request."""
        loan = self._loans.get(part.ticket)
        if loan is None:
            loan = self._loans[part.ticket] = _Loan(part.prompt)
            self._past.pop(part.ticket, None)
        if loan.ended:
            return
        lent = loan.parts[part.number] = _LentPart(part, self._layers if part.computed else 0)
        for receive in loan.receives:
            self._offer(receive, loan, lent, now)
        for early in self._take_early(part.ticket):
            self.heard(early.peer, early.message, now)

    def ready(self, parts: list[tuple[str, int]], layers: int | None) -> None:
        """Notify decode how many layers of parts are computed; ``None`` stands for all."""
        count = self._layers if layers is None else layers
        news: dict[Peer, list[list[str | int]]] = {}
        for ticket, number in parts:
            loan = self._loans.get(ticket)
            lent = None if loan is None else loan.parts.get(number)
            if loan is not None and lent is not None:
                lent.layers = count
                for peer in {peer for peer, _ in loan.receives}:
                    news.setdefault(peer, []).append([ticket, number])
        for peer, pairs in news.items():
            for at in range(0, len(pairs), MAX_READY):
                self._notify(peer, Ready(pairs[at : at + MAX_READY], count))

    def finish(self, send: Send, now: float) -> None:
        """Keep a request that has finished."""
        loan = self._loans[send.ticket]
        loan.request, loan.lease_end = send.request, now + self._lease_s
        if loan.ended:
            self._free(send.ticket, expired=False)

    def fail(self, parts: list[tuple[str, int]], reason: str) -> None:
        """Lend nothing more of the requests with these parts, because they were not computed."""
        for ticket, number in parts:
            loan = self._loans.get(ticket)
            if loan is not None and number in loan.parts:
                self._end(ticket, reason, expired=False)

    def withdraw(self, order: Withdraw) -> None:
        """Withdraw all parts of a request. No pull that is still running succeeds after this returns."""
        loan = self._loans.get(order.ticket)
        if loan is not None:
            loan.withdraw()
        if order.ended:
            reason = "the request has ended without a result"
            self._tell(order.ticket, reason)
            self._loans.pop(order.ticket, None)
            self._remember(order.ticket, reason)

    def heard(self, peer: Peer, message: Ask | Done, now: float) -> None:
        """Take a message from decode."""
        loan = self._loans.get(message.ticket)
        if loan is None:
            self._not_lent(peer, message, now)
        elif isinstance(message, Ask):
            self._begin(peer, message, loan, now)
        elif not loan.ended:
            # A peer reports when all of its receives have ended.
            loan.done.add(peer.name)
            loan.receives = {receive: None for receive in loan.receives if receive[0] != peer}
            if len(loan.done) >= message.readers:
                reason = "prefill has freed the blocks, because all ranks of decode had reported"
                self._end(message.ticket, reason, expired=False)

    def due(self, now: float) -> None:
        """End leases, and the wait for requests that never came."""
        for ticket in [name for name, loan in self._loans.items() if loan.lease_end and loan.lease_end <= now]:
            self._end(ticket, "its lease has ended", expired=True)
        reason = (
            f"prefill has lent no blocks with this ticket within {self._early_s:g} s (its timeout_ms); "
            "the request may be in its queue"
        )
        late = [early for early in self._early if early.end <= now]
        del self._early[: len(late)]
        self._refuse_early(late, reason)

    def next_due(self) -> float | None:
        """Return when ``due`` has something to do, or ``None``."""
        times = [loan.lease_end for loan in self._loans.values() if loan.lease_end]
        return min([*times, *(early.end for early in self._early[:1])], default=None)

    def _not_lent(self, peer: Peer, message: Ask | Done, now: float) -> None:
        ticket = message.ticket
        early = _EarlyMessage(peer, message, now + self._early_s)
        if ticket in self._past:
            self._refuse_early([early], self._past[ticket])
        elif sum(other.peer == peer for other in self._early) >= MAX_EARLY:
            self._refuse_early([early], f"more than {MAX_EARLY} messages of this rank of decode wait for blocks")
        else:
            # Decode may know of the request before this worker does.
            self._early.append(early)

    def _begin(self, peer: Peer, ask: Ask, loan: _Loan, now: float) -> None:
        reason = loan.ended
        if loan.prompt != ask.prompt:
            reason = "the prompt in decode differs from the prompt in prefill"
        elif not reason and loan.view and loan.view != ask.view:
            reason = (
                "the receives of one request must all have the block sizes of prefill, or all other ones "
                f"(first receive: view={loan.view}, this one: view={ask.view})"
            )
        elif not reason and sum(other == peer for other, _ in loan.receives) >= MAX_RECEIVES:
            reason = f"more than {MAX_RECEIVES} receives of this rank of decode read the request"
        if reason:
            self._notify(peer, Gone(ask.ticket, ask.receive, reason))
            return
        loan.view = ask.view
        loan.done.discard(peer.name)
        loan.receives[peer, ask.receive] = None
        for lent in loan.parts.values():
            self._offer((peer, ask.receive), loan, lent, now)

    def _offer(self, receive: tuple[Peer, int], loan: _Loan, lent: _LentPart, now: float) -> None:
        part, (peer, number) = lent.part, receive
        try:
            self._grant(loan, lent, now)
        except Exception as error:
            logger.exception("part %d of ticket %r is not lent to %s", part.number, part.ticket, peer)
            self._notify(peer, Gone(part.ticket, number, str(error)))
            return
        tokens = [[grant.token.hex() for grant in grants] for grants in lent.grants]
        place = (part.ticket, number, part.number, part.first, part.blocks)
        self._notify(peer, Lent(*place, tokens, lent.layers, part.last))

    def _grant(self, loan: _Loan, lent: _LentPart, now: float) -> None:
        """Have the grants of a part last as long as the lease. Make them if there are none, or if they have ended."""
        ttl = self._lease_s if loan.lease_end is None else max(0.001, loan.lease_end - now)
        try:
            for grant in lent.all_grants():
                grant.renew(ttl)
        except GrantEnded:
            lent.revoke()
        if lent.grants:
            return
        try:
            for group, blocks in zip(self._groups, lent.part.blocks):
                content = [block for block in blocks if block]
                lent.grants.append(group.lend(loan.view, content, ttl) if content else [])
        except Exception:
            lent.revoke()
            raise

    def _end(self, ticket: str, reason: str, *, expired: bool) -> None:
        self._tell(ticket, reason)
        loan = self._loans[ticket]
        loan.ended = reason
        loan.withdraw()
        self._remember(ticket, reason)
        if loan.lease_end is not None:
            self._free(ticket, expired=expired)

    def _free(self, ticket: str, *, expired: bool) -> None:
        self._freed(self._loans.pop(ticket).request, expired)

    def _tell(self, ticket: str, reason: str) -> None:
        """Send ``Gone`` to every receive that reads or awaits the request."""
        loan = self._loans.get(ticket)
        for peer, number in [] if loan is None else loan.receives:
            self._notify(peer, Gone(ticket, number, reason))
        self._refuse_early(self._take_early(ticket), reason)

    def _take_early(self, ticket: str) -> list[_EarlyMessage]:
        taken = [early for early in self._early if early.message.ticket == ticket]
        if taken:
            self._early = [early for early in self._early if early.message.ticket != ticket]
        return taken

    def _refuse_early(self, messages: list[_EarlyMessage], reason: str) -> None:
        for early in messages:
            if isinstance(early.message, Ask):
                self._notify(early.peer, Gone(early.message.ticket, early.message.receive, reason))

    def _remember(self, ticket: str, reason: str) -> None:
        self._past[ticket] = reason
        if len(self._past) > MAX_PAST:
            self._past.popitem(last=False)
