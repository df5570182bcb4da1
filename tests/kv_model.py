"""An independent model of KV layouts in numpy: where each element of a sequence lies in the tensors of a cache.

A sequence is an array `[layer, plane, token, head, element]` of a whole model, with planes for keys and values (one
plane in a latent model). The model places elements token by token, and uses nothing of a `KvLayout` but its fields.
Not for: making caches (`peers.End.allocate_layout`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from llm_datadist.kv_layout import KvLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from peers import End

LAYERS, HEADS, DIM = 3, 8, 4


def sequence(tokens: int, seed: int, *, heads: int = HEADS, layers: int = LAYERS, planes: int = 2) -> np.ndarray:
    """Return a sequence of 16-bit elements."""
    drawn = np.random.default_rng(seed).integers(0, 1 << 16, (layers, planes, tokens, heads, DIM), dtype=np.uint16)
    return np.asarray(drawn)


def layout(tokens: int = 16, heads: tuple[int, int] | None = None, **given: Any) -> KvLayout:
    """Return a layout of the model of this file; `given` replaces other arguments."""
    return KvLayout(
        tokens, **{"head_dim": DIM, "layers": range(LAYERS), "total_kv_heads": HEADS, **given}, kv_heads=heads
    )


def latent(tokens: int = 16, **given: Any) -> KvLayout:
    """Return a latent layout."""
    return KvLayout(tokens, head_dim=DIM, kv="latent", **{"layers": range(LAYERS), **given})


def rank(index: int, of: int, total: int = HEADS) -> tuple[int, int]:
    """Return the heads of a tensor-parallel rank. More ranks than heads hold copies of a head each."""
    if of > total:
        head = index * total // of
        return head, head + 1
    return index * total // of, (index + 1) * total // of


def blank(of: KvLayout, rows: int, fill: int) -> list[np.ndarray]:
    """Return the bytes of a cache in which every byte is `fill`."""
    tensors = (of.layers.stop - of.layers.start) * (2 if of.kv == "separate" else 1)
    heads = of.kv_heads.stop - of.kv_heads.start
    row = of.tokens_per_block * heads * DIM * 2 * (2 if of.kv == "k_then_v" else 1)
    return [np.full((rows, row), fill, np.uint8) for _ in range(tensors)]


def put(
    tensors: Sequence[np.ndarray], of: KvLayout, blocks: Sequence[int], whole: np.ndarray,
    src: int = 0, dst: int = 0, count: int | None = None,
) -> Sequence[np.ndarray]:  # fmt: skip
    """Write `count` tokens of a sequence, from `src` on, at position `dst` of the sequence in `blocks`."""
    heads = range(of.kv_heads.start, of.kv_heads.stop)
    for step in range(whole.shape[2] - src if count is None else count):
        block, at = blocks[(dst + step) // of.tokens_per_block], (dst + step) % of.tokens_per_block
        for local, layer in enumerate(range(of.layers.start, of.layers.stop)):
            for plane in range(whole.shape[1]):
                tensor = tensors[2 * local + plane if of.kv == "separate" else local]
                row = tensor[block].view(np.uint16)
                if of.kv == "k_then_v":
                    row = row.reshape(2, -1)[plane]
                for number, head in enumerate(heads):
                    nhd = of.order == "NHD"
                    place = at * len(heads) + number if nhd else number * of.tokens_per_block + at
                    row[place * DIM : (place + 1) * DIM] = whole[layer, plane, src + step, head]
    return tensors


def owner(end: Any, name: str, of: KvLayout, blocks: Sequence[int], whole: np.ndarray, **given: Any) -> None:
    """Allocate a cache at `end` that holds a sequence in `blocks`."""
    rows = max(blocks) + 2
    end.allocate_layout(name, of, rows, **given)
    end.write(name, put(blank(of, rows, 0xAA), of, blocks, whole))


def reader(end: End | Any, name: str, of: KvLayout, rows: int, **given: Any) -> list[np.ndarray]:
    """Allocate a cache at `end` in which every byte is 0x55. Return these bytes."""
    end.allocate_layout(name, of, rows, **given)
    end.paint(name, 0x55)
    return blank(of, rows, 0x55)
