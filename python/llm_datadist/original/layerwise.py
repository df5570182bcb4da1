"""The layer-wise asynchronous transfer: its configs, the synchronizer, and the task.

Each transfer has one daemon thread that calls the synchronizer of the program. The thread waits for a layer, reports it
to the engine, and waits for the next one. Meanwhile the engine sends the layers that are ready.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, Union

from llm_datadist import _core, log
from llm_datadist._await import wait_for_end
from llm_datadist.original.logged_calls import shown
from llm_datadist.original.status import LLMException, LLMStatusCode, raise_if_false
from llm_datadist.original.types import BlocksCacheKey, CacheKeyByIdAndIndex
from llm_datadist.threads import name_this_thread

if TYPE_CHECKING:
    from collections.abc import Generator

    from llm_datadist.original.kv_cache_manager import KvCache
    from llm_datadist.original.types import Cache

__all__ = ["CacheTask", "LayerProgress", "LayerSynchronizer", "TransferConfig", "TransferWithCacheKeyConfig"]

_LONGEST = 500


class LayerSynchronizer(ABC):
    """Reports when the layers of a source cache are ready to be sent. Programs derive from it.

    A class or an instance may set two attributes, ``tensor_num_per_layer`` and ``timeout_in_millis``, which the
    original does not have.
    """

    tensor_num_per_layer: int = 2
    """Number of tensors of one layer (uint32, above 0)."""
    timeout_in_millis: Optional[int] = None
    """Time limit for one layer in milliseconds (uint32, above 0), or ``None`` for no limit. Once it has passed, the
    configs that need the layer fail, whether or not ``synchronize_layer`` returns."""

    @abstractmethod
    def synchronize_layer(self, layer_index: int, timeout_in_millis: Optional[int]) -> bool:
        """Wait until a layer is ready.

        The thread of the transfer calls this once for each layer that a config needs, in ascending order. If it raises,
        the configs that still need the layer end with the timeout code.

        Args:
            layer_index: index of the layer in the source cache.
            timeout_in_millis: the value of the attribute of that name: milliseconds, or ``None`` for no limit.

        Returns:
            Whether the layer is ready. After a false value or an exception, the method is not called again.
        """


class _SourceLayers:
    """The base of both kinds of configs: the layers that are read."""

    _src_layer_range: Optional[range]

    @property
    def src_layer_range(self) -> Optional[range]:
        """Layers that are read; ``None`` for all.

        Raises:
            TypeError: the value is not a ``range`` or ``None``.
            LLMException: ``LLM_PARAM_INVALID``: no layers, a step other than 1, or a start below 0.
        """
        return self._src_layer_range

    @src_layer_range.setter
    def src_layer_range(self, src_layer_range: Optional[range]) -> None:
        _core.check_layer_range("src_layer_range", src_layer_range)
        self._src_layer_range = src_layer_range


class TransferConfig(_SourceLayers):
    """A destination of a layer-wise transfer, by address.

    Setters repeat the checks of the constructor.

    Args:
        dst_cluster_id: id of the cluster that owns the memory (uint64).
        dst_addrs: address of each destination tensor (uint64), starting with the first layer of ``src_layer_range``.
            For a slot of a continuous cache, the caller adds the offset of the slot in bytes.
        src_layer_range: layers that are read; ``None`` for all. The transfer replaces ``None`` by the range of all
            layers.
        src_batch_index: batch slot that is read (uint32); 0 for a blocks cache.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an integer is outside its width.
        LLMException: ``LLM_PARAM_INVALID``: a range without layers, with a step other than 1, or with a start below 0.
    """

    def __init__(
        self,
        dst_cluster_id: int,
        dst_addrs: Union[list[int], tuple[int, ...]],
        src_layer_range: Optional[range] = None,
        src_batch_index: int = 0,
    ) -> None:
        self.dst_cluster_id = dst_cluster_id
        self.dst_addrs = dst_addrs
        self.src_layer_range = src_layer_range
        self.src_batch_index = src_batch_index
        self.dst_layer_range: Optional[range] = None

    @property
    def dst_cluster_id(self) -> int:
        """Id of the cluster that owns the memory (uint64)."""
        return self._dst_cluster_id

    @dst_cluster_id.setter
    def dst_cluster_id(self, dst_cluster_id: int) -> None:
        _core.check_uint64("dst_cluster_id", dst_cluster_id)
        self._dst_cluster_id = dst_cluster_id

    @property
    def dst_addrs(self) -> Union[list[int], tuple[int, ...]]:
        """Address of each destination tensor (uint64)."""
        return self._dst_addrs

    @dst_addrs.setter
    def dst_addrs(self, dst_addrs: Union[list[int], tuple[int, ...]]) -> None:
        _core.check_isinstance("dst_addrs", dst_addrs, [list, tuple], int, allow_none=False)
        _core.check_list_uint64("dst_addrs", dst_addrs)
        self._dst_addrs = dst_addrs

    @property
    def src_batch_index(self) -> int:
        """Batch slot that is read (uint32)."""
        return self._src_batch_index

    @src_batch_index.setter
    def src_batch_index(self, src_batch_index: int) -> None:
        _core.check_uint32("src_batch_index", src_batch_index)
        self._src_batch_index = src_batch_index

    def __repr__(self) -> str:
        return (
            f"TransferConfig(dst_cluster_id={self._dst_cluster_id}, dst_addrs={self._dst_addrs}, "
            f"src_layer_range={self._src_layer_range}, src_batch_index={self._src_batch_index})"
        )


class TransferWithCacheKeyConfig(_SourceLayers):
    """A destination of a layer-wise transfer, by key, for remote-accessible mode.

    Args:
        cache_key: the remote blocks cache or slot. The attribute ``dst_cluster_id`` is the cluster of this key; a key
            that is set later does not change it.
        src_layer_range: layers that are read. ``None`` is refused here, but may be set later.
        dst_layer_range: layers that are written, as many as are read. ``None`` is refused here.
        src_batch_index: batch slot that is read (uint32); 0 with a ``BlocksCacheKey``.

    Raises:
        TypeError: an argument has the wrong type.
        ValueError: an integer is outside its width.
        LLMException: ``LLM_PARAM_INVALID``: a range without layers, with a step other than 1, or with a start below 0;
            ranges of different lengths; or a batch slot other than 0 with a ``BlocksCacheKey``.
    """

    def __init__(
        self,
        cache_key: Union[BlocksCacheKey, CacheKeyByIdAndIndex],
        src_layer_range: Optional[range] = None,
        dst_layer_range: Optional[range] = None,
        src_batch_index: int = 0,
    ) -> None:
        self.cache_key = cache_key
        _core.check_layer_range("src_layer_range", src_layer_range, allow_none=False)
        _core.check_layer_range("dst_layer_range", dst_layer_range, allow_none=False)
        self._src_layer_range = src_layer_range
        self._dst_layer_range = dst_layer_range
        if src_layer_range is not None and dst_layer_range is not None:
            layers = len(src_layer_range), len(dst_layer_range)
            text = "len(src_layer_range)={} differs from len(dst_layer_range)={}"
            raise_if_false(layers[0] == layers[1], text, *layers)
        _core.check_uint32("src_batch_index", src_batch_index)
        self.src_batch_index = src_batch_index
        self.dst_cluster_id = cache_key.cluster_id

    @property
    def cache_key(self) -> Union[BlocksCacheKey, CacheKeyByIdAndIndex]:
        """The remote cache."""
        return self._cache_key

    @cache_key.setter
    def cache_key(self, cache_key: Union[BlocksCacheKey, CacheKeyByIdAndIndex]) -> None:
        classes: list[type[Any]] = [BlocksCacheKey, CacheKeyByIdAndIndex]
        self._cache_key = _core.check_isinstance("cache_key", cache_key, classes, allow_none=False)

    @property
    def dst_layer_range(self) -> Optional[range]:
        """Layers that are written."""
        return self._dst_layer_range

    @dst_layer_range.setter
    def dst_layer_range(self, dst_layer_range: Optional[range]) -> None:
        _core.check_layer_range("dst_layer_range", dst_layer_range)
        self._dst_layer_range = dst_layer_range

    @property
    def src_batch_index(self) -> int:
        """Batch slot that is read (uint32)."""
        return self._src_batch_index

    @src_batch_index.setter
    def src_batch_index(self, src_batch_index: int) -> None:
        if isinstance(self._cache_key, BlocksCacheKey):
            text = "src_batch_index={} must be 0, because cache_key is a BlocksCacheKey"
            raise_if_false(src_batch_index == 0, text, shown(src_batch_index))
        _core.check_uint32("src_batch_index", src_batch_index)
        self._src_batch_index = src_batch_index

    def __repr__(self) -> str:
        return (
            f"TransferWithCacheKeyConfig(cache_key={self._cache_key}, src_layer_range={self._src_layer_range}, "
            f"dst_layer_range={self._dst_layer_range}, src_batch_index={self._src_batch_index})"
        )


class LayerProgress(NamedTuple):
    """Progress of the transfer to one destination. The original does not have this class."""

    layers_done: int
    """Number of layers that are in place at the destination."""
    num_layers: int
    """Number of layers of the config."""
    bytes_done: int
    """Number of bytes that are in place at the destination."""


class CacheTask:
    """A layer-wise transfer. ``transfer_cache_async`` makes it.

    Any number of threads may use a task. Every list that a method returns has one entry for each config, in the order
    of the configs. Dropping the task does not end the transfer. In a coroutine, ``await task`` returns the result of
    ``synchronize`` without a thread. The original has neither ``await`` nor ``cancel``, ``done``, ``progress`` and
    ``errors``.
    """

    def __init__(self, native: _core.TransferTask) -> None:
        self._native = native

    def __repr__(self) -> str:
        progress = ", ".join(f"{of.layers_done}/{of.num_layers}" for of in self.progress())
        return f"CacheTask(done={self.done()}, layers_done=[{progress}])"

    def synchronize(self, timeout_in_millis: Optional[int] = None) -> LLMStatusCode:
        """Wait until the transfer has ended. Ctrl-C interrupts the wait.

        Args:
            timeout_in_millis: time limit in milliseconds (uint32); 0 does not wait, and ``None`` waits without limit.
                When it passes, the transfer goes on.

        Returns:
            The first code, in the order of the configs, that is neither ``LLM_SUCCESS`` nor ``None``; ``LLM_SUCCESS``
            if every config has it. When the limit passes: ``LLM_TIMEOUT``, or ``LLM_WAIT_PROCESS_TIMEOUT`` for a
            ``KvCacheManager``.

        Raises:
            TypeError: ``timeout_in_millis`` is not an ``int`` or ``None``.
            ValueError: ``timeout_in_millis`` is outside uint32.
        """
        if not self._native.wait(timeout_in_millis):
            return self._native.timeout_code
        codes = self._native.results()
        # A missing result never counts as success (contract §8.4).
        unknown = self._native.timeout_code if None in codes else LLMStatusCode.LLM_SUCCESS
        return next((code for code in codes if code), unknown)

    def get_results(self, timeout_in_millis: Optional[int] = None) -> list[Optional[LLMStatusCode]]:
        """Wait as ``synchronize`` does, and return the result of each config.

        Args:
            timeout_in_millis: as for ``synchronize``.

        Returns:
            The code of each config, or ``None`` if the transfer stopped before any of its layers became ready. When the
            limit passes, the timeout code for every config.

        Raises:
            TypeError: ``timeout_in_millis`` is not an ``int`` or ``None``.
            ValueError: ``timeout_in_millis`` is outside uint32.
        """
        if self._native.wait(timeout_in_millis):
            return self._native.results()
        return [self._native.timeout_code for _ in self._native.results()]

    def cancel(self) -> bool:
        """End the transfer. Unfinished configs get ``LLM_FAILED``.

        A layer that is being sent still arrives.

        Returns:
            Whether a config was unfinished.
        """
        return self._native.cancel()

    def done(self) -> bool:
        """Return whether the transfer has ended, so that no further byte is sent."""
        return self._native.done()

    def progress(self) -> list[LayerProgress]:
        """Return the layers and bytes of each config that are in place so far."""
        return [LayerProgress(*carried) for carried in self._native.progress()]

    def errors(self) -> list[Optional[LLMException]]:
        """Return why each config is unfinished: its failure, or the layer that it waits for.

        A config that waits for a layer states for how many milliseconds. The entry is ``None`` for a config that ended
        with success, and for one whose result is ``None``. The exceptions are returned, not raised.
        """
        return self._native.errors()

    def __await__(self) -> Generator[Any, None, LLMStatusCode]:
        yield from wait_for_end(self._native).__await__()
        return self.synchronize(0)


# Transfers that may be running, with their engines and threads. Transfers that have ended are removed when the next one
# starts. The list keeps each task alive, because dropping a native task ends its transfer. A thread must not drop the
# last reference to its task either: the drop releases the GIL, and a daemon thread that does so while the interpreter
# exits is killed there.
_under_way: list[tuple[_core.DataDist, _core.TransferTask, threading.Thread]] = []
_lock = threading.RLock()  # re-entrant, for signal handlers


def _forget() -> None:
    """Reset the state in a forked child. The transfers belong to the parent, one of whose threads may hold the lock."""
    global _lock  # noqa: PLW0603  (each process has its own lock)
    _lock = threading.RLock()
    _under_way.clear()


os.register_at_fork(after_in_child=_forget)


def start(
    engine: _core.DataDist,
    src_cache: Union[Cache, KvCache],
    layer_synchronizer: LayerSynchronizer,
    transfer_configs: Union[list[Any], tuple[Any, ...]],
    src_block_indices: Optional[Union[list[int], tuple[int, ...], Any]],
    dst_block_indices: Optional[Union[list[int], tuple[int, ...], Any]],
    dst_block_memory_size: Optional[int],
) -> CacheTask:
    """Start a transfer and the thread that calls its synchronizer."""
    task = engine.transfer_cache_async(
        src_cache, layer_synchronizer, transfer_configs, src_block_indices, dst_block_indices, dst_block_memory_size
    )
    try:
        _start_layer_thread(engine, task, layer_synchronizer)
    except BaseException:
        task.cancel()  # without a thread, the configs would wait forever
        raise
    return CacheTask(task)


def _start_layer_thread(engine: _core.DataDist, task: _core.TransferTask, synchronizer: LayerSynchronizer) -> None:
    """Start the thread that calls the synchronizer, unless no config needs a layer."""
    layers = task.layers()
    if not layers:
        return
    given = (task, synchronizer, layers)
    thread = threading.Thread(target=_request_layers, args=given, name="llm-layers", daemon=True)
    with _lock:
        _prune()
        _under_way.append((engine, task, thread))
    try:
        thread.start()
    except Exception as error:
        text = f"cannot start the thread that waits for the layers: {error}"
        raise LLMException(text, status_code=LLMStatusCode.LLM_FAILED) from error


def _prune() -> None:
    """Remove the transfers that have ended, with their threads. The caller holds the lock."""
    _under_way[:] = [each for each in _under_way if each[2].is_alive() or not each[1].done()]


def drain(engine: _core.DataDist) -> None:
    """Wait for the transfers of an engine while at least one layer arrives within each ``sync_kv_timeout``."""
    with _lock:
        left = [task for owner, task, _ in _under_way if owner is engine]
    before = None
    while left:
        left = [task for task in left if not task.done()]
        now = [task.progress() for task in left]
        if now == before:
            # Log it, because the program may never ask for the results.
            log.warn("%s layer-wise transfers end unfinished: no layer arrived within sync_kv_timeout", len(left))
            return
        before = now
        end = time.monotonic() + engine.sync_kv_timeout() / 1000
        for task in left:
            task.wait(max(0, int((end - time.monotonic()) * 1000)))
    with _lock:
        _prune()


def _request_layers(task: _core.TransferTask, synchronizer: LayerSynchronizer, layers: list[int]) -> None:
    """Ask for one layer after the other. If this ends early, report it, so that no destination waits forever."""
    name_this_thread()
    asked: Optional[int] = layers[0]
    try:
        for asked in layers:
            if task.wanted(asked) and not _arrives(task, synchronizer, asked):
                break
        asked = None
    finally:
        if asked is not None:
            task.broken(asked, "the thread that waits for it ended")


def _arrives(task: _core.TransferTask, synchronizer: LayerSynchronizer, layer: int) -> bool:
    """Wait for one layer, report the outcome to the task, and return whether the layer is ready."""
    try:
        ready = bool(synchronizer.synchronize_layer(layer, task.timeout_in_millis))
    except BaseException as error:  # noqa: BLE001  (every exception must reach the destinations)
        lines = traceback.format_exception_only(type(error), error)
        text = "".join(lines).strip()[:_LONGEST]
        task.broken(layer, f"synchronize_layer raised {text}")
        log.get_logger().error("synchronize_layer raised for layer %s", layer, exc_info=True)
        return False
    if ready:
        task.ready(layer)
    else:
        task.not_ready(layer)
    return ready
