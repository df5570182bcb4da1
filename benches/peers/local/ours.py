"""Ours: one call with all blocks, as a Python user makes it.

Not for: the core without Python (``cargo bench --bench copy``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from comparison import Entry
from rows import OURS

if TYPE_CHECKING:
    from collections.abc import Iterator

    from local.bed import Bed

THREADS = 2


def entries(bed: Bed) -> Iterator[Entry]:
    """One entry. The arrays of blocks are made before the measurement, as in a scheduler."""
    copy, dst, src = bed.engine.copy, bed.dst, bed.src
    yield Entry(OURS, lambda: copy(dst[bed.dst_rows], src[bed.src_rows]).result(), threads=THREADS)
