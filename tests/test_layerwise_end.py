"""Layer-wise transfers at `finalize`, in a forked process and at the end of a process."""

from __future__ import annotations

import os
import random
import signal
import threading
import time
from typing import Any, Optional

import numpy as np
import pytest

from layers import FINALIZED, Decoder, Far, Steps, ended, launch, layers_done, results, send
from llm_datadist import (
    LLMStatusCode,
)
from peers import (
    LIMIT,
    OK,
    SOAK,
    THOROUGH,
    UNLINKED,
    Ends,
    equal,
    eventually,
    linked,
    options,
    pattern,
)


def test_finalize_with_a_synchronizer_that_blocks(ends: Ends, way: dict[str, Any]) -> None:
    near, far = ends.pair(llm__SyncKvCacheWaitTime=300, **way)
    near.allocate("n", 1, 64, 8, seed=1)
    to = Far(far, way["accessible"], "f", 1, 64, 4, seed=2)
    steps = Steps(allowed=2)
    task = launch(near, "n", [to.to(range(4)), to.to(range(1)), to.to(range(3, 4))], steps)
    steps.reached(2)
    eventually(lambda: layers_done(task)[:2] == [2, 1], what="two layers")
    waiting: list[Any] = []
    thread = threading.Thread(target=lambda: waiting.append(task.synchronize()))
    thread.start()
    finalized = threading.Thread(target=near.finalize)
    finalized.start()
    finalized.join(LIMIT)
    assert not finalized.is_alive(), "finalize waits for a synchronizer that blocks"
    thread.join(LIMIT)
    assert waiting == [LLMStatusCode.LLM_ENGINE_FINALIZED]
    told = results(task, 0)
    assert told[:2] == [FINALIZED, OK]
    assert told[2] in (None, FINALIZED)
    assert task.done()
    assert not task.cancel()
    assert task.errors()[0].status_code.name == FINALIZED
    assert len(task.progress()) == 3
    steps.allow()
    to.slot(pattern(1, 8, 1, 64), range(2))
    to.check()
    near.init(options(**way))  # the process may have another engine
    linked(near, far)
    near.allocate("n", 1, 64, 8, seed=5)
    assert send(near, "n", [to.to(range(4))]) == [OK]
    assert results(task, 0) == told


def test_finalize_while_layers_flow_lets_them_arrive(ends: Ends, way: dict[str, Any]) -> None:
    near, far = ends.pair(**way)
    near.allocate("n", 1, 6400, 40, seed=1)
    to = Far(far, way["accessible"], "f", 1, 6400, 20, seed=2)

    class Model(Steps):
        def synchronize_layer(self, layer_index: int, timeout_in_millis: Optional[int]) -> bool:
            time.sleep(0.005)
            return super().synchronize_layer(layer_index, timeout_in_millis)

    task = launch(near, "n", [to.to(range(20))], Model())
    near.finalize()
    assert results(task) == [OK]
    to.slot(pattern(1, 40, 1, 6400), range(20))
    to.check()


@pytest.mark.parametrize(
    ("ending", "status"),
    [("", 0), ("sys.exit(3)", 3), ("end = None; del task", 0), ("raise ValueError('end')", 1)],
    ids=["runs out", "exit", "dropped", "raises"],
)
def test_a_process_that_ends_with_a_transfer_under_way_delivers_it(
    ends: Ends, way: dict[str, Any], ending: str, status: int
) -> None:
    decoder = Decoder(ends, way)
    told, _, err = decoder.run(f"task = go(Model())\n{ending}\n")
    assert told == status, err
    assert err == "" or status == 1, err
    assert decoder.whole()


@pytest.mark.parametrize(
    ("code_", "said"),
    [
        ("tasks = [go(Model()) for _ in range(20)]", ""),
        ("task = go(Model())\nthreading.Thread(target=lambda: print(results(task))).start()", "['LLM_SUCCESS']"),
        ("task = go(Model())\nthreading.Thread(target=task.synchronize, daemon=True).start()", ""),
        ("threading.Thread(target=lambda: go(Model())).start()", ""),
        ("task = go(Model())\nend.finalize()", ""),
        (
            """
            import asyncio
            async def main():
                task = go(Model())
                async def wait():
                    return await task
                asyncio.ensure_future(wait())
                await asyncio.sleep(0.003)
            asyncio.run(main())
            """,
            "",
        ),
        (
            """
            from concurrent.futures import ThreadPoolExecutor
            crew = ThreadPoolExecutor(2)
            layers = [crew.submit(time.sleep, 0.01) for _ in range(10)]
            class Computed(LayerSynchronizer):
                def synchronize_layer(self, layer_index, timeout_in_millis):
                    layers[layer_index].result()
                    return True
            task = go(Computed())
            """,
            "",
        ),
    ],
    ids=["many", "waiting thread", "waiting daemon", "late thread", "finalize", "asyncio", "executor"],
)
def test_a_process_that_ends_in_other_ways_delivers_too(ends: Ends, code_: str, said: str) -> None:
    decoder = Decoder(ends, {"accessible": True, "llm__LinkTransport": "auto"})
    told, out, err = decoder.run(code_)
    assert (told, out.strip(), err) == (0, said, "")
    assert decoder.whole()


@pytest.mark.parametrize(
    "ends_how",
    [
        "lambda: threading.Event().wait()",
        "lambda: time.sleep(1000)",
        "lambda: threading.Lock().acquire() and threading.Condition().__enter__() and time.sleep(1000)",
        "lambda: os.read(os.pipe()[0], 1)",
    ],
    ids=["event", "sleep", "lock", "read"],
)
def test_a_process_ends_though_a_synchronizer_blocks_for_ever(ends: Ends, ends_how: str) -> None:
    decoder = Decoder(ends, {"accessible": False, "llm__LinkTransport": "auto"})
    told, out, err = decoder.run(f"task = go(Model(0, {ends_how}))\nprint(task.get_results(100))\n")
    assert told == 0, err
    assert "LLM_TIMEOUT" in out
    eventually(lambda: decoder.near.links() == [], what="the end of the link")
    got = decoder.near.read("f")
    for tensor in range(6):
        assert np.array_equal(got[tensor], decoder.good[tensor])
    decoder.near.deallocate("f")
    assert decoder.near.used() == 0


def test_a_process_ends_though_a_synchronizer_busily_computes(ends: Ends) -> None:
    decoder = Decoder(ends, {"accessible": True, "llm__LinkTransport": "auto"})
    told, _, err = decoder.run("""
        def compute():
            while True:
                sum(range(1000))
        task = go(Model(0, compute))
        task.get_results(100)
    """)
    assert told == 0, err


def test_a_synchronizer_that_ends_the_process(ends: Ends) -> None:
    """SystemExit in the method ends nobody's process, but os._exit and SIGTERM do."""
    decoder = Decoder(ends, {"accessible": False, "llm__LinkTransport": "auto"})
    told, out, err = decoder.run("task = go(Model(0, lambda: sys.exit(5)))\nprint(results(task))\n")
    assert told == 0, err
    assert "['LLM_TIMEOUT']" in out, "a line of the log may follow before the end of the line"
    assert out.count("synchronize_layer raised") == 1, "told once, with what was raised"
    told, _, _ = decoder.run("task = go(Model(0, lambda: os._exit(6)))\ntask.synchronize()\n")
    assert told == 6
    told, _, _ = decoder.run("task = go(Model(0, lambda: os.kill(os.getpid(), signal.SIGTERM)))\ntask.synchronize()\n")
    assert told == -signal.SIGTERM
    told, _, err = decoder.run("task = go(Model())\nassert results(task) == ['LLM_SUCCESS']\n")
    assert told == 0, err
    assert decoder.whole()


def test_fork_in_the_middle(ends: Ends, way: dict[str, Any]) -> None:
    """The child has no part in the transfer and hangs in nothing; the parent's goes on."""
    decoder = Decoder(ends, way)
    told, out, err = decoder.run("""
        steps = Steps(allowed=2)
        task = go(steps)
        steps.reached(2)
        import warnings
        warnings.simplefilter("ignore")
        child = os.fork()
        if child == 0:
            def tries(call):
                try:
                    return call()
                except Exception as error:
                    return type(error).__name__
            for call in (lambda: task.synchronize(50), lambda: task.get_results(50), task.done, task.progress,
                         task.errors, lambda: go(Steps()), task.cancel):
                print(tries(call))
            sys.stdout.flush()
            sys.exit(0)
        for _ in range(2000):
            done, status = os.waitpid(child, os.WNOHANG)
            if done:
                break
            time.sleep(0.005)
        else:
            os.kill(child, signal.SIGKILL)
            print("CHILD HANGS")
        print("child", os.waitstatus_to_exitcode(status))
        steps.allow()
        print(results(task))
    """)
    assert told == 0, out + err
    assert "CHILD HANGS" not in out
    assert "child 0" in out, out + err
    assert "LLM_SUCCESS" not in out.split("child 0")[0], out
    assert "['LLM_SUCCESS']" in out, out + err
    assert decoder.whole()


def test_a_child_that_forked_in_the_middle_and_outlives_its_parent(ends: Ends) -> None:
    decoder = Decoder(ends, {"accessible": False, "llm__LinkTransport": "auto"})
    told, _, err = decoder.run("""
        import warnings
        warnings.simplefilter("ignore")
        steps = Steps(allowed=2)
        task = go(steps)
        steps.reached(2)
        if os.fork() == 0:
            os.close(1), os.close(2)
            time.sleep(2)
            os._exit(0)
        steps.allow()
    """)
    assert told == 0, err
    eventually(decoder.whole, what="the bytes")
    eventually(lambda: decoder.near.links() == [], what="the end of the link")


def test_ctrl_c_ends_a_program_that_waits(ends: Ends) -> None:
    decoder = Decoder(ends, {"accessible": False, "llm__LinkTransport": "auto"})
    program = decoder.start("""
        task = go(Model(0, lambda: threading.Event().wait()))
        print("waiting", flush=True)
        task.synchronize()
    """)
    assert program.stdout is not None
    assert program.stdout.readline() == "waiting\n"
    time.sleep(0.1)
    program.send_signal(signal.SIGINT)
    try:
        _, err = program.communicate(timeout=LIMIT)
    finally:
        program.kill()
    assert program.returncode in (-signal.SIGINT, 130), program.returncode
    assert "KeyboardInterrupt" in err


def test_a_prefill_that_is_killed_holds_nothing_of_the_decoder(ends: Ends, way: dict[str, Any]) -> None:
    decoder = Decoder(ends, way)
    near = decoder.near
    near.allocate("g", 1, 6400, 20, seed=3)
    chance = random.Random(1)  # noqa: S311
    for number in range(SOAK or (10 if THOROUGH else 2)):
        program = decoder.start("""
            print("flows", flush=True)
            while True:
                task = go(Model(0))
                task.synchronize()
        """)
        assert program.stdout is not None
        assert program.stdout.readline() == "flows\n"
        time.sleep(0.05 + chance.random() * 0.02)
        program.kill()
        program.communicate()
        eventually(lambda: near.links() == [], what="the end of the link")
        near.copy_cache("f", "g")
        assert equal(near.read("f"), pattern(3, 20, 1, 6400)), number
        time.sleep(0.05)
        assert equal(near.read("f"), pattern(3, 20, 1, 6400)), "the dead write"
    told, _, err = decoder.run("assert results(go(Model())) == ['LLM_SUCCESS']")
    assert told == 0, err
    assert decoder.whole()
    near.deallocate("f")
    near.deallocate("g")
    assert near.used() == 0


def test_a_prefill_that_stood_still_does_not_write_where_others_live_now(ends: Ends, way: dict[str, Any]) -> None:
    """It is stopped with a layer on the way; the link breaks, the memory is given to others, then it goes on."""
    quick = {"llm__LinkHeartbeat": 100, "llm__LinkSilence": 400, "llm__SyncKvCacheWaitTime": 2000}
    decoder = Decoder(ends, {**way, **quick})
    near = decoder.near
    chance = random.Random(1)  # noqa: S311
    program = decoder.start("""
        end.allocate("big", 1, 6400, 20, seed=1)
        print("flows", flush=True)
        while True:
            task = go(Model(0))
            task.synchronize()
    """)
    assert program.stdout is not None
    assert program.stdout.readline() == "flows\n"
    try:
        time.sleep(0.05 + chance.random() * 0.02)
        program.send_signal(signal.SIGSTOP)
        ended(near, 2)
        near.deallocate("f")
        near.allocate("g", 1, 6400, 20, seed=3)
        near.allocate("h", 1, 6400, 20, seed=4)
        program.send_signal(signal.SIGCONT)
        time.sleep(0.3)
        assert equal(near.read("g"), pattern(3, 20, 1, 6400)), "the late prefill wrote"
        assert equal(near.read("h"), pattern(4, 20, 1, 6400)), "the late prefill wrote"
    finally:
        program.kill()
        program.communicate()
    near.deallocate("g")
    near.deallocate("h")
    eventually(lambda: near.used() == 0, what="the memory")


def test_a_link_that_is_ended_by_force_with_a_layer_on_the_wire(ends: Ends, way: dict[str, Any]) -> None:
    near, far = ends.pair(pool=8 << 20, llm__SyncKvCacheWaitTime=15000, llm__LinkSilence=60000, **way)
    near.allocate("n", 1, 400_000, 6, seed=1)
    to = Far(far, way["accessible"], "f", 1, 400_000, 3, seed=2)
    assert send(near, "n", [to.to(range(1))]) == [OK]
    steps = Steps(allowed=1)
    far.stop()
    try:
        task = launch(near, "n", [to.to(range(3))], steps)
        steps.reached(1)
        near.unlink_clusters([far.at], 500, force=True)
        ended(near, 2)
        assert results(task, 8000) == [UNLINKED], "it need not wait for sync_kv_timeout"
    finally:
        steps.allow()
        far.go_on()
        far.spoiled = False
    far.unlink_clusters([(1, None)], 1000, force=True)
    linked(near, far)
    far.fill("f", 2)
    assert send(near, "n", [to.to(range(1, 3), 1)]) == [OK]
    to.twin = pattern(2, 6, 1, 400_000)
    to.slot(pattern(1, 6, 1, 400_000), range(1, 3), 1)
    far.rest(0.1)
    to.check("a leftover of the first transfer was written")


def test_random_kills_of_decoders_in_the_middle(ends: Ends, way: dict[str, Any]) -> None:
    settings = options(pool=8 << 20, llm__SyncKvCacheWaitTime=5000, **way)
    steady = ends.peer(settings, cluster=3)
    near = ends.near(settings)
    linked(near, steady)
    layers, size = 8, 40_000
    near.allocate("n", 1, size, 2 * layers, seed=1)
    safe = Far(steady, way["accessible"], "f", 1, size, layers, seed=2)
    chance = random.Random(2)  # noqa: S311
    for _ in range(SOAK or 12):
        victim = ends.peer(settings, cluster=2)
        eventually(lambda victim=victim: near.link_clusters([victim.at])[1][0] == OK, what="the link")
        to = Far(victim, way["accessible"], "f", 1, size, layers)
        steady.fill("f", 2)
        safe.twin = pattern(2, 2 * layers, 1, size)
        killer = threading.Timer(chance.random() * 0.004, os.kill, (victim.process.pid, signal.SIGKILL))
        victim.spoiled = True
        killer.start()
        told = send(near, "n", [to.to(range(layers)), safe.to(range(layers))])
        killer.join()
        assert told[0] in (OK, UNLINKED), told
        assert told[1] == OK
        safe.slot(pattern(1, 2 * layers, 1, size), range(layers))
        safe.check()
        ended(near, 2)
        victim.kill()


def test_a_process_ends_though_its_decoder_stands_still(ends: Ends, way: dict[str, Any]) -> None:
    decoder = Decoder(ends, way)
    far = ends.peer(options(**way), cluster=1 + 8)
    cache = far.allocate("f", 1, 6400, 20, seed=2)
    program = decoder.start(f"""
        address, cache, addresses = {far.address!r}, {cache}, {far.addresses("f")}
        assert end.link_clusters([(9, address)])[0] == "LLM_SUCCESS"
        if accessible == "True":
            config = TransferWithCacheKeyConfig(CacheKeyByIdAndIndex(9, cache), range(10), range(10))
        else:
            config = TransferConfig(9, addresses)
        steps = Steps(allowed=2)
        task = go(steps)
        steps.reached(2)
        print("flows", flush=True)
        sys.stdin.readline()
        steps.allow()
    """)
    assert program.stdout is not None
    assert program.stdout.readline() == "flows\n"
    far.stop()
    try:
        _, err = program.communicate("\n", timeout=LIMIT)
    finally:
        program.kill()
        far.go_on()
        far.spoiled = False
    assert program.returncode == 0, err
    eventually(lambda: far.links() == [], what="the end of the link")


def test_a_task_that_is_asked_after_the_engine_was_closed_at_exit(ends: Ends) -> None:
    decoder = Decoder(ends, {"accessible": False, "llm__LinkTransport": "auto"})
    told, out, err = decoder.run("""
        import atexit
        steps = Steps(allowed=2)
        task = go(steps)
        steps.reached(2)
        from llm_datadist import LLMDataDist
        def last():
            print(task.synchronize(5000).name, results(task), task.done(), task.cancel())
        import llm_datadist.datadist as module
        atexit.unregister(module._shutdown_handler)
        atexit.register(last)
        atexit.register(module._shutdown_handler)
    """)
    assert told == 0, err
    assert out.strip() == "LLM_ENGINE_FINALIZED ['LLM_ENGINE_FINALIZED'] True False", out
