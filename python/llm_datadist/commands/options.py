"""Every option and environment variable as plain text: ``llm-datadist options``."""

from __future__ import annotations

import textwrap
from typing import TYPE_CHECKING

from llm_datadist.option_table import (
    ENVIRONMENT,
    NATIVE_ROWS,
    OTHER_VARIABLES,
    TOKEN_VARIABLES,
    native_default,
    native_meaning,
    rows,
)

if TYPE_CHECKING:
    from llm_datadist.option_table import Row


def table(width: int) -> str:
    """Return every option and environment variable as plain text.

    Args:
        width: number of columns.
    """
    lines: list[str] = []
    for own, title in ((False, "Options of the original"), (True, "Options of this package only")):
        lines += _heading(title)
        for row in rows():
            if row.own == own:
                lines += _entry(row, width)
    lines += _heading("Options of Engine")
    for row in NATIVE_ROWS:
        facts = f"{row.allowed}; default: {native_default(row)}"
        lines += [row.native, *_indented(facts, width), *_indented(native_meaning(row), width), ""]
    lines += _heading("Environment variables")
    variables = {**ENVIRONMENT, **TOKEN_VARIABLES}
    meanings = {variable: f"replaces `{key}` where that is not given" for key, variable in variables.items()}
    for variable, meaning in {**meanings, **OTHER_VARIABLES}.items():
        lines += [variable, *_indented(meaning, width)]
    return "\n".join(lines)


def _heading(title: str) -> list[str]:
    return [title, "=" * len(title), ""]


def _entry(row: Row, width: int) -> list[str]:
    key = f"  ({row.key})" if row.key else ""
    facts = f"type: {' or '.join(row.types)}; default: {row.default}"
    return [f"{row.attribute}{key}", *_indented(facts, width), *_indented(row.meaning, width), ""]


def _indented(text: str, width: int) -> list[str]:
    plain = text.replace("`", "")
    return textwrap.wrap(plain, width, initial_indent="    ", subsequent_indent="    ", break_long_words=False)
