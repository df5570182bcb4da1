"""Names of Python's threads as the system shows them (``ps -L``, ``top -H``).

Python gives its threads names of its own and tells the system none before 3.14. Not for: threads of the engine, which
are named where they start.
"""

from __future__ import annotations

import contextlib
import threading

__all__ = ["name_this_thread"]


def name_this_thread() -> None:
    """Give the calling thread its Python name, cut to the 15 characters that the system keeps."""
    path = f"/proc/self/task/{threading.get_native_id()}/comm"
    # Without /proc the name stays that of the process.
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:  # noqa: PTH123  (imported at start-up)
        file.write(threading.current_thread().name[:15])
