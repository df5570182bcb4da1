"""Attacks as in `test_hostile_peers.py`: peers that ask for checksums that they must not get, and owners that lie."""

from __future__ import annotations

import pytest

from hostile import messages as m
from hostile.client import Wire, ask, payload
from hostile.trial import PREY, PREY_BYTES, PREY_ROWS, SLACK, VICTIM, Trial, prey_of
from peers import OK, by_blocks
from peers.values import Refused, code
from test_hostile_grants import GRANT_ENDED_KIND, INVALID_KIND, name_of

U32, U64 = 2**32 - 1, 2**64 - 1
FAILED = "verify_failed"
TIMEOUT_KIND = 3


def test_the_heaviest_requests_do_not_hold_up_honest_peers() -> None:
    with Trial(honest=["tcp"]) as trial:
        link, call = trial.fair_call()
        cache, name = prey_of(call), m.name_blocks(1)
        # As a whole, and in pieces of 64 bytes: the slowest to hash that a layout may have.
        whole = m.checksums(name, cache, _pairs([(0, 0)], [m.span(0, 0, PREY)]))
        half = PREY_BYTES // 2
        small = [m.span(at, at // 64 * half, 64, half // 64, 128, 64) for at in (0, 64)]
        pieces = m.checksums(name, cache, _pairs([(row, row) for row in range(PREY_ROWS)], small))
        wires = [link.call() for _ in range(4)]
        trial.begin()
        for number in range(20):
            heavy = whole if number % 2 else pieces
            for wire in wires:
                wire.say(heavy)
            for wire in wires:
                assert m.read_reply(wire.hear())["is"] == "Checksums"
        for wire in wires:  # gone before the answer
            wire.say(heavy)
            wire.close()
        trial.judge(links=1, streams=5, busy=1)


def _pairs(pairs: list[tuple[int, int]] | bytes, spans: list[bytes], unit: int = PREY_BYTES, tensors: int = 2) -> bytes:
    """A plan that moves from the cache under attack, or into it."""
    return m.plan_templates([m.template((unit, unit), pairs, spans)], tensors)


ROW = m.span(0, 0, PREY_BYTES)


def test_checksums_of_what_is_not_there_are_refused() -> None:
    with Trial(honest=["tcp"]) as trial:
        link, call = trial.fair_call()
        cache, name = prey_of(call), m.name_blocks(1)
        trial.begin()
        same = b"\4" + b"".join(bytes(4) + row.to_bytes(4, "little") for row in range(65_537))
        for plan in (
            _pairs([(0, 0)], [ROW], tensors=0),
            _pairs([(0, 0)], [ROW], tensors=3),
            m.plan_templates([m.template((0, 0), [(0, 0)], [ROW])], 2, (0, 0), (2, 2)),
            _pairs([(PREY_ROWS, PREY_ROWS)], [ROW]),
            _pairs([(0, 0)], [m.span(PREY - 1, PREY - 1, 2)]),
            _pairs([(0, 0)], [m.span(U64, U64, 1)]),
            _pairs([(U32, U32)], [ROW], unit=U64),
            _pairs([(0, 1), (1, 1)], [ROW]),
            _pairs([], [ROW]),
            _pairs([(0, 0)], []),
            m.plan_templates([m.template((0, PREY_BYTES), same[: 1 + 8 * 3000], [ROW])], 2),  # too many bytes
            m.plan_templates([m.template((0, 1), same, [m.span(0, 0, 1)])], 2),  # too many pairs
            m.plan_templates([m.template((1, 1), [(0, 0)], [m.span(0, 0, 1)])] * 257),
        ):
            for written in (False, True):
                reply = ask(call, m.checksums(name, cache, plan, written))
                assert (reply["is"], reply["kind"]) == ("Failed", INVALID_KIND), (plan[:20], reply)
        for broken in (
            m.checksums(name, cache, _pairs([(0, 0)], [ROW])[:-3]),
            m.checksums(name, cache, _pairs([(0, 0)], [ROW]))[:-1],
        ):
            wire = link.call()
            wire.say(broken)
            assert wire.ended(SLACK), broken[:20]
        good = _pairs([(0, 1), (1, 0), (0, 2)], [m.span(7, 100, 5, 3, 100, -20), m.span(900, 1, 6)])
        assert ask(call, m.checksums(name, cache + 99, good))["is"] == "Stale"
        assert ask(call, m.checksums(m.name_blocks(77), cache, good))["is"] == "Stale"
        first, second, third = ask(call, m.checksums(name, cache, good))["sums"]
        assert first == third != second, "equal ranges have equal checksums, and others do not"
        # A checksum covers its request: the same bytes, asked for in another way, have another one.
        halves = _pairs([(3, 0)], [m.span(0, 0, 100, 2, 100, 200), m.span(200, 300, PREY_BYTES - 200)])
        (reply,) = ask(call, m.checksums(name, cache, halves))["sums"]
        assert [reply] != ask(call, m.checksums(name, cache, _pairs([(3, 0)], [ROW])))["sums"]
        late = ask(call, m.checksums(name, cache, _pairs([(0, 0)], [m.span(0, 0, PREY)]), limit_ms=0))
        assert late["is"] == "Checksums" or (late["is"], late["kind"]) == ("Failed", TIMEOUT_KIND), late
        trial.judge(links=1, streams=3, busy=1)


def test_checksums_obey_grants() -> None:
    with Trial(honest=["tcp"]) as trial:
        _, call = trial.fair_call()
        cache = prey_of(call)
        grant = name_of(trial.victim.grant("prey", [1, 2]))
        old = trial.victim.grant("prey", [0])
        trial.victim.revoke(old)
        trial.begin()
        for pairs, spans in (
            ([(1, 0), (0, 1)], [ROW]),
            ([(1, 0), (3, 1)], [ROW]),
            ([(1, 0)], [m.span(PREY_BYTES - 1, 0, 2, 2, PREY_BYTES, 2)]),
            ([(0, 0)], [m.span(PREY_BYTES - 1, 0, 1), m.span(PREY_BYTES, 1, 1)]),
        ):
            reply = ask(call, m.checksums(grant, cache, _pairs(pairs, spans)))
            assert (reply["is"], reply["kind"]) == ("Failed", INVALID_KIND), reply
        reply = ask(call, m.checksums(grant, cache, _pairs([(2, 0), (1, 1)], [ROW])))
        assert len(reply["sums"]) == 2
        for ended in (name_of(old), name_of(old, secret=bytes(16))):
            reply = ask(call, m.checksums(ended, cache, _pairs([(0, 0)], [ROW])))
            assert (reply["is"], reply["kind"]) == ("Failed", GRANT_ENDED_KIND), reply
        trial.judge(links=1, streams=1, busy=1)


LIES: dict[str, tuple[bytes, set[str]]] = {
    "wrong checksums": (m.sums(0, [1]), {"verify_failed"}),
    "too few": (m.sums(0, []), {"failed"}),
    "too many": (m.sums(0, [1, 2]), {"failed"}),
    "more than a message may have": (m.sums(0, [0] * ((1 << 16) + 1)), {"not_linked"}),
    "fewer than announced": (m.sums(0, [1], U32), {"not_linked"}),
    "without end": (m.sums(0, [1], U64), {"not_linked"}),
    "another generation": (m.sums(U64, [1]), {"verify_failed"}),
    "stale for ever": (m.STALE, {"not_found"}),
    "done": (m.done(1), {"failed"}),
    "half a reply": (m.sums(0, [U64])[:3], {"not_linked"}),
}


def test_owners_that_lie_about_checksums_fail_the_call_and_nothing_else() -> None:
    """The victim pulls from a hostile owner, which sends bytes, and then answers that mean nothing or do not fit."""
    with Trial(honest=["tcp"]) as trial:
        answer = of_bytes = m.sums(0, [1])

        def serve(wire: Wire) -> None:
            while request := wire.hear():
                kind = m.without_limit(request)[0]
                if kind in {0, m.FIND}:
                    wire.say(m.found(1) if kind == m.FIND else m.described())
                elif kind == 1:
                    wire.say(m.ready(512))
                    wire.send(payload(bytes(512)))
                    if request[-1]:  # the checksum of the bytes is asked for
                        wire.say(of_bytes)
                else:
                    wire.say(answer)

        trial.listen(serve)
        trial.begin()
        for what, (answer, expected) in LIES.items():  # noqa: B007  (`serve` sends it)
            with pytest.raises(Refused) as caught:
                trial.victim.native_pull(77, "kv", "n", [0], [0], verify="full")
            assert caught.value.code in expected, (what, caught.value)
        answer = m.sums(0, [1])
        for what, (of_bytes, expected) in LIES.items():  # noqa: B007  (`serve` sends it)
            with pytest.raises(Refused) as caught:
                trial.victim.native_pull(77, "kv", "n", [0], [0], verify="full")
            # If the lie has the form of a checksum, the blocks are compared, and differ.
            assert caught.value.code in expected | {FAILED}, (what, caught.value)
        trial.victim.native_pull(77, "kv", "n", [0], [0], verify="off")
        trial.judge(links=1, streams=2, busy=1)
        honest = trial.join(41, "tcp", llm__Verify="full")
        assert code(honest.pull_blocks, by_blocks(VICTIM), "n", [0], [0]) == OK
