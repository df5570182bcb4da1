"""The offloading half of a vLLM scheduler, without a model: vLLM's real manager and tiers, driven as vLLM does."""

from __future__ import annotations

import contextlib
import functools
import multiprocessing
import os
import random
import socket
import time
import uuid
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from vllm.v1.kv_offload.base import LookupResult, ReqContext, ScheduleEndContext, make_offload_key
from vllm.v1.kv_offload.config import (
    OffloadingCacheConfig,
    OffloadingConfig,
    OffloadingGroupConfig,
    OffloadingModelConfig,
    OffloadingParallelConfig,
)
from vllm.v1.kv_offload.tiering.spec import TieringOffloadingSpec

from llm_datadist.integrations.vllm import register

if TYPE_CHECKING:
    from collections.abc import Callable
    from multiprocessing.connection import Connection

# Forks of a process that has imported vLLM start at once, and no engine was opened in it.
_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload([__name__])
ROW = 64 << 10
IDLE = ScheduleEndContext(new_req_ids=(), preempted_req_ids=())
_PARALLEL = {
    "rank": 0,
    "world_size": 1,
    "tp_size": 1,
    "pp_size": 1,
    "pcp_size": 1,
    "dcp_size": 1,
    "data_parallel_index": 0,
    "data_parallel_size": 1,
    "data_parallel_rank_local": None,
    "is_parallelism_agnostic": True,
}


def free_port() -> int:
    with contextlib.closing(socket.socket()) as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


def keys(request: str, count: int) -> list[Any]:
    """The keys of the chunks of a request."""
    rng = random.Random(request)  # noqa: S311 - not a secret
    return [make_offload_key(rng.randbytes(32), 0) for _ in range(count)]


def content(key: bytes, size: int) -> np.ndarray:
    """The bytes of a chunk, which depend on its key only."""
    return np.random.default_rng(list(key)).integers(-128, 128, size, np.int8)


def _locked(method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def locked(self: Scheduler, *given: Any, **named: Any) -> Any:
        with self.lock:
            return method(self, *given, **named)

    return locked


class Scheduler:
    """One scheduler. `tier` is the configuration of its secondary tier."""

    def __init__(self, tier: dict[str, Any], chunks: int = 64, row: int = ROW, **model: Any) -> None:
        register()
        self.address = f"127.0.0.1:{free_port()}"
        host, _, port = self.address.rpartition(":")
        control = {"host": host, "port": int(port)} if "p2p" in tier["type"].lower() else {}
        extra = {"cpu_bytes_to_use": chunks * row, "secondary_tiers": [{**control, **tier}]}
        config = OffloadingConfig(
            groups=(OffloadingGroupConfig(tokens_per_block=16, layer_names=("a",), group_id=0, **_more("group")),),
            worker_kv_bytes_per_block=row,
            enable_kv_cache_events=False,
            extra_config=extra,
            engine_id=uuid.uuid4().hex,
            model=OffloadingModelConfig(**{"name": "model", "dtype": "int8", **_more("model"), **model}),
            cache=OffloadingCacheConfig(tokens_per_hash=16, blocks_per_chunk=1),
            parallel=OffloadingParallelConfig(**_PARALLEL),
            kv_cache_layout="LBHNC",
        )
        self.manager = TieringOffloadingSpec(config).get_manager()
        # From 0.33 on, another thread of vLLM polls tiers between the steps. A scheduler holds the lock in a step.
        self.lock = getattr(self.manager, "lock", None) or contextlib.nullcontext()
        self.tier = self.manager.secondary_tiers[0]
        self.view = self.manager.primary_tier.get_kv_memoryview()
        self.rows = np.frombuffer(self.view, np.int8).reshape(self.view.shape)
        self.reported: list[Any] = []  # all that the tier has reported
        get_finished = self.tier.get_finished_jobs

        def recorded() -> list[Any]:
            found = list(get_finished())
            self.reported += found
            return found

        self.tier.get_finished_jobs = recorded

    @_locked
    def step(self) -> None:
        self.manager.on_schedule_end(IDLE)

    @_locked
    def begin(self, request: str, **params: Any) -> ReqContext:
        context = ReqContext(req_id=request, kv_transfer_params=params or None)
        self.manager.on_new_request(context)
        return context

    def serve(self, request: str, count: int) -> ReqContext:
        """Compute a request that a decoder will fetch."""
        context = self.begin(request, remote_decoder={"kv_request_id": request})
        self.store(context, keys(request, count))
        return context

    @_locked
    def store(self, context: ReqContext, wanted: list[Any]) -> None:
        """Compute chunks: as the model would, fill the rows that the manager gives."""
        prepared = self.manager.prepare_store(wanted, context)
        for position, key in enumerate(wanted):
            context.set_offload_key_position(key, 16 * (position + 1))
        for key, row in zip(prepared.keys_to_store, prepared.store_spec.chunk_ids):
            self.rows[row] = content(key, self.rows.shape[1])
        self.manager.complete_store(prepared.keys_to_store, context)

    def fetch(self, request: str, peer: str, kind: str = "remote_prefiller") -> ReqContext:
        """Begin a request whose chunks a peer has."""
        host, _, port = peer.rpartition(":")
        source = {"kv_request_id": request, "remote_host": host, "remote_port": int(port)}
        return self.begin(request, **{kind: source})

    @_locked
    def found(self, context: ReqContext, count: int) -> list[LookupResult]:
        """Look the chunks of a request up, as each step does, until one is missing."""
        results, wanted = [], keys(context.req_id, count)
        for position, key in enumerate(wanted):
            context.set_offload_key_position(key, 16 * (position + 1))
        for key in wanted:
            results.append(self.manager.lookup(key, context))
            if results[-1] is LookupResult.MISS:
                break
        return results

    @_locked
    def equal(self, context: ReqContext, count: int) -> bool:
        """Whether the chunks of a request are in this primary tier, with their bytes."""
        wanted = keys(context.req_id, count)
        rows = self.manager.prepare_load(wanted, context).chunk_ids
        same = all((self.rows[row] == content(key, self.rows.shape[1])).all() for key, row in zip(wanted, rows))
        self.manager.complete_load(wanted, context)
        return same

    @_locked
    def finish(self, context: ReqContext) -> None:
        self.manager.on_request_finished(context)

    def close(self) -> None:
        del self.rows
        self.manager.shutdown()


def _more(kind: str) -> dict[str, Any]:
    """What newer releases of vLLM want besides."""
    fields = {
        "group": (OffloadingGroupConfig, {"sliding_window_size_in_chunks": None}),
        "model": (OffloadingModelConfig, {"max_model_len": 4096}),
    }
    owner, values = fields[kind]
    return {name: value for name, value in values.items() if name in owner.__dataclass_fields__}


def resolved(results: list[LookupResult], count: int) -> bool:
    """Whether a lookup of `count` chunks needs no further step."""
    return results[-1:] == [LookupResult.MISS] or results == [LookupResult.HIT] * count


def load(
    consumer: Scheduler, context: ReqContext, count: int, others: tuple[Scheduler, ...] = (), limit_s: float = 60.0
) -> list[LookupResult]:
    """Step until all chunks of a request are there, or one is missing."""
    end = time.monotonic() + limit_s
    while True:
        results = consumer.found(context, count)
        if resolved(results, count):
            return results
        assert time.monotonic() < end, results
        for one in (consumer, *others):
            one.step()


def serve(given: dict[str, Any], pipe: Connection) -> None:
    """Be a scheduler that has computed the chunks of some requests, until the other end of the pipe is closed."""
    scheduler = Scheduler(given["tier"], given["chunks"], given["row"])
    for request, count in given["requests"].items():
        scheduler.serve(request, count)
    pipe.send((scheduler.address, scheduler.manager.primary_tier._mmap_region.mmap_path))
    while not pipe.poll(0.001):
        scheduler.step()
    scheduler.close()


class Other:
    """A scheduler in a process of its own, which has computed the chunks of some requests."""

    def __init__(self, tier: dict[str, Any], requests: dict[str, int], chunks: int = 64, row: int = ROW) -> None:
        self._pipe, theirs = _PROCESSES.Pipe()
        given = {"tier": tier, "requests": requests, "chunks": chunks, "row": row}
        self.process = _PROCESSES.Process(target=serve, args=(given, theirs), daemon=True)
        self.process.start()
        theirs.close()
        self.address, self._primary_tier = self._pipe.recv()

    def signal(self, number: int) -> None:
        os.kill(self.process.pid or 0, number)

    def end(self) -> int | None:
        """Let it shut down, and return its exit status."""
        self._pipe.close()
        self.process.join(60.0)
        return self.process.exitcode

    def kill(self) -> None:
        self.process.kill()
        self.process.join()
        Path(self._primary_tier).unlink(missing_ok=True)  # vLLM would leave it
