"""What a replay shows: its progress on standard error, its results as a table and for programs, and the verdict."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from llm_datadist.commands.output import aligned, complain, percentiles, size

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llm_datadist.commands.replay.node import Calls, Geometry
    from llm_datadist.commands.replay.serve import Outcome

REAL_MODEL = "Llama-3-70B"
REAL_BYTES_PER_TOKEN = 2 * 80 * 8 * 128 * 2
"""Bytes of K and V of one token in `REAL_MODEL` (80 layers, 8 KV heads x 128, bfloat16)."""

_EVERY_S = 5.0
_WAYS = {
    "mapped": "read in place",
    "none": "absent",
    "process": "read through the kernel",
    "stream": "sent through the socket",
}
"""Value in the counters of a link (`LinkStats`) → text of the report."""


class Progress:
    """A line on standard error every five seconds.

    Args:
        total: number of requests.
        pulls: the cost of all pulls so far.
        block_bytes: bytes of a block.
        quiet: whether no such line is shown.
    """

    def __init__(self, total: int, pulls: Calls, block_bytes: int, *, quiet: bool) -> None:
        self._total, self._pulls, self._block_bytes, self._quiet = total, pulls, block_bytes, quiet
        self._start = self._last = time.monotonic()

    def __call__(self, outcome: Outcome) -> None:
        """Show how far the replay is, and the rate of the pulls so far, if a line is due."""
        now = time.monotonic()
        if self._quiet or now - self._last < _EVERY_S:
            return
        left_s = (now - self._start) * (self._total / max(outcome.requests, 1) - 1)
        text = f"{outcome.requests:,}/{self._total:,} done, pulls {rate(self._pulls):.3g} GiB/s, "
        text += f"{size(outcome.blocks['verified'] * self._block_bytes)} right, {left_s:,.0f} s left"
        complain(text)
        self._last = now


def results(
    setting: Mapping[str, Any], outcome: Outcome, calls: Mapping[str, Calls], wall_s: float, **more: Any
) -> dict[str, Any]:
    """Return the results of a replay: bytes, times in seconds or microseconds. `more` adds some."""
    return {
        "setting": dict(setting),
        "wall_s": wall_s,
        "requests": outcome.requests,
        "requests_too_large": outcome.too_large,
        "largest_request_blocks": outcome.largest_blocks,
        "requests_finished_early": outcome.finished_early,
        "most_running": outcome.most_running,
        "blocks": outcome.blocks,
        "compared_bytes": outcome.blocks["verified"] * setting["block_bytes"],
        "calls": {name: _cost(call) for name, call in calls.items()},
        **more,
    }


def _cost(call: Calls) -> dict[str, Any]:
    times = call.nanoseconds
    p50, p99 = (time / 1e3 for time in percentiles(times)) if times else (None, None)
    cost = {"calls": len(times), "blocks": call.blocks, "bytes": call.bytes, "seconds": sum(times) / 1e9}
    return {**cost, "gib_per_s": rate(call), "p50_us": p50, "p99_us": p99}


def scale(geometry: Geometry) -> float:
    """Return how many times larger a block of the real model is than one of this geometry."""
    return REAL_BYTES_PER_TOKEN * geometry.tokens / geometry.block_bytes


def table(found: Mapping[str, Any]) -> str:
    """Return the results as aligned plain text of at most 80 columns; only the reason for a refusal may be longer."""
    setting, blocks, prefill = found["setting"], found["blocks"], found["prefill"]
    link = prefill["link"]
    references = blocks["device_hits"] + blocks["host_hits"] + blocks["computed"]
    real = f"{REAL_MODEL}: {size(setting['block_bytes'] * setting['scale'])}"
    refusal = f" ({link['refusal']})" if link["refusal"] else ""
    engine_s = sum(call["seconds"] for call in found["calls"].values())
    pairs = [
        ("trace", f"{setting['trace']}; at most {found['most_running']} requests at a time"),
        ("block", f"{size(setting['block_bytes'])} for {setting['block_tokens']:,} tokens ({real})"),
        ("device pool", _pool(setting, "device")),
        ("host pool", _pool(setting, "host")),
        ("block references", f"{references:,}"),
        ("  hit on device", _share(blocks["device_hits"], references)),
        ("  swapped in from host", _share(blocks["host_hits"], references)),
        ("  pulled from prefill", _share(blocks["computed"], references)),
        ("transport", f"{link['transport']}{refusal}; pool memory is {_WAYS[link['pools']]}"),
        ("time", f"{found['wall_s']:.1f} s (engine {engine_s:.1f}, wait for prefill {prefill['waited_s']:.1f})"),
    ]
    width = max(len(name) for name, _ in pairs) + 2
    return "\n".join([*(f"{name:<{width}}{text}" for name, text in pairs), "", *_calls(found), ""])


def _pool(setting: Mapping[str, Any], name: str) -> str:
    blocks = setting[f"{name}_blocks"]
    real = blocks * setting["block_bytes"] * setting["scale"]
    return f"{size(setting[f'{name}_pool_bytes'])}, {blocks:,} blocks (stands for {real / 2**30:,.0f} GiB)"


def _share(part: int, whole: int) -> str:
    return f"{part:>9,} {100 * part / whole if whole else 0.0:5.1f} %"


def _calls(found: Mapping[str, Any]) -> list[str]:
    """Return a table of the calls that move blocks."""
    rows: list[Sequence[str]] = [("call", "calls", "blocks", "bytes", "GiB/s", "us p50", "us p99")]
    for name, cost in found["calls"].items():
        if cost["calls"]:
            times = (f"{cost[key]:,.1f}" for key in ("p50_us", "p99_us"))
            counts = (f"{cost['calls']:,}", f"{cost['blocks']:,}", size(cost["bytes"]))
            rows.append((name, *counts, f"{cost['gib_per_s']:.3g}", *times))
    return aligned(rows, left=1)


def verdict(outcome: Outcome, block_bytes: int, *, passed: bool) -> str:
    """Return the last line of a replay, also of one that did not end."""
    text = f"{'PASS' if passed else 'FAIL'} {_counted(outcome.requests - outcome.too_large, 'request', 'requests')}"
    text += f", {size(outcome.blocks['verified'] * block_bytes)} compared, {outcome.blocks['wrong']} wrong"
    for kill, names in ((True, ("kill", "kills")), (False, ("crash", "crashes"))):
        gaps = [restart.gap_ms for restart in outcome.restarts if restart.kill == kill and restart.gap_ms is not None]
        if gaps:
            text += f", {_counted(len(gaps), *names)} survived in {max(gaps) / 1e3:.1f} s"
    return text


def rate(call: Calls) -> float:
    """Return the rate of calls in GiB/s; 0 without calls."""
    return call.bytes / 2**30 / (sum(call.nanoseconds) / 1e9) if call.nanoseconds else 0.0


def _counted(count: int, name: str, names: str) -> str:
    return f"{count:,} {name if count == 1 else names}"
