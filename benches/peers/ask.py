"""What a run was asked for, as the process of a group gets it.

Not for: deciding it (``__main__`` reads the options).
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
    without: tuple[str, ...] = ()  # took their process down in this part, and are left out of its second try
    folder: str = ""  # of this part alone, removed after the run
    mib: int = 256  # moved in one round

    def wants(self, system: str) -> bool:
        """Whether this system was asked for; ours and the limit always are."""
        if system in self.without:
            return False
        return system in ("ours", "limit") or not self.systems or system in self.systems

    def breadcrumb(self, system: str) -> None:
        """Leave word of who is at it: if the process ends without a word, this is who ended it."""
        if self.folder:
            (Path(self.folder) / BREADCRUMB).write_text(system)

    def text(self) -> str:
        """For the command line of a process."""
        return json.dumps(dataclasses.asdict(self))

    @staticmethod
    def of(text: str) -> Ask:
        """What ``text`` wrote."""
        fields = json.loads(text)
        return Ask(**{**fields, "systems": tuple(fields["systems"]), "without": tuple(fields["without"])})


BREADCRUMB = "at-it"
