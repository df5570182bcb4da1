"""``LlmDatadistStoreTier``: vLLM's chunks in a keeper, which outlives the servers of its host and serves all of them.

vLLM decides which chunks are stored and loaded. Two threads copy them between its primary tier and the keeper: one
stores, and the other one loads, so that no load waits for stores. Lookups read the mapped index of the keeper.
"""

from __future__ import annotations

import logging
import time
from collections import Counter, deque
from concurrent.futures import wait
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Optional

from llm_datadist import Closed, Error, Store
from llm_datadist.integrations.store_access import MAX_KEYS, KeeperLog, namespace, parts, started_thread
from llm_datadist.integrations.store_settings import StoreSettings
from llm_datadist.integrations.vllm import interface
from llm_datadist.integrations.vllm.supported import installed, warn_untested

with interface.needed():
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.canonical_mapping import canonical_format_id
    from vllm.distributed.kv_transfer.kv_connector.v1.offloading.metrics import OffloadingConnectorStats
    from vllm.v1.core.kv_cache_utils import get_none_hash_seed
    from vllm.v1.kv_offload.base import (
        Locality,
        LookupResult,
        Medium,
        OffloadingCounterMetadata,
        RequestOffloadingContext,
    )
    from vllm.v1.kv_offload.tiering.base import JobResult, SecondaryTierManager

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence
    from concurrent.futures import Future

__all__ = ["LlmDatadistStoreTier", "TierSettings"]

logger = logging.getLogger("vllm.llm_datadist")

_KEY_BYTES = 28
_LOOKUPS = (LookupResult.MISS, LookupResult.HIT)  # by whether the keeper has the chunk
# Keys that the first lookup of a request asks for, and by how much each further one of the step asks for more. A
# request of 1,000 chunks then needs four calls, and one whose first chunk is missing does not pay for 1,000.
_FIRST_KEYS, _MORE = 16, 4
# How long the scheduler may wait for a keeper that does not answer, when the store is opened at the first request.
_OPEN_S = 0.05
# How long a copy that has begun before the time limit of its job may take longer.
_GRACE_S = 10.0
# What became of chunks, and the counts of ``Store.stats`` that say why chunks were not loaded or not stored.
_LOADS, _STORES = "vllm:llm_datadist_tier_loads", "vllm:llm_datadist_tier_stores"
_REASONS = {
    _LOADS: {"misses_absent": "absent", "misses_changed": "changed", "misses_away": "away"},
    _STORES: {"puts_away": "away"},
}


class TierSettings(StoreSettings, frozen=True):
    """The checked options of the tier. The how-to page "Offloading in vLLM" describes them."""

    locality: Optional[str] = None


@dataclass
class _Job:
    """Chunks to load or to store, and, when it has ended, what became of them."""

    job_id: int
    kind: str  # _LOADS or _STORES
    keys: list[bytes]
    rows: list[int]
    request: str
    position: Callable[[bytes], Optional[int]]  # where the chunk of a key ends in the prompt
    deadline: float
    good: list[bytes] = field(default_factory=list)  # keys of chunks that were loaded or stored
    counts: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0

    def chain(self) -> list[tuple[bytes, int]]:
        """Return keys and rows in the order of the prompt. vLLM gives those of a store as a set."""
        return sorted(zip(self.keys, self.rows), key=lambda pair: self.position(pair[0]) or 0)


class LlmDatadistStoreTier(SecondaryTierManager):  # type: ignore[misc]
    """A secondary tier of vLLM whose chunks are values of a keeper (``llm-datadist serve``).

    The methods are those of vLLM's ``SecondaryTierManager``, and raise nothing, except ``drain_jobs``. vLLM 0.33 calls
    them under the lock of its manager. It publishes no KV events: the keeper does not tell a server what it replaces,
    so that routers would rely on chunks that are gone.

    Args:
        offloading_spec: as for vLLM's class, like the next three.
        primary_kv_view: the primary tier.
        tier_type: the name of the tier.
        backpressure_detector: decides which stores vLLM leaves out.
        options: ``TierSettings``.

    Raises:
        ValueError: an option is unknown, missing or has a wrong value, or vLLM does not say something that decides the
            bytes of its chunks.
        Error: the keeper refuses the tier; for example, its values are smaller than a chunk.
        RuntimeError: no thread can be started.
    """

    # Hits count as those of host memory, which a keeper uses.
    medium = Medium.CPU

    def __init__(
        self,
        offloading_spec: Any,
        primary_kv_view: memoryview,
        tier_type: str = "LlmDatadistStoreTier",
        backpressure_detector: Any = None,
        **options: Any,
    ) -> None:
        settings = TierSettings.parse("LlmDatadistStoreTier", options)
        warn_untested(installed())
        super().__init__(offloading_spec, primary_kv_view, tier_type, backpressure_detector)
        self.locality = None if settings.locality is None else Locality(settings.locality)
        self._settings, self._config = settings, offloading_spec.config
        self._timeout_s = settings.timeout_s
        self._futures: dict[int, Future[None]] = {}  # of jobs that were not reported
        self._ended: deque[_Job] = deque()  # jobs that touch no row any more
        self._live: set[str] = set()  # requests
        self._failed: dict[str, set[bytes]] = {}  # keys that could not be loaded, of requests that live
        self._found: dict[bytes, bool] = {}  # what was asked in this step
        self._asked = ("", _FIRST_KEYS)  # the last request that was asked about in this step, and the keys of a call
        self._counts: Counter[tuple[str, str]] = Counter()
        self._seen: Counter[str] = Counter()  # counts of the store that `_counts` has; each belongs to one thread
        with ExitStack() as undo:
            self._open(self._timeout_s)
            undo.callback(self._store.close)
            self._threads = {}
            for kind, name in ((_LOADS, "kv-load"), (_STORES, "kv-store")):
                self._threads[kind] = started_thread(name)
                undo.callback(self._threads[kind].shutdown)
            self._rows = primary_kv_view.cast("B")
            undo.pop_all()

    def _open(self, timeout_s: float) -> None:
        self._seed, socket = get_none_hash_seed(), self._settings.socket
        text = _namespace(self._config, self._settings.revision, self.block_size_bytes, self._seed)
        self._store = Store(socket, namespace=text, value=self.block_size_bytes, timeout=timeout_s)
        self._log = KeeperLog(logger, socket)
        logger.info("llm_datadist keeps chunks of %d bytes at %s as %r", self.block_size_bytes, socket, text)

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Take a request. Only chunks that it has computed are stored."""
        if get_none_hash_seed() != self._seed:  # vLLM chooses the seed after it has made its tiers
            self._store.close()
            try:
                self._open(_OPEN_S)
            except (Error, ValueError) as error:  # all calls of the closed store now miss
                self._log.error(error)
        self._live.add(req_context.req_id)
        return RequestOffloadingContext()

    def lookup(self, key: bytes, req_context: Any) -> LookupResult:
        """Say whether the keeper has a chunk. vLLM asks for each chunk of each waiting request, in each step."""
        found = self._found.get(key)
        if found is None:
            found = self._ask(key, req_context)
        # A chunk that could not be loaded would be promoted again without end, if it were still found.
        if self._failed and key in self._failed.get(req_context.req_id, ()):
            return LookupResult.MISS
        return _LOOKUPS[found]

    def _ask(self, key: bytes, context: Any) -> bool:
        """Ask for a key, and for those that vLLM is likely to look up next."""
        request, count = self._asked
        count = min(count * _MORE, MAX_KEYS) if request == context.req_id else _FIRST_KEYS
        self._asked = (context.req_id, count)
        # vLLM's keys of the request, in order. It looks prefixes up forwards, and sliding windows backwards.
        keys = list(context._offload_key_positions)  # noqa: SLF001 - vLLM has no other way to ask
        try:
            at = keys.index(key)
            backwards = at + 1 < len(keys) and keys[at + 1] in self._found
            keys = keys[max(0, at + 1 - count) : at + 1] if backwards else keys[at : at + count]
        except ValueError:
            keys = [key]
        try:
            there = self._store.exists(_store_keys(keys))
        except Exception as error:  # noqa: BLE001 - the scheduler would end
            self._log.error(error)
            there = [False] * len(keys)
        self._found.update(zip(keys, there))
        return self._found[key]

    def submit_store(self, job_metadata: Any) -> None:
        """Start to copy chunks to the keeper."""
        self._submit(_STORES, job_metadata)

    def submit_load(self, job_metadata: Any) -> None:
        """Start to copy chunks from the keeper."""
        self._submit(_LOADS, job_metadata)

    def _submit(self, kind: str, given: Any) -> None:
        # The rows of the jobs that wait are pinned, so their number is bounded by that of the rows.
        context, deadline = given.req_context, time.monotonic() + self._timeout_s
        of_request = (context.req_id, context.get_offload_key_position)
        job = _Job(given.job_id, kind, list(given.keys), given.chunk_ids.tolist(), *of_request, deadline)
        try:
            self._futures[job.job_id] = self._threads[kind].submit(self._move, job)
        except RuntimeError as error:  # they were shut down
            self._log.error(error)
            self._ended.append(job)

    def _move(self, job: _Job) -> None:
        """Copy the chunks of a job, on a thread of its kind. An exception would keep the rows, so none leaves it."""
        began = time.monotonic()
        try:
            for part in parts(job.chain()):
                self._move_part(job, part)
        except Closed:  # by `shutdown`
            pass
        except Exception as error:  # noqa: BLE001 - the job has failed
            self._log.error(error)
        job.seconds = time.monotonic() - began
        self._ended.append(job)

    def _move_part(self, job: _Job, part: Sequence[tuple[bytes, int]]) -> None:
        left_s = job.deadline - time.monotonic()
        if left_s <= 0:
            job.counts["late"] += len(part)
            return
        size = self.block_size_bytes
        keys = _store_keys([key for key, _ in part])
        rows = [self._rows[row * size : row * size + size] for _, row in part]
        done = self._store.get(keys, rows) if job.kind is _LOADS else self._store.put(keys, rows, timeout=left_s)
        good = [key for (key, _), right in zip(part, done) if right]
        job.good += good
        job.counts["done"] += len(good)
        stats = self._log.noted(self._store, done)
        for name, reason in _REASONS[job.kind].items():
            new = stats.get(name, self._seen[name])
            job.counts[reason] += new - self._seen[name]
            self._seen[name] = new

    def get_finished_jobs(self) -> list[JobResult]:
        """Return the jobs that have ended since the last call."""
        results = []
        while self._ended:
            results.append(self._result(self._ended.popleft()))
        return results

    def _result(self, job: _Job) -> JobResult:
        self._futures.pop(job.job_id, None)
        success = len(job.good) == len(job.keys)
        if not success and job.kind is _LOADS and job.request in self._live:
            self._failed.setdefault(job.request, set()).update(set(job.keys).difference(job.good))
        job.counts["failed"] += len(job.keys) - sum(job.counts.values())
        for result, count in (+job.counts).items():
            self._counts[job.kind, result] += count
        loaded = None if success else job.good
        return JobResult(job.job_id, success, successful_keys=loaded, transfer_time=job.seconds)

    def on_request_finished(self, req_context: Any) -> None:
        """Forget a request. Its jobs may still run."""
        self._live.discard(req_context.req_id)
        self._failed.pop(req_context.req_id, None)

    def on_schedule_end(self, context: Any) -> None:  # noqa: ARG002 - vLLM gives it
        """Forget what was found: chunks come and go between steps."""
        self._found.clear()
        self._asked = ("", _FIRST_KEYS)

    def drain_jobs(self) -> None:
        """Wait until nothing touches the primary tier.

        Raises:
            RuntimeError: a copy still runs, long after its time limit. vLLM must not use the rows again.
        """
        limit_s = self._timeout_s + _GRACE_S
        running = wait(self._futures.values(), limit_s).not_done
        if running:
            text = f"the copies of {len(running)} jobs of the primary tier have not ended within {limit_s:g} s"
            raise RuntimeError(f"{text} (timeout_ms={self._settings.timeout_ms}, and {_GRACE_S:g} s)")

    def shutdown(self) -> None:
        """Close the store, and let go of the primary tier. Copies that run end first, and jobs that wait fail."""
        self._store.close()
        for thread in self._threads.values():
            thread.shutdown(wait=True)
        self._rows.release()

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingCounterMetadata]:  # noqa: ARG003
        """Return the metrics of the tier. vLLM itself counts lookups, hits, bytes and seconds of each tier."""
        loads = "Chunks to be loaded from the keeper, by result: done, absent, changed (replaced while copied), away"
        stores = "Chunks to be stored in the keeper, by result: done, away"
        others = "(no keeper), late (not begun within timeout_ms), failed (all others; if stored, there was no room)."
        return {
            _LOADS: OffloadingCounterMetadata(f"{loads} {others}", ("result",)),
            _STORES: OffloadingCounterMetadata(f"{stores} {others}", ("result",)),
        }

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Return what has been counted since the last call."""
        if not self._counts:
            return None
        stats = OffloadingConnectorStats()
        for (kind, result), count in self._counts.items():
            stats.increase_counter(kind, count, (result,))
        self._counts.clear()
        return stats


def _store_keys(keys: Sequence[bytes]) -> list[bytes]:
    """Return the keys of chunks in the keeper. All keys of a server have the same length.

    vLLM's key is the hash of a block and 4 bytes with the number of its group: 36 bytes for SHA-256. Its last 28 have
    24 bytes of the hash, which is enough against collisions, and cost a tenth of a digest of the key. Keys with a
    shorter hash (xxhash) are taken whole.
    """
    ends = [key[-_KEY_BYTES:] for key in keys]
    return ends if len(ends[0]) == _KEY_BYTES else [end.rjust(_KEY_BYTES, b"\0") for end in ends]


def _namespace(config: Any, revision: str, chunk_bytes: int, seed: str) -> str:
    """Return the namespace of the chunks of a server: what their keys do not have, and what decides their bytes.

    Raises:
        ValueError: something is unknown.
    """
    parallel, layout = config.parallel, config.kv_cache_layout
    if config.canonical_layout and layout is not None:
        layout = canonical_format_id(layout)
    # Their chunks have the same bytes under any number of ranks, as vLLM's own `fs` tier has it.
    rank_free = parallel.is_parallelism_agnostic or config.replicated_layout
    ranks = [parallel.world_size, parallel.tp_size, parallel.pp_size, parallel.pcp_size, parallel.dcp_size]
    version = installed()
    facts = {
        # No release of vLLM promises the bytes of its KV cache to the next one.
        "vllm": None if version == "unknown" else ".".join(version.split(".")[:2]),
        "dtype": config.model.dtype,
        "tokens_per_hash": config.cache.tokens_per_hash,
        "blocks_per_chunk": config.cache.blocks_per_chunk,
        "chunk_bytes": chunk_bytes,
        "ranks": "any" if rank_free else ranks,
        "groups": [[group.group_id, group.tokens_per_block, list(group.layer_names)] for group in config.groups],
        "layout": layout,
        "replicated": config.replicated_layout,
        "hash_seed": f"seed {seed}",  # it may be empty, as ``PYTHONHASHSEED`` may be
    }
    return namespace("vllm", config.model.name, revision, facts)


interface.check(interface.STORE_TIER, LlmDatadistStoreTier)
