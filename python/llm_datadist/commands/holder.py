"""The process that holds the memory and the socket of a keeper, and the child that serves from them.

The holder only waits: it has no thread and no state of its own. If the child ends unexpectedly, it starts another one,
which finds the values in the memory. A child gets the memory by the fork: it is sealed, so that no process can map it
for writing later.
"""

from __future__ import annotations

import os
import select
import signal
import socket
import sys
import time
import traceback
from typing import TYPE_CHECKING, Callable

from llm_datadist import Error
from llm_datadist.commands import systemd
from llm_datadist.commands.output import OutputError, complain

if TYPE_CHECKING:
    from types import TracebackType
    from typing import Any

    from typing_extensions import Self

    from llm_datadist.native import _Holder

_SIGNALS = (signal.SIGTERM, signal.SIGINT)
_CRASH_SECONDS = 60.0
"""After two crashes within this time, the memory may be what makes the child crash."""
_PAUSE_SECONDS = 1.0
"""Also between two attempts to start a child, and between two messages to the service manager."""
_MESSAGE_BYTES = 4096
"""The most bytes that are read of a message of a child. The first one is the number of values that it has found, once
it serves. Later ones are texts about clients that it has refused."""
_COMPLAINT_BYTES = 2000
"""The most bytes of a line on standard error. So it fits in the free page that a pipe has if it is writable."""
_STOP_SECONDS = 5.0
"""How long a child may take to end before it is killed."""


class StopSignals:
    """A descriptor that is readable once SIGTERM or SIGINT has arrived, inside a ``with`` block."""

    def __init__(self) -> None:
        self._reader, self._writer = socket.socketpair()
        self._reader.setblocking(False)
        self._writer.setblocking(False)

    def __enter__(self) -> Self:
        self._before = [signal.signal(number, lambda *_: None) for number in _SIGNALS]
        signal.set_wakeup_fd(self._writer.fileno(), warn_on_full_buffer=False)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        signal.set_wakeup_fd(-1)
        for number, handler in zip(_SIGNALS, self._before):
            signal.signal(number, handler)
        self._reader.close()
        self._writer.close()

    def fileno(self) -> int:
        """Return the number of the descriptor."""
        return self._reader.fileno()

    def arrived(self, seconds: float = 0) -> bool:
        """Return whether a signal has arrived, or does within so many seconds."""
        return bool(_readable(seconds, self))

    def default(self) -> None:
        """Have the signals end this process, a forked child."""
        signal.set_wakeup_fd(-1)
        for number in _SIGNALS:
            signal.signal(number, signal.SIG_DFL)


class _Child:
    """A forked process that serves from the memory of the holder."""

    def __init__(self, holder: _Holder, stop: StopSignals, *, first: bool, empty: bool) -> None:
        self.begin = time.monotonic()
        self.serves = False
        # The end of each side tells the other one.
        self.end, other = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if self.pid == 0:
            stop.default()
            self.end.close()
            os._exit(_serve(holder, other, first=first, empty=empty))
        other.close()

    def stop(self) -> None:
        """End the process, and kill it if it does not end in time."""
        self.end.shutdown(socket.SHUT_WR)
        limit = time.monotonic() + _STOP_SECONDS
        while _readable(max(limit - time.monotonic(), 0), self.end):
            if not self.end.recv(1):
                break
        else:
            os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def result(self) -> tuple[str, int | None]:
        """Return how a process has ended, and the exit status of the command, or `None` if that was a crash."""
        status = os.waitpid(self.pid, 0)[1]
        if os.WIFEXITED(status):
            code = os.WEXITSTATUS(status)
            return f"ended with status {code}", 0 if code == 0 else None
        number = os.WTERMSIG(status)
        names = {known.value: known.name for known in signal.Signals}
        return f"was killed by {names.get(number, f'signal {number}')}", 0 if number in _SIGNALS else None


def hold(holder: _Holder, stop: StopSignals, ready: Callable[[int], None]) -> int:
    """Serve with a child, and with another one whenever it ends unexpectedly, until a signal arrives.

    Args:
        holder: the memory and the socket.
        stop: says when to end.
        ready: is called with the process id of the first child once it serves.

    Returns:
        The exit status: 0 after a signal, or if the child has ended because it was asked to; 1 if the first child could
        not serve.
    """
    child, serving, crashed = _Child(holder, stop, first=True, empty=False), False, -_CRASH_SECONDS
    while True:
        taking_over = holder.takes_over and not serving
        readable = _readable(_PAUSE_SECONDS if taking_over else None, stop, child.end)
        if not readable:
            # The values of another keeper may take long to copy, and its memory to be freed.
            systemd.notify("STATUS=taking over the values of another keeper", "EXTEND_TIMEOUT_USEC=60000000")
            continue
        if stop in readable:
            systemd.notify("STOPPING=1")
            child.stop()
            return 0
        if message := child.end.recv(_MESSAGE_BYTES):
            if serving:
                _report(child, message)
            else:
                _call_ready(ready, holder, child)
            serving = child.serves = True
            continue
        text, status = child.result()
        if status is None and not serving:
            _complain(f"llm-datadist serve: the process that should serve (pid {child.pid}) {text}")
            status = 1
        if status is not None:
            systemd.notify("STOPPING=1")
            return status
        now = time.monotonic()
        again = now - crashed < _CRASH_SECONDS
        crashed = now
        _complain_of_crash(child, text, now - child.begin, again=again)
        if again and stop.arrived(_PAUSE_SECONDS):
            return 0
        child.end.close()
        started = _next_child(holder, stop, empty=again)
        if started is None:
            return 0
        child = started


def _report(child: _Child, message: bytes) -> None:
    """Print a message of a child that is not the first one of all children."""
    if child.serves:
        _complain(f"llm-datadist serve: {message.decode(errors='replace')}")
        return
    serves = f"pid {child.pid} serves, with {int.from_bytes(message, 'little'):,} values from before"
    _complain(f"llm-datadist serve: {serves}")
    systemd.notify(f"STATUS={serves}")


def _call_ready(ready: Callable[[int], None], holder: _Holder, child: _Child) -> None:
    """Call `ready`. If it fails, end the child, unless it has taken over: then nobody else has the values."""
    try:
        ready(child.pid)
    except OutputError as error:
        if not holder.takes_over:
            child.stop()
            raise
        _complain(f"llm-datadist serve: {error}")
    except BaseException:
        child.stop()
        raise


def _next_child(holder: _Holder, stop: StopSignals, *, empty: bool) -> _Child | None:
    """Start a child once the system has a process and descriptors for it. Return `None` if a signal arrives before."""
    complained = False
    while True:
        try:
            return _Child(holder, stop, first=False, empty=empty)
        except OSError as error:
            if not complained:
                _complain(f"llm-datadist serve: cannot start a process that serves; trying again: {error}")
            complained = True
        if stop.arrived(_PAUSE_SECONDS):
            systemd.notify("STOPPING=1")
            return None


def _complain_of_crash(child: _Child, text: str, seconds: float, *, again: bool) -> None:
    what = "starting with empty memory, after two crashes within 60 s" if again else "starting another one"
    crash = f"the process that serves (pid {child.pid}) {text} after {seconds:.1f} s; {what}"
    _complain(f"llm-datadist serve: {crash}")
    systemd.notify(f"STATUS={crash}")


def _serve(holder: _Holder, stop: socket.socket, *, first: bool, empty: bool) -> int:
    """Serve until the other end of `stop` is closed. Return the exit status of the child."""
    try:
        if first and holder.takes_over:
            taken, left = holder.take_over(stop)
            rest = f"; {left:,} were left: they do not fit, or have changed" if left else ""
            _complain(f"llm-datadist serve: {taken:,} values were taken over{rest}")
        if holder.serve(stop, empty=empty):
            _complain("llm-datadist serve: another keeper has taken over")
    except Error as error:
        _complain(f"llm-datadist serve: {error}")
        return 1
    except BaseException:  # noqa: BLE001  (nobody else would print it)
        for line in traceback.format_exc().splitlines():
            _complain(line)
        return 1
    return 0


def _complain(text: str) -> None:
    """Print a line to standard error, unless that could wait.

    A pipe that nobody reads becomes full. The line is lost then, because a signal, or the end of the child, must not
    wait for a reader. A longer line is cut off after 2,000 bytes. If another program writes to the same pipe at this
    moment, the line may still wait.
    """
    if sys.stderr is None:  # the process was started without it
        return
    poll = select.poll()
    poll.register(sys.stderr, select.POLLOUT)
    if any(events & select.POLLOUT for _, events in poll.poll(0)):
        encoding = sys.stderr.encoding
        shown = text.encode(encoding, "backslashreplace")[:_COMPLAINT_BYTES]
        complain(shown.decode(encoding, "ignore"))


def _readable(seconds: float | None, *given: Any) -> list[Any]:
    """Return which of the objects with a descriptor are readable, at the latest after so many seconds."""
    poll = select.poll()
    for one in given:
        poll.register(one, select.POLLIN)
    numbers = {number for number, _ in poll.poll(None if seconds is None else seconds * 1000)}
    return [one for one in given if one.fileno() in numbers]
