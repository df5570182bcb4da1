"""Our connector beside another one in vLLM's `MultiConnector`: its two halves in this process, without a model.

Not for: what is computed (`test_multi_servers.py`).
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import pytest
from halves import Halves, blocks, request
from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram
from vllm.distributed.kv_transfer.kv_connector.utils import KVOutputAggregator
from vllm.distributed.kv_transfer.kv_connector.v1.multi_connector import MultiConnector
from vllm.v1.metrics.cache_hit_source import CacheHitSource
from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput
from vllm.v1.request import RequestStatus

from llm_datadist.integrations.vllm.step import Cancel, Receive

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llm_datadist.integrations.vllm.step import Step

pytestmark = pytest.mark.subset

LEASE_MS = 300


class Vllm(Halves):
    """The scheduler and the worker of one vLLM, with our connector and another one."""

    def __init__(self, config: Any, ours_first: bool, other: str = "OtherConnector", **extra: Any) -> None:
        self.index = 0 if ours_first else 1
        ours = {"kv_connector": "LlmDatadistConnector", "kv_connector_extra_config": {"lease_ms": LEASE_MS, **extra}}
        another = {"kv_connector": other, "kv_connector_module_path": "other_connector"}
        children = [{"kv_role": "kv_both", **one} for one in ((ours, another) if ours_first else (another, ours))]
        transfer = {"kv_connector": "MultiConnector", "kv_role": "kv_both", "engine_id": "both"}
        super().__init__(config, {**transfer, "kv_connector_extra_config": {"connectors": children}})

    @property
    def halves(self) -> tuple[Any, Any]:
        """Our halves."""
        return self.scheduler._connectors[self.index], self.worker._connectors[self.index]

    @property
    def other(self) -> Any:
        return self.scheduler._connectors[1 - self.index]

    @property
    def work(self) -> Step:
        """Our work of the last step."""
        step: Step = self.metadata.metadata[self.index].step
        return step


@pytest.fixture(params=[True, False], ids=["ours first", "ours last"])
def vllm(parallel_state: Any, request: pytest.FixtureRequest) -> Iterator[Vllm]:
    made = Vllm(parallel_state, request.param)
    made.start()
    yield made
    made.close()


def test_each_connector_gets_its_own_metadata(vllm: Vllm) -> None:
    """`MultiConnector` gives all connectors the handshake metadata of one of them."""
    assert vllm.other.handshake[0].port == 5
    output = vllm.step()
    assert vllm.other.reports == 1
    assert output.kv_connector_worker_meta.metadata[vllm.index].by_worker == {0: vllm.halves[1]._worker.address}
    assert vllm.step().kv_connector_worker_meta.metadata[vllm.index] is None
    given = vllm.finish("r")["llm_datadist"]
    assert given["addresses"] == [vllm.halves[1]._worker.address]


def test_the_addresses_of_all_ranks_arrive(vllm: Vllm) -> None:
    """vLLM joins what the workers of one step report."""
    outputs = []
    for rank in (1, 0):
        half = vllm.halves[1]
        half._worker._shard = replace(half._worker._shard, rank=rank, ranks=2)
        half._reported = False
        meta = vllm.worker.build_connector_worker_meta()
        outputs.append(ModelRunnerOutput.with_kv_conn_output_only(KVConnectorOutput(kv_connector_worker_meta=meta)))
    joined = KVOutputAggregator(expected_finished_count=2).aggregate(outputs)
    vllm.scheduler.update_connector_output(joined.kv_connector_output)
    assert vllm.other.reports == 2
    assert vllm.finish("r")["llm_datadist"]["addresses"] == [vllm.halves[1]._worker.address] * 2


def test_the_response_has_the_parameters_of_both(vllm: Vllm) -> None:
    """The request may end in the first step, before the scheduler knows the addresses."""
    params = vllm.finish("r")
    vllm.step()
    assert set(params) == {"llm_datadist", "do_remote_prefill", "do_remote_decode", "remote_block_ids"}
    assert params["llm_datadist"]["addresses"] == [vllm.halves[1]._worker.address]


def test_blocks_are_kept_until_both_have_sent_them(vllm: Vllm) -> None:
    """The other connector has sent the request at once, and the lease of ours ends later."""
    vllm.finish("r")
    begun, sent = time.monotonic(), set()
    while not sent:
        sent = vllm.step().finished_sending
        assert time.monotonic() < begun + 30
    assert time.monotonic() >= begun + LEASE_MS / 1000
    assert sent == {"r"}
    assert vllm.step().finished_sending == set()
    # Its ticket is free, so the same request can be handed over again.
    assert "llm_datadist" in vllm.finish("r")


def test_the_failed_loads_of_the_other_connector_are_known(vllm: Vllm) -> None:
    """vLLM reports them to all connectors, and says which tokens it still takes as computed."""
    vllm.step()
    asked = request("r", {"do_remote_decode": True})
    vllm.scheduler.on_new_request(asked)
    asked.num_computed_tokens = asked.num_prompt_tokens
    vllm.scheduler.update_connector_output(KVConnectorOutput(invalid_block_ids={2}))
    asked.status = RequestStatus.FINISHED_LENGTH_CAPPED
    _, params = vllm.scheduler.request_finished_all_groups(asked, ([1, 2, 3, 4],))
    assert "llm_datadist" not in params
    assert "llm_datadist" in vllm.finish("later")


def handed_over(vllm: Vllm) -> dict[str, Any]:
    vllm.step()
    return vllm.finish("prefill")


def test_the_first_connector_receives_and_the_other_one_releases(vllm: Vllm) -> None:
    params = handed_over(vllm)
    asked = request("r", params)
    vllm.scheduler.on_new_request(asked)
    vllm.step()
    assert [order.request for order in vllm.work.awaited] == ["r"]
    assert vllm.scheduler.get_num_new_matched_tokens(asked, 32) == (68, True)
    vllm.scheduler.update_state_after_alloc(asked, blocks(5, 6, 7, 8), 68)
    vllm.scheduler.update_state_after_alloc(asked, blocks(5, 6, 7, 8), 0)
    ours = vllm.index == 0
    assert vllm.other.loads == [("r", 0 if ours else 68)]
    vllm.step()
    assert vllm.work.receives == ([Receive("r", [[5, 6, 7, 8]], 32, 100)] if ours else [])
    assert vllm.work.cancelled == ([] if ours else [Cancel("r")])
    assert vllm.scheduler.get_loaded_kv_cache_group_ids(asked) == (0,)
    source = CacheHitSource.P2P if ours else CacheHitSource.EXTERNAL_UNSPECIFIED
    assert vllm.scheduler.get_external_cache_hit_sources(asked, 68) == {source: 68}


def test_requests_of_the_other_connector_are_left_alone(vllm: Vllm, caplog: pytest.LogCaptureFixture) -> None:
    params = handed_over(vllm)
    del params["llm_datadist"]
    asked = request("r", params)
    vllm.scheduler.on_new_request(asked)
    assert vllm.scheduler.get_num_new_matched_tokens(asked, 0) == (100, True)
    vllm.scheduler.update_state_after_alloc(asked, blocks(5, 6, 7, 8), 100)
    vllm.step()
    assert (vllm.work.awaited, vllm.work.receives, vllm.work.cancelled) == ([], [], [])
    assert vllm.other.loads == [("r", 100)]
    assert not [record for record in caplog.records if "llm_datadist" in record.name]


def test_metrics_are_those_of_our_connector(vllm: Vllm) -> None:
    vllm.finish("r")
    totals: Any = None
    end = time.monotonic() + 30
    while totals is None or not totals.data["LlmDatadistConnector"].data["expired_leases"]:
        assert time.monotonic() < end
        stats = vllm.step().kv_connector_stats
        if stats is None:
            continue
        # From the worker to the process that logs.
        sent = MultiConnector.build_kv_connector_stats(stats.to_dict())
        totals = sent if totals is None else totals.aggregate(sent)
    assert totals.reduce()["LlmDatadistConnector"]["Expired leases"] == 1
    registry = CollectorRegistry()

    def made(kind: Any) -> Any:
        return lambda **options: kind(**options, registry=registry)

    kinds = {kind: made(kind) for kind in (Gauge, Counter, Histogram)}
    metrics = MultiConnector.build_prom_metrics(vllm.config, kinds, ["engine"], {0: ["0"]})
    metrics.observe(totals.to_dict())
    assert registry.get_sample_value("vllm:llm_datadist_expired_leases_total", {"engine": "0"}) == 1


def test_one_connector_allocates_the_kv_cache(parallel_state: Any) -> None:
    """vLLM refuses two that do. The option of ours leaves it to the other one."""
    both = Vllm(parallel_state, ours_first=True, other="WithPool")
    with pytest.raises(ValueError, match="Multiple connectors provide a KV cache memory pool"):
        both.worker.get_mem_pool_context()
    both.close()
    left = Vllm(parallel_state, ours_first=True, other="WithPool", kv_cache_in_pool=False)
    left.start()
    assert len(left.step().kv_connector_worker_meta.metadata[0].by_worker) == 1
    left.close()
