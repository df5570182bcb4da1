"""Pulls by a real NIXL between two network namespaces, over a cable that is throttled: ``make test-nixl``.

`LLM_DATADIST_NIXL_LIBRARY` is the path of `libnixl_capi.so`, and `LLM_DATADIST_OTHER_NIXL_LIBRARY` that of another
version, if there is one. NIXL uses TCP, so these tests say nothing about RDMA devices.
"""

from __future__ import annotations

import os
import time
from typing import TYPE_CHECKING, Any

import pytest

from network_namespaces import Hosts, possible
from peers import GRACE, LINK_FAILED, OK, TIMEOUT, Ends, Peer, by_blocks, equal, pattern

if TYPE_CHECKING:
    from collections.abc import Iterator

LIBRARY = os.environ.get("LLM_DATADIST_NIXL_LIBRARY", "")
OTHER = os.environ.get("LLM_DATADIST_OTHER_NIXL_LIBRARY", "")
OPTIONS = {
    "llm__LinkToken": "a shared token of some length",
    "llm__TransferBackend": "nixl",
    "llm__NixlLibrary": LIBRARY,
    "llm__LinkHeartbeat": 100,
    "llm__LinkSilence": 1500,
    "pool": 64 << 20,
    "accessible": True,
}
BLOCKS, ELEMENTS = 16, 1 << 20

pytestmark = pytest.mark.skipif(not (LIBRARY and possible()), reason="needs a real NIXL and network namespaces")


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Ends() as ends:
        yield Hosts(ends, {"UCX_TLS": "tcp"})


def linked(hosts: Hosts, limit_ms: int = 20_000) -> tuple[Peer, Peer]:
    """Two engines with a cache of 16 MiB each."""
    given = {**OPTIONS, "llm__SyncKvCacheWaitTime": limit_ms}
    near, far = hosts.open(given, given)
    assert near.link_clusters([far.at])[1] == [OK]
    far.allocate("f", BLOCKS, ELEMENTS // 2, 2, blocks=True, keys=[by_blocks(0)], seed=5)
    near.allocate("n", BLOCKS, ELEMENTS // 2, 2, blocks=True, seed=1)
    return near, far


def pull(near: Peer) -> Any:
    """Pull all blocks. Return the status, and the seconds that it took."""
    status, seconds, _ = near.timed("pull_blocks", by_blocks(2), "n", range(BLOCKS), range(BLOCKS))
    return status, seconds


def test_pulls_use_nixl(hosts: Hosts) -> None:
    near, far = linked(hosts)
    assert pull(near)[0] == OK
    assert equal(near.read("n"), pattern(5, 2, BLOCKS, ELEMENTS // 2))
    [link] = near.links()
    assert link["paths"]["fabric"]["bytes"] == BLOCKS * ELEMENTS
    assert link["paths"]["sockets"]["bytes"] == 0
    assert link["sockets_reason"] is None
    assert far.links()[0]["transport"] == "tcp"


def test_a_throttled_cable(hosts: Hosts) -> None:
    """The pull needs more than a second, and has less. UCX may abort the peer afterwards, so it is not asked again."""
    near, _ = linked(hosts, limit_ms=400)
    hosts.throttle(100)
    status, seconds = pull(near)
    assert status == TIMEOUT
    assert seconds < 0.4 + GRACE
    near.fill("n", 7)
    time.sleep(0.5)
    assert equal(near.read("n"), pattern(7, 2, BLOCKS, ELEMENTS // 2)), "bytes came after the end"


@pytest.mark.skipif(not OTHER, reason="needs another version of NIXL")
def test_versions_that_differ(hosts: Hosts) -> None:
    near, far = hosts.open(OPTIONS, {**OPTIONS, "llm__NixlLibrary": OTHER})
    assert near.link_clusters([far.at])[1] == [LINK_FAILED]
    assert "uses NIXL" in near.said()
