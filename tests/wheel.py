"""Checks that a wheel carries the licence texts of what is linked into it: `wheel.py dist/*.whl`."""

from __future__ import annotations

import re
import sys
import zipfile
from pathlib import Path

FILE = "llm_datadist/THIRD-PARTY-LICENSES"


def main(paths: list[str]) -> int:
    """Print each wheel; 1 if one of them, or the only one, lacks the texts."""
    if not paths:
        print("wheel.py: no wheel", file=sys.stderr)
        return 1
    for path in paths:
        with zipfile.ZipFile(path) as wheel:
            names = wheel.namelist()
            text = wheel.read(FILE).decode() if FILE in names else ""
        crates = re.findall(r"^[\w-]+ \d+\.\d+\.\d+[^ ]* \(", text, re.MULTILINE)
        own = [name for name in names if name.endswith(".dist-info/licenses/LICENSE")]
        if len(crates) < 20 or "Permission is hereby granted" not in text or not own:
            print(f"{path}: {FILE} or LICENSE is missing or incomplete: {text[:300]}", file=sys.stderr)
            return 1
        print(f"{Path(path)}: the licence texts of {len(crates)} crates")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
