"""The prefill process: writes the blocks and the staging cache of each request, for decode to pull.

``prefill`` starts it with pipes as standard input and output, which carry messages (``channel``). All other output goes
to standard error. The process ends at the end of its input, so that it never outlives the decode process.

| from decode                              | to decode                                                     |
| ---------------------------------------- | ------------------------------------------------------------- |
| ``geometry``, ``seed``, ``blocks``, ...  | ``address``: where this engine listens                        |
| ``compute``: a request, ``blocks``: ids, | ``computed``: the request, ``slots``: the slot of each block, |
| ``free``: requests that were pulled      | ``total``: blocks computed so far                             |
| ``grant``: an id, ``ttl_ms``, ``reuse``  | ``slot``, ``token`` of the grant, ``ended``: why it has ended |
| ``end``                                  | ``leaked_bytes``, seconds and memory; then the process ends   |
"""

from __future__ import annotations

import json
import os
import select
import sys
import time
from typing import TYPE_CHECKING, Any, NamedTuple

from llm_datadist import CacheKey, LLMException, LLMRole, Placement
from llm_datadist.events import Grant, GrantEnded
from llm_datadist.replay.content import Pattern
from llm_datadist.replay.engine import Engine
from llm_datadist.replay.geometry import STAGING_TOKENS, Geometry
from llm_datadist.replay.node import BLOCKS_MODEL, PREFILL, STAGING_MODEL
from llm_datadist.replay.report import peak_memory_bytes

if TYPE_CHECKING:
    from collections.abc import Iterable

    from llm_datadist.replay.channel import Message

GRANT_LIMIT_S = 10.0
"""Time limit of the wait for the end of a grant, beyond its own duration."""


class Setup(NamedTuple):
    """The first message: shape and seed of the blocks, blocks and bytes of the pool, and options of the engine."""

    geometry: Geometry
    seed: int
    blocks: int
    pool_bytes: int
    extra: dict[str, str]

    def message(self) -> Message:
        """Return the setup as a message."""
        return {**self._asdict(), "geometry": list(self.geometry)}

    @classmethod
    def of(cls, message: Message) -> Setup:
        """Return the setup in a message."""
        return cls(**{**message, "geometry": Geometry(*message["geometry"])})


class Worker:
    """An engine with one blocks cache under a key, and a free list of its slots."""

    def __init__(self, setup: Setup) -> None:
        shape = setup.geometry
        options = {"llm.listenIpInfo": "127.0.0.1:0", **setup.extra}
        self._engine = Engine(LLMRole.PROMPT, PREFILL, shape, (setup.pool_bytes, 0), options)
        self._cache, self._rows = self._engine.blocks_cache(setup.blocks, Placement.DEVICE, BLOCKS_MODEL)
        self._pattern = Pattern(shape.tensors, shape.row_bytes, setup.seed)
        self._staging_pattern = Pattern(shape.tensors, STAGING_TOKENS * shape.token_bytes, setup.seed + 1)
        self._free = list(range(setup.blocks - 1, -1, -1))
        self._held: dict[int, list[int]] = {}
        self._computed = 0
        self._seconds = 0.0

    def answer(self, message: Message) -> Message:
        """Carry out a message and return the answer."""
        if "compute" in message:
            number = message["compute"]
            self._forget(message["free"])
            slots = self._compute(number, message["blocks"])
            return {"computed": number, "slots": slots, "total": self._computed}
        if "grant" in message:
            return self._grant(message["grant"], message["ttl_ms"], message["reuse"])
        if "end" in message:
            return self._report()
        raise ValueError(f"unknown message: {message!r}")

    def address(self) -> Message:
        """Return the answer to the first message."""
        return {"address": self._engine.dist.listen_ip_info}

    def close(self) -> None:
        """Stop the engine."""
        self._engine.close()

    def _compute(self, number: int, blocks: list[int]) -> list[int]:
        start = time.perf_counter()
        slots = [self._free.pop() for _ in blocks]
        for block, slot in zip(blocks, slots):
            self._pattern.fill(self._rows, slot, block)
        self._held[number] = slots
        self._stage(number)
        self._computed += len(blocks)
        self._seconds += time.perf_counter() - start
        return slots

    def _forget(self, numbers: list[int]) -> None:
        """Free the slots of requests that were pulled."""
        for number in numbers:
            self._free += self._held.pop(number)
        self._free.sort(reverse=True)  # adjacent slots are then taken together, which makes pulls faster

    def _stage(self, number: int) -> None:
        """Write the staging cache of a request. Only its key holds it afterwards, so that the pull releases it."""
        manager = self._engine.manager
        key = CacheKey(PREFILL, number, model_id=STAGING_MODEL)
        cache = manager.allocate_cache(self._engine.staging(), [key])
        self._staging_pattern.fill(self._engine.rows(cache), 0, number)
        manager.deallocate_cache(cache)

    def _grant(self, block: int, ttl_ms: int, reuse: int | None) -> Message:
        """Compute a block and grant it.

        With `reuse`, also wait until the grant has ended, and write that block over it. The slot stays free,
        because no request is being computed.
        """
        slot, dist = self._free[-1], self._engine.dist
        self._pattern.fill(self._rows, slot, block)
        dist.poll()  # from now on, the engine keeps events
        grant = self._engine.manager.grant(self._cache, [slot], ttl_ms)
        if reuse is not None and self._wait_for_end(grant):
            self._pattern.fill(self._rows, slot, reuse)
        return {"slot": slot, "token": grant.token.hex(), "ended": grant.ended}

    def _wait_for_end(self, grant: Grant) -> bool:
        """Wait until the engine says that a grant has ended. Return False if it does not in time."""
        dist, until = self._engine.dist, time.monotonic() + GRANT_LIMIT_S
        while (left_s := until - time.monotonic()) > 0:
            select.select([dist], [], [], left_s)
            if any(isinstance(event, GrantEnded) and event.grant == grant for event in dist.poll()):
                return True
        return False

    def _report(self) -> Message:
        self._rows.clear()
        self._engine.manager.deallocate_blocks_cache(self._cache)
        return {
            "leaked_bytes": self._engine.used_bytes(),
            "keys": self._engine.stats()["table"]["keys"],
            "computed": self._computed,
            "seconds": self._seconds,
            "peak_memory_bytes": peak_memory_bytes(),
        }


def serve(lines: Iterable[str], replies: Any) -> int:
    """Answer the messages in `lines`, and return the exit status: 1 if they stop before the message ``end``."""
    messages = (json.loads(line) for line in lines)
    setup = next(messages, None)
    if setup is None:
        return 1
    worker = Worker(Setup.of(setup))
    try:
        _send(replies, worker.address())
        for message in messages:
            _send(replies, worker.answer(message))
            if "end" in message:
                return 0
    finally:
        worker.close()
    return 1


def _send(replies: Any, message: Message) -> None:
    replies.write(json.dumps(message, separators=(",", ":")) + "\n")
    replies.flush()


def main() -> int:
    """Run the process and return its exit status."""
    with os.fdopen(os.dup(1), "w", encoding="utf-8") as replies:
        os.dup2(2, 1)
        try:
            return serve(sys.stdin, replies)
        except LLMException as error:
            print(f"replay: prefill: the engine failed: {error}", file=sys.stderr)  # noqa: T201  (its only channel)
        except BrokenPipeError:
            os.dup2(os.open(os.devnull, os.O_WRONLY), replies.fileno())  # so that the flush on close succeeds
        return 1


if __name__ == "__main__":
    sys.exit(main())
