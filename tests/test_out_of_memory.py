"""Calls under RLIMIT_AS: what gets no memory says LLM_OUT_OF_MEMORY, nothing has changed, and the process goes on.

Each call runs in a process of its own, under limits from a few MiB on upwards, so that each of its lists is in turn
the one that does not fit. Not for: every single allocation (`allocation_failures.rs` of the core's tests), or memory
control groups, in which allocations do not fail.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from peers import OK, Ends, Peer, by_blocks, code, linked, options

SHORT = "LLM_OUT_OF_MEMORY"
MIB = 1 << 20
# Room beyond what the process has before the call. The last is more than any of the calls takes.
ROOMS = [*range(1, 40, 4), *range(40, 160, 20), 300, 1500]

HEAD = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import numpy as np
from llm_datadist import CacheDesc, DataType, Placement
from peers import End, outcome
end = End()
end.init({{
    "llm.EnableCacheManager": "1", "ge.exec.deviceId": "0", "llm.SyncKvCacheWaitTime": "60000",
    "llm.MemPoolConfig": '{{"memory_size": 4294967296, "page_shift": 12}}',
}})
COUNT = 1_500_000
def cache(rows):
    end.allocate("c", rows, 4, 1, blocks=True, seed=rows)
    return end.held["c"].handle, end.held["c"].arrays[0]
def moved():
    return {{name: op["bytes"] for name, op in end.stats()["ops"].items()}}
def walk(call, unchanged):
    codes = []
    for room in {ROOMS}:
        before = moved()
        end.limit_memory(room << 20)
        code, text = outcome(call)
        end.limit_memory(None)
        codes.append(code)
        assert code in ("LLM_OUT_OF_MEMORY", "LLM_SUCCESS"), (room, code, text)
        if code == "LLM_OUT_OF_MEMORY":
            assert moved() == before, "bytes moved by a call that failed"
            unchanged()
        else:
            break
    assert codes[-1] == "LLM_SUCCESS" and len(codes) > 1, codes
    print(len(codes) - 1, "limits failed")
"""

COPY = """
handle, array = cache(2 * COUNT)
small, rows = cache(10)
end.manager.copy_blocks(small, {0: [1]})
order = np.random.default_rng(3).permutation(COUNT)
pairs = np.stack([order, COUNT + order[::-1]], axis=1).astype(np.int64)
expected = array.copy()
expected[pairs[:, 1]] = array[pairs[:, 0]]
before = array.copy()
def unchanged():
    assert np.array_equal(array, before)
    was = rows.copy()
    end.manager.copy_blocks(small, {2: [3], 4: [5]})
    was[3], was[5] = was[2], was[4]
    assert np.array_equal(rows, was)
walk(lambda: end.manager.copy_blocks(handle, pairs), unchanged)
assert np.array_equal(array, expected)
"""

# Lists in a dict: what Python holds is made before the limit.
LISTS = """
handle, array = cache(2 * COUNT)
end.manager.copy_blocks(handle, {0: [1]})
numbers = list(range(COUNT))
info = {COUNT + 7: numbers}
before = array.copy()
walk(lambda: end.manager.copy_blocks(handle, info), lambda: None if np.array_equal(array, before) else 1 / 0)
assert (array[:COUNT] == before[COUNT + 7]).all()
"""

REGISTER = """
memory = np.zeros(4, dtype=np.uint8)
desc = CacheDesc(2_000_000, [1, 4], DataType.DT_UINT8, Placement.DEVICE)
addrs = [int(memory.ctypes.data)] * 2_000_000
caches = lambda: end.stats()["table"]["caches"]
before, made = caches(), []
def unchanged():
    assert caches() == before
walk(lambda: made.append(end.manager.register_blocks_cache(desc, addrs)), unchanged)
assert caches() == before + 1
end.manager.unregister_cache(made[0].cache_id)
assert caches() == before
"""


@pytest.mark.parametrize("call", [COPY, LISTS, REGISTER], ids=["copy", "lists", "register"])
def test_a_call_without_memory_changes_nothing(call: str) -> None:
    run = subprocess.run(  # noqa: S603
        [sys.executable, "-c", HEAD + call], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "limits failed" in run.stdout


COUNT = 1_500_000


@pytest.mark.parametrize("way", ["push", "pull"])
def test_an_owner_without_memory_for_a_plan_says_so(ends: Ends, way: str) -> None:
    """Pairs to an owner whose address space is short of each of its lists in turn: it answers, and goes on."""
    settings = options(accessible=True, pool=64 << 20, llm__LinkTransport="tcp", llm__SyncKvCacheWaitTime=60000)
    # A process of its own, because the heap of one that served before may have room; and with one heap for all of its
    # threads, because each further one has 64 MiB of addresses before it is used.
    far = ends.adopt(Peer(environment={"MALLOC_ARENA_MAX": "1"})).open(settings)
    near = ends.near(settings)
    linked(near, far)
    far.allocate("f", COUNT, 4, 1, blocks=True, keys=[by_blocks(2)])
    near.allocate("n", COUNT, 4, 1, blocks=True, seed=1)
    order = np.random.default_rng(3).permutation(COUNT)
    call = near.push_blocks if way == "push" else near.pull_blocks
    codes = []
    for room in ROOMS:
        far.limit_memory(room << 20)
        codes.append(code(call, by_blocks(2), "n", order.tolist(), order[::-1].tolist(), n=1))
        far.limit_memory(None)
        if codes[-1] == OK:
            break
        # The link, and the stream, are as good as before.
        near.push_blocks(by_blocks(2), "n", [5], [5], n=1)
    assert len(codes) > 1
    assert codes == [SHORT] * (len(codes) - 1) + [OK]
