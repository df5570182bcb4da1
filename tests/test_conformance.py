"""`docs/conformance.md` agrees with the markers of the tests, and with the outcomes of the marked tests in this run.

Runs after all other tests (`contract.py` moves it to the end). Not for: what the marked tests prove.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from typing import Any

import pytest
from contract import (
    ABSENT,
    ITEMS,
    KEYS,
    NO_COMPILER,
    ROOT,
    SEEDS,
    SPEC,
    TABLE,
    Ended,
    Witness,
    lines,
    read_table,
    specified,
)


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


def test_the_table_says_how_the_tests_of_this_run_ended(request: pytest.FixtureRequest) -> None:
    """A skipped test is no success. Without the founding documents, or a C++ compiler, their tests are left out."""
    witness: Any = request.config.pluginmanager.get_plugin("contract")
    listed = read_table(TABLE.read_text(encoding="utf-8"))
    assert disagreements(witness, listed, there=SEEDS.is_dir()) == {}


def disagreements(
    witness: Witness, listed: dict[str, tuple[list[str], str]], *, there: bool
) -> dict[str, tuple[str, str]]:
    """Item → (state in the table, state in this run), where they differ and all tests of the item ran."""
    aside = {NO_COMPILER} if there else {NO_COMPILER, ABSENT}
    rest = Witness()
    rest.proofs = witness.proofs
    rest.ended = {
        test: Ended(ended.failed, "" if ended.skipped in aside else ended.skipped)
        for test, ended in witness.ended.items()
    }
    witness = rest
    return {
        key: (listed[key][1], now)
        for key, now in witness.states().items()
        if key in listed and witness.proofs[key] == listed[key][0] and listed[key][1] != now
    }


@pytest.mark.skipif(not SPEC.is_file(), reason=ABSENT)
def test_every_item_of_the_specification_is_ours() -> None:
    text = SPEC.read_text(encoding="utf-8")
    rows = specified(text)
    assert len(rows) > 15
    ours = {item.title: item.section for item in ITEMS if item.key.startswith("19.")}
    assert rows == ours
    assert [f"20.{number}" for number in lines(text)] == [key for key in KEYS if key.startswith("20.")]


GOOD, BAD, SKIPPED = Ended(failed=False, skipped=""), Ended(failed=True, skipped=""), Ended(failed=False, skipped="why")
