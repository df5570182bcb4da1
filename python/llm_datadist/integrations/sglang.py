"""``KeeperStorage``: SGLang's pages in a keeper, which outlives the servers of its host and serves all of them.

SGLang's storage threads call it and wait. A page is copied between the host pool and the keeper by address: one value
for each piece of a page, such as its keys and its values. The keeper decides what is replaced.
"""

from __future__ import annotations

import hashlib
import logging
import time
import uuid
from contextlib import suppress
from ctypes import c_ubyte
from typing import TYPE_CHECKING, Any, Callable

import torch
from sglang.srt.mem_cache.hicache_storage import HiCacheStorage

from llm_datadist.integrations.store_access import KeeperLog, namespace, parts
from llm_datadist.integrations.store_settings import StoreSettings, server_version
from llm_datadist.native import Store

if TYPE_CHECKING:
    from collections.abc import Sequence

__all__ = ["KeeperStorage"]

logger = logging.getLogger("llm_datadist.sglang")

_TESTED = "0.5.23"
# Keys of the extra config that SGLang itself reads.
_OF_SGLANG = ("backend_name", "module_path", "class_name", "interface_v1")
_KV_POOL = "kv"
# Fields of host pools that say how the bytes of a piece are divided. Each kind of pool has some of them.
_SHAPE = ("layer_num", "head_num", "head_dim", "v_head_dim", "kv_lora_rank", "qk_rope_head_dim", "kv_cache_dim")
# The last byte of a key is the number of a piece.
_DIGEST_BYTES, _MAX_PIECES = 27, 256


class KeeperStorage(HiCacheStorage):  # type: ignore[misc]
    """A storage backend of SGLang's HiCache, for ``--hicache-storage-backend dynamic`` with ``interface_v1``.

    Several threads may use it. Only the constructor and the methods that register pools raise; all others answer that
    nothing was found or stored.

    Args:
        storage_config: SGLang's ``HiCacheStorageConfig``. Its ``extra_config`` has ``StoreSettings``.
        kwargs: not used.

    Raises:
        ValueError: an option is unknown, missing or has a wrong value, or the configuration is not supported.
    """

    def __init__(self, storage_config: Any, kwargs: Any = None) -> None:  # noqa: ARG002 - SGLang gives it
        options = dict(storage_config.extra_config or {})
        if options.get("interface_v1") not in (1, True):
            raise ValueError(
                f"interface_v1={options.get('interface_v1')!r} is not supported: give 1, for direct copies"
            )
        for name in _OF_SGLANG:
            options.pop(name, None)
        self._settings = StoreSettings.parse("KeeperStorage", options)
        if storage_config.should_split_heads:
            raise ValueError("tp_lcm_size above the TP size is not supported: leave it out")
        self._config = storage_config
        self._pages: _Pages | None = None

    def register_mem_pool_host(self, mem_pool_host: Any) -> None:
        """Take the host pool, and open the store of its pages.

        Raises:
            ValueError: SGLang does not say something that decides the bytes of a page.
            Error: the keeper refuses the store; for example, its values are smaller than a piece of a page.
        """
        super().register_mem_pool_host(mem_pool_host)
        self.close()
        self._pages = _Pages(mem_pool_host, self._config, self._settings)

    def register_mem_host_pool_v2(self, host_pool: Any, host_pool_name: Any) -> None:
        """Take the host pool once more, under its name.

        Raises:
            ValueError: it is another pool, which hybrid models and draft models have.
        """
        if str(host_pool_name) != _KV_POOL:
            raise ValueError(f"host pool {str(host_pool_name)!r} is not supported: only models with {_KV_POOL!r} alone")
        super().register_mem_host_pool_v2(host_pool, host_pool_name)

    def batch_exists(self, keys: list[str], extra_info: Any = None) -> int:  # noqa: ARG002 - SGLang gives it
        """Return how many pages the keeper has from the start, without a message to it."""
        there = self._call(_Pages.exists, keys)
        return there.index(False) if False in there else len(there)

    def batch_get_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:  # noqa: ARG002
        """Copy pages into the host pool. Say which of them are complete."""
        return self._call(_Pages.get, keys, host_indices)

    def batch_set_v1(self, keys: list[str], host_indices: Any, extra_info: Any = None) -> list[bool]:  # noqa: ARG002
        """Have the keeper copy pages. Say which of them it has."""
        return self._call(_Pages.put, keys, host_indices)

    def _call(self, call: Callable[..., list[bool]], keys: Sequence[str], *more: Any) -> list[bool]:
        pages = self._pages
        if pages is None or not keys:
            return [False] * len(keys)
        try:
            return call(pages, keys, *more)
        except Exception as error:  # noqa: BLE001 - a miss costs less than a failed operation
            pages.failed(error)
            return [False] * len(keys)

    def exists(self, key: str) -> bool:
        """Say whether the keeper has a page."""
        return self.batch_exists([key]) == 1

    def get(self, key: str, target_location: Any = None, target_sizes: Any = None) -> None:  # noqa: ARG002
        """Find nothing: pages are copied by ``batch_get_v1``."""
        return

    def batch_get(self, keys: list[str], target_locations: Any = None, target_sizes: Any = None) -> list[None]:  # noqa: ARG002
        """Find nothing: pages are copied by ``batch_get_v1``."""
        return [None] * len(keys)

    def set(self, key: str, value: Any = None, target_location: Any = None, target_sizes: Any = None) -> bool:  # noqa: ARG002
        """Store nothing: pages are copied by ``batch_set_v1``."""
        return False

    def batch_set(
        self,
        keys: list[str],  # noqa: ARG002 - SGLang gives it, like the next three
        values: Any = None,  # noqa: ARG002
        target_locations: Any = None,  # noqa: ARG002
        target_sizes: Any = None,  # noqa: ARG002
    ) -> bool:
        """Store nothing: pages are copied by ``batch_set_v1``."""
        return False

    def clear(self) -> bool:
        """Find nothing any more that was stored before, such as pages of weights that have been replaced.

        The keeper keeps the pages for other servers. From now on, this one shares its pages with none. If its ranks
        have the same pages, it stores none either: they would have to agree on a namespace, and do not know each other.

        Returns:
            Whether new pages can be stored. SGLang ignores it.
        """
        old, self._pages = self._pages, None
        if old is None:
            return True
        old.close()
        if self._config.is_mla_model and self._config.tp_size > 1:
            logger.error("pages of TP ranks that share them were cleared: attach the storage with another revision")
            return False
        try:
            self._pages = _Pages(self.mem_pool_host, self._config, self._settings, cleared=uuid.uuid4().hex)
        except Exception as error:  # noqa: BLE001 - SGLang goes on without storage
            old.failed(error)
        return self._pages is not None

    def get_stats(self) -> None:
        """Return ``None``: SGLang's own metrics count the pages and the times of its operations."""
        return

    def close(self) -> None:
        """End the connection to the keeper. Calls that wait for it end."""
        pages, self._pages = self._pages, None
        if pages is not None:
            pages.close()


class _Pages:
    """The pages of a host pool as values of a keeper.

    All values of a store have the same size. So pieces of another size have a store of their own.
    """

    def __init__(self, pool: Any, config: Any, settings: StoreSettings, cleared: str = "") -> None:
        self._pool, self._timeout_s = pool, settings.timeout_s
        first = torch.arange(config.logical_page_size or pool.page_size)
        self._sizes = [int(size) for size in pool.get_page_buffer_meta(first)[1]]
        if not 0 < len(self._sizes) <= _MAX_PIECES:
            raise ValueError(f"a page has {len(self._sizes)} pieces, and may have 1 to {_MAX_PIECES}")
        facts = _facts(pool, config, self._sizes)
        text = namespace("sglang", config.model_name, settings.revision, {**facts, "cleared": cleared or "never"})
        self._stores: list[tuple[Store, list[int]]] = []
        try:
            for size in sorted(set(self._sizes)):
                one = f"{text} {size}"
                options = settings.store_options
                store = Store(settings.socket, namespace=one, value=size, timeout=self._timeout_s, **options)
                self._stores.append((store, [at for at, piece in enumerate(self._sizes) if piece == size]))
                logger.info("llm_datadist keeps pieces of pages of %d bytes at %s as %r", size, settings.socket, one)
        except BaseException:
            self.close()
            raise
        self._log = KeeperLog(logger, settings.socket)

    def exists(self, keys: Sequence[str]) -> list[bool]:
        """Say which pages the keeper has, with all of their pieces."""
        return self._each(keys, None, lambda store, keys, _: store.exists(keys))

    def get(self, keys: Sequence[str], host_indices: Any) -> list[bool]:
        """Copy pages out of the keeper."""
        buffers = self._buffers(keys, host_indices)
        return self._each(keys, buffers, lambda store, keys, into: store.get(keys, into))

    def put(self, keys: Sequence[str], host_indices: Any) -> list[bool]:
        """Copy pages into the keeper."""
        end = time.monotonic() + self._timeout_s

        def put(store: Store, keys: list[bytes], values: list[Any]) -> list[bool]:
            left_s = end - time.monotonic()
            return store.put(keys, values, timeout=left_s) if left_s > 0 else [False] * len(keys)

        return self._each(keys, self._buffers(keys, host_indices), put)

    def failed(self, error: Exception) -> None:
        """Log that a call has raised an exception."""
        self._log.error(error)

    def close(self) -> None:
        """Close the stores."""
        for store, _ in self._stores:
            with suppress(Exception):
                store.close()

    def _buffers(self, keys: Sequence[str], host_indices: Any) -> list[Any]:
        """Return the memory of each piece of each page.

        Raises:
            ValueError: the pages have other pieces than those for which the stores were opened.
        """
        addresses, sizes = self._pool.get_page_buffer_meta(host_indices)
        if list(sizes) != self._sizes * len(keys) or len(addresses) != len(sizes):
            raise ValueError(f"{len(keys)} pages have pieces of {sizes} bytes, and each should have {self._sizes}")
        return [(c_ubyte * size).from_address(int(address)) for address, size in zip(addresses, sizes)]

    def _each(
        self,
        keys: Sequence[str],
        buffers: list[Any] | None,
        call: Callable[[Store, list[bytes], list[Any]], list[bool]],
    ) -> list[bool]:
        """Call each store with its pieces. Return which pages had success with all of them.

        Calls with buffers are noted, because the store counts what they miss.
        """
        digests = [hashlib.sha224(key.encode()).digest()[:_DIGEST_BYTES] for key in keys]
        good = [True] * len(keys)
        for store, pieces in self._stores:
            chain = [(page, piece) for page in range(len(keys)) for piece in pieces]
            for part in parts(chain):
                named = [digests[page] + bytes((piece,)) for page, piece in part]
                memory = [buffers[page * len(self._sizes) + piece] for page, piece in part] if buffers else []
                done = call(store, named, memory)
                if buffers:
                    self._log.noted(store, done)
                for (page, _), right in zip(part, done):
                    good[page] &= right
        return good


def _facts(pool: Any, config: Any, sizes: list[int]) -> dict[str, Any]:
    """Return what the keys of pages do not have, and what decides the bytes of a page."""
    return {
        # No release of SGLang promises the bytes of its pages to the next one.
        "sglang": server_version(logger, "sglang", _TESTED),
        "dtype": _dtype(pool),
        "layout": pool.layout,
        "pool": type(pool).__name__,
        "page_size": pool.page_size,
        "logical_page_size": config.logical_page_size or pool.page_size,
        "pieces": sizes,
        # The layers of the rank, whose number alone says nothing: ranks may have as many of others.
        "start_layer": getattr(pool, "start_layer", None),
        "end_layer": getattr(pool, "end_layer", None),
        "shape": {name: getattr(pool, name, "none") for name in _SHAPE},
        # All TP ranks of such models have the same pages.
        "tp": "any" if config.is_mla_model else [config.tp_rank, config.tp_size],
        "pp": [config.pp_rank, config.pp_size],
        "cp": [config.attn_cp_rank, config.attn_cp_size],
        "dcp": [config.dcp_rank, config.dcp_size],
    }


def _dtype(pool: Any) -> str | None:
    """Return the element type of a pool; ``None`` if it is unknown.

    SGLang keeps 8-bit floats of all kinds, and smaller ones, as bytes. Its option says which.
    """
    text = str(pool.dtype)
    if text != "torch.uint8":
        return text
    try:
        from sglang.srt.runtime_context import get_model  # noqa: PLC0415 - for the pools that need it

        kind = get_model().kv_cache_dtype
    except (ImportError, AttributeError, ValueError):  # another version of SGLang, or no server
        return None
    return f"{text} {kind}" if kind else None
