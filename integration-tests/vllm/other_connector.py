"""A connector for tests of `MultiConnector`, which is as strict as vLLM's own connectors about what is not its own.

It hands over nothing. Like NIXL's connector, it has handshake metadata of its own type, returns the flags
`do_remote_prefill` and `do_remote_decode`, and clears them in requests that it loads.
"""
# ruff: noqa: ARG002 - the signatures are vLLM's

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)


@dataclass
class Handshake(KVConnectorHandshakeMetadata):
    port: int


@dataclass
class Work(KVConnectorMetadata):
    finished: list[str]


@dataclass
class Report(KVConnectorWorkerMetadata):
    count: int

    def aggregate(self, other: Report) -> Report:
        return Report(self.count + other.count)


class OtherConnector(KVConnectorBase_V1, SupportsHMA):
    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self.handshake: Any = None
        self.reports = 0
        self.loads: list[tuple[str, int]] = []
        self._finished: list[str] = []
        self._sent: set[str] = set()

    def get_handshake_metadata(self) -> Handshake:
        return Handshake(5)

    def set_xfer_handshake_metadata(self, metadata: dict[int, KVConnectorHandshakeMetadata]) -> None:
        if not all(isinstance(one, Handshake) for one in metadata.values()):
            raise ValueError(f"expected the handshake metadata of this connector, got {metadata}")
        self.handshake = metadata

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        wanted = (request.kv_transfer_params or {}).get("do_remote_prefill")
        return (request.num_prompt_tokens - num_computed_tokens, True) if wanted else (0, False)

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        params = request.kv_transfer_params or {}
        if params.get("do_remote_prefill"):
            self.loads.append((request.request_id, num_external_tokens))
            params["do_remote_prefill"] = False

    def build_connector_meta(self, scheduler_output: Any) -> Work:
        finished, self._finished = self._finished, []
        return Work(finished)

    def update_connector_output(self, connector_output: Any) -> None:
        report = connector_output.kv_connector_worker_meta
        self.reports += report.count if report is not None else 0

    def request_finished(self, request: Any, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        return self.request_finished_all_groups(request, (block_ids,))

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        if not (request.kv_transfer_params or {}).get("do_remote_decode"):
            return False, None
        self._finished.append(request.request_id)
        return True, {"do_remote_prefill": True, "do_remote_decode": False, "remote_block_ids": block_ids}

    def handle_preemptions(self, kv_connector_metadata: Work) -> None:
        assert isinstance(kv_connector_metadata, Work)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._sent.update(self._get_connector_metadata().finished)

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_transfer_results(self, finished_req_ids: set[str]) -> KVConnectorTransferResults:
        sent, self._sent = self._sent, set()
        return KVConnectorTransferResults(finished_sending=sent)

    def build_connector_worker_meta(self) -> Report:
        return Report(1)


class WithPool(OtherConnector):
    """It allocates vLLM's KV cache, like ours."""

    def get_mem_pool_context(self) -> Any:
        return nullcontext()
