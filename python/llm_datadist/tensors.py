"""Tensors: :class:`Tensor` and :class:`TensorDesc` (contract §9.5, §9.6), and arrays over addresses.

numpy is imported when something here is used, not before; torch never: whoever gives one of its dtypes has imported it.
Not for: caches; they give views of their memory by ``CacheManager.tensor_views`` and
``KvCacheManager.get_cache_tensors``.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Optional, Union

from llm_datadist import _core, log
from llm_datadist.data_type import DataType
from llm_datadist.status import LLMException, LLMStatusCode
from llm_datadist.types import CacheDesc, Placement

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

__all__ = ["Tensor", "TensorDesc", "create_npu_tensors"]


class TensorDesc:
    """Element type and shape of a tensor.

    Args:
        dtype: element type.
        shape: dimensions.

    Raises:
        TypeError: an argument of the wrong type.
    """

    def __init__(self, dtype: DataType, shape: Union[list[int], tuple[int, ...]]) -> None:
        self._dtype = _core.check_isinstance("dtype", dtype, DataType)
        self._shape = list(_core.check_isinstance("shape", shape, [list, tuple], int, allow_none=False))

    @property
    def dtype(self) -> DataType:
        """Element type."""
        return self._dtype

    @property
    def shape(self) -> list[int]:
        """Dimensions: a new list each time."""
        return list(self._shape)

    def __repr__(self) -> str:
        return f"TensorDesc(dtype={self._dtype}, shape={self._shape})"


class Tensor:
    """A tensor in host memory. It shares the memory of what it is made of, and keeps it.

    The original's tensors live in its native module; there are no handles of that kind here, and whatever takes or
    returns one is refused with ``LLM_FEATURE_NOT_ENABLED``.

    Args:
        data: a C-contiguous numpy array, or another :class:`Tensor`.
        tensor_desc: what an array holds, by default what its dtype says. The bits of a ``float16`` array described as
            ``DT_BF16`` are taken for brain floats.

    Raises:
        TypeError: an argument of the wrong type.
        RuntimeError: an array that is not C-contiguous, of a dtype without a counterpart, or that is not as described.
        LLMException: ``LLM_FEATURE_NOT_ENABLED``, a native handle.
    """

    # What the memory is: an array, or a view of a cache.
    _source: Any
    _desc: TensorDesc

    def __init__(
        self, data: Union[np.ndarray[Any, Any], Tensor, int], tensor_desc: Optional[TensorDesc] = None
    ) -> None:
        _core.check_isinstance("tensor_desc", tensor_desc, TensorDesc)
        if isinstance(data, Tensor):
            self._source, self._desc = data._source, data._desc  # noqa: SLF001  (one of its own)
            return
        if isinstance(data, int) and not isinstance(data, bool):
            raise _no_handles()
        import numpy as np  # noqa: PLC0415  (only for those who make tensors)

        _core.check_isinstance("data", data, [np.ndarray, Tensor, int], allow_none=False)
        self._source, self._desc = data, _described(data, tensor_desc)

    @classmethod
    def _of_view(cls, view: _core.TensorView, dtype: DataType) -> Tensor:
        tensor = cls.__new__(cls)
        tensor._source, tensor._desc = view, TensorDesc(dtype, view.shape)  # noqa: SLF001  (its own)
        return tensor

    @classmethod
    def from_tensor_tuple(cls, tensor_tuple: tuple[int, int, list[int]]) -> Tensor:
        """Refuse: the first element is a handle of the original's native module.

        Raises:
            LLMException: ``LLM_FEATURE_NOT_ENABLED``.
        """
        _core.check_isinstance("tensor_tuple", tensor_tuple, tuple)
        raise _no_handles()

    def numpy(self, copy: bool = False) -> Any:
        """Return the tensor as an array: of its own memory, or with ``copy`` of new memory.

        ``DT_BF16`` is widened to ``float32``, always in new memory. ``DT_STRING`` needs ``copy``.

        Raises:
            TypeError: ``copy`` is no ``bool``.
            RuntimeError: ``DT_STRING`` without ``copy``.
        """
        _core.check_isinstance("copy", copy, bool, allow_none=False)
        if self._desc.dtype == DataType.DT_STRING and not copy:
            raise RuntimeError("a DT_STRING tensor cannot be shown without a copy: numpy(copy=True)")
        source = self._source
        array = source.numpy() if isinstance(source, _core.TensorView) else source
        if self._desc.dtype == DataType.DT_BF16:
            return _widened(array)
        return array.copy() if copy else array.view()

    @property
    def tensor_desc(self) -> TensorDesc:
        """Element type and shape."""
        return self._desc

    def __repr__(self) -> str:
        return f"Tensor({self.numpy(copy=True)},tensor_desc={self._desc})"


def _no_handles() -> LLMException:
    text = "tensors of this engine have no native handles: make a Tensor of a numpy array"
    return LLMException(text, status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED)


def _described(array: Any, desc: Optional[TensorDesc]) -> TensorDesc:
    """Return what ``array`` holds; it must be what ``desc`` says, if that is given."""
    from llm_datadist.data_type import dtype_to_np_dtype, np_dtype_to_dtype  # noqa: PLC0415  (they import numpy)

    if not array.flags.c_contiguous:
        raise RuntimeError("the array is not C-contiguous: numpy.ascontiguousarray makes one that is")
    if desc is None:
        if array.dtype.kind in "SU":
            return TensorDesc(DataType.DT_STRING, array.shape)
        dtype = np_dtype_to_dtype.get(array.dtype)
        if dtype is None:
            raise RuntimeError(f"dtype = {array.dtype} has no DataType")
        return TensorDesc(dtype, array.shape)
    if desc.shape != list(array.shape):
        raise RuntimeError(f"the array has shape {list(array.shape)} and tensor_desc {desc.shape}")
    wanted = dtype_to_np_dtype.get(desc.dtype)
    strings = desc.dtype == DataType.DT_STRING and array.dtype.kind in "SU"
    if not strings and (wanted is None or array.dtype != wanted):
        raise RuntimeError(f"the array has dtype {array.dtype} and tensor_desc {desc.dtype}")
    return desc


def _widened(array: Any) -> Any:
    """Return brain floats, whatever type their 16 bits have, as ``float32``: the same bits and 16 zeros."""
    import numpy as np  # noqa: PLC0415  (only for those who have tensors)

    return (array.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def create_npu_tensors(shape: Sequence[int], dtype: Any, addrs: list[int]) -> list[Any]:
    """Make one tensor over each address, without a copy and without owning the memory.

    The memory must stay where it is while the tensors are used. That of a pool cache does until it is deallocated and
    used for another, and is unmapped once the engine is finalized and no view keeps it; ``tensor_views`` and
    ``get_cache_tensors`` give tensors that keep it.

    Args:
        shape: dimensions of each.
        dtype: a ``torch.dtype`` for torch tensors; a numpy dtype, or a ``DataType``, for numpy arrays, where
            ``DT_BF16`` shows as ``uint16``, its bits.
        addrs: where they are, ``int`` each.

    Raises:
        TypeError: an argument of the wrong type, or a ``dtype`` without a counterpart.
        LLMException: ``LLM_PARAM_INVALID``, no addresses, a shape without meaning, or memory that is not mapped
            readable and writable.
    """
    as_torch = type(dtype).__module__ == "torch" and type(dtype).__name__ == "dtype"
    data_type = _torch_type(dtype) if as_torch else _numpy_type(dtype)
    desc = CacheDesc(len(addrs), tuple(shape), data_type, Placement.HOST)
    views = _core.LooseCache(desc, addrs).views()
    if not as_torch:
        return [view.numpy() for view in views]
    torch = sys.modules["torch"]
    return [torch.from_dlpack(view) for view in views]


_TORCH_NAMES = {
    "float32": DataType.DT_FLOAT,
    "float16": DataType.DT_FLOAT16,
    "bfloat16": DataType.DT_BF16,
    "int8": DataType.DT_INT8,
    "int16": DataType.DT_INT16,
    "uint16": DataType.DT_UINT16,
    "uint8": DataType.DT_UINT8,
    "int32": DataType.DT_INT32,
    "int64": DataType.DT_INT64,
    "uint32": DataType.DT_UINT32,
    "uint64": DataType.DT_UINT64,
    "bool": DataType.DT_BOOL,
    "float64": DataType.DT_DOUBLE,
}


def _torch_type(dtype: object) -> DataType:
    name = str(dtype).rpartition(".")[2]
    if name not in _TORCH_NAMES:
        raise TypeError(f"dtype = {log.shown(dtype)} has no DataType")
    return _TORCH_NAMES[name]


def _numpy_type(dtype: Any) -> DataType:
    if isinstance(dtype, DataType):
        return dtype
    import numpy as np  # noqa: PLC0415  (only for those who give one of its dtypes)

    from llm_datadist.data_type import np_dtype_to_dtype  # noqa: PLC0415  (it imports numpy)

    if dtype is None:
        raise TypeError("dtype = None is not allowed: a dtype of torch or numpy, or a DataType")
    found = np_dtype_to_dtype.get(np.dtype(dtype))
    if found is None:
        raise TypeError(f"dtype = {log.shown(dtype)} has no DataType")
    return found
