"""``KeeperL2``: LMCache's objects in a keeper, which outlives the servers of its host and serves all of them.

LMCache submits tasks, and asks for their results after a signal. One thread for each kind runs them, so that no lookup
waits for a copy. The keeper decides what is replaced.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import logging
import math
import os
import threading
import time
from contextlib import ExitStack, suppress
from ctypes import c_ubyte
from typing import TYPE_CHECKING, Any, Callable, NamedTuple

from lmcache.lmcache_native import Bitmap
from lmcache.v1.distributed.internal_api import L2StoreResult
from lmcache.v1.distributed.l2_adapters.base import L2AdapterInterface

from llm_datadist.integrations.store_access import KeeperLog, namespace, parts, started_thread
from llm_datadist.integrations.store_settings import StoreSettings, server_version
from llm_datadist.native import Error, KeeperObserver, Store

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping, Sequence

__all__ = ["KeeperL2"]

logger = logging.getLogger("llm_datadist.lmcache")

_TESTED = "0.5.6"
# Objects of one layout have a store of their own, because all values of a store have the same size.
_MAX_LAYOUTS = 16
# Tasks of a kind that wait. A further one fails at once.
_MAX_WAITING = 1_024
# Results that nobody has asked for. The oldest one is forgotten.
_MAX_RESULTS = 65_536
# The longest lease. LMCache loads what it has found at once, or ends the lease.
_LEASE_S = 10.0
# How long a lookup waits for its leases, behind a store that runs.
_LEASE_WAIT_S = 0.25
# How long a task waits for a keeper when it opens a store, and the status for an answer.
_ANSWER_S = 1.0


class KeeperL2(L2AdapterInterface):  # type: ignore[misc]
    """An L2 adapter of LMCache, for the type ``plugin``.

    Several threads may use it. Only the constructor raises. Locks are leases of the keeper, which make a later load
    likelier to succeed, and promise nothing. The adapter reports no stored keys, because the keeper does not say which
    ones it replaces.

    Args:
        config: ``adapter_params``: ``StoreSettings``.
        l1_memory_desc: not used: values are copied from and to the objects of a task.

    Raises:
        ValueError: an option is unknown, missing or has a wrong value.
        RuntimeError: no thread can be started.
    """

    def __init__(self, config: Mapping[str, Any], l1_memory_desc: Any = None) -> None:  # noqa: ARG002 - LMCache gives it
        super().__init__()
        self._stores = _Stores(StoreSettings.parse("KeeperL2", config))
        made = []
        with ExitStack() as undo:
            for kind in ("store", "lookup", "load"):
                made.append(_Tasks(f"kv-{kind}", self._stores.settings.timeout_s, self._stores.failed))
                undo.callback(made[-1].close)
            undo.pop_all()
        self._storing, self._looking, self._loading = made

    def get_store_event_fd(self) -> int:
        """Return the descriptor that signals results of stores."""
        return self._storing.event_fd

    def get_lookup_and_lock_event_fd(self) -> int:
        """Return the descriptor that signals results of lookups."""
        return self._looking.event_fd

    def get_load_event_fd(self) -> int:
        """Return the descriptor that signals results of loads."""
        return self._loading.event_fd

    def submit_store_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Start to copy objects to the keeper."""

        def store(end: float) -> L2StoreResult:
            def put(store: Store, keys: list[bytes], values: list[Any]) -> list[bool]:
                left_s = end - time.monotonic()
                return store.put(keys, values, timeout=left_s) if left_s > 0 else [False] * len(keys)

            done = self._stores.move(keys, objects, put)
            return L2StoreResult(all(done), sum(each.get_size() for each, there in zip(objects, done) if there))

        return self._storing.submit(store, L2StoreResult(False, 0))

    def pop_completed_store_tasks(self) -> dict[int, L2StoreResult]:
        """Return the results of all stores that have ended since the last call."""
        return self._storing.take_all()

    def submit_lookup_and_lock_task(self, keys: list[Any], group_layout_descs: Mapping[int, Any]) -> int:
        """Start to look objects up, and to lease them."""

        def lookup(_end: float) -> Bitmap:
            return _bitmap(self._stores.lookup(keys, group_layout_descs.values()))

        return self._looking.submit(lookup, Bitmap(len(keys)))

    def query_lookup_and_lock_result(self, task_id: int) -> Bitmap | None:
        """Return which objects were found, once; ``None`` while the task runs."""
        return self._looking.take(task_id)

    def submit_unlock(self, keys: list[Any]) -> None:
        """End the leases on objects. Those of other tasks on the same objects end too, which may cost a miss."""
        self._looking.submit(lambda _end: self._stores.unlease(keys), None)

    def submit_load_task(self, keys: list[Any], objects: list[Any]) -> int:
        """Start to copy objects from the keeper."""

        def load(_end: float) -> Bitmap:
            return _bitmap(self._stores.move(keys, objects, lambda store, keys, into: store.get(keys, into)))

        return self._loading.submit(load, Bitmap(len(keys)))

    def query_load_result(self, task_id: int) -> Bitmap | None:
        """Return which objects are complete, once; ``None`` while the task runs."""
        return self._loading.take(task_id)

    def delete(self, keys: list[Any]) -> None:
        """Have the keeper drop objects."""
        try:
            self._stores.drop(keys)
        except Exception as error:  # noqa: BLE001 - the thread of LMCache would end
            self._stores.failed(error)

    def report_status(self) -> dict[str, Any]:
        """Return whether the keeper answers, and what was counted."""
        return {"type": "KeeperL2", **self._stores.status()}

    def close(self) -> None:
        """End the connection to the keeper. Nothing touches the objects of a task any more."""
        self._stores.close()
        for tasks in (self._storing, self._looking, self._loading):
            tasks.close()


class _Layout(NamedTuple):
    """What the keys of objects do not have, and what decides their bytes."""

    bytes: int
    shapes: tuple[Any, ...]  # of torch
    dtypes: tuple[Any, ...]

    @classmethod
    def of(cls, each: Any) -> _Layout:
        """Return the layout of a ``MemoryObj``."""
        meta = each.meta
        if meta.shapes is None or meta.dtypes is None:
            return cls(each.get_size(), (meta.shape,), (meta.dtype,))
        return cls(each.get_size(), tuple(meta.shapes), tuple(meta.dtypes))

    @classmethod
    def described(cls, desc: Any) -> _Layout:
        """Return the layout that a ``MemoryLayoutDesc`` describes."""
        sizes = (dtype.itemsize * math.prod(map(int, shape)) for shape, dtype in zip(desc.shapes, desc.dtypes))
        return cls(sum(sizes), tuple(desc.shapes), tuple(desc.dtypes))

    def text(self) -> str:
        """Return a text that is the same in each process."""
        return json.dumps([self.bytes, [[*map(int, shape)] for shape in self.shapes], [*map(str, self.dtypes)]])


class _Stores:
    """A store for each layout of objects."""

    def __init__(self, settings: StoreSettings) -> None:
        self.settings = settings
        self._version = server_version(logger, "lmcache", _TESTED)
        self._lock = threading.Lock()
        self._opened: dict[_Layout, Store] = {}
        self._closed = False
        self._log = KeeperLog(logger, settings.socket)

    def move(
        self, keys: Sequence[Any], objects: Sequence[Any], call: Callable[[Store, list[bytes], list[Any]], list[bool]]
    ) -> list[bool]:
        """Call the store of each object with its bytes. Return which calls had success."""
        layouts: dict[_Layout, list[int]] = {}
        for at, each in enumerate(objects):
            layouts.setdefault(_Layout.of(each), []).append(at)
        done = [False] * len(keys)
        for layout, chain in layouts.items():
            store = self._open(layout)
            for part in parts(chain):
                memory = [(c_ubyte * layout.bytes).from_address(objects[at].data_ptr) for at in part]
                for at, result in zip(part, call(store, [_store_key(keys[at]) for at in part], memory)):
                    done[at] = result
            self._log.noted(store, [done[at] for at in chain])
        return done

    def lookup(self, keys: Sequence[Any], descs: Iterable[Any]) -> list[bool]:
        """Lease the objects that the keeper has, in any layout, and say which these are.

        If an object is there in another layout than the one to load, the load misses.
        """
        for layout in map(_Layout.described, descs):
            if layout.bytes:  # LMCache's benchmark has none
                self._open(layout)
        named = [_store_key(key) for key in keys]
        found = [False] * len(keys)
        for store in self._all():
            for part in parts(range(len(keys))):
                there = [at for at, has in zip(part, store.exists([named[at] for at in part])) if has]
                if there:
                    store.lease([named[at] for at in there], ttl=_LEASE_S, timeout=_LEASE_WAIT_S)
                    # Again: what was not leased may be gone, and a keeper that has not answered in time is away.
                    for at, has in zip(there, store.exists([named[at] for at in there])):
                        found[at] |= has
        return found

    def unlease(self, keys: Sequence[Any]) -> None:
        """End the leases on objects."""
        self._tell(keys, lambda store, keys: store.unlease(keys, timeout=_ANSWER_S))

    def drop(self, keys: Sequence[Any]) -> None:
        """Have the keeper drop objects."""
        self._tell(keys, lambda store, keys: store.drop(keys))

    def _tell(self, keys: Sequence[Any], call: Callable[[Store, list[bytes]], object]) -> None:
        named = [_store_key(key) for key in keys]
        for store in self._all():
            for part in parts(named):
                call(store, list(part))

    def status(self) -> dict[str, Any]:
        """Return whether the keeper answers, and what the stores have counted.

        A connection of its own asks the keeper: those of the stores end if an answer is late.
        """
        stats: list[dict[str, Any]] = []
        healthy = False
        with suppress(Error):  # closed meanwhile, or no keeper answers
            stats += ({**store.stats(keeper=False)} for store in self._all())
            with KeeperObserver(self.settings.socket, timeout=_ANSWER_S, **self.settings.access):
                healthy = not self._closed and all(each["refused"] is None for each in stats)
        names = ("hits", "misses_absent", "misses_changed", "misses_corrupt", "misses_away", "puts_away")
        counts = {name: sum(each[name] for each in stats) for name in names}
        return {"is_healthy": healthy, "socket": self.settings.socket, "layouts": len(stats), **counts}

    def failed(self, error: Exception) -> None:
        """Log that a task has failed."""
        if not self._closed:
            self._log.error(error)

    def close(self) -> None:
        """Close all stores. Calls that wait for the keeper end."""
        with self._lock:
            self._closed = True
        for store in self._all():
            store.close()

    def _all(self) -> list[Store]:
        with self._lock:
            return list(self._opened.values())

    def _open(self, layout: _Layout) -> Store:
        """Return the store of a layout.

        Raises:
            ValueError: there are too many layouts.
            Error: the keeper refuses the store; for example, its values are smaller than the objects.
        """
        kept = self._kept(layout)
        if kept is None:
            facts = {"lmcache": self._version, "layout": layout.text()}
            text = namespace("lmcache", "any", self.settings.revision, facts)  # keys have the name of the model
            # Without the lock, because it may wait for the keeper.
            options = self.settings.store_options
            made = Store(self.settings.socket, namespace=text, value=layout.bytes, timeout=_ANSWER_S, **options)
            try:
                kept = self._kept(layout, made) or made
            finally:
                if kept is not made:  # another thread was faster, or the adapter was closed
                    made.close()
            logger.info("llm_datadist keeps objects of %d bytes at %s as %r", layout.bytes, self.settings.socket, text)
        return kept

    def _kept(self, layout: _Layout, made: Store | None = None) -> Store | None:
        """Return the store of a layout. If there is none, keep ``made``.

        Raises:
            ValueError: there is none, and there may be none.
        """
        with self._lock:
            found = self._opened.get(layout)
            if found is not None:
                return found
            if self._closed or len(self._opened) >= _MAX_LAYOUTS:
                reason = f"the adapter is closed, or has {_MAX_LAYOUTS} other layouts"
                raise ValueError(f"objects of the layout {layout.text()} cannot be stored: {reason}")
            if made is not None:
                self._opened[layout] = made
            return made


class _Tasks:
    """The tasks of one kind: a thread that runs them in order, their results, and the descriptor that signals these."""

    def __init__(self, name: str, timeout_s: float, failed: Callable[[Exception], None]) -> None:
        self._thread = started_thread(name)
        self.event_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)  # type: ignore[attr-defined,unused-ignore]
        self._timeout_s, self._failed = timeout_s, failed
        self._lock = threading.Lock()
        self._numbers = itertools.count()
        self._waiting = 0
        self._results: dict[int, Any] = {}
        self._closed = False

    def submit(self, run: Callable[[float], Any], failure: Any) -> int:
        """Start a task, and return its number.

        Args:
            run: gets the time of ``time.monotonic`` at which it must end, and returns the result. ``None`` is none.
            failure: the result if it raises, or cannot begin in time.
        """
        end = time.monotonic() + self._timeout_s
        with self._lock:
            number, full = next(self._numbers), self._waiting >= _MAX_WAITING
            self._waiting += 1
        refused = RuntimeError(f"{_MAX_WAITING} tasks wait already") if full else None
        try:
            if not full:
                self._thread.submit(self._run, number, end, run, failure)
        except RuntimeError as error:  # the adapter is closed
            refused = error
        if refused is not None:
            self._failed(refused)
            self._end(number, failure)
        return number

    def _run(self, number: int, end: float, run: Callable[[float], Any], failure: Any) -> None:
        result = failure
        try:
            if time.monotonic() < end:
                result = run(end)
        except Exception as error:  # noqa: BLE001 - LMCache would wait for the result for ever
            self._failed(error)
        self._end(number, result)

    def _end(self, number: int, result: Any) -> None:
        with self._lock:
            self._waiting -= 1
            if result is None or self._closed:
                return
            self._results[number] = result
            if len(self._results) > _MAX_RESULTS:
                del self._results[next(iter(self._results))]
            os.eventfd_write(self.event_fd, 1)  # type: ignore[attr-defined,unused-ignore]

    def take(self, number: int) -> Any:
        """Return the result of a task once; ``None`` while it runs."""
        with self._lock:
            return self._results.pop(number, None)

    def take_all(self) -> dict[int, Any]:
        """Return all results since the last call."""
        with self._lock:
            results, self._results = self._results, {}
        return results

    def close(self) -> None:
        """Wait until no task runs, and close the descriptor. Tasks that wait have no result."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        with self._lock:
            if not self._closed:
                self._closed = True
                os.close(self.event_fd)


def _store_key(key: Any) -> bytes:
    """Return the key of an object in the keeper: a digest of all that LMCache distinguishes objects by."""
    # LMCache allows no "@" in names of models and salts.
    fields = f"{key.model_name}@{key.kv_rank}@{key.object_group_id}@{key.cache_salt}@"
    return hashlib.sha224(fields.encode() + key.chunk_hash).digest()


def _bitmap(bits: Sequence[bool]) -> Bitmap:
    made = Bitmap(len(bits))
    for at, bit in enumerate(bits):
        if bit:
            made.set(at)
    return made
