"""What prefill lends to whom, without an engine: the messages that readers get, and when blocks are freed."""

from __future__ import annotations

import os
import threading
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any

import pytest

from llm_datadist import Busy, Error, OutOfMemory
from llm_datadist.integrations.vllm import transfer_thread
from llm_datadist.integrations.vllm.handover import MAX_DECODES
from llm_datadist.integrations.vllm.lending import MAX_HELD, MAX_RECEIVES, Lending
from llm_datadist.integrations.vllm.messages import Ask, Done, Gone, Hold, Lent, Ready
from llm_datadist.integrations.vllm.ranks import Shard
from llm_datadist.integrations.vllm.settings import Settings
from llm_datadist.integrations.vllm.step import Part, Send, Step, Withdraw

LEASE_S = 60.0


@dataclass(frozen=True)
class Peer:
    name: str
    incarnation: int = 1


FIRST: Any = Peer("decode/0")
SECOND: Any = Peer("decode/1")
RESTARTED: Any = Peer("decode/0", 2)
OTHER: Any = Peer("other/0")  # of another decode


class Grant:
    """A grant of the engine."""

    revoke_error: type[Error] = Busy

    def __init__(self, number: int) -> None:
        self.token = number.to_bytes(2, "big")
        self.ended: str | None = None

    def revoke(self) -> None:
        """Fail as a grant does when no transfer can wait for its reads. It has ended all the same."""
        self.ended = self.ended or "revoked"
        raise self.revoke_error


class Group:
    """The caches of a KV cache group."""

    form = SimpleNamespace(layers=4)

    def __init__(self) -> None:
        self.grants: list[Grant] = []

    def lend(self, view: str, blocks: list[int], ttl: float) -> list[Grant]:
        assert view
        assert blocks
        assert ttl > 30 * 24 * 3600  # the loan limits the time
        self.grants.append(Grant(len(self.grants)))
        return [self.grants[-1]]


class Prefill:
    """The lending of a worker, with what it has sent and freed."""

    def __init__(self) -> None:
        self.group = Group()
        self.sent: list[tuple[Any, Any]] = []
        self.freed: list[tuple[str, bool]] = []
        groups: Any = [self.group]
        self.lending = Lending(
            groups,
            LEASE_S,
            lambda peer, message: self.sent.append((peer, message)),
            lambda request, unread: self.freed.append((request, unread)),
        )

    def hold(self, *peers: Any, readers: int = 1, decodes: int = 1) -> None:
        for peer in peers:
            self.lending.heard(peer, Hold("t", readers, decodes), 0)

    def ask(self, peer: Any = FIRST, receive: int = 0, prompt: str = "64:p", view: str = "pages") -> None:
        self.lending.heard(peer, Ask("t", receive, view, prompt), 0)

    def done(self, peer: Any = FIRST, now: float = 0) -> None:
        self.lending.heard(peer, Done("t"), now)

    def read(self, peer: Any, readers: int = 1, decodes: int = 1, now: float = 0) -> None:
        """Have a peer hold the request, and report that it has read it."""
        self.hold(peer, readers=readers, decodes=decodes)
        self.done(peer, now)

    def asks(self, *peers: Any) -> None:
        """Have peers hold the request, and ask for it."""
        self.hold(*peers)
        for peer in peers:
            self.ask(peer)

    def finish(self) -> None:
        self.lending.finish(Send("r", "t"), 0)

    def lend_all(self) -> None:
        """Lend the only part of the request, which has finished."""
        self.lending.lend(part())
        self.finish()

    @property
    def ended(self) -> set[str | None]:
        """How the grants have ended."""
        return {grant.ended for grant in self.group.grants}

    def news(self, peer: Any = FIRST) -> list[Any]:
        """Take what a peer was sent since the last call."""
        found = [message for to, message in self.sent if to == peer]
        self.sent = [(to, message) for to, message in self.sent if to != peer]
        return found


@pytest.fixture
def prefill() -> Prefill:
    return Prefill()


def part(number: int = 0, *, first: int = 0, computed: bool = True, last: bool = True) -> Part:
    return Part("t", "64:p", number, first, [[5, 6]], computed, last)


def test_each_receive_of_a_peer_gets_every_part_once(prefill: Prefill) -> None:
    """A request for several completions is several receives of one peer."""
    prefill.lending.lend(part(last=False))
    prefill.hold(FIRST)
    prefill.ask(receive=0)
    prefill.ask(receive=1)
    prefill.lending.lend(part(1, first=2))
    assert [(one.receive, one.part) for one in prefill.news()] == [(0, 0), (1, 0), (0, 1), (1, 1)]


@pytest.mark.parametrize("early", [True, False])
def test_ask_with_other_prompt_or_view_is_refused(prefill: Prefill, early: bool) -> None:
    if not early:
        prefill.lending.lend(part())
    prefill.hold(FIRST)
    prefill.ask(receive=0)
    prefill.ask(receive=1, prompt="64:q")
    prefill.ask(receive=2, view="heads")
    if early:
        assert prefill.news() == []
        prefill.lending.lend(part())
    found = sorted(prefill.news(), key=lambda message: message.receive)
    assert [(type(one), one.receive) for one in found] == [(Lent, 0), (Gone, 1), (Gone, 2)]
    assert "differs" in found[1].reason
    assert "(first receive: view=pages, this one: view=heads)" in found[2].reason


def test_a_peer_that_has_reported_may_hold_and_ask_again(prefill: Prefill) -> None:
    lent = part(computed=False)
    prefill.lending.lend(lent)
    prefill.hold(FIRST, readers=2)
    prefill.ask()
    prefill.done()
    prefill.lending.ready([lent], 2)
    assert [type(one) for one in prefill.news()] == [Lent]
    prefill.finish()
    prefill.hold(FIRST, readers=2)
    prefill.ask(receive=1)
    prefill.lending.ready([lent], None)
    assert [(type(one), one.layers) for one in prefill.news()] == [(Lent, 2), (Ready, 4)]
    prefill.read(SECOND, readers=2)
    assert prefill.freed == [], "the first peer holds it again"
    prefill.done(FIRST)
    assert prefill.freed == [("r", False)]


def test_a_rank_that_was_restarted_counts_once(prefill: Prefill) -> None:
    prefill.lend_all()
    for peer in (FIRST, RESTARTED):
        prefill.read(peer, readers=2)
    assert prefill.freed == []
    prefill.read(SECOND, readers=2)
    assert prefill.freed == [("r", False)]


def test_a_peer_ends_only_what_it_holds(prefill: Prefill) -> None:
    prefill.lend_all()
    prefill.done(SECOND)
    prefill.hold(FIRST)
    prefill.done(SECOND)
    prefill.lending.unlinked(SECOND)
    prefill.ask(SECOND)
    assert prefill.freed == []
    (refused,) = prefill.news(SECOND)
    assert "does not hold the request" in refused.reason
    prefill.read(SECOND)
    assert prefill.freed == [], "the first peer holds it"
    prefill.done(FIRST)
    assert prefill.freed == [("r", False)]


def test_a_request_that_decode_holds_has_no_lease(prefill: Prefill) -> None:
    """However long it waits in the queue of decode. If a rank has reported and no other holds it, the lease begins."""
    prefill.lend_all()
    assert prefill.lending.next_due() == LEASE_S
    prefill.hold(FIRST, readers=2)
    assert prefill.lending.next_due() is None
    prefill.lending.due(1e9)
    prefill.done(FIRST, now=100)
    assert prefill.lending.next_due() == 100 + LEASE_S
    prefill.hold(SECOND, readers=2)
    prefill.lending.due(1e9)
    assert prefill.freed == []
    prefill.done(SECOND)
    assert prefill.freed == [("r", False)]


def test_a_request_that_is_held_when_it_finishes_has_no_lease(prefill: Prefill) -> None:
    prefill.hold(FIRST)
    prefill.lend_all()
    assert prefill.lending.next_due() is None
    prefill.lending.due(1e9)
    assert prefill.freed == []
    prefill.done()
    assert prefill.freed == [("r", False)]


@pytest.mark.parametrize("finished", [True, False])
def test_the_end_of_a_link_ends_what_the_peer_holds(prefill: Prefill, finished: bool) -> None:
    """If nobody else holds it: the ranks of decode may be those of two independent vLLMs, with one ticket."""
    prefill.lending.lend(part())
    prefill.asks(FIRST, SECOND)
    if finished:
        prefill.finish()
    prefill.lending.unlinked(FIRST)
    assert (prefill.ended, prefill.freed) == ({None}, [])
    prefill.lending.lend(part(1, first=2))
    assert [[type(one) for one in prefill.news(peer)] for peer in (FIRST, SECOND)] == [[Lent], [Lent, Lent]]
    prefill.lending.unlinked(SECOND)
    assert prefill.ended == {"revoked"}
    if not finished:
        prefill.finish()
    assert prefill.freed == [("r", finished)]
    prefill.asks(RESTARTED)
    assert [one.reason for one in prefill.news(RESTARTED)] == ["the link to decode/1 of decode has ended"]


def test_the_lease_begins_when_the_other_rank_has_read(prefill: Prefill) -> None:
    """The link to one of two ranks has ended, so its report never comes."""
    prefill.lending.lend(part())
    prefill.hold(FIRST, SECOND, readers=2)
    prefill.finish()
    prefill.lending.unlinked(FIRST)
    prefill.done(SECOND, now=100)
    assert (prefill.freed, prefill.lending.next_due()) == ([], 100 + LEASE_S)


def test_the_end_of_a_link_does_not_end_what_the_peer_has_read(prefill: Prefill) -> None:
    prefill.lend_all()
    prefill.hold(FIRST, SECOND, readers=2)
    prefill.done(FIRST)
    prefill.lending.unlinked(FIRST)
    assert prefill.freed == []
    prefill.done(SECOND)
    assert prefill.freed == [("r", False)]


def test_each_decode_of_a_request_reads_it(prefill: Prefill) -> None:
    """A proxy may give one request to several decodes. The first one reads it before the second one knows it."""
    prefill.lending.lend(part())
    prefill.hold(FIRST, decodes=2)
    prefill.finish()
    prefill.done(FIRST, now=100)
    assert (prefill.freed, prefill.lending.next_due()) == ([], 100 + LEASE_S)
    prefill.hold(OTHER, decodes=2)
    assert prefill.lending.next_due() is None
    prefill.ask(OTHER)
    assert [type(one) for one in prefill.news(OTHER)] == [Lent]
    prefill.done(OTHER)
    assert prefill.freed == [("r", False)]


def test_ranks_of_different_decodes_do_not_count_for_each_other(prefill: Prefill) -> None:
    """One decode has two ranks. Its second rank reads after the only rank of another decode has reported."""
    prefill.lend_all()
    prefill.hold(OTHER, decodes=2)
    prefill.hold(FIRST, readers=2, decodes=2)
    prefill.done(OTHER)
    prefill.done(FIRST)
    assert prefill.freed == []
    prefill.read(SECOND, readers=2, decodes=2)
    assert prefill.freed == [("r", False)]


def test_the_names_of_peers_that_have_reported_are_bounded(prefill: Prefill) -> None:
    """A peer may link again under other names. They count as ranks of its own decode only."""
    prefill.lend_all()
    for number in range(10):
        prefill.read(Peer(f"decode/{number}"), readers=2, decodes=2)
    (loan,) = prefill.lending._loans.values()
    assert loan.done == {"decode": {"decode/0", "decode/1"}}
    assert prefill.freed == []
    prefill.read(OTHER, decodes=2)
    assert prefill.freed == [("r", False)]


def test_the_decodes_of_a_request_are_bounded(prefill: Prefill) -> None:
    prefill.lend_all()
    for number in range(MAX_DECODES):
        prefill.hold(Peer(f"decode {number}/0"), decodes=MAX_DECODES)
    prefill.asks(OTHER)
    assert [type(one) for one in prefill.news(OTHER)] == [Gone]
    for number in range(MAX_DECODES):
        prefill.done(Peer(f"decode {number}/0"))
    assert prefill.freed == [("r", False)]


@pytest.mark.parametrize("link_ends", [True, False])
def test_a_request_that_decode_gives_up_before_it_is_lent_is_freed_at_once(prefill: Prefill, link_ends: bool) -> None:
    prefill.hold(FIRST)
    prefill.lending.unlinked(FIRST) if link_ends else prefill.done(FIRST)
    prefill.lend_all()
    assert prefill.freed == [("r", False)]
    # Another request may have the same ticket.
    prefill.lend_all()
    assert prefill.freed == [("r", False)]
    assert prefill.lending.next_due() == LEASE_S


def test_a_step_that_was_not_computed_is_never_ready(prefill: Prefill) -> None:
    lent = part(computed=False)
    prefill.lending.lend(lent)
    prefill.asks(FIRST)
    prefill.lending.fail([lent, replace(lent, ticket="other")], "the model has failed")
    assert [type(one) for one in prefill.news()] == [Lent, Gone]
    assert prefill.ended == {"revoked"}
    prefill.lending.ready([lent], None)
    prefill.asks(SECOND)
    assert [(type(one), one.reason) for one in prefill.news(SECOND)] == [(Gone, "the model has failed")]
    prefill.finish()
    assert prefill.freed == [("r", False)]


def test_receives_share_the_grants(prefill: Prefill) -> None:
    prefill.lend_all()
    prefill.asks(FIRST, SECOND)
    (first,), (second,) = prefill.news(FIRST), prefill.news(SECOND)
    assert first.grants == second.grants == [[b"\0\0"]]


def test_all_grants_end_whatever_revoke_raises(prefill: Prefill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Grant, "revoke_error", OutOfMemory)
    prefill.lending.lend(part(last=False))
    prefill.lending.lend(part(1, first=2))
    prefill.asks(FIRST)
    prefill.finish()
    prefill.done()
    assert [grant.ended for grant in prefill.group.grants] == ["revoked"] * 2
    assert prefill.freed == [("r", False)]


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("lease", "its lease has ended"),
        ("done", "all ranks of decode had reported"),
        ("aborted", "ended without a result"),
    ],
)
def test_late_ask_gets_end_reason(prefill: Prefill, end: str, reason: str) -> None:
    prefill.lending.lend(part())
    if end == "aborted":
        prefill.lending.withdraw(Withdraw("t", ended=True))
    else:
        prefill.finish()
    if end == "done":
        prefill.read(FIRST)
    prefill.lending.due(LEASE_S)
    prefill.asks(SECOND)
    assert [one.reason for one in prefill.news(SECOND) if reason in one.reason]


def test_leases_end_in_their_order(prefill: Prefill) -> None:
    for number in range(3):
        prefill.lending.lend(Part(f"t{number}", "64:p", 0, 0, [[5]], True, True))
        prefill.lending.finish(Send(f"r{number}", f"t{number}"), 10 * number)
    prefill.lending.heard(FIRST, Hold("t1", 1), 0)
    prefill.lending.due(LEASE_S + 10)
    assert (prefill.freed, prefill.lending.next_due()) == ([("r0", True)], LEASE_S + 20)
    prefill.lending.due(LEASE_S + 20)
    assert (prefill.freed, prefill.lending.next_due()) == ([("r0", True), ("r2", True)], None)


def test_what_a_peer_holds_is_bounded(prefill: Prefill) -> None:
    for number in range(MAX_HELD + 1):
        prefill.lending.heard(FIRST, Hold(f"unknown {number}", 1), 0)
    prefill.lending.heard(FIRST, Ask(f"unknown {MAX_HELD}", 0, "pages", "64:p"), 0)
    limits = f"it holds {MAX_HELD} others, or {MAX_DECODES} other decodes hold this one"
    reason = f"this rank of decode does not hold the request, or {limits}"
    assert [one.reason for one in prefill.news()] == [reason]
    prefill.lending.heard(FIRST, Done("unknown 0"), 0)
    prefill.asks(FIRST, SECOND)
    prefill.lending.lend(part())
    assert [[type(one) for one in prefill.news(peer)] for peer in (FIRST, SECOND)] == [[Lent], [Lent]]


def test_failed_withdrawn_part_does_not_end_loan(prefill: Prefill) -> None:
    """A request that is preempted in a step that fails is computed again."""
    lent = part(computed=False)
    prefill.lending.lend(lent)
    prefill.lending.withdraw(Withdraw("t", ended=False))
    prefill.lending.lend(part(1))
    prefill.lending.fail([lent], "the model has failed")
    prefill.asks(FIRST)
    assert [(type(one), one.part) for one in prefill.news()] == [(Lent, 1)]


def test_news_of_an_older_part_is_not_that_of_another_with_its_number(prefill: Prefill) -> None:
    """A copy to host memory may end after the ticket has gone to another request."""
    older = part(computed=False)
    prefill.lending.lend(older)
    prefill.lending.withdraw(Withdraw("t", ended=True))
    newer = part(computed=False)
    prefill.lending.lend(newer)
    prefill.asks(FIRST)
    prefill.lending.ready([older], None)
    prefill.lending.fail([older], "the copy has failed")
    assert [(type(one), one.layers) for one in prefill.news()] == [(Lent, 0)]
    prefill.lending.ready([newer], None)
    assert [type(one) for one in prefill.news()] == [Ready]


def test_the_receives_of_a_peer_are_bounded(prefill: Prefill) -> None:
    """Those of all tickets together. Receives that are refused, or have ended, do not count."""
    prefill.lending.lend(part())
    prefill.hold(FIRST, SECOND)
    for ticket in ("u", "v"):
        prefill.lending.heard(FIRST, Hold(ticket, 1), 0)
        for receive in range(MAX_RECEIVES // 2):
            prefill.lending.heard(FIRST, Ask(ticket, receive, "pages", "64:p"), 0)
    assert prefill.news() == []
    for peer in (FIRST, SECOND):
        prefill.ask(peer)
    assert [[type(one) for one in prefill.news(peer)] for peer in (FIRST, SECOND)] == [[Gone], [Lent]]
    prefill.lending.heard(FIRST, Done("u"), 0)
    prefill.lending.lend(Part("v", "64:q", 0, 0, [[5]], True, True))
    assert [type(one) for one in prefill.news()] == [Gone] * (MAX_RECEIVES // 2)
    for receive in range(MAX_RECEIVES + 1):
        prefill.ask(receive=receive)
    assert [type(one) for one in prefill.news()] == [Lent] * MAX_RECEIVES + [Gone]


def test_nothing_is_kept_of_peers_that_have_ended(prefill: Prefill) -> None:
    """Also of one whose hold was refused."""
    prefill.hold(FIRST, SECOND)
    prefill.ask(FIRST)
    prefill.ask(SECOND, prompt="64:q")
    prefill.lend_all()
    prefill.done(FIRST)
    prefill.lending.unlinked(SECOND)
    prefill.hold(RESTARTED)
    prefill.lending.unlinked(RESTARTED)
    assert prefill.freed == [("r", True)]
    assert (prefill.lending._held, prefill.lending._receives) == ({}, {})


def test_without_options_a_request_that_no_decode_holds_is_kept_for_30_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """The clock stands still in between."""
    now = 1000.0
    clock = SimpleNamespace(monotonic=lambda: now, perf_counter=lambda: now)
    monkeypatch.setattr(transfer_thread, "time", clock)
    wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
    engine: Any = SimpleNamespace(fileno=lambda: wake, events=list, close=lambda: None)
    group: Any = Group()
    transfers = transfer_thread.TransferThread(engine, [group], Shard(0, 1, 2), None, Settings(), [["layer"] * 4])

    def run_once() -> None:
        """Wait for the end of a turn that begins from now on."""
        for _ in range(2):
            begun = threading.Event()
            transfers._call(begun.set)
            assert begun.wait(60)

    def sent() -> set[str]:
        run_once()
        return transfers.take().sent

    try:
        step = Step(parts=[Part("t", "digest", 0, 0, [[1]], computed=True, last=True)], sends=[Send("r", "t")])
        transfers.begin(step)
        transfers.submit(step)
        assert sent() == set()
        now += 29.999
        assert sent() == set()
        now += 0.001
        assert sent() == {"r"}
    finally:
        transfers.close()
        os.close(wake)
