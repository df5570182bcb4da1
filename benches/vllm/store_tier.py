"""Times of vLLM's scheduler with ``LlmDatadistStoreTier`` over a keeper, beside vLLM's own tier ``fs`` over files.

    .venv-vllm/bin/python benches/vllm/store_tier.py [--rounds 5] [--jobs 20] [--chunks 128] [--keys 1000]

vLLM's real tiers, no model. The keeper is a process of its own, and the files are in ``--folder``. "lookup": what the
thread of the scheduler spends until it knows which keys are there, in all steps together. "submit and poll": what it
spends for a job, until the job is reported. The systems take turns, and the bytes of loads are compared. Not for:
correctness (integration-tests/vllm).
"""

from __future__ import annotations

import argparse
import itertools
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "integration-tests/vllm"))

from p2p_scheduler import IDLE, Scheduler, keys  # noqa: E402
from vllm.v1.kv_offload.base import LookupResult, ReqContext  # noqa: E402
from vllm.v1.kv_offload.tiering.base import TransferJob  # noqa: E402

if TYPE_CHECKING:
    from collections.abc import Callable

Times = dict[str, list[float]]
STEP_S = 0.0005  # between the steps of the scheduler, which would run the model
_numbers = itertools.count()


def begun(scheduler: Scheduler, wanted: list[bytes]) -> ReqContext:
    """Return a new request with these keys."""
    context = ReqContext(req_id=f"request {next(_numbers)}")
    for position, key in enumerate(wanted):
        context.set_offload_key_position(key, 16 * (position + 1))
    scheduler.tier.on_new_request(context)
    return context


def run_job(scheduler: Scheduler, submit: Callable[[Any], None], wanted: Any, rows: np.ndarray, context: Any) -> float:
    """Run one job, and return the seconds of the scheduler's thread."""
    job = TransferJob(next(_numbers), wanted, rows, is_promotion=isinstance(wanted, list), req_context=context)
    begin = time.perf_counter()
    submit(job)
    spent = time.perf_counter() - begin
    while True:
        time.sleep(STEP_S)
        begin = time.perf_counter()
        ended = list(scheduler.tier.get_finished_jobs())
        spent += time.perf_counter() - begin
        if ended:
            if [(result.job_id, result.success) for result in ended] != [(job.job_id, True)]:
                raise RuntimeError(f"job {job.job_id} has failed: {ended}")
            return spent


def looked_up(scheduler: Scheduler, wanted: list[bytes], present: bool) -> tuple[float, int]:
    """Look keys up as the scheduler does. Return the seconds of its thread, and the steps until all are known."""
    context, tier, spent, steps = begun(scheduler, wanted), scheduler.tier, 0.0, 0
    while True:
        steps += 1
        begin = time.perf_counter()
        found = [tier.lookup(key, context) for key in wanted]
        tier.on_schedule_end(IDLE)
        spent += time.perf_counter() - begin
        if LookupResult.RETRY not in found:
            break
        time.sleep(STEP_S)
    tier.on_request_finished(context)
    if found != [LookupResult.HIT if present else LookupResult.MISS] * len(wanted):
        raise RuntimeError("a lookup has found other keys")
    return spent, steps


def measure(tier: dict[str, Any], given: argparse.Namespace, times: Times) -> None:
    """Add the seconds of one round of a system."""
    room = max(given.keys, given.chunks) + 8
    scheduler = Scheduler(tier, room, given.size)
    try:
        held = np.arange(given.keys, dtype=np.int32)
        stored = keys("present", given.keys)
        for row in held:
            scheduler.rows[row] = row % 127
        context = begun(scheduler, stored)
        run_job(scheduler, scheduler.tier.submit_store, set(stored), held[order(set(stored), stored)], context)
        for name, wanted in (("present", stored), ("absent", keys("absent", given.keys))):
            spent, steps = looked_up(scheduler, wanted, name == "present")
            times.setdefault(f"lookup of {given.keys} keys, {name}, us", []).append(1e6 * spent)
            times.setdefault(f"steps, {name}", []).append(steps)
        for job in range(given.jobs):
            wanted = keys(f"job {job}", given.chunks)
            context, rows = begun(scheduler, wanted), held[: given.chunks]
            took = run_job(scheduler, scheduler.tier.submit_store, set(wanted), rows, context)
            times.setdefault(f"submit and poll a store of {given.chunks} chunks, us", []).append(1e6 * took)
        into = held[: given.chunks][::-1].copy()
        for _ in range(given.jobs):
            scheduler.rows[:] = 0
            context = begun(scheduler, stored)
            took = run_job(scheduler, scheduler.tier.submit_load, stored[: given.chunks], into, context)
            times.setdefault(f"submit and poll a load of {given.chunks} chunks, us", []).append(1e6 * took)
            if not (scheduler.rows[into] == (held[: given.chunks] % 127)[:, None]).all():
                raise RuntimeError("a load has other bytes")
    finally:
        scheduler.close()


def order(given: set[bytes], wanted: list[bytes]) -> list[int]:
    """Return the place of each key of a set, in the order of the set."""
    index_of = {key: index for index, key in enumerate(wanted)}
    return [index_of[key] for key in given]


def main() -> None:
    """Print a row for each figure."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    sizes = {"rounds": 5, "jobs": 20, "chunks": 128, "keys": 1000, "size": 65_536}
    for name, default in sizes.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", help="where the files of vLLM's tier go; a temporary folder by default")
    given = parser.parse_args()
    values = given.keys + given.jobs * given.chunks
    with tempfile.TemporaryDirectory(dir=given.folder) as folder:
        socket = f"{folder}/keeper"
        options = ("--memory", f"{2 * values * given.size >> 20}MiB", "--value", f"{given.size >> 10}KiB")
        command = (sys.executable, "-m", "llm_datadist", "serve", "--socket", socket, *options)
        with subprocess.Popen(command, stdout=subprocess.PIPE) as keeper:  # noqa: S603
            try:
                if keeper.stdout is None or not keeper.stdout.readline().startswith(b"ready"):
                    raise RuntimeError("the keeper has not started")
                found = rounds(folder, socket, given)
            finally:
                keeper.terminate()
    columns = list(found)
    print(f"| {given.size >> 10} KiB | {' | '.join(columns)} |\n| --- {'| --- ' * len(columns)}|")
    for figure in found[columns[0]]:
        cells = [f"{statistics.median(found[system][figure]):.0f}" for system in columns]
        print(f"| {figure} | {' | '.join(cells)} |")


def rounds(folder: str, socket: str, given: argparse.Namespace) -> dict[str, Times]:
    """Return the figures of all rounds of each system. Each round has values of its own."""
    found: dict[str, Times] = {"LlmDatadistStoreTier": {}, "fs": {}}
    for round_number in range(given.rounds):
        ours = {"type": "LlmDatadistStoreTier", "socket": socket, "revision": str(round_number)}
        fs = {"type": "fs", "root_dir": f"{folder}/{round_number}", "n_read_threads": 4, "n_write_threads": 4}
        systems = [("LlmDatadistStoreTier", ours), ("fs", fs)]
        for name, tier in systems if round_number % 2 == 0 else systems[::-1]:
            measure(tier, given, found[name])
    return found


if __name__ == "__main__":
    main()
