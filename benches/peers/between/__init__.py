"""Between two processes of one host: pull and push of shuffled blocks. Every system has its own pair of processes.

Each part is one operation in one kind of memory (``systems``). All pairs move the same list of blocks with the same
bytes. The local process of a pair makes and times the transfers; the remote process has the other memory. Pairs that
use CPU while idle are stopped outside their turns, so that they do not slow down others. Not for: single calls
(``small``), or copies inside one process (``local``).
"""

from __future__ import annotations

import dataclasses
import math
from functools import partial
from typing import TYPE_CHECKING

import numpy as np

from between.adapter import AUTO, HUGE, PULL, PUSH, Case
from between.pair import Failed, Pair, Pattern, Process
from between.systems import HIXL, HIXL_TCP, POOL, REGISTERED, TCP, Peer, of_kind
from comparison import Entry, Ground, contest, reason
from rows import LIMIT, Row

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ask import Ask

KIB = 1 << 10
SMALL_PAGES = "4K"
# Block size → numbers of blocks, in addition to the number that fits into the memory.
SMALL_COUNTS = {
    4 * KIB: (1, 64, 4096),
    16 * KIB: (1, 64, 4096),
    64 * KIB: (64,),
    256 * KIB: (64,),
    1024 * KIB: (1,),
    2048 * KIB: (),
}
MAX_BLOCKS = 16384
OTHER_PAGES = (16 * KIB, 256 * KIB, 1024 * KIB)  # block sizes of the series with other pages
QUICK = {16 * KIB: (64,), 256 * KIB: ()}
SHORTEST_S = 0.01
MAX_REPEATS = 500
TRIES = 3


def parts(ask: Ask) -> list[str]:
    """Both directions in every kind of memory."""
    if ask.quick:
        return [f"{PULL} {POOL}", f"{PUSH} {POOL}", f"{PULL} {REGISTERED}"]
    small = [f"{op} {kind}" for kind in (POOL, REGISTERED, TCP, HIXL, HIXL_TCP) for op in (PULL, PUSH)]
    return [*small, f"{PULL} {POOL} {HUGE}", f"{PULL} {REGISTERED} {HUGE}", f"{PULL} {REGISTERED} {AUTO}"]


def run(ask: Ask, part: str) -> Iterator[Row]:
    """All sizes of one part."""
    op, kind, pages = [*part.split(), ""][:3]
    pattern = Pattern(ask.mib << 20)
    pairs = Pairs(ask, of_kind(kind, pages), pattern)
    plain = Row("between", f"{op} {kind}", "", pages=pages or SMALL_PAGES)
    try:
        yield from pairs.failures(plain)
        for block, count in sizes(ask):
            if pages and (count * block < pattern.size or block not in OTHER_PAGES):
                continue
            row = dataclasses.replace(plain, block_bytes=block, blocks=count)
            yield from pairs.cell(row, case_of(op, block, count, pattern.size))
    finally:
        pairs.end()


def sizes(ask: Ask) -> Iterator[tuple[int, int]]:
    """Block sizes and numbers of blocks."""
    for block, counts in (QUICK if ask.quick else SMALL_COUNTS).items():
        fit = (ask.mib << 20) // block
        yield from (
            (block, count) for count in sorted({*(count for count in counts if count < fit), min(fit, MAX_BLOCKS)})
        )


def case_of(op: str, block: int, count: int, size: int) -> Case:
    """A case with `count` random rows on each side."""
    order = np.random.default_rng(block + count)
    rows = size // block
    return Case(op, block, order.permutation(rows)[:count], order.permutation(rows)[:count])


class Pairs:
    """The pairs of one part, all started and linked."""

    def __init__(self, ask: Ask, peers: list[Peer], pattern: Pattern) -> None:
        self.ask = ask
        self.missing: list[tuple[Peer, str]] = []
        self.pairs: list[Pair] = []
        for peer in peers:
            if not ask.wants(peer.asked_as):
                continue
            try:
                pair = Pair(peer, pattern, ask.folder, apart=ask.apart)
            except Exception as failure:  # noqa: BLE001  (a peer that is not here is a row with its reason)
                self.missing.append((peer, reason(failure)))
                continue
            pair.rest()
            self.pairs.append(pair)

    def failures(self, row: Row) -> Iterator[Row]:
        """Yield a row for each pair that did not start."""
        for peer, why in self.missing:
            yield dataclasses.replace(row, system=peer.system, setting=peer.setting, note=why)

    def cell(self, row: Row, case: Case) -> Iterator[Row]:
        """Measure one list of blocks with every pair in turn."""
        entries: list[Entry] = []
        for pair in list(self.pairs):
            found, why = self.ready(pair, case)
            entries += found
            if why:
                yield dataclasses.replace(row, system=pair.peer.system, setting=pair.peer.setting, note=why)
        ground = Ground(row, case.total / 1e9, wrong=lambda: None)
        yield from contest(self.ask, ground, entries)
        for pair in list(self.pairs):
            why = self.after(pair, case)
            if why:
                yield dataclasses.replace(row, system=pair.peer.system, setting=pair.peer.setting, note=why)

    def ready(self, pair: Pair, case: Case) -> tuple[list[Entry], str]:
        """The entries of a pair for a cell, or the reason why it failed. A pair that fails is dropped."""
        try:
            return list(entries_of(pair, case)), ""
        except Exception as failure:  # noqa: BLE001  (a peer that fails is a row with its reason)
            self.drop(pair)
            return [], reason(failure)

    def after(self, pair: Pair, case: Case) -> str:
        """Return a text if other bytes were written, else an empty one. A pair that does not answer is dropped."""
        try:
            pair.wake()
            strays: str = pair.destination(case.op).do("strays")
            pair.rest()
        except Failed as gone:
            self.drop(pair)
            return f"left out from here on: {gone}"
        return strays

    def drop(self, pair: Pair) -> None:
        """Stop a pair and remove it."""
        pair.end()
        self.pairs.remove(pair)

    def end(self) -> None:
        """Kill all of them."""
        for pair in self.pairs:
            pair.end()


def entries_of(pair: Pair, case: Case) -> Iterator[Entry]:
    """The entries of a pair for a cell: one, or one for each loop of the limit and for each way to make a request."""
    pair.wake()
    settings = pair.lay(case)
    target = pair.destination(case.op)
    pair.rest()
    for variant, threads in settings:
        runs = Repeated(pair, variant, 1 if pair.peer.once and case.op == PUSH else MAX_REPEATS)
        setting = pair.peer.setting
        if pair.peer.system == LIMIT:
            setting = f"{setting} {variant}"
        elif variant:
            setting = f"{setting}, {variant}"
        yield Entry(
            pair.peer.system,
            runs.run,
            setting,
            threads or pair.peer.threads,
            pair.peer.note,
            before=partial(before, pair, target),
            after=partial(after, pair, target),
        )


class Repeated:
    """One turn of a pair. Small transfers are repeated until their total time is long enough to measure."""

    def __init__(self, pair: Pair, variant: str, most: int) -> None:
        self.pair, self.variant, self.times, self.most = pair, variant, 1, most

    def run(self) -> float:
        """Return the seconds of one transfer, as the local process measures them."""
        for _ in range(TRIES):
            took: float = self.pair.timed("go", self.variant, times=self.times)
            enough = max(1, min(self.most, math.ceil(SHORTEST_S / took)))
            if self.times * 2 >= enough:
                break
            self.times = enough
        return took


def before(pair: Pair, target: Process) -> None:
    """Prepare a turn. Not timed."""
    pair.wake()
    target.do("poison")


def after(pair: Pair, target: Process) -> None:
    """Verify every byte after a turn. Not timed."""
    wrong = target.do("wrong")
    pair.rest()
    if wrong:
        raise AssertionError(f"wrong bytes: {wrong}")
