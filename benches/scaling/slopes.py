"""Names how a cost grows with size, by a fit: constant, logarithmic, linear, quadratic, or a power.

Every shape is fitted to all points by least squares of the relative error, so that small and large costs have the same
weight. The shape with the smallest error is named. A constant is preferred if its error is within the noise of the
clock. The exponent over the last two decades is shown as well, because it does not depend on the choice of a shape. Not
for: reading figures (``figures``), or judging them.
"""

from __future__ import annotations

import dataclasses
import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Optional

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

Point = tuple[float, float]

# A curve whose relative root-mean-square error from a constant is at most this counts as constant.
NOISE = 0.10
# A cost that at most doubles while size grows a thousandfold is "nearly constant": it only leaves the CPU caches.
DOUBLE, WIDE_RANGE = 2.0, 1000
# A shape with a larger average error, or a larger error at any point, does not name the curve.
UNLIKE, BAD_FIT = 0.25, 0.45
# Above this exponent over the last two decades, cost grows faster than size.
SUPERLINEAR = 1.15
DECADES = 2.0
# Exponents over the last two decades that count as constant and as linear, with their tolerance.
ENDS = (("constant", 0.0, 0.1), ("linear", 1.0, 0.15))
# The factor by which the error of a power must be smaller than that of a named shape.
PLAIN = 1.3


@dataclass(frozen=True)
class Slope:
    """A shape, its figures, and how far the points are from it."""

    shape: str
    fixed: float  # cost that is there at any size
    each: float  # factor of the shape's term; for a linear shape, the cost of one more object
    exponent: float  # of the power law through the last two decades
    error: float  # relative, root mean square
    worst: float = 0.0  # the largest relative error of a point
    power: float = 1.0  # of the shape ``power``

    ends: tuple[float, float] = (0.0, 0.0)  # cost at the smallest and at the largest size

    @property
    def superlinear(self) -> bool:
        """Whether cost grows faster than size where size is large."""
        return self.exponent > SUPERLINEAR

    def at(self, size: float) -> float:
        """The cost that the fit predicts for a size."""
        return self.fixed + self.each * TERMS[self.shape](size, self.power)

    @property
    def name(self) -> str:
        """The name of the shape, if the fit is good enough."""
        # A constant stays a constant, even if one point is an outlier.
        odd = self.shape != "constant" and self.worst > BAD_FIT
        if self.shape != "nearly constant" and (self.error > UNLIKE or odd):
            # The middle may be irregular, for example where the kernel changes, while the end has a simple shape.
            plain = [shape for shape, power, off in ENDS if abs(self.exponent - power) <= off]
            return f"{plain[0]} at the end" if plain else "no simple shape"
        if self.shape != "power":
            return self.shape
        return f"power {self.power:.2f}" if self.power > 0 else f"falls, power {self.power:.2f}"

    def text(self, unit: str, one: str) -> str:
        """The slope in words."""
        ends = f"{digits(self.ends[0])} to {digits(self.ends[1])} {unit}"
        words = self.name
        if words == "no simple shape" or words.endswith("at the end"):
            words += f", from {ends}"
        elif words == "nearly constant":
            words += f", {ends}"
        elif words == "constant":
            words += f", {digits(self.fixed)} {unit}"
        elif words == "logarithmic":
            words += f", {digits(self.fixed)} {unit} and {digits(self.each)} for each doubling"
        elif words == "linear":
            fixed = f"{digits(self.fixed)} {unit} and " if self.fixed > 0 else ""
            words += f", {fixed}{digits(self.each)} {unit} for each {one}"
        return words + (", SUPERLINEAR at the end" if self.superlinear else "")


TERMS: dict[str, Callable[[float, float], float]] = {
    "constant": lambda _size, _power: 0.0,
    "nearly constant": lambda _size, _power: 0.0,
    "logarithmic": lambda size, _power: math.log2(size),
    "linear": lambda size, _power: size,
    "quadratic": lambda size, _power: size * size,
    "power": lambda size, power: size**power,
}


def named(points: Sequence[Point]) -> Slope:
    """The shape of a curve of positive costs."""
    if not points or any(size <= 0 or cost <= 0 for size, cost in points):
        raise ValueError(f"a slope needs points, all above zero: {points}")
    exponent = steepness(last(points)) if len(points) > 1 else 0.0
    flat = fitted("constant", points, exponent)
    assert flat is not None
    if flat.error <= NOISE or len(points) < 3:
        return flat if flat.error <= NOISE else fitted("power", points, exponent) or flat
    sizes, costs = [size for size, _ in points], [cost for _, cost in points]
    if max(costs) <= DOUBLE * min(costs) and max(sizes) >= WIDE_RANGE * min(sizes):
        return fitted("nearly constant", points, exponent) or flat
    found = {shape: fitted(shape, points, exponent) for shape in ("logarithmic", "linear", "power")}
    if exponent > SUPERLINEAR:
        found["quadratic"] = fitted("quadratic", points, exponent)
    power = found.pop("power")
    assert power is not None
    best = min((slope for slope in found.values() if slope is not None), key=lambda slope: slope.error, default=power)
    # A named shape is preferred to a power, which fits almost any curve.
    if power.error * PLAIN < best.error:
        best = power
    # A fit with two parameters has a smaller error than one with a single parameter by chance alone.
    chance = math.sqrt((len(points) - 2) / (len(points) - 1))
    return best if best.error < flat.error * chance else flat


def last(points: Sequence[Point]) -> list[Point]:
    """The points of the last two decades, three at least."""
    most = max(size for size, _ in points)
    tail = [point for point in points if point[0] >= most / 10**DECADES * (1 - 1e-9)]
    return tail if len(tail) >= 3 else list(points)[-3:]


def steepness(points: Sequence[Point]) -> float:
    """The exponent of the power law: the median of the exponents of all pairs, which is robust against outliers."""
    pairs = [
        (math.log(second[1] / first[1])) / math.log(second[0] / first[0])
        for index, first in enumerate(points)
        for second in points[index + 1 :]
        if second[0] != first[0]
    ]
    pairs.sort()
    middle = len(pairs) // 2
    return pairs[middle] if len(pairs) % 2 else (pairs[middle - 1] + pairs[middle]) / 2


def fitted(shape: str, points: Sequence[Point], exponent: float) -> Optional[Slope]:
    """The best fit of one shape, or None if its factor is not positive."""
    power = 1.0
    if shape == "power":
        power, fixed, each = curve_of_power(points)
    else:
        terms = [TERMS[shape](size, power) for size, _ in points]
        fixed, each = relative(terms, [cost for _, cost in points])
        if each < 0 or (each == 0 and any(terms)):
            return None
    ends = (points[0][1], points[-1][1])
    found = Slope(shape, fixed, each, exponent, 0.0, power=power, ends=ends)
    off = [abs(found.at(size) / cost - 1) for size, cost in points]
    return dataclasses.replace(found, error=math.sqrt(sum(one * one for one in off) / len(off)), worst=max(off))


def relative(terms: Sequence[float], costs: Sequence[float]) -> tuple[float, float]:
    """``fixed`` and ``each``, neither below zero, so that the squares of (fixed + each * term) / cost - 1 are least."""
    ones = [1 / cost for cost in costs]
    scaled = [term / cost for term, cost in zip(terms, costs)]
    aa, ab = sum(one * one for one in ones), sum(one * many for one, many in zip(ones, scaled))
    bb, a, b = sum(many * many for many in scaled), sum(ones), sum(scaled)
    across = aa * bb - ab * ab
    if across <= 1e-12 * aa * max(bb, 1e-300):
        return a / aa, 0.0
    fixed, each = (a * bb - b * ab) / across, (b * aa - a * ab) / across
    if fixed < 0:
        return 0.0, b / bb
    return fixed, each


def curve_of_power(points: Sequence[Point]) -> tuple[float, float, float]:
    """Exponent, fixed cost (0) and factor of the line through the logarithms."""
    logs = [(math.log(size), math.log(cost)) for size, cost in points]
    x, y = (sum(log[at] for log in logs) / len(logs) for at in (0, 1))
    spread = sum((log[0] - x) ** 2 for log in logs)
    power = sum((log[0] - x) * (log[1] - y) for log in logs) / spread if spread else 0.0
    return power, 0.0, math.exp(y - power * x)


def digits(value: float) -> str:
    """A value with three significant digits."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}" if value >= 0.001 else f"{value:.1e}"
