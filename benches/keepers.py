"""Counts and times of a keeper beside its clients, each in a process of its own: `make bench-store` runs it.

Memory of clients that read one working set, the first hit of a client that starts again, leases of a killed client, a
keeper that nobody asks, and the hit rate on a trace beside that of an LRU cache. The first line is the state of
the machine.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from store import keys_of, machine

from llm_datadist import Keeper, KeeperObserver, Store
from llm_datadist.commands.replay.hit_rates import hit_rates
from llm_datadist.commands.replay.trace import make_trace, read_trace

if TYPE_CHECKING:
    from collections.abc import Iterator

VALUE = 64 << 10
NAMESPACE = "a benchmark"
BATCH, READ_BATCH = 512, 16
"""Values of a put, and of a get of a client that reads all of them into the same few buffers."""
TIMEOUT = 60.0
CLIENT = f"""
import hashlib, sys, time
from llm_datadist import Store
key = lambda number: hashlib.sha224(b"working set %d" % number).digest()
count = int(sys.argv[2])
begin = time.monotonic()
store = Store(sys.argv[1], namespace={NAMESPACE!r}, timeout={TIMEOUT})
"""
READ = f"""
buffers = [bytearray({VALUE}) for _ in range({READ_BATCH})]
for at in range(0, count, {READ_BATCH}):
    numbers = range(at, min(at + {READ_BATCH}, count))
    assert all(store.get([key(n) for n in numbers], buffers[: len(numbers)])), "a value is not there"
    assert all(buffer[:8] == n.to_bytes(8, "little") for n, buffer in zip(numbers, buffers)), "a value is wrong"
print("read", flush=True)
sys.stdin.read()
"""
FIRST_HIT = f"""
buffer = bytearray({VALUE})
assert store.get([key(count - 1)], [buffer]) == [True], "no hit"
print(time.monotonic() - begin, flush=True)
"""
LEASE = """
print(sum(store.lease([key(n) for n in range(count)], ttl=10)), flush=True)
sys.stdin.read()
"""


class Served:
    """A keeper that is full, as `llm-datadist serve` runs it."""

    def __init__(self, folder: Path, values: int, stack: ExitStack) -> None:
        self.socket, self.values = folder / "keeper", values
        order = ["serve", "--memory", f"{values * VALUE >> 10}KiB", "--socket", str(self.socket)]
        self.holder = subprocess.Popen(  # noqa: S603
            [sys.executable, "-m", "llm_datadist", *order], stdout=subprocess.PIPE, text=True
        )
        stack.callback(self.close)
        assert self.holder.stdout is not None
        assert self.holder.stdout.readline().startswith("ready"), "the keeper has not started"
        children = Path(f"/proc/{self.holder.pid}/task/{self.holder.pid}/children").read_text().split()
        self.processes = [self.holder.pid, *map(int, children)]
        keys = keys_of("working set", values)
        with Store(self.socket, namespace=NAMESPACE, timeout=TIMEOUT) as store:
            for at in range(0, values, BATCH):
                numbers = range(at, min(at + BATCH, values))
                stored = store.put(keys[at : at + BATCH], [n.to_bytes(8, "little") * (VALUE // 8) for n in numbers])
                assert all(stored), "a value was not stored"

    def close(self) -> None:
        """End the keeper."""
        self.holder.terminate()
        self.holder.wait()

    @contextmanager
    def client(self, code: str, count: int) -> Iterator[subprocess.Popen[str]]:
        """A process that runs some code, and its end."""
        order = [sys.executable, "-c", CLIENT + code, str(self.socket), str(count)]
        with subprocess.Popen(order, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as started:  # noqa: S603
            try:
                yield started
            finally:
                started.kill()


def line(process: subprocess.Popen[str]) -> str:
    """Read a line that a process prints."""
    assert process.stdout is not None
    printed = process.stdout.readline()
    assert printed, "a client has failed"
    return printed


@contextmanager
def served(values: int) -> Iterator[Served]:
    """A full keeper, and its end."""
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        yield Served(Path(folder), values, stack)


def pss(pid: int) -> int:
    """Bytes of a process, of which those that it shares count in part."""
    for row in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
        if row.startswith("Pss:"):
            return int(row.split()[1]) << 10
    raise AssertionError(f"process {pid} has no Pss")


def memory(keeper: Served) -> None:
    """All of a working set is read by one client, and then by four."""
    taken = {}
    with ExitStack() as stack:
        clients: list[int] = []
        for count in (1, 4):
            while len(clients) < count:
                client = stack.enter_context(keeper.client(READ, keeper.values))
                assert line(client) == "read\n"
                clients.append(client.pid)
            taken[count] = sum(map(pss, [*keeper.processes, *clients]))
    one, four = taken[1], taken[4]
    print(
        f"memory (Pss) of the keeper and 4 clients that have read {keeper.values * VALUE >> 20:,} MiB: "
        f"{four >> 20:,} MiB, {four / one:.3f} x that with 1 client ({one >> 20:,} MiB)"
    )


def first_hit(keeper: Served, rounds: int) -> None:
    """A client starts, and reads the value that was put last."""
    taken = []
    for _ in range(rounds):
        with keeper.client(FIRST_HIT, keeper.values) as client:
            taken.append(float(line(client)) * 1e3)
    print(f"from Store(...) in a new process to its first hit: {spread(taken)}")


def killed(keeper: Served, rounds: int) -> None:
    """A client is killed while it has leases. A second one, which looks, is attached all the time."""
    taken, most = [], keeper.values // 8
    with KeeperObserver(keeper.socket, timeout=TIMEOUT) as observer:
        for _ in range(rounds):
            with keeper.client(LEASE, most) as client:
                assert line(client) == f"{most}\n", "too few leases"
                assert observer.stats()["leased"] == most, "too few leases"
                begin = time.monotonic()
                os.kill(client.pid, signal.SIGKILL)
                while observer.stats()["leased"]:
                    assert time.monotonic() - begin < TIMEOUT, "leases stay"
                taken.append((time.monotonic() - begin) * 1e3)
    print(f"from kill -9 of a client until none of its {most * VALUE >> 20:,} MiB is leased: {spread(taken)}")


def spread(taken: list[float]) -> str:
    """Milliseconds as text."""
    return f"{statistics.median(taken):.1f} ms, at most {max(taken):.1f} (of {len(taken)})"


def cpu_ms(pid: int) -> float:
    """How long a process has run so far, in user mode and in the kernel."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) * 1e3 / os.sysconf("SC_CLK_TCK")


def idle(keeper: Served, seconds: float) -> None:
    """Eight clients are attached and make no calls."""
    with ExitStack() as stack:
        for _ in range(8):
            stack.enter_context(Store(keeper.socket, namespace=NAMESPACE, timeout=TIMEOUT)).stats()
        time.sleep(1)
        before = [cpu_ms(pid) for pid in (*keeper.processes, os.getpid())]
        time.sleep(seconds)
        holder, child, clients = (cpu_ms(p) - b for p, b in zip((*keeper.processes, os.getpid()), before))
        threads = [len(list(Path(f"/proc/{pid}/task").iterdir())) for pid in keeper.processes]
    print(
        f"idle for {seconds:.0f} s with 8 clients: {holder + child:.0f} ms of CPU in the keeper, {clients:.0f} ms in "
        f"the process of the clients (clock ticks of {1e3 / os.sysconf('SC_CLK_TCK'):.0f} ms); threads {sum(threads)}"
    )


def trace_hits(trace: str | None, capacity: int) -> None:
    """A keeper with small values serves the requests of a trace one after the other."""
    requests = read_trace(trace) if trace else make_trace(12_000, seed=1)
    size, found, total = 64, 0, 0
    with tempfile.TemporaryDirectory() as folder:
        keeper = Keeper(memory=capacity * size, value=size, socket=f"{folder}/keeper")
        with keeper, Store(f"{folder}/keeper", namespace="a trace", value=size, timeout=TIMEOUT) as store:
            assert keeper.slots == capacity, "the keeper has another capacity"
            for request in requests:
                values = [block.to_bytes(8, "little") * (size // 8) for block in request.blocks]
                keys = [hashlib.sha224(value).digest() for value in values]
                prefix = [*store.exists(keys), False].index(False)
                buffers = [bytearray(size) for _ in range(prefix)]
                assert all(store.get(keys[:prefix], buffers)), "a value is not there"
                assert buffers == values[:prefix], "a value is wrong"
                store.put(keys, values)
                found, total = found + prefix, total + len(keys)
    lru = hit_rates(requests, [capacity])[0]
    assert total, "the trace is empty"
    print(
        f"hit rate of {capacity:,} blocks on {trace or 'a generated trace'} ({total:,} blocks): "
        f"{100 * found / total:.2f} %; of an LRU cache: {100 * lru.share:.2f} %"
    )


def main() -> None:
    """Print the figures."""
    parser = argparse.ArgumentParser(description="counts and times of a keeper beside its clients")
    parser.add_argument("--mebibytes", type=int, default=512, help="memory of the keeper")
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--seconds", type=float, default=10.0, help="how long the keeper is idle")
    parser.add_argument("--trace", help="requests as JSON lines (a generated trace)")
    parser.add_argument("--blocks", type=int, default=20_000, help="capacity for the trace")
    options = parser.parse_args()
    print(machine())
    with served((options.mebibytes << 20) // VALUE) as keeper:
        memory(keeper)
        first_hit(keeper, options.rounds)
        killed(keeper, options.rounds)
        idle(keeper, options.seconds)
    trace_hits(options.trace, options.blocks)
    print(machine())


if __name__ == "__main__":
    main()
