"""The logger of the package (contract §15), and the decorator that logs the start and the success of a call.

Programs configure the logger through the standard ``logging`` module. If the program has set no level, the environment
variable ``ASCEND_GLOBAL_LOG_LEVEL`` sets it: 0 DEBUG, 1 INFO, 2 WARNING, 3 ERROR; ERROR when unset. It is read once.
"""

from __future__ import annotations

import functools
import io
import logging
import os
import sys
import threading
import traceback
from enum import IntEnum
from itertools import islice
from types import FunctionType
from typing import TYPE_CHECKING, Any, Callable, Optional, TypeVar, cast

from llm_datadist.arguments import clarify  # noqa: F401  (used by the text of `_LOGGED`)

if TYPE_CHECKING:
    from collections.abc import Iterator
    from types import FrameType

__all__ = ["DATE_FORMAT", "LOG_FORMAT", "error", "get_logger", "info", "logged", "shown", "warn"]

# The layout that contract §15 states.
_PROCESS = "%(name)s(%(process)d,%(processName)s)"
_PLACE = "[%(filename)s:%(lineno)d]%(thread)d %(funcName)s"
LOG_FORMAT = f"[%(levelname)s] {_PROCESS}:%(asctime)s.%(msecs)03d {_PLACE}: %(message)s"
DATE_FORMAT = "%Y-%m-%d %H:%M:%S"

_NAME = "LLM_DATADIST"
_LEVELS = {"0": logging.DEBUG, "1": logging.INFO, "2": logging.WARNING, "3": logging.ERROR}

# The values of `inspect.CO_VARARGS` and `inspect.CO_VARKEYWORDS`, because that module takes long to import.
_VARARGS, _VARKEYWORDS = 0x04, 0x08

_Call = TypeVar("_Call", bound=Callable[..., Any])

_logger: Optional[logging.Logger] = None
_lock = threading.RLock()  # re-entrant, for signal handlers


def get_logger() -> logging.Logger:
    """Return the logger ``LLM_DATADIST``, which is set up on first use (contract §15).

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
            _logger = logger
    return _logger


def _find_caller(stack_info: bool = False, stack_level: int = 1) -> tuple[str, int, str, Optional[str]]:
    """Return file, line, function and stack text of the first caller outside ``logging`` and this file."""
    frame = _outside(sys._getframe())  # noqa: SLF001  (what `inspect.currentframe` returns)
    for _ in range(stack_level - 1):
        frame = _outside(frame.f_back) if frame is not None else None
    if frame is None:
        return "(unknown file)", 0, "(unknown function)", None
    code = frame.f_code
    return code.co_filename, frame.f_lineno, code.co_name, _stack_text(frame) if stack_info else None


def _outside(frame: Optional[FrameType]) -> Optional[FrameType]:
    own = (__file__, logging.__file__, _LOGGED_FILE)
    while frame is not None and os.path.normcase(frame.f_code.co_filename) in own:
        frame = frame.f_back
    return frame


def _stack_text(frame: FrameType) -> str:
    text = io.StringIO("Stack (most recent call last):\n")
    text.seek(0, io.SEEK_END)
    traceback.print_stack(frame, file=text)
    return text.getvalue().rstrip("\n")


def info(message: str, *args: object) -> None:
    """Log ``message % args`` at INFO (contract §15)."""
    get_logger().info(message, *args)


def warn(message: str, *args: object) -> None:
    """Log ``message % args`` at WARNING (contract §15)."""
    get_logger().warning(message, *args)


def error(message: str, *args: object) -> None:
    """Log ``message % args`` at ERROR (contract §15)."""
    get_logger().error(message, *args)


_MOST_ITEMS = 8
_DEEPEST = 3
_LONGEST = 500
_WIDEST_BITS = 512


def shown(value: object) -> str:
    """Return the ``repr`` of a value for a message, shortened if it is long. Never raises."""
    try:
        text = _brief(value, _DEEPEST)
    except Exception:  # noqa: BLE001  (the value's own __repr__ must not break the logged call)
        return f"<{type(value).__name__} without a text>"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _brief(value: object, depth: int) -> str:
    if isinstance(value, dict):
        pairs = (f"{_brief(key, 0)}: {_brief(item, depth - 1)}" for key, item in dict.items(value))
        return f"{{{_first(pairs, len(value), depth)}}}"
    if isinstance(value, (list, tuple)):
        text = _first((_brief(item, depth - 1) for item in value), len(value), depth)
        return f"[{text}]" if isinstance(value, list) else f"({text})"
    if isinstance(value, int) and value.bit_length() > _WIDEST_BITS:
        return f"<{type(value).__name__} of {value.bit_length()} bits>"
    # A subclass keeps its own repr, because that of `Secret` hides the value.
    if isinstance(value, (str, bytes)) and type(value) in (str, bytes):
        value = value[: _LONGEST + 1]
    return repr(value)


def _first(texts: Iterator[str], count: int, depth: int) -> str:
    kept = list(islice(texts, _MOST_ITEMS)) if depth > 0 else []
    rest = [] if len(kept) == count else [f"... {count} in all"]
    return ", ".join(kept + rest)


# The source of the wrapper that `logged` makes. The wrapper has the same positional parameters as the method, because
# one with `*args` would take as long as all checks of the arguments. A dozen keyword-only parameters would take as long
# as well, even if none is given, so the wrapper has `**keywords` in their place. If none is given, it calls `plain`,
# which takes all parameters by position.
_LOGGED = """
def logged(method, plain, with_log):
    def {name}({parameters}):
        try:
            if (_logger or _make_logger()).level > {info}:
                return {call}
            return with_log(({positional}), {keywords})
        except (AttributeError, TypeError) as error:
            clarify(error, {{{required}}}, {{{optional}}})
            raise
    return {name}
"""
_LOGGED_FILE = "<logged>"


def logged(method: _Call) -> _Call:
    """Log ``[method] start`` with every argument, and ``[method] success``, at INFO (contract §15).

    If the call returns ``(code, codes)`` with a code other than success, that code is logged in place of ``success``.
    A ``req_id`` that was given is part of both lines. While INFO is off, logging costs one comparison.
    ``llm_datadist.arguments.clarify`` completes the texts of ``AttributeError`` and ``TypeError``.
    """
    name = method.__name__

    def with_log(args: tuple[object, ...], kwargs: dict[str, object]) -> object:
        if not get_logger().isEnabledFor(logging.INFO):
            return method(*args, **kwargs)
        given = _arguments(method, args, kwargs)
        info("[%s] start%s", name, "".join(f", {argument} = {shown(value)}" for argument, value in given.items()))
        result = method(*args, **kwargs)
        request = given.get("req_id")
        # Link calls return `(code, codes)`: some of the clusters may have failed.
        code = result[0] if isinstance(result, tuple) and result else None
        end = code.name if isinstance(code, IntEnum) and code else "success"
        info("[%s] %s%s", name, end, "" if request is None else f", req_id = {shown(request)}")
        return result

    call = functools.wraps(method)(_wrapper_of(method)(method, _by_position(method), with_log))
    call.__defaults__ = method.__defaults__  # type: ignore[attr-defined]
    return cast("_Call", call)


def _wrapper_of(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that makes a wrapper with the positional parameters of ``method``.

    Raises:
        TypeError: ``method`` has ``*args`` or positional-only parameters, or keyword-only ones without a default.
    """
    code = method.__code__
    count, named = code.co_argcount, code.co_kwonlyargcount
    if code.co_posonlyargcount or code.co_flags & _VARARGS or named != len(method.__kwdefaults__ or ()):
        msg = f"{method.__qualname__} cannot be logged: each parameter needs a name, and a keyword-only one a default"
        raise TypeError(msg)
    names = list(code.co_varnames[:count])
    required = count - len(method.__defaults__ or ())
    parameters, passed = names[:required] + [f"{name}=None" for name in names[required:]], ", ".join(names)
    optional = [f"{name!r}: {name}" for name in names[required:]]
    by_name = bool(named or code.co_flags & _VARKEYWORDS)
    text = _LOGGED.format(
        name=method.__name__,
        parameters=", ".join(parameters + ["**keywords"] * by_name),
        call=f"method({passed}, **keywords) if keywords else plain({passed})" if by_name else f"plain({passed})",
        positional=f"{passed},",
        keywords="keywords" if by_name else "{}",
        required=", ".join(f"{name!r}: {name}" for name in names[1:required]),
        optional=", ".join(optional + ["**keywords"] * by_name),
        info=int(logging.INFO),
    )
    made: dict[str, Callable[..., Any]] = {}
    exec(compile(text, _LOGGED_FILE, "exec"), globals(), made)  # noqa: S102  (names of our own methods only)
    return made["logged"]


def _by_position(method: Callable[..., Any]) -> Callable[..., Any]:
    """Return the method with its keyword-only parameters as positional ones, in the same order, with their defaults."""
    code, by_name = method.__code__, method.__kwdefaults__ or {}
    every = code.co_argcount + code.co_kwonlyargcount
    defaults = [by_name[name] for name in code.co_varnames[code.co_argcount : every]]
    plain = code.replace(co_argcount=every, co_kwonlyargcount=0)
    every_default = (*(method.__defaults__ or ()), *defaults)
    return FunctionType(plain, method.__globals__, method.__name__, every_default, method.__closure__)


def _arguments(method: _Call, args: tuple[object, ...], kwargs: dict[str, object]) -> dict[str, object]:
    import inspect  # noqa: PLC0415  (imported when it is needed)

    bound = inspect.signature(method).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(list(bound.arguments.items())[1:])
