"""Unknown options and keyword arguments are ignored; one that looks misspelt is named in one WARNING."""

from __future__ import annotations

import json
import logging
from typing import Any, Callable

import pytest

from conftest import options
from llm_datadist import CacheKeyByIdAndIndex, LLMConfig, LLMDataDist, LLMException
from llm_datadist.option_table import KNOWN_KEYS, rows
from llm_datadist.spelling import closest, edit_distance, warn_of_misspelt_pool_keys
from memory import desc


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]


@pytest.mark.parametrize(
    ("left", "right", "edits"),
    [
        *[("", "", 0), ("abc", "abc", 0), ("", "abc", 3), ("abc", "abd", 1), ("abc", "bc", 1), ("abc", "abcd", 1)],
        *[("abc", "acb", 2), ("kitten", "sitting", 3), ("flaw", "lawn", 2)],
    ],
)
def test_edit_distance(left: str, right: str, edits: int) -> None:
    assert edit_distance(left, right) == edit_distance(right, left) == edits


def test_closest_name_is_at_most_two_edits_away() -> None:
    known = ["memory", "memories", "meaning"]
    assert closest("memry", known) == "memory"
    assert closest("mmry", known) == "memory"
    assert closest("mmr", known) is None
    assert closest("memoriys", known) == "memories"
    assert closest("anything", known) is None


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("llm.MemPoolConfg", "llm.MemPoolConfig"),
        ("llm.memPoolConfig", "llm.MemPoolConfig"),
        ("llm.SyncKvCacheWaitTimes", "llm.SyncKvCacheWaitTime"),
        ("llm.CopyWorker", "llm.CopyWorkers"),
        ("lm.LinkTokn", "llm.LinkToken"),
    ],
)
def test_init_names_the_option_that_was_meant(
    start: Callable[..., LLMDataDist], caplog: pytest.LogCaptureFixture, key: str, meant: str
) -> None:
    given = {**options(), key: "value of it"}
    with caplog.at_level(logging.WARNING, logger="LLM_DATADIST"):
        start(given)
    assert warnings(caplog) == [f"unknown option '{key}' is ignored; did you mean '{meant}'?"]
    assert "value of it" not in caplog.text


@pytest.mark.parametrize(
    ("key", "meant"), [("page_shfit", "page_shift"), ("pageshift", "page_shift"), ("memory_sizes", "memory_size")]
)
@pytest.mark.parametrize("option", ["llm.MemPoolConfig", "llm.HostMemPoolConfig"])
def test_init_names_the_pool_key_that_was_meant(
    start: Callable[..., LLMDataDist], caplog: pytest.LogCaptureFixture, option: str, key: str, meant: str
) -> None:
    given = {**options(), option: json.dumps({"memory_size": 1 << 20, key: 12, "other": 1})}
    with caplog.at_level(logging.WARNING, logger="LLM_DATADIST"):
        start(given)
    assert warnings(caplog) == [f"unknown key of {option} '{key}' is ignored; did you mean '{meant}'?"]


@pytest.mark.parametrize("text", ["no JSON", "[1]", "[" * 100, 5])
def test_pool_text_that_is_no_object_is_left_to_the_engine(caplog: pytest.LogCaptureFixture, text: object) -> None:
    warn_of_misspelt_pool_keys({"llm.MemPoolConfig": text})
    assert warnings(caplog) == []


DISTANT = "ge.exec.deviceld ge.anything llm.ListenIpInfo llm.BufPoolCfg llm.OutputMaxSize mine llm.Nothing"


@pytest.mark.parametrize("key", DISTANT.split())
def test_init_accepts_known_and_distant_keys_in_silence(
    start: Callable[..., LLMDataDist], caplog: pytest.LogCaptureFixture, key: str
) -> None:
    value = "127.0.0.1:0" if key == "llm.ListenIpInfo" else "1"
    with caplog.at_level(logging.WARNING, logger="LLM_DATADIST"):
        start({**options(), key: value})
    assert warnings(caplog) == []


def test_options_that_a_config_writes_are_known() -> None:
    written = {row.key for row in rows() if row.key}
    assert len(written) > 30
    assert written <= KNOWN_KEYS


def test_attribute_of_a_config_that_looks_misspelt_is_named(caplog: pytest.LogCaptureFixture) -> None:
    config: Any = LLMConfig()
    with caplog.at_level(logging.WARNING, logger="LLM_DATADIST"):
        config.mem_pool_cgf = "{}"
        config.note_of_mine = "kept"
        config.mem_pool_cfg = "{}"
        config._enable_remote_cache_accessible = True
    assert warnings(caplog) == [
        "unknown attribute of LLMConfig 'mem_pool_cgf' is ignored; did you mean 'mem_pool_cfg'?"
    ]
    assert config.note_of_mine == "kept"


def test_keyword_argument_of_a_pull_that_looks_misspelt_is_named_once(
    manager: Any, caplog: pytest.LogCaptureFixture
) -> None:
    cache = manager.allocate_cache(desc())
    with caplog.at_level(logging.WARNING, logger="LLM_DATADIST"):
        for _ in range(3):
            with pytest.raises(LLMException, match="no link"):
                manager.pull_cache(CacheKeyByIdAndIndex(2, 1), cache, src_layer_rang=range(1), other=1)
    said = "unknown keyword argument of pull_cache 'src_layer_rang' is ignored; did you mean 'src_layer_range'?"
    assert warnings(caplog) == [said]


def test_switch_role_names_the_option_that_was_meant(dist: LLMDataDist, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="LLM_DATADIST"):
        dist.switch_role(dist._role, {"llm.listenIpInf": "127.0.0.1:0"})
    assert warnings(caplog)[0] == "unknown option 'llm.listenIpInf' is ignored; did you mean 'llm.listenIpInfo'?"
    assert dist.listen_ip_info is None
