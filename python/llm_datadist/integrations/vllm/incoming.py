"""Decode: which blocks of a request are missing, and which of the parts that prefill lends can be pulled now.

Nothing here talks to a peer. A block is named by its index in the prompt, in blocks of prefill.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llm_datadist.integrations.vllm.group_caches import VIEWS

if TYPE_CHECKING:
    from llm_datadist.integrations.vllm.messages import Lent

__all__ = ["Incoming", "LentPart", "Pull"]

# Bounds what prefill can make decode remember, and for how long.
MAX_PARTS = 65_536


@dataclass
class LentPart:
    """A part of the request, as the ranks of prefill lend it.

    Attributes:
        number: the number of the part.
        first: the index of its first block.
        blocks: the blocks in prefill, for each KV cache group.
        last: whether the part reaches the end of the prompt.
        wanted: the indexes that are missing here, for each KV cache group.
        grants: the tokens of each rank, by cluster: for each group, for each cache of the view.
        layers: how many layers each rank has in place.
        pulled: how many layers are in place here.
        pulling: whether a pull runs.
        stale: whether a later part has the same blocks, because the request was preempted.
    """

    number: int
    first: int
    blocks: list[list[int]]
    last: bool
    wanted: list[list[int]]
    grants: dict[int, list[list[bytes]]] = field(default_factory=dict)
    layers: dict[int, int] = field(default_factory=dict)
    pulled: int = 0
    pulling: bool = False
    stale: bool = False

    @property
    def end(self) -> int:
        """The index after its last block."""
        return self.first + max(map(len, self.blocks))


@dataclass(frozen=True)
class Pull:
    """Layers of a part that can be pulled."""

    part: LentPart
    layers: range


class Incoming:
    """The state of one request that decode receives.

    Args:
        missing: the indexes of the blocks that are needed, for each KV cache group.
        ranks: the clusters that are read. Each of them lends each part.
        view: through which view they are read.
        layers: number of layers.
        by_layers: whether layers can be pulled one after another. Otherwise a part is pulled when all are in place.
    """

    def __init__(self, missing: list[set[int]], ranks: set[int], view: str, layers: int, *, by_layers: bool) -> None:
        self._missing = missing
        self._ranks = ranks
        self._view = view
        self._layers = layers
        self._by_layers = by_layers
        self._parts: dict[int, LentPart] = {}
        self._seen = 0
        self._taken_back = False

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        return not any(self._missing)

    @property
    def waits(self) -> bool:
        """Whether something is missing that no running pull brings."""
        coming = [part for part in self._parts.values() if part.pulling and part.pulled == self._layers]
        covered = [{index for part in coming for index in part.wanted[group]} for group in range(len(self._missing))]
        return any(missing - found for missing, found in zip(self._missing, covered))

    def lent(self, cluster: int, message: Lent) -> None:
        """Take a part from a rank.

        Raises:
            ValueError: it does not fit this request, or what other ranks lend, or blocks are missing for good.
        """
        if cluster not in self._ranks:
            return
        part = self._parts.get(message.part)
        if part is None:
            part = self._parts[message.part] = self._added(message)
        elif (part.first, part.blocks) != (message.first, message.blocks) or cluster in part.grants:
            raise ValueError(f"the ranks of prefill do not agree about part {message.part}")
        grants = message.tokens()
        if [len(of_group) for of_group in grants] != [VIEWS[self._view] * any(blocks) for blocks in part.blocks]:
            raise ValueError(f"prefill lends part {message.part} with other grants than needed")
        part.grants[cluster] = grants
        part.layers[cluster] = message.layers
        # The last part may be one of those that prefill has taken back, and the others come again.
        if part.last and self._is_lent(part) and not self._taken_back:
            self._check_end()

    def ready(self, cluster: int, number: int, layers: int) -> None:
        """Note how many layers of a part a rank has in place."""
        part = self._parts.get(number)
        if part is not None and cluster in part.layers:
            part.layers[cluster] = max(layers, part.layers[cluster])

    def start(self) -> list[Pull]:
        """Return the pulls that can run now. Each must end with ``done`` or ``lost``."""
        pulls: list[Pull] = []
        # A stale pull that still runs may write to the blocks of the new part.
        if any(part.stale and part.pulling for part in self._parts.values()):
            return pulls
        for part in list(self._parts.values()):
            if part.pulling or not self._is_lent(part):
                continue
            if part.stale or not any(part.wanted):
                del self._parts[part.number]
                continue
            ready = min(self._layers, *part.layers.values())
            if ready > part.pulled and (self._by_layers or ready == self._layers):
                pulls.append(Pull(part, range(part.pulled, ready)))
                part.pulling, part.pulled = True, ready
        return pulls

    def done(self, pull: Pull) -> int:
        """Note that a pull has succeeded, and return how many blocks are complete now."""
        part = pull.part
        part.pulling = False
        if part.pulled < self._layers:
            return 0
        del self._parts[part.number]
        for missing, wanted in zip(self._missing, part.wanted):
            missing.difference_update(wanted)
        return sum(map(len, part.wanted))

    def lost(self, pull: Pull) -> None:
        """Note that prefill has taken a part back. It may lend its blocks again."""
        del self._parts[pull.part.number]
        self._taken_back = True

    def _is_lent(self, part: LentPart) -> bool:
        return len(part.grants) == len(self._ranks)

    def _added(self, message: Lent) -> LentPart:
        self._seen += 1
        if self._seen > MAX_PARTS:
            raise ValueError(f"prefill lends more than {MAX_PARTS} parts")
        groups = len(self._missing)
        if len(message.blocks) != groups or len(message.grants) != groups:
            raise ValueError(f"prefill lends {len(message.blocks)} KV cache groups, not {groups}")
        wanted = []
        for missing, blocks in zip(self._missing, message.blocks):
            wanted.append([index for index, block in enumerate(blocks, message.first) if index in missing])
            if any(not blocks[index - message.first] for index in wanted[-1]):
                raise ValueError("prefill lacks a block that decode needs")
        part = LentPart(message.part, message.first, message.blocks, message.last, wanted)
        for other in self._parts.values():
            if other.first < part.end and part.first < other.end:
                other.stale = self._taken_back = True
        return part

    def _check_end(self) -> None:
        parts = self._parts.values()
        for group, missing in enumerate(self._missing):
            if missing.difference(*(part.wanted[group] for part in parts)):
                raise ValueError("prefill lacks a block that decode needs")
