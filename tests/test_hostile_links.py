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
from hostile.client import GENERATIONS, EndedError, Listener, Offer, Wire, dial_tcp, frame, header
from hostile.client import Peer as Attacker
from hostile.trial import GONE, TOKEN, Trial
from llm_datadist.native import Timeout
from peers import LINK_FAILED, OK, Ends, eventually, options

MAX_METADATA = 16 << 10
# Too long, not UTF-8, and text that would not stay in its line of a log.
BAD_NAMES = (b"x" * 129, b"\xff\xfe", b"a\nb", b"\x1b[2J", "\u202e".encode())


@pytest.mark.parametrize("local", [False, True], ids=["tcp", "local"])
def test_metadata_of_peers_is_bounded(local: bool) -> None:
    """Confirmations that are too long, lie about their length or are no message end their connection only."""
    bodies = [
        m.confirm(bytes(MAX_METADATA + 1)),
        m.confirm(bytes(1 << 20)),
        m.blob(b"") + m.blob(bytes(10)),  # no word about an offer
        m.blob(b"") + m.blob(bytes(10))[:-1],  # shorter than it says
        m.blob(b"") + b"\xff\xff\xff\xff\x0f",  # 4 GiB that do not follow
        b"\xff\xff\xff\xff\x0f",  # the same as a name
        *(m.confirm(name=name) for name in BAD_NAMES),
        m.confirm(b"x") + b"y",
        b"",
    ]
    with Trial() as trial:
        trial.begin()
        for number, body in enumerate(bodies * 5):
            link = trial.link(100 + number, local=local, stop="attached" if local else "welcome")
            with suppress(OSError):  # the engine closes the stream after the header
                link.control.send(frame(body))
            with pytest.raises((EndedError, OSError)):
                link.control.hear()
        liar = trial.link(99, local=local, stop="attached" if local else "welcome")
        liar.control.send(header(1 << 30))
        assert liar.control.ended()
        # The longest one is accepted.
        link = trial.link(98, local=local, stop="attached" if local else "welcome")
        link.control.say(m.confirm(b"z" * MAX_METADATA, name=b"n" * 128))
        assert m.read_entered(link.control.hear()) == b""
        assert b"z" * MAX_METADATA in [metadata for _, _, metadata in trial.victim.peers()]
        trial.judge(links=2, mapped=(5 * len(bodies) + 4) * GENERATIONS)


def test_offers_of_peers_are_bounded() -> None:
    """Offers for UCX that are malformed end their connection only, and an engine without UCX ignores valid ones."""
    key = bytes(4096)
    full = m.offered_pool((1 << 64) - 1, (1 << 64) - 1, key)
    bodies = [
        m.blob(b"") + b"\x02",  # neither an offer nor none
        m.confirm(fabric=m.offer(b"1.22.0", bytes(4097))),
        m.confirm(fabric=m.offer(b"1.22.0", b"", (m.offered_pool(0, 1, bytes(4097)), None))),
        m.confirm(fabric=m.offer(b"\xff\xfe", b"")),  # no UTF-8
        m.confirm(fabric=m.offer(b"1.22.0", b"address"))[:-1],
        m.confirm(fabric=m.offer(b"1.22.0", b"address")) + b"x",
        m.confirm(fabric=m.blob(b"") + b"\xff\xff\xff\xff\x0f"),  # 4 GiB that do not follow
    ]
    with Trial() as trial:
        trial.begin()
        for number, body in enumerate(bodies * 3):
            link = trial.link(100 + number, stop="welcome")
            with suppress(OSError):
                link.control.send(frame(body))
            with pytest.raises((EndedError, OSError)):
                link.control.hear()
        link = trial.link(98, stop="welcome")
        link.control.say(m.confirm(b"z" * MAX_METADATA, m.offer(b"1.22.0", key, (full, full)), b"n" * 128))
        m.read_entered(link.control.hear())
        assert b"z" * MAX_METADATA in [metadata for _, _, metadata in trial.victim.peers()]
        trial.judge(links=2)


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
            stranger = Attacker(66, "another token of some length")
            wire = dial_tcp(address)
            trial.held.callback(wire.close)
            stranger.greet(wire, purpose, stop="proof")
            wire.say(m.confirm(b"me"))
            with pytest.raises((EndedError, OSError)) as caught:
                wire.hear()
            assert secret.decode() not in str(caught.value)
            early = dial_tcp(address)
            trial.held.callback(early.close)
            early.say(m.confirm(bytes(MAX_METADATA)))
            with pytest.raises((EndedError, OSError)):
                early.hear()
            # In place of the proof.
            wrong = dial_tcp(address)
            trial.held.callback(wrong.close)
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
        twice = trial.link(101, local=local, stop="attached" if local else "welcome")
        twice.control.send(2 * frame(m.confirm(b"twice")))
        with suppress(*GONE):
            m.read_entered(twice.control.hear())
        assert twice.control.ended()
        trial.judge(links=2, mapped=4 * GENERATIONS)


def test_a_link_on_demand_that_is_claimed_again_is_refused() -> None:
    """A peer with the identity of a linked one gets no second link, and the first one stays."""
    with Trial(honest=["tcp"]) as trial:
        trial.begin()
        first = trial.attacker(100, instance=5).link_tcp(trial.victim.address)
        trial.held.callback(first.close)
        trial.tender.add(first)
        for instance in (5, 6):
            wire = dial_tcp(trial.victim.address)
            trial.held.callback(wire.close)
            trial.attacker(100, instance=instance).greet(wire, m.purpose_link(7, ensure=True))
            wire.say(m.confirm())
            assert wire.hear()[:1] == m.later("")[:1]
            assert wire.ended()
        assert sorted(cluster for cluster, _, _ in trial.victim.peers()) == [30, 100]
        trial.judge(links=2)


def _serve(_: Wire) -> None:
    raise AssertionError("nobody calls")


@pytest.mark.parametrize(
    "answer",
    [
        m.later("a link that never comes"),
        m.later("x" * 16000),
        m.entered(bytes(MAX_METADATA + 1)),
        m.entered(name=b"x" * 129),
        m.entered(name=b"\xff\xfe"),
        m.PING,
        b"\x09",
    ],
    ids=["later", "long reason", "long metadata", "long name", "no utf-8", "short", "unknown"],
)
def test_answers_that_are_no_link(ends: Ends, answer: bytes) -> None:
    """The call dials until its deadline, and the engine keeps working."""
    local = ends.local(options(llm__LinkToken=TOKEN, llm__LinkTransport="tcp"))
    remote = ends.peer(options(llm__LinkToken=TOKEN, llm__LinkTransport="tcp"))
    with Listener(Attacker(77, TOKEN), _serve) as listener:
        listener.answer_to_link = answer
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
            wire = dial_tcp(trial.victim.address)
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
        link = trial.link(local=local, offer=Offer() if local else None)
        if way == "half a message":
            link.control.send(header(100) + b"x")
        if way == "unread pings":
            link.control.socket.recv(1, socket.MSG_PEEK)  # a ping of the engine, which this side never reads
        (resets if way == "reset" else Wire.close)(link.control)
        downs: list[tuple[int, str]] = []
        eventually(lambda: downs.extend(trial.victim.downs()) or downs)
        reason = "the peer closed the connection: its process ended or was killed, or it dropped the link"
        assert downs == [(66, reason)]


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
        downs: list[tuple[int, str]] = []
        eventually(lambda: downs.extend(trial.victim.downs()) or downs)
        assert downs == [(77, "it was unlinked here")]
