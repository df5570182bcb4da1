"""Writes docs/options.md from the table of options of the package: options.py [--check].

With `--check` it compares instead, and exits with 1 if the page is out of date.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

from llm_datadist.option_table import ENVIRONMENT, OTHER_VARIABLES, TOKEN_VARIABLES, Row, rows

PAGE = Path(__file__).resolve().parents[2] / "docs" / "options.md"
HEAD = """# Options

This page lists every option of an engine. Set options as attributes of `LLMConfig`, and pass the result of
`generate_options()` to `LLMDataDist.init`. `init` also takes a dict with the keys and texts directly. `llm-datadist
options` ([Command line](cli.md)) prints the same list.

In each row, the first line is the attribute of `LLMConfig`, and the second one is the key in the dict.

`init` ignores unknown keys, and logs one line at ERROR for each, with the nearest known key ([Logging](logging.md)).
Setting an attribute of `LLMConfig` that does not exist logs the same kind of line. A name that looks like an option
which the original does not have, such as `verify`, is refused ([contract §5.2](contract.md#5.2)): `init` raises
`LLM_PARAM_INVALID`, and the attribute raises `AttributeError`.

The page is generated from the code by `make docs-options`.
"""
SECTION = re.compile(r"contract §(\d+(?:\.\d+)?)")
COLUMNS = """
| attribute and key | type and default | meaning |
| --- | --- | --- |
"""
ENVIRONMENT_HEAD = """
## Environment variables

`init` reads a variable only if the option is absent. An option that is given wins, whatever its value.

| variable | option or meaning |
| --- | --- |
"""


def line(row: Row) -> str:
    """Returns the line of one option."""
    key = f"<br>`{row.key}`" if row.key else ""
    types = ", ".join(f"`{name}`" for name in row.types)
    meaning = SECTION.sub(r"[contract §\1](contract.md#\1)", row.meaning.replace("|", "\\|"))
    return f"| `{row.attribute}`{key} | {types}; {row.default} | {meaning} |\n"


def page() -> str:
    """Returns the whole page."""
    text = HEAD
    text += "\n## Options of the original\n" + COLUMNS + "".join(line(row) for row in rows() if not row.own)
    text += "\n## Options of this package only\n" + COLUMNS + "".join(line(row) for row in rows() if row.own)
    text += ENVIRONMENT_HEAD
    for key, variable in {**ENVIRONMENT, **TOKEN_VARIABLES}.items():
        text += f"| `{variable}` | `{key}` |\n"
    return text + "".join(f"| `{variable}` | {meaning} |\n" for variable, meaning in OTHER_VARIABLES.items())


def main() -> int:
    """Writes or compares the page."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--check", action="store_true")
    if not parser.parse_args().check:
        PAGE.write_text(page(), encoding="utf-8")
        return 0
    if PAGE.read_text(encoding="utf-8") == page():
        return 0
    print("docs/options.md is out of date; run `make docs-options`", file=sys.stderr)
    return 1


if __name__ == "__main__":
    sys.exit(main())
