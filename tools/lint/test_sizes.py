"""The sizes of the Python code: limits that a change must not pass without a decision."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

PYTHON = Path(__file__).resolve().parents[2] / "python"


def lines_of_code(text: str) -> int:
    """The number of lines that are neither blank nor part of a comment or a string that stands alone."""
    tree = ast.parse(text)
    blank = {number for number, line in enumerate(text.splitlines(), 1) if not line.strip() or line.strip()[0] == "#"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            blank |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(text.splitlines()) - len(blank)


@pytest.mark.parametrize(("folder", "limit"), [("llm_datadist/original", 2300), (".", 11100)])
def test_python_stays_small(folder: str, limit: int) -> None:
    sizes = [lines_of_code(path.read_text(encoding="utf-8")) for path in (PYTHON / folder).rglob("*.py")]
    assert limit / 2 < sum(sizes) <= limit


def test_lines_of_code_are_counted() -> None:
    code = '"""A module."""\n\nA = 1  # one\n"""Two\nlines."""\n# none\ndef f():\n    "None."\n    return """\nx"""\n'
    assert lines_of_code(code) == 4
