"""Measurements of `llm-datadist doctor --to` over TCP, for the tests with real libraries."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from test_doctor_link import rows_of, secret, serving, to

if TYPE_CHECKING:
    from pathlib import Path

    import pytest


def rows(backend: str, library: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Return the rows of a measurement whose other side insists on this backend."""
    monkeypatch.setenv("UCX_TLS", "tcp")
    monkeypatch.setenv("UCX_MODULES", "^efa")  # on some hosts, this module makes the process crash when it exits
    token = secret(folder / "token", "a shared token of some length")
    given = ["--token-file", token, f"--{backend}-library", library]
    with serving(*given, "--transfer-backend", backend) as other:
        return rows_of(to(f"127.0.0.1:{other.port}", *given))
