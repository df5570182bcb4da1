"""LMCache's host allocator, which hands out memory objects of its pool.

Not for: its storage backends, which add an index in front of it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch

from comparison import Entry
from many.scene import ALLOCATE, LIVE, PUT, SIZES, Scene
from rows import Missing

if TYPE_CHECKING:
    from collections.abc import Iterator
    from typing import Callable

NOTE = "its memory objects have a reference count and a shape; no key, no peer"


def entries(scene: Scene) -> Iterator[Entry]:
    """``HostMemoryAllocator``: allocate, and let go of the reference."""
    from lmcache.v1.memory_allocators.host_memory_allocator import HostMemoryAllocator  # noqa: PLC0415
    from lmcache.v1.memory_management import MemoryFormat  # noqa: PLC0415

    if scene.op == PUT:
        raise Missing("its local store asks for an engine's configuration and hashes of tokens; its allocator has rows")
    allocator = HostMemoryAllocator(
        max(scene.count * (scene.size * scene.tensors + 4096), LIVE * SIZES[-1] * 2) + (64 << 20)
    )

    def make(tensors: int, size: int) -> Callable[[], Any]:
        shape = torch.Size([tensors, 1, size // 2])
        return lambda: allocator.allocate(shape, torch.bfloat16, MemoryFormat.KV_MLA_FMT)

    def run() -> None:
        one = make(scene.tensors, scene.size)
        live = [one() for _ in range(scene.count)]
        assert None not in live, "no room"
        for memory in live:
            memory.ref_count_down()

    def churn() -> None:
        by_size = {size: make(1, size) for size in SIZES}
        live = [by_size[SIZES[0]]() for _ in range(LIVE)]
        for size, index in zip(scene.sizes, scene.indices):
            live[index].ref_count_down()
            live[index] = by_size[size]()
        for memory in live:
            memory.ref_count_down()

    yield Entry("lmcache", run if scene.op == ALLOCATE else churn, "host allocator", note=NOTE)
