"""What a step costs on the model's thread while requests wait, and what the message with a part of a prompt costs.

    .venv-vllm/bin/python benches/vllm/step_costs.py [--waiting 10,1000] [--steps 2000] [--rounds 3]

The connector's two halves of prefill and of decode in one process, with vLLM's own classes, real engines and a link
between them. There is no model, so a step is the connector alone. Waiting requests are held by decode in prefill, as
those in the queue of decode, or have a ticket in prefill, as those in its own queue. The numbers of waiting requests
take turns. Not for: the time of a transfer (``make bench-vllm``).
"""

from __future__ import annotations

import argparse
import os
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "integration-tests/vllm"))

from halves import BLOCK_SIZE, BLOCKS, Halves, become_the_only_rank, configuration, request  # noqa: E402
from vllm.config import set_current_vllm_config  # noqa: E402
from vllm.v1.core.sched.output import CachedRequestData, SchedulerOutput  # noqa: E402
from waits import eventually  # noqa: E402

from llm_datadist.integrations.vllm.messages import Lent, decode, encode  # noqa: E402
from model import make_model  # noqa: E402

RUNNING = [f"running {number}" for number in range(8)]
CHUNK = 512  # tokens that a step of prefill computes
CHUNKS = 16
PART = 4096  # blocks in a part: the most that prefill lends with one message
SHORT = list(range(3, 3 + BLOCK_SIZE))


def scheduled(names: list[str], computed: list[int], tokens: int, blocks: list[Any]) -> SchedulerOutput:
    """Return the decisions of vLLM's scheduler for requests that go on."""
    cached = replace(
        CachedRequestData.make_empty(),
        req_ids=names,
        new_block_ids=blocks,
        num_computed_tokens=computed,
        num_output_tokens=[1] * len(names),
    )
    each = dict.fromkeys(names, tokens)
    return replace(
        SchedulerOutput.make_empty(),
        scheduled_cached_reqs=cached,
        num_scheduled_tokens=each,
        total_num_scheduled_tokens=sum(each.values()),
    )


class Pair:
    """Prefill and decode, and a number of requests that wait in decode and in prefill."""

    def __init__(self, config: Any, waiting: int) -> None:
        transfer = {"kv_connector": "LlmDatadistConnector", "kv_connector_extra_config": {"lease_ms": 3_600_000}}
        self.prefill = Halves(config, {**transfer, "kv_role": "kv_producer", "engine_id": f"prefill {waiting}"})
        self.decode = Halves(config, {**transfer, "kv_role": "kv_consumer", "engine_id": f"decode {waiting}"})
        for side in (self.prefill, self.decode):
            side.start()
            side.step()
        for number in range(waiting):
            params = self.prefill.finish(f"sent {number}", ([1],), SHORT)
            self.decode.scheduler.on_new_request(request(f"held {number}", params, SHORT))
            asked = {"do_remote_decode": True, "llm_datadist": {"ticket": f"waits {number}"}}
            self.prefill.scheduler.on_new_request(request(f"waits {number}", asked, SHORT))
        self.prefill.step()
        self.decode.step()
        held = self.prefill.worker._transfers._lending._held  # noqa: SLF001 - a benchmark
        eventually(lambda: sum(map(len, held.values())) == waiting)
        self.asked = request("held 0", None, SHORT)  # the scheduler knows its parameters; if none waits, there are none

    def prefill_steps(self, name: str) -> list[float]:
        """Return the seconds of the steps in which prefill computes a prompt, and lends it."""
        params = {"do_remote_decode": True, "llm_datadist": {"ticket": name}}
        asked = request(name, params, [5] * CHUNK * CHUNKS)
        self.prefill.scheduler.on_new_request(asked)
        numbers = [number % (BLOCKS - 1) + 1 for number in range(CHUNK // BLOCK_SIZE)]
        seconds = []
        for chunk in range(CHUNKS):
            output = scheduled([name], [chunk * CHUNK], CHUNK, [(numbers,)])
            begin = time.perf_counter()
            self.prefill.step(output)
            seconds.append(time.perf_counter() - begin)
        # It ends without a result, so its parts are withdrawn.
        self.prefill.scheduler.request_finished_all_groups(asked, (numbers,))
        self.prefill.step()
        return seconds

    def measure(self, steps: int) -> dict[str, float]:
        """Return microseconds of the connector in a step."""
        seconds = []
        for _ in range(steps):
            # Eight requests generate a token, and the first one that waits finds no room.
            output = scheduled(RUNNING, [100] * 8, 1, [None] * 8)
            begin = time.perf_counter()
            self.decode.scheduler.get_num_new_matched_tokens(self.asked, 0)
            self.decode.step(output)
            seconds.append(time.perf_counter() - begin)
        computing = [one for number in range(max(1, steps // CHUNKS)) for one in self.prefill_steps(f"p {number}")]
        return {
            "decode, us a step": 1e6 * statistics.median(seconds),
            "p99": 1e6 * statistics.quantiles(seconds, n=100)[98],
            "prefill that computes, us a step": 1e6 * statistics.median(computing),
            "p99 ": 1e6 * statistics.quantiles(computing, n=100)[98],
        }

    def close(self) -> None:
        """Close the engines."""
        self.decode.close()
        self.prefill.close()


def messages(count: int = 200) -> dict[str, float]:
    """Return milliseconds for the message with the largest part, at prefill and at decode."""
    part = Lent("t" * 32, 1, 0, 0, [list(range(70_000, 70_000 + PART))], [[b"g" * 64]], 0, last=True)
    payload, times = encode(part), []
    for work in (lambda: encode(part), lambda: decode(payload)):
        each = []
        for _ in range(count):
            begin = time.perf_counter()
            work()
            each.append(time.perf_counter() - begin)
        times.append(1e3 * statistics.median(each))
    return {"bytes": len(payload), "encode, ms": times[0], "decode, ms": times[1]}


def show(title: str, rows: dict[str, dict[str, float]]) -> None:
    """Print a table."""
    columns = list(next(iter(rows.values())))
    print(f"\n| {title} | {' | '.join(columns)} |\n| --- {'| --- ' * len(columns)}|")
    for name, row in rows.items():
        print(f"| {name} | {' | '.join(f'{row[column]:.3g}' for column in columns)} |", flush=True)


def main() -> None:
    """Measure, and print two tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--waiting", default="10,1000", help="numbers of waiting requests")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    given = parser.parse_args()
    numbers = [int(number) for number in given.waiting.split(",")]
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder))
        config = configuration(folder)
        with set_current_vllm_config(config):
            become_the_only_rank(Path(folder) / "store")
            pairs = {number: Pair(config, number) for number in numbers}
            found: dict[int, list[dict[str, float]]] = {number: [] for number in numbers}
            for round_number in range(given.rounds):
                for number in numbers if round_number % 2 == 0 else reversed(numbers):
                    found[number].append(pairs[number].measure(given.steps))
            for pair in pairs.values():
                pair.close()
    medians = {
        f"{number} requests wait": {name: statistics.median(row[name] for row in rows) for name in rows[0]}
        for number, rows in found.items()
    }
    show("model's thread", medians)
    show(f"a part of {PART:,} blocks", {"message": messages()})


if __name__ == "__main__":
    main()
