"""``KvLayout``: what the rows of a cache mean, so that pulls and pushes can convert between caches.

The original does not have this class. A cache without a layout is rows of bytes, as in the original.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Optional, TypeVar, Union

from llm_datadist._core import check_kv_layout

if TYPE_CHECKING:
    from collections.abc import Sequence

    from typing_extensions import dataclass_transform
else:

    def dataclass_transform(**_: bool) -> Any:
        """Stand in for the decorator for type checkers, which ``typing`` has since Python 3.11."""
        return lambda of: of


__all__ = ["KvLayout"]

_Class = TypeVar("_Class", bound=type)


@dataclass_transform(frozen_default=True)
def _read_only(of: _Class) -> _Class:
    """Mark a class whose attributes cannot be assigned, for type checkers.

    ``dataclasses.dataclass`` would import ``inspect``, which takes a tenth of the time of importing this package.
    """
    return of


@_read_only
class KvLayout:
    """The meaning of each row of a cache: a block of tokens, with some heads of some layers of a model.

    A row is one block of a blocks cache, or one batch slot. Give the layout to ``CacheDesc(..., layout=...)``, or make
    the descriptor with ``CacheDesc.of_layout``. A pull or push between caches whose layouts differ copies every element
    to the place where the destination has it. Layouts are immutable, compare and hash by value, and can be pickled. The
    element type is that of the descriptor. The original does not have this class.

    Attributes:
        tokens_per_block: number of tokens in a row.
        head_dim: number of elements of one head of one token, or of one latent vector.
        layers: the layers of the model that the cache holds, as a ``range``.
        total_kv_heads: number of key-value heads of the model.
        kv_heads: the key-value heads that the cache holds, as a ``range``.
        order: the order of dimensions in a row, ``"NHD"`` or ``"HND"``.
        kv: where keys and values are, ``"separate"``, ``"k_then_v"``, ``"latent"`` or ``"single"``.
        model: the name or version of the model.

    Args:
        tokens_per_block: number of tokens in a row (uint32, above 0).
        head_dim: number of elements of one head of one token (uint32, above 0).
        layers: the global numbers of the layers that the cache holds, at least one: a ``range`` of step 1, or a pair
            ``(first, end)``.
        total_kv_heads: number of key-value heads of the whole model (uint32, above 0); 1 by default in a latent layout.
        kv_heads: the key-value heads that the cache holds, a ``range`` or pair inside ``range(total_kv_heads)``. All by
            default.
        order: ``"NHD"``: ``[tokens, heads, head_dim]``; ``"HND"``: ``[heads, tokens, head_dim]``.
        kv: ``"separate"``: tensor ``2 * l`` has the keys of the *l*-th layer of the cache, and tensor ``2 * l + 1`` its
            values; ``"k_then_v"``: one tensor for each layer, in whose rows the keys of all tokens precede the values;
            ``"latent"``: one tensor for each layer, with one latent vector for each token (MLA), the same in every
            rank; ``"single"``: one tensor for each layer, with one vector for each head of each token. What it holds is
            up to the program, for example a key followed by its value.
        model: name or version of the model, at most 256 bytes of UTF-8. Both sides of a transfer must have the same.

    Raises:
        TypeError: an argument has the wrong type, or ``total_kv_heads`` is missing.
        ValueError: an integer is outside uint32.
        LLMException: ``LLM_PARAM_INVALID``: an invalid value.
    """

    tokens_per_block: int
    head_dim: int
    layers: range
    total_kv_heads: int
    kv_heads: range
    order: str
    kv: str
    model: str

    __match_args__ = ("tokens_per_block", "head_dim", "layers", "total_kv_heads", "kv_heads", "order", "kv", "model")

    def __init__(
        self,
        tokens_per_block: int,
        *,
        head_dim: int,
        layers: Union[range, Sequence[int]],
        total_kv_heads: Optional[int] = None,
        kv_heads: Optional[Union[range, Sequence[int]]] = None,
        order: str = "NHD",
        kv: str = "separate",
        model: str = "",
    ) -> None:
        if total_kv_heads is None:
            if kv != "latent":
                raise TypeError('total_kv_heads is required unless kv="latent"')
            total_kv_heads = 1
        heads = (0, total_kv_heads) if kv_heads is None else kv_heads
        values = {"head_dim": head_dim, "layers": layers, "total_kv_heads": total_kv_heads, "kv_heads": heads}
        for name, value in {"tokens_per_block": tokens_per_block, **values}.items():
            object.__setattr__(self, name, value)
        for name, text in {"order": order, "kv": kv, "model": model}.items():
            object.__setattr__(self, name, text)
        check_kv_layout(self)
        object.__setattr__(self, "layers", _range(layers))
        object.__setattr__(self, "kv_heads", _range(heads))

    def __setattr__(self, name: str, value: Any) -> None:
        raise _frozen(f"cannot assign to field {name!r}")

    def __delattr__(self, name: str) -> None:
        raise _frozen(f"cannot delete field {name!r}")

    def __eq__(self, other: object) -> bool:
        same = isinstance(other, KvLayout) and type(other) is type(self)
        return vars(self) == vars(other) if same else NotImplemented

    def __hash__(self) -> int:
        return hash(tuple(getattr(self, name) for name in KvLayout.__match_args__))

    def __repr__(self) -> str:
        values = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"{type(self).__qualname__}({values})"

    def __replace__(self, /, **changes: Any) -> KvLayout:
        return type(self)(**{**vars(self), **changes})

    @property
    def num_tensors(self) -> int:
        """Number of tensors of a cache with this layout: one or two for each layer."""
        return len(self.layers) * (2 if self.kv == "separate" else 1)

    def shape(self, num_blocks: int) -> list[int]:
        """Return the shape of one tensor of ``num_blocks`` rows.

        This is ``[blocks, tokens, heads, head_dim]`` for ``"NHD"`` and ``[blocks, heads, tokens, head_dim]`` for
        ``"HND"``. A ``"k_then_v"`` layout has a dimension of 2 after the blocks, and a ``"latent"`` layout has no
        dimension of heads.
        """
        tokens, heads = self.tokens_per_block, len(self.kv_heads)
        if self.kv == "latent":
            return [num_blocks, tokens, self.head_dim]
        planes = [2] if self.kv == "k_then_v" else []
        block = [tokens, heads] if self.order == "NHD" else [heads, tokens]
        return [num_blocks, *planes, *block, self.head_dim]


def _range(given: Union[range, Sequence[int]]) -> range:
    return given if isinstance(given, range) else range(given[0], given[1])


def _frozen(text: str) -> AttributeError:
    from dataclasses import FrozenInstanceError  # noqa: PLC0415  (imported when it is needed)

    return FrozenInstanceError(text)
