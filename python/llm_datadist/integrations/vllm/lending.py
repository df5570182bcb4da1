"""Prefill: which requests are lent to decode, and until when.

A request is lent in parts. Each part has grants, which are made when decode asks, because only decode knows through
which view it reads. The ranks of decode *hold* a request from the time at which it arrives in their queue. So a request
that has finished is kept until every rank has reported, or until the link to the last one that holds it ends. Only
while no rank holds it, a lease limits the time.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llm_datadist.integrations.vllm.group_caches import revoke_all
from llm_datadist.integrations.vllm.handover import MAX_DECODES
from llm_datadist.integrations.vllm.messages import Ask, Done, Gone, Hold, Lent, Ready
from llm_datadist.integrations.vllm.ranks import vllm_of

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
# Maximum number of requests that a peer holds at a time.
MAX_HELD = 16_384
# Maximum number of receives of a peer at a time, of all requests that it holds.
MAX_RECEIVES = 16_384
# Maximum number of parts in a ``Ready``, so that the message fits into 64 KiB with the longest tickets.
MAX_READY = 200
# Grants are revoked when a loan ends, so their own time limit never matters.
_GRANT_S = 4_000_000.0
_GIVEN_UP = "decode has given up the request, or its link has ended"


@dataclass
class _LentPart:
    part: Part
    layers: int
    # For each KV cache group, one grant for each cache of the view.
    grants: list[list[Grant]] = field(default_factory=list)

    def revoke(self) -> None:
        """End the grants. This does not wait for the reads that run, which fail."""
        revoke_all([grant for grants in self.grants for grant in grants])
        self.grants = []


@dataclass
class _Loan:
    """A request that is lent, or that decode holds before this worker knows it."""

    prompt: str | None = None  # the digest of the prompt, when the first part is lent
    parts: dict[int, _LentPart] = field(default_factory=dict)
    view: str = ""
    # The ranks of decode that hold it: none of them has reported since.
    holders: set[Peer] = field(default_factory=set)
    decodes: int = 1  # how many decodes must report
    # How many ranks of each decode that has held it must report, by engine id.
    readers: dict[str, int] = field(default_factory=dict)
    # The names of the peers that have reported, by engine id of their decode: at most as many as must report. A rank
    # of decode that was restarted counts once.
    done: dict[str, set[str]] = field(default_factory=dict)
    # The receives that read it, as peer and number, in the order in which they have asked.
    receives: dict[tuple[Peer, int], Ask] = field(default_factory=dict)
    # The reason why nothing is lent any more. The loan then waits until vLLM has finished the request.
    ended: str = ""
    request: str = ""  # its id, when it has finished

    @property
    def read(self) -> bool:
        """Whether all ranks of all decodes have reported."""
        reported = all(len(self.done.get(one, ())) >= number for one, number in self.readers.items())
        return len(self.readers) >= self.decodes and reported

    def withdraw(self) -> None:
        for lent in self.parts.values():
            lent.revoke()
        self.parts.clear()


class Lending:
    """The requests that this worker lends. Only the transfer thread uses it.

    Args:
        groups: the caches of the KV cache groups.
        lease_s: how long a finished request is kept while no rank of decode holds it, in seconds.
        notify: sends a message to a peer. It raises nothing.
        freed: takes a request whose blocks vLLM may free, and whether decode has not read it.
    """

    def __init__(
        self,
        groups: list[GroupCaches],
        lease_s: float,
        notify: Callable[[Peer, Message], None],
        freed: Callable[[str, bool], None],
    ) -> None:
        self._groups = groups
        self._layers = max(group.form.layers for group in groups)
        self._lease_s = lease_s
        self._notify = notify
        self._freed = freed
        self._loans: dict[str, _Loan] = {}
        # The tickets that each peer holds.
        self._held: dict[Peer, set[str]] = {}
        # How many receives of each peer the loans have.
        self._receives: Counter[Peer] = Counter()
        # The ends of the leases, by ticket, the earliest first.
        self._leases: OrderedDict[str, float] = OrderedDict()
        # Tickets that are not lent any more, and the reasons.
        self._past: OrderedDict[str, str] = OrderedDict()

    def lend(self, part: Part) -> None:
        """Lend a part of a request."""
        loan = self._loans.setdefault(part.ticket, _Loan())
        if loan.prompt is None:
            self._begin(loan, part)
        if loan.ended:
            return
        lent = loan.parts[part.number] = _LentPart(part, self._layers if part.computed else 0)
        for receive in loan.receives:
            self._offer(receive, loan, lent)

    def lends(self, part: Part) -> bool:
        """Whether a part is lent. Another part may have its ticket and number later."""
        loan = self._loans.get(part.ticket)
        lent = None if loan is None else loan.parts.get(part.number)
        return lent is not None and lent.part is part

    def ready(self, parts: list[Part], layers: int | None) -> None:
        """Notify decode how many layers of parts are computed; ``None`` stands for all."""
        count = self._layers if layers is None else layers
        news: dict[Peer, list[tuple[str, int]]] = {}
        for part in filter(self.lends, parts):
            loan = self._loans[part.ticket]
            loan.parts[part.number].layers = count
            for peer in {peer for peer, _ in loan.receives}:
                news.setdefault(peer, []).append((part.ticket, part.number))
        for peer, pairs in news.items():
            for at in range(0, len(pairs), MAX_READY):
                self._notify(peer, Ready(pairs[at : at + MAX_READY], count))

    def finish(self, send: Send, now: float) -> None:
        """Keep a request that has finished."""
        loan = self._loans[send.ticket]
        loan.request = send.request
        if loan.ended:
            self._free(send.ticket, unread=False)
        elif not loan.holders:
            self._leases[send.ticket] = now + self._lease_s

    def fail(self, parts: list[Part], reason: str) -> None:
        """Lend nothing more of the requests with these parts, because they were not computed."""
        for part in parts:
            if self.lends(part):
                self._end(part.ticket, reason, unread=False)

    def withdraw(self, order: Withdraw) -> None:
        """Withdraw all parts of a request. No pull that is still running succeeds after this returns."""
        loan = self._loans.get(order.ticket)
        if loan is not None:
            loan.withdraw()
        if order.ended:
            if loan is not None:
                self._tell(order.ticket, loan, "the request has ended without a result")
                del self._loans[order.ticket]
            self._remember(order.ticket, "the request has ended without a result")

    def heard(self, peer: Peer, message: Hold | Ask | Done, now: float) -> None:
        """Take a message from decode. Reports of peers that do not hold the request change nothing."""
        ticket = message.ticket
        if isinstance(message, Hold):
            self._hold(peer, message)
        elif isinstance(message, Ask):
            self._asked(peer, message)
        elif ticket in self._held.get(peer, ()):
            self._reported(peer, ticket, self._loans[ticket], now)

    def unlinked(self, peer: Peer) -> None:
        """End the loans that only this peer holds, because its link has ended."""
        for ticket in list(self._held.get(peer, ())):
            loan = self._loans[ticket]
            self._leave(peer, ticket, loan)
            if loan.holders:
                continue
            if loan.prompt is None:
                self._given_up(ticket)
            else:
                self._end(ticket, f"the link to {peer.name} of decode has ended", unread=True)

    def due(self, now: float) -> None:
        """End leases."""
        while self._leases and next(iter(self._leases.values())) <= now:
            self._end(next(iter(self._leases)), "its lease has ended", unread=True)

    def next_due(self) -> float | None:
        """Return when ``due`` has something to do, or ``None``."""
        return next(iter(self._leases.values()), None)

    def _begin(self, loan: _Loan, part: Part) -> None:
        """Lend the first part of a request. Decode may hold it, have asked for it, or have given it up before."""
        loan.prompt = part.prompt
        if self._past.pop(part.ticket, None) == _GIVEN_UP:
            self._end(part.ticket, "decode had given up the request before it was computed", unread=False)
        for receive, ask in list(loan.receives.items()):
            self._accept(receive, ask, loan)

    def _hold(self, peer: Peer, message: Hold) -> None:
        ticket = message.ticket
        loan = self._loans.get(ticket)
        over = ticket in self._past if loan is None else loan.ended
        if over or len(self._held.get(peer, ())) >= MAX_HELD:
            return  # ``Ask`` gets the reason
        decode = vllm_of(peer.name)
        if loan is not None and decode not in loan.readers and len(loan.readers) >= MAX_DECODES:
            return
        if loan is None:
            loan = self._loans[ticket] = _Loan()
        self._held.setdefault(peer, set()).add(ticket)
        loan.holders.add(peer)
        loan.decodes = max(loan.decodes, message.decodes)
        loan.readers[decode] = max(loan.readers.get(decode, 1), message.readers)
        loan.done.get(decode, set()).discard(peer.name)
        self._leases.pop(ticket, None)

    def _asked(self, peer: Peer, ask: Ask) -> None:
        loan = self._loans.get(ask.ticket)
        receive = (peer, ask.receive)
        if loan is None or peer not in loan.holders:
            reason = "" if loan is None else loan.ended
            limits = f"it holds {MAX_HELD} others, or {MAX_DECODES} other decodes hold this one"
            unheld = f"this rank of decode does not hold the request, or {limits}"
            self._notify(peer, Gone(ask.ticket, ask.receive, reason or self._past.get(ask.ticket, unheld)))
        elif self._receives[peer] >= MAX_RECEIVES:
            reason = f"this rank of decode has more than {MAX_RECEIVES} receives"
            self._notify(peer, Gone(ask.ticket, ask.receive, reason))
        else:
            self._receives[peer] += receive not in loan.receives
            loan.receives[receive] = ask
            if loan.prompt is not None:
                self._accept(receive, ask, loan)

    def _accept(self, receive: tuple[Peer, int], ask: Ask, loan: _Loan) -> None:
        reason = loan.ended
        if loan.prompt != ask.prompt:
            reason = "the prompt in decode differs from the prompt in prefill"
        elif not reason and loan.view and loan.view != ask.view:
            reason = (
                "the receives of one request must all have the block sizes of prefill, or all other ones "
                f"(first receive: view={loan.view}, this one: view={ask.view})"
            )
        if reason:
            self._drop(receive, loan)
            self._notify(receive[0], Gone(ask.ticket, ask.receive, reason))
            return
        loan.view = ask.view
        for lent in loan.parts.values():
            self._offer(receive, loan, lent)

    def _reported(self, peer: Peer, ticket: str, loan: _Loan, now: float) -> None:
        """Note that all receives of a peer have ended."""
        self._leave(peer, ticket, loan)
        decode = vllm_of(peer.name)
        # A peer may link under any number of names, and no more of them count than its decode has ranks.
        done = loan.done.setdefault(decode, set())
        if len(done) < loan.readers[decode]:
            done.add(peer.name)
        if loan.holders:
            return
        if loan.prompt is None:
            self._given_up(ticket)
        elif loan.read:
            reason = "prefill has freed the blocks, because all ranks of decode had reported"
            self._end(ticket, reason, unread=False)
        elif loan.request:
            self._leases[ticket] = now + self._lease_s

    def _given_up(self, ticket: str) -> None:
        """Forget a request that no rank of decode holds any more, before its first part is lent."""
        # The other ranks of decode report the same soon.
        del self._loans[ticket]
        self._remember(ticket, _GIVEN_UP)

    def _leave(self, peer: Peer, ticket: str, loan: _Loan) -> None:
        """Forget that a peer holds a request."""
        loan.holders.discard(peer)
        for receive in [receive for receive in loan.receives if receive[0] == peer]:
            self._drop(receive, loan)
        held = self._held[peer]
        held.discard(ticket)
        if not held:
            del self._held[peer]

    def _drop(self, receive: tuple[Peer, int], loan: _Loan) -> None:
        del loan.receives[receive]
        self._receives[receive[0]] -= 1
        if not self._receives[receive[0]]:
            del self._receives[receive[0]]

    def _offer(self, receive: tuple[Peer, int], loan: _Loan, lent: _LentPart) -> None:
        part, (peer, number) = lent.part, receive
        try:
            if not lent.grants:  # an earlier receive may have them
                for group, blocks in zip(self._groups, part.blocks):
                    content = [block for block in blocks if block]
                    lent.grants.append(group.lend(loan.view, content, _GRANT_S) if content else [])
        except Exception as error:
            lent.revoke()
            logger.exception("part %d of ticket %r is not lent to %s", part.number, part.ticket, peer)
            self._notify(peer, Gone(part.ticket, number, str(error)))
            return
        tokens = [[grant.token for grant in grants] for grants in lent.grants]
        common = (part.ticket, number, part.number, part.first, part.blocks)
        self._notify(peer, Lent(*common, tokens, lent.layers, part.last))

    def _end(self, ticket: str, reason: str, *, unread: bool) -> None:
        loan = self._loans[ticket]
        loan.ended = reason
        loan.withdraw()
        self._tell(ticket, loan, reason)
        self._leases.pop(ticket, None)
        self._remember(ticket, reason)
        if loan.request:
            self._free(ticket, unread=unread)

    def _free(self, ticket: str, *, unread: bool) -> None:
        self._freed(self._loans.pop(ticket).request, unread)

    def _tell(self, ticket: str, loan: _Loan, reason: str) -> None:
        """Send ``Gone`` to every receive that reads or awaits the request. Nobody holds it any more."""
        for peer, number in loan.receives:
            self._notify(peer, Gone(ticket, number, reason))
        for peer in list(loan.holders):
            self._leave(peer, ticket, loan)

    def _remember(self, ticket: str, reason: str) -> None:
        self._past[ticket] = reason
        if len(self._past) > MAX_PAST:
            self._past.popitem(last=False)
