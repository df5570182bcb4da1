"""Controls the two processes of one system: starts them, sends messages, stops and kills them.

Every wait for an answer has a time limit. Not for: the code of the processes (``side``).
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from multiprocessing import Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any, Optional

from between.adapter import LOCAL, REMOTE, Case, memory_file, shared
from between.systems import Peer, attendant
from environment import variables
from rows import Missing

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

import numpy as np

TIMEOUT_S = 60.0
PROGRAM = "import sys; sys.path.insert(0, sys.argv.pop(1)); from between.side import main; main(sys.argv[1:])"


def half(role: str) -> set[int]:
    """The processors of one side: one half of those of this process, or all of them if there is only one."""
    allowed = sorted(os.sched_getaffinity(0))
    middle = len(allowed) // 2
    return set(allowed[:middle] if role == LOCAL else allowed[middle:]) or set(allowed)


class Failed(Exception):  # noqa: N818  (a failure of a peer)
    """A side failed. The text has the reason."""


class Pattern:
    """The bytes that are moved, in memory that every process of the benchmark maps."""

    def __init__(self, size: int, seed: int = 1) -> None:
        self.size = size
        self.descriptor = memory_file("pattern", size)
        words = shared(self.descriptor, size)
        words[:] = np.random.default_rng(seed).integers(0, 2**63, size=len(words), dtype=np.int64)


class Process:
    """The process of one side."""

    def __init__(self, peer: Peer, role: str, pattern: Pattern, log: Path) -> None:
        self.role, self.log = role, log
        self.late = False  # whether the answer to an earlier message is still missing
        self.conn: Connection
        self.conn, theirs = Pipe()
        descriptors = [theirs.fileno(), pattern.descriptor]
        words = [str(descriptors[0]), peer.system, peer.setting, role, str(pattern.size), str(descriptors[1])]
        with log.open("ab") as out:
            self.process = subprocess.Popen(  # noqa: S603  (this program)
                [sys.executable, "-c", PROGRAM, str(Path(__file__).parents[1]), *words],
                env={**variables(), **peer.environment},
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=subprocess.STDOUT,
                pass_fds=descriptors,
            )
        theirs.close()

    @property
    def pid(self) -> int:
        """The process id."""
        return self.process.pid

    def tell(self, name: str, *arguments: Any) -> None:
        """Send a message without waiting."""
        if self.late:
            raise Failed(f"the {self.role} side is still at something else")
        try:
            self.conn.send((name, arguments))
        except OSError as gone:
            raise Failed(self.end_of_it()) from gone

    def answer(self, limit_s: float = TIMEOUT_S) -> Any:
        """Wait for the answer to the last message."""
        if not self.conn.poll(limit_s):
            self.signal(signal.SIGUSR1)
            self.late = True
            raise Failed(f"the {self.role} side was still at it after {limit_s:.0f} s")
        try:
            kind, value = self.conn.recv()
        except (EOFError, OSError) as gone:
            raise Failed(self.end_of_it()) from gone
        if kind == "missing":
            raise Missing(f"not here: {value}")
        if kind == "failed":
            raise Failed(value)
        return value

    def do(self, name: str, *arguments: Any) -> Any:
        """Send a message, and return the answer."""
        self.tell(name, *arguments)
        return self.answer()

    def end_of_it(self) -> str:
        """How the process ended, with the last line of its log."""
        try:
            code = self.process.wait(5)
        except subprocess.TimeoutExpired:
            code = 0
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        words = self.log.read_text(errors="replace").strip().splitlines()
        return f"the {self.role} side {how}: {' '.join(words[-1:])[-200:]}"

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if the process is running."""
        if self.process.poll() is None:
            os.kill(self.pid, number)

    def end(self) -> None:
        """Kill and reap the process."""
        self.signal(signal.SIGKILL)
        self.process.wait(20)
        self.conn.close()


class Pair:
    """Local and remote side of one system in one setting.

    With `apart`, each side is bound to one half of the processors. Otherwise Linux decides, and it sometimes runs two
    processes that answer each other on one processor.
    """

    def __init__(self, peer: Peer, pattern: Pattern, folder: str, *, apart: bool = False) -> None:
        self.peer, self.pattern, self.folder, self.apart = peer, pattern, Path(folder or "."), apart
        self.attendant: Optional[subprocess.Popen[bytes]] = None
        self.local: Optional[Process] = None
        self.remote: Optional[Process] = None
        self.took: dict[str, Any] = {}
        self.laid: Optional[tuple[Case, bool, list[tuple[str, int]]]] = None
        try:
            self.attendant = attendant(peer, self.folder)
            self.remote = self.start(REMOTE)
            self.local = self.start(LOCAL)
            self.link()
        except BaseException:
            self.end()
            raise

    def start(self, role: str) -> Process:
        """Start one side, and wait until its system is running."""
        name = f"{self.peer.system}-{self.peer.setting}-{role}.log".replace(" ", "-")
        began = time.perf_counter()
        side = Process(self.peer, role, self.pattern, self.folder / name)
        try:
            if self.apart:
                # Threads inherit the affinity. The process has only its first thread now.
                os.sched_setaffinity(side.pid, half(role))
            side.answer()
        except BaseException:
            side.end()
            raise
        self.took[f"{role} start"] = time.perf_counter() - began
        return side

    def link(self) -> None:
        """Link the local side to the remote side."""
        remote, local = self.both
        self.took[REMOTE], hello = remote.do("hello")
        self.took[LOCAL], _ = local.do("hello")
        self.attended(1)
        try:
            self.took["link"] = local.do("link", hello)
        finally:
            self.over()

    @property
    def both(self) -> tuple[Process, Process]:
        """The remote side and the local one."""
        assert self.remote is not None, "no remote side"
        assert self.local is not None, "no local side"
        return self.remote, self.local

    def attended(self, times: int) -> None:
        """Let the remote side drive its system, if the system needs it."""
        if self.peer.attends:
            self.both[0].tell("attend", times)

    def over(self) -> None:
        """Tell the remote side that the local side has finished."""
        if self.peer.attends:
            remote, _ = self.both
            remote.tell("enough")
            remote.answer()
            remote.answer()

    def lay(self, case: Case, fresh: bool = False) -> list[tuple[str, int]]:
        """Prepare both sides for a list of blocks. Return the settings and their threads."""
        remote, local = self.both
        self.laid = None
        remote.do("lay", case)
        local.do("lay", case)
        found: list[tuple[str, int]] = local.do("ask", fresh)
        return found

    def lay_once(self, case: Case, fresh: bool) -> list[tuple[str, int]]:
        """As ``lay``, unless both sides are already prepared for this case."""
        if self.laid is None or self.laid[0] is not case or self.laid[1] != fresh:
            self.laid = (case, fresh, self.lay(case, fresh))
        return self.laid[2]

    def timed(self, how: str, *arguments: Any, times: int) -> Any:
        """Make a timed call of the local side, while the remote side drives its system."""
        _, local = self.both
        self.attended(times)
        try:
            return local.do(how, *arguments, times)
        finally:
            self.over()

    def destination(self, op: str) -> Process:
        """The side that poisons and verifies the destination."""
        remote, local = self.both
        return local if local.do("destination", op) else remote

    def wake(self) -> None:
        """Resume both sides."""
        for side in self.both:
            side.signal(signal.SIGCONT)

    def rest(self) -> None:
        """Stop both sides, if the system uses CPU while idle."""
        if self.peer.restless:
            for side in self.both:
                side.signal(signal.SIGSTOP)

    def end(self) -> None:
        """Kill all processes of the pair."""
        for side in (self.local, self.remote):
            if side is not None:
                side.end()
        if self.attendant is not None:
            self.attendant.kill()
            self.attendant.wait(20)
