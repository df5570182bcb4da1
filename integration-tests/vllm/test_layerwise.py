"""Decode receives a prompt while prefill computes it. The tokens are those of one vLLM that does both."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
from servers import start_both, where
from test_prefill_decode import check_ends, first, wrong

from conftest import TOKENS

if TYPE_CHECKING:
    from pathlib import Path

    from servers import Done, Server

    from conftest import Start

Prompts = dict[str, list[int]]
LAYERWISE: dict[str, Any] = {"layers_per_read": 1, "timeout_ms": 60_000}
CHUNKED = {"max_num_batched_tokens": 256}


def both(prefill: Server, decode: Server, prompts: Prompts, transfer_params: Any) -> dict[str, Done]:
    """Have both compute prompts, and return what decode says."""
    start_both(prefill, decode, prompts, TOKENS, transfer_params)
    found = dict(decode.result() for _ in prompts)
    for _ in prompts:
        prefill.result()
    return found


def one_by_one(prefill: Server, decode: Server, prompts: Prompts, transfer_params: Any) -> dict[str, Done]:
    found: dict[str, Done] = {}
    for name, tokens in prompts.items():
        found.update(both(prefill, decode, {name: tokens}, transfer_params))
    return found


def some_of(prompts: Prompts) -> Prompts:
    return first(prompts, 8)


@pytest.mark.subset
def test_48_requests_at_once_in_chunks(start: Start, prompts: Prompts, expected: Prompts) -> None:
    pair = start.pair(extra=LAYERWISE, **CHUNKED)
    found = both(*pair, prompts, where(*pair, prompts["r0"]))
    assert wrong(found, expected) == []
    check_ends(*pair, receives=49)


@pytest.mark.parametrize("connector", ["NothingPulled", "BlocksSwapped"])
def test_a_broken_connector_is_noticed(start: Start, prompts: Prompts, expected: Prompts, connector: str) -> None:
    """The negative control."""
    pair = start.pair(decode={"connector": connector}, extra=LAYERWISE)
    long = {name: tokens for name, tokens in some_of(prompts).items() if len(tokens) > 32}
    found = one_by_one(*pair, long, where(*pair, prompts["r1"]))
    assert wrong(found, expected) == list(long)
    assert {done.reason for done in found.values()} == {"length"}


def test_decode_reads_layers_before_prefill_has_computed_the_last(
    start: Start, prompts: Prompts, expected: Prompts, tmp_path: Path
) -> None:
    """Prefill computes its last layer only when decode has read the first one, and would fail otherwise."""
    mark = tmp_path / "mark"
    environment = {"MARK": str(mark)}
    prefill = start("kv_producer", connector="WaitsForReads", extra=LAYERWISE, environment=environment).wait()
    decode = start("kv_consumer", connector="ReportsReads", extra=LAYERWISE, environment=environment).wait()
    transfer_params = where(prefill, decode, prompts["r0"])
    for name, tokens in some_of(prompts).items():
        mark.unlink(missing_ok=True)
        mark.with_suffix(".expected").touch()
        assert wrong(both(prefill, decode, {name: tokens}, transfer_params), expected) == []
        assert mark.exists()


CASES: dict[str, dict[str, Any]] = {
    "one at a time": {},
    "tcp": {"extra": {**LAYERWISE, "engine_options": {"transport": "tcp"}}, **CHUNKED},
    "registered memory": {"extra": {**LAYERWISE, "kv_cache_in_pool": False}},
    "two ranks": {"tensor_parallel_size": 2},
    "decode with two ranks": {"decode": {"tensor_parallel_size": 2}, **CHUNKED},
    "larger blocks in decode": {"decode": {"block_size": 64}, **CHUNKED},
    "larger blocks in prefill, two ranks": {"prefill": {"block_size": 64, "tensor_parallel_size": 2}, **CHUNKED},
}


@pytest.mark.parametrize("case", CASES)
def test_other_configurations(start: Start, prompts: Prompts, expected: Prompts, case: str) -> None:
    options = {"extra": LAYERWISE, **CASES[case]}
    pair = start.pair(options.pop("prefill", {}), options.pop("decode", {}), **options)
    found = one_by_one(*pair, some_of(prompts), where(*pair, prompts["r0"]))
    assert wrong(found, expected) == []
    check_ends(*pair, receives=9)


def test_prefix_caching(start: Start, prompts: Prompts, expected: Prompts) -> None:
    """Prompts that share a prefix are computed in the same steps, and blocks of one belong to the others too."""
    pair = start.pair(extra=LAYERWISE, enable_prefix_caching=True, **CHUNKED)
    transfer_params = where(*pair, prompts["r5"])
    some = some_of(prompts)
    again = {f"{name} again": tokens for name, tokens in some.items()}
    found = both(*pair, {**some, **again}, transfer_params)
    expected = {**expected, **{f"{name} again": expected[name] for name in some}}
    assert wrong(found, expected) == []
    third = {f"{name} third": tokens for name, tokens in some.items()}
    found = both(*pair, third, transfer_params)
    assert wrong(found, {f"{name} third": expected[name] for name in some}) == []
    time.sleep(1)
    assert [server.stop().usage for server in pair] == [0, 0]


def test_preempted_prompts_come_again(start: Start, prompts: Prompts, expected: Prompts) -> None:
    """Prefill also serves requests of its own, which grow until the prompts for decode have no room."""
    small = {
        "num_gpu_blocks_override": 72,
        "max_model_len": 2048,
        "max_num_seqs": 16,
        "max_num_batched_tokens": 48,
        "scheduler_reserve_full_isl": False,
    }
    prefill, decode = start.pair(small, extra=LAYERWISE)
    transfer_params = where(prefill, decode, prompts["r0"])
    local = {name: tokens for name, tokens in prompts.items() if len(tokens) in (40, 64)}
    for name, tokens in local.items():
        prefill.add(f"{name} local", tokens, 100)
    long = {name: tokens for name, tokens in prompts.items() if len(tokens) in (700, 1500)}
    start_both(prefill, decode, first(long, 3), TOKENS, transfer_params)
    found = dict(decode.result() for _ in range(3))
    assert wrong(found, expected) == []
    others = dict(prefill.result() for _ in range(3 + len(local)))
    assert [name for name in local if others[f"{name} local"].tokens[:TOKENS] != expected[name]] == []
    time.sleep(1)
    ends = prefill.stop(), decode.stop()
    assert ends[0].preemptions > 0
    assert ends[1].stats["failed_receives"] == 0
    assert [end.usage for end in ends] == [0, 0]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_prefill_fails_while_it_computes(start: Start, prompts: Prompts, expected: Prompts, number: int) -> None:
    """Decode computes what it has not received."""
    extra = {**LAYERWISE, "timeout_ms": 2000}
    prefill, decode = start.pair(policy="recompute", extra=extra, **CHUNKED)
    transfer_params = where(prefill, decode, prompts["r0"])
    some = some_of(prompts)
    start_both(prefill, decode, some, TOKENS, transfer_params)
    found = dict(decode.result() for _ in range(2))
    prefill.signal(signal.Signals(number))
    found |= dict(decode.result() for _ in range(len(some) - 2))
    assert wrong(found, expected) == []
    assert decode.stop().usage == 0


def test_decode_is_killed_while_it_receives(start: Start, prompts: Prompts, expected: Prompts) -> None:
    """Prefill goes on, and frees its blocks at once."""
    prefill, decode = start.pair(extra=LAYERWISE, **CHUNKED)
    some = some_of(prompts)
    start_both(prefill, decode, some, TOKENS, where(prefill, decode, prompts["r0"]))
    found = dict([decode.result()])
    decode.kill()
    assert wrong(found, expected) == []
    for _ in some:
        prefill.result()
    prefill.add("local", prompts["r6"], TOKENS)
    assert prefill.result()[1].tokens == expected["r6"]
    assert prefill.stop().usage == 0
