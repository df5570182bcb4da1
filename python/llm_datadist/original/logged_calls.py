"""Logs the start and the success of a call, and shows the values of its arguments.

The contract demands both lines, with all arguments, from every manager call. One wrapper is shorter than two lines in
each of them, and it leaves the classes while the level is above INFO.
"""

from __future__ import annotations

import functools
import logging
import os
from enum import IntEnum
from itertools import islice
from typing import TYPE_CHECKING, Any, Callable, TypeVar, cast

from llm_datadist.log import LOGGING_FILES, follow_level, get_logger, info

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["is_grant_token", "logged", "shown"]

LOGGING_FILES.add(os.path.normcase(__file__))

_Call = TypeVar("_Call", bound=Callable[..., Any])

_MAX_ITEMS = 8
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
    kept = list(islice(texts, _MAX_ITEMS)) if depth > 0 else []
    rest = [] if len(kept) == count else [f"... {count} in all"]
    return ", ".join(kept + rest)


def logged(method: _Call) -> _Call:
    """Log ``[method] start`` with every argument, and ``[method] success``, at INFO.

    If the call returns ``(code, codes)`` with a code other than success, that code is logged in place of ``success``.
    A ``req_id`` that was given is part of both lines. While the level of the logger is above INFO, the class holds
    ``method`` itself, because a wrapper would slow each call down. A bound method that the program keeps goes on as it
    was when the program took it: with or without the log lines.
    """
    return cast("_Call", _Logged(method))


class _Logged:
    """Stands for a method in the body of its class."""

    def __init__(self, method: Callable[..., Any]) -> None:
        self._method = method

    def __set_name__(self, owner: type, name: str) -> None:
        method = self._method

        @functools.wraps(method)
        def call(*args: Any, **kwargs: Any) -> Any:
            enabled = get_logger().isEnabledFor(logging.INFO)
            return _with_log(method, args, kwargs) if enabled else method(*args, **kwargs)

        def use(level: int) -> None:
            if vars(owner)[name] in (self, method, call):  # otherwise the program has replaced it
                setattr(owner, name, call if level <= logging.INFO else method)

        follow_level(use)


def _with_log(method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> object:
    name, given = method.__name__, _arguments(method, args, kwargs)
    info("[%s] start%s", name, "".join(f", {argument} = {shown(value)}" for argument, value in given.items()))
    result = method(*args, **kwargs)
    request = given.get("req_id")
    # Link calls return `(code, codes)`: some of the clusters may have failed.
    code = result[0] if isinstance(result, tuple) and result else None
    end = code.name if isinstance(code, IntEnum) and code else "success"
    info("[%s] %s%s", name, end, "" if request is None else f", req_id = {shown(request)}")
    return result


def _arguments(method: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    import inspect  # noqa: PLC0415  (imported when it is needed)

    bound = inspect.signature(method).bind(*args, **kwargs)
    bound.apply_defaults()
    return dict(list(bound.arguments.items())[1:])
