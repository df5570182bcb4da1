"""Memory of long lists: the library's own allocator keeps it, and the `malloc` of the process is not changed.

Not for: the allocator itself (`crates/embed/tests/list_allocator.rs`).
"""

from __future__ import annotations

import ctypes
import json

import pytest

from memory import run_engine

OPENED = """
import json, resource

def opened():
    pool = json.dumps({"memory_size": 8 << 20, "page_shift": 16})
    dist, _ = engine(MemPoolConfig=pool, HostMemPoolConfig=pool, SyncKvCacheWaitTime="60000")
    return dist
"""

# Whether a block just below 2 MiB has its own mapping, as in glibc unless its mmap threshold was raised. The block is
# not freed, because that would raise the threshold.
MALLOC = """
class Facts(ctypes.Structure):
    _fields_ = [(name, ctypes.c_size_t) for name in "arena ordblks smblks hblks hblkhd a b c d e".split()]

libc = ctypes.CDLL(None)
libc.mallinfo2.restype = Facts
libc.malloc.restype = ctypes.c_void_p

def mapped():
    before = libc.mallinfo2().hblks
    assert libc.malloc(ctypes.c_size_t((2 << 20) - 65536))
    return libc.mallinfo2().hblks - before

first = mapped()
dist = opened()
print(json.dumps([first, mapped()]))
dist.finalize()
"""

# Page faults of calls with 32,768 blocks, after the first calls have touched the memory.
FAULTS = """
dist = opened()
manager = dist.cache_manager
made = [
    manager.allocate_blocks_cache(CacheDesc(1, [65536, 64], DataType.DT_UINT8, where))
    for where in (Placement.DEVICE, Placement.HOST)
]
blocks = {block: block * 40503 % 65536 for block in range(0, 65536, 2)}
counts = []
for _ in range(12):
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    manager.swap_blocks(made[0], made[1], blocks)
    counts.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(json.dumps(counts[6:]))
dist.finalize()
"""


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="this C library does not tell about its malloc")
def test_opening_an_engine_leaves_malloc_alone() -> None:
    before, after = json.loads(run_engine(OPENED + MALLOC))
    assert before == 1, "nobody raised the limits before"
    assert after == 1


def test_lists_are_made_of_memory_that_was_used_before() -> None:
    counts = json.loads(run_engine(OPENED + FAULTS))
    # One list has 128 pages.
    assert min(counts) < 64, counts
