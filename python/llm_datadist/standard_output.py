"""Writes the results of a command to standard output."""

from __future__ import annotations

import os
import sys

__all__ = ["write"]


def write(text: str) -> None:
    """Print a text. It is not an error if the reader closes the pipe early, as in ``... | head``."""
    try:
        print(text, flush=True)  # noqa: T201  (a command prints)
    except BrokenPipeError:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # so that the flush at exit succeeds
