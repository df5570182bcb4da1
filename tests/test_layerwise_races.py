"""Layer-wise transfers at the same time as each other, as other calls, and as changes that the program makes."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest

from layers import FAILED, FINALIZED, Decoder, Steps, Transfer, finish, launch, layers_done, results
from llm_datadist import CacheKeyByIdAndIndex, TransferConfig, TransferWithCacheKeyConfig
from peers import OK, TIMEOUT, UNLINKED, Ends, by_blocks


def uniform(arrays: list[np.ndarray], allowed: set[int], where: str) -> None:
    """Check that all bytes of each row are equal."""
    for tensor, array in enumerate(arrays):
        for row, values in enumerate(map(np.unique, array)):
            assert len(values) == 1, f"{where}: tensor {tensor}, row {row} is mixed: {values}"
            assert int(values[0]) in allowed, (where, tensor, row, values)


def test_two_ends_send_each_other_the_same_rows(ends: Ends, way: dict[str, Any]) -> None:
    """The source of one transfer is the destination of the other. Every transfer ends, and no row is mixed."""
    decoder = Decoder(ends, way, llm__SyncKvCacheWaitTime=700)
    local = decoder.local
    local.paint("f", 8)
    program = decoder.start("""
        print(end.held["n"].handle.cache_id, *end.addresses("n"), flush=True)
        sys.stdin.readline()
        end.paint("n", 7)
        print(*[results(go(Steps()))[0] for _ in range(2)], flush=True)
        sys.stdin.readline()
        for array in end.read("n"):
            assert (array == array[0][0]).all(), "mixed"
    """)
    assert program.stdout is not None
    assert program.stdin is not None
    cache, *addresses = map(int, program.stdout.readline().split())
    config: Any = TransferConfig(2, addresses)
    if way["accessible"]:
        config = TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(2, cache), range(10), range(10))
    program.stdin.write("\n")
    program.stdin.flush()
    codes = [results(launch(local, "f", [config]))[0] for _ in range(2)]
    codes += program.stdout.readline().split()
    assert len(codes) == 4
    assert set(codes) <= {OK, TIMEOUT, UNLINKED}, codes
    uniform(local.read("f"), {7, 8}, "here")
    status, _, err = finish(program, "\n")
    assert status == 0, err


def test_a_synchronizer_that_uses_the_engine(ends: Ends, way: dict[str, Any]) -> None:
    """The synchronizer makes copies and pulls, reads statistics, starts another transfer, and uses its own task."""
    transfer = Transfer(ends, way, 2, 640, blocks=True)
    local, second = transfer.local, transfer.remote("g", blocks=True, model=2, seed=3)
    local.allocate("scratch", 2, 640, 8, blocks=True)
    seen: list[Any] = []
    started = threading.Event()

    class Model(Steps):
        def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:  # noqa: ARG002
            assert started.wait(20)
            if layer_index == 1:
                local.copy_blocks("scratch", [(0, 1)])
                local.pull_blocks(by_blocks(2, 2), "scratch", [0], [0])
                assert local.stats()["links"]
                seen.extend(transfer.send(None, [second.to(range(4))], src=[0, 1], dst=[0, 1]))
                seen.append(task.synchronize(0).name)
            return True

    task = transfer.start(Model(), src=[0, 1], dst=[1, 0])
    started.set()
    assert results(task) == [OK], task.errors()
    assert seen == [OK, TIMEOUT]
    transfer.to.blocks(transfer.source, range(4), 0, [(0, 1), (1, 0)])
    second.blocks(transfer.source, range(4), 0, [(0, 0), (1, 1)])
    transfer.to.check()
    second.check()


@pytest.mark.parametrize(
    ("how", "code"), [("cancel", FAILED), ("finalize", FINALIZED), ("deallocate", OK), ("unlink", UNLINKED)]
)
def test_a_synchronizer_that_ends_its_own_transfer(ends: Ends, how: str, code: str) -> None:
    transfer = Transfer(ends, None, 1, 640, llm__SyncKvCacheWaitTime=3000)
    local, started = transfer.local, threading.Event()

    class Model(Steps):
        def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:  # noqa: ARG002
            assert started.wait(20)
            if layer_index == 2:
                {
                    "cancel": lambda: task.cancel(),  # noqa: PLW0108  (task comes later)
                    "finalize": local.finalize,
                    "deallocate": lambda: local.deallocate("n"),
                    "unlink": lambda: local.unlink_clusters([transfer.peer.at], 1000),
                }[how]()
            return True

    task = transfer.start(Model())
    started.set()
    assert results(task) == [code]
    transfer.arrived(4 if code == OK else layers_done(task)[0])


def test_arguments_that_are_changed_after_the_call(ends: Ends) -> None:
    transfer = Transfer(ends, None, 4, 64, blocks=True)
    steps = Steps(allowed=1)
    config, src, dst = transfer.to.to(range(4)), [0, 1], [2, 3]
    configs = [config]
    task = transfer.start(steps, configs, src=src, dst=dst)
    steps.reached(1)
    config.src_layer_range, config.dst_addrs, config.dst_cluster_id = range(1), [1, 2], 9
    src[:], dst[:] = [3, 3, 3], []
    configs.clear()
    steps.allow()
    task.get_results(20_000).clear()
    assert results(task) == [OK]
    transfer.to.blocks(transfer.source, range(4), 0, [(0, 2), (1, 3)])
    transfer.to.check()
