"""The parts of the vLLM integration that need neither an engine nor vLLM."""

from __future__ import annotations

import itertools
import json
import re
import subprocess
import sys
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock, Mock

import pytest
from msgspec import msgpack

from llm_datadist import OutOfMemory
from llm_datadist.integrations.vllm import messages, register
from llm_datadist.integrations.vllm.allowed_peers import LOOPBACK, AllowedPeers
from llm_datadist.integrations.vllm.group_caches import GroupCaches
from llm_datadist.integrations.vllm.handover import Handover, digest_of, prompt_digest
from llm_datadist.integrations.vllm.identity import Identity
from llm_datadist.integrations.vllm.lending import MAX_READY
from llm_datadist.integrations.vllm.pages import PageFormat
from llm_datadist.integrations.vllm.prompts import lent_while_computed
from llm_datadist.integrations.vllm.ranks import Shard, heads_of, unique_id
from llm_datadist.integrations.vllm.scheduler import SchedulerSide
from llm_datadist.integrations.vllm.settings import Settings
from llm_datadist.integrations.vllm.step import Await, Cancel, Part, Receive, Send, Step, Withdraw

SIZES = [1, 2, 4, 8, 16]
ALLOWED = AllowedPeers(["10.0.0.0/8"])
BOTH = {"producer": True, "consumer": True, "layerwise": True}


def test_the_heads_of_all_ranks_are_all_heads() -> None:
    for ranks, heads in itertools.product(SIZES, SIZES):
        held = [head for rank in range(ranks) for head in heads_of(rank, ranks, heads)]
        assert sorted(set(held)) == list(range(heads))
        assert len(held) == max(ranks, heads)
    with pytest.raises(ValueError, match="6 KV heads cannot be split over 4 ranks"):
        heads_of(0, 4, 6)


def test_decode_reads_each_head_once_and_reports_to_every_rank() -> None:
    for ranks, remote, heads in itertools.product(SIZES, SIZES, SIZES):
        reports = dict.fromkeys(range(remote), 0)
        wanted = {}
        for rank in range(ranks):
            found = Shard(rank, ranks, heads).sources(remote)
            read = [head for one in found if one.reads for head in heads_of(one.rank, remote, heads)]
            mine = heads_of(rank, ranks, heads)
            assert all(read.count(head) == 1 for head in mine)
            for one in found:
                reports[one.rank] += 1
                assert wanted.setdefault(one.rank, one.readers) == one.readers
        assert reports == wanted  # as many reports as each rank of prefill waits for


def test_copies_of_a_head_share_the_readers() -> None:
    readers = [next(one.rank for one in Shard(rank, 4, 2).sources(8) if one.reads) for rank in range(4)]
    assert len(set(readers)) == 4


@dataclass
class Block:
    block_id: int
    is_null: bool = False
    block_hash: Any = None


@dataclass
class Request:
    request_id: str = "r"
    num_prompt_tokens: int = 100
    prompt_token_ids: list[int] | None = None
    kv_transfer_params: dict[str, Any] | None = field(default_factory=dict)
    lora_request: Any = None
    num_computed_tokens: int = 1_000_000


@dataclass
class Output:
    """What the tests need of vLLM's `SchedulerOutput`."""

    num_scheduled_tokens: dict[str, int] = field(default_factory=dict)
    scheduled_new_reqs: list[Any] = field(default_factory=list)
    scheduled_cached_reqs: Any = None
    preempted_req_ids: set[str] | None = None
    has_sync_kv_loads: bool = False

    def __post_init__(self) -> None:
        self.scheduled_cached_reqs = self.scheduled_cached_reqs or cached()


def cached(**requests: tuple[int, list[int] | None]) -> Any:
    """Requests that go on: how many tokens are computed, and new blocks. One that was preempted is in `resumed`."""
    return SimpleNamespace(
        req_ids=list(requests),
        num_computed_tokens=[computed for computed, _ in requests.values()],
        new_block_ids=[None if blocks is None else (blocks,) for _, blocks in requests.values()],
        resumed_req_ids=set(),
    )


def new(name: str, blocks: list[int], computed: int = 0) -> Any:
    return SimpleNamespace(req_id=name, block_ids=(blocks,), num_computed_tokens=computed)


def side(
    *sizes: int,
    producer: bool = True,
    consumer: bool = True,
    layerwise: bool = True,
    copied: bool = False,
    addresses: dict[int, str] = {1: "10.0.0.1:2", 0: "10.0.0.1:1"},  # noqa: B006 - nobody changes it
) -> SchedulerSide:
    options = {"producer": producer, "consumer": consumer, "layerwise": layerwise, "copied": copied}
    made = SchedulerSide("engine", list(sizes or (32,)), ALLOWED, **options)
    made.set_addresses(addresses)
    return made


@pytest.fixture
def prefill() -> SchedulerSide:
    return side()


@pytest.fixture
def decode() -> SchedulerSide:
    return side()


def arrived(at: SchedulerSide, params: Any, name: str = "r", **given: Any) -> Request:
    """A request that has arrived at a side."""
    request = Request(name, kv_transfer_params=params, **given)
    at.arrived(request)
    return request


def to_load(decode: SchedulerSide, request: Request) -> int:
    """How many tokens of a new request come from prefill."""
    decode.arrived(request)
    return decode.tokens_to_load(request, 0)


def handed_over(**changes: Any) -> dict[str, Any]:
    params = Handover("there", "prefill", ["10.0.0.1:1"], prompt_digest(100, None), [32]).params()
    params["llm_datadist"] |= changes
    return params


def for_decode(ticket: str | None = None) -> dict[str, Any]:
    """The parameters of a request that prefill computes for decode."""
    given = {} if ticket is None else {"llm_datadist": {"ticket": ticket}}
    return {"do_remote_decode": True, **given}


def finished(prefill: SchedulerSide, request: Request, *groups: list[int], complete: bool = True) -> Any:
    prefill.arrived(request)
    return prefill.finished(request, groups, complete)


DIGEST = prompt_digest(100, None)


def test_response_of_prefill_says_where_the_prompt_is(prefill: SchedulerSide) -> None:
    params = finished(prefill, Request(kv_transfer_params=for_decode()), [5, 6, 7, 8, 9])
    # The response survives JSON, and the fifth block has no token of the prompt.
    handover = Handover.parse(json.loads(json.dumps(params)), [32], DIGEST, ALLOWED)
    ticket = handover.ticket
    assert handover == Handover(ticket, "engine", ["10.0.0.1:1", "10.0.0.1:2"], DIGEST, [32])
    part = Part(ticket, DIGEST, 0, 0, [[5, 6, 7, 8]], computed=True, last=True)
    assert prefill.take_step(Output()) == Step(parts=[part], sends=[Send("r", ticket)])
    assert prefill.take_step(Output()) == Step()


@pytest.mark.parametrize(
    ("params", "complete", "given"),
    [
        ({}, True, {}),
        (None, True, {}),
        (for_decode(), False, {}),
        (for_decode(), True, {"producer": False}),
    ],
)
def test_other_requests_are_freed_at_once(params: Any, complete: bool, given: dict[str, bool]) -> None:
    prefill = side(**given)
    assert finished(prefill, Request(kv_transfer_params=params), [5, 6], complete=complete) is None
    assert prefill.take_step(Output()) == Step()


def test_a_long_prompt_is_lent_in_parts_that_fit_into_a_message(prefill: SchedulerSide) -> None:
    blocks = list(range(1, 10_001))
    request = Request(num_prompt_tokens=320_000, kv_transfer_params=for_decode())
    assert finished(prefill, request, blocks) is not None
    parts = prefill.take_step(Output()).parts
    assert [block for part in parts for block in part.blocks[0]] == blocks
    assert [(part.number, part.first, part.last) for part in parts] == [
        (0, 0, False),
        (1, 4096, False),
        (2, 8192, True),
    ]
    largest = [2**31 - 1] * 4096
    longest = "t" * 256
    numbers = (2**31 - 1, 2**31 - 1, 2**31 - 1)
    message = messages.Lent(longest, *numbers, [largest], [[b"f" * 48] * 2], 80, last=True)
    assert len(messages.encode(message)) < 65_536
    ready = messages.Ready([(longest, 2**31 - 1)] * MAX_READY, 80)
    assert len(messages.encode(ready)) < 65_536


def test_blocks_without_content_are_not_lent() -> None:
    prefill = side(32, 16)
    request = Request(num_prompt_tokens=64, kv_transfer_params=for_decode())
    params = finished(prefill, request, [5, 6], [0, 0, 7, 8, 9])
    assert Handover.parse(params, [32, 16], prompt_digest(64, None), ALLOWED).block_sizes == [32, 16]
    (part,) = prefill.take_step(Output()).parts
    assert (part.blocks, part.last) == ([[5, 6], [0, 0, 7, 8]], True)
    empty = Request("empty", num_prompt_tokens=64, kv_transfer_params=for_decode())
    assert finished(prefill, empty, [0, 0], [0, 0, 0, 0]) is None
    assert prefill.take_step(Output()) == Step()


def part(number: int, first: int, blocks: list[int], *, computed: bool = False, last: bool = False) -> Part:
    return Part("t", DIGEST, number, first, [blocks], computed, last)


def test_a_prompt_with_a_ticket_is_lent_as_it_is_computed(prefill: SchedulerSide) -> None:
    """Each step lends the blocks that it fills, those of the prefix cache included."""
    request = arrived(prefill, for_decode("t"))
    assert prefill.take_step(Output()) == Step()
    # 32 tokens from the prefix cache and 40 computed: the third block is not full.
    step = prefill.take_step(Output({"r": 40}, [new("r", [5, 6, 7], 32)]))
    assert step == Step(parts=[part(0, 0, [5, 6])])
    step = prefill.take_step(Output({"r": 10}, scheduled_cached_reqs=cached(r=(72, None))))
    assert step == Step()
    step = prefill.take_step(Output({"r": 18}, scheduled_cached_reqs=cached(r=(82, [8]))))
    assert step == Step(parts=[part(1, 2, [7, 8], last=True)])
    # The tokens that it generates do not concern decode.
    assert prefill.take_step(Output({"r": 1}, scheduled_cached_reqs=cached(r=(100, [9])))) == Step()
    params = prefill.finished(request, ([5, 6, 7, 8, 9],), complete=True)
    assert params is not None
    assert params["llm_datadist"]["ticket"] == "t"
    assert prefill.take_step(Output()) == Step(sends=[Send("r", "t")])


def test_blocks_that_are_copied_first_are_lent_as_they_are_computed() -> None:
    """Also without a ticket of the proxy, so that most of them are copied when the request has finished."""
    prefill = side(copied=True)
    request = arrived(prefill, for_decode())
    (first,) = prefill.take_step(Output({"r": 64}, [new("r", [5, 6])])).parts
    assert (first.blocks, first.computed, first.last) == ([[5, 6]], False, False)
    prefill.take_step(Output({"r": 36}, scheduled_cached_reqs=cached(r=(64, [7, 8]))))
    params = prefill.finished(request, ([5, 6, 7, 8],), complete=True)
    assert params is not None
    ticket = params["llm_datadist"]["ticket"]
    assert first.ticket == ticket
    assert prefill.take_step(Output()) == Step(sends=[Send("r", ticket)])


@pytest.mark.parametrize("when", ["in the queue", "lent", "preempted"])
def test_an_aborted_prompt_without_a_ticket_is_withdrawn_if_it_was_lent(when: str) -> None:
    """Otherwise the workers would remember it, and its ticket, for ever."""
    prefill = side(copied=True)
    request = arrived(prefill, for_decode())
    tickets = []
    if when != "in the queue":
        tickets = [one.ticket for one in prefill.take_step(Output({"r": 64}, [new("r", [5, 6])])).parts]
        assert len(tickets) == 1
    if when == "preempted":
        prefill.take_step(Output(preempted_req_ids={"r"}))
    assert prefill.finished(request, ([5, 6],), complete=False) is None
    assert prefill.take_step(Output()) == Step(withdrawn=[Withdraw(ticket, ended=True) for ticket in tickets])


def test_a_preempted_prompt_is_withdrawn_and_lent_again(prefill: SchedulerSide) -> None:
    arrived(prefill, for_decode("t"))
    prefill.take_step(Output({"r": 64}, [new("r", [5, 6])]))
    assert prefill.take_step(Output(preempted_req_ids={"r", "other"})) == Step(withdrawn=[Withdraw("t", ended=False)])
    output = Output({"r": 96}, scheduled_cached_reqs=cached(r=(0, [1, 2, 3])))
    output.scheduled_cached_reqs.resumed_req_ids.add("r")
    assert prefill.take_step(output).parts == [part(1, 0, [1, 2, 3])]


@pytest.mark.parametrize("copied", [False, True])
def test_prompts_are_lent_when_they_have_finished_once_a_step_loads_blocks(
    copied: bool, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM learns only after the step whether the blocks are valid, and other prompts may share them."""
    caplog.set_level("INFO", "vllm.llm_datadist")
    prefill = side(copied=copied)
    requests = {name: Request(name, kv_transfer_params=for_decode(name)) for name in ("before", "loads", "shares")}
    for request in requests.values():
        prefill.arrived(request)
    begun = prefill.take_step(Output({"before": 64}, [new("before", [1, 2])])).parts
    assert [one.blocks for one in begun] == [[[1, 2]]]
    both = [new("loads", [5, 6, 7, 8], 64), new("shares", [5, 6, 9, 10], 64)]
    output = Output({"before": 10, "loads": 36, "shares": 20}, both, cached(before=(64, [3])), has_sync_kv_loads=True)
    assert prefill.take_step(output) == Step()
    # With asynchronous scheduling, this step is scheduled before vLLM learns how the one before it went.
    output = Output({"before": 26, "shares": 16}, scheduled_cached_reqs=cached(before=(74, [4]), shares=(84, None)))
    assert prefill.take_step(output) == Step()
    for name, blocks in (("before", [1, 2, 3, 4]), ("loads", [5, 6, 7, 8]), ("shares", [5, 6, 9, 10])):
        assert prefill.finished(requests[name], (blocks,), complete=True) is not None
    parts = prefill.take_step(Output()).parts
    assert [(one.ticket, one.blocks) for one in parts] == [
        ("before", [[3, 4]]),
        ("loads", [[5, 6, 7, 8]]),
        ("shares", [[5, 6, 9, 10]]),
    ]
    assert all(one.computed and one.last for one in parts)
    assert caplog.text.count("another connector loads KV within the step") == 1


@pytest.mark.parametrize("given", [{"producer": False}, {"layerwise": False}])
def test_a_vllm_that_never_lends_layer_by_layer_logs_nothing_about_it(
    given: dict[str, bool], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level("INFO", "vllm.llm_datadist")
    assert side(**given).take_step(Output({"r": 64}, [new("r", [5, 6])], has_sync_kv_loads=True)) == Step()
    assert not caplog.text


def test_a_request_of_which_computed_tokens_were_taken_back_is_not_handed_over(prefill: SchedulerSide) -> None:
    """With asynchronous scheduling, a later step may end it before its prompt is computed again."""
    request = Request(kv_transfer_params=for_decode("t"), num_computed_tokens=99)
    assert finished(prefill, request, [5, 6, 7, 8]) is None
    assert prefill.take_step(Output()) == Step(withdrawn=[Withdraw("t", ended=True)])


# A loads blocks 5 and 6 in step N, and vLLM takes its tokens back at the end of N. B, of which N computes a part, and
# C, which N + 1 computes, have found 5 and 6 in the prefix cache. vLLM takes nothing back of them.
@pytest.mark.parametrize(
    ("computed", "blocks", "handed_over"),
    [
        (100, [5, 6, 9, 10], False),
        (100, [3, 6, 9, 10], False),
        (33, [3, 6, 9, 10], False),
        (32, [3, 6, 9, 10], True),
        (0, [5, 6, 7, 8], True),
        (100, [1, 2, 3, 4], True),
    ],
    ids=["all shared", "the second one shared", "partly computed", "taken back", "not begun", "others"],
)
def test_a_request_that_has_used_blocks_of_a_failed_load_is_not_handed_over(
    prefill: SchedulerSide, computed: int, blocks: list[int], handed_over: bool, caplog: pytest.LogCaptureFixture
) -> None:
    request = arrived(prefill, for_decode("t"), num_computed_tokens=computed)
    prefill.invalid(set())
    prefill.invalid({5, 6})
    prefill.invalid({77})
    request.num_computed_tokens = 100
    assert (prefill.finished(request, [blocks], complete=True) is not None) == handed_over
    refused = "request r is not handed over, because another connector failed to load its blocks"
    assert caplog.text.count(refused) == (not handed_over)
    step = prefill.take_step(Output())
    assert step.withdrawn == ([] if handed_over else [Withdraw("t", ended=True)])
    assert [send.ticket for send in step.sends] == (["t"] if handed_over else [])


def test_a_failed_load_is_no_matter_of_later_requests(prefill: SchedulerSide) -> None:
    prefill.invalid({5, 6})
    assert finished(prefill, Request(kv_transfer_params=for_decode("t")), [5, 6, 7, 8]) is not None


@pytest.mark.parametrize(("computed", "again"), [(32, True), (96, True), (100, False)])
def test_a_prompt_of_which_vllm_takes_computed_tokens_back_is_lent_again(
    prefill: SchedulerSide, computed: int, again: bool
) -> None:
    """There is no preemption: vLLM computes the tokens again in the same blocks."""
    arrived(prefill, for_decode("t"))
    prefill.take_step(Output({"r": 36}, [new("r", [5, 6, 7, 8], 64)]))
    step = prefill.take_step(Output({"r": 101 - computed}, scheduled_cached_reqs=cached(r=(computed, None))))
    lent_again = Step(withdrawn=[Withdraw("t", ended=False)], parts=[part(1, 0, [5, 6, 7, 8], last=True)])
    assert step == (lent_again if again else Step())


def test_a_part_that_is_computed_again_is_lent_again() -> None:
    """Also if vLLM computes less of the prompt than before."""
    prefill = side(copied=True)
    arrived(prefill, for_decode())
    (first,) = prefill.take_step(Output({"r": 10}, [new("r", [5, 6, 7], 64)])).parts
    step = prefill.take_step(Output({"r": 16}, scheduled_cached_reqs=cached(r=(32, None))))
    assert (step.withdrawn, [one.blocks for one in step.parts]) == ([Withdraw(first.ticket, ended=False)], [[[5]]])
    step = prefill.take_step(Output({"r": 16}, scheduled_cached_reqs=cached(r=(48, None))))
    assert (step.withdrawn, [one.blocks for one in step.parts]) == ([], [[[6]]])


def configured(*, use_ubatching: bool = False, speculative_config: Any = None) -> Any:
    """What the tests need of vLLM's `VllmConfig`."""
    return SimpleNamespace(
        parallel_config=SimpleNamespace(use_ubatching=use_ubatching), speculative_config=speculative_config
    )


def test_prompts_are_lent_while_they_are_computed_if_each_layer_is_reported_once() -> None:
    full, window = (type(f"{kind}Spec", (), {})() for kind in ("FullAttention", "SlidingWindow"))
    assert lent_while_computed(configured(), [full])
    for config, specs in [
        (configured(), [window]),
        (configured(), [full, full]),
        (configured(use_ubatching=True), [full]),
        (configured(speculative_config=SimpleNamespace()), [full]),
    ]:
        assert not lent_while_computed(config, specs)


def test_blocks_that_vllm_may_free_early_are_lent_at_the_end() -> None:
    """A sliding window frees blocks while the prompt is computed."""
    prefill = side(32, 32, layerwise=False)
    request = Request(num_prompt_tokens=64, kv_transfer_params=for_decode("t"))
    prefill.arrived(request)
    assert prefill.take_step(Output({"r": 64}, [new("r", [5, 6])])) == Step()
    prefill.finished(request, ([5, 6], [0, 7]), complete=True)
    whole = Part("t", prompt_digest(64, None), 0, 0, [[5, 6], [0, 7]], computed=True, last=True)
    assert prefill.take_step(Output()) == Step(parts=[whole], sends=[Send("r", "t")])


@pytest.mark.parametrize("ticket", ["", 1, None, "x" * 257, "é"])
def test_a_bad_ticket_is_refused(prefill: SchedulerSide, ticket: Any, caplog: pytest.LogCaptureFixture) -> None:
    params = {"do_remote_decode": True, "llm_datadist": {"ticket": ticket}}
    assert finished(prefill, Request(kv_transfer_params=params), [5, 6, 7, 8]) is None
    assert prefill.take_step(Output()) == Step()
    assert "request r is not handed over: " in caplog.text
    assert "kv_transfer_params['llm_datadist'] is invalid: Expected `str`" in caplog.text


def test_a_ticket_names_one_request_at_a_time(prefill: SchedulerSide, caplog: pytest.LogCaptureFixture) -> None:
    first, second = (Request(name, kv_transfer_params=for_decode("t")) for name in ("one", "two"))
    prefill.arrived(first)
    assert finished(prefill, second, [1, 2, 3, 4]) is None
    assert "another one has the ticket 't'" in caplog.text
    assert prefill.finished(first, ([5, 6, 7, 8],), complete=True) is not None
    # The workers still lend the first request under this name.
    assert finished(prefill, second, [1, 2, 3, 4]) is None
    prefill.freed({"one", "unknown"})
    assert finished(prefill, second, [1, 2, 3, 4]) is not None


def test_the_ticket_of_an_aborted_request_is_free(prefill: SchedulerSide) -> None:
    first, second = (Request(name, kv_transfer_params=for_decode("t")) for name in ("one", "two"))
    assert finished(prefill, first, [5, 6, 7, 8], complete=False) is None
    assert finished(prefill, second, [1, 2, 3, 4]) is not None
    step = prefill.take_step(Output())
    assert (step.withdrawn, [part.blocks for part in step.parts]) == ([Withdraw("t", ended=True)], [[[1, 2, 3, 4]]])


def test_tickets_cannot_be_guessed() -> None:
    """Who knows the ticket of a request can read and end it."""
    params = [finished(side(), Request(kv_transfer_params=for_decode()), [5, 6, 7, 8]) for _ in range(2)]
    tickets = {given["llm_datadist"]["ticket"] for given in params}
    assert [len(ticket) for ticket in tickets] == [32, 32]


HANDOVER = Handover.parse(handed_over(later=1), [32], DIGEST, ALLOWED)


def test_decode_receives_what_it_has_not_computed(decode: SchedulerSide) -> None:
    request = arrived(decode, handed_over())
    assert decode.take_step(Output()) == Step(awaited=[Await("r", HANDOVER)])
    assert decode.tokens_to_load(request, 64) == 36
    blocks = [Block(1, block_hash=b"cached"), Block(0, is_null=True), Block(3), Block(4)]
    decode.allocated(request, [blocks], 36)
    decode.allocated(request, [blocks], 0)  # vLLM calls again when the blocks are in place
    assert decode.take_step(Output()) == Step(receives=[Receive("r", [[0, 0, 3, 4]], 64, 100)])
    assert decode.tokens_to_load(request, 0) == 0


def test_a_proxy_need_not_know_the_prompt() -> None:
    """It has started both sides at the same time, so there is no response of prefill yet."""
    given = {"ticket": "t", "engine_id": "prefill", "addresses": ["10.0.0.1:1"]}
    request = Request(kv_transfer_params={"do_remote_prefill": True, "llm_datadist": given})
    assert to_load(side(), request) == 100
    assert Handover.parse(request.kv_transfer_params or {}, [32], DIGEST, ALLOWED) == Handover(
        "t", "prefill", ["10.0.0.1:1"], DIGEST, [32]
    )


def test_decode_reads_a_prefill_with_as_many_stages_only(caplog: pytest.LogCaptureFixture) -> None:
    prefill, decode = (SchedulerSide("engine", [32], ALLOWED, **BOTH, stages=2) for _ in range(2))
    prefill.set_addresses({worker: f"10.0.0.1:{worker + 1}" for worker in (2, 0, 3, 1)})
    params = finished(prefill, Request(kv_transfer_params=for_decode()), [5, 6, 7, 8])
    assert to_load(decode, Request(kv_transfer_params=dict(params))) == 100
    (order,) = decode.take_step(Output()).awaited
    workers = [order.handover.workers(stage) for stage in range(2)]
    assert workers == [
        [("10.0.0.1:1", "engine/0"), ("10.0.0.1:2", "engine/1")],
        [("10.0.0.1:3", "engine/2"), ("10.0.0.1:4", "engine/3")],
    ]
    # A decode without stages, and addresses that are not those of two stages.
    assert to_load(side(), Request(kv_transfer_params=dict(params))) == 0
    assert "stages must be 1, as in this vLLM (got 2)" in caplog.text
    params["llm_datadist"]["addresses"].pop()
    assert to_load(decode, Request("other", kv_transfer_params=params)) == 0
    assert "addresses must be a multiple of 2, one for each worker" in caplog.text


@pytest.mark.parametrize(
    ("given", "replica", "made"), [("e", 0, "e"), ("e", 2, "e_dp2"), ("e_dp2", 2, "e_dp2"), ("e_dp1", 2, "e_dp1_dp2")]
)
def test_data_parallel_ranks_have_ids_of_their_own(given: str, replica: int, made: str) -> None:
    """vLLM appends the rank, except if the engine runs in the process of the program."""
    assert unique_id(given, replica) == made


def test_a_prompt_in_the_prefix_cache_needs_no_blocks(decode: SchedulerSide) -> None:
    request = arrived(decode, handed_over())
    assert decode.tokens_to_load(request, 100) == 0
    decode.allocated(request, [[Block(1), Block(2)]], 0)
    assert decode.take_step(Output()) == Step(awaited=[Await("r", HANDOVER)], cancelled=[Cancel("r")])
    assert decode.finished(request, ([1, 2],), complete=True) is None
    assert decode.take_step(Output()) == Step()


@pytest.mark.parametrize("when", ["in the queue", "while it is received", "later"])
def test_an_aborted_request_is_cancelled_unless_it_was_received(decode: SchedulerSide, when: str) -> None:
    request = arrived(decode, handed_over())
    if when != "in the queue":
        decode.allocated(request, [[Block(1), Block(2), Block(3), Block(4)]], 100)
    decode.take_step(Output())
    if when == "later":
        decode.received({"r", "unknown"})
    assert decode.finished(request, ([],), complete=False) is None
    assert decode.take_step(Output()).cancelled == ([] if when == "later" else [Cancel("r")])


@pytest.mark.parametrize(
    "changes",
    [
        {"ticket": 1},
        {"ticket": ""},
        {"engine_id": None},
        {"prompt": None},
        {"prompt": "100:ab"},
        {"prompt": "99:"},
        {"addresses": []},
        {"addresses": [1]},
        {"addresses": ["10.0.0.1:1"] * 2000},
        {"addresses": ["10.0.0.1:1", "11.0.0.1:1"]},
        {"block_sizes": [0]},
        {"block_sizes": [True]},
        {"block_sizes": [32, 32]},
        {"block_sizes": None},
        {"stages": 2, "addresses": ["10.0.0.1:1", "10.0.0.1:2"]},
        {"stages": 0},
        {"decodes": 0},
        {"decodes": 1025},
    ],
)
def test_a_handover_that_lies_is_computed_here(
    decode: SchedulerSide, changes: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    request = Request(kv_transfer_params=handed_over(**changes))
    with pytest.raises(ValueError, match=r"kv_transfer_params|is not one of allowed_peers"):
        Handover.parse(request.kv_transfer_params or {}, [32], DIGEST, ALLOWED)
    assert to_load(decode, request) == 0
    decode.allocated(request, [[Block(1)]], 0)
    assert decode.take_step(Output()) == Step()
    assert "request r is not received from prefill" in caplog.text


def test_the_kv_cache_of_another_prompt_is_not_used() -> None:
    """A proxy may give decode the response of prefill to another request."""
    tokens = list(range(100))
    request = Request(prompt_token_ids=tokens, kv_transfer_params=for_decode())
    params = finished(side(), request, [5, 6, 7, 8])
    for other, count in [(tokens, 100), (tokens[::-1], 0), ([*tokens[:-1], 7], 0), (None, 0)]:
        asked = Request(f"for {count}", prompt_token_ids=other, kv_transfer_params=dict(params))
        assert to_load(side(), asked) == count
    longer = Request(num_prompt_tokens=101, prompt_token_ids=[*tokens, 1], kv_transfer_params=dict(params))
    assert to_load(side(), longer) == 0


def test_a_request_of_another_connector_is_not_received(caplog: pytest.LogCaptureFixture) -> None:
    """NIXL's parameters have the same flags. The ticket alone is that of a request which this vLLM hands over."""
    ticket = {"llm_datadist": {"ticket": "t"}}
    for params in ({"do_remote_prefill": True, "remote_block_ids": [[1]]}, for_decode("t"), ticket, {}, None):
        assert to_load(side(), Request(kv_transfer_params=params)) == 0
    assert to_load(side(consumer=False), Request(kv_transfer_params=handed_over())) == 0
    assert not caplog.records


@pytest.mark.parametrize("params", [{"llm_datadist": "t"}, {"do_remote_prefill": True, **for_decode("t")}], ids=str)
def test_parameters_that_lack_something_are_logged(params: Any, caplog: pytest.LogCaptureFixture) -> None:
    assert to_load(side(), Request(kv_transfer_params=params)) == 0
    assert "request r is not received from prefill: kv_transfer_params['llm_datadist'] " in caplog.text


def test_another_connector_may_change_its_parameters(decode: SchedulerSide) -> None:
    """NIXL clears the flag of a request when it is asked first."""
    request = Request(kv_transfer_params={**handed_over(), "do_remote_prefill": True})
    assert to_load(decode, request) == 100
    request.kv_transfer_params["do_remote_prefill"] = False
    decode.allocated(request, [[Block(1)]], 100)
    assert len(decode.take_step(Output()).receives) == 1
    assert request.kv_transfer_params == {**handed_over(), "do_remote_prefill": False}


def test_a_request_that_another_connector_loads_is_cancelled(decode: SchedulerSide) -> None:
    request = Request(kv_transfer_params=handed_over())
    assert to_load(decode, request) == 100
    decode.allocated(request, [[Block(1), Block(2), Block(3), Block(4)]], 0)
    decode.received({"r"})  # by the other one
    decode.finished(request, ([1, 2, 3, 4],), complete=True)
    assert decode.take_step(Output()) == Step(awaited=[Await("r", HANDOVER)], cancelled=[Cancel("r")])


def test_a_response_has_one_key() -> None:
    """`MultiConnector` refuses responses of two connectors that have a key in common."""
    assert set(finished(side(), Request(kv_transfer_params=for_decode()), [5, 6, 7, 8])) == {"llm_datadist"}


def test_a_response_of_the_first_step_has_the_addresses_of_that_step() -> None:
    """vLLM ends requests before it passes on what the workers have reported."""
    prefill = side(addresses={})
    params = finished(prefill, Request(kv_transfer_params=for_decode()), [5, 6, 7, 8])
    prefill.set_addresses({1: "10.0.0.1:2", 0: "10.0.0.1:1"})
    assert params["llm_datadist"]["addresses"] == ["10.0.0.1:1", "10.0.0.1:2"]
    later = finished(prefill, Request("later", kv_transfer_params=for_decode()), [5, 6, 7, 8])
    assert later["llm_datadist"]["addresses"] == ["10.0.0.1:1", "10.0.0.1:2"]


def test_a_program_may_change_its_response() -> None:
    """Several requests may end in the first step. Each response has lists of its own."""
    prefill = side(addresses={})
    both = [finished(prefill, Request(name, kv_transfer_params=for_decode()), [5, 6, 7, 8]) for name in ("a", "b")]
    prefill.set_addresses({0: "10.0.0.1:1"})
    for number in range(3):
        both[number]["llm_datadist"]["addresses"].append("changed")
        later = finished(prefill, Request(f"later {number}", kv_transfer_params=for_decode()), [5, 6, 7, 8])
        assert later["llm_datadist"]["addresses"] == ["10.0.0.1:1"]
        both.append(later)
    assert both[-1]["llm_datadist"]["addresses"] == ["10.0.0.1:1"]


MESSAGES: list[Any] = [
    messages.Hold("r", 4096),
    messages.Ask("r", 7, "heads", "100:"),
    messages.Lent("r", 7, 1, 2, [[3, 0], []], [[b"\0\xff"], []], 4, last=True),
    messages.Ready([("r", 1), ("s", 0)], 3),
    messages.Gone("r", 7, "why"),
    messages.Done("r"),
]


@pytest.mark.parametrize("message", MESSAGES)
def test_messages_survive(message: messages.Message) -> None:
    """Those of a later version may have more fields."""
    payload = messages.encode(message)
    assert messages.decode(payload) == message
    assert messages.decode(msgpack.encode({**msgpack.decode(payload), "new": 1})) == message


ASK, LENT = MESSAGES[1], MESSAGES[2]


@pytest.mark.parametrize(
    ("message", "changes"),
    [
        (ASK, {"type": "other"}),
        (ASK, {"type": None}),
        (ASK, {"ticket": 1}),
        (ASK, {"ticket": ""}),
        (ASK, {"ticket": "x" * 257}),
        (ASK, {"ticket": "é"}),
        (ASK, {"prompt": "1" * 65}),
        (ASK, {"view": "other"}),
        (ASK, {"view": "pages\n"}),
        (ASK, {"receive": -7}),
        (ASK, {"receive": True}),
        (messages.Hold("r", 1), {"readers": 0}),
        (messages.Hold("r", 1), {"readers": 4097}),
        (messages.Ready([], 1), {"parts": [["r"]]}),
        (messages.Ready([], 1), {"parts": [[1, "r"]]}),
        (messages.Ready([], 1), {"parts": {}}),
        (messages.Ready([], 1), {"layers": -1}),
        (LENT, {"grants": [[1]]}),
        (LENT, {"grants": b"aa"}),
        (LENT, {"blocks": [[-1]]}),
        (LENT, {"blocks": [[2**31]]}),
        (LENT, {"blocks": [1]}),
        (LENT, {"last": 1}),
    ],
)
def test_bad_messages_are_refused(message: messages.Message, changes: dict[str, Any]) -> None:
    given = msgpack.decode(messages.encode(message))
    with pytest.raises(ValueError, match="not a message"):
        messages.decode(msgpack.encode({**given, **changes}))


@pytest.mark.parametrize("payload", [b"", b"\x80", b"\x91" * 60_000, b"{}", messages.encode(ASK)[:-1]])
def test_bad_payloads_are_refused(payload: bytes) -> None:
    with pytest.raises(ValueError, match="not a message"):
        messages.decode(payload)


def test_messages_do_not_show_the_tokens_of_grants() -> None:
    assert "00ff" not in repr(messages.Lent("r", 7, 1, 2, [[3]], [[b"00ff"]], 4, last=True))


def test_prompts_for_other_adapters_differ() -> None:
    """The name of a LoRA adapter belongs to the digest; a prompt of embeddings has no ids."""
    prompts = [(100, None, ""), (100, None, "a"), (100, [1] * 100, ""), (100, [1] * 100, "a"), (100, [1] * 100, "b")]
    assert len({prompt_digest(*prompt) for prompt in prompts}) == len(prompts)
    request = Request(prompt_token_ids=[1] * 100)
    assert digest_of(request) == prompt_digest(100, [1] * 100)
    request.lora_request = SimpleNamespace(lora_name="a")
    assert digest_of(request) == prompt_digest(100, [1] * 100, "a")


def test_a_lend_that_fails_leaves_no_grant() -> None:
    grants: list[Mock] = []

    def lend(*_: Any, **__: Any) -> Mock:
        if grants:
            raise OutOfMemory("for the second cache of the view")
        grants.append(Mock(ended=None))
        return grants[-1]

    engine: Any = MagicMock(lend=lend)
    form = PageFormat(2, 32, range(2), 2, 4, 4, 2, "vec", "model")
    caches = GroupCaches(engine, 0, form)
    caches.register([4096, 8192], 8, [form.page_bytes] * 2)
    with pytest.raises(OutOfMemory):
        caches.lend("heads", [3], 1.0)
    grants[0].revoke.assert_called_once_with()


@pytest.mark.parametrize("metadata", [b"", b"{}", b"\xff", b'{"facts": []}', b'{"facts": {"model": 1}}'])
def test_engines_of_other_programs_are_refused(metadata: bytes) -> None:
    identity = Identity({"model": "m"})
    identity.check(identity.metadata())
    with pytest.raises(ValueError, match="no engine of this connector"):
        identity.check(metadata)


def test_all_differences_of_two_sides_are_shown() -> None:
    prefill = Identity({"model": "m", "dtype": "a", "vllm": "1", "later": "x"})
    with pytest.raises(ValueError, match=r"^dtype is 'a' in prefill, 'b' here; vllm is '1' in prefill, '2' here$"):
        Identity({"model": "m", "dtype": "b", "vllm": "2", "earlier": "y"}).check(prefill.metadata())


class Float16:
    itemsize = 2

    def __str__(self) -> str:
        return "torch.float16"


class FullAttentionSpec:
    """The part of vLLM's description of a KV cache that the worker uses: blocks of 16 tokens, keys of 8 elements."""

    dtype = Float16()
    block_size = 16

    def __init__(self, slots: int | None = None, heads: int = 2) -> None:
        self.num_head_slots, self.num_kv_heads = slots, heads
        self.page_size_bytes = self.block_size * heads * 16 * 2


def form(
    backend: str = "FLASH_ATTN",
    slots: int | None = None,
    order: str = "HND",
    *,
    heads: int = 2,
    isa: str | None = None,
    shuffled: bool = False,
) -> PageFormat:
    """The format of the pages of two layers."""
    name = SimpleNamespace(get_name=lambda: backend)
    layer = SimpleNamespace(get_attn_backend=lambda: name, **({} if isa is None else {"isa": isa}))
    spec = FullAttentionSpec(slots, heads)
    return PageFormat.of(spec, [layer, layer], range(heads), heads, order, shuffled=shuffled)


def test_pages_that_kernels_write_in_other_ways_have_other_layouts() -> None:
    """The engine compares the layouts, and copies pages only if they are equal. Strides alone do not tell."""
    forms = [
        form(),
        form("FLASHINFER"),
        form(order="NHD"),
        form(slots=2),  # keys and values apart, in as many slots as there are heads
        form(slots=4),
        form(slots=2, order="NHD"),
        form(shuffled=True),
        form("CPU_ATTN", isa="vec"),
        form("CPU_ATTN", isa="amx"),
    ]
    assert len({one.pages().model for one in forms}) == len(forms)
    assert form() == form()
    # Decode then says why, before it compares layouts.
    assert form().summary() != form("FLASHINFER").summary()
    assert form("CPU_ATTN", isa="vec").summary() == form("CPU_ATTN", isa="amx").summary()


@pytest.mark.parametrize("given", [{"slots": 2}, {"slots": 4}, {"shuffled": True}])
@pytest.mark.parametrize("order", ["HND", "NHD"])
def test_pages_of_slots_are_whole(given: Any, order: str) -> None:
    """Ranks with other heads do not read them, and no rank reads single tokens."""
    layout = form(order=order, **given).pages()
    assert (layout.order, layout.block_tokens) == ("HND", 1)
    assert form(order=order, heads=4, **given).pages().model != layout.model
    assert form(order=order, heads=4).pages().model == form(order=order).pages().model
    assert form(order=order, isa="vec", **given).packings() == []


def test_sizes_of_pages_are_those_of_vllm() -> None:
    one = form(isa="vec")
    assert (one.layers, one.block_size, one.key_size, one.value_size, one.element_size) == (2, 16, 8, 8, 2)
    assert one.page_bytes == FullAttentionSpec().page_size_bytes
    assert len(one.packings()) == 2


def test_layers_with_different_strides_are_refused() -> None:
    caches = GroupCaches(MagicMock(), 0, PageFormat(2, 32, range(2), 2, 4, 4, 2, "vec", "model"))
    with pytest.raises(RuntimeError, match=r"different strides: \[2048, 4096\]"):
        caches.register([4096, 8192], 8, [2048, 4096])


def test_options_are_checked() -> None:
    assert Settings.parse({}) == Settings()
    for given, text in [
        ({"lease": 1}, "unknown option 'lease' of LlmDatadistConnector; allowed: host, port, advertise, allowed_peers"),
        ({"port": "1"}, "option 'port' is '1': Expected `int`, got `str`"),
        ({"port": True}, "option 'port' is True: Expected `int`, got `bool`"),
        ({"port": 65_536}, "option 'port' is 65536: Expected `int` <= 65535"),
        ({"lease_ms": 0}, "option 'lease_ms' is 0: Expected `int` >= 1"),
        ({"timeout_ms": 4_294_967_001}, "Expected `int` <= 4294967000"),
        ({"host": ""}, "option 'host' is '': must be 'auto' or an IP address without a zone"),
        ({"host": "localhost"}, "option 'host' is 'localhost': must be 'auto' or an IP address"),
        ({"host": "10.0.0.0/24"}, "option 'host' is '10.0.0.0/24': must be 'auto' or an IP address"),
        ({"host": "fe80::1%eth0"}, "option 'host' is 'fe80::1%eth0': must be 'auto' or an IP address without a zone"),
        ({"advertise": "0.0.0.0"}, "option 'advertise' is '0.0.0.0': must be an IP address of one host"),  # noqa: S104
        ({"advertise": "::"}, "option 'advertise' is '::': must be an IP address of one host"),
        ({"advertise": "224.0.0.1"}, "option 'advertise' is '224.0.0.1': must be an IP address of one host"),
        ({"advertise": "node1"}, "option 'advertise' is 'node1': must be an IP address of one host"),
        ({"engine_options": []}, "Expected `object`, got `array`"),
        ({"engine_options": {"name": "x"}}, "option 'engine_options' must not have 'name'"),
        ({"engine_options": {"listen": "127.0.0.1:0"}}, "option 'engine_options' must not have 'listen'"),
        ({"engine_options": {"metadata": b""}}, "option 'engine_options' must not have 'metadata'"),
        ({"layers_per_read": 0}, "option 'layers_per_read' is 0: Expected `int` >= 1"),
        ({"spans": 1}, "option 'spans' is 1: Expected `bool`, got `int`"),
        ({"allowed_peers": "::1"}, "option 'allowed_peers' is '::1': Expected `array | null`, got `str`"),
        ({"allowed_peers": [1]}, "option 'allowed_peers' is [1]: Expected `str`, got `int` - at `$[0]`"),
        ({"allowed_peers": ["prefill:26000"]}, "option 'allowed_peers' has 'prefill:26000': "),
    ]:
        with pytest.raises(ValueError, match=re.escape(text)):
            Settings.parse(given)


@pytest.mark.parametrize(
    ("rules", "yes", "no"),
    [
        (LOOPBACK, ["127.0.0.1:1", "127.9.9.9:65535", "[::1]:1"], ["10.0.0.1:1", "0.0.0.0:1", "[::2]:1", "[::]:1"]),
        ([], [], ["127.0.0.1:1"]),
        (["10.0.0.1"], ["10.0.0.1:1", "[::ffff:10.0.0.1]:1"], ["10.0.0.2:1", "10.0.0.1:0", "10.0.0.1:65536"]),
        (["10.0.0.0/24:5"], ["10.0.0.9:5"], ["10.0.0.9:6", "10.0.1.9:5", "[::ffff:10.0.0.9]:6"]),
        (["10.0.0.1:5-7", "[2001:db8::/32]:8"], ["10.0.0.1:7", "[2001:db8::9]:8"], ["10.0.0.1:8", "[2001:db8::9]:7"]),
        (["2001:db8::/32"], ["[2001:0DB8::9]:8"], ["[2001:db9::9]:8", "2001:db8::9", "2001:db8::9:8"]),
        (
            ["0.0.0.0/0"],
            ["10.0.0.1:8"],
            ["010.0.0.1:8", "10.1:8", "host:8", "10.0.0.1", ":8", "10.0.0.1:-8", "10.0.0.1:8 "],
        ),
    ],
)
def test_decode_connects_to_allowed_peers_only(rules: list[str], yes: list[str], no: list[str]) -> None:
    allowed = AllowedPeers(rules)
    for address in yes:
        assert allowed.checked(allowed.checked(address)) == allowed.checked(address)
    for address in no:
        with pytest.raises(ValueError, match=r"allowed_peers|is not an address"):
            allowed.checked(address)


def test_addresses_have_one_form() -> None:
    allowed = AllowedPeers(["10.0.0.1", "::/0"])
    assert allowed.checked("[::ffff:10.0.0.1]:8") == "10.0.0.1:8"
    assert allowed.checked("[2001:0DB8::0:1]:8") == "[2001:db8::1]:8"


@pytest.mark.parametrize(
    ("rule", "text"),
    [
        ("", "'' does not appear to be an IPv4 or IPv6 network; a peer has the form"),
        ("localhost", "'localhost' does not appear"),
        ("10.0.0.1/24", "10.0.0.1/24 has host bits set"),
        ("10.0.0.1:0", "ports are 1 to 65535, the smaller one first"),
        ("10.0.0.1:7-5", "ports are 1 to 65535"),
        ("10.0.0.1:1-65536", "ports are 1 to 65535"),
        ("10.0.0.1:", "does not appear"),
    ],
)
def test_bad_allowed_peers_are_refused(rule: str, text: str) -> None:
    with pytest.raises(ValueError, match=re.escape(text)):
        AllowedPeers([rule])


def test_the_entry_point_does_no_harm_without_vllm() -> None:
    register()
    register()


def test_nothing_of_the_integrations_is_imported_unasked() -> None:
    program = "import sys, llm_datadist; print([name for name in sys.modules if 'integrations' in name])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)  # noqa: S603
    assert done.stdout.strip() == "[]"
