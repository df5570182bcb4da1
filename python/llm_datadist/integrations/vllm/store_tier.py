"""``LlmDatadistStoreTier``: vLLM's chunks in a keeper, which outlives the servers of its host and serves all of them.

vLLM decides which chunks are stored and loaded. The store copies them between its primary tier and the keeper in the
background (``Store.start_get``, ``Store.start_put``). Lookups read the mapped index of the keeper.
"""

from __future__ import annotations

import logging
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import compress
from operator import itemgetter
from typing import TYPE_CHECKING, Any, Optional

from llm_datadist import Closed, Error, Store, Timeout
from llm_datadist.integrations.store_access import MAX_KEYS, KeeperLog, namespace, parts
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
    from collections.abc import Iterable, Sequence

    from llm_datadist import Transfer

__all__ = ["LlmDatadistStoreTier", "TierSettings"]

logger = logging.getLogger("vllm.llm_datadist")

_KEY_BYTES = 28
_end = itemgetter(slice(-_KEY_BYTES, None))  # faster than a loop that cuts keys
_MISS, _HIT = LookupResult.MISS, LookupResult.HIT
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
    _LOADS: {
        "misses_absent": "absent",
        "misses_changed": "changed",
        "misses_corrupt": "corrupt",
        "misses_away": "away",
    },
    _STORES: {"puts_no_room": "failed", "puts_away": "away"},
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
    request: str
    parts: int = 0  # calls that have not ended
    good: list[bytes] = field(default_factory=list)  # keys of chunks that were loaded or stored
    seconds: float = 0.0  # of its longest call, without the wait for a thread


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
        self._settings, self._config, self._timeout_s = settings, offloading_spec.config, settings.timeout_s
        self._running: dict[Transfer[list[bool]], tuple[_Job, Sequence[bytes]]] = {}  # the keys of each call of a job
        self._ended: list[_Job] = []  # jobs that touch no row any more, and were not reported
        self._live: set[str] = set()  # requests
        self._failed: dict[str, set[bytes]] = {}  # keys that could not be loaded, of requests that live
        self._left: list[Transfer[list[bool]]] = []  # those of `_running` whose store was closed: they have no events
        self._found: dict[bytes, bool] = {}  # whether the keeper has the keys that were looked up in this step
        # The last request that was asked about in this step, its keys, and how many of them the last call had.
        self._asked: tuple[str, list[bytes], int] = ("", [], 0)
        self._counts: Counter[tuple[str, str]] = Counter()
        self._pinned = 4 * primary_kv_view.nbytes  # by jobs, at most; vLLM rarely gives a row to several
        self._open(self._timeout_s)
        self._rows = primary_kv_view.cast("B")

    def _open(self, timeout_s: float) -> None:
        self._seed, socket = get_none_hash_seed(), self._settings.socket
        size, settings = self.block_size_bytes, self._settings
        text = _namespace(self._config, settings.revision, size, self._seed)
        limits: dict[str, Any] = {"timeout": timeout_s, "queue": self._pinned}
        self._store = Store(socket, namespace=text, value=size, **limits, **settings.store_options)
        self._seen: Counter[str] = Counter()  # counts of the store that `_counts` has
        self._log = KeeperLog(logger, socket)
        logger.info("llm_datadist keeps chunks of %d bytes at %s as %r", size, socket, text)

    def on_new_request(self, req_context: Any) -> RequestOffloadingContext:
        """Take a request. Only chunks that it has computed are stored."""
        if get_none_hash_seed() != self._seed:  # vLLM chooses the seed after it has made its tiers
            self._close()
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
        if not found or (self._failed and key in self._failed.get(req_context.req_id, ())):
            return _MISS
        return _HIT

    def _ask(self, key: bytes, context: Any) -> bool:
        """Ask for a key, and for those that vLLM is likely to look up next. Return whether the keeper has it."""
        request, keys, count = self._asked
        if request == context.req_id:
            count = min(count * _MORE, MAX_KEYS)
        else:  # vLLM's keys of the request, in order
            keys, count = list(context._offload_key_positions), _FIRST_KEYS  # noqa: SLF001 - there is no other way
        self._asked = (context.req_id, keys, count)
        try:
            at = keys.index(key)
            # vLLM looks prefixes up forwards, and sliding windows backwards.
            backwards = at + 1 < len(keys) and keys[at + 1] in self._found
            keys = keys[max(0, at + 1 - count) : at + 1] if backwards else keys[at : at + count]
        except ValueError:
            keys = [key]
        try:
            self._found.update(zip(keys, self._store.exists(_store_keys(keys))))
        except Exception as error:  # noqa: BLE001 - the scheduler would end
            self._log.error(error)
            self._found.update(dict.fromkeys(keys, False))
        return self._found[key]

    def submit_store(self, job_metadata: Any) -> None:
        """Start to copy chunks to the keeper."""
        self._submit(_STORES, job_metadata)

    def submit_load(self, job_metadata: Any) -> None:
        """Start to copy chunks from the keeper."""
        self._submit(_LOADS, job_metadata)

    def _submit(self, kind: str, given: Any) -> None:
        context, keys, rows = given.req_context, list(given.keys), given.chunk_ids.tolist()
        job, left = _Job(given.job_id, kind, keys, context.req_id), len(keys)
        try:
            start = self._store.start_get if kind is _LOADS else self._store.start_put
            if kind is _STORES:  # vLLM gives their keys as a set
                row, keys = dict(zip(keys, rows)), _in_order(keys, context)
                rows = list(map(row.__getitem__, keys))
            for part, at in zip(parts(keys), parts(rows)):
                self._running[start(_store_keys(part), self._rows, rows=at, timeout=self._timeout_s)] = job, part
                job.parts, left = job.parts + 1, left - len(part)
        except Exception as error:  # noqa: BLE001 - the scheduler would end
            self._fail(kind, left, error)
        if not job.parts:
            self._ended.append(job)

    def _fail(self, kind: str, chunks: int, error: Exception) -> None:
        self._counts[kind, "late" if isinstance(error, Timeout) else "failed"] += chunks
        if not isinstance(error, (Closed, Timeout)):  # by `shutdown`, or by the time limit
            self._log.error(error)

    def _note(self, calls: Iterable[Transfer[list[bool]]]) -> None:
        """Take note of calls that have ended."""
        seen: list[bool] = []  # for each call whether all chunks are there, and whether some are
        for call in calls:
            entry = self._running.pop(call, None)
            if entry is None:  # its outcome was noted before
                continue
            job, keys = entry
            try:
                done = call.result(0)
                whole = all(done)
                good = keys if whole else list(compress(keys, done))
                job.good += good
                job.seconds = max(job.seconds, call.nanos / 1e9)
                self._counts[job.kind, "done"] += len(good)
                seen += (whole, bool(good) or whole)
            except Exception as error:  # noqa: BLE001 - the scheduler would end
                self._fail(job.kind, len(keys), error)
            job.parts -= 1
            if not job.parts:
                self._ended.append(job)
        try:
            if seen:
                self._explain(self._log.noted(self._store, seen))
        except Exception as error:  # noqa: BLE001 - the scheduler would end
            self._log.error(error)

    def _explain(self, stats: dict[str, Any]) -> None:
        """Count why chunks are missing: also those of calls that have ended, and were not noted yet."""
        for kind, names in _REASONS.items() if stats else ():
            for name, reason in names.items():
                self._counts[kind, reason] += stats[name] - self._seen[name]
                self._seen[name] = stats[name]

    def get_finished_jobs(self) -> list[JobResult]:
        """Return the jobs that have ended since the last call."""
        try:
            if self._left:
                self._note([call for call in self._left if call.done()])
                self._left = [call for call in self._left if call in self._running]
            if len(self._running) > len(self._left):
                self._note([event.transfer for event in self._store.events()])
        except Exception as error:  # noqa: BLE001 - the scheduler would end
            self._log.error(error)
        ended, self._ended = self._ended, []
        return [self._result(job) for job in ended]

    def _result(self, job: _Job) -> JobResult:
        success = len(job.good) == len(job.keys)
        if not success and job.kind is _LOADS and job.request in self._live:
            self._failed.setdefault(job.request, set()).update(set(job.keys).difference(job.good))
        loaded = None if success else job.good
        return JobResult(job.job_id, success, successful_keys=loaded, transfer_time=job.seconds)

    def on_request_finished(self, req_context: Any) -> None:
        """Forget a request. Its jobs may still run."""
        self._live.discard(req_context.req_id)
        self._failed.pop(req_context.req_id, None)

    def on_schedule_end(self, context: Any) -> None:  # noqa: ARG002 - vLLM gives it
        """Forget what was found: chunks come and go between steps."""
        self._found.clear()
        self._asked = ("", [], 0)

    def drain_jobs(self) -> None:
        """Wait until nothing touches the primary tier.

        Raises:
            RuntimeError: a copy still runs, long after its time limit. vLLM must not use the rows again.
        """
        limit_s = self._timeout_s + _GRACE_S
        self._wait(limit_s)
        if self._running:
            text = f"{len(self._running)} copies of the primary tier have not ended within {limit_s:g} s (timeout_ms"
            raise RuntimeError(f"{text}={self._settings.timeout_ms}, and {_GRACE_S:g} s)")

    def _wait(self, limit_s: float) -> None:
        end = time.monotonic() + limit_s
        for call in list(self._running):
            with suppress(Error, TimeoutError):
                call.result(max(0.0, end - time.monotonic()))
        self._note([call for call in self._running if call.done()])

    def _close(self) -> None:
        """Close the store. Copies that run end first, and jobs that wait fail."""
        self._store.close()
        self._wait(0)
        self._left = list(self._running)

    def shutdown(self) -> None:
        """Close the store, and let go of the primary tier."""
        self._close()
        if self._running:
            logger.error("%d copies of the primary tier still run, and may write into it", len(self._running))
        self._rows.release()

    @classmethod
    def build_metric_definitions(cls, extra_config: dict[str, Any]) -> dict[str, OffloadingCounterMetadata]:  # noqa: ARG003
        """Return the metrics of the tier. vLLM itself counts lookups, hits, bytes and seconds of each tier."""
        away = "away (no keeper, or it has not answered in time)"
        others = f"{away}, late (loads not done, and stores not begun, within timeout_ms), failed (all others"
        loads = f"Chunks to be loaded from the keeper, by result: done, absent, changed while copied, {others})."
        stores = f"Chunks to be stored in the keeper, by result: done, {others}, and those without room)."
        return {
            name: OffloadingCounterMetadata(text, ("result",)) for name, text in ((_LOADS, loads), (_STORES, stores))
        }

    def get_stats(self) -> OffloadingConnectorStats | None:
        """Return what has been counted since the last call."""
        counts, self._counts = +self._counts, Counter()
        if not counts:
            return None
        stats = OffloadingConnectorStats()
        for (kind, result), count in counts.items():
            stats.increase_counter(kind, count, (result,))
        return stats


def _in_order(keys: list[bytes], context: Any) -> list[bytes]:
    """Return the keys of chunks in the order of their request. Those that are not of the request come first."""
    positions = context._offload_key_positions  # noqa: SLF001 - a call for each key takes longer than the sort
    try:
        return sorted(keys, key=positions.get)
    except TypeError:
        return sorted(keys, key=lambda key: positions.get(key) or 0)


def _store_keys(keys: Sequence[bytes]) -> list[bytes]:
    """Return the keys of chunks in the keeper. All keys of a server have the same length.

    vLLM's key is the hash of a block and 4 bytes with the number of its group: 36 bytes for SHA-256. Its last 28 have
    24 bytes of the hash, which is enough against collisions, and cost a tenth of a digest of the key. Keys with a
    shorter hash (xxhash) are taken whole.
    """
    ends = list(map(_end, keys))
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
