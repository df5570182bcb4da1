"""Re-exports of ``llm_datadist.original.cache_manager`` under the path that existing clients import (contract §1.2)."""

from llm_datadist.original.cache_manager import CacheManager

__all__ = ["CacheManager"]
