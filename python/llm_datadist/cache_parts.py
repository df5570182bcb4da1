"""Descriptors of caches whose tensors differ (``CacheDesc.of_parts``). The original does not have them."""

from __future__ import annotations

from typing import TYPE_CHECKING

from llm_datadist import _core
from llm_datadist.status import raise_if_false

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llm_datadist.data_type import DataType
    from llm_datadist.types import CacheDesc

__all__ = ["DescOfParts"]


class DescOfParts:
    """The base of ``CacheDesc``: it joins descriptors, and returns the text of one."""

    _data_type: DataType
    _parts: tuple[CacheDesc, ...] = ()

    @property
    def parts(self) -> tuple[CacheDesc, ...]:
        """Descriptors of neighbouring tensors, if the tensors of the cache differ; otherwise empty.

        The original does not have this property.
        """
        return self._parts

    @classmethod
    def of_parts(cls: type[CacheDesc], parts: Sequence[CacheDesc]) -> CacheDesc:  # type: ignore[misc]
        """Return the descriptor of one cache with the tensors of all ``parts``, in this order.

        Each part describes some equal tensors. Tensors of different parts may have different shapes, element types and
        row strides, but all have the same number of rows (dimension 0), because a row number names one row in each
        tensor. ``shape``, ``data_type`` and ``row_stride`` of the result are those of the first part, and its shape is
        a ``tuple``. The descriptors of the parts are copied. The original does not have this method.

        Args:
            parts: a list or tuple of at least one descriptor. All have the same placement, ``batch_dim_index`` 0, and
                neither a layout nor parts.

        Raises:
            TypeError: an argument has the wrong type.
            LLMException: ``LLM_PARAM_INVALID``: no parts, a part without tensors, or parts that do not fit together.
                Sizes are checked when the descriptor is used.
        """
        _core.check_isinstance("parts", parts, [list, tuple], cls, allow_none=False)
        raise_if_false(parts, "parts=[] must be a list of at least one CacheDesc")
        first = parts[0]
        copies = []
        for index, part in enumerate(parts):
            raise_if_false(part.num_tensors > 0, "parts[{}].num_tensors=0 must be above 0", index)
            raise_if_false(not part.parts, "parts[{}] has parts; give its parts instead", index)
            raise_if_false(part.layout is None, "parts[{}].layout must be None where tensors differ", index)
            raise_if_false(part.batch_dim == 0, "parts[{}].batch_dim_index={} must be 0", index, part.batch_dim)
            raise_if_false(
                part.placement == first.placement,
                "parts[{}].placement={} must be {}, as in parts[0]",
                index,
                part.placement,
                first.placement,
            )
            raise_if_false(
                part.shape[0] == first.shape[0],
                "parts[{}].shape[0]={} must be {}, the number of rows of parts[0]",
                index,
                part.shape[0],
                first.shape[0],
            )
            copies.append(
                cls(part.num_tensors, tuple(part.shape), part.data_type, part.placement, row_stride=part.row_stride)
            )
        tensors = sum(part.num_tensors for part in copies)
        desc = cls(tensors, tuple(first.shape), first.data_type, first.placement, row_stride=first.row_stride)
        desc._parts = tuple(copies)
        return desc

    def _data_type_of(self, tensor: int) -> DataType:
        """Return the element type of a tensor."""
        for part in self._parts:
            if tensor < part.num_tensors:
                return part.data_type
            tensor -= part.num_tensors
        return self._data_type

    def __repr__(self: CacheDesc) -> str:  # type: ignore[misc]
        if self._parts:
            return f"CacheDesc.of_parts({list(self._parts)})"
        stride = "" if self._row_stride is None else f", row_stride={self._row_stride}"
        return (
            f"CacheDesc(num_tensors={self._num_tensors}, shape={self._shape}, data_type={self._data_type}, "
            f"placement={self._placement}, batch_dim_index={self._batch_dim_index}, "
            f"seq_len_dim_index={self._seq_len_dim_index},kv_tensor_format={self._kv_tensor_format}{stride}"
            f"{'' if self._layout is None else f', layout={self._layout}'})"
        )
