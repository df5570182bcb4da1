"""Figures in the README and in docs/performance.md, recomputed from the results of the benchmarks and from tables.

Not for: the results themselves (`benches/tests`), or numbers that come from the code (`test_pages.py`).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from statistics import median
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
README = (ROOT / "README.md").read_text(encoding="utf-8")
PERFORMANCE = (ROOT / "docs" / "performance.md").read_text(encoding="utf-8")
ROWS: list[dict[str, Any]] = json.loads((ROOT / "benches" / "results" / "peers.json").read_text())["rows"]
DASH, MINUS = "\u2013", "\u2212"
PEERS = ("nixl", "mooncake", "mooncake store", "lmcache", "ucxx", "torch", "numpy")
OPERATIONS = {
    "swap_out": "swap_out",
    "swap_in": "swap_in",
    "copy_blocks": "copy_blocks",
    "pull pool": "pull, pools of one host",
    "push pool": "push, pools of one host",
    "pull registered": "pull, registered memory",
    "push registered": "push, registered memory",
    "pull tcp": "pull, TCP over the loopback",
    "push tcp": "push, TCP over the loopback",
}
"""The operations of `peers.json`, and their names in the table of docs/performance.md."""


def size(row: dict[str, Any]) -> int:
    """Bytes of one call."""
    return int(row["block_bytes"] * row["blocks"] * row.get("tensors", 1))


def of(operation: str) -> list[dict[str, Any]]:
    """The measured rows of an operation that say how fast bytes moved."""
    return [
        row
        for row in ROWS
        if row["op"] == operation and row["group"] in {"local", "between"} and "median" in row and "unit" not in row
    ]


def shares(operation: str, smallest: int, largest: int) -> list[float]:
    """This engine's share of the limit in each row of 16 MiB and more with blocks of the given sizes."""
    return [
        row["limit_ratio"]
        for row in of(operation)
        if row["system"] == "ours" and smallest <= row["block_bytes"] <= largest and size(row) >= 16 << 20
    ]


def times_as_fast(*operations: str) -> tuple[float, float]:
    """How many times as fast as the best peer this engine is: the lowest and the highest row of 4 MiB and more."""
    lowest: dict[tuple[Any, ...], float] = {}
    for operation in operations:
        for row in of(operation):
            if row["system"] in PEERS and size(row) >= 4 << 20:
                cell = (operation, row["block_bytes"], row["blocks"], row.get("tensors"), row.get("pages"))
                lowest[cell] = min(lowest.get(cell, float("inf")), row["ratio"])
    assert len(lowest) >= 10
    return min(lowest.values()), max(lowest.values())


def rounded(value: float) -> str:
    """Two digits for small figures and for large ones."""
    return f"{value:.0f}" if value >= 10 else f"{value:.1f}"


def within(values: list[float]) -> str:
    """The lowest and the highest value."""
    return f"{min(values):.2f} {DASH} {max(values):.2f}"


def section(heading: str, page: str = PERFORMANCE) -> str:
    """The text of a page, docs/performance.md by default, below a heading, up to the next one."""
    (found,) = re.findall(rf"^#+ {re.escape(heading)}\n(.*?)(?=^#+ |\Z)", page, re.MULTILINE | re.DOTALL)
    return str(found)


def table(heading: str, number: int = 0) -> dict[str, list[str]]:
    """A table below a heading: the cells of each row, by the first cell. Bold type is removed."""
    found = re.findall(r"(?:^\|.*\|\n)+", section(heading), re.MULTILINE)[number]
    rows = [[cell.strip(" *") for cell in line[1:-1].split("|")] for line in found.splitlines()[2:]]
    return {row[0]: row[1:] for row in rows}


def numbers(cells: list[str]) -> list[float]:
    """The first number of each cell."""
    plain = [cell.replace(MINUS, "-") for cell in cells]
    return [float(found[0]) for cell in plain if (found := re.match(r"[-\d.]+", cell))]


def in_brackets(cells: list[str]) -> list[float]:
    """The number in brackets of each cell."""
    return [float(found[1]) for cell in cells if (found := re.search(r"\(([\d.]+)\)", cell))]


@pytest.mark.parametrize("operation", OPERATIONS)
def test_performance_page_has_the_shares_of_the_results(operation: str) -> None:
    cells = table("Compared with other libraries")[OPERATIONS[operation]]
    from_64_kib = shares(operation, 1 << 16, 1 << 40)
    assert cells[0] == f"{within(from_64_kib)} ({median(from_64_kib):.2f})"
    assert cells[1] == within(shares(operation, 1 << 14, 1 << 14))
    assert cells[2] == within(shares(operation, 1 << 12, 1 << 12))
    assert cells[3] == f" {DASH} ".join(map(rounded, times_as_fast(operation)))


def test_performance_page_is_short_with_the_figures_of_its_tables() -> None:
    short = {operation: cells[0] for operation, cells in table("In short").items()}
    rows = table("Copies, pulls and pushes of many blocks")

    def speed_and_share(operations: list[str], text: str, digits: int) -> None:
        cells = [cell for operation in operations for cell in rows[operation][1::2] if cell]  # the columns "now"
        speeds, ratios = numbers(cells), in_brackets(cells)
        assert len(speeds) == len(ratios) >= 4
        low, high = f"{min(speeds):.{digits}f}", f"{max(speeds):.{digits}f}"
        assert text.startswith(f"{low if low == high else f'{low} to {high}'} GB/s, ")
        assert f"{min(ratios):.2f} to {max(ratios):.2f} of" in text

    text = short["copies and swaps of blocks from 64 KiB"]
    speed_and_share(["swap_out", "swap_in", "copy_blocks"], text, 0)
    text = short["pull or push on one host, from a pool, blocks from 64 KiB"]
    speed_and_share(["pull, pool", "push, pool"], text, 0)
    text = short["pull or push over TCP (loopback), blocks from 64 KiB"]
    speed_and_share(["pull, TCP", "push, TCP"], text, 1)

    one_host = table("Calls one by one")["pull, pools of one host"][1]
    (tcp,) = re.findall(r"Over TCP, a pull of one 16 KiB block takes (\d+) µs from Python", PERFORMANCE)
    text = short["pull of one 16 KiB block from Python, median"]
    assert text.startswith(f"{one_host} µs on one host, {tcp} µs over TCP")

    others = " ".join(section("Other costs").split())
    differences = numbers(re.findall(rf"[{MINUS}\d]+ µs(?= longer|, 128|, 512|, and 64|\. - \*\*Huge)", others))
    assert len(differences) == 5
    text = f"a layer takes {-min(differences):.0f} µs less to {max(differences):.0f} µs more than a pull"
    assert text in short["layer-wise transfer"]

    (lists, arrays) = re.findall(r"starts in ([\d.]+) µs with lists and ([\d.]+) µs with arrays", others)[0]
    text = short["start of an asynchronous pull of 512 blocks"]
    assert text.startswith(f"{float(lists):.0f} to {float(arrays):.0f} µs")
    (polled,) = re.findall(r"`events` takes ([\d.]+) µs without events", others)
    assert f"takes {float(polled):.1f} µs" in text

    (link,) = re.findall(r"`link_clusters` to a live peer takes ([\d.]+) ms", " ".join(PERFORMANCE.split()))
    text = short["start"]
    assert f"linking takes {float(link):.1f} ms" in text
    (idle,) = re.findall(r"idle for 5 s uses ([\d.]+) s of CPU", section("Copies, pulls and pushes of many blocks"))
    assert short["a linked process that is idle"] == f"{idle} s of CPU in 5 s"


def test_readme_has_the_figures_of_the_results() -> None:
    text = " ".join(README.split())

    def times(*operations: str) -> str:
        low, high = times_as_fast(*operations)
        low_text = f"{low:.2f}" if low < 1 else f"{low:.1f}"
        return f"{low_text} to {rounded(high)} times as fast"

    assert f"Copies and swaps are {times('swap_out', 'swap_in', 'copy_blocks')}" in text
    assert f"in memory of the engine's pools, are {times('pull pool', 'push pool')}" in text
    assert f"Over TCP (the loopback), they are {times('pull tcp', 'push tcp')}" in text
    assert f"allocates itself, they are {times('pull registered', 'push registered')}" in text

    def one_block(operation: str, system: str) -> float:
        return min(
            float(row["median"])
            for row in ROWS
            if (row["group"], row["op"], row["system"]) == ("small", f"{operation} pool p50", system)
            and (row["blocks"], row["block_bytes"]) == (1, 1 << 14)
        )

    pulls, pushes = ([one_block(operation, system) for system in ("ours", "nixl")] for operation in ("pull", "push"))
    assert f"pool takes {pulls[0]:.1f} µs (NIXL: {pulls[1]:.1f} µs). A push takes {pushes[0]:.1f} µs" in text
    assert f"A push takes {pushes[0]:.1f} µs (NIXL: {pushes[1]:.1f} µs)" in text
