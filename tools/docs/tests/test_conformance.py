"""`docs/llm-datadist/conformance.md` lists what the markers of the tests say, and every item passes.

`make conformance` writes the outcomes, and fails no test. That no marked test is skipped is checked with all others
(`tests/skips.txt`). Not for: what the marked tests prove.
"""

from __future__ import annotations

import ast
import subprocess
import sys

import pytest
from contract import ITEMS, KEYS, ROOT, SPEC, TABLE, lines, present, read_table, specified


@pytest.fixture(scope="module")
def marked() -> dict[str, list[str]]:
    """Item → tests, from all tests, even if this run has only a part of them."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "--collect-only", "-m", "contract", "--show-contract", "tests"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    (said,) = [line for line in done.stdout.splitlines() if line.startswith("contract: ")]
    found: dict[str, list[str]] = ast.literal_eval(said.removeprefix("contract: "))
    return found


def test_every_item_has_a_test(marked: dict[str, list[str]]) -> None:
    assert len(KEYS) == len(set(KEYS))
    assert [key for key in KEYS if key not in marked] == []


def test_the_table_lists_what_the_markers_say(marked: dict[str, list[str]]) -> None:
    listed = read_table(TABLE.read_text(encoding="utf-8"))
    assert list(listed) == KEYS, "make conformance"
    assert {key: tests for key, (tests, _) in listed.items()} == marked, "make conformance"


def test_the_table_has_no_item_without_success() -> None:
    listed = read_table(TABLE.read_text(encoding="utf-8"))
    assert listed
    assert {key: state for key, (_, state) in listed.items() if state != "passes"} == {}


@present
def test_every_item_of_the_specification_is_ours() -> None:
    text = SPEC.read_text(encoding="utf-8")
    rows = specified(text)
    assert len(rows) > 15
    ours = {item.title: item.section for item in ITEMS if item.key.startswith("19.")}
    assert rows == ours
    assert [f"20.{number}" for number in lines(text)] == [key for key in KEYS if key.startswith("20.")]
