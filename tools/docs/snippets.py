"""Runs the Python code blocks of documentation pages: snippets.py <page> ...

The `python` blocks of a page run in order, in one new process, in an empty folder, as a reader would type them. A block
whose preceding line is `<!-- not run: reason -->` is left out; the reasons are printed. Example programs that a page
includes run too, each in its own process. The output of a program is shown only if it fails, because many blocks show
errors on purpose. Ends with 1 if anything fails, or if no block was found at all.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

BLOCK = re.compile(
    r"^(?P<skip><!-- not run: (?P<reason>.+?) -->\n)?```python\b[^\n]*\n(?P<code>.*?)^```$", re.MULTILINE | re.DOTALL
)
INCLUDED = re.compile(r'^--8<-- "(examples/[^"]+\.py)"$', re.MULTILINE)
ROOT = Path(__file__).resolve().parents[2]
# The module is a distribution of its own, which no build of this tree installs.
HIXL = ROOT / "packages" / "hixl" / "src"
LIMIT_S = 120


def blocks(page: Path) -> tuple[list[tuple[int, str]], list[str]]:
    """Return the line and the text of each block to run, and the places and reasons of the blocks that are not run."""
    text = page.read_text(encoding="utf-8")
    run, left_out = [], []
    for found in BLOCK.finditer(text):
        line = text.count("\n", 0, found.start("code")) + 1
        if found["skip"]:
            left_out.append(f"{page}:{line}: {found['reason']}")
        elif not INCLUDED.fullmatch(found["code"].rstrip("\n")):
            run.append((line, found["code"]))
    return run, left_out


def run(program: Path, folder: Path) -> None:
    """Runs a program in a folder. If it fails, its output is part of the `RuntimeError`."""
    # A file, because a pipe would be read until the last process that has it open has ended.
    with tempfile.TemporaryFile() as output:
        try:
            done = subprocess.run(
                [sys.executable, program],
                cwd=folder,
                env={
                    **os.environ,
                    "PYTHONPATH": os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), str(HIXL)))),
                },
                check=False,
                timeout=LIMIT_S,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
            failure = f"ended with {done.returncode}" if done.returncode else ""
        except subprocess.TimeoutExpired:
            failure = f"ran longer than {LIMIT_S} s"
        if failure:
            output.seek(0)
            raise RuntimeError(f"{program.name} {failure}\n{output.read().decode(errors='replace')}")


def run_page(page: Path) -> int:
    """Runs the blocks of one page and the programs that it includes. Returns their number. Raises if one fails."""
    found, left_out = blocks(page)
    for reason in left_out:
        print("not run:", reason)
    programs = INCLUDED.findall(page.read_text(encoding="utf-8"))
    for program in programs:
        run(ROOT / program, ROOT)
    if not found:
        return len(programs)
    # Blank lines keep the line numbers of the page in tracebacks.
    code = ""
    for line, text in found:
        code += "\n" * (line - 1 - code.count("\n")) + text
    with tempfile.TemporaryDirectory() as folder:
        # The prefix is needed because a program named logging.py would hide the module of the standard library.
        program = Path(folder) / f"page_{page.stem.replace('-', '_')}.py"
        program.write_text(code, encoding="utf-8")
        run(program, Path(folder))
    return len(found) + len(programs)


def main() -> int:
    """Runs all pages, even if some fail."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("pages", nargs="+", type=Path)
    count, failed = 0, []
    for page in parser.parse_args().pages:
        try:
            ran = run_page(page)
            count += ran
            if ran:
                print(f"{page}: {ran} ran", flush=True)
        except RuntimeError as error:  # noqa: PERF203
            failed.append(f"{page}: {error}")
    print(f"{count} blocks and programs ran")
    for line in failed:
        print("FAILED", line, file=sys.stderr)
    return 1 if failed or not count else 0


if __name__ == "__main__":
    sys.exit(main())
