"""vLLM in processes of their own, each with its engine in the process, which starts in seconds.

A server takes requests through a pipe and sends back their results. The parent plays the part of the proxy between
prefill and decode.
"""

from __future__ import annotations

import copy
import multiprocessing
import os
import statistics
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import signal
    from collections.abc import Iterable
    from multiprocessing.connection import Connection

START_S = 900  # on a machine that builds something else beside, a start takes minutes
REQUEST_S = 300
ENVIRONMENT = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "DO_NOT_TRACK": "1",
    "HF_HUB_OFFLINE": "1",
    "OMP_NUM_THREADS": "1",
}


@dataclass
class Done:
    """Result of a request. ``first_token_at`` is a time of ``time.monotonic``."""

    tokens: list[int]
    params: dict[str, Any] | None
    reason: str
    first_token_s: float
    first_token_at: float
    cached: int


@dataclass
class End:
    """What a server says when it stops.

    Attributes:
        usage: the share of its KV cache in use.
        stats: the sums of what its connector has reported.
        connector_s: seconds that the model's thread has spent in the connector.
        computing_s: the same, for each step that has computed layers.
        steps: number of steps.
        preemptions: how often its scheduler has preempted a request.
    """

    usage: float
    stats: dict[str, Any]
    connector_s: float
    computing_s: list[float]
    steps: int
    preemptions: int


class Server:
    """A vLLM in a process of its own.

    Args:
        model: the folder of the model.
        kv: the ``KVTransferConfig``, or ``None`` for none.
        environment: further environment variables.
        options: further arguments of ``EngineArgs``.
    """

    def __init__(
        self,
        model: str,
        kv: dict[str, Any] | None = None,
        environment: dict[str, str] | None = None,
        **options: Any,
    ) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, there = context.Pipe()
        self._process = context.Process(target=_serve, args=(there, model, kv, environment or {}, options))
        self._process.start()
        there.close()
        self._ready = False

    def wait(self) -> Server:
        """Wait until it serves."""
        if not self._ready:
            assert self._hear(START_S) == "ready"
            self._ready = True
        return self

    def add(self, name: str, tokens: list[int], count: int, params: dict[str, Any] | None = None) -> None:
        """Add a request for ``count`` tokens."""
        self._pipe.send(("add", name, tokens, count, params))

    def results(self, timeout_s: float = REQUEST_S) -> Iterable[tuple[str, Done]]:
        """Yield the requests that have ended, until none has for an instant."""
        while self._pipe.poll(0):
            yield self._hear(timeout_s)

    def result(self, timeout_s: float = REQUEST_S) -> tuple[str, Done]:
        """Wait for the next request that ends."""
        found: tuple[str, Done] = self._hear(timeout_s)
        return found

    def usage(self) -> float:
        """Return the share of its KV cache in use. No request may run or have an outcome that was not taken."""
        self._pipe.send(("usage",))
        share: float = self._hear(REQUEST_S)
        return share

    def stop(self, *, check: bool = True) -> End:
        """Shut it down in order. Libraries of other connectors may crash at exit, so ``check`` can be left out."""
        self._pipe.send(("stop",))
        end: End = self._hear(REQUEST_S)
        self._process.join(60)
        assert self._process.exitcode == 0 or not check
        return end

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process."""
        os.kill(self._process.pid or 0, number)

    def kill(self) -> None:
        """End the process at once, whatever it does."""
        self._process.kill()
        self._process.join(60)

    def _hear(self, timeout_s: float) -> Any:
        if not self._pipe.poll(timeout_s):
            raise TimeoutError(f"the server said nothing for {timeout_s:g} s")
        return self._pipe.recv()


def _serve(
    pipe: Connection, model: str, kv: dict[str, Any] | None, environment: dict[str, str], options: dict[str, Any]
) -> None:
    os.environ.update({**ENVIRONMENT, **environment})
    from vllm import EngineArgs, LLMEngine, SamplingParams  # noqa: PLC0415 - reads the environment
    from vllm.config import KVTransferConfig  # noqa: PLC0415

    ranks = options.get("tensor_parallel_size", 1) * options.get("pipeline_parallel_size", 1)
    defaults = {
        "max_model_len": 4096,
        "dtype": "float32",
        "block_size": 32,
        "enable_prefix_caching": False,
        "enforce_eager": True,
    }
    engine = LLMEngine.from_engine_args(
        EngineArgs(
            model=model,
            seed=0,
            disable_log_stats=False,
            distributed_executor_backend="uni" if ranks == 1 else "mp",
            kv_transfer_config=None if kv is None else KVTransferConfig(**kv),
            **{**defaults, **options},
        )
    )
    watched = _Watched() if kv is not None and ranks == 1 else None
    pipe.send("ready")
    core = engine.engine_core.engine_core
    preempted = _Counted(core.scheduler, "_preempt_request")
    begun: dict[str, list[float]] = {}
    while True:
        busy = engine.has_unfinished_requests() or core.scheduler.has_requests()
        while pipe.poll(0 if busy else 0.001):
            what, *rest = pipe.recv()
            if what == "stop":
                found = watched.found() if watched is not None else ({}, 0.0, [], 0)
                pipe.send(End(core.scheduler.kv_cache_manager.usage, *found, preempted.calls))
                engine.engine_core.shutdown()
                return
            if what == "usage":
                pipe.send(core.scheduler.kv_cache_manager.usage)
                continue
            name, tokens, count, params = rest
            extra = {"kv_transfer_params": params} if params else None
            sampling = SamplingParams(
                temperature=0, max_tokens=count, ignore_eos=True, detokenize=False, extra_args=extra
            )
            begun[name] = [time.monotonic()]
            engine.add_request(name, {"prompt_token_ids": tokens}, sampling)
            busy = True
        if not busy:
            continue
        outputs = engine.step()
        if not outputs:
            time.sleep(0.001)  # as vLLM's own loop does if nothing ran
        for output in outputs:
            times = begun[output.request_id]
            if output.outputs[0].token_ids and len(times) == 1:
                times.append(time.monotonic())
            if output.finished:
                text = output.outputs[0]
                first = (times[-1] - times[0], times[-1])
                cached = output.num_cached_tokens or 0
                done = Done(list(text.token_ids), output.kv_transfer_params, str(text.finish_reason), *first, cached)
                pipe.send((output.request_id, done))


class _Counted:
    """Counts the calls of a method of an object."""

    def __init__(self, of: Any, name: str) -> None:
        self.calls = 0
        self._method = getattr(of, name)
        setattr(of, name, self._call)

    def _call(self, *args: Any, **kwargs: Any) -> Any:
        self.calls += 1
        return self._method(*args, **kwargs)


class _Watched:
    """Keeps what the connector of a worker reports in each step, and the time that its methods take.

    The clock takes about as long as the cheapest methods, so what it takes is measured first, and subtracted.
    """

    METHODS = (
        "handle_preemptions",
        "start_load_kv",
        "save_kv_layer",
        "wait_for_save",
        "get_transfer_results",
        "get_finished",
    )

    def __init__(self) -> None:
        from vllm.distributed.kv_transfer import get_kv_transfer_group  # noqa: PLC0415

        self._seconds = 0.0
        self._computing: list[float] = []
        self._steps = 0
        self._step_began = 0.0
        self._computes = False
        self._kept: list[Any] = []
        self._inside = False
        self._clock_s = 0.0
        self._clock_s = self._time_of_clock()
        connector = get_kv_transfer_group()
        for name in self.METHODS:
            setattr(connector, name, self._timed(getattr(connector, name), computes=name == "save_kv_layer"))
        take = connector.get_kv_connector_stats
        connector.get_kv_connector_stats = lambda: self._keep(take())

    def found(self) -> tuple[dict[str, Any], float, list[float], int]:
        """Return the sums of the reports, and the next three attributes of ``End``."""
        sums: dict[str, Any] = {}
        if self._kept:
            whole, *others = self._kept
            for other in others:
                whole.aggregate(other)
            sums = dict(whole.to_dict())
        return sums, self._seconds, self._computing, self._steps

    def _time_of_clock(self) -> float:
        empty, times = self._timed(lambda: None, computes=False), []
        for _ in range(2000):
            before = self._seconds
            empty()
            times.append(self._seconds - before)
        self._seconds = 0.0
        return statistics.median(times)

    def _keep(self, found: Any) -> Any:
        self._steps += 1
        if self._computes:
            self._computing.append(self._seconds - self._step_began)
        self._step_began, self._computes = self._seconds, False
        if found is not None:
            self._kept.append(copy.deepcopy(found))
        return found

    def _timed(self, method: Any, *, computes: bool) -> Any:
        def timed(*args: Any, **kwargs: Any) -> Any:
            self._computes |= computes
            if self._inside:  # one method may call another
                return method(*args, **kwargs)
            self._inside, begin = True, time.perf_counter()
            try:
                return method(*args, **kwargs)
            finally:
                self._inside, self._seconds = False, self._seconds + time.perf_counter() - begin - self._clock_s

        return timed


def hand_over(prefill: Server, decode: Server, prompts: dict[str, list[int]], count: int) -> dict[str, Done]:
    """Have prefill compute the prompts, and decode the rest, as a proxy does. Return what decode says."""
    for name, tokens in prompts.items():
        prefill.add(name, tokens, 1, {"do_remote_decode": True})
    found: dict[str, Done] = {}
    end = time.monotonic() + REQUEST_S
    while len(found) < len(prompts):
        for name, done in prefill.results():
            decode.add(name, prompts[name], count, done.params)
        found.update(decode.results())
        if time.monotonic() > end:
            raise TimeoutError(f"{len(found)} of {len(prompts)} requests ended within {REQUEST_S} s")
        time.sleep(0.0005)
    return found


def where(prefill: Server, decode: Server, tokens: list[int]) -> dict[str, Any]:
    """Hand over one request, and return what a proxy learns about prefill from the response."""
    prefill.add("first", tokens, 1, {"do_remote_decode": True})
    done = prefill.result()[1]
    decode.add("first", tokens, 1, done.params)
    decode.result()
    given = (done.params or {})["llm_datadist"]
    return {name: given[name] for name in ("engine_id", "addresses", "block_sizes")}


def start_both(
    prefill: Server, decode: Server, prompts: dict[str, list[int]], count: int, transfer_params: Any
) -> None:
    """Give requests to both sides at the same time, as a proxy does that knows where prefill is."""
    for name, tokens in prompts.items():
        ticket = f"ticket of {name}"
        decode.add(name, tokens, count, {"llm_datadist": {**transfer_params, "ticket": ticket}})
        prefill.add(name, tokens, 1, {"do_remote_decode": True, "llm_datadist": {"ticket": ticket}})


def alone(server: Server, prompts: dict[str, list[int]], count: int) -> dict[str, list[int]]:
    """Return the tokens of one vLLM that computes everything."""
    for name, tokens in prompts.items():
        server.add(name, tokens, count)
    found = {}
    while len(found) < len(prompts):
        name, done = server.result()
        found[name] = done.tokens
    return found
