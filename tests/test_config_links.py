"""Options about links: their properties, the environment, the secrecy of the token, and addresses of peers.

Not for: what the engine makes of an option once a peer is there, or the other properties (`test_config.py`).
"""

from __future__ import annotations

import copy
import json
import logging
import pickle
from typing import Any, Callable

import pytest

from conftest import options
from llm_datadist import LLMClusterInfo, LLMConfig, LLMDataDist, LLMException, LLMRole
from memory import LE, TE, VE, Expected, raising, run_fresh

TOKEN = "correct horse battery staple"  # noqa: S105  (the one under test)
FRESH = {"llm.MemoryUtilization": "0.95"}
HOSTS = '{"10.0.0.1": "127.0.0.1:5000", "7": "[::1]:5001"}'

EMITTED: list[tuple[str, Any, str, str]] = [
    ("link_token", TOKEN, "llm.LinkToken", TOKEN),
    ("link_token", "x" * 16, "llm.LinkToken", "x" * 16),
    ("link_accept_remote", True, "llm.LinkAcceptRemote", "1"),
    ("link_accept_remote", False, "llm.LinkAcceptRemote", "0"),
    ("link_heartbeat", 1, "llm.LinkHeartbeat", "1"),
    ("link_heartbeat", 3_600_000, "llm.LinkHeartbeat", "3600000"),
    ("link_silence", 2, "llm.LinkSilence", "2"),
    ("link_silence", 86_400_000, "llm.LinkSilence", "86400000"),
    ("link_pin_limit", 1, "llm.LinkPinLimit", "1"),
    ("link_pin_limit", 86_400_000, "llm.LinkPinLimit", "86400000"),
    *[("link_transport", word, "llm.LinkTransport", word) for word in ("auto", "shm", "tcp")],
    ("link_streams", 1, "llm.LinkStreams", "1"),
    ("link_streams", 16, "llm.LinkStreams", "16"),
    ("link_remote_memory", 0, "llm.LinkRemoteMemory", "0"),
    ("link_remote_memory", 2**63 - 1, "llm.LinkRemoteMemory", str(2**63 - 1)),
    ("rank_port", 1, "llm.RankPort", "1"),
    ("rank_port", 65535, "llm.RankPort", "65535"),
    ("rank_hosts", HOSTS, "llm.RankHosts", HOSTS),
    ("rank_hosts", "{}", "llm.RankHosts", "{}"),
]
NAMES = sorted({name for name, *_ in EMITTED})

INTEGERS = ("link_heartbeat", "link_pin_limit", "link_silence", "link_streams", "rank_port")
TEXTS = ("link_token", "link_transport", "rank_hosts")
REFUSED: list[tuple[str, Any, Expected]] = [
    *[(name, bad, TE) for name in INTEGERS for bad in ("5", 5.0, True, [5])],
    *[(name, bad, LE) for name in INTEGERS for bad in (0, -1, 2**31, 2**70)],
    *[(name, bad, TE) for name in TEXTS for bad in (1, True, b"0123456789abcdef", ["tcp"])],
    *[("link_accept_remote", bad, TE) for bad in (1, "1", 0.0)],
    *[("link_token", bad, LE) for bad in ("", "x" * 15)],
    ("link_token", "x" * 16 + "\ud800", VE),
    ("link_silence", 1, LE),
    *[("link_transport", bad, LE) for bad in ("", "TCP", "rdma", " tcp", "\ud800", "x" * 10**5)],
    ("link_streams", 17, LE),
    *[("link_remote_memory", bad, TE) for bad in ("5", 5.0, True, [5])],
    *[("link_remote_memory", bad, LE) for bad in (-1, 2**63, 2**70)],
    ("rank_port", 65536, LE),
    *[("rank_hosts", bad, LE) for bad in ("", "x", "[]", '{"1": 5}', '{"1": "host:1"}', '{"1": "127.0.0.1:0"}')],
]


@pytest.mark.parametrize("name", NAMES)
def test_fresh_and_unset(name: str) -> None:
    config = LLMConfig()
    assert getattr(config, name) is (False if name == "link_accept_remote" else None)
    assert config.generate_options() == FRESH
    setattr(config, name, next(value for known, value, *_ in EMITTED if known == name))
    setattr(config, name, None)
    assert config.generate_options() == FRESH
    assert getattr(LLMConfig, name).__doc__


@pytest.mark.parametrize(("name", "value", "key", "text"), EMITTED)
def test_it_is_stored_emitted_and_understood(
    name: str, value: Any, key: str, text: str, start: Callable[..., Any]
) -> None:
    config = LLMConfig()
    setattr(config, name, value)
    assert getattr(config, name) == value
    assert config.generate_options() == {key: text, **FRESH}
    config.enable_cache_manager = True
    if name == "link_silence":
        config.link_heartbeat = 1
    start(config.generate_options())


@pytest.mark.parametrize(("name", "value", "expected"), REFUSED)
def test_a_setter_refuses_and_keeps_what_was(name: str, value: Any, expected: Expected) -> None:
    config = LLMConfig()
    before = getattr(config, name)
    with pytest.raises(Exception) as caught:  # noqa: PT011  (judged below)
        setattr(config, name, value)
    expected.judge(caught.value)
    assert name in str(caught.value)
    assert len(str(caught.value)) < 500
    assert getattr(config, name) == before
    assert config.generate_options() == FRESH


@pytest.mark.parametrize(
    ("key", "text"),
    [
        ("llm.LinkToken", "short"),
        ("llm.LinkAcceptRemote", "true"),
        ("llm.LinkHeartbeat", "0"),
        ("llm.LinkHeartbeat", "x"),
        ("llm.LinkSilence", "1999"),
        ("llm.LinkTransport", "rdma"),
        ("llm.LinkStreams", "17"),
        ("llm.LinkRemoteMemory", "-1"),
        ("llm.LinkRemoteMemory", "4G"),
        ("llm.RankPort", "0"),
        ("llm.RankHosts", "x"),
    ],
)
def test_init_refuses_texts_written_by_hand(key: str, text: str, start: Callable[..., Any]) -> None:
    with raising(LE):
        start({**options(), key: text})


def test_silence_is_compared_with_the_heartbeat_at_init(start: Callable[..., Any]) -> None:
    config = LLMConfig()
    config.link_silence = 500
    config.link_heartbeat = 251
    with pytest.raises(LLMException, match="link_silence=500"):
        start({**options(), **config.generate_options()})
    config.link_heartbeat = 250
    start({**options(), **config.generate_options()})


# -- the token -------------------------------------------------------------------------------------------------------


def test_the_token_is_a_text_that_does_not_show() -> None:
    config = LLMConfig()
    config.link_token = TOKEN
    made = config.generate_options()
    assert made["llm.LinkToken"] == TOKEN
    assert isinstance(made["llm.LinkToken"], str)
    assert json.loads(json.dumps(made)) == made
    for shown in (repr(made), str(made), f"{made}", repr(list(made.values())), repr(config), repr(copy.deepcopy(made))):
        assert TOKEN not in shown
    again = pickle.loads(pickle.dumps(made))  # noqa: S301  (our own bytes)
    assert again == made
    assert TOKEN not in repr(again)


def test_the_token_is_in_no_log_no_error_and_no_attribute(
    start: Callable[..., Any], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG, logger="LLM_DATADIST")
    config = LLMConfig()
    config.link_token = TOKEN
    given = {**options(llm__listenIpInfo="127.0.0.1:0"), **config.generate_options()}
    dist = start(given)
    dist.switch_role(LLMRole.DECODER, dict(given))
    dist.finalize()
    short = "tooshort"
    texts = []
    for bad in (
        {**given, "llm.LinkStreams": "x"},
        {**given, "llm.LinkToken": short},
        {**given, "llm.LinkToken": short + "\ud800" * 16},
        {**given, "llm.LinkToken": [short]},
    ):
        with pytest.raises((LLMException, ValueError, TypeError)) as caught:
            start(bad)
        texts += [repr(caught.value), str(vars(caught.value)), str(caught.value.__cause__)]
    texts += [record.getMessage() for record in caplog.records]
    texts += [repr(vars(dist)), repr(dist._engine_options)]
    assert any("switch_role" in text for text in texts), "nothing was logged"
    assert not [text for text in texts if TOKEN in text or short in text]


# -- the environment -------------------------------------------------------------------------------------------------


ENGINE = """
from llm_datadist import LLMDataDist, LLMException, LLMRole
def start(**extra):
    dist = LLMDataDist(LLMRole.PROMPT, 1)
    try:
        dist.init({"llm.EnableCacheManager": "1", **{"llm." + key: text for key, text in extra.items()}})
    except LLMException as error:
        print(error.status_code.name, str(error).split(" is not")[0])
    else:
        print("started")
        dist.finalize()
"""


@pytest.mark.parametrize(
    ("variable", "bad", "option", "good"),
    [
        ("LLM_DATADIST_TOKEN", "short", "LinkToken", TOKEN),
        ("LLM_DATADIST_ACCEPT_REMOTE", "x", "LinkAcceptRemote", "0"),
        ("LLM_DATADIST_RANK_HOSTS", "x", "RankHosts", "{}"),
        ("LLM_DATADIST_RANK_PORT", "x", "RankPort", "5000"),
        ("HCCL_CONNECT_TIMEOUT", "x", "LinkTotalTime", "5"),
    ],
)
def test_the_environment_counts_where_an_option_is_absent(variable: str, bad: str, option: str, good: str) -> None:
    out = run_fresh(f"{ENGINE}\nstart()\nstart({option}={good!r})", **{variable: bad}).splitlines()
    refused = [line for line in out if not line.startswith("[ERROR]")]
    assert len(refused) == 2
    assert refused[0].startswith("LLM_PARAM_INVALID")
    assert refused[1] == "started"
    assert run_fresh(f"{ENGINE}\nstart()", **{variable: good}) == "started\n"
    empty = run_fresh(f"{ENGINE}\nstart()", **{variable: ""}).splitlines()[-1]
    # Except a token, which somebody may have forgotten to fill in.
    expected = (
        "LLM_PARAM_INVALID LLM_DATADIST_TOKEN is set, but empty" if variable == "LLM_DATADIST_TOKEN" else "started"
    )
    assert empty.startswith(expected), "an empty variable is none"


def test_the_environment_is_read_by_init_and_not_at_import() -> None:
    code = """
    import os
    os.environ["LLM_DATADIST_RANK_PORT"] = "x"
    start()
    del os.environ["LLM_DATADIST_RANK_PORT"]
    start()
    """
    lines = run_fresh(ENGINE + code.replace("\n    ", "\n")).splitlines()
    assert [line.split()[0] for line in lines if not line.startswith("[ERROR]")] == ["LLM_PARAM_INVALID", "started"]


def test_init_leaves_the_callers_dict_alone(start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LLM_DATADIST_TOKEN", TOKEN)
    given = options()
    before = dict(given)
    start(given)
    assert given == before


# -- addresses of peers ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ("::1", "::1"),
        ("0:0:0:0:0:0:0:1", "::1"),
        ("2001:DB8::A", "2001:db8::a"),
        ("::ffff:1.2.3.4", "::ffff:1.2.3.4"),
        ("1.2.3.4", 67305985),
        (5, 5),
    ],
)
def test_ipv6_addresses_are_kept_as_text(given: Any, kept: Any) -> None:
    info = LLMClusterInfo()
    info.append_remote_ip_info(given, 5)
    info.append_local_ip_info(given, 0)
    assert info.remote_ip_info_list == [(kept, 5)]
    assert info.local_ip_info_list == [(kept, 0)]


@pytest.mark.parametrize("text", [":", ":::", "::1::", "12345::", "fe80::1%lo", "[::1]", "::1\0", "::\ud800"])
def test_a_text_with_colons_that_is_no_address(text: str) -> None:
    info = LLMClusterInfo()
    with pytest.raises(RuntimeError, match="ip="):
        info.append_remote_ip_info(text, 1)
    assert info.remote_ip_info_list == []


def test_a_cluster_info_shows_its_addresses() -> None:
    info = LLMClusterInfo()
    info.remote_cluster_id = 7
    info.append_remote_ip_info("10.0.0.1", 26000)
    info.append_remote_ip_info("::1", 1)
    info.append_local_ip_info(2**40, 0)
    remote = "10.0.0.1:26000, [::1]:1"
    assert repr(info) == f"LLMClusterInfo(remote_cluster_id=7, remote=[{remote}], local=[1099511627776:0])"


def test_an_engine_listens_on_ipv6(start: Callable[..., Any]) -> None:
    try:
        dist: LLMDataDist = start(options(llm__listenIpInfo="[::1]:0"))
    except LLMException as error:
        pytest.skip(f"this host has no IPv6: {error}")
    host, _, port = str(dist.listen_ip_info).rpartition(":")
    assert host == "[::1]"
    assert int(port) > 0
