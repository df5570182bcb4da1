"""Stores and keepers in processes of their own."""

from __future__ import annotations

import contextlib
import hashlib
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from llm_datadist import Store
from peers import eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

VALUE = 64 << 10
LIMIT = 60.0


def key(number: int) -> bytes:
    return hashlib.sha224(b"%d" % number).digest()


def value(number: int) -> bytes:
    return hashlib.sha256(b"%d" % number).digest() * (VALUE // 32)


def put(store: Store, *numbers: int) -> list[bool]:
    return store.put([key(number) for number in numbers], [value(number) for number in numbers])


def got(store: Store, number: int) -> bytes | None:
    """Return the value of a key, or `None` for a miss."""
    buffer = bytearray(VALUE)
    return bytes(buffer) if store.get([key(number)], [buffer]) == [True] else None


@contextlib.contextmanager
def process(*command: str, cwd: Path | None = None) -> Iterator[subprocess.Popen[str]]:
    """Run a process with two pipes, and kill it at the end."""
    started = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=cwd)  # noqa: S603
    try:
        yield started
    finally:
        started.kill()
        started.communicate()


def line(started: subprocess.Popen[str]) -> str:
    assert started.stdout is not None
    return started.stdout.readline()


def child_of(started: subprocess.Popen[str]) -> int:
    """Return the process id of the only child of a process: that which serves, of `llm-datadist serve`."""
    (pid,) = Path(f"/proc/{started.pid}/task/{started.pid}/children").read_text().split()
    return int(pid)


def stop(started: subprocess.Popen[str]) -> int:
    """Stop all threads of the process that serves, and return its id."""
    pid = child_of(started)
    os.kill(pid, signal.SIGSTOP)
    eventually(lambda: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "T")
    return pid


@contextlib.contextmanager
def serving(socket: Path) -> Iterator[subprocess.Popen[str]]:
    """Run `llm-datadist serve` with 64 values of 64 KiB, ready for clients."""
    command = (sys.executable, "-m", "llm_datadist", "serve", "--memory", "4MiB", "--socket", str(socket))
    with process(*command) as started:
        assert line(started) == f"ready: 64 values of 64KiB at {socket}\n"
        yield started


def opened(socket: Path, **options: Any) -> Store:
    return Store(socket, **{"namespace": "a model", "timeout": LIMIT, **options})


CHILD = """
import hashlib, sys
from llm_datadist import Store
store = Store(sys.argv[1], namespace="a model", timeout=60.0)
key = lambda number: hashlib.sha224(b"%d" % number).digest()
value = lambda number: hashlib.sha256(b"%d" % number).digest() * 2048
"""


@contextlib.contextmanager
def child(socket: Path, code: str) -> Iterator[subprocess.Popen[str]]:
    with process(sys.executable, "-c", CHILD + code, str(socket)) as started:
        yield started
