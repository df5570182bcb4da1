"""``LlmDatadistOffloadingSpec``: vLLM's blocks in host memory, moved by the engine.

vLLM decides what is offloaded, and looks it up. Only the half that moves bytes is replaced: swap-outs and swap-ins run
beside each other and beside the model, and vLLM polls for them.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.spec import CPUOffloadingSpec

from llm_datadist import CacheDesc, DataType, LLMConfig, LLMDataDist, LLMException, LLMRole, Placement
from llm_datadist.events import Completed
from llm_datadist.integrations.engine_options import apply_engine_options
from llm_datadist.integrations.vllm.chunks import host_rows
from llm_datadist.integrations.vllm.supported import check_device, check_vllm, installed

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llm_datadist import Cache
    from llm_datadist.events import Transfer

__all__ = ["LlmDatadistOffloadingSpec", "LlmDatadistOffloadingWorker"]

logger = logging.getLogger("vllm.llm_datadist")

_CLUSTER = 1  # of an engine without peers
_SLACK = 16 << 20
_WAIT_MS = 60_000


class LlmDatadistOffloadingWorker(OffloadingWorker):  # type: ignore[misc]
    """Moves the blocks of one worker between vLLM's KV cache and the host pool of its engine.

    The methods are those of vLLM's ``OffloadingWorker``.

    Args:
        kv_caches: vLLM's KV cache.
        num_chunks: number of chunks in host memory.
        blocks_per_chunk: number of blocks in a chunk.
        engine_options: attributes of ``LLMConfig`` for the engine.

    Raises:
        RuntimeError: the KV cache has a layout that is not supported.
        LLMException: the engine cannot be opened; for example, the host pool is larger than it may be.
    """

    def __init__(
        self, kv_caches: Any, num_chunks: int, blocks_per_chunk: int, engine_options: Mapping[str, Any]
    ) -> None:
        tensors = [entry.tensor for entry in kv_caches.tensors]
        _check_layout(tensors, kv_caches.group_data_refs)
        self._blocks_per_chunk = blocks_per_chunk
        self._tensors = tensors  # the engine reads their memory
        self._jobs: dict[Transfer, int] = {}
        rows, (blocks, page) = num_chunks * blocks_per_chunk, tensors[0].shape
        self._engine = LLMDataDist(LLMRole.MIX, _CLUSTER)
        try:
            self._engine.init(_options(rows * page * len(tensors), engine_options))
            manager = self._engine.cache_manager
            desc = CacheDesc(len(tensors), [blocks, page], DataType.DT_INT8)
            self._device = manager.register_blocks_cache(desc, [tensor.data_ptr() for tensor in tensors])
            host = CacheDesc(len(tensors), [rows, page], DataType.DT_INT8, Placement.HOST)
            self._host = manager.allocate_blocks_cache(host)
            self._engine.poll()
        except BaseException:
            self._engine.finalize()  # an engine that stays open would make every later attempt fail
            raise
        text = "llm_datadist offloads %d tensors of %d blocks to %d rows of %d bytes"
        logger.info(text, len(tensors), blocks, rows, page)

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Start to swap blocks out."""
        return self._submit(job_id, (self._device, self._host), src_spec, dst_spec, store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        """Start to swap blocks in."""
        return self._submit(job_id, (self._host, self._device), dst_spec, src_spec, store=False)

    def get_finished(self) -> list[TransferResult]:
        """Return the jobs that have ended since the last call."""
        events = [event for event in self._engine.poll() if isinstance(event, Completed)]
        return [self._result(event.transfer) for event in events]

    def wait(self, job_ids: set[int]) -> None:
        """Wait until the jobs have ended. ``get_finished`` reports them afterwards."""
        for transfer in [transfer for transfer, job in self._jobs.items() if job in job_ids]:
            while not transfer.done():
                self._engine.drain(_WAIT_MS)

    def shutdown(self) -> None:
        """Close the engine, after the jobs that run."""
        try:
            if not self._engine.drain(_WAIT_MS):
                logger.warning("jobs of the offloading that run for longer than %d ms are cancelled", _WAIT_MS)
        finally:
            self._engine.finalize()

    def _submit(self, job_id: int, caches: tuple[Cache, Cache], gpu: Any, chunks: Any, *, store: bool) -> bool:
        rows = host_rows(chunks.block_ids, gpu.group_sizes, gpu.block_indices, self._blocks_per_chunk)
        blocks = np.asarray(gpu.block_ids, np.int64)
        pairs = np.stack([blocks, rows] if store else [rows, blocks], axis=1)
        try:
            transfer = self._engine.cache_manager.swap_blocks_async(*caches, pairs, timeout_ms=_WAIT_MS)
        except LLMException as error:
            logger.error("job %d of the offloading was not started: %s", job_id, error)  # noqa: TRY400 - it says all
            return False
        self._jobs[transfer] = job_id
        return True

    def _result(self, transfer: Transfer) -> TransferResult:
        job_id, failure = self._jobs.pop(transfer), transfer.exception()
        if failure is not None:
            logger.error("job %d of the offloading failed: %s", job_id, failure)
        return TransferResult(job_id, failure is None, transfer.bytes, transfer.nanos / 1e9)


class LlmDatadistOffloadingSpec(CPUOffloadingSpec):  # type: ignore[misc]
    """vLLM's offloading to host memory, with the worker of this package.

    Besides the options of vLLM's ``CPUOffloadingSpec``, ``kv_connector_extra_config`` may have ``engine_options`` and
    ``allow_untested_vllm``, as for ``LlmDatadistConnector``.

    Args:
        config: vLLM's configuration of the offloading.
    """

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._worker: OffloadingWorker | None = None
        check_vllm(bool(self.extra_config.get("allow_untested_vllm", False)), installed())

    def get_worker(self, kv_caches: Any) -> OffloadingWorker:
        """Return the worker."""
        if self._worker is None:
            options = self.extra_config.get("engine_options", {})
            sizes = (self.num_chunks, self.blocks_per_chunk)
            self._worker = LlmDatadistOffloadingWorker(kv_caches, *sizes, options)
        return self._worker


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


def _options(host_bytes: int, engine_options: Mapping[str, Any]) -> dict[str, str]:
    config = LLMConfig()
    config.enable_cache_manager = True
    config.mem_pool_cfg = f'{{"memory_size": {1 << 20}}}'
    config.host_mem_pool_cfg = f'{{"memory_size": {(host_bytes + _SLACK) >> 20 << 20}}}'
    apply_engine_options(config, engine_options)
    return config.generate_options()
