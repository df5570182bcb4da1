"""Layer-wise transfers when peers die, links end, memory goes, calls come at once and processes end.

Real processes and real signals; every wait is bounded and nothing is judged by a clock. What is checked after each
fault: the code and its reason, that other destinations got all their bytes, that no foreign byte changed, and that a
new transfer works. Not for: what arrives when nothing goes wrong (`test_layerwise.py`).
"""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any, Optional

import numpy as np
import pytest

from layers import FINALIZED, Far, Steps, launch, results, send
from llm_datadist import (
    CacheKeyByIdAndIndex,
    LayerSynchronizer,
    LLMStatusCode,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from peers import (
    GONE,
    INVALID,
    LIMIT,
    OK,
    SOAK,
    THOROUGH,
    TIMEOUT,
    UNLINKED,
    End,
    Ends,
    Proxy,
    by_blocks,
    by_request,
    code,
    equal,
    eventually,
    linked,
    options,
    pattern,
)


def ended(near: End, cluster: int) -> None:
    """Wait until the link is no more."""
    eventually(lambda: cluster not in {link["cluster"] for link in near.links()}, what="the end of the link")


def layers_done(task: Any) -> list[int]:
    """How many layers each config has behind it."""
    return [one.layers_done for one in task.progress()]


# -- peers that die ------------------------------------------------------------------------------------------------


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


# -- destinations that go ------------------------------------------------------------------------------------------


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


# -- sources that go -----------------------------------------------------------------------------------------------


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


# -- calls at once -------------------------------------------------------------------------------------------------


def test_many_transfers_at_once_over_one_link(ends: Ends, way: dict[str, Any]) -> None:
    near, far = ends.pair(pool=8 << 20, llm__SyncKvCacheWaitTime=9999, **way)
    rows, size, layers = 12, 3000, 5
    near.allocate("n", rows, size, 2 * layers, seed=1)
    to = Far(far, way["accessible"], "f", rows, size, layers, seed=2)
    failed: list[Any] = []

    def work(row: int) -> None:
        for _ in range(2):
            told = send(near, "n", [to.to(range(layers), row=row, slot=rows - 1 - row)])
            if told != [OK]:
                failed.append(told)

    crew = [threading.Thread(target=work, args=(row,)) for row in range(rows)]
    for thread in crew:
        thread.start()
    for thread in crew:
        thread.join(LIMIT)
    assert failed == []
    for row in range(rows):
        to.slot(pattern(1, 2 * layers, rows, size), range(layers), row=row, slot=rows - 1 - row)
    to.check()


def _uniform(arrays: list[np.ndarray], allowed: set[int], where: Any) -> None:
    for tensor, row in itertools.product(range(len(arrays)), range(arrays[0].shape[0])):
        values = np.unique(arrays[tensor][row])
        assert len(values) == 1, f"{where}: tensor {tensor} row {row} is mixed: {values}"
        assert int(values[0]) in allowed, (where, tensor, row, values)


def test_transfers_copies_and_pulls_of_the_same_rows_never_mix(  # noqa: C901
    ends: Ends, way: dict[str, Any]
) -> None:
    """Everyone writes rows of one value; a row with two values was torn."""
    settings = options(pool=16 << 20, llm__SyncKvCacheWaitTime=4000, listen="127.0.0.1:0", **way)
    far, near = ends.peer(settings), ends.near(settings)
    linked(near, far)
    rows, size, layers = 4, 150_000, 2
    for number, name in enumerate(("a", "b", "c")):
        near.allocate(name, rows, size, 2 * layers, blocks=True, keys=[by_blocks(1, number)])
        near.paint(name, number + 1)
    near.allocate("host", rows, size, 2 * layers, blocks=True, host=True)
    near.paint("host", 4)
    to = Far(far, way["accessible"], "f", rows, size, layers, blocks=True, model=7)
    far.paint("f", 9)
    every = list(range(rows))
    stop = threading.Event()
    failed: list[Any] = []

    def transfers(name: str) -> None:
        while not stop.is_set():
            told = send(near, name, [to.to(range(layers))], src=every, dst=every)
            if told != [OK]:
                failed.append(told)
                return

    def local(call: Any, *args: Any) -> None:
        while not stop.is_set():
            told = code(call, *args)
            if told != OK:
                failed.append(told)
                return

    crew = [
        threading.Thread(target=transfers, args=("a",)),
        threading.Thread(target=transfers, args=("b",)),
        threading.Thread(target=local, args=(near.swap_blocks, "host", "a", [(0, 0), (1, 2)])),
        threading.Thread(target=local, args=(near.copy_blocks, "b", [(0, 1), (2, 3)])),
    ]
    for thread in crew:
        thread.start()
    try:
        for round_ in range(40 if THOROUGH else 5):
            codes = far.at_once(
                [
                    ["pull_blocks", [by_blocks(1, 2), "f", every, every], {}],
                    ["pull_blocks", [by_blocks(1, 0), "f", [0, 1], [2, 3]], {}],
                    ["copy_blocks", ["f", [(0, 1), (2, 3)]], {}],
                ],
                2,
            )
            assert codes == [OK] * 3, (round_, codes)
    finally:
        stop.set()
        for thread in crew:
            thread.join(LIMIT)
    assert failed == []
    _uniform(far.read("f"), {1, 2, 3, 4, 9}, "the destination")
    for name in ("a", "b"):
        _uniform(near.read(name), {1, 2, 4}, name)


def test_what_is_copied_out_of_a_destination_is_never_mixed(ends: Ends, way: dict[str, Any]) -> None:
    near, far = ends.pair(pool=16 << 20, llm__SyncKvCacheWaitTime=9999, **way)
    size = 120_000
    for number, name in enumerate(("a", "b")):
        near.allocate(name, 1, size, 4, blocks=True)
        near.paint(name, number + 1)
    to = Far(far, way["accessible"], "f", 6, size, 2, blocks=True, model=7)
    far.allocate("host", 6, size, 4, host=True, blocks=True)
    far.paint("f", 9)
    far.paint("host", 9)
    for round_ in range(30 if THOROUGH else 4):
        tasks = [launch(near, name, [to.to(range(2))], src=[0], dst=[0]) for name in ("a", "b", "a", "b")]
        for row in range(1, 6):
            far.copy_blocks("f", [(0, row)])
            far.swap_blocks("f", "host", [(0, row)])
        assert [results(task) for task in tasks] == [[OK]] * 4
        _uniform(far.read("f"), {1, 2, 9}, round_)
        _uniform(far.read("host"), {1, 2, 9}, round_)


def test_a_decoder_that_stands_still_takes_no_lane_of_the_others(ends: Ends, way: dict[str, Any]) -> None:
    """Many transfers to a stopped peer, and one to another: that one ends while the first stands still."""
    settings = options(pool=8 << 20, llm__SyncKvCacheWaitTime=9000, llm__LinkSilence=60000, **way)
    still, alive = ends.peer(settings, cluster=2), ends.peer(settings, cluster=3)
    near = ends.near(settings)
    linked(near, still, alive)
    near.allocate("n", 64, 5000, 4, seed=1)
    stuck = Far(still, way["accessible"], "f", 64, 5000, 2, seed=2)
    to = Far(alive, way["accessible"], "f", 64, 5000, 2, seed=3)
    assert send(near, "n", [stuck.to(range(2)), to.to(range(2))]) == [OK, OK]
    before = near.resources()["threads"]
    still.stop()
    try:
        first = launch(near, "n", [stuck.to(range(2), row=row, slot=row) for row in range(40)])
        others = [launch(near, "n", [stuck.to(range(2), row=row, slot=row)]) for row in range(40, 64)]
        good = launch(near, "n", [to.to(range(2), row=row, slot=63 - row) for row in range(64)])
        assert results(good, 8000) == [OK] * 64
        assert not first.done()
        assert near.resources()["threads"] < before + 150
    finally:
        still.go_on()
        still.spoiled = False
    for task in (first, *others):
        assert set(results(task)) <= {OK, TIMEOUT}
    source = pattern(1, 4, 64, 5000)
    to.slot(source, range(2))
    for row in range(64):
        to.slot(source, range(2), row=row, slot=63 - row)
    to.check()


def test_hundreds_of_rows_for_one_that_stands_still_do_not_hold_up_another(ends: Ends) -> None:
    settings = options(llm__SyncKvCacheWaitTime=5000, llm__LinkSilence=60000)
    still, alive = ends.peer(settings, cluster=2), ends.peer(settings, cluster=3)
    near = ends.near(settings)
    linked(near, still, alive)
    rows = 700
    near.allocate("n", rows, 64, 4, seed=1)
    stuck = Far(still, False, "f", rows, 64, 2, seed=2)
    to = Far(alive, False, "f", 2, 64, 2, seed=3)
    assert send(near, "n", [stuck.to(range(1)), to.to(range(1))]) == [OK, OK]
    still.stop()
    try:
        many = launch(near, "n", [stuck.to(range(2), row=row, slot=row) for row in range(rows)])
        eventually(lambda: near.resources()["threads"] > 20, what="the lanes")
        good = launch(near, "n", [to.to(range(2), row=1)])
        assert results(good) == [OK]
        assert all("not done yet" in str(error) for error in many.errors()), "it waited for these"
    finally:
        still.go_on()
        still.spoiled = False
    results(many)


def test_two_ends_send_each_other_the_same_rows(ends: Ends, way: dict[str, Any]) -> None:
    """What is the source of one is the destination of the other: all end, with a code, and rows are whole."""
    decoder = Decoder(ends, {**way, "llm__SyncKvCacheWaitTime": 700})
    near = decoder.near
    program = decoder.start("""
        print(end.held["n"].handle.cache_id, *end.addresses("n"), flush=True)
        sys.stdin.readline()
        end.paint("n", 7)
        for _ in range(2):
            print(*results(go(Steps())))
        print("end", flush=True)
        sys.stdin.readline()
        for array in end.read("n"):
            assert (array == array[0][0]).all(), "mixed"
        end.unlink_clusters([(1, None)], 1000, True)
        assert end.link_clusters([(1, address)])[0] == "LLM_SUCCESS"
        end.fill("n", 1)
        assert results(go(Steps())) == ["LLM_SUCCESS"]
    """)
    assert program.stdout is not None
    assert program.stdin is not None
    cache, *addresses = map(int, program.stdout.readline().split())
    near.paint("f", 8)
    if way["accessible"]:
        config: Any = TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(2, cache), range(10), range(10))
    else:
        config = TransferConfig(2, addresses)
    try:
        program.stdin.write("\n")
        program.stdin.flush()
        told = [send(near, "f", [config])[0] for _ in range(2)]
        told += [program.stdout.readline().strip() for _ in range(2)]
        assert program.stdout.readline() == "end\n"
        assert set(told) <= {OK, TIMEOUT, UNLINKED}, told
        _uniform(near.read("f"), {7, 8}, "here")
        near.unlink_clusters([(2, None)], 1000, force=True)
        _, err = program.communicate("\n", timeout=LIMIT)
        assert program.returncode == 0, err
        assert decoder.whole()
    finally:
        program.kill()
        program.communicate()


def test_a_synchronizer_that_uses_the_engine(ends: Ends, way: dict[str, Any]) -> None:
    """Copies, pulls, another transfer, statistics: all that a model may do while it says when a layer is ready."""
    near, far = ends.pair(**way)
    near.allocate("n", 2, 640, 8, blocks=True, seed=1)
    near.allocate("scratch", 2, 640, 8, blocks=True)
    to = Far(far, way["accessible"], "f", 2, 640, 4, blocks=True, model=1, seed=2)
    second = Far(far, way["accessible"], "g", 2, 640, 4, blocks=True, model=2, seed=3)
    seen: list[Any] = []

    class Model(Steps):
        def synchronize_layer(self, layer_index: int, timeout_in_millis: Optional[int]) -> bool:  # noqa: ARG002
            if layer_index == 1:
                near.copy_blocks("scratch", [(0, 1)])
                near.pull_blocks(by_blocks(2, 2), "scratch", [0], [0])
                seen.append(near.stats()["links"])
                seen.append(send(near, "n", [second.to(range(4))], src=[0, 1], dst=[0, 1]))
                seen.append(task.synchronize(0).name)
            return True

    ready = threading.Event()

    class Gate(Model):
        def synchronize_layer(self, layer_index: int, timeout_in_millis: Optional[int]) -> bool:
            assert ready.wait(LIMIT)
            return super().synchronize_layer(layer_index, timeout_in_millis)

    task = launch(near, "n", [to.to(range(4))], Gate(), src=[0, 1], dst=[1, 0])
    ready.set()
    assert results(task) == [OK], task.errors()
    assert seen[1:] == [[OK], TIMEOUT]
    to.blocks(pattern(1, 8, 2, 640), range(4), 0, [(0, 1), (1, 0)])
    second.blocks(pattern(1, 8, 2, 640), range(4), 0, [(0, 0), (1, 1)])
    to.check()
    second.check()


@pytest.mark.parametrize("how", ["cancel", "finalize", "deallocate", "unlink"])
def test_a_synchronizer_that_ends_its_own_transfer(ends: Ends, how: str) -> None:
    near, far = ends.pair(llm__SyncKvCacheWaitTime=500)
    near.allocate("n", 1, 640, 8, seed=1)
    to = Far(far, False, "f", 1, 640, 4, seed=2)
    ready = threading.Event()
    calls = {
        "cancel": lambda: task.cancel(),  # noqa: PLW0108  (task comes later)
        "finalize": near.finalize,
        "deallocate": lambda: near.deallocate("n"),
        "unlink": lambda: near.unlink_clusters([far.at], 1000),
    }
    ends_with = {"cancel": "LLM_FAILED", "finalize": FINALIZED, "deallocate": OK, "unlink": UNLINKED}

    class Model(LayerSynchronizer):
        def synchronize_layer(self, layer_index: int, timeout_in_millis: Optional[int]) -> bool:  # noqa: ARG002
            assert ready.wait(LIMIT)
            if layer_index == 2:
                calls[how]()
            return True

    task = launch(near, "n", [to.to(range(4))], Model())
    ready.set()
    assert results(task) == [ends_with[how]]
    to.slot(pattern(1, 8, 1, 640), range(4 if how == "deallocate" else layers_done(task)[0]))
    to.check()


def test_one_synchronizer_for_several_transfers(ends: Ends) -> None:
    near, far = ends.pair()
    near.allocate("n", 8, 640, 8, seed=1)
    to = Far(far, False, "f", 8, 640, 4, seed=2)
    steps = Steps(allowed=0)
    tasks = [launch(near, "n", [to.to(range(4), row=row, slot=row)], steps) for row in range(8)]
    steps.allow()
    assert [results(task) for task in tasks] == [[OK]] * 8
    assert sorted(steps.layers) == sorted(list(range(4)) * 8)
    assert len(steps.threads) == 8
    for row in range(8):
        to.slot(pattern(1, 8, 8, 640), range(4), row=row, slot=row)
    to.check()


def test_what_is_changed_after_the_call_changes_nothing(ends: Ends) -> None:
    near, far = ends.pair()
    near.allocate("n", 4, 64, 8, blocks=True, seed=1)
    to = Far(far, False, "f", 4, 64, 4, blocks=True, seed=2)
    steps = Steps(allowed=1)
    config, src, dst = to.to(range(4)), [0, 1], [2, 3]
    configs = [config]
    task = launch(near, "n", configs, steps, src=src, dst=dst)
    steps.reached(1)
    config.src_layer_range, config.dst_addrs, config.dst_cluster_id = range(1), [1, 2], 9
    src[:], dst[:] = [3, 3, 3], []
    configs.clear()
    steps.allow()
    told = task.get_results(20_000)
    told.clear()
    assert results(task) == [OK]
    to.blocks(pattern(1, 8, 4, 64), range(4), 0, [(0, 2), (1, 3)])
    to.check()


def test_an_address_named_twice_gets_the_last_layer(ends: Ends) -> None:
    near, far = ends.pair()
    near.allocate("n", 1, 6400, 20, seed=1)
    to = Far(far, False, "f", 2, 6400, 1, seed=2)
    assert send(near, "n", [TransferConfig(2, to.bases * 10)]) == [OK]
    to.slot(pattern(1, 20, 1, 6400), range(9, 10))
    to.check()


def test_memory_that_is_not_open_to_peers_is_not_written(ends: Ends) -> None:
    for transport in ("auto", "tcp"):
        near, far = ends.pair(llm__LinkTransport=transport)
        near.allocate("n", 1, 64, 4, seed=1)
        far.register("closed", 1, 64, 4, accessible=False, seed=2)
        far.register("host", 1, 64, 4, host=True, accessible=False, seed=3)
        far.allocate("open", 1, 64, 4, seed=4)
        closed, host, good = (far.addresses(name) for name in ("closed", "host", "open"))
        task = launch(near, "n", [TransferConfig(2, each) for each in (closed, host, [*good[:3], closed[0]], good)])
        assert results(task) == [INVALID, INVALID, INVALID, OK]
        for name, seed in (("closed", 2), ("host", 3)):
            assert equal(far.read(name), pattern(seed, 4, 1, 64)), name
        assert equal(far.read("open"), pattern(1, 4, 1, 64))
        near.finalize()
        far.reset()


# -- finalize, fork, the end of a process --------------------------------------------------------------------------


def test_finalize_with_a_synchronizer_that_blocks(ends: Ends, way: dict[str, Any]) -> None:
    near, far = ends.pair(llm__SyncKvCacheWaitTime=300, **way)
    near.allocate("n", 1, 64, 8, seed=1)
    to = Far(far, way["accessible"], "f", 1, 64, 4, seed=2)
    steps = Steps(allowed=2)
    task = launch(near, "n", [to.to(range(4)), to.to(range(1)), to.to(range(3, 4))], steps)
    steps.reached(2)
    eventually(lambda: layers_done(task)[:2] == [2, 1], what="two layers")
    waiting: list[Any] = []
    thread = threading.Thread(target=lambda: waiting.append(task.synchronize()))
    thread.start()
    finalized = threading.Thread(target=near.finalize)
    finalized.start()
    finalized.join(LIMIT)
    assert not finalized.is_alive(), "finalize waits for a synchronizer that blocks"
    thread.join(LIMIT)
    assert waiting == [LLMStatusCode.LLM_ENGINE_FINALIZED]
    told = results(task, 0)
    assert told[:2] == [FINALIZED, OK]
    assert told[2] in (None, FINALIZED)
    assert task.done()
    assert not task.cancel()
    assert task.errors()[0].status_code.name == FINALIZED
    assert len(task.progress()) == 3
    steps.allow()
    to.slot(pattern(1, 8, 1, 64), range(2))
    to.check()
    near.init(options(**way))  # the process may have another engine
    linked(near, far)
    near.allocate("n", 1, 64, 8, seed=5)
    assert send(near, "n", [to.to(range(4))]) == [OK]
    assert results(task, 0) == told


def test_finalize_while_layers_flow_lets_them_arrive(ends: Ends, way: dict[str, Any]) -> None:
    near, far = ends.pair(**way)
    near.allocate("n", 1, 6400, 40, seed=1)
    to = Far(far, way["accessible"], "f", 1, 6400, 20, seed=2)

    class Model(Steps):
        def synchronize_layer(self, layer_index: int, timeout_in_millis: Optional[int]) -> bool:
            time.sleep(0.005)
            return super().synchronize_layer(layer_index, timeout_in_millis)

    task = launch(near, "n", [to.to(range(20))], Model())
    near.finalize()
    assert results(task) == [OK]
    to.slot(pattern(1, 40, 1, 6400), range(20))
    to.check()


PROGRAM = """
import os, sys, threading, time, signal
from peers import End, options
from layers import Steps, launch, results
from llm_datadist import (CacheKeyByIdAndIndex, LayerSynchronizer, TransferConfig, TransferWithCacheKeyConfig)

address, accessible, transport, cache, *addresses = sys.argv[1:]
end = End()
end.init(options(accessible=accessible == "True", llm__LinkTransport=transport), 2)
assert end.link_clusters([(1, address)])[0] == "LLM_SUCCESS"
end.allocate("n", 1, 6400, 20, seed=1)
if accessible == "True":
    config = TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(1, int(cache)), range(10), range(10))
else:
    config = TransferConfig(1, [int(each) for each in addresses])

class Model(LayerSynchronizer):
    def __init__(self, pause=0.005, ends=None):
        self.pause, self.ends = pause, ends
    def synchronize_layer(self, layer_index, timeout_in_millis):
        time.sleep(self.pause)
        if layer_index == 3 and self.ends:
            return self.ends()
        return True

def go(steps):
    return launch(end, "n", [config], steps)
"""


class Decoder:
    """This process as a decoder, for prefill programs that come to their end."""

    def __init__(self, ends: Ends, way: dict[str, Any]) -> None:
        """Open it; further options count for this end alone."""
        self.way = way
        self.near = ends.near(options(listen="127.0.0.1:0", **way))
        self.cache = self.near.allocate("f", 1, 6400, 20, seed=2)
        self.good = pattern(1, 20, 1, 6400)

    def start(self, code_: str) -> subprocess.Popen[str]:
        """Start a program."""
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("ASCEND_", "LLM_DATADIST_"))}
        given = [self.near.listening(), str(self.way["accessible"]), self.way["llm__LinkTransport"], str(self.cache)]
        return subprocess.Popen(  # noqa: S603
            [
                sys.executable,
                "-W",
                "error",
                "-c",
                PROGRAM + textwrap.dedent(code_),
                *given,
                *map(str, self.near.addresses("f")),
            ],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={**clean, "PYTHONPATH": str(Path(__file__).parent)},
        )

    def run(self, code_: str) -> tuple[int, str, str]:
        """Run a program to its end, which must come in time; status, output, errors."""
        program = self.start(code_)
        try:
            out, err = program.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            program.kill()
            out, err = program.communicate()
            raise AssertionError(f"the program never ended\n{out}\n{err}") from None
        return program.returncode, out, err

    def whole(self) -> bool:
        """Whether every byte of the transfer is here."""
        return equal(self.near.read("f"), self.good)


@pytest.mark.parametrize(
    ("ending", "status"),
    [("", 0), ("sys.exit(3)", 3), ("end = None; del task", 0), ("raise ValueError('end')", 1)],
    ids=["runs out", "exit", "dropped", "raises"],
)
def test_a_process_that_ends_with_a_transfer_under_way_delivers_it(
    ends: Ends, way: dict[str, Any], ending: str, status: int
) -> None:
    decoder = Decoder(ends, way)
    told, _, err = decoder.run(f"task = go(Model())\n{ending}\n")
    assert told == status, err
    assert err == "" or status == 1, err
    assert decoder.whole()


@pytest.mark.parametrize(
    ("code_", "said"),
    [
        ("tasks = [go(Model()) for _ in range(20)]", ""),
        ("task = go(Model())\nthreading.Thread(target=lambda: print(results(task))).start()", "['LLM_SUCCESS']"),
        ("task = go(Model())\nthreading.Thread(target=task.synchronize, daemon=True).start()", ""),
        ("threading.Thread(target=lambda: go(Model())).start()", ""),
        ("task = go(Model())\nend.finalize()", ""),
        (
            """
            import asyncio
            async def main():
                task = go(Model())
                async def wait():
                    return await task
                asyncio.ensure_future(wait())
                await asyncio.sleep(0.003)
            asyncio.run(main())
            """,
            "",
        ),
        (
            """
            from concurrent.futures import ThreadPoolExecutor
            crew = ThreadPoolExecutor(2)
            layers = [crew.submit(time.sleep, 0.01) for _ in range(10)]
            class Computed(LayerSynchronizer):
                def synchronize_layer(self, layer_index, timeout_in_millis):
                    layers[layer_index].result()
                    return True
            task = go(Computed())
            """,
            "",
        ),
    ],
    ids=["many", "waiting thread", "waiting daemon", "late thread", "finalize", "asyncio", "executor"],
)
def test_a_process_that_ends_in_other_ways_delivers_too(ends: Ends, code_: str, said: str) -> None:
    decoder = Decoder(ends, {"accessible": True, "llm__LinkTransport": "auto"})
    told, out, err = decoder.run(code_)
    assert (told, out.strip(), err) == (0, said, "")
    assert decoder.whole()


@pytest.mark.parametrize(
    "ends_how",
    [
        "lambda: threading.Event().wait()",
        "lambda: time.sleep(1000)",
        "lambda: threading.Lock().acquire() and threading.Condition().__enter__() and time.sleep(1000)",
        "lambda: os.read(os.pipe()[0], 1)",
    ],
    ids=["event", "sleep", "lock", "read"],
)
def test_a_process_ends_though_a_synchronizer_blocks_for_ever(ends: Ends, ends_how: str) -> None:
    decoder = Decoder(ends, {"accessible": False, "llm__LinkTransport": "auto"})
    told, out, err = decoder.run(f"task = go(Model(0, {ends_how}))\nprint(task.get_results(100))\n")
    assert told == 0, err
    assert "LLM_TIMEOUT" in out
    eventually(lambda: decoder.near.links() == [], what="the end of the link")
    got = decoder.near.read("f")
    for tensor in range(6):
        assert np.array_equal(got[tensor], decoder.good[tensor])
    decoder.near.deallocate("f")
    assert decoder.near.used() == 0


def test_a_process_ends_though_a_synchronizer_busily_computes(ends: Ends) -> None:
    decoder = Decoder(ends, {"accessible": True, "llm__LinkTransport": "auto"})
    told, _, err = decoder.run("""
        def compute():
            while True:
                sum(range(1000))
        task = go(Model(0, compute))
        task.get_results(100)
    """)
    assert told == 0, err


def test_a_synchronizer_that_ends_the_process(ends: Ends) -> None:
    """SystemExit in the method ends nobody's process, but os._exit and SIGTERM do."""
    decoder = Decoder(ends, {"accessible": False, "llm__LinkTransport": "auto"})
    told, out, err = decoder.run("task = go(Model(0, lambda: sys.exit(5)))\nprint(results(task))\n")
    assert told == 0, err
    assert "['LLM_TIMEOUT']" in out, "a line of the log may follow before the end of the line"
    assert out.count("synchronize_layer raised") == 1, "told once, with what was raised"
    told, _, _ = decoder.run("task = go(Model(0, lambda: os._exit(6)))\ntask.synchronize()\n")
    assert told == 6
    told, _, _ = decoder.run("task = go(Model(0, lambda: os.kill(os.getpid(), signal.SIGTERM)))\ntask.synchronize()\n")
    assert told == -signal.SIGTERM
    told, _, err = decoder.run("task = go(Model())\nassert results(task) == ['LLM_SUCCESS']\n")
    assert told == 0, err
    assert decoder.whole()


def test_fork_in_the_middle(ends: Ends, way: dict[str, Any]) -> None:
    """The child has no part in the transfer and hangs in nothing; the parent's goes on."""
    decoder = Decoder(ends, way)
    told, out, err = decoder.run("""
        steps = Steps(allowed=2)
        task = go(steps)
        steps.reached(2)
        import warnings
        warnings.simplefilter("ignore")
        child = os.fork()
        if child == 0:
            def tries(call):
                try:
                    return call()
                except Exception as error:
                    return type(error).__name__
            for call in (lambda: task.synchronize(50), lambda: task.get_results(50), task.done, task.progress,
                         task.errors, lambda: go(Steps()), task.cancel):
                print(tries(call))
            sys.stdout.flush()
            sys.exit(0)
        for _ in range(2000):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                break
            time.sleep(0.005)
        else:
            os.kill(child, signal.SIGKILL)
            print("CHILD HANGS")
        print("child", os.waitstatus_to_exitcode(status))
        steps.allow()
        print(results(task))
    """)
    assert told == 0, out + err
    assert "CHILD HANGS" not in out
    assert "child 0" in out, out + err
    assert "LLM_SUCCESS" not in out.split("child 0")[0], out
    assert "['LLM_SUCCESS']" in out, out + err
    assert decoder.whole()


def test_a_child_that_forked_in_the_middle_and_outlives_its_parent(ends: Ends) -> None:
    decoder = Decoder(ends, {"accessible": False, "llm__LinkTransport": "auto"})
    told, _, err = decoder.run("""
        import warnings
        warnings.simplefilter("ignore")
        steps = Steps(allowed=2)
        task = go(steps)
        steps.reached(2)
        if os.fork() == 0:
            os.close(1), os.close(2)
            time.sleep(2)
            os._exit(0)
        steps.allow()
    """)
    assert told == 0, err
    eventually(decoder.whole, what="the bytes")
    eventually(lambda: decoder.near.links() == [], what="the end of the link")


def test_ctrl_c_ends_a_program_that_waits(ends: Ends) -> None:
    decoder = Decoder(ends, {"accessible": False, "llm__LinkTransport": "auto"})
    program = decoder.start("""
        task = go(Model(0, lambda: threading.Event().wait()))
        print("waiting", flush=True)
        task.synchronize()
    """)
    assert program.stdout is not None
    assert program.stdout.readline() == "waiting\n"
    time.sleep(0.1)
    program.send_signal(signal.SIGINT)
    try:
        _, err = program.communicate(timeout=LIMIT)
    finally:
        program.kill()
    assert program.returncode in (-signal.SIGINT, 130), program.returncode
    assert "KeyboardInterrupt" in err


def test_a_prefill_that_is_killed_holds_nothing_of_the_decoder(ends: Ends, way: dict[str, Any]) -> None:
    decoder = Decoder(ends, way)
    near = decoder.near
    near.allocate("g", 1, 6400, 20, seed=3)
    chance = random.Random(1)  # noqa: S311
    for number in range(SOAK or (10 if THOROUGH else 2)):
        program = decoder.start("""
            print("flows", flush=True)
            while True:
                task = go(Model(0))
                task.synchronize()
        """)
        assert program.stdout is not None
        assert program.stdout.readline() == "flows\n"
        time.sleep(0.05 + chance.random() * 0.02)
        program.kill()
        program.communicate()
        eventually(lambda: near.links() == [], what="the end of the link")
        near.copy_cache("f", "g")
        assert equal(near.read("f"), pattern(3, 20, 1, 6400)), number
        time.sleep(0.05)
        assert equal(near.read("f"), pattern(3, 20, 1, 6400)), "the dead write"
    told, _, err = decoder.run("assert results(go(Model())) == ['LLM_SUCCESS']")
    assert told == 0, err
    assert decoder.whole()
    near.deallocate("f")
    near.deallocate("g")
    assert near.used() == 0


def test_a_prefill_that_stood_still_does_not_write_where_others_live_now(ends: Ends, way: dict[str, Any]) -> None:
    """It is stopped with a layer on the way; the link breaks, the memory is given to others, then it goes on."""
    quick = {"llm__LinkHeartbeat": 100, "llm__LinkSilence": 400, "llm__SyncKvCacheWaitTime": 2000}
    decoder = Decoder(ends, {**way, **quick})
    near = decoder.near
    chance = random.Random(1)  # noqa: S311
    program = decoder.start("""
        end.allocate("big", 1, 6400, 20, seed=1)
        print("flows", flush=True)
        while True:
            task = go(Model(0))
            task.synchronize()
    """)
    assert program.stdout is not None
    assert program.stdout.readline() == "flows\n"
    try:
        time.sleep(0.05 + chance.random() * 0.02)
        program.send_signal(signal.SIGSTOP)
        ended(near, 2)
        near.deallocate("f")
        near.allocate("g", 1, 6400, 20, seed=3)
        near.allocate("h", 1, 6400, 20, seed=4)
        program.send_signal(signal.SIGCONT)
        time.sleep(0.3)
        assert equal(near.read("g"), pattern(3, 20, 1, 6400)), "the late prefill wrote"
        assert equal(near.read("h"), pattern(4, 20, 1, 6400)), "the late prefill wrote"
    finally:
        program.kill()
        program.communicate()
    near.deallocate("g")
    near.deallocate("h")
    eventually(lambda: near.used() == 0, what="the memory")


def test_a_link_that_is_ended_by_force_with_a_layer_on_the_wire(ends: Ends, way: dict[str, Any]) -> None:
    near, far = ends.pair(pool=8 << 20, llm__SyncKvCacheWaitTime=15000, llm__LinkSilence=60000, **way)
    near.allocate("n", 1, 400_000, 6, seed=1)
    to = Far(far, way["accessible"], "f", 1, 400_000, 3, seed=2)
    assert send(near, "n", [to.to(range(1))]) == [OK]
    steps = Steps(allowed=1)
    far.stop()
    try:
        task = launch(near, "n", [to.to(range(3))], steps)
        steps.reached(1)
        near.unlink_clusters([far.at], 500, force=True)
        ended(near, 2)
        assert results(task, 8000) == [UNLINKED], "it need not wait for sync_kv_timeout"
    finally:
        steps.allow()
        far.go_on()
        far.spoiled = False
    far.unlink_clusters([(1, None)], 1000, force=True)
    linked(near, far)
    far.fill("f", 2)
    assert send(near, "n", [to.to(range(1, 3), 1)]) == [OK]
    to.twin = pattern(2, 6, 1, 400_000)
    to.slot(pattern(1, 6, 1, 400_000), range(1, 3), 1)
    far.rest(0.1)
    to.check("a leftover of the first transfer was written")


def test_random_kills_of_decoders_in_the_middle(ends: Ends, way: dict[str, Any]) -> None:
    settings = options(pool=8 << 20, llm__SyncKvCacheWaitTime=5000, **way)
    steady = ends.peer(settings, cluster=3)
    near = ends.near(settings)
    linked(near, steady)
    layers, size = 8, 40_000
    near.allocate("n", 1, size, 2 * layers, seed=1)
    safe = Far(steady, way["accessible"], "f", 1, size, layers, seed=2)
    chance = random.Random(2)  # noqa: S311
    for _ in range(SOAK or 12):
        victim = ends.peer(settings, cluster=2)
        eventually(lambda victim=victim: near.link_clusters([victim.at])[1][0] == OK, what="the link")
        to = Far(victim, way["accessible"], "f", 1, size, layers)
        steady.fill("f", 2)
        safe.twin = pattern(2, 2 * layers, 1, size)
        killer = threading.Timer(chance.random() * 0.004, os.kill, (victim.process.pid, signal.SIGKILL))
        victim.spoiled = True
        killer.start()
        told = send(near, "n", [to.to(range(layers)), safe.to(range(layers))])
        killer.join()
        assert told[0] in (OK, UNLINKED), told
        assert told[1] == OK
        safe.slot(pattern(1, 2 * layers, 1, size), range(layers))
        safe.check()
        ended(near, 2)
        victim.kill()


def test_a_process_ends_though_its_decoder_stands_still(ends: Ends, way: dict[str, Any]) -> None:
    decoder = Decoder(ends, way)
    far = ends.peer(options(**way), cluster=1 + 8)
    cache = far.allocate("f", 1, 6400, 20, seed=2)
    program = decoder.start(f"""
        address, cache, addresses = {far.address!r}, {cache}, {far.addresses("f")}
        assert end.link_clusters([(9, address)])[0] == "LLM_SUCCESS"
        if accessible == "True":
            config = TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(9, cache), range(10), range(10))
        else:
            config = TransferConfig(9, addresses)
        steps = Steps(allowed=2)
        task = go(steps)
        steps.reached(2)
        print("flows", flush=True)
        sys.stdin.readline()
        steps.allow()
    """)
    assert program.stdout is not None
    assert program.stdout.readline() == "flows\n"
    far.stop()
    try:
        _, err = program.communicate("\n", timeout=LIMIT)
    finally:
        program.kill()
        far.go_on()
        far.spoiled = False
    assert program.returncode == 0, err
    eventually(lambda: far.links() == [], what="the end of the link")


def test_a_task_that_is_asked_after_the_engine_was_closed_at_exit(ends: Ends) -> None:
    decoder = Decoder(ends, {"accessible": False, "llm__LinkTransport": "auto"})
    told, out, err = decoder.run("""
        import atexit
        steps = Steps(allowed=2)
        task = go(steps)
        steps.reached(2)
        from llm_datadist import LLMDataDist
        def last():
            print(task.synchronize(5000).name, results(task), task.done(), task.cancel())
        import llm_datadist.datadist as module
        atexit.unregister(module._shutdown_handler)
        atexit.register(last)
        atexit.register(module._shutdown_handler)
    """)
    assert told == 0, err
    assert out.strip() == "LLM_ENGINE_FINALIZED ['LLM_ENGINE_FINALIZED'] True False", out
