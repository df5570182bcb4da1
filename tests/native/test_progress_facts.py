"""Transfers over several streams that break: the error counts the bytes of the whole transfer."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import pytest

from llm_datadist.native import KvLayout, PeerLost
from peers import Proxy

from .helpers import LIMIT, address, fails

if TYPE_CHECKING:
    from .conftest import Open

TOTAL = 64 << 20
NHD, HND = (
    KvLayout(layers=4, block_tokens=16, heads=8, head_dim=1024, dtype="uint8", order=order) for order in ("NHD", "HND")
)


@pytest.mark.parametrize("layout", [None, NHD, HND], ids=["shape", "layout", "other layout"])
@pytest.mark.parametrize("way", ["down", "up"])
def test_bytes_of_a_cut_transfer_are_those_of_the_whole(start: Open, way: str, layout: KvLayout | None) -> None:
    """The bytes that pass are more than one of the four streams carries, and do not suffice for all four."""
    remote = start(pool="64MiB", transport="tcp", listen="127.0.0.1:0")
    engine = start(pool="64MiB", transport="tcp")
    if layout is None:
        shape: dict[str, Any] = {"tensors": 8, "shape": (1 << 17,), "dtype": "uint8"}
        kv, _ = (each.allocate("kv", blocks=64, **shape) for each in (engine, remote))
    else:
        kv, _ = engine.allocate("kv", layout, blocks=64), remote.allocate("kv", NHD, blocks=64)
    with Proxy(address(remote)) as wire:
        peer = engine.link(wire.at).result(LIMIT)
        wire.allow(way, 3 * TOTAL // 4, cut=True)
        if way == "down":
            error = fails(PeerLost, lambda: engine.pull(kv[:], peer["kv"][:64]))
        else:
            error = fails(PeerLost, lambda: engine.push(peer["kv"][:64], kv[:]))
    copied, whole = int(error.facts["copied_bytes"]), int(error.facts["of_bytes"])
    assert (whole, copied <= whole) == (TOTAL, True), str(error)
    if way == "up":
        assert copied > TOTAL // 4, "the bytes of all streams count, and at most 4 MiB of each are not counted yet"
