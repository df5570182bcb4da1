"""NIXL between two processes: registered memory, one list of descriptors for each side, one request.

Not for: NIXL inside one process (``local.loopback``).
"""

from __future__ import annotations

import importlib
import time
from functools import partial
from typing import Any, Callable, Optional

import numpy as np

from between.adapter import LOCAL, PULL, Adapter, Case, Run, address
from between.sequence import Sequence

BATCH = 50  # polls of NIXL between two checks of the pipe
FAILED = "ERR"


def api() -> Any:
    """The Python package. With a CUDA build of torch, it refuses this wheel; then the module of the wheel itself."""
    try:
        return importlib.import_module("nixl._api")
    except ImportError:
        return importlib.import_module("nixl_cu12._api")


class Nixl(Adapter):
    """One agent."""

    @classmethod
    def load(cls) -> None:
        """Import it."""
        api()

    @property
    def threaded(self) -> bool:
        """Whether its progress thread runs."""
        return self.setting == "as it comes"

    def open(self) -> None:
        """An agent with one region."""
        front, name = api(), f"{self.role}-side"
        if self.threaded:
            self.agent = front.nixl_agent(name, front.nixl_agent_config(backends=["UCX"]))
        else:
            self.agent = front.nixl_agent(name, front.nixl_agent_config(enable_prog_thread=False, backends=[]))
            quick = {"ucx_error_handling_mode": "none"} if self.setting.startswith("tuned") else {}
            self.agent.create_backend("UCX", quick)
        self.memory = self.plain(self.size)
        self.region = self.agent.register_memory([(address(self.memory), self.size, 0, "")], mem_type="DRAM")
        self.handle: Any = None
        self.lists: list[Any] = []

    def hello(self) -> Any:
        """The metadata, and the address of the memory."""
        return self.agent.get_agent_metadata(), address(self.memory)

    def link(self, hello: Any) -> None:
        """Load the metadata and connect."""
        metadata, self.there = hello
        self.remote = self.agent.add_remote_agent(metadata)
        self.agent.make_connection(self.remote)

    def relink(self, hello: Any) -> None:
        """Remove the old agent, which had the same name, and link."""
        self.handle = None
        self.agent.remove_remote_agent(self.remote)
        self.link(hello)

    def rows(self, base: int, rows: np.ndarray, block: int) -> np.ndarray:
        """Descriptors."""
        at = rows.astype(np.uint64) * np.uint64(block) + np.uint64(base)
        return np.stack([at, np.full_like(at, block), np.zeros_like(at)], axis=1)

    def request(self, case: Case) -> Run:
        """Descriptors and request are made here; the transfer posts the request and polls for its end."""
        self.release()
        local = self.agent.get_xfer_descs(self.rows(address(self.memory), case.local_rows, case.block), mem_type="DRAM")
        there = self.agent.get_xfer_descs(self.rows(self.there, case.remote_rows, case.block), mem_type="DRAM")
        operation = "READ" if case.op == PULL else "WRITE"
        self.handle = self.agent.initialize_xfer(operation, local, there, self.remote)
        agent, handle = self.agent, self.handle

        def run() -> None:
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            if state == FAILED:
                raise RuntimeError("check_xfer_state says ERR")

        return run

    def fresh(self, case: Case) -> Run:
        """As servers do: prepare every block of both sides once, and make a request by index for each transfer."""
        self.release()
        count = self.size // case.block
        everything = np.arange(count)
        local = self.agent.prep_xfer_dlist("", self.rows(address(self.memory), everything, case.block), mem_type="DRAM")
        remote = self.agent.prep_xfer_dlist(self.remote, self.rows(self.there, everything, case.block), mem_type="DRAM")
        operation = "READ" if case.op == PULL else "WRITE"
        mine, theirs = case.local_rows.astype(np.int32), case.remote_rows.astype(np.int32)
        agent = self.agent

        def run() -> None:
            handle = agent.make_prepped_xfer(operation, local, mine, remote, theirs)
            state = agent.transfer(handle)
            while state == "PROC":
                state = agent.check_xfer_state(handle)
            agent.release_xfer_handle(handle)
            if state == FAILED:
                raise RuntimeError("check_xfer_state says ERR")

        return run

    def variants(self, case: Case) -> list[tuple[str, int, Run]]:
        """A sequence between KV layouts is requested in three ways, other cases in one."""
        prepared = self.request(case)
        if not isinstance(case, Sequence):
            return [("", 0, prepared)]
        self.lists = [self.every_piece(side, base, case.block) for side, base in self.sides()]
        return [
            ("new lists", 0, partial(self.once, case, self.by_lists)),
            ("new indices", 0, partial(self.once, case, self.by_indices)),
            ("prepared", 0, prepared),
        ]

    def sides(self) -> tuple[tuple[str, int], tuple[str, int]]:
        """The agent and the memory of the local side and of the remote side."""
        return ("", address(self.memory)), (self.remote, self.there)

    def every_piece(self, agent: str, base: int, piece: int) -> Any:
        """A prepared list of all pieces of one side, given in its compressed form."""
        dense = np.array([[base, piece, 0, piece, self.size // piece]], dtype=np.uint64)
        return self.agent.prep_xfer_dlist(agent, dense, mem_type="DRAM")

    def by_lists(self, case: Case) -> Any:
        """A request over new lists of descriptors."""
        local = self.agent.get_xfer_descs(self.rows(address(self.memory), case.dst, case.block), mem_type="DRAM")
        remote = self.agent.get_xfer_descs(self.rows(self.there, case.src, case.block), mem_type="DRAM")
        return self.agent.initialize_xfer("READ", local, remote, self.remote)

    def by_indices(self, case: Case) -> Any:
        """A request over indices into the prepared lists."""
        local, remote = self.lists
        return self.agent.make_prepped_xfer("READ", local, case.dst.astype(np.int32), remote, case.src.astype(np.int32))

    def once(self, case: Sequence, requested: Callable[[Case], Any]) -> None:
        """Compute the pieces, make a request, transfer, and release the request."""
        handle = requested(case.anew())
        state = self.agent.transfer(handle)
        while state == "PROC":
            state = self.agent.check_xfer_state(handle)
        self.agent.release_xfer_handle(handle)
        if state == FAILED:
            raise RuntimeError("check_xfer_state says ERR")

    def prepared(self, blocks: int, block: int) -> dict[str, float]:
        """Both lists prepared, and a request over all of them."""
        began = time.perf_counter()
        everything = np.arange(blocks)
        local = self.agent.prep_xfer_dlist("", self.rows(address(self.memory), everything, block), mem_type="DRAM")
        remote = self.agent.prep_xfer_dlist(self.remote, self.rows(self.there, everything, block), mem_type="DRAM")
        listed = time.perf_counter()
        which = everything.astype(np.int32)
        handle = self.agent.make_prepped_xfer("READ", local, which, remote, which)
        asked = time.perf_counter()
        for thing in (handle, local, remote):
            thing.release()
        return {"prepare": listed - began, "request": asked - listed}

    def release(self) -> None:
        """Release the last request and the lists of pieces."""
        for prepared in self.lists:
            prepared.release()
        self.lists = []
        if self.handle is not None:
            self.agent.release_xfer_handle(self.handle)
            self.handle = None

    def attend(self, case: Optional[Case], times: int, over: Callable[[], bool]) -> None:  # noqa: ARG002
        """Drive the transport, if there is no progress thread."""
        while not over():
            for _ in range(BATCH):
                self.agent.get_new_notifs()

    def close(self) -> None:
        """In order."""
        self.release()
        if self.role == LOCAL:
            self.agent.remove_remote_agent(self.remote)
        self.agent.deregister_memory(self.region)
