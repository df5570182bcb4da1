"""Loads UCX as the engine does, and finds its version, or why the engine cannot use it.

The rules are those of the crate `ucx`: `Library::open`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

UCX_LIBRARY = "libucp.so.0"
"""The name under which the system finds the library."""
_LOADING = {"UCX_HANDLE_ERRORS": "none", "UCX_MEM_EVENTS": "n"}
"""Variables that the engine, too, sets while it loads UCX (docs/networks.md)."""
_OLDEST = (1, 13)


class UcxLibrary:
    """The library of UCX. Creating the object loads it.

    Args:
        path: path of the library, or the name under which the system finds it.
    """

    def __init__(self, path: str = UCX_LIBRARY) -> None:
        self.name = path
        self.version: tuple[int, int, int] | None = None
        self.reason: str | None = None
        """Why the engine cannot use it."""
        try:
            with _loading():
                self.version = _version(ctypes.CDLL(path))
        except (OSError, AttributeError) as error:
            self.reason = f"UCX cannot be loaded: {error}"
        else:
            major, minor = _OLDEST
            if self.version[0] != major or self.version[:2] < _OLDEST:
                self.reason = f"UCX {self.shown()} cannot be used: {major}.{minor} or a later {major}.x is needed"

    def shown(self) -> str:
        """Return the version as text."""
        return "unknown" if self.version is None else ".".join(map(str, self.version))


def _version(library: ctypes.CDLL) -> tuple[int, int, int]:
    major, minor, patch = ctypes.c_uint(), ctypes.c_uint(), ctypes.c_uint()
    library.ucp_get_version(ctypes.byref(major), ctypes.byref(minor), ctypes.byref(patch))
    return major.value, minor.value, patch.value


@contextlib.contextmanager
def _loading() -> Iterator[None]:
    """Set the variables of ``_LOADING`` that are not set, and remove them afterwards."""
    added = {name: value for name, value in _LOADING.items() if name not in os.environ}
    os.environ.update(added)
    try:
        yield
    finally:
        for name in added:
            os.environ.pop(name, None)
