"""The layer-wise asynchronous transfer: its configs, the synchronizer, and the task (contract §4.9 to §4.13, §8).

The engine moves layers; what it cannot do is to call the user's synchronizer. That is the work of one daemon thread per
transfer, in Python from end to end: it waits for a layer, tells the engine, and waits for the next, while the engine
sends what is ready. Not for: checks of arguments, or which code means what, which the engine knows.
"""

from __future__ import annotations

import os
import threading
import time
import traceback
from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any, NamedTuple, Optional, Union

from llm_datadist import _core, log
from llm_datadist.status import LLMException, LLMStatusCode, raise_if_false
from llm_datadist.threads import name_this_thread
from llm_datadist.types import BlocksCacheKey, CacheKeyByIdAndIndex

if TYPE_CHECKING:
    from collections.abc import Generator

    from llm_datadist.kv_cache_manager import KvCache
    from llm_datadist.types import Cache

__all__ = ["CacheTask", "LayerProgress", "LayerSynchronizer", "TransferConfig", "TransferWithCacheKeyConfig"]

_LONGEST = 500


class LayerSynchronizer(ABC):
    """Says when the layers of a source cache are ready to be sent (seed ``transfer_cache_async.md``).

    Two attributes, of the class or of an instance, say what the method cannot (own addition):
    ``tensor_num_per_layer``, how many tensors of the cache are one layer (uint32, above 0), and ``timeout_in_millis``,
    how long one layer may be waited for (uint32, above 0; ``None`` without limit). Once that has passed, the
    destinations that need the layer fail, whether or not the method returns.
    """

    tensor_num_per_layer: int = 2
    timeout_in_millis: Optional[int] = None

    @abstractmethod
    def synchronize_layer(self, layer_index: int, timeout_in_millis: Optional[int]) -> bool:
        """Wait until a layer is ready. Called on a thread of the transfer, once per layer, in ascending order.

        Args:
            layer_index: the layer of the source.
            timeout_in_millis: the attribute of that name.

        Returns:
            Whether it is ready. If not, or if this raises, no later layer is asked for.
        """


class _Reads:
    """The layers a config reads."""

    _src_layer_range: Optional[range]

    @property
    def src_layer_range(self) -> Optional[range]:
        """Layers read."""
        return self._src_layer_range

    @src_layer_range.setter
    def src_layer_range(self, src_layer_range: Optional[range]) -> None:
        _core.check_layer_range("src_layer_range", src_layer_range)
        self._src_layer_range = src_layer_range


class TransferConfig(_Reads):
    """Where layers go, by address (seed ``transfer_cache_async.md``). Every attribute can be set, with the same checks.

    Args:
        dst_cluster_id: the cluster that owns the memory (uint64).
        dst_addrs: where each tensor starts there, those of the first layer of ``src_layer_range`` first (uint64 each).
        src_layer_range: layers read; ``None`` for all, and the transfer then sets it.
        src_batch_index: batch slot read (uint32); 0 where blocks are.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: an integer outside its width.
        LLMException: ``LLM_PARAM_INVALID``, a range without a layer, of another step than 1 or below 0.
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
        """The cluster that owns the memory."""
        return self._dst_cluster_id

    @dst_cluster_id.setter
    def dst_cluster_id(self, dst_cluster_id: int) -> None:
        _core.check_uint64("dst_cluster_id", dst_cluster_id)
        self._dst_cluster_id = dst_cluster_id

    @property
    def dst_addrs(self) -> Union[list[int], tuple[int, ...]]:
        """Where each tensor starts there."""
        return self._dst_addrs

    @dst_addrs.setter
    def dst_addrs(self, dst_addrs: Union[list[int], tuple[int, ...]]) -> None:
        _core.check_isinstance("dst_addrs", dst_addrs, [list, tuple], int, allow_none=False)
        _core.check_list_uint64("dst_addrs", dst_addrs)
        self._dst_addrs = dst_addrs

    @property
    def src_batch_index(self) -> int:
        """Batch slot read."""
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


class TransferWithCacheKeyConfig(_Reads):
    """Where layers go, by the name of a cache (contract §4.12); for one-sided transfers.

    Args:
        cache_key: the far cache; its cluster is who is sent to, also after another key is set.
        src_layer_range: layers read; not ``None`` here, but it can be set to it, for all.
        dst_layer_range: layers written, as many; not ``None``.
        src_batch_index: batch slot read (uint32); 0 with a ``BlocksCacheKey``.

    Raises:
        TypeError: an argument of the wrong type.
        ValueError: an integer outside its width.
        LLMException: ``LLM_PARAM_INVALID``, a range without a layer, of another step than 1 or below 0, ranges of
            unlike length, or a batch slot with a ``BlocksCacheKey``.
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
            raise_if_false(layers[0] == layers[1], "src_layer_range has {} layers and dst_layer_range {}", *layers)
        _core.check_uint32("src_batch_index", src_batch_index)
        self.src_batch_index = src_batch_index
        self.dst_cluster_id = cache_key.cluster_id

    @property
    def cache_key(self) -> Union[BlocksCacheKey, CacheKeyByIdAndIndex]:
        """The far cache."""
        return self._cache_key

    @cache_key.setter
    def cache_key(self, cache_key: Union[BlocksCacheKey, CacheKeyByIdAndIndex]) -> None:
        classes: list[type[Any]] = [BlocksCacheKey, CacheKeyByIdAndIndex]
        self._cache_key = _core.check_isinstance("cache_key", cache_key, classes, allow_none=False)

    @property
    def dst_layer_range(self) -> Optional[range]:
        """Layers written."""
        return self._dst_layer_range

    @dst_layer_range.setter
    def dst_layer_range(self, dst_layer_range: Optional[range]) -> None:
        _core.check_layer_range("dst_layer_range", dst_layer_range)
        self._dst_layer_range = dst_layer_range

    @property
    def src_batch_index(self) -> int:
        """Batch slot read."""
        return self._src_batch_index

    @src_batch_index.setter
    def src_batch_index(self, src_batch_index: int) -> None:
        if isinstance(self._cache_key, BlocksCacheKey):
            text = "src_batch_index = {} is not allowed: 0 with a BlocksCacheKey"
            raise_if_false(src_batch_index == 0, text, log.shown(src_batch_index))
        _core.check_uint32("src_batch_index", src_batch_index)
        self._src_batch_index = src_batch_index

    def __repr__(self) -> str:
        return (
            f"TransferWithCacheKeyConfig(cache_key={self._cache_key}, src_layer_range={self._src_layer_range}, "
            f"dst_layer_range={self._dst_layer_range}, src_batch_index={self._src_batch_index})"
        )


class LayerProgress(NamedTuple):
    """How far the transfer to one destination is (own addition)."""

    layers_done: int
    """Layers in place."""
    num_layers: int
    """Layers in all."""
    bytes_done: int
    """Bytes in place."""


class CacheTask:
    """A layer-wise transfer under way, made by ``transfer_cache_async``. Usable from any number of threads.

    Every list has one entry per config, in their order. Dropping the task leaves the transfer alone. In a coroutine,
    ``await task`` gives what :meth:`synchronize` returns, without a thread.
    """

    def __init__(self, native: _core.TransferTask) -> None:
        self._native = native

    def synchronize(self, timeout_in_millis: Optional[int] = None) -> LLMStatusCode:
        """Wait until the transfer has ended (seed ``transfer_cache_async.md``); Ctrl-C interrupts.

        Args:
            timeout_in_millis: the limit (uint32); 0 asks without waiting, ``None`` waits without limit. When it passes,
                the transfer goes on.

        Returns:
            The first code, in the order of the configs, that says failure, or ``LLM_SUCCESS``; ``LLM_TIMEOUT`` when the
            limit passed (``LLM_WAIT_PROCESS_TIMEOUT`` of a ``KvCacheManager``).

        Raises:
            TypeError: no ``int``; ValueError: outside uint32.
        """
        if not self._native.wait(timeout_in_millis):
            return self._native.timeout_code
        codes = self._native.results()
        # A config without a result is no success, whatever it was that ended the transfer.
        unknown = self._native.timeout_code if None in codes else LLMStatusCode.LLM_SUCCESS
        return next((code for code in codes if code), unknown)

    def get_results(self, timeout_in_millis: Optional[int] = None) -> list[Optional[LLMStatusCode]]:
        """Wait as :meth:`synchronize` does, and return the code of every config.

        Returns:
            ``None`` for a config of which no layer came to be ready. When the limit passed, its code for every config.
        """
        if self._native.wait(timeout_in_millis):
            return self._native.results()
        return [self._native.timeout_code for _ in self._native.results()]

    def cancel(self) -> bool:
        """End the transfer; what has not ended gets ``LLM_FAILED``. Layers on the way still arrive (own addition).

        Returns:
            Whether there was anything to end.
        """
        return self._native.cancel()

    def done(self) -> bool:
        """Return whether nothing moves any more, or ever will (own addition)."""
        return self._native.done()

    def progress(self) -> list[LayerProgress]:
        """Return how far each config is (own addition)."""
        return [LayerProgress(*carried) for carried in self._native.progress()]

    def errors(self) -> list[Optional[LLMException]]:
        """Return why each config is not done (own addition): why it failed, or which layer it waits for and since when.

        ``None`` for a config that is done, and for one that was never reached.
        """
        return self._native.errors()

    def __await__(self) -> Generator[Any, None, LLMStatusCode]:
        while not self._native.done():
            yield from _readable(self._native).__await__()
        return self.synchronize(0)


async def _readable(task: _core.TransferTask) -> None:
    """Wait until the descriptor of a task is readable. Whoever is cancelled meanwhile leaves nothing behind."""
    import asyncio  # noqa: PLC0415  (nobody else needs it)

    loop = asyncio.get_running_loop()
    ended = loop.create_future()

    def wake() -> None:
        if not ended.done():
            ended.set_result(None)

    descriptor = task.descriptor()
    try:
        loop.add_reader(descriptor, wake)
        try:
            await ended
        finally:
            loop.remove_reader(descriptor)
    finally:
        os.close(descriptor)


# Transfers that may be under way, with their engines and threads; what is over is left out when the next one starts. No
# thread is the last owner of its task: to let go of the engine's part of it, the thread would have to detach, and one
# that does so while the interpreter ends is killed there.
_under_way: list[tuple[_core.DataDist, _core.TransferTask, threading.Thread]] = []
_lock = threading.RLock()  # re-entrant, for signal handlers


def _forget() -> None:
    """In a forked child: the transfers are the parent's, and another thread of it may have held the lock."""
    global _lock  # noqa: PLW0603  (one for each process)
    _lock = threading.RLock()
    _under_way.clear()


os.register_at_fork(after_in_child=_forget)


def start(
    engine: _core.DataDist,
    src_cache: Union[Cache, KvCache],
    layer_synchronizer: LayerSynchronizer,
    transfer_configs: Union[list[Any], tuple[Any, ...]],
    src_block_indices: Optional[Union[list[int], tuple[int, ...]]],
    dst_block_indices: Optional[Union[list[int], tuple[int, ...]]],
    dst_block_memory_size: Optional[int],
) -> CacheTask:
    """Start a transfer, and the thread that asks its synchronizer."""
    task = engine.transfer_cache_async(
        src_cache, layer_synchronizer, transfer_configs, src_block_indices, dst_block_indices, dst_block_memory_size
    )
    try:
        _send_walker(engine, task, layer_synchronizer)
    except BaseException:
        task.cancel()  # or its configs would wait for ever
        raise
    return CacheTask(task)


def _send_walker(engine: _core.DataDist, task: _core.TransferTask, synchronizer: LayerSynchronizer) -> None:
    """Start the thread of a transfer that needs layers."""
    layers = task.layers()
    if not layers:
        return
    given = (task, synchronizer, layers)
    walker = threading.Thread(target=_walk, args=given, name="llm-layers", daemon=True)
    with _lock:
        _prune()
        _under_way.append((engine, task, walker))
    try:
        walker.start()
    except Exception as error:
        text = f"no thread for the layers of a transfer: {error}"
        raise LLMException(text, status_code=LLMStatusCode.LLM_FAILED) from error


def _prune() -> None:
    """Forget the transfers that have ended, with their threads. Called with the lock held."""
    _under_way[:] = [each for each in _under_way if each[2].is_alive() or not each[1].done()]


def drain(engine: _core.DataDist) -> None:
    """Wait for the transfers of an engine while any of them gets on within ``sync_kv_timeout``, again and again."""
    with _lock:
        left = [task for owner, task, _ in _under_way if owner is engine]
    before = None
    while left:
        left = [task for task in left if not task.done()]
        now = [task.progress() for task in left]
        if now == before:
            # Nobody may look at their results any more.
            log.warn("%s layer-wise transfers end unfinished: no layer came within sync_kv_timeout", len(left))
            return
        before = now
        end = time.monotonic() + engine.sync_kv_timeout() / 1000
        for task in left:
            task.wait(max(0, int((end - time.monotonic()) * 1000)))
    with _lock:
        _prune()


def _walk(task: _core.TransferTask, synchronizer: LayerSynchronizer, layers: list[int]) -> None:
    """Ask for one layer after the other. Whatever ends this, no destination waits for ever."""
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
    """Wait for one layer, and tell the task what became of it. Return whether it is ready."""
    try:
        ready = bool(synchronizer.synchronize_layer(layer, task.timeout_in_millis))
    except BaseException as error:  # noqa: BLE001  (whatever it is, the destinations are to know)
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
