"""The names of the original's API in one module, and what else the native module uses of that API.

Each module lists its own names, and ``llm_datadist.__all__`` those of the package, so this one lists none.
``CacheManager`` is importable from the package, but not in that list (contract §1.1).
"""

# ruff: noqa: PLC0414  (type checkers export a name of an import only if it is repeated)
from __future__ import annotations

from llm_datadist.engine_log import drain as drain_log
from llm_datadist.log import error as log_error
from llm_datadist.original.cache_manager import *
from llm_datadist.original.configs import *
from llm_datadist.original.data_type import DataType as DataType
from llm_datadist.original.datadist import *
from llm_datadist.original.kv_cache_manager import *
from llm_datadist.original.layerwise import *
from llm_datadist.original.status import *
from llm_datadist.original.tensors import *
from llm_datadist.original.types import *
