"""``LlmDatadistConnector``: prefill and decode of vLLM in separate processes.

vLLM makes one object in the scheduler and one in each worker. This class only passes calls on to the two halves.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llm_datadist.integrations.vllm import interface, supported
from llm_datadist.integrations.vllm.addresses import allowed_peers
from llm_datadist.integrations.vllm.prompts import lent_while_computed
from llm_datadist.integrations.vllm.ranks import unique_id
from llm_datadist.integrations.vllm.scheduler import SchedulerSide
from llm_datadist.integrations.vllm.settings import Settings
from llm_datadist.integrations.vllm.worker import WorkerSide

with interface.needed():
    from vllm.distributed.kv_transfer.kv_connector.v1.base import (
        KVConnectorBase_V1,
        KVConnectorMetadata,
        KVConnectorRole,
        KVConnectorTransferResults,
        KVConnectorWorkerMetadata,
        SupportsHMA,
    )
    from vllm.distributed.parallel_state import get_pp_group, get_tp_group
    from vllm.platforms import current_platform
    from vllm.utils.network_utils import get_ip
    from vllm.v1.metrics.cache_hit_source import CacheHitSource
    from vllm.v1.request import RequestStatus

    from llm_datadist.integrations.vllm.metrics import PrometheusMetrics, TransferStats

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llm_datadist.integrations.vllm.step import Step
    from llm_datadist.integrations.vllm.transfer_thread import TransferThread

__all__ = ["Addresses", "LlmDatadistConnector", "StepMetadata"]

_PLATFORM_COPIES = ("insert_blocks_to_device", "swap_out_blocks_to_host")
_COMPLETE = (RequestStatus.FINISHED_LENGTH_CAPPED, RequestStatus.FINISHED_STOPPED)


@dataclass
class StepMetadata(KVConnectorMetadata):  # type: ignore[misc]
    """From the scheduler to the workers: the work of one step."""

    step: Step


@dataclass
class Addresses(KVConnectorWorkerMetadata):  # type: ignore[misc]
    """From the workers to the scheduler: where peers reach their engines, ``ip:port`` by the number of the worker.

    vLLM's handshake metadata would be simpler, but ``MultiConnector`` gives all connectors those of only one.
    """

    by_worker: dict[int, str]

    def aggregate(self, other: Addresses) -> Addresses:
        """Return the addresses of both."""
        return Addresses({**self.by_worker, **other.by_worker})


class LlmDatadistConnector(KVConnectorBase_V1, SupportsHMA):  # type: ignore[misc]
    """A KV connector in which decode pulls the blocks of a request from prefill.

    The methods are those of vLLM's ``KVConnectorBase_V1``, which documents when each is called, and for which role.

    Args:
        vllm_config: vLLM's configuration.
        role: whether this object belongs to the scheduler or to a worker.
        kv_cache_config: vLLM's description of its KV cache.

    Raises:
        RuntimeError: a configuration that is not supported.
        ValueError: an invalid option.
    """

    _cache_hit_source = CacheHitSource.P2P  # for vLLM's metrics
    _scheduler: SchedulerSide  # only in the scheduler
    _worker: WorkerSide  # only in a worker

    def __init__(self, vllm_config: Any, role: KVConnectorRole, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        transfer = vllm_config.kv_transfer_config
        settings = Settings.parse(transfer.kv_connector_extra_config)
        _check_supported(vllm_config)
        parallel = vllm_config.parallel_config
        if not kv_cache_config.transfer_groups:
            raise RuntimeError("vLLM has no KV cache group that may be transferred")
        engine_id = unique_id(transfer.engine_id, parallel.data_parallel_index)
        self._transfers: TransferThread | None = None
        if role == KVConnectorRole.SCHEDULER:
            supported.warn_untested(supported.installed())
            specs = [group.kv_cache_spec for group in kv_cache_config.kv_cache_groups]
            sizes = [group.kv_cache_spec.block_size for group in kv_cache_config.transfer_groups]
            options = {"producer": transfer.is_kv_producer, "consumer": transfer.is_kv_consumer}
            layerwise = settings.layerwise and lent_while_computed(vllm_config, specs)
            copied = settings.host_buffers or vllm_config.device_config.device_type != "cpu"
            options |= {"layerwise": layerwise, "copied": copied, "stages": parallel.pipeline_parallel_size}
            self._scheduler = SchedulerSide(engine_id, sizes, allowed_peers(settings, get_ip), **options)
        else:
            tensor, pipeline = ((group.rank_in_group, group.world_size) for group in (get_tp_group(), get_pp_group()))
            self._worker = WorkerSide(
                vllm_config, kv_cache_config, settings, engine_id, get_ip, tensor=tensor, pipeline=pipeline
            )
            self._reported = False  # whether the scheduler has the address of this worker

    # ---- The scheduler.

    def on_new_request(self, request: Any) -> None:
        """Take a request that was added."""
        self._scheduler.arrived(request)

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        """Return how many tokens of the prompt come from prefill, and that they are loaded between steps."""
        count = self._scheduler.tokens_to_load(request, num_computed_tokens)
        return count, count > 0

    def get_loaded_kv_cache_group_ids(self, request: Any) -> tuple[int, ...]:  # noqa: ARG002 - the signature is vLLM's
        """Return the KV cache groups whose blocks are received: all that vLLM allows, also with a sliding window."""
        return tuple(self._kv_cache_config.transfer_group_ids)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        """Take the blocks of a request that is received."""
        self._scheduler.allocated(request, self._transferred(blocks.blocks), num_external_tokens)

    def build_connector_meta(self, scheduler_output: Any) -> StepMetadata:
        """Return the work of this step."""
        return StepMetadata(self._scheduler.take_step(scheduler_output))

    def update_connector_output(self, connector_output: Any) -> None:
        """Take the addresses of the workers, the requests that all have sent or received, and blocks not loaded."""
        if isinstance(connector_output.kv_connector_worker_meta, Addresses):
            self._scheduler.set_addresses(connector_output.kv_connector_worker_meta.by_worker)
        self._scheduler.freed(connector_output.finished_sending or set())
        self._scheduler.received(connector_output.finished_recving or set())
        self._scheduler.invalid(connector_output.invalid_block_ids)

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """Decide whether the blocks of a request are kept for decode, and what prefill returns."""
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(
        self, request: Any, block_ids: tuple[list[int], ...]
    ) -> tuple[bool, dict[str, Any] | None]:
        """Do the same for a model with several KV cache groups."""
        params = self._scheduler.finished(request, self._transferred(block_ids), request.status in _COMPLETE)
        return params is not None, params

    def _transferred(self, groups: Sequence[Any]) -> list[Any]:
        """Return what ``groups`` has of the KV cache groups that may be transferred."""
        return [groups[group] for group in self._kv_cache_config.transfer_group_ids]

    # ---- A worker.

    def get_mem_pool_context(self) -> Any:
        """Return the context in which vLLM allocates its KV cache."""
        return self._worker.pool_memory()

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Register the KV cache with the engine."""
        self._transfers = self._worker.register(kv_caches)

    def set_host_xfer_buffer_ops(self, copy_operation: Callable[..., None]) -> None:
        """Take the function that copies blocks between host memory and device, if the platform has what it needs."""
        # vLLM hands over the same function on each platform. A platform that lacks what it needs logs a warning.
        if self._worker.has_host_buffers and all(
            callable(getattr(current_platform, name, None)) for name in _PLATFORM_COPIES
        ):
            self._worker.use_copy_blocks(copy_operation)

    def handle_preemptions(self, kv_connector_metadata: StepMetadata) -> None:
        """Revoke the grants of withdrawn requests, and lend the parts of this step, before the model runs."""
        self._of_transfers.begin(kv_connector_metadata.step)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:  # noqa: ARG002 - the signature is vLLM's
        """Keep finished requests, and start receives. vLLM calls this after the model."""
        self._of_transfers.submit(self._get_connector_metadata().step)

    def wait_for_layer_load(self, layer_name: str) -> None:
        """Do nothing: a request is scheduled only when all of its blocks are in place."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:  # noqa: ARG002
        """Note that a layer is computed. Decode reads it if it waits for a part of this step."""
        if self._transfers is not None:  # vLLM calls this for each layer, so it must be cheap
            self._transfers.layer_saved(layer_name)

    def wait_for_save(self) -> None:
        """Report the layers of this step to decode. This does not wait."""
        self._of_transfers.step_saved()

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:  # noqa: ARG002
        """Return the requests that were sent or received since the last step."""
        ended = self._of_transfers.take()
        return KVConnectorTransferResults(ended.sent, ended.received, ended.failed)

    def build_connector_worker_meta(self) -> Addresses | None:
        """Return where peers reach the engine of this worker, in the first step."""
        if self._reported:
            return None
        self._reported = True
        return Addresses({self._worker.number: self._worker.address})

    def get_kv_connector_stats(self) -> TransferStats | None:
        """Return the observations since the last step."""
        data = None if self._transfers is None else self._transfers.take_observations()
        return None if data is None else TransferStats(data)

    def shutdown(self) -> None:
        """Close the engine."""
        worker: WorkerSide | None = getattr(self, "_worker", None)
        if worker is not None:
            worker.close()

    # ---- The configuration of vLLM.

    @classmethod
    def get_required_kvcache_layout(cls, vllm_config: Any) -> str | None:
        """Ask for pages in which each head lies together, so that ranks can read the heads that they need."""
        model = vllm_config.model_config
        return None if model is None or model.use_mla else "LBHNC"

    @classmethod
    def requires_piecewise_for_cudagraph(cls, extra_config: dict[str, Any]) -> bool:
        """Return whether ``save_kv_layer`` must be called. A replay of a full CUDA graph would not call it."""
        return Settings.parse(extra_config).layerwise

    # ---- The process that logs.

    @classmethod
    def build_kv_connector_stats(cls, data: dict[str, Any] | None = None) -> TransferStats:
        """Return the observations that a worker has sent."""
        return TransferStats(data)

    @classmethod
    def build_prom_metrics(
        cls, vllm_config: Any, metric_types: Any, labelnames: Any, per_engine_labelvalues: Any
    ) -> PrometheusMetrics:
        """Return the metrics of this connector."""
        return PrometheusMetrics(vllm_config, metric_types, labelnames, per_engine_labelvalues)

    @property
    def _of_transfers(self) -> TransferThread:
        if self._transfers is None:
            raise RuntimeError("vLLM has not registered its KV cache")
        return self._transfers


def _check_supported(vllm_config: Any) -> None:
    parallel = vllm_config.parallel_config
    sizes = {
        "decode_context_parallel_size": parallel.decode_context_parallel_size,
        "prefill_context_parallel_size": parallel.prefill_context_parallel_size,
    }
    for name, size in sizes.items():
        if size != 1:
            raise RuntimeError(f"LlmDatadistConnector does not support {name}={size}")
    # vLLM takes the memory of the KV cache away, and a copy to host memory may still read the blocks of a request that
    # was aborted. 0.33 asks for a call that ends such copies (`unregister_kv_caches`), and 0.32 has none.
    if vllm_config.model_config.enable_sleep_mode:
        raise RuntimeError("LlmDatadistConnector does not support sleep mode (enable_sleep_mode=True)")


interface.check(interface.CONNECTOR, LlmDatadistConnector, Addresses, TransferStats, PrometheusMetrics)
