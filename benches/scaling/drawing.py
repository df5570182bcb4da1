"""The curves as a picture: one small panel per group, with cost over size on logarithmic axes. Rates start at zero.

Equal figures give the same SVG, so that a test can compare the picture with the figures. Not for: the list of curves
(``figures``), or comparisons with other systems (``peers.svg``).
"""

from __future__ import annotations

import math
from html import escape
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from figures import Curve, Figures

WIDE, HIGH, LEFT, TOP, GAP = 330, 190, 52, 30, 86
COLUMNS = 3
COLOURS = ("#c0392b", "#2471a3", "#1e8449", "#b7950b", "#7d3c98", "#566573")
# Panels: title, unit, and the curves in them.
PANELS: tuple[tuple[str, str, tuple[str, ...]], ...] = (
    ("keys of one engine", "ns", ("bind a key", "look up a key", "release a key")),
    ("caches of one engine", "ns", ("allocate a cache", "free a cache", "find a cache by id")),
    (
        "keys of an owner, asked by a peer",
        "us",
        (
            "pull by a key never used before, which is released, shm",
            "pull by a key never used before, which is released, tcp",
            "first pull of a key, shm",
            "pull of a known key, shm",
        ),
    ),
    (
        "blocks of one call, 4 KiB each",
        "us",
        tuple(
            f"{what} of blocks of 4096 bytes"
            for what in ("copy_blocks", "swap_blocks", "pull, shm", "push, shm", "pull, tcp")
        ),
    ),
    (
        "blocks of one call, 64 bytes each",
        "us",
        tuple(
            f"{what} of blocks of 64 bytes"
            for what in ("copy_blocks", "swap_blocks", "pull, shm", "push, shm", "pull, tcp")
        ),
    ),
    ("memory", "B", ("memory of keys, 16 a cache", "memory of caches without a key", "memory of a pull, tcp")),
    (
        "links of one engine",
        "us",
        (
            "make one more link, shm",
            "make one more link, tcp",
            "a pull of 16 KiB over one of them, shm",
            "a pull of 16 KiB over one of them, tcp",
        ),
    ),
    ("links that nobody uses, CPU", "us/s", ("CPU while nothing is asked, shm", "CPU while nothing is asked, tcp")),
    ("an owner comes back", "ms", ("all are linked again, shm", "all are linked again, tcp", "all have noticed, shm")),
    ("engines that pull from one", "GB/s", ("bytes pulled from one engine, shm", "bytes pulled from one engine, tcp")),
    (
        "cores",
        "GB/s",
        tuple(f"{what} of blocks of {kib} KiB" for what in ("swap_blocks", "pull, shm") for kib in (16, 256)),
    ),
    ("moments that grow", "us", ("longest bind while the table grows",)),
)


def drawn(figures: Figures) -> str:
    """The whole picture."""
    panels = [
        (title, unit, [figures.curve(name) for name in names if figures.has(name)]) for title, unit, names in PANELS
    ]
    panels = [panel for panel in panels if panel[2]]
    rows = math.ceil(len(panels) / COLUMNS)
    width, height = COLUMNS * (LEFT + WIDE + 24), rows * (TOP + HIGH + GAP)
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{width}" height="{height}" viewBox="0 0 {width} {height}">',
        "<style>text { font: 10px DejaVu Sans, sans-serif } .title { font: bold 12px DejaVu Sans, sans-serif }</style>",
        f'<rect width="{width}" height="{height}" fill="white"/>',
    ]
    for index, (title, unit, curves) in enumerate(panels):
        left = index % COLUMNS * (LEFT + WIDE + 24) + LEFT
        top = index // COLUMNS * (TOP + HIGH + GAP) + TOP
        lines.append(f'<g transform="translate({left} {top})">')
        lines += panel(title, unit, curves)
        lines.append("</g>")
    return "\n".join([*lines, "</svg>"]) + "\n"


class Axis:
    """The position of a value on an axis of ``length`` pixels: logarithmic, or linear from zero."""

    def __init__(self, values: Sequence[float], length: float, kind: str) -> None:
        """Set the range: ``sizes`` end at the largest value, ``costs`` and ``rates`` at a round value."""
        self.length, self.kind = length, kind
        self.values = sorted(set(values))
        self.low, self.high = math.log10(self.values[0]), math.log10(self.values[-1])
        self.high = max(self.high, self.low + 1e-3)
        if kind == "costs":
            self.low = math.floor(self.low + 1e-9)
            self.high = max(math.ceil(self.high - 1e-9), self.low + 1)
        elif kind == "rates":
            step = 10 ** math.floor(self.high)
            self.low, self.high = 0.0, math.ceil(self.values[-1] / step) * step

    def at(self, value: float) -> float:
        """The position in pixels."""
        where = value if self.kind == "rates" else math.log10(value)
        part = (where - self.low) / (self.high - self.low) * self.length
        return part if self.kind == "sizes" else self.length - part

    def ticks(self) -> list[float]:
        """Round values that are far enough apart for their labels."""
        if self.kind == "rates":
            return [self.high * part / 4 for part in range(5)]
        step = 2 if self.high - self.low > 5 else 1
        decades = [10.0**power for power in range(math.ceil(self.low), math.floor(self.high) + 1, step)]
        return decades if len(decades) > 1 else self.values


def panel(title: str, unit: str, curves: Sequence[Curve]) -> Iterator[str]:
    """One set of axes with its lines and their slopes."""
    points = [point for curve in curves for point in curve.points]
    across = Axis([point[0] for point in points], WIDE, "sizes")
    up = Axis([max(point[1], 1e-3) for point in points], HIGH, "rates" if curves[0].rates else "costs")
    yield f'<text x="0" y="-10" class="title">{escape(title)}, {escape(unit)}</text>'
    for tick in across.ticks():
        x = across.at(tick)
        yield f'<path d="M{x:.1f} 0V{HIGH}" stroke="#ddd"/>'
        yield f'<text x="{x:.1f}" y="{HIGH + 12}" text-anchor="middle">{short(tick)}</text>'
    for tick in up.ticks():
        y = up.at(tick)
        yield f'<path d="M0 {y:.1f}H{WIDE}" stroke="#ddd"/>'
        yield f'<text x="-4" y="{y + 3:.1f}" text-anchor="end">{short(tick)}</text>'
    yield f'<rect width="{WIDE}" height="{HIGH}" fill="none" stroke="#888"/>'
    for index, curve in enumerate(curves):
        colour = COLOURS[index % len(COLOURS)]
        spots = [(across.at(point[0]), up.at(max(point[1], 1e-3))) for point in curve.points]
        path = "L".join(f"{x:.1f} {y:.1f}" for x, y in spots)
        yield f'<path d="M{path}" fill="none" stroke="{colour}" stroke-width="1.8"/>'
        yield from (f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.2" fill="{colour}"/>' for x, y in spots)
        words = curve.name if curve.rates else f"{curve.name}: {curve.slope.name}, {curve.slope.exponent:.2f}"
        yield f'<text x="0" y="{HIGH + 26 + 11 * index}" fill="{colour}">{escape(words)}</text>'


def short(value: float) -> str:
    """A value as short text, such as 1k, 1M or 0.1."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e3, "k")):
        if value >= size:
            return f"{value / size:g}{letter}"
    return f"{value:g}"
