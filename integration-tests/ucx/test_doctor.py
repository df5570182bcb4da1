"""`llm-datadist doctor --to` measures reads by a real UCX over TCP: ``make test-ucx``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from llm_datadist.commands.doctor import link
from measured_link import rows
from test_doctor_link import check_measured

if TYPE_CHECKING:
    from pathlib import Path

LIBRARY = os.environ.get("LLM_DATADIST_UCX_LIBRARY", "")

pytestmark = pytest.mark.skipif(not LIBRARY, reason="needs a real UCX")


def test_ucx_is_measured_where_it_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = rows("ucx", LIBRARY, tmp_path, monkeypatch)
    check_measured(found[link.UCX], "fabric", "tcp")
    assert "ucx" in found[link.TCP]["unusable"]  # the other side insists on UCX
