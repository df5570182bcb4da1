"""``llm-datadist store top``: what a keeper does, redrawn on one screen.

Without a terminal, it prints the same text at each look.
"""

from __future__ import annotations

import contextlib
import json
import os
import select
import shutil
import signal
import sys
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

from llm_datadist.commands.output import STANDARD_OUTPUT, OutputError, write, written_to
from llm_datadist.commands.store import report
from llm_datadist.native import Error, KeeperObserver, PeerLost, Timeout

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping

    from llm_datadist.stats import KeeperStats, StoredNamespace

_TIMEOUT = 1.0
_OTHER_SCREEN, _FIRST_SCREEN = "\x1b[?1049h\x1b[?25l", "\x1b[?25h\x1b[?1049l"
_HOME, _END_OF_LINE, _END_OF_SCREEN = "\x1b[H", "\x1b[K", "\x1b[J"


def run(socket: str, interval: float, destination: str | None, access: Mapping[str, Any]) -> int:
    """Show what a keeper does until a signal or the key q.

    Args:
        socket: the path at which the keeper listens. It may end and come back.
        interval: seconds between two looks.
        destination: a file for JSON, ``"-"`` to print only that, or ``None``.
        access: arguments of ``KeeperObserver`` for a keeper of another user.

    Raises:
        PeerLost: no keeper listens at the first look.
    """
    before = _look(socket, access)
    look: _Look | str = before
    with _json_file(destination) as lines, _screen(destination != STANDARD_OUTPUT) as screen:
        while True:
            shown = _text(socket, look, before)
            counted = look if isinstance(look, _Look) else None
            before = counted or before
            if not (lines(counted) and screen.show(shown)) or screen.wait(interval):
                break
            look = _look_again(socket, access)
    return 0


class _Look(NamedTuple):
    """What a keeper has counted at a moment."""

    stats: KeeperStats
    namespaces: list[StoredNamespace]
    moment: float
    """In seconds."""


def _look(socket: str, access: Mapping[str, Any]) -> _Look:
    with KeeperObserver(socket, timeout=_TIMEOUT, **access) as observer:
        return _Look(observer.stats(), observer.namespaces(), time.monotonic())


def _look_again(socket: str, access: Mapping[str, Any]) -> _Look | str:
    """Return the look, or why there is none."""
    try:
        return _look(socket, access)
    except (PeerLost, Timeout):
        return f"no keeper answers at {socket}"
    except Error as error:  # such as that of a keeper which has come back with another version
        return str(error)


def _text(socket: str, look: _Look | str, before: _Look) -> list[str]:
    if isinstance(look, str):
        return [look]
    lines = report.rates(socket, look.stats, before.stats, max(look.moment - before.moment, 1e-3))
    return [*lines, "", *report.namespaces(look.namespaces)]


class _Terminal:
    """A screen of its own, whose keys are read one by one."""

    def show(self, lines: list[str]) -> bool:
        width, height = shutil.get_terminal_size()
        kept = [f"{line[: width - 1]}{_END_OF_LINE}" for line in lines[: height - 1]]
        _print(_HOME + "\r\n".join([*kept, _END_OF_SCREEN]))
        return True

    def wait(self, interval: float) -> bool:
        """Return whether a key ends the command within the interval."""
        end = time.monotonic() + interval
        while (left := end - time.monotonic()) > 0:
            if select.select([sys.stdin], [], [], left)[0]:
                keys = os.read(sys.stdin.fileno(), 1024)
                if not keys or b"q" in keys:
                    return True
        return False


class _Printed:
    """No terminal: every look is printed below the last one."""

    def __init__(self, text: bool) -> None:
        self._text = text

    def show(self, lines: list[str]) -> bool:
        """Return whether somebody still reads."""
        return not self._text or write("\n".join([*lines, ""]))

    def wait(self, interval: float) -> bool:
        time.sleep(interval)
        return False


@contextlib.contextmanager
def _screen(text: bool) -> Iterator[_Terminal | _Printed]:
    """Prepare the terminal, and leave it as it was, also after Ctrl-C and SIGTERM, which end the block."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    with contextlib.suppress(KeyboardInterrupt):
        try:
            if text and sys.stdin is not None and sys.stdin.isatty() and sys.stdout is not None and sys.stdout.isatty():
                with _keys():
                    yield _Terminal()
            else:
                yield _Printed(text)
        finally:
            signal.signal(signal.SIGTERM, before)


def _interrupt(_number: int, _frame: Any) -> None:
    raise KeyboardInterrupt


@contextlib.contextmanager
def _keys() -> Iterator[None]:
    """Switch to the other screen of the terminal, which shows no keys."""
    import termios  # noqa: PLC0415  (only a terminal needs it)
    import tty  # noqa: PLC0415

    number = sys.stdin.fileno()
    before = termios.tcgetattr(number)
    try:
        tty.setcbreak(number)
        _print(_OTHER_SCREEN)
        yield
    finally:
        termios.tcsetattr(number, termios.TCSADRAIN, before)
        _print(_FIRST_SCREEN)


def _print(text: str) -> None:
    encoding = sys.stdout.encoding or "utf-8"
    try:
        print(text.encode(encoding, "replace").decode(encoding), end="", flush=True)  # noqa: T201  (a command prints)
    except OSError as error:
        raise OutputError(f"cannot write to the terminal: {error.strerror}") from error


@contextlib.contextmanager
def _json_file(destination: str | None) -> Iterator[Callable[[_Look | None], bool]]:
    """Return a function that writes a look as a line of JSON, if that is asked for.

    It returns whether somebody still reads.
    """

    def line(look: _Look | None) -> str:
        return json.dumps(None if look is None else {**look.stats, "by_namespace": look.namespaces})

    if destination is None:
        yield lambda _look: True
    elif destination == STANDARD_OUTPUT:
        yield lambda look: write(line(look))
    else:
        with written_to(destination):
            file = Path(destination).open("w", encoding="utf-8", buffering=1)  # noqa: SIM115  (it is closed below)

        def append(look: _Look | None) -> bool:
            with written_to(destination):
                return file.write(line(look) + "\n") > 0

        try:
            yield append
        finally:
            with written_to(destination):
                file.close()
