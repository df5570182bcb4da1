"""The shipped third-party licence texts, compared with the dependencies that `cargo tree` lists.

Not for: whether a licence is allowed (`crates/licenses`), or the files of `make install` (`test_cpp_install.py`).
"""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path

import pytest

import llm_datadist

ROOT = Path(__file__).resolve().parents[2]
CARGO = shutil.which("cargo")


@pytest.mark.skipif(CARGO is None, reason="no cargo")
def test_package_contains_licenses_of_linked_crates() -> None:
    assert CARGO is not None
    words = "tree --locked --package llm-datadist-py --edges normal,no-proc-macro --prefix none --format"
    tree = subprocess.run(
        [CARGO, *words.split(), "{p} ({l})"], cwd=ROOT, capture_output=True, text=True, timeout=120, check=True
    ).stdout
    linked = {re.sub(r" v(\d)", r" \1", line) for line in tree.splitlines() if "llm-datadist" not in line}
    linked = {line.removesuffix(" (*)") for line in linked}
    assert len(linked) > 20, tree
    text = (Path(llm_datadist.__file__).parent / "THIRD-PARTY-LICENSES").read_text(encoding="utf-8")
    head = text.split("\n====", 1)[0].splitlines()
    listed = {line.rsplit(" ", 1)[0] for line in head if "(" in line}
    # `cargo metadata` also counts dependencies that features of tests enable, so a few more may be listed.
    assert linked <= listed, linked - listed
    assert len(listed) < 2 * len(linked)
    # The licence that every user must pass on has its text, and so has the standard library.
    assert "Permission is hereby granted" in text
    assert "\nThe Rust standard library\n" in text
