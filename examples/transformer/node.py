"""Code that both processes share: open an engine, allocate the cache of a layout, exchange messages.

Both layouts are caches of blocks. A block of the contiguous layout holds a whole sequence. Not for: computing and
moving KV (`prefill`, `decode`).
"""

from __future__ import annotations

from multiprocessing import connection, parent_process
from typing import TYPE_CHECKING, Any, NamedTuple, Union

import numpy as np

from layouts import Contiguous, Paged
from llm_datadist import Engine, KvLayout

if TYPE_CHECKING:
    from generation import Workload
    from model import Array


class Setup(NamedTuple):
    """The arguments of a process.

    `rows`: of the prefill cache, and of the device and host cache of decode. `limit_s`: the time limit of both
    processes, in seconds.
    """

    work: Workload
    layout: str
    rows: tuple[int, int, int]
    prove: bool
    transport: str
    limit_s: float


class Node:
    """An engine, its device cache as arrays, its host cache if any, and the pipe to the other process."""

    def __init__(self, setup: Setup, name: str, rows: int, host_rows: int, pipe: connection.Connection) -> None:
        self._pipe = pipe
        # Of each wait for the other process, a layer or a transfer. Its error precedes that of the command.
        self.limit_s = setup.limit_s / 3
        shape, paged = setup.work.shape, setup.layout == "paged"
        layout = KvLayout(
            layers=shape.layers,
            block_tokens=setup.work.block_tokens if paged else shape.tokens,
            heads=shape.kv_heads,
            head_dim=shape.head_dim,
            dtype="float32",
            model=f"{shape} {setup.work.seed}",
        )
        self.engine = Engine(
            pool="128MiB",
            host_pool="128MiB",
            listen="127.0.0.1:0" if name == "decode" else None,  # 0: any free port
            name=name,
            transport=setup.transport,
            timeout=self.limit_s,
        )
        self.cache = self.engine.allocate("kv", layout, blocks=rows)
        self.host = self.engine.allocate("host", layout, blocks=host_rows, pool="host") if host_rows else None
        tensors: list[Array] = [tensor.numpy() for tensor in self.cache.tensors]
        for tensor in tensors:
            tensor.fill(np.nan)  # a read of a row that was never written gives NaN
        self.layout: Union[Paged, Contiguous] = (Paged if paged else Contiguous)(tensors, seed=rows)

    def send(self, message: Any) -> None:
        """Send a message to the other process."""
        self._pipe.send(message)

    def receive(self) -> Any:
        """Wait for the next message of the other process, at most `limit_s`, or until the command ends."""
        parent = parent_process()
        alive = [parent.sentinel] if parent else []
        ready = connection.wait([self._pipe, *alive], self.limit_s)
        if not ready:
            raise TimeoutError(f"no message within {self.limit_s:g} s")
        if self._pipe not in ready:
            raise EOFError("the command has ended")
        return self._pipe.recv()
