"""Re-exports of :mod:`llm_datadist.datadist` under the path that existing clients import."""

from llm_datadist.datadist import LLMDataDist, _shutdown_handler

__all__ = ["LLMDataDist", "_shutdown_handler"]
