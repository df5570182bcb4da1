"""Re-exports of ``llm_datadist.original.data_type`` under the path that existing clients import (contract §1.2)."""

from llm_datadist.original import data_type as _data_type
from llm_datadist.original.data_type import (
    DataType,
    _dwrapper_dtype_to_python_dtype,
    get_python_dtype_from_wrapper_dtype,
    python_dtype_2_dwrapper_dtype,
)

__all__ = [
    "DataType",
    "_dwrapper_dtype_to_python_dtype",
    "get_python_dtype_from_wrapper_dtype",
    "python_dtype_2_dwrapper_dtype",
]


def __getattr__(name: str) -> object:
    # The tables of numpy types, which import numpy when they are first used.
    return getattr(_data_type, name)
