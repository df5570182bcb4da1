"""The `KvCacheManager` mode between two processes, with the calls that its clients make.

This process is the decoder, the other one the prompt; where possible, both have one cluster id.
"""

from __future__ import annotations

import zlib
from typing import Any, Callable

import numpy as np
import pytest

from llm_datadist import CacheDesc, CacheKey, DataType, LLMDataDist, LLMException, LLMRole, TransferConfig
from llm_datadist.original.tensors import create_npu_tensors
from mistakes import info
from peers import (
    GONE,
    INVALID,
    OK,
    UINT64_MAX,
    UNLINKED,
    End,
    Ends,
    Peer,
    by_blocks,
    by_request,
    by_slot,
    code,
    equal,
    eventually,
    kv_options,
    pattern,
    split,
)
from two_modes import SUCCESS, synchronizer


@pytest.fixture
def both(ends: Ends) -> Callable[..., tuple[Peer, End]]:
    """A function that opens a prompt in a peer process and a decoder here, and links them."""

    def make(remote: int = 0, local: int = 0, **more: Any) -> tuple[Peer, End]:
        there = ends.peer(kv_options(), remote)
        here = ends.local(kv_options(**more), local)
        assert here.link_clusters([there.at], 20000) == (OK, [OK])
        return there, here

    return make


def remains(there: Peer) -> tuple[int, int, int]:
    """Caches, keys and bytes of a pool."""
    stats = there.stats()
    return stats["table"]["caches"], stats["table"]["keys"], stats["pools"]["device"]["used_bytes"]


@pytest.mark.parametrize(
    ("remote", "local", "deallocate"), [(0, 0, True), (0, 0, False), (1, 2, True), (UINT64_MAX, UINT64_MAX, True)]
)
def test_a_cache_that_was_let_go_waits_for_its_pull(both: Any, remote: int, local: int, deallocate: bool) -> None:
    there, here = both(remote, local)
    key = by_request(remote, zlib.adler32(b"request 17"), 3)
    assert there.allocate("kv", 2, 4096, keys=[key], seed=5) == 1
    if deallocate:
        there.deallocate("kv")
    there.forget("kv")
    here.allocate("kv", 2, 4096)
    here.paint("kv", 7)
    here.pull_cache(key, "kv", 1)
    for got, made in zip(here.read("kv"), pattern(5, 2, 2, 4096)):
        assert np.array_equal(got[1], made[0])
        assert (got[0] == 7).all()
    # The pull used up the key, which was the last reference, so the memory is released.
    assert code(here.pull_cache, key, "kv") == GONE
    assert remains(there) == (0, 0, 0)


def test_offsets(both: Any, transport: str) -> None:
    there, here = both(llm__LinkTransport=transport)
    here.allocate("kv", 4, 160)
    moves = [
        (40, 0, -1, 160),
        (40, 60, -1, 100),
        (150, 0, 50, 50),
        (199, 159, 1, 1),
        (None, 30, 7, 7),
        (30, None, 7, 7),
    ]
    for number, (src, dst, size, count) in enumerate(moves):
        key = by_request(0, number)
        there.allocate("kv", 3, 200, keys=[by_request(0, UINT64_MAX), key], seed=9)
        here.paint("kv", 0)
        here.pull_cache(key, "kv", 2, size, src_cache_offset=src, dst_cache_offset=dst)
        first, into = src or 0, dst or 0
        for got, remote in zip(here.read("kv"), pattern(9, 2, 3, 200)):
            expected = np.zeros((4, 160), dtype=np.uint8)
            expected[2, into : into + count] = remote[1, first : first + count]
            assert np.array_equal(got, expected), (src, dst, size)
        assert code(here.pull_cache, key, "kv") == GONE, "a part counts as a pull"
        there.deallocate("kv")
    there.allocate("kv", 3, 200, keys=[by_request(0, 99)])
    here.paint("kv", 1)
    for src, dst, size in [(41, 0, -1), (200, 0, 1), (0, 160, 1), (0, 100, 61), (150, 0, 51), (2**63 - 1, 0, 1)]:
        pull = {"src_cache_offset": src, "dst_cache_offset": dst}
        assert code(here.pull_cache, by_request(0, 99), "kv", 0, size, **pull) == INVALID
    assert all((tensor == 1).all() for tensor in here.read("kv"))
    here.pull_cache(by_request(0, 99), "kv")


def test_blocks(both: Any) -> None:
    there, here = both()
    there.allocate("blocks", 8, 128, blocks=True, keys=[by_blocks(0, 2)], seed=1)
    here.allocate("blocks", 3, 128, blocks=True)
    for _ in range(2):
        here.pull_blocks(by_blocks(0, 2), "blocks", [7, 0, 3], [1, 2, 0])
    assert equal(here.read("blocks"), [remote[[3, 7, 0]] for remote in pattern(1, 2, 8, 128)])
    assert code(here.pull_blocks, by_blocks(0, 3), "blocks", [0], [0]) == GONE


def test_a_peer_of_one_id_that_stops_or_dies(both: Any) -> None:
    there, here = both(llm__SyncKvCacheWaitTime=200, llm__LinkTransport="tcp")
    there.allocate("kv", 1, 64, keys=[by_request(0, 1)])
    here.allocate("kv", 1, 64)
    with there.stopped():
        assert code(here.pull_cache, by_request(0, 1), "kv") == "LLM_WAIT_PROCESS_TIMEOUT"
        assert code(here.dist.check_link_status, 0) == "LLM_WAIT_PROCESS_TIMEOUT"
    there.kill()
    eventually(lambda: code(here.pull_cache, by_request(0, 1), "kv") == UNLINKED, what="the end of the link")


def test_links_of_the_mode(both: Any) -> None:
    there, here = both(0, 0)
    here.dist.check_link_status(0)
    assert here.link_clusters([there.at]) == ("LLM_ALREADY_LINK", ["LLM_ALREADY_LINK"])
    assert here.unlink_clusters([there.at]) == (OK, [OK])
    assert here.unlink_clusters([there.at]) == (OK, [UNLINKED])
    here.allocate("kv", 1, 64)
    assert code(here.pull_cache, by_request(0, 1), "kv") == UNLINKED
    assert here.link_clusters([there.at]) == (OK, [OK])
    there.allocate("kv", 1, 64, keys=[by_request(0, 1)], seed=1)
    here.pull_cache(by_slot(0, 1), "kv")
    assert equal(here.read("kv"), pattern(1, 2, 1, 64))
    # A pull by id uses up the key of the slot (contract §12.3).
    assert code(here.pull_cache, by_request(0, 1), "kv") == GONE


def test_layers_travel_between_clusters_of_one_id(ends: Ends) -> None:
    """The prompt is this process and sends. The decoder is the peer process and links."""
    here, there = ends.local(kv_options(listen="127.0.0.1:0"), 0, "PROMPT"), ends.spare()
    there.init(kv_options(), 0, "DECODER")
    assert there.link_clusters([[0, here.listening()]]) == (OK, [OK])
    here.allocate("kv", 2, 128, tensors=6, seed=11)
    there.allocate("kv", 1, 128, tensors=6, seed=1)
    made, before, addrs = pattern(11, 6, 2, 128), pattern(1, 6, 1, 128), there.addresses("kv")
    cache, asked = here.held["kv"].handle, []
    config = TransferConfig(0, addrs[2:], range(1, 3), 1)
    task = here.manager.transfer_cache_async(cache, synchronizer(lambda layer: asked.append(layer) or True), [config])
    assert task.synchronize() == SUCCESS
    assert task.get_results() == [SUCCESS]
    assert asked == [1, 2]
    assert equal([got[0] for got in there.read("kv")], [before[0][0], before[1][0], *[each[1] for each in made[2:]]])


# -- clients ---------------------------------------------------------------------------------------------------------


class SizeTuple(tuple[int, ...]):  # noqa: SLOT001
    """Like `torch.Size`: a subclass of `tuple`."""


def test_simple_pipe_and_buffer(ends: Ends) -> None:
    """Both cluster ids are 0. Each request has three caches, which are deallocated right after they are filled."""
    prompt = ends.peer(kv_options(), 0)
    with LLMDataDist(LLMRole.DECODER, 0) as data_dist:
        data_dist.init({"llm.SyncKvCacheWaitTime": "30000", "ge.exec.deviceId": "0"})
        kv_cache_manager = data_dist.kv_cache_manager
        at = info(0, port=split(prompt.address)[1])
        _, ret = data_dist.link_clusters([at], 20000)
        assert ret[0] == SUCCESS
        request = zlib.adler32(b"cmpl-1")
        for model in (1, 2, 3):
            prompt.allocate("kv", 1, 32, tensors=2, keys=[by_request(0, request, model)], seed=model)
            prompt.deallocate("kv")
        for model in (1, 2, 3):
            desc = CacheDesc(2, SizeTuple((1, 2, 8)), DataType.DT_FLOAT16, seq_len_dim_index=-1)
            batch, heads, width = desc.shape
            assert (batch, heads, width) == (1, 2, 8)
            buffer = kv_cache_manager.allocate_cache(desc)
            addrs = buffer.per_device_tensor_addrs[0]
            assert all(type(addr) is int for addr in addrs)
            tensors = create_npu_tensors(buffer.cache_desc.shape, np.float16, addrs)
            kv_cache_manager.pull_cache(CacheKey(0, request, model), buffer, 0)
            for tensor, made in zip(tensors, pattern(model, 2, 1, 32)):
                assert tensor.shape == (1, 2, 8)
                assert tensor.tobytes() == made.tobytes()
            kv_cache_manager.deallocate_cache(buffer)
        with pytest.raises(LLMException):
            kv_cache_manager.pull_cache(CacheKey(0, request, 1), kv_cache_manager.allocate_cache(desc), 0)
        data_dist.unlink_clusters([at], 5000)
    assert prompt.stats()["table"]["caches"] == 0
