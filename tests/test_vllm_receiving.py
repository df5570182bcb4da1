"""How decode uses links and messages, with an engine that the tests control."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest

from llm_datadist import Busy, PeerLost, Timeout
from llm_datadist.integrations.vllm.handover import Handover
from llm_datadist.integrations.vllm.messages import Ask, Done, Gone
from llm_datadist.integrations.vllm.ranks import Shard
from llm_datadist.integrations.vllm.receiving import MAX_REASON, Receiving
from llm_datadist.integrations.vllm.step import Receive

NAME = "prefill"


class Decode:
    """The receives of a worker, with the links that it has asked for and the messages that it has sent."""

    def __init__(self) -> None:
        self.unreachable: set[str] = set()  # addresses at which a link call raises at once
        self.peers: dict[str, Mock] = {}
        self.links: list[Mock] = []
        self.sent: list[tuple[Any, Any]] = []
        self.outcomes: list[Any] = []
        self.refuses = False
        engine: Any = SimpleNamespace(link=self._link)
        group: Any = SimpleNamespace(form=SimpleNamespace(block_size=32, layers=2))
        self.receiving = Receiving(engine, [group], Shard(0, 1, 2), 5.0, self._send, self.outcomes.append)

    def _link(self, address: str, *, name: str, timeout: float) -> Mock:
        assert timeout > 0
        if address in self.unreachable:
            raise Busy("no more link calls")
        link = Mock()
        # Link calls to one engine have the same peer.
        peer = link.result.return_value = self.peers.setdefault(address, Mock(address=address, alive=True))
        peer.name = name
        self.links.append(link)
        return link

    def _send(self, peer: Any, message: Any) -> None:
        if self.refuses:
            raise PeerLost("there is no link")
        self.sent.append((peer, message))

    def begin(self, request: str, engine: str = NAME, *, ports: tuple[int, ...] = (1,), blocks: bool = True) -> None:
        handover = Handover("t", engine, [f"{engine}:{port}" for port in ports], "100:", [32])
        self.receiving.begin(Receive(request, handover, [[1, 2, 3, 4]] if blocks else [], 0, 100), 0.0)

    def link_up(self) -> Any:
        """Report the newest link call as successful. Return the peer."""
        self.receiving.completed(self.links[-1], None)
        return self.links[-1].result()


@pytest.fixture
def decode() -> Decode:
    return Decode()


@pytest.mark.parametrize("known", [False, True])
def test_link_that_ended_before_its_call_was_reported_is_made_again(decode: Decode, known: bool) -> None:
    """Whether or not its end was reported first."""
    decode.begin("one")
    decode.refuses = True
    decode.links[-1].result().alive = not known
    decode.link_up()
    assert "there is no link" in decode.outcomes[0].failure
    decode.refuses = False
    decode.begin("two")
    peer = decode.link_up()
    assert len(decode.links) == 2
    assert [(to, type(message)) for to, message in decode.sent] == [(peer, Ask)]


def test_a_link_serves_later_receives_until_it_ends(decode: Decode) -> None:
    decode.begin("one")
    peer = decode.link_up()
    assert (peer.address, peer.name) == (f"{NAME}:1", f"{NAME}/0")
    decode.begin("two")
    assert len(decode.links) == 1
    decode.receiving.unlinked(peer, "killed")
    assert [outcome.failure for outcome in decode.outcomes] == [f"the link to {NAME}/0 broke: killed"] * 2
    decode.begin("three")
    assert len(decode.links) == 2


def test_link_is_progress(decode: Decode) -> None:
    decode.begin("one")
    assert decode.receiving.next_due() == 5.0
    decode.link_up()
    assert (decode.receiving.next_due() or 0) > 5.0


def test_each_prefill_with_a_ticket_gets_done(decode: Decode) -> None:
    """A proxy has given a ticket to one prefill, and then to another one."""
    peers = []
    for engine in (NAME, "other"):
        decode.begin(f"from {engine}", engine)
        peers.append(decode.link_up())
    for peer in peers:
        number = next(message.receive for to, message in decode.sent if to is peer)
        decode.receiving.heard(peer, Gone("t", number, "over"))
    done = [to for to, message in decode.sent if isinstance(message, Done)]
    assert done == peers


def test_done_is_sent_when_the_last_receive_of_a_ticket_ends(decode: Decode) -> None:
    for request in ("one", "two"):
        decode.begin(request)
    first, second = decode.links
    peer = second.result.return_value = first.result()
    for link in (first, second):
        decode.receiving.completed(link, None)
    for _, message in list(decode.sent):
        assert not any(isinstance(sent, Done) for _, sent in decode.sent)
        decode.receiving.heard(peer, Gone("t", message.receive, "over"))
    assert [type(message) for _, message in decode.sent] == [Ask, Ask, Done]


def kinds(decode: Decode) -> list[type]:
    return [type(message) for _, message in decode.sent]


@pytest.mark.parametrize("blocks", [True, False])
def test_done_waits_for_a_receive_of_the_ticket_that_is_still_linking(decode: Decode, blocks: bool) -> None:
    """Whether or not the first receive, which ends, had blocks to read."""
    decode.begin("one", blocks=blocks)
    decode.begin("two")
    first, second = decode.links
    decode.receiving.completed(first, None)
    if blocks:
        decode.receiving.heard(first.result(), Gone("t", decode.sent[0][1].receive, "over"))
    assert Done not in kinds(decode)
    decode.receiving.completed(second, None)
    assert kinds(decode)[-1] is Ask
    decode.receiving.heard(second.result(), Gone("t", decode.sent[-1][1].receive, "over"))
    assert kinds(decode).count(Done) == 1


def test_a_receive_that_cannot_link_sends_the_done_that_was_left_to_it(decode: Decode) -> None:
    decode.begin("one", blocks=False)
    decode.begin("two")
    first, second = decode.links
    decode.receiving.completed(first, None)
    assert decode.sent == []
    decode.receiving.completed(second, Timeout("no answer"))
    assert [(to, type(message)) for to, message in decode.sent] == [(first.result(), Done)]
    assert [outcome.failure for outcome in decode.outcomes] == ["no answer"]


def test_linked_ranks_get_done_although_a_link_call_raises(decode: Decode) -> None:
    decode.begin("one", ports=(1, 2))
    first, second = decode.links
    decode.receiving.completed(second, None)
    decode.receiving.completed(first, Timeout("no answer"))
    decode.sent.clear()
    decode.unreachable.add(f"{NAME}:1")
    decode.begin("two", ports=(1, 2))
    assert [(to, type(message)) for to, message in decode.sent] == [(second.result(), Done)]
    assert [outcome.failure for outcome in decode.outcomes] == ["no answer", "no more link calls"]


def test_reason_of_a_peer_is_fit_for_the_log(decode: Decode) -> None:
    decode.begin("one")
    decode.receiving.heard(decode.link_up(), Gone("t", 0, "line\nbreak \udc80" + "x" * 2000))
    failure = decode.outcomes[0].failure
    assert "line?break ?" in failure
    assert failure.isprintable()
    assert len(failure) < MAX_REASON + 100


def test_a_done_that_cannot_be_sent_is_logged(decode: Decode, caplog: pytest.LogCaptureFixture) -> None:
    decode.begin("one")
    peer = decode.link_up()
    decode.refuses = True
    decode.receiving.heard(peer, Gone("t", 0, "over"))
    assert f"cannot send Done of t to {NAME}/0, so its blocks wait for the end of the lease: " in caplog.text
    assert [outcome.request for outcome in decode.outcomes] == ["one"]


def test_a_peer_that_is_gone_gets_no_done(decode: Decode) -> None:
    decode.begin("one")
    peer = decode.link_up()
    peer.alive = False
    decode.receiving.unlinked(peer, "killed")
    assert [type(message) for _, message in decode.sent] == [Ask]
