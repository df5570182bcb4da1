"""The order of messages, and those for which a peer has no room, with a peer that the tests control."""

from __future__ import annotations

from typing import Any

import pytest

from llm_datadist import Busy, OutOfMemory, PeerLost
from llm_datadist.integrations.vllm import outbox
from llm_datadist.integrations.vllm.messages import Done, decode, encode
from llm_datadist.integrations.vllm.outbox import Outbox


class Peer:
    name = "peer"

    def __init__(self, room: int) -> None:
        self.room = room
        self.got: list[str] = []
        self.closed = False
        self.close_error: Exception | None = None
        self.send_error: Exception | None = None

    def send(self, payload: bytes) -> None:
        if self.closed:
            raise PeerLost("there is no link")
        if self.send_error is not None:
            raise self.send_error
        if len(self.got) == self.room:
            raise Busy("no room")
        message: Any = decode(payload)
        self.got.append(message.ticket)

    def close(self) -> None:
        if self.close_error is not None:
            raise self.close_error
        self.closed = True


def send(box: Outbox, peer: Any, *tickets: str) -> None:
    for ticket in tickets:
        box.send(peer, Done(ticket))


def test_messages_keep_their_order() -> None:
    box, full, other = Outbox(), Peer(1), Peer(9)
    send(box, full, "a", "b", "c")
    send(box, other, "z")
    assert (full.got, other.got) == (["a"], ["z"])
    assert box.next_due(5.0) == 5.0 + outbox.RESEND_S
    full.room = 2
    box.resend()
    send(box, full, "d")
    assert full.got == ["a", "b"]
    full.room = 9
    box.resend()
    assert full.got == ["a", "b", "c", "d"]
    assert box.next_due(5.0) is None


@pytest.mark.parametrize(("name", "limit"), [("MAX_WAITING", 2), ("MAX_BYTES", 2 * len(encode(Done("a"))))])
def test_a_peer_that_reads_nothing_loses_its_link(name: str, limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, name, limit)
    box, full = Outbox(), Peer(0)
    send(box, full, "a", "b")
    assert not full.closed
    send(box, full, "c")
    assert full.closed
    with pytest.raises(PeerLost):
        send(box, full, "d")
    assert box.next_due(0) is None


def test_a_broken_link_ends_the_wait(caplog: pytest.LogCaptureFixture) -> None:
    box, full = Outbox(), Peer(0)
    send(box, full, "a")
    full.closed = True
    box.resend()
    assert box.next_due(0) is None
    assert "cannot send 1 messages to peer" in caplog.text


def test_bytes_that_were_sent_count_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "MAX_BYTES", 2 * len(encode(Done("a"))))
    box, peer = Outbox(), Peer(0)
    for number, ticket in enumerate("abcdef", 1):
        send(box, peer, ticket)
        assert not peer.closed
        peer.room = number
        box.resend()
    assert peer.got == list("abcdef")


@pytest.mark.parametrize("error", [OutOfMemory("no memory"), MemoryError()])
@pytest.mark.parametrize("waits", [True, False])
def test_a_message_that_cannot_be_sent_ends_the_link(error: Exception, waits: bool) -> None:
    """Prefill would keep blocks without end if ``Done`` were lost. A full engine ends the link later."""
    box, peer = Outbox(), Peer(0)
    if waits:
        send(box, peer, "a")
    peer.send_error, peer.close_error = error, Busy("no more transfers")
    box.resend() if waits else send(box, peer, "a")
    assert (peer.closed, box.next_due(5.0)) == (False, 5.0 + outbox.RESEND_S)
    peer.send_error = None
    with pytest.raises(PeerLost):
        send(box, peer, "b")
    box.resend()
    assert not peer.closed
    peer.close_error = None
    box.resend()
    assert (peer.closed, peer.got, box.next_due(5.0)) == (True, [], None)
