"""Options of ``llm-datadist replay`` and its exit status.

| exit status | meaning                                                                                    |
| ----------- | ------------------------------------------------------------------------------------------ |
| 0           | every request was served, and every byte was correct                                       |
| 1           | a wrong byte, a leak, a late pull that is not refused, a failure of engine or prefill, or  |
|             | a result that was not written                                                              |
| 2           | the options or the trace cannot be used                                                    |
| 3           | every byte was correct, but some requests did not fit the device pool and were not served  |
| 130         | Ctrl-C interrupted the replay                                                              |
"""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_datadist import LLMException
from llm_datadist.replay import report, trace
from llm_datadist.replay.geometry import DTYPES, POOLS, Geometry
from llm_datadist.replay.late_pull import LatePullError
from llm_datadist.replay.prefill import PrefillError
from llm_datadist.replay.run import replay
from llm_datadist.replay.serve import Outcome, WrongByteError
from llm_datadist.standard_output import CommandParser, complain, write, write_results

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

BUILT_IN_REQUESTS = 8_000
_UNITS = {"": 1, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}
_LARGEST_POOL = 20 * 2**30
_HALF_WAY = 0
_MOST_WORKERS = 256  # limit of the engine (`copy_workers`)
_STANDARD_OUTPUT = "-"
_NOT_SERVED = 3


def main(arguments: Sequence[str] | None = None) -> int:
    """Replay a trace with the options in ``arguments``, print the results and return the exit status."""
    parser = _parser()
    options = parser.parse_args(arguments)
    geometry = Geometry(options.layers, options.heads, options.head_dim, options.dtype, options.block_tokens)
    blocks = _check(parser, options, geometry)
    outcome, found = Outcome(), None
    try:
        requests = _requests(parser, options, geometry)
        found = replay(options, geometry, blocks, requests, outcome)
        status, problem = _judged(options, geometry, found)
    except KeyboardInterrupt:
        status, problem = 130, "interrupted"
    except (WrongByteError, LatePullError, PrefillError, LLMException) as error:
        status, problem = 1, _failure(error)
    verdict = report.verdict(outcome, geometry.block_bytes, passed=not status)
    if found is not None:
        _print(options, {**found, "verdict": verdict})
    if problem:
        complain(f"replay: {problem}")
    elif options.offer:
        _say(options, options.offer)
    _say(options, verdict)
    return status


def _failure(error: Exception) -> str:
    """Return the reason why a replay did not end."""
    if isinstance(error, WrongByteError):
        return f"WRONG BYTE: {error}"
    if isinstance(error, PrefillError):
        return f"the prefill process failed: {error}"
    if isinstance(error, LLMException):
        return f"the engine failed: {error.status_code.name}: {error}"
    return f"LATE PULL: {error}"


def _judged(options: argparse.Namespace, geometry: Geometry, found: dict[str, Any]) -> tuple[int, str]:
    """Return the exit status of a replay that ended, and the reason if it is not 0."""
    for name, leaked in (("decode", found["leaked_bytes"]), ("prefill", found["prefill"]["leaked_bytes"])):
        if leaked:
            return 1, f"LEAK: {name}: {leaked:,} bytes in use after all was freed"
    if found["requests_too_large"]:
        return _NOT_SERVED, _too_small(options, geometry, found)
    return 0, ""


def _print(options: argparse.Namespace, found: dict[str, Any]) -> None:
    """Print the table, and write the JSON."""
    write_results(f"{report.table(found)}\n", json.dumps(found, indent=2), options.json)


def _say(options: argparse.Namespace, text: str) -> None:
    """Print a text. With ``--json -``, standard output gets only the JSON."""
    if options.json == _STANDARD_OUTPUT:
        complain(text)
    else:
        write(text)


def _too_small(options: argparse.Namespace, geometry: Geometry, found: dict[str, Any]) -> str:
    """Return a text that states which pool was too small, and which size holds the largest request."""
    setting, needed = found["setting"], found["largest_request_blocks"]
    size = geometry.device_bytes(needed, options.concurrency)
    return (
        f"NOT SERVED: {found['requests_too_large']:,} of {found['requests']:,} requests, because the device pool is "
        f"too small: the largest of them needs {needed:,} blocks, and the pool has {setting['device_blocks']:,}; use "
        f"--device-pool {-(-size // 2**20)}MiB or more"
    )


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


def _check(parser: argparse.ArgumentParser, options: argparse.Namespace, geometry: Geometry) -> tuple[int, int]:
    """Check that the options are consistent, and return how many blocks the device and the host pool hold."""
    if options.trace is not None and options.block_tokens != trace.FILE_BLOCK_TOKENS:
        parser.error(f"--block-tokens: a trace file has blocks of {trace.FILE_BLOCK_TOKENS} tokens")
    if geometry.row_bytes % 8:
        parser.error(f"a block takes {geometry.row_bytes} bytes of a tensor, which must be a multiple of 8")
    if options.json not in (None, _STANDARD_OUTPUT):
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
    _add_workload(parser.add_argument)
    _add_run(parser.add_argument)
    return parser


_DEFAULT = "(%(default)s)"


def _add_workload(add: Callable[..., Any]) -> None:
    """Add the options of the trace, the pools and the shape of a block."""
    made = f"number of requests (all of TRACE, or {BUILT_IN_REQUESTS:,} of a generated trace)"
    add(
        "trace",
        nargs="?",
        metavar="TRACE",
        help="JSON-lines file with the requests (a generated trace)",
    )
    add("--requests", type=_whole(1, 10**7), metavar="N", help=made)
    add(
        "--device-pool",
        type=_bytes,
        default="160MiB",
        metavar="SIZE",
        help=f"size of decode's device pool {_DEFAULT}",
    )
    add("--host-pool", type=_bytes, default="640MiB", metavar="SIZE", help=f"size of decode's host pool {_DEFAULT}")
    add("--block-tokens", type=_whole(1, 2**20), default=512, metavar="N", help=f"tokens in a block {_DEFAULT}")
    add(
        "--layers",
        type=_whole(1, 1024),
        default=4,
        metavar="N",
        help=f"layers, with a K and a V tensor each {_DEFAULT}",
    )
    add("--heads", type=_whole(1, 1024), default=1, metavar="N", help=f"KV heads {_DEFAULT}")
    add("--head-dim", type=_whole(1, 4096), default=16, metavar="N", help=f"elements of a head {_DEFAULT}")
    add("--dtype", choices=list(DTYPES), default="float16", help=f"element type {_DEFAULT}")


def _add_run(add: Callable[..., Any]) -> None:
    """Add the options of the run and of its results."""
    add("--concurrency", type=_whole(1, 10**5), default=16, metavar="N", help=f"requests that run at a time {_DEFAULT}")
    add(
        "--seed",
        type=_whole(0, 2**63),
        default=1,
        metavar="N",
        help=f"seed of trace and contents {_DEFAULT}",
    )
    add("--swap-in", choices=("auto", "direct", "ring"), default="auto", help=f"path from host to device {_DEFAULT}")
    workers = f"threads of each process that copy, 1 to {_MOST_WORKERS} (default of the engine: 4)"
    add("--workers", type=_whole(1, _MOST_WORKERS), metavar="N", help=workers)
    add("--transport", choices=("auto", "shm", "tcp"), default="auto", help=f"transport of pulls {_DEFAULT}")
    killed = "kill the prefill process during the pull of request N, or of the middle one"
    add("--kill-prefill-at", type=_whole_or_half, metavar="N|half", help=killed)
    add(
        "--prefill-limit",
        type=_seconds,
        default=30.0,
        metavar="S",
        help=f"time limit of an answer of prefill in seconds {_DEFAULT}",
    )
    add("--json", metavar="FILE", help="also write the results to FILE as JSON; - prints them in place of the table")
    add("--quiet", action="store_true", help="show no progress")
    add("--offer", help=argparse.SUPPRESS)  # a line before the verdict, if every byte was right
    add("--corrupt-at", type=_whole(1, 2**63), help=argparse.SUPPRESS)
    add("--corrupt-pulled-at", type=_whole(1, 2**63), help=argparse.SUPPRESS)


def _whole(least: int, most: int) -> Callable[[str], int]:
    def parse(text: str) -> int:
        if not re.fullmatch(r"[0-9]{1,20}", text) or not least <= int(text) <= most:
            raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from {least:,} to {most:,}")
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
        raise argparse.ArgumentTypeError(f"{text!r} is not a size in bytes (as in 160MiB) of at most 20 GiB")
    return size
