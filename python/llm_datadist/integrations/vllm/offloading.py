"""``LlmDatadistOffloadingSpec``: vLLM's blocks in host memory, moved by the engine.

vLLM decides what is offloaded, and looks it up. Only the half that moves bytes is replaced: swap-outs and swap-ins run
beside each other and beside the model, and vLLM polls for them.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import TYPE_CHECKING, Any

import numpy as np

from llm_datadist import Engine, Error
from llm_datadist.integrations.vllm import interface
from llm_datadist.integrations.vllm.supported import check_device, installed, warn_untested

with interface.needed():
    from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
    from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llm_datadist.native import Rows, Transfer

__all__ = ["LlmDatadistOffloadingSpec", "LlmDatadistOffloadingWorker", "host_rows"]

logger = logging.getLogger("vllm.llm_datadist")

_SLACK = 16 << 20  # the engine rounds each tensor up to pages
_WAIT_S = 60.0


class LlmDatadistOffloadingWorker(OffloadingWorker):  # type: ignore[misc]
    """Moves the blocks of one worker between vLLM's KV cache and the host pool of its engine.

    The methods are those of vLLM's ``OffloadingWorker``.

    Args:
        kv_caches: vLLM's KV cache.
        num_chunks: number of chunks in host memory.
        blocks_per_chunk: number of blocks in a chunk.
        engine_options: options of ``Engine``.

    Raises:
        RuntimeError: the KV cache has a layout that is not supported.
        Error: the engine cannot be opened; for example, there is no memory for the host pool.
        TypeError: the engine has no such option.
    """

    def __init__(
        self, kv_caches: Any, num_chunks: int, blocks_per_chunk: int, engine_options: Mapping[str, Any]
    ) -> None:
        tensors = [entry.tensor for entry in kv_caches.tensors]
        _check_layout(tensors, kv_caches.group_data_refs)
        self._blocks_per_chunk = blocks_per_chunk
        self._jobs: dict[Transfer[None], int] = {}
        rows, (blocks, page) = num_chunks * blocks_per_chunk, tensors[0].shape
        self._engine = Engine(**{"host_pool": rows * page * len(tensors) + _SLACK, **engine_options})
        try:
            self._device = self._engine.register("device", tensors)
            self._host = self._engine.allocate(
                "host", blocks=rows, tensors=len(tensors), shape=(page,), dtype="int8", pool="host"
            )
        except BaseException:
            self._engine.close()
            raise
        text = "llm_datadist offloads %d tensors of %d blocks to %d rows of %d bytes"
        logger.info(text, len(tensors), blocks, rows, page)

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Start to copy blocks to the host pool."""
        blocks, rows = self._rows(src_spec, dst_spec)
        return self._submit(job_id, rows, blocks)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:  # noqa: ARG002
        """Start to copy blocks back.

        vLLM 0.33 waits within the step for an ``expedited`` load, so it should not queue behind others. None does: the
        copies of several jobs run beside each other.
        """
        blocks, rows = self._rows(dst_spec, src_spec)
        return self._submit(job_id, blocks, rows)

    def get_finished(self) -> list[TransferResult]:
        """Return the jobs that have ended since the last call."""
        return [self._result(transfer) for transfer in list(self._jobs) if transfer.done()]

    def wait(self, job_ids: set[int]) -> None:
        """Wait until the jobs have ended. ``get_finished`` reports them afterwards."""
        for transfer in [transfer for transfer, job in self._jobs.items() if job in job_ids]:
            with suppress(Error):
                transfer.result()

    def shutdown(self) -> None:
        """Close the engine, after the jobs that run. Those that run for longer than a minute are cancelled."""
        self._engine.close(_WAIT_S)
        self.get_finished()

    def _rows(self, gpu: Any, chunks: Any) -> tuple[Rows, Rows]:
        """Return the rows of a job in vLLM's KV cache and in the host pool."""
        rows = host_rows(chunks.block_ids, gpu.group_sizes, gpu.block_indices, self._blocks_per_chunk)
        return self._device[np.asarray(gpu.block_ids, np.int64)], self._host[rows]

    def _submit(self, job_id: int, dst: Rows, src: Rows) -> bool:
        try:
            transfer = self._engine.copy(dst, src, timeout=_WAIT_S)
        except Error as error:
            logger.error("job %d of the offloading was not started: %s", job_id, error)  # noqa: TRY400 - it says all
            return False
        self._jobs[transfer] = job_id
        return True

    def _result(self, transfer: Transfer[None]) -> TransferResult:
        job_id, success = self._jobs.pop(transfer), True
        try:
            transfer.result()
        except Error as error:
            success = False
            logger.error("job %d of the offloading failed: %s", job_id, error)  # noqa: TRY400 - it says all
        return TransferResult(job_id, success, transfer.bytes, transfer.nanos / 1e9)


class LlmDatadistOffloadingSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM's offloading to host memory, with the worker of this package.

    Besides the options of vLLM's ``CPUOffloadingSpec``, ``kv_connector_extra_config`` may have ``engine_options``, as
    for ``LlmDatadistConnector``.
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
            self._worker = LlmDatadistOffloadingWorker(kv_caches, *sizes, options)
        return self._worker


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
    places, taken = [np.empty(0, np.int64)], 0
    for size, first in zip(group_sizes, first_blocks):
        places.append(np.arange(size) + first % blocks_per_chunk + taken * blocks_per_chunk)
        taken += -(-(first % blocks_per_chunk + size) // blocks_per_chunk) if size else 0
    if taken > len(chunks):
        raise ValueError(f"{len(chunks)} chunks do not hold groups of {list(group_sizes)} blocks")
    chunk, inside = np.divmod(np.concatenate(places), blocks_per_chunk)
    return np.asarray(chunks, np.int64)[chunk] * blocks_per_chunk + inside


def _check_layout(tensors: list[Any], groups: list[Any]) -> None:
    """Refuse what is not one cache of the engine: pages of different sizes, gaps, or groups with tensors of their own.

    Raises:
        RuntimeError: the layout is not supported.
    """
    check_device(tensors[0].device.type)
    page = tensors[0].shape[1]
    if any(tensor.shape != tensors[0].shape or tensor.stride(0) != page for tensor in tensors):
        raise RuntimeError("llm_datadist does not offload KV caches whose tensors differ or have gaps")
    whole = set(range(len(tensors)))
    if any({ref.tensor_idx for ref in refs} != whole for refs in groups):
        raise RuntimeError("llm_datadist does not offload KV cache groups with tensors of their own")


interface.check(interface.OFFLOADING, LlmDatadistOffloadingWorker, LlmDatadistOffloadingSpec)
