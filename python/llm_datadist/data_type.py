"""Re-exports of ``llm_datadist.original.data_type`` under the path that existing clients import."""

from typing import TYPE_CHECKING

from llm_datadist.original import data_type as _data_type
from llm_datadist.original.data_type import (
    DataType,
    _dwrapper_dtype_to_python_dtype,
    get_python_dtype_from_wrapper_dtype,
    python_dtype_2_dwrapper_dtype,
)

if TYPE_CHECKING:
    from llm_datadist.original.data_type import dtype_to_np_dtype as dtype_to_np_dtype  # noqa: PLC0414  (a re-export)
    from llm_datadist.original.data_type import np_dtype_to_dtype as np_dtype_to_dtype  # noqa: PLC0414  (a re-export)
    from llm_datadist.original.data_type import valid_np_dtypes as valid_np_dtypes  # noqa: PLC0414  (a re-export)

__all__ = [
    "DataType",
    "_dwrapper_dtype_to_python_dtype",
    "get_python_dtype_from_wrapper_dtype",
    "python_dtype_2_dwrapper_dtype",
]


def __getattr__(name: str) -> object:
    # The tables of numpy types, which import numpy when they are first used.
    return getattr(_data_type, name)
