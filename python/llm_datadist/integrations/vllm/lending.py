"""Prefill: which requests are lent to decode, and until when.

A request is kept from the step in which it finishes until every reader has reported, or its lease has ended. The first
reader that asks makes the grants, because only it knows how many ranks of decode read this worker.
"""

from __future__ import annotations

import logging
from collections import OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llm_datadist import LLMException
from llm_datadist.integrations.vllm.messages import Ask, Done, Gone, Lent

if TYPE_CHECKING:
    from collections.abc import Callable

    from llm_datadist.events import Grant, GrantEnded
    from llm_datadist.integrations.vllm.group_caches import GroupCaches
    from llm_datadist.integrations.vllm.messages import Message
    from llm_datadist.integrations.vllm.step import Send

__all__ = ["Lending"]

logger = logging.getLogger("vllm.llm_datadist")

# How many asks for requests that have not finished here, and how many ended requests, are remembered.
MAX_REMEMBERED = 4096


@dataclass
class _Lease:
    blocks: list[list[int]]
    end: float
    view: str = ""
    grants: list[list[Grant]] = field(default_factory=list)
    open_grants: int = 0
    done: set[int] = field(default_factory=set)


@dataclass
class _EarlyAsk:
    cluster: int
    message: Ask | Done
    end: float


class Lending:
    """The requests that this worker lends. Only the transfer thread uses it.

    Args:
        groups: the caches of the KV cache groups.
        lease_s: how long a request is kept, in seconds.
        early_s: how long an ask for a request that has not finished here waits, in seconds.
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
        self._lease_s = lease_s
        self._early_s = early_s
        self._notify = notify
        self._freed = freed
        self._leases: dict[str, _Lease] = {}
        self._grants: dict[Grant, str] = {}
        self._early: OrderedDict[str, list[_EarlyAsk]] = OrderedDict()
        self._ended: OrderedDict[str, None] = OrderedDict()

    def lend(self, send: Send, now: float) -> None:
        """Keep a request, and answer those who have asked for it already."""
        self._leases[send.request] = _Lease(send.blocks, now + self._lease_s)
        for early in self._early.pop(send.request, []):
            self.heard(early.cluster, early.message, now)

    def heard(self, cluster: int, message: Ask | Done, now: float) -> None:
        """Answer a reader."""
        request = message.request
        lease = self._leases.get(request)
        if lease is None:
            self._not_lent(cluster, message, now)
        elif isinstance(message, Ask):
            self._answer(cluster, message, lease, now)
        else:
            lease.done.add(cluster)
            if len(lease.done) >= message.readers:
                self._end(request, expired=False)

    def grant_ended(self, event: GrantEnded) -> None:
        """Free a request when all its grants have ended."""
        request = self._grants.pop(event.grant, None)
        lease = None if request is None else self._leases.get(request)
        if request is None or lease is None:
            return
        lease.open_grants -= 1
        if not lease.open_grants:
            self._end(request, expired=event.reason == "expired")

    def due(self, now: float) -> None:
        """End leases without a grant, and asks for requests that never came."""
        for request in [name for name, lease in self._leases.items() if not lease.grants and lease.end <= now]:
            self._end(request, expired=True)
        for request, asks in list(self._early.items()):
            if asks[0].end <= now:
                for early in self._early.pop(request):
                    self._notify(early.cluster, Gone(request, "prefill has no such request"))

    def next_due(self) -> float | None:
        """Return when ``due`` has something to do, or ``None``."""
        times = [lease.end for lease in self._leases.values() if not lease.grants]
        times += [asks[0].end for asks in self._early.values()]
        return min(times, default=None)

    def _not_lent(self, cluster: int, message: Ask | Done, now: float) -> None:
        request = message.request
        if request in self._ended:
            if isinstance(message, Ask):
                self._notify(cluster, Gone(request, "its lease has ended"))
            return
        # Decode may have the answer of prefill before this worker learns, in its next step, that the request ended.
        self._early.setdefault(request, []).append(_EarlyAsk(cluster, message, now + self._early_s))
        if sum(map(len, self._early.values())) > MAX_REMEMBERED:
            dropped, asks = self._early.popitem(last=False)
            for early in asks:
                self._notify(early.cluster, Gone(dropped, "too many requests are asked for"))

    def _answer(self, cluster: int, ask: Ask, lease: _Lease, now: float) -> None:
        try:
            if not lease.grants:
                self._grant(ask, lease, now)
        except Exception as error:
            logger.exception("request %s is not lent", ask.request)
            self._notify(cluster, Gone(ask.request, str(error)))
            return
        if lease.view != ask.view:
            self._notify(cluster, Gone(ask.request, f"it is lent by {lease.view}, not by {ask.view}"))
            return
        tokens = [[grant.token.hex() for grant in grants] for grants in lease.grants]
        self._notify(cluster, Lent(ask.request, tokens))

    def _grant(self, ask: Ask, lease: _Lease, now: float) -> None:
        left_ms = max(1, int(1000 * (lease.end - now)))
        made: list[list[Grant]] = []
        try:
            for group, blocks in zip(self._groups, lease.blocks):
                made.append(group.grant(ask.view, blocks, left_ms, ask.readers) if blocks else [])
        except Exception:
            _revoke(made)
            raise
        lease.view, lease.grants, lease.open_grants = ask.view, made, sum(map(len, made))
        self._grants.update({grant: ask.request for grants in made for grant in grants})

    def _end(self, request: str, *, expired: bool) -> None:
        lease = self._leases.pop(request)
        for grant in [grant for grants in lease.grants for grant in grants]:
            self._grants.pop(grant, None)
        _revoke(lease.grants)
        self._ended[request] = None
        if len(self._ended) > MAX_REMEMBERED:
            self._ended.popitem(last=False)
        self._freed(request, expired)


def _revoke(grants: list[list[Grant]]) -> None:
    for grant in [grant for of_group in grants for grant in of_group]:
        with suppress(LLMException):  # a slow read; its pull fails
            grant.revoke()
