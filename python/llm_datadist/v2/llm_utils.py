"""Functions of the original's ``llm_utils``, under the import path that existing clients use.

These parts of the original do not exist here: the functions and classes that pack arguments for its native module
(``pack_*``, ``CacheDescParser``, ``clone_cache_desc``, ``verify_cache_shape``, ``to_data_type``), and its transfer
thread (``TransferCacheParameters``, ``TransferCacheJob``, ``TransferAsyncThread``, ``transfer_cache_async``).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Optional

from llm_datadist import _core
from llm_datadist.original.init_options import listen_address

if TYPE_CHECKING:
    from collections.abc import Sequence

    from llm_datadist.original.data_type import DataType

__all__ = [
    "calc_tensor_size",
    "is_invalid_id",
    "is_valid_id",
    "layer_range_to_tensor_indices",
    "parse_listen_ip_info",
]

_NO_ID = 2**64 - 1


def is_invalid_id(value: int) -> bool:
    """Return whether ``value`` is ``2**64 - 1``, which means "no request id" or "no prefix id"."""
    return value == _NO_ID


def is_valid_id(value: int) -> bool:
    """Return whether ``value`` is the id of a request or of a prefix."""
    return value != _NO_ID


def layer_range_to_tensor_indices(layer_range: Optional[range], tensor_num_per_layer: int) -> list[int]:
    """Return the indices of the tensors that belong to a range of layers.

    Args:
        layer_range: the layers. ``None`` and an empty range mean all layers, for which the result is ``[]``.
        tensor_num_per_layer: number of tensors of one layer.
    """
    if not layer_range:
        return []
    return list(range(layer_range.start * tensor_num_per_layer, layer_range.stop * tensor_num_per_layer))


def parse_listen_ip_info(listen_ip_info: str) -> tuple[str, int]:
    """Return the address and the port of ``ip:port``.

    Args:
        listen_ip_info: the text. An IPv6 address is written as ``[ip]:port``, and is returned in brackets.

    Raises:
        TypeError: ``listen_ip_info`` is not a ``str``.
        ValueError: the port is not a uint16.
        LLMException: ``LLM_PARAM_INVALID``: the text is not of that form.
    """
    ip, port = listen_address(listen_ip_info)
    return ip, int(port)


def calc_tensor_size(shape: Sequence[int], data_type: DataType) -> int:
    """Return the size of one tensor in bytes.

    Args:
        shape: dimensions, outermost first.
        data_type: element type.

    Raises:
        TypeError: a dimension is not an ``int``.
        ValueError: a dimension is outside int64.
        LLMException: ``LLM_PARAM_INVALID``: not 1 to 31 dimensions above 0, 2^63 bytes or more, or no data type.
    """
    return _core.tensor_bytes(tuple(shape), data_type)
