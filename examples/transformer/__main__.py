"""A transformer in two processes (`python examples/transformer`): prefill computes KV, decode continues from it.

Runs both cache layouts, and compares every token and every bit of every logit with the same model in one process.
Prints how much of the transfer was hidden behind compute, and exits with 1 on any difference. Not for: what the
processes do (`prefill`, `decode`).
"""
# ruff: noqa: E402  (the environment must be set before numpy is imported)

from __future__ import annotations

import argparse
import os
import sys

# One thread: with more, BLAS may split a product differently from run to run, and then sum it in another order.
for _name in ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS", "BLIS_NUM_THREADS"):
    os.environ[_name] = "1"

import multiprocessing as mp
import time
from multiprocessing import connection
from typing import TYPE_CHECKING, Any

import decode
import prefill
from generation import Workload, differences, in_one_process
from model import Shape
from node import Setup

if TYPE_CHECKING:
    from decode import Served
    from generation import Generation
    from prefill import Timing

LAYOUTS = ("contiguous", "paged")


def in_two_processes(setup: Setup) -> tuple[list[Timing], Served]:
    """Run prefill and decode, and return the result of each. Neither outlives this call.

    Raises RuntimeError if one of them ends without a result, or has none after the limit of `setup`.
    """
    context = mp.get_context("spawn")  # an engine does not survive a fork
    between = context.Pipe()
    names = ("prefill", "decode")
    results: dict[str, connection.Connection] = {}
    processes = []
    for name, main, end in zip(names, (prefill.run, decode.run), between):
        results[name], into = context.Pipe(duplex=False)
        process = context.Process(target=main, args=(setup, end, into), name=name, daemon=True)
        process.start()
        processes.append(process)
        into.close()
        end.close()
    try:
        got = _gather(results, setup.limit_s)
    finally:
        for process in processes:
            process.kill()
            process.join()
    return got["prefill"], got["decode"]


def _gather(results: dict[str, connection.Connection], limit_s: float) -> dict[str, Any]:
    """Wait for one message of each process."""
    got: dict[str, Any] = {}
    until = time.monotonic() + limit_s
    while missing := [name for name in results if name not in got]:
        ready = connection.wait([results[name] for name in missing], max(until - time.monotonic(), 0))
        for name in [name for name in missing if results[name] in ready]:
            got[name] = _received(name, results[name])
        if not ready:
            raise RuntimeError(f"{' and '.join(missing)} gave no result within {limit_s:g} s")
    return got


def _received(name: str, result: connection.Connection) -> Any:
    try:
        return result.recv()
    except EOFError:
        raise RuntimeError(f"{name} ended without a result") from None


def rows_needed(work: Workload, layout: str) -> tuple[int, int, int]:
    """Return the rows of the prefill cache (one group), and of decode's device cache (two) and host cache (all)."""
    if layout == "contiguous":
        return max(map(len, work.groups)), len(work.requests), 0

    def blocks(tokens: int) -> int:
        return -(-tokens // work.block_tokens)

    prompts = [sum(blocks(len(work.requests[number].prompt)) for number in group) for group in work.groups]
    whole = sorted(sum(blocks(work.requests[number].tokens) for number in group) for group in work.groups)
    return max(prompts), sum(whole[-2:]), sum(whole)


def report(layout: str, timings: list[Timing], served: Served) -> None:
    """Print the timings of a run in two processes."""
    print(f"\n{layout}: {served.swapped_out} requests swapped out, {served.swapped_in} in")
    print("  group   KV MiB   compute ms   last layer in place   same transfer alone   hidden   in place as computed")
    for number, timing in enumerate(timings):
        hidden = max(1 - timing.exposed_s / timing.alone_s, 0.0)
        print(
            f"  {number:5}   {timing.bytes / 2**20:6.1f}   {timing.compute_s * 1e3:10.1f}   "
            f"{timing.exposed_s * 1e3:12.2f} ms later   {timing.alone_s * 1e3:16.2f} ms   {hidden:6.0%}   "
            f"{' '.join(map(str, timing.in_place))}"
        )
    layers = sum(len(timing.in_place) for timing in timings)
    compute, alone = (sum(getattr(timing, name) for timing in timings) for name in ("compute_s", "alone_s"))
    print(f"  a layer: {compute / layers * 1e3:.2f} ms of compute, {alone / layers * 1e3:.2f} ms of transfer")


def compare(layout: str, work: Workload, alone: Generation, served: Served) -> bool:
    """Print and return whether a run has the same tokens and logits as the run in one process."""
    wrong = differences(work, alone, served.made)
    for line in wrong:
        print(f"  DIFFERENT: {line}")
    count = sum(request.new_tokens for request in work.requests)
    values = count * work.shape.vocabulary
    if not wrong:
        print(f"  {layout}: {count} tokens identical, {values:,} logits identical bit for bit")
    return not wrong


def main() -> int:
    """Run everything and return the exit status."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--small", action="store_true", help="a smaller model and fewer tokens")
    parser.add_argument("--prove", action="store_true", help="before the last layer, wait for one to have arrived")
    parser.add_argument("--transport", choices=("auto", "shm", "tcp"), default="auto", help="how the link moves bytes")
    parser.add_argument("--limit", type=float, default=60.0, help="time limit of both processes, in seconds (60)")
    options = parser.parse_args()
    shape = Shape(layers=6, hidden=64, heads=4, kv_heads=2, inner=160, vocabulary=96, tokens=160)
    work = Workload.make(shape if options.small else Shape(), groups=3)
    print(f"{work.shape}, {len(work.requests)} requests in groups of {len(work.groups[0])}")
    start = time.perf_counter()
    alone = in_one_process(work)
    print(f"one process: {time.perf_counter() - start:.1f} s")
    for number, (request, tokens) in enumerate(zip(work.requests, alone.tokens)):
        shown = " ".join(map(str, tokens[:12])) + (" …" if len(tokens) > 12 else "")
        print(f"  request {number}: {len(request.prompt):3} tokens, then {len(tokens):2}: {shown}")
    good = True
    for layout in LAYOUTS:
        setup = Setup(work, layout, rows_needed(work, layout), options.prove, options.transport, options.limit)
        try:
            timings, served = in_two_processes(setup)
        except RuntimeError as error:
            print(f"{layout}: {error}", file=sys.stderr)
            return 1
        report(layout, timings, served)
        good = compare(layout, work, alone, served) and good
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
