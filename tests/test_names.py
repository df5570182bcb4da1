"""Every public name, its import paths, and that all paths lead to the same object (contract §1).

Not for: the behaviour of the objects.
"""

from __future__ import annotations

import importlib
import inspect
import re
from typing import Any

import pytest

import llm_datadist
import llm_datadist_v1
from llm_datadist import LLMException, LLMRole
from llm_datadist.v2 import llm_utils
from llm_datadist.v2.config import ClusterConfig, EngineConfig
from memory import LE, TE, VE, raising, run_fresh

V2_LIST = [
    "LLMClusterInfo", "LLMStatusCode", "LLMException", "LLMRole", "LlmConfig", "LLMConfig", "DataType", "Status",
    "CacheDesc", "CacheKey", "CacheKeyByIdAndIndex", "KvCache", "Cache", "BlocksCacheKey", "LLMDataDist", "Placement",
    "RegisterMemStatus", "LayerSynchronizer", "TransferConfig", "CacheTask", "TransferWithCacheKeyConfig", "Memtype",
    "MemInfo",
]  # fmt: skip
LAZY = ["TensorDesc", "Tensor", "KvCacheManager"]
# contract §1.3, in its order
V1_LIST = [
    "LLMClusterInfo", "LLMStatusCode", "LLMException", "LLMRole", "LlmConfig", "LLMConfig", "TensorDesc", "Tensor",
    "DataType", "Status", "KvCacheManager", "CacheDesc", "CacheKey", "CacheKeyByIdAndIndex", "KvCache",
    "BlocksCacheKey", "LLMDataDist", "Placement", "RegisterMemStatus", "LayerSynchronizer", "TransferConfig",
    "CacheTask", "TransferWithCacheKeyConfig", "Memtype", "MemInfo",
]  # fmt: skip
TYPES = "llm_datadist.v2.llm_types"
WHERE = {
    "llm_datadist.configs": ["LLMRole", "LLMClusterInfo", "LlmConfig", "LLMConfig", "trans_str_ip"],
    "llm_datadist.status": [
        *["LLMStatusCode", "LLMException", "Status"],
        *["code_2_status", "handle_llm_status", "raise_if_false", "raise_if_true"],
    ],
    "llm_datadist.data_type": [
        *["DataType", "python_dtype_2_dwrapper_dtype", "_dwrapper_dtype_to_python_dtype"],
        *["get_python_dtype_from_wrapper_dtype", "dtype_to_np_dtype", "valid_np_dtypes", "np_dtype_to_dtype"],
    ],
    "llm_datadist.utils.utils": [
        *["check_inner", "check_dict", "check_isinstance", "check_uint8", "check_uint16", "check_uint32"],
        *["check_uint64", "check_int32", "check_int64", "check_list_int32", "check_list_int64"],
        *["check_list_uint64", "check_positive_or_set_default"],
    ],
    "llm_datadist.utils.log": ["get_logger", "info", "warn", "error", "LOG_FORMAT", "_find_caller"],
    TYPES: [
        *["CacheDesc", "CacheKey", "CacheKeyByIdAndIndex", "KvCache", "Cache", "BlocksCacheKey", "Placement"],
        *["RegisterMemStatus", "LayerSynchronizer", "TransferConfig", "CacheTask", "TransferWithCacheKeyConfig"],
        *["Memtype", "MemInfo", "PushType", "check_layer_range", "int_to_mem_status_dict", "DataType"],
    ],
    "llm_datadist.v2.cache_manager": ["CacheManager"],
    "llm_datadist.v2.llm_datadist": ["LLMDataDist", "_shutdown_handler", "EngineConfig"],
    "llm_datadist.v2.config": ["EngineConfig", "ClusterConfig"],
    "llm_datadist.v2.llm_utils": list(llm_utils.__all__),
    "llm_datadist.metadef_wrapper": [f"DT_{name}" for name in ("FLOAT", "BF16", "STRING", "BOOL")],
    "llm_datadist_v1": V1_LIST,
    "llm_datadist_v1.kv_cache_manager": ["KvCacheManager"],
}


@pytest.mark.contract("20.1")
def test_the_lists() -> None:
    assert llm_datadist.v2_list == V2_LIST
    assert len(V2_LIST) == 23
    assert set(llm_datadist.__all__) == {*V2_LIST, *LAZY}
    assert len(llm_datadist.__all__) == 26
    assert llm_datadist_v1.__all__ == V1_LIST
    assert llm_datadist.LLMConfig is llm_datadist.LlmConfig
    for name in [*V2_LIST, *LAZY]:
        assert inspect.isclass(getattr(llm_datadist, name)), name
    assert llm_datadist.__version__


@pytest.mark.contract("19.star-import", "20.1")
def test_star_import_brings_every_public_name_and_no_other() -> None:
    shown = run_fresh(
        """
        before = set(globals())
        from llm_datadist import *
        print(*sorted(set(globals()) - before - {"before"}))
        """
    )
    assert shown.split() == sorted([*V2_LIST, *LAZY])
    run_fresh("from llm_datadist_v1 import *; assert issubclass(LLMException, RuntimeError); LLMDataDist; KvCache")


def test_importing_sets_one_variable_and_only_when_unset() -> None:
    code = "import os; import llm_datadist; print(os.environ['AUTO_USE_UC_MEMORY'])"
    assert run_fresh(code, AUTO_USE_UC_MEMORY="1").strip() == "1"
    unset = f"import os; os.environ.pop('AUTO_USE_UC_MEMORY', None); {code}"
    assert run_fresh(unset).strip() == "0"


@pytest.mark.contract("20.1")
@pytest.mark.parametrize("module", list(WHERE))
def test_where_names_are_found(module: str) -> None:
    """All import paths of a name lead to the same object."""
    loaded = importlib.import_module(module)
    for name in WHERE[module]:
        assert hasattr(loaded, name), name
        if hasattr(llm_datadist, name):
            assert getattr(loaded, name) is getattr(llm_datadist, name), name


@pytest.mark.parametrize("module", ["llm_datadist", "llm_datadist_v1", "llm_datadist.data_type", TYPES])
def test_unknown_attributes(module: str) -> None:
    loaded: Any = importlib.import_module(module)
    with pytest.raises(AttributeError, match="has no attribute"):
        _ = loaded.no_such_name


RANGES = "src_layer_range=None, dst_layer_range=None"
LAYERS = f"{RANGES}, tensor_num_per_layer=2"
# the same for both managers, except the names of swap_blocks
SIGNATURES = {
    "allocate_cache": "cache_desc, cache_keys=()",
    "allocate_blocks_cache": "cache_desc, blocks_cache_key=None",
    "deallocate_cache": "cache",
    "remove_cache_key": "cache_key",
    "copy_cache": "dst, src, dst_batch_index=0, src_batch_index=0, offset=0, size=-1, req_id=None",
    "copy_blocks": "cache, copy_block_info",
    "transfer_cache_async": "src_cache, layer_synchronizer, transfer_configs, src_block_indices=None, "
    "dst_block_indices=None, dst_block_memory_size=None",
}
OF_CLASS: dict[str, dict[str, str]] = {
    "CacheManager": {
        **SIGNATURES,
        "deallocate_blocks_cache": "cache",
        "pull_cache": f"cache_key, cache, batch_index=0, size=-1, {LAYERS}, **kwargs",
        "pull_blocks": f"src_cache_key, dst_cache, src_blocks=(), dst_blocks=(), {LAYERS}, **kwargs",
        "push_cache": f"dst_cache_key, src_cache, src_batch_index=0, {RANGES}, size=-1, tensor_num_per_layer=2",
        "push_blocks": f"dst_cache_key, src_cache, src_blocks=(), dst_blocks=(), {LAYERS}",
        "swap_blocks": "src_cache, dst_cache, src_to_dst",
    },
    "KvCacheManager": {
        **SIGNATURES,
        "pull_cache": f"cache_key, kv_cache, batch_index=0, size=-1, {LAYERS}, src_cache_offset=None, "
        "dst_cache_offset=None, **kwargs",
        "pull_blocks": f"prompt_cache_key, decoder_kv_cache, prompt_blocks, decoder_blocks, {LAYERS}, **kwargs",
        "swap_blocks": "src, dst, src_to_dst",
        "get_cache_tensors": "cache, tensor_index=0",
        "is_initialized": "",
    },
    "LayerSynchronizer": {"synchronize_layer": "layer_index, timeout_in_millis"},
}


@pytest.mark.contract(
    "19.allocate-cache", "19.deallocate-cache", "19.remove-cache-key", "19.copy-cache", "19.allocate-blocks-cache",
    "19.deallocate-blocks-cache", "19.copy-blocks", "19.swap-blocks", "19.transfer-cache-async",
)  # fmt: skip
@pytest.mark.parametrize("class_name", OF_CLASS)
def test_signatures(class_name: str) -> None:
    for name, text in OF_CLASS[class_name].items():
        found = inspect.signature(getattr(getattr(llm_datadist, class_name), name)).parameters.values()
        plain = [one.replace(annotation=one.empty) for one in found if one.name != "self"]
        assert ", ".join(map(str, plain)) == text, name


def test_additions_that_are_no_names_of_the_star_import() -> None:
    for name, module in [
        ("CacheManager", "v2.cache_manager"),
        ("Engine", "native"),
        ("KvLayout", "native"),
    ]:
        assert getattr(llm_datadist, name) is getattr(importlib.import_module(f"llm_datadist.{module}"), name)
        assert name not in llm_datadist.__all__


def test_what_the_kv_cache_manager_has_not() -> None:
    manager = llm_datadist.KvCacheManager
    assert list(inspect.signature(manager).parameters) == ["native", "role"]
    absent = ("register_cache", "register_blocks_cache", "unregister_cache", "push_cache", "push_blocks")
    assert not any(hasattr(manager, name) for name in (*absent, "remap_registered_memory", "deallocate_blocks_cache"))


def test_llm_utils() -> None:
    assert llm_utils.layer_range_to_tensor_indices(range(1, 3), 3) == [3, 4, 5, 6, 7, 8]
    assert llm_utils.layer_range_to_tensor_indices(range(1), 2) == [0, 1]
    assert llm_utils.layer_range_to_tensor_indices(None, 2) == []
    assert llm_utils.layer_range_to_tensor_indices(range(3, 3), 2) == []
    assert (llm_utils.is_valid_id(0), llm_utils.is_valid_id(2**64 - 1)) == (True, False)
    assert (llm_utils.is_invalid_id(0), llm_utils.is_invalid_id(2**64 - 1)) == (False, True)
    assert llm_utils.parse_listen_ip_info("1.2.3.4:5") == ("1.2.3.4", 5)
    assert llm_utils.calc_tensor_size([2, 3], llm_datadist.DataType.DT_INT32) == 24
    for wrong, expected in [(1, TE), ("1.2.3.4", LE), ("1.2.3.4:x", VE), ("1.2.3.4:65536", VE)]:
        with raising(expected):
            llm_utils.parse_listen_ip_info(wrong)  # type: ignore[arg-type]
    documented = llm_utils.__doc__ or ""
    assert "pack_*" in documented
    assert "TransferAsyncThread" in documented


def test_engine_config() -> None:
    options = {"ge.exec.deviceId": "3;5", "llm.listenIpInfo": "1.2.3.4:26000;127.0.0.1:26001"}
    config = EngineConfig.from_engine_options(True, options)
    assert isinstance(config, EngineConfig)
    cluster = config.cluster_config
    assert isinstance(cluster, ClusterConfig)
    assert (cluster.device_ids, cluster.rank_id_to_device_id) == ([3, 5], {0: 3, 1: 5})
    assert cluster.listen_ip_info == [(67305985, 26000), (16777343, 26001)]
    assert EngineConfig.from_engine_options(False, options).cluster_config.listen_ip_info == []
    assert EngineConfig.parse_listen_ip_info("1.2.3.4:5") == (67305985, 5)
    given = dict(options)
    EngineConfig.gen_cluster_info_if_not_exist(7, LLMRole.PROMPT, given)
    assert set(given) == {*options, "llm.ClusterInfo"}
    same = {"llm.ClusterInfo": "whatever"}
    EngineConfig.gen_cluster_info_if_not_exist(7, LLMRole.PROMPT, same)
    assert same == {"llm.ClusterInfo": "whatever"}
    listeners = [(text, LE) for text in ("127.0.0.1:1;127.0.0.1:2", "1.2.3.4", "1.2.3.4:1:2")]
    listeners += [(text, VE) for text in ("1.2.3.4:x", "1.2.3.4:65536")]
    for wrong, expected in [
        ({}, LE),
        *[({"ge.exec.deviceId": devices}, LE) for devices in ("", "0;x", "-1")],
        ({"ge.exec.deviceId": "0;1", "llm.listenIpInfo": "1.2.3.4:1"}, LE),
        *[({"ge.exec.deviceId": "0", "llm.listenIpInfo": text}, expected) for text, expected in listeners],
    ]:
        with raising(expected):
            EngineConfig.from_engine_options(True, wrong)  # type: ignore[arg-type]
    with pytest.raises((AttributeError, TypeError)):
        EngineConfig.from_engine_options(True, {"ge.exec.deviceId": "0", "llm.listenIpInfo": 1})  # type: ignore[dict-item]
    with pytest.raises(RuntimeError) as caught:
        EngineConfig.parse_listen_ip_info("nowhere:1")
    assert not isinstance(caught.value, LLMException)


# The sections of a docstring. No text follows them. The indented lines of the section `Args` are a group.
SECTIONS = re.compile(r"^Args:\n((?: .*\n|\n)*)(?:^(?:Returns|Raises):\n(?: .*\n|\n)*)*\Z", re.MULTILINE)


PUBLIC_CLASSES = [
    value for value in (getattr(llm_datadist, name) for name in (*llm_datadist.__all__, "CacheManager"))
    if inspect.isclass(value) and value.__module__.startswith("llm_datadist.")
]  # fmt: skip


@pytest.mark.parametrize("owner", PUBLIC_CLASSES, ids=lambda owner: owner.__name__)
def test_every_parameter_of_a_public_method_is_documented_under_args(owner: type) -> None:
    looked_at = 0
    for name, method in inspect.getmembers(owner, inspect.isfunction):
        documented = inspect.getdoc(method) or ""
        if name.startswith("_") or "Args:" not in documented:
            continue
        sections = SECTIONS.search(f"{documented}\n")
        assert sections, f"text after a section of {owner.__name__}.{name}"
        named = re.findall(r"^    ([*]{0,2}\w+): ", sections[1], re.MULTILINE)
        parameters = inspect.signature(method).parameters.values()
        expected = [str(one).partition(":")[0].partition("=")[0].strip() for one in parameters if one.name != "self"]
        assert named == expected, f"{owner.__name__}.{name}"
        looked_at += 1
    assert looked_at or owner.__name__ not in ("CacheManager", "KvCacheManager", "LLMDataDist")
