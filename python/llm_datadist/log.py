"""The logger of the package, which both APIs use.

Programs configure the logger through the standard ``logging`` module. If the program has set no level, the environment
variable ``ASCEND_GLOBAL_LOG_LEVEL`` sets it: 0 DEBUG, 1 INFO, 2 WARNING, 3 ERROR; ERROR when unset. It is read once.
"""

from __future__ import annotations

import io
import logging
import os
import sys
import threading
import traceback
from functools import partial
from typing import TYPE_CHECKING, Any, Callable, Optional, Union

if TYPE_CHECKING:
    from types import FrameType

__all__ = ["DATE_FORMAT", "LOGGING_FILES", "LOG_FORMAT", "error", "follow_level", "get_logger", "info", "warn"]

# The layout that contract §15 states.
_PROCESS = "%(name)s(%(process)d,%(processName)s)"
_LOCATION = "[%(filename)s:%(lineno)d]%(thread)d %(funcName)s"
LOG_FORMAT = f"[%(levelname)s] {_PROCESS}:%(asctime)s.%(msecs)03d {_LOCATION}: %(message)s"
DATE_FORMAT = "%Y-%m-%d %H:%M:%S"

_NAME = "LLM_DATADIST"
_LEVELS = {"0": logging.DEBUG, "1": logging.INFO, "2": logging.WARNING, "3": logging.ERROR}

LOGGING_FILES = {os.path.normcase(file) for file in (__file__, logging.__file__)}
"""Files whose frames are no callers: a line of the log names none of them. ``original.logged_calls`` adds its own."""

_logger: Optional[logging.Logger] = None
_followers: list[Callable[[int], None]] = []
_lock = threading.RLock()  # re-entrant, for signal handlers


def get_logger() -> logging.Logger:
    """Return the logger ``LLM_DATADIST``, which is set up on first use.

    The configuration of the program is kept: a level that was set stays, and a handler on standard output is added only
    if neither this logger nor the root logger has a handler. Records propagate to the root logger.
    """
    return _logger or _make_logger()


# The class takes no type argument at run time before Python 3.11.
class _OwnHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """The handler of the package. It writes nothing while a handler of the program receives the same records."""

    def filter(self, record: logging.LogRecord) -> Any:
        """Return whether to show ``record``."""
        return not _has_handler(logging.getLogger(_NAME), besides=self) and super().filter(record)


def _has_handler(logger: logging.Logger, besides: Optional[logging.Handler] = None) -> bool:
    """Return whether records of ``logger`` reach a handler other than ``besides``."""
    own = any(handler is not besides for handler in logger.handlers)
    return own or bool(logger.propagate and logging.getLogger().handlers)


def _make_logger() -> logging.Logger:
    global _logger  # noqa: PLW0603  (made once, under the lock)
    with _lock:
        if _logger is None:
            logger = logging.getLogger(_NAME)
            if logger.level == logging.NOTSET:
                logger.setLevel(_LEVELS.get(os.environ.get("ASCEND_GLOBAL_LOG_LEVEL", ""), logging.ERROR))
            if not _has_handler(logger):
                handler = _OwnHandler(sys.stdout)
                handler.setFormatter(logging.Formatter(LOG_FORMAT, DATE_FORMAT))
                logger.addHandler(handler)
            logger.findCaller = _find_caller  # type: ignore[assignment,method-assign]
            logger.setLevel = partial(_set_level, logger)  # type: ignore[method-assign]
            _logger = logger
            _tell(logger, *_followers)
    return _logger


def follow_level(follower: Callable[[int], None]) -> None:
    """Call ``follower`` with the level of the logger now, and whenever the program sets it."""
    _followers.append(follower)
    _tell(logging.getLogger(_NAME), follower)


# Takes no lock: `logging.config` holds the lock of `logging` when it calls this.
def _set_level(logger: logging.Logger, level: Union[int, str]) -> None:
    """Set the level of the logger, as ``logging.Logger.setLevel`` does."""
    logging.Logger.setLevel(logger, level)
    _tell(logger, *_followers)


def _tell(logger: logging.Logger, *followers: Callable[[int], None]) -> None:
    told = None
    while told != logger.level:  # another thread may set it meanwhile
        told = logger.level
        for follower in followers:
            follower(told)


def _find_caller(stack_info: bool = False, stack_level: int = 1) -> tuple[str, int, str, Optional[str]]:
    """Return file, line, function and stack text of the first caller outside ``LOGGING_FILES``."""
    frame = _outside(sys._getframe())  # noqa: SLF001  (what `inspect.currentframe` returns)
    for _ in range(stack_level - 1):
        frame = _outside(frame.f_back) if frame is not None else None
    if frame is None:
        return "(unknown file)", 0, "(unknown function)", None
    code = frame.f_code
    return code.co_filename, frame.f_lineno, code.co_name, _stack_text(frame) if stack_info else None


def _outside(frame: Optional[FrameType]) -> Optional[FrameType]:
    while frame is not None and os.path.normcase(frame.f_code.co_filename) in LOGGING_FILES:
        frame = frame.f_back
    return frame


def _stack_text(frame: FrameType) -> str:
    text = io.StringIO("Stack (most recent call last):\n")
    text.seek(0, io.SEEK_END)
    traceback.print_stack(frame, file=text)
    return text.getvalue().rstrip("\n")


def info(message: str, *args: object) -> None:
    """Log ``message % args`` at INFO."""
    get_logger().info(message, *args)


def warn(message: str, *args: object) -> None:
    """Log ``message % args`` at WARNING."""
    get_logger().warning(message, *args)


def error(message: str, *args: object) -> None:
    """Log ``message % args`` at ERROR."""
    get_logger().error(message, *args)
