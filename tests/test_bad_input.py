"""Wrong values for every argument of every manager call: they raise the exact exception and change nothing.

Each call has a table: argument, wrong value, expected error. Values that depend on a cache are built from a `Bench`.
Not for: constructors of value classes (`test_values.py`) and options (`test_lifecycle.py`).
"""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest

from ids import short
from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    KvCache,
    LLMConfig,
    LLMDataDist,
    LLMException,
    LLMRole,
    Placement,
)
from llm_datadist.utils.utils import check_dict
from memory import (
    AE,
    GONE,
    INT64_MAX,
    LE,
    MISMATCH,
    OOM,
    TE,
    UINT32_MAX,
    UINT64_MAX,
    VE,
    WIDE,
    Expected,
    UserTensors,
    desc,
    fill,
    raising,
    refused,
)
from mistakes import NO_INTEGER, outside


class Bench:
    """One cache of each kind, and valid arguments for every call."""

    def __init__(self, manager: Any) -> None:
        self.manager = manager
        self.batch = manager.allocate_cache(desc(4, 256, 2), [CacheKey(1, 1)])
        self.other = manager.allocate_cache(desc(4, 256, 2))
        self.blocks = manager.allocate_blocks_cache(desc(4, 256, 2), BlocksCacheKey(1, 7))
        self.user = UserTensors(4, 256, 2)
        self.cpu = self.user.cpu_cache()
        self.caches = [self.batch, self.other, self.blocks]
        for number, cache in enumerate(self.caches):
            fill(cache, number)
        describe = self.user.describe(Placement.DEVICE)
        self.good: dict[str, dict[str, Any]] = {
            "allocate_cache": {"cache_desc": desc(), "cache_keys": [CacheKey(1, 50)]},
            "allocate_blocks_cache": {"cache_desc": desc(), "blocks_cache_key": BlocksCacheKey(1, 50)},
            "deallocate_cache": {"cache": self.other},
            "deallocate_blocks_cache": {"cache": self.blocks},
            "remove_cache_key": {"cache_key": CacheKey(1, 1)},
            "register_cache": {
                "cache_desc": describe, "addrs": self.user.addrs, "cache_keys": [CacheKey(1, 60)],
                "remote_accessible": True,
            },
            "register_blocks_cache": {
                "cache_desc": describe, "addrs": self.user.addrs, "blocks_cache_key": BlocksCacheKey(1, 60),
                "remote_accessible": True,
            },
            "unregister_cache": {"cache_id": 12345},
            "copy_cache": {
                "dst": self.other, "src": self.batch, "dst_batch_index": 0, "src_batch_index": 1, "offset": 0,
                "size": 128, "req_id": 5,
            },
            "copy_blocks": {"cache": self.blocks, "copy_block_info": {0: [1]}},
            "swap_blocks": {"src_cache": self.cpu, "dst_cache": self.blocks, "src_to_dst": {0: 1}},
            "tensor_views": {"cache": self.blocks},
        }  # fmt: skip


@pytest.fixture
def bench(manager: Any) -> Bench:
    return Bench(manager)


class Built:
    """A wrong value that is made from the bench. Its repr is `name`."""

    def __init__(self, name: str, make: Callable[[Bench], Any]) -> None:
        self.name, self.make = name, make

    def __repr__(self) -> str:
        return self.name


NO_CACHE: list[Any] = [
    1, True, 1.5, "cache", [], Cache, Built("a list of caches", lambda b: [b.batch]),
    Built("a descriptor", lambda _: desc()), Built("a key", lambda _: CacheKey(1, 1)),
]  # fmt: skip
BATCH_CACHE = Built("a batch cache", lambda b: b.batch)
BLOCKS_CACHE = Built("a blocks cache", lambda b: b.blocks)
CPU_CACHE = Built("a CPU cache", lambda b: b.cpu)
CACHES: list[tuple[Any, Expected]] = [(None, AE), *[(bad, TE) for bad in NO_CACHE]]
NO_BATCH_CACHES = [*CACHES, (BLOCKS_CACHE, LE), (CPU_CACHE, LE)]
NO_DESC: list[Any] = [1, True, "desc", [], {}, CacheDesc, Built("a cache", lambda b: b.batch), DataType.DT_INT8]


def integers(low: int, high: int) -> list[tuple[Any, Expected]]:
    """Values that are not integers from `low` to `high`."""
    return [*[(bad, TE) for bad in (None, *NO_INTEGER)], *[(bad, VE) for bad in outside(low, high)]]


UINT32, UINT64, INT64 = integers(0, UINT32_MAX), integers(0, UINT64_MAX), integers(-INT64_MAX - 1, INT64_MAX)


def int8(shape: list[int], tensors: int = 1, data_type: Any = DataType.DT_INT8, **words: Any) -> CacheDesc:
    """A descriptor of bytes in any shape."""
    return CacheDesc(tensors, shape, data_type, **words)


IMPOSSIBLE_DESCS: list[tuple[Any, Expected]] = [
    (int8([1], 0), LE),
    *[(int8(shape), LE) for shape in ([0], [4, 0], [-1], [-2, -2], [4, -(2**63)], [1] * 32, [1] * 1000)],
    *[(int8(shape), LE) for shape in ([2**32, 2**32], [2**32, 2**32 + 1], [2**33, 2**31], [INT64_MAX] * 3)],
    (int8([INT64_MAX], data_type=DataType.DT_INT16), LE),
    (int8([2**62], data_type=DataType.DT_STRING), LE),
    (int8([4], data_type=None), LE),
]
TOO_LARGE_DESCS: list[tuple[Any, Expected]] = [
    *[(int8(shape), OOM) for shape in ([1 << 40], [1, (2 << 20) + 1], [2**62 - 1])],
    *[(int8([1], count), OOM) for count in (513, 100_000)],
]
ALLOCATED_DESCS = [(None, AE), *[(bad, TE) for bad in NO_DESC], *IMPOSSIBLE_DESCS, *TOO_LARGE_DESCS]
REGISTERED_DESCS = [
    *[(None, AE), *[(bad, TE) for bad in NO_DESC], (int8([4], 0), LE), (int8([4], 3), LE)],
    *[(int8(list(row[0].shape), 2, row[0].data_type), LE) for row in IMPOSSIBLE_DESCS[1:]],
]
KEY_LISTS: list[tuple[Any, Expected]] = [
    (bad, TE)
    for bad in (
        None, 1, True, "key", "", set(), {}, iter(()), [1], [None], ["1"], CacheKey(1, 1), [BlocksCacheKey(1)],
        (CacheKeyByIdAndIndex(1, 1),), [CacheKey(1, 90), None], {CacheKey(1, 90)}, [[CacheKey(1, 90)]],
    )
]  # fmt: skip
ADDRESS_LISTS: list[tuple[Any, Expected]] = [
    *[(bad, TE) for bad in (None, 1, "12", (1, 2), {1, 2}, range(1, 3), b"12", iter([1, 2]))],
    *[([4096, bad], TE) for bad in (None, *NO_INTEGER)],
    *[(bad, LE) for bad in ([], [4096], [4096] * 3, [4096] * 100_000, [0, 0], [4096, 0])],
    *[([4096, bad], WIDE) for bad in (-1, UINT64_MAX + 1, 2**200)],
    *[([4096, bad], LE) for bad in (UINT64_MAX, UINT64_MAX - 1022)],
]
FLAGS: list[tuple[Any, Expected]] = [(bad, TE) for bad in (0, 1, "True", 1.0, [], "")]
WIDE_BLOCKS = (2**63, 2**64, 2**64 + 1, -(2**64), 2**200)
REMOTE_BLOCKS = (-1, 4, 2**31, 2**32, 2**32 + 1, INT64_MAX, -INT64_MAX - 1)
NO_MAP = (1, True, "01", 1.5, [(0, 1)], ((0, 1),), {0}, [], iter(()))


def maps(to: Callable[[Any], Any], refused: Expected) -> list[tuple[Any, Expected]]:
    """Wrong maps from blocks to what `to` makes of other blocks."""
    return [
        (None, AE),
        *[(bad, TE) for bad in NO_MAP],
        *[({bad: to(1)}, TE) for bad in (None, True, 1.0, "0", (0,), float("nan"))],
        *[({0: to(bad)}, TE) for bad in (None, True, 1.0, "1", [1], (1,), float("nan"))],
        *[(wrong, refused) for bad in REMOTE_BLOCKS for wrong in ({0: to(1), bad: to(2)}, {0: to(1), 2: to(bad)})],
        *[(wrong, WIDE) for bad in WIDE_BLOCKS for wrong in ({0: to(1), bad: to(2)}, {0: to(1), 2: to(bad)})],
    ]


BLOCK_MAPS = [
    *maps(lambda block: [3, block], LE),
    *[({0: bad}, TE) for bad in (None, 1, True, (1,), "1", {1}, {1: 1}, range(1), 1.0)],
    ({0: list(range(1_000)) * 100}, LE),
    ({number: [0] for number in range(100_000)}, LE),
]
SWAP_MAPS = [*maps(lambda block: block, MISMATCH), (dict.fromkeys(range(100_000), 0), MISMATCH)]
ARRAYS: list[tuple[Any, Expected]] = [
    *[(np.array([[0, 1]], kind), TE) for kind in ("i8", "u4", "f8")],
    (memoryview(bytes(16)).cast("q", (1, 2)), TE),
]

TABLE: dict[tuple[str, str], list[tuple[Any, Expected]]] = {
    ("allocate_cache", "cache_desc"): ALLOCATED_DESCS,
    ("allocate_cache", "cache_keys"): [
        *KEY_LISTS,
        *[([CacheKey(1, number) for number in numbers], LE) for numbers in (range(100, 105), range(100_000), [1])],
        *[(keys, LE) for keys in ([CacheKey(1, UINT64_MAX)] * 5, [CacheKey(1, 90), CacheKey(9, 1)])],
    ],
    ("allocate_blocks_cache", "cache_desc"): ALLOCATED_DESCS,
    ("allocate_blocks_cache", "blocks_cache_key"): [
        *[(bad, TE) for bad in (1, True, "key", [], [BlocksCacheKey(1)], CacheKey(1, 1), CacheKeyByIdAndIndex(1, 1))],
        (BlocksCacheKey(2, 7), LE),
    ],
    ("deallocate_cache", "cache"): NO_BATCH_CACHES,
    ("deallocate_blocks_cache", "cache"): [*CACHES, (BATCH_CACHE, LE)],
    ("remove_cache_key", "cache_key"): [
        (None, AE),
        *[(bad, TE) for bad in (1, True, "key", [], [CacheKey(1, 1)], BlocksCacheKey(1), CacheKeyByIdAndIndex(1, 1))],
    ],
    ("register_cache", "cache_desc"): REGISTERED_DESCS,
    ("register_cache", "addrs"): ADDRESS_LISTS,
    ("register_cache", "cache_keys"): KEY_LISTS,
    ("register_cache", "remote_accessible"): FLAGS,
    ("register_blocks_cache", "cache_desc"): REGISTERED_DESCS,
    ("register_blocks_cache", "addrs"): ADDRESS_LISTS,
    ("register_blocks_cache", "blocks_cache_key"): [
        (bad, TE) for bad in (1, True, "key", [], [BlocksCacheKey(1)], CacheKey(1, 1), ())
    ],
    ("register_blocks_cache", "remote_accessible"): FLAGS,
    ("unregister_cache", "cache_id"): [*INT64, *[(bad, TE) for bad in ("cache", Built("a cache", lambda b: b.batch))]],
    ("copy_cache", "dst"): [
        *NO_BATCH_CACHES,
        (Built("other tensors", lambda b: b.manager.allocate_cache(desc(4, 256, 3))), LE),
        (Built("small slots", lambda b: b.manager.allocate_cache(desc(4, 127, 2))), LE),
    ],
    ("copy_cache", "src"): [
        *NO_BATCH_CACHES,
        (Built("other tensors", lambda b: b.manager.allocate_cache(desc(4, 256, 1))), LE),
    ],
    ("copy_cache", "dst_batch_index"): [*UINT32, (4, LE), (2**31, LE), (UINT32_MAX, LE)],
    ("copy_cache", "src_batch_index"): [*UINT32, (4, LE), (2**31, LE), (UINT32_MAX, LE)],
    ("copy_cache", "offset"): [*UINT64, (129, LE), (255, LE), (256, LE), (2**63, LE), (UINT64_MAX - 127, LE)],
    ("copy_cache", "size"): [*INT64, (0, LE), (-2, LE), (-INT64_MAX - 1, LE), (257, LE), (INT64_MAX, LE)],
    ("copy_cache", "req_id"): [row for row in UINT64 if row[0] is not None],
    ("copy_blocks", "cache"): [*CACHES, (BATCH_CACHE, LE)],
    ("copy_blocks", "copy_block_info"): [*BLOCK_MAPS, *ARRAYS],
    ("swap_blocks", "src_cache"): [*CACHES, (BATCH_CACHE, MISMATCH), (BLOCKS_CACHE, MISMATCH)],
    ("swap_blocks", "dst_cache"): [*CACHES, (BATCH_CACHE, MISMATCH), (CPU_CACHE, MISMATCH)],
    ("swap_blocks", "src_to_dst"): [*SWAP_MAPS, *ARRAYS],
    ("tensor_views", "cache"): CACHES,
}  # fmt: skip
ROWS = [(call, argument, bad, expected) for (call, argument), rows in TABLE.items() for bad, expected in rows]


@pytest.mark.contract(
    "19.allocate-cache", "19.deallocate-cache", "19.remove-cache-key", "19.copy-cache", "19.copy-cache-range", "20.8",
    "19.allocate-blocks-cache", "19.deallocate-blocks-cache", "19.copy-blocks", "19.swap-blocks",
)  # fmt: skip
@pytest.mark.parametrize(
    ("call", "argument", "bad", "expected"), ROWS, ids=[f"{r[0]}-{r[1]}-{short(r[2])}" for r in ROWS]
)
def test_bad_argument(
    bench: Bench, caplog: pytest.LogCaptureFixture, call: str, argument: str, bad: Any, expected: Expected
) -> None:
    value = bad.make(bench) if isinstance(bad, Built) else bad
    arguments = {**bench.good[call], argument: value}
    with refused(bench.manager, expected, bench.caches, [bench.user]):
        getattr(bench.manager, call)(**arguments)
    if expected is AE:
        for level in ("ERROR", "INFO"):  # with INFO, the arguments are shown before they are checked
            caplog.set_level(level, logger="LLM_DATADIST")
            with pytest.raises(AttributeError, match=rf"^{argument} must not be None$"):
                getattr(bench.manager, call)(**arguments)
    healthy(bench)


def healthy(bench: Bench) -> None:
    """Check that the engine still has its caches and keys, and works."""
    manager = bench.manager
    with raising(LE):
        manager.allocate_cache(desc(), [CacheKey(1, 1)])
    with raising(LE):
        manager.allocate_blocks_cache(desc(), BlocksCacheKey(1, 7))
    manager.copy_cache(bench.other, bench.batch, 0, 1, 0, 128, 5)
    manager.copy_blocks(bench.blocks, {0: [1]})
    manager.swap_blocks(bench.cpu, bench.blocks, {0: 1})
    manager.allocate_cache(desc(), [CacheKey(1, 50), CacheKey(1, 90)])
    manager.allocate_blocks_cache(desc(), BlocksCacheKey(1, 50))


def test_the_good_arguments_are_good(bench: Bench) -> None:
    """Without this, the table above would prove nothing."""
    order = [name for name in bench.good if not name.startswith("deallocate")]
    for name in [*order, "deallocate_cache", "deallocate_blocks_cache"]:
        getattr(bench.manager, name)(**bench.good[name])


def test_every_argument_of_every_call_is_in_the_table(bench: Bench) -> None:
    assert set(TABLE) == {(call, argument) for call, words in bench.good.items() for argument in words}


@pytest.mark.parametrize("call", sorted({name for name, _ in TABLE}))
def test_missing_surplus_and_unknown_arguments(bench: Bench, call: str) -> None:
    good = bench.good[call]
    for values, words in (((), {}), ((), {**good, "no_such_argument": 1}), ((*good.values(), 1, 2, 3), {})):
        with refused(bench.manager, TE, bench.caches, [bench.user]):
            getattr(bench.manager, call)(*values, **words)


# Several things wrong at once: the first check in the stated order decides.
ORDER: list[tuple[str, Callable[[Bench], tuple[Any, ...]], Expected]] = [
    ("allocate_cache", lambda _: ("x", 5), TE),
    ("allocate_cache", lambda _: (int8([0], 0), [5]), TE),
    ("allocate_cache", lambda _: (int8([0], 0), []), LE),
    ("allocate_blocks_cache", lambda _: (int8([0], 0), 5), TE),
    ("register_cache", lambda _: (int8([1], 0), (1,)), TE),
    ("register_cache", lambda _: (int8([1], 1), [], [5]), TE),
    ("register_cache", lambda _: (int8([1], 1), [], (), 1), TE),
    ("register_cache", lambda _: (int8([0], 1), [0, 0]), LE),
    ("copy_cache", lambda _: (5, None, -1), TE),
    ("copy_cache", lambda _: (None, 5), TE),
    ("copy_cache", lambda _: (None, None, -1), VE),
    ("copy_cache", lambda _: (None, None, 0, "0"), TE),
    ("copy_cache", lambda _: (None, None, 0, 0, -1), VE),
    ("copy_cache", lambda _: (None, None, 0, 0, 0, 2**63), VE),
    ("copy_cache", lambda b: (b.blocks, b.batch, -1), VE),
    ("copy_cache", lambda b: (b.blocks, None), AE),
    ("copy_cache", lambda b: (None, b.blocks), LE),
    ("copy_cache", lambda b: (b.other, b.batch, 0, 0, 0, 0, "x"), LE),
    ("copy_cache", lambda b: (b.other, b.batch, 9, 9, 0, 5, -1), VE),
    ("copy_cache", lambda b: (b.other, b.batch, 9, 9, 0, 5, True), TE),
    # The default size is the rest of the slot, which must fit.
    ("copy_cache", lambda b: (b.manager.allocate_cache(desc(4, 255, 2)), b.batch), LE),
    ("copy_cache", lambda b: (b.manager.allocate_cache(desc(4, 100, 2)), b.batch, 0, 1, 40, 101), LE),
    ("copy_blocks", lambda _: (5, None), TE),
    ("copy_blocks", lambda b: (b.batch, {0: 1}), TE),
    ("copy_blocks", lambda b: (b.batch, {0: [99]}), LE),
    ("copy_blocks", lambda b: (b.batch, {}), LE),
    ("copy_blocks", lambda b: (b.batch, None), AE),
    ("swap_blocks", lambda _: ("x", None, None), TE),
    ("swap_blocks", lambda b: (b.batch, "x", None), TE),
    ("swap_blocks", lambda b: (b.batch, b.batch, None), MISMATCH),
    ("swap_blocks", lambda b: (b.blocks, b.blocks, {"0": 1}), TE),
]


@pytest.mark.parametrize(("call", "make", "expected"), ORDER, ids=[f"{row[0]}-{n}" for n, row in enumerate(ORDER)])
def test_the_first_check_decides(
    bench: Bench, call: str, make: Callable[[Bench], tuple[Any, ...]], expected: Expected
) -> None:
    arguments = make(bench)
    with refused(bench.manager, expected, bench.caches, [bench.user]):
        getattr(bench.manager, call)(*arguments)


@pytest.mark.parametrize("number", [-1, 0, 9999, INT64_MAX, -INT64_MAX - 1])
@pytest.mark.parametrize("blocks", [False, True])
def test_handles_with_invented_ids(bench: Bench, number: int, blocks: bool) -> None:
    invented = Cache(number, desc(4, 256, 2), list(bench.blocks.tensor_addrs), bench.manager, False, blocks)
    manager = bench.manager
    expected = Expected("KV_CACHE_NOT_EXIST or PARAM_INVALID", (LLMException,), (*GONE.codes, *LE.codes))
    with refused(manager, expected, bench.caches):
        if blocks:
            manager.copy_blocks(invented, {0: [1]})
        else:
            manager.copy_cache(bench.other, invented)
    with refused(manager, expected, bench.caches):
        manager.tensor_views(invented)
    (manager.deallocate_blocks_cache if blocks else manager.deallocate_cache)(invented)
    healthy(bench)


def test_integers_of_other_kinds_are_judged_like_integers(bench: Bench) -> None:
    """A subclass of int is accepted as an int, except bool."""

    class Number(int):
        """Still an integer."""

    bench.manager.copy_cache(bench.other, bench.batch, Number(1), Number(2), Number(0), Number(16))
    bench.manager.copy_blocks(bench.blocks, {Number(0): [Number(1)]})
    assert CacheDesc(Number(1), [Number(2)], DataType.DT_INT8).size == 2


def test_lists_are_read_under_the_lock_of_the_interpreter() -> None:
    """`raw` reads borrowed items. Without the lock, another thread could change the list meanwhile."""
    binding = Path(__file__).resolve().parents[1] / "crates" / "py" / "src" / "lib.rs"
    assert re.findall(r"^#\[pymodule.*$", binding.read_text(), re.MULTILINE) == ["#[pymodule(gil_used = true)]"]
    assert getattr(sys, "_is_gil_enabled", lambda: True)()


def test_attribute_error_for_none_of_other_calls_names_the_argument(start: Callable[..., LLMDataDist]) -> None:
    dist = LLMDataDist(LLMRole.PROMPT, 1)
    with pytest.raises(AttributeError, match=r"^options must not be None$"):
        dist.init(None)  # type: ignore[arg-type]
    manager = start().cache_manager
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("ge_options", lambda: setattr(LLMConfig(), "ge_options", None)),
        ("cache_desc", lambda: Cache.create_cpu_cache(None, [1])),  # type: ignore[arg-type]
        ("cache_desc", lambda: KvCache.create_cpu_cache(None, [1])),  # type: ignore[arg-type]
        ("the_arg", lambda: check_dict("the_arg", None, int, int)),
        ("cache_key", lambda: manager.check_cache_key(None)),
        ("cache_key", lambda: manager.pull_cache(None, manager.allocate_cache(desc()))),
        ("cache", lambda: manager.pull_cache(CacheKeyByIdAndIndex(2, 1), None)),
    ]
    for name, call in calls:
        with pytest.raises(AttributeError, match=rf"^{name} must not be None$"):
            call()


@pytest.mark.parametrize("what", ["src_blocks", "dst_blocks", "dict value"])
def test_integer_of_numpy_in_a_list_is_refused_with_its_position_and_a_remedy(manager: Any, what: str) -> None:
    cache = manager.allocate_blocks_cache(desc())
    calls = {
        "src_blocks": lambda number: manager.pull_blocks(BlocksCacheKey(2), cache, (0, number), [2, 3]),
        "dst_blocks": lambda number: manager.pull_blocks(BlocksCacheKey(2), cache, [0, 1], [2, number]),
        "dict value": lambda number: manager.copy_blocks(cache, {0: [1, number]}),
    }
    remedy = "; convert it with int(), or a whole array with tolist()"
    for wrong, kind in ((np.int64(3), f"numpy.int64'>{remedy}"), ("3", "str'>")):
        text = f"{what} inner type only support ['int'], but the actual type of element 1 is <class '{kind}"
        with pytest.raises(TypeError, match=f"^{re.escape(text)}$"):
            calls[what](wrong)


def test_integer_of_numpy_in_place_of_a_number_is_refused_with_a_remedy(manager: Any) -> None:
    cache = manager.allocate_cache(desc())
    text = "dst_batch_index only support ['int'], but the actual type is <class 'numpy.int64'>; convert it with int()"
    with pytest.raises(TypeError, match=re.escape(text)):
        manager.copy_cache(cache, cache, np.int64(1))
