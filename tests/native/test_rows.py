"""Selecting blocks: every form of an index, wrong forms, and parts of rows."""

from __future__ import annotations

import ctypes
import gc
import sys
import weakref
from array import array
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from aarch64.probe import limits_address_space
from emulation import needs
from ids import short
from llm_datadist.native import Engine, InvalidArgument, OutOfMemory, Rows
from memory import run_fresh

from .helpers import BLOCKS, LIMIT, Model, allocate, fails, layout, refused

if TYPE_CHECKING:
    from .conftest import Pair

LIST = [3, 9, 4]


class Index:
    def __init__(self, value: int) -> None:
        self.value = value

    def __index__(self) -> int:
        return self.value


class Tensor:
    """A DLPack tensor without the buffer protocol. `made` is the array behind it."""

    def __init__(self, made: Any) -> None:
        self.made = made

    def __dlpack_device__(self) -> Any:
        return (1, 0)

    def __dlpack__(self, **given: Any) -> Any:
        return self.made.__dlpack__(**given)


class OldTensor(Tensor):
    """A tensor of a library that knows no versions of DLPack."""

    def __dlpack__(self, stream: None = None) -> Any:  # type: ignore[override]
        return self.made.__dlpack__()


class Device(Tensor):
    """A tensor that says it is on another device, and that must not be asked for its bytes."""

    def __dlpack_device__(self) -> Any:
        return self.made

    def __dlpack__(self, **_: Any) -> Any:
        raise AssertionError("a capsule of another device was asked for")


class Raising(Tensor):
    def __dlpack__(self, **_: Any) -> Any:
        raise self.made


class Answers(Tensor):
    """Returns anything in place of a capsule."""

    def __dlpack__(self, **_: Any) -> Any:
        return self.made


def consumed() -> Any:
    """A capsule whose tensor another consumer has taken."""
    made = np.array([0, 1])
    capsule = made.__dlpack__()
    np.from_dlpack(Answers(capsule))
    return capsule


class Fields(ctypes.Structure):
    """`DLTensor`."""

    _fields_ = [
        ("data", ctypes.c_void_p), ("device_type", ctypes.c_int32), ("device_id", ctypes.c_int32),
        ("ndim", ctypes.c_int32), ("code", ctypes.c_uint8), ("bits", ctypes.c_uint8), ("lanes", ctypes.c_uint16),
        ("shape", ctypes.POINTER(ctypes.c_int64)), ("strides", ctypes.POINTER(ctypes.c_int64)),
        ("byte_offset", ctypes.c_uint64),
    ]  # fmt: skip


class Managed(ctypes.Structure):
    _fields_ = [("tensor", Fields), ("context", ctypes.c_void_p), ("deleter", ctypes.c_void_p)]


class VersionedManaged(ctypes.Structure):
    _fields_ = [
        ("major", ctypes.c_uint32), ("minor", ctypes.c_uint32), ("context", ctypes.c_void_p),
        ("deleter", ctypes.c_void_p), ("flags", ctypes.c_uint64), ("tensor", Fields),
    ]  # fmt: skip


class Capsule(Tensor):
    """A tensor whose fields the test chooses. The memory is 0, 1, 2, … as int64."""

    def __init__(
        self,
        shape: list[int] | None = None,
        strides: list[int] | None = None,
        major: int = 0,
        **fields: Any,
    ) -> None:
        super().__init__(np.arange(64))
        device = fields.pop("device", (1, 0))
        shape = [2] if shape is None else shape
        self.kept: list[Any] = [(ctypes.c_int64 * 8)(*shape), (ctypes.c_int64 * 8)(*(strides or []))]
        tensor = Fields(self.made.ctypes.data, *device, len(shape), 0, 64, 1, self.kept[0], None, 0)
        if strides is not None:
            tensor.strides = self.kept[1]
        for name, value in fields.items():
            setattr(tensor, name, value)
        self.managed = VersionedManaged(major, 0, tensor=tensor) if major else Managed(tensor)
        self.name = b"dltensor_versioned" if major else b"dltensor"

    def __dlpack__(self, **_: Any) -> Any:
        new = ctypes.pythonapi.PyCapsule_New
        new.restype, new.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
        return new(ctypes.addressof(self.managed), self.name, None)


FIELDS: list[tuple[dict[str, Any], list[int]]] = [
    ({}, [0, 1]),
    ({"shape": [4]}, [0, 1, 2, 3]),
    ({"shape": [3], "strides": [1]}, [0, 1, 2]),
    ({"shape": [2], "strides": [3]}, [0, 3]),
    ({"shape": [3], "strides": [0]}, [0, 0, 0]),
    ({"shape": [3], "strides": [-1], "byte_offset": 24}, [3, 2, 1]),
    ({"shape": [2], "byte_offset": 16}, [2, 3]),
    ({"shape": [2], "major": 1}, [0, 1]),
    ({"shape": [2], "strides": [2], "major": 1}, [0, 2]),
    ({"shape": [4], "bits": 32, "byte_offset": 8}, [1, 0, 2, 0]),
    ({"shape": [5], "bits": 16, "code": 1, "byte_offset": 8}, [1, 0, 0, 0, 2]),
    ({"shape": [2], "code": 1, "byte_offset": 40}, [5, 6]),
]


FORMS: dict[str, tuple[Any, list[int]]] = {
    "int": (3, [3]),
    "zero": (0, [0]),
    "last": (BLOCKS - 1, [BLOCKS - 1]),
    "numpy scalar": (np.int64(3), [3]),
    "small numpy scalar": (np.uint8(3), [3]),
    "__index__": (Index(3), [3]),
    "list": (LIST, LIST),
    "tuple": (tuple(LIST), LIST),
    "range": (range(9, 2, -3), [9, 6, 3]),
    "list of numpy integers": ([np.int32(3), 9, Index(4)], LIST),
    "array": (array("I", LIST), LIST),
    "signed array": (array("q", LIST), LIST),
    "memoryview": (memoryview(array("H", LIST)), LIST),
    "strided view": (memoryview(array("i", [3, 0, 9, 0, 4, 0]))[::2], LIST),
    "unaligned": (np.frombuffer(b"x" + np.array(LIST, "i4").tobytes(), "i4", offset=1), LIST),
    "read-only": (np.broadcast_to(np.int16(3), 2), [3, 3]),
    "ctypes": ((ctypes.c_uint32 * 3)(*LIST), LIST),
    **{f"DLPack {kind}": (Tensor(np.array(LIST, kind)), LIST) for kind in "bBhHiIqQ"},
    "DLPack reversed": (Tensor(np.array(LIST)[::-1]), LIST[::-1]),
    "DLPack without versions": (OldTensor(np.array(LIST)), LIST),
    **{f"DLPack {fields}": (Capsule(**fields), blocks) for fields, blocks in FIELDS},
    **{f"numpy {kind}": (np.array(LIST, kind), LIST) for kind in "bBhHiIqQ"},
    "reversed numpy": (np.array(LIST)[::-1], LIST[::-1]),
    "big-endian numpy": (np.array(LIST, ">i4"), LIST),
    "slice": (slice(2, 5), [2, 3, 4]),
    "slice with a step": (slice(1, 10, 4), [1, 5, 9]),
    "repeated": ([5, 5], [5, 5]),
    "empty list": ([], []),
    "empty slice": (slice(4, 4), []),
    "empty array": (np.array([], np.int64), []),
}  # fmt: skip
OPEN_SLICES = {
    "all": (slice(None), range(BLOCKS)),
    "from": (slice(12, None), range(12, BLOCKS)),
    "to": (slice(None, 3), range(3)),
}


@pytest.mark.parametrize("form", [*FORMS, *OPEN_SLICES])
def test_forms(engine: Engine, form: str) -> None:
    """Rows of each form name the same blocks as a list does, as a source and as a destination."""
    index, expected = {**FORMS, **OPEN_SLICES}[form]
    blocks, to = list(expected), list(range(len(expected)))
    source, target = allocate(engine, "a", seed=1), allocate(engine, "b", seed=2)
    rows = source[index]
    assert isinstance(rows, Rows)
    assert (len(rows), rows.cache) == (len(blocks), source)
    model = Model(target)
    engine.copy(target[to], rows).result(LIMIT)
    model.write(to, Model(source), blocks).check(target)
    engine.copy(target[index], source[to]).result(LIMIT)
    model.write(blocks, Model(source), to).check(target)


@pytest.mark.parametrize("form", FORMS)
def test_forms_of_remote_rows(pair: Pair, form: str) -> None:
    index, blocks = FORMS[form]
    mine, theirs = pair.caches()
    to = list(range(len(blocks)))
    rows = pair.peer["kv"][index]
    assert (len(rows), rows.cache) == (len(blocks), pair.peer["kv"])
    if not blocks:
        refused("dst", lambda: pair.local.pull(mine[[]], rows))
        refused("dst", lambda: pair.local.push(rows, mine[[]]))
        return
    model = Model(mine)
    pair.local.pull(mine[to], rows).result(LIMIT)
    model.write(to, Model(theirs), blocks).check(mine)
    model = Model(theirs)
    pair.local.push(rows, mine[[0] * len(to)]).result(LIMIT)
    model.write(blocks, Model(mine), [0] * len(to)).check(theirs)


WRONG_TYPES: list[Any] = [
    True, [True], [3, False], 1.0, [1.0], float("nan"), "3", ["3"], None, [None], [[3]], {3: 4}, {3}, object(), 1j,
    (number for number in LIST), slice(1.0, 3), slice("a", None), (slice(1, 2),), np.array([1.0, 2.0]),
    np.array([True, False]), np.array(["3"]), np.float64(3), np.bool_(1), memoryview(array("d", [1.0])), ...,
    *[Device(device) for device in (None, 1, (1,), ("cpu", 0), (2**70, 0))],
    *[Raising(kind("no")) for kind in (BufferError, RuntimeError, TypeError, ValueError, KeyError)],
    *[Answers(given) for given in (None, 1, b"dltensor", object(), consumed(), np.array([0]))],
    *[Tensor(np.array([0, 1], kind)) for kind in "?efd"], np.ndarray,
    *[Capsule(**fields) for fields in (
        {"lanes": 2}, {"lanes": 0}, {"bits": 128}, {"bits": 1}, {"code": 2}, {"code": 4}, {"code": 6}, {"code": 200},
        {"device": (2, 0)}, {"device": (13, 0)}, {"major": 2}, {"major": 2**31},
    )],
]  # fmt: skip
WRONG_VALUES: list[Any] = [
    -1, [3, -1], 2**32, [2**64], -(2**70), range(-1, 3), np.array([-1]), np.int64(-1), np.array([2**40]),
    slice(-3, None), slice(0, -1), slice(5, None, -1), np.array([[1, 2], [3, 4]]), np.array(3),
    np.array([0, 2**63], "u8"), Tensor(np.array([2**64 - 1], "u8")),
    *[Device(device) for device in ((2, 0), (4, 0), (10, 0), (-1, 0))],
    *[Capsule(**fields) for fields in (
        {"shape": []}, {"ndim": -1}, {"ndim": 0}, {"shape": [1, 2]}, {"shape": [-1]}, {"shape": [2, 1, 1]},
    )],
]  # fmt: skip


@pytest.mark.parametrize("wrong", WRONG_TYPES, ids=short)
def test_wrong_types(pair: Pair, wrong: Any) -> None:
    mine, _ = pair.caches()
    for cache in (mine, pair.peer["kv"]):
        with pytest.raises(TypeError):
            cache[wrong]


@pytest.mark.parametrize("wrong", WRONG_VALUES, ids=short)
def test_wrong_values(pair: Pair, wrong: Any) -> None:
    mine, _ = pair.caches()
    for cache in (mine, pair.peer["kv"]):
        refused("blocks", lambda cache=cache: cache[wrong])  # type: ignore[misc]


@pytest.mark.parametrize("wrong", [-1, [3, -1], range(-1, 3), np.array([-1])], ids=short)
def test_wrong_values_are_refused_with_the_blocks_of_the_cache(engine: Engine, wrong: Any) -> None:
    cache = allocate(engine)
    refused("blocks", lambda: cache[wrong], f"0 to {BLOCKS - 1}")


@pytest.mark.parametrize("device", [(1, 7), (3, 0), (11, 0)])
def test_pinned_memory_is_host_memory(engine: Engine, device: tuple[int, int]) -> None:
    tensor = Capsule(shape=[2], device=device)
    tensor.__dlpack_device__ = lambda: device  # type: ignore[method-assign]
    assert len(allocate(engine)[tensor]) == 2


def test_empty_tensors(engine: Engine) -> None:
    kv = allocate(engine)
    for fields in ({"shape": [0]}, {"shape": [0], "data": None}, {"shape": [0], "strides": [1]}):
        assert len(kv[Capsule(**fields)]) == 0


def test_errors_that_do_not_concern_the_tensor(engine: Engine) -> None:
    kv = allocate(engine)
    for error in (KeyboardInterrupt(), SystemExit(3)):
        with pytest.raises(type(error)):
            kv[Raising(error)]
    fails(OutOfMemory, lambda: kv[Raising(MemoryError())])
    with pytest.raises(TypeError, match="needs a gradient") as caught:
        kv[Raising(BufferError("needs a gradient"))]
    assert isinstance(caught.value.__cause__, BufferError)


def test_tensor_that_no_memory_can_hold(engine: Engine) -> None:
    kv = allocate(engine)
    for given in (
        Capsule(shape=[2**62], strides=[0]),
        Capsule(shape=[2**40], strides=[0]),
        np.broadcast_to(np.int32(0), (2**40,)),
    ):
        fails(OutOfMemory, lambda given=given: kv[given])  # type: ignore[misc]


@needs("RLIMIT_AS", limits_address_space)
def test_array_that_does_not_fit_into_memory() -> None:
    run_fresh("""
        import resource
        import time
        from pathlib import Path
        import numpy as np
        from llm_datadist.native import Engine, OutOfMemory
        engine = Engine(pool="64KiB")
        kv = engine.allocate("kv", blocks=4, tensors=1, shape=(4,), dtype="uint8")
        numbers = np.zeros(1 << 24, np.int32)
        # A thread of the engine that has not begun yet would need memory for its thread-local data.
        tasks = list(Path("/proc/self/task").iterdir())
        while sum(" R " in (task / "stat").read_text().rsplit(")", 1)[1] for task in tasks) > 1:
            time.sleep(0.01)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        for room in (1 << 20, 1 << 26):
            resource.setrlimit(resource.RLIMIT_AS, (used + room, resource.RLIM_INFINITY))
            try:
                kv[numbers]
            except OutOfMemory:
                pass
            else:
                raise AssertionError("there was no such room")
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        engine.close()
    """)


def test_nothing_holds_an_array_after_it_is_read(engine: Engine) -> None:
    kv, growing = allocate(engine), bytearray(16)
    view = memoryview(growing).cast("q")
    numbers, base = array("i", [0, 1]), np.arange(2)
    tensor = Tensor(base[::-1])
    gone = weakref.ref(tensor)
    for given in (view, numbers, base, tensor, base[::-1]):
        before = sys.getrefcount(given)
        kv[given]
        assert sys.getrefcount(given) == before
    view.release()
    growing.append(0)
    numbers.append(2)
    del tensor, given
    gc.collect()
    assert gone() is None
    with pytest.raises(TypeError):
        kv[view]


@pytest.mark.parametrize("wrong", [slice(None), slice(3, None)], ids=short)
def test_slices_of_remote_caches_have_an_end(pair: Pair, wrong: slice) -> None:
    refused("blocks", lambda: pair.peer["kv"][wrong])


def test_missing_block_is_found_by_the_call(pair: Pair) -> None:
    mine, theirs = pair.caches()
    before = Model(mine), Model(theirs)
    local = pair.local
    beyond, remote_kv = mine[[1, BLOCKS]], pair.peer["kv"]
    refused("dst", lambda: local.copy(beyond, mine[[1, 2]]), str(BLOCKS))
    refused("src", lambda: local.copy(mine[[1, 2]], beyond), str(BLOCKS))
    refused("dst", lambda: local.pull(beyond, remote_kv[[1, 2]]), str(BLOCKS))
    refused("src", lambda: local.push(remote_kv[[1, 2]], beyond), str(BLOCKS))
    refused("rows", lambda: local.lend(beyond, ttl=1.0), str(BLOCKS))
    # The peer knows the size of its cache, so these are outcomes.
    pull, push = local.pull(mine[[1, 2]], remote_kv[[1, BLOCKS]]), local.push(remote_kv[[1, BLOCKS]], mine[[1, 2]])
    refused("src", lambda: pull.result(LIMIT), str(BLOCKS))
    refused("dst", lambda: push.result(LIMIT), str(BLOCKS))
    before[0].check(mine)
    before[1].check(theirs)


def test_list_is_copied(engine: Engine) -> None:
    kv = allocate(engine, seed=1)
    model, blocks, numbers = Model(kv), [3], np.array([4])
    rows, more = kv[blocks], kv[numbers]
    blocks[0], numbers[0] = 7, 7
    blocks.append(8)
    engine.copy(kv[[0, 1]], kv[[5, 6]]).result(LIMIT)
    engine.copy(rows, kv[[9]]).result(LIMIT)
    engine.copy(more, kv[[9]]).result(LIMIT)
    model.write([0, 1], model, [5, 6]).write([3, 4], model, [9, 9]).check(kv)


def test_rows_cannot_be_changed(engine: Engine) -> None:
    rows = allocate(engine)[[1]]
    for name in ("cache", "other"):
        with pytest.raises(AttributeError):
            setattr(rows, name, 1)
    assert "kv" in repr(rows)


def test_rows_of_a_copied_list_of_many_blocks(engine: Engine) -> None:
    """More blocks than one step copies with the GIL held."""
    many = engine.allocate("many", blocks=20000, tensors=1, shape=(8,), dtype="uint8")
    array_of_all = many.tensors[0].numpy()
    array_of_all[:] = np.arange(20000 * 8).reshape(20000, 8) % 251
    expected = array_of_all[::-1].copy()
    engine.copy(many[np.arange(10000)], many[np.arange(19999, 9999, -1)]).result(LIMIT)
    assert (array_of_all[:10000] == expected[:10000]).all()


# Parts


@pytest.mark.parametrize("span", [range(1, 3), slice(1, 3), (1, 3)], ids=short)
def test_layers(pair: Pair, span: Any) -> None:
    """Four layers of one tensor each: the second and third move."""
    mine, theirs = pair.caches()
    model = Model(mine)
    pair.local.pull(mine[[3, 4]].part(layers=span), pair.peer["kv"][[5, 6]].part(layers=span)).result(LIMIT)
    model.write([3, 4], Model(theirs), [5, 6], tensors=range(1, 3)).check(mine)
    model = Model(theirs)
    pair.local.push(pair.peer["kv"][[1]].part(layers=span), mine[[2]].part(layers=span)).result(LIMIT)
    model.write([1], Model(mine), [2], tensors=range(1, 3)).check(theirs)


def test_layers_of_several_tensors(pair: Pair) -> None:
    mine, theirs = pair.caches(tensors_per_layer=2)
    model = Model(mine)
    pair.local.pull(mine[[3]].part(layers=(1, 2)), pair.peer["kv"][[5]].part(layers=(1, 2))).result(LIMIT)
    model.write([3], Model(theirs), [5], tensors=range(2, 4)).check(mine)
    refused("dst", lambda: pair.local.pull(mine[[3]].part(layers=(1, 3)), pair.peer["kv"][[5]].part(layers=(0, 2))))


@pytest.mark.parametrize("span", [range(10, 50), slice(10, 50), (10, 50)], ids=short)
def test_bytes(pair: Pair, span: Any) -> None:
    mine, theirs = pair.caches()
    model = Model(mine)
    pair.local.pull(mine[[3, 4]].part(bytes=span), pair.peer["kv"][[5, 6]].part(bytes=span)).result(LIMIT)
    model.write([3, 4], Model(theirs), [5, 6], part=(10, 50)).check(mine)
    pair.local.copy(mine[[7]].part(bytes=span), mine[[8]].part(bytes=(50, 90))).result(LIMIT)
    model.write([7], model, [8], part=(50, 90), shift=-40).check(mine)


def test_open_ends_of_parts(engine: Engine) -> None:
    kv = allocate(engine, seed=1)
    model = Model(kv)
    engine.copy(kv[[7]].part(bytes=slice(None, 40)), kv[[8]].part(bytes=slice(0, 40))).result(LIMIT)
    model.write([7], model, [8], part=(0, 40)).check(kv)
    engine.copy(kv[[7]].part(bytes=slice(40, None)), kv[[9]].part(bytes=slice(40, 96))).result(LIMIT)
    model.write([7], model, [9], part=(40, 96)).check(kv)


def test_narrowing_makes_other_rows(engine: Engine) -> None:
    kv = allocate(engine, seed=1)
    rows, model = kv[[1]], Model(kv)
    narrow = rows.part(bytes=(0, 8))
    assert (len(narrow), narrow.cache) == (1, kv)
    engine.copy(rows, kv[[2]]).result(LIMIT)
    model.write([1], model, [2]).check(kv)
    fails(InvalidArgument, lambda: engine.copy(narrow, kv[[2]]))


@pytest.mark.parametrize("name", ["layers", "tokens", "bytes"])
@pytest.mark.parametrize(
    "span",
    [range(0), range(5, 3), range(0, 4, 2), slice(0, 4, 2), slice(3, 3), (3, 3), (5, 3), (-1, 3), slice(-3, None)],
)
def test_wrong_spans(engine: Engine, name: str, span: Any) -> None:
    kv = allocate(engine)
    refused(name, lambda: kv[[1]].part(**{name: span}))


@pytest.mark.parametrize("name", ["layers", "tokens", "bytes"])
@pytest.mark.parametrize("span", [3, True, "0:3", [0, 3], (0,), (0, 1, 2), (0, 1.0), (True, 3), {0, 3}, 1.5], ids=short)
def test_spans_of_wrong_type(engine: Engine, name: str, span: Any) -> None:
    kv = allocate(engine)
    with pytest.raises(TypeError):
        kv[[1]].part(**{name: span})


def test_wrong_uses_of_part(engine: Engine) -> None:
    rows = allocate(engine)[[1]]
    for call in (rows.part, lambda: rows.part(heads=range(1)), lambda: rows.part(range(1))):  # type: ignore[call-arg, misc]
        with pytest.raises(TypeError):
            call()
    refused("bytes", lambda: rows.part(tokens=(0, 1), bytes=(0, 1)))
    refused("bytes", lambda: rows.part(bytes=(0, 4)).part(bytes=(0, 2)))
    refused("layers", lambda: rows.part(layers=(0, 1)).part(layers=(0, 1)))


def test_parts_that_exceed_the_cache(pair: Pair) -> None:
    mine, _ = pair.caches()
    remote_kv = pair.peer["kv"][[1]]
    for part in ({"layers": (3, 5)}, {"bytes": (90, 97)}):
        refused("dst", lambda part=part: pair.local.pull(mine[[1]].part(**part), remote_kv.part(**part)))  # type: ignore[misc]
    refused("dst", lambda: pair.local.copy(mine[[1]].part(layers=(0, 1)), mine[[2]].part(layers=(0, 1))))


def test_tokens_need_a_layout(pair: Pair) -> None:
    mine, _ = pair.caches()
    refused("dst", lambda: pair.local.pull(mine[[1]].part(tokens=(0, 1)), pair.peer["kv"][[1]]))
    of = layout()
    cache = pair.local.allocate("with layout", of, blocks=4)
    refused("dst", lambda: pair.local.copy(cache[[1]].part(tokens=(0, 1)), cache[[2]].part(tokens=(0, 1))))
    transfer = pair.local.pull(cache[[1]].part(tokens=(0, 1)), pair.peer["kv"][[1]])
    fails(InvalidArgument, lambda: transfer)
