"""Peers that were admitted, or are about to be, and attack: an honest pair must not notice, and the costs stay bounded.

Each test plays one attack with `hostile`, a client of the wire protocol that shares no code with the engine. During the
attack two honest peers pull from the victim, one over TCP and one by shared memory. `Trial.judge` demands that every
pull of theirs ended in time with the right bytes, that their links are the ones they had at first, and that threads,
descriptors and memory of the victim stayed within `hostile/budgets.py`. LLM_DATADIST_SOAK asks for larger attacks.
Not for: who is admitted (`test_link_security.py`, `test_second_user.py`), attacks with requests
(`test_hostile_requests.py`) and with plans (`test_hostile_plans.py`).
"""

from __future__ import annotations

import os
import random
import resource
import socket
import threading
import time
from contextlib import ExitStack, suppress
from typing import TYPE_CHECKING

import pytest

from hostile import budgets
from hostile import messages as m
from hostile.client import (
    GENERATIONS,
    LIMIT,
    Listener,
    Offer,
    Wire,
    ask,
    dial_local,
    dial_tcp,
    frame,
    memory,
)
from hostile.trial import (
    GONE,
    SLACK,
    VICTIM,
    Trial,
    silence,
    usage,
    wait,
)
from peers import OK, SOAK, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence


def _descriptors() -> int:
    """Connections that this process may hold: the attacks of the long setting need more than the usual 1,024."""
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard, 20_000), hard))
    return min(hard, 20_000) - 200


MANY = min(1000 if SOAK else 300, _descriptors())


# -- memory that is offered ------------------------------------------------------------------------------------------


def test_sparse_offers_do_not_fill_the_address_space(held: ExitStack) -> None:
    """26 peers offer 30 TiB each, which is more than a process can map."""
    with Trial() as trial:
        name = trial.attacker().local_name(trial.victim.address)
        trial.begin()
        for number in range(26):
            length = (30 << 40) >> (number % 5)
            offer = Offer([memory(GENERATIONS), memory(length)], regions=(length, None))
            held.callback(offer.close)
            with suppress(*GONE):
                held.callback(trial.attacker(100 + number).link_local(name, offer).close)
        wait(0.5)
        trial.judge(links=26, mapped=budgets.mapped() + 26 * GENERATIONS)


def test_one_offer_does_not_use_up_what_all_may_map(held: ExitStack) -> None:
    """An honest peer that comes after a greedy one still gets a link that works."""
    with Trial(honest=["auto"]) as trial:
        name = trial.attacker().local_name(trial.victim.address)
        trial.begin()
        for number in range(8):
            offer = Offer([memory(GENERATIONS), memory(64 << 30)], regions=(64 << 30, None))
            held.callback(offer.close)
            with suppress(*GONE):
                held.callback(trial.attacker(100 + number).link_local(name, offer).close)
        trial.join(40, "auto")
        trial.judge(links=9, mapped=budgets.mapped() + 9 * GENERATIONS)


def _odd_descriptors(held: ExitStack) -> dict[str, int]:
    """Descriptors that are no memory."""
    reading, writing = os.pipe()
    left, right = socket.socketpair()
    held.callback(os.close, writing)
    held.callback(right.close)
    return {
        "a pipe": reading,
        "a socket": left.detach(),
        "a device": os.open("/dev/zero", os.O_RDWR),
        "a folder": os.open("/", os.O_RDONLY),
        "a path": os.open("/dev/null", os.O_PATH),
        "a file": os.open("/proc/self/exe", os.O_RDONLY),
        "a file of the kernel": os.open("/proc/self/mem", os.O_RDONLY),
        "the other end of a pipe": os.dup(writing),
    }


def _lies(held: ExitStack) -> Iterator[tuple[str, Offer]]:
    """Offers in which something is wrong."""
    page, sealed = 4096, memory
    yield "a region longer than its memory", Offer([sealed(GENERATIONS), sealed(page)], regions=(1 << 40, None))
    yield "a region of no bytes", Offer([sealed(GENERATIONS), sealed(page)], regions=(0, None))
    yield "a region of 2^64-1 bytes", Offer([sealed(GENERATIONS), sealed(page)], regions=(2**64 - 1, None))
    yield "a region of 2^63 bytes", Offer([sealed(GENERATIONS), sealed(page)], regions=(None, 2**63))
    yield "generations too short", Offer([sealed(page)])
    yield "a region that is not sealed", Offer([sealed(GENERATIONS), sealed(page, 0)], regions=(page, None))
    yield "generations not sealed", Offer([sealed(GENERATIONS, 0)])
    yield "only sealed against growth", Offer([sealed(GENERATIONS, 0x4)])
    yield "no descriptor where one was said", Offer([])
    yield "one descriptor where three were said", Offer([sealed(GENERATIONS)], regions=(page, page))
    yield "eight descriptors where one was said", Offer([sealed(GENERATIONS) for _ in range(8)])
    yield "nine descriptors", Offer([sealed(GENERATIONS) for _ in range(9)])
    yield "as many descriptors as the kernel carries", Offer([sealed(page) for _ in range(253)])
    yield "no generations", Offer([], generations=False)
    yield "a probe at no address", Offer(probe=(0, bytes(16)))
    yield "a probe at the last address", Offer(probe=(2**64 - 1, bytes(16)))
    yield "a probe with a wrong secret", Offer(probe=(id(page), b"x" * 16))
    for what, descriptor in _odd_descriptors(held).items():
        yield f"{what} in place of generations", Offer([descriptor])
    for what, descriptor in _odd_descriptors(held).items():
        yield f"{what} in place of a region", Offer([sealed(GENERATIONS), descriptor], regions=(page, None))


def test_offers_that_lie_are_refused_and_leave_nothing(held: ExitStack) -> None:
    with Trial() as trial:
        name = trial.attacker().local_name(trial.victim.address)
        trial.begin()
        tried = 0
        for what, offer in _lies(held):
            began = time.monotonic()
            with suppress(OSError):
                link = trial.attacker(100).link_local(name, offer)
                told = link.seen
                assert "probe" in what or "eight" in what or told["mapped"], f"{what}: {told}"
                assert "eight" in what or told["registered"], f"{what}: {told}"
                link.close()
            offer.close()
            assert time.monotonic() - began < silence() + SLACK, f"{what}: no answer"
            assert trial.alive(), f"{what}: the victim died"
            tried += 1
        assert tried > 25
        trial.judge(links=2, mapped=2 * GENERATIONS)
        trial.recovers()


def test_descriptors_with_other_frames_are_closed(held: ExitStack) -> None:
    """Descriptors that come with a greeting, a ping or a request do not stay open at the victim."""
    with Trial(honest=["auto"]) as trial:
        name = trial.attacker().local_name(trial.victim.address)
        link = trial.attacker(100).link_local(name)
        held.callback(link.close)
        call = link.call()
        extra = [os.open("/dev/null", os.O_RDONLY) for _ in range(200)]
        trial.begin()
        for number in range(40):
            some = extra[: 4 if number < 20 else 200]  # more than a frame may have end the stream
            with suppress(*GONE):
                link.control.say(m.PING, some)
            with suppress(*GONE):
                call.say(m.ping(), some)
                m.read_reply(call.hear())
            with suppress(*GONE):
                stranger = dial_local(name)
                held.callback(stranger.close)
                stranger.say(b"x", some)
        for descriptor in extra:
            os.close(descriptor)
        trial.judge(links=2, mapped=GENERATIONS)


# -- peers that stall ------------------------------------------------------------------------------------------------

BEFORE = ("connect", "half header", "header", "half hello")
DURING = ("hello", "half proof")
AFTER = ("welcome", "half attach", "attach", "attached")


@pytest.mark.parametrize("steps", [BEFORE, DURING, AFTER], ids=["before", "during", "after"])
def test_peers_that_stall_cost_little_and_keep_nobody_out(held: ExitStack, steps: Sequence[str]) -> None:
    """They stop at every step of the greeting, or behind it, before the link is there."""
    with Trial() as trial:
        peer = trial.attacker()
        name = peer.local_name(trial.victim.address)
        trial.begin()
        began = time.monotonic()
        for number in range(MANY):
            step = steps[number % len(steps)]
            with suppress(*GONE):
                one = trial.attacker(100 + number)
                local = number % 2 == 1 or steps == AFTER
                link = one.link_local(name, stop=step) if local else one.link_tcp(trial.victim.address, stop=step)
                held.callback(link.close)
        told = time.monotonic() - began
        assert told < 30, f"{MANY} connections took {told:.1f} s"
        trial.join(40, "tcp")
        trial.join(41, "auto")
        # Whoever has said all that makes a link has one, although it has not read the engine's last word.
        made = MANY // 4 if steps == AFTER else 0
        trial.judge(links=made + 4, mapped=(budgets.pending() + made + 2) * GENERATIONS)


def test_connections_that_stall_are_ended() -> None:
    """Whoever stalls is sent away, at the latest after the handshake limit (5 s)."""
    with Trial(honest=["tcp"]) as trial:
        peer = trial.attacker()
        name = peer.local_name(trial.victim.address)
        trial.begin()
        stalled: list[tuple[str, Wire]] = []
        for way in ("tcp", "local"):
            for step in (*BEFORE, *DURING, *(AFTER if way == "local" else ())):
                one = trial.attacker(100 + len(stalled))
                local = way == "local"
                link = one.link_local(name, stop=step) if local else one.link_tcp(trial.victim.address, stop=step)
                stalled.append((f"{way} {step}", link.control))
        until = time.monotonic() + 5 + SLACK
        left = [what for what, wire in stalled if not wire.ended(max(0.1, until - time.monotonic()))]
        for _, wire in stalled:
            wire.close()
        # The last word of an attach makes the link for the engine: it is the peer that has not read it.
        assert left in ([], ["local attached"]), left
        trial.judge(links=1, mapped=2 * GENERATIONS)
        trial.recovers()


@pytest.mark.parametrize("limit", [64, 1024])
def test_connection_floods_leave_descriptors_to_the_application(held: ExitStack, limit: int) -> None:
    """Under a low `ulimit -n` the application still opens its files, and honest peers still link."""
    with Trial(open_files=limit, honest=["tcp"]) as trial:
        peer = trial.attacker()
        name = peer.local_name(trial.victim.address)
        trial.begin()
        count = min(MANY, 4 * limit)
        for number in range(count):
            with suppress(*GONE):
                step = ("connect", "half hello", "hello", "welcome")[number % 4]
                one = trial.attacker(100 + number)
                local = step == "welcome" or number % 8 < 4
                link = one.link_local(name, stop=step) if local else one.link_tcp(trial.victim.address, stop=step)
                held.callback(link.close)
            if number % 50 == 49:
                assert trial.victim.open_files(16) == "", f"after {number + 1} connections"
        assert trial.victim.open_files(16) == ""
        trial.join(40, "tcp")
        assert trial.victim.open_files(16) == ""
        trial.judge(links=3, mapped=(budgets.pending(limit) + 2) * GENERATIONS)


@pytest.mark.parametrize("limit", [64, 256, 1024])
def test_links_leave_descriptors_to_the_application(held: ExitStack, limit: int) -> None:
    """A peer makes as many links, call streams and stalled connections as it can; the application opens its files.

    One link takes all call streams that it gets. Further ones, half of them over the local socket, take two each.
    """
    with Trial(open_files=limit, honest=["tcp"]) as trial:
        name = trial.attacker().local_name(trial.victim.address)
        trial.begin()
        made = streams = failed = 0
        for number in range(min(MANY, limit)):
            if failed > 3:
                break  # the engine accepts nothing any more
            failed += 1
            with suppress(*GONE):
                peer = trial.attacker(100 + number)
                peer.patience = 1.0
                link = peer.link_local(name) if number % 2 else peer.link_tcp(trial.victim.address)
                held.callback(link.close)
                trial.tender.add(link)
                made += 1
                for _ in range(2 if number else 200):
                    link.call()
                    streams += 1
                failed = 0
        for _ in range(budgets.pending(limit) + 10):
            with suppress(*GONE):
                held.callback(trial.attacker(99).link_tcp(trial.victim.address, stop="half hello").control.close)
        wait(0.3)
        engine = usage(trial.victim.process.pid).descriptors
        text = f"after {made} links and {streams} streams the process has {engine} of {limit} descriptors"
        assert trial.victim.open_files(8) == "", text
        trial.judge(links=made, streams=streams, mapped=made * GENERATIONS)


# -- control streams -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("transport", "count"), [("local", 250), ("tcp", 20)])
def test_peers_that_do_not_read_their_control_stream_are_dropped(held: ExitStack, transport: str, count: int) -> None:
    """They ask for answers that they never read, until no more fits into their sockets."""
    with Trial() as trial:
        name = trial.attacker().local_name(trial.victim.address)
        links = []
        for number in range(count):
            peer = trial.attacker(100 + number)
            way = peer.link_local(name) if transport == "local" else peer.link_tcp(trial.victim.address, window=1)
            held.callback(way.close)
            links.append(way)
        trial.begin()
        storm = frame(m.PING) * 2000
        until = time.monotonic() + 2 * silence()
        open_links = {link.number: link for link in links}
        while open_links and time.monotonic() < until:
            for link in list(open_links.values()):
                link.control.socket.settimeout(0)
                try:
                    # Whole pings only: half a message is an offence of another kind.
                    link.control.socket.send(storm[: 9 * random.randint(1, 2000)])  # noqa: S311
                except BlockingIOError:
                    pass
                except OSError:
                    del open_links[link.number]
            time.sleep(0.01)
        trial.judge(links=count, mapped=count * GENERATIONS)
        assert not open_links, f"{len(open_links)} of {count} links are still there"


def test_pings_that_are_not_answered_end_the_link(held: ExitStack) -> None:
    """200 linked peers say nothing at all."""
    with Trial() as trial:
        links = [trial.attacker(100 + number).link_tcp(trial.victim.address) for number in range(200)]
        for link in links:
            held.callback(link.close)
        trial.begin()
        until = time.monotonic() + silence() + 2 * SLACK
        left = [link for link in links if not link.control.ended(max(0.05, until - time.monotonic()))]
        trial.judge(links=200)
        assert not left, f"{len(left)} silent peers are still linked"
        trial.recovers()


@pytest.mark.parametrize("greets", [True, False])
def test_a_storm_of_requests_for_streams_is_bounded(greets: bool) -> None:
    """`Dial` asks the side that dialled the link to dial one more call stream."""
    with Trial() as trial:
        peer = trial.attacker(77)
        stall = threading.Event()
        with Listener(peer, lambda wire: stall.wait(20) and wire.close()) as listener:
            assert trial.victim.link_clusters([(77, listener.address)])[0] == OK
            link = eventually(lambda: listener.links)[0]
            trial.tender.add(link)
            if not greets:
                listener.deaf = stall
            trial.begin()
            with suppress(OSError):
                link.control.send(frame(m.DIAL) * 20_000)
            wait(2)
            trial.settle()
            stall.set()
            most = budgets.value("link_streams")
            trial.judge(links=1, streams=most, busy=1)


def test_goodbyes_and_new_links_in_a_storm(held: ExitStack) -> None:
    """One peer links, says goodbye in every way there is, and links again."""
    rounds = 400 if SOAK else 100
    with Trial() as trial:
        name = trial.attacker().local_name(trial.victim.address)
        instance = 7
        trial.begin()
        for number in range(rounds):
            peer = trial.attacker(66, instance=instance)
            with suppress(*GONE):
                local = number % 4 == 0
                link = peer.link_local(name) if local else peer.link_tcp(trial.victim.address)
                held.callback(link.close)
                way = number % 6
                if way == 0:
                    link.control.say(m.bye("x" * 4000, unlinked=bool(number % 2)))
                elif way == 1:
                    call = link.call()
                    call.send(frame(m.unlink()) * 3)
                elif way == 2:
                    link.control.send(frame(m.bye()) * 50)
                elif way == 3:
                    link.call().say(m.describe(m.name_blocks(1)))
                    link.control.say(m.bye("", unlinked=True))
                elif way == 4:
                    link.close()
                # way 5: the next link takes its place
        trial.judge(links=rounds, mapped=rounds * GENERATIONS)
        held.close()
        trial.recovers()


def test_many_links_by_one_peer(held: ExitStack) -> None:
    """One process links under hundreds of cluster ids, and calls on each link now and then."""
    with Trial() as trial:
        trial.begin()
        links = []
        for number in range(MANY):
            link = trial.attacker(100 + number, instance=7).link_tcp(trial.victim.address)
            held.callback(link.close)
            trial.tender.add(link)
            links.append(link)
        for link in links:
            assert ask(link.call(), m.ping())["is"] == "Done"
        wait(0.5)
        trial.judge(links=MANY, streams=MANY)
        assert not trial.tender.ended


def test_rivals_for_one_cluster_id_keep_nobody_out(held: ExitStack) -> None:
    """Peers claim one cluster id again and again, and answer no ping; honest peers still link in time.

    The first keeps the place until it has been silent for two heartbeats. The others are refused at once.
    """
    with Trial(honest=["tcp"]) as trial:
        trial.begin()
        over = threading.Event()

        def claim() -> None:
            while not over.is_set():
                with suppress(*GONE):
                    link = trial.attacker(66).link_tcp(trial.victim.address, stop="welcome")
                    held.callback(link.close)
                    over.wait(0.02)

        threads = [threading.Thread(target=claim, daemon=True) for _ in range(8)]
        for thread in threads:
            thread.start()
        try:
            wait(1)
            trial.join(40, "tcp")
            trial.join(41, "auto")
        finally:
            over.set()
            for thread in threads:
                thread.join(LIMIT)
        trial.judge(links=MANY, mapped=2 * GENERATIONS)


def test_knocks_and_meetings_leave_nothing(held: ExitStack) -> None:
    """Streams that say who is there and end: for communicators that nobody entered, and for the secret."""
    with Trial() as trial:
        name = trial.attacker().local_name(trial.victim.address)
        trial.begin()
        for number in range(MANY):
            peer = trial.attacker(100 + number)
            wire = dial_local(name) if number % 2 else dial_tcp(trial.victim.address)
            held.callback(wire.close)
            with suppress(*GONE):
                members = [(100 + number, 0), (VICTIM, 1)]
                knock = m.purpose_knock(m.comm("x" * 3000, members, "nowhere"))
                told = peer.greet(wire, m.purpose_meet() if number % 4 < 2 else knock)
                local = number % 2 == 1 and number % 4 < 2
                assert told["secret"] is None or local, "the secret leaves by the local socket only"
        held.close()
        trial.judge(mapped=2 * GENERATIONS)
        trial.recovers()
