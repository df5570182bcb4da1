"""The module `hixl` beside the native engine: reads and writes of 128 MiB in pieces, and single calls.

Two processes of one host, the caller and the owner of the remote memory. Both APIs move the same pieces between the
same memory, in alternate rounds of which the first warms up. The lists of operations and blocks are made before the
clock starts. A ratio is hixl's median throughput by that of the native pull of the same blocks. The bytes are checked
after each call. Not for: other systems (`benches/peers`).
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import random
import socket
import statistics
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Callable

import hixl
from llm_datadist.native import Engine

if TYPE_CHECKING:
    from collections.abc import Sequence

KIB, MIB = 1 << 10, 1 << 20
MOVED = 128 * MIB
MEMORY = 256 * MIB  # twice what a call moves: sources and destinations differ from piece to piece
PIECES = (16 * KIB, 32 * KIB, 64 * KIB, 128 * KIB, 256 * KIB, 512 * KIB, 1 * MIB, 2 * MIB)
LIMIT = 30_000


class Side:
    """An engine of each API over the same memory."""

    def __init__(self, address: str, seed: int) -> None:
        self.memory = mmap.mmap(-1, MEMORY)
        self.view = memoryview(self.memory)
        self.fill(seed)
        self.at = ctypes.addressof(ctypes.c_char.from_buffer(self.memory))
        self.hixl = hixl.Hixl()
        succeed(self.hixl.initialize(address))
        status, _ = self.hixl.register_mem(hixl.MemDesc(self.at, MEMORY), hixl.MEM_HOST)
        succeed(status)
        self.native = Engine(listen="127.0.0.1:0")
        self.caches = {
            piece: self.native.register(f"of {piece}", [self.at], blocks=MEMORY // piece, shape=[piece], dtype="uint8")
            for piece in PIECES
        }

    def fill(self, seed: int) -> None:
        """Write bytes that differ from one 4 KiB page to the next."""
        draw = random.Random(seed)  # noqa: S311
        for page in range(0, MEMORY, 4 * KIB):
            self.view[page : page + 8] = draw.randbytes(8)

    def page(self, at: int) -> bytes:
        """Return the bytes that differ from those of other pages."""
        return bytes(self.view[at : at + 8])


def succeed(status: int) -> None:
    """Check a status."""
    assert status == hixl.SUCCESS, f"status {status}"


def free_address() -> str:
    """Return an address at which an engine can listen."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"


def serve() -> None:
    """Be the owner of the remote memory, until the input ends. A line asks for the bytes of a page."""
    address = free_address()
    side = Side(address, 1)
    print(address, side.native.address, side.at, flush=True)
    for line in sys.stdin:
        print(side.page(int(line)).hex(), flush=True)


class Bench:
    """The caller, with the owner in another process."""

    def __init__(self, owner: subprocess.Popen[str]) -> None:
        self.owner = owner
        assert owner.stdout is not None
        self.address, native, remote = owner.stdout.readline().split()
        self.remote = int(remote)
        self.side = Side("127.0.0.1:0", 2)
        succeed(self.side.hixl.connect(self.address, LIMIT))
        self.peer = self.side.native.link(native).result(30)

    def remote_page(self, at: int) -> bytes:
        """Return what `Side.page` returns at the owner."""
        assert self.owner.stdin is not None
        assert self.owner.stdout is not None
        self.owner.stdin.write(f"{at}\n")
        self.owner.stdin.flush()
        return bytes.fromhex(self.owner.stdout.readline())

    def calls(self, piece: int, moved: int) -> tuple[dict[str, Callable[[], object]], list[int], list[int]]:
        """Return the calls that move the same pieces, and the local and remote offsets of the pieces."""
        draw, piece_count, count = random.Random(piece), MEMORY // piece, moved // piece  # noqa: S311
        local_blocks, remote_blocks = draw.sample(range(piece_count), count), draw.sample(range(piece_count), count)
        here, there = [piece * block for block in local_blocks], [piece * block for block in remote_blocks]
        ops = [hixl.TransferOpDesc(self.side.at + a, self.remote + b, piece) for a, b in zip(here, there)]
        rows, cache, remote = self.side.native, self.side.caches[piece], self.peer[f"of {piece}"]
        own = self.side.hixl
        calls: dict[str, Callable[[], object]] = {
            "pull": lambda: rows.pull(cache[local_blocks], remote[remote_blocks]).result(30),
            "READ": lambda: succeed(own.transfer_sync(self.address, hixl.READ, ops, LIMIT)),
            "push": lambda: rows.push(remote[remote_blocks], cache[local_blocks]).result(30),
            "WRITE": lambda: succeed(own.transfer_sync(self.address, hixl.WRITE, ops, LIMIT)),
        }
        return calls, here, there

    def check(self, here: Sequence[int], there: Sequence[int]) -> None:
        """Check the first page of a few pieces, which are equal at both ends after any of the calls."""
        for local, remote in list(zip(here, there))[:: max(1, len(here) // 16)]:
            assert self.side.page(local) == self.remote_page(remote), f"the piece at {local} is wrong"

    def throughput(self, piece: int, rounds: int) -> dict[str, float]:
        """Return the median GB/s of each call."""
        calls, here, there = self.calls(piece, MOVED)
        found: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(rounds + 1):
            for name, call in calls.items():
                self.side.fill(random.randrange(1 << 30))  # noqa: S311
                begun = time.perf_counter()
                call()
                found[name].append(MOVED / (time.perf_counter() - begun) / 1e9)
                self.check(here, there)
        return {name: statistics.median(figures[1:]) for name, figures in found.items()}

    def latency(self, slices: int, count: int) -> dict[str, float]:
        """Return the p50 of one call of 16 KiB in microseconds."""
        calls, here, there = self.calls(16 * KIB, 16 * KIB)
        found: dict[str, list[float]] = {name: [] for name in calls}
        for _ in range(slices + 1):
            for name, call in calls.items():
                took = []
                for _ in range(count):
                    begun = time.perf_counter()
                    call()
                    took.append(time.perf_counter() - begun)
                found[name].append(1e6 * statistics.median(took))
            self.check(here, there)
        return {name: statistics.median(figures[1:]) for name, figures in found.items()}

    def submission(self, rounds: int) -> float:
        """Return the median milliseconds of `transfer_async` with 8,192 pieces of 16 KiB."""
        _, here, there = self.calls(16 * KIB, MOVED)
        ops = [hixl.TransferOpDesc(self.side.at + a, self.remote + b, 16 * KIB) for a, b in zip(here, there)]
        found = []
        for _ in range(rounds + 1):
            begun = time.perf_counter()
            status, request = self.side.hixl.transfer_async(self.address, hixl.READ, ops)
            found.append(1e3 * (time.perf_counter() - begun))
            succeed(status)
            while (state := self.side.hixl.get_transfer_status(request)[1]) == hixl.TransferStatus.WAITING:
                time.sleep(1e-4)
            assert state == hixl.TransferStatus.COMPLETED, state
            self.check(here, there)
        return statistics.median(found[1:])


def main() -> None:
    """Print the tables, or be the owner."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--calls", type=int, default=1000, help="calls of a slice of one round")
    parser.add_argument("--pieces", default="16,2048", help="sizes of pieces in KiB, separated by commas")
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    sizes = [KIB * int(size) for size in options.pieces.split(",")]
    unknown = [size for size in sizes if size not in PIECES]
    if unknown or options.rounds < 1 or options.calls < 1:
        parser.error(f"--pieces takes {','.join(str(size // KIB) for size in PIECES)}; the others take 1 or more")
    order = [sys.executable, __file__, "--serve"]
    with subprocess.Popen(order, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:  # noqa: S603
        bench = Bench(owner)
        print(f"{MOVED // MIB} MiB a call, {options.rounds} rounds, GB/s (10^9 bytes), medians")
        print(f"{'piece':>9} {'pull':>7} {'READ':>7} {'ratio':>6} {'push':>7} {'WRITE':>7} {'by pull':>8}")
        for piece in sizes:
            found = bench.throughput(piece, options.rounds)
            pull, read, push, write = (found[name] for name in ("pull", "READ", "push", "WRITE"))
            print(
                f"{piece // KIB:5} KiB {pull:7.2f} {read:7.2f} {read / pull:6.2f} {push:7.2f} {write:7.2f}"
                f" {write / pull:8.2f}"
            )
        single = bench.latency(options.rounds, options.calls)
        print("one call of 16 KiB, p50 in µs: " + ", ".join(f"{name} {took:.1f}" for name, took in single.items()))
        print(
            f"transfer_async of {MOVED // (16 * KIB)} pieces: {bench.submission(options.rounds):.3f} ms of the caller"
        )


if __name__ == "__main__":
    main()
