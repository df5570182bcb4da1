"""The tables of the doctor, as plain text."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_datadist.doctor.findings import OK

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llm_datadist.doctor.findings import Finding
    from llm_datadist.doctor.measure import Row
    from llm_datadist.doctor.paths import Path

__all__ = ["findings_text", "paths_text", "rows_text"]


def findings_text(findings: Sequence[Finding]) -> str:
    """Return one line for each finding, with the advice below those that are not ``OK``."""
    width = max(len(finding.subject) for finding in findings)
    lines = []
    for finding in findings:
        lines.append(f"{finding.verdict:8}{finding.subject:{width}}  {finding.value}")
        if finding.verdict != OK:
            lines.append(f"{'':8}{'':{width}}  -> {finding.advice}")
    return "\n".join(lines)


def paths_text(paths: Sequence[Path]) -> str:
    """Return the paths as a table."""
    rows = [("peer", "path of pulls", "why no faster one"), *(tuple(path) for path in paths)]
    return _table([(peer, path, reason or "-") for peer, path, reason in rows])


def rows_text(rows: Sequence[Row]) -> str:
    """Return what was measured as a table, with the reasons below."""
    head = ("options", "path", "pull 16 KiB", "push 16 KiB", "pull 64 MiB", "push 64 MiB")
    cells = [
        (
            row.options,
            row.path,
            f"{row.pull_us[0]:.0f} us (99 %: {row.pull_us[1]:.0f})",
            f"{row.push_us[0]:.0f} us (99 %: {row.push_us[1]:.0f})",
            f"{row.pull_gbs:.2f} GB/s",
            f"{row.push_gbs:.2f} GB/s",
        )
        for row in rows
    ]
    reasons = [f"{row.options}: sockets, because {row.reason}" for row in rows if row.reason]
    return "\n".join([_table([head, *cells]), *reasons])


def _table(rows: Sequence[tuple[str, ...]]) -> str:
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return "\n".join("  ".join(f"{cell:{width}}" for cell, width in zip(row, widths)).rstrip() for row in rows)
