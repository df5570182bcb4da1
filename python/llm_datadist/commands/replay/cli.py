"""Options of ``llm-datadist replay``, one replay from start to end, and its exit status (docs/cli.md)."""

from __future__ import annotations

import argparse
import re
import time
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_datadist.commands.output import STANDARD_OUTPUT, CommandParser, complain, write, write_results, written_to
from llm_datadist.commands.replay import hit_rates, report, trace
from llm_datadist.commands.replay.node import POOLS, Geometry, Node
from llm_datadist.commands.replay.prefill import Prefill, PrefillError, shown
from llm_datadist.commands.replay.serve import Outcome, Server, WrongByteError
from llm_datadist.commands.replay.table import BlockTable
from llm_datadist.commands.replay.worker import Setup
from llm_datadist.native import Error

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BUILT_IN_REQUESTS = 8_000
_UNITS = {"": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_LARGEST_POOL = 20 * 2**30
_HALF_WAY = 0
_NOT_SERVED = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay a trace with the options in ``arguments``, print the results and return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    geometry = Geometry(options.layers, options.heads, options.head_dim, options.block_tokens)
    _check(parser, options)
    if options.hit_rates:
        return _hit_rates(parser, options, geometry)
    blocks = _pools(parser, options, geometry)
    outcome, found = Outcome(), None
    try:
        requests = _requests(parser, options)
        found = replay(options, geometry, blocks, requests, outcome)
        status, problem = _judged(geometry, found)
    except KeyboardInterrupt:
        status, problem = 130, "interrupted"
    except WrongByteError as error:
        status, problem = 1, f"WRONG BYTE: {error}"
    except PrefillError as error:
        status, problem = 1, f"the prefill process failed: {error}"
    except Error as error:
        status, problem = 1, f"the engine failed: {shown(error)}"
    verdict = report.verdict(outcome, geometry.block_bytes, passed=not status)
    if found is not None:
        write_results(report.table(found), {**found, "verdict": verdict}, options.json)
    if problem:
        complain(f"replay: {problem}")
    say = complain if options.json == STANDARD_OUTPUT else write  # then standard output gets only the JSON
    say(verdict)
    return status


def replay(
    options: argparse.Namespace,
    geometry: Geometry,
    blocks: tuple[int, int],
    requests: list[trace.Request],
    outcome: Outcome,
) -> dict[str, Any]:
    """Replay requests and return the results. `outcome` has counters also if the replay fails.

    Raises WrongByteError, PrefillError, Error.
    """
    # The pool of prefill holds the largest request that decode can serve.
    largest = min(max(len(request.blocks) for request in requests), blocks[0])
    setup = Setup(geometry, options.seed, largest, options.transport)
    decode = Node(geometry, blocks, (options.device_pool, options.host_pool), options.transport)
    prefill = Prefill(decode, setup, complain, outcome.restarts, options.kill_prefill_at)
    try:
        server = Server(decode, prefill, BlockTable(*blocks), options.concurrency, options.seed, outcome)
        prefill.start()
        pulls, start = decode.calls["pull blocks"], time.monotonic()
        server.run(requests, report.Progress(len(requests), pulls, geometry.block_bytes, quiet=options.quiet))
        wall_s = time.monotonic() - start
        other = {**prefill.end(), "restarts": [asdict(restart) for restart in outcome.restarts]}
        stats = decode.engine.stats()
    finally:
        try:  # nested, because Ctrl-C may interrupt each of them
            prefill.close()
        finally:
            leaked = decode.close()
    setting = _setting(options, geometry, blocks, requests)
    more = {"prefill": other, "engine": stats, "leaked_bytes": leaked}
    return report.results(setting, outcome, decode.calls, wall_s, **more)


def _setting(
    options: argparse.Namespace, geometry: Geometry, blocks: tuple[int, int], requests: list[trace.Request]
) -> dict[str, Any]:
    names = ("layers", "heads", "head_dim", "block_tokens", "concurrency", "seed", "transport", "kill_prefill_at")
    return {
        "trace": _name(options),
        **trace.describe(requests),
        **{name: getattr(options, name) for name in names},
        "block_bytes": geometry.block_bytes,
        "scale": report.scale(geometry),
        **{f"{name}_pool_bytes": getattr(options, f"{name}_pool") for name in POOLS},
        **{f"{name}_blocks": count for name, count in zip(POOLS, blocks)},
    }


def _judged(geometry: Geometry, found: dict[str, Any]) -> tuple[int, str]:
    """Return the exit status of a replay that ended, and the reason if it is not 0."""
    for name, leaked in (("decode", found["leaked_bytes"]), ("prefill", found["prefill"]["leaked_bytes"])):
        if leaked:
            return 1, f"LEAK: {name}: {leaked:,} bytes in use after all was freed"
    if not found["requests_too_large"]:
        return 0, ""
    needed = found["largest_request_blocks"]
    pool_bytes = geometry.pool_bytes(needed) + geometry.ring_bytes
    return _NOT_SERVED, (
        f"NOT SERVED: {found['requests_too_large']:,} of {found['requests']:,} requests, because the device pool is "
        f"too small: the largest of them needs {needed:,} blocks, and the pool has "
        f"{found['setting']['device_blocks']:,}; use --device-pool {-(-pool_bytes // 2**20)}MiB or more"
    )


def _requests(parser: CommandParser, options: argparse.Namespace) -> list[trace.Request]:
    try:
        if options.trace is None:
            requests = trace.make_trace(options.requests or BUILT_IN_REQUESTS, options.seed, options.block_tokens)
        else:
            requests = trace.read_trace(options.trace, options.requests)
    except trace.TraceError as error:
        parser.error(str(error))
    if options.kill_prefill_at == _HALF_WAY:
        options.kill_prefill_at = (len(requests) + 1) // 2
    if options.kill_prefill_at is not None and options.kill_prefill_at > len(requests):
        parser.error(f"--kill-prefill-at: the trace has only {len(requests):,} requests")
    return requests


def _hit_rates(parser: CommandParser, options: argparse.Namespace, geometry: Geometry) -> int:
    """Write the hit rates over the capacity, and return the exit status."""
    try:
        requests = _requests(parser, options)
        rates = hit_rates.hit_rates(requests)
    except KeyboardInterrupt:
        complain("replay: interrupted")
        return 130
    found = hit_rates.results(rates, _name(options), trace.describe(requests), geometry.block_bytes)
    try:
        write_results(hit_rates.table(found), found, options.json)
    finally:
        if options.svg is not None:
            with written_to(options.svg):
                Path(options.svg).write_text(hit_rates.svg(found), encoding="utf-8")
    return 0


def _name(options: argparse.Namespace) -> str:
    return options.trace or f"built-in, seed {options.seed}"


def _check(parser: CommandParser, options: argparse.Namespace) -> None:
    """Check that the options are consistent."""
    if options.trace is not None and options.block_tokens != trace.FILE_BLOCK_TOKENS:
        parser.error(f"--block-tokens: a trace file has blocks of {trace.FILE_BLOCK_TOKENS} tokens")
    if options.svg is not None and not options.hit_rates:
        parser.error("--svg: only with --hit-rates")
    if options.svg == STANDARD_OUTPUT:
        parser.error("--svg: standard output takes no picture; use the name of a file")
    if options.hit_rates and options.kill_prefill_at is not None:
        parser.error("--kill-prefill-at: --hit-rates has no prefill process")
    parser.check_json(options.json)
    parser.check_json(options.svg, "--svg")


def _pools(parser: CommandParser, options: argparse.Namespace, geometry: Geometry) -> tuple[int, int]:
    """Return how many blocks the device and the host pool hold."""
    if geometry.row_bytes % 8:
        parser.error(f"a block takes {geometry.row_bytes} bytes of a tensor, which must be a multiple of 8")
    blocks = (geometry.blocks(options.device_pool - geometry.ring_bytes), geometry.blocks(options.host_pool))
    for name, given, count in zip(POOLS, (options.device_pool, options.host_pool), blocks):
        if count < 1:
            also = " and the swap-in ring" if name == "device" else ""
            parser.error(
                f"--{name}-pool: {given:,} bytes do not hold one block of {geometry.block_bytes:,} bytes{also}"
            )
    return blocks


def _parser() -> CommandParser:
    parser = CommandParser(
        prog="llm-datadist replay",
        description="Replay a request trace through a prefill and a decode process. The prefill process writes blocks; "
        "the decode process pulls them, and swaps blocks when its device pool is full. The command verifies every byte "
        "of every block, and reports pulls, hits, swaps and latencies. Use it to choose the sizes of pools. The last "
        "line is the verdict: PASS or FAIL.",
        epilog="Exit status: 0 if every request was served and every byte was right; 1 for a wrong byte, a leak or a "
        "failure; 2 for options or a trace that cannot be used; 3 if requests did not fit the device pool; "
        "130 for Ctrl-C.",
    )
    add = parser.add_argument
    add("trace", nargs="?", metavar="TRACE", help="JSON-lines file with the requests (a generated trace)")
    made = f"number of requests (all of TRACE, or {BUILT_IN_REQUESTS:,} of a generated trace)"
    add("--requests", type=_whole(1, 10**7), metavar="N", help=made)
    for name, kind, default, metavar, meaning in _WITH_DEFAULT:
        choices = {"choices": kind} if isinstance(kind, tuple) else {"type": kind, "metavar": metavar}
        add(f"--{name}", default=default, help=f"{meaning} (%(default)s)", **choices)
    killed = "kill the prefill process during the pull of request N, or of the middle one"
    add("--kill-prefill-at", type=_whole_or_half, metavar="N|half", help=killed)
    rates = "run no process: print the hit rate of an LRU cache, such as a keeper, for each capacity"
    add("--hit-rates", action="store_true", help=rates)
    add("--svg", metavar="FILE", help="with --hit-rates: also write the curve to FILE")
    add("--json", metavar="FILE", help="also write the results to FILE as JSON; - prints them in place of the table")
    add("--quiet", action="store_true", help="show no progress")
    return parser


def _whole(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,20}", text) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least:,} to {most:,}")
        return int(text)

    return parse


def _whole_or_half(text: str) -> int:
    return _HALF_WAY if text == "half" else _whole(1, 10**7)(text)


def _bytes(text: str) -> int:
    match = re.fullmatch(r"([0-9]{1,18}) ?([KMG]iB|)", text, re.IGNORECASE)
    count = int(match[1]) * _UNITS[match[2].upper()] if match else 0
    if not 0 < count <= _LARGEST_POOL:
        raise argparse.ArgumentTypeError(f"{text!r} is not a size in bytes (as in 160MiB) of at most 20 GiB")
    return count


_WITH_DEFAULT: tuple[tuple[str, Any, Any, str, str], ...] = (
    ("device-pool", _bytes, "160MiB", "SIZE", "size of decode's device pool"),
    ("host-pool", _bytes, "640MiB", "SIZE", "size of decode's host pool"),
    ("block-tokens", _whole(1, 2**20), 512, "N", "tokens in a block"),
    ("layers", _whole(1, 1024), 4, "N", "layers, with a K and a V tensor each"),
    ("heads", _whole(1, 1024), 1, "N", "KV heads"),
    ("head-dim", _whole(1, 4096), 16, "N", "elements of a head, each of 2 bytes"),
    ("concurrency", _whole(1, 10**5), 16, "N", "requests that run at a time"),
    ("seed", _whole(0, 2**63), 1, "N", "seed of trace and contents"),
    ("transport", ("auto", "shm", "tcp"), "auto", "", "transport of pulls"),
)
