"""Re-exports of ``llm_datadist.original.kv_cache_manager`` under the path of the first generation."""

from llm_datadist.original.kv_cache_manager import KvCacheManager

__all__ = ["KvCacheManager"]
