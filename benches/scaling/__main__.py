"""Slopes of the scale curves, and the tables of the paper plan: ``python benches/scaling [--json FILE] [--write]``.

Without ``--write`` the slopes are printed and nothing is changed. Not for: measuring (``cargo bench --bench scale``).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import document
import drawing
from figures import PICTURES, Figures
from figures import document as read


def main() -> None:
    """Read, and print or write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, help="figures; those of benches/results by default")
    parser.add_argument("--write", action="store_true", help="write docs/scaling.md and the picture anew")
    options = parser.parse_args()
    source, found = read(options.json)
    figures = Figures(found)
    if not options.write:
        print(document.slopes(figures))
        return
    document.PAGE.write_text(document.filled(document.PAGE.read_text(), figures, source.name))
    (PICTURES / "scale.svg").write_text(drawing.drawn(figures))


if __name__ == "__main__":
    main()
