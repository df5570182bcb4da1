"""Copies between host memory and a device with torch, on a CPU in its place.

A CPU has no streams. So `Late` claims to have some, to run the copies in chunks.
"""

from __future__ import annotations

import logging
import random
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import pytest
import torch
from vllm.distributed.kv_transfer.kv_connector import utils
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheTensor, create_kv_cache_views
from vllm.v1.kv_cache_layout import KVCacheLayout

from llm_datadist.integrations.vllm import device_copies
from llm_datadist.integrations.vllm.connector import LlmDatadistConnector
from llm_datadist.integrations.vllm.device_copies import TorchDevice, head_major, host_buffers, mirrored, page_rows

if TYPE_CHECKING:
    from collections.abc import Callable

CPU = torch.device("cpu")
BLOCKS, HEADS, TOKENS, SIZE, LAYERS = 6, 2, 32, 8, 3
SPEC = FullAttentionSpec(block_size=TOKENS, num_kv_heads=HEADS, head_size=SIZE, dtype=torch.float16)


class Late(TorchDevice):
    """A CPU that has an event for each copy, which happens at the third look."""

    def __init__(self) -> None:
        super().__init__(CPU)
        self._has_streams = True
        self.looks: list[list[bool]] = []

    def mark(self) -> Any:
        looks: list[bool] = []
        self.looks.append(looks)

        def query() -> bool:
            looks.append(len(looks) >= 2)
            return looks[-1]

        return SimpleNamespace(query=query)


def caches(blocks: int, seed: int) -> dict[str, torch.Tensor]:
    torch.manual_seed(seed)
    return {f"layer {number}": torch.randint(-(2**62), 2**62, (blocks, 16)) for number in range(LAYERS)}


@pytest.mark.parametrize("direction", ["d2h", "h2d"])
@pytest.mark.parametrize("kind", [TorchDevice, Late])
@pytest.mark.parametrize("chunk", [1, 300, 1 << 20])
def test_blocks_are_copied(monkeypatch: pytest.MonkeyPatch, direction: str, kind: type, chunk: int) -> None:
    """Blocks in any order, and blocks that follow each other, in chunks of any size."""
    monkeypatch.setattr(device_copies, "_CHUNK", chunk)
    rng = random.Random(chunk)  # noqa: S311 - not a secret
    for round_number in range(30):
        device = Late() if kind is Late else TorchDevice(CPU)
        src, dst = caches(40, round_number), caches(50, round_number + 100)
        expected = {name: tensor.clone() for name, tensor in dst.items()}
        count = rng.randint(1, 30)
        pairs = list(zip(rng.sample(range(40), count), rng.sample(range(50), count)))
        if round_number % 3 == 0:
            first, at = rng.randint(0, 40 - count), rng.randint(0, 50 - count)
            pairs = [(first + step, at + step) for step in range(count)]
        for name, tensor in expected.items():
            for one, other in pairs:
                tensor[other] = src[name][one]
        device.copy_blocks(src, dst, [pair[0] for pair in pairs], [pair[1] for pair in pairs], direction)
        assert all(torch.equal(dst[name], expected[name]) for name in dst)
        if isinstance(device, Late):
            # The stream waits for the last copy to the device, which reads page-locked memory that stays until then.
            awaited = device.looks if direction == "d2h" else device.looks[:-1]
            assert all(looks and looks[-1] for looks in awaited)


def views(layout: KVCacheLayout, kernel_tokens: int | None = None) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """The tensors that vLLM makes for a layout, and the bytes that they lie in."""
    page = SPEC.page_size_bytes
    raw = torch.randint(-128, 128, (LAYERS * BLOCKS * page,), dtype=torch.int8)
    names = [f"layer {number}" for number in range(LAYERS)]
    strides = (page, page * LAYERS) if layout.is_block_outermost else (page * BLOCKS, page)
    kv_tensor = KVCacheTensor(size=raw.numel(), layers=names, layer_stride=strides[0], block_stride=strides[1])
    return raw, create_kv_cache_views(raw, SPEC, BLOCKS, layout, kv_tensor, kernel_block_size=kernel_tokens)


@pytest.mark.parametrize(
    # The kernels may split blocks if those of a layer follow each other.
    ("layout", "split"),
    [("LBHNC", 1), ("LBNHC", 1), ("BLHNC", 1), ("BLNHC", 1), ("LBHNC", 2), ("LBNHC", 2)],
)
def test_rows_are_the_pages_of_vllm(layout: str, split: int) -> None:
    """Each page is copied to a row with its number, and nothing else changes."""
    kind = KVCacheLayout[layout]
    _, device = views(kind, TOKENS // split if split > 1 else None)
    memory = torch.zeros(LAYERS * BLOCKS * SPEC.page_size_bytes, dtype=torch.int8)
    page = SPEC.page_size_bytes
    for tensor in device:
        assert head_major(tensor) == layout.endswith("HNC")
        host = mirrored(tensor, memory)
        rows, blocks = page_rows(host, BLOCKS, page), page_rows(tensor, BLOCKS, page)
        assert rows.shape == blocks.shape == (BLOCKS, page // 8)
        rows[3] = blocks[3]
        wanted = torch.zeros_like(host)
        wanted[3 * split : 4 * split] = tensor[3 * split : 4 * split]
        assert torch.equal(host.view(torch.int16), wanted.view(torch.int16))


@pytest.mark.parametrize("layout", ["LHBNC", "BHLNC"])
def test_pages_in_pieces_are_refused(layout: str) -> None:
    page = SPEC.page_size_bytes
    raw = torch.zeros(LAYERS * BLOCKS * page, dtype=torch.int8)
    shape, order = (LAYERS, BLOCKS, HEADS, TOKENS, 2 * SIZE), KVCacheLayout[layout].stride_order
    view = raw.view(torch.float16).view([shape[axis] for axis in order])
    tensor = view.permute([order.index(axis) for axis in range(5)])[0]
    with pytest.raises(RuntimeError, match="unknown layout of vLLM's KV cache: shape"):
        page_rows(tensor, BLOCKS, page)


def insert(src: Any, dst: Any, src_blocks: Any, dst_blocks: Any) -> None:
    """As the platforms of vLLM for GPUs do it."""
    dst[dst_blocks] = src[src_blocks].to(dst.device)


def test_copies_with_the_functions_of_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    platform = SimpleNamespace(insert_blocks_to_device=insert, swap_out_blocks_to_host=insert)
    monkeypatch.setattr(utils, "current_platform", platform)
    device, host = caches(8, 1), caches(8, 2)
    memory = torch.zeros(1, dtype=torch.int8)
    buffers, ended = host_buffers(CPU, device, host, memory), threading.Event()
    assert buffers.use_copy_blocks(utils.copy_kv_blocks)
    names = ["layer 0", "layer 2"]
    untouched = host["layer 1"].clone()
    buffers.save(names, [(3, 5), (1, 2)], buffers.mark(), lambda *_: ended.set())
    assert ended.wait(30)
    assert all(torch.equal(host[name][[5, 2]], device[name][[3, 1]]) for name in names)
    assert torch.equal(host["layer 1"], untouched)
    ended.clear()
    buffers.load(names, [(7, 0)], buffers.mark(), lambda *_: ended.set())
    assert ended.wait(30)
    assert all(torch.equal(device[name][7], host[name][0]) for name in names)
    assert buffers.close(30)


@pytest.mark.parametrize(("platform_has", "buffers"), [(True, True), (False, True), (None, False)])
def test_functions_of_a_platform_are_used_if_there_are_any(
    monkeypatch: pytest.MonkeyPatch, platform_has: bool | None, buffers: bool
) -> None:
    """Without host buffers, the platform is not asked: one without the functions would log a warning."""
    functions = dict.fromkeys(("insert_blocks_to_device", "swap_out_blocks_to_host"), insert if platform_has else None)
    platform = None if platform_has is None else SimpleNamespace(**functions)
    monkeypatch.setattr("llm_datadist.integrations.vllm.connector.current_platform", platform)
    used: list[Callable[..., None]] = []
    worker = SimpleNamespace(has_host_buffers=buffers, use_copy_blocks=used.append)
    connector: Any = SimpleNamespace(_worker=worker)
    LlmDatadistConnector.set_host_xfer_buffer_ops(connector, utils.copy_kv_blocks)
    assert used == ([utils.copy_kv_blocks] if platform_has else [])


@pytest.mark.parametrize(("device", "pipelines"), [("cuda", True), ("xpu", False), ("cpu", False)])
def test_torch_copies_where_it_has_page_locked_memory(device: str, pipelines: bool) -> None:
    assert TorchDevice(torch.device(device)).pipelines == pipelines


def test_piecewise_graphs_are_needed_only_layer_by_layer() -> None:
    assert LlmDatadistConnector.requires_piecewise_for_cudagraph({})
    assert not LlmDatadistConnector.requires_piecewise_for_cudagraph({"layerwise": False})


class FakeCuda:
    """Streams, events and the runtime of CUDA, which note what they are asked for."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, code: int = 0) -> None:
        self.calls: list[Any] = []
        runtime = SimpleNamespace(
            cudaHostRegister=lambda *given: (self.calls.append(("register", *given)), code)[1],
            cudaHostUnregister=lambda *given: self.calls.append(("unregister", *given)),
        )
        monkeypatch.setattr(torch.cuda, "cudart", lambda: runtime)
        monkeypatch.setattr(torch, "Stream", lambda _: self)
        monkeypatch.setattr(torch, "Event", lambda _: SimpleNamespace(record=self._record, query=self._query))

    def wait_event(self, event: str) -> None:
        self.calls.append(event)

    def __enter__(self) -> None:
        self.calls.append("in the stream")

    def __exit__(self, *_: object) -> None:
        self.calls.append("out of it")

    def _record(self, stream: object) -> None:
        assert stream is self
        self.calls.append("end")

    def _query(self) -> bool:
        self.calls.append("looked")
        return self.calls.count("looked") == 3


@pytest.mark.parametrize("fails", [False, True])
def test_stream_waits_before_and_after_copies(monkeypatch: pytest.MonkeyPatch, fails: bool) -> None:
    """Also if a copy raises, because others may have begun."""
    cuda = FakeCuda(monkeypatch)
    stream = TorchDevice(torch.device("cuda")).stream()

    def work() -> None:
        cuda.calls.append("copies")
        if fails:
            raise RuntimeError("the device is broken")

    with pytest.raises(RuntimeError) if fails else nullcontext():
        stream.run(["model", "other"], work)
    looks = ["looked"] * 3
    assert cuda.calls == ["model", "other", "in the stream", "copies", "end", *looks, "out of it"]


@pytest.mark.parametrize("code", [0, 2])
def test_host_memory_is_page_locked_if_that_is_possible(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, code: int
) -> None:
    caplog.set_level("INFO", "vllm.llm_datadist")
    monkeypatch.setattr(logging.getLogger("vllm"), "propagate", True)
    cuda = FakeCuda(monkeypatch, code)
    memory = torch.zeros(1 << 20, dtype=torch.int8)
    buffers = host_buffers(torch.device("cuda"), {}, {}, memory)
    assert buffers.close(30)
    given = memory.data_ptr(), memory.nbytes, 0
    assert cuda.calls == [("register", *given), *([] if code else [("unregister", given[0])])]
    assert ("1 MiB, page-locked" if not code else "not page-locked (cudaHostRegister has returned 2)") in caplog.text
