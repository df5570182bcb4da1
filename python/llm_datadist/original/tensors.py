"""Tensors: ``Tensor`` and ``TensorDesc``, and arrays over addresses.

numpy is imported when a function here needs it. This module never imports torch: a caller that passes a torch dtype has
imported it already.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Any, Optional, Union

from llm_datadist import _core
from llm_datadist.original.data_type import NUMPY_NAMES, DataType
from llm_datadist.original.logged_calls import shown
from llm_datadist.original.status import LLMException, LLMStatusCode
from llm_datadist.original.types import CacheDesc, Placement

if TYPE_CHECKING:
    from collections.abc import Sequence

    import numpy as np

__all__ = ["Tensor", "TensorDesc", "create_npu_tensors"]


class TensorDesc:
    """Element type and shape of a tensor.

    Args:
        dtype: element type, or ``None``.
        shape: dimensions, outermost first. They are copied.

    Raises:
        TypeError: an argument has the wrong type.
    """

    def __init__(self, dtype: DataType, shape: Union[list[int], tuple[int, ...]]) -> None:
        self._dtype = _core.check_isinstance("dtype", dtype, DataType)
        self._shape = list(_core.check_isinstance("shape", shape, [list, tuple], int, allow_none=False))

    @property
    def dtype(self) -> DataType:
        """Element type, or ``None``."""
        return self._dtype

    @property
    def shape(self) -> list[int]:
        """Dimensions, outermost first, as a new list each time."""
        return list(self._shape)

    def __repr__(self) -> str:
        return f"TensorDesc(dtype={self._dtype}, shape={self._shape})"


class Tensor:
    """A tensor in host memory. It shares the memory of ``data`` and keeps it alive.

    The native handles of the original do not exist here.

    Args:
        data: a C-contiguous numpy array, or another ``Tensor``.
        tensor_desc: the descriptor of an array; by default, it is made from the dtype and shape of the array. A
            ``float16`` array with a descriptor of ``DT_BF16`` holds the bits of bfloat16 numbers.

    Raises:
        TypeError: an argument has the wrong type.
        RuntimeError: the array is not C-contiguous, its dtype has no ``DataType``, or it differs from the descriptor.
        LLMException: ``LLM_FEATURE_NOT_ENABLED``: ``data`` is an ``int``, which is a native handle in the original.
    """

    # The owner of the memory: an array, or a view of a cache.
    _source: Any
    _desc: TensorDesc

    def __init__(
        self, data: Union[np.ndarray[Any, Any], Tensor, int], tensor_desc: Optional[TensorDesc] = None
    ) -> None:
        _core.check_isinstance("tensor_desc", tensor_desc, TensorDesc)
        if isinstance(data, Tensor):
            self._source, self._desc = data._source, data._desc  # noqa: SLF001  (the same class)
            return
        if isinstance(data, int) and not isinstance(data, bool):
            raise _no_handles()
        arrays = _core.import_numpy("Tensor").ndarray
        _core.check_isinstance("data", data, [arrays, Tensor, int], allow_none=False)
        self._source, self._desc = data, _described(data, tensor_desc)

    @classmethod
    def _of_view(cls, view: _core.TensorView, dtype: DataType) -> Tensor:
        tensor = cls.__new__(cls)
        tensor._source, tensor._desc = view, TensorDesc(dtype, view.shape)  # noqa: SLF001  (the same class)
        return tensor

    @classmethod
    def from_tensor_tuple(cls, tensor_tuple: tuple[int, int, list[int]]) -> Tensor:
        """Raise an exception, because the native handles of the original do not exist here.

        Raises:
            TypeError: ``tensor_tuple`` is not a tuple.
            LLMException: ``LLM_FEATURE_NOT_ENABLED``, for every tuple.
        """
        _core.check_isinstance("tensor_tuple", tensor_tuple, tuple)
        raise _no_handles()

    def numpy(self, copy: bool = False) -> Any:
        """Return the tensor as a numpy array.

        Args:
            copy: whether the array has memory of its own; otherwise it is a view. ``DT_BF16`` is always widened to
                ``float32`` in new memory, and ``DT_STRING`` needs ``copy=True``.

        Returns:
            An array of the shape of the descriptor.

        Raises:
            TypeError: ``copy`` is not a ``bool``.
            RuntimeError: ``DT_STRING`` without ``copy``.
        """
        _core.check_isinstance("copy", copy, bool, allow_none=False)
        if self._desc.dtype == DataType.DT_STRING and not copy:
            raise RuntimeError("a DT_STRING tensor has no view; use numpy(copy=True)")
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
    text = "tensors of this package have no native handles; make a Tensor from a numpy array"
    return LLMException(text, status_code=LLMStatusCode.LLM_FEATURE_NOT_ENABLED)


def _described(array: Any, desc: Optional[TensorDesc]) -> TensorDesc:
    """Return the descriptor of ``array``. If ``desc`` is given, the array must match it."""
    from llm_datadist.original.data_type import dtype_to_np_dtype, np_dtype_to_dtype  # noqa: PLC0415  (they import numpy)

    if not array.flags.c_contiguous:
        raise RuntimeError("the array is not C-contiguous; numpy.ascontiguousarray makes one that is")
    if desc is None:
        if array.dtype.kind in "SU":
            return TensorDesc(DataType.DT_STRING, array.shape)
        dtype = np_dtype_to_dtype.get(array.dtype)
        if dtype is None:
            raise RuntimeError(f"dtype={array.dtype} has no DataType")
        return TensorDesc(dtype, array.shape)
    if desc.shape != list(array.shape):
        raise RuntimeError(f"the array has the shape {list(array.shape)}, and tensor_desc has {desc.shape}")
    wanted = dtype_to_np_dtype.get(desc.dtype)
    strings = desc.dtype == DataType.DT_STRING and array.dtype.kind in "SU"
    if not strings and (wanted is None or array.dtype != wanted):
        raise RuntimeError(f"the array has the dtype {array.dtype}, and tensor_desc has {desc.dtype}")
    return desc


def _widened(array: Any) -> Any:
    """Return bfloat16 numbers as ``float32``: the same 16 bits, followed by 16 zeros. ``array`` has any 16-bit type."""
    import numpy as np  # noqa: PLC0415  (imported when it is needed)

    return (array.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)


def create_npu_tensors(shape: Sequence[int], dtype: Any, addrs: list[int]) -> list[Any]:
    """Make one tensor over each address, without a copy and without ownership of the memory.

    The memory must stay valid while the tensors are used. Memory of an allocated cache may be reused after its
    deallocation, and ``finalize`` unmaps it. ``tensor_views`` and ``get_cache_tensors`` return tensors that keep the
    memory mapped.

    Args:
        shape: dimensions of each tensor, outermost first.
        dtype: a ``torch.dtype`` for torch tensors; a numpy dtype or a ``DataType`` for numpy arrays. ``DT_BF16`` gives
            ``uint16`` arrays that hold the raw bits.
        addrs: address of each tensor (uint64), none 0.

    Returns:
        A torch tensor or a numpy array for each address.

    Raises:
        TypeError: an argument has the wrong type, or ``dtype`` has no ``DataType``.
        ValueError: an address is outside uint64, or a dimension is outside int64.
        LLMException: ``LLM_PARAM_INVALID``: no addresses, an invalid shape, or memory that is not mapped readable and
            writable.
    """
    as_torch = type(dtype).__module__ == "torch" and type(dtype).__name__ == "dtype"
    data_type = _torch_type(dtype) if as_torch else _numpy_type(dtype)
    desc = CacheDesc(len(addrs), tuple(shape), data_type, Placement.HOST)
    views = _core.LooseCache(desc, addrs).views()
    if not as_torch:
        return [view.numpy() for view in views]
    torch = sys.modules["torch"]
    return [torch.from_dlpack(view) for view in views]


# torch has a type of its own for DT_BF16, and calls numpy's bool_ bool.
_TORCH_NAMES = {of: name.rstrip("_") for of, name in NUMPY_NAMES.items()}
_TORCH_NAMES[DataType.DT_BF16] = "bfloat16"
_TORCH_TYPES = {name: of for of, name in _TORCH_NAMES.items()}


def _torch_type(dtype: object) -> DataType:
    name = str(dtype).rpartition(".")[2]
    if name not in _TORCH_TYPES:
        raise TypeError(f"dtype={shown(dtype)} has no DataType")
    return _TORCH_TYPES[name]


def _numpy_type(dtype: Any) -> DataType:
    if isinstance(dtype, DataType):
        return dtype
    if dtype is None:
        raise TypeError("dtype must not be None; give a dtype of torch or numpy, or a DataType")
    numpy = _core.import_numpy(f"dtype={shown(dtype)}")

    from llm_datadist.original.data_type import np_dtype_to_dtype  # noqa: PLC0415  (it imports numpy)

    found = np_dtype_to_dtype.get(numpy.dtype(dtype))
    if found is None:
        raise TypeError(f"dtype={shown(dtype)} has no DataType")
    return found
