"""An engine under attack, the honest peers that must not notice, and what the attack costs.

`Trial` starts the victim in a process of its own. Two more processes link to it and pull from it all the while, one
over TCP and one by shared memory. `Watch` looks at the victim's threads, descriptors and memory every few milliseconds.
At the end `Trial.judge` compares what it saw with the budgets. Not for: the attacks (`tests/test_hostile_*.py`).
"""

from __future__ import annotations

import tempfile
import threading
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import peers
from peers import OK, by_blocks, equal, eventually, options, pattern

from . import budgets
from . import messages as m
from .client import Link, Peer, Tender, Wire, ask

if TYPE_CHECKING:
    from collections.abc import Iterable
    from contextlib import ExitStack

TOKEN = "a token that the hostile peer knows"  # noqa: S105
VICTIM = 2
HEARTBEAT, SILENCE = 500, 3000  # ms
PULL_LIMIT = 3000  # ms: the deadline of each honest pull
ROWS, ROW_BYTES = 8, 8192  # of the cache that honest peers pull; it holds pattern 1
PREY_ROWS, PREY_BYTES = 64, 64 << 10  # of the cache that hostile peers ask for, model 1; it holds pattern 5
POOL = 32 << 20
MIB = 1 << 20
SLACK = 3.0  # seconds beyond a limit of the engine that a loaded machine may need
PREY = PREY_ROWS * PREY_BYTES  # bytes of each of the two tensors of the cache under attack
GONE = (OSError, AssertionError)  # what an attacker sees when the engine has had enough of it


@dataclass
class Usage:
    """What a process has at one moment."""

    threads: int
    descriptors: int
    resident: int
    mapped: int


def usage(pid: int) -> Usage:
    """Threads, descriptors, private and shared resident bytes, and mapped bytes of a process."""
    root = Path(f"/proc/{pid}")
    lines = dict(line.split(":", 1) for line in (root / "status").read_text().splitlines())
    size = {name: int(lines[name].split()[0]) * 1024 for name in ("RssAnon", "RssShmem", "VmSize")}
    return Usage(
        int(lines["Threads"]),
        sum(1 for _ in (root / "fd").iterdir()),
        size["RssAnon"] + size["RssShmem"],
        size["VmSize"],
    )


def thread_names(pid: int) -> list[str]:
    """The names of a process's threads, without the number at the end of some."""
    names = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # it has ended meanwhile
            names.append((task / "comm").read_text().strip().rstrip("0123456789").rstrip("-"))
    return names


def switches(pid: int) -> int:
    """How often the threads of a process were put to sleep or woken so far."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            lines = (task / "status").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)
    return total


def cpu_ticks(pid: int) -> int:
    """Clock ticks of CPU time that a process has used in all."""
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


class Watch:
    """The most that a process had of everything while this was open, seen every few milliseconds.

    The kernel itself keeps the peaks of memory, so that no peak between two looks is missed.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # the peak of resident memory starts anew
        self.before = self.most = usage(pid)
        self.peaks = self._peaks()
        self.names: Counter[str] = Counter()  # of the threads, when there were most
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _peaks(self) -> dict[str, int]:
        lines = Path(f"/proc/{self.pid}/status").read_text().splitlines()
        found = dict(line.split(":", 1) for line in lines)
        return {name: int(found[name].split()[0]) * 1024 for name in ("VmHWM", "VmPeak", "VmRSS")}

    def look(self) -> None:
        """Look once."""
        now, most = usage(self.pid), self.most
        if now.threads > most.threads:
            self.names = Counter(thread_names(self.pid))
        self.most = Usage(*(max(pair) for pair in zip(vars(now).values(), vars(most).values())))

    def _run(self) -> None:
        with suppress(OSError, KeyError, ProcessLookupError):  # the process has died: the trial sees it
            while not self.over.wait(0.01):
                self.look()

    def close(self) -> None:
        """Look a last time and look no more."""
        self.over.set()
        self.thread.join(5)
        with suppress(OSError, KeyError):
            self.look()
            now = self._peaks()
            # Bytes of files count in the kernel's peak; they do not grow here.
            grown = max(0, now["VmHWM"] - self.peaks["VmRSS"])
            self.most.resident = max(self.most.resident, self.before.resident + grown)
            if now["VmPeak"] > self.peaks["VmPeak"]:
                self.most.mapped = max(self.most.mapped, now["VmPeak"])

    def grown(self, what: str) -> int:
        """By how much the most exceeds what there was at first."""
        return int(getattr(self.most, what) - getattr(self.before, what))


class Trial:
    """A victim, two honest peers and a watch. `judge` ends it with the verdict."""

    def __init__(
        self,
        *,
        open_files: int | None = None,
        token: str | None = TOKEN,
        honest: Iterable[str] = ("tcp", "auto"),
        **given: Any,
    ) -> None:
        self.open_files = open_files
        self.token = token
        prefix = () if open_files is None else ("bash", "-c", f'ulimit -n {open_files} && exec "$@"', "limited")
        common: dict[str, Any] = {
            "accessible": True,
            "pool": POOL,
            "llm__LinkHeartbeat": HEARTBEAT,
            "llm__LinkSilence": SILENCE,
            "llm__SyncKvCacheWaitTime": PULL_LIMIT,
            **given,
        }
        if token is not None:
            common["llm__LinkToken"] = token
        self.common = common
        self.folder = tempfile.TemporaryDirectory()
        self.tender = Tender()  # for hostile links that have to stay alive
        self.running = Path(self.folder.name) / "running"
        self.victim = peers.Peer(*prefix)
        self.victim.spoiled = True
        self.ends = peers.Ends()
        try:
            self.host_threads = len(thread_names(self._pid()))
            self.victim.open(options(**common), VICTIM)
            prey = (PREY_ROWS, PREY_BYTES, 2)
            self.victim.allocate("calm", ROWS, ROW_BYTES, 2, blocks=True, keys=[by_blocks(VICTIM)], seed=1)
            self.victim.allocate("prey", *prey, blocks=True, keys=[by_blocks(VICTIM, 1)], seed=5)
            self.honest = [self.join(30 + number, way) for number, way in enumerate(honest)]
        except BaseException:
            self.close()
            raise
        self.answers: list[Any] = []
        self.watch: Watch | None = None
        self.told: list[dict[str, Any]] = []

    def _pid(self) -> int:
        return int(self.victim.pid())

    def join(self, cluster: int, transport: str, **given: Any) -> peers.Peer:
        """An honest peer that has linked to the victim and pulled once."""
        made = self.ends.peer(options(**{**self.common, "llm__LinkTransport": transport, **given}), cluster)
        made.allocate("n", ROWS, ROW_BYTES, 2, blocks=True)
        eventually(lambda: made.link_clusters([self.victim.at])[1][0] == OK, what="the link of an honest peer")
        made.pull_blocks(by_blocks(VICTIM), "n", range(ROWS), range(ROWS))
        assert equal(made.read("n"), pattern(1, 2, ROWS, ROW_BYTES))
        return made

    def begin(self) -> None:
        """The honest peers pull from now on, and the victim is watched."""
        self.running.touch()
        marks = [Path(self.folder.name) / f"pulled {number}" for number in range(len(self.honest))]
        for each, mark in zip(self.honest, marks):
            self.answers.append(each.begin("pull_while", str(self.running), str(mark), VICTIM, "n"))
        eventually(lambda: all(mark.exists() for mark in marks), what="the first pull of every honest peer")
        self.watch = Watch(self._pid())

    def attacker(self, cluster: int = 66, **given: Any) -> Peer:
        """A peer that will be let in."""
        return Peer(cluster, self.token, **given)

    def alive(self) -> bool:
        """Whether the victim runs."""
        return self.victim.process.poll() is None

    def settle(self) -> None:
        """The honest peers stop pulling; keeps what they tell."""
        with suppress(FileNotFoundError):
            self.running.unlink()
        self.told += [answer.result(60) for answer in self.answers]
        self.answers = []
        if self.watch is not None:
            self.watch.close()

    def judge(
        self, *, links: int = 0, streams: int = 0, busy: int = 0, mapped: int = 0, memory: int | None = None
    ) -> dict[str, Any]:
        """The verdict, after an attack with so many links, call streams, and links that have a call under way.

        `mapped` are bytes that the peers may have the victim map, `memory` those that it may take for them.
        """
        self.settle()
        watch = self.watch
        assert watch is not None
        assert self.alive(), f"the victim died with {self.victim.process.poll()}\n{self.victim.said()}"
        links = min(links, budgets.incoming(self.open_files) + 16)  # those that the victim made are not bounded
        streams = min(streams, budgets.streams(self.open_files) + 2 * links)
        most = {
            "threads": self.host_threads
            + budgets.value("idle_threads")
            + budgets.value("serving_threads")
            + (busy + len(self.honest)) * budgets.value("call_threads"),
            "descriptors": watch.before.descriptors
            + budgets.pending(self.open_files)
            + links * budgets.value("link_descriptors")
            + streams
            + 16,  # those that honest calls and the application open for a moment
            "resident": watch.before.resident + (budgets.value("peak_memory") if memory is None else memory),
            "mapped": watch.before.mapped + mapped + (1 << 30) + links * (1 << 18),
        }
        seen = {name: (value, most[name]) for name, value in vars(watch.most).items()}
        seen_text = ", ".join(f"{name} {value:,} of {limit:,}" for name, (value, limit) in seen.items())
        told = {"honest": self.told, "seen": seen}
        for one in self.told:
            assert set(one["codes"]) == {OK}, f"an honest pull failed: {one}; {seen_text}"
            assert one["wrong"] == 0, one
            assert one["pulls"] > 0, one
            assert one["slowest"] * 1000 < float(self.common["llm__SyncKvCacheWaitTime"]) + 500, one
        for each in self.honest:
            links_now = [link["cluster"] for link in each.links()]
            assert links_now == [VICTIM], f"an honest peer lost its link: {links_now}"
            each.pull_blocks(by_blocks(VICTIM), "n", range(ROWS), range(ROWS))
            assert equal(each.read("n"), pattern(1, 2, ROWS, ROW_BYTES))
        over = [name for name, (value, limit) in seen.items() if value > limit]
        assert over == [], f"over budget: {over}; {seen_text}; {dict(watch.names)}"
        return told

    def recovers(self, limit: float = peers.LIMIT) -> None:
        """After an attack, threads and descriptors come back to what they were."""
        assert self.watch is not None
        before = self.watch.before

        def back() -> bool:
            now = usage(self._pid())
            return now.threads <= before.threads + 2 and now.descriptors <= before.descriptors + 2

        eventually(back, limit, f"the return to {before}")

    def close(self) -> None:
        """End all processes."""
        with suppress(FileNotFoundError):
            self.running.unlink()
        for answer in getattr(self, "answers", []):
            with suppress(Exception):
                answer.result(60)
        self.victim.close()
        self.tender.__exit__()
        self.ends.__exit__()
        self.folder.cleanup()

    def __enter__(self) -> Trial:  # noqa: PYI034
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def silence() -> float:
    """Seconds after which a peer that says nothing is cut off in a trial."""
    return SILENCE / 1000


def wait(seconds: float) -> None:
    """Let an attack go on for so long."""
    time.sleep(seconds)


def prey_of(call: Wire) -> int:
    """The id of the cache under attack."""
    return int(ask(call, m.describe(m.name_blocks(1)))["cache"])


def fair_call(trial: Trial, held: ExitStack, cluster: int = 66, **given: Any) -> tuple[Link, Wire]:
    """A link over TCP that answers pings, and a call stream of it."""
    link = trial.attacker(cluster).link_tcp(trial.victim.address, **given)
    held.callback(link.close)
    trial.tender.add(link)
    return link, link.call()


def unharmed(trial: Trial) -> None:
    """The cache under attack holds what its owner wrote."""
    assert equal(trial.victim.read("prey"), pattern(5, 2, PREY_ROWS, PREY_BYTES))
