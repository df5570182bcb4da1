"""Runs the mutants of `mutants.json`, each against the tests of its own area: run.py [--only AREA] [--out FILE].

All Rust mutants are compiled into one copy of the core, in `target/mutants`. The environment variable `MUTANT` enables
one of them. Python mutants are edits of a copy of the package. A mutant is killed if its tests fail or take longer than
`LIMIT_S`. The run ends if the tests of an area fail without a mutant, or if the line of a mutant is not in the tree: a
change of such a line must also change the list. `--select` keeps the first mutants of each area that compile, out of a
list of `draw.py`, and rewrites `mutants.json`. Not for CI: a run takes up to an hour.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
WORK = ROOT / "target" / "mutants"
TREE = WORK / "tree"
CORE = Path("crates") / "core" / "src"
LIST = HERE / "mutants.json"
LIMIT_S = 120
SWITCH = """
pub mod mutants {
    pub fn on(number: u32) -> bool {
        static ON: std::sync::OnceLock<Option<u32>> = std::sync::OnceLock::new();
        *ON.get_or_init(|| std::env::var("MUTANT").ok()?.parse().ok()) == Some(number)
    }
}
"""

Mutant = dict[str, Any]


def copy_tree() -> None:
    """Copies every file that git tracks or does not ignore."""
    shutil.rmtree(TREE, ignore_errors=True)
    command = ["git", "ls-files", "--cached", "--others", "--exclude-standard", "-z"]
    names = subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.PIPE).stdout.decode().split("\0")
    for name in filter(None, names):
        if (ROOT / name).is_file():
            (TREE / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(ROOT / name, TREE / name)


def line_number(path: Path, mutant: Mutant) -> int:
    """Returns the number of the line that a mutant changes, from 0."""
    lines = path.read_text(encoding="utf-8").splitlines()
    function = ""
    found = []
    for at, line in enumerate(lines):
        if name := re.search(r"\bfn (\w+)", line):
            function = name[1]
        if line.strip() == mutant["line"] and function == mutant["function"]:
            found.append(at)
    if len(found) != 1:
        sys.exit(f"{len(found)} such lines instead of 1 in {path.name}, fn {mutant['function']}: {mutant['line']}")
    return found[0]


def write_mutants(mutants: list[Mutant]) -> dict[tuple[str, int], int]:
    """Writes all mutants into the copy. Returns (file, line) → index of the mutant."""
    line_of: dict[tuple[str, int], int] = {}
    for index, mutant in enumerate(mutants):
        path = ROOT / CORE / mutant["file"]
        line_of[mutant["file"], line_number(path, mutant)] = index
    for file in {file for file, _ in line_of}:
        lines = (ROOT / CORE / file).read_text(encoding="utf-8").splitlines()
        for (_, at), index in (entry for entry in line_of.items() if entry[0][0] == file):
            old, new = mutants[index]["old"], mutants[index]["new"]
            test = f"crate::mutants::on({index + 1})"
            instead = f"(if {test} {{ {new} }} else {{ {old} }})" if new else f"if {test} {{}} else {{ {old} }}"
            lines[at] = lines[at].replace(old, instead, 1)
        (TREE / CORE / file).write_text("\n".join(lines) + "\n", encoding="utf-8")
    root = ROOT / CORE / "lib.rs"
    (TREE / CORE / "lib.rs").write_text(root.read_text(encoding="utf-8") + SWITCH, encoding="utf-8")
    return line_of


def build() -> tuple[list[Path], set[tuple[str, int]]]:
    """Compiles the copy. Returns the test programs, and the lines that do not compile as (file, number from 0)."""
    command = ["cargo", "test", "--package", "llm-datadist-core", "--lib", "--test", "integration", "--no-run"]
    command += ["--message-format", "json", "--target-dir", str(WORK / "build")]
    environment = {**os.environ, "RUSTFLAGS": "--cap-lints allow"}
    ended = subprocess.run(command, cwd=TREE, env=environment, check=False, capture_output=True, text=True)
    programs, wrong = [], set()
    for line in ended.stdout.splitlines():
        entry = json.loads(line)
        if entry.get("executable"):
            programs.append(Path(entry["executable"]))
        message = entry.get("message")
        if isinstance(message, dict) and message.get("level") == "error":
            for span in message["spans"]:
                name = Path(span["file_name"])
                wrong |= {(str(name).partition("core/src/")[2], span["line_start"] - 1)}
    if ended.returncode and not wrong:
        sys.exit(ended.stderr)
    return programs, wrong


def select(drawn: list[Mutant], of_each: int) -> list[Mutant]:
    """Returns the first `of_each` mutants of each area that compile together."""
    refused: set[int] = set()
    while True:
        chosen, count = [], dict.fromkeys((mutant["area"] for mutant in drawn), 0)
        for at, mutant in enumerate(drawn):
            if at not in refused and count[mutant["area"]] < of_each:
                count[mutant["area"]] += 1
                chosen.append(at)
        line_of = write_mutants([drawn[at] for at in chosen])
        _, wrong = build()
        bad = {chosen[line_of[line]] for line in wrong if line in line_of}
        print(f"{len(chosen)} mutants, {len(bad)} do not compile", file=sys.stderr)
        if not bad:
            if wrong:
                sys.exit(f"errors in lines without a mutant: {sorted(wrong)}")
            return [{key: value for key, value in drawn[at].items() if key != "spare"} for at in chosen]
        refused |= bad


def passes(command: list[str], environment: dict[str, str], where: Path) -> bool:
    """Whether a test command passes within `LIMIT_S`."""
    process = subprocess.Popen(
        command, cwd=where, env=environment, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
    )  # fmt: skip
    try:
        return process.wait(LIMIT_S) == 0
    except subprocess.TimeoutExpired:
        return False
    finally:
        # Also end the processes that a timed-out test has started.
        subprocess.run(["pkill", "-KILL", "-s", str(process.pid)], check=False)
        process.wait()


def run_rust(mutants: list[Mutant], tests: dict[str, list[str]]) -> list[bool]:
    """Whether each mutant of the core is killed."""
    write_mutants(mutants)
    programs, wrong = build()
    if wrong:
        sys.exit(f"these lines do not compile: {sorted(wrong)}")
    killed = []
    base = {**os.environ, "RUST_BACKTRACE": "0", "CARGO_MANIFEST_DIR": str(TREE / "crates" / "core")}
    base.pop("MUTANT", None)
    where = TREE / "crates" / "core"

    def area_passes(area: str, environment: dict[str, str]) -> bool:
        return all(passes([str(program), *tests[area]], environment, where) for program in programs)

    for area in dict.fromkeys(mutant["area"] for mutant in mutants):
        if not area_passes(area, base):
            sys.exit(f"the tests of {area} fail without a mutant")
    for at, mutant in enumerate(mutants):
        killed.append(not area_passes(mutant["area"], {**base, "MUTANT": str(at + 1)}))
        report(mutant, killed[-1])
    return killed


def run_python(mutants: list[Mutant]) -> list[bool]:
    """Whether each mutant of the Python package is killed."""
    package = WORK / "python" / "llm_datadist"
    killed = []
    environment = {**os.environ, "PYTHONPATH": str(package.parent), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
    checked: set[tuple[str, ...]] = set()
    for mutant in mutants:
        shutil.rmtree(package.parent, ignore_errors=True)
        shutil.copytree(ROOT / "python", package.parent)
        tests = [*mutant["tests"]]
        if tuple(tests) not in checked and not passes([*command, *tests], environment, ROOT):
            sys.exit(f"these tests fail without a mutant: {tests}")
        checked.add(tuple(tests))
        path = package / mutant["file"]
        source = path.read_text(encoding="utf-8")
        if source.count(mutant["old"]) != 1:
            sys.exit(f"{source.count(mutant['old'])} places in {mutant['file']}: {mutant['old']}")
        path.write_text(source.replace(mutant["old"], mutant["new"]), encoding="utf-8")
        killed.append(not passes([*command, *tests], environment, ROOT))
        report(mutant, killed[-1])
    return killed


def check(whole: dict[str, Any]) -> None:
    """Exits with a message unless the line of every mutant, and every test file, is in the tree."""
    for mutant in whole["rust"]:
        line_number(ROOT / CORE / mutant["file"], mutant)
    for mutant in whole["python"]:
        found = (ROOT / "python" / "llm_datadist" / mutant["file"]).read_text(encoding="utf-8").count(mutant["old"])
        if found != 1:
            sys.exit(f"{found} places in {mutant['file']}: {mutant['old']}")
        if missing := [test for test in mutant["tests"] if not (ROOT / test.partition("::")[0]).is_file()]:
            sys.exit(f"these tests of a mutant are not in the tree: {missing}")
    print(f"{len(whole['rust'])} Rust and {len(whole['python'])} Python mutants have their places")


def report(mutant: Mutant, killed: bool) -> None:
    """Prints one line of progress."""
    what = f"{mutant['old']} => {mutant['new'] or '(left out)'}".replace("\n", " ")
    print(f"{'killed  ' if killed else 'SURVIVED'} {mutant['area']}: {mutant['file']}: {what}", flush=True)


def main() -> None:
    """Runs, checks or selects mutants, as the options say."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--select", type=Path, help="choose from this list of draw.py, and write it to mutants.json")
    parser.add_argument("--check", action="store_true", help="only check that every mutant has its place")
    parser.add_argument("--only", default="", help="an area")
    parser.add_argument("--out", type=Path, help="a file for the results")
    options = parser.parse_args()
    whole = json.loads(LIST.read_text(encoding="utf-8")) if LIST.exists() else {"tests": {}, "rust": [], "python": []}
    if options.check:
        check(whole)
        return
    copy_tree()
    if options.select:
        whole["rust"] = select(json.loads(options.select.read_text(encoding="utf-8")), 30)
        LIST.write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
        return
    wanted = [[mutant for mutant in whole[part] if options.only in ("", mutant["area"])] for part in ("rust", "python")]
    began = time.monotonic()
    killed = (run_rust(wanted[0], whole["tests"]) if wanted[0] else []) + run_python(wanted[1])
    results: dict[str, list[int]] = {}
    for mutant, dead in zip(wanted[0] + wanted[1], killed):
        of_area = results.setdefault(mutant["area"], [0, 0])
        of_area[0] += dead
        of_area[1] += 1
    for area, (count, whole_area) in results.items():
        print(f"{area}: {count} of {whole_area} killed")
    print(f"{sum(killed)} of {len(killed)} killed in {time.monotonic() - began:.0f} s")
    if options.out:
        survivors = [mutant for mutant, dead in zip(wanted[0] + wanted[1], killed) if not dead]
        options.out.write_text(
            json.dumps({"areas": results, "survivors": survivors}, indent=1) + "\n", encoding="utf-8"
        )


if __name__ == "__main__":
    main()
