"""Test ids for values: short, and the same in every process that collects the tests."""

from __future__ import annotations

import re
from typing import Any

LONGEST = 80


def short(value: Any) -> str:
    """Return the text of a value without memory addresses, and without the middle of a long one."""
    text = re.sub(r" at 0x[0-9a-f]+", "", repr(value) if not isinstance(value, str) else value)
    return text if len(text) <= LONGEST else f"{text[: LONGEST // 2]}...{len(text)}"
