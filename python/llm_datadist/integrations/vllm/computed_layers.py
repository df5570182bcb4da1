"""Prefill: the layers that a step has computed, which are reported to decode, or copied to host memory first."""

from __future__ import annotations

import logging
from collections import deque
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from llm_datadist.integrations.vllm.host_saves import HostSaves
    from llm_datadist.integrations.vllm.lending import Lending
    from llm_datadist.integrations.vllm.step import Part

__all__ = ["ComputedLayers", "Computing"]

logger = logging.getLogger("vllm.llm_datadist")


@dataclass
class Computing:
    """The parts that a step computes. The model's thread notes layers, and the transfer thread reports them."""

    parts: list[Part]
    saved: list[str] = field(default_factory=list)  # the layers that are computed, in the order in which they were
    # With host buffers: marks of the device, each with the number of layers that are computed before it.
    marks: list[tuple[int, Any]] = field(default_factory=list)
    ended: bool = False  # whether the model has run
    reported: int = 0  # how many layers were reported to decode, from the first one on


class ComputedLayers:
    """The steps whose layers are not all reported. Only the transfer thread uses it.

    Args:
        layers: the names of the layers, in order.
        lending: is notified which layers are computed.
        saves: copies layers to host memory, and then notifies ``lending``. ``None`` if the engine reaches them itself.
    """

    def __init__(self, layers: list[str], lending: Lending, saves: HostSaves | None) -> None:
        self._layers = layers
        self._lending = lending
        self._saves = saves
        self._steps: deque[Computing] = deque()

    def add(self, step: Computing) -> None:
        """Take a step, whose parts are lent."""
        self._steps.append(step)

    def report(self) -> None:
        """Report to decode the layers that were computed since the last call."""
        for step in list(self._steps):
            if not step.ended:
                saved = list(step.saved)
                if len(saved) > step.reported and saved == self._layers[: len(saved)]:
                    self._ready(step, len(saved))
                continue
            self._steps.remove(step)
            missing = set(self._layers).difference(step.saved)
            if not missing:
                if step.saved != self._layers:
                    step.marks = step.marks[-1:]  # another order: only the last one comes after all layers
                self._ready(step, len(self._layers))
                continue
            reason = f"the model has computed {len(self._layers) - len(missing)} of {len(self._layers)} layers"
            tickets = ", ".join(sorted({part.ticket for part in step.parts}))
            logger.error("tickets %s are not handed over: %s", tickets, reason)
            self._lending.fail(step.parts, reason)

    def _ready(self, step: Computing, layers: int) -> None:
        """Report the first layers of a step to decode. With host buffers, those that have a mark are copied first."""
        if self._saves is None:
            self._lending.ready(step.parts, None if layers == len(self._layers) else layers)
            step.reported = layers
            return
        for end, mark in [(end, mark) for end, mark in list(step.marks) if step.reported < end <= layers]:
            self._saves.begin(step.parts, range(step.reported, end), mark)
            step.reported = end
