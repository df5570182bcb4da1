"""Host copies of the blocks of a KV cache on a device, and the threads that move blocks between the two.

The engine reaches host memory only. So each block of a KV cache on a device has a row in host memory. Prefill *saves*
blocks to their rows before it lends them, and decode pulls into rows and *loads* them to its blocks.

Each direction has a queue, with a thread and a stream of the device. The copies of a queue run in the order in which
they were given. So a row has the bytes of the last save that was given for it, and no older save comes later.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

__all__ = ["MAX_QUEUED", "Copy", "Device", "HostBuffers", "Stream"]

logger = logging.getLogger("vllm.llm_datadist")

# vLLM's names of the directions.
_SAVE, _LOAD = "d2h", "h2d"
# Maximum number of copies that wait in a queue.
MAX_QUEUED = 16_384
# Maximum number of blocks of copies that run as one. A single copy may have more.
_BATCH_BLOCKS = 4096
# Maximum number of blocks of one call of a copy function. Such functions use as much memory on the device.
_CALL_BLOCKS = 512


class Stream(Protocol):
    """A stream of the device, for the copies of one direction."""

    def run(self, after: Sequence[Any], work: Callable[[], None]) -> None:
        """Run copies after marks, and return when all of their bytes are in place.

        When it returns or raises, the copies no longer touch memory.
        """


class Device(Protocol):
    """The order in which a device works, and its copies. ``TorchDevice`` has those of torch."""

    pipelines: bool  # whether its copies go through page-locked memory, one chunk while the next is gathered

    def mark(self) -> Any:
        """Return a mark after all work that this thread has given to the device. This does not wait."""

    def stream(self) -> Stream:
        """Return a new stream."""

    def copy_blocks(
        self, src: dict[str, Any], dst: dict[str, Any], src_blocks: list[int], dst_blocks: list[int], direction: str
    ) -> None:
        """Copy blocks of all layers in the stream that runs. The arguments are those of vLLM's ``CopyBlocksOp``."""


@dataclass(eq=False)
class Copy:
    """Blocks of some layers that a queue moves. ``HostBuffers`` makes it."""

    layers: list[str]
    pairs: list[tuple[int, int]]  # the blocks of the device, and their rows
    mark: Any
    done: Callable[[Copy, Exception | None], None]
    queue: _CopyQueue

    def cancel(self) -> None:
        """Drop the copy, unless it runs. Its end is reported in both cases."""
        self.queue.drop(self)


class Dropped(Exception):  # noqa: N818 - not an error of the copy
    """The copy was cancelled before it began."""


@dataclass
class HostBuffers:
    """The rows of a KV cache, and its two queues.

    Args:
        device: the device.
        blocks: the layers of the KV cache on the device, by name. The first index is the block.
        rows: the layers in host memory, by name. The first index is the row.
        release: is called when nothing uses the host memory any more.
    """

    device: Device
    blocks: dict[str, Any]
    rows: dict[str, Any]
    release: Callable[[], None] = lambda: None
    copy_blocks: Callable[..., None] = field(init=False)

    def __post_init__(self) -> None:
        self.copy_blocks = self.device.copy_blocks
        self._saves = _CopyQueue(_SAVE, self)
        self._loads = _CopyQueue(_LOAD, self)

    def use_copy_blocks(self, copy_blocks: Callable[..., None]) -> bool:
        """Copy with the function of vLLM's platform, and return whether that is done.

        A device that pipelines its copies keeps its own: the functions of vLLM's platforms wait for each copy.
        """
        if not self.device.pipelines:
            self.copy_blocks = copy_blocks
        return not self.device.pipelines

    def mark(self) -> Any:
        """Return a mark after all work that this thread has given to the device. This does not wait."""
        return self.device.mark()

    def save(
        self,
        layers: list[str],
        pairs: list[tuple[int, int]],
        mark: Any,
        done: Callable[[Copy, Exception | None], None],
    ) -> Copy:
        """Copy blocks to host memory, after a mark.

        Args:
            layers: the names of the layers.
            pairs: blocks of the device, and their rows.
            mark: the mark; ``None`` if the copy need not wait.
            done: is called in another thread when the bytes are in place, or with an error. The copy no longer touches
                memory then.

        Raises:
            RuntimeError: ``MAX_QUEUED`` copies wait, or the queue has ended.
        """
        return self._saves.add(Copy(layers, pairs, mark, done, self._saves))

    def load(
        self,
        layers: list[str],
        pairs: list[tuple[int, int]],
        mark: Any,
        done: Callable[[Copy, Exception | None], None],
    ) -> Copy:
        """Copy rows to blocks of the device. The arguments and errors are those of ``save``."""
        return self._loads.add(Copy(layers, pairs, mark, done, self._loads))

    @property
    def saving(self) -> bool:
        """Whether saves wait or run."""
        return self._saves.busy

    @property
    def alive(self) -> bool:
        """Whether no queue has ended by an error."""
        return self._saves.alive and self._loads.alive

    def stop(self) -> bool:
        """Drop the copies that wait, without a report, and return whether none runs. This does not wait."""
        return self._saves.stop() & self._loads.stop()

    def close(self, limit_s: float) -> bool:
        """Stop, wait until no copy runs, and return whether that has happened within ``limit_s`` seconds."""
        end = time.monotonic() + limit_s
        self.stop()
        if not all(queue.join(max(0.0, end - time.monotonic())) for queue in (self._saves, self._loads)):
            return False
        self.release()
        return True


class _CopyQueue:
    """The copies in one direction. The thread starts with the first of them."""

    def __init__(self, direction: str, buffers: HostBuffers) -> None:
        self._direction = direction
        self._buffers = buffers
        self._changed = threading.Condition()
        self._waiting: deque[Copy] = deque()
        self._running: list[Copy] = []
        self._stopped = False
        self.alive = True  # whether it has not ended by an error
        self._thread: threading.Thread | None = None

    @property
    def busy(self) -> bool:
        with self._changed:
            return bool(self._waiting or self._running)

    def add(self, copy: Copy) -> Copy:
        with self._changed:
            if self._stopped or not self.alive:
                raise RuntimeError(f"the copies between host memory and device ({self._direction}) have ended")
            if len(self._waiting) >= MAX_QUEUED:
                raise RuntimeError(f"{MAX_QUEUED} copies between host memory and device ({self._direction}) wait")
            if self._thread is None:
                thread = threading.Thread(target=self._run, name=f"llm_datadist-{self._direction}", daemon=True)
                thread.start()
                self._thread = thread
            self._waiting.append(copy)
            self._changed.notify()
        return copy

    def drop(self, copy: Copy) -> None:
        with self._changed:
            if copy not in self._waiting:
                return
            self._waiting.remove(copy)
        copy.done(copy, Dropped("the copy was cancelled"))

    def stop(self) -> bool:
        with self._changed:
            self._stopped = True
            self._waiting.clear()
            self._changed.notify()
            return not self._running

    def join(self, limit_s: float) -> bool:
        if self._thread is not None:
            self._thread.join(limit_s)
        return self._thread is None or not self._thread.is_alive()

    def _run(self) -> None:
        try:
            stream = self._buffers.device.stream()
            while batch := self._next():
                self._move(stream, batch)
        except BaseException:
            self.alive = False
            logger.exception("the copies between host memory and device (%s) end", self._direction)
        finally:
            with self._changed:
                self._running = []

    def _next(self) -> list[Copy]:
        """Wait for copies, and return those with the same layers, which can run as one. Empty if the queue stops."""
        with self._changed:
            self._running = []
            self._changed.wait_for(lambda: self._waiting or self._stopped)
            if self._stopped:
                return []
            batch = [self._waiting.popleft()]
            left = _BATCH_BLOCKS - len(batch[0].pairs)
            while self._waiting and self._waiting[0].layers == batch[0].layers:
                left -= len(self._waiting[0].pairs)
                if left < 0:
                    break
                batch.append(self._waiting.popleft())
            self._running = batch
            return batch

    def _move(self, stream: Stream, batch: list[Copy]) -> None:
        error: Exception | None = None
        try:
            stream.run([copy.mark for copy in batch if copy.mark is not None], partial(self._copy, batch))
        except Exception as failed:  # noqa: BLE001 - it fails these copies, not the queue
            error = failed
        for copy in batch:
            try:
                copy.done(copy, error)
            except Exception:  # noqa: PERF203 - the others are reported all the same
                logger.exception("the end of a copy of %d blocks was not taken", len(copy.pairs))

    def _copy(self, batch: list[Copy]) -> None:
        buffers = self._buffers
        pairs = [pair for copy in batch for pair in copy.pairs]
        src = {name: buffers.blocks[name] for name in batch[0].layers}
        dst = {name: buffers.rows[name] for name in batch[0].layers}
        # Of several copies to one place, the last one counts.
        last = {row: block for block, row in pairs}
        if self._direction == _LOAD:
            src, dst, last = dst, src, dict(pairs)
        froms, tos = list(last.values()), list(last)
        for at in range(0, len(tos), _CALL_BLOCKS):
            end = at + _CALL_BLOCKS
            buffers.copy_blocks(src, dst, froms[at:end], tos[at:end], self._direction)
