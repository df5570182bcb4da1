"""One measured figure, the file of all figures, and the ratios of figures that were measured in turn.

Not for: measuring (``comparison``, and the groups), or showing (``report``, ``picture``).
"""

from __future__ import annotations

import dataclasses
import json
import statistics
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Optional

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

OURS = "ours"
LIMIT = "limit"
# Units in which more is better. Every other unit (us, s, ns, MiB, cores) is a cost.
BETTER_IF_MORE = ("GB/s", "1/s")
SCHEMA = 1


class Missing(Exception):  # noqa: N818  (not a failure: a peer is absent)
    """A system cannot be measured here. The text is the reason that its row shows."""


@dataclass(frozen=True)
class Row:
    """One figure of one system. Without a median, it was not measured, and the note has the reason."""

    group: str
    op: str
    system: str
    setting: str = ""
    block_bytes: int = 0
    blocks: int = 0
    tensors: int = 1
    pages: str = "4K"
    threads: int = 0
    unit: str = "GB/s"
    median: Optional[float] = None
    low: Optional[float] = None
    high: Optional[float] = None
    samples: list[float] = field(default_factory=list)
    ratio: Optional[float] = None  # how many times as fast as this system ours is
    limit_ratio: Optional[float] = None  # speed of this system as a share of the machine's limit
    verified: bool = False
    note: str = ""

    @property
    def cell(self) -> tuple[str, str, int, int, int, str]:
        """The measured operation without the system. Rows of one cell are compared with each other."""
        return (self.group, self.op, self.block_bytes, self.blocks, self.tensors, self.pages)


@dataclass(frozen=True)
class Extra:
    """A document of a group that is written to the file beside the rows, such as the scale curves."""

    name: str
    value: Any


def measured(
    row: Row,
    samples: Sequence[float],
    ours: Optional[Sequence[float]] = None,
    limit: Optional[Sequence[float]] = None,
) -> Row:
    """``row`` with the figures of its rounds, and with its ratios to ours and to the limit in the same rounds."""
    return dataclasses.replace(
        row,
        median=rounded(statistics.median(samples)),
        low=rounded(min(samples)),
        high=rounded(max(samples)),
        samples=[rounded(sample) for sample in samples],
        ratio=None if ours is None or row.system == LIMIT else paired(ours, samples, row.unit),
        limit_ratio=None if limit is None else paired(samples, limit, row.unit),
    )


def paired(these: Sequence[float], those: Sequence[float], unit: str) -> float:
    """How many times as fast `these` are as `those`: the median over the rounds that both ran."""
    pairs = list(zip(these, those))
    if unit not in BETTER_IF_MORE:
        pairs = [(that, this) for this, that in pairs]
    # A cost of 0, such as no idle CPU, counts as `TINY`, to avoid a division by zero.
    return rounded(statistics.median(max(up, TINY) / max(down, TINY) for up, down in pairs))


def rounded(value: float) -> float:
    """Round to four significant digits, which is more than the clocks resolve."""
    return float(f"{value:.4g}")


def written(document: dict[str, Any], rows: Sequence[Row]) -> str:
    """The text of the file, with one row per line, so that diffs are readable."""
    head = json.dumps({"schema": SCHEMA, **document}, indent=1, sort_keys=True)
    lines = ",\n".join(json.dumps(slim(row)) for row in rows)
    return f'{head[:-2]},\n "rows": [\n{lines}\n]}}\n'


def slim(row: Row) -> dict[str, Any]:
    """A row as a dict, without fields that have their default value."""
    plain = {name: default.default for name, default in Row.__dataclass_fields__.items()}
    return {name: value for name, value in dataclasses.asdict(row).items() if value not in (plain[name], [])}


def read(path: Path) -> tuple[dict[str, Any], list[Row]]:
    """The document around the rows, and the rows."""
    document = json.loads(path.read_text())
    if document.pop("schema") != SCHEMA:
        raise ValueError(f"{path}: not written by this version of the benchmark")
    return document, [Row(**row) for row in document.pop("rows")]


TINY = 1e-9
