"""Versions of Python packages and of UCX, and whether a token is set."""

from __future__ import annotations

import platform
from importlib import metadata
from typing import TYPE_CHECKING

from llm_datadist import __version__
from llm_datadist.doctor import devices
from llm_datadist.doctor.finding import NOTE, Finding

if TYPE_CHECKING:
    from collections.abc import Mapping
    from pathlib import Path

    from llm_datadist.doctor.fabrics import UcxLibrary

_SECTION = "libraries"
_PACKAGES = ("numpy", "torch", "vllm")
_UCX_WHEELS = ("libucx-cu12", "libucx-cu13")
_TOKENS = ("LLM_DATADIST_TOKEN_FILE", "LLM_DATADIST_TOKEN")


def findings(root: Path, ucx: UcxLibrary, environment: Mapping[str, str]) -> list[Finding]:
    """Return the facts about libraries and settings."""
    found = [Finding(_SECTION, "llm_datadist", __version__), Finding(_SECTION, "Python", platform.python_version())]
    found += [Finding(_SECTION, name, _installed(name) or "not installed") for name in _PACKAGES]
    return [*found, _ucx(root, ucx), _token(environment)]


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


def _token(environment: Mapping[str, str]) -> Finding:
    names = [name for name in _TOKENS if environment.get(name)]
    if names:
        return Finding(_SECTION, "token", f"{names[0]} is set")
    value = "none in the environment: without link_token_file, only processes of this user on this host may link"
    return Finding(_SECTION, "token", value)
