"""Argument checks, and error texts that are completed so that the caller can correct the call.

The native module checks arguments in the order of the contract. Two of its texts lack facts: the one about an
attribute of ``None``, and the one about an array that it cannot use. ``clarify`` adds them.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llm_datadist import _core

if TYPE_CHECKING:
    from collections.abc import Mapping

__all__ = ["check_dict", "clarify", "refuse_none"]

_OF_NONE = "'NoneType' object has no attribute"


def refuse_none(name: str, value: object) -> None:
    """Raise ``AttributeError`` with the name of the argument if ``value`` is ``None``."""
    if value is None:
        raise AttributeError(_must_not_be_none([name]))


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


def clarify(error: Exception, required: Mapping[str, object], optional: Mapping[str, object]) -> None:
    """Complete the text of an error that a call of the native module raised.

    It names the arguments that are ``None``, and adds the dtype and shape of an array. Other texts stay as they are.

    Args:
        error: an ``AttributeError`` or ``TypeError``.
        required: the arguments of the call that have no default, by name. ``None`` is a legal value of the others.
        optional: the arguments that have a default, by name.
    """
    text = str(error)
    if isinstance(error, AttributeError):
        absent = [name for name, value in required.items() if value is None]
        if absent and text.startswith(_OF_NONE):
            error.args = (_must_not_be_none(absent),)
        return
    for name, value in (*required.items(), *optional.items()):
        if not text.startswith(f"{name} only support") or not hasattr(value, "dtype") or not hasattr(value, "shape"):
            continue
        # The class of an array has these attributes as well, but not as values.
        if isinstance(value.shape, tuple):
            error.args = (f"{text} of {value.dtype} with shape {tuple(value.shape)}",)
            return


def _must_not_be_none(names: list[str]) -> str:
    return f"{' and '.join(names)} must not be None"
