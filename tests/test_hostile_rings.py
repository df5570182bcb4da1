"""Attacks as in `test_hostile_peers.py`, on the shared memory that carries calls between processes of one host."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from contextlib import suppress
from typing import Callable

from hostile import messages as m
from hostile.client import PAYLOAD_RING, RING, RING_FILE, EndedError, Link, RingWire, ask, frame, memory
from hostile.messages import U64
from hostile.trial import GONE, PREY, PREY_BYTES, SILENCE, SLACK, Trial, attack, prey_of
from peers import eventually, lingering_socket

MAX_RINGS = 4  # call streams of a link, in one direction
PING = m.ping()


def room(trial: Trial) -> None:
    """Wait until the victim takes one more stream with rings. A closed one counts until its thread notices."""
    ringed = lambda: next(one["call_rings"] for one in trial.victim.links() if one["cluster"] == 66)  # noqa: E731
    eventually(lambda: ringed() < MAX_RINGS, what="room for one more stream")


def refused_offers() -> dict[str, Callable[[], list[int]]]:
    """The core has more of them (`shared_rings/tests.rs`)."""
    return {
        "no descriptor": list,
        "a file descriptor of an event": lambda: [os.eventfd(0)],
        "memory that may shrink": lambda: [memory(RING_FILE, 0)],
        "memory that may lose pages": lambda: [memory(RING_FILE, 0x2 | 0x4)],
        "too short": lambda: [memory(RING_FILE - 1)],
    }


def test_offers_that_cannot_be_used_leave_the_socket() -> None:
    with attack(local=True) as (_, link):
        for name, make in refused_offers().items():
            given = make()
            wire, refused, received = link.offer_rings(given)
            for descriptor in given:
                os.close(descriptor)
            assert refused, name
            assert received == [], name
            assert ask(wire, PING)["is"] == "Done", f"{name}: the stream goes on over its socket"
        rings = [link.ringed_call() for _ in range(MAX_RINGS)]
        spare = memory(RING_FILE)
        wire, refused, _ = link.offer_rings([spare])
        os.close(spare)
        assert refused is not None
        assert "maximum number" in refused, refused
        assert ask(wire, PING)["is"] == "Done"
        for ring in rings:
            assert ring.ask(PING)["is"] == "Done"


def write(wire: RingWire, cache: int, count: int) -> None:
    """Ask for a write of the first bytes, for which the engine gets ready."""
    assert wire.ask(m.write(m.name_blocks(1), cache, first(count), 0, count))["is"] == "Ready"


def read(wire: RingWire, cache: int, count: int) -> None:
    """Ask for a read of the first bytes, which the engine begins to send."""
    assert wire.ask(m.read(m.name_blocks(1), cache, first(count), 0, count))["is"] == "Ready"


def first(count: int) -> bytes:
    """A plan of the first bytes of a tensor, from and to the same place."""
    return m.plan_spans([m.span(0, 0, count)])


def payload_that_does_not_fit(wire: RingWire, cache: int, written: int = PAYLOAD_RING + 1) -> None:
    write(wire, cache, PREY_BYTES)
    wire.payload.forge(wire.WRITTEN, written)


def payload_taken_before_it_comes(wire: RingWire, cache: int, taken: int = PAYLOAD_RING + 1) -> None:
    read(wire, cache, PREY)
    # The engine waits for room, and reads this word next.
    wire.payload.wait(lambda: wire.payload.word(wire.WRITTEN) == PAYLOAD_RING)
    wire.payload.forge(wire.READ, taken)


def no_zeros_before_a_payload(wire: RingWire, cache: int) -> None:
    write(wire, cache, 5)
    wire.payload.give(bytes(5))
    assert m.read_reply(wire.hear())["is"] == "Done"
    write(wire, cache, PREY_BYTES)
    wire.payload.send(b"\1" * (4096 + PREY_BYTES))


BREACHES: dict[str, Callable[[RingWire, int], object]] = {
    "bytes that do not fit": lambda wire, _: wire.forge(wire.WRITTEN, RING + 1),
    "2^63 bytes": lambda wire, _: wire.forge(wire.WRITTEN, 2**63),
    "2^64-1 bytes": lambda wire, _: wire.forge(wire.WRITTEN, U64),
    "fewer bytes than before": lambda wire, _: wire.forge(wire.WRITTEN, 1),
    "no message": lambda wire, _: wire.say(b"\xff" * 40),
    "no frame": lambda wire, _: wire.send(b"no frame at all"),
    "a frame that is too long": lambda wire, _: wire.send(frame(PING)[:5] + b"\xff\xff\xff" + bytes(RING - 8)),
    "payload that does not fit": payload_that_does_not_fit,
    "2^63 bytes of payload": lambda wire, cache: payload_that_does_not_fit(wire, cache, 2**63),
    "2^64-1 bytes of payload": lambda wire, cache: payload_that_does_not_fit(wire, cache, U64),
    "payload taken before it comes": payload_taken_before_it_comes,
    "2^63 bytes of payload taken": lambda wire, cache: payload_taken_before_it_comes(wire, cache, 2**63),
    "no zeros before a payload": no_zeros_before_a_payload,
}


def test_breaches_of_the_rules_end_only_their_stream() -> None:
    with attack(local=True) as (_, link):
        good = link.ringed_call()
        cache = prey_of(good)
        for what, breach in BREACHES.items():
            bad = link.ringed_call()
            assert bad.ask(PING)["is"] == "Done"
            with suppress(*GONE):
                breach(bad, cache)
                bad.wake()
            assert bad.wire.ended(SLACK), f"{what}: the stream goes on"
            assert good.ask(PING)["is"] == "Done", what
        # One word claims that nothing was read, and the other payload is not read: the engine runs out of room.
        stuck, unread = link.ringed_call(), link.ringed_call()
        read(unread, cache, PREY)
        stuck.forge(stuck.READ, 0)
        with suppress(*GONE):
            for _ in range(RING // 8):
                stuck.say(PING)
        for ring in (stuck, unread):
            assert ring.wire.ended(SILENCE + SLACK), "the engine waits for room without end"
        assert good.ask(PING)["is"] == "Done"


def test_cache_bytes_travel_through_their_own_rings() -> None:
    with attack(local=True) as (_, link):
        wire = link.ringed_call()
        cache = prey_of(wire)
        chance = random.Random(3)  # noqa: S311
        # The ring is passed several times, and the positions in it are aligned by zeros only before long transfers.
        for count in (1, 5000, PREY_BYTES, 4097, 300_000, PREY_BYTES, 1_000_000, 1, 900_001):
            data = chance.randbytes(count)
            write(wire, cache, count)
            wire.payload.give(data)
            assert m.read_reply(wire.hear()) == {"is": "Done", "bytes": count}
            read(wire, cache, count)
            assert wire.payload.take(count) == data, count
        assert wire.ask(PING)["is"] == "Done"


def test_requests_of_a_caller_that_has_closed_its_stream_are_refused() -> None:
    """A caller closes its stream when it gives up, and may repeat the call over another one.

    The first request, which may still be in the ring, must not write after the second one.
    """
    with attack(local=True) as (_, link):
        other = link.ringed_call()
        cache = prey_of(other)
        read(other, cache, PREY_BYTES)
        before = other.payload.take(PREY_BYTES)
        for count in (5, PREY_BYTES):
            wire = link.ringed_call()
            wire.forge(wire.CLOSED, 1)
            request = m.write(m.name_blocks(1), cache, first(count), 0, count, ahead=count == 5)
            if count == 5:
                wire.payload.put(b"after")
            # Sent together: the engine usually reads the second request within 0.2 ms of its first reply, and then does
            # not ask the kernel.
            wire.send(frame(PING) + frame(request))
            assert m.read_reply(wire.hear())["is"] == "Done"
            answer = m.read_reply(wire.hear())
            assert (answer["is"], answer["message"]) == ("Failed", "the caller has given up"), answer
            read(other, cache, PREY_BYTES)
            assert other.payload.take(PREY_BYTES) == before
            wire.wire.close()
        assert other.ask(PING)["is"] == "Done"


def test_repeated_write_is_the_last_one() -> None:
    """A caller gives up a write at any moment, and repeats it over another stream: the repeated one decides."""
    with attack(local=True) as (trial, link):
        other = link.ringed_call()
        cache = prey_of(other)
        request = m.write(m.name_blocks(1), cache, first(5), 0, 5, ahead=True)
        refused = 0
        for number in range(60):
            room(trial)
            wire = link.ringed_call()
            if number % 2:
                # Now the engine polls the ring for a moment.
                assert wire.ask(PING)["is"] == "Done"
            wire.payload.put(b"first")
            wire.say(request)
            wire.forge(wire.CLOSED, 1)
            data = b"%05d" % number
            other.payload.put(data)
            assert other.ask(request) == {"is": "Done", "bytes": 5}
            refused += m.read_reply(wire.hear())["is"] == "Failed"
            read(other, cache, 5)
            assert other.payload.take(5) == data, f"round {number}, {refused} refused before"
            wire.wire.close()
        assert other.ask(PING)["is"] == "Done"


def test_request_changed_during_read_stays_within_the_cache() -> None:
    """The engine checks the copy that it has made, so rows outside the cache are never read."""
    with attack(local=True) as (trial, link):
        calm = link.ringed_call()
        cache = prey_of(calm)
        stop, chance = threading.Event(), random.Random(2)  # noqa: S311

        def spoil(wire: RingWire) -> None:
            while not stop.is_set():
                at = chance.randrange(RING)
                wire.own[4096 + at] = chance.randrange(256)

        for _ in range(40):
            room(trial)
            wire = link.ringed_call()
            thread = threading.Thread(target=spoil, args=(wire,))
            thread.start()
            with suppress(*GONE, AssertionError):
                for row in range(20):
                    plan = m.plan_spans([m.span(row * PREY_BYTES, 0, PREY_BYTES)])
                    wire.say(m.read(m.name_blocks(1), cache, plan, 0, PREY_BYTES))
            stop.set()
            thread.join()
            stop.clear()
            wire.wire.close()
        assert calm.ask(PING)["is"] == "Done"


def lingering() -> int:
    """Return a socket whose last `close` waits for half a minute."""
    made, other = lingering_socket(30)
    LINGERING.append(other)
    return made.detach()


LINGERING: list[socket.socket] = []  # the other ends


def test_descriptors_that_close_slowly_hold_nobody_up() -> None:
    """Whatever comes of an offer, the thread that accepts connections closes none of its descriptors itself."""
    with attack(local=True) as (_, link):
        rings = [link.ringed_call() for _ in range(MAX_RINGS)]
        offered, bad = frame(m.RING_OFFER), frame(b"unreadable")
        for before, said in ((b"", offered), (b"", bad), (bad[:-4], bad[-4:]), (offered, b"behind")):
            wire = link.call(rings=True)
            wire.socket.sendall(before)
            send_lingering(wire.socket, said)
            with suppress(*GONE):
                assert m.read_ring_answer(wire.hear()) is not None
        time.sleep(SILENCE + 3)
        for ring in rings:
            assert ring.ask(PING)["is"] == "Done"
    while LINGERING:
        LINGERING.pop().close()


def send_lingering(sender: socket.socket, said: bytes, count: int = 1) -> None:
    """Send sockets whose last `close` waits, and close them here on a thread: the engine may have closed them."""
    given = [lingering() for _ in range(count)]

    def send() -> None:
        with suppress(PermissionError):  # Linux 6.16 and later: the engine expects no more descriptors
            socket.send_fds(sender, [said], given)
        for descriptor in given:
            os.close(descriptor)

    threading.Thread(target=send, daemon=True).start()


def offer_lingering(link: Link) -> str:
    """Offer sockets in place of a ring. Return why the engine refused even the stream, or nothing."""
    try:
        wire = link.call(rings=True)
    except EndedError as error:
        return str(error)
    send_lingering(wire.socket, frame(m.RING_OFFER), 8)
    with suppress(*GONE):  # the offer that reaches the limit ends its stream
        assert m.read_ring_answer(wire.hear()) is not None
    return ""


def test_descriptors_that_never_close_are_bounded() -> None:
    """When too many are not closed, the engine opens no stream that may bring more. Open streams go on."""
    with attack(local=True) as (_, link):
        ring = link.ringed_call()
        offered = 0
        while not (refusal := offer_lingering(link)) and offered < 20:
            offered += 1
        assert "not received or closed yet" in refusal
        assert offered >= 4, "three offers are below the limit"
        assert ring.ask(PING)["is"] == "Done"
        assert ask(link.call(), PING)["is"] == "Done", "a stream without rings needs no descriptor"
        while LINGERING:
            LINGERING.pop().close()

        def opened() -> bool:
            with suppress(EndedError):
                return bool(link.ringed_call().ask(PING)["is"] == "Done")
            return False

        eventually(opened, what="a stream with rings once the descriptors are closed")


def test_zeros_before_a_payload_end_with_the_pace_of_the_peer() -> None:
    """A write whose bytes never come, though zeros keep its socket readable, ends as any other that stalls."""
    with attack(local=True) as (_, link):
        good, ring = link.ringed_call(), link.ringed_call()
        write(ring, prey_of(good), PREY_BYTES)
        # The engine never finds the socket empty, so only a bound on what it takes at once ends its loop.
        ring.wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        ring.wire.socket.settimeout(None)

        def flood() -> None:
            with suppress(*GONE):
                while True:
                    ring.wire.send(bytes(1 << 16))

        floods = [threading.Thread(target=flood, daemon=True) for _ in range(2)]
        for thread in floods:
            thread.start()
        until = time.monotonic() + SILENCE + SLACK
        for thread in floods:
            thread.join(max(0.0, until - time.monotonic()))
        goes_on = any(thread.is_alive() for thread in floods)
        ring.wire.socket.shutdown(socket.SHUT_RDWR)
        assert not goes_on, "the stream goes on"
        assert good.ask(PING)["is"] == "Done"
