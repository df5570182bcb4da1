"""What a replay shows: its progress on standard error, its results as a table and for programs, and the verdict."""

from __future__ import annotations

import os
import shutil
import textwrap
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

from llm_datadist.commands.output import aligned, percentiles, size, tell

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

    from llm_datadist.commands.replay.geometry import Geometry
    from llm_datadist.commands.replay.node import Calls, PlainCopy
    from llm_datadist.commands.replay.serve import Outcome

REAL_MODEL = "Llama-3-70B (80 layers, 8 KV heads x 128, bfloat16)"
REAL_BYTES_PER_TOKEN = 2 * 80 * 8 * 128 * 2
"""Bytes of K and V of one token in `REAL_MODEL`, to which byte counts are compared."""

_IN_PLACE_S, _LINES_S = 0.25, 5.0
_FEWEST_COLUMNS = 20
_WAYS = {
    "mapped": "read in place",
    "none": "absent",
    "process": "read through the kernel",
    "stream": "sent through the socket",
}
"""Value in the counters of a link (`LinkStats`) → text of the report."""


class Progress:
    """One line that is updated in place on a terminal; elsewhere, and on a dumb terminal, a line every few seconds.

    Args:
        total: number of requests.
        pulls: the cost of all pulls so far.
        block_bytes: bytes of a block.
        stream: where the lines go; ``None`` if it is closed. A stream that takes no more does not end the replay.
        quiet: whether only `tell` shows something.
    """

    def __init__(self, total: int, pulls: Calls, block_bytes: int, stream: TextIO | None, *, quiet: bool) -> None:
        self.plain_copy: PlainCopy | None = None
        self._total, self._pulls, self._block_bytes = total, pulls, block_bytes
        self._stream, self._quiet = stream, quiet
        self._terminal = stream is not None and stream.isatty()
        self._in_place = not quiet and self._terminal and os.environ.get("TERM", "dumb") != "dumb"
        self._every_s = _IN_PLACE_S if self._in_place else _LINES_S
        self._start = self._last = time.monotonic()
        self._bytes = self._nanoseconds = 0

    def __call__(self, outcome: Outcome) -> None:
        """Show how far the replay is, and the rate of the pulls since the last update, if an update is due."""
        now = time.monotonic()
        if self._quiet or now - self._last < self._every_s:
            return
        moved, nanoseconds = self._pulls.bytes - self._bytes, self._pulls.total_ns - self._nanoseconds
        rates = f"pulls {rate(moved, nanoseconds)} GiB/s" if moved else "no pulls"
        if self.plain_copy is not None:
            rates += f" (plain copy {rate(self.plain_copy.bytes_per_s)})"
        left_s = (now - self._start) * (self._total / max(outcome.requests, 1) - 1)
        text = f"{outcome.requests:,}/{self._total:,} done, {rates}, "
        text += f"{size(outcome.blocks['verified'] * self._block_bytes)} right, {left_s:,.0f} s left"
        columns = _columns()
        tell(self._stream, f"\r{text[:columns]:<{columns}}" if self._in_place else f"{text}\n")
        self._last, self._bytes, self._nanoseconds = now, self._pulls.bytes, self._pulls.total_ns

    def start(self) -> float:
        """Count the time that is left from now on, and return this time by the monotonic clock."""
        self._start = self._last = time.monotonic()
        return self._start

    def note(self, text: str) -> None:
        """Show a line of text, unless progress is not shown."""
        if not self._quiet:
            self.tell(text)

    def tell(self, text: str) -> None:
        """Show a line of text, even if progress is not shown."""
        self.close()
        if self._terminal:
            text = textwrap.fill(text, _columns(), subsequent_indent="  ", break_on_hyphens=False)
        tell(self._stream, f"{text}\n")

    def close(self) -> None:
        """Clear the line that is updated in place."""
        if self._in_place:
            tell(self._stream, f"\r{'':<{_columns()}}\r")


def _columns() -> int:
    columns = shutil.get_terminal_size().columns - 1  # a line that wraps could not be updated in place
    return max(columns, _FEWEST_COLUMNS)


def peak_memory_bytes() -> int:
    """Return the peak resident memory of this process in bytes."""
    status = Path("/proc/self/status").read_text(encoding="ascii", errors="replace")
    return int(status.partition("VmHWM:")[2].split()[0]) * 1024


def results(
    setting: Mapping[str, Any],
    outcome: Outcome,
    calls: Mapping[str, Calls],
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
        "blocks": outcome.blocks,
        "compared_bytes": outcome.blocks["verified"] * setting["block_bytes"],
        "calls": {name: _cost(call) for name, call in calls.items()},
        "peak_memory_bytes": peak_memory_bytes(),
        "prefill": dict(prefill),
        **more,
    }


def _cost(call: Calls) -> dict[str, Any]:
    times = call.nanoseconds
    p50, p99 = (time / 1e3 for time in percentiles(times)) if times else (None, None)
    rate = call.bytes / call.total_ns if call.bytes and call.total_ns else None
    cost = {"calls": len(times), "blocks": call.blocks, "bytes": call.bytes, "seconds": call.total_ns / 1e9}
    return {**cost, "gb_per_s": rate, "p50_us": p50, "p99_us": p99}


def scale(geometry: Geometry) -> float:
    """Return how many times larger a block of the real model is than one of this geometry."""
    return REAL_BYTES_PER_TOKEN * geometry.tokens / geometry.block_bytes


def table(found: Mapping[str, Any]) -> str:
    """Return the results as aligned plain text of at most 80 columns."""
    setting, blocks, link = found["setting"], found["blocks"], found["prefill"]["link"]
    references = blocks["device_hits"] + blocks["host_hits"] + blocks["computed"]
    real = f"{REAL_MODEL.partition(' (')[0]}: {size(setting['block_bytes'] * setting['scale'])}"
    refusal = f" ({link['refusal']})" if link["refusal"] else ""
    seconds = found["seconds"]
    longest = ", ".join(f"{name} {seconds[name]:.1f}" for name in sorted(seconds, key=seconds.__getitem__)[:-4:-1])
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
        ("time", f"{found['wall_s']:.1f} s ({longest})"),
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
    """Return a table of the calls that move blocks, with the plain copy that they are compared with."""
    rows: list[Sequence[str]] = [("call", "calls", "blocks", "bytes", "GiB/s", "us p50", "us p99")]
    for name in ("pull blocks", "swap out", "swap in", "copy blocks"):
        cost = found["calls"][name]
        if cost["calls"]:
            times = (f"{cost[key]:,.1f}" for key in ("p50_us", "p99_us"))
            moved = rate(cost["bytes"], cost["seconds"] * 1e9)
            rows.append((name, f"{cost['calls']:,}", f"{cost['blocks']:,}", size(cost["bytes"]), moved, *times))
    rows.append(("plain copy", "-", "-", "-", rate(found["plain_copy"]["bytes_per_s"]), "-", "-"))
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


def rate(moved: float, nanoseconds: float = 1e9) -> str:
    """Return a rate in GiB/s with two digits at least, so that a small one is not shown as 0."""
    number = moved / 2**30 / (nanoseconds / 1e9)
    return f"{number:.1f}" if number >= 1 else f"{number:.2g}"


def _counted(count: int, name: str, names: str) -> str:
    return f"{count:,} {name if count == 1 else names}"
