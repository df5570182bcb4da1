"""The process of one side of a pair. ``pair`` starts it with ``python -c``. It handles one message at a time.

Not for: the choice of measurements (``pair``), or the calls of a system (its adapter).
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

from between.adapter import REMOTE, Adapter, Case, Run, die_with_parent, shared
from between.systems import adapter
from limit import Limit
from rows import Missing

WARM = 10


class Side:
    """The messages of one side. Each message is a method, whose result is the answer."""

    def __init__(self, conn: Connection, system: str, setting: str, role: str, size: int, pattern: int) -> None:
        self.conn, self.role = conn, role
        kind = adapter(system, setting)
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
        """The seconds that the start took, and the data that the other side needs to link."""
        return self.took, (self.adapter.hello() if self.role == REMOTE else None)

    def link(self, hello: Any) -> float:
        """Local side: link to the remote side, and return the seconds."""
        began = time.perf_counter()
        self.adapter.link(hello)
        return time.perf_counter() - began

    def relink(self, hello: Any) -> None:
        """Local side: link to a remote side that was restarted."""
        self.runs = []
        self.adapter.relink(hello)

    def fill(self, op: str) -> None:
        """Write the bytes that are moved."""
        self.adapter.fill(op)

    def lay(self, case: Case) -> None:
        """Prepare for a list of blocks."""
        self.case = case
        self.adapter.lay(case)
        if self.adapter.is_destination(case.op):
            self.adapter.poison_all()
        else:
            self.adapter.fill(case.op)

    def ask(self, fresh: bool) -> list[tuple[str, int]]:
        """Local side: prepare the requests. Return the settings and their threads."""
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
        """The transfer that is timed."""
        return next(run for setting, _, run in self.runs if setting == variant)

    def go(self, variant: str, times: int) -> float:
        """Local side: return the seconds of one transfer, averaged over `times` in a row."""
        run = self.run_of(variant)
        began = time.perf_counter()
        for _ in range(times):
            run()
        return (time.perf_counter() - began) / times

    def each(self, variant: str, times: int) -> tuple[float, float, float]:
        """Local side: time each transfer alone. Return the median, the 99th percentile and the maximum in seconds."""
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
        """Local side: repeat transfers until one fails or time is over. Return the error, its time and the count."""
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
        """Remote side: drive the system while the local side makes transfers."""
        self.adapter.attend(self.case, times, self.over)

    def enough(self) -> None:
        """Remote side: a message without effect. Any message ends ``attend``."""

    def over(self) -> bool:
        """Whether the next message has arrived."""
        return self.conn.poll(0)

    def destination(self, op: str) -> bool:
        """Whether this side poisons and verifies the destination."""
        return self.adapter.is_destination(op)

    def poison(self) -> None:
        """Poison the destination blocks."""
        self.adapter.poison(self.the_case)

    def wrong(self) -> str:
        """The first wrong block as text, else an empty text."""
        return self.adapter.wrong(self.the_case)

    def strays(self) -> str:
        """A text if other bytes were written, else an empty text."""
        return self.adapter.strays(self.the_case)

    def prepared(self, blocks: int, block: int) -> dict[str, float]:
        """Local side: the seconds of each step that prepares the first transfer of this many blocks."""
        return self.adapter.prepared(blocks, block)

    def close(self) -> None:
        """Stop the system."""
        self.adapter.close()


def said(failure: BaseException) -> str:
    """The text of a failure in one line."""
    return f"{type(failure).__name__}: {' '.join(str(failure).split())[:200]}"


def main(words: list[str]) -> None:
    """Handle messages until the other end of the pipe is closed."""
    die_with_parent()
    faulthandler.register(signal.SIGUSR1)  # writes the stacks of a process that hangs to its log
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
    # The threads of some peers crash at a normal exit.
    sys.stdout.flush()
    os._exit(0)


def answered(call: Callable[..., Any], arguments: tuple[Any, ...]) -> tuple[str, Any]:
    """Handle a message, and return the kind and value of the answer."""
    try:
        return "done", call(*arguments)
    except Missing as failure:
        return "missing", said(failure)
    except Exception as failure:  # noqa: BLE001  (a peer that fails is a row with its reason)
        traceback.print_exc()
        return "failed", said(failure)
