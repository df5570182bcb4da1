"""How `snippets.py` runs the blocks of a page, and what it prints. Not for: the pages themselves (`make docs`)."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

SNIPPETS = Path(__file__).resolve().parents[1] / "snippets.py"


def run(page: Path, text: str) -> subprocess.CompletedProcess[str]:
    """Run the blocks of a page with that text."""
    page.write_text(text, encoding="utf-8")
    return subprocess.run(
        [sys.executable, str(SNIPPETS), str(page)], capture_output=True, text=True, timeout=120, check=False
    )


BLOCK = """
```python
import sys

print("shown to readers")
print("an error that the page shows on purpose", file=sys.stderr)
```
"""


def test_output_of_a_page_that_passes_is_not_shown(tmp_path: Path) -> None:
    done = run(tmp_path / "page.md", BLOCK)
    assert done.returncode == 0
    assert "1 blocks and programs ran" in done.stdout
    assert "shown to readers" not in done.stdout
    assert "on purpose" not in done.stdout + done.stderr


def test_output_of_a_page_that_fails_is_shown(tmp_path: Path) -> None:
    done = run(tmp_path / "page.md", BLOCK + "\n```python\nraise ValueError('in line 10')\n```\n")
    assert done.returncode == 1
    assert "FAILED" in done.stderr
    assert "shown to readers" in done.stderr
    assert "on purpose" in done.stderr
    assert "line 10" in done.stderr
    assert "ValueError: in line 10" in done.stderr
