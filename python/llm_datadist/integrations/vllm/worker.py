"""The half of the connector in a worker of vLLM: its engine, and the caches over vLLM's KV cache."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from llm_datadist import Engine
from llm_datadist.integrations.vllm import interface
from llm_datadist.integrations.vllm.addresses import advertised, listen_address
from llm_datadist.integrations.vllm.device_copies import head_major, host_buffers, mirrored, page_rows
from llm_datadist.integrations.vllm.group_caches import GroupCaches
from llm_datadist.integrations.vllm.identity import Identity
from llm_datadist.integrations.vllm.pages import PageFormat
from llm_datadist.integrations.vllm.ranks import Shard, engine_name
from llm_datadist.integrations.vllm.supported import installed
from llm_datadist.integrations.vllm.transfer_thread import TransferThread

with interface.needed():
    import vllm.envs as envs  # noqa: PLR0402 - mypy does not look into vLLM

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from llm_datadist.integrations.vllm.host_buffers import HostBuffers
    from llm_datadist.integrations.vllm.settings import Settings

__all__ = ["WorkerSide"]

logger = logging.getLogger("vllm.llm_datadist")

# Memory of the pool beside vLLM's KV cache: the engine rounds each tensor up.
_POOL_SLACK = 64 << 20


class WorkerSide:
    """The engine of one worker, and its transfers.

    Args:
        vllm_config: vLLM's configuration.
        kv_cache_config: vLLM's description of its KV cache.
        settings: the options of the connector.
        engine_id: the engine id of this vLLM.
        own: returns the address of this host that vLLM has chosen.
        tensor: the tensor-parallel rank and size.
        pipeline: the pipeline-parallel rank and size.
    """

    def __init__(
        self,
        vllm_config: Any,
        kv_cache_config: Any,
        settings: Settings,
        engine_id: str,
        own: Callable[[], str],
        *,
        tensor: tuple[int, int],
        pipeline: tuple[int, int],
    ) -> None:
        model = vllm_config.model_config
        total_heads = 1 if model.use_mla else int(model.get_total_num_kv_heads())
        self._shard = Shard(*tensor, total_heads, *pipeline)
        self._name = engine_name(engine_id, self._shard.worker)
        self._own = own
        self._config = vllm_config
        self._kv_cache_config = kv_cache_config
        self._settings = settings
        self.groups: list[GroupCaches] = []
        self._order = "HND"  # of the pages; the only one of the CPU backend
        self._host: HostBuffers | None = None
        self._transfers: TransferThread | None = None
        self._identity = self._announced()
        self._engine = self._open()

    @property
    def number(self) -> int:
        """The number of the worker in its vLLM."""
        return self._shard.worker

    @property
    def address(self) -> str:
        """The address at which peers reach the engine."""
        return advertised(self._settings, str(self._engine.address), self._own)

    def pool_memory(self) -> AbstractContextManager[Any] | None:
        """Return a context in which vLLM allocates its KV cache in the pool of the engine, if that is possible."""
        on_device = self._settings.host_buffers or self._config.device_config.device_type != "cpu"
        return _PoolMemory(self) if self._fits_pool() and not on_device else None

    def allocate(self) -> torch.Tensor:
        """Allocate vLLM's KV cache, or the host buffers for it, in the pool."""
        caches = GroupCaches(self._engine, 0, self._form(0))
        self.groups = [caches]
        return torch.from_dlpack(caches.allocate(self._kv_cache_config.num_blocks)).view(torch.int8)

    def register(self, kv_caches: dict[str, torch.Tensor]) -> TransferThread:
        """Register vLLM's KV cache, or the host buffers for it, and return its transfers, which begin."""
        device = next(iter(kv_caches.values())).device
        if device.type != "cpu" or self._settings.host_buffers:
            kv_caches = self._buffered(kv_caches, device)
        for index, group in enumerate(self._kv_cache_config.transfer_groups):
            if index == len(self.groups):
                if self._fits_pool():
                    logger.warning("vLLM did not allocate its KV cache in the pool of llm_datadist; it is registered")
                self.groups.append(GroupCaches(self._engine, index, self._form(index)))
            tensors = [kv_caches[name] for name in group.layer_names]
            form = self.groups[index].form
            pages = [self._page_rows(tensor, form) for tensor in tensors]
            strides = [rows.stride(0) * rows.element_size() for rows in pages]
            self.groups[index].register([rows.data_ptr() for rows in pages], pages[0].shape[0], strides)
        layers = [list(group.layer_names) for group in self._kv_cache_config.transfer_groups]
        identity = self._identity if self._settings.check_compatibility else None
        given = (self._engine, self.groups, self._shard, identity, self._settings, layers, self._host)
        self._transfers = TransferThread(*given)
        form = self.groups[0].form
        logger.info(
            "peers reach llm_datadist at %s as %s: %d KV cache groups, %d layers, pages of %d bytes, packing %r",
            *(self.address, self._engine.name, len(self.groups), form.layers, form.page_bytes, form.isa),
        )
        return self._transfers

    @property
    def has_host_buffers(self) -> bool:
        """Whether the KV cache goes through host buffers."""
        return self._host is not None

    def use_copy_blocks(self, copy_blocks: Callable[..., None]) -> None:
        """Have the host buffers, if there are any, copy with a function of vLLM where torch has no better one."""
        if self._host is not None and self._host.use_copy_blocks(copy_blocks):
            logger.info("llm_datadist copies between host memory and device with the functions of vLLM's platform")

    def close(self) -> None:
        """End all transfers, and close the engine."""
        try:
            if self._transfers is not None:
                self._transfers.close()
        finally:
            self._engine.close()

    def _buffered(self, kv_caches: dict[str, torch.Tensor], device: torch.device) -> dict[str, torch.Tensor]:
        """Make the host buffers for a KV cache, and return its tensors in host memory.

        They are laid out like the KV cache on the device, so each block there has a row with the same number.

        Raises:
            RuntimeError: the tensors of the KV cache are not in one allocation, or have an unknown layout.
        """
        groups = self._kv_cache_config.transfer_groups
        used = {name: kv_caches[name] for group in groups for name in group.layer_names}
        if len({tensor.untyped_storage().data_ptr() for tensor in used.values()}) != 1:
            raise RuntimeError("the tensors of vLLM's KV cache are not in one allocation")
        self._order = "HND" if all(map(head_major, used.values())) else "NHD"
        if self._fits_pool():
            memory = self.allocate()
        else:
            memory = torch.zeros(self._kv_cache_config.kv_cache_tensors[0].size, dtype=torch.int8)
        host = {name: mirrored(tensor, memory) for name, tensor in used.items()}
        blocks, rows = {}, {}
        for index, group in enumerate(groups):
            form = self._form(index)
            for name in group.layer_names:
                blocks[name] = self._page_rows(used[name], form)
                rows[name] = self._page_rows(host[name], form)
        self._host = host_buffers(device, blocks, rows, memory)
        given = self._config.kv_transfer_config.kv_buffer_device
        if given != "cpu":
            text = "kv_buffer_device is %r, but llm_datadist reaches host memory only, so the KV cache goes through it"
            logger.warning(text, given)
        logger.info("the host buffers are in %s", "the pool" if self._fits_pool() else "registered memory")
        return host

    def _page_rows(self, tensor: torch.Tensor, form: PageFormat) -> torch.Tensor:
        return page_rows(tensor, self._kv_cache_config.num_blocks, form.page_bytes)

    def _open(self) -> Engine:
        replica = self._config.parallel_config.data_parallel_index
        options: dict[str, Any] = {
            "name": self._name,
            "listen": listen_address(self._settings, self._shard, replica, self._own),
            "timeout": self._settings.timeout_ms / 1000,
            "metadata": self._identity.metadata(),
        }
        if self._fits_pool():
            options["pool"] = self._kv_cache_config.kv_cache_tensors[0].size + _POOL_SLACK
        return Engine(**{**options, **self._settings.engine_options})

    def _announced(self) -> Identity:
        model, forms = self._config.model_config, map(self._form, range(len(self._kv_cache_config.transfer_groups)))
        return Identity(
            {
                "model": self._settings.model_tag or f"{model.model}, revision {model.revision}",
                "dtype": str(model.dtype),
                "kv_cache": "; ".join(form.summary() for form in forms),
                "vllm": ".".join(installed().split(".")[:2]),
            }
        )

    def _fits_pool(self) -> bool:
        """Whether vLLM's KV cache is one cache of the engine: one group, layer after layer, without gaps."""
        config = self._kv_cache_config
        if not self._settings.kv_cache_in_pool or len(config.kv_cache_groups) != 1 or len(config.kv_cache_tensors) != 1:
            return False
        tensor, page = config.kv_cache_tensors[0], config.kv_cache_groups[0].kv_cache_spec.page_size_bytes
        packed = tensor.block_stride == page and tensor.layer_stride == page * config.num_blocks
        return bool(packed and tensor.size == tensor.layer_stride * len(tensor.layers) and not tensor.offset)

    def _form(self, index: int) -> PageFormat:
        """Describe the pages of a group.

        Raises:
            RuntimeError: the group has no attention pages, or no layer in this pipeline stage.
        """
        group = self._kv_cache_config.transfer_groups[index]
        if not group.layer_names:
            raise RuntimeError(f"llm_datadist needs a layer of KV cache group {index} in each pipeline stage")
        spec = group.kv_cache_spec
        if not hasattr(spec, "num_kv_heads"):
            raise RuntimeError(f"llm_datadist does not know KV caches of {type(spec).__name__}")
        context = self._config.compilation_config.static_forward_context
        layers = [context.get(name) for name in group.layer_names]
        # A vLLM without this variable shuffles no pages.
        shuffled = bool(getattr(envs, "VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT", False))
        heads, total = self._shard.heads, self._shard.total_heads
        return PageFormat.of(spec, layers, heads, total, self._order, shuffled=shuffled)


class _PoolMemory(TorchFunctionMode):  # type: ignore[misc]
    """While it is entered, the one large ``torch.zeros`` of vLLM's KV cache is memory of the engine's pool."""

    def __init__(self, worker: WorkerSide) -> None:
        super().__init__()
        self._worker = worker
        self._size = worker._kv_cache_config.kv_cache_tensors[0].size  # noqa: SLF001 - a part of this module

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.zeros and args and args[0] == self._size:
            return self._worker.allocate()
        return func(*args, **(kwargs or {}))
