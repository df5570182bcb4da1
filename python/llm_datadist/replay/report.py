"""The results of a replay, as a table and as JSON, and the progress display."""

from __future__ import annotations

import contextlib
import resource
import shutil
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

import numpy as np

from llm_datadist.replay.geometry import POOLS

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llm_datadist.replay.geometry import Geometry
    from llm_datadist.replay.node import Calls
    from llm_datadist.replay.serve import Outcome

REAL_MODEL = "Llama-3-70B (80 layers, 8 KV heads x 128, bfloat16)"
REAL_BYTES_PER_TOKEN = 2 * 80 * 8 * 128 * 2
"""Bytes of K and V of one token in `REAL_MODEL`, to which byte counts are compared."""

_GB = 1e9
_BAR = 20
_WIDE = 110
"""Columns from which a terminal has room for a bar beside the text."""

_WAYS = {
    "mapped": "read in place",
    "none": "absent",
    "process": "read through the kernel",
    "stream": "sent through the socket",
}
"""Value in the counters of a link (`LinkStats`) → text of the report."""


class Progress:
    """A progress bar on a terminal, at most ten updates a second; elsewhere a line every few seconds."""

    def __init__(self, total: int, stream: TextIO, quiet: bool) -> None:
        self._total = total
        self._stream = stream
        self._quiet = quiet
        self._bar = not quiet and stream.isatty()
        self._every = 0.1 if self._bar else 5.0
        self._start = self._last = time.monotonic()

    def __call__(self, done: int, computed: int) -> None:
        """Show how many requests decode served and how many blocks prefill computed, if an update is due."""
        now = time.monotonic()
        if self._quiet or now - self._last < self._every:
            return
        self._last = now
        rate = max(done, 1) / (now - self._start)
        decode = f"{done:,}/{self._total:,} requests, {rate:,.0f}/s, {(self._total - done) / rate:,.0f} s left"
        prefill = f"{computed:,} blocks computed"
        if self._bar:
            text = f"decode: {decode}; prefill: {prefill}"
            columns = shutil.get_terminal_size().columns - 1  # a line that wraps could not be cleared
            width = _BAR if columns >= _WIDE else 0
            full = width * done // self._total
            bar = f"[{'#' * full}{'.' * (width - full)}] " if width else ""
            self._stream.write(f"\r{(bar + text)[:columns]}\x1b[K")
        else:
            self._stream.write(f"replay: decode: {decode}\nreplay: prefill: {prefill}\n")
        self._stream.flush()

    def tell(self, text: str) -> None:
        """Show a line of text, even if progress is not shown."""
        self.close()
        self._stream.write(f"replay: {text}\n")
        self._stream.flush()

    def close(self) -> None:
        """Clear the bar."""
        if self._bar:
            self._stream.write("\r\x1b[K")
            self._stream.flush()


def scale(geometry: Geometry) -> float:
    """Return how many times larger a block of the real model is than one of this geometry."""
    return REAL_BYTES_PER_TOKEN * geometry.tokens / geometry.block_bytes


def peak_memory_bytes() -> int:
    """Return the peak resident memory of this process in bytes."""
    with contextlib.suppress(OSError), Path("/proc/self/status").open(encoding="ascii", errors="replace") as status:
        for line in status:
            if line.startswith("VmHWM:"):
                return int(line.split()[1]) * 1024
    # For other systems. On Linux, this would include the peak of the process that started this one.
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def results(
    setting: Mapping[str, Any],
    outcome: Outcome,
    calls: Mapping[str, Calls],
    stats: Mapping[str, Any],
    prefill: Mapping[str, Any],
    wall_s: float,
) -> dict[str, Any]:
    """Return the results of a replay: sizes in bytes, times in seconds or microseconds, GB = 10^9 bytes."""
    engine_s = sum(sum(call.nanoseconds) for call in calls.values()) / 1e9
    seconds = {"engine": engine_s, **outcome.seconds, "wait for prefill": prefill["waited_s"]}
    seconds["other"] = max(wall_s - sum(seconds.values()), 0.0)
    return {
        "setting": dict(setting),
        "wall_s": wall_s,
        "seconds": seconds,
        "requests": outcome.requests,
        "requests_too_large": outcome.too_large,
        "largest_request_blocks": outcome.largest_blocks,
        "requests_finished_early": outcome.finished_early,
        "most_running": outcome.most_running,
        "blocks": {
            "device_hits": outcome.device_hits,
            "host_hits": outcome.host_hits,
            "computed": outcome.computed,
            "evicted": outcome.evicted,
            "dropped": outcome.dropped,
            "diverged": outcome.diverged,
            "private": outcome.private_blocks,
            "verified": outcome.verified_blocks,
        },
        "calls": {name: _cost(call) for name, call in calls.items()},
        "peak_memory_bytes": peak_memory_bytes(),
        "prefill": dict(prefill),
        "engine": dict(stats),
    }


def _cost(call: Calls) -> dict[str, int | float | None]:
    times = np.array(call.nanoseconds, dtype=np.int64)
    p50, p99 = np.percentile(times, (50, 99)) / 1e3 if len(times) else (None, None)
    total_s = float(times.sum()) / 1e9
    return {
        "calls": len(times),
        "blocks": call.blocks,
        "bytes": call.bytes,
        "seconds": total_s,
        "gb_per_s": call.bytes / _GB / total_s if call.bytes and total_s else None,
        "p50_us": None if p50 is None else float(p50),
        "p99_us": None if p99 is None else float(p99),
    }


def table(found: Mapping[str, Any]) -> str:
    """Return the results as aligned plain text."""
    setting, blocks = found["setting"], found["blocks"]
    references = blocks["device_hits"] + blocks["host_hits"] + blocks["computed"]
    pairs = [
        ("trace", f"{setting['trace']}, {setting['span_s']:,.0f} s of arrivals"),
        ("geometry", setting["geometry"]),
        ("scale", f"bytes are scaled 1 : {setting['scale']:,.0f} against {REAL_MODEL}"),
        ("device pool", _pool(setting, "device")),
        ("host pool", _pool(setting, "host")),
        ("prefill pool", f"{_size(setting['prefill_pool_bytes'])} = {setting['prefill_blocks']:,} blocks"),
        ("requests", _requests(found)),
        ("block references", f"{references:,}"),
        ("  hit on device", _share(blocks["device_hits"], references)),
        ("  swapped in from host", _share(blocks["host_hits"], references)),
        ("  pulled from prefill", _share(blocks["computed"], references)),
        (
            "evicted from host",
            f"{blocks['evicted']:,} blocks, {blocks['dropped']:,} dropped without a host slot",
        ),
        ("copied on divergence", f"{blocks['diverged']:,} of {blocks['private']:,} private blocks"),
        (
            "verified",
            f"{blocks['verified']:,} blocks, {_size(blocks['verified'] * setting['block_bytes'])}: right",
        ),
    ]
    width = max(len(name) for name, _ in pairs) + 2
    lines = [f"{name:<{width}}{text}" for name, text in pairs]
    lines += ["", *_calls(found["calls"]), ""]
    lines += [f"{name:<{width}}{text}" for name, text in _prefill(found["prefill"])]
    spent = ", ".join(f"{name} {seconds:.1f}" for name, seconds in found["seconds"].items())
    lines.append(f"{'time':<{width}}{found['wall_s']:.1f} s ({spent})")
    engine = found["engine"]
    pools = ", ".join(f"{name} pool {_size(engine['pools'][name]['peak_used_bytes'])}" for name in POOLS)
    lines.append(f"{'peak memory':<{width}}process {_size(found['peak_memory_bytes'])}, {pools}")
    ways = f"{engine['swap_in']['direct']:,} swap-ins direct, {engine['swap_in']['ring']:,} by ring"
    stores = ", ".join(f"{_size(engine[f'{name}_bytes'])} by {name} stores" for name in ("plain", "streaming"))
    lines.append(f"{'engine':<{width}}{engine['copy_workers']} copy workers; {ways}; copied {stores}")
    return "\n".join(lines)


def _prefill(prefill: Mapping[str, Any]) -> list[tuple[str, str]]:
    """Return the lines about the prefill process and the transport to it."""
    link = prefill["link"]
    ways = f"{link['transport']} to {link['address']}"
    if link["refusal"]:
        ways += f" ({link['refusal']})"
    ways += f"; pool memory {_WAYS[link['pools']]}, registered memory {_WAYS[link['registered']]}"
    work = f"{prefill['computed']:,} blocks computed, written in {prefill['seconds']:.1f} s"
    lines = [("prefill", f"{work}; process {_size(prefill['peak_memory_bytes'])}"), ("transport", ways)]
    for restart in prefill["restarts"]:
        code = f"; the pull failed with {restart['code']}" if restart["code"] else ""
        gap = "" if restart["gap_ms"] is None else f"; recovered after {restart['gap_ms']:,.0f} ms"
        lines.append(("restart", f"at request {restart['request']:,}: {restart['ended']}{code}{gap}"))
    return lines


def _requests(found: Mapping[str, Any]) -> str:
    text = f"{found['requests']:,}, at most {found['most_running']} at a time"
    if found["requests_too_large"]:
        text += f"; {found['requests_too_large']:,} NOT SERVED: larger than the device pool"
    return text


def _pool(setting: Mapping[str, Any], name: str) -> str:
    real = setting[f"{name}_blocks"] * setting["block_bytes"] * setting["scale"]
    return (
        f"{_size(setting[f'{name}_pool_bytes'])} = {setting[f'{name}_blocks']:,} blocks "
        f"(stands for {real / 2**30:,.0f} GiB of the real model)"
    )


def _share(part: int, whole: int) -> str:
    return f"{part:>9,} {100 * part / whole if whole else 0.0:5.1f} %"


def _calls(calls: Mapping[str, Mapping[str, Any]]) -> list[str]:
    rows: list[Sequence[str]] = [("engine call", "calls", "blocks", "bytes", "GB/s", "us p50", "us p99")]
    for name, cost in calls.items():
        rows.append(
            (
                name,
                f"{cost['calls']:,}",
                f"{cost['blocks']:,}" if cost["blocks"] else "-",
                _size(cost["bytes"]) if cost["bytes"] else "-",
                "-" if cost["gb_per_s"] is None else f"{cost['gb_per_s']:.2f}",
                "-" if cost["p50_us"] is None else f"{cost['p50_us']:,.1f}",
                "-" if cost["p99_us"] is None else f"{cost['p99_us']:,.1f}",
            )
        )
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
        for row in rows
    ]


def _size(size: float) -> str:
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size >= factor:
            return f"{size / factor:,.1f} {unit}"
    return f"{size:,.0f} B"
