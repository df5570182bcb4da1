"""An independent model of KV layouts in numpy: where each element of a sequence lies in the tensors of a cache.

A sequence is an array `[layer, plane, token, head, element]` of a whole model, with planes for keys and values (one
plane in a latent model). The model places elements token by token, and uses nothing of a `KvLayout` but its fields.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from llm_datadist.native import Cache, Engine, KvLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

LAYERS, HEADS, DIM = 3, 8, 4


def sequence(tokens: int, seed: int, *, heads: int = HEADS, planes: int = 2) -> np.ndarray:
    """Return a sequence of 16-bit elements."""
    drawn = np.random.default_rng(seed).integers(0, 1 << 16, (LAYERS, planes, tokens, heads, DIM), dtype=np.uint16)
    return np.asarray(drawn)


def layout(tokens: int = 16, heads: tuple[int, int] | None = None, **given: Any) -> KvLayout:
    """Return a layout of the model of this file; `given` replaces other arguments."""
    held = {"heads": HEADS} if heads is None else {"heads": range(*heads), "total_heads": HEADS}
    return KvLayout(**{"layers": LAYERS, "head_dim": DIM, "dtype": "uint16", "block_tokens": tokens, **held, **given})


def latent(tokens: int = 16, **given: Any) -> KvLayout:
    """Return a latent layout."""
    return KvLayout(
        **{"layers": LAYERS, "head_dim": DIM, "dtype": "uint16", "kv": "latent", "block_tokens": tokens, **given}
    )


def rank(index: int, of: int) -> tuple[int, int]:
    """Return the heads of a tensor-parallel rank."""
    return index * HEADS // of, (index + 1) * HEADS // of


def blank(of: KvLayout, rows: int, fill: int) -> list[np.ndarray]:
    """Return the bytes of a cache in which every byte is `fill`."""
    row = of.block_tokens * len(of.heads) * DIM * 2 * (2 if of.kv == "k_then_v" else 1)
    return [np.full((rows, row), fill, np.uint8) for _ in range(len(of.layers) * (2 if of.kv == "separate" else 1))]


def put(
    tensors: Sequence[np.ndarray], of: KvLayout, blocks: Sequence[int], whole: np.ndarray,
    src: int = 0, dst: int = 0, count: int | None = None,
) -> Sequence[np.ndarray]:  # fmt: skip
    """Write `count` tokens of a sequence, from `src` on, at position `dst` of the sequence in `blocks`."""
    for step in range(whole.shape[2] - src if count is None else count):
        block, at = blocks[(dst + step) // of.block_tokens], (dst + step) % of.block_tokens
        for local, layer in enumerate(of.layers):
            for plane in range(whole.shape[1]):
                tensor = tensors[2 * local + plane if of.kv == "separate" else local]
                row = tensor[block].view(np.uint16)
                if of.kv == "k_then_v":
                    row = row.reshape(2, -1)[plane]
                for number, head in enumerate(of.heads):
                    nhd = of.order == "NHD"
                    slot = at * len(of.heads) + number if nhd else number * of.block_tokens + at
                    row[slot * DIM : (slot + 1) * DIM] = whole[layer, plane, src + step, head]
    return tensors


def write(cache: Cache, tensors: Sequence[np.ndarray]) -> None:
    """Set the bytes of a cache."""
    for view, made in zip(cache.tensors, tensors):
        view.numpy().reshape(len(made), -1).view(np.uint8)[:] = made


def holds(cache: Cache, tensors: Sequence[np.ndarray]) -> bool:
    """Whether a cache has these bytes."""
    views = [view.numpy() for view in cache.tensors]
    assert len(views) == len(tensors) > 0
    return all((view.reshape(len(made), -1).view(np.uint8) == made).all() for view, made in zip(views, tensors))


def owner(engine: Engine, name: str, of: KvLayout, blocks: Sequence[int], whole: np.ndarray) -> Cache:
    """Allocate a cache that holds a sequence in `blocks`."""
    cache = engine.allocate(name, of, blocks=max(blocks) + 2)
    write(cache, put(blank(of, max(blocks) + 2, 0xAA), of, blocks, whole))
    return cache


def reader(engine: Engine, name: str, of: KvLayout, rows: int) -> tuple[Cache, list[np.ndarray]]:
    """Allocate a cache in which every byte is 0x55. Return it, and these bytes."""
    cache, made = engine.allocate(name, of, blocks=rows), blank(of, rows, 0x55)
    write(cache, made)
    return cache, made
