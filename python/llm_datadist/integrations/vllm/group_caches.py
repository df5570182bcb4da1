"""The caches of the engine over the KV cache of one KV cache group of vLLM."""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

from llm_datadist import Error

if TYPE_CHECKING:
    from llm_datadist.integrations.vllm.pages import PageFormat
    from llm_datadist.native import Cache, CacheBuffer, Engine, Grant, Peer, RemoteCache, Rows, Transfer

__all__ = ["HEADS", "PAGES", "VIEWS", "GroupCaches", "Owner", "revoke_all"]

# The views of vLLM's pages.
PAGES, HEADS = "pages", "heads"
VIEWS = {PAGES: 1, HEADS: 2}  # and how many caches each has


@dataclass(frozen=True)
class Owner:
    """A rank of prefill that lends blocks of a request."""

    peer: Peer  # its engine
    heads: range  # the KV heads that it holds
    # For each KV cache group, a token for each cache of the view. None for a group without content.
    grants: list[list[bytes]]


class GroupCaches:
    """The caches of one group: the *pages* view, and the *heads* view of keys and values if the packing is known.

    Args:
        engine: the engine.
        group: the number of the group.
        form: the format of the pages.
    """

    def __init__(self, engine: Engine, group: int, form: PageFormat) -> None:
        self.form = form
        self._engine = engine
        self._group = group
        self._caches: dict[str, list[Cache]] = {PAGES: [], HEADS: []}

    def allocate(self, blocks: int) -> CacheBuffer:
        """Allocate the pages in the pool of the engine, layer after layer. Return their memory."""
        pages = self._engine.allocate(self._name(PAGES, 0), self.form.pages(), blocks=blocks, contiguous=True)
        self._caches[PAGES] = [pages]
        return pages.buffer

    def register(self, addresses: list[int], blocks: int, strides: list[int]) -> None:
        """Register the pages of the layers, unless ``allocate`` has made them.

        Args:
            addresses: the address of block 0 of each layer.
            blocks: number of blocks.
            strides: bytes from one block to the next, for each layer.

        Raises:
            RuntimeError: vLLM did not use the memory of ``allocate``, or the layers have different strides.
        """
        form, pages, stride = self.form, self._caches[PAGES], strides[0]
        if set(strides) != {stride}:
            raise RuntimeError(f"the layers of vLLM's KV cache have different strides: {strides}")
        if not pages:
            name = self._name(PAGES, 0)
            pages.append(self._engine.register(name, addresses, form.pages(), blocks=blocks, stride=stride))
        elif [tensor.address for tensor in pages[0].tensors] != addresses:
            raise RuntimeError('vLLM laid out its KV cache in another way; set "kv_cache_in_pool": false')
        if stride != form.page_bytes:
            return  # rows of heads do not have one stride then
        rows = blocks * len(form.heads)
        for number, packing in enumerate(form.packings()):
            name, layout = self._name(HEADS, number), form.heads_view(packing)
            planes = [address + number * (form.head_bytes // 2) for address in addresses]
            cache = self._engine.register(name, planes, layout, blocks=rows, stride=form.head_bytes)
            self._caches[HEADS].append(cache)

    def lend(self, view: str, blocks: list[int], ttl: float) -> list[Grant]:
        """Lend blocks to readers of a view for ``ttl`` seconds, with one grant for each cache of the view.

        Raises:
            ValueError: this worker does not have the view.
            Error: as for ``Engine.lend``.
        """
        if view == HEADS:
            count = len(self.form.heads)
            blocks = [block * count + head for block in blocks for head in range(count)]
        grants: list[Grant] = []
        try:
            for cache in self._of(view):
                grants.append(self._engine.lend(cache[blocks], ttl=ttl))  # noqa: PERF401 - those before an error count
        except Exception:
            revoke_all(grants)
            raise
        return grants

    def pull_pages(
        self, owners: list[Owner], pairs: list[tuple[int, int]], timeout: float, layers: range | None = None
    ) -> Transfer[None]:
        """Start to pull pages between equal block sizes. Each pair is a block of prefill and a block here.

        ``layers`` are the only ones that are pulled. They need a single owner with the same heads.
        """
        (pages,) = self._of(PAGES)
        src, dst = [pair[0] for pair in pairs], pages[[pair[1] for pair in pairs]]
        # Pairs with the same destination are shares: each owner has some of its heads.
        shares = [(dst, self._remote(owner, PAGES, 0)[src]) for owner in owners]
        if layers is not None:
            shares = [(ours.part(layers=layers), theirs.part(layers=layers)) for ours, theirs in shares]
        return self._pull(shares, [owner.grants[self._group][0] for owner in owners], timeout)

    def pull_heads(
        self, owners: list[Owner], blocks: tuple[list[int], list[int]], tokens: range, size: int, timeout: float
    ) -> Transfer[None]:
        """Start to pull tokens between different block sizes. A block of prefill has ``size`` tokens.

        ``blocks`` are consecutive blocks of the prompt in prefill, and here. The first of each has the first token.
        """
        src, dst = blocks
        held, pairs, grants = self.form.heads, [], []
        for owner in owners:
            for head in [head for head in held if head in owner.heads]:
                theirs = [block * len(owner.heads) + head - owner.heads.start for block in src]
                ours = [block * len(held) + head - held.start for block in dst]
                for number, (cache, packing) in enumerate(zip(self._of(HEADS), self.form.packings())):
                    to = cache[ours].part(tokens=_units(tokens, self.form.block_size, packing.unit))
                    remote = self._remote(owner, HEADS, number)
                    pairs.append((to, remote[theirs].part(tokens=_units(tokens, size, packing.unit))))
                    grants.append(owner.grants[self._group][number])
        return self._pull(pairs, grants, timeout)

    def _pull(self, pairs: list[tuple[Rows, Rows]], grants: list[bytes], timeout: float) -> Transfer[None]:
        # Further parts, layers and receives of this engine may read under the same grants.
        return self._engine.pull(pairs, grant=grants, last=False, timeout=timeout)

    def _of(self, view: str) -> list[Cache]:
        if not self._caches[view]:
            raise ValueError(f"the packing of vLLM's pages is not known ({self.form.isa!r}); use equal block sizes")
        return self._caches[view]

    def _remote(self, owner: Owner, view: str, number: int) -> RemoteCache:
        return owner.peer[self._name(view, number)]

    def _name(self, view: str, number: int) -> str:
        return f"group {self._group}, {view} {number}"


def revoke_all(grants: list[Grant]) -> None:
    """End grants. This does not wait for the reads that run, which fail."""
    for grant in grants:
        with suppress(Error):  # the grant has ended all the same
            grant.revoke()


def _units(tokens: range, size: int, unit: int) -> range:
    """Return the units of a packing that hold tokens, from the block with the first one on.

    A unit moves as a whole, even if only some of its tokens are read.
    """
    first = tokens.start % size
    return range(first // unit, -(-(first + len(tokens)) // unit))
