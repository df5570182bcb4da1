"""A keeper in a process of its own, as operators run it, which can be stopped for a while."""

from __future__ import annotations

import os
import signal
import sys
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from native.stores import line, process, stop

if TYPE_CHECKING:
    import subprocess
    from collections.abc import Iterator
    from pathlib import Path

__all__ = ["serving", "stopped"]


@contextmanager
def serving(socket: Path) -> Iterator[subprocess.Popen[str]]:
    """Run `llm-datadist serve` with values of 4 KiB."""
    sizes = ("--memory", "1MiB", "--value", "4KiB")
    with process(sys.executable, "-m", "llm_datadist", "serve", "--socket", str(socket), *sizes) as started:
        assert line(started).startswith("ready: ")
        yield started


@contextmanager
def stopped(started: subprocess.Popen[str]) -> Iterator[int]:
    """Stop the process that serves, which is the child of the other one. Its id is given."""
    pid = stop(started)
    try:
        yield pid
    finally:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGCONT)
