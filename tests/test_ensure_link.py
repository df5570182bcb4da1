"""Links on demand: `ensure_link`, its outcomes and events, and the metadata of peers.

Which connection is kept when both sides dial is in `links/ensure_link.rs` of the core's tests. Hostile peers are in
`test_hostile_links.py`.
"""

from __future__ import annotations

import asyncio
import os
import socket
import time
from contextlib import ExitStack, closing
from typing import Any, Callable

import pytest

from llm_datadist import LLMDataDist, LLMException, LLMRole
from llm_datadist.events import Completed, LinkDown, LinkUp, Transfer
from llm_datadist.events import Peer as PeerHandle
from peers import (
    INVALID,
    LIMIT,
    OK,
    TIMEOUT,
    End,
    Ends,
    Peer,
    Stranger,
    check_pull,
    eventually,
    kv_options,
    options,
    refusing_port,
)

LIMIT_MS = int(LIMIT * 1000)
LINKED = "LLM_ALREADY_LINK"
FINALIZED = "LLM_ENGINE_FINALIZED"


def ensure(near: End, address: str, **given: Any) -> PeerHandle:
    """Link on demand, and return the peer."""
    peer = near.dist.ensure_link(address, **{"timeout_ms": LIMIT_MS, **given}).result(LIMIT_MS)
    assert isinstance(peer, PeerHandle)
    return peer


def code(call: Transfer) -> str:
    error = call.exception(LIMIT_MS)
    assert error is not None, "the call succeeded"
    return error.status_code.name


def refused(expected: str, call: Callable[[], Any]) -> str:
    with pytest.raises(LLMException) as caught:
        call()
    assert caught.value.status_code.name == expected, caught.value
    return str(caught.value)


def nowhere() -> str:
    """An address at which nobody listens."""
    return f"127.0.0.1:{refusing_port()}"


@pytest.fixture
def apart(ends: Ends, transport: str) -> tuple[End, Peer]:
    """Clusters 1, here, and 2, a peer, that both listen and are not linked."""
    given = options(llm__LinkTransport=transport, listen="127.0.0.1:0")
    return ends.near(given), ends.peer(given)


def test_a_link_is_made_and_found_again(apart: tuple[End, Peer]) -> None:
    near, far = apart
    assert near.dist.poll() == []
    peer = ensure(near, far.address)
    assert near.dist.peers() == [peer]
    assert (peer.cluster_id, peer.address, peer.metadata) == (2, far.address, b"")
    assert ensure(near, far.address, cluster_id=2) == peer
    assert far.ensure_links([near.dist.listen_ip_info]) == [OK]
    assert [cluster for cluster, _, _ in far.peers()] == [1]
    (event,) = near.dist.poll()
    assert isinstance(event, LinkUp), "outcomes that were taken are no events"
    assert event.peer == peer
    assert near.link_clusters([far.at]) == (LINKED, [LINKED])
    assert far.link_clusters([(1, near.dist.listen_ip_info)]) == (LINKED, [LINKED])
    check_pull(near, far)
    assert far.unlink_clusters([(1, near.dist.listen_ip_info)], 3000) == (OK, [OK])
    eventually(lambda: not near.dist.peers())
    (event,) = near.dist.poll()
    assert isinstance(event, LinkDown)


def test_the_outcome_is_an_event(apart: tuple[End, Peer]) -> None:
    near, far = apart
    call = near.dist.ensure_link(far.address)
    events: list[Any] = []

    def completed() -> bool:
        events.extend(event for event in near.dist.poll() if isinstance(event, Completed))
        return bool(events)

    eventually(completed)
    assert [event.transfer for event in events] == [call]
    assert (call.done(), call.cancel(), call.cancelled(), call.bytes) == (True, False, False, 0)
    assert call.result() == near.dist.peers()[0]
    assert call.exception() is None
    assert "Peer(cluster_id=2" in repr(call)


def test_await_returns_the_peer(apart: tuple[End, Peer]) -> None:
    near, far = apart

    async def work() -> tuple[Any, Any]:
        failing = near.dist.ensure_link(nowhere(), timeout_ms=50)
        peers = await asyncio.gather(*(near.dist.ensure_link(far.address, timeout_ms=LIMIT_MS) for _ in range(3)))
        with pytest.raises(LLMException) as caught:
            await failing
        return peers, caught.value

    peers, error = asyncio.run(work())
    assert peers == [near.dist.peers()[0]] * 3
    assert error.status_code.name == TIMEOUT


def test_metadata_goes_both_ways(apart: tuple[End, Peer]) -> None:
    near, far = apart
    near.dist.poll()
    far.set_metadata(bytes(range(256)) * 64)
    near.dist.set_metadata(bytearray(b"near"))
    assert ensure(near, far.address).metadata == bytes(range(256)) * 64
    assert [metadata for _, _, metadata in far.peers()] == [b"near"]
    (event,) = near.dist.poll()
    assert event.peer.metadata == bytes(range(256)) * 64
    assert near.unlink_clusters([far.at], 3000) == (OK, [OK])
    eventually(lambda: not far.links())
    near.dist.poll()
    ensure(near, far.address, metadata=b"")
    assert [metadata for _, _, metadata in far.peers()] == [b""]
    assert near.unlink_clusters([far.at], 3000) == (OK, [OK])
    eventually(lambda: not far.links())
    # `link_clusters` exchanges it too.
    assert near.link_clusters([far.at]) == (OK, [OK])
    assert [metadata for _, _, metadata in far.peers()] == [b"near"]
    assert "metadata=<16384 bytes>" in repr(near.dist.peers()[0])


def test_the_deadline_counts_from_the_call(ends: Ends) -> None:
    """More calls than there are workers: those that wait for one end at their deadline as well."""
    near, far = ends.pair()
    with closing(socket.create_server(("127.0.0.1", 0), backlog=128)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        calls = [near.dist.ensure_link(address, cluster_id=7, timeout_ms=400) for _ in range(80)]
        check_pull(near, far)  # on other workers
        for call in calls:
            assert code(call) == TIMEOUT
            text = str(call.exception())
            assert f"address={address}" in text
            assert "cluster=7" in text
            assert "limit_ms=400" in text
    assert code(near.dist.ensure_link(nowhere(), timeout_ms=100)) == TIMEOUT


def test_many_silent_addresses_do_not_hold_up_the_others(ends: Ends) -> None:
    near, far = ends.near(), ends.peer(options(listen="127.0.0.1:0"))
    with ExitStack() as doors:
        silent = [doors.enter_context(Stranger()) for _ in range(48)]
        calls = [near.dist.ensure_link(door.at, timeout_ms=LIMIT_MS) for door in silent]
        # The calls to silent addresses keep their threads for much longer.
        assert ensure(near, far.address, timeout_ms=4000).cluster_id == 2
        assert not any(call.done() for call in calls)
        for call in calls:
            assert call.cancel()


def test_a_process_with_the_id_of_a_linked_peer_is_not_told_of_a_link(apart: tuple[End, Peer], ends: Ends) -> None:
    """The attempt repeats until its limit and can be cancelled. The other process sees no link that comes and goes."""
    near, far = apart
    ensure(near, far.address)
    rival = ends.peer(options(listen="127.0.0.1:0"))
    assert rival.downs() == []

    def tells_why() -> bool:
        call = near.dist.ensure_link(rival.address, timeout_ms=700)
        assert code(call) == TIMEOUT
        # If the time is over during an attempt, the text may be that of the attempt.
        return "two processes cannot share a cluster id" in str(call.exception())

    eventually(tells_why)
    assert (rival.downs(), rival.links()) == ([], [])
    call = near.dist.ensure_link(rival.address, timeout_ms=LIMIT_MS)
    time.sleep(0.3)  # some attempts
    assert call.cancel()
    assert (code(call), call.cancelled()) == ("LLM_FAILED", True)
    check_pull(near, far)


def test_calls_can_be_cancelled(ends: Ends) -> None:
    near = ends.near(options())
    with closing(socket.create_server(("127.0.0.1", 0), backlog=128)) as silent:
        addresses = [nowhere(), f"127.0.0.1:{silent.getsockname()[1]}"]
        calls = [near.dist.ensure_link(addresses[number % 2], timeout_ms=600_000) for number in range(50)]
        assert all(call.cancel() for call in calls)
        assert [code(call) for call in calls] == ["LLM_FAILED"] * 50
        assert all(call.cancelled() for call in calls)


def test_finalize_ends_the_calls(ends: Ends) -> None:
    near = ends.near(options())
    with closing(socket.create_server(("127.0.0.1", 0), backlog=128)) as silent:
        addresses = [nowhere(), f"127.0.0.1:{silent.getsockname()[1]}"]
        calls = [near.dist.ensure_link(addresses[number % 2], timeout_ms=600_000) for number in range(50)]
        near.finalize()
        assert [code(call) for call in calls] == [FINALIZED] * 50


def test_bad_arguments(dist: LLMDataDist) -> None:
    start: Any = dist.ensure_link
    for wrong in (None, 7, b"127.0.0.1:1", ("127.0.0.1", 1)):
        with pytest.raises(TypeError, match="address"):
            start(wrong)
    for text in ("", "127.0.0.1", "127.0.0.1:0", "localhost:80", "127.0.0.1:65536", "127.0.0.1:-1", "::1:80"):
        assert "address=" in refused(INVALID, lambda text=text: start(text))  # type: ignore[misc]
    for wrong in ("text", 7, memoryview(b"x")):
        with pytest.raises(TypeError, match="metadata"):
            start("127.0.0.1:1", metadata=wrong)
    assert "16384" in refused(INVALID, lambda: start("127.0.0.1:1", metadata=bytes(16385)))
    for wrong in ("1", 1.0):
        with pytest.raises(TypeError, match="cluster_id"):
            start("127.0.0.1:1", cluster_id=wrong)
        with pytest.raises(TypeError, match="timeout_ms"):
            start("127.0.0.1:1", timeout_ms=wrong)
    with pytest.raises(ValueError, match="cluster_id"):
        start("127.0.0.1:1", cluster_id=2**64)
    with pytest.raises(ValueError, match="timeout_ms"):
        start("127.0.0.1:1", timeout_ms=2**32)
    with pytest.raises(TypeError):
        start("127.0.0.1:1", b"metadata")  # keywords only
    assert "timeout_ms=0" in refused(INVALID, lambda: start("127.0.0.1:1", timeout_ms=0))
    assert "cluster_id=1" in refused(INVALID, lambda: start("127.0.0.1:1", cluster_id=1))
    for wrong in (None, "text", 7):
        with pytest.raises(TypeError, match="metadata"):
            dist.set_metadata(wrong)  # type: ignore[arg-type]
    assert "16384" in refused(INVALID, lambda: dist.set_metadata(bytes(16385)))
    assert dist.poll() == []
    assert dist.drain(0)


def test_an_engine_must_be_open() -> None:
    closed = LLMDataDist(LLMRole.PROMPT, 1)
    with pytest.raises(RuntimeError):
        closed.ensure_link("127.0.0.1:1")
    with pytest.raises(RuntimeError):
        closed.set_metadata(b"")


def test_kv_cache_manager_mode_has_metadata_only(start: Callable[..., LLMDataDist]) -> None:
    dist = start(kv_options(), role=LLMRole.DECODER)
    refused(INVALID, lambda: dist.ensure_link("127.0.0.1:1"))
    dist.set_metadata(b"x")


def test_a_forked_child_cannot_call(dist: LLMDataDist) -> None:
    call = dist.ensure_link(nowhere(), timeout_ms=600_000)
    child = os.fork()
    if child == 0:
        try:
            refused("LLM_FAILED", lambda: dist.ensure_link(nowhere()))
            refused("LLM_FAILED", call.done)
            os._exit(0)
        except BaseException:  # noqa: BLE001
            os._exit(1)
    assert os.waitpid(child, 0)[1] == 0
    assert call.cancel()
