"""Why a row is behind a peer or the limit: written by hand, shown in the report beside the row.

A pattern is matched (``fnmatch``) with the row in words as the report writes it, then a colon and the system that it is
behind: ``many allocate + free, 10,000 x 16 KiB: numpy, empty``, or ``: limit``. The first that matches counts. Not for:
finding such rows (``report``).
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Optional

REASONS: tuple[tuple[str, str], ...] = (
    (
        "standing peak memory, near: *",
        "the far pool is mapped, and its pages count here too; `memory of both, shared pages once` counts them once",
    ),
    (
        "many allocate + free*: numpy, empty",
        "`malloc` of one thread; ours makes a range that peers can reach, with a handle, its addresses and a key",
    ),
    (
        "many allocate + free*: torch, empty",
        "`malloc` of one thread; ours makes a range that peers can reach, with a handle, its addresses and a key",
    ),
)


def reason_of(what: str, behind: str) -> Optional[str]:
    """The reason that is written down for a row."""
    return next((text for pattern, text in REASONS if fnmatchcase(f"{what}: {behind}", pattern)), None)
