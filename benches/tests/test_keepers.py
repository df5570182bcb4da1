"""The benchmark of a keeper beside its clients: every part runs, and the keeper finds what an LRU cache finds.

Not for: figures, which no test asserts.
"""

import re
import subprocess
import sys
from pathlib import Path

PROGRAM = Path(__file__).resolve().parents[1] / "keepers.py"
ROWS = (
    r"memory \(Pss\) of the keeper and 4 clients that have read 4 MiB: [\d,]+ MiB, [\d.]+ x that with 1 client .*",
    r"from Store\(\.\.\.\) in a new process to its first hit: [\d.]+ ms, at most [\d.]+ \(of 2\)",
    r"from kill -9 of a client until none of its 0 MiB is leased: [\d.]+ ms, at most [\d.]+ \(of 2\)",
    r"idle for 0 s with 8 clients: \d+ ms of CPU in the keeper, \d+ ms in the process of the clients .*; threads \d+",
    r"hit rate of 500 blocks on .*\.jsonl \(6 blocks\): 33.33 %; of an LRU cache: 33.33 %",
)


def test_every_row_is_printed(tmp_path):
    trace = tmp_path / "requests.jsonl"
    line = '{"timestamp": 0, "input_length": 1500, "output_length": 1, "hash_ids": [1, 2, %d]}\n'
    trace.write_text(line % 3 + line % 4)
    options = ["--mebibytes", "4", "--rounds", "2", "--seconds", "0.1", "--blocks", "500", "--trace", str(trace)]
    done = subprocess.run([sys.executable, PROGRAM, *options], stdout=subprocess.PIPE, text=True, check=True)  # noqa: S603
    machine, *rows, _ = done.stdout.splitlines()
    assert "cores" in machine
    assert len(rows) == len(ROWS)
    for row, expected in zip(rows, ROWS):
        assert re.fullmatch(expected, row), row
