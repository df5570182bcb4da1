"""Attacks as in `test_hostile_peers.py`, with forged and replayed grants, and owners that lie about theirs."""

from __future__ import annotations

import random
import time
from typing import Any

import pytest

from hostile import messages as m
from hostile.client import GENERATIONS, Offer, Wire, ask, memory, payload
from hostile.trial import PREY, PREY_BYTES, PREY_ROWS, SLACK, VICTIM, Trial, prey_of
from peers import OK, by_blocks, equal, pattern
from peers.values import Refused, code

U32, U64 = 2**32 - 1, 2**64 - 1
# The number of the kind in an answer that reports a failure.
INVALID_KIND, OUT_OF_MEMORY_KIND, GRANT_ENDED_KIND = 0, 2, 18


def name_of(token: bytes, **changed: Any) -> bytes:
    """The name of the grant of a token: slot, generation and secret."""
    number = int.from_bytes
    real = {"slot": number(token[20:24], "little"), "generation": number(token[24:32], "little"), "secret": token[32:]}
    return m.name_grant(**{**real, **changed})


def done_with(grant: bytes) -> bytes:
    """The request that reports a reader that is done with a grant."""
    return m.finish(m.pulled(grant, 0, 0, 0))


def plan_of(row: int, rows: int = 1) -> bytes:
    return m.plan_spans([m.span(row * PREY_BYTES, 0, rows * PREY_BYTES)], 1)


def test_forged_and_replayed_grants() -> None:
    with Trial(honest=["tcp"]) as trial:
        _, call = trial.fair_call()
        cache = prey_of(call)
        token = trial.victim.grant("prey", [0, 1], readers=2)
        old = trial.victim.grant("prey", [0])
        trial.victim.revoke(old)
        secret, chance = token[32:], random.Random(1)  # noqa: S311
        forged = [
            name_of(token, secret=bytes(16)),
            *(name_of(token, secret=chance.randbytes(16)) for _ in range(100)),
            *(name_of(token, secret=secret[:at] + bytes([secret[at] ^ 1]) + secret[at + 1 :]) for at in range(16)),
            *(name_of(token, slot=slot) for slot in (1, 65_535, 65_536, U32)),
            *(name_of(token, generation=generation) for generation in (1, U64)),
        ]
        trial.begin()
        for one in forged:
            for request in (
                m.describe(one),
                done_with(one),
                m.read(one, cache, plan_of(0), 0, PREY_BYTES),
            ):
                told = ask(call, request)
                assert (told["is"], told["kind"]) == ("Failed", GRANT_ENDED_KIND), told
        # A grant that has ended lends nothing, and its report changes nothing.
        for request in (m.describe(name_of(old)), m.read(name_of(old), cache, plan_of(0), 0, PREY_BYTES)):
            told = ask(call, request)
            assert (told["is"], told["kind"]) == ("Failed", GRANT_ENDED_KIND), told
        assert ask(call, done_with(name_of(old)))["is"] == "Done"
        told = ask(call, m.describe(name_of(token)))
        assert (told["cache"], told["granted"]) == (cache, [(0, 2)]), told
        # One peer may report as often as it likes, and counts once.
        for _ in range(10):
            assert ask(call, done_with(name_of(token)))["is"] == "Done"
        assert trial.victim.grant_ended(token) is None
        trial.judge(links=1, streams=1, busy=1)


def test_a_grant_covers_its_rows_and_nothing_else() -> None:
    with Trial(honest=["tcp"]) as trial:
        _, call = trial.fair_call()
        cache = prey_of(call)
        grant = name_of(trial.victim.grant("prey", [1, 2]))
        other = name_of(trial.victim.grant("calm", [1, 2]))
        generation = ask(call, m.describe(m.name_blocks(1)))["generation"]
        trial.begin()
        for row, rows in ((0, 1), (0, 2), (2, 2), (3, 1)):
            told = ask(call, m.read(grant, cache, plan_of(row, rows), 0, rows * PREY_BYTES))
            assert (told["is"], told["kind"]) == ("Failed", INVALID_KIND), told
        assert ask(call, m.read(other, cache, plan_of(1), 0, PREY_BYTES))["is"] == "Stale", "it names another cache"
        changed = m.read(grant, cache, plan_of(1), 0, PREY_BYTES, generation=generation + 1)
        assert ask(call, changed)["is"] == "Stale", "no byte follows if the caller knows another generation"
        same = m.read(grant, cache, plan_of(1), 0, PREY_BYTES, generation=generation)
        assert ask(call, same)["is"] == "Ready"
        call.exactly(len(payload(bytes(PREY_BYTES))))
        assert m.read_reply(call.hear())["is"] == "Checksums"
        assert ask(call, m.read(grant, cache, plan_of(1, 2), 0, 2 * PREY_BYTES))["is"] == "Ready"
        right = payload(pattern(5, 2, PREY_ROWS, PREY_BYTES)[0][1:3].tobytes())
        assert call.exactly(len(right)) == right
        assert m.read_reply(call.hear()) == {"is": "Checksums", "generation": generation, "sums": []}
        trial.judge(links=1, streams=1, busy=1)


def test_nobody_writes_under_a_grant() -> None:
    with Trial(honest=["tcp"]) as trial:
        _, call = trial.fair_call()
        cache, grant = prey_of(call), name_of(trial.victim.grant("prey", [1, 2]))
        source = m.in_process([m.run(4096, 0, 1)])
        trial.begin()
        for request in (
            m.write(grant, cache, plan_of(1), 0, PREY_BYTES),
            m.write(grant, cache, plan_of(1), 0, PREY_BYTES, shared=1),
            m.fetch(grant, cache, plan_of(1), source, 1, PREY_BYTES * PREY_ROWS),
        ):
            assert ask(call, request)["is"] in {"Failed", "Unreachable"}, request[:1]
        told = ask(call, m.write(grant, cache, plan_of(1), 0, PREY_BYTES))
        assert (told["kind"], "a push takes no grant" in told["message"]) == (INVALID_KIND, True), told
        assert equal(trial.victim.read("prey"), pattern(5, 2, PREY_ROWS, PREY_BYTES))
        trial.judge(links=1, streams=1, busy=1)


def test_nobody_on_this_host_writes_under_a_grant() -> None:
    """The victim can read the memory of the hostile peer, so that a push of that peer gets as far as the rows."""
    with Trial(honest=["tcp"]) as trial:
        offer = Offer([memory(GENERATIONS), memory(PREY)], regions=(PREY, None))
        trial.held.callback(offer.close)
        link = trial.link(local=True, offer=offer)
        trial.tender.add(link)
        call = link.call()
        cache, grant = prey_of(call), name_of(trial.victim.grant("prey", [1, 2]))
        source, plan = m.in_region([m.run(0, 0, 1)]), m.plan_spans([m.span(0, PREY_BYTES, PREY_BYTES)], 1)
        trial.begin()
        told = ask(call, m.fetch(grant, cache, plan, source, 1, PREY))
        assert told["is"] == "Failed", told
        assert (told["kind"], "a push takes no grant" in told["message"]) == (INVALID_KIND, True), told
        assert equal(trial.victim.read("prey"), pattern(5, 2, PREY_ROWS, PREY_BYTES))
        # The same request without a grant writes, which proves that the other one reached the rows.
        assert ask(call, m.fetch(m.name_blocks(1), cache, plan, source, 1, PREY))["is"] == "Done"
        assert not trial.victim.read("prey")[0][1].any()
        trial.judge(links=1, streams=1, busy=1, mapped=GENERATIONS + PREY)


def test_a_write_under_a_grant_does_not_wait_for_rows() -> None:
    with Trial(honest=["tcp"], llm__LinkSilence=10_000) as trial:
        _, call = trial.fair_call(window=4096)
        cache, grant = prey_of(call), name_of(trial.victim.grant("prey", [1, 2]))
        _, other = trial.fair_call(67)
        trial.begin()
        # The caller takes no bytes, so the rows stay pinned.
        plan = m.plan_spans([m.span(0, 0, PREY)], 2)
        assert ask(call, m.read(m.name_blocks(1), cache, plan, 0, 2 * PREY))["is"] == "Ready"
        started = time.monotonic()
        told = ask(other, m.write(grant, cache, plan_of(1), 0, PREY_BYTES))
        assert time.monotonic() - started < 5, "less than the silence that ends the read"
        assert (told["kind"], "a push takes no grant" in told["message"]) == (INVALID_KIND, True), told
        call.exactly(len(payload(bytes(2 * PREY))))
        trial.judge(links=2, streams=2, busy=2)


def test_broken_ids_end_the_stream_alone() -> None:
    with Trial(honest=["tcp"]) as trial:
        link, call = trial.fair_call()
        grant = name_of(trial.victim.grant("prey", [1]))
        trial.begin()
        for broken in (
            m.describe(grant)[:-5],
            m.describe(grant[:1]),
            done_with(grant)[:-4],
            m.describe(grant[:1] + b"\xff" * 40),
        ):
            wire = link.call()
            wire.say(broken)
            assert wire.ended(SLACK), broken[:20]
        assert ask(call, m.describe(grant))["is"] == "Described"
        trial.judge(links=1, streams=5, busy=1)
        assert not trial.tender.ended, "the link itself goes on"


@pytest.mark.parametrize(("wait", "outcome"), [(True, "timeout"), (False, OK)])
def test_a_reader_that_takes_no_bytes_holds_a_revocation_no_longer_than_its_limit(wait: bool, outcome: str) -> None:
    """It asks for bytes under a grant and does not read them: `revoke` waits for that read, and ends with a code.

    With `wait=False` it does not wait, and the bytes do not count either.
    """
    with Trial(honest=["tcp"], llm__SyncKvCacheWaitTime=700, llm__LinkSilence=10_000) as trial:
        _, call = trial.fair_call(window=4096)
        cache = prey_of(call)
        token = trial.victim.grant("prey", list(range(PREY_ROWS)))
        plan = m.plan_spans([m.span(0, 0, PREY)], 2)
        trial.begin()
        assert ask(call, m.read(name_of(token), cache, plan, 0, 2 * PREY))["is"] == "Ready"
        assert code(trial.victim.revoke, token, wait=wait) == outcome
        assert trial.victim.grant_ended(token) == "revoked"
        told = ask(trial.fair_call(67)[1], m.describe(name_of(token)))
        assert (told["is"], told["kind"]) == ("Failed", GRANT_ENDED_KIND), told
        # The bytes come to an end, and then the owner says that they do not count.
        call.exactly(len(payload(bytes(2 * PREY))))
        told = m.read_reply(call.hear())
        assert (told["is"], told["kind"]) == ("Failed", GRANT_ENDED_KIND), told
        trial.judge(links=2, streams=2, busy=2)


def told_of(request: bytes) -> bytes:
    """The answer of an owner that has a cache with the id 1: to a request by name, or about the cache."""
    return m.found(1) if m.without_limit(request)[0] == m.FIND else m.described()


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
    "half a reply": m.described(granted=[(0, 4)])[:2],
    "no reply": b"",
}


def test_owners_that_lie_about_a_grant_fail_the_call_and_nothing_else() -> None:
    """The victim pulls under a grant of a hostile owner, whose answers mean nothing or do not fit the pull."""
    with Trial(honest=["tcp"]) as trial:
        answer, describes_grant = b"", m.without_limit(m.describe(m.name_grant(0, 0, b"")))[:2]

        def serve(wire: Wire) -> None:
            while request := wire.hear():
                wire.say(answer if m.without_limit(request).startswith(describes_grant) else told_of(request))

        listener, _ = trial.listen(serve)
        trial.begin()
        for number, (what, answer) in enumerate(LIES.items()):  # noqa: B007  (`serve` sends it)
            # Another slot each time, because the victim keeps what it has learned of a grant.
            token = b"LDG\x01" + (77).to_bytes(8, "little") + listener.peer.instance.to_bytes(8, "little")
            token += number.to_bytes(4, "little") + bytes(24)
            with pytest.raises(Refused) as caught:
                trial.victim.native_pull(77, "kv", "n", [0], [0], grant=token)
            assert caught.value.code in {"invalid_argument", "failed", "not_linked"}, (what, caught.value)
        trial.judge(links=1, streams=2, busy=1)
        assert code(trial.join(41, "tcp").pull_blocks, by_blocks(VICTIM), "n", [0], [0]) == OK


def test_a_reader_asks_no_more_than_it_needs() -> None:
    """An owner refuses requests. The victim forgets a grant that has ended, and repeats no request without a reason."""
    with Trial(honest=["tcp"]) as trial:
        heard: list[str] = []
        refuses_name = False

        def serve(wire: Wire) -> None:
            while request := wire.hear():
                asked = m.without_limit(request)
                what = "grant" if asked.startswith(describes_grant) else {0: "row", 1: "read", m.FIND: "name"}[asked[0]]
                heard.append(what)
                if what == "read":
                    wire.say(m.failed(GRANT_ENDED_KIND, "the grant has ended", []))
                elif what == "name":
                    wire.say(m.failed(OUT_OF_MEMORY_KIND, "no memory", []) if refuses_name else m.found(1))
                else:
                    wire.say(m.described(granted=[(0, 4)] if what == "grant" else []))

        describes_grant = m.without_limit(m.describe(m.name_grant(0, 0, b"")))[:2]
        listener, _ = trial.listen(serve)
        trial.begin()

        def pull(slot: int, cache: str) -> str:
            token = b"LDG\x01" + (77).to_bytes(8, "little") + listener.peer.instance.to_bytes(8, "little")
            token += slot.to_bytes(4, "little") + bytes(24)
            with pytest.raises(Refused) as caught:
                trial.victim.native_pull(77, cache, "n", [0], [0], grant=token)
            return str(caught.value.code)

        assert pull(1, "kv") == "grant_ended"
        assert heard == ["grant", "name", "row", "read"]
        assert pull(1, "kv") == "grant_ended"
        assert heard[4:] == ["grant", "read"], "the grant was forgotten, and the name was not"
        heard.clear()
        refuses_name = True
        assert pull(2, "other") == "out_of_memory"
        assert heard == ["grant", "name"], "only a name that is gone makes the victim ask for the grant again"
        trial.judge(links=1, streams=2, busy=1)
