"""Attacks as in `test_hostile_peers.py` that make the engine hold memory: replies, requests, answers and notifications.

All of it has one budget (`hostile.budgets`). Each test bounds the peak of the resident memory of the attacked process,
then closes the links, and waits until the memory is back. Not for: plans (`test_hostile_plans.py`), frames that stay
incomplete or trickle (`test_hostile_requests.py`).
"""

from __future__ import annotations

from contextlib import suppress
from typing import TYPE_CHECKING, Any

import pytest

from hostile import budgets
from hostile import messages as m
from hostile.client import Wire, ask, check_refused, frame, header, opened
from hostile.messages import BUSY, OUT_OF_MEMORY
from hostile.trial import GONE, MIB, VICTIM, Trial
from peers import OK, by_blocks, eventually, together

if TYPE_CHECKING:
    from collections.abc import Sequence

MAX_ENTRIES = 1 << 20  # addresses of a `Locate`, and ranges of a grant
# What an attack may take of the budget beside the part of each link, and what the process may take beside the budget.
ONE_LINK = budgets.value("common_memory") * 3 // 4
BESIDE = 64 * MIB


def part() -> int:
    """The part of the memory for calls that each link can always use."""
    return min(MIB, budgets.value("reserved_memory") // budgets.incoming(None))


def ends(trial: Trial, wires: Sequence[Wire] = ()) -> None:
    """Close the links of the attacker, and wait until the memory is back."""
    for wire in wires:
        wire.close()
    trial.held.close()
    trial.victim.polled(0)  # the victim keeps the result of its last call
    trial.releases(BESIDE)


def pulls(count: int) -> list[tuple[str, list[Any], dict[str, Any]]]:
    """Calls of the victim to a hostile owner, for `at_once`."""
    return [("pull_blocks", [by_blocks(77, model), "n", [0], [0]], {}) for model in range(count)]


def send_in_parts(wire: Wire, data: memoryview) -> None:
    """Send data in parts of 1 MiB, until the engine closes the stream."""
    with suppress(OSError):
        for at in range(0, len(data), MIB):
            wire.send(data[at : at + MIB])


@pytest.mark.parametrize(("length", "most"), [(64, BESIDE), (24, ONE_LINK + BESIDE)])
def test_replies_that_never_end_take_bounded_memory(length: int, most: int) -> None:
    """A hostile owner answers 16 calls with frames that lack their last byte.

    No reply may have 64 MiB, and all replies that may have 24 MiB do not fit the budget.
    """
    with Trial(honest=["tcp"]) as trial:
        reply = memoryview(header(length * MIB) + bytes(length * MIB - 1))

        def serve(wire: Wire) -> None:
            wire.hear()
            send_in_parts(wire, reply)

        trial.listen(serve)
        trial.begin()
        told = trial.victim.at_once(pulls(16))
        assert OK not in told, told
        trial.judge(links=1, streams=16, busy=1, memory=most)
        assert not trial.tender.ended, "the link itself goes on"
        ends(trial)


def test_memory_of_large_replies_returns() -> None:
    """A hostile owner answers 24 calls at once with descriptions of 3 MiB, again and again."""
    runs = m.in_region([m.run(2**60 + number, 2**60, 1) for number in range(170_000)])
    with Trial(honest=["tcp"]) as trial:
        reply = m.described(tensors=170_000, location=runs)
        assert len(reply) > 3 * MIB, len(reply)

        def serve(wire: Wire) -> None:
            while wire.hear():
                wire.say(reply)

        trial.listen(serve)
        trial.begin()
        assert OK not in trial.victim.at_once(pulls(24), repeat=4)
        trial.judge(links=1, streams=24, busy=1, memory=ONE_LINK + BESIDE)
        trial.releases(BESIDE)


@pytest.mark.parametrize("asked", ["rows of a grant", "places of addresses"])
def test_answers_that_nobody_reads_take_bounded_memory(asked: str) -> None:
    """Six links ask for the longest answers on 48 streams that they do not read.

    When the budget is exhausted, the engine refuses, and says so. What one request takes, the core tests
    (`links/layerwise.rs`).
    """
    with Trial() as trial:
        if asked == "rows of a grant":
            trial.victim.allocate("wide", 2 * MAX_ENTRIES, 8, 1, blocks=True, keys=[by_blocks(VICTIM, 7)])
            request = m.describe(m.name_of(trial.victim.grant("wide", list(range(0, 2 * MAX_ENTRIES, 2)))))
        else:
            trial.victim.register("open", 4, 4096, 1, blocks=True, accessible=True)
            request = m.locate(m.uint(trial.victim.addresses("open")[0]) * MAX_ENTRIES, MAX_ENTRIES)
        _, call = trial.fair_call()
        told = ask(call, request)
        assert len(told["granted" if told["is"] == "Described" else "spots"]) == MAX_ENTRIES
        made = [trial.fair_call(100 + number, window=4096) for number in range(6)]
        wires = [wire for link, call in made for wire in (call, *(link.call() for _ in range(7)))]
        trial.begin()

        def ask_and_hear(at: int) -> Any:
            # A refusal has few bytes, so it arrives whole. Of an answer, only the start arrives.
            with suppress(*GONE):
                wires[at].say(request)
                length = int.from_bytes(wires[at].exactly(8)[4:], "little")
                return m.read_reply(opened(wires[at].exactly(length))) if length < 4096 else None

        for refusal in filter(None, together(len(wires), ask_and_hear)):
            check_refused(refusal, OUT_OF_MEMORY)
        trial.judge(links=7, streams=56, busy=7, memory=budgets.value("common_memory") + 7 * part() + BESIDE)
        ends(trial, wires)


def fill(trial: Trial, links: int) -> None:
    """Send notifications over this many links until the victim takes no more from each."""
    message = bytes(64 << 10)
    calls = [trial.fair_call(100 + number)[1] for number in range(links)]

    def send(at: int) -> None:
        while (told := ask(calls[at], m.notify([message] * 4)))["is"] == "Done":
            pass
        check_refused(told, BUSY)

    together(links, send)


def test_notifications_of_hostile_links_leave_room_for_others() -> None:
    """Hostile links fill the memory for notifications. An honest peer still delivers its own."""
    with Trial() as trial:
        honest = trial.join(40, "tcp")
        trial.victim.native_allocate("found by name")
        assert trial.victim.polled() == []
        trial.begin()
        fill(trial, 33)
        honest.native_allocate("narrow")
        told = honest.timed("native_pull", VICTIM, "found by name", "narrow", [0], [0], notify=b"with a pull")
        assert told[0] == OK, told
        honest.notify(VICTIM, b"alone")
        most = budgets.value("notification_memory") + 35 * part() + BESIDE
        trial.judge(links=34, streams=34, busy=34, memory=most)
        got: list[tuple[int, bytes]] = []

        def arrived() -> bool:
            got.extend(one for one in trial.victim.polled(100) if len(one[1]) < 100)
            return len(got) >= 2

        eventually(arrived)
        assert got == [(40, b"with a pull"), (40, b"alone")]
        ends(trial)


def test_notifications_and_long_frames_share_one_budget() -> None:
    """A full queue of notifications, and eight `Notify` frames of 63 MiB at once. No answer is read."""
    with Trial() as trial:
        assert trial.victim.polled() == []
        trial.begin()
        fill(trial, 16)
        request = memoryview(frame(m.notify([bytes(64 << 10)] * 1008)))
        wires = [trial.fair_call(200 + number)[1] for number in range(8)]
        together(len(wires), lambda at: send_in_parts(wires[at], request))
        most = budgets.value("common_memory") + 26 * part() + BESIDE
        trial.judge(links=24, streams=24, busy=24, memory=most)
        assert trial.victim.polled(0)
        ends(trial, wires)
