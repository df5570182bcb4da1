"""The check of vLLM's interface, with the classes of the vLLM that is installed. Nothing is computed."""

from __future__ import annotations

import importlib
import inspect
import re
from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist.integrations.vllm import connector, interface, metrics, offloading, p2p_tier, store_tier, supported

if TYPE_CHECKING:
    from collections.abc import Sequence

CLASSES = (
    connector.LlmDatadistConnector,
    connector.Addresses,
    metrics.TransferStats,
    metrics.PrometheusMetrics,
    offloading.LlmDatadistOffloadingWorker,
    offloading.LlmDatadistOffloadingSpec,
    p2p_tier.LlmDatadistP2PTier,
    p2p_tier.LlmDatadistTransport,
    store_tier.LlmDatadistStoreTier,
)
OVERRIDES = [
    (ours, name)
    for ours in CLASSES
    for name in vars(ours)
    if not name.startswith("_") and inspect.isroutine(getattr(ours, name))
]
TABLES = (interface.CONNECTOR, interface.OFFLOADING, interface.P2P, interface.STORE_TIER)
USES = [(use, names) for table in TABLES for use, names in table.items()]


@pytest.mark.subset
def test_this_vllm_has_what_is_used() -> None:
    assert len(OVERRIDES) > 35
    for table in TABLES:
        interface.check(table, *CLASSES)


def base_of(ours: type, name: str) -> Any:
    return next(one for one in ours.__mro__[1:] if name in vars(one))


@pytest.mark.subset
@pytest.mark.parametrize(("ours", "name"), OVERRIDES, ids=lambda given: getattr(given, "__name__", given))
def test_a_vllm_with_other_methods_is_refused(monkeypatch: pytest.MonkeyPatch, ours: type, name: str) -> None:
    base = base_of(ours, name)

    def changed(self: Any, renamed: Any, *given: Any) -> None: ...

    with monkeypatch.context() as changes:
        changes.setattr(base, name, changed)
        with pytest.raises(RuntimeError, match=rf"{base.__name__}\.{name} has the parameters \(renamed, \*given\)"):
            interface.check({}, ours)
    others = [one for one in ours.__mro__[1:] if name in vars(one)]
    with monkeypatch.context() as changes:
        for one in others:
            changes.delattr(one, name)
        with pytest.raises(RuntimeError, match=f"{re.escape(supported.installed())}.* has no {name}"):
            interface.check({}, ours)


@pytest.mark.subset
@pytest.mark.parametrize(("use", "names"), [one for one in USES if not one[0].endswith(":[]")])
def test_a_vllm_without_a_class_or_function_is_refused(
    monkeypatch: pytest.MonkeyPatch, use: str, names: Sequence[str]
) -> None:
    name, _, path = use.partition(":")
    monkeypatch.delattr(importlib.import_module(name), path.rstrip("[]").split(".")[0])
    with pytest.raises(RuntimeError, match=f"{name} has no {path.split('.')[0].rstrip('[]')}"):
        interface.check({use: names})


@pytest.mark.subset
@pytest.mark.parametrize(("use", "names"), [one for one in USES if one[0].endswith("[]")])
def test_a_vllm_without_a_member_is_refused(use: str, names: Sequence[str]) -> None:
    with pytest.raises(RuntimeError, match=rf"{re.escape(use.rstrip('[]:'))} has no gone_member$"):
        interface.check({use: (*names, "gone_member")})


@pytest.mark.subset
def test_a_vllm_that_checks_no_peers_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """The method that makes sessions is private, so it could get another name."""
    monkeypatch.delattr(p2p_tier.vllm_p2p.P2PSecondaryTierManager, "_get_or_create_session")
    with pytest.raises(RuntimeError, match=r"has no P2PSecondaryTierManager\._get_or_create_session"):
        interface.check(interface.P2P)
