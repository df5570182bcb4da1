"""`with` blocks over an engine and over caches, and what `repr` shows."""

from __future__ import annotations

import contextlib
from typing import Any, Callable
from unittest.mock import Mock

import pytest

from conftest import options
from llm_datadist import Cache, KvCache, LLMConfig, LLMDataDist, LLMException, LLMRole, LLMStatusCode, Status
from memory import UserTensors, desc, raising, stats
from mistakes import coded
from two_modes import CACHE_MANAGER, KV_OPTIONS, MODES


@pytest.mark.parametrize("error", [None, KeyError("mine")])
def test_with_block_finalizes_the_engine_and_does_not_suppress_an_exception(error: KeyError | None) -> None:
    raised = pytest.raises(KeyError, match="mine") if error else contextlib.nullcontext()
    with raised, LLMDataDist(LLMRole.PROMPT, 1) as dist:
        dist.init(options())
        manager = dist.cache_manager
        assert LLMDataDist.llm_engine_instance is dist
        if error:
            raise error
    assert LLMDataDist.llm_engine_instance is None
    with raising(coded(LLMStatusCode.LLM_ENGINE_FINALIZED)):
        manager.allocate_cache(desc())


def test_with_block_accepts_an_engine_that_is_not_initialized() -> None:
    with LLMDataDist(LLMRole.PROMPT, 1) as early:
        early.init(options())
        early.finalize()
    assert LLMDataDist.llm_engine_instance is None


def test_failing_finalize_does_not_hide_the_exception_of_the_block(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    error = LLMException("pool is stuck", status_code=LLMStatusCode.LLM_FAILED)
    monkeypatch.setattr(LLMDataDist, "finalize", Mock(side_effect=error))
    with pytest.raises(KeyError, match="mine"), LLMDataDist(LLMRole.PROMPT, 1):
        raise KeyError("mine")
    assert [record.levelname for record in caplog.records] == ["ERROR"]
    assert "pool is stuck" in caplog.records[0].getMessage()
    with pytest.raises(LLMException, match="pool is stuck"), LLMDataDist(LLMRole.PROMPT, 1):
        pass


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("call", ["allocate_cache", "allocate_blocks_cache"])
def test_with_block_deallocates_a_cache(start: Callable[..., LLMDataDist], mode: str, call: str) -> None:
    dist = start(options() if mode == CACHE_MANAGER else dict(KV_OPTIONS))
    manager = dist.cache_manager if mode == CACHE_MANAGER else dist.kv_cache_manager
    addresses = "tensor_addrs" if mode == CACHE_MANAGER else "per_device_tensor_addrs"
    for error in (None, KeyError("mine")):
        with contextlib.suppress(KeyError), getattr(manager, call)(desc()) as cache:
            assert isinstance(cache, Cache if mode == CACHE_MANAGER else KvCache)
            assert dist.stats()["pools"]["device"]["used_bytes"] > 0
            if error:
                raise error
        assert dist.stats()["pools"]["device"]["used_bytes"] == 0
        assert list(getattr(cache, addresses)) == []
        with cache:  # deallocated already
            pass


def test_with_block_unregisters_a_registered_cache(manager: Any) -> None:
    addresses = UserTensors().addrs
    for register in (manager.register_cache, manager.register_blocks_cache):
        with register(desc(), addresses) as cache:
            assert stats(manager)["table"]["caches"] == 1
        assert stats(manager)["table"] == {"caches": 0, "keys": 0}
        assert list(cache.tensor_addrs) == addresses
        with cache:  # unregistered already
            pass


def test_with_block_outlives_the_engine_and_takes_cpu_caches(start: Callable[..., LLMDataDist]) -> None:
    dist = start()
    user = UserTensors()
    with user.cpu_cache() as cpu:
        assert cpu.tensor_addrs == user.addrs
    with dist.cache_manager.allocate_cache(desc()):
        dist.finalize()


def test_failing_release_is_raised_unless_the_block_raised(
    manager: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    user = UserTensors()
    cache = manager.register_cache(desc(), user.addrs)
    error = LLMException("a transfer uses the memory", status_code=LLMStatusCode.LLM_TIMEOUT)
    monkeypatch.setattr(type(manager), "unregister_cache", Mock(side_effect=error))
    with pytest.raises(LLMException, match="a transfer uses the memory"), cache:
        pass
    with pytest.raises(KeyError, match="mine"), cache:
        raise KeyError("mine")
    assert "a transfer uses the memory" in caplog.records[-1].getMessage()


def test_repr_of_a_config_shows_what_was_set_and_no_secret() -> None:
    assert repr(LLMConfig()) == "LLMConfig()"
    config = LLMConfig()
    config.device_id = [0, 1]
    config.enable_cache_manager = True
    config.link_token = "a secret of the cluster"  # noqa: S105
    config.ge_options = {"llm.LinkToken": "hidden one", "llm.LinkTokn": "hidden two", "llm.LinkTokenFile": "/shown"}
    shown = repr(config)
    assert shown.startswith(
        "LLMConfig(device_id=[0, 1], enable_cache_manager=True, link_token='(not shown)', ge_options={"
    )
    assert "/shown" in shown
    assert "secret of the cluster" not in shown
    assert "hidden" not in shown


def test_repr_of_engine_and_managers(start: Callable[..., LLMDataDist]) -> None:
    dist = LLMDataDist(LLMRole.DECODER, 7)
    assert repr(dist) == "LLMDataDist(role=LLMRole.DECODER, cluster_id=7, initialized=False)"
    dist = start(options(llm__listenIpInfo="127.0.0.1:0"))
    manager = dist.cache_manager
    listens = f"mode=CacheManager, listen_ip_info='{dist.listen_ip_info}'"
    assert repr(dist) == f"LLMDataDist(role=LLMRole.PROMPT, cluster_id=1, initialized=True, {listens})"
    assert repr(manager) == "CacheManager(initialized=True, enable_remote_cache_accessible=False)"
    dist.finalize()
    assert repr(manager) == "CacheManager(initialized=False, enable_remote_cache_accessible=False)"
    assert repr(dist) == "LLMDataDist(role=LLMRole.PROMPT, cluster_id=1, initialized=False)"
    dist.init(dict(KV_OPTIONS))
    assert "mode=KvCacheManager" in repr(dist)
    assert repr(dist.kv_cache_manager) == "KvCacheManager(initialized=True, role=LLMRole.PROMPT)"
    assert repr(Status(LLMStatusCode.LLM_FAILED)) == "Status(LLMStatusCode.LLM_FAILED)"
