"""Warnings about unknown names that look like a misspelt option.

Unknown options and keyword arguments are ignored (contract §5.2, §7.12), so a misspelt name would have no effect and
leave no trace. ``warn_of_misspelt`` logs one WARNING with the closest valid name.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional

from llm_datadist import log
from llm_datadist.option_types import read_json

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

__all__ = ["closest", "edit_distance", "warn_of_misspelt", "warn_of_misspelt_pool_keys"]

_MOST_EDITS = 2
_POOLS = ("llm.MemPoolConfig", "llm.HostMemPoolConfig")
_POOL_KEYS = frozenset({"memory_size", "page_shift"})

# Names that were reported with `once`, for calls that run thousands of times a second. The limit bounds the memory,
# because the caller chooses the names.
_MOST_REMEMBERED = 1000
_warned: set[tuple[str, str]] = set()


def edit_distance(left: str, right: str) -> int:
    """Return the Levenshtein distance: the least number of characters to insert, delete or replace."""
    row = list(range(len(right) + 1))
    for at, character in enumerate(left, 1):
        diagonal, row[0] = row[0], at
        for column, other in enumerate(right, 1):
            diagonal, row[column] = (
                row[column],
                min(row[column] + 1, row[column - 1] + 1, diagonal + (character != other)),
            )
    return row[-1]


def closest(name: str, known: Collection[str]) -> Optional[str]:
    """Return the known name that is nearest to ``name`` and at most two edits away; ``None`` if there is none.

    Of several equally near names, the first in alphabetical order is returned.
    """
    near = [other for other in known if abs(len(other) - len(name)) <= _MOST_EDITS]
    edits, best = min(((edit_distance(name, other), other) for other in near), default=(_MOST_EDITS + 1, None))
    return best if edits <= _MOST_EDITS else None


def warn_of_misspelt(kind: str, given: Iterable[str], known: Collection[str], *, once: bool = False) -> None:
    """Log one WARNING for each unknown name that is at most two edits away from a known one.

    Args:
        kind: the kind of name, for the text, such as ``"option"``.
        given: the names that the program gave. Values are never logged, because they may be secret.
        known: the valid names.
        once: whether a name is reported only the first time in this process.
    """
    for name in given:
        if name in known or (kind, name) in _warned:
            continue
        if once and len(_warned) < _MOST_REMEMBERED:
            _warned.add((kind, name))
        if (best := closest(name, known)) is not None:
            log.warn("unknown %s %s is ignored; did you mean %s?", kind, log.shown(name), log.shown(best))


def warn_of_misspelt_pool_keys(options: Mapping[str, object]) -> None:
    """Log one WARNING for each unknown key of a memory pool that looks misspelt (contract §5.1)."""
    for option in _POOLS:
        text = options.get(option)
        try:
            fields = read_json(text) if isinstance(text, str) else None
        except ValueError:  # not JSON
            continue  # the engine raises LLM_PARAM_INVALID
        if isinstance(fields, dict):
            warn_of_misspelt(f"key of {option}", fields, _POOL_KEYS)
