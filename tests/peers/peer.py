"""An `End` in its own process, and the ends that one test uses."""

from __future__ import annotations

import atexit
import os
import signal
import subprocess
import sys
import tempfile
from contextlib import contextmanager
from multiprocessing import Pipe
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, ClassVar

from .end import End
from .values import LIMIT, OK, Refused, by_blocks, equal, eventually, options, pattern, stop_process

if TYPE_CHECKING:
    from collections.abc import Iterator

TESTS = str(Path(__file__).parents[1])


class Answer:
    """A call in progress in a peer."""

    def __init__(self, peer: Peer, call: str) -> None:
        self.peer, self.call = peer, call

    def result(self, limit: float = LIMIT) -> Any:
        """Return the result of the call. Raises `Refused` if the call raised."""
        try:
            assert self.peer.pipe.poll(limit), f"no answer within {limit} s"
            value, error = self.peer.pipe.recv()
        except (EOFError, OSError, AssertionError) as reason:
            self.peer.spoiled = True
            died = self.peer.process.poll()
            raise AssertionError(f"{self.call}: {reason!r}; exit status {died}\n{self.peer.said()}") from None
        if error:
            raise Refused(*error)
        return value


class Peer:
    """An `End` in its own process. Other attributes are the calls of `End`."""

    def __init__(self, *prefix: str, environment: dict[str, str] | None = None) -> None:
        self.log = tempfile.TemporaryFile()  # noqa: SIM115
        clean = {key: value for key, value in os.environ.items() if not key.startswith(("ASCEND_", "LLM_DATADIST_"))}
        path = os.pathsep.join(filter(None, [TESTS, clean.get("PYTHONPATH")]))
        self.pipe, theirs = Pipe()
        with theirs:
            self.process = subprocess.Popen(  # noqa: S603
                [*prefix, sys.executable, "-W", "error", "-m", "peers", str(theirs.fileno())],
                stdin=subprocess.DEVNULL,
                stdout=self.log,
                stderr=self.log,
                env={**clean, "PYTHONPATH": path, **(environment or {})},
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        self.spoiled = bool(prefix or environment)  # another test must not use it
        self.address = ""
        self.cluster = -1

    def open(self, settings: dict[str, str] | None = None, cluster: int = 2, role: str = "PROMPT") -> Peer:
        """Initialize its engine; it listens at a free port of 127.0.0.1 unless the options say otherwise."""
        chosen = options() if settings is None else settings
        self.address = self.begin("init", {"llm.listenIpInfo": "127.0.0.1:0", **chosen}, cluster, role).result() or ""
        self.cluster = cluster
        return self

    @property
    def at(self) -> tuple[int, str]:
        """The cluster and address, as `link_clusters` takes them."""
        return self.cluster, self.address

    def begin(self, call: str, *args: Any, **kwargs: Any) -> Answer:
        """Start a call without waiting for its end."""
        try:
            self.pipe.send((call, args, kwargs))
        except OSError:
            raise AssertionError(f"{call}: the peer is gone\n{self.said()}") from None
        return Answer(self, call)

    def __getattr__(self, call: str) -> Callable[..., Any]:
        if call.startswith("_") or not hasattr(End, call):
            raise AttributeError(call)
        return lambda *args, **kwargs: self.begin(call, *args, **kwargs).result()

    def said(self) -> str:
        """Return what the process wrote to standard output and error."""
        # Without seek and read, because the process shares the file position and would overwrite its own output.
        log = self.log.fileno()
        return os.pread(log, os.fstat(log).st_size, 0).decode(errors="replace")[-20000:]

    def signal(self, number: int) -> None:
        os.kill(self.process.pid, number)

    def stop(self) -> None:
        """Stop the process (SIGSTOP), and wait until it has stopped."""
        self.spoiled = True
        stop_process(self.process.pid)

    def go_on(self) -> None:
        self.signal(signal.SIGCONT)

    @contextmanager
    def stopped(self) -> Iterator[None]:
        """Stop the process while the block runs."""
        self.stop()
        try:
            yield
        finally:
            self.go_on()

    def kill(self) -> None:
        """Kill the process, and reap it."""
        self.spoiled = True
        if self.process.poll() is None:
            self.process.kill()
            self.process.wait(LIMIT)
        self.pipe.close()

    def close(self) -> None:
        """Kill the process and discard its output."""
        self.kill()
        self.log.close()

    def __enter__(self) -> Peer:  # noqa: PYI034
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Ends:
    """The ends that one test uses: at most one engine here, any number of peers. All are closed afterwards.

    A peer that is intact after a test is used again by the next one, because starting an interpreter is slow.
    """

    idle: ClassVar[list[Peer]] = []

    def __init__(self) -> None:
        self.here = End()
        self.busy: list[Peer] = []

    def local(self, settings: dict[str, str] | None = None, cluster: int = 1, role: str = "DECODER") -> End:
        """The end in this process, initialized."""
        self.here.init(options() if settings is None else settings, cluster, role)
        return self.here

    def spare(self) -> Peer:
        return self.adopt(Ends.idle.pop() if Ends.idle else Peer())

    def adopt(self, peer: Peer) -> Peer:
        """Close this peer, which the test started itself, at the end of the test."""
        self.busy.append(peer)
        return peer

    def peer(self, settings: dict[str, str] | None = None, cluster: int = 2, role: str = "PROMPT") -> Peer:
        """Another process with an engine that listens."""
        return self.spare().open(settings, cluster, role)

    def pair(self, **given: Any) -> tuple[End, Peer]:
        """Clusters 1, here, and 2, a peer, with equal options; 1 has linked to 2."""
        peer, local = self.peer(options(**given)), self.local(options(**given))
        linked(local, peer)
        return local, peer

    def __enter__(self) -> Ends:  # noqa: PYI034
        return self

    def __exit__(self, *_: object) -> None:
        for peer in self.busy:
            if peer.spoiled:
                peer.close()
        self.here.reset()
        try:
            for peer in [peer for peer in self.busy if not peer.spoiled]:
                peer.reset()
                Ends.idle.append(peer)
        finally:
            for peer in self.busy:
                if peer not in Ends.idle and not peer.log.closed:
                    peer.close()


@atexit.register
def _send_home() -> None:
    while Ends.idle:
        Ends.idle.pop().close()


def linked(local: Any, *remote: Peer) -> None:
    """Link `local` to peers; all must succeed."""
    result = local.link_clusters([peer.at for peer in remote])
    assert result[0] == OK, result


def no_link(end: Any) -> None:
    eventually(lambda: end.links() == [], what="the end of the link")


def check_pull(local: Any, remote: Any, cluster: int = 2, seed: int = 1) -> None:
    """Blocks of a new cache of `remote`, which is `cluster`, arrive at `local`."""
    remote.allocate("check", 4, 5000, 2, blocks=True, keys=[by_blocks(0)], seed=seed)
    local.allocate("check", 4, 5000, 2, blocks=True)
    local.pull_blocks(by_blocks(cluster), "check", range(4), range(4))
    assert equal(local.read("check"), pattern(seed, 2, 4, 5000))
    local.deallocate("check")
    remote.deallocate("check")
