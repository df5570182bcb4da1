"""What prefill lends to whom, without an engine: the messages that readers get, and when blocks are freed."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import pytest

from llm_datadist import Busy, Error, GrantEnded, OutOfMemory
from llm_datadist.integrations.vllm.lending import MAX_EARLY, MAX_RECEIVES, Lending
from llm_datadist.integrations.vllm.messages import Ask, Done, Gone, Lent, Ready
from llm_datadist.integrations.vllm.step import Part, Send, Withdraw

LEASE_S = 60.0
EARLY_S = 10.0


@dataclass(frozen=True)
class Peer:
    name: str
    incarnation: int = 1


FIRST: Any = Peer("first")
SECOND: Any = Peer("second")
RESTARTED: Any = Peer("first", 2)


class Grant:
    """A grant of the engine."""

    revoke_error: type[Error] = Busy

    def __init__(self, number: int, ttl: float) -> None:
        self.token = number.to_bytes(2, "big")
        self.ttl = ttl
        self.ended: str | None = None

    def renew(self, ttl: float) -> None:
        if self.ended:
            raise GrantEnded
        self.ttl = ttl

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
        self.grants.append(Grant(len(self.grants), ttl))
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
            EARLY_S,
            lambda peer, message: self.sent.append((peer, message)),
            lambda request, expired: self.freed.append((request, expired)),
        )

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


def ask(receive: int = 0, prompt: str = "64:p", view: str = "pages") -> Ask:
    return Ask("t", receive, view, prompt)


def test_each_receive_of_a_peer_gets_every_part_once(prefill: Prefill) -> None:
    """A request for several completions is several receives of one peer."""
    prefill.lending.lend(part(last=False), 0)
    prefill.lending.heard(FIRST, ask(0), 0)
    prefill.lending.heard(FIRST, ask(1), 0)
    prefill.lending.lend(part(1, first=2), 0)
    assert [(one.receive, one.part) for one in prefill.news()] == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_ask_with_other_prompt_or_view_is_refused(prefill: Prefill) -> None:
    prefill.lending.lend(part(), 0)
    prefill.lending.heard(FIRST, ask(0), 0)
    prefill.lending.heard(FIRST, ask(1, prompt="64:q"), 0)
    prefill.lending.heard(FIRST, ask(2, view="heads"), 0)
    found = prefill.news()
    assert [(type(one), one.receive) for one in found] == [(Lent, 0), (Gone, 1), (Gone, 2)]
    assert "differs" in found[1].reason
    assert "(first receive: view=pages, this one: view=heads)" in found[2].reason


def test_a_peer_that_has_reported_may_ask_again(prefill: Prefill) -> None:
    prefill.lending.lend(part(computed=False), 0)
    prefill.lending.heard(FIRST, ask(0), 0)
    prefill.lending.heard(FIRST, Done("t", 2), 0)
    prefill.lending.ready([("t", 0)], 2)
    assert [type(one) for one in prefill.news()] == [Lent]
    prefill.lending.heard(FIRST, ask(1), 0)
    prefill.lending.ready([("t", 0)], None)
    assert [(type(one), one.layers) for one in prefill.news()] == [(Lent, 2), (Ready, 4)]
    prefill.lending.finish(Send("r", "t"), 0)
    prefill.lending.due(LEASE_S)
    assert [(type(one), one.receive) for one in prefill.news()] == [(Gone, 1)]


def test_a_peer_that_asks_again_has_not_reported(prefill: Prefill) -> None:
    prefill.lending.lend(part(), 0)
    prefill.lending.finish(Send("r", "t"), 0)
    prefill.lending.heard(FIRST, Done("t", 2), 0)
    prefill.lending.heard(FIRST, ask(1), 0)
    prefill.lending.heard(SECOND, Done("t", 2), 0)
    assert prefill.freed == []
    prefill.lending.heard(FIRST, Done("t", 2), 0)
    assert prefill.freed == [("r", False)]


def test_a_rank_that_was_restarted_counts_once(prefill: Prefill) -> None:
    prefill.lending.lend(part(), 0)
    prefill.lending.finish(Send("r", "t"), 0)
    for peer in (FIRST, RESTARTED):
        prefill.lending.heard(peer, Done("t", 2), 0)
    assert prefill.freed == []
    prefill.lending.heard(SECOND, Done("t", 2), 0)
    assert prefill.freed == [("r", False)]


def test_a_step_that_was_not_computed_is_never_ready(prefill: Prefill) -> None:
    prefill.lending.lend(part(computed=False), 0)
    prefill.lending.heard(FIRST, ask(), 0)
    prefill.lending.fail([("t", 0), ("other", 0)], "the model has failed")
    assert [type(one) for one in prefill.news()] == [Lent, Gone]
    assert {grant.ended for grant in prefill.group.grants} == {"revoked"}
    prefill.lending.ready([("t", 0)], None)
    prefill.lending.heard(FIRST, ask(1), 0)
    assert [(type(one), one.reason) for one in prefill.news()] == [(Gone, "the model has failed")]
    prefill.lending.finish(Send("r", "t"), 0)
    assert prefill.freed == [("r", False)]


def test_grants_last_as_long_as_the_lease(prefill: Prefill) -> None:
    """Those of the first parts were made while the prompt was computed. A later receive renews them."""
    prefill.lending.lend(part(), 0)
    prefill.lending.heard(FIRST, ask(), 0)
    assert [grant.ttl for grant in prefill.group.grants] == [LEASE_S]
    prefill.lending.finish(Send("r", "t"), 40)
    prefill.lending.heard(SECOND, ask(), 70)
    assert [grant.ttl for grant in prefill.group.grants] == [40 + LEASE_S - 70]
    (first,), (second,) = prefill.news(FIRST), prefill.news(SECOND)
    assert first.grants == second.grants
    prefill.lending.heard(SECOND, Done("t", 1), 71)
    assert {grant.ended for grant in prefill.group.grants} == {"revoked"}
    assert prefill.freed == [("r", False)]


def test_all_grants_end_whatever_revoke_raises(prefill: Prefill, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Grant, "revoke_error", OutOfMemory)
    prefill.lending.lend(part(last=False), 0)
    prefill.lending.lend(part(1, first=2), 0)
    prefill.lending.heard(FIRST, ask(), 0)
    prefill.lending.finish(Send("r", "t"), 0)
    prefill.lending.heard(FIRST, Done("t", 1), 0)
    assert [grant.ended for grant in prefill.group.grants] == ["revoked"] * 2
    assert prefill.freed == [("r", False)]


def test_ended_grants_are_made_again(prefill: Prefill) -> None:
    prefill.lending.lend(part(), 0)
    prefill.lending.heard(FIRST, ask(), 0)
    prefill.group.grants[0].ended = "expired"
    prefill.lending.heard(FIRST, ask(), 1)
    first, second = prefill.news()
    assert first.grants != second.grants


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("lease", "its lease has ended"),
        ("done", "all ranks of decode had reported"),
        ("aborted", "ended without a result"),
    ],
)
def test_late_ask_gets_end_reason(prefill: Prefill, end: str, reason: str) -> None:
    prefill.lending.lend(part(), 0)
    if end == "aborted":
        prefill.lending.withdraw(Withdraw("t", ended=True))
    else:
        prefill.lending.finish(Send("r", "t"), 0)
        prefill.lending.heard(FIRST, Done("t", 1), 0) if end == "done" else prefill.lending.due(LEASE_S)
    prefill.lending.heard(FIRST, ask(), LEASE_S)
    assert [one.reason for one in prefill.news() if reason in one.reason]


def test_early_asks_expire_individually(prefill: Prefill) -> None:
    prefill.lending.heard(FIRST, ask(), 0)
    prefill.lending.heard(SECOND, ask(), 9)
    prefill.lending.due(EARLY_S)
    assert ([type(one) for one in prefill.news(FIRST)], prefill.news(SECOND)) == ([Gone], [])
    assert prefill.lending.next_due() == 9 + EARLY_S
    prefill.lending.lend(part(), 11)
    assert [type(one) for one in prefill.news(SECOND)] == [Lent]


def test_a_peer_cannot_displace_early_asks_of_others(prefill: Prefill) -> None:
    prefill.lending.heard(SECOND, ask(), 0)
    for number in range(MAX_EARLY + 5):
        prefill.lending.heard(FIRST, Ask(f"unknown {number}", 0, "pages", "64:p"), 0)
    assert [type(one) for one in prefill.news(FIRST)] == [Gone] * 5
    prefill.lending.lend(part(), 1)
    assert [type(one) for one in prefill.news(SECOND)] == [Lent]


def test_failed_withdrawn_part_does_not_end_loan(prefill: Prefill) -> None:
    """A request that is preempted in a step that fails is computed again."""
    prefill.lending.lend(part(computed=False), 0)
    prefill.lending.withdraw(Withdraw("t", ended=False))
    prefill.lending.lend(part(1), 0)
    prefill.lending.fail([("t", 0)], "the model has failed")
    prefill.lending.heard(FIRST, ask(), 0)
    assert [(type(one), one.part) for one in prefill.news()] == [(Lent, 1)]


def test_the_receives_of_a_peer_are_bounded(prefill: Prefill) -> None:
    prefill.lending.lend(part(), 0)
    for number in range(MAX_RECEIVES):
        prefill.lending.heard(FIRST, ask(number), 0)
    prefill.news()
    prefill.lending.heard(FIRST, ask(MAX_RECEIVES), 0)
    prefill.lending.heard(SECOND, ask(MAX_RECEIVES), 0)
    assert ([type(one) for one in prefill.news(FIRST)], [type(one) for one in prefill.news(SECOND)]) == ([Gone], [Lent])
