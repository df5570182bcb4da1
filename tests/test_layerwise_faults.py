"""Layer-wise transfers when peers die, links end and memory goes.

Real processes and real signals; every wait is bounded and nothing is judged by a clock. What is checked after each
fault: the code and its reason, that other destinations got all their bytes, that no foreign byte changed, and that a
new transfer works. Not for: what arrives when nothing goes wrong (`test_layerwise.py`).
"""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest

from layers import Far, Steps, ended, launch, layers_done, results, send
from llm_datadist import (
    LLMStatusCode,
)
from peers import (
    GONE,
    OK,
    THOROUGH,
    TIMEOUT,
    UNLINKED,
    Ends,
    Proxy,
    by_blocks,
    by_request,
    equal,
    eventually,
    linked,
    options,
    pattern,
)

# -- peers that die --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("moment", ["before", "between", "during"])
def test_one_of_three_decoders_is_killed(ends: Ends, way: dict[str, Any], moment: str) -> None:
    settings = options(pool=16 << 20, llm__SyncKvCacheWaitTime=8000, **way)
    far = [ends.peer(settings, cluster=cluster) for cluster in (2, 3, 4)]
    near = ends.near(settings)
    linked(near, *far)
    layers, row_bytes = 4, 200_000
    near.allocate("n", 1, row_bytes, 2 * layers, seed=1)
    source = pattern(1, 2 * layers, 1, row_bytes)
    made = [Far(peer, way["accessible"], "f", 1, row_bytes, layers, seed=peer.cluster) for peer in far]
    victim = far[1]
    steps = Steps(allowed=0)
    if moment == "before":
        victim.kill()
    task = launch(near, "n", [to.to(range(layers)) for to in made], steps)
    if moment == "between":
        steps.allow(2)
        eventually(lambda: layers_done(task) == [2, 2, 2], what="two layers everywhere")
        victim.kill()
        ended(near, 3)
        steps.allow()
    elif moment == "during":
        steps.allow(1)
        eventually(lambda: layers_done(task) == [1, 1, 1], what="a layer everywhere")
        victim.stop()
        steps.allow()
        # the others arrive while it stands still with a layer on the wire
        eventually(lambda: [done for number, done in enumerate(layers_done(task)) if number != 1] == [layers] * 2)
        assert not task.done()
        victim.kill()
    else:
        steps.allow()
    assert results(task) == [OK, UNLINKED, OK]
    assert steps.layers == list(range(layers)), "the layers the others need are asked for"
    assert task.synchronize() == LLMStatusCode.LLM_NOT_YET_LINK
    for number in (0, 2):
        made[number].slot(source, range(layers))
        made[number].check(number)
    text = str(task.errors()[1])
    assert "cluster 3" in text or "cluster=3" in text, text
    again = ends.peer(settings, cluster=3)
    eventually(lambda: near.link_clusters([again.at])[1][0] == OK, what="the link")
    to = Far(again, way["accessible"], "f", 1, row_bytes, layers, seed=9)
    assert send(near, "n", [to.to(range(layers))]) == [OK]
    to.slot(source, range(layers))
    to.check()


def test_nobody_is_asked_for_layers_only_the_dead_needed(ends: Ends, way: dict[str, Any]) -> None:
    settings = options(**way)
    dead, alive = ends.peer(settings, cluster=2), ends.peer(settings, cluster=3)
    near = ends.near(settings)
    linked(near, dead, alive)
    near.allocate("n", 1, 64, 12, seed=1)
    gone = Far(dead, way["accessible"], "f", 1, 64, 6)
    to = Far(alive, way["accessible"], "f", 1, 64, 6, seed=1)
    steps = Steps(allowed=2)
    task = launch(near, "n", [gone.to(range(6)), to.to(range(2))], steps)
    steps.reached(2)
    eventually(lambda: layers_done(task) == [2, 2], what="two layers")
    dead.kill()
    ended(near, 2)
    steps.allow(3)
    assert results(task) == [UNLINKED, OK], "it ends though the synchronizer may block at layer 3"
    steps.allow()
    assert set(steps.layers) <= {0, 1, 2, 3}, "at most the layer during which the death is noticed"


def test_a_stopped_decoder_times_out_and_holds_nobody_back(ends: Ends, way: dict[str, Any]) -> None:
    settings = options(pool=16 << 20, llm__SyncKvCacheWaitTime=700, **way)
    far = [ends.peer(settings, cluster=cluster) for cluster in (2, 3)]
    near = ends.near(settings)
    linked(near, *far)
    layers, row_bytes = 4, 200_000
    near.allocate("n", 1, row_bytes, 2 * layers, seed=1)
    source = pattern(1, 2 * layers, 1, row_bytes)
    made = [Far(peer, way["accessible"], "f", 1, row_bytes, layers, seed=peer.cluster) for peer in far]
    steps = Steps(allowed=1)
    task = launch(near, "n", [to.to(range(layers)) for to in made], steps)
    eventually(lambda: layers_done(task) == [1, 1], what="a layer everywhere")
    far[0].stop()
    try:
        steps.allow()
        assert results(task) == [TIMEOUT, OK]
        made[1].slot(source, range(layers))
        made[1].check()
        text = str(task.errors()[0])
        assert "2" in text
    finally:
        far[0].go_on()
        far[0].spoiled = False
    near.unlink_clusters([far[0].at], 2000, force=True)
    far[0].unlink_clusters([(1, None)], 2000, force=True)
    linked(near, far[0])
    far[0].fill("f", 77)
    made[0].twin = pattern(77, 2 * layers, 1, row_bytes)
    assert send(near, "n", [made[0].to(range(1, 3), 1)]) == [OK]
    made[0].slot(source, range(1, 3), 1)
    far[0].rest(0.2)
    made[0].check("a leftover of the transfer that timed out was written")


@pytest.mark.parametrize("allowed", [0, 1, 5000, 750_000])
def test_a_wire_that_is_cut(ends: Ends, allowed: int) -> None:
    settings = options(pool=16 << 20, llm__LinkTransport="tcp", llm__SyncKvCacheWaitTime=8000)
    far, near = ends.peer(settings), ends.near(settings)
    layers, row_bytes = 4, 250_000
    near.allocate("n", 1, row_bytes, 2 * layers, seed=1)
    source = pattern(1, 2 * layers, 1, row_bytes)
    to = Far(far, False, "f", 3, row_bytes, layers, seed=2)
    with Proxy(far.address) as wire:
        assert near.link_clusters([(2, wire.at)])[0] == OK
        steps = Steps(allowed=1)
        task = launch(near, "n", [to.to(range(layers), slot=1)], steps)
        eventually(lambda: layers_done(task) == [1], what="layer 0")
        wire.allow("up", allowed, cut=True)
        steps.allow()
        assert results(task) == [UNLINKED]
    to.slot(source, range(1), slot=1)
    got = far.read("f")
    for tensor in range(2 * layers):
        for row in (0, 2):
            assert np.array_equal(got[tensor][row], to.twin[tensor][row]), "a guard row"
    assert np.array_equal(got[0][1], to.twin[0][1]), "a layer that was done"
    ended(near, 2)
    eventually(lambda: near.link_clusters([far.at])[1][0] == OK, what="the link")
    assert send(near, "n", [to.to(range(layers), slot=1)]) == [OK]
    to.slot(source, range(layers), slot=1)
    to.check()


def test_a_wire_that_falls_silent(ends: Ends) -> None:
    settings = options(pool=16 << 20, llm__LinkTransport="tcp", llm__SyncKvCacheWaitTime=600)
    far, near = ends.peer(settings), ends.near(settings)
    near.allocate("n", 1, 5000, 8, seed=1)
    to = Far(far, False, "f", 1, 5000, 4, seed=2)
    with Proxy(far.address) as wire:
        assert near.link_clusters([(2, wire.at)])[0] == OK
        steps = Steps(allowed=2)
        task = launch(near, "n", [to.to(range(4))], steps)
        eventually(lambda: layers_done(task) == [2], what="two layers")
        wire.deafen()
        steps.allow()
        assert results(task) == [TIMEOUT]
    near.unlink_clusters([far.at], 1000, force=True)
    far.unlink_clusters([(1, None)], 1000, force=True)
    linked(near, far)
    assert send(near, "n", [to.to(range(4))]) == [OK]
    to.slot(pattern(1, 8, 1, 5000), range(4))
    to.check()


@pytest.mark.parametrize(("side", "force"), [("near", False), ("near", True), ("far", True)])
def test_unlinking_in_the_middle(ends: Ends, way: dict[str, Any], side: str, force: bool) -> None:
    near, far = ends.pair(**way)
    near.allocate("n", 1, 640, 8, seed=1)
    source = pattern(1, 8, 1, 640)
    to = Far(far, way["accessible"], "f", 1, 640, 4, seed=2)
    steps = Steps(allowed=2)
    task = launch(near, "n", [to.to(range(4))], steps)
    eventually(lambda: layers_done(task) == [2], what="two layers")
    if side == "near":
        assert near.unlink_clusters([far.at], 3000, force)[0] == OK
    else:
        assert far.unlink_clusters([(1, None)], 3000, force=True)[0] == OK
    ended(near, 2)
    steps.allow()
    assert results(task) == [UNLINKED]
    to.slot(source, range(2))
    to.check()
    if side == "far" or force:
        far.unlink_clusters([(1, None)], 1000, force=True)
    linked(near, far)
    assert send(near, "n", [to.to(range(4))]) == [OK]
    to.slot(source, range(4))
    to.check()


def test_unlinking_and_linking_again_between_layers_does_not_revive_a_transfer_wrongly(ends: Ends) -> None:
    """Whatever the code, success means every byte."""
    for accessible in (False, True):
        near, far = ends.pair(accessible=accessible)
        near.allocate("n", 1, 640, 8, seed=1)
        to = Far(far, accessible, "f", 1, 640, 4, seed=2)
        steps = Steps(allowed=2)
        task = launch(near, "n", [to.to(range(4))], steps)
        eventually(lambda task=task: layers_done(task) == [2], what="two layers")
        near.unlink_clusters([far.at], 3000)
        linked(near, far)
        steps.allow()
        (told,) = results(task)
        assert told in (OK, UNLINKED)
        to.slot(pattern(1, 8, 1, 640), range(4 if told == OK else 2))
        to.check()
        near.finalize()
        far.reset()


# -- destinations that go --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("registered", [False, True])
def test_a_destination_that_is_freed_in_the_middle(ends: Ends, way: dict[str, Any], registered: bool) -> None:
    near, far = ends.pair(pool=1 << 20, **way)
    size = 100_000
    near.allocate("n", 1, size, 8, seed=1)
    source = pattern(1, 8, 1, size)
    to = Far(far, way["accessible"], "f", 1, size, 4, seed=2, registered=registered)
    other = Far(far, way["accessible"], "g", 1, 64, 4, seed=3)
    near.allocate("small", 1, 64, 8, seed=4)
    steps = Steps(allowed=2)
    task = launch(near, "n", [to.to(range(4))], steps)
    eventually(lambda: layers_done(task) == [2], what="two layers")
    if registered:
        far.unregister("f")
    else:
        far.deallocate("f")
        new = Far(far, way["accessible"], "new", 1, size, 4, seed=5)
        if not way["accessible"]:
            assert set(new.bases) & set(to.bases), "the test wants the same memory"
    steps.allow()
    assert results(task) == [GONE]
    if registered:
        to.slot(source, range(2))
        far.rest(0.1)
        to.check("written after unregister")
    else:
        far.rest(0.1)
        new.check("another's memory")
    assert send(near, "small", [other.to(range(4))]) == [OK], "the link is as good as before"
    other.slot(pattern(4, 8, 1, 64), range(4))
    other.check()
    back = Far(far, way["accessible"], "back", 1, 99, 4, seed=6)
    near.allocate("m", 1, 99, 8, seed=7)
    assert send(near, "m", [back.to(range(4))]) == [OK]


def test_destinations_that_come_and_go_at_any_moment(ends: Ends, way: dict[str, Any]) -> None:
    """The decoder frees the destination and puts its own things there while layers arrive."""
    near, far = ends.pair(pool=4 << 20, **way)
    layers, size = 10, 30_000
    near.allocate("n", 1, size, 2 * layers, seed=1)
    chance = random.Random(5)  # noqa: S311
    for number in range(40 if THOROUGH else 12):
        to = Far(far, way["accessible"], "f", 1, size, layers, seed=2)
        task = launch(near, "n", [to.to(range(layers))])
        if not way["accessible"]:  # an address means the cache that lies there when its owner is asked
            eventually(lambda task=task: layers_done(task)[0] > 0, what="layer 0")
        far.rest(chance.random() * 0.002)
        far.deallocate("f")
        new = Far(far, way["accessible"], "new", 1, size, layers, seed=number)
        (told,) = results(task)
        assert told in (OK, GONE), told
        new.check("another's memory")
        far.deallocate("new")
    eventually(lambda: far.used() == 0, what="the memory")


def test_memory_that_is_registered_anew_in_the_middle(ends: Ends, way: dict[str, Any]) -> None:
    """A transfer goes on into the same memory or ends with a code; it never says success for less than all."""
    near, far = ends.pair(**way)
    near.allocate("n", 2, 500, 8, blocks=True, seed=1)
    to = Far(far, way["accessible"], "f", 2, 500, 4, blocks=True, model=5, registered=True, seed=2)
    steps = Steps(allowed=2)
    task = launch(near, "n", [to.to(range(4))], steps, src=[0, 1], dst=[1, 0])
    eventually(lambda: layers_done(task) == [2], what="two layers")
    far.unregister("f")
    far.register("again", 2, 500, 8, blocks=True, keys=[by_blocks(2, 5)], accessible=True, seed=3)
    steps.allow()
    (told,) = results(task)
    assert told == GONE
    assert equal(far.read("again"), pattern(3, 8, 2, 500)), "half a transfer in another cache"


# -- sources that go -------------------------------------------------------------------------------------------------


def test_a_source_that_is_deallocated_lives_until_all_is_sent(ends: Ends, way: dict[str, Any]) -> None:
    near, far = ends.pair(pool=1 << 20, **way)
    size = 60_000
    near.allocate("n", 1, size, 8, seed=1)
    to = Far(far, way["accessible"], "f", 1, size, 4, seed=2)
    steps = Steps(allowed=1)
    task = launch(near, "n", [to.to(range(4))], steps)
    eventually(lambda: layers_done(task) == [1], what="layer 0")
    near.deallocate("n")
    assert near.used() > 0, "the transfer needs it"
    near.allocate("other", 1, 60_000, 4, seed=9)
    steps.allow()
    assert results(task) == [OK]
    to.slot(pattern(1, 8, 1, size), range(4))
    to.check()
    near.deallocate("other")
    eventually(lambda: near.used() == 0, what="the memory")


def test_a_source_that_is_deallocated_goes_with_a_cancelled_task(ends: Ends) -> None:
    near, far = ends.pair()
    near.allocate("n", 1, 6000, 8, seed=1)
    to = Far(far, False, "f", 1, 6000, 4, seed=2)
    steps = Steps(allowed=1)
    task = launch(near, "n", [to.to(range(4))], steps)
    steps.reached(1)
    near.deallocate("n")
    task.cancel()
    eventually(lambda: near.used() == 0, what="the memory, though the synchronizer still blocks and the task is held")
    steps.allow()


def test_a_source_that_is_unregistered(ends: Ends, way: dict[str, Any]) -> None:
    near, far = ends.pair(**way)
    near.register("n", 1, 6000, 8, seed=1)
    to = Far(far, way["accessible"], "f", 1, 6000, 4, seed=2)
    steps = Steps(allowed=2)
    task = launch(near, "n", [to.to(range(4))], steps)
    eventually(lambda: layers_done(task) == [2], what="two layers")
    near.unregister("n")
    near.paint("n", 0xEE)
    steps.allow()
    assert results(task) == [GONE]
    to.slot(pattern(1, 8, 1, 6000), range(2))
    to.check()


def test_a_key_of_the_source_is_no_concern_of_the_transfer(ends: Ends) -> None:
    near, far = ends.pair()
    keys = [by_request(1, 1), by_request(1, 2)]
    near.allocate("n", 2, 640, 8, keys=keys, seed=1)
    to = Far(far, False, "f", 2, 640, 4, seed=2)
    steps = Steps(allowed=1)
    task = launch(near, "n", [to.to(range(4), row=1)], steps)
    eventually(lambda: layers_done(task) == [1], what="layer 0")
    for key in keys:
        near.remove_key(key)
    near.deallocate("n")
    steps.allow()
    assert results(task) == [OK]
    to.slot(pattern(1, 8, 2, 640), range(4), row=1)
    to.check()
    eventually(lambda: near.used() == 0, what="the memory")
    near.allocate("n", 2, 640, 8, keys=keys, seed=3)
    assert send(near, "n", [to.to(range(4))]) == [OK]
    for key in keys:  # a transfer takes no key, as little as a push
        near.remove_key(key)
    near.deallocate("n")
    eventually(lambda: near.used() == 0, what="the memory")
