"""What the commands share: writing results and errors, options, and numbers as text.

A result that cannot be written, for example because the disk is full, is an ``OutputError``, which a command reports in
one line.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import math
import os
import re
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, TextIO

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping, Sequence

STANDARD_OUTPUT = "-"
"""In place of the name of a file with JSON."""


class OutputError(Exception):
    """A result could not be written."""


class CommandParser(argparse.ArgumentParser):
    """A parser whose help and version raise ``OutputError`` if they cannot be written. ``argparse`` ignores that."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is not None and file is sys.stderr:
            complain(message.rstrip("\n"))
        else:  # `None` if standard output is closed
            write(message.rstrip("\n"))

    def check_json(self, destination: str | None, option: str = "--json") -> None:
        """Exit with 2 if the file of an option cannot be written."""
        if destination not in (None, STANDARD_OUTPUT):
            path = Path(str(destination))
            if path.is_dir():
                self.error(f"{option}: {str(path)!r} is a folder")
            try:
                path.touch()
            except OSError as error:
                self.error(f"{option}: {error}")


def seconds(digits: int) -> Callable[[str], float]:
    """Return the reader of an option with a number of seconds that has at most so many digits before the point."""

    def parse(text: str) -> float:
        if not re.fullmatch(rf"[0-9]{{1,{digits}}}(\.[0-9]{{1,3}})?", text) or not float(text):
            raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds from 0.001 to {10**digits - 1:,}")
        return float(text)

    return parse


def size(count: float) -> str:
    """Return a number of bytes with a unit."""
    for unit, factor in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= factor:
            return f"{count / factor:,.1f} {unit}"
    return f"{count:,.0f} B"


def percentiles(samples: Sequence[float]) -> tuple[float, float]:
    """Return the median and the 99th percentile of samples (the smallest sample that at least that share reaches)."""
    ordered = sorted(samples)
    half, most = (ordered[math.ceil(share * len(ordered)) - 1] for share in (0.5, 0.99))
    return half, most


def aligned(rows: Sequence[Sequence[str]], left: int) -> list[str]:
    """Return the rows of a table as lines: the first `left` columns are flush left, the others flush right."""
    widths = [max(map(len, column)) for column in zip(*rows)]
    return [
        "  ".join(
            cell.ljust(width) if column < left else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths))
        ).rstrip()
        for row in rows
    ]


def write(text: str) -> bool:
    """Print a text. It is not an error if the reader closes the pipe early, as in ``... | head``.

    Returns:
        Whether somebody still reads.

    Raises:
        OutputError: standard output is closed, or takes no more.
    """
    if sys.stdout is None:  # the process was started without it
        raise OutputError("cannot write the results: standard output is closed")
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "replace").decode(encoding), flush=True)  # noqa: T201  (a command prints)
    except OSError as error:
        _discard(sys.stdout)
        if not isinstance(error, BrokenPipeError):
            raise OutputError(f"cannot write the results to standard output: {_reason(error)}") from error
        return False
    return True


def write_results(text: str, results: Mapping[str, Any], destination: str | None) -> None:
    """Print a text, and write its data to a file.

    Args:
        text: the text for people.
        results: the same for programs; written as JSON.
        destination: a path; ``"-"`` prints the JSON, and the text goes to standard error; ``None`` writes no JSON.

    Raises:
        OutputError: one of them could not be written. The other one was.
    """
    data = json.dumps(results, indent=2)
    if destination == STANDARD_OUTPUT:
        complain(text)
        write(data)
        return
    try:
        write(text)
    finally:
        if destination is not None:
            with written_to(destination):
                Path(destination).write_text(data + "\n", encoding="utf-8")


@contextlib.contextmanager
def written_to(path: str) -> Iterator[None]:
    """Raise ``OutputError`` if the block cannot write its file."""
    try:
        yield
    except OSError as error:
        raise OutputError(f"cannot write the results to {path}: {_reason(error)}") from error


def complain(text: str) -> None:
    """Print a text to standard error. If that fails, nothing is left to report to."""
    if sys.stderr is not None:
        try:
            print(text, file=sys.stderr, flush=True)  # noqa: T201  (a command prints)
        except OSError:
            _discard(sys.stderr)


def _discard(stream: TextIO) -> None:
    """Direct a stream to nowhere, so that its flush at exit succeeds."""
    with contextlib.suppress(OSError, ValueError):  # a stream of a test has no descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _reason(error: OSError) -> str:
    return f"{error.strerror} (errno={error.errno})"
