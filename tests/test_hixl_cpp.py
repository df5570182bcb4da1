"""The C++ classes `hixl::Hixl` and `adxl::AdxlEngine`: each call, with engines in one process.

Not for: headers and install (`test_cpp_install.py`), null pointers and handles (`crates/capi/src/tests/hixl.rs`), or
rules that the Python module shares, such as peers in other processes, which may stop or die (`test_hixl_*.py`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Callable

import pytest
from contract import NO_COMPILER

from cpp_programs import COMPILERS, run

if TYPE_CHECKING:
    from pathlib import Path

pytestmark = pytest.mark.skipif(not COMPILERS, reason=NO_COMPILER)

COMMANDS = "state options registration links ranges requests notifications connections threads adxl"


@pytest.mark.parametrize("command", COMMANDS.split())
@pytest.mark.parametrize("compiler", COMPILERS)
def test_calls_in_one_process(built: Callable[..., Path], compiler: str, command: str) -> None:
    assert run([built("hixl_calls", compiler, "hixl_types"), command]) == "done\n"
