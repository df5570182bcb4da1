"""Where a receive through host buffers takes its time on a CPU, beside a receive into the KV cache itself.

    .venv-vllm/bin/python benches/vllm/host_receive.py [--rounds 20] [--tokens 128,1000,4000]

Prefill and decode are processes with real engines, transfer threads and torch's copies, without a model or a
scheduler. Prefill has copied a prompt to host memory before decode asks for it. The two ways take turns. The wake-ups
and calls do not depend on the load of the machine. The CPU time does so much less than the wall time. It is that of
the threads of decode but the one that waits for the receive. Not for: the time to the first token
(``make bench-vllm BENCH_VLLM="--only host"``).
"""

from __future__ import annotations

import argparse
import multiprocessing
import random
import statistics
import time
from collections import defaultdict
from typing import TYPE_CHECKING, Any

import torch
from waits import LIMIT_S, eventually

from llm_datadist import Engine
from llm_datadist.integrations.vllm.device_copies import host_buffers, page_rows
from llm_datadist.integrations.vllm.group_caches import GroupCaches
from llm_datadist.integrations.vllm.handover import Handover
from llm_datadist.integrations.vllm.pages import PageFormat
from llm_datadist.integrations.vllm.ranks import Shard, engine_name
from llm_datadist.integrations.vllm.settings import Settings
from llm_datadist.integrations.vllm.step import Await, Part, Receive, Send, Step
from llm_datadist.integrations.vllm.transfer_thread import TransferThread

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

# 64 KiB for each token, as in the model of the other figures.
LAYERS, BLOCKS, BLOCK_SIZE, HEADS, HEAD_DIM = 16, 160, 32, 4, 256
MAX_TOKENS = (BLOCKS - 1) * BLOCK_SIZE  # block 0 is not used, as in vLLM
PAGE = 2 * 2 * BLOCK_SIZE * HEADS * HEAD_DIM
WAYS: dict[str, dict[str, Any]] = {"direct": {}, "host buffers": {"host_buffers": True}}


class Side:
    """Prefill or decode, in its process. Each block has the bytes of its number in prefill, and 0 in decode."""

    def __init__(self, role: str, options: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        settings, names = Settings.parse(options), [f"layer {number}" for number in range(LAYERS)]
        self._engine = Engine(name=engine_name(role, 0), listen="127.0.0.1:0", pool=LAYERS * BLOCKS * PAGE + (64 << 20))
        form = PageFormat(LAYERS, BLOCK_SIZE, range(HEADS), HEADS, HEAD_DIM, HEAD_DIM, 2, "", "model")
        caches = GroupCaches(self._engine, 0, form)
        memory = torch.from_dlpack(caches.allocate(BLOCKS)).view(torch.int8)
        rows = memory[: LAYERS * BLOCKS * PAGE].view(LAYERS, BLOCKS, HEADS, BLOCK_SIZE, 4 * HEAD_DIM)
        # Both ways have a second memory, so that the same bytes are in the caches of the processor before a receive.
        second, host = torch.zeros_like(rows), None
        self._memories = rows, second
        self._pages = second if settings.host_buffers else rows
        if settings.host_buffers:
            on_both = [{n: page_rows(of[i], BLOCKS, PAGE) for i, n in enumerate(names)} for of in (self._pages, rows)]
            host = host_buffers(rows.device, on_both[0], on_both[1], memory)
        numbers = torch.arange(BLOCKS, dtype=torch.int16).to(torch.int8).view(1, -1, 1, 1, 1)
        rows.zero_()
        self._pages.copy_(numbers if role == "prefill" else torch.zeros_like(numbers))
        caches.register([layer.data_ptr() for layer in rows], BLOCKS, [PAGE] * LAYERS)
        self._transfers = TransferThread(self._engine, [caches], Shard(0, 1, HEADS), None, settings, [names], host)
        self._found: dict[str, float] = defaultdict(float)
        self._watched(self._transfers, "_run_once", "wake-ups of the transfer thread")
        receiving = self._transfers._receiving  # noqa: SLF001 - a benchmark
        self._watched(receiving, "_pull", "pulls")
        self._copies = host is not None
        self._watched(receiving, "_pulled", "pulls that have ended", self._pulled)
        if host is not None:
            self._watched(host, "copy_blocks", "copies")

    def address(self) -> str:
        """Return where peers reach the engine."""
        return str(self._engine.address)

    def lend(self, name: str, blocks: list[int]) -> None:
        """Lend a prompt that is computed. If there are host buffers, wait until it is copied."""
        self._found.clear()
        self._transfers.begin(Step(parts=[Part(name, "", 0, 0, [blocks], computed=True, last=True)]))
        self._transfers.submit(Step(sends=[Send(name, name)]))
        lending = self._transfers._lending  # noqa: SLF001 - a benchmark
        eventually(lambda: name in lending._leases)  # noqa: SLF001 - a benchmark
        (part,) = lending._loans[name].parts.values()  # noqa: SLF001 - a benchmark
        eventually(lambda: part.layers == LAYERS)

    def sent(self) -> None:
        """Wait until decode has reported the prompt."""
        eventually(lambda: bool(self._transfers.take().sent))

    def receive(self, name: str, address: str, src: list[int], blocks: list[int]) -> dict[str, float]:
        """Receive a prompt, check its bytes, and return what it took."""
        handover = Handover(name, "prefill", [address], "", [BLOCK_SIZE])
        for memory in self._memories:
            memory[:, blocks] = 0
        self._found.clear()
        begin, used = time.perf_counter(), cpu_s()
        order = Receive(name, [blocks], 0, len(blocks) * BLOCK_SIZE)
        self._transfers.submit(Step(awaited=[Await(name, handover)], receives=[order]))
        eventually(lambda: bool(self._transfers.take().received))
        end, found = time.perf_counter(), dict(self._found)
        last, ended = found.pop("last pull"), found.pop("pulls that have ended")
        assert ended == found["pulls"]
        assert ("copies" in found) == self._copies
        found |= {"receive, ms": 1e3 * (end - begin), "after the last pull, ms": 1e3 * (end - last)}
        found["CPU of decode, ms"] = 1e3 * (cpu_s() - used)
        wrong = [b for a, b in zip(src, blocks) if not bool((self._pages[:, b] == (a + 128) % 256 - 128).all())]
        assert not wrong, f"blocks {wrong} have wrong bytes"
        return found

    def close(self) -> None:
        """Close the engine."""
        self._transfers.close()
        self._engine.close()

    def _pulled(self, _: Any, transfer: Any, __: Any) -> None:
        self._found["pulls, ms"] += transfer.nanos / 1e6
        self._found["last pull"] = time.perf_counter()

    def _watched(self, of: Any, name: str, count: str, before: Callable[..., None] | None = None) -> None:
        """Count the calls of a method, and note the time and the CPU time of those that copy."""
        method = getattr(of, name)

        def call(*args: Any) -> Any:
            if before is not None:
                before(*args)
            self._found[count] += 1
            begin, used = time.perf_counter(), time.thread_time()
            result = method(*args)
            if count == "copies":
                self._found["copies, ms"] += 1e3 * (time.perf_counter() - begin)
                self._found["CPU of copies, ms"] += 1e3 * (time.thread_time() - used)
            return result

        setattr(of, name, call)


class Process:
    """A side in a process of its own. Its methods are those of ``Side``."""

    def __init__(self, *given: Any) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, *given), daemon=True)
        self._process.start()
        there.close()

    def __getattr__(self, name: str) -> Any:
        return lambda *args: self._called(name, *args)

    def _called(self, name: str, *args: Any) -> Any:
        self._pipe.send((name, args))
        if not self._pipe.poll(LIMIT_S):
            raise TimeoutError(f"{name} has not ended within {LIMIT_S:g} s")
        return self._pipe.recv()


def _serve(pipe: Connection, *given: Any) -> None:
    side, name = Side(*given), ""
    while name != "close":
        name, args = pipe.recv()
        pipe.send(getattr(side, name)(*args))


def cpu_s() -> float:
    """Return the seconds of CPU time of the other threads of this process. This one only waits."""
    return time.process_time() - time.thread_time()


def main() -> None:
    """Measure, and print a table for each length."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--tokens", default="128,1000,4000", help="lengths of prompts")
    given = parser.parse_args()
    if given.rounds < 1:
        parser.error(f"--rounds={given.rounds} is less than 1")
    lengths = [int(length) if length.isdecimal() else 0 for length in given.tokens.split(",")]
    if not all(1 <= length <= MAX_TOKENS for length in lengths):
        parser.error(f"--tokens={given.tokens} is not a list of numbers from 1 to {MAX_TOKENS}, which memory is for")
    pairs = {way: (Process("prefill", extra), Process("decode", extra)) for way, extra in WAYS.items()}
    addresses = {way: prefill.address() for way, (prefill, _) in pairs.items()}
    for length in lengths:
        count = -(-length // BLOCK_SIZE)
        rows: dict[str, list[dict[str, float]]] = {way: [] for way in WAYS}
        for round_number in range(-1, given.rounds):  # the first round links, and touches the blocks
            for way in WAYS if round_number % 2 == 0 else reversed(WAYS):
                prefill, decode = pairs[way]
                src, dst = (random.sample(range(1, BLOCKS), count) for _ in range(2))
                name = f"{length} {round_number}"
                prefill.lend(name, src)
                found = decode.receive(name, addresses[way], src, dst)
                prefill.sent()
                if round_number >= 0:
                    rows[way].append(found)
        show(f"{length:,} tokens", rows)
    for prefill, decode in pairs.values():
        decode.close()
        prefill.close()


def show(title: str, rows: dict[str, list[dict[str, float]]]) -> None:
    """Print the medians, and how many times the first way the others take in the same turn."""
    names = list(dict.fromkeys(name for found in rows.values() for row in found for name in row))
    print(f"\n| {title} | {' | '.join(rows)} | ratio in a turn |\n| --- {'| --- ' * len(rows)}| --- |")
    for name in names:
        direct, other = ([row.get(name, 0.0) for row in found] for found in rows.values())
        ratio = statistics.median(b / a for a, b in zip(direct, other)) if all(direct) else float("nan")
        print(
            f"| {name} | {statistics.median(direct):.3g} | {statistics.median(other):.3g} | {ratio:.2g} |", flush=True
        )


if __name__ == "__main__":
    main()
