"""A wait of the benchmarks without a server."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable

TICK_S = 0.001  # vLLM's own loop waits as long after a step in which nothing ran
LIMIT_S = 240.0  # processes start slowly on a busy machine


def eventually(holds: Callable[[], bool]) -> None:
    """Wait until something holds."""
    end = time.monotonic() + LIMIT_S
    while not holds():
        if time.monotonic() > end:
            raise TimeoutError(f"not within {LIMIT_S:g} s")
        time.sleep(TICK_S)
