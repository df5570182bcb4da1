"""Versions of Python packages and of UCX, and whether a token is set."""

from __future__ import annotations

import contextlib
import ctypes
import os
import platform
from importlib import metadata
from typing import TYPE_CHECKING

from llm_datadist import __version__
from llm_datadist.commands.doctor import devices
from llm_datadist.commands.doctor.finding import NOTE, Finding

if TYPE_CHECKING:
    from collections.abc import Iterator, Mapping
    from pathlib import Path

_SECTION = "libraries"
_PACKAGES = ("numpy", "torch", "vllm")
_UCX_WHEELS = ("libucx-cu12", "libucx-cu13")
_TOKENS = ("LLM_DATADIST_TOKEN_FILE", "LLM_DATADIST_TOKEN")

UCX_LIBRARY = "libucp.so.0"
"""The name under which the system finds the library."""
_LOADING = {"UCX_HANDLE_ERRORS": "none", "UCX_MEM_EVENTS": "n"}
"""Variables that the engine, too, sets while it loads UCX (docs/networks.md)."""
_OLDEST = (1, 13)


class UcxLibrary:
    """The library of UCX. Creating the object loads it by the rules of the engine (`Library::open` of the crate `ucx`).

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


def findings(root: Path, ucx: UcxLibrary, environment: Mapping[str, str]) -> list[Finding]:
    """Return the facts about libraries and settings."""
    found = [Finding(_SECTION, "llm_datadist", __version__), Finding(_SECTION, "Python", platform.python_version())]
    found += [Finding(_SECTION, name, _installed(name) or "not installed") for name in _PACKAGES]
    return [*found, _ucx(root, ucx), _token(environment)]


def no_token(environment: Mapping[str, str]) -> str | None:
    """Return why links have no token by default, or ``None``. The token itself is not read."""
    if any(environment.get(name) for name in _TOKENS):
        return None
    return "no token is set (token_file, or LLM_DATADIST_TOKEN_FILE), and UCX needs one"


def _installed(name: str) -> str | None:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def _ucx(root: Path, ucx: UcxLibrary) -> Finding:
    if ucx.reason is None:
        return Finding(_SECTION, "UCX", f"{ucx.shown()} ({ucx.name})")
    value = "not usable" if ucx.version is None else ucx.shown()
    if devices.no_rdma(root) is not None:
        return Finding(_SECTION, "UCX", f"{value}; not needed without an RDMA device")
    wheels = [name for name in _UCX_WHEELS if _installed(name)]
    remedy = "install UCX 1.13 or later from your distribution, if you want RDMA"
    if wheels:
        remedy = f"name the libucp.so.0 of the installed package {wheels[0]} with the option ucx_library"
    return Finding(_SECTION, "UCX", value, NOTE, f"{ucx.reason}; sockets are used between hosts", remedy)


def _token(environment: Mapping[str, str]) -> Finding:
    names = [name for name in _TOKENS if environment.get(name)]
    if names:
        return Finding(_SECTION, "token", f"{names[0]} is set")
    value = "none in the environment: without token_file, only processes of this user on this host may link"
    return Finding(_SECTION, "token", value)
