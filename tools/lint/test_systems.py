"""Systems that the engine refuses to build for, and the compiler version that the manifests name.

Not for: whether the engine runs on a system that it accepts (docs/testing.md names those it was run on).
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
RUSTC = shutil.which("rustc")
MESSAGE = "llm_datadist supports Linux on 64-bit little-endian processors only"
# The guard alone, without a standard library for the target, which need not be installed.
PRELUDE = """#![feature(no_core, rustc_attrs)]
#![no_core]
#[rustc_builtin_macro]
macro_rules! compile_error { () => {}; }
"""


def guard() -> str:
    """The `cfg` and the `compile_error!` under it, from the crate root."""
    text = (ROOT / "crates" / "core" / "src" / "lib.rs").read_text(encoding="utf-8")
    (found,) = re.findall(r"^#\[cfg\(not\(all\(target_os[^\n]*\ncompile_error!\([^;]*;", text, re.MULTILINE)
    return str(found)


@pytest.mark.skipif(RUSTC is None, reason="no rustc")
@pytest.mark.parametrize(
    ("target", "refused"),
    [
        ("x86_64-unknown-linux-gnu", False),
        ("aarch64-unknown-linux-gnu", False),
        ("i686-unknown-linux-gnu", True),
        ("s390x-unknown-linux-gnu", True),
        ("x86_64-apple-darwin", True),
        ("x86_64-pc-windows-gnu", True),
    ],
)
def test_unsupported_systems_are_refused_by_name(tmp_path: Path, target: str, refused: bool) -> None:
    assert RUSTC is not None
    source = tmp_path / "guard.rs"
    source.write_text(PRELUDE + guard(), encoding="utf-8")
    done = subprocess.run(
        [RUSTC, "--target", target, "--crate-type", "lib", "--emit", "metadata", "--out-dir", tmp_path, source],
        env={**os.environ, "RUSTC_BOOTSTRAP": "1"},
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "could not find specification" not in done.stderr, done.stderr
    assert (MESSAGE in done.stderr) == refused, done.stderr


def test_every_manifest_names_one_rust_version() -> None:
    text = (ROOT / "Cargo.toml").read_text(encoding="utf-8")
    (version,) = re.findall(r'^rust-version = "(\d+\.\d+)"', text, re.MULTILINE)
    manifests = sorted((ROOT / "crates").glob("*/Cargo.toml"))
    assert len(manifests) >= 3
    for manifest in manifests:
        assert "rust-version.workspace = true" in manifest.read_text(encoding="utf-8"), manifest
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert re.findall(r"Rust \((\d+\.\d+) or newer", readme) == [version], "the README names another version"
