"""Every option, its default and its meaning, for ``init``, ``llm-datadist options`` and ``docs/options.md``.

The table is that of the engine (``_core.options``).
"""

from __future__ import annotations

import re
from typing import NamedTuple

from llm_datadist import _core

__all__ = [
    "ENVIRONMENT",
    "KNOWN_KEYS",
    "NATIVE_ROWS",
    "OTHER_VARIABLES",
    "OWN_KEYS",
    "TOKEN_VARIABLES",
    "Row",
    "is_known",
    "native_default",
    "native_meaning",
    "rows",
]


class Row(NamedTuple):
    """One option. A name that it does not have is empty."""

    attribute: str
    """Name of the property of ``LLMConfig``."""
    key: str
    """Key in the dict that ``init`` takes."""
    types: list[str]
    """Names of the classes that the property accepts."""
    default: str
    """The value that applies while the option is not set, in Markdown."""
    meaning: str
    """What the option does, in Markdown."""
    own: bool = False
    """Whether the original lacks the option."""
    variable: str = ""
    """Environment variable that is read if the option is not given."""
    native: str = ""
    """Name of the keyword argument of ``Engine``."""
    allowed: str = ""
    """The values that ``Engine`` accepts."""


_ROWS = [Row(*row) for row in _core.options()]

_PER_SECOND = {"ms": 1_000, "µs": 1_000_000}

NATIVE_ROWS = [row for row in _ROWS if row.native]
"""The options that ``Engine`` takes."""

_LLM_CONFIG_UNIT = re.compile(r",? in (?:milli|micro)seconds")
_LLM_CONFIG_RANGE = re.compile(r" \(\d+ to \d+\)")
_NATIVE_NAMES = {
    "init": "Engine",
    "register_*": "register",
    "listen_ip_info": "listen",
    **{row.attribute: row.native for row in NATIVE_ROWS if row.attribute},
}
"""Name in a meaning of ``LLMConfig`` → name in the native API."""

ENVIRONMENT = {row.key: row.variable for row in _ROWS if row.variable}
"""Option → environment variable that ``init`` reads if the option is not given."""

TOKEN_VARIABLES = {key: ENVIRONMENT.pop(key) for key in ("llm.LinkTokenFile", "llm.LinkToken")}
"""Option → environment variable of the token. ``init`` reads the variables only if neither option is given."""

OTHER_VARIABLES = {
    "ASCEND_GLOBAL_LOG_LEVEL": "level of the logger `LLM_DATADIST`: 0 DEBUG, 1 INFO, 2 WARNING, 3 ERROR",
    "LLM_DATADIST_LOG": "`off` silences the standard log of the C and C++ interface",
}
"""Environment variable without an option → its meaning."""

KNOWN_KEYS = frozenset(row.key for row in _ROWS if row.key)
"""Every key that ``init`` reads, or that the original knows and ``init`` ignores."""

OWN_KEYS = frozenset(row.key for row in _ROWS if row.own and row.key)
"""Every key that the original lacks."""


def rows() -> list[Row]:
    """Return every option of ``LLMConfig``, in the order in which ``generate_options`` writes them."""
    further = "Further keys and texts, which are written before all others. Unknown keys are ignored and logged."
    return [*(row for row in _ROWS if row.attribute), Row("ge_options", "", ["dict"], "`{}`", further)]


def is_known(key: str) -> bool:
    """Return whether ``key`` is an option of the engine or of the original, or starts with ``ge.``."""
    return key in KNOWN_KEYS or key.startswith("ge.")


def native_default(row: Row) -> str:
    """Return the default of an option of ``Engine``, in Markdown. Times are seconds."""
    number, _, unit = row.default.partition(" ")
    if unit in _PER_SECOND:
        return f"{int(number) / _PER_SECOND[unit]:.6f}".rstrip("0").rstrip(".")
    names = {f"as `{other.attribute}`": f"as `{other.native}`" for other in NATIVE_ROWS if other.attribute}
    return names.get(row.default, row.default)


def native_meaning(row: Row) -> str:
    """Return what an option of ``Engine`` does, in Markdown, and its name in ``LLMConfig``.

    The meaning of a row names the options and units of ``LLMConfig``.
    """
    if not row.attribute:
        return row.meaning
    meaning = _LLM_CONFIG_UNIT.sub("", _LLM_CONFIG_RANGE.sub("", row.meaning))
    for old, new in _NATIVE_NAMES.items():
        meaning = meaning.replace(f"`{old}`", f"`{new}`")
    return f"{meaning} `LLMConfig`: `{row.attribute}`."
