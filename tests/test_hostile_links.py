"""Peers that misbehave at the end of the handshake, where the metadata of the programs travels, or that end a link.

Not for: stalled connections (`test_hostile_peers.py`), what an honest program may send (`native/test_peers.py`).
"""

from __future__ import annotations

import socket
import struct
import time
from contextlib import suppress

import pytest

from hostile import messages as m
from hostile.client import GENERATIONS, EndedError, Listener, Wire, frame, header
from hostile.client import Peer as Attacker
from hostile.trial import GONE, TOKEN, Trial
from llm_datadist.native import Timeout
from peers import LINK_FAILED, OK, Ends, eventually, options

MAX_METADATA = 16 << 10
POOL = m.offered_pool((1 << 64) - 1, (1 << 64) - 1, bytes(4096))
LONGEST = m.confirm(b"z" * MAX_METADATA, m.offer(b"1.22.0", bytes(4096), (POOL, POOL)), b"n" * 128)
# Confirmations that are too long, lie about their length, or are none. `protocol.rs` of the core has more of them.
BAD_CONFIRMATIONS = {
    "long metadata": m.confirm(bytes(MAX_METADATA + 1)),
    "very long metadata": m.confirm(bytes(1 << 20)),
    "no word about an offer": m.blob(b"") + m.blob(bytes(10)),
    "metadata shorter than it says": m.blob(b"") + m.blob(bytes(10))[:-1],
    "4 GiB of metadata that do not follow": m.blob(b"") + b"\xff\xff\xff\xff\x0f",
    "a name of 4 GiB that does not follow": b"\xff\xff\xff\xff\x0f",
    "a long name": m.confirm(name=b"x" * 129),
    "a name that is not UTF-8": m.confirm(name=b"\xff\xfe"),
    "a name of two lines": m.confirm(name=b"a\nb"),
    "more than a confirmation": m.confirm(b"x") + b"y",
    "nothing": b"",
    "neither an offer nor none": m.blob(b"") + m.blob(b"") + b"\x02",
    "an offer with a long address": m.confirm(fabric=m.offer(b"1.22.0", bytes(4097))),
    "a pool with a long key": m.confirm(fabric=m.offer(b"1.22.0", b"", (m.offered_pool(0, 1, bytes(4097)), None))),
    "an offer of a version that is not UTF-8": m.confirm(fabric=m.offer(b"\xff\xfe", b"")),
    "half an offer": m.confirm(fabric=m.offer(b"1.22.0", b"address"))[:-1],
    "more than an offer": m.confirm(fabric=m.offer(b"1.22.0", b"address")) + b"x",
    "an address of 4 GiB that does not follow": m.confirm(fabric=m.blob(b"") + b"\xff\xff\xff\xff\x0f"),
}


def unconfirmed(trial: Trial, cluster: int, local: bool) -> Wire:
    """A link that lacks only the confirmation."""
    return trial.link(cluster, local=local, stop="attached" if local else "welcome").control


@pytest.mark.parametrize("local", [False, True], ids=["tcp", "local"])
def test_confirmations_of_peers_are_bounded(local: bool) -> None:
    """A bad one ends its connection only. An engine without UCX ignores a valid offer for it."""
    with Trial() as trial:
        trial.begin()
        for number, what in enumerate(list(BAD_CONFIRMATIONS) * 3):
            wire = unconfirmed(trial, 100 + number, local)
            with suppress(OSError):  # the engine closes the stream after the header
                wire.send(frame(BAD_CONFIRMATIONS[what]))
            assert wire.ended(), what
        liar = unconfirmed(trial, 99, local)
        liar.send(header(1 << 30))
        assert liar.ended()
        wire = unconfirmed(trial, 98, local)
        wire.say(LONGEST)
        assert m.read_entered(wire.hear()) == b""
        assert b"z" * MAX_METADATA in [metadata for _, _, metadata in trial.victim.peers()]
        trial.judge(links=2, mapped=(3 * len(BAD_CONFIRMATIONS) + 4) * GENERATIONS)


def test_nobody_gets_metadata_without_a_proof() -> None:
    """The engine neither sends metadata to a peer that has not proved its identity, nor reads any from it."""
    with Trial(honest=["tcp"]) as trial:
        secret = b"what only friends may know"
        # An engine of the native API, which has metadata, in the process of the victim.
        address = trial.victim.open_engine(listen="127.0.0.1:0", token=TOKEN, metadata=secret)
        friend = trial.attacker(68).link_tcp(address)
        trial.held.callback(friend.close)
        assert friend.metadata == secret
        trial.begin()
        for purpose in (m.purpose_link(1), m.purpose_link(1, ensure=True)):
            wire = trial.dial(address)
            Attacker(66, "another token of some length").greet(wire, purpose, stop="proof")
            wire.say(m.confirm(b"me"))
            with pytest.raises((EndedError, OSError)) as caught:
                wire.hear()
            assert secret.decode() not in str(caught.value)
            early = trial.dial(address)
            early.say(m.confirm(bytes(MAX_METADATA)))
            with pytest.raises((EndedError, OSError)):
                early.hear()
            # In place of the proof.
            wrong = trial.dial(address)
            trial.attacker(67).greet(wrong, purpose, stop="hello")
            assert secret not in wrong.hear()
            wrong.say(m.confirm(bytes(1000)))
            with pytest.raises((EndedError, OSError)):
                wrong.hear()
        assert len(trial.victim.peers()) == 1
        trial.judge()


@pytest.mark.parametrize("local", [False, True], ids=["tcp", "local"])
def test_a_second_confirmation_ends_the_link(local: bool) -> None:
    with Trial(honest=["tcp"]) as trial:
        trial.begin()
        link = trial.link(100, local=local)
        link.control.say(m.confirm(b"once more"))
        assert link.control.ended()
        eventually(lambda: len(trial.victim.peers()) == 1)
        # Both at once. The engine may read the second one before the answer to the first one has left.
        twice = unconfirmed(trial, 101, local)
        twice.send(2 * frame(m.confirm(b"twice")))
        with suppress(*GONE):
            m.read_entered(twice.hear())
        assert twice.ended()
        trial.judge(links=2, mapped=4 * GENERATIONS)


def test_a_link_on_demand_that_is_claimed_again_is_refused() -> None:
    """A peer with the identity of a linked one gets no second link, and the first one stays."""
    with Trial(honest=["tcp"]) as trial:
        trial.begin()
        first = trial.attacker(100, instance=5).link_tcp(trial.victim.address)
        trial.held.callback(first.close)
        trial.tender.add(first)
        for instance in (5, 6):
            wire = trial.dial()
            trial.attacker(100, instance=instance).greet(wire, m.purpose_link(7, ensure=True))
            wire.say(m.confirm())
            assert wire.hear()[:1] == m.later("")[:1]
            assert wire.ended()
        assert sorted(cluster for cluster, _, _ in trial.victim.peers()) == [30, 100]
        trial.judge(links=2)


def _serve(_: Wire) -> None:
    raise AssertionError("nobody calls")


ANSWERS = {
    "later": m.later("a link that never comes"),
    "long reason": m.later("x" * 16000),
    "long metadata": m.entered(bytes(MAX_METADATA + 1)),
    "long name": m.entered(name=b"x" * 129),
    "no utf-8": m.entered(name=b"\xff\xfe"),
    "short": m.PING,
    "unknown": b"\x09",
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_answers_that_are_no_link(ends: Ends, answer: str) -> None:
    """The call dials until its deadline, and the engine keeps working."""
    local = ends.local(options(llm__LinkToken=TOKEN, llm__LinkTransport="tcp"))
    remote = ends.peer(options(llm__LinkToken=TOKEN, llm__LinkTransport="tcp"))
    with Listener(Attacker(77, TOKEN), _serve) as listener:
        listener.answer_to_link = ANSWERS[answer]
        with pytest.raises(Timeout):
            local.engine.link(listener.address, timeout=0.5).result()
        assert local.link_clusters([(77, listener.address)])[1] == [LINK_FAILED]
        assert local.peers() == []
        local.engine.link(remote.address).result()
        assert [cluster for cluster, _, _ in local.peers()] == [remote.cluster]


def resets(wire: Wire) -> None:
    """Close the connection with a reset, as the kernel does for a process that has not read all."""
    wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    wire.close()


def test_connections_that_end_before_a_greeting_are_no_errors() -> None:
    """A peer that gives up an attempt to link resets its connection, also before it has said anything."""
    with Trial(honest=()) as trial:
        for stop in ("connect", "half header", "hello", "proof") * 10:
            wire = trial.dial()
            trial.attacker().greet(wire, m.purpose_link(1), stop=stop)
            resets(wire)
        link = trial.link()
        assert link.control.socket.fileno() >= 0
        said = [line for line in trial.victim.said().splitlines() if "refused a connection" in line and "ERROR" in line]
        assert not [line for line in said if "reset" in line or "errno=" in line], said


@pytest.mark.parametrize(
    ("way", "local"),
    [
        ("reset", False),  # local sockets have no reset
        *[(way, local) for way in ("close", "half a message", "unread pings") for local in (False, True)],
    ],
)
def test_links_of_processes_that_end_have_one_reason(way: str, local: bool) -> None:
    """The kernel closes the connections of a killed process in one of these ways. `LinkDown` has one reason for all."""
    with Trial(honest=()) as trial:
        trial.victim.downs()
        link = trial.link(local=local)
        if way == "half a message":
            link.control.send(header(100) + b"x")
        if way == "unread pings":
            link.control.socket.recv(1, socket.MSG_PEEK)  # a ping of the engine, which this side never reads
        (resets if way == "reset" else Wire.close)(link.control)
        reason = "the peer closed the connection: its process ended or was killed, or it dropped the link"
        assert eventually(trial.victim.downs) == [(66, reason)]


@pytest.mark.parametrize("force", [False, True])
def test_side_that_unlinks_is_told_so_though_the_peer_says_goodbye_first(force: bool) -> None:
    """The peer says goodbye before it answers the request to unlink, or to the goodbye of the engine."""
    with Trial(honest=()) as trial:
        trial.victim.downs()

        def serve(wire: Wire) -> None:
            wire.hear()  # the request to unlink
            link.control.say(m.bye("the peer unlinked", unlinked=True))
            time.sleep(0.3)  # the engine has read the goodbye by now
            wire.say(m.done())

        listener, link = trial.listen(serve)
        assert trial.victim.unlink_clusters([(77, listener.address)], 5000, force)[0] == OK
        assert eventually(trial.victim.downs) == [(77, "it was unlinked here")]
