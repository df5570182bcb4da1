"""Threads of an engine: how many there are, what they are called, and that they rest while nothing happens.

Every engine that is judged runs in a process of its own, whose threads before the engine are subtracted. Not for: calls
from many threads of the application (`test_threads.py`).
"""

from __future__ import annotations

import re
import time
from contextlib import ExitStack
from pathlib import Path

from hostile import budgets
from hostile import messages as m
from hostile.client import Listener, Peer, Tender, ask
from hostile.trial import TOKEN, VICTIM, cpu_ticks, switches, thread_names
from peers import OK, Ends, by_blocks, eventually, options
from peers import Peer as Process

ROOT = Path(__file__).resolve().parents[1]
LINKS = 200


def test_an_engine_with_200_idle_links_has_few_threads() -> None:
    """100 peers linked over TCP, 90 by shared memory, and 10 were linked by the engine; all have called once."""
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
        for number in range(10):

            def refuse(wire: object) -> None:
                wire.hear()  # type: ignore[attr-defined]
                wire.say(m.failed(1, "no such cache", [], []))  # type: ignore[attr-defined]
                wire.ended(60)  # type: ignore[attr-defined]

            listener = held.enter_context(Listener(Peer(500 + number, TOKEN), refuse))
            assert engine.link_clusters([(500 + number, listener.address)])[0] == OK
            tender.add(eventually(lambda there=listener: there.links)[0])  # type: ignore[misc]
            assert engine.timed("pull_blocks", by_blocks(500 + number), "n", [0], [0])[0] == "LLM_KV_CACHE_NOT_EXIST"
        assert len(engine.links()) == LINKS
        most = budgets.value("idle_threads")

        def rested() -> bool:
            return len(thread_names(engine.pid())) - before <= most

        try:
            eventually(rested, 15)  # a thread that nobody needs is kept for a while
        except AssertionError:
            names = sorted(thread_names(engine.pid()))
            found = {one: names.count(one) for one in names}
            raise AssertionError(f"{len(names) - before} threads of an idle engine, at most {most}: {found}") from None
        assert len(engine.links()) == LINKS, "all links are still there"
        assert not tender.ended


def test_an_idle_linked_process_rests() -> None:
    """At most 1 % of a CPU, and a few wake-ups for each heartbeat.

    Each side of a link pings once per heartbeat, which is 1 s: that is a handful of wake-ups per second and link. An
    engine that polled every 100 ms, or a thread that spins, would be far beyond the bound.
    """
    seconds, links = 4, 2
    with Ends() as ends:
        engine = ends.adopt(Process())
        engine.spoiled = True
        engine.open(options(accessible=True), VICTIM)
        engine.allocate("f", 4, 256, 2, blocks=True, keys=[by_blocks(VICTIM)], seed=1)
        for number, way in enumerate(("tcp", "auto")):
            other = ends.peer(options(accessible=True, llm__LinkTransport=way), 10 + number)
            assert other.link_clusters([engine.at])[0] == OK
            other.allocate("n", 4, 256, 2, blocks=True)
            other.pull_blocks(by_blocks(VICTIM), "n", range(4), range(4))
        pid = engine.pid()
        # What the calls have woken goes back to sleep.
        eventually(lambda: _quiet(pid), 10, "a quarter of a second of rest")
        ticks, woken = cpu_ticks(pid), switches(pid)
        time.sleep(seconds)
        ticks, woken = cpu_ticks(pid) - ticks, switches(pid) - woken
        assert ticks <= seconds, f"{ticks} ticks of 10 ms in {seconds} s"
        assert woken <= seconds * links * 12, f"{woken} wake-ups in {seconds} s"


def _quiet(pid: int) -> bool:
    before = switches(pid)
    time.sleep(0.25)
    return switches(pid) - before < 20


def test_every_thread_is_named_after_its_role() -> None:
    """After links, pulls, pushes, swaps and large copies, every thread that the engine started has a role."""
    with Ends() as ends:
        engine = ends.adopt(Process())
        engine.spoiled = True
        pid = engine.pid()
        before = thread_names(pid)
        engine.open(options(accessible=True, pool=32 << 20, llm__CopyWorkers=4), VICTIM)
        seen: set[str] = set()
        engine.allocate("f", 64, 64 << 10, 2, blocks=True, keys=[by_blocks(VICTIM)], seed=1)
        engine.allocate("h", 64, 64 << 10, 2, blocks=True, host=True)
        for number, way in enumerate(("tcp", "auto")):
            other = ends.peer(options(accessible=True, pool=32 << 20, llm__LinkTransport=way), 10 + number)
            assert other.link_clusters([engine.at])[0] == OK
            other.allocate("n", 64, 64 << 10, 2, blocks=True, keys=[by_blocks(10 + number)], seed=2)
            other.register("r", 64, 64 << 10, 2, blocks=True)
            for name in ("n", "r"):
                other.pull_blocks(by_blocks(VICTIM), name, range(64), range(64))
            other.push_blocks(by_blocks(VICTIM), "n", range(64), range(64))
            engine.pull_blocks(by_blocks(10 + number), "f", range(64), range(64))
            seen.update(thread_names(pid))
        engine.copy_blocks("f", [(number, 32 + number) for number in range(32)])
        engine.swap_blocks("f", "h", [(number, number) for number in range(64)])
        seen.update(thread_names(pid))
        assert seen - set(before) <= budgets.ROLES, f"threads without a role: {seen - set(before) - budgets.ROLES}"
        after = thread_names(pid)
        strange = [name for name in after if name not in budgets.ROLES]
        assert len(strange) <= len(before), f"threads of the engine under another name: {sorted(strange)}"


def test_the_list_of_roles_is_complete() -> None:
    """Every name that the sources give to a thread is in the list, and every name of the list is given."""
    given: set[str] = set()
    for folder, ending in (("crates/core/src", "*.rs"), ("python/llm_datadist", "*.py")):
        for path in sorted((ROOT / folder).rglob(ending)):
            text = path.read_text(encoding="utf-8")
            given.update(re.findall(r'"(llm-[a-z]+)(?:-\{\}|-)?"', text))
    given.discard("llm-datadist")  # the program's name
    assert given, "no thread is named in the sources"
    assert given == budgets.ROLES
