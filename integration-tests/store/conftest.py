"""A keeper in a process of its own, as operators run it."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from llm_datadist import KeeperObserver, PeerLost

if TYPE_CHECKING:
    from collections.abc import Iterator

# SGLang compiles the hash of its pages with ninja, once. Nothing is sent anywhere.
_PROGRAMS = Path(sys.executable).parent
os.environ.update(
    PATH=f"{_PROGRAMS}:{os.environ['PATH']}",
    TORCH_EXTENSIONS_DIR=str(_PROGRAMS.parent / "extensions"),
    HF_HUB_OFFLINE="1",
    DO_NOT_TRACK="1",
    LMCACHE_TRACK_USAGE="false",
    # Servers see no accelerator, so that the tests are the same everywhere.
    CUDA_VISIBLE_DEVICES="",
)


@contextlib.contextmanager
def serving(socket: Path, value: str) -> Iterator[subprocess.Popen[str]]:
    """Run `llm-datadist serve`, ready for servers."""
    command = [sys.executable, "-m", "llm_datadist", "serve", "--memory", "256MiB", "--value", value]
    with subprocess.Popen([*command, "--socket", str(socket)], stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
        try:
            assert process.stdout is not None
            assert process.stdout.readline().startswith("ready: ")
            yield process
        finally:
            process.kill()


def kill(process: subprocess.Popen[str], socket: Path) -> None:
    """Kill a keeper, and wait until it is away: the process that serves ends a little later."""
    process.kill()
    limit = time.monotonic() + 30
    process.wait(30)
    with contextlib.suppress(PeerLost):
        while True:
            assert time.monotonic() < limit
            with KeeperObserver(socket):
                time.sleep(0.01)


@pytest.fixture
def socket(tmp_path: Path) -> Path:
    return tmp_path / "k"
