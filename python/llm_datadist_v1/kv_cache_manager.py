"""Re-exports of ``llm_datadist.kv_cache_manager`` under the path of the first generation."""

from llm_datadist.kv_cache_manager import KvCacheManager

__all__ = ["KvCacheManager"]
