"""Prefix blocks on the device, swapped to the host under pressure. Run it: `python examples/guide_prefix_cache.py`."""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict
from typing import TYPE_CHECKING

from llm_datadist import Engine, KvLayout

if TYPE_CHECKING:
    from collections.abc import Collection, Sequence

    from llm_datadist.native import Cache

LAYOUT = KvLayout(layers=4, block_tokens=16, heads=2, head_dim=64, dtype="float16")


def block_keys(tokens: Sequence[int]) -> list[bytes]:
    """Return one key for each full block of a prompt."""
    key, keys = b"", []
    for end in range(LAYOUT.block_tokens, len(tokens) + 1, LAYOUT.block_tokens):
        block = array("i", tokens[end - LAYOUT.block_tokens : end])
        key = hashlib.sha256(key + block.tobytes()).digest()
        keys.append(key)
    return keys


class PrefixCache:
    """Block ids of shared prefixes. Not thread-safe: call it from the scheduler's thread."""

    def __init__(self, device: Cache, host: Cache) -> None:
        self.copy, self.device, self.host = device.engine.copy, device, host
        self.free = list(range(device.blocks))
        self.free_host = list(range(host.blocks))
        self.users: dict[int, int] = {}  # device block in use -> number of requests
        self.key_of: dict[int, bytes] = {}  # published device block -> key
        self.block_of: dict[bytes, int] = {}  # key -> device block
        self.idle: OrderedDict[bytes, int] = OrderedDict()  # key -> device block without users
        self.host_of: OrderedDict[bytes, int] = OrderedDict()  # key -> host block

    def acquire(self, keys: Sequence[bytes]) -> tuple[list[int], int]:
        """Return a device block for each key, and how many of the first ones hold valid data."""
        known = (key in self.block_of or key in self.host_of for key in keys)
        hits = next((number for number, hit in enumerate(known) if not hit), len(keys))
        returning = [key for key in keys[:hits] if key in self.host_of]
        self._make_room(len(keys) - hits + len(returning), keep=set(keys[:hits]))
        target_of = dict(zip(returning, self.free))
        if target_of:  # one call swaps all of them in
            host = [self.host_of[key] for key in target_of]
            self.copy(self.device[list(target_of.values())], self.host[host]).result()
        del self.free[: len(target_of)]
        for key, block in target_of.items():
            self.free_host.append(self.host_of.pop(key))
            self._name(block, key)
        blocks = [self.block_of[key] for key in keys[:hits]]
        blocks += [self.free.pop() for _ in keys[hits:]]
        self.fork(blocks)
        return blocks, hits

    def publish(self, keys: Sequence[bytes], blocks: Sequence[int]) -> None:
        """Offer computed blocks to later requests. A key that another block already has is left out."""
        for key, block in zip(keys, blocks):
            if key not in self.block_of and key not in self.host_of:
                self._name(block, key)

    def fork(self, blocks: Sequence[int]) -> None:
        """Add a request that uses these blocks."""
        for block in blocks:
            self.users[block] = self.users.get(block, 0) + 1
            if block in self.key_of:
                self.idle.pop(self.key_of[block], None)

    def writable(self, blocks: Sequence[int]) -> list[int]:
        """Return blocks that one request may write: a copy replaces each block that is shared or published."""
        shared = [block for block in blocks if self.users[block] > 1 or block in self.key_of]
        self._make_room(len(shared))
        copies = dict(zip(shared, self.free))
        self.copy(self.device[list(copies.values())], self.device[shared]).result()
        del self.free[: len(copies)]
        self.fork(list(copies.values()))
        self.release(shared)
        return [copies.get(block, block) for block in blocks]

    def release(self, blocks: Sequence[int]) -> None:
        """End one request's use of blocks. The last blocks of a prefix are the first to be evicted."""
        for block in reversed(blocks):
            self.users[block] -= 1
            if self.users[block]:
                continue
            del self.users[block]
            if block in self.key_of:
                self.idle[self.key_of[block]] = block
            else:
                self.free.append(block)

    def _make_room(self, count: int, keep: Collection[bytes] = ()) -> None:
        """Free device blocks by moving idle ones to the host. Blocks with keys in `keep` stay where they are."""
        short = count - len(self.free)
        if short <= 0:
            return
        victims = [key for key in self.idle if key not in keep][:short]
        if len(victims) < short:
            raise MemoryError(f"{short} more device blocks are needed, {len(victims)} can be evicted")
        oldest = [key for key in self.host_of if key not in keep]
        for key in oldest[: max(0, short - len(self.free_host))]:
            self.free_host.append(self.host_of.pop(key))  # the host pool is full: drop its oldest blocks
        saved = dict(zip(reversed(victims), self.free_host))  # blocks without a host block are dropped too
        if saved:  # one call swaps all of them out
            device = [self.idle[key] for key in saved]
            self.copy(self.host[list(saved.values())], self.device[device]).result()
        del self.free_host[: len(saved)]
        for key in victims:
            block = self.idle.pop(key)
            del self.block_of[key], self.key_of[block]
            self.free.append(block)
            if key in saved:
                self.host_of[key] = saved[key]

    def _name(self, block: int, key: bytes) -> None:
        self.key_of[block], self.block_of[key] = key, block


def main() -> None:
    """Serve requests. The model writes a number derived from the key into each block, so that hits can be checked."""
    engine = Engine(pool="16MiB", host_pool="16MiB")
    device = engine.allocate("device", LAYOUT, blocks=24)
    host = engine.allocate("host", LAYOUT, blocks=64, pool="host")
    tensors = [tensor.numpy() for tensor in device.tensors]  # no copy: arrays over the cache
    cache = PrefixCache(device, host)

    system = list(range(64))  # 4 blocks that all requests share
    for question in (1, 2, 3, 1):
        keys = block_keys(system + [1000 * question + token for token in range(160)])
        blocks, hits = cache.acquire(keys)
        for key, block in list(zip(keys, blocks))[hits:]:
            for tensor in tensors:
                tensor[block] = key[0]  # compute the blocks that are not cached
        cache.publish(keys, blocks)
        for tensor in tensors:
            assert all((tensor[block] == key[0]).all() for key, block in zip(keys, blocks))
        cache.release(blocks)
        print(f"question {question}: {hits} of {len(blocks)} blocks were hits, {len(cache.host_of)} on the host")

    # Two requests continue from one prefix. One of them writes into its copy of the last block.
    first, _ = cache.acquire(block_keys(system))
    cache.fork(first)
    second = first[:-1] + cache.writable(first[-1:])
    tensors[0][second[-1], 8:] = -1
    assert (tensors[0][first[-1]] >= 0).all()
    cache.release(first)
    cache.release(second)
    for op in ("swap_out", "swap_in", "copy_blocks"):
        print(f"{op}: {engine.stats()['ops'][op]['calls']} calls, {engine.stats()['ops'][op]['bytes']:,} bytes")
    engine.close()


if __name__ == "__main__":
    main()
