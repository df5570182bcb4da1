"""Prefill: which requests are lent to decode, and until when.

A request is lent in parts. Each part has grants, which are made when decode asks, because only decode knows through
which view it reads. A request that has finished is kept until every rank of decode has reported, or its lease has
ended.
"""

from __future__ import annotations

import logging
from collections import Counter, OrderedDict
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llm_datadist.integrations.vllm.messages import Ask, Done, Gone, Lent, Ready

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist.events import Grant
    from llm_datadist.integrations.vllm.group_caches import GroupCaches
    from llm_datadist.integrations.vllm.messages import Message
    from llm_datadist.integrations.vllm.step import Part, Send, Withdraw

__all__ = ["Lending"]

logger = logging.getLogger("vllm.llm_datadist")

# Maximum number of ended tickets that are remembered.
MAX_PAST = 4096
# Maximum number of messages of one cluster that wait for tickets which this worker does not know.
MAX_EARLY = 1024
# Maximum number of receives of one cluster that read a request at a time.
MAX_RECEIVES = 1024
# Maximum number of parts in a ``Ready``, so that the message fits into 64 KiB with the longest tickets.
MAX_READY = 24
# Grants are used again for a later receive if they end at most this share of a lease before its lease ends.
_EARLIER = 0.1


@dataclass
class _LentPart:
    part: Part
    layers: int
    grants: list[list[Grant]] = field(default_factory=list)
    # The time at which the grants end.
    grants_end: float = 0.0
    # Earlier grants that have not ended.
    replaced: list[Grant] = field(default_factory=list)


@dataclass
class _Loan:
    prompt: str
    parts: dict[int, _LentPart] = field(default_factory=dict)
    view: str = ""
    # The receives that read it, as cluster and number.
    receives: set[tuple[int, int]] = field(default_factory=set)
    # The clusters that have sent ``Done``.
    done: set[int] = field(default_factory=set)
    # The reason why nothing is lent any more. The loan then waits until vLLM has finished the request.
    ended: str = ""
    # Set when the request has finished: its id, and the time at which its lease ends.
    request: str = ""
    lease_end: float | None = None


@dataclass
class _EarlyMessage:
    cluster: int
    message: Ask | Done
    end: float


class Lending:
    """The requests that this worker lends. Only the transfer thread uses it.

    Args:
        groups: the caches of the KV cache groups.
        lease_s: how long a request is kept, in seconds.
        early_s: how long a message with a ticket that is not known here waits, in seconds.
        notify: sends a message to a cluster.
        freed: takes a request whose blocks vLLM may free, and whether its lease has expired.
    """

    def __init__(
        self,
        groups: list[GroupCaches],
        lease_s: float,
        early_s: float,
        notify: Callable[[int, Message], None],
        freed: Callable[[str, bool], None],
    ) -> None:
        self._groups = groups
        self._layers = max(group.form.layers for group in groups)
        self._lease_s = lease_s
        self._early_s = early_s
        self._notify = notify
        self._freed = freed
        self._loans: dict[str, _Loan] = {}
        self._early: dict[str, list[_EarlyMessage]] = {}
        self._early_of: Counter[int] = Counter()
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
        for receive in sorted(loan.receives):
            self._offer(receive, loan, lent, now)
        for early in self._take_early(part.ticket):
            self.heard(early.cluster, early.message, now)

    def ready(self, parts: list[tuple[str, int]], layers: int | None) -> None:
        """Notify decode how many layers of parts are computed; ``None`` stands for all."""
        count = self._layers if layers is None else layers
        news: dict[int, list[list[str | int]]] = {}
        for ticket, number in parts:
            loan = self._loans.get(ticket)
            lent = None if loan is None else loan.parts.get(number)
            if loan is not None and lent is not None:
                lent.layers = count
                for cluster in {cluster for cluster, _ in loan.receives}:
                    news.setdefault(cluster, []).append([ticket, number])
        for cluster, pairs in news.items():
            for at in range(0, len(pairs), MAX_READY):
                self._notify(cluster, Ready(pairs[at : at + MAX_READY], count))

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
            _withdraw_parts(loan)
        if order.ended:
            reason = "the request has ended without a result"
            self._tell(order.ticket, reason)
            self._loans.pop(order.ticket, None)
            self._remember(order.ticket, reason)

    def heard(self, cluster: int, message: Ask | Done, now: float) -> None:
        """Take a message from decode."""
        loan = self._loans.get(message.ticket)
        if loan is None:
            self._not_lent(cluster, message, now)
        elif isinstance(message, Ask):
            self._begin(cluster, message, loan, now)
        elif not loan.ended:
            # A cluster reports when all of its receives have ended.
            loan.done.add(cluster)
            loan.receives = {receive for receive in loan.receives if receive[0] != cluster}
            if len(loan.done) >= message.readers:
                reason = "prefill has freed the blocks, because all ranks of decode had reported"
                self._end(message.ticket, reason, expired=False)

    def due(self, now: float) -> None:
        """End leases, and the wait for requests that never came."""
        for ticket in [name for name, loan in self._loans.items() if loan.lease_end and loan.lease_end <= now]:
            self._end(ticket, "its lease has ended", expired=True)
        for ticket in list(self._early):
            late = [early for early in self._early[ticket] if early.end <= now]
            if late:
                kept = [early for early in self._take_early(ticket) if early.end > now]
                self._keep_early(ticket, kept)
                reason = (
                    f"prefill has lent no blocks with this ticket within {self._early_s:g} s (its timeout_ms); "
                    "the request may be in its queue"
                )
                self._refuse_early(late, reason)

    def next_due(self) -> float | None:
        """Return when ``due`` has something to do, or ``None``."""
        times = [loan.lease_end for loan in self._loans.values() if loan.lease_end]
        times += [early.end for waiting in self._early.values() for early in waiting]
        return min(times, default=None)

    def _not_lent(self, cluster: int, message: Ask | Done, now: float) -> None:
        ticket = message.ticket
        early = _EarlyMessage(cluster, message, now + self._early_s)
        if ticket in self._past:
            self._refuse_early([early], self._past[ticket])
        elif self._early_of[cluster] >= MAX_EARLY:
            self._refuse_early([early], f"more than {MAX_EARLY} messages of this cluster wait for blocks")
        else:
            # Decode may know of the request before this worker does.
            self._keep_early(ticket, [early])

    def _begin(self, cluster: int, ask: Ask, loan: _Loan, now: float) -> None:
        reason = loan.ended
        if loan.prompt != ask.prompt:
            reason = "the prompt in decode differs from the prompt in prefill"
        elif not reason and loan.view and loan.view != ask.view:
            reason = (
                "the receives of one request must all have the block sizes of prefill, or all other ones "
                f"(first receive: view={loan.view}, this one: view={ask.view})"
            )
        elif not reason and sum(other == cluster for other, _ in loan.receives) >= MAX_RECEIVES:
            reason = f"more than {MAX_RECEIVES} receives of this cluster read the request"
        if reason:
            self._notify(cluster, Gone(ask.ticket, ask.receive, reason))
            return
        loan.view = ask.view
        loan.done.discard(cluster)
        loan.receives.add((cluster, ask.receive))
        for lent in loan.parts.values():
            self._offer((cluster, ask.receive), loan, lent, now)

    def _offer(self, receive: tuple[int, int], loan: _Loan, lent: _LentPart, now: float) -> None:
        part, (cluster, number) = lent.part, receive
        try:
            self._grant(loan, lent, now)
        except Exception as error:
            logger.exception("part %d of ticket %r is not lent to cluster %d", part.number, part.ticket, cluster)
            self._notify(cluster, Gone(part.ticket, number, str(error)))
            return
        tokens = [[grant.token.hex() for grant in grants] for grants in lent.grants]
        place = (part.ticket, number, part.number, part.first, part.blocks)
        self._notify(cluster, Lent(*place, tokens, lent.layers, part.last))

    def _grant(self, loan: _Loan, lent: _LentPart, now: float) -> None:
        """Make the grants of a part, unless it has some that last long enough."""
        end = now + self._lease_s if loan.lease_end is None else loan.lease_end
        lasting = lent.grants_end >= end - _EARLIER * self._lease_s
        if lent.grants and lasting and not any(grant.ended for grant in _flat(lent.grants)):
            return
        made: list[list[Grant]] = []
        try:
            for group, blocks in zip(self._groups, lent.part.blocks):
                content = [block for block in blocks if block]
                made.append(group.grant(loan.view, content, max(1, int(1000 * (end - now)))) if content else [])
        except Exception:
            _revoke(_flat(made))
            raise
        # Earlier receives may still pull under the old grants.
        lent.replaced = [grant for grant in [*lent.replaced, *_flat(lent.grants)] if not grant.ended]
        lent.grants, lent.grants_end = made, end

    def _end(self, ticket: str, reason: str, *, expired: bool) -> None:
        self._tell(ticket, reason)
        loan = self._loans[ticket]
        loan.ended = reason
        _withdraw_parts(loan)
        self._remember(ticket, reason)
        if loan.lease_end is not None:
            self._free(ticket, expired=expired)

    def _free(self, ticket: str, *, expired: bool) -> None:
        self._freed(self._loans.pop(ticket).request, expired)

    def _tell(self, ticket: str, reason: str) -> None:
        """Send ``Gone`` to every receive that reads or awaits the request."""
        loan = self._loans.get(ticket)
        for cluster, number in [] if loan is None else sorted(loan.receives):
            self._notify(cluster, Gone(ticket, number, reason))
        self._refuse_early(self._take_early(ticket), reason)

    def _keep_early(self, ticket: str, messages: list[_EarlyMessage]) -> None:
        if messages:
            self._early.setdefault(ticket, []).extend(messages)
            self._early_of.update(early.cluster for early in messages)

    def _take_early(self, ticket: str) -> list[_EarlyMessage]:
        taken = self._early.pop(ticket, [])
        self._early_of.subtract(early.cluster for early in taken)
        self._early_of += Counter()  # forgets clusters without messages
        return taken

    def _refuse_early(self, messages: list[_EarlyMessage], reason: str) -> None:
        for early in messages:
            if isinstance(early.message, Ask):
                self._notify(early.cluster, Gone(early.message.ticket, early.message.receive, reason))

    def _remember(self, ticket: str, reason: str) -> None:
        self._past[ticket] = reason
        if len(self._past) > MAX_PAST:
            self._past.popitem(last=False)


def _withdraw_parts(loan: _Loan) -> None:
    for lent in loan.parts.values():
        _revoke([*_flat(lent.grants), *lent.replaced])
    loan.parts.clear()


def _flat(grants: list[list[Grant]]) -> list[Grant]:
    return [grant for of_group in grants for grant in of_group]


def _revoke(grants: list[Grant]) -> None:
    for grant in grants:
        grant.revoke(wait=False)
