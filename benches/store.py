"""A store and its keeper in two processes, beside a bare copy loop and files in shared memory: `make bench-store`.

The keeper is `llm-datadist serve`. Each row has the throughput of put and get for one size of value, and the ratios to
two baselines of the same round: `numpy.copyto` of the same arrays, and one file in /dev/shm for each value, written and
read whole. All are medians over rounds, in which the three take turns. Each value that a get or a read has copied is
compared. Two further rows have the time of `exists` of 1,000 keys and of a get of 1,000 values of 64 KiB. The put is
measured with keys that the keeper does not have, and slots that were used before. The first line is the state of the
machine.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Callable

import numpy as np

from llm_datadist import Store

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

SIZES = {"64 KiB": 64 << 10, "2 MiB": 2 << 20}
KEYS = 1000
TIMEOUT = 60.0


def keys_of(label: str, count: int) -> list[bytes]:
    """The keys of a round."""
    return [hashlib.sha224(f"{label} {number}".encode()).digest() for number in range(count)]


def arrays(count: int, size: int, fill: int) -> list[np.ndarray]:
    """Arrays whose pages are there. Each begins with its number and `fill`."""
    made = [np.full(size, fill, dtype=np.uint8) for _ in range(count)]
    for number, array in enumerate(made):
        array[:8] = np.frombuffer(np.int64(number * 1000 + fill).tobytes(), dtype=np.uint8)
    return made


def equal(one: Sequence[np.ndarray], other: Sequence[np.ndarray]) -> None:
    """Check all bytes."""
    assert len(one) == len(other)
    assert all(np.array_equal(left, right) for left, right in zip(one, other)), "a value is wrong"


def seconds(call: Callable[[], object]) -> float:
    """How long a call takes."""
    begin = time.perf_counter()
    call()
    return time.perf_counter() - begin


def copy_loop(source: Sequence[np.ndarray], into: Sequence[np.ndarray]) -> None:
    """The bare loop."""
    for to, array in zip(into, source):
        np.copyto(to, array)


def write_files(folder: Path, source: Sequence[np.ndarray]) -> None:
    """Write a file for each value, over the one of the last round."""
    for number, array in enumerate(source):
        descriptor = os.open(folder / str(number), os.O_WRONLY | os.O_CREAT, 0o600)
        assert os.write(descriptor, array.data) == array.nbytes, "a file is not whole"
        os.close(descriptor)


def read_files(folder: Path, into: Sequence[np.ndarray]) -> None:
    """Read the file of each value."""
    for number, array in enumerate(into):
        descriptor = os.open(folder / str(number), os.O_RDONLY)
        assert os.readv(descriptor, [array.data]) == array.nbytes, "a file is not whole"
        os.close(descriptor)


class Round:
    """The times of one round of one size, in seconds."""

    def __init__(self, store: Store, folder: Path, label: str, size: int, count: int) -> None:
        source, into = arrays(count, size, 1 + len(label) % 200), arrays(count, size, 0)
        keys = keys_of(label, count)
        self.copy = seconds(lambda: copy_loop(source, into))
        equal(source, into)
        self.put = seconds(lambda: self.check(store.put(keys, source)))
        clear(into)
        self.get = seconds(lambda: self.check(store.get(keys, into)))
        equal(source, into)
        self.write = seconds(lambda: write_files(folder, source))
        clear(into)
        self.read = seconds(lambda: read_files(folder, into))
        equal(source, into)

    @staticmethod
    def check(results: list[bool]) -> None:
        """Check that no key failed."""
        assert all(results), "a put or a get has failed"


def clear(into: Sequence[np.ndarray]) -> None:
    """Overwrite what the last measurement has left."""
    for array in into:
        array.fill(0)


@contextmanager
def keeper(folder: Path, size: int, memory: int) -> Iterator[Store]:
    """A keeper in its own process, and a store."""
    socket = folder / "keeper"
    order = ["serve", "--memory", f"{memory >> 10}KiB", "--value", f"{size >> 10}KiB", "--socket", str(socket)]
    with subprocess.Popen([sys.executable, "-m", "llm_datadist", *order], stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("ready"), "the keeper has not started"
            with Store(socket, namespace="a benchmark", value=size, timeout=TIMEOUT) as store:
                yield store
        finally:
            process.terminate()


def throughput(folder: Path, label: str, size: int, count: int, rounds: int) -> str:
    """A row of the table."""
    shm = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        # The second round takes slots that the first one has used.
        with keeper(folder, size, count * size) as store:
            taken = [Round(store, shm, f"{label} {number}", size, count) for number in range(rounds + 1)][1:]
    finally:
        shutil.rmtree(shm)
    gigabytes = count * size / 1e9
    median = statistics.median
    cells = [f"{label:8}{gigabytes / median([one.copy for one in taken]):9.3g}"]
    for ours, theirs in (("put", "write"), ("get", "read")):
        times = [getattr(one, ours) for one in taken]
        cells.append(f"{gigabytes / median(times):9.3g}")
        cells.append(f"{median([one.copy / getattr(one, ours) for one in taken]):9.3g}")
        cells.append(f"{median([getattr(one, theirs) / getattr(one, ours) for one in taken]):9.3g}")
    return "".join(cells)


def times(folder: Path, rounds: int) -> tuple[float, float, float]:
    """Seconds of `exists` of 1,000 keys (all there), of a get of their values, and of the copy loop."""
    size = SIZES["64 KiB"]
    with keeper(folder, size, (KEYS + 24) * size) as store:
        source, into, keys = arrays(KEYS, size, 7), arrays(KEYS, size, 0), keys_of("times", KEYS)
        Round.check(store.put(keys, source))
        taken = []
        for _ in range(rounds):
            found = seconds(lambda: Round.check(store.exists(keys)))
            clear(into)
            got = seconds(lambda: Round.check(store.get(keys, into)))
            equal(source, into)
            taken.append((found, got, seconds(lambda: copy_loop(source, into))))
    found, got, copied = (statistics.median(column) for column in zip(*taken))
    return found, got, copied


def machine() -> str:
    """The state of the machine in one line."""
    model = next(line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name"))
    load = " ".join(Path("/proc/loadavg").read_text().split()[:3])
    return f"{model.split(': ')[1]}, {os.cpu_count()} cores, kernel {os.uname().release}, load {load}"


def main() -> None:
    """Print the tables."""
    parser = argparse.ArgumentParser(description="a store and its keeper beside a copy loop and files in /dev/shm")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--mebibytes", type=int, default=256, help="bytes of a round")
    options = parser.parse_args()
    total = options.mebibytes << 20
    print(machine())
    print(f"GB/s of {options.mebibytes} MiB a call, medians of {options.rounds} rounds; ratios of throughput")
    columns = ("copy", "put", "/ copy", "/ files", "get", "/ copy", "/ files")
    print("".join([f"{'':8}", *(f"{column:>9}" for column in columns)]))
    with tempfile.TemporaryDirectory() as folder:
        for label, size in SIZES.items():
            print(throughput(Path(folder), label, size, min(total // size, 4096), options.rounds), flush=True)
        found, got, copied = times(Path(folder), options.rounds)
    print(f"exists of {KEYS:,} keys: {found * 1e6:,.0f} us")
    print(f"get of {KEYS:,} values of 64 KiB: {got * 1e3:.2f} ms ({copied / got:.2f} of the speed of the copy loop)")
    print(machine())


if __name__ == "__main__":
    main()
