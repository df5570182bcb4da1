"""One replay from start to end: the decode node, the prefill process, and the results."""

from __future__ import annotations

import secrets
import sys
import time
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from llm_datadist.replay import late_pull, report, trace
from llm_datadist.replay.geometry import PREFILL_REQUESTS, Geometry
from llm_datadist.replay.node import Node
from llm_datadist.replay.prefill import Prefill
from llm_datadist.replay.progress import Progress
from llm_datadist.replay.serve import Server
from llm_datadist.replay.table import BlockTable
from llm_datadist.replay.worker import Setup

if TYPE_CHECKING:
    import argparse

    from llm_datadist.replay.plain_copy import PlainCopy
    from llm_datadist.replay.serve import Outcome


def replay(
    options: argparse.Namespace,
    geometry: Geometry,
    blocks: tuple[int, int],
    requests: list[trace.Request],
    outcome: Outcome,
) -> dict[str, Any]:
    """Replay requests and return the results. `outcome` has counters also if the replay fails.

    Raises WrongByteError, LatePullError, PrefillError, LLMException.
    """
    extra, token = _extra(options), secrets.token_hex(16)
    setup = _setup(options, geometry, blocks, requests, extra)
    node = Node(geometry, blocks, (options.device_pool, options.host_pool), {**extra, "llm.LinkToken": token})
    pulls = node.calls["pull blocks"]
    progress = Progress(len(requests), pulls, geometry.block_bytes, sys.stderr, quiet=options.quiet)
    prefill = Prefill(
        node, setup, token, options.prefill_limit, progress.tell, outcome.restarts, options.kill_prefill_at
    )
    corrupt = (options.corrupt_at, options.corrupt_pulled_at)
    server = Server(node, prefill, BlockTable(*blocks), options.concurrency, options.seed, outcome, corrupt)
    try:
        copied = progress.plain_copy = node.copy_plainly(_usual_pull(geometry, blocks, requests))
        progress.note(_compared_with(copied))
        prefill.start()
        start = progress.start()
        server.run(requests, progress)
        wall_s = time.monotonic() - start
        refusal = late_pull.check(node, prefill, server, progress.note)
        other = prefill.end()
        stats = node.stats()
    finally:
        # Nested, because Ctrl-C may interrupt each of them.
        try:
            progress.close()
        finally:
            try:
                prefill.close()
            finally:
                leaked = node.close()
    other["waited_s"] = prefill.waited_s
    other["restarts"] = [asdict(restart) for restart in outcome.restarts]
    setting = _setting(options, geometry, blocks, requests)
    setting.update(prefill_pool_bytes=setup.pool_bytes, prefill_blocks=setup.blocks)
    more = {"plain_copy": copied._asdict(), "late_pull": refusal._asdict(), "leaked_bytes": leaked}
    return report.results(setting, outcome, node.calls, stats, other, wall_s, **more)


def _usual_pull(geometry: Geometry, blocks: tuple[int, int], requests: list[trace.Request]) -> int:
    """Return the bytes of the blocks of an average request, as far as they fit the device pool."""
    mean = sum(len(request.blocks) for request in requests) // len(requests)
    return min(mean, blocks[0]) * geometry.block_bytes


def _compared_with(copied: PlainCopy) -> str:
    """Return the line about the plain copy, before the pulls that are compared with it."""
    amount = report.size(copied.bytes_at_a_time)
    return (
        f"memory limit: {report.rate(copied.bytes_per_s)} GiB/s, by a plain copy "
        f"({copied.threads} threads, {amount} at a time)"
    )


def _extra(options: argparse.Namespace) -> dict[str, str]:
    """Return the options of both engines, apart from their pools."""
    given = {
        "llm.SwapInPath": options.swap_in if options.swap_in != "auto" else None,
        "llm.CopyWorkers": options.workers,
        "llm.LinkTransport": options.transport if options.transport != "auto" else None,
    }
    return {name: str(value) for name, value in given.items() if value is not None}


def _setup(
    options: argparse.Namespace,
    geometry: Geometry,
    blocks: tuple[int, int],
    requests: list[trace.Request],
    extra: dict[str, str],
) -> Setup:
    """Return the setup of the prefill process. Its pool holds the largest requests that decode can serve."""
    largest = min(max(len(request.blocks) for request in requests), blocks[0])
    held = PREFILL_REQUESTS * largest
    return Setup(geometry, options.seed, held, geometry.prefill_bytes(held), extra)


def _setting(
    options: argparse.Namespace, geometry: Geometry, blocks: tuple[int, int], requests: list[trace.Request]
) -> dict[str, Any]:
    shape = (
        f"{geometry.block_bytes / 1024:,g} KiB a block of {geometry.tokens} tokens: "
        f"{geometry.layers} layers, K and V, heads {geometry.heads} x {geometry.head_dim}, {geometry.dtype}"
    )
    return {
        "trace": options.trace or f"built-in, seed {options.seed}",
        **trace.describe(requests),
        "geometry": shape,
        "layers": geometry.layers,
        "heads": geometry.heads,
        "head_dim": geometry.head_dim,
        "dtype": geometry.dtype,
        "block_tokens": geometry.tokens,
        "block_bytes": geometry.block_bytes,
        "scale": report.scale(geometry),
        "real_model": report.REAL_MODEL,
        "device_pool_bytes": options.device_pool,
        "device_blocks": blocks[0],
        "host_pool_bytes": options.host_pool,
        "host_blocks": blocks[1],
        "concurrency": options.concurrency,
        "seed": options.seed,
        "swap_in": options.swap_in,
        "workers": options.workers,
        "transport": options.transport,
        "kill_prefill_at": options.kill_prefill_at,
    }
