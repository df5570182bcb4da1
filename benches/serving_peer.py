"""Two linked engines for a benchmark: one in its process, and one in another process that does what it is asked.

One line of input of the other process is one command with its arguments, and one line of its output is the answer. Used
by `serving_latency.py`. Not for: figures.
"""

from __future__ import annotations

import json
import select
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from llm_datadist.native import Cache, Engine, Message

if TYPE_CHECKING:
    from collections.abc import Iterator

PAYLOAD = bytes(range(64))
# No call of a benchmark ends at a time limit.
TIMEOUT_S = 600.0


@dataclass(frozen=True)
class Setting:
    """What both processes of one measurement agree on."""

    transport: str = "shm"
    block_bytes: int = 16 << 10
    blocks: int = 64
    tensors: int = 1  # two for each layer, if there are several


def row_values(blocks: int) -> np.ndarray:
    """The byte that fills each block of the owner."""
    return (np.arange(blocks) % 251 + 1).astype(np.uint8)


def opened(setting: Setting, blocks: int, **options: Any) -> tuple[Engine, Cache, np.ndarray]:
    """Open an engine that listens at a free port. Returns it, its cache "kv", and the bytes of the first tensor."""
    shape, layer = (blocks, setting.block_bytes), min(2, setting.tensors)
    engine = Engine(
        pool=blocks * setting.block_bytes * setting.tensors + (1 << 20),
        page="4KiB",
        listen="127.0.0.1:0",
        transport=setting.transport,
        silence=TIMEOUT_S,
        timeout=TIMEOUT_S,
        **options,
    )
    cache = engine.allocate(
        "kv", blocks=blocks, tensors=setting.tensors, shape=shape[1:], dtype="uint8", tensors_per_layer=layer
    )
    return engine, cache, cache.tensors[0].numpy()


class Local:
    """The engine of this process, linked to the owner, with a cache that pulls write."""

    def __init__(self, setting: Setting, blocks: int, owner: subprocess.Popen[str], **options: Any) -> None:
        self.owner = owner
        self.engine, self.cache, self.view = opened(setting, blocks, **options)
        self.peer = self.engine.link(self.answer()).result()
        self.kv = self.peer["kv"]
        self.engine.pull(self.cache[0], self.kv[0]).result()

    def tell(self, *words: object) -> None:
        """Send the owner a command."""
        assert self.owner.stdin is not None
        self.owner.stdin.write(" ".join(map(str, words)) + "\n")
        self.owner.stdin.flush()

    def answer(self) -> str:
        """Return the next answer of the owner."""
        assert self.owner.stdout is not None
        line = self.owner.stdout.readline()
        assert line, "the other process has ended"
        return line.strip()

    def ask(self, *words: object) -> str:
        """Send the owner a command, and return its answer."""
        self.tell(*words)
        return self.answer()

    def granted(self, count: int) -> list[bytes]:
        """Return the tokens of new grants of block 1 of the owner."""
        return [bytes.fromhex(token) for token in self.ask("grants", count).split(",")]


@contextmanager
def linked(setting: Setting, blocks: int, **options: Any) -> Iterator[Local]:
    """Start the owner, link to it, and end both engines afterwards. `options` are those of this process alone."""
    order = [sys.executable, str(Path(__file__)), json.dumps(asdict(setting))]
    with subprocess.Popen(order, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:  # noqa: S603
        try:
            local = Local(setting, blocks, owner, **options)
            yield local
            local.engine.close()
        except BaseException:
            owner.kill()
            raise


class Owner:
    """The engine of the other process."""

    def __init__(self, setting: Setting) -> None:
        self.engine, self.cache, view = opened(setting, setting.blocks)
        view[:] = row_values(setting.blocks)[:, None]

    def grants(self, count: int) -> str:
        """Lend block 1 as often as asked. Returns the tokens."""
        lent = [self.engine.lend(self.cache[1], ttl=TIMEOUT_S) for _ in range(count)]
        return ",".join(grant.token.hex() for grant in lent)

    def receive(self, count: int) -> int:
        """Take events until as many messages have arrived. Returns how many had the right payload."""
        arrived = right = 0
        while arrived < count:
            select.select([self.engine], [], [], 10.0)
            payloads = [event.data for event in self.engine.events() if isinstance(event, Message)]
            arrived += len(payloads)
            right += payloads.count(PAYLOAD)
        return right

    def greet(self, count: int) -> int:
        """Open the descriptor, take the events, and send messages."""
        self.engine.fileno()
        self.engine.events()
        for _ in range(count):
            self.engine.peers[0].send(PAYLOAD)
        return count

    def rest(self, millis: int) -> float:
        """Sleep. Returns the CPU time of this process meanwhile, in milliseconds."""
        return rest(millis)


def rest(millis: int) -> float:
    """Sleep. Returns the CPU time of this process meanwhile, in milliseconds."""
    before = time.process_time()
    time.sleep(millis / 1e3)
    return (time.process_time() - before) * 1e3


def main() -> None:
    """Serve commands until the end of the input."""
    owner = Owner(Setting(**json.loads(sys.argv[1])))
    print(owner.engine.address, flush=True)
    for line in sys.stdin:
        command, *numbers = line.split()
        print(getattr(owner, command)(*map(int, numbers)), flush=True)
    owner.engine.close()


if __name__ == "__main__":
    main()
