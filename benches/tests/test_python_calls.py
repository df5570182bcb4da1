"""The benchmarks of single calls from Python: each row has its figures, and the bytes that it moves are checked.

Not for: figures, which no test asserts.
"""

import subprocess
import sys
from pathlib import Path

BENCHES = Path(__file__).resolve().parents[1]
BESIDE = [
    "copy of one 16 KiB block",
    "swap of one 16 KiB block",
    "swap of 512 blocks of 16 KiB",
    "pull of one 16 KiB block from a pool",
    "pull of 512 blocks of 16 KiB from a pool",
    "start of a pull of 512 blocks",
    "layer-wise push of 40 layers, one 4 KiB block",
    "allocate and free a cache of 80 tensors",
]


SINGLE = [
    "swap_blocks",
    "copy_blocks",
    "allocate, deallocate",
    "pull, pools",
    "push, pools",
    "pull, registered",
    "push, registered",
    "swap, 32,768 blocks",
]


def table(program, *words):
    """The rows of a program, without its two lines of heading: the name, and the figures."""
    order = [sys.executable, str(BENCHES / program), *words]
    done = subprocess.run(order, capture_output=True, text=True, timeout=300, check=False)  # noqa: S603  (this benchmark)
    assert done.returncode == 0, done.stderr
    rows = [line.partition("  ") for line in done.stdout.splitlines()[2:]]
    return {name.rstrip(): figures.split() for name, _, figures in rows}


def test_each_native_call_has_its_ratio_to_the_call_of_the_original():
    rows = table("python_overhead.py", "--rounds", "3", "--calls", "20")
    assert list(rows) == BESIDE
    for name, figures in rows.items():
        if name.startswith("start"):
            (native,) = figures
            assert float(native) > 0
            continue
        native, original, ratio, spread = figures
        low, high = map(float, spread.strip("()").split("-"))
        assert min(float(native), float(original), low) > 0, name
        assert low <= float(ratio) <= high, name


def test_single_calls_of_two_trees_have_their_ratio():
    rows = table("single_calls.py", "--slices", "3", "--calls", "20")
    assert list(rows) == SINGLE
    for then50, now50, ratio, then99, now99 in rows.values():
        assert 0 < float(then50) <= float(then99)
        assert 0 < float(now50) <= float(now99)
        assert float(ratio) > 0


def test_store_and_keeper_have_their_ratios():
    rows = table("store.py", "--rounds", "2", "--mebibytes", "8")
    sizes = [line for line in rows if line in ("64 KiB", "2 MiB")]
    assert sizes == ["64 KiB", "2 MiB"]
    for size in sizes:
        assert len(rows[size]) == 7
        assert min(map(float, rows[size])) > 0
