"""Many small caches: allocate and free them, make them accessible for a peer, and get each by its key.

A row is the time for one cache in microseconds. Each operation is a part. Each system has a file with the operations
that it supports. Not for: throughput (``local``, ``between``), or growth with the number of caches (``scale``).
"""

from __future__ import annotations

import dataclasses
from importlib import import_module
from typing import TYPE_CHECKING

from comparison import Entry, Ground, contest, reason
from many.scene import ALLOCATE, CHURN, GET, GET_ALL, PUT, PUT_ALL, REACH, REACH_ALL, UNLIKE, Scene

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ask import Ask
    from rows import Row

COUNT = 10_000
QUICK_COUNT = 1_000
SYSTEMS = {
    ALLOCATE: ("ours", "lmcache", "torch", "numpy"),
    CHURN: ("ours", "lmcache", "torch", "numpy"),
    REACH: ("ours", "nixl", "mooncake"),
    REACH_ALL: ("ours", "nixl", "mooncake"),
    PUT: ("ours", "mooncake", "lmcache"),
    PUT_ALL: ("ours", "mooncake"),
    GET: ("ours", "mooncake"),
    GET_ALL: ("ours", "mooncake"),
}


def parts(ask: Ask) -> list[str]:
    """One process for each operation and number of tensors."""
    del ask
    return [f"{op}|{tensors}" for op in SYSTEMS for tensors in ((1, 80) if op == ALLOCATE else (1,))]


def run(ask: Ask, part: str) -> Iterator[Row]:
    """Measure every system that supports the operation, in turn."""
    op, tensors = part.split("|")
    scene = Scene(op, int(tensors), QUICK_COUNT if ask.quick else COUNT, ask.rounds + 1)
    row = scene.row()
    entries: list[Entry] = []
    try:
        for system in filter(ask.wants, SYSTEMS[op]):
            ask.breadcrumb(system)
            try:
                entries += import_module(f"many.{system}").entries(scene)
            except Exception as failure:  # noqa: BLE001  (a peer that is not here is a row with its reason)
                yield dataclasses.replace(row, system=system, note=reason(failure))
        # The files of the systems verify puts and gets. An allocation has no bytes to verify.
        wrong = fine if op in (PUT, PUT_ALL, GET, GET_ALL) else None
        yield from contest(ask, Ground(row, 1e6 / scene.count, wrong=wrong, alike=op not in UNLIKE), entries)
    finally:
        scene.close()


def fine() -> None:
    """Nothing else to verify."""
