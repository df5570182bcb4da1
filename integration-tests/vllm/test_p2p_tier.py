"""vLLM's real manager, tiers and peer-to-peer protocol over the engine, without a model: schedulers exchange chunks.
`p2p_scheduler` drives them as vLLM does.

Not for: a model, whose blocks vLLM would copy between the primary tier and a GPU.
"""

from __future__ import annotations

import random
import signal
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
from p2p_scheduler import IDLE, Other, Scheduler, keys, load, resolved
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.p2p import manager as vllm_p2p
from vllm.v1.kv_offload.tiering.p2p.data import DataTransport, NixlTransport
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from llm_datadist.integrations.vllm import register

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

HIT, MISS = LookupResult.HIT, LookupResult.MISS
TIER = {"type": "LlmDatadistP2PTier"}
# Longer than vLLM waits for an abort (30 s and 10 s).
LIMIT_S = 60.0


@pytest.fixture
def start() -> Iterator[Callable[..., Scheduler]]:
    started: list[Scheduler] = []

    def one(**given: Any) -> Scheduler:
        tier = {**TIER, **given.pop("tier", {})}
        started.append(Scheduler(tier, **given))
        return started[-1]

    yield one
    for each in started:
        if hasattr(each, "rows"):
            each.close()


@pytest.fixture
def other() -> Iterator[Callable[..., Other]]:
    started: list[Other] = []

    def one(*given: Any, **options: Any) -> Other:
        started.append(Other(TIER, *given, **options))
        return started[-1]

    yield one
    for each in started:
        each.kill()


def outcomes(scheduler: Scheduler) -> list[bool]:
    """What the tier has reported. It must have reported each job once, and no job may be open."""
    jobs = Counter(result.job_id for result in scheduler.reported)
    assert set(jobs.values()) <= {1}, jobs
    return [result.success for result in scheduler.reported]


def until_closed(scheduler: Scheduler, limit_s: float = LIMIT_S) -> None:
    """Step until all jobs were reported."""
    end = time.monotonic() + limit_s
    while scheduler.manager._jobs:
        assert time.monotonic() < end, scheduler.manager._jobs
        scheduler.step()


@pytest.mark.subset
def test_a_decoder_fetches_the_chunks_of_a_request(start: Callable[..., Scheduler]) -> None:
    prefill, decode = start(), start()
    assert isinstance(prefill.tier._data, DataTransport)
    assert not isinstance(prefill.tier._data, NixlTransport)
    assert vllm_p2p.NixlTransport is NixlTransport
    served = prefill.serve("r", 16)
    wanted = decode.fetch("r", prefill.address)
    assert load(decode, wanted, 16, (prefill,)) == [HIT] * 16
    assert decode.equal(wanted, 16)
    decode.finish(wanted)
    prefill.finish(served)
    until_closed(prefill)
    assert outcomes(decode) == outcomes(prefill) == [True]


@pytest.mark.subset
def test_peers_find_the_chunks_of_each_other(start: Callable[..., Scheduler]) -> None:
    """Symmetric peers: lookups are messages, a miss is a miss, and chunks are in both primary tiers afterwards."""
    one, two = start(), start()
    for owner, name in ((one, "a"), (two, "b")):
        context = owner.begin(name)
        owner.store(context, keys(name, 6))
        owner.finish(context)
    for asker, owner, name in ((two, one, "a"), (one, two, "b")):
        wanted = asker.fetch(name, owner.address, "remote_kv_source")
        assert load(asker, wanted, 6, (owner,)) == [HIT] * 6
        assert asker.equal(wanted, 6)
        asker.finish(wanted)
    missing = one.fetch("c", two.address, "remote_kv_source")
    assert load(one, missing, 3, (two,)) == [MISS]
    one.finish(missing)
    for each in (one, two):
        until_closed(each)


def test_peers_name_each_other_by_several_addresses(start: Callable[..., Scheduler]) -> None:
    """Requests name `localhost`, and the peers name themselves `127.0.0.1`."""
    one, two = start(), start()
    for round_number, (asker, owner) in enumerate(((one, two), (two, one), (one, two))):
        owner.serve(f"r{round_number}", 4)
        wanted = asker.fetch(
            f"r{round_number}", owner.address.replace("127.0.0.1", "localhost" if round_number else "127.0.0.1")
        )
        assert load(asker, wanted, 4, (owner,)) == [HIT] * 4
        assert asker.equal(wanted, 4)
    assert len(one.tier._sessions) == len(two.tier._sessions) == 1
    for each in (one, two):
        until_closed(each)
        assert set(outcomes(each)) == {True}


def test_chunks_may_be_computed_after_the_fetch(start: Callable[..., Scheduler]) -> None:
    """Prefill stores in four parts, while decode waits. Each part moves at once."""
    prefill, decode = start(), start()
    served = prefill.begin("r", remote_decoder={"kv_request_id": "r"})
    wanted = decode.fetch("r", prefill.address)
    for part in range(4):
        decode.found(wanted, 16)
        for _ in range(50):
            decode.step()
            prefill.step()
        assert outcomes(decode) == []
        prefill.store(served, keys("r", 16)[4 * part : 4 * part + 4])
    assert load(decode, wanted, 16, (prefill,)) == [HIT] * 16
    assert decode.equal(wanted, 16)
    assert outcomes(decode) == [True]
    until_closed(prefill)
    assert outcomes(prefill) == [True] * 4


@pytest.mark.parametrize(
    "tier", [{}, {"engine_options": {"max_transfers": 3}}, {"engine_options": {"transport": "tcp"}}]
)
def test_many_requests_between_three_schedulers(start: Callable[..., Scheduler], tier: dict[str, Any]) -> None:
    """Also with more loads than the engine may have transfers, and over sockets."""
    schedulers = [start(tier=tier, chunks=400) for _ in range(3)]
    loads = []
    for number in range(60):
        owner, asker = random.Random(number).sample(schedulers, 2)  # noqa: S311 - not a secret
        owner.serve(f"r{number}", 5)
        loads.append((asker, asker.fetch(f"r{number}", owner.address)))
    end = time.monotonic() + LIMIT_S
    while not all(resolved(asker.found(context, 5), 5) for asker, context in loads):
        assert time.monotonic() < end
        for each in schedulers:
            each.step()
    for asker, context in loads:
        assert asker.found(context, 5) == [HIT] * 5
        assert asker.equal(context, 5)
    for each in schedulers:
        until_closed(each)
        assert set(outcomes(each)) == {True}


def test_a_scheduler_that_is_killed_before_it_serves(
    start: Callable[..., Scheduler], other: Callable[..., Other]
) -> None:
    prefill, decode = other({"r": 16, "s": 1}), start()
    first = decode.fetch("s", prefill.address)
    assert load(decode, first, 1) == [HIT]
    prefill.signal(signal.SIGSTOP)
    wanted = decode.fetch("r", prefill.address)
    decode.found(wanted, 16)
    decode.step()
    assert len(decode.manager._jobs) == 1
    prefill.kill()
    assert load(decode, wanted, 16) == [MISS]
    until_closed(decode)
    assert outcomes(decode) == [True, False]
    for _ in range(100):
        decode.step()
        assert decode.found(wanted, 16) == [MISS]
    outcomes(decode)


def test_schedulers_that_are_killed_at_any_time(start: Callable[..., Scheduler], other: Callable[..., Other]) -> None:
    """A load either succeeds with its bytes or fails, and later loads from another scheduler work."""
    decode, seen = start(row=1 << 20, chunks=100), set()
    rng = random.Random(1)  # noqa: S311 - not a secret
    for round_number in range(12):
        name = f"r{round_number}"
        prefill = other({name: 64}, row=1 << 20, chunks=70)
        wanted = decode.fetch(name, prefill.address)
        while not decode.tier._sessions[prefill.address].ready:
            decode.step()
        decode.found(wanted, 64)
        decode.step()
        kill_at = time.monotonic() + rng.uniform(0.0, 0.04)
        while time.monotonic() < kill_at:
            decode.step()
        prefill.kill()
        results = load(decode, wanted, 64)
        assert results in ([MISS], [HIT] * 64)
        if results != [MISS]:
            assert decode.equal(wanted, 64)
        seen.add(results[0])
        decode.finish(wanted)
        until_closed(decode)
    outcomes(decode)
    prefill = other({"last": 4}, row=1 << 20)
    wanted = decode.fetch("last", prefill.address)
    assert load(decode, wanted, 4) == [HIT] * 4
    assert decode.equal(wanted, 4)


def test_a_decoder_that_ends_leaves_prefill_alone(start: Callable[..., Scheduler]) -> None:
    """Prefill fails the store, unpins the chunks, and serves the next decoder."""
    prefill, decode = start(), start()
    served = prefill.serve("r", 8)
    wanted = decode.fetch("r", prefill.address)
    decode.found(wanted, 8)
    for _ in range(200):
        decode.step()
        prefill.step()
        if prefill.tier._data.links.writes._writes:
            break
    decode.close()  # between the offer and the pull
    until_closed(prefill)
    assert outcomes(prefill) == [False]
    prefill.finish(served)
    again = start()
    prefill.serve("s", 8)
    wanted = again.fetch("s", prefill.address)
    assert load(again, wanted, 8, (prefill,)) == [HIT] * 8
    assert again.equal(wanted, 8)


@pytest.mark.parametrize("stopped_s", [1.0, None])
def test_a_scheduler_that_is_slow_or_stopped(
    start: Callable[..., Scheduler], other: Callable[..., Other], stopped_s: float | None
) -> None:
    prefill, decode = other({"r": 16, "s": 1}), start()
    assert load(decode, decode.fetch("s", prefill.address), 1) == [HIT]
    prefill.signal(signal.SIGSTOP)
    wanted = decode.fetch("r", prefill.address)
    decode.found(wanted, 16)
    end = time.monotonic() + (stopped_s or LIMIT_S)
    while time.monotonic() < end and not resolved(decode.found(wanted, 16), 16):
        decode.step()
    prefill.signal(signal.SIGCONT)
    if stopped_s is None:
        assert decode.found(wanted, 16) == [MISS]
        assert outcomes(decode) == [True, False]
    else:
        assert load(decode, wanted, 16) == [HIT] * 16
        assert decode.equal(wanted, 16)
        assert outcomes(decode) == [True, True]


def test_peers_that_are_not_allowed(start: Callable[..., Scheduler]) -> None:
    prefill = start()
    prefill.serve("r", 4)
    strict = start(tier={"allowed_peers": ["10.0.0.0/8"]})
    wanted = strict.fetch("r", prefill.address)
    assert strict.found(wanted, 4) == [MISS]
    assert strict.tier._sessions == {}
    # Here vLLM's control connection is allowed, and the link of the engine is not.
    strict = start(tier={"allowed_peers": [prefill.address]})
    wanted = strict.fetch("r", prefill.address)
    assert load(strict, wanted, 4, (prefill,)) == [MISS]
    until_closed(strict)
    assert outcomes(strict) == [False]
    assert (strict.rows == 0).all()


@pytest.mark.parametrize("given", [{"row": 128 << 10}, {"name": "another model"}])
def test_peers_that_do_not_fit(start: Callable[..., Scheduler], given: dict[str, Any]) -> None:
    prefill, decode = start(), start(**given)
    prefill.serve("r", 4)
    wanted = decode.fetch("r", prefill.address)
    assert load(decode, wanted, 4, (prefill,)) == [MISS]
    until_closed(decode)
    assert outcomes(decode) == [False]
    assert (decode.rows == 0).all()


def test_reset_leaves_no_job(start: Callable[..., Scheduler]) -> None:
    """`reset_cache`, as for a weight update, while the chunks are on their way."""
    prefill, decode = start(), start()
    prefill.serve("r", 16)
    wanted = decode.fetch("r", prefill.address)
    decode.found(wanted, 16)
    for _ in range(1000):
        decode.step()
        prefill.step()
        if decode.tier._data.links.reads._running:
            break
    while decode.tier._data.links.reads._running:
        prefill.step()
        decode.tier._data.poll()
    for _ in range(20):
        prefill.step()
    decode.manager.reset_cache()
    assert decode.manager._jobs == {}
    outcomes(decode)
    assert decode.found(decode.begin("again"), 1) == [MISS]


def test_shutdown_drops_the_primary_tier(
    start: Callable[..., Scheduler], caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("vllm.v1.kv_offload.cpu.shared_offload_region.logger.propagate", True, raising=False)
    prefill, decode = start(), start()
    prefill.serve("r", 16)
    wanted = decode.fetch("r", prefill.address)
    decode.found(wanted, 16)
    decode.step()
    for each in (prefill, decode):
        region = each.manager.primary_tier._mmap_region
        path, mapped = region.mmap_path, region.mmap_obj
        each.close()
        with pytest.raises(ValueError, match="released"):
            each.view[0, 0]
        assert mapped.closed
        assert not Path(path).exists()
    assert "Failed to close" not in caplog.text


def test_a_scheduler_ends_cleanly(other: Callable[..., Other], start: Callable[..., Scheduler]) -> None:
    prefill, decode = other({"r": 4}), start()
    assert load(decode, decode.fetch("r", prefill.address), 4) == [HIT] * 4
    assert prefill.end() == 0


@pytest.mark.subset
def test_the_name_is_known_and_cheap(monkeypatch: pytest.MonkeyPatch) -> None:
    """Front ends of vLLM import the class for its metrics. They must not open an engine."""

    def refuse(**_options: Any) -> None:
        raise AssertionError("an engine was opened")

    register()
    monkeypatch.setattr("llm_datadist.integrations.vllm.p2p_links.Engine", refuse)
    found = SecondaryTierFactory.get_tier_class(TIER)
    assert issubclass(found, vllm_p2p.P2PSecondaryTierManager)
    assert found.__abstractmethods__ == frozenset()
    module = "llm_datadist.integrations.vllm.p2p_tier"
    assert SecondaryTierFactory.get_tier_class({"type": "LlmDatadistP2PTier", "module_path": module}) is found
    assert TieringOffloadingSpec.build_metric_definitions({"secondary_tiers": [TIER]})
    assert IDLE.new_req_ids == ()
