"""The benchmark of transfers in flight, events and messages: every part runs, checks its bytes, and prints its rows.

Not for: figures, which no test asserts.
"""

import re
import subprocess
import sys
from pathlib import Path

import pytest
import serving_latency

PROGRAM = Path(__file__).resolve().parents[1] / "serving_latency.py"
NUMBER = r"-?[\d,]+(?:\.\d+)?(?:e[+-]\d+)?"
LINE = re.compile(
    rf"(?P<name>.+?)  +(?P<median>{NUMBER}) (?P<unit>\S.*?) +\((?P<low>{NUMBER}) to (?P<high>{NUMBER})\)"
    rf"(?: +(?P<goal>[<>]= {NUMBER}) (?P<met>met|MISSED))?"
)
ROWS = {
    "start pull, 1 block, lists": ("us", "<= 20"),
    "start pull, 512 blocks, lists": ("us", "<= 20"),
    "start pull, 512 blocks, int64 arrays": ("us", "<= 20"),
    "events, nothing has happened": ("us", "<= 1"),
    "events, 64 completed transfers": ("us", "<= 20"),
    **{
        f"48 pulls of 64 KiB, {transport}, {what}": (unit, goal)
        for transport in ("shm", "tcp")
        for what, unit, goal in (
            ("waiting for each, 1 thread", "GB/s", None),
            ("waiting for each, 2 threads", "GB/s", None),
            ("waiting for each, 4 threads", "GB/s", None),
            ("all in flight from one thread", "GB/s", None),
            ("in flight / the best row that waits", "ratio", ">= 0.95" if transport == "shm" else None),
        )
    },
    "pull of 16 KiB, alone": ("us", None),
    "pull of 16 KiB, notify": ("us", None),
    "pull of 16 KiB, a known grant": ("us", None),
    "pull of 16 KiB, a new grant": ("us", None),
    "pull of 16 KiB, a new grant and notify": ("us", None),
    "pull of 16 KiB, notify / a new grant": ("ratio", "<= 1.3"),
    "pull of 16 KiB, a new grant and notify / a new grant": ("ratio", None),
    "messages of 64 bytes, shm": ("per second", ">= 200,000"),
    "messages of 64 bytes, tcp": ("per second", ">= 50,000"),
    "start a layer-wise push of 40 layers": ("us", "<= 100"),
    "Transfer.ready, layers one after the other": ("us", "<= 3"),
    "Transfer.ready, layers 500 us apart": ("us", "<= 3"),
    "Transfer.ready, layers 500 us apart, transfer_poll=1e-3": ("us", "<= 3"),
    "waking a sleeping process by a write to a pipe": ("us", None),
    "lend 32 blocks, and revoke": ("us", None),
    "memory of a transfer in flight, without its list of blocks": ("bytes", "<= 1,024"),
    "memory of a transfer in flight, each block of its list": ("bytes", None),
    "memory of a transfer in flight, with a list of one block": ("bytes", None),
    "memory of a transfer in flight, with a list of one block and its Python handle": ("bytes", None),
    "CPU of two idle linked processes, before the first call of events": ("ms/0.2 s", None),
    "CPU of two idle linked processes, after fileno, events and messages": ("ms/0.2 s", None),
    "CPU of two idle linked processes, difference": ("ms/0.2 s", "<= 0"),
}


def run(*words):
    order = [sys.executable, str(PROGRAM), *words]
    return subprocess.run(order, capture_output=True, text=True, timeout=300, check=False)  # noqa: S603  (this benchmark)


def number(text):
    return float(text.replace(",", ""))


def test_every_row_has_a_figure_its_spread_and_its_goal():
    done = run("--quick")
    assert done.returncode == 0, done.stderr
    header, *lines = done.stdout.splitlines()
    assert header.split() == ["median", "(lowest", "to", "highest)", "goal"]
    rows = [LINE.fullmatch(line) for line in lines]
    assert all(rows), [line for line, row in zip(lines, rows) if not row]
    assert {row["name"]: (row["unit"], row["goal"]) for row in rows} == ROWS
    assert [row["name"] for row in rows] == list(ROWS)
    for row in rows:
        low, median, high = (number(row[what]) for what in ("low", "median", "high"))
        assert low <= median <= high, row["name"]


@pytest.mark.parametrize(
    ("goal", "figures", "end"),
    [
        ({"at_most": 20}, [21, 20, 3], "20 us (3 to 21) <= 20 met"),
        ({"at_most": 20}, [21, 20.5, 3], "20.5 us (3 to 21) <= 20 MISSED"),
        ({"at_least": 1200}, [1200], "1,200 us (1,200 to 1,200) >= 1,200 met"),
        ({"at_least": 0.95}, [0.9, 0.94], "0.92 us (0.9 to 0.94) >= 0.95 MISSED"),
        ({}, [0.001234], "0.00123 us (0.00123 to 0.00123)"),
    ],
)
def test_the_median_decides_whether_a_goal_is_met(goal, figures, end):
    line = serving_latency.Row("start", figures, "us", **goal).line()
    assert line.split() == ["start", *end.split()]
    assert LINE.fullmatch(line)


def test_parts_are_selected_by_name():
    done = run("--quick", "--only", "events")
    assert done.returncode == 0, done.stderr
    assert [line.split(",")[0] for line in done.stdout.splitlines()[1:]] == ["events", "events"]
    wrong = run("--only", "events,event")
    assert wrong.returncode == 2
    assert "['event'] are not among start, events, " in wrong.stderr
