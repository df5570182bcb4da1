"""Why a row is behind a peer or the limit: written by hand, shown in the report beside the row.

A pattern is matched (``fnmatch``) with the row in words as the report writes it, then a colon and the system that it is
behind: ``many allocate + free, 10,000 x 16 KiB: numpy, empty``, or ``: limit``. The first that matches counts. How each
was found is in ``docs/performance/log.md``; what begins with ``PRESUMED`` was not profiled and may be wrong. Not for:
finding such rows (``report``).
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Optional

PRESUMED = "presumed, not profiled: "
ASKED = (
    "a push on one host is a read by the far side, so that no process writes into another (docs/links.md): "
    "two messages between two threads, some 8 us"
)
ONE_SIDED = f"{ASKED}; its caller writes into the far process's memory itself, or both of its processes poll"
BY_PAGE = (
    "the kernel copies page by page and finds and pins each (66 % and 20 % of the time, `perf`); a ring of "
    "shared memory that both fill and empty does not ask it. Where each system may do what it likes about "
    "pages ours is ahead (`pages left to each system`)"
)
PREPARED = PRESUMED + (
    "its request is prepared outside the clock, ours is checked and planned within it; with its request made "
    "within the clock ours is ahead (`small`)"
)
POLLED = PRESUMED + "both of its processes poll, ours sleep: a wake-up for each message"
ONE_CORE = PRESUMED + (
    "two cores for two processes: while the kernel keeps both threads on one of them a stream moves 2.2 GB/s, "
    "on two 4.6, ours and the bare one alike; processes that poll are moved apart sooner, and burn both"
)
WORST = PRESUMED + "the worst of all calls of a turn: a thread waited for its core once; p99 is what is typical"
STATES = PRESUMED + (
    "the memory here has two states, 21 - 26 and 34 - 39 GB/s, and each pair of processes has memory of its "
    "own: the same row is 0.61 in one run and 0.99 in the next"
)
BESIDE = PRESUMED + (
    "lists, checks, order and pins come beside the copy, 0.6 of 12 ms for 32,768 blocks; the loop has its "
    "addresses ready"
)
WOKEN = PRESUMED + "the second thread's wake-up, 50 to 100 us (none below 512 KiB), and lists, order and pins"
MALLOC = "`malloc` of one thread; ours makes a range that peers can reach, with a handle, its addresses and a key"

REASONS: tuple[tuple[str, str], ...] = (
    ("small * slowest*", WORST),
    (
        "standing peak memory, near: *",
        "the far pool is mapped, and its pages count here too; `memory of both, shared pages once` counts them once",
    ),
    (
        "standing peak memory, far: mooncake store*",
        PRESUMED + "its far side holds the bytes, and nothing to move them with",
    ),
    ("standing open*: mooncake*", PRESUMED + "0.2 ms: pools, workers and a listener are made as well"),
    (
        "standing link: mooncake*",
        PRESUMED + "0.1 ms: the greeting proves a token and hands over the pools' descriptors",
    ),
    ("many allocate + free*: numpy, empty", MALLOC),
    ("many allocate + free*: torch, empty", MALLOC),
    ("local copy_blocks, *256 KiB*: limit", STATES),
    ("local swap_*64 KiB*: limit", STATES),
    (
        "local copy_blocks*: limit",
        (
            "32,768 blocks of 4 KiB: 1.2 of 14 ms are not copying, on one thread (lists out of a dict of "
            "lists 0.55, order 0.33, pins 0.32); with longer blocks it is a quarter of that and less"
        ),
    ),
    (
        "local swap_* 32,768 x 4 KiB*: limit",
        (
            "0.6 of 12 ms are not copying, on one thread: lists 0.12, check and order 0.2, pins 0.3; finding "
            "each piece costs 2.7 % more"
        ),
    ),
    (
        "local *80 tensors*: limit",
        "finding and checking each piece between the kernel's calls: 2.8 % of the time; the copy itself is level",
    ),
    (
        "local swap_*: limit",
        "0.3 to 0.7 of 13 ms are lists, order and pins; and the memory has two states here, for both",
    ),
    ("* push registered*: nixl*", ONE_SIDED),
    ("* push pool*: nixl*", ONE_SIDED),
    ("* push *: ucxx*", ONE_SIDED),
    ("small push tcp*", POLLED),
    ("small push *: limit", f"{ASKED}; the bare loop writes without asking"),
    ("between push tcp*", ONE_CORE),
    ("between push *, 1 x *: limit", f"{ASKED}; the bare loop writes without asking"),
    ("between push *, 64 x *: limit", f"{ASKED}; the bare loop writes without asking"),
    ("* pull registered*, 1 x 1 MiB: nixl*", BY_PAGE),
    ("* pull registered*, 1 x *: nixl*", PREPARED),
    ("between pull registered*: nixl, tuned: shm*", BY_PAGE),
    ("between * registered, 4,096 x *: limit", WOKEN),
    ("between * registered, 64 x *: limit", WOKEN),
    ("small * registered*: limit", WOKEN),
    ("between * registered*: limit", BESIDE),
    ("small pull tcp*", POLLED),
    ("between pull tcp, 1 x 4 KiB: *", POLLED),
    ("between pull tcp*", ONE_CORE),
    ("between * pool, 4,096 x * 4 KiB*: limit", WOKEN),
    ("between * pool, 64 x *: limit", WOKEN),
    ("between * pool, * x 4 KiB: limit", BESIDE),
    ("between * pool*: limit", STATES),
    ("small pull pool*", WOKEN),
)


def reason_of(what: str, behind: str) -> Optional[str]:
    """The reason that is written down for a row."""
    return next((text for pattern, text in REASONS if fnmatchcase(f"{what}: {behind}", pattern)), None)
