"""Mooncake's transfer engine between two processes over TCP, the only transport of its CPU wheel.

Not for: its store (``store``).
"""

from __future__ import annotations

import time
from typing import Any

from between.adapter import PULL, Adapter, Case, Run, address
from between.sequence import Sequence

MAX_REQUESTS = 1024  # requests of a call; more fail, and make later calls fail


class Engine(Adapter):
    """One engine."""

    @classmethod
    def load(cls) -> None:
        """Import it."""
        import mooncake.engine  # noqa: F401, PLC0415  (timed)

    def open(self) -> None:
        """Open an engine without a metadata server, and register one region."""
        from mooncake.engine import TransferEngine  # noqa: PLC0415  (timed by load)

        self.engine = TransferEngine()
        code = self.engine.initialize("127.0.0.1", "P2PHANDSHAKE", "tcp", "")
        if code:
            raise RuntimeError(f"initialize says {code}")
        self.memory = self.plain(self.size)
        code = self.engine.register_memory(address(self.memory), self.size)
        if code:
            raise RuntimeError(f"register_memory says {code}")

    def hello(self) -> Any:
        """The port, and the address of the memory."""
        return self.engine.get_rpc_port(), address(self.memory)

    def link(self, hello: Any) -> None:
        """Transfer 8 bytes, because the engine connects at the first transfer."""
        port, self.there = hello
        self.host = f"127.0.0.1:{port}"
        code = self.engine.transfer_sync_read(self.host, address(self.memory), self.there, 8)
        if code:
            raise RuntimeError(f"transfer_sync_read says {code}")

    def variants(self, case: Case) -> list[tuple[str, int, Run]]:
        """A sequence between KV layouts is requested with new lists and with prepared ones, other cases in one way."""
        prepared = self.request(case)
        if not isinstance(case, Sequence):
            return [("", 0, prepared)]

        def run() -> None:
            self.request(case.anew())()

        return [("new lists", 0, run), ("prepared", 0, prepared)]

    def request(self, case: Case) -> Run:
        """Calls of at most 1,024 blocks; the lists are made here."""
        local = (case.local_rows * case.block + address(self.memory)).tolist()
        there = (case.remote_rows * case.block + self.there).tolist()
        calls = []
        for at in range(0, case.count, MAX_REQUESTS):
            mine, theirs = local[at : at + MAX_REQUESTS], there[at : at + MAX_REQUESTS]
            calls.append((mine, theirs, [case.block] * len(mine)))
        call = self.engine.batch_transfer_sync_read if case.op == PULL else self.engine.batch_transfer_sync_write
        host = self.host

        def run() -> None:
            for mine, theirs, lengths in calls:
                code = call(host, mine, theirs, lengths)
                if code:
                    raise RuntimeError(f"{call.__name__} says {code}")

        return run

    def prepared(self, blocks: int, block: int) -> dict[str, float]:
        """Its memory is registered in one piece; a call takes lists of addresses."""
        began = time.perf_counter()
        for base in (address(self.memory), self.there):
            _ = [base + at * block for at in range(blocks)], [block] * blocks
        return {"prepare": time.perf_counter() - began}

    def close(self) -> None:
        """In order."""
        self.engine.unregister_memory(address(self.memory))
