"""Single calls at two commits in turn: how long copies, swaps and pulls take beside a bare copy loop. Prints a table.

`make bench-latency` measures the working tree; `make bench-latency BASE=<commit>` that commit as well, A B A B. Builds both
first, then runs for about five minutes. Where the machine allows it, all runs have real-time priority (`chrt`), so that
other programs disturb them less. Not for: what is measured (`latency.rs`).
"""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BENCH = ROOT / "benches" / "latency.rs"
# Calls of 256 KiB: p99.99 at most so many times that of the bare loop.
JUDGED, MOST = 256 << 10, 3.0
Row = dict[str, list[float]]
COLUMNS = ("p50", "p99", "p9999", "bare50", "bare99", "bare9999")


def build(tree: Path, target: Path) -> Path:
    """The benchmark of one tree, built outside of the clock."""
    command = ["cargo", "build", "--release", "--locked", "--package", "llm-datadist-core", "--bench", "latency"]
    command += ["--message-format", "json", "--target-dir", str(target)]
    told = subprocess.run(command, cwd=tree, check=True, stdout=subprocess.PIPE, text=True).stdout
    found = re.findall(r'"executable":"([^"]*latency-[^"]*)"', told)
    return Path(found[-1])


def other(commit: str) -> Path:
    """A tree of another commit with the benchmark of this one."""
    tree = ROOT / "target" / "latency-base"
    if tree.exists():
        shutil.rmtree(tree)
    tree.mkdir(parents=True)
    packed = subprocess.run(["git", "archive", commit], cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout
    subprocess.run(["tar", "-x", "-C", str(tree)], input=packed, check=True)
    source = BENCH.read_text(encoding="utf-8")
    if not (tree / "crates/core/src/mem/kept.rs").exists():
        source = source.replace("mem::{KeptLists, Region}", "mem::Region")
        source = re.sub(r"/// As the libraries[^\n]*\n#\[global_allocator\]\n[^\n]*\n", "", source)
    (tree / "benches" / "latency.rs").write_text(source, encoding="utf-8")
    manifest = tree / "crates" / "core" / "Cargo.toml"
    if 'name = "latency"' not in manifest.read_text(encoding="utf-8"):
        with manifest.open("a", encoding="utf-8") as file:
            file.write('\n[[bench]]\nname = "latency"\npath = "../../benches/latency.rs"\nharness = false\n')
    return tree


def priority() -> list[str]:
    """How to run with real-time priority, if that is allowed."""
    ahead = ["chrt", "-f", "10"]
    allowed = shutil.which("chrt") and subprocess.run([*ahead, "true"], check=False, capture_output=True).returncode == 0
    return ahead if allowed else []


def run(binary: Path, ahead: list[str], more: list[str]) -> dict[tuple[str, int], list[float]]:
    told = subprocess.run([*ahead, str(binary), "--plain", *more], check=True, stdout=subprocess.PIPE, text=True).stdout
    rows = {}
    for line in told.splitlines():
        if line.startswith("row,"):
            _, kind, size, _, *numbers = line.split(",")
            rows[kind, int(size)] = [float(number) for number in numbers]
    return rows


def medians(runs: list[dict[tuple[str, int], list[float]]], key: tuple[str, int]) -> dict[str, float]:
    columns = zip(*(run[key] for run in runs))
    return dict(zip(COLUMNS, (statistics.median(column) for column in columns)))


def ratio(runs: list[dict[tuple[str, int], list[float]]], key: tuple[str, int], name: str, bare: str) -> float:
    """The median of the ratios within one run each: what disturbs a run disturbs both."""
    at = [COLUMNS.index(name), COLUMNS.index(bare)]
    return statistics.median(run[key][at[0]] / run[key][at[1]] for run in runs)


def size_of(size: int) -> str:
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def table(now: list[dict[tuple[str, int], list[float]]], base: list[dict[tuple[str, int], list[float]]]) -> bool:
    """Prints the table, and says whether calls of 256 KiB keep their bound."""
    kept = True
    head = ["call", "bytes", "p50 µs", "p99", "p99.99", "bare p99.99", "p50 / bare", "p99.99 / bare"]
    if base:
        head += ["before: p50 / bare", "p99.99 / bare", "p50 after / before"]
    print("| " + " | ".join(head) + " |")
    print("| " + " | ".join(["---"] * len(head)) + " |")
    for key in now[0]:
        kind, size = key
        ours = medians(now, key)
        shares = [ratio(now, key, "p50", "bare50"), ratio(now, key, "p9999", "bare9999")]
        cells = [kind, size_of(size), *(f"{ours[name]:.1f}" for name in ("p50", "p99", "p9999", "bare9999"))]
        cells += [f"{share:.2f}" for share in shares]
        if size == JUDGED:
            kept &= shares[1] <= MOST
            cells[-1] = f"**{cells[-1]}**"
        if base:
            before = [ratio(base, key, "p50", "bare50"), ratio(base, key, "p9999", "bare9999")]
            cells += [f"{share:.2f}" for share in before]
            cells.append(f"{shares[0] / before[0]:.2f}")
        print("| " + " | ".join(cells) + " |")
    return kept


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", default="", help="a commit to compare with")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("more", nargs="*", help="passed on to the benchmark, after --")
    options = parser.parse_args()
    builds = [build(ROOT, ROOT / "target")]
    if options.base:
        builds.append(build(other(options.base), ROOT / "target" / "latency-base" / "target"))
    ahead, runs = priority(), [[] for _ in builds]  # type: list[str], list[list[dict[tuple[str, int], list[float]]]]
    for turn in range(options.rounds):
        for side in (range(len(builds)) if turn % 2 == 0 else reversed(range(len(builds)))):
            print(f"round {turn + 1} of {options.rounds}, {'before' if side else 'now'}", file=sys.stderr)
            runs[side].append(run(builds[side], ahead, options.more))
    kept = table(runs[0], runs[1] if options.base else [])
    way = "real-time priority" if ahead else "ordinary priority"
    print(f"\nMedians of {options.rounds} runs each, {way}; ratios are medians of ratios within one run.")
    print(f"Calls of 256 KiB: p99.99 at most {MOST:g} times that of the bare loop: {'kept' if kept else 'NOT KEPT'}.")
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
