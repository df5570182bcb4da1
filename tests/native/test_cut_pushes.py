"""A push whose link ends while the peer reads: the peer stops, because nobody keeps the memory for it any more."""

from __future__ import annotations

import contextlib
import time

from llm_datadist.native import Engine, Error, Peer
from peers import eventually

from .helpers import LIMIT

SIZE = 192 << 20
PAGE = 4096
# Each thread that reads finishes the unit that it has begun.
UNITS = 8 * (4 << 20)


def test_push_stops_when_its_link_ends() -> None:
    source, target = bytearray(b"\x11") * SIZE, bytearray(SIZE)
    stopped = 0
    with Engine(listen="127.0.0.1:0", copy_workers=2) as remote, Engine(copy_workers=2) as local:
        remote.register("remote", [memoryview(target).cast("B", (1, SIZE))])
        own = local.register("own", [memoryview(source).cast("B", (1, SIZE))])
        for _ in range(10):
            target[:] = bytes(SIZE)
            peer = local.link(remote.address).result(LIMIT)
            push = local.push(peer["remote"][[0]], own[[0]])
            eventually(lambda: any(target[::PAGE]))
            push.cancel()

            def is_cut(peer: Peer = peer) -> bool:
                with contextlib.suppress(Error):
                    peer.close(timeout=0.005).result(LIMIT)
                return not local.peers

            eventually(is_cut)
            with contextlib.suppress(Error):
                push.result(LIMIT)
            eventually(lambda: not remote.peers)
            before = sum(target[::PAGE]) // 0x11 * PAGE
            time.sleep(0.3)
            after = sum(target[::PAGE]) // 0x11 * PAGE
            assert after - before <= UNITS
            stopped += after < SIZE
    assert stopped, "each push ended before its link"
