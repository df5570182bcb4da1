"""Offloading of a real vLLM with a small KV cache: prompts that it has evicted come back from host memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest
from servers import Server

from conftest import TOKENS

if TYPE_CHECKING:
    from servers import Done

Prompts = dict[str, list[int]]
SMALL = {"enable_prefix_caching": True, "num_gpu_blocks_override": 150}


def offloading(**given: Any) -> dict[str, Any]:
    extra = {"spec_name": "LlmDatadistOffloadingSpec", "cpu_bytes_to_use": 512 << 20, **given}
    return {
        "kv_connector": "OffloadingConnector",
        "kv_role": "kv_both",
        "kv_connector_extra_config": extra,
    }


def rounds(server: Server, prompts: Prompts, count: int, *, at_once: bool) -> list[dict[str, Done]]:
    """Compute all prompts `count` times."""
    found = []
    for round_number in range(count):
        results: dict[str, Done] = {}
        for name, tokens in prompts.items():
            server.add(f"{name} {round_number}", tokens, TOKENS)
            if not at_once:
                results.update([server.result()])
        while len(results) < len(prompts):
            results.update([server.result()])
        found.append({name.split()[0]: done for name, done in results.items()})
    return found


@pytest.mark.subset
@pytest.mark.parametrize(
    ("at_once", "blocks_per_chunk", "host_buffers"),
    [(False, 1, False), (True, 1, False), (False, 2, False), (True, 2, False), (True, 2, True)],
)
def test_evicted_prompts_come_back(
    model: str, prompts: Prompts, expected: Prompts, at_once: bool, blocks_per_chunk: int, host_buffers: bool
) -> None:
    """48 prompts need more than twice the blocks that vLLM has. Later rounds find them in host memory, and the tokens
    are the same. With host buffers, blocks move as those of a device."""
    options = offloading(block_size=32 * blocks_per_chunk, host_buffers=host_buffers)
    server = Server(model, options, **SMALL).wait()
    found = rounds(server, prompts, 3, at_once=at_once)
    for results in found:
        assert [name for name, done in results.items() if done.tokens != expected[name]] == []
    cached = [sum(done.cached for done in results.values()) for results in found]
    whole = sum(len(tokens) // (32 * blocks_per_chunk) * 32 * blocks_per_chunk for tokens in prompts.values())
    assert cached[0] == 0
    assert cached[2] > 0.8 * whole
    server.stop()
