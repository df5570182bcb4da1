"""The benchmark of the module `hixl`: each row has its figures, and the bytes that it moves are checked.

Not for: figures, which no test asserts.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(*words):
    """The outcome of the benchmark."""
    order = [sys.executable, str(ROOT / "benches" / "one_sided.py"), *words]
    path = os.pathsep.join([str(ROOT / "packages" / "hixl" / "src"), *filter(None, [os.environ.get("PYTHONPATH")])])
    environment = {**os.environ, "PYTHONPATH": path}
    return subprocess.run(order, capture_output=True, text=True, timeout=300, check=False, env=environment)  # noqa: S603


def test_every_row_has_its_figures():
    done = run("--rounds", "1", "--calls", "3", "--pieces", "16,2048")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines[2:4]] == ["16", "2048"]
    for line in lines[2:4]:
        assert len(figures := [float(word) for word in line.split()[2:]]) == 6
        assert min(figures) > 0
    single = dict(re.findall(r"(\w+) ([\d.]+)(?:,|$)", lines[4].partition(": ")[2]))
    assert list(single) == ["pull", "READ", "push", "WRITE"]
    assert min(map(float, single.values())) > 0
    assert float(re.fullmatch(r"transfer_async of 8192 pieces: ([\d.]+) ms of the caller", lines[5])[1]) > 0


def test_wrong_sizes_are_refused():
    done = run("--pieces", "17")
    assert done.returncode == 2
    assert "--pieces takes 16,32,64" in done.stderr
