"""``LlmDatadistOffloadingSpec``: vLLM's blocks in host memory, moved by the engine.

vLLM decides what is offloaded, and looks it up. Only the half that moves bytes is replaced: swap-outs and swap-ins run
at the same time, and while the model runs, and vLLM polls for them. Blocks on a device move with ``HostBuffers``.
"""

from __future__ import annotations

import logging
import threading
import time
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from llm_datadist import Engine, Error
from llm_datadist.integrations.vllm import interface
from llm_datadist.integrations.vllm.supported import installed, warn_untested

with interface.needed():
    from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from llm_datadist.integrations.vllm.host_buffers import Copy, HostBuffers
    from llm_datadist.native import CacheBuffer, Transfer

__all__ = ["LlmDatadistOffloadingSpec", "LlmDatadistOffloadingWorker", "host_rows"]

logger = logging.getLogger("vllm.llm_datadist")

_SLACK = 16 << 20  # the engine rounds each tensor up to pages
_WAIT_S = 60.0
# How often ``wait`` checks for a thread that has ended, in seconds.
_ASK_S = 0.05


class LlmDatadistOffloadingWorker(OffloadingWorker):  # type: ignore[misc]
    """Moves the blocks of one worker between vLLM's KV cache and the host pool of its engine.

    The methods are those of vLLM's ``OffloadingWorker``.

    Args:
        kv_caches: vLLM's KV cache.
        num_chunks: number of chunks in host memory.
        blocks_per_chunk: number of blocks in a chunk.
        engine_options: options of ``Engine``.
        host_buffers: makes the host buffers from the tensors of the KV cache and the memory of their rows, if the KV
            cache is on a device. ``None``: the engine reaches it.

    Raises:
        RuntimeError: the KV cache has a layout that is not supported.
        Error: the engine cannot be opened; for example, there is no memory for the host pool.
        TypeError: the engine has no such option.
    """

    def __init__(
        self,
        kv_caches: Any,
        num_chunks: int,
        blocks_per_chunk: int,
        engine_options: Mapping[str, Any],
        host_buffers: Callable[[list[Any], CacheBuffer], HostBuffers] | None = None,
    ) -> None:
        tensors = [entry.tensor for entry in kv_caches.tensors]
        _check_layout(tensors, kv_caches.group_data_refs)
        self._blocks_per_chunk = blocks_per_chunk
        self._buffers: HostBuffers | None = None
        self._block_bytes = len(tensors) * tensors[0].shape[1]
        self._jobs: dict[Transfer[None] | _Job, int] = {}
        rows, (blocks, page) = num_chunks * blocks_per_chunk, tensors[0].shape
        self._engine = Engine(**{"host_pool": rows * page * len(tensors) + _SLACK, **engine_options})
        try:
            kind: dict[str, Any] = {"tensors": len(tensors), "shape": (page,), "dtype": "int8", "pool": "host"}
            if host_buffers is None:
                self._device = self._engine.register("device", tensors)
                self._host = self._engine.allocate("host", blocks=rows, **kind)
            else:
                memory = self._engine.allocate("host", blocks=rows, contiguous=True, **kind).buffer
                self._buffers = host_buffers(tensors, memory)
        except BaseException:
            self._engine.close()
            raise
        text = "llm_datadist offloads %d tensors of %d blocks to %d rows of %d bytes"
        logger.info(text, len(tensors), blocks, rows, page)

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Start to copy blocks to the host pool."""
        return self._submit(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:  # noqa: ARG002
        """Start to copy blocks back.

        vLLM 0.33 waits within the step for an ``expedited`` load, so it should not queue behind others. None does: the
        copies of several jobs run beside each other.
        """
        return self._submit(job_id, dst_spec, src_spec, store=False)

    def get_finished(self) -> list[TransferResult]:
        """Return the jobs that have ended since the last call."""
        self._end_lost()
        return [self._result(transfer) for transfer in list(self._jobs) if transfer.done()]

    def wait(self, job_ids: set[int]) -> None:
        """Wait until the jobs have ended. ``get_finished`` reports them afterwards.

        vLLM uses the blocks for something else after this returns, so no copy may touch them any more.

        Raises:
            RuntimeError: a copy between host memory and device has not ended within a minute. Nothing may be computed
                then, because the copy could store bytes of another request as those of this one.
        """
        end = time.monotonic() + _WAIT_S
        for transfer in [transfer for transfer, job in self._jobs.items() if job in job_ids]:
            if not isinstance(transfer, _Job):
                with suppress(Error):
                    transfer.result()  # its own time limit bounds it
                continue
            while not transfer.ended(_ASK_S):
                self._end_lost()
                if time.monotonic() > end:
                    text = f"job {self._jobs[transfer]} of the offloading has not ended within {_WAIT_S:g} s"
                    raise RuntimeError(text)

    def shutdown(self) -> None:
        """Close the engine, after the jobs that run. Those that run for longer than a minute are cancelled."""
        if self._buffers is not None and not self._buffers.close(_WAIT_S):
            logger.error("a copy between host memory and device still runs after %g s", _WAIT_S)
        self._engine.close(_WAIT_S)
        self.get_finished()

    def _end_lost(self) -> None:
        """Fail the jobs that wait if a thread that copies has ended by an error, as soon as no copy runs."""
        if self._buffers is not None and not self._buffers.alive and self._buffers.stop():
            for job in self._jobs:
                if isinstance(job, _Job) and not job.done():
                    job.end(None, RuntimeError("the thread that copies has ended"))

    def _submit(self, job_id: int, gpu: Any, chunks: Any, *, store: bool) -> bool:
        rows = host_rows(chunks.block_ids, gpu.group_sizes, gpu.block_indices, self._blocks_per_chunk)
        try:
            self._jobs[self._begin(np.asarray(gpu.block_ids, np.int64), rows, store=store)] = job_id
        except (Error, RuntimeError) as error:
            logger.error("job %d of the offloading was not started: %s", job_id, error)  # noqa: TRY400 - it says all
            return False
        return True

    def _begin(self, blocks: np.ndarray, rows: np.ndarray, *, store: bool) -> Transfer[None] | _Job:
        if self._buffers is None:
            device, host = self._device[blocks], self._host[rows]
            return self._engine.copy(*((host, device) if store else (device, host)), timeout=_WAIT_S)
        job = _Job(len(blocks) * self._block_bytes)
        begin = self._buffers.save if store else self._buffers.load
        # The model may still write to the blocks, or read what they had before.
        begin(list(self._buffers.blocks), list(zip(blocks.tolist(), rows.tolist())), self._buffers.mark(), job.end)
        return job

    def _result(self, transfer: Transfer[None] | _Job) -> TransferResult:
        job_id, success = self._jobs.pop(transfer), True
        try:
            transfer.result()
        except Error as error:
            success = False
            logger.error("job %d of the offloading failed: %s", job_id, error)  # noqa: TRY400 - it says all
        return TransferResult(job_id, success, transfer.bytes, transfer.nanos / 1e9)


class _Job:
    """A copy of host buffers, with the members of ``Transfer`` that the worker uses."""

    def __init__(self, size: int) -> None:
        self.bytes = size
        self.nanos = 0
        self._begin = time.monotonic_ns()
        self._error: Exception | None = None
        self._ended = threading.Event()

    def end(self, _: Copy | None, error: Exception | None) -> None:
        self.nanos = time.monotonic_ns() - self._begin
        self._error = error
        self._ended.set()

    def ended(self, limit_s: float) -> bool:
        """Wait until the copy has ended, and return whether that has happened within ``limit_s`` seconds."""
        return self._ended.wait(limit_s)

    def done(self) -> bool:
        return self._ended.is_set()

    def result(self) -> None:
        """Raise the error of the copy, which has ended."""
        if self._error is not None:
            raise Error(str(self._error))


class LlmDatadistOffloadingSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM's offloading to host memory, with the worker of this package.

    Besides the options of vLLM's ``CPUOffloadingSpec``, ``kv_connector_extra_config`` may have ``engine_options`` and
    ``host_buffers``, as for ``LlmDatadistConnector``.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._worker: OffloadingWorker | None = None
        warn_untested(installed())

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """Return the worker."""
        if self._worker is None:
            options = self.extra_config.get("engine_options", {})
            sizes = (self.num_chunks, self.blocks_per_chunk)
            on_device = kv_caches.tensors[0].tensor.device.type != "cpu" or self.extra_config.get("host_buffers", False)
            buffers = _host_buffers if on_device else None
            self._worker = LlmDatadistOffloadingWorker(kv_caches, *sizes, options, buffers)
        return self._worker


def _host_buffers(tensors: list[Any], memory: CacheBuffer) -> HostBuffers:
    from llm_datadist.integrations.vllm import device_copies  # noqa: PLC0415 - imports torch

    return device_copies.offloading_buffers(tensors, memory)


def host_rows(
    chunks: Sequence[int], group_sizes: Sequence[int], first_blocks: Sequence[int], blocks_per_chunk: int
) -> np.ndarray:
    """Return the host row of each block, in the order of the job.

    vLLM offloads chunks of one or more blocks. A job lists the blocks of each KV cache group, which follow each other
    in the request, and the chunks that hold them. The first block of a group may lie inside its first chunk.

    Args:
        chunks: the chunks of all groups, one group after the other.
        group_sizes: number of blocks of each group.
        first_blocks: the place of the first block of each group in its request.
        blocks_per_chunk: number of blocks in a chunk.

    Raises:
        ValueError: the chunks do not hold as many blocks.
    """
    # Each block as its place in the list of chunks: a group begins with a chunk of its own.
    positions, taken = [np.empty(0, np.int64)], 0
    for size, first in zip(group_sizes, first_blocks):
        positions.append(np.arange(size) + first % blocks_per_chunk + taken * blocks_per_chunk)
        taken += -(-(first % blocks_per_chunk + size) // blocks_per_chunk) if size else 0
    if taken > len(chunks):
        raise ValueError(f"{len(chunks)} chunks do not hold groups of {list(group_sizes)} blocks")
    chunk, inside = np.divmod(np.concatenate(positions), blocks_per_chunk)
    return np.asarray(chunks, np.int64)[chunk] * blocks_per_chunk + inside


def _check_layout(tensors: list[Any], groups: list[Any]) -> None:
    """Refuse what is not one cache of the engine: pages of different sizes, gaps, or groups with tensors of their own.

    Raises:
        RuntimeError: the layout is not supported.
    """
    page = tensors[0].shape[1]
    if any(tensor.shape != tensors[0].shape or tensor.stride(0) != page for tensor in tensors):
        raise RuntimeError("llm_datadist does not offload KV caches whose tensors differ or have gaps")
    whole = set(range(len(tensors)))
    if any({ref.tensor_idx for ref in refs} != whole for refs in groups):
        raise RuntimeError("llm_datadist does not offload KV cache groups with tensors of their own")


interface.check(interface.OFFLOADING, LlmDatadistOffloadingWorker, LlmDatadistOffloadingSpec)
