"""The `malloc` of the process is not changed."""

from __future__ import annotations

import ctypes
import json

import pytest

from memory import run_fresh

ENGINE = """
import ctypes, json
from llm_datadist import LLMDataDist, LLMRole

def opened():
    dist = LLMDataDist(LLMRole.PROMPT, 1)
    pool = json.dumps({"memory_size": 8 << 20, "page_shift": 16})
    given = {"llm.EnableCacheManager": "1", "llm.MemPoolConfig": pool, "llm.HostMemPoolConfig": pool}
    dist.init({**given, "llm.SyncKvCacheWaitTime": "60000"})
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


@pytest.mark.skipif(not hasattr(ctypes.CDLL(None), "mallinfo2"), reason="this C library does not tell about its malloc")
def test_opening_an_engine_leaves_malloc_alone() -> None:
    before, after = json.loads(run_fresh(ENGINE + MALLOC))
    assert before == 1, "nobody raised the limits before"
    assert after == 1
