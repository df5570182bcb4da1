"""Threads of an engine in another process: their number, names and CPUs, and that they sleep while the engine is idle.

Not for: calls from many threads of a program (`test_threads.py`).
"""

from __future__ import annotations

import os
import re
import time
from contextlib import ExitStack
from pathlib import Path

import pytest

from hostile import budgets
from hostile import messages as m
from hostile.client import Listener, Peer, Tender, ask
from hostile.trial import TOKEN, VICTIM, cpu_ticks, switches, thread_names
from memory import run_fresh
from peers import OK, Ends, by_blocks, eventually, options
from peers import Peer as Process

ROOT = Path(__file__).resolve().parents[1]
LINKS = 200

pytestmark = pytest.mark.serial


def refuse(wire: object) -> None:
    """Answer one call of the engine with `no such cache`."""
    wire.hear()  # type: ignore[attr-defined]
    wire.say(m.failed(1, "no such cache", []))  # type: ignore[attr-defined]
    wire.ended(60)  # type: ignore[attr-defined]


def test_an_engine_with_200_idle_links_has_few_threads() -> None:
    """100 peers have linked over TCP and 90 by shared memory, and the engine has linked to 10. Each made one call."""
    with ExitStack() as held, Tender() as tender:
        engine = held.enter_context(Process())
        before = len(thread_names(engine.pid()))
        engine.open(options(accessible=True, llm__LinkToken=TOKEN), VICTIM)
        engine.allocate("f", 4, 256, 2, blocks=True, keys=[by_blocks(VICTIM)], seed=1)
        engine.allocate("n", 4, 256, 2, blocks=True)
        name = Peer(99, TOKEN).local_name(engine.address)
        for number in range(LINKS - 10):
            peer = Peer(100 + number, TOKEN)
            link = peer.link_tcp(engine.address) if number < 100 else peer.link_local(name)
            held.callback(link.close)
            tender.add(link)
            for _ in range(2):
                assert ask(link.call(), m.describe(m.name_blocks()))["is"] == "Described"
        for number in range(500, 510):
            listener = held.enter_context(Listener(Peer(number, TOKEN), refuse))
            assert engine.link_clusters([(number, listener.address)])[0] == OK
            tender.add(eventually(lambda there=listener: there.links)[0])  # type: ignore[misc]
            assert engine.timed("pull_blocks", by_blocks(number), "n", [0], [0])[0] == "LLM_KV_CACHE_NOT_EXIST"
        assert len(engine.links()) == LINKS
        most = before + budgets.value("idle_threads")
        try:
            eventually(lambda: len(thread_names(engine.pid())) <= most, 15)  # idle threads are kept for a while
        except AssertionError:
            raise AssertionError(f"more than {most} threads: {sorted(thread_names(engine.pid()))}") from None
        assert len(engine.links()) == LINKS
        assert not tender.ended


def test_threads_have_the_names_of_roles_and_rest_while_an_engine_is_idle() -> None:
    """After links, pulls, pushes, swaps and large copies, an idle engine takes at most 1 % of a CPU."""
    seconds, rows = 4, range(64)
    with Ends() as ends:
        engine = ends.adopt(Process())
        engine.spoiled = True
        pid = engine.pid()
        before = thread_names(pid)
        engine.open(options(accessible=True, pool=32 << 20, llm__CopyWorkers=4), VICTIM)
        engine.allocate("f", 64, 64 << 10, 2, blocks=True, keys=[by_blocks(VICTIM)], seed=1)
        engine.allocate("h", 64, 64 << 10, 2, blocks=True, host=True)
        seen: set[str] = set()
        for number, way in ((10, "tcp"), (11, "auto")):
            other = ends.peer(options(accessible=True, pool=32 << 20, llm__LinkTransport=way), number)
            assert other.link_clusters([engine.at])[0] == OK
            other.allocate("n", 64, 64 << 10, 2, blocks=True, keys=[by_blocks(number)], seed=2)
            other.register("r", 64, 64 << 10, 2, blocks=True)
            for name in ("n", "r"):
                other.pull_blocks(by_blocks(VICTIM), name, rows, rows)
            other.push_blocks(by_blocks(VICTIM), "n", rows, rows)
            engine.pull_blocks(by_blocks(number), "f", rows, rows)
            seen.update(thread_names(pid))
        engine.copy_blocks("f", [(row, 32 + row) for row in range(32)])
        engine.swap_blocks("f", "h", [(row, row) for row in rows])
        after = thread_names(pid)
        assert after.count("llm-copy") == 3, "four workers are three threads and the caller"
        assert seen.union(after) - set(before) <= budgets.ROLES
        strange = [name for name in after if name not in budgets.ROLES]
        assert len(strange) <= len(before), f"threads of the engine under another name: {sorted(strange)}"

        def quiet() -> bool:
            woken = switches(pid)
            time.sleep(0.25)
            return switches(pid) - woken < 20

        eventually(quiet, 10, "a quarter of a second of rest")
        ticks, woken = cpu_ticks(pid), switches(pid)
        time.sleep(seconds)
        assert cpu_ticks(pid) - ticks <= seconds, "ticks of 10 ms"
        # Each side of a link pings once a second, which takes a few context switches. Polling every 100 ms takes more.
        assert switches(pid) - woken <= seconds * 2 * 12


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="the threads of this process may use only one CPU")
@pytest.mark.parametrize("opened", ["on all CPUs", "on one CPU", "on another CPU"])
def test_a_bound_caller_does_not_bind_the_threads_that_it_starts(opened: str) -> None:
    """Threads use the CPUs of the engine if their caller lacks one of these, and those of the caller otherwise."""
    run_fresh(
        """
        import os, time
        from contextlib import suppress
        from pathlib import Path
        from llm_datadist import CacheDesc, DataType, LLMDataDist, LLMRole

        every = os.sched_getaffinity(0)
        one, another = {max(every)}, {min(every)}
        assert one != another
        opened, later, expected = {
            "on all CPUs": (every, one, every),
            "on one CPU": (one, every, every),
            "on another CPU": (another, one, another),
        }[os.environ["OPENED"]]
        os.sched_setaffinity(0, opened)
        dist = LLMDataDist(LLMRole.PROMPT, 1)
        pool = '{"memory_size": 33554432}'
        dist.init({"llm.EnableCacheManager": "1", "llm.CopyWorkers": "4", "llm.MemPoolConfig": pool})
        os.sched_setaffinity(0, later)
        manager = dist.cache_manager
        cache = manager.allocate_blocks_cache(CacheDesc(1, [64, 256 << 10], DataType.DT_INT8))
        blocks = {row: [32 + row] for row in range(32)}
        manager.copy_blocks(cache, blocks)
        dist.engine.copy(cache.native[32:64], cache.native[:32]).result()

        def used():
            found = []
            for task in Path("/proc/self/task").iterdir():
                with suppress(OSError):  # it has ended meanwhile
                    name = (task / "comm").read_text().strip()
                    found.append((name, sorted(os.sched_getaffinity(int(task.name)))))
            return sorted(entry for entry in found if entry[0] in ("llm-copy", "llm-worker"))

        # A thread takes its name, and then its CPUs, some time after the call that starts it.
        until = time.monotonic() + 60
        while used() != [(name, sorted(expected)) for name in ("llm-copy",) * 3 + ("llm-worker",)]:
            assert time.monotonic() < until, (opened, later, expected, used())
            time.sleep(0.01)
        assert os.sched_getaffinity(0) == later
        dist.finalize()
        """,
        OPENED=opened,
    )


def test_the_list_of_roles_is_complete() -> None:
    """The list has every name that the sources give to a thread, and no other."""
    given: set[str] = set()
    for folder, ending in (("crates/core/src", "*.rs"), ("python/llm_datadist", "*.py")):
        for path in (ROOT / folder).rglob(ending):
            given.update(re.findall(r'"(llm-[a-z]+)(?:-\{\}|-)?"', path.read_text(encoding="utf-8")))
    assert given - {"llm-datadist"} == budgets.ROLES  # the program's name
