"""The groups of rows: the module and the time limits of each.

A group is a module with two functions::

    def parts(ask: Ask) -> list[str]            # each part runs in its own process, one after another
    def run(ask: Ask, part: str) -> Iterator[Row | Extra]   # yielded items are kept even if the process crashes

A peer that cannot run gets a row without a figure, whose note has the reason. If a peer crashes the process, the last
breadcrumb (``Ask.breadcrumb``) names it. It gets such a row, and the part runs again without it (``Ask.without``).
Not for: running them (``__main__``).
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Group:
    """One group. The limits are seconds for one part; the approximate times are seconds for all parts."""

    name: str
    module: str
    limit_s: int
    quick_s: int
    rounds: int = 5
    full_about_s: int = 0
    quick_about_s: int = 0

    def about_s(self, quick: bool, rounds: int) -> float:
        """The approximate duration in seconds. Start and warm-up of each cell take about as long as two rounds."""
        usual, known = (QUICK_ROUNDS, self.quick_about_s) if quick else (self.rounds, self.full_about_s)
        return known * (rounds + 2) / (usual + 2)


QUICK_ROUNDS = 2
GROUPS = (
    Group("local", "local", limit_s=420, quick_s=60, full_about_s=480, quick_about_s=35),
    Group("between", "between", limit_s=420, quick_s=60, full_about_s=1200, quick_about_s=75),
    Group("layouts", "layouts", limit_s=420, quick_s=60, full_about_s=560, quick_about_s=70),
    Group("small", "small", limit_s=240, quick_s=60, full_about_s=290, quick_about_s=45),
    Group("many", "many", limit_s=240, quick_s=60, full_about_s=200, quick_about_s=40),
    Group("standing", "standing", limit_s=240, quick_s=60, full_about_s=125, quick_about_s=30),
    Group("faults", "faults", limit_s=600, quick_s=120, rounds=1, full_about_s=480, quick_about_s=20),
    Group("scale", "scale", limit_s=900, quick_s=120, rounds=1, full_about_s=240, quick_about_s=50),
)
