"""Grants: pulls under a grant succeed while it lasts, and fail after its end, whatever ended it.

That a late pull never takes reused blocks is proved by painting: the owner writes other bytes as soon as the grant has
ended, and every pull that succeeded must have the old ones.
"""

from __future__ import annotations

import gc
import threading
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist.native import (
    Busy,
    Engine,
    Grant,
    GrantClosed,
    GrantEnded,
    InvalidArgument,
    NotFound,
    PeerDown,
    PeerLost,
    PeerUp,
    Timeout,
    Transfer,
)

from .helpers import (
    BLOCKS,
    LIMIT,
    ROW,
    TENSORS,
    Model,
    address,
    allocate,
    check_times,
    contents,
    fails,
    gather,
    messages,
    next_of,
    of,
    refused,
)

if TYPE_CHECKING:
    from collections.abc import Callable

    from .conftest import Open, Pair
    from .helpers import Remote

TRANSPORTS = ["auto", "tcp"]


def test_pull_under_a_grant(pair: Pair) -> None:
    mine, theirs = pair.caches()
    rows = theirs[[9, 4, 5, 4]]
    grant = pair.remote.lend(rows, ttl=LIMIT)
    assert isinstance(grant, Grant)
    assert isinstance(grant.token, bytes)
    assert (len(grant.token), grant.ended, grant.rows.cache, len(grant.rows)) == (48, None, theirs, 4)
    assert grant.token.hex() not in repr(grant)
    model = Model(mine)
    pair.local.pull(mine[[0, 7]], pair.peer["kv"][[5, 9]], grant=grant.token, last=False).result(LIMIT)
    assert grant.ended is None
    pair.local.pull(mine[[3]], pair.peer["kv"][[4]], grant=grant.token, verify="full").result(LIMIT)
    model.write([0, 7, 3], Model(theirs), [5, 9, 4]).check(mine)
    event = next_of(pair.remote, GrantClosed)
    assert (event.grant, event.reason, grant.ended) == (grant, "done", "done")
    assert pair.remote.events() == []
    error = fails(GrantEnded, lambda: pair.local.pull(mine[[0]], pair.peer["kv"][[5]], grant=grant.token))
    assert (error.code, error.arrived) == ("grant_ended", [])
    assert "ask the owner" in error.reason
    assert "last=False" in error.reason
    model.check(mine)


def test_only_lent_blocks(pair: Pair) -> None:
    mine, theirs = pair.caches()
    allocate(pair.remote, "other", seed=3)
    model = Model(mine)
    token = pair.remote.lend(theirs[[4, 5, 6]], ttl=LIMIT).token
    for blocks, missing in (([5, 7], 7), ([3], 3)):
        to = list(range(len(blocks)))
        error = fails(
            InvalidArgument,
            lambda to=to, blocks=blocks: pair.local.pull(mine[to], pair.peer["kv"][blocks], grant=token),  # type: ignore[misc]
        )
        assert str(missing) in str(error)
    fails(InvalidArgument, lambda: pair.local.pull(mine[[1]], pair.peer["other"][[4]], grant=token))
    fails(NotFound, lambda: pair.local.pull(mine[[1]], pair.peer["absent"][[4]], grant=token))
    model.check(mine)
    pair.local.pull(mine[[1]], pair.peer["kv"][[4]], grant=token).result(LIMIT)


def test_pull_without_a_grant_is_not_checked(pair: Pair) -> None:
    mine, theirs = pair.caches()
    pair.remote.lend(theirs[[4]], ttl=LIMIT).revoke().result(LIMIT)
    pair.local.pull(mine[[1]], pair.peer["kv"][[4]]).result(LIMIT)
    Model(mine).write([1], Model(theirs), [4]).check(mine)


def test_revoke(pair: Pair) -> None:
    mine, theirs = pair.caches()
    grant = pair.remote.lend(theirs[[4]], ttl=LIMIT)
    assert grant.revoke().result(LIMIT) is None
    assert grant.ended == "revoked"
    assert next_of(pair.remote, GrantClosed).reason == "revoked"
    assert grant.revoke().result(LIMIT) is None
    fails(GrantEnded, lambda: pair.local.pull(mine[[1]], pair.peer["kv"][[4]], grant=grant.token))
    error = fails(GrantEnded, lambda: grant.renew(1.0))
    assert (error.reason, error.facts) == ("the grant has ended; lend the rows again", {"ended": "revoked"})
    assert of(GrantClosed, pair.remote.events()) == [], "one event for each grant"


def test_the_owner_says_why_a_grant_has_ended(pair: Pair) -> None:
    """Also to a reader that has pulled under the grant, and sees its end without asking."""
    mine, theirs = pair.caches()

    def reason(token: bytes) -> str:
        error = fails(GrantEnded, lambda: pair.local.pull(mine[[0]], pair.peer["kv"][[4]], grant=token))
        assert str(error).count("ended=") == ("ended" in error.facts)
        return f"{error.facts.get('ended')}: {error.reason}"

    for used in (False, True):
        grants = [pair.remote.lend(theirs[[4]], ttl=ttl) for ttl in (LIMIT, LIMIT, 2.0)]
        for grant in grants if used else []:
            pair.local.pull(mine[[0]], pair.peer["kv"][[4]], grant=grant.token, last=False).result(LIMIT)
        revoked, done, expired = grants
        revoked.revoke().result(LIMIT)
        pair.local.pull(mine[[0]], pair.peer["kv"][[4]], grant=done.token).result(LIMIT)
        gather(pair.remote, lambda seen: len(of(GrantClosed, seen)) >= 3)
        assert reason(revoked.token).startswith("revoked: the owner has revoked the grant")
        assert reason(done.token).startswith("done: the readers of the grant have finished")
        assert reason(expired.token).startswith("expired: the grant has expired")
    forged = expired.token[:-1] + bytes([expired.token[-1] ^ 1])
    assert reason(forged).startswith("None: the owner has never given a grant with this token")


def test_revoke_without_room_for_a_transfer(start: Open) -> None:
    """Giving memory back that nobody reads needs no room for one more transfer."""
    owner, reader = start(listen="127.0.0.1:0", max_transfers=2), start()  # one is for the event of the grant
    reader.link(address(owner)).result(LIMIT)
    kv, _ = allocate(owner), allocate(reader)
    running = owner.push(next_of(owner, PeerUp).peer["kv"][[0]], kv[[0]], layerwise=True)
    grant = owner.lend(kv[[1]], ttl=LIMIT)
    assert grant.revoke().done()
    assert grant.ended == "revoked"
    assert next_of(owner, GrantClosed).grant == grant
    running.cancel()


def test_renew(pair: Pair) -> None:
    """Of two grants, only the one that is not renewed ends. A renewal never shortens a grant."""
    _, theirs = pair.caches()
    kept, let_go = (pair.remote.lend(theirs[[block]], ttl=0.5) for block in (5, 6))
    kept.renew(3600.0)
    kept.renew(0.01)
    assert next_of(pair.remote, GrantClosed).grant == let_go
    assert kept.ended is None


@pytest.mark.parametrize("memory", ["of a pool", "registered"])
def test_freed_cache_ends_its_grants(pair: Pair, memory: str) -> None:
    mine, _ = pair.caches()
    arrays = [np.full((BLOCKS, ROW), 7, np.uint8) for _ in range(TENSORS)]
    lent = allocate(pair.remote, "lent") if memory == "of a pool" else pair.remote.register("lent", arrays)
    grant = pair.remote.lend(lent[[4]], ttl=LIMIT)
    pull = lambda: pair.local.pull(mine[[1]], pair.peer["lent"][[4]], grant=grant.token, last=False)  # noqa: E731
    pull().result(LIMIT)
    lent.free().result(LIMIT)
    event = next_of(pair.remote, GrantClosed)
    assert (event.grant, event.reason) == (grant, "released")
    allocate(pair.remote, "lent", seed=9)
    fails(GrantEnded, pull)


def test_two_readers(pair: Pair, start: Open) -> None:
    """The grant ends when both have finished. A reader that finishes twice counts once."""
    mine, theirs = pair.caches()
    third = start(name="third")
    other = allocate(third, seed=3)
    peer = third.link(address(pair.remote)).result(LIMIT)
    grant = pair.remote.lend(theirs[[4]], ttl=LIMIT, readers=2)
    for _ in range(2):
        pair.local.pull(mine[[1]], pair.peer["kv"][[4]], grant=grant.token).result(LIMIT)
    assert grant.ended is None
    third.pull(other[[1]], peer["kv"][[4]], grant=grant.token).result(LIMIT)
    assert next_of(pair.remote, GrantClosed).reason == "done"


def test_grants_of_pairs(pair: Pair) -> None:
    mine, theirs = pair.caches()
    first, second = (pair.remote.lend(theirs[[block]], ttl=LIMIT) for block in (4, 5))
    remote_kv, model = pair.peer["kv"], Model(mine)
    pairs = [(mine[[1]], remote_kv[[4]]), (mine[[2]], remote_kv[[5]]), (mine[[3]], remote_kv[[6]])]
    pair.local.pull(pairs, grant=[first.token, second.token, None], last=False).result(LIMIT)
    model.write([1, 2, 3], Model(theirs), [4, 5, 6]).check(mine)
    both = pair.remote.lend(theirs[[4, 5]], ttl=LIMIT)
    pair.local.pull(pairs[:2], grant=both.token).result(LIMIT)
    assert next_of(pair.remote, GrantClosed).grant == both
    second.revoke().result(LIMIT)
    error = fails(GrantEnded, lambda: pair.local.pull(pairs[:2], grant=[first.token, second.token]))
    assert error.facts["part"] == "1"
    assert first.ended is None, "no grant is reported as done unless all pairs are in place"
    for wrong in ([first.token], [first.token] * 3, []):
        refused("grant", lambda wrong=wrong: pair.local.pull(pairs[:2], grant=wrong))  # type: ignore[misc]


@pytest.mark.parametrize("token", [b"", b"x", bytes(47), bytes(49)])
def test_wrong_tokens(pair: Pair, token: bytes) -> None:
    mine, _ = pair.caches()
    refused("grant", lambda: pair.local.pull(mine[[1]], pair.peer["kv"][[4]], grant=token))


def test_wrong_arguments_of_lend(pair: Pair) -> None:
    mine, theirs = pair.caches()
    remote, rows = pair.remote, theirs[[4]]
    check_times(lambda time: remote.lend(rows, ttl=time), "ttl")
    grant = remote.lend(rows, ttl=LIMIT)
    check_times(grant.renew, "ttl")
    for time in (2**32, 1e300):
        refused("ttl", lambda time=time: remote.lend(rows, ttl=time))  # type: ignore[misc]
        refused("ttl", lambda time=time: grant.renew(time))  # type: ignore[misc]
    for readers in (0, -1, 4097):
        refused("readers", lambda readers=readers: remote.lend(rows, ttl=1.0, readers=readers), "1 to 4096")  # type: ignore[misc]
    refused("rows", lambda: remote.lend(theirs[[]], ttl=1.0))
    refused("rows", lambda: remote.lend(theirs[[BLOCKS]], ttl=1.0), str(BLOCKS))
    refused("rows", lambda: remote.lend(mine[[4]], ttl=1.0), "local")
    refused("rows", lambda: remote.lend(pair.back["kv"][[4]], ttl=1.0))
    refused("rows", lambda: remote.lend(rows.part(bytes=(0, 4)), ttl=1.0))
    wrong: list[Callable[[], Any]] = [
        lambda: remote.lend(theirs, ttl=1.0),  # type: ignore[arg-type]
        lambda: remote.lend(rows),  # type: ignore[call-arg]
        lambda: remote.lend(rows, 1.0),  # type: ignore[call-arg, misc]
        lambda: remote.lend(rows, ttl=1.0, readers=True),
        lambda: remote.lend(rows, ttl=1.0, readers=1.0),  # type: ignore[arg-type]
        lambda: remote.lend(rows, ttl=1.0, ttl_ms=5),  # type: ignore[call-arg]
    ]
    for call in wrong:
        with pytest.raises(TypeError):
            call()
    assert of(GrantClosed, remote.events()) == []


def test_grants_are_values(pair: Pair) -> None:
    _, theirs = pair.caches()
    grant, other = (pair.remote.lend(theirs[[4]], ttl=LIMIT) for _ in range(2))
    token = grant.token
    assert grant != other
    assert token != other.token
    other.revoke()
    assert next_of(pair.remote, GrantClosed).grant == other
    held = {grant: "kept"}
    del other
    gc.collect()
    mine = pair.local.allocate("mine", blocks=2, tensors=4, shape=(96,), dtype="uint8")
    pair.local.pull(mine[[0]], pair.peer["kv"][[4]], grant=token).result(LIMIT)
    assert held[next_of(pair.remote, GrantClosed).grant] == "kept"


def test_message_and_end_of_a_grant(pair: Pair) -> None:
    """When the owner gets the message, the end of the grant has been counted."""
    mine, theirs = pair.caches()
    grant = pair.remote.lend(theirs[[4]], ttl=LIMIT)
    pair.local.pull(mine[[1]], pair.peer["kv"][[4]], grant=grant.token, notify=b"done").result(LIMIT)
    assert messages(pair.remote, 1) == [b"done"]
    assert grant.ended == "done"


def test_late_pull_never_takes_reused_blocks(start: Open, begin_remote: Callable[..., Remote], carried_by: str) -> None:
    """The owner revokes and paints while a reader pulls. Each pull has the old bytes everywhere, or `GrantEnded`."""
    reader, owner = start(transport=carried_by), begin_remote(transport=carried_by)
    local = reader.register("local", [np.zeros((8, 4096), np.uint8) for _ in range(2)])

    def do(*lines: str) -> Any:
        """Run code at the owner. Return the value of the last line."""
        return owner.do("\n".join(lines))

    do("kv = engine.allocate('kv', blocks=8, tensors=2, shape=(4096,), dtype='uint8')")
    peer = reader.link(owner.address).result(LIMIT)
    paint, revoke = "for t in kv.tensors: t.numpy()[:] = {}", "grant.revoke()"
    for number in range(40):
        token = do(paint.format(number), "grant = engine.lend(kv[:], ttl=60.0)", "grant.token")
        pull = reader.pull(local[:], peer["kv"][0:8], grant=token, last=False)
        if number % 8 == 0:
            pull.result(LIMIT)  # these pulls succeed
        painting = threading.Thread(target=do, args=(revoke, paint.format(255), "grant.ended"))
        painting.start()
        try:
            pull.result(LIMIT)
            assert {value for tensor in contents(local) for value in tensor} == {number}
        except GrantEnded:
            assert number % 8
        painting.join(LIMIT)
        assert do("grant.ended") == "revoked"


def test_many_grants_end_with_their_events(pair: Pair) -> None:
    _, theirs = pair.caches()
    grants = [pair.remote.lend(theirs[[number % BLOCKS]], ttl=0.05) for number in range(2000)]
    seen = of(GrantClosed, gather(pair.remote, lambda seen: len(of(GrantClosed, seen)) >= 2000))
    assert {event.grant for event in seen} == set(grants)
    assert {event.reason for event in seen} == {"expired"}


def test_pull_under_a_large_grant_asks_once_what_it_lends(pair: Pair, carried_by: str) -> None:
    """The description of 4,200 ranges is not kept, so each pull asks for it."""
    shape: dict[str, Any] = {"tensors": 1, "shape": (64,), "dtype": "uint8"}
    few, many = pair.local.allocate("few", blocks=4, **shape), pair.remote.allocate("many", blocks=8400, **shape)
    token = pair.remote.lend(many[:8400:2], ttl=LIMIT).token
    pull = lambda: pair.local.pull(few[[0]], pair.peer["many"][[8398]], grant=token, last=False).result(LIMIT)  # noqa: E731
    pull()
    before = pair.local.stats()["links"][0]["requests"]["calls"]
    pull()
    # Over TCP the owner is also asked for the bytes.
    asked = pair.local.stats()["links"][0]["requests"]["calls"] - before
    assert asked == (2 if carried_by == "tcp" else 1)


def test_grant_gives_no_access(pair: Pair) -> None:
    mine, _ = pair.caches()
    hidden = pair.remote.register("hidden", [np.zeros((4, 96), np.uint8) for _ in range(4)], shared=False)
    token = pair.remote.lend(hidden[[1]], ttl=LIMIT).token
    fails(NotFound, lambda: pair.local.pull(mine[[0]], pair.peer["hidden"][[1]], grant=token))


def test_grants_end_in_the_order_of_their_time(pair: Pair) -> None:
    _, theirs = pair.caches()
    late, early, never = (pair.remote.lend(theirs[[0]], ttl=ttl) for ttl in (0.4, 0.05, 3600.0))
    seen = of(GrantClosed, gather(pair.remote, lambda seen: len(of(GrantClosed, seen)) == 2))
    assert [(event.grant, event.reason) for event in seen] == [(early, "expired"), (late, "expired")]
    assert never.ended is None


def test_number_of_grants_is_limited(engine: Engine) -> None:
    """Ends that nobody has taken count."""
    cache = allocate(engine)
    for _ in range(2):
        grants = [engine.lend(cache[[0]], ttl=3600.0) for _ in range(65_536)]
        error = fails(Busy, lambda: engine.lend(cache[[0]], ttl=3600.0))
        assert "65536" in str(error)
        for grant in grants:
            grant.revoke().result(LIMIT)
        fails(Busy, lambda: engine.lend(cache[[0]], ttl=3600.0))
        assert len({grant.token for grant in grants}) == len(of(GrantClosed, engine.events(65_536))) == 65_536
    engine.lend(cache[[0]], ttl=1.0)


def test_reader_that_dies_has_not_finished(start: Open, begin_remote: Callable[..., Remote], carried_by: str) -> None:
    owner, reader = start(listen="127.0.0.1:0", transport=carried_by), start(transport=carried_by)
    kv, mine = allocate(owner), allocate(reader)
    grant, other = owner.lend(kv[[1]], ttl=LIMIT, readers=2), begin_remote(transport=carried_by)
    other.do("kv = allocate(engine)")
    other.do(f"peer = engine.link({owner.address!r}).result(LIMIT)")
    token = {"grant": grant.token}
    other.do(f"engine.pull(kv[[0]], peer['kv'][[1]], grant={grant.token!r}, last=False).result(LIMIT)")
    other.kill()
    peer = reader.link(address(owner)).result(LIMIT)
    reader.pull(mine[[0]], peer["kv"][[1]], **token).result(LIMIT)
    next_of(owner, PeerDown)
    assert grant.ended is None


def test_owner_that_stops_or_dies(start: Open, remote: Remote) -> None:
    """The generation is in memory that the reader maps, so a stopped owner does not hold up its check."""
    local = start(silence=600.0)
    mine, peer = allocate(local), local.link(remote.address).result(LIMIT)
    ended, lasting = remote.do("grants = [engine.lend(kv[[1]], ttl=60.0) for _ in range(2)]; [g.token for g in grants]")
    for token in (ended, lasting):
        local.pull(mine[[0]], peer["kv"][[1]], grant=token, last=False).result(LIMIT)
    remote.do("grants[0].revoke().result(LIMIT)")
    with remote.stopped():
        fails(GrantEnded, lambda: local.pull(mine[[0]], peer["kv"][[1]], grant=ended))
    remote.kill()
    next_of(local, PeerDown)
    fails(PeerLost, lambda: local.pull(mine[[0]], peer["kv"][[1]], grant=lasting))


def outcome(transfer: Transfer[None]) -> Timeout | None:
    """Return how late a transfer was."""
    try:
        transfer.result(LIMIT)
    except Timeout as late:
        return late
    return None


def test_no_block_counts_as_arrived_if_the_grant_may_have_ended(
    start: Open, begin_remote: Callable[..., Remote]
) -> None:
    """The owner stops in the middle of a pull over TCP. What came before the time limit proves nothing of the grant."""
    options: dict[str, Any] = {"pool": "40MiB", "transport": "tcp", "silence": 600.0}
    shape: dict[str, Any] = {"blocks": 16, "tensors": 1, "shape": (2 << 20,), "dtype": "uint8"}
    local, remote = start(**options), begin_remote(**options)
    mine = local.allocate("kv", **shape)
    remote.do(f"kv = engine.allocate('kv', **{shape!r})")
    token = remote.do("engine.lend(kv[:], ttl=60.0).token")
    remote_kv = local.link(remote.address).result(LIMIT)["kv"][:16]
    for _ in range(3):
        pull = local.pull(mine[:], remote_kv, grant=token, last=False, timeout=0.5)
        with remote.stopped():
            ended = outcome(pull)
        assert ended is None or ended.arrived == [], ended
