"""Every argument of `transfer_cache_async` given wrongly, and which of two mistakes is named first; its value classes.

No peer is needed: whatever passes all checks is a task that ends for want of a link. Each table lists one mistake a
row, in the order of the contract (python-api.md §8.1); of every two rows the first must be reported. Not for: what
moves (`test_cache_task.py` and beyond).
"""

from __future__ import annotations

import itertools
from typing import Any, Callable, Optional

import pytest

from conftest import options, pool
from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKeyByIdAndIndex,
    DataType,
    KvCache,
    LayerSynchronizer,
    LLMException,
    LLMStatusCode,
    Placement,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from memory import LE, TE, UINT32_MAX, UINT64_MAX, VE, Expected, UserTensors, desc, raising
from test_transfer_arguments import Row

FAR = 2
UNLINKED = LLMStatusCode.LLM_NOT_YET_LINK
FINALIZED = Expected("ENGINE_FINALIZED", (LLMException,), (LLMStatusCode.LLM_ENGINE_FINALIZED,))
LAYERS = 4
KV = {"llm.listenIpInfo": "127.0.0.1:0", "llm.MemPoolConfig": pool()}


class Ready(LayerSynchronizer):
    """Every layer is ready."""

    def __init__(self, **attributes: Any) -> None:
        for name, value in attributes.items():
            setattr(self, name, value)

    def synchronize_layer(self, layer_index: int, timeout_in_millis: Optional[int]) -> bool:  # noqa: ARG002
        return True


def addressed(layers: Optional[range] = None, row: int = 0, count: Optional[int] = None, per_layer: int = 2) -> Any:
    """A config with as many addresses as tensors."""
    tensors = (LAYERS if layers is None else len(layers)) * per_layer
    return TransferConfig(FAR, list(range(1, (tensors if count is None else count) + 1)), layers, row)


def keyed(src: Optional[range] = range(LAYERS), dst: Optional[range] = range(LAYERS), row: int = 0) -> Any:
    """A config with a key."""
    made = TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(FAR, 1), range(1), range(1), row)
    made.src_layer_range, made.dst_layer_range = src, dst
    return made


class Bench:
    """One of everything, on an engine without links."""

    def __init__(self, dist: Any, config: Callable[..., Any]) -> None:
        self.manager = dist.cache_manager
        self.config = config
        self.cache_class = "Cache"
        tensors = 2 * LAYERS
        self.stranger: Any = KvCache(1, desc(4, 256, tensors), [[1] * tensors], None)
        self.batch = self.manager.allocate_cache(desc(4, 256, tensors))
        self.blocks = self.manager.allocate_blocks_cache(desc(4, 256, tensors), BlocksCacheKey(1))
        self.odd = self.manager.allocate_cache(desc(4, 256, 3))
        self.host = self.manager.allocate_cache(desc(4, 256, tensors, Placement.HOST))
        self.sideways = self.manager.allocate_cache(CacheDesc(tensors, [4, 256], DataType.DT_INT8, batch_dim_index=1))
        self.gone = self.manager.allocate_cache(desc(4, 256, tensors))
        self.manager.deallocate_cache(self.gone)
        self.cpu: Any = UserTensors(4, 256, tensors).cpu_cache()

    def good(self) -> dict[str, Any]:
        """Arguments that pass."""
        return {
            "src_cache": self.batch,
            "layer_synchronizer": Ready(),
            "transfer_configs": [self.config()],
            "src_block_indices": None,
            "dst_block_indices": None,
            "dst_block_memory_size": None,
        }

    def call(self, **given: Any) -> Callable[[], Any]:
        """The call with its good arguments, but for those given."""
        return lambda: self.manager.transfer_cache_async(**{**self.good(), **given})

    def ends(self, *codes: Optional[LLMStatusCode], **given: Any) -> None:
        """The call must pass every check, and its configs end with these codes."""
        assert self.call(**given)().get_results(10_000) == list(codes)

    def check(self, rows: list[Row]) -> None:
        """Every row alone, and every two rows together: the first is reported."""
        for row in rows:
            row.judge(self.call(**row.wrong), row.wrong)
        pairs = 0
        for first, second in itertools.combinations(rows, 2):
            if first.wrong.keys() & second.wrong.keys():
                continue
            wrong = {**second.wrong, **first.wrong}
            first.judge(self.call(**wrong), f"{wrong}, {first.expected} before {second.expected}")
            pairs += 1
        assert pairs > len(rows), "next to no pairs"


class KvBench(Bench):
    """The same on an engine of the `KvCacheManager`."""

    def __init__(self, dist: Any) -> None:
        self.manager = manager = dist.kv_cache_manager
        self.config = addressed
        self.cache_class = "KvCache"
        tensors = 2 * LAYERS
        self.stranger = Cache(1, desc(4, 256, tensors), [1] * tensors, None, False, False)
        self.batch = manager.allocate_cache(desc(4, 256, tensors))
        self.blocks = manager.allocate_blocks_cache(desc(4, 256, tensors))
        self.odd = manager.allocate_cache(desc(4, 256, 3))
        self.sideways = manager.allocate_cache(CacheDesc(tensors, [4, 256], DataType.DT_INT8, batch_dim_index=1))
        self.gone = manager.allocate_cache(desc(4, 256, tensors))
        manager.deallocate_cache(self.gone)
        self.user = UserTensors(4, 256, tensors)
        self.host = self.cpu = KvCache.create_cpu_cache(self.user.describe(), self.user.addrs)


@pytest.fixture
def bench(start: Any) -> Bench:
    """Destinations by address."""
    return Bench(start(), addressed)


@pytest.fixture
def one_sided(start: Any) -> Bench:
    """Destinations by key."""
    return Bench(start(options(llm__EnableRemoteCacheAccessible="1")), keyed)


def index_rows(name: str) -> list[Row]:
    """Rows of one list of blocks."""
    wrong = [0, "01", {0}, {0: 1}, range(2), iter([0]), b"01"]
    inside = [[0, "1"], [True], [0, 1.0], (None,), [-1, "1"], [[0]]]
    wide = [[-1, 1], (0, UINT64_MAX + 1), [2**70]]
    return [
        *[Row({name: bad}, TE, name) for bad in wrong],
        *[Row({name: bad}, TE, f"{name} inner type only support") for bad in inside],
        *[Row({name: bad}, VE, "uint64") for bad in wide],
    ]


def synchronizer_rows() -> list[Row]:
    """Rows of the synchronizer, and of what it says of layers."""
    name, per_layer, limit = "layer_synchronizer", "tensor_num_per_layer", "timeout_in_millis"
    return [
        *[Row({name: bad}, TE, name) for bad in (None, "x", object(), Ready, print)],
        *[Row({name: Ready(tensor_num_per_layer=bad)}, TE, per_layer) for bad in (None, 2.0, "2", True)],
        *[Row({name: Ready(tensor_num_per_layer=bad)}, VE, per_layer) for bad in (-1, UINT32_MAX + 1)],
        Row({name: Ready(tensor_num_per_layer=0)}, LE, f"{per_layer}=0"),
        *[Row({name: Ready(timeout_in_millis=bad)}, TE, limit) for bad in (1.0, "1", False)],
        *[Row({name: Ready(timeout_in_millis=bad)}, VE, limit) for bad in (-1, UINT32_MAX + 1)],
        Row({name: Ready(timeout_in_millis=0)}, LE, f"{limit}=0"),
    ]


def rows_of(bench: Bench, other: Callable[..., Any]) -> list[Row]:
    """Rows 1 to 12 of the contract."""
    src, dst, size = "src_block_indices", "dst_block_indices", "dst_block_memory_size"
    configs = "transfer_configs"
    good = bench.config()
    wrong_configs = [None, good, {0: good}, iter([good]), "x"]
    return [
        *[
            Row({"src_cache": bad}, TE, f"src_cache only support ['{bench.cache_class}']")
            for bad in (None, "cache", 1, bench.batch.cache_desc, bench.stranger)
        ],
        *[Row({"src_cache": bad}, LE, "host memory") for bad in (bench.host, bench.cpu)],
        *index_rows(dst),
        *index_rows(src),
        *[Row({size: bad}, TE, size) for bad in ("1", 1.0, True, [1])],
        *[Row({size: bad}, VE, size) for bad in (-1, UINT64_MAX + 1)],
        *[
            Row({src: [1, 2], dst: none}, LE, "transfer from blocks to cache is not supported")
            for none in (None, [], ())
        ],
        Row({src: [0, 1], dst: [0]}, LE, "src_block_indices has 2 entries and dst_block_indices 1"),
        Row({src: (), dst: [0, 1], size: None}, LE, "dst_block_memory_size was not given"),
        *synchronizer_rows(),
        *[Row({configs: bad}, TE, "transfer_configs only support") for bad in wrong_configs],
        *[
            Row({configs: [good, bad]}, TE, "transfer_configs inner type only support")
            for bad in (None, "x", other(), object())
        ],
        Row({dst: [], size: 1}, LE, "dst_block_memory_size=1 must be None or 0 without dst_block_indices"),
        Row({"src_cache": bench.odd, "layer_synchronizer": Ready()}, LE, "num_tensors=3 must be a multiple of"),
        Row({"layer_synchronizer": Ready(tensor_num_per_layer=3)}, LE, "num_tensors=8 must be"),
        Row({"src_cache": bench.sideways}, LE, "batch_dim_index=1"),
        Row({"src_cache": bench.blocks, dst: [0], size: 256}, LE, "src_block_indices were not given"),
    ]


def source_rows(bench: Bench) -> list[Row]:
    """Rows 13 and 13a, for the source of a config."""
    configs, config = "transfer_configs", bench.config
    blocks = {"src_cache": bench.blocks, "src_block_indices": [3], "dst_block_indices": [9]}
    both = [(range(n, n + 3), range(n, n + 3)) for n in (2, 4, 2**31)]

    def ranged(src: range, dst: range) -> Any:
        return config(src) if config is addressed else config(src, dst)

    return [
        Row({**blocks, configs: [config(row=1)]}, LE, "src_batch_index 1 != 0 while src is blocks"),
        Row({"src_cache": bench.blocks, configs: [config(row=1)]}, LE, "src_batch_index 1 != 0 while src is blocks"),
        *[Row({configs: [ranged(*pair)]}, LE, "src_layer_range=") for pair in both],
        Row({configs: [config(), ranged(range(1, 5), range(1, 5))]}, LE, "within 0..4"),
        *[
            Row({configs: [config(), config(row=row)]}, LE, f"src_batch_index {row} out of range: [0, 4)")
            for row in (4, UINT32_MAX)
        ],
    ]


@pytest.mark.contract("20.6", "19.transfer-cache-async", "19.transfer-blocks")
@pytest.mark.parametrize("mode", ["CacheManager", "KvCacheManager"])
def test_every_mistake_is_named_in_order(start: Any, mode: str) -> None:
    kv = mode == "KvCacheManager"
    bench = KvBench(start({"ge.exec.deviceId": "0", **KV})) if kv else Bench(start(), addressed)
    addresses = [
        Row({"transfer_configs": [addressed(count=count)]}, LE, f"len(dst_addrs)={count} must be 8, for 4")
        for count in (7, 9, 16, 4)
    ]
    none = TransferConfig(FAR, [])
    rows = source_rows(bench)
    middle = [*addresses, Row({"transfer_configs": [none]}, LE, "len(dst_addrs)=0")]
    bench.check([*rows_of(bench, keyed), *rows[:6], *middle, *rows[6:]])


def test_every_mistake_is_named_in_order_with_keys(one_sided: Bench) -> None:
    name = "transfer_configs"
    lengths = [
        Row({name: [keyed(range(3), range(2))]}, LE, "src_layer_range has 3 layers and dst_layer_range 2"),
        Row({name: [keyed(None, range(2))]}, LE, "src_layer_range has 4 layers and dst_layer_range 2"),
        Row({name: [keyed(range(2), None)]}, LE, "dst_layer_range=None"),
    ]
    one_sided.check([*rows_of(one_sided, addressed), *source_rows(one_sided), *lengths])


def test_a_blocks_cache_without_lists_is_one_slot_of_one_block(one_sided: Bench) -> None:
    """It passes every check with index 0 on both sides, by either kind of key; any other index is refused at once."""
    blocks = {"src_cache": one_sided.blocks}
    layers = range(LAYERS)
    for none in (None, [], ()):
        for key in (CacheKeyByIdAndIndex(FAR, 1), CacheKeyByIdAndIndex(FAR, 1, 0), BlocksCacheKey(FAR, 1)):
            config = TransferWithCacheKeyConfig(key, layers, layers)
            one_sided.ends(
                UNLINKED, **blocks, src_block_indices=none, dst_block_indices=none, transfer_configs=[config]
            )
    for index in (1, 3, UINT32_MAX):
        key = CacheKeyByIdAndIndex(FAR, 1, index)
        wrong = {**blocks, "transfer_configs": [TransferWithCacheKeyConfig(key, layers, layers)]}
        Row(wrong, LE, f"batch_index={index} of cache_key must be 0").judge(one_sided.call(**wrong), index)


def test_of_two_mistakes_in_one_config_the_first_is_named(bench: Bench) -> None:
    def named(config: Any, text: str, **given: Any) -> None:
        Row({}, LE, text).judge(bench.call(transfer_configs=[config], **given), text)

    blocks = {"src_cache": bench.blocks, "src_block_indices": [3], "dst_block_indices": [9]}
    named(addressed(range(9), 1, 1), "while src is blocks", **blocks)
    named(addressed(range(9), 9, 1), "src_layer_range")
    named(addressed(row=9, count=1), "len(dst_addrs)")
    assert addressed(row=3).src_batch_index == 3
    bench.ends(UNLINKED, transfer_configs=[addressed(row=3)])  # the last slot is one


def test_of_two_configs_the_first_is_named(bench: Bench) -> None:
    bad = [addressed(range(9)), addressed(count=1), addressed(row=4)]
    texts = ["src_layer_range", "len(dst_addrs)", "out of range"]
    for first, second in itertools.permutations(range(3), 2):
        given = [addressed(), bad[first], bad[second]]
        Row({}, LE, texts[first]).judge(bench.call(transfer_configs=given), (first, second))


def test_a_range_that_was_not_given_is_set_to_all_layers(bench: Bench) -> None:
    configs = [addressed(), addressed(range(1, 3)), addressed()]
    bench.ends(UNLINKED, UNLINKED, UNLINKED, transfer_configs=configs)
    assert [config.src_layer_range for config in configs] == [range(4), range(1, 3), range(4)]
    before, after = TransferConfig(FAR, [1]), addressed()
    with raising(LE):
        bench.call(transfer_configs=[before, after])()
    assert before.src_layer_range == range(4), "set before its other checks"
    assert after.src_layer_range is None, "a later config was touched"
    single = TransferConfig(FAR, list(range(1, 9)))
    bench.ends(UNLINKED, transfer_configs=(single,), layer_synchronizer=Ready(tensor_num_per_layer=1))
    assert single.src_layer_range == range(8)


def test_a_range_that_was_not_given_with_a_key(one_sided: Bench) -> None:
    config = keyed(None)
    one_sided.ends(UNLINKED, transfer_configs=[config])
    assert config.src_layer_range == range(4)


def test_what_passes_every_check(bench: Bench) -> None:
    blocks = {"src_cache": bench.blocks}
    for none in (None, [], ()):
        for size in (None, 0):
            bench.ends(
                *[UNLINKED],
                src_block_indices=none,
                dst_block_indices=none,
                dst_block_memory_size=size,
            )
    for size in (None, 0, 256):
        pairs = {"src_block_indices": (0, 3), "dst_block_indices": [2**63, 0], "dst_block_memory_size": size}
        bench.ends(UNLINKED, **blocks, **pairs)
    bench.ends(UNLINKED, dst_block_indices=[0, 1], dst_block_memory_size=100)
    bench.ends(transfer_configs=[])
    bench.ends(transfer_configs=())
    bench.ends(UNLINKED, layer_synchronizer=Ready(timeout_in_millis=UINT32_MAX))
    same = addressed()
    bench.ends(UNLINKED, UNLINKED, transfer_configs=[same, same])
    three = bench.manager.allocate_cache(desc(4, 256, 6))
    config = addressed(range(1, 2), per_layer=3)
    bench.ends(UNLINKED, src_cache=three, layer_synchronizer=Ready(tensor_num_per_layer=3), transfer_configs=[config])


def test_blocks_go_into_blocks_of_their_size(bench: Bench) -> None:
    given = {"src_cache": bench.blocks, "src_block_indices": [0], "dst_block_indices": [0]}
    for size in (1, 255, 257, UINT64_MAX):
        row = Row({"dst_block_memory_size": size}, LE, "the size of a block of src_cache, 256")
        row.judge(bench.call(**given, **row.wrong), size)


def test_no_configs_are_a_success_at_once(bench: Bench) -> None:
    class Never(Ready):
        def synchronize_layer(self, layer_index: int, timeout_in_millis: Optional[int]) -> bool:  # noqa: ARG002
            raise AssertionError("nobody needs a layer")

    for empty in ([], ()):
        task = bench.call(transfer_configs=empty, layer_synchronizer=Never())()
        assert task.synchronize(0) is LLMStatusCode.LLM_SUCCESS
        assert task.get_results(0) == []
        assert task.done()
        assert task.progress() == task.errors() == []
        assert not task.cancel()


def test_a_cache_that_is_gone_is_the_outcome_of_every_config(bench: Bench) -> None:
    gone = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    task = bench.call(src_cache=bench.gone, transfer_configs=[addressed(), addressed()])()
    assert task.get_results() == [gone, gone]
    with raising(LE):  # what the arguments alone say comes first
        bench.call(src_cache=bench.gone, transfer_configs=[addressed(row=4)])()


def test_the_own_cluster_is_no_destination(bench: Bench) -> None:
    own = TransferConfig(1, list(range(1, 9)))
    bench.ends(LLMStatusCode.LLM_PARAM_INVALID, UNLINKED, transfer_configs=[own, addressed()])


def test_after_finalize_nothing_else_is_looked_at(start: Any) -> None:
    dist = start()
    bench = Bench(dist, addressed)
    dist.finalize()
    for given in ({}, {"src_cache": None}, {"transfer_configs": 1}):
        with raising(FINALIZED):
            bench.call(**given)()


@pytest.mark.contract("20.1", "19.layer-synchronizer")
def test_a_synchronizer_is_abstract_and_has_defaults() -> None:
    class Incomplete(LayerSynchronizer):
        """Lacks its method."""

    assert (LayerSynchronizer.tensor_num_per_layer, LayerSynchronizer.timeout_in_millis) == (2, None)
    for kind in (LayerSynchronizer, Incomplete):
        with pytest.raises(TypeError, match="abstract"):
            kind()


BY_ID = CacheKeyByIdAndIndex(2, 5, 1)
BY_BLOCKS = BlocksCacheKey(3)


def test_a_config_with_a_blocks_key_has_no_slot() -> None:
    with raising(LE):
        TransferWithCacheKeyConfig(BY_BLOCKS, range(1), range(1), 1)
    with raising(TE):  # the width first, in the constructor
        TransferWithCacheKeyConfig(BY_BLOCKS, range(1), range(1), "1")
    with raising(VE):
        TransferWithCacheKeyConfig(BY_BLOCKS, range(1), range(1), -1)
    config = TransferWithCacheKeyConfig(BY_BLOCKS, range(1), range(1))
    for bad in (1, -1, "1", None):  # the meaning first, in the setter
        with raising(LE):
            config.src_batch_index = bad
    with raising(TE):
        config.src_batch_index = False
    assert config.dst_cluster_id == 3
    config.cache_key = BY_ID
    assert config.dst_cluster_id == 3, "not refreshed"
    config.src_batch_index = 9
    config.cache_key = BY_BLOCKS
    assert (config.cache_key, config.src_batch_index) == (BY_BLOCKS, 9)
