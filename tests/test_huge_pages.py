"""Huge pages: requests of the engine, grants of the kernel, and merging in the background (DESIGN.md, "Huge pages").

Reserved huge pages need an administrator (`/proc/sys/vm/nr_hugepages`); without a reserve, their test is skipped. The
tests of merging are skipped if this kernel does not merge on request. Not for: speed.
"""

import ctypes
import mmap
import os
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest

from conftest import options, pool
from llm_datadist import CacheDesc, DataType, LLMException, Placement
from memory import LE, OOM, desc, tensors
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


def merged(end):
    """Bytes of each pool that the kernel merged into huge pages for the engine."""
    return {name: facts["merged_bytes"] for name, facts in end.stats()["pools"].items()}


def mergers():
    count = 0
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended meanwhile
            count += (task / "comm").read_text().strip() == "llm-merge"
    return count


# If the kernel finds pages in use, or has no huge page, the engine waits 10 s before the next attempt.
LIMIT_S = 300.0


def awaited(what, limit=LIMIT_S):
    """Whether `what()` becomes true within the limit."""
    until = time.monotonic() + limit
    while not what():
        if time.monotonic() > until:
            return False
        time.sleep(0.002)
    return True


def byte_blocks(manager, *shape):
    """A new blocks cache of one tensor, and its bytes."""
    cache = manager.allocate_blocks_cache(CacheDesc(1, list(shape), DataType.DT_UINT8))
    return manager.tensor_views(cache)[0].numpy()


def device(manager):
    return manager.stats()["pools"]["device"]


def test_what_was_granted_is_measured(start):
    manager = start(options(pool(8 << 20), pool(4 << 20))).cache_manager
    assert manager.huge_page_bytes() == {"device": 0, "host": 0}, "nothing is committed yet"
    byte_blocks(manager, 1, 8 << 20)[:] = 7
    facts, granted = device(manager), manager.huge_page_bytes()
    assert facts["huge_pages"] in ("reserved", "advised", "unavailable")
    assert facts["committed_bytes"] >= 8 << 20 or facts["huge_pages"] == "reserved"
    assert granted["device"] in range(0, (8 << 20) + 1, HUGE)
    assert granted["host"] == 0


@pytest.mark.skipif(free_reserve() < 8 << 20, reason="the kernel has no reserve of four huge pages of 2 MiB")
def test_a_reserve_that_is_large_enough_is_used(start):
    manager = start(options(pool(8 << 20), None)).cache_manager
    byte_blocks(manager, 1, 8 << 20)[:] = 7
    assert device(manager)["huge_pages"] == "reserved"
    assert manager.huge_page_bytes()["device"] == 8 << 20


def test_a_reserve_that_is_too_small_is_left_alone(start):
    before = free_reserve()
    manager = start(options(pool(before + (64 << 20)), None)).cache_manager
    byte_blocks(manager, 1, 4 << 20)[:] = 7
    assert device(manager)["huge_pages"] != "reserved"
    assert free_reserve() == before


@pytest.mark.parametrize("text", ["", "Auto", "merge-registered", "x" * 1000])
def test_init_refuses_other_words(text, start):
    with pytest.raises(LLMException) as caught:
        start({**options(), "llm.HugePages": text})
    LE.judge(caught.value)
    for part in ("huge_pages", f'"{text[:100]}', "auto or off or merge or merge_registered or eager"):
        assert part in str(caught.value)
    assert len(str(caught.value)) < 500


@needs_merging
def test_eager_pools_are_committed_and_merged_when_init_returns(start):
    manager = start(options(pool(8 << 20), pool(3 << 20), llm__HugePages="eager")).cache_manager
    whole_pages = {"device": 8 << 20, "host": 4 << 20}
    if device(manager)["huge_pages"] != "reserved":
        assert merged(manager) == whole_pages
    assert device(manager)["merge_errno"] is None
    assert manager.huge_page_bytes() == whole_pages
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
@pytest.mark.parametrize(
    ("word", "errno"), [("eager", 22), ("merge", 22), ("merge_registered", 22), ("auto", None), ("off", None)]
)
def test_a_kernel_that_refuses_is_no_error_and_says_so(word, errno, start):
    size = 80 << 20
    manager = start(options(pool(size, 16), pool(size, 16), llm__HugePages=word)).cache_manager
    made = [manager.allocate_blocks_cache(desc(80, 1 << 20, 1, where)) for where in (Placement.DEVICE, Placement.HOST)]
    (on_device,), (on_host,) = (tensors(cache) for cache in made)
    assert word != "eager" or device(manager)["committed_bytes"] == size
    on_device[:] = np.arange(80)[:, None]
    for _ in range(2):
        manager.swap_blocks(*made, {block: 79 - block for block in range(80)})
    assert (on_host == np.arange(79, -1, -1)[:, None]).all()
    assert awaited(lambda: [facts["merge_errno"] for facts in manager.stats()["pools"].values()] == [errno] * 2)
    assert merged(manager) == manager.huge_page_bytes() == {"device": 0, "host": 0}


def half_used(manager, size):
    """Write the first half of a new cache, then allocate another one, which triggers the search for pages to merge."""
    view = byte_blocks(manager, 2, size // 2)
    view[0] = 7
    manager.allocate_blocks_cache(CacheDesc(1, [1, size], DataType.DT_UINT8))
    return view


@needs_merging
@pytest.mark.parametrize("word", [None, "auto", "off", "merge", "merge_registered"])
def test_what_is_used_is_merged_in_the_background_where_asked_and_nothing_else(word, start):
    extra = {} if word is None else {"llm__HugePages": word}
    manager = start(options(pool(128 << 20), pool(8 << 20), **extra)).cache_manager
    view = half_used(manager, 64 << 20)
    wanted = 32 << 20 if word in ("merge", "merge_registered") else 0
    assert wanted or mergers() == 0, "by default nothing works in the background"
    assert awaited(lambda: merged(manager)["device"] == wanted), merged(manager)
    assert awaited(lambda: mergers() == 0), "the thread ends when there is nothing left"
    assert merged(manager) == {"device": wanted, "host": 0}
    committed = {name: facts["committed_bytes"] for name, facts in manager.stats()["pools"].items()}
    assert committed == {"device": 32 << 20, "host": 0}, "what nobody touched stays uncommitted"
    assert manager.huge_page_bytes()["device"] == wanted
    assert (view[0] == 7).all()
    assert not view[1].any()
    # Idle: no thread, no CPU.
    before = time.process_time()
    time.sleep(0.5)
    assert time.process_time() - before < 0.1
    assert mergers() == 0


@needs_merging
def test_transfers_between_processes_go_on_while_both_merge(transport, ends):
    rows, row_bytes = 768, 32 << 10  # 48 MiB in each of two processes
    given = {"accessible": True, "pool": 112 << 20, "llm__LinkTransport": transport, "llm__HugePages": "merge"}
    peer, near = ends.peer(peer_options(**given)), ends.near(peer_options(**given))
    key, every = by_blocks(2), list(range(rows))
    near.allocate("c", rows, row_bytes, blocks=True, seed=1)
    peer.allocate("c", rows, row_bytes, blocks=True, keys=[key], seed=2)
    ours, theirs = (np.stack(pattern(seed, 2, rows, row_bytes)) for seed in (1, 2))
    linked(near, peer)  # starts merging on both sides, with shared memory
    chance, done, until = np.random.default_rng(7), 0, time.monotonic() + LIMIT_S
    while done < 8 or (transport == "auto" and min(merged(end)["device"] for end in (near, peer)) < 48 << 20):
        assert time.monotonic() < until, (merged(near), merged(peer))
        take, into, give, onto, spare = (chance.permutation(rows)[:96] for _ in range(5))
        near.pull_blocks(key, "c", take.tolist(), into.tolist())
        ours[:, into] = theirs[:, take]
        near.push_blocks(key, "c", give.tolist(), onto.tolist())
        theirs[:, onto] = ours[:, give]
        near.copy_blocks("c", list(zip(spare[:48].tolist(), spare[48:].tolist())))
        ours[:, spare[48:]] = ours[:, spare[:48]]
        done += 1
    assert equal(near.read("c"), list(ours)), f"after {done} rounds"
    near.allocate("all", rows, row_bytes, blocks=True)
    near.pull_blocks(key, "all", every, every)
    assert equal(near.read("all"), list(theirs)), f"after {done} rounds"


@needs_merging
@pytest.mark.parametrize(
    ("word", "transport"),
    [*((word, "auto") for word in ("merge_registered", "merge", "auto", "off")), ("merge_registered", "tcp")],
)
def test_registered_memory_is_merged_where_asked_once_a_peer_reads_it_through_the_kernel(word, transport, ends):
    rows, row_bytes, key = 24, 512 << 10, by_blocks(2)
    given = peer_options(accessible=True, llm__LinkTransport=transport, llm__HugePages=word)
    near, peer = ends.near(given), ends.peer(given)
    for end, keys, seed in ((near, [], 2), (peer, [key], 1)):
        # The kernel refuses a huge page that spans two mappings. Memory from the heap may span two.
        end.register("c", rows, row_bytes, 1, blocks=True, keys=keys, seed=seed, mapped=True)
        end.register("spare", 2, row_bytes, 1, blocks=True)
    linked(near, peer)
    ours, theirs = (pattern(seed, 1, rows, row_bytes)[0] for seed in (2, 1))

    def merged_bytes(end):
        return end.stats()["registered_merged_bytes"]

    def check_merged(end, other):
        wanted = 0
        if word == "merge_registered" and transport == "auto":  # the whole huge pages inside the tensor
            (start,) = end.addresses("c")
            wanted = (start + rows * row_bytes) // HUGE * HUGE - -(-start // HUGE) * HUGE
        before = merged_bytes(other)
        until = time.monotonic() + LIMIT_S
        while not awaited(lambda: merged_bytes(end) >= wanted, 1.0):
            assert time.monotonic() < until, (wanted, end.stats())
            # The kernel may refuse for a while. Copies prompt the merger to check again.
            for _ in range((64 << 20) // row_bytes):
                end.copy_blocks("spare", [(0, 1)])
        assert merged_bytes(end) == wanted
        assert merged_bytes(other) == before, "what nobody reads is left alone"

    assert (merged_bytes(near), merged_bytes(peer)) == (0, 0), "nobody read it"
    near.pull_blocks(key, "c", [3, 1], [0, 7])
    ours[[0, 7]] = theirs[[3, 1]]
    check_merged(peer, near)
    near.push_blocks(key, "c", [5, 4, 2], [9, 8, 1], tensor_num_per_layer=1)
    theirs[[9, 8, 1]] = ours[[5, 4, 2]]
    check_merged(near, peer)
    near.pull_blocks(key, "c", list(range(12, 24)), list(range(12)))
    ours[:12] = theirs[12:24]
    assert equal(near.read("c"), [ours])
    assert equal(peer.read("c"), [theirs])
    near.unregister("c")
    peer.unregister("c")
