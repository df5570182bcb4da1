"""What a program that never blocks calls: `make bench`, or `.venv/bin/python benches/serving_latency.py`.

Each row is the median of its rounds, with the lowest and the highest round, and its goal. What a ratio compares was
measured in the same rounds, in turn. `--only start,poll` selects parts. Each part runs in a process of its own, and the
owner of the remote cache (`serving_peer.py`) in another. Not for: calls that wait
(`python_overhead.py`) and the time until a layer arrives (`cargo bench --bench layerwise`).
"""

from __future__ import annotations

import argparse
import ctypes
import os
import random
import select
import signal
import statistics
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Optional

import numpy as np
from serving_peer import PAYLOAD, TIMEOUT_S, Local, Setting, linked, opened, rest, row_values

from llm_datadist.native import Busy, Completed, Transfer

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

MIB = 1 << 20
LAYERS = 40
LONG_LIST = 128  # blocks; a power of two, as many tables grow


@dataclass(frozen=True)
class Size:
    """How much is measured."""

    rounds: int = 9
    calls: int = 300  # calls of one round whose median counts
    pulls: int = 1024
    pull_bytes: int = MIB
    messages: int = 100_000
    in_flight: tuple[int, int] = (512, 4096)
    idle_ms: int = 10_000
    layer_ms: float = 0.5


QUICK = Size(rounds=2, calls=5, pulls=48, pull_bytes=64 << 10, messages=3000, in_flight=(64, 512), idle_ms=200)


@dataclass(frozen=True)
class Row:
    """One line of the table: a figure for each round, and the goal for their median."""

    name: str
    figures: Sequence[float]
    unit: str
    at_most: Optional[float] = None
    at_least: Optional[float] = None

    def line(self) -> str:
        """Return the text of the row."""
        median = statistics.median(self.figures)
        goal = met = ""
        if self.at_most is not None:
            goal, met = f"<= {short(self.at_most)}", "met" if median <= self.at_most else "MISSED"
        if self.at_least is not None:
            goal, met = f">= {short(self.at_least)}", "met" if median >= self.at_least else "MISSED"
        spread = f"({short(min(self.figures))} to {short(max(self.figures))})"
        return f"{self.name:70} {short(median):>11} {self.unit:10} {spread:26} {goal:>10} {met}".rstrip()


def short(figure: float) -> str:
    """A figure with as many digits as matter."""
    return f"{figure:,.0f}" if abs(figure) >= 999.5 or figure == int(figure) else f"{figure:.3g}"


def micros(call: Callable[[], Any]) -> float:
    """Microseconds of a call."""
    clock = time.perf_counter_ns
    started = clock()
    kept = call()  # what it returns is freed after the clock was read
    nanos = clock() - started
    del kept
    return nanos / 1e3


def start(size: Size) -> Iterator[Row]:
    """The caller's time to start a pull while no other runs."""
    count = 512
    with linked(Setting(blocks=count), count) as local:
        src, dst = (random.Random(seed).sample(range(count), count) for seed in (1, 2))  # noqa: S311
        lists: dict[str, tuple[Any, Any]] = {
            "1 block, lists": (dst[:1], src[:1]),
            "512 blocks, lists": (dst, src),
            "512 blocks, int64 arrays": (np.array(dst, np.int64), np.array(src, np.int64)),
        }
        figures: dict[str, list[float]] = {name: [] for name in lists}
        for _ in range(size.rounds):
            for name, (to, of) in lists.items():
                times = []
                for _ in range(size.calls):
                    times.append(micros(lambda: local.engine.pull(local.cache[to], local.kv[of])))  # noqa: B023
                    ends(local, 1)
                figures[name].append(statistics.median(times))
        assert (local.view[dst] == row_values(count)[src][:, None]).all(), "a block arrived wrong"
        for name, values in figures.items():
            yield Row(f"start pull, {name}", values, "us", at_most=20)


def events(size: Size) -> Iterator[Row]:
    """`Engine.events` when nothing has happened, and with the ends of 64 transfers."""
    engine, cache, _ = opened(Setting(block_bytes=64), 65)
    found: list[object] = []
    empty, full = [], []
    for _ in range(size.rounds):
        empty.append(micros(lambda: [engine.events() for _ in range(size.calls)]) / size.calls)
        times = []
        for _ in range(size.calls):
            running = {engine.copy(cache[block], cache[0]) for block in range(1, 65)}
            wait(running)
            time.sleep(1e-3)  # an event may come a little later than the end
            times.append(micros(lambda: found.extend(engine.events())))
            assert {event.transfer for event in found if isinstance(event, Completed)} == running
            found.clear()
        full.append(statistics.median(times))
    yield Row("events, nothing has happened", empty, "us", at_most=1)
    yield Row("events, 64 completed transfers", full, "us", at_most=20)
    engine.close()


def wait(transfers: Iterable[Transfer[Any]]) -> None:
    """Wait until transfers have ended, and leave their outcomes to `events`."""
    for transfer in transfers:
        while not transfer.done():
            time.sleep(1e-4)


def ends(local: Local, count: int) -> None:
    """Take the events of as many transfers as they end."""
    while count:
        select.select([local.engine], [], [])
        for event in local.engine.events():
            if isinstance(event, Completed):
                event.transfer.result()
                count -= 1


def many(transport: str) -> Callable[[Size], Iterator[Row]]:
    """Pulls in flight from one thread, beside threads that wait for each pull."""

    def measure(size: Size) -> Iterator[Row]:
        with linked(Setting(transport, size.pull_bytes, size.pulls // 4), size.pulls) as local:
            waited: dict[int, list[float]] = {1: [], 2: [], 4: []}
            flying = []
            for number in range(size.rounds + 1):
                flown_medians = []
                for threads, figures in waited.items():
                    figures.append(speed(local, size, partial(pulled, local, size, threads)))
                    flown_medians.append(speed(local, size, partial(flown, local, size)))
                flying.append(statistics.median(flown_medians))
                if number == 0:  # touches the memory for the first time
                    flying.clear()
                    for figures in waited.values():
                        figures.clear()
        each = f"{size.pull_bytes >> 20} MiB" if size.pull_bytes >= MIB else f"{size.pull_bytes >> 10} KiB"
        what = f"{size.pulls:,} pulls of {each}, {transport}"
        for threads, figures in waited.items():
            yield Row(f"{what}, waiting for each, {threads} thread{'s' * (threads > 1)}", figures, "GB/s")
        yield Row(f"{what}, all in flight from one thread", flying, "GB/s")
        best = max(waited.values(), key=statistics.median)
        goal = 0.95 if transport == "shm" else None
        yield Row(f"{what}, in flight / the best row that waits", ratios(flying, best), "ratio", at_least=goal)

    return measure


def speed(local: Local, size: Size, timed_call: Callable[[], None]) -> float:
    """GB/s of pulling all blocks once. Checks the first and the last byte of each."""
    edges = local.view[:, :: size.pull_bytes - 1]
    edges[:] = 0
    nanos = micros(timed_call) * 1e3
    expected = row_values(size.pulls // 4)[np.arange(size.pulls) % (size.pulls // 4)]
    assert (edges == expected[:, None]).all(), "a block arrived wrong"
    return size.pulls * size.pull_bytes / nanos


def pull(local: Local, size: Size, block: int) -> Transfer[None]:
    """Start to pull one of all blocks."""
    return local.engine.pull(local.cache[block], local.kv[block % (size.pulls // 4)])


def pulled(local: Local, size: Size, threads: int) -> None:
    """Pull all blocks with threads that wait for each pull."""

    def some(first: int) -> None:
        for block in range(first, size.pulls, threads):
            pull(local, size, block).result()

    with ThreadPoolExecutor(threads) as pool:
        list(pool.map(some, range(threads)))


def flown(local: Local, size: Size) -> None:
    """Pull all blocks as a scheduler does: start them, then take the events."""
    for block in range(size.pulls):
        pull(local, size, block)
    ends(local, size.pulls)


def messages(transport: str, goal: int) -> Callable[[Size], Iterator[Row]]:
    """Messages of 64 bytes to a process that takes them as events."""

    def measure(size: Size) -> Iterator[Row]:
        figures = []
        with linked(Setting(transport), 1) as local:
            for _ in range(size.rounds):
                local.tell("receive", size.messages)
                started = time.perf_counter()
                for _ in range(size.messages):
                    while not accepted(local):
                        time.sleep(50e-6)
                assert int(local.answer()) == size.messages
                figures.append(size.messages / (time.perf_counter() - started))
        yield Row(f"messages of {len(PAYLOAD)} bytes, {transport}", figures, "per second", at_least=goal)

    return measure


def accepted(local: Local) -> bool:
    """Send one message, unless the window is full."""
    try:
        local.peer.send(PAYLOAD)
    except Busy:
        return False
    return True


def memory(size: Size) -> Iterator[Row]:
    """Memory of one more transfer that waits for a stopped peer.

    The allocator of the engine keeps a few freed lists, at most 16 MiB in all, whatever uses them next. Before each
    reading, `fill_kept_lists` has it keep all that it can, so they are no part of the difference. The memory
    of a list grows with its length. The figure without the list is that of a transfer with one block, less the memory
    of one block.
    """
    (one, handle), (many, _) = (in_flight(size, blocks) for blocks in (1, LONG_LIST))
    each = (many - one) / (LONG_LIST - 1)
    what = "memory of a transfer in flight"
    yield Row(f"{what}, without its list of blocks", [one - each], "bytes", at_most=1024)
    yield Row(f"{what}, each block of its list", [each], "bytes")
    yield Row(f"{what}, with a list of one block", [one], "bytes")
    yield Row(f"{what}, with a list of one block and its Python handle", [one + handle], "bytes")


def in_flight(size: Size, blocks: int) -> tuple[float, int]:
    """Bytes of one more transfer of this many blocks, and of its Python handle."""
    few, most = size.in_flight
    running: list[Transfer[None]] = []
    taken = []
    with linked(Setting("tcp", 8, 1), most * blocks, max_transfers=2 * most) as local:
        stop(local.owner.pid)
        for count in (few, most):
            while len(running) < count:
                first = len(running) * blocks
                to = list(range(first, first + blocks))
                running.append(local.engine.pull(local.cache[to], local.kv[[0] * blocks]))
            time.sleep(0.2)  # until the workers have begun what they can
            fill_kept_lists(local)
            taken.append(allocated())
        assert not any(transfer.done() for transfer in running)
        for transfer in running:
            transfer.cancel()
        os.kill(local.owner.pid, signal.SIGCONT)
        wait(running)
    before, after = taken
    return (after - before) / (most - few), sys.getsizeof(running[0])


def fill_kept_lists(local: Local) -> None:
    """Fill the store of freed lists of every size that the allocator of the engine keeps."""
    most = 1 << 18  # blocks: the longest list that is kept has 2 MiB, 8 bytes for each block
    with local.engine.allocate("lists", blocks=most + 1, tensors=1, shape=(1,), dtype="uint8") as cache:

        def copy(blocks: int) -> None:
            # Other threads use the same rows, so the lists of several calls exist at the same time.
            for _ in range(4):
                local.engine.copy(cache[:blocks], cache[[most] * blocks]).result()

        with ThreadPoolExecutor(4) as pool:
            for bits in range(11, 19):
                list(pool.map(copy, [1 << bits] * 4))


def stop(process: int) -> None:
    """Stop a process, and wait until each of its threads has stopped: they may answer some calls before."""
    os.kill(process, signal.SIGSTOP)
    threads = list(Path(f"/proc/{process}/task").glob("*/stat"))
    while any(thread.read_text().rsplit(")", 1)[1].split()[0] != "T" for thread in threads):
        time.sleep(1e-3)


class Mallinfo(ctypes.Structure):
    """`struct mallinfo2` of glibc."""

    _fields_ = tuple(
        (field, ctypes.c_size_t)
        for field in (
            *("arena", "ordblks", "smblks", "hblks", "hblkhd"),
            *("usmblks", "fsmblks", "uordblks", "fordblks", "keepcost"),
        )
    )


def allocated() -> int:
    """Bytes that malloc has given out. Python's small objects are not among them."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = Mallinfo
    info = mallinfo2()
    return int(info.uordblks + info.hblkhd)


def idle(size: Size) -> Iterator[Row]:
    """CPU time of both linked processes while nothing happens, before and after the first use of these calls."""
    with linked(Setting(), 1) as local:
        time.sleep(size.idle_ms / 5e3)
        before = both_rest(local, size)
        local.engine.fileno()
        local.engine.events()
        assert local.ask("greet", 1) == "1"
        local.peer.send(PAYLOAD)
        assert local.ask("receive", 1) == "1"
        while not local.engine.events():
            time.sleep(0.001)
        time.sleep(size.idle_ms / 5e3)
        after = both_rest(local, size)
    what, unit = "CPU of two idle linked processes", f"ms/{size.idle_ms / 1e3:g} s"
    yield Row(f"{what}, before the first call of events", [before], unit)
    yield Row(f"{what}, after fileno, events and messages", [after], unit)
    # Single heartbeats differ by more than a fraction of a millisecond.
    yield Row(f"{what}, difference", [float(round(after - before))], unit, at_most=0)


def both_rest(local: Local, size: Size) -> float:
    """Milliseconds of CPU time of both processes."""
    local.tell("rest", size.idle_ms)
    return rest(size.idle_ms) + float(local.answer())


def layers(size: Size) -> Iterator[Row]:
    """The caller's time for one request of 40 layers, whose destination is the owner's cache.

    Either the layers follow one another while a thread of the engine works, or they are so far apart that the last one
    has been sent. In the second case, the caller must wake a thread unless one polls. The last row is what waking a
    thread takes alone.
    """
    apart = f"{size.layer_ms * 1e3:g} us apart"
    rows: dict[str, tuple[float, dict[str, float]]] = {
        "one after the other": (0.0, {}),
        apart: (size.layer_ms, {}),
        f"{apart}, transfer_poll=1e-3": (size.layer_ms, {"transfer_poll": 1e-3}),
    }
    figures: dict[str, list[float]] = {"start": [], **{name: [] for name in rows}}
    for name, (pause_ms, options) in rows.items():
        with linked(Setting(blocks=64, tensors=2 * LAYERS, block_bytes=4 << 10), 64, **options) as local:
            for _ in range(size.rounds):
                begin, ready = layered(local, max(2, size.calls // 10), pause_ms)
                if pause_ms and not options:
                    figures["start"].append(begin)
                figures[name].append(ready)
    yield Row(f"start a layer-wise push of {LAYERS} layers", figures.pop("start"), "us", at_most=100)
    for name, values in figures.items():
        yield Row(f"Transfer.ready, layers {name}", values, "us", at_most=3)
    yield Row("waking a sleeping process by a write to a pipe", wake_ups(size), "us")


def layered(local: Local, requests: int, pause_ms: float) -> tuple[float, float]:
    """The medians of the caller's microseconds to start a request, and to report one of its layers."""
    numbers = list(range(16))
    begins, readies = [], []
    clock = time.perf_counter_ns
    for _ in range(requests):
        started = clock()
        push = local.engine.push(local.kv[numbers], local.cache[numbers], layerwise=True)
        begins.append((clock() - started) / 1e3)
        for layer in range(LAYERS):
            compute(pause_ms)
            started = clock()
            push.ready(layer)
            readies.append((clock() - started) / 1e3)
        push.result()
    return statistics.median(begins), statistics.median(readies)


def wake_ups(size: Size) -> list[float]:
    """Microseconds of waking a process that sleeps, for each round."""
    medians = []
    with subprocess.Popen(["cat"], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as sleeper:  # noqa: S607
        assert sleeper.stdin is not None
        write = partial(os.write, sleeper.stdin.fileno(), b"-")
        for _ in range(size.rounds):
            times = []
            for _ in range(size.calls):
                compute(size.layer_ms)
                times.append(micros(write))
            medians.append(statistics.median(times))
    return medians


def compute(millis: float) -> None:
    """Keep this core busy, as a model does between two layers."""
    until = time.perf_counter() + millis / 1e3
    while time.perf_counter() < until:
        pass


def lending(size: Size) -> Iterator[Row]:
    """What a grant costs its owner."""
    engine, cache, _ = opened(Setting(block_bytes=64), 64)
    rows = cache[::2]

    def lent() -> float:
        took = micros(lambda: engine.lend(rows, ttl=TIMEOUT_S).revoke())
        engine.events()
        return took

    figures = [statistics.median(lent() for _ in range(size.calls)) for _ in range(size.rounds)]
    yield Row("lend 32 blocks, and revoke", figures, "us")
    engine.close()


def pulls(size: Size) -> Iterator[Row]:
    """One pull alone, with a message to the owner's program, and under a grant, whose end the owner learns."""
    count = min(size.calls, 400)  # the messages of a round fit into the window of the owner
    figures: dict[str, list[float]] = {
        name: [] for name in ("alone", "notify", "a known grant", "a new grant", "a new grant and notify")
    }
    with linked(Setting(), 64) as local:
        (known,) = local.granted(1)
        for _ in range(size.rounds):
            tokens = iter(local.granted(2 * count))
            calls: dict[str, Callable[[], dict[str, Any]]] = {
                "alone": dict,
                "notify": lambda: {"notify": PAYLOAD},
                "a known grant": lambda: {"grant": known, "last": False},
                "a new grant": lambda: {"grant": next(tokens)},  # noqa: B023
                "a new grant and notify": lambda: {"grant": next(tokens), "notify": PAYLOAD},  # noqa: B023
            }
            for name, extras in calls.items():
                figures[name].append(statistics.median(one_pull(local, extras()) for _ in range(count)))
            assert int(local.ask("receive", 2 * count)) == 2 * count
    for name, values in figures.items():
        yield Row(f"pull of 16 KiB, {name}", values, "us")
    new = figures["a new grant"]
    yield Row("pull of 16 KiB, notify / a new grant", ratios(figures["notify"], new), "ratio", at_most=1.3)
    yield Row("pull of 16 KiB, a new grant and notify / a new grant", ratios([*figures.values()][-1], new), "ratio")


def one_pull(local: Local, extras: dict[str, Any]) -> float:
    """Microseconds of a pull of one block, with these arguments."""
    return micros(lambda: local.engine.pull(local.cache[1], local.kv[1], **extras).result())


def ratios(above: Sequence[float], below: Sequence[float]) -> list[float]:
    """The ratio of each round."""
    return [one / other for one, other in zip(above, below)]


# A part is one more function that yields rows, and one more line here.
PARTS: dict[str, Callable[[Size], Iterator[Row]]] = {
    "start": start,
    "events": events,
    "many": many("shm"),
    "many-tcp": many("tcp"),
    "pulls": pulls,
    "messages": messages("shm", 200_000),
    "messages-tcp": messages("tcp", 50_000),
    "layers": layers,
    "lending": lending,
    "memory": memory,
    "idle": idle,
}


def main() -> None:
    """Print the table, or the rows of one part."""
    parser = argparse.ArgumentParser(description="what transfers in flight, events and messages cost from Python")
    parser.add_argument("--quick", action="store_true", help="run everything once, without useful figures")
    parser.add_argument("--only", default=",".join(PARTS), help="parts to run, with commas (default: all)")
    parser.add_argument("--part", choices=PARTS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.part:
        for row in PARTS[options.part](QUICK if options.quick else Size()):
            print(row.line(), flush=True)
        return
    unknown = [part for part in options.only.split(",") if part not in PARTS]
    if unknown:
        parser.error(f"--only={options.only}: {unknown} are not among {', '.join(PARTS)}")
    print(f"{'':70} {'median':>11} {'':10} {'(lowest to highest)':26} {'goal':>10}", flush=True)
    for part in options.only.split(","):
        order = [sys.executable, __file__, "--part", part, *(["--quick"] if options.quick else [])]
        subprocess.run(order, check=True)  # noqa: S603  (this program)


if __name__ == "__main__":
    main()
