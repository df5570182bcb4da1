"""Between two processes: pulls of a sequence from one KV layout into another, for new lists of blocks.

Within the clock, each system makes what a server makes for blocks that it did not know before: ours takes the lists of
blocks; NIXL and Mooncake take the address of every piece, which numpy computes. A second row of each peer has all of
that prepared. Not for: equal layouts (``between``), or the limit (``benches/layouts.rs``).
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

from between import Pairs
from between.adapter import PULL
from between.pair import Pattern
from between.sequence import HND, Move, Rank, sequence_of
from between.systems import POOL, REGISTERED, TCP, Peer, of_kind
from rows import OURS, Row

if TYPE_CHECKING:
    from collections.abc import Iterator

    from ask import Ask

MIB = 1 << 20
LARGEST_MIB = 128  # of the memory of each side
TENSORS, SMALL_TENSORS = 16, 2  # the second in a run of a few MiB
# Bytes of a pull. Some peers need seconds for 16 MiB of short pieces.
TOTALS, TOTALS_OF_SHORT = (4 * MIB, 64 * MIB), (4 * MIB, 16 * MIB)
SHORT = 4 << 10  # bytes of a piece
# Ranks of 16 and of 64 heads have pieces of 4 and 16 KiB, where they are the smaller ones.
MOVES = {
    "tp24": tuple(Move("TP 2 to 4", (Rank(0, 2 * heads, 16),), Rank(heads, 2 * heads, 16)) for heads in (16, 64)),
    "tp21": tuple(
        Move("TP 2 to 1", (Rank(0, heads, 16), Rank(heads, 2 * heads, 16)), Rank(0, 2 * heads, 16))
        for heads in (16, 64)
    ),
    "order": (Move("NHD to HND", (Rank(0, 8, 128),), Rank(0, 8, 128, HND)),),
}
SYSTEMS = (OURS, "nixl", "mooncake")
NOTES = {
    OURS: "lists of blocks and plan within the clock. Peers: within the clock are, with `new lists`, addresses, "
    "descriptors and request; with `new indices`, indices into a list of all pieces and request; with `prepared`, "
    "neither",
    "nixl": "",
    "mooncake": "over tcp, the only way of its CPU wheel; 1,024 pieces a call, its limit",
}


def parts(ask: Ask) -> list[str]:
    """Every pair of layouts in every kind of memory."""
    kinds = (POOL,) if ask.quick else (POOL, REGISTERED, TCP)
    return [f"{kind} {name}" for kind in kinds for name in MOVES]


def run(ask: Ask, part: str) -> Iterator[Row]:
    """All sizes of one part."""
    kind, name = part.split()
    size = min(ask.mib, LARGEST_MIB) * MIB
    tensors = TENSORS if ask.mib >= LARGEST_MIB else SMALL_TENSORS
    pairs = Pairs(ask, peers_of(kind), Pattern(size))
    plain = Row("layouts", f"{PULL} {kind}, {MOVES[name][0].name}", "")
    try:
        yield from pairs.failures(plain)
        for move in MOVES[name]:
            totals = TOTALS if move.piece >= SHORT else TOTALS_OF_SHORT
            for total in totals[:1] if ask.quick else totals:
                case = sequence_of(move, tensors, size, total)
                row = dataclasses.replace(plain, block_bytes=case.block, blocks=case.count, tensors=tensors)
                yield from pairs.cell(row, case)
    finally:
        pairs.end()


def peers_of(kind: str) -> list[Peer]:
    """Ours and the peers that read by address."""
    known = [peer for peer in of_kind(kind) if peer.system in SYSTEMS]
    return [dataclasses.replace(peer, note=NOTES[peer.system]) for peer in known]
