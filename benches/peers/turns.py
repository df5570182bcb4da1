"""Systems in turn, A B A B: who begins changes each round, the destination is poisoned before and checked after.

Not for: what the systems do (each has a file), or processes (``__main__``).
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

# Loops that stay in the race for the limit after the warm-up, and how many turns of theirs that takes.
BEST = 4
LOOKS = 2
# Who takes so many times as long as ours is not measured more exactly than in a few rounds.
FAR_BEHIND = 4
ROUNDS_OF_THE_SLOW = 2


def nothing() -> None:
    """What most systems need around their turn."""


@dataclass
class Entry:
    """One system in one setting, ready to go."""

    system: str
    # The clock is around this call alone, unless it answers with a float: seconds by the clock of another process.
    run: Callable[[], object]
    setting: str = ""
    threads: int = 1
    note: str = ""
    before: Callable[[], None] = nothing  # outside the clock: wake a stopped process, ...
    after: Callable[[], None] = nothing
    failed: str = ""
    warm: float = 0.0  # seconds of the round that does not count
    slow: bool = False

    @property
    def name(self) -> str:
        """As the breadcrumb names it."""
        return f"{self.system}/{self.setting}"


@dataclass(frozen=True)
class Ground:
    """What the systems of one cell share: the row they fill, the bytes of a round, and the destination."""

    row: Row
    amount: float  # of the unit, in units of 10^9 for GB/s: what a round moves
    poison: Callable[[], None] = nothing
    wrong: Optional[Callable[[], Optional[str]]] = None  # what is wrong with the destination; None if nothing can tell
    alike: bool = True  # whether all do the same; if not there is no ratio


def contest(ask: Ask, ground: Ground, entries: Sequence[Entry]) -> Iterator[Row]:
    """Run all in turn; one row for each, beside ours and the best that the limit's loops reached."""
    seconds: dict[str, list[float]] = {entry.name: [] for entry in entries}
    for round_ in range(ask.rounds + 1):
        for turn in range(len(entries)):
            entry = entries[(turn + round_) % len(entries)]
            if entry.failed or (entry.slow and round_ > ROUNDS_OF_THE_SLOW):
                continue
            took = one_turn(ask, ground, entry)
            if took is not None and round_ > 0:
                seconds[entry.name].append(took)
            if took is not None and round_ == 0:
                entry.warm = took
        if round_ == 0:
            look_again(ask, ground, entries)
            settle(entries)
    yield from judged(ground, entries, seconds)


def one_turn(ask: Ask, ground: Ground, entry: Entry) -> Optional[float]:
    """Seconds of one turn, or None if it failed, which the entry then says."""
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
    """One turn says little of which loop is fastest: more for each of them, where there are many."""
    loops = [entry for entry in entries if entry.system == LIMIT]
    for _ in range(LOOKS - 1 if len(loops) > BEST else 0):
        for entry in loops:
            took = None if entry.failed else one_turn(ask, ground, entry)
            entry.warm = entry.warm if took is None else min(entry.warm, took)


def settle(entries: Sequence[Entry]) -> None:
    """After the warm-up: of many hand-written loops the fastest go on, and who is far behind gets fewer rounds."""
    done = [entry for entry in entries if not entry.failed]
    for entry in sorted((entry for entry in done if entry.system == LIMIT), key=lambda entry: entry.warm)[BEST:]:
        entry.failed = "slower than others while warming up"
    ours = next((entry.warm for entry in done if entry.system == OURS), None)
    for entry in done:
        entry.slow = ours is not None and entry.warm > FAR_BEHIND * ours


def judged(ground: Ground, entries: Sequence[Entry], seconds: dict[str, list[float]]) -> Iterator[Row]:
    """The rows of one cell. The limit is one row: the loop that is best by its median, named by its setting."""
    speeds = {name: [ground.amount / took for took in all_] for name, all_ in seconds.items()}
    if ground.row.unit not in ("GB/s", "1/s"):
        speeds = {name: [took * ground.amount for took in all_] for name, all_ in seconds.items()}
    done = [entry for entry in entries if not entry.failed]
    ours = next((speeds[entry.name] for entry in done if entry.system == OURS), None)
    loops = [entry for entry in done if entry.system == LIMIT]
    limit = min(loops, key=lambda entry: sorted(seconds[entry.name])[len(seconds[entry.name]) // 2], default=None)
    # If none of the loops came through, the first says why.
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
    """One line of why something failed."""
    text = " ".join(str(failure).split())[:240]
    return text if isinstance(failure, Missing) and text else f"{type(failure).__name__}: {text}"
