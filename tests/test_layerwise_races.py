"""Layer-wise transfers beside other calls, at once and from many threads."""

from __future__ import annotations

import itertools
import threading
from typing import Any, Optional

import numpy as np
import pytest

from layers import FINALIZED, Decoder, Far, Steps, launch, layers_done, results, send
from llm_datadist import (
    CacheKeyByIdAndIndex,
    LayerSynchronizer,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from peers import (
    INVALID,
    LIMIT,
    OK,
    THOROUGH,
    TIMEOUT,
    UNLINKED,
    Ends,
    by_blocks,
    code,
    equal,
    eventually,
    linked,
    options,
    pattern,
)


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
