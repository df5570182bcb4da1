"""Small requests between two processes: how long one call takes, and what 15,000 segments cost before the first.

Every call is clocked alone, back to back, over the same rows: median, 99th of a hundred and slowest. Not for:
throughput (``between``), or calls with pauses between them (``benches/transfer_latency.py``).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Optional

from between import Pairs, case_of
from between.adapter import PULL, PUSH, Case
from between.pair import Pair, Pattern
from between.systems import POOL, REGISTERED, TCP, of_kind
from rows import LIMIT, OURS, Row, measured
from turns import reason

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ask import Ask

MEMORY = 64 << 20
CELLS = ((4 << 10, 1), (16 << 10, 1), (16 << 10, 64))
FIGURES = ("p50", "p99", "slowest")
CALLS, QUICK_CALLS = 1000, 100  # a round
LONGEST_S = 0.6
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
    """One pair with one way to ask."""

    pair: Pair
    fresh: bool
    calls: int = 20
    found: list[tuple[float, ...]] = dataclasses.field(default_factory=list)
    failed: str = ""

    @property
    def setting(self) -> str:
        """Named apart only where the two ways differ."""
        peer = self.pair.peer
        return f"{peer.setting}, request made" if self.fresh else peer.setting

    def round(self, case: Case, most: int, keep: bool) -> None:
        """One turn, unless it failed before."""
        if self.failed:
            return
        try:
            took = self.turn(case, most)
        except Exception as failure:  # noqa: BLE001  (a peer that fails is a row with its reason)
            self.failed = reason(failure)
            return
        if keep:
            self.found.append(took)

    def turn(self, case: Case, most: int) -> tuple[float, ...]:
        """So many calls, checked afterwards."""
        pair = self.pair
        pair.wake()
        try:
            variant = pair.lay(case, self.fresh)[0][0]
            target = pair.destination(case.op)
            target.do("poison")
            took: tuple[float, ...] = pair.timed("each", variant, times=self.calls)
            wrong = target.do("wrong")
            assert not wrong, f"wrong bytes: {wrong}"
        finally:
            pair.rest()
        self.calls = max(20, min(most, int(LONGEST_S / max(took[0], 1e-7))))
        return took


def latency(ask: Ask, pairs: Pairs, part: str, case: Case) -> Iterator[Row]:
    """One size: every pair in turn, three figures each."""
    callers = callers_of(pairs, case.op)
    for pair in pairs.pairs:
        if pair.peer.once and case.op == PUSH:
            note = "not clocked call by call: a key can be put once"
            yield Row("small", part, pair.peer.system, pair.peer.setting, case.block, case.count, note=note)
    for round_ in range(ask.rounds + 1):
        for turn in range(len(callers)):
            callers[(turn + round_) % len(callers)].round(case, QUICK_CALLS if ask.quick else CALLS, keep=round_ > 0)
    for number, figure in enumerate(FIGURES):
        for caller in callers:
            yield judged(callers, caller, number, Row("small", f"{part} {figure}", "", unit="us"), case)


def callers_of(pairs: Pairs, op: str) -> list[Caller]:
    """Every pair that can repeat a call; one that prepares requests also with a request for each call."""
    able = [pair for pair in pairs.pairs if not (pair.peer.once and op == PUSH)]
    both = {True: (False, True), False: (False,)}
    return [Caller(pair, fresh) for pair in able for fresh in both[pair.peer.system == "nixl"]]


def judged(callers: list[Caller], caller: Caller, number: int, row: Row, case: Case) -> Row:
    """One figure of one pair, beside ours and the limit's."""
    peer = caller.pair.peer
    note = peer.note.replace("request prepared outside the clock", "").replace("request prepared", "").rstrip("; ")
    if peer.system == "nixl":
        note = f"{note}; " + (
            "request made by index for each call" if caller.fresh else "one prepared request, posted again"
        )
    if peer.system == LIMIT:
        note = "the first of its loops"
    row = dataclasses.replace(
        row,
        system=peer.system,
        setting=caller.setting,
        block_bytes=case.block,
        blocks=case.count,
        threads=peer.threads,
        note=note,
    )
    if caller.failed:
        return dataclasses.replace(row, note=caller.failed)
    samples = of(caller, number)
    row = measured(row, samples, of_system(callers, OURS, number), of_system(callers, LIMIT, number))
    return dataclasses.replace(row, verified=True)


def of(caller: Caller, number: int) -> list[float]:
    """One figure in microseconds."""
    return [took[number] * 1e6 for took in caller.found]


def of_system(callers: list[Caller], system: str, number: int) -> Optional[list[float]]:
    """The same of ours or the limit."""
    found = [of(caller, number) for caller in callers if caller.pair.peer.system == system and not caller.failed]
    return found[0] if found else None


# --- before the first call ---

STEPS = {
    "prepare": "prepare 15,000 segments",
    "request": "make a request over them",
    "transfer": "ask for and move them",
}


def prepare(ask: Ask, pairs: Pairs) -> Iterator[Row]:
    """Each system's own way; ours and the engine of Mooncake have nothing to prepare but lists."""
    case = case_of(PULL, SEGMENT, SEGMENTS, MEMORY)
    found: dict[tuple[str, str], dict[str, list[float]]] = {}
    failed: dict[tuple[str, str], str] = {}
    wanted = [pair for pair in pairs.pairs if pair.peer.system != LIMIT]
    for round_ in range(ask.rounds + 1):
        for turn in range(len(wanted)):
            pair = wanted[(turn + round_) % len(wanted)]
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
            made = measured(dataclasses.replace(row, op=STEPS[step]), samples, ours.get(step))
            yield dataclasses.replace(made, verified=step == "transfer")


def prepared(pair: Pair, case: Case) -> dict[str, float]:
    """Seconds of each step; the transfer is the whole of a call over rows nobody saw before, and is checked."""
    pair.wake()
    try:
        _, near = pair.both
        steps: dict[str, float] = near.do("prepared", case.count, case.block)
        pair.lay(case, fresh=True)
        target = pair.destination(case.op)
        target.do("poison")
        steps["transfer"] = pair.timed("go", "", times=1)
        wrong = target.do("wrong")
        assert not wrong, f"wrong bytes: {wrong}"
        return steps
    finally:
        pair.rest()
