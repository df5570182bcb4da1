"""The prefill process as decode sees it: starts it, has it compute blocks, and replaces it when it dies.

Every wait has a time limit. The process itself runs ``worker``.
"""

from __future__ import annotations

import contextlib
import json
import secrets
import select
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llm_datadist.native import Error, Message, Peer, PeerDown, PeerLost, PeerUp, Timeout

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from llm_datadist.commands.replay.node import Node
    from llm_datadist.commands.replay.worker import Setup
    from llm_datadist.native import Event

COMMAND = [sys.executable, "-m", "llm_datadist.commands.replay.worker"]
"""The command line of the process, without its argument."""

MAX_RESTARTS = 3
"""Limit of restarts, after which the replay fails."""

ANSWER_LIMIT_S = 30.0
"""Time limit of the start of the process, and of each of its answers."""

_MAX_BLOCKS = 2048  # in a message, which has at most 64 KiB
_EXIT_LIMIT_S, _GRACE_S, _POLL_S = 10.0, 2.0, 0.1


class PrefillError(Exception):
    """The prefill process failed. The text gives the reason."""


@dataclass
class Restart:
    """One loss of the process: the request (from 1), how the process ended, and the error that revealed the loss.

    `kill` is whether the replay itself killed it. `code` is that of the error. `gap_ms` is the time in milliseconds
    from the kill, or from the detection of the loss, to the next successful pull.
    """

    request: int
    kill: bool
    ended: str
    code: str
    reason: str
    gap_ms: float | None = None


class Prefill:
    """The prefill process. Close it after use.

    Args:
        node: the node that pulls the blocks.
        setup: the setup of the process.
        tell: shows a line of text.
        restarts: each loss of the process is added here.
        kill_at: the request (from 1) during whose pull the process is killed, or the first one after it that pulls.
    """

    def __init__(
        self,
        node: Node,
        setup: Setup,
        tell: Callable[[str], None],
        restarts: list[Restart],
        kill_at: int | None = None,
    ) -> None:
        self.waited_s = 0.0
        self._node, self._setup, self._tell = node, setup, tell
        self._restarts, self._kill_at = restarts, kill_at
        self._computed: dict[int, int] = {}  # request → number of its blocks
        self._report: dict[str, Any] | None = None
        self._killed, self._lost_at = False, 0.0
        self._process: subprocess.Popen[bytes] | None = None
        self._name, self._down = "", ""
        self._peer: Peer | None = None

    def start(self) -> None:
        """Start the process and wait for its link. Raises PrefillError."""
        with self._failing("did not start"):
            self._start()

    def bring(self, number: int, blocks: Sequence[int], targets: Sequence[int]) -> None:
        """Have the process compute the blocks of a request, and pull them into slots of the node, in order.

        If the process is lost meanwhile, it is replaced and the request is recomputed. Raises PrefillError after
        more than `MAX_RESTARTS` losses.
        """
        pulled = not blocks
        while not pulled:
            try:
                if self._process is None:
                    self._start()
                self._compute(number, blocks)
                self._pull(number, targets)
                pulled = True
            except (PeerLost, Timeout) as error:  # noqa: PERF203  (a loss is rare)
                self._lose(number, error)
        recovered = [restart for restart in self._restarts if restart.gap_ms is None]
        if blocks and recovered:
            gap_s = time.monotonic() - self._lost_at
            for restart in recovered:
                restart.gap_ms = gap_s * 1e3
            since = "the kill" if recovered[0].kill else "the loss"
            self._tell(f"decode: request {number + 1:,} was recomputed and pulled, {gap_s:.2f} s after {since}")

    def end(self) -> dict[str, Any]:
        """Have the process free its cache, end it, and return its report. Raises PrefillError."""
        links = [link for link in self._node.engine.stats()["links"] if link["cluster"] == self.peer.incarnation]
        with self._failing("gave no report"):
            self.peer.send(b'{"end": true}')
            self._wait(lambda: self._report is not None)
            self.peer.close().result()
        ended = self._stop(_EXIT_LIMIT_S)
        if ended != _exit_text(0):
            raise PrefillError(f"after its report: {ended}")
        return {**(self._report or {}), "waited_s": self.waited_s, "link": links[0] if links else {}}

    def close(self) -> None:
        """End the process if it is still running."""
        self._stop(_GRACE_S)

    @property
    def peer(self) -> Peer:
        """The engine of the process."""
        if self._peer is None:
            raise PeerLost("it is not running", code="not_linked")
        return self._peer

    def _compute(self, number: int, blocks: Sequence[int]) -> None:
        """Have the process write blocks into its first slots, and wait until it has."""
        start = time.monotonic()
        try:
            for first in range(0, len(blocks), _MAX_BLOCKS):
                message = {"compute": number, "first": first, "blocks": blocks[first : first + _MAX_BLOCKS]}
                self.peer.send(json.dumps(message).encode())
            self._wait(lambda: self._computed.get(number) == len(blocks))
        finally:
            self.waited_s += time.monotonic() - start

    def _pull(self, number: int, targets: Sequence[int]) -> None:
        process = self._process
        if self._kill_at is None or number + 1 < self._kill_at or process is None:
            self._node.pull(self.peer, targets)
            return
        self._kill_at = None
        self._tell(f"kill -9 {process.pid}: the prefill process, in the middle of the pull of request {number + 1:,}")

        def kill() -> None:
            self._killed, self._lost_at = True, time.monotonic()
            process.kill()

        self._node.pull(self.peer, targets, started=kill)
        self._wait(lambda: False)  # the pull was faster than the kill, so the loss has yet to be seen

    def _wait(self, found: Callable[[], bool]) -> None:
        """Take events until something is found. Raises PeerLost if the process is lost, Timeout."""
        until = time.monotonic() + ANSWER_LIMIT_S
        while not found():
            left_s = until - time.monotonic()
            if left_s <= 0:
                raise Timeout(f"it did not answer within {ANSWER_LIMIT_S:g} s", code="timeout")
            if self._down or self._process is None or (self._peer is None and self._process.poll() is not None):
                raise PeerLost(self._down or "it ended before it had linked", code="not_linked")
            select.select([self._node.engine], [], [], min(left_s, _POLL_S))
            for event in self._node.engine.events():
                self._take(event)

    def _take(self, event: Event) -> None:
        if isinstance(event, PeerUp) and event.peer.name == self._name:
            self._peer = event.peer
        elif isinstance(event, PeerDown) and event.peer == self._peer:
            self._down = event.reason
        elif isinstance(event, Message) and event.peer == self._peer:
            try:
                message = json.loads(event.data)
                if "computed" in message:
                    self._computed[message["computed"]] = message["blocks"]
                else:
                    self._report = {"leaked_bytes": message["leaked_bytes"]}
            except (ValueError, KeyError, TypeError):
                raise PrefillError(f"it sent an invalid message: {event.data[:80]!r}") from None

    def _start(self) -> None:
        """Start the process, and wait until it has linked."""
        self._name, self._peer, self._down = f"prefill {secrets.token_hex(8)}", None, ""
        self._computed.clear()
        self._process = subprocess.Popen(  # noqa: S603  (this interpreter, this package)
            [*COMMAND, json.dumps([*self._setup, self._node.engine.address, self._name])],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            start_new_session=True,  # so that Ctrl-C reaches decode alone; the process ends with its input
        )
        self._wait(lambda: self._peer is not None)

    def _stop(self, limit_s: float) -> str:
        """Close the input of the process, at whose end it ends, and return how it ended."""
        process, self._process = self._process, None
        if process is None:
            return "it was not running"
        if process.stdin is not None:
            process.stdin.close()
        try:
            return _exit_text(process.wait(limit_s))
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
            return f"it did not end within {limit_s:g} s and was killed by decode"

    @contextlib.contextmanager
    def _failing(self, what: str) -> Iterator[None]:
        """Raise an error of the engine as PrefillError, with how the process ended."""
        try:
            yield
        except Error as error:
            raise PrefillError(f"it {what}: {shown(error)}; {self._stop(_GRACE_S)}") from error

    def _lose(self, number: int, error: Error) -> None:
        """Report that the process is lost, and end it. Raises PrefillError after `MAX_RESTARTS` restarts."""
        ended = self._stop(_GRACE_S)
        text = f"at request {number + 1:,}: {shown(error)}"
        if len(self._restarts) == MAX_RESTARTS:
            raise PrefillError(f"lost {text}; {ended}; gave up after {MAX_RESTARTS} restarts") from error
        if not self._killed and not any(restart.gap_ms is None for restart in self._restarts):
            self._lost_at = time.monotonic()
        self._restarts.append(Restart(number + 1, self._killed, ended, error.code, str(error)))
        self._killed = False
        self._tell(f"decode: lost prefill {text}")
        self._tell(f"decode: {ended}; starting prefill again ({len(self._restarts)} of at most {MAX_RESTARTS})")


def shown(error: Error) -> str:
    """Return an error of the engine as text."""
    return f"{type(error).__name__}: {error}"


def _exit_text(status: int) -> str:
    if status >= 0:
        return f"it ended with exit status {status}"
    return f"it was killed by signal {-status} ({signal.Signals(-status).name}), exit status {status}"
