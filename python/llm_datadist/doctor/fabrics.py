"""Loads UCX and NIXL as the engine does, and finds their versions, or why the engine cannot use them.

The rules are those of the crates `ucx` and `nixl`: `Library::open`.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator

UCX_LIBRARY = "libucp.so.0"
NIXL_LIBRARY = "libnixl_capi.so"
"""The names under which the system finds the libraries."""
_LOADING = {"UCX_HANDLE_ERRORS": "none", "UCX_MEM_EVENTS": "n"}
"""Variables that the engine, too, sets while it loads UCX, alone or with NIXL (docs/networks.md)."""
_MOST_DIGITS = 9


class FabricLibrary:
    """A library that reads memory of other hosts. Creating the object loads it.

    Args:
        path: path of the library, or the name under which the system finds it.
    """

    title: str
    """The name of the library in messages."""
    _oldest: tuple[int, int]

    def __init__(self, path: str) -> None:
        self.name = path
        self.version: tuple[int, int, int] | None = None
        self.reason: str | None = None
        """Why the engine cannot use it."""
        try:
            with _loading():
                self.reason = self._load(ctypes.CDLL(path))
        except (OSError, AttributeError) as error:
            self.reason = f"{self.title} cannot be loaded: {error}"

    def shown(self) -> str:
        """Return the version as text."""
        return "unknown" if self.version is None else ".".join(map(str, self.version))

    def _load(self, library: ctypes.CDLL) -> str | None:
        """Find the version. Return why the engine cannot use the library, or ``None``."""
        raise NotImplementedError

    def _refused(self) -> str | None:
        """Return why the engine does not use this version, or ``None``."""
        major, minor = self._oldest
        if self.version is not None and self.version[0] == major and self.version[:2] >= self._oldest:
            return None
        if self.version is None:
            return f"{self.title} cannot be used: its version is unknown"
        return f"{self.title} {self.shown()} cannot be used: {major}.{minor} or a later {major}.x is needed"


class UcxLibrary(FabricLibrary):
    """The library of UCX."""

    title = "UCX"
    _oldest = (1, 13)

    def __init__(self, path: str = UCX_LIBRARY) -> None:
        super().__init__(path)

    def _load(self, library: ctypes.CDLL) -> str | None:
        numbers = [ctypes.c_uint() for _ in range(3)]
        library.ucp_get_version(*(ctypes.byref(number) for number in numbers))
        self.version = (numbers[0].value, numbers[1].value, numbers[2].value)
        return self._refused()


class NixlLibrary(FabricLibrary):
    """The library of NIXL, with its plugin for UCX."""

    title = "NIXL"
    _oldest = (1, 0)

    def __init__(self, path: str = NIXL_LIBRARY) -> None:
        super().__init__(path)

    def _load(self, library: ctypes.CDLL) -> str | None:
        stub = library.nixl_capi_is_stub
        stub.restype = ctypes.c_bool
        if stub():
            return "NIXL cannot be used: its library is a stub, which contains no implementation"
        self.version = _nixl_version(library)
        return self._refused() or _no_plugin(library)


class _FileOfFunction(ctypes.Structure):
    """``Dl_info`` of the loader."""

    _fields_ = (
        ("file", ctypes.c_char_p),
        ("base", ctypes.c_void_p),
        ("symbol", ctypes.c_char_p),
        ("address", ctypes.c_void_p),
    )


def _nixl_version(library: ctypes.CDLL) -> tuple[int, int, int] | None:
    """Return the version that the files of NIXL contain: no function returns it."""
    found = _FileOfFunction()
    function = ctypes.cast(library.nixl_capi_create_configured_agent, ctypes.c_void_p)
    if not ctypes.CDLL(None).dladdr(function, ctypes.byref(found)) or not found.file:
        return None
    file = Path(os.fsdecode(found.file)).resolve()
    for named in (file.with_name("libnixl_common.so"), file):
        with contextlib.suppress(OSError):
            match = re.search(rb"NIXL version: \0*([0-9]+)\.([0-9]+)\.([0-9]+)", named.read_bytes())
            if match is not None and max(map(len, match.groups())) <= _MOST_DIGITS:
                return int(match[1]), int(match[2]), int(match[3])
    return None


class _AgentConfig(ctypes.Structure):
    """``nixl_capi_agent_config_t`` for an agent without threads, in both of its layouts (`crates/nixl/src/abi.rs`)."""

    _fields_ = (
        ("progress_thread", ctypes.c_bool),
        ("listen_thread", ctypes.c_bool),
        ("short_port", ctypes.c_uint16),
        ("port_or_strict", ctypes.c_uint),
        ("strict_or_workers", ctypes.c_uint),
        ("workers", ctypes.c_uint),
        ("progress_delay_us", ctypes.c_uint64),
        ("listen_delay_us", ctypes.c_uint64),
        ("telemetry", ctypes.c_bool),
    )


def _no_plugin(library: ctypes.CDLL) -> str | None:
    """Return why NIXL cannot load its plugin for UCX, or ``None``."""
    config = _AgentConfig(port_or_strict=1, strict_or_workers=1, workers=1, progress_delay_us=20_000)
    agent, kinds, params = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
    status = library.nixl_capi_create_configured_agent(b"doctor", ctypes.byref(config), ctypes.byref(agent))
    if status:
        return f"NIXL cannot be used: nixl_capi_create_configured_agent failed (NIXL status {status})"
    try:
        status = library.nixl_capi_get_plugin_params(agent, b"UCX", ctypes.byref(kinds), ctypes.byref(params))
        if status:
            reason = f"its plugin for UCX cannot be loaded (NIXL status {status})"
            return f"NIXL cannot be used: {reason}; set NIXL_PLUGIN_DIR to use another folder of plugins"
        library.nixl_capi_destroy_mem_list(kinds)
        library.nixl_capi_destroy_params(params)
    finally:
        library.nixl_capi_destroy_agent(agent)
    return None


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
