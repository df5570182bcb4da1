"""Writes docs/options.md from the properties of `LlmConfig`: options.py [--check].

With `--check` it compares instead, and ends with 1 if the page is out of date. Not for: what an option does; its
docstring says that.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from llm_datadist import configs, datadist

PAGE = Path(__file__).resolve().parents[2] / "docs" / "options.md"
HEAD = """# Options

This page lists every option of an engine. Set options as attributes of `LLMConfig`, and pass the result of
`generate_options()` to `LLMDataDist.init`. `init` also takes a dict with the keys and texts directly. Options marked
"own option" exist only in this package; the others are those of the original. `init` ignores unknown keys.

The page is generated from the code.

| attribute | key | type | meaning |
| --- | --- | --- | --- |
"""
ENVIRONMENT = """
## Environment variables

`init` reads a variable only if the option is absent. An option that is given wins, whatever its value.

| variable | option |
| --- | --- |
"""
# Variables that no option stands for.
OTHERS = {
    "ASCEND_GLOBAL_LOG_LEVEL": "level of the logger `LLM_DATADIST` ([Logging](logging.md))",
    "LLM_DATADIST_LOG": "`off` silences the standard log of the C and C++ interface ([Logging](logging.md))",
}


def names(allowed: type | list[type]) -> str:
    """The classes of a value, for people."""
    classes = allowed if isinstance(allowed, list) else [allowed]
    return ", ".join(f"`{kind.__name__}`" for kind in classes)


def page() -> str:
    """The whole page."""
    text = HEAD
    for name, option in vars(configs.LlmConfig).items():
        if isinstance(option, configs._Option):  # noqa: SLF001  (the table of the options)
            meaning = (option.__doc__ or "").replace("``", "`").replace("|", "\\|").replace("\n", " ")
            text += f"| `{name}` | `{option.key}` | {names(option._allowed)} | {meaning} |\n"  # noqa: SLF001
    text += (
        "| `ge_options` | | `dict` | Further keys and texts, written before all others. Keys of the original's machine "
        "(`ge.*`) have no effect. |\n"
    )
    text += ENVIRONMENT
    variables = {**datadist._ENVIRONMENT, **datadist._TOKEN_VARIABLES}  # noqa: SLF001
    for key, variable in variables.items():
        text += f"| `{variable}` | `{key}` |\n"
    text += "".join(f"| `{variable}` | {meaning} |\n" for variable, meaning in OTHERS.items())
    return text


def main() -> int:
    """Writes or compares."""
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
