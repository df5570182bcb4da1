"""An engine under attack, honest peers that must not be affected, and the cost of the attack.

`Trial` starts the victim in its own process. Two more processes link to it and pull from it during the attack, one over
TCP and one by shared memory. `Watch` samples the threads, descriptors and memory of the victim every few milliseconds.
At the end, `Trial.judge` compares the samples with the budgets. Not for: the attacks (`tests/test_hostile_*.py`).
"""

from __future__ import annotations

import tempfile
import threading
from collections import Counter
from contextlib import ExitStack, contextmanager, suppress
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable

import peers
from emulation import emulated
from peers import OK, by_blocks, equal, eventually, options, pattern

from . import budgets
from . import messages as m
from .client import Link, Listener, Offer, Peer, RingWire, Tender, Wire, ask, dial_tcp

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator

TOKEN = "a token that the hostile peer knows"  # noqa: S105
VICTIM = 2
HEARTBEAT = 500  # ms
SILENCE = 3.0  # seconds after which the link to a silent peer breaks
PULL_LIMIT = 10_000  # ms: the deadline of each honest pull
ROWS, ROW_BYTES = 8, 8192  # of the cache that honest peers pull; it holds pattern 1
PREY_ROWS, PREY_BYTES = 64, 64 << 10  # of the cache that hostile peers ask for, model 1; it holds pattern 5
POOL = 32 << 20
MIB = 1 << 20
SLACK = 10.0  # seconds beyond a limit of the engine that a loaded machine may need
PREY = PREY_ROWS * PREY_BYTES  # bytes of each of the two tensors of the cache under attack
GONE = (OSError, AssertionError)  # exceptions of an attacker whose stream the engine closed


def _sizes(pid: int, *names: str) -> list[int]:
    lines = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return [int(lines[name].split()[0]) * 1024 for name in names]


def usage(pid: int) -> dict[str, int]:
    """Threads, descriptors, private and shared resident bytes, and mapped bytes of a process."""
    private, shared, mapped = _sizes(pid, "RssAnon", "RssShmem", "VmSize")
    return {
        "threads": len(list(Path(f"/proc/{pid}/task").iterdir())),
        "descriptors": len(list(Path(f"/proc/{pid}/fd").iterdir())),
        "resident": private + shared,
        "mapped": mapped,
    }


def thread_names(pid: int) -> list[str]:
    names = []
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):  # it has ended meanwhile
            names.append((task / "comm").read_text().strip().rstrip("0123456789").rstrip("-"))
    return names


def switches(pid: int) -> int:
    """Return the number of context switches of all threads of a process so far."""
    total = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        with suppress(OSError):
            lines = (task / "status").read_text().splitlines()
            total += sum(int(line.split()[1]) for line in lines if "ctxt_switches" in line)
    return total


def cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return int(fields[11]) + int(fields[12])


class Watch:
    """The peak resource usage of a process while this is open, sampled every few milliseconds.

    The kernel records the peak of memory, so that no peak between two samples is missed.
    """

    def __init__(self, pid: int) -> None:
        self.pid = pid
        Path(f"/proc/{pid}/clear_refs").write_text("5")  # resets the peak of resident memory
        self.before = self.most = usage(pid)
        self.resident, self.peak = _sizes(pid, "VmRSS", "VmPeak")
        self.names: Counter[str] = Counter()  # thread names of the sample with the most threads
        self.over = threading.Event()
        self.thread = threading.Thread(target=self._run, daemon=True)
        self.thread.start()

    def _sample(self) -> None:
        now, most = usage(self.pid), self.most
        if now["threads"] > most["threads"]:
            self.names = Counter(thread_names(self.pid))
        self.most = {name: max(now[name], most[name]) for name in now}

    def _run(self) -> None:
        with suppress(OSError, KeyError):  # the process has died, which `Trial.judge` reports
            while not self.over.wait(0.01):
                self._sample()

    def close(self) -> None:
        self.over.set()
        self.thread.join(5)
        with suppress(OSError, KeyError):
            self._sample()
            resident, peak = _sizes(self.pid, "VmHWM", "VmPeak")
            # Bytes of files count in the kernel's peak; they do not grow here.
            self.most["resident"] = max(self.most["resident"], self.before["resident"] + resident - self.resident)
            if peak > self.peak:
                self.most["mapped"] = max(self.most["mapped"], peak)


class Trial:
    """A victim, two honest peers and a watch. `judge` ends the attack and checks the results."""

    def __init__(self, *, open_files: int | None = None, honest: Iterable[str] = ("tcp", "auto"), **given: Any) -> None:
        self.open_files = open_files
        prefix = () if open_files is None else ("bash", "-c", f'ulimit -n {open_files} && exec "$@"', "limited")
        self.common: dict[str, Any] = {
            "accessible": True,
            "pool": POOL,
            "llm__LinkHeartbeat": HEARTBEAT,
            "llm__LinkSilence": int(SILENCE * 1000),
            "llm__SyncKvCacheWaitTime": PULL_LIMIT,
            "llm__LinkToken": TOKEN,
            **given,
        }
        # Honest peers keep a long limit where a test gives the victim a short one.
        self.pull_limit = max(PULL_LIMIT, int(self.common["llm__SyncKvCacheWaitTime"]))
        self.answers: list[Any] = []
        self.watch: Watch | None = None
        self.told: list[dict[str, Any]] = []
        self.folder = tempfile.TemporaryDirectory()
        self.running = Path(self.folder.name) / "running"
        self.tender = Tender()  # for hostile links that have to stay alive
        self.held = ExitStack()  # what the attack opens
        self.victim = peers.Peer(*prefix)
        self.victim.spoiled = True
        self.ends = peers.Ends()
        try:
            self.host_threads = len(thread_names(self.victim.process.pid))
            self.victim.open(options(**self.common), VICTIM)
            prey = (PREY_ROWS, PREY_BYTES, 2)
            self.victim.allocate("calm", ROWS, ROW_BYTES, 2, blocks=True, keys=[by_blocks(VICTIM)], seed=1)
            self.victim.allocate("prey", *prey, blocks=True, keys=[by_blocks(VICTIM, 1)], seed=5)
            self.honest = [self.join(30 + number, way) for number, way in enumerate(honest)]
        except BaseException:
            self.close()
            raise

    def join(self, cluster: int, transport: str, **given: Any) -> peers.Peer:
        """Start an honest peer, link it to the victim, and pull once."""
        mine = {"llm__LinkTransport": transport, "llm__SyncKvCacheWaitTime": self.pull_limit}
        made = self.ends.peer(options(**{**self.common, **mine, **given}), cluster)
        made.allocate("n", ROWS, ROW_BYTES, 2, blocks=True)
        eventually(lambda: made.link_clusters([self.victim.at])[1][0] == OK, what="the link of an honest peer")
        self._pull(made)
        return made

    def _pull(self, honest: peers.Peer) -> None:
        honest.pull_blocks(by_blocks(VICTIM), "n", range(ROWS), range(ROWS))
        assert equal(honest.read("n"), pattern(1, 2, ROWS, ROW_BYTES))

    def begin(self) -> None:
        """Let the honest peers pull, and watch the victim, from now on."""
        self.running.touch()
        marks = [Path(self.folder.name) / f"pulled {number}" for number in range(len(self.honest))]
        for each, mark in zip(self.honest, marks):
            self.answers.append(each.begin("pull_while", str(self.running), str(mark), VICTIM, "n"))
        eventually(lambda: all(mark.exists() for mark in marks), what="the first pull of every honest peer")
        self.watch = Watch(self.victim.process.pid)

    def attacker(self, cluster: int = 66, **given: Any) -> Peer:
        return Peer(cluster, TOKEN, **given)

    @cached_property
    def local_name(self) -> str:
        """The name of the victim's local socket."""
        return self.attacker().local_name(self.victim.address)

    def link(self, cluster: int = 66, *, local: bool = False, offer: Offer | None = None, **given: Any) -> Link:
        """Make a link of an attacker, completely or up to the step `stop`."""
        peer = self.attacker(cluster)
        name = self.local_name if local else ""
        link = peer.link_local(name, offer, **given) if local else peer.link_tcp(self.victim.address, **given)
        self.held.callback(link.close)
        return link

    def dial(self, address: str = "") -> Wire:
        """Connect to an engine, the victim by default, without a greeting."""
        wire = dial_tcp(address or self.victim.address)
        self.held.callback(wire.close)
        return wire

    def try_link(self, cluster: int = 66, **given: Any) -> None:
        with suppress(*GONE):
            self.link(cluster, **given)

    def fair_call(self, cluster: int = 66, **given: Any) -> tuple[Link, Wire]:
        """A link over TCP that answers pings, and a call stream of it."""
        link = self.link(cluster, **given)
        self.tender.add(link)
        return link, link.call()

    def listen(self, serve: Callable[[Wire], Any], offer: Offer | None = None) -> tuple[Listener, Link]:
        """A hostile listener, cluster 77, and the victim's link to it. The victim has a cache "n" of 4 blocks."""
        listener = self.held.enter_context(Listener(self.attacker(77), serve, offer))
        self.victim.allocate("n", 4, 256, 2, blocks=True, seed=3)
        assert self.victim.link_clusters([(77, listener.address)])[0] == OK
        link = eventually(lambda: listener.links)[0]
        self.tender.add(link)
        return listener, link

    def stop_pulls(self) -> None:
        """Let the honest peers stop pulling, and collect their reports."""
        self.running.unlink(missing_ok=True)
        self.told += [answer.result(60) for answer in self.answers]
        self.answers = []
        if self.watch is not None:
            self.watch.close()

    def judge(
        self, *, links: int = 0, streams: int = 0, busy: int = 0, mapped: int = 0, memory: int | None = None
    ) -> None:
        """Check the results of an attack with `links` links, `streams` call streams, and `busy` links with a call.

        `mapped` are the bytes that the victim may map for the peers, and `memory` the bytes that it may use for them.
        """
        self.stop_pulls()
        watch = self.watch
        assert watch is not None
        died = self.victim.process.poll()
        assert died is None, f"the victim died with {died}\n{self.victim.said()}"
        links = min(links, budgets.incoming(self.open_files) + 16)  # links that the victim made have no limit
        streams = min(streams, budgets.streams(self.open_files) + 2 * links)
        most = {
            "threads": self.host_threads
            + budgets.value("idle_threads")
            + budgets.value("serving_threads")
            + (busy + len(self.honest)) * budgets.value("call_threads"),
            "descriptors": watch.before["descriptors"]
            + budgets.pending(self.open_files)
            + links * budgets.value("link_descriptors")
            + budgets.value("unwanted_descriptors")
            + streams
            + 16,  # descriptors that honest calls and the application open for a short time
            "resident": watch.before["resident"] + (budgets.value("peak_memory") if memory is None else memory),
            # The first large copy starts three workers, whose arenas and stacks are addresses without memory.
            "mapped": watch.before["mapped"] + mapped + (1 << 30) + 3 * (66 << 20) + links * (1 << 18),
        }
        # The addresses of an emulated process are those of its emulator.
        if emulated():
            del most["mapped"]
        seen = {name: (value, most[name]) for name, value in watch.most.items() if name in most}
        seen_text = ", ".join(f"{name} {value:,} of {limit:,}" for name, (value, limit) in seen.items())
        for one in self.told:
            assert set(one["codes"]) == {OK}, f"an honest pull failed: {one}; {seen_text}"
            assert one["wrong"] == 0, one
            assert one["pulls"] > 0, one
            assert one["slowest"] * 1000 < self.pull_limit + 500, one
        for each in self.honest:
            links_now = [link["cluster"] for link in each.links()]
            assert links_now == [VICTIM], f"an honest peer lost its link: {links_now}"
            self._pull(each)
        over = [name for name, (value, limit) in seen.items() if value > limit]
        assert over == [], f"over budget: {over}; {seen_text}; {dict(watch.names)}"

    def releases(self, most: int) -> None:
        """Check that the victim returns its memory to the system, up to `most` bytes."""
        assert self.watch is not None
        before, pid = self.watch.before["resident"], self.victim.process.pid
        eventually(lambda: usage(pid)["resident"] <= before + most, what=f"the return to {before:,} bytes")

    def recovers(self) -> None:
        """Check that threads and descriptors return to their numbers before the attack."""
        assert self.watch is not None
        before = self.watch.before

        def back() -> bool:
            now = usage(self.victim.process.pid)
            return all(now[name] <= before[name] + 2 for name in ("threads", "descriptors"))

        eventually(back, what=f"the return to {before}")

    def close(self) -> None:
        self.running.unlink(missing_ok=True)
        for answer in self.answers:
            with suppress(Exception):
                answer.result(60)
        self.victim.close()
        self.held.close()
        self.tender.__exit__()
        self.ends.__exit__()
        self.folder.cleanup()

    def __enter__(self) -> Trial:  # noqa: PYI034
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def prey_of(call: Wire | RingWire) -> int:
    """The id of the cache under attack."""
    return int(ask(call, m.describe(m.name_blocks(1)))["cache"])


@contextmanager
def attack(
    *, local: bool = False, window: int | None = None, offer: Offer | None = None, **given: Any
) -> Iterator[tuple[Trial, Link]]:
    """Make a link of an attacker that answers pings, for attacks with its call streams, and judge the attack.

    A local link has the memory of `offer`, and one over TCP the receive buffer `window`. The link outlives the attack.
    """
    offer = (offer or Offer()) if local else None
    with Trial(**given) as trial:
        link = trial.link(local=True, offer=offer) if local else trial.link(window=window)
        trial.tender.add(link)
        trial.begin()
        yield trial, link
        trial.judge(links=1, streams=len(link.calls), busy=1, mapped=offer.mapped if offer else 0)
        assert not trial.tender.ended, "the attack ended the link"
