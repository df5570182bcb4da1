"""Sends one request to an LMCache server, as `lmcache bench server` does, and prints what became of it.

The number of hits and the checksums are those of the KV cache of a worker of the benchmark.
"""

from __future__ import annotations

import json
import sys

from lmcache.cli.commands.bench.server_bench.cases.baseline import BaselineBenchCase
from lmcache.cli.commands.bench.server_bench.client import ServerBenchClient
from lmcache.cli.commands.bench.server_bench.config import BenchConfig

TOKENS = 1024


def main() -> None:
    """Send a request: `cold` computes the checksums of what is stored, and `warm` of what is found."""
    port, http_port, kind, dtype = sys.argv[1:]
    config = BenchConfig(
        rpc_url=f"tcp://127.0.0.1:{port}",
        http_url=f"http://127.0.0.1:{http_port}",
        mode="cpu",
        transfer_mode="lmcache_driven",
        tp_size=1,
        use_mla=False,
        num_tokens=TOKENS,
        kvcache_shape_spec=f"(2,128,16,2,64):{dtype}:4",
        num_blocks=128,
        block_size=16,
    )
    client = ServerBenchClient(config, lambda text: print(text, file=sys.stderr))  # noqa: T201
    client.start()
    try:
        outcome = BaselineBenchCase(1, 0.0)._execute_request(client, 0, kind)
    finally:
        client.close()
    assert outcome is not None
    print(json.dumps({"hits": outcome.lookup.hit_chunks, "checksums": outcome.checksums}))  # noqa: T201


if __name__ == "__main__":
    main()
