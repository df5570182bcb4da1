"""Attacks as in `test_hostile_peers.py`, with frames, requests and answers."""

from __future__ import annotations

import time
from contextlib import suppress
from typing import TYPE_CHECKING

import numpy as np
import pytest

from hostile import budgets
from hostile import messages as m
from hostile.client import AHEAD, Wire, ask, check_refused, header, payload
from hostile.messages import BUSY, U32, U64
from hostile.trial import MIB, PREY, PREY_BYTES, PREY_ROWS, SILENCE, SLACK, VICTIM, Trial, attack, prey_of
from peers import OK, by_blocks, equal, eventually, meanwhile, pattern, together

if TYPE_CHECKING:
    from collections.abc import Sequence

GRANT = m.name_grant(0, 0, bytes(16))
ALL = m.plan_spans([m.span(0, 0, PREY)], 2)


def _sends(wire: Wire, data: bytes) -> bool:
    """Send data. Return whether the stream is still open."""
    with suppress(OSError):
        wire.send(data)
        return True
    return False


def pump(wires: Sequence[Wire], data: memoryview) -> int:
    """Send `data` on all sockets until the engine takes no more for 1 s. Return how many bytes it took."""

    def feed(number: int) -> int:
        sent = 0
        wires[number].socket.settimeout(1)
        with suppress(OSError):
            while sent < len(data):
                sent += wires[number].socket.send(data[sent : sent + MIB])
        return sent

    return sum(together(len(wires), feed))


@pytest.mark.parametrize(("links", "streams"), [(1, 8), (8, 1)])
def test_unfinished_bodies_take_bounded_memory(links: int, streams: int) -> None:
    """Eight streams send 60 MiB each of frames that stay incomplete."""
    with Trial() as trial:
        wires = []
        for number in range(links):
            link, call = trial.fair_call(100 + number)
            wires += [call, *(link.call() for _ in range(streams - 1))]
        trial.begin()
        began = time.monotonic()
        assert pump(wires, memoryview(header(64 * MIB) + bytes(60 * MIB))) > MIB, "the engine took nothing at all"
        budget = budgets.value("common_memory") * 3 // 4 if links == 1 else budgets.value("common_memory")
        # A frame may take `link_silence` and 1 s for each 8 MiB, from the moment that the engine has read its header.
        until = began + SILENCE + 64 * MIB / (8 * MIB) + SLACK
        ended = [wire.ended(max(0.1, until - time.monotonic())) for wire in wires]
        # The kernel holds a part, and a buffer that grows exists twice for a moment.
        trial.judge(links=links, streams=len(wires), busy=links, memory=budget + 96 * MIB)
        # Three times the length of a frame is taken before it arrives, so the others wait. The time limit of a frame
        # that waits for memory has not started yet.
        assert ended.count(True) >= budget // (3 * 64 * MIB), f"{ended.count(False)} of {len(wires)} frames go on"


def test_bodies_that_trickle_lose_their_streams() -> None:
    """A few bytes per second do not count as progress."""
    with attack(honest=["tcp"]) as (_, link):
        wires = [link.call() for _ in range(4)]
        for wire in wires:
            wire.send(header(8 * MIB) + bytes(1000))
        until = time.monotonic() + SILENCE + SLACK
        left = wires
        while left and time.monotonic() < until:
            left = [wire for wire in left if _sends(wire, b"\0")]
            time.sleep(0.1)
        assert not left, f"{len(left)} frames trickle on"


def test_slow_requests_of_others_do_not_starve_a_long_one() -> None:
    """Hostile peers send requests of 64 MiB as slowly as allowed. A request of an honest peer is still answered."""
    rows = 20_000
    with Trial(honest=["tcp"]) as trial:
        honest = trial.join(40, "tcp")
        trial.victim.allocate("many", rows, 64, 2, blocks=True, keys=[by_blocks(VICTIM, 9)], seed=4)
        honest.allocate("m", rows, 64, 2, blocks=True)
        order = np.random.default_rng(1).permutation(rows)
        wires = [trial.fair_call(100 + number)[1] for number in range(8)]
        trial.begin()
        left = [wire for wire in wires if _sends(wire, header(64 * MIB))]

        def feed() -> None:
            left[:] = [wire for wire in left if _sends(wire, bytes(32 << 10))]
            time.sleep(0.25)

        with meanwhile(feed):
            time.sleep(0.5)
            for _ in range(3):
                honest.pull_blocks(by_blocks(VICTIM, 9), "m", order.tolist(), list(range(rows)))
            assert equal(honest.read("m"), [tensor[order] for tensor in pattern(4, 2, rows, 64)])
        trial.judge(links=9, streams=9, busy=9)


@pytest.mark.parametrize("trickles", [False, True])
@pytest.mark.parametrize("verb", ["read", "write", "write ahead"])
def test_a_peer_that_stalls_loses_its_rows(verb: str, trickles: bool) -> None:
    """The peer announces a deadline of 10 minutes. An honest push gets the same rows after `link_silence`."""
    limit = SILENCE + SLACK
    with Trial(honest=["tcp"]) as trial:
        writer = trial.join(40, "tcp", llm__SyncKvCacheWaitTime=int(1000 * limit))
        writer.allocate("w", PREY_ROWS, PREY_BYTES, 2, blocks=True, seed=9)
        _link, call = trial.fair_call(window=4096)
        cache, name = prey_of(call), m.name_blocks(1)
        trial.begin()
        if verb == "write ahead":
            call.say(m.write(name, cache, ALL, 0, AHEAD, ahead=True))
            call.send(bytes(1000))
            time.sleep(1.5)  # the engine pins the rows before it reads the bytes, and sends nothing
        else:
            call.say((m.read if verb == "read" else m.write)(name, cache, ALL, 0, 2 * PREY))
            assert m.read_reply(call.hear())["is"] == "Ready", "the rows are pinned from now on"

        def trickle() -> None:
            with suppress(OSError):
                if verb == "read":
                    call.socket.recv(1)
                else:
                    call.send(b"\0")
            time.sleep(0.05)

        with meanwhile(*([trickle] if trickles else [])):
            writer.push_blocks(by_blocks(VICTIM, 1), "w", range(PREY_ROWS), range(PREY_ROWS))
        assert equal(trial.victim.read("prey"), pattern(9, 2, PREY_ROWS, PREY_BYTES))
        trial.judge(links=2, streams=2, busy=2)
        assert not trial.tender.ended, "the link itself goes on"


def test_a_slow_reader_that_makes_progress_keeps_its_rows() -> None:
    """It reads 0.5 MiB/s for more than three times `link_silence`, and gets the bytes of the rows."""
    with attack(window=128 << 10, honest=["tcp"]) as (_, link):
        call = link.call()
        wanted = m.read(m.name_blocks(1), prey_of(call), ALL, 0, 2 * PREY)
        assert ask(call, wanted) == {"is": "Ready", "bytes": 2 * PREY}
        slow = bytearray()
        until = time.monotonic() + 3 * SILENCE + 0.5
        while time.monotonic() < until:
            slow += call.exactly(128 << 10)
            time.sleep(0.25)
        right = payload(b"".join(tensor.tobytes() for tensor in pattern(5, 2, PREY_ROWS, PREY_BYTES)))
        assert bytes(slow) + call.exactly(len(right) - len(slow)) == right


NONSENSE: dict[str, bytes] = {
    "done": m.done(2**63),
    "ready for more bytes than there are": m.ready(U64),
    "stale, again and again": m.STALE,
    "unreachable": m.unreachable("x" * 100_000),
    "failed with a kind that is none": m.failed(255, "x" * 100_000, []),
    "failed with rows that are none": m.failed(3, "no", [m.uint(U32) + m.uint(U64) + m.uint(0)]),
    "a cache of endless rows": m.described(rows=U64, row_bytes=U64),
    "a cache of no rows": m.described(rows=0, row_bytes=0, tensors=0),
    "a cache of endless tensors": m.described(tensors=U32, location=m.in_region([m.run(0, 1, U32)])),
    "rows that overlap": m.described(row_stride=255),
    "rows without an end": m.described(row_stride=U64),
    "a cache nowhere": m.described(location=m.in_region([m.run(U64, U64, 1)], 1)),
    "a cache of a process": m.described(allocated=False, location=m.in_process([m.run(0, 0, 1)])),
    "a placement that is none": m.described(placement=99),
    "half a reply": m.described()[:5],
    "no reply": b"",
}


def test_answers_that_mean_nothing_fail_the_call_and_nothing_else() -> None:
    """The victim links to a hostile listener, and pulls and pushes. Each call ends with a code before its deadline."""
    with Trial(honest=["tcp"], llm__SyncKvCacheWaitTime=1000) as trial:
        answer = b""

        def serve(wire: Wire) -> None:
            while wire.hear():
                wire.say(answer)

        trial.listen(serve)
        trial.begin()
        for model, (what, answer) in enumerate(NONSENSE.items()):  # noqa: B007  (`serve` sends it)
            for call in ("pull_blocks", "push_blocks"):
                told, seconds, _ = trial.victim.timed(call, by_blocks(77, model), "n", [0], [0])
                assert told not in {OK, "MemoryError"}, (what, call, told)
                assert seconds < 1 + SLACK, (what, call, seconds)
        trial.judge(links=1, streams=1, busy=1)
        assert not trial.tender.ended, "the link itself goes on"


def test_notifications_beyond_the_window_are_refused() -> None:
    """A peer that does not count what the victim has polled: its requests fail, and the memory is bounded."""
    with attack() as (trial, link):
        call = link.call()
        assert trial.victim.polled() == []
        for _ in range(2):
            assert ask(call, m.notify([b"x" * 64] * 1024))["is"] == "Done"
        check_refused(ask(call, m.notify([b"x"])), BUSY)
        assert ask(call, m.finish(m.pulled(m.name_blocks(), 0, 0, 1), message=b"x"))["is"] == "Failed"
        for numbers in ((0, 0), (U64, U64), (U64, 0), (1, U64)):
            link.control.say(m.polled(numbers, (numbers[1], numbers[0])))
        assert trial.victim.polled() == [(66, b"x" * 64)] * 2048
        # A release that fails delivers nothing.
        assert ask(call, m.finish(m.pulled(m.name_request(9, 9), 3, 0, 1), message=b"x"))["is"] == "Failed"
        assert ask(call, m.notify([b"again"]))["is"] == "Done"
        eventually(lambda: trial.victim.polled() == [(66, b"again")])


# Bytes that are no requests.
UNREADABLE: dict[str, bytes] = {
    "no notifications": m.notify([]),
    "a notification that is too long": m.notify([b"x" * 65537]),
    "too many notifications": m.notify([b""] * 1025),
    "half a notification": m.notify([b"x"])[:-3],
    "a name that is too long": m.find(b"x" * 129),
    "a name that is not UTF-8": m.find(b"\xff\xfe"),
    "a name of two lines": m.find(b"a\nb"),
    "half a name": m.find(b"kv")[:-1],
    "a name and more": m.find(b"kv") + b"x",
    "half a grant": m.describe(GRANT)[:-5],
    "a grant without numbers": m.describe(GRANT[:1]),
    "half a report on a grant": m.finish(m.pulled(GRANT, 0, 0, 0))[:-4],
    "a grant of endless numbers": m.describe(GRANT[:1] + b"\xff" * 40),
    "checksums of half a plan": m.checksums(GRANT, 1, m.plan_spans([m.span(0, 0, 64)])[:-3]),
    "half a request for checksums": m.checksums(GRANT, 1, m.plan_spans([m.span(0, 0, 64)]))[:-1],
    **{
        f"{what} of a {verb.__name__}": verb(m.name_blocks(1), 1, plan, 0, 64)
        for verb in (m.read, m.write)
        for what, plan in {
            "half a pair": m.plan_blocks(64, b"\4" + bytes(6)),
            "half a template": m.plan_templates([m.template((64, 64), [(0, 0)], [m.span(0, 0, 64)])[:-4]]),
            "templates without end": m.plan_start(1, (0, 0)) + m.uint(U64),
            "spans without end": m.plan_templates([m.template((0, 0), [(0, 0)], [])[:-1] + m.uint(U64)]),
        }.items()
    },
    "half a fetch": m.fetch(m.name_blocks(1), 1, ALL, m.in_region([m.run(0, 0, 1)]), 1, PREY)[:-1],
}


def test_requests_that_cannot_be_read_end_their_stream_alone() -> None:
    with attack(honest=["tcp"]) as (_, link):
        call = link.call()
        for what, request in UNREADABLE.items():
            wire = link.call()
            wire.say(request)
            assert wire.ended(SLACK), what
            assert ask(call, m.ping())["is"] == "Done", what


def test_a_peer_may_ask_for_very_many_names() -> None:
    with attack(honest=["tcp"]) as (_, link):
        call = link.call()
        for number in range(2000):
            answer = ask(call, m.find(b"no cache %d" % number))
            assert answer["is"] == "Failed"
            assert f"'no cache {number}'" in answer["message"]
