"""One sequence that moves between caches with different KV layouts: which piece of memory goes where.

A piece is the largest run of bytes that is contiguous on both sides. Not for: how the engine plans such a move. This is
an independent model of it.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from between.adapter import PULL, Case

HEAD_DIM, ELEMENT = 128, 2
HEAD = HEAD_DIM * ELEMENT  # bytes of one head of one token
TOTAL_HEADS = 128
NHD: Final = "NHD"
HND: Final = "HND"


@dataclass(frozen=True)
class Rank:
    """The heads of a rank, their order in a block, and the tokens of a block."""

    first: int
    end: int
    tokens: int
    order: Literal["NHD", "HND"] = NHD

    @property
    def heads(self) -> int:
        """Number of heads."""
        return self.end - self.first

    @property
    def block_bytes(self) -> int:
        """Bytes of a block in one tensor."""
        return self.tokens * self.heads * HEAD

    def offset(self, token: int, head: int) -> int:
        """Bytes from the start of a block to one head of one token."""
        at = head - self.first
        return HEAD * (token * self.heads + at if self.order == NHD else at * self.tokens + token)


@dataclass(frozen=True)
class Move:
    """A named pair of layouts: the ranks of prefill, which all lie in the remote memory, and the rank of decode."""

    name: str
    owners: tuple[Rank, ...]
    local: Rank

    @property
    def piece(self) -> int:
        """Bytes that are contiguous on both sides."""
        if self.owners[0].order != self.local.order:
            return HEAD
        return HEAD * min(len(self.common(owner)) for owner in self.owners)

    def common(self, owner: Rank) -> range:
        """The heads that one owner and the rank of decode both hold."""
        return range(max(owner.first, self.local.first), min(owner.end, self.local.end))

    def steps(self, owner: Rank) -> tuple[np.ndarray, np.ndarray]:
        """Offsets of the pieces of a block in the owner and in the rank of decode, in pieces, token by token."""
        heads = self.common(owner)[:: self.piece // HEAD]
        positions = [(token, head) for token in range(self.local.tokens) for head in heads]
        sides = ([rank.offset(*position) // self.piece for position in positions] for rank in (owner, self.local))
        remote, local = (np.array(side, dtype=np.int64) for side in sides)
        return remote, local


@dataclass(frozen=True)
class Sequence(Case):
    """A pull of some blocks of all tensors. `src` and `dst` are its pieces, in units of a piece."""

    move: Move
    tensors: int
    rows: int  # blocks of every cache
    src_blocks: np.ndarray
    dst_blocks: np.ndarray
    steps: tuple[tuple[np.ndarray, np.ndarray], ...]  # of each owner; a scheduler computes them once

    def pieces(self) -> tuple[np.ndarray, np.ndarray]:
        """The pieces of the source and of the destination for these lists of blocks."""
        src, dst, tensor = [], [], np.arange(self.tensors)[:, None, None]
        local_row = self.move.local.block_bytes // self.block
        local = tensor * (self.rows * local_row) + self.dst_blocks[:, None] * local_row
        for index, (owner, (remote_steps, local_steps)) in enumerate(zip(self.move.owners, self.steps)):
            row = owner.block_bytes // self.block
            remote = (tensor + index * self.tensors) * (self.rows * row) + self.src_blocks[:, None] * row
            src.append((remote + remote_steps).ravel())
            dst.append((local + local_steps).ravel())
        return np.concatenate(src), np.concatenate(dst)

    def anew(self) -> Case:
        """The pieces computed again, as for a list of blocks that nobody has seen before."""
        src, dst = self.pieces()
        return Case(self.op, self.block, src, dst)


def sequence_of(move: Move, tensors: int, size: int, total: int) -> Sequence:
    """A pull of about `total` bytes in random blocks, between memories of at most `size` bytes."""
    owners = move.owners
    rows = size // (tensors * max(sum(owner.block_bytes for owner in owners), move.local.block_bytes))
    blocks = min(rows, max(1, total // (tensors * moved_of_block(move))))
    chance = np.random.default_rng(total + move.piece)
    src, dst = (chance.permutation(rows)[:blocks] for _ in range(2))
    none = np.zeros(0, dtype=np.int64)
    steps = tuple(move.steps(owner) for owner in owners)
    case = Sequence(PULL, move.piece, none, none, move, tensors, rows, src, dst, steps)
    remote, local = case.pieces()
    return dataclasses.replace(case, src=remote, dst=local)


def moved_of_block(move: Move) -> int:
    """Bytes of a block that move in one tensor."""
    return sum(len(move.common(owner)) for owner in move.owners) * move.local.tokens * HEAD
