"""The caches of the engine over the KV cache of one KV cache group of vLLM."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llm_datadist import BlocksCacheKey, CacheDesc, DataType
from llm_datadist.groups import GroupPart

if TYPE_CHECKING:
    from llm_datadist import Cache, CacheManager
    from llm_datadist.events import Grant, Transfer
    from llm_datadist.integrations.vllm.pages import Packing, PageFormat

__all__ = ["HEADS", "PAGES", "VIEWS", "GroupCaches", "Owner", "Tokens"]

# The views of vLLM's pages.
PAGES, HEADS = "pages", "heads"
VIEWS = {PAGES: 1, HEADS: 2}  # and how many caches each has


@dataclass(frozen=True)
class Owner:
    """A rank of prefill that lends blocks of a request.

    Attributes:
        cluster: the cluster of its engine.
        heads: the KV heads that it holds.
        grants: a token for each cache of the view, for each KV cache group, or none for a group without content.
    """

    cluster: int
    heads: range
    grants: list[list[bytes]]


@dataclass(frozen=True)
class Tokens:
    """Consecutive tokens of a prompt, and where the lists of blocks begin on both sides.

    Attributes:
        first: the first token that is read.
        end: the token after the last one.
        src_first: the first token of the first block in prefill.
        dst_first: the first token of the first block here.
    """

    first: int
    end: int
    src_first: int
    dst_first: int


class GroupCaches:
    """The caches of one group: the *pages* view, and the *heads* view of keys and values if the packing is known.

    Args:
        manager: the cache manager of the engine.
        cluster: the cluster of the engine.
        group: the number of the group.
        form: the format of the pages.
    """

    def __init__(self, manager: CacheManager, cluster: int, group: int, form: PageFormat) -> None:
        self.form = form
        self._manager = manager
        self._cluster = cluster
        self._group = group
        self._packings = form.packings()
        self._pages: Cache | None = None
        self._heads: list[Cache] = []

    def allocate(self, blocks: int) -> Any:
        """Allocate the pages in the pool of the engine, layer after layer.

        Returns:
            The memory as one flat tensor of bytes, for ``torch.from_dlpack``.
        """
        layout = self.form.pages()
        desc = CacheDesc.of_layout(layout, blocks, DataType.DT_UINT8)
        self._pages = self._manager.allocate_blocks_cache(desc, self._key(self._cluster, PAGES, 0), contiguous=True)
        return self._pages.buffer()

    def register(self, addresses: list[int], blocks: int, stride: int) -> None:
        """Register the pages of the layers, unless ``allocate`` has made them.

        Args:
            addresses: the address of block 0 of each layer.
            blocks: number of blocks.
            stride: bytes from one block of a layer to the next.

        Raises:
            RuntimeError: vLLM did not use the memory of ``allocate``.
        """
        layout = self.form.pages()
        if self._pages is None:
            desc = CacheDesc(
                layout.num_tensors, layout.shape(blocks), DataType.DT_UINT8, row_stride=stride, layout=layout
            )
            key = self._key(self._cluster, PAGES, 0)
            self._pages = self._manager.register_blocks_cache(desc, addresses, key, True)
        elif self._pages.tensor_addrs != addresses:
            raise RuntimeError('vLLM laid out its KV cache in another way; set "kv_cache_in_pool": false')
        if stride != self.form.page_bytes:
            return  # rows of heads do not have one stride then
        rows, offset = blocks * len(self.form.heads), 0
        for number, packing in enumerate(self._packings):
            layout = self.form.heads_view(packing)
            shape, key = layout.shape(rows), self._key(self._cluster, HEADS, number)
            desc = CacheDesc(
                layout.num_tensors, shape, DataType.DT_UINT8, row_stride=self.form.head_bytes, layout=layout
            )
            planes = [address + offset for address in addresses]
            self._heads.append(self._manager.register_blocks_cache(desc, planes, key, True))
            offset += self.form.head_bytes // 2

    def grant(self, view: str, blocks: list[int], ttl_ms: int) -> list[Grant]:
        """Lend blocks to readers of a view, with one grant for each cache of the view.

        Raises:
            ValueError: this worker does not have the view.
            LLMException: as for ``CacheManager.grant``.
        """
        if view == PAGES:
            caches, rows = [self._pages], blocks
        else:
            count = len(self.form.heads)
            caches, rows = list(self._heads), [block * count + head for block in blocks for head in range(count)]
        if not caches or caches[0] is None:
            raise ValueError(f"the packing of vLLM's pages is not known ({self.form.isa!r})")
        return [self._manager.grant(cache, rows, ttl_ms) for cache in caches if cache is not None]

    def pull_pages(
        self, owners: list[Owner], pairs: list[tuple[int, int]], timeout_ms: int, layers: range | None = None
    ) -> Transfer:
        """Start to pull pages between equal block sizes.

        Args:
            owners: the ranks that are read.
            pairs: the source and the destination block of each page.
            timeout_ms: time limit in milliseconds.
            layers: the layers that are pulled from one owner with the same heads, or ``None`` for all layers.
        """
        if self._pages is None:
            raise RuntimeError("vLLM has not registered its KV cache")
        src, dst = [pair[0] for pair in pairs], [pair[1] for pair in pairs]
        keys = [self._key(owner.cluster, PAGES, 0) for owner in owners]
        grants = [owner.grants[self._group][0] for owner in owners]
        if len(owners) == 1:
            options: dict[str, Any] = {"grant": grants[0], "timeout_ms": timeout_ms}
            if layers is not None:
                options |= {"src_layer_range": layers, "dst_layer_range": layers, "tensor_num_per_layer": 1}
            return self._manager.pull_blocks_async(keys[0], self._pages, src, dst, **options)
        options = {"grant": grants, "timeout_ms": timeout_ms}
        return self._manager.pull_blocks_async(keys, self._pages, [src] * len(owners), dst, **options)

    def pull_heads(
        self, owners: list[Owner], src: list[int], dst: list[int], tokens: Tokens, timeout_ms: int
    ) -> Transfer:
        """Start to pull tokens between different block sizes.

        Args:
            owners: the ranks that are read.
            src: consecutive blocks of the prompt in prefill.
            dst: consecutive blocks of the prompt here.
            tokens: the tokens that are read.
            timeout_ms: time limit in milliseconds.
        """
        if not self._heads:
            raise ValueError(f"the packing of vLLM's pages is not known ({self.form.isa!r}); use equal block sizes")
        parts = [
            self._part(owner, number, packing, head, (src, dst), tokens)
            for owner in owners
            for head in self.form.heads
            if head in owner.heads
            for number, packing in enumerate(self._packings)
        ]
        return self._manager.pull_group_async(parts, timeout_ms=timeout_ms)

    def _part(
        self,
        owner: Owner,
        number: int,
        packing: Packing,
        head: int,
        blocks: tuple[list[int], list[int]],
        tokens: Tokens,
    ) -> GroupPart:
        src, dst = blocks
        unit = packing.unit  # one that is not full moves as a whole
        src_heads, dst_heads = len(owner.heads), len(self.form.heads)

        def of(first: int) -> tuple[int, int]:
            return (tokens.first - first) // unit, -(-(tokens.end - first) // unit)

        return GroupPart(
            self._key(owner.cluster, HEADS, number),
            self._heads[number],
            [block * src_heads + head - owner.heads.start for block in src],
            [block * dst_heads + head - self.form.heads.start for block in dst],
            grant=owner.grants[self._group][number],
            src_tokens=of(tokens.src_first),
            dst_tokens=of(tokens.dst_first),
        )

    def _key(self, cluster: int, view: str, number: int) -> BlocksCacheKey:
        return BlocksCacheKey(cluster, self._group * sum(VIEWS.values()) + (0 if view == PAGES else 1 + number))
