"""Refused calls: what one mistake raises, and which of two mistakes is reported."""

from __future__ import annotations

import itertools
from dataclasses import dataclass
from typing import Any, Callable

import pytest

from llm_datadist import LLMClusterInfo, LLMException, LLMStatusCode
from memory import Expected

# Wrong values for an integer of a stated width; `None` is listed apart where it is allowed.
NO_INTEGER: list[Any] = [True, False, 1.0, float("nan"), "1", "nan", b"1", [1], (1,), {}, object(), 1j]


def outside(low: int, high: int) -> list[int]:
    """Integers just and far outside [low, high]."""
    return [low - 1, high + 1, -(2**64), 2**64, 2**64 + 1, 2**200, -(2**200)]


def coded(code: LLMStatusCode) -> Expected:
    """An `LLMException` with this code."""
    return Expected(str(code), (LLMException,), (code,))


def fails(call: Callable[[], Any], expected: Expected, text: str = "", what: object = "") -> None:
    """The call must raise what is expected, with `text` in its message."""
    with pytest.raises(Exception) as caught:  # noqa: PT011  (judged below)
        call()
    try:
        expected.judge(caught.value)
        assert text in str(caught.value), str(caught.value)
    except AssertionError as failure:
        raise AssertionError(f"{what}: {failure}") from caught.value


def info(cluster: int | None = 2, remote: int = 1, local: int = 1, port: int = 1) -> LLMClusterInfo:
    """A cluster info with `remote` and `local` addresses."""
    made = LLMClusterInfo()
    if cluster is not None:
        made.remote_cluster_id = cluster
    for _ in range(remote):
        made.append_remote_ip_info("127.0.0.1", port)
    for _ in range(local):
        made.append_local_ip_info("127.0.0.1", 0)
    return made


@dataclass
class Row:
    """One mistake: the arguments to give instead, the error, and a piece of its message."""

    wrong: dict[str, Any]
    expected: Expected
    text: str = ""

    def judge(self, call: Callable[[], Any], what: object = "") -> None:
        fails(call, self.expected, self.text, what)


def check(call: Callable[..., Any], good: dict[str, Any], rows: list[Row]) -> None:
    """Make the call with every row alone, and with every two rows: the error is that of the first row."""
    cases = [(row, row.wrong) for row in rows]
    pairs = itertools.combinations(rows, 2)
    cases += [(a, {**b.wrong, **a.wrong}) for a, b in pairs if not a.wrong.keys() & b.wrong.keys()]
    assert len(cases) > 2 * len(rows), "next to no pairs"
    for row, wrong in cases:
        row.judge(lambda wrong=wrong: call(**{**good, **wrong}), wrong)
