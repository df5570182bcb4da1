"""The interface of vLLM that the integration uses, and a check that the installed vLLM has it.

vLLM changes this interface between releases without notice. The check runs when vLLM loads the connector or the
offloading, so that a server with another interface does not start, instead of failing in the middle of a request.
"""

from __future__ import annotations

import inspect
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from llm_datadist.integrations.vllm.supported import TESTED, installed

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

__all__ = ["CONNECTOR", "OFFLOADING", "P2P", "STORE_TIER", "check", "needed"]

_CONNECTOR_BASE = "vllm.distributed.kv_transfer.kv_connector.v1.base"
_CONNECTOR_METRICS = "vllm.distributed.kv_transfer.kv_connector.v1.metrics"
_PARALLEL_STATE = "vllm.distributed.parallel_state"
_CONFIG = "vllm.config"
_KV_CACHE = "vllm.v1.kv_cache_interface"
_SCHEDULER_OUTPUT = "vllm.v1.core.sched.output"
_OFFLOADING_BASE = "vllm.v1.kv_offload.base"
_OFFLOADING_CONFIG = "vllm.v1.kv_offload.config"
_OFFLOADING_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"
_TIERING_BASE = "vllm.v1.kv_offload.tiering.base"
_P2P = "vllm.v1.kv_offload.tiering.p2p"

# What is called, with the parameters that are passed, and, in brackets, what is read of objects and modules. Public
# methods that vLLM calls need no table: `check` compares those of vLLM's class with those of ours. Nor do members that
# are read with a default. `test_each_use_of_vllm_is_in_the_table_of_its_module` finds uses that are missing here.
CONNECTOR: dict[str, Sequence[str]] = {
    f"{_CONFIG}:VllmConfig[]": (
        *("model_config", "parallel_config", "device_config", "compilation_config", "kv_transfer_config"),
        "speculative_config",
    ),
    f"{_CONFIG}:ModelConfig[]": ("model", "revision", "dtype", "use_mla", "enable_sleep_mode"),
    f"{_CONFIG}:ModelConfig.get_total_num_kv_heads": (),
    f"{_CONFIG}:ParallelConfig[]": (
        *("data_parallel_index", "pipeline_parallel_size"),
        *("decode_context_parallel_size", "prefill_context_parallel_size", "use_ubatching"),
    ),
    f"{_CONFIG}:DeviceConfig[]": ("device_type",),
    f"{_CONFIG}:CompilationConfig[]": ("static_forward_context",),
    f"{_CONFIG}:KVTransferConfig[]": (
        *("engine_id", "is_kv_producer", "is_kv_consumer", "kv_buffer_device", "kv_connector_extra_config"),
    ),
    f"{_CONNECTOR_BASE}:KVConnectorBase_V1.__init__": ("vllm_config", "role", "kv_cache_config"),
    f"{_CONNECTOR_BASE}:KVConnectorBase_V1[]": ("_kv_cache_config",),
    f"{_CONNECTOR_BASE}:KVConnectorBase_V1._get_connector_metadata": (),
    f"{_CONNECTOR_BASE}:KVConnectorRole[]": ("SCHEDULER",),
    f"{_CONNECTOR_BASE}:KVConnectorTransferResults": ("finished_sending", "finished_recving", "failed_recving"),
    f"{_CONNECTOR_METRICS}:KVConnectorStats": ("data",),
    f"{_CONNECTOR_METRICS}:KVConnectorStats[]": ("data",),
    f"{_CONNECTOR_METRICS}:KVConnectorPromMetrics.__init__": (
        *("vllm_config", "metric_types", "labelnames", "per_engine_labelvalues"),
    ),
    f"{_CONNECTOR_METRICS}:KVConnectorPromMetrics[]": (*("_histogram_cls", "_counter_cls", "per_engine_labelvalues"),),
    f"{_PARALLEL_STATE}:get_pp_group": (),
    f"{_PARALLEL_STATE}:get_tp_group": (),
    f"{_PARALLEL_STATE}:GroupCoordinator[]": ("rank_in_group", "world_size"),
    "vllm.lora.request:LoRARequest[]": ("lora_name",),
    "vllm.model_executor.layers.attention_layer_base:AttentionLayerBase.get_attn_backend": (),
    "vllm.utils.network_utils:get_ip": (),
    "vllm.v1.attention.backend:AttentionBackend.get_name": (),
    "vllm.v1.metrics.utils:create_metric_per_engine": ("metric", "per_engine_labelvalues"),
    f"{_KV_CACHE}:KVCacheConfig.select_transfer_block_ids": ("block_ids",),
    f"{_KV_CACHE}:KVCacheConfig[]": (
        *("num_blocks", "kv_cache_tensors", "kv_cache_groups", "transfer_groups", "transfer_group_ids"),
    ),
    f"{_KV_CACHE}:KVCacheGroupSpec[]": ("layer_names", "kv_cache_spec"),
    f"{_KV_CACHE}:AttentionSpec[]": ("block_size", "num_kv_heads", "page_size_bytes", "dtype"),
    f"{_KV_CACHE}:KVCacheTensor[]": ("size", "layers", "layer_stride", "block_stride", "offset"),
    f"{_SCHEDULER_OUTPUT}:SchedulerOutput[]": (
        *("scheduled_new_reqs", "scheduled_cached_reqs", "num_scheduled_tokens", "preempted_req_ids"),
        "has_sync_kv_loads",
    ),
    f"{_SCHEDULER_OUTPUT}:NewRequestData[]": ("req_id", "block_ids", "num_computed_tokens"),
    f"{_SCHEDULER_OUTPUT}:CachedRequestData[]": (
        *("req_ids", "resumed_req_ids", "new_block_ids", "num_computed_tokens"),
    ),
    "vllm.v1.core.kv_cache_manager:KVCacheBlocks[]": ("blocks",),
    "vllm.v1.core.kv_cache_utils:KVCacheBlock[]": ("block_id", "block_hash", "is_null"),
    "vllm.v1.metrics.cache_hit_source:CacheHitSource[]": ("P2P",),
    "vllm.v1.outputs:KVConnectorOutput[]": (
        *("finished_sending", "finished_recving", "kv_connector_worker_meta", "invalid_block_ids"),
    ),
    "vllm.v1.request:Request[]": (
        *("request_id", "status", "num_prompt_tokens", "prompt_token_ids", "kv_transfer_params", "lora_request"),
        "num_computed_tokens",
    ),
    "vllm.v1.request:RequestStatus[]": ("FINISHED_LENGTH_CAPPED", "FINISHED_STOPPED"),
}
OFFLOADING: dict[str, Sequence[str]] = {
    "vllm.v1.kv_offload.cpu.spec:CPUOffloadingSpec.__init__": ("config",),
    "vllm.v1.kv_offload.cpu.spec:CPUOffloadingSpec[]": ("num_chunks",),
    f"{_OFFLOADING_BASE}:OffloadingSpec[]": ("extra_config", "blocks_per_chunk"),
    f"{_OFFLOADING_BASE}:TransferResult": ("job_id", "success", "transfer_size", "transfer_time"),
    f"{_OFFLOADING_BASE}:BlockIDsLoadStoreSpec[]": ("block_ids",),
    f"{_OFFLOADING_BASE}:GPULoadStoreSpec[]": ("group_sizes", "block_indices"),
    f"{_OFFLOADING_BASE}:CanonicalKVCaches[]": ("tensors", "group_data_refs"),
    f"{_OFFLOADING_BASE}:CanonicalKVCacheTensor[]": ("tensor",),
    f"{_OFFLOADING_BASE}:CanonicalKVCacheRef[]": ("tensor_idx",),
}
P2P: dict[str, Sequence[str]] = {
    "vllm.envs:[]": ("VLLM_P2P_SIDE_CHANNEL_HOST",),
    "vllm.utils.network_utils:get_ip": (),
    f"{_OFFLOADING_BASE}:OffloadingSpec[]": ("config",),
    f"{_OFFLOADING_BASE}:ReqContext[]": ("get_state",),
    f"{_OFFLOADING_CONFIG}:OffloadingConfig[]": ("parallel",),
    f"{_OFFLOADING_CONFIG}:OffloadingParallelConfig[]": ("data_parallel_index",),
    f"{_TIERING_BASE}:JobResult[]": ("job_id", "success"),
    f"{_TIERING_BASE}:TransferJob[]": ("job_id", "chunk_ids", "req_context"),
    f"{_P2P}.control:ZmqTransport[]": ("_zmq_ctx",),
    f"{_P2P}.data:DataTransport.__init__": ("view", "config_fields"),
    f"{_P2P}.data:DataTransport[]": ("num_blocks", "block_len"),
    f"{_P2P}.data:PollResult": ("done", "failed"),
    # The transport of the tier takes the place of this one.
    f"{_P2P}.manager:NixlTransport.__init__": ("agent_name", "view", "config_fields"),
    f"{_P2P}.manager:P2PSourceInfo[]": ("kv_request_id", "peer_id"),
    f"{_P2P}.manager:P2PSecondaryTierManager.__init__": (
        *("offloading_spec", "primary_kv_view", "tier_type", "host", "port"),
    ),
    f"{_P2P}.manager:P2PSecondaryTierManager.shutdown": (),
    # The override of this method checks the peers that requests name, so a vLLM without it would admit all of them.
    f"{_P2P}.manager:P2PSecondaryTierManager._get_or_create_session": ("peer_id",),
    f"{_P2P}.manager:P2PSecondaryTierManager[]": ("_control", "_data", "_failed_req_ids"),
}
STORE_TIER: dict[str, Sequence[str]] = {
    f"{_OFFLOADING_CONNECTOR}.canonical_mapping:canonical_format_id": ("kv_cache_layout",),
    f"{_OFFLOADING_CONNECTOR}.metrics:OffloadingConnectorStats": (),
    f"{_OFFLOADING_CONNECTOR}.metrics:OffloadingConnectorStats.increase_counter": (
        *("counter_name", "counter_increase_value", "labelvalues"),
    ),
    "vllm.v1.core.kv_cache_utils:get_none_hash_seed": (),
    f"{_OFFLOADING_BASE}:Locality[]": (),
    f"{_OFFLOADING_BASE}:LookupResult[]": ("HIT", "MISS"),
    f"{_OFFLOADING_BASE}:Medium[]": ("CPU",),
    f"{_OFFLOADING_BASE}:OffloadingCounterMetadata": ("documentation", "labelnames"),
    f"{_OFFLOADING_BASE}:OffloadingSpec[]": ("config",),
    # The keys of a request, so that lookups of one chunk at a time need few calls of the store.
    f"{_OFFLOADING_BASE}:ReqContext[]": ("req_id", "_offload_key_positions"),
    f"{_OFFLOADING_BASE}:RequestOffloadingContext": (),
    f"{_OFFLOADING_CONFIG}:OffloadingCacheConfig[]": ("tokens_per_hash", "blocks_per_chunk"),
    f"{_OFFLOADING_CONFIG}:OffloadingConfig[]": (
        *("groups", "model", "cache", "parallel", "kv_cache_layout", "canonical_layout", "replicated_layout"),
    ),
    f"{_OFFLOADING_CONFIG}:OffloadingGroupConfig[]": ("group_id", "tokens_per_block", "layer_names"),
    f"{_OFFLOADING_CONFIG}:OffloadingModelConfig[]": ("name", "dtype"),
    f"{_OFFLOADING_CONFIG}:OffloadingParallelConfig[]": (
        *("is_parallelism_agnostic", "world_size", "tp_size", "pp_size", "pcp_size", "dcp_size"),
    ),
    f"{_TIERING_BASE}:JobResult": ("job_id", "success", "successful_keys", "transfer_time"),
    f"{_TIERING_BASE}:SecondaryTierManager.__init__": (
        *("offloading_spec", "primary_kv_view", "tier_type", "backpressure_detector"),
    ),
    f"{_TIERING_BASE}:SecondaryTierManager[]": ("block_size_bytes",),
    f"{_TIERING_BASE}:TransferJob[]": ("job_id", "chunk_ids", "req_context"),
}


@contextmanager
def needed() -> Iterator[None]:
    """Turn an ``ImportError`` inside the block, which imports from vLLM, into the refusal of this version.

    Raises:
        RuntimeError: vLLM lacks what is imported.
    """
    try:
        yield
    except ImportError as error:
        raise _refusal(str(error)) from error


def check(uses: Mapping[str, Sequence[str]], *classes: type) -> None:
    """Compare the interface of the installed vLLM with what the integration uses.

    Args:
        uses: a table of this module.
        *classes: classes of ours that extend classes of vLLM. Their public methods override methods of vLLM.

    Raises:
        RuntimeError: something is missing, or a method has other parameters. The text names it, and the version.
    """
    for name, names in uses.items():
        _check_use(name, names)
    for ours in classes:
        for abstract in sorted(getattr(ours, "__abstractmethods__", ())):
            raise _refusal(f"{ours.__name__} lacks {abstract}, which vLLM requires")
        for method in vars(ours):
            if not method.startswith("_") and inspect.isroutine(getattr(ours, method)):
                _check_override(ours, method)


def _check_use(name: str, names: Sequence[str]) -> None:
    module, _, path = name.partition(":")
    found: Any = None
    with needed():
        found = import_module(module)
    for part in filter(None, path.rstrip("[]").split(".")):
        if not hasattr(found, part):
            raise _refusal(f"{module} has no {path.rstrip('[]')}")
        found = getattr(found, part)
    if path.endswith("[]"):
        missing = set(names) - _members(found)
        if missing:
            raise _refusal(f"{name.rstrip('[]:')} has no {', '.join(sorted(missing))}")
        return
    theirs = _parameters(found)
    others = [one for one in theirs[len(names) :] if one.default is one.empty and one.kind < one.VAR_KEYWORD]
    if [one.name for one in theirs[: len(names)]] != list(names) or any(
        one.kind != one.VAR_POSITIONAL for one in others
    ):
        raise _refusal(f"{module}:{path} has the parameters {_shown(theirs)}; expected: {_shown(names)}")


def _check_override(ours: type, method: str) -> None:
    base = next((one for one in ours.__mro__[1:] if method in vars(one)), None)
    if base is None:
        of = ", ".join(one.__name__ for one in ours.__bases__)
        raise _refusal(f"{of} has no {method}")
    theirs = _parameters(getattr(base, method))
    mine = _parameters(getattr(ours, method))
    # What vLLM may pass must have a place, in the same order, and nothing else may be required.
    fits = [(one.name, one.kind) for one in theirs] == [(one.name, one.kind) for one in mine[: len(theirs)]]
    if not fits or any(one.default is one.empty for one in mine[len(theirs) :]):
        raise _refusal(f"{base.__name__}.{method} has the parameters {_shown(theirs)}; expected: {_shown(mine)}")


def _parameters(function: Any) -> list[inspect.Parameter]:
    return [one for one in inspect.signature(function).parameters.values() if one.name not in {"self", "cls"}]


def _members(of: Any) -> set[str]:
    """Return the attributes of a module, or of a class, of its instances, and those that its constructors set."""
    found = set(dir(of))
    for one in getattr(of, "__mro__", ()):
        found.update(getattr(one, "__annotations__", ()))
        code = getattr(vars(one).get("__init__"), "__code__", None)
        found.update(() if code is None else code.co_names)
    return found


def _shown(parameters: Sequence[Any]) -> str:
    return (
        f"({', '.join(one if isinstance(one, str) else str(one.replace(annotation=one.empty)) for one in parameters)})"
    )


def _refusal(what: str) -> RuntimeError:
    tested = ", ".join(TESTED)
    return RuntimeError(f"llm_datadist does not work with vLLM {installed()} (tested: {tested}): {what}")
