"""The tests of `make test`: Rust beside Python, then what needs the machine for itself, and one total.

`test.py [--logs FOLDER] [--round NAME]`. A failed part keeps no other part from running. Every skipped test must be in
`tests/skips.txt`. Not for: building what is tested (`make`), or which tests there are (cargo and pytest).
"""

from __future__ import annotations

import argparse
import collections
import contextlib
import os
import re
import resource
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import NamedTuple, Optional

ROOT = Path(__file__).resolve().parents[2]
SKIPS = ROOT / "tests" / "skips.txt"
CARGO = ["cargo", "test", "--locked", "--workspace", "--exclude", "llm-datadist-py", "--no-fail-fast"]
PYTEST = [sys.executable, "-m", "pytest", "-v", "--color=no"]
PROCESSES = 3  # many tests wait most of the time, so there are more than two cores could run at once
OPEN_FILES = 20_000  # tests that run at the same time open more descriptors than the usual soft limit of 1,024 allows
EVERY_S = 20.0  # between two lines of progress where the output is no terminal
SHOWN_LINES = 80  # of the log of a failed part

RUST_ENDED = re.compile(r"^test (.+?) \.\.\. (ok|FAILED|ignored)(?:, (.*))?$")
# "[gw0] [  5%] PASSED tests/a.py::b" beside other processes; "tests/a.py::b PASSED [  5%]" alone
PYTHON_ENDED = re.compile(
    r"^(?:\[gw\d+\] \[ *\d+%\] |\S+::.* )(PASSED|FAILED|ERROR|SKIPPED)(?: [^\[]\S.*|(?: \(.*\))? +\[ *\d+%\])$"
)
PYTHON_SKIPS = re.compile(r"^SKIPPED \[(\d+)\] (\S+?)(?::\d+)?: (.*)$")
PYTHON_FAILED = re.compile(r"^(?:FAILED|ERROR) (\S+::.*)$")


class Counts(NamedTuple):
    """How many tests ended in each way."""

    passed: int = 0
    failed: int = 0
    skipped: int = 0

    def __add__(self, other: tuple[int, ...]) -> Counts:  # type: ignore[override]
        return Counts(*(a + b for a, b in zip(self, other)))

    def __str__(self) -> str:
        return f"{self.passed} passed, {self.failed} failed, {self.skipped} skipped"


class Part:
    """One command, whose output goes to a log, and what it says about its tests."""

    def __init__(self, name: str, command: list[str], log: Path) -> None:
        self.name, self.log = name, log
        self.counts, self.status = Counts(), 0
        self.failed: list[str] = []
        self.skips: collections.Counter[tuple[str, str]] = collections.Counter()  # (where, reason)
        self.process = subprocess.Popen(
            command,
            cwd=ROOT,
            env=environment(),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
        )
        self.reader = threading.Thread(target=self._read)
        self.reader.start()

    def _read(self) -> None:
        assert self.process.stdout is not None
        with self.process.stdout as output, self.log.open("w", encoding="utf-8") as log:
            for line in output:
                log.write(line)
                log.flush()
                self._note(line.rstrip("\n"))
        self.status = self.process.wait()

    def _note(self, line: str) -> None:
        """Note what a line says about a test."""
        if found := RUST_ENDED.match(line):
            test, result, reason = found.groups()
            self.counts += Counts(result == "ok", result == "FAILED", result == "ignored")
            if result == "FAILED":
                self.failed.append(test)
            if result == "ignored":
                self.skips["Rust", reason or "without a reason"] += 1
        elif found := PYTHON_SKIPS.match(line):
            self.skips[found[2], found[3]] += int(found[1])
        elif found := PYTHON_FAILED.match(line):
            self.failed.append(found[1])
        elif found := PYTHON_ENDED.match(line):
            result = found[1]
            self.counts += Counts(result == "PASSED", result in ("FAILED", "ERROR"), result == "SKIPPED")

    def end(self) -> None:
        """Kill the command and everything that it started in its session."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)

    @property
    def good(self) -> bool:
        """Whether the command succeeded, and no test failed."""
        return self.status == 0 and not self.counts.failed

    def report(self) -> None:
        """Print the tests that failed, and the end of the log."""
        print(f"\n{self.name}: failed (exit status {self.status}); the whole log is {self.log}", flush=True)
        for test in self.failed:
            print(f"  FAILED {test}")
        lines = self.log.read_text(encoding="utf-8", errors="replace").splitlines()[-SHOWN_LINES:]
        print("\n".join(f"    {line}" for line in lines), flush=True)


def environment() -> dict[str, str]:
    """The environment without what make sets for its own children."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith(("MAKE", "MFLAGS"))}
    return {**kept, "COLUMNS": "200", "CARGO_TERM_COLOR": "never"}


def run(commands: dict[str, list[str]], logs: Path) -> list[Part]:
    """Run commands beside each other, with progress on the standard output."""
    parts = [Part(name, command, logs / f"{name.lower().replace(' ', '-')}.log") for name, command in commands.items()]
    terminal, began, shown = sys.stdout.isatty(), time.monotonic(), time.monotonic()
    try:
        while any(part.reader.is_alive() for part in parts):
            time.sleep(0.3)
            line = "; ".join(f"{part.name}: {part.counts}" for part in parts) + f"; {time.monotonic() - began:.0f} s"
            if terminal:
                width = shutil.get_terminal_size().columns - 1
                print(f"\r\033[K{line[:width]}", end="", flush=True)
            elif time.monotonic() - shown >= EVERY_S:
                shown = time.monotonic()
                print(line, flush=True)
    except BaseException:
        for part in parts:
            part.end()
        raise
    finally:
        if terminal:
            print("\r\033[K", end="", flush=True)
    for part in parts:
        part.reader.join()
        word = "passed" if part.good else "FAILED"
        print(f"{part.name}: {word}: {part.counts}; {time.monotonic() - began:.0f} s", flush=True)
    return parts


def allowed_skips() -> dict[str, str]:
    """Reason → when it is allowed, from the committed list."""
    lines = [line for line in SKIPS.read_text(encoding="utf-8").splitlines() if line and not line.startswith("#")]
    return {reason: when for when, reason in (line.split(": ", 1) for line in lines)}


def holds(when: str) -> bool:
    """Whether a condition of the list of skips holds here."""
    conditions = {
        "always": True,
        "not root": os.geteuid() != 0,
        "kernel": True,
        "old Python": sys.version_info < (3, 10),
        "no C++": bool(os.environ.get("SKIP_CPP")),
    }
    return conditions[when]


def unexpected(parts: list[Part]) -> list[str]:
    """Return a line for each skipped test that the committed list does not allow here."""
    allowed = allowed_skips()
    return [
        f"{where}: {reason}"
        for part in parts
        for where, reason in part.skips
        if reason not in allowed or not holds(allowed[reason])
    ]


def summary(parts: list[Part], began: float) -> int:
    """Print what was skipped, what failed, and the total. Return the exit status."""
    skips: collections.Counter[str] = collections.Counter()
    for part in parts:
        for (where, reason), count in part.skips.items():
            skips[f"{reason} ({Path(where).name})"] += count
    if skips:
        print("\nskipped:")
        for why, count in sorted(skips.items(), key=lambda item: -item[1]):
            print(f"  {count:4} {why}")
    for part in parts:
        if not part.good:
            part.report()
    wrong = unexpected(parts)
    for line in wrong:
        print(f"skipped without permission: {line}; install what it names, or add it to {SKIPS.relative_to(ROOT)}")
    empty = [part.name for part in parts if not part.counts.passed]
    for name in empty:
        print(f"{name}: no test ran")
    total = Counts()
    for part in parts:
        total += part.counts
    good = all(part.good for part in parts) and not wrong and not empty
    print(f"\ntotal: {total}")
    print(f"make test: {'passed' if good else 'FAILED'} after {time.monotonic() - began:.0f} s", flush=True)
    return 0 if good else 1


def main(arguments: Optional[list[str]] = None) -> int:
    """Run all parts."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--logs", type=Path, default=ROOT / "target" / "log", help="folder of the logs")
    logs: Path = parser.parse_args(arguments).logs.resolve()
    logs.mkdir(parents=True, exist_ok=True)
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    most = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, hard))
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    began = time.monotonic()
    together = {
        "Rust": CARGO,
        "Python": [*PYTEST, "-m", "not serial", "-n", str(PROCESSES), "--dist", "worksteal"],
    }
    try:
        parts = run(together, logs)
        parts += run({"Python alone": [*PYTEST, "-m", "serial"]}, logs)
    except KeyboardInterrupt:
        print("make test: interrupted", file=sys.stderr)
        return 130
    return summary(parts, began)


if __name__ == "__main__":
    sys.exit(main())
