"""Hit rates of a request trace over the capacity of a cache, from one pass over the trace: ``replay --hit-rates``.

The cache replaces the least recently used block, and of one request the last block first, as a keeper does. A request
finds the blocks of its longest prefix that are all there. With this rule, a larger cache has every block of a smaller
one. So one number for each block of a request says which capacities find it: how many distinct blocks were used since,
at most, over the block and those before it.
"""

from __future__ import annotations

import math
from collections import Counter
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from llm_datadist.commands.output import aligned, size

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from llm_datadist.commands.replay.trace import Request

_GIB = 2**30
_WIDE, _HIGH, _LEFT, _TOP = 560, 240, 60, 40
_ROUND = [step * 10**power for power in range(12) for step in (1, 2, 5)]
_FLAT = 0.005
"""The picture begins with the largest cache that finds hardly more than the smallest one."""


class Rate(NamedTuple):
    """The hit rate at one capacity."""

    blocks: int
    """Blocks that the cache holds."""
    hits: int
    """Blocks of all requests that are found as part of a whole prefix."""
    share: float
    """Those as a part of the blocks of all requests."""


def needed_capacities(requests: Iterable[Request]) -> Counter[int]:
    """Return for each capacity how many blocks of all requests are found from this capacity on."""
    order, found = _Order(), Counter[int]()
    for request in requests:
        needed = 0
        for block in request.blocks:
            age = order.age(block)
            if age is None:
                break
            needed = max(needed, age)
            found[needed] += 1
        for block in reversed(request.blocks):
            order.use(block)
    return found


def hit_rates(requests: Sequence[Request], capacities: Sequence[int] | None = None) -> list[Rate]:
    """Return the hit rates of a trace.

    Args:
        requests: the trace.
        capacities: capacities in blocks, ascending. `None`: 1, 2, 5, 10 and so on, up to all blocks of the trace.
    """
    found = sorted(needed_capacities(requests).items())
    total = sum(len(request.blocks) for request in requests)
    if capacities is None:
        capacities = _round_numbers(len({block for request in requests for block in request.blocks}))
    return [Rate(most, hits, hits / total) for most in capacities for hits in [sum(n for at, n in found if at <= most)]]


def _round_numbers(last: int) -> list[int]:
    return [*(number for number in _ROUND if number < last), last]


class _Order:
    """Blocks in the order of their last use. A Fenwick tree counts the blocks that were used since, in log(n) steps."""

    def __init__(self) -> None:
        self._used: dict[int, int] = {}  # block -> when it was used, from 1 on
        self._now = 0
        self._tree = [0]

    def age(self, block: int) -> int | None:
        """Return how many distinct blocks were used since the last use of a block, with itself; `None` before it."""
        at = self._used.get(block)
        if at is None:
            return None
        at -= 1
        before = 0
        while at:
            before += self._tree[at]
            at &= at - 1
        return len(self._used) - before

    def use(self, block: int) -> None:
        self._now += 1
        if self._now == len(self._tree):
            self._grow()
        if block in self._used:
            self._add(self._used[block], -1)
        self._used[block] = self._now
        self._add(self._now, 1)

    def _add(self, at: int, count: int) -> None:
        while at < len(self._tree):
            self._tree[at] += count
            at += at & -at

    def _grow(self) -> None:
        """Number the uses anew, so that the tree is at most four times as large as the blocks."""
        ordered = sorted(self._used, key=self._used.__getitem__)
        self._used = {block: at for at, block in enumerate(ordered, 1)}
        self._now = len(ordered) + 1
        self._tree = [0] * (2 * self._now + 64)
        for at in self._used.values():
            self._add(at, 1)


def results(rates: Sequence[Rate], trace: str, counts: dict[str, Any], block_bytes: int) -> dict[str, Any]:
    """Return the hit rates for programs."""
    rows = [{**rate._asdict(), "bytes": rate.blocks * block_bytes} for rate in rates]
    return {"trace": trace, **counts, "block_bytes": block_bytes, "hit_rates": rows}


def table(found: dict[str, Any]) -> str:
    """Return the hit rates as aligned plain text."""
    rows: list[Sequence[str]] = [("blocks", "GiB", "hit rate")]
    rows += [
        (f"{row['blocks']:,}", f"{row['bytes'] / _GIB:,.3f}", f"{100 * row['share']:.1f} %")
        for row in found["hit_rates"]
    ]
    return "\n".join([_title(found, found["trace"]), "", *aligned(rows, left=0)])


def _title(found: dict[str, Any], trace: str) -> str:
    counts = f"{found['requests']:,} requests, {found['block_references']:,} blocks of {size(found['block_bytes'])}"
    return f"{trace}: {counts}, {found['distinct_blocks']:,} distinct"


def svg(found: dict[str, Any]) -> str:
    """Return the hit rates as a picture: the share in percent over the capacity, which has a logarithmic axis."""
    rows = found["hit_rates"]
    # XML has no control characters, and UTF-8 no surrogates, which stand for other bytes in names of files.
    name = "".join(char if char.isprintable() else "?" for char in Path(found["trace"]).name)
    rows = rows[sum(row["share"] < rows[0]["share"] + _FLAT for row in rows) - 1 :]
    first, last = rows[0]["blocks"], rows[-1]["blocks"]
    scale = _WIDE / math.log(max(last / first, 2))
    top = max(5, -(-100 * max(row["share"] for row in rows) // 5) * 5)  # a multiple of 5 %
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDE + 2 * _LEFT} {_HIGH + 2 * _TOP + 30}">',
        "<style>text { font: 11px DejaVu Sans, sans-serif }</style>",
        f'<rect width="{_WIDE + 2 * _LEFT}" height="{_HIGH + 2 * _TOP + 30}" fill="white"/>',
        f'<g transform="translate({_LEFT} {_TOP})"><text y="-16">{escape(_title(found, name))}</text>',
    ]
    for part in range(6):
        y = _HIGH - _HIGH * part / 5
        lines.append(f'<path d="M0 {y:.1f}H{_WIDE}" stroke="#ddd"/>')
        lines.append(f'<text x="-6" y="{y + 4:.1f}" text-anchor="end">{top * part / 5:g} %</text>')
    spots = [(scale * math.log(row["blocks"] / first), _HIGH - _HIGH * 100 * row["share"] / top) for row in rows]
    for (x, y), row in zip(spots, rows):
        if row["blocks"] not in _ROUND:
            continue
        lines.append(f'<path d="M{x:.1f} {_HIGH}V{y:.1f}" stroke="#ddd"/>')
        lines.append(f'<text x="{x:.1f}" y="{_HIGH + 16}" text-anchor="middle">{row["blocks"]:,}</text>')
        lines.append(f'<text x="{x:.1f}" y="{_HIGH + 32}" text-anchor="middle">{size(row["bytes"])}</text>')
    path = "L".join(f"{x:.1f} {y:.1f}" for x, y in spots)
    lines.append(f'<path d="M{path}" fill="none" stroke="#2471a3" stroke-width="2"/>')
    lines.append(f'<text x="{_WIDE}" y="{_HIGH + 48}" text-anchor="end">blocks, and their memory</text></g></svg>')
    return "\n".join(lines) + "\n"
