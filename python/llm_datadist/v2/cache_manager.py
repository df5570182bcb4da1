"""Re-exports of ``llm_datadist.cache_manager`` under the path that existing clients import (contract §1.2)."""

from llm_datadist.cache_manager import CacheManager

__all__ = ["CacheManager"]
