"""The model: a decoder-only transformer in numpy, float32, weights drawn from a seed.

RMSNorm, rotary positions, grouped-query attention, SwiGLU. Keys and values are written to a cache and read back from
it, also within one prompt. Not for: the layout of the cache (`layouts`), or the order of computation (`generation`).

The same calls with the same shapes give the same bits in any process of one machine, as long as BLAS uses one thread,
which `__main__` ensures. BLAS sums in another order if the number of requests in a batch differs. Therefore, all runs
form the same batches.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Callable, NamedTuple, Protocol

import numpy as np

if TYPE_CHECKING:
    from collections.abc import Sequence

    from numpy.typing import NDArray

    Array = NDArray[np.float32]

EPSILON = np.float32(1e-5)
ROTARY_BASE = 10_000.0


class Shape(NamedTuple):
    """Sizes of a model; `tokens` is the longest sequence."""

    layers: int = 12
    hidden: int = 256
    heads: int = 8
    kv_heads: int = 4
    inner: int = 704
    vocabulary: int = 512
    tokens: int = 512

    @property
    def head_dim(self) -> int:
        """Values of one head."""
        return self.hidden // self.heads


class Chunk(NamedTuple):
    """Tokens of one request that are computed together, after the `start` tokens that are already in the cache."""

    request: int
    start: int
    tokens: Sequence[int]


class Cache(Protocol):
    """Keys and values of all layers and requests, each token `[kv_heads, head_dim]`."""

    def write(self, layer: int, request: int, start: int, keys: Array, values: Array) -> None:
        """Store keys and values of tokens from position `start` on."""

    def read(self, layer: int, request: int, tokens: int) -> tuple[Array, Array]:
        """Return keys and values of the first `tokens` positions, as C-contiguous arrays."""
        raise NotImplementedError


class Split(NamedTuple):
    """The part of the attention that one tensor-parallel rank computes.

    A rank attends to `kv_heads` only, and only these go through its cache. `gather` returns the results of all ranks,
    side by side. Everything else is computed by every rank, so that all sums have the order of a single process.
    """

    kv_heads: range
    gather: Callable[[Array], Array]


class Layer(NamedTuple):
    """Weights of one layer; matrices are applied from the right."""

    attention_norm: Array
    query: Array
    key: Array
    value: Array
    output: Array
    mlp_norm: Array
    gate: Array
    up: Array
    down: Array


class Model:
    """A model with weights from a seed. By default, it is not split between ranks."""

    def __init__(self, shape: Shape, seed: int, split: Split | None = None) -> None:
        dice = np.random.default_rng(seed)

        def matrix(rows: int, columns: int) -> Array:
            drawn: Array = dice.standard_normal((rows, columns), np.float32)
            drawn *= np.float32(rows**-0.5)
            return drawn

        def norm() -> Array:
            drawn: Array = dice.uniform(0.75, 1.25, shape.hidden).astype(np.float32)
            return drawn

        def layer() -> Layer:
            wide, narrow, inner = shape.hidden, shape.kv_heads * shape.head_dim, shape.inner
            attention = (norm(), matrix(wide, wide), matrix(wide, narrow), matrix(wide, narrow), matrix(wide, wide))
            return Layer(*attention, norm(), matrix(wide, inner), matrix(wide, inner), matrix(inner, wide))

        self.shape = shape
        self._split = split or Split(range(shape.kv_heads), lambda mixed: mixed)
        self.embedding: Array = dice.standard_normal((shape.vocabulary, shape.hidden), np.float32)
        self.layers = [layer() for _ in range(shape.layers)]
        self.final_norm = norm()
        self.unembedding = matrix(shape.hidden, shape.vocabulary)
        self._cos, self._sin = _rotary(shape)

    def forward(self, chunks: Sequence[Chunk], cache: Cache, computed: Callable[[int], None] = lambda _: None) -> Array:
        """Compute a batch and return the logits after the last token of each chunk, `[chunks, vocabulary]`.

        `computed` is called with each layer once its keys and values are complete and no longer read or written.
        """
        hidden = self.embedding[np.concatenate([chunk.tokens for chunk in chunks])]
        for number, layer in enumerate(self.layers):
            hidden = hidden + self._attention(number, layer, rms_norm(hidden, layer.attention_norm), chunks, cache)
            computed(number)
            hidden = hidden + swiglu(layer, rms_norm(hidden, layer.mlp_norm))
        last = np.cumsum([len(chunk.tokens) for chunk in chunks]) - 1
        logits: Array = rms_norm(hidden[last], self.final_norm) @ self.unembedding
        return logits

    def _attention(self, number: int, layer: Layer, hidden: Array, chunks: Sequence[Chunk], cache: Cache) -> Array:
        """Attend within each request: projections of the whole batch at once, scores request by request."""
        shape, (own, gather) = self.shape, self._split
        kv, shared = slice(own.start, own.stop), shape.heads // shape.kv_heads
        asking = slice(own.start * shared, own.stop * shared)
        queries = (hidden @ layer.query).reshape(-1, shape.heads, shape.head_dim)[:, asking]
        keys = (hidden @ layer.key).reshape(-1, shape.kv_heads, shape.head_dim)[:, kv]
        values = (hidden @ layer.value).reshape(-1, shape.kv_heads, shape.head_dim)[:, kv]
        parts, first = [], 0
        for chunk in chunks:
            here = slice(first, first + len(chunk.tokens))
            first, end = here.stop, chunk.start + len(chunk.tokens)
            cos, sin = self._cos[chunk.start : end], self._sin[chunk.start : end]
            cache.write(number, chunk.request, chunk.start, rotate(keys[here], cos, sin), values[here])
            seen = cache.read(number, chunk.request, end)
            parts.append(attend(rotate(queries[here], cos, sin), *seen, chunk.start))
        mixed: Array = gather(np.concatenate(parts)) @ layer.output
        return mixed


def attend(queries: Array, keys: Array, values: Array, start: int) -> Array:
    """Causal grouped-query attention of tokens from position `start` on; `[tokens, heads * head_dim]`.

    The operands of the products are contiguous, because numpy may sum others in another order. So each head has the
    same bits, however many heads the arrays have.
    """
    (count, heads, head_dim), (seen, kv_heads, _) = queries.shape, keys.shape
    grouped = queries.reshape(count, kv_heads, heads // kv_heads, head_dim)
    asked, known = (np.ascontiguousarray(part) for part in (grouped.transpose(1, 2, 0, 3), keys.transpose(1, 2, 0)))
    scores = asked @ known[:, None] * np.float32(head_dim**-0.5)
    if count > 1:
        scores[..., np.arange(seen) > start + np.arange(count)[:, None]] = -np.inf
    scores -= scores.max(axis=-1, keepdims=True)
    np.exp(scores, out=scores)
    scores /= scores.sum(axis=-1, keepdims=True)
    mixed = scores @ np.ascontiguousarray(values.transpose(1, 0, 2))[:, None]
    rows: Array = mixed.transpose(2, 0, 1, 3).reshape(count, heads * head_dim)
    return rows


def rotate(heads: Array, cos: Array, sin: Array) -> Array:
    """Turn each pair (value i, value i + half) of every head by the angle of its position."""
    left, right = np.split(heads, 2, axis=-1)
    cos, sin = cos[:, None], sin[:, None]
    return np.concatenate([left * cos - right * sin, right * cos + left * sin], axis=-1, dtype=np.float32)


def rms_norm(hidden: Array, weight: Array) -> Array:
    """Scale each row to a mean square of 1, then by the weight."""
    scaled: Array = hidden / np.sqrt(np.mean(hidden * hidden, axis=-1, keepdims=True) + EPSILON) * weight
    return scaled


def swiglu(layer: Layer, hidden: Array) -> Array:
    """Run the gated feed-forward part."""
    gate = hidden @ layer.gate
    mixed: Array = np.matmul(gate / (1 + np.exp(-gate)) * (hidden @ layer.up), layer.down, dtype=np.float32)
    return mixed


def _rotary(shape: Shape) -> tuple[Array, Array]:
    """Cosine and sine of every position and pair."""
    half = shape.head_dim // 2
    angles = np.outer(np.arange(shape.tokens), ROTARY_BASE ** (-np.arange(half) / half))
    return np.cos(angles).astype(np.float32), np.sin(angles).astype(np.float32)
