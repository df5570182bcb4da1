"""The prefill process: computes blocks, which decode asks for by messages and pulls.

``prefill`` starts it, with its setup as the only argument. It links to decode. It ends when its standard input is
closed, so that it never outlives decode.

| message from decode                      | answer                                                                  |
| ---------------------------------------- | ----------------------------------------------------------------------- |
| ``compute``: a number, ``blocks``: ids,  | ``computed``: the number, ``slots``: a slot for each block              |
| ``free``: numbers that were pulled       |                                                                         |
| and ``ttl``: seconds, ``reuse``: an id   | also ``token`` of a grant of the slots. If the grant expires, the first |
|                                          | slot gets the bytes of ``reuse``, and ``expired``: the number is sent   |
| ``end``                                  | ``leaked_bytes``, ``seconds``, ``peak_memory_bytes``                    |
"""

from __future__ import annotations

import contextlib
import json
import select
import sys
import time
from typing import Any, NamedTuple

from llm_datadist.commands.output import complain
from llm_datadist.commands.replay.content import Pattern
from llm_datadist.commands.replay.geometry import PAGE_BYTES, Geometry
from llm_datadist.commands.replay.node import CACHE, LIMIT_S, allocate, leaked_bytes
from llm_datadist.commands.replay.report import peak_memory_bytes
from llm_datadist.native import Completed, Engine, Error, Grant, GrantClosed, Message, Peer, PeerLost, PeerUp


class Setup(NamedTuple):
    """Shape and seed of the blocks, blocks of the cache, and options of the engine."""

    geometry: Geometry
    seed: int
    blocks: int
    options: dict[str, Any]

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool."""
        return self.geometry.pool_bytes(self.blocks)


class Worker:
    """An engine with one cache, which is linked to decode."""

    def __init__(self, setup: Setup, address: str, name: str) -> None:
        shape = setup.geometry
        self.engine = Engine(pool=setup.pool_bytes, page=PAGE_BYTES, name=name, timeout=LIMIT_S, **setup.options)
        self._cache, self._rows = allocate(self.engine, CACHE, shape, setup.blocks)
        self._pattern = Pattern(shape.tensors, shape.row_bytes, setup.seed)
        self._free = list(range(setup.blocks))
        self._held: dict[int, list[int]] = {}
        self._lent: dict[Grant, dict[str, Any]] = {}
        self._seconds = 0.0
        self._decode: Peer
        self.engine.link(address)  # PeerUp follows, or Completed with an error

    def serve(self) -> None:
        """Answer messages until standard input is closed."""
        while sys.stdin.fileno() not in select.select([self.engine, sys.stdin.fileno()], [], [])[0]:
            for event in self.engine.events():
                if isinstance(event, PeerUp):
                    self._decode = event.peer
                elif isinstance(event, Completed) and event.error is not None:
                    raise event.error
                elif isinstance(event, Message):
                    self._send(**self._answer(json.loads(event.data)))
                elif isinstance(event, GrantClosed):
                    self._reuse(self._lent.pop(event.grant), event.reason)

    def _answer(self, message: dict[str, Any]) -> dict[str, Any]:
        """Carry out a message and return the answer."""
        if "end" in message:
            return self._report()
        for pulled in message["free"]:
            self._free += self._held.pop(pulled)
        self._free.sort()  # adjacent slots are then taken together, which makes pulls faster
        number = message["compute"]
        slots = self._compute(number, message["blocks"])
        self._held.setdefault(number, []).extend(slots)
        token = self._lend(slots, message) if "ttl" in message else ""
        return {"computed": number, "slots": slots, "token": token}

    def _compute(self, _number: int, blocks: list[int]) -> list[int]:
        start = time.perf_counter()
        slots, self._free = self._free[: len(blocks)], self._free[len(blocks) :]
        for block, slot in zip(blocks, slots):
            self._pattern.fill(self._rows, slot, block)
        self._seconds += time.perf_counter() - start
        return slots

    def _lend(self, slots: list[int], message: dict[str, Any]) -> str:
        grant = self.engine.lend(self._cache[slots], ttl=message["ttl"])
        self._lent[grant] = message
        return grant.token.hex()

    def _reuse(self, message: dict[str, Any], reason: str) -> None:
        """Write another block over one whose grant has ended before it was pulled."""
        if reason != "done":
            self._pattern.fill(self._rows, self._held[message["compute"]][0], message["reuse"])
            self._send(expired=message["compute"], reason=reason)

    def _report(self) -> dict[str, Any]:
        self._rows.clear()
        leaked = leaked_bytes(self.engine, self._cache)
        return {"leaked_bytes": leaked, "seconds": self._seconds, "peak_memory_bytes": peak_memory_bytes()}

    def _send(self, **message: Any) -> None:
        with contextlib.suppress(PeerLost):  # decode then closes the input
            self._decode.send(json.dumps(message, separators=(",", ":")).encode())


def main() -> int:
    """Run the process and return its exit status."""
    shape, *setup, address, name = json.loads(sys.argv[1])
    try:
        worker = Worker(Setup(Geometry(*shape), *setup), address, name)
        with worker.engine:
            worker.serve()
    except Error as error:
        complain(f"replay: prefill: the engine failed: {type(error).__name__}: {error}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
