"""vLLM's tiered offloading on a CPU, for which vLLM itself has no worker, and a tier that must give other tokens."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import torch
from vllm.v1.kv_offload.base import OffloadingWorker, TransferResult
from vllm.v1.kv_offload.cpu.shared_offload_region import SharedOffloadRegion
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from llm_datadist.integrations.vllm.offloading import host_rows
from llm_datadist.integrations.vllm.store_tier import LlmDatadistStoreTier

if TYPE_CHECKING:
    import numpy as np


class CpuWorker(OffloadingWorker):
    """Copies blocks between vLLM's KV cache and the primary tier, at once and on the calling thread."""

    def __init__(self, kv_caches: Any, region: SharedOffloadRegion, blocks_per_chunk: int) -> None:
        self._region, self._blocks_per_chunk = region, blocks_per_chunk
        self._ended: list[TransferResult] = []
        self._tensors: list[tuple[np.ndarray, np.ndarray]] = []
        for entry in kv_caches.tensors:
            page = entry.page_size_bytes
            blocks = entry.tensor.view(torch.int8).view(-1, page).numpy()
            chunks = region.create_next_worker_view(page * blocks_per_chunk).numpy()
            self._tensors.append((blocks, chunks))

    def submit_store(self, job_id: int, src_spec: Any, dst_spec: Any) -> bool:
        return self._copy(job_id, src_spec, dst_spec, store=True)

    def submit_load(self, job_id: int, src_spec: Any, dst_spec: Any, expedited: bool = False) -> bool:  # noqa: ARG002
        return self._copy(job_id, dst_spec, src_spec, store=False)

    def _copy(self, job_id: int, gpu: Any, cpu: Any, *, store: bool) -> bool:
        began, per_chunk = time.perf_counter(), self._blocks_per_chunk
        chosen = host_rows(cpu.block_ids, gpu.group_sizes, gpu.block_indices, per_chunk)
        for blocks, chunks in self._tensors:
            page = blocks.shape[1]
            for block, row in zip(gpu.block_ids, chosen):
                inside = chunks[row // per_chunk, row % per_chunk * page : (row % per_chunk + 1) * page]
                if store:
                    inside[:] = blocks[block]
                else:
                    blocks[block] = inside
        size = len(chosen) * sum(blocks.shape[1] for blocks, _ in self._tensors)
        self._ended.append(TransferResult(job_id, True, size, time.perf_counter() - began))
        return True

    def get_finished(self) -> list[TransferResult]:
        ended, self._ended = self._ended, []
        return ended

    def wait(self, job_ids: set[int]) -> None: ...

    def shutdown(self) -> None:
        self._tensors.clear()
        self._region.cleanup()


class CpuTieringSpec(TieringOffloadingSpec):
    """Tiered offloading with that worker."""

    def get_worker(self, kv_caches: Any) -> CpuWorker:
        if self._worker is None:
            region = SharedOffloadRegion(
                engine_id=self._engine_id,
                num_chunks=self.num_chunks,
                rank=self.config.parallel.rank,
                kv_bytes_per_chunk=self.kv_bytes_per_chunk,
                cpu_page_size=self.cpu_page_size_per_worker,
            )
            self._worker = CpuWorker(kv_caches, region, self.blocks_per_chunk)
        return self._worker


class ChunksSwapped(LlmDatadistStoreTier):
    """Stores the chunks of a request under the keys of each other.

    If the tokens of a server that loads them were right, the comparison of tokens would prove nothing.
    """

    def submit_store(self, job_metadata: Any) -> None:
        job_metadata.chunk_ids = job_metadata.chunk_ids[::-1]
        super().submit_store(job_metadata)
