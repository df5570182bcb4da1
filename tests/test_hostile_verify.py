"""Attacks as in `test_hostile_peers.py`: peers that ask for checksums that they must not get, and owners that lie.

Not for: plans that an owner refuses to hash (`asked_checksums.rs` of the core).
"""

from __future__ import annotations

import pytest

from hostile import messages as m
from hostile.client import Wire, ask, check_refused, payload
from hostile.messages import GRANT_ENDED, INVALID_ARGUMENT, U32, U64, name_of
from hostile.trial import PREY, PREY_BYTES, PREY_ROWS, VICTIM, Trial, attack, prey_of
from peers import OK, by_blocks
from peers.values import Refused, code

FAILED = "verify_failed"
ROW = m.span(0, 0, PREY_BYTES)


def _sums(name: bytes, cache: int, pairs: list[tuple[int, int]], spans: list[bytes]) -> bytes:
    """The request for the checksums of these pairs of rows in both tensors."""
    return m.checksums(name, cache, m.plan_templates([m.template((PREY_BYTES, PREY_BYTES), pairs, spans)], 2))


def test_the_heaviest_requests_do_not_hold_up_honest_peers() -> None:
    with attack(honest=["tcp"]) as (_, link):
        wires = [link.call() for _ in range(4)]
        cache, name = prey_of(wires[0]), m.name_blocks(1)
        # As a whole, and in pieces of 64 bytes: the slowest to hash that a layout may have.
        whole = _sums(name, cache, [(0, 0)], [m.span(0, 0, PREY)])
        half = PREY_BYTES // 2
        small = [m.span(at, at // 64 * half, 64, half // 64, 128, 64) for at in (0, 64)]
        pieces = _sums(name, cache, [(row, row) for row in range(PREY_ROWS)], small)
        for heavy in [pieces, whole] * 10:
            for wire in wires:
                wire.say(heavy)
            for wire in wires:
                assert m.read_reply(wire.hear())["is"] == "Checksums"
        for wire in wires:  # gone before the answer
            wire.say(whole)
            wire.close()


def test_a_checksum_covers_its_request() -> None:
    """Equal ranges have equal checksums, and the same bytes, asked for in another way, have another one."""
    with attack(honest=["tcp"]) as (_, link):
        call = link.call()
        cache, name = prey_of(call), m.name_blocks(1)
        spans = [m.span(7, 100, 5, 3, 100, -20), m.span(900, 1, 6)]
        first, second, third = ask(call, _sums(name, cache, [(0, 1), (1, 0), (0, 2)], spans))["sums"]
        assert first == third != second
        halves = [m.span(0, 0, 100, 2, 100, 200), m.span(200, 300, PREY_BYTES - 200)]
        sums = [ask(call, _sums(name, cache, [(3, 0)], spans))["sums"] for spans in (halves, [ROW])]
        assert sums[0] != sums[1]


def test_checksums_obey_grants() -> None:
    with attack(honest=["tcp"]) as (trial, link):
        call = link.call()
        cache, grant = prey_of(call), name_of(trial.victim.grant("prey", [1, 2]))
        old = trial.victim.grant("prey", [0])
        trial.victim.revoke(old)
        for pairs, spans in (
            ([(1, 0), (0, 1)], [ROW]),
            ([(1, 0), (3, 1)], [ROW]),
            ([(1, 0)], [m.span(PREY_BYTES - 1, 0, 2, 2, PREY_BYTES, 2)]),
            ([(0, 0)], [m.span(PREY_BYTES - 1, 0, 1), m.span(PREY_BYTES, 1, 1)]),
        ):
            check_refused(ask(call, _sums(grant, cache, pairs, spans)), INVALID_ARGUMENT)
        assert len(ask(call, _sums(grant, cache, [(2, 0), (1, 1)], [ROW]))["sums"]) == 2
        for ended in (name_of(old), name_of(old, secret=bytes(16))):
            check_refused(ask(call, _sums(ended, cache, [(0, 0)], [ROW])), GRANT_ENDED)


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

        def refused(expected: set[str], what: str) -> None:
            with pytest.raises(Refused) as caught:
                trial.victim.native_pull(77, "kv", "n", [0], [0], verify="full")
            assert caught.value.code in expected, (what, caught.value)

        trial.listen(serve)
        trial.begin()
        for what, (answer, expected) in LIES.items():  # noqa: B007  (`serve` sends it)
            refused(expected, what)
        answer = m.sums(0, [1])
        for what, (of_bytes, expected) in LIES.items():  # noqa: B007  (`serve` sends it)
            # If the lie has the form of a checksum, the blocks are compared, and differ.
            refused(expected | {FAILED}, what)
        trial.victim.native_pull(77, "kv", "n", [0], [0], verify="off")
        trial.judge(links=1, streams=2, busy=1)
        honest = trial.join(41, "tcp", llm__Verify="full")
        assert code(honest.pull_blocks, by_blocks(VICTIM), "n", [0], [0]) == OK
