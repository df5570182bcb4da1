"""`llm-datadist doctor --to` measures reads by a real UCX over TCP: ``make test-ucx``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from llm_datadist.doctor import measure
from test_doctor_link import check_measured, rows_of, serving, to

if TYPE_CHECKING:
    from pathlib import Path

LIBRARY = os.environ.get("LLM_DATADIST_UCX_LIBRARY", "")

pytestmark = pytest.mark.skipif(not LIBRARY, reason="needs a real UCX")


def test_ucx_is_measured_where_it_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("UCX_TLS", "tcp")
    token = tmp_path / "token"
    token.write_text("a shared token of some length")
    token.chmod(0o600)
    given = ["--token-file", str(token), "--ucx-library", LIBRARY]
    with serving(*given, "--transfer-backend", "ucx") as other:
        rows = rows_of(to(f"127.0.0.1:{other.port}", *given))
    check_measured(rows[measure.UCX], "fabric", "tcp")
    assert "ucx" in rows[measure.TCP]["unusable"]  # the other side insists on UCX
