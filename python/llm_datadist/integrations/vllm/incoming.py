"""Decode: which blocks of a request are missing, and which of the parts that prefill lends can be pulled now.

Nothing here talks to a peer. A block is named by its index in the prompt, in blocks of prefill.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from llm_datadist.integrations.vllm.group_caches import HEADS, VIEWS

if TYPE_CHECKING:
    from llm_datadist.integrations.vllm.messages import Lent

__all__ = ["Incoming", "LentPart", "Pull"]

# Limits on what decode remembers, and for how long, if prefill misbehaves: the number of parts at a time, and how often
# prefill may lend the whole prompt again.
MAX_PARTS = 4096
MAX_AGAIN = 64


@dataclass
class LentPart:
    """A part of the request, as the ranks of prefill lend it."""

    number: int
    first: int  # the index of its first block
    blocks: list[list[int]]  # in prefill, for each KV cache group
    wanted: list[list[int]]  # the indexes that are missing here, for each KV cache group
    # The tokens of the grants, by rank of prefill: for each KV cache group, one token for each cache of the view.
    grants: dict[int, list[list[bytes]]] = field(default_factory=dict)
    layers: dict[int, int] = field(default_factory=dict)  # how many layers each rank has in place
    pulled: int = 0  # number of layers that are in place here or being pulled
    pulling: bool = False  # whether a pull runs
    stale: bool = False  # whether a later part has the same blocks, because the request was preempted

    @property
    def end(self) -> int:
        """The index after its last block."""
        return self.first + max(map(len, self.blocks))


@dataclass
class Pull:
    """Layers of a part that are pulled, with one transfer for each KV cache group."""

    part: LentPart
    layers: range
    transfers: int = 0  # number of transfers that run
    loads: int = 0  # number of copies to the device that wait or run, if there are host buffers
    nanos: int = 0  # the duration of the longest transfer that has ended
    lost: bool = False  # whether grants have ended before a transfer had read all bytes


class Incoming:
    """The state of one request that decode receives.

    Args:
        missing: the indexes of the blocks that are needed, for each KV cache group.
        blocks: number of blocks of the whole prompt in prefill, the largest of all groups.
        ranks: the ranks of prefill that are read. Each of them lends each part.
        view: through which view they are read.
        layers: number of layers.
        by_layers: whether layers can be pulled one after another. Otherwise a part is pulled when all are in place.
        layers_per_pull: the largest number of layers of a pull, if they can be pulled one after another; 0 for any.
    """

    def __init__(
        self,
        missing: list[set[int]],
        blocks: int,
        ranks: set[int],
        view: str,
        layers: int,
        *,
        by_layers: bool,
        layers_per_pull: int = 0,
    ) -> None:
        self._missing = missing
        self._needed = [set(group) for group in missing]
        self._blocks = blocks
        self._ranks = ranks
        self._view = view
        self._layers = layers
        self._by_layers = by_layers
        self._layers_per_pull = (layers_per_pull if by_layers else 0) or layers
        self._parts: dict[int, LentPart] = {}
        self._at: dict[int, LentPart] = {}  # the newest part with each block
        # The parts that may have something to pull, and the pulls that write to blocks of a newer part.
        self._changed: dict[int, LentPart] = {}
        self._stale: set[int] = set()
        self._seen: set[int] = set()
        self._again = 0
        self._withdrawn = False

    @property
    def begun(self) -> bool:
        """Whether prefill has lent a part that is needed."""
        return bool(self._seen)

    @property
    def complete(self) -> bool:
        """Whether nothing is missing."""
        return not any(self._missing)

    @property
    def waits(self) -> bool:
        """Whether a missing block is not covered by a running pull that includes the last layer."""
        coming = [part for part in self._parts.values() if part.pulling and part.pulled == self._layers]
        covered = [{index for part in coming for index in part.wanted[group]} for group in range(len(self._missing))]
        return any(missing - found for missing, found in zip(self._missing, covered))

    def lent(self, rank: int, message: Lent) -> bool:
        """Take a part from a rank, and return whether it is needed.

        Raises:
            ValueError: the part does not fit this request, or contradicts another rank, or lacks a block.
        """
        if rank not in self._ranks:
            return False
        part = self._parts.get(message.part) or self._added(message)
        if part is not None:
            if rank in part.grants or (part.first, part.blocks) != (message.first, message.blocks):
                raise ValueError(f"part {message.part} from rank {rank} is lent again, or has other blocks than before")
            grants = message.grants
            given, expected = [len(of) for of in grants], [VIEWS[self._view] * any(blocks) for blocks in part.blocks]
            if given != expected:
                raise ValueError(f"part {message.part} has {given} grants per KV cache group (expected {expected})")
            part.grants[rank] = grants
            part.layers[rank] = message.layers
            self._changed[part.number] = part
        # Each rank lends its parts in order, so no more follow. But prefill lends withdrawn parts again.
        if message.last and not self._withdrawn:
            self._check_end()
        return part is not None

    def ready(self, rank: int, number: int, layers: int) -> bool:
        """Note how many layers of a part a rank has in place, and return whether they are more than before."""
        part = self._parts.get(number)
        if part is None or layers <= part.layers.get(rank, layers) or part.layers[rank] >= self._layers:
            return False
        part.layers[rank] = layers
        self._changed[number] = part
        return True

    def start(self) -> list[Pull]:
        """Return the pulls that can run now. Each must end with ``done`` or ``lost``."""
        pulls: list[Pull] = []
        # A stale pull that still runs may write to the blocks of the new part.
        if self._stale:
            return pulls
        changed, self._changed = self._changed, {}
        for part in changed.values():
            if part.pulling or len(part.grants) < len(self._ranks) or part.number not in self._parts:
                continue
            if part.stale or not (part.pulled or self._misses(part)):
                self._forget(part)
                continue
            ready = min(self._layers, *part.layers.values())
            if ready > part.pulled and (self._by_layers or ready == self._layers):
                end = min(ready, part.pulled + self._layers_per_pull)
                pulls.append(Pull(part, range(part.pulled, end)))
                part.pulling, part.pulled = True, end
                # The pull writes to all of these blocks, also to those that an earlier part has brought. If it fails,
                # none of them can be trusted.
                for missing, wanted in zip(self._missing, part.wanted):
                    missing.update(wanted)
        return pulls

    def done(self, pull: Pull) -> int:
        """Note that a pull has succeeded, and return how many blocks it has completed: none if layers remain."""
        part = pull.part
        part.pulling = False
        self._stale.discard(part.number)
        if part.pulled < self._layers:
            self._changed[part.number] = part
            return 0
        self._forget(part)
        for missing, wanted in zip(self._missing, part.wanted):
            missing.difference_update(wanted)
        return sum(map(len, part.wanted))

    def lost(self, pull: Pull) -> None:
        """Note that the grants of a part have ended during its pull. Prefill may lend the blocks again."""
        self._stale.discard(pull.part.number)
        self._forget(pull.part)
        self._withdrawn = True

    def _added(self, message: Lent) -> LentPart | None:
        """Return a new part, or ``None`` if nothing of it is missing or a later part has its blocks."""
        groups = len(self._missing)
        if len(message.blocks) != groups or len(message.grants) != groups:
            text = f"part {message.part} has {len(message.blocks)} lists of blocks and {len(message.grants)} of grants"
            raise ValueError(f"{text} (expected {groups}, one for each KV cache group)")
        indexes = range(message.first, message.first + max(map(len, message.blocks)))
        if indexes.stop > self._blocks:
            raise ValueError(f"prefill lends blocks up to {indexes.stop} of a prompt of {self._blocks} blocks")
        wanted = []
        for group, (missing, blocks) in enumerate(zip(self._missing, message.blocks)):
            found = [index for index, _ in enumerate(blocks, message.first) if index in missing]
            if found and self._view == HEADS:
                # Such a pull covers the whole part.
                found = [index for index, _ in enumerate(blocks, message.first) if index in self._needed[group]]
            wanted.append(found)
            lacking = next((index for index in wanted[-1] if not blocks[index - message.first]), None)
            if lacking is not None:
                raise ValueError(_lacks(group, lacking))
        overlapping = {part.number: part for part in map(self._at.get, indexes) if part is not None}
        if not any(wanted) or any(number > message.part for number in overlapping):
            return None
        self._bound(indexes)
        for number, part in overlapping.items():
            part.stale = self._withdrawn = True
            if part.pulling:
                self._stale.add(number)
            else:
                self._forget(part)
        part = LentPart(message.part, message.first, message.blocks, wanted)
        self._parts[message.part] = part
        self._at.update(dict.fromkeys(indexes, part))
        return part

    def _forget(self, part: LentPart) -> None:
        del self._parts[part.number]
        for index in range(part.first, part.end):
            if self._at.get(index) is part:
                del self._at[index]

    def _misses(self, part: LentPart) -> bool:
        return any(not missing.isdisjoint(wanted) for missing, wanted in zip(self._missing, part.wanted))

    def _bound(self, indexes: range) -> None:
        self._again += len(self._seen.intersection(indexes))
        self._seen.update(indexes)
        if self._again > MAX_AGAIN * self._blocks:
            raise ValueError(f"prefill has lent the prompt again more than {MAX_AGAIN} times")
        if len(self._parts) >= MAX_PARTS:
            raise ValueError(f"prefill lends more than {MAX_PARTS} parts at a time")

    def _check_end(self) -> None:
        parts = self._parts.values()
        for group, missing in enumerate(self._missing):
            lacking = missing.difference(*(part.wanted[group] for part in parts))
            if lacking:
                raise ValueError(_lacks(group, min(lacking)))


def _lacks(group: int, index: int) -> str:
    return f"prefill does not lend block {index} of KV cache group {group}, which decode needs"
