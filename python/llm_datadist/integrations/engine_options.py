"""The options of an engine that a user gives to an integration, as attributes of ``LLMConfig``."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from llm_datadist.option_table import rows
from llm_datadist.spelling import LISTED, nearest

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
            best = nearest(name, [row.attribute for row in rows()])
            advice = "" if best is None else f"did you mean {best!r}? "
            raise ValueError(f"engine_options: LLMConfig has no option {name!r}; {advice}{LISTED}")
        setattr(config, name, value)
