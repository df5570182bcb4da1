"""Skips tests that need a call which an emulator lacks, as crates/core/tests/integration/emulation.rs does for Rust.

Without an emulator, nothing is skipped: the test fails if the call does not work.
"""

from __future__ import annotations

import platform
from pathlib import Path
from typing import Callable

import pytest

# ELF's number of each processor (e_machine).
MACHINES = {"x86_64": 62, "aarch64": 183}


def emulated() -> bool:
    """Return whether the kernel runs an executable for another processor than that of this Python."""
    # An emulator replaces /proc/self/exe by its guest, but not this file.
    with Path("/proc/thread-self/exe").open("rb") as executable:
        header = executable.read(20)
    return int.from_bytes(header[18:], "little") != MACHINES[platform.machine()]


def lacks(works: Callable[[], bool]) -> bool:
    """Return whether an emulator runs this process, and `works`, of `aarch64.probe`, says that a call does not work."""
    if not emulated():
        return False
    try:
        return not works()
    except OSError:
        return True


def needs(name: str, works: Callable[[], bool]) -> pytest.MarkDecorator:
    """Skip a test if emulation lacks the call `name`, which `works` tries."""
    return pytest.mark.skipif(lacks(works), reason=f"emulation has no {name}")
