"""Prefill: which requests are lent to decode, and until when.

A request is lent in parts. Each part has grants, made when a reader has asked, because only a reader knows through
which view it reads. A request that has finished is kept until every reader has reported, or its lease has ended.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
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

# How many asks for requests that are not known here, and how many ended requests, are remembered.
MAX_REMEMBERED = 4096
# So many parts with tickets of any length fit into one message.
MAX_READY = 24


@dataclass
class _LentPart:
    part: Part
    layers: int
    grants: list[list[Grant]] = field(default_factory=list)


@dataclass
class _Loan:
    prompt: str
    parts: dict[int, _LentPart] = field(default_factory=dict)
    view: str = ""
    readers: set[int] = field(default_factory=set)
    done: set[int] = field(default_factory=set)
    # From its end on, it only waits until vLLM has finished the request.
    ended: bool = False
    # Once the request has finished: its id, and when its lease ends.
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
        early_s: how long an ask for a request that is not known here waits, in seconds.
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
        self._early: OrderedDict[str, list[_EarlyMessage]] = OrderedDict()
        self._past: OrderedDict[str, None] = OrderedDict()

    def lend(self, part: Part, now: float) -> None:
        """Lend a part of a request."""
        loan = self._loans.get(part.ticket)
        if loan is None:
            loan = self._loans[part.ticket] = _Loan(part.prompt)
            self._past.pop(part.ticket, None)
        if loan.ended:
            return
        lent = loan.parts[part.number] = _LentPart(part, self._layers if part.computed else 0)
        for cluster in loan.readers:
            self._offer(cluster, loan, lent, now)
        for early in self._early.pop(part.ticket, []):
            self.heard(early.cluster, early.message, now)

    def ready(self, parts: list[tuple[str, int]], layers: int | None) -> None:
        """Tell the readers of parts how many of their layers are in place; ``None`` stands for all."""
        count = self._layers if layers is None else layers
        news: dict[int, list[list[str | int]]] = {}
        for ticket, number in parts:
            loan = self._loans.get(ticket)
            lent = None if loan is None else loan.parts.get(number)
            if loan is not None and lent is not None:
                lent.layers = count
                for cluster in loan.readers - loan.done:
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

    def withdraw(self, order: Withdraw) -> None:
        """Take back all parts of a request. When this returns, no read of them succeeds."""
        loan = self._loans.get(order.ticket)
        if loan is not None:
            _take_back(loan)
        if order.ended:
            self._tell(order.ticket, "the request has ended without a result")
            self._loans.pop(order.ticket, None)
            self._remember(order.ticket)

    def heard(self, cluster: int, message: Ask | Done, now: float) -> None:
        """Answer a reader."""
        loan = self._loans.get(message.ticket)
        if loan is None or (loan.ended and isinstance(message, Ask)):
            self._not_lent(cluster, message, now)
        elif isinstance(message, Ask):
            self._begin(cluster, message, loan, now)
        else:
            loan.done.add(cluster)
            if len(loan.done) >= message.readers:
                self._end(message.ticket, expired=False)

    def due(self, now: float) -> None:
        """End leases, and asks for requests that never came."""
        for ticket in [name for name, loan in self._loans.items() if loan.lease_end and loan.lease_end <= now]:
            self._tell(ticket, "its lease has ended")
            self._end(ticket, expired=True)
        for ticket, early in list(self._early.items()):
            if early[0].end <= now:
                self._tell(ticket, "prefill has no such request")

    def next_due(self) -> float | None:
        """Return when ``due`` has something to do, or ``None``."""
        times = [loan.lease_end for loan in self._loans.values() if loan.lease_end]
        times += [early[0].end for early in self._early.values()]
        return min(times, default=None)

    def _not_lent(self, cluster: int, message: Ask | Done, now: float) -> None:
        ticket = message.ticket
        if ticket in self._past:
            if isinstance(message, Ask):
                self._notify(cluster, Gone(ticket, "its lease has ended"))
            return
        # Decode may know of the request before this worker does.
        self._early.setdefault(ticket, []).append(_EarlyMessage(cluster, message, now + self._early_s))
        if sum(map(len, self._early.values())) > MAX_REMEMBERED:
            self._tell(next(iter(self._early)), "too many requests are asked for")

    def _begin(self, cluster: int, ask: Ask, loan: _Loan, now: float) -> None:
        if loan.prompt != ask.prompt:
            self._notify(cluster, Gone(ask.ticket, "prefill computes another prompt"))
            return
        loan.view = loan.view or ask.view
        if loan.view != ask.view:
            self._notify(cluster, Gone(ask.ticket, f"it is lent by {loan.view}, not by {ask.view}"))
            return
        loan.readers.add(cluster)
        for lent in loan.parts.values():
            self._offer(cluster, loan, lent, now)

    def _offer(self, cluster: int, loan: _Loan, lent: _LentPart, now: float) -> None:
        part = lent.part
        try:
            if not lent.grants:
                self._grant(loan, lent, now)
        except Exception as error:
            logger.exception("request %s is not lent", part.ticket)
            self._notify(cluster, Gone(part.ticket, str(error)))
            return
        tokens = [[grant.token.hex() for grant in grants] for grants in lent.grants]
        place = (part.ticket, part.number, part.first, part.blocks)
        self._notify(cluster, Lent(*place, tokens, lent.layers, part.last))

    def _grant(self, loan: _Loan, lent: _LentPart, now: float) -> None:
        left_s = self._lease_s if loan.lease_end is None else loan.lease_end - now
        made: list[list[Grant]] = []
        try:
            for group, blocks in zip(self._groups, lent.part.blocks):
                content = [block for block in blocks if block]
                made.append(group.grant(loan.view, content, max(1, int(1000 * left_s))) if content else [])
        except Exception:
            _revoke(made)
            raise
        lent.grants = made

    def _end(self, ticket: str, *, expired: bool) -> None:
        loan = self._loans[ticket]
        loan.ended = True
        _take_back(loan)
        self._remember(ticket)
        if loan.lease_end is not None:
            self._free(ticket, expired=expired)

    def _free(self, ticket: str, *, expired: bool) -> None:
        self._freed(self._loans.pop(ticket).request, expired)

    def _tell(self, ticket: str, reason: str) -> None:
        """Tell all who wait for a request that it does not come."""
        loan = self._loans.get(ticket)
        waiting = set() if loan is None else loan.readers - loan.done
        asks = [early.cluster for early in self._early.pop(ticket, []) if isinstance(early.message, Ask)]
        for cluster in waiting.union(asks):
            self._notify(cluster, Gone(ticket, reason))

    def _remember(self, ticket: str) -> None:
        self._past[ticket] = None
        if len(self._past) > MAX_REMEMBERED:
            self._past.popitem(last=False)


def _take_back(loan: _Loan) -> None:
    for lent in loan.parts.values():
        _revoke(lent.grants)
    loan.parts.clear()


def _revoke(grants: list[list[Grant]]) -> None:
    for grant in [grant for of_group in grants for grant in of_group]:
        grant.revoke(wait=False)
