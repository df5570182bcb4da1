"""Layer-wise transfers when peers die or stop, links end, and memory is released.

After each fault: the code and its reason, the bytes at other destinations, memory of others, and a new transfer.
"""

from __future__ import annotations

from typing import Any

import pytest

from layers import FAILED, Steps, Transfer, launch, layer_threads, layers_done, names, results, unlinked
from llm_datadist import LLMStatusCode
from peers import OK, TIMEOUT, UNLINKED, Ends, by_request, equal, eventually, linked, pattern


def test_nobody_is_asked_for_layers_that_only_the_dead_needed(ends: Ends) -> None:
    transfer = Transfer(ends, peers=2, layers=6)
    gone, to = transfer.all
    steps, task = transfer.begun(2, [gone.to(range(6)), to.to(range(2))])
    steps.reached(2)
    gone.peer.kill()
    unlinked(transfer.local, gone.peer.cluster)
    steps.allow(3)
    assert results(task) == [UNLINKED, OK], "it ends though the synchronizer may wait for layer 3"
    assert names(task.errors()[0], cluster=gone.peer.cluster)
    to.slot(transfer.source, range(2))
    to.check()
    steps.allow()
    eventually(lambda: not layer_threads(), what="the end of the thread")
    assert set(steps.layers) <= {0, 1, 2, 3}, "at most the layer during which the death is noticed"


@pytest.mark.parametrize(
    ("end", "code"), [("goes on", OK), ("cancel", FAILED), ("force", UNLINKED), ("timeout", TIMEOUT)]
)
def test_a_peer_that_stops_with_a_layer_under_way(ends: Ends, way: dict[str, Any], end: str, code: str) -> None:
    settings = {"llm__SyncKvCacheWaitTime": 3000 if end == "timeout" else 15000, "llm__LinkSilence": 60000}
    transfer = Transfer(ends, way, 1, 400_000, pool=16 << 20, **settings)
    local, peer, to = transfer.local, transfer.peer, transfer.to
    transfer.again()
    to.twin = pattern(2, 8, 1, 400_000)
    peer.fill("f", 2)
    steps = Steps(allowed=1)
    with peer.stopped():
        task = transfer.start(steps)
        steps.reached(1)
        assert layers_done(task) == [0]
        assert task.synchronize(0) is LLMStatusCode.LLM_TIMEOUT
        if end == "goes on":
            steps.allow()
            steps.reached(3)
            assert layers_done(task) == [0], "the next layers are asked for while one is under way"
        elif end == "cancel":
            assert task.cancel()
        elif end == "force":
            local.unlink_clusters([peer.at], 500, force=True)
            assert results(task, 8000) == [UNLINKED], "it need not wait for sync_kv_timeout"
        else:
            assert results(task) == [TIMEOUT]
            assert names(task.errors()[0], cluster=2)
    assert results(task) == [code]
    if end == "goes on":
        transfer.arrived()
        return
    steps.allow()
    assert equal(peer.read("f")[2:], to.twin[2:]), "a layer arrived that was not ready"
    if end != "cancel":
        local.unlink_clusters([peer.at], 2000, force=True)
        peer.unlink_clusters([(1, None)], 2000, force=True)
        linked(local, peer)
    peer.fill("f", 2)
    assert transfer.send(to=[to.to(range(1, 3), 1)]) == [OK]
    to.slot(transfer.source, range(1, 3), 1)
    peer.rest(0.1)
    to.check("a layer of the first transfer arrived after its end")


def test_a_transfer_releases_no_key_of_its_source(ends: Ends) -> None:
    transfer, key = Transfer(ends), by_request(1, 1)
    local, before = transfer.local, transfer.local.used()
    local.allocate("k", 1, 64, 8, keys=[key], seed=1)
    assert results(launch(local, "k", [transfer.to.to(range(4))])) == [OK]
    local.deallocate("k")
    assert local.used() > before, "the key holds it"
    local.remove_key(key)
    eventually(lambda: local.used() == before, what="the memory")
