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
SIZES: dict[str, Any] = {"layers": 4, "block_tokens": 16, "heads": 8, "head_dim": 1024, "dtype": "uint8"}
NHD, HND, PACKED = KvLayout(**SIZES), KvLayout(**SIZES, order="HND"), KvLayout(**SIZES, kv="k_then_v")


@pytest.mark.parametrize("layout", [None, NHD, HND, PACKED], ids=["shape", "layout", "other order", "two plans"])
@pytest.mark.parametrize("way", ["down", "up"])
def test_bytes_of_a_cut_transfer_are_those_of_the_whole(start: Open, way: str, layout: KvLayout | None) -> None:
    """More bytes pass than one of the four streams carries, but fewer than all four carry."""
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
    arrived = sum(end - begin for _, ranges in getattr(error, "arrived", None) or () for begin, end in ranges)
    assert arrived * (TOTAL // 64 // 8) <= copied
    if way == "up":
        # At most 4 MiB of each stream are not counted yet. Of two plans, the first one has moved all its bytes.
        least = TOTAL // 2 if layout is PACKED else TOTAL // 4
        assert copied > least, str(error)
