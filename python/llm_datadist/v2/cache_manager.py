"""Re-exports of ``llm_datadist.original.cache_manager`` under the path that existing clients import."""

from llm_datadist.original.cache_manager import CacheManager

__all__ = ["CacheManager"]
