"""Several engines of one process: each has its own pools, caches, links and counters, and they share their threads."""

from __future__ import annotations

import gc
import threading
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from llm_datadist import LLMConfig, LLMDataDist, LLMRole
from llm_datadist.native import Completed, Engine, NotFound, PeerLost, PeerUp
from peers import eventually

from .helpers import LIMIT, Model, address, allocate, contents, fails, next_of, of, refused

if TYPE_CHECKING:
    from .conftest import Open, Pair

OF_LINKS = {"llm-serve", "llm-control"}  # an engine that listens or is linked has its own


def threads() -> Counter[str]:
    """The threads of the engines of this process, by name."""
    found: Counter[str] = Counter()
    for task in Path("/proc/self/task").iterdir():
        with suppress(OSError):  # it has ended meanwhile
            found[(task / "comm").read_text().strip()] += 1
    return Counter({name: count for name, count in found.items() if name.startswith("llm-") and name != "llm-log"})


def work(engine: Engine) -> None:
    """Have an engine use its workers and its copy workers."""
    kv, host = (allocate(engine, pool, pool=pool, blocks=16, shape=(16384,), tensors=1) for pool in ("device", "host"))
    for transfer in [engine.copy(host[:], kv[:]) for _ in range(16)]:
        transfer.result(LIMIT)
    kv.free()
    host.free()


def test_second_engine_adds_no_worker_threads(start: Open) -> None:
    first = start(copy_workers=2)
    work(first)
    eventually(lambda: threads().keys() >= {"llm-worker", "llm-clock"})  # a thread names itself after its start
    before = threads()
    others = [start(copy_workers=2) for _ in range(4)]
    for engine in (first, *others):
        work(engine)
    after = threads()
    # The number of workers depends on how many copies are under way, not on how many engines there are.
    assert {name for name in after if after[name] > before[name]} - OF_LINKS - {"llm-worker"} == set(), (before, after)
    for engine in (first, *others):
        engine.close()
    gc.collect()
    eventually(lambda: not threads())


def test_everything_is_separate(start: Open) -> None:
    one, two = start(name="one"), start(name="two", pool="1MiB", host_pool=None)
    first, second = allocate(one, seed=1), allocate(two, seed=2)
    model = Model(second)
    one.copy(first[[1]], first[[2]])
    assert next_of(one, Completed).error is None
    assert two.events() == []
    model.check(second)
    assert [set(engine.stats()["pools"]) for engine in (one, two)] == [{"device", "host"}, {"device"}]
    assert two.stats()["ops"]["copy_blocks"]["calls"] == 0
    second.free()
    assert (one.stats()["table"]["caches"], two.stats()["table"]["caches"]) == (1, 0)


def test_rows_of_another_engine(pair: Pair) -> None:
    mine, theirs = pair.caches()
    local, remote = pair.local, pair.remote
    refused("dst", lambda: local.copy(theirs[[1]], mine[[1]]), "remote")
    refused("src", lambda: local.copy(mine[[1]], theirs[[1]]), "remote")
    refused("dst", lambda: local.pull(theirs[[1]], pair.peer["kv"][[1]]), "remote")
    refused("src", lambda: local.pull(mine[[1]], pair.back["kv"][[1]]), "remote")
    refused("src", lambda: local.push(pair.peer["kv"][[1]], theirs[[1]]), "remote")
    refused("rows", lambda: remote.lend(mine[[1]], ttl=1.0), "local")
    refused(
        "dst", lambda: local.pull([(mine[[1]], pair.peer["kv"][[1]]), (theirs[[1]], pair.peer["kv"][[1]])]), "remote"
    )


def test_one_closes_while_the_other_goes_on(pair: Pair, start: Open) -> None:
    mine, _ = pair.caches()
    third = start(listen="127.0.0.1:0")
    others = allocate(third, seed=3)
    peer = pair.local.link(address(third)).result(LIMIT)
    stop, failures = threading.Event(), []

    def load() -> None:
        model = Model(mine)
        while not stop.is_set():
            try:
                pair.local.pull(mine[[1, 2]], peer["kv"][[3, 4]]).result(LIMIT)
                model.write([1, 2], Model(others), [3, 4]).check(mine)
            except BaseException as error:  # noqa: BLE001, PERF203  (shown by the test)
                failures.append(error)
                return

    loading = threading.Thread(target=load)
    loading.start()
    hanging = pair.local.push(pair.peer["kv"][[0]], mine[[0]], layerwise=True)
    pair.remote.close()
    fails(PeerLost, lambda: hanging)
    for number in range(10):
        with Engine(pool="256KiB", name=str(number)) as another:
            work_of = allocate(another)
            another.copy(work_of[[1]], work_of[[2]]).result(LIMIT)
    stop.set()
    loading.join(LIMIT)
    assert failures == []
    assert not loading.is_alive()
    assert pair.local.peers == [peer]


@pytest.mark.parametrize("workers", [1, 4])
def test_engines_that_load_each_other_do_not_deadlock(start: Open, workers: int) -> None:
    left, right = (start(listen="127.0.0.1:0", copy_workers=workers, pool="16MiB") for _ in range(2))
    caches = [allocate(engine, blocks=32, tensors=2, shape=(4096,)) for engine in (left, right)]
    peer = left.link(address(right)).result(LIMIT)
    back = next_of(right, PeerUp).peer
    started = []
    for number in range(150):
        # Blocks that are written are never read: calls in a circle would wait for each other until their deadline.
        to, source = [number % 16], [16 + number % 16]
        started.append(left.pull(caches[0][to], peer["kv"][source]))
        started.append(right.pull(caches[1][to], back["kv"][source]))
        started.append(left.push(peer["kv"][to], caches[0][source]))
        started.append(right.push(back["kv"][to], caches[1][source]))
    for transfer in started:
        transfer.result(LIMIT)
    assert len(started) == 600


def test_engines_of_many_threads(start: Open) -> None:
    """Engines open, link, pull and close in several threads at once."""
    hub = start(listen="127.0.0.1:0")
    theirs = allocate(hub, seed=9)
    failures: list[BaseException] = []

    def one(number: int) -> None:
        try:
            for round_ in range(5):
                with Engine(pool="256KiB", page="4KiB", name=f"{number}/{round_}") as engine:
                    mine = allocate(engine)
                    peer = engine.link(address(hub)).result(LIMIT)
                    engine.pull(mine[:], peer["kv"][0:16], verify="full").result(LIMIT)
                    assert contents(mine) == contents(theirs)
        except BaseException as error:  # noqa: BLE001  (shown by the test)
            failures.append(error)

    running = [threading.Thread(target=one, args=(number,)) for number in range(6)]
    for thread in running:
        thread.start()
    for thread in running:
        thread.join(LIMIT)
    assert failures == []
    eventually(lambda: hub.peers == [])
    assert len(of(PeerUp, hub.events())) == 30


def test_beside_the_class_of_the_original(start: Open) -> None:
    """An `LLMDataDist` and native engines work in one process. A native engine does not find its caches by name."""
    engine = start()
    config = LLMConfig()
    config.enable_cache_manager = True
    config.enable_remote_cache_accessible = True
    config.mem_pool_cfg = '{"memory_size": "1MiB"}'
    config.listen_ip_info = "127.0.0.1:0"
    with LLMDataDist(LLMRole.MIX, 7) as dist:
        dist.init(config.generate_options())
        mine = allocate(engine, seed=1)
        peer = engine.link(dist.listen_ip_info).result(LIMIT)
        fails(NotFound, lambda: engine.pull(mine[[1]], peer["kv"][[1]]))
    engine.copy(mine[[1]], mine[[2]]).result(LIMIT)
