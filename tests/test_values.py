"""Value classes: descriptors, keys, memory infos, cluster infos and cache handles. Not for: `test_validators.py`."""

from __future__ import annotations

import copy
import pickle
import socket
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Callable

import pytest

from ids import short
from llm_datadist import (
    BlocksCacheKey,
    Cache,
    CacheDesc,
    CacheKey,
    CacheKeyByIdAndIndex,
    DataType,
    LLMClusterInfo,
    LLMException,
    LLMRole,
    LLMStatusCode,
    MemInfo,
    Memtype,
    Placement,
    _core,
)
from llm_datadist.configs import trans_str_ip
from memory import AE, LE, TE, UINT64_MAX, VE, Expected, raising
from mistakes import NO_INTEGER, outside

if TYPE_CHECKING:
    from collections.abc import Sequence

FP16 = DataType.DT_FLOAT16


def uint(bits: int) -> list[int]:
    return outside(0, 2**bits - 1)


def sint(bits: int) -> list[int]:
    return outside(-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)


Case = tuple[Callable[[Any], Any], Any, Expected]


def table(make: Callable[[Any], Any], *rows: tuple[Sequence[Any], Expected]) -> list[Case]:
    return [(make, bad, expected) for values, expected in rows for bad in values]


BAD_DESC: list[Case] = [
    *table(lambda v: CacheDesc(v, [1, 2], FP16), ([None, *NO_INTEGER], TE), (uint(32), VE)),
    *table(
        lambda v: CacheDesc(1, v, FP16),
        ([None, 1, "12", {1, 2}, range(2), [1, "2"], [1, None], [1, 2.0], (True, 2), [1, True], b"12"], TE),
        ([[], ()], LE),
        ([[2**63, 1], [1, -(2**63) - 1], (1, 2**64), [2**200]], VE),
    ),
    *table(lambda v: CacheDesc(1, [1], v), ([1, "DT_FLOAT16", True, 1.0, Placement.HOST, DataType], TE)),
    *table(lambda v: CacheDesc(1, [1], FP16, v), ([1, 0, True, "DEVICE", FP16, 1.0, Placement], TE)),
    *table(lambda v: CacheDesc(1, [1, 2], FP16, batch_dim_index=v), ([None, *NO_INTEGER], TE), ([-1, 2, 3, 2**31], LE)),
    *table(
        lambda v: CacheDesc(1, [1, 2], FP16, seq_len_dim_index=v),
        ([None, *NO_INTEGER], TE),
        (sint(32), VE),
        ([-2, 2, 3, 2**31 - 1, -(2**31)], LE),
    ),
    *table(lambda v: CacheDesc(1, [1], FP16, kv_tensor_format=v), ([1, True, b"ND", ["ND"]], TE)),
]

REQUEST_KEYS: list[Callable[[Any], Any]] = [
    lambda v: CacheKey(v, 1), lambda v: CacheKey(cluster_id=v, req_id=1), lambda v: CacheKey(1, v),
    lambda v: CacheKey(1, req_id=v), lambda v: CacheKey(1, 2, v), lambda v: CacheKey(1, 2, model_id=v),
    lambda v: CacheKey(1, 2, 3, v), lambda v: CacheKey(1, 2, prefix_id=v),
]  # fmt: skip
BLOCKS_KEYS: list[Callable[[Any], Any]] = [
    BlocksCacheKey, lambda v: BlocksCacheKey(cluster_id=v), lambda v: BlocksCacheKey(prompt_cluster_id=v),
    lambda v: BlocksCacheKey(1, v), lambda v: BlocksCacheKey(1, model_id=v),
]  # fmt: skip
BAD_KEY: list[Case] = [
    *[case for make in REQUEST_KEYS for case in table(make, ([None, *NO_INTEGER], TE), (uint(64), VE))],
    *table(lambda v: CacheKey(prompt_cluster_id=v, req_id=1), (["1", True], TE), ([-1, 2**64], VE)),
    *[case for make in BLOCKS_KEYS for case in table(make, (NO_INTEGER, TE), (uint(64), VE))],
]

BAD_ID_KEY: list[Case] = [
    *table(lambda v: CacheKeyByIdAndIndex(v, 1), ([None, *NO_INTEGER], TE), (uint(64), VE)),
    *table(lambda v: CacheKeyByIdAndIndex(1, v), ([None, *NO_INTEGER], TE), (sint(64), VE)),
    *table(lambda v: CacheKeyByIdAndIndex(1, 1, v), ([None, *NO_INTEGER], TE), (uint(32), VE)),
]

BAD_MEM_INFO: list[Case] = [
    *table(lambda v: MemInfo(v, 1, 1), ([0, 1, True, "MEM_TYPE_DEVICE", Placement.DEVICE], TE)),
    *table(lambda v: MemInfo(Memtype.MEM_TYPE_HOST, v, 1), (NO_INTEGER, TE)),
    *table(lambda v: MemInfo(Memtype.MEM_TYPE_HOST, 1, v), (NO_INTEGER, TE)),
]

HOST_DESC = CacheDesc(2, [3, 4], DataType.DT_INT8, Placement.HOST)
BAD_CPU_CACHE: list[Case] = [
    *table(lambda v: Cache.create_cpu_cache(v, [1, 2]), ([1, "x", [], True], TE), ([None], AE)),
    *table(
        lambda v: Cache.create_cpu_cache(HOST_DESC, v),
        ([None, (1, 2), "12", {1, 2}, range(1, 3), 1, [1, "2"], [1, None], [1, 2.0], [1, True]], TE),
        ([[], [1], [1, 2, 3]], LE),
    ),
    *table(lambda v: Cache.create_cpu_cache(CacheDesc(2, [3, 4], FP16, v), [1, 2]), ([Placement.DEVICE], LE)),
    *table(lambda v: Cache(v, HOST_DESC, [1, 2], None, False, False), ([None, *NO_INTEGER], TE), (sint(64), VE)),
]


BAD_CLUSTER: list[Case] = [
    *table(lambda v: setattr(LLMClusterInfo(), "remote_cluster_id", v), ([None, *NO_INTEGER], TE), (uint(64), VE)),
    *table(lambda v: setattr(LLMClusterInfo(), "remote_role_type", v), ([1.0, "PROMPT", [1], True], TE)),
    *[
        case
        for side in ("local", "remote")
        for append in [lambda *args, side=side: getattr(LLMClusterInfo(), f"append_{side}_ip_info")(*args)]
        for case in [
            *table(lambda v, a=append: a(v, 1), ([None, True, 1.0, b"1.2.3.4", [1]], TE)),
            *table(lambda v, a=append: a("1.2.3.4", v), ([None, *NO_INTEGER], TE), (uint(16), VE)),
            *table(lambda v, a=append: a("not an address", v), ([-1, 65536], VE), (["1"], TE)),
        ]
    ],
]


@pytest.mark.contract("20.3", "20.4", "19.cache-desc", "19.cache")
@pytest.mark.parametrize(
    ("make", "bad", "expected"),
    [*BAD_DESC, *BAD_KEY, *BAD_ID_KEY, *BAD_MEM_INFO, *BAD_CPU_CACHE, *BAD_CLUSTER],
)
def test_bad_argument(make: Callable[[Any], Any], bad: Any, expected: Expected) -> None:
    with raising(expected):
        make(bad)


@pytest.mark.contract("19.cache-desc")
def test_desc_keeps_what_it_was_given() -> None:
    shape = [4, 16, 8]
    made = CacheDesc(2, shape, FP16, Placement.HOST, 1, 2, "ND")
    assert (made.num_tensors, made.data_type, made.placement) == (2, FP16, Placement.HOST)
    assert made.shape is shape
    assert (made.batch_dim, made.batch_size, made.seq_len_dim_index, made.kv_tensor_format) == (1, 16, 2, "ND")
    assert made.size == 4 * 16 * 8 * 2
    for name in ("num_tensors", "shape", "data_type", "placement", "batch_dim", "batch_size", "size"):
        with pytest.raises(AttributeError):
            setattr(made, name, 1)


def test_desc_defaults_keywords_and_text() -> None:
    made = CacheDesc(num_tensors=0, shape=[2, 3], data_type=DataType.DT_INT8)
    assert (made.placement, made.batch_dim, made.batch_size) == (Placement.DEVICE, 0, 2)
    assert (made.seq_len_dim_index, made.kv_tensor_format) == (-1, None)
    assert made.size == 6
    assert made._is_blocks is False
    text = (
        "CacheDesc(num_tensors=0, shape=[2, 3], data_type=DataType.DT_INT8, placement=Placement.DEVICE, "
        "batch_dim_index=0, seq_len_dim_index=-1,kv_tensor_format=None)"
    )
    assert repr(made) == str(made) == text


@pytest.mark.parametrize(
    ("shape", "kind"),
    [
        *[(shape, FP16) for shape in ([0], [2, 0], [2, -1], [-2, -2], [2**63 - 1])],
        *[([2**32, other], DataType.DT_INT8) for other in (2**31, 2**32, 2**32 + 1)],
        ([2**62], DataType.DT_STRING),
        ([3, 2**62 // 3 + 1, 4], DataType.DT_INT8),
        ([1], None),
    ],
)
def test_desc_size_that_does_not_exist(shape: list[int], kind: DataType | None) -> None:
    made = CacheDesc(1, shape, kind)
    assert made.data_type is kind
    for _ in range(2):
        with raising(LE):
            _ = made.size


def test_update_dim_refreshes_size_but_not_batch_size() -> None:
    shape = [2, 3]
    made = CacheDesc(1, shape, FP16)
    assert made.size == 12
    made.update_dim(1, 5)
    assert shape == [2, 5]
    assert made.size == 20
    made.update_dim(0, 7)
    assert made.size == 70
    assert made.batch_size == 2
    with pytest.raises(TypeError):
        CacheDesc(1, (2, 3), FP16).update_dim(0, 1)


def test_desc_checks_in_the_stated_order() -> None:
    for args, words, expected in [
        ((-1, "bad", None, "bad"), {}, VE),
        ((1, [2**63], "bad"), {}, TE),
        ((1, [], FP16), {"kv_tensor_format": 5}, TE),
        ((1, [], FP16), {"seq_len_dim_index": 2**31}, VE),
        ((1, [2**63], FP16), {"batch_dim_index": 1}, LE),
        ((1, [2**63], FP16), {"seq_len_dim_index": 1}, LE),
    ]:
        with raising(expected):
            CacheDesc(*args, **words)


def test_keys_are_equal_by_identity_only() -> None:
    for make in (lambda: CacheKey(1, 2), lambda: BlocksCacheKey(1), lambda: CacheKeyByIdAndIndex(1, 2)):
        one, other = make(), make()
        assert one == one  # noqa: PLR0124  (that is the point)
        assert one != other
        assert len({one, other}) == 2


def test_key_by_id_and_index() -> None:
    made = CacheKeyByIdAndIndex(1, 2)
    assert (made.cluster_id, made.cache_id, made.batch_index) == (1, 2, 0)
    assert repr(made) == "CacheKeyByIdAndIndex(cluster_id=1, cache_id=2, batch_index=0)"
    extreme = CacheKeyByIdAndIndex(UINT64_MAX, -(2**63), 2**32 - 1)
    assert (extreme.cache_id, extreme.batch_index) == (-(2**63), 2**32 - 1)
    assert CacheKeyByIdAndIndex(cluster_id=1, cache_id=2**63 - 1, batch_index=4).batch_index == 4


def test_mem_info() -> None:
    made = MemInfo(Memtype.MEM_TYPE_DEVICE, 1, 2)
    assert (made.mem_type, made.addr, made.size) == (Memtype.MEM_TYPE_DEVICE, 1, 2)
    assert str(made) == repr(made) == "MemInfo(mem_type=Memtype.MEM_TYPE_DEVICE, addr=1, size=2)"
    with pytest.raises(AttributeError):
        made.addr = 5


def test_cluster_info() -> None:
    info = LLMClusterInfo()
    assert (info.remote_cluster_id, info.remote_role_type) == (None, None)
    assert (list(info.local_ip_info_list), list(info.remote_ip_info_list)) == ([], [])
    info.remote_cluster_id = UINT64_MAX
    assert info.remote_cluster_id == UINT64_MAX
    for role in (LLMRole.PROMPT, 2, None):
        info.remote_role_type = role
        assert info.remote_role_type == role
    info.append_local_ip_info("1.2.3.4", 0)
    info.append_local_ip_info(5, 65535)
    info.append_remote_ip_info("127.0.0.1", 26000)
    assert list(info.local_ip_info_list) == [(67305985, 0), (5, 65535)]
    assert list(info.remote_ip_info_list) == [(16777343, 26000)]


@pytest.mark.parametrize("text", ["1.2.3.4", "127.0.0.1", "0.0.0.1", "255.255.255.255", "127.1", "10.1.257", "7"])
def test_text_addresses_follow_inet_aton(text: str) -> None:
    assert trans_str_ip(text) == int.from_bytes(socket.inet_aton(text), "little")


@pytest.mark.parametrize("text", ["256.1.1.1", "no address", "", "1.2.3.4.5", "::1", "1.2.3.4\0", "\ud800"])
def test_text_that_is_no_address(text: str) -> None:
    with pytest.raises(RuntimeError) as caught:
        trans_str_ip(text)
    assert repr(text) in str(caught.value)
    info = LLMClusterInfo()
    if text == "::1":
        return  # an IPv6 address is valid here: tests/test_config_links.py
    with pytest.raises(RuntimeError):
        info.append_local_ip_info(text, 1)
    assert list(info.local_ip_info_list) == []


@pytest.mark.contract("19.cache")
def test_cpu_cache_handle() -> None:
    made = Cache.create_cpu_cache(HOST_DESC, [4096, 8192])
    assert made.cache_id == -1
    assert made.is_blocks_cache is True
    assert made.tensor_addrs == [4096, 8192]
    assert made.cache_desc is HOST_DESC
    assert str(made) == repr(made) == "Cache(cache_id = -1, device_tensor_addrs = 2, is_blocks_cache = True)"
    # The checks are made in the documented order.
    device = CacheDesc(2, [3, 4], FP16)
    with raising(TE):
        Cache.create_cpu_cache(device, (1,))
    with pytest.raises(LLMException, match=r"(?i)host"):
        Cache.create_cpu_cache(device, [1])


def test_a_cache_made_by_hand_names_what_its_attributes_say(manager: Any) -> None:
    desc = CacheDesc(1, [4, 100], DataType.DT_INT8)
    batch, blocks = manager.allocate_cache(desc), manager.allocate_blocks_cache(desc)
    array = manager.tensor_views(blocks)[0].numpy()
    array[:] = [[1], [2], [3], [4]]
    twin = Cache(blocks.cache_id, desc, [1, 2], manager, False, True)
    assert repr(twin) == f"Cache(cache_id = {blocks.cache_id}, device_tensor_addrs = 2, is_blocks_cache = True)"
    manager.copy_blocks(twin, {0: [3]})
    assert array[3].tolist() == [1] * 100
    # The kind of a handle is that of its constructor. A cache of another manager does not exist here.
    with pytest.raises(LLMException, match="continuous"):
        manager.copy_blocks(Cache(blocks.cache_id, desc, [], manager, False, False), {0: [3]})
    other = type(manager)(manager._datadist, {})
    other._datadist = SimpleNamespace(number=manager._datadist.number + 1)
    stranger = Cache(blocks.cache_id, desc, [], other, False, True)
    with pytest.raises(LLMException, match="another engine"):
        manager.copy_blocks(stranger, {0: [3]})
    with pytest.raises(LLMException, match="continuous"):
        manager.copy_blocks(batch, {0: [1]})
    manager.deallocate_blocks_cache(twin)
    with pytest.raises(LLMException) as gone:
        manager.copy_blocks(blocks, {0: [3]})
    assert gone.value.status_code is LLMStatusCode.LLM_KV_CACHE_NOT_EXIST


def test_addresses_are_the_same_list_until_the_cache_goes(manager: Any) -> None:
    cache = manager.allocate_cache(CacheDesc(3, [4, 100], DataType.DT_INT8))
    addrs = cache.tensor_addrs
    assert addrs is cache.tensor_addrs
    assert addrs == [view.address for view in manager.tensor_views(cache)]
    manager.deallocate_cache(cache)
    assert (cache.tensor_addrs, len(addrs)) == ([], 3)
    unread = manager.allocate_cache(CacheDesc(3, [4, 100], DataType.DT_INT8))
    manager.deallocate_cache(unread)
    assert unread.tensor_addrs == []


@pytest.mark.parametrize(
    "value",
    [
        CacheDesc(2, [8, 1024], DataType.DT_FLOAT16, Placement.HOST, 1, 0, "ND"),
        CacheDesc(1, (4,), None),
        CacheKey(1, 2, 3, 4),
        BlocksCacheKey(1, 7),
        BlocksCacheKey(prompt_cluster_id=3),
        CacheKeyByIdAndIndex(1, 2, 3),
    ],
    ids=short,
)
def test_descriptors_and_keys_can_be_copied_and_pickled(value: Any) -> None:
    for other in (copy.copy(value), copy.deepcopy(value), pickle.loads(pickle.dumps(value))):  # noqa: S301  (our own)
        assert type(other) is type(value)
        assert repr(other) == repr(value)
        assert vars(other) == vars(value)


class Shy(int):
    """An integer whose `repr` raises."""

    def __str__(self) -> str:
        raise KeyError("no text")

    __repr__ = __str__


def test_texts_of_errors_are_short_and_quiet(capfd: Any) -> None:
    class Long(int):
        """An integer with a long `repr`."""

        def __str__(self) -> str:
            return "9" * 10**6

    for value in (10**5000, -(10**5000), Shy(2**64), Long(2**64)):
        for check in (_core.check_uint64, _core.check_int32, _core.check_uint8):
            with pytest.raises(ValueError, match=r"^name = .* is outside ") as caught:
                check("name", value)
            assert len(str(caught.value)) < 300
        with pytest.raises(LLMException) as refused:
            _core.check_option("link_total_time", value)
        assert len(str(refused.value)) < 300
    assert capfd.readouterr().err == ""
