"""`tools/differential`: what counts as a difference, and that one version equals itself."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[3]
sys.path[:0] = [str(ROOT / "tools"), str(ROOT / "tests")]

from differential.__main__ import Player, compare  # noqa: E402

LINE = {"call": [1, "paint"], "code": "LLM_SUCCESS", "text": "", "arrived": [], "sums": [{"c1": 7}, {}]}


@pytest.mark.parametrize(
    ("new", "status", "words"),
    [
        ([LINE, LINE], 0, "all 2 calls are equal; 0 have another text"),
        ([LINE, {**LINE, "code": "LLM_FAILED"}], 1, "call 2 differs in code"),
        ([LINE, {**LINE, "sums": [{"c1": 8}, {}]}], 1, "call 2 differs in sums"),
        ([{**LINE, "arrived": [[0, [[0, 1]]]]}, LINE], 1, "call 1 differs in arrived"),
        ([LINE, {**LINE, "text": "another"}], 0, "1 have another text"),
        ([LINE, {**LINE, "text": "at 127.0.0.1:5"}], 0, "1 have another text"),
        ([LINE], 1, "the players made 1 calls in place of 2"),
    ],
)
def test_differences(capsys: pytest.CaptureFixture[str], new: list[dict[str, Any]], status: int, words: str) -> None:
    assert compare(iter([LINE, LINE]), iter(new), 2) == status
    assert words in capsys.readouterr().out


def test_ports_and_processes_are_no_difference(capsys: pytest.CaptureFixture[str]) -> None:
    texts = ["127.0.0.1:5 and process 7 over unix:@llm.a1", "127.0.0.1:600 and process 8 over unix:@llm.b2"]
    old, new = ([{**LINE, "text": text}] for text in texts)
    assert compare(iter(old), iter(new), 1) == 0
    assert "0 have another text" in capsys.readouterr().out


def test_one_version_equals_itself(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--calls", "100", "--seed", "5"]
    with Player(sys.executable, given) as old, Player(sys.executable, given) as new:
        assert compare(old.lines(), new.lines(), 100) == 0, capsys.readouterr().out


def test_a_player_that_fails_is_an_error() -> None:
    with Player(sys.executable, ["--calls", "none"]) as player, pytest.raises(RuntimeError, match="status 2"):
        list(player.lines())
