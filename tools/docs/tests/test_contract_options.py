"""§5 of the contract page, which is written by hand, states the keys, defaults and ranges of the table of options."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from llm_datadist import LLMConfig, LLMException
from llm_datadist.option_table import KNOWN_KEYS, OWN_KEYS, Row, rows
from llm_datadist.original.option_properties import OPTIONS

PAGE = (Path(__file__).resolve().parents[3] / "docs" / "llm-datadist" / "contract.md").read_text(encoding="utf-8")
PROPERTIES, _, KEYS = PAGE[PAGE.index('<a id="5">') : PAGE.index('<a id="5.3">')].partition('<a id="5.1">')
LISTED = {name: cells.split(" | ") for name, cells in re.findall(r"^\| `(\w+)` \| (.*) \|$", PROPERTIES, re.MULTILINE)}
ROWS = {row.attribute: row for row in rows() if not row.own}
INITIAL = {option.name: option.initial for option in OPTIONS}
WORDS = {"int32 above 0": (1, 2**31 - 1), "int32 0 or more": (0, 2**31 - 1), "uint32": (0, 2**32 - 1)}


def bounds(text: str) -> tuple[float, float] | None:
    """The smallest and the largest number that a text allows."""
    text = re.sub(r"`ValueError`|`|[(),]", "", text.replace("\N{MINUS SIGN}", "-").replace("or above", "or more"))
    if found := re.search(r"([\d.]+) to ([\d.]+)(\^\d+ - 1)?", text):
        return float(found[1]), float(found[2]) if not found[3] else 2.0 ** int(found[3][1:-4]) - 1
    text = " ".join(text.replace(" of 0", " 0").split())
    return next((limits for words, limits in WORDS.items() if words in text), None)


def default(row: Row) -> str:
    """The default of an option according to the contract; empty if it has none."""
    line = next((line for line in KEYS.splitlines() if line.startswith("|") and f"`{row.key}`" in line), "")
    stated = re.search(r"(\d+(?: ms)?) (?:by default|if missing)", line)
    return stated[1] if stated else re.sub(r'`|None|""', "", LISTED[row.attribute][1])


def accepts(name: str, value: Any) -> bool:
    config = LLMConfig()
    try:
        setattr(config, name, value)
    except (LLMException, ValueError):
        return False
    return bool(getattr(config, name) == value)


def test_contract_lists_the_properties_and_keys_of_the_original() -> None:
    assert sorted(LISTED) == sorted(ROWS)
    named = {name: re.findall(r"`((?:ge|llm)\.[\w.]+)`", cells[2])[:1] for name, cells in LISTED.items()}
    assert named == {name: [row.key] if row.key else [] for name, row in ROWS.items()}
    keys = set(re.findall(r"`(llm\.\w+)`", KEYS)) - {"llm.LinkToken"}  # a misspelt example
    assert keys == {key for key in KNOWN_KEYS - OWN_KEYS if key.startswith("llm.")}


@pytest.mark.parametrize("name", ROWS)
def test_contract_and_table_agree_on_types_and_default(name: str) -> None:
    accepted, initial, _ = LISTED[name]
    assert set(ROWS[name].types) - {"int"} <= set(re.findall(r"\w+", accepted.replace("a text", "str")))
    assert initial == f"`{INITIAL.get(name, {})!r}`".replace("'", '"')
    of_table = ROWS[name].default.strip("`").split(" in ")[0]
    assert default(ROWS[name]) == (of_table if re.match(r"\d|\{|False", of_table) else "")


@pytest.mark.parametrize("name", ROWS)
def test_contract_and_table_agree_on_the_range(name: str) -> None:
    limits, kind = bounds(LISTED[name][0]), float if "float" in ROWS[name].types else int
    if name in ("mem_pool_cfg", "host_mem_pool_cfg"):
        (shift,) = re.findall(r"^\| `page_shift` \| an integer from (\d+ to \d+)\. .*\| (\d+) ", KEYS, re.MULTILINE)
        stated = ROWS["mem_pool_cfg"].meaning
        assert f'"page_shift": {shift[0]}}}' in stated and f"`page_shift` is {shift[1]} by default" in stated  # noqa: PT018
        assert ("20 GiB" in ROWS[name].meaning) == (f"The {name.partition('_mem')[0]} pool has at most 20 GiB" in KEYS)
        return
    assert limits == bounds(ROWS[name].meaning)
    if limits:
        step = 0.001 if kind is float else 1
        tried = [limits[0] - step, *limits, limits[1] + step]
        assert [accepts(name, kind(value)) for value in tried] == [False, True, True, False]
