"""Block indices as buffers and as DLPack tensors: they mean what the same numbers in a plain list mean.

Each form of an array is compared with the list of its numbers: by the bytes that arrive, or by the text of the error.
Not for: the order of the checks (`test_transfer_arguments.py`) and numpy arrays of pairs (`test_copy.py`).
"""

from __future__ import annotations

import array
import ctypes
import gc
import mmap
import re
import sys
import weakref
from typing import TYPE_CHECKING, Any, Callable, Union

import numpy as np
import pytest

from conftest import options
from kv_caches import desc as kv_desc
from layers import Transfer, launch, results
from llm_datadist import BlocksCacheKey, LLMDataDist, LLMRole
from memory import LE, MISMATCH, OOM, TE, VE, UserTensors, contents, desc, fill, raising, run_fresh, same
from mistakes import fails
from peers import OK, End, Peer, by_blocks, equal, kv_options, outcome
from peers.values import cache_key as key

if TYPE_CHECKING:
    from collections.abc import Sequence

WIDTHS = ["i2", "u2", "i4", "u4", "i8", "u8"]
Form = Callable[["Sequence[int]"], Any]


class Tensor:
    """A DLPack tensor without the buffer protocol and without `__array__`. `made` is the array behind it."""

    def __init__(self, made: Any) -> None:
        self.made = made

    def __dlpack_device__(self) -> tuple[int, int]:
        return (1, 0)

    def __dlpack__(self, **given: Any) -> Any:
        return self.made.__dlpack__(**given)


class OldTensor(Tensor):
    """A tensor of a library that knows no versions of DLPack."""

    def __dlpack__(self, stream: None = None) -> Any:  # type: ignore[override]
        return self.made.__dlpack__()


def spaced(numbers: np.ndarray, step: int) -> np.ndarray:
    """The numbers with gaps between them, which hold other numbers; a negative step stores them in reverse."""
    wide = np.full(max(1, len(numbers) * abs(step)), 77, numbers.dtype)
    view = wide[::step][: len(numbers)]
    view[:] = numbers
    assert len(numbers) < 2 or view.strides[0] == step * numbers.itemsize
    return view


def unaligned(numbers: np.ndarray) -> np.ndarray:
    """The numbers at an odd address."""
    moved = np.frombuffer(b"x" + numbers.tobytes(), numbers.dtype, offset=1)
    assert not len(numbers) or not moved.flags.aligned
    return moved


def frozen(numbers: np.ndarray) -> np.ndarray:
    """An array that nobody can write to."""
    numbers.flags.writeable = False
    return numbers


def of_type(kind: str) -> Form:
    return lambda numbers: np.array(numbers, kind)


FORMS: dict[str, Form] = {
    **{kind: of_type(kind) for kind in WIDTHS},
    **{f"{kind} of DLPack": lambda numbers, kind=kind: Tensor(np.array(numbers, kind)) for kind in WIDTHS},
    **{f"every {n}th": lambda numbers, n=n: spaced(np.array(numbers, "i4"), n) for n in (2, 3, -1, -2)},
    **{f"every {n}th of DLPack": lambda numbers, n=n: Tensor(spaced(np.array(numbers, "u2"), n)) for n in (2, -1, -3)},
    "a column": lambda numbers: np.array([numbers, numbers], "i8").T.copy()[:, 1],
    "unaligned": lambda numbers: unaligned(np.array(numbers, "i4")),
    "unaligned of DLPack": lambda numbers: Tensor(unaligned(np.array(numbers, "i8"))),
    "read-only": lambda numbers: frozen(np.array(numbers, "i8")),
    "read-only, every 2nd": lambda numbers: frozen(spaced(np.array(numbers, "i8"), 2)),
    "a tensor without versions": lambda numbers: OldTensor(np.array(numbers, "i4")),
    **{f"array.array {code!r}": lambda numbers, code=code: array.array(code, numbers) for code in "hHiIlLqQ"},
    "memoryview": lambda numbers: memoryview(array.array("q", numbers)),
    "memoryview in reverse": lambda numbers: memoryview(array.array("i", reversed(numbers)))[::-1],
    "memoryview of bytes": lambda numbers: memoryview(np.array(numbers, "i8").tobytes()).cast("q"),
    **{
        kind.__name__: lambda numbers, kind=kind: (kind * len(numbers))(*numbers)
        for kind in (ctypes.c_int16, ctypes.c_uint16, ctypes.c_int32, ctypes.c_uint32, ctypes.c_int64, ctypes.c_uint64)
    },
    "numpy's own scalar type": lambda numbers: np.array(numbers, np.longlong),
}


@pytest.fixture(params=list(FORMS))
def form(request: pytest.FixtureRequest) -> Form:
    return FORMS[request.param]


class Pair:
    """Two linked ends with one blocks cache each."""

    def __init__(self, local: End, remote: Peer) -> None:
        self.local, self.remote = local, remote
        local.allocate("local", 40, 96, blocks=True)
        remote.allocate("remote", 40, 96, blocks=True, keys=[by_blocks(0)], seed=2)
        self.handle = local.held["local"].handle

    def call(self, name: str, src: Any, dst: Any) -> Any:
        """Pull or push blocks."""
        return getattr(self.local.manager, name)(key(by_blocks(2)), self.handle, src, dst)

    def bytes_after(self, name: str, src: Any, dst: Any) -> list[np.ndarray]:
        """The bytes of both caches after a call, from known contents."""
        self.local.fill("local", 1)
        self.remote.fill("remote", 2)
        assert self.call(name, src, dst) is None
        return [*self.local.read("local"), *self.remote.read("remote")]


SRC, DST = [3, 0, 39, 17, 5, 18], [10, 39, 0, 1, 2, 30]
CALLS = ["pull_blocks", "push_blocks"]


@pytest.mark.parametrize("call", CALLS)
def test_pulls_and_pushes(one_sided: tuple[End, Peer], call: str) -> None:
    """All forms in one test, because a pair of processes takes longer to start than all the calls."""
    pair = Pair(*one_sided)
    for src, dst in ((SRC, DST), (SRC[:1], DST[:1])):
        expected = pair.bytes_after(call, src, dst)
        for name, make in FORMS.items():
            for given in ((make(src), dst), (src, make(dst)), (make(src), make(dst)), (tuple(src), make(dst))):
                assert equal(pair.bytes_after(call, *given), expected), name


def test_pull_of_a_slot_into_an_array_of_blocks(served: tuple[End, Peer]) -> None:
    local, remote = served
    cache = remote.allocate("remote", 2, 96 * 3, seed=2)
    local.allocate("local", 8, 96, blocks=True)
    blocks = [5, 0, 2]
    for src, dst in (((), blocks), (np.array([], "i8"), np.array(blocks, "u2")), ([], array.array("h", blocks))):
        local.fill("local", 1)
        local.manager.pull_blocks(key(("slot", 2, cache, 1)), local.held["local"].handle, src, dst)
        for ours, theirs in zip(local.read("local"), remote.read("remote")):
            assert (ours[blocks].reshape(-1) == theirs[1]).all()


def test_any_strides_and_widths(one_sided: tuple[End, Peer]) -> None:
    pair, chance = Pair(*one_sided), np.random.default_rng(5)
    for _ in range(60):
        count = int(chance.integers(1, 40))
        src, dst = chance.integers(0, 40, count), chance.permutation(40)[:count]
        expected = pair.bytes_after("pull_blocks", src.tolist(), dst.tolist())
        given = []
        for numbers in (src, dst):
            kind, step = chance.choice(WIDTHS), int(chance.choice([-3, -2, -1, 1, 2, 5]))
            made = spaced(numbers.astype(kind), step)
            given.append(made if chance.random() < 0.5 else Tensor(made))
        assert equal(pair.bytes_after("pull_blocks", *given), expected)


# Forms of an `(n, 2)` array that numpy's `asarray` does not read.
PAIR_FORMS: dict[str, Form] = {
    **{f"{kind} of DLPack": lambda rows, kind=kind: Tensor(np.array(rows, kind)) for kind in WIDTHS},
    "of DLPack, column by column": lambda rows: Tensor(np.asfortranarray(np.array(rows, "i4"))),
    "of DLPack, in reverse": lambda rows: Tensor(np.array(rows, "i8")[::-1, ::-1].copy()[::-1, ::-1]),
    "memoryview": lambda rows: memoryview(np.array(rows, "i8").tobytes()).cast("q", (len(rows), 2)),
    "ctypes": lambda rows: ((ctypes.c_int32 * 2) * len(rows))(*map(tuple, rows)),
}


def copied(before: list[np.ndarray], source: list[np.ndarray], rows: Sequence[Sequence[int]]) -> list[np.ndarray]:
    after = [tensor.copy() for tensor in before]
    for src, dst in rows:
        for target, origin in zip(after, after if source is before else source):
            target[dst] = origin[src]
    return after


@pytest.mark.parametrize("make", PAIR_FORMS.values(), ids=list(PAIR_FORMS))
def test_copies_and_swaps(manager: Any, make: Form) -> None:
    cache, user = manager.allocate_blocks_cache(desc(12, 64, 2)), UserTensors(12, 64, 2)
    cpu = user.cpu_cache()

    for rows in ([[0, 1], [2, 3], [2, 4]], [[5, 11]]):
        before = fill(cache, 1)
        manager.copy_blocks(cache, make(rows))
        assert same(contents(cache), copied(before, before, rows))
        before = fill(cache, 2)
        manager.swap_blocks(cpu, cache, make(rows))
        assert same(contents(cache), copied(before, user.arrays, rows))
        expected = copied(user.snapshot(), contents(cache), rows)
        manager.swap_blocks(cache, cpu, make(rows))
        assert same(user.snapshot(), expected)


def test_pairs_outside_the_cache(manager: Any) -> None:
    cache, cpu = manager.allocate_blocks_cache(desc(4, 64, 2)), UserTensors(4, 64, 2).cpu_cache()
    for make in (lambda rows: np.array(rows, "i8"), *PAIR_FORMS.values()):
        for rows, texts in (
            ([[0, 1], [0, 4]], ("destination block=4", "pair=1")),
            ([[0, 1], [1, 2], [4, 0]], ("source block=4", "pair=2")),
            ([[0, -1]], ("destination block=-1", "pair=0")),
        ):
            if min(map(min, rows)) < 0 and not signed(make([[0, 0]])):
                continue
            for text in texts:
                fails(lambda make=make, rows=rows: manager.copy_blocks(cache, make(rows)), LE, text, rows)
                fails(lambda make=make, rows=rows: manager.swap_blocks(cpu, cache, make(rows)), MISMATCH, text, rows)
    for make in (lambda rows: np.array(rows, "u8"), lambda rows: Tensor(np.array(rows, "u8"))):
        for rows, index in (([[0, 1], [2**63, 1]], "[1][0]"), ([[1, 2**64 - 1]], "[0][1]")):
            number = max(map(max, rows))
            text = f"copy_block_info{index}={number} must be between"
            fails(lambda make=make, rows=rows: manager.copy_blocks(cache, make(rows)), LE, text, rows)
            fails(lambda make=make, rows=rows: manager.swap_blocks(cpu, cache, make(rows)), MISMATCH, index, rows)


def signed(made: Any) -> bool:
    """Whether an array of pairs has signed numbers."""
    kind = made.made.dtype.kind if isinstance(made, Tensor) else np.asarray(made).dtype.kind
    return kind == "i"


NO_PAIRS = [
    *[np.zeros(shape, "i8") for shape in ((2, 3), (2, 2, 2), (4,), (1, 1), (2, 0))],
    *[np.zeros((1, 2), kind) for kind in ("i1", "u1", "?", "f4", "f8")],
]


@pytest.mark.parametrize("bad", NO_PAIRS, ids=lambda bad: f"{bad.dtype}{bad.shape}")
def test_what_is_no_array_of_pairs(manager: Any, bad: np.ndarray) -> None:
    cache, cpu = manager.allocate_blocks_cache(desc(4, 64, 2)), UserTensors(4, 64, 2).cpu_cache()
    given: list[Any] = [Tensor(bad), Device((2, 0))]
    if bad.size:
        given.append(memoryview(bad.tobytes()).cast(bad.dtype.char, bad.shape))
    for one in given:
        fails(lambda one=one: manager.copy_blocks(cache, one), TE, "copy_block_info only support", bad)
        fails(lambda one=one: manager.swap_blocks(cpu, cache, one), TE, "src_to_dst only support", bad)


class Bench:
    """Calls to a cluster without a link: a call that passes all checks fails with NOT_YET_LINK."""

    def __init__(self, dist: LLMDataDist) -> None:
        self.manager = dist.cache_manager
        self.cache = self.manager.allocate_blocks_cache(desc(4, 256, 4), BlocksCacheKey(1))

    def outcome(self, name: str, src: Any, dst: Any) -> tuple[str, str]:
        return outcome(lambda: self.call(name, src, dst))

    def call(self, name: str, src: Any, dst: Any) -> Any:
        return getattr(self.manager, name)(BlocksCacheKey(2), self.cache, src, dst)


@pytest.fixture
def bench(start: Callable[..., LLMDataDist]) -> Bench:
    return Bench(start(options(llm__EnableRemoteCacheAccessible="1")))


LISTS: list[tuple[list[int], list[int]]] = [
    ([], [0]),
    ([0], []),
    ([], []),
    ([0, 1], [0]),
    ([0], [4]),
    ([0, 1, 2], [0, 1, 700]),
    ([0], [0]),
    ([700], [0]),
    ([700, 0], [1, 9]),
]


def test_every_error_of_the_numbers_is_that_of_the_list(bench: Bench, form: Form) -> None:
    for call in CALLS:
        for src, dst in LISTS:
            expected = bench.outcome(call, src, dst)
            assert expected[0] in ("LLM_PARAM_INVALID", "LLM_NOT_YET_LINK")
            for given in ((form(src), dst), (src, form(dst)), (form(src), form(dst))):
                assert bench.outcome(call, *given) == expected, (call, src, dst)


@pytest.mark.parametrize("name", ["src_blocks", "dst_blocks"])
@pytest.mark.parametrize("call", CALLS)
def test_numbers_below_0_and_above_int64(bench: Bench, call: str, name: str) -> None:
    cases: list[tuple[Any, int, int]] = [(np.array([0, 1, -1], kind), 2, -1) for kind in ("i2", "i4", "i8")]
    cases += [
        (np.array([-(2**63), 0]), 0, -(2**63)),
        (np.array([-5, 0, -1])[::-1], 0, -1),
        (np.array([0, 2**63], "u8"), 1, 2**63),
        (np.array([0, 3, 2**64 - 1], "u8"), 2, 2**64 - 1),
        (array.array("i", [0, -7]), 1, -7),
    ]
    cases += [(Tensor(made), at, number) for made, at, number in cases[:-1]]
    for made, at, number in cases:
        given = {"src_blocks": [0, 1], "dst_blocks": [0, 1], name: made}
        text = f"{name}[{at}]={number} must be between 0 and 2^63 - 1"
        fails(lambda given=given: bench.call(call, *given.values()), LE, text, made)


class Device(Tensor):
    """A tensor that says it is on another device, and that must not be asked for its bytes."""

    def __init__(self, device: Any) -> None:
        super().__init__(np.array([0, 1]))
        self.device = device

    def __dlpack_device__(self) -> Any:
        return self.device

    def __dlpack__(self, **_: Any) -> Any:
        raise AssertionError("a capsule of another device was asked for")


class Raising(Tensor):
    def __init__(self, error: BaseException) -> None:
        super().__init__(None)
        self.error = error

    def __dlpack__(self, **_: Any) -> Any:
        raise self.error


class Answers(Tensor):
    """Returns anything in place of a capsule."""

    def __dlpack__(self, **_: Any) -> Any:
        return self.made


class NoDevice:
    __dlpack__ = None


def consumed() -> Any:
    """A capsule whose tensor another consumer has taken."""
    made = np.array([0, 1])
    capsule = made.__dlpack__()
    np.from_dlpack(Answers(capsule))
    return capsule


NOT_INDICES: list[Any] = [
    range(2), b"01", bytearray(b"01"), "01", {0: 1}, {0}, 1, 1.5, object(), iter([0]), int, mmap.mmap(-1, 8),
    *[np.array([0, 1], kind) for kind in ("i1", "u1", "?", "f2", "f4", "f8", "c16", "S1", "U1", "O", "M8[s]", "m8[s]")],
    *[np.array([0, 1], np.dtype(kind).newbyteorder()) for kind in WIDTHS],
    *[np.zeros(shape, "i8") for shape in ((), (1, 1), (2, 2), (2, 2, 2), (0, 0))],
    np.zeros(2, [("a", "i4"), ("b", "i4")]), np.int64(0), np.zeros(2, "V8"),
    array.array("b", [0]), array.array("B", [0]), array.array("f", [0]), array.array("d", [0]),
    memoryview(b"01"), memoryview(b"01").cast("b"), memoryview(b"01").cast("?"), memoryview(b"01").cast("c"),
    memoryview(bytes(8)).cast("B", (2, 4)), memoryview(bytes(8)).cast("P"),
    (ctypes.c_int64.__ctype_be__ * 1)(0) if sys.byteorder == "little" else (ctypes.c_int64.__ctype_le__ * 1)(0),
    (ctypes.c_char * 2)(), ctypes.c_int64(1),
    *[Tensor(np.array([0, 1], kind)) for kind in ("i1", "u1", "?", "f2", "f4", "f8", "c16")],
    *[Tensor(np.zeros(shape, "i4")) for shape in ((), (1, 1), (2, 2), (1, 2, 3))],
    *[Device(device) for device in ((2, 0), (4, 0), (10, 0), (-1, 0), None, 1, (1,), ("cpu", 0), (2**70, 0))],
    *[Raising(kind("no")) for kind in (BufferError, RuntimeError, TypeError, ValueError, KeyError)],
    *[Answers(given) for given in (None, 1, b"dltensor", object(), consumed(), np.array([0]))],
    NoDevice(), np.ndarray,
]  # fmt: skip


@pytest.mark.parametrize("name", ["src_blocks", "dst_blocks"])
@pytest.mark.parametrize("number", range(len(NOT_INDICES)))
def test_what_is_no_array_of_indices(bench: Bench, name: str, number: int) -> None:
    for call in CALLS:
        given = {"src_blocks": [0, 1], "dst_blocks": [0, 1], name: NOT_INDICES[number]}
        with pytest.raises(TypeError, match=rf"^{name}.*only support"):
            bench.call(call, *given.values())


def test_a_released_memoryview(bench: Bench) -> None:
    view = memoryview(array.array("q", [0]))
    view.release()
    with pytest.raises(TypeError, match=r"^src_blocks"):
        bench.call("pull_blocks", view, [0])


def test_what_does_not_concern_the_tensor_passes_through(bench: Bench) -> None:
    for error in (KeyboardInterrupt(), SystemExit(3)):
        with pytest.raises(type(error)):
            bench.call("pull_blocks", Raising(error), [0])
    with raising(OOM):
        bench.call("pull_blocks", Raising(MemoryError()), [0])
    with pytest.raises(TypeError) as caught:
        bench.call("pull_blocks", Raising(BufferError("needs a gradient")), [0])
    assert "needs a gradient" in str(caught.value)
    assert isinstance(caught.value.__cause__, BufferError)


@pytest.mark.parametrize("device", [(1, 0), (1, 7), (3, 0), (11, 0)])
def test_pinned_memory_is_memory_of_the_cpu(bench: Bench, device: tuple[int, int]) -> None:
    tensor = Capsule(shape=[2], device=device)
    tensor.__dlpack_device__ = lambda: device  # type: ignore[method-assign]
    assert bench.outcome("pull_blocks", tensor, [0, 1]) == bench.outcome("pull_blocks", [0, 1], [0, 1])


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
        shape: Union[list[int], None] = None,
        strides: Union[list[int], None] = None,
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


def test_fields_of_a_tensor(one_sided: tuple[End, Peer]) -> None:
    pair = Pair(*one_sided)
    for fields, numbers in FIELDS:
        dst = DST[: len(numbers)]
        expected = pair.bytes_after("pull_blocks", numbers, dst)
        assert equal(pair.bytes_after("pull_blocks", Capsule(**fields), dst), expected), fields


def test_empty_tensors(bench: Bench) -> None:
    for fields in ({"shape": [0]}, {"shape": [0], "data": None}, {"shape": [0], "strides": [1]}):
        for given in ((Capsule(**fields), [0]), ([0], Capsule(**fields))):
            expected = [[] if isinstance(one, Capsule) else one for one in given]
            assert bench.outcome("pull_blocks", *given) == bench.outcome("pull_blocks", *expected)


@pytest.mark.parametrize(
    "fields",
    [
        {"lanes": 2}, {"lanes": 0}, {"bits": 8}, {"bits": 128}, {"bits": 1}, {"code": 2}, {"code": 4}, {"code": 6},
        {"code": 200}, {"shape": []}, {"ndim": -1}, {"ndim": 0}, {"shape": [1, 2]}, {"shape": [-1]},
        {"device": (2, 0)}, {"device": (13, 0)}, {"major": 2}, {"major": 2**31}, {"shape": [2, 1, 1]},
    ],
)  # fmt: skip
def test_fields_of_what_is_no_list_of_indices(bench: Bench, fields: dict[str, Any]) -> None:
    with pytest.raises(TypeError, match=r"^src_blocks only support"):
        bench.call("pull_blocks", Capsule(**fields), [0, 1])


def test_a_tensor_that_no_memory_can_hold(bench: Bench) -> None:
    for given in (
        Capsule(shape=[2**62], strides=[0]),
        Capsule(shape=[2**40], strides=[0]),
        np.broadcast_to(np.int32(0), (2**40,)),
    ):
        with raising(OOM):
            bench.call("pull_blocks", given, [0])


def test_nothing_holds_an_array_after_the_call(bench: Bench) -> None:
    growing = bytearray(16)
    view = memoryview(growing).cast("q")
    numbers = array.array("i", [0, 1])
    base = np.arange(2)
    tensor = Tensor(base[::-1])
    gone = weakref.ref(tensor)
    for given in (view, numbers, base, tensor, base[::-1]):
        before = sys.getrefcount(given)
        for call in CALLS:
            bench.outcome(call, given, given)
        assert sys.getrefcount(given) == before
    view.release()
    growing.append(0)
    numbers.append(2)
    del tensor, given
    gc.collect()
    assert gone() is None
    assert sys.getrefcount(base) == 2 + (sys.version_info < (3, 0))


@pytest.mark.parametrize("call", ["pull_blocks", "swap_blocks"])
def test_an_array_that_does_not_fit_into_memory(call: str) -> None:
    run_fresh(f"""
        import resource
        import time
        from pathlib import Path
        import numpy as np
        from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMDataDist, LLMException, LLMRole
        dist = LLMDataDist(LLMRole.PROMPT, 1)
        dist.init({{"llm.EnableCacheManager": "1", "ge.exec.deviceId": "0",
                   "llm.MemPoolConfig": '{{"memory_size": 65536, "page_shift": 12}}'}})
        cache = dist.cache_manager.allocate_blocks_cache(CacheDesc(1, [4, 4], DataType.DT_INT8))
        numbers = np.zeros(1 << 24, np.int32)
        pairs = memoryview(numbers).cast("B").cast("i", (1 << 23, 2))
        given = (BlocksCacheKey(2), cache, numbers, [0]) if {call!r} == "pull_blocks" else (cache, cache, pairs)
        # A thread of the engine that has not begun yet would need memory for its thread-local data.
        tasks = list(Path("/proc/self/task").iterdir())
        while sum(" R " in (task / "stat").read_text().rsplit(")", 1)[1] for task in tasks) > 1:
            time.sleep(0.01)
        used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        for room in (1 << 20, 1 << 26):
            resource.setrlimit(resource.RLIMIT_AS, (used + room, resource.RLIM_INFINITY))
            try:
                getattr(dist.cache_manager, {call!r})(*given)
            except LLMException as error:
                assert error.status_code.name == "LLM_OUT_OF_MEMORY", error
            else:
                raise AssertionError("there was no such room")
        resource.setrlimit(resource.RLIMIT_AS, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
        dist.finalize()
    """)


@pytest.mark.parametrize("accessible", [False, True])
def test_layers(ends: Any, accessible: bool) -> None:
    transfer = Transfer(ends, {"accessible": accessible}, 6, 32, blocks=True)
    src, dst = [5, 0, 3], [1, 2, 4]
    for make in (list, *FORMS.values()):
        transfer.to.blocks(transfer.source, range(4), 0, list(zip(src, dst)))
        config = transfer.to.to(range(4), 0)
        assert results(launch(transfer.local, "n", [config], src=make(src), dst=make(dst))) == [OK]
        transfer.to.check()


@pytest.mark.parametrize("name", ["src_block_indices", "dst_block_indices"])
def test_indices_of_layers(bench: Bench, name: str) -> None:
    """A negative number in a list is a `ValueError` (contract §8.1), so one in an array is as well."""
    from llm_datadist import TransferConfig  # noqa: PLC0415
    from test_layerwise_arguments import Ready  # noqa: PLC0415

    def start(given: Any) -> None:
        lists = {"src_block_indices": [0, 1], "dst_block_indices": [0, 1], name: given}
        bench.manager.transfer_cache_async(bench.cache, Ready(), [TransferConfig(2, [1, 2, 3, 4])], **lists)

    for made, at, number in ((np.array([0, -1]), 1, -1), (Tensor(np.array([2**63], "u8")), 0, 2**63)):
        fails(lambda made=made: start(made), MISMATCH, f"{name}[{at}]={number}", made)
    for made in (range(2), b"01", np.array([0.0]), np.zeros((1, 1), "i8"), Device((2, 0)), np.array([True])):
        fails(lambda made=made: start(made), TE, name, made)
    fails(lambda: start(np.array([0, 1, 2])), LE, "entries", "lengths")


class TestKvCacheManager:
    """The calls of the other mode accept the same arrays."""

    @pytest.fixture
    def kv(self, start: Callable[..., LLMDataDist]) -> Any:
        return start(kv_options(), role=LLMRole.DECODER).kv_cache_manager

    def test_pull_blocks(self, kv: Any, form: Form) -> None:
        cache = kv.allocate_blocks_cache(kv_desc())

        def pull(src: Any, dst: Any) -> tuple[str, str]:
            return outcome(lambda: kv.pull_blocks(BlocksCacheKey(1), cache, src, dst))

        for src, dst in (([0], [3]), ([], [0]), ([0, 1], [0]), ([0], [4])):
            assert pull(form(src), form(dst)) == pull(src, dst)

    def test_wrong_arrays(self, kv: Any) -> None:
        cache = kv.allocate_blocks_cache(kv_desc())
        for bad, expected in (((0,), TE), (range(1), TE), (b"0", TE), (np.array([0.0]), TE), (np.array([-1]), LE)):
            for name, given in (("prompt_blocks", (bad, [0])), ("decoder_blocks", ([0], bad))):
                fails(lambda given=given: kv.pull_blocks(BlocksCacheKey(1), cache, *given), expected, name, bad)

    @pytest.mark.parametrize("make", PAIR_FORMS.values(), ids=list(PAIR_FORMS))
    def test_copies(self, kv: Any, make: Form) -> None:
        cache = kv.allocate_blocks_cache(kv_desc())
        array_of = [tensor.numpy() for tensor in (kv.get_cache_tensors(cache, number)[0] for number in (0, 1))]
        for number, tensor in enumerate(array_of):
            tensor[:] = np.arange(4)[:, None] + 10 * number
        kv.copy_blocks(cache, make([[0, 3], [3, 1]]))
        for number, tensor in enumerate(array_of):
            assert tensor[:, 0].tolist() == [10 * number + block for block in (0, 0, 2, 0)]
        if signed(make([[0, 0]])):
            fails(lambda: kv.copy_blocks(cache, make([[0, 1], [2, -3]])), VE, "pair 1: -3", "negative")


@pytest.mark.parametrize(
    ("call", "text"),
    [
        (
            lambda m, c, n: m.pull_blocks(BlocksCacheKey(2), c, [0, 1], [2, n]),
            "dst_blocks inner type only support ['int']",
        ),
        (
            lambda m, c, n: m.pull_blocks(BlocksCacheKey(2), c, (0, n), [2, 3]),
            "src_blocks inner type only support ['int']",
        ),
        (lambda m, c, n: m.copy_blocks(c, {0: [1, n]}), "dict value inner type only support ['int']"),
    ],
)
def test_integer_of_numpy_in_a_list_is_refused_with_its_position_and_a_remedy(
    manager: Any, call: Any, text: str
) -> None:
    cache = manager.allocate_blocks_cache(desc())
    actual = ", but the actual type of element 1 is <class 'numpy.int64'>; convert it with int()"
    with pytest.raises(TypeError) as caught:
        call(manager, cache, np.int64(3))
    assert str(caught.value) == f"{text}{actual}, or a whole array with tolist()"
    with pytest.raises(TypeError) as caught:
        call(manager, cache, "3")
    assert str(caught.value) == f"{text}{actual.partition('<')[0]}<class 'str'>"


def test_integer_of_numpy_in_place_of_a_number_is_refused_with_a_remedy(manager: Any) -> None:
    cache = manager.allocate_cache(desc())
    text = "dst_batch_index only support ['int'], but the actual type is <class 'numpy.int64'>; convert it with int()"
    with pytest.raises(TypeError, match=re.escape(text)):
        manager.copy_cache(cache, cache, np.int64(1))
