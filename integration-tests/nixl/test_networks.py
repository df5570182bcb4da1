"""Pulls by a real NIXL between two network namespaces, over a cable that is throttled: ``make test-nixl``.

`LLM_DATADIST_NIXL_LIBRARY` is the path of `libnixl_capi.so`, and `LLM_DATADIST_OTHER_NIXL_LIBRARY` that of another
version, if there is one. NIXL uses TCP, so these tests say nothing about RDMA devices.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from network_namespaces import Hosts, possible
from peers import LINK_FAILED, Ends
from two_hosts import LIMIT_MS, check_late_pull, check_pull_moved_by_library, linked, options

if TYPE_CHECKING:
    from collections.abc import Iterator

LIBRARY = os.environ.get("LLM_DATADIST_NIXL_LIBRARY", "")
OTHER = os.environ.get("LLM_DATADIST_OTHER_NIXL_LIBRARY", "")
OPTIONS = options("nixl", LIBRARY)

pytestmark = pytest.mark.skipif(not (LIBRARY and possible()), reason="needs a real NIXL and network namespaces")


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Ends() as ends:
        yield Hosts(ends, {"UCX_TLS": "tcp"})


def test_pulls_use_nixl(hosts: Hosts) -> None:
    check_pull_moved_by_library(*linked(hosts, OPTIONS))


def test_late_pull_over_throttled_cable_writes_nothing_afterwards(hosts: Hosts) -> None:
    """The pull needs more than a second, and its limit is shorter.

    UCX may abort the owner afterwards, so it is not asked again.
    """
    reader, _ = linked(hosts, OPTIONS, LIMIT_MS)
    hosts.throttle(100)
    check_late_pull(reader, 7)


@pytest.mark.skipif(not OTHER, reason="needs another version of NIXL")
def test_different_versions_refuse_to_link(hosts: Hosts) -> None:
    reader, owner = hosts.open(OPTIONS, options("nixl", OTHER))
    assert reader.link_clusters([owner.at])[1] == [LINK_FAILED]
    assert "uses NIXL" in reader.said()
