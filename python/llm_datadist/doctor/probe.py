"""What both ends of a measurement share: their options, their caches, and how they recognize each other."""

from __future__ import annotations

import ctypes
import json
import mmap
import secrets
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from llm_datadist import BlocksCacheKey, CacheDesc, DataType, LLMConfig, LLMDataDist, LLMRole, __version__

if TYPE_CHECKING:
    from typing_extensions import Self

    from llm_datadist import Cache

BLOCK_BYTES, BLOCKS = 16 * 1024, 1024
CACHE_BYTES = BLOCK_BYTES * BLOCKS
POOL_MODEL, REGISTERED_MODEL = 0, 1
"""Model ids in the keys of the two caches."""
LONGEST_CALL_MS = 10_000
START = "start `llm-datadist doctor --serve` there, and give its address"
"""What to do if another program answers."""
_FORMAT = 1
_NAME = "llm-datadist doctor"
_FILL = 0x5A


@dataclass(frozen=True)
class Choice:
    """Options of an engine that a measurement sets. ``None`` leaves the default of the engine.

    Args:
        transport: the option ``link_transport``.
        backend: the option ``transfer_backend``.
        token_file: the option ``link_token_file``.
        ucx_library: the option ``ucx_library``.
        listen: the option ``listen_ip_info``.
    """

    transport: str | None = None
    backend: str | None = None
    token_file: str | None = None
    ucx_library: str | None = None
    listen: str | None = None

    def options(self) -> dict[str, str]:
        """Return the options of the engine."""
        config = LLMConfig()
        config.device_id = 0
        config.enable_cache_manager = True
        config.enable_remote_cache_accessible = True
        config.mem_pool_cfg = json.dumps({"memory_size": 2 * CACHE_BYTES})
        config.sync_kv_timeout = LONGEST_CALL_MS
        given = {
            "link_transport": self.transport,
            "transfer_backend": self.backend,
            "link_token_file": self.token_file,
            "ucx_library": self.ucx_library,
            "listen_ip_info": self.listen,
        }
        for name, value in given.items():
            if value is not None:
                setattr(config, name, value)
        return config.generate_options()


class ProbeEngine:
    """An engine with two caches of the same shape: one in its pool, one in memory that this process registers.

    Use it in a ``with`` statement, which finalizes the engine.

    Args:
        choice: options of the engine.
    """

    def __init__(self, choice: Choice) -> None:
        cluster = secrets.randbits(62)  # two measurements of one host must not share an id
        self.dist = LLMDataDist(LLMRole.MIX, cluster)
        self._memory = mmap.mmap(-1, CACHE_BYTES)
        self.dist.init(choice.options())
        try:
            self.manager = self.dist.cache_manager
            shape = CacheDesc(1, [BLOCKS, BLOCK_BYTES], DataType.DT_INT8)
            pooled = self.manager.allocate_blocks_cache(shape, BlocksCacheKey(cluster, POOL_MODEL))
            address = ctypes.addressof(ctypes.c_char.from_buffer(self._memory))
            key = BlocksCacheKey(cluster, REGISTERED_MODEL)
            registered = self.manager.register_blocks_cache(shape, [address], key)
            self.caches: dict[int, Cache] = {POOL_MODEL: pooled, REGISTERED_MODEL: registered}
            for cache in self.caches.values():
                # Untouched memory has no pages, and would be measured as faster than it is.
                ctypes.memset(cache.tensor_addrs[0], _FILL, CACHE_BYTES)
            self.dist.set_metadata(_metadata())
        except BaseException:
            self.dist.finalize()
            raise

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.dist.finalize()


def _metadata() -> bytes:
    return json.dumps({"program": _NAME, "format": _FORMAT, "version": __version__}).encode()


def refusal(metadata: bytes) -> str | None:
    """Return why the peer with this metadata cannot be measured, or ``None``. The metadata is not trusted."""
    try:
        found: Any = json.loads(metadata)
    except (ValueError, RecursionError):
        found = None
    if not isinstance(found, dict) or found.get("program") != _NAME:
        return f"another program with an engine answers; {START}"
    if found.get("format") != _FORMAT:
        return "the other side runs another version of `llm-datadist doctor`; use the same version on both sides"
    return None
