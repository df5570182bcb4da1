"""Builds the fuzz targets with coverage and the address sanitizer, and runs each of them for a while.

Usage: run.py [--replay] [--seconds 60] [--jobs 2] [target ...]

Needs stable Rust and a C++ compiler (libFuzzer is compiled from source). `RUSTC_BOOTSTRAP=1` lets the stable compiler
link its own sanitizer runtime. Found inputs stay below `target/fuzz`; a crash is a file in `target/fuzz/crashes` that
`target/fuzz/build/x86_64-unknown-linux-gnu/release/<target> <file>` replays. `--replay` runs the targets once over the
seeds and over what earlier runs found, without libFuzzer, coverage or sanitizer; it needs a C compiler only. Not for:
what the targets assert (`targets`).
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parent
WORK = ROOT / "target" / "fuzz"
TRIPLE = "x86_64-unknown-linux-gnu"
TARGETS = ("frames", "messages", "plans", "options", "pool_json", "rank_table")
COVERAGE = (
    "-Cpasses=sancov-module",
    "-Cllvm-args=-sanitizer-coverage-level=4",
    "-Cllvm-args=-sanitizer-coverage-inline-8bit-counters",
    "-Cllvm-args=-sanitizer-coverage-pc-table",
    "-Cllvm-args=-sanitizer-coverage-trace-compares",
    "-Zsanitizer=address",
    "--cfg=fuzzing",
)
LONGEST = 16384  # bytes of an input
MEMORY_MB = 2048
INPUT_S = 10  # an input that takes longer is a failure


def build() -> None:
    """Compile the targets, each once; the host's own programs (build scripts) stay free of coverage."""
    env = dict(os.environ, RUSTC_BOOTSTRAP="1", CARGO_ENCODED_RUSTFLAGS="\x1f".join(COVERAGE))
    command = ["cargo", "build", "--release", "--locked", "--quiet", "--target", TRIPLE]
    subprocess.run(  # noqa: S603
        [*command, "--manifest-path", str(HERE / "Cargo.toml"), "--target-dir", str(WORK / "build")],
        env=env,
        check=True,
    )


def fuzz(target: str, seconds: int) -> tuple[str, int, int, float, Path]:
    """Run one target: its name, exit status, executions, seconds and log."""
    corpus, crashes = WORK / "corpus" / target, WORK / "crashes"
    for folder in (corpus, crashes, WORK / "logs"):
        folder.mkdir(parents=True, exist_ok=True)
    log = WORK / "logs" / f"{target}.log"
    command = [
        str(WORK / "build" / TRIPLE / "release" / target),
        f"-max_total_time={seconds}",
        f"-max_len={LONGEST}",
        f"-rss_limit_mb={MEMORY_MB}",
        f"-timeout={INPUT_S}",
        f"-artifact_prefix={crashes}/{target}-",
        "-print_final_stats=1",
    ]
    dictionary = HERE / "dictionaries" / f"{target}.txt"
    if dictionary.is_file():
        command.append(f"-dict={dictionary}")
    began = time.monotonic()
    with log.open("wb") as out:
        done = subprocess.run(  # noqa: S603
            [*command, str(corpus), str(HERE / "seeds" / target)], stdout=out, stderr=subprocess.STDOUT, check=False
        )
    counted = re.search(rb"stat::number_of_executed_units: (\d+)", log.read_bytes())
    return target, done.returncode, int(counted[1]) if counted else 0, time.monotonic() - began, log


def replay(targets: list[str]) -> int:
    """Run targets over their seeds and corpora, with a `main` that reads files in the place of libFuzzer."""
    library, folder = WORK / "replay" / "libreplay.a", WORK / "replay"
    folder.mkdir(parents=True, exist_ok=True)
    subprocess.run(["cc", "-O1", "-c", str(HERE / "replay.c"), "-o", str(folder / "replay.o")], check=True)  # noqa: S603, S607
    subprocess.run(["ar", "rcs", str(library), str(folder / "replay.o")], check=True)  # noqa: S603, S607
    command = ["cargo", "build", "--locked", "--quiet", "--manifest-path", str(HERE / "Cargo.toml"), "--bins"]
    subprocess.run(  # noqa: S603
        [*command, "--target-dir", str(folder / "build")],
        env=dict(os.environ, CUSTOM_LIBFUZZER_PATH=str(library)),
        check=True,
    )
    failed = 0
    for target in targets:
        folders = [HERE / "seeds" / target, WORK / "corpus" / target]
        inputs = sorted(path for top in folders if top.is_dir() for path in top.iterdir())
        done = subprocess.run([str(folder / "build" / "debug" / target), *map(str, inputs)], check=False)  # noqa: S603
        good = done.returncode == 0 and len(inputs) > 0
        failed += not good
        print(f"fuzz: {target}: {len(inputs)} inputs replayed{'' if good else ', FAILED'}", flush=True)
    return 1 if failed else 0


def main() -> int:
    """Build, run, and report; 1 if any target failed or executed nothing."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seconds", type=int, default=60, help="for each target")
    parser.add_argument("--jobs", type=int, default=2, help="targets at a time")
    parser.add_argument("targets", nargs="*", choices=[*TARGETS, []], help="all of them if none is named")
    parser.add_argument("--replay", action="store_true", help="run over seeds and corpora once, without fuzzing")
    given = parser.parse_args()
    if given.replay:
        return replay(given.targets or list(TARGETS))
    began = time.monotonic()
    build()
    print(f"fuzz: built in {time.monotonic() - began:.0f} s", flush=True)
    failed, total = 0, 0
    with ThreadPoolExecutor(given.jobs) as pool:
        runs = [pool.submit(fuzz, target, given.seconds) for target in given.targets or TARGETS]
        for run in runs:
            target, status, executions, seconds, log = run.result()
            total += executions
            good = status == 0 and executions > 0
            failed += not good
            result = "" if good else ", FAILED"
            print(f"fuzz: {target}: {executions:,} executions in {seconds:.0f} s{result}", flush=True)
            if not good:
                print(log.read_text(encoding="utf-8", errors="replace")[-6000:], flush=True)
    print(f"fuzz: {total:,} executions in all, {failed} targets failed", flush=True)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
