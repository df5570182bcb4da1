"""The options of an engine that a user gives to an integration, as attributes of ``LLMConfig``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llm_datadist import LLMConfig

__all__ = ["apply_engine_options"]


def apply_engine_options(config: LLMConfig, options: Mapping[str, Any]) -> None:
    """Set the attributes of ``LLMConfig`` that the user has given as ``engine_options``.

    Raises:
        ValueError: there is no such option.
    """
    for name, value in options.items():
        if not hasattr(type(config), name):
            raise ValueError(f"engine_options: LLMConfig has no option {name!r}")
        setattr(config, name, value)
