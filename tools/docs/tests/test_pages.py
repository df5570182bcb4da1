"""Numbers and references in the documentation that can become stale, compared with the code.

Not for: snippets (`test_examples.py`, `tools/docs/snippets.py`), or generated pages (`test_conformance.py`,
`benches/tests`).
"""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[3]
CORE = ROOT / "crates" / "core" / "src"
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md"), *(ROOT / "benches" / "results").glob("*.md")])
SOURCES = sorted(
    path
    for folder in ("crates", "python", "benches", "examples")
    for path in (ROOT / folder).rglob("*")
    if path.suffix in {".rs", ".py", ".pyi", ".h"} and "target" not in path.parts
)


def constant(file: str, name: str) -> int:
    """The value of a constant of the core, written as a product or a shift of decimal numbers."""
    found = re.search(rf"const {name}: \w+ = ([^;]+);", (CORE / file).read_text())
    assert found, f"{file} has no constant {name}"
    text = found[1].replace("_", "")
    assert re.fullmatch(r"[\d\s*<]+", text), text
    return int(eval(text))  # noqa: S307  (digits and operators, as just checked)


NUMBERS = [
    ("docs/links.md", "session/call_pool.rs", "MAX_CALLS", "| calls over one link at a time | {}; "),
    ("docs/links.md", "session/registry.rs", "MAX_LINKS", "| links of one engine | {} |"),
    ("docs/links.md", "session/registry.rs", "MAX_COMMS", "| communicators (rank tables) of one engine | {}, "),
    (
        "docs/links.md",
        "session/known_cache.rs",
        "MAX_STORED_BYTES",
        "| bytes of descriptions of remote caches kept for each link | {} |",
    ),
    ("docs/links.md", "engine/links.rs", "MAX_LINKING", "| any number; {} are linked at a time |"),
    ("docs/links.md", "protocol/frame.rs", "VERSION", "The version is {}."),
    ("docs/links.md", "protocol/frame.rs", "VERSION", "\n| --- | --- |\n| {} | "),
    ("docs/deployment.md", "protocol/frame.rs", "VERSION", "Every frame carries a wire version, now {}."),
    ("docs/deployment.md", "protocol/frame.rs", "VERSION", "this process uses version {}`"),
    (
        "docs/links.md",
        "transfer/executor.rs",
        "MAX_WORKERS_OF_CLUSTER",
        "| calls of `link` that dial at a time | {} in each group ",
    ),
    ("docs/links.md", "engine/links.rs", "GROUPS", "| groups of addresses for `link` | {} |"),
    ("CHANGELOG.md", "protocol/frame.rs", "VERSION", "The wire is version {}."),
]


@pytest.mark.parametrize(("page", "file", "name", "text"), NUMBERS)
def test_pages_state_the_numbers_of_the_code(page: str, file: str, name: str, text: str) -> None:
    assert text.format(f"{constant(file, name):,}") in (ROOT / page).read_text()


def test_readme_names_the_minimum_rust_version() -> None:
    version = re.search(r'rust-version = "([\d.]+)"', (ROOT / "Cargo.toml").read_text())
    assert version
    assert f"Rust ({version[1]} or newer)" in (ROOT / "README.md").read_text()


def test_no_page_or_source_refers_to_an_unpublished_document() -> None:
    assert len(PAGES) > 10
    assert len(SOURCES) > 150
    unpublished = re.compile(r"(?<![\w-])(python-api|cpp-api|engine|clients)\.md\b")
    stale = [
        f"{path.relative_to(ROOT)}:{at}"
        for path in [*PAGES, *SOURCES]
        for at, line in enumerate(path.read_text().splitlines(), 1)
        if unpublished.search(line)
    ]
    assert not stale


def test_sections_of_the_contract_that_are_quoted_exist() -> None:
    anchors = set(re.findall(r'<a id="([^"]+)">', (ROOT / "docs" / "llm-datadist" / "contract.md").read_text()))
    assert "7.12" in anchors
    assert "cpp-4" in anchors
    quoted = {
        (prefix.strip(" ,"), number)
        for path in SOURCES
        for prefix, number in re.findall(r"contract(, C\+\+)? §(\d+(?:\.\d+)?)", path.read_text())
    }
    assert len(quoted) > 30
    # The contradictions are numbered, and listed in one section.
    quoted = {(prefix, "17" if number.startswith("17.") else number) for prefix, number in quoted}
    missing = [(prefix, number) for prefix, number in quoted if ("cpp-" if prefix else "") + number not in anchors]
    assert not missing


def test_links_between_pages_lead_somewhere() -> None:
    broken = []
    for page in PAGES:
        targets = re.findall(r"\]\(([^)#\s]+)(?:#[^)]*)?\)", page.read_text())
        here = [target for target in targets if "://" not in target and not (page.parent / target).exists()]
        broken += [f"{page.relative_to(ROOT)}: {target}" for target in here]
    assert not broken


def test_readme_explains_before_it_builds() -> None:
    lines = (ROOT / "README.md").read_text().splitlines()
    assert len(lines) <= 120
    first_screen = "\n".join(lines[:30])
    assert "![" in first_screen, "the picture"
    assert not re.search(r"rustup|build-essential|compiler|cargo|apt-get", first_screen)
    assert "Huawei" not in first_screen


def test_pages_repeat_the_durations_of_the_readme() -> None:
    readme = " ".join((ROOT / "README.md").read_text().split())
    found = re.search(r"the first build takes ([\w ]+?), the replay ([\w ]+?), and the tests ([\w ]+?)\.", readme)
    assert found, "the README says how long its two commands take"
    build, demo, test = found.groups()

    def text(page: str) -> str:
        return " ".join((ROOT / page).read_text().split())

    assert f"the build takes {build}" in text("docs/install.md")
    assert f"in about {demo} on two cores" in text("docs/install.md")
    assert f"After the build, it takes {test} on two cores" in text("docs/install.md")
    assert f"takes about {demo} on two cores" in text("docs/how-to/replay-a-trace.md")
    assert re.search(rf"\| `make demo` \| [^|]+ \| {demo} \|", text("docs/performance.md"))
    assert re.search(rf"\| `make test` \| [^|]+ \| {test} on two cores \|", text("CONTRIBUTING.md"))
    assert f"TEST_MINUTES := {test} " in text("Makefile")


def test_pages_name_the_packages_of_the_readme() -> None:
    def packages(page: str) -> list[str]:
        text = (ROOT / page).read_text().replace("\\\n", " ")
        (found,) = re.findall(r"apt-get install (.+)", text)
        return str(found).split()

    assert packages("README.md") == packages("docs/install.md")
    assert {"git", "build-essential", "pkg-config", "cmake", "python3-venv", "iproute2"} <= set(packages("README.md"))
