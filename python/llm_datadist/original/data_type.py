"""Element types of a cache and the numpy types that correspond to them.

numpy is imported on the first access to one of the tables of its types.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

from llm_datadist import _core

if TYPE_CHECKING:
    import numpy as np

    dtype_to_np_dtype: dict[DataType, type[np.generic]]
    valid_np_dtypes: list[type[np.generic]]
    np_dtype_to_dtype: dict[np.dtype[Any], DataType]


class DataType(Enum):
    """Element type of a tensor."""

    DT_FLOAT = 0
    DT_FLOAT16 = 1
    DT_BF16 = 27
    DT_INT8 = 2
    DT_INT16 = 6
    DT_UINT16 = 7
    DT_UINT8 = 4
    DT_INT32 = 3
    DT_INT64 = 9
    DT_UINT32 = 8
    DT_UINT64 = 10
    DT_BOOL = 12
    DT_DOUBLE = 11
    DT_STRING = 13


python_dtype_2_dwrapper_dtype = {data_type: data_type.value for data_type in DataType}
_dwrapper_dtype_to_python_dtype = {data_type.value: data_type for data_type in DataType}


def get_python_dtype_from_wrapper_dtype(wrapper_dtype: int) -> DataType:
    """Return the element type with that number.

    Args:
        wrapper_dtype: the value of a member of ``DataType``.

    Raises:
        ValueError: no type has that number.
    """
    if wrapper_dtype not in _dwrapper_dtype_to_python_dtype:
        raise ValueError(f"wrapper_dtype={wrapper_dtype} is not the number of a DataType")
    return _dwrapper_dtype_to_python_dtype[wrapper_dtype]


# numpy has no bfloat16. Arrays of DT_BF16 hold the raw bits as float16; the reverse table maps float16 to DT_FLOAT16.
NUMPY_NAMES = {
    DataType.DT_FLOAT: "float32",
    DataType.DT_FLOAT16: "float16",
    DataType.DT_BF16: "float16",
    DataType.DT_INT8: "int8",
    DataType.DT_INT16: "int16",
    DataType.DT_UINT16: "uint16",
    DataType.DT_UINT8: "uint8",
    DataType.DT_INT32: "int32",
    DataType.DT_INT64: "int64",
    DataType.DT_UINT32: "uint32",
    DataType.DT_UINT64: "uint64",
    DataType.DT_BOOL: "bool_",
    DataType.DT_DOUBLE: "float64",
    DataType.DT_STRING: "bytes_",
}


def __getattr__(name: str) -> object:
    if name not in ("dtype_to_np_dtype", "valid_np_dtypes", "np_dtype_to_dtype"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    np = _core.import_numpy(f"llm_datadist.data_type.{name}")
    forward = {data_type: getattr(np, numpy_name) for data_type, numpy_name in NUMPY_NAMES.items()}
    backward = {np.dtype(kind): data_type for data_type, kind in forward.items() if data_type is not DataType.DT_BF16}
    globals().update(dtype_to_np_dtype=forward, valid_np_dtypes=list(forward.values()), np_dtype_to_dtype=backward)
    return globals()[name]
