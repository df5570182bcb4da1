"""Comments of the Rust sources name only tests, items and files that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CRATES = ROOT / "crates"
# A name in backticks that may be a test: at least three words joined by underscores. Names that end in `_t` are
# types of libraries in C.
NAME = re.compile(r"`([a-z][a-z0-9]*(?:_[a-z0-9]+){2,})(?<!_t)`")
FILE = re.compile(r"`?((?:docs|tests|tools|crates|benches)/[\w/.-]+\.(?:md|rs|py|json))")


def split(line: str) -> tuple[str, str]:
    """Return the code and the comment of a line."""
    code, _, comment = line.partition("//")
    return code, comment


def test_comments_name_what_exists() -> None:
    sources = sorted(CRATES.rglob("*.rs"))
    lines = {path: path.read_text(encoding="utf-8").splitlines() for path in sources}
    code = [split(line)[0] for path in sources for line in lines[path]]
    code += [path.read_text(encoding="utf-8") for top in ("tests", "tools") for path in (ROOT / top).rglob("*.py")]
    known = set(re.findall(r"\w+", "\n".join(code)))
    looked, missing = 0, []
    for path in sources:
        for number, line in enumerate(lines[path], 1):
            comment = split(line)[1]
            names = [name for name in NAME.findall(comment) if name not in known]
            files = [
                file
                for file in FILE.findall(comment)
                if not any((top / file).exists() for top in (ROOT, CRATES / "core"))
            ]
            looked += len(NAME.findall(comment))
            missing += [f"{path.relative_to(ROOT)}:{number}: {name}" for name in names + files]
    assert looked > 100, "no names found"
    assert not missing, "\n".join(missing)
