"""A real vLLM with `MultiConnector`: the connector beside offloading, and beside NIXL's connector."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

import pytest
from servers import hand_over, where
from test_offloading import SMALL, offloading, rounds
from test_prefill_decode import first, one_by_one, pass_on, prefilled, wrong

from test_layerwise import LAYERWISE
from test_layerwise import both as at_the_same_time

if TYPE_CHECKING:
    from pathlib import Path

    from servers import Server

    from conftest import Start

Prompts = dict[str, list[int]]
OURS = "LlmDatadistConnector"


def multi(role: str, *children: dict[str, Any]) -> dict[str, Any]:
    return {
        "kv_connector": "MultiConnector",
        "kv_role": role,
        "engine_id": role,
        "kv_connector_extra_config": {"connectors": list(children)},
    }


def both(start: Start, ours_first: bool, other: dict[str, Any], **options: Any) -> list[Server]:
    """Start prefill and decode, each with our connector and another one."""
    servers = []
    for role, port in (("kv_producer", 5770), ("kv_consumer", 5780)):
        children = [{"kv_connector": OURS, "kv_role": role}, {"kv_role": role, **other}]
        environment = {"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}
        kv = multi(role, *(children if ours_first else children[::-1]))
        servers.append(start.configured(kv, environment=environment, **options))
    return [server.wait() for server in servers]


@pytest.mark.subset
@pytest.mark.parametrize("ours_first", [True, False])
def test_offloading_beside_the_connector(start: Start, prompts: Prompts, expected: Prompts, ours_first: bool) -> None:
    """Each worker has two engines. Prompts that were received, or computed for decode, come back from host memory."""
    prefill, decode = both(start, ours_first, offloading(), **SMALL)
    some = first(prompts, 24)  # nearly twice the blocks that vLLM has
    assert wrong(one_by_one(prefill, decode, some), expected) == []
    whole = sum(len(tokens) // 32 * 32 for tokens in some.values())
    # Decode alone.
    again = rounds(decode, some, 1, at_once=False)[0]
    assert wrong(again, expected) == []
    assert sum(done.cached for done in again.values()) > 0.8 * whole
    # Prefill hands over what it has loaded. It has no room for all prompts at once.
    cached, found = 0, {}
    for name, tokens in some.items():
        response = prefilled(prefill, {name: tokens})
        cached += response[name].cached
        pass_on(decode, some, response)
        found.update([decode.result()])
    assert wrong(found, expected) == []
    assert cached > 0.8 * whole
    time.sleep(1)
    ends = [prefill.stop(), decode.stop()]
    assert [end.usage for end in ends] == [0, 0]
    stats = ends[1].stats[OURS]
    assert len(stats["bytes"]) >= len(some)
    assert stats["failed_receives"] == 0


@pytest.mark.parametrize("ours_first", [True, False])
def test_nixl_beside_the_connector(start: Start, prompts: Prompts, expected: Prompts, ours_first: bool) -> None:
    """Prefill lends each request through both. Decode receives it through the first one, and both free the blocks."""
    pytest.importorskip("nixl", reason="it is the other connector")
    prefill, decode = both(start, ours_first, {"kv_connector": "NixlConnector"})
    some = first(prompts, 8)
    assert wrong(one_by_one(prefill, decode, some), expected) == []
    at_once = {f"{name} again": tokens for name, tokens in some.items()}
    found = hand_over(prefill, decode, at_once, len(expected["r0"]))
    assert [name for name, done in found.items() if done.tokens != expected[name.split()[0]]] == []
    end = time.monotonic() + 20
    while prefill.usage() > 0:
        assert time.monotonic() < end, "prefill keeps blocks"
        time.sleep(0.1)
    ends = [server.stop(check=False) for server in (prefill, decode)]  # NIXL may crash at exit
    assert [end.usage for end in ends] == [0, 0]
    stats = ends[1].stats
    received = len(stats.get(OURS, {}).get("bytes", []))
    assert received == (16 if ours_first else 0)
    assert any(name.startswith("Nixl") for name in stats) == (not ours_first)


@pytest.mark.subset
def test_decode_receives_what_prefill_computes_again_after_a_failed_load(
    start: Start, prompts: Prompts, expected: Prompts, tmp_path: Path
) -> None:
    """A connector of prefill loads blocks within the step, which is found to have failed only after the step.

    With tickets, decode could have read everything by then. vLLM switches asynchronous scheduling off on a CPU.
    """
    mark = tmp_path / "mark"
    children = [
        {"kv_connector": OURS, "kv_role": "kv_producer", "kv_connector_extra_config": LAYERWISE},
        {"kv_connector": "FailsWithinStep", "kv_connector_module_path": "other_connector", "kv_role": "kv_both"},
    ]
    kv = {**multi("kv_producer", *children), "kv_load_failure_policy": "recompute"}
    prefill = start.configured(kv, environment={"MARK": str(mark)}, max_num_batched_tokens=256).wait()
    decode = start("kv_consumer", extra=LAYERWISE, policy="recompute").wait()
    transfer_params = where(prefill, decode, prompts["r6"])  # too short to be loaded
    some = first(prompts, 8)
    found = {}
    for name, tokens in some.items():
        found.update(at_the_same_time(prefill, decode, {name: tokens}, transfer_params))
    assert wrong(found, expected) == []
    assert len(mark.read_text().split()) == sum(len(tokens) > 64 for tokens in some.values())
    time.sleep(1)  # the last report of decode
    ends = [prefill.stop(), decode.stop()]
    assert [end.usage for end in ends] == [0, 0]
    assert (len(ends[1].stats["bytes"]), ends[1].stats["failed_receives"]) == (len(some) + 1, 0)
