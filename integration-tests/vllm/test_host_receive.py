"""The benchmark of a receive through host buffers runs, and checks the bytes. Not for: its figures.

It is here because it needs torch, which the environment of the other tests of benchmarks lacks.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = Path(__file__).resolve().parents[2] / "benches" / "vllm" / "host_receive.py"


def run(*options: str) -> subprocess.CompletedProcess[str]:
    order = [sys.executable, PROGRAM, *options]
    return subprocess.run(order, capture_output=True, text=True, check=False)  # noqa: S603 - our own program


@pytest.mark.subset
def test_one_round_has_the_known_counts() -> None:
    done = run("--rounds", "1", "--tokens", "128")
    assert done.returncode == 0, done.stderr
    rows = dict(re.findall(r"^\| (.*?) \| (.*) \| .* \|$", done.stdout, re.MULTILINE))
    assert rows["128 tokens"] == "direct | host buffers"
    assert (rows["pulls"], rows["copies"]) == ("1 | 2", "0 | 2")
    direct, other = map(float, rows["CPU of decode, ms"].split(" | "))
    assert direct > 0
    assert other > 0


@pytest.mark.subset
@pytest.mark.parametrize("tokens", ["5089", "0", "7,", "-1", "x"])
def test_lengths_for_which_there_is_no_memory_are_refused(tokens: str) -> None:
    done = run(f"--tokens={tokens}")
    assert (done.returncode, done.stdout) == (2, "")
    assert f"--tokens={tokens} is not a list of numbers from 1 to 5088" in done.stderr
