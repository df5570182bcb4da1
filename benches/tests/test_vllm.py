"""The benchmarks of vLLM measure nothing without a reason.

Modules of the tests stand in for vLLM and its servers. Not for: the figures.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

import pytest

FOLDER = Path(__file__).resolve().parents[1] / "vllm"
STUBS = ("servers", "model", "halves", "vllm", "vllm.config", "vllm.v1", "vllm.v1.core", "vllm.v1.core.sched")


def loaded(name: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Return a benchmark, with stubs in place of what it imports of vLLM and of the integration tests."""
    for stub in (*STUBS, "vllm.v1.core.sched.output"):
        monkeypatch.setitem(sys.modules, stub, MagicMock())
    monkeypatch.setattr(sys, "path", sys.path.copy())
    vars(sys.modules["model"]).update(FIRST_WORD=3, VOCABULARY=2048)
    spec = importlib.util.spec_from_file_location("vllm_benchmark", FOLDER / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    assert isinstance(module, ModuleType)
    spec.loader.exec_module(module)
    return module


def test_killing_a_decode_that_holds_nothing_is_no_measurement(monkeypatch: pytest.MonkeyPatch) -> None:
    bench = loaded("__main__", monkeypatch)
    monkeypatch.setattr(bench.time, "sleep", lambda _: None)
    server = bench.Server.return_value.wait.return_value
    server.usage.side_effect = [0.0, 0.0]
    with pytest.raises(RuntimeError, match="nothing to measure"):
        bench.killed("model", "llm_datadist, pool")
    server.usage.side_effect = [0.5, 0.25, 0.0]
    assert bench.killed("model", "llm_datadist, pool")["share of the KV cache"] == 0.5


@pytest.mark.parametrize("waiting", [0, 2])
def test_any_number_of_requests_may_wait(waiting: int, monkeypatch: pytest.MonkeyPatch) -> None:
    bench = loaded("step_costs", monkeypatch)
    halves = bench.Halves.return_value
    halves.worker._transfers._lending._held = {"decode": set(range(waiting))}
    bench.Pair(object(), waiting)
    assert halves.finish.call_count == waiting
