"""Which host rows hold the blocks of a job of vLLM's offloading.

vLLM offloads *chunks* of one or more blocks. A job lists the blocks of each KV cache group, which follow each other in
the request, and the chunks that hold them. The first block of a group may lie inside its first chunk.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["host_rows"]


def host_rows(
    chunks: Sequence[int], group_sizes: Sequence[int], first_blocks: Sequence[int], blocks_per_chunk: int
) -> np.ndarray:
    """Return the host row of each block, in the order of the job.

    Args:
        chunks: the chunks of all groups, one group after the other.
        group_sizes: number of blocks of each group.
        first_blocks: the place of the first block of each group in its request.
        blocks_per_chunk: number of blocks in a chunk.

    Raises:
        ValueError: the chunks do not hold as many blocks.
    """
    rows, taken = [], 0
    for size, first in zip(group_sizes, first_blocks):
        if not size:
            continue
        skip = first % blocks_per_chunk
        count = -(-(skip + size) // blocks_per_chunk)
        part = np.asarray(chunks[taken : taken + count], np.int64)
        taken += count
        if len(part) < count:
            raise ValueError(f"{len(chunks)} chunks do not hold groups of {list(group_sizes)} blocks")
        rows.append((part[:, None] * blocks_per_chunk + np.arange(blocks_per_chunk)).ravel()[skip : skip + size])
    return np.concatenate(rows) if rows else np.empty(0, np.int64)
