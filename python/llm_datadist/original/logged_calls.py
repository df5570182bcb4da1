"""Logs the start and the success of a call, and shows the values of its arguments."""

from __future__ import annotations

import functools
import logging
import os
from enum import IntEnum
from itertools import islice
from types import FunctionType
from typing import TYPE_CHECKING, Any, Callable, TypeVar, cast

from llm_datadist.log import LOGGING_FILES, get_logger, info
from llm_datadist.original.arguments import clarify  # noqa: F401  (used by the text of `_LOGGED`)

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["is_grant_token", "logged", "shown"]

# The values of `inspect.CO_VARARGS` and `inspect.CO_VARKEYWORDS`, because that module takes long to import.
_VARARGS, _VARKEYWORDS = 0x04, 0x08

_Call = TypeVar("_Call", bound=Callable[..., Any])

_MOST_ITEMS = 8
_DEEPEST = 3
_LONGEST = 500
_WIDEST_BITS = 512
# The first bytes of every token of a grant. The log hides tokens, because a reader of the log could use them.
_GRANT = b"LDG\x01"


def is_grant_token(value: object) -> bool:
    """Return whether a value begins as the token of a grant does."""
    return isinstance(value, bytes) and value.startswith(_GRANT)


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
    if is_grant_token(value):
        return "<token of a grant>"
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
            if get_logger().level > {info}:
                return {call}
            return with_log(({positional}), {keywords})
        except (AttributeError, TypeError) as error:
            clarify(error, {{{required}}}, {{{optional}}})
            raise
    return {name}
"""
_LOGGED_FILE = "<logged>"
LOGGING_FILES.update(map(os.path.normcase, (__file__, _LOGGED_FILE)))


def logged(method: _Call) -> _Call:
    """Log ``[method] start`` with every argument, and ``[method] success``, at INFO.

    If the call returns ``(code, codes)`` with a code other than success, that code is logged in place of ``success``.
    A ``req_id`` that was given is part of both lines. While INFO is off, logging costs one comparison.
    ``llm_datadist.original.arguments.clarify`` completes the texts of ``AttributeError`` and ``TypeError``.
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
