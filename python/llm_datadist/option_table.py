"""Every option, its default and its meaning, for ``init``, ``llm-datadist options`` and ``docs/options.md``.

The table is made from the properties of ``LlmConfig``, so that each option is described in one place.
"""

from __future__ import annotations

import textwrap
from typing import NamedTuple

from llm_datadist import configs

__all__ = [
    "ENVIRONMENT",
    "KNOWN_KEYS",
    "OTHER_VARIABLES",
    "OWN_KEYS",
    "TOKEN_VARIABLES",
    "Row",
    "is_known",
    "rows",
    "table",
]

TOKEN_VARIABLES = {"llm.LinkTokenFile": "LLM_DATADIST_TOKEN_FILE", "llm.LinkToken": "LLM_DATADIST_TOKEN"}
"""Option → environment variable of the token. ``init`` reads the variables only if neither option is given."""

ENVIRONMENT = {
    "env.HCCL_CONNECT_TIMEOUT": "HCCL_CONNECT_TIMEOUT",
    "llm.LinkAcceptRemote": "LLM_DATADIST_ACCEPT_REMOTE",
    "llm.RankHosts": "LLM_DATADIST_RANK_HOSTS",
    "llm.RankPort": "LLM_DATADIST_RANK_PORT",
}
"""Option → environment variable that ``init`` reads if the option is not given."""

OTHER_VARIABLES = {
    "ASCEND_GLOBAL_LOG_LEVEL": "level of the logger `LLM_DATADIST`: 0 DEBUG, 1 INFO, 2 WARNING, 3 ERROR",
    "LLM_DATADIST_LOG": "`off` silences the standard log of the C and C++ interface",
}
"""Environment variable without an option → its meaning."""


class Row(NamedTuple):
    """One option."""

    attribute: str
    """Name of the property of ``LLMConfig``."""
    key: str
    """Key in the dict that ``init`` takes; empty for ``ge_options``."""
    types: list[str]
    """Names of the classes that the property accepts."""
    default: str
    """The value that applies while the option is not set, in Markdown."""
    meaning: str
    """Docstring of the property, in Markdown."""
    own: bool
    """Whether the original lacks the option."""


def rows() -> list[Row]:
    """Return every option, in the order in which ``generate_options`` writes them."""
    made = [
        Row(option.name, option.key, option.type_names, option.default, _markdown(option.__doc__), option.own)
        for option in configs._OPTIONS  # noqa: SLF001  (the table of this module's options)
    ]
    further = "Further keys and texts, which are written before all others. Unknown keys are ignored and logged."
    return [*made, Row("ge_options", "", ["dict"], "`{}`", further, own=False)]


def _markdown(text: object) -> str:
    return str(text).replace("``", "`").replace("\n", " ")


# Keys without a property: a second spelling, and the keys that `init` derives.
_FURTHER_KEYS = ("llm.ListenIpInfo", "llm.Role", "llm.ListenIp", "llm.ListenPort", "ge.session_device_id")

KNOWN_KEYS = frozenset([*(row.key for row in rows() if row.key), *ENVIRONMENT, *_FURTHER_KEYS])
"""Every key that ``init`` reads, or that the original knows and ``init`` ignores (contract §5.2)."""

OWN_KEYS = frozenset(row.key for row in rows() if row.own)
"""Every key that the original lacks."""


def is_known(key: str) -> bool:
    """Return whether ``key`` is an option of the engine or of the original, or starts with ``ge.`` (contract §5.2)."""
    return key in KNOWN_KEYS or key.startswith("ge.")


def table(width: int) -> str:
    """Return every option and environment variable as plain text.

    Args:
        width: number of columns.
    """
    lines: list[str] = []
    for own, title in ((False, "Options of the original"), (True, "Options of this package only")):
        lines += [title, "=" * len(title), ""]
        for row in rows():
            if row.own == own:
                lines += _entry(row, width)
    title = "Environment variables"
    lines += [title, "=" * len(title), ""]
    variables = {variable: f"replaces `{key}` where that is not given" for key, variable in _variables().items()}
    for variable, meaning in {**variables, **OTHER_VARIABLES}.items():
        lines += [variable, *_indented(meaning, width)]
    return "\n".join(lines)


def _variables() -> dict[str, str]:
    return {**ENVIRONMENT, **TOKEN_VARIABLES}


def _entry(row: Row, width: int) -> list[str]:
    key = f"  ({row.key})" if row.key else ""
    facts = f"type: {' or '.join(row.types)}; default: {row.default}"
    return [f"{row.attribute}{key}", *_indented(facts, width), *_indented(row.meaning, width), ""]


def _indented(text: str, width: int) -> list[str]:
    plain = text.replace("`", "")
    return textwrap.wrap(plain, width, initial_indent="    ", subsequent_indent="    ", break_long_words=False)
