"""Compares the latency of single copies, swaps and pulls with that of a bare copy loop. Prints a table.

`make bench-latency` measures the working tree. With `BASE=<commit>`, it also measures that commit, in alternate runs.
It builds both first, and then runs for about five minutes. If permitted, runs have real-time priority (`chrt`), so that
other programs disturb them less. Not for: the measured calls (`latency.rs`).
"""

from __future__ import annotations

import argparse
import re
import shutil
import statistics
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
BENCH = ROOT / "benches" / "latency.rs"
# Limit for calls of 256 KiB: p99.99 as a multiple of that of the bare loop.
JUDGED, MAX_RATIO = 256 << 10, 3.0
COLUMNS = ("p50", "p99", "p9999", "bare50", "bare99", "bare9999")
# Names that the benchmark uses, and their names in older commits.
RENAMED = {
    "llm_datadist_core::testing::memory": "llm_datadist_core::mem",
    "RemoteName": "RemoteName",
    "PullRows::Blocks { remote, local }": "PullRows::Blocks { far: remote, near: local }",
}
# (kind, size) of a call → its columns.
Run = dict[tuple[str, int], list[float]]


def output(command: list[str], where: Path) -> str:
    """Return the standard output of a command. Its standard error goes to the terminal."""
    return subprocess.run(command, cwd=where, check=True, stdout=subprocess.PIPE, text=True).stdout  # noqa: S603


def build(tree: Path, target: Path) -> Path:
    """Build the benchmark of one tree, and return the path of the program."""
    command = ["cargo", "build", "--release", "--package", "llm-datadist-core", "--bench", "latency"]
    command += ["--message-format", "json", "--target-dir", str(target)]
    found = re.findall(r'"executable":"([^"]*latency-[^"]*)"', output(command, tree))
    return Path(found[-1])


def other(commit: str) -> Path:
    """Unpack another commit, put the benchmark of this commit into it, and return its path."""
    tree = ROOT / "target" / "latency-base" / "tree"
    if tree.exists():
        shutil.rmtree(tree)
    tree.mkdir(parents=True)
    packed = tree / "packed.tar"
    output(["git", "archive", "--output", str(packed), commit], ROOT)
    with tarfile.open(packed) as archive:
        archive.extractall(tree, filter="data")
    source = BENCH.read_text(encoding="utf-8")
    core = tree / "crates/core/src"
    if not (tree / "crates" / "embed").exists():  # commits in which the core had the allocator
        source = source.replace("llm_datadist_embed::KeptLists", "llm_datadist_core::testing::memory::KeptLists")
    if not (core / "validate" / "rows.rs").exists():  # commits with a type for each direction
        source = re.sub(r"\bRows\b", "PullRows", source)
    if (core / "mem").exists():  # commits before the modules were renamed
        for name, before in RENAMED.items():
            source = source.replace(name, before)
    if not (core / "engine" / "operation.rs").exists():  # commits in which a method ran its call at once
        source = source.replace(".run()", "").replace("rows, Layers::ALL", "&rows, Layers::ALL")
    if not any((core / name).exists() for name in ("memory/list_allocator.rs", "mem/kept.rs")):
        without = r"use [^\n]*::KeptLists;\n|/// As in the libraries[^\n]*\n#\[global_allocator\]\n[^\n]*\n"
        source = re.sub(without, "", source)
    (tree / "benches" / "latency.rs").write_text(source, encoding="utf-8")
    manifest = tree / "crates" / "core" / "Cargo.toml"
    if 'name = "latency"' not in manifest.read_text(encoding="utf-8"):
        with manifest.open("a", encoding="utf-8") as file:
            file.write('\n[[bench]]\nname = "latency"\npath = "../../benches/latency.rs"\nharness = false\n')
    return tree


def priority() -> list[str]:
    """Return the command prefix for real-time priority, or nothing if it is not permitted."""
    ahead = ["chrt", "-f", "10"]
    try:
        output([*ahead, "true"], ROOT)
    except (OSError, subprocess.CalledProcessError):
        return []
    return ahead


def run(binary: Path, ahead: list[str], more: list[str]) -> Run:
    """Run the benchmark once, and return its rows."""
    rows = {}
    for line in output([*ahead, str(binary), "--plain", *more], ROOT).splitlines():
        if line.startswith("row,"):
            _, kind, size, _, *numbers = line.split(",")
            rows[kind, int(size)] = [float(number) for number in numbers]
    return rows


def medians(runs: list[Run], key: tuple[str, int]) -> dict[str, float]:
    """The median of each column over all runs."""
    columns = zip(*(run[key] for run in runs))
    return dict(zip(COLUMNS, (statistics.median(column) for column in columns)))


def ratio(runs: list[Run], key: tuple[str, int], name: str, bare: str) -> float:
    """The median of the ratios within each run, because a disturbance affects both values of a run."""
    at, beside = COLUMNS.index(name), COLUMNS.index(bare)
    return statistics.median(run[key][at] / run[key][beside] for run in runs)


def size_of(size: int) -> str:
    """A size in bytes as text with a unit."""
    return f"{size >> 20} MiB" if size >= 1 << 20 else f"{size >> 10} KiB"


def table(now: list[Run], base: list[Run]) -> bool:
    """Print the table. Return whether calls of 256 KiB stay within their limit."""
    kept = True
    head = ["call", "bytes", "p50 µs", "p99", "p99.99", "bare p99.99", "p50 / bare", "p99.99 / bare"]
    if base:
        head += ["before: p50 µs", "p50 / bare", "p99.99 / bare", "p50 after / before"]
    print("| " + " | ".join(head) + " |")
    print("| " + " | ".join(["---"] * len(head)) + " |")
    for key in now[0]:
        kind, size = key
        ours = medians(now, key)
        shares = [ratio(now, key, "p50", "bare50"), ratio(now, key, "p9999", "bare9999")]
        cells = [kind, size_of(size), *(f"{ours[name]:.1f}" for name in ("p50", "p99", "p9999", "bare9999"))]
        cells += [f"{share:.2f}" for share in shares]
        if size == JUDGED:
            kept = kept and shares[1] <= MAX_RATIO
            cells[-1] = f"**{cells[-1]}**"
        if base:
            before = medians(base, key)["p50"]
            cells += [f"{before:.1f}", f"{ratio(base, key, 'p50', 'bare50'):.2f}"]
            cells += [f"{ratio(base, key, 'p9999', 'bare9999'):.2f}", f"{ours['p50'] / before:.2f}"]
        print("| " + " | ".join(cells) + " |")
    return kept


def main() -> int:
    """Build, run in turn and print. Return 1 if calls of 256 KiB exceed their limit."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--base", default="", help="a commit to compare with")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("more", nargs="*", help="passed on to the benchmark, after --")
    options = parser.parse_args()
    builds = [build(ROOT, ROOT / "target")]
    if options.base:
        builds.append(build(other(options.base), ROOT / "target" / "latency-base" / "built"))
    ahead = priority()
    runs: list[list[Run]] = [[] for _ in builds]
    for round_number in range(options.rounds):
        for side in sorted(range(len(builds)), reverse=round_number % 2 == 1):
            print(f"round {round_number + 1} of {options.rounds}, {'before' if side else 'now'}", file=sys.stderr)
            runs[side].append(run(builds[side], ahead, options.more))
    kept = table(runs[0], runs[1] if options.base else [])
    way = "real-time priority" if ahead else "ordinary priority"
    print(
        f"\nMedians of {options.rounds} runs each, {way}; ratios to the bare loop are medians of ratios within one run."
    )
    print(
        f"Calls of 256 KiB: p99.99 at most {MAX_RATIO:g} times that of the bare loop: {'kept' if kept else 'NOT KEPT'}."
    )
    return 0 if kept else 1


if __name__ == "__main__":
    sys.exit(main())
