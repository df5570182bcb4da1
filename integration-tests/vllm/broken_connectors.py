"""Connectors for tests: negative controls, a pair that shows when decode reads, and one that copies as on a GPU.

The negative controls report success and hand over the wrong bytes. If the tokens of a run with one of them were right,
the comparison of tokens would prove nothing.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from vllm.platforms import current_platform

from llm_datadist.integrations.vllm.connector import LlmDatadistConnector
from llm_datadist.integrations.vllm.group_caches import GroupCaches

# How long prefill waits for decode, in seconds.
WAIT_S = 30


class _NothingPulled(GroupCaches):
    def pull_pages(self, owners: Any, pairs: Any, *rest: Any) -> Any:
        """Pull every page into block 0, which vLLM never reads."""
        return super().pull_pages(owners, [(pairs[0][0], 0)], *rest)


class _BlocksSwapped(GroupCaches):
    def pull_pages(self, owners: Any, pairs: Any, *rest: Any) -> Any:
        """Exchange the last two pages.

        The others are full, and attention does not depend on the order of full pages.
        """
        *others, (first, to_first), (second, to_second) = pairs
        return super().pull_pages(owners, [*others, (second, to_first), (first, to_second)], *rest)


class _Broken(LlmDatadistConnector):
    caches: type[GroupCaches]

    def register_kv_caches(self, kv_caches: dict[str, Any]) -> None:
        """Register, and break the pulls."""
        super().register_kv_caches(kv_caches)
        for group in self._worker.groups:
            group.__class__ = self.caches


class NothingPulled(_Broken):
    """Reports success without pulling anything."""

    caches = _NothingPulled


class BlocksSwapped(_Broken):
    """Exchanges two blocks of each request."""

    caches = _BlocksSwapped


class _Reports(GroupCaches):
    def pull_pages(self, owners: Any, pairs: Any, timeout: float, layers: range | None = None) -> Any:
        """Leave a mark when some layers of a prompt are read, and not all."""
        if layers is not None:
            _mark().touch()
        return super().pull_pages(owners, pairs, timeout, layers)


class ReportsReads(_Broken):
    """Decode: leaves a mark when it reads the first layers of a prompt."""

    caches = _Reports


class WaitsForReads(LlmDatadistConnector):
    """Prefill: if a mark is expected, computes the last of four layers only when it is there."""

    def save_kv_layer(self, layer_name: str, kv_layer: Any, attn_metadata: Any, **kwargs: Any) -> None:
        """Wait behind the last layer but one."""
        super().save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)
        end = time.monotonic() + WAIT_S
        while layer_name.startswith("model.layers.2.") and _expects_mark() and not _mark().exists():
            if time.monotonic() > end:
                raise TimeoutError(f"decode has not read the first layers within {WAIT_S} s")
            time.sleep(0.001)


def _mark() -> Path:
    return Path(os.environ["MARK"])


def _expects_mark() -> bool:
    return _mark().with_suffix(".expected").exists()


class PlatformCopies(LlmDatadistConnector):
    """Copies between host memory and device as vLLM's platforms for GPUs do it, on a CPU."""

    def set_host_xfer_buffer_ops(self, copy_operation: Any) -> None:
        """Give the platform of the CPU the functions of the others."""
        for name in ("insert_blocks_to_device", "swap_out_blocks_to_host"):
            setattr(type(current_platform), name, staticmethod(_copy_blocks))
        super().set_host_xfer_buffer_ops(copy_operation)
        assert self._worker._host.copy_blocks is copy_operation


def _copy_blocks(src: Any, dst: Any, src_blocks: Any, dst_blocks: Any) -> None:
    dst[dst_blocks] = src[src_blocks].to(dst.device)
