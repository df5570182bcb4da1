"""The figures as a picture: GB/s over block size, a line for each system, and one for the best hand-written loop.

Needs matplotlib, which only the environment of this benchmark has. Not for: measuring.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from rows import LIMIT, OURS

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence
    from pathlib import Path

    from rows import Row

# What each panel shows: its title, and the rows it takes (group, operation, tensors, pages).
PANELS = (
    ("swap out, one process, 2 tensors", ("local", "swap_out", 2, "4K")),
    ("pull between processes, pool", ("between", "pull pool", 1, "4K")),
    ("pull between processes, registered memory", ("between", "pull registered", 1, "4K")),
)


def draw(rows: Sequence[Row], folder: Path, caveat: str) -> str:
    """Write the picture, with the caveat as its title. Return a message if there is no picture, else an empty text."""
    try:
        import matplotlib as mpl  # noqa: PLC0415  (only where it is installed)
    except ImportError:
        return "no picture: matplotlib is not here"
    mpl.use("svg")
    # The same figures give the same file.
    mpl.rcParams.update({"svg.hashsalt": "peers", "svg.fonttype": "path", "font.size": 9})
    from matplotlib import pyplot as plt  # noqa: PLC0415

    shown = [(title, lines_of(rows, key)) for title, key in PANELS]
    shown = [(title, lines) for title, lines in shown if lines]
    if not shown:
        return "no picture: no rows for it"
    # Two columns, as wide as the text of a page. A wider picture would be scaled down and become illegible.
    figure, axes = plt.subplots((len(shown) + 2) // 2, 2, figsize=(9, 6.6), squeeze=False, layout="constrained")
    for axis, (title, lines) in zip(axes.flat, shown):
        panel(axis, title, lines)
    legend(axes.flat[len(shown)], axes.flat[: len(shown)])
    for axis in axes.flat[len(shown) :]:
        axis.set_axis_off()
    if caveat:
        figure.suptitle(caveat, fontsize=8)
    figure.savefig(folder / "peers.svg", metadata={"Date": None})
    plt.close(figure)
    return ""


def lines_of(rows: Sequence[Row], key: tuple[str, str, int, str]) -> dict[str, list[tuple[int, float]]]:
    """The points of each system: for each block size, its best setting with the largest number of blocks."""
    best: dict[str, dict[int, tuple[int, float]]] = {}
    for row in rows:
        if (row.group, row.op, row.tensors, row.pages) != key or row.median is None or row.unit != "GB/s":
            continue
        points = best.setdefault(row.system, {})
        points[row.block_bytes] = max(points.get(row.block_bytes, (0, 0.0)), (row.blocks, row.median))
    return {name: sorted((size, speed) for size, (_, speed) in points.items()) for name, points in best.items()}


def panel(axis: Any, title: str, lines: dict[str, list[tuple[int, float]]]) -> None:
    """One set of axes."""
    for name in sorted(lines, key=lambda name: (name != LIMIT, name != OURS, name)):
        sizes, speeds = zip(*lines[name])
        axis.plot(sizes, speeds, label="best hand-written loop" if name == LIMIT else name, **style(name))
    axis.set_xscale("log", base=2)
    ticks = sorted({size for points in lines.values() for size, _ in points})
    axis.set_xticks(ticks, [f"{size >> 20}M" if size >= 1 << 20 else f"{size >> 10}K" for size in ticks])
    axis.set_xlabel("bytes a block; best setting of each system")
    axis.set_ylabel("GB/s")
    axis.set_ylim(bottom=0)
    axis.set_title(title)
    axis.grid(alpha=0.3)


def legend(axis: Any, panels: Iterable[Any]) -> None:
    """One legend for all panels, in a cell of its own."""
    handles = {label: line for panel in panels for line, label in zip(*panel.get_legend_handles_labels())}
    axis.legend(handles.values(), handles.keys(), fontsize=11, ncols=2, loc="center", frameon=False)


def style(name: str) -> dict[str, Any]:
    """A system looks the same in every panel."""
    return STYLE.get(name) or {**OTHER, "color": COLOURS.get(name, "tab:gray")}


STYLE: dict[str, dict[str, Any]] = {
    LIMIT: {"color": "black", "linestyle": "--", "linewidth": 1.2},
    OURS: {"color": "tab:red", "marker": "o", "linewidth": 2.4, "markersize": 5},
}
COLOURS = {
    "nixl": "tab:blue",
    "mooncake": "tab:green",
    "mooncake store": "tab:olive",
    "ucxx": "tab:purple",
    "lmcache": "tab:brown",
    "torch": "tab:orange",
    "numpy": "tab:cyan",
}
OTHER: dict[str, Any] = {"marker": "o", "linewidth": 1.1, "markersize": 3}
