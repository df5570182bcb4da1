"""vLLM's real manager, and whole servers on a CPU, over a keeper: chunks outlive a server and are shared by servers.

Not for: the tier alone (`tests/test_vllm_store_tier.py`), and a GPU, which only vLLM's own worker would read.
"""

from __future__ import annotations

import contextlib
import random
import subprocess
import sys
import time
from collections import Counter
from typing import TYPE_CHECKING, Any

import pytest
from p2p_scheduler import IDLE, Scheduler, keys, load
from servers import Server
from vllm.v1.kv_offload.base import LookupResult
from vllm.v1.kv_offload.tiering.factory import SecondaryTierFactory
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from conftest import TOKENS
from llm_datadist import Keeper, Store
from llm_datadist.integrations.vllm import register, store_tier

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator
    from pathlib import Path

    from conftest import Start

HIT, PENDING, MISS = LookupResult.HIT, LookupResult.HIT_PENDING, LookupResult.MISS
LIMIT_S = 60.0
Prompts = dict[str, list[int]]


@pytest.fixture
def socket(tmp_path: Path) -> Path:
    return tmp_path / "keeper"


def tier(socket: Path, **options: Any) -> dict[str, Any]:
    return {"type": "LlmDatadistStoreTier", "socket": str(socket), "revision": "1", **options}


@contextlib.contextmanager
def serving(socket: Path, value: str = "64KiB") -> Iterator[subprocess.Popen[str]]:
    """Run a keeper, and kill it at the end."""
    options = ("--memory", "64MiB", "--value", value, "--socket", str(socket))
    command = (sys.executable, "-m", "llm_datadist", "serve", *options)
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as started:  # noqa: S603
        try:
            assert started.stdout is not None
            assert started.stdout.readline().startswith("ready: ")
            yield started
        finally:
            started.kill()


@pytest.fixture
def scheduler(socket: Path) -> Iterator[Callable[..., Scheduler]]:
    """Starts schedulers whose tier has that socket."""
    started: list[Scheduler] = []

    def one(options: dict[str, Any] | None = None, **given: Any) -> Scheduler:
        started.append(Scheduler(tier(socket, **(options or {})), **given))
        return started[-1]

    yield one
    for each in started:
        each.close()


def serve(scheduler: Scheduler, name: str, count: int) -> None:
    """Compute a request, and step until its chunks are stored or not."""
    context = scheduler.begin(name)
    scheduler.store(context, keys(name, count))
    scheduler.finish(context)
    drain(scheduler)


def drain(scheduler: Scheduler) -> None:
    end = time.monotonic() + LIMIT_S
    while scheduler.manager.has_pending_work():
        assert time.monotonic() < end
        scheduler.step()
    assert scheduler.manager._jobs == {}


def attach(scheduler: Scheduler) -> None:
    """Wait until the store of a tier has attached again."""
    end = time.monotonic() + LIMIT_S
    while scheduler.tier._store.stats()["keeper"] is None:
        assert time.monotonic() < end
        time.sleep(0.01)


def outcomes(scheduler: Scheduler) -> list[bool]:
    """What the tier has reported, each job once."""
    jobs = Counter(result.job_id for result in scheduler.reported)
    assert set(jobs.values()) <= {1}, jobs
    return [result.success for result in scheduler.reported]


@pytest.mark.subset
def test_a_scheduler_finds_what_another_one_has_stored(scheduler: Callable[..., Scheduler], socket: Path) -> None:
    with Keeper(memory="8MiB", socket=socket):
        one, other = scheduler(), scheduler()
        serve(one, "r", 16)
        wanted = other.begin("r")
        assert other.found(wanted, 16) == [PENDING] * 16, "found in the same step"
        assert load(other, wanted, 16) == [HIT] * 16
        assert other.equal(wanted, 16)
        assert outcomes(one) == outcomes(other) == [True]
        assert other.found(other.begin("s"), 16) == [MISS]


@pytest.mark.subset
def test_a_restarted_scheduler_is_warm(scheduler: Callable[..., Scheduler], socket: Path) -> None:
    with Keeper(memory="8MiB", socket=socket):
        first = Scheduler(tier(socket))
        serve(first, "r", 16)
        first.close()
        again = scheduler()
        wanted = again.begin("r")
        assert load(again, wanted, 16) == [HIT] * 16
        assert again.equal(wanted, 16)


@pytest.mark.subset
def test_lookups_of_a_long_request_need_few_calls(scheduler: Callable[..., Scheduler], socket: Path) -> None:
    with Keeper(memory="8MiB", value=4096, socket=socket):
        one, other = scheduler(row=4096, chunks=1100), scheduler(row=4096, chunks=1100)
        serve(one, "r", 1000)
        calls: list[int] = []
        exists = other.tier._store.exists

        class Counting:
            def exists(self, asked: list[bytes]) -> list[bool]:
                calls.append(len(asked))
                found: list[bool] = exists(asked)
                return found

            def __getattr__(self, name: str) -> Any:
                return getattr(store, name)

        store = other.tier._store
        other.tier._store = Counting()
        wanted = other.begin("r")
        assert other.found(wanted, 1000) == [PENDING] * 1000
        assert calls == [16, 64, 256, 664]
        assert load(other, wanted, 1000) == [HIT] * 1000
        assert other.equal(wanted, 1000)


@pytest.mark.subset
@pytest.mark.parametrize(
    "given", [{"options": {"revision": "2"}}, {"name": "another model"}, {"dtype": "bfloat16"}], ids=str
)
def test_schedulers_of_other_models_share_nothing(
    scheduler: Callable[..., Scheduler], socket: Path, given: dict[str, Any]
) -> None:
    with Keeper(memory="8MiB", socket=socket):
        one, other = scheduler(), scheduler(**given)
        serve(one, "r", 4)
        assert other.found(other.begin("r"), 4) == [MISS]


@pytest.mark.subset
def test_chunks_that_vanish_after_the_lookup_are_computed(scheduler: Callable[..., Scheduler], socket: Path) -> None:
    """The request misses them from then on, and is not held for ever."""
    with Keeper(memory="8MiB", socket=socket):
        one, other = scheduler(), scheduler()
        serve(one, "r", 8)
        wanted = other.begin("r")
        assert other.found(wanted, 8) == [PENDING] * 8
        other.tier._store.drop([key[-28:] for key in keys("r", 8)[5:]])
        assert load(other, wanted, 8) == [*[HIT] * 5, MISS]
        assert outcomes(other) == [False]
        drain(other)
        for _ in range(50):
            assert other.found(wanted, 8) == [*[HIT] * 5, MISS]
            other.step()
        assert outcomes(other) == [False]
        assert other.equal(wanted, 5)
        other.finish(wanted)


def test_a_full_primary_tier(scheduler: Callable[..., Scheduler], socket: Path) -> None:
    """Only what fits is promoted."""
    with Keeper(memory="8MiB", socket=socket):
        one, other = scheduler(), scheduler(chunks=4)
        serve(one, "r", 8)
        wanted = other.begin("r")
        assert other.found(wanted, 8) == [*[PENDING] * 4, MISS]
        other.step()
        drain(other)
        assert outcomes(other) == [True]


@pytest.mark.subset
def test_a_scheduler_without_a_keeper(scheduler: Callable[..., Scheduler], socket: Path) -> None:
    one = scheduler()
    serve(one, "r", 8)
    assert one.found(one.begin("s"), 4) == [MISS]
    assert outcomes(one) == [False]
    with Keeper(memory="8MiB", socket=socket):
        attach(one)
        serve(one, "t", 8)
        assert outcomes(one) == [False, True]


def test_keepers_that_are_killed_at_any_time(scheduler: Callable[..., Scheduler], socket: Path) -> None:
    """A load succeeds with its bytes or fails, and no job stays."""
    rng = random.Random(1)  # noqa: S311 - not a secret
    chunks, row = 64, 1 << 20
    one, other = (scheduler({"timeout_ms": 5000}, chunks=chunks, row=row) for _ in range(2))
    seen = Counter[bool]()
    for number in range(10):
        with serving(socket, "1MiB") as keeper:
            for each in (one, other):
                attach(each)
            name = f"r{number}"
            serve(one, name, 32)
            wanted = other.begin(name)
            other.found(wanted, 32)
            other.step()
            context = one.begin(f"s{number}")
            one.store(context, keys(f"s{number}", 16))
            kill_at = time.monotonic() + rng.uniform(0.0, 0.03)
            while time.monotonic() < kill_at:
                other.step()
            keeper.kill()
            found = load(other, wanted, 32)
            whole = len(found) if found[-1] is HIT else len(found) - 1
            seen[whole == 32] += 1
            if whole:
                assert other.equal(wanted, whole)
            other.finish(wanted)
            one.finish(context)
            drain(one)
            drain(other)
            outcomes(one)
            outcomes(other)
    assert seen.total() == 10


@pytest.mark.subset
def test_reset_leaves_no_job_and_keeps_the_keeper(scheduler: Callable[..., Scheduler], socket: Path) -> None:
    """`reset_cache`, as for sleep, while chunks are on their way."""
    with Keeper(memory="8MiB", socket=socket):
        one = scheduler()
        context = one.begin("r")
        one.store(context, keys("r", 16))
        one.finish(context)
        one.manager.reset_cache()
        if hasattr(one.manager, "on_reset_flushed"):  # from vLLM 0.33 on
            one.manager.on_reset_flushed()
        assert one.manager._jobs == {}
        assert outcomes(one) == [True]
        wanted = one.begin("r")
        assert load(one, wanted, 16) == [HIT] * 16
        assert one.equal(wanted, 16)


@pytest.mark.subset
def test_shutdown_frees_the_primary_tier(socket: Path, caplog: pytest.LogCaptureFixture) -> None:
    with Keeper(memory="8MiB", socket=socket):
        one = Scheduler(tier(socket))
        context = one.begin("r")
        one.store(context, keys("r", 16))
        mapped = one.manager.primary_tier._mmap_region.mmap_obj
        one.close()
        with pytest.raises(ValueError, match="released"):
            one.view[0, 0]
        assert mapped.closed
    assert "Failed" not in caplog.text


@pytest.mark.subset
def test_the_name_is_known_and_cheap(monkeypatch: pytest.MonkeyPatch, socket: Path) -> None:
    """Front ends of vLLM import the class for its metrics. They must not open a store."""

    def refuse(*_given: Any, **_options: Any) -> None:
        raise AssertionError("a store was opened")

    register()
    monkeypatch.setattr(store_tier, "Store", refuse)
    found = SecondaryTierFactory.get_tier_class(tier(socket))
    assert found is store_tier.LlmDatadistStoreTier
    assert found.__abstractmethods__ == frozenset()
    assert set(found.build_metric_definitions({})) <= set(
        TieringOffloadingSpec.build_metric_definitions({"secondary_tiers": [tier(socket)]})
    )
    assert IDLE.new_req_ids == ()


def kept(socket: Path, block_size: int = 32, **options: Any) -> dict[str, Any]:
    """The configuration of a server whose offloading has a keeper behind its primary tier."""
    extra = {
        "spec_name": "CpuTieringSpec",
        "spec_module_path": "cpu_tiering",
        "cpu_bytes_to_use": 64 << 20,
        "block_size": block_size,
        "secondary_tiers": [tier(socket, **options)],
    }
    return {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}


Tokens = dict[str, list[int]]


@pytest.fixture(scope="module")
def first(prompts: Prompts) -> Prompts:
    """Prompts of all lengths."""
    return dict(list(prompts.items())[:8])


@pytest.fixture(scope="module")
def second(prompts: Prompts) -> Prompts:
    """Other prompts of all lengths."""
    return dict(list(prompts.items())[8:16])


@pytest.fixture(scope="module")
def plain(model: str, first: Prompts, second: Prompts) -> Tokens:
    """The tokens of one vLLM without offloading."""
    server = Server(model).wait()
    found = answers(server, {**first, **second})[0]
    server.stop()
    return found


def answers(server: Server, prompts: Prompts) -> tuple[Tokens, int]:
    """Compute prompts one after the other. Return their tokens, and how many tokens of prompts were not computed."""
    found: Tokens = {}
    cached = 0
    for name, prompt in prompts.items():
        server.add(name, prompt, TOKENS)
        done = server.result()[1]
        found[name] = done.tokens
        cached += done.cached
    return found, cached


def whole(prompts: Prompts, chunk: int) -> int:
    """The tokens of the prompts that are in whole chunks."""
    return sum(len(prompt) // chunk * chunk for prompt in prompts.values())


def wait_for(socket: Path, prompts: Prompts, chunk: int) -> None:
    """Wait until the keeper has the chunks of prompts."""
    end = time.monotonic() + LIMIT_S
    with Store(socket, namespace="the test", value="64KiB") as store:
        while (stats := store.stats()["keeper"])["values"] < whole(prompts, chunk) // chunk:
            assert time.monotonic() < end, stats
            time.sleep(0.05)


def same(found: Tokens, plain: Tokens) -> bool:
    return found == {name: plain[name] for name in found}


@pytest.mark.subset
def test_servers_share_a_keeper(start: Start, socket: Path, first: Prompts, second: Prompts, plain: Tokens) -> None:
    """Two servers find the prompts of each other, one with other weights finds nothing, and one that starts when both
    have ended finds everything, until the keeper is killed. All give the tokens of a vLLM without offloading."""
    with serving(socket, "128KiB") as keeper:
        servers = [start.configured(kept(socket), enable_prefix_caching=True) for _ in range(2)]
        one, other = (server.wait() for server in servers)
        found, cached = answers(one, first)
        assert same(found, plain)
        assert cached == 0
        wait_for(socket, first, 32)
        found, cached = answers(other, first)
        assert same(found, plain)
        assert cached > 0.9 * whole(first, 32)
        found, cached = answers(other, second)
        assert same(found, plain)
        assert cached == 0
        wait_for(socket, {**first, **second}, 32)
        found, cached = answers(one, second)
        assert same(found, plain)
        assert cached > 0.9 * whole(second, 32)
        one.stop()
        other.stop()

        third = start.configured(kept(socket, revision="2"), enable_prefix_caching=True).wait()
        found, cached = answers(third, first)
        assert same(found, plain)
        assert cached == 0
        third.stop()

        again = start.configured(kept(socket), enable_prefix_caching=True).wait()
        found, cached = answers(again, first)
        assert same(found, plain)
        assert cached > 0.9 * whole(first, 32)
        keeper.kill()
        keeper.wait(LIMIT_S)
        found, cached = answers(again, second)
        assert same(found, plain)
        assert cached == 0
        again.stop()


def test_chunks_of_several_blocks(start: Start, socket: Path, first: Prompts, plain: Tokens) -> None:
    with serving(socket, "256KiB"):
        for warm in False, True:
            server = start.configured(kept(socket, block_size=64), enable_prefix_caching=True).wait()
            found, cached = answers(server, first)
            assert same(found, plain)
            assert cached > 0.9 * whole(first, 64) if warm else cached == 0
            wait_for(socket, first, 64)
            server.stop()


def test_wrong_chunks_give_other_tokens(start: Start, socket: Path, first: Prompts, plain: Tokens) -> None:
    """Otherwise the comparison of tokens would prove nothing."""
    swapped = {"type": "ChunksSwapped", "module_path": "cpu_tiering"}
    with serving(socket, "128KiB"):
        one = start.configured(kept(socket, **swapped), enable_prefix_caching=True).wait()
        assert same(answers(one, first)[0], plain)
        wait_for(socket, first, 32)
        one.stop()
        other = start.configured(kept(socket), enable_prefix_caching=True).wait()
        found, cached = answers(other, first)
        assert cached > 0.9 * whole(first, 32)
        assert not same(found, plain)
        other.stop()
