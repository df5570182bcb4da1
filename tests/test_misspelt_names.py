"""Unknown names of options, attributes and keyword arguments: what is logged at ERROR, and what raises.

The original ignores unknown options and unknown keyword arguments of pulls, so they do not raise. A name that only this
package can have meant does, because the call would run without what it asks for.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
from typing import Any, Callable
from unittest.mock import Mock

import pytest

from conftest import options
from llm_datadist import (
    BlocksCacheKey,
    CacheKeyByIdAndIndex,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
    _core,
)
from llm_datadist.option_table import KNOWN_KEYS, rows
from llm_datadist.original.spelling import OWN_KEYWORDS, nearest, report_unknown_pool_keys
from memory import desc, stats
from peers import kv_options


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the lines at ERROR, which the default level of the log shows."""
    return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]


def test_closest_name_is_at_most_two_edits_away() -> None:
    words = [("", "ab", True), ("", "abc", False), ("abc", "acb", True), ("kitten", "sitting", False)]
    for left, right, found in words:
        assert (_core.nearest(left, [right]) == right) == (_core.nearest(right, [left]) == left) == found
    assert _core.nearest("ÄBC", ["äbç"]) == "äbç"
    assert _core.nearest("\ud800", ["memory"]) is None
    known = ["memory", "memories", "meaning"]
    for word in ("memory", "memry", "mmry"):
        assert _core.nearest(word, known) == "memory"
    assert _core.nearest("memoriys", known) == "memories"
    assert _core.nearest("mmr", known) is _core.nearest("anything", known) is None
    assert nearest("memry", known) == "memory"
    assert nearest("the_memory", known) == "memory"
    assert nearest("anything", known) is None


def page_size(key: str) -> str:
    return json.dumps({"memory_size": 1 << 20, key: 12, "other": 1})


OPTION = "unknown option '{}' is ignored; did you mean '{}'?"
UNLIKE = "unknown option '{}' is ignored; llm-datadist options lists every option"
POOL_KEY = "unknown key of {} '{}' is ignored; did you mean '{}'?"
OTHER_POOL_KEY = "unknown key of {} 'other' is ignored; the keys are memory_size and page_shift"
MISSPELT = [
    *[
        (key, "value of it", [OPTION.format(key, meant)])
        for key, meant in [
            *[("llm.MemPoolConfg", "llm.MemPoolConfig"), ("llm.memPoolConfig", "llm.MemPoolConfig")],
            ("llm.ListenInfo", "llm.ListenIpInfo"),
        ]
    ],
    *[
        (option, page_size(key), [POOL_KEY.format(option, key, meant), OTHER_POOL_KEY.format(option)])
        for option in ("llm.MemPoolConfig", "llm.HostMemPoolConfig")
        for key, meant in [("page_shfit", "page_shift"), ("memory_sizes", "memory_size")]
    ],
    *[("mine", "1", [UNLIKE.format("mine")])],
    ("llm.ListenIpInfo", "127.0.0.1:0", []),
    *[(key, "1", []) for key in ("ge.exec.deviceld", "llm.BufPoolCfg", "llm.OutputMaxSize")],
]


@pytest.mark.parametrize(("key", "value", "said"), MISSPELT)
def test_init_names_the_option_or_pool_key_that_was_meant(
    start: Callable[..., LLMDataDist], caplog: pytest.LogCaptureFixture, key: str, value: str, said: list[str]
) -> None:
    with caplog.at_level(logging.ERROR, logger="LLM_DATADIST"):
        dist = start({**options(), key: value})
        assert errors(caplog) == said
        assert "value of it" not in caplog.text
        caplog.clear()
        dist.switch_role(dist._role, {"llm.listenIpInf": "127.0.0.1:0"})
    assert errors(caplog)[0] == OPTION.format("llm.listenIpInf", "llm.listenIpInfo")


ASKS_FOR_OWN = {
    "llm.CopyWorker": "llm.CopyWorkers",
    "lm.LinkTokn": "llm.LinkToken",
    "llm.linktoken": "llm.LinkToken",
    "llm.Verifyy": "llm.Verify",
    "LLM.VERIFY": "llm.Verify",
}
IS_LIKE_OWN = ("llm.Verification", "llm.LinkTokenPath", "llm.Checksum")


@pytest.mark.parametrize("name", [*ASKS_FOR_OWN, *IS_LIKE_OWN])
def test_init_refuses_a_key_that_resembles_an_option_of_this_package(dist: LLMDataDist, name: str) -> None:
    """Otherwise the engine would run without a token or without the comparison of bytes."""
    config = LLMConfig()
    config.ge_options = {name: "value of it"}
    meant = ASKS_FOR_OWN.get(name)
    dist.finalize()
    for call in (lambda: dist.init({**options(), name: "value of it"}), lambda: dist.init(config.generate_options())):
        with pytest.raises(LLMException, match=f"there is no option '{name}'; ") as caught:
            call()
        assert caught.value.status_code == LLMStatusCode.LLM_PARAM_INVALID
        assert meant is None or f"did you mean '{meant}'?" in str(caught.value)
        assert "value of it" not in str(caught.value)
    dist.init(options())
    with pytest.raises(LLMException, match=f"there is no option '{name}'; "):
        dist.switch_role(dist._role, {name: "value of it"})


@pytest.mark.parametrize("text", ["no JSON", "[1]", "[" * 100, 5])
def test_pool_text_that_is_no_object_is_left_to_the_engine(caplog: pytest.LogCaptureFixture, text: object) -> None:
    report_unknown_pool_keys({"llm.MemPoolConfig": text})
    assert errors(caplog) == []


def test_options_that_a_config_writes_are_known() -> None:
    written = {row.key for row in rows() if row.key}
    assert len(written) > 30
    assert written <= KNOWN_KEYS


def test_unknown_attribute_of_a_config_is_named(caplog: pytest.LogCaptureFixture) -> None:
    config: Any = LLMConfig()
    with caplog.at_level(logging.ERROR, logger="LLM_DATADIST"):
        config.mem_pool_cgf = "{}"
        config.lisen_ip_info = "127.0.0.1:0"
        config.listen_ip = "127.0.0.1:0"
        config.note_of_mine = "kept"
        config.mem_pool_cfg = "{}"
        config._enable_remote_cache_accessible = True
    unknown = "unknown attribute of LLMConfig '{}' is ignored; "
    assert errors(caplog) == [
        unknown.format("mem_pool_cgf") + "did you mean 'mem_pool_cfg'?",
        unknown.format("lisen_ip_info") + "did you mean 'listen_ip_info'?",
        unknown.format("listen_ip") + "did you mean 'listen_ip_info'?",
        unknown.format("note_of_mine") + "llm-datadist options lists every option",
    ]
    assert config.note_of_mine == "kept"


@pytest.mark.parametrize(
    ("name", "hint"),
    [
        *[("verifyy", "did you mean 'verify'"), ("link_tokn", "did you mean 'link_token'")],
        ("copyworkers", "did you mean 'copy_workers'"),
        # Names that suggest verification or authentication, so that ignoring them would be unsafe.
        *[(name, "") for name in ("verification", "verify_mode", "VERIFY", "link_token_path", "checksum")],
    ],
)
def test_attribute_that_looks_like_an_option_of_this_package_raises(name: str, hint: str) -> None:
    config = LLMConfig()
    with pytest.raises(AttributeError, match=f"LLMConfig has no attribute '{name}'; {re.escape(hint)}"):
        setattr(config, name, "full")
    assert not hasattr(config, name)


def test_unknown_keyword_argument_of_a_pull_is_named_once(manager: Any, caplog: pytest.LogCaptureFixture) -> None:
    cache = manager.allocate_cache(desc())
    with caplog.at_level(logging.ERROR, logger="LLM_DATADIST"):
        for _ in range(3):
            with pytest.raises(LLMException, match="no link"):
                manager.pull_cache(CacheKeyByIdAndIndex(2, 1), cache, src_layer_rang=range(1), other=1)
    listed = "dst_layer_range, src_layer_range, tensor_num_per_layer"
    ignored = [line for line in errors(caplog) if "ignores" in line]
    assert ignored == [
        "pull_cache() ignores the unknown keyword argument 'src_layer_rang'; did you mean 'src_layer_range'?",
        f"pull_cache() ignores the unknown keyword argument 'other'; its keyword arguments are {listed}",
    ]


def test_a_name_that_was_reported_is_not_looked_up_again(manager: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Finding the nearest name takes far longer than the other checks of a pull."""
    cache, key = manager.allocate_cache(desc()), CacheKeyByIdAndIndex(2, 1)
    with pytest.raises(LLMException, match="no link"):
        manager.pull_cache(key, cache, src_cache_offset=0, dst_cache_offset=0)
    monkeypatch.setattr(inspect, "signature", Mock(side_effect=AssertionError("the signature was read again")))
    with pytest.raises(LLMException, match="no link"):
        manager.pull_cache(key, cache, src_cache_offset=0, dst_cache_offset=0)
    with pytest.raises(AssertionError, match="read again"):
        manager.pull_cache(key, cache, src_cache_offset=0, a_new_name=0)


ASKS_FOR_NATIVE = [
    *sorted(OWN_KEYWORDS),
    *["grants", "grnat", "Grant", "Grant_token", "verifyy", "verfy", "VERIFYING", "notfy", "NOTIFY", "notification"],
    *["checksum", "src_token", "dst_offsets", "lenght", "layouts", "timeout_m"],
]


@pytest.mark.parametrize("name", ASKS_FOR_NATIVE)
def test_keyword_argument_that_only_the_native_api_has_raises(manager: Any, name: str) -> None:
    """A pull with a misspelt `grant` must not run without the grant, and one with an offset not from the start."""
    blocks, cache = manager.allocate_blocks_cache(desc()), manager.allocate_cache(desc())
    calls = stats(manager)["ops"]["pull"]["calls"]
    with pytest.raises(
        TypeError, match=f"pull_blocks\\(\\) has no keyword argument '{name}'; LLMDataDist.engine.pull "
    ):
        manager.pull_blocks(BlocksCacheKey(2), blocks, [0], [1], **{name: b"value of it"})
    with pytest.raises(TypeError, match=f"pull_cache\\(\\) has no keyword argument '{name}'; ") as caught:
        manager.pull_cache(CacheKeyByIdAndIndex(2, 1), cache, **{name: b"value of it"})
    assert "value of it" not in str(caught.value)
    assert stats(manager)["ops"]["pull"]["calls"] == calls


def test_the_token_of_a_grant_is_neither_ignored_nor_logged(
    dist: LLMDataDist, caplog: pytest.LogCaptureFixture
) -> None:
    manager: Any = dist.cache_manager
    blocks, cache = manager.allocate_blocks_cache(desc()), manager.allocate_cache(desc())
    token = dist.engine.lend(blocks.native[[0]], ttl=60).token
    caplog.set_level(logging.INFO, logger="LLM_DATADIST")

    def pull(*src: Any, **given: Any) -> None:
        manager.pull_blocks(BlocksCacheKey(2), blocks, *(src or ([0],)), [1], **given)

    with pytest.raises(LLMException, match="no link"):
        pull(permit=None)
    for given in (token, [None, token]):
        with pytest.raises(TypeError, match=r"no keyword argument 'permit'; LLMDataDist.engine.pull ") as caught:
            pull(permit=given)
        assert repr(token) not in str(caught.value)
    with pytest.raises(TypeError, match=r"pull_cache\(\) has no keyword argument 'permit'; LLMDataDist.engine.pull "):
        manager.pull_cache(CacheKeyByIdAndIndex(2, 1), cache, permit=token)
    for given in (token, [token], {"of the request": token}):
        with pytest.raises(TypeError, match="no keyword argument 'grant'"):
            pull(grant=given)
        with pytest.raises(TypeError):
            pull(given)
    assert caplog.text.count("<token of a grant>") == 9
    assert repr(token[32:40])[2:-1] not in caplog.text


def test_kv_cache_manager_refuses_what_only_the_native_api_has(start: Callable[..., LLMDataDist]) -> None:
    manager: Any = start(kv_options(), role=LLMRole.DECODER).kv_cache_manager
    blocks = manager.allocate_blocks_cache(desc())
    for call, arguments in (
        (manager.pull_blocks, (BlocksCacheKey(2), blocks, [0], [0])),
        (manager.pull_cache, (CacheKeyByIdAndIndex(2, 1), blocks)),
    ):
        with pytest.raises(TypeError, match="has no keyword argument 'grant'; "):
            call(*arguments, grant=None)
