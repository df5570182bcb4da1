"""Ours: caches of a pool, registered memory, keys, and pulls by key.

Not for: anything large.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    DataType,
    LLMClusterInfo,
    LLMConfig,
    LLMDataDist,
    LLMRole,
)
from many.scene import (
    ALLOCATE,
    CHURN,
    GET,
    GET_ALL,
    LIVE,
    PUT,
    PUT_ALL,
    REACH,
    REACH_ALL,
    SIZES,
    Scene,
    arrived,
)
from rows import OURS
from turns import Entry

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llm_datadist.cache_manager import CacheManager

OWNER, ASKER = 1, 2
PAGE = 4 << 10


def opened(cluster: int, pool: int, listen: str = "") -> LLMDataDist:
    """Open an engine whose pool has pages of 4 KiB."""
    config = LLMConfig()
    config.enable_cache_manager = True
    config.mem_pool_cfg = f'{{"memory_size": {pool}, "page_shift": 12}}'
    config.listen_ip_info = listen
    config.sync_kv_timeout = 60_000
    dist = LLMDataDist(LLMRole.PROMPT, cluster)
    dist.init(config.generate_options())
    return dist


def desc(tensors: int, size: int) -> CacheDesc:
    """The descriptor of a slot of bfloat16."""
    return CacheDesc(tensors, [1, size // 2], DataType.DT_BF16)


def entries(scene: Scene) -> Iterator[Entry]:
    """The entries for this operation."""
    yield from WAYS[scene.op](scene)


def ready(scene: Scene, listen: str = "") -> CacheManager:
    """Open an engine with a large enough pool. The warm-up round touches its memory."""
    pool = max(scene.count * max(scene.size, PAGE) * scene.tensors, LIVE * SIZES[-1]) + (64 << 20)
    dist = opened(OWNER, pool, listen)
    scene.ends.append(dist.finalize)
    return dist.cache_manager


def names(scene: Scene, turn: int = 0) -> list[CacheKey]:
    """A key for each cache. Keys are made before the measurement, like the names of other systems."""
    return [CacheKey(OWNER, req_id=turn * scene.count + number) for number in range(scene.count)]


def allocate(scene: Scene) -> Iterator[Entry]:
    """Allocate all caches, then free all."""
    manager, what = ready(scene), desc(scene.tensors, scene.size)

    def run() -> None:
        for cache in [manager.allocate_cache(what) for _ in range(scene.count)]:
            manager.deallocate_cache(cache)

    yield Entry(OURS, run, note="a handle with its addresses; seen by peers at once where it has a key")


def churn(scene: Scene) -> Iterator[Entry]:
    """Free one live cache, and allocate one of another size."""
    manager = ready(scene)
    whats = {size: desc(1, size) for size in SIZES}

    def run() -> None:
        live = [manager.allocate_cache(whats[SIZES[0]]) for _ in range(LIVE)]
        for size, place in zip(scene.sizes, scene.places):
            manager.deallocate_cache(live[place])
            live[place] = manager.allocate_cache(whats[size])
        for cache in live:
            manager.deallocate_cache(cache)

    yield Entry(OURS, run)


def reach(scene: Scene) -> Iterator[Entry]:
    """Allocate, or register memory of the caller, with a key by which a linked peer can pull; then undo it."""
    manager, what, pieces = ready(scene, "127.0.0.1:0"), desc(1, scene.size), scene.pieces()
    addresses = [int(piece.ctypes.data) for piece in pieces]
    keys = names(scene)
    scene.ends.append(lambda: pieces.fill(0))  # held until the engine is gone

    def registered() -> None:
        caches = [manager.register_cache(what, [address], [key]) for key, address in zip(keys, addresses)]
        for cache in caches:
            manager.unregister_cache(cache.cache_id)

    def allocated() -> None:
        caches = [manager.allocate_cache(what, [key]) for key in keys]
        for key, cache in zip(keys, caches):
            manager.remove_cache_key(key)
            manager.deallocate_cache(cache)

    yield Entry(OURS, registered, note="register_cache of the caller's memory with a key of its own, and back")
    yield Entry(OURS, allocated, "pool", note="allocate_cache with a key; remove the key, deallocate")


def reach_all(scene: Scene) -> Iterator[Entry]:
    """All pieces as the tensors of one cache."""
    manager, pieces = ready(scene, "127.0.0.1:0"), scene.pieces()
    addresses = [int(piece.ctypes.data) for piece in pieces]
    scene.ends.append(lambda: pieces.fill(0))  # held until the engine is gone
    what = CacheDesc(scene.count, [1, scene.size // 2], DataType.DT_BF16)

    def run() -> None:
        cache = manager.register_blocks_cache(what, addresses, BlocksCacheKey(OWNER, 0))
        manager.unregister_cache(cache.cache_id)

    yield Entry(
        OURS,
        run,
        "tensors of one cache",
        note="register_blocks_cache: the pieces are the tensors of one cache with one key; and back",
    )


def put(scene: Scene) -> Iterator[Entry]:
    """Allocate with a key, and write the bytes. The release is not timed."""
    manager, what = ready(scene, "127.0.0.1:0"), desc(1, scene.size)
    made: list[Cache] = []
    sources = [int(words.ctypes.data) for words in scene.objects]
    keys = names(scene)

    def run() -> None:
        for key, source in zip(keys, sources):
            cache = manager.allocate_cache(what, [key])
            ctypes.memmove(cache.tensor_addrs[0], source, scene.size)
            made.append(cache)

    def undo() -> None:
        for number, cache in enumerate(made):
            if manager.tensor_views(cache)[0].numpy().tobytes() != scene.objects[number].tobytes():
                raise ValueError(f"object {number} was put wrong")
            manager.remove_cache_key(keys[number])
            manager.deallocate_cache(cache)
        made.clear()

    yield Entry(OURS, run, after=undo, note="allocate_cache with a key, and memmove to its address")


def put_all(scene: Scene) -> Iterator[Entry]:
    """Allocate one cache with a slot and a key for each object, and write it. The release is not timed."""
    manager = ready(scene, "127.0.0.1:0")
    what = CacheDesc(1, [scene.count, scene.size // 2], DataType.DT_BF16)
    made: list[Cache] = []
    keys = names(scene)

    def run() -> None:
        cache = manager.allocate_cache(what, keys)
        manager.tensor_views(cache)[0].numpy().view(np.int64)[:] = scene.objects
        made.append(cache)

    def undo() -> None:
        if manager.tensor_views(made[0])[0].numpy().tobytes() != scene.objects.tobytes():
            raise ValueError("the objects were put wrong")
        for key in keys:
            manager.remove_cache_key(key)
        manager.deallocate_cache(made.pop())

    yield Entry(OURS, run, after=undo, note="allocate_cache with a slot and a key for each; numpy writes all in one go")


def get(scene: Scene) -> Iterator[Entry]:
    """Pull each object by its key from another process. The pull uses up the key, so every turn has new keys."""
    manager = asking(scene)
    what = desc(1, scene.size)
    places = [manager.allocate_cache(what) for _ in range(scene.count)]
    views = [manager.tensor_views(place)[0].numpy().view(np.int64)[0] for place in places]
    turns = iter(range(scene.turns))
    keys = [names(scene, turn) for turn in range(scene.turns)]

    def clear() -> None:
        for view in views:
            view.fill(-1)

    def run() -> None:
        for key, place in zip(keys[next(turns)], places):
            manager.pull_cache(key, place)

    def check() -> None:
        arrived(views, scene.objects)

    note = "pull_cache by request key; the key is used up, as the contract says"
    yield Entry(OURS, run, before=clear, after=check, note=note)


def get_all(scene: Scene) -> Iterator[Entry]:
    """Pull the same number of blocks in one call."""
    manager = asking(scene)
    near = manager.allocate_blocks_cache(CacheDesc(1, [scene.count, scene.size // 2], DataType.DT_BF16))
    view = manager.tensor_views(near)[0].numpy().view(np.int64)
    key, every = BlocksCacheKey(OWNER, 0), list(range(scene.count))
    mixed = np.random.default_rng(2).permutation(scene.count)
    places = mixed.tolist()

    def clear() -> None:
        view.fill(-1)

    def run() -> None:
        manager.pull_blocks(key, near, every, places)

    def check() -> None:
        arrived(view[mixed], scene.objects)

    note = "the objects are blocks of one cache, by number and not by name; they stay"
    yield Entry(OURS, run, "by number: pull_blocks", before=clear, after=check, note=note)


def asking(scene: Scene) -> CacheManager:
    """Open an engine and link it to another process, which has the objects."""
    _, address = scene.other("ours")
    dist = opened(ASKER, 2 * scene.count * scene.size + (64 << 20))
    scene.ends.append(dist.finalize)
    link(dist, address)
    return dist.cache_manager


def link(dist: LLMDataDist, address: str) -> None:
    """Link to the other process."""
    host, port = address.rsplit(":", 1)
    info = LLMClusterInfo()
    info.remote_cluster_id = OWNER
    info.append_local_ip_info("127.0.0.1", 0)
    info.append_remote_ip_info(host, int(port))
    dist.link_clusters([info], 5000)


def owner(scene: Scene) -> str:
    """Run the other process: hold all objects, with new keys for each turn or as blocks. Return the listen address."""
    dist = opened(OWNER, scene.count * scene.turns * scene.size + (64 << 20), "127.0.0.1:0")
    manager = dist.cache_manager
    if scene.op == GET_ALL:
        what = CacheDesc(1, [scene.count, scene.size // 2], DataType.DT_BF16)
        cache = manager.allocate_blocks_cache(what, BlocksCacheKey(OWNER, 0))
        manager.tensor_views(cache)[0].numpy().view(np.int64)[:] = scene.objects
    else:
        for number in range(scene.count * scene.turns):
            cache = manager.allocate_cache(desc(1, scene.size), [CacheKey(OWNER, req_id=number)])
            manager.tensor_views(cache)[0].numpy().view(np.int64)[0] = scene.objects[number % scene.count]
    HELD.append(dist)
    return dist.listen_ip_info or ""


HELD: list[LLMDataDist] = []
WAYS = {
    ALLOCATE: allocate,
    CHURN: churn,
    REACH: reach,
    REACH_ALL: reach_all,
    PUT: put,
    PUT_ALL: put_all,
    GET: get,
    GET_ALL: get_all,
}
