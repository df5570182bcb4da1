"""The tier over a keeper without vLLM: stand-ins replace its classes. The keeper is a real one.

Not for: vLLM's own manager, and servers (`integration-tests/vllm/test_store_tier.py`).
"""

from __future__ import annotations

import hashlib
import importlib
import mmap
import os
import signal
import sys
import threading
import time
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Callable

import numpy as np
import pytest

import vllm_stand_ins as vllm
from keeper_process import serving, stopped
from llm_datadist import Error, InvalidArgument, Keeper
from peers import LIMIT, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

NAME = "llm_datadist.integrations.vllm.store_tier"
ROWS, ROW = 16, 4096
HIT, MISS = vllm.LookupResult.HIT, vllm.LookupResult.MISS
LOADS, STORES = "vllm:llm_datadist_tier_loads", "vllm:llm_datadist_tier_stores"
CONFIG = vllm.Config(
    (vllm.Group(16, ("layer 0", "layer 1"), 0),),
    vllm.Model("a model", "bfloat16"),
    vllm.Cache(16, 1),
    vllm.Parallel(2, 2, 1, 1, 1, False),
    "LBHNC",
    False,
    False,
)


def key(number: int, group: int = 0) -> bytes:
    """vLLM's key of a chunk."""
    return hashlib.sha256(b"%d" % number).digest() + group.to_bytes(4, "big")


def keys(count: int, first: int = 0) -> list[bytes]:
    return [key(number) for number in range(first, first + count)]


def request(name: str, wanted: list[bytes]) -> vllm.Context:
    return vllm.Context(name, {one: 16 * (at + 1) for at, one in enumerate(wanted)})


@pytest.fixture
def seed(monkeypatch: pytest.MonkeyPatch) -> vllm.Seed:
    return vllm.install(monkeypatch)


@pytest.fixture
def module(monkeypatch: pytest.MonkeyPatch, seed: vllm.Seed) -> Iterator[Any]:
    assert seed.get()
    monkeypatch.delitem(sys.modules, NAME, raising=False)
    yield importlib.import_module(NAME)
    sys.modules.pop(NAME, None)


class Tier:
    """A tier over a primary tier of its own, as its manager uses it."""

    def __init__(
        self, module: Any, socket: Path, rows: int = ROWS, config: Any = CONFIG, row: int = ROW, **options: Any
    ) -> None:
        self.memory = mmap.mmap(-1, rows * row)
        self.rows = np.frombuffer(self.memory, np.uint8).reshape(rows, row)
        self.view = memoryview(self.memory).cast("b", shape=[rows, row])
        options = {"socket": str(socket), "revision": "1", "timeout_ms": int(LIMIT * 1000), **options}
        self.tier = module.LlmDatadistStoreTier(vllm.Spec(config), self.view, "kept", **options)
        self.jobs = 0

    def begin(self, name: str, wanted: list[bytes]) -> vllm.Context:
        context = request(name, wanted)
        assert self.tier.on_new_request(context).policy == "chunk_level"
        return context

    def found(self, context: vllm.Context, wanted: list[bytes]) -> list[Any]:
        """Look keys up in a step of their own."""
        results = [self.tier.lookup(one, context) for one in wanted]
        self.tier.on_schedule_end(None)
        return results

    def submit(self, kind: str, context: vllm.Context, wanted: Any, rows: list[int]) -> int:
        self.jobs += 1
        job = vllm.TransferJob(self.jobs, wanted, np.array(rows, np.int32), kind == "load", context)
        (self.tier.submit_store if kind == "store" else self.tier.submit_load)(job)
        return self.jobs

    def reported(self, count: int) -> list[vllm.JobResult]:
        """Return what the tier reports until it has reported as many jobs, and check that no more follow."""
        results: list[vllm.JobResult] = []
        end = time.monotonic() + LIMIT
        while len(results) < count:
            assert time.monotonic() < end, results
            results += self.tier.get_finished_jobs()
        assert self.tier.get_finished_jobs() == []
        return results

    def run(self, kind: str, context: vllm.Context, wanted: Any, rows: list[int]) -> vllm.JobResult:
        job = self.submit(kind, context, wanted, rows)
        (result,) = self.reported(1)
        assert result.job_id == job
        assert result.transfer_time is not None
        assert result.transfer_time >= 0
        return result

    def counts(self) -> dict[tuple[str, str], float]:
        stats = self.tier.get_stats()
        return {} if stats is None else {(kind, *labels): count for (kind, labels), count in stats.counters.items()}

    def close(self) -> None:
        self.tier.shutdown()
        self.view.release()
        del self.rows
        self.memory.close()  # raises if a buffer of it is left


@pytest.fixture
def without_keeper(module: Any, socket: Path) -> Iterator[Callable[..., Tier]]:
    """A function that starts a tier. The test starts the keeper, if any."""
    started: list[Tier] = []

    def one(**options: Any) -> Tier:
        started.append(Tier(module, **{"socket": socket, **options}))
        return started[-1]

    yield one
    for each in started:
        each.close()


@pytest.fixture
def start(keeper: Keeper, without_keeper: Callable[..., Tier]) -> Callable[..., Tier]:
    assert keeper.slots
    return without_keeper


@pytest.fixture
def tier(start: Callable[..., Tier]) -> Tier:
    return start()


def filled(tier: Tier, wanted: list[bytes], name: str = "filled") -> vllm.Context:
    """Compute the chunks of a request, each with the first byte of its key, and store them."""
    context = tier.begin(name, wanted)
    for row, one in enumerate(wanted):
        tier.rows[row] = one[0]
    assert tier.run("store", context, wanted, list(range(len(wanted)))).success
    return context


def test_a_server_loads_what_another_one_has_stored(start: Callable[..., Tier]) -> None:
    one, other = start(), start()
    wanted = keys(3)
    filled(one, wanted)
    context = other.begin("r", keys(4))
    assert other.found(context, keys(4)) == [HIT, HIT, HIT, MISS]
    assert other.run("load", context, wanted, [5, 1, 9]).success
    assert [set(other.rows[row]) for row in (5, 1, 9)] == [{one[0]} for one in wanted]
    assert not other.rows[[0, 2, 3, 4, 6, 7, 8, 10, 11, 12, 13, 14, 15]].any()
    assert one.counts() == {(STORES, "done"): 3}
    assert other.counts() == {(LOADS, "done"): 3}
    assert other.counts() == {}


def test_keys_of_other_hashes(start: Callable[..., Tier]) -> None:
    """xxhash has 16 bytes, and SHA-512 would have 64."""
    for length in 16, 20, 24, 28, 32, 64:
        tier = start(revision=str(length))
        wanted = [hashlib.sha512(b"%d" % number).digest()[:length] + b"\0\0\0\1" for number in range(2)]
        other = [one[:-1] + b"\2" for one in wanted]
        filled(tier, wanted)
        assert tier.found(tier.begin("r", wanted + other), wanted + other) == [HIT, HIT, MISS, MISS]


def test_the_start_of_a_chain_stays_longest(without_keeper: Callable[..., Tier], socket: Path) -> None:
    """vLLM gives the keys of a store as a set. The keeper has room for four."""
    with Keeper(memory=4 * ROW, value=ROW, socket=socket) as keeper:
        assert keeper.slots == 4
        tier, wanted = without_keeper(), keys(8)
        context = tier.begin("r", wanted)
        rows = {one: row for row, one in enumerate(wanted)}
        given = set(wanted)
        tier.run("store", context, given, [rows[one] for one in given])
        other = keys(2, first=20)
        tier.run("store", tier.begin("s", other), other, [8, 9])
        assert tier.found(context, wanted) == [HIT] * 2 + [MISS] * 6


def test_jobs_of_more_chunks_than_a_call_has(without_keeper: Callable[..., Tier], socket: Path) -> None:
    count = 9_000
    with Keeper(memory="48MiB", value=ROW, socket=socket):
        tier, wanted = without_keeper(rows=count), keys(count)
        tier.rows[:] = np.arange(count, dtype=np.uint32).view(np.uint8).reshape(count, 4).repeat(ROW // 4, axis=1)
        expected = tier.rows.copy()
        context, given = tier.begin("r", wanted), set(wanted)
        row = {one: at for at, one in enumerate(wanted)}
        assert tier.run("store", context, given, [row[one] for one in given]).success
        assert tier.found(context, wanted) == [HIT] * count
        tier.rows[:] = 0
        assert tier.run("load", context, wanted, list(range(count))[::-1]).success
        assert (tier.rows[::-1] == expected).all()


def test_chunks_that_are_gone_are_missed_by_that_request_only(start: Callable[..., Tier]) -> None:
    """Otherwise vLLM would promote them again without end."""
    tier, wanted = start(), keys(4)
    filled(tier, wanted)
    context, other = tier.begin("r", wanted), tier.begin("s", wanted)
    assert tier.found(context, wanted) == [HIT] * 4
    tier.tier._store.drop([one[-28:] for one in wanted[2:]])
    result = tier.run("load", context, wanted, [8, 9, 10, 11])
    assert not result.success
    assert sorted(result.successful_keys) == sorted(wanted[:2])
    assert [set(tier.rows[row]) for row in (8, 9)] == [{one[0]} for one in wanted[:2]]
    assert tier.counts() == {(STORES, "done"): 4, (LOADS, "done"): 2, (LOADS, "absent"): 2}
    filled(tier, wanted, "again")
    assert tier.found(context, wanted) == [HIT, HIT, MISS, MISS]
    assert tier.found(other, wanted) == [HIT] * 4
    tier.tier.on_request_finished(context)
    assert tier.found(tier.begin("r", wanted), wanted) == [HIT] * 4, "another request with the same id"


def test_finished_requests_leave_nothing(tier: Tier) -> None:
    """Also those whose loads fail afterwards."""
    context = tier.begin("r", keys(1))
    tier.submit("load", context, keys(1), [0])
    tier.tier.on_request_finished(context)
    (result,) = tier.reported(1)
    assert not result.success
    assert (tier.tier._live, tier.tier._failed, tier.tier._running) == (set(), {}, {})
    assert not tier.tier._found
    assert not tier.tier._ended


@pytest.mark.parametrize("backwards", [False, True], ids=["prefix", "sliding window"])
def test_lookups_of_a_step_need_few_calls(start: Callable[..., Tier], backwards: bool) -> None:
    """vLLM looks one chunk up at a time, a prefix from its start, and a sliding window from its end."""
    tier, wanted = start(), keys(1000)
    there = set(wanted[990:] if backwards else wanted[:10])
    filled(tier, sorted(there))
    calls: list[int] = []

    def exists(asked: list[bytes]) -> list[bool]:
        calls.append(len(asked))
        return store.exists(asked)

    store = tier.tier._store
    tier.tier._store = SimpleNamespace(exists=exists, close=store.close)
    context = tier.begin("r", wanted)
    order = wanted[::-1] if backwards else wanted
    for _ in range(2):
        assert tier.found(context, order) == [HIT if one in there else MISS for one in order]
    assert sum(calls) <= 2 * 1000
    assert len(calls) <= 2 * (5 if backwards else 4)
    calls.clear()
    assert tier.found(context, wanted[500:501]) == [MISS]
    assert calls == [16], "a request whose first chunk is missing"
    calls.clear()
    assert tier.found(context, [key(5000)]) == [MISS]
    assert calls == [1], "a key that is not one of the request"


def test_each_step_asks_again(start: Callable[..., Tier]) -> None:
    """Another server may have stored the chunk meanwhile, or the keeper may have replaced it."""
    tier, wanted = start(), keys(2)
    context = tier.begin("r", wanted)
    assert tier.found(context, wanted) == [MISS, MISS]
    filled(start(), wanted)
    assert tier.found(context, wanted) == [HIT, HIT]
    tier.tier._store.drop([wanted[0][-28:]])
    assert tier.found(context, wanted) == [MISS, HIT]


def test_jobs_that_wait_too_long_fail_and_touch_no_row(module: Any, socket: Path) -> None:
    """vLLM pins the rows of a job until it is reported. The keeper is stopped, so the second job never begins."""
    with serving(socket) as keeper:
        tier = Tier(module, socket, timeout_ms=200)
        context = tier.begin("r", keys(2))
        with stopped(keeper):
            first, late = (tier.submit("store", context, [one], [row]) for row, one in enumerate(keys(2)))
            results = {result.job_id: result.success for result in tier.reported(2)}
            assert results == {first: False, late: False}
            # The first one may have ended a moment before the other one was late.
            counts = tier.counts()
            assert counts.pop((STORES, "away")) + counts.pop((STORES, "late"), 0) == 2
            assert counts == {}
        eventually(lambda: tier.tier._store.stats()["keeper"] is not None)
        assert tier.found(context, keys(2)[1:]) == [MISS]
        tier.close()


def test_a_keeper_that_comes_and_goes(
    without_keeper: Callable[..., Tier], socket: Path, caplog: pytest.LogCaptureFixture
) -> None:
    tier, wanted = without_keeper(), keys(3)
    context = tier.begin("r", wanted)
    for _ in range(3):
        assert tier.found(context, wanted) == [MISS] * 3
        assert not tier.run("store", context, wanted, [0, 1, 2]).success
        assert not tier.run("load", context, wanted, [0, 1, 2]).success
    assert tier.counts() == {(STORES, "away"): 9, (LOADS, "away"): 9}
    other = tier.begin("other", wanted)
    assert not tier.run("store", other, wanted, [0, 1, 2]).success
    with Keeper(memory="1MiB", value=ROW, socket=socket):
        eventually(lambda: tier.tier._store.stats()["keeper"] is not None)
        filled(tier, wanted, "s")
        assert tier.found(tier.begin("t", wanted), wanted) == [HIT] * 3
        assert tier.found(other, wanted) == [HIT] * 3, "only its stores have failed"
    assert tier.found(tier.begin("u", wanted), wanted) == [MISS] * 3
    assert not tier.run("store", context, wanted, [0, 1, 2]).success
    away = f"the keeper at {socket} is away, so nothing is found or stored: no process answers there"
    assert [text for text in caplog.messages if "keeper" in text] == [away, f"the keeper at {socket} is back", away]


def test_a_keeper_that_is_stopped(without_keeper: Callable[..., Tier], socket: Path) -> None:
    """Loads go on, because they read the memory of the keeper. Stores end at their time limit."""
    with serving(socket) as keeper:
        tier, other = without_keeper(timeout_ms=300), without_keeper()
        context = filled(other, keys(2))
        with stopped(keeper):
            assert other.found(context, keys(3)) == [HIT, HIT, MISS]
            assert other.run("load", context, keys(2), [8, 9]).success
            assert not other.run("load", context, [key(9)], [8]).success
            assert other.found(context, keys(3)) == [HIT, HIT, MISS], "why the load has failed was not asked"
            assert not tier.run("store", context, [key(9)], [0]).success
            assert tier.counts() == {(STORES, "away"): 1}
        eventually(lambda: tier.tier._store.stats()["keeper"] is not None)
        assert tier.found(tier.begin("r", keys(2)), keys(2)) == [HIT, HIT]


def test_loads_do_not_wait_for_a_store_at_a_stopped_keeper(without_keeper: Callable[..., Tier], socket: Path) -> None:
    """Also those that miss a chunk. All of them end before the time limit of the store."""
    with serving(socket) as keeper:
        tier = without_keeper(timeout_ms=8_000)
        context = filled(tier, keys(2))
        with stopped(keeper):
            store = tier.submit("store", context, [key(9)], [2])
            for _ in range(12):
                tier.submit("load", context, [*keys(2), key(8)], [8, 9, 10])
            results = tier.reported(12)
            assert store not in {result.job_id for result in results}
            assert all(sorted(result.successful_keys or ()) == sorted(keys(2)) for result in results)
        (result,) = tier.reported(1)
        assert result.job_id == store


def test_a_keeper_that_is_killed_while_it_stores(without_keeper: Callable[..., Tier], socket: Path) -> None:
    with serving(socket) as keeper:
        tier = without_keeper()
        context = tier.begin("r", keys(1))
        with stopped(keeper) as serves:
            tier.submit("store", context, keys(1), [0])
            keeper.kill()  # so that nothing starts another one
            os.kill(serves, signal.SIGKILL)
            (result,) = tier.reported(1)
            assert not result.success


class Broken:
    """A store whose calls raise."""

    def __getattr__(self, name: str) -> Any:
        def fail(*_given: Any, **_named: Any) -> None:
            raise RuntimeError(f"a fault of {name}")

        return fail

    def close(self) -> None: ...


def test_no_exception_reaches_the_scheduler(
    without_keeper: Callable[..., Tier], caplog: pytest.LogCaptureFixture
) -> None:
    """And no buffer of the primary tier stays in a traceback."""
    tier = without_keeper()
    tier.tier._store.close()
    tier.tier._store = Broken()
    context = tier.begin("r", keys(2))
    for _ in range(2):
        assert tier.found(context, keys(2)) == [MISS, MISS]
    assert not tier.run("store", context, keys(2), [0, 1]).success
    assert not tier.run("load", context, keys(2), [0, 1]).success
    assert tier.counts() == {(STORES, "failed"): 2, (LOADS, "failed"): 2}
    assert caplog.text.count("a fault of exists") == 1, "logged once"
    assert "a fault of start_put" in caplog.text
    assert "a fault of start_get" in caplog.text


def test_rows_that_do_not_exist_fail_their_jobs(tier: Tier, caplog: pytest.LogCaptureFixture) -> None:
    context = filled(tier, keys(2))
    for kind, rows in ("load", [0, ROWS]), ("store", [-1, 0]):
        assert not tier.run(kind, context, keys(2), rows).success
    assert tier.counts() == {(STORES, "done"): 2, (STORES, "failed"): 2, (LOADS, "failed"): 2}
    assert "rows[1]=16" in caplog.text
    assert "rows[0]=-1" in caplog.text


def test_an_unknown_event_loses_no_other_one(tier: Tier) -> None:
    context = tier.begin("r", keys(1))
    tier.tier._store.start_put([key(9)[-28:]], [bytes(ROW)])
    assert tier.run("store", context, keys(1), [0]).success


def test_many_ended_jobs_are_explained_once(start: Callable[..., Tier], monkeypatch: pytest.MonkeyPatch) -> None:
    tier, asked = start(), []
    noted = tier.tier._log.noted

    def note(store: Any, done: Any) -> Any:
        asked.append(done)
        return noted(store, done)

    monkeypatch.setattr(tier.tier._log, "noted", note)
    context = tier.begin("r", keys(5))
    for row, one in enumerate(keys(5)):
        tier.submit("load", context, [one], [row])
    for call in tier.tier._running:
        while not call.done():
            time.sleep(0.001)
    assert len(tier.reported(5)) == 5
    assert len(asked) == 1
    assert tier.counts() == {(LOADS, "absent"): 5}


class Stuck:
    """A call whose copy does not end until it is told."""

    ended = False
    nanos = 1

    def done(self) -> bool:
        return self.ended

    def result(self, _timeout: float) -> list[bool]:
        if not self.ended:
            raise TimeoutError
        return [True]


def stuck(tier: Tier) -> Stuck:
    """Have a store of the tier be stuck."""
    job = sys.modules[NAME]._Job(77, STORES, keys(1), "r", 1)
    call = Stuck()
    tier.tier._running[call] = job, keys(1)
    return call


def test_copies_that_outlast_their_store_are_reported(tier: Tier, seed: vllm.Seed) -> None:
    call = stuck(tier)
    seed.value = "random"
    context = filled(tier, keys(2))  # a new store
    assert tier.tier.get_finished_jobs() == []
    call.ended = True
    (result,) = tier.reported(1)
    assert (result.job_id, result.success) == (77, True)
    assert tier.run("load", context, keys(2), [8, 9]).success
    assert tier.tier._left == []


def test_shutdown_logs_copies_that_still_run(tier: Tier, caplog: pytest.LogCaptureFixture) -> None:
    call = stuck(tier)
    tier.tier.shutdown()
    assert "1 copies of the primary tier still run" in caplog.text
    call.ended = True
    (result,) = tier.reported(1)
    assert result.job_id == 77
    with pytest.raises(ValueError, match="released"):
        tier.tier._rows[0]


def refuse(*_given: Any, **_named: Any) -> None:
    raise RuntimeError("can't start new thread")


def test_no_thread_of_python_is_started(start: Callable[..., Tier], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", refuse)
    tier = start()
    context = filled(tier, keys(1))
    assert tier.run("load", context, keys(1), [8]).success


def test_calls_may_come_from_several_threads(start: Callable[..., Tier]) -> None:
    """vLLM 0.33 calls under a lock, and another tier may have it call from a thread of its own."""
    tier, wanted = start(), keys(4)
    results: list[Any] = []

    def use() -> None:
        context = filled(tier, wanted)
        results.append(tier.found(context, wanted))
        results.append(tier.run("load", context, wanted, [8, 9, 10, 11]).success)

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    use()
    assert results == [[HIT] * 4, True] * 2


def test_drain_waits_for_the_jobs_and_keeps_the_results(without_keeper: Callable[..., Tier], socket: Path) -> None:
    with serving(socket) as keeper:
        tier = without_keeper(timeout_ms=200)
        context = tier.begin("r", keys(2))
        with stopped(keeper):
            jobs = {tier.submit("store", context, [one], [row]) for row, one in enumerate(keys(2))}
            jobs.add(tier.submit("load", context, keys(1), [8]))
            tier.tier.drain_jobs()
            assert not tier.tier._running
            assert {result.job_id for result in tier.tier.get_finished_jobs()} == jobs
            tier.tier.drain_jobs()


def test_drain_does_not_wait_without_end(
    without_keeper: Callable[..., Tier], socket: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It must not return either: a copy still runs."""
    with serving(socket) as keeper:
        tier = without_keeper()
        with stopped(keeper):
            tier.submit("store", tier.begin("r", keys(1)), keys(1), [0])
            monkeypatch.setattr(tier.tier, "_timeout_s", 0.01)
            monkeypatch.setattr(sys.modules[NAME], "_GRACE_S", 0.02)
            with pytest.raises(RuntimeError, match=r"1 copies .* not ended within 0\.03 s"):
                tier.tier.drain_jobs()
        (result,) = tier.reported(1)
        assert result.success
        tier.tier.drain_jobs()


def test_shutdown_ends_what_runs_and_drops_all_buffers(
    without_keeper: Callable[..., Tier], socket: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM unmaps the primary tier right afterwards; `Tier.close` raises if a buffer is left. The keeper is stopped."""
    with serving(socket) as keeper:
        tier = without_keeper()
        context = tier.begin("r", keys(ROWS))
        with stopped(keeper):
            jobs = [tier.submit("store", context, [one], [row]) for row, one in enumerate(keys(ROWS))]
            began = time.monotonic()
            tier.tier.shutdown()
            assert time.monotonic() - began < LIMIT / 2, "as long as the time limit of a job"
    assert {(result.job_id, result.success) for result in tier.reported(len(jobs))} == {(job, False) for job in jobs}
    assert "has failed" not in caplog.text
    with pytest.raises(ValueError, match="released"):
        tier.tier._rows[0]
    tier.tier.shutdown()


def test_chunks_are_counted_once_when_the_store_is_closed(without_keeper: Callable[..., Tier]) -> None:
    """Its counts are not to be had then."""
    tier = without_keeper()
    context = tier.begin("r", keys(1))
    tier.run("store", context, keys(1), [0])
    tier.tier._store.close()
    assert tier.counts() == {(STORES, "away"): 1}
    tier.run("store", context, keys(1), [0])
    assert tier.counts() == {(STORES, "failed"): 1}


def test_calls_after_a_shutdown_find_nothing(tier: Tier) -> None:
    context = filled(tier, keys(1))
    tier.tier.shutdown()
    assert tier.found(context, keys(1)) == [MISS]
    assert not tier.run("store", context, keys(1), [0]).success
    assert not tier.run("load", context, keys(1), [0]).success
    tier.tier.drain_jobs()
    tier.begin("s", keys(1))


def changed(**given: Any) -> Any:
    """Return the configuration of another server."""
    values = {}
    for name, value in given.items():
        part, _, inner = name.partition("__")
        values[part] = getattr(CONFIG, part)._replace(**{inner: value}) if inner else value
    return CONFIG._replace(**values)


GROUP = CONFIG.groups[0]


@pytest.mark.parametrize(
    "other",
    [
        {"revision": "2"},
        {"config": changed(model__name="another model")},
        {"config": changed(model__dtype="fp8")},
        {"config": changed(cache__tokens_per_hash=32)},
        {"config": changed(cache__blocks_per_chunk=2)},
        {"config": changed(parallel__world_size=4)},
        {"config": changed(parallel__tp_size=1)},
        {"config": changed(parallel__pp_size=2)},
        {"config": changed(parallel__pcp_size=2)},
        {"config": changed(parallel__dcp_size=2)},
        {"config": changed(parallel__is_parallelism_agnostic=True)},
        {"config": changed(groups=(GROUP._replace(tokens_per_block=32),))},
        {"config": changed(groups=(GROUP._replace(layer_names=("layer 0",)),))},
        {"config": changed(groups=(GROUP._replace(group_id=1),))},
        {"config": changed(groups=(GROUP, GROUP._replace(group_id=1)))},
        {"config": changed(kv_cache_layout="LBNHC")},
        {"config": changed(canonical_layout=True)},
        {"config": changed(replicated_layout=True)},
        {"row": 2 * ROW, "rows": ROWS // 2},
    ],
    ids=str,
)
def test_servers_that_differ_share_nothing(module: Any, start: Callable[..., Tier], socket: Path, other: Any) -> None:
    filled(start(), keys(1))
    assert start().found(request("r", keys(1)), keys(1)) == [HIT]
    if "row" in other:
        with pytest.raises(InvalidArgument, match="8192"):
            Tier(module, socket, **other)
        assert text(module) != text(module, chunk_bytes=2 * ROW)
        return
    assert start(**other).found(request("r", keys(1)), keys(1)) == [MISS]


def text(module: Any, config: Any = CONFIG, revision: str = "1", chunk_bytes: int = ROW, seed: str = "s") -> str:
    found: str = module._namespace(config, revision, chunk_bytes, seed)
    return found


def test_servers_with_other_ranks_share_what_has_the_same_bytes(module: Any) -> None:
    """vLLM says when."""
    for name in "parallel__is_parallelism_agnostic", "replicated_layout":
        free = {name: True}
        same = changed(**free)
        parallel = same.parallel._replace(world_size=4, tp_size=4)
        assert text(module, same) == text(module, same._replace(parallel=parallel))
    assert text(module) != text(module, changed(parallel__world_size=4, parallel__tp_size=4))
    free = changed(parallel__is_parallelism_agnostic=True)
    assert text(module, free) != text(module, free._replace(replicated_layout=True)), (
        "one copy of the bytes, or several"
    )


def test_other_versions_of_vllm_share_nothing(module: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """They promise nothing about the bytes of the KV cache. Patch releases do."""
    first = text(module)
    monkeypatch.setattr(module, "installed", lambda: "0.32.5+cu130")
    assert text(module) == first
    monkeypatch.setattr(module, "installed", lambda: "0.33.0")
    assert text(module) != first
    monkeypatch.setattr(module, "installed", lambda: "unknown")
    with pytest.raises(ValueError, match="vllm must be known"):
        text(module)


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"revision": ""}, r"Expected `str` of length >= 1 - at `\$.revision`"),
        ({"socket": ""}, r"Expected `str` of length >= 1 - at `\$.socket`"),
        ({"config": changed(kv_cache_layout=None)}, "layout must be known"),
        ({"config": changed(kv_cache_layout=None, canonical_layout=True)}, "layout must be known"),
        ({"config": changed(model__name="")}, "model must be known"),
        ({"revision": 3}, r"Expected `str`, got `int` - at `\$.revision`"),
        ({"timeout_ms": 0}, "Expected `int` >= 1"),
        ({"path": "/tmp"}, "unknown field `path`; allowed: socket, revision, timeout_ms, checksums, token_file"),  # noqa: S108
        ({"locality": "HERE"}, "'HERE' is not a valid Locality"),
    ],
)
def test_wrong_options_are_refused(module: Any, socket: Path, options: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        Tier(module, **{"socket": socket, **options})


@pytest.mark.parametrize("missing", ["socket", "revision"])
def test_options_that_must_be_given(module: Any, missing: str) -> None:
    options = {"socket": "k", "revision": "1"}
    del options[missing]
    view = memoryview(bytearray(ROW)).cast("b", shape=[1, ROW])
    with pytest.raises(ValueError, match=f"options of LlmDatadistStoreTier: Object missing required field `{missing}`"):
        module.LlmDatadistStoreTier(vllm.Spec(CONFIG), view, **options)


def test_options_of_vllm(without_keeper: Callable[..., Tier]) -> None:
    tier = without_keeper(locality="LOCAL", backpressure_detector="detector").tier
    assert (tier.locality, tier.tier_type, tier.bp_detector) == (vllm.Locality.LOCAL, "kept", "detector")
    assert without_keeper().tier.locality is None


def test_a_keeper_with_smaller_values_is_refused(module: Any, socket: Path) -> None:
    """At the start, and not when nothing is found later."""
    with Keeper(memory="1MiB", value=ROW // 2, socket=socket), pytest.raises(InvalidArgument, match=r"4096.*2048"):
        Tier(module, socket)


def test_servers_with_other_hash_seeds_share_nothing(
    start: Callable[..., Tier], seed: vllm.Seed, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM chooses the seed after it has made its tiers, and before the first request."""
    first, second = start(), start()
    filled(first, keys(1))
    seed.value = "random"
    assert second.found(second.begin("r", keys(1)), keys(1)) == [MISS]
    filled(second, keys(2))
    third = start()
    assert third.found(third.begin("r", keys(3)), keys(3)) == [HIT, HIT, MISS]
    assert caplog.text == ""


def test_an_empty_hash_seed_is_one(
    start: Callable[..., Tier], seed: vllm.Seed, caplog: pytest.LogCaptureFixture
) -> None:
    """vLLM takes ``PYTHONHASHSEED=""`` as it is."""
    early, other = start(), start()
    filled(other, keys(2))
    seed.value = ""
    filled(early, keys(1))
    assert start().found(request("r", keys(2)), keys(2)) == [HIT, MISS]
    assert caplog.text == ""


def no_store(*_given: Any, **_named: Any) -> None:
    raise Error("no")


@pytest.mark.parametrize(
    ("name", "broken", "reason"),
    [("installed", lambda: "unknown", "ValueError: vllm must be known"), ("Store", no_store, "Error: no")],
    ids=["a namespace", "a store"],
)
def test_what_cannot_be_made_again_finds_nothing(
    without_keeper: Callable[..., Tier], module: Any, seed: vllm.Seed, monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture, name: str, broken: Any, reason: str,
) -> None:  # fmt: skip
    tier = without_keeper()
    monkeypatch.setattr(module, name, broken)
    seed.value = "random"
    for request_name in "r", "s":
        assert tier.found(tier.begin(request_name, keys(1)), keys(1)) == [MISS]
    assert f"has failed: {reason}" in caplog.text


def test_metrics_are_defined_before_anything_is_opened(
    module: Any, without_keeper: Callable[..., Tier], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Front ends of vLLM import the class for its metrics only. An undefined metric would end them."""
    tier = without_keeper()
    context = tier.begin("r", keys(1))
    tier.run("store", context, keys(1), [0])
    tier.run("load", context, keys(1), [0])
    monkeypatch.setattr(module, "Store", None)
    defined = module.LlmDatadistStoreTier.build_metric_definitions({"type": "LlmDatadistStoreTier"})
    assert {kind for kind, _ in tier.counts()} == set(defined)
    for metric in defined.values():
        assert metric.labelnames == ("result",)
    assert module.LlmDatadistStoreTier.medium is vllm.Medium.CPU


@pytest.mark.parametrize(
    ("owner", "name", "match"),
    [
        (vllm.SecondaryTierManager, "submit_load", "SecondaryTierManager has no submit_load"),
        (vllm.SecondaryTierManager, "block_size_bytes", "SecondaryTierManager has no block_size_bytes"),
        (vllm.Stats, "increase_counter", r"has no OffloadingConnectorStats\.increase_counter"),
    ],
)
def test_a_vllm_with_other_methods_is_refused(
    module: Any, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, match: str
) -> None:
    monkeypatch.delattr(owner, name)
    monkeypatch.delitem(sys.modules, module.__name__)
    with pytest.raises(RuntimeError, match=match):
        importlib.import_module(module.__name__)


def test_untested_versions_run_with_a_warning(
    without_keeper: Callable[..., Tier], module: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "installed", lambda: "0.0.9")
    without_keeper()
    assert "llm_datadist was not tested with vLLM 0.0.9" in caplog.text
