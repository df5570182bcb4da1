"""`llm-datadist doctor --to` measures reads by a real NIXL over TCP: ``make test-nixl``."""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from llm_datadist.doctor import measure
from measured_link import rows
from test_doctor_link import check_measured

if TYPE_CHECKING:
    from pathlib import Path

LIBRARY = os.environ.get("LLM_DATADIST_NIXL_LIBRARY", "")

pytestmark = pytest.mark.skipif(not LIBRARY, reason="needs a real NIXL")


def test_nixl_is_measured_where_it_works(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = rows("nixl", LIBRARY, tmp_path, monkeypatch)
    check_measured(found[measure.NIXL], "fabric", "tcp")
    assert "nixl" in found[measure.TCP]["unusable"]  # the other side insists on NIXL
