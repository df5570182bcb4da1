"""Limits that control groups (cgroups, version 1 and 2) set for this process."""

from __future__ import annotations

import re
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

from llm_datadist.doctor.finding import text_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

_UNLIMITED_BYTES = 2**60
"""Version 1 shows a number near 2^63 if there is no limit."""


def memory_limit(root: Path) -> int | None:
    """Return the lowest limit of memory in bytes, or ``None`` if there is none."""
    found = []
    for folder in _folders(root, "memory"):
        for name in ("memory.max", "memory.limit_in_bytes"):
            text = text_of(folder / name)
            if text and re.fullmatch(r"[0-9]{1,20}", text) and int(text) < _UNLIMITED_BYTES:
                found.append(int(text))
    return min(found, default=None)


def cpu_limit(root: Path) -> float | None:
    """Return the lowest limit of CPU time in CPUs, or ``None`` if there is none."""
    found = []
    for folder in _folders(root, "cpu"):
        quotas = (text_of(folder / "cpu.max") or "").split()
        quotas = quotas or [text_of(folder / f"cpu.cfs_{name}_us") or "" for name in ("quota", "period")]
        if len(quotas) == 2 and all(re.fullmatch(r"[0-9]{1,18}", part) for part in quotas) and int(quotas[1]):  # noqa: PLR2004
            found.append(int(quotas[0]) / int(quotas[1]))
    return min(found, default=None)


def _folders(root: Path, controller: str) -> Iterator[Path]:
    """Yield the folders whose limits may apply: of each group of this process, and of the groups around it."""
    mounted = root / "sys/fs/cgroup"
    for line in (text_of(root / "proc/self/cgroup") or "").splitlines():
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and controller not in controllers.split(","):
            continue
        tops = [mounted / controllers, mounted / controller] if controllers else [mounted, mounted / "unified"]
        inside = PurePosixPath("/" + path.strip("/"))
        for top in tops:
            for group in (inside, *inside.parents):
                if ".." not in group.parts:
                    yield top / str(group).lstrip("/")
