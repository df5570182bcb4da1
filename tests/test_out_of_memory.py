"""Calls under RLIMIT_AS: a call without memory fails with LLM_OUT_OF_MEMORY and changes nothing; the process continues.

Each call runs in its own process, under limits from a few MiB upwards, so that each of its lists is once the one that
does not fit. Not for: every single allocation (`allocation_failures.rs` of the core's tests), or memory control groups,
in which allocations do not fail.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from aarch64.probe import limits_address_space
from emulation import needs
from memory import run_fresh
from peers import OK, Ends, Peer, by_blocks, code, linked, options

pytestmark = needs("RLIMIT_AS", limits_address_space)

SHORT = "LLM_OUT_OF_MEMORY"
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
def walk(call, state):
    codes = []
    for room in {ROOMS}:
        before = state()
        end.limit_memory(room << 20)
        codes.append(outcome(call)[0])
        end.limit_memory(None)
        if codes[-1] == "LLM_SUCCESS":
            break
        assert np.array_equal(state(), before), "a call that failed changed something"
    assert set(codes) == {{"LLM_OUT_OF_MEMORY", "LLM_SUCCESS"}}, codes
    print(len(codes) - 1, "limits failed")
"""

# What Python holds is made before the limit.
COPY = """
COUNT = 1_500_000
end.allocate("c", 2 * COUNT, 4, 1, blocks=True, seed=1)
handle, array = end.held["c"].handle, end.held["c"].arrays[0]
end.manager.copy_blocks(handle, {0: [1]})
order = np.random.default_rng(3).permutation(COUNT)
info = {COUNT + 7: order.tolist()}
walk(lambda: end.manager.copy_blocks(handle, info), array.copy)
assert (array[:COUNT] == array[COUNT + 7]).all()
"""

REGISTER = """
memory = np.zeros(4, dtype=np.uint8)
desc = CacheDesc(2_000_000, [1, 4], DataType.DT_UINT8, Placement.DEVICE)
addrs = [int(memory.ctypes.data)] * 2_000_000
caches = lambda: end.stats()["table"]["caches"]
before, made = caches(), []
walk(lambda: made.append(end.manager.register_blocks_cache(desc, addrs)), caches)
assert caches() == before + 1
end.manager.unregister_cache(made[0].cache_id)
assert caches() == before
"""


@pytest.mark.parametrize("call", [COPY, REGISTER], ids=["copy", "register"])
def test_a_call_without_memory_changes_nothing(call: str) -> None:
    assert "limits failed" in run_fresh(HEAD + call)


COUNT = 1_500_000


@pytest.mark.parametrize("way", ["push", "pull"])
def test_an_owner_without_memory_for_a_plan_says_so(ends: Ends, way: str) -> None:
    """The owner lacks address space for each of its lists in turn. It answers with the code and continues."""
    settings = options(accessible=True, pool=64 << 20, llm__LinkTransport="tcp", llm__SyncKvCacheWaitTime=60000)
    # A new process, because the heap of a used one may have room. It has one heap for all threads, because each further
    # heap reserves 64 MiB of addresses.
    remote = ends.adopt(Peer(environment={"MALLOC_ARENA_MAX": "1"})).open(settings)
    local = ends.local(settings)
    linked(local, remote)
    remote.allocate("f", COUNT, 4, 1, blocks=True, keys=[by_blocks(2)], seed=2)
    local.allocate("n", COUNT, 4, 1, blocks=True, seed=1)
    order = np.random.default_rng(3).permutation(COUNT)
    call = local.push_blocks if way == "push" else local.pull_blocks
    codes = []
    for room in ROOMS:
        remote.limit_memory(room << 20)
        codes.append(code(call, by_blocks(2), "n", order.tolist(), order[::-1].tolist(), n=1))
        remote.limit_memory(None)
        if codes[-1] == OK:
            break
        # The link and the stream still work.
        local.push_blocks(by_blocks(2), "n", [5], [5], n=1)
    assert len(codes) > 1
    assert codes == [SHORT] * (len(codes) - 1) + [OK]
    ends_of = {"push": (local.read("n"), remote.read("f")), "pull": (remote.read("f"), local.read("n"))}
    (source,), (target,) = ends_of[way]
    assert (target[order[::-1]] == source[order]).all()
