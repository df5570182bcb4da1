"""`KeeperStorage` over a real keeper and a host pool in plain memory, without SGLang.

`integration-tests/store` runs it inside the real package.
"""

from __future__ import annotations

import hashlib
import importlib
import logging
import sys
import threading
import time
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest

from llm_datadist import InvalidArgument, Keeper, Store
from llm_datadist.integrations import store_settings
from peers import eventually, meanwhile
from stand_ins import put

if TYPE_CHECKING:
    from collections.abc import Iterator
    from pathlib import Path

PAGE, HEADS, LAYERS = 4, 2, 3
PIECE = PAGE * HEADS * LAYERS * 16
LIMIT = 30.0


class HiCacheStorage:
    """What SGLang's class keeps."""

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        self.mem_pool_host = mem_pool_host

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        self.registered_pools = {host_pool_name: host_pool}


@dataclass
class Config:
    extra_config: dict[str, Any]
    tp_rank: int = 0
    tp_size: int = 1
    pp_rank: int = 0
    pp_size: int = 1
    attn_cp_rank: int = 0
    attn_cp_size: int = 1
    dcp_rank: int = 0
    dcp_size: int = 1
    dp_rank: int = 0
    is_mla_model: bool = False
    should_split_heads: bool = False
    logical_page_size: int | None = None
    model_name: str | None = "m"


@dataclass
class Pool:
    """A host pool of 64 pages, whose pages have pieces of the sizes ``pieces`` in tensors of their own."""

    pieces: tuple[int, ...] = (PIECE, PIECE)
    dtype: str = "torch.bfloat16"
    layout: str = "page_first"
    page_size: int = PAGE
    start_layer: int | None = 0
    end_layer: int | None = LAYERS
    head_num: int = HEADS
    head_dim: int = 8
    pages: list[np.ndarray] = field(init=False)

    def __post_init__(self) -> None:
        self.pages = [np.zeros((64, size), np.uint8) for size in self.pieces]

    def get_page_buffer_meta(self, indices: Any) -> tuple[list[int], list[int]]:
        rows = [int(at) // self.page_size for at in indices[:: self.page_size]]
        addresses = [int(each[row].ctypes.data) for row in rows for each in self.pages]
        return addresses, list(self.pieces) * len(rows)

    def fill(self, row: int, seed: int) -> None:
        for piece, each in enumerate(self.pages):
            each[row] = np.frombuffer(hashlib.shake_128(b"%d %d" % (seed, piece)).digest(each.shape[1]), np.uint8)

    def page(self, row: int) -> list[bytes]:
        return [each[row].tobytes() for each in self.pages]


def indices(*rows: int) -> np.ndarray:
    return np.concatenate([np.arange(row * PAGE, (row + 1) * PAGE) for row in rows])


def key(number: int) -> str:
    return hashlib.sha256(b"%d" % number).hexdigest()


KEYS = [key(number) for number in range(8)]


@pytest.fixture(scope="module")
def module() -> Iterator[Any]:
    """The adapter, imported over stand-ins of SGLang and torch."""
    modules: dict[str, dict[str, Any]] = {name: {} for name in ("sglang", "sglang.srt", "sglang.srt.mem_cache")}
    modules["sglang.srt.mem_cache.hicache_storage"] = {"HiCacheStorage": HiCacheStorage}
    modules["torch"] = {"arange": np.arange}
    with pytest.MonkeyPatch.context() as patch:
        put(patch, modules)
        patch.setattr(store_settings, "version", lambda _: "0.5.23")
        yield importlib.import_module("llm_datadist.integrations.sglang")
        del sys.modules["llm_datadist.integrations.sglang"]


class Opener:
    """Opens storages as SGLang does, and closes them."""

    def __init__(self, module: Any, socket: Path) -> None:
        self._module, self._socket = module, socket
        self.opened: list[Any] = []

    def config(self, options: dict[str, Any], **config: Any) -> Config:
        ours = {"socket": str(self._socket), "revision": "r", "timeout_ms": 2000, **options}
        extra = {"backend_name": "b", "module_path": "p", "class_name": "c", "interface_v1": 1, **ours}
        return Config({name: value for name, value in extra.items() if value is not None}, **config)

    def make(self, options: dict[str, Any] | None = None, **config: Any) -> Any:
        self.opened.append(self._module.KeeperStorage(self.config(options or {}, **config), {}))
        return self.opened[-1]

    def __call__(self, pool: Pool | None = None, options: dict[str, Any] | None = None, **config: Any) -> Any:
        made = self.make(options, **config)
        pool = pool or Pool()
        made.register_mem_pool_host(pool)
        made.register_mem_host_pool_v2(pool, "kv")
        return made


@pytest.fixture
def without_keeper(module: Any, socket: Path) -> Iterator[Opener]:
    """Opens servers or tiers. No keeper runs unless the test starts one."""
    opener = Opener(module, socket)
    yield opener
    for each in opener.opened:
        each.close()


@pytest.fixture
def storage(keeper: Keeper, without_keeper: Opener) -> Opener:
    """The same while a keeper runs."""
    assert keeper.slots
    return without_keeper


@pytest.fixture
def server(storage: Opener) -> Any:
    return storage()


@pytest.mark.parametrize("pieces", [(PIECE, PIECE), (PIECE,), (PIECE, PIECE // 2), (64,) * 6, (96, 32) * 3])
def test_pages_are_found_by_another_server(storage: Opener, pieces: tuple[int, ...]) -> None:
    pool = Pool(pieces)
    for row in range(4):
        pool.fill(row, row)
    first = storage(pool)
    assert first.batch_exists(KEYS[:4]) == 0
    assert first.batch_set_v1(KEYS[:4], indices(0, 1, 2, 3)) == [True] * 4
    assert first.batch_set_v1(KEYS[:4], indices(0, 1, 2, 3)) == [True] * 4  # they are there
    first.close()
    other = Pool(pieces)
    second = storage(other)
    assert second.batch_exists(KEYS) == 4
    assert second.exists(KEYS[3])
    assert not second.exists(KEYS[4])
    assert second.batch_get_v1(KEYS[:4], indices(9, 3, 8, 2)) == [True] * 4
    assert [other.page(row) for row in (9, 3, 8, 2)] == [pool.page(row) for row in range(4)]


def test_a_prefix_ends_at_the_first_page_that_is_missing(storage: Opener) -> None:
    pool = Pool()
    server = storage(pool)
    pool.fill(5, 5)
    server.batch_set_v1([KEYS[0], KEYS[2]], indices(5, 5))
    assert server.batch_exists(KEYS[:3]) == 1
    assert server.batch_get_v1(KEYS[:3], indices(1, 2, 3)) == [True, False, True]
    assert pool.page(1) == pool.page(3) == pool.page(5)


def test_a_page_without_one_of_its_pieces_is_missing(server: Any) -> None:
    server.batch_set_v1(KEYS[:2], indices(0, 1))
    store, pieces = server._pages._stores[0]
    assert pieces == [0, 1]
    assert store.drop([hashlib.sha224(KEYS[0].encode()).digest()[:27] + b"\x01"]) == 1
    assert server.batch_exists(KEYS[:2]) == 0
    assert server.batch_get_v1(KEYS[:2], indices(0, 1)) == [False, True]


OTHERS: list[dict[str, Any]] = [
    {"options": {"revision": "s"}},
    {"model_name": "n"},
    {"pool": Pool(dtype="torch.float16")},
    {"pool": Pool(layout="page_head")},
    {"pool": Pool((PIECE, PIECE, PIECE))},
    {"pool": Pool(start_layer=1)},
    {"pool": Pool(end_layer=LAYERS + 1)},
    {"pool": Pool(head_num=HEADS * 2, head_dim=4)},
    {"pool": Pool(head_dim=4)},
    {"tp_size": 2},
    {"tp_rank": 1, "tp_size": 2},
    {"pp_size": 2},
    {"attn_cp_size": 2},
    {"dcp_size": 2},
    {"logical_page_size": PAGE * 2},
]


@pytest.mark.parametrize("other", OTHERS, ids=str)
def test_servers_whose_pages_differ_share_nothing(storage: Opener, other: dict[str, Any]) -> None:
    storage().batch_set_v1(KEYS[:1], indices(0))
    assert storage().batch_exists(KEYS[:1]) == 1
    assert storage(**other).batch_exists(KEYS[:1]) == 0


def test_kinds_of_8_bit_floats_share_nothing(storage: Opener, monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang keeps all of them as bytes, and its option says which."""
    context: Any = ModuleType("sglang.srt.runtime_context")
    monkeypatch.setitem(sys.modules, context.__name__, context)

    def found(kind: str) -> int:
        context.get_model = lambda: SimpleNamespace(kv_cache_dtype=kind)
        server = storage(Pool(dtype="torch.uint8"))
        there = server.batch_exists(KEYS[:1])
        server.batch_set_v1(KEYS[:1], indices(0))
        return int(there)

    assert [found(kind) for kind in ("fp8_e4m3", "fp8_e5m2", "auto")] == [0] * 3
    assert [found(kind) for kind in ("fp8_e4m3", "fp8_e5m2", "auto")] == [1] * 3


def test_ranks_that_have_the_same_pages_share_them(storage: Opener) -> None:
    storage(is_mla_model=True, tp_size=2).batch_set_v1(KEYS[:1], indices(0))
    assert storage(is_mla_model=True, tp_rank=3, tp_size=4).batch_exists(KEYS[:1]) == 1
    storage(dp_rank=0).batch_set_v1(KEYS[1:2], indices(0))
    assert storage(dp_rank=1).batch_exists(KEYS[1:2]) == 1


def test_another_version_of_sglang_shares_nothing_and_is_warned_about(
    storage: Opener, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    storage().batch_set_v1(KEYS[:1], indices(0))
    assert caplog.records == []
    monkeypatch.setattr(store_settings, "version", lambda _: "0.5.24")
    assert storage().batch_exists(KEYS[:1]) == 0
    assert "was not tested with sglang 0.5.24; tested: 0.5.23" in caplog.text


@pytest.mark.parametrize(
    ("options", "config", "text"),
    [
        (
            {"socket": None},
            {},
            "options of KeeperStorage: .*missing required field `socket`; allowed: socket, revision",
        ),
        ({"revision": None}, {}, "missing required field `revision`"),
        ({"revision": ""}, {}, "revision"),
        ({"sockets": "k"}, {}, "contains unknown field `sockets`"),
        ({"timeout_ms": 0}, {}, r"Expected `int` >= 1 - at `\$.timeout_ms`"),
        ({"timeout_ms": "5"}, {}, "timeout_ms"),
        ({"interface_v1": 0}, {}, "interface_v1=0 is not supported"),
        ({"interface_v1": None}, {}, "interface_v1=None is not supported"),
        ({}, {"should_split_heads": True}, "tp_lcm_size"),
        ({}, {"model_name": None}, "model must be known"),
        ({}, {"pool": Pool(())}, "a page has 0 pieces, and may have 1 to 256"),
        ({}, {"pool": Pool((8,) * 257)}, "a page has 257 pieces"),
        ({}, {"pool": Pool(start_layer=None)}, "start_layer must be known"),
        ({}, {"pool": Pool(end_layer=None)}, "end_layer must be known"),
        ({}, {"pool": Pool(dtype="torch.uint8")}, "dtype must be known"),
    ],
)
def test_bad_options_are_refused(storage: Opener, options: dict[str, Any], config: dict[str, Any], text: str) -> None:
    with pytest.raises(ValueError, match=text):
        storage(config.pop("pool", None), options, **config)


def test_a_keeper_with_smaller_values_is_refused(socket: Path, without_keeper: Opener) -> None:
    with Keeper(memory="1MiB", socket=socket, value=4096), pytest.raises(InvalidArgument, match="4096"):
        without_keeper(Pool((4096, 8192)))
    assert without_keeper.opened[0].batch_exists(KEYS) == 0


@pytest.mark.parametrize("name", ["swa", "mamba", "draft"])
def test_other_host_pools_are_refused(storage: Opener, name: str) -> None:
    with pytest.raises(ValueError, match=f"host pool '{name}' is not supported"):
        storage().register_mem_host_pool_v2(Pool(), name)


def test_pages_of_another_form_are_misses(storage: Opener, caplog: pytest.LogCaptureFixture) -> None:
    pool = Pool()
    server = storage(pool)
    pool.pieces = (PIECE, PIECE // 2)
    for _ in range(2):
        assert server.batch_set_v1(KEYS[:2], indices(0, 1)) == [False, False]
        assert server.batch_get_v1(KEYS[:2], indices(0, 1)) == [False, False]
    pool.pieces = (PIECE, PIECE)
    assert server.batch_get_v1(KEYS[:2], indices(0)) == [False, False]
    assert sum("pages have pieces" in record.getMessage() for record in caplog.records) == 2


def test_without_a_keeper_nothing_is_found_and_the_log_says_so_once(
    socket: Path, without_keeper: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    server = without_keeper()
    for _ in range(3):
        assert server.batch_exists(KEYS) == 0
        assert server.batch_get_v1(KEYS[:2], indices(0, 1)) == [False, False]
        assert server.batch_set_v1(KEYS[:2], indices(0, 1)) == [False, False]
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert f"the keeper at {socket} is away" in caplog.text


def test_a_keeper_that_has_come_back_is_used_again(
    socket: Path, without_keeper: Opener, caplog: pytest.LogCaptureFixture
) -> None:
    server = without_keeper()
    server.batch_set_v1(KEYS[:1], indices(0))
    with Keeper(memory="1MiB", socket=socket, value="4KiB"):
        eventually(lambda: server.batch_set_v1(KEYS[:1], indices(0)) == [True])
        assert server.batch_exists(KEYS[:1]) == 1
    assert server.batch_exists(KEYS[:1]) == 0
    assert "is away" in caplog.messages[0]
    assert "is back" in caplog.messages[1]


class Silent:
    """A store whose keeper does not answer: `put` ends at its time limit."""

    def __init__(self) -> None:
        self.asked: list[float] = []

    def put(self, _keys: list[bytes], values: list[Any], timeout: float) -> list[bool]:
        self.asked.append(timeout)
        end = time.monotonic() + timeout
        while time.monotonic() <= end:
            time.sleep(timeout / 10)
        return [False] * len(values)

    def stats(self, *, keeper: bool) -> dict[str, Any]:
        assert not keeper
        return {"refused": None, "misses_away": 0, "puts_away": len(self.asked)}

    def close(self) -> None:
        pass


def test_calls_have_one_time_limit_for_all_of_their_parts(storage: Opener) -> None:
    server = storage(Pool((64,) * 130), {"timeout_ms": 200})
    silent = Silent()
    pages = server._pages
    pages._stores = [(silent, pieces) for _, pieces in pages._stores]
    assert server.batch_set_v1(KEYS * 8, indices(*range(64))) == [False] * 64  # 8,320 pieces: three parts
    assert len(silent.asked) <= 1  # none, if the machine is so slow that the time is over before
    assert max(silent.asked, default=0) <= 0.2


def test_an_exception_of_the_store_is_a_miss(server: Any, caplog: pytest.LogCaptureFixture) -> None:
    for store, _ in server._pages._stores:
        store.close()
    assert server.batch_exists(KEYS) == 0
    assert server.batch_get_v1(KEYS[:1], indices(0)) == [False]
    assert server.batch_set_v1(KEYS[:1], indices(0)) == [False]
    assert sum("Closed" in record.getMessage() for record in caplog.records) == 1


def test_batches_may_be_larger_than_a_call_of_the_store(keeper: Keeper, socket: Path, storage: Opener) -> None:
    keeper.close()
    with Keeper(memory="16MiB", socket=socket, value=64):
        pool = Pool((64,) * 256)
        for row in range(20):
            pool.fill(row, row)
        server = storage(pool)
        keys = [key(number) for number in range(20)]
        assert server.batch_set_v1(keys, indices(*range(20))) == [True] * 20
        assert server.batch_exists(keys) == 20
        assert server.batch_get_v1(keys, indices(*range(20, 40))) == [True] * 20
        assert [pool.page(row) for row in range(20, 40)] == [pool.page(row) for row in range(20)]


def test_the_start_of_a_chain_outlives_its_end(socket: Path, without_keeper: Opener) -> None:
    with Keeper(memory=64 * 4096, socket=socket, value=4096):
        server = without_keeper(Pool((64,) * 4))
        server.batch_set_v1(KEYS, indices(*range(8)))
        server.batch_set_v1([key(number) for number in range(100, 111)], indices(*range(11)))
        assert server.batch_exists(KEYS) == 5


def test_cleared_pages_are_gone_for_this_server_only(storage: Opener) -> None:
    server, other = storage(), storage()
    server.batch_set_v1(KEYS[:2], indices(0, 1))
    assert server.clear()
    assert server.batch_exists(KEYS) == 0
    assert server.batch_set_v1(KEYS[:1], indices(0)) == [True]
    assert (server.batch_exists(KEYS), other.batch_exists(KEYS)) == (1, 2)
    assert server.clear()
    assert server.batch_exists(KEYS) == 0
    assert storage().batch_exists(KEYS) == 2


def test_ranks_with_the_same_pages_have_none_after_a_clear(storage: Opener, caplog: pytest.LogCaptureFixture) -> None:
    """Only one of them writes. The others would look for its pages in namespaces of their own."""
    ranks = [storage(is_mla_model=True, tp_rank=rank, tp_size=2) for rank in range(2)]
    ranks[0].batch_set_v1(KEYS[:1], indices(0))
    assert [rank.clear() for rank in ranks] == [False, False]
    assert ranks[0].batch_set_v1(KEYS[1:2], indices(0)) == [False]
    assert [rank.batch_exists(KEYS[:1]) for rank in ranks] == [0, 0]
    assert sum("attach the storage with another revision" in message for message in caplog.messages) == 2
    assert storage(is_mla_model=True).clear(), "a single rank"


def test_three_threads_use_a_storage_until_it_is_closed(storage: Opener) -> None:
    pool = Pool()
    server = storage(pool)
    for row in range(8):
        pool.fill(row, row)
    expected = [pool.page(row) for row in range(8)]
    found_all = threading.Event()

    def get() -> None:
        done = server.batch_get_v1(KEYS, indices(*range(8, 16)))
        assert all(not good or pool.page(row + 8) == expected[row] for row, good in enumerate(done))

    def exists() -> None:
        if server.batch_exists(KEYS) == 8:
            found_all.set()

    with meanwhile(get, exists, lambda: server.batch_set_v1(KEYS, indices(*range(8)))):
        assert found_all.wait(LIMIT)
        server.clear()
        server.close()
    assert server.batch_exists(KEYS) == 0


def test_generic_calls_find_and_store_nothing(server: Any) -> None:
    assert server.get("k") is None
    assert server.batch_get(KEYS) == [None] * 8
    assert server.set("k", b"") is False
    assert server.batch_set(KEYS, []) is False
    assert server.get_stats() is None
    assert server.batch_exists([]) == 0
    server.close()
    server.close()


def test_a_pool_that_is_registered_again_replaces_the_first_one(server: Any, socket: Path) -> None:
    server.register_mem_pool_host(Pool())
    assert server.batch_set_v1(KEYS[:1], indices(0)) == [True]
    with Store(socket, namespace="n", value=4096) as store:
        eventually(lambda: store.stats()["keeper"]["clients"] == 2)  # the keeper notes an end a little later


def test_a_storage_without_a_pool_finds_nothing(without_keeper: Opener) -> None:
    server = without_keeper.make()
    assert server.batch_exists(KEYS) == 0
    assert server.clear()
    server.close()
