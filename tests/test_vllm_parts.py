"""The parts of the vLLM integration that need neither an engine nor vLLM."""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
from dataclasses import dataclass, field
from typing import Any

import pytest

from llm_datadist.integrations.vllm import messages, register
from llm_datadist.integrations.vllm.handover import Handover
from llm_datadist.integrations.vllm.ranks import Shard, heads_of
from llm_datadist.integrations.vllm.scheduler import SchedulerSide
from llm_datadist.integrations.vllm.settings import Settings
from llm_datadist.integrations.vllm.step import Receive, Send, Step
from llm_datadist.integrations.vllm.supported import check_device, check_vllm

SIZES = [1, 2, 4, 8, 16]


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


def side(*sizes: int, producer: bool = True, consumer: bool = True) -> SchedulerSide:
    made = SchedulerSide("engine", list(sizes or (32,)), producer=producer, consumer=consumer)
    made.set_addresses({1: "host:2", 0: "host:1"})
    return made


def handed_over(**changes: Any) -> dict[str, Any]:
    params = Handover("there", "prefill", ["host:1"], 100, "", [32], [[7, 8, 9, 10]]).params()
    params["llm_datadist"] |= changes
    return params


def test_prefill_answers_where_the_prompt_is() -> None:
    prefill = side()
    request = Request(kv_transfer_params={"do_remote_decode": True})
    params = prefill.finished(request, ([5, 6, 7, 8, 9],), complete=True)
    # The answer survives JSON, and the fifth block has no token of the prompt.
    handover = Handover.parse(json.loads(json.dumps(params)), 1)
    assert handover == Handover("r", "engine", ["host:1", "host:2"], 100, "", [32], [[5, 6, 7, 8]])
    assert prefill.take_step() == Step(sends=[Send("r", [[5, 6, 7, 8]])])
    assert prefill.take_step() == Step()


@pytest.mark.parametrize(
    ("params", "complete", "given"),
    [
        ({}, True, {}),
        (None, True, {}),
        ({"do_remote_decode": True}, False, {}),
        ({"do_remote_decode": True}, True, {"producer": False}),
    ],
)
def test_other_requests_are_freed_at_once(params: Any, complete: bool, given: dict[str, bool]) -> None:
    prefill = side(**given)
    assert prefill.finished(Request(kv_transfer_params=params), ([5, 6],), complete) is None
    assert prefill.take_step() == Step()


def test_without_addresses_nothing_is_kept(caplog: pytest.LogCaptureFixture) -> None:
    prefill = SchedulerSide("engine", [32], producer=True, consumer=False)
    request = Request(kv_transfer_params={"do_remote_decode": True})
    assert prefill.finished(request, ([5, 6, 7, 8],), complete=True) is None
    assert prefill.take_step() == Step()
    assert "request r is not handed over" in caplog.text


def test_blocks_without_content_are_not_lent() -> None:
    prefill = side(32, 16)
    request = Request(num_prompt_tokens=64, kv_transfer_params={"do_remote_decode": True})
    params = prefill.finished(request, ([5, 6], [0, 0, 7, 8, 9]), complete=True)
    assert Handover.parse(params or {}, 2).blocks == [[5, 6], [0, 0, 7, 8]]
    assert prefill.take_step().sends == [Send("r", [[5, 6], [7, 8]])]


def test_decode_receives_what_it_has_not_computed() -> None:
    decode = side()
    request = Request(kv_transfer_params=handed_over())
    assert decode.tokens_to_load(request, 64) == 36
    blocks = [Block(1, block_hash=b"cached"), Block(0, is_null=True), Block(3), Block(4)]
    decode.allocated(request, [blocks], 36)
    decode.allocated(request, [blocks], 0)  # vLLM calls again when the blocks are in place
    (receive,) = decode.take_step().receives
    assert receive == Receive("r", Handover.parse(handed_over(), 1), [[0, 0, 3, 4]], 64, 100)
    assert decode.tokens_to_load(request, 0) == 0


def test_a_prompt_in_the_prefix_cache_needs_no_blocks() -> None:
    decode = side()
    request = Request(kv_transfer_params=handed_over())
    assert decode.tokens_to_load(request, 100) == 0
    decode.allocated(request, [[Block(1), Block(2)]], 0)
    assert [one.blocks for one in decode.take_step().receives] == [[]]


def test_a_request_that_ends_before_it_is_scheduled_needs_no_blocks() -> None:
    decode = side()
    assert decode.finished(Request(kv_transfer_params=handed_over()), ([],), complete=False) is None
    assert [one.blocks for one in decode.take_step().receives] == [[]]


@pytest.mark.parametrize(
    "changes",
    [
        {"request": 1},
        {"engine_id": None},
        {"prompt": None},
        {"prompt": "ab"},
        {"num_tokens": 99},
        {"num_tokens": True},
        {"addresses": []},
        {"addresses": [1]},
        {"addresses": ["host:1"] * 2000},
        {"block_sizes": [0]},
        {"block_sizes": [True]},
        {"block_sizes": [32, 32]},
        {"blocks": [[1], [2]]},
        {"blocks": [[-1]]},
        {"blocks": [[2**31]]},
        {"blocks": [["1"]]},
        {"blocks": None},
    ],
)
def test_a_handover_that_lies_is_computed_here(changes: dict[str, Any], caplog: pytest.LogCaptureFixture) -> None:
    decode = side()
    request = Request(kv_transfer_params=handed_over(**changes))
    with pytest.raises(ValueError, match="kv_transfer_params"):
        Handover.parse(request.kv_transfer_params or {}, 1).check_prompt(100, None)
    assert decode.tokens_to_load(request, 0) == 0
    decode.allocated(request, [[Block(1)]], 0)
    assert decode.take_step() == Step()
    assert "request r is not received from prefill" in caplog.text


def test_the_kv_cache_of_another_prompt_is_not_used() -> None:
    """A proxy may give decode the answer of prefill to another request."""
    prefill, decode = side(), side()
    tokens = list(range(100))
    request = Request(prompt_token_ids=tokens, kv_transfer_params={"do_remote_decode": True})
    params = prefill.finished(request, ([5, 6, 7, 8],), complete=True)
    for other, count in [(tokens, 100), (tokens[::-1], 0), ([*tokens[:-1], 7], 0), (None, 0)]:
        asked = Request(f"for {count}", prompt_token_ids=other, kv_transfer_params=dict(params or {}))
        assert side().tokens_to_load(asked, 0) == count
    longer = Request(num_prompt_tokens=101, prompt_token_ids=[*tokens, 1], kv_transfer_params=dict(params or {}))
    assert decode.tokens_to_load(longer, 0) == 0


def test_a_request_of_another_connector_is_computed_here() -> None:
    assert side().tokens_to_load(Request(kv_transfer_params={"do_remote_prefill": True}), 0) == 0
    assert side(consumer=False).tokens_to_load(Request(kv_transfer_params=handed_over()), 0) == 0


def test_messages_survive() -> None:
    for message in (
        messages.Ask("r", 3, "heads"),
        messages.Lent("r", [["00ff"], []]),
        messages.Gone("r", "why"),
        messages.Done("r", 4096),
    ):
        assert messages.decode(messages.encode(message)) == message


@pytest.mark.parametrize(
    "payload",
    [
        "1",
        "null",
        '{"is": "ask"}',
        '{"is": [], "request": "r"}',
        '{"is": "ask", "request": "r", "readers": 1, "view": "other"}',
        '{"is": "ask", "request": 1, "readers": 1, "view": "pages"}',
        '{"is": "ask", "request": "r", "readers": true, "view": "pages"}',
        '{"is": "done", "request": "r", "readers": 4097}',
        '{"is": "gone", "request": "r", "reason": "w", "more": 1}',
        '{"is": "lent", "request": "r", "grants": [["xy"]]}',
        '{"is": "lent", "request": "r", "grants": [[1]]}',
        '{"is": "lent", "request": "r", "grants": "aa"}',
    ],
)
def test_bad_messages_are_refused(payload: str) -> None:
    with pytest.raises(ValueError, match="not a message"):
        messages.decode(payload.encode())


def test_options_are_checked() -> None:
    assert Settings.parse({}) == Settings()
    assert Settings.parse({"port": 26000}).listen_address(3) == "127.0.0.1:26003"
    assert Settings.parse({"host": "::1"}).listen_address(3) == "[::1]:0"
    for given, text in [
        ({"lease": 1}, "unknown option 'lease' of LlmDatadistConnector; allowed: host, port, lease_ms"),
        ({"port": "1"}, "option 'port' must be of type int, not '1'"),
        ({"port": True}, "option 'port' must be of type int, not True"),
        ({"port": 65_536}, "port=65536 is out of range; allowed: 0 to 65535"),
        ({"lease_ms": 0}, "lease_ms=0 is out of range; allowed: 1 to 4294967295"),
        ({"timeout_ms": 2**32}, "timeout_ms=4294967296 is out of range"),
        ({"host": ""}, "'host' must not be empty"),
        ({"engine_options": []}, "must be of type dict"),
        ({"spans": 1}, "option 'spans' must be of type bool, not 1"),
    ]:
        with pytest.raises(ValueError, match=text):
            Settings.parse(given)
    with pytest.raises(ValueError, match="port of rank 7=65537 is out of range"):
        Settings.parse({"port": 65_530}).listen_address(7)


def test_untested_versions_and_devices_are_refused() -> None:
    for version in ("0.32.0", "0.32", "0.32.1.post1"):
        check_vllm(allow_untested=False, found=version)
    for version in ("0.33.0", "0.3.2", "0.320.0", "unknown"):
        with pytest.raises(RuntimeError, match=f"not tested with vLLM {version}; tested: 0.32. .*allow_untested_vllm"):
            check_vllm(allow_untested=False, found=version)
        check_vllm(allow_untested=True, found=version)
    check_device("cpu")
    with pytest.raises(RuntimeError, match="'cuda'"):
        check_device("cuda")


def test_the_entry_point_does_no_harm_without_vllm() -> None:
    register()
    register()


def test_nothing_of_the_integrations_is_imported_unasked() -> None:
    program = "import sys, llm_datadist; print([name for name in sys.modules if 'integrations' in name])"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)  # noqa: S603
    assert done.stdout.strip() == "[]"
