"""Re-exports of ``llm_datadist.original.datadist`` under the path that existing clients import."""

from llm_datadist.original.datadist import LLMDataDist, _shutdown_handler
from llm_datadist.original.engine_config import EngineConfig

__all__ = ["EngineConfig", "LLMDataDist", "_shutdown_handler"]
