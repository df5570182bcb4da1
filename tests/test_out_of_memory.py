"""Calls under RLIMIT_AS: what gets no memory says LLM_OUT_OF_MEMORY, nothing has changed, and the process goes on.

Each call runs in a process of its own, under limits from a few MiB on upwards, so that each of its lists is in turn
the one that does not fit. Not for: every single allocation (`short.rs` of the core's tests), or memory control
groups, in which allocations do not fail.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

from peers import OK, Ends, Peer, by_blocks, code, outcome

SHORT = "LLM_OUT_OF_MEMORY"
MIB = 1 << 20
# Room beyond what the process has before the call. The last is more than any of the calls takes.
ROOMS = [*range(1, 40, 4), *range(40, 160, 20), 300, 1500]

HEAD = f"""
import sys
sys.path.insert(0, {str(Path(__file__).parent)!r})
import numpy as np
from llm_datadist import CacheDesc, DataType, Placement
from peers import Held, End, by_blocks, outcome, _over
end = End()
end.init({{
    "llm.EnableCacheManager": "1", "ge.exec.deviceId": "0", "llm.SyncKvCacheWaitTime": "60000",
    "llm.MemPoolConfig": '{{"memory_size": 4294967296, "page_shift": 12}}',
    "llm.HostMemPoolConfig": '{{"memory_size": 67108864, "page_shift": 12}}',
}})
COUNT = 1_500_000
def cache(name, rows, host=False):
    desc = CacheDesc(1, [rows, 4], DataType.DT_UINT8, Placement.HOST if host else Placement.DEVICE)
    handle = end.manager.allocate_blocks_cache(desc)
    array = _over(handle.tensor_addrs[0], rows, 4)
    array[:] = np.random.default_rng(rows).integers(0, 256, (rows, 4), dtype=np.uint8)
    end.held[name] = Held(handle, [array])
    return handle, array
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
handle, array = cache("c", 2 * COUNT)
small, rows = cache("s", 10)
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
handle, array = cache("c", 2 * COUNT)
end.manager.copy_blocks(handle, {0: [1]})
numbers = list(range(COUNT))
info = {COUNT + 7: numbers}
before = array.copy()
walk(lambda: end.manager.copy_blocks(handle, info), lambda: None if np.array_equal(array, before) else 1 / 0)
assert (array[:COUNT] == before[COUNT + 7]).all()
"""

SWAP = """
handle, array = cache("c", COUNT)
other, there = cache("h", COUNT, host=True)
end.manager.swap_blocks(handle, other, {0: 0})
order = np.random.default_rng(3).permutation(COUNT)
pairs = np.stack([order, order[::-1]], axis=1).astype(np.int64)
expected = there.copy()
expected[pairs[:, 1]] = array[pairs[:, 0]]
before = there.copy()
def unchanged():
    assert np.array_equal(there, before)
walk(lambda: end.manager.swap_blocks(handle, other, pairs), unchanged)
assert np.array_equal(there, expected)
"""

ALLOCATE = """
desc = CacheDesc(900_000, [1, 4], DataType.DT_UINT8, Placement.DEVICE)
def state():
    stats = end.stats()
    return stats["table"]["caches"], stats["pools"]["device"]["used_bytes"]
before = state()
made = []
def unchanged():
    assert state() == before
walk(lambda: made.append(end.manager.allocate_blocks_cache(desc)), unchanged)
assert state() != before
end.manager.deallocate_blocks_cache(made[0])
assert state() == before
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


@pytest.mark.parametrize(
    "call", [COPY, LISTS, SWAP, ALLOCATE, REGISTER], ids=["copy", "lists", "swap", "allocate", "register"]
)
def test_a_call_without_memory_changes_nothing(call: str) -> None:
    run = subprocess.run(  # noqa: S603
        [sys.executable, "-c", HEAD + call], capture_output=True, text=True, timeout=300, check=False
    )
    assert run.returncode == 0, run.stdout + run.stderr
    assert "limits failed" in run.stdout


def settings(**more: str) -> dict[str, str]:
    """An engine with a pool of 64 MiB, through sockets."""
    made = {"llm.EnableCacheManager": "1", "ge.exec.deviceId": "0", "llm.EnableRemoteCacheAccessible": "1"}
    pool = '{"memory_size": 67108864, "page_shift": 12}'
    return {**made, "llm.MemPoolConfig": pool, "llm.LinkTransport": "tcp", "llm.SyncKvCacheWaitTime": "60000", **more}


COUNT = 1_500_000


@pytest.mark.parametrize("way", ["push", "pull"])
def test_an_owner_without_memory_for_a_plan_says_so(ends: Ends, way: str) -> None:
    """Pairs to an owner whose address space is short of each of its lists in turn: it answers, and goes on."""
    # A process of its own, because the heap of one that served before may have room; and with one heap for all of its
    # threads, because each further one has 64 MiB of addresses before it is used.
    far = ends.adopt(Peer(environment={"MALLOC_ARENA_MAX": "1"})).open(settings())
    near = ends.near(settings())
    assert near.link_clusters([far.at])[0] == OK
    far.allocate("f", COUNT, 4, 1, blocks=True, keys=[by_blocks(2)])
    near.allocate("n", COUNT, 4, 1, blocks=True, seed=1)
    order = np.random.default_rng(3).permutation(COUNT)
    src, dst = order.tolist(), order[::-1].tolist()
    call = near.push_blocks if way == "push" else near.pull_blocks
    codes = []
    for room in ROOMS:
        far.limit_memory(room << 20)
        told, text = outcome(lambda: call(by_blocks(2), "n", src, dst, n=1))
        far.limit_memory(None)
        codes.append(told)
        if told == OK:
            break
        assert told == SHORT, (room, told, text)
        # The link, and the stream, are as good as before.
        near.push_blocks(by_blocks(2), "n", [5], [5], n=1)
    assert codes[-1] == OK
    assert len(codes) > 1, codes


@pytest.mark.parametrize("way", ["push", "pull"])
def test_a_caller_without_memory_asks_again(ends: Ends, way: str) -> None:
    """The same with the caller short of memory: its calls fail before they ask, or with what they read."""
    far = ends.peer(settings(), cluster=1)
    near = ends.peer(settings(), cluster=2)
    assert near.link_clusters([far.at])[0] == OK
    far.allocate("f", COUNT, 4, 1, blocks=True, keys=[by_blocks(1)], seed=2)
    near.allocate("n", COUNT, 4, 1, blocks=True, seed=1)
    codes = near.short_of_memory(by_blocks(1), "n", COUNT, way, ROOMS)
    assert codes[-1] == OK
    assert set(codes[:-1]) == {SHORT}, codes
    assert code(near.push_blocks, by_blocks(1), "n", [5], [5], n=1) == OK
