"""The groups of rows: where each lives, and how long it may take.

A group is a module with two functions::

    def parts(ask: Ask) -> list[str]            # each is run in a process of its own, one after another
    def run(ask: Ask, part: str) -> Iterator[Row | Extra]   # what is yielded is kept even if the process ends badly

A peer that cannot run is a row without a figure whose note says why. A peer that takes the process down is named by the
last breadcrumb (``Ask.breadcrumb``), gets such a row, and the part is run again without it (``Ask.without``).
Not for: running them (``__main__``).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """One group; the limits are seconds for one part."""

    name: str
    module: str
    limit_s: int
    quick_s: int


GROUPS = (
    Group("local", "local", limit_s=420, quick_s=60),
    Group("between", "between", limit_s=420, quick_s=60),
    Group("small", "small", limit_s=240, quick_s=60),
    Group("many", "many", limit_s=240, quick_s=60),
    Group("standing", "standing", limit_s=240, quick_s=60),
    Group("faults", "faults", limit_s=600, quick_s=120),
    Group("scale", "scale", limit_s=900, quick_s=120),
)
