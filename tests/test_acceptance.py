"""The acceptance checklist (python-api.md §20), line by line: `test_20_07_…` proves (part of) line 7.

Written from the specification alone, beside the tests of each call. Not for: the rows of §19 (`test_seed_contract.py`).
"""

from __future__ import annotations

import enum
import importlib
import threading
import time
from typing import Any, Callable

import numpy as np
import pytest

import llm_datadist
from conftest import PAGE, options, pool
from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    MemInfo,
    Memtype,
    Placement,
    RegisterMemStatus,
)
from memory import (
    AE,
    LE,
    TE,
    UINT32_MAX,
    UINT64_MAX,
    VE,
    Expected,
    UserTensors,
    contents,
    desc,
    fill,
    raising,
    run_fresh,
)
from memory import same as same_bytes
from mistakes import Row, check, coded
from peers import GONE, OK, Ends, by_request, code, equal, pattern
from two_modes import (
    CACHE_MANAGER,
    KV_CACHE_MANAGER,
    KV_OPTIONS,
    MODES,
    SUCCESS,
    Gate,
    Pair,
    config,
    sent,
    synchronizer,
)

INVALID = LLMStatusCode.LLM_PARAM_INVALID
FAILED = coded(LLMStatusCode.LLM_FAILED)
NO_LINK = coded(LLMStatusCode.LLM_NOT_YET_LINK)
NO_CACHE = coded(LLMStatusCode.LLM_KV_CACHE_NOT_EXIST)
OVER = coded(LLMStatusCode.LLM_ENGINE_FINALIZED)


@pytest.fixture(params=MODES)
def pair(ends: Ends, request: pytest.FixtureRequest) -> Pair:
    """Two linked ends in each mode."""
    return Pair(request.param, ends)


# -- 1 ---------------------------------------------------------------------------------------------------------------

V2_LIST = [
    "LLMClusterInfo", "LLMStatusCode", "LLMException", "LLMRole", "LlmConfig", "LLMConfig", "DataType", "Status",
    "CacheDesc", "CacheKey", "CacheKeyByIdAndIndex", "KvCache", "Cache", "BlocksCacheKey", "LLMDataDist", "Placement",
    "RegisterMemStatus", "LayerSynchronizer", "TransferConfig", "CacheTask", "TransferWithCacheKeyConfig", "Memtype",
    "MemInfo",
]  # fmt: skip
LAZY = ["TensorDesc", "Tensor", "KvCacheManager"]
TYPES = V2_LIST[V2_LIST.index("CacheDesc") :]
TYPES.remove("LLMDataDist")
PATHS = {
    "llm_datadist.configs": ["LLMClusterInfo", "LLMRole", "LlmConfig", "LLMConfig"],
    "llm_datadist.status": ["LLMStatusCode", "LLMException", "Status"],
    "llm_datadist.data_type": ["DataType"],
    "llm_datadist.v2.llm_types": TYPES,
    "llm_datadist.v2.llm_datadist": ["LLMDataDist"],
    "llm_datadist_v1": LAZY,
}


@pytest.mark.contract("20.1")
def test_20_01_names() -> None:
    assert len(V2_LIST) == 23
    assert sorted(llm_datadist.v2_list) == sorted(V2_LIST)
    assert sorted(llm_datadist.__all__) == sorted([*V2_LIST, *LAZY])
    for name in [*V2_LIST, *LAZY]:
        assert isinstance(getattr(llm_datadist, name), type), name
    assert llm_datadist.LLMConfig is llm_datadist.LlmConfig
    # An addition of this package: importable, but not a name of the star import.
    assert llm_datadist.CacheManager is importlib.import_module("llm_datadist.v2.cache_manager").CacheManager
    for name in ("NoSuchName", "cacheManager", "__path_of_nothing__"):
        with pytest.raises(AttributeError, match="has no attribute"):
            getattr(llm_datadist, name)


@pytest.mark.contract("20.1")
@pytest.mark.parametrize("module", PATHS)
def test_20_01_importable_paths(module: str) -> None:
    loaded = importlib.import_module(module)
    assert PATHS[module]
    for name in PATHS[module]:
        assert getattr(loaded, name) is getattr(llm_datadist, name), name


@pytest.mark.contract("20.1")
def test_20_01_the_companion_package() -> None:
    companion = importlib.import_module("llm_datadist_v1")
    own = [name for name in V2_LIST if name != "Cache"]
    assert sorted(companion.__all__) == sorted([*own, *LAZY]), "python-api.md §1.3"
    for name in companion.__all__:
        assert getattr(companion, name) is getattr(llm_datadist, name), "one class, whichever way it is imported"
    module = importlib.import_module("llm_datadist_v1.kv_cache_manager")
    assert module.KvCacheManager is llm_datadist.KvCacheManager


@pytest.mark.contract("20.1", "19.layer-synchronizer", "19.llm-exception")
def test_20_01_kinds() -> None:
    for name in ("LLMStatusCode", "LLMRole", "Placement"):
        assert issubclass(getattr(llm_datadist, name), enum.IntEnum)
    for name in ("DataType", "RegisterMemStatus", "Memtype"):
        kind = getattr(llm_datadist, name)
        assert issubclass(kind, enum.Enum)
        assert not issubclass(kind, int)
    assert issubclass(LLMException, RuntimeError)
    with pytest.raises(TypeError):
        llm_datadist.LayerSynchronizer()

    class Incomplete(llm_datadist.LayerSynchronizer):  # type: ignore[misc, name-defined]
        """Lacks its method."""

    with pytest.raises(TypeError):
        Incomplete()


@pytest.mark.contract("20.1", "19.star-import")
def test_20_01_star_import() -> None:
    out = run_fresh(
        """
        from llm_datadist import *
        import llm_datadist, sys
        missing = [name for name in llm_datadist.__all__ if name not in globals()]
        print(len(llm_datadist.__all__), missing, "numpy" in sys.modules)
        """
    )
    assert out.split("\n")[0] == "26 [] False"


# -- 2 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.contract("20.2", "19.llm-config")
@pytest.mark.parametrize("ids", [[0, 1], (0, 1)])
def test_20_02_device_ids(ids: Any) -> None:
    made = LLMConfig()
    made.device_id = ids
    assert made.device_id == ids
    assert type(made.device_id) is type(ids)
    assert made.generate_options() == {
        "ge.exec.deviceId": "0;1",
        "ge.session_device_id": "0",
        "llm.MemoryUtilization": "0.95",
    }
    for bad, expected in (
        (None, TE), ("0", TE), (0.0, TE), (True, TE), ([0, "1"], TE), ([True], TE), ((0, None), TE),
        (-1, LE), ([0, -1], LE), ((-1,), LE), (2**31, VE), ([0, 2**31], VE),
    ):  # fmt: skip
        with raising(expected):
            made.device_id = bad
        assert made.device_id == ids


@pytest.mark.contract("20.2")
def test_20_02_memory_utilisation() -> None:
    made = LLMConfig()
    assert made.generate_options()["llm.MemoryUtilization"] == "0.95"
    for good in (0.0, 0.25, 1.0):
        made.mem_utilization = good
        assert made.mem_utilization == good
        assert made.generate_options()["llm.MemoryUtilization"] == str(good)
    for bad, expected in (
        (-0.01, LE), (1.01, LE), (float("nan"), LE), (float("inf"), LE),
        (1, TE), (0, TE), (None, TE), ("0.5", TE), (True, TE),
    ):  # fmt: skip
        with raising(expected):
            made.mem_utilization = bad
    assert made.generate_options()["llm.MemoryUtilization"] == "1.0"


@pytest.mark.contract("20.2")
@pytest.mark.parametrize(
    ("attribute", "key"),
    [("global_resource_config", "llm.GlobalResourceConfig"), ("local_comm_res", "llm.LocalCommRes")],
)
def test_20_02_texts_that_are_emitted_when_set_even_if_empty(attribute: str, key: str) -> None:
    assert key not in LLMConfig().generate_options()
    for text in ("", "{}", '{"a": 1}'):
        made = LLMConfig()
        setattr(made, attribute, text)
        assert made.generate_options()[key] == text
        assert getattr(made, attribute) == text
    with raising(TE):
        setattr(LLMConfig(), attribute, 5)


@pytest.mark.contract("20.2")
@pytest.mark.parametrize("by", ["enable_remote_cache_accessible", "_enable_remote_cache_accessible"])
@pytest.mark.parametrize(("flag", "text"), [(None, None), (False, "0"), (True, "1")])
def test_20_02_remote_cache_flag(by: str, flag: bool | None, text: str | None) -> None:
    made = LLMConfig()
    setattr(made, by, flag)
    assert made.generate_options().get("llm.EnableRemoteCacheAccessible") == text
    assert made.gen_options() is made.generate_options()


# -- 3 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.contract("20.3", "19.cache-key", "19.blocks-cache-key")
@pytest.mark.parametrize(
    ("make", "expected", "text"),
    [
        (CacheKey, LE, "cluster_id is required"),
        (lambda: CacheKey(req_id=1), LE, "cluster_id is required"),
        (BlocksCacheKey, LE, "cluster_id is required"),
        (lambda: BlocksCacheKey(model_id=1), LE, "cluster_id is required"),
        (lambda: CacheKey(1), LE, "req_id is required"),
        (lambda: CacheKey(cluster_id=1), LE, "req_id is required"),
        (lambda: CacheKey(prompt_cluster_id=1, model_id=2), LE, "req_id is required"),
        (lambda: CacheKey(1, 2, wrong=3), LE, "Unsupported"),
        (lambda: CacheKey(cluster_id=1, req_id=2, wrong=None), LE, "Unsupported"),
        (lambda: BlocksCacheKey(1, wrong=3), LE, "Unsupported"),
        (lambda: BlocksCacheKey(cluster_id=1, req_id=3), LE, "Unsupported"),
        (lambda: BlocksCacheKey("1"), TE, "only support"),
        (lambda: BlocksCacheKey(cluster_id="1"), TE, "only support"),
        (lambda: BlocksCacheKey(1, "0"), TE, "only support"),
        (lambda: BlocksCacheKey(prompt_cluster_id=1, model_id=1.0), TE, "only support"),
        (lambda: CacheKey(1, 2, 3, 4, 5), LE, ""),
        (lambda: CacheKey(1, 2, 3, 4, model_id=5), LE, ""),
        (lambda: BlocksCacheKey(1, 2, 3), LE, ""),
        (lambda: CacheKey("1", 2), TE, ""),
        (lambda: CacheKey(1, None), TE, ""),
        (lambda: CacheKey(-1, 2), VE, ""),
        (lambda: CacheKey(cluster_id=-1, req_id=2), VE, ""),
        (lambda: CacheKey(1, -1), VE, ""),
        (lambda: CacheKey(1, 2, -1), VE, ""),
        (lambda: CacheKey(1, 2, 3, -1), VE, ""),
        (lambda: CacheKey(1, 2, prefix_id=UINT64_MAX + 1), VE, ""),
        (lambda: BlocksCacheKey(-1), VE, ""),
        (lambda: BlocksCacheKey(1, -1), VE, ""),
        (lambda: CacheKeyByIdAndIndex(-1, 1), VE, ""),
        (lambda: CacheKeyByIdAndIndex(1, 1, -1), VE, ""),
        (lambda: CacheKeyByIdAndIndex(1, None), TE, ""),
        # Order: arguments in all, cluster id, request, unknown names, types.
        (lambda: CacheKey(a=1, b=2, c=3, d=4, e=5), LE, ""),
        (lambda: CacheKey(wrong=1), LE, "cluster_id is required"),
        (lambda: CacheKey("x", wrong=1), LE, "req_id is required"),
        (lambda: CacheKey("x", "y", wrong=1), LE, "Unsupported"),
        (lambda: BlocksCacheKey(wrong=1), LE, "cluster_id is required"),
        (lambda: BlocksCacheKey("x", wrong=1), LE, "Unsupported"),
    ],
)
def test_20_03_keys_refused(make: Callable[[], Any], expected: Expected, text: str) -> None:
    with pytest.raises(Exception) as caught:  # noqa: PT011  (judged below)
        make()
    expected.judge(caught.value)
    assert text in str(caught.value)


@pytest.mark.contract("20.3", "19.cache-key", "19.blocks-cache-key")
def test_20_03_keys_by_position_keyword_and_alias() -> None:
    for key in (
        CacheKey(1, 2, 3, 4),
        CacheKey(cluster_id=1, req_id=2, model_id=3, prefix_id=4),
        CacheKey(prompt_cluster_id=1, req_id=2, model_id=3, prefix_id=4),
        CacheKey(1, 2, prefix_id=4, model_id=3),
    ):
        assert (key.cluster_id, key.prompt_cluster_id, key.req_id, key.model_id, key.prefix_id) == (1, 1, 2, 3, 4)
        assert repr(key) == "CacheKey(cluster_id=1, req_id=2, prefix_id=4, model_id=3)"
    short = CacheKey(1, req_id=UINT64_MAX)
    assert (short.model_id, short.prefix_id) == (0, UINT64_MAX)
    for blocks in (BlocksCacheKey(1, 2), BlocksCacheKey(cluster_id=1, model_id=2), BlocksCacheKey(1, model_id=2)):
        assert (blocks.cluster_id, blocks.prompt_cluster_id, blocks.model_id) == (1, 1, 2)
        assert repr(blocks) == "BlocksCacheKey(cluster_id=1, model_id=2)"
    other = BlocksCacheKey(prompt_cluster_id=3, model_id=1)
    assert (other.cluster_id, other.prompt_cluster_id) == (3, 3)
    assert repr(other) == "BlocksCacheKey(prompt_cluster_id=3, model_id=1)"
    assert BlocksCacheKey(UINT64_MAX).model_id == 0
    assert BlocksCacheKey(5, cluster_id=6).cluster_id == 5
    assert BlocksCacheKey(cluster_id=7, prompt_cluster_id=8).cluster_id == 7
    slot = CacheKeyByIdAndIndex(1, -2)
    assert (slot.cluster_id, slot.cache_id, slot.batch_index) == (1, -2, 0)
    assert CacheKey(1, 2) != CacheKey(1, 2)


# -- 4 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.contract("20.4", "19.cache-desc")
def test_20_04_descriptor_widths() -> None:
    for tensors in (-1, 2**32):
        with raising(VE):
            CacheDesc(tensors, [1, 2], DataType.DT_FLOAT16)
    for index in (2**31, -(2**31) - 1, 2**100):
        with raising(VE):
            CacheDesc(1, [1, 2], DataType.DT_FLOAT16, seq_len_dim_index=index)
        with raising(VE):
            CacheDesc(1, [1, 2], DataType.DT_FLOAT16, Placement.DEVICE, 0, index)
    for index in (2, -2, 2**31 - 1):
        with raising(LE):
            CacheDesc(1, [1, 2], DataType.DT_FLOAT16, seq_len_dim_index=index)
    assert CacheDesc(2**32 - 1, (1, 2), DataType.DT_FLOAT16, seq_len_dim_index=1).num_tensors == 2**32 - 1
    with raising(VE):
        CacheDesc(-1, [1, 2], "x", seq_len_dim_index=2**31)


# -- 5 ---------------------------------------------------------------------------------------------------------------

TRANSFER_FIELDS: dict[str, tuple[list[Any], list[tuple[Any, Expected]]]] = {
    "dst_cluster_id": (
        [0, 2, UINT64_MAX],
        [*[(bad, TE) for bad in (None, "1", 1.0, True, [1])], *[(bad, VE) for bad in (-1, UINT64_MAX + 1, 2**100)]],
    ),
    "dst_addrs": (
        [[1, 2], (3, 4), [UINT64_MAX], [0]],
        [
            *[(bad, TE) for bad in (None, 5, "12", {1, 2}, range(2), {1: 2}, [1, "2"], [None], (1, 2.0), [True])],
            *[(bad, VE) for bad in ([-1], [1, UINT64_MAX + 1], (1, 2**100))],
        ],
    ),
    "src_layer_range": (
        [None, range(1), range(3, 40)],
        [
            *[(bad, TE) for bad in ([0, 1], 1, "range", (0, 1), slice(0, 1))],
            *[(bad, LE) for bad in (range(0), range(4, 1), range(0, 5, 2), range(0, 1, -1), range(-1, 2), range(3, 3))],
        ],
    ),
    "src_batch_index": (
        [0, 7, UINT32_MAX],
        [*[(bad, TE) for bad in (None, "0", 0.0, True)], *[(bad, VE) for bad in (-1, 2**32, 2**100)]],
    ),
}
GOOD_TRANSFER = {"dst_cluster_id": 1, "dst_addrs": [1, 2], "src_layer_range": range(1), "src_batch_index": 0}


@pytest.mark.contract("20.5", "19.transfer-config")
@pytest.mark.parametrize("field", TRANSFER_FIELDS)
def test_20_05_transfer_config_fields(field: str) -> None:
    good, bad = TRANSFER_FIELDS[field]
    for value in good:
        made = config(**{**GOOD_TRANSFER, field: value})
        assert getattr(made, field) == value
        other = config(*GOOD_TRANSFER.values())
        setattr(other, field, value)
        assert getattr(other, field) == value
    for value, expected in bad:
        with raising(expected):
            config(**{**GOOD_TRANSFER, field: value})
        made = config(**GOOD_TRANSFER)
        with raising(expected):
            setattr(made, field, value)
        assert getattr(made, field) == GOOD_TRANSFER[field], "a refused value was kept"


@pytest.mark.contract("20.5", "19.transfer-config")
def test_20_05_transfer_config_order_defaults_and_text() -> None:
    check(
        config,
        GOOD_TRANSFER,
        [Row({field: value}, expected) for field, (_, bad) in TRANSFER_FIELDS.items() for value, expected in bad],
    )
    made = config(1, [1, 2])
    assert (made.src_layer_range, made.src_batch_index, made.dst_layer_range) == (None, 0, None)
    full = config(1, [1, 2], range(1), 0)
    text = "TransferConfig(dst_cluster_id=1, dst_addrs=[1, 2], src_layer_range=range(0, 1), src_batch_index=0)"
    assert (repr(full), str(full)) == (text, text)


@pytest.mark.contract("20.5")
def test_20_05_transfer_config_with_a_cache_key() -> None:
    make = llm_datadist.TransferWithCacheKeyConfig
    blocks, slot = BlocksCacheKey(3), CacheKeyByIdAndIndex(2, 1)
    good = {"cache_key": slot, "src_layer_range": range(2), "dst_layer_range": range(3, 5), "src_batch_index": 1}
    ranges = TRANSFER_FIELDS["src_layer_range"][1]
    rows = [
        *[Row({"cache_key": bad}, TE) for bad in (None, 5, "key", CacheKey(1, 1))],
        *[Row({"src_layer_range": bad}, expected) for bad, expected in [(None, TE), *ranges]],
        *[Row({"dst_layer_range": bad}, expected) for bad, expected in [(None, TE), *ranges]],
        Row({"dst_layer_range": range(3), "src_layer_range": range(2)}, LE),
        *[Row({"src_batch_index": bad}, expected) for bad, expected in TRANSFER_FIELDS["src_batch_index"][1]],
        Row({"cache_key": blocks, "src_batch_index": 1}, LE),
    ]
    check(make, good, rows)
    made = make(**good)
    assert (made.cache_key, made.dst_cluster_id) == (slot, 2)
    text = "src_layer_range=range(0, 2), dst_layer_range=range(3, 5), src_batch_index=1)"
    assert repr(made) == f"TransferWithCacheKeyConfig(cache_key={slot!r}, {text}"
    made.src_layer_range = made.dst_layer_range = None
    assert (made.src_layer_range, made.dst_layer_range) == (None, None)
    with raising(LE):
        made.cache_key, made.src_batch_index = blocks, 1
    assert made.dst_cluster_id == 2
    made = make(blocks, range(1), range(1))
    assert made.src_batch_index == 0
    with raising(LE):
        made.src_batch_index = 2**32 - 1
    with raising(TE):
        make(blocks)


# -- 6 ---------------------------------------------------------------------------------------------------------------


class Sender:
    """One engine without links, with everything a layer-wise transfer may be given."""

    def __init__(self, mode: str, dist: LLMDataDist) -> None:
        self.kv = mode == KV_CACHE_MANAGER
        self.manager = dist.kv_cache_manager if self.kv else dist.cache_manager
        self.batch = self.manager.allocate_cache(desc(4, 256, 4))
        self.odd = self.manager.allocate_cache(desc(4, 256, 3))
        self.blocks = self.manager.allocate_blocks_cache(desc(4, 256, 4))
        self.user = UserTensors(4, 256, 4)
        handle = llm_datadist.KvCache if self.kv else Cache
        self.host = handle.create_cpu_cache(self.user.describe(), self.user.addrs)
        self.foreign = (
            Cache(1, desc(4, 256, 4), [1] * 4, None, False, False)
            if self.kv
            else llm_datadist.KvCache(1, desc(4, 256, 4), [[1] * 4], None)
        )
        self.asked: list[int] = []
        self.good: dict[str, Any] = {
            "src_cache": self.batch,
            # A false answer would end the transfer too, and which of the two is first would be chance.
            "layer_synchronizer": synchronizer(lambda layer: self.asked.append(layer) is None),
            "transfer_configs": [config(2, [1, 2, 3, 4])],
            "src_block_indices": None,
            "dst_block_indices": None,
            "dst_block_memory_size": None,
        }

    def __call__(self, **given: Any) -> Any:
        return self.manager.transfer_cache_async(**{**self.good, **given})

    def rows(self) -> list[Row]:
        """One mistake a row, in the order of §8.1."""
        lists = (5, "01", {0}, range(2), [0, "1"], (0, None), [0.0], [True])
        src, dst, size = "src_block_indices", "dst_block_indices", "dst_block_memory_size"
        addrs = [1, 2, 3, 4]
        blocks = {"src_cache": self.blocks, src: [0], dst: [1]}
        with_key = llm_datadist.TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(2, 1), range(2), range(2))
        return [
            *[Row({"src_cache": bad}, TE) for bad in (None, "cache", 5, desc(), [self.batch], self.foreign)],
            Row({"src_cache": self.host}, LE),
            *[Row({dst: bad, size: None}, TE) for bad in lists],
            *[Row({dst: bad, size: None}, VE) for bad in ([-1], (0, UINT64_MAX + 1))],
            *[Row({src: bad}, TE) for bad in lists],
            *[Row({src: bad}, VE) for bad in ([-1], (0, UINT64_MAX + 1))],
            *[Row({size: bad}, TE) for bad in ("0", 1.0, True, [1])],
            *[Row({size: bad}, VE) for bad in (-1, UINT64_MAX + 1)],
            *[
                Row({src: bad, dst: none, size: None}, LE, "transfer from blocks to cache is not supported")
                for bad in ([1, 2], (0,))
                for none in (None, [], ())
            ],
            *[Row({src: a, dst: b, size: None}, LE) for a, b in (([0, 1], [0]), ([0], (0, 1)))],
            *[Row({src: none, dst: [0], size: None}, LE) for none in (None, [], ())],
            *[Row({"layer_synchronizer": bad}, TE) for bad in (None, 5, "x", lambda *_: True)],
            *[
                Row({"transfer_configs": bad}, TE)
                for bad in (None, 5, "x", config(2, addrs), {2: config(2, addrs)}, [5], [config(2, addrs), None])
            ],
            Row({"transfer_configs": [with_key]}, TE),
            *[Row({src: none, dst: none, size: 1}, LE) for none in (None, [], ())],
            Row({"src_cache": self.odd}, LE),
            Row({**blocks, "transfer_configs": [config(2, addrs, None, 1)]}, LE, "!= 0 while src is blocks"),
            *[Row({"transfer_configs": [config(2, [1] * 6, bad)]}, LE) for bad in (range(3), range(2, 5))],
            *[Row({"transfer_configs": [config(2, bad)]}, LE) for bad in ([], [1], [1, 2, 3], [1] * 5)],
            Row({"transfer_configs": (config(2, addrs), config(2, addrs, range(1)))}, LE),
            *[Row({"transfer_configs": [config(2, addrs, None, bad)]}, LE, "out of range: [0, 4)") for bad in (4, 99)],
        ]


@pytest.fixture(params=MODES)
def sender(request: pytest.FixtureRequest, start: Callable[..., LLMDataDist]) -> Sender:
    """In each mode."""
    return Sender(request.param, start(KV_OPTIONS if request.param == KV_CACHE_MANAGER else None))


@pytest.mark.contract("20.6", "19.transfer-cache-async")
def test_20_06_every_check_in_its_order(sender: Sender) -> None:
    check(sender, {}, sender.rows())
    assert sender.asked == [], "a refused call asked for a layer"
    # Its layers are ready, so that what fails is the link and not a layer.
    task = sender(layer_synchronizer=synchronizer())
    assert isinstance(task, llm_datadist.CacheTask)
    assert task.synchronize(60000) is LLMStatusCode.LLM_NOT_YET_LINK
    assert task.get_results() == [LLMStatusCode.LLM_NOT_YET_LINK]


@pytest.mark.contract("20.6", "19.transfer-blocks")
@pytest.mark.parametrize(
    ("lists", "expected"),
    [
        (([0, 1], [0, "1"]), TE),
        (([0, "1"], [0, 1]), TE),
        (([-1, 1], [0, 1]), VE),
        (([0, 1], [-1, 1]), VE),
        (([0, 1], [0]), LE),
        (([], [], 1), LE),
        ((None, None, 1), LE),
        (([0, 1], [0, 1], -1), VE),
        (([1, 2],), LE),
        (([1, 2], None), LE),
        ((None, [1, 2]), LE),
    ],
    ids=str,
)
def test_20_06_block_indices(sender: Sender, lists: tuple[Any, ...], expected: Expected) -> None:
    good = [sender.blocks, sender.good["layer_synchronizer"], [config(2, [1, 2, 3, 4])]]
    with pytest.raises(Exception) as caught:  # noqa: PT011  (judged below)
        sender.manager.transfer_cache_async(*good, *lists)
    expected.judge(caught.value)
    if lists[0] == [1, 2]:
        assert "transfer from blocks to cache is not supported" in str(caught.value)
    assert sender.asked == []


@pytest.mark.contract("20.6")
def test_20_06_source_and_synchronizer(sender: Sender) -> None:
    to = [config(2, [1, 2, 3, 4])]
    wait = sender.good["layer_synchronizer"]
    for bad in (None, "cache"):
        with raising(TE):
            sender.manager.transfer_cache_async(bad, wait, to)
    for arguments in ((sender.batch,), (sender.batch, wait), (sender.batch, None, to), ()):
        with raising(TE):
            sender.manager.transfer_cache_async(*arguments)
    assert sender.asked == []


@pytest.mark.contract("20.6")
def test_20_06_a_missing_range_is_filled_in_and_no_configs_are_success(sender: Sender) -> None:
    to = config(2, [1, 2, 3, 4])
    sender(transfer_configs=(to,)).synchronize(5000)
    assert to.src_layer_range == range(2)
    for none in ([], ()):
        task = sender(transfer_configs=none)
        assert task.synchronize(5000) is SUCCESS
        assert task.get_results() == []


@pytest.mark.contract("20.6")
def test_20_06_kinds_of_configs_with_remote_access(ends: Ends) -> None:
    near, far = ends.pair(accessible=True)
    near.allocate("n", 4, 256, 4, blocks=True, seed=1)
    far.allocate("f", 6, 256, 4, blocks=True, keys=[("blocks", 2, 5)], seed=2)
    manager, src, make = near.dist.cache_manager, near.held["n"].handle, llm_datadist.TransferWithCacheKeyConfig
    by_key = make(BlocksCacheKey(2, 5), range(2), range(2))
    for bad in ([config(2, far.addresses("f"))], [by_key, config(2, far.addresses("f"))]):
        with raising(TE):
            manager.transfer_cache_async(src, synchronizer(), bad, [3, 0], [5, 1])
    unknown = make(BlocksCacheKey(2, 6), range(2), range(2))
    beyond = make(BlocksCacheKey(2, 5), range(2), range(1, 3))
    task = manager.transfer_cache_async(src, synchronizer(), [unknown, beyond, by_key], [3, 0], [5, 1])
    assert task.synchronize() is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST
    assert task.get_results() == [LLMStatusCode.LLM_KV_CACHE_NOT_EXIST, INVALID, SUCCESS]
    expected = pattern(2, 4, 6, 256)
    for left, right in zip(expected, pattern(1, 4, 4, 256)):
        left[5], left[1] = right[3], right[0]
    read = far.read("f")
    assert equal(read, expected)


@pytest.mark.contract("20.6")
def test_20_06_roles_of_the_kv_cache_manager(start: Callable[..., LLMDataDist]) -> None:
    manager = start(KV_OPTIONS, role=LLMRole.DECODER).kv_cache_manager
    for arguments in ((None, None, None), ("cache", None, None)):
        with raising(LE):
            manager.transfer_cache_async(*arguments)
    cache = manager.allocate_cache(desc(4, 256, 2))
    with raising(LE):
        manager.transfer_cache_async(cache, synchronizer(), [config(2, [1, 2])])


# -- 7 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.contract("20.7", "19.transfer-cache-async", "19.cache-task", "19.layer-synchronizer")
def test_20_07_polling_and_waiting_with_limits(pair: Pair) -> None:
    src, addrs = pair.caches()
    gate = Gate(2)
    configs = [config(2, addrs, None, 1), config(2, addrs[:2], range(1), 2), config(2, addrs[2:], range(1, 2), 2)]
    task = pair.send(src, synchronizer(gate), configs)
    late = pair.late
    for limit in (0, 1, 50):
        assert task.synchronize(limit) is late
        assert task.synchronize(timeout_in_millis=limit) is late
        assert task.get_results(limit) == [late] * 3
        assert task.get_results(timeout_in_millis=limit) == [late] * 3
    assert gate.asked == [0]
    gate.open()
    for _ in range(2):
        assert task.synchronize() is SUCCESS
        assert task.get_results() == [SUCCESS] * 3
        assert task.synchronize(0) is SUCCESS
        assert task.get_results(0) == [SUCCESS] * 3
        assert type(task.get_results()) is list
    assert gate.asked == [0, 1], "every layer is asked for once"
    # The first writes its slot 1 to the start of each tensor, the others their slot 2, each in its own time.
    one, two = sent({0: 1}), sent({0: 2})
    for read, first, second in zip(pair.far.read("f"), one, two):
        assert np.array_equal(read, first) or np.array_equal(read, second)


@pytest.mark.contract("20.7")
def test_20_07_a_layer_that_blocks_for_300_milliseconds(pair: Pair) -> None:
    src, addrs = pair.caches(rows=1)

    def slow(layer: int) -> bool:
        time.sleep(0.0 if layer else 0.3)
        return True

    task = pair.send(src, synchronizer(slow), [config(2, addrs), config(2, addrs)])
    assert task.synchronize(0) is pair.late
    assert task.get_results(0) == [pair.late] * 2
    assert task.synchronize() is SUCCESS
    assert task.get_results() == [SUCCESS] * 2
    assert equal(pair.far.read("f"), pattern(1, 4, 1, 256))


@pytest.mark.contract("20.7")
@pytest.mark.parametrize("bad", [("0", TE), (1.0, TE), (True, TE), (-1, VE), (2**32, VE)])
def test_20_07_limits_are_uint32(pair: Pair, bad: tuple[Any, Expected]) -> None:
    value, expected = bad
    src, addrs = pair.caches()
    task = pair.send(src, synchronizer(), [config(2, addrs)])
    for call in (task.synchronize, task.get_results):
        with raising(expected):
            call(value)
        with raising(expected):
            call(timeout_in_millis=value)
    assert task.synchronize(2**32 - 1) is SUCCESS


def raises(_: int) -> bool:
    """A synchronizer with a mistake."""
    raise ZeroDivisionError("the model broke")


@pytest.mark.contract("20.7", "19.cache-task")
@pytest.mark.parametrize("answer", [False, None, 0, ""])
def test_20_07_a_synchronizer_that_says_no(pair: Pair, answer: Any) -> None:
    src, addrs = pair.caches()
    asked: list[int] = []

    def refuse(layer: int) -> Any:
        asked.append(layer)
        return answer

    task = pair.send(src, synchronizer(refuse), [config(2, addrs[:2], range(1)), config(2, addrs[2:], range(1, 2))])
    assert task.synchronize() is INVALID
    assert task.get_results() == [INVALID, None]
    assert asked == [0], "the layers after it are never reached"
    assert equal(pair.far.read("f"), pattern(2, 4, 4, 256)), "nothing was sent"


@pytest.mark.contract("20.7")
def test_20_07_a_synchronizer_that_raises(pair: Pair) -> None:
    src, addrs = pair.caches()
    task = pair.send(src, synchronizer(raises), [config(2, addrs[:2], range(1)), config(2, addrs[2:], range(1, 2))])
    assert task.synchronize() is pair.late
    assert task.get_results() == [pair.late, None]
    assert equal(pair.far.read("f"), pattern(2, 4, 4, 256))


@pytest.mark.contract("20.7", "19.cache-task")
@pytest.mark.parametrize("how", ["False", "raises"])
def test_20_07_what_was_complete_stays_a_success(pair: Pair, how: str) -> None:
    src, addrs = pair.caches(rows=1)
    first = threading.Event()

    def second_fails(layer: int) -> bool:
        if layer == 0:
            return True
        assert first.wait(20)
        return raises(layer) if how == "raises" else False

    configs = [
        config(2, addrs[:2], range(1)),
        config(2, addrs, range(2)),
        config(2, addrs[2:], range(1, 2)),
    ]
    task = pair.send(src, synchronizer(second_fails), configs)
    # Layer 0 is asked for, sent, and done before layer 1 is answered.
    far = pair.far
    expected = [*pattern(1, 4, 1, 256)[:2], *pattern(2, 4, 1, 256)[2:]]
    until = time.monotonic() + 60
    while not equal(far.read("f"), expected):
        assert time.monotonic() < until
        time.sleep(0.01)
    first.set()
    failed = pair.late if how == "raises" else INVALID
    assert task.synchronize() is failed, "the first that is neither success nor None"
    assert task.get_results() == [SUCCESS, failed, failed]


@pytest.mark.contract("20.7", "19.transfer-config")
def test_20_07_layers_arrive_where_they_belong(pair: Pair) -> None:
    src, addrs = pair.caches(tensors=8)
    # Addresses are relative to the start of the range: source layers 2 and 3 go to far layers 0 and 1, slot 3.
    asked: list[int] = []

    def note(layer: int) -> bool:
        asked.append(layer)
        return True

    task = pair.send(src, synchronizer(note), [config(2, [a + 3 * 256 for a in addrs[:4]], range(2, 4), 1)])
    assert task.synchronize() is SUCCESS
    assert asked == [2, 3], "a layer that nobody needs is not asked for"
    expected = pattern(2, 8, 4, 256)
    for tensor in range(4):
        expected[tensor][3] = pattern(1, 8, 4, 256)[4 + tensor][1]
    assert equal(pair.far.read("f"), expected)


@pytest.mark.contract("20.7")
def test_20_07_an_unlinked_destination_ends_alone(pair: Pair) -> None:
    src, addrs = pair.caches(rows=1)
    task = pair.send(src, synchronizer(), [config(3, addrs), config(2, addrs)])
    assert task.synchronize() is LLMStatusCode.LLM_NOT_YET_LINK
    assert task.get_results() == [LLMStatusCode.LLM_NOT_YET_LINK, SUCCESS]
    assert equal(pair.far.read("f"), pattern(1, 4, 1, 256))


# -- 8 ---------------------------------------------------------------------------------------------------------------


@pytest.mark.contract("20.8")
def test_20_08_sizes(manager: Any) -> None:
    src, dst = manager.allocate_cache(desc()), manager.allocate_cache(desc())
    before, from_ = fill(dst, 1), fill(src, 2)
    for size in (-2, 0, -(2**63)):
        with raising(LE):
            manager.copy_cache(dst, src, size=size)
        with raising(LE):
            manager.copy_cache(dst, src, 0, 0, 0, size)
        for key in (CacheKey(2, 1), CacheKeyByIdAndIndex(2, 1)):
            with raising(LE):
                manager.pull_cache(key, dst, size=size)
            with raising(LE):
                manager.pull_cache(key, dst, 0, size)
    assert same_bytes(contents(dst), before)
    for size in (-1, 1):
        manager.copy_cache(dst, src, size=size)
        with raising(NO_LINK):
            manager.pull_cache(CacheKey(2, 1), dst, size=size)
    assert [tensor[0].tobytes() for tensor in contents(dst)] == [tensor[0].tobytes() for tensor in from_]


@pytest.mark.contract("20.8")
def test_20_08_sizes_with_the_kv_cache_manager(start: Callable[..., LLMDataDist]) -> None:
    manager = start(KV_OPTIONS, role=LLMRole.DECODER).kv_cache_manager
    src, dst = manager.allocate_cache(desc()), manager.allocate_cache(desc())
    for size in (-2, 0):
        with raising(LE):
            manager.copy_cache(dst, src, size=size)
        with raising(LE):
            manager.pull_cache(CacheKey(2, 1), dst, size=size)
    manager.copy_cache(dst, src, size=-1)


# -- 9 ---------------------------------------------------------------------------------------------------------------

PER_LAYER = [(-1, VE), (2**32, VE), (0, LE), (1.0, TE), (2.0, TE), ("x", TE), (None, TE), (True, TE)]


@pytest.mark.contract("20.9")
@pytest.mark.parametrize(("bad", "expected"), PER_LAYER, ids=str)
@pytest.mark.parametrize("ranges", [{}, {"src_layer_range": range(1), "dst_layer_range": range(1)}], ids=["all", "one"])
def test_20_09_tensors_of_a_layer(
    start: Callable[..., LLMDataDist], bad: Any, expected: Expected, ranges: dict[str, Any]
) -> None:
    manager = start(options(llm__EnableRemoteCacheAccessible="1")).cache_manager
    batch, blocks = manager.allocate_cache(desc(tensors=10)), manager.allocate_blocks_cache(desc(tensors=10))
    slot, of_blocks = CacheKeyByIdAndIndex(2, 1), BlocksCacheKey(2)
    for call in (
        lambda n: manager.pull_cache(slot, batch, tensor_num_per_layer=n, **ranges),
        lambda n: manager.pull_blocks(of_blocks, blocks, [0], [1], tensor_num_per_layer=n, **ranges),
        lambda n: manager.push_cache(slot, batch, tensor_num_per_layer=n, **ranges),
        lambda n: manager.push_blocks(of_blocks, blocks, [0], [1], tensor_num_per_layer=n, **ranges),
    ):
        with raising(expected):
            call(bad)
        for good in (1, 2, 5, 10):
            with raising(NO_LINK):
                call(good)


@pytest.mark.contract("20.9")
def test_20_09_three_tensors_a_layer_do_not_divide_ten(ends: Ends) -> None:
    near, far = ends.pair(accessible=True)
    near.allocate("n", 4, 64, 10, seed=1)
    near.allocate("nb", 4, 64, 10, blocks=True, seed=1)
    cache = far.allocate("f", 4, 64, 10, seed=2)
    far.allocate("fb", 4, 64, 10, blocks=True, keys=[("blocks", 2, 0)], seed=2)
    slot, blocks = ("slot", 2, cache, 0), ("blocks", 2, 0)
    one = (0, 1)
    invalid = "LLM_PARAM_INVALID"
    assert code(near.push_cache, slot, "n", src_layers=one, dst_layers=one, n=3) == invalid
    assert code(near.push_blocks, blocks, "nb", [0], [1], src_layers=one, dst_layers=one, n=3) == invalid
    assert code(near.pull_cache, slot, "n", src_layers=one, dst_layers=one, n=3) == invalid
    assert code(near.pull_blocks, blocks, "nb", [0], [1], src_layers=one, dst_layers=one, n=3) == invalid
    assert equal(far.read("f"), pattern(2, 10, 4, 64))
    assert equal(far.read("fb"), pattern(2, 10, 4, 64))
    assert code(near.push_cache, slot, "n", src_layers=one, dst_layers=one, n=5) == OK
    expected = pattern(2, 10, 4, 64)
    for left, right in list(zip(expected, pattern(1, 10, 4, 64)))[:5]:
        left[0] = right[0]
    assert equal(far.read("f"), expected)


# -- 10 --------------------------------------------------------------------------------------------------------------


@pytest.mark.contract("20.10")
@pytest.mark.parametrize(
    ("given", "text"),
    [
        # Each mistake is named although the later ones are there too.
        ({"llm.TransferBackend": "hixl"}, "EnableCacheManager"),
        ({"llm.TransferBackend": "x", "llm.EnableRemoteCacheAccessible": "0"}, "EnableCacheManager"),
        ({"llm.TransferBackend": "hixl", "llm.EnableCacheManager": "0"}, "EnableCacheManager"),
        (
            {"llm.TransferBackend": "x", "llm.EnableCacheManager": "1", "llm.EnableRemoteCacheAccessible": "0"},
            "EnableRemoteCacheAccessible",
        ),
        ({"llm.TransferBackend": "hixl", "llm.EnableCacheManager": "1"}, "listenIpInfo"),
        (
            {"llm.TransferBackend": "x", "llm.EnableCacheManager": "1", "llm.EnableRemoteCacheAccessible": "1"},
            "listenIpInfo",
        ),
        ({"llm.LocalCommRes": "", "llm.EnableCacheManager": "0"}, ""),
        ({"llm.EnableCacheManager": "1", "llm.listenIpInfo": "127.0.0.1"}, ""),
    ],
    ids=str,
)
def test_20_10_missing_options(given: dict[str, str], text: str) -> None:
    dist = LLMDataDist(LLMRole.PROMPT, 1)
    before = dict(given)
    with pytest.raises(LLMException) as caught:
        dist.init(given)
    assert caught.value.status_code is INVALID
    assert text in str(caught.value)
    assert LLMDataDist.llm_engine_instance is None
    assert given == before
    dist.init(options())
    dist.finalize()


@pytest.mark.contract("20.10")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (5, TE),
        (b"5", TE),
        (1.5, TE),
        ("1,2", LE),
        ("1,", LE),
        (",", LE),
        ("abc", LE),
        ("", LE),
        ("-1", LE),
        ("1.5", LE),
    ],
)
def test_20_10_graph_memory(mode: str, size: Any, expected: Expected) -> None:
    flag = {"llm.EnableCacheManager": "1"} if mode == CACHE_MANAGER else {}
    dist = LLMDataDist(LLMRole.PROMPT, 1)
    with raising(expected):
        dist.init({"ge.exec.deviceId": "0", **flag, "ge.flowGraphMemMaxSize": size})
    assert LLMDataDist.llm_engine_instance is None
    try:
        dist.init({"ge.exec.deviceId": "0", **flag, "ge.flowGraphMemMaxSize": "16777216"})
    finally:
        dist.finalize()


@pytest.mark.contract("20.10")
@pytest.mark.parametrize("mode", MODES)
def test_20_10_second_instance_and_repeated_init(mode: str, start: Callable[..., LLMDataDist]) -> None:
    given = options() if mode == CACHE_MANAGER else KV_OPTIONS
    dist = start(given)
    other = LLMDataDist(LLMRole.DECODER, 2)
    for repeated in (given, None, 5, {}):
        assert dist.init(repeated) is None
    for any_ in (given, options(), {}):
        with raising(FAILED):
            other.init(any_)
    assert LLMDataDist.llm_engine_instance is dist
    dist.finalize()
    other.init(given)
    assert LLMDataDist.llm_engine_instance is other
    other.finalize()


# -- 11 --------------------------------------------------------------------------------------------------------------


def info(cluster: Any = 2, local: int = 1, remote: int = 1) -> LLMClusterInfo:
    """A peer that nobody is."""
    made = LLMClusterInfo()
    if cluster is not None:
        made.remote_cluster_id = cluster
    for _ in range(local):
        made.append_local_ip_info("127.0.0.1", 0)
    for _ in range(remote):
        made.append_remote_ip_info("127.0.0.1", 1)
    return made


@pytest.mark.contract("20.11")
def test_20_11_link(start: Callable[..., LLMDataDist]) -> None:
    dist = start()
    members = "cluster_rank_info"
    check(
        dist.link,
        {"comm_name": "name", members: {1: 0, 2: 1}, "rank_table": "{}"},
        [
            *[Row({"comm_name": bad}, TE) for bad in (None, 1, b"name")],
            *[Row({"comm_name": bad}, LE) for bad in ("", "x" * 128, "x" * 1000)],
            Row({members: None}, AE),
            *[Row({members: bad}, TE) for bad in (1, [1, 2], {"1": 0, 2: 1}, {1: "0", 2: 1}, {1: 0.0, 2: 1})],
            Row({members: {number: number for number in range(1, 6)}}, LE),
            *[Row({members: bad}, VE) for bad in ({-1: 0, 1: 1}, {1: 0, UINT64_MAX + 1: 1}, {1: 0, 2: -1}, {1: 2**32})],
            *[Row({"rank_table": bad}, TE) for bad in (1, b"{}", {})],
            *[Row({members: bad}, LE) for bad in ({}, {1: 0})],
            *[Row({members: bad}, LE) for bad in ({1: 1, 2: 0}, {2: 0, 3: 2, 1: 1})],
            Row({members: {2: 0, 3: 1}}, LE),
        ],
    )
    for call in (dist.unlink, dist.query_register_mem_status):
        for bad in (None, "1", 1.0):
            with raising(TE):
                call(bad)
        for bad in (-1, UINT64_MAX + 1):
            with raising(VE):
                call(bad)
        with raising(NO_LINK):
            call(1)


@pytest.mark.contract("20.11")
@pytest.mark.parametrize("name", ["link_clusters", "unlink_clusters"])
def test_20_11_clusters(start: Callable[..., LLMDataDist], name: str) -> None:
    dist = start()
    rows = [
        *[Row({"timeout": bad}, TE) for bad in (None, "1", 1.0)],
        *[Row({"timeout": bad}, VE) for bad in (2**31, -(2**31) - 1)],
        *[Row({"timeout": bad}, LE) for bad in (0, -1)],
        *[Row({"clusters": bad}, TE) for bad in (None, 5, info(), "x", [5], [info(), None], ({},))],
    ]
    if name == "unlink_clusters":
        rows += [Row({"force": bad}, TE) for bad in (0, 1, "x")]
    else:
        rows += [Row({"clusters": [info(local=0)]}, LE, "local_ip_info_list is empty")]
    rows += [Row({"clusters": [info(None)]}, TE)]
    good = {"clusters": [info()], "timeout": 500}
    check(getattr(dist, name), good if name == "link_clusters" else {**good, "force": False}, rows)
    assert getattr(dist, name)([]) == (INVALID, [])
    assert getattr(dist, name)(()) == (INVALID, [])
    for bad in (-1, 2**64):
        with raising(VE):
            info(bad)
    for bad in (None, "2", 2.0):
        with raising(TE):
            LLMClusterInfo().remote_cluster_id = bad
    code_, each = getattr(dist, name)([info(), info(remote=0)], 1000)
    assert each[1] is INVALID, "exactly one remote address"
    assert code_ is INVALID, "the last that failed"
    if name == "link_clusters":
        assert each[0] is LLMStatusCode.LLM_LINK_FAILED
    else:
        assert each[0] is SUCCESS, "nothing to unlink"


@pytest.mark.contract("20.11")
def test_20_11_switch_role(start: Callable[..., LLMDataDist], ends: Ends) -> None:
    dist = start()
    for bad in (None, 1, "Prompt", True):
        with raising(TE):
            dist.switch_role(bad)
    for bad_options, expected in (
        (5, TE),
        ([], TE),
        ({"llm.listenIpInfo": 5}, TE),
        ({"llm.listenIpInfo": "127.0.0.1"}, LE),
        ({"llm.listenIpInfo": "1:2:3"}, LE),
        ({"llm.listenIpInfo": "127.0.0.1:x"}, VE),
    ):
        with raising(expected):
            dist.switch_role(LLMRole.DECODER, bad_options)
    for role in (LLMRole.DECODER, LLMRole.DECODER, LLMRole.MIX):
        assert dist.switch_role(role) is None
        assert dist._role is role
    dist.finalize()
    near, _ = ends.pair()
    assert code(near.switch_role, "PROMPT") == "LLM_EXIST_LINK"


BEFORE_INIT: dict[str, Callable[[LLMDataDist], Any]] = {
    "link": lambda dist: dist.link("name", {1: 0, 2: 1}, "{}"),
    "unlink": lambda dist: dist.unlink(1),
    "query_register_mem_status": lambda dist: dist.query_register_mem_status(1),
    "link_clusters": lambda dist: dist.link_clusters([info()]),
    "unlink_clusters": lambda dist: dist.unlink_clusters([info()]),
    "switch_role": lambda dist: dist.switch_role(LLMRole.MIX),
    "check_link_status": lambda dist: dist.check_link_status(1),
    "cache_manager": lambda dist: dist.cache_manager,
    "kv_cache_manager": lambda dist: dist.kv_cache_manager,
}


@pytest.mark.contract("20.11")
@pytest.mark.parametrize("name", BEFORE_INIT)
def test_20_11_before_init_and_after_finalize(name: str, start: Callable[..., LLMDataDist]) -> None:
    after = start()
    after.finalize()
    for dist in (LLMDataDist(LLMRole.PROMPT, 1), after):
        with pytest.raises(RuntimeError) as caught:
            BEFORE_INIT[name](dist)
        assert not isinstance(caught.value, LLMException)
        assert dist.cluster_id == 1


@pytest.mark.contract("20.11")
def test_20_11_calls_of_the_other_mode(start: Callable[..., LLMDataDist]) -> None:
    dist = start(KV_OPTIONS)
    for name in ("link", "unlink", "query_register_mem_status", "cache_manager"):
        with pytest.raises(LLMException, match="EnableCacheManager") as caught:
            BEFORE_INIT[name](dist)
        assert caught.value.status_code is INVALID
    assert dist.kv_cache_manager is dist.kv_cache_manager
    assert dist.kv_cache_manager.is_initialized() is True
    dist.finalize()
    dist = start()
    for name in ("kv_cache_manager", "check_link_status"):
        with raising(LE):
            BEFORE_INIT[name](dist)


# -- 12 --------------------------------------------------------------------------------------------------------------


@pytest.mark.contract("20.12")
def test_20_12_finalize_and_the_shutdown_handler() -> None:
    out = run_fresh(
        """
        from llm_datadist import LLMDataDist, LLMException, LLMRole, LLMStatusCode
        from llm_datadist.v2.llm_datadist import _shutdown_handler
        given = {"llm.EnableCacheManager": "1", "ge.exec.deviceId": "0"}
        dist = LLMDataDist(LLMRole.PROMPT, 1)
        print(dist.finalize(), dist.finalize())
        print(_shutdown_handler(), LLMDataDist.llm_engine_instance)
        dist.init(given)
        print(LLMDataDist.llm_engine_instance is dist)
        print(_shutdown_handler(), LLMDataDist.llm_engine_instance, dist._is_initialized)
        print(_shutdown_handler())
        dist.init(given)

        class Stuck:
            asked = 0

            def finalize(self):
                Stuck.asked += 1
                raise LLMException("stuck", status_code=LLMStatusCode.LLM_FAILED)

        LLMDataDist.llm_engine_instance = Stuck()
        print(_shutdown_handler(), Stuck.asked)
        LLMDataDist.llm_engine_instance = dist
        dist.finalize()
        """,
    )
    shown = [line for line in out.splitlines() if not line.startswith("[")]
    assert shown == ["None None", "None None", "True", "None None False", "None", "None 1"]


# -- 13 --------------------------------------------------------------------------------------------------------------


@pytest.mark.contract("20.13")
def test_20_13_role_strings() -> None:
    words = {LLMRole.PROMPT: "Prompt", LLMRole.DECODER: "Decoder", LLMRole.MIX: "Mix"}
    assert {role: LLMDataDist._role_to_str(role) for role in LLMRole} == words
    dist = LLMDataDist(LLMRole.PROMPT, 1)
    assert dist._role_to_str(LLMRole.MIX) == "Mix"


# -- 14 --------------------------------------------------------------------------------------------------------------


@pytest.mark.contract("20.14")
def test_20_14_remap(ends: Ends) -> None:
    near, _ = ends.pair()
    remap = near.dist.cache_manager.remap_registered_memory
    device, host = Memtype.MEM_TYPE_DEVICE, Memtype.MEM_TYPE_HOST
    assert remap(MemInfo(device, 4096, 1)) is None
    assert remap([MemInfo(device, 4096, 1)]) is None
    assert remap([MemInfo(device, 4096, 1), MemInfo(device, 8192, 2)]) is None
    for bad in (
        "text", None, 5, (MemInfo(device, 4096, 1),), [MemInfo(device, 4096, 1), "text"], [],
        MemInfo(host, 4096, 1), MemInfo(device, 0, 1), MemInfo(device, 4096, -1), MemInfo(device, 4096, 0),
        [MemInfo(device, 4096, 1), MemInfo(host, 4096, 1)],
    ):  # fmt: skip
        with raising(LE):
            remap(bad)
    alone = MemInfo(device, 1, 2)
    assert (alone.mem_type, alone.addr, alone.size) == (device, 1, 2)


@pytest.mark.contract("20.14")
def test_20_14_remap_without_a_link(manager: Any) -> None:
    with raising(NO_LINK):
        manager.remap_registered_memory(MemInfo(Memtype.MEM_TYPE_DEVICE, 4096, 1))


# -- 15 --------------------------------------------------------------------------------------------------------------


@pytest.mark.contract("20.15")
@pytest.mark.parametrize("has", list(Placement))
def test_20_15_a_pool_serves_its_placement(has: Placement, start: Callable[..., LLMDataDist]) -> None:
    lacks = Placement(1 - has)
    given = options(pool(), None) if has is Placement.DEVICE else options(None, pool())
    manager = start(given).cache_manager
    for allocate in (manager.allocate_cache, manager.allocate_blocks_cache):
        cache = allocate(desc(placement=has))
        written = fill(cache, 1)
        assert same_bytes(contents(cache), written)
        with raising(LE):
            allocate(desc(placement=lacks))


# -- 16 --------------------------------------------------------------------------------------------------------------


@pytest.mark.contract("20.16", "19.double-reference")
def test_20_16_the_id_and_two_keys(manager: Any) -> None:
    keys = [CacheKey(1, req_id=1), CacheKey(1, req_id=2)]
    cache = manager.allocate_cache(desc(2, PAGE, 1), keys)

    def taken() -> int:
        used: int = manager.stats()["pools"]["device"]["used_bytes"]
        return used

    assert taken() == 2 * PAGE
    for _ in range(2):
        assert manager.deallocate_cache(cache) is None
        assert taken() == 2 * PAGE
    for _ in range(2):
        assert manager.remove_cache_key(keys[0]) is None
        assert taken() == 2 * PAGE
    assert manager.remove_cache_key(keys[1]) is None
    assert taken() == 0
    for _ in range(2):
        manager.remove_cache_key(keys[1])
        manager.deallocate_cache(cache)
    assert taken() == 0
    assert manager.allocate_cache(desc(2, PAGE, 1), keys).cache_id != cache.cache_id


@pytest.mark.contract("20.16", "19.double-reference", "19.pulls-and-keys")
def test_20_16_pulls_and_keys(pair: Pair) -> None:
    if pair.mode == CACHE_MANAGER:
        puller, owner, manager = pair.near, pair.far, "cache_manager"
    else:
        puller, owner, manager = pair.far, pair.near, "kv_cache_manager"
    pull = puller.pull_cache if manager == "cache_manager" else puller.pull_kv
    remove = owner.remove_key if manager == "cache_manager" else owner.remove_key_kv
    let_go = owner.deallocate if manager == "cache_manager" else owner.deallocate_kv
    cluster = 2 if owner is pair.far else 1
    key = [by_request(cluster, number) for number in range(4)]
    free = owner.used()
    pair.allocate(owner, "o", 3, 64, 2, keys=key[:3], seed=5)
    pair.allocate(puller, "p", 1, 64, 2)
    given = pattern(5, 2, 3, 64)

    pull(key[0], "p")
    assert equal(puller.read("p"), [tensor[:1] for tensor in given])
    assert code(pull, key[0], "p") == GONE, "a pull consumes its key"
    remove(key[0])
    let_go("o")
    let_go("o")
    pull(key[1], "p")
    assert equal(puller.read("p"), [tensor[1:2] for tensor in given]), "the remaining keys hold it"
    assert owner.used() > free
    remove(key[2])
    assert owner.used() == free
    assert code(pull, key[2], "p") == GONE, "a removed key"
    assert code(pull, key[3], "p") == GONE, "a key that never was"
    remove(key[2])
    assert equal(puller.read("p"), [tensor[1:2] for tensor in given]), "a refused pull wrote"


# -- 17 --------------------------------------------------------------------------------------------------------------


@pytest.mark.contract("20.17", "19.last-key-wins", "19.key-per-slot")
def test_20_17_the_last_of_equal_keys_and_repeated_placeholders(ends: Ends) -> None:
    near, far = ends.pair()
    idle = by_request(2, UINT64_MAX)
    far.allocate("b", 2, 64, 2, blocks=True, keys=[("blocks", 2, 0)])
    far.allocate("f", 5, 64, 2, keys=[by_request(2, 7), idle, by_request(9, 7), idle], seed=1)
    near.allocate("n", 1, 64, 2)
    given = pattern(1, 2, 5, 64)
    assert code(near.pull_cache, idle, "n") == "LLM_PARAM_INVALID"
    near.pull_cache(by_request(2, 7), "n")
    assert equal(near.read("n"), [tensor[2:3] for tensor in given]), "the last slot with the key"
    assert code(near.pull_cache, by_request(2, 7), "n") == GONE, "the earlier slot has no key"
    far.remove_key(idle)
    far.deallocate("f")
    assert far.used() == 2 * PAGE, "only the blocks cache is left"
    far.allocate("g", 5, 64, 2, keys=[idle, idle, by_request(2, 8), idle, idle], seed=3)
    near.pull_cache(by_request(2, 8), "n")
    assert equal(near.read("n"), [tensor[2:3] for tensor in pattern(3, 2, 5, 64)])


# -- 18 --------------------------------------------------------------------------------------------------------------

SWAP = {2: 3, 3: 4, 4: 5, 8: 0, 9: 1, 1: 9, 6: 6}


@pytest.mark.contract("20.18", "19.swap-blocks")
@pytest.mark.parametrize("device_blocks", [10, 20])
def test_20_18_swap_in_and_out(manager: Any, device_blocks: int) -> None:
    host_blocks = 30 - device_blocks
    user = UserTensors(host_blocks, 100, 4, seed=1)
    cpu = user.cpu_cache()
    npu = manager.allocate_blocks_cache(desc(device_blocks, 100, 4))
    device, host = fill(npu, 2), user.snapshot()
    assert manager.swap_blocks(cpu, npu, SWAP) is None
    for left, right in zip(device, host):
        for source, target in SWAP.items():
            left[target] = right[source]
    assert same_bytes(contents(npu), device)
    assert same_bytes(user.snapshot(), host)
    device = fill(npu, 3)
    assert manager.swap_blocks(npu, cpu, SWAP) is None
    for left, right in zip(host, device):
        for source, target in SWAP.items():
            left[target] = right[source]
    assert same_bytes(user.snapshot(), host)
    assert same_bytes(contents(npu), device)


# -- 19 --------------------------------------------------------------------------------------------------------------


@pytest.mark.contract("20.19")
def test_20_19_the_same_options_again(start: Callable[..., LLMDataDist]) -> None:
    given = options()
    before = dict(given)
    dist = start(given)
    managers = []
    for _ in range(3):
        manager = dist.cache_manager
        assert dist.cache_manager is manager
        managers.append(manager)
        assert [manager.allocate_cache(desc()).cache_id, manager.allocate_blocks_cache(desc()).cache_id] == [1, 2]
        user = UserTensors()
        assert manager.register_cache(user.describe(Placement.DEVICE), user.addrs).cache_id == 3
        dist.finalize()
        assert given == before, "the caller's options are not touched"
        dist.init(given)
    assert len({id(manager) for manager in managers}) == 3


@pytest.mark.contract("20.19")
def test_20_19_the_same_options_again_with_the_kv_cache_manager(start: Callable[..., LLMDataDist]) -> None:
    given = dict(KV_OPTIONS)
    dist = start(given)
    assert given.keys() >= KV_OPTIONS.keys()
    assert given.keys() - KV_OPTIONS.keys() <= {"llm.ClusterInfo"}, "only the cluster info is stored back (17.48)"
    for _ in range(3):
        manager = dist.kv_cache_manager
        assert [manager.allocate_cache(desc()).cache_id for _ in range(3)] == [1, 2, 3]
        dist.finalize()
        assert manager.is_initialized() is False
        dist.init(given)


# -- 20 --------------------------------------------------------------------------------------------------------------

INTEGER_CHECKS = {
    "check_uint8": (0, 2**8 - 1),
    "check_uint16": (0, 2**16 - 1),
    "check_uint32": (0, 2**32 - 1),
    "check_uint64": (0, 2**64 - 1),
    "check_int32": (-(2**31), 2**31 - 1),
    "check_int64": (-(2**63), 2**63 - 1),
}


@pytest.mark.contract("20.20")
@pytest.mark.parametrize("name", INTEGER_CHECKS)
def test_20_20_integer_validators(name: str) -> None:
    from llm_datadist.utils import utils  # noqa: PLC0415

    low, high = INTEGER_CHECKS[name]
    validate = getattr(utils, name)
    for good in (low, high, 0):
        assert validate("the_name", good) is None
    for bad in (True, False, None, 1.0, "1"):
        with pytest.raises(TypeError, match="the_name"):
            validate("the_name", bad)
    for bad in (low - 1, high + 1):
        with pytest.raises(ValueError, match="the_name") as caught:
            validate("the_name", bad)
        assert name.removeprefix("check_") in str(caught.value)
        assert str(bad) in str(caught.value)


@pytest.mark.contract("20.20")
def test_20_20_class_validators() -> None:
    from llm_datadist.utils.utils import check_dict, check_isinstance  # noqa: PLC0415

    class Special(dict[str, int]):
        """A subclass is accepted, and returned as it is."""

    value = Special()
    assert check_isinstance("the_name", value, dict) is value
    assert check_isinstance("the_name", value, [list, dict]) is value
    for empty in ([], ()):
        assert check_isinstance("the_name", empty, [list, tuple], int) is empty
    assert check_isinstance("the_name", None, dict) is None
    assert check_isinstance("the_name", True, [bool, int]) is True
    for bad, classes, shown in ((True, [int], "bool"), (5, [str, dict], "int")):
        with pytest.raises(TypeError, match=r"^the prefix .*the_name.*only support") as caught:
            check_isinstance("the_name", bad, classes, extra_fmt="the prefix ")
        assert all(f"'{kind.__name__}'" in str(caught.value) for kind in classes)
        assert shown in str(caught.value)
    with pytest.raises(TypeError, match=r"the_name inner type only support.*'int'.*bool"):
        check_isinstance("the_name", [1, True], [list], int)
    for bad in ({True: 1}, {1: True}):
        with raising(TE):
            check_dict("the_name", bad, int, int)
    with raising(TE):
        check_isinstance("the_name", None, dict, allow_none=False)


@pytest.mark.contract("20.20")
def test_20_20_descriptors_are_never_changed(manager: Any) -> None:
    shared = desc(4, 64, 2)
    flags: set[bool] = {shared._is_blocks}
    with raising(LE):
        manager.allocate_blocks_cache(desc(4, 64, 0))
    wrong: list[str] = []

    def make(blocks: bool) -> None:
        for _ in range(50):
            allocate = manager.allocate_blocks_cache if blocks else manager.allocate_cache
            cache = allocate(shared)
            flags.add(shared._is_blocks)
            if cache.is_blocks_cache is not blocks:
                wrong.append(repr(cache))
            (manager.deallocate_blocks_cache if blocks else manager.deallocate_cache)(cache)

    threads = [threading.Thread(target=make, args=(bool(number % 2),)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert wrong == []
    assert flags == {False}


@pytest.mark.contract("20.20")
def test_20_20_a_slot_that_is_not_there_is_refused_before_anything_starts(ends: Ends) -> None:
    near, far = ends.pair(accessible=True)
    near.allocate("n", 4, 256, 4)
    cache = far.allocate("f", 4, 256, 4)
    asked: list[int] = []
    wait = synchronizer(asked.append)
    with_key = llm_datadist.TransferWithCacheKeyConfig
    manager, src = near.dist.cache_manager, near.held["n"].handle
    for bad in (4, UINT32_MAX):
        to = with_key(CacheKeyByIdAndIndex(2, cache), range(2), range(2), bad)
        with pytest.raises(LLMException, match=r"src_batch_index.* out of range: \[0, 4\)") as caught:
            manager.transfer_cache_async(src, wait, [to])
        assert caught.value.status_code is INVALID
    assert asked == []


@pytest.mark.contract("20.20")
def test_20_20_destination_layers_are_relative(ends: Ends) -> None:
    near, far = ends.pair(accessible=True)
    near.allocate("n", 2, 64, 8, seed=1)
    cache = far.allocate("f", 3, 64, 8, seed=2)
    to = llm_datadist.TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(2, cache, 2), range(1, 3), range(2, 4), 1)
    task = near.dist.cache_manager.transfer_cache_async(near.held["n"].handle, synchronizer(), [to])
    assert task.synchronize() is SUCCESS
    assert task.get_results() == [SUCCESS]
    expected = pattern(2, 8, 3, 64)
    for tensor in range(4):  # layers 1 and 2, tensors 2 to 5, become layers 2 and 3, tensors 4 to 7
        expected[4 + tensor][2] = pattern(1, 8, 2, 64)[2 + tensor][1]
    assert equal(far.read("f"), expected)


EXPIRED: dict[str, tuple[Any, ...]] = {
    "allocate_cache": (None,),
    "allocate_blocks_cache": (None,),
    "register_cache": (None, None),
    "register_blocks_cache": (None, None),
    "deallocate_cache": (None,),
    "deallocate_blocks_cache": (None,),
    "copy_cache": (None, None),
    "copy_blocks": (None, None),
    "pull_cache": (None, None),
    "pull_blocks": (None, None),
    "push_cache": (None, None),
    "push_blocks": (None, None),
    "unregister_cache": (None,),
    "remove_cache_key": (None,),
    "remap_registered_memory": (None,),
    "swap_blocks": (None, None, None),
    "transfer_cache_async": (None, None, None),
}


@pytest.mark.contract("20.20")
@pytest.mark.parametrize("again", [False, True])
def test_20_20_an_expired_manager_reaches_no_engine(again: bool, start: Callable[..., LLMDataDist]) -> None:
    dist = start()
    manager = dist.cache_manager
    cache = manager.allocate_cache(desc())
    dist.finalize()
    dist.finalize()
    if again:
        dist.init(options())
        heir = dist.cache_manager.allocate_cache(desc())
        written = fill(heir, 1)
    for name, arguments in EXPIRED.items():
        with raising(OVER):
            getattr(manager, name)(*arguments)
    with raising(OVER):
        manager.deallocate_cache(cache)
    if again:
        assert same_bytes(contents(heir), written)
        assert dist.cache_manager.stats()["pools"]["device"]["used_bytes"] > 0


@pytest.mark.contract("20.20")
def test_20_20_the_registered_memory_status_by_number() -> None:
    from llm_datadist.v2.llm_types import int_to_mem_status_dict  # noqa: PLC0415

    assert {number: status.name for number, status in int_to_mem_status_dict.items()} == {
        0: "OK",
        1: "PREPARING",
        2: "FAILED",
    }
    assert [status.value for status in RegisterMemStatus] == [0, 1, 2]
