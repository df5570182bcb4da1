"""Pipeline parallelism on both sides, in a real vLLM: each stage of decode reads the same stage of prefill."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from servers import hand_over, start_both, where
from test_prefill_decode import check_ends, first, one_by_one, wrong

from conftest import TOKENS

if TYPE_CHECKING:
    from conftest import Start

Prompts = dict[str, list[int]]
# vLLM 0.32 warms the model up on CPUs only if it is compiled. Without a warm-up, its second stage has no buffers for
# what the first one sends, and fails in the first step, also without a connector.
STAGES: dict[str, Any] = {
    "pipeline_parallel_size": 2,
    "enforce_eager": False,
    "compilation_config": {"mode": 1, "backend": "eager"},
}


def test_two_stages(start: Start, prompts: Prompts, expected: Prompts) -> None:
    pair = start.pair(**STAGES)
    some = first(prompts, 8)
    found = one_by_one(*pair, some)
    assert wrong(found, expected) == []
    assert {name: done.cached for name, done in found.items()} == {name: len(tokens) for name, tokens in some.items()}
    # Several steps are under way in the stages at a time.
    more = {name: tokens for name, tokens in prompts.items() if name not in some}
    assert wrong(hand_over(*pair, more, TOKENS), expected) == []
    check_ends(*pair, receives=48)


def test_two_stages_layer_by_layer(start: Start, prompts: Prompts, expected: Prompts) -> None:
    pair = start.pair(**STAGES, max_num_batched_tokens=256, extra={"layers_per_read": 1})
    transfer_params = where(*pair, prompts["r0"])
    some = first(prompts, 16)
    start_both(*pair, some, TOKENS, transfer_params)
    found = dict(pair[1].result() for _ in some)
    assert wrong(found, expected) == []


def test_a_prefill_without_stages_is_not_read(start: Start, prompts: Prompts, expected: Prompts) -> None:
    """Decode computes the prompt itself."""
    pair = start.pair(decode=STAGES, policy="recompute")
    found = one_by_one(*pair, first(prompts, 2))
    assert wrong(found, expected) == []
    assert {done.cached for done in found.values()} == {0}
