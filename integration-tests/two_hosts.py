"""Pulls between two network namespaces by a library that reads other hosts, for the tests with real libraries."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from peers import GRACE, OK, TIMEOUT, Peer, by_blocks, equal, pattern

if TYPE_CHECKING:
    from network_namespaces import Hosts

BLOCKS, ELEMENTS = 16, 1 << 20
CACHE_BYTES = BLOCKS * ELEMENTS
LIMIT_MS = 400
"""Limit in milliseconds of a pull that must time out."""


def options(backend: str, library: str) -> dict[str, Any]:
    """Return the options of an engine that uses this library of the backend."""
    return {
        "llm__LinkToken": "a shared token of some length",
        "llm__TransferBackend": backend,
        f"llm__{backend.capitalize()}Library": library,
        "llm__LinkHeartbeat": 100,
        "llm__LinkSilence": 1500,
        "pool": 64 << 20,
        "accessible": True,
    }


def linked(hosts: Hosts, given: dict[str, Any], limit_ms: int = 20_000) -> tuple[Peer, Peer]:
    """Return the reader and the owner, two linked engines with a cache of 16 MiB each."""
    given = {**given, "llm__SyncKvCacheWaitTime": limit_ms}
    reader, owner = hosts.open(given, given)
    assert reader.link_clusters([owner.at])[1] == [OK]
    owner.allocate("owned", BLOCKS, ELEMENTS // 2, 2, blocks=True, keys=[by_blocks(0)], seed=5)
    reader.allocate("read", BLOCKS, ELEMENTS // 2, 2, blocks=True, seed=1)
    return reader, owner


def pull(reader: Peer) -> Any:
    """Pull all blocks. Return the status, and the seconds that it took."""
    status, seconds, _ = reader.timed("pull_blocks", by_blocks(2), "read", range(BLOCKS), range(BLOCKS))
    return status, seconds


def arrived(reader: Peer, seed: int = 5) -> bool:
    """Whether the cache of the reader contains the bytes of the owner, or those of another seed."""
    return bool(equal(reader.read("read"), pattern(seed, 2, BLOCKS, ELEMENTS // 2)))


def check_pull_moved_by_library(reader: Peer, owner: Peer) -> None:
    """Pull, and check the bytes and their path."""
    assert pull(reader)[0] == OK
    assert arrived(reader)
    [link] = reader.links()
    assert link["paths"]["fabric"]["bytes"] == CACHE_BYTES
    assert link["paths"]["sockets"]["bytes"] == 0
    assert link["sockets_reason"] is None
    assert owner.links()[0]["transport"] == "tcp"


def check_late_pull(reader: Peer, seed: int) -> None:
    """Pull over a cable that is too slow, and check that no byte arrives after the end."""
    status, seconds = pull(reader)
    assert status == TIMEOUT
    assert seconds < LIMIT_MS / 1000 + GRACE
    reader.fill("read", seed)
    time.sleep(0.5)
    assert arrived(reader, seed), "bytes came after the end"
