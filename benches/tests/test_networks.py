"""The benchmark between two network namespaces runs, and prints a row for each transfer."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parents[1] / "networks.py"


def possible() -> bool:
    """Whether this machine allows network namespaces."""
    return (
        os.geteuid() == 0
        and all(map(shutil.which, ("ip", "tc", "unshare", "nsenter")))
        and subprocess.run(["unshare", "--net", "true"], check=False, capture_output=True).returncode == 0  # noqa: S607
    )


@pytest.mark.skipif(not possible(), reason="this machine allows no network namespaces")
def test_the_table_has_a_row_for_each_transfer() -> None:
    command = [sys.executable, str(BENCH), "--rounds", "1", "--mbit", "8000", "--sizes", "1,16"]
    done = subprocess.run(command, check=True, capture_output=True, text=True, timeout=120)  # noqa: S603
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in done.stdout.splitlines()]
    assert [row[0] for row in rows[2:]] == [f"{way}, {size} MiB" for way in ("pull", "push") for size in (1, 16)]
    for row in rows[2:]:
        assert len(row) == 6
        assert all(float(cell.split(" ")[0]) > 0 for cell in row[1:])
