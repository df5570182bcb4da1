"""Renders the figures as Markdown. This module only turns JSON into text.

A group has one table for each operation, with a line for each system and a column for each size.
Not for: measuring, or the picture (``picture``).
"""

from __future__ import annotations

from itertools import groupby
from typing import TYPE_CHECKING, Any, Callable, NamedTuple, Optional

import scale
from reasons import PRESUMED, reason_of
from rows import LIMIT, OURS, Row

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

# Sections that are not made of rows: the name of the extra document, and what writes it.
SECTIONS: dict[str, Callable[[Any, str], str]] = {"scale": scale.section}

TITLES = {
    "local": "Inside one process: swap and copy of shuffled blocks",
    "between": "Between two processes: pull and push",
    "layouts": "Between two processes: pull between KV layouts",
    "small": "Latency of small requests, and preparing many segments",
    "many": "Many small caches",
    "standing": "Idle, start and memory",
    "faults": "A peer that is killed or stopped",
}
SELVES = (OURS, LIMIT)
GOAL = 0.95
WIDE = 14
PASSED = 1.02
PAGES = {"huge": "huge pages", "auto": "pages left to each system"}
NO_REASON = "**no reason yet**"
# Operations that move bytes, beside those in GB/s: what they wrote can be compared.
MOVING = ("pull ", "push ", "put", "get", "ask for and move")
HEAD = """# Comparison with other libraries

`make bench-peers` writes this page from `peers.json`. Do not edit it by hand. A short version is in
[performance.md](../../docs/performance.md).

- Every figure is a median. The systems run in turn over the same blocks (A B A B). A different one starts each round.
- 1 GB is 10^9 bytes. Each byte that is moved counts once.
- Before each turn the destination is overwritten. After the turn it is compared byte for byte with the source, unless
  the figure is marked `?`. Small requests are timed call by call. For them, the last call of a turn is compared.
- The number in brackets says how many times as fast ours is. It is **bold** where the other system is ahead.
- `limit` is the best hand-written loop over the same list of blocks. The row `ours` shows its share of the limit.
"""


def markdown(document: dict[str, Any], rows: Sequence[Row], pictures: str = "") -> str:
    """The whole page; `pictures` is the path from the page to its pictures, with a slash at its end."""
    picture = f"![GB/s over block size, each system]({pictures}peers.svg)"
    parts = [HEAD, picture, *machine(document), *missing(document), *summary(rows)]
    for name, its in groupby(rows, key=lambda row: row.group):
        parts += [f"## {TITLES.get(name, name)}", said(document["groups"].get(name, {})), *tables(list(its))]
    parts += [SECTIONS[name](extra, pictures) for name, extra in sorted(document["extra"].items()) if name in SECTIONS]
    return "\n\n".join(part.strip() for part in parts if part.strip()) + "\n"


def machine(document: dict[str, Any]) -> Iterator[str]:
    """The machine on which it was measured."""
    facts = document["environment"]
    versions = ", ".join(f"{name} {version}" for name, version in sorted(facts["versions"].items()))
    huge = ", ".join(f"{name} {word}" for name, word in facts["huge pages"].items())
    yield (
        f"Machine: {facts['cores']} cores of {facts['processor']}, {facts['memory GiB']} GiB, {facts['system']}; "
        f"huge pages: {huge}. {facts['thread budget']} threads for each system that can use them.\n\n"
        f"Versions: {versions}. Statistics that peers send or keep are off: "
        f"{', '.join(f'`{name}={value}`' for name, value in sorted(facts['telemetry'].items()))}."
    )


def said(moment: dict[str, Any]) -> str:
    """When a group was measured, and how."""
    if not moment:
        return ""
    quick = ", quick: few sizes and rounds" if moment["quick"] else ""
    rounds = f"{moment['rounds']} round{'s' if moment['rounds'] != 1 else ''}"
    return f"Commit {moment['commit']}, {moment['when']}, {rounds}{quick}."


def missing(document: dict[str, Any]) -> Iterator[str]:
    """Groups that no run has measured yet."""
    names = [name for name in TITLES if name not in document["groups"]]
    if names:
        yield f"Not measured yet: {', '.join(names)}."


class Behind(NamedTuple):
    """A row in which ours misses the goal: the row, the better system (or the limit), and the ratio of ours to it."""

    row: Row
    who: str
    ratio: float

    @property
    def reason(self) -> Optional[str]:
        """The recorded reason, if any."""
        return reason_of(at(self.row), self.who)


def behind(rows: Sequence[Row]) -> list[Behind]:
    """The rows in which a peer is faster than ours, or ours is below the goal for the limit, worst first."""
    peers = [Behind(row, named(row), row.ratio) for row in rows if row.ratio is not None and row.system not in SELVES]
    limits = [Behind(row, LIMIT, row.limit_ratio) for row in rows if row.system == OURS and row.limit_ratio is not None]
    found = [it for it in peers if it.ratio < 1] + [it for it in limits if it.ratio < GOAL]
    return sorted(found, key=lambda it: it.ratio)


def summary(rows: Sequence[Row]) -> Iterator[str]:
    """The summary: where ours is behind and why, where ours exceeds the limit, and what was not measured."""
    found = behind(rows)
    bare = sum(it.reason is None for it in found)
    presumed = sum((it.reason or "").startswith(PRESUMED) for it in found)
    yield f"## Where we are behind, or under {GOAL} of the limit"
    lines = [
        f"| {it.row.group} | {it.row.op} | {described(it.row)} | {it.who} | {it.ratio:.2f} | {it.reason or NO_REASON} |"
        for it in found
    ]
    if lines:
        yield (
            f"{len(found)} rows, {bare} of them without a reason so far (`benches/peers/reasons.py`), "
            f"{presumed} with one that is presumed and not profiled."
        )
        yield table("| group | operation | blocks | behind | times as fast ours is | reason |", lines)
    else:
        yield "Nowhere."
    past = [row for row in rows if row.system == OURS and row.limit_ratio is not None and row.limit_ratio > PASSED]
    lines = [f"| {at(row)} | {figure(row)} {row.unit} | {row.limit_ratio:.2f} |" for row in past]
    if lines:
        yield f"## Where ours passes the limit by more than {PASSED - 1:.0%}: no hand-written loop is the limit there"
        yield table("| row | ours | share of the limit |", lines)
    absent = [row for row in rows if row.median is None]
    lines = unique(f"| {row.group} {row.op} | {named(row)} | {row.note} |" for row in absent)
    if lines:
        yield "## Not measured, and why"
        yield table("| row | peer | reason |", lines)


def tables(rows: Sequence[Row]) -> Iterator[str]:
    """The tables of a group, each followed by the notes of its rows."""
    sizes: dict[tuple[str, int, str, int], set[int]] = {}
    for row in rows:
        sizes.setdefault((row.op, row.tensors, row.pages, row.block_bytes), set()).add(row.blocks)

    def apart(row: Row) -> tuple[Any, ...]:
        """The key of a row's table. Wide tables in which a size has several numbers of blocks are split by number."""
        mine = [several for key, several in sizes.items() if key[:3] == (row.op, row.tensors, row.pages)]
        split = len(set().union(*mine)) * len(mine) > WIDE and any(len(several) > 1 for several in mine)
        return (row.op, row.pages, row.tensors, row.blocks if split else 0, row.unit)

    seen: dict[tuple[Any, ...], list[Row]] = {}
    for row in rows:
        if row.median is not None:
            seen.setdefault(apart(row), []).append(row)
    for (op, pages, tensors, blocks, unit), its in seen.items():
        words = [op, unit, f"{tensors} tensors" if tensors > 1 else "", f"{blocks:,} blocks" if blocks else ""]
        words.append(PAGES.get(pages, ""))
        yield "### " + ", ".join(filter(None, words))
        yield pivot(its)
        yield notes(its)


def pivot(rows: Sequence[Row]) -> str:
    """A line for each system and setting, a column for each size."""
    columns = sorted({(row.block_bytes, row.blocks) for row in rows})
    several = len({size for size, _ in columns}) < len(columns)
    heads = [size_of(size, blocks, several) for size, blocks in columns]
    found: dict[str, dict[tuple[int, int], Row]] = {}
    for row in rows:
        name = LIMIT if row.system == LIMIT else named(row)
        found.setdefault(name, {})[row.block_bytes, row.blocks] = row
    order = sorted(found, key=lambda name: {OURS: 0, LIMIT: 1}.get(name.split(",")[0], 2))
    lines = [f"| {name} | " + " | ".join(cell(found[name].get(column)) for column in columns) + " |" for name in order]
    return table(f"| | {' | '.join(heads)} |", lines)


def cell(row: Optional[Row]) -> str:
    """One figure, with the ratio to ours."""
    if row is None:
        return "-"
    text = figure(row) + ("?" if moves(row) and not row.verified else "")
    if row.system == OURS:
        return f"{text} (limit {row.limit_ratio:.2f})" if row.limit_ratio is not None else text
    if row.system == LIMIT or row.ratio is None:
        return text
    text = f"{text} ({row.ratio:.2f})"
    return f"**{text}**" if row.ratio < 1 else text


def notes(rows: Sequence[Row]) -> str:
    """The notes of the rows."""
    return "\n".join(unique(f"- {named(row)}: {row.note}" for row in rows if row.note))


def at(row: Row) -> str:
    """The cell of a row in words."""
    return ", ".join(filter(None, [f"{row.group} {row.op}", described(row)]))


def described(row: Row) -> str:
    """The number and size of the blocks, and their memory, in words."""
    words = [size_of(row.block_bytes, row.blocks, several=row.blocks > 0)] if row.block_bytes or row.blocks else []
    words.append(f"{row.tensors} tensors" if row.tensors > 1 else "")
    words.append(PAGES.get(row.pages, ""))
    return ", ".join(filter(None, words))


def moves(row: Row) -> bool:
    """Whether the operation moves bytes that can be verified."""
    return row.unit == "GB/s" or row.op.startswith(MOVING)


def named(row: Row) -> str:
    """A system with its setting."""
    return f"{row.system}, {row.setting}" if row.setting else row.system


def size_of(size: int, blocks: int, several: bool) -> str:
    """The head of a column."""
    text = f"{size >> 20} MiB" if size and size % 2**20 == 0 else f"{size >> 10} KiB" if size >= 1024 else ""
    text = f"{size} B" if 0 < size < 1024 else text
    if several and blocks:
        text = f"{blocks:,} x {text}" if text else f"{blocks:,}"
    return text or "figure"


def figure(row: Row) -> str:
    """The median with three significant digits."""
    assert row.median is not None
    value = row.median
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}"


def unique(lines: Iterable[str]) -> list[str]:
    """The lines without repetitions, in order."""
    return list(dict.fromkeys(lines))


def table(head: str, lines: Sequence[str]) -> str:
    """A Markdown table."""
    return "\n".join([head, "|" + " --- |" * (head.count("|") - 1), *lines])
