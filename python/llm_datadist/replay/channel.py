"""Messages between the two processes of a replay: one JSON object per line, over two pipes.

Every wait has a time limit.
"""

from __future__ import annotations

import json
import os
import select
import time
from typing import Any

Message = dict[str, Any]

_CHUNK = 1 << 16


class ChannelError(Exception):
    """The other process closed the channel, did not answer in time, or sent an invalid message."""


class Channel:
    """One end of a channel. Every wait has a time limit.

    Args:
        reading: descriptor of the pipe that is read.
        writing: descriptor of the pipe that is written; it is made non-blocking.
    """

    def __init__(self, reading: int, writing: int) -> None:
        self._reading = reading
        self._writing = writing
        self._received = bytearray()
        self._searched = 0
        os.set_blocking(writing, False)

    def send(self, message: Message, limit_s: float) -> None:
        """Send one message. Raises ChannelError.

        While the pipe is full, this reads as well. Otherwise two ends that both write could wait for each other.
        """
        rest = memoryview(json.dumps(message, separators=(",", ":")).encode() + b"\n")
        until = time.monotonic() + limit_s
        while rest:
            rest = rest[self._write(rest) :]
            if rest:
                self._wait(until, limit_s, "accepted no message")

    def receive(self, limit_s: float, *fields: str) -> Message:
        """Wait for the next message, which must have these fields, and return it. Raises ChannelError."""
        until = time.monotonic() + limit_s
        while (end := self._received.find(b"\n", self._searched)) < 0:
            self._searched = len(self._received)
            self._wait(until, limit_s, "did not answer", sending=False)
        line = bytes(self._received[:end])
        del self._received[: end + 1]
        self._searched = 0
        try:
            message = json.loads(line)
        except ValueError:
            message = None
        if not isinstance(message, dict) or not all(field in message for field in fields):
            raise ChannelError(f"sent an invalid message: {line[:80]!r}")
        return message

    def _write(self, data: memoryview) -> int:
        try:
            return os.write(self._writing, data)
        except BlockingIOError:
            return 0
        except OSError as error:
            raise ChannelError(f"closed the channel ({error.strerror})") from error

    def _wait(self, until: float, limit_s: float, silent: str, *, sending: bool = True) -> None:
        """Wait until bytes arrive, and read them; with `sending`, also return when the pipe is writable."""
        poll = select.poll()
        poll.register(self._reading, select.POLLIN)
        if sending:
            poll.register(self._writing, select.POLLOUT)
        left_ms = max((until - time.monotonic()) * 1000, 0)
        ready = dict(poll.poll(left_ms))
        if not ready:
            raise ChannelError(f"{silent} within {limit_s:g} s")
        if self._reading in ready:
            chunk = os.read(self._reading, _CHUNK)
            if not chunk:
                raise ChannelError("closed the channel")
            self._received += chunk
