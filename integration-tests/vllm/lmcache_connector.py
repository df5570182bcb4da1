"""LMCache's connector of vLLM, in a form that vLLM 0.32 on a CPU accepts.

vLLM examines all imported modules for kernels. A library object of llvmlite, which LMCache imports, has a function for
each name, `__dict__` included, and vLLM fails on it, with this connector alone too.
"""

from __future__ import annotations

from typing import Any

from llvmlite.binding import ffi

_get = ffi._lib_wrapper.__getattr__


def _without_dict(self: Any, name: str) -> Any:
    if name == "__dict__":
        raise AttributeError(name)
    return _get(self, name)


ffi._lib_wrapper.__getattr__ = _without_dict

from vllm.distributed.kv_transfer.kv_connector.v1.lmcache_mp_connector import LMCacheMPConnector  # noqa: E402

__all__ = ["LMCacheMPConnector"]
