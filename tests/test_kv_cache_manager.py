"""`KvCacheManager` and `KvCache` in one process: the table of contract §9.1, roles, codes, lifetimes, the pool.

Not for: what needs a second process (`test_kv_mode_peers.py`).
"""

from __future__ import annotations

import copy
import gc
import json
import threading
from typing import Any, Callable

import numpy as np
import pytest

from aarch64.probe import limits_address_space
from emulation import needs
from kv_caches import cpu, desc, table
from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    DataType,
    KvCache,
    KvCacheManager,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    Tensor,
)
from memory import AE, GONE, LE, TE, UINT64_MAX, VE, at, contents, fill, in_fresh_process, raising, run_fresh, same
from mistakes import coded, fails
from peers import kv_options as options

FINALIZED = coded(LLMStatusCode.LLM_ENGINE_FINALIZED)
DEVICE_OOM = coded(LLMStatusCode.LLM_DEVICE_OUT_OF_MEMORY)
PAGE = 1 << 16
NO_POOL = {"ge.exec.deviceId": "0"}


@pytest.fixture
def begin(start: Callable[..., LLMDataDist]) -> Callable[..., LLMDataDist]:
    """Like `start`, in the mode of the `KvCacheManager`."""

    def in_mode(role: LLMRole = LLMRole.PROMPT, settings: Any = None, cluster: int = 0) -> LLMDataDist:
        return start(options() if settings is None else settings, cluster, role)

    return in_mode


@pytest.fixture
def prompt(begin: Callable[..., LLMDataDist]) -> KvCacheManager:
    return begin().kv_cache_manager


def test_the_property_follows_the_mode(begin: Callable[..., LLMDataDist]) -> None:
    dist = LLMDataDist(LLMRole.PROMPT, 1)
    with pytest.raises(RuntimeError, match="not initialized"):
        _ = dist.kv_cache_manager
    dist = begin()
    manager = dist.kv_cache_manager
    assert manager is dist.kv_cache_manager
    assert manager is dist._kv_cache_manager
    assert isinstance(manager, KvCacheManager)
    assert manager.is_initialized()
    fails(lambda: dist.cache_manager, LE, "EnableCacheManager")
    dist.finalize()
    dist.init(options())
    assert dist.kv_cache_manager is not manager
    assert not manager.is_initialized()
    dist.finalize()
    dist.init({"llm.EnableCacheManager": "1"})
    fails(lambda: dist.kv_cache_manager, LE)


def test_the_constructor_takes_an_engine_and_a_role(begin: Callable[..., LLMDataDist]) -> None:
    native = begin()._llm_datadist
    for given in ((native, None), (native, 1), (native, "PROMPT"), (object(), LLMRole.PROMPT)):
        fails(lambda given=given: KvCacheManager(*given), TE)  # type: ignore[misc]
    assert KvCacheManager(native, LLMRole.MIX).is_initialized()


ARGUMENTS = {
    "allocate_cache": 2, "allocate_blocks_cache": 2, "deallocate_cache": 1, "remove_cache_key": 1, "pull_cache": 2,
    "pull_blocks": 4, "copy_cache": 2, "copy_blocks": 2, "swap_blocks": 3, "get_cache_tensors": 2,
    "transfer_cache_async": 3,
}  # fmt: skip


def calls_of(manager: KvCacheManager) -> dict[str, Callable[[], Any]]:
    """Every method, with arguments that are all wrong."""
    return {
        name: lambda name=name, count=count: getattr(manager, name)(*["x"] * count) for name, count in ARGUMENTS.items()
    }


def test_an_expired_manager_says_so_first(begin: Callable[..., LLMDataDist]) -> None:
    dist = begin(LLMRole.MIX)
    manager = dist.kv_cache_manager
    for call in calls_of(manager).values():
        with pytest.raises((TypeError, LLMException)):
            call()
    dist.finalize()
    for later in (False, True):
        if later:
            begin()  # a later engine is out of its reach
        for call in calls_of(manager).values():
            fails(call, FINALIZED)


@pytest.mark.parametrize("role", LLMRole)
def test_who_may_call_what(begin: Callable[..., LLMDataDist], role: LLMRole) -> None:
    manager = begin(role).kv_cache_manager
    # The role is checked before any argument.
    only = {
        "remove_cache_key": LLMRole.PROMPT,
        "transfer_cache_async": LLMRole.PROMPT,
        "pull_cache": LLMRole.DECODER,
        "pull_blocks": LLMRole.DECODER,
    }
    for name, call in calls_of(manager).items():
        fails(call, LE if only.get(name, role) != role else TE)
    calls: list[tuple[Callable[[], KvCache], bool]] = [
        (lambda: manager.allocate_cache(desc(), [CacheKey(0, 1)]), role == LLMRole.PROMPT),
        (lambda: manager.allocate_cache(desc(), [CacheKey(0, UINT64_MAX)]), role == LLMRole.PROMPT),
        (lambda: manager.allocate_blocks_cache(desc(), BlocksCacheKey(0, 1)), role != LLMRole.DECODER),
        (lambda: manager.allocate_cache(desc()), True),
        (lambda: manager.allocate_blocks_cache(desc()), True),
    ]
    for call, allowed in calls:
        if allowed:
            assert call().cache_id > 0
        else:
            fails(call, LE)


def test_roles_follow_switch_role(begin: Callable[..., LLMDataDist]) -> None:
    dist = begin(LLMRole.DECODER, options(llm__EnableSwitchRole="1"))
    manager = dist.kv_cache_manager
    fails(lambda: manager.remove_cache_key(CacheKey(0, 1)), LE)
    for options_ in (None, {}):
        with raising(LE):  # LLM_PARAM_INVALID: no address to listen at
            dist.switch_role(LLMRole.PROMPT, options_)
    dist.switch_role(LLMRole.PROMPT, {"llm.listenIpInfo": "127.0.0.1:0"})
    manager.remove_cache_key(CacheKey(0, 1))
    manager.allocate_cache(desc(), [CacheKey(0, 1)])
    fails(lambda: manager.pull_cache(CacheKey(0, 1), manager.allocate_cache(desc())), LE)


def test_allocation(prompt: KvCacheManager) -> None:
    one = prompt.allocate_cache(desc(), [CacheKey(0, UINT64_MAX), CacheKey(0, 7)])
    two = prompt.allocate_blocks_cache(desc(8, 32, 3), BlocksCacheKey(0, 1))
    assert [cache.cache_id for cache in (one, two)] == [1, 2]
    assert [len(addrs) for cache in (one, two) for addrs in cache.per_device_tensor_addrs] == [2, 3]
    assert all(addr % PAGE == 0 for addr in one.per_device_tensor_addrs[0])
    assert repr(two) == str(two) == "KvCache(cache_id = 2, num_devices = 1)"
    assert one.cache_desc.num_tensors == 2
    assert not one.cache_desc._is_blocks
    fails(lambda: KvCache("1", desc(), [[1, 2]], None), TE)  # type: ignore[arg-type]
    fails(lambda: KvCache(2**63, desc(), [[1, 2]], None), VE)
    KvCache.__new__(KvCache)  # dropping a handle without __init__ raises nothing


def test_keys_and_codes(prompt: KvCacheManager) -> None:
    key, placeholder = CacheKey(0, 5, 1), CacheKey(0, UINT64_MAX)
    # Of equal keys the last takes effect; placeholders are skipped, any number of them.
    one = prompt.allocate_cache(desc(), [key, placeholder, placeholder, key])
    before = table(prompt)
    assert before[:2] == (1, 1)
    fails(lambda: prompt.allocate_cache(desc(), [CacheKey(9, 5, 1)]), LE)  # §17.3, the same in both modes
    blocks = prompt.allocate_blocks_cache(desc(), BlocksCacheKey(0, 3))
    fails(lambda: prompt.allocate_blocks_cache(desc(), BlocksCacheKey(1, 3)), LE)
    fails(lambda: prompt.allocate_cache(desc(rows=1), [CacheKey(0, 6), CacheKey(0, 7)]), LE)  # contract §17.7
    prompt.deallocate_cache(blocks)
    prompt.deallocate_cache(one)
    prompt.remove_cache_key(CacheKey(0, 5, 2))
    assert table(prompt) == before
    prompt.remove_cache_key(CacheKey(9, 5, 1))
    assert table(prompt) == (0, 0, 0)
    prompt.allocate_cache(desc(), [key, CacheKey(0, 2, prefix_id=4)])
    prompt.remove_cache_key(CacheKey(0, 9, prefix_id=4))
    assert table(prompt)[:2] == (1, 1)
    for wrong, expected in [(BlocksCacheKey(0), TE), (1, TE), (None, AE)]:
        fails(lambda wrong=wrong: prompt.remove_cache_key(wrong), expected)  # type: ignore[misc]


def test_deallocate_serves_both_kinds_and_what_is_missing(prompt: KvCacheManager) -> None:
    one, two = prompt.allocate_cache(desc()), prompt.allocate_blocks_cache(desc(), BlocksCacheKey(0))
    stranger = KvCache(77, desc(), [[1, 2]], prompt)
    for cache in (one, two, one, two, stranger):
        prompt.deallocate_cache(cache)
        assert cache.per_device_tensor_addrs == []
        assert str(cache).endswith("num_devices = 0)")
    assert table(prompt) == (0, 0, 0)
    for wrong, expected in [(1, TE), (None, AE), (Cache(1, desc(), [1, 2], None, False, False), TE), (cpu()[0], LE)]:
        fails(lambda wrong=wrong: prompt.deallocate_cache(wrong), expected)  # type: ignore[misc]


def test_copies(prompt: KvCacheManager) -> None:
    one, two = prompt.allocate_cache(desc()), prompt.allocate_cache(desc(3, 64))
    expected, source = fill(two, 1), fill(one, 2)
    prompt.copy_cache(two, one, 2, 1, 10, 20, req_id=5)
    prompt.copy_cache(dst=two, src=one, src_batch_index=3, offset=60)
    for to, from_ in zip(expected, source):
        to[2, 10:30] = from_[1, 10:30]
        to[0, 60:] = from_[3, 60:]
    assert same(contents(two), expected)
    # Slots of a continuous cache count as blocks, one pair after the other.
    for cache in (one, prompt.allocate_blocks_cache(desc())):
        expected = fill(cache, 3)
        prompt.copy_blocks(cache, {0: [1, 2], 1: [3]})
        for array in expected:
            array[1] = array[2] = array[0]
            array[3] = array[1]
        assert same(contents(cache), expected)
        prompt.copy_blocks(cache, {})


def test_get_cache_tensors(prompt: KvCacheManager) -> None:
    cache = prompt.allocate_cache(CacheDesc(3, (2, 5), DataType.DT_FLOAT))
    for index in range(3):
        (tensor,) = prompt.get_cache_tensors(cache, index)
        assert isinstance(tensor, Tensor)
        assert (tensor.tensor_desc.dtype, tensor.tensor_desc.shape) == (DataType.DT_FLOAT, [2, 5])
        tensor.numpy()[:] = index + 0.5
        tensor.numpy(copy=True)[:] = 0
        held = at(cache.per_device_tensor_addrs[0][index], 40).view(np.float32)
        assert held.tolist() == [index + 0.5] * 10
    wrong = [((1, "x"), TE), ((cache, "x"), TE), ((cache, 2**31), VE), ((cache, -1), LE), ((cache, 3), LE)]
    for args, expected in [*wrong, ((None, 0), AE)]:
        fails(lambda args=args: prompt.get_cache_tensors(*args), expected)  # type: ignore[misc]
    (first,) = prompt.get_cache_tensors(cache)
    prompt.deallocate_cache(cache)
    fails(lambda: prompt.get_cache_tensors(cache), GONE)
    # A tensor keeps its memory.
    assert table(prompt)[2] > 0
    assert first.numpy().tolist() == [[0.5] * 5] * 2
    del first, tensor
    gc.collect()
    assert table(prompt)[2] == 0
    handle, own = cpu()
    assert np.array_equal(prompt.get_cache_tensors(handle, 1)[0].numpy().view(np.uint8), own.arrays[1])


@pytest.mark.contract("19.kv-cache")
def test_a_handle_that_is_dropped_deallocates(prompt: KvCacheManager) -> None:
    cache = prompt.allocate_cache(desc(), [CacheKey(0, 1)])
    kept = prompt.allocate_blocks_cache(desc())
    again = cache
    del cache
    assert table(prompt)[:2] == (2, 1)
    assert again.cache_id == 1
    del again
    # By id it is gone, and its key still holds it.
    assert table(prompt)[:2] == (2, 1)
    prompt.remove_cache_key(CacheKey(0, 1))
    assert table(prompt)[:2] == (1, 0)
    del kept
    assert table(prompt) == (0, 0, 0)
    for _ in range(200):
        prompt.allocate_cache(desc())
    assert table(prompt) == (0, 0, 0)
    # In a cycle, from the collector, on another thread.
    cycle: list[Any] = [prompt.allocate_cache(desc())]
    cycle.append(cycle)
    del cycle
    assert table(prompt)[0] == 1
    collector = threading.Thread(target=gc.collect)
    collector.start()
    collector.join()
    assert table(prompt) == (0, 0, 0)


def test_a_handle_outlives_its_engine(begin: Callable[..., LLMDataDist]) -> None:
    dist = begin()
    old = dist.kv_cache_manager.allocate_cache(desc())
    dist.finalize()
    dist.init(options())
    new = dist.kv_cache_manager.allocate_cache(desc())
    assert old.cache_id == new.cache_id == 1
    with raising(GONE):
        dist.kv_cache_manager.copy_cache(old, new)
    del old
    gc.collect()
    assert table(dist.kv_cache_manager)[0] == 1
    # Dropping a handle that a program made does not deallocate the cache with the same id.
    stale = KvCache(1, desc(), [[1, 2]], None)
    with pytest.raises(TypeError):
        copy.deepcopy(new)
    del stale
    assert table(dist.kv_cache_manager)[0] == 1


EXIT = """
import os, sys
from llm_datadist import *
dist = LLMDataDist(LLMRole.PROMPT, 0)
dist.init({"ge.exec.deviceId": "0", "ge.flowGraphMemMaxSize": "2097152"})
manager = dist.kv_cache_manager
desc = CacheDesc(2, (4, 64), DataType.DT_UINT8)
cache = manager.allocate_cache(desc, [CacheKey(0, 1)])
"""


@pytest.mark.parametrize(
    "end",
    [
        "",
        "dist.finalize()",
        "cache.me = cache",
        "import builtins; builtins.kept = cache",
        "import atexit, llm_datadist; atexit.unregister(llm_datadist._run_if_loaded)",
        "LLMDataDist.llm_engine_instance = None; sys.modules.clear()",
        "del dist, manager",
        "sys.exit(0)",
    ],
)
@pytest.mark.parametrize("log", ["1", "3"])
def test_a_handle_at_the_end_of_the_interpreter(end: str, log: str) -> None:
    done = in_fresh_process(EXIT + end, ASCEND_GLOBAL_LOG_LEVEL=log)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_handle_in_a_forked_child() -> None:
    told = run_fresh(
        EXIT
        + """
import gc
child = os.fork()
if child == 0:
    del cache
    gc.collect()
    os._exit(5)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 5
child = os.fork()
if child == 0:
    sys.exit(6)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 6
# The parent's cache is as it was.
stats = dist.stats()["table"]
print(stats["caches"], stats["keys"], len(manager.get_cache_tensors(cache)))
"""
    )
    assert told.split() == ["1", "1", "1"]


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({}, "deviceId is missing: set LLMConfig.device_id"),
        ({}, "enable_cache_manager"),
        *[({"ge.exec.deviceId": bad}, "") for bad in ("0;1", "x", "")],
        *[({**NO_POOL, "llm.ClusterInfo": bad}, "") for bad in ("no JSON", '{"listen_ip_info": [{"ip": 16777343}]}')],
        *[({**NO_POOL, "llm.listenIpInfo": bad}, "") for bad in ("127.0.0.1:1;127.0.0.1:2", "127.0.0.1")],
    ],
)
def test_options_without_meaning(begin: Callable[..., LLMDataDist], given: dict[str, str], text: str) -> None:
    before = dict(given)
    fails(lambda: begin(settings=given), LE, text)
    assert given == before, "an init that failed leaves the caller's dict alone"


def test_an_exhausted_pool_is_waited_for(prompt: KvCacheManager) -> None:
    """Clients repeat the call as long as it returns this code."""
    large = CacheDesc(2, (4, PAGE * 3), DataType.DT_UINT8)
    one = prompt.allocate_cache(large, [CacheKey(0, 1)])
    before = table(prompt)
    fails(lambda: prompt.allocate_cache(large), DEVICE_OOM)
    assert table(prompt) == before
    prompt.deallocate_cache(one)
    fails(lambda: prompt.allocate_cache(large), DEVICE_OOM)
    prompt.remove_cache_key(CacheKey(0, 1))
    assert prompt.allocate_cache(large).cache_id > 1


def test_a_pool_of_no_memory_has_one_page(begin: Callable[..., LLMDataDist]) -> None:
    pools = begin(settings={**NO_POOL, "llm.MemoryUtilization": "0.0"}).stats()["pools"]
    assert {name: facts["capacity_bytes"] for name, facts in pools.items()} == {"device": PAGE}


@needs("RLIMIT_AS", limits_address_space)
def test_a_limited_address_space_bounds_the_pool() -> None:
    told = run_fresh(
        """
import resource
from llm_datadist import *
from pathlib import Path
taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (taken + (512 << 20), resource.RLIM_INFINITY))
dist = LLMDataDist(LLMRole.PROMPT, 0)
dist.init({"ge.exec.deviceId": "0"})
print(dist.stats()["pools"]["device"]["capacity_bytes"])
dist.finalize()
resource.setrlimit(resource.RLIMIT_FSIZE, (200 << 20, resource.RLIM_INFINITY))
dist.init({"ge.exec.deviceId": "0"})
print(dist.stats()["pools"]["device"]["capacity_bytes"])
"""
    )
    by_space, by_size = map(int, told.split())
    assert PAGE < by_space <= 256 << 20
    assert PAGE < by_size <= 100 << 20


def test_cluster_info_is_stored_back(begin: Callable[..., LLMDataDist]) -> None:
    given = options(llm__listenIpInfo="127.0.0.1:0")
    before = dict(given)
    dist = begin(settings=given, cluster=UINT64_MAX)
    info = json.loads(given.pop("llm.ClusterInfo"))
    assert given == before
    assert info["cluster_id"] == UINT64_MAX
    assert info["listen_ip_info"] == [{"ip": 16777343, "port": 0}]
    assert len(info["logic_device_id"]) == 1
    assert dist._cluster_config().rank_id_to_device_id == {0: 0}
    dist.finalize()
    decoder = begin(LLMRole.DECODER, given, 2)
    assert "listen_ip_info" not in json.loads(given["llm.ClusterInfo"])
    text = given["llm.ClusterInfo"]
    decoder.finalize()
    # The same dict again (contract §20, line 19); what is there stays as it is, and ids start over.
    decoder.init(given)
    assert given["llm.ClusterInfo"] == text
    assert decoder.kv_cache_manager.allocate_cache(desc()).cache_id == 1
    decoder.finalize()
    with_manager = {"llm.EnableCacheManager": "1", "ge.exec.deviceId": "0"}
    decoder.init(with_manager)
    assert set(with_manager) == {"llm.EnableCacheManager", "ge.exec.deviceId"}


def test_cluster_info_says_where_to_listen(begin: Callable[..., LLMDataDist]) -> None:
    info = {"cluster_id": 0, "listen_ip_info": [{"ip": 16777343, "port": 0}]}
    for role, expected in ((LLMRole.PROMPT, "127.0.0.1:"), (LLMRole.DECODER, "None")):
        with begin(role, options(llm__ClusterInfo=json.dumps(info))) as dist:
            assert str(dist.listen_ip_info).startswith(expected)
