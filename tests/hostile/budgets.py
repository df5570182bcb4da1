"""What an admitted peer may cost an engine: the one table that the tests and docs/security.md quote.

`python -m hostile.budgets`, run in the folder of the tests, prints the table as docs/security.md has it between its two
markers. Not for: how the costs are measured (`trial`).
"""

from __future__ import annotations

import resource
from pathlib import Path
from typing import NamedTuple

MIB = 1 << 20
BEGIN, END = "<!-- budgets: begin -->", "<!-- budgets: end -->"


class Budget(NamedTuple):
    """One number and what it bounds."""

    value: int
    unit: str
    bounds: str


BUDGETS: dict[str, Budget] = {
    "idle_threads": Budget(12, "threads", "of an idle engine, with any number of links"),
    "serving_threads": Budget(32, "threads", "beyond those, which answer the calls of all links"),
    "call_threads": Budget(1, "thread", "beyond those, for each link that has a call under way"),
    "pending_share": Budget(
        8, "", "one in so many of the descriptors that the process may open: connections that are no link yet"
    ),
    "pending_least": Budget(4, "connections", "that are no link yet, however low that limit is"),
    "pending_most": Budget(256, "connections", "that are no link yet, however high that limit is"),
    "link_descriptors": Budget(3, "descriptors", "of one link beside its call streams"),
    "link_streams": Budget(128, "call streams", "of one link, each a descriptor"),
    "link_frames": Budget(64 * MIB, "bytes", "of frames of one link that have begun and are not complete"),
    "all_frames": Budget(256 * MIB, "bytes", "of frames of all links that have begun and are not complete"),
    "peak_memory": Budget(512 * MIB, "bytes", "of resident memory that all peers together can cost"),
    "mapped_share": Budget(
        4, "times the memory of the host", "of all peers' memory that is mapped, unless an option says otherwise"
    ),
    "frame_silence": Budget(1, "times `link_silence`", "after which a frame that does not go on ends its stream"),
    "row_silence": Budget(1, "times `link_silence`", "after which a transfer that does not go on loses its rows"),
}

# Names of the threads of an engine, without a number at the end. The kernel keeps 15 characters of a name.
ROLES = frozenset(
    {
        "llm-comm",  # looks for the members of a communicator
        "llm-copy",  # copies
        "llm-each",  # links one of several clusters that a call names
        "llm-greet",  # greets on a connection that was accepted
        "llm-lane",  # carries layers that are ready
        "llm-links",  # watches all links
        "llm-listen",  # accepts connections
        "llm-merge",  # puts memory into huge pages
        "llm-serve",  # answers the calls of peers
    }
)


def value(name: str) -> int:
    """The number of a budget."""
    return BUDGETS[name].value


def pending(limit: int | None = None) -> int:
    """Connections of an engine that are not yet a link, under this soft limit of open files (or this process's own)."""
    soft = resource.getrlimit(resource.RLIMIT_NOFILE)[0] if limit is None else limit
    return max(value("pending_least"), min(soft // value("pending_share"), value("pending_most")))


def mapped() -> int:
    """Bytes of peers' memory that an engine of this host maps."""
    total = Path("/proc/meminfo").read_text().split("MemTotal:")[1].split()[0]
    return value("mapped_share") * int(total) * 1024


def table() -> str:
    """The table as the documentation has it."""
    rows = [
        f"| `{name}` | {f'{budget.value:,} {budget.unit}'.strip()} | {budget.bounds} |"
        for name, budget in BUDGETS.items()
    ]
    return "\n".join([BEGIN, "", "| budget | value | bounds |", "| --- | --- | --- |", *rows, "", END])


if __name__ == "__main__":
    print(table())  # noqa: T201
