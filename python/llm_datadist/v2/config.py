"""Re-exports of :mod:`llm_datadist.configs` under the path that existing clients import."""

from llm_datadist.configs import LLMClusterInfo, LLMConfig, LlmConfig, LLMRole

__all__ = ["LLMClusterInfo", "LLMConfig", "LLMRole", "LlmConfig"]
