"""Prefill and decode of a real vLLM on a CPU: the tokens are those of one vLLM that does both."""

from __future__ import annotations

import signal
import time
from typing import TYPE_CHECKING, Any

import pytest
from servers import REQUEST_S, hand_over

from conftest import TOKENS

if TYPE_CHECKING:
    from servers import Done, Server

    from conftest import Start

Prompts = dict[str, list[int]]


def first(prompts: Prompts, count: int) -> Prompts:
    return dict(list(prompts.items())[:count])


def tokens_of(found: dict[str, Done]) -> Prompts:
    return {name: done.tokens for name, done in found.items()}


def one_by_one(prefill: Server, decode: Server, prompts: Prompts) -> dict[str, Done]:
    found: dict[str, Done] = {}
    for name, tokens in prompts.items():
        found.update(hand_over(prefill, decode, {name: tokens}, TOKENS))
    return found


def prefilled(prefill: Server, prompts: Prompts) -> dict[str, Done]:
    """Have prefill compute prompts, and return its responses."""
    for name, tokens in prompts.items():
        prefill.add(name, tokens, 1, {"do_remote_decode": True})
    return dict(prefill.result() for _ in prompts)


def pass_on(decode: Server, prompts: Prompts, responses: dict[str, Done]) -> None:
    """Give decode the requests with the responses of prefill."""
    for name, done in responses.items():
        decode.add(name, prompts[name], TOKENS, done.params)


def wrong(found: dict[str, Done], expected: Prompts) -> list[str]:
    """Return the requests with other tokens than expected."""
    return [name for name, tokens in tokens_of(found).items() if tokens != expected[name]]


def check_ends(prefill: Server, decode: Server, receives: int) -> None:
    """No block is in use, and every receive has succeeded."""
    time.sleep(1)  # the last report of decode
    ends = [prefill.stop(), decode.stop()]
    assert [end.usage for end in ends] == [0, 0]
    stats = ends[1].stats
    if stats:
        assert (len(stats["bytes"]), stats["failed_receives"], stats["expired_leases"]) == (receives, 0, 0)


@pytest.mark.subset
def test_one_request_at_a_time(start: Start, prompts: Prompts, expected: Prompts) -> None:
    pair = start.pair()
    found = one_by_one(*pair, first(prompts, 8))
    assert wrong(found, expected) == []
    check_ends(*pair, receives=8)


@pytest.mark.subset
def test_48_requests_at_once(start: Start, prompts: Prompts, expected: Prompts) -> None:
    pair = start.pair()
    found = hand_over(*pair, prompts, TOKENS)
    assert wrong(found, expected) == []
    check_ends(*pair, receives=48)


@pytest.mark.subset
@pytest.mark.parametrize("connector", ["NothingPulled", "BlocksSwapped"])
def test_a_broken_connector_is_noticed(start: Start, prompts: Prompts, expected: Prompts, connector: str) -> None:
    """The negative control: without it, equal tokens would prove nothing."""
    pair = start.pair(decode={"connector": connector})
    long = {name: tokens for name, tokens in first(prompts, 8).items() if len(tokens) > 32}
    found = one_by_one(*pair, long)
    assert wrong(found, expected) == list(long)
    assert {done.reason for done in found.values()} == {"length"}


CASES: dict[str, dict[str, Any]] = {
    "tcp": {"extra": {"engine_options": {"transport": "tcp"}}},
    "registered memory": {"extra": {"kv_cache_in_pool": False}},
    "chunked prefill": {"max_num_batched_tokens": 256},
    "prefill with two ranks": {"prefill": {"tensor_parallel_size": 2}},
    "decode with two ranks": {"decode": {"tensor_parallel_size": 2}},
    "larger blocks in decode": {"decode": {"block_size": 64}},
    "larger blocks in prefill, two ranks": {"prefill": {"block_size": 64, "tensor_parallel_size": 2}},
    "both roles in each": {"prefill": {"role": "kv_both"}, "decode": {"role": "kv_both"}},
}


@pytest.mark.parametrize("case", CASES)
def test_other_configurations(start: Start, prompts: Prompts, expected: Prompts, case: str) -> None:
    options = {name: dict(value) if isinstance(value, dict) else value for name, value in CASES[case].items()}
    prefill, decode = options.pop("prefill", {}), options.pop("decode", {})
    servers = [
        start(role.pop("role", usual), name=usual, **{**options, **role})
        for usual, role in (("kv_producer", prefill), ("kv_consumer", decode))
    ]
    pair = servers[0].wait(), servers[1].wait()
    found = one_by_one(*pair, first(prompts, 8))
    assert wrong(found, expected) == []
    check_ends(*pair, receives=8)


@pytest.mark.parametrize("extra", [{"model_tag": "another"}, {"allowed_peers": ["10.0.0.0/8"]}], ids=str)
def test_decode_reads_no_prefill_that_it_does_not_accept(
    start: Start, prompts: Prompts, expected: Prompts, extra: dict[str, Any]
) -> None:
    """Decode computes the prompts itself."""
    pair = start.pair(policy="recompute", decode={"extra": extra})
    assert wrong(one_by_one(*pair, first(prompts, 2)), expected) == []
    stats = pair[1].stop().stats
    assert stats.get("bytes", []) == []
    assert stats.get("failed_receives", 0) == (2 if "model_tag" in extra else 0)


def test_prefix_caching(start: Start, prompts: Prompts, expected: Prompts) -> None:
    """The same prompts again come from the prefix cache, of decode too, and prefill frees its blocks all the same."""
    pair = start.pair(enable_prefix_caching=True)
    some = first(prompts, 8)
    assert wrong(one_by_one(*pair, some), expected) == []
    again = {f"{name} again": tokens for name, tokens in some.items()}
    found = one_by_one(*pair, again)
    assert {name: done.tokens for name, done in found.items()} == {f"{name} again": expected[name] for name in some}
    # A prompt with new words behind a known prefix is received in part.
    longer = {"longer": prompts["r3"] + prompts["r2"]}
    assert len(one_by_one(*pair, longer)["longer"].tokens) == TOKENS
    time.sleep(1)
    ends = [server.stop() for server in pair]
    assert [end.usage for end in ends] == [0, 0]


def test_a_preempted_request_is_computed_by_decode(start: Start, prompts: Prompts, expected: Prompts) -> None:
    """Decode has room for two of these prompts, and not for all tokens that it generates."""
    small = {"num_gpu_blocks_override": 97, "max_model_len": 2048, "scheduler_reserve_full_isl": False}
    prefill, decode = start.pair(decode=small)
    long = {name: tokens for name, tokens in prompts.items() if len(tokens) == 1500}
    found = hand_over(prefill, decode, long, 100)
    assert [name for name, done in found.items() if done.tokens[:TOKENS] != expected[name]] == []
    time.sleep(1)
    ends = prefill.stop(), decode.stop()
    assert ends[1].preemptions > 0
    assert ends[1].stats["failed_receives"] == 0
    assert [end.usage for end in ends] == [0, 0]


@pytest.mark.subset
def test_prefill_is_killed_and_returns(start: Start, prompts: Prompts, expected: Prompts) -> None:
    """What was not received is recomputed, and requests to the new prefill are received again."""
    prefill, decode = start.pair(policy="recompute", extra={"timeout_ms": 3000})
    some = first(prompts, 8)
    assert wrong(one_by_one(prefill, decode, first(prompts, 2)), expected) == []
    responses = prefilled(prefill, some)
    prefill.kill()
    pass_on(decode, some, responses)
    found = dict(decode.result() for _ in some)
    assert wrong(found, expected) == []
    again = {f"{name} again": tokens for name, tokens in some.items()}
    prefill = start("kv_producer", name="kv_producer").wait()
    found = one_by_one(prefill, decode, again)
    assert {name: done.tokens for name, done in found.items()} == {f"{name} again": expected[name] for name in some}
    time.sleep(1)
    end = decode.stop()
    assert (end.usage, end.stats["failed_receives"], len(end.stats["bytes"])) == (0, 8, 10)


def test_decode_is_killed_and_returns(start: Start, prompts: Prompts, expected: Prompts) -> None:
    """Prefill frees the blocks that no decode has got when their leases end."""
    lease_ms = 4000
    prefill, decode = start.pair(extra={"lease_ms": lease_ms})
    some = first(prompts, 8)
    assert wrong(one_by_one(prefill, decode, first(prompts, 2)), expected) == []
    decode.kill()
    for name, tokens in some.items():
        prefill.add(f"{name} lost", tokens, 1, {"do_remote_decode": True})
    for _ in some:
        prefill.result()
    decode = start("kv_consumer", extra={"lease_ms": lease_ms}).wait()
    assert wrong(one_by_one(prefill, decode, some), expected) == []
    time.sleep(lease_ms / 1000 + 1)
    end = prefill.stop()
    assert (end.usage, end.stats["expired_leases"]) == (0, 8)
    assert decode.stop().usage == 0


def test_a_killed_decode_gives_back_what_it_holds(start: Start, prompts: Prompts) -> None:
    """Requests wait in its queue, and it is killed long before the lease would end."""
    prefill, decode = start.pair(extra={"lease_ms": 3_600_000}, decode={"max_num_seqs": 1})
    some = {name: tokens for name, tokens in prompts.items() if len(tokens) == 700}
    decode.add("long", prompts["r0"], 2000)
    pass_on(decode, some, prefilled(prefill, some))
    time.sleep(2)
    assert prefill.usage() > 0
    decode.kill()
    time.sleep(2)
    end = prefill.stop()
    assert (end.usage, end.stats["expired_leases"]) == (0, len(some))


def test_requests_wait_in_the_queue_of_decode(start: Start, prompts: Prompts, expected: Prompts) -> None:
    """For longer than the lease."""
    pair = start.pair(extra={"lease_ms": 1000}, decode={"max_num_seqs": 1})
    some = first(prompts, 6)
    pair[1].add("long", prompts["r0"], 1000)
    pass_on(pair[1], some, prefilled(pair[0], some))
    assert pair[1].result()[0] == "long"
    assert wrong(dict(pair[1].result() for _ in some), expected) == []
    check_ends(*pair, receives=6)


def test_a_stopped_prefill_holds_up_nobody(start: Start, prompts: Prompts, expected: Prompts) -> None:
    """Decode serves other requests meanwhile, and recomputes what the stopped prefill does not lend."""
    prefill, decode = start.pair(policy="recompute", extra={"timeout_ms": 2000})
    some = first(prompts, 4)
    assert wrong(one_by_one(prefill, decode, first(prompts, 1)), expected) == []
    responses = prefilled(prefill, some)
    prefill.signal(signal.SIGSTOP)
    pass_on(decode, some, responses)
    decode.add("local", prompts["r6"], TOKENS)
    found = dict(decode.result() for _ in range(5))
    prefill.signal(signal.SIGCONT)
    assert found.pop("local").tokens == expected["r6"]
    assert wrong(found, expected) == []
    assert decode.stop().usage == 0


def test_a_stopped_decode_holds_up_nobody(start: Start, prompts: Prompts, expected: Prompts) -> None:
    """Prefill serves other requests meanwhile, and frees what the stopped decode has not read when their link ends."""
    options = {"timeout_ms": 3000, "engine_options": {"heartbeat": 0.2, "silence": 1.0}}
    prefill, decode = start.pair(policy="recompute", extra=options)
    some = first(prompts, 4)
    assert wrong(one_by_one(prefill, decode, first(prompts, 1)), expected) == []
    responses = prefilled(prefill, some)
    pass_on(decode, some, responses)
    decode.signal(signal.SIGSTOP)
    prefill.add("local", prompts["r6"], TOKENS)
    assert prefill.result()[1].tokens == expected["r6"]
    time.sleep(2)
    decode.signal(signal.SIGCONT)
    # Whether it had read them or not, the tokens are right.
    assert wrong(dict(decode.result() for _ in some), expected) == []
    assert [prefill.stop().usage, decode.stop().usage] == [0, 0]


@pytest.mark.parametrize("policy", ["recompute", "fail"])
def test_expired_leases_are_never_wrong(start: Start, prompts: Prompts, expected: Prompts, policy: str) -> None:
    prefill, decode = start.pair(policy=policy, extra={"lease_ms": 300})
    some = first(prompts, 4)
    responses = prefilled(prefill, some)
    time.sleep(1)
    # Other requests get the blocks meanwhile.
    for name, tokens in list(prompts.items())[8:12]:
        prefill.add(name, tokens, 4)
    for _ in range(4):
        prefill.result()
    pass_on(decode, some, responses)
    found = dict(decode.result(REQUEST_S) for _ in some)
    if policy == "recompute":
        assert wrong(found, expected) == []
    else:
        assert {done.reason for done in found.values()} == {"error"}
    assert prefill.stop().stats["expired_leases"] == 4
    decode.stop()
