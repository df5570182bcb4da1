"""Grants: pulls that name one succeed while it lasts, and fail after its end, whatever ended it.

That a late reader never takes what was reused for what it asked for is proved by painting: the owner writes another
value into the blocks as soon as it has ended the grant, and every pull that succeeded must have the old value
everywhere. The hostile side is in `test_hostile_grants.py`.
"""

from __future__ import annotations

import os
import pickle
from typing import Any, Callable

import pytest

from llm_datadist import LLMException
from llm_datadist.events import Grant, GrantEnded
from peers import INVALID, LIMIT, OK, UNLINKED, End, Ends, Peer, by_blocks, by_slot, eventually, linked, options
from peers.values import cache_key as key
from peers.values import code

ENDED = "LLM_GRANT_ENDED"
LIMIT_MS = int(LIMIT * 1000)
BLOCK = 4096


def refused(expected: str, call: Callable[[], Any]) -> LLMException:
    with pytest.raises(LLMException) as caught:
        call()
    assert caught.value.status_code.name == expected, caught.value
    return caught.value


def lent(pair: tuple[End, Peer]) -> tuple[End, Peer]:
    """The peer has a blocks cache `far` of 32 blocks, and this end one of the same size. Both poll."""
    near, far = pair
    near.allocate("near", 32, BLOCK, blocks=True, seed=1)
    far.allocate("far", 32, BLOCK, blocks=True, keys=[by_blocks(0)], seed=2)
    assert (near.grant_ends(), far.grant_ends()) == ([], [])
    return near, far


def pull(near: End, token: bytes, src: list[int], dst: list[int], **given: Any) -> None:
    near.manager.pull_blocks(key(by_blocks(2)), near.held["near"].handle, src, dst, grant=token, **given)


def ends_of(far: Peer, count: int = 1) -> list[tuple[bytes, str]]:
    got: list[tuple[bytes, str]] = []

    def enough() -> bool:
        got.extend(far.grant_ends())
        return len(got) >= count

    eventually(enough)
    return got


def test_a_pull_under_a_grant_moves_the_bytes(served: tuple[End, Peer]) -> None:
    near, far = lent(served)
    token = far.grant("far", [9, 4, 5, 4])
    expected = near.read("near")
    for ours, theirs in zip(expected, far.read("far")):
        ours[[0, 7]], ours[3] = theirs[[5, 9]], theirs[4]
    pull(near, token, [5, 9], [0, 7])
    pull(near, token, [4], [3], grant_done=True)
    for ours, theirs in zip(near.read("near"), expected):
        assert (ours == theirs).all()
    assert ends_of(far) == [(token, "done")]
    assert far.grant_ended(token) == "done"
    refused(ENDED, lambda: pull(near, token, [5], [0]))


def test_only_the_blocks_of_the_grant_can_be_pulled(served: tuple[End, Peer]) -> None:
    near, far = lent(served)
    token = far.grant("far", [4, 5, 6, 9])
    before = near.read("near")
    for src, missing in (([5, 7], 7), ([3], 3), ([10], 10), ([4, 5, 6, 8, 9], 8)):
        error = refused(INVALID, lambda src=src: pull(near, token, src, list(range(len(src)))))  # type: ignore[misc]
        assert f"block {missing} is not among the blocks of the grant" in str(error)
    for ours, theirs in zip(near.read("near"), before):
        assert (ours == theirs).all(), "nothing has moved"
    far.allocate("other", 32, BLOCK, blocks=True, keys=[by_blocks(0, 1)], seed=3)
    other = key(by_blocks(2, 1))
    near_handle = near.held["near"].handle
    error = refused(INVALID, lambda: near.manager.pull_blocks(other, near_handle, [4], [0], grant=token))
    assert "the grant is for cache" in str(error)
    pull(near, token, [4, 5, 6, 9], [0, 1, 2, 3])


def test_the_key_must_name_the_cache_of_the_grant_at_each_pull(served: tuple[End, Peer]) -> None:
    near, far = lent(served)
    far.register("own", 8, BLOCK, blocks=True, keys=[by_blocks(0, 1)], seed=4)
    token = far.grant("own", [3])
    handle, own = near.held["near"].handle, key(by_blocks(2, 1))
    for _ in range(2):
        near.manager.pull_blocks(own, handle, [3], [0], grant=token)
    far.register("other", 8, BLOCK, blocks=True, keys=[by_blocks(0, 1)], seed=5)
    before = near.read("near")
    for _ in range(2):
        error = refused(INVALID, lambda: near.manager.pull_blocks(own, handle, [3], [1], grant=token))
        assert "the grant is for cache" in str(error)
        for ours, theirs in zip(near.read("near"), before):
            assert (ours == theirs).all(), "nothing has moved"
    other = far.grant("other", [3])
    near.manager.pull_blocks(own, handle, [3], [0], grant=other)
    assert (near.read("near")[0][0] == far.read("other")[0][3]).all()
    far.unregister("other")
    error = refused("LLM_KV_CACHE_NOT_EXIST", lambda: near.manager.pull_blocks(own, handle, [3], [1], grant=token))
    assert "blocks of model 1" in str(error)


def test_a_released_cache_has_ended_its_grants_whatever_its_key_names_now(served: tuple[End, Peer]) -> None:
    near, far = lent(served)
    far.register("own", 8, BLOCK, blocks=True, keys=[by_blocks(0, 1)], seed=4)
    token = far.grant("own", [3])
    handle, own = near.held["near"].handle, key(by_blocks(2, 1))
    near.manager.pull_blocks(own, handle, [3], [0], grant=token)
    far.register("other", 8, BLOCK, blocks=True, keys=[by_blocks(0, 1)], seed=5)
    far.unregister("own")
    near.manager.pull_blocks(own, handle, [3], [0])  # this end learns what the key names now
    refused(ENDED, lambda: near.manager.pull_blocks(own, handle, [3], [0], grant=token))


def test_a_pull_under_a_large_grant_asks_once_what_it_lends(served: tuple[End, Peer], transport: str) -> None:
    """The description of 4,200 ranges is not kept, so each pull asks for it."""
    near, far = lent(served)
    near.allocate("few", 4, 64, 1, blocks=True)
    far.allocate("many", 8400, 64, 1, blocks=True, keys=[by_blocks(0, 1)], seed=6)
    token = far.grant("many", list(range(0, 8400, 2)))
    handle, many = near.held["few"].handle, key(by_blocks(2, 1))
    near.manager.pull_blocks(many, handle, [8398], [0], grant=token)
    before = near.links()[0]["requests"]["calls"]
    near.manager.pull_blocks(many, handle, [8398], [1], grant=token)
    # Over TCP the owner is also asked for the bytes.
    assert near.links()[0]["requests"]["calls"] - before == (2 if transport == "tcp" else 1)
    assert (near.read("few")[0][1] == far.read("many")[0][8398]).all()


@pytest.mark.parametrize("how", ["revoked", "expired", "released", "done"])
def test_after_the_end_every_pull_fails(served: tuple[End, Peer], how: str) -> None:
    near, far = lent(served)
    token = far.grant("far", [1, 2], 300 if how == "expired" else 60_000)
    if how != "expired":
        pull(near, token, [1], [0])
    if how == "revoked":
        far.revoke(token)
        far.revoke(token)
    elif how == "released":
        far.deallocate("far")
    elif how == "done":
        near.dist.release_grant(token)
    assert ends_of(far) == [(token, how)]
    assert far.grant_ended(token) == how
    error = refused(ENDED, lambda: pull(near, token, [2], [0]))
    assert "cluster=2" in str(error)
    transfer = near.manager.pull_blocks_async(key(by_blocks(2)), near.held["near"].handle, [2], [0], grant=token)
    failure = transfer.exception(LIMIT_MS)
    assert isinstance(failure, LLMException)
    assert failure.status_code.name == ENDED
    near.dist.release_grant(token)  # changes nothing
    assert (far.grant_ended(token), far.grant_ends()) == (how, []), "one event for each grant"


def test_registered_memory_is_lent_until_it_is_unregistered(served: tuple[End, Peer]) -> None:
    near, far = lent(served)
    far.register("own", 8, BLOCK, blocks=True, keys=[by_blocks(0, 1)], seed=4)
    token = far.grant("own", [3])
    handle, own = near.held["near"].handle, key(by_blocks(2, 1))
    near.manager.pull_blocks(own, handle, [3], [0], grant=token)
    assert (near.read("near")[0][0] == far.read("own")[0][3]).all()
    far.unregister("own")
    assert ends_of(far) == [(token, "released")]
    refused(ENDED, lambda: near.manager.pull_blocks(own, handle, [3], [0], grant=token))


def test_each_reader_counts_once(ends: Ends, transport: str) -> None:
    near, far = lent(ends.pair(llm__LinkTransport=transport))
    other = ends.peer(options(llm__LinkTransport=transport), 3, "DECODER")
    linked(other, far)
    token = far.grant("far", [1], readers=2)
    for _ in range(3):
        near.dist.release_grant(token)
        pull(near, token, [1], [0], grant_done=True)
    assert far.grant_ended(token) is None
    other.release_grant(token)
    assert ends_of(far) == [(token, "done")]
    refused(ENDED, lambda: pull(near, token, [1], [0]))


def test_a_reader_that_dies_has_not_reported(ends: Ends) -> None:
    near, far = lent(ends.pair())
    other = ends.peer(options(), 3, "DECODER")
    linked(other, far)
    token = far.grant("far", [1], readers=2)
    near.dist.release_grant(token)
    other.kill()
    eventually(lambda: len(far.links()) == 1)
    assert far.grant_ended(token) is None
    pull(near, token, [1], [0])


def test_a_restarted_owner_has_ended_its_grants(ends: Ends, transport: str) -> None:
    settings = options(llm__LinkTransport=transport)
    near, far = lent(ends.pair(llm__LinkTransport=transport))
    token = far.grant("far", [1])
    far.finalize()
    far.open(settings)
    eventually(lambda: not near.links())
    linked(near, far)
    far.allocate("far", 32, BLOCK, blocks=True, keys=[by_blocks(0)], seed=2)
    new = far.grant("far", [1])
    error = refused(ENDED, lambda: pull(near, token, [1], [0]))
    assert "restarted" in str(error)
    refused(ENDED, lambda: near.dist.release_grant(token))
    pull(near, new, [1], [0])


@pytest.mark.parametrize("placed", ["pool", "registered"])
def test_no_pull_succeeds_with_what_was_written_after_the_end(served: tuple[End, Peer], placed: str) -> None:
    """Pulls run while the owner revokes and repaints. Each has the old value everywhere, or fails."""
    near, far = served
    make = far.allocate if placed == "pool" else far.register
    make("far", 16, 32 << 10, 1, blocks=True, keys=[by_blocks(0)])
    near.allocate("near", 32, 32 << 10, 1, blocks=True)
    handle = near.held["near"].handle
    blocks, succeeded, failed = list(range(16)), 0, 0
    for round_ in range(60):
        old = round_ % 200
        far.paint("far", old)
        token = far.grant("far", blocks)
        calls = [
            near.manager.pull_blocks_async(
                key(by_blocks(2)), handle, blocks, [16 * half + block for block in blocks], grant=token
            )
            for half in (0, 1)
        ]
        painting = far.begin("revoke_and_paint", token, "far", old + 1)
        for half, call in enumerate(calls):
            failure = call.exception(LIMIT_MS)
            if failure is None:
                succeeded += 1
                assert (near.read("near")[0][16 * half : 16 * half + 16] == old).all()
            else:
                failed += 1
                assert isinstance(failure, LLMException)
                assert failure.status_code.name == ENDED, failure
        painting.result()
    assert succeeded + failed == 120


def test_a_stopped_owner_cannot_be_read_past_its_end(ends: Ends) -> None:
    """The generation is in memory that the reader maps, so a stopped owner does not hold up its check."""
    near, far = lent(ends.pair(llm__SyncKvCacheWaitTime=3000))
    token = far.grant("far", [1])
    pull(near, token, [1], [0])
    far.revoke(token)
    with far.stopped():
        refused(ENDED, lambda: pull(near, token, [1], [0]))


def test_a_revocation_waits_for_a_read_that_the_owner_serves(ends: Ends) -> None:
    """Over sockets the owner sends the bytes itself. A reader that is stopped holds `revoke` up to its time limit."""
    settings = {"llm__LinkTransport": "tcp", "llm__SyncKvCacheWaitTime": 500}
    far = ends.peer(options(pool=64 << 20, **settings), 3, "DECODER")
    near = ends.near(options(pool=64 << 20, listen="127.0.0.1:0", **settings))
    linked(far, peer_of(near))
    far.allocate("into", 16, 2 << 20, 1, blocks=True)
    near.allocate("from", 16, 2 << 20, 1, blocks=True, keys=[by_blocks(0)], seed=2)
    token = near.grant("from", list(range(16)))
    pulling = far.begin("pull_blocks", by_blocks(1), "into", list(range(16)), list(range(16)), grant=token)
    far.stop()
    # Whether the read had begun is left to chance (`test_hostile_grants` leaves nothing to it).
    assert code(near.revoke, token) in {OK, "LLM_TIMEOUT"}
    assert near.grant_ended(token) == "revoked"
    far.go_on()
    # If the far side was stopped late, its pull had ended before.
    assert code(pulling.result) in {OK, ENDED, "LLM_TIMEOUT", UNLINKED}


def peer_of(end: End) -> Any:
    """What `linked` needs of an end that listens in this process."""

    class Listening:
        at = (1, end.listening())

    return Listening()


def test_a_group_pulls_under_grants(served: tuple[End, Peer]) -> None:
    near, far = lent(served)
    far.allocate("window", 8, BLOCK, 1, blocks=True, keys=[by_blocks(0, 1)], seed=5)
    near.allocate("window", 8, BLOCK, 1, blocks=True)
    full, window = far.grant("far", [1, 2]), far.grant("window", [3])

    def parts(first: bytes | None, second: bytes | None) -> list[Any]:
        return [
            (key(by_blocks(2)), near.held["near"].handle, [1, 2], [0, 1], first),
            (key(by_blocks(2, 1)), near.held["window"].handle, [3], [0], second),
        ]

    near.manager.pull_group(parts(full, None))
    near.manager.pull_group(parts(full, window), grants_done=True)
    assert sorted(ends_of(far, 2)) == sorted([(full, "done"), (window, "done")])
    again = far.grant("far", [1, 2])
    error = refused(ENDED, lambda: near.manager.pull_group(parts(again, window), grants_done=True))
    assert "part=1" in str(error)
    assert far.grant_ended(again) is None, "no part is reported unless all are in place"


def test_a_grant_of_several_parts_is_reported_once(served: tuple[End, Peer]) -> None:
    near, far = lent(served)
    token = far.grant("far", [1, 2])
    parts = [(key(by_blocks(2)), near.held["near"].handle, [block], [block], token) for block in (1, 2)]
    near.manager.pull_group(parts, grants_done=True)
    assert ends_of(far) == [(token, "done")]


def test_no_row_counts_as_arrived_if_the_grant_may_have_ended_before(ends: Ends) -> None:
    """The owner stops in the middle of a pull over TCP. What came before the time limit proves nothing of the grant."""
    near, far = ends.pair(pool=64 << 20, llm__LinkTransport="tcp", llm__SyncKvCacheWaitTime=1000)
    near.allocate("near", 16, 2 << 20, 1, blocks=True)
    far.allocate("far", 16, 2 << 20, 1, blocks=True, keys=[by_blocks(0)])
    token = far.grant("far", list(range(16)))
    for _ in range(5):
        call = near.manager.pull_blocks_async(
            key(by_blocks(2)), near.held["near"].handle, list(range(16)), list(range(16)), grant=token
        )
        with far.stopped():
            failure = call.exception(LIMIT_MS)
        assert failure is None or failure.arrived == [], failure


def test_tokens_are_not_logged(served: tuple[End, Peer], caplog: pytest.LogCaptureFixture) -> None:
    near, far = lent(served)
    token = far.grant("far", [1])
    part = (key(by_blocks(2)), near.held["near"].handle, [1], [0], token)
    with caplog.at_level("INFO", logger="LLM_DATADIST"):
        pull(near, token, [1], [0])
        near.manager.pull_blocks_async(*part[:4], grant=token).result(LIMIT_MS)
        near.manager.pull_group([part])
    assert caplog.text.count("<token of a grant>") == 3
    assert repr(token[32:40])[2:-1] not in caplog.text


def test_a_notification_and_a_report_in_one_pull(served: tuple[End, Peer]) -> None:
    near, far = lent(served)
    token = far.grant("far", [1])
    pull(near, token, [1], [0], grant_done=True, notify=b"taken")
    assert far.grant_ended(token) == "done"
    got: list[tuple[int, bytes]] = []
    eventually(lambda: got.extend(far.polled()) or got)
    assert got == [(1, b"taken")]


def test_grants_give_no_access(ends: Ends) -> None:
    near, far = ends.pair(accessible=True)
    near.allocate("near", 4, BLOCK, blocks=True)
    far.register("hidden", 4, BLOCK, blocks=True, keys=[by_blocks(0)], accessible=False)
    token = far.grant("hidden", [1])
    error = refused(INVALID, lambda: pull(near, token, [1], [0]))
    assert "accessible" in str(error)


def test_objects_of_grants(ends: Ends) -> None:
    near = ends.near()
    near.allocate("a", 4, BLOCK, blocks=True, keys=[by_blocks(0)])
    handle = near.held["a"].handle
    assert near.dist.poll() == []
    first, second = near.manager.grant(handle, (0,)), near.manager.grant(handle, [1, 2], ttl_ms=5000, readers=2)
    assert (type(first), type(first.token), len(first.token)) == (Grant, bytes, 48)
    assert first.token != second.token
    assert first != second
    assert (first.ended, repr(first)) == (None, f"Grant(cache_id={handle.cache_id}, ended=None)")
    assert first.token[-16:].hex() not in repr(first), "the secret is not shown"
    with pytest.raises(TypeError):
        second.revoke(wait=1)  # type: ignore[arg-type]
    second.revoke()
    first.revoke(wait=False)
    one, two = near.dist.poll()
    assert (type(one), one.__match_args__) == (GrantEnded, ("grant", "reason"))
    assert (one.grant, one.reason, two.grant, two.reason) == (second, "revoked", first, "revoked")
    assert len({one.grant, second, two.grant, first}) == 2
    assert (one.grant.ended, repr(one)) == ("revoked", f"GrantEnded({second!r}, 'revoked')")
    with pytest.raises(TypeError):
        pickle.dumps(first)


def test_bad_arguments_change_nothing(served: tuple[End, Peer]) -> None:
    near, far = lent(served)
    near.allocate("slots", 2, BLOCK)
    grant, handle = near.manager.grant, near.held["near"].handle
    for blocks in ([], [32], [-1], [0, 1 << 40]):
        refused(INVALID, lambda blocks=blocks: grant(handle, blocks))  # type: ignore[misc]
    for given in ({"ttl_ms": 0}, {"readers": 0}, {"readers": 4097}):
        error = refused(INVALID, lambda given=given: grant(handle, [0], **given))  # type: ignore[misc]
        assert next(iter(given)) in str(error)
    refused(INVALID, lambda: grant(near.held["slots"].handle, [0]))
    for wrong in ("x", 3, None, range(2), b"\x00"):
        with pytest.raises(TypeError):
            grant(handle, wrong)
    for given in ({"ttl_ms": "x"}, {"ttl_ms": True}, {"readers": 1.0}):
        with pytest.raises(TypeError):
            grant(handle, [0], **given)
    for given in ({"ttl_ms": -1}, {"ttl_ms": 1 << 32}, {"readers": -1}):
        with pytest.raises(ValueError, match=next(iter(given))):
            grant(handle, [0], **given)
    token = far.grant("far", [1])
    for bad in (b"", b"x" * 48, token[:-1], token + b"x", b"LDG\x02" + token[4:]):
        refused(INVALID, lambda bad=bad: pull(near, bad, [1], [0]))  # type: ignore[misc]
        refused(INVALID, lambda bad=bad: near.dist.release_grant(bad))  # type: ignore[misc]
    for wrong in ("x", 3, bytearray(token)):
        with pytest.raises(TypeError):
            pull(near, wrong, [1], [0])  # type: ignore[arg-type]
    refused(INVALID, lambda: near.manager.pull_blocks(key(by_blocks(2)), handle, [1], [0], grant_done=True))
    with pytest.raises(TypeError):
        pull(near, token, [1], [0], grant_done=1)
    with pytest.raises(TypeError, match=r"pull_cache\(\) takes no grant: grants are for blocks"):
        near.manager.pull_cache(key(by_slot(2, 1)), near.held["slots"].handle, grant=token)
    own = grant(handle, [0]).token
    refused(INVALID, lambda: near.dist.release_grant(own))
    stranger = token[:4] + (9).to_bytes(8, "little") + token[12:]
    refused(INVALID, lambda: pull(near, stranger, [1], [0]))
    refused(UNLINKED, lambda: near.dist.release_grant(stranger))
    near.manager.pull_blocks(key(by_blocks(2)), handle, [1], [0], grant=None)
    pull(near, token, [1], [0])
    assert near.grant_ends() == far.grant_ends() == []


def test_the_number_of_grants_is_limited(ends: Ends) -> None:
    """The limit counts ends that nobody has polled; a program that never polls does not run into it."""
    near = ends.near()
    near.allocate("a", 4, BLOCK, blocks=True, keys=[by_blocks(0)])
    handle = near.held["a"].handle
    grants = [near.manager.grant(handle, [0], 3_600_000) for _ in range(65_536)]
    error = refused("LLM_LINK_BUSY", lambda: near.manager.grant(handle, [0]))
    assert "65536" in str(error)
    for grant in grants:
        grant.revoke()
    assert len({grant.token for grant in grants}) == 65_536
    grants = [near.manager.grant(handle, [0], 3_600_000) for _ in range(65_536)]
    near.dist.poll()
    for grant in grants:
        grant.revoke()
    refused("LLM_LINK_BUSY", lambda: near.manager.grant(handle, [0]))
    assert len(near.dist.poll(65_536)) == 65_536
    near.manager.grant(handle, [0])


def test_grants_end_in_the_order_of_their_time(ends: Ends) -> None:
    near = ends.near()
    near.allocate("a", 4, BLOCK, blocks=True, keys=[by_blocks(0)])
    handle, got = near.held["a"].handle, []
    assert near.dist.poll() == []
    late, early, never = (near.manager.grant(handle, [0], ttl) for ttl in (3000, 150, 3_600_000))
    eventually(lambda: got.extend(near.dist.poll()) or len(got) >= 2)
    assert [(event.grant, event.reason) for event in got] == [(early, "expired"), (late, "expired")]
    assert never.ended is None


def test_a_forked_child_is_refused(ends: Ends) -> None:
    near = ends.near()
    near.allocate("a", 4, BLOCK, blocks=True, keys=[by_blocks(0)])
    grant = near.manager.grant(near.held["a"].handle, [0])
    child = os.fork()
    if child == 0:
        status = 1
        try:
            refused("LLM_FAILED", grant.revoke)
            refused("LLM_FAILED", lambda: near.manager.grant(near.held["a"].handle, [0]))
            status = 0
        finally:
            os._exit(status)
    assert os.waitpid(child, 0)[1] == 0
    assert grant.ended is None


def test_grants_after_finalize(ends: Ends) -> None:
    near = ends.near()
    near.allocate("a", 4, BLOCK, blocks=True, keys=[by_blocks(0)])
    manager, handle = near.manager, near.held["a"].handle
    grant = manager.grant(handle, [0])
    near.finalize()
    assert grant.ended == "released"
    refused("LLM_ENGINE_FINALIZED", grant.revoke)
    refused("LLM_ENGINE_FINALIZED", lambda: manager.grant(handle, [0]))


def test_a_killed_owner_ends_the_pull(ends: Ends, transport: str) -> None:
    near, far = lent(ends.pair(llm__LinkTransport=transport, llm__SyncKvCacheWaitTime=3000))
    token = far.grant("far", [1])
    pull(near, token, [1], [0])
    far.kill()
    eventually(lambda: not near.links())
    refused(UNLINKED, lambda: pull(near, token, [1], [0]))
