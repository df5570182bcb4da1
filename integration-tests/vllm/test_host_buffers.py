"""The KV cache of a real vLLM through host buffers, as on a device: the tokens are those of one vLLM that does both.

A CPU has no streams, so its copies happen at once. Not for: what waits for what (`tests/test_vllm_host_buffers.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from servers import hand_over, where
from test_prefill_decode import check_ends, first, one_by_one, wrong

from conftest import TOKENS
from test_layerwise import CHUNKED, LAYERWISE, both
from test_layerwise import one_by_one as one_by_one_layerwise

if TYPE_CHECKING:
    from conftest import Start

Prompts = dict[str, list[int]]
HOST: dict[str, Any] = {"host_buffers": True}


@pytest.mark.subset
def test_48_requests_at_once(start: Start, prompts: Prompts, expected: Prompts) -> None:
    pair = start.pair(extra=HOST)
    found = hand_over(*pair, prompts, TOKENS)
    assert wrong(found, expected) == []
    check_ends(*pair, receives=48)


def test_layer_by_layer_in_chunks(start: Start, prompts: Prompts, expected: Prompts) -> None:
    pair = start.pair(extra={**HOST, **LAYERWISE}, **CHUNKED)
    found = both(*pair, prompts, where(*pair, prompts["r0"]))
    assert wrong(found, expected) == []
    check_ends(*pair, receives=49)


@pytest.mark.parametrize("connector", ["NothingPulled", "BlocksSwapped"])
def test_a_broken_connector_is_noticed(start: Start, prompts: Prompts, expected: Prompts, connector: str) -> None:
    """The negative control."""
    pair = start.pair(decode={"connector": connector}, extra=HOST)
    long = {name: tokens for name, tokens in first(prompts, 8).items() if len(tokens) > 32}
    assert wrong(one_by_one(*pair, long), expected) == list(long)


CASES: dict[str, dict[str, Any]] = {
    "prefill only": {"decode": {"extra": {}}},
    "decode only": {"prefill": {"extra": {}}},
    "registered memory": {"extra": {**HOST, "kv_cache_in_pool": False}},
    "decode with two ranks": {"decode": {"tensor_parallel_size": 2}},
    "larger blocks in prefill": {"prefill": {"block_size": 64}},
    "both roles in each": {"role": "kv_both"},
    "functions of vLLM": {"connector": "PlatformCopies"},
}


@pytest.mark.parametrize("case", CASES)
def test_other_configurations(start: Start, prompts: Prompts, expected: Prompts, case: str) -> None:
    options = {"extra": HOST, **CASES[case]}
    prefill, decode = dict(options.pop("prefill", {})), dict(options.pop("decode", {}))
    role = options.pop("role", "")
    servers = [
        start(role or usual, name=usual, **{**options, **given})
        for usual, given in (("kv_producer", prefill), ("kv_consumer", decode))
    ]
    pair = servers[0].wait(), servers[1].wait()
    found = one_by_one(*pair, first(prompts, 8))
    assert wrong(found, expected) == []
    check_ends(*pair, receives=8)


def test_layers_are_copied_one_by_one(start: Start, prompts: Prompts, expected: Prompts) -> None:
    pair = start.pair(extra={**HOST, **LAYERWISE})
    some = first(prompts, 8)
    found = one_by_one_layerwise(*pair, some, where(*pair, prompts["r0"]))
    assert wrong(found, expected) == []
    check_ends(*pair, receives=9)
