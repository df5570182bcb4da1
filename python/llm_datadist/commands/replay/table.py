"""The slot of each block: plans the hits, swaps and evictions of a request. This module makes no engine calls.

A shared block is in a device slot, in a host slot, or in neither. Running requests hold references to the device blocks
that they use. Blocks without a reference stay cached (*idle*); the oldest is swapped out first. Of the blocks on the
host, the oldest is evicted first. Private blocks belong to one running request and are never cached.
"""

from __future__ import annotations

from collections import OrderedDict
from itertools import islice
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Sequence


class Plan(NamedTuple):
    """The steps for one request, to be carried out in the order of the fields.

    `swap_out` and `swap_in` have (block id, source slot, destination slot), `hits` and `writes` have (block id, device
    slot), and `private` has device slots. `evicted` blocks were removed from the host. `dropped` blocks were removed
    from the device because the host had no slot for them.
    """

    swap_out: list[tuple[int, int, int]]
    swap_in: list[tuple[int, int, int]]
    hits: list[tuple[int, int]]
    writes: list[tuple[int, int]]
    private: list[int]
    evicted: list[int]
    dropped: list[int]


class BlockTable:
    """The slots of all blocks of a node with `device_slots` device slots and `host_slots` host slots."""

    def __init__(self, device_slots: int, host_slots: int) -> None:
        self._device: dict[int, int] = {}
        self._references: dict[int, int] = {}
        self._idle: OrderedDict[int, None] = OrderedDict()
        self._host: OrderedDict[int, int] = OrderedDict()
        self._free_device = list(range(device_slots - 1, -1, -1))
        self._free_host = list(range(host_slots - 1, -1, -1))

    def plan(self, blocks: Sequence[int], private: int) -> Plan | None:
        """Assign device slots to the blocks of a request and to `private` more, and take references to the shared ones.

        Returns None, and changes nothing, if the device has too few slots that are free or idle.
        """
        on_device = [block for block in blocks if block in self._device]
        fresh_slots = len(blocks) - len(on_device) + private
        idle_hits = sum(1 for block in on_device if block in self._idle)
        if fresh_slots > len(self._free_device) + len(self._idle) - idle_hits:
            return None
        for block in on_device:
            self._hold(block)
        on_host = [block for block in blocks if block in self._host]
        sources = {block: self._host.pop(block) for block in on_host}
        swap_out, evicted, dropped = self._make_room(fresh_slots - len(self._free_device))
        hits = [(block, self._device[block]) for block in on_device]
        slots = _take(self._free_device, fresh_slots)
        swap_in: list[tuple[int, int, int]] = []
        writes: list[tuple[int, int]] = []
        for block in blocks:
            if block in self._device:
                continue
            slot = slots.pop()
            if block in sources:
                swap_in.append((block, sources[block], slot))
            else:
                writes.append((block, slot))
            self._device[block] = slot
            self._references[block] = 1
        # This must come last: the swap-outs of this plan must not write a host slot that its swap-ins read.
        self._free_host.extend(sources.values())
        return Plan(swap_out, swap_in, hits, writes, slots, evicted, dropped)

    def release(self, blocks: Sequence[int], private: Sequence[int]) -> None:
        """Drop the references of a finished request and free its private slots.

        The last block becomes idle first, so that a prefix is cached for longer than the blocks that follow it.
        """
        for block in reversed(blocks):
            self._references[block] -= 1
            if self._references[block] == 0:
                del self._references[block]
                self._idle[block] = None
        self._free_device.extend(reversed(private))

    def cached(self) -> tuple[dict[int, int], dict[int, int]]:
        """Return the slots of all blocks on the device and of all blocks on the host, by block id."""
        return dict(self._device), dict(self._host)

    def _hold(self, block: int) -> None:
        self._references[block] = self._references.get(block, 0) + 1
        self._idle.pop(block, None)

    def _make_room(self, missing: int) -> tuple[list[tuple[int, int, int]], list[int], list[int]]:
        """Free `missing` device slots: move the oldest idle blocks to the host, and evict the oldest blocks there."""
        victims = list(islice(self._idle, max(missing, 0)))
        lost = max(len(victims) - len(self._free_host) - len(self._host), 0)
        leaving = [(block, self._device.pop(block)) for block in victims]
        self._free_device.extend(slot for _, slot in leaving)
        for block in victims:
            del self._idle[block]
        leaving = leaving[lost:]
        evicted: list[int] = []
        while len(self._free_host) < len(leaving):
            block, slot = self._host.popitem(last=False)
            evicted.append(block)
            self._free_host.append(slot)
        # Slots are paired in ascending order, so that adjacent slots stay adjacent, which makes copies faster.
        targets = _take(self._free_host, len(leaving))
        swap_out = [(block, slot, targets.pop()) for block, slot in sorted(leaving, key=_slot)]
        target_of = {block: target for block, _, target in swap_out}
        self._host.update((block, target_of[block]) for block, _ in leaving)
        return swap_out, evicted, victims[:lost]


def _take(free: list[int], count: int) -> list[int]:
    """Remove `count` slots from the end of a free list; pop() on the result gives them in ascending order."""
    start = len(free) - count
    taken = sorted(free[start:], reverse=True)
    del free[start:]
    return taken


def _slot(item: tuple[int, int]) -> int:
    return item[1]
