"""Re-exports of ``configs`` and ``engine_config`` under the path that existing clients import."""

from llm_datadist.original.configs import LLMClusterInfo, LLMConfig, LlmConfig, LLMRole
from llm_datadist.original.engine_config import ClusterConfig, EngineConfig

__all__ = ["ClusterConfig", "EngineConfig", "LLMClusterInfo", "LLMConfig", "LLMRole", "LlmConfig"]
