"""Wrong values for every argument of pulls and pushes, and which of two mistakes is reported.

No peer is needed: a call that passes all checks fails with NOT_YET_LINK. Each row of a table is one mistake, in the
order of the contract (contract §7.12 to §7.17). With any two rows, the first must be reported. Not for: bytes.
"""

from __future__ import annotations

from array import array
from typing import Any, Callable

import numpy as np
import pytest

from conftest import options
from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    KvCacheManager,
    LLMException,
    LLMStatusCode,
    MemInfo,
    Memtype,
)
from llm_datadist.v2.llm_types import check_layer_range
from memory import AE, GONE, LE, TE, UINT32_MAX, UINT64_MAX, VE, UserTensors, desc, raising
from mistakes import Row, check, coded, fails

NOT_LINKED, REMOTE = coded(LLMStatusCode.LLM_NOT_YET_LINK), 2


class Bench:
    def __init__(self, dist: Any) -> None:
        self.manager = dist.cache_manager
        self.batch = self.manager.allocate_cache(desc(4, 256, 4))
        self.blocks = self.manager.allocate_blocks_cache(desc(4, 256, 4), BlocksCacheKey(1))
        self.gone = self.manager.allocate_cache(desc(4, 256, 4))
        self.manager.deallocate_cache(self.gone)
        self.gone_blocks = self.manager.allocate_blocks_cache(desc(4, 256, 4))
        self.manager.deallocate_blocks_cache(self.gone_blocks)
        sideways = CacheDesc(4, [4, 256], DataType.DT_INT8, batch_dim_index=1)
        self.sideways = self.manager.allocate_cache(sideways)
        self.cpu = UserTensors(4, 256, 4).cpu_cache()
        lists = {"src_blocks": [0, 1], "dst_blocks": [2, 3]}
        self.good: dict[str, dict[str, Any]] = {
            "pull_cache": {"cache_key": CacheKeyByIdAndIndex(REMOTE, 1), "cache": self.batch},
            "pull_blocks": {"src_cache_key": BlocksCacheKey(REMOTE), "dst_cache": self.blocks, **lists},
            "push_cache": {"dst_cache_key": CacheKeyByIdAndIndex(REMOTE, 1), "src_cache": self.batch},
            "push_blocks": {"dst_cache_key": BlocksCacheKey(REMOTE), "src_cache": self.blocks, **lists},
        }

    def call(self, name: str, **given: Any) -> Callable[[], Any]:
        """Make the call `name` with valid arguments, except those given."""
        return lambda: getattr(self.manager, name)(**{**self.good[name], **given})

    def check(self, name: str, rows: list[Row]) -> None:
        """Make the call with every row alone, and with every two rows: the first is reported, and no byte is copied."""
        fails(self.call(name), NOT_LINKED)
        check(getattr(self.manager, name), self.good[name], rows)


@pytest.fixture
def bench(start: Any) -> Bench:
    return Bench(start())


@pytest.fixture
def one_sided(start: Any) -> Bench:
    return Bench(start(options(llm__EnableRemoteCacheAccessible="1")))


PLACEHOLDER = CacheKey(REMOTE, UINT64_MAX)
BOTH_IDS = CacheKey(REMOTE, 1, prefix_id=1)


def per_layer() -> list[Row]:
    return [
        *[Row({"tensor_num_per_layer": bad}, TE, "tensor_num_per_layer") for bad in (None, 1.0, 2.0, "x", True, [2])],
        *[Row({"tensor_num_per_layer": bad}, VE, "uint32") for bad in (-1, UINT32_MAX + 1, 2**70)],
        Row({"tensor_num_per_layer": 0}, LE, "tensor_num_per_layer=0"),
    ]


def ranges(name: str) -> list[Row]:
    """Rows that pulls and pushes share."""
    return [
        *[Row({name: bad}, TE, name) for bad in (0, [0, 1], (0, 1), "range", slice(0, 1))],
        *[Row({name: bad}, LE, "step 1") for bad in (range(0, 4, 2), range(2, 0, -1), range(0, 2**80, 2**70))],
        *[Row({name: bad}, LE, "0 or above") for bad in (range(-1, 1), range(-(2**70), 1))],
    ]


def pull_ranges(name: str) -> list[Row]:
    wide = (range(2**32 + 1), range(2**32, 1), range(2**70), range(-5))
    return [*ranges(name), *[Row({name: bad}, VE, "uint32") for bad in wide]]


def push_ranges() -> list[Row]:
    rows: list[Row] = []
    for name in ("src_layer_range", "dst_layer_range"):
        rows += [*ranges(name), Row({name: range(0, 1, -1)}, LE, "step 1")]
        rows += [Row({name: bad}, LE, "at least one layer") for bad in (range(0), range(4, 1), range(2**70, 1))]
        rows += [Row({name: bad}, LE, "2^32") for bad in (range(2**32 + 1), range(2**70))]
    return [
        *rows,
        Row({"src_layer_range": range(1)}, LE, "without dst_layer_range"),
        Row({"src_layer_range": range(2), "dst_layer_range": range(1)}, LE, "2 layers and dst_layer_range 1"),
    ]


def slot_integers(index: str, cache: str, bench: Bench) -> list[Row]:
    """Rows that pulls and pushes of slots share, as far as the kind of cache."""
    return [
        *[Row({cache: bad}, TE, cache) for bad in (5, "cache", bench.batch.cache_desc, [bench.batch])],
        *[Row({index: bad}, TE, index) for bad in (None, "0", 1.0, True)],
        *[Row({index: bad}, VE, "uint32") for bad in (-1, UINT32_MAX + 1)],
    ]


def sizes() -> list[Row]:
    return [
        *[Row({"size": bad}, TE, "size") for bad in (None, "1", 1.0, True)],
        *[Row({"size": bad}, VE, "int64") for bad in (2**63, -(2**63) - 1)],
    ]


def block_lists() -> list[Row]:
    wrong = [range(2), {0: 1}, "01", b"01", 1, iter([0]), [0, "1"], [0, None], (0, 1.0), [True]]
    wrong += [np.array([0, 1]), np.array([0.0, 1.0]), array("q", [0, 1]), memoryview(array("i", [0, 1]))]
    return [Row({name: bad}, TE, name) for name in ("src_blocks", "dst_blocks") for bad in wrong]


@pytest.mark.contract("20.8", "20.9")
def test_pull_cache(bench: Bench) -> None:
    bench.check(
        "pull_cache",
        [
            *[Row({"cache_key": bad}, TE, "cache_key") for bad in (5, "key", BlocksCacheKey(REMOTE), CacheKey)],
            *slot_integers("batch_index", "cache", bench),
            *sizes(),
            *[Row({"cache": bad}, LE, "cache") for bad in (bench.blocks, bench.cpu)],
            Row({"cache": None}, AE),
            Row({"cache": bench.sideways}, LE, "batch_dim_index"),
            *[Row({"size": bad}, LE, "size") for bad in (0, -2, -(2**63))],
            *per_layer(),
            *[Row({"cache_key": bad}, LE, "exactly one of req_id and prefix_id") for bad in (PLACEHOLDER, BOTH_IDS)],
            *pull_ranges("src_layer_range"),
            *pull_ranges("dst_layer_range"),
            Row({"cache_key": None}, AE),
            Row({"cache_key": CacheKeyByIdAndIndex(1, 1)}, LE),
            Row({"cache": bench.gone}, GONE),
            Row({"batch_index": 4}, LE, "batch_index"),
            Row({"size": 257}, LE, "size"),
        ],
    )


def test_pull_cache_one_sided_takes_only_an_id(one_sided: Bench) -> None:
    for key in (CacheKey(REMOTE, 1), BlocksCacheKey(REMOTE), PLACEHOLDER, 5):
        with raising(TE):
            one_sided.call("pull_cache", cache_key=key)()
    fails(one_sided.call("pull_cache", cache_key=PLACEHOLDER), TE, "'CacheKeyByIdAndIndex'", "a placeholder")
    with raising(AE):
        one_sided.call("pull_cache", cache_key=None)()
    with raising(NOT_LINKED):
        one_sided.call("pull_cache")()


@pytest.mark.parametrize("mode", ["bench", "one_sided"])
def test_pull_blocks(mode: str, request: pytest.FixtureRequest) -> None:
    bench: Bench = request.getfixturevalue(mode)
    bench.check(
        "pull_blocks",
        [
            *[Row({"src_cache_key": bad}, TE, "src_cache_key") for bad in (5, "key", BlocksCacheKey)],
            *[Row({"dst_cache": bad}, TE, "dst_cache") for bad in (5, "cache", bench.blocks.cache_desc)],
            *block_lists(),
            Row({"dst_cache": bench.batch}, LE, "dst_cache"),
            Row({"dst_cache": None}, AE),
            *[Row({"dst_blocks": empty}, LE, "dst_blocks") for empty in ([], ())],
            Row({"dst_blocks": None}, TE, "dst_blocks"),
            *per_layer(),
            *[Row({"src_blocks": empty}, LE, "src_blocks") for empty in ([], ())],
            Row({"src_blocks": None}, TE, "src_blocks"),
            Row({"src_cache_key": CacheKey(REMOTE, 1), "src_blocks": [0]}, LE, "src_blocks"),
            Row({"src_cache_key": CacheKeyByIdAndIndex(REMOTE, 1), "src_blocks": [0]}, LE, "src_blocks"),
            *pull_ranges("src_layer_range"),
            *pull_ranges("dst_layer_range"),
            Row({"src_cache_key": BlocksCacheKey(1)}, LE),
            Row({"dst_cache": bench.gone_blocks}, GONE),
        ],
    )


def test_pull_blocks_of_a_slot(bench: Bench) -> None:
    slot = {"src_cache_key": CacheKeyByIdAndIndex(REMOTE, 1), "src_blocks": ()}
    for key in (CacheKey(REMOTE, 1), slot["src_cache_key"]):
        with raising(NOT_LINKED):
            bench.call("pull_blocks", src_blocks=[], src_cache_key=key)()
    with raising(TE):
        bench.call("pull_blocks", **{**slot, "src_blocks": None})()
    text = "exactly one of req_id and prefix_id"
    for key in (PLACEHOLDER, BOTH_IDS):
        wrong = {**slot, "src_cache_key": key, "src_layer_range": 5}
        fails(bench.call("pull_blocks", **wrong), LE, text, key)
        fails(bench.call("pull_blocks", **{**wrong, "src_blocks": [1]}), LE, "src_blocks", key)
    # A key of `None` counts as one of the other kinds, and raises only when it is read.
    fails(bench.call("pull_blocks", src_cache_key=None), LE, "src_blocks", "src_blocks first")
    with raising(AE):
        bench.call("pull_blocks", **{**slot, "src_cache_key": None})()
    fails(bench.call("pull_blocks", **{**slot, "src_cache_key": None, "src_layer_range": 5}), TE, "src_layer_range")


@pytest.mark.parametrize("name", ["src_blocks", "dst_blocks"])
@pytest.mark.parametrize("wide", [2**63, -(2**63) - 1, 2**200])
def test_a_block_beyond_64_bits(bench: Bench, name: str, wide: int) -> None:
    fails(bench.call("pull_blocks", **{name: [0, wide]}), LE, name, wide)


def test_unknown_keywords_of_a_pull_are_ignored(bench: Bench) -> None:
    ignored = {"src_cache_offset": "x", "dst_cache_offset": None, "anything": object()}
    for name in ("pull_cache", "pull_blocks"):
        with raising(NOT_LINKED):
            bench.call(name, **ignored)()


@pytest.mark.parametrize("empty", [None, range(0), range(4, 1), range(3, 3)])
def test_an_empty_range_of_a_pull_is_all_layers(bench: Bench, empty: Any) -> None:
    for name in ("pull_cache", "pull_blocks"):
        with raising(NOT_LINKED):
            # Three tensors per layer do not divide four tensors, which matters only with a range.
            bench.call(name, src_layer_range=empty, dst_layer_range=empty, tensor_num_per_layer=3)()


def test_pushes_need_one_sided_transfers_before_anything_else(bench: Bench) -> None:
    for name in ("push_cache", "push_blocks"):
        for wrong in ({}, {"dst_cache_key": 5, "src_cache": 5, "tensor_num_per_layer": "x"}):
            fails(bench.call(name, **wrong), LE, "llm.EnableRemoteCacheAccessible", name)


@pytest.mark.contract("20.9")
def test_push_cache(one_sided: Bench) -> None:
    bench = one_sided
    keys = (5, None, CacheKey(REMOTE, 1), BlocksCacheKey(REMOTE), CacheKeyByIdAndIndex)
    bench.check(
        "push_cache",
        [
            *[Row({"dst_cache_key": bad}, TE, "dst_cache_key") for bad in keys],
            Row({"src_cache": None}, TE, "src_cache"),
            *slot_integers("src_batch_index", "src_cache", bench),
            Row({"src_cache": bench.blocks}, LE, "src_cache"),
            Row({"src_cache": bench.sideways}, LE, "batch_dim_index"),
            *per_layer(),
            *push_ranges(),
            *sizes(),
            *[Row({"size": bad}, LE, "size") for bad in (0, 1, 256, -2)],
            Row({"dst_cache_key": CacheKeyByIdAndIndex(1, 1)}, LE),
            Row({"src_cache": bench.gone}, GONE),
        ],
    )
    ranges = {"src_layer_range": range(1), "dst_layer_range": range(1)}
    fails(bench.call("push_cache", tensor_num_per_layer=3, **ranges), LE, "tensor_num_per_layer=3", "3 of 4")
    fails(bench.call("push_cache", dst_layer_range=range(1)), LE, "without src_layer_range", "half given")


@pytest.mark.contract("20.9")
def test_push_blocks(one_sided: Bench) -> None:
    bench = one_sided
    keys = (5, CacheKey(REMOTE, 1), CacheKeyByIdAndIndex(REMOTE, 1), BlocksCacheKey)
    bench.check(
        "push_blocks",
        [
            *[Row({"dst_cache_key": bad}, TE, "dst_cache_key") for bad in keys],
            *[Row({"src_cache": bad}, TE, "src_cache") for bad in (5, "cache", bench.blocks.cache_desc)],
            *block_lists(),
            Row({"src_cache": bench.batch}, LE, "src_cache"),
            Row({"src_cache": None}, AE),
            *[Row({"dst_blocks": empty}, LE, "dst_blocks") for empty in ([], ())],
            Row({"dst_blocks": None}, TE, "dst_blocks"),
            *per_layer(),
            *push_ranges(),
            Row({"dst_cache_key": None}, AE),
            Row({"dst_cache_key": BlocksCacheKey(1)}, LE),
            Row({"src_cache": bench.gone_blocks}, GONE),
            *[Row({"src_blocks": empty}, LE, "src_blocks") for empty in ([], ())],
            Row({"src_blocks": [0]}, LE, "src_blocks"),
        ],
    )


def test_positions_are_those_of_the_contract(one_sided: Bench) -> None:
    manager, batch, blocks = one_sided.manager, one_sided.batch, one_sided.blocks
    slot, all_blocks = CacheKeyByIdAndIndex(REMOTE, 1, 2), BlocksCacheKey(REMOTE, 1)
    for call in (
        lambda: manager.pull_cache(slot, batch, 3, 256),
        lambda: manager.pull_blocks(all_blocks, blocks, [0], (1,)),
        lambda: manager.push_cache(slot, batch, 3, range(1), range(1, 2), -1, 1),
        lambda: manager.push_blocks(all_blocks, blocks, [0], [1], range(4), range(4), 1),
    ):
        with raising(NOT_LINKED):
            call()


@pytest.mark.contract("20.14")
@pytest.mark.parametrize(
    ("given", "text"),
    [
        *[(bad, "mem_infos") for bad in (None, "x", 5, (MemInfo(Memtype.MEM_TYPE_DEVICE, 1, 1),))],
        ([MemInfo(Memtype.MEM_TYPE_DEVICE, 1, 1), 5], "5, which is not a MemInfo"),
        ([None], "None, which is not a MemInfo"),
        *[(MemInfo(*bad), "mem_type") for bad in ((Memtype.MEM_TYPE_HOST, 0, 0), (None, 1, 1))],
        *[(MemInfo(Memtype.MEM_TYPE_DEVICE, *bad), "addr") for bad in ((0, 0), (None, 1))],
        *[(MemInfo(Memtype.MEM_TYPE_DEVICE, 1, size), "size") for size in (0, -1, None)],
        ([], "at least one"),
    ],
)
def test_remap_refuses_everything_with_one_code(manager: Any, given: Any, text: str) -> None:
    fails(lambda: manager.remap_registered_memory(given), LE, text, given)


def test_check_cache_key(manager: Any) -> None:
    for judge in (manager.check_cache_key, KvCacheManager.check_cache_key):
        for key in (PLACEHOLDER, BOTH_IDS):
            fails(lambda key=key, judge=judge: judge(key), LE, "exactly one of req_id and prefix_id")
        for key in (CacheKey(1, 0), CacheKey(1, UINT64_MAX, prefix_id=0)):
            assert judge(key) is None


def test_check_layer_range() -> None:
    for legal in (range(1), range(3, 5), range(2**40), None):
        assert check_layer_range("name", legal) is None
    assert check_layer_range("name", None, allow_none=True) is None
    for refused in (range(0), range(4, 1), range(0, 5, 2), range(0, 1, -1), range(-1, 2)):
        fails(lambda refused=refused: check_layer_range("name", refused), LE, "name", refused)
    fails(lambda: check_layer_range("name", [0, 1]), TE, "name", "a list")
    fails(lambda: check_layer_range("name", None, allow_none=False), TE, "name", "None")


def test_a_failure_that_moved_nothing_has_nothing_that_arrived(bench: Bench) -> None:
    with pytest.raises(LLMException) as caught:
        bench.call("pull_cache")()
    assert caught.value.arrived == []
    assert LLMException("text").arrived == []
