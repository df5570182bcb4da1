"""UCXX between two processes: one tagged message per block, which is what its Python API offers.

The Python API has no one-sided reads or writes, so the remote side sends (or receives) in the order that the local side
expects. Not for: its asyncio API, which is slower.
"""

from __future__ import annotations

import contextlib
import time
from typing import Any, Callable, Optional

import numpy as np

from between.adapter import LOCAL, PULL, REMOTE, Adapter, Case, Run

ASK, DONE, FIRST = 1, 2, 16
LOOK = 256  # polls of UCX between two checks of the pipe
PERIOD_NS = 10**9


class Ucxx(Adapter):
    """One worker with one endpoint."""

    @classmethod
    def load(cls) -> None:
        """Import it. Load its libraries first, because its own search for them needs another package."""
        with contextlib.suppress(ImportError):
            import libucx  # noqa: PLC0415  (timed)

            libucx.load_library()
        import ucxx._lib.libucxx  # noqa: F401, PLC0415

    def open(self) -> None:
        """Open a worker. The remote one listens."""
        import ucxx._lib.libucxx as core  # noqa: PLC0415  (timed by load)
        from ucxx._lib.arr import Array  # noqa: PLC0415
        from ucxx.types import Tag  # noqa: PLC0415

        self.core, self.array, self.tag = core, Array, Tag
        self.context = core.UCXContext(feature_flags=(core.Feature.TAG,))
        self.worker = core.UCXWorker(self.context)
        self.memory = self.plain(self.size)
        self.signal = {tag: Array(np.zeros(1, dtype=np.int64)) for tag in (ASK, DONE)}
        self.endpoint: Any = None
        # With error handling, UCX does not use its shared-memory transports.
        self.careful = self.setting in ("as it comes", "tcp")
        if self.role == REMOTE:
            self.listener = core.UCXListener.create(worker=self.worker, port=0, cb_func=self.accepted)

    def accepted(self, asked: Any) -> None:
        """Accept the connection of the local side."""
        self.endpoint = self.listener.create_endpoint_from_conn_request(asked, endpoint_error_handling=self.careful)

    def hello(self) -> Any:
        """The port."""
        return self.listener.port

    def link(self, hello: Any) -> None:
        """Connect, and wait for a first answer."""
        self.endpoint = self.core.UCXEndpoint.create(
            self.worker, "127.0.0.1", hello, endpoint_error_handling=self.careful
        )
        self.wait([self.send(ASK)])
        self.wait([self.receive(DONE)])

    def send(self, tag: int) -> Any:
        """Send a message without cache bytes."""
        return self.endpoint.tag_send(self.signal[tag], self.tag(tag))

    def receive(self, tag: int) -> Any:
        """Receive a message without cache bytes."""
        return self.endpoint.tag_recv(self.signal[tag], self.tag(tag))

    def wait(self, requests: list[Any], over: Optional[Callable[[], bool]] = None) -> bool:
        """Drive the worker until all are done."""
        polls = 0
        for request in requests:
            while not request.completed:
                self.worker.progress()
                polls += 1
                if over is not None and polls % LOOK == 0 and over():
                    return False
            request.check_error()
        return True

    def blocks(self, case: Case) -> list[Any]:
        """The blocks of this side, in the order of the list."""
        rows = case.local_rows if self.role == LOCAL else case.remote_rows
        words = self.memory.reshape(-1, case.block // 8)
        return [self.array(words[row]) for row in rows]

    def lay(self, case: Case) -> None:
        """Make the blocks of this side and their tags."""
        self.ready = [(block, self.tag(FIRST + at)) for at, block in enumerate(self.blocks(case))]

    def request(self, case: Case) -> Run:
        """Pull: ask, then receive every block. Push: send every block, and wait until the remote side has all."""
        ready = self.ready

        def pull() -> None:
            arrived = [self.endpoint.tag_recv(block, tag) for block, tag in ready]
            self.wait([self.send(ASK), *arrived])

        def push() -> None:
            done = self.receive(DONE)
            self.wait([self.send(ASK), *[self.endpoint.tag_send(block, tag) for block, tag in ready], done])

        return pull if case.op == PULL else push

    def attend(self, case: Optional[Case], times: int, over: Callable[[], bool]) -> None:
        """The other half of every transfer."""
        while self.endpoint is None:
            self.worker.progress()
        for _ in range(times):
            if not self.wait([self.receive(ASK)], over):
                return
            if case is None:
                self.wait([self.send(DONE)])
            elif case.op == PULL:
                self.wait([self.endpoint.tag_send(block, tag) for block, tag in self.ready], over)
            else:
                self.wait([self.endpoint.tag_recv(block, tag) for block, tag in self.ready], over)
                self.wait([self.send(DONE)])

    def prepared(self, blocks: int, block: int) -> dict[str, float]:
        """Make a view and a tag for every block. The remote side needs the same number."""
        began = time.perf_counter()
        words = self.memory.reshape(-1, block // 8)
        _ = [(self.array(words[row]), self.tag(FIRST + row)) for row in range(blocks)]
        return {"prepare": time.perf_counter() - began}

    def close(self) -> None:
        """In order."""
        self.endpoint.close_blocking(period=PERIOD_NS, max_attempts=1)
