"""Layer-wise transfers at the same time as other calls, and as changes that the program makes.

Not for: pushes in both directions at once (`links/races.rs` of the core's tests).
"""

from __future__ import annotations

import threading
from typing import Any

import pytest

from layers import FAILED, FINALIZED, Steps, Transfer, layers_done, results
from peers import OK, TIMEOUT, UNLINKED, Ends, by_blocks


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
    """The source is deallocated too. Its memory stays until the transfer has ended."""
    transfer = Transfer(ends, None, 4, 64, blocks=True)
    steps = Steps(allowed=1)
    config, src, dst = transfer.to.to(range(4)), [0, 1], [2, 3]
    configs = [config]
    task = transfer.start(steps, configs, src=src, dst=dst)
    steps.reached(1)
    config.src_layer_range, config.dst_addrs, config.dst_cluster_id = range(1), [1, 2], 9
    src[:], dst[:] = [3, 3, 3], []
    configs.clear()
    transfer.local.deallocate("n")
    steps.allow()
    task.get_results(20_000).clear()
    assert results(task) == [OK]
    transfer.to.blocks(transfer.source, range(4), 0, [(0, 2), (1, 3)])
    transfer.to.check()
