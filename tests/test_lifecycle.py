"""The life cycle of an engine: construction, `init`, `finalize`, fork and process exit."""

from __future__ import annotations

import json
import threading
from typing import Any, Callable

import pytest

from conftest import PAGE, options, pool
from ids import short
from llm_datadist import LLMDataDist, LLMException, LLMRole, Placement, engine_log
from memory import (
    AE,
    LE,
    OOM,
    TE,
    UINT64_MAX,
    VE,
    Expected,
    UserTensors,
    contents,
    desc,
    fill,
    pool_facts,
    raising,
    run_engine,
    same,
    used,
)
from peers import kv_options, together

SEED_POOL = 18737418240
HIXL = {"llm.TransferBackend": "hixl", "llm.listenIpInfo": "127.0.0.1:0"}


@pytest.mark.parametrize(
    ("role", "cluster_id", "expected"),
    [
        (1, 1, TE),
        ("PROMPT", 1, TE),
        (True, 1, TE),
        (Placement.HOST, 1, TE),
        (LLMRole, 1, TE),
        *[(LLMRole.MIX, bad, TE) for bad in (None, True, 1.0, "1", "nan", [1])],
        *[(LLMRole.MIX, bad, VE) for bad in (-1, 2**64, -(2**64), 2**200)],
    ],
)
def test_constructor_refuses(role: Any, cluster_id: Any, expected: Expected) -> None:
    with raising(expected):
        LLMDataDist(role, cluster_id)


@pytest.mark.parametrize("cluster_id", [0, 1, UINT64_MAX])
def test_construction_has_no_side_effect(cluster_id: int) -> None:
    many = [LLMDataDist(role, cluster_id) for role in LLMRole]
    assert {made.cluster_id for made in many} == {cluster_id}
    assert LLMDataDist.llm_engine_instance is None
    for made in many:
        made.finalize()


@pytest.mark.parametrize("role", list(LLMRole))
def test_every_role_has_a_cache_manager(start: Callable[..., Any], role: LLMRole) -> None:
    dist = start(role=role)
    dist.cache_manager.allocate_cache(desc())
    assert dist.cache_manager is dist.cache_manager


@pytest.mark.contract("20.19")
@pytest.mark.parametrize("again", ["same object", "other object"])
def test_init_again_with_the_same_dictionary_starts_from_nothing(again: str) -> None:
    given = options()
    before = dict(given)
    first = LLMDataDist(LLMRole.PROMPT, 1)
    second = first if again == "same object" else LLMDataDist(LLMRole.DECODER, 2)
    try:
        for dist in (first, second, first):
            dist.init(given)
            assert given == before
            given.clear()  # the options are copied
            manager = dist.cache_manager
            assert manager.allocate_cache(desc()).cache_id == 1
            assert used(manager)["device"] == 2 * PAGE
            dist.finalize()
            given.update(before)
    finally:
        first.finalize()
        second.finalize()


@pytest.mark.contract("19.mem-pool-cfg", "19.host-mem-pool-cfg")
@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (None, AE),
        ("x", TE),
        (5, TE),
        (True, TE),
        ([("llm.EnableCacheManager", "1")], TE),
        ({**options(), "llm.MemPoolConfig": 5}, TE),
        ({**options(), "llm.MemPoolConfig": {"memory_size": 5}}, TE),
        ({**options(), "llm.EnableCacheManager": True}, TE),
        ({**options(), "llm.CopyWorkers": 4}, TE),
        ({**options(), "ge.exec.deviceId": 0}, TE),
        ({**options(), 5: "x"}, TE),
        ({**options(), "llm.listenIpInfo": 5}, TE),
        ({**options(), "llm.listenIpInfo": "127.0.0.1:1:2"}, LE),
        *[
            ({**options(), "llm.listenIpInfo": f"127.0.0.1:{port}"}, VE)
            for port in ("port", "", " 1", "1 ", "+1", "-1", "1_0", "1.0", "\u0661", "65536", "9" * 5000)
        ],
        *[({**options(), "llm.listenIpInfo": bad}, LE) for bad in ("", ":1", "[]:1", "[::1:1", "::1:1")],
        ({**options(), "llm.TransferBackend": "other", "llm.listenIpInfo": "127.0.0.1:1"}, LE),
        *[
            ({**options(), **HIXL, "llm.GlobalResourceConfig": bad}, LE)
            for bad in ("", "x", "[]", '{"connect_pool.thread_num": 0}')
        ],
        # `options.rs` tests which values each option refuses. Here: each option is read, and the error is raised.
        *[
            ({**options(), f"llm.{key}": "nan"}, LE)
            for key in (
                *("EnableCacheManager", "EnableRemoteCacheAccessible", "SyncKvCacheWaitTime", "LinkRetryCount"),
                *("LinkTotalTime", "RdmaTrafficClass", "RdmaServiceLevel", "CopyWorkers", "SwapInPath"),
            )
        ],
        *[({**options(), "ge.exec.deviceId": bad}, LE) for bad in ("nan", "0;1", "9" * 40)],
        *[
            ({**options(None, None), f"llm.{key}": bad}, LE)
            for key in ("MemPoolConfig", "HostMemPoolConfig")
            for bad in ("not json", "[" * 100_000, '{"memory_size": 0}', pool(1023, 10), pool((2**32 - 1) << 10, 10))
        ],
    ],
    ids=short,
)
def test_init_refuses_and_can_be_tried_again(given: Any, expected: Expected) -> None:
    dist = LLMDataDist(LLMRole.PROMPT, 1)
    try:
        with raising(expected):
            dist.init(given)
        assert dist._is_initialized is False
        assert LLMDataDist.llm_engine_instance is None
        with pytest.raises(RuntimeError):
            _ = dist.cache_manager
        dist.init(options())
        dist.cache_manager.allocate_cache(desc())
    finally:
        dist.finalize()


def test_a_missing_role_is_noticed_by_init() -> None:
    dist = LLMDataDist(None, 1)
    with raising(LE):
        dist.init(options())


either_pool = pytest.mark.parametrize(
    ("key", "placement"), [("llm.MemPoolConfig", Placement.DEVICE), ("llm.HostMemPoolConfig", Placement.HOST)]
)


@pytest.mark.contract("19.mem-pool-cfg", "19.host-mem-pool-cfg")
@pytest.mark.parametrize(
    "text", ['{"memory_size": 65536}', '{"memory_size": 1024, "page_shift": 10, "other": [1, {"memory_size": "x"}]}']
)
@either_pool
def test_good_pool_description(start: Callable[..., Any], text: str, key: str, placement: Placement) -> None:
    manager, name = start({**options(None, None), key: text}).cache_manager, placement.name.lower()
    facts = pool_facts(manager, name)
    assert facts["capacity_bytes"] == json.loads(text)["memory_size"]
    cache = manager.allocate_cache(desc(1, 1, 1, placement))
    assert used(manager)[name] == facts["page_bytes"]
    fill(cache, 1)


@pytest.mark.contract("19.host-mem-pool-cfg")
def test_host_pool_has_a_limit(start: Callable[..., Any]) -> None:
    limit = 20 << 30
    for too_large in (limit + 65536, limit + 1, 1 << 40):
        with raising(LE):
            start(options(None, pool(too_large, 16)))
    manager = start(options(None, pool(limit, 16))).cache_manager
    assert pool_facts(manager, "host")["capacity_bytes"] == limit


def test_memory_that_does_not_exist_is_out_of_memory(start: Callable[..., Any]) -> None:
    with raising(OOM):
        start(options(pool(1 << 58, 30), None))
    start()


@either_pool
def test_the_documented_pool_starts_without_touching_its_memory(key: str, placement: Placement) -> None:
    out = run_engine(
        f"""
        from pathlib import Path
        dist, place = LLMDataDist(LLMRole.PROMPT, 1), {placement}
        dist.init({{"llm.EnableCacheManager": "1", "{key}": '{pool(SEED_POOL, 16)}'}})
        cache = dist.cache_manager.allocate_cache(CacheDesc(2, [2, 1 << 20], DataType.DT_FLOAT16, place))
        dist.cache_manager.copy_cache(cache, cache, 1, 0)
        almost_all = CacheDesc(1, [{SEED_POOL // 65536 - 128}, 65536], DataType.DT_INT8, place)
        rest = dist.cache_manager.allocate_cache(almost_all)
        assert len(rest.tensor_addrs) == 1
        dist.finalize()
        # Not `ru_maxrss`, which a new program takes over from the process that starts it.
        print(Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0])
        """
    )
    assert int(out) < 1 << 20, f"{out} KiB were resident"


@pytest.mark.contract("20.20")
def test_a_handle_of_an_earlier_engine_never_reaches_the_next(start: Callable[..., Any]) -> None:
    dist = start()
    old_batch = dist.cache_manager.allocate_cache(desc())
    old_blocks = dist.cache_manager.allocate_blocks_cache(desc())
    dist.finalize()
    dist.init(options())
    manager = dist.cache_manager
    heirs = [manager.allocate_cache(desc()), manager.allocate_blocks_cache(desc())]
    assert [heir.cache_id for heir in heirs] == [old_batch.cache_id, old_blocks.cache_id]
    written = [fill(heir, number) for number, heir in enumerate(heirs)]
    user = UserTensors()
    for call, *arguments in (
        (manager.copy_cache, old_batch, heirs[0], 1, 0),
        (manager.copy_cache, heirs[0], old_batch, 1, 0),
        (manager.copy_blocks, old_blocks, {0: [1]}),
        (manager.swap_blocks, user.cpu_cache(), old_blocks, {0: 1}),
        (manager.swap_blocks, old_blocks, user.cpu_cache(), {0: 1}),
        (manager.tensor_views, old_batch),
    ):
        with pytest.raises(LLMException):
            call(*arguments)
    manager.deallocate_cache(old_batch)
    manager.deallocate_blocks_cache(old_blocks)
    assert used(manager)["device"] == 4 * PAGE
    assert all(same(contents(heir), bytes_) for heir, bytes_ in zip(heirs, written))


def test_leaving_the_process_without_finalize_is_clean() -> None:
    out = run_engine(
        """
        dist, cache = engine()
        array = dist.cache_manager.tensor_views(cache)[0].numpy()
        print("left")
        """
    )
    assert out == "left"


def test_a_forked_child_is_told_and_holds_no_socket_of_its_parent() -> None:
    out = run_engine(
        """
        def sockets():
            paths = (f"/proc/self/fd/{number}" for number in os.listdir("/proc/self/fd"))
            return {os.readlink(path) for path in paths if os.path.islink(path) and "socket:" in os.readlink(path)}

        before = sockets()
        dist, batch = engine(EnableRemoteCacheAccessible="1", listenIpInfo="127.0.0.1:0")
        manager, dist_engine = dist.cache_manager, dist.engine
        blocks = manager.allocate_blocks_cache(DESC)
        user = bytearray(400)
        address = ctypes.addressof(ctypes.c_char.from_buffer(user))
        cpu = Cache.create_cpu_cache(CacheDesc(1, [4, 100], DataType.DT_INT8, Placement.HOST), [address])
        peer = LLMClusterInfo()
        peer.remote_cluster_id = 2
        peer.append_local_ip_info("127.0.0.1", 0)
        peer.append_remote_ip_info("127.0.0.1", 1)
        assert sockets() - before
        child = os.fork()
        if child == 0:
            assert not sockets() - before
            for call, *arguments in (
                (manager.allocate_cache, DESC),
                (manager.allocate_blocks_cache, DESC),
                (manager.deallocate_cache, batch),
                (manager.deallocate_blocks_cache, blocks),
                (manager.remove_cache_key, CacheKey(1, 1)),
                (manager.register_cache, DESC, [address]),
                (manager.register_blocks_cache, DESC, [address]),
                (manager.unregister_cache, 1),
                (manager.copy_cache, batch, batch, 1, 0),
                (manager.copy_blocks, blocks, {0: [1]}),
                (manager.swap_blocks, cpu, blocks, {0: 1}),
                (manager.swap_blocks, blocks, cpu, {0: 1}),
                (manager.pull_cache, CacheKeyByIdAndIndex(2, 1), batch),
                (manager.pull_blocks, BlocksCacheKey(2), blocks, [0], [0]),
                (manager.push_cache, CacheKeyByIdAndIndex(2, 1), batch, 0, None, None, -1, 1),
                (manager.push_blocks, BlocksCacheKey(2), blocks, [0], [0], None, None, 1),
                (dist.link, "name", {1: 0, 2: 1}, "{}"),
                (dist.unlink, 1),
                (dist.query_register_mem_status, 1),
                (dist.link_clusters, [peer]),
                (dist.unlink_clusters, [peer]),
                (dist.switch_role, LLMRole.DECODER),
                (lambda: dist.listen_ip_info,),
                (dist.stats,),
                (lambda: dist.engine,),
                (lambda: blocks.native,),
            ):
                try:
                    call(*arguments)
                except LLMException as error:
                    assert error.status_code is LLMStatusCode.LLM_FAILED and "forked" in str(error), (call, error)
                else:
                    sys.exit(f"{call} was accepted in the child")
            assert dist_engine.closed
            dist.finalize()
            os._exit(0)
        ended(child)
        assert dist_engine.events() == []
        import socket
        host, _, port = dist.listen_ip_info.rpartition(":")
        socket.create_connection((host, int(port)), timeout=5).close()
        manager.copy_cache(batch, batch, 2, 0)
        manager.swap_blocks(cpu, blocks, {0: 1})
        dist.finalize()
        print("parent")
        """
    )
    assert out == "parent"


FORKED = """
import multiprocessing, threading
first = engine()
def refused(dist, cache):
    try:
        dist.cache_manager.copy_cache(cache, cache, 1, 0)
    except LLMException as error:
        return "fork" in str(error)
    return False
def child():
    assert LLMDataDist.llm_engine_instance is None
    assert refused(*first)
    second = engine()
    grandchild = os.fork()
    if grandchild == 0:
        os._exit(0 if refused(*first) and refused(*second) else 7)
    ended(grandchild)
    assert LLMDataDist.llm_engine_instance is second[0]
    first[0].finalize()  # the object of the parent, whose engine is another one
    assert LLMDataDist.llm_engine_instance is second[0]
    second[0].cache_manager.copy_cache(second[1], second[1], 2, 0)
    second[0].finalize()
    first[0].init(OPTIONS)  # the same object may have an engine of its own here
    first[0].cache_manager.allocate_cache(DESC)
    first[0].finalize()
"""
# Not the fork of the C library: a child of it waits for ever if another thread of the parent had asked for the GIL.
# `process_id.rs` has a test of how the engine knows its process there.
FORKS = {
    "os.fork": "pid = os.fork()\nif pid == 0:\n    child()\n    os._exit(0)\nended(pid)",
    "multiprocessing": (
        "one = multiprocessing.get_context('fork').Process(target=child)\n"
        "one.start(); one.join(60)\nassert one.exitcode == 0, one.exitcode"
    ),
    "os.fork while another thread opens an engine": (
        "held, over = threading.Event(), threading.Event()\n"
        "def hold():\n    with LLMDataDist._life:\n        held.set(); over.wait()\n"
        "thread = threading.Thread(target=hold); thread.start(); held.wait()\n"
        "pid = os.fork()\nif pid == 0:\n    child()\n    os._exit(0)\n"
        "over.set(); thread.join(); ended(pid)"
    ),
}


@pytest.mark.parametrize("how", FORKS)
def test_a_forked_child_opens_an_engine_of_its_own(how: str) -> None:
    going_on = "first[0].cache_manager.copy_cache(first[1], first[1], 2, 0)\nfirst[0].finalize()\nprint('both')"
    assert run_engine(f"{FORKED}\n{FORKS[how]}\n{going_on}") == "both"


def test_a_signal_handler_may_finalize_at_any_moment() -> None:
    out = run_engine(
        """
        import faulthandler, random, time
        faulthandler.dump_traceback_later(100, exit=True)
        dist, count = LLMDataDist(LLMRole.PROMPT, 1), 0

        def handler(*_):
            global count
            count += 1
            dist.finalize()

        signal.signal(signal.SIGALRM, handler)
        end = time.monotonic() + 2
        while time.monotonic() < end or count <= 100:  # on a busy machine a round takes long
            signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-5, 5e-4))
            try:
                dist.init(OPTIONS)
                dist.cache_manager
            except RuntimeError:
                pass
            dist.finalize()
            assert LLMDataDist.llm_engine_instance is None
        signal.setitimer(signal.ITIMER_REAL, 0)
        assert count > 100, count
        print("alive")
        """,
        ASCEND_GLOBAL_LOG_LEVEL="3",
    )
    assert out.splitlines()[-1] == "alive"


def test_a_handler_inside_the_locked_part_of_finalize_does_not_wait_for_itself(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    dist = start()
    nested = threading.Thread(target=dist.finalize)

    class Interrupted(type(dist.cache_manager)):  # type: ignore[misc]
        """A manager that receives the signal while it is invalidated."""

        def __setattr__(self, name: str, value: object) -> None:
            if name == "_initialized" and value is False:
                assert acquired(LLMDataDist._life), "a handler in this thread would wait forever"
                dist.finalize()
            super().__setattr__(name, value)

    def acquired(lock: Any) -> bool:
        if not lock.acquire(timeout=1):
            return False
        lock.release()
        return True

    dist.cache_manager.__class__ = Interrupted
    native = dist._llm_datadist
    closed = []

    class Native:
        """Records whether the lock is free while the pools are unmapped."""

        def close(self) -> None:
            nested.start()
            nested.join(5)
            closed.append(not nested.is_alive())
            native.close()

    monkeypatch.setattr(dist, "_llm_datadist", Native())
    dist.finalize()
    assert closed == [True]
    assert LLMDataDist.llm_engine_instance is None


@pytest.mark.parametrize("settings", [options(), kv_options()], ids=["CacheManager", "KvCacheManager"])
def test_an_interrupted_init_leaves_no_engine_open(
    start: Callable[..., Any], monkeypatch: pytest.MonkeyPatch, settings: dict[str, str]
) -> None:
    dist = LLMDataDist(LLMRole.PROMPT, 1)
    given = {**settings, "llm.listenIpInfo": "127.0.0.1:0"}
    listened: list[str] = []

    def interrupted() -> None:
        listened.append(dist._llm_datadist.listening())  # type: ignore[union-attr,arg-type]
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(engine_log, "start", interrupted)
        with pytest.raises(KeyboardInterrupt):
            dist.init(given)
    assert repr(dist).endswith("initialized=False)")
    assert LLMDataDist.llm_engine_instance is None
    assert "llm.ClusterInfo" not in given
    again = {**given, "llm.listenIpInfo": listened[0]}
    assert start(again).listen_ip_info == listened[0], "the address is free again"


def test_concurrent_init_of_one_object_is_one_init(start: Callable[..., Any]) -> None:
    dist = start()
    for _ in range(100):
        dist.finalize()
        together(4, lambda _: dist.init(options()))
        assert dist._is_initialized


def test_a_package_imported_again_works_with_its_own_classes() -> None:
    out = run_engine(
        """
        for name in [name for name in sys.modules if name.split(".")[0] == "llm_datadist"]:
            del sys.modules[name]
        import llm_datadist as second
        assert second.LLMException is not LLMException
        dist = second.LLMDataDist(second.LLMRole.MIX, 1)
        dist.init(OPTIONS)
        made_of = second.CacheDesc(1, [4, 100], second.DataType.DT_INT8)
        cache = dist.cache_manager.allocate_cache(made_of, [second.CacheKey(1, 1)])
        dist.cache_manager.copy_cache(cache, cache, 1, 0)
        try:
            dist.cache_manager.copy_cache(cache, cache, 9, 0)
        except second.LLMException as error:
            assert error.status_code is second.LLMStatusCode.LLM_PARAM_INVALID
            print("its own")
        dist.finalize()
        """
    )
    assert out.splitlines()[-1] == "its own"
