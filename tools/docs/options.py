"""Writes docs/options.md and the stub of the properties of `LLMConfig` from the table of options: options.py [--check].

With `--check` it compares instead, and exits with 1 if a file is out of date.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_datadist.option_table import (
    ENVIRONMENT,
    NATIVE_ROWS,
    OTHER_VARIABLES,
    TOKEN_VARIABLES,
    Row,
    native_default,
    native_meaning,
    rows,
)
from llm_datadist.original.option_properties import OPTIONS

if TYPE_CHECKING:
    from llm_datadist.original.option_types import Option

ROOT = Path(__file__).resolve().parents[2]
HEAD = """# Options

This page lists every option of an engine. They are keyword arguments of `Engine`. Programs for LLM-DataDist set them as
attributes of `LLMConfig`. `llm-datadist options` ([Command line](cli.md)) prints the same list.

The page is generated from the code by `make docs-options`.
"""
SECTION = re.compile(r"contract §(\d+(?:\.\d+)?)")
COLUMNS = """
| attribute and key | type and default | meaning |
| --- | --- | --- |
"""
NATIVE_HEAD = """
## Options of `Engine`

Times are in seconds, and sizes in bytes. An unknown name raises `TypeError`, which names the most similar option. Where
`LLMConfig` has the same option, the meaning ends with its name there.

`Engine` also takes `name`, which peers, log lines and statistics show (1 to 128 bytes of UTF-8, printable; by default
`"<host name>/<process id>/<number>"`), and `metadata`, bytes that peers read (at most 16 KiB; empty by default).

| name | values and default | meaning |
| --- | --- | --- |
"""
LLM_CONFIG_HEAD = """
## Options of `LLMConfig`

In each row, the first line is the attribute of `LLMConfig`, and the second one is the key in the dict that
`generate_options()` returns and `LLMDataDist.init` takes.

`init` ignores unknown keys, and logs one line at ERROR for each, with the nearest known key ([Logging](logging.md)).
Setting an attribute of `LLMConfig` that does not exist logs the same kind of line. A name that looks like an option
which the original does not have, such as `verify`, is refused ([contract §5.2](llm-datadist/contract.md#5.2)): `init`
raises `LLM_PARAM_INVALID`, and the attribute raises `AttributeError`.

### Options of the original
"""
ENVIRONMENT_HEAD = """
## Environment variables

A variable is read only if the option is absent. An option that is given wins, whatever its value.

| variable | option or meaning |
| --- | --- |
"""


STUB_HEAD = """# Written by tools/docs/options.py.
from typing import Any, Optional, Union

from llm_datadist.original.option_types import Option

OPTIONS: tuple[Option[Any], ...]

class OptionProperties:
"""
CLASSES = {"list": "list[int]", "tuple": "tuple[int, ...]"}


def cell(meaning: str) -> str:
    """Returns a meaning for a table, with links to the contract."""
    return SECTION.sub(r"[contract §\1](llm-datadist/contract.md#\1)", meaning.replace("|", "\\|"))


def line(row: Row) -> str:
    """Returns the line of one option."""
    key = f"<br>`{row.key}`" if row.key else ""
    types = ", ".join(f"`{name}`" for name in row.types)
    return f"| `{row.attribute}`{key} | {types}; {row.default} | {cell(row.meaning)} |\n"


def page() -> str:
    """Returns the whole page."""
    text = HEAD + NATIVE_HEAD
    for row in NATIVE_ROWS:
        text += f"| `{row.native}` | {row.allowed}; {native_default(row)} | {cell(native_meaning(row))} |\n"
    text += LLM_CONFIG_HEAD + COLUMNS + "".join(line(row) for row in rows() if not row.own)
    text += "\n### Options of this package only\n" + COLUMNS + "".join(line(row) for row in rows() if row.own)
    text += ENVIRONMENT_HEAD
    for key, variable in {**ENVIRONMENT, **TOKEN_VARIABLES}.items():
        text += f"| `{variable}` | `{key}` |\n"
    return text + "".join(f"| `{variable}` | {meaning} |\n" for variable, meaning in OTHER_VARIABLES.items())


def annotation(option: Option[Any], types: list[str]) -> str:
    """Returns the class of a property, with the type of its value."""
    names = [CLASSES.get(name, name) for name in types]
    kind = names[0] if len(names) == 1 else f"Union[{', '.join(names)}]"
    return f"Option[Optional[{kind}]]" if option.initial is None else f"Option[{kind}]"


def stub() -> str:
    """Returns the stub of the properties of `LLMConfig`."""
    types = {row.attribute: row.types for row in rows()}
    return STUB_HEAD + "".join(f"    {option.name}: {annotation(option, types[option.name])}\n" for option in OPTIONS)


def main() -> int:
    """Writes or compares the files."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    old = []
    for name, text in (("docs/options.md", page()), ("python/llm_datadist/original/option_properties.pyi", stub())):
        if check and (ROOT / name).read_text(encoding="utf-8") != text:
            old.append(name)
        elif not check:
            (ROOT / name).write_text(text, encoding="utf-8")
    if old:
        print(f"{' and '.join(old)} out of date; run `make docs-options`", file=sys.stderr)
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
