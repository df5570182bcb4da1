"""torch: an empty tensor for each cache, as a user without an allocator makes it.

Not for: a pool. This measures the allocator of the C library.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from comparison import Entry
from many.scene import ALLOCATE, LIVE, SIZES, Scene

if TYPE_CHECKING:
    from collections.abc import Iterator


def entries(scene: Scene) -> Iterator[Entry]:
    """``torch.empty``. Peers cannot access its memory."""
    words, tensors, empty = scene.size // 2, scene.tensors, torch.empty

    def run() -> None:
        live = [[empty(words, dtype=torch.bfloat16) for _ in range(tensors)] for _ in range(scene.count)]
        del live

    def churn() -> None:
        live = [empty(SIZES[0] // 2, dtype=torch.bfloat16) for _ in range(LIVE)]
        for size, index in zip(scene.sizes, scene.indices):
            live[index] = empty(size // 2, dtype=torch.bfloat16)

    yield Entry(
        "torch", run if scene.op == ALLOCATE else churn, "empty", note="memory of the process; nobody else reaches it"
    )
