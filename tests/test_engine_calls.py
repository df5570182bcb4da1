"""Calls of `LLMDataDist` and their life: options of `init`, link arguments, roles, and managers after `finalize`."""

from __future__ import annotations

from typing import Any, Callable

import pytest

from conftest import PAGE, options
from ids import short
from llm_datadist import LLMDataDist, LLMException, LLMRole, LLMStatusCode, MemInfo, Memtype
from memory import LE, TE, VE, Expected, contents, desc, fill, raising, run_fresh, same
from mistakes import Row, check, coded, fails, info
from peers import Ends, code
from two_modes import CACHE_MANAGER, KV_OPTIONS, MODES, SUCCESS

INVALID = LLMStatusCode.LLM_PARAM_INVALID
FAILED = coded(LLMStatusCode.LLM_FAILED)
NO_LINK = coded(LLMStatusCode.LLM_NOT_YET_LINK)
EXPIRED = coded(LLMStatusCode.LLM_ENGINE_FINALIZED)
MANAGED = {"EnableCacheManager": "1"}


@pytest.mark.contract("20.10")
@pytest.mark.parametrize(
    ("given", "text"),
    [
        # Each mistake is reported, although the later ones are present too.
        ({"TransferBackend": "hixl"}, "EnableCacheManager"),
        ({"TransferBackend": "x", "EnableRemoteCacheAccessible": "0"}, "EnableCacheManager"),
        ({"TransferBackend": "hixl", "EnableCacheManager": "0"}, "EnableCacheManager"),
        ({"TransferBackend": "x", **MANAGED, "EnableRemoteCacheAccessible": "0"}, "EnableRemoteCacheAccessible"),
        ({"TransferBackend": "hixl", **MANAGED}, "listenIpInfo"),
        ({"TransferBackend": "x", **MANAGED, "EnableRemoteCacheAccessible": "1"}, "listenIpInfo"),
        ({"LocalCommRes": "", "EnableCacheManager": "0"}, ""),
        ({**MANAGED, "listenIpInfo": "127.0.0.1"}, ""),
    ],
    ids=short,
)
def test_init_names_the_first_missing_option(given: dict[str, str], text: str) -> None:
    dist = LLMDataDist(LLMRole.PROMPT, 1)
    wrong = {f"llm.{key}": value for key, value in given.items()}
    before = dict(wrong)
    fails(lambda: dist.init(wrong), LE, text)
    assert wrong == before
    assert LLMDataDist.llm_engine_instance is None
    dist.init(options())
    dist.finalize()


@pytest.mark.contract("20.10")
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("size", "expected"),
    [
        *[(bad, TE) for bad in (5, b"5", 1.5)],
        *[(bad, LE) for bad in ("1,2", "1,", ",", "abc", "", "-1", "1.5")],
    ],
)
def test_the_size_of_graph_memory_is_an_integer(start: Any, mode: str, size: Any, expected: Expected) -> None:
    given = options(None, None) if mode == CACHE_MANAGER else {"ge.exec.deviceId": "0"}
    with raising(expected):
        start({**given, "ge.flowGraphMemMaxSize": size})
    assert LLMDataDist.llm_engine_instance is None
    start({**given, "ge.flowGraphMemMaxSize": "16777216"})


@pytest.mark.contract("20.10")
@pytest.mark.parametrize("mode", MODES)
def test_one_engine_at_a_time_and_init_again_does_nothing(mode: str, start: Callable[..., LLMDataDist]) -> None:
    given = options() if mode == CACHE_MANAGER else KV_OPTIONS
    dist = start(given)
    other = LLMDataDist(LLMRole.DECODER, 2)
    manager = dist.cache_manager if mode == CACHE_MANAGER else dist.kv_cache_manager
    for repeated in (given, None, 5, {}, {"llm.MemPoolConfig": "bad"}):
        assert dist.init(repeated) is None
    for any_ in (given, options(), {}, "x"):
        with raising(FAILED):
            other.init(any_)
    other.finalize()
    assert LLMDataDist.llm_engine_instance is dist
    assert manager is (dist.cache_manager if mode == CACHE_MANAGER else dist.kv_cache_manager)
    manager.allocate_cache(desc())
    dist.finalize()
    other.init(given)
    assert LLMDataDist.llm_engine_instance is other
    other.finalize()


@pytest.mark.contract("20.11")
@pytest.mark.parametrize("name", ["link_clusters", "unlink_clusters"])
def test_arguments_of_link_clusters_and_unlink_clusters(start: Callable[..., LLMDataDist], name: str) -> None:
    dist = start()
    rows = [
        *[Row({"timeout": bad}, TE) for bad in (None, "1", 1.0)],
        *[Row({"timeout": bad}, VE) for bad in (2**31, -(2**31) - 1)],
        *[Row({"timeout": bad}, LE) for bad in (0, -1)],
        *[Row({"clusters": bad}, TE) for bad in (None, 5, info(), "x", [5], [info(), None], ({},))],
    ]
    if name == "unlink_clusters":
        rows += [Row({"force": bad}, TE) for bad in (0, 1, "x")]
    else:
        rows += [Row({"clusters": [info(local=0)]}, LE, "local_ip_info_list is empty")]
    rows += [Row({"clusters": [info(None)]}, TE)]
    good = {"clusters": [info()], "timeout": 500}
    check(getattr(dist, name), good if name == "link_clusters" else {**good, "force": False}, rows)
    assert getattr(dist, name)([]) == getattr(dist, name)(()) == (INVALID, [])
    # An entry needs exactly one remote address. The last failed entry gives the code. Unlinking without a link is OK.
    first = LLMStatusCode.LLM_LINK_FAILED if name == "link_clusters" else SUCCESS
    assert getattr(dist, name)([info(), info(remote=0)], 1000) == (INVALID, [first, INVALID])


@pytest.mark.contract("20.11")
def test_switch_role(start: Callable[..., LLMDataDist], ends: Ends) -> None:
    dist = start()
    addresses = [(5, TE), ("127.0.0.1", LE), ("1:2:3", LE), ("127.0.0.1:x", VE)]
    for given, expected in (
        *[((bad,), TE) for bad in (None, 1, "Prompt", True)],
        *[((LLMRole.DECODER, bad), TE) for bad in (5, [])],
        *[((LLMRole.DECODER, {"llm.listenIpInfo": bad}), expected) for bad, expected in addresses],
    ):
        with raising(expected):
            dist.switch_role(*given)
    for role in (LLMRole.DECODER, LLMRole.DECODER, LLMRole.MIX):
        assert dist.switch_role(role) is None
        assert dist._role is role
    dist.finalize()
    local, _ = ends.pair()
    assert code(local.switch_role, "PROMPT") == "LLM_EXIST_LINK"


BEFORE_INIT: dict[str, Callable[[LLMDataDist], Any]] = {
    "link": lambda dist: dist.link("name", {1: 0, 2: 1}, "{}"),
    "unlink": lambda dist: dist.unlink(1),
    "query_register_mem_status": lambda dist: dist.query_register_mem_status(1),
    "link_clusters": lambda dist: dist.link_clusters([info()]),
    "unlink_clusters": lambda dist: dist.unlink_clusters([info()]),
    "switch_role": lambda dist: dist.switch_role(LLMRole.MIX),
    "check_link_status": lambda dist: dist.check_link_status(1),
    "cache_manager": lambda dist: dist.cache_manager,
    "kv_cache_manager": lambda dist: dist.kv_cache_manager,
}


@pytest.mark.contract("20.11")
@pytest.mark.parametrize("name", BEFORE_INIT)
def test_calls_before_init_and_after_finalize(name: str, start: Callable[..., LLMDataDist]) -> None:
    after = start()
    after.finalize()
    for dist in (LLMDataDist(LLMRole.PROMPT, 1), after):
        with pytest.raises(RuntimeError) as caught:
            BEFORE_INIT[name](dist)
        assert not isinstance(caught.value, LLMException)
        assert dist.cluster_id == 1


@pytest.mark.contract("20.12")
def test_finalize_and_the_shutdown_handler() -> None:
    out = run_fresh(
        """
        from llm_datadist import LLMDataDist, LLMException, LLMRole, LLMStatusCode
        from llm_datadist.v2.llm_datadist import _shutdown_handler
        given = {"llm.EnableCacheManager": "1", "ge.exec.deviceId": "0"}
        dist = LLMDataDist(LLMRole.PROMPT, 1)
        print(dist.finalize(), dist.finalize())
        print(_shutdown_handler(), LLMDataDist.llm_engine_instance)
        dist.init(given)
        print(LLMDataDist.llm_engine_instance is dist)
        print(_shutdown_handler(), LLMDataDist.llm_engine_instance, dist._is_initialized)
        print(_shutdown_handler())
        dist.init(given)

        class Stuck:
            asked = 0

            def finalize(self):
                Stuck.asked += 1
                raise LLMException("stuck", status_code=LLMStatusCode.LLM_FAILED)

        LLMDataDist.llm_engine_instance = Stuck()
        print(_shutdown_handler(), Stuck.asked)
        LLMDataDist.llm_engine_instance = dist
        dist.finalize()
        """,
    )
    shown = [line for line in out.splitlines() if not line.startswith("[")]
    assert shown == ["None None", "None None", "True", "None None False", "None", "None 1"]


def test_hooks_of_the_program_find_the_engine_of_their_process() -> None:
    """The import of the package registers its own hooks, not the first use of a name.

    So those that a program registers afterwards run before them at exit, and after them in a forked child.
    """
    out = run_fresh(
        """
        import atexit, os, warnings
        import llm_datadist
        warnings.simplefilter("ignore")

        def clean_up():
            cache = dist.cache_manager.allocate_cache(CacheDesc(1, [4, 100], DataType.DT_INT8))
            dist.cache_manager.deallocate_cache(cache)
            print("clean", dist._is_initialized)

        atexit.register(clean_up)
        os.register_at_fork(after_in_child=lambda: os._exit(LLMDataDist.llm_engine_instance is not None))
        from llm_datadist import CacheDesc, DataType, LLMDataDist, LLMRole
        dist = LLMDataDist(LLMRole.PROMPT, 1)
        dist.init({"llm.EnableCacheManager": "1", "llm.MemPoolConfig": '{"memory_size": 1048576}'})
        print("forked", os.waitpid(os.fork(), 0)[1], LLMDataDist.llm_engine_instance is dist)
        """
    )
    assert out.splitlines() == ["forked 0 True", "clean True"]


@pytest.mark.contract("20.13")
def test_role_names() -> None:
    words = {LLMRole.PROMPT: "Prompt", LLMRole.DECODER: "Decoder", LLMRole.MIX: "Mix"}
    for owner in (LLMDataDist, LLMDataDist(LLMRole.PROMPT, 1)):
        assert {role: owner._role_to_str(role) for role in LLMRole} == words


@pytest.mark.contract("20.14")
def test_remap_registered_memory(ends: Ends) -> None:
    one, two = (MemInfo(Memtype.MEM_TYPE_DEVICE, address, 1) for address in (4096, 8192))
    local, remote = ends.pair()
    for infos in (one, [one], [one, two]):
        assert local.dist.cache_manager.remap_registered_memory(infos) is None
    local.unlink_clusters([remote.at])
    with raising(NO_LINK):
        local.dist.cache_manager.remap_registered_memory(one)


# The number of required arguments of each call.
ARGUMENTS = {
    **dict.fromkeys(("allocate_cache", "allocate_blocks_cache", "deallocate_cache", "deallocate_blocks_cache"), 1),
    **dict.fromkeys(("unregister_cache", "remove_cache_key", "remap_registered_memory", "tensor_views"), 1),
    **dict.fromkeys(("register_cache", "register_blocks_cache", "copy_cache", "copy_blocks"), 2),
    **dict.fromkeys(("pull_cache", "pull_blocks", "push_cache", "push_blocks"), 2),
    **dict.fromkeys(("swap_blocks", "transfer_cache_async"), 3),
}


@pytest.mark.contract("20.20")
@pytest.mark.parametrize("again", [False, True])
def test_an_expired_manager_reaches_no_engine(again: bool, start: Callable[..., LLMDataDist]) -> None:
    dist = start()
    manager = dist.cache_manager
    cache = manager.allocate_cache(desc())
    dist.finalize()
    dist.finalize()
    if again:
        dist.init(options())
        heir = dist.cache_manager.allocate_cache(desc())
        written = fill(heir, 1)
    for name, count in ARGUMENTS.items():
        with raising(EXPIRED):
            getattr(manager, name)(*[None] * count)
    with raising(EXPIRED):
        manager.deallocate_cache(cache)
    with raising(EXPIRED):
        manager.allocate_cache(desc())
    if again:
        assert dist.cache_manager is not manager
        with raising(EXPIRED):
            manager.copy_cache(heir, heir, 1, 0)
        assert same(contents(heir), written)
        assert dist.stats()["pools"]["device"]["used_bytes"] == 2 * PAGE
