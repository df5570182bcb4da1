"""Runs systems in turn (A B A B), starting each round with another one. Poisons the destination before, and checks it.

Not for: the operations of the systems (each has a file), or processes (``__main__``).
"""

from __future__ import annotations

import dataclasses
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Callable, Optional

from rows import LIMIT, OURS, Missing, Row, measured

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from ask import Ask

# Number of loops that are still measured for the limit after the warm-up, and of warm-up turns that select them.
BEST = 4
LOOKS = 2
# A system that takes this many times as long as ours is measured in fewer rounds.
SLOW_RATIO = 4
ROUNDS_OF_THE_SLOW = 2


def nothing() -> None:
    """Do nothing: most systems need no action before and after their turn."""


@dataclass
class Entry:
    """One system in one setting, ready to run."""

    system: str
    # Only this call is timed. If it returns a float, that is the time in seconds, measured in another process.
    run: Callable[[], object]
    setting: str = ""
    threads: int = 1
    note: str = ""
    before: Callable[[], None] = nothing  # not timed: for example, wakes a stopped process
    after: Callable[[], None] = nothing
    failed: str = ""
    warm: float = 0.0  # seconds of the warm-up round
    slow: bool = False

    @property
    def name(self) -> str:
        """The name in the breadcrumb."""
        return f"{self.system}/{self.setting}"


@dataclass(frozen=True)
class Ground:
    """The data that all systems of one cell share: the row, the bytes of a round, and the destination."""

    row: Row
    amount: float  # amount of a round in the unit of the row; in 10^9 bytes for GB/s
    poison: Callable[[], None] = nothing
    wrong: Optional[Callable[[], Optional[str]]] = None  # returns what is wrong; None if it cannot be checked
    alike: bool = True  # whether all systems do the same work; otherwise there is no ratio


def contest(ask: Ask, ground: Ground, entries: Sequence[Entry]) -> Iterator[Row]:
    """Run all entries in turn. Yield one row for each, with its ratios to ours and to the best loop of the limit."""
    seconds: dict[str, list[float]] = {entry.name: [] for entry in entries}
    for round_ in range(ask.rounds + 1):
        for step in range(len(entries)):
            entry = entries[(step + round_) % len(entries)]
            if entry.failed or (entry.slow and round_ > ROUNDS_OF_THE_SLOW):
                continue
            took = one_round(ask, ground, entry)
            if took is not None and round_ > 0:
                seconds[entry.name].append(took)
            if took is not None and round_ == 0:
                entry.warm = took
        if round_ == 0:
            look_again(ask, ground, entries)
            drop_slow(entries)
    yield from judged(ground, entries, seconds)


def one_round(ask: Ask, ground: Ground, entry: Entry) -> Optional[float]:
    """Run one turn. Return its seconds, or None if it failed; `entry.failed` then has the reason."""
    ask.breadcrumb(entry.system)
    try:
        entry.before()
        ground.poison()
        began = time.perf_counter()
        said = entry.run()
        took = time.perf_counter() - began
        took = said if isinstance(said, float) else took
        entry.after()
        wrong = ground.wrong() if ground.wrong else None
    except Exception as failure:  # noqa: BLE001  (a peer that fails is a row with its reason)
        entry.failed = reason(failure)
        return None
    finally:
        ask.breadcrumb("")
    if wrong:
        entry.failed = f"wrong bytes: {wrong}"
        return None
    return took


def look_again(ask: Ask, ground: Ground, entries: Sequence[Entry]) -> None:
    """Run more warm-up turns if there are many loops, because one turn is not enough to find the fastest."""
    loops = [entry for entry in entries if entry.system == LIMIT]
    for _ in range(LOOKS - 1 if len(loops) > BEST else 0):
        for entry in loops:
            took = None if entry.failed else one_round(ask, ground, entry)
            entry.warm = entry.warm if took is None else min(entry.warm, took)


def drop_slow(entries: Sequence[Entry]) -> None:
    """After the warm-up, keep only the fastest loops of the limit, and mark slow systems, which get fewer rounds."""
    done = [entry for entry in entries if not entry.failed]
    for entry in sorted((entry for entry in done if entry.system == LIMIT), key=lambda entry: entry.warm)[BEST:]:
        entry.failed = "slower than others while warming up"
    ours = next((entry.warm for entry in done if entry.system == OURS), None)
    for entry in done:
        entry.slow = ours is not None and entry.warm > SLOW_RATIO * ours


def judged(ground: Ground, entries: Sequence[Entry], seconds: dict[str, list[float]]) -> Iterator[Row]:
    """Yield the rows of one cell. The limit is one row: the loop with the best median, named by its setting."""
    speeds = {name: [ground.amount / took for took in all_] for name, all_ in seconds.items()}
    if ground.row.unit not in ("GB/s", "1/s"):
        speeds = {name: [took * ground.amount for took in all_] for name, all_ in seconds.items()}
    done = [entry for entry in entries if not entry.failed]
    ours = next((speeds[entry.name] for entry in done if entry.system == OURS), None)
    loops = [entry for entry in done if entry.system == LIMIT]
    limit = min(loops, key=lambda entry: sorted(seconds[entry.name])[len(seconds[entry.name]) // 2], default=None)
    # If all loops failed, the row shows the reason of the first one.
    shown = limit or next((entry for entry in entries if entry.system == LIMIT), None)
    for entry in entries:
        if entry.system == LIMIT and entry is not shown:
            continue
        row = dataclasses.replace(
            ground.row, system=entry.system, setting=entry.setting, threads=entry.threads, note=entry.note
        )
        if entry.failed:
            yield dataclasses.replace(row, note="; ".join(filter(None, [entry.failed, entry.note])))
            continue
        beside = ours if ground.alike else None
        done_row = measured(row, speeds[entry.name], beside, speeds[limit.name] if limit else None)
        yield dataclasses.replace(done_row, verified=ground.wrong is not None)


def reason(failure: BaseException) -> str:
    """The reason of a failure in one line."""
    text = " ".join(str(failure).split())[:240]
    return text if isinstance(failure, Missing) and text else f"{type(failure).__name__}: {text}"
