"""Prefill and decode of vLLM in two API servers, behind one address.

    python examples/vllm MODEL [--port 8000] [--layerwise] [further arguments of vLLM's servers]
    curl http://127.0.0.1:8000/v1/completions -H "Content-Type: application/json" \
        -d '{"model": "MODEL", "prompt": "Once upon a time", "max_tokens": 16}'

The program starts both servers, waits until they serve, and passes requests on: prefill gets each request first, for
a single token, and decode then gets it together with the `kv_transfer_params` of that response. With --layerwise,
both get it at the same time, and decode receives the layers while prefill computes. Ctrl-C ends everything. It needs
vLLM, aiohttp (a part of vLLM) and llm_datadist.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys

from aiohttp import web
from proxy import Proxy

START_S = 600
SERVERS = {"prefill": "kv_producer", "decode": "kv_consumer"}


async def main() -> None:
    """Start the servers and the proxy, and run until Ctrl-C."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("model", help="name or folder of a model")
    parser.add_argument("--port", type=int, default=8000, help="of the proxy; the two servers use the next two ports")
    parser.add_argument("--layerwise", action="store_true", help="start decode together with prefill")
    given, rest = parser.parse_known_args()
    urls, processes = {}, []
    try:
        for offset, (name, role) in enumerate(SERVERS.items(), 1):
            transfer = {
                "kv_connector": "LlmDatadistConnector",
                "kv_role": role,
                "engine_id": name,
                # A request that cannot be received is computed by decode.
                "kv_load_failure_policy": "recompute",
            }
            port = given.port + offset
            command = ["-m", "vllm.entrypoints.openai.api_server", "--model", given.model, "--port", str(port)]
            command += ["--kv-transfer-config", json.dumps(transfer), *rest]
            processes.append(await asyncio.create_subprocess_exec(sys.executable, *command))
            urls[name] = f"http://127.0.0.1:{port}"
        async with Proxy(urls["prefill"], urls["decode"], layerwise=given.layerwise) as proxy:
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


async def interrupted() -> None:
    """Wait for Ctrl-C or SIGTERM."""
    stopped = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stopped.set)
    await stopped.wait()


asyncio.run(main())
