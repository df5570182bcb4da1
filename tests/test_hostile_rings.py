"""Attacks as in `test_hostile_peers.py`, on the shared memory that carries calls between processes of one host."""

from __future__ import annotations

import os
import random
import socket
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Callable

import pytest

from hostile import messages as m
from hostile.client import (
    GENERATIONS,
    LIMIT,
    PAYLOAD_RING,
    RING,
    RING_FILE,
    EndedError,
    Link,
    Offer,
    RingWire,
    ask,
    frame,
    memory,
)
from hostile.trial import GONE, PREY, PREY_BYTES, SILENCE, SLACK, Trial
from peers import eventually, lingering_socket

if TYPE_CHECKING:
    from collections.abc import Iterator

MAX_RINGS = 4  # call streams of a link, in one direction
PING = m.ping()


def local_link(trial: Trial, offer: Offer) -> Link:
    link = trial.link(local=True, offer=offer)
    trial.tender.add(link)
    return link


def room(trial: Trial) -> None:
    """Wait until the victim takes one more stream with rings. A closed one counts until its thread notices."""
    ringed = lambda: next(one["call_rings"] for one in trial.victim.links() if one["cluster"] == 66)  # noqa: E731
    eventually(lambda: ringed() < MAX_RINGS, what="room for one more stream")


@pytest.fixture
def offer() -> Iterator[Offer]:
    made = Offer()
    yield made
    made.close()


def refused_offers() -> dict[str, Callable[[], list[int]]]:
    return {
        "no descriptor": list,
        "a file descriptor of an event": lambda: [os.eventfd(0)],
        "a file that is no memory": lambda: [os.open("/dev/zero", os.O_RDONLY)],
        "memory that may shrink": lambda: [memory(RING_FILE, 0)],
        "memory that may lose pages": lambda: [memory(RING_FILE, 0x2 | 0x4)],
        "too short": lambda: [memory(RING_FILE - 1)],
        "empty": lambda: [memory(0)],
        "huge pages": lambda: [memory(2 << 20, flags=os.MFD_HUGETLB)],
    }


def test_offers_that_cannot_be_used_leave_the_socket(offer: Offer) -> None:
    with Trial() as trial:
        link = local_link(trial, offer)
        trial.begin()
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
        trial.judge(links=1, streams=len(refused_offers()) + MAX_RINGS + 1, busy=1, mapped=GENERATIONS)


def impossible(wire: RingWire) -> list[Callable[[], None]]:
    return [
        lambda: wire.forge(wire.WRITTEN, RING + 1),
        lambda: wire.forge(wire.WRITTEN, 2**64 - 1),
        lambda: wire.forge(wire.WRITTEN, 2**63),
        lambda: wire.send(frame(b"\xff" * 40)),
        lambda: wire.send(b"no frame at all"),
        lambda: wire.send(frame(PING)[:5] + b"\xff\xff\xff" + bytes(RING - 8)),
    ]


def test_invalid_words_and_messages_end_only_their_stream(offer: Offer) -> None:
    with Trial() as trial:
        link = local_link(trial, offer)
        trial.begin()
        good = link.ringed_call()
        for number in range(6):
            bad = link.ringed_call()
            assert bad.ask(PING)["is"] == "Done"
            with suppress(*GONE):
                impossible(bad)[number]()
                bad.wake()
            assert bad.wire.ended(SLACK), f"case {number} goes on"
            assert good.ask(PING)["is"] == "Done"
        # This word claims that nothing was read, so the engine runs out of room for its replies.
        stuck = link.ringed_call()
        stuck.forge(stuck.READ, 0)
        with suppress(*GONE):
            for _ in range(RING // 8):
                stuck.send(frame(PING))
        assert stuck.wire.ended(SILENCE + SLACK), "the engine waits for room without end"
        assert good.ask(PING)["is"] == "Done"
        trial.judge(links=1, streams=8, busy=1, mapped=GENERATIONS)
        assert not trial.tender.ended, "the link itself goes on"


def spans(start: int, count: int) -> bytes:
    """A plan of these bytes of the first tensor, from and to the same place."""
    return m.plan_spans([m.span(start, start, count)], 1)


def write(wire: RingWire, cache: int, plan: bytes, count: int) -> None:
    """Ask for a write of `count` bytes, for which the engine gets ready."""
    wire.send(frame(m.write(m.name_blocks(1), cache, plan, 0, count)))
    assert m.read_reply(wire.body())["is"] == "Ready"


def read(wire: RingWire, cache: int, plan: bytes, count: int) -> None:
    """Ask for a read of `count` bytes, which the engine begins to send."""
    wire.send(frame(m.read(m.name_blocks(1), cache, plan, 0, count)))
    assert m.read_reply(wire.body())["is"] == "Ready"


def test_cache_bytes_travel_through_their_own_rings(offer: Offer) -> None:
    with Trial() as trial:
        link = local_link(trial, offer)
        trial.begin()
        wire = link.ringed_call()
        cache = int(wire.ask(m.describe(m.name_blocks(1)))["cache"])
        chance = random.Random(3)  # noqa: S311
        # The ring is passed several times, and the positions in it are aligned by zeros only before long transfers.
        for count in (1, 5000, PREY_BYTES, 4097, 300_000, PREY_BYTES, 1_000_000, 1, 900_001):
            data = chance.randbytes(count)
            write(wire, cache, spans(0, count), count)
            wire.payload.give(data)
            assert m.read_reply(wire.body()) == {"is": "Done", "bytes": count}
            read(wire, cache, spans(0, count), count)
            assert wire.payload.take(count) == data, count
        assert wire.ask(PING)["is"] == "Done"
        trial.judge(links=1, streams=1, busy=1, mapped=GENERATIONS)


def test_requests_of_a_caller_that_has_closed_its_stream_are_refused(offer: Offer) -> None:
    """A caller closes its stream when it gives up, and may repeat the call over another one.

    The first request, which may still be in the ring, must not write after the second one.
    """
    with Trial() as trial:
        link = local_link(trial, offer)
        trial.begin()
        other = link.ringed_call()
        cache = int(other.ask(m.describe(m.name_blocks(1)))["cache"])
        read(other, cache, spans(0, PREY_BYTES), PREY_BYTES)
        before = other.payload.take(PREY_BYTES)
        for count in (5, PREY_BYTES):
            wire = link.ringed_call()
            wire.forge(wire.CLOSED, 1)
            request = m.write(m.name_blocks(1), cache, spans(0, count), 0, count, ahead=count == 5)
            if count == 5:
                wire.payload.write_bytes(b"after")
                wire.payload.forge(wire.WRITTEN, 5)
            # Sent together: the engine usually reads the second request within 0.2 ms of its first reply, and then does
            # not ask the kernel.
            wire.send(frame(PING) + frame(request))
            assert m.read_reply(wire.body())["is"] == "Done"
            answer = m.read_reply(wire.body())
            assert answer["is"] == "Failed", answer
            assert answer["message"] == "the caller has given up", answer
            read(other, cache, spans(0, PREY_BYTES), PREY_BYTES)
            assert other.payload.take(PREY_BYTES) == before
            wire.wire.close()
        assert other.ask(PING)["is"] == "Done"
        trial.judge(links=1, streams=3, busy=1, mapped=GENERATIONS)


def test_repeated_write_is_the_last_one(offer: Offer) -> None:
    """A caller gives up a write at any moment, and repeats it over another stream: the repeated one decides."""
    with Trial() as trial:
        link = local_link(trial, offer)
        trial.begin()
        other = link.ringed_call()
        cache = int(other.ask(m.describe(m.name_blocks(1)))["cache"])
        request = frame(m.write(m.name_blocks(1), cache, spans(0, 5), 0, 5, ahead=True))
        refused = 0
        for number in range(60):
            room(trial)
            wire = link.ringed_call()
            if number % 2:
                # Now the engine polls the ring for a moment.
                assert wire.ask(PING)["is"] == "Done"
            wire.payload.write_bytes(b"first")
            wire.payload.forge(wire.WRITTEN, 5)
            wire.send(request)
            wire.forge(wire.CLOSED, 1)
            data = b"%05d" % number
            other.payload.write_bytes(data)
            other.payload.forge(other.WRITTEN, other.payload.written)
            other.send(request)
            assert m.read_reply(other.body()) == {"is": "Done", "bytes": 5}
            refused += m.read_reply(wire.body())["is"] == "Failed"
            read(other, cache, spans(0, 5), 5)
            assert other.payload.take(5) == data, f"round {number}, {refused} refused before"
            wire.wire.close()
        assert other.ask(PING)["is"] == "Done"
        trial.judge(links=1, streams=61, busy=2, mapped=GENERATIONS)


def wrong_payload(wire: RingWire, cache: int) -> list[Callable[[], None]]:
    """Ways to break the protocol of the rings for payload."""
    rings = wire.payload

    def while_written(forge: Callable[[], None]) -> Callable[[], None]:
        def run() -> None:
            write(wire, cache, spans(0, PREY_BYTES), PREY_BYTES)
            forge()

        return run

    def while_read(number: int) -> Callable[[], None]:
        def run() -> None:
            read(wire, cache, spans(0, PREY), PREY)
            # The engine waits for room, and reads this word next.
            rings.wait(lambda: rings.word(rings.WRITTEN) == PAYLOAD_RING)
            rings.forge(rings.READ, number)

        return run

    def no_zeros() -> None:
        write(wire, cache, spans(0, 5), 5)
        rings.give(bytes(5))
        assert m.read_reply(wire.body())["is"] == "Done"
        write(wire, cache, spans(0, PREY_BYTES), PREY_BYTES)
        rings.send(b"\1" * (4096 + PREY_BYTES))

    return [
        while_written(lambda: rings.forge(rings.WRITTEN, PAYLOAD_RING + 1)),
        while_written(lambda: rings.forge(rings.WRITTEN, 2**64 - 1)),
        while_written(lambda: rings.forge(rings.WRITTEN, 2**63)),
        while_read(PAYLOAD_RING + 1),
        while_read(2**63),
        no_zeros,
    ]


def test_invalid_payload_ends_only_its_stream(offer: Offer) -> None:
    with Trial() as trial:
        link = local_link(trial, offer)
        trial.begin()
        good = link.ringed_call()
        cache = int(good.ask(m.describe(m.name_blocks(1)))["cache"])
        for number in range(6):
            bad = link.ringed_call()
            with suppress(*GONE):
                wrong_payload(bad, cache)[number]()
                bad.wake()
            assert bad.wire.ended(SLACK), f"case {number} goes on"
            assert good.ask(PING)["is"] == "Done"
        # This side reads nothing, so the engine runs out of room.
        stuck = link.ringed_call()
        read(stuck, cache, spans(0, PREY), PREY)
        assert stuck.wire.ended(SILENCE + SLACK), "the engine waits for room without end"
        assert good.ask(PING)["is"] == "Done"
        trial.judge(links=1, streams=8, busy=1, mapped=GENERATIONS)
        assert not trial.tender.ended, "the link itself goes on"


def test_request_changed_during_read_stays_within_the_cache(offer: Offer) -> None:
    """The engine checks the copy that it has made, so rows outside the cache are never read."""
    with Trial() as trial:
        link = local_link(trial, offer)
        trial.begin()
        calm = link.ringed_call()
        name = m.name_blocks(1)
        cache = int(calm.ask(m.describe(name))["cache"])
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
                    plan = m.plan_spans([m.span(row * PREY_BYTES, 0, PREY_BYTES)], 1)
                    wire.send(frame(m.read(name, cache, plan, 0, PREY_BYTES)))
            stop.set()
            thread.join()
            stop.clear()
            wire.wire.close()
        assert calm.ask(PING)["is"] == "Done"
        trial.judge(links=1, streams=41, busy=1, mapped=GENERATIONS)


def test_needless_wake_ups_cost_their_stream_only(offer: Offer) -> None:
    with Trial() as trial:
        link = local_link(trial, offer)
        wire, good = link.ringed_call(), link.ringed_call()
        trial.begin()
        wire.wire.socket.settimeout(1)
        with suppress(TimeoutError):
            for _ in range(2000):
                wire.wire.send(bytes(64))
        wire.wire.socket.settimeout(LIMIT)
        assert wire.ask(PING)["is"] == "Done"
        assert good.ask(PING)["is"] == "Done"
        trial.judge(links=1, streams=2, busy=1, mapped=GENERATIONS)


def lingering() -> int:
    """Return a socket whose last `close` waits for half a minute."""
    made, other = lingering_socket(30)
    LINGERING.append(other)
    return made.detach()


LINGERING: list[socket.socket] = []  # the other ends


def test_descriptors_that_close_slowly_hold_nobody_up(offer: Offer) -> None:
    """Whatever comes of an offer, the thread that accepts connections closes none of its descriptors itself."""
    with Trial() as trial:
        link = local_link(trial, offer)
        trial.begin()
        rings = [link.ringed_call() for _ in range(MAX_RINGS)]
        unreadable = frame(b"unreadable")
        offered = frame(m.RING_OFFER)
        for before, said in (
            (b"", offered),
            (b"", unreadable),
            (unreadable[:-4], unreadable[-4:]),
            (offered, b"behind"),
        ):
            wire = link.call(rings=True)
            wire.socket.sendall(before)
            send_lingering(wire.socket, said)
            with suppress(*GONE):
                assert m.read_ring_answer(wire.hear()) is not None
        time.sleep(SILENCE + 3)
        for ring in rings:
            assert ring.ask(PING)["is"] == "Done"
        trial.judge(links=1, streams=MAX_RINGS + 4, busy=1, mapped=GENERATIONS)
        assert not trial.tender.ended, "the link itself goes on"
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


def test_descriptors_that_never_close_are_bounded(offer: Offer) -> None:
    """When too many are not closed, the engine opens no stream that may bring more. Open streams go on."""
    with Trial() as trial:
        link = local_link(trial, offer)
        trial.begin()
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
        trial.judge(links=1, streams=offered + 3, busy=1, mapped=GENERATIONS)


def test_zeros_before_a_payload_end_with_the_pace_of_the_peer(offer: Offer) -> None:
    """A write whose bytes never come, though zeros keep its socket readable, ends as any other that stalls."""
    with Trial() as trial:
        link = local_link(trial, offer)
        wire, good = link.ringed_call(), link.ringed_call()
        name = m.name_blocks(1)
        cache = int(good.ask(m.describe(name))["cache"])
        trial.begin()
        plan = m.plan_spans([m.span(0, 0, PREY_BYTES)], 1)
        wire.send(frame(m.write(name, cache, plan, 0, PREY_BYTES)))
        assert m.read_reply(wire.body())["is"] == "Ready"
        # The engine never finds the socket empty, so only a bound on what it takes at once ends its loop.
        wire.wire.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 20)
        wire.wire.socket.settimeout(None)

        def flood() -> None:
            with suppress(*GONE):
                while True:
                    wire.wire.send(bytes(1 << 16))

        floods = [threading.Thread(target=flood, daemon=True) for _ in range(2)]
        for thread in floods:
            thread.start()
        until = time.monotonic() + SILENCE + SLACK
        for thread in floods:
            thread.join(max(0.0, until - time.monotonic()))
        goes_on = any(thread.is_alive() for thread in floods)
        wire.wire.socket.shutdown(socket.SHUT_RDWR)
        assert not goes_on, "the stream goes on"
        assert good.ask(PING)["is"] == "Done"
        trial.judge(links=1, streams=2, busy=2, mapped=GENERATIONS)
