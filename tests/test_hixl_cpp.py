"""The C++ classes `hixl::Hixl` and `adxl::AdxlEngine`: each call in one process, and a peer in another one.

Not for: headers and install (`test_cpp_install.py`), null pointers and handles (`crates/capi/src/tests/hixl.rs`), or
rules that the Python module shares, such as peers that stop or die (`test_hixl_*.py`).
"""

from __future__ import annotations

import subprocess
from typing import TYPE_CHECKING, Callable

import pytest
from contract import NO_COMPILER

import hixl
from cpp_programs import COMPILERS, run
from hixl_ends import End, Pair, ends, listener, pattern, ready
from peers import LIMIT

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(not COMPILERS, reason=NO_COMPILER)

COMMANDS = "state options registration links ranges requests notifications connections threads adxl"


@pytest.mark.parametrize("command", COMMANDS.split())
@pytest.mark.parametrize("compiler", COMPILERS)
def test_calls_in_one_process(built: Callable[..., Path], compiler: str, command: str) -> None:
    assert run([built("hixl_calls", compiler, "hixl_types"), command]) == "done\n"


@pytest.mark.parametrize("transport", ["auto", "tcp"])
def test_peer_in_another_process(built: Callable[..., Path], monkeypatch: pytest.MonkeyPatch, transport: str) -> None:
    """The class and the Python module read and write each other's memory. The one that owns it makes no call."""
    monkeypatch.setenv("LLM_DATADIST_TRANSPORT", transport)
    half, address = 4 << 20, listener()
    with ends(End) as (end,):
        at = ready(end, address, 1, size=2 * half)
        command = [built("hixl_calls", COMPILERS[0], "hixl_types"), "peer", address, str(at)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
            assert process.stdout is not None
            remote, remote_at = process.stdout.readline().split()
            expected = pattern(1, half) + b"\7" * half
            assert end.bytes("m") == expected
            pair = Pair(end, at, None, int(remote_at), remote, 2 * half)
            assert pair.connect() == hixl.SUCCESS
            end.fill("m", b"\0")
            assert pair.move(hixl.READ) == hixl.SUCCESS
            assert end.bytes("m") == expected
            end.fill("m", b"\5")
            assert pair.move(hixl.WRITE) == hixl.SUCCESS
            assert end.notifies() == (hixl.SUCCESS, [("moved", "\0é")])
            assert end.notify(remote, "moved", "back") == hixl.SUCCESS
            assert process.communicate("\n", LIMIT)[0] == "done\n"
        assert process.returncode == 0
