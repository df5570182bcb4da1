"""Re-exports of ``llm_datadist.original.status`` under the path that existing clients import."""

from llm_datadist.original.status import (
    LLMException,
    LLMMismatchException,
    LLMStatusCode,
    Status,
    code_2_status,
    handle_llm_status,
    raise_if_false,
    raise_if_true,
)

__all__ = [
    "LLMException",
    "LLMMismatchException",
    "LLMStatusCode",
    "Status",
    "code_2_status",
    "handle_llm_status",
    "raise_if_false",
    "raise_if_true",
]
