"""The module hixl between two processes: READ and WRITE of registered memory of the process, by address.

Not for: the native engine below it (``ours``), or single calls of both (``benches/one_sided.py``).
"""

from __future__ import annotations

import socket
from typing import Any

from between.adapter import PULL, Adapter, Case, Run, address

LIMIT_MS = 20_000


class Hixl(Adapter):
    """One engine."""

    @classmethod
    def load(cls) -> None:
        """Import the module."""
        import hixl  # noqa: F401, PLC0415  (timed)

    def open(self) -> None:
        """Open an engine that listens, and register one region."""
        import hixl  # noqa: PLC0415  (timed by load)

        self.module, self.address = hixl, free_address()
        self.engine = hixl.Hixl()
        succeed(self.engine.initialize(self.address))
        self.memory = self.plain(self.size)
        status, _ = self.engine.register_mem(hixl.MemDesc(address(self.memory), self.size), hixl.MEM_HOST)
        succeed(status)

    def hello(self) -> Any:
        """The listen address, and the address of the memory."""
        return self.address, address(self.memory)

    def link(self, hello: Any) -> None:
        """Connect."""
        self.remote, self.there = hello
        succeed(self.engine.connect(self.remote, 5000))

    def relink(self, hello: Any) -> None:
        """Disconnect from the old engine, and connect."""
        succeed(self.engine.disconnect(self.remote))
        self.link(hello)

    def request(self, case: Case) -> Run:
        """Return one call. The list of operations is made here, outside the clock."""
        local = (case.local_rows * case.block + address(self.memory)).tolist()
        there = (case.remote_rows * case.block + self.there).tolist()
        ops = [self.module.TransferOpDesc(mine, theirs, case.block) for mine, theirs in zip(local, there)]
        operation = self.module.READ if case.op == PULL else self.module.WRITE
        transfer, remote = self.engine.transfer_sync, self.remote
        return lambda: succeed(transfer(remote, operation, ops, LIMIT_MS))

    def close(self) -> None:
        """Stop the engine."""
        self.engine.finalize()


def succeed(status: int) -> None:
    """Raise if a call has failed."""
    if status:
        raise RuntimeError(f"status {status}")


def free_address() -> str:
    """Return an address at which an engine can listen."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return f"127.0.0.1:{probe.getsockname()[1]}"
