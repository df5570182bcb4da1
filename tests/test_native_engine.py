"""`LLMDataDist.engine` and `Cache.native`: one engine with both APIs. Not for: the native API itself (`native/`)."""

from __future__ import annotations

import pickle
from typing import TYPE_CHECKING, Any, Callable

import numpy as np
import pytest

from llm_datadist import BlocksCacheKey, Cache, LLMDataDist, LLMRole, LLMStatusCode
from llm_datadist.native import (
    Closed,
    Completed,
    Engine,
    GrantClosed,
    InvalidArgument,
    Message,
    NotFound,
    PeerDown,
    PeerLost,
    PeerUp,
)
from memory import GONE, LE, UserTensors, desc, fill, tensors
from mistakes import coded, fails
from peers import LIMIT, OK, by_blocks, equal, eventually, kv_options, options

if TYPE_CHECKING:
    from peers import End, Ends, Peer


FAILED, FINALIZED = coded(LLMStatusCode.LLM_FAILED), coded(LLMStatusCode.LLM_ENGINE_FINALIZED)


def test_life_of_the_engine(start: Callable[..., LLMDataDist]) -> None:
    with pytest.raises(RuntimeError):
        _ = LLMDataDist(LLMRole.PROMPT, 3).engine
    dist = start(options(listen="127.0.0.1:0"), cluster_id=3)
    engine = dist.engine
    assert isinstance(engine, Engine)
    assert engine is dist.engine
    assert (engine.name, engine.address, engine.timeout, engine.closed) == (
        "cluster 3",
        dist.listen_ip_info,
        5.0,
        False,
    )
    dist.switch_role(LLMRole.DECODER, {"llm.listenIpInfo": "127.0.0.1:0"})
    listened = dist.listen_ip_info
    assert engine.address == listened
    cache = dist.cache_manager.allocate_blocks_cache(desc())
    copy = engine.copy(cache.native[[1]], cache.native[[0]])
    copy.result(LIMIT)
    dist.finalize()
    assert engine.closed
    assert engine.address == listened, "where it listened last"
    assert copy.result(0) is None, "handles keep their outcomes"
    with pytest.raises(Closed):
        engine.events()
    with pytest.raises(RuntimeError):
        _ = dist.engine
    dist.init(options())
    assert dist.engine is not engine
    assert dist.engine.events() == []


def test_kv_cache_manager_mode_has_none(start: Callable[..., LLMDataDist]) -> None:
    dist = start(kv_options(), role=LLMRole.DECODER)
    fails(lambda: dist.engine, LE)


def test_both_use_one_pool_and_one_table(dist: LLMDataDist) -> None:
    manager, engine = dist.cache_manager, dist.engine
    device, host = manager.allocate_blocks_cache(desc()), engine.allocate("host", blocks=4, tensors=2, shape=(256,),
                                                                          dtype="uint8", pool="host")  # fmt: skip
    assert {name: pool["used_bytes"] > 0 for name, pool in dist.stats()["pools"].items() if pool} == {
        "device": True,
        "host": True,
    }
    written, native = fill(device, 1), device.native
    assert [tensor.address for tensor in native.tensors] == list(device.tensor_addrs)
    assert (native.blocks, native.pool, native.layout, native.engine) == (4, "device", None, engine)
    engine.copy([(host[[3, 0]], native[[0, 1]]), (native[[2]], host[[3]])]).result(LIMIT)
    for array, theirs, before in zip(tensors(device), host.tensors, written):
        assert (theirs.numpy()[[3, 0]] == before[[0, 1]]).all()
        assert (array[2] == before[0]).all()
    manager.copy_blocks(device, {2: [3]})
    engine.copy(native[[0]], native[[3]]).result(LIMIT)
    assert engine.stats()["ops"]["copy_blocks"] == dist.stats()["ops"]["copy_blocks"]


def test_caches_of_every_origin(dist: LLMDataDist) -> None:
    manager, user = dist.cache_manager, UserTensors(4, 64, 2)
    registered = manager.register_blocks_cache(user.describe(), user.addrs)
    native = registered.native
    assert [np.asarray(tensor).ctypes.data for tensor in native.tensors] == user.addrs
    slots, blocks = manager.allocate_cache(desc()), manager.allocate_blocks_cache(desc())
    fails(lambda: slots.native, LE)
    by_hand = Cache(blocks.cache_id, desc(), [], manager, False, True)
    assert by_hand.native.tensors[0].address == blocks.tensor_addrs[0]
    kept = blocks.native
    manager.deallocate_blocks_cache(blocks)
    for cache in (blocks, by_hand, user.cpu_cache()):
        fails(lambda cache=cache: cache.native, GONE)  # type: ignore[misc]
    with pytest.raises(NotFound):
        _ = kept.tensors
    native.free().result(LIMIT)
    fails(lambda: registered.native, GONE)
    left = manager.allocate_blocks_cache(desc())
    dist.finalize()
    fails(lambda: left.native, FINALIZED)
    with pytest.raises(TypeError):
        pickle.dumps(kept)


def test_events_and_messages(pair: tuple[End, Peer]) -> None:
    """What one process has of the other is named after its cluster."""
    local, remote = pair
    assert remote.polled() == []
    (peer,) = local.engine.peers
    assert (peer.name, peer.address) == ("cluster 2", remote.address)
    peer.send(b"hello")
    eventually(lambda: remote.polled() == [(1, b"hello")])
    local.allocate("n", 4, 96, 2, blocks=True)
    rows = local.held["n"].handle.native[[1, 2]]
    grant = local.engine.lend(rows, ttl=LIMIT)
    grant.revoke().result(LIMIT)
    copy = local.engine.copy(rows, rows)
    remote.kill()
    seen: list[Any] = []
    kinds = {GrantClosed, Completed, PeerDown}
    eventually(lambda: seen.extend(local.engine.events()) or {type(event) for event in seen} >= kinds)
    assert {sum(isinstance(event, kind) for event in seen) for kind in kinds} == {1}
    assert [event.peer.name for event in seen if isinstance(event, PeerDown)] == ["cluster 2"]
    assert next(event.transfer for event in seen if isinstance(event, Completed)) is copy


def test_links_of_both_apis(ends: Ends) -> None:
    """A link of either API serves the calls of both. The native caches of an `LLMDataDist` have names at its peers."""
    remote, local = ends.peer(options(accessible=True)), ends.local(options(accessible=True))
    assert local.engine.events() == []
    peer = local.engine.link(remote.address).result(LIMIT)
    assert [event.peer for event in local.engine.events() if isinstance(event, PeerUp)] == [peer]
    remote.allocate("f", 4, 96, 2, blocks=True, keys=[by_blocks(0)], seed=2)
    remote.native_allocate("named", 4, 96, 2, seed=3)
    local.allocate("n", 4, 96, 2, blocks=True)
    local.pull_blocks(by_blocks(2), "n", [1], [0])
    local.native_pull(2, "named", "n", [2], [1], notify=b"pulled")
    for ours, theirs, named in zip(local.read("n"), remote.read("f"), remote.read("named")):
        assert (ours[0] == theirs[1]).all()
        assert (ours[1] == named[2]).all()
    assert remote.polled() == [(1, b"pulled")]
    native = local.held["n"].handle.native
    with pytest.raises(NotFound):
        local.engine.pull(native[[0]], peer["cache 1"][[0]]).result(LIMIT)
    assert local.unlink_clusters([remote.at])[0] == OK
    assert not peer.alive


def test_native_engine_beside_the_class(ends: Ends) -> None:
    """An engine of the native API and an `LLMDataDist` exchange blocks in both directions, by native names."""
    remote = ends.peer(options(accessible=True))
    remote.native_allocate("kv", 4, 96, 2, seed=3)
    with Engine(pool="1MiB", timeout=LIMIT) as engine:
        kv = engine.allocate("kv", blocks=4, tensors=2, shape=(96,), dtype="uint8")
        peer = engine.link(remote.address).result(LIMIT)
        engine.pull(kv[:], peer["kv"][:4]).result(LIMIT)
        assert equal([tensor.numpy() for tensor in kv.tensors], remote.read("kv"))


def test_a_call_uses_only_the_link_over_which_it_was_started(ends: Ends) -> None:
    """A pull waits for its rows while the peer is killed and another process takes its place."""
    settings = options(pool=64 << 20)
    remote, local = ends.peer(settings), ends.local(settings)
    local.link_clusters([remote.at])
    mine = local.engine.allocate("kv", blocks=4, tensors=1, shape=(8 << 20,), dtype="uint8")
    remote.native_allocate("kv", 4, 8 << 20, 1)
    theirs = local.peer_of(2)["kv"]
    remote.stop()  # so that it answers nothing, even if the copies end early
    copies = [local.engine.copy(mine[[1]], mine[[0]]) for _ in range(40)]
    waiting = local.engine.pull(mine[[1]], theirs[[0]], timeout=LIMIT)
    remote.kill()
    other = ends.peer(settings)
    other.native_allocate("kv", 4, 8 << 20, 1, seed=5)
    local.link_clusters([other.at])
    assert local.engine.peers
    for copy in copies:
        copy.result(LIMIT)
    with pytest.raises(PeerLost):
        waiting.result(LIMIT)
    local.engine.pull(mine[[1]], local.peer_of(2)["kv"][[0]]).result(LIMIT)
    assert (mine.tensors[0].numpy()[1] == other.read("kv")[0][0]).all()


def test_errors_are_those_of_the_native_api(dist: LLMDataDist) -> None:
    cache = dist.cache_manager.allocate_blocks_cache(desc())
    with pytest.raises(InvalidArgument) as caught:
        dist.engine.copy(cache.native[[0]], cache.native[[99]])
    assert caught.value.argument == "src"
    fails(lambda: dist.cache_manager.copy_blocks(cache, {0: [99]}), LE)


def test_closing_the_engine_closes_both(start: Callable[..., LLMDataDist]) -> None:
    dist = start()
    cache = dist.cache_manager.allocate_blocks_cache(desc(), BlocksCacheKey(1))
    dist.engine.close()
    fails(lambda: dist.cache_manager.copy_blocks(cache, {0: [1]}), FINALIZED)
    dist.finalize()
    dist.init(options())
    dist.cache_manager.allocate_blocks_cache(desc(), BlocksCacheKey(1))


def test_message_before_the_first_use(ends: Ends) -> None:
    """Messages that came before are kept; news of links come from the first use on."""
    local, remote = ends.pair()
    remote.notify(1, b"early")
    received: list[bytes] = []
    eventually(lambda: received.extend(e.data for e in local.engine.events() if isinstance(e, Message)) or received)
    assert received == [b"early"]
