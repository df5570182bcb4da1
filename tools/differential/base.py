"""Builds the package of another commit in an environment of its own."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def run(*command: object, where: Path = ROOT) -> str:
    """Run a command, and return its standard output. Its errors go to the terminal."""
    words = [str(word) for word in command]
    return subprocess.run(words, cwd=where, check=True, stdout=subprocess.PIPE, text=True).stdout


def python_of(commit: str, folder: Path) -> Path:
    """Return a Python interpreter that has the package of `commit`. Builds it in `folder`, unless it is there."""
    commit = run("git", "rev-parse", "--verify", f"{commit}^{{commit}}").strip()
    made = folder / commit
    python = made / "venv" / "bin" / "python"
    if (made / "complete").exists():
        return python
    shutil.rmtree(made, ignore_errors=True)
    tree, packed = made / "tree", made / "tree.tar"
    tree.mkdir(parents=True)
    run("git", "archive", "--output", packed, commit)
    with tarfile.open(packed) as archive:
        archive.extractall(tree, filter="data")
    run(sys.executable, "-m", "venv", made / "venv")
    wheels = made / "wheels"
    maturin = Path(sys.executable).parent / "maturin"
    run(maturin, "build", "--release", "--locked", "--target-dir", folder / "target", "--out", wheels, where=tree)
    (wheel,) = wheels.glob("*.whl")
    run(python, "-m", "pip", "install", "--quiet", "--disable-pip-version-check", wheel)
    (made / "complete").touch()
    return python
