"""The acceptance checklist (python-api.md §20), lines 16 to 20: keys, repeated init, validators."""

from __future__ import annotations

from typing import Any, Callable

import pytest

import llm_datadist
from conftest import PAGE, options
from llm_datadist import (
    CacheKeyByIdAndIndex,
    LLMDataDist,
    LLMException,
    LLMStatusCode,
    Placement,
    RegisterMemStatus,
)
from memory import (
    TE,
    UINT32_MAX,
    UINT64_MAX,
    UserTensors,
    contents,
    desc,
    fill,
    raising,
)
from memory import same as same_bytes
from mistakes import coded
from peers import GONE, Ends, by_request, code, equal, pattern
from two_modes import (
    CACHE_MANAGER,
    KV_OPTIONS,
    MODES,
    SUCCESS,
    Pair,
    synchronizer,
)

INVALID = LLMStatusCode.LLM_PARAM_INVALID
OVER = coded(LLMStatusCode.LLM_ENGINE_FINALIZED)


@pytest.fixture(params=MODES)
def pair(ends: Ends, request: pytest.FixtureRequest) -> Pair:
    """Two linked ends in each mode."""
    return Pair(request.param, ends)


# -- 16 --------------------------------------------------------------------------------------------------------------


@pytest.mark.contract("20.16", "19.double-reference", "19.pulls-and-keys")
def test_20_16_pulls_and_keys(pair: Pair) -> None:
    if pair.mode == CACHE_MANAGER:
        puller, owner, manager = pair.near, pair.far, "cache_manager"
    else:
        puller, owner, manager = pair.far, pair.near, "kv_cache_manager"
    pull = puller.pull_cache if manager == "cache_manager" else puller.pull_kv
    remove = owner.remove_key if manager == "cache_manager" else owner.remove_key_kv
    let_go = owner.deallocate if manager == "cache_manager" else owner.deallocate_kv
    cluster = 2 if owner is pair.far else 1
    key = [by_request(cluster, number) for number in range(4)]
    free = owner.used()
    pair.allocate(owner, "o", 3, 64, 2, keys=key[:3], seed=5)
    pair.allocate(puller, "p", 1, 64, 2)
    given = pattern(5, 2, 3, 64)

    pull(key[0], "p")
    assert equal(puller.read("p"), [tensor[:1] for tensor in given])
    assert code(pull, key[0], "p") == GONE, "a pull consumes its key"
    remove(key[0])
    let_go("o")
    let_go("o")
    pull(key[1], "p")
    assert equal(puller.read("p"), [tensor[1:2] for tensor in given]), "the remaining keys hold it"
    assert owner.used() > free
    remove(key[2])
    assert owner.used() == free
    assert code(pull, key[2], "p") == GONE, "a removed key"
    assert code(pull, key[3], "p") == GONE, "a key that never was"
    remove(key[2])
    assert equal(puller.read("p"), [tensor[1:2] for tensor in given]), "a refused pull wrote"


# -- 17 --------------------------------------------------------------------------------------------------------------


@pytest.mark.contract("20.17", "19.last-key-wins", "19.key-per-slot")
def test_20_17_the_last_of_equal_keys_and_repeated_placeholders(ends: Ends) -> None:
    near, far = ends.pair()
    idle = by_request(2, UINT64_MAX)
    far.allocate("b", 2, 64, 2, blocks=True, keys=[("blocks", 2, 0)])
    far.allocate("f", 5, 64, 2, keys=[by_request(2, 7), idle, by_request(9, 7), idle], seed=1)
    near.allocate("n", 1, 64, 2)
    given = pattern(1, 2, 5, 64)
    assert code(near.pull_cache, idle, "n") == "LLM_PARAM_INVALID"
    near.pull_cache(by_request(2, 7), "n")
    assert equal(near.read("n"), [tensor[2:3] for tensor in given]), "the last slot with the key"
    assert code(near.pull_cache, by_request(2, 7), "n") == GONE, "the earlier slot has no key"
    far.remove_key(idle)
    far.deallocate("f")
    assert far.used() == 2 * PAGE, "only the blocks cache is left"
    far.allocate("g", 5, 64, 2, keys=[idle, idle, by_request(2, 8), idle, idle], seed=3)
    near.pull_cache(by_request(2, 8), "n")
    assert equal(near.read("n"), [tensor[2:3] for tensor in pattern(3, 2, 5, 64)])


# -- 19 --------------------------------------------------------------------------------------------------------------


@pytest.mark.contract("20.19")
def test_20_19_the_same_options_again(start: Callable[..., LLMDataDist]) -> None:
    given = options()
    before = dict(given)
    dist = start(given)
    managers = []
    for _ in range(3):
        manager = dist.cache_manager
        assert dist.cache_manager is manager
        managers.append(manager)
        assert [manager.allocate_cache(desc()).cache_id, manager.allocate_blocks_cache(desc()).cache_id] == [1, 2]
        user = UserTensors()
        assert manager.register_cache(user.describe(Placement.DEVICE), user.addrs).cache_id == 3
        dist.finalize()
        assert given == before, "the caller's options are not touched"
        dist.init(given)
    assert len({id(manager) for manager in managers}) == 3


@pytest.mark.contract("20.19")
def test_20_19_the_same_options_again_with_the_kv_cache_manager(start: Callable[..., LLMDataDist]) -> None:
    given = dict(KV_OPTIONS)
    dist = start(given)
    assert given.keys() >= KV_OPTIONS.keys()
    assert given.keys() - KV_OPTIONS.keys() <= {"llm.ClusterInfo"}, "only the cluster info is stored back (17.48)"
    for _ in range(3):
        manager = dist.kv_cache_manager
        assert [manager.allocate_cache(desc()).cache_id for _ in range(3)] == [1, 2, 3]
        dist.finalize()
        assert manager.is_initialized() is False
        dist.init(given)


# -- 20 --------------------------------------------------------------------------------------------------------------

INTEGER_CHECKS = {
    "check_uint8": (0, 2**8 - 1),
    "check_uint16": (0, 2**16 - 1),
    "check_uint32": (0, 2**32 - 1),
    "check_uint64": (0, 2**64 - 1),
    "check_int32": (-(2**31), 2**31 - 1),
    "check_int64": (-(2**63), 2**63 - 1),
}


@pytest.mark.contract("20.20")
@pytest.mark.parametrize("name", INTEGER_CHECKS)
def test_20_20_integer_validators(name: str) -> None:
    from llm_datadist.utils import utils  # noqa: PLC0415

    low, high = INTEGER_CHECKS[name]
    validate = getattr(utils, name)
    for good in (low, high, 0):
        assert validate("the_name", good) is None
    for bad in (True, False, None, 1.0, "1"):
        with pytest.raises(TypeError, match="the_name"):
            validate("the_name", bad)
    for bad in (low - 1, high + 1):
        with pytest.raises(ValueError, match="the_name") as caught:
            validate("the_name", bad)
        assert name.removeprefix("check_") in str(caught.value)
        assert str(bad) in str(caught.value)


@pytest.mark.contract("20.20")
def test_20_20_class_validators() -> None:
    from llm_datadist.utils.utils import check_dict, check_isinstance  # noqa: PLC0415

    class Special(dict[str, int]):
        """A subclass is accepted, and returned as it is."""

    value = Special()
    assert check_isinstance("the_name", value, dict) is value
    assert check_isinstance("the_name", value, [list, dict]) is value
    for empty in ([], ()):
        assert check_isinstance("the_name", empty, [list, tuple], int) is empty
    assert check_isinstance("the_name", None, dict) is None
    assert check_isinstance("the_name", True, [bool, int]) is True
    for bad, classes, shown in ((True, [int], "bool"), (5, [str, dict], "int")):
        with pytest.raises(TypeError, match=r"^the prefix .*the_name.*only support") as caught:
            check_isinstance("the_name", bad, classes, extra_fmt="the prefix ")
        assert all(f"'{kind.__name__}'" in str(caught.value) for kind in classes)
        assert shown in str(caught.value)
    with pytest.raises(TypeError, match=r"the_name inner type only support.*'int'.*bool"):
        check_isinstance("the_name", [1, True], [list], int)
    for bad in ({True: 1}, {1: True}):
        with raising(TE):
            check_dict("the_name", bad, int, int)
    with raising(TE):
        check_isinstance("the_name", None, dict, allow_none=False)


@pytest.mark.contract("20.20")
def test_20_20_a_slot_that_is_not_there_is_refused_before_anything_starts(ends: Ends) -> None:
    near, far = ends.pair(accessible=True)
    near.allocate("n", 4, 256, 4)
    cache = far.allocate("f", 4, 256, 4)
    asked: list[int] = []
    wait = synchronizer(asked.append)
    with_key = llm_datadist.TransferWithCacheKeyConfig
    manager, src = near.dist.cache_manager, near.held["n"].handle
    for bad in (4, UINT32_MAX):
        to = with_key(CacheKeyByIdAndIndex(2, cache), range(2), range(2), bad)
        with pytest.raises(LLMException, match=r"src_batch_index.* out of range: \[0, 4\)") as caught:
            manager.transfer_cache_async(src, wait, [to])
        assert caught.value.status_code is INVALID
    assert asked == []


@pytest.mark.contract("20.20")
def test_20_20_destination_layers_are_relative(ends: Ends) -> None:
    near, far = ends.pair(accessible=True)
    near.allocate("n", 2, 64, 8, seed=1)
    cache = far.allocate("f", 3, 64, 8, seed=2)
    to = llm_datadist.TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(2, cache, 2), range(1, 3), range(2, 4), 1)
    task = near.dist.cache_manager.transfer_cache_async(near.held["n"].handle, synchronizer(), [to])
    assert task.synchronize() is SUCCESS
    assert task.get_results() == [SUCCESS]
    expected = pattern(2, 8, 3, 64)
    for tensor in range(4):  # layers 1 and 2, tensors 2 to 5, become layers 2 and 3, tensors 4 to 7
        expected[4 + tensor][2] = pattern(1, 8, 2, 64)[2 + tensor][1]
    assert equal(far.read("f"), expected)


EXPIRED: dict[str, tuple[Any, ...]] = {
    "allocate_cache": (None,),
    "allocate_blocks_cache": (None,),
    "register_cache": (None, None),
    "register_blocks_cache": (None, None),
    "deallocate_cache": (None,),
    "deallocate_blocks_cache": (None,),
    "copy_cache": (None, None),
    "copy_blocks": (None, None),
    "pull_cache": (None, None),
    "pull_blocks": (None, None),
    "push_cache": (None, None),
    "push_blocks": (None, None),
    "unregister_cache": (None,),
    "remove_cache_key": (None,),
    "remap_registered_memory": (None,),
    "swap_blocks": (None, None, None),
    "transfer_cache_async": (None, None, None),
    "tensor_views": (None,),
    "stats": (),
}


@pytest.mark.contract("20.20")
@pytest.mark.parametrize("again", [False, True])
def test_20_20_an_expired_manager_reaches_no_engine(again: bool, start: Callable[..., LLMDataDist]) -> None:
    dist = start()
    manager = dist.cache_manager
    cache = manager.allocate_cache(desc())
    dist.finalize()
    dist.finalize()
    if again:
        dist.init(options())
        heir = dist.cache_manager.allocate_cache(desc())
        written = fill(heir, 1)
    for name, arguments in EXPIRED.items():
        with raising(OVER):
            getattr(manager, name)(*arguments)
    with raising(OVER):
        manager.deallocate_cache(cache)
    with raising(OVER):
        manager.allocate_cache(desc())
    if again:
        assert dist.cache_manager is not manager
        with raising(OVER):
            manager.copy_cache(heir, heir, 1, 0)
        assert same_bytes(contents(heir), written)
        assert dist.cache_manager.stats()["pools"]["device"]["used_bytes"] == 2 * PAGE


@pytest.mark.contract("20.20")
def test_20_20_the_registered_memory_status_by_number() -> None:
    from llm_datadist.v2.llm_types import int_to_mem_status_dict  # noqa: PLC0415

    assert {number: status.name for number, status in int_to_mem_status_dict.items()} == {
        0: "OK",
        1: "PREPARING",
        2: "FAILED",
    }
    assert [status.value for status in RegisterMemStatus] == [0, 1, 2]
