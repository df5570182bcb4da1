"""Re-exports of the argument validators under the path that existing clients import."""

from llm_datadist._core import (
    check_inner,
    check_int32,
    check_int64,
    check_isinstance,
    check_list_int32,
    check_list_int64,
    check_list_uint64,
    check_positive_or_set_default,
    check_uint8,
    check_uint16,
    check_uint32,
    check_uint64,
)
from llm_datadist.original.arguments import check_dict

__all__ = [
    "check_dict",
    "check_inner",
    "check_int32",
    "check_int64",
    "check_isinstance",
    "check_list_int32",
    "check_list_int64",
    "check_list_uint64",
    "check_positive_or_set_default",
    "check_uint8",
    "check_uint16",
    "check_uint32",
    "check_uint64",
]
