"""Mooncake's store between two processes: put and get of one object per block. The remote process has the segment.

Not for: many small objects without a transfer (``many``).
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

from between.adapter import LOCAL, POISON, PULL, REMOTE, Adapter, Case, Run, address
from between.systems import STORE_PORT

if TYPE_CHECKING:
    import numpy as np

BATCH = 512  # objects of a call; larger calls fail (TRANSFER_FAIL, with 1,024 requests queued for a peer)
SEGMENT = 3  # size as a multiple of the memory: objects of the source, and space for puts


class Store(Adapter):
    """One client. The remote one provides the segment."""

    verifies_local = True

    @classmethod
    def load(cls) -> None:
        """Import it."""
        import mooncake.store  # noqa: F401, PLC0415  (timed)

    def open(self) -> None:
        """A client of the master."""
        from mooncake.store import MooncakeDistributedStore  # noqa: PLC0415  (timed by load)

        self.store = MooncakeDistributedStore()
        segment = self.size * SEGMENT if self.role == REMOTE else 0
        master = f"127.0.0.1:{os.environ[STORE_PORT]}"
        code = self.store.setup("127.0.0.1", "P2PHANDSHAKE", segment, 64 << 20, "tcp", "", master)
        if code:
            raise RuntimeError(f"setup says {code}")
        self.laid: tuple[str, int] = ("", 0)
        if self.role == LOCAL:
            self.memory = self.plain(self.size)
            self.scratch = self.plain(self.size)
            for words in (self.memory, self.scratch, self.pattern):
                code = self.store.register_buffer(address(words), self.size)
                if code:
                    raise RuntimeError(f"register_buffer says {code}")

    def hello(self) -> Any:
        """None, because the clients find each other through the master."""
        return None

    def link(self, hello: Any) -> None:  # noqa: ARG002
        """Put and get one small object."""
        self.all_well(self.store.batch_put_from(["link"], [address(self.memory)], [8]), 0)
        self.all_well(self.store.batch_get_into(["link"], [address(self.memory)], [8]), 8)

    def fill(self, op: str) -> None:
        """Write the local memory, from which a put takes its bytes."""
        if self.role == LOCAL and op != PULL:
            self.memory[:] = self.pattern

    def poison_all(self) -> None:
        """Poison the local memory for a get. The destination of a put cannot be accessed."""
        if self.role == LOCAL:
            self.scratch[:] = POISON
            if self.laid[0] == PULL:
                self.memory[:] = POISON

    def lay(self, case: Case) -> None:
        """Put the objects that a pull reads."""
        self.laid = (case.op, case.block)
        if self.role == REMOTE:
            return
        self.store.remove_all(True)
        if case.op == PULL:
            where = (case.src * case.block + address(self.pattern)).tolist()
            self.batched(self.store.batch_put_from, keys("s", case.src), where, case.block, 0)
        else:
            self.memory[:] = self.pattern

    def request(self, case: Case) -> Run:
        """The keys and addresses are made here."""
        if case.op == PULL:
            where = (case.dst * case.block + address(self.memory)).tolist()
            names = keys("s", case.src)
            return lambda: self.batched(self.store.batch_get_into, names, where, case.block, case.block)
        where = (case.src * case.block + address(self.memory)).tolist()
        names = keys("d", case.dst)

        def run() -> None:
            self.batched(self.store.batch_put_from, names, where, case.block, 0)

        return run

    def poison(self, case: Case) -> None:
        """Poison the destination. For a put, remove its keys, because a put to an existing key does nothing."""
        if case.op == PULL:
            super().poison(case)
        else:
            self.store.batch_remove(keys("d", case.dst), True)
            self.limit.poison(case.moves(address(self.pattern), address(self.scratch)), case.block)

    def wrong(self, case: Case) -> str:
        """Verify the destination. The objects of a put are fetched again for this."""
        if case.op != PULL:
            where = (case.dst * case.block + address(self.scratch)).tolist()
            self.batched(self.store.batch_get_into, keys("d", case.dst), where, case.block, case.block)
        return super().wrong(case)

    def checked(self, case: Case) -> np.ndarray:
        """The addresses to verify."""
        return case.moves(address(self.pattern), address(self.memory if case.op == PULL else self.scratch))

    def strays(self, case: Case) -> str:
        """Checked for gets only, because the address of an object is not known."""
        return super().strays(case) if case.op == PULL else ""

    def batched(self, call: Any, names: list[str], where: list[int], block: int, right: int) -> None:
        """Make one call for every `BATCH` objects."""
        for at in range(0, len(names), BATCH):
            some = names[at : at + BATCH]
            self.all_well(call(some, where[at : at + BATCH], [block] * len(some)), right)

    def all_well(self, codes: list[int], right: int) -> None:
        """Raise an exception if any object failed."""
        bad = [code for code in codes if code != right]
        if bad:
            raise RuntimeError(f"{len(bad)} of {len(codes)} objects say {bad[0]}")

    def prepared(self, blocks: int, block: int) -> dict[str, float]:
        """Make the keys and addresses, which are all that a call needs."""
        began = time.perf_counter()
        _ = [f"s{row}" for row in range(blocks)], [address(self.memory) + row * block for row in range(blocks)]
        return {"prepare": time.perf_counter() - began}

    def close(self) -> None:
        """In order."""
        self.store.close()


def keys(prefix: str, rows: np.ndarray) -> list[str]:
    """One name for each block."""
    return [f"{prefix}{row}" for row in rows.tolist()]
