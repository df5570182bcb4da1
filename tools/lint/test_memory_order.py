"""docs/memory-order.md names every file with an atomic or a fence, and only files and checks that exist."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "memory-order.md"
CORE = ROOT / "crates" / "core" / "src"
# Crates of tests and tools.
OTHER = {"testing", "fake-ucp", "licenses"}
# A declaration or a value of an atomic, a fence, an UnsafeCell, or a volatile access.
SHARED = re.compile(r"\bAtomic(?:Bool|Ptr|[UI](?:8|16|32|64|size))\b(?!;|, | as |\})|\bfence\(|UnsafeCell|_volatile\(")


def production(path: Path) -> str:
    """The code of a file without its comments, imports and tests."""
    text = path.read_text(encoding="utf-8")
    text = re.split(
        r"^#\[cfg\((?:test|all\(test\b.*)\)\]\n(?:pub\(crate\) )?mod \w+ \{", text, maxsplit=1, flags=re.MULTILINE
    )[0]
    text = re.sub(r"^(?:pub(?:\(\w+\))? )?use [^;]*;", "", text, flags=re.MULTILINE)
    return re.sub(r"//.*", "", text)


def test_every_file_with_an_atomic_is_on_the_page() -> None:
    page, found, missing = PAGE.read_text(encoding="utf-8"), 0, []
    for path in sorted((ROOT / "crates").glob("*/src/**/*.rs")):
        inside = path.relative_to(ROOT / "crates").parts
        if inside[0] in OTHER or "tests" in path.stem or "tests" in inside or not SHARED.search(production(path)):
            continue
        found += 1
        name = path.relative_to(CORE if inside[0] == "core" else ROOT).as_posix()
        missing += [] if f"`{name}`" in page else [name]
    assert found > 40, f"only {found} files"
    assert not missing, f"docs/memory-order.md does not name {missing}"


def test_the_page_names_what_exists() -> None:
    page = PAGE.read_text(encoding="utf-8")
    names = re.findall(r"`([\w/-]+/[\w/-]+\.(?:rs|py|sh)|\w+\.rs)`", page)
    assert len(names) > 40
    assert [name for name in names if not any((top / name).exists() for top in (ROOT, CORE))] == []
    tests = set(re.findall(r"`((?:[a-z]+_){2,}[a-z]+)`", page))
    known = {path.stem for path in (ROOT / "tests" / "litmus").glob("*.litmus")}
    sources = [*(ROOT / "crates").rglob("*.rs"), *(ROOT / "tests").rglob("*.py")]
    known |= set(re.findall(r"\w+", "\n".join(path.read_text(encoding="utf-8") for path in sources)))
    assert len(tests) > 10
    assert tests - known == set()


def test_every_litmus_test_is_on_the_page() -> None:
    page = PAGE.read_text(encoding="utf-8")
    strong = {path.stem for path in (ROOT / "tests" / "litmus").glob("*.litmus") if not path.stem.endswith("_weak")}
    assert len(strong) > 10
    assert {name for name in strong if f"`{name}`" not in page} == set()
