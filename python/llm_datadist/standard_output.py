"""Writes the results of a command to standard output and to a file.

A result that cannot be written, for example because the disk is full, is an ``OutputError``, which a command reports in
one line.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import Any, Optional, TextIO

__all__ = ["CommandParser", "OutputError", "complain", "tell", "write", "write_results"]

_STANDARD_OUTPUT = "-"


class OutputError(Exception):
    """A result could not be written."""


class CommandParser(argparse.ArgumentParser):
    """A parser whose help and version raise ``OutputError`` if they cannot be written. ``argparse`` ignores that."""

    def _print_message(self, message: str, file: Any = None) -> None:
        if file is not None and file is sys.stderr:
            complain(message.rstrip("\n"))
        else:  # `None` if standard output is closed
            write(message.rstrip("\n"))


def write(text: str) -> None:
    """Print a text. It is not an error if the reader closes the pipe early, as in ``... | head``.

    Raises:
        OutputError: standard output is closed, or takes no more.
    """
    if sys.stdout is None:  # the process was started without it
        raise OutputError("cannot write the results: standard output is closed")
    try:
        print(_encodable(text), flush=True)  # noqa: T201  (a command prints)
    except OSError as error:
        _abandon(error)


def write_results(text: str, data: str, destination: str | None) -> None:
    """Print a text, and write its data to a file.

    Args:
        text: the text for people.
        data: the same as JSON.
        destination: a path; ``"-"`` prints the data, and the text goes to standard error; ``None`` writes no data.

    Raises:
        OutputError: one of them could not be written. The other one was.
    """
    if destination == _STANDARD_OUTPUT:
        complain(text)
        write(data)
        return
    try:
        write(text)
    finally:
        if destination is not None:
            try:
                Path(destination).write_text(data + "\n", encoding="utf-8")
            except OSError as error:
                raise OutputError(f"cannot write the results to {destination}: {_reason(error)}") from error


def complain(text: str) -> None:
    """Print a text to standard error."""
    tell(sys.stderr, text + "\n")


def tell(stream: Optional[TextIO], text: str) -> None:
    """Write a text to standard error, or to a stream in its place. If that fails, nothing is left to report to."""
    if stream is not None:
        try:
            stream.write(text)
            stream.flush()
        except OSError:
            _discard(stream)


def _encodable(text: str) -> str:
    """Return the text with ``?`` for characters that the encoding of standard output lacks."""
    encoding = sys.stdout.encoding or "utf-8"
    return text.encode(encoding, "replace").decode(encoding)


def _abandon(error: OSError) -> None:
    """Drop what standard output did not take, and raise unless its reader has gone."""
    _discard(sys.stdout)
    if not isinstance(error, BrokenPipeError):
        raise OutputError(f"cannot write the results to standard output: {_reason(error)}") from error


def _discard(stream: TextIO) -> None:
    """Direct a stream to nowhere, so that its flush at exit succeeds."""
    with contextlib.suppress(OSError, ValueError):  # a stream of a test has no descriptor
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, stream.fileno())
        os.close(nowhere)


def _reason(error: OSError) -> str:
    return f"{error.strerror} (errno={error.errno})"
