"""`CacheTask`: what a layer-wise transfer tells, how it can be waited for, and how it ends (contract §4.13, §8).

The destinations are engines of this very process, linked like any others, so that their addresses are known and every
byte can be looked at. Synchronizers wait for gates, not for time. Not for: arguments (`test_layerwise_arguments.py`),
or peers that die.
"""

from __future__ import annotations

import asyncio
import gc
import os
import select
import threading
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Optional

import numpy as np
import pytest

from conftest import options, pool
from llm_datadist import (
    CacheTask,
    LayerSynchronizer,
    LLMClusterInfo,
    LLMException,
    LLMRole,
    LLMStatusCode,
    TransferConfig,
    _core,
    layerwise,
)
from llm_datadist.layerwise import LayerProgress
from memory import UINT32_MAX, at, desc, fill, run_fresh, same, tensors, used
from peers import LIMIT, eventually

if TYPE_CHECKING:
    from collections.abc import Iterator

SUCCESS = LLMStatusCode.LLM_SUCCESS
TIMEOUT = LLMStatusCode.LLM_TIMEOUT
INVALID = LLMStatusCode.LLM_PARAM_INVALID
UNLINKED = LLMStatusCode.LLM_NOT_YET_LINK
FAILED = LLMStatusCode.LLM_FAILED
FINALIZED = LLMStatusCode.LLM_ENGINE_FINALIZED
LAYERS = 4
ROW = 256
STRANGER = 99
SOON = int(LIMIT * 1000)  # milliseconds


class Gates(LayerSynchronizer):
    """Every layer has a gate of its own; `shut` ones wait to be opened, or for what `answers` says to be returned."""

    def __init__(self, *shut: int, answers: Optional[dict[int, Callable[[], Any]]] = None) -> None:
        self.gates = {layer: threading.Event() for layer in shut}
        self.answers = answers or {}
        self.asked: list[tuple[int, Optional[int]]] = []
        self.threads: set[threading.Thread] = set()

    def synchronize_layer(self, layer_index: int, timeout_in_millis: Optional[int]) -> bool:
        self.asked.append((layer_index, timeout_in_millis))
        self.threads.add(threading.current_thread())
        if layer_index in self.gates:
            assert self.gates[layer_index].wait(LIMIT), "nobody opened the gate"
        answer: bool = self.answers.get(layer_index, lambda: True)()
        return answer

    def open(self, *layers: int) -> None:
        for layer in layers:
            self.gates[layer].set()

    def reached(self, layer: int) -> None:
        eventually(lambda: layer in [asked for asked, _ in self.asked], what=f"layer {layer}")


class Far:
    def __init__(self, cluster: int) -> None:
        given = {"llm.Role": "Prompt", "llm.listenIpInfo": "127.0.0.1:0", "llm.MemPoolConfig": pool()}
        self.cluster = cluster
        self.native = _core.DataDist(LLMRole.PROMPT, cluster, {"llm.EnableCacheManager": "1", **given})
        self.addrs = self.native.allocate_cache(desc(4, ROW, 2 * LAYERS), []).tensor_addrs()
        self.tensors = [at(address, 4 * ROW).reshape(4, ROW) for address in self.addrs]

    def config(self, layers: range = range(LAYERS), row: int = 0, slot: int = 0) -> TransferConfig:
        """Layers into the same layers here, batch slot `row` into `slot`."""
        addrs = [address + slot * ROW for address in self.addrs[2 * layers.start : 2 * layers.stop]]
        return TransferConfig(self.cluster, addrs, layers, row)


class Bench:
    """An engine with a filled cache, linked to two others."""

    def __init__(self, start: Callable[..., Any], **extra: str) -> None:
        self.dist = start(options(**extra))
        self.manager = self.dist.cache_manager
        self.src = self.manager.allocate_cache(desc(4, ROW, 2 * LAYERS))
        self.bytes = fill(self.src, 7)
        self.far = [Far(2), Far(3)]
        infos = []
        for far in self.far:
            info = LLMClusterInfo()
            info.remote_cluster_id = far.cluster
            info.append_local_ip_info("127.0.0.1", 0)
            host, port = str(far.native.listening()).rsplit(":", 1)
            info.append_remote_ip_info(host, int(port))
            infos.append(info)
        assert self.dist.link_clusters(infos, 5000)[0] is SUCCESS

    def start(self, synchronizer: LayerSynchronizer, *configs: TransferConfig) -> CacheTask:
        task = self.manager.transfer_cache_async(
            self.src, synchronizer, list(configs) or [far.config() for far in self.far]
        )
        assert isinstance(task, CacheTask)
        return task

    def arrived(self, far: Far, layers: range = range(LAYERS), row: int = 0, slot: int = 0) -> bool:
        expected = [np.zeros((4, ROW), dtype=np.uint8) for _ in self.bytes]
        for tensor in range(2 * layers.start, 2 * layers.stop):
            expected[tensor][slot] = self.bytes[tensor][row]
        return same(far.tensors, expected)

    def source_is_released(self) -> None:
        """Deallocate the source, and wait until nothing else holds it."""
        before = used(self.manager)["device"]
        self.manager.deallocate_cache(self.src)
        eventually(lambda: used(self.manager)["device"] != before, what="the memory: nothing holds the cache")

    def close(self) -> None:
        for far in self.far:
            far.tensors = []
            far.native.close()


@pytest.fixture
def bench(start: Any) -> Iterator[Bench]:
    made = Bench(start)
    yield made
    made.close()
    eventually(lambda: not walkers(), what="the end of the threads")


def walkers() -> list[threading.Thread]:
    return [thread for thread in threading.enumerate() if thread.name == "llm-layers"]


def descriptors() -> int:
    return len(list(Path("/proc/self/fd").iterdir()))


def test_all_layers_arrive(bench: Bench) -> None:
    near, other = bench.far
    gates = Gates()
    task = bench.start(gates, near.config(row=1, slot=3), other.config(range(1, 3), row=2))
    assert task.synchronize() is SUCCESS
    assert task.get_results() == [SUCCESS, SUCCESS]
    assert task.errors() == [None, None]
    assert task.done()
    assert bench.arrived(near, row=1, slot=3)
    assert bench.arrived(other, range(1, 3), row=2)
    assert gates.asked == [(layer, None) for layer in range(LAYERS)], "each once, in order"
    assert [(thread.name, thread.daemon) for thread in gates.threads] == [("llm-layers", True)]
    assert same(tensors(bench.src), bench.bytes), "the source was changed"


def test_a_layer_goes_as_soon_as_it_is_ready(bench: Bench) -> None:
    gates = Gates(*range(LAYERS))
    task = bench.start(gates)
    for layer in range(LAYERS):
        gates.reached(layer)
        for tensor in (2 * layer, 2 * layer + 1):  # what is not said to be ready may still change
            tensors(bench.src)[tensor][:] = 100 + tensor
        gates.open(layer)
        both = [LayerProgress(layer + 1, LAYERS, (layer + 1) * 2 * ROW)] * 2
        eventually(lambda both=both: task.progress() == both, what=f"layer {layer}")
    assert task.synchronize(SOON) is SUCCESS
    for far in bench.far:
        for tensor, array in enumerate(far.tensors):
            assert (array[0] == 100 + tensor).all()
            assert not array[1:].any()


def test_a_limit_ends_the_wait_and_not_the_transfer(bench: Bench) -> None:
    gates = Gates(0)
    task = bench.start(gates)
    for limit in (0, 1, 30):
        assert task.synchronize(limit) is TIMEOUT
        assert task.get_results(limit) == [TIMEOUT, TIMEOUT]
        assert task.synchronize(timeout_in_millis=limit) is TIMEOUT
    for error in task.errors():
        assert error is not None
        assert error.status_code is TIMEOUT
        assert "layer is being waited for (cluster=" in str(error)
        assert "layer=0" in str(error)
    assert not task.done()
    gates.open(0)
    assert task.synchronize(UINT32_MAX) is SUCCESS
    assert task.get_results(0) == [SUCCESS, SUCCESS]
    assert task.synchronize(0) is SUCCESS
    assert all(bench.arrived(far) for far in bench.far)


class Unspeakable(Exception):  # noqa: N818
    def __str__(self) -> str:
        raise ValueError("no text")


class NoAnswer:
    """Is neither true nor false."""

    def __bool__(self) -> bool:
        raise ArithmeticError("neither")


def raises(error: BaseException) -> Callable[[], Any]:
    def raise_it() -> Any:
        raise error

    return raise_it


FAILURES = {
    "a text": (raises(ValueError("the reason")), "ValueError: the reason"),
    "no text": (raises(Unspeakable()), "Unspeakable"),
    "Ctrl-C": (raises(KeyboardInterrupt()), "KeyboardInterrupt"),
    "exit": (raises(SystemExit(3)), "SystemExit: 3"),
    "of the engine": (raises(LLMException("x", status_code=SUCCESS)), "LLMException: x"),
    "no truth": (NoAnswer, "ArithmeticError: neither"),
    "very long": (raises(ValueError("long " * 1000)), "ValueError: long long"),
}


@pytest.mark.parametrize("name", FAILURES)
def test_a_synchronizer_that_raises(bench: Bench, name: str, caplog: pytest.LogCaptureFixture) -> None:
    answer, text = FAILURES[name]
    near, other = bench.far
    task = bench.start(Gates(answers={1: answer}), near.config(range(1, 4)), other.config(range(2, 4)))
    assert task.synchronize(SOON) is TIMEOUT, "the default code, never success"
    assert task.get_results(SOON) == [TIMEOUT, None]
    error, none = task.errors()
    assert none is None
    assert "layer 1 will not be ready: synchronize_layer raised" in str(error)
    assert text in str(error)
    assert len(str(error)) < 700
    eventually(lambda: not walkers(), what="the end of the thread")
    told = [record for record in caplog.records if "synchronize_layer raised" in record.getMessage()]
    assert len(told) == 1, "logged once"
    assert told[0].exc_info, "with its traceback"


def test_a_layer_is_waited_for_no_longer_than_said(bench: Bench) -> None:
    near, other = bench.far
    gates = Gates(2)
    gates.timeout_in_millis = 500
    task = bench.start(gates, near.config(), other.config(range(2)), other.config(range(3, 4)))
    assert task.get_results(SOON) == [TIMEOUT, SUCCESS, None], "while the synchronizer still waits"
    assert "timeout_in_millis" in str(task.errors()[0])
    assert walkers()
    gates.open(2)
    eventually(lambda: not walkers(), what="the end of the thread")
    assert gates.asked == [(0, 500), (1, 500), (2, 500)]


def test_cancel(bench: Bench) -> None:
    near, other = bench.far
    gates = Gates(2)
    task = bench.start(gates, near.config(), other.config(range(2)), other.config(range(3, 4)))
    eventually(lambda: [carried.layers_done for carried in task.progress()] == [2, 2, 0], what="two layers")
    assert task.cancel()
    assert task.synchronize(SOON) is FAILED
    assert task.get_results(SOON) == [FAILED, SUCCESS, FAILED]
    assert "cancelled" in str(task.errors()[0])
    assert not task.cancel(), "there is nothing left to cancel"
    gates.open(2)
    eventually(lambda: not walkers(), what="the end of the thread")
    assert [layer for layer, _ in gates.asked] == [0, 1, 2], "nobody needs the others"
    assert bench.arrived(near, range(2))
    assert bench.start(Gates()).synchronize(SOON) is SUCCESS, "the rows are free again"


def test_no_thread_no_transfer(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    def none_left(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    gates = Gates()
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", none_left)
        with pytest.raises(
            LLMException, match="the thread that waits for the layers cannot be started: can't start new thread"
        ) as caught:
            bench.start(gates)
    assert caught.value.status_code is FAILED
    assert isinstance(caught.value.__cause__, RuntimeError)
    assert not gates.asked
    bench.source_is_released()


def test_an_interrupt_while_the_thread_starts_is_that_interrupt(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda _: raises(KeyboardInterrupt())())
        with pytest.raises(KeyboardInterrupt):
            bench.start(Gates())
    assert bench.start(Gates()).synchronize(SOON) is SUCCESS


def test_a_synchronizer_whose_attributes_raise(bench: Bench) -> None:
    class Fickle(Gates):
        @property
        def timeout_in_millis(self) -> Optional[int]:  # type: ignore[override]
            raise ArithmeticError("gone")

    with pytest.raises(ArithmeticError, match="gone"):
        bench.start(Fickle())
    bench.source_is_released()


def test_a_task_that_nobody_asked_for_layers_is_cancelled(bench: Bench) -> None:
    """As when Ctrl-C comes between the native start and the thread: no destination waits for ever, nothing is held."""
    configs = [far.config() for far in bench.far]
    given = (bench.src, Gates(), configs, None, None, None)
    native = bench.manager._engine.transfer_cache_async(*given)
    before = used(bench.manager)["device"]
    bench.manager.deallocate_cache(bench.src)
    assert not native.wait(50)
    assert used(bench.manager)["device"] == before, "a transfer under way holds its source"
    del native
    eventually(lambda: used(bench.manager)["device"] != before, what="the memory: nothing holds the cache")


def test_a_task_that_is_asked_for_layers_goes_on_without_its_handle(bench: Bench) -> None:
    native = bench.manager._engine.transfer_cache_async(bench.src, Gates(), [bench.far[0].config()], None, None, None)
    assert native.wanted(0)
    before = used(bench.manager)["device"]
    bench.manager.deallocate_cache(bench.src)
    native.ready(LAYERS - 1)
    del native
    eventually(lambda: used(bench.manager)["device"] != before, what="the memory: nothing holds the cache")
    expected = [bench.bytes[tensor][0] for tensor in range(2 * LAYERS)]
    assert all(np.array_equal(got[0], row) for got, row in zip(bench.far[0].tensors, expected))


class StandIn:
    def __init__(self, *codes: Optional[LLMStatusCode], timeout_code: LLMStatusCode = TIMEOUT) -> None:
        self.codes, self.timeout_code = list(codes), timeout_code

    def wait(self, _limit: Optional[int]) -> bool:
        return True

    def done(self) -> bool:
        return True

    def results(self) -> list[Optional[LLMStatusCode]]:
        return list(self.codes)


@pytest.mark.parametrize("code", [TIMEOUT, LLMStatusCode.LLM_WAIT_PROCESS_TIMEOUT])
@pytest.mark.parametrize("codes", [[None], [SUCCESS, None], [None, SUCCESS], [None, None]])
def test_no_result_is_never_success(codes: list[Optional[LLMStatusCode]], code: LLMStatusCode) -> None:
    stand_in: Any = StandIn(*codes, timeout_code=code)
    task = CacheTask(stand_in)
    assert [task.synchronize(limit) for limit in (None, 0, SOON)] == [code] * 3

    async def awaited() -> LLMStatusCode:
        return await task

    assert asyncio.run(awaited()) is code
    assert task.get_results() == codes


@pytest.mark.parametrize(
    ("codes", "code"),
    [
        *[([], SUCCESS), ([SUCCESS, SUCCESS], SUCCESS)],
        *[([None, UNLINKED], UNLINKED), ([SUCCESS, FAILED, None, INVALID], FAILED)],
    ],
)
def test_the_first_failure_counts(codes: list[Optional[LLMStatusCode]], code: LLMStatusCode) -> None:
    stand_in: Any = StandIn(*codes)
    assert CacheTask(stand_in).synchronize() is code


@pytest.mark.parametrize(("first", "then"), [(SOON, None), (SOON, 1), (None, 1), (SOON, "no limit")])
def test_the_limit_is_what_it_was_when_the_transfer_started(bench: Bench, first: Any, then: Any) -> None:
    gates = Gates(0, 2)
    gates.timeout_in_millis = first
    task = bench.start(gates)
    gates.reached(0)
    gates.timeout_in_millis = then
    gates.open(0)
    gates.reached(2)
    time.sleep(0.02)  # longer than what is set now
    gates.open(2)
    assert task.synchronize(SOON) is SUCCESS
    assert gates.asked == [(layer, first) for layer in range(LAYERS)]


def test_a_thread_that_ends_for_no_reason_is_a_failure(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    monkeypatch.setattr(threading, "excepthook", seen.append)
    monkeypatch.setattr(layerwise, "_arrives", lambda *_: raises(MemoryError())())
    task = bench.start(Gates(), bench.far[0].config(range(1, 4)), bench.far[1].config(range(2, 4)))
    assert task.get_results(SOON) == [TIMEOUT, None]
    assert "layer 1 will not be ready: the thread that waits for it ended" in str(task.errors()[0])
    eventually(lambda: seen, what="the report")
    assert seen[0].exc_type is MemoryError


def test_awaiting(bench: Bench) -> None:
    assert bench.start(Gates()).synchronize(SOON) is SUCCESS  # what links keep open is open
    gates = Gates(0)
    task = bench.start(gates)
    before = descriptors()

    async def main() -> None:
        async def wait() -> LLMStatusCode:
            return await task

        some = [asyncio.ensure_future(wait()) for _ in range(3)]
        await asyncio.sleep(0.05)
        assert not any(one.done() for one in some), "nothing is ready"
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(wait(), 0.05)
        some[0].cancel()
        with pytest.raises(asyncio.CancelledError):
            await some[0]
        assert not task.done(), "who gives up leaves the transfer alone"
        gates.open(0)
        assert await asyncio.gather(*some[1:]) == [SUCCESS, SUCCESS]
        assert await task is SUCCESS, "again, and at once"

    threads = threading.active_count()
    asyncio.run(main())
    assert threading.active_count() <= threads, "no thread waited"
    eventually(lambda: descriptors() <= before, what="the end of every descriptor")
    assert all(bench.arrived(far) for far in bench.far)


def test_who_gives_up_leaves_no_reader(bench: Bench) -> None:
    gates = Gates(0)
    task = bench.start(gates)

    async def main() -> None:
        loop = asyncio.get_running_loop()
        with pytest.raises(asyncio.TimeoutError):
            await asyncio.wait_for(task, 0.02)
        reading, writing = os.pipe()  # one of them has the number that was given up
        for end in (reading, writing):
            assert not loop.remove_reader(end), "somebody still reads it"
        os.close(reading)
        os.close(writing)

    asyncio.run(main())
    gates.open(0)
    assert task.synchronize(SOON) is SUCCESS


def test_descriptors_are_the_callers(bench: Bench) -> None:
    gates = Gates(0)
    task = bench.start(gates)
    first, second = task._native.descriptor(), task._native.descriptor()
    assert first != second
    assert not os.get_inheritable(first)
    assert select.select([first, second], [], [], 0)[0] == []
    os.close(first)
    gates.open(0)
    assert select.select([second], [], [], LIMIT)[0] == [second]
    assert task.done()
    assert select.select([second], [], [], 0)[0] == [second], "and stays readable"
    os.close(second)


class Scripted:
    """A task whose layers come one with every wait, up to a number of them."""

    def __init__(self, layers: int, of_layers: int) -> None:
        self.layers, self.of_layers, self.here, self.waits = layers, of_layers, 0, 0

    def done(self) -> bool:
        return self.here == self.of_layers

    def progress(self) -> list[tuple[int, int, int]]:
        return [(self.here, self.of_layers, 0)]

    def wait(self, limit: int) -> bool:
        assert 0 <= limit <= 50
        self.waits += 1
        self.here = min(self.here + 1, self.layers)
        return self.done()


def test_who_is_waited_for_at_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    class Engine:
        def sync_kv_timeout(self) -> int:
            return 50

    engine, other = Engine(), Engine()
    whole, stuck, foreign = Scripted(5, 5), Scripted(2, 9), Scripted(0, 1)
    under_way = [(engine, whole, None), (other, foreign, None), (engine, stuck, None)]
    monkeypatch.setattr(layerwise, "_under_way", under_way)
    layerwise.drain(engine)  # type: ignore[arg-type]
    assert whole.done()
    assert whole.waits == 5
    assert stuck.waits == 6, "as long as any of them gets on, and once more"
    assert foreign.waits == 0


IN_ONE_PROCESS = """
    import atexit, sys, threading, time
    told = []
    atexit.register(lambda: print(*[str(code).rsplit("_", 1)[-1] for task in told for code in task.get_results(0)]))
    from llm_datadist import (CacheDesc, DataType, LayerSynchronizer, LLMClusterInfo, LLMDataDist, LLMRole,
                              TransferConfig, _core)
    given = {"llm.EnableCacheManager": "1", "llm.MemPoolConfig": '{"memory_size": 2097152}',
             "llm.SyncKvCacheWaitTime": "2000"}
    desc = CacheDesc(8, [4, 256], DataType.DT_INT8)
    far = _core.DataDist(LLMRole.PROMPT, 2, {"llm.Role": "Prompt", "llm.listenIpInfo": "127.0.0.1:0", **given})
    addrs = far.allocate_cache(desc, []).tensor_addrs()
    dist = LLMDataDist(LLMRole.PROMPT, 1)
    dist.init(given)
    info = LLMClusterInfo()
    info.remote_cluster_id = 2
    info.append_local_ip_info("127.0.0.1", 0)
    info.append_remote_ip_info("127.0.0.1", int(far.listening().rsplit(":")[-1]))
    assert dist.link_clusters([info])[0] == 0
    src = dist.cache_manager.allocate_cache(desc)
    class Synchronizer(LayerSynchronizer):
        def __init__(self, call): self.call = call
        def synchronize_layer(self, layer_index, timeout_in_millis): return self.call(layer_index)
    def start(call):
        task = dist.cache_manager.transfer_cache_async(src, Synchronizer(call), [TransferConfig(2, addrs)])
        told.append(task)
        return task
"""


def in_one_process(code: str) -> str:
    """Run code between an engine that transfers and its destination in a fresh process; what it printed."""
    lines = "\n".join("    " + line for line in code.strip().splitlines())
    return run_fresh(IN_ONE_PROCESS + lines + "\n")


def test_threads_at_work_survive_the_end_of_the_interpreter() -> None:
    """Nothing is drained: the limit is over at once, and the threads go on asking while the interpreter ends."""
    busy = """
import random
layerwise = sys.modules["llm_datadist.layerwise"]
layerwise.drain = lambda engine: None
for _ in range(6):
    start(lambda layer: time.sleep(random.choice([0, 0, 0.0005, 0.002])) or True)
time.sleep(random.random() * 0.003)
"""
    for _ in range(5):
        codes = in_one_process(busy).split()
        assert len(codes) == 6
        assert set(codes) <= {"SUCCESS", "FINALIZED", "TIMEOUT"}  # the last: a layer is still on its way


def test_a_forked_child_has_no_part_in_the_transfer() -> None:
    out = in_one_process(
        """
import os, warnings
from llm_datadist import LLMException
warnings.simplefilter("ignore", DeprecationWarning)
gate = threading.Event()
task = start(lambda layer: gate.wait(20))
child = os.fork()
if child == 0:
    codes = []
    for call in (task.synchronize, task.get_results, task.cancel, task.done, task.progress, task.errors):
        try: call()
        except LLMException as error: codes.append(error.status_code.name)
    dist.finalize()
    del task
    told.clear()
    os._exit(0 if codes == ["LLM_FAILED"] * 6 else 1)
assert os.waitpid(child, 0)[1] == 0
gate.set()
assert task.synchronize(20000) == 0
print("parent done")
"""
    )
    assert out == "parent done\nSUCCESS\n"


def test_what_a_transfer_leaves_behind(bench: Bench) -> None:
    bench.start(Gates()).synchronize(SOON)
    before = descriptors()
    for _ in range(30):
        assert bench.start(Gates()).synchronize(SOON) is SUCCESS
        with pytest.raises(LLMException):
            bench.start(Gates(), bench.far[0].config(row=4))
    gc.collect()
    eventually(lambda: descriptors() <= before + 1, what="the descriptors")  # the last task's is still held
    eventually(lambda: not walkers(), what="the end of the threads")
    assert bench.start(Gates()).synchronize(SOON) is SUCCESS
    assert len(layerwise._under_way) == 1
