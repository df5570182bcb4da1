"""One process of a pair: ``python -c`` of ``pair`` starts it; it does what the messages say, one at a time.

Not for: deciding what is measured (``pair``), or how a system does it (its adapter).
"""

from __future__ import annotations

import faulthandler
import os
import signal
import statistics
import sys
import time
import traceback
from multiprocessing.connection import Connection
from typing import Any, Callable, Optional

from between.adapter import FAR, Adapter, Case, Run, die_with_parent, shared
from between.systems import adapter
from limit import Limit
from rows import Missing

WARM = 10


class Side:
    """The messages of one side, each a method; what it returns is the answer."""

    def __init__(self, conn: Connection, system: str, setting: str, role: str, size: int, pattern: int) -> None:
        self.conn, self.role = conn, role
        kind = adapter(system)
        began = time.perf_counter()
        kind.load()
        loaded = time.perf_counter()
        limit, words = Limit(), shared(pattern, size)
        opened = time.perf_counter()
        self.adapter: Adapter = kind(setting, role, size, limit, words)
        self.took = {"import": loaded - began, "ready": time.perf_counter() - opened - self.adapter.touching_s}
        self.case: Optional[Case] = None
        self.runs: list[tuple[str, int, Run]] = []

    def hello(self) -> Any:
        """What the other side needs, and how long it took so far."""
        return self.took, (self.adapter.hello() if self.role == FAR else None)

    def link(self, hello: Any) -> float:
        """Reach the far side; seconds."""
        began = time.perf_counter()
        self.adapter.link(hello)
        return time.perf_counter() - began

    def relink(self, hello: Any) -> None:
        """Near: reach a far side that was started again."""
        self.runs = []
        self.adapter.relink(hello)

    def fill(self, op: str) -> None:
        """Put the bytes there that are moved."""
        self.adapter.fill(op)

    def lay(self, case: Case) -> None:
        """Get ready for a list of blocks."""
        self.case = case
        self.adapter.lay(case)
        if self.adapter.is_destination(case.op):
            self.adapter.poison_all()
        else:
            self.adapter.fill(case.op)

    def ask(self, fresh: bool) -> list[tuple[str, int]]:
        """Near: prepare the request; the settings there are, each with its threads."""
        if fresh:
            self.runs = [("", 0, self.adapter.fresh(self.the_case))]
        else:
            self.runs = self.adapter.variants(self.the_case)
        return [(setting, threads) for setting, threads, _ in self.runs]

    @property
    def the_case(self) -> Case:
        """The list of blocks."""
        assert self.case is not None, "no case yet"
        return self.case

    def run_of(self, variant: str) -> Run:
        """What is clocked."""
        return next(run for setting, _, run in self.runs if setting == variant)

    def go(self, variant: str, times: int) -> float:
        """Near: seconds of one transfer, over so many in a row."""
        run = self.run_of(variant)
        began = time.perf_counter()
        for _ in range(times):
            run()
        return (time.perf_counter() - began) / times

    def each(self, variant: str, times: int) -> tuple[float, float, float]:
        """Near: median, 99th of a hundred and slowest of so many transfers, each clocked alone; some more warm up."""
        run, clock, took = self.run_of(variant), time.perf_counter_ns, []
        warm = min(WARM, times // 2)
        for _ in range(warm):
            run()
        for _ in range(times - warm):
            began = clock()
            run()
            took.append(clock() - began)
        took.sort()
        return statistics.median(took) / 1e9, took[len(took) * 99 // 100] / 1e9, took[-1] / 1e9

    def until_it_fails(self, seconds: float) -> tuple[str, float, int]:
        """Near: transfer again and again until one fails or the time is over: what came, when, after how many."""
        run, times = self.run_of(""), 0
        began = time.monotonic()
        while time.monotonic() - began < seconds:
            try:
                run()
            except Exception as failure:  # noqa: BLE001  (whatever a system raises is the result)
                return said(failure), time.monotonic(), times
            times += 1
        return "", time.monotonic(), times

    def attend(self, times: int) -> None:
        """Far: what the near side needs while it is at it; ends when it is over."""
        self.adapter.attend(self.case, times, self.over)

    def enough(self) -> None:
        """Far: the message that ends ``attend``, as any would."""

    def over(self) -> bool:
        """Whether the next message is there."""
        return self.conn.poll(0)

    def settle(self) -> None:
        """Nothing is under way in the background any more."""
        self.adapter.settle()

    def destination(self, op: str) -> bool:
        """Whether poison and check are asked of this side."""
        return self.adapter.is_destination(op)

    def poison(self) -> None:
        """Overwrite what is about to be written."""
        self.adapter.poison(self.the_case)

    def wrong(self) -> str:
        """What is wrong with what was written."""
        return self.adapter.wrong(self.the_case)

    def strays(self) -> str:
        """What was written that nobody asked for."""
        return self.adapter.strays(self.the_case)

    def prepared(self, blocks: int, block: int) -> dict[str, float]:
        """Near: seconds of each step before the first transfer of so many blocks, in the system's own way."""
        return self.adapter.prepared(blocks, block)

    def close(self) -> None:
        """End in order."""
        self.adapter.close()


def said(failure: BaseException) -> str:
    """One line of a failure."""
    return f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"


def main(words: list[str]) -> None:
    """Serve until the other end of the pipe is gone."""
    die_with_parent()
    faulthandler.register(signal.SIGUSR1)  # where it is, into its log
    conn, (system, setting, role, size, pattern) = Connection(int(words[0])), words[1:]
    side: Optional[Side] = None
    try:
        side = Side(conn, system, setting, role, int(size), int(pattern))
        conn.send(("ready", None))
    except (ImportError, Missing) as failure:
        conn.send(("missing", said(failure)))
    except Exception as failure:  # noqa: BLE001  (a peer that does not start is a row with its reason)
        traceback.print_exc()
        conn.send(("failed", said(failure)))
    while side is not None:
        try:
            name, arguments = conn.recv()
        except EOFError:
            break
        answer = answered(getattr(side, name), arguments)
        conn.send(answer)
        if name == "close":
            break
    # Some peers' threads do not survive an orderly end.
    sys.stdout.flush()
    os._exit(0)


def answered(call: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[str, Any]:
    """What a message led to."""
    try:
        return "done", call(*arguments)
    except Missing as failure:
        return "missing", said(failure)
    except Exception as failure:  # noqa: BLE001  (a peer that fails is a row with its reason)
        traceback.print_exc()
        return "failed", said(failure)
