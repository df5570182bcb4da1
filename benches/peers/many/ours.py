"""Ours: caches of a pool, registered memory, and pulls by the name of a cache.

Not for: anything large.
"""

from __future__ import annotations

import ctypes
from typing import TYPE_CHECKING

import numpy as np

from comparison import Entry
from llm_datadist.native import Cache, Engine
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

if TYPE_CHECKING:
    from collections.abc import Iterator

    from llm_datadist.native import Peer

PAGE = 4 << 10
LOCAL = "127.0.0.1:0"


def entries(scene: Scene) -> Iterator[Entry]:
    """The entries for this operation."""
    yield from WAYS[scene.op](scene)


def ready(scene: Scene) -> Engine:
    """Open an engine with a large enough pool. The warm-up round touches its memory."""
    pool = max(scene.count * max(scene.size, PAGE) * scene.tensors, LIVE * SIZES[-1]) + (64 << 20)
    engine = Engine(pool=pool, page=PAGE, listen=LOCAL, timeout=60.0)
    scene.ends.append(engine.close)
    return engine


def allocated(engine: Engine, name: str, size: int, tensors: int = 1, blocks: int = 1) -> Cache:
    """Allocate a cache of bfloat16. Peers can use it by its name."""
    return engine.allocate(name, blocks=blocks, tensors=tensors, shape=(size // 2,), dtype="bfloat16")


def names(scene: Scene) -> list[str]:
    """A name for each cache. Names are made before the measurement, like those of other systems."""
    return [str(number) for number in range(scene.count)]


def allocate(scene: Scene) -> Iterator[Entry]:
    """Allocate all caches, then free all."""
    engine, every = ready(scene), names(scene)

    def run() -> None:
        for cache in [allocated(engine, name, scene.size, scene.tensors) for name in every]:
            cache.free().result()

    yield Entry(OURS, run, note="a handle and a name, by which peers can use it at once")


def churn(scene: Scene) -> Iterator[Entry]:
    """Free one live cache, and allocate one of another size."""
    engine, every = ready(scene), [str(index) for index in range(LIVE)]

    def run() -> None:
        live = [allocated(engine, name, SIZES[0]) for name in every]
        for size, index in zip(scene.sizes, scene.indices):
            live[index].free().result()
            live[index] = allocated(engine, every[index], size)
        for cache in live:
            cache.free().result()

    yield Entry(OURS, run)


def reach(scene: Scene) -> Iterator[Entry]:
    """Allocate, or register memory of the caller, under a name by which a linked peer can pull; then undo it."""
    engine, pieces, every = ready(scene), scene.pieces(), names(scene)
    addresses = [int(piece.ctypes.data) for piece in pieces]
    shape = (scene.size // 2,)
    scene.ends.append(lambda: pieces.fill(0))  # held until the engine is gone

    def registered() -> None:
        caches = [
            engine.register(name, [address], blocks=1, shape=shape, dtype="bfloat16")
            for name, address in zip(every, addresses)
        ]
        for cache in caches:
            cache.free().result()

    def pooled() -> None:
        for cache in [allocated(engine, name, scene.size) for name in every]:
            cache.free().result()

    yield Entry(OURS, registered, note="register the caller's memory under a name of its own, and free")
    yield Entry(OURS, pooled, "pool", note="allocate under a name, and free")


def reach_all(scene: Scene) -> Iterator[Entry]:
    """All pieces as the tensors of one cache."""
    engine, pieces, shape = ready(scene), scene.pieces(), (scene.size // 2,)
    addresses = [int(piece.ctypes.data) for piece in pieces]
    scene.ends.append(lambda: pieces.fill(0))  # held until the engine is gone

    def run() -> None:
        engine.register("all", addresses, blocks=1, shape=shape, dtype="bfloat16").free().result()

    yield Entry(
        OURS,
        run,
        "tensors of one cache",
        note="register: the pieces are the tensors of one cache with one name; and free",
    )


def put(scene: Scene) -> Iterator[Entry]:
    """Allocate under a name, and write the bytes. The release is not timed."""
    engine, every = ready(scene), names(scene)
    made: list[Cache] = []
    sources = [int(words.ctypes.data) for words in scene.objects]

    def run() -> None:
        for name, source in zip(every, sources):
            cache = allocated(engine, name, scene.size)
            ctypes.memmove(cache.tensors[0].address, source, scene.size)
            made.append(cache)

    def undo() -> None:
        arrived([words_of(cache)[0] for cache in made], scene.objects)
        for cache in made:
            cache.free().result()
        made.clear()

    yield Entry(OURS, run, after=undo, note="allocate under a name, and memmove to its address")


def put_all(scene: Scene) -> Iterator[Entry]:
    """Allocate one cache with a block for each object, and write it. The release is not timed."""
    engine = ready(scene)
    made: list[Cache] = []

    def run() -> None:
        made.append(allocated(engine, "all", scene.size, blocks=scene.count))
        words_of(made[0])[:] = scene.objects

    def undo() -> None:
        arrived(words_of(made[0]), scene.objects)
        made.pop().free().result()

    yield Entry(OURS, run, after=undo, note="allocate with a block for each; numpy writes all in one go")


def words_of(cache: Cache) -> np.ndarray:
    """The blocks of the first tensor, as words."""
    words: np.ndarray = cache.tensors[0].numpy().view(np.int64)
    return words


def get(scene: Scene) -> Iterator[Entry]:
    """Pull each object by its name from another process."""
    engine, peer = asking(scene)
    local = allocated(engine, "local", scene.size, blocks=scene.count)
    view, every = words_of(local), names(scene)

    def run() -> None:
        for number, name in enumerate(every):
            engine.pull(local[number], peer[name][0]).result()

    note = "each object is a cache; the engine remembers what a name means; the object stays"
    yield Entry(OURS, run, before=lambda: view.fill(-1), after=lambda: arrived(view, scene.objects), note=note)


def get_all(scene: Scene) -> Iterator[Entry]:
    """Pull the same number of blocks in one call."""
    engine, peer = asking(scene)
    local = allocated(engine, "local", scene.size, blocks=scene.count)
    view, mixed = words_of(local), np.random.default_rng(2).permutation(scene.count)
    every, indices = list(range(scene.count)), mixed.tolist()

    def run() -> None:
        engine.pull(local[indices], peer["all"][every]).result()

    note = "the objects are blocks of one cache, by number and not by name; they stay"
    yield Entry(
        OURS,
        run,
        "by number",
        before=lambda: view.fill(-1),
        after=lambda: arrived(view[mixed], scene.objects),
        note=note,
    )


def asking(scene: Scene) -> tuple[Engine, Peer]:
    """Open an engine and link it to another process, which has the objects."""
    _, address = scene.other("ours")
    engine = ready(scene)
    return engine, engine.link(address).result()


def owner(scene: Scene) -> str:
    """Run the other process: hold all objects, as caches or as blocks. Return the listen address."""
    engine = ready(scene)
    if scene.op == GET_ALL:
        words_of(allocated(engine, "all", scene.size, blocks=scene.count))[:] = scene.objects
    else:
        for number, name in enumerate(names(scene)):
            words_of(allocated(engine, name, scene.size))[0] = scene.objects[number]
    HELD.append(engine)
    return engine.address or ""


HELD: list[Engine] = []
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
