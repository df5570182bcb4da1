"""The results of a replay: a table, JSON, and the verdict."""

from __future__ import annotations

import contextlib
import resource
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llm_datadist.replay.geometry import Geometry
    from llm_datadist.replay.node import Calls
    from llm_datadist.replay.serve import Outcome

REAL_MODEL = "Llama-3-70B (80 layers, 8 KV heads x 128, bfloat16)"
REAL_BYTES_PER_TOKEN = 2 * 80 * 8 * 128 * 2
"""Bytes of K and V of one token in `REAL_MODEL`, to which byte counts are compared."""

_GB = 1e9
_WAYS = {
    "mapped": "read in place",
    "none": "absent",
    "process": "read through the kernel",
    "stream": "sent through the socket",
}
"""Value in the counters of a link (`LinkStats`) → text of the report."""


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
    **more: Any,
) -> dict[str, Any]:
    """Return the results of a replay: bytes, times in seconds or microseconds, GB = 10^9 bytes. `more` adds some."""
    engine_s = sum(call.total_ns for call in calls.values()) / 1e9
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
            "wrong": outcome.wrong_blocks,
        },
        "compared_bytes": outcome.verified_blocks * setting["block_bytes"],
        "calls": {name: _cost(call) for name, call in calls.items()},
        "peak_memory_bytes": peak_memory_bytes(),
        "prefill": dict(prefill),
        "engine": dict(stats),
        **more,
    }


def _cost(call: Calls) -> dict[str, int | float | None]:
    times = np.array(call.nanoseconds, dtype=np.int64)
    p50, p99 = np.percentile(times, (50, 99)) / 1e3 if len(times) else (None, None)
    total_s = call.total_ns / 1e9
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
    """Return the results as aligned plain text of at most 80 columns."""
    setting, blocks = found["setting"], found["blocks"]
    references = blocks["device_hits"] + blocks["host_hits"] + blocks["computed"]
    real = f"{setting['real_model'].split(' (')[0]}: {size(setting['block_bytes'] * setting['scale'])}"
    pairs = [
        ("trace", f"{setting['trace']}; at most {found['most_running']} requests at a time"),
        ("block", f"{size(setting['block_bytes'])} for {setting['block_tokens']:,} tokens ({real})"),
        ("device pool", _pool(setting, "device")),
        ("host pool", _pool(setting, "host")),
        ("block references", f"{references:,}"),
        ("  hit on device", _share(blocks["device_hits"], references)),
        ("  swapped in from host", _share(blocks["host_hits"], references)),
        ("  pulled from prefill", _share(blocks["computed"], references)),
        ("transport", _transport(found["prefill"]["link"])),
        ("time", f"{found['wall_s']:.1f} s ({_longest(found['seconds'])})"),
    ]
    width = max(len(name) for name, _ in pairs) + 2
    return "\n".join([*(f"{name:<{width}}{text}" for name, text in pairs), "", *_calls(found)])


def verdict(outcome: Outcome, block_bytes: int, *, passed: bool) -> str:
    """Return the last line of a replay, also of one that did not end."""
    text = f"{'PASS' if passed else 'FAIL'} {_counted(outcome.requests - outcome.too_large, 'request', 'requests')}"
    text += f", {size(outcome.verified_blocks * block_bytes)} compared, {outcome.wrong_blocks} wrong"
    for kill, names in ((True, ("kill", "kills")), (False, ("crash", "crashes"))):
        gaps = [restart.gap_ms for restart in outcome.restarts if restart.kill == kill and restart.gap_ms is not None]
        if gaps:
            text += f", {_counted(len(gaps), *names)} survived in {max(gaps) / 1e3:.1f} s"
    return text


def rate(moved: float, nanoseconds: float = 1e9) -> str:
    """Return a rate in GiB/s with two digits at least, so that a small one is not shown as 0."""
    number = moved / 2**30 / (nanoseconds / 1e9)
    return f"{number:.1f}" if number >= 1 else f"{number:.2g}"


def size(count: float) -> str:
    """Return a number of bytes in a unit that suits it."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            return f"{count / factor:,.1f} {unit}"
    return f"{count:,.0f} B"


def _counted(count: int, name: str, names: str) -> str:
    return f"{count:,} {name if count == 1 else names}"


def _transport(link: Mapping[str, Any]) -> str:
    refusal = f" ({link['refusal']})" if link["refusal"] else ""
    return f"{link['transport']}{refusal}; pool memory is {_WAYS[link['pools']]}"


def _pool(setting: Mapping[str, Any], name: str) -> str:
    blocks = setting[f"{name}_blocks"]
    real = blocks * setting["block_bytes"] * setting["scale"]
    return f"{size(setting[f'{name}_pool_bytes'])}, {blocks:,} blocks (stands for {real / 2**30:,.0f} GiB)"


def _share(part: int, whole: int) -> str:
    return f"{part:>9,} {100 * part / whole if whole else 0.0:5.1f} %"


def _longest(seconds: Mapping[str, float]) -> str:
    """Return the activities that took the most time."""
    return ", ".join(f"{name} {seconds[name]:.1f}" for name in sorted(seconds, key=seconds.__getitem__)[:-4:-1])


def _calls(found: Mapping[str, Any]) -> list[str]:
    """Return a table of the calls that move blocks, with the plain copy that they are compared with."""
    rows: list[Sequence[str]] = [("call", "calls", "blocks", "bytes", "GiB/s", "us p50", "us p99")]
    for name in ("pull blocks", "swap out", "swap in", "copy blocks"):
        cost = found["calls"][name]
        if cost["calls"]:
            times = (f"{cost[key]:,.1f}" for key in ("p50_us", "p99_us"))
            moved = rate(cost["bytes"], cost["seconds"] * 1e9)
            rows.append((name, f"{cost['calls']:,}", f"{cost['blocks']:,}", size(cost["bytes"]), moved, *times))
    copy = found["plain_copy"]
    rows.append(("plain copy", "-", "-", "-", rate(copy["bytes_per_s"]), "-", "-"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join([row[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(row[1:], widths[1:]))])
        for row in rows
    ]
