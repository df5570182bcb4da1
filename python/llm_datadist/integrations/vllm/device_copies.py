"""How torch orders and moves the blocks of a KV cache on a device, and the host memory beside it."""

from __future__ import annotations

import logging
import time
from contextlib import suppress
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from llm_datadist.integrations.vllm.host_buffers import HostBuffers

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    Tensors = dict[str, torch.Tensor]

__all__ = ["TorchDevice", "head_major", "host_buffers", "mirrored", "offloading_buffers", "page_rows"]

logger = logging.getLogger("vllm.llm_datadist")

# Time between two checks of an event, in seconds. `torch.Event.synchronize` would keep a core busy.
_LOOK_S = 0.0003
# Bytes that are gathered on the device, or in pinned host memory, at a time.
_CHUNK = 32 << 20
# If the blocks form groups of consecutive ones with at least this size on average, they are copied group by group.
_RUN = 4
_SAVE = "d2h"
# The type of the devices for which torch page-locks memory: those of CUDA and of ROCm.
_PAGE_LOCKS = "cuda"
# Number of axes of a layer with heads: block, head, token and content.
_AXES = 4


class TorchDevice:
    """A device of torch, with its streams and events. A CPU has none and copies at once.

    Args:
        device: the device of the KV cache.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.pipelines = device.type == _PAGE_LOCKS
        self._has_streams = device.type != "cpu" and hasattr(getattr(torch, device.type, None), "Stream")

    def mark(self) -> Any:
        """Return an event in the current stream of this thread."""
        if not self._has_streams:
            return None
        event = torch.Event(self._device)
        event.record(torch.accelerator.current_stream(self._device))
        return event

    def stream(self) -> TorchStream | AtOnce:
        """Return a new stream."""
        return TorchStream(self._device) if self._has_streams else AtOnce()

    def copy_blocks(
        self,
        src: Tensors,
        dst: Tensors,
        src_blocks: list[int],
        dst_blocks: list[int],
        direction: str,
    ) -> None:
        """Copy blocks in the current stream, through page-locked memory if they do not follow each other."""
        runs = list(_runs(src_blocks, dst_blocks))
        if len(runs) * _RUN <= len(src_blocks) or not self._has_streams:
            for name, to in dst.items():
                for first, at, count in runs:
                    to[at : at + count].copy_(src[name][first : first + count], non_blocking=self._has_streams)
        elif direction == _SAVE:
            self._gather(src, dst, src_blocks, dst_blocks)
        else:
            self._scatter(src, dst, src_blocks, dst_blocks)

    def _gather(self, src: Tensors, dst: Tensors, src_blocks: list[int], dst_blocks: list[int]) -> None:
        """Gather blocks on the device, and move a chunk to host memory while the previous one goes to its rows."""
        begun: list[tuple[torch.Event, torch.Tensor, torch.Tensor, torch.Tensor]] = []
        for name, where, to in _chunks(src, src_blocks, dst_blocks):
            gathered = src[name].index_select(0, where.to(self._device, non_blocking=True))
            stage = self._stage(gathered.shape, gathered.dtype)
            stage.copy_(gathered, non_blocking=True)
            begun.append((self.mark(), dst[name], to, stage))
            if len(begun) > 1:
                _write_rows(*begun.pop(0))
        for one in begun:
            _write_rows(*one)

    def _scatter(self, src: Tensors, dst: Tensors, src_blocks: list[int], dst_blocks: list[int]) -> None:
        """Gather rows in page-locked memory, and have the device scatter a chunk while the next one is gathered."""
        held: list[tuple[torch.Event, torch.Tensor]] = []
        for name, where, to in _chunks(src, src_blocks, dst_blocks):
            stage = self._stage((len(where), *src[name].shape[1:]), src[name].dtype)
            torch.index_select(src[name], 0, where, out=stage)
            moved = stage.to(self._device, non_blocking=True)
            dst[name].index_copy_(0, to.to(self._device, non_blocking=True), moved)
            held.append((self.mark(), stage))
            if len(held) > 1:
                _wait(held.pop(0)[0])

    def _stage(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        return torch.empty(shape, dtype=dtype, pin_memory=self._device.type != "cpu")


class TorchStream:
    """A stream of torch."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.Stream(device)

    def run(self, after: Sequence[Any], work: Callable[[], None]) -> None:
        """Run copies after events, and return when their bytes are in place."""
        for event in after:
            self._stream.wait_event(event)
        with torch.inference_mode(), self._stream:
            try:
                work()
            finally:
                end = torch.Event(self._device)
                end.record(self._stream)
                _wait(end)


class AtOnce:
    """The order of a device without streams: each call ends before it returns."""

    def run(self, after: Sequence[Any], work: Callable[[], None]) -> None:  # noqa: ARG002 - there are no marks
        """Run copies."""
        with torch.inference_mode():
            work()


def page_rows(tensor: torch.Tensor, blocks: int, page_bytes: int) -> torch.Tensor:
    """Return a layer of vLLM's KV cache as ``[block, word]``, each row the bytes of a page.

    Args:
        tensor: the layer, ``[block, head, token, content]`` in vLLM's order of the axes, whatever the order in memory.
            Its blocks may be those of the kernels, of which several make a block of vLLM.
        blocks: number of blocks of vLLM.
        page_bytes: bytes of a page.

    Raises:
        RuntimeError: the bytes of a page do not follow each other.
    """
    item = tensor.element_size()
    pieces, rest = divmod(tensor.shape[0], blocks)
    dense = 1
    for stride, size in sorted(zip(tensor.stride()[1:], tensor.shape[1:])):
        rest += size > 1 and stride != dense
        dense *= size
    if rest or dense * item * pieces != page_bytes or (pieces > 1 and tensor.stride(0) != dense):
        text = f"unknown layout of vLLM's KV cache: shape {tuple(tensor.shape)}, strides {tensor.stride()}"
        raise RuntimeError(f"{text}, {blocks} blocks of {page_bytes} bytes")
    stride, first = tensor.stride(0) * pieces * item, tensor.storage_offset() * item
    # Large elements, so that copies by index have few of them.
    kind = torch.int64 if not any(number % 8 for number in (stride, first, page_bytes)) else torch.int8
    raw = torch.empty(0, dtype=kind, device=tensor.device)
    size = kind.itemsize
    return raw.set_(tensor.untyped_storage(), first // size, (blocks, page_bytes // size), (stride // size, 1))


def head_major(tensor: torch.Tensor) -> bool:
    """Whether the tokens of one head follow each other in a page of ``[block, head, token, content]``."""
    if tensor.ndim < _AXES or 1 in tensor.shape[1:3]:
        return True
    return bool(tensor.stride(1) > tensor.stride(2))


def mirrored(tensor: torch.Tensor, memory: torch.Tensor) -> torch.Tensor:
    """Return a view of host memory with the offset, shape and strides that a tensor has in its allocation.

    Args:
        tensor: the tensor on the device.
        memory: the host memory, as bytes.
    """
    item = tensor.element_size()
    whole = memory[: memory.nbytes // item * item].view(tensor.dtype)
    return whole.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())


def host_buffers(
    device: torch.device, blocks: dict[str, torch.Tensor], rows: dict[str, torch.Tensor], memory: torch.Tensor
) -> HostBuffers:
    """Return host buffers, page-locked if torch can do that.

    Args:
        device: the device.
        blocks: the layers of the KV cache on the device, by name (``page_rows``).
        rows: the layers in host memory, by name.
        memory: the host memory of all rows.
    """
    address = memory.data_ptr()
    reason = _pin(address, memory.nbytes, device)
    state = f"not page-locked ({reason})" if reason else "page-locked"
    text = "the KV cache on %s goes through host buffers of %d MiB, %s"
    logger.info(text, device, memory.nbytes >> 20, state)
    return HostBuffers(TorchDevice(device), blocks, rows, (lambda: None) if reason else partial(_unpin, address))


def offloading_buffers(tensors: list[torch.Tensor], memory: Any) -> HostBuffers:
    """Return host buffers for offloading.

    Args:
        tensors: the KV cache, each tensor as ``[block, byte]``.
        memory: the rows of all tensors, one tensor after another.
    """
    flat = torch.from_dlpack(memory)
    layers = flat.view(len(tensors), -1, tensors[0].shape[1])
    blocks = {str(number): page_rows(tensor, *tensor.shape) for number, tensor in enumerate(tensors)}
    rows = {str(number): page_rows(layer, *layer.shape) for number, layer in enumerate(layers)}
    return host_buffers(tensors[0].device, blocks, rows, flat)


def _pin(address: int, nbytes: int, device: torch.device) -> str:
    """Page-lock host memory for a device, so that it copies without the CPU. Return why not, or an empty text."""
    if device.type != _PAGE_LOCKS:
        return f"torch page-locks memory for CUDA and ROCm only, not for {device.type}"
    # In one piece, because a copy must not reach from one registration into another.
    code = int(torch.cuda.cudart().cudaHostRegister(address, nbytes, 0))
    if code:
        with suppress(RuntimeError):
            torch.zeros(1, device=device)  # takes the error, which the next kernel would report otherwise
        return f"cudaHostRegister has returned {code}"
    return ""


def _unpin(address: int) -> None:
    """Undo ``_pin``."""
    torch.cuda.cudart().cudaHostUnregister(address)


def _runs(src: list[int], dst: list[int]) -> Iterator[tuple[int, int, int]]:
    """Yield the blocks that follow each other on both sides: the first of each, and their number."""
    begin = 0
    for at in range(1, len(src) + 1):
        if at == len(src) or src[at] != src[at - 1] + 1 or dst[at] != dst[at - 1] + 1:
            yield src[begin], dst[begin], at - begin
            begin = at


def _chunks(
    src: Tensors, src_blocks: list[int], dst_blocks: list[int]
) -> Iterator[tuple[str, torch.Tensor, torch.Tensor]]:
    """Yield layers and blocks of at most ``_CHUNK`` bytes."""
    for name, tensor in src.items():
        step = max(1, _CHUNK // (tensor[0].numel() * tensor.element_size()))
        for at in range(0, len(src_blocks), step):
            yield name, torch.tensor(src_blocks[at : at + step]), torch.tensor(dst_blocks[at : at + step])


def _write_rows(mark: torch.Event, rows: torch.Tensor, to: torch.Tensor, stage: torch.Tensor) -> None:
    """Copy a chunk to its rows when it has arrived."""
    _wait(mark)
    rows.index_copy_(0, to, stage)


def _wait(event: torch.Event) -> None:
    while not event.query():
        time.sleep(_LOOK_S)
