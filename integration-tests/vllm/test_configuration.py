"""Configurations of the connector: what is refused, and what is left alone. Its two halves run without a model."""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from halves import BLOCKS, LAYERS, PAGE, SPEC, Halves, blocks, kv_cache, request
from vllm.config import KVTransferConfig
from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory
from vllm.distributed.kv_transfer.kv_connector.v1.base import KVConnectorRole
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.kv_cache_interface import KVCacheGroupSpec
from vllm.v1.request import RequestStatus

from llm_datadist.integrations.vllm.step import Receive

if TYPE_CHECKING:
    from collections.abc import Iterator

pytestmark = pytest.mark.subset

SINGLE = {"kv_connector": "LlmDatadistConnector", "kv_role": "kv_both", "engine_id": "single"}


def test_groups_that_may_not_be_transferred_are_left_alone(parallel_state: Any) -> None:
    """The blocks of the second of three KV cache groups are rebuilt by vLLM."""
    names = [LAYERS[:2], LAYERS[2:3], LAYERS[3:]]
    groups = [KVCacheGroupSpec(layers, SPEC, enable_kv_transfer=layers != LAYERS[2:3]) for layers in names]
    single = Halves(parallel_state, SINGLE, *groups)
    scheduler, worker = single.scheduler, single.worker
    pages = torch.zeros(len(LAYERS), BLOCKS, PAGE, dtype=torch.int8)
    worker.register_kv_caches(dict(zip(LAYERS, pages)))
    assert [caches.form.layers for caches in worker._worker.groups] == [2, 1]
    asked = request("r", {"do_remote_decode": True})
    scheduler.on_new_request(asked)
    asked.status, asked.num_computed_tokens = RequestStatus.FINISHED_LENGTH_CAPPED, 100
    params = scheduler.request_finished_all_groups(asked, ([1, 2, 3, 4], [5, 5, 5, 5], [6, 7, 1, 2]))[1]
    step = scheduler.build_connector_meta(SchedulerOutput.make_empty()).step
    assert [part.blocks for part in step.parts] == [[[1, 2, 3, 4], [6, 7, 1, 2]]]
    again = request("again", {**params, "llm_datadist": {**params["llm_datadist"], "addresses": ["127.0.0.1:1"]}})
    scheduler.on_new_request(again)
    assert scheduler.get_loaded_kv_cache_group_ids(again) == (0, 2)
    group = blocks(1, 2, 3, 4).blocks[0]
    scheduler.update_state_after_alloc(again, SimpleNamespace(blocks=(group, group, group[::-1])), 100)
    step = scheduler.build_connector_meta(SchedulerOutput.make_empty()).step
    assert step.receives == [Receive("again", [[1, 2, 3, 4], [4, 3, 2, 1]], 0, 100)]
    worker.shutdown()


UNSUPPORTED = {
    "decode_context_parallel_size=2": ("parallel_config", "decode_context_parallel_size", 2),
    "prefill_context_parallel_size=2": ("parallel_config", "prefill_context_parallel_size", 2),
    "enable_sleep_mode=True": ("model_config", "enable_sleep_mode", True),
}


@pytest.mark.parametrize("role", [KVConnectorRole.SCHEDULER, KVConnectorRole.WORKER])
@pytest.mark.parametrize("what", UNSUPPORTED)
def test_what_is_not_supported_is_refused(parallel_state: Any, what: str, role: KVConnectorRole) -> None:
    """At the start, with its name."""
    transfer = KVTransferConfig(**SINGLE)
    config = replace(parallel_state, kv_transfer_config=transfer)
    part, name, value = UNSUPPORTED[what]
    changed = copy.copy(getattr(config, part))
    setattr(changed, name, value)
    setattr(config, part, changed)
    with pytest.raises(RuntimeError, match=f"LlmDatadistConnector does not support .*{what}"):
        KVConnectorFactory.get_connector_class(transfer)(config, role, kv_cache())


@pytest.fixture
def host_buffers(parallel_state: Any, request: pytest.FixtureRequest) -> Iterator[Halves]:
    extra = {"host_buffers": True}
    made = Halves(parallel_state, {**SINGLE, "kv_buffer_device": request.param, "kv_connector_extra_config": extra})
    yield made
    made.close()


@pytest.mark.parametrize("host_buffers", ["cpu", "cuda"], indirect=True)
def test_the_device_of_the_buffers_is_host_memory(host_buffers: Halves, caplog: pytest.LogCaptureFixture) -> None:
    """Another one is not refused, because it is the default of vLLM. The log says that it is not used."""
    pages = torch.zeros(len(LAYERS), BLOCKS, PAGE, dtype=torch.int8).view(torch.float32)
    shape = (BLOCKS, SPEC.num_kv_heads, SPEC.block_size, 2 * SPEC.head_size)
    with caplog.at_level("WARNING", logger="vllm.llm_datadist"):
        host_buffers.worker.register_kv_caches(dict(zip(LAYERS, (layer.view(shape) for layer in pages))))
    given = host_buffers.config.kv_transfer_config.kv_buffer_device
    warned = [record.getMessage() for record in caplog.records if "kv_buffer_device" in record.getMessage()]
    expected = (
        f"kv_buffer_device is {given!r}, but llm_datadist reaches host memory only, so the KV cache goes through it"
    )
    assert warned == ([] if given == "cpu" else [expected])
