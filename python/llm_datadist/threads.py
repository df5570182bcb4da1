"""Thread names for the operating system (``ps -L``, ``top -H``), which Python itself sets only since version 3.14."""

from __future__ import annotations

import contextlib
import threading

__all__ = ["name_this_thread"]


def name_this_thread() -> None:
    """Give the calling thread its Python name, shortened to the 15 characters that the kernel keeps."""
    path = f"/proc/self/task/{threading.get_native_id()}/comm"
    # Without /proc, the thread keeps the name of the process.
    with contextlib.suppress(OSError), open(path, "w", encoding="utf-8") as file:  # noqa: PTH123  (imported at start-up)
        file.write(threading.current_thread().name[:15])
