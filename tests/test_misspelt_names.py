"""Unknown names of options, attributes and keyword arguments: what is logged at ERROR, and what raises.

The original ignores unknown options and unknown keyword arguments of pulls, so they do not raise. A name that only this
package can have meant does, because the call would run without what it asks for.
"""

from __future__ import annotations

import inspect
import json
import logging
from typing import Any, Callable

import pytest

from conftest import options
from llm_datadist import (
    BlocksCacheKey,
    CacheKeyByIdAndIndex,
    CacheManager,
    KvCacheManager,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
)
from llm_datadist.option_table import KNOWN_KEYS, rows
from llm_datadist.spelling import OWN_KEYWORDS, closest, edit_distance, nearest, report_unknown_pool_keys
from memory import desc, run_fresh
from peers import kv_options


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    """Return the lines at ERROR, which the default level of the log shows."""
    return [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR]


def test_closest_name_is_at_most_two_edits_away() -> None:
    for left, right, edits in [("", "abc", 3), ("abc", "acb", 2), ("kitten", "sitting", 3), ("flaw", "lawn", 2)]:
        assert edit_distance(left, right) == edit_distance(right, left) == edits
    known = ["memory", "memories", "meaning"]
    for word in ("memory", "memry", "mmry"):
        assert closest(word, known) == "memory"
    assert closest("memoriys", known) == "memories"
    assert closest("mmr", known) is closest("anything", known) is None
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
    ("name", "meant"), [("verifyy", "verify"), ("link_tokn", "link_token"), ("copyworkers", "copy_workers")]
)
def test_attribute_that_looks_like_an_option_of_this_package_raises(name: str, meant: str) -> None:
    config = LLMConfig()
    with pytest.raises(AttributeError, match=f"LLMConfig has no attribute '{name}'; did you mean '{meant}'"):
        setattr(config, name, "full")
    assert not hasattr(config, name)


@pytest.mark.parametrize("name", ["verification", "verify_mode", "VERIFY", "link_token_path", "checksum"])
def test_attribute_that_asks_for_a_protection_raises(name: str) -> None:
    config = LLMConfig()
    with pytest.raises(AttributeError, match=f"LLMConfig has no attribute '{name}'; "):
        setattr(config, name, "full")
    assert not hasattr(config, name)


def test_default_level_shows_an_ignored_name() -> None:
    """In a program that configures no logging, the line is on standard output."""
    out = run_fresh("from llm_datadist import LLMConfig; LLMConfig().listen_ip = '127.0.0.1:0'")
    assert "[ERROR]" in out
    assert "did you mean 'listen_ip_info'?" in out


def test_unknown_keyword_argument_of_a_pull_is_named_once(manager: Any, caplog: pytest.LogCaptureFixture) -> None:
    cache = manager.allocate_cache(desc())
    with caplog.at_level(logging.ERROR, logger="LLM_DATADIST"):
        for _ in range(3):
            with pytest.raises(LLMException, match="no link"):
                manager.pull_cache(CacheKeyByIdAndIndex(2, 1), cache, src_layer_rang=range(1), other=1)
    listed = "dst_layer_range, layout, notify, src_layer_range, tensor_num_per_layer, verify"
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

    def looked_up(_: object) -> None:
        raise AssertionError("the signature was read again")

    monkeypatch.setattr(inspect, "signature", looked_up)
    with pytest.raises(LLMException, match="no link"):
        manager.pull_cache(key, cache, src_cache_offset=0, dst_cache_offset=0)
    with pytest.raises(AssertionError, match="read again"):
        manager.pull_cache(key, cache, src_cache_offset=0, a_new_name=0)


NEAR = {
    "grants": "grant",
    "grnat": "grant",
    "Grant": "grant",
    "grants_done": "grant_done",
    "grant_token": "grant",
    "verifyy": "verify",
    "verfy": "verify",
    "notfy": "notify",
    "src_token": "src_tokens",
    "dst_offsets": "dst_offset",
}


@pytest.mark.parametrize("name", NEAR)
@pytest.mark.parametrize("call", ["pull_blocks", "pull_blocks_async"])
def test_keyword_argument_that_looks_like_one_of_this_package_raises(manager: Any, call: str, name: str) -> None:
    """A pull with a misspelt ``grant`` must not run without the grant."""
    cache = manager.allocate_blocks_cache(desc())
    calls = manager.stats()["ops"]["pull"]["calls"]
    with pytest.raises(TypeError, match=f"{call}\\(\\) .*'{name}'") as caught:
        getattr(manager, call)(BlocksCacheKey(2), cache, [0], [1], **{name: b"token"})
    if call == "pull_blocks":
        assert f"did you mean '{NEAR[name]}'?" in str(caught.value)
    assert manager.stats()["ops"]["pull"]["calls"] == calls


@pytest.mark.parametrize("name", ["checksum", "NOTIFY", "VERIFYING", "notification"])
def test_keyword_argument_that_asks_for_a_protection_raises(manager: Any, name: str) -> None:
    cache = manager.allocate_blocks_cache(desc())
    with pytest.raises(TypeError, match=f"pull_blocks\\(\\) has no keyword argument '{name}'; "):
        manager.pull_blocks(BlocksCacheKey(2), cache, [0], [1], **{name: b"value"})


def test_the_token_of_a_grant_is_never_ignored(manager: Any, caplog: pytest.LogCaptureFixture) -> None:
    blocks, cache = manager.allocate_blocks_cache(desc()), manager.allocate_cache(desc())
    token = manager.grant(blocks, [0]).token
    with pytest.raises(LLMException, match="no link"):
        manager.pull_blocks(BlocksCacheKey(2), blocks, [0], [1], permit=None)
    for given in (token, [None, token]):
        with pytest.raises(TypeError, match=r"'permit', and its value is a grant; did you mean 'grant'\?") as caught:
            manager.pull_blocks(BlocksCacheKey(2), blocks, [0], [1], permit=given)
        assert repr(token) not in str(caught.value)
    with pytest.raises(TypeError, match=r"pull_cache\(\) takes no permit: grants are for blocks \(pull_blocks\)"):
        manager.pull_cache(CacheKeyByIdAndIndex(2, 1), cache, permit=token)
    assert repr(token) not in caplog.text


@pytest.mark.parametrize("name", ["grant", "grants"])
def test_pull_of_a_slot_says_that_grants_are_for_blocks(manager: Any, name: str) -> None:
    cache = manager.allocate_cache(desc())
    with pytest.raises(TypeError, match=rf"pull_cache\(\) takes no {name}: grants are for blocks \(pull_blocks\)"):
        manager.pull_cache(CacheKeyByIdAndIndex(2, 1), cache, **{name: b"token"})


def test_synchronous_pull_says_where_its_time_limit_is(manager: Any) -> None:
    cache, blocks = manager.allocate_cache(desc()), manager.allocate_blocks_cache(desc())
    text = r"{0}\(\) has no keyword argument 'timeout_ms'; use {0}_async\(timeout_ms=...\) or LLMConfig.sync_kv_timeout"
    with pytest.raises(TypeError, match=text.format("pull_cache")):
        manager.pull_cache(CacheKeyByIdAndIndex(2, 1), cache, timeout_ms=5)
    with pytest.raises(TypeError, match=text.format("pull_blocks")):
        manager.pull_blocks(BlocksCacheKey(2), blocks, [0], [1], timeout_ms=5)


@pytest.mark.parametrize("name", ["src_tokens", "dst_offset", "timeout_ms"])
def test_keyword_argument_of_another_call_raises(manager: Any, name: str) -> None:
    cache = manager.allocate_cache(desc())
    with pytest.raises(TypeError, match=f"pull_cache\\(\\) has no keyword argument '{name}'; "):
        manager.pull_cache(CacheKeyByIdAndIndex(2, 1), cache, **{name: 1})


@pytest.mark.parametrize("name", ["grant", "verify", "verifi", "notify"])
def test_kv_cache_manager_refuses_what_only_the_other_manager_can_do(name: str) -> None:
    cluster = LLMDataDist(LLMRole.DECODER, 1)
    cluster.init(kv_options())
    try:
        manager: Any = cluster.kv_cache_manager
        blocks = manager.allocate_blocks_cache(desc())
        for call, arguments in (
            (manager.pull_blocks, (BlocksCacheKey(2), blocks, [0], [0])),
            (manager.pull_cache, (CacheKeyByIdAndIndex(2, 1), blocks)),
        ):
            said = r"takes no grant: grants are for CacheManager.pull_blocks"
            with pytest.raises(TypeError, match=said if name == "grant" else f"has no keyword argument '{name}'; "):
                call(*arguments, **{name: None})
    finally:
        cluster.finalize()


@pytest.mark.parametrize(
    "call",
    ["pull_blocks_async", "pull_cache_async", "push_blocks", "push_cache", "pull_group", "push_group_async", "grant"],
)
def test_calls_of_this_package_take_no_unknown_keyword_argument(call: str) -> None:
    found = inspect.signature(getattr(CacheManager, call)).parameters.values()
    assert not any(one.kind is one.VAR_KEYWORD for one in found)


def test_own_keyword_arguments_are_given_by_name_only() -> None:
    """A later argument of the original cannot collide with them."""
    found = {
        (name, one.name): one.kind
        for name, method in inspect.getmembers(CacheManager, inspect.isfunction)
        for one in inspect.signature(method).parameters.values()
        if one.name in OWN_KEYWORDS
    }
    assert len(found) > 50
    assert {name for name, kind in found.items() if kind is not inspect.Parameter.KEYWORD_ONLY} == set()


def test_own_keyword_arguments_are_those_of_the_signatures() -> None:
    """A keyword argument that is added to a pull must be protected against misspelling as well."""
    original = {"src_layer_range", "dst_layer_range", "tensor_num_per_layer"}
    found: set[str] = set()
    for call in ("pull_cache", "pull_blocks"):
        method = getattr(CacheManager, call)
        found |= set(inspect.signature(method).parameters) - set(
            inspect.signature(getattr(KvCacheManager, call)).parameters
        )
        asynchronous = set(inspect.signature(getattr(CacheManager, f"{call}_async")).parameters)
        assert asynchronous - {"timeout_ms"} == set(inspect.signature(method).parameters) - {"kwargs"}
    found -= {*original, "cache", "src_cache_key", "dst_cache", "src_blocks", "dst_blocks"}
    assert found | {"timeout_ms", "grants_done"} == OWN_KEYWORDS
