"""Identifiers use the words of the field, not a vocabulary of this project alone."""

from __future__ import annotations

import io
import re
import tokenize
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = ("benches", "crates", "examples", "fuzz", "integration-tests", "packages", "python", "tests", "tools")
PRIVATE = re.compile(r"(?i:(place|lane|turn|lead|knock|settle)s?|settled|carry|patience)|MOST|kMost|KEEP|FEW")
PRIVATE_IN_PYTHON = re.compile(r"(?i:near|far)")  # the ends of a transfer are local and remote
# Terms of the field: a read in place, and a count so far. `lanes` is a field of DLPack's types.
FIELD = re.compile(r"(in|out_of)_place|(so|how)_far|^lanes$")
NO_CODE = re.compile(r"""//[^\n]*|/\*[\s\S]*?\*/|r(#*)"[\s\S]*?"\1|"(?:\\[\s\S]|[^"\\])*"|'(?:\\.|[^'\\\n])'""")
TEST = re.compile(r"#\[test\]\s*(#\[[^\n]*\]\s*)*(pub )?fn \w+")  # the names of tests are sentences with any word


def names_of(path: Path) -> set[str]:
    text = path.read_text(encoding="utf-8")
    if path.suffix in (".py", ".pyi"):
        tokens = tokenize.generate_tokens(io.StringIO(text).readline)
        names = {token.string for token in tokens if token.type == tokenize.NAME}
        return {name for name in names if not name.startswith("test_")}
    return set(re.findall(r"\b[A-Za-z_]\w*", TEST.sub("", NO_CODE.sub('""', text))))


def is_private(name: str, *, python: bool) -> bool:
    parts = re.findall(r"kMost|[A-Z]+(?![a-z])|[A-Z]?[a-z]+", FIELD.sub("", name))
    words = [PRIVATE, PRIVATE_IN_PYTHON] if python else [PRIVATE]
    return name == "on" or any(word.fullmatch(part) for word in words for part in parts)


def test_names_have_no_private_words() -> None:
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*")) if "target" not in path.parts]
    found = {path: names_of(path) for path in files if path.suffix in (".rs", ".py", ".pyi", ".c", ".cpp", ".h")}
    assert len(found) > 1000
    wrong = {
        path: sorted(name for name in names if is_private(name, python=path.suffix == ".py"))
        for path, names in found.items()
    }
    assert not any(wrong.values()), "\n".join(
        f"{path.relative_to(ROOT)}: {names}" for path, names in wrong.items() if names
    )


def test_private_words_are_found() -> None:
    names = (
        "MOST_BLOCKS kMostRows _settle Turns on far_row read_in_place so_far lanes almost TCP_KEEPIDLE displace at_most"
    )
    found = [[name for name in names.split() if is_private(name, python=python)] for python in (False, True)]
    assert found == [["MOST_BLOCKS", "kMostRows", "_settle", "Turns", "on"], [*found[0], "far_row"]]
