"""What a running replay shows on standard error: the rate of pulls, and what happens to the prefill process."""

from __future__ import annotations

import os
import shutil
import textwrap
import time
from typing import TYPE_CHECKING, TextIO

from llm_datadist.replay.report import rate, size
from llm_datadist.standard_output import tell

if TYPE_CHECKING:
    from llm_datadist.replay.node import Calls
    from llm_datadist.replay.plain_copy import PlainCopy
    from llm_datadist.replay.serve import Outcome

_IN_PLACE_S, _LINES_S = 0.25, 5.0
_FEWEST_COLUMNS = 20


class Progress:
    """One line that is updated in place on a terminal; elsewhere, and on a dumb terminal, a line every few seconds.

    Args:
        total: number of requests.
        pulls: the cost of all pulls so far.
        block_bytes: bytes of a block.
        stream: where the lines go; ``None`` if it is closed. A stream that takes no more does not end the replay.
        quiet: whether only `tell` shows something.
    """

    def __init__(self, total: int, pulls: Calls, block_bytes: int, stream: TextIO | None, *, quiet: bool) -> None:
        self.plain_copy: PlainCopy | None = None
        self._total = total
        self._pulls = pulls
        self._block_bytes = block_bytes
        self._stream = stream
        self._quiet = quiet
        self._terminal = stream is not None and stream.isatty()
        self._in_place = not quiet and self._terminal and os.environ.get("TERM", "dumb") != "dumb"
        self._every_s = _IN_PLACE_S if self._in_place else _LINES_S
        self._start = self._last = time.monotonic()
        self._bytes = self._nanoseconds = 0

    def __call__(self, outcome: Outcome) -> None:
        """Show how far the replay is, and the rate of the pulls since the last update, if an update is due."""
        now = time.monotonic()
        if self._quiet or now - self._last < self._every_s:
            return
        left_s = (now - self._start) * (self._total / max(outcome.requests, 1) - 1)
        text = f"{outcome.requests:,}/{self._total:,} done, {self._rates()}, "
        text += f"{size(outcome.verified_blocks * self._block_bytes)} right, {left_s:,.0f} s left"
        if self._in_place:
            columns = _columns()
            tell(self._stream, f"\r{text[:columns]:<{columns}}")
        else:
            tell(self._stream, f"{text}\n")
        self._last, self._bytes, self._nanoseconds = now, self._pulls.bytes, self._pulls.total_ns

    def start(self) -> float:
        """Count the time that is left from now on, and return this time by the monotonic clock."""
        self._start = self._last = time.monotonic()
        return self._start

    def note(self, text: str) -> None:
        """Show a line of text, unless progress is not shown."""
        if not self._quiet:
            self.tell(text)

    def tell(self, text: str) -> None:
        """Show a line of text, even if progress is not shown."""
        self.close()
        if self._terminal:
            text = textwrap.fill(text, _columns(), subsequent_indent="  ", break_on_hyphens=False)
        tell(self._stream, f"{text}\n")

    def close(self) -> None:
        """Clear the line that is updated in place."""
        if self._in_place:
            tell(self._stream, f"\r{'':<{_columns()}}\r")

    def _rates(self) -> str:
        """Return the rate of the pulls since the last update, beside that of a plain copy."""
        moved, nanoseconds = self._pulls.bytes - self._bytes, self._pulls.total_ns - self._nanoseconds
        text = f"pulls {rate(moved, nanoseconds)} GiB/s" if moved else "no pulls"
        return text if self.plain_copy is None else f"{text} (plain copy {rate(self.plain_copy.bytes_per_s)})"


def _columns() -> int:
    columns = shutil.get_terminal_size().columns - 1  # a line that wraps could not be updated in place
    return max(columns, _FEWEST_COLUMNS)
