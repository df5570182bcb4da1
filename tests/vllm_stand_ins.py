"""Stand-ins for the classes of vLLM that `store_tier` uses, with vLLM's signatures."""

from __future__ import annotations

from collections import namedtuple
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING, Any

from stand_ins import put

if TYPE_CHECKING:
    import pytest

_CONNECTOR = "vllm.distributed.kv_transfer.kv_connector.v1.offloading"

Locality = Enum("Locality", {"LOCAL": "LOCAL", "REMOTE": "REMOTE"})
LookupResult = Enum("LookupResult", "MISS HIT HIT_PENDING RETRY")
Medium = Enum("Medium", {"CPU": "CPU", "STORAGE": "STORAGE"})
Model = namedtuple("Model", "name dtype")  # noqa: PYI024 - stand-ins
Cache = namedtuple("Cache", "tokens_per_hash blocks_per_chunk")  # noqa: PYI024
Group = namedtuple("Group", "tokens_per_block layer_names group_id")  # noqa: PYI024
Parallel = namedtuple("Parallel", "world_size tp_size pp_size pcp_size dcp_size is_parallelism_agnostic")  # noqa: PYI024
Config = namedtuple(  # noqa: PYI024
    "Config", "groups model cache parallel kv_cache_layout canonical_layout replicated_layout"
)
Spec = namedtuple("Spec", "config")  # noqa: PYI024
TransferJob = namedtuple("TransferJob", "job_id keys chunk_ids is_promotion req_context")  # noqa: PYI024


@dataclass
class JobResult:
    job_id: int
    success: bool
    successful_keys: Any = None
    transfer_time: float | None = None


@dataclass
class RequestOffloadingContext:
    policy: str = "chunk_level"


@dataclass
class Context:
    """vLLM's `ReqContext`."""

    req_id: str
    _offload_key_positions: dict[bytes, int] = field(default_factory=dict)

    def get_offload_key_position(self, key: bytes) -> int | None:
        return self._offload_key_positions.get(key)


class CounterMetadata:
    """vLLM's `OffloadingCounterMetadata`."""

    def __init__(self, documentation: str, labelnames: tuple[str, ...] = ()) -> None:
        self.documentation, self.labelnames = documentation, labelnames


class Stats:
    """vLLM's `OffloadingConnectorStats`."""

    def __init__(self, data: Any = None) -> None:
        self.counters: dict[tuple[str, tuple[str, ...]], float] = data or {}

    def increase_counter(
        self, counter_name: str, counter_increase_value: float = 1, labelvalues: tuple[str, ...] = ()
    ) -> None:
        key = (counter_name, labelvalues)
        self.counters[key] = self.counters.get(key, 0) + counter_increase_value


class SecondaryTierManager:
    medium: Any = None
    cache_hit_source: Any = None
    locality: Any = None

    def __init__(
        self, offloading_spec: Any, primary_kv_view: memoryview, tier_type: str, backpressure_detector: Any = None
    ) -> None:
        assert primary_kv_view.strides is not None
        self._offloading_spec, self._primary_kv_view = offloading_spec, primary_kv_view
        self._block_size_bytes = primary_kv_view.strides[0]
        self.tier_type, self.bp_detector = tier_type, backpressure_detector
        self.locality = None

    @property
    def block_size_bytes(self) -> int:
        return self._block_size_bytes

    def lookup(self, key: bytes, req_context: Any) -> Any: ...

    def submit_store(self, job_metadata: Any) -> None: ...

    def submit_load(self, job_metadata: Any) -> None: ...

    def get_finished_jobs(self) -> Any: ...

    def on_new_request(self, req_context: Any) -> Any: ...

    def on_request_finished(self, req_context: Any) -> None: ...

    def on_schedule_end(self, context: Any) -> None: ...

    def drain_jobs(self) -> None: ...

    def shutdown(self) -> None: ...

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, Any]: ...  # type: ignore[empty-body]

    def get_stats(self) -> Any: ...


class Seed:
    """The seed of vLLM's block hashes, which it chooses after it has made its tiers."""

    value = "vllm-none-hash"

    def get(self) -> str:
        return self.value


def install(monkeypatch: pytest.MonkeyPatch) -> Seed:
    """Put the stand-ins in the place of vLLM."""
    seed = Seed()

    def canonical_format_id(kv_cache_layout: str) -> str:
        return f"v1-{kv_cache_layout.lower()}"

    def get_none_hash_seed() -> str:
        return seed.get()

    modules: dict[str, dict[str, Any]] = {
        "vllm": {},
        f"{_CONNECTOR}.canonical_mapping": {"canonical_format_id": canonical_format_id},
        f"{_CONNECTOR}.metrics": {"OffloadingConnectorStats": Stats},
        "vllm.v1.core.kv_cache_utils": {"get_none_hash_seed": get_none_hash_seed},
        "vllm.v1.kv_offload.base": {
            "Locality": Locality,
            "LookupResult": LookupResult,
            "Medium": Medium,
            "OffloadingCounterMetadata": CounterMetadata,
            "OffloadingSpec": Spec,
            "ReqContext": Context,
            "RequestOffloadingContext": RequestOffloadingContext,
        },
        "vllm.v1.kv_offload.config": {
            "OffloadingCacheConfig": Cache,
            "OffloadingConfig": Config,
            "OffloadingGroupConfig": Group,
            "OffloadingModelConfig": Model,
            "OffloadingParallelConfig": Parallel,
        },
        "vllm.v1.kv_offload.tiering.base": {
            "JobResult": JobResult,
            "SecondaryTierManager": SecondaryTierManager,
            "TransferJob": TransferJob,
        },
    }
    put(monkeypatch, modules)
    monkeypatch.setattr("llm_datadist.integrations.vllm.supported.installed", lambda: "0.32.0")
    return seed
