"""The sizes of the Python code and of some pages: limits that a change must not pass without a decision."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PYTHON = ROOT / "python"


def lines_of_code(text: str) -> int:
    """The number of lines that are neither blank nor part of a comment or a string that stands alone."""
    tree = ast.parse(text)
    blank = {number for number, line in enumerate(text.splitlines(), 1) if not line.strip() or line.strip()[0] == "#"}
    for node in ast.walk(tree):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            blank |= set(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    return len(text.splitlines()) - len(blank)


@pytest.mark.parametrize(("folder", "limit"), [("llm_datadist/original", 2214), (".", 11080)])
def test_python_stays_small(folder: str, limit: int) -> None:
    sizes = [lines_of_code(path.read_text(encoding="utf-8")) for path in (PYTHON / folder).rglob("*.py")]
    assert limit / 2 < sum(sizes) <= limit


@pytest.mark.parametrize(("page", "limit"), [("DESIGN.md", 250), ("docs/performance.md", 120)])
def test_pages_stay_short(page: str, limit: int) -> None:
    assert limit / 2 < len((ROOT / page).read_text(encoding="utf-8").splitlines()) <= limit


def test_glossary_of_the_code_is_short_and_its_own() -> None:
    texts = [(ROOT / "docs" / page).read_text(encoding="utf-8") for page in ("architecture.md", "concepts.md")]
    tables = [
        re.split(r"^## ", text.partition("\n## Glossary\n")[2], maxsplit=1, flags=re.MULTILINE)[0] for text in texts
    ]
    code, concepts = (
        [term for cell in re.findall(r"^\| ([^|]+) \|", table, re.MULTILINE)[2:] for term in cell.split(", ")]
        for table in tables
    )
    assert 20 < len(code) <= 40
    assert len(concepts) > 5
    assert not set(code) & set(concepts)


def test_lines_of_code_are_counted() -> None:
    code = '"""A module."""\n\nA = 1  # one\n"""Two\nlines."""\n# none\ndef f():\n    "None."\n    return """\nx"""\n'
    assert lines_of_code(code) == 4
