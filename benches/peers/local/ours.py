"""Ours: one call with the whole mapping, as a Python user makes it.

Not for: the core without Python (``cargo bench --bench copy``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from rows import OURS
from turns import Entry

if TYPE_CHECKING:
    from collections.abc import Iterator

    from local.bed import Bed

THREADS = 2


def entries(bed: Bed) -> Iterator[Entry]:
    """One entry. The mapping is an array of pairs, which is made before the measurement, as in a scheduler."""
    pairs = np.stack([bed.src_rows, bed.dst_rows], axis=1).astype(np.int64)
    if bed.op == "copy_blocks":
        several = {int(src): [int(dst)] for src, dst in pairs}
        yield Entry(OURS, lambda: bed.manager.copy_blocks(bed.src, several), threads=THREADS)
    else:
        yield Entry(OURS, lambda: bed.manager.swap_blocks(bed.src, bed.dst, pairs), threads=THREADS)
