"""Compares two versions of the package call by call: `python -m differential --base COMMIT [--calls N] [--seed N]`.

Ends with 1 at the first call whose code, rows or bytes differ, and shows it. Lists the texts of errors that differ.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import base

if TYPE_CHECKING:
    from collections.abc import Iterator

PATHS = [str(base.ROOT / "tools"), str(base.ROOT / "tests")]  # the player uses the helpers of the tests
SHOWN_TEXTS = 20
COMPARED = ("call", "code", "arrived", "sums")
# What two runs of one version do not have in common: ports and process ids.
CHANGING = re.compile(r"127\.0\.0\.1:\d+|process \d+|unix:@[\w.]+")


class Player:
    """A process that makes the calls in one environment, and its lines. The engine may write to its standard output."""

    def __init__(self, python: str, given: list[str]) -> None:
        reading, writing = os.pipe()
        self.process = subprocess.Popen(
            [python, "-W", "error", "-m", "differential.player", "--to", str(writing), *given],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(PATHS)},
            stdout=subprocess.DEVNULL,
            pass_fds=[writing],
        )
        os.close(writing)
        self.reading = os.fdopen(reading, encoding="utf-8")

    def lines(self) -> Iterator[dict[str, Any]]:
        """Yield what the process says of each call. Raises RuntimeError if it fails."""
        for line in self.reading:
            yield json.loads(line)
        if self.process.wait() != 0:
            raise RuntimeError(f"a player ended with status {self.process.returncode}")

    def __enter__(self) -> Player:  # noqa: PYI034
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        self.reading.close()


def compare(old: Iterator[dict[str, Any]], new: Iterator[dict[str, Any]], calls: int) -> int:
    """Compare the lines of two players, and print the result. Return the exit status."""
    texts: dict[tuple[str, str], int] = {}
    number = 0
    for number, (before, now) in enumerate(zip(old, new), 1):
        differs = [name for name in COMPARED if before[name] != now[name]]
        if differs:
            print(f"call {number} differs in {', '.join(differs)}:\n  old: {before}\n  new: {now}")
            return 1
        pair = (CHANGING.sub("…", before["text"]), CHANGING.sub("…", now["text"]))
        if pair[0] != pair[1]:
            texts[pair] = texts.get(pair, 0) + 1
        if number % 5000 == 0:
            print(f"{number:,} calls are equal", flush=True)
    if number != calls:
        print(f"the players made {number:,} calls in place of {calls:,}")
        return 1
    for (before, now), count in sorted(texts.items(), key=lambda item: -item[1])[:SHOWN_TEXTS]:
        print(f"{count} calls have another text:\n  old: {before}\n  new: {now}")
    print(f"all {calls:,} calls are equal; {sum(texts.values()):,} have another text")
    return 0


def main() -> int:
    """Run both players, and compare what they say."""
    parser = argparse.ArgumentParser(prog="differential", description=__doc__)
    which = parser.add_mutually_exclusive_group(required=True)
    which.add_argument("--base", help="the commit to compare with")
    which.add_argument("--python", help="an interpreter that has the package to compare with")
    parser.add_argument("--folder", type=Path, default=base.ROOT / "target" / "differential", help="where it is built")
    parser.add_argument("--calls", type=int, default=50_000)
    parser.add_argument("--seed", type=int, default=1)
    options = parser.parse_args()
    other = options.python or str(base.python_of(options.base, options.folder))
    given = ["--calls", str(options.calls), "--seed", str(options.seed)]
    with ExitStack() as held:
        old, new = (held.enter_context(Player(python, given)) for python in (other, sys.executable))
        return compare(old.lines(), new.lines(), options.calls)


if __name__ == "__main__":
    sys.exit(main())
