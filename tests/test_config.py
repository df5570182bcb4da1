"""`LLMConfig`: what each property takes, refuses, returns and emits."""

from __future__ import annotations

import json
from typing import Any, Callable

import pytest

from conftest import pool
from llm_datadist import LLMConfig, LlmConfig, LLMException, LLMStatusCode
from memory import LE, TE, VE, Expected, pool_facts, raising

FRESH = {"llm.MemoryUtilization": "0.95"}

# property -> value read before anything is set
INITIAL = {
    "ge_options": {},
    "device_id": None,
    "sync_kv_timeout": None,
    "deploy_res_path": "",
    "buf_pool_cfg": "",
    "mem_pool_cfg": "",
    "host_mem_pool_cfg": "",
    "enable_cache_manager": False,
    "enable_remote_cache_accessible": False,
    "listen_ip_info": "",
    "link_total_time": 0,
    "link_retry_count": 1,
    "rdma_traffic_class": None,
    "rdma_service_level": None,
    "local_comm_res": "",
    "transfer_backend": "",
    "global_resource_config": "",
    "cluster_info": "",
    "output_max_size": None,
    "enable_switch_role": False,
    "mem_utilization": 0.95,
}

# property, value, what is emitted besides the memory utilisation
EMITTED: list[tuple[str, Any, dict[str, str]]] = [
    ("ge_options", {"a": "b", "c": "d"}, {"a": "b", "c": "d"}),
    ("ge_options", {}, {}),
    ("device_id", 0, {"ge.exec.deviceId": "0", "ge.session_device_id": "0"}),
    ("device_id", [0, 1, 2], {"ge.exec.deviceId": "0;1;2", "ge.session_device_id": "0"}),
    ("device_id", (3, 4), {"ge.exec.deviceId": "3;4", "ge.session_device_id": "3"}),
    ("device_id", 2**31 - 1, {"ge.exec.deviceId": "2147483647", "ge.session_device_id": "2147483647"}),
    ("sync_kv_timeout", 1, {"llm.SyncKvCacheWaitTime": "1"}),
    ("sync_kv_timeout", 5000, {"llm.SyncKvCacheWaitTime": "5000"}),
    ("sync_kv_timeout", "5000", {"llm.SyncKvCacheWaitTime": "5000"}),
    ("sync_kv_timeout", 2**31 - 1, {"llm.SyncKvCacheWaitTime": "2147483647"}),
    ("deploy_res_path", "/x", {"llm.deployResPath": "/x"}),
    ("deploy_res_path", "", {}),
    ("buf_pool_cfg", "{}", {"llm.BufPoolCfg": "{}"}),
    ("mem_pool_cfg", '{"memory_size": 1}', {"llm.MemPoolConfig": '{"memory_size": 1}'}),
    ("mem_pool_cfg", "not json", {"llm.MemPoolConfig": "not json"}),
    ("mem_pool_cfg", "", {}),
    ("host_mem_pool_cfg", '{ "memory_size":2}', {"llm.HostMemPoolConfig": '{ "memory_size":2}'}),
    ("host_mem_pool_cfg", "", {}),
    ("enable_cache_manager", True, {"llm.EnableCacheManager": "1"}),
    ("enable_cache_manager", False, {"llm.EnableCacheManager": "0"}),
    ("enable_remote_cache_accessible", True, {"llm.EnableRemoteCacheAccessible": "1"}),
    ("enable_remote_cache_accessible", False, {"llm.EnableRemoteCacheAccessible": "0"}),
    ("listen_ip_info", "127.0.0.1:26000", {"llm.listenIpInfo": "127.0.0.1:26000"}),
    ("listen_ip_info", "", {}),
    ("link_total_time", 0, {"llm.LinkTotalTime": "0"}),
    ("link_total_time", 2**32 - 1, {"llm.LinkTotalTime": "4294967295"}),
    ("link_retry_count", 1, {"llm.LinkRetryCount": "1"}),
    ("link_retry_count", 100, {"llm.LinkRetryCount": "100"}),
    ("rdma_traffic_class", 100, {"llm.RdmaTrafficClass": "100"}),
    ("rdma_traffic_class", 2**32 - 1, {"llm.RdmaTrafficClass": "4294967295"}),
    ("rdma_service_level", 100, {"llm.RdmaServiceLevel": "100"}),
    ("local_comm_res", '{"version": "1.3"}', {"llm.LocalCommRes": '{"version": "1.3"}'}),
    ("local_comm_res", "", {"llm.LocalCommRes": ""}),
    ("transfer_backend", "hixl", {"llm.TransferBackend": "hixl"}),
    ("global_resource_config", "{}", {"llm.GlobalResourceConfig": "{}"}),
    ("global_resource_config", "", {"llm.GlobalResourceConfig": ""}),
    ("output_max_size", 10, {"llm.OutputMaxSize": "10"}),
    ("enable_switch_role", True, {"llm.EnableSwitchRole": "1"}),
    ("enable_switch_role", False, {}),
    ("copy_workers", 1, {"llm.CopyWorkers": "1"}),
    ("copy_workers", 256, {"llm.CopyWorkers": "256"}),
    ("swap_in_path", "auto", {"llm.SwapInPath": "auto"}),
    ("swap_in_path", "direct", {"llm.SwapInPath": "direct"}),
    ("swap_in_path", "ring", {"llm.SwapInPath": "ring"}),
    ("copy_kernel", "auto", {"llm.CopyKernel": "auto"}),
    ("copy_kernel", "plain", {"llm.CopyKernel": "plain"}),
    ("copy_kernel", "streaming", {"llm.CopyKernel": "streaming"}),
    ("huge_pages", "auto", {"llm.HugePages": "auto"}),
    ("huge_pages", "off", {"llm.HugePages": "off"}),
    ("huge_pages", "merge", {"llm.HugePages": "merge"}),
    ("huge_pages", "merge_registered", {"llm.HugePages": "merge_registered"}),
    ("huge_pages", "eager", {"llm.HugePages": "eager"}),
]

TEXTS = (
    "deploy_res_path",
    "buf_pool_cfg",
    "mem_pool_cfg",
    "host_mem_pool_cfg",
    "listen_ip_info",
    "local_comm_res",
    "transfer_backend",
    "global_resource_config",
)
FLAGS = ("enable_cache_manager", "enable_remote_cache_accessible", "enable_switch_role")
WIDTH32 = ("rdma_traffic_class", "rdma_service_level")
NAN = float("nan")

REFUSED: list[tuple[str, Any, Expected]] = [
    *[(name, bad, TE) for name in TEXTS for bad in (1, 1.5, True, b"x", [], {}, {"memory_size": 1})],
    *[(name, bad, TE) for name in FLAGS for bad in (1, 0, "1", "True", 1.0, [])],
    *[(name, bad, TE) for name in WIDTH32 for bad in (None, True, 1.0, "100", [1])],
    *[(name, bad, VE) for name in WIDTH32 for bad in (-1, 2**32, 2**64, -(2**70))],
    ("ge_options", {1: "x"}, TE),
    ("ge_options", {"x": 1}, TE),
    ("ge_options", {"x": None}, TE),
    ("ge_options", {None: "x"}, TE),
    ("ge_options", {True: "x"}, TE),
    ("ge_options", [("x", "y")], TE),
    ("ge_options", "x", TE),
    ("device_id", None, TE),
    ("device_id", True, TE),
    ("device_id", "0", TE),
    ("device_id", 1.0, TE),
    ("device_id", {0}, TE),
    ("device_id", [0, "1"], TE),
    ("device_id", [0, True], TE),
    ("device_id", [0, None], TE),
    ("device_id", -1, LE),
    ("device_id", [0, -1], LE),
    ("device_id", 2**31, VE),
    ("device_id", (0, 2**31), VE),
    ("sync_kv_timeout", None, TE),
    ("sync_kv_timeout", True, TE),
    ("sync_kv_timeout", 1.5, TE),
    ("sync_kv_timeout", [1], TE),
    ("sync_kv_timeout", 0, LE),
    ("sync_kv_timeout", -1, LE),
    *[("sync_kv_timeout", bad, LE) for bad in ("0", "-1", "", "abc", "1.5", "nan", "1e3", "0x10", " ", "5 0")],
    ("sync_kv_timeout", 2**31, VE),
    ("sync_kv_timeout", str(2**31), VE),
    ("link_total_time", None, TE),
    ("link_total_time", True, TE),
    ("link_total_time", 1.0, TE),
    ("link_total_time", "1", TE),
    ("link_total_time", -1, LE),
    ("link_total_time", 2**32, LE),
    ("link_retry_count", None, TE),
    ("link_retry_count", True, TE),
    ("link_retry_count", 1.0, TE),
    ("link_retry_count", "1", TE),
    ("link_retry_count", 0, LE),
    ("link_retry_count", -1, LE),
    ("link_retry_count", 101, LE),
    ("cluster_info", 1, TE),
    ("cluster_info", True, TE),
    ("cluster_info", {}, TE),
    ("cluster_info", "not json", VE),
    ("cluster_info", "{", VE),
    ("output_max_size", "1", TE),
    ("output_max_size", 1.0, TE),
    ("output_max_size", True, TE),
    ("mem_utilization", None, TE),
    ("mem_utilization", 1, TE),
    ("mem_utilization", 0, TE),
    ("mem_utilization", True, TE),
    ("mem_utilization", "0.5", TE),
    ("mem_utilization", -0.001, LE),
    ("mem_utilization", 1.001, LE),
    ("mem_utilization", NAN, LE),
    ("mem_utilization", float("inf"), LE),
    ("mem_utilization", float("-inf"), LE),
    *[("copy_workers", bad, TE) for bad in ("4", 1.0, True, False, [4])],
    *[("swap_in_path", bad, TE) for bad in (1, True, b"ring", ["ring"])],
    *[("copy_kernel", bad, TE) for bad in (1, True, b"plain", ["plain"])],
    *[("huge_pages", bad, TE) for bad in (1, False, True, b"off", ["off"])],
]

# Meaningless values of the additions: refused by the setter.
MEANINGLESS: list[tuple[str, Any]] = [
    *[("copy_workers", bad) for bad in (0, -1, 257, 2**31, 2**64)],
    *[("swap_in_path", bad) for bad in ("Ring", "fast", " ring", "nan", "", "\ud800", "x" * 10**6)],
    *[("copy_kernel", bad) for bad in ("Plain", "avx", "streaming ", "nan", "", "plain\0")],
    *[("huge_pages", bad) for bad in ("Auto", "on", "eager ", "1", "", "off\0", "\ud800", "x" * 10**6)],
]


@pytest.mark.contract("19.llm-config")
def test_fresh_config_emits_one_entry() -> None:
    assert LLMConfig is LlmConfig
    config = LLMConfig()
    assert config.generate_options() == FRESH


@pytest.mark.parametrize("name", INITIAL)
def test_initial_value(name: str) -> None:
    value = getattr(LLMConfig(), name)
    assert value == INITIAL[name]
    assert type(value) is type(INITIAL[name])


@pytest.mark.contract("20.2")
@pytest.mark.parametrize(("name", "value", "emitted"), EMITTED, ids=str)
def test_property_is_stored_and_emitted(name: str, value: Any, emitted: dict[str, str]) -> None:
    config = LLMConfig()
    setattr(config, name, value)
    made = config.generate_options()
    assert made == {**emitted, **FRESH}
    assert all(type(key) is str and type(text) is str for key, text in made.items())
    assert getattr(config, name) == value


def test_device_list_and_tuple_are_stored_as_given() -> None:
    config = LLMConfig()
    config.device_id = [0, 1, 2]
    assert config.device_id == [0, 1, 2]
    assert isinstance(config.device_id, list)
    config.device_id = (3, 4)
    assert config.device_id == (3, 4)
    assert isinstance(config.device_id, tuple)


def test_a_device_list_names_a_device() -> None:
    """An empty list is refused when it is set, and one that was emptied since when the options are made."""
    config = LLMConfig()
    for empty in ([], ()):
        with pytest.raises(LLMException, match="names no device") as caught:
            config.device_id = empty
        assert caught.value.status_code is LLMStatusCode.LLM_PARAM_INVALID
    assert config.device_id is None
    assert "ge.exec.deviceId" not in config.generate_options()
    devices = [4]
    config.device_id = devices
    devices.clear()
    with raising(LE):
        config.generate_options()
    devices.append("4")
    with raising(TE):
        config.generate_options()


@pytest.mark.contract("20.2", "19.sync-kv-timeout")
@pytest.mark.parametrize(("name", "value", "expected"), REFUSED, ids=str)
def test_setter_refuses_and_keeps_what_was(name: str, value: Any, expected: Expected) -> None:
    config = LLMConfig()
    before = getattr(config, name)
    with raising(expected):
        setattr(config, name, value)
    assert getattr(config, name) == before
    assert config.generate_options() == FRESH


@pytest.mark.parametrize("name", [*TEXTS, *FLAGS, "output_max_size"])
def test_none_is_silently_accepted(name: str) -> None:
    config = LLMConfig()
    setattr(config, name, None)
    assert all(isinstance(value, str) for value in config.generate_options().values())


def test_none_for_ge_options_is_an_attribute_error() -> None:
    config = LLMConfig()
    with pytest.raises(AttributeError):
        config.ge_options = None


@pytest.mark.parametrize(("value", "text"), [(0.0, "0.0"), (1.0, "1.0"), (0.5, "0.5"), (0.95, "0.95")])
def test_memory_utilisation(value: float, text: str) -> None:
    config = LLMConfig()
    config.mem_utilization = value
    assert config.generate_options() == {"llm.MemoryUtilization": text}


def test_cluster_info_addresses_become_integers() -> None:
    config = LLMConfig()
    config.cluster_info = json.dumps(
        {"cluster_id": 3, "listen_ip_info": [{"ip": "1.2.3.4", "port": 26000}, {"ip": "127.0.0.1", "port": 1}]}
    )
    made = json.loads(config.generate_options()["llm.ClusterInfo"])
    assert made == {"cluster_id": 3, "listen_ip_info": [{"ip": 67305985, "port": 26000}, {"ip": 16777343, "port": 1}]}
    with pytest.raises(json.JSONDecodeError):
        config.cluster_info = "{"


def test_the_same_dictionary_is_returned_and_written_keys_stay() -> None:
    config = LLMConfig()
    config.mem_pool_cfg = "first"
    made = config.generate_options()
    assert config.gen_options() is made
    assert config.options is made
    config.mem_pool_cfg = ""
    config.link_retry_count = 7
    assert config.generate_options() is made
    assert made["llm.MemPoolConfig"] == "first"
    assert made["llm.LinkRetryCount"] == "7"
    with pytest.raises(AttributeError):
        config.options = {}


def test_own_properties_win_over_the_same_key_in_ge_options() -> None:
    config = LLMConfig()
    config.ge_options = {"llm.MemPoolConfig": "loses", "ge.exec.deviceId": "9", "other": "kept"}
    config.mem_pool_cfg = "wins"
    config.device_id = 2
    made = config.generate_options()
    assert made["llm.MemPoolConfig"] == "wins"
    assert made["ge.exec.deviceId"] == "2"
    assert made["other"] == "kept"


@pytest.mark.parametrize(("flag", "text"), [(True, "1"), (False, "0"), (None, None)])
def test_private_remote_flag_is_honoured(flag: bool | None, text: str | None) -> None:
    config = LLMConfig()
    config._enable_remote_cache_accessible = flag
    assert config.generate_options().get("llm.EnableRemoteCacheAccessible") == text


@pytest.mark.parametrize("name", ["copy_workers", "swap_in_path", "copy_kernel", "huge_pages"])
def test_additions_are_emitted_only_when_set(name: str) -> None:
    key = "llm." + "".join(word.capitalize() for word in name.split("_"))
    config = LLMConfig()
    getattr(config, name)
    assert key not in config.generate_options()
    assert key in {written for _, _, emitted in EMITTED for written in emitted}


@pytest.mark.parametrize(("name", "value"), MEANINGLESS, ids=str)
def test_meaningless_additions_are_refused_by_their_setter(name: str, value: Any) -> None:
    config = LLMConfig()
    with pytest.raises(LLMException, match=name) as caught:
        setattr(config, name, value)
    LE.judge(caught.value)
    assert len(str(caught.value)) < 500
    assert config.generate_options() == FRESH


def test_every_property_exists() -> None:
    missing = [name for name, _, _ in EMITTED if not hasattr(type(LLMConfig()), name)]
    assert not missing, "setting a name that does not exist would go unnoticed"


def test_options_made_by_a_config_start_an_engine(start: Callable[..., Any]) -> None:
    config = LLMConfig()
    config.device_id = [0]
    config.enable_cache_manager = True
    config.mem_pool_cfg = pool()
    config.host_mem_pool_cfg = pool()
    config.sync_kv_timeout = "2000"
    config.link_total_time = 0
    config.link_retry_count = 1
    config.rdma_service_level = 100
    config.rdma_traffic_class = 100
    config.copy_workers = 2
    config.swap_in_path = "ring"
    config.copy_kernel = "streaming"
    config.huge_pages = "off"
    config.ge_options = {"unknown.key": "ignored"}
    made = config.generate_options()
    made["llm.RdmaServiceLevel"] = "4"
    before = dict(made)
    dist = start(made)
    assert made == before, "init changed the caller's dictionary"
    assert pool_facts(dist.cache_manager)["capacity_bytes"] == 2 << 20


def test_a_dict_that_changes_under_the_check_is_no_panic() -> None:
    given: dict[str, Any] = {"a": "b"}

    class Growing:
        """Adds an entry whenever it is asked for its class."""

        @property  # type: ignore[misc]
        def __class__(self) -> type:
            given[str(len(given))] = "x"
            return str

    given["e"] = Growing()
    given["f"] = "g"
    config = LLMConfig()
    config.ge_options = given
    assert config.ge_options is given


@pytest.mark.parametrize(
    ("text", "kind"),
    [
        ("5", TypeError),
        ("[]", TypeError),
        ("null", TypeError),
        ('{"listen_ip_info": 5}', TypeError),
        ('{"listen_ip_info": null}', TypeError),
        ('{"listen_ip_info": {"ip": "1.2.3.4"}}', TypeError),
        ('{"listen_ip_info": ["1.2.3.4"]}', TypeError),
        ('{"listen_ip_info": [{"ip": null}]}', TypeError),
        ('{"listen_ip_info": [{"ip": 1.5}]}', TypeError),
        ('{"listen_ip_info": [{"ip": true}]}', TypeError),
        ('{"listen_ip_info": [{"ip": "x"}]}', RuntimeError),
    ],
)
def test_cluster_info_of_another_shape_is_named(text: str, kind: type[Exception]) -> None:
    config = LLMConfig()
    with pytest.raises(kind, match=r"cluster_info .*only support" if kind is TypeError else "'x'"):
        config.cluster_info = text
    assert config.cluster_info == ""


@pytest.mark.parametrize(
    ("name", "value"),
    [("copy_workers", 4), ("swap_in_path", "ring"), ("copy_kernel", "plain"), ("huge_pages", "eager")],
)
def test_none_unsets_an_addition(name: str, value: Any) -> None:
    config = LLMConfig()
    setattr(config, name, value)
    assert getattr(config, name) == value
    setattr(config, name, None)
    assert getattr(config, name) is None
    assert len(config.generate_options()) == len(FRESH)
