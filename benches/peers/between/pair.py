"""Two processes of one system, as the measuring one sees them: started, told what to do, stopped, killed.

Every answer is waited for with a limit. Not for: what the processes do (``side``).
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

from between.adapter import FAR, NEAR, Case, memory_file, shared
from between.systems import Peer, attendant
from environment import variables
from rows import Missing

if TYPE_CHECKING:
    from multiprocessing.connection import Connection

import numpy as np

PATIENCE_S = 60.0
PROGRAM = "import sys; sys.path.insert(0, sys.argv.pop(1)); from between.side import main; main(sys.argv[1:])"


class Failed(Exception):  # noqa: N818  (a peer's failure, no error of ours)
    """A side did not do what it was told; the text says what it said."""


class Pattern:
    """The bytes that are moved, in memory that every process of the benchmark maps."""

    def __init__(self, size: int, seed: int = 1) -> None:
        self.size = size
        self.descriptor = memory_file("pattern", size)
        words = shared(self.descriptor, size)
        words[:] = np.random.default_rng(seed).integers(0, 2**63, size=len(words), dtype=np.int64)


class Process:
    """One side."""

    def __init__(self, peer: Peer, role: str, pattern: Pattern, log: Path) -> None:
        self.role, self.log = role, log
        self.late = False  # its next answer would be one to an earlier message
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
        """Its process id."""
        return self.process.pid

    def tell(self, name: str, *arguments: Any) -> None:
        """Send a message without waiting."""
        if self.late:
            raise Failed(f"the {self.role} side is still at something else")
        try:
            self.conn.send((name, arguments))
        except OSError as gone:
            raise Failed(self.end_of_it()) from gone

    def answer(self, limit_s: float = PATIENCE_S) -> Any:
        """The answer to the last message."""
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
        """Send a message and wait."""
        self.tell(name, *arguments)
        return self.answer()

    def end_of_it(self) -> str:
        """How a process that is gone ended, with its last words."""
        try:
            code = self.process.wait(5)
        except subprocess.TimeoutExpired:
            code = 0
        how = f"ended by {signal.Signals(-code).name}" if code < 0 else f"ended with {code}"
        words = self.log.read_text(errors="replace").strip().splitlines()
        return f"the {self.role} side {how}: {' '.join(words[-1:])[-200:]}"

    def signal(self, number: signal.Signals) -> None:
        """Send a signal, if it is still there."""
        if self.process.poll() is None:
            os.kill(self.pid, number)

    def end(self) -> None:
        """Kill it and take it away."""
        self.signal(signal.SIGKILL)
        self.process.wait(20)
        self.conn.close()


class Pair:
    """Near and far side of one system in one setting."""

    def __init__(self, peer: Peer, pattern: Pattern, folder: str) -> None:
        self.peer, self.pattern, self.folder = peer, pattern, Path(folder or ".")
        self.attendant: Optional[subprocess.Popen[bytes]] = None
        self.near: Optional[Process] = None
        self.far: Optional[Process] = None
        self.took: dict[str, Any] = {}
        self.laid: Optional[tuple[Case, bool, list[tuple[str, int]]]] = None
        try:
            self.attendant = attendant(peer, self.folder)
            self.far = self.start(FAR)
            self.near = self.start(NEAR)
            self.link()
        except BaseException:
            self.end()
            raise

    def start(self, role: str) -> Process:
        """Start one side; it has its system running when this returns."""
        name = f"{self.peer.system}-{self.peer.setting}-{role}.log".replace(" ", "-")
        began = time.perf_counter()
        side = Process(self.peer, role, self.pattern, self.folder / name)
        try:
            side.answer()
        except BaseException:
            side.end()
            raise
        self.took[f"{role} start"] = time.perf_counter() - began
        return side

    def link(self) -> None:
        """The near side reaches the far one."""
        far, near = self.both
        self.took[FAR], hello = far.do("hello")
        self.took[NEAR], _ = near.do("hello")
        self.attended(1)
        try:
            self.took["link"] = near.do("link", hello)
        finally:
            self.over()

    @property
    def both(self) -> tuple[Process, Process]:
        """The far side and the near one."""
        assert self.far is not None, "no far side"
        assert self.near is not None, "no near side"
        return self.far, self.near

    def attended(self, times: int) -> None:
        """The far side gets at it, where it has to."""
        if self.peer.attends:
            self.both[0].tell("attend", times)

    def over(self) -> None:
        """The near side is through."""
        if self.peer.attends:
            far, _ = self.both
            far.tell("enough")
            far.answer()
            far.answer()

    def lay(self, case: Case, fresh: bool = False) -> list[tuple[str, int]]:
        """Both sides get ready for a list of blocks; the settings there are."""
        far, near = self.both
        self.laid = None
        far.do("lay", case)
        near.do("lay", case)
        found: list[tuple[str, int]] = near.do("ask", fresh)
        return found

    def settle(self, variant: str) -> None:
        """Used once, and both sides done with what they do in the background for it."""
        self.timed("go", variant, times=1)
        for side in self.both:
            side.do("settle")

    def lay_once(self, case: Case, fresh: bool) -> list[tuple[str, int]]:
        """The same, unless both are ready for it since the last time."""
        if self.laid is None or self.laid[0] is not case or self.laid[1] != fresh:
            self.laid = (case, fresh, self.lay(case, fresh))
        return self.laid[2]

    def timed(self, how: str, *arguments: Any, times: int) -> Any:
        """The near side transfers while the far side attends."""
        _, near = self.both
        self.attended(times)
        try:
            return near.do(how, *arguments, times)
        finally:
            self.over()

    def destination(self, op: str) -> Process:
        """The side that is written and checked."""
        far, near = self.both
        return near if near.do("destination", op) else far

    def wake(self) -> None:
        """Both go on."""
        for side in self.both:
            side.signal(signal.SIGCONT)

    def rest(self) -> None:
        """Both stop, where a system burns a core while nobody asks anything of it."""
        if self.peer.restless:
            for side in self.both:
                side.signal(signal.SIGSTOP)

    def end(self) -> None:
        """Kill everything."""
        for side in (self.near, self.far):
            if side is not None:
                side.end()
        if self.attendant is not None:
            self.attendant.kill()
            self.attendant.wait(20)
