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
    "a push on one host is a read by the far side, so that no process writes into another (docs/links.md): two "
    "messages between two threads, 8 to 12 us"
)
ONE_SIDED = f"{ASKED}; its caller writes into the far process's memory itself, or both of its processes poll"
BY_PAGE = (
    "the kernel copies page by page and finds and pins each (66 % and 20 % of the time, `perf`); a ring of shared "
    "memory that both fill and empty does not ask it. Where each system may do what it likes about pages ours is "
    "ahead (`pages left to each system`)"
)
PREPARED = (
    "its request is prepared outside the clock, ours is made within it: of 4.8 us 48 % are the system call that "
    "both make, 26 % Python, 17 % check and plan (`perf`); with its request made within the clock ours is ahead "
    "(`small`)"
)
PACKETS = (
    "traced: no side sleeps in a typical call; the time is one packet each way, 6 to 8 us each, and Python. A peer "
    "that is ahead has both its processes poll; p99 is one wake-up"
)
RANDOM = (
    "4 KiB pieces that lie anywhere: 64 % of the time of either thread is the kernel's copy of them (`perf`); the "
    "bare stream moves one piece in a row"
)
ONE_CORE = (
    "traced, calls of 16 MiB after a pause: the two threads take turns on one core for 94 to 99 % of the time, each "
    "woken on the core of the other while the second is idle; of 64 MiB, the slowest quarter of calls for half of it"
)
SENDER = (
    "traced, 256 MiB after a pause: both threads run at once for 60 to 88 % of the time and the sender alone for "
    "the rest; it is in the kernel's copy (`perf`), whose speed moves with the memory's, rounds from 2 to 6 GB/s on"
    " both sides"
)
WORST = (
    "the worst of all calls of a turn. Traced: who else ran on the core (the machine's watch over memory up to 4 "
    "ms, its agents up to 3.6 ms), a timer interrupt (70 to 180 us), a stopped core that came late (100 to 300 us a"
    " wake-up); who needs two threads for a call meets them more often"
)
LOCAL = (
    "256 MiB of 16 KiB blocks: 92 % of the caller's time and 96 % of the worker's are in the copy loops (`perf`), "
    "the rest lists, plan and pins; which loop is learned while copying, two of them half of the time each; two "
    "threads get 18 - 24 or 29 - 34 GB/s of this memory, changing by the round (a loop of its own)"
)
OPEN = (
    "timed: 0.66 of 0.87 ms are the first use of the library's code in a process, a second open takes 0.21; "
    "`strace`: three threads, three memory files, two listeners"
)
TENSORS = (
    "finding and checking each piece between the kernel's calls, 2.8 % of the time (`perf`); and the memory's speed"
    " changes by the round"
)
STATES = (
    "92 to 95 % of the time of both threads is in the copy loops, the rest lists, plan, pins and pieces (`perf`); "
    "and two threads get 18 - 24 or 29 - 34 GB/s of this memory, changing by the minute (a loop of its own)"
)
BESIDE = (
    "256 MiB of 16 KiB blocks: 92 % of the time of both threads is in the copy loops, 16 MiB of 4 KiB: 72 % "
    "(`perf`); the rest are lists, plan, pins and finding pieces, and the second thread comes 0.1 to 0.35 ms late "
    "(traced); the loop has its addresses ready"
)
KERNEL = (
    "92 to 94 % of the time of both threads is in `process_vm_readv`, which the limit calls as well (`perf`), the "
    "rest is lists, plan and Python; the second thread comes 0.05 to 0.35 ms late (traced), and the memory's speed "
    "changes by the minute"
)
WOKEN = (
    "traced: the second thread starts 45 to 350 us after the call, by how long its core had been stopped; of few "
    "blocks one thread copies (64 x 4 KiB of pools: 64 % in the copy loop, 29 % lists, order and pieces; "
    "registered: 72 % in the system call; `perf`)"
)
MALLOC = "`malloc` of one thread; ours makes a range that peers can reach, with a handle, its addresses and a key"

REASONS: tuple[tuple[str, str], ...] = (
    ("small * slowest*", WORST),
    (
        "standing peak memory, near: *",
        "the far pool is mapped, and its pages count here too; `memory of both, shared pages once` counts them once",
    ),
    (
        "standing peak memory, far: mooncake store*",
        "a bare process that maps the same memory has 159.3 MiB (`limit`), ours 2.7 more; theirs is below the bare one",
    ),
    (
        "standing open*: mooncake*",
        OPEN,
    ),
    ("many allocate + free*: numpy, empty", MALLOC),
    ("many allocate + free*: torch, empty", MALLOC),
    (
        "local * 32,768 x 4 KiB*: limit",
        (
            "of 12 to 14 ms 0.6 (swaps) to 1.2 (`copy_blocks`) are not copying, on one thread: lists 0.12 - 0.55, "
            "check and order 0.2 - 0.33, pins 0.3 (`perf`); finding each piece costs 2.7 % more; and the memory's "
            "speed changes by the round"
        ),
    ),
    (
        "local *80 tensors*: limit",
        TENSORS,
    ),
    ("local *: limit", LOCAL),
    ("small push tcp*", PACKETS),
    ("small pull tcp*", PACKETS),
    ("between * tcp, 1 x 4 KiB: *", PACKETS),
    ("between * tcp, 1 x 16 KiB: *", PACKETS),
    ("between * tcp, 4,096 x 4 KiB: *", f"{RANDOM}; {ONE_CORE}"),
    ("between * tcp, * x 4 KiB: *", RANDOM),
    ("between * tcp, 64 x *", ONE_CORE),
    ("between * tcp, 4,096 x 16 KiB*", ONE_CORE),
    ("between * tcp, *", SENDER),
    ("* push registered*: nixl*", ONE_SIDED),
    ("* push pool*: nixl*", ONE_SIDED),
    ("* push *: ucxx*", ONE_SIDED),
    ("small push *: limit", f"{ASKED}; the bare loop writes without asking"),
    ("between push *, 1 x *: limit", f"{ASKED}; the bare loop writes without asking"),
    ("between push *, 64 x *: limit", f"{ASKED}; the bare loop writes without asking"),
    ("* pull registered*, 1 x 1 MiB: nixl*", BY_PAGE),
    ("* pull registered*, 1 x *: nixl*", PREPARED),
    ("between pull registered*: nixl, tuned: shm*", BY_PAGE),
    ("small pull registered*, 64 x *: nixl, tuned: shm*", BY_PAGE),
    ("between * registered, 4,096 x *: limit", KERNEL),
    ("between * registered, 64 x *: limit", WOKEN),
    ("small * registered*: limit", WOKEN),
    ("between * registered*: limit", KERNEL),
    ("between * pool, * x 16 KiB*: limit", BESIDE),
    ("between * pool, 64 x *: limit", WOKEN),
    ("between * pool, * x 4 KiB: limit", BESIDE),
    ("between * pool*: limit", STATES),
    ("small pull pool*", WOKEN),
)


def reason_of(what: str, behind: str) -> Optional[str]:
    """The reason that is written down for a row."""
    return next((text for pattern, text in REASONS if fnmatchcase(f"{what}: {behind}", pattern)), None)
