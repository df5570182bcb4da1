"""Inside one process: swap out, swap in and block copy of shuffled blocks. All systems use the same memory.

Each part is one operation with one number of tensors and one kind of page. Each system has a file. Not for: two
processes (``between``), or many small caches (``many``).
"""

from __future__ import annotations

import dataclasses
from importlib import import_module
from typing import TYPE_CHECKING

from comparison import Entry, Ground, contest, reason
from limit import Limit
from local.bed import Bed
from rows import OURS, Missing, Row

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ask import Ask

OPS = ("swap_out", "swap_in", "copy_blocks")
# (number of tensors, pages) → block sizes: all sizes in the first series, and the informative ones in the others.
BLOCKS_KIB = {
    (1, "4K"): (16, 256),
    (2, "4K"): (4, 16, 64, 256, 1024, 2048),
    (80, "4K"): (4, 16, 64, 256),
    (2, "huge"): (16, 64, 1024),
}
QUICK_KIB = (16, 256)
SYSTEMS = ("ours", "limit", "numpy", "torch", "lmcache", "nixl")


def parts(ask: Ask) -> list[str]:
    """One process for each operation, number of tensors, and kind of page."""
    if ask.quick:
        return [f"{op} 2 4K" for op in OPS]
    return [f"{op} {tensors} {pages}" for tensors, pages in BLOCKS_KIB for op in OPS]


def run(ask: Ask, part: str) -> Iterator[Row]:
    """All block sizes of one part."""
    op, tensors, pages = part.split()
    limit = Limit()
    for kib in QUICK_KIB if ask.quick else BLOCKS_KIB[int(tensors), pages]:
        bed = Bed(op, int(tensors), kib << 10, ask.mib << 20)
        row = bed.row(pages)
        try:
            if pages == "huge":
                bed.collapse(limit)
            yield from cell(ask, bed, row, limit)
        except Missing as why:
            yield dataclasses.replace(row, system=OURS, note=str(why))
        finally:
            bed.close()


def cell(ask: Ask, bed: Bed, row: Row, limit: Limit) -> Iterator[Row]:
    """Measure one block size with every installed system in turn."""
    entries: list[Entry] = []
    for system in filter(ask.wants, SYSTEMS):
        ask.breadcrumb(system)
        try:
            if system == "limit":
                entries += limit.entries(bed.moves, bed.block)
            else:
                entries += import_module(f"local.{system}").entries(bed)
        except Exception as failure:  # noqa: BLE001  (a peer that is not here is a row with its reason)
            yield dataclasses.replace(row, system=system, note=reason(failure))
    ask.breadcrumb("")
    ground = Ground(row, bed.bytes / 1e9, lambda: limit.poison(bed.moves, bed.block), lambda: bed.wrong(limit))
    yield from contest(ask, ground, entries)
