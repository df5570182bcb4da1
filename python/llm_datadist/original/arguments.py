"""Argument checks. The native module has the others."""

from __future__ import annotations

from typing import Any

from llm_datadist import _core

__all__ = ["check_dict", "must_not_be_none", "refuse_none"]


def refuse_none(name: str, value: object) -> None:
    """Raise ``AttributeError`` with the name of the argument if ``value`` is ``None``."""
    if value is None:
        raise AttributeError(must_not_be_none(name))


def check_dict(arg_name: str, value: Any, k_class: Any, v_class: Any, v_inner_class: Any = None) -> None:
    """Check that ``value`` is a dict with keys and values of these classes.

    Args:
        arg_name: name of the argument, which every error text contains.
        value: the value to check.
        k_class: class of the keys, or a list of classes.
        v_class: class of the values, or a list of classes.
        v_inner_class: class of the elements of each value; ``None`` skips that check.

    Raises:
        AttributeError: ``value`` is ``None``.
        TypeError: ``value`` is not a dict, or a key, a value or an element has another class.
    """
    refuse_none(arg_name, value)
    _core.check_dict(arg_name, value, k_class, v_class, v_inner_class)


def must_not_be_none(*names: str) -> str:
    """Return the text of an error about arguments that are ``None``."""
    return f"{' and '.join(names)} must not be None"
