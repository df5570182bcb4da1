"""Prefill and decode of vLLM in API servers of their own, behind one address.

    python examples/vllm MODEL [--port 8000] [--prefills 1] [--decodes 1] [--layerwise] [arguments of vLLM's servers]
    curl http://127.0.0.1:8000/v1/completions -H "Content-Type: application/json" \
        -d '{"model": "MODEL", "prompt": "Once upon a time", "max_tokens": 16}'

The program starts the servers, waits until they serve, and passes requests on: a prefill gets each request first, for
a single token, and a decode then gets it together with the `kv_transfer_params` of that response. With --layerwise,
both get it at the same time, and decode receives the layers while prefill computes. With --data-parallel-size, each
server has as many ranks, which the proxy addresses one after another. Ctrl-C ends everything. It needs vLLM, aiohttp (a
part of vLLM) and llm_datadist.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys

from aiohttp import web
from proxy import Proxy, Server

START_S = 600
ROLES = {"prefill": "kv_producer", "decode": "kv_consumer"}


async def main() -> None:
    """Start the servers and the proxy, and run until Ctrl-C."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="name or folder of a model")
    parser.add_argument("--port", type=int, default=8000, help="of the proxy; the servers use the next ports")
    parser.add_argument("--prefills", type=positive, default=1, help="number of servers of prefill")
    parser.add_argument("--decodes", type=positive, default=1, help="number of servers of decode")
    parser.add_argument("--data-parallel-size", type=positive, default=1, help="data-parallel ranks of each server")
    parser.add_argument("--layerwise", action="store_true", help="start decode together with prefill")
    given, rest = parser.parse_known_args()
    names = ["prefill"] * given.prefills + ["decode"] * given.decodes
    ranks = range(given.data_parallel_size) if given.data_parallel_size > 1 else [None]
    servers: dict[str, list[Server]] = {name: [] for name in ROLES}
    processes = []
    try:
        for port, name in enumerate(names, given.port + 1):
            transfer = {
                "kv_connector": "LlmDatadistConnector",
                "kv_role": ROLES[name],
                "engine_id": f"{name}-{port}",  # each server needs one of its own
                # A request that cannot be received is computed by decode.
                "kv_load_failure_policy": "recompute",
            }
            command = ["-m", "vllm.entrypoints.openai.api_server", "--model", given.model, "--port", str(port)]
            command += ["--data-parallel-size", str(given.data_parallel_size)]
            command += ["--kv-transfer-config", json.dumps(transfer), *rest]
            processes.append(await asyncio.create_subprocess_exec(sys.executable, *command))
            servers[name] += [Server(f"http://127.0.0.1:{port}", rank) for rank in ranks]
        async with Proxy(servers["prefill"], servers["decode"], layerwise=given.layerwise) as proxy:
            await asyncio.wait_for(proxy.until_ready(processes), START_S)
            runner = proxy.runner()
            await runner.setup()
            await web.TCPSite(runner, "127.0.0.1", given.port).start()
            print(f"ready: http://127.0.0.1:{given.port}/v1/completions", flush=True)
            await interrupted()
            await runner.cleanup()
    finally:
        for process in processes:
            if process.returncode is None:
                process.terminate()
        await asyncio.gather(*(process.wait() for process in processes))


def positive(text: str) -> int:
    """Read a number of at least 1."""
    number = int(text)
    if number < 1:
        raise argparse.ArgumentTypeError(f"{number} is out of range (at least 1)")
    return number


async def interrupted() -> None:
    """Wait for Ctrl-C or SIGTERM."""
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await stopped.wait()


asyncio.run(main())
