"""The resources that an admitted peer may use at most: the table that the tests check and docs/security.md quotes.

`python -m hostile.budgets`, run in the folder of the tests, prints the table that docs/security.md has between its two
markers. Not for: how the costs are measured (`trial`).
"""

from __future__ import annotations

import resource
from typing import NamedTuple

MIB = 1 << 20
BEGIN, END = "<!-- budgets: begin -->", "<!-- budgets: end -->"


class Budget(NamedTuple):
    value: int
    unit: str
    meaning: str


BUDGETS: dict[str, Budget] = {
    "idle_threads": Budget(12, "threads", "threads of an idle engine, whatever the number of its links"),
    "serving_threads": Budget(32, "threads", "additional threads that answer calls, shared by all links"),
    "call_threads": Budget(1, "thread", "additional threads for each link whose peer is calling"),
    "pending": Budget(16, "", "connections that are not yet a link or a call stream; 16 to 256"),
    "incoming": Budget(4, "", "links that peers made, after 48 is subtracted from the open-file limit; 4 to 4,096"),
    "streams": Budget(8, "", "call streams of all links, in addition to 1 for each link; 8 to 8,192"),
    "link_streams": Budget(128, "call streams", "call streams of one link"),
    "link_descriptors": Budget(2, "descriptors", "file descriptors of one link, in addition to its call streams"),
    "unwanted_descriptors": Budget(
        300, "descriptors", "descriptors that peers sent in place of memory, and that are not closed yet"
    ),
    "common_memory": Budget(
        288 * MIB,
        "bytes",
        "memory for which all links compete; one link may use three quarters of what the others leave",
    ),
    "notification_memory": Budget(
        96 * MIB, "bytes", "the part of it that notifications may take, of all links together"
    ),
    "reserved_memory": Budget(
        64 * MIB,
        "bytes",
        "memory for calls, divided equally among the links that peers may make; at most 1 MiB for each",
    ),
    "reserved_notifications": Budget(32 * MIB, "bytes", "the same, for notifications"),
    "peak_memory": Budget(512 * MIB, "bytes", "resident memory that all peers together can cost"),
    "mapped": Budget(4, "times the memory of the host", "mapped memory of all peers, unless `remote_memory` is set"),
    "pace": Budget(
        64 << 10,
        "bytes",
        "the least that a transfer or request must move within each `silence`, or all that remains",
    ),
}
DIVISORS = ("pending", "incoming", "streams")  # values that divide the limit of open files

# Thread names of an engine, without the number at the end. The kernel keeps 15 characters of a name.
ROLES = frozenset(
    {
        "llm-clock",  # ends layer-wise transfers after their deadline
        "llm-control",  # accepts connections, greets, watches all links
        "llm-copy",  # copies
        "llm-discard",  # closes descriptors that a peer sent in place of memory
        "llm-each",  # links one of the clusters of a `link_clusters` call
        "llm-layers",  # asks a synchronizer of the program whether a layer is ready
        "llm-log",  # passes log lines of the engine to the logging of the program
        "llm-read",  # reads the memory of another process
        "llm-search",  # connects to the members of a communicator
        "llm-serve",  # answers the calls of peers
        "llm-stream",  # transfers one of the TCP streams of a large pull
        "llm-worker",  # sends layers that are ready
    }
)


def value(name: str) -> int:
    return BUDGETS[name].value


def open_files(limit: int | None) -> int:
    return resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit


def pending(limit: int | None = None) -> int:
    """Connections of an engine that are not yet a link, under a soft limit of open files."""
    return max(16, min(open_files(limit) // value("pending"), 256))


def incoming(limit: int | None) -> int:
    """Links that peers made, under a soft limit of open files."""
    return max(4, min((open_files(limit) - 48) // value("incoming"), 4096))


def streams(limit: int | None) -> int:
    """Call streams of all links beyond one of each, under a soft limit of open files."""
    return max(8, min(open_files(limit) // value("streams"), 8192))


def table() -> str:
    rows = []
    for name, budget in BUDGETS.items():
        number = f"1/{budget.value} of the open-file limit" if name in DIVISORS else f"{budget.value:,} {budget.unit}"
        rows.append(f"| `{name}` | {number} | {budget.meaning} |")
    return "\n".join([BEGIN, "", "| budget | value | meaning |", "| --- | --- | --- |", *rows, "", END])


if __name__ == "__main__":
    print(table())  # noqa: T201
