"""Caches whose tensors differ (`CacheDesc.of_parts`): descriptors, views, and calls between peers.

`mixed_tensors` and `links::mixed_tensors` of the core have copies, swaps, slots, random shapes on every transport,
and peers that lie about their tensors.
"""

from __future__ import annotations

import copy
import multiprocessing
import pickle
import random
from typing import TYPE_CHECKING, Any, Optional

import numpy as np
import pytest

from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    DataType,
    GroupPart,
    LayerSynchronizer,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    Placement,
    TransferWithCacheKeyConfig,
)

if TYPE_CHECKING:
    from collections.abc import Iterator

BLOCKS = 24
TYPES = {DataType.DT_FLOAT16: np.float16, DataType.DT_UINT8: np.uint8, DataType.DT_FLOAT: np.float32}
POOL = '{"memory_size": "64MiB"}'


def engine(cluster: int, role: LLMRole, transport: str = "auto") -> LLMDataDist:
    config = LLMConfig()
    config.enable_cache_manager = True
    config.mem_pool_cfg = config.host_mem_pool_cfg = POOL
    config.listen_ip_info = "127.0.0.1:0"
    options = config.generate_options()
    options["llm.LinkTransport"] = transport
    options["llm.SyncKvCacheWaitTime"] = "5000"
    options["llm.EnableRemoteCacheAccessible"] = "1"
    made = LLMDataDist(role, cluster_id=cluster)
    made.init(options)
    return made


@pytest.fixture
def alone() -> Iterator[Any]:
    """The cache manager of one engine."""
    made = engine(1, LLMRole.PROMPT)
    yield made.cache_manager
    made.finalize()


class Owner:
    """Cluster 1, in a process of its own."""

    def __init__(self, transport: str) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(theirs, transport), daemon=True)
        self._process.start()
        self.address = self._received()

    def ask(self, *request: Any) -> Any:
        self._pipe.send(request)
        return self._received()

    def _received(self) -> Any:
        assert self._pipe.poll(60), "the owner does not answer"
        return self._pipe.recv()

    def end(self) -> None:
        self.ask("end")
        self._process.join(60)
        assert self._process.exitcode == 0


def serve(pipe: Any, transport: str) -> None:
    """Make, fill and read caches of cluster 1 for the test."""
    owner = engine(1, LLMRole.PROMPT, transport)
    manager, cache, views = owner.cache_manager, None, []
    pipe.send(owner.listen_ip_info)
    while True:
        what, *given = pipe.recv()
        if what == "blocks":
            cache = manager.allocate_blocks_cache(*given)
        elif what == "free":
            manager.deallocate_blocks_cache(cache)
        elif what == "fill":
            views = filled(manager, cache, *given)
        elif what == "grant":
            pipe.send(manager.grant(cache, *given).token)
            continue
        elif what == "end":
            owner.finalize()
        if what in {"fill", "read"}:
            pipe.send(copies(views))
        else:
            pipe.send(None if cache is None else cache.cache_id)
        if what == "end":
            return


@pytest.fixture(params=["auto", "tcp"])
def pair(request: pytest.FixtureRequest) -> Iterator[tuple[Owner, Any]]:
    """Cluster 1, and the cache manager of cluster 2, which is linked with it."""
    owner, reader = Owner(request.param), engine(2, LLMRole.DECODER, request.param)
    host, port = owner.address.rsplit(":", 1)
    peer = LLMClusterInfo()
    peer.remote_cluster_id = 1
    peer.append_local_ip_info("127.0.0.1", 0)
    peer.append_remote_ip_info(host, int(port))
    status, results = reader.link_clusters([peer], timeout=5000)
    assert (status, results) == (LLMStatusCode.LLM_SUCCESS, [LLMStatusCode.LLM_SUCCESS])
    yield owner, reader.cache_manager
    reader.finalize()
    owner.end()


def parts_of(chance: random.Random, rows: int = BLOCKS, placement: Placement = Placement.DEVICE) -> list[CacheDesc]:
    """Random parts, most with rows of other sizes than the part before."""
    kinds = list(TYPES)
    parts = []
    for _ in range(chance.randint(2, 4)):
        data_type = chance.choice(kinds)
        shape = [rows, chance.randint(1, 9), chance.randint(1, 50)]
        parts.append(CacheDesc(chance.randint(1, 3), shape, data_type, placement))
    return parts


def padded(chance: random.Random, parts: list[CacheDesc]) -> list[CacheDesc]:
    """The same parts, some with gaps between their rows."""
    made = []
    for part in parts:
        row = part.size // part.shape[0]
        gap = chance.choice((0, 0, 16, 400))
        stride = row + gap if gap else None
        made.append(CacheDesc(part.num_tensors, part.shape, part.data_type, part.placement, row_stride=stride))
    return made


def filled(manager: Any, cache: Cache, seed: int) -> list[np.ndarray]:
    """Fill a cache with random bytes. Returns its views."""
    views = [view.numpy() for view in manager.tensor_views(cache)]
    rng = np.random.default_rng(seed)
    for view in views:
        view[:] = rng.integers(0, 100, view.shape)
    return views


def copies(views: list[np.ndarray]) -> list[np.ndarray]:
    return [view.copy() for view in views]


def equal(one: list[np.ndarray], other: list[np.ndarray]) -> bool:
    return len(one) == len(other) and all(np.array_equal(a, b) for a, b in zip(one, other))


def test_a_descriptor_is_made_of_parts() -> None:
    parts = [CacheDesc(2, [8, 4], DataType.DT_FLOAT16), CacheDesc(1, [8, 3, 5], DataType.DT_UINT8, row_stride=20)]
    desc = CacheDesc.of_parts(parts)
    assert (desc.num_tensors, desc.shape, desc.data_type) == (3, (8, 4), DataType.DT_FLOAT16)
    assert [(part.num_tensors, part.shape, part.row_stride) for part in desc.parts] == [
        (2, (8, 4), None),
        (1, (8, 3, 5), 20),
    ]
    assert CacheDesc(1, [8], DataType.DT_UINT8).parts == ()
    assert "of_parts" in repr(desc)
    parts[0].update_dim(0, 9)
    assert desc.parts[0].shape == (8, 4)
    for other in (copy.deepcopy(desc), pickle.loads(pickle.dumps(desc))):  # noqa: S301
        assert repr(other) == repr(desc)
    with pytest.raises(TypeError):
        desc.update_dim(0, 9)


@pytest.mark.parametrize(
    ("parts", "text"),
    [
        ([], "parts="),
        ([CacheDesc(1, [8], DataType.DT_UINT8), CacheDesc(0, [8], DataType.DT_UINT8)], "parts[1].num_tensors=0"),
        ([CacheDesc(1, [8], DataType.DT_UINT8), CacheDesc(1, [9], DataType.DT_UINT8)], "parts[1].shape[0]=9 must be 8"),
        (
            [CacheDesc(1, [8], DataType.DT_UINT8), CacheDesc(1, [8], DataType.DT_UINT8, Placement.HOST)],
            "parts[1].placement=",
        ),
        ([CacheDesc(1, [8, 2], DataType.DT_UINT8, batch_dim_index=1)], "parts[0].batch_dim_index=1"),
        ([CacheDesc.of_parts([CacheDesc(1, [8], DataType.DT_UINT8)])], "parts[0] has parts"),
    ],
)
def test_parts_that_do_not_fit_are_refused(parts: list[CacheDesc], text: str) -> None:
    with pytest.raises(LLMException) as refused:
        CacheDesc.of_parts(parts)
    assert refused.value.status_code == LLMStatusCode.LLM_PARAM_INVALID
    assert text in str(refused.value)


def test_parts_of_another_type_are_refused() -> None:
    for wrong in (None, 5, ["x"], CacheDesc(1, [8], DataType.DT_UINT8)):
        with pytest.raises(TypeError):
            CacheDesc.of_parts(wrong)  # type: ignore[arg-type]


def test_views_have_the_shape_and_type_of_their_tensor(alone: Any) -> None:
    chance = random.Random(1)  # noqa: S311
    for _ in range(20):
        parts = padded(chance, parts_of(chance))
        cache = alone.allocate_blocks_cache(CacheDesc.of_parts(parts))
        views = alone.tensor_views(cache)
        tensors = [part for part in parts for _ in range(part.num_tensors)]
        assert len(views) == len(cache.tensor_addrs) == len(tensors)
        for view, part, address in zip(views, tensors, cache.tensor_addrs):
            array, shared = view.numpy(), np.from_dlpack(view)
            assert (view.shape, view.address, view.nbytes) == (tuple(part.shape), address, part.size)
            assert array.dtype == shared.dtype == TYPES[part.data_type]
            row = part.size // part.shape[0]
            assert array.strides == shared.strides
            assert array.strides[0] == (part.row_stride or row)
            array[:] = 1
            assert (shared == 1).all()
        alone.deallocate_blocks_cache(cache)


def test_registered_memory_keeps_its_gaps(alone: Any) -> None:
    # Keys and values of two layers and a small index beside them, as one page of each block.
    pages = np.zeros((BLOCKS, 4096), np.uint8)
    rng = np.random.default_rng(3)
    pages[:] = rng.integers(0, 256, pages.shape)
    desc = CacheDesc.of_parts(
        [
            CacheDesc(2, [BLOCKS, 512], DataType.DT_FLOAT16, row_stride=4096),
            CacheDesc(1, [BLOCKS, 100], DataType.DT_UINT8, row_stride=4096),
        ]
    )
    base = pages.ctypes.data
    cache = alone.register_blocks_cache(desc, [base, base + 1024, base + 2048])
    expected = pages.copy()
    expected[7, :2148] = expected[3, :2148]
    alone.copy_blocks(cache, {3: [7]})
    assert np.array_equal(pages, expected)
    with pytest.raises(LLMException, match="length=200"):
        alone.copy_blocks(cache, {3: [8]}, length=200)
    assert np.array_equal(pages, expected)
    with pytest.raises(LLMException, match="tensors are equal"):
        cache.buffer()
    with pytest.raises(LLMException, match="contiguous"):
        alone.allocate_blocks_cache(CacheDesc.of_parts(desc.parts), contiguous=True)
    alone.unregister_cache(cache.cache_id)


@pytest.mark.parametrize("verify", ["off", "full"])
def test_pulls_and_pushes_agree_with_numpy(pair: tuple[Owner, Any], verify: str) -> None:
    owner, reader = pair
    chance = random.Random(4)  # noqa: S311
    for number in range(12):
        parts = parts_of(chance)
        key = BlocksCacheKey(1, number)
        owner.ask("blocks", CacheDesc.of_parts(padded(chance, parts)), key)
        near = reader.allocate_blocks_cache(CacheDesc.of_parts(padded(chance, parts)))
        there, here = owner.ask("fill", number), filled(reader, near, number + 100)
        src, dst = chance.sample(range(BLOCKS), 10), chance.sample(range(BLOCKS), 10)
        expected = copies(here)
        for into, out_of in zip(expected, there):
            into[dst] = out_of[src]
        if number % 3 == 0:
            reader.pull_blocks(key, near, src, dst, verify=verify)
        elif number % 3 == 1:
            reader.pull_group([GroupPart(key, near, src, dst)], verify=verify)
        else:
            reader.pull_blocks_async(key, near, src, dst, verify=verify).result(20_000)
        assert equal(here, expected), number
        # Back to other blocks.
        blocks = chance.sample(range(BLOCKS), 10)
        for into, out_of in zip(there, here):
            into[blocks] = out_of[dst]
        reader.push_blocks(key, near, dst, blocks, verify=verify, tensor_num_per_layer=1)
        assert equal(owner.ask("read"), there), number
        # The tensors of the first part alone.
        first = range(parts[0].num_tensors)
        there, expected = owner.ask("fill", number + 200), copies(here)
        for tensor in first:
            expected[tensor][dst] = there[tensor][src]
        layers = {"src_layer_range": first, "dst_layer_range": first, "tensor_num_per_layer": 1}
        reader.pull_blocks(key, near, src, dst, verify=verify, **layers)
        assert equal(here, expected), number
        reader.deallocate_blocks_cache(near)
        owner.ask("free")


def test_grants_lend_rows_of_every_tensor(pair: tuple[Owner, Any]) -> None:
    owner, reader = pair
    parts = padded(random.Random(5), parts_of(random.Random(5)))  # noqa: S311
    owner.ask("blocks", CacheDesc.of_parts(parts), BlocksCacheKey(1, 1))
    near = reader.allocate_blocks_cache(CacheDesc.of_parts(parts))
    there, here = owner.ask("fill", 1), filled(reader, near, 2)
    token = owner.ask("grant", [3, 4, BLOCKS - 1], 30_000, 2)
    expected = copies(here)
    for into, out_of in zip(expected, there):
        into[[0, 7]] = out_of[[BLOCKS - 1, 3]]
    reader.pull_blocks(BlocksCacheKey(1, 1), near, [BLOCKS - 1, 3], [0, 7], grant=token, verify="full")
    assert equal(here, expected)
    with pytest.raises(LLMException) as refused:
        reader.pull_blocks(BlocksCacheKey(1, 1), near, [4, 5], [0, 7], grant=token)
    assert refused.value.status_code == LLMStatusCode.LLM_PARAM_INVALID
    assert equal(here, expected)


class Ready(LayerSynchronizer):
    """Every layer is ready."""

    def synchronize_layer(self, layer_index: int, timeout_in_millis: Optional[int] = None) -> bool:  # noqa: ARG002
        return layer_index >= 0


def test_layers_are_transferred(pair: tuple[Owner, Any]) -> None:
    owner, reader = pair
    layer = [CacheDesc(2, [BLOCKS, 96], DataType.DT_FLOAT16), CacheDesc(1, [BLOCKS, 33], DataType.DT_UINT8)]
    desc = CacheDesc.of_parts(layer * 3)
    owner.ask("blocks", desc, BlocksCacheKey(1, 1))
    near = reader.allocate_blocks_cache(desc)
    expected, here = owner.ask("fill", 1), filled(reader, near, 2)
    for into, out_of in zip(expected, here):
        into[[4, 9]] = out_of[[1, 2]]
    config = TransferWithCacheKeyConfig(BlocksCacheKey(1, 1), range(3), range(3))
    synchronizer = Ready()
    synchronizer.tensor_num_per_layer = 3
    task = reader.transfer_cache_async(near, synchronizer, [config], [1, 2], [4, 9])
    assert task.synchronize(20_000) == LLMStatusCode.LLM_SUCCESS
    assert equal(owner.ask("read"), expected)
