"""Reasons why ours is behind another system or the limit, written by hand. The report shows them beside the row.

A pattern (``fnmatch``) is matched against the row in words, as the report writes it, then a colon and the system that
it is behind: ``many allocate + free, 10,000 x 16 KiB: numpy, empty``, or ``: limit``. The first match counts.
``benches/results/log.md`` says how each reason was found. A reason that starts with ``PRESUMED`` was not profiled and
may be wrong. ``report`` finds the rows.
"""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import Optional

PRESUMED = "presumed, not profiled: "
ASKED = (
    "for a push on one host the owner of the destination reads the bytes, so that no process writes into another "
    "(docs/links.md); this takes two messages between two threads: 4 to 6 us with the copy, and 12 us in rounds in "
    "which Linux runs both threads on one core (not with `--apart`)"
)
ONE_SIDED = f"{ASKED}; the other system writes into the memory of the peer itself, or polls in both processes"
BY_PAGE = (
    "the kernel copies page by page and has to find and pin each page (66 % and 20 % of the time, `perf`); a shared "
    "ring buffer that one process fills and the other empties avoids this. Ours is ahead if each system may choose "
    "its pages (`pages left to each system`)"
)
BY_PIECE = (
    "the kernel looks up and pins the pages of each piece: with 4 KiB pieces, 29 % of the time of the reading threads "
    "is the copy, the rest is locks and pages (`perf`). A shared ring buffer that one process fills and the other "
    "empties avoids this, without detecting errors. Ours is ahead if the caches are in pools (`pull pool`)"
)
PREPARED = (
    "the other system prepares its request outside the measured time, ours makes it within: of 4.8 us, 48 % are the "
    "system call that both make, 26 % Python, 17 % checks and the plan (`perf`). If both make the request within the "
    "measured time, ours is ahead (`small`)"
)
PACKETS = (
    "traced: in a typical call no thread sleeps; the time is one packet each way, 6 to 8 us each, and Python. The "
    "systems that are ahead poll in both processes; p99 is one wake-up"
)
RANDOM = (
    "the 4 KiB pieces are scattered: 64 % of the time of each thread is the kernel's copy of them (`perf`); the bare "
    "stream moves one contiguous piece"
)
ONE_CORE = (
    "traced, after a pause: in calls of 16 MiB the two threads take turns on one core for 94 to 99 % of the time, "
    "because each is woken on the core of the other while the second core is idle; in calls of 64 MiB the slowest "
    "quarter does so for half of the time"
)
SENDER = (
    "traced, 256 MiB after a pause: both threads run at once for 60 to 88 % of the time, and the sender alone for the "
    "rest. The sender is in the kernel's copy (`perf`), whose speed follows that of the memory: single rounds of both "
    "systems range from 2 to 6 GB/s"
)
IMPORT = (
    "`-X importtime`: two thirds are 30 modules in Python, one third 23 modules of the standard library; 1 ms is the "
    "native module; of the other system, more than nine tenths are one native module"
)
WORST = (
    "this is the slowest call of a turn. Traced causes: another program on the core (memory monitoring of the virtual "
    "machine up to 4 ms, its agents up to 3.6 ms), a timer interrupt (70 to 180 us), a halted core that wakes late "
    "(100 to 300 us). A call that needs two threads meets them more often"
)
LOCAL = (
    "256 MiB of 16 KiB blocks: 92 % of the caller's time and 96 % of the worker's are in the copy loops (`perf`), the "
    "rest is lists, plan and pins. The engine learns the best loop while it copies and uses two of them half of the "
    "time each. Two threads reach 18 - 24 or 29 - 34 GB/s on this memory, changing by the round (a separate loop)"
)
OPEN = (
    "timed: 0.66 of 0.87 ms are the first use of the library's code in a process, and a second open takes 0.21 ms; "
    "`strace`: three threads, three memory files, two listeners"
)
TENSORS = (
    "finding and checking each piece between the kernel's calls takes 2.8 % of the time (`perf`), and the speed of the "
    "memory changes by the round"
)
STATES = (
    "92 to 95 % of the time of both threads is in the copy loops, the rest is lists, plan, pins and pieces (`perf`); "
    "two threads reach 18 - 24 or 29 - 34 GB/s on this memory, changing by the minute (a separate loop)"
)
BESIDE = (
    "256 MiB of 16 KiB blocks: 92 % of the time of both threads is in the copy loops; 16 MiB of 4 KiB blocks: 72 % "
    "(`perf`). The rest is lists, plan, pins and finding pieces, and the second thread starts 0.1 to 0.35 ms late "
    "(traced). The loop has its addresses ready"
)
KERNEL = (
    "92 to 94 % of the time of both threads is in `process_vm_readv`, which the limit calls as well (`perf`), the "
    "rest is lists, plan and Python; the second thread starts 0.05 to 0.35 ms late (traced), and the speed of the "
    "memory changes by the minute"
)
WOKEN = (
    "traced: the second thread starts 45 to 350 us after the call, depending on how long its core was halted. With "
    "few blocks one thread copies (64 x 4 KiB of pools: 64 % in the copy loop, 29 % lists, order and pieces; "
    "registered: 72 % in the system call; `perf`)"
)
RINGS = (
    "a READ of at most 2 MiB goes through rings, which takes two messages between two threads. A read by process id on "
    "the caller's thread would be faster, but a page that the kernel does not give would hold the caller. The other "
    "system reads by process id, or polls in both processes"
)
MALLOC = (
    "it calls `malloc` in one thread; ours makes a range that peers can reach, with a handle, its addresses and a key"
)

REASONS: tuple[tuple[str, str], ...] = (
    ("small * slowest*", WORST),
    (
        "standing import: mooncake*",
        IMPORT,
    ),
    (
        "standing peak memory, local: *",
        "the peer's pool is mapped, and its pages count here too; `memory of both, shared pages once` counts them once",
    ),
    (
        "standing peak memory, remote: mooncake store*",
        "a bare process that maps the same memory has 159.3 MiB (`limit`), ours 2.7 more; this one has less",
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
            "of 12 to 14 ms, 0.6 (swaps) to 1.2 (`copy_blocks`) are not copying, on one thread: lists 0.12 - 0.55, "
            "check and order 0.2 - 0.33, pins 0.3 (`perf`); finding each piece costs 2.7 % more, and the speed of "
            "the memory changes by the round"
        ),
    ),
    (
        "local *80 tensors*: limit",
        TENSORS,
    ),
    ("local *: limit", LOCAL),
    ("between pull hixl, 1 x *", RINGS),
    ("between pull hixl, 64 x 4 KiB: *", RINGS),
    ("between pull hixl, 64 x 16 KiB: *", RINGS),
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
    ("layouts pull registered, TP*: nixl, tuned: shm*", BY_PIECE),
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
    """The recorded reason for a row, if any. The module hixl moves bytes on the paths of the native engine."""
    named = f"{what}: {behind}"
    native = named.replace(" hixl-tcp,", " tcp,").replace(" hixl,", " registered,")
    return next(
        (text for pattern, text in REASONS if fnmatchcase(named, pattern) or fnmatchcase(native, pattern)), None
    )
