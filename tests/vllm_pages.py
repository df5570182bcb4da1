"""An independent model of the pages of vLLM: where each element of a key and a value lies.

Not for: the integration itself, which does not use it.
"""

from __future__ import annotations

import numpy as np

DIM = 32
LAYERS = 2


def slot(isa: str, block_size: int, plane: int, token: int, dim: int) -> int:
    """Return the index of an element in one head of a page: plane 0 has the keys, plane 1 the values."""
    base = plane * block_size * DIM
    if isa == "vec":
        return base + (dim * block_size + token if plane == 0 else token * DIM + dim)
    if plane == 0:  # 16 tokens, each pair of elements together
        tile, row = divmod(token, 16)
        return base + tile * 16 * DIM + (dim // 2 * 16 + row) * 2 + dim % 2
    column, inside = divmod(dim, 16)  # 16 elements, each pair of tokens together
    return base + column * block_size * 16 + (token // 2 * 16 + inside) * 2 + token % 2


class Pages:
    """The KV cache of one worker: `[layer, block, head, element]` of 16 bits."""

    def __init__(self, isa: str, block_size: int, heads: range, blocks: int) -> None:
        self.isa = isa
        self.block_size = block_size
        self.heads = heads
        self.memory = np.zeros((LAYERS, blocks, len(heads), 2 * block_size * DIM), np.uint16)

    def write(self, blocks: list[int], tokens: range, whole: np.ndarray, layers: range = range(LAYERS)) -> None:
        """Write tokens of `whole`, which is `[layer, plane, token, head, element]` of the model."""
        for token in tokens:
            for at, value in self._elements(blocks, token, whole, layers):
                self.memory[at] = value

    def wrong(
        self, blocks: list[int], tokens: range, whole: np.ndarray, layers: range = range(LAYERS)
    ) -> list[tuple[int, int]]:
        """Return the tokens and dimensions of the elements that differ from `whole`."""
        found = []
        for token in tokens:
            wrong = [at for at, value in self._elements(blocks, token, whole, layers) if self.memory[at] != value]
            found += [(token, at[-1]) for at in wrong]
        return found

    def _slot(self, local: int, plane: int, token: int, dim: int) -> tuple[int, int]:
        if self.isa != "NHD":
            return local, slot(self.isa, self.block_size, plane, token, dim)
        # The heads of a token lie together. Counted in heads of a page all the same.
        flat = (token * len(self.heads) + local) * 2 * DIM + plane * DIM + dim
        return divmod(flat, 2 * self.block_size * DIM)

    def _elements(
        self, blocks: list[int], token: int, whole: np.ndarray, layers: range
    ) -> list[tuple[tuple[int, ...], int]]:
        block, inside = blocks[token // self.block_size], token % self.block_size
        return [
            (
                (layer, block, *self._slot(local, plane, inside, dim)),
                whole[layer, plane, token, head, dim],
            )
            for layer in layers
            for plane in range(2)
            for local, head in enumerate(self.heads)
            for dim in range(0, DIM, 5)
        ]
