"""Reports of unknown options, attributes and keyword arguments, with the nearest valid name.

Unknown options and unknown keyword arguments of the original's pulls are ignored. Each is logged
at ERROR, so that the default level of the log shows it. A name that resembles one which only this package has raises an
exception, because no program of the original contains it, and the call would run without what it asks for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Callable, Optional

from llm_datadist import _core, log
from llm_datadist.original.logged_calls import is_grant_token, shown
from llm_datadist.original.option_types import read_json

if TYPE_CHECKING:
    from collections.abc import Collection, Iterable, Mapping

__all__ = [
    "LISTED",
    "OWN_KEYWORDS",
    "check_keywords",
    "nearest",
    "refusal",
    "report_unknown",
    "report_unknown_pool_keys",
    "resembles",
]

OWN_KEYWORDS = frozenset(
    {
        "dst_offset",
        "dst_tokens",
        "grant",
        "grant_done",
        "grants_done",
        "layout",
        "length",
        "notify",
        "src_offset",
        "src_tokens",
        "timeout_ms",
        "verify",
    }
)
"""Keyword arguments of pulls that ask for what the original does not have. The native API has it."""

LISTED = "llm-datadist options lists every option"
"""What to do about an unknown option that resembles no valid one."""

_ALIKE = 0.7
_POOLS = ("llm.MemPoolConfig", "llm.HostMemPoolConfig")
_POOL_KEYS = frozenset({"memory_size", "page_shift"})
# A name with one of these parts asks for something that only this package has, however it goes on. "token" alone is not
# among them, because programs for language models use it for other things.
_OWN_PARTS = ("grant", "verif", "linktoken", "checksum", "notif")

# Keyword arguments that were reported, because a call may run thousands of times a second. The limit bounds the memory,
# because the caller chooses the names.
_MAX_REMEMBERED = 1000
_reported: set[tuple[str, str]] = set()


def nearest(name: str, known: Collection[str]) -> Optional[str]:
    """Return the nearest known name, else one that shares most of its characters; ``None`` if there is none."""
    import difflib  # noqa: PLC0415  (only mistakes need it)

    return _core.nearest(name, known) or next(iter(difflib.get_close_matches(name, sorted(known), 1, _ALIKE)), None)


def resembles(name: str, known: Collection[str], own: Collection[str]) -> bool:
    """Return whether an unknown name resembles one of ``own``, which only this package has, valid here or not."""
    return _core.nearest(name, {*known, *own}) in own or any(
        part in name.casefold().replace("_", "") for part in _OWN_PARTS
    )


def refusal(name: str, known: Collection[str], remedy: str) -> str:
    """Return the end of an error text: the unknown name, and the nearest valid one or else ``remedy``."""
    return f"{shown(name)}; {_advice(name, known, remedy)}"


def report_unknown(kind: str, given: Iterable[str], known: Collection[str], remedy: str) -> None:
    """Log one line at ERROR for each unknown name of a kind such as ``"option"``.

    Values are never logged, because they may be secret. ``remedy`` is the end of the line if no valid name is near.
    """
    for name in given:
        if name not in known:
            log.error("unknown %s %s is ignored; %s", kind, shown(name), _advice(name, known, remedy))


def check_keywords(call: Callable[..., Any], given: Mapping[str, object]) -> None:
    """Refuse or report the unknown keyword arguments of a pull.

    The keyword-only parameters of the method ``call`` are the valid names.

    Raises:
        TypeError: a name resembles one of ``OWN_KEYWORDS`` (``resembles``), or a value is the token of a grant.
    """
    # First, because an ignored name may come with every pull of a program of the original.
    unseen = [name for name, value in given.items() if (call.__qualname__, name) not in _reported or _has_token(value)]
    if not unseen:
        return
    import inspect  # noqa: PLC0415  (only mistakes need it)

    parameters = inspect.signature(call).parameters.values()
    known = frozenset(one.name for one in parameters if one.kind is one.KEYWORD_ONLY)
    for name in unseen:
        if _has_token(given[name]) or resembles(name, known, OWN_KEYWORDS):
            text = f"{call.__name__}() has no keyword argument {shown(name)}; LLMDataDist.engine.pull takes grants, "
            raise TypeError(f"{text}parts of blocks, layouts, messages, ways to verify and time limits")
        if len(_reported) < _MAX_REMEMBERED:
            _reported.add((call.__qualname__, name))
        advice = _advice(name, known, "its keyword arguments are " + ", ".join(sorted(known)))
        log.error("%s() ignores the unknown keyword argument %s; %s", call.__name__, shown(name), advice)


def _has_token(value: object) -> bool:
    """Return whether an argument is the token of a grant, or a list with one."""
    return any(map(is_grant_token, value)) if isinstance(value, (list, tuple)) else is_grant_token(value)


def _advice(name: str, known: Collection[str], remedy: str) -> str:
    best = nearest(name, known)
    return remedy if best is None else f"did you mean {shown(best)}?"


def report_unknown_pool_keys(options: Mapping[str, object]) -> None:
    """Log one line at ERROR for each unknown key of a memory pool."""
    for option in _POOLS:
        text = options.get(option)
        try:
            fields = read_json(text) if isinstance(text, str) else None
        except ValueError:  # not JSON
            continue  # the engine raises LLM_PARAM_INVALID
        if isinstance(fields, dict):
            report_unknown(f"key of {option}", fields, _POOL_KEYS, "the keys are memory_size and page_shift")
