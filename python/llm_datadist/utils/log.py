"""Re-exports of ``llm_datadist.log`` under the path that existing clients import."""

from llm_datadist.log import LOG_FORMAT, _find_caller, error, get_logger, info, warn

__all__ = ["LOG_FORMAT", "_find_caller", "error", "get_logger", "info", "warn"]
