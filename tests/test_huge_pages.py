"""Huge pages: requests of the engine, grants of the kernel, and merging on request (DESIGN.md, "Huge pages").

Reserved huge pages need an administrator (`/proc/sys/vm/nr_hugepages`); without a reserve, their test is skipped. The
tests of merging are skipped if this kernel does not merge on request. Not for: speed.
"""

import ctypes
import mmap
import os
from pathlib import Path

import numpy as np
import pytest

from conftest import options, pool
from llm_datadist import CacheDesc, DataType, LLMException, Placement
from memory import OOM, desc, stats, tensors
from peers import by_blocks, equal, linked, pattern
from peers import options as peer_options

HUGE = 2 << 20
MAP_FIXED, MADV_COLLAPSE = 0x10, 25


def free_reserve():
    """Bytes of reserved huge pages of 2 MiB that are free."""
    facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    size = int(facts.get("Hugepagesize", "0 kB").split()[0]) << 10
    return int(facts.get("HugePages_Free", "0")) * size if size == HUGE else 0


def merges():
    """Whether this kernel merges shared memory into huge pages on request only. Tested without the engine."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/shmem_enabled")
    if not setting.is_file() or not any(word in setting.read_text() for word in ("[never]", "[advise]")):
        return False
    libc = ctypes.CDLL(None)
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, *[ctypes.c_int] * 3, ctypes.c_long]
    libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    held = libc.mmap(None, 2 * HUGE, mmap.PROT_READ, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS, -1, 0)
    start = held + -held % HUGE
    file = os.memfd_create("probe")
    os.ftruncate(file, HUGE)
    os.pwrite(file, b"x", 0)
    libc.mmap(start, HUGE, mmap.PROT_READ | mmap.PROT_WRITE, mmap.MAP_SHARED | MAP_FIXED, file, 0)
    os.close(file)
    done = libc.madvise(start, HUGE, MADV_COLLAPSE)
    libc.munmap(held, 2 * HUGE)
    return done == 0


needs_merging = pytest.mark.skipif(not merges(), reason="this kernel does not put memory into huge pages on request")


def huge_bytes():
    """Bytes of the pools of this process that are in huge pages, by the pool, as the kernel says."""
    found = {"device": 0, "host": 0}
    pool_of_mapping = None
    for line in Path("/proc/self/smaps").read_text(encoding="ascii").splitlines():
        name, *values = line.split()
        if not name.endswith(":"):
            pool_of_mapping = next((of for of in found if f"llm_datadist {of} pool" in line), None)
        elif pool_of_mapping and name in ("ShmemPmdMapped:", "FilePmdMapped:", "Shared_Hugetlb:", "Private_Hugetlb:"):
            found[pool_of_mapping] += int(values[0]) << 10
    return found


def merged(end):
    """Bytes of each pool that the kernel merged into huge pages for the engine."""
    return {name: facts["merged_bytes"] for name, facts in stats(end)["pools"].items()}


def byte_blocks(manager, *shape):
    """A new blocks cache of one tensor, and its bytes."""
    cache = manager.allocate_blocks_cache(CacheDesc(1, list(shape), DataType.DT_UINT8))
    return manager.tensor_views(cache)[0].numpy()


def device(manager):
    return stats(manager)["pools"]["device"]


def test_what_was_granted_is_measured(start):
    manager = start(options(pool(8 << 20), pool(4 << 20))).cache_manager
    assert huge_bytes() == {"device": 0, "host": 0}, "nothing is committed yet"
    byte_blocks(manager, 1, 8 << 20)[:] = 7
    facts, granted = device(manager), huge_bytes()
    assert facts["huge_pages"] in ("reserved", "advised", "unavailable")
    assert facts["committed_bytes"] >= 8 << 20 or facts["huge_pages"] == "reserved"
    assert granted["device"] in range(0, (8 << 20) + 1, HUGE)
    assert granted["host"] == 0


@pytest.mark.skipif(free_reserve() < 8 << 20, reason="the kernel has no reserve of four huge pages of 2 MiB")
def test_a_reserve_that_is_large_enough_is_used(start):
    manager = start(options(pool(8 << 20), None)).cache_manager
    byte_blocks(manager, 1, 8 << 20)[:] = 7
    assert device(manager)["huge_pages"] == "reserved"
    assert huge_bytes()["device"] == 8 << 20


def test_a_reserve_that_is_too_small_is_left_alone(start):
    before = free_reserve()
    manager = start(options(pool(before + (64 << 20)), None)).cache_manager
    byte_blocks(manager, 1, 4 << 20)[:] = 7
    assert device(manager)["huge_pages"] != "reserved"
    assert free_reserve() == before


@needs_merging
def test_eager_pools_are_committed_and_merged_when_init_returns(start):
    manager = start(options(pool(8 << 20), pool(3 << 20), llm__HugePages="eager")).cache_manager
    whole_pages = {"device": 8 << 20, "host": 4 << 20}
    if device(manager)["huge_pages"] != "reserved":
        assert merged(manager) == whole_pages
    assert device(manager)["merge_errno"] is None
    assert huge_bytes() == whole_pages
    assert not byte_blocks(manager, 8, 1 << 20).any(), "fresh memory is zeros"


def test_an_eager_pool_that_is_larger_than_the_memory_is_refused(start):
    with pytest.raises(LLMException) as caught:
        start(options(pool(1 << 46, 30), None, llm__HugePages="eager"))
    OOM.judge(caught.value)
    assert all(word in str(caught.value) for word in ("eager", f"pool_bytes={1 << 46}", "usable_bytes=")), caught.value
    manager = start(options(pool(1 << 46, 30), None)).cache_manager
    assert device(manager)["committed_bytes"] == 0, "address space, unless eager"


@pytest.fixture
def forbidden():
    """Huge pages are forbidden to the process, as in some containers."""
    allow = ctypes.CDLL(None).prctl
    assert allow(41, 1, 0, 0, 0) == 0  # PR_SET_THP_DISABLE
    yield
    assert allow(41, 0, 0, 0, 0) == 0


@needs_merging
@pytest.mark.usefixtures("forbidden")
@pytest.mark.parametrize(("word", "errno"), [("eager", 22), ("auto", None), ("off", None)])
def test_a_kernel_that_refuses_is_no_error_and_says_so(word, errno, start):
    size = 8 << 20
    manager = start(options(pool(size, 16), pool(size, 16), llm__HugePages=word)).cache_manager
    made = [manager.allocate_blocks_cache(desc(8, 1 << 20, 1, where)) for where in (Placement.DEVICE, Placement.HOST)]
    (on_device,), (on_host,) = (tensors(cache) for cache in made)
    assert word != "eager" or device(manager)["committed_bytes"] == size
    on_device[:] = np.arange(8)[:, None]
    manager.swap_blocks(*made, {block: 7 - block for block in range(8)})
    assert (on_host == np.arange(7, -1, -1)[:, None]).all()
    assert [facts["merge_errno"] for facts in stats(manager)["pools"].values()] == [errno] * 2
    assert merged(manager) == huge_bytes() == {"device": 0, "host": 0}


@needs_merging
@pytest.mark.parametrize("word", [None, "auto", "off"])
def test_engines_that_are_not_eager_merge_nothing(word, start):
    extra = {} if word is None else {"llm__HugePages": word}
    manager = start(options(pool(128 << 20), pool(8 << 20), **extra)).cache_manager
    byte_blocks(manager, 2, 32 << 20)[0] = 7
    byte_blocks(manager, 1, 64 << 20)
    assert merged(manager) == huge_bytes() == {"device": 0, "host": 0}
    committed = {name: facts["committed_bytes"] for name, facts in stats(manager)["pools"].items()}
    assert committed == {"device": 32 << 20, "host": 0}, "what nobody touched stays uncommitted"


@needs_merging
def test_transfers_between_eager_pools_of_two_processes(transport, ends):
    rows, row_bytes = 768, 32 << 10  # 48 MiB in each of two processes
    given = {"accessible": True, "pool": 112 << 20, "llm__LinkTransport": transport, "llm__HugePages": "eager"}
    peer, local = ends.peer(peer_options(**given)), ends.local(peer_options(**given))
    key, every = by_blocks(2), list(range(rows))
    local.allocate("c", rows, row_bytes, blocks=True, seed=1)
    peer.allocate("c", rows, row_bytes, blocks=True, keys=[key], seed=2)
    ours, theirs = (np.stack(pattern(seed, 2, rows, row_bytes)) for seed in (1, 2))
    linked(local, peer)
    chance = np.random.default_rng(7)
    for done in range(4):
        take, into, give, onto = (chance.permutation(rows)[:96] for _ in range(4))
        local.pull_blocks(key, "c", take.tolist(), into.tolist())
        ours[:, into] = theirs[:, take]
        local.push_blocks(key, "c", give.tolist(), onto.tolist())
        theirs[:, onto] = ours[:, give]
        assert equal(local.read("c"), list(ours)), f"after {done} rounds"
    local.allocate("all", rows, row_bytes, blocks=True)
    local.pull_blocks(key, "all", every, every)
    assert equal(local.read("all"), list(theirs))
