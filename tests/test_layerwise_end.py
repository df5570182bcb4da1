"""Layer-wise transfers at `finalize`, in a forked process, and at the end of a process."""

from __future__ import annotations

import random
import signal
import time
from typing import Any

import numpy as np
import pytest

from layers import FINALIZED, Decoder, Steps, Transfer, finish, layers_done, results, unlinked
from llm_datadist import LLMStatusCode
from peers import OK, Ends, equal, eventually, linked, options, pattern, stop_process, together

ASYNCIO = """
import asyncio
async def main():
    task = go(Model())
    async def wait():
        return await task
    asyncio.ensure_future(wait())
    await asyncio.sleep(0.003)
asyncio.run(main())
"""
EXECUTOR = """
from concurrent.futures import ThreadPoolExecutor
crew = ThreadPoolExecutor(2)
layers = [crew.submit(time.sleep, 0.01) for _ in range(10)]
class Computed(LayerSynchronizer):
    def synchronize_layer(self, layer_index, timeout_in_millis):
        layers[layer_index].result()
        return True
task = go(Computed())
"""
COMPUTE = """
def compute():
    while True:
        sum(range(1000))
"""


def test_finalize_with_a_synchronizer_that_blocks(ends: Ends, way: dict[str, Any]) -> None:
    transfer = Transfer(ends, way, 3, llm__SyncKvCacheWaitTime=3000)
    local, to, steps = transfer.local, transfer.to, Steps(allowed=2)
    task = transfer.start(steps, [to.to(range(4)), to.to(range(1), slot=1), to.to(range(3, 4), slot=2)])
    steps.reached(2)
    eventually(lambda: layers_done(task)[:2] == [2, 1], what="two layers")
    waited, _ = together(2, lambda number: local.finalize() if number else task.synchronize())
    assert waited is LLMStatusCode.LLM_ENGINE_FINALIZED
    ended = results(task, 0)
    assert ended[:2] == [FINALIZED, OK]
    assert ended[2] in (None, FINALIZED)
    assert task.done()
    assert not task.cancel()
    assert task.errors()[0].status_code.name == FINALIZED
    assert len(task.progress()) == 3
    steps.allow()
    to.slot(transfer.source, range(1), slot=1)
    transfer.arrived(2)
    local.init(options(**way))  # the process may have another engine
    linked(local, transfer.peer)
    local.allocate("n", 3, 64, 8, seed=1)
    transfer.again()
    assert results(task, 0) == ended


def test_finalize_while_layers_arrive_waits_for_them(ends: Ends, way: dict[str, Any]) -> None:
    transfer = Transfer(ends, way, 1, 6400, 20)

    class Model(Steps):
        def synchronize_layer(self, layer_index: int, timeout_in_millis: int | None) -> bool:
            time.sleep(0.005)
            return super().synchronize_layer(layer_index, timeout_in_millis)

    task = transfer.start(Model())
    transfer.local.finalize()
    assert results(task) == [OK]
    transfer.arrived()


@pytest.mark.parametrize(
    ("program", "status", "printed"),
    [
        ("task = go(Model())", 0, ""),
        ("task = go(Model())\nsys.exit(3)", 3, ""),
        ("task = go(Model())\nend = None; del task", 0, ""),
        ("task = go(Model())\nraise ValueError('end')", 1, ""),
        ("task = go(Model())\nend.finalize()", 0, ""),
        ("tasks = [go(Model()) for _ in range(20)]", 0, ""),
        ("task = go(Model())\nthreading.Thread(target=lambda: print(results(task))).start()", 0, "['LLM_SUCCESS']"),
        ("task = go(Model())\nthreading.Thread(target=task.synchronize, daemon=True).start()", 0, ""),
        ("threading.Thread(target=lambda: go(Model())).start()", 0, ""),
        (ASYNCIO, 0, ""),
        (EXECUTOR, 0, ""),
    ],
    ids=["end", "exit", "dropped", "raises", "finalize", "many", "thread", "daemon", "late", "asyncio", "executor"],
)
@pytest.mark.parametrize("accessible", [False, True])
def test_a_process_delivers_its_transfers_at_its_end(
    ends: Ends, program: str, status: int, printed: str, accessible: bool
) -> None:
    decoder = Decoder(ends, {"accessible": accessible, "llm__LinkTransport": "auto"})
    ended, out, err = decoder.run(program)
    assert (ended, out.strip()) == (status, printed), err
    assert err == "" or status == 1, err
    assert decoder.whole()


@pytest.mark.parametrize(
    "blocks", ["threading.Event().wait()", "os.read(os.pipe()[0], 1)", "compute()"], ids=["lock", "read", "busy"]
)
def test_a_process_ends_though_a_synchronizer_does_not_return(ends: Ends, blocks: str) -> None:
    decoder = Decoder(ends)
    out = decoder.output(f"{COMPUTE}\ntask = go(Model(0, lambda: {blocks}))\nprint(task.get_results(100))\n")
    assert "LLM_TIMEOUT" in out
    eventually(lambda: decoder.local.links() == [], what="the end of the link")
    for got, good in zip(decoder.local.read("f")[:6], decoder.good):
        assert np.array_equal(got, good)
    decoder.local.deallocate("f")
    # The engine answers the last layer before it lets go of the cache.
    eventually(lambda: decoder.local.used() == 0, what="the memory")


def test_a_synchronizer_that_ends_the_process(ends: Ends) -> None:
    decoder = Decoder(ends)
    out = decoder.output("task = go(Model(0, lambda: sys.exit(5)))\nprint(results(task))\n")
    assert "['LLM_TIMEOUT']" in out, "a line of the log may follow before the end of the line"
    assert out.count("synchronize_layer raised") == 1
    for call, expected in (("os._exit(6)", 6), ("os.kill(os.getpid(), signal.SIGTERM)", -signal.SIGTERM)):
        status, _, _ = decoder.run(f"task = go(Model(0, lambda: {call}))\ntask.synchronize()\n")
        assert status == expected
    decoder.output("task = go(Model())\nassert results(task) == ['LLM_SUCCESS']\n")
    assert decoder.whole()


def test_a_process_ends_though_its_decoder_stands_still(ends: Ends, way: dict[str, Any]) -> None:
    decoder = Decoder(ends, way)
    remote = ends.peer(options(**way), cluster=9)
    cache = remote.allocate("f", 1, 6400, 20, seed=2)
    text = f"""
        address, cache, addresses = {remote.address!r}, {cache}, {remote.addresses("f")}
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
    """
    program = decoder.start(text, until="flows")
    with remote.stopped():
        status, _, err = finish(program, "\n")
    assert status == 0, err
    eventually(lambda: remote.links() == [], what="the end of the link")


def test_threads_at_work_survive_the_end_of_the_interpreter(ends: Ends) -> None:
    """`drain` is disabled, so that threads still ask for layers while the interpreter ends."""
    decoder = Decoder(ends)
    for _ in range(5):
        status, _, err = decoder.run("""
            import random
            from llm_datadist.original import layerwise
            layerwise.drain = lambda engine: None
            for _ in range(6):
                go(Model(random.choice([0, 0.0005, 0.002])))
            time.sleep(random.random() * 0.003)
        """)
        assert (status, err) == (0, "")
        eventually(lambda: decoder.local.links() == [], what="the end of the link")


def test_a_task_after_its_engine_was_closed_at_exit(ends: Ends) -> None:
    out = Decoder(ends).output("""
        import atexit
        steps = Steps(allowed=2)
        task = go(steps)
        steps.reached(2)
        def last():
            print(task.synchronize(5000).name, results(task), task.done(), task.cancel())
        import llm_datadist.original.datadist as module
        atexit.register(last)
        atexit.register(module._shutdown_handler)
    """)
    assert out.strip() == "LLM_ENGINE_FINALIZED ['LLM_ENGINE_FINALIZED'] True False", out


def test_a_forked_child_has_no_part_in_the_transfer(ends: Ends, way: dict[str, Any]) -> None:
    decoder = Decoder(ends, way)
    out = decoder.output("""
        import warnings
        from llm_datadist import LLMException
        warnings.simplefilter("ignore")
        steps = Steps(allowed=2)
        task = go(steps)
        steps.reached(2)
        child = os.fork()
        if child == 0:
            codes = []
            for call in (task.synchronize, task.get_results, task.cancel, task.done, task.progress, task.errors,
                         lambda: go(Steps())):
                try: codes.append(call())
                except LLMException as error: codes.append(error.status_code.name)
            del task
            sys.exit(codes != ["LLM_FAILED"] * 7)
        assert os.waitpid(child, 0)[1] == 0
        steps.allow()
        print(results(task))
    """)
    assert out == "['LLM_SUCCESS']\n"
    assert decoder.whole()


FLOWS = """
print("flows", flush=True)
while True:
    go(Model(0)).synchronize()
"""


def test_a_prefill_that_stood_still_does_not_write_where_others_live_now(ends: Ends, way: dict[str, Any]) -> None:
    """Prefill is stopped while it sends a layer. The link ends, other caches get the memory, and prefill resumes."""
    quick = {"llm__LinkHeartbeat": 100, "llm__LinkSilence": 400, "llm__SyncKvCacheWaitTime": 2000}
    decoder = Decoder(ends, way, **quick)
    local = decoder.local
    program = decoder.start(FLOWS, until="flows")
    try:
        time.sleep(0.05 + random.Random(1).random() * 0.02)  # noqa: S311
        stop_process(program.pid)
        unlinked(local, 2)
        local.deallocate("f")
        for seed, name in ((3, "g"), (4, "h")):
            local.allocate(name, 1, 6400, 20, seed=seed)
        program.send_signal(signal.SIGCONT)
        time.sleep(0.3)
        for seed, name in ((3, "g"), (4, "h")):
            assert equal(local.read(name), pattern(seed, 20, 1, 6400)), "the late prefill wrote"
            local.deallocate(name)
    finally:
        program.kill()
        program.communicate()
    eventually(lambda: local.used() == 0, what="the memory")
