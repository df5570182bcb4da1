"""The prefill process: computes blocks, which decode asks for by messages and pulls.

``prefill`` starts it, with its setup as the only argument. It links to decode. It ends when its standard input is
closed, so that it never outlives decode.

| message from decode                             | answer                                 |
| ----------------------------------------------- | -------------------------------------- |
| ``compute``: a number, ``first``: a slot,       | ``computed``: the number, and how many |
| ``blocks``: the ids for this slot and the next  | blocks the slots have from slot 0 on   |
| ``end``                                         | ``leaked_bytes``                       |
"""

from __future__ import annotations

import contextlib
import json
import select
import sys
from typing import Any, NamedTuple

from llm_datadist.commands.output import complain
from llm_datadist.commands.replay.content import Pattern
from llm_datadist.commands.replay.node import CACHE, LIMIT_S, PAGE_BYTES, Geometry, allocate, leaked_bytes
from llm_datadist.native import Completed, Engine, Error, Message, Peer, PeerLost, PeerUp


class Setup(NamedTuple):
    """Shape and seed of the blocks, blocks of the cache, and the option ``transport`` of the engine."""

    geometry: Geometry
    seed: int
    blocks: int
    transport: str

    @property
    def pool_bytes(self) -> int:
        """Bytes of the pool."""
        return self.geometry.pool_bytes(self.blocks)


class Worker:
    """An engine with one cache, which is linked to decode."""

    def __init__(self, setup: Setup, address: str, name: str) -> None:
        shape = setup.geometry
        given: dict[str, Any] = {"page": PAGE_BYTES, "timeout": LIMIT_S, "transport": setup.transport}
        self.engine = Engine(pool=setup.pool_bytes, name=name, **given)
        self._cache, self._rows = allocate(self.engine, CACHE, shape, setup.blocks)
        self._pattern = Pattern(shape.tensors, shape.row_bytes, setup.seed)
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
                    self._answer(json.loads(event.data))

    def _answer(self, message: dict[str, Any]) -> None:
        """Carry out a message and send the answer."""
        if "end" in message:
            self._rows.clear()
            answer = {"leaked_bytes": leaked_bytes(self.engine, self._cache)}
        else:
            number, first, blocks = message["compute"], message["first"], message["blocks"]
            self._compute(number, first, blocks)
            answer = {"computed": number, "blocks": first + len(blocks)}
        with contextlib.suppress(PeerLost):  # decode then closes the input
            self._decode.send(json.dumps(answer).encode())

    def _compute(self, _number: int, first: int, blocks: list[int]) -> None:
        for slot, block in enumerate(blocks, first):
            self._pattern.fill(self._rows, slot, block)


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
