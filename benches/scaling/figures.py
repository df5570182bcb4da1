"""The measured curves and single figures, read from the file of the scale benchmark.

The full run keeps them in ``peers.json``, beside the rows; a run of the benchmark alone writes ``scale.json``. Not for:
what follows from them (``fleet``, ``document``).
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Optional

from slopes import Slope, named

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "benches" / "results"
PICTURES = ROOT / "docs" / "performance"


@dataclass(frozen=True)
class Curve:
    """Cost at each size: size, median, lowest, highest."""

    group: str
    name: str
    unit: str
    of: str
    note: str
    points: tuple[tuple[float, float, float, float], ...]

    @property
    def slope(self) -> Slope:
        """The slope. A cost of 0 counts as a small positive value."""
        return named([(point[0], max(point[1], 1e-6)) for point in self.points])

    @property
    def rates(self) -> bool:
        """Whether more is better."""
        return self.unit in ("GB/s", "1/s")

    def at(self, size: float) -> float:
        """The measured value at a size."""
        for point in self.points:
            if point[0] == size:
                return point[1]
        raise KeyError(f"{self.name}: nothing was measured at {size:g}")

    @property
    def last(self) -> float:
        """The value at the largest size."""
        return self.points[-1][1]

    @property
    def first(self) -> float:
        """The value at the smallest size."""
        return self.points[0][1]


class Figures:
    """All of a run."""

    def __init__(self, document: dict[str, Any]) -> None:
        """Read the output of ``scale.rs``."""
        self.quick = bool(document["quick"])
        self.cpus = int(document["cpus"])
        self.curves = [curve(fields) for fields in document["curves"]]
        self.single = {figure["name"]: figure for figure in document["figures"]}

    def curve(self, name: str) -> Curve:
        """One curve by its name."""
        return next(curve for curve in self.curves if curve.name == name)

    def has(self, name: str) -> bool:
        """Whether there is such a curve."""
        return any(curve.name == name for curve in self.curves)

    def figure(self, name: str) -> float:
        """One single figure."""
        return float(self.single[name]["value"])


def curve(fields: dict[str, Any]) -> Curve:
    """One curve of the file."""
    points = tuple(
        (float(point["x"]), float(point["median"]), float(point["low"]), float(point["high"]))
        for point in fields["points"]
    )
    return Curve(fields["group"], fields["name"], fields["unit"], fields["of"], fields["note"], points)


def document(path: Optional[Path] = None) -> tuple[Path, dict[str, Any]]:
    """The path of the figures, and their JSON document."""
    if path is not None:
        found: dict[str, Any] = json.loads(path.read_text())
        return path, found.get("extra", {}).get("scale", found)
    together = FOLDER / "peers.json"
    if together.exists():
        extra = json.loads(together.read_text()).get("extra", {})
        if "scale" in extra:
            return together, extra["scale"]
    alone = FOLDER / "scale.json"
    return alone, json.loads(alone.read_text())
