"""Arguments of `transfer_cache_async`: what each mistake raises, and which of two mistakes is reported (contract §8.1).

No peer is needed: a call that passes all checks ends with NOT_YET_LINK. Not for: bytes (`test_layerwise.py`).
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
    LLMStatusCode,
    Placement,
    TransferConfig,
    TransferWithCacheKeyConfig,
)
from memory import LE, TE, UINT32_MAX, UINT64_MAX, VE, UserTensors, desc, raising
from mistakes import Row, check, fails

REMOTE = 2
UNLINKED = LLMStatusCode.LLM_NOT_YET_LINK
LAYERS = 4
KV = {"llm.listenIpInfo": "127.0.0.1:0", "llm.MemPoolConfig": pool()}


class Ready(LayerSynchronizer):
    """Every layer is ready."""

    def __init__(self, **attributes: Any) -> None:
        vars(self).update(attributes)

    def synchronize_layer(self, layer_index: int, timeout_in_millis: Optional[int]) -> bool:  # noqa: ARG002
        return True


def addressed(layers: Optional[range] = None, row: int = 0, count: Optional[int] = None, per_layer: int = 2) -> Any:
    """A config with as many addresses as tensors."""
    tensors = (LAYERS if layers is None else len(layers)) * per_layer
    return TransferConfig(REMOTE, list(range(1, (tensors if count is None else count) + 1)), layers, row)


def keyed(src: Optional[range] = range(LAYERS), dst: Optional[range] = range(LAYERS), row: int = 0) -> Any:
    """A config with a key."""
    made = TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(REMOTE, 1), range(1), range(1), row)
    made.src_layer_range, made.dst_layer_range = src, dst
    return made


class Bench:
    """One cache of each kind, on an engine without links."""

    def __init__(self, dist: Any, config: Callable[..., Any] = addressed, *, kv: bool = False) -> None:
        manager = dist.kv_cache_manager if kv else dist.cache_manager
        self.call, self.config = manager.transfer_cache_async, config
        self.cache_class = "KvCache" if kv else "Cache"
        tensors = 2 * LAYERS
        self.batch = manager.allocate_cache(desc(4, 256, tensors))
        self.blocks = manager.allocate_blocks_cache(desc(4, 256, tensors))
        self.three = manager.allocate_cache(desc(4, 256, 6))
        self.odd = manager.allocate_cache(desc(4, 256, 3))
        self.sideways = manager.allocate_cache(CacheDesc(tensors, [4, 256], DataType.DT_INT8, batch_dim_index=1))
        self.gone = manager.allocate_cache(desc(4, 256, tensors))
        manager.deallocate_cache(self.gone)
        self.user = UserTensors(4, 256, tensors)
        self.stranger: Any
        self.host: list[Any]
        if kv:
            self.stranger = Cache(1, desc(4, 256, tensors), [1] * tensors, None, False, False)
            self.host = [KvCache.create_cpu_cache(self.user.describe(), self.user.addrs)]
        else:
            self.stranger = KvCache(1, desc(4, 256, tensors), [[1] * tensors], None)
            self.host = [manager.allocate_cache(desc(4, 256, tensors, Placement.HOST)), self.user.cpu_cache()]
        self.good = {"src_cache": self.batch, "layer_synchronizer": Ready(), "transfer_configs": [config()]}

    def start(self, **given: Any) -> Any:
        """Make the call with valid arguments, except those given."""
        return self.call(**{**self.good, **given})

    def refuses(self, text: str, **given: Any) -> None:
        fails(lambda: self.start(**given), LE, text, text)

    def ends(self, *codes: Optional[LLMStatusCode], **given: Any) -> None:
        """Check that the call passes every check, and that its configs end with these codes."""
        assert self.start(**given).get_results(10_000) == list(codes)


@pytest.fixture
def bench(start: Any) -> Bench:
    """Destinations by address."""
    return Bench(start())


@pytest.fixture
def one_sided(start: Any) -> Bench:
    """Destinations by key."""
    return Bench(start(options(llm__EnableRemoteCacheAccessible="1")), keyed)


def index_rows(name: str) -> list[Row]:
    wrong = [0, "01", {0}, {0: 1}, range(2), iter([0]), b"01"]
    inside = [[0, "1"], [True], [0, 1.0], (None,), [-1, "1"], [[0]]]
    wide = [[-1, 1], (0, UINT64_MAX + 1), [2**70]]
    return [
        *[Row({name: bad}, TE, name) for bad in wrong],
        *[Row({name: bad}, TE, f"{name} inner type only support") for bad in inside],
        *[Row({name: bad}, VE, "uint64") for bad in wide],
    ]


def synchronizer_rows() -> list[Row]:
    """Rows of the synchronizer and its attributes."""
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
        *[Row({"src_cache": bad}, LE, "host memory") for bad in bench.host],
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
    bench = Bench(start({"ge.exec.deviceId": "0", **KV} if kv else None), kv=kv)
    addresses = [
        Row({"transfer_configs": [addressed(count=count)]}, LE, f"len(dst_addrs)={count} must be 8, for 4")
        for count in (7, 9, 16, 4, 0)
    ]
    rows = source_rows(bench)
    check(bench.call, bench.good, [*rows_of(bench, keyed), *rows[:6], *addresses, *rows[6:]])


def test_every_mistake_is_named_in_order_with_keys(one_sided: Bench) -> None:
    name = "transfer_configs"
    lengths = [
        Row({name: [keyed(range(3), range(2))]}, LE, "src_layer_range has 3 layers and dst_layer_range 2"),
        Row({name: [keyed(None, range(2))]}, LE, "src_layer_range has 4 layers and dst_layer_range 2"),
        Row({name: [keyed(range(2), None)]}, LE, "dst_layer_range=None"),
    ]
    rows = [*rows_of(one_sided, addressed), *source_rows(one_sided), *lengths]
    check(one_sided.call, one_sided.good, rows)


def test_of_two_mistakes_in_configs_the_first_is_named(bench: Bench) -> None:
    """`layerwise_arguments.rs` of the core's tests has the order of two mistakes in one config."""
    bad = {"src_layer_range": addressed(range(9)), "len(dst_addrs)": addressed(count=1), "range": addressed(row=4)}
    for first, second in itertools.permutations(bad, 2):
        bench.refuses(first, transfer_configs=[addressed(), bad[first], bad[second]])


def test_a_range_that_was_not_given_is_set_to_all_layers(bench: Bench) -> None:
    configs = [addressed(), addressed(range(1, 3)), addressed()]
    bench.ends(UNLINKED, UNLINKED, UNLINKED, transfer_configs=configs)
    assert [config.src_layer_range for config in configs] == [range(4), range(1, 3), range(4)]
    before, after = TransferConfig(REMOTE, [1]), addressed()
    bench.refuses("len(dst_addrs)", transfer_configs=[before, after])
    assert before.src_layer_range == range(4), "set before its other checks"
    assert after.src_layer_range is None, "a later config was touched"
    single = addressed(range(8), per_layer=1)
    single.src_layer_range = None
    bench.ends(UNLINKED, transfer_configs=(single,), layer_synchronizer=Ready(tensor_num_per_layer=1))
    assert single.src_layer_range == range(8)


def test_what_passes_every_check(bench: Bench) -> None:
    src, dst, size = "src_block_indices", "dst_block_indices", "dst_block_memory_size"
    for none, nothing in itertools.product((None, [], ()), (None, 0)):
        bench.ends(UNLINKED, **{src: none, dst: none, size: nothing})
    for same in (None, 0, 256):
        bench.ends(UNLINKED, src_cache=bench.blocks, **{src: (0, 3), dst: [2**63, 0], size: same})
    bench.ends(UNLINKED, **{dst: [0, 1], size: 100})
    bench.ends(UNLINKED, transfer_configs=[addressed(row=3)])
    bench.ends(UNLINKED, layer_synchronizer=Ready(timeout_in_millis=UINT32_MAX))
    bench.ends(UNLINKED, UNLINKED, transfer_configs=[addressed()] * 2)
    config = addressed(range(1, 2), per_layer=3)
    of_three = Ready(tensor_num_per_layer=3)
    bench.ends(UNLINKED, src_cache=bench.three, layer_synchronizer=of_three, transfer_configs=[config])


def test_no_configs_are_a_success_at_once(bench: Bench) -> None:
    class Never(Ready):
        def synchronize_layer(self, layer_index: int, timeout_in_millis: Optional[int]) -> bool:  # noqa: ARG002
            raise AssertionError("nobody needs a layer")

    for empty in ([], ()):
        task = bench.start(transfer_configs=empty, layer_synchronizer=Never())
        assert task.synchronize(0) is LLMStatusCode.LLM_SUCCESS
        assert task.get_results(0) == task.progress() == task.errors() == []
        assert task.done()
        assert not task.cancel()


def test_a_cache_that_is_gone_is_the_outcome_of_every_config(bench: Bench) -> None:
    gone = LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    bench.ends(gone, gone, src_cache=bench.gone, transfer_configs=[addressed(), addressed()])
    bench.refuses("out of range", src_cache=bench.gone, transfer_configs=[addressed(row=4)])


@pytest.mark.contract("20.1", "19.layer-synchronizer")
def test_a_synchronizer_is_abstract_and_has_defaults() -> None:
    class Incomplete(LayerSynchronizer):
        """Lacks its method."""

    assert (LayerSynchronizer.tensor_num_per_layer, LayerSynchronizer.timeout_in_millis) == (2, None)
    for kind in (LayerSynchronizer, Incomplete):
        with pytest.raises(TypeError, match="abstract"):
            kind()


def test_a_config_with_a_blocks_key_has_no_slot() -> None:
    """The constructor checks the width first. The setter checks first that the index is 0."""
    by_blocks, one = BlocksCacheKey(3), range(1)
    for bad, expected in ((1, LE), ("1", TE), (-1, VE)):
        with raising(expected):
            TransferWithCacheKeyConfig(by_blocks, one, one, bad)
    config = TransferWithCacheKeyConfig(by_blocks, one, one)
    for bad, expected in ((1, LE), (-1, LE), ("1", LE), (None, LE), (False, TE)):
        with raising(expected):
            config.src_batch_index = bad
    config.cache_key = CacheKeyByIdAndIndex(2, 5, 1)
    assert config.dst_cluster_id == 3, "a new key does not change it"
    config.src_batch_index = 9
    config.cache_key = by_blocks
    assert (config.cache_key, config.src_batch_index) == (by_blocks, 9)
