"""SGLang's storage threads over a host pool, without a GPU and a scheduler: the test takes the scheduler's place.

As a program, it prefetches pages from a keeper, and prints how many there were and a digest of their bytes.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from dataclasses import dataclass
from queue import Queue
from types import SimpleNamespace
from typing import Any

import sglang.srt.managers.cache_controller as base
import torch
from sglang.srt.mem_cache import device_pool_info
from sglang.srt.mem_cache.hicache_storage import PoolName
from sglang.srt.mem_cache.hybrid_cache.hybrid_cache_controller import HybridCacheController
from sglang.srt.mem_cache.pool_host.group import HostPoolGroup, PoolEntry
from sglang.srt.mem_cache.pool_host.mha import MHATokenToKVPoolHost
from sglang.srt.mem_cache.utils import get_storage_hash_str

LAYERS, PAGE, HEADS, DIM = 4, 16, 2, 32
PIECE = LAYERS * PAGE * HEADS * DIM * 2
PAGES = 300  # more than two batches of SGLang
LIMIT = 30.0

_ONE_RANK = SimpleNamespace(
    attn_dcp_size=1,
    attn_dcp_rank=0,
    tp_rank=0,
    tp_size=1,
    pp_rank=0,
    pp_size=1,
    attn_tp_rank=0,
    attn_tp_size=1,
    attn_dp_rank=0,
)
base.get_parallel = lambda: _ONE_RANK
base.is_dp_attention_enabled = lambda: False


def options(socket: str, **more: Any) -> dict[str, Any]:
    """Return what `--hicache-storage-backend-extra-config` has."""
    where = {"module_path": "llm_datadist.integrations.sglang", "class_name": "KeeperStorage"}
    return {"backend_name": "llm_datadist", **where, "interface_v1": 1, "socket": socket, "revision": "r", **more}


def host_pool(pages: int, layout: str = "page_first", dtype: torch.dtype = torch.bfloat16) -> Any:
    """Return a host pool of SGLang in ordinary memory."""
    device = tuple(torch.zeros(PAGE * 2, HEADS, DIM, dtype=dtype) for _ in range(LAYERS))
    addresses = torch.tensor([each.data_ptr() for each in device], dtype=torch.uint64)
    info = device_pool_info.MHABufferInfo(
        buffers=device_pool_info.KVBuffers(
            k=device,
            v=device,
            k_data_ptrs=addresses,
            v_data_ptrs=addresses,
            layout=next(iter(device_pool_info.KVBufferLayout)),
        ),
        page_size=PAGE,
        head_num=HEADS,
        head_dim=DIM,
        v_head_dim=DIM,
        dtype=dtype,
        device=torch.device("cpu"),
    )
    return MHATokenToKVPoolHost(
        info,
        2.0,
        0,
        PAGE,
        layout,
        pin_memory=False,
        device="cpu",
        allocator_type="default",
        device_capacity_tokens=PAGE * 2,
        start_layer=0,
        end_layer=LAYERS,
        host_token_capacity=PAGE * pages,
    )


@dataclass(frozen=True)
class Handle:
    """Names a request."""

    rid: str = "request"


class Server:
    """The controller of a server's cache with its storage threads, and the host pool that it fills.

    Its constructor needs a device, so its fields are set here.
    """

    def __init__(self, extra: dict[str, Any], model: str = "m", **pool: Any) -> None:
        self.pool = host_pool(2 * PAGES + 8, **pool)
        entry = PoolEntry(PoolName.KV, self.pool, None, lambda layer: layer, is_primary_index_anchor=True)
        group = HostPoolGroup([entry])
        made = HybridCacheController.__new__(HybridCacheController)
        vars(made).update(
            tp_group=None,
            attn_cp_group=None,
            attn_tp_group=None,
            pp_group=None,
            host_memory_mode="cache",
            page_size=PAGE,
            mem_pool_host=group,
            storage_host_pool=self.pool,
            mem_pool_device=object(),
            enable_storage=False,
            enable_storage_metrics=False,
            storage_stop_event=threading.Event(),
            storage_backend=None,
            prefetch_hits_sync_groups=[],
            prefetch_completion_sync_groups=[],
            host_write_staged_tokens_fn=None,
            extra_host_mem_release_queues={},
            pp_prefetch_command_group=None,
            pp_prefetch_command_thread=None,
            pp_prefetch_command_queue=Queue(),
            pp_prefetch_state_lock=threading.Lock(),
            pp_prefetch_states={},
            pp_prefetch_decisions={},
            _create_sync_groups=list,
        )
        self.controller: Any = made
        self.attach(extra, model)

    def attach(self, extra: dict[str, Any], model: str = "m") -> None:
        """Attach the storage, as the start of a server and its HTTP interface do."""
        pools = self.controller.mem_pool_host.entries
        self.controller.attach_storage_backend(
            "dynamic", model_name=model, storage_backend_extra_config=extra, host_pools=pools
        )

    def detach(self) -> None:
        """Detach the storage, as the HTTP interface does."""
        self.controller.detach_storage_backend()

    def fill(self, rows: Any, seed: int) -> None:
        """Write pages, each with other bytes."""
        random = torch.Generator().manual_seed(seed)
        for each in (self.pool.k_buffer, self.pool.v_buffer):
            whole = each.view(torch.int16)
            whole[rows] = torch.randint(-(2**15), 2**15, whole[rows].shape, generator=random, dtype=torch.int16)

    def bytes(self, rows: Any) -> bytes:
        """Return the bytes of pages."""
        parts = [each.view(torch.int16)[rows].numpy().tobytes() for each in (self.pool.k_buffer, self.pool.v_buffer)]
        return b"".join(parts)

    def write(self, rows: Any, tokens: list[int]) -> int:
        """Have the backup thread store pages. Return how many tokens it has stored."""
        self.controller.write_storage(rows, tokens, get_storage_hash_str(tokens, None, page_size=PAGE))
        return int(self.controller.ack_backup_queue.get(timeout=LIMIT).completed_tokens)

    def prefetch(self, tokens: list[int]) -> Any:
        """Have the prefetch threads load pages. Return the rows of the host pool that are complete."""
        self.controller.prefetch(Handle(), tokens)
        operation = self.controller.prefetch_hit_queue.get(timeout=LIMIT)
        if not operation.storage_hit_count:
            return torch.empty(0, dtype=torch.int64)
        operation.host_indices = self.pool.alloc(operation.storage_hit_count)
        self.controller.prefetch_buffer.put(operation)
        completed = 0
        while True:
            ack = self.controller.ack_prefetch_queue.get(timeout=LIMIT)
            if ack.completed_tokens is not None:
                completed = ack.completed_tokens
            if ack.completed_req:
                return operation.host_indices[:completed]


def prompt(seed: int, pages: int = PAGES) -> list[int]:
    """Return the tokens of a prompt."""
    return list(range(seed * 1_000_000, seed * 1_000_000 + pages * PAGE))


def main() -> None:
    """Prefetch the prompt of a seed in a new process."""
    socket, revision, seed = sys.argv[1:]
    server = Server(options(socket, revision=revision))
    rows = server.prefetch(prompt(int(seed)))
    print(json.dumps({"tokens": len(rows), "digest": hashlib.sha256(server.bytes(rows)).hexdigest()}))  # noqa: T201
    server.detach()


if __name__ == "__main__":
    main()
