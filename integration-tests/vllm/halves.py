"""The scheduler's and the worker's half of a connector in one process, driven as vLLM does, without a model."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch
from vllm import EngineArgs, SamplingParams
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.distributed.parallel_state import ensure_model_parallel_initialized, init_distributed_environment
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, KVCacheTensor
from vllm.v1.outputs import KVConnectorOutput
from vllm.v1.request import Request, RequestStatus

if TYPE_CHECKING:
    from pathlib import Path

BLOCKS = 8
BLOCK_SIZE = 32
LAYERS = [f"model.layers.{index}.self_attn.attn" for index in range(4)]
SPEC = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=2, head_size=64, dtype=torch.float32)
PAGE = SPEC.page_size_bytes
PROMPT = list(range(3, 103))


def configuration(model: str) -> Any:
    """Return vLLM's configuration for a model, without a connector."""
    arguments = {"dtype": "float32", "block_size": BLOCK_SIZE, "max_model_len": 4096, "enforce_eager": True}
    return EngineArgs(model=model, **arguments).create_engine_config()


def become_the_only_rank(store: Path) -> None:
    """Make this process the only rank of vLLM. ``store`` is a file that does not exist. vLLM's configuration is set."""
    init_distributed_environment(1, 0, f"file://{store}", 0, "gloo")
    ensure_model_parallel_initialized(1, 1)


def kv_cache(*groups: KVCacheGroupSpec) -> KVCacheConfig:
    """Return the description of a KV cache: one group with all layers, or the given ones."""
    stride = PAGE * BLOCKS
    tensor = KVCacheTensor(size=stride * len(LAYERS), layers=LAYERS, layer_stride=stride, block_stride=PAGE)
    return KVCacheConfig(BLOCKS, [tensor], list(groups or (KVCacheGroupSpec(LAYERS, SPEC),)))


def request(name: str, params: dict[str, Any] | None, tokens: list[int] = PROMPT) -> Request:
    """Return a request of vLLM."""
    sampling = SamplingParams(max_tokens=1, extra_args={"kv_transfer_params": params})
    return Request(name, tokens, sampling, None)


def blocks(*numbers: int) -> Any:
    """Return the allocated blocks of a request with one KV cache group."""
    return SimpleNamespace(
        blocks=([SimpleNamespace(block_id=number, is_null=False, block_hash=None) for number in numbers],),
    )


class Halves:
    """The two halves of the connector of one vLLM.

    Args:
        config: vLLM's configuration (``configuration``).
        transfer: the ``KVTransferConfig``.
        groups: the KV cache groups; one by default.
    """

    def __init__(self, config: Any, transfer: dict[str, Any], *groups: KVCacheGroupSpec) -> None:
        given = KVTransferConfig(**transfer)
        self.config = replace(config, kv_transfer_config=given)
        connector = KVConnectorFactory.get_connector_class(given)
        self.scheduler = connector(self.config, KVConnectorRole.SCHEDULER, kv_cache(*groups))
        self.worker = connector(self.config, KVConnectorRole.WORKER, kv_cache(*groups))
        self.metadata: Any = None  # of the last step

    def start(self) -> Halves:
        """Allocate and register the KV cache, and pass on the handshake metadata, as vLLM does."""
        with self.worker.get_mem_pool_context():
            memory = torch.zeros(PAGE * BLOCKS * len(LAYERS), dtype=torch.int8)
        pages = memory.view(len(LAYERS), BLOCKS, PAGE)
        self.worker.register_kv_caches(dict(zip(LAYERS, pages)))
        self.scheduler.set_xfer_handshake_metadata_pp_aware({(0, 0): self.worker.get_handshake_metadata()})
        return self

    def step(self, scheduled: Any = None) -> KVConnectorOutput:
        """Run a step, and return what the scheduler gets.

        ``scheduled`` is the ``SchedulerOutput``. Without it, nothing is computed, and no layer is saved.
        """
        self.metadata = self.scheduler.build_connector_meta(scheduled or SchedulerOutput.make_empty())
        self.worker.handle_preemptions(self.metadata)
        self.worker.bind_connector_metadata(self.metadata)
        self.worker.start_load_kv(None)
        for layer in LAYERS if scheduled is not None else ():
            self.worker.save_kv_layer(layer, None, None)
        self.worker.wait_for_save()
        results = self.worker.get_transfer_results(set())
        output = KVConnectorOutput(
            finished_sending=results.finished_sending,
            finished_recving=results.finished_recving,
            failed_recving=results.failed_recving,
            kv_connector_stats=self.worker.get_kv_connector_stats(),
            kv_connector_worker_meta=self.worker.build_connector_worker_meta(),
        )
        self.worker.clear_connector_metadata()
        self.scheduler.update_connector_output(output)
        return output

    def finish(self, name: str, given: Any = ([1, 2, 3, 4],), tokens: list[int] = PROMPT) -> dict[str, Any]:
        """Have a request finish that decode continues. Return its response."""
        asked = request(name, {"do_remote_decode": True}, tokens)
        self.scheduler.on_new_request(asked)
        asked.status, asked.num_computed_tokens = RequestStatus.FINISHED_LENGTH_CAPPED, len(tokens)
        kept, params = self.scheduler.request_finished_all_groups(asked, given)
        assert kept
        return params

    def close(self) -> None:
        """Close the engines."""
        self.worker.shutdown()
        self.scheduler.shutdown()
