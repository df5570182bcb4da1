"""The whole loop of a scheduler: asynchronous pulls, notifications, grants, and a prefill process that is killed.

It starts the prefill process itself, and exits with 1 if a byte is wrong. Run it:
`python examples/guide_whole_loop.py`.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from collections import Counter, deque
from typing import Any

from llm_datadist import (
    BlocksCacheKey,
    CacheDesc,
    DataType,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
    LLMStatusCode,
)
from llm_datadist.events import Completed, GrantEnded, LinkDown, Notification

PREFILL, DECODE = 1, 2  # cluster ids
BLOCKS, BLOCKS_OF_REQUEST = 64, 4
DESC = CacheDesc(8, [BLOCKS, 16, 2, 64], DataType.DT_FLOAT16)  # K and V of 4 layers
REQUESTS, IN_FLIGHT = 24, 6
TTL_MS = 30_000  # how long a grant of prefill lasts; a healthy decode process never needs so long


def open_engine(role: LLMRole, cluster_id: int, listen: str = "") -> LLMDataDist:
    """Return an engine that keeps events about links and grants. A process has at most one engine."""
    config = LLMConfig()
    config.enable_cache_manager = True
    config.mem_pool_cfg = '{"memory_size": "64MiB"}'
    config.listen_ip_info = listen
    engine = LLMDataDist(role, cluster_id)
    engine.init(config.generate_options())
    engine.poll()  # such events are kept from the first call on
    return engine


def kv_of(request: int, tensor: int) -> float:
    """Return the value that stands for the KV of a request."""
    return request + tensor / 8


# ------------------------------------------------------------------------------------------------- the prefill process


class Prefill:
    """Computes requests into blocks, grants the blocks, and reuses them when the grant has ended."""

    def __init__(self) -> None:
        self.engine = open_engine(LLMRole.PROMPT, PREFILL, "127.0.0.1:0")  # port 0: any free port
        self.manager = self.engine.cache_manager
        self.cache = self.manager.allocate_blocks_cache(DESC, BlocksCacheKey(PREFILL))
        self.tensors = [view.numpy() for view in self.manager.tensor_views(self.cache)]
        self.free = list(range(BLOCKS))
        self.granted: dict[Any, tuple[int, list[int]]] = {}  # grant: reader, blocks
        self.waiting: deque[tuple[int, Any]] = deque()  # reader, what it asks for

    def run(self) -> None:
        """Serve until decode has closed the pipe, and every grant has ended."""
        print(self.engine.listen_ip_info, flush=True)
        serve = True
        while serve or self.granted:
            ready, _, _ = select.select([self.engine, sys.stdin] if serve else [self.engine], [], [])
            serve = serve and sys.stdin not in ready
            for event in self.engine.poll():
                self.handle(event)
            while self.waiting and len(self.free) >= BLOCKS_OF_REQUEST:
                self.grant(*self.waiting.popleft())
        print(f"prefill: {len(self.free)} of {BLOCKS} blocks are free")
        self.engine.finalize()

    def handle(self, event: object) -> None:
        """Handle one event."""
        if isinstance(event, Notification):  # decode asks for a request
            self.waiting.append((event.cluster_id, json.loads(event.payload)))
        elif isinstance(event, GrantEnded):  # done, expired, revoked or released
            self.free += self.granted.pop(event.grant)[1]
        elif isinstance(event, LinkDown):  # a dead reader does not report: without `revoke`, its blocks wait for TTL_MS
            gone = event.peer.cluster_id
            self.waiting = deque(entry for entry in self.waiting if entry[0] != gone)
            for grant in [grant for grant, (reader, _) in self.granted.items() if reader == gone]:
                grant.revoke(wait=False)

    def grant(self, reader: int, asked: dict[str, Any]) -> None:
        """Compute a request, and tell decode where it is."""
        blocks, self.free = self.free[:BLOCKS_OF_REQUEST], self.free[BLOCKS_OF_REQUEST:]
        for number, tensor in enumerate(self.tensors):
            tensor[blocks] = kv_of(asked["request"], number)  # where a model computes
        grant = self.manager.grant(self.cache, blocks, ttl_ms=asked["ttl_ms"])
        self.granted[grant] = reader, blocks
        try:
            self.engine.notify(reader, json.dumps({**asked, "blocks": blocks, "token": grant.token.hex()}).encode())
        except LLMException:  # the link has just ended
            grant.revoke(wait=False)


# -------------------------------------------------------------------------------------------------- the decode process


class Decode:
    """A scheduler with one thread. It never waits for a peer, except in `select`."""

    def __init__(self) -> None:
        self.engine = open_engine(LLMRole.DECODER, DECODE)
        self.manager = self.engine.cache_manager
        self.cache = self.manager.allocate_blocks_cache(DESC)
        self.tensors = [view.numpy() for view in self.manager.tensor_views(self.cache)]
        self.free = list(range(BLOCKS))
        self.waiting = deque(range(REQUESTS))  # requests that prefill must compute
        self.asked: dict[int, int] = {}  # attempt: request that prefill computes
        self.pulling: dict[Any, tuple[int, list[int]]] = {}  # transfer: request, destination blocks
        self.attempts = 0
        self.right = self.wrong = 0
        self.again: Counter[str] = Counter()  # why requests were recomputed
        self.start_prefill()

    def start_prefill(self) -> None:
        """Start a prefill process and begin to link to it. In production, a supervisor starts the process."""
        program = [sys.executable, __file__, "prefill"]
        self.process = subprocess.Popen(  # noqa: S603  (this program)
            program, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        self.linking = self.engine.ensure_link(self.process.stdout.readline().strip(), timeout_ms=30_000)
        self.linked = False

    def run(self) -> None:
        """Serve all requests, and kill prefill when half of them are answered."""
        killed = False
        while self.right + self.wrong < REQUESTS:
            select.select([self.engine], [], [], 1.0)
            for event in self.engine.poll():
                self.handle(event)
            self.ask()
            if self.right >= REQUESTS // 2 and not killed:
                self.process.kill()
                killed = True

    def handle(self, event: object) -> None:
        """Handle one event. `LinkDown` and the failures of pulls over the same link come in any order."""
        if isinstance(event, Completed) and event.transfer is self.linking:
            event.transfer.result()  # raises if there is no link
            self.linked = True
        elif isinstance(event, Completed):
            self.end_pull(event.transfer)
        elif isinstance(event, Notification):
            self.pull(json.loads(event.payload))
        elif isinstance(event, LinkDown):
            print("the link has ended")
            self.compute_again("LinkDown", *self.asked.values())
            self.asked.clear()
            with self.process:  # closes its pipes, and waits until it has ended
                self.process.kill()
            self.start_prefill()

    def ask(self) -> None:
        """Ask prefill for the next requests. The blocks of the first one are granted for 100 ms only, and expire."""
        while self.linked and self.waiting and len(self.asked) + len(self.pulling) < IN_FLIGHT:
            asked = {"attempt": self.attempts, "request": self.waiting[0], "ttl_ms": TTL_MS if self.attempts else 100}
            try:
                self.engine.notify(PREFILL, json.dumps(asked).encode())
            except LLMException as error:
                if error.status_code != LLMStatusCode.LLM_LINK_BUSY:  # otherwise: prefill has not polled for long
                    self.linked = False  # `LinkDown` follows
                return
            self.asked[self.attempts] = self.waiting.popleft()
            self.attempts += 1

    def pull(self, announced: dict[str, Any]) -> None:
        """Start to pull the blocks that prefill has announced."""
        if self.asked.pop(announced["attempt"], None) is None:
            return  # of an earlier link
        if announced["attempt"] == 0:
            time.sleep(0.3)  # a step of the scheduler that takes too long
        blocks = [self.free.pop() for _ in announced["blocks"]]
        transfer = self.manager.pull_blocks_async(
            BlocksCacheKey(PREFILL),
            self.cache,
            announced["blocks"],
            blocks,
            timeout_ms=5_000,
            grant=bytes.fromhex(announced["token"]),
            grant_done=True,  # when the bytes are in place, prefill gets `GrantEnded`
        )
        self.pulling[transfer] = announced["request"], blocks

    def end_pull(self, transfer: Any) -> None:
        """Check the bytes of a pull, or have its request recomputed."""
        request, blocks = self.pulling.pop(transfer)
        failure = transfer.exception()
        if failure is not None:
            self.compute_again(failure.status_code.name, request)
        elif all((tensor[blocks] == kv_of(request, number)).all() for number, tensor in enumerate(self.tensors)):
            self.right += 1
        else:
            self.wrong += 1
        self.free += blocks  # the transfer has ended: nothing touches them any more

    def compute_again(self, reason: str, *requests: int) -> None:
        """Put requests in front of those that wait."""
        for request in requests:
            self.waiting.appendleft(request)
            self.again[reason] += 1

    def close(self) -> None:
        """End both processes."""
        with self.process:
            print(self.process.communicate()[0], end="")  # closes the pipe to prefill, and reads its last line
        self.engine.finalize()


def main() -> int:
    """Run the decode process."""
    decode = Decode()
    decode.run()
    decode.close()
    print(f"{decode.right} right, {decode.wrong} wrong, {len(decode.free)} of {BLOCKS} blocks of decode are free")
    print("recomputed:", ", ".join(f"{count} after {reason}" for reason, count in sorted(decode.again.items())))
    return 1 if decode.wrong else 0


if __name__ == "__main__":
    if sys.argv[1:] == ["prefill"]:
        Prefill().run()
    else:
        sys.exit(main())
