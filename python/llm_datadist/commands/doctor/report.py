"""The findings and the measurements as plain text."""

from __future__ import annotations

import textwrap
from itertools import chain
from typing import TYPE_CHECKING

from llm_datadist.commands.doctor.finding import NOTE, OK, PROBLEM
from llm_datadist.commands.output import aligned, size

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llm_datadist.commands.doctor.finding import Finding
    from llm_datadist.commands.doctor.link import Row

_MARKS = {OK: "ok", NOTE: "note", PROBLEM: "PROBLEM"}
_MARK = max(map(len, _MARKS.values())) + 2
_INDENT = 4


def findings(found: Sequence[Finding], width: int) -> str:
    """Return the report about this host."""
    column = max(len(finding.name) for finding in found) + 2
    lines: list[str] = []
    section = ""
    for finding in found:
        if finding.section != section:
            lines += ["", finding.section] if lines else [finding.section]
            section = finding.section
        head = f"  {_MARKS[finding.verdict]:<{_MARK}}{finding.name:<{column}}"
        lines += _wrapped(finding.value, head, len(head), width)
        if finding.verdict != OK:
            lines += _wrapped(f"Meaning: {finding.meaning}.", " " * len(head), len(head), width)
            lines += _wrapped(f"To do: {finding.remedy}.", " " * len(head), len(head), width)
    return "\n".join([*lines, "", _total(found)])


def _wrapped(text: str, head: str, indent: int, width: int) -> list[str]:
    room = max(width, indent + 20)
    return textwrap.wrap(
        text, room, initial_indent=head, subsequent_indent=" " * indent, break_on_hyphens=False, break_long_words=False
    )


def _total(found: Sequence[Finding]) -> str:
    counts = [sum(finding.verdict == verdict for finding in found) for verdict in (PROBLEM, NOTE)]
    return ", ".join(f"{count} {name}{'' if count == 1 else 's'}" for count, name in zip(counts, ("problem", "note")))


def measurements(address: str, rows: Sequence[Row], width: int) -> str:
    """Return the table of a measured link, and below it why paths were not used."""
    above = ("", "", "16 KiB pull", "", "", "")
    below = ("path", "moved by", "us p50", "p99", "pull GB/s", "push GB/s")
    lines = [f"link to {address}", "", *aligned([above, below, *map(_cells, rows)], left=2)]
    notes = [f"{row.name}: not usable: {row.unusable}" for row in rows if row.unusable is not None]
    notes += [f"{row.name}: no faster path, because {row.not_faster}" for row in rows if row.not_faster is not None]
    sizes = {count for row in rows for count in row.call_bytes or ()}
    rules = [f"{row.name}: {', '.join(chain(*row.moved_by.values()))}" for row in rows if row.moved_by]
    if sizes:
        notes.append("Rules that chose the paths: " + "; ".join(rules) + ".")
        notes.append("Rates are those of calls of " + ", ".join(size(count) for count in sorted(sizes)) + ".")
    return "\n".join([*lines, *chain(*(["", *_wrapped(note, "", _INDENT, width)] for note in notes))])


def _cells(row: Row) -> Sequence[str]:
    if row.unusable is not None:
        return (row.name, "not usable", *["-"] * 4)
    figures = *(f"{time:,.1f}" for time in row.pull_us or ()), f"{row.pull_gb_s or 0:.3g}", f"{row.push_gb_s or 0:.3g}"
    return (row.name, f"{', '.join(row.moved_by)} ({row.transport})", *figures)
