"""What ``llm-datadist store`` shows to people, as text."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llm_datadist.commands.output import aligned, size

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

    from llm_datadist.stats import KeeperStats, StoredNamespace, StoredValue

RATES = {
    "stored": "values stored",
    "stored_bytes": "bytes stored",
    "present": "puts of keys that had a value",
    "no_room": "puts without room",
    "touched": "values read or put again",
    "evicted": "values replaced",
    "dropped": "values dropped",
    "corrupt": "values with a wrong checksum",
    "wrong_reports": "wrong reports",
    "leases": "leases",
    "leases_refused": "leases refused",
    "refused": "connections refused",
    "forbidden": "requests above a role",
}
"""The counters that grow, with their meaning."""
_RARE = ("corrupt", "wrong_reports", "forbidden")  # `store top` has few lines


def stats(socket: str, counted: KeeperStats) -> str:
    """Return the table of ``store stats``."""
    rows = [(meaning, _number(name, counted[name])) for name, meaning in RATES.items()]  # type: ignore[literal-required]
    rows.append(("time of a put", _put_time(counted)))
    return "\n".join([f"keeper at {socket}", *_state(counted), "", *aligned(rows, 1)])


def rates(socket: str, counted: KeeperStats, before: KeeperStats, seconds: float) -> list[str]:
    """Return the lines of ``store top``: the state, and what has happened since `before`."""
    rows = [("", "a second", "in all")]
    grown = {name: _grown(name, counted, before) for name in (*RATES, "puts", "put_nanos")}
    for name, meaning in RATES.items():
        if name in _RARE and not counted[name]:  # type: ignore[literal-required]
            continue
        in_all = _number(name, counted[name])  # type: ignore[literal-required]
        rows.append((meaning, _number(name, grown[name] / seconds), in_all))
    rows.append(("time of a put", _put_time(grown), _put_time(counted)))
    return [f"keeper at {socket}", *_state(counted), "", *aligned(rows, 1)]


def namespaces(listed: Iterable[StoredNamespace]) -> list[str]:
    """Return the table of namespaces, the one with the most bytes first."""
    rows = [("number", "values", "bytes", "size of a value", "namespace")]
    for row in sorted(listed, key=lambda row: row["values"] * row["value"], reverse=True):
        held = size(row["values"] * row["value"])
        rows.append((str(row["number"]), f"{row['values']:,}", held, size(row["value"]), shown(row["text"])))
    texts = [row[-1] for row in rows]
    return [f"{line}  {text}" for line, text in zip(aligned([row[:-1] for row in rows], 0), texts)]


def values(listed: Sequence[StoredValue], namespace: StoredNamespace) -> str:
    """Return the table of values of a namespace."""
    rows = [("key", "slot", "lease"), *((row["key"].hex(), str(row["slot"]), _lease(row)) for row in listed)]
    count = f"{len(listed):,} of {namespace['values']:,} values, the most recently used first"
    return "\n".join([count, *aligned(rows, 1)])


def shown(text: str) -> str:
    """Return the text of a namespace on one line, without characters that could control a terminal."""
    return text if text.isprintable() else ascii(text)


def _lease(row: StoredValue) -> str:
    return "leased" if row["leased"] else ""


def _state(counted: KeeperStats) -> list[str]:
    slots, held = counted["slots"], counted["values"]
    rows = [
        ("slots", f"{slots:,} of {size(counted['slot_bytes'])}"),
        ("values", f"{held:,} ({held / slots:.1%} of the slots), {counted['leased']:,} leased"),
        ("clients", f"{counted['clients']:,}"),
        ("namespaces", f"{counted['namespaces']:,}"),
    ]
    return aligned(rows, 2)


def _grown(name: str, counted: Mapping[str, Any], before: Mapping[str, Any]) -> int:
    """Return how much a counter has grown. If it fell, another keeper has begun at 0."""
    now: int = counted[name]
    return now - before[name] if now >= before[name] else now


def _number(name: str, count: float) -> str:
    return size(count) if name.endswith("bytes") else f"{count:,.0f}"


def _put_time(counted: Mapping[str, Any]) -> str:
    return f"{counted['put_nanos'] / counted['puts'] / 1000:,.0f} us" if counted["puts"] else "-"
