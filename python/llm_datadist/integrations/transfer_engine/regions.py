"""Which registered regions hold a list of address ranges."""

from __future__ import annotations

import json
from bisect import bisect_right
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterable, Iterator, Sequence

__all__ = ["MAX_ADDRESS", "Piece", "Region", "Regions", "pieces"]

MAX_ADDRESS = 2**64


@dataclass(frozen=True)
class Region:
    """A registered range of addresses.

    Attributes:
        address: its first address.
        length: its bytes.
        number: which region of its engine it is; peers name it by this number.
    """

    address: int
    length: int
    number: int

    @property
    def end(self) -> int:
        """The address behind the last byte."""
        return self.address + self.length


class Regions:
    """Regions that do not overlap, by address.

    Args:
        regions: the regions.
    """

    def __init__(self, regions: Iterable[Region] = ()) -> None:
        self._regions = sorted(regions, key=lambda region: region.address)
        self._starts = [region.address for region in self._regions]

    def __iter__(self) -> Iterator[Region]:
        return iter(self._regions)

    def __len__(self) -> int:
        return len(self._regions)

    def holding(self, address: int, length: int) -> Region | None:
        """Return the region that holds all of a range, or ``None``."""
        at = bisect_right(self._starts, address) - 1
        region = self._regions[at] if at >= 0 else None
        return region if region is not None and address + length <= region.end else None

    def meets(self, address: int, length: int) -> bool:
        """Whether a range has bytes of a region."""
        return any(region.address < address + length and address < region.end for region in self._regions)

    def with_region(self, region: Region) -> Regions:
        """Return these regions and another one."""
        return Regions([*self._regions, region])

    def without(self, number: int) -> Regions:
        """Return these regions without the one with a number."""
        return Regions(region for region in self._regions if region.number != number)

    def to_json(self, first: int, most: int) -> str:
        """Return a part of the list for a peer: at most ``most`` regions from number ``first`` of the list on."""
        part = self._regions[first : first + most]
        return json.dumps([[region.address, region.length, region.number] for region in part])

    @staticmethod
    def list_from(given: object) -> list[Region]:
        """Read a list that a peer has sent.

        Raises:
            ValueError: it is not a list of regions.
        """
        if not isinstance(given, list):
            raise ValueError("not a list of regions")  # noqa: TRY004 - input from the network
        found = []
        for item in given:
            numbers = item if isinstance(item, list) and len(item) == 3 else []  # noqa: PLR2004
            if len(numbers) != 3 or not all(type(number) is int for number in numbers):  # noqa: PLR2004
                raise ValueError(f"{item!r} is not a region")
            address, length, number = numbers
            if not (0 <= address < MAX_ADDRESS and 0 < length <= MAX_ADDRESS - address and 0 <= number < MAX_ADDRESS):
                raise ValueError(f"{item!r} is not a region")
            found.append(Region(address, length, number))
        return found


@dataclass(frozen=True)
class Piece:
    """A range that moves between a local and a remote region."""

    local: Region
    remote: Region
    local_offset: int
    remote_offset: int
    length: int


def pieces(
    local: Regions, remote: Regions, addresses: Sequence[int], peers: Sequence[int], lengths: Sequence[int]
) -> list[Piece]:
    """Return the pieces of a transfer. Ranges that follow each other inside one region on both sides are joined.

    Args:
        local: the regions here.
        remote: the regions of the peer.
        addresses: the first address of each range here.
        peers: the first address of each range at the peer.
        lengths: the bytes of each range.

    Raises:
        LookupError: a range is not inside one region; the exception says which, and on which side.
        ValueError: the lists have different lengths, or a length is not above 0.
    """
    if not len(addresses) == len(peers) == len(lengths):
        raise ValueError(f"lists of {len(addresses)}, {len(peers)} and {len(lengths)} entries must be equally long")
    for length in lengths:
        if length <= 0:
            raise ValueError(f"length={length} must be above 0")
    # Of each piece: its regions, its first address on both sides, and its length.
    joined: list[tuple[Region, Region, int, int, int]] = []
    for address, peer, length in zip(addresses, peers, lengths):
        if joined:
            here, there, start, peer_start, before = joined[-1]
            follows = start + before == address and peer_start + before == peer
            # Adjacent regions are different caches, so a piece must not cross their border.
            if follows and address + length <= here.end and peer + length <= there.end:
                joined[-1] = (here, there, start, peer_start, before + length)
                continue
        joined.append((*_regions_of(local, remote, address, peer, length), address, peer, length))
    return [
        Piece(here, there, address - here.address, peer - there.address, length)
        for here, there, address, peer, length in joined
    ]


def _regions_of(local: Regions, remote: Regions, address: int, peer: int, length: int) -> tuple[Region, Region]:
    here, there = local.holding(address, length), remote.holding(peer, length)
    if here is None:
        raise LookupError(f"{length} bytes at {address:#x} are not registered here")
    if there is None:
        raise LookupError(f"{length} bytes at {peer:#x} are not registered at the peer")
    return here, there
