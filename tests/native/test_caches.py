"""Caches: allocation, registration of memory of the program, names, views and release."""

from __future__ import annotations

import ctypes
import gc
import weakref
from typing import TYPE_CHECKING, Any, Callable

import numpy as np
import pytest

from ids import short
from llm_datadist.native import Cache, Completed, Engine, NotFound
from peers import eventually

from .helpers import BLOCKS, LIMIT, Model, allocate, contents, fails, gather, layout, of, refused

if TYPE_CHECKING:
    from .conftest import Open, Pair
    from .helpers import Remote

TRANSPORTS = ["auto", "tcp"]


def test_cache_by_shape(engine: Engine) -> None:
    kv = engine.allocate("kv", blocks=8, tensors=3, shape=(5, 2), dtype="float32")
    assert (kv.name, kv.blocks, len(kv), kv.layout, kv.pool) == ("kv", 8, 8, None, "device")
    assert (kv.block_bytes, kv.nbytes) == (3 * 40, 8 * 3 * 40)
    assert kv.engine is engine
    assert [tensor.shape for tensor in kv.tensors] == [(8, 5, 2)] * 3
    assert [tensor.nbytes for tensor in kv.tensors] == [320] * 3
    assert len({tensor.address for tensor in kv.tensors}) == 3


def test_cache_by_layout(engine: Engine) -> None:
    kv = engine.allocate("kv", layout(), blocks=8, pool="host")
    assert (kv.layout, kv.pool, len(kv.tensors), kv.tensors[0].shape) == (layout(), "host", 4, (8, 4, 4, 3))
    assert kv.block_bytes == 4 * 4 * 4 * 3 * 2


WORDS = ["float16", "bfloat16", "float32", "float64", "bool"] + [
    sign + str(bits) for sign in ("int", "uint") for bits in (8, 16, 32, 64)
]


@pytest.mark.parametrize("word", WORDS)
def test_element_types(engine: Engine, word: str) -> None:
    size = {"bfloat16": 2, "bool": 1}.get(word) or int(word.lstrip("uintfloa")) // 8
    kv = engine.allocate("kv", blocks=2, tensors=1, shape=(3,), dtype=word)
    assert kv.block_bytes == 3 * size
    array = kv.tensors[0].numpy()
    assert array.dtype == np.dtype("uint16" if word == "bfloat16" else word)
    if word != "bfloat16":
        assert engine.allocate("b", blocks=2, tensors=1, shape=(3,), dtype=np.dtype(word)).block_bytes == 3 * size
        assert engine.allocate("c", blocks=2, tensors=1, shape=(), dtype=array.dtype.type).block_bytes == size


GOOD: dict[str, Any] = {"blocks": 4, "tensors": 2, "shape": (8,), "dtype": "uint8"}


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *[("blocks", value) for value in [0, -1, 2**32, 2**64]],
        *[("tensors", value) for value in [0, -1, 2**32]],
        *[("shape", value) for value in [(0,), (-1,), (4, 0), (2**63,), (2**32, 2**32)]],
        *[("dtype", value) for value in ["", "float17", "string", "complex64"]],
        *[("pool", value) for value in ["", "cpu", "DEVICE"]],
        *[("tensors_per_layer", value) for value in [0, -1, 3]],
        ("dtype", np.dtype("complex64")),
    ],
    ids=short,
)
def test_wrong_values_of_allocations(engine: Engine, name: str, value: Any) -> None:
    before = engine.stats()["pools"]
    refused(name, lambda: engine.allocate("kv", **{**GOOD, name: value}))
    assert engine.stats()["pools"]["device"]["used_bytes"] == before["device"]["used_bytes"]


@pytest.mark.parametrize(
    "wrong",
    [
        *[{name: value} for name in ("blocks", "tensors") for value in (True, 1.0, "4", [4])],
        {"shape": 8}, {"shape": (8.0,)}, {"shape": (True,)}, {"shape": "8"}, {"shape": None}, {"dtype": None},
        {"tensors": None}, {"pool": 1}, {"contiguous": 1}, {"tensors_per_layer": 1.0}, {"block": 4},
        {"layout": layout()}, {"placement": "host"},
    ],
    ids=short,
)  # fmt: skip
def test_wrong_types_of_allocations(engine: Engine, wrong: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        engine.allocate("kv", **{**GOOD, **wrong})


def test_layout_beside_a_shape(engine: Engine) -> None:
    for more in ({"tensors": 4}, {"shape": (4, 4, 3)}, {"dtype": "uint16"}):
        with pytest.raises(TypeError):
            engine.allocate("kv", layout(), blocks=4, **more)
    with pytest.raises(TypeError):
        engine.allocate("kv", "float16", blocks=4)  # type: ignore[arg-type]
    with pytest.raises(TypeError):
        engine.allocate("kv", layout())  # type: ignore[call-arg]


@pytest.mark.parametrize("name", ["", "x" * 129, "é" * 65, "a\0", "a\n"])
def test_wrong_names(pair: Pair, name: str) -> None:
    refused("name", lambda: pair.local.allocate(name, **GOOD))
    refused("name", lambda: pair.local.register(name, [bytearray(8)]))


def test_longest_name(pair: Pair) -> None:
    for name in ("x" * 128, "é" * 64, "a/b.c-d e"):
        mine, theirs = allocate(pair.local, name, seed=1), allocate(pair.remote, name, seed=2)
        pair.local.pull(mine[:], pair.peer[name][0:BLOCKS]).result(LIMIT)
        assert contents(mine) == contents(theirs)


@pytest.mark.parametrize("name", [b"kv", 1, None])
def test_names_of_wrong_type(pair: Pair, name: Any) -> None:
    with pytest.raises(TypeError):
        pair.local.allocate(name, **GOOD)
    with pytest.raises(TypeError):
        pair.peer[name]


def test_name_in_use(engine: Engine, start: Open) -> None:
    kv = allocate(engine)
    refused("name", lambda: allocate(engine), "kv")
    refused("name", lambda: engine.register("kv", [bytearray(8)]))
    allocate(start())  # names belong to an engine
    kv.free()
    assert allocate(engine).name == "kv"


def test_freed_cache(pair: Pair) -> None:
    mine, theirs = pair.caches()
    rows = mine[[1]]
    assert mine.free().result(LIMIT) is None
    assert mine.free().result(LIMIT) is None
    assert (mine.name, mine.blocks) == ("kv", BLOCKS)
    assert "freed" in fails(NotFound, lambda: mine.tensors).reason
    fails(NotFound, lambda: pair.local.copy(rows, rows))
    fails(NotFound, lambda: pair.local.pull(rows, pair.peer["kv"][[1]]))
    fails(NotFound, lambda: pair.local.push(pair.peer["kv"][[1]], rows))
    fails(NotFound, lambda: pair.local.lend(rows, ttl=1.0))
    theirs.free()
    again = allocate(pair.local, seed=1)
    fails(NotFound, lambda: pair.local.pull(again[[1]], pair.peer["kv"][[1]]))
    for dst, src in ((again[[1]], rows), (rows, again[[1]])):
        fails(NotFound, lambda dst=dst, src=src: pair.local.copy(dst, src))  # type: ignore[misc]


VIEWS: dict[str, Callable[[Cache], Any]] = {
    "tensor": lambda cache: cache.tensors[0].numpy(),
    "buffer": lambda cache: cache.buffer,
}


@pytest.mark.parametrize("view", VIEWS)
def test_freed_memory_returns_when_the_views_are_gone(engine: Engine, view: str) -> None:
    def used() -> int:
        return engine.stats()["pools"]["device"]["used_bytes"]

    cache = allocate(engine, contiguous=True)
    seen, taken = VIEWS[view](cache), used()
    assert taken
    assert cache.free().result(LIMIT) is None
    assert used() == taken
    del seen
    gc.collect()
    assert used() == 0


def test_cache_as_context_manager(engine: Engine) -> None:
    with pytest.raises(ZeroDivisionError), allocate(engine) as kv:  # noqa: PT012
        assert isinstance(kv, Cache)
        1 / 0  # noqa: B018
    fails(NotFound, lambda: kv.tensors)
    with allocate(engine) as kv:
        engine.close()


def test_caches_cannot_be_iterated(pair: Pair) -> None:
    """Indexing alone would make `for` and `list` run for ever."""
    mine, _ = pair.caches()
    for each in (mine, pair.peer["kv"], pair.peer):
        with pytest.raises(TypeError):
            iter(each)  # type: ignore[arg-type]
        with pytest.raises(TypeError):
            list(each)  # type: ignore[call-overload]


# Registered memory


def interface(array: np.ndarray) -> Any:
    return type("HasInterface", (), {"__array_interface__": array.__array_interface__, "keep": array})()


class HasDLPack:
    def __init__(self, array: np.ndarray, device: tuple[int, int] = (1, 0)) -> None:
        self.array, self.device = array, device

    def __dlpack__(self, **given: Any) -> Any:
        return self.array.__dlpack__(**given)

    def __dlpack_device__(self) -> tuple[int, int]:
        return self.device


KINDS: dict[str, Any] = {
    "numpy": lambda array: array,
    "memoryview": memoryview,
    "interface": interface,
    "dlpack": HasDLPack,
}


@pytest.mark.parametrize("kind", KINDS)
def test_registered_objects(pair: Pair, kind: str) -> None:
    arrays = [np.zeros((BLOCKS, 96), np.uint8) for _ in range(4)]
    mine = pair.local.register("kv", [KINDS[kind](array) for array in arrays])
    assert (mine.blocks, mine.block_bytes, mine.layout) == (BLOCKS, 4 * 96, None)
    assert [tensor.address for tensor in mine.tensors] == [array.ctypes.data for array in arrays]
    theirs = allocate(pair.remote, seed=2)
    pair.local.pull(mine[[3, 4]], pair.peer["kv"][[5, 6]]).result(LIMIT)
    expected = Model([bytes(BLOCKS * 96)] * 4).write([3, 4], Model(theirs), [5, 6])
    expected.check(mine)
    assert [array.tobytes() for array in arrays] == [bytes(tensor) for tensor in expected.tensors]
    pair.remote.pull(theirs[[0]], pair.back["kv"][[4]]).result(LIMIT)
    Model(theirs).write([0], expected, [4]).check(theirs)
    pair.remote.push(pair.back["kv"][[7]], theirs[[8]]).result(LIMIT)
    expected.write([7], Model(theirs), [8]).check(mine)
    assert mine.free().result(LIMIT) is None


def test_registered_tensors_of_another_engine(engine: Engine, start: Open) -> None:
    other = allocate(start(), seed=3)
    kv = engine.register("kv", other.tensors)
    engine.copy(kv[[1]], kv[[2]]).result(LIMIT)
    assert contents(kv) == contents(other)


def test_registered_addresses(engine: Engine) -> None:
    arrays = [np.arange(64, dtype=np.uint8).reshape(4, 16) + number for number in range(4)]
    addresses = [array.ctypes.data for array in arrays]
    kv = engine.register("kv", addresses, blocks=4, shape=(8,), dtype="uint16", pool="host")
    assert (kv.blocks, kv.block_bytes, kv.pool) == (4, 64, "host")
    engine.copy(kv[[3]], kv[[0]]).result(LIMIT)
    assert all((array[3] == array[0]).all() for array in arrays)
    of_layout = layout(block_tokens=2, heads=1, head_dim=4)
    assert engine.register("b", addresses, of_layout, blocks=4).layout == of_layout


def test_registered_objects_stay_alive_until_they_are_free(engine: Engine) -> None:
    class Array(np.ndarray):
        pass

    array = np.zeros((4, 16), np.uint8).view(Array)
    alive = weakref.ref(array)
    kv = engine.register("kv", [array])
    del array
    gc.collect()
    assert alive() is not None
    kv.free().result(LIMIT)
    eventually(lambda: (engine.stats(), gc.collect(), alive() is None)[-1])


BUFFER = bytearray(64)
HERE = ctypes.addressof(ctypes.c_char.from_buffer(BUFFER))
ADDRESSES: dict[str, Any] = {"blocks": 4, "shape": (16,), "dtype": "uint8"}


@pytest.mark.parametrize(
    ("tensors", "given", "argument"),
    [
        ([], {}, "tensors"),
        ([], ADDRESSES, "tensors"),
        ([bytes(64)], {}, "tensors"),
        ([np.zeros((4, 4), np.uint8).T], {}, "tensors"),
        ([np.zeros((4, 4), np.uint8)[:, ::2]], {}, "tensors"),
        ([np.zeros((4, 4), np.uint8)[::-1]], {}, "tensors"),
        ([np.zeros((0, 4), np.uint8)], {}, "tensors"),
        ([np.zeros((), np.uint8)], {}, "tensors"),
        ([np.zeros((4, 4), np.complex64)], {}, "tensors"),
        ([np.zeros((4, 4), np.uint8), np.zeros((4, 5), np.uint8)], {}, "tensors"),
        ([np.zeros((4, 4), np.uint8), np.zeros((5, 4), np.uint8)], {}, "tensors"),
        ([np.zeros((4, 4), np.uint8), np.zeros((4, 4), np.int8)], {}, "tensors"),
        ([HasDLPack(np.zeros((4, 4), np.uint8), (2, 0))], {}, "tensors"),
        ([np.zeros((4, 4), np.uint8)], {"blocks": 5}, "blocks"),
        ([0], ADDRESSES, "tensors"),
        ([-1], ADDRESSES, "tensors"),
        ([2**64], ADDRESSES, "tensors"),
        ([2**64 - 8], ADDRESSES, "tensors"),
        ([HERE], {**ADDRESSES, "blocks": 0}, "blocks"),
        ([HERE], {**ADDRESSES, "stride": 15}, "stride"),
        ([HERE], {**ADDRESSES, "stride": -16}, "stride"),
        ([HERE], {**ADDRESSES, "dtype": "float17"}, "dtype"),
        ([HERE], {**ADDRESSES, "pool": "disk"}, "pool"),
        ([HERE], {**ADDRESSES, "tensors_per_layer": 2}, "tensors_per_layer"),
    ],
)
def test_wrong_values_of_registrations(engine: Engine, tensors: Any, given: dict[str, Any], argument: str) -> None:
    refused(argument, lambda: engine.register("kv", tensors, **given))
    assert engine.stats()["table"]["caches"] == 0


@pytest.mark.parametrize(
    ("tensors", "given"),
    [
        (bytearray(8), {}),
        pytest.param(HERE, ADDRESSES, id="one-address"),
        ([HERE, bytearray(64)], ADDRESSES), ([None], {}), (["text"], {}),
        ([True], ADDRESSES), ([1.0], ADDRESSES), ([object()], {}), ([HERE], {}), ([HERE], {"blocks": 4}),
        ([HERE], {"blocks": 4, "shape": (16,)}), ([HERE], {"shape": (16,), "dtype": "uint8"}),
        ([bytearray(8)], {"stride": 1}), ([bytearray(8)], {"shared": 1}), ([bytearray(8)], {"share": True}),
    ],
)  # fmt: skip
def test_wrong_types_of_registrations(engine: Engine, tensors: Any, given: dict[str, Any]) -> None:
    with pytest.raises(TypeError):
        engine.register("kv", tensors, **given)
    assert engine.stats()["table"]["caches"] == 0


def test_registered_objects_that_do_not_have_the_layout(engine: Engine) -> None:
    fits = [np.zeros((5, 4, 4, 3), np.uint16) for _ in range(4)]
    assert engine.register("kv", fits, layout()).blocks == 5
    refused("tensors", lambda: engine.register("b", fits[:3], layout()))
    refused("tensors", lambda: engine.register("b", [array[:, :3].copy() for array in fits], layout()))


def test_cache_that_is_not_shared(pair: Pair) -> None:
    mine, _ = pair.caches()
    arrays = [np.zeros((BLOCKS, 96), np.uint8) for _ in range(4)]
    private = pair.remote.register("private", arrays, shared=False)
    error = fails(NotFound, lambda: pair.local.pull(mine[[1]], pair.peer["private"][[1]]))
    absent = fails(NotFound, lambda: pair.local.pull(mine[[1]], pair.peer["absent"][[1]]))
    assert error.reason == absent.reason.replace("absent", "private"), "the peer does not reveal it"
    assert pair.remote.copy(private[[1]], private[[2]]).result(LIMIT) is None


def test_free_of_registered_memory_waits_for_its_readers(pair: Pair) -> None:
    """Pulls of the peer run while the owner frees. Each ends well with the old bytes, or with `NotFound`."""
    mine = allocate(pair.local, blocks=256, seed=1)
    arrays = [np.full((256, 96), 7, np.uint8) for _ in range(4)]
    theirs = pair.remote.register("kv", arrays)
    pulls = [pair.local.pull(mine[[number]], pair.peer["kv"][[number]]) for number in range(256)]
    theirs.free().result(LIMIT)
    for array in arrays:
        array[:] = 9
    done = of(Completed, gather(pair.local, lambda seen: len(of(Completed, seen)) == 256))
    for event in done:
        block = pulls.index(event.transfer)
        if event.error is None:
            assert all(set(tensor[block * 96 : (block + 1) * 96]) == {7} for tensor in contents(mine))
        else:
            assert type(event.error) is NotFound, event.error


def test_memory_of_a_dead_reader_can_be_freed(pair: Pair, remote: Remote) -> None:
    arrays = [np.full((BLOCKS, 96), 7, np.uint8) for _ in range(4)]
    kv = pair.remote.register("kv", arrays)
    remote.do(f"peer = engine.link({pair.remote.address!r}).result(LIMIT); pulls = []")
    remote.start("while True: pulls.append(engine.pull(kv[:], peer['kv'][0:16])); pulls[-1].result(LIMIT)")
    eventually(lambda: pair.remote.stats()["ops"]["served"]["calls"] or len(pair.remote.peers) == 2)
    remote.kill()
    assert kv.free().result(LIMIT) is None
