"""The decode side of the prefill process: starts it, requests blocks from it, and replaces it when it dies.

Every wait for the process has a time limit. The process itself runs ``worker``.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llm_datadist import LLMException, LLMStatusCode
from llm_datadist.replay.channel import Channel, ChannelError

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from llm_datadist.replay.channel import Message
    from llm_datadist.replay.node import Node, Staging
    from llm_datadist.replay.worker import Setup

COMMAND = [sys.executable, "-m", "llm_datadist.replay.worker"]
"""The command line of the process."""

MOST_RESTARTS = 3
"""Limit of restarts, after which the replay fails."""

START_LIMIT_S = 30.0
"""Time limit of the start of the process, unless the time limit of an answer is longer."""

_EXIT_LIMIT_S = 10.0
_GRACE_S = 2.0
_LATEST_PULLS = 101

# Codes of a pull whose peer cannot be reached. The process is then replaced, even if it is alive.
_OUT_OF_REACH = (
    LLMStatusCode.LLM_NOT_YET_LINK,
    LLMStatusCode.LLM_LINK_FAILED,
    LLMStatusCode.LLM_TIMEOUT,
    LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT,
)


class PrefillError(Exception):
    """The prefill process failed. The text gives the reason."""


@dataclass
class Restart:
    """One loss of the process: the request (from 1), how the process ended, and the error that revealed the loss.

    `kill` is whether the replay itself killed it. `code` is the status of the pull that failed, or None if a message
    failed. `gap_ms` is the time in milliseconds from the kill, or from the detection of the loss, to the next
    successful pull.
    """

    request: int
    kill: bool
    ended: str
    code: str | None
    reason: str
    gap_ms: float | None = None


class Prefill:
    """The prefill process. Close it after use.

    Args:
        node: the node that pulls the blocks.
        setup: the first message to the process.
        token: the token of the link.
        limit_s: time limit of an answer in seconds.
        tell: shows a line of text.
        restarts: each loss of the process is added here.
        kill_at: the request (from 1) during whose pull the process is killed.
    """

    def __init__(
        self,
        node: Node,
        setup: Setup,
        token: str,
        limit_s: float,
        tell: Callable[[str], None],
        restarts: list[Restart],
        kill_at: int | None = None,
    ) -> None:
        self.waited_s = 0.0
        self._node = node
        self._setup = setup
        self._token = token
        self._limit_s = limit_s
        self._tell = tell
        self._restarts = restarts
        self._kill_at = kill_at
        self._asked: dict[int, list[int]] = {}
        self._slots: dict[int, list[int]] = {}
        self._pulled: list[int] = []  # requests whose blocks prefill may overwrite; sent with the next request
        self._total = self._total_before = 0
        self._lost_at: float | None = None
        self._process: _Process | None = None

    @property
    def computed(self) -> int:
        """Blocks computed so far, including those that were lost with their process."""
        return self._total_before + self._total

    def start(self) -> None:
        """Start the process and link to it. Raises PrefillError."""
        try:
            self._start()
        except (ChannelError, LLMException) as error:
            raise PrefillError(f"it did not start: {_said(error)}; {self._stop(_GRACE_S, _GRACE_S)}") from error

    def compute(self, number: int, blocks: Sequence[int]) -> None:
        """Request the blocks and the staging cache of a request, without waiting for them."""
        self._asked[number] = list(blocks)
        self._post(self._request(number))
        self._pulled.clear()

    def bring(self, number: int, targets: Sequence[int], staging: Staging) -> None:
        """Pull the blocks of a request into slots of the node, in order, and its staging cache.

        If the process is lost meanwhile, it is replaced and the request is recomputed. Raises PrefillError after
        more than `MOST_RESTARTS` losses.
        """
        while (error := self._pull(number, targets, staging)) is not None:
            self._recover(number, error)
        del self._asked[number], self._slots[number]
        self._pulled.append(number)
        recovered = [restart for restart in self._restarts if restart.gap_ms is None]
        if recovered and self._lost_at is not None:
            gap_s, self._lost_at = time.monotonic() - self._lost_at, None
            for restart in recovered:
                restart.gap_ms = gap_s * 1e3
            since = "the kill" if recovered[0].kill else "the loss"
            self._tell(f"decode: request {number + 1:,} was recomputed and pulled, {gap_s:.2f} s after {since}")

    def grant(self, block: int, ttl_ms: int, reuse: int | None = None) -> tuple[int, bytes, str | None]:
        """Have the process compute a block and grant it. Return its slot, the token, and why the grant has ended.

        With `reuse`, the answer comes after the end of the grant, when that block has been written over the first one.
        Raises PrefillError.
        """
        try:
            self._channel.send({"grant": block, "ttl_ms": ttl_ms, "reuse": reuse}, self._limit_s)
            answer = self._channel.receive(self._limit_s, "slot", "token", "ended")
        except ChannelError as error:
            raise PrefillError(f"it granted no block: {_said(error)}; {self._stop(_GRACE_S, _GRACE_S)}") from error
        return answer["slot"], bytes.fromhex(answer["token"]), answer["ended"]

    def end(self) -> dict[str, Any]:
        """Unlink, ask the process to free its caches and end, and return its report.

        Raises PrefillError, LLMException.
        """
        links = self._node.stats()["links"]
        self._node.unlink(force=False)
        try:
            self._channel.send({"end": True}, self._limit_s)
            report = self._channel.receive(self._limit_s, "leaked_bytes", "seconds", "peak_memory_bytes")
        except ChannelError as error:
            raise PrefillError(f"it gave no report: {_said(error)}; {self._stop(_GRACE_S, _GRACE_S)}") from error
        ended = self._stop(0, _EXIT_LIMIT_S)
        if ended != _exit_text(0):
            raise PrefillError(f"after its report: {ended}")
        return {**report, "computed": self.computed, "link": links[0] if links else {}}

    def close(self) -> None:
        """End the process if it is still running."""
        self._stop(0, _GRACE_S)

    # -- a request ---------------------------------------------------------------------------------------------

    def _request(self, number: int) -> Message:
        return {"compute": number, "blocks": self._asked[number], "free": self._pulled}

    def _answer(self, number: int) -> list[int]:
        """Wait until a request is computed, and return the slots of its blocks."""
        start = time.perf_counter()
        try:
            while number not in self._slots:
                message = self._channel.receive(self._limit_s, "computed", "slots", "total")
                self._slots[message["computed"]] = message["slots"]
                self._total = message["total"]
        finally:
            self.waited_s += time.perf_counter() - start
        return self._slots[number]

    def _pull(self, number: int, targets: Sequence[int], staging: Staging) -> ChannelError | LLMException | None:
        """Wait until a request is computed, and pull it. Return the error, if any."""
        try:
            sources = self._answer(number)
            killer = self._killer(number)
            try:
                if targets:
                    self._node.pull_blocks(sources, targets)
            finally:
                if killer is not None:
                    killer.join()
            self._node.pull_staging(number, staging)
        except (ChannelError, LLMException) as error:
            return error
        return None

    def _post(self, message: Message) -> None:
        """Send a message. An error is ignored here, because the wait for the answer detects a lost process."""
        with contextlib.suppress(ChannelError):
            self._channel.send(message, self._limit_s)

    def _killer(self, number: int) -> threading.Thread | None:
        """At the request `kill_at`, start a thread that kills the process in the middle of the pull."""
        if self._kill_at is None or number + 1 < self._kill_at or self._process is None:
            return None
        self._kill_at = None
        process = self._process
        latest = self._node.calls["pull blocks"].nanoseconds[-_LATEST_PULLS:]
        delay_s = statistics.median(latest) / 2e9 if latest else 0.0

        self._tell(f"kill -9 {process.pid}: the prefill process, in the middle of the pull of request {number + 1:,}")

        def kill() -> None:
            time.sleep(delay_s)
            self._lost_at = time.monotonic()
            process.kill()

        killer = threading.Thread(target=kill, name="kill prefill")
        killer.start()
        return killer

    # -- the process -------------------------------------------------------------------------------------------

    @property
    def _channel(self) -> Channel:
        if self._process is None:
            raise ChannelError("is not running")
        return self._process.channel

    def _start(self) -> None:
        self._process = _Process(self._token)
        limit_s = max(self._limit_s, START_LIMIT_S)
        self._channel.send(self._setup.message(), limit_s)
        self._node.link(self._channel.receive(limit_s, "address")["address"])

    def _stop(self, alone_s: float, patience_s: float) -> str:
        """End the process and return how it ended. It gets `alone_s` seconds to end by itself."""
        process, self._process = self._process, None
        return "it was not running" if process is None else process.stop(alone_s, patience_s)

    def _recover(self, number: int, error: ChannelError | LLMException) -> None:
        """Report the loss, start another process, and request everything from it that was not pulled yet.

        Raises `error` if the process is alive and reachable, and PrefillError after `MOST_RESTARTS` restarts.
        """
        kill = self._lost_at is not None
        if not kill:
            self._lost_at = time.monotonic()
        while True:
            if isinstance(error, LLMException) and not self._is_lost(error):
                raise error
            ended = self._stop(_GRACE_S, _GRACE_S)
            code = error.status_code.name if isinstance(error, LLMException) else None
            lost = Restart(number + 1, kill, ended, code, str(error))
            text = f"at request {number + 1:,}: {_said(error)}"
            if len(self._restarts) == MOST_RESTARTS:
                raise PrefillError(f"lost {text}; {ended}; gave up after {MOST_RESTARTS} restarts") from error
            self._restarts.append(lost)
            self._tell(f"decode: lost prefill {text}")
            self._tell(f"decode: {ended}; starting prefill again ({len(self._restarts)} of at most {MOST_RESTARTS})")
            kill = False
            try:
                self._node.unlink(force=True)
                self._start()
            except (ChannelError, LLMException) as again:
                error = again
            else:
                break
        self._total_before, self._total = self.computed, 0
        self._slots.clear()
        self._pulled.clear()
        for asked in self._asked:
            self._post(self._request(asked))

    def _is_lost(self, error: LLMException) -> bool:
        """Return whether a call failed because the process is dead or unreachable, not because the call was wrong."""
        return error.status_code in _OUT_OF_REACH or self._process is None or self._process.has_ended(_GRACE_S)


class _Process:
    """A running process and the channel to it."""

    def __init__(self, token: str) -> None:
        environment = {**os.environ, "LLM_DATADIST_TOKEN": token}
        self._popen = subprocess.Popen(  # noqa: S603  (this interpreter, this package)
            COMMAND,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            bufsize=0,
            start_new_session=True,  # so that Ctrl-C reaches decode alone; the process ends with its input
        )
        if self._popen.stdin is None or self._popen.stdout is None:
            raise ChannelError("has no pipes")
        self.channel = Channel(self._popen.stdout.fileno(), self._popen.stdin.fileno())

    @property
    def pid(self) -> int:
        """The process id."""
        return self._popen.pid

    def kill(self) -> None:
        """Kill the process."""
        self._popen.kill()

    def has_ended(self, patience_s: float) -> bool:
        """Wait at most `patience_s` seconds for the process to end, and return whether it ended."""
        try:
            self._popen.wait(patience_s)
        except subprocess.TimeoutExpired:
            return False
        return True

    def stop(self, alone_s: float, patience_s: float) -> str:
        """Wait `alone_s` seconds, then close the pipes and wait `patience_s`, then kill. Return how it ended."""
        alone = self.has_ended(alone_s)
        for pipe in (self._popen.stdin, self._popen.stdout):
            if pipe is not None:
                pipe.close()
        if not self.has_ended(patience_s):
            self._popen.kill()
            self._popen.wait()
            return f"it did not end within {patience_s:g} s and was killed by decode"
        ended = _exit_text(self._popen.returncode)
        return ended if alone or not self._popen.returncode else f"{ended}, when decode closed its input"


def _exit_text(status: int) -> str:
    if status >= 0:
        return f"it ended with exit status {status}"
    return f"it was killed by signal {-status} ({signal.Signals(-status).name}), exit status {status}"


def _said(error: ChannelError | LLMException) -> str:
    if isinstance(error, LLMException):
        return f"a call failed with {error.status_code.name}: {error}"
    return f"it {error}"
