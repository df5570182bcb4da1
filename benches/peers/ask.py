"""The options of a run, in the form in which the process of a part gets them.

Not for: parsing the command line (``__main__``).
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Ask:
    """The options of one run, and where its process may write."""

    quick: bool = False
    rounds: int = 5
    systems: tuple[str, ...] = ()  # empty: all
    without: tuple[str, ...] = ()  # peers that ended the process of this part, and are left out when it runs again
    folder: str = ""  # of this part alone, removed after the run
    mib: int = 256  # MiB that are moved in one round
    apart: bool = False  # whether the two sides of a pair are bound to different processors

    def wants(self, system: str) -> bool:
        """Whether this system is measured. Ours and the limit always are."""
        if system in self.without:
            return False
        return system in ("ours", "limit") or not self.systems or system in self.systems

    def breadcrumb(self, system: str) -> None:
        """Write the name of the running system to a file. If the process ends unexpectedly, this system caused it."""
        if self.folder:
            (Path(self.folder) / BREADCRUMB).write_text(system)

    def text(self) -> str:
        """The options as text, for the command line of a process."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def of(text: str) -> Ask:
        """Parse the result of ``text``."""
        fields = json.loads(text)
        return Ask(**{**fields, "systems": tuple(fields["systems"]), "without": tuple(fields["without"])})


BREADCRUMB = "at-it"
