"""Versions of Python packages, of UCX and of NIXL, and whether a token is set."""

from __future__ import annotations

import platform
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING

from llm_datadist import __version__
from llm_datadist.doctor import devices, fabrics
from llm_datadist.doctor.finding import NOTE, Finding

if TYPE_CHECKING:
    from collections.abc import Mapping

    from llm_datadist.doctor.fabrics import NixlLibrary, UcxLibrary

_SECTION = "libraries"
_PACKAGES = ("numpy", "torch", "vllm")
_UCX_WHEELS = ("libucx-cu12", "libucx-cu13")
_NIXL_WHEELS = ("nixl-cu12", "nixl-cu13")
_TOKENS = ("LLM_DATADIST_TOKEN_FILE", "LLM_DATADIST_TOKEN")


def findings(root: Path, ucx: UcxLibrary, nixl: NixlLibrary, environment: Mapping[str, str]) -> list[Finding]:
    """Return the facts about libraries and settings."""
    found = [Finding(_SECTION, "llm_datadist", __version__), Finding(_SECTION, "Python", platform.python_version())]
    found += [Finding(_SECTION, name, _installed(name) or "not installed") for name in _PACKAGES]
    return [*found, _ucx(root, ucx), _nixl(root, nixl), _token(environment)]


def no_token(environment: Mapping[str, str]) -> str | None:
    """Return why links have no token by default, or ``None``. The token itself is not read."""
    if any(environment.get(name) for name in _TOKENS):
        return None
    return "no token is set (link_token_file, or LLM_DATADIST_TOKEN_FILE), and UCX needs one"


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


def _nixl(root: Path, nixl: NixlLibrary) -> Finding:
    if nixl.reason is None:
        return Finding(_SECTION, "NIXL", f'{nixl.shown()} ({nixl.name}); used only with transfer_backend="nixl"')
    value = "not usable" if nixl.version is None else nixl.shown()
    packaged = _nixl_of_wheels()
    if packaged is not None and Path(packaged).resolve() == Path(nixl.name).resolve():
        packaged = None  # that is the library that cannot be used
    if nixl.name == fabrics.NIXL_LIBRARY:  # otherwise the user has chosen the library, and gets the reason
        if devices.no_rdma(root) is not None:
            return Finding(_SECTION, "NIXL", f"{value}; not needed without an RDMA device")
        if packaged is None and nixl.version is None:
            return Finding(_SECTION, "NIXL", f'{value}; needed only with transfer_backend="nixl"')
    meaning = f'{nixl.reason}; with transfer_backend="nixl", init fails'
    remedy = "install NIXL 1.0 or a later 1.x" if packaged is None else f'set nixl_library="{packaged}"'
    return Finding(_SECTION, "NIXL", value, NOTE, meaning, f"{remedy}, if you want NIXL")


def _nixl_of_wheels() -> str | None:
    """Return the path of the library in an installed package of NIXL."""
    for name in filter(_installed, _NIXL_WHEELS):
        for file in metadata.files(name) or ():
            if file.name == fabrics.NIXL_LIBRARY:
                return str(file.locate())
    return None


def _token(environment: Mapping[str, str]) -> Finding:
    names = [name for name in _TOKENS if environment.get(name)]
    if names:
        return Finding(_SECTION, "token", f"{names[0]} is set")
    value = "none in the environment: without link_token_file, only processes of this user on this host may link"
    return Finding(_SECTION, "token", value)
