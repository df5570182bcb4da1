"""How cost grows with size: runs the scale benchmark, stores its curves beside the rows, and writes their section.

The benchmark is ``benches/scale.rs``, and ``benches/scaling`` names the slopes. Not for: peers. The curves are of ours
only, because no peer has all of the counted objects.
"""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Union

from rows import OURS, Extra, Row

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT / "benches" / "scaling"))

import document  # noqa: E402  (of benches/scaling)
import drawing  # noqa: E402  (likewise)
from figures import PICTURES, Figures  # noqa: E402  (likewise)

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ask import Ask


def parts(_: Ask) -> list[str]:
    """One part, because the benchmark writes one file."""
    return ["curves"]


def run(ask: Ask, _: str) -> Iterator[Union[Row, Extra]]:
    """Yield the curves, or a row with the reason why there are none."""
    ask.breadcrumb(OURS)
    file = Path(ask.folder) / "scale.json"
    words = ["cargo", "bench", "--quiet", "-p", "llm-datadist-core", "--bench", "scale", "--", "--json", str(file)]
    try:
        done = subprocess.run(  # noqa: S603  (this project)
            [*words, *(["--quick"] if ask.quick else [])], cwd=ROOT, check=False, capture_output=True, text=True
        )
    except FileNotFoundError:
        yield Row("scale", "curves", OURS, note="not here: cargo")
        return
    if done.returncode != 0 or not file.exists():
        last = " ".join(done.stderr.splitlines()[-3:])[-240:]
        yield Row("scale", "curves", OURS, note=f"ended with {done.returncode}: {last}")
        return
    yield Extra("scale", json.loads(file.read_text()))


def draw(found: Any, folder: Path) -> None:
    """Draw the curves. For the results of this repository, also write the pages that are made from them."""
    figures = Figures(found)
    (folder / "scale.svg").write_text(drawing.drawn(figures))
    if folder.resolve() == PICTURES:
        document.PAGE.write_text(document.filled(document.PAGE.read_text(), figures, "peers.json"))


def section(found: Any, pictures: str = "") -> str:
    """The part of the page that shows the curves; `pictures` is the path from the page to its pictures."""
    figures = Figures(found)
    return f"""## How cost grows with size

`cargo bench -p llm-datadist-core --bench scale`; {figures.cpus} cores. The slope is the shape that explains all points
best, by least squares of the relative error; the exponent is that of the power law through the last two decades (0:
constant, 1: linear), fitted by `benches/scaling/slopes.py`. What it means for a rack and for ten thousand nodes:
[scaling.md](../../docs/scaling.md).

![cost over size]({pictures}scale.svg)

{document.slopes(figures)}

{document.constants(figures)}

{document.singles(figures)}
"""
