"""Fixtures of the native tests: engines of this process and of others, all closed when a test ends."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Callable

import pytest

from llm_datadist.native import Cache, Engine, Keeper, Peer, PeerUp

from .helpers import LIMIT, Remote, address, allocate, next_of

if TYPE_CHECKING:
    from collections.abc import Iterator
    from contextlib import ExitStack
    from pathlib import Path

Open = Callable[..., Engine]


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Run each test that links engines over the transports that its module names."""
    if "carried_by" in metafunc.fixturenames:
        metafunc.parametrize("carried_by", getattr(metafunc.module, "TRANSPORTS", ["auto"]))


@dataclass
class Pair:
    """Two linked engines of this process: `peer` is the remote one as the local one sees it, `back` the reverse."""

    local: Engine
    remote: Engine
    peer: Peer
    back: Peer

    def caches(self, **given: Any) -> tuple[Cache, Cache]:
        """Allocate a cache `kv` at both ends, with different bytes."""
        return allocate(self.local, seed=1, **given), allocate(self.remote, seed=2, **given)


@pytest.fixture
def start(held: ExitStack) -> Open:
    """A function that opens an engine with small pools."""

    def begin(**given: Any) -> Engine:
        pools = {"pool": "2MiB", "host_pool": "2MiB", "page": "4KiB", "timeout": LIMIT}
        engine = Engine(**{**pools, **given})
        held.callback(engine.close)
        return engine

    return begin


@pytest.fixture
def engine(start: Open) -> Engine:
    return start(name="local")


@pytest.fixture
def pair(start: Open, carried_by: str) -> Pair:
    local = start(name="local", transport=carried_by)
    remote = start(name="remote", transport=carried_by, listen="127.0.0.1:0")
    peer = local.link(address(remote)).result(LIMIT)
    assert next_of(local, PeerUp).peer == peer
    return Pair(local, remote, peer, next_of(remote, PeerUp).peer)


@pytest.fixture
def begin_remote(held: ExitStack) -> Callable[..., Remote]:
    """A function that starts an engine in another process."""

    def begin(**given: Any) -> Remote:
        remote = Remote(**given)
        held.callback(remote.end)
        return remote

    return begin


@pytest.fixture
def remote(begin_remote: Callable[..., Remote]) -> Remote:
    """An engine named `remote` in another process, with a cache `kv` of seed 2."""
    begun = begin_remote(name="remote")
    begun.do("kv = allocate(engine, seed=2)")
    return begun


@pytest.fixture
def keeper(socket: Path) -> Iterator[Keeper]:
    """A keeper of 64 values of 64 KiB."""
    with Keeper(memory="4MiB", socket=socket) as opened:
        yield opened
