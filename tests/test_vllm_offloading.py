"""How the offloading worker opens its engine, without vLLM: stand-ins replace the classes that it extends.

Not for: the blocks that it moves (`integration-tests/vllm/test_offloading.py`).
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist import CacheManager, LLMDataDist, LLMException

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "llm_datadist.integrations.vllm.offloading"


@pytest.fixture
def offloading(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    stand_ins = {
        "vllm.v1.kv_offload.base": {"OffloadingWorker": object, "TransferResult": tuple},
        "vllm.v1.kv_offload.cpu.spec": {"CPUOffloadingSpec": object},
    }
    for name, contents in stand_ins.items():
        module = ModuleType(name)
        vars(module).update(contents)
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    yield importlib.import_module(NAME)
    sys.modules.pop(NAME, None)


class Tensor:
    """The part of a torch tensor that the worker uses: 8 blocks of 64 bytes."""

    shape = (8, 64)
    device = SimpleNamespace(type="cpu")

    def __init__(self) -> None:
        self._memory = np.zeros(self.shape, np.int8)

    def stride(self, axis: int) -> int:
        return self._memory.strides[axis]

    def data_ptr(self) -> int:
        return self._memory.ctypes.data


def opened(offloading: Any, **engine_options: Any) -> Any:
    tensors = [SimpleNamespace(tensor=Tensor()) for _ in range(2)]
    groups = [[SimpleNamespace(tensor_idx=index) for index in range(2)]]
    caches = SimpleNamespace(tensors=tensors, group_data_refs=groups)
    return offloading.LlmDatadistOffloadingWorker(caches, 4, 2, engine_options)


@pytest.mark.parametrize("step", ["register_blocks_cache", "allocate_blocks_cache", "poll"])
def test_a_failed_opening_does_not_keep_later_ones_from_working(
    offloading: Any, monkeypatch: pytest.MonkeyPatch, step: str
) -> None:
    def fails(*_: Any, **__: Any) -> None:
        raise LLMException(f"{step} fails")

    with monkeypatch.context() as patch:
        patch.setattr(LLMDataDist if step == "poll" else CacheManager, step, fails)
        with pytest.raises(LLMException, match=f"{step} fails"):
            opened(offloading)
    assert LLMDataDist.llm_engine_instance is None
    opened(offloading).shutdown()


def test_jobs_that_shutdown_cancels_are_logged(
    offloading: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    worker = opened(offloading)
    monkeypatch.setattr(LLMDataDist, "drain", lambda *_: False)
    worker.shutdown()
    assert "jobs of the offloading that run for longer than 60000 ms are cancelled" in caplog.text
    assert LLMDataDist.llm_engine_instance is None
