"""The other process of `benches/serving_latency.py`: cluster 2, which owns a blocks cache and does what it is asked.

One line of its input is one command with its arguments, and one line of its output is the answer. Not for: figures.
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
from typing import TYPE_CHECKING, Optional

import numpy as np

from llm_datadist import BlocksCacheKey, CacheDesc, CacheKey, DataType, LLMClusterInfo, LLMDataDist, LLMRole
from llm_datadist.events import Notification

if TYPE_CHECKING:
    from collections.abc import Iterator

NEAR, OWNER = 1, 2
PAYLOAD = bytes(range(64))
# No call of a benchmark ends at a time limit.
PATIENCE_MS = 600_000


@dataclass(frozen=True)
class Setting:
    """What both processes of one measurement agree on."""

    transport: str = "shm"
    block_bytes: int = 16 << 10
    blocks: int = 64
    slots: int = 0  # slots with a request key that exist at the same time
    tensors: int = 1  # of the blocks caches
    accessible: bool = False  # whether the engines are in remote-accessible mode


def row_values(blocks: int) -> np.ndarray:
    """The byte that fills each block of the owner."""
    return (np.arange(blocks) % 251 + 1).astype(np.uint8)


def opened(
    cluster: int, pool: int, transport: str = "shm", accessible: bool = False, options: Optional[dict[str, str]] = None
) -> LLMDataDist:
    """Open an engine that listens at a free port."""
    dist = LLMDataDist(LLMRole.MIX, cluster)
    dist.init(
        {
            "llm.EnableCacheManager": "1",
            "llm.MemPoolConfig": json.dumps({"memory_size": pool + (1 << 20), "page_shift": 12}),
            "llm.listenIpInfo": "127.0.0.1:0",
            "llm.LinkTransport": transport,
            "llm.EnableRemoteCacheAccessible": str(int(accessible)),
            "llm.LinkSilence": str(PATIENCE_MS),
            "llm.SyncKvCacheWaitTime": str(PATIENCE_MS),
            **(options or {}),
        }
    )
    return dist


class Near:
    """The engine of this process, linked to the owner, with a blocks cache that pulls write."""

    def __init__(
        self, setting: Setting, blocks: int, owner: subprocess.Popen[str], options: Optional[dict[str, str]] = None
    ) -> None:
        self.owner = owner
        pool = (blocks * setting.tensors + 1) * setting.block_bytes
        self.dist = opened(NEAR, pool, setting.transport, setting.accessible, options)
        self.manager = self.dist.cache_manager
        desc = CacheDesc(setting.tensors, [blocks, setting.block_bytes], DataType.DT_UINT8)
        self.cache = self.manager.allocate_blocks_cache(desc)
        self.view = self.manager.tensor_views(self.cache)[0].numpy()
        self.key = BlocksCacheKey(OWNER, 0)
        peer = LLMClusterInfo()
        peer.remote_cluster_id = OWNER
        peer.append_local_ip_info("127.0.0.1", 0)
        peer.append_remote_ip_info("127.0.0.1", int(self.answer().rsplit(":", 1)[1]))
        _, codes = self.dist.link_clusters([peer])
        assert codes[0].name == "LLM_SUCCESS", codes
        self.manager.pull_blocks(self.key, self.cache, [0], [0])

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
def linked(setting: Setting, blocks: int, options: Optional[dict[str, str]] = None) -> Iterator[Near]:
    """Start the owner, link to it, and end both engines afterwards. `options` are those of this process alone."""
    order = [sys.executable, str(Path(__file__)), json.dumps(asdict(setting))]
    with subprocess.Popen(order, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as owner:  # noqa: S603
        try:
            near = Near(setting, blocks, owner, options)
            yield near
            near.view = np.empty(0)
            near.dist.finalize()
        except BaseException:
            owner.kill()
            raise


class Owner:
    """The engine of the other process."""

    def __init__(self, setting: Setting) -> None:
        self.setting, self.requests = setting, 0
        pool = (setting.blocks * setting.tensors + setting.slots) * setting.block_bytes
        self.dist = opened(OWNER, pool, setting.transport, setting.accessible)
        desc = CacheDesc(setting.tensors, [setting.blocks, setting.block_bytes], DataType.DT_UINT8)
        self.blocks = self.dist.cache_manager.allocate_blocks_cache(desc, BlocksCacheKey(OWNER, 0))
        self.dist.cache_manager.tensor_views(self.blocks)[0].numpy()[:] = row_values(setting.blocks)[:, None]

    def keys(self, count: int) -> int:
        """Allocate slots with new request keys. Returns the first request id; the others follow it."""
        slot = CacheDesc(1, [1, self.setting.block_bytes], DataType.DT_UINT8)
        first, self.requests = self.requests, self.requests + count
        for request in range(first, first + count):
            cache = self.dist.cache_manager.allocate_cache(slot, [CacheKey(OWNER, req_id=request)])
            self.dist.cache_manager.deallocate_cache(cache)  # only the key holds it now
        return first

    def grants(self, count: int) -> str:
        """Lend block 1 as often as asked. Returns the tokens."""
        lent = [self.dist.cache_manager.grant(self.blocks, [1], PATIENCE_MS) for _ in range(count)]
        return ",".join(grant.token.hex() for grant in lent)

    def receive(self, count: int) -> int:
        """Poll until as many notifications have arrived. Returns how many had the right payload."""
        arrived = right = 0
        while arrived < count:
            select.select([self.dist], [], [], 10.0)
            payloads = [event.payload for event in self.dist.poll() if isinstance(event, Notification)]
            arrived += len(payloads)
            right += payloads.count(PAYLOAD)
        return right

    def greet(self, count: int) -> int:
        """Open the descriptor, poll, and send notifications."""
        self.dist.fileno()
        self.dist.poll()
        for _ in range(count):
            self.dist.notify(NEAR, PAYLOAD)
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
    print(owner.dist.listen_ip_info, flush=True)
    for line in sys.stdin:
        command, *numbers = line.split()
        print(getattr(owner, command)(*map(int, numbers)), flush=True)
    owner.dist.finalize()


if __name__ == "__main__":
    main()
