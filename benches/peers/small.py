"""Small requests between two processes: the latency of one call, and the cost to prepare 15,000 segments.

Every call is timed alone, back to back, with the same rows: median, 99th percentile and maximum. The bytes of the last
call of a turn are verified. Not for: throughput (``between``).
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from typing import TYPE_CHECKING, Optional

from between import Pairs, case_of
from between.adapter import PULL, PUSH, Case
from between.pair import Pair, Pattern
from between.systems import POOL, REGISTERED, TCP, Peer, of_kind
from comparison import reason
from rows import LIMIT, OURS, Row, measured

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ask import Ask

MEMORY = 64 << 20
CELLS = ((4 << 10, 1), (16 << 10, 1), (1 << 20, 1), (16 << 10, 64))
FIGURES = ("p50", "p99", "slowest")
CALLS, QUICK_CALLS = 1000, 100  # calls of a round
FIRST = 20  # calls of the first turn of a system
LONGEST_S = 0.6
LOOKS, BEST = 2, 2  # turns that select the loops of the limit, and how many are selected
SEGMENTS, SEGMENT = 15_000, 4 << 10
PREPARE = "prepare"


def parts(ask: Ask) -> list[str]:
    """Both directions in every kind of memory, and preparing."""
    if ask.quick:
        return [f"{PULL} {POOL}", PREPARE]
    return [*(f"{op} {kind}" for kind in (POOL, REGISTERED, TCP) for op in (PULL, PUSH)), PREPARE]


def run(ask: Ask, part: str) -> Iterator[Row]:
    """All cells of one part."""
    op, _, kind = part.partition(" ")
    pattern = Pattern(MEMORY)
    pairs = Pairs(ask, of_kind(kind or POOL), pattern)
    try:
        yield from pairs.failures(Row("small", part, ""))
        if part == PREPARE:
            yield from prepare(ask, pairs)
            return
        for block, count in CELLS[-1:] if ask.quick else CELLS:
            yield from latency(ask, pairs, part, case_of(op, block, count, MEMORY))
    finally:
        pairs.end()


@dataclasses.dataclass
class Caller:
    """One pair with one kind of request; for the limit, one of its loops."""

    pair: Pair
    fresh: bool = False
    variant: str = ""
    threads: int = 0
    calls: int = FIRST
    found: list[tuple[float, ...]] = dataclasses.field(default_factory=list)
    warm: float = math.inf
    failed: str = ""

    @property
    def system(self) -> str:
        """The system of the pair."""
        return self.pair.peer.system

    @property
    def setting(self) -> str:
        """The setting, with the kind of request if there are several."""
        setting = f"{self.pair.peer.setting} {self.variant}".strip()
        return f"{setting}, request made" if self.fresh else setting

    def round(self, case: Case, most: int, keep: bool) -> None:
        """Run one turn, unless an earlier one failed."""
        if self.failed:
            return
        try:
            took = self.timed_rounds(case, most)
        except Exception as failure:  # noqa: BLE001  (a peer that fails is a row with its reason)
            self.failed = reason(failure)
            return
        if keep:
            self.found.append(took)
        else:
            self.warm = min(self.warm, took[0])

    def timed_rounds(self, case: Case, most: int) -> tuple[float, ...]:
        """Make the calls of one turn, and verify the bytes of the last one."""
        pair = self.pair
        pair.wake()
        try:
            pair.lay_once(case, self.fresh)
            target = pair.destination(case.op)
            target.do("poison")
            took: tuple[float, ...] = pair.timed("each", self.variant, times=self.calls)
            wrong = target.do("wrong")
            assert not wrong, f"wrong bytes: {wrong}"
        finally:
            pair.rest()
        self.calls = max(FIRST, min(most, int(LONGEST_S / max(took[0], 1e-7))))
        return took


def latency(ask: Ask, pairs: Pairs, part: str, case: Case) -> Iterator[Row]:
    """Measure one size: run every pair in turn, and yield three figures of each."""
    base = Row("small", part, "", block_bytes=case.block, blocks=case.count)
    for pair in pairs.pairs:
        if pair.peer.once and case.op == PUSH:
            note = "not clocked call by call: a key can be put once"
            yield dataclasses.replace(base, system=pair.peer.system, setting=pair.peer.setting, note=note)
    most = QUICK_CALLS if ask.quick else CALLS
    callers, failures = callers_of(pairs, case)
    for peer, why in failures:
        yield dataclasses.replace(base, system=peer.system, setting=peer.setting, note=why)
    for look in range(LOOKS):
        for caller in callers:
            if look == 0 or caller.system == LIMIT:
                caller.round(case, most, keep=False)
    callers = chosen(callers)
    for round_ in range(ask.rounds):
        for shift in range(len(callers)):
            callers[(shift + round_) % len(callers)].round(case, most, keep=True)
    yield from judged(callers, part, case)


def callers_of(pairs: Pairs, case: Case) -> tuple[list[Caller], list[tuple[Peer, str]]]:
    """Callers of all pairs that can repeat a call, and the failures. NIXL has a second caller with new requests."""
    callers: list[Caller] = []
    failures: list[tuple[Peer, str]] = []
    for pair in pairs.pairs:
        if pair.peer.once and case.op == PUSH:
            continue
        pair.wake()
        try:
            ways = pair.lay_once(case, fresh=False)
        except Exception as failure:  # noqa: BLE001  (a peer that fails is a row with its reason)
            failures.append((pair.peer, reason(failure)))
            continue
        finally:
            pair.rest()
        callers += [Caller(pair, variant=variant, threads=threads) for variant, threads in ways]
        if pair.peer.system == "nixl":
            callers.append(Caller(pair, fresh=True))
    return callers, failures


def chosen(callers: list[Caller]) -> list[Caller]:
    """The callers without the slower loops of the limit."""
    loops = sorted((caller for caller in callers if caller.system == LIMIT), key=lambda caller: caller.warm)
    return [caller for caller in callers if caller not in loops[BEST:]]


def judged(callers: list[Caller], part: str, case: Case) -> Iterator[Row]:
    """Yield three figures of each caller, with the ratios to ours and to the loop of the limit with the best median."""
    loops = [caller for caller in callers if caller.system == LIMIT]
    well = [caller for caller in loops if caller.found and not caller.failed]
    limit = min(well, key=lambda caller: statistics.median(of(caller, 0)), default=None)
    shown = limit or next(iter(loops), None)
    ours = next((caller for caller in callers if caller.system == OURS and not caller.failed), None)
    for number, figure in enumerate(FIGURES):
        row = Row("small", f"{part} {figure}", "", "", case.block, case.count, unit="us")
        for caller in callers:
            if caller.system == LIMIT and caller is not shown:
                continue
            yield figure_of(caller, number, row, ours, limit)


def figure_of(caller: Caller, number: int, row: Row, ours: Optional[Caller], limit: Optional[Caller]) -> Row:
    """One figure of one caller."""
    peer = caller.pair.peer
    note = peer.note.replace("request prepared outside the clock", "").replace("request prepared", "").rstrip("; ")
    if peer.system == "nixl":
        note = f"{note}; " + (
            "request made by index for each call" if caller.fresh else "one prepared request, posted again"
        )
    row = dataclasses.replace(
        row, system=peer.system, setting=caller.setting, threads=caller.threads or peer.threads, note=note
    )
    if caller.failed:
        return dataclasses.replace(row, note=caller.failed)
    beside = [None if other is None else of(other, number) for other in (ours, limit)]
    row = measured(row, of(caller, number), *beside)
    return dataclasses.replace(row, verified=True)


def of(caller: Caller, number: int) -> list[float]:
    """One figure of each turn, in microseconds."""
    return [took[number] * 1e6 for took in caller.found]


# --- before the first call ---

STEPS = {
    "prepare": "prepare 15,000 segments",
    "request": "make a request over them",
    "transfer": "ask for and move them",
}
# Each system prepares in its own way, so these steps are not compared with each other.
PREPARED = {
    OURS: "one registration of one contiguous piece as a cache of 15,000 rows: the same time for any number of them",
    "nixl": "2 x 15,000 descriptors; the memory was registered before the clock starts",
    "mooncake": "lists of 15,000 addresses and lengths of both sides; the memory was registered in one piece before",
    "mooncake store": "15,000 names and addresses; the objects were put before the clock starts",
    "ucxx": "15,000 views and tags on the local side; the remote side needs as many",
}


def prepare(ask: Ask, pairs: Pairs) -> Iterator[Row]:
    """Measure the preparation of each system. Ours and the engine of Mooncake only prepare lists."""
    case = case_of(PULL, SEGMENT, SEGMENTS, MEMORY)
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    failed: dict[tuple[str, str], str] = {}
    wanted = [pair for pair in pairs.pairs if pair.peer.system != LIMIT]
    for round_ in range(ask.rounds + 1):
        for shift in range(len(wanted)):
            pair = wanted[(shift + round_) % len(wanted)]
            name = (pair.peer.system, pair.peer.setting)
            if name in failed:
                continue
            try:
                steps = prepared(pair, case)
            except Exception as failure:  # noqa: BLE001  (as above)
                failed[name] = reason(failure)
                continue
            for step, took in steps.items():
                if round_:
                    found.setdefault(name, {}).setdefault(step, []).append(took * 1e3)
    ours = found.get((OURS, POOL), {})
    for pair in wanted:
        name = (pair.peer.system, pair.peer.setting)
        row = Row("small", PREPARE, *name, SEGMENT, SEGMENTS, threads=pair.peer.threads, unit="ms")
        if name in failed:
            yield dataclasses.replace(row, note=failed[name])
        for step, samples in found.get(name, {}).items():
            moved = step == "transfer"
            row = dataclasses.replace(row, op=STEPS[step], note=pair.peer.note if moved else PREPARED[pair.peer.system])
            made = measured(row, samples, ours.get(step) if moved else None)
            yield dataclasses.replace(made, verified=moved)


def prepared(pair: Pair, case: Case) -> dict[str, float]:
    """The seconds of each step. The transfer is a complete call with new rows, and is verified."""
    pair.wake()
    try:
        _, local = pair.both
        steps: dict[str, float] = local.do("prepared", case.count, case.block)
        pair.lay(case, fresh=True)
        target = pair.destination(case.op)
        target.do("poison")
        steps["transfer"] = pair.timed("go", "", times=1)
        wrong = target.do("wrong")
        assert not wrong, f"wrong bytes: {wrong}"
        return steps
    finally:
        pair.rest()
