"""Re-exports of ``llm_datadist.cache_manager`` under the path that existing clients import."""

from llm_datadist.cache_manager import CacheManager

__all__ = ["CacheManager"]
