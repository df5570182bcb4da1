"""Huge pages: what was asked for, and what the kernel granted (DESIGN.md, "Huge pages?").

The reserved kind needs an administrator's reserve (`/proc/sys/vm/nr_hugepages`); without one its test is skipped and
counted. Not for: speed.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import pytest

from conftest import options, pool
from llm_datadist import CacheDesc, DataType

HUGE = 2 << 20


def free_reserve() -> int:
    """Bytes of reserved huge pages of 2 MiB that nobody uses."""
    facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
    size = int(facts.get("Hugepagesize", "0 kB").split()[0]) << 10
    return int(facts.get("HugePages_Free", "0")) * size if size == HUGE else 0


def touched(manager: Any, size: int) -> None:
    cache = manager.allocate_blocks_cache(CacheDesc(1, [1, size], DataType.DT_UINT8))
    manager.tensor_views(cache)[0].numpy()[:] = 7


def test_what_was_granted_is_measured(start: Callable[..., Any]) -> None:
    manager = start(options(pool(8 << 20), pool(4 << 20))).cache_manager
    assert manager.huge_page_bytes() == {"device": 0, "host": 0}, "nothing is committed yet"
    touched(manager, 8 << 20)
    facts = manager.stats()["pools"]
    granted = manager.huge_page_bytes()
    assert facts["device"]["huge_pages"] in ("reserved", "advised", "unavailable")
    assert facts["device"]["committed_bytes"] >= 8 << 20 or facts["device"]["huge_pages"] == "reserved"
    assert granted["device"] % HUGE == 0
    assert granted["device"] <= 8 << 20
    assert granted["host"] == 0


@pytest.mark.skipif(free_reserve() < 8 << 20, reason="the kernel has no reserve of four huge pages of 2 MiB")
def test_a_reserve_that_is_large_enough_is_used(start: Callable[..., Any]) -> None:
    manager = start(options(pool(8 << 20), None)).cache_manager
    touched(manager, 8 << 20)
    assert manager.stats()["pools"]["device"]["huge_pages"] == "reserved"
    assert manager.huge_page_bytes()["device"] == 8 << 20


def test_a_reserve_that_is_too_small_is_left_alone(start: Callable[..., Any]) -> None:
    before = free_reserve()
    manager = start(options(pool(before + (64 << 20)), None)).cache_manager
    touched(manager, 4 << 20)
    assert manager.stats()["pools"]["device"]["huge_pages"] != "reserved"
    assert free_reserve() == before
