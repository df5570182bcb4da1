"""The vLLM connector beside vLLM's NIXL connector, and offloading: ``make bench-vllm``.

    .venv-vllm/bin/python benches/vllm [--rounds 3] [--only handover,host,layerwise,concurrent,offloading,killed]

Each row is the median of rounds in which all systems take turns: each round starts prefill and decode anew. The model
has 64 KiB of KV for each token. Not for: correctness (integration-tests/vllm).
"""

from __future__ import annotations

import argparse
import random
import signal
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Callable

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "integration-tests/vllm"))

from servers import Server, alone, hand_over, start_both, where  # noqa: E402

from model import FIRST_WORD, VOCABULARY, make_model  # noqa: E402

LENGTHS = (1024, 2048, 512, 1536) * 3
TOKENS = 4
LIMIT_S = 30.0
BLOCKS = 160  # in a KV cache that is warmed up: just enough for the longest request that vLLM accepts
MODULE = "broken_connectors"
# Name: connector, its module, its options.
SYSTEMS: dict[str, tuple[str, str | None, dict[str, Any]]] = {
    "llm_datadist, pool": ("LlmDatadistConnector", None, {}),
    "llm_datadist, registered": ("LlmDatadistConnector", None, {"kv_cache_in_pool": False}),
    "llm_datadist, host buffers": ("LlmDatadistConnector", None, {"host_buffers": True}),
    "llm_datadist, host buffers at the end": ("LlmDatadistConnector", None, {"host_buffers": True, "layerwise": False}),
    "llm_datadist, tcp": ("LlmDatadistConnector", None, {"engine_options": {"transport": "tcp"}}),
    "nothing moved": ("NothingPulled", MODULE, {}),
    "NIXL": ("NixlConnector", None, {}),
}
HOST = [name for name in SYSTEMS if "host buffers" in name]
DURATIONS = ("transfer_seconds", "transfer_duration")


def prompts(lengths: tuple[int, ...], seed: int = 1) -> dict[str, list[int]]:
    """Return random prompts."""
    rng = random.Random(seed)  # noqa: S311 - not a secret
    draw = lambda length: [rng.randrange(FIRST_WORD, VOCABULARY - 8) for _ in range(length)]  # noqa: E731
    return {f"r{index}": draw(length) for index, length in enumerate(lengths)}


def config(system: str, role: str) -> dict[str, Any]:
    """Return the ``KVTransferConfig`` of one side."""
    connector, module, extra = SYSTEMS[system]
    if role == "kv_producer" and module == MODULE:
        connector, module = "LlmDatadistConnector", None
    transfer: dict[str, Any] = {"kv_connector": connector, "kv_role": role, "engine_id": f"{role} {time.time()}"}
    if module is not None:
        transfer["kv_connector_module_path"] = module
    return {**transfer, "kv_connector_extra_config": extra}


def pair(model: str, system: str, **options: Any) -> tuple[Server, Server]:
    """Start prefill and decode one after the other, because NIXL's side channel wants a port of its own."""
    options["dtype"] = "bfloat16"
    servers = [
        Server(model, config(system, role), environment={"VLLM_NIXL_SIDE_CHANNEL_PORT": str(port)}, **options)
        for role, port in (("kv_producer", 5650), ("kv_consumer", 5660))
    ]
    return servers[0].wait(), servers[1].wait()


def handover(model: str, system: str, *, warm: bool = False) -> dict[str, float]:
    """One request at a time: times of the connector and of the transfer, and until decode's first token.

    If it is ``warm``, there are few blocks, and each was used before. Otherwise each request writes to memory that was
    never touched, as in the first minutes of a server.
    """
    prefill, decode = pair(model, system, **({"num_gpu_blocks_override": BLOCKS} if warm else {}))
    before = (64, *(2048,) * (-(-BLOCKS * 32 // 2048) if warm else 0))
    for name, tokens in prompts(before, seed=2).items():  # links, and warms up
        hand_over(prefill, decode, {f"before {name}": tokens}, TOKENS)
    firsts, whole = [], []
    for name, tokens in prompts(LENGTHS).items():
        begin = time.monotonic()
        done = hand_over(prefill, decode, {name: tokens}, TOKENS)[name]
        firsts.append(done.first_token_s)
        whole.append(done.first_token_at - begin)
    time.sleep(0.5)
    prefill.stop(check=False)
    end = decode.stop(check=False)
    durations = next((end.stats[name] for name in DURATIONS if name in end.stats), [])
    transfers = len(LENGTHS) + len(before)
    return {
        "model thread, ms a transfer": 1e3 * end.connector_s / transfers,
        "us a step": 1e6 * end.connector_s / max(1, end.steps),
        "transfer, ms": 1e3 * statistics.median(durations[len(before) :] or [0]),
        "first token, ms": 1e3 * statistics.median(firsts),
        "first token since the request, ms": 1e3 * statistics.median(whole),
    }


def layerwise(model: str, system: str) -> dict[str, float]:
    """One request at a time, decode after prefill or together with it: from prefill's first token to decode's."""
    name, _, when = system.partition(", ")
    extra = {"engine_options": {"transport": "tcp"}} if "tcp" in name else {}
    servers = [
        Server(
            model,
            {"kv_connector": "LlmDatadistConnector", "kv_role": role, "kv_connector_extra_config": extra},
            dtype="bfloat16",
            max_num_batched_tokens=512,
        ).wait()
        for role in ("kv_producer", "kv_consumer")
    ]
    prefill, decode = servers
    transfer_params = where(prefill, decode, prompts((64,), seed=2)["r0"])
    waits = []
    for request, tokens in prompts(LENGTHS).items():
        if when == "layer-wise":
            start_both(prefill, decode, {request: tokens}, TOKENS, transfer_params)
            done = prefill.result()[1]
        else:
            prefill.add(request, tokens, 1, {"do_remote_decode": True})
            done = prefill.result()[1]
            decode.add(request, tokens, TOKENS, done.params)
        waits.append(decode.result()[1].first_token_at - done.first_token_at)
    time.sleep(0.5)
    ends = prefill.stop(check=False), decode.stop(check=False)
    return {
        "decode's first token after prefill's, ms": 1e3 * statistics.median(waits),
        "model thread of prefill, us a step": 1e6 * ends[0].connector_s / max(1, ends[0].steps),
        "us a step that computes": 1e6 * statistics.median(ends[0].computing_s),
        "model thread of decode, us a step": 1e6 * ends[1].connector_s / max(1, ends[1].steps),
    }


def concurrent(model: str, system: str) -> dict[str, float]:
    """48 requests at once: until all have ended."""
    wanted = prompts((256, 512, 128, 768) * 12)
    if system == "one vLLM":
        server = Server(model, dtype="bfloat16").wait()
        begin = time.monotonic()
        alone(server, wanted, 16)
        took = time.monotonic() - begin
        server.stop()
    else:
        prefill, decode = pair(model, system)
        hand_over(prefill, decode, prompts((64,), seed=2), TOKENS)
        begin = time.monotonic()
        hand_over(prefill, decode, wanted, 16)
        took = time.monotonic() - begin
        prefill.stop(check=False)
        decode.stop(check=False)
    return {"48 requests, s": took, "requests a second": 48 / took}


def offloading(model: str, system: str) -> dict[str, float]:
    """Prompts that do not fit into vLLM's KV cache, a second time."""
    extra = {"spec_name": "LlmDatadistOffloadingSpec", "cpu_bytes_to_use": 2 << 30}
    transfer = {"kv_connector": "OffloadingConnector", "kv_role": "kv_both", "kv_connector_extra_config": extra}
    kv = transfer if system == "offloading" else None
    options = {"num_gpu_blocks_override": 150, "enable_prefix_caching": True, "dtype": "bfloat16"}
    server = Server(model, kv, **options).wait()
    times = []
    for number in range(2):
        begin = time.monotonic()
        for name, tokens in prompts((1500,) * 8).items():
            alone(server, {f"{name} {number}": tokens}, 1)
        times.append(time.monotonic() - begin)
    server.stop()
    return {"first round, s": times[0], "second round, s": times[1]}


def killed(model: str, system: str) -> dict[str, float]:
    """Kill decode while 12 requests wait in its queue: until prefill has its blocks back, long before leases end."""
    connector, _, extra = SYSTEMS[system]
    options = {"kv_connector": connector, "kv_connector_extra_config": {**extra, "lease_ms": 3_600_000}}
    prefill, decode = [
        Server(model, {**options, "kv_role": role}, dtype="bfloat16", max_num_seqs=seqs).wait()
        for role, seqs in (("kv_producer", 8), ("kv_consumer", 1))
    ]
    decode.add("long", prompts((64,), seed=2)["r0"], 3000)
    for name, tokens in prompts(LENGTHS).items():
        prefill.add(name, tokens, 1, {"do_remote_decode": True})
        decode.add(name, tokens, TOKENS, prefill.result()[1].params)
    time.sleep(2)  # decode holds them in the next step
    used = prefill.usage()
    if not used:
        raise RuntimeError("prefill has no blocks in use before decode is killed, so there is nothing to measure")
    begin = time.monotonic()
    decode.signal(signal.SIGKILL)
    while left := prefill.usage():
        if time.monotonic() > begin + LIMIT_S:
            raise TimeoutError(f"prefill has {left:.1%} of its blocks in use after {LIMIT_S:g} s (before: {used:.1%})")
        time.sleep(0.005)
    took = time.monotonic() - begin
    decode.kill()
    prefill.stop(check=False)
    return {"share of the KV cache": used, "blocks are back after, s": took}


GROUPS = {
    "handover": (handover, [name for name in SYSTEMS if name not in HOST]),
    # A CPU in the place of a device: the KV cache is copied within host memory, on either side.
    "host": (
        partial(handover, warm=True),
        ["llm_datadist, pool", *(name for name in SYSTEMS if "host buffers" in name)],
    ),
    "layerwise": (layerwise, [f"{name}, {when}" for name in ("pool", "tcp") for when in ("whole", "layer-wise")]),
    "concurrent": (concurrent, ["one vLLM", "llm_datadist, pool", "NIXL"]),
    "offloading": (offloading, ["offloading", "recomputed"]),
    "killed": (killed, ["llm_datadist, pool", "llm_datadist, tcp"]),
}


def main() -> None:
    """Measure, and print a table for each group."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--only", default=",".join(GROUPS), help="groups: " + ",".join(GROUPS))
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        make_model(Path(folder), layers=16, kv_heads=4, head_dim=256)
        for group in given.only.split(","):
            measure, systems = GROUPS[group]
            rows: dict[str, list[dict[str, float]]] = {system: [] for system in systems}
            for number in range(given.rounds):
                for system in systems if number % 2 == 0 else reversed(systems):
                    rows[system] += attempt(group, system, partial(measure, folder, system))
            table(group, rows)


def attempt(group: str, system: str, measured: Callable[[], dict[str, float]]) -> list[dict[str, float]]:
    """Return one round of a system, or nothing, with the reason, if it fails."""
    try:
        return [measured()]
    except Exception as error:  # noqa: BLE001 - the others are still measured
        print(f"{group}: {system}: {type(error).__name__}: {error}", file=sys.stderr)
        return []


def table(group: str, rows: dict[str, list[dict[str, float]]]) -> None:
    """Print the medians of a group."""
    columns = next((list(found[0]) for found in rows.values() if found), [])
    print(f"\n| {group} | {' | '.join(columns)} |\n| --- {'| --- ' * len(columns)}|")
    for system, found in rows.items():
        cells = [f"{statistics.median(row[name] for row in found):.3g}" for name in columns] if found else ["failed"]
        print(f"| {system} | {' | '.join(cells)} |", flush=True)


if __name__ == "__main__":
    main()
