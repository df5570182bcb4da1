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


def test_closest_name_is_at_most_two_edits_away() -> None:
    for left, right, edits in [("", "abc", 3), ("abc", "acb", 2), ("kitten", "sitting", 3), ("flaw", "lawn", 2)]:
        assert edit_distance(left, right) == edit_distance(right, left) == edits
    known = ["memory", "memories", "meaning"]
    for word in ("memory", "memry", "mmry"):
        assert closest(word, known) == "memory"
    assert closest("memoriys", known) == "memories"
    assert closest("mmr", known) is closest("anything", known) is None


def page_size(key: str) -> str:
    return json.dumps({"memory_size": 1 << 20, key: 12, "other": 1})


OPTION = "unknown option '{}' is ignored; did you mean '{}'?"
POOL_KEY = "unknown key of {} '{}' is ignored; did you mean '{}'?"
MISSPELT = [
    *[
        (key, "value of it", OPTION.format(key, meant))
        for key, meant in [
            *[("llm.MemPoolConfg", "llm.MemPoolConfig"), ("llm.memPoolConfig", "llm.MemPoolConfig")],
            *[("llm.CopyWorker", "llm.CopyWorkers"), ("lm.LinkTokn", "llm.LinkToken")],
        ]
    ],
    *[
        (option, page_size(key), POOL_KEY.format(option, key, meant))
        for option in ("llm.MemPoolConfig", "llm.HostMemPoolConfig")
        for key, meant in [("page_shfit", "page_shift"), ("memory_sizes", "memory_size")]
    ],
    ("llm.ListenIpInfo", "127.0.0.1:0", None),
    *[(key, "1", None) for key in ("ge.exec.deviceld", "llm.BufPoolCfg", "llm.OutputMaxSize", "mine", "llm.Nothing")],
]


@pytest.mark.parametrize(("key", "value", "said"), MISSPELT)
def test_init_names_the_option_or_pool_key_that_was_meant(
    start: Callable[..., LLMDataDist], caplog: pytest.LogCaptureFixture, key: str, value: str, said: str | None
) -> None:
    with caplog.at_level(logging.WARNING, logger="LLM_DATADIST"):
        dist = start({**options(), key: value})
        assert warnings(caplog) == ([said] if said else [])
        assert "value of it" not in caplog.text
        caplog.clear()
        dist.switch_role(dist._role, {"llm.listenIpInf": "127.0.0.1:0"})
    assert warnings(caplog)[0] == OPTION.format("llm.listenIpInf", "llm.listenIpInfo")


@pytest.mark.parametrize("text", ["no JSON", "[1]", "[" * 100, 5])
def test_pool_text_that_is_no_object_is_left_to_the_engine(caplog: pytest.LogCaptureFixture, text: object) -> None:
    warn_of_misspelt_pool_keys({"llm.MemPoolConfig": text})
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
