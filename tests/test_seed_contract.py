"""Statements of the founding documents (contract §19) that no other test proves.

`test_seeds.py` says which statement of which page each test is for. Not for: every wrong argument
(`test_bad_input.py`).
"""

from __future__ import annotations

from typing import Any, Callable

import numpy as np
import pytest

from conftest import PAGE, options, pool
from ids import short
from llm_datadist import BlocksCacheKey, Cache, CacheKey, LLMConfig, LLMDataDist, LLMException, LLMRole, LLMStatusCode
from memory import LE, UINT64_MAX, UserTensors, desc, raising, used
from peers import (
    LIMIT,
    Ends,
    by_blocks,
    by_request,
    by_slot,
    code,
    equal,
    eventually,
    meanwhile,
    pattern,
    together,
)
from two_modes import CACHE_MANAGER, KV_OPTIONS, MODES, SUCCESS, Gate, Pair, config, sent, synchronizer

INVALID = LLMStatusCode.LLM_PARAM_INVALID


@pytest.fixture(params=MODES)
def pair(ends: Ends, request: pytest.FixtureRequest) -> Pair:
    return Pair(request.param, ends)


@pytest.mark.contract(
    "19.allocate-cache", "19.allocate-blocks-cache", "19.deallocate-cache", "19.remove-cache-key", "19.copy-cache",
    "19.copy-blocks", "19.swap-blocks", "19.deallocate-blocks-cache",
)  # fmt: skip
def test_what_calls_return(manager: Any) -> None:
    batch = manager.allocate_cache(desc(4, 100, 3), [CacheKey(1, 1)])
    blocks = manager.allocate_blocks_cache(desc(4, 100, 3), BlocksCacheKey(1))
    for cache in (batch, blocks):
        assert type(cache) is Cache
        assert len(cache.tensor_addrs) == len(set(cache.tensor_addrs)) == 3
        assert all(address % PAGE == 0 for address in cache.tensor_addrs)
        assert repr(cache.cache_desc) == repr(desc(4, 100, 3))
    assert (batch.is_blocks_cache, blocks.is_blocks_cache) == (False, True)
    assert blocks.cache_id == batch.cache_id + 1 == 2
    cpu = UserTensors(4, 100, 3).cpu_cache()
    for returned in (
        manager.copy_cache(batch, batch, 1, 0),
        manager.copy_blocks(blocks, {0: [1]}),
        manager.swap_blocks(cpu, blocks, {0: 1}),
        manager.swap_blocks(blocks, cpu, {0: 1}),
        manager.deallocate_cache(batch),
        manager.remove_cache_key(CacheKey(1, 1)),
        manager.deallocate_blocks_cache(blocks),
    ):
        assert returned is None
    assert batch.tensor_addrs == blocks.tensor_addrs == []


@pytest.mark.contract("19.key-per-slot")
def test_each_slot_has_its_key(ends: Ends) -> None:
    local, remote = ends.pair()
    remote.allocate("f", 4, 64, 2, keys=[by_request(2, 10 + slot) for slot in range(4)], seed=1)
    local.allocate("n", 1, 64, 2)
    for slot in (2, 0, 3, 1):
        local.pull_cache(by_request(2, 10 + slot), "n")
        assert equal(local.read("n"), [tensor[slot : slot + 1] for tensor in pattern(1, 2, 4, 64)])


@pytest.mark.contract("19.copy-cache", "19.copy-blocks", "19.sync-kv-timeout")
def test_sync_kv_timeout_ends_the_wait_of_a_copy(ends: Ends) -> None:
    """A copy that waits for rows ends with the limit. One that has begun is finished (`copy_deadlines.rs`)."""
    local, remote = ends.pair(llm__LinkTransport="tcp", llm__SyncKvCacheWaitTime="20")
    source = by_slot(2, remote.allocate("slots", 2, 64, 1))
    remote.allocate("blocks", 2, 64, 1, blocks=True, keys=[by_blocks(2)])
    local.allocate("slots", 2, 64, 1)
    local.allocate("blocks", 2, 64, 1, blocks=True)
    slots, blocks = (local.held[name].handle for name in ("slots", "blocks"))

    def pulls() -> None:
        """Pulls into row 0 of both caches."""
        code(local.pull_cache, source, "slots")
        code(local.pull_blocks, by_blocks(2), "blocks", [0], [0])

    pulls()
    # A pull from a stopped peer has its row until its own limit, and others wait behind it.
    with remote.stopped(), meanwhile(*[pulls] * 4):
        for copy in (
            lambda: local.manager.copy_cache(slots, slots, 1, 0),
            lambda: local.manager.copy_blocks(blocks, {0: [1]}),
        ):
            eventually(lambda copy=copy: code(copy) == LLMStatusCode.LLM_TIMEOUT.name, what="a copy that timed out")


@pytest.mark.contract("19.allocate-cache", "19.deallocate-cache", "19.remove-cache-key", "19.allocate-blocks-cache")
def test_sync_kv_timeout_refuses_no_call_without_copying(start: Callable[..., LLMDataDist]) -> None:
    manager = start(options(pool(64 << 20), None, llm__SyncKvCacheWaitTime="1")).cache_manager
    for number in range(50):
        cache = manager.allocate_cache(desc(2, 1 << 20, 4), [CacheKey(1, number), CacheKey(1, 1000 + number)])
        blocks = manager.allocate_blocks_cache(desc(2, 1 << 20, 4), BlocksCacheKey(1, number))
        manager.remove_cache_key(CacheKey(1, number))
        manager.deallocate_cache(cache)
        manager.remove_cache_key(CacheKey(1, 1000 + number))
        manager.deallocate_blocks_cache(blocks)
    assert used(manager)["device"] == 0


@pytest.mark.contract("19.mem-pool-cfg", "19.host-mem-pool-cfg")
def test_pool_texts_are_kept(start: Callable[..., LLMDataDist]) -> None:
    text = '{"memory_size": 1048576,  "page_shift": 16, "other": null}'
    made = LLMConfig()
    made.enable_cache_manager = True
    made.mem_pool_cfg = made.host_mem_pool_cfg = text
    given = made.generate_options()
    assert made.mem_pool_cfg == made.host_mem_pool_cfg == text
    assert given["llm.MemPoolConfig"] == given["llm.HostMemPoolConfig"] == text, "verbatim"
    start(given)


# -- layer-wise transfers --------------------------------------------------------------------------------------------


@pytest.mark.contract("19.transfer-blocks")
@pytest.mark.parametrize("size", [None, 0, 256], ids=["omitted", "zero", "given"])
def test_transfer_of_blocks(pair: Pair, size: int | None) -> None:
    src, addrs = pair.caches(rows=6, blocks=True)
    for lists in (([5, 0, 3], [1, 4, 2]), ((5, 0, 3), (1, 4, 2))):
        pair.remote.fill("f", 2)
        task = pair.send(src, synchronizer(), (config(2, addrs),), *lists, size)
        assert task.synchronize() is SUCCESS
        assert task.get_results() == [SUCCESS]
        assert equal(pair.remote.read("f"), sent({1: 5, 4: 0, 2: 3}, count=6))
    assert equal(pair.local.read("n"), pattern(1, 4, 6, 256))


@pytest.mark.contract("19.transfer-blocks")
@pytest.mark.parametrize(
    ("src_blocks", "dst_blocks", "size"),
    [
        *[([0], [1], size) for size in (255, 512, 1, UINT64_MAX)],
        *[(blocks, [1, 2][: len(blocks)], None) for blocks in ([6], [0, 2**32], [UINT64_MAX])],
        *[([0, 1], [1, block], None) for block in (6, 2**40, UINT64_MAX)],
    ],
    ids=short,
)
def test_block_sizes_and_ranges_are_checked(pair: Pair, src_blocks: Any, dst_blocks: Any, size: Any) -> None:
    src, addrs = pair.caches(rows=6, blocks=True)
    with raising(LE):  # at once, or as the outcome (contract §8.2)
        task = pair.send(src, synchronizer(), [config(2, addrs)], src_blocks, dst_blocks, size)
        (ended,) = task.get_results()
        raise LLMException("the outcome", status_code=ended)
    for left, right in zip(pair.remote.read("f"), pattern(2, 4, 6, 256)):
        assert np.array_equal(left[2:], right[2:])
        assert max(dst_blocks) > 5 or np.array_equal(left, right)


@pytest.mark.contract("19.transfer-blocks")
def test_a_slot_is_cut_into_blocks(pair: Pair) -> None:
    src = pair.allocate(pair.local, "n", 2, 1000, 4, seed=1)
    pair.allocate(pair.remote, "f", 6, 256, 4, blocks=True, seed=2)
    addrs = pair.remote.addresses("f")
    task = pair.send(src, synchronizer(), [config(2, addrs, None, 1)], None, [5, 0, 3, 2], 256)
    assert task.synchronize() is SUCCESS
    expected = pattern(2, 4, 6, 256)
    for left, right in zip(expected, pattern(1, 4, 2, 1000)):
        for piece, block in enumerate([5, 0, 3, 2]):
            part = right[1, piece * 256 : (piece + 1) * 256]
            left[block, : len(part)] = part
    assert equal(pair.remote.read("f"), expected), "only the piece that ends the slot is short"
    for blocks, size in (([0, 1, 2, 3, 4], 256), ([0], 0), ([0], 2001)):
        task = pair.send(src, synchronizer(), [config(2, addrs)], None, blocks, size)
        assert task.synchronize() is INVALID
    assert equal(pair.remote.read("f"), expected)


@pytest.mark.contract("19.transfer-concurrency", "19.pulls-and-transfers")
@pytest.mark.parametrize("transport", ["auto", "tcp"])
@pytest.mark.parametrize("blocks", [False, True], ids=["pull_cache", "pull_blocks"])
def test_a_transfer_and_pulls_on_one_link(ends: Ends, blocks: bool, transport: str) -> None:
    """Pulls and a transfer over one link: no row is mixed, whichever is first."""
    pair = Pair(CACHE_MANAGER, ends, pool=16 << 20, llm__LinkTransport=transport)
    local, remote = pair.local, pair.remote
    rows, row_bytes, tensors = 2, 64 << 10, 12
    src = pair.allocate(local, "n", rows, row_bytes, tensors, blocks=blocks, seed=1)
    other = pair.allocate(local, "m", rows, row_bytes, tensors, blocks=blocks, seed=3)
    local.allocate("in", rows, row_bytes, tensors, blocks=blocks)
    remote.allocate("f", rows, row_bytes, tensors, blocks=blocks, keys=[("blocks", 2, 0)] if blocks else [], seed=2)
    addrs = remote.addresses("f")
    versions = [pattern(seed, tensors, rows, row_bytes) for seed in (1, 2, 3)]
    slot = ("slot", 2, remote.held_id("f"), 0)

    def pull() -> None:
        if blocks:
            local.pull_blocks(("blocks", 2, 0), "in", [0], [1])
        else:
            local.pull_cache(slot, "in", 1)
        for number, tensor in enumerate(local.read("in")):
            whole = any(np.array_equal(tensor[1], version[number][0]) for version in versions)
            assert whole, f"tensor {number} is a mixture"

    with meanwhile(pull):
        for number in range(100):
            lists = ([0], [0]) if blocks else ()
            task = pair.send((src, other)[number % 2], synchronizer(), [config(2, addrs)], *lists)
            assert task.synchronize(int(LIMIT * 1000)) is SUCCESS
    expected = versions[1]
    for left, right in zip(expected, versions[2]):
        left[0] = right[0]
    assert equal(remote.read("f"), expected)


@pytest.mark.contract("19.transfer-concurrency")
def test_transfers_at_once(pair: Pair) -> None:
    """Several tasks over one link, from several threads, end without mixed rows."""
    tasks, layers = 6, 4
    sources = []
    for number in range(tasks):
        handle = pair.allocate(pair.local, f"n{number}", 2, 4096, 2 * layers, seed=10 + number)
        pair.allocate(pair.remote, f"f{number}", 2, 4096, 2 * layers, seed=20 + number)
        sources.append((handle, pair.remote.addresses(f"f{number}")))

    def go(number: int) -> tuple[Any, Any]:
        src, addrs = sources[number]
        task = pair.send(src, synchronizer(), [config(2, addrs, None, 1)])
        return task.synchronize(int(LIMIT * 1000)), task.get_results(0)

    assert together(tasks, go) == [(SUCCESS, [SUCCESS])] * tasks
    for number in range(tasks):
        expected = pattern(20 + number, 2 * layers, 2, 4096)
        for left, right in zip(expected, pattern(10 + number, 2 * layers, 2, 4096)):
            left[0] = right[1]
        assert equal(pair.remote.read(f"f{number}"), expected)


@pytest.mark.contract("19.transfer-concurrency")
def test_a_second_transfer_of_the_same_rows_waits_for_its_layers_alone(pair: Pair) -> None:
    src, addrs = pair.caches(rows=1)
    slow, quick = Gate(2), Gate(2)
    first = pair.send(src, synchronizer(slow), [config(2, addrs)])
    second = pair.send(src, synchronizer(quick), [config(2, addrs)])
    quick.open()
    assert second.synchronize(int(LIMIT * 1000)) is SUCCESS, "the layers of the first are not under way"
    assert first.synchronize(0) is pair.late
    slow.open()
    assert first.synchronize(int(LIMIT * 1000)) is SUCCESS
    assert equal(pair.remote.read("f"), pattern(1, 4, 1, 256))


@pytest.mark.contract("19.transfer-concurrency")
@pytest.mark.parametrize("mode", MODES)
def test_one_device_alone(mode: str) -> None:
    """Several devices in one process are refused by init (§5.2), so that no transfer (§8.6) ever has them."""
    dist = LLMDataDist(LLMRole.PROMPT, 1)
    try:
        given = options() if mode == CACHE_MANAGER else KV_OPTIONS
        with pytest.raises(LLMException, match="0;1") as caught:
            dist.init({**given, "ge.exec.deviceId": "0;1"})
        assert caught.value.status_code is INVALID
        manager = "cache_manager" if mode == CACHE_MANAGER else "kv_cache_manager"
        with pytest.raises(RuntimeError, match="not initialized"):
            getattr(dist, manager)
        # With one device, there is an engine, and a manager that transfers.
        dist.init({**given, "ge.exec.deviceId": "1"})
        assert callable(getattr(dist, manager).transfer_cache_async)
    finally:
        dist.finalize()


@pytest.mark.contract("19.transfer-cache-async")
def test_addresses_that_are_no_cache_of_the_destination(pair: Pair) -> None:
    """Unknown addresses and caches that are too small are LLM_PARAM_INVALID, and are never written (§9.2)."""
    src, addrs = pair.caches()
    other = UserTensors(4, 256, 4)
    pair.allocate(pair.remote, "small", 4, 256, 1, seed=3)
    (small,) = pair.remote.addresses("small")
    for bad in (
        [0] * 4,
        [1, 2, 3, 4],
        [UINT64_MAX] * 4,
        other.addrs,
        [*addrs[:3], 0],
        [*addrs[:3], addrs[3] + 4 * 256],
        [*addrs[:3], addrs[3] + 3 * 256 + 1],
        [*addrs[:3], addrs[3] - 1],
        [*addrs[:3], small + 3 * 256 + 1],
    ):
        task = pair.send(src, synchronizer(), [config(2, bad)])
        assert task.synchronize(int(LIMIT * 1000)) is INVALID, bad
        assert task.get_results() == [INVALID]
    assert equal(pair.remote.read("small"), pattern(3, 1, 4, 256))
    for left, right in zip(pair.remote.read("f"), pattern(2, 4, 4, 256)):
        assert np.array_equal(left[1:], right[1:])


@pytest.mark.parametrize(
    ("given", "with_manager", "with_resources"),
    [
        (KV_OPTIONS, False, False),
        (options(), True, False),
        (options(llm__LocalCommRes='{"version": "1.3"}'), True, True),
    ],
)
def test_private_members_that_tests_of_the_original_use(
    given: dict[str, str], with_manager: bool, with_resources: bool, start: Callable[..., LLMDataDist]
) -> None:
    dist = start(dict(given))
    assert dist._is_initialized is True
    assert dist._enable_cache_mgr is with_manager
    assert dist._enable_local_comm_res is with_resources
    assert dist._llm_datadist is not None
    assert (dist._cache_manager is None, dist._kv_cache_manager is None) == (not with_manager, with_manager)
    assert dist._engine_options["ge.exec.deviceId"] == "0"
    assert dist._role_to_str(dist._role) == "Prompt"
    assert dist._cluster_config() is not None
    manager = dist._cache_manager
    if manager is not None:
        members = (manager._initialized, manager._is_call_linked, manager._enable_remote_cache_accessible)
        assert members == (True, False, with_resources)
