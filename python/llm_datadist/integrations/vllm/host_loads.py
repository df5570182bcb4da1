"""Decode with host buffers: the blocks that go from host memory to the device after a pull."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from llm_datadist.integrations.vllm.host_buffers import Copy, HostBuffers

__all__ = ["HostLoads"]


class HostLoads:
    """Begins loads, and reports their ends in the transfer thread, which alone uses it.

    Args:
        host: the host buffers.
        layers: the names of the layers of each KV cache group, in order.
        layers_per_copy: number of layers in a copy.
        call: runs a function in the transfer thread. Any thread may call it.
    """

    def __init__(
        self,
        host: HostBuffers,
        layers: list[list[str]],
        layers_per_copy: int,
        call: Callable[[Callable[[], None]], None],
    ) -> None:
        self.layers_per_copy = layers_per_copy
        self._host = host
        self._layers = layers
        self._call = call

    def begin(
        self,
        group: int,
        layers: range | None,
        blocks: list[int],
        mark: Any,
        done: Callable[[Copy, Exception | None], None],
    ) -> Copy:
        """Copy rows to the blocks of the device with the same numbers, after a mark.

        Args:
            group: the KV cache group.
            layers: the layers; ``None`` stands for all.
            blocks: the blocks.
            mark: the mark; ``None`` if the copy need not wait.
            done: is called when the bytes are in place, or with an error.

        Raises:
            RuntimeError: as for ``HostBuffers.load``.
        """
        names = self._layers[group] if layers is None else self._layers[group][layers.start : layers.stop]
        pairs = [(block, block) for block in blocks]
        return self._host.load(names, pairs, mark, lambda copy, error: self._call(partial(done, copy, error)))

    def after_saves(self, go: Callable[[], None]) -> bool:
        """Return whether no save waits or runs. Otherwise have the transfer thread call ``go`` when these have ended.

        A block may have belonged to a request that was saved. An old save must not write to its row during a pull.
        """
        if not self._host.saving:
            return True
        self._host.save([], [], None, lambda _, __: self._call(go))
        return False
