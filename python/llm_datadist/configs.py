"""Re-exports of ``llm_datadist.original.configs`` under the path that existing clients import."""

from llm_datadist.original.configs import LLMClusterInfo, LLMConfig, LlmConfig, LLMRole, trans_str_ip

__all__ = ["LLMClusterInfo", "LLMConfig", "LLMRole", "LlmConfig", "trans_str_ip"]
