"""The order of messages, and those for which a peer has no room, with a peer that the tests control."""

from __future__ import annotations

from typing import Any

import pytest

from llm_datadist import Busy, PeerLost
from llm_datadist.integrations.vllm import outbox
from llm_datadist.integrations.vllm.messages import Done, decode
from llm_datadist.integrations.vllm.outbox import Outbox


class Peer:
    name = "peer"

    def __init__(self, room: int) -> None:
        self.room = room
        self.got: list[str] = []
        self.closed = False

    def send(self, payload: bytes) -> None:
        if self.closed:
            raise PeerLost("there is no link")
        if len(self.got) == self.room:
            raise Busy("no room")
        message: Any = decode(payload)
        self.got.append(message.ticket)

    def close(self) -> None:
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


def test_a_peer_that_reads_nothing_loses_its_link(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "MAX_WAITING", 2)
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
