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
    """One group; the limits are seconds for one part, what it takes about is seconds for all of them."""

    name: str
    module: str
    limit_s: int
    quick_s: int
    rounds: int = 5
    full_about_s: int = 0
    quick_about_s: int = 0

    def about_s(self, quick: bool, rounds: int) -> float:
        """What it will take: start and warm-up of each cell cost about as much as two rounds."""
        usual, known = (QUICK_ROUNDS, self.quick_about_s) if quick else (self.rounds, self.full_about_s)
        return known * (rounds + 2) / (usual + 2)


QUICK_ROUNDS = 2
GROUPS = (
    Group("local", "local", limit_s=420, quick_s=60, full_about_s=480, quick_about_s=35),
    Group("between", "between", limit_s=420, quick_s=60, full_about_s=920, quick_about_s=75),
    Group("small", "small", limit_s=240, quick_s=60, full_about_s=290, quick_about_s=45),
    Group("many", "many", limit_s=240, quick_s=60, full_about_s=200, quick_about_s=40),
    Group("standing", "standing", limit_s=240, quick_s=60, full_about_s=125, quick_about_s=30),
    Group("faults", "faults", limit_s=600, quick_s=120, rounds=1, full_about_s=480, quick_about_s=20),
    Group("scale", "scale", limit_s=900, quick_s=120, rounds=1, full_about_s=240, quick_about_s=50),
)
