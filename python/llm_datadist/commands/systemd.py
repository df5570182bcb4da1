"""Messages to the service manager that has started this process (``sd_notify(3)``)."""

from __future__ import annotations

import contextlib
import os
import socket


def notify(*assignments: str) -> None:
    """Send assignments such as ``READY=1``. Do nothing if no service manager listens, or it takes no more.

    Args:
        assignments: each is a line of the message.
    """
    path = os.environ.get("NOTIFY_SOCKET", "")
    if not path.startswith(("/", "@")):
        return
    # The name of an abstract socket begins with a zero byte.
    address = f"\0{path[1:]}" if path.startswith("@") else path
    with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sender:
        sender.setblocking(False)
        sender.sendto("\n".join(assignments).encode(), address)
