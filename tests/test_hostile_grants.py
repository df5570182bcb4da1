"""Attacks as in `test_hostile_peers.py`, with forged and replayed grants, and owners that lie about theirs."""

from __future__ import annotations

import random
import time

import pytest

from hostile import messages as m
from hostile.client import Listener, Offer, Wire, ask, check_refused, payload
from hostile.messages import GRANT_ENDED, INVALID_ARGUMENT, OUT_OF_MEMORY, U32, U64, name_of
from hostile.trial import PREY, PREY_BYTES, PREY_ROWS, VICTIM, Trial, attack, prey_of
from peers import OK, by_blocks, equal, pattern
from peers.values import Refused, code

ALL = m.plan_spans([m.span(0, 0, PREY)], 2)


def done_with(grant: bytes) -> bytes:
    """The request that reports a reader that is done with a grant."""
    return m.finish(m.pulled(grant, 0, 0, 0))


def read_of(name: bytes, cache: int, row: int, rows: int = 1, generation: int | None = None) -> bytes:
    """The request for rows of the first tensor."""
    plan = m.plan_spans([m.span(row * PREY_BYTES, 0, rows * PREY_BYTES)])
    return m.read(name, cache, plan, 0, rows * PREY_BYTES, generation)


def test_forged_and_replayed_grants() -> None:
    with attack(honest=["tcp"]) as (trial, link):
        call = link.call()
        cache = prey_of(call)
        token, old = trial.victim.grant("prey", [0, 1], readers=2), trial.victim.grant("prey", [0])
        trial.victim.revoke(old)
        secret, chance = token[32:], random.Random(1)  # noqa: S311
        forged = [
            name_of(token, secret=bytes(16)),
            *(name_of(token, secret=chance.randbytes(16)) for _ in range(100)),
            *(name_of(token, secret=secret[:at] + bytes([secret[at] ^ 1]) + secret[at + 1 :]) for at in range(16)),
            *(name_of(token, slot=slot) for slot in (1, 65_535, 65_536, U32)),
            *(name_of(token, generation=generation) for generation in (1, U64)),
        ]
        for one in forged:
            for request in (m.describe(one), done_with(one), read_of(one, cache, 0)):
                check_refused(ask(call, request), GRANT_ENDED)
        # A grant that has ended lends nothing, and its report changes nothing.
        for request in (m.describe(name_of(old)), read_of(name_of(old), cache, 0)):
            check_refused(ask(call, request), GRANT_ENDED)
        assert ask(call, done_with(name_of(old)))["is"] == "Done"
        told = ask(call, m.describe(name_of(token)))
        assert (told["cache"], told["granted"]) == (cache, [(0, 2)]), told
        # One peer may report as often as it likes, and counts once.
        for _ in range(10):
            assert ask(call, done_with(name_of(token)))["is"] == "Done"
        assert trial.victim.grant_ended(token) is None


def test_a_grant_covers_its_rows_and_nothing_else() -> None:
    with attack(honest=["tcp"]) as (trial, link):
        call = link.call()
        cache, generation = prey_of(call), ask(call, m.describe(m.name_blocks(1)))["generation"]
        grant, other = (name_of(trial.victim.grant(name, [1, 2])) for name in ("prey", "calm"))
        for row, rows in ((0, 1), (0, 2), (2, 2), (3, 1)):
            check_refused(ask(call, read_of(grant, cache, row, rows)), INVALID_ARGUMENT)
        assert ask(call, read_of(other, cache, 1))["is"] == "Stale", "it names another cache"
        changed = read_of(grant, cache, 1, generation=generation + 1)
        assert ask(call, changed)["is"] == "Stale", "no byte follows if the caller knows another generation"
        for rows, known in ((1, generation), (2, None)):
            assert ask(call, read_of(grant, cache, 1, rows, known))["is"] == "Ready"
            right = payload(pattern(5, 2, PREY_ROWS, PREY_BYTES)[0][1 : 1 + rows].tobytes())
            assert call.exactly(len(right)) == right
            assert m.read_reply(call.hear()) == {"is": "Checksums", "generation": generation, "sums": []}


def test_nobody_writes_under_a_grant() -> None:
    """The victim can read the memory of the hostile peer, so that a push of that peer gets as far as the rows."""
    with attack(local=True, offer=Offer(PREY), honest=["tcp"]) as (trial, link):
        call = link.call()
        cache, grant = prey_of(call), name_of(trial.victim.grant("prey", [1, 2]))
        source, plan = m.in_region([m.run(0, 0, 1)]), m.plan_spans([m.span(0, PREY_BYTES, PREY_BYTES)])
        for request in (
            m.fetch(grant, cache, plan, source, 1, PREY),
            m.write(grant, cache, plan, 0, PREY_BYTES),
            m.write(grant, cache, plan, 0, PREY_BYTES, shared=1),
        ):
            check_refused(ask(call, request), INVALID_ARGUMENT, "a push takes no grant")
        assert equal(trial.victim.read("prey"), pattern(5, 2, PREY_ROWS, PREY_BYTES))
        # The same request without a grant writes, which proves that the other one reached the rows.
        assert ask(call, m.fetch(m.name_blocks(1), cache, plan, source, 1, PREY))["is"] == "Done"
        assert not trial.victim.read("prey")[0][1].any()


def test_a_write_under_a_grant_does_not_wait_for_rows() -> None:
    with Trial(honest=["tcp"], llm__LinkSilence=10_000) as trial:
        _, call = trial.fair_call(window=4096)
        cache, grant = prey_of(call), name_of(trial.victim.grant("prey", [1, 2]))
        _, other = trial.fair_call(67)
        trial.begin()
        # The caller takes no bytes, so the rows stay pinned.
        assert ask(call, m.read(m.name_blocks(1), cache, ALL, 0, 2 * PREY))["is"] == "Ready"
        started = time.monotonic()
        told = ask(other, m.write(grant, cache, m.plan_spans([m.span(PREY_BYTES, 0, PREY_BYTES)]), 0, PREY_BYTES))
        assert time.monotonic() - started < 5, "less than the silence that ends the read"
        check_refused(told, INVALID_ARGUMENT, "a push takes no grant")
        call.exactly(len(payload(bytes(2 * PREY))))
        trial.judge(links=2, streams=2, busy=2)


@pytest.mark.parametrize(("wait", "outcome"), [(True, "timeout"), (False, OK)])
def test_a_reader_that_takes_no_bytes_holds_a_revocation_no_longer_than_its_limit(wait: bool, outcome: str) -> None:
    """It asks for bytes under a grant and does not read them: `revoke` waits for that read, and ends with a code.

    With `wait=False` it does not wait, and the bytes do not count either.
    """
    with Trial(honest=["tcp"], llm__SyncKvCacheWaitTime=700, llm__LinkSilence=10_000) as trial:
        _, call = trial.fair_call(window=4096)
        cache = prey_of(call)
        token = trial.victim.grant("prey", list(range(PREY_ROWS)))
        trial.begin()
        assert ask(call, m.read(name_of(token), cache, ALL, 0, 2 * PREY))["is"] == "Ready"
        assert code(trial.victim.revoke, token, wait=wait) == outcome
        assert trial.victim.grant_ended(token) == "revoked"
        check_refused(ask(trial.fair_call(67)[1], m.describe(name_of(token))), GRANT_ENDED)
        # The bytes come to an end, and then the owner says that they do not count.
        call.exactly(len(payload(bytes(2 * PREY))))
        check_refused(m.read_reply(call.hear()), GRANT_ENDED)
        trial.judge(links=2, streams=2, busy=2)


def of_grant(request: bytes) -> bool:
    """Whether a request asks what a grant lends."""
    return m.without_limit(request).startswith(m.without_limit(m.describe(m.name_grant(0, 0, b"")))[:2])


def token_of(owner: Listener, slot: int) -> bytes:
    """The token of a grant of a hostile owner."""
    numbers = ((77, 8), (owner.peer.instance, 8), (slot, 4))
    return b"LDG\x01" + b"".join(number.to_bytes(size, "little") for number, size in numbers) + bytes(24)


def refusal(trial: Trial, owner: Listener, slot: int, cache: str = "kv") -> str:
    """Let the victim pull under a grant of the owner, and return the code of its error."""
    with pytest.raises(Refused) as caught:
        trial.victim.native_pull(77, cache, "n", [0], [0], grant=token_of(owner, slot))
    return str(caught.value.code)


LIES: dict[str, bytes] = {
    "rows out of order": m.described(granted=[(3, 4), (0, 1)]),
    "rows that overlap": m.described(granted=[(0, 2), (1, 3)]),
    "an empty range": m.described(granted=[(2, 2)]),
    "a range backwards": m.described(granted=[(3, 1)]),
    "no rows": m.described(),
    "rows of another cache": m.described(cache=2, granted=[(0, 4)]),
    "other rows": m.described(granted=[(1, 4)]),
    "fewer rows than announced": m.described(granted=[(0, 4)], num_granted=U32),
    "rows without end": m.described(granted=[(0, 4)], num_granted=U64),
    "done": m.done(4),
}


def test_owners_that_lie_about_a_grant_fail_the_call_and_nothing_else() -> None:
    """The victim pulls under a grant of a hostile owner, whose answers mean nothing or do not fit the pull."""
    with Trial(honest=["tcp"]) as trial:
        answer = b""

        def serve(wire: Wire) -> None:
            while request := wire.hear():
                named = m.found(1) if m.without_limit(request)[0] == m.FIND else m.described()
                wire.say(answer if of_grant(request) else named)

        owner, _ = trial.listen(serve)
        trial.begin()
        for slot, (what, answer) in enumerate(LIES.items()):  # noqa: B007  (`serve` sends it)
            # Another slot each time, because the victim keeps what it has learned of a grant.
            assert refusal(trial, owner, slot) in {"invalid_argument", "failed", "not_linked"}, what
        trial.judge(links=1, streams=2, busy=1)
        assert code(trial.join(41, "tcp").pull_blocks, by_blocks(VICTIM), "n", [0], [0]) == OK


def test_a_reader_asks_no_more_than_it_needs() -> None:
    """An owner refuses requests. The victim forgets a grant that has ended, and repeats no request without a reason."""
    with Trial(honest=["tcp"]) as trial:
        heard: list[str] = []
        answers = {"grant": m.described(granted=[(0, 4)]), "row": m.described(), "name": m.found(1)}
        answers["read"] = m.failed(GRANT_ENDED, "the grant has ended", [])

        def serve(wire: Wire) -> None:
            while request := wire.hear():
                kind = m.without_limit(request)[0]
                heard.append("grant" if of_grant(request) else {0: "row", 1: "read", m.FIND: "name"}[kind])
                wire.say(answers[heard[-1]])

        owner, _ = trial.listen(serve)
        trial.begin()
        assert refusal(trial, owner, 1) == "grant_ended"
        assert heard == ["grant", "name", "row", "read"]
        assert refusal(trial, owner, 1) == "grant_ended"
        assert heard[4:] == ["grant", "read"], "the grant was forgotten, and the name was not"
        heard.clear()
        answers["name"] = m.failed(OUT_OF_MEMORY, "no memory", [])
        assert refusal(trial, owner, 2, "other") == "out_of_memory"
        assert heard == ["grant", "name"], "only a name that is gone makes the victim ask for the grant again"
        trial.judge(links=1, streams=2, busy=1)
