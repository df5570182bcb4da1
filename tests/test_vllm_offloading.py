"""The offloading worker without vLLM: stand-ins replace the classes that it extends.

Not for: which blocks vLLM has it move (`integration-tests/vllm/test_offloading.py`).
"""

from __future__ import annotations

import importlib
import random
import sys
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any
from unittest.mock import Mock

import numpy as np
import pytest

from llm_datadist import Engine, Error, InvalidArgument, OutOfMemory
from llm_datadist.integrations.vllm import interface
from llm_datadist.integrations.vllm.host_buffers import HostBuffers
from peers import LIMIT, eventually
from stand_ins import put
from vllm_device import FakeDevice

if TYPE_CHECKING:
    from collections.abc import Iterator

NAME = "llm_datadist.integrations.vllm.offloading"


@pytest.fixture
def offloading(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    monkeypatch.setattr(interface, "check", lambda *_: None)
    modules: dict[str, dict[str, Any]] = {
        "vllm.v1.kv_offload.base": {"OffloadingWorker": object, "TransferResult": lambda *given: given},
        "vllm.v1.kv_offload.cpu.spec": {"CPUOffloadingSpec": object},
    }
    put(monkeypatch, modules)
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    yield importlib.import_module(NAME)
    sys.modules.pop(NAME, None)


class Tensor:
    """The part of a torch tensor that the worker and the engine use: 8 blocks of 64 bytes."""

    shape = (8, 64)
    device = SimpleNamespace(type="cpu")

    def __init__(self, number: int, *, writable: bool = True) -> None:
        self.memory = np.full(self.shape, number, np.int8)
        self.memory.flags.writeable = writable
        self.__array_interface__ = self.memory.__array_interface__

    def stride(self, axis: int) -> int:
        return self.memory.strides[axis]


class Vllm:
    """A worker of vLLM with two tensors, and four chunks of two blocks in host memory."""

    def __init__(
        self, offloading: Any, *, writable: bool = True, device: FakeDevice | None = None, **engine_options: Any
    ) -> None:
        self.device: Any = device
        self.tensors = [Tensor(number, writable=writable) for number in range(2)]
        groups = [[SimpleNamespace(tensor_idx=index) for index in range(2)]]
        caches = SimpleNamespace(tensors=[SimpleNamespace(tensor=one) for one in self.tensors], group_data_refs=groups)

        def buffers(tensors: list[Any], memory: Any) -> HostBuffers:
            assert device is not None
            rows = np.frombuffer(memory, np.int8).reshape(2, -1, 64)
            blocks = {str(number): tensor.memory for number, tensor in enumerate(tensors)}
            return HostBuffers(device, blocks, {str(number): layer for number, layer in enumerate(rows)})

        through_host = None if device is None else buffers
        self.worker = offloading.LlmDatadistOffloadingWorker(caches, 4, 2, engine_options, through_host)

    def contents(self, block: int) -> list[int]:
        return [int(tensor.memory[block].sum()) for tensor in self.tensors]


@pytest.fixture
def vllm(offloading: Any) -> Iterator[Vllm]:
    """A worker with a device."""
    made = Vllm(offloading, device=FakeDevice())
    yield made
    made.worker.shutdown()


def gpu(*blocks: int) -> Any:
    return SimpleNamespace(block_ids=list(blocks), group_sizes=[len(blocks)], block_indices=[0])


def chunks(*numbers: int) -> Any:
    return SimpleNamespace(block_ids=list(numbers))


def finished(worker: Any, *jobs: int) -> list[Any]:
    """Wait for jobs, and return what the worker reports: numbers, success and bytes."""
    worker.wait(set(jobs))
    return [result[:3] for result in worker.get_finished()]


@pytest.mark.parametrize(
    ("given", "error"),
    [
        ({"writable": False}, InvalidArgument),
        ({"host_pool": "64KiB"}, OutOfMemory),
    ],
)
def test_a_failed_opening_closes_the_engine(
    offloading: Any, monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], error: type[Exception]
) -> None:
    opened: list[Engine] = []

    def recorded(**options: Any) -> Engine:
        opened.append(Engine(**options))
        return opened[-1]

    monkeypatch.setattr(offloading, "Engine", recorded)
    with pytest.raises(error):
        Vllm(offloading, **given)
    assert [engine.closed for engine in opened] == [True]


def test_options_are_those_of_the_engine(offloading: Any) -> None:
    with pytest.raises(TypeError, match="copy_workers"):
        Vllm(offloading, copy_worker=2)
    with pytest.raises(InvalidArgument, match="copy_workers"):
        Vllm(offloading, copy_workers=0)


@pytest.mark.parametrize("device", [None, FakeDevice])
def test_blocks_come_back_from_host_memory(offloading: Any, device: Any) -> None:
    vllm = Vllm(offloading, device=device and device())
    for block in range(8):
        for tensor in vllm.tensors:
            tensor.memory[block] += block
    before = [vllm.contents(block) for block in range(8)]
    assert vllm.worker.submit_store(7, gpu(3, 1, 6), chunks(2, 0))
    assert finished(vllm.worker, 7) == [(7, True, 3 * 2 * 64)]
    assert vllm.worker.get_finished() == []
    assert vllm.worker.submit_load(8, chunks(2), gpu(5, 4))
    assert vllm.worker.submit_load(9, chunks(0), gpu(0), expedited=True)
    assert sorted(finished(vllm.worker, 8, 9)) == [(8, True, 2 * 2 * 64), (9, True, 2 * 64)]
    assert [vllm.contents(block) for block in (5, 4, 0)] == [before[3], before[1], before[6]]
    vllm.worker.shutdown()


def test_copies_of_a_device_wait_for_the_model(vllm: Vllm) -> None:
    """It still computes what is stored, and still writes to the blocks that something is loaded to."""

    def model_writes(block: int, value: int) -> None:
        for tensor in vllm.tensors:
            vllm.device.model.put(lambda memory=tensor.memory: memory[block].fill(value))

    for value in range(20):
        model_writes(3, value)
    assert vllm.worker.submit_store(1, gpu(3), chunks(0))
    assert finished(vllm.worker, 1) == [(1, True, 2 * 64)]
    for value in range(20):
        model_writes(5, value + 50)
    assert vllm.worker.submit_load(2, chunks(0), gpu(5))
    assert vllm.worker.get_finished() == []
    assert finished(vllm.worker, 2) == [(2, True, 2 * 64)]
    assert vllm.contents(5) == [19 * 64] * 2


def test_failed_copies_of_a_device_are_logged(vllm: Vllm, caplog: pytest.LogCaptureFixture) -> None:
    vllm.device.failure = RuntimeError("the device is broken")
    assert vllm.worker.submit_store(1, gpu(3), chunks(0))
    assert finished(vllm.worker, 1) == [(1, False, 2 * 64)]
    assert "job 1 of the offloading failed: the device is broken" in caplog.text
    vllm.device.failure = SystemExit()
    assert vllm.worker.submit_load(2, chunks(0), gpu(3))
    eventually(lambda: not vllm.worker._buffers.alive)
    assert not vllm.worker.submit_load(3, chunks(0), gpu(3))
    assert "job 3 of the offloading was not started: " in caplog.text
    assert [result[:2] for result in vllm.worker.get_finished()] == [(2, False)]


def test_wait_raises_while_a_copy_runs(offloading: Any, vllm: Vllm, monkeypatch: pytest.MonkeyPatch) -> None:
    """vLLM computes into the blocks after the wait, so a store that still runs would keep other bytes."""
    vllm.device.gates["d2h"].clear()
    assert vllm.worker.submit_store(1, gpu(3), chunks(0))
    with monkeypatch.context() as patched:
        patched.setattr(offloading, "_WAIT_S", 0.1)
        with pytest.raises(RuntimeError, match=r"job 1 of the offloading has not ended within 0\.1 s"):
            vllm.worker.wait({1})
    assert vllm.worker.get_finished() == []
    vllm.device.gates["d2h"].set()
    assert finished(vllm.worker, 1) == [(1, True, 2 * 64)]


def test_wait_ends_the_jobs_of_a_thread_that_has_ended(
    offloading: Any, vllm: Vllm, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(offloading, "_WAIT_S", LIMIT)
    vllm.device.gates["d2h"].clear()
    vllm.device.failure = SystemExit()
    for job in range(3):
        assert vllm.worker.submit_store(job, gpu(job), chunks(job))
    vllm.device.gates["d2h"].set()
    vllm.worker.wait({0, 1, 2})
    assert [job.done() for job in vllm.worker._jobs] == [True] * 3
    assert [result[:2] for result in vllm.worker.get_finished()] == [(0, False), (1, False), (2, False)]


def test_wait_ends_no_job_while_the_other_direction_copies(vllm: Vllm) -> None:
    """The thread that loads has ended. The store still reads its blocks."""
    vllm.device.gates["d2h"].clear()
    assert vllm.worker.submit_store(1, gpu(3), chunks(0))
    eventually(lambda: vllm.device.copies)
    load, vllm.device.failure = vllm.worker._buffers._loads, SystemExit()
    assert vllm.worker.submit_load(2, chunks(1), gpu(4))
    eventually(lambda: not load.alive)
    vllm.device.failure = None
    assert vllm.worker.get_finished() == []
    vllm.device.gates["d2h"].set()
    vllm.worker.wait({1, 2})
    assert sorted(result[:2] for result in vllm.worker.get_finished()) == [(1, True), (2, False)]


def test_a_job_that_is_refused_is_logged(offloading: Any, caplog: pytest.LogCaptureFixture) -> None:
    vllm = Vllm(offloading)
    assert not vllm.worker.submit_store(7, gpu(8), chunks(0))
    assert "job 7 of the offloading was not started: " in caplog.text
    assert vllm.worker.get_finished() == []
    vllm.worker.shutdown()


def test_more_jobs_than_max_transfers_run_one_after_another(offloading: Any) -> None:
    """A job whose end vLLM has taken occupies nothing."""
    vllm = Vllm(offloading, max_transfers=4)
    for job in range(50):
        assert vllm.worker.submit_store(job, gpu(3), chunks(2))
        if job % 2:
            assert len(finished(vllm.worker, job - 1, job)) == 2
    vllm.worker.shutdown()


def test_jobs_that_shutdown_cancels_are_logged(offloading: Any, caplog: pytest.LogCaptureFixture) -> None:
    vllm = Vllm(offloading)
    cancelled, moved = Mock(nanos=1), Mock(nanos=1)
    cancelled.result.side_effect = Error("the engine was closed")
    vllm.worker._jobs = {cancelled: 5, moved: 6}
    vllm.worker.shutdown()
    assert "job 5 of the offloading failed: the engine was closed" in caplog.text
    assert "job 6" not in caplog.text
    assert vllm.worker._engine.closed


def naive(chunks: list[int], sizes: list[int], firsts: list[int], per_chunk: int) -> list[int]:
    rows, left = [], list(chunks)
    for size, first in zip(sizes, firsts):
        held: dict[int, int] = {}
        for block in range(first, first + size):
            if block // per_chunk not in held:
                held[block // per_chunk] = left.pop(0)
            rows.append(held[block // per_chunk] * per_chunk + block % per_chunk)
    assert not left
    return rows


def test_rows_follow_the_count(offloading: Any) -> None:
    """The host rows of a job are those of a count block by block."""
    rng = random.Random(5)  # noqa: S311
    for _ in range(500):
        per_chunk = rng.randint(1, 4)
        groups = [(rng.randint(0, 9), rng.randint(0, 20)) for _ in range(rng.randint(1, 3))]
        sizes, firsts = [size for size, _ in groups], [first for _, first in groups]
        needed = sum(len({(first + step) // per_chunk for step in range(size)}) for size, first in groups)
        chunks = rng.sample(range(100), needed)
        assert offloading.host_rows(chunks, sizes, firsts, per_chunk).tolist() == naive(
            chunks, sizes, firsts, per_chunk
        )


def test_too_few_chunks_are_refused(offloading: Any) -> None:
    with pytest.raises(ValueError, match=r"1 chunks do not hold groups of \[3\] blocks"):
        offloading.host_rows([4], [3], [0], 2)
