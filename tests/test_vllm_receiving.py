"""How decode uses links and messages, with an engine that the tests control."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from llm_datadist import LLMException, LLMStatusCode
from llm_datadist.integrations.vllm.handover import Handover
from llm_datadist.integrations.vllm.messages import Ask, Done, Gone
from llm_datadist.integrations.vllm.ranks import Shard
from llm_datadist.integrations.vllm.receiving import MAX_REASON, Receiving, cluster_of
from llm_datadist.integrations.vllm.step import Receive

NAME = "prefill"
CLUSTER = cluster_of(NAME, 0)


class Decode:
    """The receives of a worker, with the links that it has asked for and the messages that it has sent."""

    def __init__(self) -> None:
        self.links: list[tuple[str, Mock]] = []
        self.sent: list[tuple[int, Any]] = []
        self.outcomes: list[Any] = []
        self.refuses = False
        engine: Any = SimpleNamespace(ensure_link=self._link)
        group: Any = SimpleNamespace(form=SimpleNamespace(block_size=32, layers=2))
        self.receiving = Receiving(engine, [group], Shard(0, 1, 2), 5.0, self._notify, self.outcomes.append)

    def _link(self, address: str, **_: Any) -> Mock:
        link = Mock()
        link.exception.return_value = None
        self.links.append((address, link))
        return link

    def _notify(self, cluster: int, message: Any) -> None:
        if self.refuses:
            raise LLMException("there is no link", LLMStatusCode.LLM_NOT_YET_LINK)
        self.sent.append((cluster, message))

    def begin(self, request: str, engine: str = NAME) -> None:
        handover = Handover("t", engine, [f"{engine}:1"], "100:", [32])
        self.receiving.begin(Receive(request, handover, [[1, 2, 3, 4]], 0, 100), 0.0)

    def link_up(self) -> None:
        """Report the newest link call as successful."""
        self.receiving.completed(self.links[-1][1])


@pytest.fixture
def decode() -> Decode:
    return Decode()


def test_link_that_ended_before_its_call_was_reported_is_made_again(decode: Decode) -> None:
    decode.begin("one")
    decode.receiving.linked(CLUSTER)
    decode.receiving.unlinked(CLUSTER)
    decode.refuses = True
    decode.link_up()
    assert "there is no link" in decode.outcomes[0].failure
    decode.refuses = False
    decode.begin("two")
    decode.link_up()
    assert len(decode.links) == 2
    assert [(cluster, type(message)) for cluster, message in decode.sent] == [(CLUSTER, Ask)]


def test_link_is_progress(decode: Decode) -> None:
    decode.begin("one")
    assert decode.receiving.next_due() == 5.0
    decode.link_up()
    assert (decode.receiving.next_due() or 0) > 5.0


def test_each_prefill_with_a_ticket_gets_done(decode: Decode) -> None:
    """A proxy has given a ticket to one prefill, and then to another one."""
    for engine in (NAME, "other"):
        decode.begin(f"from {engine}", engine)
        decode.link_up()
    for engine in (NAME, "other"):
        cluster = cluster_of(engine, 0)
        number = next(message.receive for to, message in decode.sent if to == cluster)
        decode.receiving.heard(cluster, Gone("t", number, "over"))
    done = [to for to, message in decode.sent if isinstance(message, Done)]
    assert done == [cluster_of(NAME, 0), cluster_of("other", 0)]


def test_done_is_sent_when_the_last_receive_of_a_ticket_ends(decode: Decode) -> None:
    for request in ("one", "two"):
        decode.begin(request)
    for _, link in decode.links:
        decode.receiving.completed(link)
    for _, message in list(decode.sent):
        assert not any(isinstance(sent, Done) for _, sent in decode.sent)
        decode.receiving.heard(CLUSTER, Gone("t", message.receive, "over"))
    assert [type(message) for _, message in decode.sent] == [Ask, Ask, Done]


def test_reason_of_a_peer_is_fit_for_the_log(decode: Decode) -> None:
    decode.begin("one")
    decode.link_up()
    decode.receiving.heard(CLUSTER, Gone("t", 0, "line\nbreak \udc80" + "x" * 2000))
    failure = decode.outcomes[0].failure
    assert "line?break ?" in failure
    assert failure.isprintable()
    assert len(failure) < MAX_REASON + 100


def test_a_done_that_cannot_be_sent_is_logged(decode: Decode, caplog: pytest.LogCaptureFixture) -> None:
    decode.begin("one")
    decode.link_up()
    decode.refuses = True
    decode.receiving.heard(CLUSTER, Gone("t", 0, "over"))
    assert f"cannot send Done of t to cluster {CLUSTER}, so its blocks wait for the end of the lease: " in caplog.text
    assert [outcome.request for outcome in decode.outcomes] == ["one"]
