"""Attacks as in `test_hostile_peers.py`, with plans and with wrong descriptions of memory."""

from __future__ import annotations

import fcntl
import mmap
from contextlib import suppress

import pytest

from hostile import messages as m
from hostile.client import F_ADD_SEALS, GENERATIONS, SEALS, Offer, Wire, ask, memory
from hostile.messages import U32, U64
from hostile.trial import MIB, PREY, PREY_BYTES, PREY_ROWS, PULL_LIMIT, SLACK, Trial, attack, prey_of
from peers import OK, by_blocks, equal, meanwhile, pattern, together

ONE = m.span(0, 0, 1, 1, 0, 0)


def _interleaved_blocks() -> bytes:
    wide = b"\4" + b"".join(number.to_bytes(4, "little") * 2 for number in range(MIB))
    spans = [m.span(0, at, 1, 32, 0, 1) for at in (0, 1 << 26)]
    return m.plan_templates([m.template((1, 64), wide, spans)])


def _templates_side_by_side() -> bytes:
    """Templates whose places lie between each other, in no order: one in each 64 bytes, of 4,096 places."""
    count, positions = 200, [(0, position * 1789 % 4096) for position in range(4096)]
    return m.plan_templates([m.template((0, count * 64), positions, [m.span(0, at * 64, 64)]) for at in range(count)])


# Plans that fill a frame of 60 MiB.
PLANS = {
    "wide pairs": lambda: m.plan_blocks(1, b"\4" + bytes(8 * (7 * MIB))),
    "pairs that are allowed": lambda: m.plan_blocks(1, b"\1" + bytes(2 * ((1 << 24) - 1))),
    "templates": lambda: m.plan_templates([m.template((0, 0), b"\1", [])] * (10 * MIB)),
    "pairs of templates": lambda: m.plan_templates([m.template((1, 1), b"\2" + bytes(4 << 16), [ONE])] * 220),
    "spans of a template": lambda: m.plan_templates([m.template((1, 1), [(0, 0)], [ONE] * (60 * MIB // len(ONE)))]),
    "places that interleave": _interleaved_blocks,
    "templates side by side": _templates_side_by_side,
}


@pytest.mark.parametrize("kind", PLANS)
def test_plans_of_millions_of_pieces_take_bounded_memory(kind: str) -> None:
    plan = PLANS[kind]()
    with Trial() as trial:
        links = [trial.fair_call(100 + number) for number in range(2)]
        cache, name = prey_of(links[0][1]), m.name_blocks(1)
        trial.begin()
        for request in (
            m.read(name, cache, plan, 0, 1),
            m.write(name, cache, plan, 0, 1),
            m.fetch(name, cache, plan, m.HIDDEN, 1, PREY),
        ):
            calls = [link.call() for link, _ in links]

            def ask_for_it(number: int, calls: list[Wire] = calls, request: bytes = request) -> None:
                with suppress(ConnectionError, AssertionError):  # the engine may close the stream
                    calls[number].socket.settimeout(25)
                    ask(calls[number], request)

            together(len(calls), ask_for_it)  # a timeout is raised
            for call in calls:
                call.close()
        trial.judge(links=2, streams=6, busy=2)


ROW = m.span(0, 0, 64)

# `plan.rs` and `protocol.rs` of the core test the rules for the numbers of a plan. Here: every request checks them.
BOUNDS: dict[str, tuple[bytes, int, int]] = {
    "backwards": (m.plan_spans([ROW]), 64, 0),
    "beyond the plan": (m.plan_spans([ROW]), 0, 65),
    "a block written twice": (m.plan_blocks(64, [(0, 3), (1, 4), (2, 3)]), 0, 192),
    "a tensor that is not there": (m.plan_spans([ROW], 1, 2, 2), 0, 64),
    "past the end": (m.plan_spans([m.span(PREY - 63, PREY - 63, 64)]), 0, 64),
    "from 2^64-1": (m.plan_spans([m.span(U64, U64, 64)]), 0, 64),
    "2^40 pieces of a byte": (m.plan_spans([m.span(0, 0, 1, 1 << 40, 1, 1)]), 0, 64),
    "a block past the end": (m.plan_blocks(PREY_BYTES, [(PREY_ROWS, PREY_ROWS)]), 0, PREY_BYTES),
    "block 2^32-1": (m.plan_blocks(PREY_BYTES, [(U32, U32)]), 0, PREY_BYTES),
    "blocks of 2^63 bytes": (m.plan_blocks(2**63, [(2, 2)]), 0, 64),
    "place 2^32-1": (m.plan_templates([m.template((U64, U64), [(U32, U32)], [ROW])]), 0, 64),
    "2^50 pieces in places": (
        m.plan_templates([m.template((0, 1 << 24), [(0, 0), (0, 1)], [m.span(0, 0, 1, 1 << 49, 0, 1)])]),
        0,
        64,
    ),
    "257 templates": (m.plan_templates([m.template((0, 0), [(0, 0)], [ROW])] * 257), 0, 64),
    "65,537 spans": (m.plan_spans([m.span(0, at, 1) for at in range(65537)]), 0, 64),
    "a place past the end": (m.plan_templates([m.template((PREY, PREY), [(0, 0), (1, 1)], [ROW])]), 0, 64),
    "one template twice": (m.plan_templates([m.template((64, 64), [(0, 0)], [ROW])] * 2), 0, 128),
}


@pytest.mark.parametrize("verb", ["read", "write", "fetch", "checksums"])
def test_plans_whose_numbers_lie_are_refused(verb: str) -> None:
    """Each request is answered with `Failed`, the stream stays open, and no byte of the cache changes."""
    with attack(honest=["tcp"]) as (trial, link):
        call = link.call()
        cache, name = prey_of(call), m.name_blocks(1)

        def request(plan: bytes, start: int, end: int) -> bytes:
            if verb == "fetch":
                return m.fetch(name, cache, plan, m.in_region([m.run(0, 0, 1)]), 1, PREY)
            if verb == "checksums":
                return m.checksums(name, cache, plan)
            return (m.read if verb == "read" else m.write)(name, cache, plan, start, end)

        # A fetch names no range, and over TCP nothing can be fetched, whatever the plan says.
        allowed = {"Failed", "Unreachable"} if verb == "fetch" else {"Failed"}
        for what, (plan, start, end) in BOUNDS.items():
            if verb == "checksums" and plan == m.plan_spans([ROW]):
                continue  # only its range is wrong, and a request for checksums names none
            reply = ask(call, request(plan, start, end))
            assert reply["is"] in allowed, (what, reply)
            assert ask(call, m.ping())["is"] == "Done", what
        assert equal(trial.victim.read("prey"), pattern(5, 2, PREY_ROWS, PREY_BYTES))


REGION = 1 << 20
LOCATIONS: dict[str, bytes] = {
    "behind the region": m.in_region([m.run(REGION, 0, 2)]),
    "at the end of the region": m.in_region([m.run(REGION - 1, 0, 2)]),
    "at 2^64-1": m.in_region([m.run(U64, 0, 2)]),
    "around zero": m.in_region([m.run(0, U64, 2)]),
    "in the other region": m.in_region([m.run(0, 4096, 2)], 1),
    "for one tensor only": m.in_region([m.run(0, 4096, 1)]),
    "for 2^32-1 tensors": m.in_region([m.run(0, 4096, U32)]),
    "in runs without an end": m.in_region([m.run(0, 0, U32)] * 1000),
    "in a process, at zero": m.in_process([m.run(0, 0, 2)]),
    "in a process, in the kernel": m.in_process([m.run(2**64 - 4096, 0, 2)]),
    "nowhere": m.HIDDEN,
}


def test_places_that_lie_fail_the_pull_alone() -> None:
    """The victim maps the region of a hostile peer, and pulls from the place that the peer claims for a cache."""
    with Trial(honest=["auto"]) as trial:
        answer = b""

        def serve(wire: Wire) -> None:
            while wire.hear():
                wire.say(answer)

        offer = Offer(REGION)
        trial.held.callback(offer.close)
        trial.listen(serve, offer)
        (link,) = (one for one in trial.victim.links() if one["cluster"] == 77)
        assert (link["transport"], link["pools"]) == ("shm", "mapped")
        trial.begin()
        for number, (what, location) in enumerate(LOCATIONS.items()):
            answer = m.described(slot=number, location=location)
            # Each has its own key, because the victim keeps descriptions.
            reply, seconds, _ = trial.victim.timed("pull_blocks", by_blocks(77, number), "n", [0], [0])
            assert reply not in {OK, "MemoryError"}, (what, reply)
            assert seconds < PULL_LIMIT / 1000 + SLACK, (what, seconds)
        # A correct place works, which proves that the others reached the copy. Memory that was never written is zero.
        answer = m.described(slot=99, location=m.in_region([m.run(4096, 8192, 2)]))
        trial.victim.pull_blocks(by_blocks(77, 99), "n", [0], [0])
        assert not any(tensor[0].any() for tensor in trial.victim.read("n"))
        trial.judge(links=1, streams=2, busy=1, mapped=2 * GENERATIONS)


def test_generations_that_never_rest_end_the_pull_in_time() -> None:
    """The hostile peer changes the generation of its cache all the time, so that every read of the victim is stale."""
    with Trial(honest=["auto"], llm__SyncKvCacheWaitTime=1000) as trial:
        generations = memory(GENERATIONS, 0)
        numbers = mmap.mmap(generations, 4096)
        trial.held.callback(numbers.close)
        fcntl.fcntl(generations, F_ADD_SEALS, SEALS)
        count = 0

        def raise_it() -> None:
            nonlocal count
            count += 1
            numbers[0:8] = count.to_bytes(8, "little")

        def serve(wire: Wire) -> None:
            while wire.hear():
                wire.say(m.described(generation=count, location=m.in_region([m.run(0, 4096, 2)])))

        offer = Offer(REGION, generations)
        trial.held.callback(offer.close)
        trial.listen(serve, offer)
        with meanwhile(raise_it):
            trial.begin()
            for _ in range(3):
                _, seconds, text = trial.victim.timed("pull_blocks", by_blocks(77), "n", [0], [0])
                assert seconds < 1 + SLACK, text
        trial.judge(links=1, streams=2, busy=1, mapped=2 * GENERATIONS)
