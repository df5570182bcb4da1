"""Options of ``python -m llm_datadist replay`` and its exit status. Not for the replay itself.

Exit status: 0 when every byte was right, 1 on a wrong byte, a leak, a failure of the engine or a prefill process that
cannot be kept alive, 2 when the options or the trace cannot be used.
"""

# ruff: noqa: T201  (a command prints)

from __future__ import annotations

import argparse
import json
import re
import secrets
import sys
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_datadist import LLMException
from llm_datadist.replay import report, trace
from llm_datadist.replay.geometry import DTYPES, POOLS, PREFILL_REQUESTS, Geometry
from llm_datadist.replay.node import Node
from llm_datadist.replay.prefill import Prefill, PrefillError
from llm_datadist.replay.serve import Server, WrongByteError
from llm_datadist.replay.table import BlockTable
from llm_datadist.replay.worker import Setup

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BUILT_IN_REQUESTS = 12_000
_UNITS = {"": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_LARGEST_POOL = 20 * 10**9
_HALF_WAY = 0


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay a trace as the arguments say, print the results and return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    geometry = Geometry(options.layers, options.heads, options.head_dim, options.dtype, options.block_tokens)
    blocks = _check(parser, options, geometry)
    requests = _requests(parser, options, geometry)
    try:
        found = _replay(options, geometry, blocks, requests)
    except WrongByteError as error:
        return _failed(f"WRONG BYTE: {error}")
    except PrefillError as error:
        return _failed(f"the prefill process failed: {error}")
    except LLMException as error:
        return _failed(f"the engine failed: {error.status_code.name}: {error}")
    except KeyboardInterrupt:
        return _failed("interrupted", 130)
    print(report.table(found))
    if options.json is not None:
        Path(options.json).write_text(json.dumps(found, indent=2) + "\n", encoding="utf-8")
    for name, leaked in (("decode", found["leaked_bytes"]), ("prefill", found["prefill"]["leaked_bytes"])):
        if leaked:
            return _failed(f"LEAK: {name}: {leaked:,} bytes in use after all was freed")
    return 0


def _requests(parser: argparse.ArgumentParser, options: argparse.Namespace, geometry: Geometry) -> list[trace.Request]:
    try:
        if options.trace is None:
            requests = trace.make_trace(options.requests or BUILT_IN_REQUESTS, options.seed, geometry.tokens)
        else:
            requests = trace.read_trace(options.trace, options.requests)
    except trace.TraceError as error:
        parser.error(str(error))
    if options.kill_prefill_at == _HALF_WAY:
        options.kill_prefill_at = (len(requests) + 1) // 2
    if options.kill_prefill_at is not None and options.kill_prefill_at > len(requests):
        parser.error(f"--kill-prefill-at: the trace has only {len(requests):,} requests")
    return requests


def _failed(text: str, status: int = 1) -> int:
    print(f"replay: {text}", file=sys.stderr)
    return status


def _replay(
    options: argparse.Namespace, geometry: Geometry, blocks: tuple[int, int], requests: list[trace.Request]
) -> dict[str, Any]:
    extra, token = _extra(options), secrets.token_hex(16)
    setup = _setup(options, geometry, blocks, requests, extra)
    pools = (options.device_pool, options.host_pool)
    node = Node(geometry, blocks, pools, {**extra, "llm.LinkToken": token})
    progress = report.Progress(len(requests), sys.stderr, options.quiet)
    prefill = Prefill(node, setup, token, options.prefill_limit, progress.tell, options.kill_prefill_at)
    leaked = 0
    try:
        prefill.start()
        corrupt = (options.corrupt_at, options.corrupt_pulled_at)
        server = Server(node, prefill, BlockTable(*blocks), options.concurrency, options.seed, corrupt)
        start = time.perf_counter()
        server.run(requests, progress)
        wall_s = time.perf_counter() - start
        other = prefill.end()
        stats = node.stats()
    finally:
        progress.close()
        prefill.close()
        leaked = node.close()
    other["waited_s"] = prefill.waited_s
    other["restarts"] = [asdict(restart) for restart in prefill.restarts]
    setting = _setting(options, geometry, blocks, requests)
    setting.update(prefill_pool_bytes=setup.pool_bytes, prefill_blocks=setup.blocks)
    found = report.results(setting, server.outcome, node.calls, stats, other, wall_s)
    found["leaked_bytes"] = leaked
    return found


def _extra(options: argparse.Namespace) -> dict[str, str]:
    """Return the options of both engines that have no property."""
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
    """Return what prefill needs to know; its pool holds the largest requests that decode can serve."""
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


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace, geometry: Geometry) -> tuple[int, int]:
    """Check the options against each other; return how many blocks the device and the host pool hold."""
    if options.trace is not None and options.block_tokens != trace.FILE_BLOCK_TOKENS:
        parser.error(f"--block-tokens: a trace file has blocks of {trace.FILE_BLOCK_TOKENS} tokens")
    if geometry.row_bytes % 8:
        parser.error(f"a block takes {geometry.row_bytes} bytes of a tensor, which must be a multiple of 8")
    if options.json is not None:
        try:
            Path(options.json).touch()
        except OSError as error:
            parser.error(f"--json: {error}")
    blocks = (
        geometry.device_blocks(options.device_pool, options.concurrency),
        geometry.host_blocks(options.host_pool),
    )
    for name, size, count in zip(POOLS, (options.device_pool, options.host_pool), blocks):
        if count < 1:
            need = f"one block of {geometry.block_bytes:,} bytes"
            need += ", staging and the swap-in ring" if name == "device" else ""
            parser.error(f"--{name}-pool: {size:,} bytes do not hold {need}")
    return blocks


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m llm_datadist replay",
        description="Replay a request trace through two engines as a prefill and a decode node would: prefill writes "
        "blocks, decode pulls them and swaps under pressure. Verifies every byte of every block, and reports pulls, "
        "hits, swaps and latencies: for sizing pools and for proving the engine right.",
    )
    add = parser.add_argument
    made = f"the first N requests (of TRACE; of a made trace: {BUILT_IN_REQUESTS:,})"
    shown = "(%(default)s)"
    add(
        "trace",
        nargs="?",
        metavar="TRACE",
        help="JSON-lines file; without it a trace of the same shape is made",
    )
    add("--requests", type=_whole(1, 10**7), metavar="N", help=made)
    add("--device-pool", type=_bytes, default="160MiB", metavar="SIZE", help=f"bytes on decode's device {shown}")
    add("--host-pool", type=_bytes, default="640MiB", metavar="SIZE", help=f"bytes on decode's host {shown}")
    add("--block-tokens", type=_whole(1, 2**20), default=512, metavar="N", help=f"tokens in a block {shown}")
    add("--layers", type=_whole(1, 1024), default=4, metavar="N", help=f"layers, a K and a V each {shown}")
    add("--heads", type=_whole(1, 1024), default=1, metavar="N", help=f"KV heads {shown}")
    add("--head-dim", type=_whole(1, 4096), default=16, metavar="N", help=f"elements of a head {shown}")
    add("--dtype", choices=list(DTYPES), default="float16", help=f"element type {shown}")
    add("--concurrency", type=_whole(1, 10**5), default=16, metavar="N", help=f"requests at a time {shown}")
    add("--seed", type=_whole(0, 2**63), default=1, metavar="N", help=f"seed of trace and contents {shown}")
    add("--swap-in", choices=("auto", "direct", "ring"), default="auto", help=f"host to device path {shown}")
    add("--workers", type=_whole(1, 1024), metavar="N", help="copy threads (as the engine chooses)")
    add("--transport", choices=("auto", "shm", "tcp"), default="auto", help=f"of pulls {shown}")
    killed = "kill the prefill process in the middle of a pull: that of request N, or half-way"
    add("--kill-prefill-at", type=_whole_or_half, metavar="N|half", help=killed)
    add("--prefill-limit", type=_seconds, default=30.0, metavar="S", help=f"seconds for an answer of prefill {shown}")
    add("--json", metavar="FILE", help="also write the results to FILE")
    add("--quiet", action="store_true", help="show no progress")
    add("--corrupt-at", type=_whole(1, 2**63), help=argparse.SUPPRESS)
    add("--corrupt-pulled-at", type=_whole(1, 2**63), help=argparse.SUPPRESS)
    return parser


def _whole(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,20}", text) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number in {least:,} ... {most:,}")
        return int(text)

    return parse


def _whole_or_half(text: str) -> int:
    return _HALF_WAY if text == "half" else _whole(1, 10**7)(text)


def _seconds(text: str) -> float:
    if not re.fullmatch(r"[0-9]{1,4}(\.[0-9]{1,3})?", text) or not float(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.001 to 9,999")
    return float(text)


def _bytes(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,18}) ?([KMG]iB|)", text, re.IGNORECASE)
    size = int(match[1]) * _UNITS[match[2].upper()] if match else 0
    if not 0 < size <= _LARGEST_POOL:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size in bytes (as in 160MiB) of at most 20 GB")
    return size
