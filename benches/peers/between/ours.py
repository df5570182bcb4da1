"""Ours between two processes: pools, registered memory and TCP, all one-sided."""

from __future__ import annotations

import time
from functools import partial
from typing import TYPE_CHECKING, Any

import numpy as np

from between.adapter import AUTO, HUGE, PULL, REMOTE, THREADS, Adapter, Case, Run, address
from between.sequence import HEAD_DIM, TOTAL_HEADS, Rank, Sequence

if TYPE_CHECKING:
    from llm_datadist.native import Cache, Peer

SLACK = 64 << 20


class Ours(Adapter):
    """One engine of the pair."""

    @classmethod
    def load(cls) -> None:
        """Import it."""
        from llm_datadist.native import Engine  # noqa: F401, PLC0415  (timed)

    def open(self) -> None:
        """Open an engine that listens. The memory is that of its pool, or of the process."""
        from llm_datadist.native import Engine  # noqa: PLC0415  (timed by load)

        registered = self.setting == "registered"
        self.engine = Engine(
            pool=SLACK if registered else self.size + SLACK,
            page="4KiB",
            listen="127.0.0.1:0",
            timeout=20.0,
            copy_workers=THREADS,
            transport="tcp" if self.setting == "tcp" else "shm",
            # In a series of small pages, the hint about them has no use.
            huge_pages={HUGE: "eager", AUTO: "auto"}.get(self.pages, "off"),
        )
        self.own = self.plain(self.size) if registered else None
        self.peer: Peer
        self.caches: list[Cache] = []
        self.parts: list[np.ndarray] = []  # the bytes of the caches of a sequence
        self.cut(1 << 20)

    def cut(self, block: int) -> None:
        """Make one tensor of blocks over the memory."""
        self.free()
        blocks, shape = self.size // block, (block // 2,)
        if self.own is not None:
            addresses = [address(self.own)]
            cache = self.engine.register("0", addresses, blocks=blocks, shape=shape, dtype="bfloat16")
            self.memory = self.own
        else:
            cache = self.engine.allocate("0", blocks=blocks, tensors=1, shape=shape, dtype="bfloat16")
            self.memory = cache.tensors[0].numpy().reshape(-1).view(np.int64)
        self.caches = [cache]
        self.block = block

    def free(self) -> None:
        """Give back the caches, but not memory of the process."""
        self.memory, self.parts = np.zeros(0, dtype=np.int64), []
        for cache in self.caches:
            cache.free().result()
        self.caches = []

    def cut_by_layout(self, case: Sequence) -> None:
        """Make the caches of a sequence: one for each owner on the remote side, one on the local side."""
        self.free()
        self.block = 0
        ranks = case.move.owners if self.role == REMOTE else (case.move.local,)
        at = 0
        for rank in ranks:
            size = case.tensors * case.rows * rank.block_bytes
            self.parts.append(self.of_rank(case, rank, at, size))
            at += size
        if self.role != REMOTE:
            self.memory = self.parts[0]

    def of_rank(self, case: Sequence, rank: Rank, at: int, size: int) -> np.ndarray:
        """Make the cache of one rank, in memory of the process at byte `at` or in the pool, and return its bytes."""
        from llm_datadist.native import KvLayout  # noqa: PLC0415

        layout = KvLayout(
            layers=case.tensors // 2,
            block_tokens=rank.tokens,
            heads=range(rank.first, rank.end),
            total_heads=TOTAL_HEADS,
            head_dim=HEAD_DIM,
            dtype="bfloat16",
            order=rank.order,
        )
        name = str(len(self.caches))
        if self.own is not None:
            own = self.own[at // 8 : (at + size) // 8]
            addresses = [address(own) + tensor * (size // case.tensors) for tensor in range(case.tensors)]
            self.caches.append(self.engine.register(name, addresses, layout, blocks=case.rows))
            return own
        self.caches.append(self.engine.allocate(name, layout, blocks=case.rows, contiguous=True))
        words: np.ndarray = self.caches[-1].buffer.numpy().view(np.int64)
        return words

    def fill(self, op: str) -> None:
        """The caches of a sequence have the bytes of the pattern one after another."""
        if not self.parts:
            super().fill(op)
        elif not self.is_destination(op):
            at = 0
            for words in self.parts:
                words[:] = self.pattern[at : at + len(words)]
                at += len(words)

    def hello(self) -> Any:
        """The listen address."""
        return self.engine.address

    def link(self, hello: Any) -> None:
        """Link the engines."""
        self.peer = self.engine.link(hello, timeout=5.0).result()

    def relink(self, hello: Any) -> None:
        """Drop the old link, and link again."""
        self.peer.close(2.0).result()
        self.link(hello)

    def lay(self, case: Case) -> None:
        """Blocks of the size that is moved, or caches with the layouts between which a sequence moves."""
        if isinstance(case, Sequence):
            self.cut_by_layout(case)
        elif self.block != case.block:
            self.cut(case.block)

    def request(self, case: Case) -> Run:
        """One call. Only the lists can be prepared."""
        if isinstance(case, Sequence):
            return partial(self.pull_sequence, case)
        engine, here, there = self.engine, self.caches[0], self.peer["0"]
        src, dst = case.src.tolist(), case.dst.tolist()
        if case.op == PULL:
            return lambda: engine.pull(here[dst], there[src]).result()
        return lambda: engine.push(there[dst], here[src]).result()

    def pull_sequence(self, case: Sequence) -> None:
        """One call for new lists of blocks, from one owner or from several."""
        here, src = self.caches[0][case.dst_blocks.tolist()], case.src_blocks.tolist()
        pairs = [(here, self.peer[str(owner)][src]) for owner in range(len(case.move.owners))]
        self.engine.pull(pairs).result()

    def prepared(self, blocks: int, block: int) -> dict[str, float]:
        """Register a cache of this many blocks, which is all that a call needs."""
        memory, shape = self.plain(blocks * block), (block // 2,)
        began = time.perf_counter()
        cache = self.engine.register("prepared", [address(memory)], blocks=blocks, shape=shape, dtype="bfloat16")
        took = time.perf_counter() - began
        cache.free().result()
        return {"prepare": took}

    def close(self) -> None:
        """In order."""
        self.memory, self.parts = np.zeros(0, dtype=np.int64), []
        self.engine.close()
