"""How vLLM lays out the pages of its KV cache, in terms of ``KvLayout``.

A page is one block of tokens in one layer. On a CPU it has, for each KV head, the keys of all tokens, followed by their
values. The kernels pack keys and values for the vector unit, so a head of a page can be copied as a whole, but the
place of a single token depends on the packing. So the engine has two views of the same memory:

- *pages*: each row is a page. A head of a page counts as one token of one vector. This view serves peers with the same
  block size, also with another number of ranks.
- *heads*: each row is the keys, or the values, of one head of one page. This view serves peers with another block size.

The pages of a GPU have key and value of one head and token together, head after head or token after token. They have
the *pages* view only. Nothing in vLLM describes the place of an element in such a page, so both sides must have the
same attention backend. Some backends divide a page into *slots* that are not the heads of the model. Then ranks read
whole pages only, of ranks with the same heads.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llm_datadist import KvLayout

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["Packing", "PageFormat"]

_LATENT = "MLAAttentionSpec"


@dataclass(frozen=True)
class Packing:
    """How the keys or values of one head of a page are packed: ``[outer, tokens / unit, unit * inner]`` elements."""

    outer: int  # number of parts into which the vectors of the tokens are split
    unit: int  # number of consecutive tokens that are mixed with each other in a part
    inner: int  # elements of one token in a part


@dataclass(frozen=True)
class PageFormat:
    """The format of the pages of one KV cache group in one worker."""

    layers: int  # number of layers
    block_size: int  # tokens in a block
    heads: range  # the KV heads that the worker holds
    total_heads: int  # number of KV heads of the model
    key_size: int  # elements of a key
    value_size: int  # elements of a value
    element_size: int  # bytes of an element
    isa: str  # vLLM's name of the packing, or an empty text if there are no separate keys and values
    tag: str  # what both sides must have in common, beside the numbers
    order: str = "HND"  # how a page is ordered: head after head ("HND") or token after token ("NHD")
    slots: str = ""  # what a page has in place of the heads of the model, or an empty text

    @classmethod
    def of(
        cls, spec: Any, layers: Sequence[Any], heads: range, total_heads: int, order: str, *, shuffled: bool
    ) -> PageFormat:
        """Return the format of the pages of a KV cache group.

        Args:
            spec: vLLM's description of the KV cache (``AttentionSpec``).
            layers: vLLM's attention layers; ``None`` for one that vLLM does not know.
            heads: the KV heads that the worker holds.
            total_heads: number of KV heads of the model.
            order: how the pages are ordered.
            shuffled: whether vLLM shuffles pages (``VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT``).
        """
        kind = type(spec).__name__
        latent = total_heads == 1 and kind == _LATENT
        element = spec.dtype.itemsize
        content = spec.page_size_bytes // (spec.block_size * spec.num_kv_heads * element)
        given = getattr(spec, "num_head_slots", None)
        slots = [f"{given} slots"] * (given is not None) + ["shuffled"] * shuffled
        backends = sorted({layer.get_attn_backend().get_name() for layer in layers if layer is not None})
        return cls(
            *(len(layers), spec.block_size, heads, total_heads),
            *(content - content // 2, content // 2, element),
            isa="" if latent else str(getattr(layers[0], "isa", "")),
            tag="/".join([str(spec.dtype), kind, *backends, *slots]),
            order=order,
            slots=", ".join(slots),
        )

    @property
    def head_bytes(self) -> int:
        """Bytes of one head of a page."""
        return self.block_size * (self.key_size + self.value_size) * self.element_size

    @property
    def page_bytes(self) -> int:
        """Bytes of a page."""
        return len(self.heads) * self.head_bytes

    def summary(self) -> str:
        """Return what all ranks of prefill and decode have in common.

        The packing is left out: vLLM chooses it later. The engine compares it with the layouts of the caches.
        """
        sizes = f"{self.key_size} + {self.value_size} elements"
        return f"{self.layers} layers of {self.total_heads} heads of {sizes}, {self.tag}"

    def pages(self) -> KvLayout:
        """Return the layout of the *pages* view."""
        by_token = self.order == "NHD" and not self.slots
        tokens = self.block_size if by_token else 1
        packing = f"{self.isa}/{self.order}"
        if self.slots:
            packing += f" of {self.slots}, {len(self.heads)} heads"
        return KvLayout(
            layers=self.layers,
            block_tokens=tokens,
            heads=self.heads,
            total_heads=self.total_heads,
            head_dim=self.head_bytes // tokens,
            dtype="uint8",
            order="NHD" if by_token else "HND",
            kv="single",
            model=f"{self.tag}/{packing}/{self.block_size}",
        )

    def packings(self) -> list[Packing]:
        """Return how keys and values are packed, or an empty list if that is not known.

        Tests compare these with what vLLM's kernel writes.
        """
        size = self.key_size
        if size != self.value_size or self.order != "HND" or self.slots:
            return []
        if self.isa in ("vec", "vec16"):
            return [Packing(size, 1, 1), Packing(1, 1, size)]
        if self.isa == "amx" and self.element_size == 2:  # noqa: PLR2004 - bfloat16, the only type of this packing
            return [Packing(1, 16, size), Packing(size // 16, 2, 16)]
        return []

    def heads_view(self, packing: Packing) -> KvLayout:
        """Return the layout of the *heads* view of the keys or the values."""
        return KvLayout(
            layers=self.layers,
            block_tokens=self.block_size // packing.unit,
            heads=packing.outer,
            head_dim=packing.unit * packing.inner * self.element_size,
            dtype="uint8",
            order="HND",
            kv="single",
            model=f"{self.tag}/{self.isa}",
        )
