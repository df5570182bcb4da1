"""Pulls by a real UCX between two network namespaces, over a cable that is throttled and cut: ``make test-ucx``.

`LLM_DATADIST_UCX_LIBRARY` is the path of `libucp.so.0`, and `LLM_DATADIST_OTHER_UCX_LIBRARY` that of another version,
if there is one. UCX uses TCP, so these tests say nothing about RDMA devices.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING

import pytest

from network_namespaces import Hosts, possible
from peers import GRACE, LINK_FAILED, OK, TIMEOUT, UNLINKED, Ends, eventually
from two_hosts import LIMIT_MS, arrived, check_late_pull, check_pull_moved_by_library, linked, options, pull

if TYPE_CHECKING:
    from collections.abc import Iterator

LIBRARY = os.environ.get("LLM_DATADIST_UCX_LIBRARY", "")
OTHER = os.environ.get("LLM_DATADIST_OTHER_UCX_LIBRARY", "")
OPTIONS = options("ucx", LIBRARY)

pytestmark = pytest.mark.skipif(not (LIBRARY and possible()), reason="needs a real UCX and network namespaces")


@pytest.fixture
def hosts() -> Iterator[Hosts]:
    with Ends() as ends:
        yield Hosts(ends, {"UCX_TLS": "tcp"})


def test_pulls_use_ucx(hosts: Hosts) -> None:
    check_pull_moved_by_library(*linked(hosts, OPTIONS))


def test_late_pulls_over_throttled_cable_write_nothing_afterwards(hosts: Hosts) -> None:
    """The pull needs more than a second, and its limit is shorter."""
    reader, _ = linked(hosts, OPTIONS, LIMIT_MS)
    hosts.throttle(100)
    for seed in range(3):
        check_late_pull(reader, seed)
    hosts.throttle(10_000)
    eventually(lambda: pull(reader)[0] == OK, what="a pull")
    assert arrived(reader)


def test_cut_cable_ends_pull_and_link(hosts: Hosts) -> None:
    reader, owner = linked(hosts, OPTIONS, LIMIT_MS)
    assert pull(reader)[0] == OK
    hosts.plug(up=False)
    status, seconds = pull(reader)
    assert status in {TIMEOUT, UNLINKED}
    assert seconds < LIMIT_MS / 1000 + GRACE
    reader.fill("read", 3)
    eventually(lambda: reader.links() == owner.links() == [], 5, "the end of the link")
    hosts.plug(up=True)
    eventually(lambda: reader.link_clusters([owner.at], 1000)[1] == [OK], what="the link")
    assert arrived(reader, 3), "bytes came after the end"
    eventually(lambda: pull(reader)[0] == OK, what="a pull")
    assert arrived(reader)


@pytest.mark.skipif(not OTHER, reason="needs another version of UCX")
def test_different_versions_refuse_to_link(hosts: Hosts) -> None:
    reader, owner = hosts.open(OPTIONS, options("ucx", OTHER))
    assert reader.link_clusters([owner.at])[1] == [LINK_FAILED]
    assert "uses UCX" in reader.said()
