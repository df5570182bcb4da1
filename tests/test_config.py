"""`LLMConfig`: what each property takes, refuses, returns and emits.

Not for: the environment, the token and addresses of peers (`test_config_links.py`).
"""

from __future__ import annotations

import json
from typing import Any, Callable

import pytest

from conftest import options, pool
from ids import short
from llm_datadist import LLMConfig
from memory import LE, TE, VE, Expected, pool_facts, raising
from mistakes import fails

FRESH = {"llm.MemoryUtilization": "0.95"}
TEXTS = (
    "deploy_res_path", "buf_pool_cfg", "mem_pool_cfg", "host_mem_pool_cfg", "listen_ip_info", "local_comm_res",
    "transfer_backend", "global_resource_config",
)  # fmt: skip
FLAGS = ("enable_cache_manager", "enable_remote_cache_accessible", "enable_switch_role")
WIDTH32 = ("rdma_traffic_class", "rdma_service_level")
LINK_INTEGERS = ("link_heartbeat", "link_pin_limit", "link_silence", "link_streams", "rank_port")
LINK_TEXTS = ("link_addresses", "link_token", "link_transport", "rank_hosts", "ucx_library")
LINK_OPTIONS = (*LINK_INTEGERS, *LINK_TEXTS, "link_accept_remote", "link_remote_memory")
CHOICES = {
    "swap_in_path": ("auto", "direct", "ring"),
    "verify": ("off", "sample", "full"),
    "huge_pages": ("auto", "off", "eager"),
}
ADDITIONS = ("copy_workers", "max_transfers", "transfer_poll_us", *CHOICES)
HOSTS = '{"10.0.0.1": "127.0.0.1:5000", "7": "[::1]:5001"}'

# property -> value read before anything is set
INITIAL = {
    "ge_options": {},
    **dict.fromkeys(("device_id", "sync_kv_timeout", "output_max_size", *WIDTH32, *LINK_OPTIONS, *ADDITIONS)),
    **dict.fromkeys((*TEXTS, "cluster_info"), ""),
    **dict.fromkeys((*FLAGS, "link_accept_remote"), False),
    "link_total_time": 0,
    "link_retry_count": 1,
    "mem_utilization": 0.95,
}

# property -> its key, and values with the text that each is emitted as (none: nothing is emitted)
EMITTED: dict[str, tuple[str, list[tuple[Any, str | None]]]] = {
    "sync_kv_timeout": ("llm.SyncKvCacheWaitTime", [(1, "1"), ("5000", "5000"), (2**31 - 1, "2147483647")]),
    "deploy_res_path": ("llm.deployResPath", [("/x", "/x"), ("", None)]),
    "buf_pool_cfg": ("llm.BufPoolCfg", [("{}", "{}")]),
    "mem_pool_cfg": ("llm.MemPoolConfig", [("not json", "not json"), ("", None)]),
    "host_mem_pool_cfg": ("llm.HostMemPoolConfig", [('{ "memory_size":2}', '{ "memory_size":2}'), ("", None)]),
    "enable_cache_manager": ("llm.EnableCacheManager", [(True, "1"), (False, "0")]),
    "enable_remote_cache_accessible": ("llm.EnableRemoteCacheAccessible", [(True, "1"), (False, "0")]),
    "listen_ip_info": ("llm.listenIpInfo", [("127.0.0.1:26000", "127.0.0.1:26000"), ("", None)]),
    "link_total_time": ("llm.LinkTotalTime", [(0, "0"), (2**32 - 1, "4294967295")]),
    "link_retry_count": ("llm.LinkRetryCount", [(1, "1"), (100, "100")]),
    "rdma_traffic_class": ("llm.RdmaTrafficClass", [(100, "100"), (2**32 - 1, "4294967295")]),
    "rdma_service_level": ("llm.RdmaServiceLevel", [(100, "100")]),
    "local_comm_res": ("llm.LocalCommRes", [('{"version": "1.3"}', '{"version": "1.3"}'), ("", "")]),
    "transfer_backend": ("llm.TransferBackend", [("hixl", "hixl")]),
    "global_resource_config": ("llm.GlobalResourceConfig", [("{}", "{}"), ("", "")]),
    "output_max_size": ("llm.OutputMaxSize", [(10, "10")]),
    "enable_switch_role": ("llm.EnableSwitchRole", [(True, "1"), (False, None)]),
    "mem_utilization": ("llm.MemoryUtilization", [(part, str(part)) for part in (0.0, 0.5, 0.95, 1.0)]),
    "copy_workers": ("llm.CopyWorkers", [(1, "1"), (256, "256")]),
    "max_transfers": ("llm.MaxTransfers", [(1, "1"), (1 << 20, "1048576")]),
    "transfer_poll_us": ("llm.TransferPollUs", [(0, "0"), (10_000, "10000")]),
    **{
        name: ("llm." + "".join(word.capitalize() for word in name.split("_")), [(word, word) for word in words])
        for name, words in CHOICES.items()
    },
    "link_token": ("llm.LinkToken", [("x" * 16, "x" * 16)]),
    "link_accept_remote": ("llm.LinkAcceptRemote", [(True, "1"), (False, "0")]),
    "link_heartbeat": ("llm.LinkHeartbeat", [(1, "1"), (3_600_000, "3600000")]),
    "link_silence": ("llm.LinkSilence", [(2, "2"), (86_400_000, "86400000")]),
    "link_pin_limit": ("llm.LinkPinLimit", [(1, "1"), (86_400_000, "86400000")]),
    "link_transport": ("llm.LinkTransport", [(word, word) for word in ("auto", "shm", "tcp")]),
    "ucx_library": ("llm.UcxLibrary", [("/opt/libucp.so.0", "/opt/libucp.so.0")]),
    "link_streams": ("llm.LinkStreams", [(0, "0"), (16, "16")]),
    "link_addresses": ("llm.LinkAddresses", [(ips, ips) for ips in ("10.0.0.1", "10.0.0.1, 10.0.1.1,fd00::1")]),
    "link_remote_memory": ("llm.LinkRemoteMemory", [(0, "0"), (2**63 - 1, str(2**63 - 1))]),
    "rank_port": ("llm.RankPort", [(1, "1"), (65535, "65535")]),
    "rank_hosts": ("llm.RankHosts", [(HOSTS, HOSTS), ("{}", "{}")]),
}  # fmt: skip
SIXTEEN_IPS = ",".join(f"10.0.0.{n}" for n in range(16))
SEVERAL: list[tuple[str, Any, dict[str, str]]] = [
    ("ge_options", {"a": "b", "c": "d"}, {"a": "b", "c": "d"}),
    ("ge_options", {}, {}),
    ("device_id", 0, {"ge.exec.deviceId": "0", "ge.session_device_id": "0"}),
    ("device_id", [0, 1, 2], {"ge.exec.deviceId": "0;1;2", "ge.session_device_id": "0"}),
    ("device_id", (3, 4), {"ge.exec.deviceId": "3;4", "ge.session_device_id": "3"}),
    ("device_id", 2**31 - 1, {"ge.exec.deviceId": "2147483647", "ge.session_device_id": "2147483647"}),
]
STORED = SEVERAL + [
    (name, value, {} if text is None else {key: text})
    for name, (key, values) in EMITTED.items()
    for value, text in values
]
NAN, LONG = float("nan"), "x" * 10**5
WRONG: dict[Expected, dict[str | tuple[str, ...], tuple[Any, ...]]] = {
    TE: {
        TEXTS: (1, 1.5, True, b"x", [], {}, {"memory_size": 1}),
        FLAGS: (1, 0, "1", "True", 1.0, []),
        WIDTH32: (None, True, 1.0, "100", [1]),
        LINK_INTEGERS: ("5", 5.0, True, [5]),
        LINK_TEXTS: (1, True, b"0123456789abcdef", ["tcp"]),
        tuple(CHOICES): (1, False, True, b"off", ["off"]),
        "ge_options": ({1: "x"}, {"x": 1}, {"x": None}, {None: "x"}, {True: "x"}, [("x", "y")], "x"),
        "device_id": (None, True, "0", 1.0, {0}, [0, "1"], [0, True], [0, None]),
        "sync_kv_timeout": (None, True, 1.5, [1]),
        ("link_total_time", "link_retry_count"): (None, True, 1.0, "1"),
        "cluster_info": (1, True, {}),
        "output_max_size": ("1", 1.0, True),
        "mem_utilization": (None, 1, 0, True, "0.5"),
        ("copy_workers", "max_transfers", "transfer_poll_us"): ("4", 1.0, True, False, [4]),
        "link_accept_remote": (1, "1", 0.0),
        "link_remote_memory": ("5", 5.0, True, [5]),
    },
    VE: {
        WIDTH32: (-1, 2**32, 2**64, -(2**70)),
        "device_id": (2**31, (0, 2**31)),
        "sync_kv_timeout": (2**31, str(2**31)),
        "cluster_info": ("not json", "{"),
        "link_token": ("x" * 16 + "\ud800",),
    },
    LE: {
        "device_id": (-1, [0, -1]),
        "sync_kv_timeout": (0, -1, "0", "-1", "", "abc", "1.5", "nan", "1e3", "0x10", " ", "5 0", "\u0663", "\u00b2"),
        "link_total_time": (-1, 2**32),
        "link_retry_count": (0, -1, 101),
        "mem_utilization": (-0.001, 1.001, NAN, float("inf"), float("-inf")),
        "copy_workers": (0, -1, 257, 2**31, 2**64),
        "max_transfers": (0, -1, (1 << 20) + 1, 2**64),
        "transfer_poll_us": (-1, 10_001, 2**64),
        "swap_in_path": ("Ring", "fast", " ring", "nan", "", "\ud800", LONG),
        "verify": ("Full", "on", " off", "samples", "", "full\0", "\ud800", LONG),
        "huge_pages": ("Auto", "on", "merge", "merge_registered", "eager ", "1", "", "off\0", "\ud800", LONG),
        LINK_INTEGERS: (-1, 2**31, 2**70),
        ("link_heartbeat", "link_pin_limit", "link_silence", "rank_port"): (0,),
        "link_token": ("", "x" * 15),
        "link_silence": (1,),
        "link_transport": ("", "TCP", "rdma", " tcp", "\ud800", LONG),
        "ucx_library": ("", "libucp.so.0", "/a\0b", "\ud800", "/" + LONG),
        "link_streams": (-1, 17),
        "link_addresses": ("", "localhost", "::", "10.0.0.1;10.0.0.2", "10.0.0.1,10.0.0.1", SIXTEEN_IPS),
        "link_remote_memory": (-1, 2**63, 2**70),
        "rank_port": (65536,),
        "rank_hosts": ("", "x", "[]", '{"1": 5}', '{"1": "host:1"}', '{"1": "127.0.0.1:0"}'),
    },
}
REFUSED = [
    (name, bad, expected)
    for expected, rows in WRONG.items()
    for names, values in rows.items()
    for name in ([names] if isinstance(names, str) else names)
    for bad in values
]


@pytest.fixture
def config() -> LLMConfig:
    return LLMConfig()


@pytest.mark.contract("19.llm-config")
@pytest.mark.parametrize("name", {**INITIAL, **EMITTED})
def test_initial_value(config: LLMConfig, name: str) -> None:
    value = getattr(config, name)
    assert value == INITIAL[name]
    assert type(value) is type(INITIAL[name])
    assert config.generate_options() == FRESH
    assert getattr(LLMConfig, name).__doc__


@pytest.mark.contract("20.2")
@pytest.mark.parametrize(("name", "value", "emitted"), STORED, ids=short)
def test_property_is_stored_and_emitted(config: LLMConfig, name: str, value: Any, emitted: dict[str, str]) -> None:
    setattr(config, name, value)
    made = config.generate_options()
    assert made == {**FRESH, **emitted}
    assert all(type(text) is str for text in made.values()) or name == "link_token"
    assert getattr(config, name) == value
    assert name != "device_id" or type(config.device_id) is type(value)


@pytest.mark.parametrize(("name", "value"), [(n, v) for n, v, _ in STORED if n in LINK_OPTIONS])
def test_engine_accepts_the_options_of_links(
    config: LLMConfig, name: str, value: Any, start: Callable[..., Any]
) -> None:
    setattr(config, name, value)
    if name == "link_silence":
        config.link_heartbeat = 1
    start({**options(None, None), **config.generate_options()})


def test_a_device_list_names_a_device(config: LLMConfig) -> None:
    """An empty list is refused when it is set. A list that is emptied later is refused when the options are written."""
    for empty in ([], ()):
        fails(lambda empty=empty: setattr(config, "device_id", empty), LE, "names no device")
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
@pytest.mark.parametrize(("name", "value", "expected"), REFUSED, ids=short)
def test_setter_refuses_and_keeps_what_was(config: LLMConfig, name: str, value: Any, expected: Expected) -> None:
    before = getattr(config, name)
    with pytest.raises(Exception) as caught:  # noqa: PT011  (judged below)
        setattr(config, name, value)
    expected.judge(caught.value)
    assert len(str(caught.value)) < 500
    if name in (*ADDITIONS, *LINK_OPTIONS):
        assert name in str(caught.value)
    assert getattr(config, name) == before
    assert config.generate_options() == FRESH


@pytest.mark.parametrize("name", [*TEXTS, *FLAGS, "output_max_size", "_enable_remote_cache_accessible"])
def test_none_is_silently_accepted(config: LLMConfig, name: str) -> None:
    setattr(config, name, None)
    assert "llm.EnableRemoteCacheAccessible" not in config.generate_options()
    assert all(isinstance(value, str) for value in config.generate_options().values())


def test_cluster_info_addresses_become_integers(config: LLMConfig) -> None:
    config.cluster_info = json.dumps(
        {"cluster_id": 3, "listen_ip_info": [{"ip": "1.2.3.4", "port": 26000}, {"ip": "127.0.0.1", "port": 1}]}
    )
    made = json.loads(config.generate_options()["llm.ClusterInfo"])
    assert made == {"cluster_id": 3, "listen_ip_info": [{"ip": 67305985, "port": 26000}, {"ip": 16777343, "port": 1}]}


def test_the_same_dictionary_is_returned_and_written_keys_stay(config: LLMConfig) -> None:
    config.mem_pool_cfg = "first"
    made = config.generate_options()
    assert config.gen_options() is config.options is made
    config.mem_pool_cfg = ""
    config.link_retry_count = 7
    assert config.generate_options() is made
    assert (made["llm.MemPoolConfig"], made["llm.LinkRetryCount"]) == ("first", "7")
    with pytest.raises(AttributeError):
        config.options = {}


def test_own_properties_win_over_the_same_key_in_ge_options(config: LLMConfig) -> None:
    config.ge_options = {"llm.MemPoolConfig": "loses", "ge.exec.deviceId": "9", "other": "kept"}
    config.mem_pool_cfg = "wins"
    config.device_id = 2
    wins = {"llm.MemPoolConfig": "wins", "ge.exec.deviceId": "2", "ge.session_device_id": "2"}
    assert config.generate_options() == {**FRESH, **wins, "other": "kept"}


@pytest.mark.parametrize("name", [*ADDITIONS, *LINK_OPTIONS])
def test_none_unsets_an_addition(config: LLMConfig, name: str) -> None:
    setattr(config, name, EMITTED[name][1][0][0])
    assert getattr(config, name) is not None
    setattr(config, name, None)
    assert getattr(config, name) is INITIAL[name]
    assert config.generate_options() == FRESH


def test_options_made_by_a_config_start_an_engine(config: LLMConfig, start: Callable[..., Any]) -> None:
    config.enable_cache_manager = True
    config.mem_pool_cfg = config.host_mem_pool_cfg = pool()
    for name in ("sync_kv_timeout", "link_retry_count", *WIDTH32, *ADDITIONS):
        setattr(config, name, EMITTED[name][1][0][0])
    config.device_id = [0]
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
        """A dict that adds an entry whenever its class is read."""

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
        *[(text, TypeError) for text in ("5", "[]", "null")],
        *[(f'{{"listen_ip_info": {text}}}', TypeError) for text in ("5", "null", '{"ip": "1.2.3.4"}', '["1.2.3.4"]')],
        *[(f'{{"listen_ip_info": [{{"ip": {text}}}]}}', TypeError) for text in ("null", "1.5", "true")],
        ('{"listen_ip_info": [{"ip": "x"}]}', RuntimeError),
        ("{", json.JSONDecodeError),
    ],
)
def test_cluster_info_of_another_shape_is_named(config: LLMConfig, text: str, kind: type[Exception]) -> None:
    shown = {TypeError: r"cluster_info .*only support", RuntimeError: "'x'"}
    with pytest.raises(kind, match=shown.get(kind)):
        config.cluster_info = text
    assert config.cluster_info == ""


def test_the_bound_of_json_is_64_levels(config: LLMConfig) -> None:
    texts = {levels: '{"a": ' + "[" * (levels - 1) + "1" + "]" * (levels - 1) + "}" for levels in (1, 63, 64, 65)}
    too_deep = texts.pop(65)
    fails(lambda: setattr(config, "cluster_info", too_deep), VE, "nested deeper than 64 levels")
    for text in texts.values():
        config.cluster_info = text
