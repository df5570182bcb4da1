"""One fact about the host: its value, a verdict, what it means for the engine, and what to do.

Facts are read below a root folder, ``/`` in use and a made-up one in tests.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pathlib import Path

OK, NOTE, PROBLEM = "ok", "note", "problem"


@dataclass(frozen=True)
class Finding:
    """One fact."""

    section: str  # heading under which the report shows it
    name: str  # what was examined
    value: str  # what was found
    verdict: str = OK
    meaning: str = ""  # what it means for the engine, if the verdict is not `OK`
    remedy: str = ""  # what to do then


def text_of(file: Path) -> str | None:
    """Return the content of a small file without white space at its ends, or ``None`` if it cannot be read."""
    try:
        return file.read_text(encoding="utf-8", errors="replace").strip()
    except OSError:
        return None


def names_in(folder: Path, pattern: str = "*") -> list[str]:
    """Return the sorted names of the entries of a folder, or an empty list if it cannot be read."""
    try:
        return sorted(entry.name for entry in folder.glob(pattern))
    except OSError:
        return []


def field_of(file: Path, name: str) -> str | None:
    """Return the value of a line ``name: value``, or ``None``."""
    match = re.search(rf"^{re.escape(name)}[ \t]*:[ \t]*(.*)$", text_of(file) or "", re.MULTILINE)
    return match[1].strip() if match else None
