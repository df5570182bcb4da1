"""The properties of ``LLMConfig``, made from the table of options. ``option_properties.pyi`` has their types."""

from __future__ import annotations

from llm_datadist.option_table import rows
from llm_datadist.original.option_types import Option

__all__ = ["OPTIONS", "OptionProperties"]

OPTIONS = tuple(Option(row) for row in rows() if row.key)
OptionProperties = type("OptionProperties", (), {option.name: option for option in OPTIONS})
