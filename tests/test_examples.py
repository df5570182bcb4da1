"""The README's example and every file in `examples/`, run as a reader would run them.

Not for: what the calls do in detail; each verb has its own file.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def run(arguments: list[str]) -> str:
    """Run Python on `arguments` in a fresh process; its output, or a failure that shows what it said."""
    done = subprocess.run(  # noqa: S603  (this interpreter, our own files)
        [sys.executable, "-W", "error", *arguments], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.name)
def test_example_runs(path: Path) -> None:
    assert run([str(path)]).strip(), "an example shows something"


def test_there_are_examples() -> None:
    assert len(EXAMPLES) >= 2


def test_readme_example_runs() -> None:
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(encoding="utf-8"), re.DOTALL)
    assert blocks, "the README shows Python"
    for block in blocks:
        output = run(["-c", block])
        assert "1.5" in output
        assert "'direct': 1" in output
