"""The half of the connector in a worker of vLLM: its engine, and the caches over vLLM's KV cache."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING, Any

import torch
from torch.overrides import TorchFunctionMode

from llm_datadist import Engine
from llm_datadist.integrations.vllm.addresses import advertised, listen_address
from llm_datadist.integrations.vllm.group_caches import GroupCaches
from llm_datadist.integrations.vllm.identity import Identity
from llm_datadist.integrations.vllm.pages import PageFormat
from llm_datadist.integrations.vllm.ranks import Shard, engine_name
from llm_datadist.integrations.vllm.supported import check_device, installed
from llm_datadist.integrations.vllm.transfer_thread import TransferThread

if TYPE_CHECKING:
    from collections.abc import Callable
    from contextlib import AbstractContextManager

    from llm_datadist.integrations.vllm.settings import Settings

__all__ = ["WorkerSide"]

logger = logging.getLogger("vllm.llm_datadist")

# Memory of the pool beside vLLM's KV cache: the engine rounds each tensor up.
_POOL_SLACK = 64 << 20
_LATENT = "MLAAttentionSpec"


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
        return _PoolMemory(self) if self._fits_pool() else None

    def allocate(self) -> torch.Tensor:
        """Allocate vLLM's KV cache in the pool."""
        caches = GroupCaches(self._engine, 0, self._form(0))
        self.groups = [caches]
        return torch.from_dlpack(caches.allocate(self._kv_cache_config.num_blocks)).view(torch.int8)

    def register(self, kv_caches: dict[str, torch.Tensor]) -> TransferThread:
        """Register vLLM's KV cache, and return its transfers, which begin."""
        for index, group in enumerate(self._kv_cache_config.transfer_groups):
            if index == len(self.groups):
                if self._fits_pool():
                    logger.warning("vLLM did not allocate its KV cache in the pool of llm_datadist; it is registered")
                self.groups.append(GroupCaches(self._engine, index, self._form(index)))
            tensors = [kv_caches[name] for name in group.layer_names]
            first = tensors[0]
            check_device(first.device.type)
            form = self.groups[index].form
            for tensor in tensors:
                if tensor[0].nbytes != form.page_bytes or not tensor[0].is_contiguous():
                    raise RuntimeError(f"unknown layout of vLLM's KV cache: shape {tuple(tensor.shape)}, {form}")
            strides = [tensor.stride(0) * tensor.element_size() for tensor in tensors]
            self.groups[index].register([tensor.data_ptr() for tensor in tensors], first.shape[0], strides)
        layers = list(self._kv_cache_config.transfer_groups[0].layer_names)
        identity = self._identity if self._settings.check_compatibility else None
        self._transfers = TransferThread(self._engine, self.groups, self._shard, identity, self._settings, layers)
        form = self.groups[0].form
        logger.info(
            "llm_datadist is reached at %s as %s: %d KV cache groups, %d layers, pages of %d bytes, packing %r",
            *(self.address, self._engine.name, len(self.groups), form.layers, form.page_bytes, form.isa),
        )
        return self._transfers

    def close(self) -> None:
        """End all transfers, and close the engine."""
        try:
            if self._transfers is not None:
                self._transfers.close()
        finally:
            self._engine.close()

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
        latent = self._shard.total_heads == 1 and type(spec).__name__ == _LATENT
        layers = self._config.compilation_config.static_forward_context
        isa = "" if latent else str(getattr(layers.get(group.layer_names[0]), "isa", ""))
        element = torch.empty(0, dtype=spec.dtype).element_size()
        content = spec.page_size_bytes // (spec.block_size * spec.num_kv_heads * element)
        tag = f"{spec.dtype}/{type(spec).__name__}"
        heads, total = self._shard.heads, self._shard.total_heads
        sizes = (content - content // 2, content // 2)
        return PageFormat(len(group.layer_names), spec.block_size, heads, total, *sizes, element, isa, tag)


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
