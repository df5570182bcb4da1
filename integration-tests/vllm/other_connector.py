"""A connector for tests of `MultiConnector`, which is as strict as vLLM's own connectors about what is not its own.

It hands over nothing. Like NIXL's connector, it has handshake metadata of its own type, returns the flags
`do_remote_prefill` and `do_remote_decode`, and clears them in requests that it loads.
"""
# ruff: noqa: ARG002 - the signatures are vLLM's

from __future__ import annotations

import os
import time
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from vllm.distributed.kv_transfer.kv_connector.v1.base import (
    KVConnectorBase_V1,
    KVConnectorHandshakeMetadata,
    KVConnectorMetadata,
    KVConnectorTransferResults,
    KVConnectorWorkerMetadata,
    SupportsHMA,
)

from llm_datadist.integrations.vllm.device_copies import page_rows


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


@dataclass
class Loads(KVConnectorMetadata):
    blocks: list[int]


class FailsWithinStep(KVConnectorBase_V1, SupportsHMA):
    """It loads the first blocks of each long prompt within the step that needs them, and fails.

    It writes other bytes to the blocks, and reports a moment after the step that they are invalid, so that decode has
    the time to read them. The file ``MARK`` gets a line for each failure.
    """

    BLOCKS = 2

    def __init__(self, vllm_config: Any, role: Any, kv_cache_config: Any) -> None:
        super().__init__(vllm_config, role, kv_cache_config)
        self._tokens = self.BLOCKS * vllm_config.cache_config.block_size
        self._seen: set[str] = set()
        self._blocks: list[int] = []
        self._invalid: set[int] = set()
        self._rows: list[Any] = []
        self._config = kv_cache_config

    def get_num_new_matched_tokens(self, request: Any, num_computed_tokens: int) -> tuple[int, bool]:
        wanted = not num_computed_tokens and request.num_prompt_tokens > self._tokens
        return (self._tokens if wanted and request.request_id not in self._seen else 0), False

    def update_state_after_alloc(self, request: Any, blocks: Any, num_external_tokens: int) -> None:
        self._seen.add(request.request_id)
        if num_external_tokens:
            self._blocks += [block.block_id for block in blocks.blocks[0][: self.BLOCKS]]

    def build_connector_meta(self, scheduler_output: Any) -> Loads:
        loads, self._blocks = Loads(self._blocks), []
        return loads

    def request_finished_all_groups(self, request: Any, block_ids: Any) -> tuple[bool, dict[str, Any] | None]:
        return False, None

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        page_bytes = self._config.kv_cache_groups[0].kv_cache_spec.page_size_bytes
        self._rows = [page_rows(layer, self._config.num_blocks, page_bytes) for layer in kv_caches.values()]

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        self._invalid.update(self._get_connector_metadata().blocks)
        for block in self._invalid:
            for rows in self._rows:
                rows[block] = 0x40404040_40404040

    def wait_for_layer_load(self, layer_name: str) -> None:
        pass

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        pass

    def wait_for_save(self) -> None:
        pass

    def get_block_ids_with_load_errors(self) -> set[int]:
        invalid, self._invalid = self._invalid, set()
        if invalid:
            time.sleep(0.2)
            with Path(os.environ["MARK"]).open("a") as mark:
                mark.write(f"{len(invalid)}\n")
        return invalid
