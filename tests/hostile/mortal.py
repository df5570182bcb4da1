"""A peer in a process of its own, which a test kills while a message or payload is in a ring.

`python -m hostile.mortal`, run in the folder of the tests, plays one of the roles until the process is killed.
Not for: what the engine does afterwards (`tests/test_killed_ring_peers.py`).
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
from typing import Any, Callable

from . import messages as m
from .client import PAYLOAD_RING, RING, Link, Listener, Offer, Peer, RingWire, Tender, Wire, dial_local, frame

WIDE_ROWS, WIDE_BYTES = 20_000, 8  # of the cache that `unread_request` describes


def tell(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def wait_until_full(wire: RingWire) -> None:
    """Wait until the engine has filled its ring. Nothing is read meanwhile."""
    wire.wait(lambda: wire.word(wire.WRITTEN) - wire.read == RING)


def send_half(wire: RingWire, message: bytes) -> None:
    """Send half of a message, and wait until the engine has read it."""
    wire.send(frame(message)[: len(frame(message)) // 2])
    wire.wait(lambda: wire.word(wire.READ) == wire.written)


def half_request(wire: RingWire) -> None:
    send_half(wire, m.describe(m.name_blocks(1)))


def unread_replies(wire: RingWire) -> None:
    """Send requests and read none of the replies."""

    def send() -> None:
        while True:
            wire.wait(lambda: wire.written - wire.word(wire.READ) <= RING // 2)
            wire.say(m.ping())

    threading.Thread(target=send, daemon=True).start()
    wait_until_full(wire)


def unread_payload(wire: RingWire) -> None:
    """Read more rows than the ring for payload holds, and take none of their bytes."""
    cache = int(wire.ask(m.describe(m.name_blocks(1)))["cache"])
    plan = m.plan_spans([m.span(0, 0, 2 * PAYLOAD_RING)], 1)
    wire.say(m.read(m.name_blocks(1), cache, plan, 0, 2 * PAYLOAD_RING))
    wire.payload.wait(lambda: wire.payload.word(wire.WRITTEN) == PAYLOAD_RING)


def half_reply(wire: RingWire) -> None:
    """Answer the first request with half of a reply."""
    wire.hear()
    send_half(wire, m.described())


def unread_request(wire: RingWire) -> None:
    """Describe a cache of many blocks, and do not read the request for them."""
    wire.hear()
    wire.say(m.described(rows=WIDE_ROWS, row_bytes=WIDE_BYTES))
    wait_until_full(wire)


def half_payload(wire: RingWire) -> None:
    """Send half of the bytes of one row."""
    for reply in (m.described(rows=WIDE_ROWS, row_bytes=WIDE_BYTES), m.ready(2 * WIDE_BYTES)):
        wire.hear()
        wire.say(reply)
    wire.payload.send(bytes(WIDE_BYTES))
    wire.payload.wait(lambda: wire.payload.word(wire.READ) == WIDE_BYTES)


CALLERS: dict[str, Callable[[RingWire], None]] = {
    "half request": half_request,
    "unread replies": unread_replies,
    "unread payload": unread_payload,
}
OWNERS: dict[str, Callable[[RingWire], None]] = {
    "half reply": half_reply,
    "unread request": unread_request,
    "half payload": half_payload,
}


def call(role: str, given: dict[str, Any]) -> None:
    """Open a call stream with rings of a link that another process holds."""
    peer = Peer(given["cluster"], given["token"], instance=given["instance"])
    unused = Wire(socket.socket())  # another process has the control stream
    wire = Link(peer, given["link"], unused, lambda: dial_local(given["name"])).ringed_call()
    CALLERS[role](wire)
    tell("ready")
    rest()


def serve(role: str, given: dict[str, Any]) -> None:
    """Accept a link and call streams with rings. Report the address."""
    peer = Peer(given["cluster"], given["token"])

    def play(wire: RingWire) -> None:
        OWNERS[role](wire)
        tell("ready")

    tell(Listener(peer, lambda _: None, Offer(), rings=play, linked=Tender().add).address)
    rest()


def rest() -> None:
    """Wait to be killed."""
    while True:
        signal.pause()


if __name__ == "__main__":
    role, given = sys.argv[1], json.loads(sys.argv[2])
    (call if role in CALLERS else serve)(role, given)
