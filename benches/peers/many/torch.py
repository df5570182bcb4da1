"""torch: an empty tensor for each, as a user without an allocator has it.

Not for: a pool; it is the C library's allocator that is measured.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from many.scene import ALLOCATE, LIVE, SIZES, Scene
from turns import Entry

if TYPE_CHECKING:
    from collections.abc import Iterator


def entries(scene: Scene) -> Iterator[Entry]:
    """``torch.empty``; what it gives no peer can reach."""
    words, tensors, empty = scene.size // 2, scene.tensors, torch.empty

    def run() -> None:
        live = [[empty(words, dtype=torch.bfloat16) for _ in range(tensors)] for _ in range(scene.count)]
        del live

    def churn() -> None:
        live = [empty(SIZES[0] // 2, dtype=torch.bfloat16) for _ in range(LIVE)]
        for size, place in zip(scene.sizes, scene.places):
            live[place] = empty(size // 2, dtype=torch.bfloat16)

    yield Entry(
        "torch", run if scene.op == ALLOCATE else churn, "empty", note="memory of the process; nobody else reaches it"
    )
